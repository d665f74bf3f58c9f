"""Vocabularies of columns: counts, limits, shared words, decoding, vectors, files."""

import collections
import copy
import io
import json
import pickle
import zipfile
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import sparsejax as sj


pytest.importorskip("pyarrow")
Vocabulary = sj.data.Vocabulary
build = Vocabulary.build
USERS = [196, 186, 22, 196, 7, 22, 196]
ITEMS = ["tea", "jam", None, "tea", "crème", "jam", "tea"]
COLUMNS = {"user": USERS, "item": ITEMS}


def same(a, b):
    assert a == b
    for name in a.names:
        np.testing.assert_array_equal(a.counts(name), b.counts(name))
        kinds = [v.decode(name, np.arange(1, 2)).dtype.kind for v in (a, b)]
        assert kinds[0] == kinds[1]


# ------------------------------------------------------------------ counts, sharing


@pytest.mark.parametrize("least, most", [(1, None), (3, None), (1, 9), (4, 6)])
def test_counts_and_cut_off(least, most):
    rng = np.random.default_rng(0)
    words = [f"w{k}" if k else "" for k in rng.zipf(1.3, 2000) % 90]
    found = build({"w": words}, min_count=least, max_size=most)
    count = collections.Counter(w for w in words if w)
    kept = [(-n, w) for w, n in count.items() if n >= least]
    kept = sorted(kept)[: most and most - 1]
    ids = {word: k for k, (_, word) in enumerate(kept, 1)}
    assert found.encode("w", words).tolist() == [ids.get(w, 0) for w in words]
    assert found.size("w") == len(ids) + 1
    assert found.counts("w")[1:].tolist() == [-n for n, _ in kept]
    assert found.counts(0).sum() == len(words)
    decoded = found.decode("w", found.encode("w", words), missing="?").tolist()
    assert decoded == [w if w in ids else "?" for w in words]
    # Words are in the order of the rows, not of the bytes.
    assert found.words("w").tolist() == ["", *ids]


def test_limits_of_columns():
    """Limits of a column do not change others."""
    rng = np.random.default_rng(1)
    columns = {name: rng.zipf(1.5, 500) % 40 for name in ("user", "item", "tag")}
    least, most = {"user": 3, "tag": 2}, {"item": 5, "user": None}
    found = build(columns, min_count=least, max_size=most)
    for name, own in columns.items():
        limits: Any = dict(min_count=least.get(name, 1), max_size=most.get(name))
        want = build({name: own}, **limits)
        np.testing.assert_array_equal(found.encode(name, own), want.encode(name, own))
        np.testing.assert_array_equal(found.counts(name), want.counts(name))
    assert len({found.size(name) for name in columns}) == 3 and found.size("item") == 5
    assert build(columns, min_count=10**6).sizes() == [1, 1, 1]
    shared = build(columns, shared=[["user", "item"]], min_count={"item": 4})
    same(build(columns, shared=[["user", "item"]],
               min_count={"user": 4, "item": 4}), shared)  # fmt: skip


def test_columns_share_a_vocabulary(tmp_path):
    triples = {
        "head": ["ann", "bob", "ann"],
        "relation": ["knows", "knows", "likes"],
        "tail": ["bob", "cid", "cid"],
    }
    found = build(triples, shared=[["head", "tail"]])
    ids = found.ids(triples)
    assert ids["head"].tolist() == [1, 2, 1] and ids["tail"].tolist() == [2, 3, 3]
    assert ids["relation"].tolist() == [1, 1, 2]
    assert found.counts("head").tolist() == [0, 2, 2, 2]
    found.save(tmp_path / "triples.npz")
    loaded = Vocabulary.load(tmp_path / "triples.npz")
    same(loaded, found)
    for each in (found, loaded):
        assert repr(each) == "Vocabulary(head, tail: 4 ids; relation: 3 ids)"
    edges = {name: triples[name] for name in ("head", "tail")}
    both = build(edges, shared=True)
    assert repr(both) == "Vocabulary(head, tail: 4 ids)"
    assert both.align(["cid"], [[1.0]]).tolist() == [[0], [0], [0], [1]]


