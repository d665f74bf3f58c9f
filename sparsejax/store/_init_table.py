"""Checks the arguments of `KVStore.init`, and makes the table."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from sparsejax import _arguments
from sparsejax._files import as_path
from sparsejax._index.policy import KeyPolicy
from sparsejax.store import _records
from sparsejax.store._history import History
from sparsejax.store._journal import roll_back
from sparsejax.store._mapped import MappedFile, Memory
from sparsejax.store._mesh import Owners
from sparsejax.store._optimizer import Optimizer
from sparsejax.store._processes import Processes
from sparsejax.store._requested import check_not_traced
from sparsejax.store._table import Table, TableSpec


_CALL = "KVStore.init"


def make_table(
    name: str,
    shape_or_array: Any,
    tx: Any,
    initializer: Any,
    key: Any,
    dtype: Any,
    keys: Any,
    path: Any,
    processes: Processes,
    history: History,
) -> Table:
    """Makes a table in memory, or in a file, which it opens if it exists.

    Args:
      name, shape_or_array, tx, initializer, key, dtype, keys, path: as in
        `KVStore.init`.
      processes: that share the rows.
      history: of the store.
    """
    check_not_traced(name, "weights", shape_or_array)
    shape, array = _shape_or_array(name, shape_or_array)
    if array is not None:
        array = array.astype(dtype or array.dtype)
    dtype = np.dtype(dtype or np.float32) if array is None else array.dtype
    _check_keys(name, keys, array, processes.count)
    _check_shape_and_optimizer(name, shape, dtype, tx)
    key = _arguments.as_key(key, from_int=True)
    check_not_traced(name, "keys", key)
    if initializer is not None:
        _check_initializer(name, initializer, array, shape, dtype, key)
    owners = Owners(shape[0], processes.process, processes.count)
    if owners.count > 1:
        shape = (owners.own_height, *shape[1:])
        if array is not None:
            array = array[owners.ids(np.arange(owners.own_height))]
    spec = TableSpec(
        name=name,
        shape=shape,
        dtype=dtype,
        optimizer=None if tx is None else Optimizer(tx, shape, dtype, name),
        initializer=initializer,
        key=_records.encode_key(key),
        given=array is not None,
        owners=owners,
        policy=keys,
    )
    initial = {} if array is None else {0: array}
    if spec.optimizer is not None:
        _, other_state = spec.optimizer.init(np.zeros((1, *shape[1:]), dtype))
        initial |= dict(enumerate(other_state, 2 + sum(spec.optimizer.by_row)))
    if path is None:
        return Table(spec, Memory(spec.arrays(), initial), history)
    path = processes.own_path(as_path(_CALL, path))
    memory = MappedFile(path, spec.arrays(), initial, spec.describe(), name)
    table = Table(spec, memory, history)
    if not memory.is_new:
        history.forget()  # it does not say which rows changed when
        table.spec = dataclasses.replace(spec, given=memory.found["given"])
        table.journal = memory.found.get("journal")
        table.flushed_step = memory.found.get("step")
    try:
        roll_back(table)
    except BaseException:
        table.close()
        raise
    return table


def _shape_or_array(name: str, x: Any) -> tuple[tuple[int, ...], Any]:
    is_sequence = isinstance(x, (tuple, list))
    if is_sequence and all(isinstance(n, (int, np.integer)) and n >= 0 for n in x):
        return tuple(int(n) for n in x), None
    if not isinstance(x, (np.ndarray, jax.Array)):
        raise TypeError(
            f"{_CALL}: table {name!r} needs a shape (a tuple of ints) or an array of "
            f"weights, got {x if is_sequence else _arguments.kind_of(x)}."
        )
    return x.shape, np.asarray(x)


def _check_keys(name: str, keys: Any, array: np.ndarray | None, count: int) -> None:
    if keys is not None and not isinstance(keys, KeyPolicy):
        raise TypeError(
            f"{_CALL}: keys must be a sparsejax.store.KeyPolicy or None, got "
            f"{_arguments.kind_of(keys)}."
        )
    if keys is not None and array is not None:
        raise ValueError(
            f"{_CALL}: table {name!r} has both keys and an array of weights, but its "
            "rows have no keys yet. Pass a shape, and assign weights after insert."
        )
    if keys is not None and count > 1:
        raise ValueError(
            f"{_CALL}: table {name!r} cannot have keys, since its rows are sharded "
            f"over {count} processes by id. Pull ids that a sparsejax.HashIndex or a "
            "sparsejax.data.Vocabulary gives to keys."
        )


def _check_shape_and_optimizer(
    name: str, shape: tuple[int, ...], dtype: np.dtype, tx: Any
) -> None:
    if not shape:
        raise ValueError(
            f"{_CALL}: table {name!r} must have at least one axis (the rows), got "
            f"shape {shape}."
        )
    _arguments.index_dtype(shape[0])  # there must be an id for each row
    if not (jnp.issubdtype(dtype, np.number) or dtype == np.bool_):
        raise TypeError(f"{_CALL}: dtype must be a numeric type, got {dtype}.")
    if tx is not None and not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(
            f"{_CALL}: table {name!r} must have a real floating-point dtype for an "
            f"optimizer, got {dtype}. For a read-only table, pass tx=None."
        )
    parts = 2 if dtype.kind == "c" else 1
    if dtype.itemsize > 4 * parts and not _arguments.x64_enabled():
        raise ValueError(
            f"{_CALL}: table {name!r} has dtype {dtype}, which JAX truncates to 32 "
            "bits. Set jax_enable_x64, or use a dtype of at most 32 bits."
        )


def _check_initializer(
    name: str,
    initializer: Any,
    array: np.ndarray | None,
    shape: tuple[int, ...],
    dtype: np.dtype,
    key: jax.Array,
) -> None:
    """Traces it for one row, as it will be run."""
    if array is not None:
        raise ValueError(
            f"{_CALL}: table {name!r} has both an array, which has the weights of all "
            "rows, and an initializer. Omit one of them."
        )
    if shape[0] > 1 << 32:
        raise ValueError(
            f"{_CALL}: an initializer supports at most 2**32 rows, but table {name!r} "
            f"has {shape[0]}."
        )
    shape = (1, *shape[1:])

    def row(key):
        made = initializer(key, shape, dtype)
        if not isinstance(made, Tracer) and hasattr(made, "dtype"):
            raise ValueError(
                f"{_CALL}: the initializer of table {name!r} is traced once for all "
                "rows, but returns an untraced array (for example from NumPy), so all "
                "rows would get the same values. Use jax.random with the key, or "
                "jax.numpy for constants."
            )
        return made

    try:
        made = jax.eval_shape(row, key)
    except TypeError as error:
        raise TypeError(
            f"{_CALL}: the initializer of table {name!r} cannot be called as (key, "
            f"shape, dtype), here with shape {shape}: {error}"
        ) from error
    made_shape = getattr(made, "shape", type(made).__name__)
    if made_shape != shape:
        raise ValueError(
            f"{_CALL}: the initializer of table {name!r} must return an array of shape "
            f"{shape} for one row, but returned {made_shape}."
        )
