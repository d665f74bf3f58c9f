"""save and restore: trees with sharded tables, through the user's own orbax.

A ShardedTable stores its rows in an order that depends on its layout and on the number
of devices. `save` gives orbax each table as a plain array in the order of ids, sharded
by blocks of rows. `restore` reads such an array sharded by blocks over the new devices.
An exchange of rows (`_exchange.rearrange`) converts between both orders, so that no
device holds a whole table. Any number of devices and any layout can restore a table,
and orbax alone can read it.

Orbax does the rest: directories, asynchronous writes, the rename of a step once it is
complete, old steps, several processes. Orbax also stores, as custom metadata, the shape
and the type of each leaf, which `restore` compares before it reads, and a checksum of
its values, which `restore` compares after. Each device sums its own part.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding

from sparsejax._arguments import PyTree
from sparsejax._rows import is_selected_rows
from sparsejax.parallel._exchange import rearrange
from sparsejax.parallel._layout import Block
from sparsejax.parallel._read import owners_of
from sparsejax.parallel._table import ShardedTable, check_has_devices


if TYPE_CHECKING:
    from orbax.checkpoint import CheckpointManager


_LEAVES = "sparsejax"  # the key of the leaves' shapes and types in the metadata
_SUMS = "sparsejax_checksums"  # and of their checksums
_SCALARS = bool | int | float | complex
_PACKED = "int2", "int4", "uint2", "uint4"  # several elements are in one byte
_PART = 1 << 20  # words on the host that are summed at once


def save(
    path_or_manager: str | os.PathLike[str] | CheckpointManager,
    tree: PyTree,
    *,
    step: int | None = None,
    custom_metadata: Mapping[str, Any] | None = None,
) -> bool:
    """Saves a tree that may hold sharded tables, with orbax.

    A checkpoint of N devices can be restored on M devices and in another layout, bit
    for bit: row r of a table is row r again. Tables are stored as arrays in the order
    of ids, zeros behind them, so that orbax by itself can also read them.

    With a CheckpointManager `save` returns once the values are on the host, and orbax
    writes in the background: the arrays may be donated at once. Until then, tables of
    other layouts than `"block"` need memory for a copy on their devices. A save that
    fails or is interrupted leaves the steps before it.

    Args:
      path_or_manager: an `orbax.checkpoint.CheckpointManager`; or the path of a new
        directory, for one checkpoint that is written before `save` returns.
      tree: any pytree of arrays, numbers, PRNG keys, ShardedTables, SelectedRows and
        SegmentTensors.
      step: int, the number of the checkpoint; only for a CheckpointManager.
      custom_metadata: a dictionary that JSON can hold, for example the position of a
        data loader. `manager.metadata(step).custom_metadata` returns it.

    Returns:
      bool, False if the options of the CheckpointManager (`save_interval_steps`, for
      example) leave this step out.

    Raises:
      ImportError: orbax is not installed.
      TypeError: `path_or_manager` or a leaf has the wrong type, or a leaf has no values
        (abstract, or traced by `jit`).
      ValueError: the step is missing or not later than the saved steps, or orbax
        refuses the path.

    Example:
      >>> import jax, numpy as np, orbax.checkpoint as ocp, tempfile, sparsejax as sj
      >>> mesh = jax.make_mesh((1,), ("x",), devices=jax.devices()[:1])
      >>> table = sj.parallel.shard_rows(np.ones((5, 2), np.float32), mesh, "x")
      >>> with ocp.CheckpointManager(tempfile.mkdtemp()) as manager:
      ...     at = {"batch": 70}
      ...     _ = sj.parallel.save(manager, {"t": table}, step=7, custom_metadata=at)
      ...     spec = jax.ShapeDtypeStruct((5, 2), np.float32)
      ...     like = sj.parallel.shard_rows(spec, mesh, "x", layout="block")
      ...     restored = sj.parallel.restore(manager, {"t": like})
      ...     print(manager.metadata(7).custom_metadata["batch"])
      70
      >>> restored["t"]
      ShardedTable(float32[5, 2], 1 x 5 rows over 'x', layout='block')

    References:
      Orbax, `CheckpointManager`; PyTorch, distributed checkpoint (resharding at load).
    """
    orbax = _orbax()
    manager: Any = path_or_manager
    is_manager = isinstance(manager, orbax.CheckpointManager)
    if is_manager == (step is None):
        raise ValueError(
            "sparsejax.parallel.save: step is the number of steps trained for a "
            f"CheckpointManager, and left out for a path, got step={step!r}."
        )
    description = _describe(tree)
    for name, leaf in _named_leaves(tree):
        if isinstance(leaf.values if _is_table(leaf) else leaf, jax.ShapeDtypeStruct):
            raise TypeError(
                f"sparsejax.parallel.save: the leaf {name} is abstract, {leaf}, and "
                "has no values. Save the array itself."
            )
    leaves, treedef = jax.tree.flatten(_without_masked_tables(tree), is_leaf=_is_table)
    if step is not None:
        latest = manager.latest_step()
        if latest is not None and step <= latest:
            raise ValueError(
                f"sparsejax.parallel.save: step {step} is not later than the latest "
                f"step in {manager.directory}, {latest}. Continue from latest_step(), "
                "or save to another directory."
            )
        if not manager.should_save(step):
            return False
    leaves = [_to_save(x) for x in leaves]
    args = orbax.args.PyTreeSave(treedef.unflatten(leaves))
    sums = _checksums(tree, leaves)
    metadata = {**(custom_metadata or {}), _LEAVES: description, _SUMS: sums}
    if step is not None:
        return manager.save(step, args=args, custom_metadata=metadata)
    with orbax.Checkpointer(orbax.PyTreeCheckpointHandler()) as checkpointer:
        path = _absolute(path_or_manager)
        checkpointer.save(path, args=args, custom_metadata=metadata)
    return True


def restore(
    path_or_manager: str | os.PathLike[str] | CheckpointManager,
    like: PyTree,
    *,
    step: int | None = None,
) -> Any:
    """Restores a tree that `save` saved, sharded as `like`.

    Each device reads the rows that it owns in the order of ids, and sends them to the
    devices that own them in the layout of `like`. Values are compared with the
    checksums that `save` stored.

    Args:
      path_or_manager: an `orbax.checkpoint.CheckpointManager`, or the path of a
        checkpoint that `save` wrote.
      like: a tree of arrays, or of their abstract forms (`jax.ShapeDtypeStruct`,
        `shard_rows` of one, the result of `jax.eval_shape`). Leaves get its shardings;
        meshes and layouts may differ from the saved ones. A table may be saved sharded
        and restored as a plain array, and the reverse. The rows of a ShardedTable go to
        the devices of its mesh, wherever its values in `like` are. Another leaf without
        a sharding, or not committed to a device, is restored uncommitted, so that it
        works with any mesh.
      step: int, for a CheckpointManager; None for the latest.

    Returns:
      A tree with the structure of `like`; NumPy arrays and numbers keep their type.

    Raises:
      FileNotFoundError: there is no such checkpoint.
      ImportError: orbax is not installed.
      TypeError: `path_or_manager` has the wrong type.
      ValueError: trees, heights, shapes or dtypes differ (the message says which), or
        the checkpoint is damaged: bytes are changed, or files truncated or missing.

    Example:
      >>> import jax.numpy as jnp, tempfile, sparsejax as sj
      >>> path = tempfile.mkdtemp() + "/checkpoint"
      >>> _ = sj.parallel.save(path, {"w": jnp.arange(3.0)})
      >>> sj.parallel.restore(path, {"w": jnp.zeros(3)})
      {'w': Array([0., 1., 2.], dtype=float32)}
    """
    orbax = _orbax()
    description = _describe(like)
    how = functools.partial(_restore_args, orbax)
    how = jax.tree.map(how, _without_masked_tables(like), is_leaf=_is_table)
    with contextlib.ExitStack() as stack:
        if isinstance(path_or_manager, orbax.CheckpointManager):
            checkpointer: Any = path_or_manager
            checkpointer.wait_until_finished()
            key = checkpointer.latest_step() if step is None else step
            place = f"step {key} in {checkpointer.directory}"
            exists = key in checkpointer.all_steps()
        else:
            handler = orbax.PyTreeCheckpointHandler()
            checkpointer = stack.enter_context(orbax.Checkpointer(handler))
            key = place = _absolute(path_or_manager)
            exists = os.path.isdir(place) or "://" in place
        if not exists:
            raise FileNotFoundError(
                f"sparsejax.parallel.restore: there is no checkpoint {place}. Check "
                "the path; a save that was interrupted leaves no checkpoint."
            )
        with _reading(place), _without_warning():
            metadata = checkpointer.metadata(key).custom_metadata or {}
            if _LEAVES not in metadata:
                raise ValueError("sparsejax.parallel.save did not write it")
            differences = _differences(metadata[_LEAVES], description)
        if differences:
            raise ValueError(
                "sparsejax.parallel.restore: `like` differs from the tree saved at "
                f"{place}: {differences}. Make `like` as the saved tree was made."
            )
        with _reading(place):
            restored = how
            if jax.tree.leaves(how):  # orbax refuses a tree without arrays
                args = orbax.args.PyTreeRestore(item=how, restore_args=how)
                restored = checkpointer.restore(key, args=args)
            return _as_tree(like, restored, metadata[_SUMS])


@contextlib.contextmanager
def _without_warning() -> Iterator[None]:
    """Drops orbax's warnings of items that a new CheckpointManager has not read yet."""
    is_other = lambda record: "could not be restored" not in record.getMessage()
    logger = logging.getLogger("absl")
    logger.addFilter(is_other)
    try:
        yield
    finally:
        logger.removeFilter(is_other)


