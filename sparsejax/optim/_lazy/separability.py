"""Decides from the traced program whether a transformation can be lifted to rows.

`tx.update` is traced twice: with one row in every table, and with as many as it has.
`tx` treats rows alike if both programs are equal up to the axes of rows, and if
`row_program` can split the program into functions of one row and reductions over all
rows. A differing constant means a mean over rows, and an array made of a shape means
noise or numbers by position.

A reduction over rows is correct if rows that are not read add nothing to it. This is
tested by running the function of one row: with a zero gradient, and any weights and
state, its result must be the neutral element, as for the norm of a gradient. Otherwise
the dense run counts rows that a lifted run does not read. Then

- a reduction of *weights* refuses (lamb, lars, fromage);
- a reduction of *state*, or of updates that an earlier part of a chain computed, counts
  only the rows that are read: `clip_by_global_norm` after adam, which is intended. It
  must not feed state, except through a boolean (`zero_nans`), and empty slots must add
  nothing to it.

Some optimizers are wrong by rows although no program of one step shows it (gradients
held back for later steps): these are refused by the type of their state, `NOT_LIFTED`.
An update that cannot be proved to work row by row needs `lazy(tx, check=False)`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from sparsejax import _arguments, _compat
from sparsejax._arguments import PyTree
from sparsejax.optim import _checks as checks, _trees as trees
from sparsejax.optim._lazy import parts, row_program, state_leaves
from sparsejax.optim._lazy.row_program import Node, NotByRows, Reduction, RowFunction
from sparsejax.optim._lazy.two_programs import (
    BY_NUMBER,
    differences,
    key_of,
    reached,
)


# The table that a transformation is judged on without parameters: enough rows and
# columns for the state of optimizers that factor matrices of 128 rows and columns.
ROWS, COLUMNS = 160, 130
MAX_ALONE = 8  # tables judged one by one at init: each traces the update twice

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


class Reason(NamedTuple):
    """Why a table cannot be lifted.

    Attributes:
      why: the fault.
      part: name of the part that prevents it.
      can_be_wrong: True if it may also refuse a row-separable transformation.
    """

    why: str
    part: str
    can_be_wrong: bool = True

    def __str__(self) -> str:
        name = KNOWN_AS.get(self.part)
        return f"{self.part}{f' ({name})' if name else ''}: {self.why}"


class Verdict(NamedTuple):
    """The answer for a tree of parameters.

    Attributes:
      tables: the leaves that can be lifted together.
      refused: by leaf, why it cannot.
      owners: for each leaf of the state, the parameter leaf that it follows, or None.
      state: the state as ShapeDtypeStructs.
    """

    tables: tuple[int, ...]
    refused: dict[int, Reason]
    owners: tuple[int | None, ...]
    state: Any


# ------------------------------------------------------------------ questions


def is_row_separable(tx: optax.GradientTransformation, params: PyTree = None) -> bool:
    """Returns True if a transformation treats each row independently of the others.

    For a gradient G that is zero outside the rows R, state S and weights W, with
    `U, S' = tx(G, S, W)`, lifting relies on `tx(G[R], S[R], W[R]) = U[R], S'[R]`: no
    row's step may depend on rows that were not read. This is read from the traced
    program of `tx.update`, so it holds for your own transformations too. A program
    that cannot be proved to work row by row (a loop over rows, say) gives False; if
    you know that it does, use `lazy(tx, check=False)`.

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
        return refusal(tx, *_tree(params)) is None
    except (TypeError, state_leaves.InitError):  # not a transformation, or init raises
        return False


