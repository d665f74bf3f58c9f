"""Vocabularies of columns: data frames, shared words, counts, pretrained vectors."""

import collections
import copy
import dataclasses
import importlib
import pickle
from typing import Any, cast

import jax.numpy as jnp
import numpy as np
import pytest

import sparsejax as sj
from sparsejax.data import _sources, _vocabulary


Vocabulary = sj.data.Vocabulary
USERS = [196, 186, 22, 196, 7, 22, 196]
ITEMS = ["tea", "jam", None, "tea", "crème", "jam", "tea"]


def same(a, b):
    assert a == b
    assert [x.dtype for x in a.ids] == [x.dtype for x in b.ids]
    for x, y in zip(a.frequencies, b.frequencies, strict=True):
        np.testing.assert_array_equal(x, y)


# ------------------------------------------------------------------ kinds of columns


def numpy_columns():
    items = np.array([x or "" for x in ITEMS])
    bytes_ = np.char.encode(items, "utf-8")
    return {
        "str": (np.array(USERS), items),
        "bytes": (np.array(USERS, np.uint16), bytes_),
        "object": (np.array(USERS, object), np.array(ITEMS, object)),
        "text of ints": ([str(x) for x in USERS], np.array(ITEMS, object)),
        "floats": (np.array(USERS, np.float32), [x or np.nan for x in ITEMS]),
        "jax": (jnp.array(USERS), iter(ITEMS)),
        "masked": (
            np.array(USERS, ">i8"),
            np.ma.MaskedArray(items, [x is None for x in ITEMS]),
        ),
    }


@pytest.mark.parametrize("kind", numpy_columns())
def test_arrays(kind):
    users, items = numpy_columns()[kind]
    if kind == "jax":
        items = list(items)
    got = Vocabulary.build({"user": users, "item": items})
    want = Vocabulary.build({"user": USERS, "item": ITEMS})
    same(got, want)
    assert got.encode("user", users).tolist() == [1, 3, 2, 1, 4, 2, 1]
    assert got.encode("item", items).tolist() == [1, 2, 0, 1, 3, 2, 1]


def pandas_frames():
    pd = pytest.importorskip("pandas")
    frame = pd.DataFrame({"user": USERS, "item": ITEMS})
    yield frame
    yield frame.astype({"user": "Int64", "item": "category"})
    yield frame.astype({"user": "category", "item": "string"})
    yield frame.set_index(np.arange(len(frame))[::-1])  # rows are not found by label
    gap = pd.concat([frame, pd.DataFrame({"user": [None], "item": [None]})])
    assert gap["user"].dtype.kind in "fO"
    yield gap.iloc[:-1]


def test_pandas():
    want = Vocabulary.build({"user": USERS, "item": ITEMS})
    for frame in pandas_frames():
        got = Vocabulary.build(frame)
        same(got, want)
        encoded = got.encode_columns(frame)
        assert encoded["user"].tolist() == [1, 3, 2, 1, 4, 2, 1]
        assert encoded["item"].tolist() == [1, 2, 0, 1, 3, 2, 1]
        assert got.decode("user", [1, 2]).tolist() == [196, 22]
        assert got.encode("item", frame["item"].iloc[:2]).tolist() == [1, 2]
        assert got.encode("item", frame["item"].array).tolist() == [1, 2, 0, 1, 3, 2, 1]


def test_polars():
    pl = pytest.importorskip("polars")
    frame = pl.DataFrame({"user": USERS, "item": ITEMS})
    want = Vocabulary.build({"user": USERS, "item": ITEMS})
    for own in (frame, frame.with_columns(pl.col("item").cast(pl.Categorical))):
        got = Vocabulary.build(own)
        same(got, want)
        assert got.encode_columns(own)["item"].tolist() == [1, 2, 0, 1, 3, 2, 1]
    with pytest.raises(TypeError, match=r"LazyFrame. Pass for example df.collect\(\)"):
        Vocabulary.build(frame.lazy())


