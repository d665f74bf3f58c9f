"""Whether a transformation may be lifted to rows, and which part of it forbids that."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from sparsejax._rows import SelectedRows
from sparsejax.optim._lazy import follow, parts as _parts, probe


MOST_TRIED = 8  # leaves tried at init, those with most rows
MOST_REMEMBERED = 32  # trees of parameters for one transformation

_EXACT = "sparsejax.optim._exact.exact"

_GENERIC = jax.ShapeDtypeStruct((probe.ROWS, 130), jnp.float32)
_LEAF = jax.tree.structure(0)


class Reason(NamedTuple):
    """Why a table cannot be lifted, and the part of the transformation to blame."""

    part: str
    why: str

    def __str__(self) -> str:
        known = _parts.KNOWN_AS.get(self.part)
        return f"{self.part}{f' ({known})' if known else ''}: {self.why}"


def is_row_separable(tx: Any, params: Any = None) -> bool:
    """Whether a transformation of rows alone is what it is for a whole table.

    For a gradient G that is zero outside of the rows R, state S and weights W, and
    `U, S' = tx(G, S, W)`, it asks whether `tx(G[R], S[R], W[R]) = U[R], S'[R]`: whether
    no row's step depends on rows that were not read. This is what
    `sparsejax.optim.lazy` relies on. It is found out by running `tx` on a small table,
    for a few steps with the same rows and a few with changing rows, so your own
    transformations are judged as well. Only what so short a run does not show is known
    by its state (MultiSteps, apply_every, prodigy and a few more).

    True for sgd (with momentum), adam, adamw, adagrad, rmsprop, adadelta, yogi, lion,
    radam, novograd and their like, with clipping, schedules, masks and
    `inject_hyperparams` around them. False for what looks at all rows of a table:
    lamb, lars, adafactor, muon, prodigy, sm3, lbfgs; for noise; for what keeps
    gradients for later: MultiSteps, apply_every; and for `sparsejax.optim.exact`, which
    takes SelectedRows itself.

    `optax.clip_by_global_norm` *after* adam counts as separable. Lifted, it clips by
    the norm over the rows that were read, without the momentum of the others.

    Args:
      tx: an optax transformation.
      params: parameters (or ShapeDtypeStructs) for transformations that need them,
        such as `optax.partition` with labels for a certain tree. The answer is then
        whether `lazy(tx).init(params)` accepts them: whether some leaf can be lifted.
        Left out, `tx` is tried on one table.

    Returns:
      bool. Never raises: what cannot be run is not row-separable.

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
        leaves, treedef = flatten(params)
        specs = tuple(map(follow.spec, leaves))
        return Verdicts(tx).refusal(treedef, specs) is None
    except Exception:
        return False


def holds_exact(tx: Any) -> bool:
    """Whether a part of `tx` is `exact`: by rows, but not without its catch_up."""
    made_in = (getattr(p.update, "__module__", None) for p in _parts.descendants(tx))
    return _EXACT in made_in


def flatten(tree: Any) -> tuple[list[Any], Any]:
    """Leaves and structure; SelectedRows and holes are leaves."""
    is_leaf = lambda x: isinstance(x, SelectedRows) or follow.is_leaf(x)
    return jax.tree.flatten(tree, is_leaf=is_leaf)


