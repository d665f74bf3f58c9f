"""Random programs and optimizers, see `fuzz.py`, and short ones that once failed."""

import itertools

import pytest

import fuzz_chains
import fuzz_models
import fuzz_programs
from fuzz import search


pytestmark = [pytest.mark.usefixtures("loose_promotion"), pytest.mark.window]

SCALED = ("binary", 0, 2, 1)  # t * w
ROWS, FAR = ("lookup_rows", 0, 0, 0), ("lookup_rows", 0, 0, 1)
STACK = ("stack", 0, 0, 0)

# Programs whose gradients differed from JAX's, or raised.
PROGRAMS = {
    "every_row_with_every_vector": (("outer", 0, 1, 1),),
    "every_row_with_rows": (ROWS, ("outer", 1, 1, 0), ROWS),
    "scaled_out_of_range": (SCALED, FAR),
    "vmapped_scale": (("vmap_values", 0, 1, 0, (("binary", 0, 2, 5), ROWS)),),
    "vmapped_scale_and_ids": (("vmap_values", 0, 0, 0, (("binary", 0, 2, 5), ROWS)),),
    "checkpoint_returns_the_table": (("checkpoint", 0, 0, 1, (ROWS,)), FAR),
    "checkpoint_returns_a_view": (("checkpoint", 0, 0, 0, (ROWS, SCALED)), FAR),
    "jit_returns_the_table": (("jit", 0, 0, 1, (ROWS,)), FAR),
    "scan_returns_the_table": (("scan", 0, 0, 1, (ROWS,)), FAR),
    "cond_returns_the_table": (("cond", 0, 0, 1, (ROWS,)), FAR),
    "stack": (STACK, ("read_stack", 0, 0, 0), ("read_stack", 0, 3, 1)),
    "vmapped_stack": (STACK, ("vmap_stack", 0, 0, 0, (FAR,))),
    "scanned_stack": (STACK, ("scan_over", 0, 0, 0, (SCALED, ROWS))),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_that_failed(name):
    """The error was raised while tracing, which is quick. Each table has rows."""
    for how in ("traced", "required"):
        assert fuzz_programs.check(PROGRAMS[name], how) == "compared"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, how", [*zip(PROGRAMS, itertools.cycle(["vmapped", "hvp", "second_order"]))]
)
def test_programs_that_failed_in_another_way(name, how):
    assert fuzz_programs.check(PROGRAMS[name], how) == "compared"


SOME, OTHER = ("lookup_rows", 0, 0, 3), ("lookup_rows", 1, 0, 0)  # t[ids - 5], u[ids]
SQUARE, TANH = (
    ("view", 0, [*fuzz_models.VIEWS].index(x), 0) for x in ("square", "tanh")
)
CLIPPED = ("read", 0, 1, 0)
PRODUCT, SUM = ("binary", 0, 2, 1), ("reduce", 0, 0, 1)

# Losses of rows that users have.
PRODUCTS = {
    "squares": (ROWS, SQUARE),
    "dots": (ROWS, SOME, PRODUCT, SUM),
    "quotient": (ROWS, SOME, ("binary", 0, 3, 1)),
    "clipped": (CLIPPED, SQUARE),
    "hidden layer": (ROWS, PRODUCT, TANH, SQUARE),
    "distance from data": (ROWS, ("binary", 0, 1, 2), SQUARE),
    "pairs of two tables": (ROWS, SUM, OTHER, SUM, PRODUCT),
    "gate": (ROWS, SOME, TANH, ("binary", 0, 2, 2)),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_derivatives_of_gradients(name):
    """In both directions."""
    for how in ("hvp", "second_order"):
        assert fuzz_programs.check(PRODUCTS[name], how) == "compared"


# Chains of transformations, how they were run, and the right result.
CHAINS = {
    "state_of_python_numbers": (
        "compared accumulated",
        (("scale_by_optimistic_gradient", 0),),
    ),
    "refused_beside_a_schedule": (
        "refused jitted",
        (("inject_hyperparams", 1, (("clip", 0),)), ("prodigy()", 0)),
    ),
    "clipped_only_if_large": (
        "refused jitted",
        (("clip()", 0), ("acprop()", 0), ("acprop()", 0), ("clip_by_block_rms()", 0)),
    ),
    "coordinates_mixed_after_moments": (
        "refused exact",
        (("scale_by_adam", 0), ("centralize", 0)),
    ),
    "labels_by_the_number_of_rows": (
        "refused jitted",
        (
            ("partition", 13, (("scale", 7), ("scale", 34))),
            ("sj.adagrad", 8),
            ("trace", 32),
        ),
    ),
    "a_mask_made_by_a_wrapper_of_a_user": (
        "refused eager",
        (("masked_by_user", 26, (("masked", 18, (("trace", 5),)), ("scale", 4))),),
    ),
    "decay_that_a_clip_bounds": ("refused exact", (("pull_to_zero", 11), ("clip", 1))),
    "decay_as_fast_as_moments_fade": (
        "compared exact",
        (("adamw()", 38), ("add_decayed_weights", 8), ("scale", 35)),
    ),
    "coordinates_mixed_before_moments": (
        "compared exact",
        (("centralize", 0), ("trace", 0)),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CHAINS)
def test_chains_that_failed(name):
    result, chain = CHAINS[name]
    right, how = result.split()
    assert fuzz_chains.check(chain, how) == right


MODELS = {
    # The fill of the read had another type than the table.
    "fill": ("node", ((23, (3,), "bfloat16"),), (0, "lookup_zero")),
    # It reads the nearest element; its gradient is dropped, as in jax.grad.
    "column_out_of_range": ("nnx", ((101, (1,), "float64"),), (0, "index_both")),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_models_that_failed(name):
    holder, tables, read = MODELS[name]
    model = holder, tables, ((*read, ("few", "int32"), ()),)
    assert fuzz_models.check(model) == "compared"


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, examples", [("programs", 3), ("models", 8), ("chains", 3)]
)
def test_random_cases(kind, examples):
    counts, failure = search(kind, 0, examples)
    assert not failure, f"{failure[1]}: {failure[0]}"
    # Most are ones that JAX, or optax, accepts.
    compared = sum(n for (_, what), n in counts.items() if what == "compared")
    assert compared > 0.5 * examples, counts
