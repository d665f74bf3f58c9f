"""Runs the code of a page: its blocks in order, in one namespace.

A block fenced as `python` is executed, and one fenced as `diff` as it is after the
change. One fenced as `pycon` is a session: the output
is compared with the output on the page. Others (`sh`, `text`, and `py` for a
script of its own) are shown only. A
block that imports a package of `OPTIONAL` runs where that is installed, and only such
blocks may depend on it.
"""

import doctest
import importlib.util
import pathlib
import re
from typing import Any, NamedTuple


ROOT = pathlib.Path(__file__).parent.parent.parent
DOCS = ROOT / "docs"

_FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
OPTIONAL = ("sklearn", "gensim")  # shown in pages, and needed by nothing else
_FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


class Block(NamedTuple):
    """A fenced block; its code begins at `line`, counted from 0."""

    language: str
    line: int
    code: str


def blocks(page: pathlib.Path) -> list[Block]:
    text = page.read_text()
    return [
        Block(
            found[2],
            text.count("\n", 0, found.start(3)),
            re.sub(f"^{found[1]}", "", found[3], flags=re.MULTILINE),
        )
        for found in _FENCE.finditer(text)
    ]


def side(block: Block, sign: str) -> str:
    """Returns the code of a diff before the change ("-") or after it ("+")."""
    lines = block.code.splitlines()
    return "\n".join(line[1:] for line in lines if line[:1] in ("", " ", sign))


def run_page(page: pathlib.Path, **given: Any) -> dict[str, Any]:
    """Runs the blocks of a page.

    Args:
      page: a markdown file.
      **given: names that the page takes for the reader's own.

    Returns:
      The namespace after the last block.

    Raises:
      AssertionError: the output of a session differs from the page.
    """
    names: dict[str, Any] = {"__name__": "__main__", **given}
    for block in blocks(page):
        imported = re.findall(r"^(?:import|from) (\w+)", block.code, re.MULTILINE)
        wanted = set(imported) & set(OPTIONAL)
        if not all(map(importlib.util.find_spec, wanted)):
            continue
        if block.language in ("python", "diff"):
            # Empty lines before the code: a traceback then names the page's line.
            own = block.code if block.language == "python" else side(block, "+")
            code = "\n" * block.line + own
            exec(compile(code, str(page), "exec"), names)
        elif block.language == "pycon":
            _run_session(block, page, names)
    return names


def _run_session(block: Block, page: pathlib.Path, names: dict[str, Any]) -> None:
    test = doctest.DocTestParser().get_doctest(
        block.code, names, page.name, str(page), block.line
    )
    test.globs = names  # not a copy: the page's functions see later names
    said: list[str] = []
    runner = doctest.DocTestRunner(optionflags=_FLAGS)
    runner.run(test, out=said.append, clear_globs=False)
    assert not said, "".join(said)
