"""paddle.md: its code, checked against the answers of PaddlePaddle.

The page's code blocks are executed, and each cell of its tables is evaluated with the
inputs and arguments by name. `golden/paddle.json` and `.npz` hold the answers of
PaddlePaddle (the header of the former names their source), and `golden/optim.json` the
steps of its optimizers. Other cells have an example, here or in `paddle.txt`, with
NumPy or by hand; those of operators on sequences are from Paddle's documentation.
"""

# optax's types know trees of arrays only.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportIndexIssue=false, reportOperatorIssue=false

import functools
import pathlib
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
    Recorded,
    assert_same_kind,
    dense,
    page_ran,  # noqa: F401  (a fixture)
    raises,  # noqa: F401  (in paddle.txt)
)
from sparsejax import _compat


# The page is a reader's session, and optax itself relies on implicit promotion.
pytestmark = [pytest.mark.usefixtures("loose_promotion"), pytest.mark.slow]

PAGE = Recorded("paddle")
ROWS, CELLS = PAGE.rows, PAGE.cells
CASES = {case["name"]: case for case in PAGE.cases}
run, as_ours, assert_answers = PAGE.run, PAGE.as_ours, assert_same_kind
differs = PAGE.checks
WITHOUT_CODE = {cells[0].strip("`") for cells in ROWS if cells[1] == "—"}
_OPTIM = Golden("optim")
OPTIM = {c["name"]: c for c in _OPTIM.cases if c["system"] == "paddle"}
NO_KERNEL = {
    n for n, c in CASES.items() if c.get("error", {}).get("type") == "UNSUPPORTED"
}


# ------------------------------------------------------------------ recorded cases


def get(name, what) -> dict[str, Any]:
    return PAGE.get(CASES[name], what)


def both(name):
    return get(name, "inputs"), get(name, "outputs")


def filled_rows(x):
    """The rows that are there, in their order."""
    return [row for row in np.asarray(x.rows).tolist() if 0 <= row < x.height]


# ------------------------------------------------------------------ a line each


def slots():
    """A SelectedRows with a duplicate, an empty slot, and rows in no order."""
    rows, values = [4, 1, 6, 4], [[1.0, -2.0], [3.0, 4.0], [9.0, 9.0], [0.5, 0.25]]
    return sj.SelectedRows(jnp.array(rows), jnp.array(values), 6)


DATA = [1.0, 3.0, 2.0, 4.0, 6.0, 5.0, 1.0]
TWO_LEVELS = [2, 0, 3], [1, 2, 1, 0, 3]
GRID = np.arange(12.0, dtype=np.float32).reshape(6, 2)
IDS = sj.SegmentTensor.from_lengths(jnp.array([3, 1, 5]), [1, 0, 2])
WEIGHTS = np.linspace(-1.0, 1.0, 27, dtype=np.float32).reshape(9, 3)
SPEC = jax.ShapeDtypeStruct((4, 2), jnp.float32)
W = sj.desc.describe(SPEC, ["w"])[0]


def square_sum(w):
    return jnp.sum(w**2)


def sgd_of_rows(p, g, lr):
    p = p - lr[0] * g
    return p.coalesce() if isinstance(p, sj.SelectedRows) else p


def read_ones(ids, **how):
    """The gradient of a sum of rows of a table of 9."""
    loss = lambda w: jnp.sum(sj.lookup(w, np.asarray(ids), **how))
    return jax.jit(sj.grad(loss, tables=True))(np.ones((9, 3), np.float32))


def all_rows():
    values = jnp.cos(jnp.arange(27.0)).reshape(9, 3)
    return sj.SelectedRows(jnp.arange(9)[::-1], values, 9)


def stepped(tx, g, rule):
    """Whether a step of `tx` is `rule(w, g)`."""
    (got,) = train(tx, WEIGHTS, [g])
    return np.allclose(got, rule(WEIGHTS, dense(g)), 1e-5, 1e-6)


def lod(data, *lengths):
    return run(
        "fluid.create_lod_tensor", data=jnp.array(data), recursive_seq_lens=lengths
    )


def room(data, lengths):
    """With room for more elements, as inside jit."""
    return sj.SegmentTensor.from_lengths(jnp.array(data), lengths, capacity=9)


@pytest.mark.parametrize("line", PAGE.examples, ids=lambda line: line[0])
def test_line(line):
    PAGE.check_example(line, globals())


# ------------------------------------------------------------------ embedding

EMBEDDINGS = {
    "embedding_float64": "nn.functional.embedding",
    "embedding_padding_idx": "nn.functional.embedding(padding_idx)",
    "embedding_padding_idx_negative": "nn.functional.embedding(padding_idx)",
}


