"""Data sets and the loader: batches, their capacity, their order and the state."""

import json
import pickle
import sys

import jax
import numpy as np
import pytest
import scipy.sparse
from hypothesis import given, strategies as st

import sparsejax as sj
from helpers import count_traces
from sparsejax.data import _capacity


def _rows(n, longest=6, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 50, k).tolist() for k in rng.integers(0, longest + 1, n)]


def _numbered(n, **options):
    """A loader over the numbers 0 ... n - 1 and ragged rows."""
    rows = [[i] * (i % 5) for i in range(n)]
    dataset = sj.data.ArrayDataset(rows, np.arange(n, dtype=np.int32))
    return sj.data.DataLoader(dataset, **options)


def _seen(batches):
    """The numbers of the rows in batches (ragged, number, mask), without padding."""
    return [int(i) for _, number, mask in batches for i in number[mask]]


# ------------------------------------------------------------------ data sets


def test_items_are_rows_of_each_column():
    matrix = scipy.sparse.csr_matrix(np.array([[0, 2.0], [3, 0], [0, 0]]))
    segments = sj.SegmentTensor.from_lists([[1, 2], [], [3]])
    lists = [[4], [5, 6], []]
    dense = np.arange(6.0).reshape(3, 2)
    dataset = sj.data.ArrayDataset(matrix, segments, lists, dense)
    assert len(dataset) == 3
    row, ids, listed, numbers = dataset[-3]
    assert row.shape == (1, 2) and row.toarray().tolist() == [[0.0, 2.0]]
    assert ids.tolist() == [1, 2] and listed.tolist() == [4]
    assert numbers.tolist() == [0.0, 1.0]
    assert dataset[2][1].tolist() == [3]
    cut = dataset[1:]
    assert cut[0].toarray().tolist() == [[3, 0], [0, 0]]
    assert cut[1].to_lists() == [[], [3]]
    assert cut[2] == [[5, 6], []]
    assert cut[3].tolist() == [[2, 3], [4, 5]]
    x = np.arange(3)
    assert sj.data.ArrayDataset(x)[1] == 1
    assert sj.data.ArrayDataset(x, x)[1] == (1, 1)
    assert sj.data.ArrayDataset({"a": x})[1] == {"a": 1}
    simple = sj.data.SimpleDataset([(1, 2), (3, 4)])
    assert simple[-1] == (3, 4) and simple[:1] == [(1, 2)]


# ------------------------------------------------------------------ batches


@pytest.mark.slow
@given(
    n=st.integers(1, 40),
    batch_size=st.integers(1, 12),
    shuffle=st.booleans(),
    seed=st.integers(0, 5),
)
def test_batches_hold_the_rows_they_say(n, batch_size, shuffle, seed):
    rows, dense = _rows(n, seed=seed), np.random.default_rng(0).random((n, 2))
    rng = np.random.default_rng(seed)
    matrix = scipy.sparse.random(n, 7, 0.4, "csr", rng=rng)
    columns = {"rows": rows, "csr": matrix, "dense": dense, "at": np.arange(n)}
    dataset = sj.data.ArrayDataset(columns)
    loader = sj.data.DataLoader(
        dataset, batch_size, shuffle=shuffle, seed=seed, mask=True
    )
    seen, shapes = [], set()
    for batch in loader:
        mask = batch["mask"]
        at = batch["at"][mask]
        seen += at.tolist()
        shapes.add(str([(type(x), x.shape, x.dtype) for x in jax.tree.leaves(batch)]))
        lists = batch["rows"].to_lists()
        assert lists[: len(at)] == [rows[i] for i in at]
        assert not any(lists[len(at) :])
        elements = batch["csr"].values
        found = scipy.sparse.csr_matrix(
            (elements["value"], elements["index"], np.asarray(batch["csr"].offsets)),
            shape=(batch_size, 7),
        )
        expected = matrix[at].toarray().astype(np.float32)
        np.testing.assert_array_equal(found.toarray()[: len(at)], expected)
        np.testing.assert_array_equal(
            batch["dense"][mask], dense[at].astype(np.float32)
        )
        assert not batch["dense"][~mask].any()
    assert sorted(seen) == list(range(n))
    assert len(shapes) == 1 and "numpy" in shapes.pop()


def test_nested_rows_have_a_capacity_for_each_level():
    nested = [[[1, 2], [3]], [], [[4]], [[5, 6, 7], [8], [9]]]
    column = sj.SegmentTensor.from_lists(nested)
    loader = sj.data.DataLoader(sj.data.ArrayDataset(column), 2, shuffle=True)
    assert loader.capacity == (5, 8)
    for _ in range(3):
        found = [row for batch in loader for row in batch.to_lists()]
        assert sorted(map(str, found)) == sorted(map(str, nested))
    given = sj.data.DataLoader(sj.data.ArrayDataset(nested), 2, capacity=(6, 9))
    assert given.capacity == (6, 9)


