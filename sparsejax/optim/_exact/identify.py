"""Finds the recurrence of an optimizer by experiment, and verifies it.

The parts of an optax transformation are closures, so nothing can be read out of it.
Instead it is run on probes (see `shadow_model`), as one identifies an unknown system
from its responses:

- The ratio of a moment is the result of a zero-gradient step from a moment of 1.
- If the update is affine in a moment, that moment moves the weights: a first moment.
- If the update depends on a moment but is not affine in it, that moment divides: the
  second moment.
- A change of the weights while all moments are zero is weight decay.

A first step may differ from all later ones, by a flag in the state. So the probes start
from the state of `init`, and also from the state after a few steps of training. Leaves
that are not moments must be constants or step counters from the first step on.

Then the result is verified. The closed form must agree with the optimizer's own
zero-gradient steps, from several step counts on, for small and large values of every
moment. An optimizer that does not agree is refused.
"""

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sparsejax.optim._exact import closed_form
from sparsejax.optim._exact.closed_form import Recurrence
from sparsejax.optim._exact.shadow_model import Probes, ShadowModel, advance_counter
from sparsejax.optim._lazy import judge, state_leaves


WANTED = 2e-7  # relative error of F: about the rounding of float32
ACCEPTED = 2e-6  # where WANTED takes more nodes than float32 can sum
NODES = (2, 4, 6, 8, 10, 12, 16, 20)  # numbers of nodes that are tried
MAX_HORIZON = 4096
COUNTS = np.array([*range(64), *(2 ** np.arange(6, 21))], np.int32)  # step counts tried
LATER_STEPS = 6  # in which flags and counters are observed
VERIFIED_FROM = (1, 40, 5000)  # step counts from which the closed form is verified
VERIFIED_STEPS = 300  # zero-gradient steps that are verified, at most
TOLERANCE = 5e-5  # rounding of 300 steps in float32
TOLERANCE_16_BITS = 0.3


class NotExactError(Exception):
    """The reason why a table cannot be kept exact.

    Args:
      why: what was found.
      leaf: the index of the state leaf that shows it, if one does.
    """

    def __init__(self, why: str, leaf: int | None = None):
        super().__init__(why)
        self.leaf = leaf


def find_recurrence(
    tx: Any, treedef: Any, specs: Sequence[Any], table: int
) -> Recurrence:
    """The recurrence of one table.

    Args:
      tx: the transformation.
      treedef: structure of the parameters, None and MaskedNode counting as leaves.
      specs: its leaves as ShapeDtypeStructs (or None, MaskedNode).
      table: the index of the leaf.

    Raises:
      NotExactError: no recurrence was found; the message gives the reason.
    """
    try:
        return run_concretely(lambda: _find(tx, treedef, specs, table))
    except NotExactError:
        raise
    except Exception as error:
        message = f"{type(error).__name__}: {str(error).strip()}".split("\n")[0]
        raise NotExactError(
            f"it cannot be run on single coordinates of a table ({message})"
        ) from None


def _find(tx, treedef, specs, table) -> Recurrence:
    following = state_leaves.find(tx.init, treedef, specs, [table])
    if table in following.blocked:
        raise NotExactError(*following.blocked[table])
    paths, _ = jax.tree_util.tree_flatten_with_path(following.state)
    names = [jax.tree_util.keystr(path) for path, _ in paths]
    leaves = tuple(k for k, owner in enumerate(following.owners) if owner == table)
    for k in leaves:
        shape = paths[k][1].shape
        if shape != specs[table].shape:
            raise NotExactError(
                f"its state {names[k]} of shape {list(shape)} does not have the "
                f"table's shape {list(specs[table].shape)}",
                k,
            )
    shadow = ShadowModel(tx, treedef, specs, {table: leaves})
    _check_shared_state(shadow, table, leaves, names)
    _check_single_coordinates(shadow, table, leaves)
    moment_names = [names[k] for k in leaves]
    recurrence, decay = _classify_moments(shadow, table, leaves, moment_names)
    recurrence = _choose_horizon_and_nodes(shadow, table, recurrence, decay)
    _verify(shadow, table, recurrence)
    return recurrence


# ------------------------------------------------------------------ finding


