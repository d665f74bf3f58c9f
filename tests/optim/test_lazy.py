"""lazy(tx) on rows equals tx on the whole table with the other rows put back.

Also inside of other transformations, under JAX's, on stacks of tables, and refused.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsejax as sj
from helpers import (
    assert_no_copies,
    assert_same_bits,
    assert_trees_close,
    assert_written_in_place,
    compile_as_users_do,
    is_rows,
    ones,
    slow_but,
    to_dense,
)
from optimizers import (
    CLIPPED_LAST,
    LR,
    SEPARABLE,
    D,
    V,
    check_steps,
    make_grads,
    make_params,
    row_gradient,
    step,
)
from sparsejax.optim import accumulate, global_norm, is_row_separable, lazy


# optax itself relies on implicit promotion; one test is about our own code.
pytestmark = pytest.mark.usefixtures("loose_promotion")

# One object each, so that it is judged once.
ADAM, SGD = lazy(optax.adam(LR)), lazy(optax.sgd(LR))
CLIPPED_ADAM = lazy(optax.chain(optax.clip_by_global_norm(0.5), optax.adam(LR)))


finite = jax.jit(functools.partial(jax.tree.map, jnp.nan_to_num))


def _rows(rows, height=V):
    return sj.SelectedRows(np.asarray(rows), ones(len(rows), D), height)


# By the first, transformations that are compiled in one program.
WITH_CUBE = "adam user_written adagrad named_chain".split()
OTHERS = [name for name in SEPARABLE if name not in WITH_CUBE]
PARTS = WITH_CUBE[:2], WITH_CUBE[2:], *(OTHERS[k::5] for k in range(5))
GROUPS = {part[0]: part for part in PARTS}


@pytest.mark.window
@pytest.mark.parametrize("first", slow_but(GROUPS, "adam"))
def test_equals_the_dense_run_with_other_rows_put_back(first):
    txs = {name: SEPARABLE[name]() for name in GROUPS[first]}
    cube = first in WITH_CUBE
    steps = [make_grads(k, cube=cube) for k in range(3)]
    check_steps(txs, make_params(cube=cube), steps)


# Parameters, and gradients of a form out of the ordinary.
FORMS = {
    "bfloat16": lambda: (make_params(jnp.bfloat16), make_grads(0, jnp.bfloat16)),
    "no row": lambda: (ones(V, D), _rows(np.zeros(0, "i"))),
    "more slots than rows": lambda: (ones(V, D), _rows(np.arange(3 * V) % V)),
    "dense": lambda: (make_params(), {"bias": ones(D), "table": ones(V, D)}),
    "unsigned ids": lambda: (ones(V, D), _rows(np.array([4, 2**32 - 1, 0], np.uint32))),
    "a table without rows": lambda: (
        {"bias": ones(D), "table": ones(0, D)},
        {"bias": ones(D), "table": _rows([0, 1], 0)},
    ),
    # Shapes do not decide which leaf of the state follows which table.
    "tables of one height, also square": lambda: (
        {"a": ones(D, D), "b": ones(D, D), "c": ones(D)},
        {"a": _rows([1], D), "b": _rows([3], D), "c": ones(D)},
    ),
}


@pytest.mark.window
@pytest.mark.parametrize("form", FORMS)
def test_gradients_of_any_form(form):
    params, grads = FORMS[form]()
    rtol = 2e-2 if form == "bfloat16" else 1e-5
    check_steps({"adam": optax.adam(LR)}, params, [grads], rtol)


def test_int64_ids(x64):
    params, rows = jnp.asarray(ones(V, D)), jnp.array([3, V, 3])
    grads = sj.SelectedRows(rows, jnp.asarray(ones(3, D)), V)
    updates, state = jax.jit(ADAM.update)(grads, ADAM.init(params), params)
    assert updates.rows.dtype == rows.dtype == jnp.int64
    assert updates.dtype == state[0].mu.dtype == jnp.float32


@pytest.mark.slow
def test_a_clip_after_momentum_sees_the_rows_read():
    tx, params = lazy(CLIPPED_LAST["injected_adamw_clip"]()), make_params()
    state, update, norm = tx.init(params), jax.jit(tx.update), jax.jit(global_norm)
    for k in range(3):
        updates, state = update(make_grads(k), state, params)
        assert np.isclose(norm(updates), 0.1, rtol=1e-5)


def test_empty_slots_take_no_part():
    txs = {
        "clip": optax.chain(optax.adagrad(LR), optax.clip_by_global_norm(0.01)),
        "eps of 0": optax.adam(LR, eps=0.0),  # an empty slot is 0 / 0 inside
    }
    values = np.full((4, D), np.nan, np.float32)
    values[0] = 1.0
    grads = sj.SelectedRows(np.array([3, V, V, V]), values, V)
    check_steps(txs, ones(V, D), [grads])


@pytest.mark.parametrize("complex_leaf", ["table", "w"])
def test_complex_leaves_are_clipped_as_optax_does(complex_leaf):
    params = {"table": ones(40, 2), "w": ones(2, 3) / 2}
    params[complex_leaf] = params[complex_leaf] * np.complex64(1 + 2j)
    squares = lambda x: jnp.sum(jnp.abs(x) ** 2)
    loss = lambda p: squares(p["table"][jnp.array([1, 7, 7])]) + squares(p["w"])
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))

    @functools.partial(jax.jit, static_argnums=(0, 1))
    def train(grad, tx, params):
        return step(tx, params, tx.init(params), grad(loss)(params))[0]

    want = train(jax.grad, tx, params)
    assert_trees_close(train(sj.grad, lazy(tx), params), want, rtol=1e-6)


@pytest.mark.window
def test_none_and_masked_leaves():
    params = {"table": ones(V, D), "frozen": ones(V, D), "none": None}
    grads = {"table": row_gradient(0, (D,)), "frozen": optax.MaskedNode(), "none": None}
    mask = {"table": True, "frozen": False, "none": True}
    tx = lazy(optax.masked(optax.adam(LR), mask))
    state = tx.init(params)
    for weights in ({**params, "frozen": optax.MaskedNode()}, None):
        updates, _ = jax.jit(tx.update)(grads, state, weights)
        assert updates["frozen"] == optax.MaskedNode() and updates["none"] is None
        assert is_rows(updates["table"])


@pytest.mark.parametrize("wrap", [lambda tx: tx, lambda tx: accumulate(tx, 1, 20)])
def test_extra_arguments_are_passed_on(wrap):
    params, grads, polyak = make_params(), make_grads(0), optax.polyak_sgd()

    @functools.partial(jax.jit, static_argnums=0)
    def run(tx, grads):
        return to_dense(tx.update(grads, tx.init(params), params, value=1.0)[0])

    updates = run(wrap(lazy(polyak)), grads)
    assert_trees_close(updates, run(polyak, jax.jit(to_dense)(grads)))
    # Transformations without extra arguments ignore them.
    run(wrap(SGD), grads)


def loosely(tx):
    """The transformation of optax, which alone runs with implicit promotion."""

    @jax.numpy_dtype_promotion("standard")
    @jax.numpy_rank_promotion("allow")
    def update(*args):
        return tx.update(*args)

    return optax.GradientTransformation(tx.init, update)


def _all_wrappers(tx):
    tx = sj.optim.rounding(lazy(tx), 0, master=True)
    return sj.optim.dynamic_loss_scale(accumulate(tx, 2, 20))


@pytest.mark.parametrize(
    "wrap, name",
    [(lazy, "adagrad"), (lazy, "clip_by_global_norm"), (_all_wrappers, "adam")],
)
def test_own_code_promotes_nothing(wrap, name):
    tx = wrap(loosely(SEPARABLE[name]()))
    add = lambda p, *args: p["table"] + tx.update(*args, p)[0]["table"]
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        for dtype in (jnp.float32, jnp.bfloat16):
            params = {**make_params(dtype), "none": None}
            grads = {**make_grads(0, dtype), "none": None}
            table = jax.eval_shape(add, params, grads, tx.init(params))
            assert table.dtype == dtype


# ------------------------------------------------------------------ composition

AROUND = {
    "lazies": lambda tx: optax.chain(lazy(optax.clip_by_global_norm(0.1)), tx),
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 3),
    "partition": lambda tx: optax.partition(
        {"rows": tx, "rest": optax.sgd(LR)}, {"bias": "rest", "table": "rows"}
    ),
    "lazy": lazy,
    "inject": lambda tx: optax.inject_hyperparams(lambda lr: lazy(optax.adam(lr)))(LR),
    "if": lambda tx: optax.conditionally_transform(tx, lambda step, **_: step < 1),
    "mask_if": lambda tx: optax.conditionally_mask(tx, lambda step, **_: step < 1),
}


@pytest.mark.slow
@pytest.mark.parametrize("outer", AROUND)
def test_lazy_inside_of_other_transformations(outer):
    outside, inside = AROUND[outer](ADAM), AROUND[outer](optax.adam(LR))
    # apply_if_finite looks at every number, including the numbers of empty slots.
    params, grads = make_params(), finite(make_grads(0))

    @jax.jit
    def run(grads):
        state = outside.init(params)
        updates, new_state = outside.update(grads, state, params)
        expected, _ = inside.update(to_dense(grads), inside.init(params), params)
        return to_dense(updates), expected, new_state, state

    updates, expected, new_state, state = run(grads)
    # One step from a fresh state: untouched rows do not move in the dense run either.
    assert_trees_close(updates, expected)
    assert jax.tree.structure(new_state) == jax.tree.structure(state)


# More are in tests/error_messages.md and rows/test_row_ids.py.
OUTSIDE = {
    "apply_every": lambda tx: optax.chain(tx, optax.apply_every(2)),
    "decay_after": lambda tx: optax.chain(tx, optax.add_decayed_weights(0.1)),
    "adam_after": lambda tx: optax.chain(tx, optax.scale_by_adam()),
    "lamb_after": lambda tx: optax.chain(tx, optax.scale_by_trust_ratio()),
    "another": lambda tx: optax.partition(
        {"a": tx, "b": optax.adam(LR)}, {"bias": "a", "table": "b"}
    ),
    "lookahead": lambda tx: optax.lookahead(tx, 2, 0.5),
}


@pytest.mark.parametrize("outer", OUTSIDE)
def test_errors_of_transformations_outside_of_lazy_name_it(outer):
    tx, params = OUTSIDE[outer](SGD), make_params()
    if outer == "lookahead":
        params = optax.LookaheadParams.init_synced(params)
    with pytest.raises((TypeError, ValueError), match="lazy"):
        tx.update(make_grads(0), tx.init(params), params)


def python_numbers():
    """State that is numbers of Python's, as optax's `is_initial_step`."""

    def update(updates, state, params=None):
        del state, params
        return jax.tree.map(jnp.negative, updates), {"first": False, "scale": 2.0}

    init = lambda params: {"first": True, "scale": 1.0}
    return optax.GradientTransformation(init, update)


def test_state_of_python_numbers():
    tx, params = _all_wrappers(python_numbers()), make_params()
    update = jax.jit(lambda state, grads: tx.update(grads, state, params)[1])
    state, grads = tx.init(params), finite(make_grads(0))
    for _ in range(2):
        state = update(state, grads)
    assert not optax.tree_utils.tree_get(state, "first")


# ------------------------------------------------------------------ transformations


def test_state_is_the_transformations_own():
    """Also for optax's functions of states, and to go on at another rate."""
    tx, params, grads = optax.adam(LR), make_params(), make_grads(0)
    state = tx.init(params)
    assert_trees_close(jax.jit(ADAM.init)(params), state)
    assert jax.eval_shape(ADAM.init, params) == jax.eval_shape(tx.init, params)
    more = optax.tree_utils.tree_map_params(ADAM, lambda x: x + 1, state)
    assert np.all(more[0].mu["table"] == 1) and more[0].count == 0
    state = optax.tree_utils.tree_set(state, count=jnp.asarray(7, jnp.int32))
    updates, new = ADAM.update(grads, state, params)
    assert optax.tree_utils.tree_get(new, "count") == 8
    half, _ = lazy(optax.adam(LR / 2)).update(grads, state, params)
    assert_trees_close(to_dense(half)["table"] * 2, to_dense(updates)["table"])


