"""Refusals of lazy at update, and their messages."""

# optax's types know trees of arrays only.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportIndexIssue=false, reportOperatorIssue=false

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsejax as sj
from helpers import with_ids_as
from optimizers import LR
from sparsejax.optim import lazy


pytestmark = pytest.mark.usefixtures("loose_promotion")

V, D = 23, 5
ADAM = lazy(optax.adam(LR))
EXACT = sj.optim.exact(optax.sgd(LR, momentum=0.9))  # one, so that it is read once
PARAMS = {"bias": jnp.zeros(D), "emb": {"table": jnp.ones((V, D))}}


def _grads(rows=None):
    if rows is None:
        rows = sj.SelectedRows(jnp.array([1, 2]), jnp.ones((2, D)), V)
    return {"bias": jnp.ones(D), "emb": {"table": rows}}


@pytest.mark.parametrize(
    "not_one", [jnp.sin, lambda x: x, optax.linear_schedule(0, 1, 2)]
)
def test_functions_are_not_transformations(not_one):
    with pytest.raises(TypeError, match="tx must be an optax transformation.*sparsify"):
        lazy(not_one)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda tx: tx,
        lambda tx: optax.chain(optax.clip_by_global_norm(1.0), tx),
        lambda tx: optax.partition({"t": tx, "d": optax.sgd(LR)}, lambda p: "t"),
        lambda tx: optax.masked(tx, True),
        lambda tx: optax.named_chain(("clip", optax.clip(1.0)), ("exact", tx)),
        lambda tx: optax.with_extra_args_support(tx),
        lambda tx: optax.chain(optax.masked(optax.chain(tx, optax.clip(1.0)), True)),
    ],
)
def test_exact_is_not_lifted(wrap):
    """It would train on, but wrongly: nothing would catch rows up."""
    tx = wrap(EXACT)
    with pytest.raises(ValueError, match="lazy: .*sparsejax.optim.exact: .*caught up"):
        lazy(tx).init(PARAMS)
    assert not sj.optim.is_row_separable(tx)
    assert not sj.optim.is_row_separable(tx, PARAMS)


@pytest.mark.parametrize(
    "change",
    [
        functools.partial(with_ids_as, np.float32),
        functools.partial(with_ids_as, jnp.bfloat16),
        lambda g: jax.tree.map(lambda x: optax.MaskedNode(), g),
    ],
)
def test_changed_ids(change):
    """By code that rebuilds trees; `jax.tree.map` cannot (rows/test_row_ids.py)."""
    changed = _grads(change(_grads()["emb"]["table"]))
    message = r"grads\['emb'\]\['table'\].*ids too.*SelectedRows.map.*inside lazy"
    for update in (ADAM.update, jax.jit(ADAM.update)):
        with pytest.raises(TypeError, match=message):
            update(changed, ADAM.init(PARAMS), PARAMS)


@pytest.mark.parametrize(
    "rows",
    [
        sj.SelectedRows(jnp.array([1]), jnp.ones((1, D)), V + 1),
        sj.SelectedRows(jnp.array([1]), jnp.ones((1, D + 1)), V),
        sj.SelectedRows(jnp.array([1]), jnp.ones((1, D, 1)), V),
    ],
)
def test_other_shapes(rows):
    message = r"grads\['emb'\]\['table'\] must have the shape .* \(23, 5\), got"
    with pytest.raises(ValueError, match=message):
        ADAM.update(_grads(rows), ADAM.init(PARAMS), PARAMS)


def test_gradients_of_another_tree():
    with pytest.raises(ValueError, match="the same tree structure"):
        ADAM.update(_grads(), ADAM.init(PARAMS), PARAMS["emb"])


def test_pulled_tables():
    rows = _grads()["emb"]["table"]
    with pytest.raises(
        TypeError, match=r"params\['emb'\]\['table'\] must be an array, got a Selec"
    ):
        ADAM.init(_grads(rows))
    with pytest.raises(TypeError, match=r"params\['emb'\]\['table'\].*Pass its .val"):
        ADAM.update(_grads(rows), ADAM.init(PARAMS), _grads(rows))
    # The way that the message names.
    params = rows.values
    updates, _ = ADAM.update(rows.values, ADAM.init(params), params)
    assert updates.shape == params.shape


LABELS = {"kernel": "dense", "table": "sparse"}


@pytest.mark.slow
def test_a_leaf_that_cannot_be_lifted():
    transforms = {"sparse": optax.adam(LR), "dense": optax.lamb(LR)}
    tx = lazy(optax.partition(transforms, LABELS))
    params = {"kernel": jnp.ones((9, 4)), "table": jnp.ones((V, D))}
    state = tx.init(params)
    rows = lambda p: sj.SelectedRows(jnp.array([1]), jnp.ones((1, p.shape[1])), len(p))
    good = {"kernel": jnp.ones((9, 4)), "table": rows(params["table"])}
    tx.update(good, state, params)
    message = r"grads\['kernel'\], which has a SelectedRows gradient.*trust_ratio.*lamb"
    for update in (tx.update, jax.jit(tx.update)):
        with pytest.raises(ValueError, match=message):
            update({**good, "kernel": rows(params["kernel"])}, state, params)


