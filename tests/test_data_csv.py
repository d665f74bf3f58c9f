"""Click logs: labels, numbers, categories by hash or vocabulary."""

import dataclasses
import gzip
import io
import subprocess
import sys
from typing import Any, cast

import numpy as np
import pytest

import sparsejax as sj
from sparsejax.data import _text


ROWS = [
    ["1", "5", "", "-3", "68fd1e64", "80e26c9b", ""],
    ["0", "", "2.5", "1e3", "05db9164", "", "fb936136"],
    ["1", "7", "0", "12", "68fd1e64", "f0cf0024", "fb936136"],
]
LAYOUT: Any = dict(num_numbers=3, num_ids=3)


def _file(tmp_path, rows, separator="\t", end="\n", name="clicks.txt"):
    path = tmp_path / name
    path.write_bytes("".join(separator.join(row) + end for row in rows).encode())
    return path


def _hash(word, column, size, seed=0):
    """The id of a word, written out once more with Python's integers."""
    mask = (1 << 64) - 1

    def mix(x):
        x = (x ^ x >> 33) * 0xFF51AFD7ED558CCD & mask
        x = (x ^ x >> 33) * 0xC4CEB9FE1A85EC53 & mask
        return x ^ x >> 33

    state = 0xCBF29CE484222325 ^ mix((mix(seed + 1) + column) & mask)
    for byte in word:
        state = (state ^ byte) * 0x100000001B3 & mask
    return 1 + mix(state) % (size - 1) if word else 0


@pytest.mark.parametrize("separator", ["\t", ","])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_rows_become_columns(tmp_path, separator, end):
    path = _file(tmp_path, ROWS, separator, end)
    data = sj.data.read_csv_ids(path, 1000, **LAYOUT)
    assert data["label"].tolist() == [1, 0, 1]
    expected = [[5, np.nan, -3], [np.nan, 2.5, 1000], [7, 0, 12]]
    np.testing.assert_array_equal(data["numbers"], np.array(expected, np.float32))
    hashed = [[_hash(w.encode(), c, 1000) for c, w in enumerate(r[4:])] for r in ROWS]
    assert data["ids"].tolist() == hashed
    assert {name: x.dtype.name for name, x in data.items()} == {
        "label": "float32",
        "numbers": "float32",
        "ids": "int32",
    }
    filled = sj.data.read_csv_ids(path, 1000, missing=-1.0, **LAYOUT)
    assert filled["numbers"][0].tolist() == [5, -1, -3]


def test_forms_of_files(tmp_path):
    whole = sj.data.read_csv_ids(_file(tmp_path, ROWS), 1000, **LAYOUT)

    def same(path, **options: Any):
        data = sj.data.read_csv_ids(path, 1000, **LAYOUT, **options)
        for name in data:
            np.testing.assert_array_equal(data[name], whole[name])
        return True

    packed = tmp_path / "clicks.gz"
    packed.write_bytes(gzip.compress(_file(tmp_path, ROWS).read_bytes()))
    assert same(packed)
    assert same(_file(tmp_path, [["a"] * 7, *ROWS]), header=True)
    assert same(_file(tmp_path, ROWS, ";"), separator=";")
    spaced = [ROWS[0], [], ROWS[1], ROWS[2]]
    assert same(_file(tmp_path, spaced, end="\r\n"))
    path = _file(tmp_path, ROWS)
    path.write_bytes(path.read_bytes()[:-1])  # no newline at the end
    assert same(path)
    unlabelled = sj.data.read_csv_ids(
        _file(tmp_path, [row[1:] for row in ROWS]), 1000, label=False, **LAYOUT
    )
    assert unlabelled.keys() == {"numbers", "ids"}
    np.testing.assert_array_equal(unlabelled["ids"], whole["ids"])
    empty = sj.data.read_csv_ids(_file(tmp_path, []), 1000)
    assert [x.shape for x in empty.values()] == [(0,), (0, 13), (0, 26)]


def test_parts_of_a_file(tmp_path, monkeypatch):
    rows = [[str(i), str(i), f"w{i % 7}"] for i in range(50)]
    path = _file(tmp_path, rows)
    layout: Any = dict(num_numbers=1, num_ids=1)
    whole = sj.data.read_csv_ids(path, 100, **layout)
    for block in (20, 200):
        monkeypatch.setattr(_text, "BLOCK", block)
        parts = list(sj.data.iter_csv_ids(path, 100, chunk_rows=8, **layout))
        assert [len(part["ids"]) for part in parts] == [8] * 6 + [2]
        for name in whole:
            joined = np.concatenate([part[name] for part in parts])
            np.testing.assert_array_equal(joined, whole[name])


