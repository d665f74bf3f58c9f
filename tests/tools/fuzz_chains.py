"""Random chains of optax's transformations, and ours, under `lazy` and `exact`.

A chain is data: a tuple of parts `(name, k)`, where k chooses among arguments, and of
wrappers `(name, k, body)`, whose body is a chain. So hypothesis can shorten any chain,
and a failure is one line, which `tests/transform/test_fuzz.py` keeps.

`check` trains by sparsejax and by optax on dense gradients, in float64. A step of
`lazy` must be optax's with the rows that had no gradient put back, a step of `exact`
optax's in all rows, and `judged` compares the verdict with the oracle of `probe`.
`lazy` must accept a chain that works row by row, and `exact` one that its page lists.

Masks and labels are trees or functions of the parameters. On the side of optax they are
trees (`with_trees`). A function that decides by the number of rows may be refused.
"""

# optax's types know trees of arrays only.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportIndexIssue=false, reportOperatorIssue=false

import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from hypothesis import strategies as st
from optax import contrib

import probe
import sparsejax as sj
from fuzz_modes import assert_close, is_close, precisely
from helpers import dense as dense_of
from optimizers import REFUSED, SCHEDULE, SEPARABLE
from sparsejax.optim import _trees as trees
from sparsejax.optim._lazy import separability


# Each number of rows is the length of nothing else.
V, OTHER, D = 13, 9, 3
SHAPES = {"bias": (D,), "kernel": (4, D), "other": (OTHER, D), "table": (V, D)}
HEIGHTS = {"other": OTHER, "table": V}
ALL, DENSE = frozenset(SHAPES), frozenset(SHAPES) - frozenset(HEIGHTS)
STEPS, EXACT_STEPS = 4, 12


# -- parts -----------------------------------------------------------------------------


class Part(NamedTuple):
    """A transformation, or a wrapper of a chain."""

    make: Callable[..., Any]  # of k, and for a wrapper of its body
    moves: bool = False  # it can move rows that get no gradient
    wakes: bool = False  # it moves rows never read: a norm after it may be refused
    norm: bool = False  # the update of a row depends on all rows that have an update
    kept: bool = False  # its state has such a norm: may be refused after one that moves
    refused: bool = False  # it depends on rows without a gradient
    hides: bool = False  # it can undo a refused part in its body
    narrow: bool = False  # it computes in float32, as schedules do
    chooses: bool = False  # it has a mask or labels
    # For a wrapper `(k, body) -> [(chain, names of leaves)]`.
    acts: Callable[..., Any] | None = None
    # Its place in a chain that `exact` must accept: "g" before moments (only clips and
    # scales), "m" makes moments, "w" decays weights, "l" is a learning rate, "s" may be
    # at any place. Empty: it may be refused.
    exact: str = ""


def _one_of(k, *values):
    return values[k % len(values)]


def _rate(k):
    return _one_of(
        k,
        0.1,
        SCHEDULE,
        optax.cosine_decay_schedule(0.1, 8),
        lambda count: 0.1 / (1 + count),
        optax.warmup_cosine_decay_schedule(0.0, 0.1, 2, 8),
        optax.piecewise_constant_schedule(0.2, {2: 0.1}),
    )


# -- masks and labels ------------------------------------------------------------------

# By k, first the rule and then the form, so that `k % len(RULES)` has the first form.
RULES = (
    lambda x: True,
    lambda x: x.ndim > 1,
    lambda x: x.shape[0] >= 10,
    lambda x: x.shape == (V, D),
    lambda x: x.size % 2 == 1,
    lambda x: len(x) in (OTHER, D),
    lambda x: x.dtype == jnp.float32,
    lambda x: np.shape(x)[0] <= OTHER and isinstance(x, ARRAYS),
)
ARRAYS = jax.Array, jax.ShapeDtypeStruct
BY_ROWS, LOOK_AT_SHAPES = {2, 3, 4, 5, 7}, {1, 2, 3}


class _Object:
    def __init__(self, rule):
        self.rule = rule

    def __call__(self, tree):
        return jax.tree.map(self.rule, tree)


