"""The optimizers of Caffe2, MXNet, Paddle and PyTorch, as they are written here.

`RULES` has, for each operator of another system, the transformation that does the same
and the matching states. `golden/optim.json` has the recorded steps of those systems,
with their versions; each is repeated from the same start. Paddle's operators are here,
its optimizers, in the same file, in tests/docs/test_paddle_mapping.py.

Duplicates are summed before the step, as in Paddle, FBGEMM and PyTorch, whereas Caffe2
applies one after the other: its cases with duplicates are fed one row at a time.
"""

import functools
import json
import pathlib
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
CASES = {name: x for name, x in CASES.items() if not name.startswith("paddle/opt_")}


class Rule(NamedTuple):
    """An optimizer, and the places of the peer's states in its state."""

    tx: Any
    states: dict[str, str] = {}  # the peer's name -> ours
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
    beta1=0.9,
    beta2=0.999,
    epsilon=1e-8,
    eps=1e-5,
):
    del lazy_update
    lr, scale = learning_rate, [optax.scale(rescale_grad)]
    clip = [optax.clip(clip_gradient)] if clip_gradient else []
    decay = [optax.add_decayed_weights(wd)] if wd else []
    if op == "sgd":
        # With lr inside of the momentum, as MXNet keeps it.
        trace = [optax.trace(momentum)] if momentum else []
        tx = optax.chain(*scale, *clip, *decay, optax.scale(-lr), *trace)
        return Rule(tx, {"state0": "trace"} if momentum else {})
    if op == "adam":  # the decay is inside of the clip
        adam = uncorrected(optax.scale_by_adam, epsilon, beta2, b1=beta1)
        tx = optax.chain(*scale, *decay, *clip, adam, optax.scale(-lr))
        return Rule(tx, {"state0": "mu", "state1": "nu"})
    if op == "adagrad":  # eps inside of the root
        rss = optax.scale_by_rss(initial_accumulator_value=0.0, eps=1e-7)
        tx = optax.chain(*scale, *clip, rss, optax.scale(-lr))
        return Rule(tx, {"state0": "sum_of_squares"})
    if op == "ftrl":
        tx = optax.chain(*scale, *clip, optim.ftrl(lr, beta=1.0, l1=0.01, l2=wd))
        return Rule(tx, {"state0": "z", "state1": "n"})
    assert op == "groupadagrad"
    tx = optax.chain(*scale, *clip, optim.group_adagrad(lr, eps=eps))
    return Rule(tx, {"state0": "sum_of_squares"})


def paddle(op, lr, epsilon=0.0, beta1=0.0, beta2=0.0, b1_pow=1.0, l1=0.0, l2=0.0, **_):
    if op == "sgd":
        return Rule(optax.sgd(lr))
    if op == "adam":  # handed beta1 to the power of the step
        count = round(np.log(b1_pow) / np.log(beta1)) - 1
        tx = optax.adam(lr, beta1, beta2, epsilon)
        return Rule(tx, {"m1": "mu", "m2": "nu"}, count)
    if op == "adagrad":
        return Rule(optim.adagrad(lr, 0.0, epsilon), {"m": "sum_of_squares"})
    assert op == "ftrl"
    tx = optim.ftrl(lr, beta=0.0, l1=l1 + 1e-10, l2=2 * (l2 + 1e-10))
    return Rule(tx, {"lin": "z", "sq": "n"})


def torch(op, lr, betas=(), eps=0.0, lr_decay=0.0, initial_accumulator_value=0.0):
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
    rule = RULES[system](op, **json.loads(hyper))
    tx = rule.tx if dense else optim.lazy(rule.tx)

    @jax.jit
    def run(weights, state, rows, values):
        grad = sj.SelectedRows(rows, values, len(weights))
        return step(tx, weights, state, grad.to_dense() if dense else grad)

    return rule, run


@functools.cache
def _arrays():
    with np.load(_FILE.with_suffix(".npz")) as file:
        return dict(file)


def _set_count(state, count):
    def put(path, leaf):
        is_count = getattr(path[-1], "name", None) == "count"
        return jnp.asarray(count, leaf.dtype) if is_count else leaf

    return jax.tree_util.tree_map_with_path(put, state)


@pytest.mark.parametrize("name", CASES)
def test_as_recorded(name):
    case = CASES[name]
    data = {field: _arrays()[key] for field, key in case["arrays"].items()}
    # MXNet steps all rows with a dense gradient, if it is told to, and in FTRL.
    lazily = case["hyper"].get("lazy_update", case["name"] != "opt_ftrl_dnsw")
    dense = case.get("grad_stype") == "default" or not lazily
    hyper = json.dumps(case["hyper"], sort_keys=True)
    rule, run = _rule(case["system"], case["op"], hyper, dense)
    assert set(case["states"]) == set(rule.states)
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
            found[theirs] = optax.tree_utils.tree_get(state, ours)
        for field, actual in found.items():
            expected = data[field][t].reshape(actual.shape)
            what = f"{field} after step {t + 1}"
            np.testing.assert_allclose(
                actual, expected, rtol=2e-5, atol=2e-6, err_msg=what
            )
