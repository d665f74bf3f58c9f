"""gluon.md: its code, checked against the answers of MXNet.

`golden/mxnet.json` and `.npz` hold the answers of MXNet (the header of the former names
their source); the rows are in `gluon.txt`, with NumPy or by hand. A row without code
names scipy's.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.sparse as sp
import scipy.special
from jax.experimental import checkify  # noqa: F401  (in gluon.txt)

import sparsejax as sj
from recorded import (
    Page,
    assert_answers,
    assert_same_kind,
    dense,  # noqa: F401  (in gluon.txt)
    filled_rows,
    page_ran,  # noqa: F401  (a fixture)
    same,
    table_grad,
    train,
)
from sparsejax import _compat


pytestmark = [pytest.mark.usefixtures("loose_promotion"), pytest.mark.slow]

PAGE = Page("gluon", golden="mxnet", hidden=("2 ",))
run, inputs, outputs, named = PAGE.run, PAGE.inputs, PAGE.outputs, PAGE.named


# ------------------------------------------------------------------ for gluon.txt

X = np.array([[0.5, 0, -1.5], [0, 0, 0], [2.5, -0.7, 0], [0, 0, 3]], np.float32)
Y = np.array([[0, 0, 2.0], [1, -2, 0], [3.0, 0, 0], [0, 0, 0]], np.float32)
ROW = np.array([1.0, 2.0, 4.0], np.float32)
BIAS = np.array([1.0, -1.0], np.float32)
WIDE = np.array([[1, 2, 3], [4, 5, 6.0]], np.float32)
COUNTS = {"shape": (4, 3)}
C, D = sp.csr_matrix, jnp.asarray
R = jax.jit(functools.partial(sj.SelectedRows.from_dense, capacity=4))


def elements(x):
    return sj.SegmentTensor.from_csr(sp.csr_matrix(x))


def as_scipy(st, columns):
    """A batch of a loader as scipy's matrix."""
    offsets = np.asarray(st.offsets)
    index, value = (np.asarray(st.values[k])[: offsets[-1]] for k in ("index", "value"))
    return sp.csr_matrix((value, index, offsets), (st.num_segments, columns))


def rows_of(loader):
    """The rows of a loader of CSR as a dense array."""
    return np.concatenate([as_scipy(batch, 5).toarray() for batch in loader])


def by_name(name, *fields):
    return [inputs(name)[field] for field in fields]


def says(name, words):
    return words in named(name)["error"]["message"]


def merged_rows(x):
    return sorted({*filled_rows(x)})


def pulled(got, name):
    """Whether rows are those of the first output of a case, in its order."""
    want = PAGE.first(name)
    return same(got, want) and merged_rows(got) == want.rows.tolist()


def output_and_gradient(key, data, label):
    """The two numbers of an output of MXNet: it is not the gradient's integral."""
    loss = lambda data: run(key, data=data, label=label)[::-1]
    grad, output = jax.jit(jax.grad(loss, has_aux=True))(data)
    return output, grad


def last_one(rows, values):
    """The rows as MXNet makes them dense: of a row that occurs twice, the last one."""
    x = sj.SelectedRows(rows, values, 6)
    return sj.scatter_assign(jnp.zeros((6, 2)), x.rows[1:], x.values[1:])


def retained_gradient(x, indices):
    loss = lambda x: jnp.sum(x.retain(indices).to_dense() ** 2)
    return jax.jit(sj.value_and_grad(loss))(x)


def clipped_gradient(weight, ids, out_grad):
    clipped = lambda w: sj.lookup(w, ids, mode="clip")
    grad = table_grad(lambda w: clipped(w) * out_grad, weight)
    return clipped(weight), grad.to_dense()


def gradient_in_float64():
    with _compat.enable_x64(True):
        rows = lambda w: sj.lookup(w, jnp.array([1]))
        return table_grad(rows, jnp.ones((9, 3), jnp.float64))


def update_of(tx, g):
    table = np.zeros(g.shape, np.float32)
    return jax.jit(lambda g, table: tx.update(g, tx.init(table), table)[0])(g, table)


