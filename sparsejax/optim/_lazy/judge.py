"""Decides from the traced program whether a transformation can be lifted to rows.

`tx.update` is traced twice: with one row in every table, and with as many as it has.
`tx` treats rows alike if both programs are equal up to the axes of rows: the same
equations, each of which computes an entry of a row from that row's entries
(`primitives.row_params`), or reduces over all rows. A constant that differs is a mean
over rows, and random bits differ in their number.

A reduction over rows is correct if rows that are not read add nothing to it: with a
zero gradient, and any weights and state, its operand is the neutral element, as for the
norm of a gradient. Otherwise the dense run counts rows that a lifted run does not
read. Then

- a reduction of *weights* or of *state* refuses (lamb, lars, fromage, dog, sm3, momo);
- a reduction of updates that an earlier part of a chain computed counts only the rows
  that are read: `clip_by_global_norm` after adam, which is intended. It must not feed
  state, except through a boolean (`zero_nans`), and empty slots must add nothing to it.

Each value carries a `Fact`: its rows, the arguments it was computed from, and its value
in a row without a gradient and in an empty slot, if that is a known constant. A part is
known by the frames of an equation's traceback, which also name it in messages.

Some optimizers are wrong by rows although no program of one step shows it (gradients
held back for later steps): these are refused by the type of their state, `NOT_LIFTED`.
An update that cannot be proved to work row by row needs `lazy(tx, check=False)`.
"""

from __future__ import annotations

import contextlib
import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from sparsejax import _compat
from sparsejax._arguments import PyTree
from sparsejax.optim import _checks as checks, _trees as trees
from sparsejax.optim._lazy import callables, facts, parts, state_leaves
from sparsejax.optim._lazy.facts import (
    Fact,
    RefusedForAll,
    Same,
    Walk,
    argument,
    is_number,
)
from sparsejax.optim._lazy.parts import Part, Reason


# Of the table that a transformation is judged on without parameters. Enough rows and
# columns for the state of optimizers that factor matrices of 128 rows and columns.
ROWS, COLUMNS = 160, 130
MAX_ALONE = 8  # tables judged one by one at init: each traces the update twice

_HOLDS_BACK = (
    "it accumulates gradients and applies them at a later step, where it would have to "
    "update rows that are not read again (sparsejax.optim.accumulate does this by rows)"
)
_OF_MOMENTUM = "its step depends on the momentum of all rows, even those not read"
_OF_DISTANCE = "its step size depends on sums over all rows, even those not read"
# Transformations that are refused by the type of their state: (name, why). `exact` and
# `accumulate` add their own.
NOT_LIFTED: dict[type, tuple[str, str]] = {
    optax.MultiStepsState: ("MultiSteps", _HOLDS_BACK),
    optax.ApplyEvery: ("apply_every", _HOLDS_BACK),
    optax.contrib.MomoState: ("momo", _OF_MOMENTUM),
    optax.contrib.MomoAdamState: ("momo_adam", _OF_MOMENTUM),
    optax.contrib.MuonState: ("scale_by_muon", _OF_MOMENTUM),
    optax.contrib.ProdigyState: ("prodigy", _OF_DISTANCE),
    optax.contrib.DAdaptAdamWState: ("dadapt_adamw", _OF_DISTANCE),
    optax.contrib.MechanicState: ("mechanize", _OF_DISTANCE),
    optax.contrib.DoGState: ("scale_by_dog", _OF_DISTANCE),
    optax.contrib.DoWGState: ("scale_by_dowg", _OF_DISTANCE),
}


# ------------------------------------------------------------------ verdicts


class Verdict(NamedTuple):
    """The tables of a traced step that are refused, and what moves in the others.

    Attributes:
      refused: by table, why it cannot be lifted.
      moved: by table, the parts of a row that change although its gradient is zero:
        `WEIGHTS` and paths of leaves of the state.
    """

    refused: dict[int, Reason]
    moved: dict[int, list[str]]


WEIGHTS = "weights"


