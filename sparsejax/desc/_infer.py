"""infer: which outputs and gradients are SelectedRows, before any data."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from sparsejax.desc._var_desc import BARE, VarDesc, describe
from sparsejax.transform import grad


class Inferred(NamedTuple):
    """What `infer` found; prints as a table.

    Args:
      outputs: list of `VarDesc`, one for each output.
      gradients: list of `VarDesc`, one for each leaf of the differentiated arguments,
        called `<leaf>@GRAD`; empty where the function is no loss.

    Example:
      >>> import jax.numpy as jnp, sparsejax as sj
      >>> sj.desc.infer(lambda x: 2 * x, jnp.ones((3, 2))).outputs[0].dims
      (3, 2)
    """

    outputs: list[VarDesc]
    gradients: list[VarDesc]

    def __str__(self) -> str:
        rows = [("name", "type", "data type", "dims", "lod level")]
        for desc in (*self.outputs, *self.gradients):
            dims = "x".join("?" if d < 0 else str(d) for d in desc.dims) or "scalar"
            rows.append(
                (desc.name, desc.type, desc.data_type, dims, str(desc.lod_level))
            )
        widths = [max(len(row[k]) for row in rows) for k in range(5)]
        lines = ["  ".join(c.ljust(w) for c, w in zip(r, widths)) for r in rows]
        return "\n".join(line.rstrip() for line in lines)


def infer(
    fun: Callable[..., Any],
    *specs: Any,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    tables: Any = None,
) -> Inferred:
    """Kind, type and dimensions of each output and gradient, before any data.

    Nothing is computed: `fun` is traced by `jax.eval_shape`. If it is a loss (one float
    scalar comes out, beside `aux`), `sparsejax.grad` of it is inferred as well.

    Args:
      fun: a function of arrays.
      *specs: its arguments; arrays or `jax.ShapeDtypeStruct` in them alike.
      argnums: int or ints, what to differentiate, as in `sparsejax.grad`.
      has_aux: bool, whether `fun` returns `(loss, aux)`.
      tables: as in `sparsejax.grad`.

    Returns:
      `Inferred(outputs, gradients)`, two lists of `VarDesc`. Names are paths, those of
      outputs under `out`, those of gradients with `@GRAD` behind them and, where
      `argnums` are several, under their arguments' names.

    Raises:
      DensifyError: `tables=` insists on a leaf that is not read by rows alone.
      TypeError: an argument that `jax.eval_shape` or `sparsejax.grad` refuses; or
        `(loss, aux)` comes out without `has_aux=True`.

    Example:
      >>> import jax, jax.numpy as jnp, sparsejax as sj
      >>> def loss(params, ids):
      ...     return jnp.sum(sj.lookup(params["table"], ids) @ params["w"])
      >>> spec = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
      >>> params = {"table": spec(10**9, 64), "w": spec(64)}
      >>> print(sj.desc.infer(loss, params, jax.ShapeDtypeStruct((32,), jnp.int32)))
      name        type           data type  dims           lod level
      out         LOD_TENSOR     float32    scalar         0
      table@GRAD  SELECTED_ROWS  float32    1000000000x64  0
      w@GRAD      LOD_TENSOR     float32    64             0

    References:
      PaddlePaddle, `InferShape` and `InferVarType`.
    """
    out = _eval_shape(fun, specs)
    outputs = describe(out, lambda path: _join("out", path))
    if not has_aux and _is_loss_with_aux(out):
        raise TypeError(
            "sparsejax.desc.infer: a pair whose first part is a float scalar comes out "
            "of the function. If that is (loss, aux), pass has_aux=True, so that the "
            "gradients are inferred too; if it is no loss, return a dict or a list."
        )
    loss = out[0] if has_aux else out
    if not _is_loss(loss):
        return Inferred(outputs, [])
    found = _eval_shape(grad(fun, argnums, has_aux, tables=tables), specs)
    found = found[0] if has_aux else found
    several = not isinstance(argnums, int)
    positions = tuple(argnums) if several else (argnums,)
    gradients = []
    for position, tree in zip(positions, found if several else (found,)):
        # A tree's leaves are known by their own paths, an array by its argument.
        prefix = _argument(fun, position) if several or hasattr(tree, "dtype") else ""
        gradients += describe(tree, lambda path, p=prefix: _join(p, path) + "@GRAD")
    return Inferred(outputs, gradients)


def _eval_shape(fun: Callable[..., Any], specs: Sequence[Any]) -> Any:
    """`jax.eval_shape`, but ints, strings and functions stay what they are."""
    leaves, treedef = jax.tree.flatten(specs)
    places = [k for k, leaf in enumerate(leaves) if hasattr(leaf, "dtype")]

    def call(arrays):
        for k, array in zip(places, arrays):
            leaves[k] = array
        return fun(*treedef.unflatten(leaves))

    return jax.eval_shape(call, [leaves[k] for k in places])


def _argument(fun: Callable[..., Any], position: int) -> str:
    """What the function calls this argument."""
    try:
        names = list(inspect.signature(fun).parameters.values())
    except (TypeError, ValueError):  # a builtin
        names = []
    named = position < len(names) and names[position].kind in (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
    )
    return names[position].name if named else f"arg{position}"


def _join(prefix: str, path: str) -> str:
    path = "" if path == BARE else path
    return ".".join(part for part in (prefix, path) if part)


def _is_loss(x: Any) -> bool:
    return (
        hasattr(x, "dtype") and x.shape == () and jnp.issubdtype(x.dtype, jnp.floating)
    )


def _is_loss_with_aux(x: Any) -> bool:
    return type(x) is tuple and len(x) == 2 and _is_loss(x[0])
