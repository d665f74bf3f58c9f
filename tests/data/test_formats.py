"""The same ratings in every form that people have them in: one vocabulary, one array.

What needs pandas, polars, pyarrow or Hugging Face datasets runs where these are.
"""

import bz2
import collections
import csv
import dataclasses
import gzip
import io
import sys
import zipfile
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

import sparsejax as sj
from sparsejax.data import _csv_arrow, _text


USERS = [196, 186, 22, 196, 7, 22, 196, 22, 7] * 3
ITEMS = ["tea", "jam, red", None, "tea", "cr\u00e8me", 'a "b"', "tea", "jam, red", None]
ITEMS = ITEMS * 3
RATINGS = [4.5, 3, 1, 5, 2.5, 3, 1, 4, 2] * 3
COLUMNS = {"label": "rating", "ids": ["user", "item"]}


def _ids(words):
    """Ids by Python alone: by falling counts, then by the bytes of the words."""
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
# The bytes of a file, and how it is read.
TEXTS: dict[str, tuple[bytes, dict[str, Any]]] = {
    "CSV": (_text_of(",", csv.QUOTE_MINIMAL), {}),
    "quoted CSV": (_QUOTED, {}),
    "CSV of Excel": (
        b"\xef\xbb\xbf" + _text_of(";", csv.QUOTE_MINIMAL, end="\r\n"),
        {"separator": ";"},
    ),
    "TSV": (_text_of("\t", None), {"quotes": False}),
    "MovieLens": (
        _text_of("::", None, header=False).replace(b'a "b"', b'a "b"'),
        {"columns": {"label": 2, "ids": [0, 1]}},
    ),
    "MovieLens, header": (_text_of("::", None), {"separator": "::"}),
    "MovieLens, quoted": (
        _QUOTED.replace(b'","', b'"::"'),
        {"separator": "::"},
    ),
    "gzip": (gzip.compress(_QUOTED), {}),
    "bzip2": (bz2.compress(_text_of("\t", csv.QUOTE_MINIMAL)), {}),
}


def _is_as_expected(vocabulary, data):
    named = dataclasses.replace(vocabulary, names=("user", "item"))
    want = sj.data.Vocabulary.from_columns({"user": USERS, "item": ITEMS})
    assert named == want
    for got, counts in zip(named.frequencies, want.frequencies, strict=True):
        np.testing.assert_array_equal(got, counts)
    np.testing.assert_array_equal(data["ids"], IDS)
    np.testing.assert_array_equal(data["label"], np.array(RATINGS, np.float32))


def _own_reader(monkeypatch):
    monkeypatch.setattr(_csv_arrow, "_pyarrow_csv", lambda: None)


def _pyarrow_reader(monkeypatch):
    pytest.importorskip("pyarrow")
    monkeypatch.setattr(_csv_arrow, "LEAST", 0)


@pytest.mark.parametrize("block", [40, 1 << 20])
@pytest.mark.parametrize("reader", [_own_reader, _pyarrow_reader])
@pytest.mark.parametrize("form", TEXTS)
def test_files_give_the_same_vocabulary_and_ids(
    tmp_path, monkeypatch, form, reader, block
):
    reader(monkeypatch)
    monkeypatch.setattr(_text, "BLOCK", block)
    path = tmp_path / "ratings"
    content, options = TEXTS[form]
    path.write_bytes(content)
    options = {"columns": COLUMNS, **options}
    vocabulary = sj.data.Vocabulary.build(path, **options)
    _is_as_expected(vocabulary, sj.data.read_csv_ids(path, vocabulary, **options))
    chunks = list(sj.data.iter_csv_ids(path, vocabulary, chunk_rows=10, **options))
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


FRAMES = [
    _dict,
    _arrays,
    _pandas,
    _pandas_arrow,
    _polars,
    _pyarrow,
    pytest.param(_hugging_face, marks=pytest.mark.slow),  # to import: 3 s
]


@pytest.mark.parametrize("make", FRAMES)
def test_data_frames_give_the_same_vocabulary_and_ids(make):
    frame = make()
    words = {name: frame[name] for name in ("user", "item")}
    vocabulary = sj.data.Vocabulary.from_columns(words)
    ids = vocabulary.encode_columns(words)
    dataset = sj.data.ArrayDataset({**ids, "label": frame["rating"]})
    (batch,) = sj.data.DataLoader(dataset, len(USERS))
    rows = np.stack([batch["user"], batch["item"]], axis=1)
    _is_as_expected(vocabulary, {"ids": rows, "label": np.asarray(batch["label"])})


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
        vocabulary = sj.data.Vocabulary.build(path, columns=columns)
        read = sj.data.read_parquet_ids(path, vocabulary, columns=columns)
        _is_as_expected(vocabulary, read)
    chunks = sj.data.iter_parquet_ids(path, vocabulary, columns=columns, chunk_rows=10)
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
    pa.parquet.write_table(pa.table(columns), path)
    options: Any = dict(
        columns={"ids": ["user.id", "ad", "tag", "flag"], "numbers": ["n", "x", "none"]}
    )
    known = sj.data.Vocabulary.build(path, **options)
    read = sj.data.read_parquet_ids(
        path, known, missing=-1, progress=lambda *x: seen.append(x), **options
    )
    want = sj.data.Vocabulary.from_columns(
        {name: columns[name] for name in options["columns"]["ids"]}
    )
    assert known == want and seen == [(3, 3)]
    assert read["ids"].tolist() == [[1, 1, 1, 2], [0, 0, 0, 0], [2, 0, 1, 1]]
    assert read["numbers"].tolist() == [[1, 0.5, -1], [2, -1, -1], [3, -1, -1]]


