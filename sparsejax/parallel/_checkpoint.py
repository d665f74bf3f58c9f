"""Checkpointer: orbax checkpoints of trees in which tables are sharded.

The tree is saved as a flat dictionary of arrays by path, each table as it is sharded,
together with a JSON record of heights, layouts and types. `restore` compares the record
before it reads anything. A table may be restored on a different number of devices and
in a different layout; each device reads the rows that it owns (`_resharding.py`).

Orbax does the rest. It copies to the host before `save` returns, writes in the
background, and renames a checkpoint to its final name once it is complete.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import operator
import os
from collections.abc import Iterator, Mapping
from typing import Any, SupportsIndex

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding

from sparsejax import _arguments
from sparsejax._arguments import PyTree
from sparsejax._files import check_json
from sparsejax._rows import is_selected_rows
from sparsejax.parallel._resharding import open_array, read_part
from sparsejax.parallel._row_layout import RowLayout, TableWise
from sparsejax.parallel._table import ShardedTable


_CALL = "sparsejax.parallel.Checkpointer"

# The items of a checkpoint: its arrays, and the record, which has a format number.
_ARRAYS, _RECORD, _FORMAT = "arrays", "sparsejax", 1
_GROUPS = {"heights": [int], "groups": [int], "num_groups": int}
_RECORD_SCHEMA = {
    "format": int,
    "leaves": {
        "*": {
            "shape": [int],
            "dtype": str,
            "rows": (
                None,
                {"height": int, "shards": int, "layout": ({"mod", "block"}, _GROUPS)},
            ),
        }
    },
    "statics": {"*": [(int, str)]},
    "data": (None, {"*": object}),
}
_SCALARS = bool | int | float | complex


class Checkpointer:
    """Saves and restores trees of sharded tables, optimizer states and dense arrays.

    A tree saved on N devices can be restored on M devices, in either layout, bit for
    bit: row r of the table is row r again, on whichever device holds it. Padding is not
    restored. A table saved sharded can be restored as a plain array, and the reverse.
    No device reads more than the rows it owns.

    `save` returns when the values are on the host and writes in the background, so the
    arrays may be donated at once. (On XLA:CPU they are on the host already, so the step
    after a save works on a copy instead of in place.) If the process is killed during a
    save, the previous checkpoint stays the latest.

    `restore` detects truncated and missing files. It does not detect changed bytes:
    the values have no checksum, so a corrupted checkpoint may restore wrong numbers.
    Keep checkpoints on storage that verifies its data.

    Several processes may use it if they share a file system and all make the same
    calls.

    Args:
      directory: of the checkpoints; created if it does not exist. Any path that orbax
        accepts, `gs://` too.
      max_to_keep: how many checkpoints to keep, at least 1; older ones are deleted.
        None keeps all.
      read_only: for a process that reads while another one trains. It creates no
        directory and does not clean up a save in progress.

    Raises:
      ImportError: orbax is not installed.
      NotADirectoryError: `directory` is a file.
      ValueError: `max_to_keep` is not a positive int.

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
            raise NotADirectoryError(
                f"{_CALL}: {self.directory} is a file. Pass a directory."
            )
        if max_to_keep is not None:
            max_to_keep = _arguments.static_int(
                _CALL, "max_to_keep", max_to_keep, 1, " None keeps all."
            )
        self._read_only, self._closed = read_only, False
        try:
            import orbax.checkpoint as orbax
        except ImportError as error:
            raise ImportError(
                f"{_CALL} needs orbax: pip install orbax-checkpoint, or pip install "
                "'sparsejax[interop]'."
            ) from error
        self._orbax: Any = orbax
        options = orbax.CheckpointManagerOptions(
            max_to_keep=max_to_keep,
            read_only=read_only,
            create=not read_only,
            cleanup_tmp_directories=not read_only,
        )
        self._manager = orbax.CheckpointManager(self.directory, options=options)

    # -- saving ------------------------------------------------------------------

    def save(
        self, step: int, tree: PyTree, *, data: Mapping[str, Any] | None = None
    ) -> None:
        """Saves `tree`; returns once it is copied to the host.

        Args:
          step: int, later than all saved steps.
          tree: any pytree of arrays, numbers, PRNG keys, ShardedTables, SelectedRows and SegmentTensors.
          data: a dictionary that JSON can hold, for example a data loader's state. With
            several processes, that of the first one is saved.

        Raises:
          TypeError: a leaf has an unsupported type or no values (abstract, or traced by
            `jit`), `data` is not JSON-serializable, or `step` is not an int.
          ValueError: `step` is not later, or the checkpointer is read-only or closed.
            An error in the previous save is also raised here.
        """
        call = f"{_CALL}.save"
        self._check_open(call)
        step = _as_step(call, step)
        if self._read_only:
            raise ValueError(f"{call}: this Checkpointer was made with read_only=True.")
        latest = self.latest_step()
        if latest is not None and step <= latest:
            raise ValueError(
                f"{call}: step {step} is not later than the latest step saved, "
                f"{latest}. Continue from latest_step(), or save to another directory."
            )
        try:  # now, since in the background it would fail after the save has begun
            if not isinstance(data, Mapping | None):
                raise TypeError(f"it is of type {type(data).__name__}")
            data = None if data is None else dict(data)
            json.dumps(data)
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"{call}: data must be a dictionary that JSON can hold: {error}. "
                "Convert NumPy scalars with int() or float(), and arrays with "
                ".tolist()."
            ) from None
        leaves = _flatten(call, tree)
        for name, leaf in leaves.items():
            leaf.check_has_values(call, name)
        arrays = {n: leaf.to_save() for n, leaf in leaves.items() if not leaf.is_empty}
        record = {
            "format": _FORMAT,
            "leaves": {name: leaf.to_json() for name, leaf in leaves.items()},
            "statics": _statics(tree),
            "data": data,
        }
        items = {_RECORD: self._orbax.args.JsonSave(record)}
        if arrays:  # orbax refuses an empty tree
            items[_ARRAYS] = self._orbax.args.PyTreeSave(arrays)
        composite = self._orbax.args.Composite(**items)
        if not self._manager.save(step, args=composite):
            raise RuntimeError(
                f"{call}: orbax refused to save step {step} in {self.directory}."
            )

    def wait(self) -> None:
        """Waits until all saves are on disk; raises if one of them failed."""
        self._check_open(f"{_CALL}.wait")
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits and releases the directory. Leaving a `with` block does the same."""
        if self._closed:
            return
        self._closed = True
        try:
            self._manager.wait_until_finished()
        finally:
            self._manager.close()

    def __enter__(self) -> Checkpointer:
        self._check_open(_CALL)
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self.close()

    def _check_open(self, call: str) -> None:
        if self._closed:
            raise ValueError(
                f"{call}: this Checkpointer is closed. Make a new one for "
                f"{self.directory}."
            )

    # -- steps -------------------------------------------------------------------

    def latest_step(self) -> int | None:
        """The latest step that is saved or being saved, or None."""
        return max(self.all_steps(), default=None)

    def all_steps(self) -> list[int]:
        """The steps that are saved or being saved, ascending."""
        self._check_open(f"{_CALL}.all_steps")
        if self._read_only:  # another process may have saved since
            self._manager.reload()
        return sorted(self._manager.all_steps())

    # -- restoring ---------------------------------------------------------------

    def restore(self, like: PyTree, step: int | None = None) -> Any:
        """The tree saved at `step`, sharded as `like`.

        Args:
          like: a tree of arrays, or of their abstract forms (`jax.ShapeDtypeStruct`,
            `shard_rows` of one, the result of `jax.eval_shape`). Leaves are restored
            with its shardings; meshes and layouts may differ from the saved ones. A
            ShardedTable goes to the devices of its mesh, wherever its values in `like`
            are. Any other leaf without a sharding, or not committed to a device, is
            restored uncommitted, so that it works with any mesh.
          step: int; None for the latest.

        Returns:
          A tree with the structure of `like`; NumPy arrays and numbers keep their type.

        Raises:
          FileNotFoundError: there is no such checkpoint.
          TypeError: `step` is not an int.
          ValueError: trees, heights, shapes or dtypes differ (the message says which),
            or the checkpoint is damaged: files are truncated or missing.
        """
        call = f"{_CALL}.restore"
        step, record = self._record(call, step)
        leaves = _flatten(call, like)
        saved = {n: _Spec.from_json(entry) for n, entry in record["leaves"].items()}
        found = _differences(saved, leaves, record["statics"], _statics(like))
        if found:
            raise ValueError(
                f"{call}: `like` differs from the tree saved at step {step}: {found}. "
                "Make `like` as the saved tree was made."
            )
        directory = os.path.join(self.directory, str(step), _ARRAYS)
        with self._reading(call, step):
            values = self._restore_plain(step, saved, leaves)
            for name, leaf in leaves.items():
                if name not in values:
                    values[name] = leaf.read_rows(directory, name, saved[name])
            values = {n: leaf.from_restored(values[n]) for n, leaf in leaves.items()}
        return _unflatten(like, values)

    def restore_data(self, step: int | None = None) -> dict[str, Any]:
        """The `data` saved at `step`, or at the latest step.

        Raises:
          FileNotFoundError: there is no such checkpoint.
          ValueError: it was saved without `data`.
        """
        call = f"{_CALL}.restore_data"
        step, record = self._record(call, step)
        if record["data"] is None:
            raise ValueError(
                f"{call}: step {step} was saved without data=. Pass data= to save, a "
                "dictionary that JSON can hold."
            )
        return record["data"]

    def _record(self, call: str, step: int | None) -> tuple[int, dict[str, Any]]:
        """The step, and its record."""
        self._check_open(call)
        if step is not None:
            step = _as_step(call, step)
        self._manager.wait_until_finished()
        steps, directory = self.all_steps(), self.directory
        if not steps:
            raise FileNotFoundError(
                f"{call}: there is no checkpoint in {directory}. Check the path; a "
                "save that was interrupted leaves no checkpoint."
            )
        step = steps[-1] if step is None else step
        if step not in steps:
            raise FileNotFoundError(
                f"{call}: there is no checkpoint of step {step} in {directory}. The "
                f"directory has steps {steps}."
            )
        if not (self._manager.directory / str(step) / _RECORD).exists():
            raise ValueError(
                f"{call}: step {step} in {directory} was not saved by this class. "
                "Restore it with orbax's own CheckpointManager."
            )
        args = self._orbax.args
        wanted = args.Composite(**{_RECORD: args.JsonRestore()})
        with self._reading(call, step):
            record = self._manager.restore(step, args=wanted)[_RECORD]
            _check_record(record)
            return step, record

    @contextlib.contextmanager
    def _reading(self, call: str, step: int) -> Iterator[None]:
        """Turns errors inside into errors about the checkpoint."""
        try:
            yield
        except Exception as error:  # orbax raises what it meets in a damaged file
            raise ValueError(
                f"{call}: step {step} in {self.directory} could not be read; it may be "
                # Orbax's own text may contain a whole spec.
                f"damaged or incomplete: {str(error)[:200]}. The directory has "
                f"steps {self.all_steps()}."
            ) from error

    def _restore_plain(
        self, step: int, saved: Mapping[str, _Spec], leaves: Mapping[str, _Leaf]
    ) -> dict[str, Any]:
        """The leaves that are sharded tables on neither side; orbax reads them."""
        stored = [name for name, leaf in saved.items() if not leaf.is_empty]
        plain = [n for n in stored if saved[n].rows is None and leaves[n].rows is None]
        if not plain:
            return {}
        item = dict.fromkeys(stored, self._orbax.PLACEHOLDER)  # orbax skips these
        how = dict.fromkeys(stored, self._orbax.RestoreArgs())
        for name in plain:
            item[name], how[name] = 0, leaves[name].restore_args(self._orbax)
        args = self._orbax.args
        wanted = args.PyTreeRestore(item=item, restore_args=how)
        found = self._manager.restore(step, args=args.Composite(**{_ARRAYS: wanted}))
        return {name: found[_ARRAYS][name] for name in plain}


def _check_record(record: Any) -> None:
    """Raises a ValueError unless `save` wrote this record."""
    check_json(record, _RECORD_SCHEMA, "the record")
    if record["format"] != _FORMAT:
        raise ValueError(
            f"the record has format {record['format']}, but this version of sparsejax "
            f"reads format {_FORMAT}"
        )
    for name, entry in record["leaves"].items():
        rows, height = entry["rows"], (*entry["shape"], None)[0]
        if rows is not None and not _is_row_layout(rows, height):
            raise ValueError(
                f"the record has the shape {entry['shape']} for {name}, and the rows "
                f"{rows}"
            )


def _as_step(call: str, step: Any) -> int:
    """`step` as an int. Orbax accepts other types, but then cannot find the step."""
    bad = (
        f"{call}: step must be a non-negative int, got {_arguments.show(step)}. "
        "Convert it with int(step)."
    )
    if isinstance(step, bool) or not isinstance(step, SupportsIndex):
        raise TypeError(bad)
    try:
        found = operator.index(step)
    except TypeError:  # an array of floats, of several elements, or traced
        raise TypeError(bad) from None
    if found < 0:
        raise ValueError(bad)
    return found


def _is_row_layout(rows: Mapping[str, Any], height: int | None) -> bool:
    """Whether the record's rows can be those of a table."""
    shards, layout = rows["shards"], rows["layout"]
    if not shards or rows["height"] != height:
        return False
    if isinstance(layout, str):
        return True
    heights, groups, count = layout["heights"], layout["groups"], layout["num_groups"]
    return (
        bool(heights)
        and len(heights) == len(groups)
        and sum(heights) == height
        and max(groups) < count
        and shards % count == 0
    )


