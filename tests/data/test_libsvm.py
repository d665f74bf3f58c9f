"""The libsvm format: what is read, what is written, and which line is at fault."""

import bz2
import gzip

import numpy as np
import pytest
import scipy.sparse
from hypothesis import given, strategies as st

import sparsejax as sj
from sparsejax.data import _libsvm, _text


PLAIN = b"+1 1:0.5 3:-2e-3\n\n0 2:1 # a comment\n-1\t4:.25  \r\n1.5\n"


def _file(tmp_path, text, name="data.txt"):
    path = tmp_path / name
    path.write_bytes(text)
    return path


def test_rows_labels_and_comments(tmp_path):
    X, y = sj.data.read_libsvm(_file(tmp_path, PLAIN))
    expected = [[0.5, 0, -2e-3, 0], [0, 1, 0, 0], [0, 0, 0, 0.25], [0, 0, 0, 0]]
    assert isinstance(X, scipy.sparse.csr_matrix)
    assert X.dtype == y.dtype == np.float32 and X.indices.dtype == np.int32
    np.testing.assert_array_equal(X.toarray(), np.array(expected, np.float32))
    assert y.tolist() == [1.0, 0.0, -1.0, 1.5]


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress])
def test_compressed_files(tmp_path, pack):
    X, y = sj.data.read_libsvm(_file(tmp_path, pack(PLAIN)))
    assert X.shape == (4, 4) and y.tolist() == [1.0, 0.0, -1.0, 1.5]
    with pytest.raises(OSError, match="is damaged or incomplete"):
        sj.data.read_libsvm(_file(tmp_path, pack(PLAIN * 50)[:-20]))


def test_what_was_damaged_on_the_way(tmp_path):
    packed = bytearray(gzip.compress(PLAIN * 50))
    checksum, stream = bytearray(packed), bytearray(packed)
    checksum[-6] ^= 1
    stream[14:17] = b"\xff\xff\xff"
    for text in (checksum, stream, packed + b"xx"):
        with pytest.raises(OSError, match="is damaged or incomplete"):
            sj.data.read_libsvm(_file(tmp_path, bytes(text)))


def test_infinity_is_a_number_where_it_is_written(tmp_path):
    X, y = sj.data.read_libsvm(_file(tmp_path, b"-inf 1:inf\n"), dtype=np.float16)
    assert X.data.tolist() == [np.inf] and y.tolist() == [-np.inf]


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(path=None), "path must be a str or os.PathLike, got None"),
        (dict(path=3), "path must be a str or os.PathLike, got 3"),
        (dict(dtype="foo"), "dtype must be a dtype of real numbers, got 'foo'"),
        (dict(dtype=complex), "dtype must be a dtype of real numbers"),
        (dict(dtype=None), "dtype must be a dtype of real numbers, got None"),
    ],
)
def test_wrong_options_are_refused(tmp_path, options, message):
    path = _file(tmp_path, PLAIN)
    with pytest.raises(TypeError, match=message):
        sj.data.read_libsvm(**{"path": path, **options})


def test_the_index_base(tmp_path):
    read = lambda text, **options: sj.data.read_libsvm(
        _file(tmp_path, text), **options
    )[0]
    assert read(b"1 1:1 3:1\n").toarray().tolist() == [[1, 0, 1]]
    assert read(b"1 0:1 3:1\n").toarray().tolist() == [[1, 0, 0, 1]]
    assert read(b"1 1:1\n", zero_based=True).toarray().tolist() == [[0, 1]]
    assert read(b"1 1:1\n", num_features=3).shape == (1, 3)
    assert read(b"").shape == (0, 0) and read(b"1\n").shape == (1, 0)
    large = read(b"1 3000000000:1\n")
    assert large.shape == (1, 3_000_000_000) and large.indices.dtype == np.int64


def test_elements_keep_their_order(tmp_path):
    X, _ = sj.data.read_libsvm(_file(tmp_path, b"1 5:1 2:0 5:3\n"))
    assert X.indices.tolist() == [4, 1, 4] and X.data.tolist() == [1, 0, 3]


def test_query_ids_and_several_labels(tmp_path):
    text = b"1 qid:7 1:2\n0 2:1\n"
    X, y, query = sj.data.read_libsvm(_file(tmp_path, text), query_id=True)
    assert query.tolist() == [7, -1] and X.toarray().tolist() == [[2, 0], [0, 1]]
    text = b"1,3 1:2\n 2:1\n2\n"
    X, y = sj.data.read_libsvm(_file(tmp_path, text), multilabel=True)
    assert [labels.tolist() for labels in y] == [[1, 3], [], [2]]
    assert X.toarray().tolist() == [[2, 0], [0, 1], [0, 0]]


