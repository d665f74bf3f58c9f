"""Decides from the traced program whether a transformation can be lifted to rows.

`tx.update` is traced twice: with one row in every table, and with two (for a stack of
tables, with two tables of three rows). `tx` treats rows alike if both programs are
equal up to the axes of rows: the same equations, each of which computes an entry of a
row from that row's entries (`row_program.row_params`), or reduces over all rows. A
constant that differs is a mean over rows, and random bits differ in their number.

A reduction over rows is correct if rows that are not read add nothing to it: with a
zero gradient, and any weights and state, what is reduced is the neutral element, as it
is for the norm of a gradient. Otherwise the dense run counts rows that a lifted run
does not read. Then

- a reduction of *weights* or of *state* refuses (lamb, lars, fromage, dog, sm3, momo);
- a reduction of updates that an earlier part of a chain computed counts only the rows
  that are read: `clip_by_global_norm` after adam, which is intended. It must not feed
  state, except through a boolean (`zero_nans`), and empty slots must add nothing to it.

Each value carries a `Fact`: which rows it has, what it was computed from, and its value
in a row without a gradient and in an empty slot, if that is a known constant. A part is
known by the frames of an equation's traceback, which also name it in messages.

What the program does not show is refused by the type of its state (`NOT_LIFTED`), and
what cannot be proved needs `lazy(tx, check=False)`.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from sparsejax import _compat
from sparsejax._arguments import PyTree
from sparsejax.optim._lazy import checks, state_leaves, trees
from sparsejax.optim._lazy.row_program import REDUCTIONS, program_of, row_params


# Enough rows for the state of optimizers that factor matrices of 128 rows and columns.
ROWS = 160
MAX_TRIED = 8  # leaves judged at init, those with the most rows
MAX_REMEMBERED = 32  # trees of parameters cached for one transformation

_HOLDS_BACK = (
    "it accumulates gradients and applies them at a later step, where it would have to "
    "update rows that are not read again (sparsejax.optim.accumulate does this by rows)"
)
_OF_MOMENTUM = "its step depends on the momentum of all rows, even those not read"
_OF_DISTANCE = "its step size depends on sums over all rows, even those not read"
# Transformations that are refused by the type of their state: (name, why). `exact`
# adds its own.
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
# The names that users know, shown in parentheses.
KNOWN_AS = {
    "scale_by_trust_ratio": "part of lamb, lars and fromage",
    "scale_by_factored_rms": "part of adafactor",
    "clip_by_block_rms": "also part of adafactor",
    "scale_by_param_block_rms": "also part of adafactor",
    "scale_by_muon": "part of muon",
    "scale_by_sm3": "part of sm3",
    "scale_by_dog": "part of dog",
    "scale_by_dowg": "part of dowg",
    "scale_by_lbfgs": "part of lbfgs",
    "add_noise": "part of noisy_sgd",
}


class Reason(NamedTuple):
    """Why a table cannot be lifted.

    Attributes:
      why: what was found.
      part: name of the part that prevents it.
      can_be_wrong: True if it may also refuse a row-separable transformation.
    """

    why: str
    part: str
    can_be_wrong: bool = True

    def __str__(self) -> str:
        known = KNOWN_AS.get(self.part)
        return f"{self.part}{f' ({known})' if known else ''}: {self.why}"


class Same(NamedTuple):
    """The value that a leaf of the state had before the step."""

    leaf: int
    bits: int


class Fact(NamedTuple):
    """What is known about a value of the program.

    Attributes:
      rows: True if it has one entry per row.
      table: the table whose rows these are; None if all rows have the same entry.
      sources: kinds of arguments that its rows were computed from: "gradient",
        "weights", "state", or "update" for the result of an earlier part of a chain.
      at_rest: the known number in a row without a gradient, whatever its weights and
        state are, or `Same`, or None.
      empty: the known number in an empty slot, or None.
      is_positive: True if it is known not to be negative.
      partial: the tables that it depends on by a reduction over only the rows read.
      tables: all tables that it was computed from, for messages.
      part: the part of the transformation that computed it, None for an argument.
    """

    rows: bool = False
    table: int | None = None
    sources: frozenset[str] = frozenset()
    at_rest: Any = None
    empty: Any = None
    is_positive: bool = False
    partial: frozenset[int] = frozenset()
    tables: frozenset[int] = frozenset()
    part: tuple[Part, ...] | None = None


class Part(NamedTuple):
    """A transformation inside another, or the outermost one.

    Attributes:
      name: of the function that made it.
      file: where its functions are.
    """

    name: str
    file: str

    @property
    def is_optax(self) -> bool:
        """True if it is one of optax's own."""
        return _is_from("optax", self.file)


