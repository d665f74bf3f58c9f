"""Our types through export, files and copies; a training step that runs elsewhere.

Each cell of the table of types by ways, `tests/docs/types_by_ways.md`, is run here.
"""

# optax's types know trees of arrays only.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportIndexIssue=false
# pyright: reportUnusedExpression=false

import copy
import dataclasses
import functools
import os
import pickle
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import export

import sparsejax as sj
from helpers import ROOT, assert_same_bits, run_python, slow_but


# ------------------------------------------------------------------ types by ways

ADAM = optax.adam(0.1)
LAZY = sj.optim.lazy(ADAM)
OPTIMIZERS = {
    "lazy": LAZY,
    "ema": sj.optim.lazy(optax.chain(ADAM, sj.optim.ema(0.9))),
    "rounding": sj.optim.rounding(LAZY, master=True),
    "dynamic_loss_scale": sj.optim.dynamic_loss_scale(LAZY),
    "ftrl": sj.optim.lazy(sj.optim.ftrl(0.1)),
    "adagrad": sj.optim.lazy(sj.optim.adagrad(0.1)),
    "rowwise_adagrad": sj.optim.lazy(sj.optim.rowwise_adagrad(0.1)),
    "rowwise_adam": sj.optim.lazy(sj.optim.rowwise_adam(0.1)),
    "row_count_adam": sj.optim.lazy(sj.optim.row_count_adam(0.1)),
    "weight_decay": sj.optim.lazy(optax.chain(ADAM, sj.optim.weight_decay(0.1))),
    "exact": sj.optim.exact(ADAM),
}
IDS, OTHERS = np.array([3, 1, 3], np.int32), np.array([6, 0, 1], np.int32)
TABLE = np.arange(160, dtype=np.float32).reshape(40, 4)
KEYS = np.array([70, 50, 70, 10, 20])
SHARDED = "`ShardedTable`"


def numbered(tree):
    """Other numbers in each leaf, so that leaves cannot be taken for each other."""
    fill = lambda k, x: jnp.full_like(x, k) if k else x
    leaves, treedef = jax.tree.flatten(tree)
    return treedef.unflatten(fill(k % 100, x) for k, x in enumerate(leaves))


@functools.cache
def things():
    """By row of the table in the docs, a tree of that type."""
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((2,), ("x",), axis_types=auto, devices=jax.devices()[:2])
    collection = sj.nn.EmbeddingCollection({"a": (50, 4), "b": (70, 4)})
    accumulate = sj.optim.accumulate(LAZY, 2, 3)
    init = lambda table: {name: tx.init(table) for name, tx in OPTIMIZERS.items()}
    loss = lambda t: jnp.sum(sj.lookup(t, OTHERS) ** 2)
    store = sj.store.KVStore()
    store.init("t", TABLE, ADAM)
    pulled = store.pull("t", [3, 7])
    index, _, _ = sj.HashIndex.create(3).insert(KEYS.astype(np.int32), step=7)
    wide = sj.HashIndex.create(3, key_bits=64, policy="lfu", admit_after=2)
    sampler = sj.losses.NegativeSampler.from_counts([8, 0, 1, 1])
    sharded = sj.parallel.shard_rows(TABLE, mesh, "x")
    lists: Any = [[[10, 11], [101]], [[11]]]
    return {
        "parameters of layers, modules and `EmbeddingCollection`": jax.jit(
            collection.init
        )(jax.random.key(0)),
        "states of `sj.optim`": jax.jit(lambda t: numbered(init(t)))(TABLE[:4]),
        "state of `sj.optim.accumulate`": jax.jit(
            lambda t: numbered(accumulate.init(t))
        )(TABLE[:4]),
        "`SelectedRows`": {
            "gradient": jax.jit(sj.grad(loss, tables=True))(TABLE),
            "stack": jax.jit(sj.grad(lambda t: loss(t[1])))(np.stack([TABLE, TABLE])),
            "empty slots": sj.SelectedRows(
                jnp.array([4, 2**20]), jnp.array([[1.0], [jnp.nan]]), 2**20
            ),
        },
        "rows of `KVStore.pull`, `PulledTables`": {
            "pulled": pulled,
            "tables": sj.nn.PulledTables({"t": pulled}, owner="Model"),
        },
        "`SegmentTensor`": {
            "nested": sj.SegmentTensor.from_lists(lists),
            "unsorted": sj.SegmentTensor(jnp.arange(3), jnp.array([1, 0, 1]), 2, False),
        },
        "`QuantizedTable`": [sj.quantize(jnp.asarray(TABLE), bits=b) for b in (8, 2)],
        "`HashIndex`": {"default": index, "with a sketch": jax.jit(numbered)(wide)},
        "`NegativeSampler`, its samples": {
            "of": [sampler, sj.losses.NegativeSampler.log_uniform(9)],
            "drawn": jax.jit(lambda: sampler.sample(jax.random.key(0), 2))(),
        },
        SHARDED: sharded,
        "gradient of a `ShardedTable`": jax.jit(sj.grad(loss, tables=True))(sharded),
    }


