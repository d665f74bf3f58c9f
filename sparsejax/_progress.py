"""The argument `progress=`: a bar, lines, nothing, or a function."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def progress_reporter(
    call: str, progress: Any, unit: str = " rows"
) -> Iterator[Callable[..., Any]]:
    """Turns a `progress` argument into a function `report(done, total)`.

    `total` is None if it is unknown.

    Args:
      call: shown before the bar, and in errors.
      progress: True for a tqdm bar on stderr, or for a line every two seconds if tqdm
        is not installed; False for nothing; or a function, used as `report` itself.
      unit: of `done` and `total`, including the space: `" rows"`, or `"B"`.
    """
    if callable(progress):
        yield progress
        return
    if not isinstance(progress, bool):
        raise TypeError(
            f"{call}: progress must be True, False or a function of (done, total), got "
            f"{progress!r}."
        )
    if not progress:
        yield lambda done, total: None
        return
    try:
        from tqdm import tqdm
    except ImportError:
        yield _progress_lines(call, unit)
        return
    with contextlib.ExitStack() as stack:
        bar: Any = None

        def report(done: float, total: float | None) -> None:
            nonlocal bar
            if bar is None:  # `total` is only known now
                options = {"unit": unit, "unit_scale": True, "dynamic_ncols": True}
                bar = stack.enter_context(tqdm(desc=call, total=total, **options))
            bar.update(int(done) - bar.n)

        yield report


def _progress_lines(call: str, unit: str) -> Callable[..., None]:
    began = last = time.perf_counter()

    def report(done: float, total: float | None) -> None:
        nonlocal last
        now = time.perf_counter()
        if now - last > 2.0 or (total is not None and done >= total):
            last = now
            share = f"{done:,}"
            if total is not None:
                share = f"{done / total if total else 1:4.0%}"
            rate = f"{done / max(now - began, 1e-9):,.0f}{unit}/s"
            print(f"{call}: {share}  {rate}", file=sys.stderr, flush=True)

    return report
