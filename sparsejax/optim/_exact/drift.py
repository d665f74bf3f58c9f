r"""Where a row goes while it gets no gradient: the closed form behind `exact`.

Let a coordinate have the weight w, moments m (which move it) and maybe a divisor v
(Adam's `nu`). A step tau without gradient is, for the optimizers that `exact` takes,

    w <- (1 - d_tau) w - sum_m c_tau(v) m,      m <- b_m m,      v <- b_v v

with d_tau the decoupled weight decay (learning rate times decay) and c_tau whatever the
schedule and the bias corrections make of it; for Adam c_tau(v) is of the form
g_tau / (a_tau sqrt(v) + eps). After k such steps the moments are b^k times what they
were, and that is all there is to them. For the weights, let

    D(s, t) = (1 - d_{s+1}) ... (1 - d_t)
    F_t(v)  = sum_{j >= 1} c_{t+j}(b_v^(j-1) v) b_m^(j-1) / D(t, t+j)         (future)

so that F_t(v) m is all that m will ever move the weight by, seen from step t. The sum
of the steps s+1, ..., t is the future at s less what is still future at t:

    w_t = D(s, t) (w_s - F_s(v_s) m_s) + F_t(v_t) m_t                        (advance)

No sum over the skipped steps is left. F_t depends on the step alone, not on the row:
one evaluation a step serves all rows, and a row keeps the one of the step at which it
was last brought up to date, a handful of numbers. (Sums from the past could not be
stored so: they grow like b_m^-t. And log D is summed up as an unevaluated sum of two
floats, since differences are taken of it however long training has run.)

*Evaluating F_t.* The terms fall off as r^j with r = b_m / sqrt(b_v). The replay is
bounded by K = log(TAIL) / log(r) steps (176 for Adam's defaults), which are run all at
once, through the optimizer itself, on a probe of a few coordinates.

*Its dependence on v.* With y = sqrt(v), b_v^(j-1) put into a_j, sigma = eps / a for a
mean a of the a_j, and u = y / (y + sigma), which is in [0, 1],

    F_t(v) (y + sigma) = sum_j h_j / (1 + delta_j u),     1 + delta_j = a_j / a

which is replaced by its interpolant at n Chebyshev nodes. That of 1 / (z - x), at the
roots of the Chebyshev polynomial T_n, is off by T_n(x) / (T_n(z) (z - x)) exactly. So,
with z_j = 1 + 2 / delta_j, for any v >= 0 and eps > 0,

    |error of F_t| <= F_t * max over u of sum_j s_j(u) / |T_n(z_j)|            (bound)

where s_j is the share of term j in F_t. `_exact_model` takes the least n that makes
this at most 2e-7. For Adam's defaults n = 10; the bound is 1e-7 of the drift for rows
last read at the first step, 7e-10 at the tenth, 8e-12 at the hundredth.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sparsejax._rows import indexing
from sparsejax.optim._exact.probe import Rows, Twin


TAIL = 1e-8  # what is left out of the sum over the future, relative to it
LARGE = 1e10  # a root of v beside which eps is nothing


class Model(NamedTuple):
    """What a step without gradient does to one table.

    Args:
      leaves: the leaves of the state that follow the table.
      ratios: what such a step leaves of each.
      movers: positions in `leaves` of those that move the weights.
      divisor: position of the one by whose root they are divided, or None.
      decays: whether weights decay.
      horizon: K, how many steps of the future count.
      terms: n, how many nodes F is interpolated at.
      bound: on the relative error of F.
    """

    leaves: tuple[int, ...]
    ratios: tuple[float, ...]
    movers: tuple[int, ...] = ()
    divisor: int | None = None
    decays: bool = False
    horizon: int = 1
    terms: int = 1
    bound: float = 0.0

    @property
    def columns(self) -> int:
        """How many numbers make up F: those of the decay, sigma, n for each mover."""
        sigma = self.divisor is not None
        return 3 * self.decays + sigma + len(self.movers) * self.terms


# ------------------------------------------------------------------ the future


def future(
    twin: Twin, models: dict[int, Model], state: Any, since: dict[int, Any] | None
) -> dict[int, jax.Array]:
    """F_t of every table, as a vector of `columns` numbers.

    Args:
      twin: runs the optimizer on probes.
      models: by table.
      state: the optimizer's state after step t.
      since: the vectors of step t - 1, from which the decay is summed up; None starts
        at zero.

    Returns:
      By table `[columns]`: the sum of log(1 - d) so far in two parts and the next term,
      sigma, and for each mover the coefficients of F (y + sigma) as a polynomial in
      2 u - 1.
    """
    length = max(m.horizon for m in models.values())
    weights = {i: _weights(m, length, twin.dtype(i)) for i, m in models.items()}
    sigma = {}
    if any(m.divisor is not None for m in models.values()):
        ends = np.array([0.0, LARGE])
        moved = respond(twin, models, state, {i: ends for i in models})
        for i, m in models.items():
            if m.divisor is not None:
                small, large = _split(m, moved[i])[0][:, 0].T
                weight = weights[i][0]
                far = weight @ large * np.asarray(LARGE, large.dtype)
                near = weight @ small
                # Without a learning rate nothing moves, whatever sigma is.
                still = near == 0
                sigma[i] = jnp.where(still, jnp.ones_like(far), far) / jnp.where(
                    still, jnp.ones_like(near), near
                )
    nodes = {i: _nodes(m) for i, m in models.items()}
    roots = {
        i: sigma[i] * np.asarray(u / (1 - u), sigma[i].dtype) if i in sigma else u
        for i, u in nodes.items()
    }
    moved = respond(twin, models, state, roots)
    vectors = {}
    for i, m in models.items():
        by_mover, decay = _split(m, moved[i])
        log_decay = jnp.log1p(-decay)
        parts = []
        if m.decays:
            parts.append(_summed(log_decay[0], None if since is None else since[i]))
        grown = jnp.exp(-jnp.cumsum(log_decay)) if m.decays else None
        if i in sigma:
            parts.append(sigma[i].reshape(1))
        for k in range(len(m.movers)):
            weight = weights[i][k] if grown is None else weights[i][k] * grown
            values = weight @ by_mover[:, k]
            if i in sigma:
                values *= sigma[i] / np.asarray(1 - nodes[i], values.dtype)
                values = _series(values)
            parts.append(values)
        empty = jnp.zeros(0, twin.dtype(i))
        vectors[i] = jnp.concatenate([empty, *parts])
    return vectors


def respond(
    twin: Twin, models: dict[int, Model], state: Any, roots: dict[int, Any]
) -> dict[int, jax.Array]:
    """How far probes move in each of the next K steps, as what is subtracted.

    Args:
      twin, models, state: as for `future`.
      roots: by table `[n]`, roots of the divisor now.

    Returns:
      By table `[K, movers * n + 1]`: each mover, one now, with each of the roots, all
      but the divisor left as they are; and last a weight of one, without moments.
    """
    length = max(m.horizon for m in models.values())
    rows = {i: _probe_rows(twin, i, m, roots[i], length) for i, m in models.items()}
    one = lambda step, rows: twin.step(state, rows, ahead=step)[0]
    moved = jax.vmap(one)(np.arange(length, dtype=np.int32), rows)
    return {i: -x.astype(twin.dtype(i)) for i, x in moved.items()}


def _probe_rows(twin: Twin, table: int, model: Model, roots: Any, length: int) -> Rows:
    dtype, count = twin.dtype(table), len(model.movers)
    places = count * len(roots) + 1
    moments = []
    for k, ratio in enumerate(model.ratios):
        every = jnp.ones(places, dtype)
        fall = np.ones(length)
        if k in model.movers:
            which = np.repeat(np.array(model.movers, int), len(roots))
            every = jnp.asarray(np.append(which == k, False), dtype)
        elif k == model.divisor:
            one = jnp.ones(1, dtype)
            every = jnp.concatenate([*[jnp.asarray(roots, dtype)] * count, one])
            every, fall = jnp.square(every), ratio ** np.arange(length)
        moments.append(every.reshape(1, -1) * jnp.asarray(fall.reshape(-1, 1), dtype))
    weights = jnp.zeros((length, places), dtype).at[:, -1].set(1)
    return Rows(weights, tuple(moments))


def _weights(model: Model, length: int, dtype: Any) -> list[np.ndarray]:
    """b_m^(j-1) for each mover and the steps j = 1, ..., K; zero beyond its horizon."""
    j = np.arange(length, dtype=np.float64)
    left = [model.ratios[k] ** j * (j < model.horizon) for k in model.movers]
    return [np.asarray(x, dtype) for x in left]


def _split(model: Model, moved: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What movers did `[K, movers, roots]`, and the decay d of each step `[K]`."""
    count = len(model.movers)
    roots = (moved.shape[1] - 1) // max(count, 1)
    return moved[:, :-1].reshape(moved.shape[0], count, roots), moved[:, -1]


