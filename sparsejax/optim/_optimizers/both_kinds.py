"""Transformations of our own: one definition, dense and SelectedRows gradients alike.

Such a transformation is written once, row by row, for arrays whose first axis is the
rows. `both_kinds` makes of it one that takes either kind of gradient: where some leaf
is a SelectedRows it is lifted by `lazy`, which keeps the tree of the state; where none
is, it runs as it is, and all rows move. Inside of another `lazy` it only ever sees
arrays, so nothing is lifted twice.

Below it is what the rules of such transformations share: walking over leaves with
holes, hyperparameters that may be numbers, schedules or traced values, and means over
rows. Arithmetic is in float32 for narrower types, and so is state.
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
from sparsejax.optim._lazy import follow, placement
from sparsejax.optim._lazy.lazy import lazy


_OUT_OF_RANGE = "{call}: {name} must be {wanted}, got {found}."


def both_kinds(
    init: Callable, update: Callable
) -> optax.GradientTransformationExtraArgs:
    """A transformation for dense and SelectedRows gradients of one made for rows.

    Args:
      init: `params -> state`, leaves of the state following the rows of the parameter.
      update: `(updates, state, params) -> (updates, state)`, row by row.

    Returns:
      `optax.GradientTransformationExtraArgs`; extra arguments are ignored.
    """
    by_rows = optax.with_extra_args_support(optax.GradientTransformation(init, update))
    lifted = lazy(by_rows)

    @functools.wraps(update)  # so that messages call it by the name of its maker
    def update_either(updates, state, params=None, **extra_args):
        leaves = jax.tree.leaves(updates, is_leaf=is_selected_rows)
        tx = lifted if any(map(is_selected_rows, leaves)) else by_rows
        return tx.update(updates, state, params, **extra_args)

    @functools.wraps(init)
    def init_beside(params):
        return placement.init_beside(init, params)

    return optax.GradientTransformationExtraArgs(init_beside, update_either)


# ------------------------------------------------------------------ trees


def map_leaves(
    rule: Callable, updates: Any, states: Sequence[Any], params: Any = None
) -> list[Any]:
    """`rule(g, *state leaves, w) -> (update, *state leaves)` at each leaf.

    Where the gradient is a hole (`None`, `optax.MaskedNode`), it stays one and the
    state what it is. `w` is None where no parameters are given.

    Returns:
      The tree of updates and the trees of state.
    """
    leaves, treedef = jax.tree.flatten(updates, is_leaf=follow.is_leaf)
    columns = [treedef.flatten_up_to(state) for state in states]
    none = [None] * len(leaves)
    weights = none if params is None else treedef.flatten_up_to(params)
    results = []
    for g, w, *state in zip(leaves, weights, *columns):
        hole = follow.is_leaf(g)
        results.append((g, *state) if hole else rule(jnp.asarray(g), *state, w))
    count = 1 + len(states)
    return [treedef.unflatten([r[k] for r in results]) for k in range(count)]


def require_params(call: str, why: str, params: Any) -> None:
    """A ValueError where `params` is None."""
    if params is None:
        raise ValueError(
            f"{call}: update was called without params, and {why}. Call "
            "tx.update(grads, state, params)."
        )


def result_dtype(g: jax.Array, w: Any) -> Any:
    """The type of an update: the gradient's, wider where the weights are wider."""
    return g.dtype if w is None else indexing.promote(g.dtype, w.dtype)


# ------------------------------------------------------------------ hyperparameters


def check(call: str, name: str, value: Any, wanted: str, holds: Callable) -> None:
    """A ValueError if `value` is known now and out of its range."""
    if value is None or isinstance(value, str):
        raise TypeError(
            _OUT_OF_RANGE.format(call=call, name=name, wanted=wanted, found=repr(value))
        )
    number = isinstance(value, (int, float, np.ndarray, np.generic))
    if (number or _arguments.is_concrete(value)) and not np.all(holds(value)):
        raise ValueError(
            _OUT_OF_RANGE.format(
                call=call, name=name, wanted=wanted, found=_arguments.show(value)
            )
        )


def check_not_negative(call: str, **values: Any) -> None:
    """A ValueError if one of `values` is known now and negative."""
    for name, value in values.items():
        check(call, name, value, "a number that is not negative", lambda x: x >= 0)


def check_decay_rates(call: str, **values: Any) -> None:
    """A ValueError if one of `values` is known now and not in [0, 1)."""
    for name, value in values.items():
        check(call, name, value, "in [0, 1)", lambda x: (x >= 0) & (x < 1))


def at(value: Any, count: Any) -> Any:
    """A hyperparameter at a step: schedules are asked, numbers stay."""
    return value(count) if callable(value) else value


def like(value: Any, x: jax.Array) -> jax.Array:
    """A number in the type of `x`, so that strict type promotion is content."""
    return jnp.asarray(value).astype(x.dtype)


def bias_correction(decay: Any, count: Any, dtype: Any) -> jax.Array:
    """`1 - decay**count`, also where that is small: a plain power loses 1e-5 of it."""
    if isinstance(decay, (int, float, np.generic)):
        with np.errstate(divide="ignore"):
            log = np.log(np.float64(decay))
    else:
        log = jnp.log(decay)
    return -jnp.expm1(count.astype(dtype) * jnp.asarray(log).astype(dtype))


# ------------------------------------------------------------------ rows


def row_zeros(p: Any, dtype: Any = None) -> jax.Array:
    """One zero for each row of `p`, in a type to sum in unless another is given."""
    return jnp.zeros(jnp.shape(p)[:1], dtype or indexing.accumulator_dtype(p.dtype))


def per_row(x: jax.Array, rows: jax.Array) -> jax.Array:
    """`x` of shape `[V]`, or a scalar, to be multiplied with `rows` `[V, ...]`."""
    return indexing.append_axes(x, rows.ndim) if x.ndim else x


def row_sum(x: jax.Array) -> jax.Array:
    """The sum of each row, `[V, ...] -> [V]`."""
    return jnp.sum(x, axis=tuple(range(1, x.ndim)))


def row_mean(x: jax.Array) -> jax.Array:
    """The mean of each row, `[V, ...] -> [V]`; 0 for rows without elements."""
    width = max(1, int(np.prod(x.shape[1:])))
    return row_sum(x) / like(width, x)


# Guarded by their derivatives and their divisors alone: with a select around the
# result XLA:CPU takes them one by one, and a step of FTRL took 4 times as long.


@jax.custom_jvp
def root(x: jax.Array) -> jax.Array:
    """The square root, with derivative 0 where `x` is 0."""
    return jnp.sqrt(x)


@root.defjvp
def _root_jvp(primals, tangents):
    y = root(*primals)
    positive = y > 0
    slope = like(0.5, y) / jnp.where(positive, y, like(1, y))
    return y, jnp.where(positive, slope, like(0, y)) * tangents[0]


def divide(a: jax.Array, b: jax.Array) -> jax.Array:
    """`a / b`, or `a` where `b` is 0, which is 0 where the two vanish together."""
    return a / jnp.where(b == 0, like(1, b), b)
