"""top_k: the rows of a table with the highest scores, exactly, in chunks of the table.

Invariant: no array has V columns, or more rows of the table than a chunk. A `scan` goes
over the chunks in the order of ids and keeps the k best so far. `lax.top_k` puts the
lower index first among equal scores, so rows of earlier chunks, with lower ids, stay in
front.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparsejax import _arguments, _compat
from sparsejax._arguments import ArrayLike
from sparsejax._rows import RowTable, arithmetic, check_whole, indexing, tables
from sparsejax._segments import SegmentTensor


# Elements of a chunk's scores, and of its rows: a few MB, which fit into caches.
_CHUNK_ELEMENTS = 1 << 21
_SYMBOLIC_QUERIES = 1024  # as many are assumed in an export for any number


def top_k(
    table: ArrayLike,
    queries: ArrayLike,
    k: int,
    *,
    score: str | Callable[[jax.Array, jax.Array], jax.Array] = "dot",
    bias: ArrayLike | None = None,
    exclude: ArrayLike | SegmentTensor | None = None,
    chunk_size: int | None = None,
    precision: jax.lax.PrecisionLike = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns the k rows of a table with the highest scores for each query, exactly.

      ids[b, 0], ids[b, 1], ... = argsort_i(-score(queries[b], table[i]) - bias[i])

    The table is read in chunks of C rows, and memory beyond the result is `O(B C)`.
    Among rows with equal scores the lower id comes first. Not differentiable: for
    gradients, look the ids up and score these rows.

    Args:
      table: `[V, D]` floats. (`sparsejax.parallel.top_k` takes a ShardedTable.)
      queries: `[..., D]`, one or more vectors.
      k: int, at most V.
      score: `"dot"`; `"cosine"`, where a vector of zeros scores 0; `"l2"`, minus the
        squared distance; or a function of queries `[B, D]` and rows `[C, ...]` that
        returns scores `[B, C]`, each of its row alone.
      bias: `[V]` or `[V, 1]`, added to the scores.
      exclude: ids that must not be found, such as items that a user has seen: ints
        `[E]` for all queries, or `[..., E]`, padded with -1; or a SegmentTensor with a
        segment for each query.
      chunk_size: int C; by default a chunk takes a few megabytes.
      precision: as in `jnp.matmul`. GPUs and TPUs round the factors of float32 products
        by default; `"highest"` does not.

    Returns:
      `(scores, ids)`, both `[..., k]`, scores descending in at least float32. If fewer
      than k rows are left, the other slots have score -inf and id -1.

    Raises:
      TypeError, ValueError: an argument is not as described, or shapes do not match.

    Example:
      >>> import jax.numpy as jnp, sparsejax as sj
      >>> items = jnp.array([[1.0, 0.0], [0.0, 1.0], [2.0, 0.0]])
      >>> users = jnp.array([[1.0, 0.5]])
      >>> sj.top_k(items, users, 2)
      (Array([[2., 1.]], dtype=float32), Array([[2, 0]], dtype=int32))
      >>> sj.top_k(items, users, 2, exclude=jnp.array([[2, -1]]))[1]
      Array([[0, 1]], dtype=int32)

    References:
      `jax.lax.top_k`; TensorFlow Recommenders, `factorized_top_k.Streaming`; FAISS,
      `IndexFlat`.
    """
    table = as_table(table)
    search = as_search(table.shape, queries, k, score, exclude, precision)
    if bias is not None:
        bias = _arguments.to_array(bias, "bias", "an array of floats")
        if bias.shape not in ((len(table),), (len(table), 1)):
            raise ValueError(
                f"bias must be [{len(table)}] or [{len(table)}, 1], got {bias.shape}."
            )
        bias = lax.stop_gradient(bias.reshape(len(table), 1))
    return results(search, *search_rows(search, table, bias, chunk_size))


# ------------------------------------------------------------------ with parallel


def as_table(table: Any) -> jax.Array:
    """Returns `table` as an array of floats, or raises."""
    fix = ""
    if isinstance(table, RowTable):
        fix = "Use sparsejax.parallel.top_k for a ShardedTable."
    check_whole("table", table, "a search", fix)
    return _arguments.as_floats(tables.as_table(table), "table")


