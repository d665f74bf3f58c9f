"""Records the answers of TensorFlow and Keras for test_tensorflow_mapping.py.

Not run by the tests. To run it again, in an environment of its own (CPU only)::

    pip install tensorflow-cpu==2.21.0 keras==3.15.1
    python tests/tools/golden_tensorflow.py

It writes tests/golden/tensorflow.json and tensorflow.npz. The name of a case is the
first cell of a row of docs/tensorflow.md; its record is that expression's value and,
for a random cotangent, its gradients.
"""

# The checked environments do not have its packages.
# pyright: reportMissingImports=false, reportMissingModuleSource=false
# pyright: reportArgumentType=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false

import keras
import numpy as np
import tensorflow as tf

from golden_file import STEPS, cases, keep, normal, refusal, rng, write


def record(name, f, inputs, grads=(), **args):
    """`f(**inputs, **args)`, a tensor or a tuple, and gradients of `grads`."""
    case = {"name": name, "args": args}
    keep(case, "inputs", inputs)
    given = {key: tf.constant(x) for key, x in inputs.items()}
    for key in grads:
        given[key] = tf.Variable(inputs[key])
    try:
        with tf.GradientTape() as tape:
            outputs = f(**given, **args)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            outputs = [tf.convert_to_tensor(x) for x in outputs]
            cotangent = normal(*outputs[0].shape)
            loss = tf.reduce_sum(outputs[0] * cotangent) if grads else None
    except Exception as error:
        case["raises"] = refusal(error)
        cases.append(case)
        return
    keep(case, "outputs", {str(i): x for i, x in enumerate(outputs)})
    if grads:
        found = dict(zip(grads, tape.gradient(loss, [given[key] for key in grads])))
        keep(case, "cotangents", {"0": cotangent})
        is_slices = lambda x: isinstance(x, tf.IndexedSlices)
        case["sparse"] = [key for key, x in found.items() if is_slices(x)]
        keep(case, "touched", {k: np.unique(found[k].indices) for k in case["sparse"]})
        keep(case, "grads", {k: tf.convert_to_tensor(x) for k, x in found.items()})
    cases.append(case)


# ------------------------------------------------------------------ 1 lookups

params, ids = normal(9, 3), np.array([[4, 1, 4], [0, 8, 4]])
table = {"params": params, "ids": ids}
record(
    "tf.gather(params, ids)", tf.gather, {"params": params, "indices": ids}, ["params"]
)
cases[-1]["inputs"]["ids"] = cases[-1]["inputs"].pop("indices")
record("tf.nn.embedding_lookup(params, ids)", tf.nn.embedding_lookup, table, ["params"])
record(
    "tf.nn.embedding_lookup(params, ids, max_norm)",
    tf.nn.embedding_lookup,
    table,
    ["params"],
    max_norm=1.0,
)
record(
    "tf.one_hot(ids, V) @ params",
    lambda params, ids: tf.one_hot(ids, 9) @ params,
    table,
    ["params"],
)


def keras_embedding(params, ids):
    layer = keras.layers.Embedding(9, 3, mask_zero=True)
    layer.build()
    layer.set_weights([params.numpy()])
    return layer(ids), layer.compute_mask(ids)


record("keras.layers.Embedding(mask_zero=True)", keras_embedding, table)
record("an id out of range", tf.gather, {"params": params, "indices": np.array([9])})
record("a negative id", tf.gather, {"params": params, "indices": np.array([-1])})
tensor, updates, rows = normal(9, 3), normal(4, 3), np.array([7, 2, 7, 0])
into = {"tensor": tensor, "indices": rows, "updates": updates}
record(
    "tf.tensor_scatter_nd_add(tensor, indices[:, None], updates)",
    lambda tensor, indices, updates: tf.tensor_scatter_nd_add(
        tensor, indices[:, None], updates
    ),
    into,
    ["tensor", "updates"],
)
once = {**into, "indices": np.array([7, 2, 5, 0])}
record(
    "tf.tensor_scatter_nd_update(tensor, indices[:, None], updates)",
    lambda tensor, indices, updates: tf.tensor_scatter_nd_update(
        tensor, indices[:, None], updates
    ),
    once,
    ["tensor", "updates"],
)
record(
    "tf.scatter_nd(indices[:, None], updates, shape)",
    lambda indices, updates: tf.scatter_nd(indices[:, None], updates, [9, 3]),
    {"indices": rows, "updates": updates},
    ["updates"],
)

# ------------------------------------------------------------------ 2 IndexedSlices

