"""The table of all transformations of optax is right, and docs/optimizers.md agrees."""

# optax's types know trees of arrays only.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportIndexIssue=false, reportOperatorIssue=false

import re

import jax
import jax.numpy as jnp
import optax
import pytest

import optax_table
import sparsejax as sj
from helpers import assert_trees_close, to_dense
from optimizers import LR, SCHEDULE, make_grads, make_params
from sparsejax.optim import is_lazy_exact, lazy


pytestmark = pytest.mark.usefixtures("loose_promotion")

IN_PAGE = dict(
    re.findall(r"^\| `([\w.]+)` \| (.*) \|$", optax_table.PAGE.read_text(), re.M)
)


# ------------------------------------------------------------------ the page


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")  # but there
@pytest.mark.parametrize("section", optax_table.SECTIONS, ids=lambda s: s[0])
def test_the_page_is_what_is_found(section):
    found = optax_table.rows([section])
    page = {name: IN_PAGE.get(name, "is not in it") for name in found}
    assert {k: v.rstrip(" |") for k, v in found.items()} == {
        k: v.rstrip(" |") for k, v in page.items()
    }, "make it again: python tests/optax_table.py"


def test_the_page_of_optimizers_agrees():
    short = optax_table.SHORT.read_text()
    shown = re.findall(r"^\| (`.*`) \| (\*\*\w+\*\*|as what .*?) \|", short, re.M)
    named = [
        (f"optax.{x}", kind) for cell, kind in shown for x in cell.split("`")[1::2]
    ]
    assert len(named) > 40
    for name, kind in named:
        assert IN_PAGE[name].startswith(kind.replace("they hold", "it holds")), name


def test_nothing_is_missing():
    made_with = re.search(r"\(optax ([\w.]+)\)", optax_table.PAGE.read_text())
    if made_with is None or made_with[1] != optax.__version__:
        pytest.skip("the page was made with another optax")
    missing = set(optax_table.makers()) - IN_PAGE.keys() - optax_table.NOT_ONE
    assert not missing
    assert "optax.adam" in optax_table.makers()


# ------------------------------------------------------------------ is_lazy_exact

EXACT = {
    "clip": lambda: optax.chain(optax.clip(0.5), optax.sgd(LR)),
    "adagrad": lambda: optax.adagrad(SCHEDULE, initial_accumulator_value=0.0),
    "clip_by_global_norm": lambda: optax.chain(
        optax.clip_by_global_norm(0.5), optax.adagrad(LR)
    ),
    "rowwise_adagrad": lambda: sj.optim.rowwise_adagrad(LR),
}


@pytest.mark.parametrize("name", EXACT)
def test_exact_means_equal_to_dense_training(name):
    tx = EXACT[name]()
    assert is_lazy_exact(tx)
    lifted, params = lazy(tx), make_params()
    state = lifted.init(params)
    dense_params, dense_state = params, state
    sparse, dense = jax.jit(lifted.update), jax.jit(tx.update)
    for step in range(4):  # with duplicates, and other rows each time
        grads = make_grads(step)
        updates, state = sparse(grads, state, params)
        params = optax.apply_updates(params, updates)
        updates, dense_state = dense(to_dense(grads), dense_state, dense_params)
        dense_params = optax.apply_updates(dense_params, updates)
    assert_trees_close(params, dense_params, rtol=2e-6, atol=1e-7)
    assert_trees_close(state, dense_state, rtol=2e-6, atol=1e-7)


@pytest.mark.slow
def test_clipping_of_duplicates_is_bit_exact_where_sums_are():
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))
    rows = sj.SelectedRows(jnp.array([1, 4, 1]), jnp.array([1.0, 4.0, 2.0]), 7)
    params = {"table": jnp.zeros(7), "bias": jnp.zeros(1)}
    grads = {"table": rows, "bias": jnp.array([12.0])}  # of norm 13
    state = tx.init(params)
    got, _ = jax.jit(lazy(tx).update)(grads, state, params)
    expected, _ = jax.jit(tx.update)(to_dense(grads), state, params)
    assert jnp.array_equal(got["table"].to_dense(), expected["table"])
    assert jnp.array_equal(got["bias"], expected["bias"])


@pytest.mark.parametrize(
    "tx",
    [
        optax.sgd(LR, momentum=0.9),
        optax.adam(LR),
        optax.rmsprop(LR),  # the weights stay, the second moment fades
        optax.chain(optax.add_decayed_weights(0.1), optax.sgd(LR)),
        optax.lamb(LR),  # not by rows at all
    ],
    ids=["momentum", "adam", "rmsprop", "decay", "lamb"],
)
def test_not_exact(tx):
    assert not is_lazy_exact(tx)


def test_a_state_that_only_later_moves_is_seen():
    """Nothing moves at the first step, nor ever in a row that was not read."""

    def update(updates, state, params=None):
        new = jax.tree.map(lambda g, s: jnp.where(g != 0, g, 0.5 * s), updates, state)
        return jax.tree.map(lambda g: -g, updates), new

    fading = optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params), update
    )
    assert sj.optim.is_row_separable(fading)
    assert not is_lazy_exact(fading)


MOVES = {
    "reversed": lambda s: jnp.flip(s, axis=1),
    "rotated": lambda s: jnp.roll(s, 1, axis=1),
    "sorted": lambda s: jnp.sort(s, axis=1),
    "rounded": lambda s: s.astype(jnp.bfloat16).astype(s.dtype),
    "as integers": lambda s: s.astype(jnp.int32).astype(s.dtype),
}


@pytest.mark.parametrize("name", MOVES)
def test_a_state_that_moves_inside_of_a_row_is_seen(name):
    def update(updates, state, params=None):
        new = jax.tree.map(lambda g, s: MOVES[name](s) + g, updates, state)
        return jax.tree.map(lambda g: -g, updates), new

    moving = optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params), update
    )
    assert not is_lazy_exact(moving)


def test_judged_for_a_tree():
    params = {"table": jnp.zeros((50, 6)), "kernel": jnp.zeros((80, 6))}
    labels = {"table": "sparse", "kernel": "dense"}
    transforms = {"sparse": optax.sgd(LR), "dense": optax.lamb(LR)}
    assert is_lazy_exact(optax.partition(transforms, labels), params)
    tree = jax.eval_shape(lambda: {**params, "none": None})
    assert is_lazy_exact(optax.sgd(LR), tree)
    assert not is_lazy_exact(optax.sgd(LR, momentum=0.9), tree)


@pytest.mark.parametrize("junk", [None, 5, "adam", lambda x: x, optax.adam, optax])
def test_never_raises(junk):
    assert not is_lazy_exact(junk)
    assert not is_lazy_exact(junk, {"table": jnp.zeros((3, 2))})


def test_judged_the_same_in_a_trace():
    seen = []

    def f(x):
        seen.append((is_lazy_exact(optax.sgd(2.0)), is_lazy_exact(optax.adam(2.0))))
        return x

    jax.jit(f)(jnp.ones(3))
    jax.vmap(f)(jnp.ones((2, 3)))
    assert set(seen) == {(True, False)}
