"""Wrong calls of the core, transformations, optim, desc and viz: see `error_table`."""

from error_table import Section


_IMPORTS = """\
import jax
import jax.numpy as jnp
import numpy as np
import optax
import sparsejax as sj

"""


def _section(title: str, given: str, calls: str) -> Section:
    """Calls are apart by empty lines."""
    parts = [part.strip("\n") for part in calls.split("\n\n")]
    once = _IMPORTS + given.strip()
    return Section(title, "", [part for part in parts if part], once)


SECTIONS: list[Section] = [
    _section(
        "SelectedRows",
        """
table = jnp.ones((4, 3))
rows = sj.SelectedRows(jnp.array([2, 0]), jnp.ones((2, 3)), height=4)
counts = rows.astype(int)
halved = jax.tree.unflatten(  # with ids that are not integers
    jax.tree.structure(rows), [0.5 * rows.rows, 0.5 * rows.values]
)
""",
        """
sj.SelectedRows(jnp.array([2, 0]), jnp.ones((2, 3)), height=4.0)

sj.SelectedRows(jnp.array([2, 0]), jnp.ones((2, 3)), height=-1)

jax.jit(lambda n: sj.SelectedRows(rows.rows, rows.values, n))(4)

sj.SelectedRows(jnp.array([2.0, 0.0]), jnp.ones((2, 3)), height=4)

sj.SelectedRows(jnp.array([2]), jnp.ones((2, 3)), height=4)

sj.SelectedRows(None, jnp.ones((2, 3)), height=4)

sj.SelectedRows(jnp.array([2]), [[1.0], [1.0, 2.0]], height=4)

sj.SelectedRows(jnp.array([2]), jnp.ones((1, 3)), height=2**40)

sj.SelectedRows(jnp.array([2]), jnp.ones((1, 3)), height=12, stack=3)

sj.SelectedRows(jnp.array([2]), jnp.ones((1, 3)), height=12, stack=(5,))

sj.SelectedRows(jnp.array([2]), jnp.ones((1, 3)), height=12, stack=(3.0,))

jnp.asarray(rows)

np.asarray(rows)

sj.SelectedRows.from_dense(3.0)

sj.SelectedRows.from_dense("table")

sj.SelectedRows.from_dense(table, capacity=3)

sj.SelectedRows.from_dense(table, capacity=-3)

jax.jit(sj.SelectedRows.from_dense)(table, 3)

rows[1:]

rows[1, 2]

rows @ table.T

table.T @ rows

list(rows)

jax.tree.map(lambda x: jnp.stack([x, x]), rows).to_dense()

rows.coalesce(capacity=1)

jax.jit(lambda rows: rows.coalesce(1))(counts)

rows.get(jnp.array([1.0]))

rows.find(jnp.array([True, False, True, False]))

rows.retain(rows)

rows.map(lambda v: v[:1])

rows + 1.0

rows + jnp.ones((4, 2))

rows + sj.SelectedRows(jnp.array([2]), jnp.ones((1, 3)), height=5)

rows * jnp.ones(3)

rows * sj.SelectedRows(jnp.array([2]), jnp.ones((1, 3)), height=5)

1.0 / rows

rows / rows

table + halved

halved.to_dense()

halved.coalesce()

jax.tree.map(jnp.transpose, rows).to_dense()

jax.tree.map(lambda x: jnp.zeros(x.shape, int), rows).to_dense()

jax.tree.unflatten(jax.tree.structure(rows), [None, rows.values]).to_dense()

sj.concatenate([])

sj.concatenate(rows)

sj.concatenate([rows, table])

sj.concatenate([rows, rows.map(lambda v: v[:, :2])])
""",
    ),
    _section(
        "Quantized tables",
        """
table = jnp.ones((4, 3))
small = sj.quantize(table)
ids = jnp.array([2, 0])
""",
        """
sj.quantize(table, 3)

sj.quantize(table, scale_dtype=jnp.bfloat16)

sj.quantize(jnp.ones((4, 3), int))

sj.quantize(jnp.ones(4))

sj.quantize("table")

sj.quantize(small)

sj.quantize(sj.SelectedRows([2], jnp.ones((1, 3)), 4))

sj.quantize(table, 4, search="best")

sj.quantize(table, 4, search="greedy", symmetric=True)

sj.quantize(table, symmetric=1)

sj.quantize(table, key="random")

sj.quantize(table.at[2, 1].set(jnp.nan))

sj.quantize(-1e5 * table, 4)

small.get("first")

small[None]

small @ table.T

small.pull([0.5])

small.astype(int)

jnp.asarray(small)

small.requantize(table[:2])

small.average("table")

small.average(table, jnp.ones(3))

sj.QuantizedTable.from_fused(small.codes.astype(int))

sj.QuantizedTable.from_fused(small.codes)

sj.QuantizedTable.from_fused(small.to_fused(), features=5)

sj.QuantizedTable.from_fused(small.to_fused(), 5)

sj.QuantizedTable.from_fused(small.to_fused(), dtype=int)

sj.top_k(small, table, 2)

sj.value_and_grad(lambda params: jnp.sum(sj.lookup(params["t"], ids)))({"t": small})

sj.nn.Embedding(4, 3).attend(small, table)

sj.nn.Dense(2, use_bias=False)({"kernel": small}, jnp.ones((1, 4)))

sj.nn.tables({"t": small})

sj.optim.lazy(optax.sgd(0.1)).init({"t": small})
sj.optim.exact(optax.sgd(0.1)).init({"t": small})

tx = sj.optim.rounding(sj.optim.lazy(optax.sgd(0.1)), jax.random.key(0))
tx.update(table, tx.init(small), small)
""",
    ),
    _section(
        "SegmentTensor",
        """
import scipy.sparse

ids, lengths = jnp.array([10, 11, 101]), jnp.array([2, 1])
st = sj.SegmentTensor.from_lengths(ids, lengths)
nested = sj.SegmentTensor.from_lists([[[1], [2, 3]], [[4]]])
""",
        """
sj.SegmentTensor(ids, jnp.array([0, 1]), 2)

sj.SegmentTensor(ids, jnp.array([0.0, 0.0, 1.0]), 2)

sj.SegmentTensor(ids, jnp.array([[0, 0, 1]]), 2)

sj.SegmentTensor(ids, None, 2)

sj.SegmentTensor(ids, [0, 0, 1], 2.0)

sj.SegmentTensor(ids, [0, 0, 1], -2)

jax.jit(lambda n: sj.SegmentTensor(ids, [0, 0, 1], n))(2)

sj.SegmentTensor(ids, [0, 1, 0], 2, is_sorted=True)

sj.SegmentTensor([[10, 11], [101]], [0, 1], 2)

sj.SegmentTensor(3, [0], 1)

sj.SegmentTensor({"ids": ids, "scores": ids[:2]}, [0, 0, 1], 2)

sj.SegmentTensor(np.array([2**40, 1, 2]), [0, 0, 1], 2)

sj.SegmentTensor([2**70, 1, 2], [0, 0, 1], 2)

sj.SegmentTensor.from_lengths(ids, [2, 2])

sj.SegmentTensor.from_lengths(ids, [4, -1])

sj.SegmentTensor.from_lengths(ids, 3)

sj.SegmentTensor.from_lengths({}, lengths)

sj.SegmentTensor.from_lengths(ids, lengths, capacity=2)

sj.SegmentTensor.from_lengths(ids, lengths, capacity="2")

jax.jit(lambda n: sj.SegmentTensor.from_lengths(ids, n, capacity=2))(lengths)

sj.SegmentTensor.from_offsets(ids, [])

sj.SegmentTensor.from_offsets(ids, [2, 3])

sj.SegmentTensor.from_offsets(ids, [0, 2, 1])

sj.SegmentTensor.from_padded(ids)

sj.SegmentTensor.from_padded(ids[None], filler="a")

sj.SegmentTensor.from_padded(ids[None], filler=0.5)

sj.SegmentTensor.from_multi_hot(ids)

sj.SegmentTensor.from_multi_hot(jnp.array([[1, -1]]))

jax.jit(sj.SegmentTensor.from_multi_hot)(jnp.array([[1, 2]]))

sj.SegmentTensor.from_csr([0, 1])

sj.SegmentTensor.from_csr([0, 1], [0.5])

sj.SegmentTensor.from_csr([[0, 1]], [0])

sj.SegmentTensor.from_csr(scipy.sparse.csc_array(np.eye(3)))

sj.SegmentTensor.from_csr(scipy.sparse.csr_array(np.eye(3)), [0, 1])

sj.SegmentTensor.from_lists(3)

sj.SegmentTensor.from_lists([1, 2])

sj.SegmentTensor.from_lists([["10"], ["11"]])

sj.SegmentTensor.from_lists([[1, [2]], [3]])

sj.SegmentTensor.from_lists([{1: 2}, [3]])

sj.SegmentTensor.from_lists([{"a": 2}])

sj.SegmentTensor.from_lists({})

sj.SegmentTensor.from_lists({"ids": [[1], [2]], "scores": [[0.5, 1.0], []]})

sj.SegmentTensor.from_lists([np.ones(2), np.ones((2, 3))])

sj.SegmentTensor.from_lists([[0.5]], dtype="int32")

sj.SegmentTensor.from_lists([[300]], dtype="int8")

sj.SegmentTensor.from_lists([[2**40]])

sj.SegmentTensor.from_lists([[1, 2, 3]], capacity=2)

sj.SegmentTensor.from_lists([[1, 2, 3]], capacity=2.5)

jax.jit(lambda x: sj.SegmentTensor.from_lists([[x, x]]))(1)

st.map(lambda x: x[:1])

st.map(jnp.sum)

st.to_padded(filler=0.5)

st.to_padded(max_length=-1)

jax.jit(lambda st: st.to_padded())(st)

jax.jit(lambda st: st.to_lists())(st)

st.to_multi_hot(2.5)

nested.to_multi_hot(5)

np.asarray(st)
""",
    ),
    _section(
        "Lookup",
        """
table = jnp.ones((4, 2))
ids = jnp.array([1, 3])
pulled = sj.SelectedRows(jnp.array([1]), jnp.ones((1, 2)), height=4)
torch, tensorflow = (
    type("Tensor", (), {"__module__": module})() for module in ("torch", "tensorflow")
)
""",
        """
sj.lookup({"table": table}, ids)

sj.lookup(torch, ids)

sj.lookup(table, torch)

sj.embedding_bag(table, tensorflow, combiner="none")

sj.scatter_assign(torch, ids, table[ids])

sj.grad(lambda table: jnp.sum(sj.lookup(table, ids)))(torch)

sj.nn.Embedding(4, 2)({"embedding": torch}, ids)

sj.lookup(jnp.float32(1), ids)

sj.lookup(sj.SelectedRows([2], jnp.ones((1, 3)), 12, stack=(3,)), ids)

sj.lookup(table, None)

sj.lookup(table, sj.SegmentTensor.from_lists([[1], [3]]))

sj.lookup(table, jnp.array([1.0, 3.0]))

sj.lookup(ids, table)

sj.lookup(table, jnp.array([False, True, False, True]))

sj.lookup(table, [2**70])

sj.lookup(table, ids, mode="wrap")

sj.lookup(table[:0], ids, mode="clip")

sj.lookup(table, jnp.array([1, 9, -1]), mode="error")

jax.jit(lambda ids: sj.lookup(table, ids, mode="raise"))(ids)

sj.lookup(table, ["tea", "jam"])

sj.lookup(pulled, ids, mode="error")

sj.lookup(table, ids, padding_id=1.0)

jax.jit(lambda p: sj.lookup(table, ids, padding_id=p))(1)

sj.lookup(table, ids, max_norm="1.0")

sj.lookup(table, ids, max_norm=0.0)

sj.lookup(table.astype(int), ids, max_norm=1.0)
""",
    ),
    _section(
        "Bags",
        """
table = jnp.ones((4, 2))
ids = jnp.array([1, 3, 2])
bags = sj.SegmentTensor.from_lists([[1], [3, 2]])
scored = sj.SegmentTensor.from_lists({"ids": [[1]], "scores": [[0.5]]})
""",
        """
sj.embedding_bag(table, ids)

sj.embedding_bag(table, ids[None], jnp.array([0, 0, 1]))

sj.embedding_bag(table, bags, jnp.array([0, 0, 1]))

sj.embedding_bag(table, [[1], [2, 3]])

sj.embedding_bag(table, scored)

sj.embedding_bag(table > 0, bags)

sj.embedding_bag(table, ids, jnp.array([0]), 2)

sj.embedding_bag(table, bags, combiner="avg")

sj.embedding_bag(table, bags, combiner="max", weights=jnp.ones(3))

sj.embedding_bag(table, bags, weights=jnp.ones(2))

sj.embedding_bag(table, bags, weights=bags)

sj.embedding_bag(table, bags, weights=jnp.ones(3, bool))

sj.embedding_bag(table, bags, weights="mean")

sj.embedding_bag(table.astype(int), bags, combiner="logsumexp")
""",
    ),
    _section(
        "Scattering, unique ids, parts",
        """
table = jnp.ones((4, 2))
rows = jnp.array([1, 3])
new = jnp.zeros((2, 2))
""",
        """
sj.scatter_assign(sj.SelectedRows.from_dense(table), rows, new)

sj.scatter_assign(jnp.float32(1), rows, new)

sj.scatter_assign(table, rows, 0.0)

sj.scatter_assign(table, rows, None)

sj.scatter_assign(table, new, rows)

sj.scatter_assign(table.astype(int), rows, new)

sj.scatter_weighted_sum(table, 1.0, rows, new)

sj.scatter_weighted_sum(table, jnp.ones(2), rows, new, 1.0)

sj.scatter_weighted_sum(table, 1.0, rows, new, "1")

sj.scatter_weighted_sum(table.astype(int), 0.5, rows, new.astype(int), 1)

sj.unique(jnp.array([1.0]), 2)

sj.unique(jnp.array([1]), None)

jax.jit(sj.unique)(jnp.array([1]), 2)

sj.unique(np.array([2**40]), 1)

sj.partition(jnp.array([1]), 0)

jax.jit(sj.partition)(jnp.array([1]), 2)
""",
    ),
    _section(
        "CSR times dense",
        """
import scipy.sparse

dense = jnp.ones((3, 2))
elements = {"index": jnp.array([2, 0]), "value": jnp.array([1.0, 2.0])}
csr = sj.SegmentTensor.from_lengths(elements, [1, 1])
ids = sj.SegmentTensor.from_lists([[1], [2]])
flags = csr.map(lambda x: x > 0 if x.dtype == jnp.float32 else x)
""",
        """
sj.dot(dense, csr)

sj.dot(scipy.sparse.csc_array(np.eye(3)), dense)

sj.dot(ids, dense)

sj.dot(csr.map(lambda x: jnp.stack([x, x], 1)), dense)

sj.dot(csr.map(lambda x: x * 1.0), dense)

sj.dot(flags, dense > 0)

sj.dot(csr, [[1.0]])

sj.dot(csr, jnp.float32(1))

sj.dot(csr, dense, num_columns=3.0)

sj.dot(csr, dense, num_columns=4)

sj.dot(csr, dense, transpose=True, num_columns=3)

sj.dot(csr, dense[:2], transpose=True)

sj.dot(scipy.sparse.csr_array(np.eye(3)), dense, num_columns=4)
""",
    ),
    _section(
        "top_k",
        """
table, queries = jnp.ones((9, 4)), jnp.ones((2, 4))
mesh = jax.make_mesh((1,), ("x",), devices=jax.devices()[:1])
sharded = sj.parallel.shard_rows(table, mesh, "x")
""",
        """
sj.top_k(sharded, queries, 3)

sj.top_k(sj.SelectedRows.from_dense(table), queries, 3)

sj.top_k(table.astype(int), queries, 3)

sj.top_k(table, jnp.array([3, 4]), 3)

sj.top_k(table, jnp.ones((2, 3)), 3)

sj.top_k(table, queries, 0)

sj.top_k(table, queries, 10)

jax.jit(sj.top_k)(table, queries, 3)

sj.top_k(table, queries, 3, score="angle")

sj.top_k(table, queries, 3, score=lambda q, rows: q.sum(-1))

sj.top_k(table, queries, 3, bias=jnp.ones(4))

sj.top_k(table, queries, 3, exclude=[[1], [2, 3]])

sj.top_k(table, queries, 3, exclude=jnp.ones((3, 2), int))

sj.top_k(table, queries, 3, exclude=sj.SegmentTensor.from_lists([[1]]))

sj.top_k(table, queries, 3, chunk_size=0)

sj.parallel.top_k(table, queries, 3)

other = sj.parallel.shard_rows(jnp.ones(9), mesh, "x", layout="block")
sj.parallel.top_k(sharded, queries, 3, bias=other)
""",
    ),
    _section(
        "Segment reductions",
        """
data, ids = jnp.array([1.0, 2.0, 3.0]), jnp.array([0, 0, 1])
st = sj.SegmentTensor.from_lists([[1, 2], [3]])
nested = sj.SegmentTensor.from_lists([[[1], [2, 3]], [[4]]])
""",
        """
sj.segment_sum(data)

sj.segment_sum({"a": data}, ids)

sj.segment_sum(jnp.float32(1), ids)

sj.segment_sum(data > 0, ids)

sj.segment_sum(ids, data)

sj.segment_sum(data, ids[:2])

sj.segment_sum(data, ids, -1)

jax.jit(sj.segment_sum)(data, ids)

jax.jit(sj.segment_sum)(data, ids, 2)

sj.segment_sum(st, ids)

sj.segment_sum(nested)

sj.segment_sum(data, ids, weights=jnp.ones(2))

sj.segment_sum(data, ids, weights=data > 0)

sj.segment_sum(data, ids, weights="mean")

sj.segment_sum(ids, ids, empty=0.5)

sj.segment_sum(data, ids, empty="a")

sj.segment_sum(data, ids, mode="wrap")

sj.segment_softmax(data * 1j, ids)

sj.segment_any(data, ids)

sj.segment_normalize(data, ids, eps=0)

sj.segment_top_k(data, ids, k=2.0)
""",
    ),
    _section(
        "From one form of segments to another",
        """
lengths = jnp.array([2, 1])
st = sj.SegmentTensor.from_lists([[1], [2, 3]])
nested = sj.SegmentTensor.from_lists([[[1], [2, 3]], [[4]]])
padded = jnp.ones((2, 3))
""",
        """
sj.lengths_to_offsets([2, -1])

sj.lengths_to_offsets([[2, 1]])

sj.lengths_to_offsets([2**30, 2**30])

sj.lengths_to_segment_ids(lengths, 2)

sj.lengths_to_segment_ids(lengths, 2.0)

jax.jit(sj.lengths_to_segment_ids)(lengths)

sj.offsets_to_lengths([0, 3, 2])

sj.segment_ids_to_lengths([0, 1], -1)

jax.jit(sj.segment_ids_to_lengths)(lengths)

sj.segment_ids_to_ranges([1, 0])

sj.pack_segments(padded, 2)

sj.pack_segments(nested, 2)

sj.pack_segments(st, None)

sj.unpack_segments(jnp.ones(2), lengths)

sj.unpack_segments([[1.0], [2.0, 3.0]], lengths)

sj.unpack_segments(padded, [1, 1, 1])
""",
    ),
    _section(
        "Gradients",
        """
params = {"table": jnp.ones((100, 2)), "bias": jnp.ones(2)}
ids = jnp.array([1, 3])


def loss_fn(params, ids):
    return jnp.sum(sj.lookup(params["table"], ids) + params["bias"])


def tied(params, ids):
    return jnp.sum(params["table"] @ params["bias"])


def closing_over(params, ids):
    scale = 2.0 * params["bias"][0]
    doubled = jax.custom_vjp(lambda x: x)
    doubled.defvjp(lambda x: (scale * x, None), lambda _, g: (scale * g,))
    return jnp.sum(doubled(params["table"][ids]))


def train_step(params, ids):
    loss, grads = sj.value_and_grad(loss_fn)(params, ids)
    updates, _ = optax.sgd(0.1).update(grads, optax.sgd(0.1).init(params))
    return optax.apply_updates(params, updates), loss
""",
        """
sj.value_and_grad(tied, tables={"table": True, "bias": False})(params, ids)

sj.value_and_grad(loss_fn, tables=True)({**params, "bias": 1.0}, ids)

sj.value_and_grad(loss_fn, tables={"table": True})(params, ids)

sj.value_and_grad(loss_fn, tables={"tabel": True, "bias": None})(params, ids)

sj.value_and_grad(loss_fn, tables="table")(params, ids)

sj.value_and_grad(closing_over)(params, ids)

sj.value_and_grad(loss_fn, params, ids)(params, ids)

sj.value_and_grad(params, ids)

sj.grad(loss_fn(params, ids))

sj.explain(params)

sj.optim.exact_value_and_grad(params, sj.optim.exact(optax.sgd(0.1)))

sj.value_and_grad(loss_fn, has_aux="yes")

sj.value_and_grad(loss_fn, argnums=2)(params, ids)

sj.value_and_grad(loss_fn)(params=params, ids=ids)

sj.value_and_grad(loss_fn, argnums=1)(params, ids)

sj.value_and_grad(lambda table: table[ids])(params["table"])

sj.value_and_grad(lambda table: (jnp.sum(table), ids))(params["table"])

sj.value_and_grad(lambda table: jnp.sum(table), has_aux=True)(params["table"])

sj.value_and_grad(lambda table: ids[0])(params["table"])

sj.explain(loss_fn)(params, ids)["table"]

sj.explain(lambda params, ids: (params, loss_fn(params, ids)))(params, ids)

sj.explain(jax.jit(train_step))(params, ids)

sj.explain(jax.jit(sj.value_and_grad(loss_fn)))(params, ids)["bias"]
""",
    ),
    _section(
        "Rules of yours",
        """
from jax.extend.core import Primitive

same = Primitive("same")
same.def_abstract_eval(lambda x: x)
same.def_impl(lambda x: x)
twice = Primitive("twice")
twice.multiple_results = True
twice.def_abstract_eval(lambda x: [x, x])
twice.def_impl(lambda x: [x, x])

loss_fn = lambda table: jnp.sum(same.bind(table)[jnp.array([3])])
other_loss_fn = lambda table: jnp.sum(twice.bind(table)[0][jnp.array([3])])
table = jnp.ones((99, 2))
""",
        """
sj.extend.register_rule()

sj.extend.register_rule(lambda ctx, ref: ref)

sj.extend.register_rule(same)(lambda ctx, ref: ref.then(lambda r: r, shape=(99, 3)))
sj.grad(loss_fn)(table)

sj.extend.register_rule(same)(lambda ctx, ref: jnp.ones(3))
sj.grad(loss_fn)(table)

sj.extend.register_rule(twice)(lambda ctx, ref: [ref])
sj.grad(other_loss_fn)(table)

@sj.extend.register_rule(same)
def rule(ctx, ref):
    ctx.read(ref, jnp.array([0]))
    return NotImplemented
sj.grad(loss_fn)(table)
""",
    ),
    _section(
        "Lazy optimizers",
        """
params = {"table": jnp.ones((100, 2)), "bias": jnp.ones(2)}
rows = sj.SelectedRows(jnp.array([3]), jnp.ones((1, 2)), height=100)
grads = {"table": rows, "bias": jnp.ones(2)}
halved = jax.tree.unflatten(  # with ids that are not integers
    jax.tree.structure(rows), [0.5 * rows.rows, 0.5 * rows.values]
)
tables = {"table": jnp.ones((100, 2)), "kernel": jnp.ones((100, 2))}
tx = sj.optim.lazy(optax.sgd(0.1, momentum=0.9))
state = tx.init(params)
""",
        """
sj.optim.lazy(1e-3)

sj.optim.lazy(optax.adam)

sj.optim.lazy(sj.optim.exact(optax.sgd(0.1))).init(params)

sj.optim.lazy(optax.lamb(1e-3)).init(params)

parts = optax.scale_by_yogi(), optax.scale_by_sign(), optax.normalize_by_update_norm()
sj.optim.lazy(optax.chain(*parts)).init(params)

mask = lambda params: jax.tree.map(lambda x: bool(jnp.any(x > 0)), params)
sj.optim.lazy(optax.masked(optax.sgd(0.1), mask)).init(params)

halve = optax.stateless_with_tree_map(lambda g, p: g / 2 if len(g) > 9 else g)
sj.optim.lazy(halve).init(params)

parts = {"lazy": optax.sgd(0.1), "dense": optax.lamb(0.1)}
tx = sj.optim.lazy(optax.partition(parts, {"table": "lazy", "kernel": "dense"}))
tx.update({"table": rows, "kernel": rows}, tx.init(tables), tables)

stack = jnp.ones((5, 20, 2))
tx = sj.optim.lazy(sj.optim.rowwise_adagrad(0.1))
tx.update(sj.grad(lambda t: jnp.sum(t[1, 2]))(stack), tx.init(stack), stack)

tx.init(grads)

tx.update({**grads, "table": halved}, state, params)

tx.update(params, state, grads)

jax.tree.map(lambda g: 0.5 * g, grads)

jax.tree.map(jnp.add, grads, grads)

jax.jit(lambda g: jax.tree.map(jnp.add, g, g))(grads)

optax.adam(0.1).update(grads, optax.adam(0.1).init(params), params)

sj.optim.lazy(sj.optim.accumulate(optax.sgd(0.1), 2, 9)).init(params)

tx = optax.MultiSteps(sj.optim.lazy(optax.sgd(0.1)), 2)
tx.update(grads, tx.init(params), params)

tx = optax.chain(sj.optim.lazy(optax.sgd(0.1)), optax.add_decayed_weights(0.1))
tx.update(grads, tx.init(params), params)

tx = optax.chain(sj.optim.lazy(optax.sgd(0.1)), optax.scale(0.5))
tx.update(grads, tx.init(params), params)

tx.update(jax.tree.map(lambda g: optax.MaskedNode(), grads), state, params)

tx.update({"table": rows}, state, params)

tx.update(grads, params, state)

tx.update(grads, state, grads)

tx.update({**grads, "table": rows.map(lambda v: v[:, :1])}, state, params)

tx.update(grads, None, params)

tx.update(grads, tx.init({**params, "table": jnp.ones((50, 2))}), params)

sj.optim.global_norm({"table": halved})
""",
    ),
    _section(
        "Exact optimizers",
        """
params = {"table": jnp.ones((100, 2)), "bias": jnp.ones(2)}
ids = {"table": jnp.array([3])}
rows = sj.SelectedRows(jnp.array([3]), jnp.ones((1, 2)), height=100)
grads = {"table": rows, "bias": jnp.ones(2)}
tx = sj.optim.exact(optax.sgd(0.1))


def two_hops(params):
    near = params["table"][jnp.array([1])].astype(int)
    return jnp.sum(params["table"][near[:, 0]])
""",
        """
sj.optim.exact(1e-3)

pulled = {"t": sj.SelectedRows(jnp.arange(2), jnp.ones((2, 3)), 5)}
sj.optim.exact(optax.adam(1e-3)).init(pulled)

sj.optim.exact(optax.lion(1e-3)).init(params)

sj.optim.exact(optax.amsgrad(1e-3)).init(params)

sj.optim.exact(optax.novograd(1e-3)).init(params)

sj.optim.exact(optax.adabelief(1e-3)).init(params)

sj.optim.exact(optax.radam(1e-3)).init(params)

sj.optim.exact(sj.optim.rowwise_adagrad(0.1)).init(params)

sj.optim.exact(optax.adam(1e-3, eps=0.0)).init(params)

sj.optim.exact(optax.sgd(0.1, momentum=1.0)).init(params)

sj.optim.exact(optax.sgd(0.1, momentum=0.9999)).init(params)

tx.init({"bias": jnp.ones(2)})

sj.optim.exact(optax.sgd(0.1), tables=["table"]).init(params)

sj.optim.exact(optax.sgd(0.1), tables=True).init({**params, "step": 3})

tx.catch_up(params, ids, tx.init(params))

tx = sj.optim.exact(optax.sgd(0.1, momentum=0.9))
tx.catch_up(params, tx.init(params["bias"][:, None]), ids)

tx.catch_up(params, tx.init(params), {"tabel": ids["table"]})

tx.catch_up(params, tx.init(params), {"table": jnp.array([1.0])})

tx.update(grads, tx.init(params))

tx.update({"table": rows}, tx.init(params), params)

stack = jnp.ones((5, 20, 2))
tx.update(sj.grad(lambda t: jnp.sum(t[1, 2]))(stack), tx.init(stack), stack)

tx.update({**grads, "bias": sj.SelectedRows([1], [1.0], 2)}, tx.init(params), params)

tx = sj.optim.exact(optax.sgd(0.1, momentum=0.9))
tx.update(grads, tx.init(params), params)

sj.optim.exact_value_and_grad(two_hops, optax.sgd(0.1))

sj.optim.exact_value_and_grad(two_hops, tx)(params, tx.init(params))
""",
    ),
    _section(
        "Other optimizers",
        """
params = {"table": jnp.ones((100, 2)), "bias": jnp.ones(2)}
rows = sj.SelectedRows(jnp.array([3]), jnp.ones((1, 2)), height=100)
grads = {"table": rows, "bias": jnp.ones(2)}
dense = {"table": jnp.ones((100, 2)), "bias": jnp.ones(2)}
lazy = sj.optim.lazy(optax.sgd(0.1))

axis = jax.sharding.AxisType.Auto
mesh = jax.make_mesh((1,), ("x",), axis_types=(axis,), devices=jax.devices()[:1])
sharded = sj.parallel.shard_rows(jnp.ones((100, 2)), mesh, "x")
shorter = sj.parallel.shard_rows(jnp.ones((50, 2)), mesh, "x")
""",
        """
sj.optim.accumulate(1e-3, 2, capacity=8)

sj.optim.accumulate(lazy, 0, capacity=8)

sj.optim.accumulate(lazy, 2, capacity="8").init(params)

sj.optim.accumulate(lazy, 2, capacity={"table": 8}).init(params)

sj.optim.accumulate(lazy, 2, capacity=8, stacked={"table": True}).init(params)

stack = jnp.ones((5, 20, 2))
tx = sj.optim.accumulate(lazy, 2, capacity=8)
tx.update(sj.grad(lambda t: jnp.sum(t[1, 2]))(stack), tx.init(stack), stack)

tx = sj.optim.accumulate(lazy, 2, capacity=8)
tx.update(dense, tx.init(params), params)

tx = sj.optim.accumulate(lazy, 2, capacity={"table": None, "bias": None})
tx.update(grads, tx.init(params), params)

tx = sj.optim.accumulate(lazy, 2, capacity=8)
tx.update(grads, lazy.init(params), params)

tx = sj.optim.accumulate(lazy, 2, capacity=8)
tx.update({"table": rows}, tx.init(params), params)

sj.optim.accumulate(lazy, 2, capacity=8).init(sharded)

sj.optim.track_changes("sgd")

sj.optim.track_changes(lazy, tables={"items": True}).init(params)

sj.optim.track_changes(lazy, tables=True).init({"table": 0.5})

tx = sj.optim.track_changes(lazy, tables=False)
tx.update(grads, tx.init(params), params)

tx = sj.optim.track_changes(lazy)
tx.update(grads, lazy.init(params), params)

tx = sj.optim.track_changes(lazy)
state = tx.init(params)
tx.update(grads, state._replace(changed=None), params)

stack = jnp.ones((5, 20, 2))
tx = sj.optim.track_changes(lazy)
tx.update(sj.grad(lambda t: jnp.sum(t[1, 2]))(stack), tx.init(stack), stack)

sj.optim.lazy(sj.optim.track_changes(optax.sgd(0.1))).init(params)

sj.optim.take_changes(params, lazy.init(params))

tx = sj.optim.track_changes(lazy)
sj.optim.take_changes({"table": jnp.ones((50, 2))}, tx.init(params))

tx = sj.optim.track_changes(lazy)
jax.jit(sj.optim.take_changes)(params, tx.init(params))

lazy.update(rows, lazy.init(sharded), sharded)

tx = sj.optim.lazy(optax.adam(0.1))
tx.update(sharded, tx.init(shorter), sharded)

sj.optim.rounding(1e-3, key=0)

sj.optim.rounding(lazy)

sj.optim.rounding(lazy, key="0")

sj.optim.rounding(lazy, key=jax.random.split(jax.random.key(0)))

tx = sj.optim.rounding(lazy, key=0)
tx.update(grads, tx.init(params))

sj.optim.dynamic_loss_scale(1e-3)

sj.optim.dynamic_loss_scale(lazy, factor=1)

sj.optim.ftrl(0.0)

sj.optim.ftrl("0.1")

sj.optim.ftrl(0.1, l1=-1.0)

tx = sj.optim.ftrl(0.1)
tx.update(grads, tx.init(params))

sj.optim.rowwise_adam(0.1, b1=1.0)

sj.optim.weight_decay(2.0)

sj.optim.flush_weight_decay(params, lazy.init(params))

state = sj.optim.weight_decay(0.1).init(params)
sj.optim.flush_weight_decay(params["table"], state)

sj.optim.ema_params({**params, "head": jnp.ones(2)}, sj.optim.ema(0.9).init(params))
""",
    ),
    _section(
        "Descriptions",
        """
grad = sj.SelectedRows(jnp.array([4, 1]), jnp.ones((2, 2)), height=6)
tree = {"x": grad, "y": grad}
""",
        """
sj.desc.describe({"x": "a"})

sj.desc.describe(tree, ["x"])

sj.desc.describe(tree, ["x", "x"])

sj.desc.to_bytes(sj.desc.VarDesc("x", "TABLE", "float32", (6, 2)))

sj.desc.to_bytes(sj.desc.VarDesc("x", "LOD_TENSOR", "int4", (6, 2)))

sj.desc.from_bytes(b"")

sj.desc.from_bytes(b"text")

sj.desc.from_bytes(bytes([10, 1, 120, 16, 1]))

sj.desc.infer(lambda x: (jnp.sum(x), x), jnp.ones(3))
""",
    ),
    _section(
        "HashIndex",
        """
index, wide = sj.HashIndex.create(8), sj.HashIndex.create(8, key_bits=64)
""",
        """
sj.HashIndex.create(0)

sj.HashIndex.create(2**30)

sj.HashIndex.create(8, key_bits=16)

sj.HashIndex.create(8, policy="fifo")

sj.HashIndex.create(8, admit_after=256)

sj.HashIndex.create(8, max_evictions=-1)

sj.HashIndex.create(8, window=0)

index.find(["tea"])

index.find([1 << 33])

with sj._compat.enable_x64(True):
    index.find(jnp.array([3]))

wide.find(jnp.array([3]))

index.insert([3], 0.5)

index.insert([3], 2**63)

index.insert([3], 0, where=[1])

index.owners([3], 0)

index.keys_of([0.5])

sj.HashIndex.join_keys([3, 4])
""",
    ),
    _section(
        "reset_rows",
        """
tx = sj.optim.lazy(optax.adam(0.1))
params = {"table": jnp.ones((4, 2)), "bias": jnp.ones(())}
state, rows = tx.init(params), {"table": jnp.array([3])}
normal, zeros = jax.nn.initializers.normal(), lambda *args: jnp.zeros(3)
""",
        """
sj.optim.reset_rows(1e-3, state, params, rows)

sj.optim.reset_rows(tx, state, params, jnp.array([3]))

sj.optim.reset_rows(tx, state, params, {"table": jnp.ones(2)})

sj.optim.reset_rows(tx, state, params, {"bias": jnp.array([3])})

sj.optim.reset_rows(tx, state, params, rows, embedding_init=normal)

sj.optim.reset_rows(tx, state, params, rows, embedding_init=zeros, key=0)

sj.optim.reset_rows(tx, (), params, rows)

sj.optim.reset_rows(optax.scale_by_lbfgs(), (), params, rows)
""",
    ),
    _section(
        "Pictures",
        "ids = np.arange(6).reshape(2, 3)",
        """
sj.viz.rows_touched(3, 9)

sj.viz.rows_touched([], 9)

sj.viz.rows_touched([{"ids": ids}], 9)

sj.viz.rows_touched([sj.SelectedRows([1], [1.0], 8)], 9)
""",
    ),
    _section(
        "Testing",
        """
params = {"table": jnp.ones((100, 2)), "w": jnp.ones(2)}
loss_fn = lambda params, ids: jnp.sum(params["table"][ids] @ params["w"])
tx, ids = optax.adagrad(0.1), jnp.array([3, 7])
pulled = {"table": sj.SelectedRows(ids, jnp.ones((2, 2)), 100)}
check = sj.testing.assert_equals_dense
""",
        """
check(loss_fn, optax.adagrad, params, [ids])

check(loss_fn, sj.optim.exact(tx), params, [ids], exact=True)

check(loss_fn(params, ids), tx, params, [ids])

check(loss_fn, tx, pulled, [ids])

check(loss_fn, tx, jax.eval_shape(lambda: params), [ids])

check(loss_fn, tx, params, [])

check(lambda params, ids: jnp.sum(params["w"]), tx, params, [ids])
""",
    ),
]
