"""read_vectors: files of pretrained word vectors, as GloVe, word2vec and fastText.

A line of text is a word and D numbers, with spaces between. In the files of word2vec
and fastText the first line is a header: the number of words, and D. GloVe's have none,
and some of its words contain spaces: the last D fields of a line are the vector.

In the binary files of word2vec, after the same header, each word is followed by a space
and D float32 numbers, the lowest byte first; a newline may stand before the next word.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from sparsejax._arguments import ColumnLike, Progress
from sparsejax._files import as_path
from sparsejax.data import _text, _words


_CALL = "sparsejax.data.read_vectors"


def read_vectors(
    path: str | os.PathLike[str],
    *,
    only: ColumnLike | None = None,
    binary: bool | str = "auto",
    progress: Progress = False,
) -> tuple[np.ndarray, np.ndarray]:
    """Reads a file of pretrained word vectors: GloVe's, word2vec's, fastText's.

    Args:
      path: of a text file, or of a binary file of word2vec; gzip and bzip2 are
        recognized by their first bytes.
      only: the words to keep, a column as in `Vocabulary.from_columns`, for example
        `vocabulary.words[0]`; None for all. The others need no memory.
      binary: whether it is a binary file of word2vec; "auto" looks at its first vector.
      progress: True for a progress bar on stderr, or a function of (bytes read, bytes
        of the file).

    Returns:
      `(words, vectors)`, for `Vocabulary.align`: bytes `[n]`, float32 `[n, D]`.

    Raises:
      TypeError: `path` is not a path, or `only` is not a column of words.
      ValueError: a line does not have D numbers, or its word more than 1024 bytes; or
        a binary file ends too early. The message begins with file:line, or with the
        file and the number of the word.
      OSError: the file cannot be read, or is damaged.

    Example:
      >>> import os, tempfile, sparsejax as sj
      >>> path = os.path.join(tempfile.mkdtemp(), "glove.txt")
      >>> with open(path, "w") as file:
      ...     _ = file.write("tea 0.5 1.5\\njam 2 -1\\n")
      >>> words, vectors = sj.data.read_vectors(path)
      >>> words, vectors
      (array([b'tea', b'jam'], dtype='|S3'), array([[ 0.5,  1.5],
             [ 2. , -1. ]], dtype=float32))

    References:
      Pennington et al., 2014, GloVe; Mikolov et al., 2013, word2vec; Bojanowski et al.,
      2017, fastText.
    """
    path = as_path(_CALL, path)
    if binary not in (True, False, "auto"):
        raise ValueError(
            f"{_CALL}: binary must be True, False or 'auto', got {binary!r}."
        )
    keep = None
    if only is not None:
        given = _words.as_column(_CALL, only, "only").words.tolist()
        keep = frozenset(given) - {b""}  # of the missing ones
    with _text.opened(_CALL, path, progress) as read:
        first = _read_at_least(read, _SAMPLE)
        header = _HEADER.match(first)
        if binary is True and header is None:
            found = _text.show(first.partition(b"\n")[0])
            expected = "a number of words and one of dimensions (binary=True)"
            _text.refuse(path, 1, found, expected)
        if header and (binary is True or binary and _is_binary(first, header)):
            parts = _read_binary(path, first, header, read, keep)
        else:
            parts = _read_text(path, _after(first, read), keep)
        words: list[bytes] = []
        vectors: list[np.ndarray] = []
        for found, block in parts:
            words += found
            vectors.append(block)
    if not vectors:
        raise ValueError(f"{_CALL}: {os.fspath(path)} is empty.")
    return np.array(words, "S") if words else np.zeros(0, "S1"), np.concatenate(vectors)


# ------------------------------------------------------------------ text or binary


_SAMPLE = 1 << 16  # bytes, in which a header and a vector usually are
_HEADER = re.compile(rb"(?:\xef\xbb\xbf)?[ \t]*(\d{1,15})[ \t]+(\d{1,15})[ \t\r]*\n")
_CONTROL = re.compile(rb"[^\t\n\r\x20-\xff]")
_NO_NUMBER = re.compile(rb"[^\t\r\x20-\x7e]")


def _read_at_least(read: Callable[[int], bytes], size: int) -> bytes:
    parts: list[bytes] = []
    while sum(map(len, parts)) < size and (part := read(size)):
        parts.append(part)
    return b"".join(parts)


def _after(first: bytes, read: Callable[[int], bytes]) -> Callable[[int], bytes]:
    """Reads `first` once more, and then what follows."""

    def read_again(size: int) -> bytes:
        nonlocal first
        found, first = first[:size], first[size:]
        return found or read(size)

    return read_again


def _is_binary(first: bytes, header: re.Match[bytes]) -> bool:
    """Whether the first vector after a header is float32 numbers, and not text.

    Text has no control characters, and within a line only those of numbers.
    """
    begin = first.find(b" ", header.end()) + 1
    vector = first[begin : begin + 4 * int(header[2])]
    line = vector.partition(b"\n")[0]
    return begin > 0 and bool(_CONTROL.search(vector) or _NO_NUMBER.search(line))


def _read_binary(
    path: Any,
    text: bytes,
    header: re.Match[bytes],
    read: Callable[[int], bytes],
    keep: frozenset | None,
) -> Iterator[tuple[list[bytes], np.ndarray]]:
    """The words of a binary file and their vectors, some at a time."""
    count, size = int(header[1]), int(header[2])
    where, need = os.fspath(path), 4 * size
    if need > _text.MOST_LINE:
        expected = f"at most {_text.MOST_LINE // 4}"
        _text.refuse(path, 1, f"vectors of {size} numbers", expected)
    words: list[bytes] = []
    numbers: list[bytes] = []
    at, done = header.end(), 0
    while done < count:
        at += text.startswith(b"\n", at)
        space = text.find(b" ", at, at + _text.MOST_BYTES + 1)
        if space >= 0 and space + 1 + need <= len(text):
            if keep is None or text[at:space] in keep:
                words.append(text[at:space])
                numbers.append(text[space + 1 : space + 1 + need])
            at, done = space + 1 + need, done + 1
            continue
        if space < 0 and len(text) > at + _text.MOST_BYTES:
            raise ValueError(
                f"{where}, word {done + 1}: found more than {_text.MOST_BYTES} bytes "
                "without a space, expected a word (binary=False reads text)"
            )
        yield words, _vectors(numbers, size)
        words, numbers = [], []
        more = read(max(_text.BLOCK, need))
        if not more:
            raise ValueError(
                f"{where}, word {done + 1}: found the end of the file, expected a word "
                f"and {size} numbers, {count} times (binary=False reads text)"
            )
        text, at = text[at:] + more, 0
    yield words, _vectors(numbers, size)


def _vectors(numbers: list[bytes], size: int) -> np.ndarray:
    found = np.frombuffer(b"".join(numbers), "<f4").astype(np.float32, copy=False)
    return found.reshape(len(numbers), size)


# ------------------------------------------------------------------ text


def _read_text(
    path: Any, read: Callable[[int], bytes], keep: frozenset | None
) -> Iterator[tuple[list[bytes], np.ndarray]]:
    """The words of a text and their vectors, some at a time."""
    size = None
    for text, line in _text.cut_lines(path, read):
        lines = text.split(b"\n")[:-1]
        if size is None:
            if not lines[0].strip():
                _text.refuse(path, line, "an empty line", "a word and its vector")
            fields = lines[0].split()
            is_header = len(fields) == 2 and all(field.isdigit() for field in fields)
            size = int(fields[1]) if is_header else len(fields) - 1
            if is_header:
                lines, line = lines[1:], line + 1
        yield _parse(path, lines, line, size, keep)


def _parse(
    path: Any, lines: list[bytes], first: int, size: int, keep: frozenset | None
) -> tuple[list[bytes], np.ndarray]:
    """The words of some lines, and their vectors."""
    words, numbers, at = [], [], []
    for k, line in enumerate(lines):
        line = line.rstrip(b" \r")
        if not line:
            continue
        if line.count(b" ") < size:
            fields = line.count(b" ") + 1
            found = f"{fields} field{'s' if fields > 1 else ''}"
            _text.refuse(path, first + k, found, f"a word and {size} numbers")
        word, *own = line.rsplit(b" ", size)
        if len(word) > _text.MOST_BYTES:
            found = f"a word of {len(word)} bytes"
            _text.refuse(path, first + k, found, f"at most {_text.MOST_BYTES}")
        if keep is None or word in keep:
            words.append(word)
            numbers.append(b" ".join(own))
            at.append(first + k)
    found = _floats(b" ".join(numbers))
    if found is None or found.size != len(words) * size:
        for own, line in zip(numbers, at):
            one = _floats(own)
            if one is None or one.size != size:
                _text.refuse(path, line, _text.show(own), f"{size} numbers")
    assert found is not None
    return words, found.reshape(len(words), size)


def _floats(text: bytes) -> np.ndarray | None:
    """Numbers with spaces between, float32; None if one is not a number."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # where it stops, NumPy only warns
        try:
            return np.fromstring(text, np.float32, sep=" ")
        except (DeprecationWarning, ValueError):
            return None
