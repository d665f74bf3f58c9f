"""The decorator of the `segment_*` functions: signature, name and docstring."""

import functools
import inspect
import pickle

import jax
import jax.numpy as jnp
import pytest

import sparsejax as sj


OWN = {
    "segment_sum": ("weights",),
    "segment_mean": ("weights",),
    "segment_sqrtn": ("weights",),
    "segment_top_k": ("k",),
    "segment_normalize": ("eps",),
}
CONVERSIONS = ("segment_ids_to_lengths", "segment_ids_to_ranges")
MADE = [n for n in dir(sj) if n.startswith("segment_") and n not in CONVERSIONS]


@pytest.mark.parametrize("name", MADE)
def test_all_take_the_arguments_of_jax(name):
    shown = inspect.signature(getattr(sj, name)).parameters
    common = inspect.signature(jax.ops.segment_sum).parameters
    assert {*common, "empty", *OWN.get(name, ())} == {*shown}
    for key in (k for k in common if k != "data"):
        assert shown[key].default in (common[key].default, None)
    data, own = jnp.ones(2, bool), {"k": 1} if name == "segment_top_k" else {}
    data = data if name in ("segment_any", "segment_all") else data.astype(float)
    run = functools.partial(getattr(sj, name), data, jnp.array([0, 7]), 2, **own)
    run(unique_indices=True, bucket_size=None)
    if name == "segment_count":
        assert run(mode="clip").tolist() == [1, 1]
    with pytest.raises(TypeError, match="unexpected keyword argument 'wieghts'"):
        run(wieghts=data)


@pytest.mark.parametrize("name", MADE)
def test_it_is_known_by_its_public_name(name):
    function = getattr(sj, name)
    assert function.__name__ == function.__qualname__ == name
    assert pickle.loads(pickle.dumps(function)) is function
    assert f"def {name}(" in inspect.getsource(function)
    with pytest.raises(TypeError, match="segment_ids must be integers"):
        function(jnp.ones(2, bool), jnp.ones(2))


@pytest.mark.parametrize("name", MADE)
def test_the_docstring_has_all_sections_in_order(name):
    doc = inspect.getdoc(getattr(sj, name)) or ""
    sections = ["Args:", "Returns:", "Raises:", "Example:", "References:"]
    places = [doc.index(f"\n\n{section}\n") for section in sections]
    assert places == sorted(places)
    assert all(len(line) <= 88 for line in doc.splitlines())


def test_jit_takes_static_arguments_by_name():
    data, ids = jnp.array([1.0, 3.0, 7.0]), jnp.array([0, 0, 1])
    jitted = jax.jit(sj.segment_var, static_argnames="num_segments")
    assert jitted(data, ids, num_segments=2).tolist() == [1.0, 0.0]
