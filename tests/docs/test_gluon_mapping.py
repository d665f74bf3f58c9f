"""gluon.md: its code, checked against the answers of MXNet.

The page's code blocks are executed, and each cell of its tables is evaluated with the
inputs and arguments by name. `golden/mxnet.json` and `.npz` hold the answers of
MXNet (the header of the former names their source); cells without a recorded answer
have an example below, with NumPy or by hand.
"""

import functools
import importlib
import pathlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.sparse as sp
import scipy.special
from jax.experimental import checkify

import sparsejax as sj
from recorded import Recorded, assert_same_kind
from sparsejax import _compat


pytestmark = pytest.mark.slow


_RECORDED = Recorded("gluon", golden="mxnet", hidden=("10 ",))
CELLS, DIFFERENCES = _RECORDED.cells, _RECORDED.differences
CASES = {case["name"]: case for case in _RECORDED.cases}
ERRORS = [cells for section, cells in _RECORDED.tables() if section.startswith("10 ")]
run, differs = _RECORDED.run, _RECORDED.checks


@pytest.fixture(autouse=True, scope="module")
def _page_ran():
    _RECORDED.blocks  # not first inside of a trace


def dense(x):
    to_dense = _RECORDED.blocks["dense"]
    return np.asarray(x if np.isscalar(x) else to_dense(x))


# ------------------------------------------------------------------ recorded cases


def get(name, what) -> dict[str, Any]:
    return _RECORDED.get(CASES[name], what)


def assert_answers(got, want, rtol=1e-5):
    """Equal to rounding, and of the same storage."""
    if np.shape(want) == (1,):
        got = jnp.reshape(got, -1)  # MXNet 1 has no scalars
    assert_same_kind(got, want, rtol=rtol)


def filled_rows(x):
    x = x.coalesce()
    return np.asarray(x.rows)[: int(x.num_rows())].tolist()


CASE_CELLS = {
    "cast_storage_dns_to_default": "sparse.cast_storage(default, default)",
    "cast_storage_rsp_to_dns": "sparse.cast_storage(row_sparse, default)",
    "csr_matrix_definition": "sparse.csr_matrix(definition)",
    "csr_matrix_from_coo_with_duplicates": "sparse.csr_matrix(coo)",
    "sparse_zeros_csr": "sparse.zeros(csr)",
    "retain_sorted": "sparse.retain",
    "dot_csrT_dns": "sparse.dot(csr.T, default)",
    "sqrt_row_sparse": "sparse.sqrt",
    "sqrt_csr": "sparse.sqrt",
    "elemwise_add_row_sparse_row_sparse": "sparse.elemwise_add(row_sparse, row_sparse)",
    "elemwise_add_dns_row_sparse": "sparse.elemwise_add(default, row_sparse)",
    "elemwise_mul_row_sparse_dns": "sparse.elemwise_mul(row_sparse, default)",
    "norm_csr": "sparse.norm(csr)",
    "elemwise_add_csr_csr": "sparse.elemwise_add(csr, csr)",
    "elemwise_add_csr_dns": "sparse.elemwise_add(csr, default)",
    "elemwise_add_dns_csr": "sparse.elemwise_add(default, csr)",
    "elemwise_mul_csr_csr": "sparse.elemwise_mul(csr, csr)",
    "add_n_rsp": "sparse.add_n(row_sparse)",
    "add_n_rsp_disjoint": "sparse.ElementWiseSum(row_sparse)",
    "concat_csr": "sparse.concat",
}


@pytest.mark.parametrize("name", CASE_CELLS)
def test_recorded(name):
    inputs, (want, *_) = get(name, "inputs"), get(name, "outputs").values()
    given = {"inputs": list(inputs.values()), "shape": want.shape, **inputs}
    assert_answers(run(CASE_CELLS[name], **given), want)


def test_recorded_functions_of_csr():
    inputs = get("unary_csr", "inputs")
    for name, want in get("unary_csr", "outputs").items():
        assert_answers(run(f"sparse.{name}", **inputs), want)
    for name, key, scalar in (
        ("mul", "sparse.multiply(scalar)", 2),
        ("div", "sparse.divide(scalar)", 4),
        ("add", "sparse.add(scalar)", 1),
    ):
        given = {**get("scalar_csr", "inputs"), "scalar": scalar}
        assert_answers(run(key, **given), get("scalar_csr", "outputs")[name])


def test_recorded_square_sum_and_getnnz():
    inputs, want = get("square_sum_rsp", "inputs"), get("square_sum_rsp", "outputs")
    for key, name in (
        ("axis=0", "ax0"),
        ("axis=1", "ax1"),
        ("axis=1, keepdims", "ax1_keepdims"),
    ):
        assert_answers(run(f"_internal._square_sum({key})", **inputs), want[name])
    inputs, want = get("getnnz_csr", "inputs"), get("getnnz_csr", "outputs")
    assert_answers(run("contrib.getnnz", **inputs), want["total"])
    assert_answers(run("contrib.getnnz(axis=1)", **inputs), want["per_row"])


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("dot_csr_rspweight_grad_rsp", "sparse.dot(csr, row_sparse)"),
        (
            "dot_csrT_dns_grad_rsp_request",
            "sparse.dot(csr.T, default, forward_stype=default)",
        ),
    ],
)
def test_recorded_dot_gradients(name, key):
    inputs, want = get(name, "inputs"), get(name, "outputs")
    f = lambda rhs: run(key, lhs=inputs["lhs"], rhs=rhs)
    assert_answers(f(inputs["rhs"]), want["y"])
    loss = lambda rhs: jnp.sum(f(rhs) ** 2)
    value, grad = jax.jit(sj.value_and_grad(loss, tables=True))(inputs["rhs"])
    assert_answers(value, want["loss"])
    assert_answers(grad, want["rhs_grad"])


