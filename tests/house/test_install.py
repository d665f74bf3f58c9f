"""`pip install` brings sparsejax, and keeps Colab's installed packages."""

import ast
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import tomllib
import zipfile

import nbformat
import pytest

import pages


PROJECT = tomllib.loads((pages.ROOT / "pyproject.toml").read_text())["project"]
COLAB = pages.ROOT / "tests" / "colab.txt"


def _versions(lines):
    """`name==version` and `name>=version` as a dict."""
    found = [re.match(r"([\w-]+)[=>]=([\d.]+)$", line.strip()) for line in lines]
    return {m[1]: tuple(map(int, m[2].split("."))) for m in found if m}


def test_the_floors_are_what_colab_has():
    """Else pip would replace jaxlib there, and the plugin for its GPU would not fit."""
    colab = _versions(COLAB.read_text().splitlines())
    assert {"jax", "jaxlib", "flax", "optax"} <= colab.keys()
    extras = PROJECT["optional-dependencies"].values()
    floors = _versions([*PROJECT["dependencies"], *(x for own in extras for x in own)])
    for name, version in colab.items():
        assert floors[name] <= version, name
    assert floors["jax"] == floors["jaxlib"] == colab["jax"], "the lowest is tested"


def test_no_extra_replaces_jax():
    for name, own in PROJECT["optional-dependencies"].items():
        if name not in ("cuda12", "cuda13", "tpu"):
            assert not [x for x in own if re.match(r"jax(lib)?\b", x)], name


def test_the_readme_of_a_release_has_no_relative_links():
    """Here they are relative, so that the site can follow them."""
    text = (pages.ROOT / "README.md").read_text()
    tool = tomllib.loads((pages.ROOT / "pyproject.toml").read_text())["tool"]
    for rule in tool["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"][
        "substitutions"
    ]:
        text = re.sub(rule["pattern"], rule["replacement"], text)
    links = re.findall(r"(!?)\[[^\]]*\]\(([^)\s]+)\)", text)
    home = PROJECT["urls"]["Repository"]
    raw = home.replace("github.com", "raw.githubusercontent.com")
    assert len(links) > 15
    for image, link in links:
        base = f"{raw}/main/" if image else f"{home}/blob/main/"
        assert link.startswith(base), link
        assert (pages.ROOT / link.removeprefix(base).partition("#")[0]).exists(), link


def test_the_page_names_every_extra():
    text = (pages.ROOT / "docs" / "install.md").read_text()
    for name in PROJECT["optional-dependencies"]:
        assert re.search(rf"^\|.*`{name}`", text, re.MULTILINE), name


def test_what_is_missing_is_named_with_the_extra_that_brings_it():
    package, found = pages.ROOT / "sparsejax", []
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Raise) or not isinstance(node.exc, ast.Call):
                continue
            if ast.unparse(node.exc.func) in ("ImportError", "ModuleNotFoundError"):
                words = [
                    x.value for x in ast.walk(node.exc) if isinstance(x, ast.Constant)
                ]
                found.append((path, "".join(x for x in words if isinstance(x, str))))
    assert len(found) > 5
    for path, said in found:
        extra = re.search(r"sparsejax\[(\w+)\]", said)
        assert extra and extra[1] in PROJECT["optional-dependencies"], (path, said)


@pytest.mark.parametrize("folder", [".", "docs", "notebooks", "sparsejax"])
def test_what_is_shown_runs_on_the_lowest_jax(folder):
    """There `jax.jit` and `jax.shard_map` are called with the function first."""
    if folder == ".":  # and not the packages installed there
        paths = list(pages.ROOT.glob("*.md"))
    else:
        paths = [p for p in (pages.ROOT / folder).rglob("*") if p.suffix in _SHOWN]
    wrong = re.compile(
        r"@jax\.(jit|shard_map|checkpoint|vmap)\(|jax\.(pcast|reshard)\b"
    )
    assert paths
    for path in paths:
        assert not wrong.findall(path.read_text()), path


_SHOWN = (".py", ".md", ".ipynb")

NOTEBOOK = """
import json, sys
import nbclient, nbformat

notebook = nbformat.read(sys.argv[1], as_version=4)
nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3").execute()
nbformat.write(notebook, sys.argv[1])
"""


@pytest.mark.slow
def test_a_notebook_installs_and_runs_on_colab(tmp_path):
    """In a new environment with Colab's releases, from a wheel of this checkout.

    It installs 100 packages, so it runs only by `make test-colab`.
    """
    if "TEST_COLAB" not in os.environ:
        pytest.skip("runs by `make test-colab`")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    probe = _run([*pip, "download", "-q", "--no-deps", "-d", tmp_path, "-r", COLAB])
    if probe.returncode:
        pytest.skip(f"pip cannot download Colab's releases here: {probe.stderr}")
    _check([*pip, "wheel", "-q", "--no-deps", "-w", tmp_path, pages.ROOT])
    (wheel,) = tmp_path.glob("sparsejax-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (x for x in archive.namelist() if x.endswith(".dist-info/METADATA"))
        metadata = archive.read(name).decode()
    assert f"]({PROJECT['urls']['Repository']}/blob/main/docs/tutorial.md)" in metadata

    _check([sys.executable, "-m", "venv", tmp_path / "colab"])
    python = tmp_path / "colab" / "bin" / "python"
    pip = [python, "-m", "pip", "--disable-pip-version-check"]
    own = ["matplotlib", "ipykernel", "nbclient"]
    _check([*pip, "install", "-q", "-r", COLAB, *own])
    before = _installed(pip)

    path = tmp_path / "notebook.ipynb"
    notebook = nbformat.read(
        pages.ROOT / "notebooks" / "01_quickstart.ipynb", as_version=4
    )
    source = f'SOURCE = "sparsejax[viz] @ {wheel.as_uri()}"'
    first = notebook.cells[0]
    first.source, lines = re.subn(r"(?m)^SOURCE = .*$", source, first.source)
    assert lines == 1
    nbformat.write(notebook, path)
    _check([python, "-c", NOTEBOOK, path])

    after = _installed(pip)
    assert after.keys() - before.keys() == {"sparsejax"}
    assert {name: after[name] for name in before} == before
    (printed,) = [
        x["text"] for x in nbformat.read(path, as_version=4).cells[2].outputs
    ] or [""]
    assert "Warning" not in printed


def _installed(pip):
    listed = json.loads(_check([*pip, "list", "--format=json"]).stdout)
    return {x["name"]: x["version"] for x in listed}


def _check(command):
    done = _run(command)
    assert not done.returncode, done.stderr[-4000:]
    return done


def _run(command):
    # A reader's environment: without this checkout, and without the tests' flags.
    hidden = ("PYTHONPATH", "XLA_FLAGS", "VIRTUAL_ENV")
    env = {name: x for name, x in os.environ.items() if name not in hidden}
    return subprocess.run(
        [str(part) if isinstance(part, pathlib.Path) else part for part in command],
        cwd=tempfile.gettempdir(),  # Python also imports from its current folder
        capture_output=True,
        text=True,
        env=env,
        check=False,
    )