class Verdicts:
    """The verdicts on the tables of `tx`, one for each tree of parameters.

    A tree is given by its structure and the specs of its leaves (see `trees`), and a
    table by its leaf index.
    """

    def __init__(self, tx: Any):
        if not checks.is_transformation(tx):
            raise TypeError(f"not an optax transformation: {tx!r}")
        self._judge = trees.remember(functools.partial(_judge, tx))

    def refusal(self, treedef: Any, specs: Sequence[Any]) -> tuple[int, Reason] | None:
        """A table and why it cannot be lifted, or None if some leaf can."""
        tables = tuple(tables_of(specs))
        # Without an answer, update decides, for the leaves that are read by rows.
        one_by_one = len(tables) <= MAX_ALONE
        failed = self._judge(treedef, tuple(specs), tables, one_by_one).refused
        if not tables or len(failed) < len(tables):
            return None
        return tables[0], failed[tables[0]]

    def __call__(
        self, treedef: Any, specs: Sequence[Any], tables: Sequence[int]
    ) -> Verdict:
        """The verdict on some tables, without the faults of other leaves."""
        return self._judge(treedef, tuple(specs), tuple(tables), True)


def tables_of(specs: Sequence[Any]) -> list[int]:
    """The leaves that may be tables, those with the most rows first."""
    arrays = [i for i, s in enumerate(specs) if is_float_array(s)]
    tables = [i for i in arrays if len(specs[i].shape) > 1] or arrays
    return sorted(tables, key=lambda i: specs[i].shape[0], reverse=True)


def is_float_array(spec: Any) -> bool:
    """Returns True if a leaf is an array of floats with at least one axis."""
    if trees.is_none_or_masked(spec) or not spec.shape:
        return False
    return jnp.issubdtype(spec.dtype, jnp.inexact)


@trees.remember
def of_one_table(tx: Any) -> Verdict:
    """The verdict on a transformation of a single table."""
    table = jax.ShapeDtypeStruct((ROWS, COLUMNS), jnp.float32)
    return Verdicts(tx)(jax.tree.structure(0), (table,), (0,))


def is_row_separable(tx: optax.GradientTransformation, params: PyTree = None) -> bool:
    """Returns True if a transformation treats each row independently of the others.

    For a gradient G that is zero outside the rows R, state S and weights W, with
    `U, S' = tx(G, S, W)`, lifting relies on `tx(G[R], S[R], W[R]) = U[R], S'[R]`: no
    row's step may depend on rows that were not read. This is read from the traced
    program of `tx.update`, so it holds for any numbers and for your own
    transformations. A program that cannot be proved to work row by row (a loop over
    rows, say) gives False; if you know that it does, use `lazy(tx, check=False)`.

    True for sgd (with momentum), adam, adamw, adagrad, rmsprop, adadelta, yogi, lion,
    radam, novograd and similar optimizers, also with clipping, schedules, masks and
    `inject_hyperparams`. False for optimizers that need all rows of a table (lamb,
    lars, adafactor, muon, prodigy, sm3, lbfgs), for noise, for accumulation of
    gradients (MultiSteps, apply_every), and for `sparsejax.optim.exact`, which accepts
    SelectedRows itself.

    `optax.clip_by_global_norm` *after* adam counts as separable. Lifted, it clips by
    the norm over the rows that were read, without the momentum of the others. It does
    not after a part that moves even rows that were never read.

    Args:
      tx: an optax transformation.
      params: parameters (or ShapeDtypeStructs) for transformations that need them, like
        `optax.partition` with labels for a particular tree. The answer is then True if
        `lazy(tx).init(params)` accepts them: if some leaf can be lifted. By
        default `tx` is judged on one table.

    Returns:
      bool. Never raises: a transformation that cannot be traced is not row-separable.

    Example:
      >>> import optax
      >>> from sparsejax.optim import is_row_separable
      >>> is_row_separable(optax.adam(1e-3)), is_row_separable(optax.lamb(1e-3))
      (True, False)

    References:
      TensorFlow Addons, `LazyAdam`; PyTorch, `SparseAdam`.
    """
    try:
        if params is None:
            return not of_one_table(tx).refused
        leaves, treedef = trees.flatten(params)
        specs = tuple(map(trees.to_spec, leaves))
        return Verdicts(tx).refusal(treedef, specs) is None
    except Exception:
        return False


