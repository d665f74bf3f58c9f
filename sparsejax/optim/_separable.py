"""Whether a transformation may be lifted to rows, and which part of it forbids that."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from sparsejax._rows import SelectedRows
from sparsejax.optim import _follow, _parts, _probe


_GENERIC = jax.ShapeDtypeStruct((_probe.ROWS, 130), jnp.float32)


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
    for a few steps with the same rows and a few with changing rows, so no list of
    names is needed and your own transformations are judged as well.

    True for sgd (with momentum), adam, adamw, adagrad, rmsprop, adadelta, yogi, lion,
    radam, novograd and their like, with clipping, schedules, masks and
    `inject_hyperparams` around them. False for what looks at all rows of a table:
    lamb, lars, adafactor, muon, prodigy, sm3, lbfgs; for noise; and for what keeps
    gradients for later: MultiSteps, apply_every.

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
        if params is None:
            return _is_separable_alone(tx)
        leaves, treedef = flatten(params)
        specs = tuple(map(_follow.spec, leaves))
        return Verdicts(tx, blame_part=False).refusal(treedef, specs) is None
    except Exception:
        return False


def flatten(tree: Any) -> tuple[list[Any], Any]:
    """Leaves and structure; SelectedRows and holes are leaves."""
    is_leaf = lambda x: isinstance(x, SelectedRows) or _follow.is_leaf(x)
    return jax.tree.flatten(tree, is_leaf=is_leaf)


class Verdicts:
    """What is known about lifting `tx`, found out once for each tree of parameters."""

    def __init__(self, tx: Any, blame_part: bool = True):
        self._judge_now = functools.partial(judge, tx, blame_part=blame_part)
        self._found = remember(lambda treedef, specs: {})

    def refusal(self, treedef: Any, specs: tuple[Any, ...]) -> Reason | None:
        """Why no leaf can be lifted, or None if some leaf can be (or none is there)."""
        arrays = [i for i, s in enumerate(specs) if _is_float_array(s)]
        tables = [i for i in arrays if len(specs[i].shape) > 1] or arrays
        tables.sort(key=lambda i: specs[i].shape[0], reverse=True)
        if not tables:
            return None
        # In a large tree the leaf with most rows decides, except for a partition; then,
        # the others at once, and at last a few alone, if one keeps another from it.
        first, rest = (tables, []) if len(tables) <= 8 else (tables[:1], tables[1:])
        for group in filter(None, (first, rest)):
            if len(self._judge(treedef, specs, group)) < len(group):
                return None
        if len(tables) > 1:
            for table in tables[:8]:
                if not self._judge(treedef, specs, [table]):
                    return None
        return self._judge(treedef, specs, tables[:1])[tables[0]]

    def reasons(
        self, treedef: Any, specs: tuple[Any, ...], tables: Sequence[int]
    ) -> dict[int, Reason]:
        """Why tables cannot be lifted, none because of another one."""
        failed = self._judge(treedef, specs, tables)
        if len(tables) == 1 or not failed:
            return failed
        alone = [self._judge(treedef, specs, [t]) for t in failed]
        return {t: reason for found in alone for t, reason in found.items()}

    def _judge(
        self, treedef: Any, specs: tuple[Any, ...], tables: Sequence[int]
    ) -> dict[int, Reason]:
        found = self._found(treedef, specs)
        new = [t for t in tables if t not in found]
        failed = self._judge_now(treedef, specs, new) if new else {}
        for table in new:
            if len(new) == 1 or table not in failed:
                found[table] = failed.get(table)
        return {t: r for t in tables if (r := failed.get(t) or found.get(t))}


def judge(
    tx: Any,
    treedef: Any,
    specs: Sequence[Any],
    tables: Sequence[int],
    blame_part: bool = True,
) -> dict[int, Reason]:
    """Why tables cannot be lifted together, for those that cannot.

    Where the whole fails its parts are judged, to blame the innermost one that fails
    (which takes time, and is left out without `blame_part`). If none does, a chain is
    taken to be by rows as its parts are: after decoupled weight decay, a clip by global
    norm sees the decay of all rows if run densely, and of the rows read if lifted.
    """
    if _parts.holds_tracer(tx):
        return {}  # made inside a trace (inject_hyperparams around lazy): no numbers
    may_be_by_parts = _parts.name(tx) in _parts.TRANSPARENT
    try:
        failed, shared = _probe.probe(tx, treedef, specs, tables)
    except Exception as error:
        message = str(error).strip().split("\n")[0]
        shared = (
            f"it cannot be run on rows of a table ({type(error).__name__}: {message})"
        )
    if shared:
        failed, may_be_by_parts = dict.fromkeys(tables, shared), False

    reasons = {}
    for table, why in failed.items():
        if isinstance(why, tuple):  # the part is known already
            reasons[table] = Reason(*why)
            continue
        if not (blame_part or may_be_by_parts):
            reasons[table] = Reason(_parts.name(tx), why)
            continue
        parts = _parts.children_at(tx, treedef, specs, table)
        inner = (judge(part, treedef, specs, [table], blame_part) for part in parts)
        found = next(filter(None, inner), None)
        if found:
            reasons[table] = found[table]
        elif not (parts and may_be_by_parts):
            reasons[table] = Reason(_parts.name(tx), why)
    return reasons


def _is_float_array(spec: Any) -> bool:
    if _follow.is_leaf(spec) or not spec.shape:
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
    leaves, treedef = flatten(_GENERIC)
    return Verdicts(tx, blame_part=False).refusal(treedef, tuple(leaves)) is None