@contextlib.contextmanager
def _reading(place: str) -> Iterator[None]:
    """Turns errors inside into errors about the checkpoint."""
    try:
        yield
    except Exception as error:  # orbax raises many types for damaged files
        raise ValueError(
            f"sparsejax.parallel.restore: {place} could not be read; it may be damaged "
            # Orbax's own text may contain a whole spec.
            f"or incomplete: {str(error)[:200]}."
        ) from error


# ------------------------------------------------------------------ arguments


def _orbax() -> Any:
    try:
        import orbax.checkpoint as orbax
    except ImportError as error:
        raise ImportError(
            "sparsejax.parallel.save and restore need orbax: pip install "
            "orbax-checkpoint, or pip install 'sparsejax[interop]'."
        ) from error
    return orbax


def _absolute(path: Any) -> str:
    path = os.fspath(path)
    return path if "://" in path else os.path.abspath(path)


# ------------------------------------------------------------------ descriptions


def _describe(tree: Any) -> dict[str, str]:
    """Returns, by path, each leaf's shape and type, and the meaning of row ids.

    A SelectedRows has its height. A ShardedTable whose child is a SelectedRows has its
    layout, because its rows are positions.
    """
    described = {}
    for name, x in _named_leaves(tree):
        if isinstance(x, ShardedTable):
            check_has_devices(x.mesh)
        if isinstance(x, _SCALARS):
            described[name] = type(x).__name__
        elif hasattr(x, "shape") and hasattr(x, "dtype"):
            described[name] = f"{x.dtype}{list(x.shape)}"
        else:
            raise TypeError(
                "sparsejax.parallel: a checkpoint holds arrays, numbers and PRNG keys, "
                f"but the leaf {name} is of type {type(x).__name__}. Remove it from "
                "the tree."
            )
    by_position = lambda x: isinstance(x, ShardedTable) and is_selected_rows(x.values)
    is_node = lambda x: is_selected_rows(x) or by_position(x)
    for path, x in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_node):
        name = jax.tree_util.keystr(path)
        if is_selected_rows(x):
            height = list(x.row_shape) if x.stack else x.height
            described[f"height of {name}"] = f"{height}"
        elif by_position(x):
            layout = f"{x.layout!r} over {x.num_shards} devices"
            described[f"layout of {name}"] = f"{layout}, height {x.height}"
    return described


