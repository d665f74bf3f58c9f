"""tests/docs/optax_table.md: all of optax's transformations through `sj.optim.lazy`.

The verdict is read from the program of each. Its oracle, `tests/tools/probe.py`, runs
the transformation on random numbers.
"""

import functools
import inspect
import pathlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from optax import contrib

import probe
import sparsejax as sj
from helpers import slow_but
from optimizers import CLIPPED_LAST, LR, QUICK_REFUSED, REFUSED, SCHEDULE, SEPARABLE
from sparsejax.optim._lazy import judge, separability


pytestmark = [
    pytest.mark.usefixtures("loose_promotion"),
    pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning"),
]

TESTS = pathlib.Path(__file__).parent.parent
PAGE = (TESTS / "docs" / "optax_table.md").read_text()
# By name, the verdict and a text that begins with what moves without a gradient.
ROWS = {
    name: (verdict, text)
    for name, verdict, text in re.findall(
        r"^\| `((?:optax|sj)[\w.]+)` \| (.*?) \| (?:(.*) )?\|$", PAGE, re.MULTILINE
    )
}
MODULES = {"optax": optax, "optax.contrib": contrib, "sj.optim": sj.optim}

# The arguments of those that have no defaults, or too small ones.
SGD = optax.sgd(LR)
ARGUMENTS = {
    name: args
    for names, args in (
        (
            "sgd adam adamw amsgrad adamax adamaxw nadam nadamw radam adagrad rmsprop "
            "adadelta yogi adabelief lion novograd sign_sgd signum rprop adan lamb "
            "lars fromage adafactor sm3 optimistic_gradient_descent optimistic_adam "
            "optimistic_adam_v2 scale_by_rprop ademamix adopt madgrad acprop cocob "
            "simplified_ademamix schedule_free_adamw schedule_free_sgd "
            "scale_by_madgrad galore sophia muon rowwise_adagrad group_adagrad ftrl "
            "rowwise_adam row_count_adam partial_rowwise_lamb",
            (LR,),
        ),
        ("add_decayed_weights weight_decay", (0.1,)),
        ("clip clip_by_global_norm scale scale_by_learning_rate", (0.5,)),
        ("ema trace", (0.9,)),
        ("scale_by_schedule", (SCHEDULE,)),
        ("adaptive_grad_clip clip_by_block_rms", (0.01,)),
        ("scale_by_backtracking_linesearch scale_by_zoom_linesearch", (10,)),
        ("stateless stateless_with_tree_map", (lambda g, p: g,)),
        ("noisy_sgd", (LR, 0.01, 0.55, 0)),
        ("add_noise", (0.1, 0.5, 0)),
        ("apply_every", (4,)),
        ("MultiSteps", (SGD, 4)),
        ("lookahead", (SGD, 5, 0.5)),
        ("mechanize", (SGD,)),
        ("sam", (SGD, SGD)),
        ("schedule_free", (SGD, LR, 0.9)),
        ("flatten", (optax.adam(LR),)),
        ("freeze", (True,)),
        ("monitor", ({"norm": optax.tree.norm},)),
        ("snapshot", ("norm", optax.tree.norm)),
        ("dpsgd", (LR, 1.0, 0.1, 0)),
        ("differentially_private_aggregate", (1.0, 0.1, 0)),
    )
    for name in names.split()
}


def _always(step, **extra_args):
    del step, extra_args
    return True


def _scaled(tx):
    return lambda learning_rate: optax.chain(tx, optax.scale(learning_rate))


# A wrapper is as the transformation that it holds: each is tried around momentum.
WRAPPERS = {
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 3),
    "chain": lambda tx: optax.chain(optax.clip(1.0), tx),
    "conditionally_mask": lambda tx: optax.conditionally_mask(tx, _always),
    "conditionally_transform": lambda tx: optax.conditionally_transform(tx, _always),
    "inject_hyperparams": lambda tx: optax.inject_hyperparams(_scaled(tx))(SCHEDULE),
    "inject_stateful_hyperparams": lambda tx: optax.inject_stateful_hyperparams(
        _scaled(tx)
    )(LR),
    "masked": lambda tx: optax.masked(tx, True),
    "multi_transform": lambda tx: optax.multi_transform({"all": tx}, "all"),
    "named_chain": lambda tx: optax.named_chain(("tx", tx)),
    "partition": lambda tx: optax.partition({"all": tx}, "all"),
    "selective_transform": lambda tx: optax.selective_transform(tx, freeze_mask=False),
    "with_extra_args_support": optax.with_extra_args_support,
    "split_real_and_imaginary": contrib.split_real_and_imaginary,
}


def _find(name) -> Any:
    """The function of a row, or None if this optax has none, and its last name."""
    module, _, last = name.rpartition(".")
    return getattr(MODULES[module], last, None), last