def test_recorded_dot_gradient_of_an_array():
    """The gradient of a dense right side has the rows of the columns that are there."""
    inputs, want = (get("dot_csr_rspweight_grad_rsp", w) for w in ("inputs", "outputs"))
    loss = lambda rhs: jnp.sum(
        run("sparse.dot(csr, default)", lhs=inputs["lhs"], rhs=rhs) ** 2
    )
    grad = jax.jit(sj.grad(loss, tables=True))(inputs["rhs"].to_dense())
    assert_answers(grad, want["rhs_grad"])
    assert filled_rows(grad) == filled_rows(want["rhs_grad"])


@pytest.mark.parametrize("name", ["embedding_int64_ids", "embedding_dense_grad"])
def test_recorded_embedding(name):
    inputs, want = get(name, "inputs"), get(name, "outputs")
    f = lambda weight: run("sparse.Embedding", weight=weight, data=inputs["ids"])
    assert_answers(f(inputs["weight"]), want["y"])
    loss = lambda weight: jnp.sum(f(weight) * inputs["out_grad"])
    sparse = isinstance(want["weight_grad"], sj.SelectedRows)
    grad = jax.jit(sj.grad(loss, tables=sparse))(inputs["weight"])
    assert_answers(grad, want["weight_grad"])
    if sparse:
        assert filled_rows(grad) == filled_rows(want["weight_grad"])


def test_recorded_regression_output():
    name = "LogisticRegressionOutput_csr_label"
    inputs, want = get(name, "inputs"), get(name, "outputs")
    f = lambda data: run(
        "sparse.LogisticRegressionOutput", data=data, label=inputs["label"]
    )
    assert_answers(f(inputs["data"])[0], want["y"])
    grad = jax.grad(lambda data: f(data)[1])(inputs["data"])
    assert_answers(grad, want["data_grad"])


def test_recorded_clip_global_norm():
    name = "clip_global_norm_rsp_below"
    (g0,), want = get(name, "inputs").values(), get(name, "outputs")
    norm = run("sparse.norm(row_sparse)", x=g0)
    assert_answers(norm, want["total_norm"])
    for max_norm, scale in ((1000.0, 1.0), (0.5, 0.5 / float(norm))):
        tx = run("gluon.utils.clip_global_norm", max_norm=max_norm, lr=1.0)
        table = jnp.zeros(g0.shape)
        updates, _ = tx.update(g0, tx.init(table), table)
        assert_answers(-updates, want["g0"] * scale)


# ------------------------------------------------------------------ the store


def make_store(tx=None, name="weight", weight=None):
    store = run("kvstore.create")
    if weight is None:
        weight = get("kv_row_sparse_pull_sorted", "inputs")["weight"]
    run("KVStore.init", store=store, name=name, weight=weight, tx=tx)
    return store


def test_recorded_pulls():
    store = make_store()
    for name in ("kv_row_sparse_pull_sorted", "kv_row_sparse_pull_unsorted"):
        given = {"store": store, "name": "weight", **get(name, "inputs")}
        want = get(name, "outputs")["out"]
        for key in ("KVStore.row_sparse_pull", "KVStore.row_sparse_pull(capacity)"):
            got = run(key, **given)
            assert_answers(got, want)
            assert filled_rows(got) == want.rows.tolist()
        assert got.capacity == 8  # a power of two, and at most the table's 9
    pull = functools.partial(run, store=store, name="weight")
    ids = np.array([[3, 0], [1, 3]])
    assert_answers(
        pull("KVStore.row_sparse_pull", row_ids=ids),
        get("kv_row_sparse_pull_2d_ids", "outputs")["r"],
    )
    case = CASES["kv_row_sparse_pull_two_outs"]
    got = pull("KVStore.row_sparse_pull(list)", row_ids=case["params"]["row_ids"])
    for x, want in zip(got, get(case["name"], "outputs").values(), strict=True):
        assert_answers(x, want)
    want = get("kv_pull_sparse", "outputs")["r"]
    assert_answers(pull("KVStore.pull(ignore_sparse=False)"), want.to_dense())


def test_recorded_parameters():
    """Parameter.row_sparse_data and its like are pulls."""
    for name, key in (
        ("row_sparse_data_ok", "Parameter.row_sparse_data"),
        ("list_row_sparse_data_ok", "Parameter.list_row_sparse_data"),
    ):
        store = make_store(weight=np.ones((9, 3), np.float32))
        row_id = CASES[name]["params"]["row_id"]
        got = run(key, store=store, name="weight", row_id=row_id)
        (want,) = get(name, "outputs").values()
        assert_answers(got[0] if isinstance(got, list) else got, want)
    want = get("row_sparse_set_data", "outputs")["r"]
    store = run("kvstore.create")
    store.init("w", (9, 3), None)
    data = np.full((9, 3), 3, np.float32)
    run("Parameter.set_data", store=store, name="w", data=data)
    assert_answers(store.row_sparse_pull("w", [1, 3]), want)
    assert_answers(run("Parameter.data", store=store, name="w"), data)
    # MXNet has no gradient before a backward; without reads it is empty.
    want = get("row_sparse_initial_grad", "outputs")["r"]
    read = lambda table: jnp.sum(sj.lookup(table, jnp.zeros(0, jnp.int32)))
    table = sj.SelectedRows([], jnp.zeros((0, 3)), 9)
    assert_answers(run("Parameter.grad", loss=read, table=table), want)


def test_push():
    rows = sj.SelectedRows(jnp.array([2, 0]), jnp.ones((2, 3)), 9)
    more = sj.SelectedRows(jnp.array([2]), jnp.ones((1, 3)), 9)
    before = make_store().pull_all("weight")
    store = make_store(optax.sgd(1.0))
    run("KVStore.push", store=store, name="weight", grad=rows)
    run("KVStore.push(list)", store=store, name="weight", grads=[rows, more])
    want = before - np.array(
        [[2.0], [0], [3], [0], [0], [0], [0], [0], [0]], np.float32
    )
    assert_answers(store.pull_all("weight"), want)
    run("KVStore.set_optimizer", store=store, name="w", weight=before, tx=optax.sgd(1))
    assert "w" in store


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
    inputs = get(name, "inputs")
    batches = [inputs[f"x{i}"] for i in range(5)]
    is_ids = lambda x: isinstance(x, jax.Array)  # MXNet's ids are floats
    return [x.astype(jnp.int32) if is_ids(x) else x for x in batches]


