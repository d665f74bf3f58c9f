"""Each way to wrap an optimizer, in each place where a step runs.

A pair trains as the plain loop does, a jitted step on arrays with donated buffers:
equal weights, one compilation, and no temporary of the table's size. Or it raises an
error with the words of `REFUSED`, which name the way out. `test_frameworks.py` tries
each pair, and `table` is the second table of tests/docs/which_table.md.
"""

import functools
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.training import train_state
from jax import export
from jax.sharding import AbstractMesh, AxisType

import sparsejax as sj
from helpers import assert_trees_close
from sparsejax import optim
from sparsejax.optim import lazy


V, D, STEPS = 4_001, 4, 3
BATCHES = np.random.default_rng(0).integers(0, V, (STEPS, 16)).astype(np.int32)


# ------------------------------------------------------------------ ways to wrap


def _by_path(params, table, dense):
    is_leaf = lambda x: isinstance(x, sj.parallel.ShardedTable)
    pick = lambda path, _: table if "'t'" in jax.tree_util.keystr(path) else dense
    return jax.tree_util.tree_map_with_path(pick, params, is_leaf=is_leaf)


_labels = functools.partial(_by_path, table="a", dense="b")
_BOTH: Any = {"a": optax.adamw(0.1), "b": optax.sgd(0.1)}
_LAZIES: Any = {name: lazy(tx) for name, tx in _BOTH.items()}
_FLOAT16 = "rounding(lazy(adamw))"

# Each takes the parameters, since some need a tree of their structure.
WRAPS: dict[str, Callable[[Any], Any]] = {
    "lazy(adam)": lambda p: lazy(optax.adam(0.1)),
    "lazy(chain(clip, adagrad))": lambda p: lazy(
        optax.chain(optax.clip_by_global_norm(0.1), optax.adagrad(0.1))
    ),
    "lazy(partition(tree))": lambda p: lazy(optax.partition(_BOTH, _labels(p))),
    "lazy(partition(function))": lambda p: lazy(optax.partition(_BOTH, _labels)),
    "partition of lazy": lambda p: optax.partition(_LAZIES, _labels(p)),
    "lazy(adamw(mask=))": lambda p: lazy(
        optax.adamw(0.1, mask=lambda params: _by_path(params, True, False))
    ),
    "lazy(inject_hyperparams)": lambda p: lazy(
        optax.inject_hyperparams(optax.adam)(learning_rate=0.1)
    ),
    "rowwise_adagrad": lambda p: optim.rowwise_adagrad(0.1),
    "lazy(chain(adam, ema))": lambda p: lazy(
        optax.chain(optax.adam(0.1), optim.ema(0.9))
    ),
    "lazy(chain(adam, weight_decay))": lambda p: lazy(
        optax.chain(optax.adam(0.1), optim.weight_decay(0.1, 0.1))
    ),
    "lazy(apply_if_finite)": lambda p: lazy(optax.apply_if_finite(optax.adam(0.1), 3)),
    "accumulate(lazy(adamw))": lambda p: optim.accumulate(
        lazy(optax.adamw(0.1)), 2, _by_path(p, 64, None)
    ),
    "dynamic_loss_scale(lazy(adamw))": lambda p: optim.dynamic_loss_scale(
        lazy(optax.adamw(0.1)), 1.0
    ),
    _FLOAT16: lambda p: optim.rounding(lazy(optax.adamw(0.1)), master=True),
}


# ------------------------------------------------------------------ the plain loop


def _params(wrap, table=jnp.asarray, dense=jnp.asarray) -> Any:
    rng = np.random.default_rng(1)
    dtype = np.float16 if wrap == _FLOAT16 else np.float32
    t, w = (rng.normal(size=shape).astype(dtype) for shape in ((V, D), (D, 1)))
    return {"t": table(t), "w": dense(w)}


def _start(wrap, make=_params):
    """Parameters, the wrapped optimizer, and its state."""
    params = make(wrap)
    tx = WRAPS[wrap](params)
    return params, tx, tx.init(params)


def _loss(params, ids):
    out = sj.lookup(params["t"], ids) @ params["w"]
    return jnp.mean((out.astype(jnp.float32) - 1) ** 2)


class _Step:
    """A jitted, donated step, which counts how often it is traced."""

    def __init__(self, tx):
        self.tx, self.traces = tx, 0
        self.jitted = jax.jit(self.plain, donate_argnums=(0, 1))

    def plain(self, params, state, ids):
        self.traces += 1
        grads = sj.grad(_loss)(params, ids)
        updates, state = self.tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    def train(self, params, state, batches=BATCHES):
        for ids in batches:
            params, state = self.jitted(params, state, jnp.asarray(ids))
        assert self.traces == 1
        return params, state