def test_equal_means_the_same_ids():
    a = build({"x": [1, 2]})
    assert a == build({"x": ["1", "2"]})
    assert a != build({"y": [1, 2]}) and a != build({"x": [1, 2, 2]})
    assert a != build({"x": [1, 2], "y": [1]}) and a != 3
    for copied in (pickle.loads(pickle.dumps(a)), copy.deepcopy(a)):
        same(copied, a)


@pytest.mark.parametrize("width", [3, 9])
def test_words_of_many_batches(monkeypatch, width):
    rng = np.random.default_rng(width)
    words = np.array([f"{k:0{width}d}"[-width:] for k in rng.integers(0, 10**6, 9000)])
    words[::7] = [f"{k}" for k in rng.integers(0, 99, len(words[::7]))]  # of any length
    words[1234] = "9" * 1000  # one long word, which is dropped below
    want = build({"w": words}, min_count=2)
    monkeypatch.setattr("sparsejax.data._vocabulary._MAX_WAITING", 500)
    batches = lambda: ({"w": words[k : k + 90]} for k in range(0, 9000, 90))
    found = build(batches(), min_count=2)
    same(found, want)
    assert found.words("w").dtype.itemsize == 4 * width
    ids = found.ids(batches())["w"]
    np.testing.assert_array_equal(ids, want.encode("w", words))
    assert 0 < np.mean(ids == 0) < 0.95


# ------------------------------------------------------------------ ids to words


@pytest.mark.parametrize(
    "words, missing, dtype",
    [
        ([3, -(2**63)], 2**63 - 1, np.int64),
        ([3, 2**64 - 1], 0, np.uint64),
        ([3, 2**63], -1, object),
        ([3, 4], 10**30, object),
    ],
)
def test_decode_of_integers_that_share_no_dtype(words, missing, dtype):
    found = build({"a": words[:1], "b": words[1:]}, shared=True)
    ids = np.append(found.encode("a", words), 0)
    got = found.decode("b", ids, missing=missing)
    assert got.dtype == dtype and got.tolist() == [*words, missing]


def test_decode_is_the_inverse_of_encode(tmp_path):
    big = np.array([2**63 + 1, 5, 5], np.uint64)
    columns = COLUMNS | {"hash": big, "raw": [b"\xff", b"\xff", 7]}
    made = build(columns)
    made.save(tmp_path / "v.npz")
    for found in (made, Vocabulary.load(tmp_path / "v.npz")):
        ids = found.ids(columns)
        assert found.decode("user", ids["user"]).tolist() == USERS
        assert found.decode("hash", ids["hash"]).tolist() == big.tolist()
        text = found.decode("item", ids["item"].reshape(7, 1))
        assert text[:5, 0].tolist() == ["tea", "jam", "", "tea", "crème"]
        raw = found.decode("raw", ids["raw"])
        assert found.encode("raw", raw).tolist() == ids["raw"].tolist()
        assert found.decode("user", [0, 1], missing=-1).tolist() == [-1, 196]
        assert found.decode("user", []).dtype == np.int64
        assert found.decode("item", jnp.array(3)).shape == ()


def test_align_takes_the_rows_of_known_words():
    rng = np.random.default_rng(1)
    found = build({"word": [f"w{k % 40}" for k in range(100)]})
    words = [f"w{k}" for k in rng.permutation(60)] + ["w3", ""]
    vectors = rng.normal(size=(len(words), 5)).astype(np.float32)
    start = rng.normal(size=(found.size("word"), 5))
    for table in (None, jnp.asarray(start)):
        got = found.align(words, vectors, table=table)
        want = np.zeros_like(start) if table is None else np.array(table)
        for word, vector in reversed(list(zip(words, vectors))):
            if (k := found.encode("word", [word])[0]) > 0:
                want[k] = vector
        np.testing.assert_array_equal(got, want.astype(np.float32))
        assert got.dtype == np.float32


# ------------------------------------------------------------------ vocabulary files


def rewrite(path, changes, method=zipfile.ZIP_STORED):
    """Changes entries of the header, or members; None removes one."""
    with zipfile.ZipFile(path) as archive:
        members: dict[str, Any] = {
            name: archive.read(name) for name in archive.namelist()
        }
    header = json.loads(members["header.json"])
    for name, change in changes.items():
        if name in header:
            header[name] = change
        elif isinstance(change, np.ndarray):
            file = io.BytesIO()
            np.save(file, change)
            members[f"{name}.npy"] = file.getvalue()
        else:
            members[name] = change
    if "header.json" not in changes:
        members["header.json"] = json.dumps(header)
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, content in members.items():
            if content is not None:
                archive.writestr(name, content)
    return path.read_bytes()