def _summed(next_term: jax.Array, since: jax.Array | None) -> jax.Array:
    """The sum of log(1 - d) so far, as an unevaluated sum of two, and the next term.

    Differences of this sum are taken over any number of steps, and must not suffer from
    how long training has run.
    """
    if since is None:
        zero = jnp.zeros((), next_term.dtype)
        return jnp.stack([zero, zero, next_term])
    high, low, term = since[0], since[1], since[2]
    small = low + term
    total = high + small
    return jnp.stack([total, small - (total - high), next_term])


# ------------------------------------------------------------------ interpolation


def _nodes(model: Model) -> np.ndarray:
    """Chebyshev nodes in (0, 1); any one where F does not depend on v."""
    if model.divisor is None:
        return np.ones(1)
    k = np.arange(model.terms)
    return (1 + np.cos(np.pi * (k + 0.5) / model.terms)) / 2


def _series(values: jax.Array) -> jax.Array:
    """From values at the nodes to the coefficients of powers of x = 2 u - 1.

    By way of Chebyshev coefficients. To go there loses nothing, and they fall off so
    fast that the large numbers in the second matrix meet small ones only.
    """
    terms = values.shape[0]
    k = np.arange(terms)
    to_chebyshev = np.cos(np.pi * np.outer(k, k + 0.5) / terms) * 2 / terms
    to_chebyshev[0] /= 2
    rows = [np.polynomial.chebyshev.cheb2poly(row) for row in np.eye(terms)]
    to_powers = np.array([np.resize(row, terms) * (k < len(row)) for row in rows]).T
    middle = jnp.asarray(to_chebyshev, values.dtype) @ values
    return jnp.asarray(to_powers, values.dtype) @ middle


