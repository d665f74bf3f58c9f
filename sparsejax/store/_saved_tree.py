"""Trees that a store saves in one file with its tables.

Dense parameters, their optimizer state, the number of a step and the position of a
loader belong to the same moment as the tables. Arrays are members of the record; ints,
floats, bools and strings are in its header.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sparsejax import _arguments


# The schema of `describe`, for `_format.check_json`.
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


class Leaf(NamedTuple):
    """A leaf of a tree that is saved.

    Args:
      name: its path in the tree.
      value: a NumPy array, or an int, float, bool or string.
      shape, dtype: of the array in the tree; its keys of `jax.random.key` are saved as
        integers.
    """

    name: str
    value: Any
    shape: tuple[int, ...] = ()
    dtype: str = ""

    @property
    def is_array(self) -> bool:
        """True for an array, False for a Python value."""
        return bool(self.dtype)


def leaves_of(tree: Any, whole: Callable[[Any], Any]) -> list[Leaf]:
    """Returns the leaves of a tree, to be saved.

    Args:
      tree: of arrays, ints, floats, bools and strings.
      whole: returns an array of several processes as an array of this one.

    Raises:
      TypeError: a leaf is something else, or traced.
    """
    leaves = []
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path)
        if isinstance(x, _PLAIN) and not isinstance(x, np.generic):
            leaves.append(Leaf(name, x))
            continue
        if not (isinstance(x, np.ndarray | np.generic) or _arguments.is_concrete(x)):
            raise TypeError(
                f"extra{name} must be an array, an int, a float, a bool or a string, "
                f"got {_arguments.kind_of(x)}."
            )
        leaves.append(Leaf(name, np.asarray(_data(whole(x))), *_spec(x)))
    return leaves


def describe(leaves: Sequence[Leaf]) -> list[dict[str, Any]]:
    """Describes the leaves for the header of a file, ready for JSON."""

    def one(leaf):
        if not leaf.is_array:
            return {"name": leaf.name, "value": leaf.value}
        stored = {"shape": list(leaf.value.shape), "dtype": leaf.value.dtype.name}
        spec = {"shape": list(leaf.shape), "dtype": leaf.dtype, "stored": stored}
        return {"name": leaf.name} | spec

    return [one(leaf) for leaf in leaves]


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
    for (name, x), there in zip(wanted, descriptions):
        is_array, value = "stored" in there, there.get("value")
        if is_array:
            spec = tuple(there.get("shape", ())), there.get("dtype", "")
            is_same = hasattr(x, "dtype") and _spec(x) == spec
            shown = f"{spec[1]}{list(spec[0])}"
        else:
            is_same, shown = type(x) is type(value), repr(value)
        if not is_same:
            here = _arguments.kind_of(x)
            raise ValueError(
                f"extra{name} is {here} here, but {shown} in {path}. Pass a "
                "tree with the shapes and dtypes that were saved."
            )
        leaves.append(_like(x, next(data)) if is_array else value)
    return structure.unflatten(leaves)


def _like(x: Any, content: np.ndarray) -> Any:
    """Places an array of the shape and dtype of `x` where `x` is."""
    if _is_key(x):
        return jax.random.wrap_key_data(jnp.asarray(content), impl=_impl(x))
    value = content
    if isinstance(x, np.generic):
        return value[()]
    if isinstance(x, np.ndarray):
        return value
    if not isinstance(x, jax.Array) or not x.committed:
        return jnp.asarray(value)
    return jax.make_array_from_callback(x.shape, x.sharding, lambda index: value[index])


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _impl(x: Any) -> Any:
    """Returns the implementation of keys, of arrays and of their types."""
    return jax.random.key_impl(x) if isinstance(x, jax.Array) else str(x.dtype)[4:-1]


def _data(x: Any) -> Any:
    return jax.random.key_data(x) if _is_key(x) else x


def _spec(x: Any) -> tuple[tuple[int, ...], str]:
    return tuple(x.shape), str(x.dtype)


def _show_names(names: Sequence[str]) -> str:
    shown = ", ".join(names[:5]) or "no leaves"
    return f"{shown}, ... ({len(names)} leaves)" if len(names) > 5 else shown
