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
    Recorded,
    a_grad,
    assert_answers,
    assert_trains,
    dense,
    is_training,
    one_step,
    stepped,
)


pytestmark = pytest.mark.slow


_RECORDED = Recorded("torch", hidden=("10 ",))
GOLDEN, CELLS, DIFFERENCES = _RECORDED.cases, _RECORDED.cells, _RECORDED.differences
tables, run, get = _RECORDED.tables, _RECORDED.run, _RECORDED.get
named, checks = _RECORDED.named, _RECORDED.checks


@pytest.fixture(autouse=True, scope="module")
def _page_ran():
    _RECORDED.blocks  # not first inside of a trace


# ------------------------------------------------------------------ recorded cases


VALUES = {
    f"{i}-{case['name']}": case
    for i, case in enumerate(GOLDEN)
    if case["name"] in CELLS and "outputs" in case and not is_training(case)
    if case["name"] not in ("nn.Embedding(max_norm)", "dist.all_reduce(sparse)")
}
TRAINING = {f"{i}-{c['name']}": c for i, c in enumerate(GOLDEN) if is_training(c)}
SECTION_3 = {cells[0].strip("`") for name, cells in tables() if name.startswith("3 ")}


# The page notes that their gradient is not the derivative.
WRONG = "torch.softmax(nested, dim=1).values()"


def names_of(case):
    """The names that a cell may use."""
    # Ids stay NumPy's, and are known inside of jit.
    found = get(case, "inputs").items()
    floats = {name: jnp.asarray(x) for name, x in found if x.dtype.kind == "f"}
    given = {**case["args"], **dict(found), **floats}
    if case["name"] in SECTION_3 and "indices" in given:
        grad = sj.SelectedRows(given["indices"][0], given["values"], 9)
        if "sparse_mask" in case["name"]:
            grad = grad.coalesce()
        given |= {"grad": grad, "other": grad.coalesce()}
    return given


@pytest.mark.usefixtures("loose_promotion")
@pytest.mark.parametrize("name", VALUES)
def test_recorded(name):
    case = VALUES[name]
    given, outputs = names_of(case), get(case, "outputs").values()
    cotangents = get(case, "cotangents")

    def outputs_of(tables):
        outputs = run(case["name"], **{**given, **tables})
        return outputs if type(outputs) is tuple else (outputs,)

    def loss(tables):
        outputs = outputs_of(tables)
        loss = sum(jnp.sum(outputs[int(i)] * c) for i, c in cotangents.items())
        return loss, outputs

    if "grads" not in case:
        for got, want in zip(outputs_of({}), outputs, strict=True):
            assert_answers(got, want)
        return
    wants = get(case, "grads")
    in_sparse = {name: name in case["sparse"] for name in wants}
    grad = sj.grad(loss, has_aux=True, tables=in_sparse)
    grads, found = jax.jit(grad)({name: given[name] for name in wants})
    for got, want in zip(found, outputs, strict=True):
        assert_answers(got, want)
    for name, want in wants.items():
        assert isinstance(grads[name], sj.SelectedRows) == in_sparse[name]
        if case["name"] != WRONG:
            assert_answers(grads[name], want)
        if in_sparse[name]:
            rows = set(np.asarray(grads[name].rows).tolist()) - {len(want)}
            touched = set(get(case, "touched")[name].tolist())
            # A padded row may have a slot of zeros.
            assert touched <= rows and not want[list(rows - touched)].any()


@pytest.mark.usefixtures("loose_promotion")
@pytest.mark.parametrize("name", TRAINING)
def test_recorded_training(name):
    case = TRAINING[name]
    tx = run(case["name"], **case["args"])
    given, weights = get(case, "inputs"), get(case, "outputs")["weights"]
    assert_trains(tx, given, weights, rtol=2e-5, atol=2e-6)


# ------------------------------------------------------------------ by hand


