"""Tools for writing optimizers.

Write `init` and `update` for arrays whose first axis is the rows, such that each row's
step depends only on that row. `dense_or_rows(init, update, State)` then accepts dense
and SelectedRows gradients. `adagrad.py` is the shortest example.

The optimizers share the rest: a map over leaves, checks of hyperparameters (which may
be numbers, schedules or traced values), and arithmetic on rows. Arithmetic and state
are in float32 for narrower dtypes.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from sparsejax import _arguments
from sparsejax._rows import indexing, is_selected_rows
from sparsejax._rows.arithmetic import root as root
from sparsejax.optim import _checks as checks, _trees as trees
from sparsejax.optim._lazy import state_sharding
from sparsejax.optim._lazy.lazy import lazy


def dense_or_rows(
    init: Callable, update: Callable, kind: type
) -> optax.GradientTransformationExtraArgs:
    """Makes a transformation that accepts dense and SelectedRows gradients.

    If some gradient is a SelectedRows, `lazy` lifts `update` and keeps the structure of
    the state. Otherwise `update` runs directly and updates all rows. Inside another
    `lazy` it is only called with arrays, so nothing is lifted twice.

    Args:
      init: `params -> state`, with leaves that follow the rows of the parameters.
      update: `(updates, state, params) -> (updates, state)`, row by row.
      kind: the type of the state, a NamedTuple with a `count`, which is added to here.

    Returns:
      `optax.GradientTransformationExtraArgs`; extra arguments are ignored.
    """

    @functools.wraps(update)
    def count_and_update(updates, state, params=None):
        updates, new = update(updates, state, params)
        return updates, new._replace(count=optax.safe_increment(state.count))

    dense = optax.GradientTransformation(init, count_and_update)
    dense = optax.with_extra_args_support(dense)
    lifted = lazy(dense)

    @functools.wraps(update)  # errors show the name of the function that made `update`
    def update_either(updates, state, params=None, **extra_args):
        checks.check_state(state, kind)
        leaves, _ = trees.flatten(updates)
        # `lifted` also detects swapped gradients and parameters.
        sparse = any(map(is_selected_rows, (*leaves, *trees.flatten(params)[0])))
        tx = lifted if sparse else dense
        return tx.update(updates, state, params, **extra_args)

    @functools.wraps(init)
    def init_sharded(params):
        return state_sharding.init(init, params)

    return trees.transformation(init_sharded, update_either)


# ------------------------------------------------------------------ trees


def map_leaves(
    rule: Callable, updates: Any, state: Any, params: Any, fields: Sequence[str]
) -> tuple[Any, Any]:
    """Calls `rule(g, w, *fields of the leaf) -> (update, *new fields)` for each leaf.

    Where the gradient or the state is None or `optax.MaskedNode`, both stay unchanged.

    Args:
      rule: called with arrays, and with w None without parameters.
      updates: the gradients.
      state: a NamedTuple.
      params: the parameters, or None.
      fields: names of the fields of the state that are trees like the parameters.

    Returns:
      The updates, and the state with its new fields.
    """
    leaves, treedef = jax.tree.flatten(updates, is_leaf=trees.is_none_or_masked)
    columns = [treedef.flatten_up_to(getattr(state, field)) for field in fields]
    none = [None] * len(leaves)
    weights = none if params is None else treedef.flatten_up_to(params)
    for i, (g, w, *row) in enumerate(zip(leaves, weights, *columns)):
        if not any(map(trees.is_none_or_masked, (g, *row))):
            leaves[i], *row = rule(jnp.asarray(g), w, *row)
            for column, new in zip(columns, row):
                column[i] = new
    new = dict(zip(fields, map(treedef.unflatten, columns)))
    return treedef.unflatten(leaves), state._replace(**new)


def widest_dtype(params: Any) -> Any:
    """Returns the widest accumulator dtype of the leaves, at least float32."""
    dtypes = [indexing.accumulator_dtype(p.dtype) for p in jax.tree.leaves(params)]
    return indexing.promote(jnp.float32, *dtypes)


def result_dtype(g: jax.Array, w: Any) -> Any:
    """Returns an update's dtype: the wider one of the gradient's and the weights'."""
    return g.dtype if w is None else indexing.promote(g.dtype, w.dtype)