def _named_leaves(tree: Any) -> list[tuple[str, Any]]:
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_table)
    return [(jax.tree_util.keystr(path) or "at the root", x) for path, x in leaves]


def _is_table(x: Any) -> bool:
    """Returns True for a ShardedTable whose child is the array of its rows.

    With another child (SelectedRows, a number, None) it is a node like any other.
    """
    kinds = jax.Array | jax.ShapeDtypeStruct | np.ndarray
    if not (isinstance(x, ShardedTable) and isinstance(x.values, kinds)):
        return False
    return x.values.shape[:1] == (x.num_shards * x.rows_per_shard,)


def _differences(saved: Mapping[str, str], wanted: Mapping[str, str]) -> str:
    """Returns the differences in words, five at most; empty if there are none."""
    lines = [
        f"{name}: saved {saved.get(name, 'nothing')}, `like` has "
        f"{wanted.get(name, 'nothing')}"
        for name in sorted(saved.keys() | wanted.keys())
        if wanted.get(name) != saved.get(name)
    ]
    return "; ".join(lines[:5]) + (" and more" if len(lines) > 5 else "")


# ------------------------------------------------------------------ leaves


def _to_save(x: Any) -> Any:
    """Returns a leaf as orbax accepts it; None for an array without elements."""
    if _is_empty(x):
        return None
    if _is_table(x):
        return _by_id(x)
    if _is_key(x):
        return jax.random.key_data(x)
    if isinstance(x, jax.Array) and jax.process_count() > 1:
        # An array local to each process is saved from the first process.
        return np.asarray(x) if x.is_fully_addressable else x
    return np.asarray(x) if isinstance(x, np.generic) else x


