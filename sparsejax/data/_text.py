"""What the readers of text formats share: lines, numbers in them, and errors.

A file, compressed or not, is read in blocks of whole lines. A block has about 8 MB:
large enough for NumPy, and small compared with any memory. Numbers are parsed many at
once: the decimal ones by NumPy, the others by Python. A malformed line is an error that
begins with file:line. Files are written completely or not at all.
"""

import bz2
import contextlib
import gzip
import math
import os
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple, NoReturn

import numpy as np

from sparsejax import _arguments
from sparsejax._files import replacing


BLOCK = 8 << 20

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # of UTF-8, which some programs write first

# A mantissa of so many digits is exact in float64, and so is the power of ten that it
# is divided by; their quotient is rounded once, as float() rounds.
MOST_DIGITS = 15
_POWERS = 10.0 ** np.arange(MOST_DIGITS + 1)
_ZERO, _NINE = np.uint8(ord("0")), np.uint8(9)
_DOT, _MINUS, _PLUS = (np.uint8(ord(c)) for c in ".-+")


# ------------------------------------------------------------------ files


class Block(NamedTuple):
    """Whole lines of a file, each with its newline, and the number of the first."""

    text: bytes
    line: int


def blocks(call: str, path: Any, progress: Any = False) -> Iterator[Block]:
    """The lines of a file, a block at a time.

    Args:
      call: for messages.
      path: of a file; gzip and bzip2 are recognized by their first bytes.
      progress: as in `_arguments.progress_reporter`, of bytes of the file.

    Raises:
      OSError: it cannot be read, is damaged, or ends too early.
    """
    with contextlib.ExitStack() as stack:
        raw = stack.enter_context(open(path, "rb"))
        total = os.fstat(raw.fileno()).st_size
        report = stack.enter_context(
            _arguments.progress_reporter(call, progress, "B", needs_tqdm=True)
        )
        magic = raw.read(3)
        raw.seek(0)
        openers = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open}
        opener: Any = next((f for m, f in openers.items() if magic.startswith(m)), None)
        file: Any = stack.enter_context(opener(raw)) if opener else raw
        line, rest = 1, b""
        while True:
            try:
                text = file.read(BLOCK)
            except (EOFError, OSError, zlib.error) as e:
                raise OSError(
                    f"{call}: {os.fspath(path)} cannot be read to its end ({e}): it is "
                    "damaged or incomplete."
                ) from None
            report(raw.tell(), total)
            end = text.rfind(b"\n") + 1
            if text and not end:  # not yet the end of the first line
                rest += text
                continue
            whole = rest + (text[:end] if text else b"")
            rest = text[end:]
            if line == 1:
                whole = whole.removeprefix(_BYTE_ORDER_MARK)
            if whole:
                whole = whole if whole.endswith(b"\n") else whole + b"\n"
                yield Block(whole, line)
                line += whole.count(b"\n")
            if not text:
                return


@contextlib.contextmanager
def write(path: Any) -> Iterator[BinaryIO]:
    """A file that replaces `path` at the end; `.gz` and `.bz2` are compressed.

    After an error or an interrupt the old file is still there, unchanged.
    """
    with replacing(path) as raw:
        file: Any = raw
        if os.fspath(path).endswith(".gz"):
            # Without name and time: the same rows give the same bytes.
            file = gzip.GzipFile("", "wb", fileobj=raw, mtime=0)
        elif os.fspath(path).endswith(".bz2"):
            file = bz2.BZ2File(raw, "wb")
        yield file
        if file is not raw:
            file.close()


# ------------------------------------------------------------------ numbers


def parse_float(text: bytes) -> float:
    """`float(text)`, or a ValueError, also for 1_000 and 1e999."""
    if b"_" in text:
        raise ValueError
    number = float(text)
    if math.isinf(number) and any(c in b"0123456789" for c in text):
        raise ValueError
    return number


