"""sparsejax.experimental: JAX's own `grad` gives rows, on jax 0.12."""

import doctest
import importlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsejax as sj
from sparsejax.experimental import selected_rows, sparse_table


HAS_HIJAX = tuple(map(int, jax.__version__.split(".")[:2])) >= (0, 12)
pytestmark = pytest.mark.window
needs_hijax = pytest.mark.skipif(not HAS_HIJAX, reason="needs jax 0.12")

V, D, CAPACITY = 40, 3, 12
TABLE = jnp.sin(jnp.arange(V * D, dtype=jnp.float32)).reshape(V, D)
IDS = jnp.array([[3, 5, 3], [39, -1, 7]])
BAGS = sj.SegmentTensor.from_lists([[1, 2], [], [2, 5, 1]])


def check(losses, table=TABLE, capacity=CAPACITY):
    """Checks the gradients of many losses, in one program; returns them."""

    @jax.jit
    def run(array):
        made = sparse_table(array, capacity)
        values, grads = {}, {}
        for name, loss in losses.items():
            for kind, x in (("dense", array), ("sparse", made)):
                values[name, kind], grads[name, kind] = jax.value_and_grad(loss)(x)
        return values, selected_rows(grads)

    values, grads = run(table)
    rtol = 2e-3 if table.dtype == jnp.float16 else 1e-5
    for name in losses:
        a, b = values[name, "sparse"], values[name, "dense"]
        np.testing.assert_allclose(a, b, rtol=rtol, err_msg=name)
        found, expected = grads[name, "sparse"], grads[name, "dense"]
        assert (found.capacity, found.dtype) == (capacity, table.dtype)
        np.testing.assert_allclose(
            found.to_dense(), expected, rtol=rtol, atol=1e-5, err_msg=name
        )
    return {name: grads[name, "sparse"] for name in losses}


def squares(x):
    weights = jnp.arange(1, x.size + 1, dtype=x.dtype).reshape(x.shape)
    return jnp.sum(x * x * weights)


# ------------------------------------------------------------------ one read, several

READS = {
    "index": lambda t: squares(t[IDS]),
    "one row": lambda t: squares(t[7]) + squares(t[-2]),
    "clamped": lambda t: squares(t[jnp.array([V, V + 9, -V - 5])]),
    "lookup": lambda t: squares(sj.lookup(t, IDS, mode="zero", padding_id=5)),
    "max_norm": lambda t: squares(sj.lookup(t, IDS, mode="clip", max_norm=0.5)),
    "bag": lambda t: squares(sj.embedding_bag(t, BAGS)),
    "padded bag": lambda t: squares(
        sj.embedding_bag(t, IDS, padding_id=-1, combiner="mean")
    ),
    "two reads": lambda t: squares(t[IDS[0]]) + jnp.sum(jnp.sin(sj.lookup(t, 3) * 2)),
    "no read": lambda t: jnp.float32(1),
}


@needs_hijax
def test_reads():
    grads = check(READS)
    assert grads["two reads"].rows.tolist()[:3] == [3, 5, V]  # merged


@needs_hijax
def test_outside_of_jit():
    """A SelectedRows as it is; also what `jit` returns."""
    table, loss = sparse_table(TABLE, CAPACITY), READS["two reads"]
    expected_value, expected = jax.value_and_grad(loss)(TABLE)
    for value_and_grad in (
        jax.value_and_grad,
        lambda f: jax.jit(jax.value_and_grad(f)),
    ):
        value, grad = value_and_grad(loss)(table)
        assert isinstance(grad, sj.SelectedRows)
        np.testing.assert_allclose(value, expected_value, rtol=1e-5)
        np.testing.assert_allclose(grad.to_dense(), expected, atol=1e-5)
        assert type(selected_rows([grad])[0]) is sj.SelectedRows


@needs_hijax
def test_shapes_and_types():
    some = {"": lambda t: squares(t[IDS])}
    check(some, TABLE[:, 0])
    check(some, TABLE.reshape(V, D, 1).astype(jnp.float16))
    check(some, capacity=5)  # enough for the distinct ids


# ------------------------------------------------------------------ transformations


def scanned(t):
    """A table that a loop reads, and cotangents that it adds up."""

    def body(carry, ids):
        return carry + squares(t[ids]), jnp.sum(t[ids[0]])

    total, each = jax.lax.scan(body, jnp.float32(0), IDS)
    return total + squares(each)


def branched(t):
    read = lambda t: squares(t[IDS[0]])
    return jax.lax.cond(IDS[0, 0] > 2, read, lambda t: jnp.sum(t[1]), t)


