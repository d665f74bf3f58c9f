"""The ids of a SelectedRows as a leaf of a tree: an array without arithmetic.

`jax.tree.map(jnp.add, g1, g2)` must not add row ids. So a SelectedRows shows its ids to
trees as an array of a dtype that JAX moves (stacks, indexes, selects, shards, donates)
and refuses to compute with: the dtype of a random key. `seal` makes this leaf from
plain ids, and `unseal` gives the plain ids back. XLA cancels a `seal` and an `unseal`
that meet in one program.

The leaf has as many axes as the values: `[n, 1, ...]`. So a function that JAX calls
with both moves slots in both, also if it counts axes from the last: `jnp.flip(x, -1)`
turns columns and no slots. The id of a slot never leaves its first place, so a result
whose ids are not `[..., n, 1, ...]` is refused (`SelectedRows.rows`).

The leaf stores `~(id + 1)` in uint32 words. Words that JAX makes by itself are then
empty slots: zeros, of loops and `jnp.zeros_like`, are the id -2, and what `jnp.take`
fills in is -1. As unsigned integers these are the largest two.

Sharp edges:

- `np.asarray(leaf)` is refused. Save `rows` and `values` with NumPy.
- On jax 0.7.2 `jnp.take(leaf, ...)` is refused. Index the leaf.
- `jax.lax.all_gather` of the leaf needs `tiled=True`.
- Host callbacks receive the words, which `from_words` recognizes.

The scales and biases of a QuantizedTable are such a leaf too, see `seal_pairs`.
"""

import contextlib
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from sparsejax import _compat


def seal(ids: Any, row_ndim: int) -> Any:
    """Returns integer ids as a leaf; placeholders and leaves pass through.

    Args:
      ids: `[*batch, n]`.
      row_ndim: int, the number of axes of a row; as many axes are appended.
    """
    if getattr(ids, "dtype", None) not in _OPAQUE:
        return ids
    if isinstance(ids, np.ndarray):
        ids = jnp.asarray(ids)  # 64 bits become 32 unless x64 is enabled
    dtype, wrap = _OPAQUE[ids.dtype]
    if isinstance(ids, jax.Array):
        with _computing(ids, ids.dtype):
            return _wrapped(ids, row_ndim, wrap)
    if isinstance(ids, jax.ShapeDtypeStruct):
        shape = (*ids.shape, *(1,) * row_ndim)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=ids.sharding)
    return ids


def unseal(leaf: Any, row_ndim: int) -> Any:
    """Returns the plain ids of a leaf; anything else passes through.

    Args:
      leaf: `[*batch, n, 1, ...]`.
      row_ndim: int, the number of axes of length 1 at the end.
    """
    ints = _INTEGERS.get(getattr(leaf, "dtype", None))
    if ints is None:
        return leaf
    if isinstance(leaf, jax.Array):
        with _computing(leaf, ints):
            return _from_words(jax.random.key_data(leaf), ints, row_ndim)
    if isinstance(leaf, jax.ShapeDtypeStruct):
        shape = leaf.shape[: len(leaf.shape) - row_ndim]
        sharding = leaf.sharding
        if isinstance(sharding, NamedSharding):  # its spec may name the axes that go
            spec = PartitionSpec(*sharding.spec[: len(shape)])
            kind = sharding.memory_kind
            sharding = NamedSharding(sharding.mesh, spec, memory_kind=kind)
        return jax.ShapeDtypeStruct(shape, ints, sharding=sharding)
    return leaf


def is_sealed(x: Any) -> bool:
    """Returns True if `x` is a leaf that `seal` made."""
    return getattr(x, "dtype", None) in _INTEGERS


def from_words(leaf: Any, values: Any, row_ndim: int) -> Any:
    """Returns the plain ids if `leaf` holds the words of a leaf; else `leaf`.

    JAX calls host callbacks with the words of a leaf. Only the additional last axis, of
    length 1 or 2, tells them from ids of uint32. So a tree must not be rebuilt with
    plain uint32 ids of a batch whose capacity is 1 or 2, if a row is a number.

    Args:
      leaf: `[*batch, n]`, or the words of a leaf, `[*batch, n, 1, ..., 1 or 2]`.
      values: `[*batch, n, *row]`.
      row_ndim: int, the number of axes of a row.
    """
    if isinstance(leaf, Tracer) or getattr(leaf, "dtype", None) != np.uint32:
        return leaf
    *shape, words = np.shape(leaf) or (0,)
    slots, ones = shape[: len(shape) - row_ndim], shape[len(shape) - row_ndim :]
    if words not in (1, 2) or not slots or ones != [1] * row_ndim:
        return leaf
    if [*np.shape(values)[: len(slots)]] != slots:
        return leaf
    # NumPy, since a callback that runs a program of JAX can wait for itself.
    ints = np.dtype(np.int32 if words == 1 else np.int64)
    ids = np.ascontiguousarray(~np.asarray(leaf)).view(ints).reshape(slots)
    return ids - np.ones((), ints)