def test_pyarrow():
    pa = pytest.importorskip("pyarrow")
    whole = pa.table({"user": USERS, "item": ITEMS})
    chunks = pa.concat_tables([whole.slice(0, 3), whole.slice(3)])
    assert chunks["item"].num_chunks == 2
    coded = chunks.set_column(1, "item", chunks["item"].dictionary_encode())
    small = whole["item"].combine_chunks().dictionary_encode()
    small = small.cast(pa.dictionary(pa.uint8(), pa.string()))
    want = Vocabulary.build({"user": USERS, "item": ITEMS})
    for table in (whole, chunks, coded, whole.set_column(1, "item", small)):
        got = Vocabulary.build(table)
        same(got, want)
        assert got.encode_columns(table)["item"].tolist() == [1, 2, 0, 1, 3, 2, 1]
    nothing = whole.slice(0, 0)
    assert want.encode_columns(nothing)["item"].shape == (0,)
    assert Vocabulary.build(nothing).sizes() == [1, 1]


@pytest.mark.slow
def test_hugging_face():
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict({"user": USERS, "item": ITEMS})
    want = Vocabulary.build({"user": USERS, "item": ITEMS})
    same(Vocabulary.build(data), want)
    same(Vocabulary.build({name: data[name] for name in ("user", "item")}), want)
    turned = data.select(list(range(len(data)))[::-1])
    assert want.encode("user", turned["user"]).tolist() == [1, 2, 4, 1, 2, 3, 1]
    with pytest.raises(TypeError, match="column 'train' must be strings.*is a table"):
        Vocabulary.build(datasets.DatasetDict({"train": data}))


def test_a_file_gives_the_same(tmp_path):
    lines = ["user,item,rating", *(f"{u},{i or ''},1" for u, i in zip(USERS, ITEMS))]
    path = tmp_path / "ratings.csv"
    path.write_text("\n".join(lines), encoding="utf-8")
    columns = {"label": "rating", "ids": ["user", "item"]}
    want = Vocabulary.build({"user": USERS, "item": ITEMS})
    same(Vocabulary.build(path, columns), want)
    same(Vocabulary.build([path, path], columns=columns, min_count=3, max_size=3),
         Vocabulary.build({"user": USERS * 2, "item": ITEMS * 2},
                                 min_count=3, max_size=3))  # fmt: skip
    read = sj.data.read_ids(path, want, columns)["ids"]
    encoded = want.encode_columns({"user": USERS, "item": ITEMS})
    np.testing.assert_array_equal(read, np.stack(list(encoded.values()), axis=1))


def test_a_hash_takes_the_same_columns():
    encoder = sj.data.HashIds(1000, seed=2)
    want = encoder.encode(1, [str(x) for x in USERS])
    for users, _ in numpy_columns().values():
        np.testing.assert_array_equal(encoder.encode(1, users), want)
    assert encoder.encode(0, [None, ""]).tolist() == [0, 0]
    pd = pytest.importorskip("pandas")
    np.testing.assert_array_equal(encoder.encode(1, pd.Series(USERS)), want)


# ------------------------------------------------------------------ data sets of frames


def frames():
    """The same columns in each of these packages: numbers, and lists of numbers."""
    rating, baskets = [4.5, 3.0, 1.0], [[7, 9], [8], [5, 6, 7]]
    columns = {"rating": rating, "basket": baskets}
    if pd := _import("pandas"):
        yield "pandas", pd.DataFrame(columns, index=[2, 1, 0])
    if pl := _import("polars"):
        yield "polars", pl.DataFrame(columns)
    if pa := _import("pyarrow"):
        yield "pyarrow", pa.table(columns)


def _import(name):
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


@pytest.mark.parametrize("kind", ["pandas", "polars", "pyarrow"])
def test_a_data_set_of_a_frame(kind):
    frame = dict(frames()).get(kind)
    if frame is None:
        pytest.skip(f"{kind} is not installed")
    columns = {name: frame[name] for name in ("rating", "basket")}
    for given in (frame, columns):
        dataset = sj.data.ArrayDataset(given)
        assert dataset[0]["rating"] == 4.5  # by place, not by label
        assert list(dataset[2]["basket"]) == [5, 6, 7]
        assert list(dataset[:2]["rating"]) == [4.5, 3.0]
        (batch,) = sj.data.DataLoader(dataset, 3)
        assert batch["rating"].tolist() == [4.5, 3.0, 1.0]
        assert batch["basket"].to_lists() == [[7, 9], [8], [5, 6, 7]]


