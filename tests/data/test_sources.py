"""The same ratings in every format of users: one vocabulary, one array.

Tests that need pandas, polars, pyarrow or Hugging Face datasets skip without them.
"""

import bz2
import collections
import csv
import dataclasses
import gzip
import io
import pathlib
import sys
import tempfile
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

import sparsejax as sj
from helpers import run_python
from sparsejax.data import _sources


USERS = [196, 186, 22, 196, 7, 22, 196, 22, 7] * 3
ITEMS = ["tea", "jam, red", None, "tea", "cr\u00e8me", 'a "b"', "tea", "jam, red", None]
ITEMS = ITEMS * 3
RATINGS = [4.5, 3, 1, 5, 2.5, 3, 1, 4, 2] * 3
COLUMNS = {"label": "rating", "ids": ["user", "item"]}


def _ids(words):
    """Returns ids in plain Python: by falling counts, then by the bytes of words."""
    text = [str(w).encode() for w in words if w is not None]
    ranked = sorted(collections.Counter(text).items(), key=lambda x: (-x[1], x[0]))
    place = {word: k for k, (word, _) in enumerate(ranked, 1)}
    return [0 if w is None else place[str(w).encode()] for w in words]


IDS = np.stack([_ids(USERS), _ids(ITEMS)], axis=1)


def _text_of(separator, quoting, header=True, end="\n"):
    file = io.StringIO()
    rows = [(u, i or "", r) for u, i, r in zip(USERS, ITEMS, RATINGS)]
    if quoting is None:  # as they are
        for row in [("user", "item", "rating")] * header + rows:
            file.write(separator.join(map(str, row)) + end)
        return file.getvalue().encode()
    write: Any = csv.writer(
        file, delimiter=separator, quoting=quoting, lineterminator=end
    )
    write.writerows([("user", "item", "rating")] * header + rows)
    return file.getvalue().encode()


_QUOTED = _text_of(",", csv.QUOTE_ALL)
# The bytes of a file, and the arguments that read it.
TEXTS: dict[str, tuple[bytes, dict[str, Any]]] = {
    "CSV": (_text_of(",", csv.QUOTE_MINIMAL), {}),
    "quoted CSV": (_QUOTED, {}),
    "CSV of Excel": (
        b"\xef\xbb\xbf" + _text_of(";", csv.QUOTE_MINIMAL, end="\r\n"),
        {"separator": ";"},
    ),
    "TSV": (_text_of("\t", None), {"quotes": False}),
    "TSV with quotes": (_text_of("\t", csv.QUOTE_MINIMAL), {}),
    "no header": (
        _text_of("\t", None, header=False),
        {"columns": {"label": 2, "ids": [0, 1]}, "quotes": False},
    ),
    "MovieLens": (  # with an empty column between each two
        _text_of("::", None, header=False),
        {
            "columns": {"label": 4, "ids": [0, 2]},
            "separator": ":",
            "quotes": False,
        },
    ),
    "gzip": (gzip.compress(_QUOTED, mtime=0), {}),
    "bzip2": (bz2.compress(_text_of("\t", csv.QUOTE_MINIMAL)), {}),
}


def _is_as_expected(vocabulary, data):
    named = dataclasses.replace(vocabulary, names=("user", "item"))
    want = sj.data.Vocabulary.build({"user": USERS, "item": ITEMS})
    assert named == want
    for got, counts in zip(named.frequencies, want.frequencies, strict=True):
        np.testing.assert_array_equal(got, counts)
    np.testing.assert_array_equal(data["ids"], IDS)
    np.testing.assert_array_equal(data["label"], np.array(RATINGS, np.float32))


@pytest.mark.parametrize("block", [60, 1 << 20])
@pytest.mark.parametrize("form", TEXTS)
def test_files_give_the_same_vocabulary_and_ids(tmp_path, monkeypatch, form, block):
    monkeypatch.setattr(_sources, "BLOCK", block)
    path = tmp_path / "ratings"
    content, options = TEXTS[form]
    path.write_bytes(content)
    options = {"columns": COLUMNS, **options}
    vocabulary = sj.data.Vocabulary.build(path, **options)
    _is_as_expected(vocabulary, sj.data.read_ids(path, vocabulary, **options))
    chunks = list(sj.data.iter_ids(path, vocabulary, chunk_rows=10, **options))
    assert [len(chunk["ids"]) for chunk in chunks] == [10, 10, 7]
    _is_as_expected(
        vocabulary, {k: np.concatenate([c[k] for c in chunks]) for k in chunks[0]}
    )


