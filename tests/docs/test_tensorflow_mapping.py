"""docs/tensorflow.md: its code, checked against the answers of TensorFlow and Keras.

Each cell of the page's tables is evaluated with the arguments by name.
`golden/tensorflow.json` and `.npz`, which golden_tensorflow.py made, hold the answers
of the real systems; cells without a recorded answer have an example below, with NumPy
or by hand.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.special

import sparsejax as sj
from recorded import (
    MERGED,
    TABLE,
    ByCell,
    a_grad,
    assert_answers,
    check_loss_scale,
    dense,
    one_step,
    page_ran,  # noqa: F401  (a fixture)
    raises,  # noqa: F401  (in tensorflow.txt)
    stepped,
)


pytestmark = pytest.mark.slow


PAGE = ByCell("tensorflow", "2")


@pytest.mark.usefixtures("loose_promotion")
@pytest.mark.parametrize("name", PAGE.values)
def test_recorded(name):
    """Ours are dense for vectors and for other arrays than tables."""
    is_table = lambda name, x: name in ("params", "weights") and x.ndim > 1
    PAGE.check_values(PAGE.values[name], is_table, "both")


@pytest.mark.usefixtures("loose_promotion")
@pytest.mark.parametrize("name", PAGE.training)
def test_recorded_training(name):
    # Keras adds eps in another place, which small gradients show.
    PAGE.check_training(PAGE.training[name], 2e-5, 3e-5 if "Adam" in name else 2e-6)


# ------------------------------------------------------------------ by hand


@PAGE.checks("tfa.optimizers.LazyAdam")
def check_lazy_adam():
    """Moments over equal gradients are, corrected, the gradient and its square."""
    tx = PAGE.run("tfa.optimizers.LazyAdam", learning_rate=0.1)
    want = TABLE.copy()
    for row, g in MERGED.items():
        want[row] -= 2 * 0.1 * np.sign(g)
    np.testing.assert_allclose(
        one_step(tx, TABLE, a_grad(), steps=2), want, rtol=1e-4, atol=1e-5
    )


@PAGE.checks("LossScaleOptimizer")
def check_loss_scale_optimizer():
    check_loss_scale(PAGE.run("LossScaleOptimizer", learning_rate=0.1))


@PAGE.checks("gradient_accumulation_steps=4")
def check_accumulate():
    tx = PAGE.run("gradient_accumulation_steps=4", learning_rate=0.1)
    once = sj.optim.lazy(optax.adam(0.1))
    want = dense(one_step(once, TABLE, a_grad()))
    assert_answers(one_step(tx, TABLE, a_grad(), steps=4), want)


@PAGE.checks(
    "tf.random.log_uniform_candidate_sampler",
    "tf.random.uniform_candidate_sampler",
    "tf.random.fixed_unigram_candidate_sampler",
)
def check_samplers():
    given = {"range_max": 9, "unigrams": np.arange(1, 10), "distortion": 0.75}
    given |= {"key": jax.random.key(0), "num_sampled": 20_000, "labels": np.arange(9)}
    k = np.arange(9)
    laws = {
        "log_uniform": np.log((k + 2) / (k + 1)) / np.log(10),
        "uniform": np.full(9, 1 / 9),
        "fixed_unigram": (k + 1) ** 0.75 / ((k + 1) ** 0.75).sum(),
    }
    for name, law in laws.items():
        key = f"tf.random.{name}_candidate_sampler"
        found = jax.jit(functools.partial(PAGE.run, key, unique=False, **given))()
        counts, want = np.bincount(found.ids, minlength=9), 20_000 * law
        assert_answers(np.exp(found.label_log_q), want)
        assert (np.abs(counts - want) < 5 * np.sqrt(want)).all()


@PAGE.checks("tfrs.tasks.Retrieval", "tfrs.layers.factorized_top_k.Streaming(k)")
def check_retrieval():
    queries, candidates = TABLE[:3], TABLE[3:8]
    ids, log_q = (
        np.array([7, 8, 7, 5, 8]),
        np.log(np.array([1, 2, 1, 3, 2], np.float32)),
    )
    given = {"queries": queries, "candidates": candidates}
    loss = PAGE.run(
        "tfrs.tasks.Retrieval", ids=ids, log_q=log_q, temperature=0.5, **given
    )
    scores = queries @ candidates.T / 0.5 - log_q  # as its call() computes them
    hits = (ids[:3, None] == ids) & ~np.eye(3, 5, dtype=bool)
    scores[hits] = np.finfo(np.float32).min
    log_softmax = scores - scipy.special.logsumexp(scores, axis=1, keepdims=True)
    assert_answers(loss, -np.diag(log_softmax))
    _, found = PAGE.run("tfrs.layers.factorized_top_k.Streaming(k)", k=2, **given)
    want = np.argsort(-(queries @ candidates.T), axis=1, kind="stable")[:, :2]
    np.testing.assert_array_equal(found, want)


@PAGE.checks("tfra.dynamic_embedding, FrequencyRestrictPolicy")
def check_keys_that_come_and_go():
    index = PAGE.run("tfra.dynamic_embedding, FrequencyRestrictPolicy", rows=2)
    for step, keys in enumerate(([700, 500], [500, 500], [900, 900])):
        index, _, evicted = index.insert(keys, step)
    assert evicted.tolist() == [1, 2] and index.find([500, 900]).tolist() == [0, 1]


DYNAMIC = "tfra.dynamic_embedding.get_variable(key_dtype=tf.int64)"
HKV = "HkvHashTableConfig(max_capacity, max_hbm_for_values)"


@PAGE.checks(DYNAMIC, HKV)
def check_keys_on_the_host():
    store, tx = sj.store.KVStore(), optax.sgd(1.0)
    PAGE.run(DYNAMIC, store=store, rows=3, tx=tx)
    for step, keys in enumerate(([1 << 40, 5], [1 << 40, 7], [8, 1 << 40])):
        rows, evicted = store.insert("items", np.array(keys), step)
    assert evicted.tolist() == [0] and store.find("items", [5, 7]).tolist() == [3, 2]
    cache = PAGE.run(HKV, store=store, max_hbm_rows=2)
    table, state = cache.table, sj.optim.lazy(tx).init(cache.table)
    step = store.train_step(lambda table, rows: -table[rows].sum(), sj.optim.lazy(tx))
    for keys in ([8, 7], [1 << 40, 7]):
        rows = store.find("items", np.array(keys))
        table, state, _ = step(table, state, rows)
    cache.flush(table, state)
    assert store.pull_all("items")[:, 0].tolist() == [1, 1, 2]


@PAGE.checks(
    "feature_column.embedding_column, shared_embeddings",
    "feature_column.weighted_categorical_column",
    "feature_column.linear_model",
    "tpu.experimental.embedding.TableConfig, FeatureConfig",
)
def check_columns():
    st = PAGE.run(
        "feature_column.weighted_categorical_column",
        lists=[[4, 1], [0]],
        weights=[[1.0, 2.0], [3.0]],
    )
    for key, scale in (
        ("feature_column.embedding_column, shared_embeddings", 1.0),
        ("tpu.experimental.embedding.TableConfig, FeatureConfig", 1 / 3),
    ):
        layer = PAGE.run(key)
        params = layer.init(jax.random.key(0))
        (table,) = params.values()
        got = layer(params, {"clicked": st})["clicked"]
        want = np.asarray(table)[4] + 2 * np.asarray(table)[1]
        np.testing.assert_allclose(got[0], want * scale, rtol=1e-5)
    layer = PAGE.run("feature_column.linear_model")
    params = {"kernel": jnp.arange(9.0)[:, None], "bias": jnp.zeros(1)}
    assert layer(params, st).tolist() == [[6], [0]]


@PAGE.checks(
    "tf.distribute.MirroredStrategy",
    "TPUEmbedding, a sharded table",
    "keras_rs.layers.DistributedEmbedding(feature_configs)",
    "tpu.experimental.embedding.Adagrad",
    "tf.train.Checkpoint",
)
def check_devices(folder):
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((2,), ("x",), auto, devices=jax.devices()[:2])
    tx = PAGE.run("tpu.experimental.embedding.Adagrad", learning_rate=0.1)
    table = PAGE.run("TPUEmbedding, a sharded table", params=TABLE, mesh=mesh)
    ids = jnp.array([7, 2, 7, 0])

    def step(table, state, ids):
        loss = lambda t: jnp.sum(t[ids])
        updates, state = tx.update(sj.grad(loss)(table), state, table)
        return optax.apply_updates(table, updates), state

    want = TABLE.copy()
    for row, g in {7: 2.0, 2: 1.0, 0: 1.0}.items():
        want[row] -= 0.1 * g / np.sqrt(0.1 + g**2)
    got, _ = jax.jit(step)(table, tx.init(table), ids)
    assert_answers(sj.lookup(got, jnp.arange(9)), want)
    params = {"items": got}
    PAGE.run("tf.train.Checkpoint", path=folder / "saved", params=params)
    found = sj.parallel.restore(folder / "saved", params)["items"]
    assert_answers(sj.lookup(found, jnp.array([7])), want[[7]])

    def plain(table, state, ids):
        grad = sj.grad(lambda t: jnp.sum(sj.lookup(t, ids)), tables=True)(table)
        updates, state = tx.update(grad, state, table)
        return optax.apply_updates(table, updates), state

    placed = PAGE.run(
        "keras_rs.layers.DistributedEmbedding(feature_configs)",
        params=np.ones((100_000, 32), np.float32),
        batch=jnp.arange(20_480) // 4,
        loss_fn=lambda table, ids: jnp.sum(table[ids]),
        mesh=mesh,
    )
    assert isinstance(placed, sj.parallel.ShardedTable)

    spread = PAGE.run("tf.distribute.MirroredStrategy", step=plain, mesh=mesh)
    got, _ = spread(jnp.array(TABLE), tx.init(jnp.array(TABLE)), ids)
    assert_answers(got, want)


@PAGE.checks("ParameterServerStrategy")
def check_store():
    store = PAGE.run("ParameterServerStrategy")
    store.init("items", TABLE, optax.sgd(1.0))
    store.push("items", a_grad())
    assert_answers(store.pull_all("items"), stepped(lambda w, g: w - g))


# ------------------------------------------------------------------ differences


def repeated():
    case = PAGE.named("global_norm of repeated ids")
    values, indices = PAGE.get(case, "inputs").values()
    return sj.SelectedRows(indices, values, 9), PAGE.get(case, "outputs")["0"]


@PAGE.checks("norm of a gradient with repeated ids")
def check_norm():
    grad, theirs = repeated()
    slices, merged = np.linalg.norm(grad.values), np.linalg.norm(dense(grad))
    np.testing.assert_allclose(theirs, slices, rtol=1e-6)
    assert abs(slices - merged) > 0.01
    np.testing.assert_allclose(sj.optim.global_norm(grad), merged, rtol=1e-6)
    tx = optax.clip_by_global_norm(0.5)
    got = dense(PAGE.blocks["step_of"](tx, grad))
    assert_answers(got, 0.5 / merged * dense(grad))
    clipped = PAGE.get(PAGE.named("clip_by_global_norm of repeated ids"), "outputs")[
        "0"
    ]
    assert_answers(clipped, 0.5 / slices * dense(grad))


@PAGE.checks("`clip_by_value` of repeated ids")
def check_clip_value():
    grad, _ = repeated()
    got = dense(PAGE.blocks["step_of"](optax.clip(0.5), grad))
    assert_answers(got, np.clip(dense(grad), -0.5, 0.5))


def moves_without_a_gradient(name):
    """Return True if row 8, which only the first step reads, moves later."""
    weights = PAGE.get(PAGE.named(name), "outputs")["weights"]
    return (np.diff(weights[:, 8], axis=0) != 0).any()


@PAGE.checks("Keras Adam, AdamW, RMSprop, momentum on IndexedSlices")
def check_keras():
    for name in ("Adam", "AdamW", "SGD(momentum)"):
        assert moves_without_a_gradient(f"keras.optimizers.{name}")
    for name in ("AdagradV2", "KerasMomentum", "RMSProp", "Ftrl"):
        assert not moves_without_a_gradient(f"tf.raw_ops.ResourceSparseApply{name}")


@PAGE.checks("repeated ids under Keras Adam, Adagrad, RMSprop")
def check_keras_repeated():
    case = PAGE.named("Keras' Adagrad, repeated ids")
    w, ids, targets = PAGE.get(case, "inputs").values()
    rows, merged, squares = w.copy(), np.zeros_like(w), np.full_like(w, 0.1)
    np.add.at(merged, ids[0], targets[0])
    np.add.at(squares, ids[0], targets[0] ** 2)  # of each slice
    rows -= 0.1 * merged / np.sqrt(squares + 1e-7)
    assert_answers(PAGE.get(case, "outputs")["weights"][0], rows)
    grad = sj.SelectedRows(ids[0], targets[0], 9)
    got = one_step(sj.optim.lazy(optax.adagrad(0.1)), w, grad)
    assert_answers(got, w - 0.1 * merged / np.sqrt(0.1 + merged**2 + 1e-7))


@PAGE.checks("repeated ids in `raw_ops.ResourceSparseApply*`")
def check_raw():
    case = PAGE.named("repeated ids of ResourceSparseApplyAdagradV2")
    w, values, indices = PAGE.get(case, "inputs").values()
    h, one_by_one = np.zeros_like(w), w.copy()
    for row, g in zip(indices, values):
        h[row] += g**2
        one_by_one[row] -= 0.1 * g / (np.sqrt(h[row]) + 1e-7)
    assert_answers(PAGE.get(case, "outputs")["0"], one_by_one)
    tx, grad = sj.optim.adagrad(0.1, eps=1e-7), sj.SelectedRows(indices, values, 9)
    off = np.abs(dense(one_step(tx, w, grad)) - one_by_one).max(axis=1)
    assert np.flatnonzero(off > 1e-3).tolist() == [7]


@PAGE.checks("eps of Keras' Adam", "eps and start of Keras' Adagrad")
def check_eps():
    g = jnp.float32(1e-6)  # so small that eps shows, at the first step
    step_of = lambda tx: -np.asarray(tx.update(g, tx.init(g), g)[0])
    case = PAGE.named("the first step of Keras' Adam, g = 1e-6")
    m, v = 0.1 * g, 0.001 * g**2
    beside = 0.1 * np.sqrt(0.001) / 0.1 * m / (np.sqrt(v) + 1e-7)
    np.testing.assert_allclose(PAGE.get(case, "outputs")["0"], beside, rtol=1e-4)
    want = 0.1 * g / (g + 1e-7)
    np.testing.assert_allclose(step_of(optax.adam(0.1, eps=1e-7)), want, rtol=1e-3)
    case = PAGE.named("the first step of Keras' Adagrad, g = 1e-6")
    inside = 0.1 * g / np.sqrt(0.1 + g**2 + 1e-7)
    np.testing.assert_allclose(PAGE.get(case, "outputs")["0"], inside, rtol=1e-5)
    np.testing.assert_allclose(step_of(optax.adagrad(0.1)), inside, rtol=1e-5)


@PAGE.checks("FTRL")
def check_ftrl():
    case = PAGE.named("keras.optimizers.Ftrl")
    before, after = (
        PAGE.get(case, "inputs")["weight"],
        PAGE.get(case, "outputs")["weights"][-1],
    )
    never = np.setdiff1d(np.arange(9), PAGE.get(case, "inputs")["ids"])
    assert never.size and (before[never] != after[never]).all()
    ftrl = PAGE.named("tf.raw_ops.ResourceSparseApplyFtrl")["args"]
    assert ftrl["l2"] > 0  # and 2 * l2 gave the recorded weights


@PAGE.checks("empty row: mean", "empty segment: max")
def check_empty():
    case = PAGE.named("mean of an empty row")
    values, lengths = PAGE.get(case, "inputs").values()
    theirs = PAGE.get(case, "outputs")["0"]
    st = sj.SegmentTensor.from_lengths(values, lengths)
    assert np.isnan(theirs[1]).all() and not sj.segment_mean(st)[1].any()
    assert_answers(sj.segment_mean(st, empty=np.nan), theirs)
    assert not PAGE.get(
        PAGE.named("tf.math.segment_mean(data, segment_ids)"), "outputs"
    )["0"][1].any()
    assert not PAGE.get(PAGE.named("an empty segment of segment_max"), "outputs")["0"][
        1
    ].any()
    name = "tf.math.unsorted_segment_max(data, segment_ids, num_segments)"
    lowest = PAGE.get(PAGE.named(name), "outputs")["0"][[2, 4]]
    assert (lowest == np.finfo(np.float32).min).all()
    assert np.isneginf(sj.segment_max(st)[1]).all()


@PAGE.checks("unsorted ids of `segment_*`", "ties of a maximum")
def check_segments():
    PAGE.refuses("unsorted ids of segment_sum", "InvalidArgumentError")
    data, segment_ids = PAGE.get(
        PAGE.named("unsorted ids of segment_sum"), "inputs"
    ).values()
    want = np.zeros((4, 2), np.float32)
    np.add.at(want, segment_ids, data)
    assert_answers(sj.segment_sum(data, segment_ids, 4), want)
    case = PAGE.named("ties of segment_max")
    f = lambda x: sj.segment_max(x, PAGE.get(case, "inputs")["segment_ids"], 1)
    loss = lambda x: jnp.sum(f(x) * PAGE.get(case, "cotangents")["0"])
    grad = jax.jit(jax.grad(loss))(np.ones((2, 1), np.float32))
    assert_answers(grad, PAGE.get(case, "grads")["data"])


# ------------------------------------------------------------------ all of them


@pytest.mark.usefixtures("loose_promotion")
@pytest.mark.parametrize("line", PAGE.examples, ids=lambda line: line[0])
def test_line(line):
    PAGE.check_example(line, globals())


def test_every_row_is_checked():
    PAGE.check_all_are_checked()


@pytest.mark.usefixtures("loose_promotion")
@pytest.mark.usefixtures("eight_devices")
@pytest.mark.parametrize("check", PAGE.by_hand, ids=lambda f: f.__name__)
def test_by_hand(check, tmp_path):
    check(tmp_path) if check.__code__.co_argcount else check()
