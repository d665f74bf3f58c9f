"""The notebooks run from top to bottom, and are kept as they ran."""

import functools
import importlib.util
import os
import re
import tomllib

import nbformat
import pytest

import pages
from notebooks import execute


PATHS = sorted(execute.HERE.glob("*.ipynb"))
PROJECT = tomllib.loads((pages.ROOT / "pyproject.toml").read_text())["project"]
INSTALL = re.compile(r"sparsejax\[([a-z,]+)\]")


@pytest.fixture(params=PATHS, ids=lambda path: path.stem)
def kept(request):
    return nbformat.read(request.param, as_version=4)


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def outputs(notebook):
    return [output for cell in code_cells(notebook) for output in cell.outputs]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The notebooks, each run when it is asked for, in the order of `PATHS`."""
    # On the one device that a reader has; else as the tests, which compile faster.
    flags = os.environ["XLA_FLAGS"].split()
    flags = [x for x in flags if "device_count" not in x]
    folder = tmp_path_factory.mktemp("notebooks")
    return execute.execute(PATHS, str(folder), " ".join(flags))


@pytest.mark.slow
def test_all_run(runs):
    """Quietly, to the stated figures, with as many pictures as are kept.

    One test, because all run in one kernel.
    """
    for path, ran in zip(PATHS, runs, strict=True):
        noise = [x.text for x in outputs(ran) if x.get("name") == "stderr"]
        assert not noise, path.name
        kept = nbformat.read(path, as_version=4)
        assert len(figures(ran)) == len(figures(kept)) > 0, path.name
        stated = [cell for cell in code_cells(ran) if "\nassert " in cell.source]
        assert stated, path.name


def figures(notebook):
    return [x for x in outputs(notebook) if "image/png" in x.get("data", {})]


def test_is_kept_as_it_ran_and_opens_in_colab(kept, request):
    counts = [cell.execution_count for cell in code_cells(kept)]
    assert counts == list(range(1, len(counts) + 1))
    text = str(
        [x.get("text") or x.get("data", {}).get("text/plain") for x in outputs(kept)]
    )
    assert not re.search(r"/(root|home|tmp|Users|work)/|Warning|stderr", text)
    home = PROJECT["urls"]["Repository"].removeprefix("https://github.com/")
    page = f"https://colab.research.google.com/github/{home}/blob/main/notebooks"
    name = request.node.callspec.id
    assert f"({page}/{name}.ipynb)" in kept.cells[1].source


def test_installs_what_is_missing(kept, monkeypatch):
    """The first cell, run with pip replaced: with nothing missing, and with something.

    `tests/house/test_install.py` runs one for real.
    """
    cell = kept.cells[0]
    (extras,) = set(INSTALL.findall(cell.source))
    assert {*extras.split(",")} <= PROJECT["optional-dependencies"].keys()
    pip = '%pip install -q "$SOURCE"'
    assert cell.source.count(pip) == 1
    code = cell.source.replace(pip, "installed.append(SOURCE)")
    for missing in (None, "sparsejax", "matplotlib"):
        installed = []
        find = lambda name, missing: None if name == missing else name
        find = functools.partial(find, missing=missing)
        monkeypatch.setattr(importlib.util, "find_spec", find)
        exec(code, {"installed": installed})
        assert installed == ([f"sparsejax[{extras}]"] if missing else [])
