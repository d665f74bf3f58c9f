"""Trees of gradients and parameters: their leaves, paths and shapes.

A SelectedRows is one leaf. So are `None` and `optax.MaskedNode`, which JAX and optax
put where a leaf has no gradient: leaves of two trees can then be matched by number.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import optax

from sparsejax import _arguments
from sparsejax._rows import is_selected_rows


def is_none_or_masked(x: Any) -> bool:
    return x is None or isinstance(x, optax.MaskedNode)


def is_leaf(x: Any) -> bool:
    return is_selected_rows(x) or is_none_or_masked(x)


def flatten(tree: Any) -> tuple[list[Any], Any]:
    """Leaves and structure; see `is_leaf`."""
    return jax.tree.flatten(tree, is_leaf=is_leaf)


def flatten_params(call: str, grads: Any, params: Any) -> list[Any] | None:
    """The leaves of `params` in the order of those of `grads`; None for no params."""
    if params is None:
        return None
    try:
        return flatten(grads)[1].flatten_up_to(params)
    except ValueError:
        grads, params = (
            _arguments.show_tree(tree, is_selected_rows) for tree in (grads, params)
        )
        raise ValueError(
            f"{call}: gradients and params have different tree structures, {grads} and "
            f"{params}. The gradient of a table is one SelectedRows, in the place of "
            "the table."
        ) from None


def leaf_paths(tree: Any, name: str) -> list[str]:
    """Paths of the leaves for messages: `grads['table']`."""
    paths, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
    return [name + jax.tree_util.keystr(path) for path, _ in paths]


def to_spec(x: Any) -> Any:
    """A leaf as a ShapeDtypeStruct; None or MaskedNode stay, other objects are None."""
    if hasattr(x, "shape") and hasattr(x, "dtype"):
        return jax.ShapeDtypeStruct(x.shape, x.dtype)
    if isinstance(x, (bool, int, float, complex)):
        return jax.ShapeDtypeStruct((), jax.dtypes.result_type(x))
    return x if is_none_or_masked(x) else None


def remember(function: Callable, size: int = 32) -> Callable:
    """`functools.lru_cache`, without the cache where the arguments have no hash.

    The arguments are transformations, structures and specs of trees. Static data of a
    user's pytree node may be unhashable, and its structure then is.
    """
    cached = functools.lru_cache(size)(function)

    def call(*args):
        try:
            hash(args)
        except TypeError:
            return function(*args)
        return cached(*args)

    return call
