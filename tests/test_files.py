"""Archives read with care, and the one meaning of `progress=`."""

import io
import pickle
import sys
import zipfile

import numpy as np
import pytest

from sparsejax import _arguments
from sparsejax._files import read_npz


# ------------------------------------------------------------------ archives


def _read(path, required=("x",)):
    return read_npz("sparsejax.f", path, "a file that g wrote", required)


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
        "Bad CRC-32": content[:600]
        + bytes(b ^ 1 for b in content[600:601])
        + content[601:],
        "expected arrays named x, found y": {"y.npy": x},
        "array 'z' contains pickled objects": {
            "x.npy": x,
            "z.npy": _npy(np.array([_Bomb()], object)),
        },
        r"has 24 bytes, .* int64\[9999999999999\]": {"x.npy": claims},
        r"has 23 bytes, .* int64\[3\]": {"x.npy": x[:-1]},
        "magic string is not correct": {"x.npy": pickle.dumps(_Bomb())},
        "unknown format version": {"x.npy": x[:6] + one * 2 + x[8:]},
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


def test_all_members_are_checked_before_one_is_read(tmp_path, monkeypatch):
    wrong = {"x.npy": _npy(np.ones(3)), "y.npy": _npy(np.array([None]))}
    path = _archive(tmp_path / "a.npz", wrong)
    monkeypatch.setattr(np.lib.format, "read_array", None)
    with pytest.raises(ValueError, match="'y' contains pickled objects"):
        _read(path)


# ------------------------------------------------------------------ progress


def _report(progress, **options):
    with _arguments.progress_reporter("f", progress, " rows", **options) as report:
        report(1, 4)
        report(4, 4)


def test_a_bar_or_lines_without_tqdm(capsys, monkeypatch):
    _report(True)
    assert "f: 100%" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "tqdm", None)
    _report(True)
    err = capsys.readouterr().err
    assert err.startswith("f: 100%  ") and err.endswith(" rows/s\n")
    with pytest.raises(ImportError, match="f: progress=True needs tqdm"):
        _report(True, needs_tqdm=True)


def test_more_is_shown_behind(capsys, monkeypatch):
    for _ in range(2):
        with _arguments.progress_reporter("", True, " words") as report:
            report(3, 3, loss="1.500")
        err = capsys.readouterr().err
        assert "100%" in err and "loss" in err and "1.500" in err
        monkeypatch.setitem(sys.modules, "tqdm", None)
    assert err.startswith("100%  loss 1.500  ") and err.endswith(" words/s\n")


def test_a_function_or_nothing(capsys):
    seen = []
    _report(lambda *done: seen.append(done))
    assert seen == [(1, 4), (4, 4)]
    _report(False)
    assert capsys.readouterr() == ("", "")
    for wrong in (1, None, "yes"):
        with pytest.raises(TypeError, match="f: progress must be True, False or a fun"):
            _report(wrong)
