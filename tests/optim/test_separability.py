"""Which transformations of users may be lifted, which are exact, and who is to blame.

`test_optax_table.py` has all of optax's, and compares the verdict with an oracle.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from helpers import assert_trees_close, ones, to_dense
from optimizers import LR, SCHEDULE, make_grads, make_params, step
from sparsejax import SelectedRows
from sparsejax.optim import is_lazy_exact, is_row_separable, lazy, rowwise_adagrad


pytestmark = pytest.mark.usefixtures("loose_promotion")

zeros = functools.partial(np.zeros, dtype=np.float32)
PARAMS = {"table": zeros((50, 6)), "bias": zeros(6)}
ADAM, LAMB, LARS = optax.adam(LR), optax.lamb(LR), optax.lars(LR)
TRUST_RATIO = "because of scale_by_trust_ratio"
CLIP, NORM = optax.clip_by_global_norm(1.0), optax.normalize_by_update_norm()


def assert_refused(tx, words, params=PARAMS):
    assert not is_row_separable(tx, params)
    with pytest.raises(ValueError, match=words):
        lazy(tx).init(params)


@pytest.mark.parametrize("ask", [is_row_separable, is_lazy_exact])
def test_questions_never_raise(ask):
    for junk in (None, 5, "adam", lambda x: x, optax.adam, optax):
        assert not ask(junk) and not ask(junk, {"table": jnp.zeros((3, 2))})


# ------------------------------------------------------------------ users' own


def _user(update, init=lambda params: ()):
    return optax.GradientTransformation(init, update)


def raises(updates, state, params=None):
    raise RuntimeError("no such thing")


def counted_once(updates, state, params=None):
    return updates, (*state, 1)


def rows_to_heights(updates, state, params=None):
    return updates | {"heights": updates["table"][:, 0]}, state


def mean_over_rows(updates, state, params=None):
    return jax.tree.map(lambda g: g - jnp.mean(g, axis=0), updates), state


def largest_row(updates, state, params=None):
    largest = [jnp.max(jnp.abs(p)) for p in jax.tree.leaves(params)]
    return updates, jnp.maximum(state, jnp.max(jnp.stack(largest)))


def test_users_own_transformations_are_judged_and_named():
    assert_refused(_user(raises), "cannot run on rows.*no such thing")
    words = "because of counted_once.*cannot run.*another structure"
    assert_refused(_user(counted_once), words)
    heights = PARAMS | {"heights": zeros(50)}
    words = "dense leaf has rows of the table"
    assert_refused(_user(rows_to_heights), words, heights)
    words = r"mean_over_rows: div by a number that depends on .*separability.py:\d+"
    assert_refused(optax.chain(ADAM, _user(mean_over_rows)), words)
    words = "largest_row: reduce_max of weights over all rows"
    assert_refused(_user(largest_row, lambda params: jnp.zeros(())), words)


def _of_leaf(f, init=lambda w: None):
    """A transformation `f(gradient, weights, state) -> (update, state)` of a leaf."""

    def update(updates, state, params):
        leaves, treedef = jax.tree.flatten(updates)
        args = leaves, jax.tree.leaves(params), state
        found = [f(*x) for x in zip(*args)]
        return treedef.unflatten([u for u, _ in found]), [s for _, s in found]

    return _user(update, lambda params: [init(w) for w in jax.tree.leaves(params)])


# `(update, state)` of one table, all with state of its shape.
BY_ROWS = {
    "norm of each row": lambda g, w, s: (g * jnp.sum(w * w, axis=1)[:, None], s),
    "softmax in a row": lambda g, w, s: (g * jax.nn.softmax(w, axis=1), s),
    "matrix": lambda g, w, s: (g @ jnp.eye(g.shape[1]), s + g),
    "order in a row": lambda g, w, s: (jnp.sort(g, axis=1)[:, ::-1], s),
    "sum with weights": lambda g, w, s: (g * jnp.sum(g * w), s),
    "rows with a gradient": lambda g, w, s: (g / jnp.sum(jnp.any(g != 0, axis=1)), s),
    "largest": lambda g, w, s: (g / (1 + jnp.max(jnp.abs(g))), s),
    "vector": lambda g, w, s: (g * jnp.arange(1.0, g.shape[1] + 1), s),
    "halves": lambda g, w, s: (jnp.concatenate(jnp.split(g, 2, axis=1)[::-1], 1), s),
    # It counts the rows read, as a clip after momentum does.
    "norm of momentum": lambda g, w, s: (g / jnp.linalg.norm(s + g), s + g),
    "where": lambda g, w, s: (jnp.where(s > 0, g, 0.5 * g), jnp.maximum(s, g)),
    "norm of zeros": lambda g, w, s: (g + jnp.linalg.norm(jnp.zeros_like(g)), s),
}
NOT_BY_ROWS = {
    "norm of new weights": lambda g, w, s: (g / jnp.linalg.norm(w - g), s),
    "largest weight": lambda g, w, s: (g / jnp.max(jnp.abs(w)), s),
    "any weight": lambda g, w, s: (jnp.where(jnp.any(w > 9), 0, g), s),
    "mean": lambda g, w, s: (g - jnp.mean(g, axis=0), s),
    "variance": lambda g, w, s: (g / (1 + jnp.var(g)), s),
    "largest, of either sign": lambda g, w, s: (g / (9 + jnp.max(g)), s),
    "smallest": lambda g, w, s: (g * (1 + jnp.min(jnp.abs(g))), s),
    "number of rows": lambda g, w, s: (g / jnp.sum(jnp.ones_like(g)), s),
    "a number in each": lambda g, w, s: (g / (1 + jnp.sum(jnp.cos(g))), s),
    "position": lambda g, w, s: (g * jnp.arange(g.shape[0])[:, None], s),
    "first row": lambda g, w, s: (g - g[:1], s),
    "row before": lambda g, w, s: (g - jnp.roll(g, 1, axis=0), s),
    "running sum": lambda g, w, s: (jnp.cumsum(g, axis=0), s),
    "softmax over rows": lambda g, w, s: (g * jax.nn.softmax(g, axis=0), s),
    "largest row": lambda g, w, s: (g * jnp.argmax(jnp.sum(g, axis=1)), s),
    "order of rows": lambda g, w, s: (jnp.sort(g, axis=0), s),
    "products of rows": lambda g, w, s: (g @ (g.T @ g), s),
    "loop over rows": lambda g, w, s: (jax.lax.map(lambda x: x * 2, g), s),
    "noise": lambda g, w, s: (g * jax.random.normal(jax.random.key(0), g.shape), s),
    "state of all rows": lambda g, w, s: (g, s + jnp.sum(jnp.abs(g + 1))),
}


@pytest.mark.parametrize("name", [*BY_ROWS, *NOT_BY_ROWS])
def test_what_a_user_may_write(name):
    tx = _of_leaf({**BY_ROWS, **NOT_BY_ROWS}[name], jnp.zeros_like)
    after_adam = optax.chain(optax.scale_by_adam(), tx)
    table = jax.ShapeDtypeStruct((160, 130), jnp.float32)
    if name in BY_ROWS:
        assert is_row_separable(tx, table)
        # After adam, a sum over rows counts only the rows read, but not their weights.
        assert is_row_separable(after_adam, table) == (name != "sum with weights")
    else:
        assert_refused(tx, "test_separability.py:.*check=False", table)
        assert not is_row_separable(after_adam, table)


def center_table(updates, params):
    return {**updates, "table": updates["table"] - jnp.mean(updates["table"], 0)}


def center(g, p):
    return g - jnp.mean(g)


@pytest.mark.parametrize(
    "wrap", [lambda tx: tx, lambda tx: optax.chain(tx, optax.sgd(LR))]
)
def test_functions_that_optax_calls_are_named_and_given_the_tree(wrap):
    """The function of `optax.stateless` may treat leaves differently."""

    def scale(updates, params):
        return {**updates, "bias": updates["bias"] * jnp.linalg.norm(updates["bias"])}

    rows = SelectedRows(np.array([3, 5]), ones(2, 6), 50)
    tx = lazy(wrap(optax.stateless(scale)))
    tx.update({**PARAMS, "table": rows}, tx.init(PARAMS), PARAMS)
    words = "because of center_table: div by a number"
    assert_refused(wrap(optax.stateless(center_table)), words)
    words = "because of center: .*test_separability.py:"
    assert_refused(wrap(optax.stateless_with_tree_map(center)), words)


def test_extra_arguments_are_filled_in():
    def update(updates, state, params=None, *, loss, **extra_args):
        return jax.tree.map(lambda g: -loss * g, updates), state

    tx = optax.GradientTransformationExtraArgs(lambda params: (), update)
    plateau = optax.contrib.reduce_on_plateau()
    for parts in ((optax.clip(1.0), tx), (optax.polyak_sgd(),), (ADAM, plateau)):
        assert is_row_separable(optax.chain(*parts))


# ------------------------------------------------------------------ nothing is hidden


def test_a_norm_must_not_count_empty_slots():
    """Yogi's moments start above zero, so it moves rows that were never read.

    A sign makes those steps as large as any. A norm would count the empty slots of a
    gradient, so that its padding would decide.
    """
    yogi, sign = optax.scale_by_yogi(), optax.scale_by_sign()
    shift = optax.stateless(lambda g, _: jax.tree.map(lambda x: x + 1, g))
    for parts in ((yogi, sign, NORM), (shift, CLIP)):
        params = {"t": ones(50, 2)}
        assert_refused(optax.chain(*parts), "moves rows that were never read", params)
    for parts in ((NORM, yogi, sign), (optax.adamw(0.1), NORM), (sign, NORM)):
        assert is_row_separable(optax.chain(*parts))
    # It clips by the count from below: a number that is negative at every step.
    clipped = optax.chain(optax.contrib.scale_by_adopt(), NORM)
    assert is_row_separable(optax.apply_if_finite(clipped, 3))


@pytest.mark.parametrize("norm", [optax.contrib.normalize(), NORM])
def test_a_norm_over_all_leaves_hides_nothing(norm):
    """For a single leaf, it divides by whatever that leaf was multiplied by."""
    tx = optax.chain(optax.scale_by_trust_ratio(), norm)
    params = {"t": ones(50, 6), "w": ones(6, 2)}
    assert not is_row_separable(tx)
    assert_refused(tx, TRUST_RATIO, params)
    assert is_row_separable(optax.chain(norm, ADAM))


@pytest.mark.parametrize("make", [optax.contrib.dog, optax.contrib.dowg])
def test_a_large_dense_leaf_hides_nothing(make):
    """A table of few rows may be a small part of a sum over all leaves."""
    params = {"t": ones(50, 6), "w": ones(300, 70)}
    even = lambda step, **extra_args: step % 2 == 0
    for tx in (make(), optax.conditionally_mask(make(), even)):
        assert_refused(tx, "because of scale_by_dow?g", params)


def _later(step, **extra_args):
    return step > 100


def _zero_at_first(step):
    return jnp.where(step < 100, 0.0, 1.0)


LATE = optax.conditionally_transform(optax.scale_by_trust_ratio(), _later)


@pytest.mark.parametrize(
    "tx",
    [
        optax.chain(ADAM, optax.clip_by_block_rms(1e5)),
        optax.chain(optax.clip_by_block_rms(1e5), ADAM),
        optax.adaptive_grad_clip(1e4),
        optax.chain(optax.scale_by_trust_ratio(), optax.scale(0.0)),
        optax.chain(optax.scale_by_trust_ratio(), optax.scale_by_sign()),
        optax.chain(LAMB, optax.scale_by_schedule(_zero_at_first)),
        LATE,
        optax.contrib.split_real_and_imaginary(LATE),
        optax.contrib.schedule_free(optax.chain(LATE, optax.sgd(LR)), LR),
        optax.chain(optax.clip(0.1), optax.masked(LARS, True), optax.clip(0)),
    ],
)
def test_a_part_that_does_nothing_at_first_is_refused(tx):
    """Clips that do not clip yet, and effects that are undone or come later."""
    assert not is_row_separable(tx)
    assert_refused(tx, "because of (scale_by|clip_by|adaptive)_")


# ------------------------------------------------------------------ leaf by leaf

LABELS = {"table": "sparse", "kernel": "dense"}
TREE = {"table": zeros((50, 6)), "kernel": zeros((80, 6))}


def _partition(sparse, dense, labels=LABELS):
    return optax.partition({"sparse": sparse, "dense": dense}, labels)


def test_what_is_for_dense_leaves_alone_is_accepted():
    """Beside norms over all leaves."""
    dense, table = {"table": False, "bias": True}, {"table": True, "bias": False}
    of_dense = lambda params: jax.tree.map(lambda x: x.ndim < 2, params)

    def update(updates, state, params):
        bias, state = LAMB.update(updates["bias"], state, params["bias"])
        return CLIP.update({**updates, "bias": bias}, ())[0], state

    for tx in (
        optax.masked(LARS, dense),
        optax.masked(LARS, of_dense),
        optax.masked(optax.masked(LARS, dense), True),
        optax.masked(optax.masked(LARS, of_dense), {"table": True, "bias": True}),
        _partition(ADAM, LARS, {"table": "sparse", "bias": "dense"}),
        optax.partition({"a": optax.masked(LARS, dense)}, "a"),
        _user(update, lambda params: LAMB.init(params["bias"])),
    ):
        assert is_row_separable(optax.chain(CLIP, tx, CLIP, ADAM), PARAMS)
    for tx in (optax.masked(LARS, table), optax.masked(optax.masked(LARS, True), True)):
        assert_refused(optax.chain(CLIP, tx, optax.scale(0.0)), TRUST_RATIO)


@pytest.mark.slow
def test_judged_leaf_by_leaf():
    tx = _partition(ADAM, LAMB)
    shapes = jax.eval_shape(lambda: TREE)  # are enough
    assert is_row_separable(tx, TREE) and is_row_separable(tx, shapes)
    assert not is_row_separable(tx)  # needs this tree
    assert not is_row_separable(_partition(LAMB, LARS), TREE)
    assert not is_row_separable(LAMB, shapes)
    # The kernel has more rows, and the next part sees both.
    assert is_row_separable(optax.chain(tx, CLIP), TREE)
    # A dense gradient may be held back.
    assert is_row_separable(_partition(ADAM, optax.apply_every(2)), TREE)
    # The partition to blame is the table's.
    taller = {"table": zeros((90, 6)), "kernel": zeros((80, 6))}
    assert_refused(_partition(LAMB, optax.sm3(LR)), TRUST_RATIO, taller)


def test_each_tree_is_judged_by_itself():
    """The verdict on one is remembered, and does not apply to another."""
    is_bad = lambda params: {k: k == "bad" for k in params}
    tx = lazy(optax.masked(optax.scale_by_trust_ratio(), is_bad))
    good, bad = {"good": ones(50, 6)}, {"bad": ones(50, 6)}
    tx.init(good)
    with pytest.raises(ValueError, match=TRUST_RATIO):
        tx.init(bad)
    tx.init(good)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["table"], meta_fields=["labels"]
)
@dataclasses.dataclass
class _Labelled:
    """A node of a tree whose static data cannot be hashed."""

    table: Any
    labels: list[str]


def test_trees_with_static_data_that_cannot_be_hashed():
    tx = lazy(ADAM)
    for labels in (["a"], ["a", "b"]):
        tree = _Labelled(ones(50, 6), labels)
        state = tx.init(tree)
        assert state[0].mu.labels == labels
        grads = _Labelled(SelectedRows(np.array([3]), ones(1, 6), 50), labels)
        updates, _ = tx.update(grads, state, tree)
        assert updates.labels == labels and isinstance(updates.table, SelectedRows)
    assert_refused(LAMB, TRUST_RATIO, tree)


@pytest.mark.slow
def test_rank_one_counts_only_where_nothing_has_more():
    # The bias could be lifted, the table could not: no one reads a bias by rows.
    tx = _partition(LAMB, ADAM, {"table": "sparse", "bias": "dense"})
    assert not is_row_separable(tx, PARAMS)
    assert is_row_separable(ADAM, {"bias": zeros(7)})
    assert not is_row_separable(LAMB, {"bias": zeros(7)})


# ------------------------------------------------------------------ in a trace


def _in_shard_map(kind):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(kind,))
    spec = jax.P("x")

    def trace(f):
        x = jax.device_put(ones(8), jax.NamedSharding(mesh, spec))
        mapped = jax.shard_map(lambda x: f(x) * x, in_specs=spec, out_specs=spec)
        with jax.set_mesh(mesh):
            jax.jit(mapped)(x)
            f(x)

    return trace


TRACES = {
    "jit": lambda f: jax.jit(f)(ones(3)),
    "vmap": lambda f: jax.vmap(f)(ones(2, 3)),
    "grad": lambda f: jax.grad(f)(ones(3)),
    "scan": lambda f: jax.lax.scan(lambda c, x: (c, f(x)), 0.0, ones(2, 3)),
    "auto": _in_shard_map(jax.sharding.AxisType.Auto),
    "explicit": _in_shard_map(jax.sharding.AxisType.Explicit),
}


@pytest.mark.usefixtures("eight_devices")
@pytest.mark.parametrize("trace", TRACES)
def test_judged_the_same_in_any_trace(trace):
    seen = set()

    def f(x):
        adam, lamb, sgd = optax.adam(2.0), optax.lamb(2.0), optax.sgd(2.0)
        exact = is_lazy_exact(sgd), is_lazy_exact(adam)
        seen.add((is_row_separable(adam), is_row_separable(lamb), *exact))
        return jnp.sum(x)

    TRACES[trace](f)
    assert seen == {(True, False, True, False)}


def test_random_keys_in_the_state_are_compared_in_any_trace():
    """Only the dense leaves get noise, which needs the tree."""
    noise = optax.add_noise(0.1, 0.5, key=jax.random.key(0))
    mask = {"table": False, "bias": True}
    tx = lazy(optax.chain(optax.masked(noise, mask), optax.sgd(LR)))
    jitted, eager = jax.jit(tx.init)(PARAMS), tx.init(PARAMS)
    assert jax.tree.structure(jitted) == jax.tree.structure(eager)


@pytest.mark.parametrize("promotion", ["standard", "strict"])
@pytest.mark.parametrize("wrap", [jax.jit, jax.vmap])
def test_schedules_are_numbers_in_a_trace(wrap, promotion):
    """Otherwise its holder counts as made in the trace, which cannot be tested."""
    injected = optax.inject_hyperparams(optax.sgd)(optax.cosine_decay_schedule(LR, 9))
    tx = lazy(optax.chain(injected, optax.scale_by_trust_ratio()))
    with jax.numpy_dtype_promotion(promotion):
        with pytest.raises(ValueError, match=TRUST_RATIO):
            wrap(tx.init)(ones(3, 50, 6))


# ------------------------------------------------------------------ is_lazy_exact

EXACT = {
    "clip": optax.chain(optax.clip(0.5), optax.sgd(LR)),
    "adagrad": optax.adagrad(SCHEDULE, initial_accumulator_value=0.0),
    "clip_by_global_norm": optax.chain(CLIP, optax.adagrad(LR)),
    "rowwise_adagrad": rowwise_adagrad(LR),
}


def test_exact_means_equal_to_dense_training():
    for name, tx in EXACT.items():
        assert is_lazy_exact(tx), name

    @jax.jit
    def run(carry, grads):
        """A step of each transformation, with `lazy` and with dense gradients."""
        both = (lazy, grads), (lambda tx: tx, to_dense(grads))
        return [
            {name: step(lift(tx), *old[name], g) for name, tx in EXACT.items()}
            for (lift, g), old in zip(both, carry)
        ]

    params = make_params()
    carry = [{name: (params, tx.init(params)) for name, tx in EXACT.items()}] * 2
    for k in range(4):  # with duplicates, and other rows each time
        carry = run(carry, make_grads(k))
    assert_trees_close(*carry, rtol=2e-6, atol=1e-7)


def _state_moves(move):
    """It updates by the gradient alone, but its state goes on without one."""
    return _of_leaf(lambda g, w, s: (-g, move(s, g)), jnp.zeros_like)


NOT_EXACT = {
    "momentum": optax.sgd(LR, momentum=0.9),
    "adam": ADAM,
    "rmsprop": optax.rmsprop(LR),  # the second moment fades
    "decay": optax.chain(optax.add_decayed_weights(0.1), optax.sgd(LR)),
    # Nothing moves at the first step, nor ever in a row that was not read.
    "later": _state_moves(lambda s, g: jnp.where(g != 0, g, 0.5 * s)),
    "reversed": _state_moves(lambda s, g: jnp.flip(s, axis=1) + g),
    "rotated": _state_moves(lambda s, g: jnp.roll(s, 1, axis=1) + g),
    "sorted": _state_moves(lambda s, g: jnp.sort(s, axis=1) + g),
    "rounded": _state_moves(lambda s, g: s.astype(jnp.bfloat16).astype(s.dtype) + g),
    "as integers": _state_moves(lambda s, g: s.astype(jnp.int32).astype(s.dtype) + g),
}


@pytest.mark.parametrize("name", NOT_EXACT)
def test_not_exact(name):
    assert is_row_separable(NOT_EXACT[name]) and not is_lazy_exact(NOT_EXACT[name])


def test_exact_for_a_tree():
    assert not is_lazy_exact(LAMB)  # not by rows at all
    assert is_lazy_exact(_partition(optax.sgd(LR), LAMB), TREE)
    tree = jax.eval_shape(lambda: {**TREE, "none": None})
    assert is_lazy_exact(optax.sgd(LR), tree)
    assert not is_lazy_exact(optax.sgd(LR, momentum=0.9), tree)
