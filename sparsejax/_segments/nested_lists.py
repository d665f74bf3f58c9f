"""Conversion between segments and nested Python lists, and the repr of segments.

Known values are converted by NumPy: a level is flattened or split at once, without a
Python loop over its elements.
"""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sparsejax import _arguments
from sparsejax._segments import conversions, elements as _elements


# The number of segments, and of elements of a segment, that a repr shows; with more
# elements in all, it shows only their type.
_MAX_SHOWN, _MAX_SHOWN_NESTED, _MAX_ELEMENTS = 8, 4, 100_000


@dataclasses.dataclass(frozen=True)
class Level:
    """One level of nested lists: the elements of all segments, and their lengths.

    `values` is a NumPy array, a Level whose segments are the elements, or a dict of
    these.
    """

    values: Any
    lengths: np.ndarray


# ------------------------------------------------------------------ from lists


def read(lists: Any, dtype: Any) -> Level:
    """Returns the levels of nested lists, or of a dict of them.

    The innermost numbers are cast to `dtype`.
    """
    if isinstance(lists, dict):
        return _join({k: read(v, dtype) for k, v in lists.items()})
    if not isinstance(lists, (list, tuple)) and not _is_array(lists):
        raise _not_lists(_arguments.kind_of(lists))
    segments = list(lists)
    kinds = {_kind(s) for s in _one_of_each_type(segments)}
    if kinds == {"dict"}:
        return _read_maps(segments, dtype)
    if "dict" in kinds:
        raise _mixed(segments)
    if "number" in kinds:
        number = next(s for s in segments if _kind(s) == "number")
        raise _not_lists(f"{_arguments.kind_of(number)} for a segment")
    lengths = np.fromiter(map(len, segments), np.int64, len(segments))
    if "array" in kinds:
        return Level(_join_arrays(segments, dtype), lengths)
    items = list(itertools.chain.from_iterable(segments))
    kinds = {_kind(x) == "number" for x in _one_of_each_type(items)}
    if kinds == {False}:
        return Level(read(items, dtype), lengths)
    if len(kinds) > 1:
        raise _mixed(items)
    return Level(_as_numbers(items, dtype), lengths)


def _not_lists(shown: str) -> TypeError:
    return TypeError(
        "lists must be a list of segments, and each segment a list or array of "
        f"elements, got {shown}. Write one element as [x], and none as []."
    )


def _mixed(items: list) -> TypeError:
    return TypeError(
        "the elements of a level must be all numbers, all lists or all dicts, got a "
        f"mix of {_type_names(items)}."
    )


def _read_maps(maps: list, dtype: Any) -> Level:
    for kind in set(map(type, itertools.chain.from_iterable(maps))):
        if not issubclass(kind, (int, np.integer)) or kind is bool:
            raise TypeError(
                f"The keys of a map must be integers, got {kind.__name__}. For several "
                "values per element pass a dict of nested lists, not a list of dicts."
            )
    keys = read([list(m) for m in maps], None)
    of_keys = read([list(m.values()) for m in maps], dtype)
    name = "ids" if isinstance(of_keys.values, Level) else "value"
    return Level({"key": keys.values, name: of_keys.values}, keys.lengths)


def _join(parts: dict) -> Level:
    if not parts:
        raise _not_lists("an empty dict")
    (first, level), *others = parts.items()
    for name, other in others:
        if not np.array_equal(other.lengths, level.lengths):
            raise ValueError(
                f"the segment lengths of {name!r} and {first!r} must be equal."
            )
    return Level({name: part.values for name, part in parts.items()}, level.lengths)


def _join_arrays(segments: list, dtype: Any) -> np.ndarray:
    # Some of the arrays may be empty lists, which have no dtype.
    typed = [s for s in segments if len(s) or _is_array(s)]
    return _as_numbers(np.concatenate([np.asarray(s) for s in typed]), dtype)


def _as_numbers(items: Any, dtype: Any) -> np.ndarray:
    if dtype is None and len(items) == 0 and not _is_array(items):
        dtype = np.int32  # most lists hold ids
    try:
        x = np.asarray(items)
    except (TypeError, ValueError, OverflowError, jax.errors.JAXTypeError):
        x = np.zeros((), object)
    if not (x.dtype == bool or jnp.issubdtype(x.dtype, jnp.number)):
        raise TypeError(
            "elements must be concrete numbers of at most 64 bits, got "
            f"{_type_names(items)}. Inside jit, use from_lengths."
        )
    if dtype is not None:
        x = _cast(x, np.dtype(dtype))
    x = _elements.narrow(x, "lists")
    return x.astype(jax.dtypes.canonicalize_dtype(x.dtype), copy=False)


