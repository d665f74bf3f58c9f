"""Makes tests/error_messages.md: wrong calls and the errors that they raise.

The page holds the calls: to add one, write a row with empty cells, "| `call` | | |",
and run `python tests/tools/error_table.py`. `test_errors.py` makes the page too and
compares, so that a diff shows each change of a message. With `--cov=sparsejax`, that
test shows each `raise` without a call.
"""

import contextlib
import os
import pathlib
import re
import tempfile
import warnings
from typing import Any, NamedTuple


ROOT = pathlib.Path(__file__).parent.parent.parent
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


def answer(section: Section, call: str) -> tuple[str, str]:
    """The type and the message of the error that a call raises, in an empty folder."""
    names: dict[str, Any] = {"__name__": "__main__"}
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.chdir(folder),
        warnings.catch_warnings(action="ignore"),
    ):
        exec(compile(section.given, "given.py", "exec"), names)
        try:
            # A later line that raises is one of the user's: so is its file's name.
            exec(compile(call, "model.py", "exec"), names)
        except Exception as e:
            text = _OUR_LINE.sub(r"\1", str(e).replace(folder, "")).strip()
            return type(e).__name__, text
        finally:
            for held in names.values():
                if hasattr(held, "close"):
                    held.close()
    raise AssertionError(f"{section.title}: does not raise: {call}")


def table(section: Section) -> str:
    """A section of the page."""
    lines = [f"\n## {section.title}\n", "```python", section.given, "```\n"]
    lines += ["| call | | message |", "|---|---|---|"]
    for call in section.calls:
        error, message = answer(section, call)
        code = "<br>".join(_code(line) for line in call.splitlines())
        lines.append(f"| {code} | {error} | {_cell(message)} |")
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


def main() -> None:
    # As under pytest: 8 devices made of the CPU. JAX is not imported yet.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    flag = "--xla_force_host_platform_device_count"
    if flag not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}=8"
    PAGE.write_text(HEAD + "".join(map(table, sections())))


if __name__ == "__main__":
    main()