def test_shapes_are_known_before_data():
    params = make_params()
    args = make_grads(0), ADAM.init(params), params
    updates, state = jax.eval_shape(ADAM.update, *args)
    assert updates["table"].shape == (V, D) and updates["table"].capacity == 9
    assert isinstance(updates["table"].values, jax.ShapeDtypeStruct)
    assert state[0].mu["table"].shape == (V, D)


@pytest.mark.slow
@pytest.mark.parametrize("make", [jax.disable_jit, jax.checking_leaks, jax.debug_nans])
def test_under_jaxs_settings(make):
    """A fresh transformation each time, so that the judge runs under them."""
    tx, params = lazy(optax.rmsprop(LR, eps=0.0)), jnp.ones((V, D))
    with make(True) if make is not jax.checking_leaks else make():
        updates, _ = jax.jit(tx.update)(_rows([1, 1, V]), tx.init(params), params)
        assert updates.num_rows() == 1 and jnp.all(updates.to_dense()[1] < 0)


# ------------------------------------------------------------------ stacks [K, H, W]

K, H, W = 3, 29, 4
IDS = np.array([[3, 1, 3], [28, 1, 0], [7, 7, 7]])
TOUCHED = np.zeros((K, H), bool)
TOUCHED[np.arange(K)[:, None], IDS] = True


