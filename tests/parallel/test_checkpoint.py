"""Checkpoints of sharded tables: other meshes and layouts, donation, kills, errors."""

# optax's types know trees of arrays only.
# pyright: reportArgumentType=false

import functools
import itertools
import pathlib
import shutil
import subprocess
import sys
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
import worker
from helpers import assert_same_bits, assert_trees_close
from sparsejax.parallel import _checkpoint


pytestmark = pytest.mark.usefixtures("eight_devices")

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


def test_any_number_of_devices_and_either_layout(tmp_path):
    tables = {
        "f32": table_of(),
        "bf16": table_of(jnp.bfloat16, (2, 2)),
        "counts": table_of(np.int32, ()),
        "flags": table_of(np.int8).astype(bool),
    }
    every = [(1, "mod"), (3, "mod"), (4, "block")]
    others = [(1, "block"), (2, "mod"), (4, "block")]
    with ocp.CheckpointManager(tmp_path) as manager:
        for step, (n, layout) in enumerate(every):
            tree = {k: sharded(t, n, layout) for k, t in tables.items()}
            tree["plain"] = jnp.asarray(tables["f32"])
            sj.parallel.save(manager, tree, step=step)
        for step, (n, layout) in itertools.product(range(len(every)), others):
            like = {k: abstract(t, n, layout) for k, t in tables.items()}
            like["plain"] = abstract(tables["f32"], n, layout)
            restored = sj.parallel.restore(manager, like, step=step)
            for name, table in {**tables, "plain": tables["f32"]}.items():
                assert_same_table(restored[name], sharded(table, n, layout))
        like = jax.tree.map(jnp.asarray, {**tables, "plain": tables["f32"]})
        found = sj.parallel.restore(manager, like, step=2)  # no longer sharded
        assert_trees_close(found, like)


def test_orbax_alone_reads_the_rows_in_the_order_of_ids(tmp_path):
    table, path = table_of(), tmp_path / "checkpoint"
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
        table = abstract(table_of(height=8000), 8, layout)
        text = move.lower(table).compile().as_text()
        assert "all-to-all" in text and "8000,3]" not in text
        assert "all-gather" not in text


def test_meshes_of_two_axes_explicit_axes_and_columns(tmp_path):
    table = table_of(row_shape=(4,))
    spec = jax.ShapeDtypeStruct(table.shape, table.dtype)
    kinds = jax.sharding.AxisType
    square = jax.make_mesh((2, 4), ("a", "b"), axis_types=(kinds.Auto,) * 2)
    explicit = jax.make_mesh((8,), ("x",), axis_types=(kinds.Explicit,))
    columns = sj.parallel.shard_columns(table, mesh_of(4), "x")
    for k, (mesh, axis) in enumerate([(square, "b"), (explicit, "x")]):
        path = tmp_path / f"{k}"
        sj.parallel.save(path, sj.parallel.shard_rows(table, mesh, axis))
        for mesh, axis in ((square, ("b", "a")), (square, "a"), (explicit, "x")):
            like = sj.parallel.shard_rows(spec, mesh, axis)
            restored = sj.parallel.restore(path, like)
            assert_same_table(restored, sj.parallel.shard_rows(table, mesh, axis))
        # The results of eval_shape over Explicit axes name a mesh without devices.
        params = sj.parallel.shard_rows(table, explicit, "x")
        like = jax.eval_shape(lambda x: x, params)
        assert_same_table(sj.parallel.restore(path, like), params)
        found = sj.parallel.restore(path, columns)  # saved by rows
        assert found.sharding == columns.sharding
        assert_same_bits(found, table)


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
    sj.parallel.save(tmp_path / "a", tree)
    restored = sj.parallel.restore(tmp_path / "a", tree)
    abstract_tree = {**tree, "segments": jax.eval_shape(lambda: tree["segments"])}
    found = sj.parallel.restore(tmp_path / "a", abstract_tree)
    assert_trees_close(found["rows"], rows)
    sj.parallel.save(tmp_path / "b", {"nothing": empty})
    found = sj.parallel.restore(tmp_path / "b", {"nothing": empty})["nothing"]
    assert found.height == 9 and found.values.shape == (0, 3)
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