# ------------------------------------------------------------------ data frames


def _dict():
    return {"user": USERS, "item": ITEMS, "rating": RATINGS}


def _arrays():
    found = {name: np.array(x, object) for name, x in _dict().items()}
    return found | {"rating": np.array(RATINGS)}


def _pandas():
    return pytest.importorskip("pandas").DataFrame(_dict())


def _pandas_arrow():
    pytest.importorskip("pyarrow")
    return _pandas().convert_dtypes(dtype_backend="pyarrow")


def _polars():
    return pytest.importorskip("polars").DataFrame(_dict())


def _pyarrow():
    return pytest.importorskip("pyarrow").table(_dict())


def _hugging_face():
    return pytest.importorskip("datasets").Dataset.from_dict(_dict())


def _reader():
    return _pyarrow().to_reader(max_chunksize=5)


def _record_batch():
    return _pyarrow().to_batches()[0]


FRAMES = [
    _dict,
    _arrays,
    _pandas,
    _pandas_arrow,
    _polars,
    _pyarrow,
    _reader,
    _record_batch,
    pytest.param(_hugging_face, marks=pytest.mark.slow),  # to import: 3 s
]


@pytest.mark.parametrize("make", FRAMES)
def test_data_frames_give_the_same_vocabulary_and_ids(make):
    frame = make()
    vocabulary = sj.data.Vocabulary.build(frame, COLUMNS)
    _is_as_expected(vocabulary, sj.data.read_ids(make(), vocabulary, COLUMNS))
    chunks = list(sj.data.iter_ids(make(), vocabulary, COLUMNS, chunk_rows=10))
    assert [len(chunk["ids"]) for chunk in chunks] == [10, 10, 7]
    by_place = {"label": 2, "ids": [0, 1]}
    _is_as_expected(vocabulary, sj.data.read_ids(make(), vocabulary, by_place))
    if make is _reader:
        return
    words = {name: frame[name] for name in ("user", "item")}
    assert sj.data.Vocabulary.build(words) == vocabulary
    ids = vocabulary.encode_columns(words)
    dataset = sj.data.ArrayDataset({**ids, "label": frame["rating"]})
    (batch,) = sj.data.DataLoader(dataset, len(USERS))
    rows = np.stack([batch["user"], batch["item"]], axis=1)
    _is_as_expected(vocabulary, {"ids": rows, "label": np.asarray(batch["label"])})


class _Exporter:
    """An object with nothing but the Arrow stream."""

    def __init__(self, table):
        self._table, self.schema = table, table.schema

    schema: Any = None

    def __arrow_c_stream__(self, requested_schema=None):
        return self._table.__arrow_c_stream__(requested_schema)


def test_a_stream_of_another_package():
    pa = pytest.importorskip("pyarrow")
    stream = lambda: _Exporter(pa.table(_dict()))
    vocabulary = sj.data.Vocabulary.build(stream(), COLUMNS)
    _is_as_expected(vocabulary, sj.data.read_ids(stream(), vocabulary, COLUMNS))


def test_a_stream_is_read_in_bounded_memory():
    """A batch is made when its rows are needed."""
    pa = pytest.importorskip("pyarrow")
    made = []

    def batches():
        for k in range(100):
            made.append(k)
            yield pa.record_batch({"ad": [k] * 10})

    schema = pa.schema({"ad": pa.int64()})
    reader = pa.RecordBatchReader.from_batches(schema, batches())
    chunks = sj.data.iter_ids(reader, 50, chunk_rows=10)
    assert next(chunks)["ids"].shape == (10, 1)
    assert len(made) < 5
    assert len(list(chunks)) == 99


# ------------------------------------------------------------------ Parquet


def _write_with_pandas(path):
    _pandas().to_parquet(path)


def _write_with_polars(path):
    pl = pytest.importorskip("polars")
    frame = _polars().with_columns(pl.col("item").cast(pl.Categorical))
    frame.write_parquet(path)


def _write_with_pyarrow(path):
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(_pyarrow(), path, row_group_size=5, compression="gzip")


@pytest.mark.parametrize(
    "write", [_write_with_pyarrow, _write_with_pandas, _write_with_polars]
)
def test_parquet_gives_the_same_vocabulary_and_ids(tmp_path, write):
    pytest.importorskip("pyarrow")
    path = tmp_path / "ratings.parquet"
    write(path)
    for columns in (COLUMNS, {"label": 2, "ids": [0, 1]}):
        vocabulary = sj.data.Vocabulary.build(path, columns)
        read = sj.data.read_ids(path, vocabulary, columns)
        _is_as_expected(vocabulary, read)
    chunks = sj.data.iter_ids(path, vocabulary, COLUMNS, chunk_rows=10)
    assert [len(chunk["ids"]) for chunk in chunks] == [10, 10, 7]


