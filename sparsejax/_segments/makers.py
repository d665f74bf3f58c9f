"""How SegmentTensors are made: from each of the other forms of the same thing.

These are the class methods of SegmentTensor, which extends `Makers`; `cls` is
SegmentTensor itself.
"""

from typing import TYPE_CHECKING, Any, Self, TypeVar

import jax.numpy as jnp
import numpy as np

from sparsejax import _arguments
from sparsejax._segments import elements, layouts, nested_lists, numbers


class Makers:
    """The makers, for SegmentTensor to extend."""

    if TYPE_CHECKING:  # what SegmentTensor, which is defined on top of this, has

        def __init__(
            self,
            values: Any,
            segment_ids: Any,
            num_segments: int,
            is_sorted: bool = False,
        ): ...

        @classmethod
        def _make_unchecked(
            cls, values: Any, segment_ids: Any, num_segments: int, is_sorted: bool
        ) -> Self: ...

    @classmethod
    def from_lengths(
        cls, values: Any, lengths: Any, *, capacity: int | None = None
    ) -> Self:
        """Segments that follow one another, by their lengths.

        Args:
          values: as of the class. Elements beyond the sum of `lengths` are empty.
          lengths: integers `[K]`.
          capacity: int, elements of the result; as many as of `values` if left out.
            Empty elements are added, or the last ones cut.

        Raises:
          ValueError: `lengths` are negative, or sum to more than there are elements or
            than `capacity`. Inside `jit`, where that is not known, floats among the
            values come out as NaN then. Integers have no NaN: with them a `capacity`
            less than the number of elements is refused there, and lengths that sum to
            more, or negative ones, cut the elements otherwise: `.lengths` then differ
            from `lengths`. Check numbers that come from outside before they enter
            `jit`.

        Example:
          >>> import jax.numpy as jnp, sparsejax as sj
          >>> ids, lengths = jnp.array([10, 11, 101]), jnp.array([2, 1, 0])
          >>> sj.SegmentTensor.from_lengths(ids, lengths, capacity=5)
          SegmentTensor([[10 11] [101] []], int32, num_segments=3, capacity=5)

        References:
          Caffe2, values with lengths.
        """
        call = "SegmentTensor.from_lengths"
        lengths = numbers.as_lengths(call, lengths)
        return _in_order(cls, call, values, lengths, True, capacity)

    @classmethod
    def from_offsets(
        cls, values: Any, offsets: Any, *, capacity: int | None = None
    ) -> Self:
        """Segments that follow one another, each from an offset to the next.

        Args:
          values: as of the class. Elements beyond the last offset are empty.
          offsets: integers `[K + 1]`, ascending, the first of them 0.
          capacity: as of `from_lengths`.

        Raises:
          ValueError: `offsets` are not such, or as `from_lengths`; inside `jit` as
            there.

        Example:
          >>> import jax.numpy as jnp, sparsejax as sj
          >>> sj.SegmentTensor.from_offsets(jnp.array([10, 11, 101]), [0, 2, 2, 3])
          SegmentTensor([[10 11] [] [101]], int32, num_segments=3, capacity=3)
        """
        call = "SegmentTensor.from_offsets"
        offsets = numbers.as_offsets(call, offsets)
        diff = np.diff if isinstance(offsets, np.ndarray) else jnp.diff
        return _in_order(cls, call, values, diff(offsets), offsets[0] == 0, capacity)

    @classmethod
    def from_segment_ids(
        cls,
        values: Any,
        segment_ids: Any,
        num_segments: int,
        *,
        is_sorted: bool = False,
    ) -> Self:
        """Elements and the segment of each; the same as `SegmentTensor(...)`.

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
        cls, padded: Any, *, filler: Any = -1, capacity: int | None = None
    ) -> Self:
        """Segments from rows of one length: all that is not `filler`.

        Args:
          padded: `[S, L, ...]`, a row a segment. The filler may stand anywhere; with
            more than two axes an element is left out if all of it is filler.
          filler: number of the type of `padded`; NaN means NaN.
          capacity: int, elements of the result. Left out, it is as many as there are,
            or S * L inside `jit`, where that is not known.

        Raises:
          ValueError: `padded` has one axis or cannot hold `filler`, or there are more
            elements than `capacity`. Inside `jit`, where that is not known, floats come
            out as NaN then, and for integers a `capacity` less than S * L is refused.

        Example:
          >>> import jax.numpy as jnp, sparsejax as sj
          >>> sj.SegmentTensor.from_padded(jnp.array([[1, 2, 3], [3, -1, -1]]))
          SegmentTensor([[1 2 3] [3]], int32, num_segments=2, capacity=4)

        References:
          Caffe2, padded representation.
        """
        call = "SegmentTensor.from_padded"
        padded = elements.as_array(call, padded, "padded")
        mask = layouts.present(call, padded, filler)
        places, count, room = layouts.places(call, mask, capacity)
        flat = padded.reshape(mask.shape[0], *padded.shape[2:])
        elements.check_capacity(call, flat, count, mask.shape[0], room)
        values = layouts.gather(flat, places)
        if not isinstance(count, int):
            values = elements.nan_unless(count <= room, values)
        ids = layouts.row_of(places, padded.shape[:2])
        return _build(cls, values, ids, padded.shape[0])

    @classmethod
    def from_multi_hot(cls, multi_hot: Any, *, capacity: int | None = None) -> Self:
        """Segments of ids, from how often each segment has each id.

        Args:
          multi_hot: integers or booleans `[S, V]`. Inside `jit`, where the sum of
            integers is not known, booleans.
          capacity: int, elements of the result. Left out, it is as many as there are,
            or S * V inside `jit`.

        Returns:
          SegmentTensor of ids, int32, ascending in each segment.

        Raises:
          ValueError: no such matrix, or more elements than `capacity`; inside `jit`,
            `capacity` less than S * V.

        Example:
          >>> import jax.numpy as jnp, sparsejax as sj
          >>> sj.SegmentTensor.from_multi_hot(jnp.array([[0, 1, 2], [1, 0, 0]]))
          SegmentTensor([[1 2 2] [0]], int32, num_segments=2, capacity=4)

        References:
          Caffe2, sparse tensor, `DenseVectorToIdList`.
        """
        call = "SegmentTensor.from_multi_hot"
        multi_hot = elements.as_array(call, multi_hot, "multi_hot")
        counts = layouts.as_counts(call, multi_hot)
        places, count, room = layouts.places(call, counts, capacity)
        ids = layouts.row_of(places, multi_hot.shape)
        values = places % np.int32(max(multi_hot.shape[1], 1))
        elements.check_capacity(call, values, count, counts.shape[0], room)
        return _build(cls, values, ids, multi_hot.shape[0])

    @classmethod
    def from_lists(cls, lists: Any, *, capacity: Any = None, dtype: Any = None) -> Self:
        """Segments from Python's nested lists, as deep as they are nested.

        Args:
          lists: one of these, and any of them inside another:
            a list of lists of numbers: a segment each;
            a list of arrays `[k, ...]`, NumPy's or JAX's: a segment each, not looked
            into;
            a list of lists of lists, and so on: the elements are segments themselves,
            and values a SegmentTensor;
            a dict of such lists, cut alike: values are a dict;
            a list of maps with integer keys, `{1: [10, 11], 3: [101]}`: a segment of
            pairs each, and values `{"key", "ids"}` with a SegmentTensor of ids, or
            `{"key", "value"}` if there is one number for each key.
          capacity: int, elements of the outermost level; or one int or None for each
            level, outermost first. As many as there are if left out.
          dtype: of the innermost values. Left out, what JAX makes of them, and int32
            where there are none.

        Raises:
          TypeError: not such lists, or of unequal depth.
          ValueError: more elements than `capacity`, parts of a dict that are cut
            differently, or integers that the type cannot hold.

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
        call = "SegmentTensor.from_lists"
        level = nested_lists.read(call, lists, dtype)
        sizes = numbers.as_sizes(call, "capacity", capacity)
        return _from_level(cls, call, level, sizes, None)

    @classmethod
    def from_csr(
        cls,
        indptr: Any,
        indices: Any = None,
        data: Any = None,
        *,
        capacity: int | None = None,
    ) -> Self:
        """Segments from the rows of a CSR matrix.

        Args:
          indptr: integers `[K + 1]`, where each row begins; or, alone, a matrix that
            has `indptr`, `indices` and `data`: scipy's CSR, or JAX's BCSR without batch
            axes.
          indices: integers `[n]`, the columns.
          data: `[n, ...]`, what is stored there.
          capacity: as of `from_lengths`.

        Returns:
          SegmentTensor with a segment a row. Its values are `{"index", "value"}`, and
          the array `indices` alone where there is no `data`.

        Raises:
          TypeError: `indices` are missing, or no integers.
          ValueError: a batch, a matrix in another format, or as `from_offsets`.

        Example:
          >>> import sparsejax as sj
          >>> sj.SegmentTensor.from_csr([0, 2, 2, 3], [7, 9, 8])
          SegmentTensor([[7 9] [] [8]], int32, num_segments=3, capacity=3)
        """
        call = "SegmentTensor.from_csr"
        indptr, index, data = layouts.csr_parts(call, indptr, indices, data)
        values = index if data is None else {"index": index, "value": data}
        offsets = numbers.as_offsets(call, indptr)
        diff = np.diff if isinstance(offsets, np.ndarray) else jnp.diff
        return _in_order(cls, call, values, diff(offsets), offsets[0] == 0, capacity)