# By row of the table: what a user does next. The other trees are only compared.
USES = {
    "`SelectedRows`": lambda g: g["stack"].to_dense()[1] - g["gradient"],
    "rows of `KVStore.pull`, `PulledTables`": lambda x: x["tables"]["t"].get([7]),
    "`SegmentTensor`": lambda x: x["unsorted"].lengths,
    "`QuantizedTable`": lambda tables: [sj.lookup(t, IDS) for t in tables],
    "`HashIndex`": lambda x: x["default"].find(jnp.array(KEYS)),
    "`NegativeSampler`, its samples": lambda x: x["of"][0].sample(jax.random.key(0), 2),
    SHARDED: lambda table: table[IDS],
    "gradient of a `ShardedTable`": lambda g: optax.apply_updates(things()[SHARDED], g),
}


def through_orbax(tree, folder):
    ocp = pytest.importorskip("orbax.checkpoint", reason="orbax is not installed")
    like = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "orbax", tree)
        checkpointer.wait_until_finished()
        return checkpointer.restore(folder / "orbax", jax.tree.map(like, tree))


def through_parallel(tree, folder):
    pytest.importorskip("orbax.checkpoint", reason="orbax is not installed")
    sj.parallel.save(folder / "sparsejax", tree)
    return sj.parallel.restore(folder / "sparsejax", tree)


def through_pickle(tree, folder):
    return pickle.loads(pickle.dumps(tree))


def through_deepcopy(tree, folder):
    is_ours = lambda x: not isinstance(x, (dict, list))
    return copy.deepcopy(jax.tree.map(copy.copy, tree, is_leaf=is_ours))


def through_device_put(tree, folder):
    return jax.device_put(jax.device_get(tree))


def through_nnx(tree, folder):
    nnx = pytest.importorskip("flax.nnx", reason="flax is not installed")

    class Module(nnx.Module):
        def __init__(self):
            self.held = nnx.Variable(tree)

    graph, state = nnx.split(Module())
    held: Any = nnx.merge(graph, through_device_put(state, folder)).held
    # As in `sj.nn.nnx`: flax 0.11 has no get_value.
    return held.get_value() if hasattr(held, "get_value") else held.value


def through_numpy(tree, folder):
    leaves, treedef = jax.tree.flatten(tree)
    np.savez(folder / "leaves.npz", *map(np.asarray, leaves))
    with np.load(folder / "leaves.npz") as file:
        return treedef.unflatten(jnp.asarray(file[name]) for name in file.files)


def through_export(tree, folder):
    exported = export.export(jax.jit(lambda tree: tree))(tree)
    return export.deserialize(exported.serialize()).call(tree)


def through_equinox(tree, folder):
    eqx = pytest.importorskip("equinox")
    eqx.tree_serialise_leaves(folder / "tree.eqx", tree)
    return eqx.tree_deserialise_leaves(folder / "tree.eqx", tree)


def through_flax(tree, folder):
    serialization = pytest.importorskip("flax.serialization")
    assert sj.nn.flax.Layer  # imports the module, which registers our types
    return serialization.from_bytes(tree, serialization.to_bytes(tree))


# By column of the table: the ways, and what their errors say.
WAYS = {
    "orbax, `sj.parallel.save`": ([through_orbax, through_parallel], ""),
    "`pickle`": ([through_pickle], r"parallel\.save, or pickle table\.to_dense\(\)"),
    "`copy.deepcopy`, `jax.device_put`": (
        [through_deepcopy, through_device_put, through_nnx],
        "",
    ),
    "leaves by NumPy": ([through_numpy], "key_data|PRNG"),
    "`jax.export`": ([through_export], r"a function of table\.to_dense\(\)"),
    "equinox": ([through_equinox], "key_data|PRNG"),
    "flax": ([through_flax], r"parallel\.save, or serialize table\.to_dense\(\)"),
}


@functools.cache
def documented():
    """The table in the docs: by column and row, "yes" or "no"."""
    text = (ROOT / "tests/docs/types_by_ways.md").read_text()
    lines = [x.strip("| ").split("|") for x in text.splitlines() if x.startswith("|")]
    head, _, *rows = [[cell.strip() for cell in line] for line in lines]
    return {
        column: {row: cells[k] for row, *cells in rows}
        for k, column in enumerate(head[1:])
    }


