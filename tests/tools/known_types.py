"""Fails unless pyright knows the types of all public names: `make types` runs this."""

import json
import os
import pathlib
import subprocess
import sys
import tempfile


def main() -> None:
    python = pathlib.Path(sys.executable)
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [python, "-m", "pyright", "--outputjson", "--verifytypes", "sparsejax"]
            + ["--ignoreexternal"],
            cwd=folder,  # elsewhere, so that it sees the installed sparsejax
            env={**os.environ, "PATH": f"{python.parent}:{os.environ.get('PATH', '')}"},
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.stdout, done.stderr
    report = json.loads(done.stdout)
    symbols = report["typeCompleteness"]["symbols"]
    assert len(symbols) > 500, report["generalDiagnostics"]
    unknown = [
        f"{symbol['name']}: {diagnostic['message']}"
        for symbol in symbols
        if symbol["isTypeAmbiguous"] or not symbol["isTypeKnown"]
        for diagnostic in symbol["diagnostics"]
        if "custom_vjp" not in diagnostic["message"]  # JAX's own attribute
    ]
    if unknown:
        sys.exit("\n".join(unknown))
    print(f"the types of {len(symbols):,} names are known")


if __name__ == "__main__":
    main()
