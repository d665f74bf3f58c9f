"""read_ids, iter_ids: the choice of columns, ids and numbers, and refusals."""

import dataclasses
import io
from typing import Any

import numpy as np
import pytest

import sparsejax as sj
from sparsejax.data import _sources
from test_hash_ids import hash_of


ROWS = [
    ["1", "5", "", "-3", "68fd1e64", "80e26c9b", ""],
    ["0", "", "2.5", "1e3", "05db9164", "", "fb936136"],
    ["1", "7", "0", "12", "68fd1e64", "f0cf0024", "fb936136"],
]
LAYOUT: Any = {"label": 0, "numbers": range(1, 4), "ids": range(4, 7)}


def _file(tmp_path, rows, separator="\t", end="\n", name="clicks.txt"):
    path = tmp_path / name
    path.write_bytes("".join(separator.join(row) + end for row in rows).encode())
    return path


@pytest.mark.parametrize("separator", ["\t", ","])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_rows_become_columns(tmp_path, separator, end):
    path = _file(tmp_path, ROWS, separator, end)
    data = sj.data.read_ids(path, 1000, LAYOUT)
    assert data["label"].tolist() == [1, 0, 1]
    expected = [[5, np.nan, -3], [np.nan, 2.5, 1000], [7, 0, 12]]
    np.testing.assert_array_equal(data["numbers"], np.array(expected, np.float32))
    hashed = [[hash_of(w.encode(), c, 1000) for c, w in enumerate(r[4:])] for r in ROWS]
    assert data["ids"].tolist() == hashed
    assert {name: x.dtype.name for name, x in data.items()} == {
        "label": "float32",
        "numbers": "float32",
        "ids": "int32",
    }
    filled = sj.data.read_ids(path, 1000, LAYOUT, missing=-1.0)
    assert filled["numbers"][0].tolist() == [5, -1, -3]


def test_parts_of_a_file(tmp_path, monkeypatch):
    rows = [[str(i), str(i), f"w{i % 7}"] for i in range(50)]
    path = _file(tmp_path, rows)
    layout: Any = {"label": 0, "numbers": [1], "ids": [2]}
    whole = sj.data.read_ids(path, 100, layout)
    for block in (20, 200, 1 << 20):
        monkeypatch.setattr(_sources, "BLOCK", block)
        parts = list(sj.data.iter_ids(path, 100, layout, chunk_rows=8))
        assert [len(part["ids"]) for part in parts] == [8] * 6 + [2]
        for name in whole:
            joined = np.concatenate([part[name] for part in parts])
            np.testing.assert_array_equal(joined, whole[name])
    twice = sj.data.read_ids([path, str(path)], 100, layout)
    np.testing.assert_array_equal(twice["ids"], np.concatenate([whole["ids"]] * 2))


# ------------------------------------------------------------------ which columns


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
    data = sj.data.read_ids(path, 1000, columns, header=True, missing=3)
    np.testing.assert_array_equal(data["label"], np.array([4.5, 3], np.float32))
    hashed = [
        [hash_of(w.encode(), c, 1000) for c, w in enumerate(r[:2])] for r in RATINGS
    ]
    assert data["ids"].tolist() == hashed[1:] and data.keys() == {"label", "ids"}
    known = sj.data.Vocabulary.build(path, columns, header=True)
    assert known.sizes() == [3, 2]
    monkeypatch.setattr(_sources, "BLOCK", 25)
    parts = sj.data.iter_ids(path, known, columns, header=True, missing=3, chunk_rows=1)
    assert [part["ids"].tolist() for part in parts] == [[[1, 1]], [[2, 1]]]


def test_columns_in_any_order(tmp_path):
    whole = sj.data.read_ids(_file(tmp_path, ROWS), 1000, LAYOUT)
    columns = {"ids": [4, 5, 6], "numbers": (3, 1), "label": np.int64(0)}
    data = sj.data.read_ids(_file(tmp_path, ROWS), 1000, columns)
    assert list(data) == ["label", "numbers", "ids"]
    np.testing.assert_array_equal(data["numbers"], whole["numbers"][:, [2, 0]])
    np.testing.assert_array_equal(data["ids"], whole["ids"])
    turned = [[*row[4:], row[0]] for row in ROWS]
    path = _file(tmp_path, [["a", "b", "c", "y"], *turned])
    data = sj.data.read_ids(path, 1000, {"ids": "c"})
    assert data.keys() == {"ids"}
    assert data["ids"].tolist() == [[hash_of(r[6].encode(), 0, 1000)] for r in ROWS]


