"""Lines of the libsvm format into arrays: twice, once fast and once with all errors.

A line is `label [qid:q] index:value index:value ...  # comment`.

The fast way looks at a block as bytes: it checks that each token has a colon exactly
where it should have one, and reads all numbers at once. Where anything is unusual it
gives up, and the block is read line by line in Python: the slow way is the definition
of the format, and names the line at fault.
"""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from sparsejax.data import _numbers, _text_files


_LINE = "'label index:value index:value ...'"
_COMMENT = re.compile(rb"#[^\n]*")
_COLON, _NEWLINE = (np.uint8(ord(c)) for c in ":\n")
_IS_DARK = np.array([not bytes([c]).isspace() for c in range(256)])


class Rows(NamedTuple):
    """Rows that were read.

    Args:
      labels: float64 `[r]`; for several labels a row, a list of arrays.
      query: int64 `[r]`, -1 where the line has none.
      counts: int64 `[r]`, elements of each row.
      column: int64 `[n]`, the indices as in the file.
      value: float64 `[n]`.
      lines: int64 `[r]`, the line of the file that each row is in.
    """

    labels: Any
    query: np.ndarray
    counts: np.ndarray
    column: np.ndarray
    value: np.ndarray
    lines: np.ndarray


def read(path: Any, block: _text_files.Block, multilabel: bool) -> Rows:
    """The rows of a block, or a ValueError that names file, line and fault."""
    text = block.text
    if b"#" in text:
        text = _COMMENT.sub(b"", text)
    rows = None
    if not multilabel and b"qid:" not in text:
        rows = _read_fast(text, block.line)
    return _read_slowly(path, text, block.line, multilabel) if rows is None else rows


# ------------------------------------------------------------------ all at once


def _read_fast(text: bytes, line: int) -> Rows | None:
    """The rows of a block without comments; None if it is not as plain as that."""
    a = np.frombuffer(text, np.uint8)
    dark = _IS_DARK[a]
    before = np.empty_like(dark)
    before[0], before[1:] = False, dark[:-1]
    starts = np.flatnonzero(dark & ~before)  # of tokens
    ends = np.flatnonzero(~dark & before)  # there is one, the text ends in a newline
    colons = np.flatnonzero(a == _COLON)
    newlines = np.flatnonzero(a == _NEWLINE)
    # The first token of a line is its label, the others have a colon each.
    first = np.searchsorted(starts, newlines)
    tokens = np.diff(first, prepend=0)
    filled = tokens > 0
    counts = tokens[filled] - 1
    is_label = np.zeros(len(starts), bool)
    is_label[(first - tokens)[filled]] = True
    if len(colons) != len(starts) - len(counts):
        return None
    # Digits alone between a token's begin and a colon: then both are of one token, and
    # what is left of it must be a number, with which a second colon does not go.
    column = _numbers.read_digits(a, starts[~is_label], colons)
    if column is None:
        return None
    starts[~is_label] = colons + 1
    numbers, fault = _numbers.read_floats(a, starts, ends)
    if fault is not None:
        return None
    lines = line + np.flatnonzero(filled)
    query = np.full(len(counts), -1, np.int64)
    return Rows(numbers[is_label], query, counts, column, numbers[~is_label], lines)


# ------------------------------------------------------------------ line by line


def _read_slowly(path: Any, text: bytes, line: int, multilabel: bool) -> Rows:
    labels, query, counts, column, value, lines = [], [], [], [], [], []
    for at, content in enumerate(text.split(b"\n"), line):
        tokens = content.split()
        if not tokens:
            continue
        first = tokens[0]
        if b":" in first:
            if not multilabel:
                expected = f"a label first, {_LINE}"
                _text_files.refuse(path, at, _text_files.show(first), expected)
            first = b""
        else:
            tokens = tokens[1:]
        expected = "labels, numbers with commas between" if multilabel else "a number"
        parts = first.split(b",") if multilabel else [first]
        own = [_number(path, at, p, f"{expected}, as label") for p in parts if first]
        labels.append(np.array(own) if multilabel else own[0])
        query.append(-1)
        if tokens and tokens[0].startswith(b"qid:"):
            expected = "qid:q with an integer q"
            query[-1] = _number(path, at, tokens[0][4:], expected, _numbers.parse_int)
            tokens = tokens[1:]
        for token in tokens:
            left, colon, right = token.partition(b":")
            shown = _text_files.show(token)
            if not colon:
                _text_files.refuse(path, at, shown, "index:value")
            if not left.isdigit() or len(left) > _numbers.MOST_DIGITS:
                expected = "index:value with an index that is an integer, 0 or more"
                _text_files.refuse(path, at, shown, expected)
            column.append(int(left))
            expected = f"index:value with a number as value in {shown}"
            value.append(_number(path, at, right, expected))
        counts.append(len(tokens))
        lines.append(at)
    return Rows(
        labels if multilabel else np.array(labels, np.float64),
        np.array(query, np.int64),
        np.array(counts, np.int64),
        np.array(column, np.int64),
        np.array(value, np.float64),
        np.array(lines, np.int64),
    )


def _number(
    path: Any,
    line: int,
    text: bytes,
    expected: str,
    parse: Callable = _numbers.parse_float,
) -> Any:
    try:
        return parse(text)
    except ValueError:
        _text_files.refuse(path, line, _text_files.show(text), expected)
