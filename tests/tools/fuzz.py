"""Random cases: `python -m tests.tools.fuzz programs --seconds 60 --seed 0`.

A kind is a module. Most have hypothesis draw cases, 50 or 10 a seed, and a failure is
printed as short as it can be made in half a minute. The others run one sequence a seed:
operations on a store or an index and on a model of it, damaged files, or kills. A seed
gives the same cases again, only a kill comes at another moment.
"""

import argparse
import collections
import importlib
import math
import pathlib
import sys
import time
from typing import Any


if __name__ == "__main__":  # before JAX is imported
    here = pathlib.Path(__file__).parent
    sys.path[:0] = [str(here), str(here.parent)]
    import conftest  # noqa: F401

import hypothesis
import jax


MODULES = {
    "programs": "fuzz_programs",  # gradients
    "models": "fuzz_models",  # gradients: containers, types, sizes
    "chains": "fuzz_chains",  # optimizers
    "trees": "fuzz_trees",  # jax.tree.map
    "changes": "changes_model",  # a store and those that follow it
    "index": "index_model",  # HashIndex
    "damage": "damage",  # files
    "kills": "kills",  # of processes that write files
}
MAX_BYTES = 3 << 30  # of compiled programs


def search(kind, seed, examples=None, seconds=30.0):
    """Checks the random cases of a seed, and makes a failure shorter for `seconds`.

    Returns:
      A Counter by mode and by what `check` returned, and () or the shortest failure:
      `(case, mode, error)`.
    """
    module, counts = importlib.import_module(MODULES[kind]), collections.Counter()
    if not hasattr(module, "cases"):
        try:
            outcomes = module.compare(seed)
        except Exception as error:
            return counts, (f"compare({seed})", kind, error)
        return collections.Counter({(kind, k): n for k, n in outcomes.items()}), ()
    shortest: list[Any] = []
    until = math.inf

    def one(case):
        nonlocal until
        if time.monotonic() > until:
            return
        what, how = case
        try:
            counts[how, module.check(what, how)] += 1
        except Exception as error:
            counts[how, "failed"] += not shortest
            until = min(until, time.monotonic() + seconds)
            if not shortest or len(str(what)) <= len(str(shortest[0])):
                shortest[:] = what, how, error
            raise

    settings = hypothesis.settings(
        max_examples=examples or (10 if kind == "chains" else 50),
        database=None,
        deadline=None,
        suppress_health_check=list[Any](hypothesis.HealthCheck),
    )
    run_all = settings(hypothesis.seed(seed)(hypothesis.given(module.cases)(one)))
    try:
        run_all()
    except Exception:
        if not shortest:
            raise
    return counts, tuple(shortest)


def main():
    from conftest import resident_bytes

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("kind", nargs="?", choices=MODULES, default="programs")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    start, seed, failures = time.monotonic(), options.seed, 0
    total = collections.Counter()
    while seed == options.seed or time.monotonic() < start + options.seconds:
        counts, failure = search(options.kind, seed)
        for (_, outcome), n in counts.items():
            total[outcome] += n
        if failure:
            failures += 1
            case, how, error = failure
            message = str(error).strip()[:2000]
            print(f"seed {seed}, {how}: {case}\n  {type(error).__name__}: {message}")
        seed += 1
        outcomes = ", ".join(f"{n:,} {what}" for what, n in sorted(total.items()))
        print(f"{outcomes} in {time.monotonic() - start:.0f} s", flush=True)
        if resident_bytes() > MAX_BYTES:
            jax.clear_caches()
    print(f"{options.kind}, seeds {options.seed} to {seed - 1}: {failures} failures")
    raise SystemExit(bool(failures))


if __name__ == "__main__":
    main()
