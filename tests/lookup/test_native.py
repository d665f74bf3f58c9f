"""The kernels of sparsejax-native: they compute what plain XLA computes.

Most tests need the package, which `make test-native` builds. That command also runs
tests of bags, rows and optimizers with the kernels switched on.
"""

# optax's types know trees of arrays only.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

import functools
import importlib.util
import sys
import threading
import types
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import export
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from jax.test_util import check_grads

import sparsejax as sj
from helpers import (
    assert_in_place,
    assert_same_bits,
    assert_trees_close,
    count_traces,
    dense_rows,
    run_python,
)
from sparsejax import _native
from sparsejax._lookup.read_rows import read_rows


pytestmark = pytest.mark.window

needs_kernels = pytest.mark.skipif(
    importlib.util.find_spec("sparsejax_native") is None,
    reason="needs sparsejax-native: make test-native",
)
FLOATS = ("float32", "bfloat16", "float16", "float64")
ROW_SHAPES = ((16,), (17,), (64,), (100,), (130,), (4, 5))
HEIGHT = 997
MANY = 20_000  # rows of 256 bytes that are enough for several threads


@pytest.fixture
def kernels(monkeypatch):
    """Switches the kernels on; what it returns runs a function with them, and without.

    Each compiles a program of its own and looks whether the kernel is in it.
    """
    if importlib.util.find_spec("sparsejax_native") is None:
        pytest.skip("needs sparsejax-native: make test-native")
    if jax.default_backend() != "cpu":
        pytest.skip("the kernels are for a CPU")
    monkeypatch.setenv("SPARSEJAX_NATIVE", "1")
    assert _native.enabled()

    def both(f, *args, kernel):
        results = []
        for switch in "10":
            monkeypatch.setenv("SPARSEJAX_NATIVE", switch)
            lowered = jax.jit(lambda *args: f(*args)).lower(*args)
            assert (f"sparsejax_{kernel}" in lowered.as_text()) == (switch == "1")
            results.append(lowered.compile()(*args))
        monkeypatch.setenv("SPARSEJAX_NATIVE", "1")
        return results

    return both


def _table(dtype, row_shape=(64,), height=HEIGHT, seed=0):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.standard_normal((height, *row_shape)), dtype)


def _ids(*shape, seed=0, dtype="int32"):
    """Also out of range, and more than once."""
    rng = np.random.default_rng(seed)
    ids = np.where(rng.random(shape) < 0.3, 7, rng.integers(-3, HEIGHT + 3, shape))
    return jnp.asarray(ids, dtype)


def _wide(dtype):
    return jnp.float64 if dtype == "float64" else jnp.float32


def _weights(*shape, dtype="float32"):
    return jnp.asarray(np.random.default_rng(1).standard_normal(shape), _wide(dtype))


# ------------------------------------------------------------------ what they compute


@pytest.mark.quick(6)
@pytest.mark.window(4)
@pytest.mark.parametrize("shape", [(7, 16), (300, 5), (1, 3000), (2000, 1)])
@pytest.mark.parametrize("row_shape", ROW_SHAPES, ids=str)
@pytest.mark.parametrize("dtype", FLOATS)
def test_fixed_bags(dtype, row_shape, shape, kernels, x64):
    table, ids = _table(dtype, row_shape), _ids(*shape)
    for weights in (None, _weights(*shape, dtype=dtype)):
        bags = lambda table, ids, *weights: sj.embedding_bag(
            table, ids, weights=weights[0] if weights else None, mode="zero"
        )
        args = (table, ids) if weights is None else (table, ids, weights)
        ours, plain = kernels(bags, *args, kernel="sum_bags")
        # Sums of up to 3,000 rows, many of them alike, are rounded at each addition;
        # then once to the table's type.
        rtol = {"float64": 1e-12, "float32": 1e-4, "float16": 1e-3}.get(dtype, 1e-2)
        atol = 1e-12 if dtype == "float64" else 1e-3
        assert_trees_close(ours, plain, rtol=rtol, atol=atol)
        w = np.ones(shape) if weights is None else np.asarray(weights)
        rows = dense_rows(np.asarray(table, np.float64), ids)
        dense = np.einsum("bl,bl...->b...", w, rows)
        np.testing.assert_allclose(
            np.asarray(ours, np.float64), dense, rtol=rtol, atol=atol
        )