def refuses(name, error):
    assert named(name)["raises"].startswith(error)


@checks("clip_grad_value_", "gradient_clipping, max_gradient")
def check_clip():
    for key, name in (
        ("clip_grad_value_", "clip_value"),
        ("gradient_clipping, max_gradient", "max_gradient"),
    ):
        tx = run(key, lr=0.1, **{name: 0.6})
        want = stepped(lambda w, g: w - 0.1 * np.clip(g, -0.6, 0.6))
        assert_answers(one_step(tx, TABLE, a_grad()), want)


@checks("param groups")
def check_groups():
    params = {"table": jnp.asarray(TABLE), "w": jnp.ones(2)}
    tx = run("param groups", labels={"table": "sparse", "w": "dense"})
    grads = {"table": a_grad(), "w": jnp.ones(2)}
    got = one_step(tx, params, grads)
    np.testing.assert_allclose(got["w"], 1 - 1e-3, rtol=1e-5)  # Adam's first step
    same = np.flatnonzero((np.asarray(got["table"]) == TABLE).all(1))
    assert same.tolist() == [0, 1, 3, 4, 5, 6, 8]


@checks("GradScaler")
def check_loss_scale():
    tx = run("GradScaler", lr=0.1)
    table = jnp.asarray(TABLE)
    state = tx.init(table)
    _, after = jax.jit(tx.update)(a_grad() * jnp.inf, state, table)
    assert after.skipped == 1 and after.scale == state.scale / 2


@checks("gradient accumulation")
def check_accumulate():
    tx, once = run("gradient accumulation", lr=0.1), sj.optim.lazy(optax.adam(0.1))
    assert_answers(
        one_step(tx, TABLE, a_grad(), steps=4), dense(one_step(once, TABLE, a_grad()))
    )


@checks(
    'torch_scatter.scatter(src, index, reduce="mean")',
    "torch_scatter.scatter_max(src, index)",
    "torch_scatter.segment_csr(src, indptr)",
    "torch_scatter.gather_csr(src, indptr)",
    "torch_scatter.scatter_softmax(src, index)",
    "torch_scatter.scatter_log_softmax(src, index)",
    "torch_scatter.scatter_logsumexp(src, index)",
    "torch_scatter.scatter_std(src, index)",
)
def check_torch_scatter():
    src, index = np.array([1.0, 4.0, 2.0, 3.0], np.float32), np.array([0, 1, 0, 1])

    def in_jit(key, src, **given):
        return jax.jit(lambda src: run(key, src=src, **given))(src)

    of = lambda name, reduce=None: in_jit(
        f"torch_scatter.{name}(src, index{reduce or ''})", src, index=index, n=2
    )
    assert_answers(of("scatter", ', reduce="mean"'), np.array([1.5, 3.5]))
    largest, position = of("scatter_max")
    assert largest.tolist() == [2, 4] and position.tolist() == [2, 1]
    e = np.exp(src)
    total = np.array([e[0] + e[2], e[1] + e[3]])
    assert_answers(of("scatter_softmax"), e / total[index])
    assert_answers(of("scatter_log_softmax"), np.log(e / total[index]))
    assert_answers(of("scatter_logsumexp"), np.log(total))
    assert_answers(of("scatter_std"), np.array([0.5, 0.5]))
    given = {"indptr": np.array([0, 1, 1, 4])}
    got = in_jit("torch_scatter.segment_csr(src, indptr)", src, **given)
    assert_answers(got, np.array([1.0, 0.0, 9.0]))
    got = run("torch_scatter.gather_csr(src, indptr)", src=src[:3], **given)
    assert_answers(got, np.array([1.0, 2.0, 2.0, 2.0]))


@checks("torch.nested.nested_tensor(list)", "nested.unbind()")
def check_nested():
    st = run("torch.nested.nested_tensor(list)", lists=[[1.0, 2.0], [], [3.0]])
    assert run("nested.unbind()", st=st) == [[1.0, 2.0], [], [3.0]]


