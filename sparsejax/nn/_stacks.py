"""Features of an EmbeddingCollection, read from its stacks in few gathers.

Tables of the same width and dtype are concatenated into one array, a stack. A batch of
many features then reads a few long arrays once each, instead of many short ones. An id
of a table becomes a row of its stack; an id that is out of range for its table never
becomes a row of the next table.

Features whose tables share a stack are read together if the same operation reads them:
one lookup reads single ids and rows that are not reduced, one fixed-length bag reads
all bags of a given length, and one segmented bag reads all ragged bags. The result is
then split.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sparsejax import _arguments
from sparsejax._lookup import lookup
from sparsejax._lookup.embedding_bag import embedding_bag
from sparsejax._rows import RowTable, SelectedRows, indexing, read_stacked_tables
from sparsejax._segments import SegmentTensor
from sparsejax.nn._embedding import split_weights


# These replace a row of the stack. Padding is in no bag; `mode` decides what an id out
# of range reads.
PADDING, OUT_OF_RANGE = -1, -2


@dataclasses.dataclass(frozen=True)
class Feature:
    """One feature of a batch, with its ids mapped to rows of a stack.

    Args:
      name: of the feature.
      layer: of its table.
      table: the name of the stack, and the table's rows `[start, stop)` in it.
      combiner: how bags are reduced; `"none"` if rows are read and not reduced.
      rows: integers: `[n]` rows to look up, `[bags, L]`, or `[n]` with segments.
      weights: numbers of the same shape, or None.
      segments: the SegmentTensor of the ids, or None.
      shape: the axes of the result before the row.
      examples: the length of the first axis of the ids.
    """

    name: str
    layer: Any
    table: tuple[str, int, int]
    combiner: str
    rows: jax.Array
    weights: jax.Array | None
    segments: Any
    shape: tuple[int, ...]
    examples: int

    @classmethod
    def of(
        cls,
        name: str,
        layer: Any,
        table: tuple[str, int, int],
        height: int,
        combiner: str,
        ids: Any,
        weights: Any,
    ) -> Feature:
        """Maps ids to rows of a stack of this height, and decides how they are read."""
        segments = None
        if isinstance(ids, SegmentTensor):
            segments, weights = split_weights(ids, weights)
            ids = segments.values
        ids = _arguments.as_integers(ids, f"the ids of the feature {name!r}")
        examples = ids.shape[0] if ids.ndim else 1
        rows = _rows_of(layer, table, height, ids, segments)
        if weights is not None:
            weights = _as_weights(name, weights, ids.shape, combiner, layer)
        # A bag of one row is that row, whatever the combiner.
        is_single = ids.ndim < 2 or ids.shape[-1] == 1
        if combiner == "none" or (segments is None and weights is None and is_single):
            shape = ids.shape if combiner == "none" or ids.ndim < 2 else ids.shape[:-1]
            combiner, rows = "none", rows.reshape(-1)
            if layer.mode == "zero":  # then it can be read together with other modes
                rows = jnp.maximum(rows, _arguments.scalar(PADDING, rows))
        elif segments is not None:
            if ids.ndim != 1:
                raise ValueError(
                    "sparsejax.nn.EmbeddingCollection: a SegmentTensor of bags has ids "
                    f"[n], but the feature {name!r} has ids of shape {ids.shape}."
                )
            shape = (segments.num_segments,)
        else:
            *shape, length = ids.shape if ids.ndim > 1 else (*ids.shape, 1)
            rows = rows.reshape(math.prod(shape), length)
            weights = None if weights is None else weights.reshape(rows.shape)
        args = name, layer, table, combiner, rows, weights, segments
        return cls(*args, tuple(shape), examples)

    @property
    def mode(self) -> str:
        """How a row out of range is read: "zero" or "fill"."""
        return "zero" if self.layer.mode == "zero" else "fill"

    @property
    def is_lookup(self) -> bool:
        """True if rows are read and not reduced."""
        return self.combiner == "none"

    @property
    def is_ragged(self) -> bool:
        """True if bags of any length are reduced."""
        return not self.is_lookup and self.segments is not None

    def kind(self, is_pulled: bool) -> Any:
        """Features of equal kinds are read together.

        Only rows that were pulled make a difference between the modes of lookups: the
        mode then also decides what a row that is not stored reads.
        """
        if self.is_lookup:
            mode = self.mode if is_pulled else "fill"
            return self.table[0], mode, self.layer.max_norm
        length = None if self.is_ragged else self.rows.shape[1]
        how = self.combiner, length, self.weights is not None
        return self.table[0], self.mode, self.layer.max_norm, *how

    def row_ids(self) -> jax.Array:
        """Returns the rows as `[n]`, for pulling them."""
        rows = self.rows.reshape(-1)
        if self.mode == "zero":  # which reads no row out of range
            rows = jnp.maximum(rows, _arguments.scalar(PADDING, rows))
        return rows

    def result(self, x: jax.Array) -> Any:
        """Returns the rows read, or the bags, in the shape and dtype of the result."""
        x = x.reshape(*self.shape, *x.shape[1:])
        x = x if self.layer.dtype is None else x.astype(self.layer.dtype)
        if self.is_lookup and self.segments is not None:
            return self.segments.map(lambda _: x)
        return x


def _rows_of(
    layer: Any, table: tuple[str, int, int], height: int, ids: Any, segments: Any
) -> jax.Array:
    """Returns signed integers: rows in `[start, stop)`, `PADDING`, `OUT_OF_RANGE`."""
    _, start, stop = table
    skip = lookup.padding_mask(ids, layer.padding_id)
    if segments is not None:
        inside = indexing.in_range(segments.segment_ids, segments.num_segments)
        inside = jnp.broadcast_to(indexing.append_axes(inside, ids.ndim), ids.shape)
        skip = ~inside if skip is None else skip | ~inside
    ids = _arguments.as_ids(ids, stop - start)
    in_range = indexing.in_range(ids, stop - start)
    like = jax.ShapeDtypeStruct((stop - start,), jnp.float32)
    if layer.mode == "clip":
        ids, in_range = lookup.clip_ids(like, ids), None
    elif layer.mode == "error":
        lookup.check_none(like, ~in_range if skip is None else ~(in_range | skip), ids)
    wide = _arguments.index_dtype(height)
    rows = ids.astype(wide) + np.array(start, wide)
    if in_range is not None:
        rows = jnp.where(in_range, rows, np.array(OUT_OF_RANGE, wide))
    return rows if skip is None else jnp.where(skip, np.array(PADDING, wide), rows)


def _as_weights(
    name: str, weights: Any, shape: tuple, combiner: str, layer: Any
) -> jax.Array:
    weights = jnp.asarray(weights)
    real = not jnp.iscomplexobj(weights) and weights.dtype != bool
    if weights.shape != shape or not real or combiner not in ("sum", "mean", "sqrtn"):
        raise ValueError(
            "sparsejax.nn.EmbeddingCollection: weights must be real numbers in the "
            f"shape of the ids, for the combiners sum, mean and sqrtn; the feature "
            f"{name!r}, with ids of shape {shape} and combiner {combiner!r}, has "
            f"{weights.dtype} of shape {weights.shape}."
        )
    return weights.astype(indexing.float_accumulator_dtype(layer.param_dtype))


# ------------------------------------------------------------------ reading


def read_all(stacks: Mapping[str, Any], features: Sequence[Feature]) -> dict[str, Any]:
    """Returns the result of each feature, by name."""
    groups: dict[Any, list[Feature]] = {}
    for feature in features:
        is_pulled = isinstance(stacks[feature.table[0]], SelectedRows)
        groups.setdefault(feature.kind(is_pulled), []).append(feature)
    results = {}
    for (name, mode, *_), group in groups.items():
        results.update(_read_group(stacks[name], mode, group))
    return {feature.name: results[feature.name] for feature in features}


def _read_group(stack: Any, mode: str, group: Sequence[Feature]) -> dict[str, Any]:
    examples = {feature.examples for feature in group}
    is_sharded = isinstance(stack, RowTable) and not group[0].is_ragged
    if is_sharded and len(examples) == 1 and examples != {0}:
        return _read_by_example(stack, mode, group, *examples)
    rows = _join([feature.rows for feature in group])
    weights = _join([x.weights for x in group if x.weights is not None])
    segments, counts = None, [feature.rows.shape[0] for feature in group]
    if group[0].is_ragged:
        counts = [feature.segments.num_segments for feature in group]
        segments = _number_segments([feature.segments for feature in group])
    # The transpose of a split is one concatenation. The transpose of slices sums one
    # full-size array per feature, which takes four times as long as the rest of the
    # step.
    out = _read(stack, mode, group[0], rows, weights, segments)
    parts = jnp.split(out, np.cumsum(counts)[:-1].tolist())
    return {x.name: x.result(part) for x, part in zip(group, parts)}


def _read(
    stack: Any, mode: str, how: Feature, rows: Any, weights: Any, segments: Any = None
) -> jax.Array:
    """Reads the rows, or their bags, of all features that are read as `how`."""
    if how.is_lookup:
        skip = rows == _arguments.scalar(PADDING, rows)
        out = lookup.read(stack, rows, skip, mode)
        if how.layer.max_norm is not None:
            out = lookup.clip_rows(out, how.layer.max_norm, 1)
        return out
    segment_ids, count, is_sorted = segments or (None, None, False)
    return embedding_bag(
        stack,
        rows,
        segment_ids,
        count,
        weights=weights,
        combiner=how.combiner,
        mode=mode,
        padding_id=PADDING,
        max_norm=how.layer.max_norm,
        indices_are_sorted=is_sorted,
    )


def _read_by_example(
    stack: RowTable, mode: str, group: Sequence[Feature], examples: int
) -> dict[str, Any]:
    """Reads as `_read_group`, with ids ordered by example and not by feature.

    If examples are sharded over devices, ids in this order are sharded alike. Ordered
    by feature, all ids and rows would move to other devices.
    """
    together = lambda parts: jnp.concatenate(
        [x.reshape(examples, -1, *x.shape[1:]) for x in parts], axis=1
    )
    flat = lambda x: x.reshape(-1, *x.shape[2:])
    rows = together([x.rows for x in group])
    weights = [x.weights for x in group if x.weights is not None]
    weights = together(weights) if weights else None
    counts = [x.rows.shape[0] // examples for x in group]
    bags = lambda x: None if x is None else x.reshape(examples, sum(counts), -1)
    how = group[0]
    out = read_stacked_tables(
        stack,
        bags(rows),
        bags(rows == _arguments.scalar(PADDING, rows)),
        [x.table[1:] for x, count in zip(group, counts) for _ in range(count)],
        bags(weights),
        combiner=how.combiner,
        mode=mode,
        max_norm=how.layer.max_norm,
    )
    if out is None:
        weights = None if weights is None else flat(weights)
        out = _read(stack, mode, how, flat(rows), weights)
        out = out.reshape(examples, -1, *out.shape[1:])
    parts = jnp.split(out, np.cumsum(counts)[:-1].tolist(), axis=1)
    return {x.name: x.result(flat(part)) for x, part in zip(group, parts)}


def _join(parts: Sequence[jax.Array]) -> Any:
    """Joins the parts in a row; None if there are none."""
    return jnp.concatenate(parts) if len(parts) > 1 else next(iter(parts), None)


def _number_segments(
    tensors: Sequence[SegmentTensor],
) -> tuple[jax.Array, int, bool]:
    """Joins segment ids; also returns their number, and True if they are sorted.

    Empty elements move to the last segment of their feature, which does not count their
    row, `PADDING`. Ids that ascend within each feature therefore ascend overall.
    """
    ids, count = [], sum(x.num_segments for x in tensors)
    wide, base = _arguments.index_dtype(count), 0
    for x in tensors:
        last = _arguments.scalar(max(x.num_segments - 1, 0), x.segment_ids)
        inside = indexing.in_range(x.segment_ids, x.num_segments)
        segment_ids = jnp.where(inside, x.segment_ids, last).astype(wide)
        ids.append(segment_ids + np.array(base, wide))
        base += x.num_segments
    return _join(ids), count, all(x.is_sorted for x in tensors)
