"""What a step without gradient does, found out by taking some, and checked.

Nothing is read out of a transformation, whose parts are closures. Its behaviour on
probes (see `_exact_probe`) tells what `Model` holds: the ratio of every moment is what
a step leaves of a one; a leaf in which the update is affine moves the weights; one in
which it is not is a divisor; what moves weights with no moments is decay. All that was
so found is then *verified*: the closed form must agree with step by step runs of the
transformation, from several clocks, for small and large values of every moment. What
does not agree is refused.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sparsejax.optim._exact import drift as _exact_drift
from sparsejax.optim._exact.drift import Model
from sparsejax.optim._exact.probe import Rows, Twin
from sparsejax.optim._lazy import follow, probe


WANTED = 2e-7  # of F, relative, about what float32 rounds
ACCEPTED = 2e-6  # if that takes more terms than float32 can sum
TERMS = (2, 4, 6, 8, 10, 12, 16, 20)
MOST_STEPS = 4096  # of replay
CLOCKS = np.array([*range(64), *(2 ** np.arange(6, 21))], np.int32)
TRIED_FROM = (1, 40, 5000)  # clocks from which the closed form is verified
LONGEST = 300  # steps without gradient that are verified
TOLERANCE = 5e-5  # of stepping 300 times in float32; half precision is coarser
LOOSE = 0.3


class NotExactError(Exception):
    """Why a table cannot be kept exact."""


def find(tx: Any, treedef: Any, specs: Sequence[Any], table: int) -> Model:
    """The model of one table, or a NotExactError that says why there is none.

    Args:
      tx: the transformation.
      treedef: structure of the parameters, holes counting as leaves.
      specs: ShapeDtypeStructs (or holes) of its leaves.
      table: which leaf.
    """
    try:
        with probe.jax_defaults(), np.errstate(all="ignore"):
            return _find(tx, treedef, specs, table)
    except NotExactError:
        raise
    except Exception as error:
        message = f"{type(error).__name__}: {str(error).strip()}".split("\n")[0]
        raise NotExactError(
            f"it cannot be run on single coordinates of a table ({message})"
        ) from None


def _find(tx, treedef, specs, table) -> Model:
    following = follow.follow(tx.init, treedef, specs, [table])
    if table in following.blocked:
        raise NotExactError(following.blocked[table])
    paths, _ = jax.tree_util.tree_flatten_with_path(following.state)
    paths = [(jax.tree_util.keystr(path), leaf) for path, leaf in paths]
    leaves = tuple(k for k, o in enumerate(following.owners) if o == table)
    for k in leaves:
        path, leaf = paths[k]
        if leaf.shape != specs[table].shape:
            found, shape = list(leaf.shape), list(specs[table].shape)
            raise NotExactError(
                f"its state {path} of shape {found} is not of the table's shape {shape}"
            )
    twin = Twin(tx, treedef, specs, {table: leaves})
    names: list[str] = [path for path, _ in paths]
    _check_clocks(twin, table, leaves, names)
    own_names = [names[k] for k in leaves]
    model, decay = _roles(twin, table, Model(leaves, ()), own_names)
    model = _sized(twin, table, model, decay)
    _verify(twin, table, model)
    return model


# ------------------------------------------------------------------ finding


def _check_clocks(twin: Twin, table: int, leaves: tuple, names: Sequence[str]) -> None:
    """What belongs to no row must not depend on gradients, also not on NaN."""

    def run(gradient):
        state = twin.init(3)
        moments = tuple(state[k].reshape(-1) for k in leaves)
        rows = {table: Rows(jnp.ones(3, twin.spec(table).dtype), moments)}
        return twin.step(state, rows, gradient={table: gradient})[2]

    dtype = twin.spec(table).dtype
    run = _compiled(run, np.zeros(3, dtype))
    plain, *others = (run(np.full(3, g, dtype)) for g in (0, 1, 100, np.nan))
    for k, name in enumerate(names):
        if k in leaves or jnp.issubdtype(plain[k].dtype, jax.dtypes.prng_key):
            continue
        # Where gradients are clipped by their norm, NaN spreads to the moments of other
        # leaves; to counts and flags it may not.
        is_float = jnp.issubdtype(plain[k].dtype, jnp.inexact)
        compared = others[:-1] if is_float else others
        if not all(np.array_equal(plain[k], x[k]) for x in compared):
            raise NotExactError(
                f"its state {name} depends on what the gradients were, so that the "
                "steps ahead are not known"
            )


def _roles(
    twin: Twin, table: int, model: Model, names: list[str]
) -> tuple[Model, float]:
    """Ratios, movers, divisor and decay; and the largest decay of a step."""
    count, dtype = len(model.leaves), twin.spec(table).dtype
    factors = (1.0, 1.5, 2.0)
    rows = 1 + 2 * count + 1  # as it is, each moment 1.5 and 2 fold, with a weight
    scale = np.ones((count, rows))
    for k in range(count):
        scale[k, 1 + 2 * k : 3 + 2 * k] = factors[1:]
    weights = np.zeros(rows)
    weights[-1] = 2.0**20  # so that its decay shows beside any momentum

    def run(signs):
        # Moments as they come about: those of a divisor are then not below the squares
        # of a mean, which some optimizers take off.
        state = twin.init(1)
        moments = tuple(state[k].reshape(-1) for k in model.leaves)
        at = {table: Rows(jnp.zeros(1, dtype), moments)}

        def step(carry, sign):
            state, at = carry
            _, at, state = twin.step(state, at, gradient={table: sign.reshape(1)})
            return (state, at), None

        (_, at), _ = jax.lax.scan(step, (state, at), signs)
        reached = at[table].moments
        fresh = twin.init(1)
        ones = Rows(jnp.zeros(1, dtype), tuple(jnp.ones_like(m) for m in reached))
        left = twin.step(fresh, {table: ones})[1][table].moments
        tried = tuple(m * jnp.asarray(s, m.dtype) for m, s in zip(reached, scale))
        tried = {table: Rows(jnp.asarray(weights, dtype), tried)}
        respond = lambda clock: twin.step(fresh, tried, ahead=clock)[0][table]
        return left, jax.vmap(respond)(CLOCKS)

    signs = np.random.default_rng(0).choice([-1.0, 1.0], 24) * 0.7
    signs = np.asarray(signs, dtype)
    left, moved = _compiled(run, signs)(signs)
    ratios = tuple(float(np.asarray(x, np.float64)[0]) for x in left)
    for name, ratio in zip(names, ratios):
        if not 0 <= ratio <= 1:
            raise NotExactError(
                f"a step without gradient does not shrink its state {name} by a "
                "constant"
            )
    moved = np.asarray(moved, np.float64)
    base = moved[:, :1]
    span = np.nanmax(np.abs(moved[:, :-1]), initial=0.0)
    rounding = 0.02 if jnp.finfo(dtype).bits < 32 else 1e-4
    movers, divisors = [], []
    for k in range(count):
        more, twice = moved[:, 1 + 2 * k : 3 + 2 * k].T
        if np.array_equal(more, base[:, 0]) and np.array_equal(twice, base[:, 0]):
            continue
        bent = np.abs((twice - more) - (more - base[:, 0]))
        (divisors if np.max(bent) > rounding * span else movers).append(k)
    if len(divisors) > 1 or (divisors and not movers):
        paths = " and ".join(names[k] for k in divisors)
        raise NotExactError(f"its update is not linear in the state {paths}")
    decay = (base[:, 0] - moved[:, -1]) / weights[-1]
    model = model._replace(
        ratios=ratios,
        movers=tuple(movers),
        divisor=divisors[0] if divisors else None,
        decays=bool(np.any(decay != 0)),
    )
    return model, float(np.max(decay))


def _sized(twin: Twin, table: int, model: Model, decay: float) -> Model:
    """How many steps, and how many nodes, F needs."""
    if not model.movers:
        return model
    slowest = max(model.ratios[k] for k in model.movers)
    if model.divisor is not None:
        slowest /= max(model.ratios[model.divisor], 1e-30) ** 0.5
    # What moments do later counts more, where weights have shrunk until then.
    slowest /= max(1 - decay, 1e-30)
    if slowest >= 1:
        raise NotExactError(
            "its momentum does not fade while a row gets no gradient (not faster, that "
            "is, than what divides it and than the weights)"
        )
    steps = _exact_drift.horizon(slowest)
    if steps > MOST_STEPS:
        raise NotExactError(
            f"its momentum fades too slowly for a bounded replay: {steps} steps, at "
            f"most {MOST_STEPS}"
        )
    model = model._replace(horizon=steps)
    if model.divisor is None:
        return model
    cases = _terms(twin, table, model)
    if not all(np.all(np.isfinite(scale)) for _, scale in cases):
        raise NotExactError(
            "it divides by the root of a moment with nothing added: eps must not be 0"
        )
    for terms in TERMS:
        bound = max(_exact_drift.error_bound(*x, terms=terms) for x in cases)
        if bound <= (ACCEPTED if terms == TERMS[-1] else WANTED):
            return model._replace(terms=terms, bound=bound)
    raise NotExactError(
        "how its step depends on its second moment changes too much from step to step "
        f"to be interpolated to {ACCEPTED:g} (to {bound:.1e} it can)"
    )


def _terms(twin: Twin, table: int, model: Model) -> list[tuple[np.ndarray, np.ndarray]]:
    """The sizes of h_j and 1 + delta_j, for some clocks and each mover."""

    def run(clock):
        fresh = [_later(x, clock) for x in twin.init(1)]
        ends = np.array([0.0, _exact_drift.LARGE])
        return _exact_drift.respond(twin, {table: model}, fresh, {table: ends})[table]

    clocks = np.array([1, 2, 4, 16, 256, 10**5], np.int32)
    moved = _compiled(jax.vmap(run), clocks)(clocks).astype(np.float64)
    grown = 1 / np.cumprod(1 - moved[..., -1], axis=1)
    moved = moved[..., :-1] * grown[..., np.newaxis]
    moved = moved.reshape(len(clocks), model.horizon, len(model.movers), 2)
    steps = np.arange(model.horizon)
    cases = []
    for n, k in enumerate(model.movers):
        for near, far in model.ratios[k] ** steps * np.moveaxis(moved[:, :, n], 2, 1):
            some = near != 0  # the schedule may be at zero
            near, far = np.abs(near[some]), np.abs(far[some]) * _exact_drift.LARGE
            if near.size:
                cases.append((near, near / far * (far.sum() / near.sum())))
    return cases


# ------------------------------------------------------------------ verifying


def _verify(twin: Twin, table: int, model: Model) -> None:
    """Compares the closed form with steps of the transformation itself."""
    dtype, wide = twin.spec(table).dtype, twin.dtype(table)
    models, length = {table: model}, min(2 * model.horizon, LONGEST)
    # Roots from far below to far above where eps begins to count, moments small and
    # large (a clip of the updates would show), a row that decays and does nothing else.
    roots = np.array([0, *10.0 ** np.arange(-3, 5), 1, 1], wide)
    moment = np.array([1, -1, 3, -0.3, 1, 1, 1, 1, 1, 1e6, 0], wide)
    weights = np.array([0, 0, 0, 0, 0, 0, 0, 0, 1, -2, 1], dtype)
    count = len(roots)

    def run(clock):
        state = [_later(x, clock) for x in twin.init(count)]
        then = _exact_drift.future(twin, models, state, None)[table]
        moments = [jnp.ones(count, wide) for _ in model.leaves]
        for k in model.movers:
            moments[k] = jnp.asarray(moment)
        if model.divisor is not None:
            moments[model.divisor] = jnp.square(roots * then[3 * model.decays])
        moments = tuple(m.astype(s.dtype) for m, s in zip(moments, made))
        rows = {table: Rows(jnp.asarray(weights), moments)}

        def step(carry, _):
            state, rows, vector = carry
            _, rows, state = twin.step(state, rows)
            vector = _exact_drift.future(twin, models, state, {table: vector})[table]
            return (state, rows, vector), (rows[table], vector)

        _, (stepped, now) = jax.lax.scan(step, (state, rows, then), None, length=length)

        old, since = rows[table].weights, jnp.zeros(count, jnp.int32)
        each = jnp.broadcast_to(then, (count, *then.shape))

        def compare(gap, stepped, now):
            gap = since + gap
            new = _exact_drift.advance(model, old, moments, since, gap, each, now)
            off = [jnp.abs(new.astype(wide) - stepped.weights.astype(wide))]
            for ratio, m, real in zip(model.ratios, moments, stepped.moments):
                left = _exact_drift.remaining(ratio, gap, wide)
                left = _exact_drift.scale_rows(m.astype(wide), left)
                tiny = np.asarray(jnp.finfo(wide).tiny * 1e3, wide)
                off.append(jnp.abs(left - real.astype(wide)) / (jnp.abs(left) + tiny))
            return jnp.stack(off, axis=1)

        gaps = np.arange(1, length + 1, dtype=np.int32)
        # What all of the future would move a weight by is what to compare with.
        drift = _exact_drift.moved(model, moments, since, each.T, wide)
        return jax.vmap(compare)(gaps, stepped, now), jnp.abs(drift) + jnp.abs(
            old
        ).astype(wide)

    made = jax.eval_shape(lambda: [twin.init(count)[k] for k in model.leaves])
    run = _compiled(run, np.int32(0))
    errors, sizes = zip(*(run(np.int32(clock)) for clock in TRIED_FROM))
    errors, sizes = np.stack(errors), np.stack(sizes).astype(np.float64)
    # A schedule that has come to its end may leave rounding where there should be zero.
    sizes = np.maximum(sizes, 1e-3 * np.max(sizes, axis=0))
    errors[..., 0] /= np.where(sizes > 0, sizes, 1)[:, np.newaxis]
    tolerance = LOOSE if jnp.finfo(dtype).bits < 32 else TOLERANCE
    if not np.max(errors) <= tolerance:  # also where it is NaN
        _, step, _, what = np.unravel_index(np.argmax(errors), errors.shape)
        what = "weights" if what == 0 else "moments"
        error = (
            f"after {step + 1} steps without gradient the closed form is off by "
            f"{np.max(errors):.1e} of the {what}, which is more than rounding"
        )
        raise NotExactError(error)


def _compiled(function: Callable, *args: Any) -> Callable:
    """`function`, compiled, so that it runs on numbers wherever it is called."""
    specs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in args]
    run = probe.compile_probe(jax.jit(function), *specs)
    return lambda *args: jax.tree.map(np.asarray, run(*args))


def _later(leaf: Any, clock: Any) -> Any:
    """A leaf of a fresh state, `clock` steps later."""
    if not jnp.issubdtype(leaf.dtype, jnp.integer):
        return leaf
    return leaf + jnp.asarray(clock).astype(leaf.dtype)