class Search(NamedTuple):
    """The checked arguments of a search.

    Args:
      k: int.
      lead: the leading axes of the queries.
      score: a function of queries and rows.
      queries: `[B, D]`.
      pairs: `(query [m], row [m])` that are excluded, or None.
    """

    k: int
    lead: tuple[int, ...]
    score: Callable[..., jax.Array]
    queries: jax.Array
    pairs: tuple[jax.Array, jax.Array] | None


def as_search(
    shape: Any, queries: Any, k: Any, score: Any, exclude: Any, precision: Any
) -> Search:
    """Checks the arguments of `top_k` for a table of this shape."""
    height = shape[0]
    k = _arguments.static_int("k", k, 1)
    if k > height:
        raise ValueError(f"k={k} is above the number of rows of the table, {height}.")
    queries = _arguments.as_floats(queries, "queries")
    fun: Any = score
    if not callable(score):
        if len(shape) != 2 or queries.shape[-1:] != shape[1:]:
            raise ValueError(
                f"table must be [V, D] and queries [..., D], got shapes {shape} and "
                f"{queries.shape}."
            )
        if score not in _SCORES:
            raise ValueError(
                f"score must be one of {', '.join(map(repr, _SCORES))} or a function "
                f"of (queries, rows), got {_arguments.show(score)}."
            )
        fun = functools.partial(_SCORES[score], precision=precision)
    lead = queries.shape[:-1]
    queries = queries.reshape(math.prod(lead), *queries.shape[-1:])
    pairs = None if exclude is None else _excluded_pairs(exclude, height, lead)
    return Search(k, lead, fun, lax.stop_gradient(queries), pairs)