def _assert_in_place(step, *args):
    memory = step.lower(*args).compile().memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < 0.5 * 2 * V * D


@functools.cache
def plain_loop(wrap: str) -> Any:
    params, tx, state = _start(wrap)
    step = _Step(tx)
    _assert_in_place(step.jitted, params, state, BATCHES[0])
    return jax.device_get(step.train(params, state)[0])


def _assert_equal(wrap, params):
    dense = lambda x: x.to_dense() if hasattr(x, "to_dense") else x
    got = {name: np.asarray(dense(x)) for name, x in params.items()}
    rtol = 2e-3 if wrap == _FLOAT16 else 1e-5
    assert_trees_close(got, plain_loop(wrap), rtol=rtol, atol=rtol)


# ------------------------------------------------------------------ places


def _mesh(kind=AxisType.Auto):
    return jax.make_mesh((8,), ("x",), axis_types=(kind,))


def _on_mesh(wrap, mesh=None):
    """Parameters with the rows of the table sharded, and the dense leaf replicated."""
    mesh = mesh or _mesh()
    shard = lambda x: sj.parallel.shard_rows(x, mesh, "x")
    replicate = lambda x: jax.device_put(x, jax.NamedSharding(mesh, jax.P()))
    return _params(wrap, shard, replicate)


def in_place(wrap, tmp_path):
    plain_loop(wrap)


def eager(wrap, tmp_path):
    params, tx, state = _start(wrap)
    for ids in BATCHES:
        grads = jax.jit(sj.grad(_loss))(params, ids)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    _assert_equal(wrap, params)


def scan(wrap, tmp_path):
    params, tx, state = _start(wrap)
    step: Any = _Step(tx).plain

    @functools.partial(jax.jit, donate_argnums=0)
    def train(carry):
        return jax.lax.scan(lambda c, ids: (step(*c, ids), None), carry, BATCHES)[0]

    carry = params, state
    _assert_in_place(train, carry)
    _assert_equal(wrap, train(carry)[0])


class _Model(nnx.Module):
    def __init__(self, params):
        self.t = nnx.Param(params["t"])
        self.w = nnx.Param(params["w"])


def nnx_optimizer(wrap, tmp_path):
    model = _Model(_params(wrap))
    as_pure = getattr(nnx, "as_pure", None) or getattr(nnx, "pure")  # flax 0.11
    tx = WRAPS[wrap](as_pure(nnx.state(model, nnx.Param)))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    traces = []

    @functools.partial(nnx.jit, donate_argnums=(0, 1))
    def step(model, optimizer, ids):
        traces.append(None)
        loss = lambda model: _loss({"t": model.t[...], "w": model.w[...]}, ids)
        _, grads = sj.nn.nnx.value_and_grad(loss)(model)
        optimizer.update(model, grads)

    for ids in BATCHES:
        step(model, optimizer, jnp.asarray(ids))
    assert len(traces) == 1
    _assert_equal(wrap, {"t": model.t.value, "w": model.w.value})


def flax_train_state(wrap, tmp_path):
    params, tx, _ = _start(wrap)
    state = train_state.TrainState.create(apply_fn=None, params=params, tx=tx)
    traces = []

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, ids):
        traces.append(None)
        return state.apply_gradients(grads=sj.grad(_loss)(state.params, ids))

    for ids in BATCHES:
        state = step(state, jnp.asarray(ids))
    assert len(traces) <= 2  # TrainState itself begins with an int for `step`
    _assert_equal(wrap, state.params)


def sharded_rows(wrap, tmp_path):
    params, tx, state = _start(wrap, _on_mesh)
    _assert_equal(wrap, _Step(tx).train(params, state)[0])


def explicit_mesh(wrap, tmp_path):
    mesh = _mesh(AxisType.Explicit)
    with jax.set_mesh(mesh):
        params, tx, state = _start(wrap, functools.partial(_on_mesh, mesh=mesh))
        trained, _ = _Step(tx).train(params, state)
    _assert_equal(wrap, trained)  # outside the mesh, as the plain loop


def planned(wrap, tmp_path):
    params, tx, _ = _start(wrap)
    mesh = AbstractMesh((8,), ("x",))
    plan = sj.parallel.plan(params, mesh, BATCHES[0], loss=_loss, tx=tx)
    without = sj.parallel.plan(params, mesh, BATCHES[0], loss=_loss)
    assert plan.total.memory > without.total.memory


