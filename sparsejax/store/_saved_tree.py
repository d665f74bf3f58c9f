"""Trees that a store saves in one file with its tables.

Dense parameters, their optimizer state, the number of a step and the position of a
loader belong to the same moment as the tables. Arrays are members of the record; ints,
floats, bools and strings are in its header.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sparsejax import _arguments


# The schema of `describe`, for `_files.check_json`.
DESCRIPTION = [
    {
        "name": str,
        "shape?": [int],
        "dtype?": str,
        "stored?": {"shape": [int], "dtype": str},
        "value?": object,
    }
]
_PLAIN = bool, int, float, str


def describe(
    tree: Any, whole: Callable[[Any], Any]
) -> tuple[list[dict[str, Any]], list[np.ndarray]]:
    """Describes the leaves of a tree, ready for JSON, and returns its arrays.

    Keys of `jax.random.key` are stored as integers.

    Args:
      tree: of arrays, ints, floats, bools and strings.
      whole: returns an array of several processes as an array of this one.

    Raises:
      TypeError: a leaf is something else, or traced.
    """
    descriptions, arrays = [], []
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path)
        if isinstance(x, _PLAIN) and not isinstance(x, np.generic):
            descriptions.append({"name": name, "value": x})
            continue
        if not (isinstance(x, np.ndarray | np.generic) or _arguments.is_concrete(x)):
            raise TypeError(
                f"extra{name} must be an array, an int, a float, a bool or a string, "
                f"got {_arguments.kind_of(x)}."
            )
        whole_x = whole(x)
        array = np.asarray(jax.random.key_data(whole_x) if _is_key(x) else whole_x)
        stored = {"shape": list(array.shape), "dtype": array.dtype.name}
        descriptions.append({"name": name, **_spec(x), "stored": stored})
        arrays.append(array)
    return descriptions, arrays


def spec_of(path: Any, description: dict[str, Any]) -> tuple[tuple[int, ...], Any]:
    """Returns the shape and dtype of an array in a record.

    Raises:
      ValueError: there is no such dtype.
    """
    stored = description["stored"]
    try:
        dtype = np.dtype(stored["dtype"])
    except TypeError:
        dtype = np.dtype(object)
    if dtype.hasobject or not dtype.itemsize:
        raise ValueError(f"{path} is damaged: it has an array of {stored['dtype']!r}.")
    return tuple(stored["shape"]), dtype


def put(
    path: Any,
    like: Any,
    descriptions: Sequence[dict[str, Any]],
    contents: Sequence[np.ndarray],
) -> Any:
    """Reads a file's tree, and places each array where the array of `like` is.

    Args:
      path: for messages.
      like: a tree of the same structure, shapes and dtypes, or None for no tree.
      descriptions: from `describe`.
      contents: the arrays.

    Raises:
      ValueError: the file has another tree.
    """
    if like is None:
        return None
    paths, structure = jax.tree_util.tree_flatten_with_path(like)
    wanted = [(jax.tree_util.keystr(path), x) for path, x in paths]
    names = [name for name, _ in wanted]
    saved_names = [x["name"] for x in descriptions]
    if names != saved_names:
        raise ValueError(
            f"{path} was saved with extra={_show_names(saved_names)}, but the tree "
            f"here has {_show_names(names)}. Pass the tree that was saved, or None."
        )
    data, leaves = iter(contents), []
    value: Any
    for (name, x), there in zip(wanted, descriptions):
        if "stored" in there:
            spec = {"shape": there.get("shape"), "dtype": there.get("dtype")}
            is_same = hasattr(x, "dtype") and _spec(x) == spec
            value, shown = next(data), f"{spec['dtype']}{spec['shape']}"
        else:
            value = there.get("value")
            is_same, shown = type(x) is type(value), repr(value)
        if not is_same:
            raise ValueError(
                f"extra{name} is {_arguments.kind_of(x)} here, but {shown} in {path}. "
                "Pass a tree with the shapes and dtypes that were saved."
            )
        leaves.append(_like(x, value) if "stored" in there else value)
    return structure.unflatten(leaves)


def _like(x: Any, value: np.ndarray) -> Any:
    """Places an array of the shape and dtype of `x` where `x` is."""
    if _is_key(x):
        is_array = isinstance(x, jax.Array)
        impl = jax.random.key_impl(x) if is_array else str(x.dtype)[4:-1]
        return jax.random.wrap_key_data(jnp.asarray(value), impl=impl)
    if isinstance(x, np.generic):
        return value[()]
    if isinstance(x, np.ndarray):
        return value
    if not isinstance(x, jax.Array) or not x.committed:
        return jnp.asarray(value)
    return jax.make_array_from_callback(x.shape, x.sharding, lambda index: value[index])


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _spec(x: Any) -> dict[str, Any]:
    return {"shape": list(x.shape), "dtype": str(x.dtype)}


def _show_names(names: Sequence[str]) -> str:
    shown = ", ".join(names[:5]) or "no leaves"
    return f"{shown}, ... ({len(names)} leaves)" if len(names) > 5 else shown
