"""The leaves of a tree as a checkpoint holds them.

Each has its path as a name, and a table is one leaf of the shape that its user sees. A
page of JSON beside the arrays says shape, type and layout of each, so that a tree that
differs is told apart before anything is read.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding

from sparsejax import _arguments
from sparsejax._rows import is_selected_rows
from sparsejax.parallel._checkpoint_rows import RowLayout, open_array, read_part
from sparsejax.parallel._table import ShardedTable


_MOST_DIFFERENCES = 5
_SCALARS = bool | int | float | complex


@dataclasses.dataclass(frozen=True)
class Saved:
    """A leaf, as the page tells of it.

    Args:
      shape: as the user sees it.
      dtype: its name; of Python's numbers, their type's.
      rows: where the rows of a ShardedTable lie, None for all else.
    """

    shape: tuple[int, ...]
    dtype: str
    rows: RowLayout | None

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> "Saved":
        """The inverse of `to_json`."""
        rows = None if entry["rows"] is None else RowLayout(**entry["rows"])
        return cls(tuple(entry["shape"]), entry["dtype"], rows)

    def to_json(self) -> dict[str, Any]:
        """What stands on the page."""
        rows = None if self.rows is None else dataclasses.asdict(self.rows)
        return {"shape": list(self.shape), "dtype": self.dtype, "rows": rows}

    @property
    def is_empty(self) -> bool:
        """Whether there are no values to store; orbax stores no empty arrays."""
        return math.prod(self.shape if self.rows is None else self.shape[1:]) == 0


@dataclasses.dataclass(frozen=True)
class Leaf(Saved):
    """A leaf of a tree to save or to restore into.

    Args:
      value: itself; of a table its values.
      layout: of a table, how its rows lie over the devices of its mesh.
    """

    value: Any
    layout: NamedSharding | None = None

    @property
    def is_key(self) -> bool:
        """Whether it is an array of PRNG keys."""
        dtype = getattr(self.value, "dtype", None)
        return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)

    @property
    def sharding(self) -> Any:
        """Where it is to lie; None if it is to be uncommitted, or no JAX array."""
        if self.layout is not None:
            return self.layout
        sharding = getattr(self.value, "sharding", None)
        # What eval_shape gives over Explicit axes has no devices.
        placed = not isinstance(getattr(sharding, "mesh", None), AbstractMesh)
        return sharding if placed and getattr(self.value, "committed", True) else None

    def check_has_values(self, call: str, name: str) -> None:
        """Raises if it is abstract, or traced."""
        if isinstance(self.value, jax.ShapeDtypeStruct):
            what = "a jax.ShapeDtypeStruct"
        elif isinstance(self.value, jax.Array) and not _arguments.is_concrete(
            self.value
        ):
            what = "traced by jax.jit or another transformation"
        else:
            return
        raise TypeError(
            f"{call}: the leaf {name} is {what} and has no values. Save what it stands "
            "for, outside of jax.jit."
        )

    def to_save(self) -> Any:
        """As orbax takes it."""
        x = jax.random.key_data(self.value) if self.is_key else self.value
        if isinstance(x, jax.Array) and jax.process_count() > 1:
            # What each process has for itself is taken from the first.
            return np.asarray(x) if x.is_fully_addressable else x
        return np.asarray(x) if isinstance(x, np.generic) else x

    def restore_args(self, orbax: Any) -> Any:
        """As orbax is asked for it."""
        if isinstance(self.value, _SCALARS):
            return orbax.RestoreArgs(restore_type=type(self.value))
        if self.sharding is None or self.is_key:
            return orbax.RestoreArgs(restore_type=np.ndarray)
        return orbax.ArrayRestoreArgs(
            sharding=self.sharding, global_shape=self.shape, dtype=self.value.dtype
        )

    def from_restored(self, found: Any) -> Any:
        """What was read, as the leaf that was asked for."""
        x = self.value
        if self.is_key:
            keys = jax.random.wrap_key_data(found, impl=str(jax.random.key_impl(x)))
            return keys if self.sharding is None else jax.device_put(keys, x.sharding)
        if isinstance(x, np.generic):
            return np.asarray(found)[()]
        if isinstance(x, np.ndarray | _SCALARS) or isinstance(found, jax.Array):
            return found
        return jnp.asarray(found)

    def read_rows(self, directory: str, name: str, saved: Saved) -> Any:
        """The leaf, from a file where its rows lie otherwise, or that lacks it."""
        shape = tuple(self.value.shape)
        plain = RowLayout((*self.shape, 0)[0], 1, "block")
        source, target = saved.rows or plain, self.rows or plain
        if saved.is_empty:  # then it is of no more than padding
            part = lambda index: np.zeros(shape, self.dtype)[tuple(index)]
        else:
            stored = open_array(directory, name)
            part = lambda index: read_part(stored, source, target, index, shape)
        if self.sharding is None:
            return part([slice(0, n) for n in shape])
        return jax.make_array_from_callback(shape, self.sharding, part)


def flatten(call: str, tree: Any) -> dict[str, Leaf]:
    """The leaves of a tree by their paths, each table one leaf."""
    found, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_table)
    leaves = {}
    for path, x in found:
        name = jax.tree_util.keystr(path)
        shown = name or "that is the tree"
        if isinstance(x, ShardedTable):
            if isinstance(x.mesh, AbstractMesh):
                raise ValueError(
                    f"{call}: the table {shown} is laid out over an AbstractMesh, "
                    "which has no devices. Make it with shard_rows over the mesh where "
                    "it is to be."
                )
            rows, values = RowLayout(x.height, x.num_shards, x.layout), x.values
            leaves[name] = Leaf(x.shape, str(x.dtype), rows, values, _layout(x))
        elif isinstance(x, _SCALARS):
            leaves[name] = Leaf((), type(x).__name__, None, x)
        elif isinstance(x, np.ndarray | np.generic | jax.Array | jax.ShapeDtypeStruct):
            leaves[name] = Leaf(tuple(x.shape), str(x.dtype), None, x)
        else:
            bad = (
                f"{call}: the leaf {shown} is of type {type(x).__name__}. A "
                "checkpoint holds arrays, numbers and PRNG keys; leave other "
                "things out of the tree."
            )
            raise TypeError(bad)
    return leaves


def unflatten(like: Any, leaves: Mapping[str, Any]) -> Any:
    """A tree as `like`, of values by the names that `flatten` gives."""
    found, treedef = jax.tree_util.tree_flatten_with_path(like, is_leaf=_is_table)
    new = []
    for path, old in found:
        value = leaves[jax.tree_util.keystr(path)]
        table = isinstance(old, ShardedTable)
        new.append(dataclasses.replace(old, values=value) if table else value)
    return jax.tree.unflatten(treedef, new)


def statics(tree: Any) -> dict[str, list]:
    """What gives the ids in a tree their meaning, by path: heights of SelectedRows, and
    the layout where they are gradients of a sharded table, by position."""
    by_position = lambda x: isinstance(x, ShardedTable) and is_selected_rows(x.values)
    found, _ = jax.tree_util.tree_flatten_with_path(
        tree, is_leaf=lambda x: is_selected_rows(x) or by_position(x)
    )
    told = {}
    for path, x in found:
        if is_selected_rows(x):
            told[jax.tree_util.keystr(path)] = [x.height]
        elif by_position(x):
            told[jax.tree_util.keystr(path)] = [x.height, x.layout, x.num_shards]
    return told


def differences(
    saved: Mapping[str, Saved],
    wanted: Mapping[str, Saved],
    saved_statics: Mapping[str, list],
    wanted_statics: Mapping[str, list],
) -> str:
    """What is not alike, in words; nothing if all is."""
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
    more = " and more" if len(found) > _MOST_DIFFERENCES else ""
    return "; ".join(sorted(found)[:_MOST_DIFFERENCES]) + more


def _layout(table: ShardedTable) -> NamedSharding | None:
    """How the table's rows are to lie: as it says, wherever its values are now.

    State that a jitted `tx.init` made, say, may lie on one device. A NumPy array stays
    one.
    """
    if isinstance(table.values, np.ndarray):
        return None
    found = getattr(table.values, "sharding", None)
    if isinstance(found, NamedSharding) and found.mesh == table.mesh:
        if found.is_equivalent_to(table.sharding, table.ndim):
            return found  # written as it was, so that a jitted step finds it again
    return table.sharding


def _is_table(x: Any) -> bool:
    """A table of one array with its rows. Of SelectedRows, of a number or of nothing it
    is a node like any."""
    kinds = jax.Array | jax.ShapeDtypeStruct | np.ndarray
    if not (isinstance(x, ShardedTable) and isinstance(x.values, kinds)):
        return False
    return x.values.shape[:1] == (x.num_shards * x.rows_per_shard,)
