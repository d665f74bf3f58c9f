"""Vocabularies of columns: data frames, shared words, counts, pretrained vectors."""

import collections
import copy
import importlib
import pickle
from typing import Any, cast

import jax.numpy as jnp
import numpy as np
import pytest

import sparsejax as sj
from sparsejax.data import _vocabulary


Vocabulary = sj.data.Vocabulary
USERS = [196, 186, 22, 196, 7, 22, 196]
ITEMS = ["tea", "jam", None, "tea", "crème", "jam", "tea"]


def same(a, b):
    assert a == b
    for x, y in zip(a.columns.values(), b.columns.values(), strict=True):
        assert x.ids.dtype == y.ids.dtype and x.is_integer == y.is_integer
        np.testing.assert_array_equal(x.counts, y.counts)


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
    assert got == want
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
        encoded = got.ids(frame)
        assert encoded["user"].tolist() == [1, 3, 2, 1, 4, 2, 1]
        assert encoded["item"].tolist() == [1, 2, 0, 1, 3, 2, 1]
        assert got.decode("user", [1, 2]).tolist() == [196, 22]
        assert got.encode("item", frame["item"].iloc[:2]).tolist() == [1, 2]
        assert got.encode("item", frame["item"].array).tolist() == [1, 2, 0, 1, 3, 2, 1]


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


def test_limits_of_columns():
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

    shared = Vocabulary.build(columns, shared=[["user", "item"]], min_count={"item": 4})
    same(Vocabulary.build(columns, shared=[["user", "item"]]).prune(
        min_count={"user": 4, "item": 4}), shared)  # fmt: skip
    assert shared.columns["user"] is shared.columns["item"]