class _Refused(Exception):
    """Raised at an equation that cannot be lifted.

    Args:
      why: what was found.
      tables: the tables that it concerns; empty if these are not known.
      is_proved: False if the equation may be row by row, but is not known to be.
    """

    def __init__(
        self, why: str, tables: frozenset[int] = frozenset(), is_proved: bool = True
    ):
        super().__init__(why)
        self.why, self.tables, self.is_proved = why, tables, is_proved


class _RefusedForAll(Exception):
    """Raised if a reason to refuse cannot be attributed to a table."""

    def __init__(self, reason: Reason):
        super().__init__(str(reason))
        self.reason = reason


# ------------------------------------------------------------------ verdicts


class Verdict(NamedTuple):
    """What a traced step says about its tables.

    Attributes:
      refused: by table, why it cannot be lifted.
      moved: by table, what changes in a row although its gradient is zero: `WEIGHTS`
        and paths of leaves of the state.
    """

    refused: dict[int, Reason]
    moved: dict[int, list[str]]


WEIGHTS = "weights"


class Verdicts:
    """Which tables `tx` can be lifted for, judged once for each tree of parameters.

    A tree is given by its structure and the specs of its leaves (see `trees`), and a
    table by its leaf index.
    """

    def __init__(self, tx: Any):
        if not checks.is_transformation(tx):
            raise TypeError(f"not an optax transformation: {tx!r}")
        self._judge = trees.remember(
            lambda treedef, specs, tables: _judge(tx, treedef, specs, tables),
            MAX_REMEMBERED,
        )

    def refusal(self, treedef: Any, specs: Sequence[Any]) -> tuple[int, Reason] | None:
        """A table and why it cannot be lifted, or None if some leaf can."""
        tables = tables_of(specs)[:MAX_TRIED]
        if not tables:
            return None
        failed = self(treedef, specs, tables).refused
        if len(failed) < len(tables) or len(tables_of(specs)) > MAX_TRIED:
            return None  # update decides, for the leaves that are read by rows
        return tables[0], failed[tables[0]]

    def __call__(
        self, treedef: Any, specs: Sequence[Any], tables: Sequence[int]
    ) -> Verdict:
        """The verdict on some tables, without the faults of other leaves."""
        return self._judge(treedef, tuple(specs), tuple(tables))


def tables_of(specs: Sequence[Any]) -> list[int]:
    """The leaves that may be tables, those with the most rows first."""
    arrays = [i for i, s in enumerate(specs) if is_float_array(s)]
    tables = [i for i in arrays if len(specs[i].shape) > 1] or arrays
    return sorted(tables, key=lambda i: specs[i].shape[0], reverse=True)


def is_float_array(spec: Any) -> bool:
    """Return True if a leaf is an array of floats with at least one axis."""
    if trees.is_none_or_masked(spec) or not spec.shape:
        return False
    return jnp.issubdtype(spec.dtype, jnp.inexact)


@trees.remember
def of_one_table(tx: Any) -> Verdict:
    """The verdict on a transformation of a single table."""
    table = jax.ShapeDtypeStruct((ROWS, 130), jnp.float32)
    return Verdicts(tx)(jax.tree.structure(0), (table,), (0,))


def is_row_separable(tx: optax.GradientTransformation, params: PyTree = None) -> bool:
    """Return True if a transformation treats each row independently of the others.

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
        `optax.partition` with labels for a particular tree. The answer is then whether
        `lazy(tx).init(params)` accepts them: whether some leaf can be lifted. By
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
    """Return True if `lazy(tx)` trains exactly as `tx` does with dense gradients.

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
    tx: Any, treedef: Any, specs: Sequence[Any], tables: Sequence[int]
) -> Verdict:
    """The verdict on tables that are lifted at once.

    A table that fails is a dense leaf in the next round, so its fault is no other's.
    """
    refused: dict[int, Reason] = {}
    while tables:
        try:
            verdict = _judge_together(tx, treedef, specs, tables)
        except _RefusedForAll as error:
            failed = {}
            if len(tables) > 1:
                for t in tables:
                    failed |= _judge(tx, treedef, specs, [t]).refused
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
        judge = _Judge()
        one, many = tree.trace_update(tree.one_row), tree.trace_update(tree.many_rows)
        outs = judge.walk(one, many, args, ())
        return judge.verdict(tree, outs, one[0].outvars)


