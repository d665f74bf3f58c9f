"""Fair timing on a machine that also does other work, and how numbers are reported.

- Programs take turns, so that other work of the machine affects all of them. Each round
  has another order, because a program leaves its caches and threads to the next one.
  Reported are medians and the ratio of the medians. Compiling is timed separately.
- A turn begins when the process is idle: a program may still free gigabytes of
  temporaries after its results are ready. The first run of a turn is not timed: it
  brings the caches into the state that this program leaves them in, as in a training
  loop. The second run is timed.
- A run starts with new inputs that are already on the device, and ends when its results
  are ready.
- The state is passed from one program to the next: every step donates it and returns
  the next one. So there is one copy of tables that may fill most of the memory, and all
  programs work on the same memory pages.
"""

import argparse
import itertools
import json
import os
import pathlib
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np


# ------------------------------------------------------------------ timing


class Compiled(NamedTuple):
    """A compiled program, the seconds of tracing and compiling, its temporaries."""

    run: Callable[..., Any]
    seconds: float
    temp_bytes: int  # -1 if the backend does not tell


def compile_apart(jitted: Any, *args: Any) -> Compiled:
    """Compiles a jitted function for `args`, arrays or their shapes."""
    start = time.perf_counter()
    compiled = jitted.lower(*args).compile()
    seconds = time.perf_counter() - start
    memory = compiled.memory_analysis()
    return Compiled(compiled, seconds, getattr(memory, "temp_size_in_bytes", -1))


def alternate(
    programs: Mapping[str, Callable[..., Any]],
    state: Any,
    inputs: Callable[[], Any],
    *,
    repeats: int,
    seconds: float = float("inf"),
) -> tuple[dict[str, list[float]], Any]:
    """Times programs in turn.

    Args:
      programs: by name, `(state, inputs) -> (state, result)`. They may donate `state`.
      state: for the first program; each other one gets what the one before returned.
      inputs: makes new inputs; called before each run and not timed.
      repeats: how often each program is timed, at most.
      seconds: no new round after this time, once each program was timed 3 times.

    Returns:
      Seconds of each timed run, by name; and the last state.
    """
    times: dict[str, list[float]] = {name: [] for name in programs}
    began = time.perf_counter()
    for number in range(repeats):
        if number >= 3 and time.perf_counter() - began > seconds:
            break
        order = list(programs.items())
        random.Random(number).shuffle(order)
        for name, program in order:
            _wait_for_rest()
            for _ in range(2):
                given = jax.block_until_ready(inputs())
                start = time.perf_counter()
                state, _ = jax.block_until_ready(program(state, given))
                taken = time.perf_counter() - start
            times[name].append(taken)
    return times, state


def _wait_for_rest(step: float = 0.002) -> None:
    """Waits until no thread of this process is running, at most five seconds."""
    for _ in range(int(5.0 / step)):
        before = time.process_time()
        time.sleep(step)
        if time.process_time() - before < step / 4:
            return


def compare(
    args: argparse.Namespace,
    programs: Mapping[str, Callable[..., Any]],
    state: Any,
    inputs: Callable[[], Any],
    *,
    steps: int = 1,
    compiled: Mapping[str, Compiled] = {},
) -> dict[str, Any]:
    """Times programs in turn, `steps` in a run, as long as `args` says: one record.

    By program it has `ms`, the median of a step; `best_ms`, of the fastest run;
    `compile_s` and `temp_mb`. `ratio` and `best_ratio` are how many times as long as
    "ours" the others take.
    """
    times, _ = alternate(
        programs, state, inputs, repeats=args.repeats, seconds=args.seconds
    )
    record: dict[str, Any] = {}
    for prefix, of in (("", statistics.median), ("best_", min)):
        ms = {name: 1e3 / steps * of(x) for name, x in times.items()}
        others = [name for name in ms if "ours" in ms and name != "ours"]
        record[f"{prefix}ms"] = ms
        record[f"{prefix}ratio"] = {name: ms[name] / ms["ours"] for name in others}
    record["compile_s"] = {name: x.seconds for name, x in compiled.items()}
    record["temp_mb"] = {name: x.temp_bytes / 1e6 for name, x in compiled.items()}
    return record


