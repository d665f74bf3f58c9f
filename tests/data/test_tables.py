"""The same ratings through every reader that users have: one vocabulary, equal ids.

Tests that need pandas, polars, pyarrow or Hugging Face datasets skip without them.
"""

import collections
import csv
import importlib
import io
import sys
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import sparsejax as sj
from helpers import run_python


build = sj.data.Vocabulary.build
USERS = [196, 186, 22, 196, 7, 22, 196, 22, 7] * 3
ITEMS = ["tea", "jam, red", None, "tea", "cr\u00e8me", 'a "b"', "tea", "jam, red", None]
ITEMS = ITEMS * 3
RATINGS = [4.5, 3, 1, 5, 2.5, 3, 1, 4, 2] * 3
COLUMNS = ["user", "item"]


def _ids(words):
    """Returns ids in plain Python: by falling counts, then by the bytes of words."""
    text = [str(w).encode() for w in words if w is not None]
    ranked = sorted(collections.Counter(text).items(), key=lambda x: (-x[1], x[0]))
    place = {word: k for k, (word, _) in enumerate(ranked, 1)}
    return [0 if w is None else place[str(w).encode()] for w in words]


def _is_as_expected(make):
    """Builds of one table, and reads another one."""
    vocabulary = build(make(), COLUMNS)
    assert vocabulary == build({"user": USERS, "item": ITEMS})
    assert vocabulary.decode("user", [1]).dtype.kind == "i"
    ids = vocabulary.ids(make())
    assert ids.keys() == {"user", "item"} and ids["user"].dtype == np.int32
    assert ids["user"].tolist() == _ids(USERS)
    assert ids["item"].tolist() == _ids(ITEMS)


# ------------------------------------------------------------------ CSV


def _csv(quoting: Any = csv.QUOTE_MINIMAL, separator=",", end="\n", mark=b""):
    file = io.StringIO()
    writer = csv.writer(file, quoting=quoting, delimiter=separator, lineterminator=end)
    writer.writerow(["user", "item", "rating"])
    writer.writerows((u, i or "", r) for u, i, r in zip(USERS, ITEMS, RATINGS))
    return mark + file.getvalue().encode()


CSVS = {
    "quotes": (_csv(csv.QUOTE_ALL), ","),
    "Excel": (_csv(separator=";", end="\r\n", mark=b"\xef\xbb\xbf"), ";"),
    "TSV": (_csv(separator="\t"), "\t"),
}


def _pyarrow_csv(path, separator):
    module = importlib.import_module("pyarrow.csv")
    return module.read_csv(path, parse_options=module.ParseOptions(delimiter=separator))


def _pyarrow_csv_stream(path, separator):
    module = importlib.import_module("pyarrow.csv")
    parse = module.ParseOptions(delimiter=separator)
    return module.open_csv(path, module.ReadOptions(block_size=80), parse)


def _pandas_csv_chunks(path, separator):
    pd = pytest.importorskip("pandas")
    return pd.read_csv(path, sep=separator, chunksize=5)


def _polars_csv(path, separator):
    return pytest.importorskip("polars").read_csv(path, separator=separator)


@pytest.mark.parametrize("form", CSVS)
@pytest.mark.parametrize(
    "read", [_pyarrow_csv, _pyarrow_csv_stream, _pandas_csv_chunks, _polars_csv]
)
def test_csv_files(tmp_path, read, form):
    pytest.importorskip("pyarrow")
    content, separator = CSVS[form]
    path = tmp_path / "ratings.csv"
    path.write_bytes(content)
    _is_as_expected(lambda: read(path, separator))


# ------------------------------------------------------------------ frames, streams


def _dict():
    return {"user": USERS, "item": ITEMS, "rating": RATINGS}


def _arrays():
    return {name: np.array(x, object) for name, x in _dict().items()}


def _pandas():
    frame = pytest.importorskip("pandas").DataFrame(_dict())
    return frame.set_index(np.arange(len(frame))[::-1])  # rows are not found by label


def _pandas_types():
    return _pandas().astype({"user": "category", "item": "string"})


def _pandas_of_arrow():
    return _pandas().convert_dtypes(dtype_backend="pyarrow")


def _polars():
    return pytest.importorskip("polars").DataFrame(_dict())


def _polars_categories():
    pl = pytest.importorskip("polars")
    return _polars().with_columns(pl.col("item").cast(pl.Categorical))


def _pyarrow():
    return pytest.importorskip("pyarrow").table(_dict())