@pytest.mark.parametrize("name", EMBEDDINGS)
def test_recorded_embedding(name):
    padding_idx = CASES[name]["params"]["padding_idx"]
    with _compat.enable_x64(name == "embedding_float64"):
        inputs, want = both(name)
        names = {"x": inputs["ids"], "padding_idx": padding_idx}
        f = lambda w: run(EMBEDDINGS[name], weight=w, **names)
        loss = lambda w: jnp.sum(f(w) * inputs["out_grad"])
        assert_answers(f(inputs["weight"]), want["y"])
        grad = jax.jit(run("is_sparse=True", loss=loss))(inputs["weight"])[1]
        other = jax.jit(run("is_sparse=False", loss=loss))(inputs["weight"])[1]
    assert grad.dtype == want["weight_grad"].dtype
    wanted = want["weight_grad"]
    if padding_idx is not None:  # the first of the differences
        trained = np.asarray(inputs["ids"] != padding_idx % 9)[:, None]
        wanted = wanted.map(lambda v: jnp.asarray(np.asarray(v) * trained))
        assert filled_rows(grad) != filled_rows(wanted)
    else:
        assert filled_rows(grad) == filled_rows(wanted)
    assert_answers(grad, wanted)
    assert_answers(other, dense(wanted))


@pytest.mark.parametrize("key", ["lookup_table", "fluid.layers.embedding"])
def test_recorded_lookup_table(key):
    (inputs, want) = both("lookup_table_dense_w")
    ids = np.asarray(inputs["ids"])

    @jax.jit
    def all_ways(w):
        rows = sj.SelectedRows.from_dense(w, capacity=len(w))
        return (
            run(key, w=w, weight=w, x=ids, ids=ids),
            run("lookup_table_v2", w=w, ids=ids[:, 0]),
            run("lookup_table(SelectedRows)", w=rows, ids=ids),
        )

    for got in all_ways(inputs["w"]):
        assert_answers(got, want["out"])


def test_recorded_gradients_of_two():
    """Two lookups of one function, and the gradients of two functions."""
    first, second = CASES["embedding_used_twice"]["params"]["ids"]
    read = lambda w, ids, by: by * jnp.sum(sj.lookup(w, np.array(ids)))
    for name, key in (
        ("embedding_used_twice", "two lookups"),
        ("embedding_grad_accumulate_two_backward", "two backwards"),
    ):
        inputs, want = both(name)
        losses = [lambda w: read(w, first, 1.0), lambda w: read(w, second, 3.0)]
        both_reads = lambda w, f=losses: f[0](w) + f[1](w)

        @jax.jit
        def gradients(w, key=key, losses=(*losses, both_reads)):
            grad, more, whole = (sj.grad(f, tables=True)(w) for f in losses)
            return run(key, grad=grad, more=more), whole

        got, whole = gradients(inputs["weight"])
        assert_answers(got, want["weight_grad"])
        assert filled_rows(got) == filled_rows(want["weight_grad"])
        assert_answers(whole, want["weight_grad"])


def test_recorded_gradient_of_a_tensor():
    inputs, want = both("tensor_gradient_method")
    ids = jnp.array(CASES["tensor_gradient_method"]["params"]["ids"])
    loss = lambda w: jnp.sum(sj.lookup(w, ids))
    grad = jax.jit(sj.grad(loss, tables=True))(inputs["weight"])
    value, rows = run("Tensor.gradient", grad=grad)
    assert_answers(value, want["value"])
    assert_answers(rows, want["rows"])
    assert run("Tensor.is_selected_rows", grad=grad)
    assert run("Tensor.get_selected_rows", grad=grad) is grad
    assert as_ours(CASES["clear_gradient_sparse"]["outputs"]["state"]) == "none"
    assert "Tensor.clear_gradient" in WITHOUT_CODE


def test_layers():
    sizes = {"num_embeddings": 9, "embedding_dim": 3, "padding_idx": -1}
    ids = jnp.array([[3, 8], [1, 3]])
    made = {
        key: run(key, **sizes)
        for key in (
            "nn.Embedding(sparse=True)",
            "nn.Embedding(sparse=False)",
            "nn.Embedding(padding_idx)",
        )
    }
    for key, layer in made.items():
        params = run("Layer.state_dict", layer=layer, key=jax.random.key(0))
        loss = lambda p, layer=layer: (jnp.sum(layer(p, ids)), layer(p, ids))
        grad = sj.grad(loss, has_aux=True, tables=sj.nn.tables(layer))
        grads, out = jax.jit(grad)(params)
        table = np.asarray(params["embedding"])
        last = table[8] * ("padding" not in key)
        assert_answers(out[0], np.stack([table[3], last]))
        sparse = isinstance(grads["embedding"], sj.SelectedRows)
        assert sparse == ("sparse=False" not in key)
    state = get("state_dict_sparse_embedding", "outputs")
    ours = made["nn.Embedding(sparse=True)"].init(jax.random.key(0))
    assert state["keys"] == ["weight"] and list(ours) == ["embedding"]
    assert ours["embedding"].shape == state["weight"].shape