def stacked_params():
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape).astype(np.float32))
    return {"stack": draw(K, H, W), "w": draw(W)}


def stacked_loss(params):
    rows = jax.vmap(lambda table, ids: table[ids])(params["stack"], IDS)
    return jnp.sum(jnp.sin(rows @ params["w"]))


stacked_grad = jax.jit(sj.grad(stacked_loss))


def _flat(tree):
    """The tree with one table in place of the stack."""

    def one(x):
        if is_rows(x):
            return x.unstacked()
        return x.reshape(K * H, *x.shape[2:]) if x.shape[:2] == (K, H) else x

    return jax.tree.map(one, tree, is_leaf=is_rows)


# tests/tables_table.py trains `accumulate`, `rounding`, `exact` and `ema`.
OF_STACKS = {
    "clipped adam": CLIPPED_ADAM,
    "sgd": SGD,
    "masked": lazy(
        optax.partition(
            {"a": optax.rmsprop(0.1), "b": optax.lamb(0.1)}, {"stack": "a", "w": "b"}
        )
    ),
    "loss_scale": sj.optim.dynamic_loss_scale(SGD, 4.0),
}


@pytest.mark.parametrize("name", slow_but(OF_STACKS, "clipped adam"))
def test_a_step_of_a_stack_is_one_of_one_table(name):
    """Bit for bit; rows that were not read keep theirs."""
    tx, params = OF_STACKS[name], stacked_params()
    old, flat = np.asarray(params["stack"]), _flat(params)
    state, flat_state = tx.init(params), tx.init(flat)
    run = jax.jit(functools.partial(step, tx))
    for _ in range(2):
        grads = stacked_grad(params)
        assert grads["stack"].stack == (K,)
        params, state = run(params, state, grads)
        flat, flat_state = run(flat, flat_state, _flat(grads))
    jax.tree.map(assert_same_bits, _flat((params, state)), (flat, flat_state))
    stack = np.asarray(params["stack"])
    assert_same_bits(stack[~TOUCHED], old[~TOUCHED])
    assert np.all(stack[TOUCHED] != old[TOUCHED])