INSTALLED = [name for name in ROWS if _find(name)[0]]


@functools.cache
def make(name):
    """One object each, so that it is judged once."""
    function, last = _find(name)
    if last in WRAPPERS:
        return WRAPPERS[last](optax.trace(0.9))
    return function(*ARGUMENTS.get(last, ()))


def verdict(tx):
    """`(exact, lazy or refused, what moves without a gradient)`, of one table."""
    spec = jax.ShapeDtypeStruct((160, 130), jnp.float32)
    found = separability.moved(tx, jax.tree.structure(0), (spec,))
    if not found:
        return "**refused**", set()
    fields = {
        path if path == judge.WEIGHTS else re.sub(r".*\W", "", path)
        for path in found[0]
    }
    return ("**lazy**" if fields else "**exact**"), fields


@pytest.mark.slow
@pytest.mark.parametrize("module", MODULES)
def test_each_row_is_what_the_program_says(module):
    for name in (name for name in INSTALLED if name.rpartition(".")[0] == module):
        expected, text = ROWS[name]
        moved = re.match(r"((?:weights|`\w+`)(?:, `\w+`)*)\.", text)
        moved = set(re.findall(r"\w+", moved[1])) if moved else set()
        if _find(name)[1] in WRAPPERS:
            assert expected == "as what it holds", name
            expected, moved = "**lazy**", {judge.WEIGHTS, "trace"}
        assert verdict(make(name)) == (expected, moved), name


def test_the_page_of_optimizers_agrees():
    short = (TESTS.parent / "docs" / "optimizers.md").read_text()
    shown = re.findall(r"^\| (`.*`) \| (\*\*\w+\*\*|as what .*?) \|", short, re.M)
    named = [
        (f"optax.{x}", kind) for cell, kind in shown for x in cell.split("`")[1::2]
    ]
    assert len(named) > 40
    for name, kind in named:
        assert ROWS[name][0] == kind.replace("they hold", "it holds"), name


def test_nothing_is_missing():
    checked_with = re.search(r"\(optax ([\w.]+)\)", PAGE)
    if checked_with is None or checked_with[1] != optax.__version__:
        pytest.skip("the page was checked with another optax")
    makers = {
        f"{prefix}.{name}"
        for prefix, module in MODULES.items()
        for name, function in vars(module).items()
        if prefix != "sj.optim" and inspect.isfunction(function) and name[0] != "_"
        if "GradientTransformation"
        in str(inspect.signature(function)).rpartition("->")[2]
    }
    # A measure for `optax.monitor`: it does not transform gradients by itself.
    assert makers - ROWS.keys() == {"optax.measure_with_ema"}
    assert "optax.adam" in makers


# Here the oracle and `lazy` differ, as intended: True if `lazy` refuses.
INTENDED = {
    # A dense run clips by the norm of all rows, a lifted one by the read rows' norm.
    "adamw_clip": False,
    "injected_adamw_clip": False,
    # The oracle compares leaves; lazy needs a state whose structure stays.
    "optax.monitor": True,
}
# test_lazy.py trains the entries of SEPARABLE against optax. An optimizer is the part
# `scale_by_` its name, and a learning rate.
ALL = {**CLIPPED_LAST, **{name: make for name, (make, _) in REFUSED.items()}}
ALL |= {
    name: lambda name=name: make(name)
    for name in INSTALLED
    if name.startswith("sj.")
    or _find(name)[1].removeprefix("scale_by_") not in {*ALL, *SEPARABLE, *WRAPPERS}
}


@pytest.mark.parametrize(
    "name",
    slow_but(
        ALL, *QUICK_REFUSED, "optax.normalize_by_update_norm", "optax.scale_by_rms"
    ),
)
def test_the_verdict_agrees_with_its_oracle(name):
    """And the refusal names the part."""
    tx = ALL[name]()
    refused = not sj.optim.is_row_separable(tx)
    found = probe.of_one_table(tx)
    assert refused == INTENDED.get(name, found is not None), found
    if name in REFUSED:
        # Wide enough to factor second moments; lookahead wants its own parameters.
        params = {"table": jnp.zeros((300, 130)), "bias": jnp.zeros(130)}
        with pytest.raises(ValueError, match=f"lazy: .*{REFUSED[name][1]}"):
            sj.optim.lazy(tx).init(params)


def test_a_release_of_optax_keeps_the_names_that_we_refuse_by():
    words = " ".join(named for _, named in REFUSED.values())
    parts = [*separability.KNOWN_AS, *(x for x, _ in separability.NOT_LIFTED.values())]
    assert not [x for x in parts if x not in words and "sparsejax" not in x]