made = {"values": updates, "indices": rows}
slices = lambda values, indices: tf.IndexedSlices(values, indices, [9, 3])
record("tf.IndexedSlices(values, indices, dense_shape)", lambda **s: slices(**s), made)
record(
    "tf.convert_to_tensor(grad)", lambda **s: tf.convert_to_tensor(slices(**s)), made
)
record("grad.indices", lambda **s: slices(**s).indices, made)
record("grad.values", lambda **s: slices(**s).values, made)
record(
    "tf.math.scalar_mul(3.0, grad)",
    lambda **s: tf.math.scalar_mul(3.0, slices(**s)),
    made,
)
record(
    "tf.Variable.scatter_add(grad)",
    lambda tensor, **s: tf.Variable(tensor).scatter_add(slices(**s)),
    {"tensor": tensor, **made},
)
record(
    "tf.Variable.scatter_update(grad)",
    lambda tensor, **s: tf.Variable(tensor).scatter_update(slices(**s)),
    {"tensor": tensor, **made, "indices": once["indices"]},
)
distinct = {**made, "indices": once["indices"]}
clip = lambda **s: tf.convert_to_tensor(
    tf.clip_by_global_norm([slices(**s)], 0.5)[0][0]
)
record("tf.clip_by_global_norm([grad], clip_norm), distinct ids", clip, distinct)
record("clip_by_global_norm of repeated ids", clip, made)
record(
    "tf.linalg.global_norm([grad]), distinct ids",
    lambda **s: tf.linalg.global_norm([slices(**s)]),
    distinct,
)
record(
    "global_norm of repeated ids",
    lambda **s: tf.linalg.global_norm([slices(**s)]),
    made,
)
record(
    "tf.clip_by_value(grad, -0.5, 0.5), distinct ids",
    lambda **s: tf.convert_to_tensor(tf.clip_by_value(slices(**s), -0.5, 0.5)),
    distinct,
)

# ------------------------------------------------------------------ 3 bags

flat, segment_ids = np.array([4, 1, 0, 8, 2, 4, 5]), np.array([0, 0, 0, 2, 2, 3, 3])
scores = np.abs(normal(7)) + 0.1


def sparse(values, segment_ids, num_rows=4):
    values = tf.convert_to_tensor(values)
    places = tf.range(len(values), dtype=tf.int64)
    indices = tf.stack([tf.cast(segment_ids, tf.int64), places], axis=1)
    return tf.SparseTensor(indices, values, [num_rows, len(values)])


def lookup_sparse(params, ids, segment_ids, weights=None, **args):
    weights = None if weights is None else sparse(weights, segment_ids)
    ids = sparse(ids, segment_ids)
    return tf.nn.embedding_lookup_sparse(params, ids, weights, **args)


bags = {"params": params, "ids": flat, "segment_ids": segment_ids}
for combiner in ("sum", "mean", "sqrtn"):
    record(
        "tf.nn.embedding_lookup_sparse(params, sp_ids, None, combiner)",
        lookup_sparse,
        bags,
        ["params"],
        combiner=combiner,
    )
    record(
        "tf.nn.embedding_lookup_sparse(params, sp_ids, sp_weights, combiner)",
        lookup_sparse,
        {**bags, "weights": scores},
        ["params", "weights"],
        combiner=combiner,
    )
record(
    "tf.nn.embedding_lookup_sparse(max_norm)",
    lookup_sparse,
    bags,
    ["params"],
    combiner="mean",
    max_norm=1.0,
)

record(
    "jit_compile of embedding_lookup_sparse",
    lambda params, ids, segment_ids: tf.function(lookup_sparse, jit_compile=True)(
        params, ids, segment_ids, combiner="mean"
    ),
    bags,
)


def safe(params, ids, segment_ids, weights=None, **args):
    weights = None if weights is None else sparse(weights, segment_ids)
    ids = sparse(ids, segment_ids)
    return tf.nn.safe_embedding_lookup_sparse(params, ids, weights, **args)


unsafe = {**bags, "ids": np.array([4, -1, 0, -1, -3, 4, 5])}
signed = np.array([1.0, 1.0, -2.0, 1.0, 0.0, 0.5, 3.0], np.float32)
record(
    "tf.nn.safe_embedding_lookup_sparse(params, sp_ids)",
    safe,
    unsafe,
    ["params"],
    combiner="mean",
)
record(
    "tf.nn.safe_embedding_lookup_sparse(params, sp_ids, sp_weights)",
    safe,
    {**unsafe, "weights": signed},
    ["params"],
    combiner="mean",
)
record(
    "tf.nn.safe_embedding_lookup_sparse(default_id)",
    safe,
    unsafe,
    ["params"],
    combiner="mean",
    default_id=7,
)
record(
    "an empty bag at the end",
    lambda params, ids, segment_ids: tf.nn.embedding_lookup_sparse(
        params, sparse(ids, segment_ids, 6), None, combiner="sum"
    ),
    bags,
)