@pytest.mark.parametrize(
    "text, options, message",
    [
        (b"1 1:1\nx 2:1\n", {}, ":2: found 'x', expected a number, as label"),
        (b"1 1:1\n\n1 2:\n", {}, ":3: found '', expected .* as value in '2:'"),
        (b"1 2\n", {}, ":1: found '2', expected index:value"),
        (b"1 a:2\n", {}, ":1: found 'a:2', expected .* an index that is an integer"),
        (b"1 -2:2\n", {}, ":1: found '-2:2', expected .* integer, 0 or more"),
        (b"1 1:2:3\n", {}, ":1: found '2:3', expected .* a number as value"),
        (b"1 1:1_0\n", {}, ":1: found '1_0'"),
        (b"1 1.0:1\n", {}, ":1: found '1.0:1'"),
        (b"1:2 5\n", {}, ":1: found '1:2', expected a label first"),
        (b"1 : 5\n", {}, ":1: found ':', expected index:value"),
        (b"1,2 1:1\n", {}, ":1: found '1,2', expected a number, as label"),
        (b"1,x 1:1\n", dict(multilabel=True), ":1: found 'x', expected labels"),
        (b"1 qid:x 1:1\n", {}, ":1: found 'x', expected qid:q"),
        (
            b"1 qid:9223372036854775808 1:1\n",
            {},
            ":1: found '92233720368.*, expected q",
        ),
        (b"1 qid:1 qid:2\n", {}, ":1: found 'qid:2'"),
        (b"1 1:1\n\n1 0:1\n", dict(zero_based=False), ":3: found index 0, expected"),
        (b"1 1:1\n#\n1 4:1\n", dict(num_features=3), ":3: found index 4, .* 1 to 3"),
        (
            b"1 1:1\n\n1 1:2 2:1e39\n",
            {},
            r":3: found 1e\+39, expected a value ",
        ),
        (
            b"1\n2e39 1:1\n",
            {},
            r":2: found 2e\+39, expected a label ",
        ),
        (b"1,2\n,1,2e39\n", dict(multilabel=True), ":2: found '', expected labels"),
        (
            b"1,2\n1,2e39\n",
            dict(multilabel=True),
            r":2: found 2e\+39, expected a label",
        ),
        (b"1 1:1e400\n", {}, ":1: found '1e400', expected .* a number"),
        (b"1 1:300\n", dict(dtype=np.int8), ":1: found 300, .* value that int8 holds"),
        (b"1 1:1\n", dict(num_features=0), "num_features must be a positive int"),
        (b"1 1:1\n", dict(zero_based="no"), "zero_based must be True, False or 'auto'"),
    ],
)
def test_malformed_lines_are_named(tmp_path, text, options, message):
    path = _file(tmp_path, text)
    where = f"{path}" if message.startswith(":") else ""
    with pytest.raises(ValueError, match=where + message):
        sj.data.read_libsvm(path, **options)


TOKENS = st.one_of(
    st.sampled_from(
        "1:2 3:-.5 2:1e5 7:nan 3: :4 5 1:2:3 -1:2 1:+3 x 1:0x1 2:1_0 4:5. 1:-0 "
        "3:0.1234567890123456789 2:123456789012345678 9:. 8:- inf 1:1\r 2:3\x0b".split(
            " "
        )
    ),
    st.builds(
        "{}:{!r}".format, st.integers(0, 99), st.floats(allow_nan=False, width=32)
    ),
)


@given(st.lists(st.lists(TOKENS, max_size=4), max_size=4), st.sampled_from(" \t"))
def test_both_ways_of_reading_agree(lines, space):
    """All at once, or line by line: the same rows; what one refuses the other does."""
    text = "\n".join(space.join(["1", *tokens]) for tokens in lines).encode() + b"\n"
    fast = _libsvm._read_fast(text, 1)
    try:
        slow = _libsvm._read_slowly("file", text, 1, False)
    except ValueError:
        assert fast is None
        return
    if fast is not None:  # it may give up, but not be wrong
        for a, b in zip(fast, slow):
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)
            np.testing.assert_array_equal(np.signbit(a), np.signbit(b))
    elif all(":" in t and "x" not in t for tokens in lines for t in tokens):
        pytest.fail(f"the fast way gave up on {text!r}")


def test_scikit_learn_reads_the_same(tmp_path):
    text = PLAIN.replace(b"\n\n", b"\n")
    load = pytest.importorskip("sklearn.datasets").load_svmlight_file
    rng = np.random.default_rng(0)
    x = scipy.sparse.random(50, 20, 0.3, "csr", np.float32, rng)
    sj.data.write_libsvm(tmp_path / "random.txt", x, rng.integers(0, 2, 50))
    path = _file(tmp_path, text + (tmp_path / "random.txt").read_bytes())
    for own, other in zip(sj.data.read_libsvm(path), load(str(path), dtype=np.float32)):
        a, b = (z.toarray() if scipy.sparse.issparse(z) else z for z in (own, other))
        np.testing.assert_array_equal(a, b)


