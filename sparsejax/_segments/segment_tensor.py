"""SegmentTensor: an axis of elements, cut into segments of any lengths.

Each example of a batch has a list of ids, and no two lists are of one length. A
SegmentTensor holds all of them in one axis: `values` are the elements, and
`segment_ids` say which segment each of them belongs to.

Invariants, which every maker sees to:

- an element whose segment id is `num_segments` is *empty*: it belongs to no segment
  and counts nowhere, whatever its value. Ids that are out of range become that one.
- the numbers of elements (`capacity`, empty ones included) and of segments are static,
  so everything works under `jit`. So is `is_sorted`: the ids never decrease, and the
  empty elements come last.

Sharp edges: `jax.tree.map` over a SegmentTensor also visits its segment ids; `.map`
does not. A batch of them, stacked, is for `jax.vmap` and `jax.lax.scan`; outside of
these its properties mean nothing.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NoReturn, Self

import jax
import jax.numpy as jnp
import numpy as np

from sparsejax import _arguments
from sparsejax._rows import indexing
from sparsejax._segments import (
    conversions,
    elements,
    html,
    layouts,
    nested_lists,
    numbers,
)
from sparsejax._segments.makers import Makers


_NOT_SORTED = "Leave is_sorted out, or sort them first."


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True, eq=False, repr=False, init=False)
class SegmentTensor(Makers):
    """Elements in one axis, cut into segments of any lengths.

    Segment k is the elements i with `segment_ids[i] == k`, in their order: the
    ids of example k of a batch, say. `sparsejax.embedding_bag` looks up and
    reduces them; `sparsejax.segment_sum` and its like reduce what they hold.
    Its parts:

    - `from_lists`, `from_lengths`, `from_offsets`, `from_segment_ids`,
      `from_padded`, `from_multi_hot`, `from_csr`: make one of what you have.
    - `to_lists`, `to_padded`, `to_multi_hot`: other forms of the same.
    - `map(f)`: changes the values alone; `sort()`: puts segments side by side.
    - `lengths`, `offsets`: of the segments; `capacity`: number of elements,
      static.

    Args:
      values: `[n, ...]`, the elements. Or a pytree of such arrays, as ids with
        their scores; a leaf may also be a SegmentTensor of n segments, each of
        which is one element then, and so to any depth. A list is read as an
        array.
      segment_ids: integers `[n]`, any order; ids out of range belong to no
        segment.
      num_segments: int, static.
      is_sorted: bool, static, that `segment_ids` never decrease, and that those
        that are out of range come last. Trusted inside `jit`, checked outside.

    Raises:
      TypeError: `segment_ids` are not integers, `num_segments` is no static
        int, or a leaf is no array.
      ValueError: the shapes do not go together, or `is_sorted` is not so.

    Example:
      >>> import jax.numpy as jnp, sparsejax as sj
      >>> sj.SegmentTensor.from_lists([[10, 11], [101], []])
      SegmentTensor([[10 11] [101] []], int32, num_segments=3, capacity=3)
      >>> st = sj.SegmentTensor(jnp.array([5, 6, 7]), jnp.array([1, 0, 1]), 2)
      >>> st
      SegmentTensor([[6] [5 7]], int32, num_segments=2, capacity=3)
      >>> st.lengths
      Array([1, 2], dtype=int32)

    `jax.tree.map` over a SegmentTensor also changes its segment ids: use
    `.map`.

    References:
      Caffe2, Sparse Operations; TensorFlow, `tf.RaggedTensor`; TorchRec,
      `JaggedTensor`.
    """

    values: Any
    segment_ids: jax.Array
    num_segments: int
    is_sorted: bool

    def __init__(
        self, values: Any, segment_ids: Any, num_segments: int, is_sorted: bool = False
    ):
        # Only a user's call comes here: pytree code goes through `tree_unflatten`,
        # which may carry tracers, ShapeDtypeStructs or plain placeholders.
        call = "SegmentTensor"
        num_segments = numbers.as_num_segments(call, num_segments)
        ids = numbers.as_segment_ids(call, segment_ids, num_segments)
        if is_sorted:
            numbers.check_sorted(call, ids, _NOT_SORTED)
        values = elements.as_elements(call, values)
        elements.check_count(call, values, ids.shape[0], "segment_ids")
        values = elements.map_leaves(jnp.asarray, lambda x: x, values)
        ids = jnp.asarray(ids)
        self._set(values, ids, num_segments, bool(is_sorted))

    def _set(self, values: Any, segment_ids: Any, num_segments: int, is_sorted: bool):
        self.__dict__.update(
            values=values,
            segment_ids=segment_ids,
            num_segments=num_segments,
            is_sorted=is_sorted,
        )

    @classmethod
    def _make_unchecked(
        cls, values: Any, segment_ids: Any, num_segments: int, is_sorted: bool
    ) -> Self:
        """For makers, which have checked: NumPy's arrays become JAX's, no more."""
        values = elements.map_leaves(jnp.asarray, lambda x: x, values)
        static = num_segments, is_sorted
        return cls.tree_unflatten(static, (values, jnp.asarray(segment_ids)))

    # -- pytree ------------------------------------------------------------------

    def tree_flatten_with_keys(self) -> tuple[Any, Any]:
        """Children with their keys."""
        keys = map(jax.tree_util.GetAttrKey, ("values", "segment_ids"))
        children = zip(keys, (self.values, self.segment_ids))
        return tuple(children), (self.num_segments, self.is_sorted)

    @classmethod
    def tree_unflatten(cls, static: Any, children: Any) -> Self:
        """Rebuilds without checks: children may be anything JAX puts there."""
        self = object.__new__(cls)
        self._set(*children, *static)
        return self

    # -- what it is --------------------------------------------------------------

    @property
    def capacity(self) -> int:
        """Number of elements, empty ones included; static."""
        return self.segment_ids.shape[0]

    @property
    def lengths(self) -> jax.Array:
        """Number of elements of each segment, int32 `[num_segments]`."""
        return conversions.segment_ids_to_lengths(self.segment_ids, self.num_segments)

    @property
    def offsets(self) -> jax.Array:
        """Where each segment begins, and the last ends, int32 `[num_segments + 1]`.

        These are places in `values` if `is_sorted`, else in those of `.sort()`: the row
        pointers of CSR.
        """
        return conversions.lengths_to_offsets(self.lengths)

    def __repr__(self) -> str:
        shown = nested_lists.show(self.values, self.segment_ids, self.num_segments)
        n = self.capacity if hasattr(self.segment_ids, "shape") else self.segment_ids
        return f"SegmentTensor({shown}, num_segments={self.num_segments}, capacity={n})"

    _repr_html_ = html.segments

    def __array__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError(
            "SegmentTensor: one was used where an array is needed, by jnp.asarray, "
            "np.asarray or a numpy function. Its segments differ in length: call "
            ".to_padded() for rows of one length, or work on .values and .segment_ids."
        )

    # -- other forms of the same -------------------------------------------------

    def map(self, f: Callable[[jax.Array], jax.Array]) -> "SegmentTensor":
        """`f` of each array of the values; the segments stay as they are.

        `jax.tree.map` would change the segment ids as well.

        Args:
          f: from an array `[n, ...]` to one of as many elements. Arrays of nested
            segments, too, are handed to it.

        Raises:
          ValueError: `f` gives another number of elements.

        Example:
          >>> import sparsejax as sj
          >>> sj.SegmentTensor.from_lists([[1, 2], [3]]).map(lambda ids: ids * 2)
          SegmentTensor([[2 4] [6]], int32, num_segments=2, capacity=3)
        """
        call = "SegmentTensor.map"
        values = elements.map_leaves(f, lambda x: x.map(f), self.values)
        elements.check_count(call, values, self.capacity, "the SegmentTensor")
        return self._make_unchecked(
            values, self.segment_ids, self.num_segments, self.is_sorted
        )

    def to_padded(self, max_length: Any = None, filler: Any = -1) -> Any:
        """Rows of one length, filled up with `filler`.

        `out[k, j]` is the j-th element of segment k, and `filler` where there is none.

        Args:
          max_length: int L; segments that are longer are cut. The longest segment if
            left out, which inside `jit` is not known. Of nested segments it is for the
            outermost level; or one int or None for each level, outermost first.
          filler: number that the type of the values can hold.

        Returns:
          `[num_segments, L, ...]`, `[num_segments, L, L', ...]` of nested segments; a
          tree of such if values are a tree. Differentiable in the values.

        Raises:
          ValueError: `filler` is not of the values' type, `max_length` is no such int,
            or is left out inside `jit`.

        Example:
          >>> import sparsejax as sj
          >>> sj.SegmentTensor.from_lists([[1, 2, 3], [], [4]]).to_padded()
          Array([[ 1,  2,  3],
                 [-1, -1, -1],
                 [ 4, -1, -1]], dtype=int32)

        References:
          Caffe2, padded representation; TensorFlow, `RaggedTensor.to_tensor`.
        """
        call = "SegmentTensor.to_padded"
        sizes = numbers.as_sizes(call, "max_length", max_length)
        longest, *inner = *sizes, None
        st, lengths = self.sort(), self.lengths
        if longest is None:
            if not numbers.is_known(lengths):
                raise ValueError(
                    f"{call}: inside jit the longest segment is not known, and the "
                    "result needs a static size. Pass max_length=, an int, or for "
                    "nested segments one for each level."
                )
            longest = int(np.asarray(lengths).max(initial=0))
        places, filled = layouts.pad_places(lengths, self.capacity, longest)

        def pad(x):
            value = layouts.filler_value(call, filler, x.dtype)
            rows = indexing.take_rows(x, jnp.asarray(places))
            keep = filled.reshape(filled.shape + (1,) * (rows.ndim - 2))
            return jnp.where(keep, rows, value)

        def pad_nested(x):
            return jax.tree.map(pad, x.to_padded(tuple(inner), filler))

        return elements.map_leaves(pad, pad_nested, st.values)

    def to_lists(self) -> Any:
        """Each segment as a list of its elements; nested segments as nested lists.

        A tree of such if values are a tree. `from_lists` reads what this gives.

        Raises:
          TypeError: inside `jit`, where the values are not known.

        Example:
          >>> import jax.numpy as jnp, sparsejax as sj
          >>> ids, scores = jnp.array([7, 8, 9]), jnp.array([1.0, 0.5, 2.0])
          >>> values = {"id": ids, "score": scores}
          >>> sj.SegmentTensor.from_segment_ids(values, [1, 0, 1], 2).to_lists()
          {'id': [[8], [7, 9]], 'score': [[0.5], [1.0, 2.0]]}
        """
        call = "SegmentTensor.to_lists"
        return nested_lists.write(
            call, self.values, self.segment_ids, self.num_segments
        )

    def to_multi_hot(self, num_ids: int) -> jax.Array:
        """How often each segment has each id.

        `out[k, v] = sum_{i: segment_ids[i] == k, values[i] == v} 1`

        Args:
          num_ids: int V. Ids outside `[0, V)` count nowhere.

        Returns:
          int32 `[num_segments, V]`.

        Raises:
          TypeError: values are not one array of integers `[n]`, or `num_ids` is no
            static int.

        Example:
          >>> import sparsejax as sj
          >>> sj.SegmentTensor.from_lists([[1, 2, 2], [0]]).to_multi_hot(3)
          Array([[0, 1, 2],
                 [1, 0, 0]], dtype=int32)

        References:
          Caffe2, sparse tensor, `SegmentOneHot`.
        """
        call = "SegmentTensor.to_multi_hot"
        num_ids = _arguments.static_int(call, "num_ids", num_ids, not_an_int=TypeError)
        values = self.values
        if not isinstance(values, (jax.Array, np.ndarray)) or values.ndim != 1:
            raise TypeError(
                f"{call}: values must be one array of ids [n], integers, got {self!r}. "
                "Make a SegmentTensor of that part: from_segment_ids(st.values['ids'], "
                "st.segment_ids, st.num_segments)."
            )
        ids = _arguments.as_ids(call, values, num_ids, "values")
        shape = self.num_segments, num_ids
        return layouts.count_hot(ids, self.segment_ids, shape)

    def sort(self) -> "SegmentTensor":
        """The same segments with elements side by side, the empty ones last.

        Elements of a segment keep their order. Sorted already, it is `self`.

        Example:
          >>> import jax.numpy as jnp, sparsejax as sj
          >>> st = sj.SegmentTensor(jnp.array([5, 6, 7]), jnp.array([1, 0, 1]), 2)
          >>> st.sort().values
          Array([6, 5, 7], dtype=int32)
        """
        if self.is_sorted:
            return self
        order = numbers.stable_order(self.segment_ids)
        values = elements.take(self.values, order)
        ids = layouts.gather(numbers.as_known(self.segment_ids), order)
        return self._make_unchecked(values, ids, self.num_segments, True)

    # -- as elements of another SegmentTensor ------------------------------------

    def _resize_segments(self, n: int) -> "SegmentTensor":
        """n segments: empty ones added, or the last ones cut."""
        kept = _arguments.scalar(min(n, self.num_segments), self.segment_ids)
        none = _arguments.scalar(n, self.segment_ids)
        ids = jnp.where(self.segment_ids < kept, self.segment_ids, none)
        return self._make_unchecked(self.values, ids, n, self.is_sorted)

    def _take_segments(self, order: Any) -> "SegmentTensor":
        """The segments `order`, a permutation; sorted if this is."""
        place = jnp.argsort(jnp.asarray(order)).astype(self.segment_ids.dtype)
        named = indexing.in_range(self.segment_ids, self.num_segments)
        ids = indexing.take_rows(place, self.segment_ids)
        ids = jnp.where(named, ids, _arguments.scalar(self.num_segments, ids))
        moved = self._make_unchecked(self.values, ids, self.num_segments, False)
        return moved.sort() if self.is_sorted else moved