class _Tree:
    """A tree of parameters, some leaves of which are tables, and its state.

    Attributes:
      one_row: for each table, the axes of rows in the first trace.
      many_rows: the same, in the second trace.
    """

    def __init__(self, tx, treedef, specs, tables):
        self.tx, self.treedef, self.tables = tx, treedef, tuple(tables)
        stacks = {t: trees.row_axes(specs[t]) > 1 for t in tables}
        self.one_row = dict.fromkeys(tables, (1,))
        self.many_rows = {t: _STACK if stacks[t] else _TABLE for t in tables}
        self.specs = list(specs)
        for t in tables:
            rows = (2, ROWS) if stacks[t] else (ROWS,)
            shape = (*rows, *specs[t].shape[len(rows) :])
            self.specs[t] = trees.reshaped(specs[t], shape)
        arrays = [i for i, s in enumerate(specs) if getattr(s, "shape", ())]
        try:
            self.found = state_leaves.find(tx.init, treedef, self.specs, self.tables)
            # State of leaves that are not tables belongs to these, not to all rows.
            self.of_leaf = state_leaves.depends_on_shapes(
                tx.init, treedef, self.specs, arrays
            )
        except Exception as error:
            raise _RefusedForAll(_cannot_run(tx, error)) from None
        paths, self.state_treedef = jax.tree_util.tree_flatten_with_path(
            self.found.state
        )
        self.paths = [jax.tree_util.keystr(path) for path, _ in paths]
        self.state = [leaf for _, leaf in paths]
        self.fresh, self.init_refused = self._walk_init()

    def refused_by_state(self) -> dict[int, Reason]:
        """Tables whose state has no rows, or is of a type in `NOT_LIFTED`."""
        found, refused = self.found, {}
        if found.blocked:
            parts = self.parts_of_state()
            for t, (why, k) in found.blocked.items():
                part = _innermost(() if k is None else parts[k], self.tx).name
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
        return [_part(eqn, ()) for eqn in eqns]

    def arguments(self) -> list[Fact]:
        """Facts about the arguments of `trace_update`: gradients, weights, state."""
        grads = self._of_leaves("gradient", 0, 0)
        weights = self._of_leaves("weights", None, 0)
        state = []
        for k, (leaf, owner) in enumerate(zip(self.state, self.found.owners)):
            same, empty = Same(k, leaf.dtype.itemsize), self.fresh[k].empty
            own = Fact() if owner is None else _argument("state", owner, same, empty)
            state.append(own)
        return [*grads, *weights, *state]

    def _of_leaves(self, kind: str, at_rest: Any, empty: Any) -> list[Fact]:
        leaves = (i for i, s in enumerate(self.specs) if not _is_absent(s))
        return [
            _argument(kind, i, at_rest, empty) if i in self.tables else Fact()
            for i in leaves
        ]

    def _walk_init(self) -> tuple[list[Fact], dict[int, Reason]]:
        """Facts about new state, and what mixes rows in `init`, which is no fault."""
        judge, args = _Judge(), self._of_leaves("weights", None, 0)
        try:
            one, many = self.trace_init(self.one_row), self.trace_init(self.many_rows)
            return judge.walk(one, many, args, ()), judge.refused
        except Exception:  # then nothing is known of new state
            return [Fact()] * len(self.state), judge.refused

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

        specs = [s for s in self.with_rows(rows) if not _is_absent(s)]
        return _compat.trace(init, *specs)

    def trace_update(self, rows: Mapping[int, tuple[int, ...]]) -> Any:
        """`tx.update` as a jaxpr: updates of tables, of other leaves, and state."""
        specs = [s for s in self.with_rows(rows) if not _is_absent(s)]
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
                    raise _RefusedForAll(_cannot_run(self.tx, error)) from None
                extra_args |= dict.fromkeys(missing, np.float32(1))
            except Exception as error:
                raise _RefusedForAll(_cannot_run(self.tx, error)) from None

    def _unflatten(self, leaves: Sequence[Any]) -> Any:
        leaves = iter(leaves)
        return self.treedef.unflatten(
            s if _is_absent(s) else next(leaves) for s in self.specs
        )


