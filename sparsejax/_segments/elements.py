"""The values of a SegmentTensor: a pytree whose arrays share their first axis.

That axis is the elements. A leaf is an array `[n, ...]` or, for nested segments, a
SegmentTensor of n segments, each of which is one element. A list is an array, never a
node of the tree.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sparsejax import _arguments
from sparsejax._rows import indexing


def is_nested(x: Any) -> bool:
    """Returns True for a SegmentTensor, whose class imports this module."""
    return hasattr(x, "segment_ids") and hasattr(x, "num_segments")


def is_leaf(x: Any) -> bool:
    """Returns True for a leaf: a SegmentTensor, or a list, which is an array."""
    return is_nested(x) or isinstance(x, list)


def leaves_with_path(values: Any) -> list[tuple[Any, Any]]:
    """Returns `(path, leaf)` of all leaves."""
    return jax.tree_util.tree_leaves_with_path(values, is_leaf=is_leaf)


def map_leaves(array: Callable, nested: Callable, values: Any) -> Any:
    """Maps `array` over the arrays of `values`, and `nested` over SegmentTensors."""
    return jax.tree.map(
        lambda x: nested(x) if is_nested(x) else array(x), values, is_leaf=is_leaf
    )


# ------------------------------------------------------------------ checks


def as_elements(values: Any) -> Any:
    """Returns `values` with JAX or NumPy arrays as leaves."""

    def as_leaf(path, x):
        name = f"values{jax.tree_util.keystr(path)}"
        return x if is_nested(x) else as_array(x, name)

    return jax.tree_util.tree_map_with_path(as_leaf, values, is_leaf=is_leaf)


def as_array(x: Any, name: str) -> jax.Array | np.ndarray:
    """Returns `x` as a JAX or NumPy array with at least one axis, or raises."""
    array: Any = x
    if not _arguments.is_array(x):
        try:
            array = jnp.asarray(x)
        except OverflowError:  # a list with an int that does not fit in 32 bits
            array = np.asarray(x)
        except (TypeError, ValueError):
            array = np.array(None)
    if array.dtype == object:  # strings, or integers of over 64 bits
        raise TypeError(
            f"{name} must be an array of numbers, got {_arguments.kind_of(x)}. For "
            "lists use SegmentTensor.from_lists, for a tree SegmentTensor."
        )
    if array.ndim == 0:
        raise ValueError(
            f"{name} must have at least one axis (elements or segments), got a scalar."
        )
    return narrow(array, name)


def narrow(x: Any, name: str) -> Any:
    """Casts NumPy integers to JAX's dtype, or raises if they would wrap."""
    if not isinstance(x, np.ndarray) or x.dtype.kind not in "iu":
        return x
    dtype = jax.dtypes.canonicalize_dtype(x.dtype)
    limits = jnp.iinfo(dtype)
    if dtype != x.dtype and x.size:
        low, high = x.min(), x.max()
        if low < limits.min or high > limits.max:
            raise ValueError(
                f"{name} must fit in {dtype}, got integers from {low} to {high}. Set "
                "jax_enable_x64, or map or hash them to 32 bits first."
            )
    return x.astype(dtype, copy=False)


def check_count(values: Any, expected: Any = None, other: str = "") -> int:
    """Returns the number of elements; raises unless all leaves have as many."""
    for path, x in leaves_with_path(values):
        shape = getattr(x, "shape", ())
        count = x.num_segments if is_nested(x) else shape[0] if shape else "a scalar"
        name = jax.tree_util.keystr(path)
        if expected is None:
            expected, other = count, f"values{name}"
        if count != expected:
            raise ValueError(
                f"values{name} must have as many elements (of a SegmentTensor: "
                f"segments) as {other}, {expected}, got {count}."
            )
    if expected is None:
        raise ValueError(
            "values must be an array [n, ...] or a pytree of such arrays, got no array."
        )
    return expected


def check_fits(values: Any, need: Any, n: int, capacity: int) -> None:
    """Raises if `need` elements exceed `capacity`, or may, and NaN cannot report it.

    Args:
      need: an int, or traced and at most n.
    """
    if isinstance(need, int):
        if need > capacity:
            raise ValueError(
                f"{need} elements do not fit in capacity={capacity}. Pass "
                f"capacity={need} or more, or omit it."
            )
    elif _arguments.may_exceed(n, capacity) and not any(
        map(_has_nan, jax.tree.leaves(values))
    ):
        raise ValueError(
            f"capacity={capacity} may be too small, and inside jit integers cannot "
            f"become NaN to report it. Pass capacity={n} or more, or omit it."
        )


def nan_unless(ok: Any, values: Any) -> Any:
    """Sets all floats of `values` to NaN if the traced `ok` is false."""
    mark = lambda x: jnp.where(ok, x, jnp.array(jnp.nan, x.dtype))
    return jax.tree.map(lambda x: mark(x) if _has_nan(x) else x, values)


def _has_nan(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


# ------------------------------------------------------------------ moving elements


def resize(values: Any, n: int) -> Any:
    """Cuts `values` to n elements, or pads with zeros or empty segments."""

    def resize_array(x):
        if x.shape[0] >= n:
            return x[:n]
        xp = np if isinstance(x, np.ndarray) else jnp
        more = xp.zeros((n - x.shape[0], *x.shape[1:]), x.dtype)
        return xp.concatenate([x, more])

    return map_leaves(resize_array, lambda x: x._resize_segments(n), values)


def take(values: Any, order: Any) -> Any:
    """Permutes the elements by `order`."""
    take_array = lambda x: indexing.take_rows(x, jnp.asarray(order))
    return map_leaves(take_array, lambda x: x._take_segments(order), values)