def test_items_of_a_sequence_become_columns():
    items = [([1, 2], np.zeros(2), 1.5), ([3], np.ones(2), 2.5)]
    for dataset in (items, sj.data.SimpleDataset(items)):
        ids, array, number = next(iter(sj.data.DataLoader(dataset, 2)))
        assert ids.to_lists() == [[1, 2], [3]]
        assert array.tolist() == [[0, 0], [1, 1]] and number.tolist() == [1.5, 2.5]
    matrix = scipy.sparse.csr_matrix(np.eye(3))
    batch = next(iter(sj.data.DataLoader([{"x": matrix[i]} for i in (2, 0)], 2)))
    assert batch["x"].values["index"].tolist() == [2, 0]
    lists = sj.data.ArrayDataset([np.array([1, 2]), np.array([3])])
    assert next(iter(sj.data.DataLoader(lists, 2))).to_lists() == [[1, 2], [3]]


def test_batches_on_a_device():
    device = jax.devices()[1]
    ids, number = next(iter(_numbered(4, batch_size=2, device=device)))
    assert ids.values.devices() == number.devices() == {device}


def test_wide_types_follow_x64(x64):
    dataset = sj.data.ArrayDataset(np.array([2**40, 1]), np.array([0.1, 0.2]))
    big, wide = next(iter(sj.data.DataLoader(dataset, 2)))
    assert big.dtype == np.int64 and big[0] == 2**40 and wide.dtype == np.float64


# ------------------------------------------------------------------ padding


def test_padding_is_marked_or_left_out_or_at_least_logged(caplog):
    _numbered(10, batch_size=4)
    assert "2 row(s) of padding" in caplog.text and "mask=True to mark" in caplog.text
    caplog.clear()
    dropped = list(_numbered(10, batch_size=4, drop_remainder=True))
    assert [number.tolist() for _, number in dropped] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    *_, (ids, number, mask) = _numbered(10, batch_size=4, mask=True)
    assert mask.tolist() == [True, True, False, False]
    assert number.tolist() == [8, 9, 0, 0] and ids.lengths.tolist() == [3, 4, 0, 0]
    *_, last = _numbered(10, batch_size=4, drop_remainder=False)
    assert len(last) == 2 and last[1].tolist() == [8, 9, 0, 0]
    assert not caplog.text


# ------------------------------------------------------------------ capacity


def test_auto_holds_for_every_order():
    rng = np.random.default_rng(0)
    long = np.where(rng.random(4000) < 0.03, 90, rng.integers(0, 9, 4000))
    for size, is_less in ((long, True), (np.zeros(400, int), False)):
        dataset = sj.data.ArrayDataset([[1] * int(k) for k in size])
        loader = sj.data.DataLoader(dataset, 40, shuffle=True)
        drawn = [rng.choice(size, 40, replace=False).sum() for _ in range(1000)]
        total = np.sort(size)[-40:].sum()
        assert max(drawn) <= loader.capacity <= total
        assert (loader.capacity < total) == is_less
    ordered = sj.data.DataLoader(sj.data.ArrayDataset([[1] * k for k in range(9)]), 4)
    assert ordered.capacity == 4 + 5 + 6 + 7 and "largest batch" in repr(ordered)


@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=12),
    batch_size=st.integers(1, 5),
    risk=st.sampled_from([0.3, 0.05, 1e-3]),
)
def test_the_tail_bound_holds_exactly(lengths, batch_size, risk):
    """Compared with sums with replacement, whose tail is larger."""
    lengths = np.array(lengths)
    share = np.bincount(lengths) / len(lengths)
    total = np.ones(1)
    for _ in range(batch_size):
        total = np.convolve(total, share)
    bound = _capacity.tail_bound(lengths, batch_size, risk)
    assert total[bound + 1 :].sum() <= risk + 1e-12


def test_too_small_a_capacity_is_named():
    with pytest.raises(ValueError, match="overflow"):
        _numbered(400, batch_size=50, capacity=3, shuffle=True)
    loader = _numbered(40, batch_size=4, capacity=14, shuffle=True)
    with pytest.raises(ValueError, match="Pass capacity=16"):
        for _ in range(200):  # an epoch with a batch of more than 14 comes, and is met
            first = iter(loader)  # with an error before its first batch
    assert loader.get_state()["batch"] == 0 and first.get_state()["epoch"] > 0


