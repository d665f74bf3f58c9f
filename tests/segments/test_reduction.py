"""The decorator of the `segment_*` functions: signature, name and docstring."""

import inspect
import pickle

import jax
import jax.numpy as jnp
import pytest

import sparsejax as sj


MADE = [
    name
    for name in dir(sj)
    if name.startswith("segment_") and hasattr(getattr(sj, name), "__wrapped__")
]


@pytest.mark.parametrize("name", MADE)
def test_the_signature_that_is_shown_is_the_one_that_is_called(name):
    function = getattr(sj, name)
    shown = inspect.signature(function).parameters
    code = function.__code__
    called = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    assert tuple(shown) == called
    defaults = dict(zip(called[1:], function.__defaults__)) | function.__kwdefaults__
    assert {k: p.default for k, p in shown.items() if k != "data"} == defaults
    kinds = [p.kind for p in shown.values()]
    assert kinds.count(inspect.Parameter.KEYWORD_ONLY) == code.co_kwonlyargcount


def test_as_many_are_made():
    assert len(MADE) == 14 and "segment_sum" not in MADE


@pytest.mark.parametrize("name", MADE)
def test_it_is_known_by_its_public_name(name):
    function = getattr(sj, name)
    assert function.__name__ == function.__qualname__ == name
    assert pickle.loads(pickle.dumps(function)) is function
    assert f"def {name}(x: jax.Array, segments: Segments)" in inspect.getsource(
        function
    )
    with pytest.raises(
        TypeError, match=f"sparsejax.{name}: segment_ids must be intege"
    ):
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
