"""docs/torch.md: its code, checked against PyTorch, TorchRec and FBGEMM.

Each cell of the page's tables is evaluated with the arguments by name.
`golden/torch.json` and `.npz`, which golden_torch.py made, hold the answers of the
real systems; cells without a recorded answer have an example below, with NumPy or by
hand.
"""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import pages
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
    raises,  # noqa: F401  (in torch.txt)
    stepped,  # noqa: F401  (in torch.txt)
)


pytestmark = pytest.mark.slow


# The page notes that their gradient is not the derivative.
WRONG = "torch.softmax(nested, dim=1).values()"
OTHER = "nn.Embedding(max_norm)", "dist.all_reduce(sparse)"
PAGE = ByCell("torch", "3", OTHER, WRONG)


@pytest.mark.usefixtures("loose_promotion")
@pytest.mark.parametrize("name", PAGE.values)
def test_recorded(name):
    PAGE.check_values(PAGE.values[name], lambda name, x: True, "ours")


@pytest.mark.usefixtures("loose_promotion")
@pytest.mark.parametrize("name", PAGE.training)
def test_recorded_training(name):
    PAGE.check_training(PAGE.training[name], rtol=2e-5, atol=2e-6)


# ------------------------------------------------------------------ by hand


@PAGE.checks("GradScaler")
def check_grad_scaler():
    check_loss_scale(PAGE.run("GradScaler", lr=0.1))


@PAGE.checks(
    "DataLoader(TensorDataset(x, y), batch_size)",
    "DataLoader(collate_fn)",
    "DataLoader(drop_last, shuffle, generator)",
    "DistributedSampler(num_replicas, rank)",
    "StatefulDataLoader.state_dict()",
)
def check_loader():
    x, y, lists = np.arange(4.0), np.arange(4), [[7, 9], [8], [], [5]]
    given = {"x": x, "y": y, "lists": lists, "batch_size": 2}
    loader = PAGE.run("DataLoader(TensorDataset(x, y), batch_size)", **given)
    assert [b.tolist() for _, b in loader] == [[0, 1], [2, 3]]
    loader = PAGE.run("DataLoader(collate_fn)", **given)
    found = [baskets.to_lists() for baskets, _ in loader]
    assert found == [lists[:2], lists[2:]]
    given = {"dataset": sj.data.ArrayDataset(y), "batch_size": 3}
    (batch,) = PAGE.run("DataLoader(drop_last, shuffle, generator)", **given)
    assert len(set(batch.tolist())) == 3
    given["batch_size"] = 1
    found = PAGE.run("DistributedSampler(num_replicas, rank)", **given)
    assert len(list(found)) == 2
    state = PAGE.run("StatefulDataLoader.state_dict()", **given)
    assert json.loads(json.dumps(state)) == state


def a_mesh():
    auto = (jax.sharding.AxisType.Auto,)
    return jax.make_mesh((2,), ("x",), auto, devices=jax.devices()[:2])


@PAGE.checks("ShardingType.ROW_WISE", "ShardingType.COLUMN_WISE")
def check_shards():
    for key in ("ShardingType.ROW_WISE", "ShardingType.COLUMN_WISE"):
        table = PAGE.run(key, weight=TABLE, mesh=a_mesh())
        assert_answers(jax.jit(sj.lookup)(table, np.array([7, 0])), TABLE[[7, 0]])


@PAGE.checks("ShardingType.TABLE_WISE")
def check_table_wise():
    given = {"heights": (len(TABLE) - 4, 4), "groups": (1, 0)}
    table = PAGE.run("ShardingType.TABLE_WISE", weight=TABLE, mesh=a_mesh(), **given)
    values = np.asarray(table.values)
    assert_answers(values[:4], TABLE[-4:])  # the second table, on the first
    assert_answers(jax.jit(sj.lookup)(table, np.array([7, 0])), TABLE[[7, 0]])


@PAGE.checks("ShardingType.TABLE_ROW_WISE")
def check_table_row_wise():
    layer = sj.nn.EmbeddingCollection({"item": (30, 4), "user": (50, 4)})
    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 2), ("host", "x"), auto, devices=jax.devices()[:4])
    bags = jnp.zeros((8, 5), jnp.int32)
    given = {
        "params": layer.init(jax.random.key(0)),
        "batch": {"item": bags, "user": bags},
        "loss_fn": lambda params, ids: sum(
            jnp.sum(x) for x in layer(params, ids).values()
        ),
    }
    plan = PAGE.run("ShardingType.TABLE_ROW_WISE", mesh=mesh, layer=layer, **given)
    assert plan.tables[0].costs["table-row-wise"].layout.num_groups == 2