def _cast(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Casts `x`, or raises if an integer would wrap or a float be truncated."""
    if not jnp.issubdtype(dtype, jnp.integer):
        return x.astype(dtype)
    if not (x.dtype == bool or jnp.issubdtype(x.dtype, jnp.integer)) and x.size:
        raise TypeError(
            f"dtype={dtype} would truncate {x.dtype.name} elements. Round them first."
        )
    limits = jnp.iinfo(dtype)
    if x.size and (x.min() < limits.min or x.max() > limits.max):
        raise ValueError(
            f"{dtype} cannot hold all elements, got integers from {x.min()} to "
            f"{x.max()}. Use a wider dtype, omit it, or map the values to smaller ones."
        )
    return x.astype(dtype)


def _is_array(x: Any) -> bool:
    return isinstance(x, (np.ndarray, jax.Array)) and x.ndim > 0


def _kind(x: Any) -> str:
    if isinstance(x, dict):
        return "dict"
    if isinstance(x, (list, tuple)):
        return "list"
    return "array" if _is_array(x) else "number"


def _one_of_each_type(items: list) -> list:
    """Returns one item of each type; all items if one is an array, as ranks differ."""
    seen = dict(zip(map(type, items), items))
    if any(issubclass(kind, (np.ndarray, jax.Array)) for kind in seen):
        return items
    return list(seen.values())


def _type_names(items: Any) -> str:
    tracer = lambda x: isinstance(x, jax.Array) and not _arguments.is_concrete(x)
    names = {"a traced array" if tracer(x) else type(x).__name__ for x in items}
    return " and ".join(sorted(names))


# ------------------------------------------------------------------ to lists


def write(values: Any, segment_ids: Any, num_segments: int) -> Any:
    """Returns each array of `values` as lists, one list of elements per segment."""
    ids = np.asarray(segment_ids)
    ends = np.cumsum(np.bincount(ids, minlength=num_segments + 1)[:num_segments])
    bounds = [0, *ends.tolist()]
    order = None if (ids[1:] >= ids[:-1]).all() else np.argsort(ids, kind="stable")

    def cut(items):
        return [items[a:b] for a, b in zip(bounds, bounds[1:])]

    def cut_array(x):
        x = np.asarray(x)
        return cut((x if order is None else x[order]).tolist())

    def cut_lists(lists):
        return cut(lists if order is None else [lists[i] for i in order.tolist()])

    def cut_nested(x):
        is_list = lambda node: isinstance(node, list)
        return jax.tree.map(cut_lists, x.to_lists(), is_leaf=is_list)

    return _elements.map_leaves(cut_array, cut_nested, values)


# ------------------------------------------------------------------ as text


def show(values: Any, segment_ids: Any, num_segments: int) -> str:
    """Returns `values` by segment as text; dtype and shape if values are unknown."""
    leaves = _elements.leaves_with_path(values)
    if not leaves:
        return repr(values)
    parts = [_show_leaf(x, segment_ids, num_segments) for _, x in leaves]
    if len(leaves) == 1 and not leaves[0][0]:
        return ", ".join(parts[0])
    names = [jax.tree_util.keystr(p, simple=True, separator=".") for p, _ in leaves]
    shown = [f"{name}: {' '.join(part)}" for name, part in zip(names, parts)]
    return "{" + ", ".join(shown) + "}"


def _show_leaf(x: Any, segment_ids: Any, num_segments: int) -> list[str]:
    """Returns the segments of `x` and its dtype; only its type if it is unknown."""
    innermost = x
    while _elements.is_nested(innermost):
        innermost = innermost.values
    arrays = segment_ids, *jax.tree.leaves(x)
    is_shown = all(conversions.is_known(a) and a.ndim == 1 for a in arrays) and all(
        a.dtype != jax.dtypes.float0 and a.size <= _MAX_ELEMENTS for a in arrays
    )
    if not is_shown or not hasattr(innermost, "dtype"):
        return [_arguments.show_spec(x) if x is innermost else repr(x)]
    limit = _MAX_SHOWN if x is innermost else _MAX_SHOWN_NESTED
    lists = write(x, segment_ids, num_segments)
    return [_show_list(lists, limit), innermost.dtype.name]


def _show_list(x: Any, limit: int) -> str:
    """Returns a number, or a nested list of numbers, as text."""
    if not isinstance(x, list):
        return f"{x:g}" if isinstance(x, float) else str(x)
    shown = [_show_list(y, limit) for y in x[:limit]]
    return f"[{' '.join([*shown, *['...'] * (len(x) > limit)])}]"
