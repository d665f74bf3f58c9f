"""What a Checkpointer refuses, and what it says of a checkpoint that it cannot read."""

# Steps of other types are what some tests hand over.
# pyright: reportArgumentType=false

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint
import pytest

import sparsejax as sj
from test_checkpoint import abstract, sharded, table_of


pytestmark = pytest.mark.multidevice


def test_errors_of_steps_and_of_what_is_no_tree(tmp_path, monkeypatch):
    tree = {"w": jnp.ones(3)}
    with sj.parallel.Checkpointer(tmp_path / "a") as checkpoints:
        for step in (2.0, 13.5, "3", True, None, np.float32(3), np.ones(2)):
            with pytest.raises(TypeError, match="step must be a non-negative int"):
                checkpoints.save(step, tree)
        with pytest.raises(ValueError, match="step must be a non-negative int"):
            checkpoints.save(-1, tree)
        checkpoints.save(np.int32(2), tree)
        checkpoints.save(jnp.array(3), tree)
        assert [type(k) for k in checkpoints.all_steps()] == [int, int]
        for restore in (
            lambda k: checkpoints.restore(tree, k),
            checkpoints.restore_data,
        ):
            with pytest.raises(TypeError, match="step must be a .* int, got '2'"):
                restore("2")
        assert checkpoints.restore(tree, np.int64(2))["w"].shape == (3,)
        spec = jax.ShapeDtypeStruct((3,), np.float32)
        abstract_table = abstract(table_of(), 2, "mod")
        for bad in (spec, abstract_table):
            with pytest.raises(TypeError, match="is a jax.ShapeDtypeStruct and has no"):
                checkpoints.save(4, {"w": bad})
        for good in (jnp.ones(3), sharded(table_of(), 2, "mod")):
            with pytest.raises(TypeError, match="is traced by jax.jit"):
                jax.jit(lambda x: checkpoints.save(4, {"w": x}))(good)
        with pytest.raises(TypeError, match="data must be a dictionary .*type list"):
            checkpoints.save(4, tree, data=[1])
        assert checkpoints.all_steps() == [2, 3]
        with monkeypatch.context() as patch:
            patch.setattr(checkpoints._manager, "save", lambda *_, **__: False)
            with pytest.raises(RuntimeError, match="orbax refused to save step 4"):
                checkpoints.save(4, tree)
    checkpoints.close()  # once more does nothing
    for call in (
        lambda: checkpoints.save(5, tree),
        lambda: checkpoints.restore(tree),
        checkpoints.restore_data,
        checkpoints.latest_step,
        checkpoints.wait,
        checkpoints.__enter__,
    ):
        with pytest.raises(ValueError, match="this Checkpointer is closed"):
            call()


def test_errors_of_what_a_checkpointer_is_made_of(tmp_path):
    for keep in (0, -1, "3", 2.0):
        error = ValueError if keep in (0, -1) else TypeError
        with pytest.raises(error, match="max_to_keep must be a positive int"):
            sj.parallel.Checkpointer(tmp_path / "new", max_to_keep=keep)
    assert not (tmp_path / "new").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match="file is a file"):
        sj.parallel.Checkpointer(tmp_path / "file")


@pytest.mark.filterwarnings(
    "ignore"
)  # of orbax's threads, whose errors are raised here
def test_a_checkpoint_cut_short_is_named(tmp_path):
    tree = {"t": sharded(table_of(), 2, "mod"), "w": np.ones(3)}
    other = {**tree, "t": abstract(table_of(), 3, "block")}
    with sj.parallel.Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, tree)
        checkpoints.save(2, tree)
        checkpoints.wait()
        (tmp_path / "2" / "sparsejax" / "metadata").write_text('{"format":')
        for part in (tmp_path / "1" / "arrays").glob("**/d/*"):
            part.write_bytes(part.read_bytes()[: part.stat().st_size // 2])
        words = r"step {} in .* may be damaged or incomplete: .* steps \[1, 2\]"
        for step in (1, 2):
            for like in (tree, other):
                with pytest.raises(ValueError, match=words.format(step)):
                    checkpoints.restore(like, step)


def test_errors_say_what_differs(tmp_path):
    table = table_of()
    rows = lambda height: sj.SelectedRows(jnp.array([1]), jnp.ones((1, 2)), height)
    position = lambda layout: sharded(table, 2, layout).map(lambda _: rows(24))
    tree = {"t": sharded(table, 2, "mod"), "w": jnp.ones(3), "g": rows(5)}
    with sj.parallel.Checkpointer(tmp_path / "ours") as checkpoints:
        with pytest.raises(FileNotFoundError, match="there is no checkpoint in .*ours"):
            checkpoints.restore(tree)
        checkpoints.save(3, tree)

        def refuses(like, words):
            with pytest.raises(ValueError, match=f"saved at step 3: {words}"):
                checkpoints.restore(like)

        refuses(
            {**tree, "t": abstract(table_of(height=24), 4, "mod")},
            r"\['t'\] has shape \(24, 3\), saved was \(23, 3\)",
        )
        refuses(
            {**tree, "t": abstract(table_of(np.int32), 4, "mod")},
            r"\['t'\] is int32, saved was float32",
        )
        refuses(
            {"t": tree["t"], "w": tree["w"], "v": tree["w"], "g": rows(5)},
            r"\['v'\] was not saved",
        )
        refuses({"t": tree["t"], "g": rows(5)}, r"\['w'\] was saved but is missing")
        refuses({**tree, "g": rows(6)}, r"\['g'\] has height 6, saved was 5")
        with pytest.raises(FileNotFoundError, match=r"of step 2 in .*has steps \[3\]"):
            checkpoints.restore(tree, step=2)
        with pytest.raises(ValueError, match="step 3 is not later than .* saved, 3"):
            checkpoints.save(3, tree)
        with pytest.raises(TypeError, match=r"leaf \['f'\] is of type function"):
            checkpoints.save(4, {"f": refuses})
        with pytest.raises(TypeError, match="JSON can hold: .*int64 is not JSON"):
            checkpoints.save(4, tree, data={"at": np.int64(3)})
        # Gradients name rows by position, which is another row in another layout.
        checkpoints.save(5, position("mod"))
        with pytest.raises(ValueError, match="has layout block, saved was mod"):
            checkpoints.restore(position("block"))
    with orbax.checkpoint.CheckpointManager(tmp_path / "theirs") as manager:
        manager.save(1, args=orbax.checkpoint.args.StandardSave({"w": np.ones(3)}))
    with sj.parallel.Checkpointer(tmp_path / "theirs") as checkpoints:
        with pytest.raises(ValueError, match="was not saved by this class"):
            checkpoints.restore({"w": np.ones(3)})