def test_columns_of_parquet(tmp_path):
    pa = pytest.importorskip("pyarrow")
    path, seen = tmp_path / "clicks.parquet", []
    columns = {
        "user.id": pa.array([7, None, 2**63], pa.uint64()),  # a name with a dot
        "ad": pa.array([b"\xff", b"", None]).cast(pa.large_binary()),
        "tag": pa.array(["a", None, "a"]).dictionary_encode(),
        "flag": [True, None, False],
        "n": pa.array([1, 2, 3], pa.int8()),
        "x": [0.5, np.nan, None],
        "none": pa.nulls(3),
    }
    pytest.importorskip("pyarrow.parquet").write_table(pa.table(columns), path)
    options: Any = dict(
        columns={"ids": ["user.id", "ad", "tag", "flag"], "numbers": ["n", "x", "none"]}
    )
    known = sj.data.Vocabulary.build(
        path, progress=lambda *x: seen.append(x), **options
    )
    read = sj.data.read_ids(path, known, missing=-1, **options)
    want = sj.data.Vocabulary.build(
        {name: columns[name] for name in options["columns"]["ids"]}
    )
    size = path.stat().st_size
    assert known == want and {*seen} == {(size, size)}
    assert known.integers == want.integers == [True, False, False, False]
    table = pa.table(columns)
    assert sj.data.Vocabulary.build(table, **options) == want
    again = sj.data.read_ids(table, known, missing=-1, **options)
    np.testing.assert_array_equal(again["numbers"], read["numbers"])
    assert read["ids"].tolist() == [[1, 1, 1, 2], [0, 0, 0, 0], [2, 0, 1, 1]]
    assert read["numbers"].tolist() == [[1, 0.5, -1], [2, -1, -1], [3, -1, -1]]


@pytest.mark.parametrize(
    "columns, message",
    [
        ({"ids": "usr"}, r"has the columns 'user, x, y', expected the name 'usr'"),
        ({"ids": 3}, "expected a column 3 .counting from 0"),
        ({"ids": "x"}, "column 'x'.* must be strings or integers.* got 0.5"),
        ({"ids": "user", "label": "user"}, "string in the column 'user', expected num"),
        ({"ids": "y", "label": "x"}, "row 1 from 0: found nothing in the column 'x'"),
        ({"ids": "y", "label": "y"}, "row 1 from 0: found 1e.39 in the column 'y'"),
        ({"label": "y"}, "columns must be a dict with the key 'ids'"),
    ],
)
@pytest.mark.parametrize("form", ["Parquet", "table"])
def test_columns_that_are_refused(tmp_path, form, columns, message):
    pa = pytest.importorskip("pyarrow")
    path = tmp_path / "clicks.parquet"
    source = table = pa.table({"user": ["a", "b"], "x": [0.5, None], "y": [1.0, 1e39]})
    if form == "Parquet":
        pytest.importorskip("pyarrow.parquet").write_table(table, path)
        source = path
    with pytest.raises((ValueError, TypeError), match=message):
        sj.data.read_ids(source, 9, columns)


def test_a_damaged_page_does_not_move_other_rows(tmp_path):
    """Headers of pages have no checksum. A wrong one may claim more rows."""
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "items.parquet"
    table = pa.table({"item": [1, None, 3, 4, 5, None]})
    options: Any = dict(row_group_size=2, data_page_version="2.0", use_dictionary=False)
    parquet.write_table(table, path, write_page_checksum=True, **options)
    good, were_read = path.read_bytes(), 0
    expected = sj.data.read_ids(path, 9, {"ids": ["item"]}, missing=0)["ids"]
    expected = expected[2:].ravel().tolist()
    for place in range(5, 64):  # the header of the first page
        data = bytearray(good)
        data[place] ^= 2
        path.write_bytes(data)
        try:
            ids = sj.data.read_ids(path, 9, {"ids": ["item"]}, missing=0)["ids"]
        except OSError:
            continue
        were_read += 1
        assert ids[2:].ravel().tolist() == expected, place
    assert were_read > 0


# ------------------------------------------------------------------ CSV


def _words(path, columns=(0,), **options: Any):
    """Returns the words of columns row by row, as the reader finds them."""
    known = sj.data.Vocabulary.build(path, {"ids": columns}, **options)
    ids = sj.data.read_ids(path, known, {"ids": columns}, **options)["ids"]
    found = [known.decode(k, ids[:, k]).tolist() for k in range(len(columns))]
    return [list(row) for row in zip(*found)]