@pytest.mark.quick(6)
@pytest.mark.window(4)
@pytest.mark.parametrize("ascending", [True, False])
@pytest.mark.parametrize("count, bags", [(10, 4), (5000, 300), (3000, 5000), (9000, 3)])
@pytest.mark.parametrize("row_shape", [(17,), (64,), (130,)], ids=str)
@pytest.mark.parametrize("dtype", FLOATS)
def test_ragged_bags(dtype, row_shape, count, bags, ascending, kernels, x64):
    rng = np.random.default_rng(2)
    table, ids, weights = _table(dtype, row_shape), _ids(count), _weights(count)
    weights = weights.astype(_wide(dtype))
    segments = rng.integers(-2, bags + 2, count)  # some elements are in no bag
    segments = jnp.asarray(np.sort(segments) if ascending else segments, jnp.int32)
    for more in ((), (weights,)):
        f = lambda table, ids, segments, *weights: sj.embedding_bag(
            table,
            ids,
            segments,
            bags,
            weights=weights[0] if weights else None,
            mode="zero",
            indices_are_sorted=ascending,
        )
        ours, plain = kernels(f, table, ids, segments, *more, kernel="sum_bags")
        assert_trees_close(ours, plain, atol=1e-3 if dtype != "float64" else 1e-12)


@pytest.mark.parametrize("ragged", [True, False])
def test_long_bags_are_exact(ragged, kernels):
    """One after the other, a million positive numbers lose three digits more."""
    table = jnp.asarray(np.random.default_rng(0).random((HEIGHT, 16)), jnp.float32)
    ids = jnp.arange(1_000_000, dtype=jnp.int32) % HEIGHT
    if ragged:
        bags = lambda table, ids: sj.embedding_bag(
            table, ids, jnp.zeros_like(ids), 1, indices_are_sorted=True
        )
    else:
        bags = lambda table, ids: sj.embedding_bag(table, ids[None])
    lowered = jax.jit(bags).lower(table, ids)
    assert "sparsejax_sum_bags" in lowered.as_text()
    exact = np.asarray(table, np.float64)[np.asarray(ids)].sum(axis=0)
    found = np.asarray(lowered.compile()(table, ids))[0]
    np.testing.assert_allclose(found, exact, rtol=2e-5)


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("width", [64, 80, 100, 256])
def test_bags_of_codes(bits, width, kernels):
    table = sj.quantize(_table("float32", (width,)), bits=bits)
    ids, weights = _ids(300, 5), _weights(300, 5)
    bags = lambda table, ids, weights: sj.embedding_bag(
        table, ids, weights=weights, mode="zero"
    )
    ours, plain = kernels(bags, table, ids, weights, kernel="sum_bags")
    assert_trees_close(ours, plain, atol=1e-4)
    rows = dense_rows(np.asarray(table.dequantize(), np.float64), ids)
    dense = np.einsum("bl,bld->bd", np.asarray(weights), rows)
    np.testing.assert_allclose(np.asarray(ours), dense, rtol=1e-4, atol=1e-4)
    segments = jnp.sort(jax.random.randint(jax.random.key(3), (1500,), -2, 202))
    bags = lambda table, ids: sj.embedding_bag(
        table, ids, segments, 200, mode="zero", indices_are_sorted=True
    )
    ours, plain = kernels(bags, table, ids.reshape(-1), kernel="sum_bags")
    assert_trees_close(ours, plain, atol=1e-3)


@pytest.mark.parametrize("id_dtype", ["int32", "int64"])
@pytest.mark.parametrize("row_shape", [*ROW_SHAPES, (3,), (5, 1)], ids=str)
@pytest.mark.parametrize("dtype", FLOATS)
def test_rows_read_have_the_same_bits(dtype, row_shape, id_dtype, kernels, x64):
    ids = _ids(2000, dtype=id_dtype)
    ours, plain = kernels(read_rows, _table(dtype, row_shape), ids, kernel="read_rows")
    assert_same_bits(ours, plain)


