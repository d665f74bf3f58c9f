"""Shared by all `segment_*` functions: Segments, arguments, and `segment_reduction`.

A file of this folder has functions `f(x, segments)` of one array; `Segments` holds the
segment of each element (first axis) of the array. The decorator `segment_reduction`
makes a public function of it: it adds the signature, the checks of arguments,
SegmentTensors and their trees of values, the dtype of the computation, `empty`, and the
docstring's Args and Raises.

Invariant: an element whose id is outside `[0, count)` belongs to no segment, and its
value may be anything, even NaN. A scatter drops it. Elementwise results that may be
differentiated are masked first (`Segments.mask`), since the gradient of a product with
a dropped element is `0 * NaN`.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparsejax import _arguments
from sparsejax._arguments import ArrayLike
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
        """Bool `[n]`: True for an element that belongs to a segment."""
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

    def in_units(
        self, x: jax.Array, least: int = 0, axes: Sequence[str] = ()
    ) -> tuple[jax.Array, jax.Array]:
        """Divides `x` by powers of two, so that its squares are normal numbers.

        `axes` are the mesh axes of devices that hold other elements of the segments.

        Returns:
          `x` in the unit of its segment, and the units `[count, ...]`: the power of two
          of the largest element, or of `least` if that is larger.
        """
        largest = self.scatter("max", least, jnp.abs(lax.stop_gradient(x)))
        largest = lax.pmax(largest, axes) if axes else largest
        unit = arithmetic.power_of_two(largest).astype(x.dtype)
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


# ------------------------------------------------------------------ public functions

# By kind, the accepted data for the docstring.
_DATA = {
    "any": "`[n, ...]`, any dtype",
    "bool": "bool `[n, ...]`",
    "number": "`[n, ...]`, numbers",
    "real": "`[n, ...]`, real numbers",
}

_ARGS = """Args:
  data: {data}; or a SegmentTensor, which has its own
    segments. Each array in its tree of values is reduced.
  segment_ids: integers `[n]`, the segment of each element along data's first axis, in
    any order. Elements whose id is outside `[0, num_segments)` belong to no segment.
  num_segments: int, static. By default the largest id + 1, or 0 without ids; required
    inside `jit`.
  indices_are_sorted: bool, a promise that ids never decrease.
{own}  empty: scalar, the result for {missing}.
    By default {empty}.
  unique_indices: bool, a promise that no two elements share a segment.
  bucket_size: accepted for compatibility with `jax.ops.segment_sum`, ignored.
  mode: as in `jax.ops.segment_sum`: with "clip", elements whose id is out of range go
    to the first or the last segment; otherwise they are dropped.
  out_sharding: the sharding of the result over a mesh of explicit axes
    (`AxisType.Explicit`); required there if `data` or ids are sharded.

"""

_RAISES = """Raises:
  TypeError: `data` is not an array or has another dtype, ids are not integers, or
    another argument is not of the described type.
  ValueError: shapes do not match, `num_segments` is missing inside `jit`, or ids are
    given together with a SegmentTensor, or are missing without one.

