"""Click logs: labels, numbers, categories by hash or vocabulary."""

import csv
import dataclasses
import gzip
import io
import pathlib
import tempfile
import time
import tracemalloc
from typing import Any, cast

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

import sparsejax as sj
from helpers import run_python
from sparsejax.data import _csv, _text
from sparsejax.data._arrow_words import ArrowWords


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


# ------------------------------------------------------------------ quotes and blanks


def _fields(path, separator=",", quotes=True):
    """All fields as the reader finds them, row by row."""
    layout = _csv.as_layout("f", 13, 26, True, separator, False, {"ids": [0]}, quotes)
    rows = []
    for table in _csv.read(path, layout, False):
        assert isinstance(table, _csv.Table)
        text = table.text.tobytes()
        for begin, end in zip(table.begin.tolist(), table.end.tolist()):
            rows.append([text[b:e] for b, e in zip(begin, end)])
    return rows


_WORDS = st.text(alphabet='ab", \t\r\n;\u00e9', max_size=6)


@hypothesis.settings(max_examples=80)
@hypothesis.given(
    rows=st.integers(1, 3).flatmap(
        lambda n: st.lists(st.lists(_WORDS, min_size=n, max_size=n), max_size=5)
    ),
    separator=st.sampled_from(",\t;"),
    quoting=st.sampled_from([csv.QUOTE_ALL, csv.QUOTE_MINIMAL]),
    end=st.sampled_from(["\n", "\r\n"]),
    block=st.sampled_from([1, 2, 3, 7, 1000]),
    padding=st.sampled_from(["", "", " ", "\t "]),
)
def test_what_csv_writes_is_read(rows, separator, quoting, end, block, padding):
    """As Python's own module does, but for blanks around fields."""
    if any("\r" in x for row in rows for x in row):
        end = "\r\n"  # only then is "\r" quoted on Python 3.11
    text = io.StringIO()
    writer = csv.writer(text, quoting=quoting, delimiter=separator, lineterminator=end)
    writer.writerows(rows)
    # `csv` quotes a field only for what ends it; ours are trimmed if not quoted.
    blanks = " \t".replace(separator, "")
    if quoting == csv.QUOTE_ALL:  # and it does not write blanks around quotes
        pad = padding if separator not in padding else ""
        quoted = [
            [f'{pad}"{x.replace(chr(34), 2 * chr(34))}"{pad}' for x in row]
            for row in rows
        ]
        text = io.StringIO("".join(separator.join(row) + end for row in quoted))
    minimal = quoting == csv.QUOTE_MINIMAL
    is_quoted = lambda x: not minimal or any(c in x for c in f'{separator}"\r\n')
    want = [[x if is_quoted(x) else x.strip(blanks) for x in row] for row in rows]
    # Lines without anything are skipped.
    want = [row for row in want if len(row) > 1 or row[0] or is_quoted(row[0])]
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(_text, "BLOCK", block)
        path = pathlib.Path(folder, "rows.csv")
        path.write_bytes(text.getvalue().encode())
        found = _fields(path, separator)
    if minimal:  # csv writes "" for a row of one empty field, which is a row
        found = [row for row in found if len(row) > 1 or row[0]]
        want = [row for row in want if len(row) > 1 or row[0]]
    assert found == [[x.encode() for x in row] for row in want]


@pytest.mark.parametrize("block", [3, 1000])
@pytest.mark.parametrize(
    "line, fields",
    [
        (' "a" ,\t"b c" ', ["a", "b c"]),  # blanks around quotes
        (" a , b c\t", ["a", "b c"]),
        ('5" disk,7""', ['5" disk', '7""']),  # quotes within a field are text
        ('a"b,c"d,"e,f"', ['a"b', 'c"d', "e,f"]),
        ('"a""b","""c"""', ['a"b', '"c"']),
        ('"","" ', ["", ""]),
        ('" a ",b', [" a ", "b"]),
        ('"a\nb",c', ["a\nb", "c"]),
        (' "a""\nb""" ,c', ['a"\nb"', "c"]),
        (' "a""",5","\n""b"', ['a"', '5"', '\n"b']),
        ('"a\r\n\r\nb",c', ["a\r\n\r\nb", "c"]),
        ('x,5",",y",z', ["x", '5"', ",y", "z"]),  # text, and then around a field
    ],
)
def test_quotes(tmp_path, monkeypatch, line, fields, block):
    monkeypatch.setattr(_text, "BLOCK", block)
    path = tmp_path / "rows.csv"
    path.write_text(f"{line}\n{line}", newline="")
    assert _fields(path) == [[x.encode() for x in fields]] * 2
    path.write_text(f"{line}\n1" + ",2" * (len(fields) - 1), newline="")
    assert _fields(path)[1][0] == b"1"


