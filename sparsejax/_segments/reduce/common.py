"""What all segment reductions share: their arguments, and adding up and spreading.

A reduction is a function of one array and of `Segments`, which say where each of its
elements (its first axis) belongs. `over_segments` checks the user's arguments once and
calls that function for the array, or for each array of a SegmentTensor.

Invariant: an id outside `[0, count)` is no segment, and its element may hold anything,
NaN too. What is scattered drops by itself; whatever is computed elementwise and may be
differentiated goes through `members_only` first, since the gradient of a product with a
dropped element is `0 * NaN`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparsejax import _arguments
from sparsejax._rows import indexing
from sparsejax._segments import SegmentTensor


_KIND = "{call}: data must be {want}, got {found}. {todo}"

_KINDS = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)

_WANT_BOOL = "Compare first, as in data != 0."
_WANT_NUMBER = "Cast it with .astype(jnp.int32); segment_any and segment_all take bool."


# ------------------------------------------------------------------ arguments


@dataclasses.dataclass(frozen=True)
class Segments:
    """Which segment each element belongs to.

    Args:
      ids: signed integer `[n]`; outside `[0, count)` an element is in no segment.
      count: the number of segments.
      is_sorted: whether `ids` never decrease. Those out of range count here too, so
        nothing may move them past the others.
      is_unique: whether no two elements share a segment.
    """

    ids: jax.Array
    count: int
    is_sorted: bool = False
    is_unique: bool = False

    @property
    def static(self) -> tuple[int, bool, bool]:
        """All but the ids, for a `custom_jvp`, which takes no other dataclass."""
        return self.count, self.is_sorted, self.is_unique

    @property
    def inside(self) -> jax.Array:
        """Which elements belong to a segment, bool `[n]`."""
        return indexing.in_range(self.ids, self.count)


def over_segments(
    call: str,
    data: Any,
    segment_ids: Any,
    num_segments: Any,
    indices_are_sorted: bool,
    f: Callable[..., Any],
    *arrays: jax.Array,
    out_sharding: Any = None,
    **options: Any,
) -> Any:
    """`f(array, segments, *arrays)` of `data`, or of each array of a SegmentTensor."""
    values, segments = split(
        call, data, segment_ids, num_segments, indices_are_sorted, **options
    )

    def one(path, x):
        if isinstance(x, SegmentTensor):
            name = jax.tree_util.keystr(path)
            raise ValueError(
                f"{call}: the values of the SegmentTensor hold another one at "
                f"values{name}. Reduce that one first: its reduction has one row for "
                "each element out here."
            )
        x = _as_data(call, x)
        if out_sharding is None:
            return f(x, segments, *arrays)

        # What types say of the layout is for the result alone; inside, XLA decides.
        def of_ids(x, ids, *arrays):
            return f(x, dataclasses.replace(segments, ids=ids), *arrays)

        auto: Any = jax.sharding.auto_axes(of_ids, out_sharding=out_sharding)
        return auto(x, segments.ids, *arrays)

    is_leaf = lambda x: isinstance(x, SegmentTensor)
    return jax.tree_util.tree_map_with_path(one, values, is_leaf=is_leaf)


def split(
    call: str,
    data: Any,
    segment_ids: Any,
    num_segments: Any,
    indices_are_sorted: bool,
    *,
    mode: Any = None,
    unique_indices: bool = False,
    name: str = "data",
) -> tuple[Any, Segments]:
    """The values, an array or a SegmentTensor's tree, and their segments; checked."""
    is_sorted, is_unique = bool(indices_are_sorted), bool(unique_indices)
    if isinstance(data, SegmentTensor):
        # Whatever the mode: its empty elements belong to no segment.
        given = {"segment_ids": segment_ids, "num_segments": num_segments}
        for other, value in given.items():
            if value is not None:
                raise ValueError(
                    f"{call}: {name} is a SegmentTensor, which brings its own "
                    f"segments, and {other} was passed as well. Leave it out, or pass "
                    f"{name}.values instead."
                )
        is_sorted |= data.is_sorted
        return data.values, Segments(
            data.segment_ids, data.num_segments, is_sorted, is_unique
        )
    data = _as_data(call, data)
    if segment_ids is None:
        raise ValueError(
            f"{call}: segment_ids are missing. Pass the segment of each element, or a "
            "SegmentTensor as data."
        )
    ids = _arguments.as_integers(call, segment_ids, "segment_ids")
    if ids.shape != data.shape[:1]:
        raise ValueError(
            f"{call}: segment_ids must have shape [n], one id for each of the n "
            f"elements along the first axis of {name}, got {ids.shape} for {name} of "
            f"shape {data.shape}."
        )
    count = _as_count(call, ids, num_segments)
    ids = _arguments.as_ids(call, ids, count, "segment_ids")
    mode = _as_mode(call, mode)
    if mode is lax.GatherScatterMode.CLIP:
        is_unique = False  # several may go to the last segment
        ids = jnp.clip(
            ids, _arguments.scalar(0, ids), _arguments.scalar(max(count - 1, 0), ids)
        )
    return data, Segments(ids, count, is_sorted, is_unique)


