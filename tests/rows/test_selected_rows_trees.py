"""SelectedRows as a pytree: under JAX's transformations and in other libraries.

Files and copies are in `tests/transform/test_export.py`, for all types.
"""

import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsejax as sj
from helpers import (
    IN_PLACE,
    assert_in_place,
    assert_no_dense,
    assert_trees_close,
    count_traces,
    dense,
    make_rows,
)


V = 7
apply_updates: Any = optax.apply_updates


# ------------------------------------------------------------------ transformations


def several_operations(a, array):
    ids = jnp.array([3, 0, 4, 100, -1])
    return {
        "coalesce": a.coalesce(),
        "get": a.get(ids),
        "retain": a.retain(ids),
        "sum": (a * 2 - a).to_dense(),
        "product": a * a,
        "added": array + a,
        "num_rows": a.num_rows(),
    }


@pytest.mark.slow
def test_vmap():
    parts = [
        make_rows(rows, V, seed=i)[0] for i, rows in enumerate([[4, 0, 4], [V, 1, 1]])
    ]
    batch = jax.tree.map(lambda *x: jnp.stack(x), *parts)
    array = jnp.ones((V, 3))
    got = jax.jit(jax.vmap(several_operations, (0, None)))(batch, array)
    for i, part in enumerate(parts):
        expected = jax.jit(several_operations)(part, array)
        assert_trees_close(jax.tree.map(operator.itemgetter(i), got), expected)
    # Overflow in one of a batch is that one's.
    short = jax.vmap(lambda a: a.coalesce(capacity=1))(batch)
    assert np.isnan(short.values[0]).all() and np.isfinite(short.values[1]).all()


_OF_A_BATCH = {
    "rows": lambda g, a: g.rows,
    "filled": lambda g, a: g.filled(),
    "safe_rows": lambda g, a: g.safe_rows(),
    "num_rows": lambda g, a: g.num_rows(),
    "map": lambda g, a: g.map(jnp.sin),
    "astype": lambda g, a: g.astype(jnp.float16),
    "scale": lambda g, a: -(2 * g) / 4,
    "shape": lambda g, a: a.reshape(g.shape),
    "ndim": lambda g, a: g.ndim * a,
    "capacity": lambda g, a: g.capacity * a,
    "to_dense": lambda g, a: g.to_dense(),
    "coalesce": lambda g, a: g.coalesce(),
    "get": lambda g, a: g.get([4, 9]),
    "find": lambda g, a: g.find(4),
    "index": lambda g, a: g[np.array([4, -1])],
    "retain": lambda g, a: g.retain([4]),
    "unstacked": lambda g, a: g.unstacked().to_dense(),
    "add": lambda g, a: g + g,
    "subtract": lambda g, a: g - g,
    "multiply": lambda g, a: g * g,
    "add to array": lambda g, a: a + g,
    "apply_updates": lambda g, a: optax.apply_updates({"t": a}, {"t": g}),
    "concatenate": lambda g, a: sj.concatenate([g, g]),
    "lookup": lambda g, a: sj.lookup(g, np.array([4, 2])),
    "bag": lambda g, a: sj.embedding_bag(g, np.array([[4, 2]])),
    "norm": lambda g, a: sj.optim.global_norm(g),
    "lazy": lambda g, a: sj.optim.lazy(optax.sgd(0.1)).update(g, optax.EmptyState(), a),
}


@pytest.mark.parametrize("name", _OF_A_BATCH)
def test_a_batch_outside_of_vmap(name):
    """Equal to the function under vmap, or an error that names it; never else."""
    make = lambda rows: make_rows(rows, V)[0]
    parts = make([4, 0, 4]), make([V, 1, 1])
    batch, array = jax.tree.map(lambda *x: jnp.stack(x), *parts), jnp.ones((V, 3))
    f = _OF_A_BATCH[name]
    try:
        got = f(batch, array)
    except Exception as error:
        assert "This is a batch" in str(error) and "jax.vmap(f)(batch)" in str(error)
    else:
        assert_trees_close(got, jax.vmap(f, (0, None))(batch, array))


