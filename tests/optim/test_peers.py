"""The optimizers of Caffe2, MXNet, Paddle and PyTorch, as they are written here.

`RULES` has, for each operator of another system, the transformation that does the same
and the matching states. `golden/optim.json` has the recorded steps of those systems,
with their versions; the tests repeat each step from the same start and compare weights
and states after it.

One difference is on purpose: duplicates are summed before the step, as in Paddle,
FBGEMM and PyTorch, whereas Caffe2 applies one after the other. The tests feed its cases
with duplicates one row at a time.
"""

# optax's types know trees of arrays only.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportIndexIssue=false, reportOperatorIssue=false

import functools
import json
import pathlib
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsejax as sj
from optimizers import step
from sparsejax import optim


# optax itself relies on implicit promotion.
pytestmark = [pytest.mark.usefixtures("loose_promotion"), pytest.mark.slow]

_FILE = pathlib.Path(__file__).parent.parent / "golden" / "optim.json"
CASES = {
    f"{case['system']}/{case['name']}": case
    for case in json.loads(_FILE.read_text())["cases"]
}


class Rule(NamedTuple):
    """An optimizer, the places of the peer's states in its state, and its inputs."""

    tx: Any
    states: dict[str, str] = {}  # the peer's name -> ours
    dense: bool = False  # the peer walks over all rows, those without gradient too
    taken: int = 0  # steps before the first


# ------------------------------------------------------------------ the table


def uncorrected(make, eps, b2, **hyper):
    """An Adam of ours or of optax with eps added before the moment is corrected.

    Ours: m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps). Caffe2's and MXNet's:
    sqrt(1 - b2^t) / (1 - b1^t) * m / (sqrt(v) + eps), which is ours with
    eps / sqrt(1 - b2^t) in the place of eps.
    """
    schedule = lambda count: eps / jnp.sqrt(1 - b2 ** (count + 1.0))
    injected = optax.inject_hyperparams(make, static_args=("b2", *hyper))
    return injected(eps=schedule, b2=b2, **hyper)


def caffe2(op, lr=0.0, epsilon=1e-5, weight_decay=0.0, **hyper):
    # Callers pass lr < 0, but for momentum: w += lr * update.
    decay = [optax.add_decayed_weights(weight_decay)] if weight_decay else []
    moments = {"m1": "mu", "m2": "nu"}
    if op == "SparseAdagrad":
        tx = optax.chain(*decay, optim.adagrad(-lr, eps=epsilon))
        return Rule(tx, {"moment": "sum_of_squares"})
    if op == "RowWiseSparseAdagrad":
        tx = optim.rowwise_adagrad(-lr, eps=epsilon)
        return Rule(tx, {"moment": "sum_of_squares"})
    if op in ("SparseAdam", "RowWiseSparseAdam"):
        b1, b2 = hyper.pop("beta1", 0.9), hyper.pop("beta2", 0.999)
        radam = hyper.pop("enableRAdam", False)
        assert not hyper
        if op == "RowWiseSparseAdam":
            make = functools.partial(optim.rowwise_adam, -lr, b1)
            return Rule(uncorrected(make, epsilon, b2), moments)
        make = optax.scale_by_radam if radam else optax.scale_by_adam
        adam = uncorrected(make, epsilon, b2, b1=b1)
        return Rule(optax.chain(adam, optax.scale(lr)), moments)
    if op == "SparseAdadelta":
        adadelta = optax.scale_by_adadelta(hyper.get("decay", 0.95), epsilon)
        names = {"moment": "e_g", "moment_delta": "e_x"}
        return Rule(optax.chain(adadelta, optax.scale(lr)), names)
    if op == "SparseMomentumSGDUpdate":
        trace = optax.trace(hyper["momentum"], nesterov=bool(hyper["nesterov"]))
        tx = optax.chain(optax.scale(lr), trace, optax.scale(-1.0))
        return Rule(tx, {"moment": "trace"})
    assert op == "SparseFtrl"
    defaults = {"alpha": 0.005, "beta": 1.0, "lambda1": 0.001, "lambda2": 0.001}
    tx = optim.ftrl(*(hyper.get(name, default) for name, default in defaults.items()))
    return Rule(tx, {"z": "z", "n": "n"})