# ------------------------------------------------------------------ leaves


@dataclasses.dataclass(frozen=True)
class _Spec:
    """What the record says about a leaf.

    Args:
      shape: the shape; for a ShardedTable without padding.
      dtype: the name of the dtype, or of the type of a Python number.
      rows: where the rows of a ShardedTable are; None for any other leaf.
    """

    shape: tuple[int, ...]
    dtype: str
    rows: RowLayout | None

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> _Spec:
        """The inverse of `to_json`."""
        rows = entry["rows"]
        if rows is not None:
            layout = rows["layout"]
            layout = layout if isinstance(layout, str) else TableWise(**layout)
            rows = RowLayout(rows["height"], rows["shards"], layout)
        return cls(tuple(entry["shape"]), entry["dtype"], rows)

    def to_json(self) -> dict[str, Any]:
        """Its entry in the record."""
        rows = None if self.rows is None else dataclasses.asdict(self.rows)
        return {"shape": list(self.shape), "dtype": self.dtype, "rows": rows}

    @property
    def is_empty(self) -> bool:
        """Whether it has no values; orbax stores no empty arrays."""
        return math.prod(self.shape if self.rows is None else self.shape[1:]) == 0


@dataclasses.dataclass(frozen=True)
class _Leaf(_Spec):
    """A leaf of a tree to save, or of a tree like the one to restore.

    Args:
      value: the leaf; for a table, its values.
      table_sharding: for a table, how its rows are sharded over its mesh.
    """

    value: Any
    table_sharding: NamedSharding | None = None

    @property
    def is_key(self) -> bool:
        """Whether it is an array of PRNG keys."""
        dtype = getattr(self.value, "dtype", None)
        return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)

    @property
    def sharding(self) -> Any:
        """Its sharding once restored; None if uncommitted or not a JAX array."""
        if self.table_sharding is not None:
            return self.table_sharding
        sharding = getattr(self.value, "sharding", None)
        # Shardings from eval_shape over Explicit axes have no devices.
        placed = not isinstance(getattr(sharding, "mesh", None), AbstractMesh)
        return sharding if placed and getattr(self.value, "committed", True) else None

    def check_has_values(self, call: str, name: str) -> None:
        """Raises a TypeError if it is abstract or traced."""
        if isinstance(self.value, jax.ShapeDtypeStruct):
            what = "a jax.ShapeDtypeStruct"
        elif isinstance(self.value, jax.Array) and not _arguments.is_concrete(
            self.value
        ):
            what = "traced by jax.jit or another transformation"
        else:
            return
        raise TypeError(
            f"{call}: the leaf {name} is {what} and has no values. Save the array "
            "itself, outside of jax.jit."
        )

    def to_save(self) -> Any:
        """The value as orbax accepts it."""
        x = jax.random.key_data(self.value) if self.is_key else self.value
        if isinstance(x, jax.Array) and jax.process_count() > 1:
            # An array local to each process is saved from the first process.
            return np.asarray(x) if x.is_fully_addressable else x
        return np.asarray(x) if isinstance(x, np.generic) else x

    def restore_args(self, orbax: Any) -> Any:
        """Tells orbax how to restore it."""
        if isinstance(self.value, _SCALARS):
            return orbax.RestoreArgs(restore_type=type(self.value))
        if self.sharding is None or self.is_key:
            return orbax.RestoreArgs(restore_type=np.ndarray)
        return orbax.ArrayRestoreArgs(
            sharding=self.sharding, global_shape=self.shape, dtype=self.value.dtype
        )

    def from_restored(self, found: Any) -> Any:
        """The restored value with the type of this leaf."""
        x = self.value
        if self.is_key:
            keys = jax.random.wrap_key_data(found, impl=str(jax.random.key_impl(x)))
            _check_shape(keys, self.shape)
            return keys if self.sharding is None else jax.device_put(keys, x.sharding)
        if self.rows is None:  # else it has padding, and `read_rows` made it
            _check_shape(found, self.shape)
        if isinstance(x, np.generic):
            return np.asarray(found)[()]
        if isinstance(x, np.ndarray | _SCALARS) or isinstance(found, jax.Array):
            return found
        return jnp.asarray(found)

    def read_rows(self, directory: str, name: str, saved: _Spec) -> Any:
        """The leaf from a file with another row layout, or zeros for an empty leaf."""
        shape = tuple(self.value.shape)
        plain = RowLayout((*self.shape, 0)[0], 1, "block")
        source, target = saved.rows or plain, self.rows or plain
        if saved.is_empty:  # only padding is left
            part = lambda index: np.zeros(shape, self.dtype)[tuple(index)]
        else:
            stored = open_array(directory, name)
            height = source.shards * source.per_shard
            _check_shape(stored, (height, *shape[1:])[: len(shape)])
            if stored.dtype.name != saved.dtype:
                raise ValueError(f"{name} is stored as {stored.dtype.name}")
            part = lambda index: read_part(stored, source, target, index, shape)
        if self.sharding is None:
            return part([slice(0, n) for n in shape])
        return jax.make_array_from_callback(shape, self.sharding, part)