def _by_path(names, params):
    is_one = lambda path, x: path[0].key in names
    return jax.tree_util.tree_map_with_path(is_one, params)


FORMS = (
    lambda rule, names: {name: name in names for name in SHAPES},
    lambda rule, names: lambda params: jax.tree.map(rule, params),
    lambda rule, names: functools.partial(jax.tree.map, rule),
    lambda rule, names: _Object(rule),
    lambda rule, names: lambda params: {name: name in names for name in params},
    lambda rule, names: functools.partial(_by_path, names),
)


def decides_by_rows(chain):
    """Return True if a function of the parameters looks at the number of rows."""
    return any(
        (
            PARTS[name].chooses
            and k % len(RULES) in BY_ROWS
            and k // len(RULES) % len(FORMS) in LOOK_AT_SHAPES
        )
        or any(map(decides_by_rows, body))
        for name, k, *body in chain
    )


def _names(k):
    """The leaves that a rule chooses."""
    rule, like = RULES[k % len(RULES)], jax.ShapeDtypeStruct
    return frozenset(x for x, shape in SHAPES.items() if rule(like(shape, jnp.float64)))


def _mask(k):
    """A mask that is true at the leaves `_names(k)`."""
    form = FORMS[k // len(RULES) % len(FORMS)]
    return form(RULES[k % len(RULES)], _names(k))


def _labels(k):
    """The labels "in" and "out" for a mask."""
    mask = _mask(k)
    name = lambda mask: jax.tree.map(lambda m: "in" if m else "out", mask)
    return (lambda params: name(mask(params))) if callable(mask) else name(mask)


def with_trees(chain):
    """The chain with a tree in place of each function of the parameters."""
    return tuple(
        (name, k % len(RULES) if PARTS[name].chooses else k, *map(with_trees, body))
        for name, k, *body in chain
    )


# -- plain parts -----------------------------------------------------------------------


def _make(maker, *args, **options):
    return lambda k: maker(*args, **options)


def _each(module, names, *args, prefix="", **flags):
    """Parts for names that take the same arguments."""
    return {
        prefix + name: Part(_make(getattr(module, name), *args), **flags)
        for name in names.split()
    }


def _adam(k):
    return optax.scale_by_adam(
        b1=_one_of(k, 0.9, 0.8, 0.5),
        b2=_one_of(k, 0.999, 0.99),
        eps=_one_of(k, 1e-8, 1e-3),
        nesterov=k % 4 == 3,
    )


PLAIN = {
    "identity": Part(_make(optax.identity), exact="s"),
    "scale": Part(lambda k: optax.scale(_one_of(k, -0.1, 0.5, -1.0)), exact="s"),
    "clip": Part(lambda k: optax.clip(_one_of(k, 0.1, 0.5, 2.0)), exact="g"),
    "clip_by_global_norm": Part(
        lambda k: optax.clip_by_global_norm(_one_of(k, 0.5, 2.0)), norm=True, exact="g"
    ),
    "scale_by_learning_rate": Part(
        lambda k: optax.scale_by_learning_rate(_rate(k)), narrow=True, exact="l"
    ),
    "scale_by_schedule": Part(
        lambda k: optax.scale_by_schedule(_rate(k)), narrow=True, exact="s"
    ),
    "centralize": Part(_make(optax.centralize), exact="g"),
    **_each(optax, "scale_by_sign set_to_zero"),
    # The state of zero_nans records if any row has NaN.
    **_each(optax, "zero_nans normalize_by_update_norm scale_by_polyak", norm=True),
    **_each(contrib, "normalize", norm=True),
    "reduce_on_plateau": Part(
        lambda k: contrib.reduce_on_plateau(patience=1, cooldown=k % 2)
    ),
    "stateless": Part(
        _make(optax.stateless, lambda g, p: jax.tree.map(lambda g: g * abs(g), g))
    ),
}

MOVING = {
    "trace": Part(
        lambda k: optax.trace(_one_of(k, 0.9, 0.5, 0.3), nesterov=k % 4 > 1), exact="m"
    ),
    "scale_by_adam": Part(_adam, exact="m"),
    "scale_by_rms": Part(
        lambda k: optax.scale_by_rms(_one_of(k, 0.9, 0.99), initial_scale=k % 2),
        exact="m",
    ),
    "scale_by_rss": Part(lambda k: optax.scale_by_rss(_one_of(k, 0.1, 0.5)), exact="m"),
    "add_decayed_weights": Part(
        lambda k: optax.add_decayed_weights(
            _one_of(k, 0.1, 0.01), mask=_mask(k) if k % len(RULES) else None
        ),
        exact="w",
        chooses=True,
    ),
    "ema": Part(lambda k: optax.ema(_one_of(k, 0.9, 0.5), debias=k % 2 == 0)),
    "bfloat16_mu": Part(_make(optax.scale_by_adam, mu_dtype=jnp.bfloat16)),
    **_each(optax, "scale_by_rprop", 0.1),
    **_each(contrib, "scale_by_madgrad", 0.1),
    **_each(optax, "keep_params_nonnegative"),
    "pull_to_zero": Part(
        _make(optax.stateless_with_tree_map, lambda g, p: g + 0.1 * p)
    ),
    **_each(
        optax,
        "scale_by_adadelta scale_by_adamax scale_by_adan scale_by_amsgrad "
        "scale_by_belief scale_by_lion scale_by_radam scale_by_optimistic_gradient "
        "scale_by_stddev",
    ),
    **_each(optax, "scale_by_novograd", kept=True),
    **_each(optax, "scale_by_yogi", wakes=True),  # its moments start at 1e-6
    **_each(
        contrib,
        "scale_by_acprop scale_by_ademamix scale_by_adopt scale_by_cocob "
        "scale_by_simplified_ademamix",
    ),
    **_each(
        sj.optim,
        "adagrad group_adagrad rowwise_adagrad rowwise_adam row_count_adam "
        "partial_rowwise_lamb weight_decay",
        0.1,
        prefix="sj.",
    ),
    "sj.ftrl": Part(lambda k: sj.optim.ftrl(0.1, 1.0, 0.05 * (k % 3), 0.1 * (k % 2))),
    "sj.ema": Part(_make(sj.optim.ema, 0.9)),
}

# Whole optimizers, of which the page of `exact` names some.
NAMED_BY_EXACT = "sgd momentum nesterov adam adamw nadam nadamw rmsprop adagrad".split()
WHOLE = {
    f"{name}()": Part(
        lambda k, make=make: make(),
        norm="norm" in name,
        wakes=name == "yogi",
        kept=name == "novograd",
        # A schedule is a number of float32.
        narrow=name in ("schedule", "inject_hyperparams", "named_chain"),
        exact="m" if name in NAMED_BY_EXACT else "",
    )
    for name, make in SEPARABLE.items()
}

REFUSED_PARTS = {
    f"{name}()": Part(lambda k, make=REFUSED[name][0]: make(), refused=True)
    for name in (
        "lamb lars fromage injected_lamb adaptive_grad_clip clip_by_block_rms prodigy "
        "dadapt_adamw dog dowg sm3 muon momo momo_adam noisy_sgd apply_every "
        "multi_steps_transformation"
    ).split()
}
# A rule that nothing can replace: it differs for one row and for all.
REFUSED_PARTS["hidden_rule"] = Part(
    _make(optax.stateless_with_tree_map, lambda g, p: -g if len(g) > 4 else g),
    refused=True,
)


# -- wrappers --------------------------------------------------------------------------


def _masked_by_user(k, body):
    """A wrapper of a user that calls the function itself; an object is refused."""
    inner, mask = build(body), _mask(k)
    mask = mask.__call__ if isinstance(mask, _Object) else mask
    of = lambda tree: optax.masked(inner, mask(tree) if callable(mask) else mask)

    def update(updates, state, params=None, **extra_args):
        return of(updates).update(updates, state, params, **extra_args)

    return optax.GradientTransformationExtraArgs(lambda p: of(p).init(p), update)


def _partition(k, body):
    return optax.partition({"in": build(body), "out": build(body[1:])}, _labels(k))


def _injected(k, body):
    def make(learning_rate):
        return optax.chain(build(body), optax.scale(-learning_rate))

    return optax.inject_hyperparams(make)(_rate(k))


_chosen = lambda k, body: [(body, _names(k))]
_split = lambda k, body: [(body, _names(k)), (body[1:], ALL - _names(k))]
_at_even_steps = lambda step, **extra_args: step % 2 == 0
WRAPPERS = {
    "chain": Part(lambda k, body: build(body), exact="s"),
    "named_chain": Part(
        lambda k, body: optax.named_chain(
            *((str(n), build([part])) for n, part in enumerate(body))
        ),
        exact="s",
    ),
    "inject_hyperparams": Part(_injected, narrow=True, exact="l"),
    "masked": Part(
        lambda k, body: optax.masked(build(body), _mask(k)), chooses=True, acts=_chosen
    ),
    "masked_by_user": Part(_masked_by_user, chooses=True, acts=_chosen),
    "partition": Part(_partition, chooses=True, acts=_split),
    "apply_if_finite": Part(lambda k, body: optax.apply_if_finite(build(body), 1)),
    "conditionally_transform": Part(
        lambda k, body: optax.conditionally_transform(build(body), _at_even_steps)
    ),
    "conditionally_mask": Part(
        lambda k, body: optax.conditionally_mask(build(body), _at_even_steps)
    ),
    "flatten": Part(
        lambda k, body: optax.flatten(build(body)), refused=True, hides=True
    ),
    "MultiSteps": Part(
        lambda k, body: optax.MultiSteps(build(body), 2).gradient_transformation(),
        refused=True,
    ),
}

MOVING = {k: part._replace(moves=True) for k, part in {**MOVING, **WHOLE}.items()}
PARTS = {**PLAIN, **MOVING, **REFUSED_PARTS, **WRAPPERS}


def build(chain, wrap=lambda tx: tx):
    """The transformation that a chain is, with `wrap` around each part."""
    made = [wrap(PARTS[name].make(*rest)) for name, *rest in chain]
    return made[0] if len(made) == 1 else optax.chain(*made)


def _flat(chain, names=ALL):
    """The parts of a chain with the leaves that they act on, in order."""
    for name, *rest in chain:
        yield name, names
        if len(rest) == 2:
            acts = PARTS[name].acts or (lambda k, body: [(body, ALL)])
            for body, some in acts(*rest):
                yield from _flat(body, some & names)


def is_refused(chain):
    """Return True if a part depends on rows of a table without a gradient."""
    return any(
        PARTS[name].refused and names & HEIGHTS.keys() for name, names in _flat(chain)
    )


def has(chain, *flags):
    """Return True if there are parts with these flags, in this order."""
    for name, _ in _flat(chain):
        if flags and getattr(PARTS[name], flags[0]):
            flags = flags[1:]
    return not flags


def may_be_refused(chain):
    """Return True if `lazy` may refuse a chain that works row by row."""
    woken, kept = has(chain, "wakes", "norm"), has(chain, "moves", "kept")
    order = " ".join(name for name, _ in _flat(chain))
    not_a_number = re.search(r"set_to_zero .*\bnormalize\b", order)  # 0 / 0 in all rows
    return bool(woken or kept or not_a_number or decides_by_rows(chain))


def must_be_exact(chain):
    """Return True if `exact` accepts a chain, by its page."""

    def places(chain):
        for name, *rest in chain:
            part = PARTS[name]
            if part.acts or not part.exact:
                yield "?"
                return
            if len(rest) == 2:
                yield from places(rest[1])
            yield part.exact

    # Weights decay, and do not grow, if their decay is multiplied only by the rate.
    return bool(re.fullmatch("[gsl]*m?([sl]*|wl)", "".join(places(chain))))


# -- the problem -----------------------------------------------------------------------


def parameters():
    rng = np.random.default_rng(7)
    return {k: jnp.asarray(rng.standard_normal(s)) for k, s in SHAPES.items()}


def rows_read(step):
    """Some of the first rows of each table, four or three; the others never."""
    rng = np.random.default_rng(step)
    return {"table": rng.permutation(8)[:4], "other": rng.permutation(5)[:3]}


def gradients(step, is_finite=True):
    """`(gradients, the same as arrays)`: duplicates, and empty slots with NaN."""
    rng = np.random.default_rng(100 + step)
    sparse = {k: jnp.asarray(rng.standard_normal(SHAPES[k])) for k in DENSE}
    dense = dict(sparse)
    for name, distinct in rows_read(step).items():
        height = HEIGHTS[name]
        rows = np.array([*distinct, *distinct[:2], height, -1])
        values = rng.standard_normal((len(rows), D))
        if step % 2:  # the duplicates of a row cancel
            values[len(distinct)] = -values[0]
        if step == 2 and not is_finite:
            values[1, 0] = np.inf
        values[-2:] = np.nan
        order = rng.permutation(len(rows))
        rows, values = rows[order].astype(np.int32), values[order]
        sparse[name] = sj.SelectedRows(jnp.asarray(rows), jnp.asarray(values), height)
        dense[name] = jnp.asarray(dense_of(rows, values, height))
    return sparse, dense


# -- training --------------------------------------------------------------------------


def _by_table(x, rows):
    """The rows of a leaf of parameters or state that were read, or None if dense."""
    heights = {HEIGHTS[name]: own for name, own in rows.items()}
    return heights.get(x.shape[0]) if np.ndim(x) else None


def _put(before, after, rows):
    """`before` with these rows as in `after`, which has them all or has only them."""

    def one(old, new):
        own = _by_table(old, rows)
        if own is None:
            return new
        new = new if new.shape[0] == len(own) else new[own]
        return old.at[own].set(new.astype(old.dtype))

    return jax.tree.map(one, before, after)


def _cut(tree, rows):
    def one(x):
        own = _by_table(x, rows)
        return x if own is None else x[own]

    return jax.tree.map(one, tree)


EXTRA = {"value": 1.5}


def _optax_step(tx, params, state, grads):
    tx = optax.with_extra_args_support(tx)
    updates, state = tx.update(grads, state, params, **EXTRA)
    return optax.apply_updates(params, updates), state


def _expected(tx, params, state, grads, rows, on_rows):
    """A step of optax, on all rows or on these, with the other rows put back."""
    args = params, state, grads
    args = _cut(args, rows) if on_rows else args
    return _put((params, state), _optax_step(tx, *args), rows)


# Dtypes of state stay, although optax may promote them.
_assert_equal = functools.partial(assert_close, same_types=False)


def _assert_bits(old, new, rows, what):
    """Rows that were not read keep their bits."""
    for x, y in zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True):
        own = _by_table(x, rows)
        if own is not None:
            others = np.setdiff1d(np.arange(x.shape[0]), own)
            a, b = np.asarray(x)[others], np.asarray(y)[others]
            assert a.tobytes() == b.tobytes(), what


