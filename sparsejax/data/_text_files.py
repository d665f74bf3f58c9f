"""Text files, compressed or not: read in blocks of whole lines, written all or nothing.

A block is about 8 MB: large enough for NumPy to work on, and small beside any memory.
"""

import bz2
import contextlib
import gzip
import os
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple, NoReturn

from sparsejax._files import replacing


BLOCK = 8 << 20

_MARK = b"\xef\xbb\xbf"  # UTF-8's byte order mark, which some programs write first


class Block(NamedTuple):
    """Whole lines of a file, the last one with its newline; `line` is the first's."""

    text: bytes
    line: int


def blocks(call: str, path: Any, progress: bool = False) -> Iterator[Block]:
    """The lines of a file, a block at a time; gzip and bzip2 are seen by their bytes.

    Args:
      call: for messages.
      path: of the file, as `as_path` lets it pass.
      progress: whether a bar on stderr says how much of the file was read.

    Raises:
      OSError: it cannot be read, or is damaged, or ends too early.
    """
    with contextlib.ExitStack() as stack:
        raw = stack.enter_context(open(path, "rb"))
        bar = None
        if progress:
            total = os.fstat(raw.fileno()).st_size
            bar = stack.enter_context(
                _tqdm(call)(total=total, unit="B", unit_scale=True)
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
                path = os.fspath(path)
                reason = (
                    f"{call}: {path} cannot be read to its end ({e}): it is "
                    "damaged or incomplete."
                )
                raise OSError(reason) from None
            if bar is not None:
                bar.update(raw.tell() - bar.n)
            end = text.rfind(b"\n") + 1
            if text and not end:  # not yet the end of the first line
                rest += text
                continue
            whole = rest + (text[:end] if text else b"")
            rest = text[end:]
            if line == 1:
                whole = whole.removeprefix(_MARK)
            if whole:
                whole = whole if whole.endswith(b"\n") else whole + b"\n"
                yield Block(whole, line)
                line += whole.count(b"\n")
            if not text:
                return


@contextlib.contextmanager
def write(path: Any) -> Iterator[BinaryIO]:
    """A file that becomes `path` at the end, if all went well; by its name compressed.

    Whatever goes wrong before that, an interrupt too, leaves an older file as it is.
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


def refuse(path: Any, line: int, found: str, expected: str) -> NoReturn:
    """The error for a malformed line: file:line: what it has, and what it should."""
    raise ValueError(f"{os.fspath(path)}:{line}: found {found}, expected {expected}")


def show(text: bytes, most: int = 40) -> str:
    """A piece of a line, for a message."""
    shown = text.decode("utf-8", "backslashreplace")
    return repr(shown if len(shown) <= most else shown[: most - 3] + "...")


def _tqdm(call: str) -> Any:
    try:
        from tqdm import tqdm
    except ImportError:
        raise ImportError(
            f"{call}: progress=True needs tqdm, which is not installed. pip install "
            "'sparsejax[data]' brings it."
        ) from None
    return tqdm
