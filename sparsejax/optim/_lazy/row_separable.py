"""Whether a transformation can be lifted to rows, and which part prevents it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from sparsejax import _compat
from sparsejax._arguments import PyTree
from sparsejax._rows import SelectedRows
from sparsejax.optim._lazy import (
    optax_internals,
    probe,
    row_update,
    state_leaves,
    trees,
)
from sparsejax.optim._lazy.probe import Reason


MOST_TRIED = 8  # leaves tested at init, those with the most rows
MOST_REMEMBERED = 32  # trees of parameters cached for one transformation

_GENERIC = jax.ShapeDtypeStruct((probe.ROWS, 130), jnp.float32)
_BESIDE = jax.ShapeDtypeStruct((40, 50), jnp.float32)


def is_row_separable(tx: optax.GradientTransformation, params: PyTree = None) -> bool:
    """Whether a transformation treats each row independently of the others.

    For a gradient G that is zero outside the rows R, state S and weights W, with
    `U, S' = tx(G, S, W)`, it tests whether `tx(G[R], S[R], W[R]) = U[R], S'[R]`: no
    row's step may depend on rows that were not read. `sparsejax.optim.lazy` relies on
    this. The test runs `tx` on a small table, a few steps with the same rows and a few
    with changing rows, so it works for your own transformations too. Parts of a chain
    that combine rows are tested alone as well: in the chain, nothing may be large
    enough for a clip, and a part may act later. Transformations that a short run does
    not unmask are recognized by their state (MultiSteps, apply_every, prodigy and a few
    more). Not found is what code of your own does only after many steps, or a clip
    only to gradients above a million.

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
        default `tx` is tested on one table.

    Returns:
      bool. Never raises: a transformation that cannot be run is not row-separable.

    Example:
      >>> import optax
      >>> from sparsejax.optim import is_row_separable
      >>> is_row_separable(optax.adam(1e-3)), is_row_separable(optax.lamb(1e-3))
      (True, False)

    References:
      TensorFlow Addons, `LazyAdam`; PyTorch, `SparseAdam`.
    """
    try:
        if holds_exact(tx):
            return False
        if params is None:
            return _is_separable_alone(tx)
        leaves, treedef = trees.flatten(params)
        specs = tuple(map(trees.to_spec, leaves))
        return Verdicts(tx).refusal(treedef, specs) is None
    except Exception:
        return False


@trees.remember
def _is_separable_alone(tx: Any) -> bool:
    if not optax_internals.is_transformation(tx):
        return False
    return not Verdicts(tx).alone_on(_GENERIC).failures(tx, [0])


def _trees_for(tx: Any, table: Any) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Trees to test a table on: alone, and beside a dense leaf.

    A norm over all leaves hides what a part before it did to the only leaf there is:
    after `normalize`, lamb would be as good as adam. And a dense leaf hides what is
    small beside it: what dog adds up over all leaves.
    """
    yield jax.tree.structure(0), (table,)
    if not optax_internals.holds_tracer(tx) and _combines_leaves(tx):
        yield jax.tree.structure((0, 0)), (table, _BESIDE)


@trees.remember
def _combines_leaves(tx: Any) -> bool:
    """Whether what is done to a leaf depends on the gradients of others."""
    extra_args = dict.fromkeys(optax_internals.required_extra_args(tx), 1.0)

    def update_twice(*grads):
        params = tuple(map(jnp.zeros_like, grads))
        state, updates = tx.init(params), ()
        for _ in range(2):
            run = optax.with_extra_args_support(tx).update
            updates, state = run(grads, state, params, **extra_args)
        first, _ = jax.tree.leaves(updates)
        return [first]

    try:
        with probe.jax_defaults():
            program = _compat.trace(update_twice, _GENERIC, _BESIDE)
    except Exception:
        return False  # the probe says why it cannot be run
    return _compat.only_needed(*program)[2][1]