# ------------------------------------------------------------------ 4 ragged, sparse

values, lengths = normal(7, 2), np.array([2, 0, 4, 1])
ragged = {"values": values, "lengths": lengths}
rt = lambda values, lengths: tf.RaggedTensor.from_row_lengths(values, lengths)
of_rt = lambda f: lambda values, lengths: f(rt(values, lengths))
record(
    "tf.RaggedTensor.from_row_lengths(values, lengths).to_tensor(-1.0)",
    of_rt(lambda r: r.to_tensor(-1.0)),
    ragged,
    ["values"],
)
record("rt.row_splits", of_rt(lambda r: r.row_splits), ragged)
record("rt.row_lengths()", of_rt(lambda r: r.row_lengths()), ragged)
record("rt.value_rowids()", of_rt(lambda r: r.value_rowids()), ragged)
record("rt.nrows()", of_rt(lambda r: r.nrows()), ragged)
record(
    "tf.reduce_sum(rt, axis=1)",
    of_rt(lambda r: tf.reduce_sum(r, axis=1)),
    ragged,
    ["values"],
)
full = {"values": values, "lengths": np.array([2, 1, 4])}
record(
    "tf.reduce_mean(rt, axis=1)",
    of_rt(lambda r: tf.reduce_mean(r, axis=1)),
    full,
    ["values"],
)
record(
    "tf.reduce_max(rt, axis=1)",
    of_rt(lambda r: tf.reduce_max(r, axis=1)),
    full,
    ["values"],
)
record("mean of an empty row", of_rt(lambda r: tf.reduce_mean(r, axis=1)), ragged)
record(
    "tf.RaggedTensor.from_row_splits(values, row_splits).to_tensor(-1.0)",
    lambda values, row_splits: tf.RaggedTensor.from_row_splits(
        values, row_splits
    ).to_tensor(-1.0),
    {"values": values, "row_splits": np.array([0, 2, 2, 6, 7])},
)
record(
    "tf.RaggedTensor.from_value_rowids(values, rowids, nrows).to_tensor(-1.0)",
    lambda values, rowids: tf.RaggedTensor.from_value_rowids(
        values, rowids, 5
    ).to_tensor(-1.0),
    {"values": values, "rowids": np.array([0, 0, 2, 2, 2, 2, 3])},
)
record(
    "tf.RaggedTensor.from_tensor(x, padding=-1).flat_values",
    lambda x: tf.RaggedTensor.from_tensor(x, padding=-1).flat_values,
    {"x": np.array([[1, 2, -1], [-1, -1, -1], [3, -1, -1]])},
)
csr = {
    "row": np.array([0, 0, 2, 2]),
    "column": np.array([3, 8, 0, 3]),
    "value": normal(4),
}


def matrix(row, column, value):
    indices = tf.stack([row, column], axis=1)
    return tf.SparseTensor(indices, tf.convert_to_tensor(value), [3, 9])


record("tf.sparse.to_dense(sp)", lambda **m: tf.sparse.to_dense(matrix(**m)), csr)
record(
    "tf.sparse.reduce_sum(sp, axis=1)",
    lambda **m: tf.sparse.reduce_sum(matrix(**m), axis=1),
    csr,
)
record(
    "tf.sparse.sparse_dense_matmul(sp, dense)",
    lambda dense, **m: tf.sparse.sparse_dense_matmul(matrix(**m), dense),
    {**csr, "dense": params},
    ["value", "dense"],
)
record(
    "tf.sparse.sparse_dense_matmul(sp, dense, adjoint_a=True)",
    lambda dense, **m: tf.sparse.sparse_dense_matmul(
        matrix(**m), dense, adjoint_a=True
    ),
    {**csr, "dense": normal(3, 2)},
    ["value", "dense"],
)

# ------------------------------------------------------------------ 5 segments

data = normal(6, 2)
sorted_ids, any_ids = np.array([0, 0, 2, 2, 2, 3]), np.array([3, 0, 3, 0, 3, 1])
for what in ("sum", "mean", "max", "min", "prod"):
    record(
        f"tf.math.segment_{what}(data, segment_ids)",
        getattr(tf.math, f"segment_{what}"),
        {"data": data, "segment_ids": sorted_ids},
        ["data"],
    )