@pytest.mark.parametrize("stacked", slow_but([False, True], False))
def test_outside_of_jit_and_without_params(stacked):
    params, grads = make_params(), make_grads(0)
    if stacked:
        params = stacked_params()
        grads = stacked_grad(params)
    state = CLIPPED_ADAM.init(params)
    jitted = jax.jit(CLIPPED_ADAM.update)(grads, state, params)
    eager = CLIPPED_ADAM.update(grads, state)
    assert_trees_close(to_dense(eager), to_dense(jitted), atol=1e-6)


@pytest.mark.window
def test_a_stack_of_numpy_has_the_types_that_jax_makes_of_it():
    """Newer releases of JAX warn of float64 without 64-bit types."""
    params = {name: np.asarray(x, np.float64) for name, x in stacked_params().items()}
    updates, _ = SGD.update(stacked_grad(params), SGD.init(params), params)
    assert updates["stack"].dtype == updates["w"].dtype == jnp.float32


@pytest.mark.slow
def test_a_step_of_a_stack_is_in_place():
    def run(stack, state, ids):
        loss = lambda t: jnp.sum(jnp.sin(jax.vmap(lambda one, i: one[i])(t, ids)))
        return step(ADAM, stack, state, sj.grad(loss)(stack))

    stack = jnp.ones((4, 50_000, 16))
    args = stack, ADAM.init(stack), jnp.zeros((4, 64), int)
    compiled = compile_as_users_do(jax.jit(run, donate_argnums=(0, 1)).lower(*args))
    assert_written_in_place(compiled, [stack] * 3, stack.nbytes / 8)  # and both moments
    assert_no_copies(compiled.as_text(), stack.reshape(200_000, 16))