@given(
    values=st.lists(st.floats(width=32), max_size=8),
    seed=st.integers(0, 9),
    zero_based=st.booleans(),
    name=st.sampled_from(["a.txt", "a.gz", "a.bz2"]),
)
def test_what_is_written_reads_back_bit_by_bit(
    tmp_path_factory, values, seed, zero_based, name
):
    path = tmp_path_factory.mktemp("libsvm") / name
    rng = np.random.default_rng(seed)
    rows = np.sort(rng.integers(0, 3, len(values)))
    offsets = np.searchsorted(rows, np.arange(4))
    index = rng.integers(0, 50, len(values))
    for dtype in (np.float32, np.float64):
        data = np.array(values, dtype) / dtype(3)
        X = scipy.sparse.csr_matrix((data, index, offsets), shape=(3, 50))
        y = rng.standard_normal(3).astype(dtype)
        sj.data.write_libsvm(path, X, y, zero_based=zero_based)
        Z, z = sj.data.read_libsvm(
            path, zero_based=zero_based, num_features=50, dtype=dtype
        )
        assert Z.indptr.tolist() == X.indptr.tolist()
        assert Z.indices.tolist() == X.indices.tolist()
        known = ~np.isnan(data)
        assert Z.data[known].tobytes() == data[known].tobytes()
        assert np.isnan(Z.data[~known]).all() and z.tobytes() == y.tobytes()


def test_kinds_of_rows_that_are_written(tmp_path):
    path = tmp_path / "data.txt"
    dense = np.array([[0, 2.5, 0], [1, 0, 0]])
    elements = {"index": np.array([1, 0]), "value": np.array([2.5, 1.0], np.float32)}
    segments = sj.SegmentTensor.from_lengths(elements, [1, 1], capacity=5)
    for X in (dense, segments, scipy.sparse.csr_matrix(dense)):
        sj.data.write_libsvm(path, X, np.array([1, 0]), query_id=[3, 4])
        assert path.read_text() == "1 qid:3 2:2.5\n0 qid:4 1:1\n"
    sj.data.write_libsvm(path, dense, [[1, 2], []])
    assert path.read_text() == "1,2 2:2.5\n 1:1\n"
    _, labels = sj.data.read_libsvm(path, multilabel=True)
    assert [own.tolist() for own in labels] == [[1, 2], []]
    with pytest.raises(ValueError, match="row 1 has no labels and no elements"):
        sj.data.write_libsvm(path, np.array([[1, 0], [0, 0]]), [[1], []])
    with pytest.raises(ValueError, match="one entry per row of X, 2, got 3"):
        sj.data.write_libsvm(path, dense, [1, 2, 3])
    with pytest.raises(TypeError, match="must be a scipy CSR"):
        sj.data.write_libsvm(path, [1, 2], [1, 2])


def test_writing_is_all_or_nothing(tmp_path):
    path = _file(tmp_path, b"1 1:1\n")

    class Broken:
        def __len__(self):
            return 2

        def __getitem__(self, row):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sj.data.write_libsvm(path, np.eye(2), Broken())
    assert path.read_bytes() == b"1 1:1\n"
    assert [p.name for p in tmp_path.iterdir()] == ["data.txt"]


def test_blocks_are_cut_at_lines(tmp_path, monkeypatch, capsys):
    text = b"".join(b"%d %d:1\n" % (i % 2, i + 1) for i in range(300))
    whole = sj.data.read_libsvm(_file(tmp_path, text))
    for size in (3, 50, 1000):
        monkeypatch.setattr(_text, "BLOCK", size)
        X, y = sj.data.read_libsvm(_file(tmp_path, text[:-1]), progress=size == 50)
        assert (X != whole[0]).nnz == 0 and y.tolist() == whole[1].tolist()
    assert "100%" in capsys.readouterr().err
    path = _file(tmp_path, text + b"1 x\n")
    with pytest.raises(ValueError, match=f"{path}:301: found 'x'"):
        sj.data.read_libsvm(path)


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_progress_may_be_a_function(tmp_path, monkeypatch, pack):
    monkeypatch.setattr(_text, "BLOCK", 64)
    path = _file(tmp_path, pack(b"1 1:1\n" * 100))
    size, seen = path.stat().st_size, []
    sj.data.read_libsvm(path, progress=lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen) and seen[-1] == (size, size)
    with pytest.raises(TypeError, match="progress must be True, False or a function"):
        sj.data.read_libsvm(path, progress="yes")  # pyright: ignore[reportArgumentType]
