"""Checkpoints of sharded tables: other meshes and layouts, donation, kills."""

# optax's types know trees of arrays only.
# pyright: reportArgumentType=false

import functools
import itertools
import pathlib
import subprocess
import sys
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tensorstore

import sparsejax as sj
import worker
from helpers import assert_same_bits, assert_trees_close
from sparsejax.parallel import _checkpoint
from sparsejax.parallel._resharding import read_part
from sparsejax.parallel._row_layout import RowLayout


pytestmark = pytest.mark.multidevice

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parent.parent
LAYOUTS = ("mod", "block")
HEIGHT = 23


@functools.cache
def mesh_of(n):
    auto = (jax.sharding.AxisType.Auto,)
    return jax.make_mesh((n,), ("x",), axis_types=auto, devices=jax.devices()[:n])


def table_of(dtype: Any = np.float32, row_shape=(3,), height=HEIGHT):
    count = height * int(np.prod(row_shape))
    return np.arange(1, count + 1).reshape(height, *row_shape).astype(dtype)


def sharded(table, n, layout):
    return sj.parallel.shard_rows(table, mesh_of(n), "x", layout=layout)


def abstract(table, n, layout):
    spec = jax.ShapeDtypeStruct(table.shape, table.dtype)
    return sj.parallel.shard_rows(spec, mesh_of(n), "x", layout=layout)


def assert_same_table(actual, expected):
    """Stored alike, padding too, and on the same devices."""
    assert isinstance(actual, sj.parallel.ShardedTable)
    assert actual.shape == expected.shape and actual.layout == expected.layout
    assert actual.values.sharding == expected.values.sharding
    assert_same_bits(actual.values, expected.values)


# ------------------------------------------------------------------ layouts


def _by_definition(layout):
    """The id at each position, -1 in the padding."""
    ids = np.full(layout.shards * layout.per_shard, -1)
    for i in range(layout.height):
        shard, row = i % layout.shards, i // layout.shards
        ids[shard * layout.per_shard + row if layout.layout == "mod" else i] = i
    return ids


class _Stored:
    """As a tensorstore: read by slices. Remembers the most rows read at once."""

    def __init__(self, array, most=None):
        self.array, self.most = array, most if most is not None else []
        self.dtype = self

    numpy_dtype = property(lambda self: self.array.dtype)

    def __getitem__(self, index):
        self.most.append(len(self.array[index]))
        return _Stored(self.array[index], self.most)

    def read(self):
        return self

    def result(self):
        return self.array


@pytest.mark.parametrize("layouts", list(itertools.product(LAYOUTS, LAYOUTS)))
def test_rows_of_every_layout_are_found_in_every_other(layouts):
    for height, n, m in itertools.product(
        (0, 1, 7, 24, 61), (1, 2, 3, 4, 6), (1, 2, 4, 9)
    ):
        source, target = (RowLayout(height, k, l) for k, l in zip((n, m), layouts))
        stored, want = _Stored(_by_definition(source) + 1), _by_definition(target) + 1
        parts = [(k * target.per_shard, (k + 1) * target.per_shard) for k in range(m)]
        for start, stop in [*parts, (0, len(want)), (len(want) // 3, len(want) // 2)]:
            found = read_part(stored, source, target, [slice(start, stop)], want.shape)
            np.testing.assert_array_equal(found, want[start:stop])


def test_any_number_of_devices_and_either_layout(tmp_path):
    tables = {
        "f32": table_of(),
        "bf16": table_of(jnp.bfloat16, (2, 2)),
        "counts": table_of(np.int32, ()),
        "flags": table_of(np.int8).astype(bool),
    }
    every = list(itertools.product((1, 2, 3, 4), LAYOUTS))
    with sj.parallel.Checkpointer(tmp_path) as checkpoints:
        for step, (n, layout) in enumerate(every):
            tree = {k: sharded(t, n, layout) for k, t in tables.items()}
            checkpoints.save(step, {**tree, "plain": jnp.asarray(tables["f32"])})
        for step, (n, layout) in itertools.product(range(len(every)), every[::3]):
            like = {k: abstract(t, n, layout) for k, t in tables.items()}
            like["plain"] = abstract(tables["f32"], n, layout)
            restored = checkpoints.restore(like, step)
            for name, table in {**tables, "plain": tables["f32"]}.items():
                assert_same_table(restored[name], sharded(table, n, layout))
        like = jax.tree.map(jnp.asarray, {**tables, "plain": tables["f32"]})
        assert_trees_close(checkpoints.restore(like, 5), like)  # no longer sharded


def test_no_device_is_given_more_than_its_part(tmp_path, monkeypatch):
    table, parts, reads = table_of(height=1000), [], []

    def reading(stored, *args):
        seen = _Stored(np.asarray(stored.read().result()), reads)
        parts.append(read_part(seen, *args))
        return parts[-1]

    monkeypatch.setattr(_checkpoint, "read_part", reading)
    with sj.parallel.Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, sharded(table, 2, "mod"))
        for layout in LAYOUTS:
            restored = checkpoints.restore(abstract(table, 8, layout))
            assert_same_table(restored, sharded(table, 8, layout))
    assert [len(part) for part in parts] == [125] * 16 and max(reads) <= 125


def test_meshes_of_two_axes_explicit_axes_and_columns(tmp_path):
    table = table_of(row_shape=(4,))
    spec = jax.ShapeDtypeStruct(table.shape, table.dtype)
    kinds = jax.sharding.AxisType
    square = jax.make_mesh((2, 4), ("a", "b"), axis_types=(kinds.Auto,) * 2)
    explicit = jax.make_mesh((8,), ("x",), axis_types=(kinds.Explicit,))
    columns = sj.parallel.shard_columns(table, mesh_of(4), "x")
    with sj.parallel.Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, sj.parallel.shard_rows(table, square, "b"))
        for mesh, axis in ((square, ("b", "a")), (square, "a"), (explicit, "x")):
            restored = checkpoints.restore(sj.parallel.shard_rows(spec, mesh, axis))
            assert_same_table(restored, sj.parallel.shard_rows(table, mesh, axis))
        # What eval_shape gives over Explicit axes names a mesh without devices.
        params = sj.parallel.shard_rows(table, explicit, "x")
        like = jax.eval_shape(lambda: params)
        assert_same_table(checkpoints.restore(like), params)
        found = checkpoints.restore(columns)  # saved by rows
        assert found.sharding == columns.sharding
        assert_same_bits(found, table)
        nowhere = jax.sharding.AbstractMesh((8,), ("x",))
        with pytest.raises(ValueError, match="AbstractMesh, which has no devices"):
            checkpoints.restore(sj.parallel.shard_rows(spec, nowhere, "x"))