def test_what_the_error_of_a_batch_names():
    parts = make_rows([4, 0, 4], V)[0], make_rows([V, 1, 1], V, seed=1)[0]
    batch = jax.tree.map(lambda *x: jnp.stack(x), *parts)
    total = sj.SelectedRows(
        batch.rows.ravel(), jnp.concatenate(batch.values), batch.height
    )
    assert_trees_close(total.to_dense(), (parts[0] + parts[1]).to_dense())
    assert_trees_close(jax.tree.map(lambda x: x[0], batch), parts[0])
    assert "int32[2,3]" in repr(batch)


def test_scan():
    parts = [
        make_rows(rows, V, seed=i)[0] for i, rows in enumerate([[4, 0, 4], [V, 1, 1]])
    ]
    batch = jax.tree.map(lambda *x: jnp.stack(x), *parts)

    @jax.jit
    def run(table, batch):
        def body(carry, a):
            table, last = carry
            return (table + a, a.coalesce()), a.get([4, 1])

        start = jax.tree.map(lambda x: x[0], batch)
        return jax.lax.scan(body, (table, start), batch)

    (table, last), got = run(jnp.zeros((V, 3)), batch)
    assert_trees_close(table, parts[0].to_dense() + parts[1].to_dense())
    assert_trees_close(last, parts[1].coalesce())
    assert_trees_close(got, jnp.stack([p.get([4, 1]) for p in parts]))


def test_cond_and_while():
    a, values = make_rows([4, 0, 4], V)
    d = dense([4, 0, 4], values, V)
    pick = jax.jit(lambda p, a: jax.lax.cond(p, lambda a: a * 2, lambda a: -a, a))
    np.testing.assert_array_equal(pick(True, a).to_dense(), 2 * d)
    np.testing.assert_array_equal(pick(False, a).to_dense(), -d)
    double = lambda a: jax.lax.fori_loop(0, 3, lambda _, a: a * 2.0, a)
    np.testing.assert_array_equal(double(a).to_dense(), 8 * d)


def test_one_trace_per_shape_and_height():
    f = count_traces(lambda a: a.coalesce() * 2)
    g = jax.jit(f)
    for rows in ([4, 0], [1, V], [2, 2]):
        g(make_rows(rows, V)[0])
    assert f.count == 1
    g(make_rows([4, 0], V + 1)[0])
    assert f.count == 2


def test_eval_shape():
    a, _ = make_rows([4, 0, 4], V)
    spec = jax.eval_shape(lambda a: (a + a).coalesce(capacity=4), a)
    assert isinstance(spec, sj.SelectedRows)
    assert spec.shape == (V, 3) and spec.capacity == 4 and spec.dtype == jnp.float32
    assert isinstance(spec.values, jax.ShapeDtypeStruct)
    struct = jax.ShapeDtypeStruct
    made = sj.SelectedRows(struct((4,), jnp.int32), struct((4, 3), jnp.float32), V)
    assert jax.tree.structure(made) == jax.tree.structure(a)
    assert jax.eval_shape(lambda a: a.to_dense(), made).shape == (V, 3)


def test_it_is_a_pytree():
    a, _ = make_rows([4, 0, 4], V)
    paths = jax.tree_util.tree_leaves_with_path({"t": a})
    assert [jax.tree_util.keystr(p) for p, _ in paths] == ["['t'].rows", "['t'].values"]
    leaves, treedef = jax.tree.flatten(a)
    assert_trees_close(jax.tree.unflatten(treedef, leaves), a)
    assert jax.tree.structure(a) != jax.tree.structure(make_rows([4, 0, 4], V + 1)[0])
    # Code that rebuilds trees puts anything into them.
    for placeholder in (object(), None, "x", 3):
        rebuilt = jax.tree.unflatten(treedef, [placeholder] * 2)
        assert rebuilt.rows is placeholder and rebuilt.height == V
    changed = jax.tree.unflatten(treedef, [np.zeros(3), np.zeros((3, 3))])
    with pytest.raises(TypeError, match="SelectedRows.map"):
        changed.map(lambda v: v)


def test_it_is_frozen():
    a, _ = make_rows([4, 0], V)
    with pytest.raises(AttributeError):
        a.height = 3  # pyright: ignore[reportAttributeAccessIssue]


# ------------------------------------------------------------------ size and place

BIG = 1009


