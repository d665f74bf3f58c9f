"""Fair timing on a machine that also does other work, and how numbers are reported.

- Programs take turns, so that other work of the machine affects all of them. Each round
  has another order, because a program leaves its caches and threads to the next one.
  Reported are medians and the ratio of the medians.
- Compiling is timed separately.
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
import json
import os
import pathlib
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


# ------------------------------------------------------------------ timing


class Compiled(NamedTuple):
    """A compiled program, with statistics from its compilation.

    Args:
      run: the program.
      seconds: of tracing, lowering and compiling.
      temp_bytes: the peak memory of its temporaries, -1 if the backend does not tell.
    """

    run: Callable[..., Any]
    seconds: float
    temp_bytes: int


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
            wait_for_rest()
            state, _ = _timed(program, state, inputs)
            state, taken = _timed(program, state, inputs)
            times[name].append(taken)
    return times, state


def _timed(program: Callable, state: Any, inputs: Callable) -> tuple[Any, float]:
    given = jax.block_until_ready(inputs())
    start = time.perf_counter()
    state, _ = jax.block_until_ready(program(state, given))
    return state, time.perf_counter() - start


def wait_for_rest(most: float = 5.0) -> None:
    """Waits until no thread of this process is running, at most `most` seconds."""
    step = 0.002
    for _ in range(int(most / step)):
        before = time.process_time()
        time.sleep(step)
        if time.process_time() - before < step / 4:
            return


def median_ms(times: Sequence[float]) -> float:
    """The median, in milliseconds."""
    return 1e3 * statistics.median(times)


def free_bytes() -> int | None:
    """Memory available without swapping, or None if unknown."""
    limits = []
    try:
        for line in pathlib.Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                limits.append(int(line.split()[1]) * 1024)
        group = pathlib.Path("/sys/fs/cgroup")  # a container's own limit
        limit = (group / "memory.max").read_text().strip()
        if limit != "max":
            used = int((group / "memory.current").read_text())
            stat = (group / "memory.stat").read_text().split()
            cache = int(stat[stat.index("inactive_file") + 1])
            limits.append(int(limit) - used + cache)
    except (OSError, ValueError):
        pass  # not Linux, or no such limit
    return min(limits) if limits else None


# ------------------------------------------------------------------ numbers


def spread(times: Sequence[float]) -> float:
    """Half of the middle half of the times, relative to their median."""
    if len(times) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(times, n=4)
    return (high - low) / 2 / middle


def machine() -> dict[str, Any]:
    """Device, versions, processor, and what is set of the allocator."""
    device = jax.devices()[0]
    affinity = getattr(os, "sched_getaffinity", None)
    return {
        "device": f"{device.platform}:{device.device_kind}",
        "jax": jax.__version__,
        "python": platform.python_version(),
        "cpu": _cpu_model(),
        "cores": len(affinity(0)) if affinity else os.cpu_count(),
        "malloc": os.environ.get("GLIBC_TUNABLES") or "default",
    }


def _cpu_model() -> str:
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
        return next(
            x.split(":")[1].strip() for x in lines if x.startswith("model name")
        )
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def bandwidth(megabytes: int = 256) -> float:
    """Bytes a second that one in-place pass over an array reads and writes together.

    What a step would take that did nothing but move the bytes it must move, in order,
    is those bytes over this: a bound that no program beats by much.
    """
    x = jnp.ones((megabytes << 18,), jnp.float32)
    scale = compile_apart(
        jax.jit(lambda x, _: (x * jnp.float32(1.01), ()), donate_argnums=0), x, ()
    )
    times, _ = alternate({"": scale.run}, x, tuple, repeats=7)
    return 2 * (megabytes << 20) / statistics.median(times[""])


def make_ids(count: int, rows: int, zipf: bool, rng: np.random.Generator) -> np.ndarray:
    """Ids, uniform or by Zipf's law with exponent 1, strewn over the table."""
    if not zipf:
        return rng.integers(0, rows, count, np.int32)
    ranks = np.floor(rows ** rng.random(count)).astype(np.int64) - 1  # log-uniform
    return (ranks * 7_368_787 % rows).astype(np.int32)


# ------------------------------------------------------------------ command line


def run(
    name: str,
    doc: str | None,
    argv: Sequence[str] | None,
    options: Callable[[argparse.ArgumentParser], None],
    cases: Callable[[argparse.Namespace], Iterable[dict[str, Any]]],
    line: Callable[[dict[str, Any]], str],
    failures: Callable[[Sequence[dict[str, Any]]], list[str]] | None = None,
    header: str = "",
    finish: Callable[..., Any] | None = None,
) -> int:
    """Runs a benchmark: parses options, prints a line a record, checks the claims.

    Args:
      name, doc: of the benchmark; the first line of `doc` is told by `--help`.
      argv: the arguments after the name.
      options: adds the benchmark's own options.
      cases: yields a record for each case.
      line: one record as text.
      failures: the claims that do not hold, for `--check`.
      header: printed before the records.
      finish: called with the arguments and all records.

    Returns:
      The exit status: 1 if a claim does not hold.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks {name}", description=(doc or "").split("\n")[0]
    )
    options(parser)
    parser.add_argument("--repeats", type=int, default=25, help="timed runs, at most")
    parser.add_argument("--seconds", type=float, default=5.0, help="of a case, about")
    parser.add_argument("--json", metavar="FILE", help="append a JSON line a case")
    if failures:
        parser.add_argument("--check", action="store_true", help="exit 1 if one fails")
    args = parser.parse_args(argv)
    about = machine()
    print("  ".join(f"{key} {value}" for key, value in about.items()))
    print(header, flush=True)
    records = []
    for record in cases(args):
        records.append(record)
        print(line(record), flush=True)
        if args.json:
            append_json_line(args.json, {"benchmark": name, **about, **record})
    if finish:
        finish(args, records)
    return report(failures(records) if failures and args.check else [])


def report(wrong: Sequence[str]) -> int:
    """Says which claims do not hold; 1 if any, the exit status of `--check`."""
    for text in wrong:
        print(f"does not hold: {text}", file=sys.stderr)
    return 1 if wrong else 0


def append_json_line(path: str, record: Mapping[str, Any]) -> None:
    """Appends one line to a file of JSON lines."""
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")
