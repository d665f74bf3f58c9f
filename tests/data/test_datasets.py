"""Arguments that data sets and the loader refuse."""

from typing import Any

import numpy as np
import pytest
import scipy.sparse

import sparsejax as sj


ANY: Any = 1.5  # not a key, not a sequence
DICT: Any = {"a": [1]}
ROWS = [[i] * (i % 5) for i in range(20)]
DATASET = sj.data.ArrayDataset(ROWS, np.arange(20, dtype=np.int32))


@pytest.mark.parametrize(
    "make, error, message",
    [
        (
            lambda: sj.data.ArrayDataset([1, 2], [1]),
            ValueError,
            r"got 1 for column 1 and 2 for column 0",
        ),
        (lambda: sj.data.ArrayDataset(object()), TypeError, "got an object"),
        (
            lambda: sj.data.ArrayDataset(scipy.sparse.csc_matrix((2, 2))),
            TypeError,
            r"got csc.*\.tocsr",
        ),
        (
            lambda: sj.data.ArrayDataset([[1], [[2]]]),
            (TypeError, ValueError),
            "do not form a column",
        ),
        (
            lambda: sj.data.DataLoader({"a": [1]}, 1),
            TypeError,
            r"DataLoader: .* got a dict.*ArrayDataset\(dict\)",
        ),
        (
            lambda: sj.data.DataLoader((np.ones(2), np.ones(2)), 2),
            TypeError,
            r"use ArrayDataset\(x, y\)",
        ),
        (lambda: sj.data.ArrayDataset([1, 2])[ANY], TypeError, "int or a slice"),
        (lambda: sj.data.SimpleDataset(ANY), TypeError, "must be a sequence"),
    ],
)
def test_wrong_data_sets_are_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(
    "options, error, message",
    [
        (dict(batch_size=2.0), TypeError, "batch_size must be a positive int"),
        (
            dict(num_workers=-1),
            ValueError,
            "num_workers must be a static, non-negative int",
        ),
        (dict(shard=3), TypeError, "0 <= index < count"),
        (dict(capacity="x"), ValueError, "capacity must be 'auto'"),
        (dict(capacity=-1), ValueError, "capacity must be a static, non-negative int"),
        (dict(capacity=((1, 2), None)), ValueError, r"1\s+level"),
        (dict(mask=1, batch_size=3), TypeError, "mask must be True or False"),
    ],
)
def test_wrong_options_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        sj.data.DataLoader(DATASET, **{"batch_size": 4, **options})


def test_wrong_data_is_refused():
    with pytest.raises(TypeError, match="dataset must be an ArrayDataset"):
        sj.data.DataLoader(iter([1]), 2)