# ------------------------------------------------------------------ any order


RATINGS = [
    ["user", "item", "rating", "time"],
    ["7", "3", "4.5", "99"],
    ["8", "3", "", "5"],
]
PLACES: Any = {"label": 2, "ids": [0, 1]}
NAMES: Any = {"ids": ("user", "item"), "label": "rating"}


@pytest.mark.parametrize("columns", [PLACES, NAMES])
def test_ratings_are_read_by_place_or_by_name(tmp_path, monkeypatch, columns):
    path = _file(tmp_path, [[], *RATINGS], ",", "\r\n")
    data = sj.data.read_csv_ids(path, 1000, columns=columns, header=True, missing=3)
    np.testing.assert_array_equal(data["label"], np.array([4.5, 3], np.float32))
    hashed = [
        [_hash(w.encode(), c, 1000) for c, w in enumerate(r[:2])] for r in RATINGS
    ]
    assert data["ids"].tolist() == hashed[1:] and data.keys() == {"label", "ids"}
    known = sj.data.Vocabulary.build(path, columns=columns, header=True)
    assert known.sizes() == [3, 2]
    monkeypatch.setattr(_text, "BLOCK", 3)
    parts = sj.data.iter_csv_ids(
        path, known, columns=columns, header=True, missing=3, chunk_rows=1
    )
    assert [part["ids"].tolist() for part in parts] == [[[1, 1]], [[2, 1]]]


def test_fields_in_any_order(tmp_path):
    whole = sj.data.read_csv_ids(_file(tmp_path, ROWS), 1000, **LAYOUT)
    columns = {"ids": [4, 5, 6], "numbers": (3, 1), "label": np.int64(0)}
    data = sj.data.read_csv_ids(_file(tmp_path, ROWS), 1000, columns=columns)
    assert list(data) == ["label", "numbers", "ids"]
    np.testing.assert_array_equal(data["numbers"], whole["numbers"][:, [2, 0]])
    np.testing.assert_array_equal(data["ids"], whole["ids"])
    turned = [[*row[4:], row[0]] for row in ROWS]
    path = _file(tmp_path, [["a", "b", "c", "y"], *turned])
    data = sj.data.read_csv_ids(path, 1000, columns={"ids": "c"})
    assert data.keys() == {"ids"}
    assert data["ids"].tolist() == [[_hash(r[6].encode(), 0, 1000)] for r in ROWS]
    empty = sj.data.read_csv_ids(_file(tmp_path, []), 9, columns=NAMES)
    assert {name: x.shape for name, x in empty.items()} == {
        "label": (0,),
        "ids": (0, 2),
    }


@pytest.mark.parametrize(
    "columns, message",
    [
        ([0, 1], "columns must be a dict .* 'ids' and optionally 'label'"),
        ({"label": 2}, "columns must be a dict"),
        ({"ids": 0, "user": 1}, "columns must be a dict"),
        ({"ids": [0, -1]}, r"columns\['ids'\] must be a list of ints and strs"),
        ({"ids": None}, r"columns\['ids'\] must be a list"),
        ({"ids": 0, "label": [2]}, r"columns\['label'\] must be one int or str"),
        ({"ids": [0, 4]}, ":1: found 4 fields, expected a field 4 .counting from 0"),
        ({"ids": "usr"}, ":1: found the names 'user, item, rating, time', exp.* 'usr'"),
    ],
)
def test_columns_that_are_not_there(tmp_path, columns, message):
    path = _file(tmp_path, RATINGS, ",")
    where = f"{path}" if message.startswith(":") else ""
    with pytest.raises(ValueError, match=where + message):
        sj.data.read_csv_ids(path, 9, columns=columns)
    with pytest.raises(ValueError, match=where + message):
        sj.data.Vocabulary.build(path, columns=columns)


def test_columns_stand_alone(tmp_path):
    path = _file(tmp_path, [*RATINGS, ["1", "2", "3"]], ",")
    with pytest.raises(ValueError, match="Omit num_numbers"):
        sj.data.read_csv_ids(path, 9, columns=PLACES, num_ids=2)
    with pytest.raises(ValueError, match=r":4: found 3 fields, expected 4 \(as in the"):
        sj.data.read_csv_ids(path, 9, columns=NAMES)