# ------------------------------------------------------------------ other leaves


def test_what_a_tree_may_hold(tmp_path, getkey):
    rows = sj.SelectedRows(jnp.array([2, 9]), jnp.ones((2, 3)), height=9)
    empty = sj.SelectedRows(jnp.zeros(0, jnp.int32), jnp.zeros((0, 3)), height=9)
    tree = {
        "rows": rows,
        "empty": empty,
        "segments": sj.SegmentTensor.from_lists([[1, 2], [], [3]]),
        "key": getkey(),
        "rbg": jax.random.split(jax.random.key(1, impl="rbg"), 3),
        "optimizer": optax.chain(optax.clip(1.0), optax.adam(0.1)).init(jnp.ones(3)),
        "split": jax.device_put(
            jnp.arange(8), jax.NamedSharding(mesh_of(4), jax.P("x"))
        ),
        "numbers": [True, 3, 2.5, np.int32(4), np.arange(3)],
        "a/b": None,
    }
    with sj.parallel.Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, tree)
        restored = checkpoints.restore(tree)
        abstract_tree = {**tree, "segments": jax.eval_shape(lambda: tree["segments"])}
        assert_trees_close(checkpoints.restore(abstract_tree)["rows"], rows)
        checkpoints.save(2, {"nothing": empty})
        assert checkpoints.restore({"nothing": empty})["nothing"].height == 9
    data = lambda k: (
        jax.random.key_data(k) if jnp.issubdtype(k.dtype, jax.dtypes.prng_key) else k
    )
    for key in ("key", "rbg"):
        assert restored[key].dtype == tree[key].dtype
        restored[key], tree[key] = data(restored[key]), data(tree[key])
    assert_trees_close(restored, tree)
    assert [type(x) for x in restored["numbers"]] == [type(x) for x in tree["numbers"]]
    assert restored["split"].sharding == tree["split"].sharding
    # Uncommitted, it goes with tables on any mesh.
    assert not restored["optimizer"][1][0].count.committed


def test_steps_data_and_max_to_keep(tmp_path):
    table = table_of()
    with sj.parallel.Checkpointer(tmp_path, max_to_keep=2) as checkpoints:
        assert checkpoints.latest_step() is None and checkpoints.all_steps() == []
        for step in (1, 5, 6):
            checkpoints.save(step, sharded(table + step, 2, "mod"), data={"at": step})
        checkpoints.wait()
        assert checkpoints.all_steps() == [5, 6] and checkpoints.latest_step() == 6
        with sj.parallel.Checkpointer(tmp_path, read_only=True) as reader:
            assert reader.restore_data(5) == {"at": 5}
            checkpoints.save(7, sharded(table + 7, 2, "mod"))
            checkpoints.wait()
            assert reader.latest_step() == 7  # it sees what came later
            assert_same_bits(reader.restore(jnp.asarray(table)), table + 7)
            with pytest.raises(ValueError, match="read_only=True"):
                reader.save(8, {})
        with pytest.raises(ValueError, match="step 7 was saved without data="):
            checkpoints.restore_data()


