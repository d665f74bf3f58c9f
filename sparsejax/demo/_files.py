"""What the demo writes: files that are there whole or not at all."""

import contextlib
import json
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, BinaryIO

import numpy as np

from sparsejax._files import replacing
from sparsejax.demo._text import UserError


def check_target(option: str, path: str, inputs: Sequence[str | None]) -> None:
    """A `UserError` unless a file can be written at `path`; writes nothing there.

    Args:
      option: what the user named it with.
      path: where to.
      inputs: files that must stay as they are.
    """
    remedy = f"name another file with {option}"
    try:
        if os.path.exists(path):
            # What is replaced must be a file: not a folder, not /dev/null.
            if not stat.S_ISREG(os.stat(path).st_mode):
                raise UserError(f"{path} is there and not a regular file: {remedy}")
            if not os.access(path, os.W_OK):
                raise UserError(f"{path} may not be written to: {remedy}")
        if any(other and _same_file(path, other) for other in inputs):
            raise UserError(f"{path} is named for two things: {remedy}")
        temporary = _beside(path)
        with open(temporary, "xb"):
            pass
        os.unlink(temporary)
    except (OSError, ValueError) as e:
        reason = getattr(e, "strerror", None) or e
        raise UserError(f"cannot write {path} ({reason}): {remedy}") from None


@contextlib.contextmanager
def atomic_write(path: str) -> Iterator[BinaryIO]:
    """A file to write to that becomes `path` at the end, if all went well.

    Whatever goes wrong before that, an interrupt too, leaves an older file as it is.
    """
    try:
        with replacing(path) as file:
            yield file
    except OSError as e:
        raise UserError(
            f"cannot write {path} ({e.strerror or e}): nothing was changed there, name "
            "another place"
        ) from None


def save_vectors(
    path: str, words: Sequence[str], vectors: np.ndarray, settings: Mapping[str, Any]
) -> None:
    """Writes an npz file: `words` and `vectors`, row by row, and `settings` as JSON."""
    with atomic_write(path) as file:
        np.savez(
            file,
            words=np.array(words),
            vectors=vectors,
            settings=np.array(json.dumps(settings)),
        )


def _beside(path: str) -> str:
    """A name in the folder that the file is in, where a link points to."""
    folder, name = os.path.split(os.path.realpath(path))
    if not name or path.endswith(os.sep):
        raise OSError(0, "it is not the name of a file")
    return os.path.join(folder, f".{name}.{os.getpid()}.tmp")


def _same_file(path: str, other: str) -> bool:
    return os.path.realpath(path) == os.path.realpath(other)
