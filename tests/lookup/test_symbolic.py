"""Programs exported for any number of ids give what the compiled ones give."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import export

import sparsejax as sj
from helpers import assert_trees_close


RNG = np.random.default_rng(0)
TABLE = RNG.normal(size=(40, 4)).astype(np.float32)
VECTORS = RNG.normal(size=(12, 4)).astype(np.float32)
IDS = RNG.integers(0, 40, 12).astype(np.int32)
PADDED = RNG.integers(-1, 5, (12, 3)).astype(np.int32)
SEGMENTS = IDS % 5


def segments(x, ids):
    return sj.SegmentTensor(x, ids, 5)


def trained(table, ids):
    tx = sj.optim.lazy(optax.adagrad(1e-2))
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


def search(**options):
    return lambda t, q: sj.top_k(t, q, 3, **options)


OF_ROWS = {
    "coalesce": lambda g, ids: g.coalesce().to_dense(),
    "coalesce, few": lambda g, ids: g.coalesce(20).values,
    "get": lambda g, ids: g.get(ids[::2]),
    "retain": lambda g, ids: g.retain(ids[:1]).to_dense(),
    "product": lambda g, ids: (g * g).to_dense(),
}
# Arguments of shape [12, ...] get a symbolic first axis.
PROGRAMS = {
    "top_k": (search(), TABLE, VECTORS),
    "top_k, cosine": (search(score="cosine"), TABLE, VECTORS),
    "top_k, exclude for all": (search(exclude=jnp.array([1, 2])), TABLE, VECTORS),
    "top_k, exclude": (
        lambda t, q, e: sj.top_k(t, q, 3, exclude=e),
        *(TABLE, VECTORS, PADDED),
    ),
    "from_padded": (sj.SegmentTensor.from_padded, PADDED),
    "from_multi_hot": (lambda x: sj.SegmentTensor.from_multi_hot(x > 0), PADDED),
    "to_padded": (lambda x, s: segments(x, s).to_padded(4), IDS, SEGMENTS),
    "sort": (lambda x, s: segments(x, s).sort(), IDS, SEGMENTS),
    "pack": (lambda x, s: sj.pack_segments(segments(x, s), 4), IDS, SEGMENTS),
    "unpack": (sj.unpack_segments, PADDED, SEGMENTS),
    "unique": (lambda ids: sj.unique(ids, 16), IDS),
    "unique, as many": (lambda ids: sj.unique(ids, ids.size), IDS),
    "partition": (lambda ids: sj.partition(ids, 3), IDS),
    "ranges": (lambda s: sj.segment_ids_to_ranges(s, 5), np.sort(SEGMENTS)),
    "weighted sum": (
        lambda t, i, v: sj.scatter_weighted_sum(t, 0.5, i, v, 2.0),
        *(TABLE, IDS, VECTORS),
    ),
    "pull": (lambda i: sj.quantize(jnp.asarray(TABLE), 4).pull(i).to_dense(), IDS),
    "segment_argmax": (lambda x, s: sj.segment_argmax(x, s, 5), VECTORS, SEGMENTS),
    "segment_top_k": (lambda x, s: sj.segment_top_k(x, s, 5, k=2), VECTORS, SEGMENTS),
    "hard negatives": (
        lambda q, c: sj.losses.in_batch_softmax_loss(q, c, num_hard_negatives=3),
        *(VECTORS, VECTORS),
    ),
    "negatives of each": (negatives, IDS),
    "a training step": (trained, TABLE, IDS),
    **{
        name: (lambda i, v, f=f: f(sj.SelectedRows(i, v, 40), i), IDS, VECTORS)
        for name, f in OF_ROWS.items()
    },
    **{
        f"padded bags, {combiner}": (padded_bags(combiner), TABLE, PADDED)
        for combiner in ("max", "min", "logsumexp")
    },
}


@pytest.mark.window
@pytest.mark.parametrize("name", PROGRAMS)
def test_exported_for_any_number(name):
    fun, *args = PROGRAMS[name]
    (b,) = export.symbolic_shape("b")
    specs = [
        jax.ShapeDtypeStruct((b, *x.shape[1:]) if len(x) == 12 else x.shape, x.dtype)
        for x in args
    ]
    exported = export.export(jax.jit(fun))(*specs)
    leaves = jax.tree.leaves  # the number of segments of a result stays a symbol
    assert_trees_close(leaves(exported.call(*args)), leaves(jax.jit(fun)(*args)))


def test_a_symbolic_number_may_exceed_a_capacity():
    (b,) = export.symbolic_shape("b")
    padded = jax.ShapeDtypeStruct((b, 3), jnp.int32)
    few = jax.jit(lambda x: sj.SegmentTensor.from_padded(x, capacity=9))
    with pytest.raises(ValueError, match="capacity=9 may be too small"):
        export.export(few)(padded)
