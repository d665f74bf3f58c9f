"""Types: pyright on the public names. Code of a user, `typed_user.py`, runs.

`make types` checks that code in strict mode.
"""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest

import typed_user


needs_pyright = pytest.mark.skipif(
    importlib.util.find_spec("pyright") is None,
    reason="pyright is not installed: pip install 'sparsejax[dev]'",
)


def _pyright(folder, *arguments):
    """The JSON of pyright, run elsewhere so that it sees the installed sparsejax."""
    python = pathlib.Path(sys.executable)
    path = os.pathsep.join([str(python.parent), os.environ.get("PATH", "")])
    done = subprocess.run(
        [python, "-m", "pyright", "--outputjson", *arguments],
        cwd=folder,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout, done.stderr
    return json.loads(done.stdout)


def _shown(diagnostics):
    # A diagnostic of a base class has no range.
    line = lambda d: d["range"]["start"]["line"] + 1 if "range" in d else 0
    return "\n".join(f"{d['file']}:{line(d)}: {d['message']}" for d in diagnostics)


@pytest.mark.slow
@pytest.mark.usefixtures("loose_promotion")
def test_user_code_runs(tmp_path):
    pytest.importorskip("grain")
    typed_user.main(tmp_path)


@pytest.mark.slow
@needs_pyright
def test_types_of_all_public_names_are_known(tmp_path):
    found = _pyright(tmp_path, "--verifytypes", "sparsejax", "--ignoreexternal")
    symbols = found["typeCompleteness"]["symbols"]
    assert len(symbols) > 500, found["generalDiagnostics"]
    wrong = [
        diagnostic
        for symbol in symbols
        if symbol["isTypeAmbiguous"] or not symbol["isTypeKnown"]
        for diagnostic in symbol["diagnostics"]
        if "custom_vjp" not in diagnostic["message"]  # JAX's own attribute
    ]
    assert not wrong, _shown(wrong)