@contextlib.contextmanager
def _computing(ids: Any, ints: np.dtype):
    """The context in which ids become words, and words become ids.

    Ids with a known value stay known while a program is traced, because a tree that is
    built there can outlive the trace.
    """
    with contextlib.ExitStack() as stack:
        if not isinstance(ids, Tracer):
            stack.enter_context(jax.ensure_compile_time_eval())
        if ints.itemsize == 8:  # also if x64 was enabled only where the ids were made
            stack.enter_context(_compat.enable_x64(True))
        yield


# All of it cancels where words are made and read in one program.


@functools.partial(jax.jit, inline=True, static_argnums=(1, 2))
def _wrapped(ids: jax.Array, row_ndim: int, wrap: Any) -> jax.Array:
    if ids.dtype.itemsize < 4:
        ids = ids.astype(_widened(ids.dtype))
    words = lax.bitcast_convert_type(~(ids + np.ones((), ids.dtype)), np.uint32)
    axes = row_ndim + (words.ndim == ids.ndim)  # 64 bits are two words already
    # Outside of `jit`, `wrap` would keep the sharding of the words, whose rank is more.
    return wrap(lax.expand_dims(words, range(ids.ndim, ids.ndim + axes)))


@functools.partial(jax.jit, inline=True, static_argnums=(1, 2))
def _from_words(words: jax.Array, ints: np.dtype, row_ndim: int) -> jax.Array:
    wide = ints if ints.itemsize == 8 else _widened(ints)
    if ints.itemsize < 8:
        row_ndim += 1
    ids = lax.bitcast_convert_type(words, wide)
    ids = lax.squeeze(ids, range(ids.ndim - row_ndim, ids.ndim))
    ids = ~ids - np.ones((), wide)
    if ints.kind == "u" and ints != wide:  # an empty slot must not wrap to a row
        ids = lax.min(ids, np.array(np.iinfo(ints).max, wide))
    return ids.astype(ints)


def _widened(ints: np.dtype) -> np.dtype:
    """The 32-bit dtype that holds ids of `ints`, with the same sign."""
    return np.dtype(np.uint32 if ints.kind == "u" else np.int32)


def _label(ints: np.dtype) -> str:
    """Returns the name of the dtype. JAX's errors show it, so it names the ways out."""
    return (
        f"row_ids[{ints}] of a SelectedRows; use g1 + g2, g.map(f), "
        "sparsejax.parallel.psum, sparsejax.optim.global_norm, "
        "sparsejax.optim.lazy(optax.chain(...))"
    )


