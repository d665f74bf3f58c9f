"""Random cases: `python -m tests.tools.fuzz programs --seconds 60 --seed 0`.

A kind of case is a module: `fuzz_programs` (gradients), `fuzz_models` (containers,
types, sizes), `fuzz_products`, `fuzz_chains` (optimizers), `fuzz_trees` (jax.tree.map),
`changes_model` (a store) and `index_model` (HashIndex).

Each seed stands for 50 cases, or 10 chains, and gives the same ones again. A failure is
printed as short as hypothesis can make it in half a minute. A seed of `changes` and
`index` is one long sequence of operations, on sparsejax and on a model of it.
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


# How many cases a seed stands for; a model is compared once.
KINDS = {"programs": 50, "models": 50, "products": 50, "chains": 10, "trees": 50}
KINDS |= {"changes": 1, "index": 1}
MAX_BYTES = 3 << 30  # of compiled programs


def search(kind, seed, examples, seconds=30.0):
    """Checks random cases of one of `KINDS`, and makes a failure shorter for `seconds`.

    Returns:
      A Counter by mode and by what `check` returned, and () or the shortest failure:
      `(case, mode, error)`.
    """
    counts = collections.Counter()
    if KINDS[kind] == 1:
        try:
            found = importlib.import_module(f"{kind}_model").compare(seed)
        except Exception as error:
            return counts, (f"compare({seed})", "model", error)
        return collections.Counter({("model", k): n for k, n in found.items()}), ()
    module = importlib.import_module(f"fuzz_{kind}")
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
        max_examples=examples,
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


def in_words(counts):
    total = collections.Counter()
    for (_, what), n in counts.items():
        total[what] += n
    return ", ".join(f"{n:,} {what}" for what, n in sorted(total.items()))


def main():
    from conftest import resident_bytes

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("kind", nargs="?", choices=KINDS, default="programs")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    start, seed, failures = time.monotonic(), options.seed, 0
    total = collections.Counter()
    while time.monotonic() < start + options.seconds:
        counts, failure = search(options.kind, seed, KINDS[options.kind])
        total += counts
        if failure:
            failures += 1
            case, how, error = failure
            message = str(error).strip()[:600]
            print(f"seed {seed}, {how}: {case}\n  {type(error).__name__}: {message}")
        seed += 1
        print(f"{in_words(total)} in {time.monotonic() - start:.0f} s", flush=True)
        if resident_bytes() > MAX_BYTES:
            jax.clear_caches()
    print(f"{options.kind}, seeds {options.seed} to {seed - 1}: {failures} failures")
    raise SystemExit(bool(failures))


if __name__ == "__main__":
    main()
