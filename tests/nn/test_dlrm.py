"""A DLRM of 26 tables trains through EmbeddingCollection."""

import dataclasses

import chex
import jax
import numpy as np
import optax
import pytest

import sparsejax as sj
from helpers import assert_no_dense


pytest.importorskip("benchmarks")  # a source distribution has none

from benchmarks.models import dlrm as sizes  # noqa: E402
from tests import dlrm_model as dlrm  # noqa: E402


pytestmark = pytest.mark.usefixtures("loose_promotion")  # optax's
# As skewed as the real sizes: from 2 rows to as many as all the rest have.
ROWS = (2, *sizes.table_rows(1500))[:26]
MODEL = dlrm.Model(ROWS, 16, bottom=(8,), top=(16,))


@pytest.mark.slow
def test_trains_with_one_compilation():
    assert len(ROWS) == 26
    (stack,) = MODEL.layers["tables"].table_prefix()
    clicks, tx = dlrm.Clicks(ROWS, 192), sj.optim.lazy(optax.adagrad(0.3))
    step = chex.assert_max_traces(dlrm.make_step(MODEL, sj.value_and_grad, tx), 1)
    params = MODEL.init(jax.random.key(0))
    height = params["tables"][stack].shape[0]
    assert height == sum(ROWS)
    state = params, tx.init(params)

    # One gather of the stack, a sparse gradient in spite of the table of 2 rows, and
    # nothing as high as the stack but the stack.
    batch = dlrm.Clicks(ROWS, 24)()
    grad = sj.grad(lambda p, batch: dlrm.loss_fn(MODEL, p, batch))
    spec = jax.eval_shape(grad, params, batch)["tables"][stack]
    assert isinstance(spec, sj.SelectedRows) and spec.capacity == 26 * 24
    assert_no_dense(grad, params, batch, heights=[height])

    run = jax.jit(step, donate_argnums=0)
    state, losses, rate = dlrm.train(run, state, clicks, 300)
    assert run._cache_size() == 1  # pyright: ignore[reportAttributeAccessIssue]
    assert np.mean(losses[-50:]) < dlrm.entropy(rate) - 0.01


@pytest.mark.slow
def test_all_sides_take_the_same_step():
    tx, rows = optax.sgd(0.1), ROWS[:5]
    model = dlrm.Model(rows, 4, bottom=(8,), top=(16,))
    batch, params = dlrm.Clicks(rows, 16)(), model.init(jax.random.key(0))
    collection = model.layers["tables"]
    apart = dataclasses.replace(model, stacked=False)
    tables = collection.unstack(params["tables"])

    def step(model, value_and_grad, tx, params):
        run = jax.jit(dlrm.make_step(model, value_and_grad, tx))
        (params, _), loss = run((params, tx.init(params)), batch)
        return params, loss

    lazy = sj.optim.lazy(tx)
    ours, loss = step(model, sj.value_and_grad, lazy, params)
    dense, dense_loss = step(model, jax.value_and_grad, tx, params)
    other, other_loss = step(
        apart, sj.value_and_grad, lazy, {**params, "tables": tables}
    )
    np.testing.assert_allclose([loss, other_loss], dense_loss, rtol=1e-6)
    other["tables"] = collection.stack(other["tables"])
    for tree in (ours, other):
        for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(dense)):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