def is_lazy_exact(tx: optax.GradientTransformation, params: PyTree = None) -> bool:
    """Returns True if `lazy(tx)` trains exactly as `tx` does with dense gradients.

    For a gradient G that is zero outside the rows R, weights W and state S, with
    `U, S' = tx(G, S, W)`, that is so if

      `U[r] = 0` and `S'[r] = S[r]` for each row r outside R.

    Then skipping those rows is not an approximation. Otherwise, with momentum or
    weight decay for example, rows that are not read stay unchanged where a dense run
    would have moved them. Counts and schedules, which advance at every step, do not
    belong to rows and are not compared. The answer is read from the traced program.

    True for sgd, sign_sgd and adagrad, also after clipping by value or by global norm.
    False for momentum, adam and anything else whose state decays, for weight decay, and
    for anything that is not row-separable (see `is_row_separable`).

    Args:
      tx: an optax transformation.
      params: parameters (or ShapeDtypeStructs) for transformations that need them. The
        answer is then about all leaves that can be lifted. By default `tx` is judged on
        one table.

    Returns:
      bool. Never raises: a transformation that cannot be traced is not exact.

    Example:
      >>> import optax
      >>> from sparsejax.optim import is_lazy_exact
      >>> is_lazy_exact(optax.adagrad(0.1)), is_lazy_exact(optax.adam(1e-3))
      (True, False)

    References:
      TensorFlow Addons, `LazyAdam`, which explains how lazy updates differ from Adam.
    """
    try:
        if params is None:
            found = of_one_table(tx)
        else:
            leaves, treedef = trees.flatten(params)
            specs = tuple(map(trees.to_spec, leaves))
            found = Verdicts(tx)(treedef, specs, tables_of(specs))
        return bool(found.moved) and not any(found.moved.values())
    except Exception:
        return False


# ------------------------------------------------------------------ one tree


def _judge(
    tx: Any,
    treedef: Any,
    specs: Sequence[Any],
    tables: Sequence[int],
    one_by_one: bool,
) -> Verdict:
    """The verdict on tables that are lifted at once.

    A table that fails is a dense leaf in the next round, so its fault is not another's.
    If a fault cannot be attributed to a table, each is judged alone, or none is refused
    unless `one_by_one`.
    """
    refused: dict[int, Reason] = {}
    while tables:
        try:
            verdict = _judge_together(tx, treedef, specs, tables)
        except RefusedForAll as error:
            failed = {}
            if len(tables) > 1 and not one_by_one:
                return Verdict(refused, {})
            if len(tables) > 1:
                for t in tables:
                    failed |= _judge(tx, treedef, specs, [t], True).refused
            failed = failed or dict.fromkeys(tables, error.reason)
        else:
            if not verdict.refused:
                return Verdict(refused, verdict.moved)
            failed = verdict.refused
        refused |= failed
        tables = [t for t in tables if t not in failed]
    return Verdict(refused, {})


def _judge_together(
    tx: Any, treedef: Any, specs: Sequence[Any], tables: Sequence[int]
) -> Verdict:
    with jax_defaults():
        tree = _Tree(tx, treedef, specs, tables)
        refused = tree.refused_by_state()
        if refused:
            return Verdict(refused, {})
        args = tree.arguments()
        many = tree.trace_update(tree.many_rows)
        one = tree.trace_fewer(tree.one_row)
        found = facts.difference(tx, one, many)
        if found is not None:
            raise RefusedForAll(found)
        walk = tree.walk()
        return _verdict(tree, walk, walk.program(one, many, args))


def depends_on_rows(
    tx: Any,
    treedef: Any,
    specs: Sequence[Any],
    tables: Sequence[int],
    num_rows: Sequence[int],
) -> Reason | None:
    """Why `tx` computes something else on `num_rows` rows than on all, or None.

    None also if it cannot be traced, which `lazy(tx, check=False)` allows.
    """
    with jax_defaults():
        try:
            tree = _Tree(tx, treedef, specs, tables)
            many = tree.trace_update(tree.many_rows)
        except RefusedForAll:
            return None
        rows = {t: (n,) for t, n in zip(tables, num_rows)}
        try:
            few = tree.trace_fewer(rows)
            reason = facts.difference(tx, few, many, numbers=True)
        except RefusedForAll as error:
            reason = error.reason
        return reason and reason._replace(can_be_wrong=False)


