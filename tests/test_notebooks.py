"""The notebooks run from top to bottom, and are kept as they ran."""

import ast
import re
import sys
import tomllib

import nbformat
import pytest

import pages
from notebooks import execute


PATHS = sorted(execute.HERE.glob("*.ipynb"))
NAMES = [path.stem for path in PATHS]
INSTALL = re.compile(r'%pip install -q "sparsejax\[([a-z,]+)\]"')


@pytest.fixture(params=PATHS, ids=NAMES)
def kept(request):
    return nbformat.read(request.param, as_version=4)


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def outputs(notebook):
    return [output for cell in code_cells(notebook) for output in cell.outputs]


@pytest.mark.slow
@pytest.mark.once
@pytest.mark.parametrize("path", PATHS, ids=NAMES)
def test_runs(path, tmp_path):
    """In a fresh kernel, quietly, with as many figures as are kept."""
    ran = execute.execute(path, str(tmp_path))
    noise = [x.text for x in outputs(ran) if x.get("name") == "stderr"]
    assert not noise
    kept = nbformat.read(path, as_version=4)
    assert len(figures(ran)) == len(figures(kept)) > 0


def figures(notebook):
    return [x for x in outputs(notebook) if "image/png" in x.get("data", {})]


def test_there_are_six():
    assert [name[:2] for name in NAMES] == ["01", "02", "03", "04", "05", "06"]


def test_is_short(kept):
    assert sum(len(cell.source.splitlines()) for cell in kept.cells) < 300


def test_is_kept_as_it_ran(kept):
    counts = [cell.execution_count for cell in code_cells(kept)]
    assert counts == list(range(1, len(counts) + 1))
    text = str(
        [x.get("text") or x.get("data", {}).get("text/plain") for x in outputs(kept)]
    )
    assert not re.search(r"/(root|home|tmp|Users|work)/", text)
    assert not re.search("Warning|stderr", text)


def test_installs_on_colab_only(kept, monkeypatch):
    """The first cell, run with pip replaced: once as on Colab, once as elsewhere."""
    cell = kept.cells[0]
    (extras,) = INSTALL.findall(cell.source)
    project = tomllib.loads((pages.ROOT / "pyproject.toml").read_text())
    assert set(extras.split(",")) <= set(project["project"]["optional-dependencies"])

    code = INSTALL.sub("installed.append(1)", cell.source)
    ast.parse(code)
    for colab in (False, True):
        installed = []
        if colab:
            monkeypatch.setitem(sys.modules, "google.colab", ast)
        exec(code, {"installed": installed})
        assert len(installed) == colab
