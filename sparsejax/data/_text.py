"""What the readers of text formats share: lines, words and numbers in them, and errors.

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
import re
import zlib
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, NamedTuple, NoReturn

import numpy as np

from sparsejax import _arguments
from sparsejax._files import replacing


BLOCK = 8 << 20
MOST_LINE = 32 << 20  # bytes of a line; a file without newlines is not held in memory
MOST_BYTES = 1024  # of a word

BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # of UTF-8, which some programs write first

_MOST_CELLS = 1 << 22  # of the matrix of some words

# A mantissa of so many digits is exact in float64, and so is the power of ten that it
# is divided by; their quotient is rounded once, as float() rounds.
MOST_DIGITS = 15
_POWERS = 10.0 ** np.arange(MOST_DIGITS + 1)
NEWLINE, RETURN, QUOTE = (np.uint8(ord(c)) for c in '\n\r"')
_ZERO, _NINE = np.uint8(ord("0")), np.uint8(9)
_DOT, _MINUS, _PLUS = (np.uint8(ord(c)) for c in ".-+")


# Files of other kinds, by how they begin: what they are, and what to do.
_FIRST = 4096  # bytes
_OTHER_KINDS = [
    (rb"PAR1\x15", "a Parquet file", "sparsejax.data.read_parquet_ids reads it"),
    (
        rb"PK\x03\x04.*(?:\[Content_Types\]|xl/)",
        "an Excel workbook",
        "Save its sheet as CSV",
    ),
    (rb"PK[\x03\x05][\x04\x06]", "a zip archive", "Extract the file that is in it"),
    (rb"\xd0\xcf\x11\xe0", "an Excel workbook", "Save its sheet as CSV"),
    (rb".{257}ustar", "a tar archive", "Extract the file that is in it"),
    (rb"\xfd7zXZ\0", "compressed by xz", "Decompress it, or use gzip or bzip2"),
    (rb"\x28\xb5\x2f\xfd", "compressed by zstd", "Decompress it, or use gzip or bzip2"),
    (rb"\x1f\x8b|BZh\d1AY", "compressed twice", "Decompress it once"),
    (
        rb"ARROW1\0\0",
        "an Arrow file",
        "Read it with pyarrow.feather.read_table, and pass its columns to "
        "Vocabulary.from_columns",
    ),
    (rb"\x93NUMPY", "an array of NumPy", "Read it with numpy.load"),
    (rb"\xba\x16\x4f\x2f", "a model of fastText", "The vectors are in its .vec file"),
    (
        rb"\xff\xfe[^\0]\0|\xfe\xff\0[^\0]",
        "text in UTF-16",
        "Save it as UTF-8",
    ),
]


# ------------------------------------------------------------------ files


class Block(NamedTuple):
    """Whole lines of a file, each with its newline, and the number of the first."""

    text: bytes
    line: int


@contextlib.contextmanager
def opened(call: str, path: Any, progress: Any) -> Iterator[Callable[[int], bytes]]:
    """A file as a function that reads about so many bytes of it, `b""` at its end.

    Args:
      call: for messages.
      path: of a file; gzip and bzip2 are recognized by their first bytes.
      progress: as in `_arguments.progress_reporter`, of bytes of the file.

    Raises:
      OSError: it cannot be read, is damaged, or ends too early.
      ValueError: it is a file of another kind.
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

        def read(size: int) -> bytes:
            try:
                data = file.read(size)
            except (EOFError, OSError, zlib.error) as e:
                raise OSError(
                    f"{call}: {os.fspath(path)} cannot be read to its end ({e}): it is "
                    "damaged or incomplete."
                ) from None
            report(raw.tell(), total)
            return data

        first = read(_FIRST)
        _refuse_other_kinds(call, path, first)

        def read_again(size: int) -> bytes:
            nonlocal first
            found, first = first[:size], first[size:]
            return found or read(size)

        yield read_again


def blocks(call: str, path: Any, progress: Any = False) -> Iterator[Block]:
    """The lines of a file, a block at a time.

    Args:
      call, path, progress: as in `opened`.

    Raises:
      OSError, ValueError: as `opened`; or a line has more than `MOST_LINE` bytes.
    """
    with opened(call, path, progress) as read:
        yield from cut_lines(path, read)


def cut_lines(path: Any, read: Callable[[int], bytes]) -> Iterator[Block]:
    """The lines of what `read` reads, a block at a time."""
    line, waiting = 1, []  # the beginning of a line, in parts
    while True:
        text = read(BLOCK)
        end = text.rfind(b"\n") + 1
        waiting.append(text[:end] if end else text)
        if sum(map(len, waiting)) - end > MOST_LINE:
            refuse_long_line(path, line)
        if text and not end:
            continue
        whole = b"".join(waiting)
        waiting = [text[end:]]
        if line == 1:
            whole = whole.removeprefix(BYTE_ORDER_MARK)
        if whole:
            whole = whole if whole.endswith(b"\n") else whole + b"\n"
            yield Block(whole, line)
            line += count_lines(whole)
        if not text:
            return


