"""Reports of long work: to the caller's function, or as lines of text."""

import sys
import time
from collections.abc import Callable
from typing import Any


_SECONDS = 2.0


def reporter(call: str, progress: Any) -> Callable[[int, int], Any]:
    """What to call with `(done, total)`.

    Args:
      call: for messages.
      progress: False for nothing, True for a line on stderr every two seconds, or a
        function that is called instead.
    """
    if callable(progress):
        return progress
    if not isinstance(progress, bool):
        raise TypeError(
            f"{call}: progress must be True, False or a function of (rows done, rows "
            f"in all), got {progress!r}."
        )
    return _lines(call) if progress else lambda done, total: None


def _lines(call: str) -> Callable[[int, int], None]:
    began = last = time.perf_counter()

    def report(done: int, total: int) -> None:
        nonlocal last
        now = time.perf_counter()
        if now - last > _SECONDS or (done == total and last > began):
            last = now
            rate = done / (now - began)
            share = f"{done / total:4.0%} of {total:,} rows"
            print(f"{call}: {share}, {rate:,.0f} rows/s", file=sys.stderr, flush=True)

    return report
