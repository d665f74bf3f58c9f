"""The surface of value_and_grad, grad and explain: arguments, errors, the table."""

import dataclasses
import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsejax as sj
from helpers import is_rows, ones, to_dense
from sparsejax import _compat


IDS, T = jnp.array([3, 1, 3]), jnp.ones((40, 2))


def _params():
    return {"table": T, "w": jnp.arange(2.0), "b": 0.5}


def _loss(params, ids, scale=1.0):
    rows = params["table"][ids] * params["w"][None, :]
    return scale * jnp.sum(jnp.sin(rows)) + params["b"]


def _assert_same(sparse, dense):
    sparse = to_dense(sparse)
    assert jax.tree.structure(sparse) == jax.tree.structure(dense)
    for a, b in zip(jax.tree.leaves(sparse), jax.tree.leaves(dense)):
        np.testing.assert_allclose(a, b, rtol=1e-6)
        assert jnp.result_type(a) == jnp.result_type(b)


# -- arguments -------------------------------------------------------------------------


_MEET = {  # t [60, 4], w [1, 4] and u [60, 4] meet in one equation
    "left": lambda t, w, u: jnp.subtract(t, w),
    "right": lambda t, w, u: jnp.maximum(w, t),
    "broadcast": lambda t, w, u: t * jnp.broadcast_to(w, t.shape),
    "a view": lambda t, w, u: jnp.broadcast_to(jnp.exp(w), t.shape) / t,
    "two tables": lambda t, w, u: t * u + w,
    "rows of both": lambda t, w, u: t + u[jnp.array([5, 3])][:1],
}


@pytest.mark.parametrize("name", _MEET)
def test_parameters_that_meet_a_table(name):
    rng = np.random.default_rng(0)
    shapes = {"t": (60, 4), "w": (1, 4), "u": (60, 4)}
    params = {k: np.float32(rng.normal(size=s)) for k, s in shapes.items()}
    ids = jnp.array([3, 3, 7])
    loss = lambda p: jnp.sum(jnp.sin(_MEET[name](**p)[ids]))
    got, dense = jax.jit(lambda p: (sj.grad(loss)(p), jax.grad(loss)(p)))(params)
    expected = {"two tables": set(), "rows of both": {"t", "u"}}
    assert {k for k, g in got.items() if is_rows(g)} == expected.get(name, {"t"})
    _assert_same(got, dense)


_OF_ONE_ROW = [
    lambda t, i: t[0],
    lambda t, i: t[i],
    lambda t, i: t[i[None]],
    lambda t, i: jnp.squeeze(2 * t),
    lambda t, i: t.T.reshape(-1),
    lambda t, i: sj.lookup(t, i)[None],
    lambda t, i: t[None].ravel(),
    lambda t, i: jax.lax.cond(i > 0, lambda: t[:1].sum(), lambda: t[i].sum()),
]


@pytest.mark.parametrize("shape", [(1, 3), (1,), (1, 1)])
def test_a_table_of_one_row(shape):
    """It is read by rows in every way, if `tables=` asks for it."""
    table = np.arange(1, 1 + np.prod(shape), dtype=np.float32).reshape(shape)
    square = lambda read: lambda t, i: jnp.sum(read(t, i) ** 2 * jnp.sum(read(t, i)))
    losses = list(map(square, _OF_ONE_ROW))

    @jax.jit
    def run(table, i):
        assert not any(is_rows(sj.grad(loss)(table, i)) for loss in losses)
        sparse = [sj.grad(loss, tables=True)(table, i) for loss in losses]
        return sparse, [jax.grad(loss)(table, i) for loss in losses]

    for got, dense in zip(*run(table, 0)):
        assert is_rows(got)
        _assert_same(got, dense)


def test_two_tables_of_one_row_meet():
    w, ids = np.ones((1, 4), np.float32), jnp.array([0])
    loss = lambda v, w: jnp.sum((v * w)[ids] ** 2)
    for tables in (True, None), (None, True):
        got = jax.jit(sj.grad(loss, (0, 1), tables=tables))(w, 2 * w)
        assert [is_rows(g) for g in got] == [bool(t) for t in tables]
        _assert_same(got, (8 * w, 4 * w))
    with pytest.raises(sj.DensifyError, match="for w .*combines it with all rows"):
        sj.grad(loss, (0, 1), tables=True)(w, 2 * w)