def _restore_args(orbax: Any, x: Any) -> Any:
    """Tells orbax how to restore a leaf like `x`."""
    if _is_empty(x):
        return None
    if isinstance(x, _SCALARS):
        return orbax.RestoreArgs(restore_type=type(x))
    sharding = _sharding(x)
    if sharding is None or _is_key(x):
        return orbax.RestoreArgs(restore_type=np.ndarray)
    shape = _stored_shape(x) if _is_table(x) else x.shape
    # Not strict, so that orbax drops or adds the zeros behind the rows of a table.
    return orbax.ArrayRestoreArgs(
        sharding=sharding, global_shape=shape, dtype=x.dtype, strict=False
    )


def _without_masked_tables(tree: Any) -> Any:
    """Returns the tree with each table that optax masked as a masked array.

    A label function leaves `ShardedTable(MaskedNode())` of a table, and `MaskedNode()`
    of an array; a table may be restored as the other.
    """
    is_table = lambda x: isinstance(x, ShardedTable)
    is_masked = lambda x: is_table(x) and not jax.tree.leaves(x)
    unwrap = lambda x: x.values if is_masked(x) else x
    return jax.tree.map(unwrap, tree, is_leaf=is_table)


def _as_tree(like: Any, restored: Any, sums: Mapping[str, int]) -> Any:
    """Returns the restored tree with the structure and the leaf types of `like`."""
    is_none = lambda x: x is None
    is_leaf = lambda x: _is_table(x) or is_none(x)
    leaves, treedef = jax.tree.flatten(like, is_leaf=is_leaf)
    restored = jax.tree.leaves(restored, is_leaf=is_none)
    pairs = list(zip(leaves, restored, strict=True))
    for name, sum_ in _checksums(like, [b for a, b in pairs if a is not None]).items():
        if sums.get(name) != sum_:
            raise ValueError(f"the values of {name} are not those that were saved")
    return treedef.unflatten(a if a is None else _as_leaf(a, b) for a, b in pairs)


def _as_leaf(like: Any, value: Any) -> Any:
    """Returns the restored value with the type of the leaf `like`."""
    sharding = _sharding(like)
    if value is None:  # it has no elements
        shape = _stored_shape(like) if _is_table(like) else like.shape
        zeros = jnp if _is_key(like) else np
        value = zeros.zeros(shape, like.dtype)
        value = value if sharding is None else jax.device_put(value, sharding)
    if _is_table(like):
        return dataclasses.replace(like, values=_values_like(like, value))
    if _is_key(like):
        # The ids of a SelectedRows are keys again once its tree is rebuilt.
        impl = jax.random.key_impl(like)
        keys = value if _is_key(value) else jax.random.wrap_key_data(value, impl=impl)
        return keys if sharding is None else jax.device_put(keys, sharding)
    if np.ndim(value):
        value = value[: like.shape[0]]  # without the padding of a table
    if isinstance(like, np.generic):
        return np.asarray(value)[()]
    if isinstance(like, np.ndarray | _SCALARS) or isinstance(value, jax.Array):
        return value
    return jnp.asarray(value)


def _is_empty(x: Any) -> bool:
    """Returns True for an array without elements, which orbax does not store."""
    return math.prod(np.shape(x)) == 0


def _is_key(x: Any) -> bool:
    dtype = getattr(x, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)


def _sharding(x: Any) -> Any:
    """Returns a restored leaf's sharding; None if uncommitted or a NumPy array."""
    sharding = getattr(x, "sharding", None)
    # Shardings from eval_shape over Explicit axes have no devices.
    placed = not isinstance(getattr(sharding, "mesh", None), AbstractMesh)
    return sharding if placed and getattr(x, "committed", True) else None


