"""sj.optim with flax's and equinox's trees and training loops, unmodified.

A few steps equal those of the same parameters in dicts, which other files compare with
dense training. `TrainState` is in `pairs`, which has each way to wrap an optimizer in
each place.
"""

import functools
import re
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import pairs
import sparsejax as sj
from helpers import assert_trees_close, ones, slow_but
from optimizers import LR, step
from sparsejax import optim
from sparsejax.optim import lazy


pytestmark = pytest.mark.usefixtures("loose_promotion")

V, D = 23, 5


def _weights():
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape).astype(np.float32))
    return {"table": draw(V, D), "kernel": draw(D, 2), "bias": draw(2)}


def _loss(apply, ids):
    x = apply(ids)
    return jnp.mean(jnp.sin(x) * jnp.arange(1.0, 1 + x.size).reshape(x.shape))


# ------------------------------------------------------------------ frameworks

# Each has `params` and `state`, its own trees, `apply(params, ids)`, and `update`.
# `make` rebuilds a tree of parameters from its leaves.


class Plain:
    """Parameters in two levels of dicts, as haiku and plain JAX have them."""

    def __init__(self, weights, tx):
        self.tx, self.params = tx, self.make(**weights)
        self.state, self.step = tx.init(self.params), jax.jit(partial(step, tx))

    def make(self, table=None, bias=None, kernel=None):
        return {"embed": {"embeddings": table}, "linear": {"w": kernel, "b": bias}}

    def apply(self, params, ids):
        rows = params["embed"]["embeddings"][ids]
        return rows @ params["linear"]["w"] + params["linear"]["b"]

    def update(self, grads):
        self.params, self.state = self.step(self.params, self.state, grads)


class NnxOptimizer:
    """flax.nnx: variables in a State, other ones in the optimizer's."""

    def __init__(self, weights, tx):
        nnx = self.nnx = pytest.importorskip("flax.nnx")

        class Model(nnx.Module):
            def __init__(self):
                rngs = nnx.Rngs(0)
                self.embed = nnx.Embed(V, D, rngs=rngs)
                self.dense = nnx.Linear(D, 2, rngs=rngs)

        self.model = Model()
        nnx.update(self.model, self.make(**weights))
        self.graph, _ = nnx.split(self.model)
        self._start(tx)

    def _start(self, tx):
        self.tx = tx
        self.optimizer = self.nnx.Optimizer(self.model, tx, wrt=self.nnx.Param)
        self.step = self.nnx.jit(self.nnx.Optimizer.update)

    def make(self, table=None, bias=None, kernel=None):
        if kernel is None:  # nnx.State has no None
            return self.nnx.State({"embed": {"embedding": table}})
        dense = {"kernel": kernel, "bias": bias}
        return self.nnx.State({"embed": {"embedding": table}, "dense": dense})

    params = property(
        lambda self: self.nnx.state(self.model, self.nnx.Param),
        lambda self, x: self.nnx.update(self.model, x),
    )
    state = property(
        lambda self: self.optimizer.opt_state,
        lambda self, x: self.nnx.update(self.optimizer.opt_state, self.nnx.state(x)),
    )

    def apply(self, params, ids):
        model = self.nnx.merge(self.graph, params)
        return model.dense(model.embed(ids))

    def update(self, grads):
        self.step(self.optimizer, self.model, grads)


class NnxState(NnxOptimizer):
    """flax.nnx with optax's own calls."""

    state = None

    def _start(self, tx):
        self.tx, self.state = tx, tx.init(self.params)
        self.step = jax.jit(partial(step, tx))

    update: Any = Plain.update


