"""Checkpoints of sharded tables: other meshes and layouts, donation, kills, errors."""

# optax's types know trees of arrays only.
# pyright: reportArgumentType=false

import shutil
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import tensorstore

import sparsejax as sj
from helpers import assert_same_bits, assert_trees_close, whole
from one_device import mesh_of, place
from sparsejax.parallel import _checkpoint


pytestmark = pytest.mark.usefixtures("eight_devices")

HEIGHT = 23
BY_TABLE = sj.parallel.TableWise((10, 1, 12), (1, 0, 3), 4)


def numbers(dtype: Any = np.float32, row_shape=(3,), height=HEIGHT):
    count = height * int(np.prod(row_shape))
    return np.arange(1, count + 1).reshape(height, *row_shape).astype(dtype)


def sharded(table, n, layout, **options):
    return sj.parallel.shard_rows(table, mesh_of(n), "x", layout=layout, **options)


def abstract(table, n, layout):
    return sharded(jax.ShapeDtypeStruct(table.shape, table.dtype), n, layout)


def assert_same_table(actual, expected):
    """Stored alike, padding too, and on the same devices."""
    assert isinstance(actual, sj.parallel.ShardedTable)
    assert actual.shape == expected.shape and actual.layout == expected.layout
    assert actual.values.sharding == expected.values.sharding
    assert_same_bits(actual.values, expected.values)


# ------------------------------------------------------------------ layouts


@pytest.mark.slow
def test_any_number_of_devices_and_any_layout(tmp_path):
    tables = {
        "f32": numbers(),
        "bf16": numbers(jnp.bfloat16, (2, 2)),
        "flags": numbers(np.int8, ()).astype(bool),
        "narrow": np.float32(1 / 3) * numbers(),  # on the wire only
    }
    plain = jnp.asarray(tables["f32"])
    every = [(1, "mod"), (3, "mod"), (4, "block"), (4, BY_TABLE)]
    others = [(4, BY_TABLE), (1, "block"), (8, "block"), (2, "mod")]
    with ocp.CheckpointManager(tmp_path) as manager:
        for step, (n, layout) in enumerate(every):
            saved = tables if step >= 2 else {"f32": tables["f32"]}
            tree = {k: sharded(t, n, layout) for k, t in saved.items()}
            if "narrow" in saved:
                wire = dict(wire_dtype="bfloat16")
                tree["narrow"] = sharded(tables["narrow"], n, layout, **wire)
            sj.parallel.save(manager, tree | {"plain": plain}, step=step)
            for n, layout in (others[step], others[step - 1]):
                like = {k: abstract(t, n, layout) for k, t in saved.items()}
                like["plain"] = abstract(plain, n, layout)
                restored = sj.parallel.restore(manager, like, step=step)
                for name, table in {**saved, "plain": plain}.items():
                    assert_same_table(restored[name], sharded(table, n, layout))
        like = jax.tree.map(jnp.asarray, {**tables, "plain": plain})
        found = sj.parallel.restore(manager, like, step=2)  # no longer sharded
        assert_trees_close(found, like)


def test_orbax_alone_reads_the_rows_in_the_order_of_ids(tmp_path):
    table, path = numbers(), tmp_path / "checkpoint"
    for n, layout in ((4, "mod"), (3, "block")):
        sj.parallel.save(path / layout, {"t": sharded(table, n, layout)})
        as_numpy = {"t": ocp.RestoreArgs(restore_type=np.ndarray)}
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            args = ocp.args.PyTreeRestore(restore_args=as_numpy)
            found = checkpointer.restore(path / layout, args=args)["t"]
        assert_same_bits(found[:HEIGHT], table)
        assert len(found) == 24 and not found[HEIGHT:].any()


@pytest.mark.parametrize("name", ["_to_blocks", "_from_blocks"])
def test_no_device_is_given_more_than_its_part(name):
    """8 devices own 1,000 rows each; with an all-gather one would have all 8,000."""
    by_table = sj.parallel.TableWise((1000,) * 8, (3, 2, 1, 0, 7, 6, 5, 4), 8)
    move = getattr(_checkpoint, name)
    for layout in ("mod", by_table):
        table = abstract(numbers(height=8000), 8, layout)
        text = move.lower(table).compile().as_text()
        assert "all-to-all" in text and "8000,3]" not in text
        assert "all-gather" not in text