def _combines_rows(tx: Any, treedef: Any, specs: Sequence[Any], table: int) -> bool:
    """Whether what is done to a row of a table may depend on its other rows.

    Read from the program, so no number can hide it. False is certain; True is not.
    """
    specs = probe.small_tree(specs, [table])
    if trees.row_axes(specs[table]) > 1:
        return True
    extra_args = dict.fromkeys(optax_internals.required_extra_args(tx), 1.0)
    by_rows = None

    def update(grads, weights, state, rows):
        nonlocal by_rows
        grads[table] = SelectedRows(rows, grads[table], probe.ROWS)
        by_rows = row_update.update(
            optax.with_extra_args_support(tx),
            treedef,
            grads,
            weights,
            state,
            found.owners,
            [table],
            extra_args,
            check=False,  # so that a reduction of rows is not tried
        )

    try:
        with probe.jax_defaults():
            found = state_leaves.find(tx.init, treedef, specs, [table])
            rows = jax.ShapeDtypeStruct((probe.ROWS,), jnp.int32)
            jax.eval_shape(update, specs, specs, found.state, rows)
    except Exception:
        return True
    return by_rows is None


# ------------------------------------------------------------------ exact

_EXACT = "_sparsejax_exact"


def mark_exact(update: Callable) -> Callable:
    """Marks the update function of `sparsejax.optim.exact`, which is never lifted.

    It accepts SelectedRows itself. It is row-separable, but wrong without catch_up.
    """
    setattr(update, _EXACT, True)
    return update


def holds_exact(tx: Any) -> bool:
    """Whether some part of `tx` is `exact`."""
    parts = optax_internals.descendants(tx)
    return any(getattr(part.update, _EXACT, False) for part in parts)


# ------------------------------------------------------------------ verdicts


class Verdicts:
    """Which tables `tx` can be lifted for, tested once for each tree of parameters.

    A tree is given by its structure and the specs of its leaves (see `trees`), and a
    table by its leaf index.
    """

    def __init__(self, tx: Any):
        self._tx = tx
        self._trials = {}
        # If so, a table can be tested without the rest of a possibly large tree.
        self._alone = optax_internals.treats_leaves_alike(tx)

    def refusal(self, treedef: Any, specs: Sequence[Any]) -> tuple[int, Reason] | None:
        """A table and why it cannot be lifted, or None if some leaf can."""
        arrays = [i for i, s in enumerate(specs) if is_float_array(s)]
        tables = [i for i in arrays if len(specs[i].shape) > 1] or arrays
        tables.sort(key=lambda i: specs[i].shape[0], reverse=True)
        tried = tables[:MOST_TRIED]
        some_not_tried = len(tables) > len(tried) and not self._alone
        if some_not_tried or not tables:
            return None  # update decides, for the leaves that are read by rows
        failed = self.failures(treedef, specs, tried)
        return (tables[0], failed[tables[0]]) if len(failed) == len(tried) else None

    def failures(
        self, treedef: Any, specs: Sequence[Any], tables: Sequence[int]
    ) -> dict[int, Reason]:
        """The tables that cannot be lifted, excluding faults of other tables."""
        if self._alone:
            kinds = {t: self.alone_on(specs[t]) for t in tables}
            failed = {t: trials.failures(self._tx, [0]) for t, trials in kinds.items()}
            return {t: found[0] for t, found in failed.items() if found}
        trials = self._on(treedef, specs)
        new = [t for t in tables if t not in trials.lifted]
        failed = trials.failures(self._tx, new)
        if len(new) > 1:
            alone = [trials.failures(self._tx, [t]) for t in failed]
            failed = {t: why for found in alone for t, why in found.items()}
        trials.lifted.update(set(new) - set(failed))
        return failed

    def blame(
        self, treedef: Any, specs: Sequence[Any], table: int, reason: Reason
    ) -> Reason:
        """The reason of the innermost part of `tx` that cannot be lifted."""
        if self._alone:
            return self.alone_on(specs[table]).blame(self._tx, 0, reason)
        return self._on(treedef, specs).blame(self._tx, table, reason)

    def alone_on(self, spec: Any) -> _Trials:
        """The trials of a table without a tree; those that find a fault, if any."""
        trials = None
        for tree in _trees_for(self._tx, probe.with_few_rows(spec)):
            trials = self._on(*tree)
            if trials.failures(self._tx, [0]):
                break
        assert trials is not None
        return trials

    def _on(self, treedef: Any, specs: Sequence[Any]) -> _Trials:
        key = treedef, tuple(specs)
        if key not in self._trials:
            if len(self._trials) >= MOST_REMEMBERED:
                del self._trials[next(iter(self._trials))]
            self._trials[key] = _Trials(treedef, tuple(specs), self._on)
        return self._trials[key]


