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
SHAPE_KEEPING = {
    "softmax": lambda v: np.exp(v - _logsumexp(v)),
    "log_softmax": lambda v: v - _logsumexp(v),
    "normalize": lambda v: (v - v.mean(0)) / np.sqrt(np.maximum(v.var(0), 1e-5)),
    "cumsum": lambda v: v.cumsum(0),
}
SMOOTH = REDUCTIONS | SHAPE_KEEPING
INF = np.inf
EMPTY = {"prod": 1, "max": -INF, "min": INF, "logsumexp": -INF, "logmeanexp": -INF}
WEIGHTED = {
    "sum": lambda w: 1.0,
    "mean": lambda w: w.sum(),
    "sqrtn": lambda w: np.sqrt((w**2).sum()),
}


# ------------------------------------------------------------------ all segments


def members(ids, num_segments):
    """The positions of each segment's elements."""
    ids = np.asarray(ids)
    return [np.flatnonzero(ids == s) for s in range(num_segments)]


def oracle(name, x, ids, num_segments, empty=None):
    """`segment_<name>`: a row for each segment, or for each element."""
    x, of_segments = np.asarray(x, np.float64), name in REDUCTIONS
    shape = (num_segments, *x.shape[1:]) if of_segments else x.shape
    out = np.full(shape, EMPTY.get(name, 0.0) if empty is None else empty, np.float64)
    for s, where in enumerate(members(ids, num_segments)):
        if where.size:
            out[s if of_segments else where] = SMOOTH[name](x[where])
    return out


def weighted(name, x, w, ids, num_segments):
    """`segment_<name>` with weights."""
    x, w = np.asarray(x, np.float64), np.asarray(w, np.float64)
    out = np.zeros((num_segments, *x.shape[1:]))
    for s, where in enumerate(members(ids, num_segments)):
        by = WEIGHTED[name](w[where])
        out[s] = (x[where].T * w[where]).T.sum(0) / by if by else 0
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


def all_by_numpy(x, ids, w, num_segments, k=2):
    """The expected result of `all_of`."""
    args = (ids, num_segments)
    where, shape = members(*args), (num_segments, *x.shape[1:])
    flags = lambda f: np.array([f(x[m] > 0) for m in where], bool).reshape(shape)
    return {
        **{name: oracle(name, x, *args) for name in SMOOTH},
        **{f"weighted_{name}": weighted(name, x, w, *args) for name in WEIGHTED},
        "argmax": position(x, *args, np.argmax),
        "argmin": position(x, *args, np.argmin),
        "count": np.array([m.size for m in where], np.int32).reshape(num_segments),
        "any": flags(lambda v: v.any(0)),
        "all": flags(lambda v: v.all(0)),
        "top_k": top_k(x, *args, k),
    }


# ------------------------------------------------------------------ ours


def ours(name) -> Any:
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