class _Tree:
    """A tree of parameters, some leaves of which are tables, and its state.

    Attributes:
      one_row: for each table, the axes of rows in the first trace.
      many_rows: the same, in the second trace: all rows of the table, or a few more.
    """

    def __init__(self, tx, treedef, specs, tables):
        self.tx = tx = callables.resolve(tx, treedef, specs)
        self.treedef, self.tables = treedef, tuple(tables)
        self.one_row, self.many_rows = dict.fromkeys(tables, (1,)), {}
        self.specs = list(specs)
        for t in tables:
            shape, count = specs[t].shape, trees.row_axes(specs[t])
            # At least two, so that an axis of rows is seen.
            rows = shape[:count] if math.prod(shape[:count]) > 1 else (2, 3)[:count]
            self.many_rows[t] = rows
            self.specs[t] = trees.reshaped(specs[t], (*rows, *shape[count:]))
        arrays = [i for i, s in enumerate(specs) if getattr(s, "shape", ())]
        try:
            self.found = state_leaves.find(tx.init, treedef, self.specs, self.tables)
            # State of leaves that are not tables belongs to these, not to all rows.
            self.of_leaf = state_leaves.depends_on_shapes(
                tx.init, treedef, self.specs, arrays
            )
        except callables.NeedsNumbersError:
            raise
        except Exception as error:
            raise RefusedForAll(_cannot_run(tx, error)) from None
        paths, self.state_treedef = jax.tree_util.tree_flatten_with_path(
            self.found.state
        )
        self.paths = [jax.tree_util.keystr(path) for path, _ in paths]
        self.state = [leaf for _, leaf in paths]
        self.fresh, self.init_refused = self._walk_init()

    def walk(self) -> Walk:
        return Walk(frozenset(self.many_rows.values()))

    def refused_by_state(self) -> dict[int, Reason]:
        """Tables whose state has no rows, or is of a type in `NOT_LIFTED`."""
        found, refused = self.found, {}
        if found.blocked:
            made_by = self.parts_of_state()
            for t, (why, k) in found.blocked.items():
                part = parts.innermost(() if k is None else made_by[k], self.tx).name
                if t in self.init_refused:  # a wrapper that reshapes, like `flatten`
                    part = self.init_refused[t].part
                refused[t] = Reason(why, part, False)
        return refused | refused_by_type(found)

    def parts_of_state(self) -> list[tuple[Part, ...]]:
        """For each leaf of the state, the part that makes it in `init`."""
        rows = {t: self.specs[t].shape[: len(r)] for t, r in self.many_rows.items()}
        jaxpr, _ = self.trace_init(rows)
        made_by = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
        eqns = (
            None if isinstance(v, _compat.Literal) else made_by.get(v)
            for v in jaxpr.outvars
        )
        return [parts.of_equation(eqn, ()) for eqn in eqns]

    def arguments(self) -> list[Fact]:
        """Facts about the arguments of `trace_update`: gradients, weights, state."""
        grads = self._of_leaves("gradient", 0, 0)
        weights = self._of_leaves("weights", None, 0)
        state = []
        for k, (leaf, owner) in enumerate(zip(self.state, self.found.owners)):
            same, empty = Same(k, leaf.dtype), self.fresh[k].empty
            own = Fact() if owner is None else argument("state", owner, same, empty)
            state.append(own)
        return [*grads, *weights, *state]

    def _of_leaves(self, kind: str, at_rest: Any, empty: Any) -> list[Fact]:
        leaves = (i for i, s in enumerate(self.specs) if not trees.is_none_or_masked(s))
        return [
            argument(kind, i, at_rest, empty) if i in self.tables else Fact()
            for i in leaves
        ]

    def _walk_init(self) -> tuple[list[Fact], dict[int, Reason]]:
        """Facts about new state, and reasons from `init`, which may mix rows."""
        walk, args = self.walk(), self._of_leaves("weights", None, 0)
        try:
            one, many = self.trace_init(self.one_row), self.trace_init(self.many_rows)
            if facts.difference(self.tx, one, many) is not None:
                return [Fact()] * len(self.state), walk.refused
            return walk.program(one, many, args), walk.refused
        except Exception:  # then nothing is known of new state
            return [Fact()] * len(self.state), walk.refused

    def with_rows(self, rows: Mapping[int, tuple[int, ...]]) -> list[Any]:
        """The specs of parameters, with other axes of rows."""
        specs = [trees.plain(s) for s in self.specs]
        for t, first in rows.items():
            rest = specs[t].shape[len(self.many_rows[t]) :]
            specs[t] = jax.ShapeDtypeStruct((*first, *rest), specs[t].dtype)
        return specs

    def trace_init(self, rows: Mapping[int, tuple[int, ...]]) -> Any:
        def init(*leaves):
            return jax.tree.leaves(self.tx.init(self._unflatten(leaves)))

        specs = [s for s in self.with_rows(rows) if not trees.is_none_or_masked(s)]
        return _compat.trace(init, *specs)

    def trace_update(self, rows: Mapping[int, tuple[int, ...]]) -> Any:
        """`tx.update` as a jaxpr: updates of tables, of other leaves, and state."""
        specs = [s for s in self.with_rows(rows) if not trees.is_none_or_masked(s)]
        state = list(self.state)
        for k, owner in enumerate(self.found.owners):
            if owner is not None:
                rest = state[k].shape[len(self.many_rows[owner]) :]
                shape = (*rows[owner], *rest)
                state[k] = jax.ShapeDtypeStruct(shape, state[k].dtype)
        update = optax.with_extra_args_support(self.tx).update
        extra_args: dict[str, Any] = {}
        n = len(specs)

        def step(*args):
            grads, weights = (self._unflatten(x) for x in (args[:n], args[n : 2 * n]))
            state = self.state_treedef.unflatten(args[2 * n :])
            updates, new = update(grads, state, weights, **extra_args)
            updates = self.treedef.flatten_up_to(updates)
            own = [updates[t] for t in self.tables]
            if not all(hasattr(u, "shape") for u in own):
                raise TypeError("the update of a table is not an array")
            others = [u for i, u in enumerate(updates) if i not in self.tables]
            new, new_treedef = jax.tree.flatten(new)
            if new_treedef != self.state_treedef:
                raise TypeError("update returns state of another structure than init")
            return [*own, *new, *jax.tree.leaves(others)]

        while True:
            try:
                return _compat.trace(step, *specs, *specs, *state)
            except TypeError as error:
                missing = _missing_arguments(error)
                if missing <= extra_args.keys():
                    raise RefusedForAll(_cannot_run(self.tx, error)) from None
                extra_args |= dict.fromkeys(missing, np.float32(1))
            except callables.NeedsNumbersError:
                raise
            except Exception as error:
                raise RefusedForAll(_cannot_run(self.tx, error)) from None

    def trace_fewer(self, rows: Mapping[int, tuple[int, ...]]) -> Any:
        """`trace_update`, if all rows of the tables can be traced."""
        try:
            return self.trace_update(rows)
        except RefusedForAll as error:
            why = f"{error.reason.why}; {facts.DEPENDS}"
            raise RefusedForAll(error.reason._replace(why=why)) from None

    def _unflatten(self, leaves: Sequence[Any]) -> Any:
        present = iter(leaves)
        return self.treedef.unflatten(
            s if trees.is_none_or_masked(s) else next(present) for s in self.specs
        )


