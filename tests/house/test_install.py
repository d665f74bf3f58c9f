"""`pip install` brings sparsejax, and keeps Colab's installed packages."""

import ast
import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib

import nbformat
import pytest

import pages


PROJECT = tomllib.loads((pages.ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
COLAB = pages.ROOT / "tests" / "colab.txt"


def _versions(lines):
    """`name==version` and `name>=version` as a dict."""
    found = [re.match(r"([\w-]+)[=>]=([\d.]+)$", line.strip()) for line in lines]
    return {m[1]: tuple(map(int, m[2].split("."))) for m in found if m}


def test_the_floors_are_what_colab_has():
    """Else pip would replace jaxlib there, and the plugin for its GPU would not fit."""
    colab = _versions(COLAB.read_text().splitlines())
    assert {"jax", "jaxlib", "flax", "optax"} <= colab.keys()
    floors = _versions([*PROJECT["dependencies"], *sum(EXTRAS.values(), [])])
    for name, version in colab.items():
        assert floors[name] <= version, name
    assert floors["jax"] == floors["jaxlib"] == colab["jax"], "the lowest is tested"
    for name in EXTRAS.keys() - {"cuda12", "cuda13", "tpu"}:
        assert not [x for x in EXTRAS[name] if re.match(r"jax(lib)?\b", x)], name


def test_extras_are_on_the_page_and_in_errors_of_missing_packages():
    text = (pages.ROOT / "docs" / "install.md").read_text()
    for name in EXTRAS:
        assert re.search(rf"^\|.*`{name}`", text, re.MULTILINE), name
    count = 0
    for path in (pages.ROOT / "sparsejax").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            raised = isinstance(node, ast.Raise) and ast.unparse(node)
            if raised and re.match(r"raise (Import|ModuleNotFound)Error\(", raised):
                extra = re.search(r"sparsejax\[(\w+)\]", raised)
                assert extra and extra[1] in EXTRAS, (path, raised)
                count += 1
    assert count > 5


@pytest.mark.parametrize(
    "pattern", ["*.md", "docs/**/*", "notebooks/*", "sparsejax/**/*"]
)
def test_what_is_shown_runs_on_the_lowest_jax(pattern):
    """There `jax.jit` and `jax.shard_map` are called with the function first."""
    suffixes = ".py", ".md", ".ipynb"
    paths = [path for path in pages.ROOT.glob(pattern) if path.suffix in suffixes]
    newer = r"@jax\.(jit|shard_map|checkpoint|vmap)\(|jax\.(pcast|reshard)\b"
    assert paths
    for path in paths:
        assert not re.search(newer, path.read_text()), path


NOTEBOOK = """
import sys
import nbclient, nbformat

notebook = nbformat.read(sys.argv[1], as_version=4)
nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3").execute()
nbformat.write(notebook, sys.argv[1])
"""


@pytest.mark.slow
@pytest.mark.skipif("TEST_COLAB" not in os.environ, reason="runs by `make test-colab`")
def test_a_notebook_installs_and_runs_on_colab(tmp_path):
    """In a new environment with Colab's releases, from a wheel of this checkout."""
    _run(sys.executable, "-m", "venv", tmp_path / "colab")
    python = tmp_path / "colab" / "bin" / "python"
    _pip(python, "wheel", "--no-deps", "-w", tmp_path, pages.ROOT)
    (wheel,) = tmp_path.glob("sparsejax-*.whl")
    _pip(python, "install", "-r", COLAB, "matplotlib", "ipykernel", "nbclient")
    before = json.loads(_pip(python, "list", "--format=json"))

    notebook = nbformat.read(
        pages.ROOT / "notebooks" / "01_quickstart.ipynb", as_version=4
    )
    source = f'SOURCE = "sparsejax[viz] @ {wheel.as_uri()}"'
    first = notebook.cells[0]
    first.source, lines = re.subn(r"(?m)^SOURCE = .*$", source, first.source)
    assert lines == 1
    nbformat.write(notebook, tmp_path / "notebook.ipynb")
    _run(python, "-c", NOTEBOOK, tmp_path / "notebook.ipynb")

    after = json.loads(_pip(python, "list", "--format=json"))
    assert [x for x in after if x["name"] != "sparsejax"] == before != after
    ran = nbformat.read(tmp_path / "notebook.ipynb", as_version=4)
    assert "Warning" not in str(ran.cells[2].outputs)


def _pip(python, command, *args):
    return _run(python, "-m", "pip", "--disable-pip-version-check", command, *args)


def _run(*command):
    # A reader's environment: without this checkout, and without the tests' flags.
    hidden = ("PYTHONPATH", "XLA_FLAGS", "VIRTUAL_ENV")
    done = subprocess.run(
        [str(part) for part in command],
        cwd=tempfile.gettempdir(),  # Python also imports from its current folder
        capture_output=True,
        text=True,
        env={name: x for name, x in os.environ.items() if name not in hidden},
        check=False,
    )
    assert not done.returncode, done.stderr[-4000:]
    return done.stdout