def test_steps_and_metadata_are_those_of_the_manager(tmp_path):
    table = table_of()
    options = ocp.CheckpointManagerOptions(max_to_keep=2, save_interval_steps=5)
    with ocp.CheckpointManager(tmp_path, options=options) as manager:
        with pytest.raises(FileNotFoundError):
            sj.parallel.restore(manager, jnp.asarray(table))
        for step in (5, 10, 15):
            tree, at = sharded(table + step, 2, "mod"), {"at": step}
            assert sj.parallel.save(manager, tree, step=step, custom_metadata=at)
        assert not sj.parallel.save(manager, tree, step=16)  # by its options
        manager.wait_until_finished()
        assert manager.all_steps() == [10, 15]
        assert manager.metadata(10).custom_metadata["at"] == 10
        like = jnp.asarray(table)
        assert_same_bits(sj.parallel.restore(manager, like), table + 15)
        assert_same_bits(sj.parallel.restore(manager, like, step=10), table + 10)
        with pytest.raises(FileNotFoundError, match="no checkpoint step 5 in"):
            sj.parallel.restore(manager, like, step=5)
        with pytest.raises(ValueError):
            sj.parallel.save(manager, tree, step=15)
        with pytest.raises(ValueError):
            sj.parallel.save(manager, tree)
        assert manager.all_steps() == [10, 15]


def test_state_goes_to_the_devices_of_its_table(tmp_path):
    """Wherever it is in the tree to restore into, as after a jitted `tx.init`."""
    table = sharded(table_of(), 4, "mod")
    tx = optax.chain(optax.trace(0.9), optax.scale_by_learning_rate(0.1))
    made = jax.tree.map(lambda x: x + 1, tx.init(table))
    one = lambda x: jax.device_put(np.zeros(x.shape, x.dtype), jax.devices()[3])
    uncommitted = lambda x: jnp.zeros(x.shape, x.dtype)
    saved = {"p": table, "s": made, "number": table.map(lambda x: jnp.ones(()))}
    sj.parallel.save(tmp_path / "a", saved)
    # Also into tables of another mesh and layout.
    other = sharded(table_of(), 2, "block")
    for like in (table, other):
        for make in (one, uncommitted):
            tree = {"p": like, "s": tx.init(like), "number": saved["number"]}
            tree = {**tree, "s": jax.tree.map(make, tree["s"])}
            found = sj.parallel.restore(tmp_path / "a", tree)
            trace = found["s"][0].trace
            assert trace.values.sharding == like.values.sharding
            assert trace.values.committed and trace.layout == like.layout
            np.testing.assert_array_equal(trace.to_dense(), np.ones((HEIGHT, 3)))
            assert found["number"].values.shape == ()


@pytest.mark.usefixtures("loose_promotion")  # optax.adam
def test_state_of_a_label_function_in_any_layout(tmp_path):
    # Labels by path mask a table as ShardedTable(MaskedNode()), an array as MaskedNode.
    def labels(params):
        label = lambda path, _: "b" if "'w'" in jax.tree_util.keystr(path) else "a"
        return jax.tree_util.tree_map_with_path(label, params)

    parts = {"a": optax.adam(0.1), "b": optax.adam(0.2)}
    tx = sj.optim.lazy(optax.partition(parts, labels))
    all_params = [
        {"t": table, "w": jnp.ones(3)}
        for table in (
            sharded(table_of(), 4, "mod"),
            jnp.asarray(table_of()),
            sharded(table_of(), 2, "block"),
        )
    ]
    trees = [(params, tx.init(params)) for params in all_params]
    for (k, saved), (m, like) in itertools.permutations(enumerate(trees), 2):
        sj.parallel.save(tmp_path / f"{k}{m}", saved)
        restored = sj.parallel.restore(tmp_path / f"{k}{m}", like)
        jax.tree.map(assert_same_bits, restored, like)


# ------------------------------------------------------------------ training


def _training(n, layout):
    """(params, state, step) of a run on n devices; the step donates both."""
    table, dense = worker.initial()
    mesh = mesh_of(n)
    params = {
        "table": sj.parallel.shard_rows(table, mesh, "x", layout=layout),
        "dense": jax.device_put(dense, jax.NamedSharding(mesh, jax.P())),
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
@pytest.mark.usefixtures("loose_promotion")  # optax.adam
def test_training_goes_on_where_it_stopped(tmp_path):
    batches = list(worker.batches("zipf"))
    with ocp.CheckpointManager(tmp_path) as manager:
        params, state, step = _training(2, "mod")
        params, state, _ = _run(params, state, step, batches[:2])
        sj.parallel.save(manager, (params, state), step=2, custom_metadata={"batch": 2})
        *_, losses = whole = _run(params, state, step, batches[2:])

        # On the same mesh, to the last bit.
        fresh = _training(2, "mod")[:2]
        restored = sj.parallel.restore(manager, fresh)
        rest = batches[manager.metadata(2).custom_metadata["batch"] :]
        again = _run(*restored, step=step, batches=rest)
        for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(whole), strict=True):
            assert_same_bits(a, b)

        for n, layout in ((4, "block"), (1, "mod")):
            *fresh, step = _training(n, layout)
            restored = sj.parallel.restore(manager, tuple(fresh))
            found = _run(*restored, step=step, batches=rest)
            np.testing.assert_allclose(found[2], losses, rtol=1e-5, err_msg=f"{n}")


