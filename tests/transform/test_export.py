"""A training step, exported for every platform, and run without the model's code."""

# optax's types know trees of arrays only.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportIndexIssue=false
# pyright: reportUnusedExpression=false

import os
import pathlib
import textwrap
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import export

import sparsejax as sj
from helpers import assert_same_bits, run_python


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
    leaves = jax.tree.leaves((*out[:3], out[3].rows, out[3].values))
    np.savez(sys.argv[3], **{str(k): x for k, x in enumerate(leaves)})
"""


@pytest.mark.usefixtures("loose_promotion")
@pytest.mark.slow
def test_exported_step_runs_elsewhere(getkey, tmp_path):
    """In a process without the model's code, bit for bit.

    A program for several platforms chooses among their lowerings by a branch, which XLA
    takes away only after it has simplified what is around it. Effects of that
    order, such as a division that becomes a product, would show in the last bit.
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
    jax.tree.map(assert_same_bits, same, here)
    run_python("-c", textwrap.dedent(RUN), *names, cwd=tmp_path, env=_environment())
    with np.load(names[2]) as there:
        for k, leaf in enumerate(jax.tree.leaves(here)):
            assert_same_bits(there[str(k)], leaf)


def _environment():
    """This process's, with sparsejax but without the tests on the path."""
    root = pathlib.Path(sj.__file__).parent.parent
    return {**os.environ, "PYTHONPATH": str(root)}


def test_types_survive_serialization(getkey):
    """Structures with their static fields: heights, sortedness, nesting."""
    nested = sj.SegmentTensor.from_lists([[[10, 11], [101]], [[11]]])
    rows = sj.SelectedRows(jnp.array([3]), jnp.ones((1, 2)), height=2**20)
    unsorted = sj.SegmentTensor(jnp.arange(3), jnp.array([1, 0, 1]), 2)
    sampler = sj.losses.NegativeSampler.from_counts([1, 2])
    drawn = sampler.sample(getkey(), 2)
    tree = {"a": nested, "b": [rows, unsorted], "c": (sampler, drawn)}
    fun = jax.jit(lambda tree: (tree["b"], tree["a"], tree["c"]))
    again = export.deserialize(export.export(fun)(tree).serialize())
    out: Any = again.call(tree)
    assert jax.tree.structure(out) == jax.tree.structure(fun(tree))
    assert out[0][0].height == 2**20 and not out[0][1].is_sorted
    assert out[1].to_lists() == [[[10, 11], [101]], [[11]]]


@pytest.mark.usefixtures("loose_promotion")
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


EXPORTED = {
    "index": lambda t, ids: t[ids] ** 2,
    "take": lambda t, ids: jnp.take(t, ids, axis=0) ** 2,
    "view": lambda t, ids: (2.0 * t)[ids + 1] ** 2,
    "vmap": lambda t, ids: jax.vmap(lambda i: t[i])(ids) ** 2,
    "bag": lambda t, ids: sj.embedding_bag(t, jnp.stack([ids, ids], 1)) ** 2,
    "bags": lambda t, ids: sj.embedding_bag(t, ids, ids % 2, 2) ** 2,
    "scan": lambda t, ids: jax.lax.scan(lambda c, i: (c, t[i] ** 2), 0.0, ids)[1],
    "checkpoint": lambda t, ids: jax.checkpoint(lambda t: t[ids] ** 2)(t),
    "cond": lambda t, ids: jax.lax.cond(
        ids[0] > 3, lambda: jnp.sum(t[ids] ** 2), lambda: jnp.sum(t[:2]) + t[ids[0], 0]
    ),
}


@pytest.mark.parametrize("name", EXPORTED)
def test_exported_for_any_batch(name):
    """The size of the batch is a symbol, and with it the capacity of the gradient."""
    loss = lambda t, ids: jnp.sum(EXPORTED[name](t, ids))
    table = jnp.arange(80.0).reshape(40, 2)
    (b,) = export.symbolic_shape("b")
    specs = (
        jax.ShapeDtypeStruct(table.shape, table.dtype),
        jax.ShapeDtypeStruct((b,), jnp.int32),
    )
    ids = jnp.array([5, 1, 5], jnp.int32)
    required = {} if name == "cond" else {"tables": True}
    exported = export.export(jax.jit(sj.grad(loss, **required)))(*specs)
    g = exported.call(table, ids)
    if required:
        assert g.capacity == ids.size * (2 if name == "bag" else 1)
        g = g.to_dense()
    np.testing.assert_allclose(g, jax.grad(loss)(table, ids))


def test_a_symbolic_batch_may_be_too_large_to_be_sparse():
    loss = lambda t, ids: jnp.sum(t[ids])
    table = jax.ShapeDtypeStruct((40, 2), jnp.float32)
    reasons = []
    for bounds in ([], ["b <= 20"], ["b >= 21"]):
        (b,) = export.symbolic_shape("b", constraints=bounds)
        ids = jax.ShapeDtypeStruct((b,), jnp.int32)
        reasons.append(sj.explain(loss)(table, ids)["t"].reason)
    unknown, few, many = reasons
    assert "may be more than half" in unknown and "tables=" in unknown
    assert not few and "where dense is cheaper" in many