def squares(out, batch):
    return jnp.sum(out**2) / 4  # Trainer.step(4) divides by 4


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
    inputs, want = get(name, "inputs"), get(name, "outputs")
    linear = "bias" in inputs
    if linear:
        block = run("SparseLinear", units=2, in_units=7)
    else:
        block = run("SparseEmbedding", input_dim=9, output_dim=3)
    tx = rule(name)
    store = make_store(tx, block.name, inputs["weight"])
    given = {"block": block, "store": store, "loss": squares, "tx": tx}
    trainer = run("gluon.Trainer", **given)
    if linear:
        trainer.params = {"bias": inputs["bias"]}
    for i, batch in enumerate(batches_of(name)):
        loss = run("Trainer.step", trainer=trainer, batch=batch)
        np.testing.assert_allclose(4 * loss, want["losses"][i], rtol=1e-4)
        got = store.pull_all(block.name)
        np.testing.assert_allclose(
            got, want["weight_per_step"][i], rtol=1e-4, atol=1e-5
        )
        if linear:
            bias = want["bias_per_step"][i]
            np.testing.assert_allclose(trainer.params["bias"], bias, rtol=1e-4)


@pytest.mark.usefixtures("loose_promotion")
@pytest.mark.parametrize(
    "name", ["gluon_sparse_embedding_2ctx_adam", "gluon_embedding_2ctx_adam"]
)
def test_recorded_training_on_two_devices(name):
    """Each device pulls its half of the batch; their gradients are one push."""
    inputs, want = get(name, "inputs"), get(name, "outputs")
    block = run("gluon.contrib.nn.SparseEmbedding", input_dim=9, output_dim=3)
    store = make_store(rule(name), block.name, inputs["weight"])

    @jax.jit
    def grad(tables, ids):
        loss = lambda t: squares(block(t, {}, ids), ids)
        return sj.value_and_grad(loss)(tables)

    for i, batch in enumerate(batches_of(name)):
        parts = [
            grad(run("SparseBlock.pull", store=store, block=block, inputs=ids), ids)
            for ids in batch.reshape(2, 2)
        ]
        grads = [grads[block.name] for _, grads in parts]
        run("KVStore.push(list)", store=store, name=block.name, grads=grads)
        loss = sum(4 * float(loss) for loss, _ in parts)
        np.testing.assert_allclose(loss, want["losses"][i], rtol=1e-4)
        got = store.pull_all(block.name)
        np.testing.assert_allclose(
            got, want["weight_per_step"][i], rtol=1e-4, atol=1e-5
        )


