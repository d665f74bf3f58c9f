"""Programs exported for any number of ids give what the compiled ones give."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import export, lax

import sparsejax as sj
from helpers import assert_trees_close


# Dense optax promotes types.
pytestmark = [pytest.mark.usefixtures("loose_promotion"), pytest.mark.window]

RNG = np.random.default_rng(0)
TABLE = RNG.normal(size=(40, 4)).astype(np.float32)
VECTORS = RNG.normal(size=(12, 4)).astype(np.float32)
IDS = RNG.integers(0, 40, 12).astype(np.int32)
PADDED = RNG.integers(-1, 5, (12, 3)).astype(np.int32)
SEGMENTS = IDS % 5


def segments(x, ids):
    return sj.SegmentTensor(x, ids, 5)


def trained(table, ids):
    tx = sj.optim.lazy(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2)))
    loss = lambda table: jnp.sum(sj.lookup(table, ids) ** 2)
    grads = sj.grad(loss, tables=True)(table)
    updates, _ = tx.update(grads, tx.init(table), table)
    return optax.apply_updates(table, updates)


def negatives(ids):
    sampler = sj.losses.NegativeSampler.uniform(40)
    shape = ids.shape[0], 5
    return sampler.sample(jax.random.key(0), shape, ids, unique=True).ids


def padded_bags(combiner):
    return lambda t, ids: sj.embedding_bag(
        t, ids, combiner=combiner, padding_id=-1, max_norm=1.0
    )


def gradient_of(read):
    """The capacity of the gradient is a symbol too."""
    loss = lambda t, ids: jnp.sum(read(t, ids) ** 2)

    def fun(table, ids):
        g = sj.grad(loss, tables=True)(table, ids)
        return g.rows, g.to_dense()

    return fun


# Arguments of shape [12, ...] get a symbolic first axis.
OF_VECTORS = {
    "top_k": lambda q, t: sj.top_k(t, q, 3),
    "top_k, cosine": lambda q, t: sj.top_k(t, q, 3, score="cosine"),
    "top_k, exclude for all": lambda q, t: sj.top_k(t, q, 3, exclude=jnp.array([1, 2])),
    "top_k, exclude": lambda q, t, e: sj.top_k(t, q, 3, exclude=e),
    "hard negatives": lambda q, _: sj.losses.in_batch_softmax_loss(
        q, q, num_hard_negatives=3
    ),
}
OF_SEGMENTS = {
    "to_padded": lambda x, s: segments(x, s).to_padded(4),
    "sort": lambda x, s: segments(x, s).sort(),
    "pack": lambda x, s: sj.pack_segments(segments(x, s), 4),
    "segment_argmax": lambda x, s: sj.segment_argmax(x, s, 5),
    "segment_top_k": lambda x, s: sj.segment_top_k(x, s, 5, k=2),
}
OF_IDS = {
    "unique": lambda ids: sj.unique(ids, 16),
    "unique, as many": lambda ids: sj.unique(ids, ids.size),
    "partition": lambda ids: sj.partition(ids, 3),
    "pull": lambda ids: sj.quantize(jnp.asarray(TABLE), 4).pull(ids).to_dense(),
    "negatives of each": negatives,
}
OF_ROWS = {
    "coalesce": lambda g, ids: g.coalesce().to_dense(),
    "coalesce, few": lambda g, ids: g.coalesce(20).values,
    "get": lambda g, ids: g.get(ids[::2]),
    "retain": lambda g, ids: g.retain(ids[:1]).to_dense(),
    "product": lambda g, ids: (g * g).to_dense(),
}
GRADIENTS = {
    "index": lambda t, ids: t[ids],
    "take": lambda t, ids: jnp.take(t, ids, axis=0),
    "view": lambda t, ids: (2.0 * t)[ids + 1],
    "vmap": lambda t, ids: jax.vmap(lambda i: t[i])(ids),
    "bag": lambda t, ids: sj.embedding_bag(t, jnp.stack([ids, ids], 1)),
    "bags": lambda t, ids: sj.embedding_bag(t, ids, ids % 2, 2),
    "scan": lambda t, ids: lax.scan(lambda c, i: (c, t[i]), 0.0, ids)[1],
    "checkpoint": lambda t, ids: jax.checkpoint(lambda t: t[ids])(t),
    "cond": lambda t, ids: lax.cond(
        ids[0] > 3, lambda: jnp.sum(t[ids]), lambda: jnp.sum(t[:2])
    ),
}
PROGRAMS = {
    "from_padded": (sj.SegmentTensor.from_padded, PADDED),
    "from_multi_hot": (lambda x: sj.SegmentTensor.from_multi_hot(x > 0), PADDED),
    "unpack": (sj.unpack_segments, PADDED, SEGMENTS),
    "ranges": (lambda s: sj.segment_ids_to_ranges(s, 5), np.sort(SEGMENTS)),
    "weighted sum": (
        lambda t, i, v: sj.scatter_weighted_sum(t, 0.5, i, v, 2.0),
        *(TABLE, IDS, VECTORS),
    ),
    "a training step": (trained, TABLE, IDS),
    **{name: (f, IDS) for name, f in OF_IDS.items()},
    **{name: (f, VECTORS, SEGMENTS) for name, f in OF_SEGMENTS.items()},
    **{
        name: (f, VECTORS, TABLE, *([PADDED] if name == "top_k, exclude" else []))
        for name, f in OF_VECTORS.items()
    },
    **{
        name: (lambda i, v, f=f: f(sj.SelectedRows(i, v, 40), i), IDS, VECTORS)
        for name, f in OF_ROWS.items()
    },
    **{
        f"gradient of {name}": (gradient_of(read), TABLE, IDS)
        for name, read in GRADIENTS.items()
    },
    **{
        f"padded bags, {combiner}": (padded_bags(combiner), TABLE, PADDED)
        for combiner in ("max", "min", "logsumexp")
    },
}


def any_number(*bounds):
    return export.symbolic_shape("b", constraints=bounds)[0]


@pytest.mark.parametrize("name", PROGRAMS)
def test_exported_for_any_number(name):
    fun, *args = PROGRAMS[name]
    b = any_number()
    specs = [
        jax.ShapeDtypeStruct((b, *x.shape[1:]) if len(x) == 12 else x.shape, x.dtype)
        for x in args
    ]
    exported = export.export(jax.jit(fun))(*specs)
    # The number of segments of a result stays a symbol, so leaves are compared.
    both = lambda *args: (jax.tree.leaves(exported.call(*args)), fun(*args))
    got, expected = jax.jit(both)(*args)
    assert_trees_close(got, jax.tree.leaves(expected))


def test_the_number_may_exceed_a_capacity():
    few = jax.jit(lambda x: sj.SegmentTensor.from_padded(x, capacity=9))
    with pytest.raises(ValueError, match="capacity=9 may be too small"):
        export.export(few)(jax.ShapeDtypeStruct((any_number(), 3), jnp.int32))


def test_the_number_may_be_too_large_for_a_sparse_gradient():
    loss = lambda t, ids: jnp.sum(t[ids] ** 2)
    ids = lambda *bounds: jax.ShapeDtypeStruct((any_number(*bounds),), jnp.int32)
    reason = lambda *bounds: sj.explain(loss)(TABLE, ids(*bounds))["t"].reason
    assert re.search(r"may be more than half.*tables=", reason())
    assert not reason("b <= 20") and "where dense is cheaper" in reason("b >= 21")
    exported = export.export(jax.jit(sj.grad(loss)))(TABLE, ids())
    for some in IDS[:3], np.tile(IDS, 5):
        dense = jax.jit(jax.grad(loss))(TABLE, some)
        np.testing.assert_allclose(exported.call(TABLE, some), dense, rtol=1e-6)
