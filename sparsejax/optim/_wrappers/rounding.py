"""rounding: narrow tables that learn from updates smaller than their last bit.

`table + update` in bfloat16 rounds to the nearest number of 8 significant bits: an
update below 1/512 of a weight changes nothing, however often it repeats. There are two
remedies, and both touch only the rows read: round up or down at random, so updates take
effect in expectation; or keep a float32 copy of the table, and round that.

How the new weight reaches the table: the transformation returns updates, which
`optax.apply_updates` adds. So it returns d = new - old in float32, where old and new
are both numbers of the narrow dtype. The sum old + d is computed in float32 and rounded
once (by `SelectedRows.__radd__`, and by `optax.apply_updates` for arrays):

- If d is exact, the sum is new, and the table gets exactly new. It is exact if the bits
  of old and new fit in 24: for numbers of 8 bits (bfloat16) within a factor of 2^15 of
  each other, for numbers of 11 bits (float16) within 2^12.
- If |new| is larger than that, old + d is new up to 2^-23 |new|, which rounding undoes.
- If |old| is, old + d is new up to 2^-23 |old|: a weight that falls to less than a
  4,096th of itself in one step may be off by that much, relative to the step.

The rows of a QuantizedTable are dequantized, updated and quantized again. Its update is
a QuantizedTable of two SelectedRows, of codes and of scales. Codes are added modulo
256, and scales as words modulo 2^32, so their sums are exact.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from sparsejax import _arguments
from sparsejax._arguments import KeyLike
from sparsejax._rows import (
    QuantizedTable,
    SelectedRows,
    flat_rows,
    indexing,
    is_quantized,
    is_selected_rows,
    quantized,
    row_ids,
    stacked_rows,
    with_known_sum,
)
from sparsejax.optim import _checks as checks, _trees as trees
from sparsejax.optim._lazy import gather_scatter, state_sharding


class RoundingState(NamedTuple):
    """State of `rounding`.

    Attributes:
      step: int32, the number of updates; each rounds with its own key.
      inner_state: state of `tx`, made for float32 parameters.
      master: float32 copies of the narrow leaves, None elsewhere; () without
        `master=True`.
    """

    step: jax.Array
    inner_state: Any
    master: Any


def rounding(
    tx: optax.GradientTransformation,
    key: KeyLike | None = None,
    *,
    master: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """Trains tables of 16 or 8 bits with updates too small for their precision.

    For a 16-bit weight w and the float32 update u of `tx`,

      w' = R(w + u)         with `key`: R rounds up or down at random
      m' = m + u, w' = R(m')     with `master`: m is w in float32, kept in the state

    Stochastic rounding picks one of the two neighbours, such that `E[R(x)] = x`; with a
    master and no key, R rounds to nearest. The update is w' - w in float32, so that
    `optax.apply_updates` gives exactly w'. `tx` gets float32 gradients and parameters.
    Leaves of other dtypes get the updates of `tx` unchanged.

    For a QuantizedTable pass `table.pull(ids)` in its place to
    `sparsejax.value_and_grad`, and the table itself to `update`. Its rows are
    dequantized, updated and rounded to codes again.

    Args:
      tx: a transformation that accepts SelectedRows, such as `lazy(...)`.
      key: one PRNG key, or an int as its seed; the same for all replicas of a table.
      master: True keeps float32 copies in the state, which lose nothing.

    Returns:
      `optax.GradientTransformationExtraArgs`; `update` needs `params`.

    Raises:
      TypeError: `tx` is not a transformation, or `key` is not a PRNG key.
      ValueError: there is neither a key nor a master, or `params` is missing.

    Example:
      >>> import jax.numpy as jnp, optax, sparsejax as sj
      >>> table = jnp.ones((1000, 1), jnp.bfloat16)
      >>> grad = sj.SelectedRows(jnp.array([3]), jnp.ones((1, 1), jnp.bfloat16), 1000)
      >>> tx = sj.optim.lazy(optax.sgd(1e-3))
      >>> for tx in (tx, sj.optim.rounding(tx, master=True)):
      ...     weights, state = table, tx.init(table)
      ...     for _ in range(10):
      ...         updates, state = tx.update(grad, state, weights)
      ...         weights = optax.apply_updates(weights, updates)
      ...     print(weights[3])
      [1]
      [0.988281]

    References:
      Gupta et al., 2015, "Deep Learning with Limited Numerical Precision".
    """
    checks.check_transformation(tx, "lazy(optax.adam(1e-3))")
    if key is None and not master:
        raise ValueError(
            "pass key=jax.random.key(...) for stochastic rounding, or "
            "master=True to keep a float32 copy of each bfloat16 or float16 leaf."
        )
    if key is not None:
        key = _arguments.as_key(key, from_int=True)
    inner = optax.with_extra_args_support(tx)

    def init(params):
        leaves, treedef = trees.flatten(params)
        wide_init = lambda wide: tx.init(treedef.unflatten(map(_widen, wide)))
        if any(map(is_quantized, leaves)):
            wide_init = jax.jit(wide_init)  # which needs no floats for state of zeros
        # Not the arrays that `tx` gets: it may keep these, and no buffer can be donated
        # twice.
        copies = (_widen(w) if _is_narrow(w) else None for w in leaves)
        return RoundingState(
            state_sharding.init(lambda _: jnp.zeros((), jnp.int32), params),
            wide_init(leaves),
            treedef.unflatten(copies) if master else (),
        )

    def update(updates, state, params=None, **extra_args):
        checks.require_params(params, "it rounds the new weights")
        checks.check_state(state, RoundingState)
        grads, treedef = trees.flatten(updates)
        weights: Any = trees.flatten_params(updates, params)
        narrow = [i for i, w in enumerate(weights) if _is_narrow(w)]
        masters = treedef.flatten_up_to(state.master) if master else []
        wide = list(weights)
        for i in narrow:
            is_rows, is_codes = is_selected_rows(grads[i]), is_quantized(weights[i])
            if is_codes and not is_rows and grads[i] is not None:
                raise _dense_gradient(trees.leaf_paths(updates, "grads")[i], grads[i])
            if master:
                wide[i] = masters[i]
            elif is_codes:
                wide[i] = weights[i].astype(jnp.float32)
            elif not is_rows:  # a wide copy of a table has its full size
                wide[i] = _widen(weights[i])
            grads[i] = _widen(grads[i])
        updates, inner_state = inner.update(
            treedef.unflatten(grads),
            state.inner_state,
            treedef.unflatten(wide),
            **extra_args,
        )
        updates, masters = treedef.flatten_up_to(updates), [None] * len(weights)
        for i in narrow:
            leaf_key = key
            if key is not None:
                leaf_key = jax.random.fold_in(jax.random.fold_in(key, state.step), i)
            updates[i], masters[i] = _apply(weights[i], wide[i], updates[i], leaf_key)
        masters = treedef.unflatten(masters) if master else ()
        state = RoundingState(state.step + 1, inner_state, masters)
        return treedef.unflatten(updates), state

    return trees.transformation(init, update)


def _apply(table: Any, wide: Any, update: Any, key: Any) -> tuple[Any, Any]:
    """Returns the update that rounds the new weights, and the new master.

    Args:
      table: the weights.
      wide: the same weights for `tx`: a master, or the table as it is read.
      update: of `tx`.
      key: for the rounding, or None.
    """
    if trees.is_none_or_masked(update):
        return update, wide
    if not isinstance(update, SelectedRows):
        table, wide = jnp.asarray(table), jnp.asarray(wide)
        new = wide.astype(jnp.float32) + update.astype(jnp.float32)
        rounded = _round(new, table.dtype, key)
        return rounded.astype(new.dtype) - table.astype(new.dtype), new
    # Merged, because each row must be rounded once, and the updates of some
    # transformations have duplicates.
    update = update.astype(jnp.float32).coalesce()
    flat = flat_rows(update, wide)
    zeros = jnp.zeros_like(update.values)
    old = gather_scatter.gather_rows(update, flat, zeros)
    new = old.astype(jnp.float32) + update.values
    if not _is_narrow(wide):
        wide = stacked_rows(update, gather_scatter.scatter_rows(update, flat, new))
    if is_quantized(table):
        return _rounded_codes(table, update, new, key), wide
    old = gather_scatter.gather_rows(update, flat_rows(update, table), zeros)
    change = _round(new, table.dtype, key).astype(jnp.float32) - old.astype(jnp.float32)
    change = indexing.zero_unless(update.filled(), change)
    return update.map(lambda _: change), wide


def _rounded_codes(
    table: QuantizedTable, update: SelectedRows, new: jax.Array, key: Any
) -> QuantizedTable:
    """Returns the update of codes and scales that gives rows new weights."""
    rows, height = update.rows, update.height
    (codes, pairs), treedef = jax.tree.flatten(table)
    if not height:  # JAX cannot gather from an empty axis
        zeros = map(jnp.zeros_like, (codes, row_ids.words_of_leaf(pairs)))
        return treedef.unflatten(SelectedRows(rows[:0], x, 0) for x in zeros)
    old = quantized.read_codes(table, rows), quantized.read_pairs(table, rows)
    new = new.reshape(len(rows), math.prod(table.row_shape))
    new = quantized.requantize(new, old[1], key, table.bits)
    seal, as_words = row_ids.seal_words, row_ids.words_of_pairs

    def change(array, old, new, leaf, seal=lambda x: x):
        change = indexing.zero_unless(update.filled(), new - old)
        total = seal(indexing.set_rows(array, rows, new))
        return with_known_sum(SelectedRows(rows, change, height), leaf, total)

    of_codes = change(codes, old[0], new[0], codes)
    pairs = row_ids.words_of_leaf(pairs), as_words(old[1]), as_words(new[1]), pairs
    return treedef.unflatten([of_codes, change(*pairs, seal)])


def _dense_gradient(where: str, grad: Any) -> TypeError:
    return TypeError(
        f"{where} must be a SelectedRows, since its parameter is a QuantizedTable, got "
        f"{_arguments.kind_of(grad)}. Differentiate the rows that are read: "
        "table.pull(ids) in the table's place."
    )


def _round(x: jax.Array, dtype: Any, key: Any) -> jax.Array:
    """Rounds float32 to a 16-bit dtype: to nearest, or stochastically with a key."""
    # Where excess precision is allowed, as on GPUs, XLA drops a cast to 16 bits and
    # back. It keeps reduce_precision, which flushes subnormal numbers to zero.
    info = jnp.finfo(dtype)
    reduced = jax.lax.reduce_precision(x, jnp.finfo(x.dtype).nexp, info.nmant)
    is_normal = jnp.abs(x) >= info.smallest_normal.astype(x.dtype)
    nearest = jnp.where(is_normal, reduced, x).astype(dtype)
    if key is None:
        return nearest
    # Without the sign, the bits of a float read as an integer are ordered like its
    # magnitude: adding one gives the neighbour farther from zero. For the largest
    # number that is infinity, which is never picked: the gap is infinite, so the
    # comparison is false.
    bits = jax.lax.bitcast_convert_type(nearest, jnp.uint16)
    too_far = jnp.abs(nearest.astype(x.dtype)) > jnp.abs(x)
    bits = bits - too_far.astype(bits.dtype)
    below = jax.lax.bitcast_convert_type(bits, dtype)
    above = jax.lax.bitcast_convert_type(bits + _arguments.scalar(1, bits), dtype)
    gap = jnp.abs(above.astype(x.dtype) - below.astype(x.dtype))
    excess = jnp.abs(x) - jnp.abs(below.astype(x.dtype))
    up = jax.random.uniform(key, x.shape, x.dtype) * gap < excess
    return jnp.where(jnp.isfinite(x), jnp.where(up, above, below), nearest)


def _is_narrow(x: Any) -> bool:
    if is_quantized(x):
        return True
    dtype = getattr(x, "dtype", None)
    return dtype in (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))


def _widen(x: Any) -> Any:
    if trees.is_none_or_masked(x):
        return x
    wide = x.astype(jnp.float32)
    return wide.dequantize() if is_quantized(x) else wide