@pytest.mark.parametrize(
    "columns, message",
    [
        ({"ids": "usr"}, r"found the columns 'user, x, y', expected the name 'usr'"),
        ({"ids": 3}, "expected a column 3 .counting from 0"),
        ({"ids": "x"}, "column 'x' of .* must be strings or integers.* got 0.5"),
        ({"ids": "user", "label": "user"}, "string in the column 'user', expected num"),
        ({"ids": "y", "label": "x"}, "row 1 from 0: found nothing in the column 'x'"),
        ({"ids": "y", "label": "y"}, "row 1 from 0: found 1e.39 in the column 'y'"),
        (None, "columns must be a dict with the key 'ids'"),
    ],
)
def test_columns_of_parquet_that_are_refused(tmp_path, columns, message):
    pa = pytest.importorskip("pyarrow")
    path = tmp_path / "clicks.parquet"
    table = {"user": ["a", "b"], "x": [0.5, None], "y": [1.0, 1e39]}
    pa.parquet.write_table(pa.table(table), path)
    with pytest.raises((ValueError, TypeError), match=message):
        sj.data.read_parquet_ids(path, 9, columns=columns)


# ------------------------------------------------------------------ other files


def _workbook(name):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(name, "x" * 50)
    return file.getvalue()


@pytest.mark.parametrize(
    "content, message",
    [
        (b"PAR1\x15\x04", "is a Parquet file, not .*read_parquet_ids reads it"),
        # The names of tests have these bytes, so no time of day may be in them.
        (gzip.compress(b"PAR1\x15\x04", mtime=0), "is a Parquet file"),
        (_workbook("[Content_Types].xml"), "is an Excel workbook, .*sheet as CSV"),
        (_workbook("xl/workbook.xml"), "is an Excel workbook"),
        (_workbook("ratings.csv"), "is a zip archive, .*Extract"),
        (
            gzip.compress(gzip.compress(b"a,b\n", mtime=0), mtime=0),
            "is compressed twice",
        ),
        (b"\xfd7zXZ\0\0", "is compressed by xz"),
        (b"\x28\xb5\x2f\xfd\0", "is compressed by zstd"),
        ("\ufeffuser,item\n".encode("utf-16-le"), "is text in UTF-16, .*UTF-8"),
        (b"ARROW1\0\0", "is an Arrow file"),
        (b"\x93NUMPY\1", "is an array of NumPy"),
        (b"\xba\x16\x4f\x2f", "is a model of fastText"),
    ],
)
@pytest.mark.parametrize(
    "read",
    [
        lambda path: sj.data.read_csv_ids(path, 9),
        lambda path: sj.data.read_libsvm(path),
        lambda path: sj.data.read_vectors(path),
    ],
    ids=["read_csv_ids", "read_libsvm", "read_vectors"],
)
def test_files_of_other_kinds_are_named(tmp_path, read, content, message):
    path = tmp_path / "ratings.csv"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"sparsejax.data.read_.*: {path} {message}"):
        read(path)


def test_text_that_begins_as_other_files_do(tmp_path):
    path = tmp_path / "parts.csv"
    path.write_text("PAR1,PK\nPAR2,x\n")
    read = sj.data.read_csv_ids(path, 9, columns={"ids": ["PAR1", "PK"]})
    assert read["ids"].shape == (1, 2)


def test_no_parquet(tmp_path):
    pytest.importorskip("pyarrow")
    path = tmp_path / "ratings.csv"
    path.write_text("user,item\n")
    read = sj.data.read_parquet_ids
    with pytest.raises(ValueError, match="is not a Parquet file"):
        read(path, 9, columns={"ids": "user"})
    path.write_bytes(b"PAR1\x15\x04" + bytes(50) + b"PAR1")
    with pytest.raises(OSError, match="cannot be read .*damaged or incomplete"):
        read(path, 9, columns={"ids": "user"})
    with pytest.raises(ValueError, match="whose columns have names"):
        sj.data.Vocabulary.build(path)


