"""Random programs and optimizers, see `fuzz.py`, and short ones that once failed."""

import itertools

import pytest

import fuzz_chains
import fuzz_models
import sparsejax as sj
from fuzz import search
from fuzz_programs import arguments, check, loss_of


pytestmark = [pytest.mark.usefixtures("loose_promotion"), pytest.mark.window]

SCALED = ("binary", 0, 2, 1)  # t * w
ROWS, FAR = ("lookup_rows", 0, 0, 0), ("lookup_rows", 0, 0, 1)

# A program, and how its gradient was taken when it differed from JAX's, or raised.
CASES = {
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
    "stack": (("stack", 0, 0, 0), ("read_stack", 0, 0, 0), ("read_stack", 0, 3, 1)),
    "vmapped_stack": (("stack", 0, 0, 0), ("vmap_stack", 0, 0, 0, (FAR,))),
    "scanned_stack": (("stack", 0, 0, 0), ("scan_over", 0, 0, 0, (SCALED, ROWS))),
}
DENSE = {"every_row_with_every_vector"}  # no rows are read
QUICK = {"scaled_out_of_range": ("hvp",), "checkpoint_returns_a_view": ("eager",)}


# Chains of transformations, how they were run, and the right result.
CHAINS = {
    "state_of_python_numbers": (
        (("scale_by_optimistic_gradient", 0),),
        "accumulated",
        "compared",
    ),
    "refused_beside_a_schedule": (
        (("inject_hyperparams", 1, (("clip", 0),)), ("prodigy()", 0)),
        "jitted",
        "refused",
    ),
    "clipped_only_if_large": (
        (("clip()", 0), ("acprop()", 0), ("acprop()", 0), ("clip_by_block_rms()", 0)),
        "jitted",
        "refused",
    ),
    "coordinates_mixed_after_moments": (
        (("scale_by_adam", 0), ("centralize", 0)),
        "exact",
        "refused",
    ),
    "labels_by_the_number_of_rows": (
        (
            ("partition", 13, (("scale", 7), ("scale", 34))),
            ("sj.adagrad", 8),
            ("trace", 32),
        ),
        "jitted",
        "refused",
    ),
    "a_mask_made_by_a_wrapper_of_a_user": (
        (("masked_by_user", 26, (("masked", 18, (("trace", 5),)), ("scale", 4))),),
        "eager",
        "refused",
    ),
    "decay_that_a_clip_bounds": (
        (("pull_to_zero", 11), ("clip", 1)),
        "exact",
        "refused",
    ),
    "decay_as_fast_as_moments_fade": (
        (("adamw()", 38), ("add_decayed_weights", 8), ("scale", 35)),
        "exact",
        "compared",
    ),
    "coordinates_mixed_before_moments": (
        (("centralize", 0), ("trace", 0)),
        "exact",
        "compared",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_programs_that_failed(name):
    """The error was raised while tracing, which is quick."""
    for how in ("traced", *QUICK.get(name, ())):
        assert check(CASES[name], how) == "compared"


@pytest.mark.parametrize("name", CASES)
def test_they_are_sparse(name, x64):
    params, batches = arguments()
    told = sj.explain(loss_of(CASES[name]), tables=True)(params, batches[0])
    found = told["params['t']"]
    assert found.sparse and bool(found.rows_read) != (name in DENSE)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, how", [*zip(CASES, itertools.cycle(["vmapped", "second_order", "required"]))]
)
def test_programs_that_failed_in_another_way(name, how):
    assert check(CASES[name], how) == "compared"


@pytest.mark.slow
@pytest.mark.parametrize("name", CHAINS)
def test_chains_that_failed(name):
    chain, how, found = CHAINS[name]
    assert fuzz_chains.check(chain, how) == found


@pytest.mark.slow
def test_random_programs():
    _search("programs", 0, 4)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_models_that_failed(dtype):
    """The fill of the read had another type than the table."""
    model = "node", ((23, (3,), dtype),), ((0, "lookup_zero", ("few", "int32"), ()),)
    assert fuzz_models.check(model) == "compared"


@pytest.mark.slow
def test_an_element_out_of_range_in_a_table_of_one_column():
    """It reads the nearest element; its gradient is dropped, as in jax.grad."""
    model = "nnx", ((101, (1,), "float64"),), ((0, "index_both", ("few", "int32"), ()),)
    assert fuzz_models.check(model) == "compared"


@pytest.mark.slow
def test_random_models():
    _search("models", 0, 8)


@pytest.mark.slow
def test_random_products():
    _search("products", 0, 3)


@pytest.mark.slow
def test_random_chains():
    _search("chains", 0, 3)


def _search(kind, seed, examples):
    counts, failure = search(kind, seed, examples)
    assert not failure, f"{failure[1]}: {failure[0]}"
    # Most are ones that JAX, or optax, accepts.
    compared = sum(n for (_, what), n in counts.items() if what == "compared")
    assert compared > 0.5 * examples, counts
