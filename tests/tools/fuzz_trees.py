"""Functions of arrays, mapped over trees of rows: `python -m tests.tools.fuzz trees`.

A case is data: `(tree, moves, arithmetic)`. `jax.tree.map` applies the moves, one after
the other, and then the arithmetic to the leaves of two trees whose arrays are
SelectedRows: gradients, updates, the sums of `accumulate`, rows of sharded tables,
pulled tables.

`check` accepts an error, or the result of the same functions of the dense arrays. A
function that only moves numbers may also move slots: then each number of the result
must still have the id that it had.
"""

# optax's types know trees of arrays only.
# pyright: reportArgumentType=false

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from hypothesis import strategies as st
from jax import lax

import sparsejax as sj
from helpers import is_rows


V = 11


# ------------------------------------------------------------------ trees


def _two(shape, stack=()):
    """Two SelectedRows of 4 rows each; they share two of them."""
    rng = np.random.default_rng(0)
    height = V * (stack or (1,))[0]
    ids = np.array([[7, 2, 10, 5], [2, 9, 1, 7]], np.int32)
    values = rng.uniform(1, 2, (2, 4, *shape)).astype(np.float32)
    return [sj.SelectedRows(i, v, height, stack) for i, v in zip(ids, values)]


def _updates():
    grads = [{"t": g} for g in _two((3,))]
    params = {"t": jnp.ones((V, 3))}
    tx = sj.optim.lazy(optax.adam(0.1))
    return [tx.update(g, tx.init(params), params)[0] for g in grads]


def _sharded():
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    table = sj.parallel.shard_rows(jnp.ones((V, 3)), mesh, "x")
    loss = lambda t, g: jnp.sum(sj.lookup(t, g.rows) * g.values)
    return [sj.grad(loss)(table, g).values for g in _two((3,))]


def _pulled():
    store = sj.store.KVStore()
    rows = np.random.default_rng(1).uniform(1, 2, (V, 3)).astype(np.float32)
    store.init("t", rows, optax.sgd(0.1))
    ids = [g.rows for g in _two((3,))]
    return [sj.nn.PulledTables({"t": store.pull("t", i)}) for i in ids]


TREES = {
    "gradient": lambda: _two((3,)),
    "square": lambda: _two((4,)),
    "one_column": lambda: _two((1,)),
    "numbers": lambda: _two(()),
    "matrices": lambda: _two((2, 2)),
    "stack": lambda: _two((3,), stack=(2,)),
    "updates": _updates,
    "sharded": _sharded,
    "pulled": _pulled,
}

# ------------------------------------------------------------------ functions


def _first(x, width=2):
    """Pads `width` slots, for `jnp.pad`."""
    return [(0, width)] + [(0, 0)] * (x.ndim - 1)


def _mask(x):
    return (jnp.arange(x.shape[0]) % 2 == 0).reshape(-1, *(1,) * (x.ndim - 1))


def _host(x, dtype):
    spec = jax.ShapeDtypeStruct(x.shape, dtype)
    return jax.pure_callback(lambda v: np.asarray(v).reshape(x.shape), spec, x)


_KEY = jax.random.key(0)
_AT = np.array([2, 0, 1])
_ints = lambda x: jnp.zeros(x.shape, jnp.int32)
_floats = lambda x: jnp.zeros(x.shape)

_OF_ONE = """
    array atleast_2d copy diagonal empty_like flip isfinite nan_to_num ravel
    real rot90 sort squeeze zeros_like
""".split()
_OF_TWO = "append isin maximum".split()
_OF_A_LIST = "block concatenate stack vstack".split()