def test_meshes_of_two_axes_explicit_axes_and_columns(tmp_path):
    table = numbers(row_shape=(4,))
    spec = jax.ShapeDtypeStruct(table.shape, table.dtype)
    square = mesh_of((2, 4), ("a", "b"))
    explicit = mesh_of(8, kind=jax.sharding.AxisType.Explicit)
    places = [(square, ("b", "a")), (square, "b"), (explicit, "x")]
    for k, (mesh, axis) in enumerate(places[1:]):
        path, params = tmp_path / f"{k}", sj.parallel.shard_rows(table, mesh, axis)
        sj.parallel.save(path, params)
        likes = [sj.parallel.shard_rows(spec, *there) for there in places]
        # The results of eval_shape over Explicit axes name a mesh without devices.
        for like, there in zip(
            [*likes, jax.eval_shape(lambda x: x, params)], [*places, (mesh, axis)]
        ):
            restored = sj.parallel.restore(path, like)
            assert_same_table(restored, sj.parallel.shard_rows(table, *there))
    columns = sj.parallel.shard_columns(table, mesh_of(4), "x")
    found = sj.parallel.restore(path, columns)  # saved by rows
    assert found.sharding == columns.sharding
    assert_same_bits(found, table)


# ------------------------------------------------------------------ other leaves


def test_what_a_tree_may_hold(tmp_path):
    rows = sj.SelectedRows(jnp.array([2, 9]), jnp.ones((2, 3)), height=9)
    empty = sj.SelectedRows(jnp.zeros(0, jnp.int32), jnp.zeros((0, 3)), height=9)
    tree = {
        "rows": rows,
        "empty": empty,
        "segments": sj.SegmentTensor.from_lists([[1, 2], [], [3]]),
        "key": jax.random.key(1),
        "rbg": jax.random.split(jax.random.key(1, impl="rbg"), 3),
        "optimizer": optax.chain(optax.clip(1.0), optax.adam(0.1)).init(jnp.ones(3)),
        "split": place(mesh_of(4), jnp.arange(8), "x"),
        "numbers": [True, 3, 2.5, np.int32(4), np.arange(3)],
        "a/b": None,
    }
    sj.parallel.save(tmp_path / "a", tree)
    like = {**tree, "segments": jax.eval_shape(lambda: tree["segments"])}
    restored = sj.parallel.restore(tmp_path / "a", like)
    assert restored["empty"].height == 9 and restored["empty"].values.shape == (0, 3)
    for key in ("key", "rbg"):
        assert restored[key].dtype == tree[key].dtype
        for each in (restored, tree):
            each[key] = jax.random.key_data(each[key])
    assert_trees_close(restored, tree)
    assert [type(x) for x in restored["numbers"]] == [type(x) for x in tree["numbers"]]
    assert restored["split"].sharding == tree["split"].sharding
    # Uncommitted, it goes with tables on any mesh.
    assert not restored["optimizer"][1][0].count.committed


@pytest.mark.filterwarnings("ignore")  # of orbax's threads, whose errors are raised
def test_steps_and_metadata_are_those_of_the_manager(tmp_path, caplog):
    table, like = numbers(), jnp.asarray(numbers())
    options = ocp.CheckpointManagerOptions(max_to_keep=2, save_interval_steps=5)
    with ocp.CheckpointManager(tmp_path, options=options) as manager:
        for step in (5, 10, 15):
            tree, at = sharded(table + step, 2, "mod"), {"at": step}
            assert sj.parallel.save(manager, tree, step=step, custom_metadata=at)
        assert not sj.parallel.save(manager, tree, step=16)  # by its options
        manager.wait_until_finished()
        assert manager.all_steps() == [10, 15]
        assert manager.metadata(10).custom_metadata["at"] == 10
        assert_same_bits(sj.parallel.restore(manager, like, step=10), table + 10)
        with pytest.raises(FileNotFoundError, match="step 5"):
            sj.parallel.restore(manager, like, step=5)
    with ocp.CheckpointManager(tmp_path) as manager:  # a new one, without a warning
        caplog.clear()
        assert_same_bits(sj.parallel.restore(manager, like), table + 15)
        assert not caplog.records


