"""Random programs and optimizers: `python -m tests.tools.fuzz --seconds 60 --seed 0`.

    python -m tests.tools.fuzz programs --seconds 60    gradients, see fuzz_programs.py
    python -m tests.tools.fuzz models --seconds 60      containers, types, sizes
    python -m tests.tools.fuzz products --seconds 60    products of rows
    python -m tests.tools.fuzz chains --seconds 60      optimizers, see fuzz_chains.py
    python -m tests.tools.fuzz trees --seconds 60       jax.tree.map, see fuzz_trees.py
    python -m tests.tools.fuzz changes --seconds 60     a store, see changes_model.py
    python -m tests.tools.fuzz index --seconds 60       HashIndex, see index_model.py

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
    """Checks random cases.

    Args:
      kind: one of `KINDS`.
      seed: which ones.
      examples: how many.
      seconds: for making the first failure shorter.

    Returns:
      A Counter by mode and by what `check` returned, and None or the shortest failure:
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
        suppress_health_check=[
            hypothesis.HealthCheck.too_slow,
            hypothesis.HealthCheck.data_too_large,
            hypothesis.HealthCheck.filter_too_much,
        ],
    )
    run_all = settings(hypothesis.seed(seed)(hypothesis.given(module.cases)(one)))
    try:
        run_all()
    except Exception:
        if not shortest:
            raise
    return counts, tuple(shortest)


def in_words(counts):
    """The counts over all modes, and then by mode."""
    total, modes = collections.Counter(), collections.defaultdict(list)
    for (how, what), count in sorted(counts.items()):
        total[what] += count
        modes[how].append(f"{count:,} {what}")
    by_mode = "; ".join(f"{how}: {', '.join(found)}" for how, found in modes.items())
    return ", ".join(f"{n:,} {what}" for what, n in total.items()), by_mode


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
        print(f"{in_words(total)[0]} in {time.monotonic() - start:.0f} s", flush=True)
        if resident_bytes() > MAX_BYTES:
            jax.clear_caches()
    in_all, by_mode = in_words(total)
    print(f"{options.kind}, seeds {options.seed} to {seed - 1}: {in_all}", end="")
    print(f" ({by_mode}); {failures} failures")
    raise SystemExit(bool(failures))


if __name__ == "__main__":
    main()
