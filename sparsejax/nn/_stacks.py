"""Stacks of an EmbeddingCollection: several tables in one array, read in few gathers.

Tables of the same width and dtype are concatenated into one array. A batch of many
features then reads a few long arrays once each, instead of many short ones. `translate`
maps an id of a table to a row of its stack; an id that is out of range for its table is
never mapped to a row of the next table.

Features whose tables share a stack are read together if the same operation reads them:
one lookup reads single ids and rows that are not reduced, one fixed-length bag reads
all bags of a given length, and one segmented bag reads all ragged bags. The result is
then split.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sparsejax import _arguments
from sparsejax._lookup import lookup
from sparsejax._lookup.embedding_bag import embedding_bag
from sparsejax._rows import (
    RowTable,
    SelectedRows,
    indexing,
    is_quantized,
    read_stacked_tables,
)
from sparsejax._segments import SegmentTensor
from sparsejax.nn._embedding import split_weights


# ------------------------------------------------------------------ stacks

# These replace a row of the stack. Padding is in no bag; `mode` decides what an id out
# of range reads.
PADDING, OUT_OF_RANGE = -1, -2


@dataclasses.dataclass(frozen=True)
class Place:
    """The location of a table: rows `[start, stop)` of a stack."""

    stack: str
    start: int
    stop: int

    @property
    def num_rows(self) -> int:
        """The number of rows of the table."""
        return self.stop - self.start


@dataclasses.dataclass(frozen=True)
class Stack:
    """Tables in one array.

    Args:
      shape: of the array.
      dtype: of the array.
      sparse_grad: True if its gradient may be sparse.
      tables: their names, in order.
    """

    shape: tuple[int, int]
    dtype: Any
    sparse_grad: bool
    tables: tuple[str, ...]


def arrange(
    tables: Sequence[tuple[str, Any]], stacked: bool
) -> tuple[dict[str, Stack], dict[str, Place]]:
    """Assigns each table to a stack and to rows of the stack.

    Args:
      tables: pairs of name and layer.
      stacked: if True, tables of the same width, dtype and kind of gradient share a
        stack.

    Returns:
      The stacks by name, and the places of the tables by table name.
    """
    stacks: dict[str, Stack] = {}
    places: dict[str, Place] = {}
    for name, layer in tables:
        key = _stack_name(layer) if stacked else name
        stack = stacks.get(key)
        start = 0 if stack is None else stack.shape[0]
        stop = start + layer.num_embeddings
        names = (name,) if stack is None else (*stack.tables, name)
        stacks[key] = Stack(
            (stop, layer.features), layer.param_dtype, layer.sparse_grad, names
        )
        places[name] = Place(key, start, stop)
    for stack in stacks.values():
        _arguments.index_dtype(stack.shape[0])  # raises if there are too many rows
    return stacks, places


def _stack_name(layer: Any) -> str:
    name = f"stack_width{layer.features}_{layer.param_dtype.name}"
    return name if layer.sparse_grad else f"{name}_dense"


def translate(
    call: str,
    layer: Any,
    place: Place,
    height: int,
    ids: Any,
    inside: jax.Array | None = None,
) -> jax.Array:
    """Maps ids of a table to rows of its stack.

    Args:
      call: the public call, for errors.
      layer: the table's layer, with its `padding_id` and its `mode` for ids out of
        range.
      place: the location of the table.
      height: the number of rows of the stack.
      ids: integers of any shape.
      inside: bools with the shape of `ids`, True for ids that count; None for all.

    Returns:
      Signed integers of the same shape: a row in `[start, stop)`, `PADDING` for a
      skipped id, or `OUT_OF_RANGE`.
    """
    given = _arguments.as_integers(ids)
    skip = lookup.padding_mask(given, layer.padding_id)
    if inside is not None:
        skip = ~inside if skip is None else skip | ~inside
    ids = _arguments.as_ids(given, place.num_rows)
    in_range = indexing.in_range(ids, place.num_rows)
    table = jax.ShapeDtypeStruct((place.num_rows,), jnp.float32)
    if layer.mode == "clip":
        ids, in_range = lookup.clip_ids(table, ids), None
    elif layer.mode == "error":
        bad = ~in_range if skip is None else ~(in_range | skip)
        lookup.check_none(table, bad, ids)
    wide = _arguments.index_dtype(height)
    rows = ids.astype(wide) + np.array(place.start, wide)
    if in_range is not None:
        rows = jnp.where(in_range, rows, np.array(OUT_OF_RANGE, wide))
    return rows if skip is None else jnp.where(skip, np.array(PADDING, wide), rows)


def cut(stack: Any, place: Place) -> Any:
    """One table of a stack, of its kind; a SelectedRows with all slots of the stack."""
    if is_quantized(stack):
        return jax.tree.map(lambda x: x[place.start : place.stop], stack)
    if not isinstance(stack, SelectedRows):
        return stack[place.start : place.stop]
    rows, height = stack.rows, place.num_rows
    start, stop = (_arguments.scalar(x, rows) for x in (place.start, place.stop))
    inside = (rows >= start) & (rows < stop)
    rows = jnp.where(inside, rows - start, height)
    return SelectedRows(rows, indexing.zero_unless(inside, stack.values), height)


# ------------------------------------------------------------------ features


@dataclasses.dataclass(frozen=True)
class Feature:
    """One feature of a batch, with its ids mapped to rows of a stack.

    Args:
      name: of the feature.
      key: features with equal keys are read together.
      rows: integers in the shape in which they are read: flat, `[bags, L]`, or flat
        with segments.
      weights: array with the shape of `rows`, or None.
      segments: the SegmentTensor of the ids, or None.
      finish: maps the rows read, or the bags, to the result.
      num_examples: length of the first axis of the ids.
      table: the rows `[start, stop)` of the feature's table in its stack.
    """

    name: str
    key: "Key"
    rows: jax.Array
    weights: jax.Array | None
    segments: SegmentTensor | None
    finish: Callable[[jax.Array], Any]
    num_examples: int
    table: tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Key:
    """How a feature is read.

    Args:
      stack: the name of the stack.
      mode: what an id out of range reads, `"fill"` or `"zero"`.
      max_norm: the table's `max_norm`.
      combiner: `"none"` for a lookup.
      length: the length of the bags; None for segments, 0 for a lookup.
      weighted: True if there are weights.
    """

    stack: str
    mode: str
    max_norm: float | None
    combiner: str = "none"
    length: int | None = 0
    weighted: bool = False

    @property
    def is_lookup(self) -> bool:
        """Returns True if rows are read and not reduced."""
        return self.combiner == "none"


# ------------------------------------------------------------------ one feature


def prepare(
    call: str,
    name: str,
    layer: Any,
    combiner: str,
    place: Place,
    stack: Any,
    ids: Any,
    weights: Any,
) -> Feature:
    """Maps the ids of one feature to rows of its stack, and decides how they are read.

    Args:
      call: the public call, for errors.
      name: of the feature.
      layer: the layer of the feature's table.
      combiner: how its bags are reduced; `"none"` for rows.
      place: the location of the table.
      stack: the stack that holds the table.
      ids: integers, or a SegmentTensor of them.
      weights: None, or numbers with the shape of the ids.
    """
    segments = None
    if isinstance(ids, SegmentTensor):
        segments, weights = split_weights(call, ids, weights)
        ids = segments.values
        if not hasattr(ids, "dtype"):
            raise TypeError(
                f"{call}: the values of the SegmentTensor must be one array of ids, or "
                f"{{'index', 'value'}}, got {_arguments.kind_of(ids)}."
            )
    ids = _arguments.as_integers(ids)
    if weights is not None:
        if combiner not in ("sum", "mean", "sqrtn"):
            raise ValueError(
                f"{call}: weights need combiner 'sum', 'mean' or 'sqrtn', got "
                f"combiner={combiner!r}."
            )
        weights = _as_weights(call, weights, ids.shape, stack.dtype)
    inside = None
    if segments is not None:
        inside = indexing.in_range(segments.segment_ids, segments.num_segments)
        inside = indexing.append_axes(inside, ids.ndim)
        inside = jnp.broadcast_to(inside, ids.shape)
    rows = translate(call, layer, place, stack.shape[0], ids, inside)
    cast = lambda x: x if layer.dtype is None else x.astype(layer.dtype)
    key = Key(place.stack, "zero" if layer.mode == "zero" else "fill", layer.max_norm)
    width = stack.shape[1:]

    examples, own = ids.shape[0] if ids.ndim else 1, (place.start, place.stop)

    # A bag of one row is that row, whatever the combiner.
    is_single = ids.ndim < 2 or ids.shape[-1] == 1
    if combiner == "none" or (segments is None and weights is None and is_single):
        lead = ids.shape if combiner == "none" or ids.ndim < 2 else ids.shape[:-1]

        def finish(x):
            x = cast(x.reshape(*lead, *width))
            return x if segments is None else segments.map(lambda _: x)

        if key.mode == "zero":  # then it can be read together with other modes
            bad = rows == _arguments.scalar(OUT_OF_RANGE, rows)
            rows = jnp.where(bad, _arguments.scalar(PADDING, rows), rows)
        rows = rows.reshape(-1)
        return Feature(name, key, rows, None, segments, finish, examples, own)
    key = dataclasses.replace(key, combiner=combiner, weighted=weights is not None)
    if segments is not None:
        if ids.ndim != 1:
            raise ValueError(
                f"{call}: the ids of a SegmentTensor must have shape [n], got "
                f"{ids.shape}."
            )
        key = dataclasses.replace(key, length=None)
        return Feature(name, key, rows, weights, segments, cast, examples, own)
    if ids.ndim < 2:  # each weighted id is its own bag
        lead, length = ids.shape, 1
    else:
        lead, length = ids.shape[:-1], ids.shape[-1]
    key = dataclasses.replace(key, length=length)
    shape = math.prod(lead), length
    rows = rows.reshape(shape)
    weights = None if weights is None else weights.reshape(shape)
    finish = lambda x: cast(x.reshape(*lead, *width))
    return Feature(name, key, rows, weights, None, finish, examples, own)


def _as_weights(call: str, weights: Any, shape: tuple, dtype: Any) -> jax.Array:
    weights = _arguments.to_array(weights, "weights")
    if weights.shape != shape:
        raise ValueError(
            f"{call}: weights must have the shape of ids, {shape}, got {weights.shape}."
        )
    real = jnp.issubdtype(weights.dtype, jnp.floating)
    if not (real or jnp.issubdtype(weights.dtype, jnp.integer)):
        found = str(weights.dtype)
        raise _arguments.wrong_type(call, "weights", "real numbers", found)
    return weights.astype(indexing.float_accumulator_dtype(dtype))


# ------------------------------------------------------------------ reading


def read_all(call: str, stacks: Any, features: Sequence[Feature]) -> dict[str, Any]:
    """The result of each feature, by name; `stacks` are the arrays by name."""
    groups: dict[Key, list[Feature]] = {}
    for feature in features:
        key = feature.key
        if key.is_lookup and not isinstance(stacks[key.stack], SelectedRows):
            # Under mode "zero", ids out of range are padding by now. (For a
            # SelectedRows the mode also decides what a row that is not stored reads.)
            key = dataclasses.replace(key, mode="fill")
        groups.setdefault(key, []).append(feature)
    results = {}
    for key, group in groups.items():
        results.update(_read(call, stacks[key.stack], key, group))
    return {feature.name: results[feature.name] for feature in features}


def _read(call: str, stack: Any, key: Key, group: Sequence[Feature]) -> Any:
    examples = group[0].num_examples
    if (
        isinstance(stack, RowTable)
        and key.length is not None
        and examples
        and all(feature.num_examples == examples for feature in group)
    ):
        return _read_by_example(call, stack, key, group, examples)
    rows = _join([feature.rows for feature in group])
    if key.is_lookup:
        skip = rows == _arguments.scalar(PADDING, rows)
        out = lookup.read(stack, rows, skip, key.mode)
        if key.max_norm is not None:
            out = lookup.clip_rows(out, key.max_norm, 1)
        counts = [feature.rows.shape[0] for feature in group]
    else:
        segment_ids, counts, is_sorted = None, [x.rows.shape[0] for x in group], False
        if key.length is None:
            segment_ids, counts, is_sorted = _number_segments(group)
        weights = [x.weights for x in group if x.weights is not None]
        out = embedding_bag(
            stack,
            rows,
            segment_ids,
            None if segment_ids is None else sum(counts),
            weights=_join(weights) if weights else None,
            combiner=key.combiner,
            mode=key.mode,
            padding_id=PADDING,
            max_norm=key.max_norm,
            indices_are_sorted=is_sorted,
        )
    # The transpose of a split is one concatenation. The transpose of slices sums one
    # full-size array per feature, which takes four times as long as the rest of the
    # step.
    parts = jnp.split(out, np.cumsum(counts)[:-1].tolist())
    return {x.name: x.finish(part) for x, part in zip(group, parts)}


def _read_by_example(
    call: str, stack: RowTable, key: Key, group: Sequence[Feature], examples: int
) -> Any:
    """`_read` of all ids of the group, ordered by example and not by feature.

    If examples are sharded over devices, ids in this order are sharded alike. Ordered
    by feature, all ids and rows would move to other devices.
    """
    split = lambda x: x.reshape(examples, -1, *x.shape[1:])
    together = lambda parts: jnp.concatenate([split(x) for x in parts], axis=1)
    flat = lambda x: x.reshape(-1, *x.shape[2:])
    rows = together([x.rows for x in group])
    given = [x.weights for x in group if x.weights is not None]
    weights = together(given) if given else None
    counts = [x.rows.shape[0] // examples for x in group]
    bags = lambda x: x.reshape(examples, sum(counts), -1)
    out = read_stacked_tables(
        stack,
        bags(rows),
        bags(rows == _arguments.scalar(PADDING, rows)),
        [x.table for x, count in zip(group, counts) for _ in range(count)],
        None if weights is None else bags(weights),
        combiner=key.combiner,
        mode=key.mode,
        max_norm=key.max_norm,
    )
    if out is None:
        flat_weights = None if weights is None else flat(weights)
        whole = Feature("all", key, flat(rows), flat_weights, None, split, 0, (0, 0))
        out = _read(call, stack, key, [whole])["all"]
    parts = jnp.split(out, np.cumsum(counts)[:-1].tolist(), axis=1)
    return {x.name: x.finish(flat(part)) for x, part in zip(group, parts)}


def _join(parts: Sequence[jax.Array]) -> jax.Array:
    return jnp.concatenate(parts) if len(parts) > 1 else parts[0]


def _number_segments(group: Sequence[Feature]) -> tuple[jax.Array, list[int], bool]:
    """Joined segment ids, segment counts, and True if the joined ids are sorted.

    Empty elements move to the last segment of their feature, which does not count their
    row, `PADDING`. Ids that ascend within each feature therefore ascend overall.
    """
    ids, counts, base = [], [], 0
    tensors = [x.segments for x in group if x.segments is not None]
    wide = _arguments.index_dtype(sum(x.num_segments for x in tensors))
    for x in tensors:
        last = _arguments.scalar(max(x.num_segments - 1, 0), x.segment_ids)
        inside = indexing.in_range(x.segment_ids, x.num_segments)
        own = jnp.where(inside, x.segment_ids, last).astype(wide)
        ids.append(own + np.array(base, wide))
        counts.append(x.num_segments)
        base += x.num_segments
    return _join(ids), counts, all(x.is_sorted for x in tensors)