def _nudged(tree):
    """A tree that differs by 1e-12, also among equal numbers."""
    by = lambda x: 1e-12 * np.cos(np.arange(x.size)).reshape(x.shape)
    return jax.tree.map(lambda x: x * (1 + by(x).astype(x.dtype)), tree)


def _nudging(tx):
    """The transformation with nudged updates: a sign hides the nudge of a gradient."""
    update = optax.with_extra_args_support(tx).update

    def nudge(*args, **extra_args):
        updates, state = update(*args, **extra_args)
        return _nudged(updates), state

    return optax.GradientTransformationExtraArgs(tx.init, nudge)


def _lazy(chain, jit=jax.jit, is_finite=True, every=1):
    """Compares a step for each `every` gradients."""
    tx, lifted = build(with_trees(chain)), sj.optim.lazy(build(chain))
    params = parameters()
    sparse, _ = gradients(0)
    update = lambda: lifted.update(sparse, lifted.init(params), params, **EXTRA)
    refused = is_refused(chain)
    try:
        jax.eval_shape(update)
    except ValueError as error:
        assert refused or may_be_refused(chain), error
        return "refused"
    assert not refused or has(chain, "hides"), "not refused"
    on_rows = has(chain, "moves", "norm") and not refused
    # A norm after a part that moves rows that were never read counts empty slots. It
    # is refused if the count exceeds the rounding of float32.
    coarse = has(chain, "narrow") or has(chain, "wakes", "norm")
    tolerance = 1e-6 if coarse else 1e-9
    ours, inner = lifted, lambda state: state
    if every > 1:
        capacity = {k: HEIGHTS.get(k) for k in SHAPES}
        ours = sj.optim.accumulate(lifted, every, capacity)
        inner = lambda state: state.inner_opt_state

    @jit
    def step_of_ours(params, state, grads):
        updates, state = ours.update(grads, state, params, **EXTRA)
        return optax.apply_updates(params, updates), state

    def theirs(tx):
        return jit(functools.partial(_expected, tx, on_rows=on_rows))

    expected = theirs(tx)
    state = ours.init(params)
    for step in range(0, STEPS, every):
        what, steps = f"step {step}", range(step, step + every)
        grads = [gradients(k, is_finite) for k in steps]
        read = [rows_read(k) for k in steps]
        rows = {k: functools.reduce(np.union1d, [x[k] for x in read]) for k in HEIGHTS}
        mean = jax.tree.map(lambda *x: sum(x) / every, *(dense for _, dense in grads))
        old = params, inner(state)
        for sparse, _ in grads:
            params, state = step_of_ours(params, state, sparse)
        new, want = (params, inner(state)), expected(*old, mean, rows)
        _assert_bits(old, new, rows, what)
        try:
            _assert_equal(new, want, tolerance, what)
        except AssertionError:
            # A change of 1e-12 changes the result by a sign or a branch.
            step_of_nudged = theirs(build(with_trees(chain), _nudging))
            nudged = step_of_nudged(_nudged(old[0]), old[1], _nudged(mean), rows)
            if not is_close(nudged, want, tolerance, same_types=False):
                return "skipped"
            raise
    return "compared"