def test_a_state_that_follows_in_another_way():
    """Rows in the second axis, and a structure that depends on their number."""

    def transposed(params):
        return jax.tree.map(lambda p: jnp.zeros(p.shape[::-1]), params)

    def one_leaf_a_row(params):
        return [jnp.zeros(D) for _ in range(params["table"].shape[0])]

    update = lambda updates, state, params=None: (updates, state)
    for init, why in [
        (transposed, r"state leaf \['table'\] of shape .* does not have one row per"),
        (
            one_leaf_a_row,
            "the structure of its state depends on the number of rows",
        ),
    ]:
        tx = lazy(optax.GradientTransformation(init, update))
        with pytest.raises(ValueError, match=why):
            tx.init({"table": jnp.ones((V, D))})


def test_refused_under_tracing_too():
    tx = lazy(optax.lamb(LR))
    for init in (jax.jit(tx.init), lambda p: jax.eval_shape(tx.init, p)):
        with pytest.raises(ValueError, match="scale_by_trust_ratio"):
            init(PARAMS)
    with pytest.raises(ValueError, match="optax.partition"):
        tx.update(_grads(), optax.lamb(LR).init(PARAMS), PARAMS)


# ------------------------------------------------------------------ check=False


def scale_by_table(updates, state, params=None, *, rates):
    """Row by row, but it cannot be tried: `rates` is a dict, not a number."""
    del params
    new = jax.tree.map(lambda g, s: 0.9 * s + g, updates, state)
    step = {
        "bias": -new["bias"],
        "emb": {"table": -rates["table"] * new["emb"]["table"]},
    }
    return step, new


def momentum_by_table():
    init = lambda params: jax.tree.map(jnp.zeros_like, params)
    return optax.GradientTransformationExtraArgs(init, scale_by_table)


@pytest.mark.slow
def test_a_wrong_refusal_can_be_overruled():
    tx = optax.chain(optax.clip_by_global_norm(1.0), momentum_by_table())
    assert not sj.optim.is_row_separable(tx, PARAMS)
    with pytest.raises(
        ValueError, match=r"scale_by_table: it cannot run.*lazy\(tx, check=False\)"
    ):
        lazy(tx).init(PARAMS)

    lifted, rates = lazy(tx, check=False), {"table": 0.5}
    state, params = lifted.init(PARAMS), PARAMS
    dense_state, dense = tx.init(PARAMS), PARAMS
    update = jax.jit(lifted.update)
    rows = sj.SelectedRows(jnp.array([7, 2, 7, V]), jnp.ones((4, D)), V)
    for _ in range(3):
        grads = _grads(rows)
        updates, state = update(grads, state, params, rates=rates)
        assert isinstance(updates["emb"]["table"], sj.SelectedRows)
        params = optax.apply_updates(params, updates)
        grads = _grads(rows.to_dense())
        updates, dense_state = tx.update(grads, dense_state, dense, rates=rates)
        dense = optax.apply_updates(dense, updates)
    assert jnp.allclose(params["emb"]["table"], dense["emb"]["table"], rtol=1e-6)
    assert jnp.allclose(params["bias"], dense["bias"], rtol=1e-6)
    untouched = jnp.delete(params["emb"]["table"], jnp.array([2, 7]), axis=0)
    assert jnp.all(untouched == 1)


@pytest.mark.slow
def test_the_way_out_is_named_only_where_it_is_one():
    """Not for optax's own: the verdicts on these are known to be right."""
    table = {"table": jnp.ones((V, D))}
    mean = lambda g, s, p=None: (jax.tree.map(lambda x: x - jnp.mean(x, 0), g), s)
    transposed = lambda params: jax.tree.map(lambda p: jnp.zeros(p.shape[::-1]), params)
    for tx, is_one in [
        (optax.GradientTransformation(lambda p: (), mean), True),
        (optax.stateless(lambda g, p: mean(g, ())[0]), True),
        (optax.GradientTransformation(transposed, lambda g, s, p=None: (g, s)), False),
        (optax.lamb(LR), False),
        (optax.chain(optax.adam(LR), optax.adaptive_grad_clip(0.1)), False),
        (optax.MultiSteps(optax.adam(LR), 2), False),
    ]:
        with pytest.raises(ValueError, match="cannot be lifted") as error:
            lazy(tx).init(table)
        assert ("check=False" in str(error.value)) == is_one


def test_nothing_overrules_what_cannot_be_done():
    """exact is not lifted, and state without a row for each row cannot be cut."""
    tx = lazy(sj.optim.exact(optax.sgd(LR)), check=False)
    with pytest.raises(ValueError, match="lazy: .*sparsejax.optim.exact: .*caught up"):
        tx.update(_grads(), tx.init(PARAMS), PARAMS)
    transposed = lambda params: jax.tree.map(lambda p: jnp.zeros(p.shape[::-1]), params)
    tx = optax.GradientTransformation(transposed, lambda g, s, p=None: (g, s))
    tx, rows = lazy(tx, check=False), _grads()["emb"]["table"]
    table = jnp.ones((V, D))
    with pytest.raises(ValueError, match="grads, which has.* one row per row"):
        tx.update(rows, tx.init(table), table)