CALLS: dict[str, Any] = {
    "a tree": lambda find: find(_loss)(_params(), IDS, scale=2.0),
    "keywords": lambda find: find(lambda t, *, ids: jnp.sum(t[ids] * T[ids]))(
        T, ids=IDS
    ),
    "numpy": lambda find: find(lambda t, s: s * jnp.sum(t[np.array([1])]), (0, 1))(
        np.ones((40, 2), np.float32), 2.0
    ),
    "partial": lambda find: find(functools.partial(_loss, scale=3.0))(_params(), IDS),
    "jitted": lambda find: find(jax.jit(_loss))(_params(), IDS),
    "aux": lambda find: find(lambda t: (jnp.sum(t[IDS]), t[IDS]), has_aux=True)(T),
    "a dense leaf": lambda find: find(
        lambda w, t: jnp.sum(jnp.tanh(t[IDS] @ w.T)), (0, 1)
    )(jnp.linspace(0.0, 1.0, 12).reshape(6, 2), T),
    "static arguments": lambda find: find(
        lambda t, ids, k, name, f, flag, nothing: (
            jnp.sum(f(t[ids][:k])) if (name, flag, nothing) == ("x", True, None) else 0
        )
    )(T, IDS, 2, "x", jnp.tanh, True, None),
}


@pytest.mark.window
@pytest.mark.parametrize("name", CALLS)
def test_calls_are_those_of_jax(name):
    got = CALLS[name](sj.value_and_grad)
    assert any(map(is_rows, jax.tree.leaves(got[1], is_leaf=is_rows)))
    _assert_same(got, CALLS[name](jax.value_and_grad))


@pytest.mark.parametrize(
    "argnums",
    [0, 1, -1, (0,), (2, 0), [1, 2], (-1, 0)]
    + [np.int64(0), np.uint8(1), np.array(2), jnp.int32(-1), (np.int64(1),), range(2)],
)
def test_argnums(argnums):
    def fun(table, w, other):
        return jnp.sum(table[IDS] * w[None, :]) + jnp.sum(other[IDS[:1]] ** 2)

    args = T, np.arange(2, dtype=np.float32), np.ones((30, 4), np.float32)
    got, dense = (f(fun, argnums)(*args) for f in (sj.grad, jax.grad))
    assert isinstance(got, tuple) == isinstance(dense, tuple)
    _assert_same(got, dense)


@pytest.mark.window
def test_numpy_ids_beyond_32_bits():
    """JAX would cut them to 32 bits, to ids in range."""
    loss = lambda table, ids: jnp.sum(sj.lookup(table, ids, mode="zero"))
    ids = np.array([2**32 + 1, 3, -(2**32) + 2, 3])
    value, got = sj.value_and_grad(loss)(T, ids)
    count, row = jax.jit(lambda g: (g.coalesce().num_rows(), g.get(3)))(got)
    assert value == 4 and count == 1 and row.tolist() == [2, 2]


@pytest.mark.window
def test_ids_beyond_32_bits_read_what_jax_reads(x64):
    """JAX itself cuts the ids of `table[ids]` to 32 bits."""
    table = np.arange(80.0).reshape(40, 2)
    ids = np.array([3, 2**31, 2**32 + 3, -(2**32) + 5, -3, -(2**31) - 1, 2**63 - 1])
    for read in (
        lambda t, ids: t[ids],
        lambda t, ids: jnp.take(t, ids, axis=0, mode="clip"),
        lambda t, ids: t.at[ids].get(mode="fill", fill_value=0),
    ):
        loss = lambda t, ids, read=read: jnp.sum(read(t, ids) ** 2)
        got = jax.jit(sj.value_and_grad(loss, tables=True))(table, ids)
        _assert_same(got, jax.jit(jax.value_and_grad(loss))(table, ids))