def _as_mode(call: str, mode: Any) -> Any:
    try:
        found = lax.GatherScatterMode.from_any(mode)
    except (TypeError, ValueError):
        found = lax.GatherScatterMode.ONE_HOT
    if found is lax.GatherScatterMode.ONE_HOT:
        raise ValueError(
            f"{call}: mode must be 'drop', 'clip' or None, got "
            f"{_arguments.show(mode)}. Ids out of range drop, or go to the first and "
            "the last segment."
        )
    return found


def _as_data(call: str, data: Any) -> jax.Array:
    try:
        data = jnp.asarray(data)
    except (TypeError, ValueError):
        raise TypeError(
            f"{call}: data must be an array or a SegmentTensor, got "
            f"{_arguments.kind_of(data)}. Map over the arrays of a tree with "
            "jax.tree.map, or make a SegmentTensor of it."
        ) from None
    if data.ndim == 0:
        raise ValueError(
            f"{call}: data must have at least one axis, the elements; got a scalar."
        )
    return data


def _as_count(call: str, ids: Any, num_segments: Any) -> int:
    """The number of segments: as given, else one more than the largest id."""
    if num_segments is None:
        if not _arguments.is_concrete(ids):
            raise ValueError(
                f"{call}: num_segments was left out, and inside jit, or under vmap "
                "over the ids, it cannot be found from their values "
                "(sparsejax.value_and_grad traces as jit does). Pass num_segments, a "
                "static int."
            )
        return max(int(np.asarray(ids).max()) + 1, 0) if ids.size else 0
    return _arguments.static_int(call, "num_segments", num_segments)


def as_floats(call: str, data: jax.Array) -> jax.Array:
    """`data` in the type its reduction is computed in: integers become float32."""
    if jnp.issubdtype(data.dtype, jnp.complexfloating):
        found, want = data.dtype, "real numbers"
        raise TypeError(
            _KIND.format(
                call=call, want=want, found=found, todo="Take .real and .imag apart."
            )
        )
    if jnp.issubdtype(data.dtype, jnp.floating):
        return data.astype(indexing.accumulator_dtype(data.dtype))
    return data.astype(jnp.float32)


def float_dtype(dtype: Any) -> Any:
    """The type of a mean of `dtype`: itself for floats, float32 for the rest."""
    return dtype if jnp.issubdtype(dtype, jnp.inexact) else jnp.dtype(jnp.float32)


def check_kind(call: str, data: jax.Array, is_bool: bool) -> None:
    """An error unless `data` are booleans, or are none."""
    if (data.dtype == jnp.bool_) != is_bool:
        want, todo = ("boolean", _WANT_BOOL) if is_bool else ("numbers", _WANT_NUMBER)
        raise TypeError(_KIND.format(call=call, want=want, found=data.dtype, todo=todo))


def as_weights(call: str, weights: Any, data: jax.Array) -> jax.Array:
    """`weights`, one for each element of `data`, as an array `[n]`."""
    weights = _arguments.to_array(call, weights, "weights")
    if weights.shape != data.shape[:1]:
        raise ValueError(
            f"{call}: weights must have shape [n], one for each element of data: "
            f"{data.shape[:1]}, got {weights.shape}."
        )
    if weights.dtype == jnp.bool_ or jnp.issubdtype(weights.dtype, jnp.complexfloating):
        raise TypeError(
            f"{call}: weights must be real numbers, integers or floats, got "
            f"{weights.dtype}. Cast them with .astype(jnp.float32)."
        )
    return weights