def test_parquet_without_pyarrow(tmp_path, monkeypatch):
    path = tmp_path / "ratings.parquet"
    path.write_bytes(b"PAR1\x15\x04")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match=r"needs pyarrow.*sparsejax\[arrow\]"):
        sj.data.Vocabulary.build(path, columns=COLUMNS)


# ------------------------------------------------------------------ two readers


_NUMBERS = '1 -2.5 1e3 .5 5. -0 nan inf 1e400 1e39 1e-400 nan(1) 0x1 1_0 +1 - "3" " 4"'
_NUMBERS = [*_NUMBERS.split(" "), "", " 6", "7\t", '" "', '""', "0.1234567890123456789"]
_SOME_WORDS = ["a", "b b", " c", "d ", '"e"', '" f "', '"g""h"', '"i,j"', '"k\nl"']
_SOME_WORDS += [
    '5"',
    'm"n',
    '""',
    "",
    " ",
    "\r",
    "o\r",
    "\x0b",
    "\0",
    "\xe9",
    "x" * 1025,
]
_SOME_WORDS += ['"p"q', '"r', ' "s" ', "t\0", "\ufeffu"]


def _outcome(path, options):
    """What both functions return, or their errors."""
    found = []
    for read in (
        lambda: sj.data.Vocabulary.build(path, **options),
        lambda: sj.data.read_csv_ids(path, 50, missing=-1, **options),
        lambda: sj.data.read_csv_ids(path, 50, **options),
    ):
        try:
            got = read()
        except (ValueError, OSError) as error:
            found.append((type(error), str(error)))
            continue
        if isinstance(got, sj.data.Vocabulary):
            arrays = [*got.words, *got.ids, *got.frequencies]
        else:
            arrays = list(got.values())
        found.append([(x.dtype, x.shape, x.tobytes()) for x in arrays])
    return found


@hypothesis.settings(
    max_examples=60,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
@hypothesis.given(st.data())
def test_pyarrow_reads_as_our_own_reader_does(tmp_path, monkeypatch, data):
    """Numbers, words and errors to the bit: of what is usual, and of what is not."""
    pytest.importorskip("pyarrow")
    draw = data.draw
    separator = draw(st.sampled_from([",", "\t", ";", " ", "::"]))
    is_odd = draw(st.sampled_from([0, 0, 1, 2]))  # one bad field spoils a file
    words, numbers = _SOME_WORDS[: 8 + 6 * is_odd], ["1", "2.5", "", *_NUMBERS]
    numbers = numbers if is_odd else numbers[:8]
    width = draw(st.sampled_from([1, 2, 3, 3]))
    row = [st.sampled_from(words), st.sampled_from(numbers), st.sampled_from(words)]
    rows = draw(st.lists(st.tuples(*row[:width]), max_size=12))
    end = draw(st.sampled_from(["\n", "\r\n"]))
    lines = [separator.join(row) + end for row in rows]
    if lines and is_odd and draw(st.booleans()):
        place = draw(st.integers(0, len(lines) - 1))
        lines[place] += draw(st.sampled_from([end, "x" + end, " " + end, "\r"]))
    head = draw(st.sampled_from(["", separator.join("abc"[:width]) + end]))
    text = (head + "".join(lines)).encode("utf-8", "surrogateescape")
    columns: Any = {"ids": [0, 2][: 1 + (width > 2)]}
    if width > 1 and draw(st.booleans()):
        columns["label"] = 1
    elif width > 1:
        columns["numbers"] = [1]
    options = dict(
        columns=columns,
        separator=separator,
        header=bool(head),
        quotes=draw(st.booleans()),
    )
    path = tmp_path / "rows"
    path.write_bytes(text)
    with monkeypatch.context() as patch:
        patch.setattr(_text, "BLOCK", draw(st.sampled_from([1, 20, 1000])))
        patch.setattr(_csv_arrow, "LEAST", 0)
        found = _outcome(path, options)
        _own_reader(patch)
        assert found == _outcome(path, options)


def test_pyarrow_reads_what_is_usual(tmp_path, monkeypatch):
    """That both readers agree would say little if one read everything."""
    _pyarrow_reader(monkeypatch)
    used, read = [], _csv_arrow.read

    def note(*args):
        table = read(*args)
        used.append(0 if table is None else table.used)
        return table

    monkeypatch.setattr(_csv_arrow, "read", note)
    monkeypatch.setattr(_text, "BLOCK", 1000)
    path = tmp_path / "rows"
    columns = {"label": 2, "ids": [0, 1]}
    for line in ("a, b c ,1\n", '"d","e ""f""\n",2.5\r\n', "7\tg\t\n", "1::2::3\n"):
        text = line * 1000
        path.write_text(text, newline="")
        sj.data.read_csv_ids(path, 9, columns=columns, missing=0)
        assert sum(used) >= len(text.replace("::", ":")) - 1000 - len(line)
        used.clear()