def count_lines(text: bytes) -> int:
    a, step = np.frombuffer(text, np.uint8), 1 << 18  # what stays in the cache
    parts = (a[at : at + step] == NEWLINE for at in range(0, len(a), step))
    return sum(int(np.count_nonzero(part)) for part in parts)


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


def _refuse_other_kinds(call: str, path: Any, first: bytes) -> None:
    """Raises a ValueError if a file is not plain text, which would be found late."""
    for begin, what, way_out in _OTHER_KINDS:
        if re.match(begin, first, re.DOTALL):
            raise ValueError(
                f"{call}: {os.fspath(path)} is {what}, not plain text. {way_out}."
            )


# ------------------------------------------------------------------ words


class Words(NamedTuple):
    """A column of words: uint8 `[n, L]`, each padded with zeros, and lengths `[n]`."""

    text: np.ndarray
    lengths: np.ndarray


def cut_words(text: np.ndarray, begin: np.ndarray, end: np.ndarray) -> Iterator[Words]:
    """The words at `text[begin:end]`, some at a time: one long word widens all.

    Args:
      text: uint8.
      begin, end: integers `[n]`, positions in it.
    """
    lengths = end - begin
    most = int(lengths.max(initial=0))
    if int(begin.max(initial=0)) + most > len(text):
        text = np.append(text, np.zeros(most, np.uint8))
    step = _MOST_CELLS // max(most, 1)
    for start in range(0, len(begin), step):
        own = lengths[start : start + step]
        width = int(own.max())
        if not width:
            yield Words(np.zeros((len(own), 0), np.uint8), own)
            continue
        words = every(text, width)[begin[start : start + step]]
        words = words.view(np.uint8).reshape(-1, width)
        if own.min() < width:
            words *= np.arange(width) < own[:, None]
        yield Words(words, own)


def every(text: np.ndarray, width: int) -> np.ndarray:
    """A view whose element k is `text[k : k + width]`: one copy reads a word."""
    return np.ndarray(len(text) - width + 1, f"V{width}", text, strides=(1,))


def trim(
    a: np.ndarray, begin: np.ndarray, end: np.ndarray, blank: bytes
) -> tuple[np.ndarray, np.ndarray]:
    """Fields without the blanks around them."""
    is_blank = np.zeros(256, bool)
    is_blank[list(blank)] = True
    given = end > begin
    first = given & is_blank[a[np.minimum(begin, len(a) - 1)]]
    final = given & is_blank[a[np.maximum(end - 1, 0)]]
    if not first.any() and not final.any():
        return begin, end
    other = np.flatnonzero(~is_blank[a])  # newlines among them
    after = np.append(other, len(a))[np.searchsorted(other, begin[first])]
    begin, end = begin.copy(), end.copy()
    begin[first] = np.minimum(after, end[first])
    before = np.concatenate([[-1], other])[np.searchsorted(other, end[final])]
    end[final] = np.maximum(before + 1, begin[final])
    return begin, end


def as_bytes(words: Words) -> np.ndarray:
    """Words as NumPy's strings of bytes, which can be sorted and compared."""
    n, width = words.text.shape
    if not width:
        return np.zeros(n, "S1")
    return np.ascontiguousarray(words.text).view(f"S{width}").reshape(n)


def as_matrix(words: np.ndarray) -> Words:
    """NumPy's strings of bytes as a matrix of bytes, which can be hashed."""
    text = np.ascontiguousarray(words).view(np.uint8)
    text = text.reshape(len(words), words.dtype.itemsize)
    return Words(text, np.char.str_len(words))


# ------------------------------------------------------------------ fields


def blanks(separator: bytes) -> bytes:
    """What is not part of a field at its ends."""
    return b" \t".replace(separator, b"")


def are_around_fields(a: np.ndarray, found: np.ndarray, separator: bytes) -> bool:
    """Whether all quotes begin or end a field, or are doubled in one.

    Only if there are no blanks around quotes; else one has to look at each field.
    """
    ends = np.zeros(256, bool)
    ends[[separator[0], NEWLINE]] = True
    opening, closing = found[0::2], found[1::2]
    begins = ends[a[opening - 1]] | (opening == 0)
    begins[1:] |= opening[1:] == closing[: len(opening) - 1] + 1
    after, second = (a[np.minimum(closing + k, len(a) - 1)] for k in (1, 2))
    is_last = ends[after] | (after == RETURN) & (second == NEWLINE)
    doubled = np.zeros(len(closing), bool)
    doubled[: len(opening) - 1] = closing[: len(opening) - 1] + 1 == opening[1:]
    return bool(begins.all() and (is_last | doubled).all())


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
    """`int(text)`, or a ValueError, also for 1_000 and what int64 does not hold."""
    number = int(text)
    if b"_" in text or not -(1 << 63) <= number < 1 << 63:
        raise ValueError
    return number


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


def refuse_long_line(path: Any, line: int) -> NoReturn:
    """Raises the error for a line that is too long."""
    refuse(path, line, f"a line of more than {MOST_LINE} bytes", "a newline")


def show(text: bytes, most: int = 40) -> str:
    """A piece of a line, as an error shows it."""
    shown = text.decode("utf-8", "backslashreplace")
    return repr(shown if len(shown) <= most else shown[: most - 3] + "...")
