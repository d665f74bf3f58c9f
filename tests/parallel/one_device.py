"""Meshes of a few devices, and what a step over them must equal: dense JAX on one."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import sparsejax as sj


def mesh_of(shape=(4,), names=("x",), kind=AxisType.Auto):
    """A mesh of the first devices."""
    shape = (shape,) if isinstance(shape, int) else shape
    devices = jax.devices()[: int(np.prod(shape))]
    return jax.make_mesh(shape, names, devices=devices, axis_types=(kind,) * len(names))


def place(mesh, x, *parts):
    """`x` over the mesh, sharded as `P(*parts)`."""
    return jax.device_put(x, NamedSharding(mesh, P(*parts)))


def table_of(height, *row, seed=0, dtype=np.float32):
    """A table of normal numbers."""
    return np.random.default_rng(seed).normal(size=(height, *row)).astype(dtype)


def step_of(loss_fn, tx, value_and_grad=sj.value_and_grad):
    """A training step as users write it, not jitted."""

    def step(params, state, *batch):
        loss, grads = value_and_grad(loss_fn)(params, *batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    return step


def dense_step_of(loss_fn, tx, height):
    """The step of optax on arrays, jitted; rows that `ids` do not name are put back."""
    step = step_of(loss_fn, tx, jax.value_and_grad)

    def put_back(params, state, ids, *batch):
        new_params, new_state, loss = step(params, state, ids, *batch)
        read = jnp.any(ids.reshape(-1) == np.arange(height)[:, None], axis=1)

        def keep(old, new):
            if new.shape[:1] != (height,):
                return new
            return jnp.where(read.reshape(-1, *(1,) * (new.ndim - 1)), new, old)

        kept = jax.tree.map(keep, (params, state), (new_params, new_state))
        return *kept, loss

    return jax.jit(put_back)


def run(step, params, state, batches) -> Any:
    """The parameters and the state after all batches, and the losses."""
    losses = []
    for batch in batches:
        params, state, loss = step(params, state, *batch)
        losses.append(loss)
    return params, state, np.array(losses, np.float32)


def assert_close(found, expected, **options):
    """Trees of arrays that are equal to float32's rounding, after several sums."""
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    jax.tree.map(functools.partial(close, **options), found, expected)


def assert_at_owners(rows, table):
    """A merged gradient has each row once, at its owner, ascending there."""
    assert isinstance(rows, sj.parallel.ShardedRows) and rows.is_merged
    for owner, part in enumerate(np.split(np.asarray(rows.rows), table.num_shards)):
        part = part[part < rows.height]
        assert (np.diff(part) > 0).all()
        assert (part // table.rows_per_shard == owner).all()


def assert_in_place(text, table):
    """A compiled step writes to its parts of a table, and makes no array of its size.

    Args:
      text: the compiled program.
      table: a sharded table, abstract or not.
    """
    rows, row = table.rows_per_shard, "".join(f",{n}" for n in table.shape[1:])
    made = set(re.findall(rf"= f32\[{rows}{row}\]\S* (\w[\w-]*)\(", text))
    in_place = {"scatter", "fusion", "dynamic-update-slice"}
    assert made <= {"parameter", "get-tuple-element"} | in_place, made
    # No device sees an array of all rows.
    for height in (table.height, rows * table.num_shards):
        assert f"[{height}," not in text