FIT = "words, ids and counts of column 0 do not match"
BYTES = "has not the .* bytes expected"
ANOTHER = "another shape or dtype"
WRONG: list[tuple[str, Any]] = [
    (FIT, {"words 0": np.array([b"bee", b"ant"])}),
    (FIT, {"words 0": np.array([b"ant", b"ant"])}),
    (BYTES, {"words 0": np.array(["ant", "bee"])}),
    (BYTES, {"words 0": np.array([b"a", b"bc"])}),
    (ANOTHER, {"words 0": np.array([1, 2, 3, 4, 5, 6], np.uint8)}),
    (BYTES, {"words 0": np.array([{}], object)}),
    (ANOTHER, {"words 0.npy": bytes(128 + 6)}),
    (FIT, {"ids 0": np.array([1, 3], np.int32)}),
    (BYTES, {"ids 0": np.array([2, 1])}),
    (FIT, {"counts 0": np.array([0, 3, -1])}),
    (BYTES, {"counts 0": np.array([0, 3])}),
    ("not the ones that its header tells", {"counts 0.npy": None}),
    ("not the ones that its header tells", {"ids 1": np.array([1, 2], np.int32)}),
    ("columns with the names", {"columns": [7]}),
    ("columns with the names", {"columns": [0, 0]}),
    ("columns with the names", {"integers": [False, False]}),
    ("columns with the names", {"names": ["x", "y"]}),
    ("invalid literal for int", {"integers": [True]}),
    ("an unexpected value, -1", {"columns": [-1]}),
    ("an unexpected value, True", {"columns": [True]}),
    (BYTES, {"sizes": {"0": {"words": 1 << 60, "width": 1}}}),
    ("not understood", {"sizes": {"0": {"words": 2, "width": 1 << 60}}}),
    (BYTES, {"sizes": {"0": {"words": 2, "width": 0}}}),
    ("its format is 'other 1'", {"format": "other 1"}),
    ("Expecting value", {"header.json": ""}),
]


def test_files_that_are_refused(tmp_path):
    """Here, and in the archive's own format; NumPy reads a good one."""
    path = tmp_path / "known.npz"
    build({"x": ["bee", "ant", "bee"]}).save(path)
    good = path.read_bytes()
    with np.load(path) as archive:
        assert archive["counts 0"].tolist() == [0, 2, 1]
    rewrite(path, {})
    assert Vocabulary.load(path).encode("x", ["ant", "bee"]).tolist() == [2, 1]
    cases = [
        ("begin and end as its archive", b"bee,ant\n" * 9),
        ("begin and end as its archive", good[: len(good) // 2]),
        ("begin and end as its archive", good + b"1"),
        ("Bad CRC-32 for file 'words 0.npy'", good.replace(b"antbee", b"antbei")),
        ("claims more than the file holds", rewrite(path, {}, zipfile.ZIP_DEFLATED)),
    ]
    build({"x": [f"{k:04}" for k in range(3000)]}).save(path)  # read in parts
    large = path.read_bytes().replace(b"29982999", b"29982998")
    cases.append(("Bad CRC-32 for file 'words 0.npy'", large))
    for message, change in WRONG:
        path.write_bytes(good)
        cases.append((message, rewrite(path, change)))
    for size in (10**15, 1 << 62):  # that the directory of the archive claims
        with zipfile.ZipFile(path, "a") as archive:
            archive.writestr("y.npy", b"")
            archive.infolist()[1].file_size = size
        cases.append(("claims more than the file holds", path.read_bytes()))
        path.write_bytes(good)
    for message, content in cases:
        path.write_bytes(content)
        refused = f"known.npz is not a whole file of the format .*{message}"
        with pytest.raises(ValueError, match=refused):
            Vocabulary.load(path)
    with pytest.raises(FileNotFoundError):
        Vocabulary.load(tmp_path / "nothing.npz")