def error_bound(size: np.ndarray, scale: np.ndarray, terms: int) -> float:
    """The bound above, for h_j of these relative sizes and these 1 + delta_j."""
    u = np.linspace(0, 1, 33).reshape(-1, 1)
    share = size / (1 + (scale - 1) * u)
    share /= share.sum(axis=1, keepdims=True)
    z = (scale + 1) / np.maximum(np.abs(scale - 1), 1e-12)
    with np.errstate(over="ignore"):  # to infinity: then the term is exact
        return float(np.max(share @ (1 / np.cosh(terms * np.arccosh(z)))))


def horizon(ratio: float) -> int:
    """K for terms that fall off like `ratio`."""
    return 1 if ratio <= TAIL else math.ceil(math.log(TAIL) / math.log(ratio))


# ------------------------------------------------------------------ rows


def remaining(ratio: float, gap: jax.Array, dtype: Any, power: float = 1.0) -> Any:
    """`ratio ** (power * gap)` for each row; None if that is one."""
    if ratio == 1.0:
        return None
    gap = gap.astype(dtype)
    if ratio == 0.0:
        return jnp.where(gap > 0, jnp.zeros((), dtype), jnp.ones((), dtype))
    return jnp.exp(gap * np.asarray(power * math.log(ratio), dtype))


def scale_rows(x: jax.Array, factor: Any) -> jax.Array:
    """Rows times one number each; None leaves them."""
    return x if factor is None else x * _column(factor, x)


def advance(
    model: Model,
    weights: jax.Array,
    moments: Sequence[jax.Array],
    since: jax.Array,
    gap: jax.Array,
    then: jax.Array | None,
    now: jax.Array | None,
) -> jax.Array:
    """Weights brought from step s to step t, by the formula (advance) above.

    Args:
      model: of the table.
      weights: `[n, ...]`, of step s.
      moments: each `[n, ...]`, as stored, of a step before s.
      since: `[n]`, how many steps before s that is.
      gap: `[n]`, t - s; where it is 0 the weights keep their bits.
      then: `[n, columns]`, F_s of each row.
      now: `[columns]`, F_t.

    Returns:
      `[n, ...]`, of the weights' dtype.
    """
    if then is None or now is None:
        return weights
    dtype = indexing.accumulator_dtype(weights.dtype)
    past = moved(model, moments, since, then.T, dtype)
    to_come = moved(model, moments, since + gap, now.reshape(-1, 1), dtype)
    new = weights.astype(dtype) - past
    if model.decays:
        change = now[:2].reshape(1, 2) - then[:, :2]
        new *= _column(jnp.exp(change[:, 0] + change[:, 1]), new)
    new = (new + to_come).astype(weights.dtype)
    return jnp.where(_column(gap > 0, new), new, weights)


def moved(
    model: Model, moments: Sequence[jax.Array], steps: Any, vector: Any, dtype: Any
) -> jax.Array:
    """F m of each coordinate, `steps` after the moments were stored."""
    total = jnp.zeros((), dtype)
    at = 3 * model.decays
    if model.divisor is not None:
        v = moments[model.divisor].astype(dtype)
        fall = remaining(model.ratios[model.divisor], steps, dtype, 0.5)
        y = scale_rows(jnp.sqrt(v), fall)
        inverse = 1 / (y + _column(vector[at], y))
        x = 2 * (y * inverse) - 1
        at += 1
    for k in model.movers:
        m = moments[k].astype(dtype)
        m = scale_rows(m, remaining(model.ratios[k], steps, dtype))
        series = [_column(vector[at + c], m) for c in range(model.terms)]
        if model.divisor is not None:
            m *= _polynomial(series, x) * inverse
        else:
            m *= series[0]
        total, at = total + m, at + model.terms
    return total


def _polynomial(series: Sequence[jax.Array], x: jax.Array) -> jax.Array:
    total = series[-1]
    for c in reversed(series[:-1]):
        total = total * x + c
    return total


def _column(x: jax.Array, like: jax.Array) -> jax.Array:
    """One number for each row (or for all), of the rank of the rows."""
    return x.reshape(x.shape[:1] + (1,) * (like.ndim - 1))
