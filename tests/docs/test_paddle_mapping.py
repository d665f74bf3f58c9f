"""paddle.md: its code, checked against the answers of PaddlePaddle.

`golden/paddle.json` and `.npz` hold the answers of PaddlePaddle (the header of the
former names their source), and `golden/optim.json` the steps of its optimizers. The
rows are in `paddle.txt`; those of sequences are from Paddle's documentation.
"""

# optax's types know trees of arrays only.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportIndexIssue=false, reportOperatorIssue=false

import re
from typing import Any, NamedTuple

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


class Steps(NamedTuple):
    """Recorded steps; `states` are those of the optimizer at the start."""

    start: Any
    gradients: list[Any]
    weights: Any
    states: dict[str, Any]


def recorded_steps(name):
    steps = {c["name"]: c for c in OPTIM.cases if c["system"] == "paddle"}
    if name in steps:
        data = {k: OPTIM.arrays[key] for k, key in steps[name]["arrays"].items()}
        states = {k: data[f"{k}0"] for k in STATES if f"{k}0" in data}
        start, grads = data["weights0"], zip(data["rows"], data["grads"])
        weights = data["weights"]
    else:
        given, found = inputs(name), outputs(name)
        if name.startswith("op_"):
            states = {k: x for k, x in given.items() if k in STATES}
            return Steps(given["p"], [given["g"]], found["p"][None], states)
        start, states, weights = given["weight"], {}, found["weights_per_step"]
        grads = [(given[f"ids{t}"], given[f"out_grad{t}"]) for t in range(5)]
    gradients = [sj.SelectedRows(*grad, len(start)) for grad in grads]
    return Steps(start, gradients, weights, states)


STATES = {"v": "trace", "m1": "mu", "m2": "nu", "m": "sum_of_squares"}
STATES |= {"sq": "n", "lin": "z", "mom": "trace", "ms": "nu", "mg": "mu"}


def start_of(tx, weights, states, count):
    """The state of `tx` after `count` steps, with Paddle's moments."""

    def put(path, leaf):
        is_count = getattr(path[-1], "name", None) == "count"
        return jnp.asarray(count, leaf.dtype) if is_count else leaf

    state = jax.tree_util.tree_map_with_path(put, jax.jit(tx.init)(weights))
    for theirs, value in states.items():
        value = jnp.asarray(value)
        if theirs == "mom":  # optax.rmsprop keeps the step, which has the other sign
            value = -value
        state = optax.tree_utils.tree_set(state, **{STATES[theirs]: value})
    return state


def steps_of(tx, name, count=0, gradients=None):
    """The weights of `tx` after each step of a case, from its state."""
    weights, rows, _, states = recorded_steps(name)
    if "mg" in states and "centered" not in name:
        del states["mg"]  # Paddle keeps a mean of gradients that it does not use
    is_exact = hasattr(tx, "catch_up")  # its book of rows starts where training does
    state = None if is_exact else start_of(tx, jnp.asarray(weights), states, count)
    return train(tx, weights, gradients or rows, state)


def steps_are(tx, name, count=0, gradients=None):
    got = steps_of(tx, name, count, gradients)
    return same(got, recorded_steps(name).weights, rtol=2e-5, atol=2e-6)


def bare(key, names):
    """The optimizer inside of a cell's `lazy` or `exact`, for dense gradients."""
    code = re.sub(r"^sj\.optim\.(lazy|exact)\((.*)\)$", r"\2", PAGE.cells[key])
    return eval(code, {**PAGE.blocks, **names})


def dense_steps_are(key, names, name, count=0):
    gradients = [jnp.asarray(dense(g)) for g in recorded_steps(name).gradients]
    return steps_are(bare(key, names), name, count, gradients)


def flushed(tx, name):
    """The weights at the end, with the decay of missed steps."""
    weights, rows, *_ = recorded_steps(name)

    @jax.jit
    def trained(weights, rows):
        state = tx.init(weights)
        for grad in rows:
            updates, state = tx.update(grad, state, weights)
            weights = optax.apply_updates(weights, updates)
        return sj.optim.flush_weight_decay(weights, state)[0]

    return trained(jnp.asarray(weights), rows)


def unread(name):
    """The rows that no step of a case reads."""
    weights, rows, *_ = recorded_steps(name)
    return np.setdiff1d(np.arange(len(weights)), np.concatenate([g.rows for g in rows]))


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
        assert same(f(weight), want["y"])
        grad = jax.jit(run("is_sparse=True", loss=loss))(weight)[1]
        other = jax.jit(run("is_sparse=False", loss=loss))(weight)[1]
    wanted = want["weight_grad"]
    assert grad.dtype == wanted.dtype
    if padded:  # the first of the differences
        trained = np.asarray(ids != padded["padding_idx"] % 9)[:, None]
        wanted = wanted.map(lambda v: jnp.asarray(np.asarray(v) * trained))
    assert (filled_rows(grad) == filled_rows(wanted)) != bool(padded)
    assert same(grad, wanted) and same(other, dense(wanted))