def _argument(kind: str, table: int, at_rest: Any, empty: Any) -> Fact:
    """A fact about rows of a table among the arguments."""
    own = frozenset([table])
    return Fact(True, table, frozenset([kind]), at_rest, empty, tables=own)


def refused_by_type(found: state_leaves.StateLeaves) -> dict[int, Reason]:
    """Tables that have state of a type in `NOT_LIFTED`."""
    refused, first = {}, 0
    is_known = lambda x: type(x) in NOT_LIFTED
    for node in jax.tree.leaves(found.state, is_leaf=is_known):
        last = first + len(jax.tree.leaves(node))
        if is_known(node):
            part, why = NOT_LIFTED[type(node)]
            owners = {o for o in found.owners[first:last] if o is not None}
            refused |= dict.fromkeys(owners, Reason(why, part, False))
        first = last
    return refused


# The axes of rows of a table and of a stack of tables in the second trace.
_TABLE, _STACK = (2,), (2, 3)


def _is_absent(spec: Any) -> bool:
    return spec is None or trees.is_none_or_masked(spec)


def _missing_arguments(error: TypeError) -> set[str]:
    """The extra arguments that an update requires, as Python's message names them."""
    if "required keyword-only argument" not in str(error):
        return set()
    return set(re.findall(r"'(\w+)'", str(error)))


def _cannot_run(tx: Any, error: Exception) -> Reason:
    message = str(error).strip().split("\n")[0]
    frames, tb = [], error.__traceback__
    while tb is not None:
        code = tb.tb_frame.f_code
        frames.append((code.co_filename, code.co_qualname, tb.tb_lineno))
        tb = tb.tb_next
    part = _innermost(_parts_of(frames), tx)
    why = f"it cannot run on rows of a table ({type(error).__name__}: {message})"
    return Reason(why, part.name)


# ------------------------------------------------------------------ the program


class _Judge:
    """Walks both traces of a program at once."""

    def __init__(self):
        self.refused: dict[int, Reason] = {}

    def verdict(self, tree: _Tree, outs: Sequence[Fact], types: Sequence[Any]):
        """The verdict, from facts about the outputs of `trace_update`."""

        def refuse(tables, why, fact):
            part = _innermost(fact.part or (), tree.tx)
            for t in tables:
                self.refused.setdefault(t, Reason(why, part.name, not part.is_optax))

        n, num_state = len(tree.tables), len(tree.state)
        updates, state, dense = outs[:n], outs[n : n + num_state], outs[n + num_state :]
        moved = {t: [] for t in tree.tables}
        for t, fact in zip(tree.tables, updates):
            if not fact.rows or fact.table not in (t, None):
                refuse([t], "its update does not have one row per row", fact)
            if not _is(fact.at_rest, 0):
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
                if fact.at_rest != Same(k, tree.state[k].dtype.itemsize):
                    moved[owner].append(path)
            elif fact.rows:
                refuse(fact.tables, f"its state {path} has rows of the table", fact)
            elif fact.partial and not tree.of_leaf[k]:
                why = (
                    f"its state {path} depends on all rows, even those that are not "
                    "read"
                )
                refuse(fact.partial, why, fact)
        moved = {t: found for t, found in moved.items() if t not in self.refused}
        return Verdict(self.refused, moved)

    def walk(
        self,
        one: Any,
        many: Any,
        facts: Sequence[Fact],
        part: tuple[Part, ...] = (),
        line: str = "",
    ) -> list[Fact]:
        """Facts about the outputs of a program, from those about its arguments.

        Args:
          one: the program for one row, as `(open jaxpr, consts)`.
          many: the program for many rows.
          facts: about its arguments.
          part: the part of the transformation that calls it.
          line: of the call, for equations without one.
        """
        (jaxpr, consts), (other, other_consts) = one, many
        env = dict(zip(jaxpr.invars, facts))
        for v, x, y in zip(jaxpr.constvars, consts, other_consts):
            if not _equal(x, y):
                why = "it holds an array that depends on the number of rows"
                raise _RefusedForAll(Reason(why, _innermost(part).name))
            env[v] = _constant(x)

        def read(v):
            return _constant(v.val) if isinstance(v, _compat.Literal) else env[v]

        for a, b in zip(jaxpr.eqns, other.eqns):
            env.update(
                zip(a.outvars, self._step(a, b, [*map(read, a.invars)], part, line))
            )
        if len(jaxpr.eqns) != len(other.eqns):
            longer = max(jaxpr, other, key=lambda j: len(j.eqns))
            self._differs(
                longer.eqns[min(len(jaxpr.eqns), len(other.eqns))], part, line
            )
        return [read(v) for v in jaxpr.outvars]

    def _differs(self, eqn: Any, part: tuple[Part, ...], line: str):
        why = "what it computes depends on the number of rows"
        part = _part(eqn, part)
        raise _RefusedForAll(_reason(why, part, _line(eqn, part, line)))

    def _step(self, a, b, ins, part, line):
        """Facts about the outputs of an equation."""
        part = _part(a, part)
        line = _line(a, part, line)
        name = a.primitive.name
        if name != b.primitive.name or len(a.outvars) != len(b.outvars):
            self._differs(a, part, line)
        body = program_of(a)
        if body is not None:
            return self.walk(body, program_of(b), ins, part, line)
        try:
            if name == "cond":
                return self._cond(a, b, ins, part, line)
            return _fact(a, b, ins, part)
        except _Refused as refused:
            reason = _reason(refused.why, part, line, refused.is_proved)
            own = frozenset(f.table for f in ins if f.rows and f.table is not None)
            tables = refused.tables or own or _union(f.tables for f in ins)
            if not tables:
                raise _RefusedForAll(reason) from None
            for t in tables:
                self.refused.setdefault(t, reason)
            # Whatever follows has nothing to add.
            has_rows = [v.aval.shape != w.aval.shape for v, w in _outs(a, b)]
            table = min(tables)
            return [Fact(r, table if r else None, tables=tables) for r in has_rows]

    def _cond(self, a, b, ins, part, line):
        index, *ins = ins
        branches = zip(a.params["branches"], b.params["branches"])
        found = [
            self.walk(_compat.open_jaxpr(x), _compat.open_jaxpr(y), ins, part, line)
            for x, y in branches
        ]
        outs = []
        for k, (v, facts) in enumerate(zip(a.outvars, zip(*found))):
            known = _select(index.at_rest, [f.at_rest for f in facts])
            empty = _select(index.empty, [f.empty for f in facts])
            first = max(facts, key=lambda f: f.table is not None)
            own = {f.table for f in facts} - {None}
            if len(own) > 1:
                raise _Refused("cond of rows of two tables", frozenset(own))
            outs.append(
                Fact(
                    first.rows,
                    first.table,
                    _union(f.sources for f in facts),
                    known,
                    empty,
                    all(f.is_positive for f in facts),
                    _union(f.partial for f in facts),
                    _union(f.tables for f in facts),
                    first.part,
                )
            )
        return outs


