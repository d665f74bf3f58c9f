"""All rows of a table, read; and rows written, without the optimizer."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sparsejax import _arguments
from sparsejax._rows import SelectedRows
from sparsejax.store import _rows_wanted as wanted
from sparsejax.store._table import Table, put_rows


def pull_all(table: Table, report: Callable[[int, int], None]) -> np.ndarray:
    """The weights of all rows; nothing is touched."""
    out = np.empty(table.shape, table.dtype)
    for rows in table.chunks():
        table.whole(rows, out[rows[0] : rows[-1] + 1])
        report(int(rows[-1]) + 1, table.height)
    return out


def assign(
    call: str, table: Table, weights: Any, forward: Callable[[Any, Any], None]
) -> None:
    """Writes the weights of some rows or of all; see `KVStore.assign`."""
    for rows, values in _by_rows(call, table, weights):
        table.touch(rows)
        forward(rows, values)
        put_rows(table.weights, rows, values)


def _by_rows(
    call: str, table: Table, weights: Any
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Distinct ascending rows and their weights, some at a time."""
    name, is_rows = table.name, isinstance(weights, SelectedRows)
    values = weights.values if is_rows else weights
    wanted.check_not_traced(call, name, "weights", values)
    found = getattr(values, "dtype", None)
    complex_ = found is not None and jnp.issubdtype(found, jnp.complexfloating)
    known = is_rows or isinstance(weights, (np.ndarray, jax.Array))
    if (
        not known
        or weights.shape != table.shape
        or complex_ > (table.dtype.kind == "c")
    ):
        found = (
            f"{found}{list(weights.shape)}" if known else _arguments.kind_of(weights)
        )
        raise TypeError(
            f"{call}: weights for table {name!r} must be a SelectedRows, or an array "
            f"of all rows, of shape {table.shape} and of real numbers where the table "
            f"has them; got {found}."
        )
    values = np.asarray(values)
    if not isinstance(weights, SelectedRows):
        for rows in table.chunks():
            yield rows, values[rows[0] : rows[-1] + 1].astype(table.dtype)
        return
    wanted.check_not_traced(call, name, "ids", weights.rows)
    rows = np.asarray(weights.rows)
    distinct, places, capacity = wanted.slots_of(rows, table.height)
    filled = np.flatnonzero(places < capacity)
    if filled.size != distinct.size:
        raise ValueError(
            f"{call}: a SelectedRows for table {name!r} names rows more than once, "
            "with one weight each. Name each row once; .coalesce() gives the sums."
        )
    order = filled[np.argsort(places[filled])]
    yield distinct, values[order].astype(table.dtype)
