"""Files that are replaced whole, and records that are read with care."""

import errno
import io
import os
import stat
import zipfile
from typing import Any

import numpy as np
import pytest

import sparsejax as sj
from sparsejax._files import Reader, Writer, replacing


# ------------------------------------------------------------------ replaced whole


def _write(path, content=b"new"):
    with replacing(path) as file:
        file.write(content)


def _save_store(path):
    with sj.store.KVStore() as store:
        store.init("t", (3, 2), None)
        store.save(path)


def _export_changes(path):
    with sj.store.KVStore() as store:
        store.init("t", (3, 2), None)
        store.export_changes(path, since=0)


# All that writes a file.
WRITERS: dict[str, Any] = {
    "replacing": _write,
    "KVStore.save": _save_store,
    "KVStore.export_changes": _export_changes,
    "Vocabulary.save": lambda path: sj.data.Vocabulary({}).save(path),
}
each_writer = pytest.mark.parametrize("name", WRITERS)


@each_writer
@pytest.mark.parametrize("mode", [0o600, 0o640, 0o666])
def test_a_file_keeps_its_mode(name, mode, tmp_path):
    path = tmp_path / "file.npz"
    path.write_bytes(b"old")
    path.chmod(mode)
    WRITERS[name](path)
    assert path.read_bytes() != b"old"
    assert stat.S_IMODE(path.stat().st_mode) == mode
    assert os.listdir(tmp_path) == ["file.npz"]


def test_a_new_file_has_the_mode_of_any_new_file(tmp_path):
    old = os.umask(0o027)
    try:
        _write(tmp_path / "ours")
        (tmp_path / "other").write_bytes(b"")
    finally:
        os.umask(old)
    modes = [(tmp_path / x).stat().st_mode for x in ("ours", "other")]
    assert modes[0] == modes[1]


def test_the_content_of_a_private_file_is_private_while_it_is_written(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    path.chmod(0o600)
    with replacing(path):
        (temporary,) = set(tmp_path.iterdir()) - {path}
        assert stat.S_IMODE(temporary.stat().st_mode) == 0o600


def test_a_file_that_may_not_be_written_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    path.chmod(0o444)
    if os.geteuid() == 0:  # who may write anything
        monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(PermissionError) as error:
        _write(path)
    assert error.value.errno == errno.EACCES and path.read_bytes() == b"old"


@each_writer
def test_other_than_files_are_refused(name, tmp_path):
    """A rename would put a file in the place of the device, or of the FIFO."""
    os.mkfifo(tmp_path / "fifo.npz")
    (tmp_path / "folder.npz").mkdir()
    (tmp_path / "null.npz").symlink_to(os.devnull)
    for place in ("fifo.npz", "folder.npz", "null.npz"):
        with pytest.raises(OSError, match="Not a regular file|must be a file"):
            WRITERS[name](tmp_path / place)
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)
    assert len(os.listdir(tmp_path)) == 3


def test_a_link_is_followed(tmp_path):
    (tmp_path / "link").symlink_to("file")
    _write(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_bytes() == b"new"


def test_two_that_write_one_file(tmp_path):
    path = tmp_path / "file"
    with replacing(path) as one:
        one.write(b"one")
        with replacing(path) as two:
            two.write(b"two")
        assert path.read_bytes() == b"two"
    assert path.read_bytes() == b"one" and os.listdir(tmp_path) == ["file"]


def test_an_error_leaves_the_old_file(tmp_path):
    _write(tmp_path / "file", b"old")
    with pytest.raises(KeyError), replacing(tmp_path / "file") as file:
        file.write(b"half")
        raise KeyError
    assert (tmp_path / "file").read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


# ------------------------------------------------------------------ records


X = np.arange(1000).reshape(10, 100)
SPEC = {"x": (X.shape, X.dtype)}


def _read(path):
    with Reader(path, "f 1", {"n": int}) as reader:
        reader.expect(SPEC)
        return reader.header["n"], reader.array("x", SPEC["x"])


def _record(path, members: Any = (), form="f 1", method=zipfile.ZIP_STORED):
    """A record, with other members."""
    with open(path, "wb") as file:
        writer = Writer(file, form, {"n": 7})
        writer.array("x", X)
        writer.close()
    with zipfile.ZipFile(path) as archive:
        all_members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, content in (all_members | dict(members)).items():
            if content is not None:
                archive.writestr(name, content)
    return path.read_bytes()


def test_a_record_is_read_here_and_by_numpy(tmp_path):
    path = tmp_path / "a.npz"
    _record(path)
    number, found = _read(path)
    assert number == 7 and found.dtype == X.dtype
    np.testing.assert_array_equal(found, X)
    found[0] = 7  # writable
    with np.load(path) as archive:
        np.testing.assert_array_equal(archive["x"], X)


def test_what_is_not_read(tmp_path):
    path = tmp_path / "a.npz"
    good = _record(path)
    npy = io.BytesIO()
    np.save(npy, np.array([{}], object), allow_pickle=True)
    header = '{"format": "f 1", "n": %s}'
    cases = {
        "begin and end as its archive": [b"hello" * 9, good[:2000], good + b"1"],
        "Bad CRC-32 for file 'x.npy'": good[:900] + b"1" + good[901:],
        "its format is 'f 2'": _record(path, form="f 2"),
        "claims more than the file holds": _record(path, method=zipfile.ZIP_DEFLATED),
        "not the ones that its header tells": [
            _record(path, {"x.npy": None}),
            _record(path, {"y.npy": b""}),
        ],
        "array x has not the": _record(path, {"x.npy": npy.getvalue()}),
        "another shape or dtype": _record(path, {"x.npy": bytes(128 + X.nbytes)}),
        "an unexpected value, -1": _record(path, {"header.json": header % -1}),
        "an unexpected value, True": _record(path, {"header.json": header % "true"}),
        "Expecting value": _record(path, {"header.json": ""}),
    }
    for message, contents in cases.items():
        for content in contents if isinstance(contents, list) else [contents]:
            path.write_bytes(content)
            with pytest.raises(ValueError, match=f"a.npz is not a whole .*{message}"):
                _read(path)
    with pytest.raises(FileNotFoundError):
        _read(tmp_path / "nothing.npz")


def test_sizes_that_a_file_cannot_hold_are_refused(tmp_path):
    """The directory of the archive claims 10^15 bytes, in a file of some thousand."""
    path = tmp_path / "a.npz"
    for claimed in (10**15, 1 << 62):
        _record(path)
        with zipfile.ZipFile(path, "a") as archive:
            archive.writestr("y.npy", b"")
            archive.infolist()[1].file_size = claimed
        with pytest.raises(ValueError, match="claims more than the file holds"):
            _read(path)
