"""Makes the figures of docs/explain/exchange.md; test_exchange_page.py compares them.

    python tests/docs/exchange_page.py wire              the table of bytes on the wire
    python tests/docs/exchange_page.py devices 64 512    compile for so many CPU devices
    python tests/docs/exchange_page.py tpu v5p:8x8x16 8  compile for a TPU, 8 tables
    python tests/docs/exchange_page.py tpu v5e:2x2 1 32  the same, rows of 32 columns
    python tests/docs/exchange_page.py h200 1x1x8 1      compile for eight H200

Nothing but `wire` makes an array, and nothing is run. Those for a TPU need libtpu
(`pip install "jax[tpu]"`), and that for H200 `jax[cuda12]`, but no such device.
"""

import dataclasses
import functools
import os
import pathlib
import sys
import time


if __name__ == "__main__":  # before JAX is imported
    counts = [8, *map(int, sys.argv[2:])] if sys.argv[1] == "devices" else [8]
    flags = f"--xla_force_host_platform_device_count={max(counts)}"
    os.environ["XLA_FLAGS"] = f"{flags} --xla_backend_optimization_level=0"
    os.environ["JAX_PLATFORMS"] = "cpu"
    tests = pathlib.Path(__file__).parent.parent
    sys.path[:0] = [str(tests.parent), str(tests / "tools")]

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec as P

import cuda_program
import sparsejax as sj


PAGE = pathlib.Path(__file__).parents[2] / "docs" / "explain" / "exchange.md"
PLANNED = pathlib.Path(__file__).parent / "trillion.md"

# The case of the first table: N devices, n ids on each.
N, V, D, n = 4, 100_000, 32, 5_120
# The paper plan: tables of 10^12 parameters over 1,024 devices.
PLAN = {"devices": 1024, "tables": 8, "rows": 976_562_500, "width": 128, "ids": 4096}
PLAN_CAPACITY = 18  # of uniform ids; `measured_capacity` below


def make_mesh(count):
    """A mesh of the first devices."""
    devices = jax.devices()[:count]
    return jax.make_mesh((count,), ("x",), axis_types=(AxisType.Auto,), devices=devices)


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


SHARDED = "row-sharded", "row-sharded, bfloat16", "row-sharded by XLA"
LAYOUTS = *SHARDED, "column-sharded", "replicated, sparse", "replicated, dense"


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
    return sj.viz.wire_bytes(compiled, branch=min)


# ------------------------------------------------------------------ the plan


def plan_step(mesh, tables, rows, width, ids):
    """A jitted step and its arguments in the abstract, for any mesh."""
    spec = lambda shape, kind, *parts: jax.ShapeDtypeStruct(
        shape, kind, sharding=NamedSharding(mesh, P(*parts))
    )
    table = jax.ShapeDtypeStruct((rows, width), np.float32)
    shard = functools.partial(sj.parallel.shard_rows, capacity=PLAN_CAPACITY)
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


def lower(mesh, platform, tables=1, rows=PLAN["rows"], ids=PLAN["ids"]):
    """The StableHLO of the plan over an abstract mesh."""
    step, args = plan_step(mesh, tables, rows, PLAN["width"], ids)
    return step.trace(*args).lower(lowering_platforms=(platform,)).as_text()


def compile_for(mesh, tables, width=PLAN["width"]):
    """Compiles the plan; returns the bytes that a device holds and sends."""
    # A mesh of fewer devices holds fewer rows: as many on each.
    rows = PLAN["rows"] // PLAN["devices"] * mesh.size
    step, args = plan_step(mesh, tables, rows, width, PLAN["ids"])
    begin = time.perf_counter()
    compiled = step.lower(*args).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    return {
        "devices": mesh.size,
        "compile_s": time.perf_counter() - begin,
        "tables": memory.argument_size_in_bytes,
        "in_place": memory.alias_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
        "sent": sj.viz.wire_bytes(compiled).total,
    }


def measured_capacity(devices, ids):
    """The largest number of ids that one device requests from another."""
    rng, most = np.random.default_rng(0), 0
    for _ in range(devices):
        owners = rng.integers(0, devices, ids)
        most = max(most, int(np.bincount(owners).max()))
    return most


# ------------------------------------------------------------------ command line


def main(what, *args):
    """Prints one kind of figures."""
    if what == "wire":
        print(measured())
        for layout in LAYOUTS:
            print(f"{layout:20} {sent(layout).total:12,}")
    elif what == "devices":
        for count in map(int, args):
            print(compile_for(make_mesh(count), 1))
    else:
        from jax.experimental import topologies

        h200 = {"target_config": cuda_program.DEVICE, "topology": args[0]}
        place = ("h200", "cuda") if what == "h200" else (args[0], "tpu")
        more = h200 if what == "h200" else {}
        topology = topologies.get_topology_desc(*place, **more)
        mesh = jax.sharding.Mesh(np.array(topology.devices), ("x",))
        print(topology.devices[0].device_kind, compile_for(mesh, *map(int, args[1:])))


if __name__ == "__main__":
    main(*sys.argv[1:])
