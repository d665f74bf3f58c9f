"""A plugin of pytest that puts our functions into a peer's test modules."""

import fnmatch
import inspect
from typing import Any

import pytest

from tests.tools.peers import differences, stand_ins


class Plugin:
    """Replaces functions in the modules that are collected, and marks differences.

    Args:
      peer: `"jax"` or `"optax"`.
      replace: whether to replace anything.
    """

    def __init__(self, peer: str, replace: bool):
        self._peer, self._replace = peer, replace
        self._done: set[Any] = set()

    def pytest_collection_modifyitems(self, config: Any, items: list[Any]) -> None:
        """Puts our functions in place, and expects the deliberate differences."""
        kept = [item for item in items if self._concerns_us(item)]
        config.hook.pytest_deselected(items=list(set(items) - set(kept)))
        items[:] = kept
        if not self._replace:
            return
        for item in items:
            module = item.module
            if module not in self._done:
                self._done.add(module)
                stand_ins.PLACE[self._peer](module)
            name = item.nodeid.split("::", 1)[1]
            for pattern, why in differences.DIFFERENCES[self._peer].items():
                if fnmatch.fnmatch(name, pattern):
                    item.add_marker(pytest.mark.xfail(reason=why, strict=True))

    def _concerns_us(self, item: Any) -> bool:
        """Return True if the source of a test mentions a replaced name."""
        words = stand_ins.WORDS[self._peer]
        try:
            source = inspect.getsource(inspect.unwrap(item.function))
        except OSError:
            return True
        return any(word in source for word in words)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Says how much of it was ours."""
        for line in stand_ins.counts():
            terminalreporter.write_line(line)