def mxnet(
    op,
    learning_rate,
    wd=0.0,
    clip_gradient=None,
    rescale_grad=1.0,
    momentum=0.0,
    lazy_update=True,
    dense=False,
    beta1=0.9,
    beta2=0.999,
    epsilon=1e-8,
    eps=1e-5,
):
    scale = [optax.scale(rescale_grad)]
    clip = [optax.clip(clip_gradient)] if clip_gradient else []
    decay = [optax.add_decayed_weights(wd)] if wd else []
    lr = learning_rate
    dense = dense or not lazy_update
    if op == "sgd":
        # With lr inside of the momentum, as MXNet keeps it.
        trace = [optax.trace(momentum)] if momentum else []
        tx = optax.chain(*scale, *clip, *decay, optax.scale(-lr), *trace)
        return Rule(tx, {"state0": "trace"} if momentum else {}, dense)
    if op == "adam":  # the decay is inside of the clip
        adam = uncorrected(optax.scale_by_adam, epsilon, beta2, b1=beta1)
        tx = optax.chain(*scale, *decay, *clip, adam, optax.scale(-lr))
        return Rule(tx, {"state0": "mu", "state1": "nu"}, dense)
    if op == "adagrad":  # decoupled decay, and eps inside of the root
        rss = optax.scale_by_rss(initial_accumulator_value=0.0, eps=1e-7)
        tx = optax.chain(*scale, *clip, rss, *decay, optax.scale(-lr))
        return Rule(tx, {"state0": "sum_of_squares"}, dense)
    if op == "ftrl":
        tx = optax.chain(*scale, *clip, optim.ftrl(lr, beta=1.0, l1=0.01, l2=wd))
        return Rule(tx, {"state0": "z", "state1": "n"}, dense)
    if op == "rmsprop":
        tx = optax.rmsprop(lr, decay=0.9, eps=1e-8)
        return Rule(tx, {"state0": "nu"}, dense)
    assert op == "groupadagrad"
    tx = optax.chain(*scale, *clip, optim.group_adagrad(lr, eps=eps))
    return Rule(tx, {"state0": "sum_of_squares"}, dense)


def paddle(op, dense=False, **hyper):
    lr = hyper.pop("learning_rate", None) or hyper.pop("lr")
    epsilon = hyper.pop("epsilon", None)
    # A decay makes Paddle's gradient dense: all rows decay.
    coefficient = str(hyper.pop("weight_decay", "0")).split("=")[-1]
    weight_decay = float(coefficient) or hyper.pop("regularization_coeff", 0.0)
    decay = [optax.add_decayed_weights(weight_decay)] if weight_decay else []
    dense = dense or bool(decay)
    b1, b2 = hyper.pop("beta1", 0.9), hyper.pop("beta2", 0.999)
    op = op.lower()
    if op == "sgd":
        norm = re.findall(r"norm=([\d.]+)", hyper.pop("grad_clip", ""))
        clip = [optax.clip_by_global_norm(float(n)) for n in norm]
        return Rule(optax.chain(*decay, *clip, optax.sgd(lr)), {}, dense)
    if op == "momentum":  # over all rows
        momentum = hyper.get("mu") or hyper["momentum"]
        trace = optax.trace(momentum, nesterov=hyper.get("use_nesterov", False))
        tx = optax.chain(*decay, trace, optax.scale(-lr))
        return Rule(tx, {"velocity": "trace", "v": "trace"}, dense=True)
    if op in ("adam", "adamw"):
        tx = optax.adam(lr, b1, b2, 1e-8 if epsilon is None else epsilon)
        if op == "adamw":
            tx = optax.adamw(lr, b1, b2, weight_decay=weight_decay)
        names = {"m1": "mu", "moment1": "mu", "m2": "nu", "moment2": "nu"}
        count = 0
        if "b1_pow" in hyper:  # the operator is handed b1^t
            count = round(np.log(hyper["b1_pow"]) / np.log(b1)) - 1
        elif hyper.get("lazy_mode"):
            # Its kernel for SelectedRows advances the powers before it uses them.
            count = 1
        return Rule(tx, names, dense, count)
    if op == "adamax":
        return Rule(optax.adamax(lr), {"moment": "mu", "inf_norm": "nu"}, dense=True)
    if op == "adagrad":
        start = hyper.get("initial_accumulator_value", 0.0)
        adagrad = optim.adagrad(lr, start, eps=1e-6 if epsilon is None else epsilon)
        names = {"moment": "sum_of_squares", "m": "sum_of_squares"}
        return Rule(optax.chain(*decay, adagrad), names, dense)
    if op == "rmsprop":  # over all rows, eps inside of the root, lr inside of momentum
        rms = optax.scale_by_stddev if hyper.get("centered") else optax.scale_by_rms
        rms = rms(hyper.get("rho", 0.95), epsilon or 1e-6)
        trace = optax.trace(hyper.get("momentum", 0.0))
        tx = optax.chain(rms, optax.scale(lr), trace, optax.scale(-1.0))
        names = {"mean_square": "nu", "momentum": "trace"}
        if hyper.get("centered"):
            names["mean_grad"] = "mu"
        return Rule(tx, names, dense=True)
    assert op == "ftrl" and hyper["lr_power"] == -0.5
    tx = optim.ftrl(lr, beta=0.0, l1=hyper["l1"] + 1e-10, l2=2 * (hyper["l2"] + 1e-10))
    return Rule(tx, {"lin": "z", "sq": "n"}, dense)