# By dtype of integers: the dtype of the leaf, and the function that makes it from
# words. Defined at import, since a checkpoint or an exported program may be loaded
# before there is any SelectedRows.
_OPAQUE = {
    ints: _compat.define_opaque(
        f"sparsejax.row_ids[{ints}]",
        _label(ints),
        words=max(1, ints.itemsize // 4),
        number=number,
    )
    for number, ints in enumerate(map(np.dtype, "bhilBHIL"), start=100)
}
_INTEGERS = {dtype: ints for ints, (dtype, _) in _OPAQUE.items()}


# ------------------------------------------------------------------ pairs

# The scale and bias of a row are one element of the leaf `[V, 1]`, and one or two
# words: float16 pairs take no more memory than before. The last axis is there so that
# a sharding of a matrix fits.


def seal_pairs(pairs: Any) -> Any:
    """Returns pairs of floats `[..., 2]` as a leaf `[..., 1]`; others pass through."""
    floats: Any = getattr(pairs, "dtype", None)
    if floats not in _OPAQUE_PAIRS:
        return pairs
    if isinstance(pairs, np.ndarray):
        pairs = jnp.asarray(pairs)
    if isinstance(pairs, jax.Array):
        with _computing(pairs, floats):
            return _sealed_pairs(pairs)
    if isinstance(pairs, jax.ShapeDtypeStruct):
        shape, (dtype, _) = (*pairs.shape[:-1], 1), _OPAQUE_PAIRS[floats]
        return jax.ShapeDtypeStruct(shape, dtype, sharding=pairs.sharding)
    return pairs


def unseal_pairs(leaf: Any) -> Any:
    """Returns the floats of a leaf of `seal_pairs`; anything else passes through."""
    floats = _FLOATS.get(getattr(leaf, "dtype", None))
    if floats is None:
        return leaf
    if isinstance(leaf, jax.Array):
        with _computing(leaf, floats):
            return pairs_of_words(words_of_leaf(leaf))
    if isinstance(leaf, jax.ShapeDtypeStruct):
        shape = (*leaf.shape[:-1], 2)
        return jax.ShapeDtypeStruct(shape, floats, sharding=leaf.sharding)
    return leaf


def pairs_from_words(leaf: Any) -> Any:
    """Returns the floats if `leaf` holds the words of a leaf, see `from_words`."""
    is_words = isinstance(leaf, (np.ndarray, jax.Array)) and leaf.dtype == np.uint32
    if not is_words or isinstance(leaf, Tracer):
        return leaf
    floats = _FLOATS_OF_WORDS[leaf.shape[-1]]
    return np.ascontiguousarray(np.asarray(leaf)).view(floats)[..., 0, :]


def is_sealed_pairs(x: Any) -> bool:
    """Returns True if `x` is a leaf that `seal_pairs` made."""
    return getattr(x, "dtype", None) in _FLOATS


def dtype_of_pairs(leaf: Any) -> Any:
    """Returns the dtype of the floats of a leaf of `seal_pairs`, or its own dtype."""
    return _FLOATS.get(leaf.dtype, leaf.dtype)


def words_of_leaf(leaf: Any) -> jax.Array:
    """Returns the words of a leaf of `seal_pairs`, uint32 `[..., 1 or 2]`.

    Code that reads or writes some rows works on the words: a compiled program then has
    no other array of the height of the table.
    """
    return lax.squeeze(jax.random.key_data(leaf), [leaf.ndim - 1])


def seal_words(words: jax.Array) -> Any:
    """The inverse of `words_of_leaf`."""
    _, wrap = _OPAQUE_PAIRS[_FLOATS_OF_WORDS[words.shape[-1]]]
    return wrap(lax.expand_dims(words, [words.ndim - 1]))


@functools.partial(jax.jit, inline=True)
def _sealed_pairs(pairs: jax.Array) -> jax.Array:
    # Outside of `jit`, JAX would keep the sharding of the words, whose rank is more.
    return seal_words(words_of_pairs(pairs))


@functools.partial(jax.jit, inline=True)
def words_of_pairs(pairs: jax.Array) -> jax.Array:
    """The inverse of `pairs_of_words`."""
    if pairs.dtype.itemsize == 4:
        return lax.bitcast_convert_type(pairs, np.uint32)
    halves = lax.bitcast_convert_type(pairs, np.uint16).astype(np.uint32)
    return halves[..., :1] | (halves[..., 1:] << np.uint32(16))


@functools.partial(jax.jit, inline=True)
def pairs_of_words(words: jax.Array) -> jax.Array:
    """Returns the pairs of floats `[..., 2]` of words `[..., 1 or 2]`."""
    if words.shape[-1] == 1:
        # A bitcast of one word to two halves cannot be exported for any size of batch.
        shifts = np.array([0, 16], np.uint32).reshape((1,) * (words.ndim - 1) + (2,))
        words = lax.shift_right_logical(*jnp.broadcast_arrays(words, shifts))
        return lax.bitcast_convert_type(words.astype(np.uint16), np.float16)
    return lax.bitcast_convert_type(words, np.float32)


_OPAQUE_PAIRS = {
    floats: _compat.define_opaque(
        f"sparsejax.scale_bias[{floats}]",
        f"scale_bias[{floats}] of a QuantizedTable; use table.average(other), "
        "table.dequantize(), table.requantize(array)",
        words=floats.itemsize // 2,
        number=number,
    )
    for number, floats in enumerate(map(np.dtype, "fe"), start=110)
}
_FLOATS = {dtype: floats for floats, (dtype, _) in _OPAQUE_PAIRS.items()}
_FLOATS_OF_WORDS = {floats.itemsize // 2: floats for floats in _OPAQUE_PAIRS}
