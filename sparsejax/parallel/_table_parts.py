"""The parts of a table, made one after the other on the host.

Of a function of ids, each process makes the parts of its own devices alone. What the
function gives is looked at before it is used: NumPy would broadcast a row that is too
short over the whole of it, without a word.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec


def check_numbers(call: str, dtype: Any) -> None:
    """A TypeError unless this is a type that an array on a device can have."""
    if not (jnp.issubdtype(dtype, np.number) or jnp.issubdtype(dtype, np.bool_)):
        raise TypeError(
            f"{call}: a table must be of numbers, got {dtype}. Look texts up in a "
            "vocabulary first (sparsejax.data), and hand in an array of numbers."
        )


def check_has_devices(call: str, mesh: Any) -> None:
    """A ValueError for a mesh without devices."""
    if isinstance(mesh, AbstractMesh):
        raise ValueError(
            f"{call}: rows that are known need devices to lie on, and this is an "
            "AbstractMesh. Pass a jax.sharding.Mesh (jax.make_mesh), or "
            "jax.ShapeDtypeStruct(shape, dtype) for the abstract form."
        )


def ids_of_shard(table: Any, shard: int) -> np.ndarray:
    """The ids that a part holds, in the order of their positions."""
    if table.layout == "mod":
        return np.arange(shard, table.height, table.num_shards)
    first = shard * table.rows_per_shard
    return np.arange(first, min(first + table.rows_per_shard, table.height))


def from_function(call: str, rows_of: Callable, table: Any) -> jax.Array:
    """`values` of a table whose rows `rows_of` gives, made part by part.

    Args:
      call: for messages.
      rows_of: NumPy ids to rows.
      table: a ShardedTable without values.
    """
    check_has_devices(call, table.mesh)
    per_shard = table.rows_per_shard
    length = table.num_shards * per_shard

    def shards_in(rows: slice) -> range:
        start, stop, _ = rows.indices(length)
        return range(start // per_shard, stop // per_shard)

    # Shape and type are those of the first part here that has rows, which is kept.
    by_rows = NamedSharding(table.mesh, PartitionSpec(table.axis))
    here = by_rows.addressable_devices_indices_map((length,)).values()
    own = sorted({k for index in here if index for k in shards_in(index[0])})
    first = next((k for k in own if len(ids_of_shard(table, k))), None)
    if first is None:
        ids = np.arange(min(1, table.height))
    else:
        ids = ids_of_shard(table, first)
    like = _checked(call, rows_of(ids), ids)
    made = {} if first is None else {first: like}
    content = like.shape[1:]
    dtype = jax.dtypes.canonicalize_dtype(like.dtype)

    def part(index):
        start, stop, _ = index[0].indices(length)
        out = np.zeros((stop - start, *content), dtype)
        for shard in shards_in(index[0]):
            ids = ids_of_shard(table, shard)
            if not len(ids):
                continue
            rows = made.pop(shard, None)
            if rows is None:
                rows = _checked(call, rows_of(ids), ids, content)
            at = shard * per_shard - start
            out[at : at + len(ids)] = rows
        return out

    shape = (length, *content)
    sharding = table.map(lambda _: jax.ShapeDtypeStruct(shape, dtype)).sharding
    return jax.make_array_from_callback(shape, sharding, part, dtype=dtype)


def _checked(call: str, rows: Any, ids: np.ndarray, content: Any = None) -> np.ndarray:
    """Rows of `ids` as an array, or an error that names both shapes."""
    rows = np.asarray(rows)
    check_numbers(call, rows.dtype)
    count = len(ids)
    if rows.shape[:1] != (count,) or content not in (None, rows.shape[1:]):
        want = f"[{count}, ...]" if content is None else (count, *content)
        raise ValueError(
            f"{call}: the function gave an array of shape {rows.shape} for {count} "
            f"ids; it must give a row for each, {want}."
        )
    return rows
