"""What all benchmarks share: fair timing, and what a number must be read with."""

import json
import os
import pathlib
import platform
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from sparsejax.demo.timing import (
    Compiled as Compiled,
    alternate as alternate,
    compile_apart as compile_apart,
    free_bytes as free_bytes,
    median_ms as median_ms,
)


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


def collect(
    records: Iterable[dict[str, Any]],
    show: Callable[[dict[str, Any]], Any],
    path: str | None,
    about: Mapping[str, Any],
) -> list[dict[str, Any]]:
    """The records; shows each when it comes.

    If a path is given, appends it there with what all have in common, `about`.
    """
    found = []
    for record in records:
        found.append(record)
        show(record)
        if path:
            append_json_line(path, {**record, **about})
    return found


def report(wrong: Sequence[str]) -> int:
    """Says which claims do not hold; 1 if any, the exit status of `--check`."""
    for text in wrong:
        print(f"does not hold: {text}", file=sys.stderr)
    return 1 if wrong else 0


def append_json_line(path: str, record: Mapping[str, Any]) -> None:
    """Appends one line to a file of JSON lines."""
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")
