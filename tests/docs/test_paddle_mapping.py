"""paddle.md: its code, checked against the answers of PaddlePaddle.

`golden/paddle.json` and `.npz` hold the answers of PaddlePaddle (the header of the
former names their source), and `golden/optim.json` the steps of its optimizers. The
rows are in `paddle.txt`; those of sequences are from Paddle's documentation.
"""

# optax's types know trees of arrays only.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportIndexIssue=false, reportOperatorIssue=false

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import checkify  # noqa: F401  (in paddle.txt)

import sparsejax as sj
from recorded import (
    Golden,
    Page,
    dense,
    filled_rows,
    page_ran,  # noqa: F401  (a fixture)
    same,
    table_grad,
    train,
)
from sparsejax import _compat


# The page is a reader's session, and optax itself relies on implicit promotion.
pytestmark = [pytest.mark.usefixtures("loose_promotion"), pytest.mark.slow]

PAGE, OPTIM = Page("paddle"), Golden("optim")
run, inputs, outputs = PAGE.run, PAGE.inputs, PAGE.outputs
WITHOUT_CODE = {cells[0].strip("`") for cells in PAGE.rows if cells[1] == "—"}
NO_KERNEL = {
    c["name"] for c in PAGE.cases if c.get("error", {}).get("type") == "UNSUPPORTED"
}


# ------------------------------------------------------------------ for paddle.txt


def slots():
    """A SelectedRows with a duplicate, an empty slot, and rows in no order."""
    rows, values = [4, 1, 6, 4], [[1.0, -2.0], [3.0, 4.0], [9.0, 9.0], [0.5, 0.25]]
    return sj.SelectedRows(jnp.array(rows), jnp.array(values), 6)


DATA = [1.0, 3.0, 2.0, 4.0, 6.0, 5.0, 1.0]
TWO_LEVELS = [2, 0, 3], [1, 2, 1, 0, 3]
GRID = np.arange(12.0, dtype=np.float32).reshape(6, 2)
IDS = sj.SegmentTensor.from_lengths(jnp.array([3, 1, 5]), [1, 0, 2])
WEIGHTS = np.linspace(-1.0, 1.0, 27, dtype=np.float32).reshape(9, 3)
ONES, TWO_ROWS = jnp.ones((9, 3)), sj.SelectedRows([4, 1], jnp.ones((2, 3)), 9)
SPEC = jax.ShapeDtypeStruct((4, 2), jnp.float32)
W = sj.desc.describe(SPEC, ["w"])[0]
X = np.cos(np.arange(9.0, dtype=np.float32)).reshape(3, 3)
PATHS = np.array([[0, 2, -1], [0, 1, 5], [0, 2, 6]])


def square_sum(w):
    return jnp.sum(w**2)


def sgd_of_rows(p, g, lr):
    p = p - lr[0] * g
    return p.coalesce() if isinstance(p, sj.SelectedRows) else p


def read_ones(ids, **how):
    """The gradient of a sum of rows of a table of 9."""
    return table_grad(lambda w: sj.lookup(w, np.asarray(ids), **how), np.ones((9, 3)))


def read_of(name, k):
    """The gradient of one of the two reads of a case, the second times 3."""
    ids = np.array(PAGE.named(name)["params"]["ids"][k])
    return table_grad(
        lambda w: (1.0, 3.0)[k] * sj.lookup(w, ids), inputs(name)["weight"]
    )


def all_rows():
    values = jnp.cos(jnp.arange(27.0)).reshape(9, 3)
    return sj.SelectedRows(jnp.arange(9)[::-1], values, 9)


def few_rows():
    return sj.SelectedRows([4, 1] + [9] * 7, all_rows().values, 9)


def layer_gradient(layer):
    """The gradient of rows 3 and -1 of a layer; the latter reads as padding, or not."""
    params, ids = layer.init(jax.random.key(0)), jnp.array([3, 8])
    loss = lambda p: (jnp.sum(layer(p, ids)), layer(p, ids))
    grad = sj.grad(loss, has_aux=True, tables=sj.nn.tables(layer))
    grads, out = jax.jit(grad)(params)
    trained = dense(grads["embedding"]) != 0
    assert same(out, params["embedding"][ids] * trained[[3, 8]])
    return grads["embedding"]


def one_step(tx, g, rule):
    """Whether a step of `tx` from WEIGHTS is `rule(w, g)`."""
    return same(train(tx, WEIGHTS, [g])[0], rule(WEIGHTS, dense(g)))


def lod(data, *lengths):
    return run(
        "fluid.create_lod_tensor", data=jnp.array(data), recursive_seq_lens=lengths
    )


def room(data, lengths):
    """With room for more elements, as inside jit."""
    return sj.SegmentTensor.from_lengths(jnp.array(data), lengths, capacity=9)


# ------------------------------------------------------------------ recorded steps


LARGE_EPS = {"learning_rate": 0.1, "beta1": 0.8, "beta2": 0.95, "epsilon": 0.01}


