"""Arguments that data sets and the loader refuse."""

from typing import Any

import jax
import numpy as np
import pytest
import scipy.sparse

import sparsejax as sj


ANY: Any = 1.5  # not a key, not a sequence
ROWS = [[i] * (i % 5) for i in range(20)]
DATASET = sj.data.ArrayDataset(ROWS, np.arange(20, dtype=np.int32))


Dataset, Loader = sj.data.ArrayDataset, sj.data.DataLoader


@pytest.mark.parametrize(
    "make, error, message",
    [
        (lambda: Dataset(), ValueError, "at least one column"),
        (lambda: Dataset({}), ValueError, "at least one column"),
        (lambda: Dataset({"a": [1]}, [1]), TypeError, "must be the only argument"),
        (
            lambda: Dataset([1, 2], [1]),
            ValueError,
            "got 1 for column 1 and 2 for colum",
        ),
        (lambda: Dataset(object()), TypeError, "got an object"),
        (lambda: Dataset(["red", "blue"]), TypeError, "Convert words to ids"),
        (lambda: Dataset(np.float32(3)), TypeError, "one row per example"),
        (lambda: Dataset(np.ma.zeros(2)), TypeError, "fill masks"),
        (lambda: Dataset(jax.random.split(jax.random.key(0))), TypeError, "key_data"),
        (lambda: Dataset(np.array([2**40])), ValueError, "must fit in int32"),
        (lambda: Dataset(scipy.sparse.csc_matrix((2, 2))), TypeError, r"csc.*\.tocsr"),
        (lambda: Dataset([[1], [[2]]]), TypeError, "do not form a column"),
        (lambda: Dataset([1, [2, 3]]), TypeError, "do not form a column"),
        (lambda: Loader({"a": [1]}, 1), TypeError, r"got a dict. Pass ArrayDataset"),
        (
            lambda: Loader(scipy.sparse.eye(3).tocsr(), 1),
            TypeError,
            "Pass ArrayDataset",
        ),
        (
            lambda: Loader((np.ones(2), np.ones(2)), 2),
            TypeError,
            r"ArrayDataset\(x, y\)",
        ),
        (lambda: Loader(iter([1]), 2), TypeError, "must be a sequence"),
        (lambda: Loader([(1, 2), (3,)], 2), ValueError, r"got \(1, 2\) as item 0 and"),
        (lambda: Loader([{"a": 1}, {"b": 2}], 2), ValueError, "the same keys"),
        (lambda: Loader([], 2), ValueError, "has no rows"),
        (lambda: Dataset([1, 2])[ANY], TypeError, "integer"),
        (lambda: Dataset([1, 2])[2], IndexError, "row 2 is out of range"),
        (lambda: sj.data.SimpleDataset(ANY), TypeError, "must be a sequence"),
    ],
)
def test_wrong_data_sets_are_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(
    "options, error, message",
    [
        (dict(batch_size=2.0), TypeError, "integer"),
        (dict(batch_size=0), ValueError, "batch_size must be positive"),
        (dict(num_workers=-1), ValueError, "num_workers not negative"),
        (dict(shard=3), TypeError, "int"),
        (dict(shard=(8, 8)), ValueError, "0 <= index < count"),
        (dict(overflow="drop"), ValueError, "'error' or 'spill', got 'drop'"),
        (dict(capacity="x"), ValueError, "capacity must be 'auto'"),
        (dict(capacity=-1), ValueError, "non-negative int"),
        (dict(capacity=(4,)), ValueError, "one of these for each"),
        (dict(capacity=(4, 4)), ValueError, "is an array, which has no capacity"),
        (dict(capacity=((1, 2), None)), ValueError, "an int for each level"),
        (dict(batch_size=30, drop_remainder=True), ValueError, "do not fill a batch"),
    ],
)
def test_wrong_options_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        Loader(DATASET, **{"batch_size": 4, **options})


def test_states_that_are_refused():
    loader = Loader(DATASET, 4)
    for state, message in (
        ({"epoch": 1}, "that get_state"),
        ({**loader.get_state(), "batch": 7}, "an epoch has 5 batches"),
        (Loader(DATASET, 5).get_state(), "saved by a loader with batch_size=5"),
    ):
        with pytest.raises(ValueError, match=message):
            loader.set_state(state)


def test_a_column_mask_is_not_overwritten():
    with pytest.raises(ValueError, match="already has a column of that name"):
        Loader(Dataset({"mask": [1, 0]}), 2, mask=True)
