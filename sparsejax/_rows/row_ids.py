"""The ids of a SelectedRows as a leaf of a tree: an array without arithmetic.

`jax.tree.map(jnp.add, g1, g2)` must not add row ids. So a SelectedRows shows its ids to
trees as an array of a dtype that JAX moves (stacks, indexes, selects, shards, donates)
and refuses to compute with: the dtype of a random key. `seal` makes this leaf from
plain ids, and `unseal` gives the plain ids back. XLA cancels a `seal` and an `unseal`
that meet in one program.

The leaf has the values' rank: `[n, 1, ...]`. So a function that JAX calls with both
moves slots in both, also if it counts axes from the last: `jnp.flip(x, -1)` reverses
columns, never slots. The id of a slot never leaves its first place, so a result
whose ids are not `[..., n, 1, ...]` is refused (`SelectedRows.rows`).

The leaf stores `~(id + 1)` in uint32 words. Words that JAX makes by itself are then
empty slots: zeros, of loops and `jnp.zeros_like`, are the id -2, and what `jnp.take`
fills in is -1. As unsigned integers these are the largest two.

Sharp edges:

- `np.asarray(leaf)` is refused. Save `rows` and `values` with NumPy.
- On jax 0.7.2 `jnp.take(leaf, ...)` is refused. Index the leaf.
- `jax.lax.all_gather` of the leaf needs `tiled=True`.
- Host callbacks receive the words, which `from_words` recognizes.

The scales and biases of a QuantizedTable are such a leaf too, `[V, 1]`: a pair is one
element, and one or two words. So float16 pairs take no more memory than before. The
last axis is there so that a sharding of a matrix fits.
"""

import contextlib
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from sparsejax import _compat


@dataclasses.dataclass(frozen=True)
class Opaque:
    """A dtype that JAX moves but does not compute with.

    Args:
      plain: the dtype in whose place it stands.
      dtype: of the leaf.
      wrap: the function that makes a leaf of its words, uint32 `[..., words]`.
      words: per element.
    """

    plain: np.dtype
    dtype: Any
    wrap: Any
    words: int


# JAX's errors show these labels, so they name the ways out.
_OF_ROWS = (
    "SelectedRows; use g1 + g2, g.map(f), sparsejax.parallel.psum, "
    "sparsejax.optim.global_norm, sparsejax.optim.lazy(optax.chain(...))"
)
_OF_TABLE = (
    "QuantizedTable; use table.average(other), table.dequantize(), "
    "table.requantize(array)"
)


def _define(name: str, plain: np.dtype, words: int, number: int, of: str) -> Opaque:
    name = f"{name}[{plain}]"
    label = f"{name} of a {of}"
    made = _compat.define_opaque(f"sparsejax.{name}", label, words, number)
    return Opaque(plain, *made, words)


