"""Shared by all `segment_*` functions: Segments, arguments and empty segments.

The core of a `segment_*` function is a function `f(array, segments)`; `Segments` holds
the segment of each element (first axis) of the array. `over_segments` checks the user's
arguments once and calls `f` for the array, or for each array of a SegmentTensor.

Invariant: an element whose id is outside `[0, count)` belongs to no segment, and its
value may be anything, even NaN. A scatter drops it. Elementwise results that may be
differentiated are masked first (`Segments.mask`), since the gradient of a product with
a dropped element is `0 * NaN`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparsejax import _arguments
from sparsejax._rows import arithmetic, indexing
from sparsejax._segments import SegmentTensor, elements


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Segments:
    """The segment of each element; a pytree, whose only leaf is `ids`.

    Args:
      ids: signed integer `[n]`; an element whose id is outside `[0, count)` belongs to
        no segment.
      count: the number of segments.
      is_sorted: a promise that `ids` never decrease, including ids out of range.
      is_unique: a promise that no two elements share a segment.
    """

    ids: jax.Array
    count: int = dataclasses.field(metadata={"static": True})
    is_sorted: bool = dataclasses.field(default=False, metadata={"static": True})
    is_unique: bool = dataclasses.field(default=False, metadata={"static": True})

    @property
    def inside(self) -> jax.Array:
        """Bool `[n]`: whether each element belongs to a segment."""
        return indexing.in_range(self.ids, self.count)

    def mask(self, x: jax.Array) -> jax.Array:
        """Returns `x` with zeros for elements outside all segments."""
        return indexing.zero_unless(self.inside, x)

    def scatter(self, method: str, start: Any, x: jax.Array) -> jax.Array:
        """Combines `start` with each segment's elements by `.at[].add`, `.max`, ..."""
        if self.count == 0:  # JAX cannot differentiate a scatter to an empty axis
            return x[:0]
        out = jnp.full((self.count, *x.shape[1:]), start, x.dtype)
        return getattr(out.at[self.ids], method)(
            x,
            mode="drop",
            wrap_negative_indices=False,
            indices_are_sorted=self.is_sorted,
            unique_indices=self.is_unique,
        )

    def sum(self, x: jax.Array) -> jax.Array:
        """Returns the sums of `x` in each segment, `[count, ...]`, of equal dtype."""
        return self.scatter("add", 0, x)

    def in_units(self, x: jax.Array, least: int = 0) -> tuple[jax.Array, jax.Array]:
        """Divides `x` by powers of two, so that its squares are normal numbers.

        Returns:
          `x` in the unit of its segment, and the units `[count, ...]`: the power of two
          of the largest element, or of `least` if that is larger.
        """
        largest = self.scatter("max", least, jnp.abs(lax.stop_gradient(x)))
        unit = arithmetic.power_of_two(largest)
        each = self.broadcast(unit)  # zeros outside
        return x / jnp.where(each == 0, jnp.ones((), x.dtype), each), unit

    def lengths(self) -> jax.Array:
        """Returns the number of elements in each segment, int32 `[count]`."""
        return self.sum(jnp.ones(self.ids.shape, jnp.int32))

    def broadcast(self, rows: jax.Array) -> jax.Array:
        """Returns the row of each element's segment, `[n, ...]`, zeros outside."""
        if self.count == 0:  # JAX cannot gather from an empty axis
            return jnp.zeros((*self.ids.shape, *rows.shape[1:]), rows.dtype)
        return rows.at[self.ids].get(
            mode="fill",
            fill_value=0,
            wrap_negative_indices=False,
            indices_are_sorted=self.is_sorted,
            unique_indices=self.is_unique,
        )


# ------------------------------------------------------------------ arguments


def over_segments(
    data: Any,
    segment_ids: Any,
    num_segments: Any,
    indices_are_sorted: bool,
    f: Callable[..., Any],
    *arrays: jax.Array,
    out_sharding: Any = None,
    **options: Any,
) -> Any:
    """Calls `f(array, segments, *arrays)` for `data` or each array of its values."""
    values, segments = check_arguments(
        data, segment_ids, num_segments, indices_are_sorted, **options
    )

    def one(path, x):
        if elements.is_nested(x):
            raise ValueError(
                "the values of the SegmentTensor contain another SegmentTensor at "
                f"values{jax.tree_util.keystr(path)}. Reduce the inner one first: the "
                "result has one row per element of the outer one."
            )
        x = _as_data(x)
        if out_sharding is None:
            return f(x, segments, *arrays)

        # Sharding types constrain the result only. XLA shards the inside.
        auto: Any = jax.sharding.auto_axes(f, out_sharding=out_sharding)
        return auto(x, segments, *arrays)

    return jax.tree_util.tree_map_with_path(one, values, is_leaf=elements.is_nested)