def _pyarrow_dictionaries():
    table = _pyarrow()
    return table.set_column(1, "item", table["item"].dictionary_encode())


def _hugging_face():
    return pytest.importorskip("datasets").Dataset.from_dict(_dict())


def _dicts():
    cut = lambda k: {name: x[k : k + 9] for name, x in _dict().items()}
    return [cut(0), cut(9), cut(18)]


class _Exporter:
    """An object with nothing but the Arrow stream."""

    def __init__(self, table):
        self._table = table

    def __arrow_c_stream__(self, requested_schema=None):
        return self._table.__arrow_c_stream__(requested_schema)


@pytest.mark.parametrize(
    "make",
    [
        _dict,
        _arrays,
        _pandas,
        _pandas_types,
        _pandas_of_arrow,
        _polars_categories,
        _pyarrow_dictionaries,
        _dicts,
        lambda: _Exporter(_pyarrow()),
        lambda: _pyarrow().to_reader(max_chunksize=5),
        lambda: iter(_pyarrow_dictionaries().to_batches(max_chunksize=5)),
        lambda: [_pandas().iloc[:4], _pyarrow().slice(4)],
        pytest.param(_hugging_face, marks=pytest.mark.slow),  # to import: 3 s
    ],
)
def test_tables(make):
    pytest.importorskip("pyarrow")
    _is_as_expected(make)


@pytest.mark.parametrize("write", ["pandas", "polars", "pyarrow"])
def test_parquet_files(tmp_path, write):
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "ratings.parquet"
    if write == "pandas":
        _pandas().to_parquet(path)
    elif write == "polars":
        _polars_categories().write_parquet(path)
    else:
        parquet.write_table(_pyarrow(), path, row_group_size=5)
    _is_as_expected(lambda: parquet.read_table(path))
    _is_as_expected(lambda: parquet.ParquetFile(path).iter_batches(batch_size=4))


@pytest.mark.parametrize("make", [_pandas, _polars, _pyarrow])
def test_ids_and_other_columns_go_into_a_loader(make):
    frame = make()
    vocabulary = build(frame, COLUMNS)
    dataset = sj.data.ArrayDataset({**vocabulary.ids(frame), "y": frame["rating"]})
    (batch,) = sj.data.DataLoader(dataset, len(USERS))
    assert batch["user"].tolist() == _ids(USERS) and batch["y"].tolist() == RATINGS


@pytest.mark.parametrize("kind", ["pandas", "polars", "pyarrow", "datasets"])
def test_a_data_set_of_a_frame(kind):
    """Its columns are numbers and lists of numbers; rows go by place, not by label."""
    module = pytest.importorskip(kind)
    columns = {"rating": [4.5, 3.0, 1.0], "basket": [[7, 9], [8], [5, 6, 7]]}
    if kind == "pandas":
        frame = module.DataFrame(columns, index=[2, 1, 0])
    elif kind == "datasets":
        frame = module.Dataset.from_dict(columns)
    else:
        frame = getattr(module, "table" if kind == "pyarrow" else "DataFrame")(columns)
    for given in (frame, {name: frame[name] for name in columns}):
        dataset = sj.data.ArrayDataset(given)
        assert dataset[0]["rating"] == 4.5 and list(dataset[2]["basket"]) == [5, 6, 7]
        assert list(dataset[:2]["rating"]) == [4.5, 3.0]
        (batch,) = sj.data.DataLoader(dataset, 3)
        assert batch["rating"].tolist() == columns["rating"]
        assert batch["basket"].to_lists() == columns["basket"]


def test_only_one_batch_of_a_stream_is_in_memory():
    alive, most = set(), 0

    class Batch(dict):
        def __del__(self):
            alive.discard(id(self))

    def batches():
        nonlocal most
        for k in range(50):
            batch = Batch(ad=[k] * 10)
            alive.add(id(batch))
            most = max(most, len(alive))
            yield batch
            del batch

    vocabulary = build(batches())
    assert vocabulary.size("ad") == 51
    assert vocabulary.ids(batches())["ad"].shape == (500,)
    assert most <= 2


# ------------------------------------------------------------------ types of columns


