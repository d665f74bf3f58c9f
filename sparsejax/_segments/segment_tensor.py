"""SegmentTensor: an axis of elements, split into segments of any lengths.

Each example of a batch has a list of ids, and the lists differ in length. A
SegmentTensor stores all of them along one axis: `values` are the elements, and
`segment_ids` the segment of each.

Every constructor establishes these invariants:

- An element whose segment id is `num_segments` is *empty*: it belongs to no segment.
  Ids out of range become `num_segments`.
- The number of elements (`capacity`, including empty ones), the number of segments and
  `is_sorted` are static, so everything works under `jit`. `is_sorted` means that ids
  never decrease and empty elements come last.

Sharp edges: `jax.tree.map` over a SegmentTensor also visits its segment ids; `.map`
does not. A stacked batch of SegmentTensors is for `jax.vmap` and `jax.lax.scan`;
outside these its properties are meaningless.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from sparsejax import _arguments, _compat
from sparsejax._arguments import ArrayLike, CSRLike, PyTree
from sparsejax._rows import indexing, merge
from sparsejax._segments import conversions, elements, nested_lists


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True, eq=False, repr=False, init=False)
class SegmentTensor(_arguments.NotAnArray):
    """Elements along one axis, split into segments of any lengths.

    Segment k consists of the elements i with `segment_ids[i] == k`, in their
    order; for example, the ids of example k in a batch. `sparsejax.embedding_bag`
    looks up and reduces them; `sparsejax.segment_sum` and its relatives reduce
    the values.

    - `from_lists`, `from_lengths`, `from_offsets`, `from_segment_ids`,
      `from_padded`, `from_multi_hot`, `from_csr`: from other representations.
    - `to_lists`, `to_padded`, `to_multi_hot`: to other representations.
    - `map(f)`: changes only the values; `sort()`: makes segments contiguous.
    - `lengths`, `offsets`: of the segments; `capacity`: the static number of
      elements.

    Args:
      values: `[n, ...]`, the elements; or a pytree of such arrays, for example
        ids and their scores. A leaf may also be a SegmentTensor of n segments,
        each of which is one element, to any depth. A list is read as an array.
      segment_ids: integers `[n]`, in any order; elements whose id is out of range
        belong to no segment.
      num_segments: int, static.
      is_sorted: bool, static: True if `segment_ids` never decrease and ids out of
        range come last. Checked outside `jit`, trusted inside.

    Raises:
      TypeError, ValueError: an argument is not as described.

    Example:
      >>> import jax.numpy as jnp, sparsejax as sj
      >>> sj.SegmentTensor.from_lists([[10, 11], [101], []])
      SegmentTensor([[10 11] [101] []], int32, num_segments=3, capacity=3)
      >>> st = sj.SegmentTensor(jnp.array([5, 6, 7]), jnp.array([1, 0, 1]), 2)
      >>> st
      SegmentTensor([[6] [5 7]], int32, num_segments=2, capacity=3)
      >>> st.lengths
      Array([1, 2], dtype=int32)

    `jax.tree.map` over a SegmentTensor also changes its segment ids; use `.map`
    instead.

    References:
      Caffe2, Sparse Operations; TensorFlow, `tf.RaggedTensor`; TorchRec,
      `JaggedTensor`.
    """

    values: PyTree
    segment_ids: jax.Array
    num_segments: int
    is_sorted: bool

    _as_array = (
        "Call .to_padded() for rows of equal length, or use .values and .segment_ids."
    )
    _parts = ".to_lists(), or .values and .segment_ids"

    def __init__(
        self,
        values: PyTree,
        segment_ids: ArrayLike,
        num_segments: int,
        is_sorted: bool = False,
    ):
        # Only users call this: pytree code goes through `tree_unflatten`, whose
        # children may be tracers, ShapeDtypeStructs or placeholders.
        num_segments = _arguments.static_int("num_segments", num_segments)
        ids = conversions.as_segment_ids(segment_ids, num_segments)
        if is_sorted and conversions.is_known(ids):
            way_out = "Leave is_sorted out, or sort them first."
            conversions.check_ascending("segment_ids", np.asarray(ids), way_out)
        values = elements.as_elements(values)
        elements.check_count(values, ids.shape[0], "segment_ids")
        made = self._make_unchecked(values, ids, num_segments, bool(is_sorted))
        vars(self).update(vars(made))

    @classmethod
    def _make_unchecked(
        cls, values: Any, segment_ids: Any, num_segments: int, is_sorted: bool
    ) -> Self:
        """Makes one from checked arguments; NumPy arrays become JAX arrays."""
        values = elements.map_leaves(jnp.asarray, lambda x: x, values)
        static = num_segments, is_sorted
        return cls.tree_unflatten(static, (values, jnp.asarray(segment_ids)))

    # -- pytree ------------------------------------------------------------------

    def tree_flatten_with_keys(self) -> tuple[Any, Any]:
        """Returns the children with their keys."""
        keys = map(jax.tree_util.GetAttrKey, ("values", "segment_ids"))
        children = zip(keys, (self.values, self.segment_ids))
        return tuple(children), (self.num_segments, self.is_sorted)

    @classmethod
    def tree_unflatten(cls, static: Any, children: Any) -> Self:
        """Rebuilds without checks: children may be anything JAX puts there."""
        self = object.__new__(cls)
        names = "values", "segment_ids", "num_segments", "is_sorted"
        vars(self).update(zip(names, (*children, *static)))
        return self

    # -- what it is --------------------------------------------------------------

    @property
    def capacity(self) -> int:
        """Number of elements, including empty ones; static."""
        return self.segment_ids.shape[0]

    @property
    def lengths(self) -> jax.Array:
        """Number of elements in each segment, int32 `[num_segments]`."""
        return conversions.segment_ids_to_lengths(self.segment_ids, self.num_segments)

    @property
    def offsets(self) -> jax.Array:
        """Segment starts and the end of the last, int32 `[num_segments + 1]`.

        These are positions in the values of `.sort()` (of `self`, if sorted): the row
        pointers of CSR.
        """
        return conversions.lengths_to_offsets(self.lengths)

    def __repr__(self) -> str:
        shown = nested_lists.show(self.values, self.segment_ids, self.num_segments)
        shape = getattr(self.segment_ids, "shape", None)  # leaves may be anything
        n = shape[0] if isinstance(shape, tuple) and shape else self.segment_ids
        return f"SegmentTensor({shown}, num_segments={self.num_segments}, capacity={n})"

    # -- from other representations ----------------------------------------------

    @classmethod
    def from_lengths(
        cls, values: PyTree, lengths: ArrayLike, *, capacity: int | None = None
    ) -> Self:
        """Makes consecutive segments with the given lengths.

        Args:
          values: as in `SegmentTensor`. Elements beyond the sum of `lengths` are
            empty.
          lengths: integers `[K]`.
          capacity: int, the number of elements of the result, by default the number of
            elements of `values`. The result is padded with empty elements, or cut.

        Raises:
          ValueError: a length is negative, or the sum of `lengths` exceeds the number
            of elements or `capacity`. Inside `jit`, floats among the values become NaN
            instead. Without floats, NaN cannot report an error: a `capacity` below the
            number of elements also raises inside `jit`, but wrong lengths silently
            split the elements differently, and `.lengths` differs from `lengths`.
            Check untrusted lengths before `jit`.

        Example:
          >>> import jax.numpy as jnp, sparsejax as sj
          >>> ids, lengths = jnp.array([10, 11, 101]), jnp.array([2, 1, 0])
          >>> sj.SegmentTensor.from_lengths(ids, lengths, capacity=5)
          SegmentTensor([[10 11] [101] []], int32, num_segments=3, capacity=5)

        References:
          Caffe2, values with lengths.
        """
        lengths = conversions.as_lengths(lengths)
        return cls._from_lengths(values, lengths, True, capacity)

    @classmethod
    def from_offsets(
        cls, values: PyTree, offsets: ArrayLike, *, capacity: int | None = None
    ) -> Self:
        """Makes consecutive segments, each from one offset to the next.

        Args:
          values: as in `SegmentTensor`. Elements beyond the last offset are empty.
          offsets: integers `[K + 1]`, ascending, beginning with 0. The offsets of
            PyTorch's `EmbeddingBag` lack the last one, the number of elements n:
            append it, `jnp.append(offsets, len(values))`.
          capacity: as in `from_lengths`.

        Raises:
          ValueError: `offsets` decrease or do not begin with 0; otherwise, and inside
            `jit`, as for `from_lengths`.

        Example:
          >>> import jax.numpy as jnp, sparsejax as sj
          >>> sj.SegmentTensor.from_offsets(jnp.array([10, 11, 101]), [0, 2, 2, 3])
          SegmentTensor([[10 11] [] [101]], int32, num_segments=3, capacity=3)
        """
        checked = conversions.as_offsets(offsets)
        lengths = checked[1:] - checked[:-1]
        return cls._from_lengths(values, lengths, checked[0] == 0, capacity)

    @classmethod
    def from_segment_ids(
        cls,
        values: PyTree,
        segment_ids: ArrayLike,
        num_segments: int,
        *,
        is_sorted: bool = False,
    ) -> Self:
        """Makes segments of elements and their segment ids, as `SegmentTensor(...)`.

        Example:
          >>> import jax.numpy as jnp, sparsejax as sj
          >>> ids = jnp.array([1, 0, 1, -1])
          >>> sj.SegmentTensor.from_segment_ids(jnp.array([5, 6, 7, 8]), ids, 2)
          SegmentTensor([[6] [5 7]], int32, num_segments=2, capacity=4)

        References:
          Caffe2, sorted and unsorted segment ids.
        """
        return cls(values, segment_ids, num_segments, is_sorted)

    @classmethod
    def from_padded(
        cls, padded: ArrayLike, *, filler: ArrayLike = -1, capacity: int | None = None
    ) -> Self:
        """Makes segments from rows of equal length: the elements that are not `filler`.

        Args:
          padded: `[S, L, ...]`, one row per segment. The filler may be anywhere in a
            row; with more than two axes, an element is dropped if all of it is filler.
          filler: number that the dtype of `padded` can represent; NaN matches NaN.
          capacity: int, the number of elements of the result. By default the number
            found, or S * L inside `jit`, where that number is unknown.

        Raises:
          ValueError: `padded` has fewer than two axes, its dtype cannot represent
            `filler`, or there are more elements than `capacity`. Inside `jit`, floats
            become NaN instead of the last error, and integers with a `capacity` below
            S * L are an error.

        Example:
          >>> import jax.numpy as jnp, sparsejax as sj
          >>> sj.SegmentTensor.from_padded(jnp.array([[1, 2, 3], [3, -1, -1]]))
          SegmentTensor([[1 2 3] [3]], int32, num_segments=2, capacity=4)

        References:
          Caffe2, padded representation.
        """
        padded = elements.as_array(padded, "padded")
        if padded.ndim < 2:
            raise ValueError(
                f"padded must be [S, L] or [S, L, ...], got shape {padded.shape}."
            )
        filler = _as_filler(filler, padded.dtype)
        is_nan = filler != filler
        differs = padded == padded if is_nan else padded != filler
        mask = differs.any(axis=tuple(range(2, padded.ndim))).reshape(-1)
        positions, count = _positions(mask, capacity)
        size = positions.shape[0]
        flat = padded.reshape(mask.shape[0], *padded.shape[2:])
        elements.check_fits(flat, count, mask.shape[0], size)
        values = _gather(flat, positions)
        if not isinstance(count, int):
            values = elements.nan_unless(count <= size, values)
        ids = _rows_of(positions, padded.shape[:2])
        return cls._make_unchecked(values, ids, padded.shape[0], True)

    @classmethod
    def from_multi_hot(
        cls, multi_hot: ArrayLike, *, capacity: int | None = None
    ) -> Self:
        """Makes segments of ids, from the count of each id in each segment.

        Args:
          multi_hot: integers or booleans `[S, V]`. Inside `jit` only booleans, since
            the sum of integers is unknown there.
          capacity: int, the number of elements of the result. By default the number
            found, or S * V inside `jit`.

        Returns:
          SegmentTensor of ids, int32, ascending in each segment.

        Raises:
          ValueError: `multi_hot` is not such a matrix, or there are more elements than
            `capacity`; inside `jit`, `capacity` is less than S * V.

        Example:
          >>> import jax.numpy as jnp, sparsejax as sj
          >>> sj.SegmentTensor.from_multi_hot(jnp.array([[0, 1, 2], [1, 0, 0]]))
          SegmentTensor([[1 2 2] [0]], int32, num_segments=2, capacity=4)

        References:
          Caffe2, sparse tensor, `DenseVectorToIdList`.
        """
        multi_hot = elements.as_array(multi_hot, "multi_hot")
        hot = multi_hot.dtype == bool
        is_counts = hot or jnp.issubdtype(multi_hot.dtype, jnp.integer)
        if multi_hot.ndim != 2 or not is_counts:
            raise ValueError(
                "multi_hot must be integers or booleans [S, V], got "
                f"{_arguments.kind_of(multi_hot)}. For ids with weights use from_csr."
            )
        if not hot and not conversions.is_known(multi_hot):
            raise ValueError(
                f"Inside jit the sum of {multi_hot.dtype} counts is unknown. If no id "
                "occurs twice, pass booleans, multi_hot > 0."
            )
        counts = multi_hot.reshape(-1)
        positions, count = _positions(counts, capacity)
        ids = _rows_of(positions, multi_hot.shape)
        columns = _compat.max_dim(multi_hot.shape[1], 1)
        values = positions % _arguments.scalar(columns, positions)
        elements.check_fits(values, count, counts.shape[0], values.shape[0])
        return cls._make_unchecked(values, ids, multi_hot.shape[0], True)

    @classmethod
    def from_lists(
        cls,
        lists: PyTree,
        *,
        capacity: int | Sequence[int | None] | None = None,
        dtype: DTypeLike | None = None,
    ) -> Self:
        """Makes segments from nested Python lists, to any depth.

        Args:
          lists: one of these, nested in any way:
            a list of lists of numbers, each one segment;
            a list of NumPy or JAX arrays `[k, ...]`, each one segment;
            a list of lists of lists, and so on: the elements are segments themselves,
            and `values` is a SegmentTensor;
            a dict of such lists with equal lengths: `values` is a dict;
            a list of maps with integer keys, `{1: [10, 11], 3: [101]}`, each one
            segment of pairs: `values` is `{"key", "ids"}` with a SegmentTensor of ids,
            or `{"key", "value"}` if each key maps to one number.
          capacity: int, the number of elements of the outermost level; or one int or
            None per level, outermost first. By default the number found.
          dtype: of the innermost values. By default the one JAX infers, or int32 if
            there are no elements.

        Raises:
          TypeError: `lists` are not such lists, or their depth is not uniform.
          ValueError: there are more elements than `capacity`, entries of a dict have
            different lengths, or integers overflow the dtype.

        Example:
          >>> import sparsejax as sj
          >>> sj.SegmentTensor.from_lists([[[10, 11], [101]], [[11], [50], [102, 103]]])
          SegmentTensor([[[10 11] [101]] [[11] [50] [102 103]]], int32, num_segments=2,
          capacity=5)
          >>> st = sj.SegmentTensor.from_lists([{1: [10, 11], 3: [101]}, {2: [50]}])
          >>> st.values["key"], st.values["ids"].lengths
          (Array([1, 3, 2], dtype=int32), Array([2, 1, 1], dtype=int32))

        References:
          Caffe2, nested segments, `LIST<MAP<INT, LIST<INT>>>`; TensorFlow,
          `tf.ragged.constant`.
        """
        level = nested_lists.read(lists, dtype)
        sizes = _as_sizes("capacity", capacity)
        return cls._from_level(level, sizes, None)

    @classmethod
    def from_csr(
        cls,
        indptr: ArrayLike | CSRLike,
        indices: ArrayLike | None = None,
        data: ArrayLike | None = None,
        *,
        capacity: int | None = None,
    ) -> Self:
        """Makes segments from the rows of a CSR matrix.

        Args:
          indptr: integers `[K + 1]`, the start of each row; or, as the only argument, a
            matrix with `indptr`, `indices` and `data`: a scipy CSR matrix, or a JAX
            BCSR without batch axes.
          indices: integers `[n]`, the columns.
          data: `[n, ...]`, the stored values.
          capacity: as in `from_lengths`.

        Returns:
          SegmentTensor with one segment per row. Its values are `{"index", "value"}`,
          or the array `indices` without `data`.

        Raises:
          TypeError: `indices` are missing or are not integers.
          ValueError: `indptr` is a batch, the matrix has another format, or as for
            `from_offsets`.

        Example:
          >>> import sparsejax as sj
          >>> sj.SegmentTensor.from_csr([0, 2, 2, 3], [7, 9, 8])
          SegmentTensor([[7 9] [] [8]], int32, num_segments=3, capacity=3)
        """
        forms = (
            "Call from_csr(indptr, indices), from_csr(indptr, indices, data), or "
            "from_csr(matrix) with a CSR or BCSR matrix."
        )
        pointers: Any = indptr
        if hasattr(indptr, "indptr"):
            if indices is not None or data is not None:
                raise TypeError(f"Got both a matrix and indices. {forms}")
            name = getattr(indptr, "format", "csr")
            if name != "csr":  # scipy's CSC and BSR have attributes of the same names
                raise ValueError(
                    f"The matrix must be CSR, got {name.upper()}. Call .tocsr()."
                )
            indices, data = pointers.indices, pointers.data
            pointers = pointers.indptr
        elif indices is None:
            raise TypeError(
                f"indices are missing, and {_arguments.kind_of(indptr)} is not a CSR "
                f"matrix. {forms}"
            )
        index = _arguments.as_integers(indices, "indices")
        values = index if data is None else {"index": index, "value": data}
        return cls.from_offsets(values, pointers, capacity=capacity)

    @classmethod
    def _from_lengths(
        cls, values: Any, lengths: Any, valid: Any, capacity: int | None
    ) -> Self:
        """Makes one from checked lengths; `valid` is for traced lengths."""
        values = elements.as_elements(values)
        n = elements.check_count(values)
        size = n if capacity is None else _arguments.static_int("capacity", capacity)
        is_numpy = isinstance(lengths, np.ndarray)
        total = int(lengths.sum()) if is_numpy else lengths.sum()
        if is_numpy and total > n:
            raise ValueError(
                f"The segments have {total} elements in all, but values has only {n}. "
                "Pass a smaller sum of lengths, or last offset."
            )
        elements.check_fits(values, total, n, size)
        if not is_numpy:
            valid = valid & jnp.all(lengths >= 0) & (total <= min(n, size))
            values = elements.nan_unless(valid, values)
        ids = conversions.segment_ids_of(lengths, size)
        return cls._make_unchecked(
            elements.resize(values, size), ids, lengths.shape[0], True
        )

    @classmethod
    def _from_level(
        cls,
        level: nested_lists.Level,
        sizes: tuple[int | None, ...],
        num_segments: int | None,
    ) -> Self:
        """Makes one from a level of lists, with empty segments up to `num_segments`."""
        need, size, *inner = int(level.lengths.sum()), *sizes, None
        n = need if size is None else size
        elements.check_fits((), need, need, n)

        def as_values(x):
            if isinstance(x, nested_lists.Level):
                return cls._from_level(x, tuple(inner), n)
            return {k: as_values(v) for k, v in x.items()} if isinstance(x, dict) else x

        lengths = level.lengths
        if num_segments is not None:
            lengths = np.pad(lengths, (0, num_segments - lengths.size))
        return cls._from_lengths(as_values(level.values), lengths, True, n)

    # -- to other representations ------------------------------------------------

    def map(self, f: Callable[[jax.Array], jax.Array]) -> SegmentTensor:
        """Applies `f` to each array of the values; the segments stay the same.

        `jax.tree.map` would also change the segment ids.

        Args:
          f: maps an array `[n, ...]` to one with as many elements. It is also called
            for the arrays of nested segments.

        Raises:
          ValueError: `f` changes the number of elements.

        Example:
          >>> import sparsejax as sj
          >>> sj.SegmentTensor.from_lists([[1, 2], [3]]).map(lambda ids: ids * 2)
          SegmentTensor([[2 4] [6]], int32, num_segments=2, capacity=3)
        """
        values = elements.map_leaves(f, lambda x: x.map(f), self.values)
        elements.check_count(values, self.capacity, "the SegmentTensor")
        return self._make_unchecked(
            values, self.segment_ids, self.num_segments, self.is_sorted
        )

    def to_padded(
        self, max_length: int | Sequence[int] | None = None, filler: ArrayLike = -1
    ) -> Any:
        """Returns rows of equal length, padded with `filler`.

        `out[k, j]` is the j-th element of segment k, or `filler` if the segment is
        shorter.

        Args:
          max_length: int L; longer segments are cut. By default the length of the
            longest segment; required inside `jit`. For nested segments an int applies
            to the outermost level; or pass one int or None per level, outermost first.
          filler: number that the dtype of the values can represent.

        Returns:
          `[num_segments, L, ...]`, or `[num_segments, L, L', ...]` for nested segments;
          a tree of such arrays if values are a tree. Differentiable in the values.

        Raises:
          TypeError: `max_length` is not a static int.
          ValueError: the dtype of the values cannot represent `filler`, or `max_length`
            is negative, or missing inside `jit`.

        Example:
          >>> import sparsejax as sj
          >>> sj.SegmentTensor.from_lists([[1, 2, 3], [], [4]]).to_padded()
          Array([[ 1,  2,  3],
                 [-1, -1, -1],
                 [ 4, -1, -1]], dtype=int32)

        References:
          Caffe2, padded representation; TensorFlow, `RaggedTensor.to_tensor`.
        """
        sizes = _as_sizes("max_length", max_length)
        longest, *inner = *sizes, None
        st, lengths = self.sort(), self.lengths
        is_known = conversions.is_known(lengths)
        if longest is None:
            if not is_known:
                raise ValueError(
                    "Inside jit the longest segment is unknown. Pass max_length, an "
                    "int, or for nested segments one int per level."
                )
            longest = int(np.asarray(lengths).max(initial=0))
        # The position of each entry [S, L] in the sorted elements; n for the padding.
        xp, lengths = (np, np.asarray(lengths)) if is_known else (jnp, lengths)
        begins = xp.cumsum(lengths, dtype=xp.int32) - lengths
        column = xp.arange(longest, dtype=xp.int32)[None, :]
        filled = column < xp.minimum(lengths, np.int32(longest))[:, None]
        positions = xp.where(
            filled, begins[:, None] + column, _arguments.scalar(self.capacity, begins)
        )

        def pad(x):
            value = _as_filler(filler, x.dtype)
            rows = indexing.take_rows(x, jnp.asarray(positions))
            return jnp.where(indexing.append_axes(filled, rows.ndim), rows, value)

        def pad_nested(x):
            return jax.tree.map(pad, x.to_padded(tuple(inner), filler))

        return elements.map_leaves(pad, pad_nested, st.values)

    def to_lists(self) -> Any:
        """Lists the elements of each segment; nested segments as nested lists.

        A tree of such lists if values are a tree. The inverse of `from_lists`.

        Raises:
          jax.errors.TracerArrayConversionError: called inside `jit`.

        Example:
          >>> import jax.numpy as jnp, sparsejax as sj
          >>> ids, scores = jnp.array([7, 8, 9]), jnp.array([1.0, 0.5, 2.0])
          >>> values = {"id": ids, "score": scores}
          >>> sj.SegmentTensor.from_segment_ids(values, [1, 0, 1], 2).to_lists()
          {'id': [[8], [7, 9]], 'score': [[0.5], [1.0, 2.0]]}
        """
        return nested_lists.write(self.values, self.segment_ids, self.num_segments)

    def to_multi_hot(self, num_ids: int) -> jax.Array:
        """Counts the occurrences of each id in each segment.

        `out[k, v] = sum_{i: segment_ids[i] == k, values[i] == v} 1`

        Args:
          num_ids: int V. Ids outside `[0, V)` are not counted.

        Returns:
          int32 `[num_segments, V]`.

        Raises:
          TypeError: values are not one array of integers `[n]`, or `num_ids` is not
            a static int.

        Example:
          >>> import sparsejax as sj
          >>> sj.SegmentTensor.from_lists([[1, 2, 2], [0]]).to_multi_hot(3)
          Array([[0, 1, 2],
                 [1, 0, 0]], dtype=int32)

        References:
          Caffe2, sparse tensor, `SegmentOneHot`.
        """
        num_ids = _arguments.static_int("num_ids", num_ids)
        values = self.values
        if not isinstance(values, (jax.Array, np.ndarray)) or values.ndim != 1:
            raise TypeError(
                f"values must be one array of integer ids [n], got {self!r}."
            )
        ids = _arguments.as_ids(values, num_ids, "values")
        counts = jnp.zeros((self.num_segments, num_ids), jnp.int32)
        return counts.at[self.segment_ids, ids].add(
            jnp.ones(ids.shape, jnp.int32), mode="drop", wrap_negative_indices=False
        )

    def sort(self) -> SegmentTensor:
        """Returns the same segments with contiguous elements, and empty elements last.

        Elements of a segment keep their order. Returns `self` if it is sorted.

        Example:
          >>> import jax.numpy as jnp, sparsejax as sj
          >>> st = sj.SegmentTensor(jnp.array([5, 6, 7]), jnp.array([1, 0, 1]), 2)
          >>> st.sort().values
          Array([6, 5, 7], dtype=int32)
        """
        if self.is_sorted:
            return self
        ids = self.segment_ids
        if conversions.is_known(ids):
            ids = np.asarray(ids)
            order = np.argsort(ids, kind="stable").astype(np.int32)
        else:
            order = merge.stable_order(ids, self.num_segments + 1)
        values = elements.take(self.values, order)
        ids = _gather(ids, order)
        return self._make_unchecked(values, ids, self.num_segments, True)

    # -- as elements of another SegmentTensor ------------------------------------

    def _resize_segments(self, n: int) -> SegmentTensor:
        """Pads with empty segments, or cuts, to n segments."""
        kept = _compat.min_dim(n, self.num_segments)
        kept = _arguments.scalar(kept, self.segment_ids)
        none = _arguments.scalar(n, self.segment_ids)
        ids = jnp.where(self.segment_ids < kept, self.segment_ids, none)
        return self._make_unchecked(self.values, ids, n, self.is_sorted)

    def _take_segments(self, order: Any) -> SegmentTensor:
        """Permutes the segments by `order`; the result is sorted if `self` is."""
        place = jnp.argsort(jnp.asarray(order)).astype(self.segment_ids.dtype)
        inside = indexing.in_range(self.segment_ids, self.num_segments)
        ids = indexing.take_rows(place, self.segment_ids)
        ids = jnp.where(inside, ids, _arguments.scalar(self.num_segments, ids))
        moved = self._make_unchecked(self.values, ids, self.num_segments, False)
        return moved.sort() if self.is_sorted else moved


# ------------------------------------------------------------------ private


def _as_sizes(name: str, sizes: Any) -> tuple[int | None, ...]:
    """Returns `sizes`, an int or None or one per level, as a non-empty tuple."""
    if not isinstance(sizes, (tuple, list)):
        sizes = (sizes,)
    hint = "For nested segments pass one int or None per level, outermost first."
    return tuple(
        x if x is None else _arguments.static_int(name, x, 0, hint)
        for x in sizes or (None,)
    )


def _as_filler(filler: Any, dtype: Any) -> np.ndarray:
    """Returns `filler` in the dtype of the values, or raises if it cannot be cast."""
    try:
        number, value = np.asarray(filler).item(), np.array(filler, dtype)
    except (OverflowError, TypeError, ValueError):
        number = value = None
    rounds = jnp.issubdtype(dtype, jnp.inexact)  # NaN, and 0.1 in float32
    if value is None or not (rounds or value.item() == number):
        raise ValueError(
            f"filler={_arguments.show(filler)} cannot be represented in {dtype}, the "
            "dtype of the values. Pass a value of that dtype that no element has."
        )
    return value


def _positions(counts: Any, capacity: int | None) -> tuple[Any, Any]:
    """Repeats each position of `counts` [n] by its count, and pads with n.

    Returns:
      int32 `[capacity]`, and the number of positions, an int if known. The default
      capacity is that number if known, else n, which suffices: traced counts are
      booleans.
    """
    n = counts.shape[0]
    if capacity is not None:
        capacity = _arguments.static_int("capacity", capacity)
    if conversions.is_known(counts):
        repeated = np.repeat(np.arange(n, dtype=np.int32), np.asarray(counts))
        kept = repeated[:capacity]
        size = repeated.size if capacity is None else capacity
        return np.pad(kept, (0, size - kept.size), constant_values=n), repeated.size
    size = n if capacity is None else capacity
    (repeated,) = jnp.nonzero(counts, size=size, fill_value=n)
    return repeated.astype(jnp.int32), jnp.sum(counts, dtype=jnp.int32)


def _rows_of(positions: Any, shape: Sequence[int]) -> Any:
    """Returns the row of each position in a matrix of `shape`, S for padding."""
    rows, columns = shape
    xp = np if isinstance(positions, np.ndarray) else jnp
    row = positions // _arguments.scalar(_compat.max_dim(columns, 1), positions)
    return xp.where(positions < rows * columns, row, _arguments.scalar(rows, row))


def _gather(x: Any, positions: Any) -> Any:
    """Returns `x[positions]`, zeros if out of range; in NumPy for NumPy arrays."""
    if not (isinstance(x, np.ndarray) and isinstance(positions, np.ndarray)):
        return indexing.take_rows(jnp.asarray(x), jnp.asarray(positions))
    out = np.zeros((positions.size, *x.shape[1:]), x.dtype)
    inside = positions < x.shape[0]
    out[inside] = x[positions[inside]]
    return out
