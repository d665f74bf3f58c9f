"""Wrong calls of a store, and assigned weights."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsejax as sj
from helpers import assert_same_bits


pytestmark = pytest.mark.usefixtures("loose_promotion")

V, D = 40, 3
SGD = optax.sgd(1.0)


def new_store(tx: Any = SGD, **options):
    store = sj.store.KVStore()
    store.init("w", (V, D), tx, **options)
    return store


def grad(rows=(1,), dtype=jnp.float32):
    return sj.SelectedRows(np.array(rows), jnp.ones((len(rows), D), dtype), V)


def test_exact_is_refused():
    store = sj.store.KVStore()
    tx: Any = sj.optim.exact(optax.sgd(0.1, momentum=0.9))
    for each in (tx, optax.chain(optax.clip(1.0), tx)):
        with pytest.raises(ValueError, match="because of sparsejax.optim.exact"):
            store.init("w", (V, D), each)
    assert store.names() == ()


def test_a_complex_gradient_is_refused():
    store = new_store()
    with pytest.raises(TypeError, match="table 'w' must be real .* got complex64"):
        store.push("w", grad(dtype=jnp.complex64))
    assert not store.pull_all("w").any()


def test_an_initializer_that_returns_none():
    with pytest.raises(ValueError, match="table 'w'.* but returned NoneType"):
        new_store(initializer=lambda key, shape, dtype: None)


def test_constant_initializers():
    for make in (jax.nn.initializers.ones, lambda k, s, d: jnp.full(s, 1.0, d)):
        assert (new_store(initializer=make).pull_all("w") == 1).all()


def test_a_type_beside_an_array():
    store = sj.store.KVStore()
    array = np.ones((V, D), np.float32)
    store.init("w", array, SGD, dtype=np.float16)
    assert store.spec("w").dtype == np.float16 and (store.pull_all("w") == 1).all()


@pytest.mark.parametrize("capacity", [1.5, "8"])
def test_capacities(capacity):
    with pytest.raises(TypeError, match="capacity must be a static, non-negative"):
        new_store().pull("w", [1], capacity=capacity)


def test_a_capacity_of_no_table():
    store = new_store()
    with pytest.raises(KeyError, match="there is no table 'v'"):
        store.prefetch([], np.array, capacity={"v": 4})


def test_inside_of_traced_functions():
    store, other, ids = new_store(), sj.store.KVStore(), jnp.array([1])
    array = jnp.ones((V, D))
    uses = [
        lambda: jax.jit(lambda i: store.pull("w", i))(ids),
        lambda: jax.vmap(lambda i: store.row_sparse_pull("w", i))(ids),
        lambda: jax.lax.scan(lambda c, i: (c, store.pull("w", i)), 0, ids),
        lambda: jax.jit(lambda v: store.push("w", grad().map(lambda _: v)))(array[:1]),
        lambda: jax.jit(lambda a: other.init("w", a, SGD))(array),
        lambda: jax.jit(lambda: other.init("w", (V, D), SGD))(),
        lambda: jax.jit(lambda a: store.assign("w", a))(array),
    ]
    for use in uses:
        with pytest.raises(TypeError, match="is in host memory"):
            use()
    assert not store.pull_all("w").any() and other.names() == ()


@pytest.mark.parametrize("depth", [0, 1])
def test_closing_inside_of_a_loop(depth):
    store = new_store()
    with pytest.raises(ValueError, match="this store is closed"):
        for _, rows in store.prefetch([[1], [2], [1]], np.array, depth=depth):
            store.push("w", rows.map(jnp.ones_like))
            store.close()


# ------------------------------------------------------------------ assign


def test_assigned_rows_are_read():
    store = new_store(optax.adam(0.1))
    store.push("w", grad([2]))
    state = [x.copy() for x in store.engine.tables["w"].by_row]
    rows = np.array([7, V, 2, V])  # two empty slots; -1 is an error
    values = np.arange(4 * D, dtype=np.float64).reshape(4, D)
    store.assign("w", sj.SelectedRows(rows, values, V))
    expected = np.zeros((V, D), np.float32)
    expected[[7, 2]] = values[[0, 2]]
    assert_same_bits(store.pull_all("w"), expected)
    store.assign("w", expected + 1)
    assert_same_bits(store.pull("w", np.arange(V), capacity=V).values, expected + 1)
    for before, after in zip(state, store.engine.tables["w"].by_row):
        assert_same_bits(before, after)


def test_assigned_rows_reach_a_batch_under_way():
    store = new_store()
    ahead = store.prefetch([[1], [2, 3]], np.array)
    next(ahead)
    store.assign("w", grad([3, 2]))
    _, rows = next(ahead)
    assert (np.asarray(rows.values[:2]) == 1).all()
    ahead.close()


def test_what_assign_refuses():
    store = new_store()
    store.push("w", grad([3]))
    before = store.pull_all("w")
    for wrong, found in [
        (np.ones((V, D + 1)), re.escape("float64[40, 4]")),
        (sj.SelectedRows([1], jnp.ones((1, D)), V + 1), re.escape("[41, 3]")),
        (np.ones((V, D), np.complex64), "complex64"),
        ([1, 2], "list"),
    ]:
        with pytest.raises(TypeError, match="assign: weights for .* got .*" + found):
            store.assign("w", wrong)
    with pytest.raises(ValueError, match="assign: .* has duplicate rows"):
        store.assign("w", grad([3, 3]))
    with pytest.raises(KeyError, match="there is no table 'v'"):
        store.assign("v", grad())
    assert_same_bits(store.pull_all("w"), before)


def by_path(txs: Any):
    """The transformation of each parameter, by the name of its path."""
    name = lambda path, leaf: path[0].key if path else "other"
    return optax.partition(txs, lambda p: jax.tree.map_with_path(name, p))


def test_a_function_that_decides_by_path_is_refused():
    """A store's transformation sees its table alone, without a path."""
    txs: Any = {"w": optax.sgd(0.1), "other": optax.sgd(0.2)}
    with pytest.raises(ValueError, match="'w' has a mask or label .* by path"):
        new_store(by_path(txs))
    new_store(by_path({"w": txs["w"], "other": txs["w"]}))  # the same for every path
    raises = lambda p: jax.tree.map_with_path(lambda path, x: path[0].key, p)
    with pytest.raises(ValueError, match="by path"):
        new_store(optax.partition(txs, raises))
    by_rank = lambda p: jax.tree.map(lambda x: x.ndim > 1, p)
    new_store(optax.masked(optax.add_decayed_weights(0.1), by_rank))


def test_a_tree_of_several_parameters_is_refused():
    """Trees of labels, masks or capacities: a store's tx sees its table alone."""
    adam, trees = sj.optim.lazy(optax.adam(0.1)), ["w", "other"]
    decay = optax.add_decayed_weights(0.1)
    for tx in (
        optax.partition({"w": adam, "other": adam}, dict(zip(trees, trees))),
        sj.optim.lazy(optax.partition({"w": adam}, {"w": "w"})),
        optax.chain(optax.masked(decay, {"w": True, "other": False}), adam),
        sj.optim.accumulate(adam, 2, {"w": 8, "other": None}),
    ):
        with pytest.raises(ValueError, match="the table alone.* pass the .* of this"):
            new_store(tx)
