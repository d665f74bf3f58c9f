"""The same ratings through every reader that users have: one vocabulary, equal ids.

Tests that need pandas, polars, pyarrow or Hugging Face datasets skip without them.
"""

import collections
import csv
import importlib
import sys

import jax.numpy as jnp
import numpy as np
import pytest

import sparsejax as sj
from helpers import slow_but


build = sj.data.Vocabulary.build
USERS = [196, 186, 22, 196, 7, 22, 196, 22, 7] * 3
ITEMS = ["tea", "jam, red", None, "tea", "cr\u00e8me", 'a "b"', "tea", "jam, red", None]
ITEMS = ITEMS * 3
RATINGS = [4.5, 3, 1, 5, 2.5, 3, 1, 4, 2] * 3
COLUMNS = {"user": USERS, "item": ITEMS, "rating": RATINGS}


def _ids(words):
    """Returns ids in plain Python: by falling counts, then by the bytes of words."""
    text = [str(w).encode() for w in words if w is not None]
    ranked = sorted(collections.Counter(text).items(), key=lambda x: (-x[1], x[0]))
    place = {word: k for k, (word, _) in enumerate(ranked, 1)}
    return [0 if w is None else place[str(w).encode()] for w in words]


# ------------------------------------------------------------------ tables, streams


def _module(name):
    pytest.importorskip(name.partition(".")[0])
    return importlib.import_module(name)


def _pandas():
    frame = _module("pandas").DataFrame(COLUMNS)
    return frame.set_index(np.arange(len(frame))[::-1])  # rows are not found by label


def _polars():
    frame = _module("polars").DataFrame(COLUMNS)
    return frame.cast({"item": _module("polars").Categorical})


def _pyarrow():
    return _module("pyarrow").table(COLUMNS)


def _dictionaries():
    table = _pyarrow()
    return table.set_column(1, "item", table["item"].dictionary_encode())


class _Exporter:
    """An object with nothing but the Arrow stream."""

    def __init__(self, table):
        self._table = table

    def __arrow_c_stream__(self, requested_schema=None):
        return self._table.__arrow_c_stream__(requested_schema)


def _csv_stream(path):
    module = _module("pyarrow.csv")
    return module.open_csv(path, module.ReadOptions(block_size=80))


TABLES = {
    "dict": lambda _: COLUMNS,
    "pandas": lambda _: _pandas(),
    "pyarrow batches": lambda _: iter(_dictionaries().to_batches(max_chunksize=5)),
    "arrays": lambda _: {name: np.array(x, object) for name, x in COLUMNS.items()},
    "dicts": lambda _: [
        {k: x[n : n + 9] for k, x in COLUMNS.items()} for n in (0, 9, 18)
    ],
    "pandas types": lambda _: _pandas().astype({"user": "category", "item": "string"}),
    "pandas of arrow": lambda _: _pandas().convert_dtypes(dtype_backend="pyarrow"),
    "polars": lambda _: _polars(),
    "pyarrow": lambda _: _dictionaries(),
    "an exporter": lambda _: _Exporter(_pyarrow()),
    "pyarrow reader": lambda _: _pyarrow().to_reader(max_chunksize=5),
    "a mix": lambda _: [_pandas().iloc[:4], _pyarrow().slice(4)],
    "CSV by pyarrow": lambda path: _module("pyarrow.csv").read_csv(path),
    "CSV stream": _csv_stream,
    "CSV by polars": lambda path: _module("polars").read_csv(path),
    "CSV by pandas": lambda path: _module("pandas").read_csv(path, chunksize=5),
    "parquet": lambda path: _module("pyarrow.parquet").read_table(f"{path}.parquet"),
    "parquet batches": lambda path: (
        _module("pyarrow.parquet")
        .ParquetFile(f"{path}.parquet")
        .iter_batches(batch_size=4)
    ),
    "datasets": lambda _: _module("datasets").Dataset.from_dict(COLUMNS),  # slow: 3 s
}