"""


class SegmentReduction(Protocol):
    """The signature of a `segment_*` function; some have `weights`, `k` or `eps`."""

    def __call__(
        self,
        data: ArrayLike | SegmentTensor,
        segment_ids: ArrayLike | None = None,
        num_segments: int | None = None,
        indices_are_sorted: bool = False,
        *,
        empty: ArrayLike | None = None,
        unique_indices: bool = False,
        bucket_size: int | None = None,
        mode: str | jax.lax.GatherScatterMode | None = None,
        out_sharding: jax.sharding.Sharding | jax.sharding.PartitionSpec | None = None,
        **own: Any,
    ) -> Any: ...


def segment_reduction(
    *, empty: str, kind: str = "any", per_element: bool = False, maps: bool = True
) -> Callable[[Callable[..., Any]], SegmentReduction]:
    """Makes `f(x, segments, **own)` a public function.

    Args:
      empty: the default of `empty`, for the docstring. A function that has a parameter
        of this name fills the gaps itself.
      kind: of the accepted data: "any", "bool", "number" or "real". Numbers are cast to
        the accumulator's dtype for `f`, real numbers to floats, and the result is cast
        back.
      per_element: True if `f` returns a result for each element, not each segment.
      maps: True if `f` is called for each array of a tree of values, not once.
    """

    def decorate(f: Callable[..., Any]) -> SegmentReduction:
        inner = inspect.signature(f)
        names = list(inner.parameters)[2:]

        @functools.wraps(f)
        def public(
            data,
            segment_ids=None,
            num_segments=None,
            indices_are_sorted=False,
            *,
            empty=None,
            unique_indices=False,
            bucket_size=None,
            mode=None,
            out_sharding=None,
            **own,
        ):
            del bucket_size
            args = data, segment_ids, num_segments, indices_are_sorted, unique_indices
            values, segments = check_arguments(*args, mode=mode)
            if "empty" in names:
                own["empty"] = empty
            weights = own.pop("weights", None) if "weights" in names else None
            if weights is not None:
                weights = {"weights": _arguments.to_array(weights, "weights")}

            def reduce(x: Any, segments: Segments, weights: Any) -> Any:
                x, dtype = _cast(x, kind)
                out = f(x, segments, **(weights or {}), **own)
                out = out if dtype is None else out.astype(dtype)
                if empty is None or "empty" in names:
                    return out
                gaps = ~segments.inside if per_element else segments.lengths() == 0
                return fill(out, gaps, empty)

            if out_sharding is not None:  # it constrains the result, not the inside
                auto: Any = jax.sharding.auto_axes
                reduce = auto(reduce, out_sharding=out_sharding)
            if not maps:
                return reduce(None, segments, weights)
            return _map_arrays(lambda x: reduce(x, segments, weights), values)

        signature = inspect.signature(SegmentReduction.__call__)
        common = list(signature.parameters.values())[1:-1]  # without self and own
        extra = [p for n, p in inner.parameters.items() if n in names]
        extra = [p.replace(kind=p.KEYWORD_ONLY) for p in extra if p.name != "empty"]
        any_public: Any = public
        any_public.__signature__ = signature.replace(
            parameters=[*common, *extra],
            return_annotation="Any" if maps else inner.return_annotation,
        )
        any_public.__doc__ = _docstring(f, kind, empty, per_element)
        return any_public

    return decorate


def _cast(x: Any, kind: str) -> tuple[Any, Any]:
    """Returns data for the mathematics, and the dtype of the result if it is cast."""
    if kind == "bool" and x.dtype != jnp.bool_:
        raise TypeError(
            f"data must be boolean, got {x.dtype}. Compare first, as in data != 0."
        )
    if kind == "number":
        check_numbers(x)
        return x.astype(indexing.accumulator_dtype(x.dtype)), x.dtype
    if kind == "real":
        if jnp.issubdtype(x.dtype, jnp.complexfloating):
            raise TypeError(
                f"data must be real, got {x.dtype}. Reduce .real and .imag separately."
            )
        dtype = indexing.float_dtype(x.dtype)
        return x.astype(indexing.accumulator_dtype(dtype)), dtype
    return x, None


def check_numbers(data: jax.Array) -> None:
    """Raises a TypeError if `data` is boolean."""
    if data.dtype == jnp.bool_:
        raise TypeError(
            "data must be numbers, got bool. Use segment_any, or .astype(jnp.int32)."
        )


def check_weights(weights: Any, shape: tuple[int, ...]) -> jax.Array:
    """Returns `weights`; raises unless they are real numbers of this shape."""
    if weights.shape != shape:
        raise ValueError(f"weights must have shape {shape}, got {weights.shape}.")
    if weights.dtype == jnp.bool_ or jnp.issubdtype(weights.dtype, jnp.complexfloating):
        raise TypeError(
            f"weights must be real, got {weights.dtype}. Cast by .astype(jnp.float32)."
        )
    return weights


def _docstring(f: Any, kind: str, empty: str, per_element: bool) -> str:
    """Returns the docstring of `f` with the sections that all functions share."""
    head, returns, details = inspect.cleandoc(f.__doc__ or "").partition("Returns:\n")
    head, _, own_args = head.partition("Args:\n")
    missing = "elements outside all segments" if per_element else "an empty segment"
    data, own_args = _DATA[kind], own_args.rstrip() and f"{own_args.rstrip()}\n"
    args = _ARGS.format(data=data, own=own_args, missing=missing, empty=empty)
    details, example, last = details.partition("Example:\n")
    return f"{head}{args}{returns}{details}{_RAISES}{example}{last}"


# ------------------------------------------------------------------ arguments


def _map_arrays(f: Callable[[jax.Array], Any], values: Any) -> Any:
    """Calls `f` for each array of the values of a SegmentTensor, or for the data."""

    def one(path, x):
        if elements.is_nested(x):
            raise ValueError(
                "The SegmentTensor contains another one at "
                f"values{jax.tree_util.keystr(path)}. Reduce the inner one first."
            )
        return f(jnp.asarray(x))

    return jax.tree_util.tree_map_with_path(one, values, is_leaf=elements.is_nested)


def check_arguments(
    data: Any,
    segment_ids: Any,
    num_segments: Any,
    indices_are_sorted: bool,
    unique_indices: bool = False,
    *,
    mode: Any = None,
    name: str = "data",
) -> tuple[Any, Segments]:
    """Returns the values, an array or a SegmentTensor's tree, and their segments.

    Errors call `data` by `name`.
    """
    is_sorted, is_unique = bool(indices_are_sorted), bool(unique_indices)
    if isinstance(data, SegmentTensor):
        # `mode` has no effect: empty elements of a SegmentTensor always drop.
        if not (segment_ids is None is num_segments):
            raise ValueError(
                f"{name} is a SegmentTensor, which has its own segments. Omit "
                f"segment_ids and num_segments, or pass {name}.values instead."
            )
        ids, is_sorted = data.segment_ids, is_sorted or data.is_sorted
        return data.values, Segments(ids, data.num_segments, is_sorted, is_unique)
    data = jnp.asarray(elements.as_array(data, name))
    if segment_ids is None:
        raise ValueError("segment_ids is missing. Pass it, or a SegmentTensor as data.")
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
            "num_segments is required inside jit, vmap or sparsejax.value_and_grad, "
            "where the ids are unknown. Pass num_segments, a static int."
        )
    ids = _arguments.as_ids(ids, count, "segment_ids")
    if lax.GatherScatterMode.from_any(mode) is lax.GatherScatterMode.CLIP:
        is_unique = False  # several elements may go to the last segment
        last = _arguments.scalar(max(count - 1, 0), ids)
        ids = jnp.clip(ids, _arguments.scalar(0, ids), last)
    return data, Segments(ids, count, is_sorted, is_unique)


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
            f"empty must be a scalar of {out.dtype}, got {_arguments.show(empty)}."
        )
    missing = indexing.append_axes(missing, out.ndim)
    return jnp.where(missing, value.astype(out.dtype), out)