# Defined at import, since a checkpoint or an exported program may be loaded before
# there is any SelectedRows.
_IDS = [
    _define("row_ids", plain, max(1, plain.itemsize // 4), number, _OF_ROWS)
    for number, plain in enumerate(map(np.dtype, "bhilBHIL"), start=100)
]
_PAIRS = [
    _define("scale_bias", plain, plain.itemsize // 2, number, _OF_TABLE)
    for number, plain in enumerate(map(np.dtype, "fe"), start=110)
]
# By the plain dtype and by the dtype of the leaf: ids, and pairs.
_KINDS = [
    {kind.plain: kind for kind in kinds} | {kind.dtype: kind for kind in kinds}
    for kinds in (_IDS, _PAIRS)
]


def _kind_of(x: Any, row_ndim: int | None) -> Any:
    return _KINDS[row_ndim is None].get(getattr(x, "dtype", None))


def seal(x: Any, row_ndim: int | None = None) -> Any:
    """Returns ids or pairs as a leaf; placeholders and leaves pass through.

    Args:
      x: integer ids `[*batch, n]`, or pairs of floats `[..., 2]`.
      row_ndim: int for ids, the number of axes of a row; as many axes are appended.
    """
    kind = _kind_of(x, row_ndim)
    if kind is None or x.dtype == kind.dtype:
        return x
    if isinstance(x, np.ndarray):
        x = jnp.asarray(x)  # 64 bits become 32 unless x64 is enabled
        kind = _kind_of(x, row_ndim)
    if isinstance(x, jax.Array):
        with _computing(x, kind.plain):
            return _sealed(x, row_ndim, kind.wrap)
    if isinstance(x, jax.ShapeDtypeStruct):
        shape = (*x.shape[:-1], 1) if row_ndim is None else (*x.shape, *(1,) * row_ndim)
        return jax.ShapeDtypeStruct(shape, kind.dtype, sharding=x.sharding)
    return x


def unseal(leaf: Any, row_ndim: int | None = None) -> Any:
    """Returns the plain ids or pairs of a leaf; anything else passes through.

    Args:
      leaf: `[*batch, n, 1, ...]`, or `[..., 1]` for pairs.
      row_ndim: int for ids, the number of axes of length 1 at the end.
    """
    kind = _kind_of(leaf, row_ndim)
    if kind is None or leaf.dtype != kind.dtype:
        return leaf
    if isinstance(leaf, jax.Array):
        with _computing(leaf, kind.plain):
            return _unsealed(jax.random.key_data(leaf), row_ndim, kind.plain)
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    if row_ndim is None:
        shape = (*leaf.shape[:-1], 2)
        return jax.ShapeDtypeStruct(shape, kind.plain, sharding=leaf.sharding)
    shape, sharding = leaf.shape[: len(leaf.shape) - row_ndim], leaf.sharding
    if isinstance(sharding, NamedSharding):  # its spec may name the axes that go
        spec = PartitionSpec(*sharding.spec[: len(shape)])
        kept = dict(memory_kind=sharding.memory_kind)
        sharding = NamedSharding(sharding.mesh, spec, **kept)
    return jax.ShapeDtypeStruct(shape, kind.plain, sharding=sharding)


def is_sealed(x: Any, *, pairs: bool = False) -> bool:
    """Returns True if `x` is a leaf of ids, or of pairs."""
    kind = _kind_of(x, None if pairs else 0)
    return kind is not None and x.dtype == kind.dtype


def dtype_of_pairs(leaf: Any) -> Any:
    """Returns the dtype of the floats of a leaf of pairs, or its own dtype."""
    kind = _kind_of(leaf, None)
    return leaf.dtype if kind is None else kind.plain


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


def pairs_from_words(leaf: Any) -> Any:
    """Returns the floats if `leaf` holds the words of a leaf, see `from_words`."""
    is_words = isinstance(leaf, (np.ndarray, jax.Array)) and leaf.dtype == np.uint32
    if not is_words or isinstance(leaf, Tracer):
        return leaf
    floats = _pairs_of(leaf).plain
    return np.ascontiguousarray(np.asarray(leaf)).view(floats)[..., 0, :]


def words_of_leaf(leaf: Any) -> jax.Array:
    """Returns the words of a leaf of pairs, uint32 `[..., 1 or 2]`.

    Code that reads or writes some rows works on the words: a compiled program then has
    no other array of the height of the table.
    """
    return lax.squeeze(jax.random.key_data(leaf), [leaf.ndim - 1])


def seal_words(words: jax.Array) -> Any:
    """Inverts `words_of_leaf`."""
    return _pairs_of(words).wrap(lax.expand_dims(words, [words.ndim - 1]))


def _pairs_of(words: Any) -> Opaque:
    return next(kind for kind in _PAIRS if kind.words == words.shape[-1])


@contextlib.contextmanager
def _computing(ids: Any, ints: np.dtype):
    """Enters the context in which ids become words, and words become ids.

    Ids with a known value stay known while a program is traced, because a tree that is
    built there can outlive the trace.
    """
    with contextlib.ExitStack() as stack:
        if not isinstance(ids, Tracer):
            stack.enter_context(jax.ensure_compile_time_eval())
        if ints.itemsize == 8:  # also if x64 was enabled only where the ids were made
            stack.enter_context(_compat.enable_x64(True))
        yield


# XLA cancels a packing and an unpacking that meet. Outside of `jit`, `wrap` would keep
# the sharding of the words, whose rank is more.


@functools.partial(jax.jit, inline=True, static_argnums=(1, 2))
def _sealed(x: jax.Array, row_ndim: int | None, wrap: Any) -> jax.Array:
    if row_ndim is None:
        return seal_words(words_of_pairs(x))
    if x.dtype.itemsize < 4:
        x = x.astype(_widened(x.dtype))
    words = lax.bitcast_convert_type(~(x + np.ones((), x.dtype)), np.uint32)
    axes = row_ndim + (words.ndim == x.ndim)  # 64 bits are two words already
    return wrap(lax.expand_dims(words, range(x.ndim, x.ndim + axes)))


@functools.partial(jax.jit, inline=True, static_argnums=(1, 2))
def _unsealed(words: jax.Array, row_ndim: int | None, plain: np.dtype) -> jax.Array:
    if row_ndim is None:
        return pairs_of_words(lax.squeeze(words, [words.ndim - 2]))
    wide = plain if plain.itemsize == 8 else _widened(plain)
    if plain.itemsize < 8:
        row_ndim += 1
    ids = lax.bitcast_convert_type(words, wide)
    ids = lax.squeeze(ids, range(ids.ndim - row_ndim, ids.ndim))
    ids = ~ids - np.ones((), wide)
    if plain.kind == "u" and plain != wide:  # an empty slot must not wrap to a row
        ids = lax.min(ids, np.array(np.iinfo(plain).max, wide))
    return ids.astype(plain)


def _widened(ints: np.dtype) -> np.dtype:
    """Returns the 32-bit dtype that holds ids of `ints`, with the same sign."""
    return np.dtype(np.uint32 if ints.kind == "u" else np.int32)


@functools.partial(jax.jit, inline=True)
def words_of_pairs(pairs: jax.Array) -> jax.Array:
    """Inverts `pairs_of_words`."""
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
