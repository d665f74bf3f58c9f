"""Checkpointer: orbax's checkpoints of trees in which tables are sharded.

The tree is saved as a flat dictionary of arrays by their paths, each table as it lies
on its devices, and beside it a page that says what is what: heights, layouts, types.
Restored, a table may lie on another number of devices and in another layout; each
device reads the rows that it owns (`_checkpoint_rows.py` says what that costs).

Orbax does the rest: it copies to the host before `save` returns, writes in the
background, and gives a checkpoint its name only once it is complete.
"""

import contextlib
import json
import operator
import os
from collections.abc import Iterator, Mapping
from typing import Any, SupportsIndex

from sparsejax import _arguments
from sparsejax.parallel._checkpoint_leaves import (
    Leaf,
    Saved,
    differences,
    flatten,
    statics,
    unflatten,
)


_CALL = "sparsejax.parallel.Checkpointer"
_NO_ORBAX = _CALL + " needs orbax: pip install orbax-checkpoint"
_BAD_DATA = (
    "{call}: data must be a dictionary that JSON can hold: {error}. Make NumPy numbers "
    "Python's with int() and arrays lists with .tolist()."
)
_NO_DIRECTORY = _CALL + ": {directory} is a file. Give a directory."

# The items of a checkpoint, and the form of the page.
_ARRAYS, _PAGE, _FORMAT = "arrays", "sparsejax", 1
_MOST_SAID = 200  # characters of an error of orbax, which may print a whole spec