for what in ("sum", "mean", "max", "min", "prod", "sqrt_n"):
    record(
        f"tf.math.unsorted_segment_{what}(data, segment_ids, num_segments)",
        getattr(tf.math, f"unsorted_segment_{what}"),
        {"data": data, "segment_ids": any_ids},
        ["data"],
        num_segments=5,
    )
for what in ("sum", "mean", "sqrt_n"):
    record(
        f"tf.sparse.segment_{what}(params, ids, segment_ids)",
        lambda params, ids, segment_ids, what=what: getattr(
            tf.sparse, f"segment_{what}"
        )(params, ids, segment_ids),
        bags,
        ["params"],
    )
record(
    "an empty segment of segment_max",
    tf.math.segment_max,
    {"data": data, "segment_ids": sorted_ids},
)
record(
    "unsorted ids of segment_sum",
    tf.math.segment_sum,
    {"data": data, "segment_ids": any_ids},
)
ties = {"data": np.ones((2, 1), np.float32), "segment_ids": np.array([0, 0])}
record("ties of segment_max", tf.math.segment_max, ties, ["data"])
record("tf.unique(x)", lambda x: tuple(tf.unique(x)), {"x": np.array([4, 1, 4, 0])})
record(
    "tf.math.bincount(x, minlength)",
    lambda x: tf.math.bincount(tf.cast(x, tf.int32), minlength=6),
    {"x": np.array([4, 1, 4, 0])},
)
record(
    "tf.dynamic_partition(data, partitions, num_partitions)",
    lambda data, partitions: tuple(tf.dynamic_partition(data, partitions, 2)),
    {"data": data, "partitions": np.array([1, 0, 1, 1, 0, 1], np.int32)},
)
record(
    "tf.dynamic_stitch([indices], [data])",
    lambda indices, data: tf.dynamic_stitch([indices], [data]),
    {"indices": np.array([3, 0, 2, 1, 5, 4], np.int32), "data": data},
    ["data"],
)

# ------------------------------------------------------------------ 6 optimizers


def batches(distinct):
    found = rng.integers(0, 6, (STEPS, 4))
    if distinct:
        found = np.stack([rng.permutation(6)[:4] for _ in range(STEPS)])
    # Rows 7 and 8 are read at the first step only.
    found[0] = [7, 2, 0, 8] if distinct else [7, 2, 7, 8]
    return normal(9, 3), found, normal(STEPS, 4, 3)


def merge(grad):
    """Repeated ids summed: raw_ops step once for each occurrence."""
    indices, inverse = tf.unique(grad.indices)
    summed = tf.math.unsorted_segment_sum(grad.values, inverse, len(indices))
    return indices, summed


def record_training(name, make, raw=False, start=None, distinct=False, **args):
    w0, ids, targets = batches(distinct)
    w0 = w0 if start is None else w0 * start
    case = {"name": name, "args": args}
    w, after = tf.Variable(w0), []
    step = make(w, **args)
    for i, target in zip(ids, targets):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(w, i) * target)
        grad = tape.gradient(loss, w)
        assert isinstance(grad, tf.IndexedSlices)
        step(*merge(grad)) if raw else step.apply_gradients([(grad, w)])
        after.append(w.numpy().copy())
    keep(case, "inputs", {"weight": w0, "ids": ids, "targets": targets})
    keep(case, "outputs", {"weights": np.stack(after)})
    cases.append(case)


def of_keras(name):
    return lambda w, **args: getattr(keras.optimizers, name)(**args)


lr = {"learning_rate": 0.1}
record_training("keras.optimizers.SGD", of_keras("SGD"), **lr)
record_training("keras.optimizers.SGD(momentum)", of_keras("SGD"), **lr, momentum=0.9)
record_training("keras.optimizers.Adagrad", of_keras("Adagrad"), distinct=True, **lr)
record_training("keras.optimizers.Adam", of_keras("Adam"), distinct=True, **lr)
record_training(
    "keras.optimizers.AdamW", of_keras("AdamW"), distinct=True, **lr, weight_decay=0.1
)
record_training("Keras' Adagrad, repeated ids", of_keras("Adagrad"), **lr)
record_training("keras.optimizers.Ftrl", of_keras("Ftrl"), **lr)
record_training(
    "keras.optimizers.RMSprop", of_keras("RMSprop"), distinct=True, **lr, rho=0.9
)
zeros = lambda: tf.Variable(tf.zeros((9, 3)))
handle = lambda x: x.handle