# Functions of a leaf, and of the leaf of the other tree.
MOVES: dict[str, Any] = {
    **{name: lambda x, y, f=getattr(jnp, name): f(x) for name in _OF_ONE},
    **{name: lambda x, y, f=getattr(jnp, name): f(x, y) for name in _OF_TWO},
    **{name: lambda x, y, f=getattr(jnp, name): f([x, y]) for name in _OF_A_LIST},
    # casts
    "astype_int": lambda x, y: x.astype(jnp.int32),
    "astype_float": lambda x, y: x.astype(jnp.float32),
    "convert_element_type": lambda x, y: lax.convert_element_type(x, jnp.int32),
    "array_of_float": lambda x, y: jnp.array(x, jnp.float32),
    "view": lambda x, y: x.view(jnp.int32),
    "bitcast": lambda x, y: lax.bitcast_convert_type(x, jnp.int32),
    "key_data": lambda x, y: jax.random.key_data(x),
    "equal": lambda x, y: x == y,
    "argsort": lambda x, y: jnp.argsort(x, axis=0),
    # copies
    "identity": lambda x, y: x,
    "stop_gradient": lambda x, y: lax.stop_gradient(x),
    "optimization_barrier": lambda x, y: lax.optimization_barrier(x),
    "device_put": lambda x, y: jax.device_put(x),
    "device_get": lambda x, y: jax.device_get(x),
    "host_float": lambda x, y: _host(x, jnp.float32),
    "host_int": lambda x, y: _host(x, jnp.int32),
    "host_same": lambda x, y: _host(x, x.dtype),
    # into other arrays
    "ints_at_set": lambda x, y: _ints(x).at[:].set(x),
    "floats_at_set": lambda x, y: _floats(x).at[:].set(x),
    "zeros_like_at_set": lambda x, y: jnp.zeros_like(x).at[:].set(x),
    "zeros_like_at_add": lambda x, y: jnp.zeros_like(x).at[:].add(x),
    "update_slice_ints": lambda x, y: lax.dynamic_update_slice(
        _ints(x), x, (0,) * x.ndim
    ),
    "update_slice_longer": lambda x, y: lax.dynamic_update_slice(
        jnp.zeros((x.shape[0] + 2, *x.shape[1:]), x.dtype),
        x,
        (1,) + (0,) * (x.ndim - 1),
    ),
    "update_index": lambda x, y: lax.dynamic_update_index_in_dim(x, y[0], 1, 0),
    "at_set": lambda x, y: x.at[0].set(y[1]),
    "at_set_number": lambda x, y: x.at[0].set(0),
    "at_add": lambda x, y: x.at[0].add(1),
    "at_min": lambda x, y: x.at[0].min(x[1]),
    "scatter": lambda x, y: (
        jnp.zeros((9, *x.shape[1:]), x.dtype).at[np.arange(x.shape[0])].set(x)
    ),
    "insert": lambda x, y: jnp.insert(x, 1, y[0], axis=0),
    "insert_number": lambda x, y: jnp.insert(x, 1, 0, axis=0),
    # made anew
    "zeros": lambda x, y: jnp.zeros(x.shape, x.dtype),
    "zeros_of_int": lambda x, y: _ints(x),
    "zeros_of_float": lambda x, y: _floats(x),
    "normal": lambda x, y: jax.random.normal(_KEY, x.shape, x.dtype),
    "randint": lambda x, y: jax.random.randint(_KEY, x.shape, 0, 9),
    # padded
    "pad": lambda x, y: jnp.pad(x, _first(x)),
    "pad_all": lambda x, y: jnp.pad(x, 1),
    "pad_edge": lambda x, y: jnp.pad(x, _first(x), mode="edge"),
    "pad_wrap": lambda x, y: jnp.pad(x, _first(x), mode="wrap"),
    "lax.pad": lambda x, y: lax.pad(
        x, jnp.zeros((), x.dtype), [(0, 2, 0)] + [(0, 0, 0)] * (x.ndim - 1)
    ),
    "resize": lambda x, y: jnp.resize(x, (6, *x.shape[1:])),
    # chosen
    "where": lambda x, y: jnp.where(jnp.array(True), x, y),
    "where_mask": lambda x, y: jnp.where(_mask(x), x, y),
    "where_zeros": lambda x, y: jnp.where(_mask(x), x, jnp.zeros_like(x)),
    "where_number": lambda x, y: jnp.where(_mask(x), x, 0),
    "where_wide_mask": lambda x, y: jnp.where(jnp.ones((x.shape[0], 3), bool), x, y),
    "select": lambda x, y: lax.select(jnp.ones(x.shape, bool), x, y),
    "jnp.select": lambda x, y: jnp.select([jnp.ones(x.shape, bool)], [x], y),
    "choose": lambda x, y: jnp.choose(jnp.ones(x.shape, int), [x, y], mode="clip"),
    "cond": lambda x, y: lax.cond(jnp.array(True), lambda: x, lambda: y),
    # joined
    "concatenate_zeros": lambda x, y: jnp.concatenate([x, jnp.zeros_like(x)]),
    "concatenate_last": lambda x, y: jnp.concatenate([x, y], -1),
    "stack_and_index": lambda x, y: jnp.stack([x, y])[1],
    "stack_last": lambda x, y: jnp.stack([x, y], -1)[..., 1],
    # sorted
    "sort_rows": lambda x, y: jnp.sort(x, axis=0),
    "partition": lambda x, y: jnp.partition(x, 1, axis=0),
    "unique": lambda x, y: jnp.unique(x, size=x.size),
    "unique_rows": lambda x, y: jnp.unique(x, axis=0, size=x.shape[0]),
    "top_k": lambda x, y: lax.top_k(x, 1)[0],
    "permutation": lambda x, y: jax.random.permutation(_KEY, x),
    "choice": lambda x, y: jax.random.choice(_KEY, x, (3,)),
    # turned
    "flip_rows": lambda x, y: jnp.flip(x, 0),
    "flip_last": lambda x, y: jnp.flip(x, -1),
    "reverse_last": lambda x, y: x[..., ::-1],
    "roll_rows": lambda x, y: jnp.roll(x, 1, axis=0),
    "roll_last": lambda x, y: jnp.roll(x, 1, axis=-1),
    "transpose": lambda x, y: x.T,
    # repeated
    "repeat": lambda x, y: jnp.repeat(x, 2),
    "repeat_rows": lambda x, y: jnp.repeat(x, 2, axis=0),
    "repeat_last": lambda x, y: jnp.repeat(x, 2, axis=-1),
    "tile": lambda x, y: jnp.tile(x, 2),
    "broadcast_to": lambda x, y: jnp.broadcast_to(x, (2, *x.shape)),
    "broadcast_and_index": lambda x, y: jnp.broadcast_to(x, (2, *x.shape))[1],
    # read
    "index": lambda x, y: x[_AT],
    "index_mask": lambda x, y: x[np.arange(x.shape[0]) % 2 == 0],
    "index_last": lambda x, y: x[..., 0],
    "index_columns": lambda x, y: x[:, _AT % x.shape[-1]],
    "slice": lambda x, y: x[:2],
    "slice_last": lambda x, y: x[..., :1],
    "slice_steps": lambda x, y: x[::2],
    "take": lambda x, y: jnp.take(x, _AT),
    "take_rows": lambda x, y: jnp.take(x, _AT, axis=0),
    "take_beyond": lambda x, y: jnp.take(x, np.array([0, 99]), axis=0),
    "get_beyond": lambda x, y: x.at[np.array([0, 99])].get(mode="fill"),
    "take_along_axis": lambda x, y: jnp.take_along_axis(
        x, _AT.reshape(-1, *(1,) * (x.ndim - 1)), 0
    ),
    "dynamic_slice": lambda x, y: lax.dynamic_slice_in_dim(x, 1, 2),
    "dynamic_index": lambda x, y: lax.dynamic_index_in_dim(x, 1),
    "split": lambda x, y: jnp.split(x, 2)[1],
    "delete": lambda x, y: jnp.delete(x, 1),
    "delete_row": lambda x, y: jnp.delete(x, 1, axis=0),
    # reshaped
    "reshape": lambda x, y: x.reshape(-1),
    "reshape_rows": lambda x, y: x.reshape(x.shape[0], -1),
    "microbatches": lambda x, y: x.reshape(2, -1, *x.shape[1:]),
    "expand_first": lambda x, y: x[None],
    "expand_last": lambda x, y: x[..., None],
    # in programs
    "scan_over": lambda x, y: lax.scan(lambda c, v: (c, v), 0, x)[1],
    "scan_backwards": lambda x, y: lax.scan(lambda c, v: (c, v), 0, x, reverse=True)[1],
    "scan_carry": lambda x, y: lax.scan(lambda c, _: (c, None), x, None, length=2)[0],
    "loop_of_sets": lambda x, y: lax.fori_loop(
        0, 2, lambda i, c: c.at[i].set(x[i]), jnp.zeros_like(x)
    ),
    "lax.map": lambda x, y: lax.map(lambda v: v, x),
    "vmap": lambda x, y: jax.vmap(lambda v: v)(x),
    "vmap_to_last": lambda x, y: jax.vmap(lambda v: v, out_axes=-1)(x),
    "associative_scan": lambda x, y: lax.associative_scan(lambda a, b: b, x),
    "einsum": lambda x, y: jnp.einsum("i...->i...", x),
    # sums and the like
    "cumsum": lambda x, y: jnp.cumsum(x, axis=0),
    "diff": lambda x, y: jnp.diff(x, axis=0),
    "sum": lambda x, y: jnp.sum(x, axis=-1),
    "dot": lambda x, y: jnp.dot(x.T, y),
    "segment_sum": lambda x, y: jax.ops.segment_sum(x, np.arange(x.shape[0]), 4),
    # NumPy's
    "np.add": np.add,
    "np.array": lambda x, y: np.array(x),
    "np.concatenate": lambda x, y: np.concatenate([x, y]),
    "np.where": lambda x, y: np.where(True, x, y),
    "tolist": lambda x, y: jnp.array(x.tolist()),
}
# Refused of any leaf. The others move slots, or are refused if the shapes do not fit.
REFUSED = frozenset(
    """
    astype_int astype_float convert_element_type array_of_float view bitcast
    key_data equal isfinite isin argsort host_float host_int host_same ints_at_set
    floats_at_set zeros_like_at_add update_slice_ints at_set_number at_add at_min
    insert_number zeros_of_int zeros_of_float normal randint pad pad_all lax.pad
    where_number sort sort_rows partition unique unique_rows top_k associative_scan
    cumsum diff sum dot maximum segment_sum np.add np.array np.concatenate np.where
    tolist
    """.split()
)
# These do not map a slot to a slot, and nothing in their result shows it. So a page
# names them: docs/explain/gradient.md, "Under jax.tree.map".
UNNOTICED = {
    "roll": lambda x, y: jnp.roll(x, 1),
    "put": lambda x, y: jnp.put(x, np.array([0]), x[1], inplace=False),
    "tril": lambda x, y: jnp.tril(x),
    "take": lambda x, y: jnp.take(x, np.array([1]), axis=-1),
    "ones_like": lambda x, y: jnp.ones_like(x),
    "full_like": lambda x, y: jnp.full_like(x, 3),
}
ARITHMETIC = {
    "none": lambda x, y: x,
    "twice": lambda x, y: 2 * x,
    "negative": lambda x, y: -x,
    "half": lambda x, y: x / 2,
    "square": lambda x, y: x * x,
    "sum": lambda x, y: x + y,
}
_pair = lambda x: jnp.stack([jnp.zeros_like(x), x])
MODES = {
    "eager": lambda f: f,
    "jitted": jax.jit,
    "vmapped": lambda f: (
        lambda *gs: jax.tree.map(
            lambda x: x[1], jax.vmap(f)(*(jax.tree.map(_pair, g) for g in gs))
        )
    ),
}


