"""What `KVStore.push` takes: checks that need no values, so that they come at once."""

from typing import Any

import jax.numpy as jnp

from sparsejax import _ids
from sparsejax._row_arithmetic import concatenate
from sparsejax._rows import SelectedRows
from sparsejax.store._rows_wanted import check_not_traced
from sparsejax.store._table import Table


_READ_ONLY = (
    "{call}: table {name!r} was made with tx=None, to be read. Give init an optax "
    "transformation, such as optax.adagrad(0.1)."
)
_NOT_ROWS = (
    "{call}: the gradient for table {name!r} must be a SelectedRows or a list of them, "
    "got {found}. Differentiate with sparsejax.value_and_grad with respect to the "
    "SelectedRows that was pulled."
)
_NO_PARTS = "{call}: an empty list for table {name!r}: give at least one SelectedRows."
_ROWS_CHANGED = (
    "{call}: the gradient for table {name!r} has rows of type {found}, not integers: "
    "jax.grad gives no ids, and jax.tree.map changes them. Use "
    "sparsejax.value_and_grad, and SelectedRows.map for the values alone."
)
_OTHER_SHAPE = (
    "{call}: the gradient for table {name!r} has shape {found}, and the table "
    "{expected}: height and row shape must be the table's."
)
_COMPLEX = (
    "{call}: the gradient for table {name!r} is {found}, and the table {expected}. A "
    "loss of real numbers has a real gradient: take .real of it, if that is meant."
)


def whole_gradient(call: str, table: Table, grads: Any) -> SelectedRows:
    """One SelectedRows for `table`; of a list, with the slots of all."""
    if table.optimizer is None:
        raise ValueError(_READ_ONLY.format(call=call, name=table.name))
    parts = list(grads) if isinstance(grads, (list, tuple)) else [grads]
    if not parts:
        raise ValueError(_NO_PARTS.format(call=call, name=table.name))
    for part in parts:
        if not isinstance(part, SelectedRows):
            found = _ids.kind_of(part)
            raise TypeError(_NOT_ROWS.format(call=call, name=table.name, found=found))
        dtype = getattr(part.rows, "dtype", None)
        if dtype is None or not jnp.issubdtype(dtype, jnp.integer):
            found = type(part.rows).__name__ if dtype is None else dtype
            raise TypeError(
                _ROWS_CHANGED.format(call=call, name=table.name, found=found)
            )
        check_not_traced(call, table.name, "gradients", part.rows, part.values)
        if jnp.issubdtype(part.dtype, jnp.complexfloating):
            found, expected = part.dtype, table.dtype
            raise TypeError(
                _COMPLEX.format(
                    call=call, name=table.name, found=found, expected=expected
                )
            )
        if part.shape != table.shape:
            raise ValueError(
                _OTHER_SHAPE.format(
                    call=call, name=table.name, found=part.shape, expected=table.shape
                )
            )
    return parts[0] if len(parts) == 1 else concatenate(parts)