class Equinox(Plain):
    def __init__(self, weights, tx):
        eqx = self.eqx = pytest.importorskip("equinox")
        key = jax.random.key(0)

        class Model(eqx.Module):
            embed: Any
            kernel: Any
            bias: Any
            activation: Any = jnp.asarray  # a leaf, and no array

            def __call__(self, ids):
                rows = jax.vmap(self.embed)(ids.reshape(-1)).reshape(*ids.shape, D)
                return self.activation(rows) @ self.kernel + self.bias

        zeros = jnp.zeros
        self.model = Model(eqx.nn.Embedding(V, D, key=key), zeros((D, 2)), zeros(2))
        super().__init__(weights, tx)

    def make(self, table=None, bias=None, kernel=None):
        return self.eqx.tree_at(
            lambda m: (m.embed.weight, m.kernel, m.bias),
            self.eqx.filter(self.model, self.eqx.is_array),
            (table, kernel, bias),
            is_leaf=lambda x: x is None,
        )

    def apply(self, params, ids):
        _, static = self.eqx.partition(self.model, self.eqx.is_array)
        return self.eqx.combine(params, static)(ids)


FRAMEWORKS = {
    "nnx_optimizer": NnxOptimizer,
    "nnx_state": NnxState,
    "equinox": Equinox,
}


# ------------------------------------------------------------------ parts of sj.optim

BATCHES = [np.array([[3, 1], [3, 20]]), np.array([[1, 7], [9, 9]])]


class Part(NamedTuple):
    """A part of sj.optim: before each step, and at the end."""

    tx: Any
    before: Any = lambda number, model: None
    result: Any = lambda params, state: params


def _reset(number, model):
    if number == 1:
        rows = model.make(table=jnp.array([3, V]))
        new = optim.reset_rows(model.tx, model.state, model.params, rows)
        model.params, model.state = new


def _flush(number, model):
    model.params, model.state = optim.flush_weight_decay(model.params, model.state)


SGD = optax.sgd(LR)
EXACT = optim.exact(optax.sgd(LR, momentum=0.9))
PARTS = {
    "exact": Part(EXACT, result=lambda *both: EXACT.flush(*both)[0]),
    "ema": Part(lazy(optax.chain(SGD, optim.ema(0.5))), result=optim.ema_params),
    "reset_rows": Part(lazy(optax.sgd(LR, momentum=0.9)), _reset),
    "reset_accumulated": Part(optim.accumulate(lazy(SGD), 2, 8), _reset),
    "weight_decay": Part(
        lazy(optax.chain(SGD, optim.weight_decay(0.1, LR))),
        _flush,
        lambda *both: optim.flush_weight_decay(*both)[0],
    ),
}


IS_TABLE = lambda path, x: x.shape == (V, D)  # noqa: E731


def _train(model, part):
    loss = lambda params, ids: _loss(partial(model.apply, params), ids)
    find = jax.jit(optim.exact_value_and_grad(loss, EXACT, tables=IS_TABLE))
    grad = jax.jit(sj.grad(loss, tables=IS_TABLE))
    for number, ids in enumerate(BATCHES):
        part.before(number, model)
        if part.tx is EXACT:
            (_, grads), model.params, model.state = find(model.params, model.state, ids)
        else:
            grads = grad(model.params, ids)
        model.update(grads)
    return jax.jit(part.result)(model.params, model.state)


CASES = [
    ("nnx_optimizer", "ema"),
    ("nnx_optimizer", "weight_decay"),
    ("nnx_optimizer", "reset_accumulated"),
    ("nnx_optimizer", "exact"),
    ("nnx_state", "reset_rows"),
    ("equinox", "weight_decay"),
    ("equinox", "exact"),
    ("equinox", "reset_rows"),
]


@functools.cache
def _plain_run(name):
    return _train(Plain(_weights(), PARTS[name].tx), PARTS[name])


@pytest.mark.parametrize("framework, name", slow_but(CASES, *CASES[:6]))
def test_trains_as_parameters_in_dicts(framework, name):
    part = PARTS[name]
    model = FRAMEWORKS[framework](_weights(), part.tx)
    expected = model.make(*jax.tree.leaves(_plain_run(name)))
    assert_trees_close(*map(jax.tree.leaves, (_train(model, part), expected)))


@pytest.mark.window
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_questions(framework):
    model = FRAMEWORKS[framework](_weights(), SGD)
    loss = lambda params: _loss(partial(model.apply, params), BATCHES[0])
    norms = lambda p: (
        optim.global_norm(sj.grad(loss)(p)),
        optax.tree.norm(jax.grad(loss)(p)),
    )
    assert_trees_close(*jax.jit(norms)(model.params))
    adam = optax.adam(LR)
    assert optim.is_row_separable(adam, model.params)
    assert not optim.is_row_separable(optax.lamb(LR), model.params)
    assert not optim.is_lazy_exact(adam, model.params)