@pytest.mark.slow
def test_a_data_set_of_hugging_face():
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict({"y": [1.0, 2.0], "ids": [[1, 2], [3]]})
    for given in (data, {"y": data["y"], "ids": data["ids"]}):
        (batch,) = sj.data.DataLoader(sj.data.ArrayDataset(given), 2)
        assert batch["y"].tolist() == [1.0, 2.0]
        assert batch["ids"].to_lists() == [[1, 2], [3]]


# ------------------------------------------------------------------ counts, sharing


@pytest.mark.parametrize("least, most", [(1, None), (3, None), (1, 9), (4, 6)])
def test_counts_and_cut_off(least, most):
    rng = np.random.default_rng(0)
    words = [f"w{k}" if k else "" for k in rng.zipf(1.3, 2000) % 90]
    found = Vocabulary.build({"w": words}, min_count=least, max_size=most)
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


def test_limits_of_columns(tmp_path):
    """Limits of a column do not change others; `prune` equals limits in `build`."""
    rng = np.random.default_rng(1)
    columns = {name: rng.zipf(1.5, 500) % 40 for name in ("user", "item", "tag")}
    least, most = {"user": 3, "tag": 2}, {"item": 5, "user": None}
    whole = Vocabulary.build(columns)
    found = Vocabulary.build(columns, min_count=least, max_size=most)
    for name, own in columns.items():
        want = Vocabulary.build(
            {name: own}, min_count=least.get(name, 1), max_size=most.get(name)
        )
        ids = found.encode(name, own)
        np.testing.assert_array_equal(ids, want.encode(name, own))
        np.testing.assert_array_equal(found.counts(name), want.counts(name))
        known = ids > 0
        np.testing.assert_array_equal(ids[known], whole.encode(name, own)[known])
    assert len({found.size(name) for name in columns}) == 3 and found.size("item") == 5
    same(whole.prune(min_count=least, max_size=most), found)
    assert whole.prune() == whole and found.prune(max_size=2).sizes() == [2, 2, 2]
    assert whole.prune(min_count=10**6).decode("user", [0], missing=7).tolist() == [7]

    path = tmp_path / "rows.csv"
    rows = zip(*(x.tolist() for x in columns.values()))
    path.write_text("".join(f"{u},{i},{t}\n" for u, i, t in rows))
    layout: Any = dict(columns={"ids": [0, 1, 2]})
    by_place = Vocabulary.build(
        path, min_count={0: 3, 2: 2}, max_size={1: 5, 0: None}, **layout
    )
    same(dataclasses.replace(by_place, names=found.names), found)

    shared = Vocabulary.build(columns, shared=[["user", "item"]], min_count={"item": 4})
    same(Vocabulary.build(columns, shared=[["user", "item"]]).prune(
        min_count={"user": 4, "item": 4}), shared)  # fmt: skip
    assert shared.sorted_words[0] is shared.sorted_words[1]


def test_a_long_repr_is_cut():
    columns = {f"C{k}": [1] for k in range(30)}
    shown = "C0: 2 ids, C1: 2 ids, C2: 2 ids, C3: 2 ids, C4: 2 ids, C5: 2 ids"
    shown += ", C6: 2 ids, C7: 2 ids, 22 more"
    assert repr(Vocabulary.build(columns)) == f"Vocabulary({shown})"
    shown = "C0, C1, C2, C3, C4, C5, C6, C7, 22 more: 2 ids"
    assert repr(Vocabulary.build(columns, shared=True)) == f"Vocabulary({shown})"