def refused_by_type(found: state_leaves.StateLeaves) -> dict[int, Reason]:
    """Tables that have state of a type in `NOT_LIFTED`."""
    refused, first = {}, 0
    is_known = lambda x: type(x) in NOT_LIFTED
    for node in jax.tree.leaves(found.state, is_leaf=is_known):
        last = first + len(jax.tree.leaves(node))
        if is_known(node):
            part, why = NOT_LIFTED[type(node)]
            owners = {o for o in found.owners[first:last] if o is not None}
            # Without owners, the structure of the state depends on the rows.
            tables = owners or found.blocked
            refused |= dict.fromkeys(tables, Reason(why, part, False))
        first = last
    return refused


def _cannot_run(tx: Any, error: Exception) -> Reason:
    message = str(error).strip().split("\n")[0]
    why = f"it cannot run on rows of a table ({type(error).__name__}: {message})"
    return Reason(why, parts.innermost(parts.of_error(error), tx).name)


def _missing_arguments(error: TypeError) -> set[str]:
    """The extra arguments that an update requires, as Python's message names them."""
    if "required keyword-only argument" not in str(error):
        return set()
    return set(re.findall(r"'(\w+)'", str(error)))


def _verdict(tree: _Tree, walk: Walk, outs: Sequence[Fact]) -> Verdict:
    """The verdict, from facts about the outputs of `trace_update`."""

    def refuse(tables, why, fact):
        part = parts.innermost(fact.part or (), tree.tx)
        for t in tables:
            walk.refused.setdefault(t, Reason(why, part.name, not part.is_optax))

    n, num_state = len(tree.tables), len(tree.state)
    updates, state, dense = outs[:n], outs[n : n + num_state], outs[n + num_state :]
    moved = {t: [] for t in tree.tables}
    for t, fact in zip(tree.tables, updates):
        if not fact.rows or fact.table not in (t, None):
            refuse([t], "its update does not have one row per row", fact)
        if not is_number(fact.at_rest, 0):
            moved[t].append(WEIGHTS)
    for fact in dense:
        if fact.rows:
            refuse(fact.tables, "the update of a dense leaf has rows of it", fact)
    for k, fact in enumerate(state):
        owner, path = tree.found.owners[k], tree.paths[k]
        if owner is not None:
            if not fact.rows or fact.table not in (owner, None):
                why = f"its state {path} does not keep one row per row"
                refuse([owner], why, fact)
            if fact.at_rest != Same(k, tree.state[k].dtype):
                moved[owner].append(path)
        elif fact.rows:
            refuse(fact.tables, f"its state {path} has rows of the table", fact)
        elif fact.partial and not tree.of_leaf[k]:
            why = f"its state {path} depends on all rows, even those that are not read"
            refuse(fact.partial, why, fact)
    moved = {t: found for t, found in moved.items() if t not in walk.refused}
    return Verdict(walk.refused, moved)