# ------------------------------------------------------------------ private


T = TypeVar("T", bound=Makers)


def _build(cls: type[T], values: Any, segment_ids: Any, num_segments: int) -> T:
    """Of what is checked, and sorted."""
    return cls._make_unchecked(values, segment_ids, num_segments, True)


def _in_order(
    cls: type[T], call: str, values: Any, lengths: Any, ok: Any, capacity: int | None
) -> T:
    """Of lengths from `as_lengths`; where these are traced, `ok` says if they hold."""
    values = elements.as_elements(call, values)
    n = elements.check_count(call, values)
    size = n if capacity is None else _arguments.check_capacity(call, capacity)
    total = numbers.sum_of(lengths)
    if isinstance(total, int) and total > n:
        raise ValueError(
            f"{call}: the segments have {total} elements, and values have {n}. Lengths "
            "sum to at most the number of elements, and offsets end with it."
        )
    elements.check_capacity(call, values, total, n, size)
    if not isinstance(total, int):
        ok = ok & jnp.all(lengths >= 0) & (total <= min(n, size))
        values = elements.nan_unless(ok, values)
    ids = numbers.ids_of_lengths(lengths, size)
    return _build(cls, elements.resize(values, size), ids, lengths.shape[0])


def _from_level(
    cls: type[T],
    call: str,
    level: nested_lists.Level,
    sizes: tuple[int | None, ...],
    num_segments: int | None,
) -> T:
    """Of one level of lists, with empty segments added up to `num_segments`."""
    need, size, *inner = int(level.lengths.sum()), *sizes, None
    n = need if size is None else size

    def as_values(x):
        if isinstance(x, nested_lists.Level):
            return _from_level(cls, call, x, tuple(inner), n)
        return {k: as_values(v) for k, v in x.items()} if isinstance(x, dict) else x

    if need > n:
        raise ValueError(elements.OVERFLOW.format(call=call, need=need, capacity=n))
    lengths = level.lengths
    if num_segments is not None:
        lengths = np.pad(lengths, (0, num_segments - lengths.size))
    return _in_order(cls, call, as_values(level.values), lengths, True, n)