@checks(
    "DataLoader(TensorDataset(x, y), batch_size)",
    "DataLoader(collate_fn)",
    "DataLoader(drop_last, shuffle, generator)",
    "DistributedSampler(num_replicas, rank)",
    "StatefulDataLoader.state_dict()",
)
def check_loader():
    x, y, lists = np.arange(4.0), np.arange(4), [[7, 9], [8], [], [5]]
    given = {"x": x, "y": y, "lists": lists, "batch_size": 2}
    loader = run("DataLoader(TensorDataset(x, y), batch_size)", **given)
    assert [b.tolist() for _, b in loader] == [[0, 1], [2, 3]]
    loader = run("DataLoader(collate_fn)", **given)
    found = [baskets.to_lists() for baskets, _ in loader]
    assert found == [lists[:2], lists[2:]]
    given = {"dataset": sj.data.ArrayDataset(y), "batch_size": 3}
    (batch,) = run("DataLoader(drop_last, shuffle, generator)", **given)
    assert len(set(batch.tolist())) == 3
    given["batch_size"] = 1
    found = run("DistributedSampler(num_replicas, rank)", **given)
    assert len(list(found)) == 2
    state = run("StatefulDataLoader.state_dict()", **given)
    assert json.loads(json.dumps(state)) == state


@checks("KeyedJaggedTensor.concat(a, b)")
def check_concat():
    parts = _RECORDED.blocks["keyed"](
        ["a", "b"], np.array([1, 2, 3]), np.array([1, 0, 1, 1])
    )
    a, b = ({key: parts[key]} for key in parts)
    found = run("KeyedJaggedTensor.concat(a, b)", a=a, b=b)
    assert {k: st.to_lists() for k, st in found.items()} == {
        "a": [[1], []],
        "b": [[2], [3]],
    }


@checks("apply_optimizer_in_backward(RowWiseAdagrad, ...)")
def check_rowwise_adagrad():
    tx = run("apply_optimizer_in_backward(RowWiseAdagrad, ...)", lr=0.1)
    want = stepped(lambda w, g: w - 0.1 * g / (np.sqrt(np.mean(g**2)) + 1e-8))
    assert_answers(one_step(tx, TABLE, a_grad()), want)


def a_mesh():
    auto = (jax.sharding.AxisType.Auto,)
    return jax.make_mesh((2,), ("x",), auto, devices=jax.devices()[:2])


@checks("ShardingType.ROW_WISE", "ShardingType.COLUMN_WISE")
def check_shards():
    for key in ("ShardingType.ROW_WISE", "ShardingType.COLUMN_WISE"):
        table = run(key, weight=TABLE, mesh=a_mesh())
        assert_answers(jax.jit(sj.lookup)(table, np.array([7, 0])), TABLE[[7, 0]])


@checks("ShardingType.TABLE_WISE")
def check_table_wise():
    given = {"heights": (len(TABLE) - 4, 4), "groups": (1, 0)}
    table = run("ShardingType.TABLE_WISE", weight=TABLE, mesh=a_mesh(), **given)
    values = np.asarray(table.values)
    assert_answers(values[:4], TABLE[-4:])  # the second table, on the first
    assert_answers(jax.jit(sj.lookup)(table, np.array([7, 0])), TABLE[[7, 0]])


@checks("ShardingType.TABLE_ROW_WISE")
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
    plan = run("ShardingType.TABLE_ROW_WISE", mesh=mesh, layer=layer, **given)
    assert plan.tables[0].groups["table-row-wise"].num_groups == 2