def _check_shared_state(
    shadow: ShadowModel, table: int, leaves: tuple[int, ...], names: Sequence[str]
) -> None:
    """State that belongs to no row must not depend on gradients, not even on NaN.

    Flags and integers among it must be constants or step counters.
    """
    dtype = shadow.spec(table).dtype

    def run(gradient):
        state = shadow.init(3)
        moments = tuple(state[k].reshape(-1) for k in leaves)
        probes = {table: Probes(jnp.ones(3, dtype), moments)}
        gradient = {table: gradient}
        _, probes, first = shadow.step(state, probes, gradient=gradient)

        def step(carry, _):
            _, probes, state = shadow.step(*carry, gradient=gradient)
            return (state, probes), state

        _, later = jax.lax.scan(step, (first, probes), None, length=LATER_STEPS)
        return first, later

    run = _compile(run, np.zeros(3, dtype))
    found = [run(np.full(3, g, dtype)) for g in (0, 1, 100, np.nan)]
    plain, *others = (first for first, _ in found)
    for k, name in enumerate(names):
        if k in leaves or jnp.issubdtype(plain[k].dtype, jax.dtypes.prng_key):
            continue
        for first, later in found[:-1]:
            steps = np.stack([first[k], *later[k]])
            by_one = np.arange(len(steps), dtype=np.int64).reshape(
                -1, *[1] * first[k].ndim
            )
            is_float = jnp.issubdtype(steps.dtype, jnp.inexact)
            if not is_float and not any(
                np.array_equal(steps, steps[:1] + by_one * each) for each in (0, 1)
            ):
                raise NotExactError(
                    f"its state {name} is neither a constant nor a count of steps, so "
                    "future steps are not known",
                    k,
                )
        # Clipping by global norm spreads NaN to the moments of other leaves, which is
        # fine. It must not reach counts and flags.
        is_float = jnp.issubdtype(plain[k].dtype, jnp.inexact)
        compared = others[:-1] if is_float else others
        if not all(np.array_equal(plain[k], x[k]) for x in compared):
            raise NotExactError(
                f"its state {name} depends on past gradients, so future steps are not "
                "known",
                k,
            )


def _check_single_coordinates(
    shadow: ShadowModel, table: int, leaves: tuple[int, ...]
) -> None:
    """Without a gradient, no coordinate of a row may depend on others, nor on rows."""
    in_rows, size = _in_rows(shadow, table)
    rng = np.random.default_rng(0)
    values = rng.random((1 + len(leaves), 4 * size)) + 0.5
    # Of other signs, too: a part that uses only signs cannot tell positive numbers
    # apart. The root of a negative one is NaN, in both models. And large ones, which a
    # norm clips.
    signs = rng.choice([-1.0, 1.0], values.shape)

    def run(ahead, values):
        found = []
        for model, count in (shadow, 4 * size), (in_rows, 4 * size), (in_rows, size):
            weights, *moments = values[:, :count].astype(shadow.spec(table).dtype)
            probes = {table: Probes(weights, tuple(moments))}
            # The first step may be another than those that follow.
            state, steps = model.init(count), []
            for _ in range(2):
                moved, after, state = model.step(state, probes, ahead)
                steps.append((moved[table], after[table].moments))
            found.append(steps)
        apart, together, alone = found
        first = jax.tree.map(lambda x: x[:size], together)
        return (together, first), (apart, alone)

    ahead = np.array([0, 5, 0, 5, 0, 5], np.int32)
    cases = values, values * signs, 1e4 * values
    each = np.repeat(np.stack(cases), 2, axis=0).astype(np.float32)
    for k, (a, b) in enumerate(zip(*_compile(jax.vmap(run), ahead, each)(ahead, each))):
        if not all(map(is_close, *map(jax.tree.leaves, (a, b)))):
            others = "others of that row are" if k == 0 else "other rows are"
            raise NotExactError(
                "a step without gradient moves each coordinate of a row by what the "
                f"{others}"
            )


def _in_rows(shadow: ShadowModel, table: int) -> tuple[ShadowModel, int]:
    """The model with rows of several coordinates, and how many those are."""
    rank = len(shadow.spec(table).shape)
    row_shape = (2, 3, *(1,) * rank)[: rank - 1]
    return shadow.with_rows(row_shape), math.prod(row_shape)


