"""The ids of a SelectedRows as a leaf of a tree: an array without arithmetic.

`jax.tree.map(jnp.add, g1, g2)` must not add row ids. So a SelectedRows shows its ids to
trees as an array of a dtype that JAX moves (stacks, indexes, selects, shards, donates)
and refuses to compute with: the dtype of a random key. `IDS.seal` makes this leaf from
plain ids, and `IDS.unseal` gives the plain ids back. XLA cancels a `seal` and an
`unseal` that meet in one program.

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

The scales and biases of a QuantizedTable are such a leaf too, of `PAIRS`, `[V, 1]`: a
pair is one element, and one or two words. So float16 pairs take no more memory than
before. The last axis is there so that a sharding of a matrix fits.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from sparsejax import _arguments, _compat


@dataclasses.dataclass(frozen=True, eq=False)
class Opaque:
    """Leaves that JAX moves but does not compute with, and the numbers in them.

    The numbers are `[*lead, *element]`, and the words of their leaf, which has the
    shape `[*lead, 1, ..., 1]` with `row_ndim` ones, `[*lead, 1, ..., 1, words]`.

    Args:
      kinds: by dtype of the numbers, the dtype of leaves, and a function that makes a
        leaf of its words.
      element: shape of an element.
      pack: a function from numbers to words `[*lead, words]`.
      unpack: the inverse, `unpack(words, dtype)`.
      view: the inverse for NumPy arrays, `view(words)`.
    """

    kinds: dict[np.dtype, tuple[Any, Callable[[jax.Array], Any]]]
    element: tuple[int, ...]
    pack: Callable[[jax.Array], jax.Array]
    unpack: Callable[[jax.Array, np.dtype], jax.Array]
    view: Callable[[np.ndarray], np.ndarray]

    def dtype_in(self, x: Any) -> np.dtype | None:
        """Returns the dtype of the numbers in `x`; None if it is not a leaf."""
        return self._plain_dtypes.get(getattr(x, "dtype", None))

    @functools.cached_property
    def _plain_dtypes(self) -> dict[Any, np.dtype]:
        return {dtype: plain for plain, (dtype, _) in self.kinds.items()}

    def seal(self, x: Any, row_ndim: int = 1) -> Any:
        """Returns numbers as a leaf; placeholders and leaves pass through."""
        if getattr(x, "dtype", None) not in self.kinds:
            return x
        if isinstance(x, np.ndarray):
            x = jnp.asarray(x)  # 64 bits become 32 unless x64 is enabled
        if isinstance(x, jax.Array):
            with _computing(x, x.dtype):
                return _sealed(x, self, row_ndim)
        if isinstance(x, jax.ShapeDtypeStruct):
            shape = (*x.shape[: len(x.shape) - len(self.element)], *(1,) * row_ndim)
            dtype = self.kinds[x.dtype][0]
            return jax.ShapeDtypeStruct(shape, dtype, sharding=x.sharding)
        return x

    def unseal(self, leaf: Any, row_ndim: int = 1) -> Any:
        """Returns the numbers in a leaf; anything else passes through."""
        plain = self.dtype_in(leaf)
        if plain is None:
            return leaf
        if isinstance(leaf, jax.Array):
            with _computing(leaf, plain):
                return _unsealed(jax.random.key_data(leaf), self, plain, row_ndim)
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        lead, sharding = leaf.shape[: len(leaf.shape) - row_ndim], leaf.sharding
        if isinstance(sharding, NamedSharding):  # its spec may name the axes that go
            spec = PartitionSpec(*sharding.spec[: len(lead)])
            kept = dict(memory_kind=sharding.memory_kind)
            sharding = NamedSharding(sharding.mesh, spec, **kept)
        shape = (*lead, *self.element)
        return jax.ShapeDtypeStruct(shape, plain, sharding=sharding)

    def from_words(self, leaf: Any, like: Any, row_ndim: int = 1) -> Any:
        """Returns the numbers if `leaf` has the words of a leaf; else `leaf`.

        JAX calls host callbacks with the words of a leaf. Only the additional last
        axis, of length 1 or 2, tells them from ids of uint32. So a tree must not be
        rebuilt with plain uint32 ids of a batch whose capacity is 1 or 2, if a row is a
        number.

        Args:
          leaf: numbers, or words.
          like: an array `[*lead, ...]`.
          row_ndim: the number of ones.
        """
        if not _arguments.is_concrete(leaf) or leaf.dtype != np.uint32:
            return leaf
        count = leaf.ndim - row_ndim - 1
        lead, ones, words = leaf.shape[:count], leaf.shape[count:-1], leaf.shape[-1:]
        fits = count > 0 and lead == np.shape(like)[:count]
        if not fits or ones != (1,) * row_ndim or words not in ((1,), (2,)):
            return leaf
        # NumPy, since a callback that runs a program of JAX can wait for itself.
        return self.view(np.ascontiguousarray(leaf).reshape(lead + words))


# XLA cancels a packing and an unpacking that meet. Outside of `jit`, `wrap` would keep
# the sharding of the words, whose rank is more.


@functools.partial(jax.jit, inline=True, static_argnums=(1, 2))
def _sealed(x: jax.Array, opaque: Opaque, row_ndim: int) -> Any:
    words = opaque.pack(x)
    last = words.ndim - 1
    wrap = opaque.kinds[x.dtype][1]
    return wrap(lax.expand_dims(words, range(last, last + row_ndim)))


@functools.partial(jax.jit, inline=True, static_argnums=(1, 2, 3))
def _unsealed(words: jax.Array, opaque: Opaque, dtype: Any, row_ndim: int) -> jax.Array:
    last = words.ndim - 1
    return opaque.unpack(lax.squeeze(words, range(last - row_ndim, last)), dtype)


@contextlib.contextmanager
def _computing(x: Any, dtype: np.dtype):
    """Enters the context in which numbers become words, and words become numbers.

    Ids with a known value stay known while a program is traced, because a tree that is
    built there can outlive the trace.
    """
    is_traced = isinstance(x, Tracer)
    eager = contextlib.nullcontext() if is_traced else jax.ensure_compile_time_eval()
    # 64 bits also if x64 was enabled only where the ids were made.
    with eager, _compat.enable_x64(dtype.itemsize == 8 or _arguments.x64_enabled()):
        yield


# ------------------------------------------------------------------ row ids


def _words_of_ids(ids: jax.Array) -> jax.Array:
    """Returns `~(ids + 1)` as words, uint32 `[..., 1 or 2]`."""
    if ids.dtype.itemsize < 4:
        ids = ids.astype(_widened(ids.dtype))
    words = lax.bitcast_convert_type(~(ids + np.ones((), ids.dtype)), np.uint32)
    return words if words.ndim > ids.ndim else lax.expand_dims(words, [words.ndim])


def _ids_of_words(words: jax.Array, plain: np.dtype) -> jax.Array:
    """Inverts `_words_of_ids`."""
    if plain.itemsize < 8:
        words = lax.squeeze(words, [words.ndim - 1])
    wide = _widened(plain)
    ids = ~lax.bitcast_convert_type(words, wide) - np.ones((), wide)
    if plain.kind == "u" and plain != wide:  # an empty slot must not wrap to a row
        ids = lax.min(ids, np.array(np.iinfo(plain).max, wide))
    return ids.astype(plain)


def _widened(ints: np.dtype) -> np.dtype:
    """Returns the dtype of at least 32 bits for ids of `ints`, with the same sign."""
    return np.dtype(f"{ints.kind}{max(ints.itemsize, 4)}")


def _view_ids(words: np.ndarray) -> np.ndarray:
    ints = np.dtype(f"i{4 * words.shape[-1]}")
    return (~words).view(ints)[..., 0] - np.ones((), ints)


# ------------------------------------------------------------------ scale and bias


@functools.partial(jax.jit, inline=True)
def words_of_pairs(pairs: jax.Array) -> jax.Array:
    """Returns pairs of floats `[..., 2]` as words, uint32 `[..., 1 or 2]`."""
    if pairs.dtype.itemsize == 4:
        return lax.bitcast_convert_type(pairs, np.uint32)
    halves = lax.bitcast_convert_type(pairs, np.uint16).astype(np.uint32)
    return halves[..., :1] | (halves[..., 1:] << np.uint32(16))


@functools.partial(jax.jit, inline=True)
def pairs_of_words(words: jax.Array) -> jax.Array:
    """Inverts `words_of_pairs`."""
    if words.shape[-1] == 1:
        # A bitcast of one word to two halves cannot be exported for any size of batch.
        shifts = np.array([0, 16], np.uint32).reshape((1,) * (words.ndim - 1) + (2,))
        words = lax.shift_right_logical(*jnp.broadcast_arrays(words, shifts))
        return lax.bitcast_convert_type(words.astype(np.uint16), np.float16)
    return lax.bitcast_convert_type(words, np.float32)


def words_of_leaf(leaf: Any) -> jax.Array:
    """Returns the words of a leaf of pairs, uint32 `[..., 1 or 2]`.

    Code that reads or writes some rows works on the words: a compiled program then has
    no other array of the height of the table.
    """
    return lax.squeeze(jax.random.key_data(leaf), [leaf.ndim - 1])


def seal_words(words: jax.Array) -> Any:
    """Inverts `words_of_leaf`."""
    wrap = PAIRS.kinds[np.dtype(f"f{2 * words.shape[-1]}")][1]
    return wrap(lax.expand_dims(words, [words.ndim - 1]))


# ------------------------------------------------------------------ the dtypes


def _define(name: str, dtypes: str, number: int, of: str) -> dict[np.dtype, Any]:
    """Defines a dtype for each of `dtypes`; exported programs store the numbers."""
    kinds = {}
    for k, plain in enumerate(map(np.dtype, dtypes)):
        words = max(1, plain.itemsize * (2 if plain.kind == "f" else 1) // 4)
        label = f"{name}[{plain}]"
        names = f"sparsejax.{label}", f"{label} of a {of}"
        kinds[plain] = _compat.define_opaque(*names, words, number + k)
    return kinds


# Defined at import, since a checkpoint or an exported program may be loaded before
# there is any SelectedRows. JAX's errors show the labels, so they name the ways out.
_OF_ROWS = (
    "SelectedRows; use g1 + g2, g.map(f), sparsejax.parallel.psum, "
    "sparsejax.optim.global_norm, sparsejax.optim.lazy(optax.chain(...))"
)
_OF_TABLE = "QuantizedTable; use table.dequantize() and table.requantize(array)"
_IDS = _define("row_ids", "bhilBHIL", 100, _OF_ROWS)
_PAIRS = _define("scale_bias", "fe", 110, _OF_TABLE)
IDS = Opaque(_IDS, (), _words_of_ids, _ids_of_words, _view_ids)
PAIRS = Opaque(
    _PAIRS,
    (2,),
    words_of_pairs,
    lambda words, dtype: pairs_of_words(words),
    lambda words: words.view(f"f{2 * words.shape[-1]}"),
)