@checks("DistributedModelParallel")
def check_a_model():
    table = np.ones((100_000, 32), np.float32)
    given = {
        "params": {"item": table, "w": jnp.ones(32)},
        "batch": jnp.arange(20_480) // 4,
        "loss_fn": lambda params, ids: jnp.sum(params["item"][ids] @ params["w"]),
    }
    found = run("DistributedModelParallel", mesh=a_mesh(), **given)
    assert isinstance(found["item"], sj.parallel.ShardedTable)
    assert_answers(found["item"][jnp.array([7, 0])], table[[7, 0]])
    assert len(found["w"].devices()) == 2


@checks("dist.all_reduce(sparse)")
def check_all_reduce():
    case = named("dist.all_reduce(sparse)")
    given = get(case, "inputs")

    def total(indices, values):
        grad = sj.SelectedRows(indices[0, 0], values[0], 9)
        return run("dist.all_reduce(sparse)", grad=grad)

    spec = jax.sharding.PartitionSpec
    f = jax.shard_map(total, mesh=a_mesh(), in_specs=spec("x"), out_specs=spec())
    got = jax.jit(f)(given["indices"], given["values"])
    assert isinstance(got, sj.SelectedRows)
    assert_answers(got, get(case, "outputs")["0"])


@checks("ShardingType.DATA_PARALLEL", "DistributedDataParallel")
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
        f = run(key, step=step, mesh=a_mesh())
        table = jnp.array(TABLE)
        got, _ = f(table, tx.init(table), jnp.array([7, 2, 7, 0]))
        assert_answers(got, want)


@checks("EmbeddingShardingPlanner().plan", "ParameterConstraints(sharding_types)")
def check_plan():
    given = {
        "weight": np.ones((100_000, 32), np.float32),
        "ids": np.arange(20_480) // 4,
    }
    mesh = jax.sharding.AbstractMesh((4,), ("x",))
    found = run("EmbeddingShardingPlanner().plan", mesh=mesh, **given)
    assert found["tables['item']"].choice == "row-sharded"
    found = run("ParameterConstraints(sharding_types)", mesh=mesh, **given)
    assert found["tables['item']"].choice == "replicated-dense"


@checks("LFU_EvictionPolicy(threshold_filtering_func)")
def check_admission():
    index = run("LFU_EvictionPolicy(threshold_filtering_func)", zch_size=2)
    for step, keys in enumerate(([700, 500], [700, 900], [700, 900])):
        index, rows, _ = index.insert(keys, step)
    assert index.find([500, 700, 900]).tolist() == [2, 0, 1]
    index, _, evicted = index.insert([500, 500], 3)  # for the less frequent one
    assert evicted.tolist() == [1, 2] and index.policy == "lfu"


@checks(
    "SSDTableBatchedEmbeddingBags",
    "SSDTableBatchedEmbeddingBags(kv_zch_params=KVZCHParams())",
)
def check_files(folder):
    for key in CELLS:
        if not key.startswith("SSDTable"):
            continue
        store, path = sj.store.KVStore(), folder / str(len(key))
        run(key, store=store, path=path, lr=1.0)
        rows = np.array([7, 2])
        if "kv_zch" in key:
            rows, _ = store.insert("items", ["ann", "bob"], 0)
            assert store.find("items", ["bob"]) == rows[1]
        store.push("items", sj.SelectedRows(rows, -jnp.ones((2, 2)), 9))
        assert store.pull_all("items")[rows].tolist() == [[1, 1], [1, 1]]
        assert store.stats()["items"].path == str(path)
        store.close()


@checks("MCHManagedCollisionModule(zch_size, LRU_EvictionPolicy())", "reset_inplace")
def check_managed_collisions():
    call = "MCHManagedCollisionModule(zch_size, LRU_EvictionPolicy())"
    index = run(call, zch_size=2)
    for step, keys in enumerate(([700, 500], [700, 700], [900, 900])):
        index, rows, evicted = index.insert(keys, step)
    assert evicted.tolist() == [0, 2]
    assert index.find([500, 700, 900]).tolist() == [2, 1, 0]
    tx, params = sj.optim.lazy(optax.sgd(0.1, momentum=0.9)), jnp.ones((2, 3))
    state = jax.tree.map(jnp.ones_like, tx.init(params))
    given = {"tx": tx, "state": state, "params": params, "rows": evicted}
    params, state = run("reset_inplace", **given)
    assert params[:, 0].tolist() == [0, 1]
    assert jax.tree.leaves(state)[0][:, 0].tolist() == [0, 1]