def _classify_moments(
    shadow: ShadowModel, table: int, leaves: tuple[int, ...], names: list[str]
) -> tuple[Recurrence, float]:
    """Ratios, first and second moments, decay; and the largest decay of one step."""
    count, dtype = len(leaves), shadow.spec(table).dtype
    # Probes: moments as they are; each moment times 1.5 and times 2; a large weight.
    num_probes = 1 + 2 * count + 1
    scale = np.ones((count, num_probes))
    for k in range(count):
        scale[k, 1 + 2 * k : 3 + 2 * k] = 1.5, 2.0
    weights = np.zeros(num_probes)
    weights[-1] = 2.0**20  # so that its decay is visible next to any momentum

    in_rows, size = _in_rows(shadow, table)
    # Different coordinates: a gradient may be centralized before it makes moments.
    directions = np.linspace(1.0, -0.8, size)

    def run(gradients):
        # Moments as training reaches them. In arbitrary ones the second moment could be
        # below the square of the mean, which some optimizers subtract from it.
        state = in_rows.init(size)
        moments = tuple(state[k].reshape(-1) for k in leaves)
        probes = {table: Probes(jnp.zeros(size, dtype), moments)}

        def step(carry, gradient):
            state, probes = carry
            _, probes, state = in_rows.step(state, probes, gradient={table: gradient})
            return (state, probes), None

        (state, probes), _ = jax.lax.scan(step, (state, probes), gradients)
        # A leaf that training leaves at 0 may still be set by `init`, from the weights.
        reached = (m[:1] for m in probes[table].moments)
        reached = tuple(jnp.where(m == 0, jnp.ones_like(m), m) for m in reached)
        ones = Probes(jnp.zeros(1, dtype), tuple(jnp.ones_like(m) for m in reached))
        tried = tuple(m * jnp.asarray(s, m.dtype) for m, s in zip(reached, scale))
        tried = {table: Probes(jnp.asarray(weights, dtype), tried)}
        left, moved = [], []
        for start in shadow.init(1), state:
            left.append(shadow.step(start, {table: ones})[1][table].moments)
            respond = lambda count, start=start: shadow.step(start, tried, ahead=count)[
                0
            ][table]
            moved.append(jax.vmap(respond)(COUNTS))
        return left, jnp.concatenate(moved)

    signs = np.random.default_rng(0).choice([-1.0, 1.0], 24) * 0.7
    gradients = np.asarray(np.outer(signs, directions), dtype)
    left, moved = _compile(run, gradients)(gradients)
    at_first, ratios = (
        tuple(float(np.asarray(x, np.float64)[0]) for x in each) for each in left
    )
    for k, name, ratio, same in zip(leaves, names, ratios, at_first):
        if not 0 <= ratio <= 1 or ratio != same:
            raise NotExactError(
                f"a step without gradient does not shrink its state {name} by a "
                "constant factor",
                k,
            )
    moved = np.asarray(moved, np.float64)
    base = moved[:, 0]
    span = np.nanmax(np.abs(moved[:, :-1]), initial=0.0)
    rounding = 0.02 if jnp.finfo(dtype).bits < 32 else 1e-4
    first, second = [], []
    for k in range(count):
        more, twice = moved[:, 1 + 2 * k : 3 + 2 * k].T
        if np.array_equal(more, base) and np.array_equal(twice, base):
            continue
        bend = np.abs((twice - more) - (more - base))
        (second if np.max(bend) > rounding * span else first).append(k)
    if len(second) > 1 or (second and not first):
        paths = " and ".join(names[k] for k in second)
        why = f"its update is not linear in the state {paths}"
        raise NotExactError(why, leaves[second[-1]])
    decay = (base - moved[:, -1]) / weights[-1]
    recurrence = Recurrence(
        leaves,
        ratios,
        first_moments=tuple(first),
        second_moment=second[0] if second else None,
        decays=bool(np.any(decay != 0)),
    )
    return recurrence, float(np.max(decay))


def _choose_horizon_and_nodes(
    shadow: ShadowModel, table: int, recurrence: Recurrence, decay: float
) -> Recurrence:
    if not recurrence.first_moments:
        return recurrence
    k = max(recurrence.first_moments, key=lambda k: recurrence.ratios[k])
    slowest, leaf = recurrence.ratios[k], recurrence.leaves[k]
    if recurrence.second_moment is not None:
        slowest /= max(recurrence.ratios[recurrence.second_moment], 1e-30) ** 0.5
    # Weights shrink meanwhile, so a later term counts for more.
    slowest /= max(1 - decay, 1e-30)
    if slowest >= 1:
        raise NotExactError(
            "its momentum does not fade while a row gets no gradient (or not faster "
            "than the second moment that divides it and the weights)",
            leaf,
        )
    steps = closed_form.horizon(slowest)
    if steps > MAX_HORIZON:
        raise NotExactError(
            f"its momentum fades too slowly: {steps} steps would have to be replayed, "
            f"but the limit is {MAX_HORIZON}",
            leaf,
        )
    recurrence = recurrence._replace(horizon=steps)
    if recurrence.second_moment is None:
        return recurrence
    cases = _terms_of_displacement(shadow, table, recurrence)
    if not all(np.all(np.isfinite(scale)) for _, scale in cases):
        raise NotExactError(
            "it divides by the root of a moment with nothing added: eps must not be 0",
            recurrence.leaves[recurrence.second_moment],
        )
    for nodes in NODES:
        bound = max(closed_form.error_bound(*x, nodes=nodes) for x in cases)
        if bound <= (ACCEPTED if nodes == NODES[-1] else WANTED):
            return recurrence._replace(nodes=nodes, bound=bound)
    raise NotExactError(
        "its dependence on the second moment changes too much from step to step: "
        f"interpolation has a relative error of {bound:.1e}, more than {ACCEPTED:g}"
    )


