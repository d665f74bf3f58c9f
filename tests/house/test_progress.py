"""One convention: `progress=` is True for a bar, False, or a function of (done, total).

Every public function that has it is tested here.
"""

import jax.numpy as jnp
import optax
import pytest

import public_names
import sparsejax as sj
from sparsejax import _progress


@pytest.fixture(scope="module")
def calls(tmp_path_factory):
    """By the name in its errors, each call that takes `progress=`."""
    folder = tmp_path_factory.mktemp("progress")
    store = sj.store.KVStore()
    store.init("t", (50, 2), optax.sgd(0.1))
    store.push("t", sj.SelectedRows([3], jnp.ones((1, 2)), 50))
    found = {
        "store.KVStore.pull_all": lambda **p: store.pull_all("t", **p),
        "store.KVStore.save": lambda **p: store.save(folder / "t.store", **p),
        "store.KVStore.load": lambda **p: store.load(folder / "t.store", **p),
    }
    return found


@pytest.mark.slow
def test_progress_is_a_bool_or_a_function_everywhere(calls, capsys):
    pytest.importorskip("tqdm")
    for name, call in calls.items():
        seen = []
        call(progress=lambda done, total, seen=seen: seen.append((done, total)))
        done, totals = zip(*seen)
        assert list(done) == sorted(done) and {*totals} == {done[-1]}, (name, seen)
        assert "\r" not in capsys.readouterr().err, name
        call(progress=True)
        assert "\r" in capsys.readouterr().err, name
        call(progress=False)
        assert capsys.readouterr().err == "", name
        message = f"{name.removeprefix('store.')}: progress must be True, False or"
        with pytest.raises(TypeError, match=message):
            call(progress="yes")


def test_nothing_else_has_progress(calls):
    """Each is called above, and each documents its argument in the same words."""
    found = {
        name.removeprefix("sparsejax."): parameters["progress"]
        for name, function in public_names.FUNCTIONS.items()
        if "progress" in (parameters := public_names.parameters_of(function))
    }
    names = set(found)
    assert names == calls.keys()
    for name, parameter in found.items():
        assert parameter.default is False and parameter.annotation == "Progress", name
        assert parameter.kind == parameter.KEYWORD_ONLY, name


# ------------------------------------------------------------------ the reporter


def test_a_bar(capsys):
    pytest.importorskip("tqdm")
    with _progress.progress_reporter("f", True, " rows") as report:
        report(1, 4)
        report(4, 4)
    assert "f: 100%" in capsys.readouterr().err