def train_on_device(layer, params, tx, loss, batches, tables):
    """Params and losses after each batch, of an ordinary training step."""

    @jax.jit
    def step(params, state, batch):
        f = lambda p: loss(layer(p, batch), batch)
        value, grads = sj.value_and_grad(f, tables=tables)(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    state = tx.init(params)
    for batch in batches:
        params, state, value = step(params, state, batch)
        yield params, 4 * value


def test_recorded_training_on_the_device():
    name = "gluon_embedding_sparse_grad_adagrad"
    inputs, want = get(name, "inputs"), get(name, "outputs")
    layer = run("gluon.nn.Embedding(sparse_grad)", input_dim=9, output_dim=3)
    params = {"embedding": inputs["weight"]}
    tx = sj.optim.lazy(rule(name))
    batches = batches_of(name)
    steps = train_on_device(layer, params, tx, squares, batches, sj.nn.tables(layer))
    for i, (params, loss) in enumerate(steps):
        np.testing.assert_allclose(loss, want["losses"][i], rtol=1e-4)
        weight = want["weight_per_step"][i]
        np.testing.assert_allclose(params["embedding"], weight, rtol=1e-4, atol=1e-5)


def test_recorded_training_of_dense_on_csr():
    name = "gluon_csr_dot_layer_sgd"
    inputs, want = get(name, "inputs"), get(name, "outputs")
    layer = run("gluon.nn.Dense(csr)", units=2, in_units=7)
    params = {"kernel": inputs["weight"], "bias": inputs["bias"]}
    batches = [sj.SegmentTensor.from_csr(x) for x in batches_of(name)]
    batches = [
        sj.SegmentTensor.from_lengths(
            jax.tree.map(lambda v: jnp.pad(v, (0, 12 - len(v))), x.values), x.lengths
        )
        for x in batches
    ]
    tx = sj.optim.lazy(optax.sgd(0.1))
    tables = {"kernel": True, "bias": False}
    steps = train_on_device(layer, params, tx, squares, batches, tables)
    for i, (params, loss) in enumerate(steps):
        np.testing.assert_allclose(loss, want["losses"][i], rtol=1e-4)
        weight, bias = want["weight_per_step"][i], want["bias_per_step"][i]
        np.testing.assert_allclose(params["kernel"], weight, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(params["bias"], bias, rtol=1e-4, atol=1e-5)


def test_recorded_training_without_lazy_update():
    """The gradient is dense if all rows move at each step."""
    name = "gluon_sparse_embedding_sgdmom_std"
    inputs, want = get(name, "inputs"), get(name, "outputs")
    layer, params = sj.nn.Embedding(9, 3), {"embedding": inputs["weight"]}
    given = params, rule(name), squares, batches_of(name), False
    for i, (params, loss) in enumerate(train_on_device(layer, *given)):
        np.testing.assert_allclose(loss, want["losses"][i], rtol=1e-4)
        weight = want["weight_per_step"][i]
        np.testing.assert_allclose(params["embedding"], weight, rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------ data


def as_scipy(st, columns):
    """A batch of a loader as scipy's matrix."""
    offsets = np.asarray(st.offsets)
    index, value = (np.asarray(st.values[k])[: offsets[-1]] for k in ("index", "value"))
    return sp.csr_matrix((value, index, offsets), (st.num_segments, columns))


def test_recorded_data():
    name = "data_simple_dataset_csr_item"
    x, want = get(name, "inputs")["x"], get(name, "outputs")["r"]
    dataset = run("gluon.data.SimpleDataset(csr)", data=x)
    assert_answers(dataset[2], want)
    label = np.arange(6.0, dtype=np.float32)
    both = run("gluon.data.ArrayDataset", data=x, label=label)
    loader = sj.data.DataLoader(both, 4, drop_remainder=True)
    want = get("data_dataloader_csr_custom_batchify", "outputs")
    ((rows, labels),) = loader
    assert_answers(as_scipy(rows, 5), want["r0"])
    assert_answers(labels, want["r1"])
    (want,) = get("data_ndarrayiter_csr_discard", "outputs").values()
    assert_answers(dense(as_scipy(rows, 5)), want)
    # MXNet stacks the rows of a DataLoader into [B, 1, N]; the numbers are the same.
    stacked = get("data_dataloader_simple_csr", "outputs")
    want = np.concatenate([np.asarray(part)[:, 0] for part in stacked.values()])
    for key in ("gluon.data.DataLoader", "io.NDArrayIter"):
        loader = run(key, dataset=dataset, batch_size=2)
        got = np.concatenate([as_scipy(batch, 5).toarray() for batch in loader])
        assert_answers(got, want)
    assert run("gluon.data.SimpleDataset", data=[3, 4])[1] == 4


def test_libsvm(tmp_path):
    pytest.importorskip("sklearn.datasets")
    sklearn = importlib.import_module("sklearn")
    path = str(tmp_path / "data.libsvm")
    pathlib.Path(path).write_text("1 1:0.5 3:2\n-1 2:1\n")
    rows, labels = run("io.LibSVMIter", path=path, sklearn=sklearn)
    np.testing.assert_array_equal(rows.toarray(), [[0.5, 0, 2], [0, 1, 0]])
    np.testing.assert_array_equal(labels, [1, -1])


# ------------------------------------------------------------------ saving


@pytest.mark.usefixtures("loose_promotion")
def test_recorded_saving(tmp_path):
    """All rows are saved, and a table goes from the store to the device and back."""
    (want,) = get("load_rsp_params_into_dense_embedding", "outputs").values()
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
        assert_answers(other.store.pull_all(block.name), want)
    layer, ids = sj.nn.Embedding(9, 3), jnp.arange(9)
    assert_answers(layer({"embedding": other.store.pull_all(block.name)}, ids), want)
    # MXNet returns one number for the other direction, 1 for equal.
    (equal,) = get("load_dense_params_into_sparse_embedding", "outputs").values()
    assert equal.tolist() == [1] and (make(want).predict(ids) == want).all()


# ------------------------------------------------------------------ worked by NumPy

X = np.array([[0.5, 0, -1.5], [0, 0, 0], [2.5, -0.7, 0], [0, 0, 3]], np.float32)
Y = np.array([[0, 0, 2.0], [1, -2, 0], [3.0, 0, 0], [0, 0, 0]], np.float32)
ROW = np.array([1.0, 2.0, 4.0], np.float32)
PARTLY = X / 4  # within [-1, 1]

away_from_zero = lambda v: np.sign(v) * np.floor(np.abs(v) + 0.5)
# MXNet's functions, by name, and their inputs.
KEEP = {
    "abs": (np.abs, X),
    "arcsin": (np.arcsin, PARTLY),
    "arcsinh": (np.arcsinh, X),
    "arctan": (np.arctan, X),
    "arctanh": (np.arctanh, PARTLY),
    "cbrt": (np.cbrt, X),
    "ceil": (np.ceil, X),
    "clip": (lambda v: np.clip(v, -1, 2), X),
    "degrees": (np.degrees, X),
    "expm1": (np.expm1, X),
    "fix": (np.trunc, X),
    "floor": (np.floor, X),
    "log1p": (np.log1p, PARTLY),
    "make_loss": (lambda v: v, X),
    "negative": (np.negative, X),
    "radians": (np.radians, X),
    "relu": (lambda v: np.maximum(v, 0), X),
    "rint": (lambda v: np.ceil(v - 0.5), X),
    "round": (away_from_zero, X),
    "sign": (np.sign, X),
    "sin": (np.sin, X),
    "sinh": (np.sinh, X),
    "sqrt": (np.sqrt, np.abs(X)),
    "square": (np.square, X),
    "stop_gradient": (lambda v: v, X),
    "tan": (np.tan, X),
    "tanh": (np.tanh, X),
    "trunc": (np.trunc, X),
}
FALL_BACK = {
    "arccos": (np.arccos, PARTLY),
    "arccosh": (np.arccosh, X),
    "cos": (np.cos, X),
    "cosh": (np.cosh, X),
    "exp": (np.exp, X),
    "gamma": (scipy.special.gamma, X + 0.25),
    "gammaln": (scipy.special.gammaln, X + 0.25),
    "log": (np.log, np.abs(X)),
    "log10": (np.log10, np.abs(X)),
    "log2": (np.log2, np.abs(X)),
    "rsqrt": (lambda v: 1 / np.sqrt(v), np.abs(X)),
    "sigmoid": (lambda v: 1 / (1 + np.exp(-v)), X),
}


def row_sparse(x):
    return sj.SelectedRows.from_dense(jnp.asarray(x), capacity=4)


def elements(x):
    return sj.SegmentTensor.from_csr(sp.csr_matrix(x))


@pytest.mark.parametrize("name", [*KEEP, *FALL_BACK])
def test_functions_of_one_array(name):
    f, x = {**KEEP, **FALL_BACK}[name]
    with np.errstate(all="ignore"):
        want = f(x)
    if name == "gamma":
        want = np.where(x == np.round(x), np.nan, want)
    limits = {"a_min": -1.0, "a_max": 2.0}
    for given in (row_sparse(x), sp.csr_matrix(x)):
        got = run(f"sparse.{name}", x=given, **limits)
        assert isinstance(got, type(given) if name in KEEP else jax.Array)
        np.testing.assert_allclose(dense(got), want, rtol=2e-5, atol=1e-6)
    if name in KEEP and name != "negative":
        got = jax.jit(lambda x: run(f"sparse.{name}", x=x, **limits))(elements(x))
        np.testing.assert_allclose(dense(as_scipy(got, 3)), want, rtol=2e-5, atol=1e-6)


R, C, D = row_sparse, sp.csr_matrix, jnp.asarray
BIAS, WIDE = (
    np.array([1.0, -1.0], np.float32),
    np.array([[1, 2, 3], [4, 5, 6.0]], np.float32),
)
COUNTS = {"shape": (4, 3)}

# cell: names, and the result as an array and its kind
EXAMPLES: dict[str, tuple[dict[str, Any], Any, Any]] = {
    "sparse.row_sparse_array": (
        {"indices": [2, 0], "data": X[[2, 0]], "shape": (4, 3)},
        X * [[1], [0], [1], [0]],
        sj.SelectedRows,
    ),
    "sparse.row_sparse_array(default)": ({"x": D(X)}, X, sj.SelectedRows),
    "sparse.array": ({"source": C(X)}, X, sp.csr_matrix),
    "sparse.zeros(row_sparse)": (COUNTS, 0 * X, sj.SelectedRows),
    "sparse.empty(row_sparse)": (COUNTS, 0 * X, sj.SelectedRows),
    "sparse.empty(csr)": (COUNTS, 0 * X, sp.csr_matrix),
    "sparse.zeros_like(row_sparse)": ({"x": R(X)}, 0 * X, sj.SelectedRows),
    "sparse.zeros_like(csr)": ({"x": C(X)}, 0 * X, sp.csr_matrix),
    "sparse.cast_storage(default, row_sparse)": ({"x": D(X)}, X, sj.SelectedRows),
    "sparse.cast_storage(default, csr)": ({"x": D(X)}, X, sp.csr_matrix),
    "sparse.cast_storage(csr, default)": ({"x": C(X)}, X, jax.Array),
    "RowSparseNDArray.tostype": ({"x": R(X)}, X, jax.Array),
    "RowSparseNDArray.retain": (
        {"x": R(X), "indices": [3, 1]},
        X * [[0], [0], [0], [1]],
        sj.SelectedRows,
    ),
    "RowSparseNDArray.check_format": ({"x": R(X)}, X, sj.SelectedRows),
    "RowSparseNDArray.astype": (
        {"x": R(X), "dtype": jnp.float16},
        X.astype(np.float16),
        sj.SelectedRows,
    ),
    "RowSparseNDArray.asnumpy": ({"x": R(X)}, X, np.ndarray),
    "CSRNDArray.tostype": ({"x": C(X)}, X, jax.Array),
    "CSRNDArray.asscipy": ({"x": C(X)}, X, sp.csr_matrix),
    "CSRNDArray.astype": ({"x": C(X), "dtype": np.int32}, X.astype(int), sp.csr_matrix),
    "CSRNDArray.asnumpy": ({"x": C(X)}, X, np.ndarray),
    "CSRNDArray.slice": ({"x": C(X), "begin": 1, "end": 3}, X[1:3], sp.csr_matrix),
    "sparse.slice": ({"x": C(X), "begin": 1, "end": 3}, X[1:3], sp.csr_matrix),
    "take(csr)": ({"x": C(X), "indices": [3, 0]}, X[[3, 0]], sp.csr_matrix),
    "sparse.elemwise_sub(row_sparse, row_sparse)": (
        {"x": R(X), "y": R(Y)},
        X - Y,
        sj.SelectedRows,
    ),
    "sparse.elemwise_sub(csr, csr)": ({"x": C(X), "y": C(Y)}, X - Y, sp.csr_matrix),
    "sparse.elemwise_sub(default, row_sparse)": (
        {"x": D(X), "y": R(Y)},
        X - Y,
        jax.Array,
    ),
    "sparse.elemwise_mul(row_sparse, row_sparse)": (
        {"x": R(X), "y": R(Y)},
        X * Y,
        sj.SelectedRows,
    ),
    "sparse.elemwise_mul(csr, default)": (
        {"x": C(X), "y": D(Y)},
        X * Y,
        sp.csr_matrix,
    ),
    "sparse.elemwise_div": ({"x": R(X), "y": D(Y + 5)}, X / (Y + 5), jax.Array),
    "sparse.add(row_sparse, row_sparse)": (
        {"x": R(X), "y": R(Y)},
        X + Y,
        sj.SelectedRows,
    ),
    "sparse.subtract(row_sparse, row_sparse)": (
        {"x": R(X), "y": R(Y)},
        X - Y,
        sj.SelectedRows,
    ),
    "sparse.multiply(row_sparse, default)": (
        {"x": R(X), "y": D(Y)},
        X * Y,
        sj.SelectedRows,
    ),
    "sparse.divide": ({"x": C(X), "y": D(Y + 5)}, X / (Y + 5), jax.Array),
    "sparse.subtract(scalar)": ({"x": R(X), "scalar": 2}, X - 2, jax.Array),
    "sparse.broadcast_add": ({"x": C(X), "row": ROW[None]}, X + ROW, jax.Array),
    "sparse.broadcast_plus": ({"x": C(X), "row": ROW[None]}, X + ROW, jax.Array),
    "sparse.broadcast_sub": ({"x": C(X), "row": ROW[None]}, X - ROW, jax.Array),
    "sparse.broadcast_minus": ({"x": C(X), "row": ROW[None]}, X - ROW, jax.Array),
    "sparse.broadcast_mul": ({"x": C(X), "row": D(ROW)}, X * ROW, sp.csr_matrix),
    "sparse.broadcast_div": ({"x": C(X), "row": D(ROW)}, X / ROW, sp.csr_matrix),
    "sparse.where": (
        {"condition": C(X), "x": D(X), "y": D(Y)},
        np.where(X != 0, X, Y),
        jax.Array,
    ),
    "sparse.sum(csr, axis=0)": ({"x": C(X)}, X.sum(0), jax.Array),
    "sparse.sum(csr, axis=1)": ({"x": C(X)}, X.sum(1), jax.Array),
    "sparse.sum(row_sparse, axis=0)": ({"x": R(X)}, X.sum(0), jax.Array),
    "sparse.mean(csr, axis=0)": ({"x": C(X)}, X.mean(0), jax.Array),
    "sparse.mean(csr, axis=1)": ({"x": C(X)}, X.mean(1), jax.Array),
    "sparse.mean(row_sparse, axis=0)": ({"x": R(X)}, X.mean(0), jax.Array),
    "sparse.dot(csr.T, row_sparse)": (
        {"lhs": C(X), "rhs": R(Y)},
        X.T @ Y,
        sj.SelectedRows,
    ),
    "sparse.dot(default, csr)": ({"lhs": D(Y), "rhs": C(X.T)}, Y @ X.T, jax.Array),
    "sparse.dot(default, csr.T)": ({"lhs": D(Y), "rhs": C(X)}, Y @ X.T, jax.Array),
    "sparse.FullyConnected(row_sparse)": (
        {"data": D(X), "weight": R(WIDE), "bias": BIAS[None]},
        X @ WIDE.T + BIAS,
        jax.Array,
    ),
    "sparse.FullyConnected(csr)": (
        {"data": C(X), "weight": D(WIDE), "bias": BIAS[None]},
        X @ WIDE.T + BIAS,
        jax.Array,
    ),
}


@pytest.mark.parametrize("key", EXAMPLES)
def test_by_hand(key):
    names, want, kind = EXAMPLES[key]
    got = run(key, **names)
    assert isinstance(got, kind)
    np.testing.assert_allclose(dense(got), want, rtol=1e-5, atol=1e-6)


def test_parts():
    x, device = row_sparse(X), jax.devices()[1]
    assert run("RowSparseNDArray.indices", x=x).tolist() == [0, 2, 3, 4]
    np.testing.assert_array_equal(run("RowSparseNDArray.data", x=x)[:3], X[[0, 2, 3]])
    assert run("RowSparseNDArray.copyto", x=x, device=device).values.device == device
    st, x = elements(X), sp.csr_matrix(X)
    copied = run("CSRNDArray.copyto", x=x, device=device)
    assert copied.values["value"].device == device
    assert run("CSRNDArray.check_format", x=x) is None
    for name, ours in (
        ("indices", st.values["index"]),
        ("indptr", st.offsets),
        ("data", st.values["value"]),
    ):
        got = run(f"CSRNDArray.{name}", x=x)
        np.testing.assert_array_equal(got, ours)
    parts = {"indptr": x.indptr, "indices": x.indices, "data": x.data}
    made = run("sparse.csr_matrix(jit)", **parts)
    np.testing.assert_array_equal(as_scipy(made, 3).toarray(), X)
    # The notes describe sums inside jit.
    sums = sj.segment_sum(st.values["value"], st.segment_ids)
    np.testing.assert_allclose(sums, X.sum(1), rtol=1e-6)
    assert st.lengths.tolist() == x.getnnz(axis=1).tolist()


@pytest.mark.parametrize("name", ["Linear", "MAE"])
def test_regression_outputs(name):
    """The gradient of MXNet's documentation, divided by the number of outputs."""
    f = lambda data: run(f"sparse.{name}RegressionOutput", data=data, label=C(Y))
    np.testing.assert_array_equal(f(D(X))[0], X)
    got = jax.grad(lambda data: f(data)[1])(D(X + 0.1))
    want = (X + 0.1 - Y if name == "Linear" else np.sign(X + 0.1 - Y)) / 3
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


OPTIMIZERS = [
    "sparse.sgd_update",
    "sparse.sgd_mom_update",
    "sparse.adam_update",
    "sparse.adagrad_update",
    "sparse.ftrl_update",
    "contrib.group_adagrad_update",
    "lazy_update=False",
    "optimizer.nag",
    "clip_gradient",
]


@pytest.mark.usefixtures("loose_promotion")
@pytest.mark.parametrize("key", OPTIMIZERS)
def test_optimizers(key):
    """One step from a table of ones; test_peers.py has the recorded ones."""
    hyper = dict(lr=0.1, momentum=0.9, beta=1.0, lamda1=0.01, clip=0.5)
    tx, table = run(key, **hyper), np.ones((4, 3), np.float32)
    g = sj.SelectedRows(np.array([2, 2]), np.full((2, 3), 0.5, np.float32), 4)

    @jax.jit
    def step(table, g):
        state = tx.init(table)
        if hasattr(tx, "catch_up"):
            table, state = tx.catch_up(table, state, g.rows)
        return table + tx.update(g, state, table)[0]

    row = {
        "sparse.adam_update": 0.9,
        "sparse.adagrad_update": 0.9,
        "contrib.group_adagrad_update": 0.9,
        "optimizer.nag": 1 - 0.19,
        "clip_gradient": 0.95,
        # z = 1 - 10 * 1 and n = 1, from a weight of 1 and a state of zeros
        "sparse.ftrl_update": (9 - 0.01) / 20,
    }.get(key, 0.9)
    want = np.ones((4, 3), np.float32)
    want[2] = row
    np.testing.assert_allclose(step(table, g), want, rtol=1e-5)


# ------------------------------------------------------------------ differences


def test_every_difference_is_checked():
    assert DIFFERENCES == list(_RECORDED.checked)


@pytest.mark.usefixtures("loose_promotion")
@pytest.mark.parametrize("what", DIFFERENCES)
def test_differs(what):
    _RECORDED.checked[what]()


@differs("duplicate rows, to dense")
def _():
    name = "row_sparse_array_duplicate_indices_todense"
    inputs, want = get(name, "inputs"), get(name, "outputs")["dense"]
    x = sj.SelectedRows(inputs["indices"], inputs["data"], 6)
    assert x.to_dense()[1].tolist() == [11, 22] and want[1].tolist() == [10, 20]
    last = sj.scatter_assign(jnp.zeros((6, 2)), x.rows[1:], x.values[1:])
    assert_answers(last, want)


@differs("duplicate or unsorted rows")
def _():
    assert "ascending" in CASES["rsp_check_format_unsorted"]["error"]["message"]
    x = sj.SelectedRows(jnp.array([4, 1, 4]), jnp.ones((3, 1)), 6)
    assert x.coalesce().rows.tolist() == [1, 4, 6]


@differs("rows out of range")
def _():
    assert "less than" in CASES["rsp_check_format_out_of_range"]["error"]["message"]
    x = sj.SelectedRows(jnp.array([6, -1, 2]), jnp.ones((3, 1)), 6)
    assert int(x.num_rows()) == 1 and float(x.to_dense().sum()) == 1


@differs("all-zero rows of a result")
def _():
    x = sj.SelectedRows(jnp.array([1]), jnp.ones((1, 2)), 3)
    assert filled_rows(x - x) == [1]
    assert filled_rows(sj.SelectedRows.from_dense((x - x).to_dense())) == []


@differs("`retain`, rows that are not there, repeated ids")
def _():
    inputs, want = (get("retain_duplicate", what) for what in ("inputs", "outputs"))
    x, ids = inputs["x"], inputs["indices"]
    assert ids.tolist() == [2, 2, 5]
    got = x.retain(ids)
    assert filled_rows(got) == [2, 5]
    assert_answers(got.to_dense(), want["dense"])
    assert_answers(x.get(ids), want["y"].values)


@differs("`retain` of a dense array")
def _():
    assert "_sparse_retain" in CASES["retain_on_dense_error"]["error"]["message"]
    assert sj.lookup(jnp.arange(4.0), jnp.array([3, 1])).tolist() == [3, 1]


@differs("gradient of `retain`")
def _():
    inputs, want = (get("retain_backward", what) for what in ("inputs", "outputs"))
    loss = lambda x: jnp.sum(x.retain(inputs["indices"]).to_dense() ** 2)
    value, grad = jax.jit(sj.value_and_grad(loss))(inputs["x"])
    assert_answers(value, want["loss"])
    assert_answers(grad, want["grad"])
    assert filled_rows(grad) == filled_rows(inputs["x"])
    assert want["grad"].rows.tolist() == inputs["indices"].tolist()


@differs("storage of `dot(csr.T, ...)`")
def _():
    inputs, want = (get("dot_csrT_dns", what) for what in ("inputs", "outputs"))
    got = run("sparse.dot(csr.T, default)", **inputs)
    assert got.rows.tolist() == inputs["lhs"].indices.tolist()
    assert filled_rows(got) == want["y"].rows.tolist()


@differs("a vector on the right of `dot`")
def _():
    np.testing.assert_allclose(sj.dot(C(X), ROW), X @ ROW)


@differs("fallback to dense")
def _():
    x: Any = R(X)
    for f in (jnp.exp, lambda x: x + 2.0):
        with pytest.raises(TypeError):
            f(x)


@differs("ids out of range")
def _():
    name = "embedding_out_of_range_dense_grad"
    inputs, want = get(name, "inputs"), get(name, "outputs")
    weight, ids = inputs["weight"], inputs["ids"]
    clipped = lambda w: sj.lookup(w, ids, mode="clip")
    assert_answers(clipped(weight), want["y"])
    grad = sj.grad(lambda w: jnp.sum(clipped(w) * inputs["out_grad"]), tables=True)
    assert_answers(jax.jit(grad)(weight).to_dense(), want["weight_grad"])
    assert np.isnan(run("sparse.Embedding", weight=weight, data=ids)).any()
    assert "out of bound" in CASES["sparse_embedding_out_of_range"]["error"]["message"]
    with pytest.raises(checkify.JaxRuntimeError, match="out of range"):
        sj.lookup(weight, ids, mode="error")


@differs("float64 tables")
def _():
    assert "error" in CASES["embedding_float64"]
    with _compat.enable_x64(True):
        grad = sj.grad(lambda w: jnp.sum(sj.lookup(w, jnp.array([1]))), tables=True)
        assert grad(jnp.ones((9, 3), jnp.float64)).dtype == jnp.float64


@differs('`grad_req="add"`')
def _():
    assert "req != write" in CASES["embedding_grad_req_add"]["error"]["message"]
    both = R(X) + R(Y)
    assert isinstance(both, sj.SelectedRows)
    np.testing.assert_array_equal(both.to_dense(), X + Y)


@differs("types of ids")
def _():
    with pytest.raises(TypeError, match="must be integers, got float32"):
        sj.lookup(jnp.ones((3, 2)), jnp.array([1.0]))


@differs("adding 0")
def _():
    np.testing.assert_array_equal((R(X) + 0).to_dense(), X)
    with pytest.raises(TypeError):
        _ = R(X) + 2


@differs("Adam's eps")
def _():
    tx = run("sparse.adam_update", lr=0.1)
    g, table = 1e-8 * jnp.ones((1, 1)), jnp.zeros((1, 1))
    updates, _ = tx.update(g, tx.init(table), table)
    # Ours: 0.1 * g / (g + eps); MXNet's: with eps / sqrt(1 - 0.999).
    np.testing.assert_allclose(updates, -0.05, rtol=1e-3)


@differs("AdaGrad with weight decay")
def _():
    want = get("trainer_adagrad_wd_silently_skipped", "outputs")["r"]
    assert (np.asarray(want.values) == 1).all()
    tx = optax.chain(
        optax.add_decayed_weights(0.01), rule("gluon_sparse_embedding_adagrad")
    )
    store = make_store(tx, weight=np.ones((9, 3), np.float32))
    store.push("weight", sj.SelectedRows(jnp.array([1, 3]), jnp.ones((2, 3)), 9))
    np.testing.assert_allclose(
        store.row_sparse_pull("weight", [1, 3]).values, 0.9, 1e-5
    )


@differs("FTRL on a dense weight")
def _():
    name = "gluon_embedding_sparse_grad_ftrl"
    inputs, want = get(name, "inputs"), get(name, "outputs")
    layer, start = sj.nn.Embedding(9, 3), {"embedding": inputs["weight"]}
    given = squares, batches_of(name)
    # With a dense gradient ours does as MXNet did: untouched rows become 0.
    for i, (params, loss) in enumerate(
        train_on_device(layer, start, rule(name), *given, tables=False)
    ):
        np.testing.assert_allclose(loss, want["losses"][i], rtol=1e-4, atol=1e-6)
        weight = want["weight_per_step"][i]
        np.testing.assert_allclose(params["embedding"], weight, rtol=1e-4, atol=1e-5)
    read = set(np.concatenate(batches_of(name)).tolist())
    others = [i for i in range(9) if i not in read]
    assert others and not np.asarray(params["embedding"])[others].any()
    tx = sj.optim.lazy(rule(name))
    steps = train_on_device(layer, start, tx, *given, tables={"embedding": True})
    for params, _ in steps:
        kept = params["embedding"][jnp.array(others)]
        np.testing.assert_array_equal(kept, inputs["weight"][jnp.array(others)])


@differs("names of `Parameter(stype=)`")
def _():
    for name in ("err_param_bad_stype", "err_param_bad_grad_stype"):
        assert CASES[name]["error"]["type"] == "AssertionError"
    made = run("gluon.Parameter(stype=row_sparse)", shape=(9, 3))
    assert made == sj.nn.TableSpec((9, 3))
    assert run("gluon.Parameter(grad_stype=row_sparse)") is sj.value_and_grad


@differs("Trainer, a gradient that was not computed")
def _():
    assert CASES["err_stale_gradient"]["error"]["type"] == "UserWarning"

    class Idle(sj.nn.SparseEmbedding):
        def sparse_forward(self, tables, params, inputs):
            return jnp.zeros(1)

    store = make_store(optax.sgd(1.0), "w")
    block = Idle(9, 3, name="w")  # pulls a table that it does not use
    trainer = sj.nn.Trainer(block, store, squares, optax.sgd(1.0))
    before = store.pull_all("w")
    trainer.step(jnp.array([1]))
    np.testing.assert_array_equal(store.pull_all("w"), before)


@differs("`last_batch`, batches of csr")
def _():
    loader = sj.data.DataLoader(sj.data.ArrayDataset(C(X)), 3, mask=True)
    shapes = [[x.shape for x in jax.tree.leaves(batch)] for batch in loader]
    assert len(shapes) == 2 and shapes[0] == shapes[1]


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
    trainer, batches = _RECORDED.blocks["make_trainer"](), list(clicks(2))
    block, store = trainer.block, trainer.store
    given = {"store": store, "trainer": trainer, "batches": batches * 3}
    pulled = run("row_sparse_pull, one batch ahead", **given)
    losses = [trainer.step(batch, rows) for batch, rows in pulled]
    assert losses[-1] < losses[1]
    specs = run("row_sparse Parameter", block=block)
    assert {n: s.shape[0] for n, s in specs.items()} == {
        "user": 100_000,
        "item": 20_000,
        "tags": 50_000,
    }
    # A forward by hand equals the forward of the trainer.
    want = trainer.predict(batches[0])
    inputs = batches[0] | {"tags": sj.SegmentTensor.from_csr(batches[0]["tags"])}
    tables = run("SparseBlock.pull", store=store, block=block, inputs=inputs)
    given = {"tables": tables, "params": trainer.params, "inputs": inputs}
    for key in ("SparseBlock.sparse_forward", "SparseBlock.forward"):
        step = lambda given, key=key: run(key, block=block, **given)
        np.testing.assert_allclose(jax.jit(step)(given), want, rtol=1e-5)
    # The same model on whole tables, an ordinary function.
    whole = {name: store.pull_all(name) for name in tables}
    got = jax.jit(block)(whole, trainer.params, inputs)
    np.testing.assert_allclose(got, want, rtol=1e-5)


def test_proposal_names():
    assert run("SparseBlock") is sj.nn.SparseBlock
    assert run("DataParallel") is sj.parallel.data_parallel
    assert run("ParallelSparseState") is sj.parallel.shard_rows
    dataset = sj.data.ArrayDataset(C(X))
    assert len(list(run("DataLoader(sparse)", dataset=dataset, batch_size=2))) == 2
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
    rows = sj.SelectedRows(jnp.array([0, 1]), jnp.ones((2, 1)), 3)
    if "SparseEmbedding" in code:
        rows = sj.SelectedRows(jnp.array([0, 1]), jnp.ones((2, 2)), 3)
    store = make_store(optax.sgd(1.0), "w", np.ones((3, 1), np.float32))
    names = {"rows": rows, "store": store, "ids": jnp.array([1]), "loss": squares}
    names |= {"tx": optax.sgd(1.0), "block": sj.nn.SparseEmbedding(3, 1, name="w")}
    with pytest.raises(
        (TypeError, ValueError, KeyError, checkify.JaxRuntimeError)
    ) as e:
        eval(code, {**_RECORDED.blocks, **names})
    assert said in str(e.value)
    if what == "table was not pulled":
        assert isinstance(e.value, sj.NotPulledError)
        assert "pulled tables: ['w']" in str(e.value)


# ------------------------------------------------------------------ nothing forgotten

CALLABLES = """
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


def test_every_name_is_on_the_page():
    """All that `mx.nd.sparse` had, and its classes."""
    have = {re.split(r"[(]", key)[0] for key in CELLS}
    assert {f"sparse.{name}" for name in CALLABLES.split()} <= have
    assert {"_internal._square_sum", "contrib.getnnz"} <= have
    methods = "indices data tostype copyto retain check_format astype asnumpy"
    assert {f"RowSparseNDArray.{name}" for name in methods.split()} <= have
    methods = "indices indptr data tostype copyto asscipy check_format astype asnumpy"
    assert {f"CSRNDArray.{name}" for name in methods.split()} <= have


def test_every_row_is_run():
    """Each cell is named by a test, and so is each recorded case."""
    source = pathlib.Path(__file__).read_text()
    by_name = {f"sparse.{name}" for name in [*KEEP, *FALL_BACK]}
    by_name |= {f"sparse.{name}RegressionOutput" for name in ("Linear", "MAE")}
    by_name |= {f"_internal._square_sum({axis})" for axis in ("axis=0", "axis=1")}
    by_name |= {"_internal._square_sum(axis=1, keepdims)"}
    by_name |= {f"CSRNDArray.{name}" for name in ("indices", "indptr", "data")}
    assert not [key for key in CELLS if f'"{key}"' not in source and key not in by_name]
    assert not [name for name in CASES if f'"{name}"' not in source]