_WORDS = st.text(alphabet='ab", \t\r\n;\u00e9', max_size=6)


@hypothesis.settings(max_examples=60)
@hypothesis.given(
    rows=st.integers(2, 3).flatmap(
        lambda n: st.lists(st.lists(_WORDS, min_size=n, max_size=n), min_size=1)
    ),
    separator=st.sampled_from(",\t;"),
    quoting=st.sampled_from([csv.QUOTE_ALL, csv.QUOTE_MINIMAL]),
    end=st.sampled_from(["\n", "\r\n"]),
    block=st.sampled_from([1000, 1 << 20]),
)
def test_files_of_the_csv_module_are_read(rows, separator, quoting, end, block):
    """The csv module of Python is the oracle, except for blanks around fields."""
    text = io.StringIO()
    if any("\r" in x for row in rows for x in row):
        quoting = csv.QUOTE_ALL  # Python 3.11 quotes "\r" only if it is in `end`
    writer = csv.writer(text, quoting=quoting, delimiter=separator, lineterminator=end)
    writer.writerows(rows)
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(_sources, "BLOCK", block)
        path = pathlib.Path(folder, "rows.csv")
        path.write_bytes(text.getvalue().encode())
        found = _words(path, range(len(rows[0])), separator=separator)
    assert found == [[x.strip(" \t") for x in row] for row in rows]


@pytest.mark.parametrize("block", [40, 1000])
@pytest.mark.parametrize(
    "line, fields",
    [
        ("a , b c\t", ["a", "b c"]),
        ('5" disk,7""', ['5" disk', '7""']),  # quotes within a field are text
        ('a"b,c"d,"e,f"', ['a"b', 'c"d', "e,f"]),
        ('"a""b","""c"""', ['a"b', '"c"']),
        ('"",""', ["", ""]),
        ('"a\nb",c', ["a\nb", "c"]),
        ('"a\r\n\r\nb",c', ["a\r\n\r\nb", "c"]),
        ('x,5",",y",z', ["x", '5"', ",y", "z"]),  # text, and then around a field
    ],
)
def test_quotes(tmp_path, monkeypatch, line, fields, block):
    monkeypatch.setattr(_sources, "BLOCK", block)
    path = tmp_path / "rows.csv"
    path.write_text(f"{line}\n{line}", newline="")
    assert _words(path, range(len(fields)), separator=",") == [fields] * 2


def test_quoted_line_ends_at_the_end_of_a_block(tmp_path, monkeypatch):
    """pyarrow drops the "\n" of a "\r\n" that two blocks share."""
    path = tmp_path / "rows.csv"
    path.write_text('"a\r\n\r\nb",c\r\n' * 3, newline="")
    for block in range(27, 36):
        monkeypatch.setattr(_sources, "BLOCK", block)
        assert _words(path, (0, 1)) == [["a\r\n\r\nb", "c"]] * 3


@pytest.mark.parametrize(
    "text, message",
    [
        ('a,b\n\n"c,d\ne,f\n', "Expected 2 columns, got 1"),
        ('a,"b\nc",d\ne\n', "Expected 3 columns, got 1"),
    ],
)
def test_quotes_that_are_not_closed(tmp_path, text, message):
    path = tmp_path / "rows.csv"
    path.write_text(text, newline="")
    with pytest.raises(ValueError, match=f"{path}: .*({message})"):
        sj.data.read_ids(path, 9, {"ids": [0], "label": 1}, missing=0)


def test_a_quote_that_is_not_closed_ends_the_reading(tmp_path, monkeypatch):
    monkeypatch.setattr(_sources, "BLOCK", 1 << 12)
    path, seen = tmp_path / "rows.csv", []
    path.write_text('a,b\n"c,d\n' + "e,f\n" * 100_000)
    with pytest.raises(ValueError, match="straddles two block boundaries"):
        sj.data.Vocabulary.build(
            path, {"ids": 0}, progress=lambda *done: seen.append(done)
        )
    assert seen and seen[-1][0] < seen[-1][1] / 2
    found = sj.data.read_ids(path, 9, {"ids": 0}, quotes=False)
    assert len(found["ids"]) == 100_002