@pytest.mark.parametrize(
    "text, message",
    [
        ('a,b\n"c"d,e\n', ":2: found 'd,e' after a closing quote, expected ',' or the"),
        ('a,b\n\n"c,d\ne,f\n', ":3: found a quote that is not closed, expected anoth"),
        ('a,b\nc,"\n', ":2: found a quote that is not closed.*quotes=False"),
        ('a,"b\nc",d\ne\n', ":3: found 1 field, expected 3"),
        ('a,b\n"c\n\nd"," x\n', ":4: found a quote that is not closed"),
        ('a,b\n"c"\rd,e\n', r":2: found '\\rd,e' after a closing quote"),
    ],
)
def test_quotes_that_are_not_closed_are_named(tmp_path, monkeypatch, text, message):
    path = tmp_path / "rows.csv"
    path.write_text(text, newline="")
    for block in (3, 1000):
        monkeypatch.setattr(_text, "BLOCK", block)
        with pytest.raises(ValueError, match=f"{path}{message}"):
            sj.data.Vocabulary.build(path, columns={"ids": [0]} | {"label": 1})


def test_a_quote_that_is_not_closed_ends_the_reading(tmp_path, monkeypatch):
    monkeypatch.setattr(_text, "BLOCK", 1 << 10)
    monkeypatch.setattr(_text, "MOST_LINE", 1 << 13)
    path, seen = tmp_path / "rows.csv", []
    path.write_text('a,b\n"c,d\n' + "e,f\n" * 100_000)
    with pytest.raises(ValueError, match=":2: found a quote that is not closed"):
        sj.data.read_csv_ids(
            path, 9, columns={"ids": 0}, progress=lambda *done: seen.append(done)
        )
    assert seen[-1][0] < 1 << 14
    found = sj.data.read_csv_ids(path, 9, columns={"ids": 0}, quotes=False)
    assert len(found["ids"]) == 100_002


def test_names_are_the_same_with_quotes_and_blanks(tmp_path):
    """Else a model that learned names from one file knows none of the other's."""
    files = [
        "user,item,rating\nann,tea,5\nbob,jam,2\n",
        '"user","item","rating"\n"ann","tea","5"\n"bob","jam","2"\n',
        "user, item, rating\r\nann, tea, 5\r\nbob , jam , 2\r\n",
        ' "user" , "item" , "rating" \n "ann" , "tea" , "5" \n "bob" , "jam" , "2" \n',
    ]
    columns = {"label": "rating", "ids": ["user", "item"]}
    for k, text in enumerate(files):
        path = tmp_path / f"{k}.csv"
        path.write_text(text)
        known = sj.data.Vocabulary.build(path, columns=columns)
        assert known.encode(0, ["ann", "bob"]).tolist() == [1, 2]
        data = sj.data.read_csv_ids(path, known, columns=columns)
        assert data["ids"].tolist() == [[1, 2], [2, 1]]
        assert data["label"].tolist() == [5, 2]
        hashed = sj.data.read_csv_ids(path, 1000, columns=columns)["ids"]
        assert hashed.tolist() == [
            [_hash(w, c, 1000) for c, w in enumerate(row)]
            for row in [(b"ann", b"tea"), (b"bob", b"jam")]
        ]
    raw = sj.data.Vocabulary.build(
        tmp_path / "1.csv", columns={"ids": 0}, header=True, quotes=False
    )
    assert raw.words[0].tolist() == [b'"ann"', b'"bob"']


def test_too_many_fields_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(_csv, "_MOST_FIELDS", 100)
    path = tmp_path / "rows.csv"
    path.write_text("a,b\n\n" + "," * 100 + "\n")
    with pytest.raises(ValueError, match=":3: found 101 fields, expected at most 100"):
        sj.data.read_csv_ids(path, 9, columns={"ids": 0})


def test_one_long_word_does_not_widen_all(tmp_path, monkeypatch):
    monkeypatch.setattr(_text, "_MOST_CELLS", 1 << 12)
    path = tmp_path / "rows.csv"
    words = [f"w{i % 50}" for i in range(3000)]
    words[1234] = "long" * 250
    path.write_text("\n".join(words) + "\n")
    layout: Any = dict(label=False, num_numbers=0, num_ids=1)
    found = sj.data.read_csv_ids(path, 1000, **layout)["ids"][:, 0]
    assert found.tolist() == [_hash(w.encode(), 0, 1000) for w in words]
    known = sj.data.Vocabulary.build(path, **layout)
    assert known.sizes() == [52]
    layout = _csv.as_layout("f", 0, 1, False, ",", False, None, True)
    tables = list(_csv.read(path, layout, False))
    assert sum(table.num_rows for table in tables) == 3000
    parts = [part for table in tables for part in table.words(0)]
    sizes = [0 if isinstance(p, ArrowWords) else p.text.size for p in parts]
    assert 0 < max(sizes) <= 1 << 12