def raw_adagrad(w, learning_rate, epsilon):
    accum = zeros()
    return lambda indices, grad: tf.raw_ops.ResourceSparseApplyAdagradV2(
        var=handle(w),
        accum=handle(accum),
        lr=learning_rate,
        epsilon=epsilon,
        grad=grad,
        indices=indices,
    )


def raw_momentum(w, learning_rate, momentum):
    accum = zeros()
    return lambda indices, grad: tf.raw_ops.ResourceSparseApplyKerasMomentum(
        var=handle(w),
        accum=handle(accum),
        lr=learning_rate,
        grad=grad,
        indices=indices,
        momentum=momentum,
    )


def raw_rmsprop(w, learning_rate, rho, epsilon):
    ms, mom = zeros(), zeros()
    return lambda indices, grad: tf.raw_ops.ResourceSparseApplyRMSProp(
        var=handle(w),
        ms=handle(ms),
        mom=handle(mom),
        lr=learning_rate,
        rho=rho,
        momentum=0.0,
        epsilon=epsilon,
        grad=grad,
        indices=indices,
    )


def raw_ftrl(w, learning_rate, l1, l2):
    accum, linear = zeros(), zeros()
    return lambda indices, grad: tf.raw_ops.ResourceSparseApplyFtrl(
        var=handle(w),
        accum=handle(accum),
        linear=handle(linear),
        grad=grad,
        indices=indices,
        lr=learning_rate,
        l1=l1,
        l2=l2,
        lr_power=-0.5,
    )


raw = {"raw": True, **lr}
record_training(
    "tf.raw_ops.ResourceSparseApplyAdagradV2", raw_adagrad, **raw, epsilon=1e-7
)
record_training(
    "tf.raw_ops.ResourceSparseApplyKerasMomentum", raw_momentum, **raw, momentum=0.9
)
record_training(
    "tf.raw_ops.ResourceSparseApplyRMSProp", raw_rmsprop, **raw, rho=0.9, epsilon=1e-7
)
record_training(
    "tf.raw_ops.ResourceSparseApplyFtrl", raw_ftrl, **raw, start=0, l1=0.1, l2=0.05
)


def adagrad_one_by_one(weight, values, indices):
    w, accum = tf.Variable(weight), zeros()
    tf.raw_ops.ResourceSparseApplyAdagradV2(
        var=handle(w),
        accum=handle(accum),
        lr=0.1,
        epsilon=1e-7,
        grad=values,
        indices=indices,
    )
    return w


record(
    "repeated ids of ResourceSparseApplyAdagradV2",
    adagrad_one_by_one,
    {"weight": tensor, **made},
)
for name in ("Adam", "Adagrad"):

    def first_step(name=name):
        w = tf.Variable(0.0)
        getattr(keras.optimizers, name)(0.1).apply_gradients([(tf.constant(1e-6), w)])
        return -w

    record(f"the first step of Keras' {name}, g = 1e-6", first_step, {})

# ------------------------------------------------------------------ 7 sampled losses

sampled = {
    "weights": normal(9, 3),
    "biases": normal(9),
    "labels": np.array([[4], [1], [0], [8]]),
    "inputs": normal(4, 3),
    "sampled": np.array([2, 4, 7]),
    "expected": np.array([0.4, 0.3, 0.2], np.float32),
    "true_expected": np.array([[0.3], [0.5], [0.6], [0.1]], np.float32),
}


def sampled_loss(f, **more):
    def loss(weights, biases, labels, inputs, sampled, expected, true_expected):
        return f(
            weights,
            biases,
            labels,
            inputs,
            num_sampled=3,
            num_classes=9,
            sampled_values=(sampled, true_expected, expected),
            **more,
        )

    return loss


wanted = ["weights", "biases", "inputs"]
record(
    "tf.nn.sampled_softmax_loss",
    sampled_loss(tf.nn.sampled_softmax_loss),
    sampled,
    wanted,
)
record("tf.nn.nce_loss", sampled_loss(tf.nn.nce_loss), sampled, wanted)

# Last, since the random inputs above would change: a sum keeps weights of 0 or less.
for combiner in ("sqrtn", "sum"):
    record(
        "tf.nn.safe_embedding_lookup_sparse(params, sp_ids, sp_weights)",
        safe,
        {**unsafe, "weights": signed},
        ["params"],
        combiner=combiner,
    )


if __name__ == "__main__":
    versions = f"TensorFlow {tf.__version__} with Keras {keras.__version__}"
    write("tensorflow", versions, "IndexedSlices")