def save_and_restore(wrap, tmp_path):
    """After a step on sharded rows, on an array, and back."""
    sharded, tx, state = _start(wrap, _on_mesh)
    saved = _Step(tx).train(sharded, state, BATCHES[:1])
    sj.parallel.save(tmp_path / "sharded", saved)
    params, tx, state = _start(wrap)
    params, state = sj.parallel.restore(tmp_path / "sharded", (params, state))
    _assert_equal(wrap, _Step(tx).train(params, state, BATCHES[1:])[0])


def exported(wrap, tmp_path):
    params, tx, state = _start(wrap)
    carry, treedef = jax.tree.flatten((params, state))
    plain: Any = _Step(tx).plain

    def on_leaves(leaves, ids):
        return jax.tree.leaves(plain(*treedef.unflatten(leaves), ids))

    data = export.export(jax.jit(on_leaves))(carry, BATCHES[0]).serialize()
    step: Any = export.deserialize(data).call
    for ids in BATCHES:
        carry = step(carry, ids)
    _assert_equal(wrap, treedef.unflatten(carry)[0])


def store(wrap, tmp_path):
    """A table on the host and the dense leaf, each with the optimizer for itself."""
    params = _params(wrap)
    tx, labels = WRAPS[wrap](params), _labels(params)
    apart = _Step(optax.partition({"a": tx, "b": tx}, labels))
    with sj.store.KVStore() as kv:
        kv.init("t", np.asarray(params["t"]), tx)
        w: Any = {"w": params["w"]}
        state = tx.init(w)
        grad = jax.jit(sj.grad(_loss))
        for ids in BATCHES:
            grads = grad({"t": kv.pull("t", ids), **w}, ids)
            kv.push("t", grads["t"])
            updates, state = tx.update({"w": grads["w"]}, state, w)
            w = optax.apply_updates(w, updates)
        got = {"t": kv.pull_all("t"), **w}
    wanted = apart.train(params, apart.tx.init(params))[0]
    assert_trees_close(got, jax.device_get(wanted), rtol=2e-3, atol=2e-3)


class Place(NamedTuple):
    """Where a step runs: the title of its column, and the function that tries it."""

    title: str
    run: Callable[[str, pathlib.Path], None]


PLACES = {
    "in_place": Place("donated, jitted", in_place),
    "eager": Place("eager", eager),
    "scan": Place("`lax.scan`", scan),
    "nnx": Place("`nnx.Optimizer`", nnx_optimizer),
    "train_state": Place("`TrainState`", flax_train_state),
    "sharded": Place("`ShardedTable`", sharded_rows),
    "plan": Place("`plan(tx=)`", planned),
    "restore": Place("`parallel.restore`", save_and_restore),
    "export": Place("`jax.export`", exported),
    "explicit": Place("Explicit mesh", explicit_mesh),
    "store": Place("`KVStore`", store),
}
_ACCUMULATE = "accumulate(lazy(adamw))"
_BY_PATH = "Pass the transformation that the function chooses for this table."
_TREE = "pass the transformation, mask or capacity of this table"
REFUSED: dict[tuple[str, str], str] = {
    **{
        (_ACCUMULATE, place): "Shard the table by columns"
        for place in ("sharded", "restore", "explicit")
    },
    ("lazy(partition(function))", "store"): _BY_PATH,
    ("lazy(adamw(mask=))", "store"): _BY_PATH,
    ("lazy(chain(adam, ema))", "store"): "Take ema out of tx",
    ("lazy(partition(tree))", "store"): _TREE,
    ("partition of lazy", "store"): _TREE,
    (_ACCUMULATE, "store"): _TREE,
}
QUICK = {
    ("lazy(adam)", "in_place"),
    ("lazy(partition(function))", "restore"),
    (_ACCUMULATE, "nnx"),
    ("dynamic_loss_scale(lazy(adamw))", "sharded"),
    ("rowwise_adagrad", "export"),
}


def table() -> str:
    """The pairs as a table of Markdown; a letter stands for the words of an error."""
    words = list(dict.fromkeys(REFUSED.values()))
    letters = dict(zip(words, "abcdefgh"))
    lines = [
        "| | " + " | ".join(place.title for place in PLACES.values()) + " |",
        "|---|" + "---|" * len(PLACES),
    ]
    for wrap in WRAPS:
        refused = (REFUSED.get((wrap, place)) for place in PLACES)
        cells = (f"no [{letters[x]}]" if x else "yes" for x in refused)
        title = " of ".join(f"`{part}`" for part in wrap.split(" of "))
        lines.append(f"| {title} | " + " | ".join(cells) + " |")
    notes = [
        f"- [{letter}] The error says: {x.rstrip('.')}."
        for x, letter in letters.items()
    ]
    return "\n".join([*lines, "", *notes, ""])
