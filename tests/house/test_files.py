"""Files that are replaced whole: the old one or the new one, with its mode."""

import contextlib
import errno
import os
import stat
from typing import Any

import pytest

import sparsejax as sj
from sparsejax._files import replacing


@contextlib.contextmanager
def _store():
    with sj.store.KVStore() as store:
        store.init("t", (3, 2), None)
        yield store


def _save(path):
    with _store() as store:
        store.save(path)


def _export(path):
    with _store() as store:
        store.export_changes(path, since=0)


def _vocabulary(path):
    sj.data.Vocabulary({}).save(path)


# All that writes a file.
WRITERS: dict[str, Any] = {
    "KVStore.save": _save,
    "KVStore.export_changes": _export,
    "Vocabulary.save": _vocabulary,
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_file_keeps_its_mode_and_other_than_files_are_refused(name, tmp_path):
    """A rename would put a file in the place of the device, or of the FIFO."""
    path = tmp_path / "file.npz"
    for mode in (0o600, 0o640, 0o666):
        path.write_bytes(b"old")
        path.chmod(mode)
        WRITERS[name](path)
        assert path.read_bytes() != b"old"
        assert stat.S_IMODE(path.stat().st_mode) == mode
    os.mkfifo(tmp_path / "fifo.npz")
    (tmp_path / "folder.npz").mkdir()
    (tmp_path / "null.npz").symlink_to(os.devnull)
    for place in ("fifo.npz", "folder.npz", "null.npz"):
        with pytest.raises(OSError, match="Not a regular file|must be a file"):
            WRITERS[name](tmp_path / place)
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)
    assert len(os.listdir(tmp_path)) == 4


def test_a_new_file_has_the_mode_of_any_new_file_and_a_link_is_followed(tmp_path):
    (tmp_path / "link").symlink_to("ours")
    old = os.umask(0o027)
    try:
        _vocabulary(tmp_path / "link")
        (tmp_path / "other").write_bytes(b"")
    finally:
        os.umask(old)
    assert (tmp_path / "link").is_symlink()
    modes = [(tmp_path / x).stat().st_mode for x in ("ours", "other")]
    assert modes[0] == modes[1]


def test_a_file_that_may_not_be_written_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    path.chmod(0o444)
    if os.geteuid() == 0:  # who may write anything
        monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(PermissionError) as error:
        _vocabulary(path)
    assert error.value.errno == errno.EACCES and path.read_bytes() == b"old"


def test_two_that_write_one_private_file_and_an_error(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    path.chmod(0o600)
    with replacing(path) as one:
        one.write(b"one")
        (temporary,) = {*tmp_path.iterdir()} - {path}
        assert stat.S_IMODE(temporary.stat().st_mode) == 0o600
        with replacing(path) as two:
            two.write(b"two")
        assert path.read_bytes() == b"two"
    with pytest.raises(KeyError), replacing(path) as file:
        file.write(b"half")
        raise KeyError
    assert path.read_bytes() == b"one" and os.listdir(tmp_path) == ["file"]