def _terms_of_displacement(
    shadow: ShadowModel, table: int, recurrence: Recurrence
) -> list[tuple[np.ndarray, np.ndarray]]:
    """h_j (relative) and 1 + delta_j, at some step counts, for each first moment."""

    def run(count):
        fresh = [advance_counter(x, count) for x in shadow.init(1)]
        ends = np.array([0.0, closed_form.LARGE])
        recurrences = {table: recurrence}
        return closed_form.zero_gradient_steps(
            shadow, recurrences, fresh, {table: ends}
        )[table]

    counts = np.array([1, 2, 4, 16, 256, 10**5], np.int32)
    moved = _compile(jax.vmap(run), counts)(counts).astype(np.float64)
    growth = 1 / np.cumprod(1 - moved[..., -1], axis=1)
    moved = moved[..., :-1] * growth[..., np.newaxis]
    moments = recurrence.first_moments
    moved = moved.reshape(len(counts), recurrence.horizon, len(moments), 2)
    steps = np.arange(recurrence.horizon)
    cases = []
    for n, k in enumerate(moments):
        powers = recurrence.ratios[k] ** steps
        for near, far in powers * np.moveaxis(moved[:, :, n], 2, 1):
            some = near != 0  # the learning rate schedule may be at zero
            near, far = np.abs(near[some]), np.abs(far[some]) * closed_form.LARGE
            if near.size:
                cases.append((near, near / far * (far.sum() / near.sum())))
    return cases


# ------------------------------------------------------------------ verifying


def _verify(shadow: ShadowModel, table: int, recurrence: Recurrence) -> None:
    """Compares the closed form with zero-gradient steps of the optimizer itself."""
    dtype, wide = shadow.spec(table).dtype, shadow.dtype(table)
    recurrences = {table: recurrence}
    length = min(2 * recurrence.horizon, VERIFIED_STEPS)
    # Roots from far below to far above eps; moments small and large, which shows a clip
    # of the updates; last two rows that only decay, since decay may be clipped, too.
    roots = np.array([0, *10.0 ** np.arange(-3, 5), 1, 1, 1], wide)
    moment = np.array([1, -1, 3, -0.3, 1, 1, 1, 1, 1, 1e6, 0, 0], wide)
    weights = np.array([0, 0, 0, 0, 0, 0, 0, 0, 1, -2, 1, 1e4], dtype)
    n = len(roots)
    fresh = jax.eval_shape(lambda: shadow.init(n))

    def run(count):
        # After one step, because a first step may differ.
        start = shadow.init(n)
        first = tuple(start[k].reshape(-1) for k in recurrence.leaves)
        first = {table: Probes(jnp.asarray(weights), first)}
        state = shadow.step(start, first)[2]
        state = [advance_counter(x, count - 1) for x in state]
        then = closed_form.displacement_coefficients(shadow, recurrences, state, None)
        then = then[table]
        moments = [jnp.ones(n, wide) for _ in recurrence.leaves]
        for k in recurrence.first_moments:
            moments[k] = jnp.asarray(moment)
        if recurrence.second_moment is not None:
            sigma = then[3 * recurrence.decays]
            moments[recurrence.second_moment] = jnp.square(roots * sigma)
        moments = tuple(
            m.astype(fresh[k].dtype) for m, k in zip(moments, recurrence.leaves)
        )
        probes = {table: Probes(jnp.asarray(weights), moments)}

        def step(carry, _):
            state, probes, vector = carry
            _, probes, state = shadow.step(state, probes)
            vector = closed_form.displacement_coefficients(
                shadow, recurrences, state, {table: vector}
            )[table]
            return (state, probes, vector), (probes[table], vector)

        start = state, probes, then
        _, (stepped, now) = jax.lax.scan(step, start, None, length=length)

        old, age = probes[table].weights, jnp.zeros(n, jnp.int32)
        each = jnp.broadcast_to(then, (n, *then.shape))

        def errors(missed, stepped, now):
            missed = age + missed
            new = closed_form.advance(recurrence, old, moments, age, missed, each, now)
            found = [jnp.abs(new.astype(wide) - stepped.weights.astype(wide))]
            for ratio, m, real in zip(recurrence.ratios, moments, stepped.moments):
                left = closed_form.decayed(m.astype(wide), ratio, missed)
                tiny = np.asarray(jnp.finfo(wide).tiny * 1e3, wide)
                off = jnp.abs(left - real.astype(wide)) / (jnp.abs(left) + tiny)
                found.append(off)
            return jnp.stack(found, axis=1)

        # Errors of weights are relative to how far the weight moves. The displacement
        # is far larger if decay is nearly as fast as the moments fade.
        moved = jnp.abs(stepped.weights.astype(wide) - old.astype(wide))
        missed = np.arange(1, length + 1, dtype=np.int32)
        found = jax.vmap(errors)(missed, stepped, now)
        return found, jnp.max(moved, axis=0) + jnp.abs(old).astype(wide)

    run = _compile(run, np.int32(0))
    errors, sizes = zip(*(run(np.int32(count)) for count in VERIFIED_FROM))
    errors, sizes = np.stack(errors), np.stack(sizes).astype(np.float64)
    # A schedule at its end may leave rounding errors where there should be zero.
    sizes = np.maximum(sizes, 1e-3 * np.max(sizes, axis=0))
    errors[..., 0] /= np.where(sizes > 0, sizes, 1)[:, np.newaxis]
    is_16_bits = jnp.finfo(dtype).bits < 32
    tolerance = TOLERANCE_16_BITS if is_16_bits else TOLERANCE
    if not np.max(errors) <= tolerance:  # also where it is NaN
        _, step, _, what = np.unravel_index(np.argmax(errors), errors.shape)
        raise NotExactError(
            f"after {step + 1} steps without gradient the closed form is off by "
            f"{np.max(errors):.1e} of the {'moments' if what else 'weights'}, which "
            "is more than rounding"
        )