def test_columns_share_a_vocabulary(tmp_path):
    triples = {
        "head": ["ann", "bob", "ann"],
        "relation": ["knows", "knows", "likes"],
        "tail": ["bob", "cid", "cid"],
    }
    shared = [["head", "tail"]]
    found = Vocabulary.build(triples, shared=shared)
    ids = found.encode_columns(triples)
    assert ids["head"].tolist() == [1, 2, 1] and ids["tail"].tolist() == [2, 3, 3]
    assert ids["relation"].tolist() == [1, 1, 2]
    assert found.counts("head").tolist() == [0, 2, 2, 2]
    assert repr(found) == "Vocabulary(head, tail: 4 ids; relation: 3 ids)"

    path = tmp_path / "triples.tsv"
    path.write_text("\n".join(map("\t".join, zip(*triples.values()))))
    by_place = Vocabulary.build(path, columns={"ids": [0, 1, 2]}, shared=[[0, 2]])
    assert repr(by_place) == "Vocabulary(0, 2: 4 ids; 1: 3 ids)"
    path.write_text("head\trelation\ttail\n" + path.read_text())
    columns = {"ids": list(triples)}
    same(Vocabulary.build(path, columns=columns, shared=shared), found)

    found.save(tmp_path / "triples.npz")
    loaded = Vocabulary.load(tmp_path / "triples.npz")
    same(loaded, found)
    assert (
        repr(loaded) == repr(found) and loaded.sorted_words[0] is loaded.sorted_words[2]
    )
    edges = {name: triples[name] for name in ("head", "tail")}
    both = Vocabulary.build(edges, shared=True)
    assert repr(both) == "Vocabulary(head, tail: 4 ids)"
    assert both.align(["cid"], [[1.0]]).tolist() == [[0], [0], [0], [1]]
    with pytest.raises(ValueError, match="different words. Pass column="):
        found.align(["cid"], [[1.0]])


def test_equal_means_the_same_ids():
    a = Vocabulary.build({"x": [1, 2]})
    assert a == Vocabulary.build({"x": ["1", "2"]})
    assert a != Vocabulary.build({"y": [1, 2]})
    assert a != Vocabulary.build({"x": [1, 2, 2]})
    assert a != Vocabulary.build({"x": [1, 2], "y": [1]}) and a != 3
    with pytest.raises(TypeError, match="unhashable"):
        hash(a)


def test_a_copy_knows_the_same_ids():
    made = Vocabulary.build({"user": USERS, "item": ITEMS})
    want = made.encode("item", ITEMS).tolist(), made.decode("user", [1, 2]).tolist()
    for copied in (pickle.loads(pickle.dumps(made)), copy.deepcopy(made)):
        same(copied, made)
        assert copied.encode("item", ITEMS).tolist() == want[0]
        assert copied.decode("user", [1, 2]).tolist() == want[1]
    assert len(pickle.dumps(made)) == len(pickle.dumps(copied))


@pytest.mark.parametrize("width", [3, 8, 9])
def test_many_words_in_a_file(tmp_path, width):
    """Words in many blocks, which are counted in many parts."""
    rng = np.random.default_rng(width)
    words = np.array([f"{k:0{width}d}"[-width:] for k in rng.integers(0, 10**6, 9000)])
    words[::7] = [f"{k}" for k in rng.integers(0, 99, len(words[::7]))]  # of any length
    path = tmp_path / "words.txt"
    path.write_text("\n".join(words) + "\n")
    layout: Any = dict(columns={"ids": [0]})
    want = Vocabulary.build({"w": words}, min_count=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_sources, "BLOCK", 1000)
        patch.setattr(_vocabulary, "_MAX_WAITING", 500)
        found = Vocabulary.build(path, min_count=2, **layout)
        same(dataclasses.replace(found, names=("w",)), want)
        read = sj.data.read_ids(path, found, **layout)["ids"][:, 0]
    np.testing.assert_array_equal(read, want.encode("w", words))
    assert 0 < np.mean(read == 0) < 0.95


# ------------------------------------------------------------------ ids to words


@pytest.mark.parametrize(
    "words, missing, dtype",
    [
        ([3, -(2**63)], 2**63 - 1, np.int64),
        ([3, 2**64 - 1], 0, np.uint64),
        ([3, 2**63], -1, object),
        ([3, -1], np.uint64(2**63), object),
        ([3, 4], 10**30, object),
        ([-3, 2**63], 0, object),
    ],
)
def test_decode_of_integers_that_share_no_dtype(words, missing, dtype):
    found = sj.data.Vocabulary.build({"a": words[:1], "b": words[1:]}, shared=True)
    ids = np.append(found.encode("a", words), 0)
    got = found.decode("b", ids, missing=missing)
    assert got.dtype == dtype and got.tolist() == [*words, missing]


