"""What sparsejax.optim reads out of optax, name by name. Nothing is compiled here.

None of these names is a documented interface of optax. A release that changes one of
them fails the test of that name, which says where the name is used.
"""

# optax's types know trees of arrays only.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportIndexIssue=false, reportOperatorIssue=false

import functools
import inspect

import jax
import jax.numpy as jnp
import optax
import pytest
from optax import contrib

from sparsejax.optim import lazy
from sparsejax.optim._lazy import optax_internals


FILE = "sparsejax/optim/_lazy/optax_internals.py"
SGD, ADAM = optax.sgd(0.1), optax.scale_by_adam()
TABLE = {"table": jax.ShapeDtypeStruct((9, 3), jnp.float32)}


def _gone(name, where, but=""):
    return f"optax {optax.__version__}: {name} is gone{but}; {FILE} uses it in {where}"


def _variables(*functions):
    return {v for f in functions for v in f.__code__.co_freevars}


# ------------------------------------------------------------------ closures

CLOSURES = {
    "chain": (
        lambda: optax.chain(SGD, ADAM),
        "_chained, which finds the parts of a chain",
    ),
    "partition": (
        lambda: optax.partition({"a": SGD, "b": ADAM}, {"table": "a"}),
        "children_at, which finds the part of optax.partition for a leaf",
    ),
    "masked": (
        lambda: optax.masked(SGD, True),
        "children_at, which finds out whether a leaf is masked",
    ),
    "inject_hyperparams": (
        lambda: optax.inject_hyperparams(optax.sgd)(0.1),
        "_injected, which makes the transformation inside of inject_hyperparams",
    ),
}


def test_every_closure_has_a_canary():
    assert set(CLOSURES) == set(optax_internals.CLOSURES)


@pytest.mark.parametrize(
    "maker, variable",
    [(maker, v) for maker, names in optax_internals.CLOSURES.items() for v in names],
)
def test_closed_over(maker, variable):
    make, where = CLOSURES[maker]
    tx = make()
    found = _variables(tx.init, tx.update)
    assert variable in found, _gone(variable, where, f" from optax.{maker}: {found}")


def test_parts_of_a_chain():
    adam = optax.with_extra_args_support(ADAM)  # else chain wraps it
    found = [part.update for part in optax_internals.children(optax.chain(SGD, adam))]
    where = "_chained: tuples init_fns and update_fns of equal length"
    assert found == [SGD.update, adam.update], _gone("init_fns or update_fns", where)


def test_the_part_of_a_partition():
    tx = optax.partition({"a": SGD, "b": ADAM}, {"table": "b"})
    treedef, specs = jax.tree.structure(TABLE), jax.tree.leaves(TABLE)
    parts = optax_internals.children_at(tx, treedef, specs, 0)
    assert len(parts) == 1, _gone("transforms or param_labels", "children_at")
    # optax may wrap it, to accept extra arguments.
    inside = [part.update for part in optax_internals.descendants(parts[0])]
    assert ADAM.update in inside, _gone("transforms or param_labels", "children_at")


def test_the_part_that_is_masked():
    tree = {"bias": TABLE["table"], **TABLE}
    treedef, specs = jax.tree.structure(tree), jax.tree.leaves(tree)
    mask = {"bias": False, "table": True}
    for tx in (optax.masked(SGD, mask), optax.masked(SGD, lambda params: mask)):
        found = [optax_internals.children_at(tx, treedef, specs, i) for i in range(2)]
        assert found[0] == [], _gone("inner or mask", "children_at")
        inside = [part.update for part in optax_internals.descendants(found[1][0])]
        assert SGD.update in inside, _gone("inner or mask", "children_at")


def test_what_is_injected():
    tx = optax.inject_hyperparams(optax.adam)(optax.linear_schedule(0, 1, 2), b1=0.8)
    names = [optax_internals.name(part) for part in optax_internals.descendants(tx)]
    assert "scale_by_adam" in names, _gone(
        "one of inner_factory, sched_hps, other_hps, numeric_hps, or f.init() of a "
        "schedule in sched_hps",
        "_injected",
    )


