"""The values of a SegmentTensor: a pytree whose arrays share their first axis.

That axis is the elements. A leaf is an array `[n, ...]`, or a SegmentTensor of n
segments, each of which is one element: so segments nest. A list is read as an array,
never as a node of the tree.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sparsejax import _arguments
from sparsejax._rows import indexing


_NOT_AN_ARRAY = (
    "{call}: {name} must be an array of numbers, got {found}. Lists of unequal lengths "
    "go to SegmentTensor.from_lists."
)
OVERFLOW = (
    "{call}: {need} elements do not fit into capacity={capacity}. Give at least "
    "{need}, or leave capacity out."
)


def is_nested(x: Any) -> bool:
    """Whether `x` is a SegmentTensor. Its type is defined on top of this module."""
    return hasattr(x, "segment_ids") and hasattr(x, "num_segments")


def is_leaf(x: Any) -> bool:
    """Whether `x` is one leaf: a SegmentTensor, or a list that is read as an array."""
    return is_nested(x) or isinstance(x, list)


def leaves_with_path(values: Any) -> list[tuple[Any, Any]]:
    """`(path, leaf)` of all leaves."""
    return jax.tree_util.tree_leaves_with_path(values, is_leaf=is_leaf)


def map_leaves(array: Callable, nested: Callable, values: Any) -> Any:
    """`values` with `array` of each array, and `nested` of each SegmentTensor."""
    return jax.tree.map(
        lambda x: nested(x) if is_nested(x) else array(x), values, is_leaf=is_leaf
    )


# ------------------------------------------------------------------ checks


def as_elements(call: str, values: Any) -> Any:
    """`values` with arrays for leaves: JAX's, or NumPy's where they came as such."""

    def as_leaf(path, x):
        name = f"values{jax.tree_util.keystr(path)}"
        return x if is_nested(x) else as_array(call, x, name)

    return jax.tree_util.tree_map_with_path(as_leaf, values, is_leaf=is_leaf)


def as_array(call: str, x: Any, name: str) -> Any:
    """One array with at least one axis, JAX's or NumPy's."""
    if not isinstance(x, (jax.Array, np.ndarray)):
        try:
            x = jnp.asarray(x)
        except OverflowError:  # a list with an int that 32 bits cannot hold
            x = np.asarray(x)
        except (TypeError, ValueError):
            found = _arguments.kind_of(x)
            raise TypeError(
                _NOT_AN_ARRAY.format(call=call, name=name, found=found)
            ) from None
    if x.dtype == object:  # strings, or integers of more than 64 bits
        found = "an array of Python objects"
        raise TypeError(_NOT_AN_ARRAY.format(call=call, name=name, found=found))
    if x.ndim == 0:
        raise ValueError(
            f"{call}: {name} must have at least one axis, that of the elements or "
            "segments; got a scalar."
        )
    return narrow(call, x, name)


def narrow(call: str, x: Any, name: str) -> Any:
    """NumPy's integers in a type that JAX keeps, or an error: JAX would wrap them."""
    if not isinstance(x, np.ndarray) or x.dtype.kind not in "iu":
        return x
    dtype = jax.dtypes.canonicalize_dtype(x.dtype)
    limits = jnp.iinfo(dtype)
    if dtype != x.dtype and x.size:
        low, high = x.min(), x.max()
        if low < limits.min or high > limits.max:
            raise ValueError(
                f"{call}: {name} must be within {dtype}, got integers from {low} to "
                f"{high}. Set jax_enable_x64, or map the values to smaller ones."
            )
    return x.astype(dtype, copy=False)


def check_count(call: str, values: Any, want: Any = None, other: str = "") -> int:
    """The number of elements, which is `want` unless that is None, or an error."""
    for path, x in leaves_with_path(values):
        shape = getattr(x, "shape", ())
        found = x.num_segments if is_nested(x) else shape[0] if shape else "a scalar"
        name = jax.tree_util.keystr(path)
        if want is None:
            want, other = found, f"values{name}"
        if found != want:
            raise ValueError(
                f"{call}: values{name} must have as many elements as {other}, {want}, "
                f"got {found}. All share their first axis; a SegmentTensor counts by "
                "its segments."
            )
    if want is None:
        raise ValueError(
            f"{call}: values hold no array, so it is not known how many elements there "
            "are. Give an array [n, ...], or a pytree of such arrays."
        )
    return want


def check_capacity(call: str, values: Any, need: Any, n: int, capacity: int) -> None:
    """An error if `need` of n elements exceed `capacity`, or may do so unseen."""
    if isinstance(need, int):
        if need > capacity:
            raise ValueError(OVERFLOW.format(call=call, need=need, capacity=capacity))
    elif capacity < n and not any(map(_has_nan, jax.tree.leaves(values))):
        raise ValueError(
            f"{call}: capacity={capacity} may be too small for {n} elements, and "
            f"inside jit integers have no NaN to report it with. Give at least {n}, or "
            "leave capacity out."
        )


def nan_unless(ok: Any, values: Any) -> Any:
    """`values`, all floats among them NaN where the traced `ok` turns out false."""
    mark = lambda x: jnp.where(ok, x, jnp.array(jnp.nan, x.dtype))
    return jax.tree.map(lambda x: mark(x) if _has_nan(x) else x, values)


def _has_nan(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


# ------------------------------------------------------------------ moving elements


def resize(values: Any, n: int) -> Any:
    """`values` with n elements: zeros, or empty segments, added, or the last cut."""

    def resize_array(x):
        if x.shape[0] >= n:
            return x[:n]
        xp = np if isinstance(x, np.ndarray) else jnp
        more = xp.zeros((n - x.shape[0], *x.shape[1:]), x.dtype)
        return xp.concatenate([x, more])

    return map_leaves(resize_array, lambda x: x._resize_segments(n), values)


def take(values: Any, order: Any) -> Any:
    """The elements `order`, a permutation."""
    take_array = lambda x: indexing.take_rows(x, jnp.asarray(order))
    return map_leaves(take_array, lambda x: x._take_segments(order), values)