@pytest.mark.parametrize("name", slow_but(TABLES, *list(TABLES)[:-1]))
def test_tables(name, tmp_path):
    pytest.importorskip("pyarrow")
    path = tmp_path / "ratings"
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        writer.writerows((u, i or "", r) for u, i, r in zip(USERS, ITEMS, RATINGS))
    if "parquet" in name:
        _pandas().to_parquet(f"{path}.parquet")
    read = lambda: TABLES[name](path)
    vocabulary = build(read(), ["user", "item"])
    assert vocabulary == build({"user": USERS, "item": ITEMS})
    assert vocabulary.decode("user", [1]).dtype.kind == "i"
    ids = vocabulary.ids(read())
    assert ids.keys() == {"user", "item"} and ids["user"].dtype == np.int32
    assert ids["user"].tolist() == _ids(USERS)
    assert ids["item"].tolist() == _ids(ITEMS)


@pytest.mark.parametrize("kind", ["pandas", "polars", "pyarrow", "datasets"])
def test_a_data_set_of_a_frame(kind):
    """Its columns are numbers and lists of numbers; rows go by place, not by label."""
    module = _module(kind)
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


def test_types_of_columns():
    pa = pytest.importorskip("pyarrow")
    integers = {  # columns of three words, and their ids
        "user.id": (pa.array([7, None, 2**63], pa.uint64()), [1, 0, 2]),
        "small": (pa.array([1, 2, 1], pa.int8()), [1, 2, 1]),
        "gap": ([3.0, np.nan, 4.0], [1, 0, 2]),  # as pandas reads integers with a gap
        "swapped": (np.array([4, 5, 4], ">i8"), [1, 2, 1]),
        "jax": (jnp.array([4, 5, 4]), [1, 2, 1]),
        "objects": (np.array([4, 5, None], object), [1, 2, 0]),
    }
    others = {
        "bytes": (pa.array([b"\xff", b"", None]).cast(pa.large_binary()), [1, 0, 0]),
        "tag": (pa.array(["a", None, "a"]).dictionary_encode(), [1, 0, 1]),
        "view": (pa.array(["x", "y", "x"]).cast(pa.string_view()), [1, 2, 1]),
        "flag": ([True, None, False], [2, 0, 1]),
        "none": (pa.nulls(3), [0, 0, 0]),
        "mixed": ([b"\xff", "7", 7], [2, 1, 1]),
        "str": (np.array(["a", "", "b"]), [1, 0, 2]),
        "masked": (np.ma.masked_equal(["a", "b", "c"], "c"), [1, 2, 0]),
    }
    table = {name: column for name, (column, _) in {**integers, **others}.items()}
    vocabulary = build(table)
    for name, (_, ids) in {**integers, **others}.items():
        assert vocabulary.ids(table)[name].tolist() == ids, name
        words = vocabulary.words(name, missing=9 if name in integers else "")
        assert (words.dtype.kind in "iu") == (name in integers), name
    hashed = sj.data.HashIds(1000)
    words = hashed.encode(0, ["4", "5", "4"]).tolist()
    assert words == hashed.encode(0, table["swapped"]).tolist()
    assert words == hashed.encode(0, table["jax"]).tolist()
    assert hashed.encode(0, table["tag"]).tolist()[1] == 0


@pytest.mark.parametrize("kind", ["dict", "pyarrow", "pandas", "polars"])
def test_a_column_of_lists_becomes_a_segment_tensor(kind):
    pa = pytest.importorskip("pyarrow")
    tags = [["hot", "sweet"], [], None, ["sweet", None, "new"]]
    if kind == "dict":
        table = {"tags": tags}
    elif kind == "pyarrow":
        table = pa.table({"tags": pa.array(tags, pa.large_list(pa.string()))})
    else:
        table = _module(kind).DataFrame({"tags": tags})
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
        build(pl.DataFrame(COLUMNS).lazy())
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