# ------------------------------------------------------------------ long lines


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    "read",
    [
        lambda path, progress: sj.data.read_csv_ids(path, 9, progress=progress),
        lambda path, progress: sj.data.read_libsvm(path, progress=progress),
        lambda path, progress: sj.data.Vocabulary.build(path, progress=progress),
    ],
    ids=["read_csv_ids", "read_libsvm", "Vocabulary.build"],
)
def test_a_line_without_an_end_is_not_read_to_the_end(
    tmp_path, monkeypatch, read, packed
):
    monkeypatch.setattr(_text, "BLOCK", 1 << 10)
    monkeypatch.setattr(_text, "MOST_LINE", 1 << 13)
    path, seen = tmp_path / "rows", []
    text = b"1 1:1\n" + np.random.default_rng(0).bytes(1 << 20).replace(b"\n", b"")
    path.write_bytes(gzip.compress(text) if packed else text)
    with pytest.raises(
        ValueError, match=":[12]: found (a line of more than 8192|1 fi)"
    ):
        read(path, lambda *done: seen.append(done))
    assert seen[-1][0] < 1 << 18 < seen[-1][1]


def test_a_line_over_several_blocks(tmp_path, monkeypatch):
    path = tmp_path / "rows"
    line = "1 " + " ".join(f"{i}:{i}" for i in range(1, 2000))
    path.write_text(f"{line}\n0 5:1\n{line}")
    whole = sj.data.read_libsvm(path)[0].toarray()
    for block in (10, 1000, len(line) + 3):
        monkeypatch.setattr(_text, "BLOCK", block)
        np.testing.assert_array_equal(sj.data.read_libsvm(path)[0].toarray(), whole)


@pytest.mark.slow
def test_the_longest_line_takes_little_memory_and_time(tmp_path):
    path = tmp_path / "rows"
    with open(path, "wb") as file:
        file.truncate(300 << 20)  # zeros, and no newline
    tracemalloc.start()
    try:
        began = time.perf_counter()
        with pytest.raises(ValueError, match="a line of more than 33554432 bytes"):
            sj.data.read_csv_ids(path, 9)
        assert time.perf_counter() - began < 5
        assert tracemalloc.get_traced_memory()[1] < 100 << 20
    finally:
        tracemalloc.stop()


# ------------------------------------------------------------------ vocabulary files


@pytest.mark.parametrize(
    "change, message",
    [
        ({"words 0": np.array([b"b", b"a"])}, "words of column 0 are not in ascending"),
        ({"words 0": np.array([b"a", b"a"])}, "words of column 0 are not in ascending"),
        ({"words 0": np.array([b"a"])}, "column 0 has 1 words and 2 ids"),
        ({"words 0": np.array(["a", "b"])}, "'words 0' has the type U1"),
        ({"words 0": np.array(b"a")}, "'words 0' has the type S1 and 0 axes"),
        ({"ids 0": np.array([1, 3])}, "ids of column 0 are not from 1 to 2"),
        ({"ids 0": np.array([0, 1])}, "ids of column 0 are not from 1 to 2"),
        ({"ids 0": np.array([1.0, 2.0])}, "'ids 0' has the type f8"),
        ({"ids 1": np.array([1, 2])}, "its columns .0. do not go with its arrays"),
        ({"words 0": None}, "its columns .0. do not go with its arrays"),
        ({"columns": np.array([0, 1])}, "its columns .0, 1. do not go with its arrays"),
        ({"columns": np.array([], int)}, "its columns .. do not go with its arrays"),
        ({"columns": np.array([0, 0, -1])}, "its columns .0, 0, -1. do not go"),
        ({"counts 0": np.array([0, 3])}, "counts of column 0 do not go with its words"),
        ({"counts 0": np.array([0, 3, -1])}, "counts of column 0 do not go with its w"),
        ({"integers": np.array([True])}, "the words of column 0 are not integers"),
        ({"integers": np.array([False] * 2)}, "has 2 integers for 1 columns"),
        ({"names": np.array(["x", "y"])}, "has 2 names for 1 columns"),
        ({"names": np.array("x")}, "'names' has the type U1 and 0 axes"),
        ({"names": np.array([b"x"])}, "'names' has the type S1"),
    ],
)
def test_a_vocabulary_that_nothing_wrote_is_refused(tmp_path, change, message):
    path = tmp_path / "known.npz"
    good = {"words 0": np.array([b"a", b"b"]), "ids 0": np.array([2, 1], np.int32)}
    good |= {"columns": np.array([0]), "counts 0": np.array([0, 3, 1])}
    good |= {"names": np.array([], np.str_), "integers": np.array([], bool)}
    np.savez(path, **good)
    assert sj.data.Vocabulary.load(path).encode(0, ["a", "b"]).tolist() == [2, 1]
    wrong = {name: x for name, x in (good | change).items() if x is not None}
    np.savez(path, **wrong)
    with pytest.raises(ValueError, match=f"Vocabulary.load: .*wrote: .*{message}"):
        sj.data.Vocabulary.load(path)


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
    assert int(run_python("-c", code)) == _hash(b"abc", 1, 1000)


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