def _exact(chain):
    """As dense training, at every step; one table has dense gradients."""
    tx, tables = build(with_trees(chain)), {k: k == "table" for k in SHAPES}
    ours = sj.optim.exact(build(chain), tables=tables)
    params = dense_params = parameters()
    dense_state = tx.init(params)
    try:
        state = ours.init(params)
    except ValueError as error:
        assert decides_by_rows(chain) or not must_be_exact(chain), error
        if chain != with_trees(chain) and not decides_by_rows(chain):
            assert _exact(with_trees(chain)) == "refused", error
        return "refused"

    @jax.jit
    def step_of_both(params, state, dense_params, dense_state, sparse, dense):
        ids = {"table": sparse["table"].rows}
        params, state = ours.catch_up(params, state, ids)
        updates, state = ours.update(sparse, state, params, **EXTRA)
        params = optax.apply_updates(params, updates)
        flushed, at_flush = ours.flush(params, state)
        dense = _optax_step(tx, dense_params, dense_state, dense)
        return (params, state), dense, (flushed, at_flush.inner)

    for step in range(EXACT_STEPS):
        sparse, dense = gradients(step % 3 * 2 if step % 4 else 1)
        sparse["other"] = dense["other"]
        (params, state), (dense_params, dense_state), flushed = step_of_both(
            params, state, dense_params, dense_state, sparse, dense
        )
        try:
            _assert_equal(flushed, (dense_params, dense_state), 1e-5, f"step {step}")
        except AssertionError:
            # After 0 / 0 in a norm, optax has NaN in all rows, `exact` in those read.
            dense = jax.tree.leaves((dense_params, dense_state))
            if any(np.isnan(x).all() for x in dense if x.shape[:1] == (V,)):
                return "skipped"
            raise
    return "compared"


