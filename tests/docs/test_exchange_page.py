"""docs/explain/exchange.md: its formulas hold, its programs compile.

    python tests/docs/test_exchange_page.py tpu v5p:8x8x16 8   for a TPU, 8 tables
    python tests/docs/test_exchange_page.py tpu v5e:2x2 1 32   rows of 32 columns
    python tests/docs/test_exchange_page.py h200 1x1x8 1       for eight H200

These compile the plan of trillion.md, and run nothing. Those for a TPU need libtpu
(`pip install "jax[tpu]"`), and that for H200 `jax[cuda12]`, but no such device.
"""

import dataclasses
import functools
import math
import os
import pathlib
import sys
import time


if __name__ == "__main__":  # before JAX is imported
    os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0"
    os.environ["JAX_PLATFORMS"] = "cpu"
    tests = pathlib.Path(__file__).parent.parent
    sys.path[:0] = [str(tests.parent), str(tests), str(tests / "tools")]

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec as P

import cuda_program
import sparsejax as sj
from sparsejax import _compat


pytestmark = [pytest.mark.usefixtures("eight_devices"), pytest.mark.slow]

_HERE = pathlib.Path(__file__).parent
PAGE = _HERE.parents[1] / "docs" / "explain" / "exchange.md"
TEXT = PAGE.read_text() + (_HERE / "trillion.md").read_text()

# The case of the first table: N devices, n ids on each.
N, V, D, n = 4, 100_000, 32, 5_120
# The paper plan: tables of 10^12 parameters over 1,024 devices.
DEVICES, TABLES, ROWS, WIDTH, IDS = 1024, 8, 976_562_500, 128, 4096
CAPACITY = 18  # of uniform ids; `measured_capacity` below


def make_mesh(count):
    """A mesh of the first devices."""
    devices = jax.devices()[:count]
    return jax.make_mesh((count,), ("x",), axis_types=(AxisType.Auto,), devices=devices)


def cells(first):
    """The rows of the table whose header starts with `first`, below its rule."""
    table = TEXT[TEXT.index(f"\n| {first} |") + 1 :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in table]


def number(cell):
    return int(cell.replace(",", ""))


# ------------------------------------------------------------------ the layouts


def sample():
    """Zipf ids of all devices' batches."""
    rng = np.random.default_rng(0)
    return (rng.zipf(1.2, N * n) % V).astype(np.int32)


@functools.cache
def measured():
    """C, the capacity, and U, the distinct ids of a device, of the sample."""
    ids, mesh = sample(), AbstractMesh((N,), ("x",))
    table = sj.parallel.shard_rows(jax.ShapeDtypeStruct((V, D), np.float32), mesh, "x")
    distinct = max(len(np.unique(part)) for part in ids.reshape(N, n))
    return {"C": sj.parallel.measure_capacity(table, ids), "U": distinct}


def sent(layout):
    """The bytes that a device sends in a step, read from the compiled program."""
    mesh = make_mesh(N)
    table: Any = np.zeros((V, D), np.float32)
    put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))
    ids, lookup, tx = put(sample(), "x"), sj.lookup, sj.optim.lazy(optax.adagrad(0.1))
    grad, reduce = functools.partial(sj.grad, tables=True), lambda g: g
    if layout in ("row-sharded", "row-sharded, bfloat16"):
        table = sj.parallel.shard_rows(table, mesh, "x", capacity=measured()["C"])
        if layout == "row-sharded, bfloat16":
            table = dataclasses.replace(table, wire_dtype=jnp.bfloat16)
    elif layout == "row-sharded by XLA":
        table = put(table, "x")
    elif layout == "column-sharded":
        table, ids = sj.parallel.shard_columns(table, mesh, "x"), put(sample())
    else:
        table = put(table)
        reduce = lambda g: sj.parallel.pmean(g, "x", capacity=measured()["U"])
        if layout == "replicated, dense":
            grad, tx, reduce = jax.grad, optax.adagrad(0.1), lambda g: g

    def loss(table, ids):
        rows = jax.lax.with_sharding_constraint(
            lookup(table, ids, mode="zero"), NamedSharding(mesh, P("x"))
        )
        return jnp.mean(jnp.linalg.norm(rows, axis=1))  # of whole rows

    def step(table, state, ids):
        updates, state = tx.update(reduce(grad(loss)(table, ids)), state, table)
        return optax.apply_updates(table, updates), state

    run = sj.parallel.data_parallel(step, mesh, "x")
    compiled = run.lower(table, tx.init(table), ids).compile()
    return sj.viz.wire_bytes(compiled, branch=min).total


@pytest.mark.usefixtures("loose_promotion")  # dense optax
@pytest.mark.parametrize("row", cells("layout"), ids=lambda row: row[0])
def test_bytes_on_the_wire(row):
    layout, formula, told = row
    names = {"N": N, "V": V, "n": n, "d": 4 * D, **measured()}
    for name in "UCn":
        assert f"{name} = {names[name]:,}" in TEXT
    assert number(told) == sent(layout)
    # A loss and the agreement about rounds are a few bytes more.
    assert eval(formula, names) == pytest.approx(number(told), rel=1e-4)


