"""Code shared by all layers: checks of fields and parameters, the repr, and `tables`.

A layer is a frozen dataclass of static configuration: sizes, dtypes, initializers. It
is therefore hashable, can be closed over or passed to `jit` as a static argument, and
equals any layer with equal fields. Its parameters are separate, in the dict that `init`
returns.

A new layer is a frozen dataclass with `init(key)`, `__call__(params, x)` and
`table_prefix()`. It checks its fields and parameters with the functions below.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparsejax import _arguments, _compat
from sparsejax._arguments import Initializer, PyTree
from sparsejax._rows import table_or_none


# ------------------------------------------------------------------ tables


def tables(layers: PyTree) -> Any:
    """Marks which parameters are tables, for `tables=` of `sparsejax.value_and_grad`.

    Without `tables=`, `sparsejax.grad` decides for each table: the gradient is dense if
    a batch reads more than half of the table, or uses it other than by rows. With
    it, every table of a layer with `sparse_grad=True` gets a SelectedRows gradient, or
    an error.

    Args:
      layers: a layer, or a tree of layers that matches the tree of parameters, with
        each layer instead of its parameters. Anything else in the tree (None, a
        function) is left to `sparsejax.grad`.

    Returns:
      The tree with each layer replaced by a dict of True, False and None: a prefix of
      the tree of parameters.

    Raises:
      TypeError: the tree contains an array or a SelectedRows, so it holds parameters,
        not layers.

    Example:
      >>> import jax, jax.numpy as jnp, sparsejax as sj
      >>> layers = {"item": sj.nn.Embedding(10, 4), "out": sj.nn.Dense(1, 4)}
      >>> sj.nn.tables(layers)
      {'item': {'embedding': True}, 'out': {'kernel': None, 'bias': False}}
      >>> keys = jax.random.split(jax.random.key(0))
      >>> params = {name: layers[name].init(k) for name, k in zip(layers, keys)}
      >>> def loss(params, ids):
      ...     x = layers["item"](params["item"], ids)
      ...     return jnp.sum(layers["out"](params["out"], x))
      >>> grad = sj.grad(loss, tables=sj.nn.tables(layers))
      >>> grad(params, jnp.arange(9))["item"]["embedding"].capacity
      9
    """

    def prefix(x):
        call = "sparsejax.nn.tables: layers must be a layer or a tree of layers"
        if table_or_none(x) is not None:
            raise TypeError(
                f"{call}, got {_arguments.kind_of(x)}. Pass the layers, not their "
                "parameters."
            )
        if isinstance(x, type) and hasattr(x, "table_prefix"):
            raise TypeError(
                f"{call}, got the class {x.__name__}. Pass an instance: "
                f"{x.__name__}(...)."
            )
        return x.table_prefix() if hasattr(x, "table_prefix") else None

    is_leaf = lambda x: x is None or table_or_none(x) is not None
    return jax.tree.map(prefix, layers, is_leaf=is_leaf)


# ------------------------------------------------------------------ fields


def check_dtype(name: str, value: Any) -> Any:
    """Returns `value` as a real floating-point dtype, or raises."""
    if value is None or not jnp.issubdtype(jnp.dtype(value), jnp.floating):
        raise TypeError(f"{name} must be a real floating-point dtype, got {value!r}.")
    return jnp.dtype(value)


def show(self: Any) -> str:
    """Shows a layer: its class and its non-default fields."""
    parts = []
    for field in dataclasses.fields(self):
        value = getattr(self, field.name)
        if field.default is dataclasses.MISSING and not field.kw_only:
            parts.append(repr(value))
        elif value is not field.default and value != field.default:
            # Dtypes and functions by their names.
            names = (getattr(value, x, None) for x in ("name", "__qualname__"))
            shown = next(filter(None, names), None) or repr(value)
            parts.append(f"{field.name}={shown}")
    return f"{type(self).__name__}({', '.join(parts)})"


# ------------------------------------------------------------------ parameters


def draw(
    name: str, initializer: Initializer, key: Any, shape: tuple, dtype: Any
) -> Any:
    """Draws a parameter's initial values; raises if they have the wrong shape."""
    made = initializer(key, shape, dtype)
    if np.shape(made) != shape:
        raise ValueError(
            f"{name} must return an array of the requested shape {shape}, got "
            f"{np.shape(made)}."
        )
    return made


def check_params(params: Any, names: Iterable[str]) -> None:
    """Raises unless `params` is a mapping with exactly these names."""
    if not isinstance(params, Mapping) or set(params) != set(names):
        is_dict = isinstance(params, Mapping)
        raise TypeError(
            f"params must be a dict with the keys {sorted(names)}, as init(key) returns"
            f" it, got {sorted(params) if is_dict else _arguments.kind_of(params)}."
        )


def parameter(params: Any, name: str, shape: tuple) -> Any:
    """Checks that a parameter is an array or a table of that shape, and returns it."""
    value = table_or_none(params[name])
    if value is None or tuple(value.shape) != shape:
        shown = f"params[{name!r}]"
        raise (TypeError if value is None else ValueError)(
            f"{shown} must be an array of shape {shape}, got "
            f"{_arguments.kind_of(params[name])}. "
            f"{_arguments.convert_tensor(params[name], shown)}".rstrip()
        )
    return value


def table_of(params: Any, name: str, shape: tuple, sparse_grad: bool | None) -> Any:
    """Returns a parameter read by rows; with `sparse_grad=False` its gradient is dense.

    The dense gradient comes from an identity that `sparsejax.grad` has no rule for, so
    it treats the read as a use of the whole table. If `tables=` requires a sparse
    gradient, the DensifyError shows the primitive `dense_gradient`.
    """
    table = parameter(params, name, shape)
    if sparse_grad is not False or not isinstance(table, jax.Array):
        return table
    if _arguments.is_concrete(table):  # not differentiated: no need for a copy
        return table
    if _compat.has_mesh(table):  # the primitive cannot express such an array's type
        return lax.pad(table, _arguments.scalar(0, table), [(0, 0, 0)] * table.ndim)
    return dense_gradient_p.bind(table)


dense_gradient_p = _compat.primitive("dense_gradient", lambda x: x, {})


# ------------------------------------------------------------------ for frameworks


def check_layer(layer: Any) -> Any:
    """Returns `layer`; raises unless it has a layer's two methods."""
    is_class = isinstance(layer, type)
    if is_class or not callable(layer) or not hasattr(layer, "init"):
        raise TypeError(
            "layer must be a layer of sparsejax.nn, or an object with init(key) and "
            f"__call__(params, *inputs), got {layer!r}."
        )
    return layer


def init_for(layer: Any, key: jax.Array, *inputs: Any) -> dict[str, Any]:
    """Calls `layer.init(key)`, with an input if the layer infers its sizes from it."""
    needs_input = getattr(layer, "in_features", 0) is None
    return dict(layer.init(key, *inputs) if needs_input else layer.init(key))