def from_ones(tx):
    """A gradient of 0.5, twice, changes a row of ones; the others stay."""
    g = sj.SelectedRows(jnp.array([2, 2]), jnp.full((2, 3), 0.5), 4)
    got = np.asarray(train(tx, jnp.ones((4, 3)), [g])[0])
    assert (got[[0, 1, 3]] == 1).all() and (got[2] == got[2, 0]).all()
    return got[2, 0]


def make_store(tx=None, name="weight", weight=None):
    store = sj.store.KVStore()
    if weight is None:
        weight = inputs("kv_row_sparse_pull_sorted")["weight"]
    store.init(name, weight, tx)
    return store


def squares(out, batch):
    return jnp.sum(out**2) / 4  # Trainer.step(4) divides by 4


def decayed_in_the_store():
    adagrad = optax.adagrad(0.1, initial_accumulator_value=0.0, eps=1e-7)
    tx = optax.chain(optax.add_decayed_weights(0.01), adagrad)
    store = make_store(tx, weight=np.ones((9, 3), np.float32))
    store.push("weight", sj.SelectedRows(jnp.array([1, 3]), jnp.ones((2, 3)), 9))
    return store.row_sparse_pull("weight", [1, 3])


def idle_step():
    """How a step moves a table that is pulled and not used."""

    class Idle(sj.nn.SparseEmbedding):
        def sparse_forward(self, tables, params, inputs):
            return jnp.zeros(1)

    store, block = make_store(optax.sgd(1.0), "w"), Idle(9, 3, name="w")
    before = store.pull_all("w")
    sj.nn.Trainer(block, store, squares, optax.sgd(1.0)).step(jnp.array([1]))
    return store.pull_all("w") - before


# ------------------------------------------------------------------ one array

FUNCTIONS = [
    [cell.strip("`") for cell in cells[:2]]
    for section, cells in PAGE.tables()
    if section.startswith("2 ")
]
# Those that NumPy has under another name.
OF_NUMPY = {
    "clip": lambda v: np.clip(v, -1, 2),
    "fix": np.trunc,
    "gamma": scipy.special.gamma,
    "gammaln": scipy.special.gammaln,
    "make_loss": lambda v: v,
    "relu": lambda v: np.maximum(v, 0),
    "rint": lambda v: np.ceil(v - 0.5),
    "round": lambda v: np.sign(v) * np.floor(np.abs(v) + 0.5),
    "rsqrt": lambda v: 1 / np.sqrt(v),
    "sigmoid": scipy.special.expit,
    "stop_gradient": lambda v: v,
}


@pytest.mark.parametrize("name, code", FUNCTIONS)
def test_function_of_one_array(name, code):
    """It keeps the storage if f(0) = 0, and else is of the dense array."""
    name, falls_back = name.removeprefix("sparse."), "dense(x)" in code
    run = lambda x: eval(code, {**PAGE.blocks, "x": x, "a_min": -1.0, "a_max": 2.0})
    x = X + 0.25 if falls_back else X
    with np.errstate(all="ignore"):
        want = (OF_NUMPY.get(name) or getattr(np, name))(x)
    for given in (R(x), C(x)):
        got = run(given)
        assert isinstance(got, jax.Array if falls_back else type(given))
        assert_answers(got, want, rtol=2e-5)
    if "on_stored" in code:
        assert_answers(as_scipy(jax.jit(run)(elements(x)), 3), want, rtol=2e-5)
    if name in outputs("unary_csr"):
        assert_same_kind(run(inputs("unary_csr")["x"]), outputs("unary_csr")[name])


# ------------------------------------------------------------------ gradients