def is_lazy_exact(tx: optax.GradientTransformation, params: PyTree = None) -> bool:
    """Returns True if `lazy(tx)` trains exactly as `tx` does with dense gradients.

    For a gradient G that is zero outside the rows R, weights W and state S, with
    `U, S' = tx(G, S, W)`, that is so if

      `U[r] = 0` and `S'[r] = S[r]` for each row r outside R.

    Then skipping those rows is not an approximation. Otherwise, with momentum or
    weight decay for example, rows that are not read stay unchanged where a dense run
    would have moved them. Counts and schedules, which advance at every step, do not
    belong to rows and are not compared. The function of one row is run on random
    weights and state with a zero gradient.

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
        changes = moved(tx, *_tree(params))
    except (TypeError, state_leaves.InitError):
        return False
    return bool(changes) and not any(changes.values())


def _tree(params: Any) -> tuple[Any, tuple[Any, ...]]:
    """Returns the tree and specs of parameters, by default of one table."""
    if params is None:
        params = jax.ShapeDtypeStruct((ROWS, COLUMNS), jnp.float32)
    leaves, treedef = trees.flatten(params)
    return treedef, tuple(map(trees.to_spec, leaves))


def moved(tx: Any, treedef: Any, specs: Sequence[Any]) -> dict[int, list[str]]:
    """Returns what changes in a row without a gradient: "weights", or state paths.

    Returns:
      A dict by the number of each table that can be lifted.
    """
    tables = of_candidates(tx, treedef, specs).tables
    if not tables:
        return {}
    with jax_defaults():
        update = Update(tx, treedef, specs, tables)
        split = row_program.split(
            *update.trace(update.one_row), update.arguments(), _raise
        )
        return {t: update.moved(split, t) for t in tables}


# ------------------------------------------------------------------ verdicts


def refusal(tx: Any, treedef: Any, specs: Sequence[Any]) -> Reason | None:
    """Explains why no leaf can be lifted; None if one can or `update` must decide."""
    verdict = of_candidates(tx, treedef, specs)
    if verdict.tables or not verdict.refused:
        return None
    return verdict.refused[candidates(specs)[0]]


def candidates(specs: Sequence[Any]) -> list[int]:
    """Returns the leaves that may be tables, the one with the most rows first."""
    arrays = [i for i, spec in enumerate(specs) if _arguments.is_float_array(spec, 1)]
    tables = [i for i in arrays if len(specs[i].shape) > 1] or arrays
    return sorted(tables, key=lambda i: specs[i].shape[0], reverse=True)


@trees.remember
def of_candidates(tx: Any, treedef: Any, specs: Sequence[Any]) -> Verdict:
    """Judges all leaves that may be tables; see `of_leaves`."""
    if not checks.is_transformation(tx):
        raise TypeError(f"not an optax transformation: {tx!r}")
    tables = tuple(candidates(specs))
    return of_leaves(tx, treedef, specs, tables, len(tables) <= MAX_ALONE)


def of_leaves(
    tx: Any,
    treedef: Any,
    specs: Sequence[Any],
    tables: Sequence[int],
    one_by_one: bool = True,
) -> Verdict:
    """Judges some leaves; leaves that fail are dense leaves.

    If all fail together, each is judged alone; unless `one_by_one`, then none is
    refused, and none can be lifted.
    """
    tables, refused = tuple(tables), {}
    while True:
        verdict = of_tables(tx, treedef, specs, tables)
        failed = verdict.refused
        if len(tables) > 1 and len(failed) == len(tables):
            if not one_by_one:
                return verdict._replace(tables=(), refused=refused)
            alone = [of_tables(tx, treedef, specs, (t,)).refused for t in tables]
            failed = {t: why for x in alone for t, why in x.items()} or failed
        refused |= failed
        tables = tuple(t for t in tables if t not in failed)
        if not failed or not tables:
            return verdict._replace(tables=tables, refused=refused)


@trees.remember
def of_tables(
    tx: Any, treedef: Any, specs: Sequence[Any], tables: Sequence[int]
) -> Verdict:
    """Judges tables that are lifted at once, and nothing else."""
    with jax_defaults():
        try:
            update = Update(tx, treedef, specs, tables)
        except NotByRows as fault:
            refused = dict.fromkeys(tables, reason(tx, fault))
            return Verdict((), refused, (), None)
        refused = update.refused_by_state()
        for fault in [] if refused else update.faults():
            for t in fault.tables or tables:
                refused.setdefault(t, reason(tx, fault))
    accepted = () if refused else tuple(tables)
    return Verdict(accepted, refused, update.leaves.owners, update.leaves.state)


def for_tables(
    tx: Any,
    treedef: Any,
    specs: Sequence[Any],
    tables: Sequence[int],
    check: bool = True,
) -> Verdict:
    """Judges tables, whose verdict may be known from `of_candidates`.

    With `check=False`, it is only refused what no one can lift: state without rows.
    """
    if not check:
        leaves = state_leaves.find(tx.init, treedef, specs, tables)
        part = parts.of_transformation(tx).name
        blocked = {
            i: Reason(why, part, False) for i, (why, _) in leaves.blocked.items()
        }
        return Verdict(
            (), blocked | refused_by_type(leaves), leaves.owners, leaves.state
        )
    if not any(isinstance(spec, trees.StackSpec) for spec in specs):
        verdict = of_candidates(tx, treedef, specs)
        if set(tables) <= set(verdict.tables):
            owners = tuple(o if o in tables else None for o in verdict.owners)
            return verdict._replace(tables=tuple(tables), refused={}, owners=owners)
    return of_tables(tx, treedef, specs, tables)


def refused(name: str, reason: Reason, is_stack: bool = False) -> ValueError:
    """Makes the error for a leaf, or an optimizer, that cannot be lifted."""
    if is_stack:
        name += ", a stack of tables whose gradient has rows of each,"
    elif name.startswith("grads"):
        name += ", which has a SelectedRows gradient,"
    advice = (
        "Use an optimizer that works row by row (adam, adagrad, rmsprop, sgd, lion, "
        "...), or keep this one for the dense leaves: "
        'lazy(optax.partition({"table": optax.adam(1e-3), "dense": tx}, labels)). '
        "sparsejax.optim.is_row_separable tells which optimizers work."
    )
    if is_stack:
        advice = (
            "Keep the parameter as one table [K * V, ...], and reshape it inside the "
            "loss: table.reshape(K, V, ...)."
        )
    if reason.can_be_wrong:
        advice += (
            " If you know that each row's step depends only on that row, skip this "
            "check with lazy(tx, check=False)."
        )
    return ValueError(
        f"sparsejax.optim.lazy: {name} cannot be lifted to rows, because of {reason}. "
        f"{advice}"
    )


def reason(tx: Any, fault: NotByRows) -> Reason:
    """Describes a fault, with the part and the line that it is in."""
    enclosing, line = parts.of_equation(fault.path)
    if fault.__cause__ is not None:
        enclosing = parts.of_error(fault.__cause__)
    part = enclosing[-1] if enclosing else parts.of_transformation(tx)
    if fault.__cause__ is not None:
        for name, why in NOT_LIFTED.values():
            if name.rpartition(".")[2] == part.name:
                return Reason(why, name, False)
    why = fault.why + (f" ({line})" if line else "")
    return Reason(why, part.name, not part.is_optax or not fault.is_proved)


def refused_by_type(leaves: state_leaves.StateLeaves) -> dict[int, Reason]:
    """Returns tables that have state of a type in `NOT_LIFTED`."""
    refused, first = {}, 0
    is_known = lambda x: type(x) in NOT_LIFTED
    for node in jax.tree.leaves(leaves.state, is_leaf=is_known):
        last = first + len(jax.tree.leaves(node))
        if is_known(node):
            part, why = NOT_LIFTED[type(node)]
            owners = {o for o in leaves.owners[first:last] if o is not None}
            # Without owners, the structure of the state depends on the rows.
            tables = owners or leaves.blocked
            refused |= dict.fromkeys(tables, Reason(why, part, False))
        first = last
    return refused


@trees.remember
def difference_of_rows(
    tx: Any,
    treedef: Any,
    specs: Sequence[Any],
    tables: Sequence[int],
    num_rows: Sequence[int],
) -> Reason | None:
    """Explains why `tx` differs on `num_rows` rows from all rows, or returns None.

    None also if it cannot be traced, which `lazy(tx, check=False)` allows.
    """
    with jax_defaults():
        try:
            update = Update(tx, treedef, specs, tables)
            many = update.trace(update.many_rows)
        except NotByRows:
            return None
        try:
            few = update.trace({t: (n,) for t, n in zip(tables, num_rows)})
            fault = next(differences(few, many, is_exact=False), None)
        except NotByRows as error:
            fault = _by_number(error)
        return fault and reason(tx, fault)._replace(can_be_wrong=False)


# ------------------------------------------------------------------ one update


class Update:
    """`tx.update` on a tree of parameters, to be traced with other numbers of rows.

    Attributes:
      one_row: for each table, the axes of rows in the first trace.
      many_rows: the same, in the second trace: all rows of the table, or a few more.
    """

    def __init__(self, tx, treedef, specs, tables):
        self.tx, self.treedef, self.tables = tx, treedef, tuple(tables)
        self.one_row, self.many_rows = dict.fromkeys(tables, (1,)), {}
        self.specs = list(specs)
        for t in tables:
            shape, count = specs[t].shape, trees.row_axes(specs[t])
            # At least two, so that an axis of rows is seen.
            rows = shape[:count] if math.prod(shape[:count]) > 1 else (2, 3)[:count]
            self.many_rows[t] = rows
            self.specs[t] = trees.reshaped(specs[t], (*rows, *shape[count:]))
        self.leaves = state_leaves.find(tx.init, treedef, self.specs, self.tables)
        paths, self.state_treedef = jax.tree_util.tree_flatten_with_path(
            self.leaves.state
        )
        self.paths = [jax.tree_util.keystr(path) for path, _ in paths]
        self.state = [leaf for _, leaf in paths]
        row = {t: self._with_rows(self.specs[t], t, self.one_row) for t in tables}
        self.gradient = {t: Node(t, x) for t, x in row.items()}
        self.weights = {t: Node(t, x) for t, x in row.items()}
        self.followers = {
            k: Node(t, self._with_rows(self.state[k], t, self.one_row))
            for k, t in enumerate(self.leaves.owners)
            if t is not None
        }

    def _with_rows(self, spec, table, rows):
        row_shape = spec.shape[len(self.many_rows[table]) :]
        return jax.ShapeDtypeStruct((*rows[table], *row_shape), spec.dtype)

    def arguments(self) -> list[Any]:
        """Returns one row's arguments for a trace: nodes of tables, else types."""
        leaves = [
            (i, trees.plain(s))
            for i, s in enumerate(self.specs)
            if not trees.is_none_or_masked(s)
        ]
        return [
            *(self.gradient.get(i, s) for i, s in leaves),
            *(self.weights.get(i, s) for i, s in leaves),
            *(self.followers.get(k, s) for k, s in enumerate(self.state)),
        ]

    def nodes(self, table: int | None) -> list[Node]:
        """Returns the arguments that are rows of a table; None means of all tables."""
        nodes = [x for x in self.arguments() if isinstance(x, Node)]
        return [x for x in nodes if table in (None, x.table)]

    # -------------------------------------------------------------- traces

    def trace(self, rows: Mapping[int, tuple[int, ...]]) -> tuple[Any, list[Any]]:
        """Traces `tx.update`: updates of tables, state, updates of other leaves."""
        specs = [
            self._with_rows(s, i, rows) if i in self.tables else s
            for i, s in enumerate(self.specs)
        ]
        state = [
            s if owner is None else self._with_rows(s, owner, rows)
            for s, owner in zip(self.state, self.leaves.owners)
        ]
        arrays = trees.arrays(specs)
        update = optax.with_extra_args_support(self.tx).update
        extra_args = dict.fromkeys(_required(update), np.float32(1))

        def step(*args):
            n = len(arrays)
            grads, weights = (
                trees.fill(self.treedef, specs, x) for x in (args[:n], args[n : 2 * n])
            )
            state = self.state_treedef.unflatten(args[2 * n :])
            try:
                updates, new = update(grads, state, weights, **extra_args)
                updates = self.treedef.flatten_up_to(updates)
                tables = [updates[t] for t in self.tables]
                if not all(hasattr(u, "shape") for u in tables):
                    raise TypeError("the update of a table is not an array")
                new, new_treedef = jax.tree.flatten(new)
                if new_treedef != self.state_treedef:
                    raise TypeError("update returns state of another structure")
            except Exception as error:  # of the transformation
                raise state_leaves.cannot_run(error) from error
            others = [u for i, u in enumerate(updates) if i not in self.tables]
            return [*tables, *new, *jax.tree.leaves(others)]

        while True:
            try:
                return _compat.trace(step, *arrays, *arrays, *state)
            except NotByRows as fault:
                missing = _missing(fault.__cause__) - extra_args.keys()
                if not missing:
                    raise
                extra_args |= dict.fromkeys(missing, np.float32(1))

    # -------------------------------------------------------------- faults

    def refused_by_state(self) -> dict[int, Reason]:
        """Returns tables whose state has no rows, or is of a type in `NOT_LIFTED`."""
        refused = {}
        for t, (why, k) in self.leaves.blocked.items():
            state_parts = self.leaves.part_of(k) or (parts.of_transformation(self.tx),)
            refused[t] = Reason(why, state_parts[-1].name, False)
        return refused | refused_by_type(self.leaves)

    def faults(self) -> list[NotByRows]:
        """Returns the reasons against lifting the tables."""
        known_faults: list[NotByRows] = []
        try:
            many = self.trace(self.many_rows)
        except NotByRows as fault:
            return [fault]
        try:
            one = self.trace(self.one_row)
            over_rows: set[Any] = set()
            for fault in differences(one, many, over_rows):
                fault.tables = self._tables_of(one[0], fault.path)
                known_faults.append(fault)
            if known_faults:
                return known_faults
            split = row_program.split(*one, self.arguments(), known_faults.append)
        except NotByRows as fault:  # of no table
            return [*known_faults, _by_number(fault) if fault.__cause__ else fault]
        return known_faults or [*self._faults_of(split, over_rows)]

    def _tables_of(self, jaxpr, path) -> Any:
        """Returns the tables of the inputs with rows of the equation at `path`."""
        tables = {
            v: frozenset([x.table])
            for v, x in zip(jaxpr.invars, self.arguments())
            if isinstance(x, Node)
        }
        of = lambda vs: frozenset().union(
            *(tables.get(v, ()) for v in vs if not isinstance(v, _compat.Literal))
        )
        for eqn in jaxpr.eqns:
            by_row = [v for v in eqn.invars if v.aval.shape[:1] == (1,)]
            sources = of(by_row) or of(eqn.invars)
            if path and eqn is path[0]:
                return sources
            tables.update(dict.fromkeys(eqn.outvars, sources))
        return frozenset()

    def _faults_of(self, split, over_rows) -> Iterator[NotByRows]:
        """Returns faults of a program that could be split."""
        n, k = len(self.tables), len(self.tables) + len(self.state)
        updates, new, others = (
            split.outputs[:n],
            split.outputs[n:k],
            split.outputs[k:],
        )
        for t, x in zip(self.tables, updates):
            if not _has_rows_of(t, x):
                yield NotByRows("its update does not have one row per row", (), [t])
        for x in others:
            if isinstance(x, Node) and x.table is not None:
                why = "the update of a dense leaf has rows of it"
                yield NotByRows(why, x.step.path, [x.table])
        for owner, path, x in zip(self.leaves.owners, self.paths, new):
            if owner is not None and not _has_rows_of(owner, x):
                why = f"its state {path} does not keep one row per row"
                yield NotByRows(why, _path(x), [owner])
            if owner is None and isinstance(x, Node) and x.table is not None:
                why = f"its state {path} has rows of the table"
                yield NotByRows(why, x.step.path, [x.table])
        partial, neutral = [], set()
        for reduction in split.reductions:
            try:
                partial.append(self._counts_rows_read(reduction, over_rows, neutral))
            except NotByRows as fault:
                partial.append(False)
                yield fault
        if any(partial):
            tables = {r.table for r, p in zip(split.reductions, partial) if p}
            shared = split.shared
            feeds = iter(reached(shared, [False] * len(shared.invars), iter(partial)))
            made = {v: eqn for eqn in shared.eqns for v in eqn.outvars}
            values = iter(shared.outvars)
            for k, x in enumerate(split.outputs):
                if isinstance(x, Node):
                    continue
                v, is_fed = next(values), next(feeds)
                k -= n
                if not is_fed or not 0 <= k < len(self.state) or self.leaves.by_leaf[k]:
                    continue
                why = (
                    f"its state {self.paths[k]} depends on all rows, even those that "
                    "are not read"
                )
                path = [made[v]] if v in made else ()
                if path and path[0].primitive.name == "placeholder":
                    path = next(
                        r.path for r in split.reductions if r and r.table in tables
                    )
                yield NotByRows(why, path, tables)

    def _counts_rows_read(
        self, reduction: Reduction, over_rows: set[Any], neutral: set[Any]
    ) -> bool:
        """Returns True if rows that are not read would change a reduction.

        Args:
          reduction: of rows.
          over_rows: the keys of the equations that reduce more than one row.
          neutral: the functions of a row that are known to change no reduction.

        Raises:
          NotByRows: it must not be, as it is read from weights, for example.
        """
        table, kind, path = reduction.table, reduction.kind, reduction.path
        if key_of(path) not in over_rows:  # the first axis of a dense leaf of length 1
            return False
        function = RowFunction([reduction.node], self.nodes(table))
        key = kind, *function.key(self.nodes(table))
        if key in neutral:  # tables of equal rows that are treated alike
            return False
        (still,) = self.run(function, "zero", "any")
        if self._is_neutral(kind, still, function):
            neutral.add(key)
            return False
        tables = [] if table is None else [table]
        if table is None:
            raise NotByRows(f"{kind} that counts the rows of a table", path, tables)
        if self._reads_weights(reduction):
            why = f"{kind} of weights over all rows, even those not read"
            raise NotByRows(why, path, tables)
        if path[-1].outvars[0].aval.dtype == bool:
            return False
        (empty,) = self.run(function, "zero", "fresh")
        if not self._is_neutral(kind, empty, function):
            why = (
                f"{kind} of updates over all rows, after a part that moves rows that "
                "were never read"
            )
            raise NotByRows(why, path, tables)
        return True

    def _is_neutral(self, kind: str, still: np.ndarray, function: RowFunction) -> bool:
        """Returns True if results of rows without a gradient change no reduction."""
        if kind in ("reduce_max", "reduce_min"):
            (others,) = self.run(function, "any", "any")
            if kind == "reduce_min":
                others, still = -others, -still
            return bool(np.all(still == np.min(still)) and np.all(others >= still[:1]))
        neutral = {"reduce_prod": 1, "reduce_and": True}.get(kind, 0)
        return bool(np.all(still == neutral))

    def _reads_weights(self, reduction: Reduction) -> bool:
        """Returns True if weights reach a reduction within its part of a chain.

        The result of another part is an update, whatever it was computed from.
        """
        part, _ = parts.of_equation(reduction.path)
        weights, seen, nodes = self.weights.values(), set(), [reduction.node]
        while nodes:
            x = nodes.pop()
            if x in weights:
                return True
            if x.step is None or id(x.step) in seen:
                continue
            seen.add(id(x.step))
            other, _ = parts.of_equation(x.step.path)
            n = min(len(part), len(other))
            if part[:n] == other[:n]:  # the same part, or one that holds the other
                nodes += (y for y in x.step.inputs if isinstance(y, Node))
        return False

    # -------------------------------------------------------------- numbers

    def run(self, function: RowFunction, gradient: str, row: str) -> list[np.ndarray]:
        """Runs the function of a row for a few draws, the first axis of the results.

        Args:
          function: of rows of one table.
          gradient: "zero" or "any".
          row: weights and state: "any", or "fresh" as in an empty slot.
        """
        rng = np.random.default_rng(0)
        fresh = self._fresh if row == "fresh" else {}
        inputs = []
        for node in function.inputs:
            is_gradient = node in self.gradient.values()
            if is_gradient and gradient == "zero":
                x = np.zeros((_DRAWS, *node.aval.shape), node.aval.dtype)
            elif not is_gradient and row == "fresh":
                x = np.broadcast_to(fresh[id(node)], (_DRAWS, *node.aval.shape))
            else:
                is_state = node in self.followers.values()
                x = _draw(rng, node.aval, signed=not is_state)
            inputs.append(x)
        is_constant = [not isinstance(x, Tracer) for x in function.operands]
        branches = {
            id(step.inputs[0])
            for step in function.steps
            if step.eqn.primitive.name in ("cond", "select_n")
        }
        operands = [
            x
            if is_known
            else _draw(rng, jax.typeof(x), False, id(x) in branches, is_large=False)
            for x, is_known in zip(function.operands, is_constant)
        ]
        axes = [None if is_known else 0 for is_known in is_constant]
        run = jax.jit(jax.vmap(lambda _, *x: function(*x), in_axes=(0, 0, axes)))
        args = (
            np.zeros(_DRAWS, np.float32),
            inputs,
            operands,
        )  # of no input, all draws are equal
        # Compiled ahead of time, it runs on numbers even while JAX traces.
        return [np.asarray(x) for x in run.lower(*_types(args)).compile()(*args)]

    @functools.cached_property
    def _fresh(self) -> dict[int, np.ndarray]:
        """Weights and state of an empty slot, by node: a row that was never touched."""
        specs = list(self.specs)
        for t in self.tables:
            specs[t] = self._with_rows(specs[t], t, self.one_row)
        arrays = trees.arrays(specs)
        init = lambda *x: jax.tree.leaves(
            self.tx.init(trees.fill(self.treedef, specs, x))
        )
        zeros = [np.zeros(x.shape, x.dtype) for x in arrays]
        state = jax.jit(init).lower(*arrays).compile()(*zeros)
        values = {id(node): np.asarray(state[k]) for k, node in self.followers.items()}
        weights = self.weights.values()
        return values | {id(x): np.zeros(x.aval.shape, x.aval.dtype) for x in weights}

    def function(self, split: row_program.Split, table: int) -> RowFunction:
        """Returns the update of a row, its new state, and its old state."""
        mine = [k for k, node in self.followers.items() if node.table == table]
        n = len(self.tables)
        outputs = [
            split.outputs[self.tables.index(table)],
            *(split.outputs[n + k] for k in mine),
            *(self.followers[k] for k in mine),
        ]
        return RowFunction(outputs, self.nodes(table))

    def moved(self, split: row_program.Split, table: int) -> list[str]:
        """Returns what changes in a row of a table without a gradient."""
        mine = [k for k, node in self.followers.items() if node.table == table]
        update, *state = self.run(self.function(split, table), "zero", "any")
        # A state that cannot be, like a variance below zero, gives NaN.
        valid = ~np.isnan(update)
        changed = [WEIGHTS] if np.any(update[valid]) or not np.any(valid) else []
        for k, new, old in zip(mine, state, state[len(mine) :]):
            if new.astype(old.dtype).tobytes() != old.tobytes():
                changed.append(self.paths[k])
        return changed