@pytest.mark.slow
def test_refused_for_a_stack():
    """A part that treats the first axis as the rows would see whole tables."""
    params = stacked_params()
    grads, flat = stacked_grad(params), _flat(params)
    tx = lazy(optax.chain(optax.centralize(), optax.sgd(0.1)))
    with pytest.raises(ValueError, match="a stack of tables.*centralize"):
        tx.update(grads, tx.init(params), params)
    tx.update(_flat(grads), tx.init(flat), flat)
    with pytest.raises(ValueError, match="does not match these gradients"):
        ADAM.update(grads, ADAM.init(flat), params)


def test_dense_gradients_of_a_stack():
    """accumulate has slots for them if there are enough."""
    params = stacked_params()
    grads = jax.jit(jax.grad(stacked_loss))(params)
    tx = accumulate(lazy(optax.sgd(1.0)), 1, capacity=K * H, stacked=True)
    updates, _ = jax.jit(tx.update)(grads, tx.init(params), params)
    assert_trees_close(updates, jax.tree.map(np.negative, grads))


# ------------------------------------------------------------------ refusals

CAUGHT_UP = sj.optim.exact(optax.sgd(LR, momentum=0.9))  # one, so that it is read once


@pytest.mark.parametrize(
    "wrap",
    [
        lambda tx: tx,
        lambda tx: optax.partition({"t": tx, "d": optax.sgd(LR)}, lambda p: "t"),
        lambda tx: optax.chain(optax.masked(optax.chain(tx, optax.clip(1.0)), True)),
    ],
)
def test_exact_is_not_lifted(wrap):
    """It would train on, but wrongly: nothing would catch rows up."""
    tx, params = wrap(CAUGHT_UP), make_params()
    assert not is_row_separable(tx) and not is_row_separable(tx, params)
    for check in (True, False):
        with pytest.raises(ValueError, match="caught up"):
            step(lazy(tx, check=check), params, tx.init(params), make_grads(0))


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_ids_that_were_cast(dtype):
    """By code that rebuilds trees; `jax.tree.map` cannot (rows/test_row_ids.py)."""
    params, rows = {"t": ones(V, D)}, _rows([1, 2])
    leaves = [np.asarray(rows.rows).astype(dtype), rows.values]
    grads = {"t": jax.tree.unflatten(jax.tree.structure(rows), leaves)}
    for update in (ADAM.update, jax.jit(ADAM.update)):
        with pytest.raises(TypeError, match="ids"):
            update(grads, ADAM.init(params), params)