def assert_same(actual, expected):
    """The same trees of the same types, and the same bits."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert x.dtype == y.dtype
        assert_same_bits(*map(as_words, (x, y)))


def as_words(x):
    is_opaque = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(x) if is_opaque else x


@pytest.mark.usefixtures("loose_promotion", "eight_devices")
@pytest.mark.filterwarnings("ignore")  # the warnings of orbax are not ours
@pytest.mark.parametrize("column", slow_but(WAYS, *list(WAYS)[1:]))
def test_each_type_by_each_way(column, tmp_path):
    assert list(documented()) == list(WAYS)
    (ways, refusal), cells = WAYS[column], documented()[column]
    assert list(cells) == list(things()) and {*cells.values()} <= {"yes", "no"}
    accepted = {row: tree for row, tree in things().items() if cells[row] == "yes"}
    for way in ways:
        after = way(accepted, tmp_path)
        assert_same(after, accepted)
        for row in USES.keys() & accepted.keys():
            use = jax.jit(USES[row])
            assert_same(use(after[row]), use(accepted[row]))
        for row in cells.keys() - accepted.keys():
            with pytest.raises(Exception) as caught:
                way(things()[row], tmp_path)
            error, said = caught.value, []
            while error is not None:
                said.append(str(error))
                error = error.__cause__ or error.__context__
            assert re.search(refusal, "\n".join(said)), row


@pytest.mark.usefixtures("loose_promotion", "eight_devices")
@pytest.mark.parametrize("way", [through_numpy, through_equinox])
def test_what_refuses_row_ids_accepts_their_words(way, tmp_path):
    """As the page writes them."""
    leaves, treedef = jax.tree.flatten(things())
    words = way([as_words(x) for x in leaves], tmp_path)
    wrap = lambda x, like: jax.random.wrap_key_data(x, impl=jax.random.key_impl(like))
    again = [
        x if as_words(like) is like else wrap(x, like)
        for x, like in zip(words, leaves, strict=True)
    ]
    assert_same(treedef.unflatten(again), things())


def test_flax_refuses_a_target_of_another_kind():
    serialization = pytest.importorskip("flax.serialization")
    assert sj.nn.flax.Layer
    saved = serialization.to_bytes(sj.HashIndex.create(5))
    with pytest.raises(ValueError, match="saved HashIndex has other leaves"):
        serialization.from_bytes(sj.HashIndex.create(6), saved)


@pytest.mark.window
@pytest.mark.usefixtures("loose_promotion", "eight_devices")
def test_a_sharded_table_is_exported_by_its_values():
    """As the refusal says."""
    table = things()[SHARDED]
    fun = lambda values: dataclasses.replace(table, values=values)[IDS]
    exported = export.export(jax.jit(fun))(table.values)
    again = export.deserialize(exported.serialize())
    assert_same_bits(again.call(table.values), TABLE[IDS])


@pytest.mark.window
def test_what_holds_threads_and_files_is_not_copied():
    store = sj.store.KVStore()
    store.init("t", TABLE, ADAM)
    cache = sj.store.CachedTable(store, "t", 4)
    block = sj.nn.SparseEmbedding(9, 2, name="rows")
    loss = lambda rows, _: jnp.sum(rows)
    trainer = sj.nn.Trainer(block, sj.store.KVStore(), loss, ADAM)
    for x in (store, cache, trainer):
        for way in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(TypeError, match=r"cannot be copied or pickled.*save"):
                way(x)


# ------------------------------------------------------------------ a whole step

TX = sj.optim.lazy(
    optax.chain(
        optax.clip_by_global_norm(1.0),
        sj.optim.ftrl(0.1, l1=1e-3),
        optax.scale_by_schedule(lambda _: 0.5),
    )
)


def step(params, state, baskets, y):
    def loss(params):
        pooled = sj.embedding_bag(params["table"], baskets, combiner="mean")
        return jnp.mean((pooled @ params["w"] - y) ** 2)

    value, grads = sj.value_and_grad(loss)(params)
    updates, state = TX.update(grads, state, params)
    return optax.apply_updates(params, updates), state, value, grads["table"]


RUN = """
import pickle
import jax
import sparsejax

exported = jax.export.deserialize(open("step", "rb").read())
args = jax.device_put(pickle.load(open("args", "rb")))
out = jax.jit(exported.call, donate_argnums=(0, 1))(*args)
pickle.dump(jax.device_get(out), open("out", "wb"))
"""


@pytest.mark.usefixtures("loose_promotion")
@pytest.mark.slow
def test_exported_step_runs_elsewhere(tmp_path):
    """In a process without the model's code, bit for bit.

    A program for several platforms chooses among their lowerings by a branch, which XLA
    takes away only after it has simplified what is around it. Effects of that
    order, such as a division that becomes a product, would show in the last bit.
    """
    params = {
        "table": np.random.default_rng(0).normal(size=(1000, 64)).astype(np.float32),
        "w": np.ones(64, np.float32),
    }
    baskets = sj.SegmentTensor.from_lists([[1, 2], [3], [4, 5, 6]], capacity=8)
    y = np.arange(3, dtype=np.float32)
    args = jax.device_get((params, jax.jit(TX.init)(params), baskets, y))
    jitted = jax.jit(step, donate_argnums=(0, 1))
    exported = export.export(jitted, platforms=("cpu", "cuda", "tpu"))(*args)
    (tmp_path / "step").write_bytes(exported.serialize())
    (tmp_path / "args").write_bytes(pickle.dumps(args))
    run_python("-c", RUN, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)})
    here = jitted(*args)
    assert_same(pickle.loads((tmp_path / "out").read_bytes()), here)
    one = export.deserialize(export.export(jax.jit(step))(*args).serialize())
    assert_same(one.call(*args), here)
