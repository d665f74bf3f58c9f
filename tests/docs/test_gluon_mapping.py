"""gluon.md: its code, checked against the answers of MXNet.

The page's code blocks are executed, and each cell of its tables is evaluated with the
inputs and arguments by name. `golden/mxnet.json` and `.npz` hold the answers of
MXNet (the header of the former names their source); cells without a recorded answer
have an example, here or in `gluon.txt`, with NumPy or by hand.
"""

import functools
import importlib
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.sparse as sp
import scipy.special
from jax.experimental import checkify

import sparsejax as sj
from recorded import (
    Recorded,
    assert_same_kind,
    dense,
    page_ran,  # noqa: F401  (a fixture)
    raises,  # noqa: F401  (in gluon.txt)
)
from sparsejax import _compat


pytestmark = pytest.mark.slow


PAGE = Recorded("gluon", golden="mxnet", hidden=("10 ",))
CELLS, run = PAGE.cells, PAGE.run
CASES = {case["name"]: case for case in PAGE.cases}
ERRORS = [cells for section, cells in PAGE.tables() if section.startswith("10 ")]


# ------------------------------------------------------------------ a line each

X = np.array([[0.5, 0, -1.5], [0, 0, 0], [2.5, -0.7, 0], [0, 0, 3]], np.float32)
Y = np.array([[0, 0, 2.0], [1, -2, 0], [3.0, 0, 0], [0, 0, 0]], np.float32)
ROW = np.array([1.0, 2.0, 4.0], np.float32)
BIAS = np.array([1.0, -1.0], np.float32)
WIDE = np.array([[1, 2, 3], [4, 5, 6.0]], np.float32)
COUNTS = {"shape": (4, 3)}
C, D = sp.csr_matrix, jnp.asarray


def R(x):
    return sj.SelectedRows.from_dense(jnp.asarray(x), capacity=4)


def elements(x):
    return sj.SegmentTensor.from_csr(sp.csr_matrix(x))


def as_scipy(st, columns):
    """A batch of a loader as scipy's matrix."""
    offsets = np.asarray(st.offsets)
    index, value = (np.asarray(st.values[k])[: offsets[-1]] for k in ("index", "value"))
    return sp.csr_matrix((value, index, offsets), (st.num_segments, columns))


def inputs(name):
    return PAGE.get(CASES[name], "inputs")


def outputs(name):
    return PAGE.get(CASES[name], "outputs")


def by_name(name, *fields):
    return [inputs(name)[field] for field in fields]


def says(name, words):
    return words in CASES[name]["error"]["message"]


def same(got, want):
    assert_same_kind(got, want)
    return True


def filled_rows(x):
    x = x.coalesce()
    return np.asarray(x.rows)[: int(x.num_rows())].tolist()


def last_one(rows, values):
    """The rows as MXNet makes them dense: of a row that occurs twice, the last one."""
    x = sj.SelectedRows(rows, values, 6)
    return sj.scatter_assign(jnp.zeros((6, 2)), x.rows[1:], x.values[1:])


def retained_gradient(x, indices):
    loss = lambda x: jnp.sum(x.retain(indices).to_dense() ** 2)
    return jax.jit(sj.value_and_grad(loss))(x)


def clipped_gradient(weight, ids, out_grad):
    clipped = lambda w: sj.lookup(w, ids, mode="clip")
    grad = sj.grad(lambda w: jnp.sum(clipped(w) * out_grad), tables=True)
    return clipped(weight), jax.jit(grad)(weight).to_dense()


def gradient_in_float64():
    with _compat.enable_x64(True):
        grad = sj.grad(lambda w: jnp.sum(sj.lookup(w, jnp.array([1]))), tables=True)
        return grad(jnp.ones((9, 3), jnp.float64))


def first_step(tx, g):
    table = jnp.zeros((1, 1))
    return tx.update(g * jnp.ones((1, 1)), tx.init(table), table)[0]


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


@pytest.mark.usefixtures("loose_promotion")
@pytest.mark.parametrize("line", PAGE.examples, ids=lambda line: line[0])
def test_line(line):
    PAGE.check_example(line, globals())


def test_every_difference_is_checked():
    lines = [line[0][2:] for line in PAGE.examples if line[0][:2] == "? "]
    assert list(dict.fromkeys(lines)) == PAGE.differences