def _transposed(params):
    """State with rows in the second axis."""
    return jax.tree.map(lambda p: jnp.zeros(p.shape[::-1]), params)


def _one_leaf_a_row(params):
    return [jnp.zeros(D) for _ in range(params["table"].shape[0])]


def test_a_state_that_follows_in_another_way():
    update = lambda updates, state, params=None: (updates, state)
    params, grads = {"table": ones(V, D)}, {"table": _rows([1, 2])}
    tx = optax.GradientTransformation(_transposed, update)
    why = r"state leaf \['table'\] of shape .* does not have one row per"
    with pytest.raises(ValueError, match=why):
        lazy(tx).init(params)
    # Nothing overrules that it cannot be cut.
    with pytest.raises(ValueError, match=r"grads\['table'\].* one row per row"):
        lazy(tx, check=False).update(grads, tx.init(params), params)
    tx = optax.GradientTransformation(_one_leaf_a_row, update)
    why = "the structure of its state depends on the number of rows"
    with pytest.raises(ValueError, match=why):
        lazy(tx).init(params)


def test_refused_under_tracing_too():
    tx, params = lazy(optax.lamb(LR)), make_params()
    for init in (jax.jit(tx.init), lambda p: jax.eval_shape(tx.init, p)):
        with pytest.raises(ValueError, match="scale_by_trust_ratio"):
            init(params)
    with pytest.raises(ValueError, match="optax.partition"):
        tx.update(make_grads(0), optax.lamb(LR).init(params), params)


# ------------------------------------------------------------------ check=False


def momentum_by_table():
    """Row by row, but it cannot be tried: `rates` is a dict, not a number."""

    def update(updates, state, params=None, *, rates):
        del params
        new = jax.tree.map(lambda g, s: 0.9 * s + g, updates, state)
        return {"bias": -new["bias"], "table": -rates["table"] * new["table"]}, new

    init = lambda params: jax.tree.map(jnp.zeros_like, params)
    return optax.GradientTransformationExtraArgs(init, update)


@pytest.mark.slow
def test_a_wrong_refusal_can_be_overruled():
    tx = optax.chain(optax.clip_by_global_norm(1.0), momentum_by_table())
    start = {"bias": np.zeros(D, np.float32), "table": ones(V, D)}
    assert not is_row_separable(tx, start)
    with pytest.raises(ValueError, match=r"it cannot run.*lazy\(tx, check=False\)"):
        lazy(tx).init(start)
    grads = {"bias": ones(D), "table": _rows([7, 2, 7, V])}

    def train(tx, grads):
        params, state, update = start, tx.init(start), jax.jit(tx.update)
        for _ in range(3):
            updates, state = update(grads, state, params, rates={"table": 0.5})
            params = optax.apply_updates(params, updates)
        return params

    found = train(lazy(tx, check=False), grads)
    assert_trees_close(found, train(tx, to_dense(grads)))
    assert np.all(np.delete(found["table"], [2, 7], axis=0) == 1)


@pytest.mark.slow
def test_the_way_out_is_named_only_where_it_is_one():
    """Not for optax's own: the verdicts on these are known to be right."""
    mean = lambda g, s, p=None: (jax.tree.map(lambda x: x - jnp.mean(x, 0), g), s)
    for tx, is_one in [
        (optax.GradientTransformation(lambda p: (), mean), True),
        (optax.stateless(lambda g, p: mean(g, ())[0]), True),
        (optax.GradientTransformation(_transposed, lambda g, s, p=None: (g, s)), False),
        (optax.lamb(LR), False),
        (optax.chain(optax.adam(LR), optax.adaptive_grad_clip(0.1)), False),
        (optax.MultiSteps(optax.adam(LR), 2), False),
    ]:
        with pytest.raises(ValueError, match="cannot be lifted") as error:
            lazy(tx).init({"table": jnp.ones((V, D))})
        assert ("check=False" in str(error.value)) == is_one