# ------------------------------------------------------------------ one table


class TableProgram(NamedTuple):
    """The part of a transformation that acts on one table.

    Attributes:
      key: equal for tables of the same row shape that are treated alike.
      names: of the parts that act on the table, in order.
      state_names: for each leaf of the state, the part that makes it.
    """

    key: Any
    names: tuple[str, ...]
    state_names: tuple[str, ...]

    def name_at(self, leaf: int | None) -> str:
        """The part of a leaf of the state; all parts for None."""
        if leaf is not None:
            return self.state_names[leaf]
        tail = ", one after the other" if len(self.names) > 1 else ""
        return ", ".join(self.names) + tail


def programs(
    tx: Any, treedef: Any, specs: Sequence[Any], tables: Sequence[int]
) -> dict[int, TableProgram]:
    """The programs of some tables, for a transformation that can be lifted."""
    if not tables:
        return {}
    with jax_defaults():
        tree = _Tree(tx, treedef, specs, tables)
        jaxpr, consts = tree.trace_update(tree.one_row)
        top = parts.name_of(tx)
        state_names = tuple(
            (p or (Part(top, ""),))[-1].name for p in tree.parts_of_state()
        )
        leaves = [i for i, s in enumerate(tree.specs) if not trees.is_none_or_masked(s)]
        owners = [*leaves, *leaves, *tree.found.owners]
        found = {}
        for k, t in enumerate(tree.tables):
            wanted = [False] * len(jaxpr.outvars)
            wanted[k] = True
            for j, owner in enumerate(tree.found.owners):
                wanted[len(tree.tables) + j] = owner == t
            less, kept, used = _compat.only_needed(jaxpr, consts, wanted)
            # Tables of one program must read the same other arguments, like a count.
            shared = [j for j, u in enumerate(used) if u and owners[j] != t]
            key = str(less), tuple(shared), tuple(map(id, kept)), specs[t].dtype
            of_step = (parts.of_equation(eqn, ()) for eqn in less.eqns)
            names = dict.fromkeys(part[-1].name for part in of_step if part)
            found[t] = TableProgram(key, tuple(names) or (top,), state_names)
        return found


# ------------------------------------------------------------------ JAX's settings


@contextlib.contextmanager
def jax_defaults() -> Iterator[None]:
    """JAX's defaults, whatever the caller has set."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(state_leaves.without_mesh())
        stack.enter_context(jax.disable_jit(False))
        stack.enter_context(jax.numpy_dtype_promotion("standard"))
        stack.enter_context(jax.numpy_rank_promotion("allow"))
        yield
