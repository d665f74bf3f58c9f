"""Checks of what a transformation is made of and called with."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sparsejax import _arguments
from sparsejax._rows import is_selected_rows
from sparsejax.optim._lazy import trees
from sparsejax.optim._lazy.optax_internals import is_transformation


def check_transformation(call: str, tx: Any, example: str, hint: str = "") -> None:
    """A TypeError unless `tx` is an optax transformation."""
    if is_transformation(tx):
        return
    found = _arguments.kind_of(tx)
    if callable(tx):
        found = f"the function {getattr(tx, '__name__', type(tx).__name__)}"
    raise TypeError(
        f"{call}: takes an optax transformation such as {example}, got {found}.{hint}"
    )


def check_state(call: str, state: Any, kind: Any) -> None:
    """A TypeError unless `state` has the fields of `kind`."""
    if not all(hasattr(state, field) for field in kind._fields):
        raise TypeError(
            f"{call}: takes the state that its own init or update gave, got "
            f"{_arguments.kind_of(state)}."
        )


def check_state_rows(
    call: str,
    state: Any,
    owners: Sequence[int | None],
    heights: dict[int, int],
) -> None:
    """A ValueError unless the state has the leaves and the rows of these tables.

    Args:
      call: the public name, for messages.
      state: the state of `tx`.
      owners: for each leaf that it should have the table that it follows, or None.
      heights: by table, how many rows its gradient has.
    """
    leaves = jax.tree.leaves(state)
    wrong = None
    for leaf, owner in zip(leaves, owners):
        if owner is not None and np.shape(leaf)[:1] != (heights[owner],):
            wrong = (
                f"a leaf of shape {np.shape(leaf)} belongs to a table of "
                f"{heights[owner]} rows"
            )
    if len(leaves) != len(owners):
        wrong = f"it has {len(leaves)} leaves instead of {len(owners)}"
    if wrong:
        raise ValueError(
            f"{call}: the state does not fit these gradients: {wrong}. Pass the state "
            "that init or the last update gave for these parameters."
        )


def require_params(call: str, params: Any, why: str) -> None:
    """A ValueError if `params` is None."""
    if params is None:
        raise ValueError(
            f"{call}: update was called without params, and {why}. Call "
            "tx.update(grads, state, params)."
        )


def check_gradients(call: str, grads: Any, weights: Sequence[Any] | None) -> None:
    """Errors unless each SelectedRows in `grads` fits its table.

    Args:
      call: the public name, for messages.
      grads: the tree of gradients.
      weights: leaves of the parameters, from `trees.flatten_params`, or None.
    """
    leaves, _ = trees.flatten(grads)
    for i, grad in enumerate(leaves):
        if not is_selected_rows(grad):
            continue
        where = lambda name, i=i: trees.leaf_paths(grads, name)[i]
        wrong = None
        dtype = getattr(grad.rows, "dtype", None)
        if dtype is None or not jnp.issubdtype(dtype, jnp.integer):
            wrong = f"rows are {dtype or type(grad.rows).__name__}, not integers"
        elif not hasattr(grad.values, "dtype"):
            wrong = f"values are {type(grad.values).__name__}, not an array"
        if wrong:
            raise TypeError(
                f"{call}: the gradient {where('grads')} is a SelectedRows whose "
                f"{wrong}. A function over the whole tree (jax.tree.map, optax.scale, "
                "a mask) has changed its row ids too. Use SelectedRows.map or g * 0.5 "
                "to change the values, and put optax transformations inside of "
                "lazy(...), not before it."
            )
        if weights is None:
            continue
        if is_selected_rows(weights[i]):
            raise pulled_table(call, where("params"))
        if grad.shape != np.shape(weights[i]):
            raise ValueError(
                f"{call}: the gradient {where('grads')} is a SelectedRows of shape "
                f"{grad.shape}, but the parameter has shape {np.shape(weights[i])}. "
                "They must be equal."
            )


def pulled_table(call: str, where: str) -> TypeError:
    return TypeError(
        f"{call}: {where} is itself a SelectedRows, a pulled part of a table. An "
        "optimizer needs an array, with state of the same rows. Pass its .values as "
        "the parameter and the gradient of those values, and keep .rows to know which "
        "rows they are."
    )