def test_a_save_holds_what_was_there_when_it_was_called(tmp_path, monkeypatch):
    """Writing is held up until the saved arrays were donated and overwritten."""
    step = jax.jit(lambda t: jax.tree.map(lambda x: x * 2, t), donate_argnums=0)
    # Larger than a write without waiting, and made by a program: its own buffer.
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
    with ocp.CheckpointManager(tmp_path) as manager:
        sj.parallel.save(manager, tree, step=1)
        for _ in range(3):
            tree = step(tree)
        jax.block_until_ready(tree)
        waits, is_there = held.wait(60), (tmp_path / "1").exists()
        may_write.set()
        assert waits and not is_there  # nothing was written by then
        manager.wait_until_finished()
        restored = sj.parallel.restore(manager, before)
    for a, b in zip(jax.tree.leaves(restored), jax.tree.leaves(before), strict=True):
        assert_same_bits(a, b)


@pytest.mark.slow
def test_a_process_killed_while_it_saves_leaves_the_last_good_checkpoint(tmp_path):
    kills = 3
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
    # Each process after a kill checked its files, and kills did hit.
    hits = [line for line in done.stdout.splitlines() if line.endswith(": 1")]
    assert hits and "Error" not in done.stderr, done.stdout + done.stderr
    options = ocp.CheckpointManagerOptions(cleanup_tmp_directories=True)
    with ocp.CheckpointManager(tmp_path, options=options) as manager:
        steps = manager.all_steps()
        assert len(steps) >= 1 and steps[-1] >= kills
        for step in steps:
            table = abstract(worker.contents(0)["table"], 4, "block")
            like = {"table": table, "step": 0}
            restored = sj.parallel.restore(manager, like, step=step)
            want = worker.contents(step)
            assert restored["step"] == step
            assert_same_table(restored["table"], sharded(want["table"], 4, "block"))
    assert not list(tmp_path.glob("*tmp*"))  # cut short, and cleared away


# ------------------------------------------------------------------ errors


def test_a_refused_save_changes_nothing(tmp_path):
    tree, path = {"w": jnp.ones(3)}, tmp_path / "a"
    spec = jax.ShapeDtypeStruct((3,), np.float32)
    for bad in (spec, abstract(table_of(), 2, "mod"), table_of):
        with pytest.raises(TypeError):
            sj.parallel.save(path, {**tree, "bad": bad})
    for good in (jnp.ones(3), sharded(table_of(), 2, "mod")):
        with pytest.raises(TypeError):
            jax.jit(lambda x: sj.parallel.save(path, {"w": x}))(good)
    assert not path.exists()
    sj.parallel.save(path, tree)
    with pytest.raises(ValueError, match="already exists"):  # orbax's own words
        sj.parallel.save(path, {"w": jnp.zeros(3)})
    assert_trees_close(sj.parallel.restore(path, tree), tree)


@pytest.mark.filterwarnings("ignore")  # of orbax's threads, whose errors are raised
def test_a_new_manager_restores_without_a_warning(tmp_path, caplog):
    tree = {"t": sharded(table_of(), 2, "mod")}
    with ocp.CheckpointManager(tmp_path) as manager:
        sj.parallel.save(manager, tree, step=1)
    with ocp.CheckpointManager(tmp_path) as manager:
        caplog.clear()
        sj.parallel.restore(manager, tree)
        assert not caplog.records


