"""A training step, exported for every platform, run where the model's code is not."""

import os
import pathlib
import subprocess
import sys
import textwrap
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import export

import sparsejax as sj
from helpers import assert_same_bits


pytestmark = pytest.mark.window


TX = sj.optim.lazy(
    optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.partition(
            {
                "table": optax.chain(
                    sj.optim.ftrl(0.1, l1=1e-3), optax.scale_by_schedule(lambda _: 0.5)
                ),
                "dense": optax.inject_hyperparams(optax.adam)(1e-2),
            },
            {"table": "table", "w": "dense"},
        ),
    )
)


def step(params, state, baskets, y):
    def loss(params):
        pooled = sj.embedding_bag(params["table"], baskets, combiner="mean")
        return jnp.mean((pooled @ params["w"] - y) ** 2)

    value, grads = sj.value_and_grad(loss)(params)
    updates, state = TX.update(grads, state, params)
    return optax.apply_updates(params, updates), state, value, grads["table"]


def arguments(getkey):
    params = {"table": jax.random.normal(getkey(), (1000, 64)), "w": jnp.ones(64)}
    baskets = sj.SegmentTensor.from_lists([[1, 2], [3], [4, 5, 6]], capacity=8)
    return params, TX.init(params), baskets, jnp.arange(3.0)


RUN = """
    import sys
    import jax, numpy as np
    from jax import export
    import sparsejax

    exported = export.deserialize(open(sys.argv[1], "rb").read())
    leaves = np.load(sys.argv[2])
    args, kwargs = jax.tree.unflatten(
        exported.in_tree, [leaves[str(k)] for k in range(len(leaves))]
    )
    out = jax.jit(exported.call, donate_argnums=(0, 1))(*jax.device_put(args))
    assert isinstance(out[3], sparsejax.SelectedRows) and out[3].height == 1000
    np.savez(sys.argv[3], **{str(k): x for k, x in enumerate(jax.tree.leaves(out))})
"""


@pytest.mark.loose_promotion
@pytest.mark.slow
def test_exported_step_runs_elsewhere(getkey, tmp_path):
    """In a process without the model's code, bit for bit.

    A program for several platforms chooses among their lowerings by a branch, which XLA
    takes away only after it has simplified what is around it. What depends on that
    order, as whether a division becomes a product, would show in the last bit.
    """
    args = arguments(getkey)
    jitted = jax.jit(step, donate_argnums=(0, 1))
    exported = export.export(jitted, platforms=("cpu", "cuda", "tpu"))(*args)
    assert exported.platforms == ("cpu", "cuda", "tpu")

    names = [tmp_path / name for name in ("step", "in.npz", "out.npz")]
    names[0].write_bytes(exported.serialize())
    np.savez(names[1], **{str(k): x for k, x in enumerate(jax.tree.leaves(args))})
    one = export.deserialize(export.export(jax.jit(step))(*args).serialize())
    same = one.call(*args)
    here = jitted(*args)
    jax.tree.map(np.testing.assert_array_equal, same, here)
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(RUN), *map(str, names)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tmp_path,
        env=_environment(),
    )
    assert run.returncode == 0, run.stderr
    with np.load(names[2]) as there:
        for k, leaf in enumerate(jax.tree.leaves(here)):
            assert_same_bits(there[str(k)], leaf)


def _environment():
    """This process's, with sparsejax but without the tests on the path."""
    root = pathlib.Path(sj.__file__).parent.parent
    return {**os.environ, "PYTHONPATH": str(root)}


def test_types_survive_serialization(getkey):
    """Structures with what they hold beside arrays: heights, sortedness, nesting."""
    nested = sj.SegmentTensor.from_lists([[[10, 11], [101]], [[11]]])
    rows = sj.SelectedRows(jnp.array([3]), jnp.ones((1, 2)), height=2**20)
    unsorted = sj.SegmentTensor(jnp.arange(3), jnp.array([1, 0, 1]), 2)
    tree = {"a": nested, "b": [rows, unsorted]}
    fun = jax.jit(lambda tree: (tree["b"], tree["a"]))
    again = export.deserialize(export.export(fun)(tree).serialize())
    out: Any = again.call(tree)
    assert jax.tree.structure(out) == jax.tree.structure(fun(tree))
    assert out[0][0].height == 2**20 and not out[0][1].is_sorted
    assert out[1].to_lists() == [[[10, 11], [101]], [[11]]]


@pytest.mark.loose_promotion
def test_states_of_all_optimizers_survive_serialization():
    optim, sgd = sj.optim, optax.sgd(0.1, momentum=0.9)
    states = [
        tx.init(jnp.ones((4, 2)))
        for tx in (
            optim.lazy(optax.adam(0.1)),
            optim.ftrl(0.1),
            optim.adagrad(0.1),
            optim.rowwise_adagrad(0.1),
            optim.rowwise_adam(0.1),
            optim.row_count_adam(0.1),
            optim.weight_decay(0.1),
            optim.accumulate(optim.lazy(sgd), 2, 3),
            optim.rounding(optim.lazy(sgd), master=True),
            optim.dynamic_loss_scale(optim.lazy(sgd)),
            optim.exact(sgd),
        )
    ]
    exported = export.export(jax.jit(lambda x: x))(states)
    again = export.deserialize(exported.serialize())
    assert again.in_tree == jax.tree.structure(((states,), {}))
