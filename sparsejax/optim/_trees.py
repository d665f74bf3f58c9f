"""Trees of gradients and parameters: their leaves, paths and shapes.

A SelectedRows is one leaf, and so is a QuantizedTable. `None` and `optax.MaskedNode`,
which JAX and optax use for a leaf without a gradient, are leaves, too, so the leaves of
two trees match by index.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from sparsejax import _arguments
from sparsejax._arguments import PyTree
from sparsejax._rows import RowTable, indexing, is_quantized, is_selected_rows


def is_none_or_masked(x: Any) -> bool:
    return x is None or isinstance(x, optax.MaskedNode)


def is_leaf(x: Any) -> bool:
    return is_selected_rows(x) or is_quantized(x) or is_none_or_masked(x)


def flatten(tree: Any) -> tuple[list[Any], Any]:
    """Returns leaves and structure, with leaves as in `is_leaf`."""
    return jax.tree.flatten(tree, is_leaf=is_leaf)


def flatten_params(grads: Any, params: Any) -> list[Any] | None:
    """Returns the leaves of `params` in the order of the leaves of `grads`, or None."""
    if params is None:
        return None
    try:
        return flatten(grads)[1].flatten_up_to(params)
    except ValueError:
        shown = (_arguments.show_tree(t, is_selected_rows) for t in (grads, params))
        raise ValueError(
            "gradients and params must be of the same tree structure, with one "
            f"SelectedRows for a table, got {' and '.join(shown)}. "
            f"{_arguments.show_mismatch(grads, params, is_leaf)}".strip()
        ) from None


def leaf_paths(tree: Any, name: str) -> list[str]:
    """Returns paths of the leaves for messages: `grads['table']`."""
    paths, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
    return [name + jax.tree_util.keystr(path) for path, _ in paths]


def without_variables(tree: Any) -> Any:
    """Replaces variables in `tree`, such as `flax.nnx.Param`, by their values.

    A variable is a node with one child. The parameters and the state of an
    `nnx.Optimizer` have variables of different types, so their structures differ.
    """

    def is_variable(x):
        return hasattr(type(x), "__jax_array__") and not isinstance(x, RowTable)

    def value(x):
        children = jax.tree.leaves(x, is_leaf=lambda y: y is not x)
        return children[0] if is_variable(x) and len(children) == 1 else x

    return jax.tree.map(value, tree, is_leaf=is_variable)


def transformation(
    init: Callable[..., Any], update: Callable[..., Any]
) -> optax.GradientTransformationExtraArgs:
    """Makes a transformation whose state may come from an `nnx.Optimizer`.

    `nnx.Optimizer.update` takes each node of a new state apart, and puts a `State` of
    its children in its place. `update` gets ShardedTables again.
    """
    is_table = lambda x: isinstance(x, RowTable)

    def rebuild(like, part):
        if not is_table(like) or is_table(part):  # `update` refuses another layout
            return part
        return jax.tree.structure(like).unflatten(jax.tree.leaves(part))

    @functools.wraps(update)
    def update_tables(updates, state, params=None, **extra_args):
        if any(map(is_table, jax.tree.leaves(params, is_leaf=is_table))):
            like = jax.eval_shape(init, params)
            if jax.tree.structure(like) != jax.tree.structure(state):
                state = jax.tree.map(rebuild, like, state, is_leaf=is_table)
        return update(updates, state, params, **extra_args)

    return optax.GradientTransformationExtraArgs(init, update_tables)


def in_structure_of(tree: Any, new: Any) -> Any:
    """Puts the leaves of `new` into the structure of `tree`, with its variables."""
    return jax.tree.structure(tree).unflatten(jax.tree.leaves(new))


def ids_by_leaf(name: str, params: Any, ids: Any) -> dict[int, Any]:
    """Returns the leaves of `ids` by the index of the `params` leaf at the same path.

    Args:
      name: of the argument, for messages.
      params: all parameters.
      ids: a tree like them, with None or nothing where a leaf has no ids.
    """
    paths = leaf_paths(params, "")
    by_leaf = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(ids):
        path = jax.tree_util.keystr(path)
        if path not in paths:
            raise ValueError(
                f"{name} has a leaf at {path or 'the root'}, but the "
                f"parameters do not; their leaves are {', '.join(paths)}."
            )
        by_leaf[paths.index(path)] = leaf
    return by_leaf


def to_spec(x: Any, kind: Any = jax.ShapeDtypeStruct) -> Any:
    """Makes a leaf a spec of that kind; keeps None, MaskedNode; else returns None."""
    if hasattr(x, "shape") and hasattr(x, "dtype"):
        # JAX narrows the 64-bit types of NumPy unless they are enabled.
        dtype = jax.dtypes.canonicalize_dtype(x.dtype, allow_extended_dtype=True)
        return kind(x.shape, dtype)
    if isinstance(x, (bool, int, float, complex)):
        return jax.ShapeDtypeStruct((), jax.dtypes.result_type(x))
    return x if is_none_or_masked(x) else None


class StackSpec(jax.ShapeDtypeStruct):
    """The spec of a stack of tables `[K, V, ...]`, which has two axes of rows."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StackSpec) and super().__eq__(other)

    def __hash__(self) -> int:
        return hash((StackSpec, self.shape, self.dtype))