def test_state_goes_to_the_devices_of_its_table(tmp_path):
    """Wherever it is in the tree to restore into, as after a jitted `tx.init`."""
    table = sharded(numbers(), 4, "mod")
    tx = optax.chain(optax.trace(0.9), optax.scale_by_learning_rate(0.1))
    made, number = jax.tree.map(lambda x: x + 1, tx.init(table)), jnp.ones(())
    saved = {"p": table, "s": made, "number": table.map(lambda x: number)}
    sj.parallel.save(tmp_path / "a", saved)
    one = lambda x: jax.device_put(np.zeros(x.shape, x.dtype), jax.devices()[3])
    uncommitted = lambda x: jnp.zeros(x.shape, x.dtype)
    other = sharded(numbers(), 2, "block")  # another mesh and layout
    for like, make in ((table, one), (table, uncommitted), (other, one)):
        state = jax.tree.map(make, tx.init(like))
        tree = {"p": like, "s": state, "number": saved["number"]}
        found = sj.parallel.restore(tmp_path / "a", tree)
        trace = found["s"][0].trace
        assert trace.values.sharding == like.values.sharding
        assert trace.values.committed and trace.layout == like.layout
        np.testing.assert_array_equal(whole(trace), np.ones((HEIGHT, 3)))
        assert found["number"].values.shape == ()


@pytest.mark.usefixtures("loose_promotion")  # optax.adam
def test_state_of_a_label_function_in_any_layout(tmp_path):
    # Labels by path mask a table as ShardedTable(MaskedNode()), an array as MaskedNode.
    def labels(params):
        label = lambda path, _: "b" if "'w'" in jax.tree_util.keystr(path) else "a"
        return jax.tree_util.tree_map_with_path(label, params)

    parts = {"a": optax.adam(0.1), "b": optax.adam(0.2)}
    tx, table = sj.optim.lazy(optax.partition(parts, labels)), numbers()
    tables = sharded(table, 4, "mod"), jnp.asarray(table), sharded(table, 2, "block")
    trees = [(params := {"t": t, "w": jnp.ones(3)}, tx.init(params)) for t in tables]
    for k, saved in enumerate(trees):
        sj.parallel.save(tmp_path / f"{k}", saved)
        restored = sj.parallel.restore(tmp_path / f"{k}", trees[k - 1])
        jax.tree.map(assert_same_bits, restored, trees[k - 1])


def test_a_save_holds_what_was_there_when_it_was_called(tmp_path, monkeypatch):
    """Writing is held up until the saved arrays were donated and overwritten.

    If the process is killed before it ends, the save before is the latest.
    """
    step = jax.jit(lambda t: jax.tree.map(lambda x: x * 2, t), donate_argnums=0)
    # Larger than a write without waiting, and made by a program: its own buffer.
    make = lambda: {"t": sharded(numbers(height=2003), 4, "mod"), "w": jnp.ones(999)}
    first, tree, before = make(), step(make()), step(make())
    held, may_write = threading.Event(), threading.Event()
    open_array, main = tensorstore.open, threading.current_thread()

    def held_open(*args, **kwargs):
        if threading.current_thread() is not main:
            held.set()
            assert may_write.wait(60)
        return open_array(*args, **kwargs)

    run, killed = tmp_path / "run", tmp_path / "killed"
    with ocp.CheckpointManager(run) as manager:
        sj.parallel.save(manager, first, step=1)
        manager.wait_until_finished()
        monkeypatch.setattr(tensorstore, "open", held_open)
        sj.parallel.save(manager, tree, step=2)
        for _ in range(3):
            tree = step(tree)
        jax.block_until_ready(tree)
        waits = held.wait(60)
        shutil.copytree(run, killed)  # all that is on disk
        may_write.set()
        manager.wait_until_finished()
        restored = sj.parallel.restore(manager, before)
    jax.tree.map(assert_same_bits, restored, before)
    assert waits and list(killed.glob("2*orbax-checkpoint-tmp*"))
    with ocp.CheckpointManager(killed) as manager:
        assert manager.latest_step() == 1
        restored = sj.parallel.restore(manager, before)
    jax.tree.map(assert_same_bits, restored, first)


