"""Features of a batch, read from stacks in as few gathers as their shapes allow.

Features whose tables share a stack are read together where the same can be done with
them: single ids and rows that are not reduced by one lookup; bags of one length by one
fixed bag; all ragged ones by one segmented bag. Each is then cut out of the result.
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
from sparsejax._rows import indexing
from sparsejax._segments import SegmentTensor
from sparsejax._segments.reduce.common import float_dtype
from sparsejax.nn._embedding_bag import split_weights
from sparsejax.nn._stacks import BAD, PADDING, Place, translate


@dataclasses.dataclass(frozen=True)
class Feature:
    """One feature of a batch, its ids translated to rows of a stack.

    Args:
      name: of the feature.
      key: what is read together: features of one key.
      rows: integers in the shape that they are read in: flat, `[bags, L]`, or flat with
        `segment_ids`.
      weights: of the shape of `rows`, or None.
      segments: the SegmentTensor they came in, or None.
      finish: from what was read for `rows` to the result.
    """

    name: str
    key: "Key"
    rows: jax.Array
    weights: jax.Array | None
    segments: SegmentTensor | None
    finish: Callable[[jax.Array], Any]


@dataclasses.dataclass(frozen=True)
class Key:
    """How features are read: alike, then together.

    Args:
      stack: from which stack.
      mode: what an id out of range reads, `"fill"` or `"zero"`.
      max_norm: of the tables.
      combiner: `"none"` for a lookup.
      length: of the bags, None where these are segments; 0 for a lookup.
      weighted: whether there are weights.
    """

    stack: str
    mode: str
    max_norm: float | None
    combiner: str = "none"
    length: int | None = 0
    weighted: bool = False

    @property
    def is_lookup(self) -> bool:
        """Whether rows are read and not reduced."""
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
    """One feature of a batch as what is to be read.

    Args:
      call: who to name in errors.
      name: of the feature.
      layer: of its table.
      combiner: how its bags are reduced; `"none"` for rows.
      place: where the table is in the stack.
      stack: of which shape and type the stack is.
      ids: integers, or a SegmentTensor of them.
      weights: None, or numbers of the shape of the ids.
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
    ids = _arguments.as_integers(call, ids)
    if weights is not None:
        if combiner not in ("sum", "mean", "sqrtn"):
            raise ValueError(
                f"{call}: weights are for the combiners 'sum', 'mean' and 'sqrtn', got "
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

    if combiner == "none" or (segments is None and weights is None and _single(ids)):
        # A bag of one row is that row, whatever the combiner.
        lead = ids.shape if combiner == "none" or ids.ndim < 2 else ids.shape[:-1]

        def finish(x):
            x = cast(x.reshape(*lead, *width))
            return x if segments is None else segments.map(lambda _: x)

        if key.mode == "zero":  # so that it can be read beside tables of other modes
            bad = rows == _arguments.scalar(BAD, rows)
            rows = jnp.where(bad, _arguments.scalar(PADDING, rows), rows)
        return Feature(name, key, rows.reshape(-1), None, segments, finish)
    key = dataclasses.replace(key, combiner=combiner, weighted=weights is not None)
    if segments is not None:
        if ids.ndim != 1:
            raise ValueError(
                f"{call}: the ids of a SegmentTensor must have shape [n], got "
                f"{ids.shape}."
            )
        key = dataclasses.replace(key, length=None)
        return Feature(name, key, rows, weights, segments, cast)
    if ids.ndim < 2:  # a weighted id is a bag of its own
        lead, length = ids.shape, 1
    else:
        lead, length = ids.shape[:-1], ids.shape[-1]
    key = dataclasses.replace(key, length=length)
    shape = math.prod(lead), length
    rows = rows.reshape(shape)
    weights = None if weights is None else weights.reshape(shape)
    finish = lambda x: cast(x.reshape(*lead, *width))
    return Feature(name, key, rows, weights, None, finish)


def _single(ids: Any) -> bool:
    return ids.ndim < 2 or ids.shape[-1] == 1


def _as_weights(call: str, weights: Any, shape: tuple, dtype: Any) -> jax.Array:
    weights = _arguments.to_array(call, weights, "weights")
    if weights.shape != shape:
        raise ValueError(
            f"{call}: weights must have the shape of the ids, {shape}, one number for "
            f"each, got {weights.shape}."
        )
    real = jnp.issubdtype(weights.dtype, jnp.floating)
    if not (real or jnp.issubdtype(weights.dtype, jnp.integer)):
        raise TypeError(f"{call}: weights must be real numbers, got {weights.dtype}.")
    return weights.astype(indexing.accumulator_dtype(float_dtype(dtype)))


# ------------------------------------------------------------------ all of them


def read_all(call: str, stacks: Any, features: Sequence[Feature]) -> dict[str, Any]:
    """The result of each feature, by name; `stacks` are the arrays by name."""
    together: dict[Key, list[Feature]] = {}
    for feature in features:
        key = feature.key
        if key.is_lookup and isinstance(stacks[key.stack], jax.Array):
            # Zeros are read as padding. (In a SelectedRows also what is not stored.)
            key = dataclasses.replace(key, mode="fill")
        together.setdefault(key, []).append(feature)
    results = {}
    for key, group in together.items():
        results.update(_read(call, stacks[key.stack], key, group))
    return {feature.name: results[feature.name] for feature in features}


def _read(call: str, stack: Any, key: Key, group: Sequence[Feature]) -> Any:
    rows = _join([feature.rows for feature in group])
    if key.is_lookup:
        skip = rows == _arguments.scalar(PADDING, rows)
        out = lookup.read_rows(call, stack, rows, skip, key.mode)
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
    # Its transpose puts the parts side by side. That of slices adds up as many arrays,
    # each of the whole size, as there are features: four times the rest of the step.
    parts = jnp.split(out, np.cumsum(counts)[:-1].tolist())
    return {x.name: x.finish(part) for x, part in zip(group, parts)}


def _join(parts: Sequence[jax.Array]) -> jax.Array:
    return jnp.concatenate(parts) if len(parts) > 1 else parts[0]


def _number_segments(group: Sequence[Feature]) -> tuple[jax.Array, list[int], bool]:
    """The segments of several features numbered through.

    What is empty goes to the last segment of its feature, where its row, `PADDING`,
    counts nothing. So ids that ascend in each feature ascend over all of them.
    """
    ids, counts, base = [], [], 0
    tensors = [x.segments for x in group if x.segments is not None]
    wide = _arguments.index_dtype(sum(x.num_segments for x in tensors))
    for x in tensors:
        last = _arguments.scalar(max(x.num_segments - 1, 0), x.segment_ids)
        own = indexing.in_range(x.segment_ids, x.num_segments)
        own = jnp.where(own, x.segment_ids, last).astype(wide)
        ids.append(own + np.array(base, wide))
        counts.append(x.num_segments)
        base += x.num_segments
    return _join(ids), counts, all(x.is_sorted for x in tensors)
