"""gluon.md: its code, checked against the answers of MXNet.

`golden/mxnet.json` and `.npz` hold the answers of MXNet (the header of the former names
their source); the rows are in `gluon.txt`, with NumPy or by hand.
"""

import importlib
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.sparse as sp
import scipy.special  # noqa: F401  (in gluon.txt)
from jax.experimental import checkify

import sparsejax as sj
from recorded import (
    Page,
    a_store,
    assert_same_kind,
    dense,
    filled_rows,
    page_ran,  # noqa: F401  (a fixture)
    same,
    table_grad,
    train,
)
from sparsejax import _compat


pytestmark = [pytest.mark.usefixtures("loose_promotion"), pytest.mark.slow]

PAGE = Page("gluon", golden="mxnet", hidden=("10 ",))
run, inputs, outputs, named = PAGE.run, PAGE.inputs, PAGE.outputs, PAGE.named
ERRORS = [cells for section, cells in PAGE.tables() if section.startswith("10 ")]


# ------------------------------------------------------------------ for gluon.txt

X = np.array([[0.5, 0, -1.5], [0, 0, 0], [2.5, -0.7, 0], [0, 0, 3]], np.float32)
Y = np.array([[0, 0, 2.0], [1, -2, 0], [3.0, 0, 0], [0, 0, 0]], np.float32)
ROW = np.array([1.0, 2.0, 4.0], np.float32)
BIAS = np.array([1.0, -1.0], np.float32)
WIDE = np.array([[1, 2, 3], [4, 5, 6.0]], np.float32)
COUNTS = {"shape": (4, 3)}
C, D = sp.csr_matrix, jnp.asarray
BATCHES = [np.array([1, 3]), np.array([3, 0])]


def R(x):
    return sj.SelectedRows.from_dense(jnp.asarray(x), capacity=4)


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
    return filled_rows(x.coalesce())


def pulled(got, name):
    """Whether rows are those of the first output of a case, in its order."""
    want = PAGE.first(name)
    return same(got, want) and merged_rows(got) == want.rows.tolist()


def agrees(key, f, x, kept):
    """Whether a cell is `f`, and keeps the storage of its array or is dense."""
    with np.errstate(all="ignore"):
        want = f(x)
    limits = {"a_min": -1.0, "a_max": 2.0}
    for given in (R(x), C(x)):
        got = run(key, x=given, **limits)
        assert isinstance(got, type(given) if kept else jax.Array)
        np.testing.assert_allclose(dense(got), want, rtol=2e-5, atol=1e-6)
    return True


def falls_back(key, f, x=X):
    return agrees(key, f, x, False)


def keeps(key, f, x=X, in_jit=True):
    if in_jit:
        got = jax.jit(lambda x: run(key, x=x, a_min=-1.0, a_max=2.0))(elements(x))
        np.testing.assert_allclose(dense(as_scipy(got, 3)), f(x), rtol=2e-5, atol=1e-6)
    return agrees(key, f, x, True)


def output_and_gradient(key, data, label):
    """The two numbers of an output of MXNet: it is not the gradient's integral."""
    f = lambda data: run(key, data=data, label=label)
    return f(data)[0], jax.grad(lambda data: f(data)[1])(data)


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
    table = jnp.zeros(g.shape)
    return tx.update(g, tx.init(table), table)[0]


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


def a_trainer(store=None):
    block = sj.nn.SparseEmbedding(9, 2, name="items")
    return sj.nn.Trainer(block, store or a_store(), squares, optax.sgd(1.0))


def decayed_in_the_store():
    adagrad = rule("gluon_sparse_embedding_adagrad")
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


def never_read(name):
    return np.setdiff1d(np.arange(9), np.concatenate(batches_of(name)))


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
    assert_same_kind(f(rhs), want["y"])
    loss = lambda rhs: jnp.sum(f(rhs) ** 2)
    value, grad = jax.jit(sj.value_and_grad(loss, tables=True))(rhs)
    assert_same_kind(jnp.reshape(value, 1), want["loss"])
    assert_same_kind(grad, want["rhs_grad"])
    if key == "sparse.dot(csr, default)":  # the rows of the columns that are there
        assert merged_rows(grad) == merged_rows(want["rhs_grad"])


@pytest.mark.parametrize("name", ["embedding_int64_ids", "embedding_dense_grad"])
def test_recorded_embedding(name):
    (weight, ids, out_grad), want = inputs(name).values(), outputs(name)
    f = lambda weight: run("sparse.Embedding", weight=weight, data=ids)
    assert_same_kind(f(weight), want["y"])
    sparse = isinstance(want["weight_grad"], sj.SelectedRows)
    loss = lambda weight: jnp.sum(f(weight) * out_grad)
    grad = jax.jit(sj.grad(loss, tables=sparse))(weight)
    assert_same_kind(grad, want["weight_grad"])
    assert not sparse or merged_rows(grad) == merged_rows(want["weight_grad"])


