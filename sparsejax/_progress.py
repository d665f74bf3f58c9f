"""The argument `progress=`: a bar, nothing, or a function."""

import contextlib
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
      progress: True for a tqdm bar on stderr; False for nothing; or a function, used as
        `report` itself.
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
    from tqdm import tqdm

    with contextlib.ExitStack() as stack:
        bar: Any = None

        def report(done: float, total: float | None) -> None:
            nonlocal bar
            if bar is None:  # `total` is only known now
                options = {"unit": unit, "unit_scale": True, "dynamic_ncols": True}
                bar = stack.enter_context(tqdm(desc=call, total=total, **options))
            bar.update(int(done) - bar.n)

        yield report
