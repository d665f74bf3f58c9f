"""The names of optax that sparsejax.optim reads.

None of these names is a documented interface of optax. A release that changes one of
them fails the test of that name, which says where the name is used.
"""

# optax's types know trees of arrays only.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportIndexIssue=false, reportOperatorIssue=false

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from optax import contrib

import optax_table
from optimizers import REFUSED, SEPARABLE
from sparsejax.optim import _checks as checks, accumulate, exact, lazy, track_changes
from sparsejax.optim._exact.exact import ExactState
from sparsejax.optim._lazy import judge, parts, separability
from sparsejax.optim._wrappers.accumulate import AccumulateState
from sparsejax.optim._wrappers.track_changes import TrackChangesState


FILES = "sparsejax/optim/_lazy/separability.py, judge.py and parts.py"
SGD, ADAM = optax.sgd(0.1), optax.scale_by_adam()
TABLE = {"table": jax.ShapeDtypeStruct((9, 3), jnp.float32)}
ONE_TABLE = jax.tree.structure(0), (jax.ShapeDtypeStruct((160, 130), jnp.float32),)


def _gone(name, where, but=""):
    return f"optax {optax.__version__}: {name} is gone{but}; {FILES} use it in {where}"


# ------------------------------------------------------------------ names

KNOWN_AS = {
    "scale_by_trust_ratio": optax.scale_by_trust_ratio,
    "scale_by_factored_rms": optax.scale_by_factored_rms,
    "clip_by_block_rms": lambda: optax.clip_by_block_rms(1.0),
    "scale_by_param_block_rms": optax.scale_by_param_block_rms,
    "scale_by_muon": lambda: contrib.muon(0.1),
    "scale_by_sm3": optax.scale_by_sm3,
    "scale_by_dog": contrib.dog,
    "scale_by_dowg": contrib.dowg,
    "scale_by_lbfgs": optax.scale_by_lbfgs,
    "add_noise": lambda: optax.add_noise(0.1, 0.5, 0),
}


def test_every_name_has_a_canary():
    assert set(KNOWN_AS) == set(separability.KNOWN_AS)


@pytest.mark.usefixtures("loose_promotion")
@pytest.mark.parametrize("name", KNOWN_AS)
def test_known_as(name):
    reason = separability.refusal(KNOWN_AS[name](), *ONE_TABLE)
    assert reason and reason.part == name, _gone(
        f"the name {name}", "KNOWN_AS, for messages"
    )


@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")
def test_update_functions_are_recognized():
    """The names in tracebacks, by which messages name the parts of a chain."""
    makers = [*SEPARABLE.values(), *(make for make, _ in REFUSED.values())]
    for _, module, _, entries in optax_table.SECTIONS:
        makers += [e.make for name, e in entries.items() if hasattr(module, name)]
    for tx in (make() for make in makers):
        update = tx.update
        while isinstance(update, functools.partial):
            update = update.func
        last = update.__qualname__.split(".")[-1]
        where = "_UPDATE, which finds the parts among the frames of a traceback"
        assert parts._UPDATE.fullmatch(last), _gone("update_fn", where, f": {last}")


def my_rule(updates, params):
    return jax.tree.map(lambda u: u - jnp.mean(u), updates)


def my_leaf_rule(g, p):
    return g - jnp.mean(g)


@pytest.mark.parametrize(
    "maker, rule",
    [(optax.stateless, my_rule), (optax.stateless_with_tree_map, my_leaf_rule)],
)
def test_functions_that_optax_calls_are_named(maker, rule):
    tx = optax.chain(ADAM, maker(rule))
    reason = separability.refusal(tx, *ONE_TABLE)
    assert reason is not None
    assert reason.part == rule.__name__ and reason.can_be_wrong
    assert "test_canaries.py:" in reason.why


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
    ExactState: lambda: exact(SGD),
    AccumulateState: lambda: accumulate(SGD, 2, 9),
    TrackChangesState: lambda: track_changes(lazy(SGD)),
}


def test_every_state_has_a_canary():
    assert set(NOT_LIFTED) == set(separability.NOT_LIFTED)


@pytest.mark.parametrize("kind", NOT_LIFTED, ids=lambda kind: kind.__name__)
def test_not_lifted(kind):
    tx = NOT_LIFTED[kind]()
    reason = separability.refusal(tx, *ONE_TABLE)
    assert reason is not None
    where = "NOT_LIFTED, or else it would be lifted and train wrongly"
    assert (reason.part, reason.why) == separability.NOT_LIFTED[kind], _gone(
        f"the state {kind.__name__}", where
    )


# ------------------------------------------------------------------ other names


def test_transformations():
    where = "is_transformation"
    assert issubclass(optax.GradientTransformation, tuple), _gone("the tuple", where)
    assert checks.is_transformation(SGD), _gone("init or update", where)
    multi_steps = optax.MultiSteps(SGD, 2)
    assert not callable(multi_steps)
    assert checks.is_transformation(multi_steps), _gone(
        "MultiSteps.init or .update", where
    )
    assert not checks.is_transformation(optax.linear_schedule(0, 1, 2))


def test_required_extra_args():
    """Python's message names them."""
    tx = optax.chain(SGD, optax.scale_by_polyak())
    with pytest.raises(TypeError) as error:
        tx.update(jnp.ones(3), tx.init(jnp.ones(3)), jnp.ones(3))
    found = judge.required_arguments(error.value)
    assert found == {"value"}, _gone("value of scale_by_polyak", "required_arguments")


def test_masked_nodes():
    state = jax.eval_shape(optax.masked(ADAM, {"table": False}).init, TABLE)
    masked = lambda x: isinstance(x, optax.MaskedNode)
    nodes = jax.tree.leaves(state, is_leaf=masked)
    assert any(map(masked, nodes)), (
        f"optax {optax.__version__}: masked leaves are no longer MaskedNode; "
        "sparsejax/optim/_trees.py uses it in is_none_or_masked"
    )