# ------------------------------------------------------------------ names


def _both(maker):
    """A wrapper that takes a transformation and a condition."""
    return lambda: maker(SGD, lambda step, *_: step > 2)


TRANSPARENT = {
    "chain": lambda: optax.chain(SGD, ADAM),
    "named_chain": lambda: optax.named_chain(("sgd", SGD), ("adam", ADAM)),
    "partition": lambda: optax.partition({"a": SGD}, {"table": "a"}),
    "masked": lambda: optax.masked(SGD, True),
    "with_extra_args_support": lambda: optax.with_extra_args_support(
        optax.GradientTransformation(SGD.init, SGD.update)
    ),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.sgd)(0.1),
    "apply_if_finite": lambda: optax.apply_if_finite(SGD, 3),
    "conditionally_transform": _both(optax.conditionally_transform),
    "conditionally_mask": _both(optax.conditionally_mask),
    "lazy": lambda: lazy(SGD),
}

WRAPPERS = {
    "flatten": lambda: optax.flatten(SGD),
    "schedule_free": lambda: contrib.schedule_free(SGD, 0.1),
    "split_real_and_imaginary": lambda: contrib.split_real_and_imaginary(SGD),
}

KNOWN_AS = {
    "scale_by_trust_ratio": optax.scale_by_trust_ratio,
    "scale_by_factored_rms": optax.scale_by_factored_rms,
    "clip_by_block_rms": lambda: optax.clip_by_block_rms(1.0),
    "scale_by_param_block_rms": optax.scale_by_param_block_rms,
    "scale_by_muon": contrib.scale_by_muon,
    "scale_by_shape": lambda: _part(contrib.muon(0.1), "scale_by_shape"),
    "scale_by_sm3": optax.scale_by_sm3,
    "scale_by_dog": lambda: _part(contrib.dog(), "scale_by_dog"),
    "scale_by_dowg": lambda: _part(contrib.dowg(), "scale_by_dowg"),
    "scale_by_lbfgs": optax.scale_by_lbfgs,
    "add_noise": lambda: optax.add_noise(0.1, 0.5, 0),
}


def _part(tx, name):
    """The part of that name, or the whole, whose name the test then shows."""
    parts = optax_internals.descendants(tx)
    return next((p for p in parts if optax_internals.name(p) == name), tx)


def test_every_name_has_a_canary():
    assert set(TRANSPARENT) == optax_internals.TRANSPARENT
    assert set(WRAPPERS) == optax_internals.WRAPPERS
    assert set(KNOWN_AS) == set(optax_internals.KNOWN_AS)
    assert optax_internals.BY_LEAF <= optax_internals.TRANSPARENT


@pytest.mark.parametrize("name", [*TRANSPARENT, *WRAPPERS])
def test_wrapper(name):
    tx = {**TRANSPARENT, **WRAPPERS}[name]()
    found = optax_internals.name(tx)
    where = "TRANSPARENT or WRAPPERS, or else its parts are not found"
    assert found == name, _gone(f"the name {name}", where, f", it is {found}")
    if name != "inject_hyperparams":  # which makes its own, see above
        held = [part.update for part in optax_internals.descendants(tx)]
        assert SGD.update in held, _gone(f"what {name} holds", "children")


@pytest.mark.parametrize("name", KNOWN_AS)
def test_known_as(name):
    found = optax_internals.name(KNOWN_AS[name]())
    where = "KNOWN_AS, for messages"
    assert found == name, _gone(f"the name {name}", where, f", it is {found}")


def my_rule(updates, params):
    return updates


def my_leaf_rule(g, p):
    return g


