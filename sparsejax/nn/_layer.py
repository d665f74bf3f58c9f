"""What all layers share: checks of fields and parameters, the repr, `tables`.

A layer is a frozen dataclass of what is static: sizes, dtypes, initializers. So it is
hashable, may be closed over or be a static argument of `jit`, and layers with equal
fields are equal. Its parameters are kept apart from it, in the dict that `init` makes.

A new layer is a frozen dataclass with `init(key)`, `__call__(params, x)` and
`table_prefix()`. It checks its fields and parameters with the functions below. A line
each in `__init__`, `flax`, `nnx` and `equinox` makes it public.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparsejax import _arguments, _compat
from sparsejax._rows import SelectedRows


Initializer = Callable[[Any, Any, Any], Any]  # of key, shape and dtype


# ------------------------------------------------------------------ tables


def tables(layers: Any) -> Any:
    """Which parameters of layers are tables: `tables=` of `sparsejax.value_and_grad`.

    Without it `sparsejax.grad` decides by itself, and takes the dense gradient where a
    batch reads more than a quarter of a table or uses it other than by rows. With it
    every table of a layer with `sparse_grad=True` gets SelectedRows or an error.

    Args:
      layers: a layer, or a tree of layers with the structure of the parameters: a layer
        where these have that layer's parameters. Anything that is not a layer of
        `sparsejax.nn` (None, a function) is left to `sparsejax.grad`.

    Returns:
      The tree with a dict of True, False and None in the place of each layer: a prefix
      of the parameters' tree.

    Raises:
      TypeError: the tree holds an array or a SelectedRows: parameters, not layers.

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
        if isinstance(x, (jax.Array, np.ndarray, SelectedRows)):
            raise TypeError(
                f"{call}, got one with {_arguments.kind_of(x)}: parameters, it seems. "
                "Pass the layers that made them."
            )
        if isinstance(x, type) and hasattr(x, "table_prefix"):
            raise TypeError(
                f"{call}, got the class {x.__name__} itself. Make an instance: "
                f"{x.__name__}(...)."
            )
        return x.table_prefix() if hasattr(x, "table_prefix") else None

    is_leaf = lambda x: x is None or isinstance(x, SelectedRows)
    return jax.tree.map(prefix, layers, is_leaf=is_leaf)


# ------------------------------------------------------------------ fields


def check_size(call: str, name: str, value: Any) -> int:
    """`value` as a positive int, or an error."""
    if isinstance(value, bool):
        raise ValueError(f"{call}: {name} must be a positive int, got {value}.")
    return _arguments.static_int(call, name, value, 1)


def check_dtype(call: str, name: str, value: Any) -> Any:
    """`value` as a dtype of real floats, or an error."""
    try:
        dtype = jnp.dtype(value)
    except TypeError:
        dtype = None
    if value is None or dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(
            f"{call}: {name} must be a real floating-point dtype, such as jnp.float32 "
            f"or jnp.bfloat16, got {value!r}."
        )
    return dtype


def check_bool(call: str, name: str, value: Any, or_none: bool = False) -> Any:
    """`value`, a bool, or None with `or_none`, or an error."""
    if isinstance(value, bool) or (or_none and value is None):
        return value
    want = "True, False or None" if or_none else "True or False"
    raise TypeError(f"{call}: {name} must be {want}, got {_arguments.show(value)}.")


def check_initializer(call: str, name: str, value: Any) -> Any:
    """`value` if it is callable, or an error."""
    if not callable(value):
        raise TypeError(
            f"{call}: {name} must be a function (key, shape, dtype) -> array, such as "
            f"jax.nn.initializers.normal(0.01), got {_arguments.show(value)}."
        )
    return value


def set_fields(layer: Any, **fields: Any) -> None:
    """Sets fields of a frozen dataclass in its `__init__` or `__post_init__`."""
    layer.__dict__.update(fields)


