"""How far the demo is: a bar where tqdm is installed, else a line now and then."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def progress_bar(total: int, quiet: bool) -> Iterator[Callable[[float, float], None]]:
    """A function to report progress to; a bar where tqdm is there, else lines."""
    tqdm = None if quiet else _optional_tqdm()
    if quiet:
        yield lambda words, loss: None
    elif tqdm is None:
        yield _lines(total)
    else:
        with tqdm(
            total=total, unit=" words", unit_scale=True, dynamic_ncols=True
        ) as bar:

            def report(words: float, loss: float) -> None:
                bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
                bar.update(int(words) - bar.n)

            yield report


def _optional_tqdm() -> Any:
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return tqdm


def _lines(total: int, seconds: float = 5.0) -> Callable[[float, float], None]:
    """A line every few seconds, for where there is no tqdm."""
    began = last = time.perf_counter()

    def report(words: float, loss: float) -> None:
        nonlocal last
        now = time.perf_counter()
        if now - last > seconds or words >= total:
            last = now
            print(
                f"{words / total:4.0%}  loss {loss:.3f}  "
                f"{words / (now - began):,.0f} words/s",
                file=sys.stderr,
            )

    return report