def _judged(chain):
    """The verdict, read from the program, and the oracle, which runs it, agree."""
    leaves, treedef = trees.flatten(parameters())
    specs, table = tuple(map(trees.to_spec, leaves)), sorted(SHAPES).index("table")
    verdict = separability.judge(build(chain), treedef, specs, (table,))
    refused = verdict.refused
    differs = probe.failure(build(with_trees(chain)), treedef, specs, table)
    may_be = differs or is_refused(chain) or may_be_refused(chain)
    assert not refused or may_be, refused[table]
    # A norm after a part that moves rows without a gradient counts only read rows.
    assert refused or not differs or has(chain, "moves", "norm"), (
        f"not refused: {differs}"
    )
    return "refused" if refused else "compared"


MODES: dict[str, Any] = {
    "jitted": _lazy,
    "eager": functools.partial(_lazy, jit=lambda f: f),
    "not_finite": functools.partial(_lazy, is_finite=False),
    "accumulated": functools.partial(_lazy, every=2),  # one step for two gradients
    "exact": _exact,
    "judged": _judged,
}


def check(chain, how="jitted"):
    """Raises if sparsejax and optax differ on a chain.

    Returns:
      "compared"; "refused", if a refusal is right; or "skipped", if optax refuses the
      chain, or its result depends on the last digits.
    """
    with precisely():
        try:
            params, dense = parameters(), gradients(0)[1]
            for tx in (build(chain), build(with_trees(chain))):
                step = lambda p, tx=tx: _optax_step(tx, p, tx.init(p), dense)
                jax.eval_shape(step, params)
        except Exception:
            return "skipped"
        try:
            return MODES[how](chain)
        except ValueError as error:  # another number of rows at a step than at init
            if decides_by_rows(chain) and "the number of rows" in str(error):
                return "refused"
            raise