def _outs(a, b):
    return list(zip(a.outvars, b.outvars))


def _union(sets: Any) -> frozenset:
    return frozenset().union(*sets)


def _line(eqn: Any, part: tuple[Part, ...], enclosing: str) -> str:
    """`file:line` in the part, of the innermost function that is in its file."""
    frames = [f for f in _compat.frames(eqn) if not _is_jax(f[0])]
    own = [f for f in frames if part and f[0] == part[-1].file]
    for file, _, line in own or frames:
        return f"{file.replace(os.sep, '/').split('/site-packages/')[-1]}:{line}"
    return enclosing


def _reason(
    why: str, part: tuple[Part, ...], line: str, is_proved: bool = True
) -> Reason:
    own = _innermost(part)
    shown = f" ({line})" if line else ""
    return Reason(why + shown, own.name, not own.is_optax or not is_proved)


def _fact(a, b, ins, part) -> list[Fact]:
    """Facts about the outputs of an equation without a program in it."""
    primitive = a.primitive.name
    for v, w in zip(a.invars, b.invars):
        if isinstance(v, _compat.Literal) != isinstance(w, _compat.Literal) or (
            isinstance(v, _compat.Literal) and not _equal(v.val, w.val)
        ):
            raise _Refused(
                f"{primitive} by a number that depends on the number of rows"
            )
    shapes = [_rows_of(v, w) for v, w in _outs(a, b)]
    count = max(shapes, default=0)
    partial, tables = _union(f.partial for f in ins), _union(f.tables for f in ins)
    if not count and not any(f.rows for f in ins):
        if not _same_params(a.params, b.params):
            raise _Refused(f"{primitive} that depends on the number of rows")
        return [
            Fact(
                at_rest=value,
                empty=value,
                is_positive=_is_positive(a, ins, value),
                partial=frozenset() if v.aval.dtype == bool else partial,
                tables=tables,
                part=part,
            )
            for v in a.outvars
            for value in [_value(a, [f.at_rest for f in ins])]
        ]
    # What another part of the chain returned is an update here.
    ins = [_received(f, part) for f in ins]
    own = {f.table for f in ins if f.rows and f.table is not None}
    if len(own) > 1:
        raise _Refused(f"{primitive} of rows of two tables", frozenset(own))
    (table,) = own or {None}
    if not count:
        return [_reduced(a, ins[0], table, part)]
    rows = [f.rows for f in ins]
    if not all(shapes):
        raise _Refused(f"{primitive} of rows", is_proved=False)
    if not any(rows) and primitive != "broadcast_in_dim":
        raise _Refused(f"{primitive} of a number for each row")
    one, many = row_params(a, rows), row_params(b, rows, count)
    if one is None or many is None:
        raise _Refused(f"{primitive} of rows", is_proved=False)
    if not _same_params(one, many):
        raise _Refused(f"{primitive} that depends on the number of rows")
    at_rest = _value(a, [f.at_rest for f in ins])
    empty = _value(a, [f.empty for f in ins])
    return [
        Fact(
            True,
            table,
            _union(f.sources for f in ins),
            at_rest,
            empty,
            _is_positive(a, ins, at_rest),
            partial,
            tables,
            part,
        )
    ] * len(a.outvars)


