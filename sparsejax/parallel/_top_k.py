"""top_k: the rows with the highest scores of a row-sharded table.

Each owner searches its own rows, as `sparsejax.top_k` does. Only the k best of each are
sent, and merged on every device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from sparsejax import _arguments
from sparsejax._arguments import ArrayLike
from sparsejax._lookup.top_k import as_search, results, search_rows
from sparsejax._mesh import replicate
from sparsejax._segments import SegmentTensor
from sparsejax.parallel._read import check_table, owners_of, put_on_mesh
from sparsejax.parallel._table import ShardedTable, shard_rows


def top_k(
    table: ShardedTable,
    queries: ArrayLike,
    k: int,
    *,
    score: str | Callable[[jax.Array, jax.Array], jax.Array] = "dot",
    bias: ArrayLike | ShardedTable | None = None,
    exclude: ArrayLike | SegmentTensor | None = None,
    chunk_size: int | None = None,
    precision: jax.lax.PrecisionLike = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns the k rows of a row-sharded table with the highest scores for each query.

    The result equals `sparsejax.top_k` of the whole table. Every device scores all
    queries against its own rows; then N devices send `k` scores and ids for each query.

    Args:
      table: from `shard_rows`, `[V, D]` floats.
      queries: `[..., D]`; this and the others as in `sparsejax.top_k`.
      k: int, at most V.
      score: `"dot"`, `"cosine"`, `"l2"`, or a function of queries and rows.
      bias: `[V]` or `[V, 1]`, an array or a ShardedTable on the same mesh, with the
        same layout.
      exclude: ids to leave out, `[E]`, `[..., E]` or a SegmentTensor.
      chunk_size: int, the number of rows that a device reads at once.
      precision: as in `jnp.matmul`.

    Returns:
      `(scores, ids)`, both `[..., k]`, on every device.

    Raises:
      TypeError, ValueError: as `sparsejax.top_k`; ValueError also inside a `shard_map`
        over the table's mesh.

    Example:
      >>> import jax, jax.numpy as jnp, sparsejax as sj
      >>> mesh = jax.make_mesh((1,), ("x",), devices=jax.devices()[:1])
      >>> table = sj.parallel.shard_rows(jnp.arange(8.0).reshape(4, 2), mesh, "x")
      >>> sj.parallel.top_k(table, jnp.array([1.0, 0.0]), 2)
      (Array([6., 4.], dtype=float32), Array([3, 2], dtype=int32))
    """
    check_table(table)
    layout: Any = table.layout
    if not layout.is_arithmetic:
        raise ValueError(
            f"sparsejax.parallel.top_k: got a stack of tables, {table}. Shard the "
            "table that is searched by itself, with shard_rows(table, mesh, axis)."
        )
    _arguments.check_floats(table, "table")
    queries = put_on_mesh(table, _arguments.as_array(queries))
    if bias is not None and not isinstance(bias, ShardedTable):
        bias = shard_rows(jnp.asarray(bias), table.mesh, table.axis, layout=layout)
    same = lambda t: (t.height, t.mesh, t.axes, t.layout)
    if bias is not None and (
        same(bias) != same(table) or bias.shape[1:] not in ((), (1,))
    ):
        raise ValueError(
            "sparsejax.parallel.top_k: bias must be [V] or [V, 1], sharded as the "
            f"table, {table}, got {bias}."
        )
    search = as_search(table.shape, queries, k, score, exclude, precision)

    owners, shards = owners_of(table), table.num_shards
    per_shard = table.rows_per_shard
    args = [table.values, replicate(search.queries)]
    specs = [owners.table_spec, PartitionSpec()]
    if bias is not None:
        args.append(bias.values.reshape(shards * per_shard, 1))
        specs.append(owners.table_spec)
    if search.pairs is not None:
        query, ids = map(replicate, search.pairs)
        args += [query, table.position(ids)]
        specs += [PartitionSpec()] * 2

    def body(values, queries, *rest):
        shard = lax.axis_index(table.axes).astype(_arguments.index_dtype(table.height))
        rest = list(rest)
        own_bias = rest.pop(0) if bias is not None else None
        begin = shard * per_shard
        pairs = (rest[0], rest[1] - begin.astype(rest[1].dtype)) if rest else None
        # Padding rows are the last ones of a shard.
        count = layout.filled(shard, table.height, shards)
        mine = search._replace(queries=queries, pairs=pairs)
        scores, rows = search_rows(mine, values, own_bias, chunk_size, count)
        positions = jnp.where(scores == -jnp.inf, shards * per_shard, begin + rows)
        return scores[None], positions[None]

    spec = owners.table_spec
    parts = owners.shard_map(body, *args, in_specs=tuple(specs), out_specs=(spec, spec))
    scores, positions = map(replicate, parts)
    joined = [scores, table.ids_at(positions)]
    scores, ids = (jnp.concatenate(list(x), axis=1) for x in joined)
    # As `lax.top_k` sorts: NaN first, and then by score.
    keys = (~jnp.isnan(scores), -scores, ids, scores)
    *_, ids, scores = lax.sort(keys, dimension=1, num_keys=3)
    return results(search, scores[:, : search.k], ids[:, : search.k])
