"""Properties that all our own transformations share.

Each takes dense and SelectedRows gradients, bare and inside of `lazy(chain(...))`,
under strict promotion. The rules themselves are in test_ftrl.py,
test_rowwise.py and test_weight_decay.py.
"""

# optax's types know trees of arrays only.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportIndexIssue=false, reportOperatorIssue=false

import functools

import jax
import jax.numpy as jnp
import optax
import pytest

import sparsejax as sj
from helpers import (
    IN_PLACE,
    assert_lazy_step,
    assert_no_dense,
    assert_same_bits,
    assert_trees_close,
    compile_as_users_do,
    is_rows,
    to_dense,
)
from optimizers import V, make_grads, make_params
from sparsejax import optim
from sparsejax.optim import lazy


LR = 0.1
SCHEDULE = optax.linear_schedule(LR, 0.01, 5)
QUICKLY = {"xla_backend_optimization_level": 0}  # to compile, for little to run

MAKERS = {
    "ftrl": lambda lr=LR: optim.ftrl(lr, l1=0.05, l2=0.01),
    "adagrad": lambda lr=LR: optim.adagrad(lr, 0.1),
    "rowwise_adagrad": lambda lr=LR: optim.rowwise_adagrad(lr),
    "group_adagrad": lambda lr=LR: optim.group_adagrad(lr),
    "rowwise_adam": lambda lr=LR: optim.rowwise_adam(lr),
    "rowwise_adam_row_count": lambda lr=LR: optim.rowwise_adam(lr, row_count=True),
    "row_count_adam": lambda lr=LR: optim.row_count_adam(lr),
    "partial_rowwise_lamb": lambda lr=LR: optim.partial_rowwise_lamb(
        lr, weight_decay=0.01
    ),
    "weight_decay": lambda lr=LR: optim.weight_decay(0.5, lr),
    "ema": lambda lr=LR: optim.ema(0.9),
}
each = pytest.mark.parametrize("name", MAKERS)
# One of each file, for tests in which the rule matters less.
some = pytest.mark.parametrize(
    "name", ["ftrl", "rowwise_adagrad", "rowwise_adam_row_count", "weight_decay"]
)


@functools.cache
def made(name):
    """A transformation and its jitted step, which is judged once."""
    tx = MAKERS[name]()
    return tx, jax.jit(functools.partial(_step, tx), compiler_options=QUICKLY)


def _step(tx, grads, state, params):
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, updates


def _kinds(tree):
    return jax.tree.map(lambda x: (x.shape, str(x.dtype)), tree)


@pytest.mark.slow
@each
def test_rows_are_the_dense_run_with_other_rows_put_back(name):
    tx, step = made(name)
    params = make_params()
    state = tx.init(params)

    def dense_step(params, state, grads):
        *after, updates = step(grads, state, params)
        assert not is_rows(updates["table"])
        return after

    for t in range(3):
        grads = make_grads(t)  # duplicates, empty slots with NaN
        *found, updates = step(grads, state, params)
        assert is_rows(updates["table"])
        assert _kinds(found) == _kinds([params, state])
        assert_lazy_step(tx, dense_step, (params, state), grads, found)
        params, state = found
    assert step._cache_size() == 2


@some
def test_is_row_separable(name):
    assert optim.is_row_separable(made(name)[0])


@pytest.mark.slow
@pytest.mark.usefixtures("loose_promotion")  # optax's clip
@pytest.mark.parametrize("name", ["ftrl", "weight_decay"])
def test_inside_of_a_lazy_chain(name):
    """The same as bare, on the clipped merged rows."""
    tx, step = made(name)
    params, grads = make_params(), make_grads(0)
    chain = lazy(optax.chain(optax.clip_by_global_norm(0.5), tx))
    state = chain.init(params)
    assert_trees_close(state[1], tx.init(params), rtol=0, atol=0)
    updates, new = jax.jit(chain.update)(grads, state, params)

    scale = 0.5 / optim.global_norm(grads)
    clipped = jax.tree.map(lambda g: g * scale, grads, is_leaf=is_rows)
    _, expected, expected_updates = step(clipped, tx.init(params), params)
    assert_trees_close(to_dense(updates), to_dense(expected_updates))
    assert_trees_close(new[1], expected)


@each
def test_nothing_of_the_tables_size_arises(name):
    tx, _ = made(name)
    step = lambda *args: _step(tx, *args)[:2]
    params, grads = make_params(), make_grads(0)
    args = grads, jax.eval_shape(tx.init, params), params
    assert_no_dense(step, *args, allow=IN_PLACE, heights={V})


@pytest.mark.parametrize("name", ["rowwise_adam_row_count"])
def test_a_donated_step_is_in_place(name):
    tx, _ = made(name)
    params = jax.ShapeDtypeStruct((50_021, 16), jnp.float32)
    state = jax.eval_shape(tx.init, params)
    grads = sj.SelectedRows(jnp.arange(8), jnp.ones((8, 16)), 50_021)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, grads):
        return _step(tx, grads, state, params)[:2]

    lowered = step.lower(params, state, grads)
    memory = compile_as_users_do(lowered).memory_analysis()
    assert memory is not None
    tables = [x for x in jax.tree.leaves((state, params)) if x.shape]
    assert memory.alias_size_in_bytes >= sum(x.size * x.dtype.itemsize for x in tables)
    assert memory.temp_size_in_bytes < 0.05 * 4 * params.size