# ------------------------------------------------------------------ training


def rule(name):
    """The optimizer of a recorded run."""
    params = named(name)["params"]
    hyper = dict(params["hyper"])
    lr = hyper.pop("learning_rate")
    if params["optimizer"] == "ftrl":
        return sj.optim.ftrl(lr, l1=hyper.get("lamda1", 0.01))
    if params["optimizer"] == "sgd":
        decay = optax.add_decayed_weights(hyper.get("wd", 0.0))
        return optax.chain(decay, optax.sgd(lr, momentum=hyper.get("momentum")))
    if params["optimizer"] == "adagrad":
        return optax.adagrad(lr, initial_accumulator_value=0.0, eps=1e-7)
    return optax.adam(lr)


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


EMBEDDING, LINEAR = {"input_dim": 9, "output_dim": 3}, {"units": 2, "in_units": 7}


@pytest.mark.parametrize(
    "name, key, sizes",
    [
        ("gluon_sparse_embedding_adam", "SparseEmbedding", EMBEDDING),
        ("gluon_sparse_embedding_adagrad", "SparseEmbedding", EMBEDDING),
        ("gluon_row_sparse_linear_block_adagrad", "SparseLinear", LINEAR),
        ("gluon_row_sparse_linear_block_ftrl", "SparseLinear", LINEAR),
    ],
)
def test_recorded_training_from_the_store(name, key, sizes):
    given, tx, block = inputs(name), rule(name), run(key, **sizes)
    store = make_store(tx, block.name, given["weight"])
    trainer = run("gluon.Trainer", block=block, store=store, loss=squares, tx=tx)
    if "bias" in given:
        trainer.params = {"bias": given["bias"]}

    def steps():
        for batch in batches_of(name):
            loss = run("Trainer.step", trainer=trainer, batch=batch)
            bias = {"bias": trainer.params["bias"]} if "bias" in given else {}
            yield bias | {"weight": store.pull_all(block.name)}, loss

    assert_steps(name, steps())


@pytest.mark.parametrize(
    "name", ["gluon_sparse_embedding_2ctx_adam", "gluon_embedding_2ctx_adam"]
)
def test_recorded_training_on_two_devices(name):
    """Each device pulls its half of the batch; their gradients are one push."""
    block = run("gluon.contrib.nn.SparseEmbedding", **EMBEDDING)
    store = make_store(rule(name), block.name, inputs(name)["weight"])
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