NUMPY = "arcsinh arctan cbrt ceil degrees expm1 floor negative radians sign sin sinh"
KEEP = {
    name: (getattr(np, name), X)
    for name in f"{NUMPY} square abs tan tanh trunc".split()
}
KEEP |= {name: (getattr(np, name), X / 4) for name in "arcsin arctanh log1p".split()}
KEEP |= {
    "clip": (lambda v: np.clip(v, -1, 2), X),
    "fix": (np.trunc, X),
    "make_loss": (lambda v: v, X),
    "relu": (lambda v: np.maximum(v, 0), X),
    "rint": (lambda v: np.ceil(v - 0.5), X),
    "round": (lambda v: np.sign(v) * np.floor(np.abs(v) + 0.5), X),
    "sqrt": (np.sqrt, np.abs(X)),
    "stop_gradient": (lambda v: v, X),
}
DENSE = {name: (getattr(np, name), X) for name in "arccosh cos cosh exp".split()}
DENSE |= {name: (getattr(np, name), abs(X)) for name in "log log10 log2".split()}
DENSE |= {
    "arccos": (np.arccos, X / 4),
    "gamma": (scipy.special.gamma, X + 0.25),
    "gammaln": (scipy.special.gammaln, X + 0.25),
    "rsqrt": (lambda v: 1 / np.sqrt(v), np.abs(X)),
    "sigmoid": (lambda v: 1 / (1 + np.exp(-v)), X),
}


@pytest.mark.parametrize("name", [*KEEP, *DENSE])
def test_functions_of_one_array(name):
    """Those in KEEP keep the storage; the others fall back to dense arrays."""
    f, x = {**KEEP, **DENSE}[name]
    with np.errstate(all="ignore"):
        want = f(x)
    if name == "gamma":
        want = np.where(x == np.round(x), np.nan, want)
    limits = {"a_min": -1.0, "a_max": 2.0}
    for given in (R(x), C(x)):
        got = run(f"sparse.{name}", x=given, **limits)
        assert isinstance(got, type(given) if name in KEEP else jax.Array)
        np.testing.assert_allclose(dense(got), want, rtol=2e-5, atol=1e-6)
    if name in KEEP and name != "negative":
        got = jax.jit(lambda x: run(f"sparse.{name}", x=x, **limits))(elements(x))
        np.testing.assert_allclose(dense(as_scipy(got, 3)), want, rtol=2e-5, atol=1e-6)


# ------------------------------------------------------------------ gradients


def test_recorded_functions_of_csr():
    for name, want in outputs("unary_csr").items():
        assert_same_kind(run(f"sparse.{name}", **inputs("unary_csr")), want, rtol=1e-5)


REQUESTED = "sparse.dot(csr.T, default, forward_stype=default)"