@PAGE.checks("DistributedModelParallel")
def check_a_model():
    table = np.ones((100_000, 32), np.float32)
    given = {
        "params": {"item": table, "w": jnp.ones(32)},
        "batch": jnp.arange(20_480) // 4,
        "loss_fn": lambda params, ids: jnp.sum(params["item"][ids] @ params["w"]),
    }
    found = PAGE.run("DistributedModelParallel", mesh=a_mesh(), **given)
    assert isinstance(found["item"], sj.parallel.ShardedTable)
    assert_answers(found["item"][jnp.array([7, 0])], table[[7, 0]])
    assert len(found["w"].devices()) == 2


@PAGE.checks("dist.all_reduce(sparse)")
def check_all_reduce():
    case = PAGE.named("dist.all_reduce(sparse)")
    given = PAGE.get(case, "inputs")

    def total(indices, values):
        grad = sj.SelectedRows(indices[0, 0], values[0], 9)
        return PAGE.run("dist.all_reduce(sparse)", grad=grad)

    spec = jax.sharding.PartitionSpec
    f = jax.shard_map(total, mesh=a_mesh(), in_specs=spec("x"), out_specs=spec())
    got = jax.jit(f)(given["indices"], given["values"])
    assert isinstance(got, sj.SelectedRows)
    assert_answers(got, PAGE.get(case, "outputs")["0"])