def test_recorded_clip_of_sparse_and_dense():
    name = "clip_global_norm_large_sparse_and_dense"
    want, (weight, out_grad, w) = outputs(name), inputs(name).values()
    ids, params = (
        jnp.array(PAGE.named(name)["params"]["ids"]),
        {"table": weight, "w": w},
    )
    read = lambda p: jnp.sum(sj.lookup(p["table"], ids) * out_grad)
    grad = sj.grad(
        lambda p: read(p) + jnp.sum(p["w"] ** 2), tables={"table": True, "w": False}
    )
    grads = jax.jit(grad)(params)
    assert same(grads["table"], want["g0_before"]) and same(
        grads["w"], want["g1_before"]
    )
    norm = np.linalg.norm(np.append(dense(grads["table"]), grads["w"]))

    def clipped(key, clip_norm, **more):
        tx = run(key, clip_norm=clip_norm, learning_rate=1.0, **more)
        updates, _ = jax.jit(tx.update)(grads, tx.init(params), params)
        return -dense(updates["table"]), -updates["w"]

    for clip_norm in (1000.0, 0.5):
        scale = clip_norm / max(norm, clip_norm)
        table, w = clipped("ClipGradByGlobalNorm", clip_norm)
        assert same(table, dense(want["g0_after"]) * scale)
        assert same(w, want["g1_after"] * scale)
    for x in clipped("ClipGradByNorm", 0.5):  # each by its own norm
        np.testing.assert_allclose(np.linalg.norm(x), 0.5, rtol=1e-5)
    need_clip = {"table": False, "w": True}
    table, w = clipped("ParamAttr(need_clip=False)", 0.5, need_clip=need_clip)
    assert same(table, dense(grads["table"]))
    np.testing.assert_allclose(np.linalg.norm(w), 0.5, rtol=1e-5)


# Row of the page, its arguments, steps taken before.
LR = {"learning_rate": 0.1}
ADAM = {**LR, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8}
ADAGRAD = {**LR, "epsilon": 1e-6, "initial_accumulator_value": 0.0}
PROGRAMS = {
    "static_sgd_sparse_extra_dense_use": ("optimizer.SGD", LR, 0),
    "static_sgd_l2_sparse": (
        "optimizer.SGD(weight_decay)",
        {**LR, "weight_decay": 0.05},
        0,
    ),
    "static_adam_lazy_sparse": ("optimizer.Adam(lazy_mode=True)", ADAM, 1),
    "static_adagrad_sparse": ("optimizer.Adagrad", ADAGRAD, 0),
    "static_sgd_clip_by_norm_sparse": ("ClipGradByNorm", {**LR, "clip_norm": 0.7}, 0),
}


def program_of(name):
    """Its loss, its weights, its batches and its outputs."""
    params = PAGE.named(name)["params"]
    once = lambda emb_w, ids: jnp.sum(sj.lookup(emb_w, ids) ** 2)
    whole = lambda emb_w, ids: once(emb_w, ids) + jnp.sum(emb_w)
    loss = whole if params["extra_dense_use"] else once
    return loss, inputs(name)["weight"], jnp.array(params["ids"]), outputs(name)


@pytest.mark.parametrize("name", PROGRAMS)
def test_recorded_programs(name):
    """Losses, weights, and the kind of W@GRAD by Paddle's type inference."""
    (loss, weights, batches, want), (key, hyper, count) = (
        program_of(name),
        PROGRAMS[name],
    )
    kind, dims = want["gradients"]["emb_w@GRAD"]
    # On 9 rows a dense gradient is cheaper, so insist as `is_sparse=True` does.
    tables = kind == "SELECTED_ROWS" or None
    (desc,) = sj.desc.infer(loss, weights, batches[0], tables=tables).gradients
    assert (desc.name, desc.type, list(desc.dims)) == ("emb_w@GRAD", kind, dims)
    tx = run(key, **hyper)
    state, is_exact = start_of(tx, weights, {}, count), hasattr(tx, "catch_up")

    @jax.jit
    def step(weights, state, ids):
        if is_exact:
            weights, state = tx.catch_up(weights, state, ids)
        value, grad = sj.value_and_grad(loss, tables=tables)(weights, ids)
        updates, state = tx.update(grad, state, weights)
        return optax.apply_updates(weights, updates), state, value

    for ids, value in zip(batches, want["losses"], strict=True):
        weights, state, got = step(weights, state, ids)
        np.testing.assert_allclose(got, value, rtol=2e-6)
    weights = jax.jit(tx.flush)(weights, state)[0] if is_exact else weights
    np.testing.assert_allclose(weights, want["weight_after_3"], rtol=1e-5, atol=2e-6)


