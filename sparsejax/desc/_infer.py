"""infer: kinds, types and shapes of outputs and gradients, before any data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from sparsejax import _arguments
from sparsejax._arguments import PyTree
from sparsejax.desc._var_desc import BARE, VarDesc, describe, join
from sparsejax.transform import grad
from sparsejax.transform.trace import argument_names, check_fun, trace_flat


class Inferred(NamedTuple):
    """The result of `infer`; prints as a table.

    Args:
      outputs: list with a `VarDesc` for each output.
      gradients: list with a `VarDesc` for each leaf of the differentiated arguments,
        named `<leaf>@GRAD`; empty if the function is not a loss.

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
            level = str(desc.lod_level)
            rows.append((desc.name, desc.type, desc.data_type, dims, level))
        return _arguments.show_table(rows)


def infer(
    fun: Callable[..., Any],
    *specs: PyTree,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    tables: PyTree = None,
) -> Inferred:
    """Infers kind, type and shape of each output and gradient, before any data.

    `jax.eval_shape` traces `fun`, and nothing is computed. If `fun` is a loss (it
    returns a float scalar, or a float scalar and `aux`), `infer` also traces
    `sparsejax.grad` of it.

    Args:
      fun: a function of arrays.
      *specs: the arguments of `fun`, trees of arrays or `jax.ShapeDtypeStruct`.
      argnums: int or ints, the arguments to differentiate, as in `sparsejax.grad`.
      has_aux: bool, True if `fun` returns `(loss, aux)`.
      tables: as in `sparsejax.grad`.

    Returns:
      `Inferred(outputs, gradients)`, two lists of `VarDesc`. Names are paths. Names of
      outputs begin with `out`, and names of gradients end with `@GRAD`; with several
      `argnums`, names of gradients begin with the name of the argument.

    Raises:
      DensifyError: `tables=` requires a sparse gradient for a leaf that `fun` does not
        only read by rows.
      TypeError: `jax.eval_shape` or `sparsejax.grad` refuses an argument; or `fun`
        returns `(loss, aux)` without `has_aux=True`.

    Example:
      >>> import jax, jax.numpy as jnp, sparsejax as sj
      >>> def loss(params, ids):
      ...     return jnp.sum(sj.lookup(params["table"], ids) @ params["w"])
      >>> spec = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
      >>> params = {"table": spec(10**9, 64), "w": spec(64)}
      >>> print(sj.desc.infer(loss, params, jax.ShapeDtypeStruct((32,), jnp.int32)))
      name        type           data type  dims           lod level
      --------------------------------------------------------------
      out         LOD_TENSOR     float32    scalar         0
      table@GRAD  SELECTED_ROWS  float32    1000000000x64  0
      w@GRAD      LOD_TENSOR     float32    64             0

    References:
      PaddlePaddle, `InferShape` and `InferVarType`.
    """
    out = _eval_shape(fun, specs)
    outputs = describe(out, lambda path: _join("out", path))
    is_pair = type(out) is tuple and len(out) == 2
    if not has_aux and is_pair and _is_loss(out[0]):
        raise TypeError(
            "the function returns a pair that begins with a float scalar. Pass "
            "has_aux=True if it is (loss, aux), or return a dict or a list."
        )
    loss = out[0] if has_aux else out
    if not _is_loss(loss):
        return Inferred(outputs, [])
    grads = _eval_shape(grad(fun, argnums, has_aux, tables=tables), specs)
    grads = grads[0] if has_aux else grads
    numbers = check_fun(fun, argnums, has_aux)
    several = isinstance(numbers, tuple)
    gradients = []
    for position, tree in zip(numbers, grads) if several else [(numbers, grads)]:
        # A leaf of a tree is named by its path, a bare array by its argument.
        is_named = several or hasattr(tree, "dtype")
        prefix = argument_names(fun, [position])[0] if is_named else ""
        gradients += describe(tree, lambda path, p=prefix: _join(p, path) + "@GRAD")
    return Inferred(outputs, gradients)


def _eval_shape(fun: Callable[..., Any], specs: Sequence[Any]) -> Any:
    """Traces `fun`; passes ints, strings and functions unchanged."""
    flat = trace_flat(fun, specs, {}, lambda x: hasattr(x, "dtype"))
    return flat.unflatten([var.aval for var in flat.jaxpr.outvars])


def _join(prefix: str, path: str) -> str:
    return join(prefix, "" if path == BARE else path)


def _is_loss(x: Any) -> bool:
    return (
        hasattr(x, "dtype") and x.shape == () and jnp.issubdtype(x.dtype, jnp.floating)
    )
