"""The numbers that cut an axis into segments: checked, and counted.

`conversions.py` says what lengths, offsets and segment ids are. Here, numbers that are
known are NumPy's int64, and those that are traced are JAX arrays; who asks for the one
or the other asks for `isinstance(x, np.ndarray)`.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sparsejax import _arguments
from sparsejax._rows import indexing


_ONE_AXIS = (
    "{call}: {name} must have one axis, [{axis}], got shape {found}. For a batch use "
    "jax.vmap."
)
_DECREASING = (
    "{call}: offsets must not decrease, got {found} after {before} at position {at}. "
    "They are 0, and then the cumulated lengths."
)
_UNSORTED = (
    "{call}: segment_ids must be sorted, got {found} after {before} at position {at}. "
    "{way_out}"
)


# ------------------------------------------------------------------ checks


def is_known(x: Any) -> bool:
    """Whether the numbers of `x` can be looked at, here and now."""
    return _arguments.is_concrete(x) and getattr(x, "is_fully_addressable", True)


def as_known(x: Any) -> Any:
    """`x`, NumPy's if it is known."""
    return np.asarray(x) if is_known(x) else x


def as_numbers(call: str, x: Any, name: str, axis: str) -> Any:
    """Integers `[axis]`: NumPy's int64 where they are known, else a JAX array."""
    x = _arguments.as_integers(call, x, name)
    if x.ndim != 1:
        raise ValueError(
            _ONE_AXIS.format(call=call, name=name, axis=axis, found=x.shape)
        )
    if is_known(x):
        return np.asarray(x).astype(np.int64)
    return x.astype(width(x))


def as_lengths(call: str, lengths: Any) -> Any:
    """Lengths as `as_numbers` gives them, checked where they are known."""
    lengths = as_numbers(call, lengths, "lengths", "K")
    if isinstance(lengths, np.ndarray) and lengths.min(initial=0) < 0:
        at = int(np.argmax(lengths < 0))
        raise ValueError(
            f"{call}: lengths must not be negative, got {lengths[at]} for segment "
            f"{at}. A segment without elements has length 0."
        )
    return lengths


def as_offsets(call: str, offsets: Any, *, from_zero: bool = True) -> Any:
    """Offsets as `as_numbers` gives them, checked where they are known."""
    offsets = as_numbers(call, offsets, "offsets", "K + 1")
    if offsets.shape[0] == 0:
        raise ValueError(
            f"{call}: offsets must have K + 1 entries for K segments, got none. They "
            "begin with 0, also where there is no segment."
        )
    if isinstance(offsets, np.ndarray):
        if from_zero and offsets[0] != 0:
            raise ValueError(
                f"{call}: offsets must begin with 0, got {offsets[0]}. They have K + 1 "
                "entries for K segments: 0, and then the cumulated lengths."
            )
        _check_ascending(call, offsets, _DECREASING)
    return offsets


def as_num_segments(call: str, num_segments: Any) -> int:
    """`num_segments` as an int, or an error that names `call`."""
    return _arguments.static_int(
        call, "num_segments", num_segments, not_an_int=TypeError
    )


def as_segment_ids(call: str, segment_ids: Any, num_segments: int) -> Any:
    """Segment ids `[n]`, NumPy's where they came so, `num_segments` if out of range."""
    ids = _arguments.as_integers(call, segment_ids, "segment_ids")
    if ids.ndim != 1:
        raise ValueError(
            _ONE_AXIS.format(call=call, name="segment_ids", axis="n", found=ids.shape)
        )
    dtype = _arguments.index_dtype(num_segments)
    if isinstance(ids, np.ndarray):
        none = (ids < 0) | (ids >= num_segments)
        return np.where(none, num_segments, ids.astype(np.int64)).astype(dtype)
    ids = _arguments.as_ids(call, ids, num_segments, "segment_ids")
    named = indexing.in_range(ids, num_segments)
    return jnp.where(named, ids, _arguments.scalar(num_segments, ids))


def check_sorted(call: str, ids: Any, way_out: str) -> None:
    """An error that names `call` if known ids decrease."""
    if is_known(ids):
        _check_ascending(call, np.asarray(ids), _UNSORTED, way_out=way_out)