def test_a_whole_model():
    """With leaves that are not trained: right for equinox, refused for nnx."""
    tx = lazy(optax.chain(SGD, optim.ema(0.5), optim.weight_decay(0.1)))
    eqx, nnx = Equinox(_weights(), tx), NnxOptimizer(_weights(), tx)
    _train(eqx, Part(tx))
    model = eqx.eqx.combine(eqx.params, eqx.model)
    for call in optim.ema_params, lambda *both: optim.flush_weight_decay(*both)[0]:
        whole, trained = call(model, eqx.state), call(eqx.params, eqx.state)
        assert whole.activation is model.activation
        assert_trees_close(eqx.eqx.filter(whole, eqx.eqx.is_array), trained)
        with pytest.raises(ValueError, match="nnx.state"):
            call(nnx.model, nnx.state)


# ------------------------------------------------------------------ restored states


def as_dicts(state):
    if hasattr(state, "_fields"):
        return {name: as_dicts(getattr(state, name)) for name in state._fields}
    if isinstance(state, tuple):
        return {str(i): as_dicts(x) for i, x in enumerate(state)}
    return state


def of_type(make):
    rebuild = lambda x: make(map(rebuild, x)) if isinstance(x, tuple) else x
    return rebuild


ADAM = lazy(optax.adam(0.1))
TXS = {
    "accumulate": optim.accumulate(ADAM, 2, 8),
    "dynamic_loss_scale": optim.dynamic_loss_scale(ADAM),
    "rounding": optim.rounding(ADAM, master=True),
    "track_changes": optim.track_changes(ADAM),
    "exact": optim.exact(optax.adam(0.1)),
    "rowwise_adagrad": optim.rowwise_adagrad(0.1),
    "rowwise_adam": optim.rowwise_adam(0.1),
    "ftrl": optim.ftrl(0.1),
    "ema": optim.ema(0.9),
    "weight_decay": optim.weight_decay(0.1),
}


@pytest.mark.parametrize("name", TXS)
def test_a_state_without_its_types_is_refused(name):
    tx, params = TXS[name], {"t": ones(40, 2)}
    rows = sj.SelectedRows(np.array([3]), ones(1, 2), 40)
    state = jax.jit(tx.init)(params)
    for restore in (as_dicts, of_type(list), of_type(tuple)):
        for grad in (rows, params["t"]):
            with pytest.raises(TypeError, match="restore"):
                jax.eval_shape(tx.update, {"t": grad}, restore(state), params)


def test_a_part_of_a_state_without_its_types_is_refused():
    tx = lazy(optax.partition({"some": optax.adam(0.1)}, {"t": "some"}))
    params = {"t": ones(40, 2)}
    grads = {"t": sj.SelectedRows(np.array([3]), ones(1, 2), 40)}
    state = jax.jit(tx.init)(params)
    for restore in (as_dicts, of_type(list)):
        parts = {name: restore(part) for name, part in state.inner_states.items()}
        with pytest.raises(TypeError, match="restore"):
            tx.update(grads, state._replace(inner_states=parts), params)


# ------------------------------------------------------------------ pairs


# Each wrap in the plain loop and in every third place; all that are refused.
PAIRS = [
    (wrap, place)
    for i, wrap in enumerate(pairs.WRAPS)
    for k, place in enumerate(pairs.PLACES)
    if (i + k) % 3 == 0 or (wrap, place) in {*pairs.REFUSED, *pairs.QUICK}
]


@pytest.mark.usefixtures("eight_devices")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("wrap, place", slow_but(PAIRS, *pairs.QUICK))
def test_pair(wrap, place, tmp_path):
    words = pairs.REFUSED.get((wrap, place))
    if words is None:
        pairs.PLACES[place].run(wrap, tmp_path)
    else:
        with pytest.raises((TypeError, ValueError), match=re.escape(words)):
            pairs.PLACES[place].run(wrap, tmp_path)