def test_nothing_of_the_tables_size():
    rows = jnp.array([4, 0, 4, BIG])
    a = sj.SelectedRows(rows, jnp.ones((4, 3)), BIG)
    b = sj.SelectedRows(rows, jnp.ones((4, 3), jnp.bfloat16), BIG)

    def run(a, b):
        ids = jnp.array([1, 4])
        product = (a * 2 + -b / 3) * a
        return a.coalesce(), product, a.get(ids), a.retain(ids), a.num_rows()

    assert_no_dense(run, a, b)
    array = jnp.ones((BIG, 3))
    assert_no_dense(operator.add, array, a, allow=IN_PLACE)
    assert_no_dense(operator.sub, array.astype(jnp.bfloat16), b, allow=IN_PLACE)
    with pytest.raises(AssertionError, match="of a table's size"):
        assert_no_dense(lambda x, a: x + a.to_dense(), array, a)


def test_added_in_place():
    a = sj.SelectedRows(jnp.array([4, 0, 4, BIG]), jnp.ones((4, 3)), BIG)
    assert_in_place(operator.add, jnp.ones((BIG, 3)), a)
    assert_in_place(operator.sub, jnp.ones((BIG, 3)), a)
    apply = lambda p, u: apply_updates({"t": p}, {"t": u})["t"]
    assert_in_place(apply, jnp.ones((BIG, 3)), a)


# ------------------------------------------------------------------ other libraries


@pytest.mark.usefixtures("loose_promotion")
def test_optax_apply_updates():
    a, values = make_rows([4, 0, V, 4], V)
    params = {"table": jnp.ones((V, 3)), "bias": jnp.zeros((2,))}
    updates = {"table": a, "bias": jnp.ones((2,))}
    got = jax.jit(apply_updates)(params, updates)
    np.testing.assert_array_equal(got["table"], 1 + dense([4, 0, V, 4], values, V))
    assert got["bias"].tolist() == [1, 1]
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    assert apply_updates(half, updates)["table"].dtype == jnp.bfloat16


def test_in_a_flax_struct():
    struct = pytest.importorskip("flax.struct")
    serialization = pytest.importorskip("flax.serialization")

    @struct.dataclass
    class State:
        step: int
        pulled: sj.SelectedRows

    a, values = make_rows([4, 0, 4], V)
    step = jax.jit(lambda s: s.replace(step=s.step + 1, pulled=s.pulled * 2))
    state = step(State(0, a))
    assert state.step == 1
    want = 2 * dense([4, 0, 4], values, V)
    np.testing.assert_array_equal(state.pulled.to_dense(), want)
    # A leaf for flax, or a dict of its leaves once `sj.nn.flax` is imported.
    saved = serialization.to_state_dict(state)
    restored = serialization.from_state_dict(State(0, a), saved)
    assert_trees_close(restored.pulled, state.pulled)


@pytest.mark.usefixtures("loose_promotion")
def test_in_an_equinox_module():
    eqx = pytest.importorskip("equinox")

    class Model(eqx.Module):
        pulled: sj.SelectedRows
        name: str

    a, values = make_rows([4, 0, 4], V)
    model = Model(a, "m")
    double = eqx.filter_jit(lambda m: Model(m.pulled * 2, m.name))(model)
    want = 2 * dense([4, 0, 4], values, V)
    np.testing.assert_array_equal(double.pulled.to_dense(), want)
    arrays, rest = eqx.partition(model, eqx.is_inexact_array)
    assert arrays.pulled.rows is None and rest.pulled.values is None
    assert_trees_close(eqx.combine(arrays, rest).pulled, a)
    grads = eqx.filter_grad(lambda m: jnp.sum(m.pulled.to_dense()))(model)
    assert grads.pulled.values.tolist() == [[1.0] * 3] * 3
    moved = eqx.tree_at(lambda m: m.pulled.values, model, jnp.zeros((3, 3)))
    assert not moved.pulled.to_dense().any()


def test_any_tree_of_leaves_has_a_repr():
    """For example jax.tree.map(type, grads), which users often type first."""
    rows = sj.SelectedRows(jnp.array([1, 2]), jnp.ones((2, 3)), height=9)
    segments = sj.SegmentTensor.from_lists([[1], [2, 3]])
    for f in (type, str, jnp.shape, lambda x: None, lambda x: x.dtype):
        for tree in (rows, segments):
            assert type(tree).__name__ in repr(jax.tree.map(f, tree))