# ------------------------------------------------------------------ the check


@functools.cache
def _two_trees(name):
    return TREES[name]()


def _rows_of(tree) -> list[Any]:
    rows = [x for x in jax.tree.leaves(tree, is_leaf=is_rows) if is_rows(x)]
    assert rows
    return rows


def check(case, how="jitted"):
    """Raises if the result is silently wrong; else returns what happened."""
    tree, moves, arithmetic = case

    def f(x, y):
        for name in moves:
            x, y = MOVES[name](x, y), MOVES[name](y, x)
        return ARITHMETIC[arithmetic](x, y)

    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        first, second = _two_trees(tree)
        try:
            out = MODES[how](lambda g, h: jax.tree.map(f, g, h))(first, second)
            dense = [np.asarray(x.to_dense()) for x in _rows_of(out)]
        except Exception:
            return "refused"
        verdicts = {
            _verdict(MODES[how](f), arithmetic == "none", *rows)
            for rows in zip(_rows_of(first), _rows_of(second), _rows_of(out), dense)
        }
    assert "wrong" not in verdicts and not REFUSED & {*moves}
    return max(verdicts)


def _verdict(f, only_moves, x, y, out, dense):
    try:
        expected = np.asarray(f(x.to_dense(), y.to_dense()))
        if expected.shape == dense.shape and np.allclose(dense, expected):
            return "equals dense"
    except Exception:  # the function is not one of arrays of V rows
        pass
    return "moves slots" if only_moves and _keeps_pairs(f, x, y, out) else "wrong"


