"""Random models that hold tables: `python -m tests.tools.fuzz models`.

A model is data: `(holder, tables, uses)`. The tables `(rows, row, dtype)` are held in a
dict, a dataclass, a module of flax or equinox and so on. A use `(table, read, ids,
wrappers)` reads one of them by ids `(kind, dtype)`, inside of wrappers: loops,
branches, rules of one's own, derivatives. `fuzz_programs` has programs of many steps on
float64; this has every type, size, mode of ids and container.

What JAX accepts is accepted, with equal values, shapes and dtypes; what JAX refuses is
refused.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx
from hypothesis import strategies as st
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import sparsejax as sj
from fuzz_modes import MODES, SECOND, Case, check as check_gradient, precisely, total_of
from helpers import to_dense
from sparsejax import _compat


# -- what holds the tables -------------------------------------------------------------


class Pair(NamedTuple):
    first: Any
    others: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Data:
    tables: list[Any]
    name: str = dataclasses.field(default="data", metadata={"static": True})


@jax.tree_util.register_pytree_node_class
class Node(Data):
    """A node without keys, whose leaves have no names."""

    def tree_flatten(self):
        return self.tables[::-1], None

    @classmethod
    def tree_unflatten(cls, _, leaves):
        return cls(list(leaves)[::-1])


class Equinox(eqx.Module):
    tables: list[Any]
    name: str = eqx.field(static=True, default="model")


class Nnx(nnx.Module):
    def __init__(self, tables):
        for name, table in _named(tables).items():
            setattr(self, name, nnx.Param(table))


def _nnx(tables):
    graph, state = nnx.split(Nnx(tables))
    return state, lambda state: jax.tree.leaves(nnx.state(nnx.merge(graph, state)))


def _nnx_pure(tables):
    state, get = _nnx(tables)
    restore = jax.tree.structure(state).unflatten
    return nnx.to_pure_dict(state), lambda pure: get(restore(jax.tree.leaves(pure)))


def _named(tables):
    return {f"t{k}": table for k, table in enumerate(tables)}


# By name: from tables to parameters, and the function from these to the tables.
HOLDERS = {
    "dict": lambda t: (_named(t), lambda p: [p[k] for k in sorted(p)]),
    "list": lambda t: (list(t), list),
    "tuple": lambda t: (tuple(t), list),
    "namedtuple": lambda t: (Pair(t[0], t[1:]), lambda p: [p.first, *p.others]),
    "dataclass": lambda t: (Data(list(t)), lambda p: p.tables),
    "node": lambda t: (Node(list(t)), lambda p: p.tables),
    "nested": lambda t: (
        {"b": (t[0], None), "a": [{"c": x} for x in t[1:]]},
        lambda p: [p["b"][0], *(x["c"] for x in p["a"])],
    ),
    "equinox": lambda t: (Equinox(list(t)), lambda p: p.tables),
    "nnx": _nnx,
    "nnx_pure": _nnx_pure,
    "one": lambda t: (t[0], lambda p: [p]),  # the table itself
}


# -- tables ----------------------------------------------------------------------------

ROWS = 101, 101, 101, 23, 23, 23, 7, 2, 1, 0
SHAPES = (3,), (3,), (2, 3), (), (1,), (0,)
DTYPES = (
    *["float64"] * 9, *["float32"] * 3, "float16", "float16", "bfloat16", "bfloat16",
    "complex64", "complex128", "int32",
)  # fmt: skip


def _table(k, rows, shape, dtype):
    rng = np.random.default_rng(k)
    x = rng.standard_normal((rows, *shape))
    if dtype.startswith("complex"):
        x = x + 1j * rng.standard_normal((rows, *shape))
    return jnp.asarray(x).astype(dtype)


# -- ids -------------------------------------------------------------------------------

KINDS: dict[str, Any] = {
    "few": [1, 0, 1],
    "many": [4, 1, 6, 1, 0, 4, 5, 2],
    "none": np.zeros(0),
    "no_lists": np.zeros((2, 0)),
    "scalar": 1,
    "square": [[0, 2], [2, 1]],
    "negative": [-1, 0, -3],
    "far": [10, 0, 100, -50],
    "extreme": [2**70, 0, -(2**70)],
}
SAFE = "few", "many", "none", "no_lists", "scalar", "square"
IDS = (
    *["int32"] * 8, *["int64"] * 4, *["int8", "int16", "uint8", "uint16", "uint32"] * 2,
    *["uint64"] * 2, "bool", "float32",
)  # fmt: skip


def _ids(kind, dtype, shift=0):
    x = np.asarray(np.asarray(KINDS[kind], object) + shift, object)
    if np.issubdtype(dtype, np.integer):  # bool and float32 are refused
        if kind == "extreme":
            info = np.iinfo(dtype)
            x = np.clip(x, info.min, info.max)
        else:
            x = x.astype(np.int64)  # a negative id becomes a large unsigned one
    return np.asarray(x).astype(dtype)


# -- reads -----------------------------------------------------------------------------

ROWS_READ = _compat.primitive(
    "fuzz_rows", lambda table, ids: 2 * jnp.take(table, ids, axis=0, mode="clip"), {}
)
DOUBLED = _compat.primitive("fuzz_doubled", lambda x: x + x, {})


@sj.extend.register_rule(ROWS_READ)
def _rows_rule(ctx, table, ids):
    if table.row_axis != 0 or not table.shape[0]:
        return NotImplemented
    return 2 * ctx.read(table, jnp.clip(ids, 0, table.shape[0] - 1))


@sj.extend.register_rule(DOUBLED)
def _doubled_rule(ctx, table):
    return table.then(DOUBLED.bind)


def _as_matrix(t):
    return t if t.ndim == 2 else t.reshape(t.shape[0], -1)


def _by_nnx(t, ids):
    t = _as_matrix(t)
    zeros = lambda key, shape, dtype: jnp.zeros(shape, dtype)
    options: Any = dict(param_dtype=t.dtype, dtype=t.dtype, embedding_init=zeros)
    embed = nnx.Embed(*t.shape, **options, rngs=nnx.Rngs(0))
    embed.embedding = nnx.Param(t)
    return embed(ids)


def _by_linen(t, ids):
    t = _as_matrix(t)
    embed = linen.Embed(*t.shape, dtype=t.dtype, param_dtype=t.dtype)
    return embed.apply({"params": {"embedding": t}}, ids)


def _by_equinox(t, ids):
    t = _as_matrix(t)
    embed = eqx.nn.Embedding(weight=t)
    return jnp.vectorize(embed, signature=f"()->({t.shape[1]})")(ids)


def _bags(t, ids, **options):
    return sj.embedding_bag(t, jnp.atleast_2d(ids), **options)


def _matrix(ids):
    """A CSR matrix of two rows; the first has an element if there is one."""
    ids = ids.reshape(-1)
    first = min(ids.size, 1)
    values = {"index": ids, "value": jnp.cos(jnp.arange(ids.size * 1.0))}
    return sj.SegmentTensor.from_lengths(values, [first, ids.size - first])


READS = {
    "index": lambda t, ids: t[ids],
    "index_row": lambda t, ids: t[ids, ...],
    "index_new_axis": lambda t, ids: t[ids, None],
    "index_columns": lambda t, ids: t[ids, :1],
    "index_both": lambda t, ids: t[ids, ids],
    "index_last": lambda t, ids: t[..., ids],
    "constant_list": lambda t, ids: t[jnp.array([0, 1])] * jnp.sum(ids > 0),
    "python_int": lambda t, ids: t[-1] * jnp.sum(ids > 0),
    "slice": lambda t, ids: t[1:4:2] * jnp.sum(ids > 0),
    "one_by_one": lambda t, ids: jnp.stack([t[i] for i in ids.reshape(-1)]),
    "fill": lambda t, ids: t.at[ids].get(mode="fill", fill_value=0.5),
    "drop": lambda t, ids: t.at[ids].get(mode="drop", fill_value=0.25),
    "clip": lambda t, ids: t.at[ids].get(mode="clip"),
    "no_wrap": lambda t, ids: t.at[ids].get(
        mode="fill", fill_value=0.5, wrap_negative_indices=False
    ),
    "promised": lambda t, ids: t.at[ids % max(t.shape[0], 1)].get(
        mode="promise_in_bounds"
    ),
    "take": lambda t, ids: jnp.take(t, ids, axis=0),
    "take_clip": lambda t, ids: jnp.take(t, ids, axis=0, mode="clip"),
    "take_wrap": lambda t, ids: jnp.take(t, ids, axis=0, mode="wrap"),
    "take_fill": lambda t, ids: t.take(ids, axis=0, fill_value=0.5),
    "take_last": lambda t, ids: jnp.take(t.T, ids, axis=-1, mode="clip"),
    "take_along": lambda t, ids: jnp.take_along_axis(
        t, ids.reshape(-1, *[1] * (t.ndim - 1)), axis=0, mode="clip"
    ),
    "take_flat": lambda t, ids: jnp.take(t, ids, mode="clip"),
    "dynamic_slice": lambda t, ids: lax.dynamic_slice_in_dim(
        t, ids.reshape(-1)[0], min(2, t.shape[0])
    ),
    "dynamic_index": lambda t, ids: lax.dynamic_index_in_dim(t, ids.reshape(-1)[0]),
    "vmapped": lambda t, ids: jax.vmap(lambda i: t[i])(jnp.atleast_1d(ids)),
    "vmapped_twice": lambda t, ids: jax.vmap(jax.vmap(lambda i: t[i], 0, -1))(
        jnp.atleast_2d(ids)
    ),
    "one_hot": lambda t, ids: jax.nn.one_hot(ids, t.shape[0], dtype=t.dtype) @ t,
    "lookup": lambda t, ids: sj.lookup(t, ids),
    "lookup_zero": lambda t, ids: sj.lookup(t, ids, mode="zero"),
    "lookup_clip": lambda t, ids: sj.lookup(t, ids, mode="clip", padding_id=1),
    "lookup_norm": lambda t, ids: sj.lookup(t, ids, mode="zero", max_norm=0.7),
    "bag_sum": lambda t, ids: _bags(t, ids, mode="zero"),
    "bag_mean": lambda t, ids: _bags(
        t, ids, mode="clip", combiner="mean", padding_id=0
    ),
    "bag_max": lambda t, ids: _bags(t, ids, mode="zero", combiner="max"),
    "dot": lambda t, ids: sj.dot(_matrix(ids), t, num_columns=t.shape[0]),
    "custom_rule": ROWS_READ.bind,
    "nnx": _by_nnx,
    "linen": _by_linen,
    "equinox": _by_equinox,
}


# -- wrappers of a function (table, ids) -> array --------------------------------------


def _by_row(t, x):
    return x.astype(t.dtype).reshape(-1, *[1] * (t.ndim - 1))


# Rules that are not the derivative, of functions of the rows.
square_with_vjp = jax.custom_vjp(lambda rows: rows * rows)
square_with_vjp.defvjp(
    lambda rows: (square_with_vjp(rows), rows), lambda rows, ct: (3 * rows * ct,)
)
square_with_jvp = jax.custom_jvp(lambda rows: rows * rows)
square_with_jvp.defjvps(lambda moved, out, rows: 3 * moved * rows)

VIEWS = {
    "doubled": lambda t: 2 * t,
    "negative": jnp.negative,
    "absolute": jnp.abs,
    "sine": jnp.sin,
    "square": jnp.square,
    "cube": lambda t: t**3,
    "power": lambda t: 1.5 ** jnp.tanh(t),
    "quotient": lambda t: t / 3 - 1,
    "clipped": lambda t: jnp.clip(t, -0.5, 0.5),
    "relu": jax.nn.relu,
    "copied": jnp.array,
    "checkpoint_name": lambda t: checkpoint_name(t, "t"),
    "square_with_vjp": square_with_vjp,
    "square_with_jvp": square_with_jvp,
    "doubled_by_rule": DOUBLED.bind,
    "tanh": jnp.tanh,
    "as_float32": lambda t: t.astype(jnp.float32),
    "as_bfloat16": lambda t: t.astype(jnp.bfloat16),
    "as_complex": lambda t: t + 0j,
    "transposed_twice": lambda t: t.T.T,
    "transposed": lambda t: t.T,
    "flat": lambda t: t.reshape(t.shape[0], -1),
    "new_axis": lambda t: t[:, None],
    "stacked": lambda t: jnp.stack([t, t]),
    "twice": lambda t: jnp.concatenate([t, t]),
    "upper_rows": lambda t: t[1:],
    "reversed": lambda t: t[::-1],
    "barrier": lax.optimization_barrier,
    "stopped": lax.stop_gradient,
    "real": lambda t: t.real,
    "masked": lambda t: jnp.where(t > 0, t, 0),
    "of_padded": lambda t: jnp.pad(t, [(0, 1), *[(0, 0)] * (t.ndim - 1)]),
    "set": lambda t: t.at[0].set(0.5),
    "rolled": lambda t: jnp.roll(t, 1, 0),
    "tiled": lambda t: jnp.tile(t, (2, *[1] * (t.ndim - 1))),
    "repeated": lambda t: jnp.repeat(t, 2, axis=0),
    "half": lambda t: jnp.split(t, [t.shape[0] // 2])[0],
    "odd_rows": lambda t: t * _by_row(t, jnp.arange(t.shape[0]) % 2),
    "scaled_rows": lambda t: t * _by_row(t, jnp.linspace(0.5, 1, t.shape[0])),
    "normalized": lambda t: t / (1 + jnp.linalg.norm(t, axis=-1, keepdims=True)),
    "projected": lambda t: t @ jnp.cos(jnp.arange(t.shape[-1] * 2.0)).reshape(-1, 2),
    "summed": lambda t: jnp.cumsum(t, 0),
    "sorted": lambda t: jnp.sort(t, 0),
    # To 40 bits: an error below `FINE`, in sums of any order.
    "rounded": lambda t: lax.reduce_precision(t, 8, 40),
    "named": jax.named_call(lambda t: t * 1),
    "moved": lambda t: jnp.moveaxis(t[None], 0, -1),
}


# Rules that are not the derivative, of a function that reads the table.


def _custom_vjp(f, t, ids):
    g = jax.custom_vjp(f)

    def backward(kept, cotangent):
        t, ids = kept
        (out,) = jax.vjp(lambda t: f(t, ids), t)[1](cotangent)
        return 3 * out, np.zeros(ids.shape, jax.dtypes.float0)

    g.defvjp(lambda t, ids: (f(t, ids), (t, ids)), backward)
    return g(t, ids)


def _custom_jvp(f, t, ids):
    g = jax.custom_jvp(f)

    @g.defjvp
    def tangent(primals, tangents):
        (t, ids), (moved, _) = primals, tangents
        out, moved = jax.jvp(lambda t: f(t, ids), (t,), (moved,))
        return out, 3 * moved

    return g(t, ids)


_sine_with_gradient = jax.custom_gradient(
    lambda rows: (jnp.sin(rows), lambda ct: 3 * ct)
)


def _scan_of_state(f, t, ids):
    """The rows of a step go through the next, as in a recurrent network."""
    step = lambda h, i: (jnp.tanh(h + total_of(f(t, i))), h)
    start = jnp.zeros((), jnp.float64)
    return lax.scan(step, start, jnp.atleast_1d(ids), unroll=2)[1]


def _fori_loop_by_step(f, t, ids):
    """Each step reads by its own number."""
    one = lambda k: f(t, (ids + k).astype(ids.dtype))
    return lax.fori_loop(0, 2, lambda k, x: x + one(k), jnp.zeros_like(one(0)))


def _while_loop_of_constants(f, t, ids):
    """The rows in the loop are not differentiated."""
    kept = lax.stop_gradient(f(t, ids))
    step = lambda c: (c[0] + 1, 0.5 * c[1] + lax.stop_gradient(f(t, ids)))
    return f(t, ids) * lax.while_loop(lambda c: c[0] < 2, step, (0, kept))[1]


def _cond_closure(f, t, ids):
    out = jax.eval_shape(f, t, ids)
    zeros = lambda: jnp.zeros(out.shape, out.dtype)
    return lax.cond(jnp.sum(ids) < 5, lambda: f(t, ids), zeros)


def _switch(f, t, ids):
    part = lambda t: f(t, ids)
    branches = [part, lambda t: part(2 * t), lambda t: part(lax.stop_gradient(t))]
    return lax.switch(jnp.sum(ids) % 3, branches, t)


def _vmapped_branch(f, t, ids):
    """Its predicate differs in the batch: JAX computes both branches."""
    branches = lambda i: f(t, i), lambda i: 2 * f(t, i)
    one = lambda i: lax.cond(jnp.sum(i) > 2, *branches, i)
    return jax.vmap(one)(jnp.stack([ids, ids]))


def _debugged(f, t, ids):
    rows = f(t, ids)
    jax.debug.callback(lambda rows, ids: None, rows, ids)
    return rows


def _shard_mapped(f, t, ids):
    mesh = jax.make_mesh((1,), ("x",), devices=jax.devices()[:1])
    part = jax.sharding.PartitionSpec()
    return jax.shard_map(f, mesh=mesh, in_specs=(part, part), out_specs=part)(t, ids)


def _linearized(f, t, ids):
    out, tangent = jax.linearize(lambda t: jnp.sin(f(t, ids)), t)
    return out + tangent(t)


_both = lambda x, y: jnp.stack([x, y])
_scan = lambda f, t, ids: lax.scan(lambda c, i: (c, f(t, i)), 0, jnp.atleast_1d(ids))[1]

# By name: `(f, table, ids) -> array`.
WRAPPERS: dict[str, Any] = {
    name: lambda f, t, ids, view=view: f(view(t), ids) for name, view in VIEWS.items()
}
WRAPPERS |= {
    "jitted": lambda f, t, ids: jax.jit(f)(t, ids),
    "jitted_closure": lambda f, t, ids: jax.jit(lambda ids: f(t, ids))(ids),
    "rematerialized": lambda f, t, ids: jax.checkpoint(
        f, policy=jax.checkpoint_policies.dots_saveable
    )(t, ids),
    "rematerialized_closure": lambda f, t, ids: jax.checkpoint(lambda ids: f(t, ids))(
        ids
    ),
    "custom_vjp": _custom_vjp,
    "custom_vjp_of_rows": lambda f, t, ids: square_with_vjp(f(t, ids)),
    "custom_jvp": _custom_jvp,
    "custom_jvp_of_rows": lambda f, t, ids: square_with_jvp(f(t, ids)),
    "custom_gradient": lambda f, t, ids: _sine_with_gradient(f(t, ids)),
    "scan": _scan,
    "scan_carries_the_table": lambda f, t, ids: lax.scan(
        lambda t, i: (t, f(t, i)), t, jnp.atleast_1d(ids), reverse=True
    )[1],
    "scan_changes_the_table": lambda f, t, ids: lax.scan(
        lambda t, i: (jnp.sin(t), f(t, i)), t, jnp.atleast_1d(ids)
    )[1],
    "scan_of_state": _scan_of_state,
    "scan_over_the_rows": lambda f, t, ids: (
        lax.scan(lambda c, row: (c, jnp.sum(row)), 0, t)[1][ids] + jnp.sum(f(t, ids))
    ),
    "mapped": lambda f, t, ids: lax.map(lambda i: f(t, i), jnp.atleast_1d(ids)),
    "mapped_in_batches": lambda f, t, ids: lax.map(
        lambda i: f(t, i), jnp.atleast_1d(ids), batch_size=2
    ),
    "fori_loop": lambda f, t, ids: lax.fori_loop(
        0, 3, lambda k, x: jnp.sin(x) + f(t, ids), jnp.zeros_like(f(t, ids))
    ),
    "fori_loop_by_step": _fori_loop_by_step,
    # JAX has no reverse mode for it.
    "while_loop": lambda f, t, ids: lax.while_loop(
        lambda c: c[0] < 2,
        lambda c: (c[0] + 1, c[1] + f(t, ids)),
        (0, jnp.zeros_like(f(t, ids))),
    )[1],
    "while_loop_of_constants": _while_loop_of_constants,
    "cond": lambda f, t, ids: lax.cond(
        jnp.sum(ids) > 2, f, lambda t, ids: 2 * f(t, ids), t, ids
    ),
    "cond_closure": _cond_closure,
    "switch": _switch,
    "vmapped_ids": lambda f, t, ids: jax.vmap(lambda i: f(t, i), out_axes=-1)(
        _both(ids, jnp.flip(ids))
    ),
    "vmapped_tables": lambda f, t, ids: jax.vmap(f, (0, None))(_both(t, 2 * t), ids),
    "vmapped_with_an_axis_name": lambda f, t, ids: jax.vmap(
        lambda i: lax.psum(f(t, i), "i"), axis_name="i"
    )(_both(ids, ids)),
    "vmapped_branch": _vmapped_branch,
    # Both the table and the ids have a batch axis, inside a loop.
    "vmapped_loop": lambda f, t, ids: jax.vmap(functools.partial(_scan, f))(
        _both(t, 2 * t), _both(ids, jnp.flip(ids))
    ),
    "debugged": _debugged,
    "by_platform": lambda f, t, ids: lax.platform_dependent(t, ids, cpu=f, default=f),
    "associative_scan": lambda f, t, ids: lax.associative_scan(
        jnp.add, jnp.atleast_1d(f(t, ids))
    ),
    "shard_mapped": _shard_mapped,
    "gradient_of_a_scale": lambda f, t, ids: jax.grad(
        lambda s: total_of(s * f(t, ids))
    )(0.5),
    "gradient_of_the_table": lambda f, t, ids: f(
        jax.grad(lambda t: total_of(f(t, ids)))(t), ids
    ),
    "sparse_gradient_of_the_table": lambda f, t, ids: f(
        to_dense(sj.grad(lambda t: total_of(f(t, ids)))(t)), ids
    ),
    "tangent_of_the_table": lambda f, t, ids: jax.jvp(
        lambda t: jnp.sin(f(t, ids)), (t,), (jnp.cos(t),)
    )[1],
    "linearized": _linearized,
}


# -- models ----------------------------------------------------------------------------


def build(model, safe=False):
    """The loss of a model, its parameters, and two batches of ids.

    With `safe`, no ids are out of range: there JAX's second derivatives contradict each
    other, see `fuzz_modes.Case`.
    """
    holder, tables, uses = model
    count = 1 if holder == "one" else len(tables)
    params, get = HOLDERS[holder](
        [_table(k, *table) for k, table in enumerate(tables[:count])]
    )
    batches = [], []
    for *_, (kind, dtype), _ in uses:
        if safe and kind not in SAFE:
            kind = "few"
        for shift, batch in enumerate(batches):
            batch.append(jnp.asarray(_ids(kind, dtype, shift)))

    def loss(params, batch):
        held, total = get(params), jnp.zeros((), jnp.float64)
        for k, ((which, read, _, wrappers), ids) in enumerate(zip(uses, batch)):
            if safe:
                ids = ids % max(min(rows for rows, *_ in tables), 1)
            f = READS[read]
            for name in wrappers:
                f = functools.partial(WRAPPERS[name], f)
            total = jnp.tanh(total) + (1 + k) * total_of(f(held[which % count], ids))
        return total

    return loss, params, batches


def check(model, how="traced"):
    """Raises if sparsejax and JAX differ on a model; see `fuzz_modes.check`."""
    with precisely():
        return check_gradient(Case(*build(model, how in SECOND), refusals=True), how)


# -- hypothesis ------------------------------------------------------------------------

_tables = st.lists(
    st.tuples(st.sampled_from(ROWS), st.sampled_from(SHAPES), st.sampled_from(DTYPES)),
    min_size=1,
    max_size=2,
).map(tuple)
_kinds = st.tuples(st.sampled_from(["few", "few", *KINDS]), st.sampled_from(IDS))
_wrappers = st.lists(st.sampled_from(sorted(WRAPPERS)), max_size=3).map(tuple)
_uses = st.lists(
    st.tuples(
        st.integers(0, 1),
        st.sampled_from(["index", "lookup_zero", *sorted(READS)]),
        _kinds,
        _wrappers,
    ),
    min_size=1,
    max_size=3,
).map(tuple)
models = st.tuples(st.sampled_from(sorted(HOLDERS)), _tables, _uses)
modes = st.sampled_from(["traced"] * 10 + ["required"] * 4 + sorted(MODES))
cases = st.tuples(models, modes)