def _columns():
    """Columns of three words by name: the column, and its ids."""
    pa = pytest.importorskip("pyarrow")
    return {
        "user.id": (pa.array([7, None, 2**63], pa.uint64()), [1, 0, 2]),
        "small": (pa.array([1, 2, 1], pa.int8()), [1, 2, 1]),
        "gap": ([3.0, np.nan, 4.0], [1, 0, 2]),  # as pandas reads integers with a gap
        "swapped": (np.array([4, 5, 4], ">i8"), [1, 2, 1]),
        "jax": (jnp.array([4, 5, 4]), [1, 2, 1]),
        "objects": (np.array([4, 5, None], object), [1, 2, 0]),
        "bytes": (pa.array([b"\xff", b"", None]).cast(pa.large_binary()), [1, 0, 0]),
        "tag": (pa.array(["a", None, "a"]).dictionary_encode(), [1, 0, 1]),
        "view": (pa.array(["x", "y", "x"]).cast(pa.string_view()), [1, 2, 1]),
        "flag": ([True, None, False], [2, 0, 1]),
        "none": (pa.nulls(3), [0, 0, 0]),
        "mixed": ([b"\xff", "7", 7], [2, 1, 1]),
        "str": (np.array(["a", "", "b"]), [1, 0, 2]),
        "masked": (np.ma.masked_equal(["a", "b", "c"], "c"), [1, 2, 0]),
    }


def test_types_of_columns():
    table = {name: column for name, (column, _) in _columns().items()}
    vocabulary = build(table)
    ids = {name: x.tolist() for name, x in vocabulary.ids(table).items()}
    assert ids == {name: x for name, (_, x) in _columns().items()}
    integers = [n for n in table if vocabulary.words(n, missing=9 if n in
                ("user.id", "small", "gap", "swapped", "jax", "objects") else "")
                .dtype.kind in "iu"]  # fmt: skip
    assert integers == list(table)[:6]
    hashed = sj.data.HashIds(1000)
    words = hashed.encode(0, ["4", "5", "4"]).tolist()
    assert words == hashed.encode(0, table["swapped"]).tolist()
    assert words == hashed.encode(0, table["jax"]).tolist()
    assert hashed.encode(0, table["tag"]).tolist()[1] == 0


def _lists(kind):
    tags = [["hot", "sweet"], [], None, ["sweet", None, "new"]]
    if kind == "dict":
        return {"tags": tags}
    if kind == "large":
        pa = pytest.importorskip("pyarrow")
        return pa.table({"tags": pa.array(tags, pa.large_list(pa.string()))})
    return getattr(pytest.importorskip(kind), "DataFrame")({"tags": tags})


@pytest.mark.parametrize("kind", ["dict", "large", "pandas", "polars"])
def test_a_column_of_lists_becomes_a_segment_tensor(kind):
    pytest.importorskip("pyarrow")
    table = _lists(kind)
    vocabulary = build(table)
    assert vocabulary.words("tags").tolist() == ["", "sweet", "hot", "new"]
    assert vocabulary.counts("tags").tolist() == [1, 2, 1, 1]
    tags = vocabulary.ids(table)["tags"]
    assert tags.to_lists() == [[2, 1], [], [], [1, 0, 3]]
    assert isinstance(tags.values, np.ndarray)
    both = vocabulary.ids([table, table])["tags"]
    assert both.to_lists() == tags.to_lists() * 2
    (batch,) = sj.data.DataLoader(sj.data.ArrayDataset({"tags": tags}), 4)
    assert batch["tags"].to_lists() == tags.to_lists()
    hashed = sj.data.HashIds(100, names=["tags"]).ids(table)["tags"]
    assert hashed.lengths.tolist() == [2, 0, 0, 3]
    with pytest.raises(TypeError, match="lists"):
        vocabulary.encode("tags", [["hot"]])
    with pytest.raises(TypeError, match="some batches"):
        vocabulary.ids([table, {"tags": ["hot"]}])


# ------------------------------------------------------------------ refusals


def test_tables_that_are_refused():
    """Beside those of tests/error_messages.md."""
    pl, pd = pytest.importorskip("polars"), pytest.importorskip("pandas")
    with pytest.raises(TypeError, match="collect"):
        build(pl.DataFrame(_dict()).lazy())
    with pytest.raises(ValueError, match="differ"):
        build(pd.DataFrame([[1, 2]], columns=["a", "a"]))


def test_without_pyarrow(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for call in (
        lambda: build({"x": ["a"]}),
        lambda: sj.data.HashIds(9).encode(0, ["a"]),
    ):
        with pytest.raises(ImportError, match="pip install"):
            call()


@pytest.mark.slow
def test_pyarrow_is_imported_by_the_first_call():
    code = "import sys, sparsejax as sj; print('pyarrow' in sys.modules)"
    assert run_python("-c", code).split() == ["False"]