@pytest.mark.parametrize("id_dtype", ["int32", "int64"])
@pytest.mark.parametrize("row_shape", [(64,), (100,), (130,), (8, 9)], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_rows_added_have_the_same_bits(dtype, row_shape, id_dtype, kernels, x64):
    table, values = _table(dtype, row_shape), _table(dtype, row_shape, MANY, seed=4)
    add = lambda table, ids, values: table + sj.SelectedRows(ids, values, HEIGHT)
    ids = _ids(MANY, dtype=id_dtype)
    ours, plain = kernels(add, table, ids, values, kernel="add_rows")
    assert_same_bits(ours, plain)
    dense = np.array(table, np.float64)
    keep = (np.asarray(ids) >= 0) & (np.asarray(ids) < HEIGHT)
    np.add.at(dense, np.asarray(ids)[keep], np.asarray(values, np.float64)[keep])
    rtol, atol = (1e-12, 1e-11) if dtype == "float64" else (1e-4, 1e-3)
    np.testing.assert_allclose(np.asarray(ours), dense, rtol=rtol, atol=atol)


def test_other_tables_stay_plain(kernels):
    """Of integers, narrow, few or no rows, and sums that are rounded once."""
    ids, ones = _ids(MANY), lambda *shape: jnp.ones(shape)
    programs = [
        lambda: read_rows(ones(9, 1), ids),
        lambda: sj.embedding_bag(ones(9, 15), ids.reshape(-1, 5), mode="zero"),
        lambda: ones(9, 60) + sj.SelectedRows(ids, ones(MANY, 60), 9),
        lambda: ones(9, 64) + sj.SelectedRows(ids[:9000], ones(9000, 64), 9),
        lambda: read_rows(jnp.ones((9, 2), jnp.int32), _ids(3)),
        lambda: read_rows(jnp.ones((9, 0)), _ids(3)),
        lambda: read_rows(jnp.ones((9, 2)), _ids(0)),
        lambda: sj.embedding_bag(jnp.ones((9, 2)), _ids(0, 4)),
        lambda: sj.embedding_bag(jnp.ones((9, 2)), _ids(4, 0)),
        lambda: sj.embedding_bag(jnp.ones((0, 2)), _ids(4, 3), mode="zero"),
        lambda: sj.embedding_bag(jnp.ones((9, 2)), _ids(4), _ids(4), 0, mode="zero"),
        lambda: jnp.ones((9, 2)) + sj.SelectedRows(_ids(0), jnp.ones((0, 2)), 9),
        lambda: (
            jnp.ones((9, 128), jnp.bfloat16)
            + sj.SelectedRows(ids, jnp.ones((MANY, 128), jnp.bfloat16), 9)
        ),
    ]
    for program in programs:
        lowered = jax.jit(program).lower()
        assert "sparsejax_" not in lowered.as_text()
        lowered.compile()()


@pytest.mark.parametrize("count", [1, 70, 9_000])
@pytest.mark.parametrize("key_bits", [32, 64])
def test_keys_found_have_the_same_rows(key_bits, count, kernels):
    """Of an index that is full and evicts, also unknown keys and the largest one."""
    rng = np.random.default_rng(3)
    index = sj.HashIndex.create(1000, key_bits=key_bits, max_evictions=40)
    insert = jax.jit(sj.HashIndex.insert)
    as_keys = lambda keys: (
        jnp.asarray(keys, jnp.int32) if key_bits == 32 else index.split_keys(keys << 33)
    )
    for step in range(8):
        keys = as_keys(rng.integers(-900, 900, 400))
        index, _, _ = insert(index, keys, step)
    assert index.num_evicted
    keys = as_keys(rng.integers(-1000, 1000, (count, 1)))
    find = lambda index, keys: index.find(keys)
    ours, plain = kernels(find, index, keys, kernel="find_rows")
    assert_same_bits(ours, plain)
    held, rows = index.items()
    dense = dict(zip(held.tolist(), rows.tolist()))
    wanted = keys if key_bits == 32 else index.join_keys(keys)
    wanted = [dense.get(key, 1000) for key in np.asarray(wanted).ravel().tolist()]
    assert count == 1 or 0 < wanted.count(1000) < count
    np.testing.assert_array_equal(np.asarray(ours).ravel(), wanted)


@pytest.mark.parametrize("key_bits", [32, 64])
def test_an_index_that_grows_is_the_same(key_bits, kernels):
    """`insert` finds keys before it writes to the index in place, and after."""
    rng = np.random.default_rng(4)
    insert = lambda index, keys, step: index.insert(keys, step)
    index = sj.HashIndex.create(500, key_bits=key_bits, max_evictions=100)
    for step in range(4):
        keys = rng.integers(0, 2**31, 300) % 900 - 400
        if key_bits == 64:
            keys = index.split_keys(keys)
        args = index, jnp.asarray(keys), step
        ours, plain = kernels(insert, *args, kernel="find_rows")
        jax.tree.map(assert_same_bits, ours, plain)
        donated = jax.jit(insert, donate_argnums=0)(*jax.tree.map(jnp.copy, args))
        jax.tree.map(assert_same_bits, donated, plain)
        index = plain[0]
    assert index.num_evicted


# ------------------------------------------------------------------ transformations


def test_derivatives(kernels, x64):
    table, weights = _table("float64", (16,)), _weights(20, 4, dtype="float64")
    ids = jnp.clip(_ids(20, 4), 0, HEIGHT - 1)
    bags = jax.jit(lambda table, w: sj.embedding_bag(table, ids, weights=w))
    assert "sparsejax_sum_bags" in bags.lower(table, weights).as_text()
    check_grads(bags, (table, weights), order=2, modes=("fwd", "rev"), rtol=1e-6)


@pytest.mark.parametrize("axes", [(None, 0), (0, None), (0, 0)])
def test_vmap(axes, kernels):
    table = jnp.stack([_table("float32", seed=k) for k in range(3)])
    ids = jnp.stack([_ids(50, 4, seed=k) for k in range(3)])
    args = [x if axis == 0 else x[0] for x, axis in zip((table, ids), axes)]
    one = lambda table, ids: sj.embedding_bag(table, ids, mode="zero")
    found = jax.jit(jax.vmap(one, in_axes=axes))(*args)
    pairs = [
        [x[k] if axis == 0 else x for x, axis in zip(args, axes)] for k in range(3)
    ]
    expected = jnp.stack([jnp.asarray(jax.jit(one)(*pair)) for pair in pairs])
    assert_trees_close(found, expected, atol=1e-5)
    add = lambda table, ids: (
        table + sj.SelectedRows(jnp.tile(ids[:, 0], 400), jnp.ones((MANY, 64)), HEIGHT)
    )
    assert "sparsejax_add_rows" in jax.jit(add).lower(table[0], ids[0]).as_text()
    found = jax.jit(jax.vmap(add, in_axes=axes))(*args)
    expected = jnp.stack([jax.jit(add)(*pair) for pair in pairs])
    assert_trees_close(found, expected)


OPTIMIZERS = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "adagrad": optax.adagrad(0.1),
    "adam": optax.adam(1e-2),
}