# -- hypothesis ------------------------------------------------------------------------

_k = st.integers(0, len(RULES) * len(FORMS) - 1)


_parts = lambda names: st.tuples(st.sampled_from(sorted(names)), _k)
_with_body = lambda body: st.tuples(st.sampled_from(sorted(WRAPPERS)), _k, body)
_in_order = lambda *lists: st.tuples(*lists).map(lambda x: tuple(sum(x, [])))


def _up_to(most, names, least=0):
    return st.lists(_parts(names), min_size=least, max_size=most)


_any = st.one_of(*[_parts([*PLAIN, *MOVING])] * 12, _parts(REFUSED_PARTS))
_short = st.lists(_any, min_size=1, max_size=3).map(tuple)
# As people write them.
_usual = _in_order(
    _up_to(2, PLAIN),
    _up_to(1, MOVING, least=1),
    _up_to(2, [*PLAIN, "add_decayed_weights"]),
)
_of_exact = _in_order(
    _up_to(2, ["clip", "clip_by_global_norm", "scale", "centralize"]),
    _up_to(1, [n for n in MOVING if MOVING[n].exact == "m"], least=1),
    _up_to(2, ["add_decayed_weights", "scale", "scale_by_learning_rate"]),
)
_bodies = st.one_of(_usual, _short)
_mixed = st.lists(
    st.one_of(_any, _with_body(_bodies), _with_body(st.tuples(_with_body(_bodies)))),
    min_size=1,
    max_size=4,
).map(tuple)


def _wrapped(chain):
    names = sorted(n for n in WRAPPERS if not WRAPPERS[n].refused)
    wrapper = st.tuples(st.sampled_from(names), _k, chain)
    return st.one_of(chain, chain, st.tuples(wrapper))


_lazy_modes = st.sampled_from(
    ["jitted", "jitted", "eager", "eager", "not_finite", "accumulated", "judged"]
)
cases = st.one_of(
    st.tuples(st.one_of(_mixed, _wrapped(_usual)), _lazy_modes),
    st.tuples(st.one_of(_wrapped(_of_exact), _wrapped(_usual)), st.just("exact")),
)