def test_a_byte_order_mark_is_not_part_of_a_word(tmp_path, monkeypatch):
    path = tmp_path / "marked.csv"
    path.write_bytes(b"\xef\xbb\xbfa,b\n\xef\xbb\xbfa,b\n")
    for block in (12, 100):
        monkeypatch.setattr(_sources, "BLOCK", block)
        known = sj.data.Vocabulary.build(path, {"ids": 0})
        assert known.sorted_words[0].tolist() == [b"a", b"\xef\xbb\xbfa"]
    path.write_bytes(b"\xef\xbb\xbfuser,rating\nx,2\n")
    data = sj.data.read_ids(path, 9, {"ids": "user", "label": "rating"})
    assert data["label"].tolist() == [2.0]


def test_bytes_that_are_not_utf8(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_bytes(b"user,y\n\xffa,1\nb,2\n\xffa,3\n")
    known = sj.data.Vocabulary.build(path, {"ids": "user"})
    assert known.sorted_words[0].tolist() == [b"b", b"\xffa"]
    word = known.decode("user", [1])
    assert known.encode("user", word).tolist() == [1]


@pytest.mark.parametrize("packed", [False, True])
def test_a_line_without_an_end_is_not_read_to_the_end(tmp_path, monkeypatch, packed):
    monkeypatch.setattr(_sources, "BLOCK", 1 << 13)
    path, seen = tmp_path / "rows", []
    text = b"1,1\n" + np.random.default_rng(0).bytes(1 << 20)
    text = text.replace(b"\n", b"").replace(b"\r", b"").replace(b"1,1", b"1,1\n", 1)
    path.write_bytes(gzip.compress(text, mtime=0) if packed else text)
    with pytest.raises(ValueError, match=f"{path}: .*(straddl|Expected 2)"):
        sj.data.Vocabulary.build(
            path, {"ids": 0}, progress=lambda *done: seen.append(done)
        )
    assert seen and seen[-1][0] < seen[-1][1] / 2


@pytest.mark.slow
def test_the_longest_line_takes_little_memory_and_time(tmp_path):
    path = tmp_path / "rows"
    with open(path, "wb") as file:
        file.truncate(300 << 20)  # zeros, and no newline
    code = f"""
import resource, time, sparsejax as sj
import pyarrow.csv
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
began = time.perf_counter()
try:
    sj.data.read_ids({str(path)!r}, 9, {{"ids": 0}})
except ValueError as error:
    more = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(time.perf_counter() - began < 5, more < 250_000)
"""
    assert run_python("-c", code).split() == ["True", "True"]


# ------------------------------------------------------------------ damaged files


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress])
def test_a_compressed_file_that_is_cut_off(tmp_path, pack):
    path = tmp_path / "rows.csv"
    text = b"".join(b"%d,a\n" % k for k in range(50_000))
    whole = pack(text)
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(OSError, match=f"{path} cannot be read to its end"):
        sj.data.read_ids(path, 9, {"ids": 1})


def test_text_that_begins_as_other_files_do(tmp_path):
    path = tmp_path / "parts.csv"
    path.write_text("PAR1,PK\nPAR2,x\n")
    read = sj.data.read_ids(path, 9, {"ids": ["PAR1", "PK"]})
    assert read["ids"].shape == (1, 2)


@pytest.mark.parametrize(
    "content",
    ["user,item\nann,tea\n".encode("utf-16-le"), b"\x93NUMPY\1\0a\0\n1,2\0\n"],
)
def test_files_that_are_not_plain_text(tmp_path, content):
    path = tmp_path / "ratings.csv"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"{path}"):
        sj.data.read_ids(path, 9, {"ids": [0, 1]})


def test_damaged_and_missing_files(tmp_path):
    path = tmp_path / "ratings.parquet"
    path.write_bytes(b"PAR1\x15\x04" + bytes(50) + b"PAR1")
    with pytest.raises(OSError, match="cannot be read .*damaged or incomplete"):
        sj.data.read_ids(path, 9, {"ids": "user"})


def test_without_pyarrow(tmp_path, monkeypatch):
    path = tmp_path / "ratings.csv"
    path.write_text("user,item,rating\na,b,1\n")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    needs = r"needs pyarrow.*sparsejax\[data\]"
    for call in (
        lambda: sj.data.Vocabulary.build(path, COLUMNS),
        lambda: sj.data.read_ids(path, 9, COLUMNS),
        lambda: sj.data.iter_ids(path, 9, COLUMNS),
        lambda: sj.data.HashIds(9).encode(0, ["a"]),
    ):
        with pytest.raises(ImportError, match=needs):
            call()


@pytest.mark.slow
def test_pyarrow_is_imported_by_the_first_call():
    code = "import sys, sparsejax as sj; print('pyarrow' in sys.modules)"
    assert run_python("-c", code).split() == ["False"]