def row_axes(spec: Any) -> int:
    """Returns the number of axes of a table that run over its rows."""
    return 2 if isinstance(spec, StackSpec) else 1


def reshaped(spec: Any, shape: Sequence[int]) -> Any:
    """Makes a spec of the same kind and dtype with another shape."""
    kind = StackSpec if isinstance(spec, StackSpec) else jax.ShapeDtypeStruct
    return kind(tuple(shape), spec.dtype)


def arrays(specs: Sequence[Any]) -> list[Any]:
    """Returns the specs of the leaves that are arrays, of JAX's own type."""
    return [plain(s) for s in specs if not is_none_or_masked(s)]


def fill(treedef: Any, specs: Sequence[Any], arrays: Sequence[Any]) -> Any:
    """Puts these arrays at the leaves of the tree that are arrays."""
    present = iter(arrays)
    return treedef.unflatten(
        s if is_none_or_masked(s) else next(present) for s in specs
    )


def plain(spec: Any) -> Any:
    """Returns a spec of JAX's own type."""
    if isinstance(spec, StackSpec):
        return jax.ShapeDtypeStruct(spec.shape, spec.dtype)
    return spec


def global_norm(tree: PyTree) -> jax.Array:
    """Returns the Euclidean norm over all leaves of a tree, including SelectedRows.

    `sqrt(sum over leaves of sum |x|^2)`, where a SelectedRows counts as the dense array
    that it represents: duplicates are summed before squaring, and empty slots are zero.
    `optax.tree.norm` of such a tree would also square the row ids.

    Args:
      tree: any tree of arrays, SelectedRows, `None` and `optax.MaskedNode`.

    Returns:
      A scalar, equal to `optax.tree.norm` of the tree with each SelectedRows as
      `.to_dense()`, but of float32 for narrower leaves, whose squares would overflow; 0
      for a tree without leaves.

    Example:
      >>> import jax.numpy as jnp, sparsejax as sj
      >>> from sparsejax.optim import global_norm
      >>> rows = sj.SelectedRows(jnp.array([1, 1]), jnp.array([[1.0], [2.0]]), 1000)
      >>> global_norm({"table": rows, "bias": jnp.array([4.0])})
      Array(5., dtype=float32)

    References:
      `optax.tree.norm`; for clipping: Pascanu et al., 2013, "On the difficulty of
      training recurrent neural networks".
    """

    def array(leaf):
        leaf = leaf if is_selected_rows(leaf) else jnp.asarray(leaf)
        leaf = leaf.astype(indexing.accumulator_dtype(leaf.dtype))
        # The values of empty slots are zeros.
        return leaf.coalesce().values if is_selected_rows(leaf) else leaf

    leaves = jax.tree.leaves(tree, is_leaf=is_selected_rows)
    with jax.numpy_dtype_promotion("standard"):  # leaves may be of several types
        return optax.tree.norm(list(map(array, leaves)))


def remember(function: Callable) -> Callable:
    """Caches like `functools.lru_cache(32)`, but not for unhashable arguments.

    The arguments are transformations, tree structures and specs. Unhashable static data
    in a user's pytree node makes its structure unhashable.
    """
    cached = functools.lru_cache(32)(function)

    def call(*args):
        try:
            hash(args)
        except TypeError:
            return function(*args)
        return cached(*args)

    return call
