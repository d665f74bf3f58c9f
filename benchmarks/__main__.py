"""`python -m benchmarks [NAME] [OPTIONS]`: runs one of the benchmarks.

Without a name it is the first one, `sweep`; its `--help` tells the options.
"""

import importlib
import sys
from collections.abc import Sequence

from benchmarks import timing


NAMES = ("sweep", "models", "races", "step", "ops", "store", "sharded", "exact_loss")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark that the first argument names; the rest are its options."""
    argv = sys.argv[1:] if argv is None else list(argv)
    name, rest = NAMES[0], argv
    if argv and not argv[0].startswith("-"):
        name, *rest = argv
    if name not in NAMES:
        known = ", ".join(NAMES)
        print(f"There is no benchmark {name!r}; there is {known}", file=sys.stderr)
        return 2
    file = f"{name}.__main__" if name in {"models", "races"} else name
    benchmark = importlib.import_module(f"benchmarks.{file}")
    if hasattr(benchmark, "main"):
        return benchmark.main(rest)
    return timing.run(name, benchmark, rest)


if __name__ == "__main__":
    sys.exit(main())
