"""paddle.md: its code, checked against the answers of PaddlePaddle.

The page's code blocks are executed, and each cell of its tables is evaluated with the
inputs and arguments by name. `golden/paddle.json` and `.npz` hold the answers of
PaddlePaddle (the header of the former names their source), and `golden/optim.json` the
steps of its optimizers. Operators on sequences have no recorded answers: their examples
are from Paddle's documentation. Other cells have an example here, with NumPy or by
hand.
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
from jax.experimental import checkify

import sparsejax as sj
from recorded import Golden, Recorded, assert_same_kind, dense
from sparsejax import _compat


# The page is a reader's session, and optax itself relies on implicit promotion.
pytestmark = [pytest.mark.usefixtures("loose_promotion"), pytest.mark.slow]

_RECORDED = Recorded("paddle")
ROWS, CELLS, DIFFERENCES = _RECORDED.rows, _RECORDED.cells, _RECORDED.differences
CASES = {case["name"]: case for case in _RECORDED.cases}
run, as_ours, assert_answers = _RECORDED.run, _RECORDED.as_ours, assert_same_kind
differs = _RECORDED.checks
WITHOUT_CODE = {cells[0].strip("`") for cells in ROWS if cells[1] == "—"}
_OPTIM = Golden("optim")
OPTIM = {c["name"]: c for c in _OPTIM.cases if c["system"] == "paddle"}
NO_KERNEL = {
    n for n, c in CASES.items() if c.get("error", {}).get("type") == "UNSUPPORTED"
}


@pytest.fixture(autouse=True, scope="module")
def _page_ran():
    _RECORDED.blocks  # not first inside of a trace


def test_cells_have_code_or_a_reason():
    assert len({cells[0] for cells in ROWS}) == len(ROWS)
    for name, code, *notes in ROWS:
        assert code.startswith("`") or (code == "—" and len(notes[0]) > 10), name


# ------------------------------------------------------------------ recorded cases


def get(name, what) -> dict[str, Any]:
    return _RECORDED.get(CASES[name], what)


def both(name):
    return get(name, "inputs"), get(name, "outputs")


def filled_rows(x):
    """The rows that are there, in their order."""
    return [row for row in np.asarray(x.rows).tolist() if 0 <= row < x.height]


# ------------------------------------------------------------------ SelectedRows

CASE_CELLS = {
    "merge_selected_rows_sorted": "merge_selected_rows",
    "merge_selected_rows_one": "merge_selected_rows",
    "merge_selected_rows_empty": "merge_selected_rows",
    "get_tensor_from_selected_rows_dup": "get_tensor_from_selected_rows",
    "sum_sr_empty": "sum",
    "sum_single_sr": "sum",
    "sum_sr_dense": "sum(dense)",
    "elementwise_mul_sr_scalar": "elementwise_mul",
    "scale_bias_sr": "scale",
    "sqrt_sr": "sqrt",
    "clip_by_norm_sr_below": "clip_by_norm",
    "assign_sr": "assign",
}


@pytest.mark.parametrize("name", CASE_CELLS)
def test_recorded(name):
    inputs, (want,) = get(name, "inputs"), get(name, "outputs").values()
    given = {"inputs": list(inputs.values()), **CASES[name].get("params", {}), **inputs}
    got = run(CASE_CELLS[name], **given)
    if name != "merge_selected_rows_empty":  # Paddle's has lost its columns
        assert_answers(got, want)
    if isinstance(want, sj.SelectedRows):
        assert sorted(filled_rows(got)) == sorted(filled_rows(want))


def slots():
    """A SelectedRows with a duplicate, an empty slot, and rows in no order."""
    rows, values = [4, 1, 6, 4], [[1.0, -2.0], [3.0, 4.0], [9.0, 9.0], [0.5, 0.25]]
    return sj.SelectedRows(jnp.array(rows), jnp.array(values), 6)


def test_the_object():
    x = slots()
    rows, value, height = x.rows, x.values, x.height
    made = run("core.SelectedRows", rows=rows, value=value, height=height)
    assert_answers(made, x)
    assert run("SelectedRows.rows", x=x) is x.rows
    assert run("SelectedRows.get_tensor", x=x) is x.values
    assert run("SelectedRows.height", x=x) == 6
    moved = run("SelectedRows.set_rows", x=x, rows=jnp.array([0, 1, 2, 3]))
    assert moved.to_dense()[2].tolist() == [9, 9]
    assert run("SelectedRows.set_height", x=x, height=8).shape == (8, 2)
    assert run("SelectedRows.numel", x=x) == 8
    assert run("SelectedRows.sync_index", x=x) is x
    ids = jnp.array([1, 0, 4])
    assert run("SelectedRows.Get", x=x, ids=ids).tolist() == [
        [3, 4],
        [0, 0],
        [1.5, -1.75],
    ]
    assert run("SelectedRows.HasKey", x=x, ids=ids).tolist() == [True, False, True]
    assert run("shape", x=x).tolist() == [4, 2] and x.shape == (6, 2)
    assert run("cast", x=x, dtype=jnp.bfloat16).dtype == jnp.bfloat16
    filled = run("fill_constant", shape=[3, 2], value=0.5)
    assert dense(filled).tolist() == [[0.5, 0.5]] * 3


def test_operators_on_rows():
    x, d = slots(), dense(slots())
    y = jnp.arange(12.0).reshape(6, 2)
    assert_answers(run("elementwise_add", x=x, y=y), y + d)
    got = run("scale(bias_after_scale=False)", x=x, scale=2.0, bias=1.0)
    assert_answers(got.values, 2 * (x.values + 1))
    assert_answers(run("square", x=x).values, x.values**2)
    stored = np.isin(np.arange(6), [1, 4])[:, None]
    assert_answers(dense(run("clip", x=x, min=-1.0, max=2.0)), np.clip(d, -1, 2))
    assert_answers(dense(run("clip", x=x, min=1.0, max=2.0)), stored * d.clip(1, 2))
    got = run("clip_by_norm", x=x, max_norm=0.5)
    assert_answers(dense(got), d * 0.5 / np.linalg.norm(d))
    assert_answers(run("squared_l2_norm", x=x), np.sum(d**2))
    for bad, ok in ((jnp.nan, False), (0.0, True)):
        z = x.map(lambda v, bad=bad: v.at[1, 0].set(bad))
        assert run("isfinite", x=z) == ok
        for key, of in (("isfinite_v2", np.isfinite), ("isnan_v2", np.isnan)):
            got = run(key, x=z)
            assert_answers(got.values[:2], of(dense(z)[np.array([1, 4])]))


def test_parts():
    x = slots()
    parts = run("split_selected_rows", x=x, height_sections=[2, 3, 1])
    assert [part.height for part in parts] == [2, 3, 1]
    np.testing.assert_array_equal(np.concatenate([dense(p) for p in parts]), dense(x))
    shards = run("split_ids", ids=jnp.array([5, 2, 7, 4]), num_parts=3)
    assert shards.to_lists()["id"] == [[], [7, 4], [5, 2]]


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
    return eval(code, {**_RECORDED.blocks, **names})


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
        # Of the others, lazy is fed the dense gradient that Paddle had.
        if not key.startswith(LAZY_IS_EXACT):
            gradients = [dense(g) for g in gradients]
    state = None if hasattr(tx, "catch_up") else start(tx, of)
    for t, got in enumerate(train(tx, weights0, gradients, state)):
        np.testing.assert_allclose(got, of.weights[t], rtol=2e-5, atol=2e-6)


def test_every_run_of_the_others_is_here():
    assert set(OPTIM) <= set(RUNS)


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


def all_rows():
    values = jnp.cos(jnp.arange(27.0)).reshape(9, 3)
    return sj.SelectedRows(jnp.arange(9)[::-1], values, 9)


def test_optimizers_by_formula():
    weights, rows = jnp.linspace(-1.0, 1.0, 27).reshape(9, 3), all_rows()
    g = jnp.asarray(dense(rows))
    names = {"learning_rate": 0.1, "decay": 0.9, "epsilon": 0.5}
    (got,) = train(run("optimizer.DecayedAdagrad", **names), weights, [rows])
    want = weights - 0.1 * g / (jnp.sqrt(0.1 * g**2) + 0.5)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    (got,) = train(
        run("regularizer.L1Decay", learning_rate=0.1, coeff=0.5), weights, [g]
    )
    want = weights - 0.1 * (g + 0.5 * jnp.sign(weights))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    names = {"learning_rate": 0.1, "lars_weight_decay": 1e-3, "momentum": 0.9}
    (got,) = train(run("optimizer.LarsMomentum", **names), weights, [g])
    assert np.isfinite(got).all()
    for key in ("optimizer.Ftrl(lr_power)", "optimizer.DpsgdOptimizer"):
        assert key in WITHOUT_CODE
    assert "op_ftrl_dense_lr_power" in CASES


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
    step = _RECORDED.blocks["train_step"]
    _, _, value = step(loss, tx, weights, tx.init(weights), ids)
    np.testing.assert_allclose(value, want["losses"][0], rtol=1e-6)


# ------------------------------------------------------------------ sequences

# The examples of Paddle's documentation.
DATA = [1.0, 3.0, 2.0, 4.0, 6.0, 5.0, 1.0]
POOLED = {
    "average": [2, 4, 3, 0],
    "sum": [4, 12, 6, 0],
    "sqrt": [2.828427, 6.928203, 4.242641, 0],
    "max": [3, 6, 5, 0],
    "last": [3, 6, 1, 0],
    "first": [1, 2, 5, 0],
}
OF_TWO_LEVELS = {
    "sum": [1, 5, 4, 0, 12],
    "first": [1, 3, 4, 0, 6],
    "last": [1, 2, 4, 0, 1],
}


def lod(data, *lengths):
    return run(
        "fluid.create_lod_tensor", data=jnp.array(data), recursive_seq_lens=lengths
    )


@pytest.mark.parametrize("pool_type", POOLED)
def test_sequence_pool(pool_type):
    key, want = f"sequence_pool({pool_type})", np.array(POOLED[pool_type])
    x = lod(DATA, [2, 3, 2, 0])
    assert_answers(run(key, x=x, pad_value=0.0), want)
    columns = x.map(lambda v: jnp.stack([v, 2 * v], axis=1))
    assert_answers(run(key, x=columns, pad_value=0.0)[:, 1], 2 * want)
    assert float(run(key, x=x, pad_value=7.0)[3]) == 7
    at_once = jax.jit(lambda x: run(key, x=x, pad_value=0.0))
    room = sj.SegmentTensor.from_lengths(x.values, x.lengths, capacity=9)
    assert_answers(at_once(room), want)
    if pool_type in OF_TWO_LEVELS:
        got = run(key, x=lod(DATA, [2, 0, 3], [1, 2, 1, 0, 3]), pad_value=0.0)
        assert_answers(got.values, OF_TWO_LEVELS[pool_type])
        assert got.lengths.tolist() == [2, 0, 3]
    for step in ("first", "last"):
        assert_answers(run(f"sequence_{step}_step", x=x), POOLED[step])


def test_lod():
    x = lod(DATA, [2, 0, 3], [1, 2, 1, 0, 3])
    assert run("LoDTensor.lod", x=x).tolist() == [0, 2, 2, 5]
    assert x.values.offsets.tolist() == [0, 1, 3, 4, 4, 7]
    assert run("LoDTensor.recursive_sequence_lengths", x=x).tolist() == [2, 0, 3]
    assert run("lod_level", x=x) == 2
    y = lod(DATA, [3, 4])
    assert run("LoDTensor.has_valid_recursive_sequence_lengths", x=y)
    for got in (
        run("LoDTensor.set_lod", x=y, lod=[[0, 5, 7]]),
        run("lod_reset", x=y, target_lod=[5, 2]),
    ):
        assert got.to_lists() == [DATA[:5], DATA[5:]]
    for key in ("DynamicRNN", "lod_rank_table"):
        assert key in WITHOUT_CODE


def test_sequence_softmax():
    x = lod([0.7, 1, 0.6, 1.5, 1.1, 1.2, 0.2, 0.6, 1.9, 3.1], [3, 2, 4, 1])
    want = [0.30724832, 0.41474187, 0.2780098, 0.59868765, 0.40131235]
    want += [0.2544242, 0.09359743, 0.13963096, 0.5123474, 1.0]
    got = run("sequence_softmax", x=x)
    assert_answers(got.values, want)
    assert_answers(sj.segment_softmax(x), want)
    assert got.lengths.tolist() == [3, 2, 4, 1]


def test_sequences_to_sequences():
    x, y = lod([1, 2, 3, 4, 5], [3, 2]), lod([6, 7, 8, 9], [2, 2])
    got = run("sequence_concat", inputs=[x, y])
    assert got.to_lists() == [[1, 2, 3, 6, 7], [4, 5, 8, 9]]
    cut = {"offset": jnp.array([0, 1]), "length": jnp.array([2, 1])}
    assert run("sequence_slice", x=x, **cut).to_lists() == [[1, 2], [5]]
    assert run("sequence_erase", x=x, tokens=[2, 5]).to_lists() == [[1, 3], [4]]
    assert run("sequence_reverse", x=x).to_lists() == [[3, 2, 1], [5, 4]]
    room = sj.SegmentTensor.from_lengths(x.values, [3, 2], capacity=8)
    for key, names in (
        ("sequence_reverse", {}),
        ("sequence_slice", cut),
        ("sequence_enumerate", {"win_size": 2, "pad_value": 0}),
    ):
        in_jit = jax.jit(lambda x, key=key, names=names: run(key, x=x, **names))
        assert in_jit(room).to_lists() == run(key, x=x, **names).to_lists()
    want = [[1, 2], [2, 3], [3, 0], [4, 5], [5, 0]]
    got = run("sequence_enumerate", x=x, win_size=2, pad_value=0)
    assert got.values.tolist() == want and got.lengths.tolist() == [3, 2]
    two = lod(np.arange(1, 13).reshape(6, 2), [2, 4])
    got = run("sequence_reshape", x=two, new_dim=4)
    assert got.values.tolist() == np.arange(1, 13).reshape(3, 4).tolist()
    assert got.lengths.tolist() == [1, 2]


def test_sequence_conv():
    x = lod(np.repeat(np.arange(1.0, 5)[:, None], 2, 1), [3, 1])
    names = {"padding_start": -1, "filter_size": 3, "filter": jnp.eye(6)}
    want = [
        [0, 0, 1, 1, 2, 2],
        [1, 1, 2, 2, 3, 3],
        [2, 2, 3, 3, 0, 0],
        [0, 0, 4, 4, 0, 0],
    ]
    got = run("sequence_conv", x=x, **names)
    assert got.values.tolist() == want and got.lengths.tolist() == [3, 1]


def test_sequence_expand():
    y = lod(np.arange(8), [2, 2], [3, 3, 1, 1])
    got = run("sequence_expand(LoD x)", x=lod([1, 2, 3, 4], [2, 2]), y=y)
    assert got.to_lists() == [[1, 2], [1, 2], [3, 4], [3, 4]]
    column = jnp.array([[1], [2], [3]])
    got = run("sequence_expand", x=column, y=lod(np.arange(5), [2, 0, 3]))
    assert got.ravel().tolist() == [1, 1, 3, 3, 3]
    four = lod(np.arange(8), [3, 3, 1, 1])
    got = run("sequence_expand_as", x=jnp.array([1, 2, 3, 4]), y=four)
    assert got.to_lists() == [[1, 1, 1], [2, 2, 2], [3], [4]]


def test_sequence_padding():
    x = lod(np.arange(1.0, 11).reshape(5, 2), [2, 3])
    padded, lengths = run("sequence_pad", x=x, pad_value=0.0, maxlen=4)
    assert padded.shape == (2, 4, 2) and lengths.tolist() == [2, 3]
    np.testing.assert_array_equal(padded[0], [[1, 2], [3, 4], [0, 0], [0, 0]])
    assert run("sequence_pad", x=x, pad_value=0.0, maxlen=None)[0].shape == (2, 3, 2)
    got = run("sequence_pad(row)", x=x, pad_value=jnp.array([8.0, 9.0]), maxlen=3)
    assert got[0, 2].tolist() == [8, 9] and got[1, 2].tolist() == [9, 10]
    back = run("sequence_unpad", x=padded, length=lengths)
    np.testing.assert_array_equal(back.values, x.values)
    assert back.lengths.tolist() == [2, 3]
    rows = jnp.arange(1.0, 16).reshape(3, 5)
    got = run("sequence_unpad", x=rows, length=jnp.array([2, 3, 4]))
    assert got.values.tolist() == [1, 2, 6, 7, 8, 11, 12, 13, 14]
    mask = run("sequence_mask", x=jnp.array([3, 1, 1, 0]), maxlen=4, dtype="int32")
    assert mask.tolist() == [[1, 1, 1, 0], [1, 0, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]]


def test_sequence_scatter():
    ids = [0, 1, 2, 5, 4, 3, 2, 1, 3, 2, 5, 4]
    updates = [0.3, 0.3, 0.4, 0.1, 0.2, 0.3, 0.4, 0.0, 0.2, 0.3, 0.1, 0.4]
    lengths = [3, 5, 4]
    names = {"index": lod(ids, lengths), "updates": lod(updates, lengths)}
    want = np.ones((3, 6))
    want += [
        [0.3, 0.3, 0.4, 0, 0, 0],
        [0, 0, 0.4, 0.3, 0.2, 0.1],
        [0, 0, 0.3, 0.2, 0.4, 0.1],
    ]
    assert_answers(run("sequence_scatter", x=jnp.ones((3, 6)), **names), want)


def test_embedding_of_sequences():
    weight, ids = jnp.arange(18.0).reshape(9, 2), lod([3, 1, 8], [1, 0, 2])
    got = run("embedding(LoD ids)", weight=weight, ids=ids)
    assert_answers(got.values, weight[jnp.array([3, 1, 8])])
    assert_answers(got.values, sj.nn.Embedding(9, 2)(weight, ids).values)
    want = run("sequence_pool(sum)", x=got, pad_value=0.0)
    assert_answers(run("fused_embedding_seq_pool", w=weight, ids=ids), want)
    want = run("sequence_pool(average)", x=got, pad_value=0.0)
    assert_answers(run("embedding and sequence_pool", weight=weight, ids=ids), want)


# ------------------------------------------------------------------ descriptions


def test_descriptions():
    spec = run("static.data", shape=(4, 2), dtype=jnp.float32)
    names = {"name": "w", "type": "LOD_TENSOR", "data_type": "float32"}
    desc = run("VarDesc", dims=(4, 2), lod_level=0, **names)
    assert desc == sj.desc.describe(spec, ["w"])[0]
    data = run("VarDesc.serialize_to_string", desc=desc)
    assert run("VarDesc.parse_from_string", data=data) == desc
    assert run("VarDesc.type", x=slots()) == "SELECTED_ROWS"
    assert run("VarDesc.shape", x=slots()) == (6, 2)
    fun = lambda w: jnp.sum(w**2)
    assert run("InferShape", fun=fun, specs=[spec]).shape == ()
    assert run("InferVarType", fun=fun, specs=[spec]).gradients[0].type == "LOD_TENSOR"
    assert "reduce_sum" in str(run("ProgramDesc", fun=fun, specs=[spec]))
    value, grad = run("append_backward", fun=fun)(jnp.ones((4, 2)))
    assert value == 8 and grad.tolist() == [[2, 2]] * 4
    saved = run("save_inference_model", fun=fun, specs=[spec])
    assert jax.export.deserialize(saved).call(jnp.ones((4, 2))) == 8


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


def test_data():
    minibatch = [([1, 2], [5]), ([3], []), ([], [6, 7])]
    first, second = run("DataFeeder.feed", minibatch=minibatch)
    assert first.to_lists() == [[1, 2], [3], []] and second.to_lists() == [
        [5],
        [],
        [6, 7],
    ]
    dataset = run("io.TensorDataset", tensors=[[[1, 2], [3], []], np.arange(3.0)])
    loader = run("io.DataLoader", dataset=dataset, batch_size=3)
    ((ids, labels),) = loader
    assert ids.to_lists() == [[1, 2], [3], []] and labels.tolist() == [0, 1, 2]
    got = run(
        "MultiSlotDataFeed", lines=["2 7 8 1 5", "1 9 0"], slots=["query", "title"]
    )
    assert got["query"].to_lists() == [[7, 8], [9]]
    assert got["title"].to_lists() == [[5], []]
    ids = run("layers.hash", mod_by=100, words=[b"a", b"b", b"a"])
    assert ids[0] == ids[2] and 0 < ids.min() <= ids.max() < 100
    table = {"label": [1, 0, 1, 0], "word": ["a", "b", "b", "c"]}
    found = run("CountFilterEntry", table=table, count_filter=2, columns=["word"])
    assert found.encode("word", [b"a", b"b"]).tolist() == [0, 1]


# ------------------------------------------------------------------ differences


def test_every_difference_is_checked():
    assert list(_RECORDED.checked) == DIFFERENCES


@pytest.mark.parametrize("what", DIFFERENCES)
def test_differs(what):
    _RECORDED.checked[what]()


def read_ones(ids, **how):
    """The gradient of a sum of rows of a table of 9."""
    loss = lambda w: jnp.sum(sj.lookup(w, np.asarray(ids), **how))
    return jax.jit(sj.grad(loss, tables=True))(np.ones((9, 3), np.float32))


@differs("padding rows in a sparse gradient")
def _():
    inputs, want = both("embedding_padding_idx")
    padding = np.asarray(inputs["ids"] == 5)
    assert padding.any() and np.asarray(want["weight_grad"].values)[padding].any()
    grad = read_ones(inputs["ids"], padding_id=5)
    assert 5 not in filled_rows(grad) and not dense(grad)[5].any()


@differs("negative `padding_idx`")
def _():
    inputs, want = both("embedding_padding_idx_negative")
    ids, weight = inputs["ids"], inputs["weight"]
    assert 8 in ids.tolist()
    assert not np.asarray(want["y"])[np.asarray(ids) == 8].any()
    assert np.asarray(sj.lookup(weight, ids, padding_id=-1))[np.asarray(ids) == 8].all()
    assert sj.lookup(weight, jnp.array([-1]), padding_id=-1).tolist() == [[0, 0, 0]]


@differs("ids out of range")
def _():
    table = jnp.ones((9, 3))
    assert np.isnan(sj.lookup(table, jnp.array([9, -1]))).all()
    with pytest.raises(checkify.JaxRuntimeError, match="out of range"):
        sj.lookup(table, jnp.array([9]), mode="error")


@differs("a lookup of no ids")
def _():
    assert CASES["embedding_empty_ids"]["error"]["type"] == "ValueError"
    grad = read_ones(jnp.zeros(0, jnp.int32))
    assert grad.capacity == 0 and grad.shape == (9, 3)


@differs("number of rows")
def _():
    got = slots().coalesce()
    assert got.capacity == 4 and int(got.num_rows()) == 2
    assert got.rows.tolist() == [1, 4, 6, 6]


@differs("order of merged rows")
def _():
    x, want = (get("merge_selected_rows_one", w) for w in ("inputs", "outputs"))
    assert filled_rows(want["out"]) == filled_rows(x["x"])
    x = sj.SelectedRows(jnp.array([4, 1]), jnp.ones((2, 1)), 6)
    assert filled_rows(x.coalesce()) == [1, 4]


@differs("two uses of a table")
def _():
    assert filled_rows(get("embedding_used_twice", "outputs")["weight_grad"]) == [
        1,
        2,
        7,
    ]
    assert read_ones([1, 2, 2]).rows.tolist() == [1, 2, 2]


@differs("a SelectedRows in an operator without a kernel for it")
def _():
    assert {"isfinite_v2_sr", "isnan_v2_sr", "squared_l2_norm_sr_error"} <= NO_KERNEL
    assert {"opt_adamax_sparse", "opt_adadelta_sparse", "clip_sr_dup"} <= NO_KERNEL
    assert CASES["isfinite_sr"]["error"]["type"] == "ValueError"
    with pytest.raises(TypeError):
        jnp.isfinite(slots())
    said = CASES["get_tensor_from_selected_rows_type_error"]["error"]["message"]
    assert "must be SELECTED_ROWS" in said
    with pytest.raises(AttributeError):
        run("get_tensor_from_selected_rows", x=jnp.ones((2, 2)))
    x = get("sum_width_mismatch_error", "inputs")
    assert "same shape" in CASES["sum_width_mismatch_error"]["error"]["message"]
    with pytest.raises(ValueError, match="shapes must be equal, got .6, 2. and .6, 3."):
        run("sum", inputs=list(x.values()))


@differs("a gradient without rows")
def _():
    assert "op_sgd_empty_grad" in NO_KERNEL
    inputs = get("op_sgd_empty_grad", "inputs")
    (got,) = train(run("optimizer.SGD", learning_rate=0.1), inputs["p"], [inputs["g"]])
    np.testing.assert_array_equal(got, inputs["p"])


@differs("SGD on a SelectedRows parameter, missing row")
def _():
    inputs, want = both("op_sgd_sr_param_sr_grad")
    step = lambda p, g, lr: (p - lr[0] * g).coalesce()
    got = step(**inputs)
    assert_answers(got, want["p"])
    assert filled_rows(got) == sorted(filled_rows(want["p"]))
    assert (
        "key(0) is not found"
        in CASES["op_sgd_sr_param_missing_row"]["error"]["message"]
    )
    inputs = get("op_sgd_sr_param_missing_row", "inputs")
    assert 0 not in filled_rows(inputs["p"]) and 0 in filled_rows(inputs["g"])
    p, g, lr = inputs["p"], inputs["g"], inputs["lr"]
    assert_answers(dense(step(p, g, lr)), dense(p) - float(lr[0]) * dense(g))


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


@differs("`weight_decay` with a sparse gradient")
def _():
    want = get("static_sgd_l2_sparse", "outputs")
    assert want["gradients"]["emb_w@GRAD"][0] == "SELECTED_ROWS"
    assert want["gradients"][want["optimizer"][1]][0] == "LOD_TENSOR"
    assert len([key for key in CELLS if key.startswith("regularizer.L2Decay")]) == 4


@differs("Lamb")
def _():
    with pytest.raises(ValueError, match="trust_ratio"):
        sj.optim.lazy(optax.lamb(0.1)).init(jnp.ones((9, 3)))
    assert RUNS["op_lamb_sr"] == "optimizer.Lamb"  # on the dense gradient
    assert sj.optim.is_row_separable(sj.optim.partial_rowwise_lamb(0.1))


@differs("`ClipGradByValue` on SelectedRows")
def _():
    assert {
        "opt_sgd_clip_by_value_sparse",
        "static_sgd_clip_by_value_sparse",
    } <= NO_KERNEL
    tx = run("ClipGradByValue", min=-0.4, max=0.4, learning_rate=1.0)
    rows = sj.SelectedRows(jnp.array([3, 3]), 0.3 * jnp.ones((2, 3)), 9)
    (got,) = train(tx, jnp.zeros((9, 3)), [rows])
    np.testing.assert_allclose(got[3], -0.4)  # 0.3 twice, merged and then clipped


@differs("maximum of an empty sequence")
def _():
    x = lod([-1.0], [0, 1])
    assert sj.segment_max(x).tolist() == [-np.inf, -1]
    assert run("sequence_pool(max)", x=x, pad_value=0.0).tolist() == [0, -1]


@differs("ties of a maximum")
def _():
    f = lambda v: run(
        "sequence_pool(max)", x=lod(DATA, [7]).map(lambda _: v), pad_value=0.0
    )
    loss = lambda v: f(v).sum()
    got = jax.jit(jax.grad(loss))(np.array([2, 1, 2, 0, 0, 0, 0], np.float32))
    assert got.tolist() == [0.5, 0, 0.5, 0, 0, 0, 0]


@differs("`sequence_pad`, a sequence that is too long")
def _():
    padded, lengths = run("sequence_pad", x=lod(DATA, [7]), maxlen=2, pad_value=0.0)
    assert padded.tolist() == [DATA[:2]] and lengths.tolist() == [7]


@differs("levels of sequences")
def _():
    x = lod(DATA, [1, 1], [2, 1], [3, 2, 2])
    assert run("lod_level", x=x) == 3
    once = run("sequence_pool(sum)", x=x, pad_value=0.0)
    assert run("sequence_pool(sum)", x=once, pad_value=0.0).to_lists() == [[16], [6]]


@differs("saving a SelectedRows")
def _():
    assert CASES["paddle_save_selected_rows_error"]["error"]["type"] == "TypeError"


@differs("bytes of a `VarDesc`")
def _():
    for x, kind in ((jnp.ones(1), 0), (slots(), 1)):
        data = sj.desc.to_bytes(sj.desc.describe(x, ["x"])[0])
        assert data[:5] == b"\x0a\x01x\x10" + bytes([kind])


@differs("parameter server")
def _():
    assert "DistributedStrategy(a_sync=True)" in WITHOUT_CODE


# ------------------------------------------------------------------ nothing forgotten


def test_every_row_is_run():
    """Each cell is named by a test, and so is each recorded case."""
    source = pathlib.Path(__file__).read_text()
    by_name = {f"sequence_pool({kind})" for kind in POOLED}
    by_name |= {f"sequence_{step}_step" for step in ("first", "last")}
    keys = {*CELLS, *WITHOUT_CODE}
    by_name |= {key for key in keys if f'"{key}"' in source}
    assert not keys - by_name
    assert not [name for name in CASES if f'"{name}"' not in source]
