"""Arguments that data sets and the loader refuse."""

from typing import Any

import jax
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
        (lambda: sj.data.ArrayDataset(), ValueError, "at least one column"),
        (
            lambda: sj.data.ArrayDataset([1, 2], [1]),
            ValueError,
            r"got 1 for column 1 and 2 for column 0",
        ),
        (
            lambda: sj.data.ArrayDataset({}, [1]),
            TypeError,
            "a dict of columns must be the only",
        ),
        (lambda: sj.data.ArrayDataset(np.array(["a"])), TypeError, "dtype <U1"),
        (lambda: sj.data.ArrayDataset(np.float32(1)), ValueError, "a single number"),
        (lambda: sj.data.ArrayDataset(np.ma.zeros(2)), TypeError, "masked array"),
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
            lambda: sj.data.ArrayDataset([1, [2, 3]]),
            ValueError,
            "row 1 is of type list and row 0",
        ),
        (
            lambda: sj.data.ArrayDataset(jax.random.split(jax.random.key(0), 2)),
            TypeError,
            r"column 0 contains PRNG keys.*key_data",
        ),
        (
            lambda: sj.data.ArrayDataset([jax.random.key(0)]),
            TypeError,
            "contains PRNG keys",
        ),
        (
            lambda: sj.data.SimpleDataset(DICT),
            TypeError,
            r"SimpleDataset: .* got a dict.*ArrayDataset\(dict\)",
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
        (
            lambda: sj.data.SimpleDataset((scipy.sparse.eye(2).tocsr(), [1, 0])),
            TypeError,
            r"use ArrayDataset\(x, y\)",
        ),
        (lambda: sj.data.ArrayDataset(np.array([2**40])), ValueError, "jax_enable_x64"),
        (
            lambda: sj.data.ArrayDataset([1, 2])[2],
            IndexError,
            "row 2 is out of range for 2 rows",
        ),
        (lambda: sj.data.ArrayDataset([1, 2])[ANY], TypeError, "int or a slice"),
        (lambda: sj.data.SimpleDataset(ANY), TypeError, "must be a sequence"),
        (
            lambda: sj.data.DataLoader([(1, 2), (3,)], 2),
            ValueError,
            "item 1 of the data set is a tuple of 1",
        ),
    ],
)
def test_wrong_data_sets_are_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(
    "options, error, message",
    [
        (dict(batch_size=0), ValueError, "batch_size must be a positive int"),
        (dict(batch_size=2.0), TypeError, "batch_size must be a positive int"),
        (dict(shuffle=1), TypeError, "shuffle must be True or False"),
        (dict(seed=-1), ValueError, "seed must be a static, non-negative int"),
        (
            dict(num_workers=-1),
            ValueError,
            "num_workers must be a static, non-negative int",
        ),
        (dict(shard=(2, 2)), ValueError, "0 <= index < count"),
        (dict(shard=3), TypeError, "0 <= index < count"),
        (dict(overflow="drop"), ValueError, "one of 'error', 'spill' and 'raise'"),
        (dict(capacity="x"), ValueError, "capacity must be 'auto'"),
        (dict(capacity=-1), ValueError, "capacity must be a static, non-negative int"),
        (dict(capacity=(1, 2)), ValueError, "column 1 is an array"),
        (dict(capacity=((1, 2), None)), ValueError, r"1\s+level"),
        (
            dict(batch_size=30, drop_remainder=True),
            ValueError,
            "a batch of 30",
        ),
        (dict(mask=1, batch_size=3), TypeError, "mask must be True or False"),
        (dict(device="cpu"), TypeError, "device must be a jax.Device .*, a sharding"),
    ],
)
def test_wrong_options_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        sj.data.DataLoader(DATASET, **{"batch_size": 4, **options})


def test_wrong_data_is_refused():
    with pytest.raises(TypeError, match="dataset must be an ArrayDataset"):
        sj.data.DataLoader(iter([1]), 2)
    with pytest.raises(ValueError, match="no rows"):
        sj.data.DataLoader([], 2)