def _loss(params, ids):
    each = params["table"][ids]
    bags = sj.embedding_bag(params["table"], ids, combiner="mean")
    return jnp.mean((jnp.sum(each, axis=1) + bags) @ params["w"]) ** 2


@pytest.mark.loose_promotion  # optax's
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_equals_dense_optax(name, kernels):
    """In a scan, where each batch has every row: so lazy moments are those of optax."""
    rng = np.random.default_rng(0)
    height = 16_400
    batches = jnp.asarray([rng.permutation(height).reshape(-1, 4) for _ in range(3)])
    params = {"table": _table("float32", (64,), height), "w": _weights(64) / 64}

    def train(tx, value_and_grad):
        def step(carry, ids):
            params, state = carry
            loss, grads = value_and_grad(_loss)(params, ids)
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), loss

        return jax.jit(
            lambda params: jax.lax.scan(step, (params, tx.init(params)), batches)
        )

    everything = functools.partial(sj.value_and_grad, tables={"table": True, "w": None})
    sparse = train(sj.optim.lazy(OPTIMIZERS[name]), everything)
    text = sparse.lower(params).as_text()
    assert "sparsejax_sum_bags" in text
    assert ("sparsejax_add_rows" in text) == (name == "sgd")
    dense = train(OPTIMIZERS[name], jax.value_and_grad)
    (found, _), losses = sparse(params)
    (expected, _), dense_losses = dense(params)
    assert_trees_close((found, losses), (expected, dense_losses), rtol=1e-4, atol=1e-5)