def _check_shape(found: Any, shape: tuple[int, ...]) -> None:
    if np.shape(found) != shape:
        raise ValueError(f"found an array of shape {np.shape(found)} for {shape}")


def _flatten(call: str, tree: Any) -> dict[str, _Leaf]:
    """The leaves of a tree by path; a table is one leaf."""
    found, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_table)
    leaves = {}
    for path, x in found:
        name = jax.tree_util.keystr(path)
        if isinstance(x, ShardedTable):
            if isinstance(x.mesh, AbstractMesh):
                raise ValueError(
                    f"{call}: the table {name or 'at the root'} is sharded over an "
                    "AbstractMesh, which has no devices. Make it with shard_rows over "
                    "a jax.sharding.Mesh."
                )
            rows = RowLayout(x.height, x.num_shards, x.layout)
            sharding = _table_sharding(x)
            leaves[name] = _Leaf(x.shape, str(x.dtype), rows, x.values, sharding)
        elif isinstance(x, _SCALARS):
            leaves[name] = _Leaf((), type(x).__name__, None, x)
        elif isinstance(x, np.ndarray | np.generic | jax.Array | jax.ShapeDtypeStruct):
            leaves[name] = _Leaf(tuple(x.shape), str(x.dtype), None, x)
        else:
            raise TypeError(
                f"{call}: the leaf {name or 'at the root'} is of type "
                f"{type(x).__name__}. A checkpoint holds arrays, numbers and PRNG "
                "keys; remove other leaves from the tree."
            )
    return leaves


