"""What `KVStore.push` takes: checks that need no values, so that they come at once."""

from typing import Any

import jax.numpy as jnp

from sparsejax import _arguments
from sparsejax._rows import SelectedRows, concatenate
from sparsejax.store._rows_wanted import check_not_traced
from sparsejax.store._table import Table


def whole_gradient(call: str, table: Table, grads: Any) -> SelectedRows:
    """One SelectedRows for `table`; of a list, with the slots of all."""
    if table.optimizer is None:
        raise ValueError(
            f"{call}: table {table.name!r} was made with tx=None, to be read. Give "
            "init an optax transformation, such as optax.adagrad(0.1)."
        )
    parts = list(grads) if isinstance(grads, (list, tuple)) else [grads]
    if not parts:
        raise ValueError(
            f"{call}: an empty list for table {table.name!r}: give at least one "
            "SelectedRows."
        )
    for part in parts:
        if not isinstance(part, SelectedRows):
            found = _arguments.kind_of(part)
            raise TypeError(
                f"{call}: the gradient for table {table.name!r} must be a SelectedRows "
                f"or a list of them, got {found}. Differentiate with "
                "sparsejax.value_and_grad with respect to the SelectedRows that was "
                "pulled."
            )
        dtype = getattr(part.rows, "dtype", None)
        if dtype is None or not jnp.issubdtype(dtype, jnp.integer):
            found = type(part.rows).__name__ if dtype is None else dtype
            raise TypeError(
                f"{call}: the gradient for table {table.name!r} has rows of type "
                f"{found}, not integers: jax.grad gives no ids, and jax.tree.map "
                "changes them. Use sparsejax.value_and_grad, and SelectedRows.map for "
                "the values alone."
            )
        check_not_traced(call, table.name, "gradients", part.rows, part.values)
        if jnp.issubdtype(part.dtype, jnp.complexfloating):
            found, expected = part.dtype, table.dtype
            raise TypeError(
                f"{call}: the gradient for table {table.name!r} is {found}, and the "
                f"table {expected}. A loss of real numbers has a real gradient: take "
                ".real of it, if that is meant."
            )
        if part.shape != table.shape:
            raise ValueError(
                f"{call}: the gradient for table {table.name!r} has shape "
                f"{part.shape}, and the table {table.shape}: height and row shape must "
                "be the table's."
            )
    return parts[0] if len(parts) == 1 else concatenate(parts)