@checks("ZCH / hash_size")
def check_hash():
    ids = run("ZCH / hash_size").encode(0, [b"a", b"b", b"a"])
    assert ids[0] == ids[2] != ids[1] and ids.max() < 1000


@checks(
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
        cache = run(key, store=store)
        table, step = cache.table, store.train_step(read, sj.optim.lazy(tx), True)
        state = sj.optim.lazy(tx).init(table)
        for ids in ([7, 2], [7, 0], [1, 7]):
            table, state, (_, rows) = step(table, state, jnp.array(ids))
            assert_answers(rows, TABLE[np.array(ids)])
        assert (cache.stats().hits, cache.stats().evictions) == (2, 1)


@checks("TrainPipelineSparseDist", "EmbeddingLocation.MANAGED")
def check_store():
    store = run("EmbeddingLocation.MANAGED")
    store.init("items", TABLE, optax.sgd(1.0))
    batches = [{"ids": np.array([7, 2])}, {"ids": np.array([7, 0])}]
    given = {"store": store, "batches": batches}
    ids = jnp.array([7])
    grad = jax.jit(sj.grad(lambda items: jnp.sum(sj.lookup(items, ids))))
    for _, items in run("TrainPipelineSparseDist", **given):
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


@checks(
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
        tx = run(key, **HYPER, weight_decay=0.1)
        got = one_step(tx, TABLE, a_grad(), steps=2)
        np.testing.assert_allclose(got, second_step(rule), rtol=1e-4, err_msg=key)


@checks("weight_decay_mode=DECOUPLE, with prev_iter")
def check_decay():
    key = "weight_decay_mode=DECOUPLE, with prev_iter"
    tx = run(key, lr=0.1, weight_decay=0.5)
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


@checks("stochastic_rounding=True")
def check_rounding():
    table = jnp.ones((9, 2), jnp.bfloat16)
    grad = sj.SelectedRows([7], jnp.full((1, 2), 1.0), 9)
    tx = run("stochastic_rounding=True", lr=1e-3)
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


@checks(*QUANTIZED)
def check_quantized():
    """The bytes that FBGEMM makes of these rows; their numbers are exact."""
    eight, half, back, bag = QUANTIZED
    weight = np.array([[0, 15, 5, 2], [3, 3, 3, 3]], np.float32)
    fused = np.array([[240, 37, 0, 60, 0, 0], [0, 0, 0, 60, 0, 66]], np.uint8)
    assert_answers(run(half, weight=weight, bit_rate=4), fused)
    assert_answers(run(back, fused=fused, bit_rate=4), weight)
    codes = np.array([[0, 255, 85, 34], [0, 0, 0, 0]])
    assert_answers(run(eight, weight=weight)[:, :4], codes.astype(np.uint8))
    scale = np.asarray(run(eight, weight=weight)[:, 4:8]).copy().view(np.float32)
    assert_answers(scale[:, 0], np.array([15 / 255, 0], np.float32))
    got = run(bag, weight=weight, input=jnp.array([[0, 1], [1, 1]]))
    np.testing.assert_allclose(got, [weight.sum(0), 2 * weight[1]], rtol=2e-3)


@checks("quantize_embeddings(module, torch.qint8)")
def check_quantized_model():
    params = {"item": TABLE, "w": jnp.ones(2)}
    found = run("quantize_embeddings(module, torch.qint8)", params=params)
    assert found["w"] is params["w"] and found["item"].bits == 8
    got = sj.lookup(found["item"], jnp.array([7, 2]))
    np.testing.assert_allclose(got, TABLE[[7, 2]], rtol=1e-2)


@checks("bounds_check_mode=FATAL", "ids out of range, negative ids")
def check_bad_ids():
    refuses("bad id", "IndexError")
    refuses("negative id", "IndexError")
    bad = jnp.array([9, -1])
    assert np.isnan(sj.lookup(TABLE, bad)).all()
    assert not sj.lookup(TABLE, bad, mode="zero").any()
    with pytest.raises(Exception, match="out of range"):
        run("bounds_check_mode=FATAL", weight=TABLE, input=bad)


@checks("torch.save(model.state_dict())")
def check_checkpoint(folder):
    mesh = a_mesh()
    params = {"items": sj.parallel.shard_rows(TABLE, mesh, "x")}
    run("torch.save(model.state_dict())", path=folder / "saved", params=params)
    found = sj.parallel.restore(folder / "saved", params)
    assert_answers(sj.lookup(found["items"], jnp.array([7])), TABLE[[7]])


# ------------------------------------------------------------------ differences


@checks("who says that a gradient is sparse")
def check_who_says():
    for name, sparse in (("sparse=True", True), ("sparse=False", False)):
        assert named(f"nn.Embedding({name})")["sparse"] == ["weight"] * sparse
    table = jnp.zeros((100, 2))
    grad = sj.grad(lambda t: jnp.sum(t[jnp.array([3, 4])]))(table)
    assert isinstance(grad, sj.SelectedRows)


@checks("small tables")
def check_small():
    loss = lambda t: jnp.sum(sj.lookup(t, jnp.array([3, 4])))
    assert isinstance(sj.grad(loss)(jnp.zeros((4, 2))), sj.SelectedRows)
    assert isinstance(sj.grad(loss)(jnp.zeros((3, 2))), jax.Array)


@checks("`padding_idx` of a row that is not zero")
def check_padding():
    case = named("F.embedding(padding_idx), of a row that is not zero")
    given = get(case, "inputs")
    got = sj.lookup(given["weight"], given["input"], padding_id=4)
    want = np.where(given["input"][..., None] == 4, 0, get(case, "outputs")["0"])
    assert_answers(got, want)


@checks("nn.Embedding(max_norm)", "`max_norm`", "gradient under `max_norm`")
def check_max_norm():
    case = named("nn.Embedding(max_norm)")
    given, (out, changed) = get(case, "inputs"), get(case, "outputs").values()
    assert (changed != given["weight"]).any()
    table = run(case["name"], **given, **case["args"])
    assert_answers(table, changed)
    assert_answers(sj.lookup(table, given["input"]), out)
    f = lambda w: sj.lookup(w, given["input"], max_norm=1.0)
    cotangent = get(case, "cotangents")["0"]
    of_theirs = lambda w: jnp.sum(sj.lookup(w, given["input"]) * cotangent)
    of_ours = lambda w: (jnp.sum(f(w) * cotangent), f(w))
    both = lambda table, w: (
        jax.grad(of_theirs)(table), jax.grad(of_ours, has_aux=True)(w)
    )  # fmt: skip
    theirs, (grad, ours) = jax.jit(both)(table, given["weight"])
    assert_answers(ours, out)
    assert_answers(theirs, get(case, "grads")["weight"])
    long = np.linalg.norm(given["weight"], axis=1) > 1
    # A vector that is scaled to a length has no gradient along itself.
    along = np.sum(np.asarray(grad) * given["weight"], axis=1)
    np.testing.assert_allclose(along[long], 0, atol=1e-5)
    theirs = np.sum(get(case, "grads")["weight"] * given["weight"], axis=1)
    assert np.abs(theirs[long]).max() > 0.1


@checks("ties of a maximum in a bag", "gradient of a maximum")
def check_ties():
    case = named("ties of a maximum")
    given, cotangent = get(case, "inputs"), get(case, "cotangents")["0"]
    theirs = get(case, "grads")["weight"][[4, 1]]
    assert_answers(theirs, np.concatenate([cotangent, np.zeros((1, 3))]))

    def loss(weight):
        bags = sj.embedding_bag(weight, given["input"], combiner="max")
        return jnp.sum(bags * cotangent)

    refuses("a sparse gradient of a maximum", "ValueError")
    grad = jax.jit(sj.grad(loss, tables=True))(given["weight"])
    assert isinstance(grad, sj.SelectedRows)
    assert_answers(grad.get(jnp.array([4, 1])), np.tile(cotangent / 2, (2, 1)))


@checks("weights of a mean")
def check_weighted_mean():
    case = named("per_sample_weights of a mean")
    refuses(case["name"], "NotImplementedError")
    weight, ids, w = get(case, "inputs").values()
    bag = jax.jit(functools.partial(sj.embedding_bag, combiner="mean"))
    got = bag(weight, ids, weights=w)
    want = np.einsum("bl,bld->bd", w, weight[ids]) / w.sum(1, keepdims=True)
    np.testing.assert_allclose(got, want, rtol=1e-4)


@checks("`scale_grad_by_freq` with a sparse gradient")
def check_freq():
    refuses("scale_grad_by_freq of a sparse gradient", "RuntimeError")
    given = get(named("nn.Embedding(scale_grad_by_freq)"), "inputs")
    loss = lambda weight: jnp.sum(
        run("nn.Embedding(scale_grad_by_freq)", weight=weight, input=given["input"])
    )
    grad = jax.jit(sj.grad(loss, tables=True))(given["weight"])
    assert isinstance(grad, sj.SelectedRows)
    assert_answers(grad, np.isin(np.arange(9), given["input"])[:, None] * np.ones(3))


@checks("`mode` of an `EmbeddingBag`")
def check_mode():
    weight, ids = jnp.asarray(TABLE), jnp.array([[7, 2]])
    for read in (sj.embedding_bag, sj.nn.EmbeddingBag(9, 2)):
        assert_answers(read(weight, ids), TABLE[[7, 2]].sum(0)[None])


@checks("empty segment of a mean")
def check_empty():
    theirs = get(named("an empty segment, mean"), "outputs")["0"]
    assert np.isnan(theirs[0]).all()
    data = get(named("an empty segment, mean"), "inputs")["data"]
    st = sj.SegmentTensor.from_lengths(data, [0, 6])
    assert not sj.segment_mean(st)[0].any()
    assert_answers(sj.segment_mean(st, empty=np.nan), theirs)


@checks("Adam, RMSprop, AdamW on a sparse gradient")
def check_refused_optimizers():
    refuses("optim.Adam, sparse", "RuntimeError")
    refuses("optim.RMSprop, sparse", "RuntimeError")
    for tx in (optax.adam(0.1), optax.rmsprop(0.1), optax.adamw(0.1)):
        got = dense(one_step(sj.optim.lazy(tx), TABLE, a_grad()))
        assert set(np.flatnonzero((got != TABLE).any(1))) == {2, 7}


@checks("`SparseAdam`")
def check_sparse_adam():
    case = named("optim.SparseAdam")
    w, ids, targets = get(case, "inputs").values()
    grad = sj.SelectedRows(ids[0], targets[0], 9)
    adam = sj.optim.lazy(optax.adam(0.1, b2=0.99, eps=1e-3))
    want = get(case, "outputs")["weights"][0]
    off = np.abs(np.asarray(one_step(adam, w, grad)) - want).max()
    assert 1e-5 < off < 1e-2


@checks("`SGD(momentum)` on a sparse gradient")
def check_momentum():
    weights = get(named("optim.SGD(momentum)"), "outputs")["weights"]
    # Row 8 is read at the first step only, and moves at every step.
    assert (np.diff(weights[:, 8], axis=0) != 0).all()


@checks("weight decay with a sparse gradient")
def check_decay_refused():
    refuses("optim.SGD(weight_decay), sparse", "RuntimeError")
    refuses("optim.Adagrad(weight_decay), sparse", "RuntimeError")
    tx = sj.optim.lazy(optax.adamw(0.1, weight_decay=0.5))
    off = one_step(tx, TABLE, a_grad()) - one_step(
        sj.optim.lazy(optax.adam(0.1)), TABLE, a_grad()
    )
    want = np.zeros_like(TABLE)
    want[[2, 7]] = -0.05 * TABLE[[2, 7]]
    assert_answers(off, want)


@checks("`clip_grad_norm_`, `clip_grad_value_` with a sparse gradient")
def check_clip_refused():
    for name in ("norm_", "value_"):
        refuses(f"clip_grad_{name} of a sparse gradient", "NotImplementedError")
    total = np.linalg.norm(list(MERGED.values()))
    np.testing.assert_allclose(sj.optim.global_norm(a_grad()), total, rtol=1e-6)


@checks("FBGEMM's Adam, LAMB, LARS on a CPU")
def check_fbgemm_on_a_cpu():
    for name in ("ADAM", "PARTIAL_ROWWISE_ADAM", "PARTIAL_ROWWISE_LAMB", "LARS_SGD"):
        refuses(f"EmbOptimType.{name} on a CPU", "AssertionError")


@checks("gradient of `nested.sum(dim=1)`")
def check_nested_sum():
    refuses("gradient of nested.sum(dim=1)", "NotImplementedError")
    st = lambda x: sj.SegmentTensor.from_lengths(x, [2, 1])
    loss = lambda x: (sj.segment_sum(st(x)) ** 2).sum()
    grad = jax.jit(jax.grad(loss))(np.arange(3.0, dtype=np.float32))
    assert grad.tolist() == [2, 2, 4]


@checks("gradient of `torch.softmax(nested, dim=1)`")
def check_nested_softmax():
    case = named(WRONG)
    p, g = get(case, "outputs")["0"], get(case, "cotangents")["0"]
    over_columns = p * (g - np.sum(p * g, axis=1, keepdims=True))
    assert_answers(get(case, "grads")["values"], over_columns)
    values, lengths = get(case, "inputs").values()
    loss = lambda x: jnp.sum(run(WRONG, values=x, lengths=lengths) * g)
    ids = np.repeat(np.arange(3), lengths)
    sums = np.stack([np.sum((p * g)[ids == k], axis=0) for k in range(3)])
    assert_answers(jax.jit(jax.grad(loss))(values), p * (g - sums[ids]))


@checks("optimizer fused into the backward pass")
def check_fused():
    loss = lambda t: jnp.sum(sj.lookup(t, np.array([7])))
    grad = jax.jit(sj.grad(loss, tables=True))(TABLE)
    assert grad.rows.tolist() == [7]


# ------------------------------------------------------------------ brought over


@pytest.mark.usefixtures("loose_promotion")
def test_a_brought_state_goes_on():
    """The next step of the page's state is PyTorch's, by its formula."""
    page = dict(_RECORDED.blocks)
    for block in pages.blocks(_RECORDED.page):
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


def test_every_row_is_checked():
    recorded = {case["name"] for case in [*VALUES.values(), *TRAINING.values()]}
    assert set(_RECORDED.checked) | recorded == {*CELLS, *DIFFERENCES}
    assert not recorded & set(_RECORDED.checked)


@pytest.mark.usefixtures("loose_promotion")
@pytest.mark.usefixtures("eight_devices")
@pytest.mark.parametrize(
    "check", dict.fromkeys(_RECORDED.checked.values()), ids=lambda f: f.__name__
)
def test_by_hand(check, tmp_path):
    check(tmp_path) if check.__code__.co_argcount else check()
