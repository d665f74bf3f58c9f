"""What every layer does alike: checks of its fields and parameters, its repr.

A layer is a frozen dataclass of what is static: sizes, types, initializers. So it is
hashable, may be closed over or be a static argument of `jit`, and two of equal fields
are equal. Its parameters live apart from it, in the dict that `init` makes.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from sparsejax import _arguments
from sparsejax._rows import SelectedRows
from sparsejax.nn._dense_gradient import dense_gradient


Initializer = Callable[[Any, Any, Any], Any]  # of key, shape and dtype

_PARAM_KIND = "{call}: params[{name!r}] must be an array of shape {shape}, got {found}."


# ------------------------------------------------------------------ fields


def check_size(call: str, name: str, value: Any) -> int:
    """`value` as a positive int, or an error."""
    if isinstance(value, bool):
        raise ValueError(f"{call}: {name} must be a positive int, got {value}.")
    return _arguments.static_int(call, name, value, 1)


def check_dtype(call: str, name: str, value: Any) -> Any:
    """`value` as a type of real floats, or an error."""
    try:
        dtype = jnp.dtype(value)
    except TypeError:
        dtype = None
    if value is None or dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(
            f"{call}: {name} must be a type of real floats, as jnp.float32 or "
            f"jnp.bfloat16, got {value!r}."
        )
    return dtype


def check_bool(call: str, name: str, value: Any, or_none: bool = False) -> Any:
    """`value`, a bool (or None, where that may be), or an error."""
    if isinstance(value, bool) or (or_none and value is None):
        return value
    more = ", or None" if or_none else ""
    found = _arguments.show(value)
    raise TypeError(f"{call}: {name} must be True or False{more}, got {found}.")


def check_initializer(call: str, name: str, value: Any) -> Any:
    """`value`, if it can be called, or an error."""
    if not callable(value):
        raise TypeError(
            f"{call}: {name} must be a function (key, shape, dtype) -> array, as those "
            f"of jax.nn.initializers are, got {_arguments.show(value)}."
        )
    return value


def set_fields(layer: Any, **fields: Any) -> None:
    """Sets fields of a frozen dataclass that is being made."""
    layer.__dict__.update(fields)


def show(self: Any) -> str:
    """The repr: what was asked for, without what is as it is by default."""
    parts = []
    for field in dataclasses.fields(self):
        value = getattr(self, field.name)
        if field.default is dataclasses.MISSING and not field.kw_only:
            parts.append(repr(value))
        elif value is not field.default and value != field.default:
            # Types and functions by their names.
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
        found = _arguments.kind_of(made) if found is None else f"one of shape {found}"
        raise ValueError(
            f"{call}.init: {name} must give an array of the shape that it is called "
            f"with, {shape}, got {found}."
        )
    return made


def check_params(call: str, params: Any, names: Sequence[str]) -> Any:
    """`params`, a mapping with just these names, or an error."""
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
        found = _arguments.kind_of(value)
        raise TypeError(
            _PARAM_KIND.format(call=call, name=name, shape=shape, found=found)
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
    """A parameter that is read by rows; its gradient dense if the layer says so."""
    table = parameter(call, params, name, shape)
    if sparse_grad is False and isinstance(table, jax.Array):
        return dense_gradient(table)
    return table


def num_rows(call: str, params: Any, name: str) -> int:
    """The first axis of a parameter whose size the layer leaves open."""
    shape = getattr(params[name], "shape", ())
    if not shape:
        found = _arguments.kind_of(params[name])
        raise TypeError(
            _PARAM_KIND.format(call=call, name=name, shape="[rows, ...]", found=found)
        )
    return shape[0]


def beside(bias: jax.Array, out: jax.Array) -> jax.Array:
    """`bias`, of the last axes of `out`, as something to be added to it."""
    shape = (1,) * (out.ndim - bias.ndim) + bias.shape
    return bias.reshape(shape).astype(out.dtype)


# ------------------------------------------------------------------ for frameworks


def check_layer(call: str, layer: Any) -> Any:
    """`layer`, if it has a layer's two methods, or an error."""
    made = not isinstance(layer, type)
    if made and callable(layer) and callable(getattr(layer, "init", None)):
        return layer
    found = _arguments.show(layer) if made else f"the class {layer.__name__} itself"
    raise TypeError(
        f"{call}: layer must be a layer of sparsejax.nn, or one with init(key) and a "
        f"call (params, *inputs), got {found}."
    )


def init_for(layer: Any, key: jax.Array, *inputs: Any) -> dict[str, Any]:
    """`layer.init(key)`, with an input where the layer's sizes depend on it."""
    open_size = getattr(layer, "in_features", 0) is None
    return dict(layer.init(key, *inputs) if open_size else layer.init(key))
