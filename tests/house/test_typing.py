"""Pyright knows the types of all public names; `make types` runs this too."""

import json
import os
import pathlib
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_types_of_all_public_names_are_known(tmp_path):
    pytest.importorskip("pyright")
    python = pathlib.Path(sys.executable)
    done = subprocess.run(
        [python, "-m", "pyright", "--outputjson", "--verifytypes", "sparsejax"]
        + ["--ignoreexternal"],
        cwd=tmp_path,  # elsewhere, so that it sees the installed sparsejax
        env={**os.environ, "PATH": f"{python.parent}:{os.environ.get('PATH', '')}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout, done.stderr
    found = json.loads(done.stdout)
    symbols = found["typeCompleteness"]["symbols"]
    assert len(symbols) > 500, found["generalDiagnostics"]
    wrong = [
        f"{symbol['name']}: {diagnostic['message']}"
        for symbol in symbols
        if symbol["isTypeAmbiguous"] or not symbol["isTypeKnown"]
        for diagnostic in symbol["diagnostics"]
        if "custom_vjp" not in diagnostic["message"]  # JAX's own attribute
    ]
    assert not wrong, "\n".join(wrong)