PROGRAMS = {
    "scan": scanned,
    "cond": branched,
    "vmap over ids": lambda t: jnp.sum(jax.vmap(lambda ids: squares(t[ids]))(IDS)),
    "jit inside": jax.jit(lambda t: squares(t[IDS])),
    "checkpoint of the rows": lambda t: jax.checkpoint(
        lambda rows: squares(jnp.sin(rows))
    )(t[IDS]),
}


@needs_hijax
def test_transformations_inside():
    check(PROGRAMS)


@needs_hijax
def test_vmap_outside():
    """Gradients of each example; of each table of a stack; of each of both."""

    def loss(t, ids):
        return squares(t[ids]) + jnp.sum(t[ids[0]])

    def grad(array, ids):
        return selected_rows(jax.grad(loss)(sparse_table(array, CAPACITY), ids))

    @jax.jit
    def run(stack):
        found, expected = {}, {}
        for axes in [(None, 0), (0, None), (0, 0)]:
            array = TABLE if axes[0] is None else stack
            ids = IDS[0] if axes[1] is None else IDS
            found[str(axes)] = jax.vmap(grad, axes)(array, ids)
            expected[str(axes)] = jax.vmap(jax.grad(loss), axes)(array, ids)
        # The tables themselves as values with an axis, mapped over and scanned.
        tables = jax.vmap(lambda array: sparse_table(array, CAPACITY))(stack)
        found["mapped"] = jax.vmap(jax.grad(loss))(tables, IDS)
        step = lambda carry, x: (carry, jax.grad(loss)(*x))
        _, found["scanned"] = jax.lax.scan(step, 0, (tables, IDS))
        found = selected_rows(found)
        is_rows = lambda x: isinstance(x, sj.SelectedRows)
        dense = jax.vmap(sj.SelectedRows.to_dense)
        return tables, jax.tree.map(dense, found, is_leaf=is_rows), expected

    tables, found, expected = run(jnp.stack([TABLE, 2 * TABLE]))
    for name, x in found.items():
        wanted = expected.get(name, expected["(0, 0)"])
        np.testing.assert_allclose(x, wanted, atol=1e-5, err_msg=name)
    with pytest.raises(ValueError, match="no axis of a vmap"):
        tables[0]


@needs_hijax
def test_second_order():
    """Forward over reverse, and reverse over reverse."""

    def loss(t):
        return jnp.sum(jnp.sin(t[IDS])) * squares(t[3])

    def penalty(t):
        return jnp.sum(selected_rows(jax.grad(loss)(t)).coalesce().values ** 2)

    @jax.jit
    def run(made):
        grad, dense = jax.grad(loss)(made), jax.grad(loss)(TABLE)
        _, product = jax.jvp(jax.grad(loss), (made,), (grad,))
        _, expected = jax.jvp(jax.grad(loss), (TABLE,), (dense,))
        _, change = jax.jvp(loss, (made,), (grad,))
        again = jax.grad(lambda t: jnp.sum(jax.grad(loss)(t) ** 2))(TABLE)
        pairs = [(product, expected), (jax.grad(penalty)(made), again)]
        pairs = [(a.to_dense(), b) for a, b in selected_rows(pairs)]
        return [*pairs, (change, jnp.sum(dense**2))]

    for found, expected in run(sparse_table(TABLE, CAPACITY)):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


# ------------------------------------------------------------------ training


def model(tables, w, ids):
    users = tables["users"][ids]
    items = sj.embedding_bag(tables["more"]["items"], ids[:, None], combiner="mean")
    return jnp.mean((jnp.sum(users * items, 1) * w) ** 2)


@needs_hijax
@pytest.mark.loose_promotion
def test_a_step_trains_in_place():
    """Tables in a tree, a dense leaf, Adam, donated: in place, as sj.value_and_grad.

    Nothing in the program has the size of a table.
    """
    height, n = 100_000, 4
    tx = sj.optim.lazy(optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.1)))

    def update(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    def step(params, state, ids):
        tables, w = params
        made = jax.tree.map(lambda array: sparse_table(array, n), tables)
        grads = jax.grad(model, (0, 1))(made, w, ids)
        return *update(params, state, grads), sj.optim.global_norm(grads)

    def own_step(params, state, ids):
        tables, w = params
        grads = sj.grad(model, (0, 1), tables=(True, False))(tables, w, ids)
        return *update(params, state, grads), sj.optim.global_norm(grads)

    def start():
        array = jnp.ones((height, D))
        params = ({"users": array, "more": {"items": 2 * array}}, jnp.float32(1))
        return params, tx.init(params)

    ids = jnp.array([5, 7, 5, 99_999])
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(*start(), ids).compile()
    memory: Any = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < height
    expected = jax.jit(own_step)(*start(), ids)
    before = start()
    address = before[0][0]["users"].unsafe_buffer_pointer()
    found = compiled(*before, ids)
    assert found[0][0]["users"].unsafe_buffer_pointer() == address
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected)):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
    # A gradient that `jit` returned goes into another `jit`.
    (tables, w), state = start()
    made = jax.tree.map(lambda array: sparse_table(array, n), tables)
    grads = jax.jit(jax.grad(model, (0, 1)))(made, w, ids)
    again, _ = jax.jit(update)((tables, w), state, grads)
    for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(expected[0])):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