# ------------------------------------------------------------------ the paper plan


def plan_step(mesh, tables=1, rows=ROWS, width=WIDTH, ids=IDS):
    """A jitted step and its arguments in the abstract, for any mesh."""
    spec = lambda shape, kind, *parts: jax.ShapeDtypeStruct(
        shape, kind, sharding=NamedSharding(mesh, P(*parts))
    )
    table = jax.ShapeDtypeStruct((rows, width), np.float32)
    shard = functools.partial(sj.parallel.shard_rows, capacity=CAPACITY)
    params = {
        "tables": [shard(table, mesh, "x") for _ in range(tables)],
        "dense": spec((width,), np.float32),
    }
    tx = sj.optim.lazy(sj.optim.rowwise_adagrad(0.01))
    stored = params["tables"][0].values.shape[0]

    def lay_out(x):  # state of a table's rows lies with them
        return spec(x.shape, x.dtype, *(["x"] if x.shape[:1] == (stored,) else []))

    def loss(params, ids, targets):
        look_up = functools.partial(sj.lookup, mode="zero")
        read = sum(map(look_up, params["tables"], ids))
        return jnp.mean((read @ params["dense"] - targets) ** 2)

    def step(params, state, ids, targets):
        value, grads = sj.value_and_grad(loss)(params, ids, targets)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    state = jax.tree.map(lay_out, jax.eval_shape(tx.init, params))
    batch = [spec((mesh.size * ids,), np.int32, "x")] * tables
    targets = spec((mesh.size * ids,), np.float32, "x")
    step = jax.jit(step, donate_argnums=(0, 1))
    return step, (params, state, batch, targets)


def lowered(platform, **sizes):
    """The StableHLO of the plan over an abstract mesh."""
    mesh = AbstractMesh((DEVICES,), ("x",), axis_types=(AxisType.Auto,))
    step, args = plan_step(mesh, **sizes)
    return step.trace(*args).lower(lowering_platforms=(platform,)).as_text()


def compile_for(mesh, tables, width=WIDTH):
    """Compiles the plan; returns the bytes that a device holds and sends."""
    # A mesh of fewer devices holds fewer rows: as many on each.
    step, args = plan_step(mesh, tables, ROWS // DEVICES * mesh.size, width)
    begin = time.perf_counter()
    compiled = step.lower(*args).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    return {
        "compile_s": time.perf_counter() - begin,
        "arguments": memory.argument_size_in_bytes,
        "in_place": memory.alias_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
        "sent": sj.viz.wire_bytes(compiled).total,
    }


def measured_capacity(ids):
    """The largest number of ids that one device requests from another."""
    rng, most = np.random.default_rng(0), 0
    for _ in range(DEVICES):
        most = max(most, int(np.bincount(rng.integers(0, DEVICES, ids)).max()))
    return most


def test_the_plan_adds_up():
    assert TABLES * ROWS * WIDTH == 10**12
    names = {"N": DEVICES, "T": TABLES, "R": math.ceil(ROWS / DEVICES), "n": IDS}
    names |= {"d": 4 * WIDTH, "C": CAPACITY}
    assert f"R = {names['R']:,}" in TEXT
    for what, formula, told in cells("of each device"):
        assert eval(formula, names) == number(told), what
    counted = [measured_capacity(ids) for ids in (1024, IDS, TABLES * IDS)]
    assert counted == [9, CAPACITY, 62]


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_the_plan_is_lowered_for_an_abstract_mesh(platform):
    text = lowered(platform)
    assert f"num_partitions = {DEVICES}" in text
    assert text.count("all_to_all") == 4


def test_more_than_2_to_31_rows_need_64_bit_ids():
    with pytest.raises(ValueError, match="needs 64-bit ids. Set jax_enable_x64"):
        lowered("tpu", rows=7_812_500_000, ids=32_768)
    with _compat.enable_x64(True):
        assert "all_to_all" in lowered("tpu", rows=7_812_500_000, ids=32_768)


def test_the_plan_is_compiled_for_eight_devices():
    told = next(row for row in cells("compiled for") if row[:2] == ["CPU", "8"])
    _, _, tables, arguments, temporaries, sent, _ = map(str, told)
    found = compile_for(make_mesh(8), int(tables))
    assert found["arguments"] == number(arguments)
    assert found["sent"] == number(sent)
    assert found["temporaries"] == pytest.approx(number(temporaries), rel=0.05)
    # All but the batch is aliased: ids and targets of 4 bytes.
    assert found["arguments"] - found["in_place"] == 2 * 4 * IDS


# ------------------------------------------------------------------ command line


def main(what, *args):
    """Prints the figures of one compilation."""
    from jax.experimental import topologies

    h200 = {"target_config": cuda_program.DEVICE, "topology": args[0]}
    place = ("h200", "cuda") if what == "h200" else (args[0], "tpu")
    more = h200 if what == "h200" else {}
    topology = topologies.get_topology_desc(*place, **more)
    mesh = jax.sharding.Mesh(np.array(topology.devices), ("x",))
    print(topology.devices[0].device_kind, compile_for(mesh, *map(int, args[1:])))


if __name__ == "__main__":
    main(*sys.argv[1:])