# ------------------------------------------------------------------ checksums


def _checksums(tree: Any, leaves: list[Any]) -> dict[str, int]:
    """Returns, by path in `tree`, the checksum of each leaf as orbax stores it.

    The sum of the array's words, each times an odd number that depends on its place,
    modulo 2^32. So a change of one word is always found, zeros behind the rows of a
    table add nothing, and neither devices nor layouts matter.
    """
    sums = {}
    for (name, _), x in zip(_named_leaves(tree), leaves, strict=True):
        x = jax.random.key_data(x) if _is_key(x) else x
        if isinstance(x, jax.Array):
            sums[name] = int(_checksum(x))
        elif x is not None:
            x = np.asarray(x)
            x = x.astype(np.int8) if x.dtype.name in _PACKED else x
            words = np.ascontiguousarray(x).reshape(-1)
            words = words.view(f"u{min(x.dtype.itemsize, 4)}")
            # In parts, which need little memory.
            parts = (
                _checksum(words[k : k + _PART], np.uint32(k))
                for k in range(0, words.size, _PART)
            )
            sums[name] = sum(map(int, parts)) % 2**32
    return sums


@jax.jit
def _checksum(x: jax.Array, first: Any = np.uint32(0)) -> jax.Array:
    """Returns the checksum of words, of which the first one has the place `first`."""
    if jnp.iscomplexobj(x):
        x = jnp.stack([x.real, x.imag], axis=-1)
    if x.dtype == bool or x.dtype.name in _PACKED:
        x = x.astype(jnp.int8)
    size = min(x.dtype.itemsize, 4)
    words = jax.lax.bitcast_convert_type(x, f"uint{8 * size}").astype(jnp.uint32)
    place, stride = jnp.asarray(first), 1
    for axis in reversed(range(words.ndim)):
        step = np.uint32(stride % 2**32)
        place = place + step * jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis)
        stride *= words.shape[axis]
    mixed = place * np.uint32(0x9E3779B1)
    odd = mixed ^ (mixed >> 16) | np.uint32(1)
    return jnp.sum(words * odd, dtype=jnp.uint32)


# ------------------------------------------------------------------ order of ids


def _stored_shape(table: ShardedTable) -> tuple[int, ...]:
    """Returns the shape of a table's rows in the order of ids, with their padding."""
    shards = table.num_shards
    return shards * Block().per_shard(table.height, shards), *table.shape[1:]


def _by_id(table: ShardedTable) -> jax.Array:
    """Returns a table's rows by id, then zeros, sharded by blocks."""
    table = table.map(lambda values: jax.device_put(values, table.sharding))
    if table.layout.is_by_id:
        return table.values
    # One table at a time: exchanges in flight need memory, and on CPUs threads.
    return jax.block_until_ready(_to_blocks(table))


def _values_like(table: ShardedTable, rows: jax.Array) -> Any:
    """Turns rows by id, `[V or more, ...]`, into the values of `table`."""
    values = jax.device_put(rows, table.sharding)
    if not table.layout.is_by_id:
        table_by_id = dataclasses.replace(table, values=values)
        values = jax.block_until_ready(_from_blocks(table_by_id))
    if isinstance(table.values, np.ndarray):
        return np.asarray(values)
    sharding = getattr(table.values, "sharding", None)
    if isinstance(sharding, NamedSharding) and sharding.mesh == table.mesh:
        if sharding.is_equivalent_to(table.sharding, table.ndim):
            # Spelled the same, so that a jitted step is not recompiled.
            return jax.device_put(values, sharding)
    return jax.device_put(values, table.sharding)


# Jitted, because outside of `jit` a `shard_map` runs operation by operation.


@jax.jit
def _to_blocks(table: ShardedTable) -> jax.Array:
    rows = Block().per_shard(table.height, table.num_shards)
    return rearrange(owners_of(table), table.values, rows, table.position)


@jax.jit
def _from_blocks(table: ShardedTable) -> jax.Array:
    """Returns a table's stored values from its rows in the order of ids, `values`."""
    by_id = dataclasses.replace(table, layout=Block())
    position_of = lambda at: by_id.position(table.ids_at(at))
    rows = table.rows_per_shard
    return rearrange(owners_of(by_id), table.values, rows, position_of)