def test_losses_over_classes():
    """Sampled and hierarchical losses read rows of the weights sparsely."""
    rng = np.random.default_rng(0)
    x, weight = (rng.normal(size=(n, 4)).astype(np.float32) for n in (3, 9))
    paths = np.array([[0, 2, -1], [0, 1, 5], [0, 2, 6]])
    samples = np.array([[0, 2, 8], [0, 1, 5], [0, 2, 6]])
    for key, names in (
        ("hsigmoid_loss(is_sparse=True)", {"path_table": paths}),
        ("nce(is_sparse=True)", {"samples": samples}),
    ):
        f = lambda w, key=key, names=names: run(key, input=x, weight=w, **names)
        (ids,) = names.values()
        want = (x[:, None] * weight[ids]).sum(-1) * (ids >= 0)
        loss = lambda w, f=f: jnp.sum(f(w) ** 2)
        both = lambda w, f=f, loss=loss: (
            f(w), sj.grad(loss, tables=True)(w), jax.grad(loss)(w)
        )  # fmt: skip
        got, grad, other = jax.jit(both)(weight)
        assert_answers(got, want)
        assert isinstance(grad, sj.SelectedRows)
        assert_answers(dense(grad), other)
    assert "hsigmoid_loss_is_sparse_True" in NO_KERNEL


@pytest.mark.usefixtures("eight_devices")
def test_distributed():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    weight, ids = jnp.arange(32.0).reshape(16, 2), jnp.array([3, 9, 3, 0, 15, 1, 2, 9])
    names = {"mesh": mesh, "axis": "x", "x": ids}
    assert_answers(run("is_distributed=True", weight=weight, **names), weight[ids])
    assert run("DataParallel(sparse=True)") is sj.parallel.data_parallel
    rows = sj.SelectedRows(ids, jnp.ones((8, 2)), 16)
    reduce = lambda grads: run("allreduce(SelectedRows)", grads=grads, axis_name="x")
    spec = jax.P("x"), jax.P()
    reduce = jax.shard_map(
        reduce, mesh=mesh, in_specs=spec[0], out_specs=spec[1], check_vma=False
    )
    got = jax.jit(reduce)(rows)
    assert_answers(got, rows)


# ------------------------------------------------------------------ optimizers


class Run(NamedTuple):
    """Steps of an optimizer as they were recorded."""

    op: str
    hyper: dict[str, Any]
    weights0: Any
    gradients: list[Any]  # SelectedRows, or arrays
    weights: Any  # after each step
    taken: int = 0  # steps before the first
    states: dict[str, Any] = {}  # their initial values


STATES = {"v": "trace", "m1": "mu", "m2": "nu", "m": "sum_of_squares"}
STATES |= {"sq": "n", "lin": "z"}
RMS_STATES = {"mom": "trace", "ms": "nu", "mg": "mu"}
NAMES = {
    "mu": "momentum",
    "lr": "learning_rate",
    "regularization_coeff": "weight_decay",
}
DEFAULTS = {"epsilon": 1e-8, "beta1": 0.9, "beta2": 0.999, "use_nesterov": False}
DEFAULTS |= {"initial_accumulator_value": 0.0, "centered": False, "momentum": 0.0}
DEFAULTS |= {"rho": 0.95, "weight_decay": 0.0}
EPSILONS = {"rmsprop": 1e-6, "adagrad": 1e-6}


def hyper_of(op, hyper):
    """Hyper-parameters by the names of `paddle.optimizer`."""
    found = {NAMES.get(name, name): value for name, value in hyper.items()}
    if op == "rmsprop" and "decay" in found:
        found["rho"] = found["decay"]
    decay = found.get("weight_decay", 0.0)
    found["weight_decay"] = float(str(decay).split("=")[-1])
    if op == "lamb":
        found["lamb_weight_decay"] = found["weight_decay"]
    if clip := found.get("grad_clip"):
        numbers = [float(x) for x in re.findall(r"=\s*(-?[\d.]+)", clip)]
        found |= dict(
            zip(["min", "max"] if len(numbers) == 2 else ["clip_norm"], numbers)
        )
    return DEFAULTS | {"epsilon": EPSILONS.get(op, 1e-8)} | found