def recorded_steps(name):
    """The weights at the start, the gradients, and the weights after each step."""
    (case,) = [c for c in OPTIM.cases if (c["system"], c["name"]) == ("paddle", name)]
    data = {field: OPTIM.arrays[key] for field, key in case["arrays"].items()}
    start, grads = data["weights0"], zip(data["rows"], data["grads"])
    return start, [sj.SelectedRows(*g, len(start)) for g in grads], data["weights"]


def steps_of(tx, name, count=0, whole=False):
    """The weights of `tx` after each step of a case."""
    weights, grads, _ = recorded_steps(name)
    grads = [jnp.asarray(dense(g)) for g in grads] if whole else grads
    state = tx.init(jnp.asarray(weights)) if count else None
    if count:
        state = optax.tree_utils.tree_set(state, count=jnp.int32(count))
    return train(tx, weights, grads, state)


def steps_are(tx, name, count=0, whole=False):
    got, want = steps_of(tx, name, count, whole), recorded_steps(name)[2]
    return same(got, want, rtol=2e-5, atol=2e-6)


def bare(key, names):
    """The optimizer inside of a cell's `lazy` or `exact`, for dense gradients."""
    code = re.sub(r"^sj\.optim\.(lazy|exact)\((.*)\)$", r"\2", PAGE.cells[key])
    return eval(code, {**PAGE.blocks, **names})


def is_dense(tx, key, names, *more):
    """Whether steps are those of the optimizer inside on dense gradients."""
    grads = [all_rows(), *more]
    whole = [jnp.asarray(dense(grad)) for grad in grads]
    return same(train(tx, ONES, grads), train(bare(key, names), ONES, whole))


# ------------------------------------------------------------------ by hand


@pytest.mark.parametrize(
    "name",
    ["embedding_float64", "embedding_padding_idx", "embedding_padding_idx_negative"],
)
def test_recorded_embedding(name):
    padding_idx = PAGE.named(name)["params"]["padding_idx"]
    padded = {} if padding_idx is None else {"padding_idx": padding_idx}
    padding = "nn.functional.embedding(padding_idx)"
    key = padding if padded else "nn.functional.embedding"
    with _compat.enable_x64(name == "embedding_float64"):
        (weight, ids, out_grad), want = inputs(name).values(), outputs(name)
        f = lambda w: run(key, weight=w, x=ids, **padded)
        loss = lambda w: jnp.sum(f(w) * out_grad)
        assert same(jax.jit(f)(weight), want["y"])
        grad = jax.jit(run("is_sparse=True", loss=loss))(weight)[1]
        other = jax.jit(run("is_sparse=False", loss=loss))(weight)[1]
    wanted = want["weight_grad"]
    assert grad.dtype == wanted.dtype
    if padded:  # the first of the differences
        trained = np.asarray(ids != padded["padding_idx"] % 9)[:, None]
        wanted = wanted.map(lambda v: jnp.asarray(np.asarray(v) * trained))
    assert (filled_rows(grad) == filled_rows(wanted)) != bool(padded)
    assert same(grad, wanted) and same(other, dense(wanted))


@pytest.mark.parametrize(
    "name",
    [
        "static_adagrad_sparse",
        "static_adam_lazy_sparse",
        "static_adam_sparse",
        "static_sgd_clip_by_norm_sparse",
        "static_sgd_l2_sparse",
        "static_sgd_sparse_extra_dense_use",
    ],
)
def test_recorded_programs(name):
    """The first loss, and the kind of W@GRAD by Paddle's type inference."""
    params, want = PAGE.named(name)["params"], outputs(name)
    weights, batches = inputs(name)["weight"], np.array(params["ids"])

    def loss(emb_w, ids):
        once = jnp.sum(sj.lookup(emb_w, ids) ** 2)
        return once + jnp.sum(emb_w) if params["extra_dense_use"] else once

    kind, dims = want["gradients"]["emb_w@GRAD"]
    # On 9 rows a dense gradient is cheaper, so insist as `is_sparse=True` does.
    tables = kind == "SELECTED_ROWS" or None
    (desc,) = sj.desc.infer(loss, weights, batches[0], tables=tables).gradients
    assert (desc.name, desc.type, list(desc.dims)) == ("emb_w@GRAD", kind, dims)
    np.testing.assert_allclose(loss(weights, batches[0]), want["losses"][0], rtol=2e-6)
    if name != "static_adagrad_sparse":
        return
    # The step at the top of the page is the three calls that it names.
    hyper = {"epsilon": 1e-6, "initial_accumulator_value": 0.0}
    tx = run("optimizer.Adagrad", learning_rate=0.1, **hyper)
    state = tx.init(weights)
    step = jax.jit(functools.partial(PAGE.blocks["train_step"], loss, tx))
    for ids, value in zip(batches, want["losses"], strict=True):
        weights, state, got = step(weights, state, ids)
        np.testing.assert_allclose(got, value, rtol=2e-6)
    np.testing.assert_allclose(weights, want["weight_after_3"], rtol=1e-5, atol=2e-6)


def test_a_row_without_code_says_why():
    assert all(len(notes[0]) > 10 for _, code, *notes in PAGE.rows if code == "—")


test_line, _, test_nothing_is_left_out = PAGE.tests(globals())