def torch(op, lr, betas=(), eps=0.0, lr_decay=0.0, initial_accumulator_value=0.0):
    if op == "SGD":
        return Rule(optax.sgd(lr))
    if op == "Adagrad":
        schedule = lambda count: lr / (1 + lr_decay * count)
        tx = optim.adagrad(schedule, initial_accumulator_value, eps)
        return Rule(tx, {"sum": "sum_of_squares"})
    assert op == "SparseAdam"
    adam = uncorrected(optax.scale_by_adam, eps, betas[1], b1=betas[0])
    tx = optax.chain(adam, optax.scale(-lr))
    return Rule(tx, {"exp_avg": "mu", "exp_avg_sq": "nu"})


RULES = {"caffe2": caffe2, "mxnet": mxnet, "paddle": paddle, "torch": torch}


# ------------------------------------------------------------------ running it


@functools.cache
def _rule(system, op, hyper, dense):
    """The rule of an operator, and its jitted step."""
    more = {"dense": True} if dense else {}
    rule = RULES[system](op, **json.loads(hyper), **more)
    tx = rule.tx if rule.dense else optim.lazy(rule.tx)

    # As small as it is: nothing is gained by optimizing.
    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def run(weights, state, rows, values):
        grad = sj.SelectedRows(rows, values, len(weights))
        return step(tx, weights, state, grad.to_dense() if rule.dense else grad)

    return rule, run


def _is_dense(case):
    if case["system"] == "mxnet":
        # FTRL on dense weights and operators without a sparse kernel step all rows.
        falls_back = case["op"] in ("ftrl", "rmsprop") and "dnsw" in case["name"]
        return case["grad_stype"] == "default" or falls_back
    return case["system"] == "paddle" and "dense" in case["name"]


@functools.cache
def _arrays():
    with np.load(_FILE.with_suffix(".npz")) as file:
        return dict(file)


@pytest.mark.parametrize("name", CASES)
def test_as_recorded(name):
    case = CASES[name]
    data = {field: _arrays()[key] for field, key in case["arrays"].items()}
    hyper = json.dumps(case["hyper"], sort_keys=True)
    rule, run = _rule(case["system"], case["op"], hyper, _is_dense(case))
    # Paddle keeps a mean of gradients that it does not use unless it is centered.
    assert set(case["states"]) - set(rule.states) <= {"mean_grad"}
    weights = jnp.asarray(data["weights0"])
    state = _set_count(rule.tx.init(weights), rule.taken)
    for theirs, ours in rule.states.items():
        if f"{theirs}0" in data:
            start = jnp.asarray(data[f"{theirs}0"])
            state = optax.tree_utils.tree_set(state, **{ours: start})

    for t, (rows, values) in enumerate(zip(data["rows"], data["grads"])):
        feeds = [rows]
        if case.get("sequential", False):  # one row at a time, the other slots empty
            slots = np.arange(len(rows))
            feeds = [np.where(slots == k, rows, len(weights)) for k in slots]
        for feed in feeds:
            if "iters" in case:
                state = _set_count(state, case["iters"][t])
            weights, state = run(weights, state, feed, values)
        found = {"weights": weights}
        for theirs, ours in rule.states.items():
            if theirs in data:
                found[theirs] = optax.tree_utils.tree_get(state, ours)
        for field, actual in found.items():
            expected = data[field][t].reshape(actual.shape)
            what = f"{field} after step {t + 1}"
            np.testing.assert_allclose(
                actual, expected, rtol=2e-5, atol=2e-6, err_msg=what
            )


def _set_count(state, count):
    def put(path, leaf):
        is_count = getattr(path[-1], "name", None) == "count"
        return jnp.asarray(count, leaf.dtype) if is_count else leaf

    return jax.tree_util.tree_map_with_path(put, state)