# ------------------------------------------------------------------ machine and ids


def machine() -> dict[str, Any]:
    """Device, versions, processor, and what is set of the allocator."""
    device = jax.devices()[0]
    affinity = getattr(os, "sched_getaffinity", None)
    return {
        "device": f"{device.platform}:{device.device_kind}",
        "jax": jax.__version__,
        "python": platform.python_version(),
        "cpu": _line_of("/proc/cpuinfo", "model name") or platform.processor(),
        "cores": len(affinity(0)) if affinity else os.cpu_count(),
        "malloc": os.environ.get("GLIBC_TUNABLES") or "default",
    }


def free_bytes() -> float:
    """Memory available without swapping, infinite where Linux does not tell."""
    line = _line_of("/proc/meminfo", "MemAvailable")
    return int(line.split()[0]) * 1024 if line else float("inf")


def _line_of(path: str, name: str) -> str:
    """The value of the first line `name: value` of a file."""
    try:
        lines = pathlib.Path(path).read_text().splitlines()
    except OSError:
        return ""
    values = (x.partition(":")[2].strip() for x in lines if x.startswith(name))
    return next(values, "")


def make_ids(count: int, rows: int, zipf: bool, rng: np.random.Generator) -> np.ndarray:
    """Ids, uniform or by Zipf's law with exponent 1, strewn over the table."""
    if not zipf:
        return rng.integers(0, rows, count, np.int32)
    ranks = np.floor(rows ** rng.random(count)).astype(np.int64) - 1  # log-uniform
    return (ranks * 7_368_787 % rows).astype(np.int32)


# ------------------------------------------------------------------ command line


def parser_of(name: str, doc: str | None) -> argparse.ArgumentParser:
    """A parser whose `--help` prints the benchmark's docstring."""
    return argparse.ArgumentParser(
        prog=f"python -m benchmarks {name}",
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def run(name: str, benchmark: Any, argv: Sequence[str]) -> int:
    """Runs a benchmark: parses options, prints a line a record, checks the claims.

    Args:
      name: of the benchmark.
      benchmark: a module with `options(parser)`, which adds its own options;
        `cases(args)`, which yields a record for each case; and `failures(records)`, the
        claims that do not hold. It may have `finish(args, records)`, and `about()`,
        facts that are recorded with each case, in place of `machine`.
      argv: the arguments after the name.

    Returns:
      The exit status: 1 if `--check` is given and a claim does not hold.
    """
    parser = parser_of(name, benchmark.__doc__)
    parser.add_argument("--repeats", type=int, default=25, help="timed runs, at most")
    parser.add_argument("--seconds", type=float, default=5.0, help="of a case, about")
    parser.add_argument("--json", metavar="FILE", help="append a JSON line a case")
    parser.add_argument("--check", action="store_true", help="exit 1 if a claim fails")
    benchmark.options(parser)
    args = parser.parse_args(argv)
    facts = getattr(benchmark, "about", machine)()
    print("  ".join(f"{key} {value}" for key, value in facts.items()), flush=True)
    records = []
    for record in benchmark.cases(args):
        records.append(record)
        print(line(record), flush=True)
        if args.json:
            with open(args.json, "a", encoding="utf-8") as file:
                file.write(json.dumps({"benchmark": name, **facts, **record}) + "\n")
    if hasattr(benchmark, "finish"):
        benchmark.finish(args, records)
    wrong = benchmark.failures(records) if args.check else []
    for text in wrong:
        print(f"does not hold: {text}", file=sys.stderr)
    return 1 if wrong else 0


# The tables of a record that are printed, with their units.
_SHOWN = {"ms": "ms", "ratio": "x", "temp_mb": "MB", "sent_mb": "MB sent"}


def line(record: Mapping[str, Any]) -> str:
    """A record as text: its case, and a group of figures for each kind of figure."""
    case = itertools.takewhile(lambda x: not isinstance(x, dict), record.values())
    words = [f"{x:,}" if isinstance(x, int) else str(x) for x in case]
    for key, unit in _SHOWN.items():
        if figures := record.get(key):
            shown = ", ".join(f"{name} {x:.3g}" for name, x in figures.items())
            words.append(f"| {shown} {unit}")
    return " ".join(words)