def show(self: Any) -> str:
    """The repr of a layer: its class, and the fields that are not at their default."""
    parts = []
    for field in dataclasses.fields(self):
        value = getattr(self, field.name)
        if field.default is dataclasses.MISSING and not field.kw_only:
            parts.append(repr(value))
        elif value is not field.default and value != field.default:
            # Dtypes and functions by their names.
            names = (getattr(value, x, None) for x in ("name", "__qualname__"))
            shown = next(filter(None, names), None) or repr(value)
            name = "init" if field.name == "initializer" else field.name
            parts.append(f"{name}={shown}")
    return f"{type(self).__name__}({', '.join(parts)})"


# ------------------------------------------------------------------ parameters


def draw(
    call: str, name: str, initializer: Initializer, key: Any, shape: tuple, dtype: Any
) -> Any:
    """A parameter's first values, or an error where they have another shape."""
    made = initializer(key, shape, dtype)
    found = getattr(made, "shape", None)
    if found != shape:
        raise ValueError(
            f"{call}.init: {name} must return an array of the shape that it is called "
            f"with, {shape}, got {found or _arguments.kind_of(made)}."
        )
    return made


def check_params(call: str, params: Any, names: Sequence[str]) -> Any:
    """`params` if it is a mapping with exactly these names, or an error."""
    if isinstance(params, Mapping) and set(params) == set(names):
        return params
    found = _arguments.kind_of(params)
    if isinstance(params, Mapping):
        found = f"the names {sorted(map(str, params))}"
    raise TypeError(
        f"{call}: params must be the dict that {call}.init(key) makes, with the names "
        f"{sorted(names)}, got {found}."
    )


def parameter(call: str, params: Any, name: str, shape: tuple) -> Any:
    """One parameter as a JAX array or a SelectedRows of that shape, or an error."""
    value = _arguments.as_array(params[name])
    if not isinstance(value, (jax.Array, SelectedRows)):
        raise TypeError(
            f"{call}: params[{name!r}] must be an array of shape {shape}, got "
            f"{_arguments.kind_of(value)}."
        )
    if tuple(value.shape) != shape:
        raise ValueError(
            f"{call}: params[{name!r}] must have shape {shape}, got {value.shape}. "
            "These are not this layer's parameters."
        )
    return value


def table_of(
    call: str, params: Any, name: str, shape: tuple, sparse_grad: bool | None
) -> Any:
    """A parameter that is read by rows; with `sparse_grad=False` its gradient is dense.

    A dense gradient comes from an identity that `sparsejax.grad` has no rule for: it
    sees a use of the whole table. If `tables=` requires a sparse gradient, DensifyError
    names the primitive `dense_gradient`.
    """
    table = parameter(call, params, name, shape)
    if sparse_grad is not False or not isinstance(table, jax.Array):
        return table
    if _arguments.is_concrete(table):  # not differentiated: no need for a copy
        return table
    if _compat.is_laid_out(table):  # the primitive cannot express such an array's type
        return lax.pad(table, _arguments.scalar(0, table), [(0, 0, 0)] * table.ndim)
    return dense_gradient_p.bind(table)


dense_gradient_p = _compat.linear_primitive("dense_gradient", lambda x: x, {})


def add_bias(out: jax.Array, bias: jax.Array) -> jax.Array:
    """`out + bias`, which has the last axes of `out`."""
    shape = (1,) * (out.ndim - bias.ndim) + bias.shape
    return out + bias.reshape(shape).astype(out.dtype)


# ------------------------------------------------------------------ for frameworks


def check_layer(call: str, layer: Any) -> Any:
    """`layer` if it has a layer's two methods, or an error."""
    is_class = isinstance(layer, type)
    if not is_class and callable(layer) and callable(getattr(layer, "init", None)):
        return layer
    found = f"the class {layer.__name__} itself" if is_class else _arguments.show(layer)
    raise TypeError(
        f"{call}: layer must be a layer of sparsejax.nn, or an object with init(key) "
        f"and a call (params, *inputs), got {found}."
    )


def init_for(layer: Any, key: jax.Array, *inputs: Any) -> dict[str, Any]:
    """`layer.init(key)`, with an input where the layer takes its sizes from it."""
    needs_input = getattr(layer, "in_features", 0) is None
    return dict(layer.init(key, *inputs) if needs_input else layer.init(key))
