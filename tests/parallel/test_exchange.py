"""The cost of a step over devices, read off the compiled program: wire, memory."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import export
from jax.sharding import NamedSharding, PartitionSpec as P

import sparsejax as sj
from one_device import assert_in_place, mesh_of, step_of


# Optax's Adam needs loose promotion.
pytestmark = pytest.mark.usefixtures("eight_devices", "loose_promotion")

HEIGHT, DIM, BATCH = 100_003, 32, 20_480


def _zipf(seed):
    weights = 1 / np.arange(1, HEIGHT + 1)
    rng = np.random.default_rng(seed)
    return rng.choice(HEIGHT, BATCH, p=weights / weights.sum())


def _loss(params, ids):
    rows = sj.lookup(params["table"], ids)
    return jnp.mean(jnp.sum(rows * params["w"], axis=1) ** 2)


def _step_and_arguments(tx, shards, slots=None, batch=BATCH):
    mesh = mesh_of(shards)
    abstract = lambda shape, dtype, *parts: jax.ShapeDtypeStruct(
        shape, dtype, sharding=NamedSharding(mesh, P(*parts))
    )
    spec = jax.ShapeDtypeStruct((HEIGHT, DIM), jnp.float32)
    table = sj.parallel.shard_rows(spec, mesh, "x")
    if slots == "measured":
        slots = sj.parallel.measure_capacity(table, [_zipf(0), _zipf(1)])
    table = sj.parallel.shard_rows(spec, mesh, "x", capacity=slots)
    params = {"table": table, "w": abstract((DIM,), jnp.float32)}
    state = jax.tree.map(
        lambda x: abstract(x.shape, x.dtype, *(("x",) if x.ndim == 2 else ())),
        jax.eval_shape(tx.init, params),
    )
    step = jax.jit(step_of(_loss, tx), donate_argnums=(0, 1))
    args = params, state, abstract((batch,), jnp.int32, "x")
    return table, step, args


def _lowered(tx, shards, *options):
    table, step, args = _step_and_arguments(tx, shards, *options)
    return table, step.lower(*args)


@pytest.fixture(scope="module")
def compiled():
    if jax.device_count() < 8:
        pytest.skip("needs 8 devices")
    tx = sj.optim.lazy(optax.adam(1e-3))
    found = {}
    for shards in (2, 4, 8):
        table, lowered = _lowered(tx, shards, "measured")
        found[shards] = table, lowered.compile()
    return found


def test_in_place(compiled):
    for shards in (2, 4):  # of which a part has more rows than the batch
        table, program = compiled[shards]
        rows = table.rows_per_shard
        memory: Any = program.memory_analysis()
        # Weights and both moments are handed over, not copied ...
        assert memory.alias_size_in_bytes >= 3 * 4 * rows * DIM
        # ... and nothing else has the shape of a part.
        assert_in_place(program.as_text(), table)


def test_shrinks_as_devices_are_added(compiled):
    owned = [table.rows_per_shard for table, _ in compiled.values()]
    assert owned == [50_002, 25_001, 12_501]
    memory: list[Any] = [program.memory_analysis() for _, program in compiled.values()]
    held = [m.argument_size_in_bytes for m in memory]
    made = [m.temp_size_in_bytes for m in memory]
    assert held[0] > 1.9 * held[1] > 3.6 * held[2]
    # The ids' duplicates are fewer in smaller parts of a batch.
    assert made[0] > 1.7 * made[1] > 3 * made[2]


def test_owners_hold_what_a_round_carries():
    """Not all rows that could arrive, from however many devices."""

    def temporaries(shards, batch):
        tx = sj.optim.lazy(optax.adagrad(0.1))
        memory: Any = _lowered(tx, shards, None, batch)[1].compile().memory_analysis()
        return memory.temp_size_in_bytes

    two, eight = (temporaries(shards, BATCH) for shards in (2, 8))
    assert two > 3.6 * eight
    as_many_ids = temporaries(2, BATCH // 4)
    assert eight < 1.1 * as_many_ids
    # A device reads, merges, sends and receives arrays with a row for each id.
    assert eight < 7 * 4 * DIM * BATCH // 8


@pytest.mark.window
def test_lowers_for_other_platforms():
    tx = sj.optim.lazy(optax.adagrad(0.1))
    table, step, args = _step_and_arguments(tx, 4, 500)
    exported = export.export(step, platforms=("cpu", "cuda", "tpu"))(*args)
    assert exported.platforms == ("cpu", "cuda", "tpu")
    assert exported.nr_devices == table.num_shards == 4
    assert "all_to_all" in exported.mlir_module()


@pytest.mark.parametrize(
    "name, shards, batch, exchanges",
    [
        # Ids and rows to read them, ids and rows of the gradient.
        ("adam", 2, 64, 4),
        # A norm first, and few rows: they are held.
        ("clip, adam", 4, 16, 4),
        # A norm first, and many rows: sent for the norm, and sent to be applied.
        ("clip, adam", 2, 64, 6),
    ],
)
def test_how_often_rows_are_sent(name, shards, batch, exchanges):
    tx = sj.optim.lazy(
        optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.1))
        if name == "clip, adam"
        else optax.adam(0.1)
    )
    text = str(_lowered(tx, shards, 1, batch)[1].as_text())
    assert text.count("stablehlo.all_to_all") == exchanges