@functools.cache
def recorded_run(name) -> Run:
    gradient = lambda rows, values, height: sj.SelectedRows(
        np.asarray(rows), np.asarray(values), height
    )
    if name in OPTIM:
        case = OPTIM[name]
        data = {k: _OPTIM.arrays[key] for k, key in case["arrays"].items()}
        op, hyper, height = case["op"].lower(), case["hyper"], len(data["weights0"])
        states = {k: data[f"{k}0"] for k in STATES if f"{k}0" in data}
        steps = zip(data["rows"], data["grads"])
        weights0, weights = data["weights0"], data["weights"]
        gradients = [gradient(*step, height) for step in steps]
        power = hyper.get("b1_pow")
    else:
        case, (inputs, outputs) = CASES[name], both(name)
        op = case["op"].split(".")[-1].lower()
        if name.startswith("opt_"):
            params = case["params"]
            hyper = params["hyper"] | {
                k: v for k, v in params.items() if k in ("grad_clip", "weight_decay")
            }
            weights0, states, power = inputs["weight"], {}, None
            steps = [(inputs[f"ids{t}"], inputs[f"out_grad{t}"]) for t in range(5)]
            gradients = [gradient(*step, 9) for step in steps]
            weights = outputs["weights_per_step"]
        else:
            hyper = case["params"] | {"learning_rate": float(inputs["lr"][0])}
            if op == "adamw":
                hyper["weight_decay"] = hyper["coeff"]
            weights0, gradients, weights = (
                inputs["p"],
                [inputs["g"]],
                outputs["p"][None],
            )
            names = RMS_STATES if op == "rmsprop" else STATES
            states = {k: inputs[k] for k in names if k in inputs}
            power = float(inputs["b1"][0]) if "b1" in inputs else None
    count = 0
    if power is not None:  # operators are handed beta1 ** t
        count = round(np.log(power) / np.log(hyper["beta1"])) - 1
    elif hyper.get("lazy_mode"):
        count = 1  # the power of the step after: among the differences
    found = hyper_of(op, hyper)
    if not found["centered"]:
        states.pop("mg", None)  # Paddle keeps a mean of gradients that it does not use
    return Run(op, found, weights0, gradients, weights, count, states)


def set_count(state, count):
    def put(path, leaf):
        is_count = getattr(path[-1], "name", None) == "count"
        return jnp.asarray(count, leaf.dtype) if is_count else leaf

    return jax.tree_util.tree_map_with_path(put, state)


def start(tx, run_):
    """The state that the recorded steps started from."""
    state = set_count(jax.jit(tx.init)(jnp.asarray(run_.weights0)), run_.taken)
    names = RMS_STATES if run_.op == "rmsprop" else STATES
    for theirs, value in run_.states.items():
        ours, value = names[theirs], jnp.asarray(value)
        if ours == "trace" and run_.op == "rmsprop":
            value = -value  # optax.rmsprop keeps the step, which has the other sign
        state = optax.tree_utils.tree_set(state, **{ours: value})
    return state


def train(tx, weights, gradients, state=None):
    """The weights after each step, all rows up to date."""
    is_exact = hasattr(tx, "catch_up")

    def step(carry, grad):
        weights, state = carry
        if isinstance(grad, tuple):
            grad = sj.SelectedRows(*grad, len(weights))
        if is_exact:
            rows = grad.rows if isinstance(grad, sj.SelectedRows) else ...
            weights, state = tx.catch_up(weights, state, rows)
        updates, state = tx.update(grad, state, weights)
        weights = optax.apply_updates(weights, updates)
        return (weights, state), tx.flush(weights, state)[0] if is_exact else weights

    @jax.jit
    def run(weights, state, gradients):
        state = tx.init(weights) if state is None else state
        return jax.lax.scan(step, (weights, state), gradients)[1]

    if isinstance(gradients[0], sj.SelectedRows):
        gradients = [(g.rows, g.values) for g in gradients]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *gradients)
    return run(jnp.asarray(weights), state, stacked)


def bare(key, /, **names):
    """The optimizer inside of a cell's `lazy` or `exact`, for dense gradients."""
    code = re.sub(r"^sj\.optim\.(lazy|exact)\((.*)\)$", r"\2", CELLS[key])
    return eval(code, {**PAGE.blocks, **names})


# Which row of the page each run is of.
RUNS = {
    "op_sgd_sr": "optimizer.SGD",
    "op_momentum_sr": "optimizer.Momentum",
    "op_momentum_dense": "optimizer.Momentum",
    "op_momentum_sr_nesterov": "optimizer.Momentum",
    "op_momentum_dense_nesterov": "optimizer.Momentum",
    "op_momentum_sr_nesterov_l2": "optimizer.Momentum(weight_decay)",
    "op_momentum_dense_nesterov_l2": "optimizer.Momentum(weight_decay)",
    "op_adam_sr_lazy_separate_pow_out": "optimizer.Adam(lazy_mode=True)",
    "op_adam_dense": "optimizer.Adam",
    "op_adamw_dense": "optimizer.AdamW",
    "op_adagrad_dense": "optimizer.Adagrad",
    "op_rmsprop_sr": "optimizer.RMSProp",
    "op_rmsprop_sr_centered": "optimizer.RMSProp",
    "op_rmsprop_dense": "optimizer.RMSProp",
    "op_ftrl_dense": "optimizer.Ftrl",
    "op_lamb_sr": "optimizer.Lamb",
    "opt_sgd_dense": "optimizer.SGD",
    "opt_sgd_l2_sparse": "optimizer.SGD(weight_decay)",
    "opt_sgd_clip_global_norm_sparse": "ClipGradByGlobalNorm",
    "opt_sgd_clip_global_norm_dense": "ClipGradByGlobalNorm",
    "opt_sgd_clip_by_norm_sparse": "ClipGradByNorm",
    "opt_sgd_clip_by_norm_dense": "ClipGradByNorm",
    "opt_sgd_clip_by_value_dense": "ClipGradByValue",
    "opt_momentum_dense": "optimizer.Momentum",
    "opt_momentum_nesterov_l2_sparse": "optimizer.Momentum(weight_decay)",
    "opt_momentum_nesterov_l2_dense": "optimizer.Momentum(weight_decay)",
    "opt_adam_lazy_bigeps_sparse": "optimizer.Adam(lazy_mode=True)",
    "opt_adam_dense": "optimizer.Adam",
    "opt_adamw_dense": "optimizer.AdamW",
    "opt_adagrad_sparse": "optimizer.Adagrad",
    "opt_adagrad_dense": "optimizer.Adagrad",
    "opt_adagrad_init_acc_bigeps_sparse": "optimizer.Adagrad",
    "opt_adagrad_init_acc_bigeps_dense": "optimizer.Adagrad",
    "opt_adagrad_l2_sparse": "optimizer.Adagrad(weight_decay)",
    "opt_rmsprop_sparse": "optimizer.RMSProp",
    "opt_rmsprop_centered_momentum_sparse": "optimizer.RMSProp",
    "opt_adamax_dense": "optimizer.Adamax",
}