@pytest.mark.parametrize(
    "name, key",
    [
        ("dot_csr_rspweight_grad_rsp", "sparse.dot(csr, row_sparse)"),
        ("dot_csr_rspweight_grad_rsp", "sparse.dot(csr, default)"),
        ("dot_csrT_dns_grad_rsp_request", REQUESTED),
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
        assert filled_rows(grad) == filled_rows(want["rhs_grad"])


@pytest.mark.parametrize("name", ["embedding_int64_ids", "embedding_dense_grad"])
def test_recorded_embedding(name):
    given, want = inputs(name), outputs(name)
    f = lambda weight: run("sparse.Embedding", weight=weight, data=given["ids"])
    assert_same_kind(f(given["weight"]), want["y"])
    loss = lambda weight: jnp.sum(f(weight) * given["out_grad"])
    sparse = isinstance(want["weight_grad"], sj.SelectedRows)
    grad = jax.jit(sj.grad(loss, tables=sparse))(given["weight"])
    assert_same_kind(grad, want["weight_grad"])
    if sparse:
        assert filled_rows(grad) == filled_rows(want["weight_grad"])


@pytest.mark.parametrize("name", ["Linear", "MAE", "Logistic"])
def test_regression_outputs(name):
    """The gradient of MXNet's documentation, divided by the number of outputs."""
    key, data, label = f"sparse.{name}RegressionOutput", D(X + 0.1), C(Y)
    y = X + 0.1
    want = y, (y - Y if name == "Linear" else np.sign(y - Y)) / 3
    if name == "Logistic":
        case = "LogisticRegressionOutput_csr_label"
        (data, label), want = inputs(case).values(), outputs(case).values()
    f = lambda data: run(key, data=data, label=label)
    for got, x in zip((f(data)[0], jax.grad(lambda d: f(d)[1])(data)), want):
        np.testing.assert_allclose(got, x, rtol=1e-5, atol=1e-6)


def test_recorded_clip_global_norm():
    name = "clip_global_norm_rsp_below"
    (g0,), want = inputs(name).values(), outputs(name)
    norm = run("sparse.norm(row_sparse)", x=g0)
    for max_norm, scale in ((1000.0, 1.0), (0.5, 0.5 / float(norm))):
        tx = run("gluon.utils.clip_global_norm", max_norm=max_norm, lr=1.0)
        table = jnp.zeros(g0.shape)
        updates, _ = tx.update(g0, tx.init(table), table)
        assert_same_kind(-updates, want["g0"] * scale)


OPTIMIZERS = {
    "sparse.sgd_update": 0.9,
    "sparse.sgd_mom_update": 0.9,
    "sparse.adam_update": 0.9,
    "sparse.adagrad_update": 0.9,
    # z = 1 - 10 * 1 and n = 1, from a weight of 1 and a state of zeros
    "sparse.ftrl_update": (9 - 0.01) / 20,
    "contrib.group_adagrad_update": 0.9,
    "lazy_update=False": 0.9,
    "optimizer.nag": 1 - 0.19,
    "clip_gradient": 0.95,
}


@pytest.mark.usefixtures("loose_promotion")
@pytest.mark.parametrize("key", OPTIMIZERS)
def test_optimizers(key):
    """One step from a table of ones; test_peers.py has the recorded ones."""
    hyper = dict(lr=0.1, momentum=0.9, beta=1.0, lamda1=0.01, clip=0.5)
    tx, want = run(key, **hyper), np.ones((4, 3), np.float32)
    g = sj.SelectedRows(np.array([2, 2]), np.full((2, 3), 0.5, np.float32), 4)

    @jax.jit
    def step(table, g):
        state = tx.init(table)
        if hasattr(tx, "catch_up"):
            table, state = tx.catch_up(table, state, g.rows)
        return table + tx.update(g, state, table)[0]

    got = step(want, g)
    want[2] = OPTIMIZERS[key]
    np.testing.assert_allclose(got, want, rtol=1e-5)


# ------------------------------------------------------------------ the store


def make_store(tx=None, name="weight", weight=None):
    store = run("kvstore.create")
    if weight is None:
        weight = inputs("kv_row_sparse_pull_sorted")["weight"]
    run("KVStore.init", store=store, name=name, weight=weight, tx=tx)
    return store


def test_recorded_pulls():
    pull = functools.partial(run, store=make_store(), name="weight")
    for name in ("kv_row_sparse_pull_sorted", "kv_row_sparse_pull_unsorted"):
        want = outputs(name)["out"]
        for key in ("KVStore.row_sparse_pull", "KVStore.row_sparse_pull(capacity)"):
            got = pull(key, **inputs(name))
            assert_same_kind(got, want)
            assert filled_rows(got) == want.rows.tolist()
        assert got.capacity == 8  # a power of two, and at most the table's 9
    got = pull("KVStore.row_sparse_pull", row_ids=np.array([[3, 0], [1, 3]]))
    assert_same_kind(got, outputs("kv_row_sparse_pull_2d_ids")["r"])
    row_ids = CASES["kv_row_sparse_pull_two_outs"]["params"]["row_ids"]
    got = pull("KVStore.row_sparse_pull(list)", row_ids=row_ids)
    wants = outputs("kv_row_sparse_pull_two_outs").values()
    for x, want in zip(got, wants, strict=True):
        assert_same_kind(x, want)
    want = outputs("kv_pull_sparse")["r"].to_dense()
    assert_same_kind(pull("KVStore.pull(ignore_sparse=False)"), want)


def test_recorded_parameters():
    """Parameter.row_sparse_data and its like are pulls."""
    for name, key in (
        ("row_sparse_data_ok", "Parameter.row_sparse_data"),
        ("list_row_sparse_data_ok", "Parameter.list_row_sparse_data"),
    ):
        store = make_store(weight=np.ones((9, 3), np.float32))
        row_id = CASES[name]["params"]["row_id"]
        got = run(key, store=store, name="weight", row_id=row_id)
        (want,) = outputs(name).values()
        assert_same_kind(got[0] if isinstance(got, list) else got, want)
    store = run("kvstore.create")
    store.init("w", (9, 3), None)
    data = np.full((9, 3), 3, np.float32)
    run("Parameter.set_data", store=store, name="w", data=data)
    assert_same_kind(
        store.row_sparse_pull("w", [1, 3]), outputs("row_sparse_set_data")["r"]
    )
    assert_same_kind(run("Parameter.data", store=store, name="w"), data)
    # MXNet has no gradient before a backward; without reads it is empty.
    read = lambda table: jnp.sum(sj.lookup(table, jnp.zeros(0, jnp.int32)))
    table = sj.SelectedRows([], jnp.zeros((0, 3)), 9)
    got = run("Parameter.grad", loss=read, table=table)
    assert_same_kind(got, outputs("row_sparse_initial_grad")["r"])


def test_push():
    rows = sj.SelectedRows(jnp.array([2, 0]), jnp.ones((2, 3)), 9)
    more = sj.SelectedRows(jnp.array([2]), jnp.ones((1, 3)), 9)
    before = make_store().pull_all("weight")
    store = make_store(optax.sgd(1.0))
    run("KVStore.push", store=store, name="weight", grad=rows)
    run("KVStore.push(list)", store=store, name="weight", grads=[rows, more])
    pushed = np.array([2.0, 0, 3, 0, 0, 0, 0, 0, 0], np.float32)[:, None]
    assert_same_kind(store.pull_all("weight"), before - pushed)
    run("KVStore.set_optimizer", store=store, name="w", weight=before, tx=optax.sgd(1))
    assert "w" in store


@pytest.mark.usefixtures("loose_promotion")
def test_recorded_saving(tmp_path):
    """All rows are saved, and a table goes from the store to the device and back."""
    (want,) = outputs("load_rsp_params_into_dense_embedding").values()
    block = sj.nn.SparseEmbedding(9, 3)
    make = lambda weight: sj.nn.Trainer(
        block, make_store(optax.sgd(0.1), block.name, weight), squares, optax.sgd(0.1)
    )
    trainer = make(want)
    for key in ("Trainer.save_states", "Block.save_parameters"):
        run(key, trainer=trainer, path=tmp_path / "store")
    for key in ("Trainer.load_states", "Block.load_parameters"):
        other = make(np.zeros((9, 3), np.float32))
        run(key, trainer=other, path=tmp_path / "store")
        assert_same_kind(other.store.pull_all(block.name), want)
    layer, ids = sj.nn.Embedding(9, 3), jnp.arange(9)
    assert_same_kind(layer({"embedding": other.store.pull_all(block.name)}, ids), want)
    # MXNet returns one number for the other direction, 1 for equal.
    (equal,) = outputs("load_dense_params_into_sparse_embedding").values()
    assert equal.tolist() == [1] and (make(want).predict(ids) == want).all()


# ------------------------------------------------------------------ training


def rule(name):
    """The optimizer of a recorded run."""
    params = CASES[name]["params"]
    lr, hyper = params["hyper"]["learning_rate"], params["hyper"]
    if params["optimizer"] == "ftrl":
        return sj.optim.ftrl(lr, l1=hyper.get("lamda1", 0.01))
    if params["optimizer"] == "sgd":
        return optax.chain(
            optax.add_decayed_weights(hyper.get("wd", 0.0)),
            optax.sgd(lr, momentum=hyper.get("momentum")),
        )
    if params["optimizer"] == "adagrad":
        return optax.adagrad(lr, initial_accumulator_value=0.0, eps=1e-7)
    return optax.adam(lr)


def batches_of(name):
    batches = [inputs(name)[f"x{i}"] for i in range(5)]
    is_ids = lambda x: isinstance(x, jax.Array)  # MXNet's ids are floats
    return [x.astype(jnp.int32) if is_ids(x) else x for x in batches]


def squares(out, batch):
    return jnp.sum(out**2) / 4  # Trainer.step(4) divides by 4


def assert_steps(name, steps):
    """Compares parameters and losses after each step."""
    want = outputs(name)
    for i, (params, loss) in enumerate(steps):
        np.testing.assert_allclose(loss, want["losses"][i], rtol=1e-4, atol=1e-6)
        for part, value in params.items():
            recorded = want[f"{part}_per_step"][i]
            np.testing.assert_allclose(value, recorded, rtol=1e-4, atol=1e-5)
    assert i == 4


@pytest.mark.usefixtures("loose_promotion")
@pytest.mark.parametrize(
    "name",
    [
        "gluon_sparse_embedding_adam",
        "gluon_sparse_embedding_adagrad",
        "gluon_row_sparse_linear_block_adagrad",
        "gluon_row_sparse_linear_block_ftrl",
    ],
)
def test_recorded_training_from_the_store(name):
    given, tx = inputs(name), rule(name)
    if linear := "bias" in given:
        block = run("SparseLinear", units=2, in_units=7)
    else:
        block = run("SparseEmbedding", input_dim=9, output_dim=3)
    store = make_store(tx, block.name, given["weight"])
    trainer = run("gluon.Trainer", block=block, store=store, loss=squares, tx=tx)
    if linear:
        trainer.params = {"bias": given["bias"]}

    def steps():
        for batch in batches_of(name):
            loss = run("Trainer.step", trainer=trainer, batch=batch)
            bias = {"bias": trainer.params["bias"]} if linear else {}
            yield bias | {"weight": store.pull_all(block.name)}, 4 * loss

    assert_steps(name, steps())


@pytest.mark.usefixtures("loose_promotion")
@pytest.mark.parametrize(
    "name", ["gluon_sparse_embedding_2ctx_adam", "gluon_embedding_2ctx_adam"]
)
def test_recorded_training_on_two_devices(name):
    """Each device pulls its half of the batch; their gradients are one push."""
    block = run("gluon.contrib.nn.SparseEmbedding", input_dim=9, output_dim=3)
    store = make_store(rule(name), block.name, inputs(name)["weight"])

    @jax.jit
    def grad(tables, ids):
        loss = lambda t: squares(block(t, {}, ids), ids)
        return sj.value_and_grad(loss)(tables)

    def steps():
        for batch in batches_of(name):
            parts = [
                grad(run("SparseBlock.pull", store=store, block=block, inputs=ids), ids)
                for ids in batch.reshape(2, 2)
            ]
            grads = [grads[block.name] for _, grads in parts]
            run("KVStore.push(list)", store=store, name=block.name, grads=grads)
            loss = sum(4 * float(loss) for loss, _ in parts)
            yield {"weight": store.pull_all(block.name)}, loss

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
        yield params, 4 * value


def trained(name, tables):
    """The weights at the end; with `tables=False` each step is MXNet's."""
    layer = run("gluon.nn.Embedding(sparse_grad)", input_dim=9, output_dim=3)
    params = {"embedding": inputs(name)["weight"]}
    tx = sj.optim.lazy(rule(name)) if tables else rule(name)
    tables = sj.nn.tables(layer) if tables else False
    steps = list(train_on_device(layer, params, tx, batches_of(name), tables))
    if not (tables and name.endswith("ftrl")):  # among the differences
        assert_steps(name, [({"weight": p["embedding"]}, loss) for p, loss in steps])
    return steps[-1][0]["embedding"]


lazily_trained = functools.partial(trained, tables=True)


def test_recorded_training_on_the_device():
    lazily_trained("gluon_embedding_sparse_grad_adagrad")
    # The gradient is dense if all rows move at each step.
    trained("gluon_sparse_embedding_sgdmom_std", tables=False)


def test_recorded_training_of_dense_on_csr():
    name = "gluon_csr_dot_layer_sgd"
    layer = run("gluon.nn.Dense(csr)", units=2, in_units=7)
    params = dict(zip(("kernel", "bias"), by_name(name, "weight", "bias")))
    batches = [sj.SegmentTensor.from_csr(x) for x in batches_of(name)]
    padded = lambda v: jnp.pad(v, (0, 12 - len(v)))
    batches = [
        sj.SegmentTensor.from_lengths(jax.tree.map(padded, x.values), x.lengths)
        for x in batches
    ]
    tx, tables = sj.optim.lazy(optax.sgd(0.1)), {"kernel": True, "bias": False}
    steps = train_on_device(layer, params, tx, batches, tables)
    names = lambda p: {"weight": p["kernel"], "bias": p["bias"]}
    assert_steps(name, [(names(p), loss) for p, loss in steps])


# ------------------------------------------------------------------ data


def test_recorded_data():
    x = inputs("data_simple_dataset_csr_item")["x"]
    dataset = run("gluon.data.SimpleDataset(csr)", data=x)
    label = np.arange(6.0, dtype=np.float32)
    both = run("gluon.data.ArrayDataset", data=x, label=label)
    ((rows, labels),) = sj.data.DataLoader(both, 4, drop_remainder=True)
    want = outputs("data_dataloader_csr_custom_batchify")
    assert_same_kind(as_scipy(rows, 5), want["r0"])
    assert_same_kind(labels, want["r1"])
    (want,) = outputs("data_ndarrayiter_csr_discard").values()
    assert_same_kind(dense(as_scipy(rows, 5)), want)
    # MXNet stacks the rows of a DataLoader into [B, 1, N]; the numbers are the same.
    stacked = outputs("data_dataloader_simple_csr")
    want = np.concatenate([np.asarray(part)[:, 0] for part in stacked.values()])
    for key in ("gluon.data.DataLoader", "io.NDArrayIter"):
        loader = run(key, dataset=dataset, batch_size=2)
        got = np.concatenate([as_scipy(batch, 5).toarray() for batch in loader])
        assert_same_kind(got, want)


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


@pytest.mark.usefixtures("loose_promotion")
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


def test_trainer_with_a_store_of_its_own():
    block = run("SparseEmbedding", input_dim=9, output_dim=3)
    given = {"loss": squares, "tx": optax.sgd(1.0), "store": sj.store.KVStore()}
    trainer = run("Trainer(update_on_kvstore)", block=block, **given)
    assert trainer.store.names() == ("embedding",)


# ------------------------------------------------------------------ errors

# Which of MXNet's errors each of ours stands for.
STANDS_FOR = {
    "ordinary layer on row_sparse": "err_hybridblock_row_sparse_param_hybridized",
    "ordinary function on row_sparse": "err_list_data_on_row_sparse",
    "ordinary function in a block": "err_hybridblock_row_sparse_param_with_trainer",
    "ordinary layer with a Trainer": "err_symbolblock_row_sparse",
    "row_sparse Parameter among dense ones": "err_kvstore_none",
    "table was not pulled": "err_row_sparse_data_without_trainer",
    "table is not in the store": "err_row_sparse_data_uninitialized",
    "not initialized": "err_row_sparse_deferred_init",
    "pull of a dense array": "kv_row_sparse_pull_dense_store",
}


@pytest.mark.parametrize("cells", ERRORS, ids=lambda cells: cells[0].strip("`"))
def test_errors(cells):
    what, code, said = (cell.strip("`") for cell in cells)
    if what in STANDS_FOR:  # the others are new: MXNet had no such check
        assert "error" in CASES[STANDS_FOR[what]]
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

# All that `mx.nd.sparse` had, and its classes.
SPARSE = """
abs adagrad_update adam_update add add_n arccos arccosh arcsin arcsinh arctan arctanh
array broadcast_add broadcast_sub broadcast_mul broadcast_div broadcast_plus
broadcast_minus cast_storage cbrt ceil clip concat cos cosh csr_matrix degrees divide
dot elemwise_add elemwise_sub elemwise_mul elemwise_div ElementWiseSum Embedding empty
exp expm1 fix floor ftrl_update FullyConnected gamma gammaln LinearRegressionOutput
LogisticRegressionOutput MAERegressionOutput log log10 log1p log2 make_loss mean
multiply negative norm radians relu retain rint round row_sparse_array rsqrt
sgd_mom_update sgd_update sigmoid sign sin sinh slice sqrt square stop_gradient
subtract sum tan tanh trunc where zeros zeros_like
"""
ARRAY = "indices data tostype copyto check_format astype asnumpy"


def test_nothing_is_forgotten():
    """Each name is on the page, each cell in a test, and so is each recorded case."""
    have = {re.split(r"[(]", key)[0] for key in CELLS}
    names = {f"sparse.{name}" for name in SPARSE.split()}
    names |= {f"RowSparseNDArray.{name}" for name in f"{ARRAY} retain".split()}
    names |= {f"CSRNDArray.{name}" for name in f"{ARRAY} indptr asscipy".split()}
    assert names | {"_internal._square_sum", "contrib.getnnz"} <= have
    run_here = {f"sparse.{name}" for name in [*KEEP, *DENSE]} | {*PAGE.checked}
    run_here.add("sparse.LogisticRegressionOutput")
    text = pathlib.Path(__file__).read_text()
    assert not [k for k in CELLS if f'"{k}"' not in text and k not in run_here]
    text += str(PAGE.examples)
    assert not [x for x in CASES if f'"{x}"' not in text and f"@{x}'" not in text]
