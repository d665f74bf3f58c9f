"""Times programs fairly on a machine that also does other work.

The demo's table and the benchmarks use it.

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

import pathlib
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax


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