class Checkpointer:
    """Saves and restores trees of sharded tables, optimizer states and dense arrays.

    What is saved on N devices is restored on M, in either layout, bit for bit: row r of
    the table is row r afterwards, wherever it lies. Padding is never seen. A table
    saved sharded may be restored as a plain array, and the other way round. No device
    is given more than the rows it owns.

    `save` returns when the values are on the host; writing goes on in the background,
    and the arrays may be donated at once. (XLA:CPU has them on the host already, so the
    step after a save works on a copy instead of in place.) A process that dies during a
    save leaves the checkpoint before it as the latest.

    Files that are cut short or missing are found at `restore`. Bytes that were changed
    on the disk are not: checkpoints have no checksum of their values, and such a one
    may restore as other numbers. Keep them on storage that checks what it holds.

    Works on several processes, all of which call it alike and see one file system.

    Args:
      directory: where the checkpoints are; made if it is not there. What orbax takes,
        `gs://` too.
      max_to_keep: how many checkpoints to keep, at least 1; the older ones are deleted.
        All are kept if left out.
      read_only: for a process that only reads, beside the one that trains: it makes no
        directory, and leaves a save that is under way alone.

    Raises:
      ImportError: orbax is not installed.
      NotADirectoryError: there is a file of that name.
      ValueError: `max_to_keep` is no int of at least 1.

    Example:
      >>> import jax, numpy as np, tempfile, sparsejax as sj
      >>> mesh = jax.make_mesh((1,), ("x",), devices=jax.devices()[:1])
      >>> table = sj.parallel.shard_rows(np.ones((5, 2), np.float32), mesh, "x")
      >>> with sj.parallel.Checkpointer(tempfile.mkdtemp()) as checkpoints:
      ...     checkpoints.save(7, {"table": table}, data={"batch": 70})
      ...     block = sj.parallel.shard_rows(
      ...         jax.ShapeDtypeStruct((5, 2), np.float32), mesh, "x", layout="block"
      ...     )
      ...     restored = checkpoints.restore({"table": block})
      ...     print(checkpoints.latest_step(), checkpoints.restore_data())
      7 {'batch': 70}
      >>> restored["table"]
      ShardedTable(float32[5, 2], 1 x 5 rows over 'x', layout='block')

    References:
      Orbax, `CheckpointManager`; PyTorch, distributed checkpoint (resharding at load).
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        max_to_keep: int | None = None,
        read_only: bool = False,
    ):
        path = os.fspath(directory)
        self.directory: str = path if "://" in path else os.path.abspath(path)
        if os.path.isfile(self.directory):
            raise NotADirectoryError(_NO_DIRECTORY.format(directory=self.directory))
        if max_to_keep is not None:
            max_to_keep = _arguments.static_int(
                _CALL, "max_to_keep", max_to_keep, 1, " None keeps all."
            )
        self._read_only, self._closed = read_only, False
        self._orbax = orbax = _orbax()
        options = orbax.CheckpointManagerOptions(
            max_to_keep=max_to_keep,
            read_only=read_only,
            create=not read_only,
            cleanup_tmp_directories=not read_only,
        )
        self._manager = orbax.CheckpointManager(self.directory, options=options)

    # -- saving ------------------------------------------------------------------

    def save(
        self, step: int, tree: Any, *, data: Mapping[str, Any] | None = None
    ) -> None:
        """Saves `tree` as of now; returns once it is copied to the host.

        Args:
          step: int, later than all that were saved before.
          tree: any pytree of arrays, numbers, PRNG keys, ShardedTables, SelectedRows
            and SegmentTensors.
          data: what JSON can hold, such as a data loader's state. Of several processes
            the first one's is kept.

        Raises:
          TypeError: a leaf of another kind or without values (abstract, or traced by
            `jit`), data that JSON cannot hold, or a step that is no int.
          ValueError: a step that is not later, or the checkpointer only reads or is
            closed. An error of the save before this one is raised here as well.
        """
        call = f"{_CALL}.save"
        self._check_open(call)
        step = _as_step(call, step)
        if self._read_only:
            raise ValueError(f"{call}: this Checkpointer was made with read_only=True.")
        latest = self.latest_step()
        if latest is not None and step <= latest:
            raise ValueError(
                f"{call}: step {step} is not later than the latest one saved, "
                f"{latest}. Count on from latest_step(), or save to another directory."
            )
        if data is not None and not isinstance(data, Mapping):
            error = f"it is of type {type(data).__name__}"
            raise TypeError(_BAD_DATA.format(call=call, error=error))
        leaves = flatten(call, tree)
        for name, leaf in leaves.items():
            leaf.check_has_values(call, name)
        arrays = {n: leaf.to_save() for n, leaf in leaves.items() if not leaf.is_empty}
        about = {
            "format": _FORMAT,
            "leaves": {name: leaf.to_json() for name, leaf in leaves.items()},
            "statics": statics(tree),
            "data": None if data is None else dict(data),
        }
        try:  # here, for in the background it would spoil a save that has begun
            json.dumps(about["data"])
        except (TypeError, ValueError) as error:
            raise TypeError(_BAD_DATA.format(call=call, error=error)) from None
        items = {_PAGE: self._orbax.args.JsonSave(about)}
        if arrays:  # orbax saves no empty tree
            items[_ARRAYS] = self._orbax.args.PyTreeSave(arrays)
        composite = self._orbax.args.Composite(**items)
        if not self._manager.save(step, args=composite):
            raise RuntimeError(
                f"{call}: orbax refused to save step {step} in {self.directory}."
            )

    def wait(self) -> None:
        """Returns once all that was saved is on disk; raises what went wrong there."""
        self._check_open(f"{_CALL}.wait")
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits, and lets go of the directory. Leaving a `with` block does the same."""
        if self._closed:
            return
        self._closed = True
        try:
            self._manager.wait_until_finished()
        finally:
            self._manager.close()

    def __enter__(self) -> "Checkpointer":
        self._check_open(_CALL)
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self.close()

    def _check_open(self, call: str) -> None:
        if self._closed:
            raise ValueError(
                f"{call}: this Checkpointer is closed. Make another one of "
                f"{self.directory}."
            )

    # -- what is there -----------------------------------------------------------

    def latest_step(self) -> int | None:
        """The latest step saved, or being saved; None if there is none."""
        return max(self.all_steps(), default=None)

    def all_steps(self) -> list[int]:
        """The steps saved, and the one being saved, ascending."""
        self._check_open(f"{_CALL}.all_steps")
        if self._read_only:  # another process goes on saving
            self._manager.reload()
        return sorted(self._manager.all_steps())

    # -- restoring ---------------------------------------------------------------

    def restore(self, like: Any, step: int | None = None) -> Any:
        """The tree saved at `step`, laid out as `like`.

        Args:
          like: the tree as it is to be: of arrays, or of their abstract forms
            (`jax.ShapeDtypeStruct`, `shard_rows` of one, what `jax.eval_shape` gives).
            Its shardings say where things go: meshes and layouts may be others than
            those saved. A ShardedTable goes to the devices of its mesh, wherever its
            values in `like` are. What else has no sharding, or is not committed to a
            device, comes back uncommitted, so that it goes with any mesh.
          step: int, the latest if left out.

        Returns:
          A tree of the same structure; NumPy arrays and numbers stay what they are.

        Raises:
          FileNotFoundError: there is no such checkpoint.
          TypeError: `step` is no int.
          ValueError: trees, heights, shapes or types differ; it says which. Or the
            checkpoint is damaged (cut short, or without some of its files).
        """
        call = f"{_CALL}.restore"
        step, about = self._about(call, step)
        leaves = flatten(call, like)
        saved = {n: Saved.from_json(entry) for n, entry in about["leaves"].items()}
        found = differences(saved, leaves, about["statics"], statics(like))
        if found:
            raise ValueError(
                f"{call}: the tree to restore into is not the one saved at step "
                f"{step}: {found}. Make `like` as the saved tree was made."
            )
        directory = os.path.join(self.directory, str(step), _ARRAYS)
        with self._reading(call, step):
            values = self._restore_alike(step, saved, leaves)
            for name, leaf in leaves.items():
                if name not in values:
                    values[name] = leaf.read_rows(directory, name, saved[name])
        values = {n: leaf.from_restored(values[n]) for n, leaf in leaves.items()}
        return unflatten(like, values)

    def restore_data(self, step: int | None = None) -> dict[str, Any]:
        """What was given to `save` as `data`, at `step` or the latest.

        Raises:
          FileNotFoundError: nothing was saved, or not at this step.
          ValueError: `save` was given no data.
        """
        call = f"{_CALL}.restore_data"
        step, about = self._about(call, step)
        if about["data"] is None:
            raise ValueError(
                f"{call}: step {step} was saved without data=. Give it to save: a "
                "dictionary that JSON can hold."
            )
        return about["data"]

    def _about(self, call: str, step: int | None) -> tuple[int, dict[str, Any]]:
        """The step, and the page beside its arrays."""
        self._check_open(call)
        if step is not None:
            step = _as_step(call, step)
        self._manager.wait_until_finished()
        steps, directory = self.all_steps(), self.directory
        if not steps:
            raise FileNotFoundError(
                f"{call}: there is no checkpoint in {directory}. A save that was cut "
                "short leaves none; is the directory right?"
            )
        step = steps[-1] if step is None else step
        if step not in steps:
            raise FileNotFoundError(
                f"{call}: there is no checkpoint of step {step} in {directory}. There "
                f"are those of {steps}."
            )
        if not (self._manager.directory / str(step) / _PAGE).exists():
            raise ValueError(
                f"{call}: step {step} in {directory} was not saved by this class. "
                "Restore it with orbax's own CheckpointManager."
            )
        args = self._orbax.args
        page = args.Composite(**{_PAGE: args.JsonRestore()})
        with self._reading(call, step):
            return step, self._manager.restore(step, args=page)[_PAGE]

    @contextlib.contextmanager
    def _reading(self, call: str, step: int) -> Iterator[None]:
        """What goes wrong inside is told of the checkpoint."""
        try:
            yield
        except (ValueError, OSError, KeyError) as error:
            raise ValueError(
                f"{call}: step {step} in {self.directory} could not be read, it may be "
                f"damaged or incomplete: {str(error)[:_MOST_SAID]}. There are the "
                f"steps {self.all_steps()}."
            ) from error

    def _restore_alike(
        self, step: int, saved: Mapping[str, Saved], leaves: Mapping[str, Leaf]
    ) -> dict[str, Any]:
        """The leaves that are no tables, now or then: orbax reads them."""
        stored = [name for name, leaf in saved.items() if not leaf.is_empty]
        alike = [n for n in stored if saved[n].rows is None and leaves[n].rows is None]
        if not alike:
            return {}
        item = dict.fromkeys(stored, self._orbax.PLACEHOLDER)  # which is not read
        how = dict.fromkeys(stored, self._orbax.RestoreArgs())
        for name in alike:
            item[name], how[name] = 0, leaves[name].restore_args(self._orbax)
        args = self._orbax.args
        wanted = args.PyTreeRestore(item=item, restore_args=how)
        found = self._manager.restore(step, args=args.Composite(**{_ARRAYS: wanted}))
        return {name: found[_ARRAYS][name] for name in alike}


def _as_step(call: str, step: Any) -> int:
    """`step` as an int. Orbax takes others too, and then does not find them again."""
    bad = (
        f"{call}: step must be an int of at least 0, got {_arguments.show(step)}. "
        "Make other numbers one with int(step)."
    )
    if isinstance(step, bool) or not isinstance(step, SupportsIndex):
        raise TypeError(bad)
    try:
        found = operator.index(step)
    except TypeError:  # an array that is no integer, or not one, or traced
        raise TypeError(bad) from None
    if found < 0:
        raise ValueError(bad)
    return found


def _orbax() -> Any:
    try:
        import orbax.checkpoint as orbax
    except ImportError as error:
        raise ImportError(_NO_ORBAX) from error
    return orbax