def test_a_table_is_updated_in_place(kernels):
    tx = sj.optim.lazy(optax.sgd(0.1))

    def step(table, state, ids):
        _, grads = sj.value_and_grad(lambda t: jnp.sum(t[ids] ** 2))(table)
        updates, state = tx.update(grads, state, table)
        return optax.apply_updates(table, updates), state

    table = jnp.ones((200_003, 64))
    state = tx.init(table)
    ids = jnp.arange(MANY, dtype=jnp.int32)
    text = jax.jit(step).lower(table, state, ids).as_text()
    assert "sparsejax_add_rows" in text
    assert_in_place(step, table, state, ids)
    traced = count_traces(step)
    compiled = jax.jit(traced, donate_argnums=0)
    where = table.unsafe_buffer_pointer()
    for k in range(4):
        table, state = compiled(table, state, ids * (k + 1) - 3)
        assert table.unsafe_buffer_pointer() == where
    assert traced.count == 1


def test_a_table_that_is_kept_is_not_written(kernels):
    table, ids = _table("float32"), _ids(MANY)
    before = np.array(table)
    add = jax.jit(lambda t, ids: t + sj.SelectedRows(ids, jnp.ones((MANY, 64)), HEIGHT))
    assert "sparsejax_add_rows" in add.lower(table, ids).as_text()
    add(table, ids)
    assert_same_bits(table, before)
    both = jax.jit(lambda t, ids: (add(t, ids), t[0] + 1.0), donate_argnums=0)
    _, row = both(table, ids)
    assert_same_bits(row, before[0] + 1)


# ------------------------------------------------------------------ where they run


def test_an_exported_program_has_no_kernel(kernels):
    """It is run by others, who may not have it."""
    f = jax.jit(lambda table, ids: sj.embedding_bag(table, ids, mode="zero"))
    args = _table("float32"), _ids(50, 4)
    assert "sparsejax_" in f.lower(*args).as_text()
    exported = export.export(f)(*args)
    assert "sparsejax_" not in exported.mlir_module()
    assert_trees_close(exported.call(*args), f(*args), atol=1e-5)


@pytest.mark.multidevice
def test_programs_of_several_devices_have_no_kernel(kernels):
    """XLA would give each device the whole table for it."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    table = jax.device_put(_table("float32", (64,), 1000), NamedSharding(mesh, P("x")))
    ids = jnp.asarray(_ids(MANY)).reshape(-1, 2)
    ids = jax.device_put(ids, NamedSharding(mesh, P()))

    def f(table, ids):
        rows = sj.SelectedRows(ids.reshape(-1), jnp.ones((MANY, 64)), 1000)
        return sj.embedding_bag(table, ids, mode="zero"), table + rows

    lowered = jax.jit(f).lower(table, ids)
    assert "sparsejax_" not in lowered.as_text()
    one = jax.jit(f).lower(*jax.device_get((table, ids)))
    assert (
        "sparsejax_sum_bags" in one.as_text() and "sparsejax_add_rows" in one.as_text()
    )
    alone = one.compile()(*jax.device_get((table, ids)))
    assert_trees_close(lowered.compile()(table, ids), alone, atol=1e-4)


def test_many_programs_share_the_threads(kernels):
    """More programs at once than XLA has threads: no one waits for a thread."""
    table, ids = _table("float32"), _ids(4000, 16)
    f = jax.jit(lambda table, ids: sj.embedding_bag(table, ids, mode="zero"))
    expected = np.asarray(f(table, ids))
    found = [[] for _ in range(40)]

    def run(mine):
        for _ in range(10):
            mine.append(np.array_equal(np.asarray(f(table, ids)), expected))

    threads = [threading.Thread(target=run, args=(x,), daemon=True) for x in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
        assert not thread.is_alive(), "a program waits for ever"
    assert all(len(x) == 10 and all(x) for x in found)


_DIGEST = """
import hashlib
import jax, jax.numpy as jnp, numpy as np, sparsejax as sj
rng = np.random.default_rng(0)
table = jnp.asarray(rng.standard_normal((5000, 72)), jnp.float32)
ids = jnp.asarray(np.minimum(rng.zipf(1.2, 40_000), 4999), jnp.int32)
values = jnp.asarray(rng.standard_normal((40_000, 72)), jnp.float32)
bags = jnp.asarray(np.sort(rng.integers(0, 900, 40_000)), jnp.int32)

@jax.jit
def f(table, ids, values):
    return (
        table + sj.SelectedRows(ids, values, 5000),
        sj.embedding_bag(table, ids, bags, 900, indices_are_sorted=True),
    )