class Verdicts:
    """What is known about lifting `tx`, found out once for each tree of parameters."""

    def __init__(self, tx: Any):
        self._tx = tx
        self._trials = {}
        # Then a table can be tried without the rest of the tree, however large that is.
        self._alone = _parts.treats_leaves_alike(tx)

    def refusal(self, treedef: Any, specs: Sequence[Any]) -> tuple[int, Any] | None:
        """A table and why it cannot be lifted, or None if some leaf can be."""
        arrays = [i for i, s in enumerate(specs) if is_float_array(s)]
        tables = [i for i in arrays if len(specs[i].shape) > 1] or arrays
        tables.sort(key=lambda i: specs[i].shape[0], reverse=True)
        tried = tables[:MOST_TRIED]
        some_not_tried = len(tables) > len(tried) and not self._alone
        if some_not_tried or not tables:
            return None  # update judges the leaves that are read by rows
        failed = self.failures(treedef, specs, tried)
        return (tables[0], failed[tables[0]]) if len(failed) == len(tried) else None

    def failures(
        self, treedef: Any, specs: Sequence[Any], tables: Sequence[int]
    ) -> dict[int, Any]:
        """Why tables cannot be lifted, none because of another one."""
        if self._alone:
            kinds = {t: self._on(_LEAF, [_kind(specs[t])]) for t in tables}
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

    def blame(self, treedef: Any, specs: Sequence[Any], table: int, why: Any) -> Reason:
        """The innermost part of the transformation that cannot be lifted."""
        if self._alone:
            treedef, specs, table = _LEAF, [_kind(specs[table])], 0
        return self._on(treedef, specs).blame(self._tx, table, why)

    def _on(self, treedef: Any, specs: Sequence[Any]) -> "_Trials":
        key = _hashable(treedef), tuple(specs)
        if key not in self._trials:
            if len(self._trials) >= MOST_REMEMBERED:
                del self._trials[next(iter(self._trials))]
            self._trials[key] = _Trials(treedef, tuple(specs))
        return self._trials[key]


class _Trials:
    """What was found out about a transformation and its parts on one tree."""

    def __init__(self, treedef: Any, specs: tuple[Any, ...]):
        self._tree = treedef, specs
        self._failed = []  # (transformation, tables, failures): parts may have no hash
        self.lifted = set()

    def failures(self, tx: Any, tables: Sequence[int]) -> dict[int, Any]:
        """Why tables cannot be lifted together, for those that cannot."""
        for part, tried, failed in self._failed:
            if tried == list(tables) and _parts.same(part, tx):
                return failed
        failed = self._try(tx, tables) if tables else {}
        self._failed.append((tx, list(tables), failed))
        return failed

    def _try(self, tx: Any, tables: Sequence[int]) -> dict[int, Any]:
        if _parts.holds_tracer(tx):
            return {}  # made inside a trace, as inject_hyperparams does: no numbers
        try:
            failed, shared = probe.probe(tx, *self._tree, tables)
        except Exception as error:
            message = str(error).strip().split("\n")[0]
            message = f"{type(error).__name__}: {message}"
            shared = f"it cannot be run on rows of a table ({message})"
        if shared:
            return dict.fromkeys(tables, shared)
        if _parts.name(tx) not in _parts.TRANSPARENT:
            return failed
        # What only puts parts together is by rows if each of them is, even where the
        # whole is not: after decoupled weight decay, a clip by global norm sees the
        # decay of all rows if run densely, and of the rows read if lifted.
        return {t: why for t, why in failed.items() if self._fails_in_a_part(tx, t)}

    def _fails_in_a_part(self, tx: Any, table: int) -> bool:
        parts = _parts.children_at(tx, *self._tree, table)
        return not parts or any(self.failures(part, [table]) for part in parts)

    def blame(self, tx: Any, table: int, why: Any) -> Reason:
        """The innermost part of `tx` that cannot be lifted, and why."""
        if isinstance(why, tuple):  # the part is known already
            return Reason(*why)
        for part in _parts.children_at(tx, *self._tree, table):
            failed = self.failures(part, [table])
            if failed:
                return self.blame(part, table, failed[table])
        return Reason(_parts.name(tx), why)


def _kind(spec: Any) -> Any:
    return jax.ShapeDtypeStruct((probe.ROWS, *spec.shape[1:]), spec.dtype)


def _hashable(treedef: Any) -> Any:
    try:
        hash(treedef)
    except TypeError:  # static data of a user's own node may have no hash
        return str(treedef)
    return treedef


def is_float_array(spec: Any) -> bool:
    if follow.is_leaf(spec) or not spec.shape:
        return False
    return jnp.issubdtype(spec.dtype, jnp.inexact)


def remember(function: Callable, size: int = 32) -> Callable:
    """`functools.lru_cache` that computes anew where the arguments have no hash."""
    cached = functools.lru_cache(size)(function)

    def call(*args):
        try:
            hash(args)
        except TypeError:
            return function(*args)
        return cached(*args)

    return call


@remember
def _is_separable_alone(tx: Any) -> bool:
    if not _parts.is_transformation(tx):
        return False
    return not _Trials(_LEAF, (_GENERIC,)).failures(tx, [0])