def test_a_byte_order_mark_is_no_part_of_a_word(tmp_path, monkeypatch):
    path = tmp_path / "marked.csv"
    path.write_bytes(b"\xef\xbb\xbfa,b\n\xef\xbb\xbfa,b\n")
    for block in (2, 100):
        monkeypatch.setattr(_text, "BLOCK", block)
        known = sj.data.Vocabulary.build(path, columns={"ids": 0})
        assert known.words[0].tolist() == [b"a", b"\xef\xbb\xbfa"]
    path.write_bytes(b"\xef\xbb\xbfuser,rating\nx,2\n")
    data = sj.data.read_csv_ids(path, 9, columns={"ids": "user", "label": "rating"})
    assert data["label"].tolist() == [2.0]


# ------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    "rows, message",
    [
        (
            [ROWS[0], ROWS[1][:6]],
            ":2: found 6 fields, expected 7 .label, 3 numbers, 3 categories. with tabs",
        ),
        ([ROWS[0], ["x"]], ":2: found 1 field, expected 7"),
        ([[], ROWS[0], [*ROWS[1], "x"]], ":3: found 8 fields"),
        ([ROWS[0], ["0", "1", "abc", *ROWS[1][3:]]], ":2: found 'abc' in field 3, exp"),
        ([["y", *ROWS[0][1:]]], ":1: found 'y' in field 1, expected a number, or noth"),
        (
            [["1", "1e39", *ROWS[0][2:]]],
            ":1: found '1e39' in field 2, expected a number that float32 holds",
        ),
        (
            [[*ROWS[0][:-1], "x" * 2000]],
            ":1: found a category of 2000 bytes",
        ),
    ],
)
def test_malformed_rows_are_named(tmp_path, rows, message):
    path = _file(tmp_path, rows)
    with pytest.raises(ValueError, match=f"{path}{message}"):
        sj.data.read_csv_ids(path, 1000, **LAYOUT)


@pytest.mark.slow
def test_a_hash_is_the_same_in_every_process():
    words = [f"{i:08x}".encode() for i in range(2000)]
    encoder = sj.data.HashIds([50, 1000], seed=3)
    for column, size in enumerate(encoder.sizes(2)):
        ids = encoder.encode(column, words)
        assert ids.tolist() == [_hash(w, column, size, 3) for w in words]
        counts = np.bincount(ids, minlength=size)
        assert counts[0] == 0 and len(counts) == size
        # As even as a random assignment would be: chi squared, mean size - 2.
        expected = len(words) / (size - 1)
        chi = ((counts[1:] - expected) ** 2 / expected).sum()
        assert abs(chi - (size - 2)) < 5 * np.sqrt(2 * size)
    code = "import sparsejax as sj; print(sj.data.HashIds(1000).encode(1, ['abc'])[0])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) == _hash(b"abc", 1, 1000)


def test_a_vocabulary_counts_and_cuts(tmp_path):
    words = [["b", "x"], ["a", ""], ["b", "y"], ["c", "x"], ["a", ""], ["b", "z"]]
    path = _file(tmp_path, words)
    layout: Any = dict(label=False, num_numbers=0, num_ids=2)
    build = sj.data.Vocabulary.build
    full = build(path, **layout)
    assert full.sizes() == [4, 4]
    data = sj.data.read_csv_ids(path, full, **layout)
    assert data["ids"].T.tolist() == [[1, 2, 1, 3, 2, 1], [1, 0, 2, 1, 0, 3]]
    assert full.encode(1, [b"new", b"x", b"", "y", b"xx"]).tolist() == [0, 1, 0, 2, 0]
    common = build(path, min_count=2, **layout)
    assert common.sizes(2) == [3, 2]
    assert build(path, max_size=2, **layout).sizes() == [2, 2]
    twice = build([path, path], min_count=2, **layout)
    assert twice.sizes() == full.sizes()
    assert build(path, min_count=9, **layout).encode(0, [b"a"]).tolist() == [0]


@pytest.mark.parametrize(
    "ids, options, error, message",
    [
        ("md5", {}, TypeError, "must be a HashIds, a Vocabulary, or an int"),
        (1, {}, ValueError, "num_buckets must be an int from 2 to 2147483647"),
        (
            sj.data.HashIds([9, 9]),
            {},
            ValueError,
            "2 entries, but the file has 3 columns",
        ),
        (9, dict(separator="ab"), ValueError, "separator must be 'auto' or one"),
        (9, dict(num_ids=-1), ValueError, "num_ids must be a static, non-negative int"),
        (9, dict(header=1), TypeError, "header must be True or False"),
        (2**31, {}, ValueError, "from 2 to 2147483647.* got 2147483648"),
        (9, dict(missing="x"), TypeError, "missing must be a number, got 'x'"),
        (9, dict(path=None), TypeError, "path must be a str or os.PathLike, got N"),
        (9, dict(path=io.BytesIO()), TypeError, "path must be a str .*BytesIO"),
    ],
)
def test_wrong_options_are_refused(tmp_path, ids, options, error, message):
    arguments = {"path": _file(tmp_path, ROWS), **LAYOUT, **options}
    with pytest.raises(error, match=message):
        sj.data.read_csv_ids(ids=ids, **arguments)
    with pytest.raises(error, match=message):
        sj.data.iter_csv_ids(ids=ids, **arguments)