@pytest.mark.parametrize(
    "maker, rule",
    [(optax.stateless, my_rule), (optax.stateless_with_tree_map, my_leaf_rule)],
)
def test_stateless(maker, rule):
    tx = maker(rule)
    made_by = tx.update.__qualname__.split(".")[0]
    where = "_named_after, which looks inside of optax.stateless"
    assert made_by.startswith("stateless"), _gone("stateless", where, f": {made_by}")
    assert optax_internals.name(tx) == rule.__name__, _gone("what it holds", where)
    assert not optax_internals.is_optax(tx) and optax_internals.is_optax(ADAM)


# ------------------------------------------------------------------ states

NOT_LIFTED = {
    optax.MultiStepsState: lambda: optax.MultiSteps(SGD, 2),
    optax.ApplyEvery: lambda: optax.apply_every(2),
    contrib.MomoState: contrib.momo,
    contrib.MomoAdamState: contrib.momo_adam,
    contrib.MuonState: contrib.scale_by_muon,
    contrib.ProdigyState: contrib.prodigy,
    contrib.DAdaptAdamWState: contrib.dadapt_adamw,
    contrib.MechanicState: lambda: contrib.mechanize(SGD),
    contrib.DoGState: contrib.dog,
    contrib.DoWGState: contrib.dowg,
}


def test_every_state_has_a_canary():
    assert set(NOT_LIFTED) == set(optax_internals.NOT_LIFTED)


@pytest.mark.parametrize("kind", NOT_LIFTED, ids=lambda kind: kind.__name__)
def test_not_lifted(kind):
    state = jax.eval_shape(NOT_LIFTED[kind]().init, TABLE)
    nodes = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, kind))
    where = "NOT_LIFTED, or else it would be lifted and train wrongly"
    assert any(isinstance(x, kind) for x in nodes), _gone(
        f"the state {kind.__name__}", where, f" from {jax.tree.structure(state)}"
    )
    owners = (0,) * len(jax.tree.leaves(state))
    known = optax_internals.not_lifted(state, owners)
    assert known[0] == optax_internals.NOT_LIFTED[kind]


# ------------------------------------------------------------------ the rest


def test_modules():
    where = "_is_from_optax, for treats_leaves_alike"
    for tx in (SGD, ADAM, optax.chain(SGD), optax.masked(SGD, True), contrib.momo()):
        module = tx.update.__module__
        assert module.split(".")[0] == "optax", _gone(
            "the module optax", where, f": {module}"
        )
    assert optax_internals.treats_leaves_alike(optax.chain(ADAM, SGD))
    assert not optax_internals.treats_leaves_alike(optax.masked(SGD, True))
    assert not optax_internals.treats_leaves_alike(
        optax.GradientTransformation(SGD.init, lambda u, s, p=None: (u, s))
    )


def test_transformations():
    where = "is_transformation"
    assert issubclass(optax.GradientTransformation, tuple), _gone("the tuple", where)
    assert optax_internals.is_transformation(SGD), _gone("init or update", where)
    multi_steps = optax.MultiSteps(SGD, 2)
    assert not callable(multi_steps)
    assert optax_internals.is_transformation(multi_steps), _gone(
        "MultiSteps.init or .update", where
    )
    assert not optax_internals.is_transformation(optax.linear_schedule(0, 1, 2))


def test_required_extra_args():
    """Keyword-only arguments without a default, read with `inspect.signature`."""
    tx = optax.chain(SGD, optax.scale_by_polyak())
    found = optax_internals.required_extra_args(tx)
    assert found == {"value"}, _gone("value of scale_by_polyak", "required_extra_args")
    for function in (SGD.update, functools.partial(SGD.update)):
        assert inspect.signature(function).parameters


def test_masked_nodes():
    state = jax.eval_shape(optax.masked(ADAM, {"table": False}).init, TABLE)
    masked = lambda x: isinstance(x, optax.MaskedNode)
    nodes = jax.tree.leaves(state, is_leaf=masked)
    assert any(map(masked, nodes)), (
        f"optax {optax.__version__}: masked leaves are no longer MaskedNode; "
        "sparsejax/optim/_lazy/trees.py uses it in is_none_or_masked"
    )
