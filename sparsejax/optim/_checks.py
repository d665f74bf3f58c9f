"""Argument checks for transformations."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sparsejax import _arguments
from sparsejax._rows import is_quantized, is_selected_rows
from sparsejax.optim import _trees as trees


def is_transformation(x: Any) -> bool:
    """Returns True if `x` has functions `init` and `update`."""
    if callable(x):
        return False  # a callable is a schedule, even if it has init and update
    return callable(getattr(x, "init", None)) and callable(getattr(x, "update", None))


def check_transformation(tx: Any, example: str, hint: str = "") -> None:
    """Raises a TypeError unless `tx` is an optax transformation."""
    if is_transformation(tx):
        return
    kind = _arguments.kind_of(tx)
    if callable(tx):
        kind = f"the function {getattr(tx, '__name__', type(tx).__name__)}"
    raise TypeError(
        f"tx must be an optax transformation, for example {example}, got {kind}.{hint}"
    )


def check_state(state: Any, expected: Any) -> None:
    """Raises a TypeError if a state has lost its types, as in some checkpoints.

    Args:
      state: the state of a transformation.
      expected: the type of the state, a NamedTuple; or what `tx.init` returns, as
        arrays or ShapeDtypeStructs, to check the states inside too.
    """
    kind: Any = expected if isinstance(expected, type) else type(expected)
    fields = getattr(kind, "_fields", None)
    parts: Any = expected
    if fields is not None:
        fits = set(fields) <= set(getattr(state, "_fields", ()))
    elif kind is tuple:
        fits = isinstance(state, tuple) and len(state) == len(parts)
    else:
        fits = not isinstance(parts, Mapping) or isinstance(state, Mapping)
    if not fits:
        raise TypeError(
            f"The optimizer state has {type(state).__name__} in place of "
            f"{kind.__name__}. Pass the state of this transformation; a checkpoint "
            "keeps its types if you restore into tx.init(params)."
        )
    if isinstance(parts, tuple):
        for part_state, part in zip(state, parts):
            check_state(part_state, part)
    elif isinstance(parts, Mapping):
        for key in set(parts) & set(state):
            check_state(state[key], parts[key])


def check_state_rows(
    state: Any,
    owners: Sequence[int | None],
    row_shapes: dict[int, tuple[int, ...]],
) -> None:
    """Raises a ValueError unless the state matches these tables.

    Args:
      state: the state of `tx`.
      owners: for each expected leaf, the table that it follows, or None.
      row_shapes: for each table, the axes of rows of its gradient.
    """
    leaves = jax.tree.leaves(state)
    wrong = None
    for leaf, owner in zip(leaves, owners):
        if owner is None:
            continue
        shape, rows = np.shape(leaf), row_shapes[owner]
        if shape[: len(rows)] != rows:
            rows = " x ".join(map(str, rows))
            wrong = f"a leaf of shape {shape} belongs to a table of {rows} rows"
    if len(leaves) != len(owners):
        wrong = f"it has {len(leaves)} leaves instead of {len(owners)}"
    if wrong:
        raise ValueError(
            f"The state does not match these gradients: {wrong}. Pass the "
            "state that init or the last update returned for these parameters."
        )


def require_params(params: Any, why: str) -> None:
    """Raises a ValueError if `params` is None."""
    if params is None:
        raise ValueError(
            f"update needs params, because {why}. Call tx.update(grads, state, params)."
        )


def check_params(params: Any) -> None:
    """Raises a TypeError for parameters to which no update can be added."""
    leaves, _ = trees.flatten(params)
    for where, leaf in zip(trees.leaf_paths(params, "params"), leaves):
        if is_selected_rows(leaf):
            raise _selected_rows(where)
        if is_quantized(leaf):
            raise TypeError(
                f"{where} is a QuantizedTable, whose rows must be rounded to "
                "their codes after each update. Use "
                "sparsejax.optim.rounding(sparsejax.optim.lazy(tx), key)."
            )


def check_gradients(grads: Any, weights: Sequence[Any] | None) -> None:
    """Raises unless the parameters are arrays that match the SelectedRows in `grads`.

    Args:
      grads: the tree of gradients.
      weights: leaves of the parameters, from `trees.flatten_params`, or None.
    """
    leaves, _ = trees.flatten(grads)
    for i, grad in enumerate(leaves):
        where = lambda name, i=i: trees.leaf_paths(grads, name)[i]
        if weights is not None and is_selected_rows(weights[i]):
            raise _selected_rows(where("params"))
        if not is_selected_rows(grad):
            continue
        wrong = None
        dtype = getattr(grad.rows, "dtype", None)
        if dtype is None or not jnp.issubdtype(dtype, jnp.integer):
            wrong = f"rows are {dtype or type(grad.rows).__name__}, not integers"
        elif not hasattr(grad.values, "dtype"):
            wrong = f"values are {type(grad.values).__name__}, not an array"
        if wrong:
            raise TypeError(
                f"The gradient {where('grads')} is a SelectedRows whose "
                f"{wrong}. Probably jax.tree.map, optax.scale or a mask changed its "
                "ids too. Use SelectedRows.map or g * 0.5 to change the values, and "
                "put optax transformations inside lazy(...), not before it."
            )
        if weights is not None and grad.shape != np.shape(weights[i]):
            raise ValueError(
                f"The SelectedRows gradient {where('grads')} must have the "
                f"shape of its parameter, {np.shape(weights[i])}, got {grad.shape}."
            )


def _selected_rows(where: str) -> TypeError:
    return TypeError(
        f"{where} must be an array, got a SelectedRows. If it is a gradient, call "
        "tx.update(grads, state, params). If its rows were pulled from a table, pass "
        "its .values as the parameter and the gradient of those values, and keep its "
        ".rows to know which rows they are."
    )