def test_files_without_rows(tmp_path):
    empty = _file(tmp_path, [])
    found = sj.data.read_ids(empty, 1000, LAYOUT)
    assert [x.shape for x in found.values()] == [(0,), (0, 3), (0, 3)]
    assert sj.data.Vocabulary.build(empty, {"ids": [0]}).sizes() == [1]
    with pytest.raises(ValueError, match="is empty, but its first line must be"):
        sj.data.read_ids(empty, 9, NAMES)
    only_names = _file(tmp_path, RATINGS[:1], ",")
    found = sj.data.read_ids(only_names, 9, NAMES)
    assert {name: x.shape for name, x in found.items()} == {
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
        ({"ids": [0, 4]}, "has the columns .*, expected a column 4 .counting from 0"),
        ({"ids": "usr"}, "columns 'user, item, rating, time', expected the name 'usr'"),
    ],
)
def test_columns_that_are_not_there(tmp_path, columns, message):
    path = _file(tmp_path, RATINGS, ",")
    where = f"{path} " if message.startswith(("has", "columns '")) else ""
    message = message.replace("columns 'u", "has the columns 'u")
    error: Any = ValueError if hasattr(columns, "keys") else TypeError
    with pytest.raises(error, match=where + message):
        sj.data.read_ids(path, 9, columns)
    with pytest.raises(error, match=where + message):
        sj.data.Vocabulary.build(path, columns)


def test_a_name_that_two_columns_have(tmp_path):
    path = _file(tmp_path, [["user", "user", "y"], ["a", "b", "1"]], ",")
    for columns in ({"ids": "user"}, {"ids": 0}):
        with pytest.raises(ValueError, match="user, user, y"):
            sj.data.read_ids(path, 9, columns, header=True)
    assert sj.data.read_ids(path, 9, {"ids": "y"})["ids"].shape == (1, 1)


def test_blanks_are_not_part_of_words_and_names(tmp_path):
    """The same names in files of different style get the same ids."""
    files = [
        "user,item,rating\nann,tea,5\nbob,jam,2\n",
        '"user","item","rating"\n"ann","tea","5"\n"bob","jam","2"\n',
        "user, item, rating\r\nann, tea, 5\r\nbob , jam , 2\r\n",
    ]
    columns = {"label": "rating", "ids": ["user", "item"]}
    for k, text in enumerate(files):
        path = tmp_path / f"{k}.csv"
        path.write_text(text, newline="")
        known = sj.data.Vocabulary.build(path, columns)
        assert known.names == ["user", "item"]
        assert known.encode(0, ["ann", "bob"]).tolist() == [1, 2]
        data = sj.data.read_ids(path, known, columns)
        assert data["ids"].tolist() == [[1, 2], [2, 1]]
        assert data["label"].tolist() == [5, 2]
        hashed = sj.data.read_ids(path, 1000, columns)["ids"]
        assert hashed.tolist() == [
            [hash_of(w, c, 1000) for c, w in enumerate(row)]
            for row in [(b"ann", b"tea"), (b"bob", b"jam")]
        ]
    raw = sj.data.Vocabulary.build(
        tmp_path / "1.csv", {"ids": 0}, header=True, quotes=False
    )
    assert raw.sorted_words[0].tolist() == [b'"ann"', b'"bob"']


def test_all_columns_are_words():
    data = {"user": [7, 8], "item": ["tea", None]}
    known = sj.data.Vocabulary.build(data)
    assert sj.data.read_ids(data, known)["ids"].tolist() == [[1, 1], [2, 0]]


def test_one_long_word_does_not_widen_all(tmp_path):
    path = tmp_path / "rows.csv"
    words = [f"w{i % 50}" for i in range(3000)]
    words[1234] = "long" * 250
    path.write_text("\n".join(words) + "\n")
    found = sj.data.read_ids(path, 1000, {"ids": 0})["ids"][:, 0]
    assert found.tolist() == [hash_of(w.encode(), 0, 1000) for w in words]
    known = sj.data.Vocabulary.build(path, {"ids": 0})
    assert known.sizes() == [52]
    common = known.prune(min_count=2)
    assert common.sorted_words[0].dtype == np.dtype("S3")
    assert (
        common.encode(0, words)[1230:1238].tolist()
        == known.encode(0, [*words[1230:1234], None, *words[1235:1238]]).tolist()
    )


@pytest.mark.parametrize("of_file", [False, True])
def test_rounded_numbers_are_told(tmp_path, of_file):
    """A time in seconds has 31 bits. Fractions are rounded without a word."""
    columns = {"ids": ["word"], "numbers": ["time", "share"]}
    data = {"word": ["a", "b"], "share": [0.1, 1e30], "time": [2**24, 2**24 + 1]}
    source = data
    if of_file:
        source = tmp_path / "log.csv"
        rows = [data, *zip(*data.values())]
        source.write_text("".join(",".join(map(str, row)) + "\n" for row in rows))
    with pytest.warns(UserWarning, match="whole numbers of the column 'time' of"):
        sj.data.read_ids(source, 100, columns)
    data["time"][1] += 1  # float32 holds 2**24 + 2
    sj.data.read_ids(data, 100, columns)


# ------------------------------------------------------------------ refusals


