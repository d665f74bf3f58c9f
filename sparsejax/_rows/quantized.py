"""QuantizedTable: a table whose rows are small integers with a scale and a bias each.

Row v of a quantized table is `scale[v] * codes[v] + bias[v]`, with codes of 8, 4 or 2
bits. Codes of 4 and 2 bits are packed, the first code in the lowest bits of a byte, and
padded with zeros to whole bytes. Rows are dequantized when they are read, so no program
holds the table as floats unless it calls `dequantize`.

`jax.tree.map(lambda a, b: (a + b) / 2, table1, table2)` must not average codes. So a
table shows its scales and biases to trees as an array that JAX moves but does not
compute with (see `row_ids`). Codes stay plain bytes: arithmetic over the
tree fails at the scales.

The results equal the results of Caffe2 and FBGEMM, bit for bit: the search for a
range, the operations that round, and the scale (0 or 1) of a row of equal numbers.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable
from typing import Any, Self, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from sparsejax import _arguments, _compat
from sparsejax._arguments import ArrayLike, KeyLike
from sparsejax._rows import indexing, merge, row_ids
from sparsejax._rows.selected_rows import SelectedRows


# Caffe2's search tries ranges cut by multiples of a 200th, down to 84 % of the range.
_BINS, _MIN_BINS = 200, 168
# Rounding makes cuts smaller, or nothing, in a small range of large numbers.
_MAX_CUTS = 2 * (_BINS - _MIN_BINS)
# Caffe2 and FBGEMM add this to a range of 8 bits before they divide by it.
_EPSILON = 1e-8
# The relative rounding error of float32.
_FLOAT32 = 2.0**-24


# ------------------------------------------------------------------ the type


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True, eq=False, repr=False, init=False)
class QuantizedTable(_arguments.NotAnArray):
    """A table with 8, 4 or 2 bits per number, and a scale and a bias for each row.

    Represents the array of rows `scale[v] * codes[v] + bias[v]`. `sparsejax.quantize`
    makes it from an array, `from_fused` from the bytes of Caffe2, FBGEMM or PyTorch. It
    takes an array's place as the table of `sparsejax.lookup`, `embedding_bag`, `dot`
    and of layers of `sparsejax.nn`, whose results have its `dtype`. Rows are
    dequantized when they are read. Everything works under `jit`:

    - `shape`, `ndim`, `dtype`: of the represented array; `nbytes`: the stored size.
    - `codes`, `scale`, `bias`, `bits`, `scale_dtype`: its parts.
    - `get(ids)`: rows by id; `pull(ids)`: the same as a SelectedRows, for training.
    - `dequantize()`: the whole array; `requantize(array)`: the inverse, in the same
      form.
    - `astype(dtype)`: changes the dtype of reads.
    - `unpack()`: the same numbers with one code per byte, which is faster to read.
    - `to_fused()`, `from_fused(...)`: to and from one array of bytes.

    A pytree with two leaves, codes and scales. Arithmetic through a tree raises an
    error; moving the leaves works. It has no gradient: training in 8 bits
    differentiates the rows that are read, see `pull` and `sparsejax.optim.rounding`.

    Args:
      codes: uint8 `[V, bytes]`, the codes of a row, packed.
      scale_bias: float32 or float16 `[V, 2]`.
      bits: 8, 4 or 2.
      row_shape: tuple of ints, the shape of a row.
      dtype: the floating-point dtype that reads give.

    Example:
      >>> import jax.numpy as jnp, sparsejax as sj
      >>> table = sj.quantize(jnp.array([[0.0, 1.0, 3.0], [5.0, 5.0, 5.0]]), bits=2)
      >>> table
      QuantizedTable(float32[2,3], bits=2, scale_dtype=float16, nbytes=10)
      >>> sj.lookup(table, jnp.array([1, 0, 9]))
      Array([[ 5.,  5.,  5.],
             [ 0.,  1.,  3.],
             [nan, nan, nan]], dtype=float32)

    References:
      Caffe2, `FloatToFused8BitRowwiseQuantized` and its family; FBGEMM,
      `IntNBitTableBatchedEmbeddingBagsCodegen`; Guan et al., 2019, "Post-training 4-bit
      quantization on embedding tables".
    """

    codes: jax.Array
    _pairs: Any  # a leaf of `row_ids.PAIRS`, or what a tree was rebuilt with
    bits: int
    row_shape: tuple[int, ...]
    dtype: np.dtype

    _as_array = (
        "Read rows with sparsejax.lookup(table, ids), or call .dequantize() for the "
        "whole array."
    )
    _parts = ".dequantize(), or the .codes and .scale_bias of two tables"

    def __init__(
        self,
        codes: jax.Array,
        scale_bias: jax.Array,
        bits: int,
        row_shape: tuple[int, ...],
        dtype: np.dtype,
    ):
        # Pack here; packing in tree_flatten would copy all scales at every call.
        pairs = row_ids.PAIRS.seal(scale_bias)
        vars(self).update(codes=codes, _pairs=pairs, bits=bits)
        vars(self).update(row_shape=row_shape, dtype=dtype)

    def tree_flatten_with_keys(self) -> tuple[Any, Any]:
        """Returns the children with their keys."""
        children, static = QuantizedTable.tree_flatten(self)
        names = map(jax.tree_util.GetAttrKey, ("codes", "scale_bias"))
        return tuple(zip(names, children)), static

    def tree_flatten(self) -> tuple[Any, Any]:
        """Returns the children; the static part can be JSON, for exports."""
        static = self.bits, self.row_shape, jnp.dtype(self.dtype).name
        return (self.codes, row_ids.PAIRS.seal(self._pairs)), static

    @classmethod
    def tree_unflatten(
        cls, static: tuple[int, tuple[int, ...], str], children: Iterable[Any]
    ) -> QuantizedTable:
        """Rebuilds without checks: children may be anything JAX puts there."""
        (codes, pairs), (bits, row_shape, dtype) = children, static
        pairs = row_ids.PAIRS.from_words(pairs, codes)
        self = object.__new__(cls)
        vars(self).update(codes=codes, _pairs=pairs, bits=bits)
        vars(self).update(row_shape=row_shape, dtype=jnp.dtype(dtype))
        return self

    def __getstate__(self) -> dict[str, Any]:
        # For pickle and copy. Plain scales do not depend on JAX's keys.
        state = {**vars(self), "scale_bias": self.scale_bias}
        del state["_pairs"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array that the table represents."""
        return (*self.codes.shape[:-1], *self.row_shape)

    @property
    def ndim(self) -> int:
        """Rank of the array that the table represents."""
        return len(self.shape)

    @property
    def scale_bias(self) -> jax.Array:
        """The scale and the bias of each row, `[V, 2]`."""
        return row_ids.PAIRS.unseal(self._pairs)

    @property
    def scale(self) -> jax.Array:
        """The scale of each row, `[V]`."""
        return self.scale_bias[..., 0]

    @property
    def bias(self) -> jax.Array:
        """The bias of each row, `[V]`: the number that code 0 stands for."""
        return self.scale_bias[..., 1]

    @property
    def scale_dtype(self) -> Any:
        """The dtype of scales and biases."""
        return row_ids.PAIRS.dtype_in(self._pairs) or self._pairs.dtype

    @property
    def nbytes(self) -> int:
        """Size in bytes of codes, scales and biases."""
        pairs = 2 * math.prod(self.codes.shape[:-1]) * self.scale_dtype.itemsize
        return math.prod(self.codes.shape) + pairs

    def __repr__(self) -> str:
        leaves = self.codes, self.scale_bias
        if not all(hasattr(x, "shape") and hasattr(x, "dtype") for x in leaves):
            codes, pair = map(_arguments.show_spec, leaves)  # in a tree of something
            return f"QuantizedTable(codes={codes}, scale_bias={pair})"
        shape = ",".join(map(str, self.shape))
        return (
            f"QuantizedTable({self.dtype.name}[{shape}], bits={self.bits}, "
            f"scale_dtype={self.scale_dtype.name}, nbytes={self.nbytes})"
        )

    # -- reading -----------------------------------------------------------------

    def __getitem__(self, ids: ArrayLike) -> jax.Array:
        """Reads rows by id as `dequantize()[ids]` does; see `get` for other ids."""
        way_out = "Use sparsejax.lookup(table, ids), .get(ids), or .dequantize()."
        return read(self, _arguments.as_indices(ids, self.shape[0], way_out), 0)

    def get(self, ids: ArrayLike) -> jax.Array:
        """Reads rows by id; zeros for an id out of range, as `SelectedRows.get`.

        `sparsejax.lookup` has other modes.

        Args:
          ids: integers of any shape.

        Returns:
          `[*ids.shape, *row_shape]`, of `dtype`.

        Example:
          >>> import jax.numpy as jnp, sparsejax as sj
          >>> sj.quantize(jnp.array([[1.0, 2.0]])).get(jnp.array([0, 1]))
          Array([[1., 2.],
                 [0., 0.]], dtype=float32)
        """
        return read(self, _arguments.as_ids(ids, self.shape[0]), 0)

    def pull(self, ids: ArrayLike) -> SelectedRows:
        """Reads the distinct rows of `ids` as a SelectedRows, to differentiate.

        It takes the table's place in a loss: `sparsejax.value_and_grad` then gives the
        gradient of these rows, which `sparsejax.optim.rounding` accepts for the table.

        Args:
          ids: integers of any shape; ids out of range are ignored.

        Returns:
          SelectedRows of the table's height, ids ascending. Its capacity is the number
          of ids, or the number of rows of the table if that is smaller.

        Example:
          >>> import jax.numpy as jnp, sparsejax as sj
          >>> table = sj.quantize(jnp.ones((100, 2)))
          >>> table.pull(jnp.array([7, 3, 7]))
          SelectedRows(rows=[3 7 -], values=float32[3,2], height=100, num_rows=2)

        References:
          `sparsejax.store.KVStore.pull`.
        """
        height = self.shape[0]
        ids = _arguments.as_ids(ids, height).reshape(-1)
        ids = jnp.where(indexing.in_range(ids, height), ids, height).astype(ids.dtype)
        rows, _, _ = merge.merge_plan(ids, height, _compat.min_dim(ids.size, height))
        return SelectedRows(rows, read(self, rows, 0), height)

    def dequantize(self) -> jax.Array:
        """Returns the whole array, `[V, ...]`, of `dtype`.

        Example:
          >>> import jax.numpy as jnp, sparsejax as sj
          >>> sj.quantize(jnp.array([[1.0, 2.0]])).dequantize()
          Array([[1., 2.]], dtype=float32)

        References:
          Caffe2, `Fused8BitRowwiseQuantizedToFloat` and its family.
        """
        return _dequantize(self, self.codes, self.scale_bias)

    def requantize(self, array: ArrayLike, key: KeyLike | None = None) -> Self:
        """Quantizes other rows in the form of this table: the inverse of `dequantize`.

        The form is `bits`, `scale_dtype`, and the `dtype` of reads. Every row gets the
        range of its numbers, as in `sparsejax.quantize`. A moving average needs a key:
        rounded to the nearest code, most numbers would not move.

        Args:
          array: floats of the shape of the table.
          key: a PRNG key or an int, to round up or down at random.

        Returns:
          QuantizedTable.

        Raises:
          TypeError, ValueError: as for `sparsejax.quantize`; or `array` has another
            shape.

        Example:
          >>> import jax.numpy as jnp, sparsejax as sj
          >>> table = sj.quantize(jnp.array([[1.0, 2.0]]))
          >>> table.requantize(2 * table.dequantize()).dequantize()
          Array([[2., 4.]], dtype=float32)
        """
        array = _arguments.as_floats(array, "array")
        if array.shape != self.shape:
            raise ValueError(
                f"array must be {self.shape} as the table, got {array.shape}."
            )
        # A stack of tables is quantized as one table.
        rows = array.reshape(math.prod(self.codes.shape[:-1]), *self.row_shape)
        new = quantize(rows, self.bits, scale_dtype=self.scale_dtype, key=key)
        old, treedef = jax.tree.flatten(self)
        return treedef.unflatten(
            x.reshape(like.shape) for x, like in zip(jax.tree.leaves(new), old)
        )

    # -- other forms -------------------------------------------------------------

    def astype(self, dtype: DTypeLike) -> QuantizedTable:
        """Keeps the codes; reads give `dtype`.

        Example:
          >>> import jax.numpy as jnp, sparsejax as sj
          >>> sj.quantize(jnp.ones((1, 2))).astype(jnp.bfloat16).get(0)
          Array([1, 1], dtype=bfloat16)
        """
        kind = _float_dtype(dtype)
        return QuantizedTable(self.codes, self._pairs, self.bits, self.row_shape, kind)

    def unpack(self) -> QuantizedTable:
        """Unpacks into codes of 8 bits, with float32 scales and biases.

        Such codes take a byte each, whatever their range, and are faster to read.

        Example:
          >>> import jax.numpy as jnp, sparsejax as sj
          >>> sj.quantize(jnp.ones((1, 6)), bits=2).unpack()
          QuantizedTable(float32[1,6], bits=8, scale_dtype=float32, nbytes=14)

        References:
          Caffe2, `FloatToFused4BitFakeRowwiseQuantized`.
        """
        size = math.prod(self.row_shape)
        codes = join_planes(planes(self.codes, self.bits), size)
        pair = self.scale_bias.astype(jnp.float32)
        return QuantizedTable(codes, pair, 8, self.row_shape, self.dtype)

    def to_fused(self) -> jax.Array:
        """Returns the table as bytes: codes, scale and bias, row by row.

        Returns:
          uint8 `[V, bytes + 2 * size]`, where `size` is 4 for float32 scales and 2 for
          float16, little-endian.

        Example:
          >>> import jax.numpy as jnp, sparsejax as sj
          >>> sj.quantize(jnp.array([[3.0, 3.0, 6.0]]), bits=2).to_fused()
          Array([[48,  0, 60,  0, 66]], dtype=uint8)

        References:
          Caffe2, `FloatToFused8BitRowwiseQuantized`; PyTorch,
          `torch.ops.quantized.embedding_bag_byte_prepack`.
        """
        pair = lax.bitcast_convert_type(self.scale_bias, jnp.uint8)
        pair = pair.reshape(*pair.shape[:-2], -1)
        return jnp.concatenate([self.codes, pair], axis=-1)

    @classmethod
    def from_fused(
        cls,
        fused: ArrayLike,
        bits: int = 8,
        *,
        scale_dtype: DTypeLike | None = None,
        features: int | None = None,
        dtype: DTypeLike = jnp.float32,
    ) -> QuantizedTable:
        """Makes a table from bytes in the format of `to_fused`.

        Args:
          fused: uint8 `[V, bytes + 2 * size]`.
          bits: 8, 4 or 2.
          scale_dtype: float32 or float16. The default is float32 for 8 bits, and
            float16 for fewer.
          features: int, the numbers per row. The default is the largest number that the
            bytes hold.
          dtype: the floating-point dtype of reads.

        Raises:
          TypeError: `fused` is not a uint8 array, or a dtype is another.
          ValueError: `bits` is not 8, 4 or 2, or the bytes do not hold `features`.

        Example:
          >>> import jax.numpy as jnp, sparsejax as sj
          >>> fused = jnp.array([[48, 0, 60, 0, 66]], jnp.uint8)
          >>> sj.QuantizedTable.from_fused(fused, 2, features=3).get(0)
          Array([3., 3., 6.], dtype=float32)

        References:
          Caffe2, `Fused8BitRowwiseQuantizedToFloat`.
        """
        bits, pair_dtype = _check_bits(bits, scale_dtype)
        fused = _arguments.to_array(fused, "fused", "an array of bytes")
        if fused.dtype != jnp.uint8 or fused.ndim != 2:
            raise TypeError(
                "fused must be a uint8 array [V, bytes], such as np.fromfile(path, "
                f"np.uint8).reshape(V, -1), got {_arguments.kind_of(fused)}."
            )
        tail = 2 * pair_dtype.itemsize
        num_bytes = max(fused.shape[1] - tail, 1)
        features = num_bytes * (8 // bits) if features is None else features
        features = _arguments.static_int("features", features, 1)
        columns = _num_bytes(features, bits) + tail
        if fused.shape[1] != columns:
            raise ValueError(
                f"fused must have {columns} columns for {features} codes of {bits} "
                f"bits, got {fused.shape[1]}. Check features, bits and scale_dtype."
            )
        codes, pair = fused[:, :-tail], fused[:, -tail:]
        pair = lax.bitcast_convert_type(pair.reshape(len(pair), 2, -1), pair_dtype)
        return cls(codes, pair, bits, (features,), _float_dtype(dtype))


def is_quantized(x: Any) -> TypeGuard[QuantizedTable]:
    """Returns True for a QuantizedTable; for `is_leaf=` of `jax.tree` functions."""
    return isinstance(x, QuantizedTable)


# ------------------------------------------------------------------ codes

# Packed bytes have *planes*: plane k holds the k-th code of every byte. Splitting bytes
# into planes is one shift and one mask for whole rows, which XLA vectorizes. Swapping
# the last two axes of the planes puts the codes in order.


def planes(packed: jax.Array, bits: int, only: int | None = None) -> jax.Array:
    """Splits bytes `[..., n]` into planes `[..., 8 // bits, n]`, or into one plane."""
    if bits == 8:
        return packed[..., None, :]
    numbers = range(8 // bits) if only is None else [only]
    shifts = np.array([bits * k for k in numbers], np.uint8)
    shifts = jnp.asarray(shifts.reshape((1,) * (packed.ndim - 1) + (-1, 1)))
    shifted = jnp.broadcast_arrays(packed[..., None, :], shifts)
    return lax.shift_right_logical(*shifted) & jnp.uint8((1 << bits) - 1)


def join_planes(x: jax.Array, size: int) -> jax.Array:
    """Puts the numbers of planes `[..., 8 // bits, n]` in order, `[..., size]`."""
    if x.shape[-2] == 1:
        return x[..., 0, :]
    x = jnp.swapaxes(x, -1, -2)
    return x.reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1])[..., :size]