def _rows_of(v: Any, w: Any) -> int:
    """How many axes of a value are of rows, from its types in both traces."""
    a, b = v.aval.shape, w.aval.shape
    if a == b:
        return 0
    for first in (_TABLE, _STACK):
        if a[:1] == (1,) and b == (*first, *a[1:]):
            return len(first)
    raise _Refused("rows in another axis than the first")


def _received(fact: Fact, part: tuple[Part, ...]) -> Fact:
    """A value in a part: if a part beside it computed the value, it is an update."""
    if not fact.part or not fact.sources & {"weights", "state"}:
        return fact
    n = min(len(fact.part), len(part))
    if fact.part[:n] == part[:n]:  # the same part, or one that holds the other
        return fact
    return fact._replace(sources=frozenset(["update"]))


def _reduced(eqn: Any, fact: Fact, table: int | None, part: tuple[Part, ...]) -> Fact:
    """What is known about a reduction over all rows."""
    kind = eqn.primitive.name
    if kind not in REDUCTIONS:
        raise _Refused(f"{kind} over all rows", is_proved=False)
    is_bool = eqn.outvars[0].aval.dtype == bool

    def adds_nothing(value):
        if kind in ("reduce_max", "reduce_min"):
            return kind == "reduce_max" and _is(value, 0) and fact.is_positive
        return _is(value, _NEUTRAL[kind])

    partial = fact.partial
    if not adds_nothing(fact.at_rest):
        if table is None:
            raise _Refused(f"{kind} that counts the rows of a table")
        if "weights" in fact.sources:
            raise _Refused(f"{kind} of weights over all rows, even those not read")
        if is_bool:
            partial = frozenset()
        elif "state" in fact.sources:
            raise _Refused(f"{kind} of state over all rows, even those not read")
        elif not adds_nothing(fact.empty):
            raise _Refused(
                f"{kind} of updates over all rows, after a part that moves rows that "
                "were never read"
            )
        else:
            partial |= {table}
    if is_bool:
        partial = frozenset()
    own = frozenset() if table is None else frozenset([table])
    positive = fact.is_positive
    return Fact(
        is_positive=positive, partial=partial, tables=fact.tables | own, part=part
    )


_NEUTRAL = {"reduce_sum": 0, "reduce_prod": 1, "reduce_and": True, "reduce_or": False}


# ------------------------------------------------------------------ one table