WEIGHTS = "weights"
_DRAWS = 8


def _raise(fault: NotByRows) -> None:
    raise fault


def _types(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def _draw(
    rng: np.random.Generator,
    aval: Any,
    signed: bool,
    is_branch: bool = False,
    is_large: bool = True,
) -> Any:
    """Draws numbers of a type, of several sizes, and both booleans.

    Integers are counts, which are positive, unless they choose a branch. A global
    number is not large, since the exponential of a decay may be taken.
    """
    shape, dtype = (_DRAWS, *aval.shape), aval.dtype
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        with jax.ensure_compile_time_eval():
            return jax.random.split(jax.random.key(0), shape)
    if jnp.issubdtype(dtype, np.bool_):
        flags = rng.random(shape) < 0.5
        flags[0], flags[1] = False, True
        return flags
    if not jnp.issubdtype(dtype, jnp.inexact):
        numbers = rng.integers(1, 9, shape)
        if is_branch:
            numbers[0] = 0
        return numbers.astype(dtype)
    sizes = np.resize([1.0, 0.1, 10.0, 1.0, 1e3 if is_large else 1.0], _DRAWS)
    x = rng.uniform(0.05, 0.95, shape) * sizes.reshape(-1, *[1] * len(aval.shape))
    if signed:
        x = x * rng.choice([-1, 1], shape)
    return x.astype(dtype)


def _has_rows_of(table: int, x: Any) -> bool:
    return isinstance(x, Node) and x.table in (table, None)


def _path(x: Any) -> tuple[Any, ...]:
    return x.step.path if isinstance(x, Node) and x.step is not None else ()


def _required(update: Any) -> list[str]:
    """Returns the arguments that an update requires by name."""
    parameters = inspect.signature(update).parameters.values()
    return [
        p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty
    ]


def _missing(error: BaseException | None) -> set[str]:
    """Returns the arguments that an update inside of the update requires by name.

    Its signature cannot be reached, but Python's message has the names.
    """
    if "required keyword-only argument" not in str(error):
        return set()
    return set(re.findall(r"'(\w+)'", str(error)))


def _by_number(fault: NotByRows) -> NotByRows:
    """Returns the fault of an update that traces with all rows, but not with fewer."""
    fault.why = f"{fault.why}; {BY_NUMBER}"
    return fault


# ------------------------------------------------------------------ JAX's settings


@contextlib.contextmanager
def jax_defaults() -> Iterator[None]:
    """Restores JAX's defaults, for any settings of the caller."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(state_leaves.without_mesh())
        stack.enter_context(jax.disable_jit(False))
        stack.enter_context(jax.numpy_dtype_promotion("standard"))
        stack.enter_context(jax.numpy_rank_promotion("allow"))
        yield