# ------------------------------------------------------------------ running


def run_concretely(function: Callable[[], Any]) -> Any:
    """`function()` with JAX's defaults, on the CPU if there is one, even in a trace."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(judge.jax_defaults())
        stack.enter_context(np.errstate(all="ignore"))
        stack.enter_context(jax.debug_nans(False))
        stack.enter_context(jax.debug_infs(False))
        stack.enter_context(jax.transfer_guard("allow"))
        if jax.default_backend() != "cpu":
            with contextlib.suppress(RuntimeError):  # JAX may be set up without a CPU
                device = jax.local_devices(backend="cpu")[0]
                stack.enter_context(jax.default_device(device))
        return function()


def compile_quickly(function: Any, *specs: Any) -> Any:
    """A jitted function compiled without optimization: it runs only a dozen times."""
    lowered = function.lower(*specs)
    try:
        return lowered.compile(compiler_options=COMPILE_QUICKLY)
    except jax.errors.JaxRuntimeError:  # a compiler without that option
        return lowered.compile()


COMPILE_QUICKLY = {"xla_backend_optimization_level": 0}


def is_close(a: Any, b: Any) -> bool:
    """Returns True if arrays are equal; floats may differ by rounding."""
    if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
        with jax.ensure_compile_time_eval():  # also if a step is being traced
            a, b = jax.random.key_data(a), jax.random.key_data(b)
    a, b = np.asarray(a), np.asarray(b)
    if a.shape != b.shape:
        return False
    if not jnp.issubdtype(a.dtype, jnp.inexact):
        return bool(np.array_equal(a, b))
    rounding = 2e-2 if jnp.finfo(a.dtype).bits < 32 else 1e-4
    wide = np.complex128 if np.iscomplexobj(a) else np.float64
    a, b = a.astype(wide), b.astype(wide)
    finite = np.isfinite(a) & np.isfinite(b)
    if not np.array_equal(a[~finite], b[~finite], equal_nan=True):
        return False
    a, b = a[finite], b[finite]
    return bool(np.linalg.norm(a - b) <= rounding * np.linalg.norm(b))


def _compile(function: Callable, *args: Any) -> Callable:
    """`function` compiled ahead of time, so that it runs even inside a trace."""
    specs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in args]
    run = compile_quickly(jax.jit(function), *specs)
    return lambda *args: jax.tree.map(np.asarray, run(*args))