def search_rows(
    search: Search, table: jax.Array, bias: Any, chunk_size: Any, count: Any = None
) -> tuple[jax.Array, jax.Array]:
    """Returns the scores and ids of the best min(k, V) rows of `table`.

    An excluded row has the score -inf.

    Args:
      search: the search.
      table: the table, or a device's part of it.
      bias: `[V, 1]` or None.
      chunk_size: int or None.
      count: the number of valid rows, which come first; None for all.
    """
    queries, height = search.queries, table.shape[0]
    k = min(search.k, height)
    table = lax.stop_gradient(table)
    if chunk_size is None:
        rows = queries.shape[0]
        if _compat.is_symbolic_dim(rows):
            rows = _SYMBOLIC_QUERIES
        width = max(rows, math.prod(table.shape[1:]), 1)
        chunk_size = max(_CHUNK_ELEMENTS // width, 128)
    chunk = min(_arguments.static_int("chunk_size", chunk_size, 1), height)
    within = lax.iota(_arguments.index_dtype(height), chunk)

    def scores_of(first, begin):
        part, first = table, jnp.asarray(first)
        if table.dtype.itemsize < 4:
            # To slice narrow floats, XLA:CPU casts them. It would hoist the cast of the
            # whole table out of the loop.
            part, first = lax.optimization_barrier((table, first))
        rows = lax.dynamic_slice_in_dim(part, first, chunk)
        scores = _scores(search.score, queries, rows)
        if bias is not None:
            part = lax.dynamic_slice_in_dim(bias, first, chunk)
            scores += part.reshape(1, chunk).astype(scores.dtype)
        # -0. equals 0., but `lax.top_k` orders the two.
        scores = jnp.where(scores == 0, 0, scores)
        # The last chunk begins earlier, so that it ends with the table. Its first rows
        # were in the chunk before.
        is_new = first + within >= begin
        if count is not None:
            is_new &= first + within < count
        scores = jnp.where(is_new[None], scores, -jnp.inf)
        if search.pairs is None:
            return scores
        query, row = search.pairs
        is_here = (row >= first) & (row < first + chunk)
        column = jnp.where(is_here, row - first, chunk)
        return scores.at[query, column].set(-jnp.inf, mode="drop")

    def step(best, begin):
        scores, ids = best
        first = jnp.minimum(begin, height - chunk)
        top, place = lax.top_k(scores_of(first, begin), min(k, chunk))
        scores = jnp.concatenate([scores, top], axis=1)
        ids = jnp.concatenate([ids, first + place.astype(ids.dtype)], axis=1)
        scores, place = lax.top_k(scores, k)
        return (scores, jnp.take_along_axis(ids, place, axis=1)), None

    begins = np.arange(0, height, chunk).astype(within.dtype)
    like = jax.eval_shape(scores_of, begins[0], begins[0])
    none = jnp.full((queries.shape[0], k), -jnp.inf, like.dtype)
    nowhere = jnp.full(none.shape, -1, within.dtype)
    # Inside `shard_map` the carry must vary over the same axes as its inputs.
    inputs = jax.tree.leaves((queries, table, bias, search.pairs, count))
    axes = frozenset().union(*map(_compat.varying_axes, inputs))
    none, nowhere = (_compat.to_varying(x, axes) for x in (none, nowhere))
    best, _ = lax.scan(step, (none, nowhere), begins)
    return best


def results(
    search: Search, scores: jax.Array, ids: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the public result of scores and rows `[B, k]`."""
    ids = jnp.where(scores == -jnp.inf, _arguments.scalar(-1, ids), ids)
    shape = (*search.lead, search.k)
    return scores.reshape(shape), ids.reshape(shape)


# ------------------------------------------------------------------ private


def _scores(score: Callable, queries: jax.Array, rows: jax.Array) -> jax.Array:
    scores, shape = score(queries, rows), (queries.shape[0], len(rows))
    if not isinstance(scores, jax.Array) or scores.shape != shape:
        raise ValueError(
            f"score must return [B, C] for queries [B, D] and C rows, {shape} here, "
            f"got {_arguments.kind_of(scores)}."
        )
    return scores.astype(indexing.float_accumulator_dtype(scores.dtype))


def _excluded_pairs(
    exclude: Any, height: int, lead: tuple[int, ...]
) -> tuple[jax.Array, jax.Array]:
    """Returns pairs of a query and an id to exclude, both `[m]`."""
    size = math.prod(lead)
    if isinstance(exclude, SegmentTensor):
        if exclude.num_segments != size:
            raise ValueError(
                f"exclude must have {size} segments, got {exclude.num_segments}."
            )
        ids = _arguments.as_ids(exclude.values, height, "exclude")
        query = exclude.segment_ids
        # An element outside all segments excludes nothing.
        return jnp.where(query < 0, _arguments.scalar(size, query), query), ids
    ids = _arguments.as_ids(exclude, height, "exclude")
    if ids.ndim != 1 and ids.shape[:-1] != lead or not ids.ndim:
        raise ValueError(
            f"exclude must be [E], or [..., E] with the axes {lead} of queries, got "
            f"shape {ids.shape}. Pad with -1, or pass a SegmentTensor."
        )
    each = ids.shape[-1]
    ids = jnp.broadcast_to(ids, (*lead, each)).reshape(size * each)
    return jnp.repeat(lax.iota(jnp.int32, size), each), ids


# ------------------------------------------------------------------ scores


def _dot(queries: jax.Array, rows: jax.Array, precision: Any) -> jax.Array:
    return arithmetic.einsum("bd,cd->bc", queries, rows, precision=precision)


def _cosine(queries: jax.Array, rows: jax.Array, precision: Any) -> jax.Array:
    queries, rows = _divided_by_units(queries), _divided_by_units(rows)
    scores = _dot(queries, rows, precision)

    def inverse_norms(x):
        squares = _squares(x).astype(scores.dtype)
        return jnp.where(squares > 0, lax.rsqrt(squares), 0)

    return scores * inverse_norms(queries)[:, None] * inverse_norms(rows)[None]


def _l2(queries: jax.Array, rows: jax.Array, precision: Any) -> jax.Array:
    twice = 2 * _dot(queries, rows, precision)
    squares = [_squares(x).astype(twice.dtype) for x in (queries, rows)]
    # Rounding must not make a distance to itself negative.
    return jnp.minimum(twice - squares[1][None] - squares[0][:, None], 0)


def _squares(x: jax.Array) -> jax.Array:
    x = x.astype(indexing.accumulator_dtype(x.dtype))
    return jnp.sum(x * x, axis=-1)


def _divided_by_units(x: jax.Array) -> jax.Array:
    """Divides vectors by powers of two, so that their squares are normal numbers."""
    largest = jnp.max(jnp.abs(x), axis=-1, keepdims=True, initial=0)
    return x / arithmetic.power_of_two(largest)


_SCORES = {"dot": _dot, "cosine": _cosine, "l2": _l2}