@needs_hijax
@pytest.mark.loose_promotion
def test_all_of_optim_takes_the_gradient():
    """By their types: the updates are those of a gradient from sj.grad."""
    sgd = sj.optim.lazy(optax.sgd(0.1))
    optimizers = [
        sj.optim.accumulate(sgd, 2, 4),
        sj.optim.dynamic_loss_scale(sgd),
        sj.optim.exact(optax.adam(0.1)),
        sj.optim.ftrl(0.1),
        sj.optim.rounding(sgd, master=True),
    ]
    loss = lambda t: squares(t[IDS[0]])

    def updates(array, grad):
        return [tx.update(grad, tx.init(array), array)[0] for tx in optimizers]

    def by_type(array):
        return updates(array, jax.grad(loss)(sparse_table(array, 3)))

    def by_trace(array):
        return updates(array, sj.grad(loss, tables=True)(array))

    found, expected = (jax.eval_shape(f, TABLE) for f in (by_type, by_trace))
    assert jax.tree.structure(found) == jax.tree.structure(expected)


# ------------------------------------------------------------------ what is refused

WHOLE = {
    "+": lambda t: t + 1,
    "@": lambda t: t @ jnp.ones(D),
    "1 - ": lambda t: jnp.ones(D) - t,
    "T": lambda t: t.T,
    "astype": lambda t: t.astype(jnp.bfloat16),
    "sum": lambda t: jnp.sum(t),
    "take": lambda t: jnp.take(t, IDS, axis=0),
    "asarray": lambda t: np.asarray(t) if not hasattr(t, "aval") else jnp.asarray(t),
    "top_k": lambda t: sj.top_k(t, jnp.ones((1, D)), 2),
    "value_and_grad": lambda t: sj.value_and_grad(lambda t: squares(t[IDS]))(t),
}


@needs_hijax
def test_use_of_the_whole_table():
    table = sparse_table(TABLE, CAPACITY)
    for name, use in WHOLE.items():
        with pytest.raises((TypeError, AttributeError)):
            use(table)
        if name not in ("top_k", "value_and_grad"):
            with pytest.raises(TypeError, match="read by rows only: table"):
                jax.grad(use)(table)


@needs_hijax
def test_refusals():
    table = sparse_table(TABLE, 2)
    assert (len(table), table.ndim, table.dtype) == (V, 2, jnp.float32)
    assert repr(table) == "SparseTable(float32[40,3], capacity=2)"
    for ids in (slice(3), (IDS, 1), None, jnp.ones(V, bool), 1.5):
        with pytest.raises(TypeError, match="ids must be integers"):
            table[ids]
    with pytest.raises(TypeError, match="a loop over its rows"):
        list(table)
    with pytest.raises(TypeError, match="outside of the function"):
        jax.grad(lambda array: squares(sparse_table(array, 9)[IDS]))(TABLE)
    with pytest.raises(ValueError, match="3 distinct rows do not fit in capacity=2"):
        jax.grad(lambda t: squares(t[IDS[0]]) + squares(t[9]))(table)
    grad = jax.jit(jax.grad(lambda t: squares(t[IDS[0]]) + squares(t[9])))(table)
    assert jnp.isnan(grad.values).all()
    # A table that is not differentiated may be made anywhere.
    value = jax.grad(lambda w: w * squares(sparse_table(TABLE, 1)[3]))(2.0)
    np.testing.assert_allclose(value, squares(TABLE[3]), rtol=1e-6)


@needs_hijax
def test_example():
    """It cannot run as a doctest on releases without hijax."""
    module = importlib.import_module("sparsejax.experimental._sparse_table")
    doc = (sparse_table.__doc__ or "").replace("# doctest: +SKIP", "")
    case = doctest.DocTestParser().get_doctest(doc, {}, "doc", module.__file__, 0)
    assert doctest.DocTestRunner().run(case).failed == 0


def test_without_hijax():
    """The message that names the release; `selected_rows` does nothing."""
    grads = {"w": TABLE, "rows": sj.SelectedRows([1], jnp.ones((1, 2)), 4), "no": None}
    assert selected_rows(grads) is grads
    if not HAS_HIJAX:
        with pytest.raises(RuntimeError, match=r"needs jax 0\.12 or newer, got jax 0"):
            sparse_table(TABLE, CAPACITY)