# orbax leaves the tasks of a read that failed to its event loop, which is closed.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_checkpoint_cut_short_is_named(tmp_path):
    tree = {"t": sharded(table_of(), 2, "mod"), "w": np.ones(3)}
    other = {**tree, "t": abstract(table_of(), 3, "block")}
    with ocp.CheckpointManager(tmp_path) as manager:
        for step in (1, 2):
            sj.parallel.save(manager, tree, step=step)
        manager.wait_until_finished()
        (tmp_path / "2" / "_CHECKPOINT_METADATA").write_text('{"format":')
        for part in (tmp_path / "1" / "default").glob("**/d/*"):
            part.write_bytes(part.read_bytes()[: part.stat().st_size // 2])
        for step in (1, 2):
            for like in (tree, other):
                with pytest.raises(ValueError, match=f"step {step} in .* damaged"):
                    sj.parallel.restore(manager, like, step=step)


def test_other_values_are_refused(tmp_path):
    """Well formed files, of a tree that differs in one number."""
    for layout, name in itertools.product(LAYOUTS, ("t", "w", "rows")):
        rows = sj.SelectedRows(jnp.array([2, 5]), jnp.ones((2, 3)), height=9)
        tree = {"t": sharded(table_of(), 2, layout), "w": np.ones(3), "rows": rows}
        change = lambda x: x.map(lambda v: v.at[1, 1].add(1))
        changed = {"t": change(tree["t"]), "w": np.arange(3.0), "rows": change(rows)}
        paths = [tmp_path / f"{layout} {name} {k}" for k in range(2)]
        for path, x in zip(paths, (tree, {**tree, name: changed[name]})):
            sj.parallel.save(path, x)
        metadata = (path / "_CHECKPOINT_METADATA" for path in paths)
        shutil.copy(*metadata)
        for like in (tree, {**tree, "t": abstract(table_of(), 3, "block")}):
            with pytest.raises(ValueError, match=rf"\['{name}'\].* not those .* saved"):
                sj.parallel.restore(paths[1], like)


def test_a_checksum_finds_a_changed_number():
    """Of each width, summed on devices and on the host."""
    widths = "bool", "int4", "int8", "bfloat16", "float32", "complex64", "uint32"
    tree = {
        name: np.tile(np.arange(2), (3, 100)).astype(jnp.dtype(name)) for name in widths
    }
    tree = {name: jnp.asarray(x) for name, x in tree.items()}
    tree |= {"table": sharded(table_of(), 4, "mod"), "host": np.arange(9.0)}
    tree["scalar"], tree["number"], tree["key"] = jnp.float32(2), 7, jax.random.key(3)
    names = dict(_checkpoint._named_leaves(tree)).keys()
    found = [
        _checkpoint._to_save(x)
        for x in jax.tree.leaves(tree, is_leaf=_checkpoint._is_table)
    ]
    sums = _checkpoint._checksums(tree, found)
    assert sums.keys() == names
    rng = np.random.default_rng(0)
    for k, name in enumerate(names):
        x = jax.random.key_data(found[k]) if name == "['key']" else found[k]
        host = np.array(x)
        assert _checkpoint._sum_on_host(host) == sums[name]  # as on the devices
        for _ in range(20):
            changed = host.copy()
            flat = changed.reshape(-1)
            at = rng.integers(flat.size)
            flat[at] = not flat[at] if host.dtype == bool else flat[at] + 1
            assert _checkpoint._sum_on_host(changed) != sums[name]


def test_errors_say_what_differs(tmp_path):
    table = table_of()
    rows = lambda height: sj.SelectedRows(jnp.array([1]), jnp.ones((1, 2)), height)
    position = lambda layout: sharded(table, 2, layout).map(lambda _: rows(24))
    tree = {"t": sharded(table, 2, "mod"), "w": jnp.ones(3), "g": rows(5)}
    path = tmp_path / "ours"
    with pytest.raises(FileNotFoundError):
        sj.parallel.restore(path, tree)
    sj.parallel.save(path, tree)

    def refuses(like, words):
        with pytest.raises(ValueError, match=f"tree saved at .*ours: {words}"):
            sj.parallel.restore(path, like)

    refuses(
        # Both are stored as 24 rows.
        {**tree, "t": abstract(table_of(height=24), 4, "mod")},
        r"\['t'\] is float32\[24, 3\], saved was float32\[23, 3\]",
    )
    refuses(
        {**tree, "t": abstract(table_of(np.int32), 4, "mod")},
        r"\['t'\] is int32\[23, 3\], saved was float32",
    )
    refuses({"t": tree["t"], "g": rows(5)}, r"\['w'\] was saved but is missing")
    refuses({**tree, "g": rows(6)}, r"height of \['g'\] is 6, saved was 5")
    # Gradients name rows by position, which is another row in another layout.
    sj.parallel.save(tmp_path / "g", position("mod"))
    assert_trees_close(
        sj.parallel.restore(tmp_path / "g", position("mod")), position("mod")
    )
    with pytest.raises(ValueError, match="is 'block' over 2 devices.* saved was 'mod'"):
        sj.parallel.restore(tmp_path / "g", position("block"))