def _keeps_pairs(f, *gs):
    """Returns True if each number of the result has the id that it had before."""
    *inputs, out = gs
    spread = lambda g, ids: np.array(
        np.broadcast_to(
            ids.reshape(ids.shape + (1,) * (g.values.ndim - ids.ndim)), g.values.shape
        )
    )
    ids = [jnp.asarray(spread(g, np.asarray(g.rows)), jnp.float32) for g in inputs]
    moved, ids = np.asarray(f(*ids)), np.asarray(out.rows)
    if moved.shape != out.values.shape or ids.shape != moved.shape[: ids.ndim]:
        return False
    filled = spread(out, (ids >= 0) & (ids < out.height))
    # An empty slot is where the function put nothing of the slots.
    nothing = np.isnan(moved) | (moved == 0) | (moved >= out.height)
    return bool(np.all(np.where(filled, moved == spread(out, ids), nothing)))


def _ends_the_process(case):
    """XLA's own fault, in jaxlib 0.10.2 and 0.12 (0.7.2 has none).

    `jax.jit(lambda x: jnp.zeros((4, 3)).at[:].set(x)[:, ::-1])` of `jnp.ones((4, 3))`
    fails a check of AlgebraicSimplifier::HandleReverse, which takes the scatter's map
    for a binary operation.
    """
    (_, moves, _), how = case
    reverses = {"flip", "flip_rows", "flip_last", "reverse_last", "rot90"}
    if how != "jitted" or "zeros_like_at_set" not in moves:
        return False
    return bool(reverses & {*moves[moves.index("zeros_like_at_set") :]})


# The one id and the single numbers of a diagonal fit again if both get an axis.
_moves = st.sampled_from(sorted({*MOVES} - REFUSED - {"diagonal"}))
cases = st.tuples(
    st.tuples(
        st.sampled_from(sorted(TREES)),
        st.one_of(
            *[st.lists(_moves, min_size=1, max_size=3).map(tuple)] * 3,
            st.tuples(_moves, st.sampled_from(sorted(MOVES))),
        ),
        st.one_of(*[st.just("none")] * 3, st.sampled_from(sorted(ARITHMETIC))),
    ),
    st.sampled_from(sorted(MODES)),
).filter(lambda case: not _ends_the_process(case))