assert "sparsejax_add_rows" in f.lower(table, ids, values).as_text()
found = [np.asarray(x).tobytes() for _ in range(3) for x in f(table, ids, values)]
print(hashlib.sha256(b"".join(found)).hexdigest())
"""


def test_the_number_of_threads_changes_no_bit(kernels, monkeypatch):
    found = set()
    for threads in "1", "2", "7":
        monkeypatch.setenv("NPROC", threads)  # the size of XLA's pool
        found.add(run_python("-c", _DIGEST))
    assert len(found) == 1


_SERIALIZED = """
import functools, pathlib, pickle, sys
import jax, jax.numpy as jnp, numpy as np
from jax.experimental.serialize_executable import deserialize_and_load, serialize
import sparsejax as sj
path = pathlib.Path(sys.argv[1])
args = jnp.ones((9, 16)), jnp.zeros((4, 2), jnp.int32)
if not path.exists():
    lowered = jax.jit(sj.embedding_bag).lower(*args)
    assert "sparsejax_sum_bags" in lowered.as_text()
    path.write_bytes(pickle.dumps(serialize(lowered.compile())))
else:
    load = functools.partial(deserialize_and_load, execution_devices=jax.devices()[:1])
    print(load(*pickle.loads(path.read_bytes()))(*args).sum())
"""


def test_an_executable_of_another_process_finds_the_kernels(
    kernels, monkeypatch, tmp_path
):
    # What JAX reads from its cache it cannot serialize again.
    monkeypatch.setenv("JAX_ENABLE_COMPILATION_CACHE", "false")
    run = lambda: run_python("-c", _SERIALIZED, tmp_path / "executable")
    run()
    assert float(run()) == 4 * 2 * 16


# ------------------------------------------------------------------ the switch


@pytest.fixture
def unregistered():
    """As if no kernel had been looked for."""
    _native._register.cache_clear()
    yield
    _native._register.cache_clear()


def test_nothing_is_registered_without_the_package(unregistered, monkeypatch):
    monkeypatch.setenv("SPARSEJAX_NATIVE", "1")
    monkeypatch.setitem(sys.modules, "sparsejax_native", None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # None in sys.modules is an ImportError with the module's name.
        assert not _native.enabled()
    bags = jax.jit(lambda t, ids: sj.embedding_bag(t, ids, mode="zero"))
    assert "sparsejax_" not in bags.lower(_table("float32"), _ids(9, 4)).as_text()


def test_kernels_of_another_release_are_not_used(unregistered, monkeypatch):
    monkeypatch.setenv("SPARSEJAX_NATIVE", "1")
    other = types.SimpleNamespace(INTERFACE=_native._INTERFACE + 1)
    monkeypatch.setitem(sys.modules, "sparsejax_native", other)
    found = f"interface {other.INTERFACE}, and this release of sparsejax"
    with pytest.warns(UserWarning, match=found):
        assert not _native.enabled()
    with warnings.catch_warnings():  # once
        warnings.simplefilter("error")
        assert not _native.enabled()
    _native._register.cache_clear()
    empty = types.ModuleType("sparsejax_native")  # an empty folder of that name
    monkeypatch.setitem(sys.modules, "sparsejax_native", empty)
    with pytest.warns(UserWarning, match="interface None"):
        assert not _native.enabled()


def test_a_package_that_cannot_be_loaded_is_named(unregistered, monkeypatch, tmp_path):
    monkeypatch.setenv("SPARSEJAX_NATIVE", "1")
    package = tmp_path / "sparsejax_native"
    package.mkdir()
    (package / "__init__.py").write_text("import sparsejax_native._kernels")
    (package / "_kernels.abi3.so").write_bytes(b"not a library")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("sparsejax_native", "sparsejax_native._kernels"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.warns(UserWarning, match="its import failed .*Install it anew"):
        assert not _native.enabled()
    sys.modules.pop("sparsejax_native", None)


@needs_kernels
def test_the_switch(monkeypatch):
    bags = lambda: jax.jit(lambda t, ids: sj.embedding_bag(t, ids, mode="zero"))
    args = _table("float32"), _ids(9, 4)
    for value, is_on in (("0", False), ("1", True)):
        monkeypatch.setenv("SPARSEJAX_NATIVE", value)
        assert _native.enabled() == is_on
        assert ("sparsejax_" in bags().lower(*args).as_text()) == is_on
    monkeypatch.delenv("SPARSEJAX_NATIVE")
    assert _native.enabled()