def test_columns_share_a_vocabulary(tmp_path):
    triples = {
        "head": ["ann", "bob", "ann"],
        "relation": ["knows", "knows", "likes"],
        "tail": ["bob", "cid", "cid"],
    }
    shared = [["head", "tail"]]
    found = Vocabulary.build(triples, shared=shared)
    ids = found.ids(triples)
    assert ids["head"].tolist() == [1, 2, 1] and ids["tail"].tolist() == [2, 3, 3]
    assert ids["relation"].tolist() == [1, 1, 2]
    assert found.counts("head").tolist() == [0, 2, 2, 2]
    assert repr(found) == "Vocabulary(head, tail: 4 ids; relation: 3 ids)"

    assert found == Vocabulary.build(
        triples, ["head", "relation", "tail"], shared=shared
    )

    found.save(tmp_path / "triples.npz")
    loaded = Vocabulary.load(tmp_path / "triples.npz")
    same(loaded, found)
    assert (
        repr(loaded) == repr(found) and loaded.columns["head"] is loaded.columns["tail"]
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


@pytest.mark.parametrize("width", [3, 8, 9])
def test_words_of_many_batches(monkeypatch, width):
    rng = np.random.default_rng(width)
    words = np.array([f"{k:0{width}d}"[-width:] for k in rng.integers(0, 10**6, 9000)])
    words[::7] = [f"{k}" for k in rng.integers(0, 99, len(words[::7]))]  # of any length
    words[1234] = "9" * 1000  # one long word, which is dropped below
    want = Vocabulary.build({"w": words}, min_count=2)
    monkeypatch.setattr(_vocabulary, "_MAX_WAITING", 500)
    batches = lambda: ({"w": words[k : k + 90]} for k in range(0, 9000, 90))
    found = Vocabulary.build(batches(), min_count=2)
    same(found, want)
    assert found.columns["w"].sorted_words.dtype == f"S{width}"
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
    """Not in the order of the bytes: a file of vectors is written by `words`."""
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
        ids = found.ids(columns)
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


# ------------------------------------------------------------------ vocabulary files


@pytest.mark.parametrize(
    "change, message",
    [
        ({"words 0": np.array([b"b", b"a"])}, "words of column 0 are not in ascending"),
        ({"words 0": np.array([b"a", b"a"])}, "words of column 0 are not in ascending"),
        ({"words 0": np.array([b"a"])}, "ids of column 0 are not from 1 to 1"),
        ({"words 0": np.array(["a", "b"])}, "'words 0' has the type U1"),
        ({"words 0": np.array(b"a")}, "'words 0' has the type S1 and 0 axes"),
        ({"ids 0": np.array([1, 3])}, "ids of column 0 are not from 1 to 2"),
        ({"ids 0": np.array([1, 1])}, "ids of column 0 are not from 1 to 2"),
        ({"ids 0": np.array([1.0, 2.0])}, "'ids 0' has the type f8"),
        ({"ids 1": np.array([1, 2])}, "its columns .0. do not match its arrays"),
        ({"words 0": None}, "its columns .0. do not match its arrays"),
        ({"counts 0": None}, "its columns .0. do not match its arrays"),
        ({"columns": np.array([0, 1])}, "its columns .0, 1. do not match its arrays"),
        ({"columns": np.array([], int)}, "its columns .. do not match its arrays"),
        ({"columns": np.array([0, 0, -1])}, "its columns .0, 0, -1. do not match"),
        ({"counts 0": np.array([0, 3])}, "counts of column 0 do not match its words"),
        ({"counts 0": np.array([0, 3, -1])}, "counts of column 0 do not match its w"),
        ({"integers": np.array([True])}, "invalid literal for int"),
        ({"integers": np.array([False] * 2)}, "it has 1 columns with the names"),
        ({"names": np.array(["x", "y"])}, "it has 1 columns with the names"),
        ({"names": np.array("x")}, "'names' has the type U1 and 0 axes"),
        ({"names": np.array([b"x"])}, "'names' has the type S1"),
    ],
)
def test_a_vocabulary_that_nothing_wrote_is_refused(tmp_path, change, message):
    path = tmp_path / "known.npz"
    good = {"words 0": np.array([b"a", b"b"]), "ids 0": np.array([2, 1], np.int32)}
    good |= {"columns": np.array([0]), "counts 0": np.array([0, 3, 1])}
    good |= {"names": np.array(["x"]), "integers": np.array([False])}
    np.savez(path, **good)
    assert sj.data.Vocabulary.load(path).encode("x", ["a", "b"]).tolist() == [2, 1]
    wrong = {name: x for name, x in (good | change).items() if x is not None}
    np.savez(path, **wrong)
    with pytest.raises(ValueError, match=f"Vocabulary.load: .*wrote: .*{message}"):
        sj.data.Vocabulary.load(path)


def test_vocabulary_is_saved_and_loaded(tmp_path):
    saved = tmp_path / "vocabulary.npz"
    built = Vocabulary.build({"x": ["b", "a", "b"], "y": ["x", "", "\u00e9"]})
    built.save(saved)
    same(Vocabulary.load(saved), built)
    (tmp_path / "text.npz").write_text("b,x\n")
    np.savez(tmp_path / "other.npz", a=np.ones(2), b=np.ones(2))
    with open(tmp_path / "one.npz", "wb") as file:
        np.save(file, np.ones(2))
    whole = saved.read_bytes()
    (tmp_path / "half.npz").write_bytes(whole[: len(whole) // 2])
    for name in ("text", "other", "one", "half"):
        with pytest.raises(ValueError, match="not a file that Vocabulary.save wrote"):
            Vocabulary.load(tmp_path / f"{name}.npz")
    with pytest.raises(FileNotFoundError):
        Vocabulary.load(tmp_path / "missing.npz")
    with pytest.raises(TypeError):
        built.save(cast(Any, 3))


# ------------------------------------------------------------------ refusals


KNOWN = Vocabulary.build({"user": USERS, "item": ITEMS})
TWO: Any = {"x": [1], "y": [2]}
build = Vocabulary.build


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: build({"x": [np.inf]}), TypeError, "got inf"),
        (lambda: build({"x": [0.5]}), TypeError, "got 0.5. Numbers that are not ids"),
        (lambda: build({"x": [[["a"]]]}), TypeError, "must be strings or integers"),
        (
            lambda: build({"x": np.ones((2, 2), int)}),
            TypeError,
            "must be strings or integers",
        ),
        (lambda: build({"x": np.zeros(2, "M8[s]")}), TypeError, "must be strings"),
        (lambda: build({"x": 3}), TypeError, "got 3"),
        (lambda: build({"x": "tea"}), TypeError, "got 'tea'"),
        (lambda: build({"x": {"y": [1]}}), TypeError, "must be strings or integers"),
        (lambda: build({"x": ["a\0"]}), ValueError, "a zero byte"),
        (lambda: build({"x": ["tea" * 1000]}), ValueError, "a word of 3000 bytes"),
        (lambda: build(TWO, shared=["xy"]), ValueError, "shared must be True or a li"),
        (lambda: build(TWO, shared=[["x", "z"]]), ValueError, "at most once"),
        (lambda: build(TWO, shared=[["x"], ["x"]]), ValueError, "at most once"),
        (lambda: build(TWO, max_size={"z": 3}), ValueError, "some of the columns .'x'"),
        (lambda: build(TWO, max_size=0), ValueError, "max_size must be a positive"),
        (lambda: build(TWO, min_count={"x": 0}), ValueError, "must be a positive int"),
        (lambda: build(TWO, min_count=cast(Any, 0.5)), TypeError, "integer"),
        (
            lambda: build(TWO, shared=True, min_count={"x": 1, "y": 2}),
            ValueError,
            "must be the same for the columns",
        ),
        (lambda: KNOWN.encode(cast(Any, 1.0), [1]), TypeError, "integer"),
        (lambda: KNOWN.encode("film", [1]), ValueError, "no column 'film'"),
        (lambda: KNOWN.encode(2, [1]), IndexError, "column 2 is out of range"),
        (lambda: KNOWN.ids({"item": [0.5]}), TypeError, "column 'item' must be"),
        (lambda: KNOWN.decode("user", [-1]), IndexError, "from 0 to 4, got -1"),
        (lambda: KNOWN.decode("user", [0.5]), TypeError, "ids must be integers"),
        (lambda: KNOWN.decode("user", [0]), ValueError, "missing=-1"),
        (lambda: KNOWN.decode("item", [1], missing=0), TypeError, "must be a str"),
        (lambda: KNOWN.words("user"), ValueError, "Pass missing="),
        (lambda: KNOWN.align(["a"], [[1.0]]), ValueError, "Pass column="),
    ],
)
def test_refusals(call, error, message):
    with pytest.raises(error, match=message):
        call()