class TableProgram(NamedTuple):
    """What a transformation does to one table.

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
    """What a transformation that can be lifted does to each of some tables."""
    if not tables:
        return {}
    with jax_defaults():
        tree = _Tree(tx, treedef, specs, tables)
        jaxpr, consts = tree.trace_update(tree.one_row)
        top = name_of(tx)
        state_names = tuple(
            (p or (Part(top, ""),))[-1].name for p in tree.parts_of_state()
        )
        leaves = [i for i, s in enumerate(tree.specs) if not _is_absent(s)]
        owners = [*leaves, *leaves, *tree.found.owners]
        found = {}
        for k, t in enumerate(tree.tables):
            wanted = [False] * len(jaxpr.outvars)
            wanted[k] = True
            for j, owner in enumerate(tree.found.owners):
                wanted[len(tree.tables) + j] = owner == t
            less, kept, used = _compat.only_needed(jaxpr, consts, wanted)
            # Tables that share a program must share what else it reads, like a count.
            shared = [j for j, u in enumerate(used) if u and owners[j] != t]
            key = str(less), tuple(shared), tuple(map(id, kept)), specs[t].dtype
            parts = (_part(eqn, ()) for eqn in less.eqns)
            names = dict.fromkeys(p[-1].name for p in parts if p)
            found[t] = TableProgram(key, tuple(names) or (top,), state_names)
        return found


# ------------------------------------------------------------------ known numbers


def _constant(x: Any) -> Fact:
    """A constant of the program."""
    value = None
    if np.ndim(x) == 0 and not isinstance(x, jax.core.Tracer):
        if not jnp.issubdtype(getattr(x, "dtype", type(x)), jax.dtypes.extended):
            value = np.asarray(x).item()
    return Fact(
        at_rest=value, empty=value, is_positive=_is_number(value) and value >= 0
    )


def _is_number(x: Any) -> bool:
    return isinstance(x, (bool, int, float))


def _is(x: Any, number: Any) -> bool:
    return _is_number(x) and x == number


def _select(index: Any, values: Sequence[Any]) -> Any:
    if _is_number(index):
        return values[int(index)]
    first = values[0]
    return first if all(x == first for x in values) else None


_AS_IT_IS = frozenset(
    "copy copy_p stop_gradient broadcast_in_dim reshape squeeze transpose slice rev "
    "sort split concatenate reduce_max reduce_min reduce_and reduce_or cummax "
    "cummin".split()
)
_ZERO_AT_ZERO = frozenset(
    "abs neg sign sqrt cbrt square sin sinh tan tanh expm1 log1p floor ceil round erf "
    "reduce_sum cumsum reduce_precision".split()
)
_OF_NUMBERS: Mapping[str, Callable] = {
    "add": lambda x, y: x + y,
    "add_any": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "max": max,
    "min": min,
    "eq": lambda x, y: x == y,
    "ne": lambda x, y: x != y,
    "lt": lambda x, y: x < y,
    "le": lambda x, y: x <= y,
    "gt": lambda x, y: x > y,
    "ge": lambda x, y: x >= y,
    "and": lambda x, y: x and y,
    "or": lambda x, y: x or y,
    "not": lambda x: not x,
    "is_finite": np.isfinite,
    "clamp": lambda low, x, high: min(max(low, x), high),
}


def _value(eqn: Any, xs: Sequence[Any]) -> Any:
    """The result of an equation on known numbers, `Same`, or None for unknown."""
    name, params = eqn.primitive.name, eqn.params
    if name == "convert_element_type":
        return _converted(xs[0], params["new_dtype"])
    if name == "select_n":
        return _select(xs[0], xs[1:])
    if name in _AS_IT_IS:
        return _select(None, xs) if xs else None
    if name == "dot_general":
        return 0 if _is(xs[0], 0) else None
    if name == "integer_pow":
        return 0 if _is(xs[0], 0) and params["y"] > 0 else None
    if name in _ZERO_AT_ZERO and _is(xs[0], 0):
        return xs[0]
    if all(map(_is_number, xs)) and name in _OF_NUMBERS:
        if name == "not" and not isinstance(xs[0], bool):
            return None
        result = _OF_NUMBERS[name](*xs)
        return bool(result) if isinstance(result, np.bool_) else result
    if len(xs) != 2:
        return None
    x, y = xs
    if name == "mul":
        if _is(x, 0) or _is(y, 0):
            return 0
        return y if _is(x, 1) else x if _is(y, 1) else None
    if name == "div":
        if _is(x, 0) and not _is(y, 0):
            return 0
        return x if _is(y, 1) else None
    if name in ("add", "add_any"):
        return y if _is(x, 0) else x if _is(y, 0) else None
    if name == "sub":
        return x if _is(y, 0) else None
    if name == "and":
        return False if x is False or y is False else None
    if name == "or":
        return True if x is True or y is True else None
    if name in ("max", "min") and isinstance(x, Same) and x == y:
        return x
    return None


def _converted(x: Any, dtype: Any) -> Any:
    if isinstance(x, Same):  # a cast to fewer bits loses some
        return x if dtype.itemsize >= x.bits else None
    if dtype.kind == "b" and _is_number(x):
        return bool(x)
    return x


_POSITIVE = frozenset("abs square sqrt exp exp2 logistic".split())
_POSITIVE_OF_POSITIVE = frozenset(
    "add add_any mul div min clamp broadcast_in_dim reshape squeeze transpose slice "
    "copy copy_p convert_element_type reduce_sum reduce_max reduce_min reduce_prod "
    "stop_gradient reduce_precision".split()
)


def _is_positive(eqn: Any, ins: Sequence[Fact], value: Any) -> bool:
    """Return True if an equation's result is known not to be negative."""
    if _is_number(value):
        return value >= 0
    name = eqn.primitive.name
    if name in _POSITIVE or (name == "integer_pow" and eqn.params["y"] % 2 == 0):
        return True
    if name == "mul" and eqn.invars[0] is eqn.invars[1]:
        return True
    if name == "max":
        return any(f.is_positive for f in ins)
    if name == "select_n":
        return all(f.is_positive for f in ins[1:])
    return name in _POSITIVE_OF_POSITIVE and all(f.is_positive for f in ins)


