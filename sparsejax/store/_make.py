"""Making a table of what `KVStore.init` was given."""

import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from sparsejax import _arguments
from sparsejax._files import as_path
from sparsejax.store import _layout
from sparsejax.store._memory import MappedFile, Memory
from sparsejax.store._optimizer import Optimizer
from sparsejax.store._rows_wanted import check_not_traced
from sparsejax.store._table import Table, arrays_of


_NOT_A_SHAPE = (
    "{call}: table {name!r} needs a shape, as a tuple of ints, or an array of weights, "
    "got {found}."
)
_NO_DTYPE = "{call}: dtype must be a type of numbers, got {found}."


def make_table(
    call: str,
    name: str,
    shape_or_array: Any,
    tx: Any,
    path: str | os.PathLike[str] | None,
    initializer: Callable[..., Any] | None,
    seed: Any,
    dtype: Any,
) -> Table:
    """The table, in memory or in its file; arguments as in `KVStore.init`."""
    check_not_traced(call, name, "weights", shape_or_array)
    shape, array = _shape_or_array(call, name, shape_or_array)
    dtype = None if dtype is None else _as_dtype(call, dtype)
    if path is not None:
        path = as_path(call, path)
    if array is None:
        dtype = np.dtype(np.float32 if dtype is None else dtype)
    elif dtype is None or np.dtype(dtype) == array.dtype:
        dtype = array.dtype
    else:
        found, dtype = array.dtype, np.dtype(dtype)
        raise ValueError(
            f"{call}: table {name!r} comes with an array of {found}, and "
            f"dtype={dtype}. Leave dtype out, or cast the array."
        )
    _check(call, name, shape, dtype, tx)
    if initializer is not None:
        if array is not None:
            raise ValueError(
                f"{call}: table {name!r} has an array and an initializer. The array "
                "holds the first weights of all rows: leave one of the two out."
            )
        if not callable(initializer):
            raise TypeError(
                f"{call}: initializer must be a function (key, shape, dtype) -> array, "
                "such as jax.nn.initializers.normal(0.01), got "
                f"{_arguments.show(initializer)}."
            )
        if shape[0] > 1 << 32:
            raise ValueError(
                f"{call}: an initializer tells 2**32 rows apart, and table {name!r} "
                f"has {shape[0]}."
            )
    if path is not None and array is not None and os.path.exists(path):
        raise ValueError(
            f"{call}: {path} is there already, and table {name!r} comes with an array. "
            "Give the shape to open the file as it is, or another path."
        )
    key = _arguments.as_key(call, seed, "seed", from_int=True)
    check_not_traced(call, name, "keys", key)
    if initializer is not None:
        _check_initializer(call, name, initializer, (1, *shape[1:]), dtype, key)
    key = _layout.encode_key(key)

    optimizer = None if tx is None else Optimizer(tx, shape, dtype)
    specs = arrays_of(shape, dtype, optimizer)
    initial = {} if array is None else {0: array}
    if optimizer is not None:
        rest = optimizer.init_rest(np.zeros((1, *shape[1:]), dtype))
        initial |= dict(enumerate(rest, len(specs) - len(rest)))
    given = array is not None
    if path is None:
        memory = Memory(specs, initial)
    else:
        header = _layout.describe(
            shape, dtype, optimizer, key, given=given, initialized=bool(initializer)
        )
        memory = MappedFile(call, path, specs, initial, header, name)
        given = memory.found["given"]
    return Table(name, shape, dtype, optimizer, initializer, key, given, memory)


def _shape_or_array(call: str, name: str, x: Any) -> tuple[tuple[int, ...], Any]:
    if isinstance(x, (tuple, list)):
        if not all(isinstance(n, (int, np.integer)) and n >= 0 for n in x):
            raise TypeError(_NOT_A_SHAPE.format(call=call, name=name, found=x))
        return tuple(int(n) for n in x), None
    if not isinstance(x, (np.ndarray, jax.Array)):
        found = _arguments.kind_of(x)
        raise TypeError(_NOT_A_SHAPE.format(call=call, name=name, found=found))
    return x.shape, np.asarray(x)


def _as_dtype(call: str, dtype: Any) -> np.dtype:
    try:
        return np.dtype(dtype)
    except TypeError:
        raise TypeError(_NO_DTYPE.format(call=call, found=repr(dtype))) from None


def _check(
    call: str, name: str, shape: tuple[int, ...], dtype: np.dtype, tx: Any
) -> None:
    if not shape:
        raise ValueError(
            f"{call}: table {name!r} must have at least one axis, the rows, got shape "
            f"{shape}."
        )
    try:
        _arguments.index_dtype(shape[0])  # there must be an id for each row
    except ValueError as error:
        said = str(error).removeprefix("sparsejax: ")
        raise ValueError(f"{call}: {said}") from None
    if not (jnp.issubdtype(dtype, np.number) or dtype == np.bool_):
        raise TypeError(_NO_DTYPE.format(call=call, found=dtype))
    if tx is not None and not all(hasattr(tx, x) for x in ("init", "update")):
        raise TypeError(
            f"{call}: tx must be an optax transformation, such as optax.adagrad(0.1), "
            f"or None for a table that is only read, got {_arguments.kind_of(tx)}."
        )
    if tx is not None and not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(
            f"{call}: table {name!r} is to be {dtype}; an optimizer needs real "
            "floating point. Use tx=None for a table that is only read."
        )
    parts = 2 if dtype.kind == "c" else 1
    if dtype.itemsize > 4 * parts and not _arguments.x64_enabled():
        raise ValueError(
            f"{call}: table {name!r} is to be {dtype}, which JAX cuts to 32 bits here. "
            "Set jax_enable_x64, or ask for a type of 32 bits or less."
        )


def _check_initializer(
    call: str,
    name: str,
    initializer: Callable[..., Any],
    shape: tuple[int, ...],
    dtype: np.dtype,
    key: jax.Array,
) -> None:
    """Tries it as it will be run: traced, for one row."""

    def row(key):
        made = initializer(key, shape, dtype)
        if not isinstance(made, Tracer) and hasattr(made, "dtype"):
            raise ValueError(
                f"{call}: the initializer of table {name!r} gives values that JAX does "
                "not make, so all rows would get the same ones: it is run once, "
                "traced, for all rows. Make them with jax.random and the key, or "
                "jax.numpy where they are constant."
            )
        return made

    try:
        made = jax.eval_shape(row, key)
    except TypeError as error:
        raise TypeError(
            f"{call}: the initializer of table {name!r} cannot be called as (key, "
            f"shape, dtype), here with shape {shape}: {error}"
        ) from error
    found = getattr(made, "shape", type(made).__name__)
    if found != shape:
        raise ValueError(
            f"{call}: the initializer of table {name!r} must give an array of the "
            f"shape that it is called with, {shape}, for one row; it gave {found}."
        )
