"""Makes tests/error_messages.md: wrong calls and the errors that they raise.

    python tests/tools/error_table.py             makes the page again
    python tests/tools/error_table.py --missing   lists the `raise`s without a call

The page holds the calls: to add one, write a row with empty cells, "| `call` | | |",
and make the page. `test_errors.py` makes it too and compares, so that a diff shows each
change of a message.
"""

import ast
import contextlib
import os
import pathlib
import re
import sys
import tempfile
import warnings
from typing import Any, NamedTuple


ROOT = pathlib.Path(__file__).parent.parent.parent
PACKAGE = ROOT / "sparsejax"
PAGE = ROOT / "tests" / "error_messages.md"
_OUR_LINE = re.compile(rf"{re.escape(str(ROOT))}/(sparsejax/\S+\.py):\d+")

HEAD = """\
# Error messages

The messages of wrong calls: what was called, what was found, what to do.
`python tests/tools/error_table.py` makes this page by running every call; a test makes
it again and compares.
"""


class Section(NamedTuple):
    """Calls of one theme.

    Args:
      title: of the section.
      given: code that runs before each call.
      calls: code, each of which raises. A name that it binds is its own.
    """

    title: str
    given: str
    calls: list[str]


class Answer(NamedTuple):
    call: str
    error: str
    message: str


def answer(section: Section, call: str) -> Answer:
    """Runs a call in an empty folder.

    Raises:
      AssertionError: the call did not raise.
    """
    names: dict[str, Any] = {"__name__": "__main__"}
    with tempfile.TemporaryDirectory() as folder, _in_folder(folder):
        exec(compile(section.given, "given.py", "exec"), names)
        try:
            # A later line that raises is one of the user's: so is its file's name.
            exec(compile(call, "model.py", "exec"), names)
        except Exception as e:
            text = _OUR_LINE.sub(r"\1", str(e).replace(folder, "")).strip()
            return Answer(call, type(e).__name__, text)
        finally:
            for held in names.values():
                if hasattr(held, "close"):
                    held.close()
    raise AssertionError(f"{section.title}: does not raise: {call}")


@contextlib.contextmanager
def _in_folder(folder: str):
    old = os.getcwd()
    os.chdir(folder)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        os.chdir(old)


def table(section: Section) -> str:
    """A section of the page."""
    lines = [f"\n## {section.title}\n", "```python", section.given, "```\n"]
    lines += ["| call | | message |", "|---|---|---|"]
    for call in section.calls:
        raised = answer(section, call)
        code = "<br>".join(_code(line) for line in call.splitlines())
        lines.append(f"| {code} | {raised.error} | {_cell(raised.message)} |")
    return "\n".join(lines) + "\n"


def _code(line: str) -> str:
    """A line of code in a cell; spaces at its start would be lost."""
    bare = line.lstrip()
    return "&emsp;" * ((len(line) - len(bare)) // 2) + f"`{bare}`".replace("|", "\\|")


def _call(row: str) -> str:
    """The code in the first cell of a row."""
    cell = re.split(r"(?<!\\) \|", row[2:])[0].replace("\\|", "|")
    lines = [line.rpartition("&emsp;") for line in cell.split("<br>")]
    return "\n".join(
        "  " * (f"{indent}{tab}".count("&emsp;")) + code.strip("`")
        for indent, tab, code in lines
    )


def _cell(message: str) -> str:
    escaped = re.sub(r"([\\|<>*_`\[\]$])", r"\\\1", message)
    return "<br>".join(line.strip() for line in escaped.splitlines() if line.strip())


def sections() -> list[Section]:
    """The calls of the page."""
    found = []
    for part in PAGE.read_text().split("\n## ")[1:]:
        title, _, text = part.partition("\n")
        _, given, rows = re.split("```(?:python)?\n", text)
        calls = [_call(row) for row in rows.splitlines() if row.startswith("| `")]
        found.append(Section(title, given.rstrip("\n"), calls))
    return found


def page() -> str:
    return HEAD + "".join(table(section) for section in sections())


# ---------------------------------------------------------------- raises without calls


def raises() -> set[tuple[str, int]]:
    """(file, line) of every `raise` of an error in the package."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Raise) and node.exc is not None:
                found.add((str(path), node.lineno))
    return found


def reached() -> set[tuple[str, int]]:
    """(file, line) in the package that the calls ran."""
    seen: set[tuple[str, int]] = set()

    def trace(frame, event, _):
        file = frame.f_code.co_filename
        if not file.startswith(str(PACKAGE)):
            return None
        if event == "line":
            seen.add((file, frame.f_lineno))
        return trace

    for section in sections():
        for call in section.calls:
            sys.settrace(trace)
            try:
                answer(section, call)
            finally:
                sys.settrace(None)
    return seen


def main() -> None:
    # As under pytest: 8 devices made of the CPU. JAX is not imported yet.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    flag = "--xla_force_host_platform_device_count"
    if flag not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}=8"
    if "--missing" in sys.argv:
        for file, line in sorted(raises() - reached()):
            print(f"{os.path.relpath(file, ROOT)}:{line}")
    else:
        PAGE.write_text(page())


if __name__ == "__main__":
    main()