def gradients_for(cell, gradients):
    """Rows for lazy and exact, else the dense gradient, as on the page."""
    sparse = cell.startswith(("sj.optim.lazy", "sj.optim.exact"))
    return gradients if sparse else [jnp.asarray(dense(g)) for g in gradients]


# Left alone or moved without a gradient, a row stays where it is.
LAZY_IS_EXACT = ("optimizer.SGD", "optimizer.Adagrad", "ClipGrad")


@pytest.mark.parametrize("name", RUNS)
def test_recorded_steps(name):
    key, of = RUNS[name], recorded_run(name)
    weights0 = jnp.asarray(of.weights0)
    tx, gradients = run(key, **of.hyper), gradients_for(CELLS[key], of.gradients)
    if hasattr(tx, "catch_up") and (of.states or name.startswith("op_")):
        # Its book of rows starts where training does; what it is exact to is `tx`.
        tx, gradients = bare(key, **of.hyper), [dense(g) for g in gradients]
    elif "dense" in name and not hasattr(tx, "catch_up"):
        # Otherwise lazy is fed the dense gradient that Paddle had.
        if not key.startswith(LAZY_IS_EXACT):
            gradients = [dense(g) for g in gradients]
    state = None if hasattr(tx, "catch_up") else start(tx, of)
    for t, got in enumerate(train(tx, weights0, gradients, state)):
        np.testing.assert_allclose(got, of.weights[t], rtol=2e-5, atol=2e-6)