def test_words_are_in_the_order_of_the_rows():
    """Not in the order of `sorted_words`: a file of vectors is written by `words`."""
    rng = np.random.default_rng(0)
    corpus = [f"w{k}" for k in rng.zipf(1.5, 2_000) % 400]
    found = Vocabulary.build({"word": corpus, "code": rng.integers(0, 9, 50)})
    words = found.words("word")
    assert words.shape == (found.size("word"),) and words[0] == ""
    assert found.encode("word", words).tolist() == list(range(len(words)))
    counts = collections.Counter(corpus)
    assert [0, *(counts[w] for w in words[1:])] == found.counts("word").tolist()
    table = rng.normal(size=(len(words), 3))
    back = found.align(words[1:], table[1:], column="word", table=table * [[0]])
    assert np.array_equal(back[1:], table[1:])
    codes = found.words("code", missing=-1)
    assert codes.dtype == np.int64 and codes[0] == -1
    assert found.encode("code", codes[1:]).tolist() == list(range(1, len(codes)))


def test_decode_is_the_inverse_of_encode(tmp_path):
    big = np.array([2**63 + 1, 5, 5], np.uint64)
    columns = {"user": USERS, "item": ITEMS, "hash": big, "raw": [b"\xff", b"\xff", 7]}
    made = Vocabulary.build(columns)
    made.save(tmp_path / "v.npz")
    for found in (made, Vocabulary.load(tmp_path / "v.npz")):
        ids = found.encode_columns(columns)
        assert found.decode("user", ids["user"]).tolist() == USERS
        assert found.decode("hash", ids["hash"]).tolist() == big.tolist()
        text = found.decode("item", ids["item"].reshape(7, 1))
        assert text.shape == (7, 1) and text[:2, 0].tolist() == ["tea", "jam"]
        assert text[2, 0] == "" and text[4, 0] == "crème"
        raw = found.decode("raw", ids["raw"])
        assert found.encode("raw", raw).tolist() == ids["raw"].tolist()
        assert found.decode("user", [0, 1], missing=-1).tolist() == [-1, 196]
        assert found.decode("user", []).dtype == np.int64
        assert found.decode("item", jnp.array(3)).shape == ()


def test_a_vocabulary_without_counts():
    made = Vocabulary([np.array([b"a"])], [np.array([1], np.int32)])
    assert repr(made) == "Vocabulary(0: 2 ids)"


# ------------------------------------------------------------------ pretrained vectors


def test_align_takes_the_rows_of_known_words(getkey):
    rng = np.random.default_rng(1)
    found = Vocabulary.build({"word": [f"w{k % 40}" for k in range(100)]})
    words = [f"w{k}" for k in rng.permutation(60)] + ["w3", ""]
    vectors = rng.normal(size=(len(words), 5)).astype(np.float32)
    start = rng.normal(size=(found.size("word"), 5))
    for table in (None, start, jnp.asarray(start)):
        got = found.align(words, vectors, table=table)
        want = np.zeros_like(start) if table is None else np.array(table)
        for word, vector in reversed(list(zip(words, vectors))):
            if (k := found.encode("word", [word])[0]) > 0:
                want[k] = vector
        np.testing.assert_array_equal(got, want.astype(np.float32))
        assert got.dtype == np.float32
    with pytest.raises(ValueError, match=r"vectors must have shape \[62, D\]"):
        found.align(words, vectors[:-1])