@some
def test_narrow_types_keep_state_in_float32(name):
    """Updates have the parameters' type, so that apply_updates promotes nothing."""
    tx, _ = made(name)
    params = make_params(jnp.bfloat16)
    state = jax.eval_shape(tx.init, params)
    assert {str(x.dtype) for x in jax.tree.leaves(state)} == {"int32", "float32"}
    for grads in (make_grads(0, jnp.bfloat16), to_dense(make_grads(0, jnp.bfloat16))):
        step = functools.partial(_step, tx)
        new, new_state, updates = jax.eval_shape(step, grads, state, params)
        assert updates["bias"].dtype == updates["table"].dtype == jnp.bfloat16
        assert _kinds((new, new_state)) == _kinds((params, state))


@some
def test_types_under_x64(name, x64):
    tx, _ = made(name)
    step = functools.partial(_step, tx)
    for dtype in ("float32", "float64"):
        params, grads = make_params(dtype), make_grads(0, dtype)
        state = jax.eval_shape(tx.init, params)
        assert {str(x.dtype) for x in jax.tree.leaves(state)} == {"int32", dtype}
        new, new_state, _ = jax.eval_shape(step, to_dense(grads), state, params)
        assert _kinds((new, new_state)) == _kinds((params, state))


@some
def test_state_is_a_named_tree_that_goes_on_with_another_rate(name):
    tx, step = made(name)
    params, grads = make_params(), to_dense(make_grads(0))
    _, state, _ = step(grads, tx.init(params), params)
    assert optax.tree_utils.tree_get(state, "count") == 1
    early = optax.tree_utils.tree_set(state, count=jnp.zeros((), jnp.int32))
    assert early.count == 0 and early[1:] == state[1:]
    # A schedule and the old state: from step 1 on.
    both = MAKERS[name](SCHEDULE), MAKERS[name](SCHEDULE(1))

    @functools.partial(jax.jit, compiler_options=QUICKLY)
    def run(*args):
        return [tx.update(*args) for tx in both]

    assert_trees_close(*run(grads, state, params))


@some
def test_none_and_masked_leaves(name):
    tx, _ = made(name)
    params = {"a": jnp.ones((V, 2)), "none": None, "b": jnp.ones(3)}
    grads = {"a": jnp.ones((V, 2)), "none": None, "b": None}
    state = tx.init(params)
    updates, new = jax.jit(tx.update, compiler_options=QUICKLY)(grads, state, params)
    assert updates["none"] is None and updates["b"] is None
    leaves = jax.tree_util.tree_leaves_with_path
    for (path, before), (_, after) in zip(leaves(state), leaves(new)):
        if "'b'" in jax.tree_util.keystr(path):
            assert_same_bits(before, after)
    masked = optax.masked(tx, {"a": True, "none": False, "b": False})
    grads = {"a": jnp.ones((V, 2)), "none": None, "b": jnp.ones(3)}
    update = jax.jit(masked.update, compiler_options=QUICKLY)
    masked_updates, _ = update(grads, masked.init(params), params)
    assert_trees_close(masked_updates["a"], updates["a"])
    assert_trees_close(masked_updates["b"], jnp.ones(3))


@pytest.mark.usefixtures("loose_promotion")
def test_injected_hyperparameters():
    params, grads = make_params(), make_grads(0)
    tx, step = made("rowwise_adam")
    injected = optax.inject_hyperparams(optim.rowwise_adam)(LR)
    state = injected.init(params)
    assert state.hyperparams.keys() == {"learning_rate", "b1", "b2", "eps"}
    updates, _ = jax.jit(injected.update)(grads, state, params)
    _, _, expected = step(grads, tx.init(params), params)
    assert_trees_close(to_dense(updates), to_dense(expected), rtol=1e-4)


def test_partition_gives_each_leaf_its_own():
    params, grads = make_params(), make_grads(0)
    parts = {"rows": MAKERS["rowwise_adagrad"](), "dense": MAKERS["ftrl"]()}
    tx = lazy(optax.partition(parts, {"table": "rows", "bias": "dense"}))
    updates, _ = jax.jit(tx.update)(grads, tx.init(params), params)
    for name, own in (("table", "rowwise_adagrad"), ("bias", "ftrl")):
        tx, step = made(own)
        _, _, expected = step(grads, tx.init(params), params)
        assert_trees_close(to_dense(updates)[name], to_dense(expected)[name])


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: optim.ftrl(0.0), "learning_rate must be a positive number or"),
        (lambda: optim.ftrl(0.1, l1=-1.0), "l1 must be a non-negative"),
        (lambda: optim.rowwise_adagrad(-0.1), "learning_rate must be"),
        (lambda: optim.group_adagrad(0.1, eps=-1e-5), "eps must be"),
        (lambda: optim.adagrad(0.1, -1.0), "initial_accumulator_value must"),
        (lambda: optim.rowwise_adam(0.1, b2=1.0), r"b2 must be in \[0"),
        (lambda: optim.row_count_adam(0.1, b1=-0.1), "b1 must be in"),
        (
            lambda: optim.partial_rowwise_lamb(0.1, weight_decay=-1.0),
            "weight_decay must be",
        ),
        (lambda: optim.ema(1.0), r"decay must be in \[0, 1\)"),
        (lambda: optim.weight_decay(-0.1), "weight_decay must be"),
        (
            lambda: optim.weight_decay(2.0, 0.5),
            r"weight_decay \* learning_rate",
        ),
    ],
)
def test_what_is_out_of_range_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("name", ["partial_rowwise_lamb", "weight_decay", "ema"])
def test_params_are_asked_for(name):
    tx, _ = made(name)
    state = tx.init(make_params())
    message = "update needs params"
    for grads in (make_grads(0), to_dense(make_grads(0))):
        with pytest.raises(ValueError, match=message):
            tx.update(grads, state)
