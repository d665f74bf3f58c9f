"""Each segment reduction as a NumPy loop over segments, in float64."""

import functools
from typing import Any

import jax
import numpy as np

import sparsejax as sj


# ------------------------------------------------------------------ one segment
# Each takes the elements [m, ...] of one segment, m > 0.


def _logsumexp(v):
    top = v.max(0)
    top = np.where(np.isinf(top), 0, top)
    with np.errstate(divide="ignore"):
        return np.log(np.exp(v - top).sum(0)) + top


def _normalize(v):
    return (v - v.mean(0)) / np.sqrt(np.maximum(v.var(0), 1e-5))


REDUCTIONS = {
    "sum": lambda v: v.sum(0),
    "mean": lambda v: v.mean(0),
    "sqrtn": lambda v: v.sum(0) / np.sqrt(len(v)),
    "prod": lambda v: v.prod(0),
    "max": lambda v: v.max(0),
    "min": lambda v: v.min(0),
    "logsumexp": _logsumexp,
    "logmeanexp": lambda v: _logsumexp(v) - np.log(len(v)),
    "var": lambda v: v.var(0),
    "std": lambda v: v.std(0),
}
EMPTY = {
    "prod": 1.0,
    "max": -np.inf,
    "min": np.inf,
    "logsumexp": -np.inf,
    "logmeanexp": -np.inf,
}  # 0 for the others
SHAPE_KEEPING = {
    "softmax": lambda v: np.exp(v - _logsumexp(v)),
    "log_softmax": lambda v: v - _logsumexp(v),
    "normalize": _normalize,
    "cumsum": lambda v: v.cumsum(0),
}
SMOOTH = (*REDUCTIONS, *SHAPE_KEEPING)
WEIGHTED = ("sum", "mean", "sqrtn")


# ------------------------------------------------------------------ all segments


def members(ids, num_segments):
    """The positions of each segment's elements."""
    ids = np.asarray(ids)
    return [np.flatnonzero(ids == s) for s in range(num_segments)]


def reduced(name, x, ids, num_segments, empty=None):
    """`segment_<name>`, for those that give one row a segment."""
    x = np.asarray(x, np.float64)
    out = np.full((num_segments, *x.shape[1:]), EMPTY.get(name, 0.0))
    for s, where in enumerate(members(ids, num_segments)):
        if where.size:
            out[s] = REDUCTIONS[name](x[where])
        elif empty is not None:
            out[s] = empty
    return out


def shape_kept(name, x, ids, num_segments, empty=0.0):
    """`segment_<name>`, for those that give one row an element."""
    x = np.asarray(x, np.float64)
    out = np.full(x.shape, empty)
    for where in members(ids, num_segments):
        if where.size:
            out[where] = SHAPE_KEEPING[name](x[where])
    return out


def oracle(name, x, ids, num_segments):
    """Any of the smooth reductions."""
    f = reduced if name in REDUCTIONS else shape_kept
    return f(name, x, ids, num_segments)


def weighted(name, x, w, ids, num_segments, empty=0.0):
    """`segment_<name>` with weights."""
    x, w = np.asarray(x, np.float64), np.asarray(w, np.float64)
    out = np.zeros((num_segments, *x.shape[1:]))
    for s, where in enumerate(members(ids, num_segments)):
        total = (x[where].T * w[where]).T.sum(0)
        by = {
            "sum": 1.0,
            "mean": w[where].sum(),
            "sqrtn": np.sqrt((w[where] ** 2).sum()),
        }
        out[s] = total / by[name] if by[name] else empty
        if name == "sum" and not where.size:
            out[s] = empty
    return out


def position(x, ids, num_segments, choose):
    """`segment_argmax` and `argmin`; `choose` is `np.argmax` or `np.argmin`."""
    x = np.asarray(x)
    out = np.full((num_segments, *x.shape[1:]), len(x), np.int32)
    for s, where in enumerate(members(ids, num_segments)):
        if where.size:
            out[s] = where[choose(x[where], axis=0)]
    return out


def top_k(x, ids, num_segments, k):
    """`segment_top_k`: values, positions."""
    x = np.asarray(x)
    values = np.zeros((num_segments, k, *x.shape[1:]), x.dtype)
    positions = np.full(values.shape, -1, np.int32)
    for s, where in enumerate(members(ids, num_segments)):
        best = np.argsort(-x[where], axis=0, kind="stable")[:k]
        values[s, : len(best)] = np.take_along_axis(x[where], best, axis=0)
        positions[s, : len(best)] = best
    return values, positions


# ------------------------------------------------------------------ ours


def ours(name):
    """`sj.segment_<name>`."""
    return getattr(sj, f"segment_{name}")


@functools.cache
def smooth_of(num_segments, **options):
    """Every reduction of floats to floats, one compiled program for each shape."""
    return jax.jit(
        lambda x, ids: {
            name: ours(name)(x, ids, num_segments, **options) for name in SMOOTH
        }
    )


@functools.cache
def all_of(num_segments, is_sorted, k=2):
    """Every reduction of floats and ids, one compiled program for each shape."""

    @jax.jit
    def f(x, ids, w):
        args, options = (ids, num_segments), {"indices_are_sorted": is_sorted}
        out = smooth_of(num_segments, **options)(x, ids)
        for name in ("argmax", "argmin", "count"):
            out[name] = ours(name)(x, *args, **options)
        for name in ("any", "all"):
            out[name] = ours(name)(x > 0, *args, **options)
        for name in WEIGHTED:
            out[f"weighted_{name}"] = ours(name)(x, *args, weights=w, **options)
        out["top_k"] = sj.segment_top_k(x, *args, k=k, **options)
        return out

    return f


def all_by_numpy(x, ids, w, num_segments, k=2):
    """The expected result of `all_of`."""
    args = (ids, num_segments)
    out: dict[str, Any] = {name: oracle(name, x, *args) for name in SMOOTH}
    out["argmax"] = position(x, *args, np.argmax)
    out["argmin"] = position(x, *args, np.argmin)
    where = members(*args)
    out["count"] = np.array([m.size for m in where], np.int32).reshape(num_segments)
    shape = (num_segments, *x.shape[1:])
    out["any"] = np.array([(x[m] > 0).any(0) for m in where], bool).reshape(shape)
    out["all"] = np.array([(x[m] > 0).all(0) for m in where], bool).reshape(shape)
    for name in WEIGHTED:
        out[f"weighted_{name}"] = weighted(name, x, w, *args)
    out["top_k"] = top_k(x, *args, k)
    return out