def _pack(codes: jax.Array, bits: int) -> jax.Array:
    """Packs codes `[..., size]` into bytes."""
    if bits == 8:
        return codes
    per = 8 // bits
    pad = -codes.shape[-1] % per
    codes = jnp.pad(codes, ((0, 0),) * (codes.ndim - 1) + ((0, pad),))
    codes = codes.reshape(*codes.shape[:-1], -1, per)
    factors = np.array([1 << (bits * k) for k in range(per)], np.uint8)
    factors = factors.reshape((1,) * (codes.ndim - 1) + (per,))
    return jnp.sum(codes * factors, axis=-1, dtype=jnp.uint8)


def _num_bytes(features: int, bits: int) -> int:
    return -(-features // (8 // bits))


# ------------------------------------------------------------------ reading


def read(table: QuantizedTable, ids: jax.Array, fill: float) -> jax.Array:
    """Reads rows by id, `[*ids.shape, *row_shape]`; `fill` for ids out of range."""
    if table.shape[0] == 0:  # JAX cannot gather from an empty axis
        return jnp.full((*ids.shape, *table.row_shape), fill, table.dtype)
    # Scale and bias of an id out of range are `fill`, 0 or NaN, so its row is `fill`
    # whatever its codes are.
    pairs = read_pairs(table, ids, fill)
    return _dequantize(table, read_codes(table, ids), pairs)


def read_codes(table: QuantizedTable, ids: jax.Array) -> jax.Array:
    """Reads codes by id, `[*ids.shape, bytes]`; ids out of range are clipped."""
    codes = jnp.asarray(table.codes)
    return codes.at[ids].get(mode="clip", wrap_negative_indices=False)


def read_pairs(table: QuantizedTable, ids: jax.Array, fill: Any = None) -> jax.Array:
    """Reads scale and bias by id, `[*ids.shape, 2]`.

    Ids out of range are clipped, or read `fill`.
    """
    words = row_ids.words_of_leaf(row_ids.PAIRS.seal(table._pairs))
    how: dict[str, Any] = dict(mode="clip")
    if fill is not None:  # words of both dtypes that are two or one times this number
        pair = np.full(4 // table.scale_dtype.itemsize, fill, table.scale_dtype)
        how = dict(mode="fill", fill_value=pair.view(np.uint32)[0])
    words = words.at[ids].get(wrap_negative_indices=False, **how)
    return row_ids.pairs_of_words(words)


def _dequantize(table: QuantizedTable, packed: jax.Array, pair: jax.Array) -> jax.Array:
    """Dequantizes packed codes with their scales and biases."""
    wide = indexing.accumulator_dtype(table.dtype)
    pair = pair.astype(wide)[..., None, None]
    x = planes(packed, table.bits).astype(wide)
    x = x * pair[..., 0, :, :] + pair[..., 1, :, :]
    x = join_planes(x, math.prod(table.row_shape))
    return x.reshape(*packed.shape[:-1], *table.row_shape).astype(table.dtype)


# ------------------------------------------------------------------ quantizing


def quantize(
    table: ArrayLike,
    bits: int = 8,
    *,
    scale_dtype: DTypeLike | None = None,
    symmetric: bool = False,
    search: str | None = None,
    key: KeyLike | None = None,
) -> QuantizedTable:
    """Quantizes a table to 8, 4 or 2 bits per number.

    For each row x, with `n = 2^bits - 1` and R the nearest integer (ties to even),

      bias = min(x),  scale = (max(x) - bias) / n,  codes = R((x - bias) / scale)

    so that an error is at most half of `scale`. With `symmetric`, zero is exact and
    codes stand for multiples of `scale` from -m to m, with `m = 2^(bits - 1) - 1`:

      scale = max|x| / m,  bias = -(m + 1) scale

    With `search="greedy"`, the range is cut from both ends where that makes the sum of
    squared errors smaller, which pays for 4 and 2 bits. Outside of `jit`, results equal
    Caffe2's operators bit for bit.

    Args:
      table: floats `[V, ...]`, of rank 2 or more. A row is what one id reads.
      bits: 8, 4 or 2. Codes of 4 and 2 bits are packed into bytes.
      scale_dtype: float32 or float16, of scales and biases. The default is float32 for
        8 bits, and float16 for fewer.
      symmetric: True if codes are multiples of a scale, on both sides of zero.
      search: None or `"greedy"`.
      key: a PRNG key or an int, to round up or down at random, so that a number is its
        expected value. None rounds to the nearest.

    Returns:
      QuantizedTable, whose reads give the dtype of `table`. Inside `jit`, a row with
      NaN or infinity, or beyond the range of `scale_dtype`, reads NaN.

    Raises:
      TypeError, ValueError: an argument is not as described, or, outside of `jit`, a
        row is not finite.

    Example:
      >>> import jax, jax.numpy as jnp, sparsejax as sj
      >>> table = jax.random.normal(jax.random.key(0), (1000, 64))
      >>> small = sj.quantize(table, 4, search="greedy")
      >>> error = jnp.sqrt(jnp.mean((small.dequantize() - table) ** 2))
      >>> print(small.nbytes, f"{error:.3f}")
      36000 0.082

    References:
      Caffe2, `FloatToFused8BitRowwiseQuantized`, `FloatToFused4BitRowwiseQuantized`
      and its engine GREEDY; FBGEMM, `FloatOrHalfToFusedNBitRowwiseQuantizedSBHalf`.
    """
    bits, pair_dtype = _check_bits(bits, scale_dtype)
    table = _arguments.as_floats(table, "table")
    if table.ndim < 2:
        raise ValueError(f"table must be [V, D] or [V, ...], got shape {table.shape}.")
    symmetric = _arguments.check_bool("symmetric", symmetric)
    if search not in (None, "greedy") or (search and symmetric):
        raise ValueError(
            "search must be None or 'greedy', and None with symmetric=True, got "
            f"{_arguments.show(search)}. None takes the range of each row as it is."
        )
    if key is not None:
        key = _arguments.as_key(key, from_int=True)
    row_shape, dtype = table.shape[1:], table.dtype
    # Caffe2 divides rows by their scale in some operators, and multiplies in others.
    divides = bits < 8 and (search is not None or dtype == jnp.float16)
    x = table.reshape(table.shape[0], math.prod(row_shape))
    codes, pair = _quantize(x, key, bits, pair_dtype, symmetric, bool(search), divides)
    finite = jnp.isfinite(pair).all(axis=1)
    if _arguments.is_concrete(finite) and not finite.all():
        bad = np.flatnonzero(~np.asarray(finite))
        raise ValueError(
            f"{bad.size} of {finite.size} rows have NaN, infinity, or numbers beyond "
            f"{pair_dtype.name}; the first is row {bad[0]}. Call jnp.nan_to_num, or "
            "pass scale_dtype=jnp.float32."
        )
    pair = jnp.where(finite[:, None], pair, jnp.array(jnp.nan, pair.dtype))
    return QuantizedTable(codes, pair, bits, row_shape, dtype)


@functools.partial(jax.jit, static_argnums=range(2, 7))
def _quantize(x, key, bits, scale_dtype, symmetric, greedy, divides):
    """Quantizes rows `[V, D]`: packed codes `[V, bytes]`, scale and bias `[V, 2]`."""
    x = x.astype(jnp.float32)
    if 0 in x.shape:
        codes = jnp.zeros((len(x), _num_bytes(x.shape[1], bits)), jnp.uint8)
        return codes, jnp.zeros((len(x), 2), scale_dtype)
    levels = (1 << bits) - 1
    rounded = lambda v: v.astype(scale_dtype).astype(jnp.float32)
    if symmetric:
        middle = (levels + 1) // 2
        scale = rounded(_divide(jnp.max(jnp.abs(x), axis=1), middle - 1))
        scale = jnp.where(scale == 0, 1, scale)
        bias = rounded(-middle * scale)
        return _encode(x, scale, bias, 1 / scale, bits, divides, key, 1, scale_dtype)
    low, high = jnp.min(x, axis=1), jnp.max(x, axis=1)
    if greedy:
        low, high = _search_range(x, low, high, bits, rounded)
    low = rounded(low)
    span = high - low
    if bits == 8 and scale_dtype == jnp.float32:
        scale = _divide(span, levels)
        inverse = levels / (span + _EPSILON)
    else:
        scale = rounded(_divide(span, levels))
        scale = jnp.where((span == 0) | (scale == 0), 1, scale)
        inverse = 1 / scale
        if not divides:
            is_tiny = jnp.isinf(inverse)
            scale, inverse = (jnp.where(is_tiny, 1, v) for v in (scale, inverse))
    return _encode(x, scale, low, inverse, bits, divides, key, 0, scale_dtype)


@functools.partial(jax.jit, static_argnames="bits")
def requantize(
    rows: jax.Array, pair: jax.Array, key: jax.Array | None, bits: int
) -> tuple[jax.Array, jax.Array]:
    """Quantizes rows of a table after an update.

    A row keeps its scale and bias as long as they fit. So numbers that did not change
    keep their codes, even if changed numbers are rounded at random. A row that leaves
    its range, or shrinks to less than half of it, gets a new range.

    Args:
      rows: float32 `[n, D]`, the new rows.
      pair: the old scales and biases of the rows, `[n, 2]`.
      key: to round up or down at random, or None.
      bits: per code.

    Returns:
      `(codes, scale_bias)`, uint8 `[n, bytes]` and `[n, 2]`.
    """
    levels = (1 << bits) - 1
    old_scale, old_bias = pair.astype(jnp.float32).T
    low, high = jnp.min(rows, axis=1), jnp.max(rows, axis=1)
    top = old_bias + levels * old_scale
    # Rounding in float32 may put a number at the edge outside of the range.
    slack = 1e-3 * old_scale + 4 * _FLOAT32 * jnp.maximum(jnp.abs(low), jnp.abs(high))
    fits = (low >= old_bias - slack) & (high <= top + slack)
    fits &= 2 * (high - low) >= top - old_bias
    rounded = lambda v: v.astype(pair.dtype).astype(jnp.float32)
    bias = rounded(low)
    scale = rounded((high - bias) / levels)
    scale = jnp.where(scale > 0, scale, 1)
    scale, bias = jnp.where(fits, old_scale, scale), jnp.where(fits, old_bias, bias)
    return _encode(rows, scale, bias, 1 / scale, bits, True, key, 0, pair.dtype)


def _encode(x, scale, bias, inverse, bits, divides, key, least, scale_dtype):
    """Encodes rows with a known range; returns packed codes, and scale and bias."""
    scale, bias, inverse = (v[:, None] for v in (scale, bias, inverse))
    if key is not None:
        codes = (x - bias) / jnp.where(scale == 0, 1, scale)
        codes = jnp.floor(codes + jax.random.uniform(key, x.shape))
    elif divides:
        codes = jnp.round((x - bias) / scale)
    else:
        codes = jnp.round((x - bias) * inverse)
    codes = jnp.clip(codes, least, (1 << bits) - 1).astype(jnp.uint8)
    pair = jnp.concatenate([scale, bias], axis=1).astype(scale_dtype)
    return _pack(codes, bits), pair


def _search_range(x, low, high, bits, rounded):
    """Shrinks the range of each row as Caffe2's greedy search does."""
    levels = (1 << bits) - 1
    step = _divide(high - low, _BINS)
    least = _MIN_BINS * step

    def loss(low, high):
        low = rounded(low)
        span = high - low
        scale = jnp.where(span == 0, 1, rounded(_divide(span, levels)))
        inverse = (1 / scale)[:, None]
        low, scale = low[:, None], scale[:, None]
        codes = jnp.clip(jnp.round((x - low) * inverse), 0, levels)
        error = x - (codes * scale + low)
        return jnp.sqrt(jnp.sum(error * error, axis=1))

    # A range is `(error, low, high)`, and the state `(cuts, range, best range)`.
    select = lambda mask, new, old: [jnp.where(mask, *pair) for pair in zip(new, old)]

    def is_wide(state):
        cuts, (_, low, high), _ = state
        return (cuts < _MAX_CUTS) & (low + least < high)

    def cut(state):
        cuts, (error, low, high), best = state
        left = [loss(low + step, high), low + step, high]
        right = [loss(low, high - step), low, high - step]
        is_best = (error < left[0]) & (error < right[0]) & (error < best[0])
        new = select(left[0] < right[0], left, right)
        better = select(is_best, state[1], best)
        wide = is_wide(state)
        return cuts + 1, select(wide, new, state[1]), select(wide, better, best)

    start = [loss(low, high), low, high]
    state = jnp.int32(0), start, start
    *_, (_, low, high) = lax.while_loop(lambda s: is_wide(s).any(), cut, state)
    return low, high


def _divide(x: jax.Array, by: int) -> jax.Array:
    """Returns `x / by`, correctly rounded.

    XLA would multiply by the inverse of a constant, which rounds twice.
    """
    return x / jnp.where(jnp.isnan(x), jnp.nan, jnp.float32(by))


# ------------------------------------------------------------------ arguments


def _check_bits(bits: Any, scale_dtype: Any) -> tuple[int, Any]:
    """Returns `bits` and the dtype of scales, or raises."""
    if bits not in (8, 4, 2):
        raise ValueError(f"bits must be 8, 4 or 2, got {_arguments.show(bits)}.")
    if scale_dtype is None:
        scale_dtype = jnp.float32 if bits == 8 else jnp.float16
    dtype = jax.dtypes.canonicalize_dtype(scale_dtype)
    if dtype not in (jnp.float32, jnp.float16):
        raise TypeError(f"scale_dtype must be float32 or float16, got {dtype}.")
    return int(bits), dtype


def _float_dtype(dtype: Any) -> Any:
    dtype = jax.dtypes.canonicalize_dtype(dtype)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"dtype must be a dtype of floats, got {dtype}.")
    return dtype