class _Trials:
    """Test results for a transformation and its parts on one tree.

    Args:
      treedef: structure of the tree.
      specs: its leaves.
      on: the trials on another tree.
    """

    def __init__(
        self, treedef: Any, specs: tuple[Any, ...], on: Callable[[Any, Any], _Trials]
    ):
        self._tree, self._on = (treedef, specs), on
        self._tried = []  # (transformation, tables, failures): parts may be unhashable
        self.lifted = set()

    def failures(self, tx: Any, tables: Sequence[int]) -> dict[int, Reason]:
        """Which tables cannot be lifted together, and why."""
        for part, tried, failed in self._tried:
            if tried == list(tables) and optax_internals.same(part, tx):
                return failed
        failed = self._try(tx, tables) if tables else {}
        self._tried.append((tx, list(tables), failed))
        return failed

    def _try(self, tx: Any, tables: Sequence[int]) -> dict[int, Reason]:
        if optax_internals.holds_tracer(tx):
            return {}  # made in a trace, as by inject_hyperparams: cannot be run
        try:
            failed, shared = probe.probe(tx, *self._tree, tables)
        except Exception as error:
            message = str(error).strip().split("\n")[0]
            message = f"{type(error).__name__}: {message}"
            shared = Reason(f"it cannot run on rows of a table ({message})", ran=False)
        if shared:
            return dict.fromkeys(tables, shared)
        if not _has_parts(tx):
            return failed
        whole, failed = failed, {}
        for t in tables:
            # What clips may get nothing large enough in this run, and what follows may
            # undo it at first. So parts that combine rows are tested alone.
            alone = [] if t in whole else self._innermost(tx, t)
            for part in alone:
                if _combines_rows(part, *self._tree_for(part, t)):
                    why = self._failure(part, t)
                    if why and why.ran:
                        failed.setdefault(t, why)
        if optax_internals.name(tx) not in optax_internals.TRANSPARENT:
            return {**whole, **failed}
        # A wrapper that only combines parts is row-separable if each part is, even if
        # the whole is not: after decoupled weight decay, a clip by global norm sees the
        # decay of all rows in a dense run, but only of the rows read if lifted.
        for t, why in whole.items():
            parts = optax_internals.children_at(tx, *self._tree, t)
            found = (self._failure(part, t) for part in parts)
            found = next(filter(None, found), None) if parts else why
            if found:
                failed[t] = found
        others = [t for t in whole if t not in failed]
        if others and probe.counts_empty_slots(tx, *self._tree, others):
            why = (
                "a part of it moves rows that were never read, and a later part takes "
                "a norm over all rows"
            )
            failed |= dict.fromkeys(others, Reason(why))
        return failed

    def _innermost(self, tx: Any, table: int) -> Iterator[Any]:
        """The parts of the parts that act on a table."""
        for part in optax_internals.children_at(tx, *self._tree, table):
            if _has_parts(part):
                yield from self._innermost(part, table)
            else:
                yield part

    def _failure(self, part: Any, table: int) -> Reason | None:
        """Why a part cannot be lifted."""
        treedef, specs, table = self._tree_for(part, table)
        return self._on(treedef, specs).failures(part, [table]).get(table)

    def _tree_for(self, part: Any, table: int) -> tuple[Any, tuple[Any, ...], int]:
        """What a part is tested on: the table alone, if leaves are treated alike."""
        treedef, specs = self._tree
        if not optax_internals.treats_leaves_alike(part):
            return treedef, specs, table
        return jax.tree.structure(0), (probe.with_few_rows(specs[table]),), 0

    def blame(self, tx: Any, table: int, reason: Reason) -> Reason:
        """The reason of the innermost part of `tx` that cannot be lifted."""
        if reason.part:
            return reason
        for part in optax_internals.children_at(tx, *self._tree, table):
            failed = self._failure(part, table)
            if failed:
                return self.blame(part, table, failed)
        can_be_wrong = reason.can_be_wrong and not optax_internals.is_optax(tx)
        return Reason(reason.why, optax_internals.name(tx), can_be_wrong)


def _has_parts(tx: Any) -> bool:
    """Whether `tx` is a wrapper that does to a table what its parts do."""
    kind = optax_internals.name(tx)
    return kind in optax_internals.TRANSPARENT or kind in optax_internals.WRAPPERS


def is_float_array(spec: Any) -> bool:
    if trees.is_none_or_masked(spec) or not spec.shape:
        return False
    return jnp.issubdtype(spec.dtype, jnp.inexact)
