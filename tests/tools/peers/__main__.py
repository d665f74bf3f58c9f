"""Runs a peer's own tests with our functions in place of theirs.

    python -m tests.tools.peers jax CHECKOUT [pytest arguments]
    python -m tests.tools.peers optax CHECKOUT [pytest arguments]
    python -m tests.tools.peers jax CHECKOUT --theirs    # as they are, to compare

CHECKOUT is a working copy of the peer's repository at the release that is installed.
Nothing is fetched. `stand_ins` says what takes the place of what, `differences` which
tests fail on purpose, each with its reason.
"""

import argparse
import os
import pathlib
import sys

import pytest

from tests.tools.peers import plugin


FILES = {
    "jax": (
        "tests/lax_numpy_indexing_test.py",
        "tests/lax_autodiff_test.py",
        "tests/api_test.py",
        "tests/custom_api_test.py",
    ),
    "optax": (
        "optax/_src/transform_test.py",
        "optax/_src/alias_test.py",
        "optax/_src/combine_test.py",
        "optax/transforms",
        "optax/schedules/_inject_test.py",
        "optax/contrib/_common_test.py",
    ),
}


def main() -> int:
    """Runs the tests; the exit code is pytest's."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.tools.peers", description="Runs a peer's own tests."
    )
    parser.add_argument("peer", choices=FILES)
    parser.add_argument("checkout", type=pathlib.Path)
    parser.add_argument("--theirs", action="store_true", help="replace nothing")
    options, rest = parser.parse_known_args()
    checkout = options.checkout.resolve()
    files = [checkout / name for name in FILES[options.peer]]
    if missing := [str(f) for f in files if not f.exists()]:
        parser.error(f"{checkout} is no checkout of {options.peer}: no {missing[0]}")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("JAX_NUM_GENERATED_CASES", "10")
    # Thousands of small programs: to optimize them takes longer than to run them.
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
    sys.argv = sys.argv[:1]  # absl reads it, too
    return pytest.main(
        [
            *(f"--rootdir={checkout}", "-c", os.devnull, "-p", "no:cacheprovider"),
            *("--import-mode=importlib", "-q", "--tb=short", "-o"),
            *("python_files=*_test.py", *map(str, files), *rest),
        ],
        plugins=[plugin.Plugin(options.peer, replace=not options.theirs)],
    )


if __name__ == "__main__":
    sys.exit(main())
