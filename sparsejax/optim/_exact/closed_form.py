r"""A run of zero-gradient steps in closed form: how `exact` makes up for missed steps.

A row that no batch reads still moves in dense training, because its gradient is zero
but its momentum is not. Replaying the missed steps would cost more the longer a row was
not read. The closed form below costs the same for any number of steps.

**The recurrence.** Take one coordinate of the table, with weight w, first moments m
(a momentum buffer, Adam's `mu`) and possibly a second moment v (Adam's `nu`), whose
square root divides the step. For the optimizers that `exact` accepts, a step t with a
zero gradient is

    w <- (1 - d_t) w - sum_m c_t(v) m,      m <- b_m m,      v <- b_v v

where d_t is the decoupled weight decay (learning rate times decay rate), and c_t holds
the learning rate schedule and the bias corrections. For Adam, c_t(v) has the form
g_t / (a_t sqrt(v) + eps).

**Its solution.** After k steps the moments are b^k times what they were. For the
weights, let

    D(s, t) = (1 - d_{s+1}) ... (1 - d_t)
    F_t(v)  = sum_{j >= 1} c_{t+j}(b_v^(j-1) v) b_m^(j-1) / D(t, t+j)   (displacement)

F_t(v) m is the whole distance that m moves the weight after step t if no gradient ever
comes again. The steps s+1, ..., t contribute that distance as seen from s,
without the part that is still to come at t:

    w_t = D(s, t) (w_s - F_s(v_s) m_s) + F_t(v_t) m_t                   (advance)

There is no sum over the missed steps. F_t depends on the step but not on the row, so it
is evaluated once per step for the whole table. Each row stores F of the step at which
it was last updated, which is a short vector.

Two other forms do not work in floating point. Sums from step 0 up to t grow like
b_m^-t. And log D has to be the unevaluated sum of two floats, because `advance` takes
differences of it, which must stay accurate however long the training runs.

**Evaluating F_t.** The terms of the sum decay like r^j with r = b_m / sqrt(b_v). It is
cut off after K = log(TAIL) / log(r) terms (176 for Adam's defaults). The c_t of these K
steps are computed in one batch, by the program of a step (see `zero_gradient`).

**F_t as a function of v.** With y = sqrt(v), b_v^(j-1) absorbed into a_j,
sigma = eps / a for a mean a of the a_j, and u = y / (y + sigma), which is in [0, 1],

    F_t(v) (y + sigma) = sum_j h_j / (1 + delta_j u),     1 + delta_j = a_j / a

The right-hand side is interpolated in u at n Chebyshev nodes. For 1 / (z - x) and the
roots of the Chebyshev polynomial T_n, the interpolation error is exactly
T_n(x) / (T_n(z) (z - x)). Hence, with z_j = 1 + 2 / delta_j, for all v >= 0 and
eps > 0,

    |error of F_t| <= F_t * max over u of sum_j s_j(u) / |T_n(z_j)|           (bound)

where s_j is the share of term j in F_t. `plan` takes the smallest n for which this is
at most 2e-7. For Adam's defaults n = 10. The bound is then 1e-7 for rows last read at
step 1, 7e-10 at step 10, and 8e-12 at step 100.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sparsejax._rows import indexing
from sparsejax.optim._exact.zero_gradient import ZeroGradientStep
from sparsejax.optim._optimizers import base


TAIL = 1e-8  # relative size of the terms of F that are cut off
LARGE = 1e10  # a sqrt(v) next to which eps is negligible


class Recurrence(NamedTuple):
    """The recurrence of a zero-gradient step of one table, see above.

    Attributes:
      step: the step; it has the moments by number.
      leaves: indices of the optimizer state leaves that are the moments.
      ratios: b, the factor by which such a step multiplies each of them.
      horizon: K, the number of terms of F.
      nodes: n, the number of interpolation nodes.
    """

    step: ZeroGradientStep
    leaves: tuple[int, ...]
    ratios: tuple[float, ...]
    horizon: int = 1
    nodes: int = 1

    @property
    def num_coefficients(self) -> int:
        """Returns the length of `displacement_coefficients`."""
        step = self.step
        has_sigma = step.second_moment is not None
        return 3 * step.decays + has_sigma + len(step.first_moments) * self.nodes


# ------------------------------------------------------------------ F of a step


def displacement_coefficients(
    recurrence: Recurrence, shared: Sequence[Any], previous: Any
) -> jax.Array:
    """Returns F_t of a table, as a vector.

    Args:
      recurrence: of the table.
      shared: the leaves `step.shared` of the optimizer's state, after step t.
      previous: the vector of step t - 1. The sum of log(1 - d) continues from there;
        with None it starts at zero.

    Returns:
      `[num_coefficients]`. With weight decay: the sum of log(1 - d) up to step
      t as two floats, and the next term. With a second moment: sigma. Then for each
      first moment the coefficients of F (y + sigma), a polynomial in 2 u - 1.
    """
    step = recurrence.step
    powers = powers_of_ratios(recurrence).astype(step.dtype)
    nodes = roots = _chebyshev_nodes(recurrence)
    sigma = None
    if step.second_moment is not None:
        _, factors = next_steps(recurrence, shared, np.array([0.0, LARGE]))
        at_zero, at_large = factors[..., 0].T
        far = powers[0] @ at_large * np.asarray(LARGE, at_large.dtype)
        near = powers[0] @ at_zero
        # At a learning rate of zero nothing moves, and any sigma is right.
        sigma = jnp.where(near == 0, jnp.ones_like(far), base.divide(far, near))
        roots = sigma * np.asarray(nodes / (1 - nodes), sigma.dtype)
    decay, factors = next_steps(recurrence, shared, roots)
    parts: list[Any] = [jnp.zeros(0, step.dtype)]
    if step.decays:
        log_decay = jnp.log1p(-decay)
        parts.append(_add_log(log_decay[0], previous))
        powers = powers * jnp.exp(-jnp.cumsum(log_decay))
    if sigma is not None:
        parts.append(sigma.reshape(1))
    for k, power in enumerate(powers):
        values = power @ factors[..., k]
        if sigma is not None:
            values *= sigma / np.asarray(1 - nodes, values.dtype)
            values = _to_powers(values)
        parts.append(values)
    return jnp.concatenate(parts)


def next_steps(
    recurrence: Recurrence, shared: Sequence[Any], roots: Any, start: Any = 0
) -> tuple[jax.Array, jax.Array]:
    """Returns d `[K]` of the next K steps, and c `[K, n, first moments]`.

    Args:
      recurrence, shared: as for `displacement_coefficients`.
      roots: `[n]`, square roots of the second moment before the first of them.
      start: the number of steps from `shared` to the first of them.
    """
    step = recurrence.step
    ahead = np.arange(recurrence.horizon, dtype=np.int32)
    second = jnp.square(jnp.asarray(roots, step.dtype))
    if step.second_moment is not None:
        fall = recurrence.ratios[step.second_moment] ** ahead.reshape(-1, 1)
        second *= np.asarray(fall, step.dtype)
    second = jnp.broadcast_to(second, (len(ahead), len(roots)))
    one = lambda ahead, second: step(shared, ahead, second)[:2]
    decay, factors = jax.vmap(jax.vmap(one, (None, 0)))(start + ahead, second)
    return decay[:, 0], factors


def powers_of_ratios(recurrence: Recurrence) -> np.ndarray:
    """Returns b_m^(j-1), j = 1, ..., K, `[first moments, K]`."""
    ratios = [recurrence.ratios[k] for k in recurrence.step.first_moments]
    return np.reshape(ratios, (-1, 1)) ** np.arange(recurrence.horizon)


def _add_log(next_term: jax.Array, previous: jax.Array | None) -> jax.Array:
    """Returns the sum of log(1 - d) as two floats, unevaluated, and its next term."""
    if previous is None:
        zero = jnp.zeros((), next_term.dtype)
        return jnp.stack([zero, zero, next_term])
    high, low = base.add_as_two(previous[:2], previous[2])
    return jnp.stack([high, low, next_term])


# ------------------------------------------------------------------ interpolation


def _chebyshev_nodes(recurrence: Recurrence) -> np.ndarray:
    """Returns values of u in (0, 1); a single one if F does not depend on v."""
    if recurrence.step.second_moment is None:
        return np.ones(1)
    k = np.arange(recurrence.nodes)
    return (1 + np.cos(np.pi * (k + 0.5) / recurrence.nodes)) / 2


def _to_powers(values: jax.Array) -> jax.Array:
    """Converts values at the nodes to coefficients of powers of x = 2 u - 1.

    This goes through Chebyshev coefficients. Computing those is well conditioned, and
    they decay so fast that the large entries of the second matrix meet only tiny ones.
    """
    n = values.shape[0]
    k = np.arange(n)
    to_chebyshev = np.cos(np.pi * np.outer(k, k + 0.5) / n) * 2 / n
    to_chebyshev[0] /= 2
    rows = [np.polynomial.chebyshev.cheb2poly(row) for row in np.eye(n)]
    to_powers = np.array([np.resize(row, n) * (k < len(row)) for row in rows]).T
    chebyshev = jnp.asarray(to_chebyshev, values.dtype) @ values
    return jnp.asarray(to_powers, values.dtype) @ chebyshev


def error_bound(size: np.ndarray, scale: np.ndarray, nodes: int) -> float:
    """Returns the bound above, given the relative sizes of h_j, and 1 + delta_j."""
    u = np.linspace(0, 1, 33).reshape(-1, 1)
    share = size / (1 + (scale - 1) * u)
    share /= share.sum(axis=1, keepdims=True)
    z = (scale + 1) / np.maximum(np.abs(scale - 1), 1e-12)
    with np.errstate(over="ignore"):  # cosh becomes infinite where the term is exact
        return float(np.max(share @ (1 / np.cosh(nodes * np.arccosh(z)))))


def horizon(ratio: float) -> int:
    """Returns K, for terms that decay like powers of `ratio`."""
    return 1 if ratio <= TAIL else math.ceil(math.log(TAIL) / math.log(ratio))


# ------------------------------------------------------------------ rows


def advance(
    recurrence: Recurrence,
    weights: jax.Array,
    moments: Sequence[jax.Array],
    age: jax.Array,
    missed: jax.Array,
    then: jax.Array,
    now: jax.Array,
) -> jax.Array:
    """Brings rows of weights from step s to step t, by the formula (advance) above.

    Args:
      recurrence: of the table.
      weights: `[n, ...]`, at step s.
      moments: each `[n, ...]`, as stored, at a step that may be before s.
      age: `[n]`, how many steps before s that is.
      missed: `[n]`, t - s. Where it is 0 the weights keep their bits.
      then: `[n, num_coefficients]`, F_s of each row.
      now: `[num_coefficients]`, F_t.

    Returns:
      `[n, ...]`, of the weights' dtype.
    """
    dtype = indexing.accumulator_dtype(weights.dtype)
    from_s = displacement(recurrence, moments, age, then.T, dtype)
    from_t = displacement(recurrence, moments, age + missed, now.reshape(-1, 1), dtype)
    new = weights.astype(dtype) - from_s
    if recurrence.step.decays:
        log_decay = now[:2].reshape(1, 2) - then[:, :2]
        new *= base.per_row(jnp.exp(log_decay[:, 0] + log_decay[:, 1]), new)
    new = (new + from_t).astype(weights.dtype)
    return jnp.where(base.per_row(missed > 0, new), new, weights)


def displacement(
    recurrence: Recurrence,
    moments: Sequence[jax.Array],
    age: Any,
    coefficients: Any,
    dtype: Any,
) -> jax.Array:
    """Returns F(v) m of each coordinate, `age` steps after moments were stored."""
    step = recurrence.step
    total, inverse, x = jnp.zeros((), dtype), jnp.ones((), dtype), None
    at = 3 * step.decays
    if step.second_moment is not None:
        v = moments[step.second_moment].astype(dtype)
        ratio = recurrence.ratios[step.second_moment]
        y = decayed(jnp.sqrt(v), ratio, age, 0.5)
        inverse = 1 / (y + base.per_row(coefficients[at], y))
        x = 2 * (y * inverse) - 1
        at += 1
    for k in step.first_moments:
        m = decayed(moments[k].astype(dtype), recurrence.ratios[k], age)
        series = [
            base.per_row(coefficients[at + c], m) for c in range(recurrence.nodes)
        ]
        polynomial: Any = series[-1]
        for c in reversed(series[:-1]):  # Horner's rule
            polynomial = polynomial * x + c
        m *= polynomial * inverse
        total, at = total + m, at + recurrence.nodes
    return total


def decayed(x: jax.Array, ratio: float, steps: Any, power: float = 1.0) -> jax.Array:
    """Multiplies each row of `x` by `ratio ** (power * steps)` of that row."""
    if ratio == 1.0:
        return x
    steps = steps.astype(x.dtype)
    if ratio == 0.0:
        factor = jnp.where(steps > 0, jnp.zeros((), x.dtype), jnp.ones((), x.dtype))
    else:
        factor = jnp.exp(steps * np.asarray(power * math.log(ratio), x.dtype))
    return x * base.per_row(factor, x)
