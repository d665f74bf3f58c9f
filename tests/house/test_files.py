"""Files that are replaced whole, and archives that are read with care."""

import errno
import io
import os
import pickle
import stat
import sys
import zipfile
from typing import Any

import numpy as np
import pytest

import sparsejax as sj
from sparsejax._files import ArraySpec, read_npz, replacing


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


# ------------------------------------------------------------------ archives


# "x" has to be there, and all others may be anything.
ANY = {
    "x": ArraySpec("biufcSU", range(3)),
    "[a-z]+": ArraySpec("biufcSU", range(3), required=False),
}


def _read(path, schema=ANY):
    return read_npz("sparsejax.f", path, "a file that g wrote", schema)


def _npy(x):
    file = io.BytesIO()
    np.save(file, x, allow_pickle=True)
    return file.getvalue()


def _archive(path, members):
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_arrays_are_read(save, tmp_path):
    arrays = {
        "x": np.arange(6.0).reshape(2, 3).T,
        "words": np.array([b"a", b"bcd"]),
        "none": np.zeros((0, 3)),
        "names": np.array([], np.str_),
        "number": np.array(7),
    }
    save(tmp_path / "a.npz", **arrays)
    found = _read(tmp_path / "a.npz")
    assert found.keys() == arrays.keys()
    for name, x in arrays.items():
        assert found[name].dtype == x.dtype
        np.testing.assert_array_equal(found[name], x)


class _Bomb:
    def __reduce__(self):
        return sys.exit, ("the pickle was read",)


def test_what_is_not_read(tmp_path):
    path = tmp_path / "a.npz"
    np.savez(path, x=np.arange(1000))
    content = path.read_bytes()
    x, one = _npy(np.arange(3)), b"\x01"
    claims = x.replace(b"(3,)", b"(9999999999999,)", 1).replace(b" " * 12, b"", 1)
    assert len(claims) == len(x)
    cases = {
        "not a zip file": b"hello",
        "File is not a zip file": content[: len(content) // 2],
        "the checksum of 'x.npy' does not match": content[:600]
        + bytes(b ^ 1 for b in content[600:601])
        + content[601:],
        "expected arrays named x, found y": {"y.npy": x},
        "Object arrays cannot be loaded": {
            "x.npy": x,
            "z.npy": _npy(np.array([_Bomb()], object)),
        },
        "": {"x.npy": claims},
        "EOF": {"x.npy": x[:-1]},
        "'x' is not an array of NumPy": {"x.npy": pickle.dumps(_Bomb())},
        "format version": {"x.npy": x[:6] + one * 2 + x[8:]},
    }
    for message, wrong in cases.items():
        if isinstance(wrong, bytes):
            path.write_bytes(wrong)
        else:
            _archive(path, wrong)
        with pytest.raises(ValueError, match=f"f: .*a.npz is not a file.*{message}"):
            _read(path)
    with pytest.raises(FileNotFoundError):
        _read(tmp_path / "nothing.npz")


def test_sizes_that_a_file_cannot_hold_are_refused(tmp_path):
    """The archive and the header agree on 10^15 bytes, in a file of some hundred."""
    claimed = 10**15
    header = f"{{'descr': '|u1', 'fortran_order': False, 'shape': ({claimed},), }}"
    content, path = _header(header), tmp_path / "a.npz"
    for method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        with zipfile.ZipFile(path, "w", method) as archive:
            archive.writestr("x.npy", content)
            # The archive's directory, as `close` writes it.
            archive.infolist()[0].file_size = len(content) - 3 + claimed
        with pytest.raises(ValueError, match="is not a file that g wrote"):
            _read(path)


def test_what_packs_well_is_read(tmp_path):
    path = tmp_path / "a.npz"
    np.savez_compressed(path, x=np.zeros(3 << 20, np.uint8))
    assert path.stat().st_size < 1 << 12
    assert not _read(path)["x"].any()


def _header(text):
    """An array of three bytes after this header."""
    text = text.encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + b"abc"


@pytest.mark.parametrize(
    "header, message",
    [
        ("{'descr': '|u1', 'fortran_order': False, 'shape': (3,), }", None),
        ("{'descr': '|u1', 'fortran_order': False, 'shape': (3, 1), }   ", None),
        ("{'descr': '|u1', 'fortran_order': False, 'shape': (-3,), }", ""),
        ("{'descr': '|u1', 'fortran_order': False, 'shape': ('3',), }", "not valid"),
        ("{'descr': '|u1', 'fortran_order': 0, 'shape': (3,), }", "not a valid bool"),
        ("{'descr': [('a', '|u1')], 'fortran_order': False, 'shape': (3,), }", "V1"),
        ("{'descr': '|x1', 'fortran_order': False, 'shape': (3,), }", "not a valid d"),
        ("__import__('os').abort()", ""),
        ("(" * 3000, ""),
        ("(" * 30_000, ""),
        ("{'descr': '|V1', 'fortran_order': False, 'shape': (3,), }", "V1 and 1 axes"),
        ("{'descr': '<f16', 'fortran_order': False, 'shape': (3,), }", "EOF"),
        ("{'descr': '<M8', 'fortran_order': False, 'shape': (3,), }", ""),
        ("{'descr': '|u1', 'fortran_order': False, 'shape': (1, 1, 3), }", "3 axes"),
    ],
)
def test_headers_of_arrays(header, message, tmp_path):
    path = _archive(tmp_path / "a.npz", {"x.npy": _header(header)})
    if message is None:
        assert _read(path)["x"].tobytes() == b"abc"
        return
    with pytest.raises(ValueError, match=f"is not a file that g wrote: .*{message}"):
        _read(path)


def test_what_else_an_archive_may_be(tmp_path):
    path, x = tmp_path / "a.npz", _npy(np.arange(3, dtype=">i2"))
    _archive(path, {"x.npy": x})
    found = _read(path)["x"]
    assert found.tolist() == [0, 1, 2] and found.dtype.isnative
    found[0] = 7  # writable, as the arrays that NumPy reads
    _archive(path, {"x.npy": x, "y.nqy": x})  # "y.npy", damaged: nothing would miss it
    with pytest.raises(ValueError, match="an array of an unknown name, 'y.nqy'"):
        _read(path)