def _check_ascending(call: str, x: np.ndarray, message: str, **more: str) -> None:
    wrong = x[1:] < x[:-1]
    if wrong.any():
        at = int(np.argmax(wrong)) + 1
        raise ValueError(
            message.format(call=call, found=x[at], before=x[at - 1], at=at, **more)
        )


def as_sizes(call: str, name: str, sizes: Any) -> tuple[int | None, ...]:
    """An int or one for each level, as a tuple of at least one."""
    if not isinstance(sizes, (tuple, list)):
        sizes = (sizes,)
    if not sizes:
        return (None,)
    hint = " Or give one int or None for each level of segments, outermost first."
    return tuple(
        x if x is None else _arguments.static_int(call, name, x, 0, hint, TypeError)
        for x in sizes
    )


def ids_and_number(call: str, ids: Any, num_segments: int | None) -> tuple[Any, int]:
    """Segment ids as `as_numbers` gives them, and their number if that is None."""
    ids = as_numbers(call, ids, "segment_ids", "n")
    known = isinstance(ids, np.ndarray)
    if num_segments is None:
        if not known:
            raise ValueError(
                f"{call}: inside jit the largest of segment_ids is not known, and the "
                "result needs a static size. Pass num_segments=."
            )
        return ids, int(ids.max(initial=-1)) + 1
    num_segments = as_num_segments(call, num_segments)
    # Wide ids would wrap where JAX indexes with 32 bits.
    return ids if known else _arguments.as_ids(call, ids, num_segments), num_segments


# ------------------------------------------------------------------ computing


def sum_of(lengths: Any) -> Any:
    """The sum of lengths; a Python int where they are known."""
    total = lengths.sum()
    return int(total) if isinstance(lengths, np.ndarray) else total


def count_ids(ids: Any, num_segments: int) -> jax.Array:
    """How many of ids `[n]` are 0, 1, ... `num_segments - 1`, int32."""
    if is_known(ids):
        ids = np.asarray(ids)
        ids = ids[(ids >= 0) & (ids < num_segments)]
        counts = np.bincount(ids, minlength=num_segments)
        return jnp.asarray(counts.astype(np.int32))
    counts = jnp.zeros((num_segments,), jnp.int32)
    return indexing.add_rows(counts, ids, jnp.ones(ids.shape, jnp.int32))


def stable_order(ids: Any) -> Any:
    """The places of ids `[n]` in ascending order, equal ones in theirs, int32."""
    if is_known(ids):
        return np.argsort(np.asarray(ids), kind="stable").astype(np.int32)
    return jnp.argsort(ids, stable=True).astype(jnp.int32)


def ids_of_lengths(lengths: Any, size: int) -> Any:
    """Segment ids `[size]` of lengths from `as_lengths`, K beyond the last segment.

    NumPy's, where the lengths are.
    """
    k = lengths.shape[0]
    dtype = _arguments.index_dtype(k)
    if isinstance(lengths, np.ndarray):
        ids = np.repeat(np.arange(k, dtype=dtype), lengths)
        return np.pad(ids, (0, size - ids.size), constant_values=k)
    # All that comes after a segment's end has an id higher by one.
    ends = jnp.cumsum(lengths, dtype=lengths.dtype)
    steps = indexing.add_rows(jnp.zeros((size,), dtype), ends, jnp.ones((k,), dtype))
    return jnp.cumsum(steps, dtype=dtype)


def width(x: Any) -> Any:
    """int32, or int64 for integers of 64 bits that JAX keeps."""
    wide = (
        _arguments.x64_enabled() and getattr(x, "dtype", np.dtype("int32")).itemsize > 4
    )
    return np.dtype(np.int64 if wide else np.int32)


def offsets_of(call: str, lengths: Any, dtype: Any) -> jax.Array:
    if isinstance(lengths, np.ndarray):
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        if offsets[-1] > np.iinfo(dtype).max:
            raise ValueError(
                f"{call}: the lengths sum to {offsets[-1]}, which an int32 cannot "
                "hold. Set jax_enable_x64, or cut the data."
            )
        return jnp.asarray(offsets.astype(dtype))
    ends = jnp.cumsum(lengths, dtype=dtype)
    return jnp.concatenate([jnp.zeros((1,), dtype), ends])