# ------------------------------------------------------------------ hyperparameters


def check(name: str, value: Any, wanted: str, holds: Callable) -> None:
    """Raises if `value` is concrete and out of its range."""
    other_kind = value is None or isinstance(value, str)
    fixed = isinstance(value, (int, float, np.generic)) or _arguments.is_concrete(value)
    if other_kind or (fixed and not np.all(holds(value))):
        error = TypeError if other_kind else ValueError
        raise error(f"{name} must be {wanted}, got {_arguments.show(value)}.")


def check_not_negative(**values: Any) -> None:
    """Raises a ValueError if one of `values` is concrete and negative."""
    for name, value in values.items():
        check(name, value, "a non-negative number", lambda x: x >= 0)


def check_decay_rates(**values: Any) -> None:
    """Raises a ValueError if one of `values` is concrete and not in [0, 1)."""
    for name, value in values.items():
        check(name, value, "in [0, 1)", lambda x: (x >= 0) & (x < 1))


def at(value: Any, count: Any) -> Any:
    """Evaluates a hyperparameter, a number or a schedule, at step `count`."""
    return value(count) if callable(value) else value


def like(value: Any, x: jax.Array) -> jax.Array:
    """Casts a number to the dtype of `x`, as strict dtype promotion requires."""
    return jnp.asarray(value).astype(x.dtype)


def bias_correction(decay: Any, count: Any, dtype: Any) -> jax.Array:
    """Returns `1 - decay**count`, accurate if small; a plain power is off by 1e-5."""
    return -jnp.expm1(count.astype(dtype) * jnp.asarray(log(decay)).astype(dtype))


def log(decay: Any) -> Any:
    """Returns the log of a hyperparameter, in float64 if it is a number."""
    if not isinstance(decay, (int, float, np.generic)):
        return jnp.log(decay)
    with np.errstate(divide="ignore"):
        return np.log(np.float64(decay))


# ------------------------------------------------------------------ rows


def zeros(p: Any, dtype: Any = None) -> jax.Array:
    """Makes zeros like `p`, by default in the accumulator dtype."""
    return jnp.zeros_like(p, dtype=dtype or indexing.accumulator_dtype(p.dtype))


def row_zeros(p: Any, dtype: Any = None) -> jax.Array:
    """Makes one zero per row of `p`, by default in the accumulator dtype."""
    return jnp.zeros(jnp.shape(p)[:1], dtype or indexing.accumulator_dtype(p.dtype))


def per_row(x: jax.Array, rows: jax.Array) -> jax.Array:
    """Reshapes `x`, `[V]` or a scalar, to broadcast against `[V, ...]`."""
    return indexing.append_axes(x, rows.ndim) if x.ndim else x


def row_sum(x: jax.Array) -> jax.Array:
    """Sums each row, `[V, ...] -> [V]`."""
    return jnp.sum(x, axis=tuple(range(1, x.ndim)))


def row_mean(x: jax.Array) -> jax.Array:
    """Averages each row, `[V, ...] -> [V]`; 0 for rows without elements."""
    width = max(1, int(np.prod(x.shape[1:])))
    return row_sum(x) / like(width, x)


# Only the denominator is guarded: with a select around the result, XLA:CPU does not
# vectorise the division, and a step of FTRL takes 4 times as long.


def divide(a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns `a / b`, or `a` where `b` is 0; so 0 where both are 0."""
    return a / jnp.where(b == 0, like(1, b), b)


def add_as_two(total: jax.Array, x: jax.Array) -> jax.Array:
    """Returns `total + x`, where a total is the unevaluated sum of two floats.

    Knuth's two-sum: a sum of a million logarithms near zero keeps its last digits.
    """
    high, low = total[0], total[1]
    rounded = high + x
    back = rounded - high
    low = low + ((high - (rounded - back)) + (x - back))
    new = rounded + low
    return jnp.stack([new, low - (new - rounded)])