def test_state_goes_to_the_devices_of_its_table(tmp_path):
    """Wherever it is in the tree to restore into, as after a jitted `tx.init`."""
    table = sharded(table_of(), 4, "mod")
    tx = optax.chain(optax.trace(0.9), optax.scale_by_learning_rate(0.1))
    made = jax.tree.map(lambda x: x + 1, tx.init(table))
    one = lambda x: jax.device_put(np.zeros(x.shape, x.dtype), jax.devices()[3])
    uncommitted = lambda x: jnp.zeros(x.shape, x.dtype)
    saved = {"p": table, "s": made, "number": table.map(lambda x: jnp.ones(()))}
    with sj.parallel.Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, saved)
        # Also into tables of another mesh and layout.
        other = sharded(table_of(), 2, "block")
        for like in (table, other):
            for make in (one, uncommitted):
                tree = {"p": like, "s": tx.init(like), "number": saved["number"]}
                found = checkpoints.restore(
                    {**tree, "s": jax.tree.map(make, tree["s"])}
                )
                trace = found["s"][0].trace
                assert trace.values.sharding == like.values.sharding
                assert trace.values.committed and trace.layout == like.layout
                np.testing.assert_array_equal(trace.to_dense(), np.ones((HEIGHT, 3)))
                assert found["number"].values.shape == ()


# ------------------------------------------------------------------ training


def _training(n, layout):
    """(params, state, step) of a run on n devices; the step donates both."""
    table, dense = worker.initial()
    mesh = mesh_of(n)
    params = {
        "table": sj.parallel.shard_rows(table, mesh, "x", layout=layout),
        "dense": jnp.asarray(dense),
    }
    tx = sj.optim.lazy(optax.adam(0.1))
    step = functools.partial(worker.sharded_step, tx)
    return params, tx.init(params), jax.jit(step, donate_argnums=(0, 1))


def _run(params, state, step, batches):
    losses = []
    for ids, targets in batches:
        params, state, value = step(params, state, ids, targets)
        losses.append(np.asarray(value))
    return params, state, losses


@pytest.mark.slow
@pytest.mark.loose_promotion  # optax.adam
def test_training_goes_on_where_it_stopped(tmp_path):
    batches = list(worker.batches("zipf"))
    with sj.parallel.Checkpointer(tmp_path) as checkpoints:
        params, state, step = _training(2, "mod")
        params, state, _ = _run(params, state, step, batches[:2])
        checkpoints.save(2, (params, state), data={"batch": 2})
        *_, losses = whole = _run(params, state, step, batches[2:])

        # On the same mesh, to the last bit.
        fresh = _training(2, "mod")[:2]
        rest = batches[checkpoints.restore_data()["batch"] :]
        again = _run(*checkpoints.restore(fresh), step=step, batches=rest)
        for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(whole), strict=True):
            assert_same_bits(a, b)

        for n, layout in ((4, "block"), (1, "mod")):
            *fresh, step = _training(n, layout)
            restored = checkpoints.restore(tuple(fresh))
            found = _run(*restored, step=step, batches=rest)
            np.testing.assert_allclose(found[2], losses, rtol=1e-5, err_msg=f"{n}")


def test_a_save_holds_what_was_there_when_it_was_called(tmp_path, monkeypatch):
    """Writing is held up until the saved arrays were donated and overwritten."""
    step = jax.jit(lambda t: jax.tree.map(lambda x: x * 2, t), donate_argnums=0)
    # Larger than what is written without waiting, and made by a program: its own.
    make = lambda: {"t": sharded(table_of(height=2003), 4, "mod"), "w": jnp.ones(999)}
    tree, before = step(make()), step(make())
    held, may_write = threading.Event(), threading.Event()
    open_array, main = tensorstore.open, threading.current_thread()

    def held_open(*args, **kwargs):
        if threading.current_thread() is not main:
            held.set()
            assert may_write.wait(60)
        return open_array(*args, **kwargs)

    monkeypatch.setattr(tensorstore, "open", held_open)
    with sj.parallel.Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, tree)
        for _ in range(3):
            tree = step(tree)
        jax.block_until_ready(tree)
        waits, is_there = held.wait(60), (tmp_path / "1").exists()
        may_write.set()
        assert waits and not is_there  # nothing was written by then
        checkpoints.wait()
        restored = checkpoints.restore(before)
    for a, b in zip(jax.tree.leaves(restored), jax.tree.leaves(before), strict=True):
        assert_same_bits(a, b)


@pytest.mark.slow
def test_a_process_killed_while_it_saves_leaves_the_last_good_checkpoint(tmp_path):
    kills = 4
    done = subprocess.run(
        [sys.executable, HERE / "worker.py", "crash", tmp_path, str(kills)],
        cwd=ROOT,
        env={**worker.os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    # Each process that came after a kill checked what it found; and kills did hit.
    hits = [line for line in done.stdout.splitlines() if line.endswith(": 1")]
    assert hits and "Error" not in done.stderr, done.stdout + done.stderr
    with sj.parallel.Checkpointer(tmp_path) as checkpoints:
        steps = checkpoints.all_steps()
        assert len(steps) >= 1 and steps[-1] >= kills
        for step in steps:
            table = abstract(worker.contents(0)["table"], 4, "block")
            restored = checkpoints.restore({"table": table, "step": 0}, step)
            want = worker.contents(step)
            assert restored["step"] == step
            assert_same_table(restored["table"], sharded(want["table"], 4, "block"))
    assert not list(tmp_path.glob("*tmp*"))  # cut short, and cleared away