def test_four_ways_to_decay():
    """The first is Paddle's; the third and the last are it, without dense gradients."""
    of = recorded_run("opt_sgd_l2_sparse")
    hyper = of.hyper | {"coeff": of.hyper["weight_decay"]}
    weights0, want = jnp.asarray(of.weights0), of.weights
    keys = [key for key in CELLS if key.startswith("regularizer.L2Decay")]
    assert keys == [
        "regularizer.L2Decay",
        "regularizer.L2Decay(rows read)",
        "regularizer.L2Decay(all rows)",
        "regularizer.L2Decay(made up)",
    ]
    for key in (keys[0], keys[2]):
        given = gradients_for(CELLS[key], of.gradients)
        for got, wanted in zip(train(run(key, **hyper), weights0, given), want):
            np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)
    (*_, got) = train(run(keys[1], **hyper), weights0, of.gradients)
    read = np.isin(np.arange(9), np.concatenate([g.rows for g in of.gradients]))
    assert (np.asarray(got)[~read] == np.asarray(weights0)[~read]).all()
    tx = run(keys[3], **hyper)

    @jax.jit
    def flushed_after(weights, gradients):
        state = tx.init(weights)
        for grad in gradients:
            updates, state = tx.update(grad, state, weights)
            weights = optax.apply_updates(weights, updates)
        return sj.optim.flush_weight_decay(weights, state)[0]

    flushed = flushed_after(weights0, of.gradients)
    np.testing.assert_allclose(flushed, want[-1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("key", ["optimizer.Adadelta", "optimizer.Adamax"])
def test_optimizers_without_a_kernel(key):
    """They do the same on rows and on the dense gradient, if all rows have one."""
    weights, rows = jnp.ones((9, 3)), all_rows()
    hyper = DEFAULTS | {"learning_rate": 0.1, "epsilon": 1e-3}
    (got,) = train(run(key, **hyper), weights, [rows])
    (want,) = train(bare(key, **hyper), weights, [jnp.asarray(dense(rows))])
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    assert "op_adamax_sr_unsupported" in NO_KERNEL


def test_around_optimizers():
    weights = jnp.ones((9, 3))
    rows = sj.SelectedRows(jnp.array([4, 1]), jnp.ones((2, 3)), 9)
    tx = run(
        "GradientMergeOptimizer",
        tx=sj.optim.lazy(optax.sgd(1.0)),
        k_steps=2,
        capacity=4,
    )
    *_, got = train(tx, weights, [rows, 3 * rows])
    np.testing.assert_array_equal(got, weights - 2 * dense(rows))
    tx = run("multi_precision=True", tx=sj.optim.lazy(optax.sgd(2.0**-10)))
    *_, got = train(tx, weights.astype(jnp.bfloat16), [rows] * 4)
    assert float(got[4, 0]) == 1 - 2.0**-8 and got.dtype == jnp.bfloat16
    tx = run("amp.GradScaler", tx=sj.optim.lazy(optax.sgd(1.0)), init_loss_scaling=8.0)
    state = tx.init(weights)
    updates, _ = jax.jit(tx.update)(rows * state.scale, state, weights)
    np.testing.assert_array_equal(dense(updates), -dense(rows))


def test_recorded_clip_of_sparse_and_dense():
    name = "clip_global_norm_large_sparse_and_dense"
    inputs, want = both(name)
    ids = jnp.array(CASES[name]["params"]["ids"])

    def loss(params):
        read = sj.lookup(params["table"], ids) * inputs["out_grad"]
        return jnp.sum(read) + jnp.sum(params["w"] ** 2)

    params = {"table": inputs["weight"], "w": inputs["dense_param"]}
    tables = {"table": True, "w": False}
    grads = jax.jit(sj.grad(loss, tables=tables))(params)
    assert_answers(grads["table"], want["g0_before"])
    assert_answers(grads["w"], want["g1_before"])
    norm = float(sj.optim.global_norm(grads))
    merged = np.concatenate([dense(g).ravel() for g in (grads["table"], grads["w"])])
    np.testing.assert_allclose(norm, np.linalg.norm(merged), rtol=1e-6)
    for clip_norm in (1000.0, 0.5):
        tx = run("ClipGradByGlobalNorm", clip_norm=clip_norm, learning_rate=1.0)
        updates, _ = tx.update(grads, tx.init(params), params)
        scale = clip_norm / max(norm, clip_norm)
        assert_answers(dense(-updates["table"]), dense(want["g0_after"]) * scale)
        assert_answers(-updates["w"], want["g1_after"] * scale)
    # Each by its own norm, and all but one of them.
    own = run("ClipGradByNorm", clip_norm=0.5, learning_rate=1.0)
    updates, _ = own.update(grads, own.init(params), params)
    for x in updates.values():
        np.testing.assert_allclose(np.linalg.norm(dense(x)), 0.5, rtol=1e-5)
    need_clip = {"table": False, "w": True}
    names = {"clip_norm": 0.5, "learning_rate": 1.0, "need_clip": need_clip}
    some = run("ParamAttr(need_clip=False)", **names)
    updates, _ = some.update(grads, some.init(params), params)
    assert_answers(dense(-updates["table"]), dense(grads["table"]))
    np.testing.assert_allclose(np.linalg.norm(updates["w"]), 0.5, rtol=1e-5)


# ------------------------------------------------------------------ programs

# Row of the page, its arguments, steps taken before.
STATIC = {
    "static_sgd_sparse_extra_dense_use": ("optimizer.SGD", {}, 0),
    "static_sgd_l2_sparse": ("optimizer.SGD(weight_decay)", {"weight_decay": 0.05}, 0),
    "static_adam_lazy_sparse": ("optimizer.Adam(lazy_mode=True)", {}, 1),
    "static_adagrad_sparse": ("optimizer.Adagrad", {"epsilon": 1e-6}, 0),
    "static_sgd_clip_by_norm_sparse": ("ClipGradByNorm", {"clip_norm": 0.7}, 0),
}


def program_of(name):
    """Its loss, and its inputs and outputs."""
    uses_whole = CASES[name]["params"]["extra_dense_use"]

    def loss(emb_w, ids):
        found = jnp.sum(sj.lookup(emb_w, ids) ** 2)
        return found + jnp.sum(emb_w) if uses_whole else found

    ids = [jnp.array(ids) for ids in CASES[name]["params"]["ids"]]
    return loss, ids, *both(name)


@pytest.mark.parametrize("name", STATIC)
def test_recorded_programs(name):
    """Whole training loops: losses, weights, and the kinds of the gradients."""
    (loss, batches, inputs, want), (key, more, count) = program_of(name), STATIC[name]
    tx = run(key, **DEFAULTS | {"learning_rate": 0.1} | more)
    weights = inputs["weight"]
    state = set_count(jax.jit(tx.init)(weights), count)
    sparse = want["gradients"]["emb_w@GRAD"][0] == "SELECTED_ROWS"
    tables = True if sparse else None

    @jax.jit
    def step(weights, state, ids):
        if hasattr(tx, "catch_up"):
            weights, state = tx.catch_up(weights, state, ids)
        value, grad = sj.value_and_grad(loss, tables=tables)(weights, ids)
        assert isinstance(grad, sj.SelectedRows) == sparse
        updates, state = tx.update(grad, state, weights)
        return optax.apply_updates(weights, updates), state, value

    for t, ids in enumerate(batches):
        weights, state, value = step(weights, state, ids)
        np.testing.assert_allclose(value, want["losses"][t], rtol=2e-6)
    if hasattr(tx, "catch_up"):
        weights, state = jax.jit(tx.flush)(weights, state)
    np.testing.assert_allclose(weights, want["weight_after_3"], rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("name", STATIC)
def test_recorded_kinds(name):
    """The kind of W@GRAD by Paddle's type inference, before any data."""
    loss, (ids, *_), inputs, want = program_of(name)
    kind, dims = want["gradients"]["emb_w@GRAD"]
    # On 9 rows a dense gradient is cheaper, so insist as `is_sparse=True` does.
    names = {"specs": [inputs["weight"], ids], "fun": loss}
    found = run("InferVarType", **names)
    if kind == "SELECTED_ROWS":
        found = sj.desc.infer(loss, *names["specs"], tables=True)
    (desc,) = found.gradients
    assert (desc.name, desc.type, list(desc.dims)) == ("emb_w@GRAD", kind, dims)


def test_train_step():
    """The step at the top of the page is the three calls that it names."""
    loss, (ids, *_), inputs, want = program_of("static_adagrad_sparse")
    tx = run("optimizer.Adagrad", **DEFAULTS | {"learning_rate": 0.1, "epsilon": 1e-6})
    weights = inputs["weight"]
    step = PAGE.blocks["train_step"]
    _, _, value = step(loss, tx, weights, tx.init(weights), ids)
    np.testing.assert_allclose(value, want["losses"][0], rtol=1e-6)


# ------------------------------------------------------------------ descriptions


def test_recorded_files(tmp_path):
    want = get("paddle_save_selected_rows_binary", "outputs")
    path, x = tmp_path / "rows.npz", slots()
    run("paddle.save(SelectedRows)", path=path, x=x)
    found = run("paddle.load(SelectedRows)", path=path)
    assert type(found).__name__ == want["type"] and found.shape == x.shape
    np.testing.assert_array_equal(found.rows, x.rows)
    np.testing.assert_array_equal(found.values, x.values)


# ------------------------------------------------------------------ servers and data


def test_store(tmp_path):
    store = run("fleet.init_server")
    start = jax.nn.initializers.ones
    names = {"store": store, "name": "w"}
    run(
        "MemorySparseTable",
        height=10**7,
        dim=2,
        tx=optax.sgd(0.5),
        initializer=start,
        **names,
    )
    ids = jnp.array([7, 10**6, 7])
    rows = run("distributed_lookup_table", ids=ids, **names)
    exact = run("lookup_sparse_table_read", ids=ids, **names)
    assert exact.capacity == 2 <= rows.capacity and rows.height == 10**7
    grad = sj.SelectedRows(ids, jnp.ones((3, 2)), 10**7)
    run("send", grad=grad, **names)
    assert exact.values.tolist() == [[1, 1]] * 2
    read = lambda: run("lookup_sparse_table_read", ids=ids, **names).values.tolist()
    assert read() == [[0, 0], [0.5, 0.5]]
    run("fleet.save_persistables", store=store, path=tmp_path / "w")
    for _, pulled in run(
        "prefetch", store=store, batches=[ids, ids], ids_of=lambda x: x
    ):
        store.push("w", pulled.map(jnp.ones_like))
    assert read() == [[-1, -1], [-0.5, -0.5]]
    run("fleet.load_model", store=store, path=tmp_path / "w")
    assert read() == [[0, 0], [0.5, 0.5]]
    layer = run("static.nn.sparse_embedding", num_embeddings=9, embedding_dim=2)
    assert next(iter(layer.tables().values())).shape == (9, 2)
    mesh = jax.make_mesh((1,), ("x",), devices=jax.devices()[:1])
    spread = run("fleet.init_worker", mesh=mesh)
    spread.init("w", (9, 2), optax.sgd(1.0))
    assert spread.pull("w", jnp.array([3])).height == 9
    for key in ("fleet.shrink", "DistributedStrategy(a_sync=True)", "ProbabilityEntry"):
        assert key in WITHOUT_CODE


# ------------------------------------------------------------------ differences


def test_every_difference_is_checked():
    assert {*PAGE.checked} >= {*PAGE.differences}


def paddle_adam(of, t_of, eps_of):
    """Adam over all rows in float64, with Paddle's two peculiarities left open."""
    b1, b2, lr, eps = (
        of.hyper[k] for k in ("beta1", "beta2", "learning_rate", "epsilon")
    )
    w = np.asarray(of.weights0, np.float64)
    m, v = np.zeros_like(w), np.zeros_like(w)
    for t, rows in enumerate(of.gradients):
        g = dense(rows).astype(np.float64)
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
        c1, c2 = 1 - b1 ** t_of(t), np.sqrt(1 - b2 ** t_of(t))
        read = np.isin(np.arange(len(w)), rows.rows)[:, None]
        w = w - lr * c2 / c1 * m / (np.sqrt(v) + eps_of(eps, c2, read))
        yield w


@differs("Adam on SelectedRows, bias correction")
def _():
    name = "opt_adam_lazy_bigeps_sparse"
    of, tx = recorded_run(name), run(RUNS[name], **recorded_run(name).hyper)
    first = [
        train(tx, of.weights0, of.gradients, set_count(tx.init(of.weights0), n))[0]
        for n in (0, 1)
    ]
    np.testing.assert_allclose(first[1], of.weights[0], rtol=2e-5, atol=2e-6)
    assert np.abs(first[0] - of.weights[0]).max() > 0.01
    # Whole programs and the one that is not lazy do the same.
    loss, batches, inputs, want = program_of("static_adam_sparse")
    grad = jax.jit(sj.grad(loss, tables=True))(inputs["weight"], batches[0])
    hyper = DEFAULTS | {"learning_rate": 0.1}
    steps = Run("adam", hyper, inputs["weight"], [grad], None)
    (w,) = paddle_adam(steps, lambda t: t + 2, lambda eps, c2, read: eps * c2)
    np.testing.assert_allclose(
        np.sum(w[np.asarray(batches[1])] ** 2), want["losses"][1], rtol=1e-5
    )
    # If its outputs are other variables than its inputs, the power is the step's.
    assert recorded_run("op_adam_sr_lazy_separate_pow_out").taken == 2


@differs("Adam, `lazy_mode=False`, rows without gradient")
def _():
    of = recorded_run("opt_adam_bigeps_sparse")
    there = lambda eps, c2, read: np.where(read, eps * c2, eps)
    for t, got in enumerate(paddle_adam(of, lambda t: t + 2, there)):
        np.testing.assert_allclose(got, of.weights[t], rtol=1e-5, atol=1e-6)
    # Ours is the formula of Paddle's kernel for dense gradients.
    one = paddle_adam(of, lambda t: t + 1, lambda eps, c2, read: eps * c2)
    tx = run("optimizer.Adam", **of.hyper)
    for t, (got, want) in enumerate(zip(train(tx, of.weights0, of.gradients), one)):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
        assert np.abs(want - of.weights[t]).max() > 0.01


@differs("momentum and RMSProp, a gradient without duplicates")
def _():
    missed = [n for n, case in OPTIM.items() if "misses rows" in case.get("note", "")]
    assert len(missed) == 3 and all(
        RUNS[n].split("(")[0] in ("optimizer.Momentum", "optimizer.RMSProp")
        for n in missed
    )
    # The fifth step of one of them: of rows [7, 0, 2, 5] the bisection misses 7.
    inputs, want = both("opt_rmsprop_sparse")
    ids = inputs["ids4"]
    assert ids.tolist() == [7, 0, 2, 5]
    assert [
        k for k, row in enumerate(ids.tolist()) if bisect(ids.tolist(), row) < 0
    ] == [0]
    of = recorded_run("opt_rmsprop_sparse")
    last = sj.SelectedRows(ids, inputs["out_grad4"], 9)
    found = sj.SelectedRows(ids[1:], inputs["out_grad4"][1:], 9)
    key = "optimizer.RMSProp"
    for grad, missed in ((found, False), (last, True)):
        gradients = [jnp.asarray(dense(g)) for g in (*of.gradients, grad)]
        *_, got = train(bare(key, **of.hyper), of.weights0, gradients)
        off = np.abs(got - want["weights_per_step"][4]).max(axis=1) > 1e-5
        assert np.flatnonzero(off).tolist() == ([7] if missed else [])
    # Ours gives the same on unmerged rows and on the dense gradient.
    *_, ours = train(run(key, **of.hyper), of.weights0, [*of.gradients, last])
    np.testing.assert_allclose(ours, got, rtol=1e-5, atol=1e-6)


def bisect(rows, wanted):
    """The place where a bisection finds a row, or -1."""
    first, last = 0, len(rows) - 1
    while first <= last:
        middle = (first + last) // 2
        if rows[middle] == wanted:
            return middle
        smaller = rows[middle] < wanted
        first, last = (middle + 1, last) if smaller else (first, middle - 1)
    return -1


@pytest.mark.parametrize("check", PAGE.by_hand, ids=lambda f: f.__doc__)
def test_differs(check):
    check()


# ------------------------------------------------------------------ nothing forgotten


def test_nothing_is_forgotten():
    """Each cell is named by a test, and so is each recorded case."""
    text = pathlib.Path(__file__).read_text()
    run_here = {*PAGE.checked}
    run_here |= {key for key in [*CELLS, *WITHOUT_CODE] if f'"{key}"' in text}
    without_tests = {*CELLS} - run_here
    assert not without_tests
    text += str(PAGE.examples) + '"op_ftrl_dense_lr_power"'  # we have no lr_power
    assert not [x for x in CASES if f'"{x}"' not in text and f"@{x}'" not in text]
    assert set(OPTIM) <= set(RUNS) and len({cells[0] for cells in ROWS}) == len(ROWS)
    for name, code, *notes in ROWS:
        assert code.startswith("`") or (code == "—" and len(notes[0]) > 10), name
