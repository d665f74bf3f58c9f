"""VarDesc, describe: names, kinds, types and shapes of variables before any data."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from sparsejax import _compat
from sparsejax._arguments import PyTree
from sparsejax._rows import SelectedRows
from sparsejax._segments import SegmentTensor


LOD_TENSOR = "LOD_TENSOR"
SELECTED_ROWS = "SELECTED_ROWS"
UNKNOWN = -1
BARE = "value"  # the path of a variable that is the whole tree


@dataclasses.dataclass(frozen=True)
class VarDesc:
    """The description of a variable, before any data.

    Args:
      name: str.
      type: "LOD_TENSOR" for an array, whose first axis has segments if `lod_level` is
        not 0; or "SELECTED_ROWS".
      data_type: str, the name of the NumPy dtype: "float32", "bfloat16", ...
      dims: ints. -1 is a dimension that depends on the data. For SelectedRows, the
        dimensions of the whole table, `[height, ...]`.
      lod_level: int, the depth of nested segments; 0 for a plain array.
      persistable: bool, True if the variable outlives a step, like a parameter.

    Example:
      >>> import sparsejax as sj
      >>> sj.desc.VarDesc("w", "LOD_TENSOR", "float32", (-1, 640)).dims
      (-1, 640)

    References:
      PaddlePaddle, design of `VarDesc`.
    """

    name: str
    type: str
    data_type: str
    dims: tuple[int, ...]
    lod_level: int = 0
    persistable: bool = False


def describe(
    tree: PyTree,
    names: Sequence[str] | Callable[[str], str] | None = None,
    *,
    persistable: bool | Callable[[str], bool] = False,
) -> list[VarDesc]:
    """Describes every variable of a tree before any data.

    A SelectedRows is one variable. A SegmentTensor is one variable for each array in
    its values; the first dimension of these is -1, because the number of elements
    depends on the data.

    Args:
      tree: pytree of arrays, `jax.ShapeDtypeStruct`, SelectedRows and SegmentTensors,
        for example the result of `jax.eval_shape`. Symbolic dimensions
        (`jax.export.symbolic_shape`) are unknown, -1.
      names: a list with a name for each variable, in the order of the tree; or a
        function from the path of a variable to its name. The default is the path, for
        example `layers.0.kernel`.
      persistable: bool, or a function from a name to a bool.

    Returns:
      List of `VarDesc`, in the order of the tree.

    Raises:
      TypeError: a leaf is not an array.
      ValueError: there is not one name for each variable, or a name occurs twice.

    Example:
      >>> import jax.numpy as jnp, sparsejax as sj
      >>> tree = {
      ...     "grad": sj.SelectedRows(jnp.array([3]), jnp.ones((1, 8)), height=100),
      ...     "ids": sj.SegmentTensor.from_lists([[1, 2], [3]]),
      ... }
      >>> for desc in sj.desc.describe(tree):
      ...     print(desc.name, desc.type, desc.data_type, desc.dims, desc.lod_level)
      grad SELECTED_ROWS float32 (100, 8) 0
      ids LOD_TENSOR int32 (-1,) 1

    References:
      PaddlePaddle, design of `VarDesc` and of `SelectedRows`.
    """
    variables = _variables(tree, "", 0)
    paths = [path for path, _, _ in variables]
    labels: list[Any] = list(names) if isinstance(names, list | tuple) else paths
    if callable(names):
        labels = [names(path) for path in paths]
    if len(labels) != len(paths) or len(set(labels)) < len(labels):
        raise ValueError(
            f"describe: names must have one name for each of the {len(paths)} "
            f"variables of the tree ({', '.join(paths)}), all different, got {labels}."
        )
    keep = persistable if callable(persistable) else lambda _: persistable
    return [
        _describe_one(name, value, level, bool(keep(name)))
        for name, (_, value, level) in zip(labels, variables)
    ]


def _variables(tree: Any, prefix: str, level: int) -> list[tuple[str, Any, int]]:
    """Returns path, value and depth of each variable."""
    is_leaf = lambda x: isinstance(x, SelectedRows | SegmentTensor)
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
    variables = []
    for path, leaf in leaves:
        name = join(prefix, jax.tree_util.keystr(path, simple=True, separator="."))
        if isinstance(leaf, SegmentTensor):
            variables += _variables(leaf.values, name, level + 1)
        else:
            variables.append((name or BARE, leaf, level))
    return variables


def _describe_one(name: str, value: Any, level: int, persistable: bool) -> VarDesc:
    if not hasattr(value, "dtype"):
        value = jax.typeof(value)  # of a number
    dims = [
        UNKNOWN if d is None or _compat.is_symbolic_dim(d) else int(d)
        for d in value.shape
    ]
    if level:
        dims[0] = UNKNOWN
    kind = SELECTED_ROWS if isinstance(value, SelectedRows) else LOD_TENSOR
    return VarDesc(name, kind, value.dtype.name, tuple(dims), level, persistable)


def join(prefix: str, path: str) -> str:
    """Joins two paths with a dot, if neither is empty."""
    return ".".join(filter(None, (prefix, path)))