@pytest.mark.parametrize(
    "name, key",
    [
        ("dot_csr_rspweight_grad_rsp", "sparse.dot(csr, row_sparse)"),
        ("dot_csr_rspweight_grad_rsp", "sparse.dot(csr, default)"),
        (
            "dot_csrT_dns_grad_rsp_request",
            "sparse.dot(csr.T, default, forward_stype=default)",
        ),
    ],
)
def test_recorded_dot_gradients(name, key):
    lhs, rhs = by_name(name, "lhs", "rhs")
    rhs = rhs.to_dense() if key == "sparse.dot(csr, default)" else rhs
    f, want = lambda rhs: run(key, lhs=lhs, rhs=rhs), outputs(name)
    loss = lambda rhs: (jnp.sum(f(rhs) ** 2), f(rhs))
    step = jax.jit(sj.value_and_grad(loss, has_aux=True, tables=True))
    (value, y), grad = step(rhs)
    assert_same_kind(y, want["y"])
    assert_same_kind(np.reshape(value, 1), want["loss"])
    assert_same_kind(grad, want["rhs_grad"])
    if key == "sparse.dot(csr, default)":  # the rows of the columns that are there
        assert merged_rows(grad) == merged_rows(want["rhs_grad"])


@pytest.mark.parametrize("name", ["embedding_int64_ids", "embedding_dense_grad"])
def test_recorded_embedding(name):
    (weight, ids, out_grad), want = inputs(name).values(), outputs(name)
    f = lambda weight: run("sparse.Embedding", weight=weight, data=ids)
    sparse = isinstance(want["weight_grad"], sj.SelectedRows)
    loss = lambda weight: (jnp.sum(f(weight) * out_grad), f(weight))
    grad, y = jax.jit(sj.grad(loss, has_aux=True, tables=sparse))(weight)
    assert_same_kind(y, want["y"])
    assert_same_kind(grad, want["weight_grad"])
    assert not sparse or merged_rows(grad) == merged_rows(want["weight_grad"])


# ------------------------------------------------------------------ training


def batches_of(name):
    is_ids = lambda x: isinstance(x, jax.Array)  # MXNet's ids are floats
    batches = by_name(name, *[f"x{i}" for i in range(5)])
    return [x.astype(jnp.int32) if is_ids(x) else x for x in batches]


def assert_steps(name, steps):
    """Compares parameters and losses after each step."""
    want = outputs(name)
    for i, (params, loss) in enumerate(steps):
        np.testing.assert_allclose(4 * loss, want["losses"][i], rtol=1e-4, atol=1e-6)
        for part, value in params.items():
            recorded = want[f"{part}_per_step"][i]
            np.testing.assert_allclose(value, recorded, rtol=1e-4, atol=1e-5)
    assert i == 4


def test_recorded_training_from_the_store():
    name = "gluon_row_sparse_linear_block_ftrl"
    weight, bias = by_name(name, "weight", "bias")
    tx, block = sj.optim.ftrl(0.1, l1=0.1), run("SparseLinear", units=2, in_units=7)
    store = make_store(tx, block.name, weight)
    trainer = run("gluon.Trainer", block=block, store=store, loss=squares, tx=tx)
    trainer.params = {"bias": bias}

    def steps():
        for batch in batches_of(name):
            loss = run("Trainer.step", trainer=trainer, batch=batch)
            yield trainer.params | {"weight": store.pull_all(block.name)}, loss

    assert_steps(name, steps())


def test_recorded_training_on_two_devices():
    """Each device pulls its half of the batch; their gradients are one push."""
    name = "gluon_sparse_embedding_2ctx_adam"
    block = run("gluon.contrib.nn.SparseEmbedding", input_dim=9, output_dim=3)
    store = make_store(optax.adam(0.1), block.name, inputs(name)["weight"])
    loss = lambda tables, ids: squares(block(tables, {}, ids), ids)
    grad = jax.jit(sj.value_and_grad(loss))

    def steps():
        for batch in batches_of(name):
            parts = [
                grad(run("SparseBlock.pull", store=store, block=block, inputs=ids), ids)
                for ids in batch.reshape(2, 2)
            ]
            losses, grads = zip(*[(loss, grads[block.name]) for loss, grads in parts])
            run("KVStore.push(list)", store=store, name=block.name, grads=grads)
            yield {"weight": store.pull_all(block.name)}, sum(map(float, losses))

    assert_steps(name, steps())


def test_every_name_of_mxnet_is_on_the_page():
    rows = [cells for section, cells in PAGE.tables() if section[:1].isdigit()]
    have = {cells[0].strip("`").split("(")[0] for cells in rows}
    assert {*PAGE.golden["operators"]} <= have


test_line, _, test_nothing_is_left_out = PAGE.tests(globals())
