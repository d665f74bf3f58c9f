"""`segment_reduction`: makes a public `segment_*` function of its mathematics.

A file of this folder has functions `f(x, segments)` of one array. The decorator adds
the rest: the signature, the checks of arguments, SegmentTensors and their trees of
values, the dtype of the computation, `empty`, and the docstring's Args and Raises.
Functions with arguments of their own (weights, k, eps) are written out.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Protocol

import jax

from sparsejax._arguments import ArrayLike
from sparsejax._rows import indexing
from sparsejax._segments import SegmentTensor
from sparsejax._segments.reduce.segments import (
    Segments,
    as_floats,
    check_booleans,
    check_numbers,
    fill_empty,
    fill_outside,
    over_segments,
)


Mathematics = Callable[[jax.Array, Segments], jax.Array]

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
  segment_ids: integers `[n]`, the segment of each element along data's first axis.
    Elements whose id is outside `[0, num_segments)` belong to no segment.
  num_segments: int, static. By default the largest id + 1, or 0 without ids; required
    inside `jit`.
  indices_are_sorted: bool, a promise that ids never decrease.
  empty: scalar, the result for {missing}.
    By default {empty}.
"""

_JAX_ARGS = """  unique_indices: bool, a promise that no two elements share a segment.
  bucket_size: accepted for compatibility with `jax.ops.{name}`, ignored.
  mode: as in `jax.ops.{name}`: with "clip", elements whose id is out of range go
    to the first or the last segment; otherwise they are dropped.
  out_sharding: the sharding of the result over a mesh of explicit axes
    (`AxisType.Explicit`); required there if `data` or ids are sharded.
"""

_RAISES = """Raises:
  TypeError: `data` is not an array or has another dtype, ids are not integers,
    `num_segments` is not an int, or `empty` is not a scalar of the result's kind.
  ValueError: shapes do not match, `num_segments` is missing inside `jit`, or ids are
    given together with a SegmentTensor, or are missing without one.

"""


class SegmentReduction(Protocol):
    """The signature of a `segment_*` function."""

    def __call__(
        self,
        data: ArrayLike | SegmentTensor,
        segment_ids: ArrayLike | None = None,
        num_segments: int | None = None,
        indices_are_sorted: bool = False,
        *,
        empty: ArrayLike | None = None,
    ) -> Any: ...


class JaxSegmentReduction(Protocol):
    """The signature of a `segment_*` function with a namesake in `jax.ops`."""

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
    ) -> Any: ...


def segment_reduction(
    *, kind: str, empty: str, per_element: bool = False
) -> Callable[[Mathematics], SegmentReduction]:
    """Makes `f(x, segments)` a public function.

    Args:
      kind: of the accepted data: "any", "bool", "number" or "real". Numbers are cast to
        the accumulator's dtype for `f`, real numbers to floats, and the result is cast
        back.
      empty: the default of `empty`, for the docstring.
      per_element: whether `f` returns a result for each element, not for each segment.
    """

    def decorate(f: Mathematics) -> SegmentReduction:
        reduce = _checked(f, kind, per_element)

        def public(
            data,
            segment_ids=None,
            num_segments=None,
            indices_are_sorted=False,
            *,
            empty=None,
        ):
            return reduce(data, segment_ids, num_segments, indices_are_sorted, empty)

        return _named(public, f, SegmentReduction, _args(kind, empty, per_element))

    return decorate


def jax_segment_reduction(
    *, kind: str, empty: str
) -> Callable[[Mathematics], JaxSegmentReduction]:
    """`segment_reduction`, with all arguments of the namesake in `jax.ops`."""

    def decorate(f: Mathematics) -> JaxSegmentReduction:
        reduce = _checked(f, kind, per_element=False)

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
        ):
            del bucket_size
            return reduce(
                data,
                segment_ids,
                num_segments,
                indices_are_sorted,
                empty,
                mode=mode,
                unique_indices=unique_indices,
                out_sharding=out_sharding,
            )

        args = _args(kind, empty, False) + _JAX_ARGS.format(name=f.__name__)
        return _named(public, f, JaxSegmentReduction, args)

    return decorate


def _checked(f: Mathematics, kind: str, per_element: bool) -> Callable[..., Any]:
    """Returns `f` of checked arguments, cast and filled."""
    fill = fill_outside if per_element else fill_empty

    def reduce(data, segment_ids, num_segments, indices_are_sorted, empty, **options):
        def one(x: jax.Array, segments: Segments) -> jax.Array:
            if kind == "bool":
                check_booleans(x)
                out = f(x, segments)
            elif kind == "number":
                check_numbers(x)
                out = f(x.astype(indexing.accumulator_dtype(x.dtype)), segments)
                out = out.astype(x.dtype)
            elif kind == "real":
                out = f(as_floats(x), segments)
                out = out.astype(indexing.float_dtype(x.dtype))
            else:
                out = f(x, segments)
            return fill(out, segments, empty)

        return over_segments(
            data, segment_ids, num_segments, indices_are_sorted, one, **options
        )

    return reduce


def _args(kind: str, empty: str, per_element: bool) -> str:
    missing = "elements outside all segments" if per_element else "an empty segment"
    return _ARGS.format(data=_DATA[kind], missing=missing, empty=empty)


def _named(public: Any, f: Mathematics, protocol: Any, args: str) -> Any:
    """Gives `public` the name, source, signature and docstring for `help()`."""
    public.__module__, public.__name__ = f.__module__, f.__name__
    public.__qualname__, public.__wrapped__ = f.__qualname__, f
    signature = inspect.signature(protocol.__call__)
    own = list(signature.parameters.values())[1:]  # without self
    public.__signature__ = signature.replace(parameters=own)
    doc = inspect.cleandoc(f.__doc__ or "")
    head, returns, rest = doc.partition("Returns:\n")
    rest, example, last = rest.partition("Example:\n")
    public.__doc__ = f"{head}{args}\n{returns}{rest}{_RAISES}{example}{last}"
    return public
