"""SelectedRows as a pytree: of one table, of a stack of tables `[K, V, ...]`, batches.

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
    assert_same_bits,
    assert_trees_close,
    count_traces,
    dense,
    make_rows,
)


V = 7
apply_updates: Any = optax.apply_updates


# ------------------------------------------------------------------ trees


def test_it_is_a_pytree():
    a, _ = make_rows([4, 0, 4], V)
    paths = jax.tree_util.tree_leaves_with_path({"t": a})
    assert [jax.tree_util.keystr(p) for p, _ in paths] == ["['t'].rows", "['t'].values"]
    leaves, treedef = jax.tree.flatten(a)
    assert_trees_close(jax.tree.unflatten(treedef, leaves), a)
    assert treedef != jax.tree.structure(make_rows([4, 0, 4], V + 1)[0])
    # Code that rebuilds trees puts anything into them.
    for placeholder in (object(), None, "x", 3):
        rebuilt = jax.tree.unflatten(treedef, [placeholder] * 2)
        assert rebuilt.rows is placeholder and rebuilt.height == V
    changed = jax.tree.unflatten(treedef, [np.zeros(3), np.zeros((3, 3))])
    with pytest.raises(TypeError, match=r"SelectedRows\.map"):
        changed.map(lambda v: v)
    with pytest.raises(AttributeError):
        a.height = 3  # pyright: ignore[reportAttributeAccessIssue]


def test_any_tree_of_leaves_has_a_repr():
    """For example jax.tree.map(type, grads), which users often type first."""
    rows = sj.SelectedRows(jnp.array([1, 2]), jnp.ones((2, 3)), height=9)
    segments = sj.SegmentTensor.from_lists([[1], [2, 3]])
    for f in (type, str, jnp.shape, lambda x: None, lambda x: x.dtype):
        for tree in (rows, segments):
            assert type(tree).__name__ in repr(jax.tree.map(f, tree))


def test_of_types_alone():
    struct = jax.ShapeDtypeStruct
    made = sj.SelectedRows(struct((3,), jnp.int32), struct((3, 3), jnp.float32), V)
    assert jax.tree.structure(made) == jax.tree.structure(make_rows([4, 0, 4], V)[0])
    spec = jax.eval_shape(lambda a: (a + a).coalesce(capacity=4), made)
    assert isinstance(spec, sj.SelectedRows)
    assert isinstance(spec.values, jax.ShapeDtypeStruct)
    assert spec.shape == (V, 3) and spec.capacity == 4 and spec.dtype == jnp.float32
    # Their ids cannot be widened: the type of a table's height is for arrays.
    narrow = sj.SelectedRows(struct((3,), jnp.int8), made.values, 1000)
    assert narrow.rows == struct((3,), jnp.int8)


def test_one_trace_per_shape_and_height():
    f = count_traces(lambda a: a.coalesce() * 2)
    g = jax.jit(f)
    for rows in ([4, 0], [1, V], [2, 2]):
        g(make_rows(rows, V)[0])
    assert f.count == 1
    g(make_rows([4, 0], V + 1)[0])
    assert f.count == 2


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
    apply = lambda p, u: apply_updates({"t": p}, {"t": u})["t"]
    for f in operator.add, operator.sub, apply:
        assert_in_place(f, jnp.ones((BIG, 3)), a)


# ------------------------------------------------------------------ batches


def _batch():
    parts = [
        make_rows(ids, V, seed=i)[0] for i, ids in enumerate(([4, 0, 4], [V, 1, 1]))
    ]
    return jax.tree.map(lambda *x: jnp.stack(x), *parts), parts


OF_A_BATCH = {
    "rows": lambda g, a: g.rows,
    "filled": lambda g, a: g.filled(),
    "safe_rows": lambda g, a: g.safe_rows(),
    "num_rows": lambda g, a: g.num_rows(),
    "map": lambda g, a: -(2 * g.map(jnp.sin).astype(jnp.float16)) / 4,
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
    "multiply": lambda g, a: g * g,
    "add to array": lambda g, a: a + g,
    "apply_updates": lambda g, a: optax.apply_updates({"t": a}, {"t": g}),
    "concatenate": lambda g, a: sj.concatenate([g, g]),
    "lookup": lambda g, a: sj.lookup(g, np.array([4, 2])),
    "bag": lambda g, a: sj.embedding_bag(g, np.array([[4, 2]])),
    "norm": lambda g, a: sj.optim.global_norm(g),
    "lazy": lambda g, a: sj.optim.lazy(optax.sgd(0.1)).update(g, optax.EmptyState(), a),
}


@pytest.mark.parametrize("name", OF_A_BATCH)
def test_a_batch_outside_of_vmap(name):
    """Equal to the function under vmap, or an error that names it; never else."""
    (batch, _), array = _batch(), jnp.ones((V, 3))
    f = OF_A_BATCH[name]
    try:
        got = f(batch, array)
    except Exception as error:
        assert "This is a batch" in str(error) and "jax.vmap(f)(batch)" in str(error)
    else:
        assert_trees_close(got, jax.vmap(f, (0, None))(batch, array))


def test_what_the_error_of_a_batch_names():
    batch, parts = _batch()
    rows, values = batch.rows.ravel(), jnp.concatenate(batch.values)
    total = sj.SelectedRows(rows, values, batch.height)
    assert_trees_close(total.to_dense(), (parts[0] + parts[1]).to_dense())
    assert_trees_close(jax.tree.map(lambda x: x[0], batch), parts[0])
    assert "int32[2,3]" in repr(batch)


# ------------------------------------------------------------------ stacks of tables

K, HEIGHT = 3, 5
ROWS = np.array([14, 2, 2, 15, -1, 5])  # two of them empty; ids count all tables' rows
VALUES = np.arange(12.0, dtype=np.float32).reshape(6, 2)
STACK = sj.SelectedRows(ROWS, VALUES, K * HEIGHT, stack=(K,))
WHOLE = dense(ROWS, VALUES, K * HEIGHT).reshape(K, HEIGHT, 2)


def _is_stack(x):
    return isinstance(x, sj.SelectedRows) and (x.stack, x.height) == ((K,), K * HEIGHT)


def test_a_stack():
    g = STACK
    assert (g.shape, g.ndim, g.capacity, g.row_shape) == ((3, 5, 2), 3, 6, (K, HEIGHT))
    assert "height=15, stack=(3,), num_rows=4" in repr(g)
    assert "stack=(3,)" in repr(jax.eval_shape(lambda: g))
    assert g.unstacked().shape == (15, 2) and g.unstacked().unstacked().stack == ()
    assert sj.desc.describe({"g": g})[0].dims == (K, HEIGHT, 2)
    # Trees tell a stack from a table.
    structure = jax.tree.structure
    assert structure(g) == structure(g.coalesce(4)) != structure(g.unstacked())
    other = sj.SelectedRows(ROWS, VALUES, K * HEIGHT, stack=(HEIGHT,))
    assert structure(g) != structure(other)


@pytest.mark.slow
def test_operations_keep_the_stack():
    @jax.jit
    def run(g):
        want = {
            "coalesce": (g.coalesce(), WHOLE),
            "merged": (g.coalesce(3, return_overflow=True)[0], WHOLE),
            "map": (g.map(jnp.negative), -WHOLE),
            "scaled": (2 * g / 4, WHOLE / 2),
            "sum": (g + g - g, WHOLE),
            "product": (g * g, WHOLE**2),
            "concatenated": (sj.concatenate([g, g]), 2 * WHOLE),
            "retained": (g.retain([2]), np.where(WHOLE == WHOLE[0, 2], WHOLE, 0)),
            "cast": (g.astype(jnp.bfloat16), WHOLE),
            "tree": (jax.tree.map(lambda x: x, g), WHOLE),
            "scan": (jax.lax.scan(lambda c, _: (c * 1.0, None), g, None, 2)[0], WHOLE),
            "gradient": (sj.grad(lambda g: 0.5 * jnp.sum(g.to_dense() ** 2))(g), None),
        }
        return want, {k: x.to_dense() for k, (x, _) in want.items()}, g.get([2, 7])

    want, dense, rows = run(STACK)
    for name, (found, whole) in want.items():
        assert _is_stack(found), name
        if whole is not None:
            np.testing.assert_array_equal(dense[name], whole, err_msg=name)
    assert_same_bits(want["gradient"][0].rows, STACK.rows)
    assert_same_bits(rows, np.stack([WHOLE[0, 2], [0, 0]]).astype("f"))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_stack_is_added_to_an_array(dtype):
    array = jnp.ones((K, HEIGHT, 2), dtype)
    added = jax.jit(lambda g, x: x + g)(STACK, array)
    assert_same_bits(added, (1 + WHOLE).astype(dtype))
    assert_same_bits(STACK + np.asarray(array), added)
    assert_same_bits(array - STACK, (1 - WHOLE).astype(dtype))
    for wrong in (jnp.ones((K * HEIGHT, 2)), STACK.unstacked()):
        with pytest.raises(ValueError, match=r"\(3, 5, 2\)"):
            _ = STACK + wrong


def test_a_stack_is_not_read():
    """tests/error_messages.md has `lookup`."""
    with pytest.raises(TypeError, match=r"Use .get\(k \* V \+ v\)"):
        STACK[7]
    csr = sj.SegmentTensor.from_csr([0, 1], [1], [1.0])
    calls = (
        lambda: sj.embedding_bag(STACK, jnp.array([[1]])),
        lambda: sj.dot(csr, STACK),
    )
    for call in calls:
        with pytest.raises(ValueError, match=r"a stack.*unstacked"):
            call()