def train_on_device(layer, params, tx, batches, tables):
    """Params and losses after each batch, of an ordinary training step."""

    @jax.jit
    def step(params, state, batch):
        f = lambda p: squares(layer(p, batch), batch)
        value, grads = sj.value_and_grad(f, tables=tables)(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    state = tx.init(params)
    for batch in batches:
        params, state, value = step(params, state, batch)
        yield params, value


def trained(name, lazily):
    """The parameters and losses of each step, on rows or on the dense gradient."""
    layer = run("gluon.nn.Embedding(sparse_grad)", **EMBEDDING)
    params = {"embedding": inputs(name)["weight"]}
    tx = sj.optim.lazy(rule(name)) if lazily else rule(name)
    tables = sj.nn.tables(layer) if lazily else False
    steps = train_on_device(layer, params, tx, batches_of(name), tables)
    return [({"weight": p["embedding"]}, loss) for p, loss in steps]


@pytest.mark.parametrize(
    "name, lazily",
    [
        ("gluon_embedding_sparse_grad_adagrad", True),
        ("gluon_sparse_embedding_sgdmom_std", False),  # all rows move at each step
        ("gluon_embedding_sparse_grad_ftrl", False),  # among the differences
    ],
)
def test_recorded_training_on_the_device(name, lazily):
    assert_steps(name, trained(name, lazily))


def test_recorded_training_of_dense_on_csr():
    name = "gluon_csr_dot_layer_sgd"
    layer = run("gluon.nn.Dense(csr)", **LINEAR)
    params = dict(zip(("kernel", "bias"), by_name(name, "weight", "bias")))
    batches = [sj.SegmentTensor.from_csr(x, capacity=12) for x in batches_of(name)]
    tx, tables = sj.optim.lazy(optax.sgd(0.1)), {"kernel": True, "bias": False}
    steps = train_on_device(layer, params, tx, batches, tables)
    names = lambda p: {"weight": p["kernel"], "bias": p["bias"]}
    assert_steps(name, [(names(p), loss) for p, loss in steps])


def test_recorded_loading():
    """Rows of a store in a layer on the device, and rows of an array in a store."""
    want = PAGE.first("load_rsp_params_into_dense_embedding")
    rows = make_store(weight=want).pull_all("weight")
    assert same(sj.nn.Embedding(9, 3)({"embedding": rows}, jnp.arange(9)), want)
    # MXNet returns one number for the other direction, 1 for equal.
    equal = PAGE.first("load_dense_params_into_sparse_embedding")
    block = sj.nn.SparseEmbedding(9, 3)
    store = make_store(optax.sgd(0.1), block.name, want)
    trainer = sj.nn.Trainer(block, store, squares, optax.sgd(0.1))
    assert equal.tolist() == [1] and (trainer.predict(jnp.arange(9)) == want).all()


# ------------------------------------------------------------------ data, the proposal


def test_libsvm(tmp_path):
    pytest.importorskip("sklearn.datasets")
    sklearn = importlib.import_module("sklearn")
    path = str(tmp_path / "data.libsvm")
    pathlib.Path(path).write_text("1 1:0.5 3:2\n-1 2:1\n")
    rows, labels = run("io.LibSVMIter", path=path, sklearn=sklearn)
    np.testing.assert_array_equal(rows.toarray(), [[0.5, 0, 2], [0, 1, 0]])
    np.testing.assert_array_equal(labels, [1, -1])


# ------------------------------------------------------------------ the proposal


def clicks(count):
    rng = np.random.default_rng(0)
    for _ in range(count):
        tags = sp.csr_matrix(rng.poisson(2e-4, (8, 50_000)).astype(np.float32))
        yield {
            "user": rng.integers(0, 100_000, 8),
            "item": rng.integers(0, 20_000, 8),
            "tags": tags,
            "click": rng.integers(0, 2, 8).astype(np.float32),
        }


def test_proposal():
    """The page's model trains; by hand and on whole tables it is the same function."""
    trainer, batches = PAGE.blocks["make_trainer"](), list(clicks(2))
    block, store = trainer.block, trainer.store
    given = {"store": store, "trainer": trainer, "batches": batches * 3}
    pulled = run("row_sparse_pull, one batch ahead", **given)
    losses = [trainer.step(batch, rows) for batch, rows in pulled]
    assert losses[-1] < losses[1]
    specs = run("row_sparse Parameter", block=block)
    heights = {"user": 100_000, "item": 20_000, "tags": 50_000}
    assert {n: s.shape[0] for n, s in specs.items()} == heights
    # A forward by hand equals the forward of the trainer.
    want = trainer.predict(batches[0])
    given = batches[0] | {"tags": sj.SegmentTensor.from_csr(batches[0]["tags"])}
    tables = run("SparseBlock.pull", store=store, block=block, inputs=given)
    names = {"tables": tables, "params": trainer.params, "inputs": given}
    for key in ("SparseBlock.sparse_forward", "SparseBlock.forward"):
        step = lambda given, key=key: run(key, block=block, **given)
        np.testing.assert_allclose(jax.jit(step)(names), want, rtol=1e-5)
    # The same model on whole tables, an ordinary function.
    whole = {name: store.pull_all(name) for name in tables}
    got = jax.jit(block)(whole, trainer.params, given)
    np.testing.assert_allclose(got, want, rtol=1e-5)


# ------------------------------------------------------------------ errors


@pytest.mark.parametrize("cells", ERRORS, ids=lambda cells: cells[0].strip("`"))
def test_errors(cells):
    what, code, said = (cell.strip("`") for cell in cells)
    width = 2 if "SparseEmbedding" in code else 1
    rows = sj.SelectedRows(jnp.array([0, 1]), jnp.ones((2, width)), 3)
    store = make_store(optax.sgd(1.0), "w", np.ones((3, 1), np.float32))
    names = {"rows": rows, "store": store, "ids": jnp.array([1]), "loss": squares}
    names |= {"tx": optax.sgd(1.0), "block": sj.nn.SparseEmbedding(3, 1, name="w")}
    kinds = TypeError, ValueError, KeyError, checkify.JaxRuntimeError
    with pytest.raises(kinds) as e:
        eval(code, {**PAGE.blocks, **names})
    assert said in str(e.value)
    if what == "table was not pulled":
        assert isinstance(e.value, sj.NotPulledError)
        assert "pulled tables: ['w']" in str(e.value)


# ------------------------------------------------------------------ nothing forgotten


def test_every_name_of_mxnet_is_on_the_page():
    have = {key.split("(")[0] for key in PAGE.cells}
    assert {*PAGE.golden["operators"]} <= have


test_line, _, test_nothing_is_left_out = PAGE.tests(globals())