def test_train_step():
    """The step at the top of the page is the three calls that it names."""
    loss, weights, (ids, *_), want = program_of("static_adagrad_sparse")
    tx = run("optimizer.Adagrad", **ADAGRAD)
    _, _, value = PAGE.blocks["train_step"](loss, tx, weights, tx.init(weights), ids)
    np.testing.assert_allclose(value, want["losses"][0], rtol=1e-6)


# ------------------------------------------------------------------ differences


def paddle_adam(weights, gradients, hyper, ahead, eps_of):
    """Adam over all rows in float64, with Paddle's two peculiarities left open."""
    lr, b1, b2, eps = hyper.values()
    w = np.asarray(weights, np.float64)
    m, v = np.zeros_like(w), np.zeros_like(w)
    for t, rows in enumerate(gradients, 1 + ahead):
        g = dense(rows).astype(np.float64)
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
        root = np.sqrt(1 - b2**t)
        read = np.isin(np.arange(len(w)), rows.rows)[:, None]
        w = w - lr * root / (1 - b1**t) * m / (np.sqrt(v) + eps_of(eps, root, read))
        yield w


LARGE_EPS = {"learning_rate": 0.1, "beta1": 0.8, "beta2": 0.95, "epsilon": 0.01}


def test_adam_is_a_step_ahead():
    """Difference: Adam on SelectedRows, bias correction."""
    name = "opt_adam_lazy_bigeps_sparse"
    tx = run("optimizer.Adam(lazy_mode=True)", **LARGE_EPS)
    ours, theirs = steps_of(tx, name)[0], recorded_steps(name).weights[0]
    assert steps_are(tx, name, count=1) and np.abs(ours - theirs).max() > 0.01
    # Whole programs and the one that is not lazy do the same.
    loss, weights, batches, want = program_of("static_adam_sparse")
    grad = jax.jit(sj.grad(loss, tables=True))(weights, batches[0])
    (w,) = paddle_adam(weights, [grad], ADAM, 1, lambda eps, root, _: eps * root)
    later = np.sum(w[np.asarray(batches[1])] ** 2)
    np.testing.assert_allclose(later, want["losses"][1], rtol=1e-5)


def test_rows_without_gradient_have_another_eps():
    """Difference: Adam, `lazy_mode=False`, rows without gradient."""
    start, rows, weights, _ = recorded_steps("opt_adam_bigeps_sparse")
    there = lambda eps, root, read: np.where(read, eps * root, eps)
    for got, want in zip(paddle_adam(start, rows, LARGE_EPS, 1, there), weights):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    # Ours is the formula of Paddle's kernel for dense gradients.
    one = paddle_adam(start, rows, LARGE_EPS, 0, lambda eps, root, read: eps * root)
    ours = train(run("optimizer.Adam", **LARGE_EPS), start, rows)
    for got, want, theirs in zip(ours, one, weights, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
        assert np.abs(want - theirs).max() > 0.01


def test_a_bisection_misses_rows():
    """Difference: momentum and RMSProp, a gradient without duplicates.

    The rows [7, 0, 2, 5] of a fifth step are searched by bisection, and 7 is missed.
    """
    noted = [c["name"] for c in OPTIM.cases if "misses rows" in c.get("note", "")]
    assert len(noted) == 3 and all(re.match("opt_(momentum|rmsprop)", x) for x in noted)
    name = "opt_rmsprop_sparse"
    rows, values = inputs(name)["ids4"], inputs(name)["out_grad4"]
    assert rows.tolist() == [7, 0, 2, 5]
    theirs = outputs(name)["weights_per_step"][4]
    weights, gradients, *_ = recorded_steps(name)
    hyper = {**LR, "rho": 0.95, "epsilon": 1e-6, "centered": False, "momentum": 0.0}
    tx = bare("optimizer.RMSProp", hyper)
    for first, missed in ((1, []), (0, [7])):
        last = sj.SelectedRows(rows[first:], values[first:], 9)
        steps = [*gradients, last]
        got = train(tx, weights, [jnp.asarray(dense(g)) for g in steps])[-1]
        off = np.abs(got - theirs).max(axis=1) > 1e-5
        assert np.flatnonzero(off).tolist() == missed
    # Ours gives the same on unmerged rows and on the dense gradient.
    ours = train(run("optimizer.RMSProp", **hyper), weights, steps)[-1]
    np.testing.assert_allclose(ours, got, rtol=1e-5, atol=1e-6)


def test_a_row_without_code_says_why():
    assert {len(notes[0]) > 10 for _, code, *notes in PAGE.rows if code == "—"} == {
        True
    }


test_line, _, test_nothing_is_left_out = PAGE.tests(globals())