def test_looks_like_the_function():
    def fun(table, ids):
        """My loss."""

    assert sj.value_and_grad(fun).__name__ == "fun"
    assert sj.grad(fun).__doc__ == "My loss."
    for ours, theirs in ((sj.grad, jax.grad), (sj.value_and_grad, jax.value_and_grad)):
        names = list(inspect.signature(ours).parameters)
        assert names == ["fun", "argnums", "has_aux", "tables"]
        assert names[:3] == list(inspect.signature(theirs).parameters)[:3]


# -- tables= ---------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Callable:
    """A tree whose container can be called, as modules of equinox can."""

    table: Any
    w: Any

    def __call__(self, ids):
        return jnp.sum(self.table[ids] @ self.w)


def _is_table(rank, path, leaf):
    return path[-1].key == "table" and leaf.ndim == rank


@pytest.mark.parametrize(
    "tables, is_sparse",
    [
        ({"table": True, "w": None, "b": False}, True),
        (functools.partial(_is_table, 2), True),
        (jax.tree_util.Partial(_is_table, 2), True),  # a function that is a tree
        (False, False),
        ({"table": False, "w": None, "b": None}, False),
    ],
)
def test_tables_as_prefix_and_callable(tables, is_sparse):
    g = sj.grad(_loss, tables=tables)(_params(), IDS)
    assert is_rows(g["table"]) == is_sparse
    _assert_same(g, jax.grad(_loss)(_params(), IDS))


@pytest.mark.parametrize("leaves", [(True, False), (True, None), (None, None)])
def test_tables_is_a_tree_that_can_be_called(leaves):
    model, tables = Callable(np.ones((5, 2), "f"), np.ones(2, "f")), Callable(*leaves)
    loss = lambda model, ids: model(ids)
    g = jax.jit(sj.grad(loss, tables=tables))(model, IDS)
    assert is_rows(g.table) == bool(leaves[0])
    _assert_same(g, jax.jit(jax.grad(loss))(model, IDS))
    (wrapped,) = jax.eval_shape(sj.grad(loss, (0,), tables=(tables,)), model, IDS)
    assert is_rows(wrapped.table) == bool(leaves[0])
    if leaves[0]:
        tx = sj.optim.exact(optax.sgd(0.1), tables=tables)
        assert len(tx.init(model).last_updates) == 1


# -- explain ---------------------------------------------------------------------------


def _three_tables(params, ids):
    rows = params["sparse"][ids]
    logits = rows @ params["tied"].T + params["tied"][ids] @ params["tied"].T
    return jnp.sum(logits) + jnp.sum(params["tiny"][ids % 4])


def test_explain_sparse_tied_and_tiny():
    shapes = {"sparse": (1000, 2), "tied": (1000, 2), "tiny": (4, 2), "bias": (3,)}
    told = sj.explain(_three_tables)({k: np.ones(s) for k, s in shapes.items()}, IDS)
    first = inspect.getsourcelines(_three_tables)[1]
    sparse, tied, tiny, bias = (told[f"params['{name}']"] for name in shapes)
    assert sparse.sparse and sparse.rows_read == 3
    assert sparse.reads[0][1].endswith(f"test_grad.py:{first + 1}")
    assert not tied.sparse and f"test_grad.py:{first + 2}" in tied.reason
    assert not tiny.sparse and "3 of 4 rows" in tiny.reason
    assert not bias.sparse and "rank" in bias.reason
    assert str(told) == repr(told)
    head, *lines = str(told).splitlines()
    assert all(title in head for title in ("leaf", "gradient", "rows read"))
    for name, kind, line in (("sparse", "sparse", 1), ("tied", "dense", 2)):
        (row,) = [x for x in lines if x.startswith(f"params['{name}']")]
        assert kind in row and f"test_grad.py:{first + line}" in row