def parse_int(text: bytes) -> int:
    """`int(text)`, or a ValueError, also for 1_000."""
    if b"_" in text:
        raise ValueError
    return int(text)


def read_digits(a: np.ndarray, begin: np.ndarray, end: np.ndarray) -> np.ndarray | None:
    """The integers at `a[begin:end]`, or None if one has other bytes than digits.

    Args:
      a: uint8, a text.
      begin, end: integers `[n]`, positions in it.

    Returns:
      int64 `[n]`, or None.
    """
    size = end - begin
    if len(size) and (size.min() < 1 or size.max() > MOST_DIGITS):
        return None
    out, at = np.zeros(len(size), np.int64), np.arange(len(size))
    for place in range(int(size.max(initial=0))):
        at = at if place == 0 else at[size[at] > place]
        digit = a[begin[at] + place] - _ZERO  # a byte below "0" wraps
        if digit.max(initial=0) > _NINE:
            return None
        out[at] = out[at] * 10 + digit
    return out


def read_floats(
    a: np.ndarray, begin: np.ndarray, end: np.ndarray
) -> tuple[np.ndarray, int | None]:
    """The numbers at `a[begin:end]`, and the position of the first invalid one.

    Args:
      a: uint8, a text.
      begin, end: integers `[n]`, positions in it.

    Returns:
      `(float64 [n], None)`, each number as `float` gives it. If some are not numbers,
      the second is the index of the first of these, and the array is undefined.
    """
    n = len(begin)
    sign = a[np.minimum(begin, len(a) - 1)] if n else np.zeros(0, np.uint8)
    negative = sign == _MINUS
    start = begin + (negative | (sign == _PLUS))
    size = end - start
    mantissa, scale = np.zeros(n, np.int64), np.zeros(n, np.int64)
    digits, dotted = np.zeros(n, np.int64), np.zeros(n, bool)
    plain = size <= MOST_DIGITS + 1
    at = np.flatnonzero(plain & (size > 0))
    place = 0
    while len(at):
        byte = a[start[at] + place]
        digit = byte - _ZERO
        is_digit = digit <= _NINE
        is_dot = (byte == _DOT) & ~dotted[at]
        plain[at[~is_digit & ~is_dot]] = False
        mantissa[at] = np.where(is_digit, mantissa[at] * 10 + digit, mantissa[at])
        scale[at] += dotted[at] & is_digit
        digits[at] += is_digit
        dotted[at] |= is_dot
        place += 1
        at = at[(size[at] > place) & plain[at]]
    plain &= (digits > 0) & (digits <= MOST_DIGITS)
    out = mantissa / _POWERS[np.minimum(scale, MOST_DIGITS)]
    out = np.where(negative, -out, out)
    for i in np.flatnonzero(~plain).tolist():
        try:
            out[i] = parse_float(a[begin[i] : end[i]].tobytes())
        except ValueError:
            return out, i
    return out, None


def cast(numbers: np.ndarray, dtype: np.dtype) -> tuple[np.ndarray, int | None]:
    """float64 numbers in `dtype`, and the index of the first that does not fit it.

    Floats are rounded, but not to infinity. Into an integer dtype only exact integers
    fit.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        out = numbers.astype(dtype)
        if dtype.kind in "iu":
            lost = out.astype(np.float64) != numbers
        else:
            lost = np.isinf(out) & np.isfinite(numbers)
    return out, int(np.argmax(lost)) if lost.any() else None


# ------------------------------------------------------------------ errors


def refuse(path: Any, line: int, found: str, expected: str) -> NoReturn:
    """Raises the error for a malformed line."""
    raise ValueError(f"{os.fspath(path)}:{line}: found {found}, expected {expected}")


def show(text: bytes, most: int = 40) -> str:
    """A piece of a line, as an error shows it."""
    shown = text.decode("utf-8", "backslashreplace")
    return repr(shown if len(shown) <= most else shown[: most - 3] + "...")