# ------------------------------------------------------------------ errors


def test_a_refused_save_changes_nothing(tmp_path):
    tree, path = {"w": jnp.ones(3)}, tmp_path / "a"
    for bad in (abstract(numbers(), 2, "mod"), numbers):
        with pytest.raises(TypeError):
            sj.parallel.save(path, {**tree, "bad": bad})
    for good in (jnp.ones(3), sharded(numbers(), 2, "mod")):
        with pytest.raises(TypeError):
            jax.jit(lambda x: sj.parallel.save(path, {"w": x}))(good)
    assert not path.exists()
    sj.parallel.save(path, tree)
    with pytest.raises(ValueError, match="exists"):  # orbax's own words
        sj.parallel.save(path, {"w": jnp.zeros(3)})
    assert_trees_close(sj.parallel.restore(path, tree), tree)


@pytest.mark.slow
def test_other_values_are_refused(tmp_path):
    """Well formed files, of a tree that differs in one number of one leaf."""

    def change(x):
        changed = np.array(x)
        changed[1, 1] = changed[1, 1] == 0 if x.dtype == bool else changed[1, 1] + 1
        return jax.device_put(changed, x.sharding)

    rows = sj.SelectedRows(jnp.array([2, 5]), jnp.ones((2, 3)), height=9)
    held = sharded(numbers(), 4, "mod"), sharded(numbers(), 4, "block")
    pairs: dict[str, Any] = {
        **{f"table {k}": (t, t.map(change)) for k, t in enumerate(held)},
        "rows": (rows, rows.map(change)),
        "host": (np.arange(9.0), np.arange(1.0, 10.0)),
        "scalar": (jnp.float32(2), jnp.float32(3)),
        "number": (7, 8),
        "key": (jax.random.key(3), jax.random.key(4)),
    }
    for name in "bool", "int4", "int8", "bfloat16", "float32", "complex64", "uint32":
        x = jnp.asarray(np.tile(np.arange(2), (3, 100)).astype(jnp.dtype(name)))
        pairs[name] = x, change(x)
    tree = {name: pair[0] for name, pair in pairs.items()}
    sj.parallel.save(tmp_path / "whole", tree)
    metadata = "_CHECKPOINT_METADATA"
    moved = {"table 0": abstract(numbers(), 3, "block")}
    for name, (_, changed) in pairs.items():
        path = tmp_path / name
        sj.parallel.save(path, {**tree, name: changed})
        shutil.copy(tmp_path / "whole" / metadata, path / metadata)
        with pytest.raises(ValueError, match=f"'{name}'"):
            sj.parallel.restore(path, {**tree, **moved})


def test_another_tree_is_refused(tmp_path):
    table = numbers()
    rows = lambda height: sj.SelectedRows(jnp.array([1]), jnp.ones((1, 2)), height)
    position = lambda layout: sharded(table, 2, layout).map(lambda _: rows(24))
    # Gradients name rows by position, which is another row in another layout.
    tree = {"t": sharded(table, 2, "mod"), "g": rows(5), "p": position("mod")}
    sj.parallel.save(tmp_path / "a", tree)
    for wrong, word in (
        # Both are stored as 24 rows.
        ({"t": abstract(numbers(height=24), 4, "mod")}, "'t'"),
        ({"t": abstract(numbers(np.int32), 4, "mod")}, "'t'"),
        ({"g": rows(6)}, "height"),
        ({"p": position("block")}, "layout"),
    ):
        with pytest.raises(ValueError, match=word):
            sj.parallel.restore(tmp_path / "a", {**tree, **wrong})
    assert_trees_close(sj.parallel.restore(tmp_path / "a", tree)["p"], tree["p"])
