"""A file that appears whole and locked, once."""

import errno
import os

import pytest

from sparsejax.store import _mapped
from sparsejax.store._mapped import create


@pytest.mark.parametrize("has_links", [True, False])
def test_only_one_creates_a_file(has_links, tmp_path, monkeypatch):
    path = tmp_path / "file"
    if not has_links:

        def link(*_):
            raise OSError(errno.EPERM, "Operation not permitted")

        monkeypatch.setattr(os, "link", link)
    with create(path, lambda file: file.write(b"one")) as file:
        assert path.read_bytes() == b"one" and _mapped.is_at(file, path)
        with open(path, "rb") as other:
            assert not _mapped.lock(other)
        with pytest.raises(FileExistsError):
            create(path, lambda file: file.write(b"two"))
        assert path.read_bytes() == b"one" and os.listdir(tmp_path) == ["file"]
        path.unlink()
        assert not _mapped.is_at(file, path)
        with create(path, lambda file: file.write(b"two")):
            assert path.read_bytes() == b"two" and not _mapped.is_at(file, path)


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(_mapped.fcntl, "flock", flock)
    with create(tmp_path / "file", lambda file: file.write(b"new")):
        assert (tmp_path / "file").read_bytes() == b"new"