def _unflatten(like: Any, leaves: Mapping[str, Any]) -> Any:
    """The inverse of `_flatten`, with the structure of `like`."""
    found, treedef = jax.tree_util.tree_flatten_with_path(like, is_leaf=_is_table)
    new = []
    for path, old in found:
        value = leaves[jax.tree_util.keystr(path)]
        table = isinstance(old, ShardedTable)
        new.append(dataclasses.replace(old, values=value) if table else value)
    return jax.tree.unflatten(treedef, new)


def _statics(tree: Any) -> dict[str, list]:
    """By path, the static fields that give row ids their meaning.

    They are the height of a SelectedRows (its axes of rows, for a stack of tables), and
    the layout of a ShardedTable whose child is a SelectedRows, because its rows are
    positions.
    """
    by_position = lambda x: isinstance(x, ShardedTable) and is_selected_rows(x.values)
    found, _ = jax.tree_util.tree_flatten_with_path(
        tree, is_leaf=lambda x: is_selected_rows(x) or by_position(x)
    )
    result = {}
    for path, x in found:
        if is_selected_rows(x):
            height = list(x.row_shape) if x.stack else x.height
            result[jax.tree_util.keystr(path)] = [height]
        elif by_position(x):
            layout = x.layout if isinstance(x.layout, str) else repr(x.layout)
            result[jax.tree_util.keystr(path)] = [x.height, layout, x.num_shards]
    return result