def check_arguments(
    data: Any,
    segment_ids: Any,
    num_segments: Any,
    indices_are_sorted: bool,
    *,
    mode: Any = None,
    unique_indices: bool = False,
    name: str = "data",
) -> tuple[Any, Segments]:
    """Returns the values, an array or a SegmentTensor's tree, and their segments.

    Errors call `data` by `name`.
    """
    is_sorted, is_unique = bool(indices_are_sorted), bool(unique_indices)
    if isinstance(data, SegmentTensor):
        # `mode` has no effect: empty elements of a SegmentTensor always drop.
        given = {"segment_ids": segment_ids, "num_segments": num_segments}
        for other, value in given.items():
            if value is not None:
                raise ValueError(
                    f"{name} is a SegmentTensor, which has its own segments. Omit "
                    f"{other}, or pass {name}.values instead."
                )
        is_sorted |= data.is_sorted
        return data.values, Segments(
            data.segment_ids, data.num_segments, is_sorted, is_unique
        )
    data = _as_data(data)
    if segment_ids is None:
        raise ValueError(
            "segment_ids is missing. Pass the segment id of each element, or a "
            "SegmentTensor as data."
        )
    ids = _arguments.as_integers(segment_ids, "segment_ids")
    if ids.shape != data.shape[:1]:
        raise ValueError(
            "segment_ids must have shape [n], one id per element along the first axis "
            f"of {name}, got {ids.shape} for {name} of shape {data.shape}."
        )
    if num_segments is not None:
        count = _arguments.static_int("num_segments", num_segments)
    elif _arguments.is_concrete(ids):
        count = max(int(np.asarray(ids).max()) + 1, 0) if ids.size else 0
    else:
        raise ValueError(
            "num_segments is required inside jit or sparsejax.value_and_grad, and "
            "under vmap over the ids, where their values are unknown. Pass "
            "num_segments, a static int."
        )
    ids = _arguments.as_ids(ids, count, "segment_ids")
    try:
        found = lax.GatherScatterMode.from_any(mode)
    except (TypeError, ValueError):
        found = lax.GatherScatterMode.ONE_HOT
    if found is lax.GatherScatterMode.ONE_HOT:
        raise ValueError(
            f"mode must be 'drop', 'clip' or None, got {_arguments.show(mode)}. With "
            "'clip', elements whose id is out of range go to the first or last "
            "segment; otherwise they are dropped."
        )
    if found is lax.GatherScatterMode.CLIP:
        is_unique = False  # several elements may go to the last segment
        ids = jnp.clip(
            ids, _arguments.scalar(0, ids), _arguments.scalar(max(count - 1, 0), ids)
        )
    return data, Segments(ids, count, is_sorted, is_unique)


def _as_data(data: Any) -> jax.Array:
    try:
        data = jnp.asarray(data)
    except (OverflowError, TypeError, ValueError):
        raise TypeError(
            "data must be an array or a SegmentTensor, got "
            f"{_arguments.kind_of(data)}. For a tree of arrays, use jax.tree.map or "
            "make a SegmentTensor of it."
        ) from None
    if data.ndim == 0:
        raise ValueError(
            "data must have at least one axis (the elements), got a scalar."
        )
    return data


def check_booleans(data: jax.Array) -> None:
    """Raises a TypeError unless `data` is boolean."""
    if data.dtype != jnp.bool_:
        raise TypeError(
            f"data must be boolean, got {data.dtype}. Compare first, as in data != 0."
        )


def check_numbers(data: jax.Array) -> None:
    """Raises a TypeError if `data` is boolean."""
    if data.dtype == jnp.bool_:
        raise TypeError(
            "data must be numbers, got bool. Cast it with .astype(jnp.int32), or use "
            "segment_any or segment_all."
        )


def as_floats(data: jax.Array) -> jax.Array:
    """Returns `data` in the dtype of the computation; integers become float32."""
    if jnp.issubdtype(data.dtype, jnp.complexfloating):
        raise TypeError(
            f"data must be real numbers, got {data.dtype}. Reduce .real and .imag "
            "separately."
        )
    return data.astype(indexing.float_accumulator_dtype(data.dtype))


# ------------------------------------------------------------------ empty segments


def fill(out: jax.Array, missing: jax.Array, empty: Any) -> jax.Array:
    """Returns `out` with the scalar `empty` in the rows that are `missing`."""
    value = _arguments.to_array(empty, "empty", "a scalar")
    # `empty` must not change the kind of the result: no float in integers.
    kinds = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)
    promoted = indexing.promote(value, out.dtype)
    kind = next(kind for kind in kinds if jnp.issubdtype(promoted, kind))
    if value.ndim or not jnp.issubdtype(out.dtype, kind):
        raise TypeError(
            "empty must be a scalar that can be cast to the dtype of the result, "
            f"{out.dtype}, got {_arguments.show(empty)}."
        )
    missing = indexing.append_axes(missing, out.ndim)
    return jnp.where(missing, value.astype(out.dtype), out)


def fill_empty(out: jax.Array, segments: Segments, empty: Any) -> jax.Array:
    """Fills rows of empty segments with `empty`, if given."""
    if empty is None:
        return out
    return fill(out, segments.lengths() == 0, empty)


def fill_outside(out: jax.Array, segments: Segments, empty: Any) -> jax.Array:
    """Fills rows of elements outside all segments with `empty`, if given."""
    if empty is None:
        return out
    return fill(out, ~segments.inside, empty)