def _equal(x: Any, y: Any) -> bool:
    """Return True if two constants are equal."""
    if x is y:
        return True
    if isinstance(x, jax.core.Tracer) or isinstance(y, jax.core.Tracer):
        return False
    if jnp.issubdtype(getattr(x, "dtype", type(x)), jax.dtypes.extended):
        return False
    x, y = np.asarray(x), np.asarray(y)
    return x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()


def _same_params(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Return True if parameters are equal, as far as functions can be compared."""
    if a.keys() != b.keys():
        return False
    for key, x in a.items():
        if key == "sharding" or callable(x) and not hasattr(x, "eqns"):
            continue
        if str(x) != str(b[key]):
            return False
    return True


# ------------------------------------------------------------------ parts


def _innermost(part: tuple[Part, ...], tx: Any = None) -> Part:
    """The last part; the transformation itself if none is known."""
    return part[-1] if part else Part(name_of(tx), "")


def name_of(tx: Any) -> str:
    """The name of a transformation: the function that made it, or its class."""
    update = getattr(tx, "update", None)
    while hasattr(update, "func"):  # functools.partial
        update = update.func
    return _name(getattr(update, "__qualname__", None) or type(tx).__qualname__)


def _name(qualified: str) -> str:
    outer = qualified.split(".<locals>")[0].split(".")
    is_method = len(outer) > 1 and "<locals>" not in qualified
    return outer[-2 if is_method else -1].lstrip("_")


def _part(eqn: Any, part: tuple[Part, ...]) -> tuple[Part, ...]:
    """The names of the parts that an equation is in, outermost first.

    Args:
      eqn: an equation, or None.
      part: of the enclosing equation. JAX keeps programs of functions that it traced
        before, whose equations have the frames of that call.
    """
    frames = _compat.frames(eqn) if eqn is not None else []
    found = _parts_of(list(reversed(frames)))
    if not part or found[: len(part)] == part:
        return found
    if part[-1] in found:  # traced before, within other parts
        return part + found[found.index(part[-1]) + 1 :]
    return part


def _parts_of(frames: Sequence[tuple[str, str, int]]) -> tuple[Part, ...]:
    """The parts among frames `(file, qualified name, line)`, outermost first."""
    parts: list[Part] = []
    was_library = True
    ours = [k for k, f in enumerate(frames) if f[0] in _TRACERS]
    for file, qualified, _ in frames[max(ours, default=-1) + 1 :]:
        if _is_jax(file):
            continue
        is_library = _is_library(file)
        last = qualified.split(".")[-1]
        if is_library:
            if "." in qualified and _UPDATE.fullmatch(last):
                parts.append(Part(_name(qualified), file))
        elif was_library:
            parts.append(Part(_name(qualified), file))
        was_library = is_library
    return tuple(parts)


# The functions of a transformation, as optax calls them.
_UPDATE = re.compile(r"(\w+_)?(update|init)(_fn)?(_kwargs|_with_arg|_without_arg)?")
_TRACERS = frozenset([__file__, state_leaves.__file__])


def _is_from(package: str, file: str) -> bool:
    return f"/{package}/" in file.replace("\\", "/")


def _is_jax(file: str) -> bool:
    return any(_is_from(package, file) for package in ("jax", "jaxlib", "chex"))


def _is_library(file: str) -> bool:
    return _is_from("optax", file) or _is_from("sparsejax/optim", file)


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