def test_a_vocabulary_counts_and_cuts(tmp_path):
    words = [["b", "x"], ["a", ""], ["b", "y"], ["c", "x"], ["a", ""], ["b", "z"]]
    path = tmp_path / "words.tsv"
    path.write_text("".join("\t".join(row) + "\n" for row in words))
    layout: Any = dict(columns={"ids": [0, 1]})
    build = sj.data.Vocabulary.build
    full = build(path, **layout)
    assert full.sizes() == [4, 4]
    data = sj.data.read_ids(path, full, **layout)
    assert data["ids"].T.tolist() == [[1, 2, 1, 3, 2, 1], [1, 0, 2, 1, 0, 3]]
    assert full.encode(1, [b"new", b"x", b"", "y", b"xx"]).tolist() == [0, 1, 0, 2, 0]
    common = build(path, min_count=2, **layout)
    assert common.sizes(2) == [3, 2]
    assert build(path, max_size=2, **layout).sizes() == [2, 2]
    twice = build([path, path], min_count=2, **layout)
    assert twice.sizes() == full.sizes()
    assert build(path, min_count=9, **layout).encode(0, [b"a"]).tolist() == [0]


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
        ({"ids 1": np.array([1, 2])}, "its columns .0. do not match its arrays"),
        ({"words 0": None}, "its columns .0. do not match its arrays"),
        ({"columns": np.array([0, 1])}, "its columns .0, 1. do not match its arrays"),
        ({"columns": np.array([], int)}, "its columns .. do not match its arrays"),
        ({"columns": np.array([0, 0, -1])}, "its columns .0, 0, -1. do not match"),
        ({"counts 0": np.array([0, 3])}, "counts of column 0 do not match its words"),
        ({"counts 0": np.array([0, 3, -1])}, "counts of column 0 do not match its w"),
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


def test_vocabulary_is_saved_and_loaded(tmp_path):
    file, saved = tmp_path / "clicks.csv", tmp_path / "vocabulary.npz"
    file.write_text("b,x\na,\nb,\u00e9\n")
    built = sj.data.Vocabulary.build(file, {"ids": [0, 1]})
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


# ------------------------------------------------------------------ refusals


KNOWN = Vocabulary.build({"user": USERS, "item": ITEMS})


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: Vocabulary.build([1, 2]), TypeError, "must be a path, .*a dict of"),
        (lambda: Vocabulary.build({"x": [np.inf]}), TypeError, "got inf"),
        (
            lambda: Vocabulary.build({"x": [["a"], ["b"]]}),
            TypeError,
            r"got \['a'\]. Flatten lists",
        ),
        (lambda: Vocabulary.build({"x": np.ones((2, 2), int)}), TypeError, "Fl"),
        (
            lambda: Vocabulary.build({"x": np.zeros(2, "M8[s]")}),
            TypeError,
            "must be strings or integers",
        ),
        (lambda: Vocabulary.build({"x": 3}), TypeError, "got 3"),
        (lambda: Vocabulary.build({"x": ["a\0"]}), ValueError, "a zero byte"),
        (
            lambda: Vocabulary.build({"x": [1]}, shared=["x"]),
            TypeError,
            "shared must be True, or a list of lists",
        ),
        (
            lambda: Vocabulary.build({"x": [1]}, shared=[["x", "y"]]),
            ValueError,
            r"shared must have each of the columns \['x'\] at most once",
        ),
        (
            lambda: Vocabulary.build({"x": [1]}, shared=[["x"], ["x"]]),
            ValueError,
            "at most once",
        ),
        (
            lambda: Vocabulary.build({"x": [1]}, max_size={"y": 3}),
            ValueError,
            r"max_size must have only columns of \['x'\], got 'y'",
        ),
        (
            lambda: Vocabulary.build({"x": [1]}, min_count={"x": 0.5}),  # pyright: ignore
            TypeError,
            "min_count must be a positive int, got 0.5",
        ),
        (lambda: KNOWN.encode(1.0, [1]), TypeError, "Pass the name of a column"),  # pyright: ignore
        (
            lambda: KNOWN.encode_columns({"item": [0.5]}),
            TypeError,
            "encode_columns: column 'item' must be",
        ),
        (lambda: KNOWN.decode("user", [-1]), IndexError, "from 0 to 4, got -1"),
        (
            lambda: KNOWN.decode("user", [0.5]),
            TypeError,
            "decode: ids must be integers",
        ),
        (lambda: KNOWN.decode("item", [1], missing=0), TypeError, "must be a str"),
    ],
)
def test_refusals(call, error, message):
    with pytest.raises(error, match=message):
        call()
