"""Compiles a step for a described NVIDIA GPU, and prints facts about it as JSON.

    python tests/tools/cuda_program.py OPTIMIZER
    python tests/tools/cuda_program.py tables | coalesce | unique | bags

tests/lookup/test_lowerings.py runs this if `jax[cuda12]` or `jax[cuda13]` is
installed. No GPU and no driver is needed: nothing is run.
"""

import glob
import json
import os
import re
import sys
import tempfile


# An H200.
DEVICE = """
gpu_device_info {
  threads_per_block_limit: 1024  threads_per_warp: 32
  shared_memory_per_block: 49152  shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448
  threads_per_core_limit: 2048  core_count: 132  fpus_per_core: 128
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000  l2_cache_size: 52428800
  device_memory_size: 151397597184  clock_rate_ghz: 1.98
  cuda_compute_capability { major: 9 minor: 0 }
  registers_per_core_limit: 65536  registers_per_block_limit: 65536
}
runtime_version { major: 12 minor: 8 }
dnn_version_info { major: 9 minor: 10 }
platform_name: "CUDA"
device_description_str: "H200"
"""
V, D, N = 1_000_000, 64, 65_536
# Instructions of a scheduled program that launch nothing.
FREE = "parameter constant bitcast get-tuple-element tuple after-all".split()


def main(name: str) -> None:
    folder = tempfile.mkdtemp()
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = (
        f"--xla_dump_to={folder} --xla_dump_emitter_re=.* "
        "--xla_dump_hlo_module_re=.*cuda_step.*"
    )
    import jax
    import jax.numpy as jnp
    import optax
    from jax.experimental import topologies

    import sparsejax as sj

    described = topologies.get_topology_desc(
        "h200", "cuda", target_config=DEVICE, topology="1x1x1"
    )
    place = jax.sharding.SingleDeviceSharding(described.devices[0])
    spec = lambda shape, dtype=jnp.float32: jax.ShapeDtypeStruct(shape, dtype)

    def loss_fn(params, ids, target):
        return jnp.mean((params["table"][ids] @ params["weights"] - target) ** 2)

    def of_tables(params, ids, target):
        rows = [table[i] for table, i in zip(params, ids)]
        return jnp.mean((jnp.sum(sum(rows), axis=1) - target) ** 2)

    def coalesce(rows, values):
        merged = sj.SelectedRows(rows, values, V).coalesce()
        return merged.rows, merged.values

    def unique(ids):
        return sj.unique(ids, N)

    def bags(table, ids):
        loss = lambda table: jnp.sum(sj.embedding_bag(table, ids) ** 2)
        return jax.grad(loss)(table)  # JAX's own, of all rows

    def step(params, state, *batch):
        loss, grads = sj.value_and_grad(of_step)(params, *batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    ids, donated, of_step = spec((N,), jnp.int32), (), loss_fn
    if name == "coalesce":
        fun, args = coalesce, (ids, spec((N, D)))
    elif name == "unique":
        fun, args = unique, (ids,)
    elif name == "bags":
        fun, args = bags, (spec((V, D)), spec((N // 16, 16), jnp.int32))
    elif name == "tables":  # ten small gradients, whose merges share their kernels
        tx, of_step = sj.optim.lazy(optax.adagrad(1e-3)), of_tables
        params = [spec((V, D))] * 10
        state = jax.eval_shape(tx.init, params)
        n = N // 16
        ids = spec((10, n), jnp.int32)
        fun, donated, args = step, (0, 1), (params, state, ids, spec((n,)))
    else:
        tx = sj.optim.lazy(getattr(optax, name)(1e-3))
        params = {"table": spec((V, D)), "weights": spec((D,))}
        state = jax.eval_shape(tx.init, params)
        fun, donated, args = step, (0, 1), (params, state, ids, spec((N,)))
    args = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), args
    )
    fun.__name__ = "cuda_step"  # as the files are called that are kept
    compiled = jax.jit(fun, donate_argnums=donated).lower(*args).compile()
    text = compiled.as_text() or ""
    entry = text[text.index("\nENTRY ") :]
    launches = [
        op
        for op in re.findall(r"^ +(?:ROOT )?%\S+ = .*? ([a-z][a-z-]*)\(", entry, re.M)
        if op not in FREE
    ]
    ptx = [open(file).read() for file in glob.glob(f"{folder}/*.ptx")]
    memory = compiled.memory_analysis()
    assert memory is not None
    tables = sum(x.shape == (V, D) for x in jax.tree.leaves([args[k] for k in donated]))
    facts = {
        "kernels": sum(len(re.findall(r"\.entry", x)) for x in ptx),
        "compare_and_swap": sum(len(re.findall(r"\.cas\.b\d+", x)) for x in ptx),
        "float_atomics": sum(
            len(re.findall(r"\b(?:atom|red)[\w.]*(?:\.add\.\S*b?f\d|b?f\d+\.add)", x))
            for x in ptx
        ),
        "loops": text.count(" while("),
        "launches": len(launches),
        "tables_aliased": memory.alias_size_in_bytes / (4 * V * D) >= tables,
        "table_copies": len(re.findall(rf"= f32\[{V},{D}\]\S* copy\(", text)),
    }
    print(json.dumps(facts))


if __name__ == "__main__":
    main(sys.argv[1])