def test_a_large_batch_spills_into_a_second_capacity():
    step = count_traces(lambda ids: ids.values.sum())
    jitted = jax.jit(step)
    loader = _numbered(40, batch_size=4, capacity=8, shuffle=True, overflow="spill")
    assert loader.capacity == 8 and "else 16" in repr(loader)
    capacities = []
    for _ in range(5):
        for ids, _ in loader:
            jitted(ids)
            capacities.append(ids.capacity)
            assert (int(ids.lengths.sum()) > 8) == (ids.capacity == 16)
    assert set(capacities) == {8, 16} and step.count == 2
    auto = _numbered(400, batch_size=50, shuffle=True, overflow="spill")
    assert auto.capacity < _numbered(400, batch_size=50, shuffle=True).capacity
    assert "else 200" in repr(auto)
    assert "else" not in repr(_numbered(8, batch_size=4, overflow="spill"))


def test_capacities_of_several_columns():
    columns = {"a": [[1], [2, 3]], "b": [[4, 5, 6], []], "c": np.arange(2)}
    dataset = sj.data.ArrayDataset(columns)
    assert sj.data.DataLoader(dataset, 2).capacity == {"a": 3, "b": 3, "c": None}
    given = sj.data.DataLoader(dataset, 2, capacity={"a": 7, "b": "auto", "c": None})
    assert given.capacity == {"a": 7, "b": 3, "c": None}
    assert sj.data.DataLoader(dataset, 2, capacity=9).capacity["b"] == 9
    assert sj.data.DataLoader(sj.data.ArrayDataset(np.arange(2)), 2).capacity is None


# ------------------------------------------------------------------ order, shards


def test_each_epoch_has_its_order_and_a_seed_gives_it_again():
    def epochs(seed):
        loader = _numbered(30, batch_size=5, shuffle=True, seed=seed, mask=True)
        return [_seen(loader) for _ in range(3)]

    first = epochs(3)
    assert first == epochs(3)
    assert len({str(epoch) for epoch in [*first, *epochs(4)]}) == 6
    # Golden numbers: a saved state must mean the same rows in every release.
    assert first[0][:8] == [27, 9, 29, 2, 12, 25, 0, 28]
    assert first[1][:4] == [14, 12, 0, 9]


@pytest.mark.parametrize("n, count", [(25, 3), (3, 4)])
@pytest.mark.parametrize("shuffle", [False, True])
def test_shards_are_disjoint_and_cover(n, count, shuffle):
    loaders = [
        _numbered(n, batch_size=2, shuffle=shuffle, mask=True, shard=(i, count))
        for i in range(count)
    ]
    assert len({(len(loader), loader.capacity) for loader in loaders}) == 1
    for _ in range(2):
        parts = [_seen(loader) for loader in loaders]
        assert sorted(sum(parts, [])) == list(range(n))


# ------------------------------------------------------------------ the place


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_saved_place_resumes_exactly(num_workers):
    make = lambda workers=0: _numbered(
        22, batch_size=4, shuffle=True, seed=5, mask=True, num_workers=workers
    )
    whole = make()
    expected = [_seen(whole) for _ in range(3)]
    loader = make(num_workers)
    seen = _seen(loader)  # epoch 0
    batches = iter(loader)
    seen += _seen(next(batches) for _ in range(3))
    state = json.loads(json.dumps(loader.get_state()))
    assert state == batches.get_state() and state["epoch"] == 1 and state["batch"] == 3

    for other in (0, 1):  # with any number of workers
        again = make(other)
        again.set_state(state)
        rest = _seen(again)
        assert seen + rest == expected[0] + expected[1]
        assert _seen(again) == expected[2]
    iterator = iter(make())
    iterator.set_state(state)
    assert _seen(iterator) == rest
    # The state at the end of an epoch is the beginning of the next one.
    assert _seen(batches) == rest
    assert (loader.get_state()["epoch"], loader.get_state()["batch"]) == (2, 0)
    whole.set_state(batches.get_state())
    assert _seen(whole) == expected[2]


def test_batches_for_grain():
    loader = _numbered(20, batch_size=4, shuffle=True, seed=1)
    batches = loader.to_grain(epoch=1)
    iter(loader)
    expected = [number.tolist() for _, number in loader]
    assert [number.tolist() for _, number in batches] == expected
    copy = pickle.loads(pickle.dumps(batches))  # as its workers get it
    assert copy[2][1].tolist() == expected[2]


def test_without_grain(monkeypatch):
    monkeypatch.setitem(sys.modules, "grain", None)  # as if it were not there
    assert len(list(_numbered(4, batch_size=2))) == 2
    for call in (
        lambda: _numbered(4, batch_size=2, num_workers=1),
        lambda: _numbered(4, batch_size=2).to_grain(),
    ):
        with pytest.raises(ImportError, match="grain"):
            call()