@pytest.mark.window
def test_explain_groups_what_is_no_table():
    """So that the line of the table is seen among those of a transformer."""

    def transformer(params, ids):
        x = params["items"][ids] + params["positions"][: ids.size]
        for layer in params["layers"]:
            x = x @ layer["in"] * layer["scale"] @ layer["out"]
        return jnp.sum(x @ params["head"])

    layer = {"in": ones(4, 9), "out": ones(9, 4), "scale": ones(1, 9)}
    params = {
        "head": ones(4, 50),
        "items": ones(50, 4),
        "layers": [layer] * 6,
        "positions": ones(4, 4),
    }
    told = sj.explain(transformer)(params, IDS)
    assert len(told.leaves) == 21
    _, _, items, positions, *groups = str(told).splitlines()
    assert items.split()[:4] == ["params['items']", "float32[50,4]", "sparse", "3"]
    assert "params['positions']" in positions and "reads 3 of 4 rows" in positions
    assert [line for line in groups if "reads 3 at" not in line] == [
        "13 parameters are not tables: dot_general (the largest is params['head'], "
        "float32[4,50])",
        "6 parameters are not tables: has one row (the largest is "
        "params['layers'][0]['scale'], float32[1,9])",
    ]


@pytest.mark.window
def test_explain_takes_what_grad_takes_and_shapes():
    told = sj.explain(_loss, tables=True)(_params(), IDS)
    assert told["params['table']"].sparse
    assert "scalar has no rows" in told["params['b']"].reason
    fun = lambda table, batch, other: (
        jnp.sum(sj.embedding_bag(table, batch["ids"])) + jnp.sum(other)
    )
    like = jax.ShapeDtypeStruct
    args = like((60, 2), jnp.float32), {"ids": like((2, 3), jnp.int32)}, T
    leaves = sj.explain(fun, (2, 0))(*args).leaves
    told = [(x.name, x.sparse, x.rows_read) for x in leaves]
    assert told == [("other", False, 0), ("table", True, 6)]


# -- sizes and settings out of the ordinary --------------------------------------------

READS = {
    "index": lambda t: t[IDS],
    "take": lambda t: jnp.take(t, IDS, axis=0),
    "lookup": lambda t: sj.lookup(t, IDS, max_norm=1.0),
    "bag": lambda t: sj.embedding_bag(t, IDS[None], combiner="mean"),
    "bag_max": lambda t: sj.embedding_bag(t, IDS[None], combiner="max"),
    "bag_of_a_view": lambda t: sj.embedding_bag(2.0 * t, IDS[None]),
    "scan": lambda t: jax.lax.scan(lambda c, i: (c, t[i]), 0.0, IDS)[1],
}


@pytest.mark.window
@pytest.mark.parametrize("read", READS)
def test_rows_without_numbers(read):
    loss = lambda t: jnp.sum(READS[read](t))
    for shape in ((40, 0), (40, 0, 2)):
        table = np.ones(shape, np.float32)
        assert jax.eval_shape(sj.grad(loss), table).shape == shape
        g = jax.jit(sj.grad(loss, tables=True))(table)
        assert g.shape == shape and g.values.shape[1:] == shape[1:]


@pytest.mark.window
def test_debug_nans():
    """No NaN arises that is not in the result, and one that was read is seen."""
    with jax.debug_nans(True):
        for read in READS.values():
            g = sj.grad(lambda t, read=read: jnp.sum(read(t)), tables=True)(T)
            assert np.all(np.isfinite(g.values))
        fun = lambda t: jnp.sum(jnp.take(t, jnp.array([50]), axis=0))
        with pytest.raises(FloatingPointError):
            sj.grad(fun, tables=True)(T)


@pytest.mark.window
def test_more_rows_than_32_bits_can_name():
    """A parameter that JAX differentiates without 64-bit ids has a dense gradient."""
    table = jax.ShapeDtypeStruct((2**31 + 5, 2), jnp.float32)
    loss = lambda t: jnp.sum(t[3:5])
    assert jax.eval_shape(sj.grad(loss), table) == jax.eval_shape(jax.grad(loss), table)
    assert "64-bit ids" in sj.explain(loss)(table)["t"].reason
    with pytest.raises(sj.DensifyError, match="64-bit ids"):
        jax.eval_shape(sj.grad(loss, tables=True), table)
    with _compat.enable_x64(True):
        g = jax.eval_shape(sj.grad(loss), table)
    assert g.rows.dtype == jnp.int64 and g.shape == table.shape