def test_times_are_refused_with_what_to_pass():
    data = {"word": ["a"], "time": np.array(["2026-11-27"], "datetime64[s]")}
    with pytest.raises(TypeError, match="pass the seconds since the first one"):
        sj.data.read_ids(data, 100, {"ids": ["word"], "numbers": ["time"]})


@pytest.mark.parametrize(
    "rows, message",
    [
        ([ROWS[0], ROWS[1][:6]], "Row #2: Expected 7 columns, got 6"),
        ([ROWS[0], ["x"]], "Row #2: Expected 7 columns, got 1"),
        ([ROWS[0], [*ROWS[1], "x"]], "Row #2: Expected 7 columns, got 8"),
        (
            [ROWS[0], ["0", "1", "abc", *ROWS[1][3:]]],
            "column #2: Row #2: .* invalid value 'abc'",
        ),
        ([["y", *ROWS[0][1:]]], "column #0: Row #1: .* invalid value 'y'"),
        (
            [ROWS[1], ["1", "1e39", *ROWS[0][2:]]],
            "row 1 from 0: found 1e.39 in the column 'f1', .* float32 holds",
        ),
        (
            [[*ROWS[0][:-1], "x" * 2000]],
            "column 'f6' of .* at most 1024 bytes, got one of 2000 bytes",
        ),
    ],
)
def test_malformed_rows_are_named(tmp_path, rows, message):
    path = _file(tmp_path, rows)
    with pytest.raises(ValueError, match=message) as caught:
        sj.data.read_ids(path, 1000, LAYOUT)
    assert str(path) in str(caught.value)
    assert "sparsejax.data.read_ids" in str(caught.value)


@pytest.mark.parametrize(
    "encoder, options, error, message",
    [
        ("md5", {}, TypeError, "must be a HashIds, a Vocabulary, or an int"),
        (9, dict(separator="::"), ValueError, "separator must be 'auto' or one"),
        (9, dict(header=1), TypeError, "header must be True or False"),
        (2**31, {}, ValueError, "from 2 to 2147483647.* got 2147483648"),
        (9, dict(missing="x"), TypeError, "missing must be a number, got 'x'"),
        (9, dict(source=None), TypeError, "source must be a path.* got None"),
        (9, dict(source=io.BytesIO()), TypeError, "source must be a path.*BytesIO"),
        (9, dict(source=[None]), TypeError, "source must be a path.* a list"),
    ],
)
def test_wrong_options_are_refused(tmp_path, encoder, options, error, message):
    arguments = {"source": _file(tmp_path, ROWS), "columns": LAYOUT, **options}
    with pytest.raises(error, match=message):
        sj.data.read_ids(encoder=encoder, **arguments)
    with pytest.raises(error, match=message):
        sj.data.iter_ids(encoder=encoder, **arguments)
    if "source" in options:
        with pytest.raises(error, match=message):
            sj.data.Vocabulary.build(options["source"])


def test_columns_go_into_a_loader(tmp_path):
    data = sj.data.read_ids(_file(tmp_path, ROWS), 1000, LAYOUT, missing=0.0)
    loader = sj.data.DataLoader(sj.data.ArrayDataset(data), 3)
    (batch,) = loader
    assert {name: x.shape for name, x in batch.items()} == {
        "label": (3,),
        "numbers": (3, 3),
        "ids": (3, 3),
    }


def test_columns_of_another_order_are_refused(tmp_path):
    file = _file(
        tmp_path, [x.split() for x in ("user item rating", "ann tea 5", "bob jam 2")]
    )
    columns = {"label": "rating", "ids": ["user", "item"]}
    known = sj.data.Vocabulary.build(file, columns)
    known.save(tmp_path / "known.npz")
    swapped = {"label": "rating", "ids": ["item", "user"]}
    for vocabulary in (known, sj.data.Vocabulary.load(tmp_path / "known.npz")):
        with pytest.raises(ValueError, match=r"for the columns \['user', 'item'\]"):
            sj.data.read_ids(file, vocabulary, swapped)
        same = dataclasses.replace(vocabulary, names=())
        assert not sj.data.read_ids(file, same, swapped)["ids"].any()
    by_place = {"label": 2, "ids": [0, 1]}
    data = sj.data.read_ids(file, known, by_place, header=True)
    np.testing.assert_array_equal(data["ids"], [[1, 2], [2, 1]])


def test_a_missing_label_is_an_error_unless_it_is_filled_in(tmp_path):
    file = _file(
        tmp_path, [("user", "rating"), ("ann", "5"), ("bob", ""), ("cid", "1")]
    )
    columns = {"label": "rating", "ids": "user"}
    with pytest.raises(ValueError, match="row 1 from 0: found nothing in the column"):
        sj.data.read_ids(file, 100, columns)
    data = sj.data.read_ids(file, 100, columns, missing=0.0)
    assert data["label"].tolist() == [5, 0, 1]
