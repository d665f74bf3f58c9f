"""Builds what is released, and tries it in a fresh environment: `make dist`.

The wheel is built from the sdist, both are checked by twine, and neither has tests or
data inside. The wheel is installed into a new environment with its dependencies alone,
and the program of the README runs there. `make dist ARGS=dist` keeps both in `dist`.
"""

import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile


ROOT = pathlib.Path(__file__).parent.parent.parent
sys.path.append(str(ROOT / "tests" / "docs"))

import pages  # noqa: E402


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# Anything else in a release is a mistake.
OF_THE_PACKAGE = r"sparsejax/([\w/]+\.py|py\.typed|desc/var_desc\.proto)"
OF_THE_SDIST = (
    OF_THE_PACKAGE
    + r"|\w+\.(md|cff|toml)|LICENSE|\.gitignore|PKG-INFO|docs/images/\w+\.png"
)
OF_THE_WHEEL = OF_THE_PACKAGE + r"|sparsejax-[^/]+\.dist-info/[\w/]+"

CHECK = """
import importlib.util, pathlib, sys
import numpy as np

moved = np.flatnonzero(np.any(np.asarray(params["items"]) != 0, axis=1))
assert moved.tolist() == [4, 7], moved
assert pathlib.Path(sj.__file__).is_relative_to(sys.prefix), sj.__file__
assert importlib.util.find_spec("flax") is None, "not a dependency"
print("sparsejax", sj.__version__, "with jax", jax.__version__)
"""


def main(keep: str | None = None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder)
        _run(sys.executable, "-I", "-m", "build", "-o", out, ROOT)
        (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
        _run(sys.executable, "-I", "-m", "twine", "check", "--strict", sdist, wheel)
        with tarfile.open(sdist) as archive:
            names = [x.name.partition("/")[2] for x in archive if x.isfile()]
        _check(sdist, names, OF_THE_SDIST)
        with zipfile.ZipFile(wheel) as archive:
            _check(wheel, archive.namelist(), OF_THE_WHEEL)
        stem = f"sparsejax-{PROJECT['version']}"
        assert sdist.name == f"{stem}.tar.gz" and wheel.name.startswith(stem + "-")

        _run(sys.executable, "-m", "venv", out / "env")
        python = out / "env" / "bin" / "python"
        pip = ("-m", "pip", "install", "-q", "--disable-pip-version-check")
        _run(python, *pip, "--no-compile", wheel)
        blocks = pages.blocks(ROOT / "README.md")
        (code,) = (pages.side(x, "+") for x in blocks if x.language == "diff")
        print(_run(python, "-I", "-c", code + CHECK), end="")
        if keep:
            (ROOT / keep).mkdir(exist_ok=True)
            for path in (sdist, wheel):
                shutil.copy(path, ROOT / keep)


def _check(path: pathlib.Path, names: list[str], pattern: str) -> None:
    wrong = [name for name in names if not re.fullmatch(pattern, name)]
    assert not wrong, f"{path.name} has {wrong}"
    assert path.stat().st_size < 2_000_000, path.stat().st_size
    print(f"{path.name}: {len(names)} files, {path.stat().st_size:,} bytes")


def _run(*command: object) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))[:200]}\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    main(*sys.argv[1:])