# ------------------------------------------------------------------ operations


def beside(x: jax.Array, ndim: int) -> jax.Array:
    """`x` with axes of length 1 after its own, `ndim` in all."""
    return x.reshape(x.shape + (1,) * (ndim - x.ndim))


def members_only(x: jax.Array, segments: Segments) -> jax.Array:
    """`x`, with zeros in the elements that belong to no segment."""
    return indexing.zero_unless(segments.inside, x)


def scatter(method: str, start: Any, x: jax.Array, segments: Segments) -> jax.Array:
    """Each segment's `start`, combined with its elements by `.at[].add`, `.max`, ..."""
    out = jnp.full((segments.count, *x.shape[1:]), start, x.dtype)
    return getattr(out.at[segments.ids], method)(
        x,
        mode="drop",
        wrap_negative_indices=False,
        indices_are_sorted=segments.is_sorted,
        unique_indices=segments.is_unique,
    )


def add_up(x: jax.Array, segments: Segments) -> jax.Array:
    """Sums of `x` in each segment, `[count, ...]`, in the type of `x`."""
    return scatter("add", 0, x, segments)


def count_elements(segments: Segments) -> jax.Array:
    """How many elements each segment has, int32 `[count]`."""
    return add_up(jnp.ones(segments.ids.shape, jnp.int32), segments)


def spread(rows: jax.Array, segments: Segments) -> jax.Array:
    """For each element its segment's row, zeros where it has none, `[n, ...]`."""
    if segments.count == 0:  # JAX gathers nothing from no rows, not even zeros
        return jnp.zeros((*segments.ids.shape, *rows.shape[1:]), rows.dtype)
    return rows.at[segments.ids].get(
        mode="fill",
        fill_value=0,
        wrap_negative_indices=False,
        indices_are_sorted=segments.is_sorted,
        unique_indices=segments.is_unique,
    )


def divide(total: jax.Array, by: jax.Array) -> jax.Array:
    """`total / by`, where `by` has one number a row; 0 where that is zero."""
    none = by == 0
    by = jnp.where(none, jnp.ones((), by.dtype), by).astype(total.dtype)
    return indexing.zero_unless(~none, over(total, beside(by, total.ndim)))


@jax.custom_jvp
def over(total: jax.Array, by: jax.Array) -> jax.Array:
    """`total / by`, where one number of `by` divides many of `total`.

    The derivative multiplies by the inverse. Left to XLA it is a division or a product,
    depending on what stands around it: an exported program, which is simplified in
    another order, then differs in the last bit.
    """
    return total / by


@over.defjvp
def _over_jvp(primals, tangents):
    (total, by), (total_dot, by_dot) = primals, tangents
    out, inverse = over(total, by), 1 / by
    return out, (total_dot - out * by_dot) * inverse


def as_empty(call: str, empty: Any, dtype: Any) -> jax.Array:
    """`empty` as a scalar of the result's type, or an error."""
    value = _arguments.to_array(call, empty, "empty", "a scalar")
    # Of two types promoted together the result's kind must win: no float in integers.
    kind = [k for k in _KINDS if jnp.issubdtype(indexing.promote(value, dtype), k)]
    if value.ndim or not jnp.issubdtype(dtype, kind[0]):
        found = _arguments.show(empty)
        raise TypeError(
            f"{call}: empty must be a scalar that the result's type, {dtype}, can "
            f"hold, got {found}."
        )
    return value.astype(dtype)


def fill(call: str, out: jax.Array, missing: jax.Array, empty: Any) -> jax.Array:
    """`out`, with `empty` in the rows that are `missing`."""
    return jnp.where(beside(missing, out.ndim), as_empty(call, empty, out.dtype), out)


def fill_empty(call: str, out: jax.Array, segments: Segments, empty: Any) -> jax.Array:
    """`out`, a row a segment, with `empty`, if any, for segments of no element."""
    if empty is None:
        return out
    return fill(call, out, count_elements(segments) == 0, empty)


def fill_others(call: str, out: jax.Array, segments: Segments, empty: Any) -> jax.Array:
    """`out`, a row an element, with `empty`, if any, for elements of no segment."""
    if empty is None:
        return out
    return fill(call, out, ~segments.inside, empty)