@pytest.mark.parametrize("path", [None, [None], io.BytesIO()])
def test_a_vocabulary_is_built_of_files(path):
    with pytest.raises(TypeError, match=r"Vocabulary\.build: path must be a str"):
        sj.data.Vocabulary.build(path)


def test_a_row_of_one_field(tmp_path):
    layout: Any = dict(label=False, num_numbers=0, num_ids=1)
    path = _file(tmp_path, [["a"], [], ["a", "b"]], ",")
    with pytest.raises(ValueError, match=":3: found 2 fields, expected 1"):
        sj.data.read_csv_ids(path, 9, **layout)


def test_columns_go_into_a_loader(tmp_path):
    data = sj.data.read_csv_ids(_file(tmp_path, ROWS), 1000, missing=0.0, **LAYOUT)
    loader = sj.data.DataLoader(sj.data.ArrayDataset(data), 3)
    (batch,) = loader
    assert {name: x.shape for name, x in batch.items()} == {
        "label": (3,),
        "numbers": (3, 3),
        "ids": (3, 3),
    }


def test_vocabulary_is_saved_and_loaded(tmp_path):
    file, saved = tmp_path / "clicks.csv", tmp_path / "vocabulary.npz"
    file.write_text("b,x\na,\nb,\u00e9\n")
    built = sj.data.Vocabulary.build(file, columns={"ids": [0, 1]})
    built.save(saved)
    loaded = sj.data.Vocabulary.load(saved)
    assert loaded.sizes() == built.sizes() == [3, 3]
    words = ["a", "b", "x", "\u00e9", "new"]
    for column in (0, 1):
        want = built.encode(column, words)
        np.testing.assert_array_equal(loaded.encode(column, words), want)
    np.savez(tmp_path / "other.npz", a=np.ones(2), b=np.ones(2))
    np.save(tmp_path / "one.npy", np.ones(2))
    whole = saved.read_bytes()
    saved.write_bytes(whole[: len(whole) // 2])
    for other in (file, tmp_path / "other.npz", tmp_path / "one.npy", saved):
        with pytest.raises(ValueError, match="not a file that Vocabulary.save wrote"):
            sj.data.Vocabulary.load(other)
    with pytest.raises(FileNotFoundError):
        sj.data.Vocabulary.load(tmp_path / "missing.npz")
    with pytest.raises(TypeError, match="must be a str"):
        built.save(cast(Any, 3))


def test_columns_of_another_name_are_no_other_columns(tmp_path):
    file = _file(
        tmp_path, [x.split() for x in ("user item rating", "ann tea 5", "bob jam 2")]
    )
    columns = {"label": "rating", "ids": ["user", "item"]}
    known = sj.data.Vocabulary.build(file, columns=columns)
    known.save(tmp_path / "known.npz")
    swapped = {"label": "rating", "ids": ["item", "user"]}
    for vocabulary in (known, sj.data.Vocabulary.load(tmp_path / "known.npz")):
        with pytest.raises(ValueError, match=r"for the columns \['user', 'item'\]"):
            sj.data.read_csv_ids(file, vocabulary, columns=swapped)
        same = dataclasses.replace(vocabulary, names=())
        assert not sj.data.read_csv_ids(file, same, columns=swapped)["ids"].any()
    by_place = {"label": 2, "ids": [0, 1]}
    data = sj.data.read_csv_ids(file, known, columns=by_place, header=True)
    np.testing.assert_array_equal(data["ids"], [[1, 2], [2, 1]])


def test_a_missing_label_is_an_error_unless_it_is_filled_in(tmp_path):
    file = _file(
        tmp_path, [("user", "rating"), ("ann", "5"), ("bob", ""), ("cid", "1")]
    )
    columns = {"label": "rating", "ids": "user"}
    with pytest.raises(ValueError, match=r":3: found nothing in field 2, expected"):
        sj.data.read_csv_ids(file, 100, columns=columns)
    data = sj.data.read_csv_ids(file, 100, columns=columns, missing=0.0)
    assert data["label"].tolist() == [5, 0, 1]