def _differences(
    saved: Mapping[str, _Spec],
    wanted: Mapping[str, _Spec],
    saved_statics: Mapping[str, list],
    wanted_statics: Mapping[str, list],
) -> str:
    """The differences in words, five at most; empty if there are none."""
    found = [f"{name} was not saved" for name in wanted if name not in saved]
    found += [
        f"{name} was saved but is missing" for name in saved if name not in wanted
    ]
    for name in saved.keys() & wanted.keys():
        old, new = saved[name], wanted[name]
        if old.shape != new.shape:
            found.append(f"{name} has shape {new.shape}, saved was {old.shape}")
        if old.dtype != new.dtype:
            found.append(f"{name} is {new.dtype}, saved was {old.dtype}")
    for name, old in saved_statics.items():
        new = wanted_statics.get(name, old)
        if new != old:
            words = ("height", "layout", "number of shards")
            differ = [f"{w} {n}, saved was {o}" for w, n, o in zip(words, new, old)]
            same = [n == o for n, o in zip(new, old)]
            found += [f"{name} has {d}" for d, s in zip(differ, same) if not s]
    return "; ".join(sorted(found)[:5]) + (" and more" if len(found) > 5 else "")


def _table_sharding(table: ShardedTable) -> NamedSharding | None:
    """The sharding that the table's mesh and layout imply; None for a NumPy array.

    Its values may lie elsewhere, for example state that a jitted `tx.init` made.
    """
    if isinstance(table.values, np.ndarray):
        return None
    found = getattr(table.values, "sharding", None)
    if isinstance(found, NamedSharding) and found.mesh == table.mesh:
        if found.is_equivalent_to(table.sharding, table.ndim):
            return found  # spelled the same, so that a jitted step is not recompiled
    return table.sharding


def _is_table(x: Any) -> bool:
    """Whether `x` is a ShardedTable whose child is the array of its rows.

    With another child (SelectedRows, a number, None) it is a node like any other.
    """
    kinds = jax.Array | jax.ShapeDtypeStruct | np.ndarray
    if not (isinstance(x, ShardedTable) and isinstance(x.values, kinds)):
        return False
    return x.values.shape[:1] == (x.num_shards * x.rows_per_shard,)