@PAGE.checks("ShardingType.DATA_PARALLEL", "DistributedDataParallel")
def check_data_parallel():
    tx = sj.optim.lazy(optax.sgd(1.0))

    def step(params, state, ids):
        grads = sj.grad(lambda p: jnp.sum(sj.lookup(p, ids)), tables=True)(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    want = TABLE.copy()
    want[[7, 2]] -= [[2], [1]]
    want[0] -= 1
    for key in ("ShardingType.DATA_PARALLEL", "DistributedDataParallel"):
        f = PAGE.run(key, step=step, mesh=a_mesh())
        table = jnp.array(TABLE)
        got, _ = f(table, tx.init(table), jnp.array([7, 2, 7, 0]))
        assert_answers(got, want)


@PAGE.checks("EmbeddingShardingPlanner().plan", "ParameterConstraints(sharding_types)")
def check_plan():
    given = {
        "weight": np.ones((100_000, 32), np.float32),
        "ids": np.arange(20_480) // 4,
    }
    mesh = jax.sharding.AbstractMesh((4,), ("x",))
    found = PAGE.run("EmbeddingShardingPlanner().plan", mesh=mesh, **given)
    assert found["params['item']"].choice == "row-sharded"
    found = PAGE.run("ParameterConstraints(sharding_types)", mesh=mesh, **given)
    assert found["params['item']"].choice == "replicated-dense"


@PAGE.checks("LFU_EvictionPolicy(threshold_filtering_func)")
def check_admission():
    index = PAGE.run("LFU_EvictionPolicy(threshold_filtering_func)", zch_size=2)
    for step, keys in enumerate(([700, 500], [700, 900], [700, 900])):
        index, rows, _ = index.insert(keys, step)
    assert index.find([500, 700, 900]).tolist() == [2, 0, 1]
    index, _, evicted = index.insert([500, 500], 3)  # for the less frequent one
    assert evicted.tolist() == [1, 2] and index.policy == "lfu"


@PAGE.checks(
    "SSDTableBatchedEmbeddingBags",
    "SSDTableBatchedEmbeddingBags(kv_zch_params=KVZCHParams())",
)
def check_files(folder):
    for key in PAGE.cells:
        if not key.startswith("SSDTable"):
            continue
        store, path = sj.store.KVStore(), folder / str(len(key))
        PAGE.run(key, store=store, path=path, lr=1.0)
        rows = np.array([7, 2])
        if "kv_zch" in key:
            rows, _ = store.insert("items", ["ann", "bob"], 0)
            assert store.find("items", ["bob"]) == rows[1]
        store.push("items", sj.SelectedRows(rows, -jnp.ones((2, 2)), 9))
        assert store.pull_all("items")[rows].tolist() == [[1, 1], [1, 1]]
        assert store.stats()["items"].path == str(path)
        store.close()


@PAGE.checks(
    "MCHManagedCollisionModule(zch_size, LRU_EvictionPolicy())", "reset_inplace"
)
def check_managed_collisions():
    call = "MCHManagedCollisionModule(zch_size, LRU_EvictionPolicy())"
    index = PAGE.run(call, zch_size=2)
    for step, keys in enumerate(([700, 500], [700, 700], [900, 900])):
        index, rows, evicted = index.insert(keys, step)
    assert evicted.tolist() == [0, 2]
    assert index.find([500, 700, 900]).tolist() == [2, 1, 0]
    tx, params = sj.optim.lazy(optax.sgd(0.1, momentum=0.9)), jnp.ones((2, 3))
    state = jax.tree.map(jnp.ones_like, tx.init(params))
    given = {"tx": tx, "state": state, "params": params, "rows": evicted}
    params, state = PAGE.run("reset_inplace", **given)
    assert params[:, 0].tolist() == [0, 1]
    assert jax.tree.leaves(state)[0][:, 0].tolist() == [0, 1]


@PAGE.checks(
    "EmbeddingLocation.MANAGED_CACHING",
    "EmbeddingComputeKernel.FUSED_UVM_CACHING",
    "CacheAlgorithm.LRU",
)
def check_cache():
    def read(table, ids):
        rows = sj.lookup(table, ids)
        return rows.sum(), rows

    for key in (
        "EmbeddingLocation.MANAGED_CACHING",
        "EmbeddingComputeKernel.FUSED_UVM_CACHING",
        "CacheAlgorithm.LRU",
    ):
        store = sj.store.KVStore()
        tx = optax.sgd(0.0)
        store.init("items", TABLE, tx)
        cache = PAGE.run(key, store=store)
        table, step = cache.table, store.train_step(read, sj.optim.lazy(tx), True)
        state = sj.optim.lazy(tx).init(table)
        for ids in ([7, 2], [7, 0], [1, 7]):
            table, state, (_, rows) = step(table, state, jnp.array(ids))
            assert_answers(rows, TABLE[np.array(ids)])
        assert (cache.stats().hits, cache.stats().evictions) == (2, 1)


@PAGE.checks("TrainPipelineSparseDist", "EmbeddingLocation.MANAGED")
def check_store():
    store = PAGE.run("EmbeddingLocation.MANAGED")
    store.init("items", TABLE, optax.sgd(1.0))
    batches = [{"ids": np.array([7, 2])}, {"ids": np.array([7, 0])}]
    given = {"store": store, "batches": batches}
    ids = jnp.array([7])
    grad = jax.jit(sj.grad(lambda items: jnp.sum(sj.lookup(items, ids))))
    for _, items in PAGE.run("TrainPipelineSparseDist", **given):
        store.push("items", grad(items))
    want = TABLE.copy()
    want[7] -= 2
    assert_answers(store.pull_all("items"), want)


HYPER = {"lr": 0.1, "b1": 0.9, "b2": 0.99, "eps": 1e-8}


def second_step(rule):
    """TABLE after two steps with the same gradient: rule(w, g, m_hat) is a step."""
    want = TABLE.copy()
    for row, g in MERGED.items():
        for _ in range(2):  # corrected moments of equal gradients are g and its square
            want[row] = rule(want[row], g)
    return want


@PAGE.checks(
    "EmbOptimType.ADAM",
    "EmbOptimType.PARTIAL_ROWWISE_ADAM",
    "EmbOptimType.PARTIAL_ROWWISE_LAMB",
    "use_rowwise_bias_correction=True",
)
def check_adam():
    """FBGEMM's formulas, on two equal gradients."""
    norm = np.linalg.norm
    by_row = lambda g: g / np.sqrt(np.mean(g**2))

    def lamb(w, g):
        r = by_row(g) + 0.1 * w
        return w - 0.1 * norm(w) / norm(r) * r

    adam = lambda w, g: w - 0.1 * np.sign(g)
    for key, rule in {
        "EmbOptimType.ADAM": adam,
        "EmbOptimType.PARTIAL_ROWWISE_ADAM": lambda w, g: w - 0.1 * by_row(g),
        "EmbOptimType.PARTIAL_ROWWISE_LAMB": lamb,
        "use_rowwise_bias_correction=True": adam,
    }.items():
        tx = PAGE.run(key, **HYPER, weight_decay=0.1)
        got = one_step(tx, TABLE, a_grad(), steps=2)
        np.testing.assert_allclose(got, second_step(rule), rtol=1e-4, err_msg=key)


@PAGE.checks("weight_decay_mode=DECOUPLE, with prev_iter")
def check_decay():
    key = "weight_decay_mode=DECOUPLE, with prev_iter"
    tx = PAGE.run(key, lr=0.1, weight_decay=0.5)
    table, state = jnp.asarray(TABLE), tx.init(jnp.asarray(TABLE))
    update = jax.jit(tx.update)
    for row in (0, 0, 4):
        grad = sj.SelectedRows(jnp.array([row]), jnp.zeros((1, 2)), 9)
        updates, state = update(grad, state, table)
        table = optax.apply_updates(table, updates)
    # Row 4 was not read for two steps, and decays for three.
    got = np.asarray(table)
    np.testing.assert_allclose(got[4], TABLE[4] * 0.95**3, rtol=1e-5)
    np.testing.assert_array_equal(got[5], TABLE[5])


@PAGE.checks("stochastic_rounding=True")
def check_rounding():
    table = jnp.ones((9, 2), jnp.bfloat16)
    grad = sj.SelectedRows([7], jnp.full((1, 2), 1.0), 9)
    tx = PAGE.run("stochastic_rounding=True", lr=1e-3)
    got = np.asarray(one_step(tx, table, grad, steps=100)[7], np.float32)
    assert (got < 1).all()  # plain bfloat16 would stay at 1
    plain = one_step(sj.optim.lazy(optax.sgd(1e-3)), table, grad, steps=100)
    assert (np.asarray(plain[7], np.float32) == 1).all()


QUANTIZED = (
    "FloatToFused8BitRowwiseQuantized",
    "FloatToFusedNBitRowwiseQuantizedSBHalf(bit_rate)",
    "FusedNBitRowwiseQuantizedSBHalfToFloat(bit_rate)",
    "IntNBitTableBatchedEmbeddingBagsCodegen",
)


@PAGE.checks(*QUANTIZED)
def check_quantized():
    """The bytes that FBGEMM makes of these rows; their numbers are exact."""
    eight, half, back, bag = QUANTIZED
    weight = np.array([[0, 15, 5, 2], [3, 3, 3, 3]], np.float32)
    fused = np.array([[240, 37, 0, 60, 0, 0], [0, 0, 0, 60, 0, 66]], np.uint8)
    assert_answers(PAGE.run(half, weight=weight, bit_rate=4), fused)
    assert_answers(PAGE.run(back, fused=fused, bit_rate=4), weight)
    codes = np.array([[0, 255, 85, 34], [0, 0, 0, 0]])
    assert_answers(PAGE.run(eight, weight=weight)[:, :4], codes.astype(np.uint8))
    scale = np.asarray(PAGE.run(eight, weight=weight)[:, 4:8]).copy().view(np.float32)
    assert_answers(scale[:, 0], np.array([15 / 255, 0], np.float32))
    got = PAGE.run(bag, weight=weight, input=jnp.array([[0, 1], [1, 1]]))
    np.testing.assert_allclose(got, [weight.sum(0), 2 * weight[1]], rtol=2e-3)


@PAGE.checks("torch.save(model.state_dict())")
def check_checkpoint(folder):
    mesh = a_mesh()
    params = {"items": sj.parallel.shard_rows(TABLE, mesh, "x")}
    PAGE.run("torch.save(model.state_dict())", path=folder / "saved", params=params)
    found = sj.parallel.restore(folder / "saved", params)
    assert_answers(sj.lookup(found["items"], jnp.array([7])), TABLE[[7]])


# ------------------------------------------------------------------ for torch.txt

SRC, INDEX = np.array([1.0, 4.0, 2.0, 3.0], np.float32), np.array([0, 1, 0, 1])
E = np.exp(SRC)
TOTAL = np.array([E[0] + E[2], E[1] + E[3]])


def close(got, want):
    np.testing.assert_allclose(dense(got), want, rtol=1e-5, atol=1e-6)
    return True


def step_is(tx, rule):
    """Whether one step of `tx` is `rule(w, g)` of the rows that have a gradient."""
    return close(one_step(tx, TABLE, a_grad()), stepped(rule))


def grouped_step(tx):
    params = {"table": jnp.asarray(TABLE), "w": jnp.ones(2)}
    return one_step(tx, params, {"table": a_grad(), "w": jnp.ones(2)})


def read_rows(t):
    return sj.grad(lambda t: jnp.sum(sj.lookup(t, jnp.array([3, 4]))))(t)


def weighted_mean(weight, ids, w):
    bag = jax.jit(functools.partial(sj.embedding_bag, combiner="mean"))
    return bag(weight, ids, weights=w), np.einsum("bl,bld->bd", w, weight[ids]) / w.sum(
        1, keepdims=True
    )


# ------------------------------------------------------------------ differences


@PAGE.checks("nn.Embedding(max_norm)", "`max_norm`", "gradient under `max_norm`")
def check_max_norm():
    case = PAGE.named("nn.Embedding(max_norm)")
    given, (out, changed) = PAGE.get(case, "inputs"), PAGE.get(case, "outputs").values()
    assert (changed != given["weight"]).any()
    table = PAGE.run(case["name"], **given, **case["args"])
    assert_answers(table, changed)
    assert_answers(sj.lookup(table, given["input"]), out)
    f = lambda w: sj.lookup(w, given["input"], max_norm=1.0)
    cotangent = PAGE.get(case, "cotangents")["0"]
    of_theirs = lambda w: jnp.sum(sj.lookup(w, given["input"]) * cotangent)
    of_ours = lambda w: (jnp.sum(f(w) * cotangent), f(w))
    both = lambda table, w: (
        jax.grad(of_theirs)(table), jax.grad(of_ours, has_aux=True)(w)
    )  # fmt: skip
    theirs, (grad, ours) = jax.jit(both)(table, given["weight"])
    assert_answers(ours, out)
    assert_answers(theirs, PAGE.get(case, "grads")["weight"])
    long = np.linalg.norm(given["weight"], axis=1) > 1
    # A vector that is scaled to a length has no gradient along itself.
    along = np.sum(np.asarray(grad) * given["weight"], axis=1)
    np.testing.assert_allclose(along[long], 0, atol=1e-5)
    theirs = np.sum(PAGE.get(case, "grads")["weight"] * given["weight"], axis=1)
    assert np.abs(theirs[long]).max() > 0.1


@PAGE.checks("ties of a maximum in a bag", "gradient of a maximum")
def check_ties():
    case = PAGE.named("ties of a maximum")
    given, cotangent = PAGE.get(case, "inputs"), PAGE.get(case, "cotangents")["0"]
    theirs = PAGE.get(case, "grads")["weight"][[4, 1]]
    assert_answers(theirs, np.concatenate([cotangent, np.zeros((1, 3))]))

    def loss(weight):
        bags = sj.embedding_bag(weight, given["input"], combiner="max")
        return jnp.sum(bags * cotangent)

    PAGE.refuses("a sparse gradient of a maximum", "ValueError")
    grad = jax.jit(sj.grad(loss, tables=True))(given["weight"])
    assert isinstance(grad, sj.SelectedRows)
    assert_answers(grad.get(jnp.array([4, 1])), np.tile(cotangent / 2, (2, 1)))


@PAGE.checks("`scale_grad_by_freq` with a sparse gradient")
def check_freq():
    PAGE.refuses("scale_grad_by_freq of a sparse gradient", "RuntimeError")
    given = PAGE.get(PAGE.named("nn.Embedding(scale_grad_by_freq)"), "inputs")
    loss = lambda weight: jnp.sum(
        PAGE.run(
            "nn.Embedding(scale_grad_by_freq)", weight=weight, input=given["input"]
        )
    )
    grad = jax.jit(sj.grad(loss, tables=True))(given["weight"])
    assert isinstance(grad, sj.SelectedRows)
    assert_answers(grad, np.isin(np.arange(9), given["input"])[:, None] * np.ones(3))


@PAGE.checks("Adam, RMSprop, AdamW on a sparse gradient")
def check_refused_optimizers():
    PAGE.refuses("optim.Adam, sparse", "RuntimeError")
    PAGE.refuses("optim.RMSprop, sparse", "RuntimeError")
    for tx in (optax.adam(0.1), optax.rmsprop(0.1), optax.adamw(0.1)):
        got = dense(one_step(sj.optim.lazy(tx), TABLE, a_grad()))
        assert set(np.flatnonzero((got != TABLE).any(1))) == {2, 7}


@PAGE.checks("`SparseAdam`")
def check_sparse_adam():
    case = PAGE.named("optim.SparseAdam")
    w, ids, targets = PAGE.get(case, "inputs").values()
    grad = sj.SelectedRows(ids[0], targets[0], 9)
    adam = sj.optim.lazy(optax.adam(0.1, b2=0.99, eps=1e-3))
    want = PAGE.get(case, "outputs")["weights"][0]
    off = np.abs(np.asarray(one_step(adam, w, grad)) - want).max()
    assert 1e-5 < off < 1e-2


@PAGE.checks("weight decay with a sparse gradient")
def check_decay_refused():
    PAGE.refuses("optim.SGD(weight_decay), sparse", "RuntimeError")
    PAGE.refuses("optim.Adagrad(weight_decay), sparse", "RuntimeError")
    tx = sj.optim.lazy(optax.adamw(0.1, weight_decay=0.5))
    off = one_step(tx, TABLE, a_grad()) - one_step(
        sj.optim.lazy(optax.adam(0.1)), TABLE, a_grad()
    )
    want = np.zeros_like(TABLE)
    want[[2, 7]] = -0.05 * TABLE[[2, 7]]
    assert_answers(off, want)


@PAGE.checks("gradient of `torch.softmax(nested, dim=1)`")
def check_nested_softmax():
    case = PAGE.named(WRONG)
    p, g = PAGE.get(case, "outputs")["0"], PAGE.get(case, "cotangents")["0"]
    over_columns = p * (g - np.sum(p * g, axis=1, keepdims=True))
    assert_answers(PAGE.get(case, "grads")["values"], over_columns)
    values, lengths = PAGE.get(case, "inputs").values()
    loss = lambda x: jnp.sum(PAGE.run(WRONG, values=x, lengths=lengths) * g)
    ids = np.repeat(np.arange(3), lengths)
    sums = np.stack([np.sum((p * g)[ids == k], axis=0) for k in range(3)])
    assert_answers(jax.jit(jax.grad(loss))(values), p * (g - sums[ids]))


# ------------------------------------------------------------------ brought over


@pytest.mark.usefixtures("loose_promotion")
def test_a_brought_state_goes_on():
    """The next step of the page's state is PyTorch's, by its formula."""
    page = dict(PAGE.blocks)
    for block in pages.blocks(PAGE.page):
        if "bring(" in block.code:  # the page defines these names again below
            exec(block.code, page)
    read = {"user": 1, "item": 1}  # the rows of ann and rye in PyTorch
    ids = page["vocabulary"].ids({"user": ["ann"], "item": ["rye"]})
    loss = lambda params: jnp.sum(page["predict"](params, ids))

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state):
        updates, state = page["tx"].update(sj.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    def theirs(name, g):
        w, s = page["old"][name], page["adam"][name]
        t = s["step"] + 1
        m = 0.9 * s["exp_avg"] + 0.1 * g
        v = 0.999 * s["exp_avg_sq"] + 0.001 * g**2
        root = np.sqrt(v / (1 - 0.999**t)) + 1e-8
        return w - 1e-3 * m / (1 - 0.9**t) / root

    old, top = page["old"], page["old"]["top.weight"]
    grads = {"user.weight": top[:, :4], "item.weight": top[:, 4:], "top.bias": 1}
    grads["top.weight"] = np.concatenate(
        [old[f"{k}.weight"][[row]] for k, row in read.items()], axis=1
    )
    want = {name: theirs(name, g) for name, g in grads.items()}
    for column, row in read.items():  # rows that are not read stay
        name = f"{column}.weight"
        want[name] = np.where(
            np.arange(len(old[name]))[:, None] == row, want[name], old[name]
        )
    want = page["bring"](want)
    params, state = step(page["params"], page["opt_state"])
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), params, want)
    assert int(state[0].count) == 501


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
