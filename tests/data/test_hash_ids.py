"""HashIds: the same ids in every process, written out once more in Python."""

import numpy as np
import pytest

import sparsejax as sj
from helpers import run_python
from sparsejax.data import _hash_ids


def hash_of(word, column, size, seed=0):
    """The id of a word, written out once more with Python's integers."""
    mask = (1 << 64) - 1

    def mix(x):
        x = (x ^ x >> 33) * 0xFF51AFD7ED558CCD & mask
        x = (x ^ x >> 33) * 0xC4CEB9FE1A85EC53 & mask
        return x ^ x >> 33

    state = 0xCBF29CE484222325 ^ mix((mix(seed + 1) + column) & mask)
    for byte in word:
        state = (state ^ byte) * 0x100000001B3 & mask
    return 1 + mix(state) % (size - 1) if word else 0


@pytest.mark.slow
def test_a_hash_is_the_same_in_every_process():
    words = [f"{i:08x}".encode() for i in range(2000)]
    encoder = sj.data.HashIds([50, 1000], seed=3)
    for column, size in enumerate(encoder.sizes()):
        ids = encoder.encode(column, words)
        assert ids.tolist() == [hash_of(w, column, size, 3) for w in words]
        counts = np.bincount(ids, minlength=size)
        assert counts[0] == 0 and len(counts) == size
        # As even as a random assignment would be: chi squared, mean size - 2.
        expected = len(words) / (size - 1)
        chi = ((counts[1:] - expected) ** 2 / expected).sum()
        assert abs(chi - (size - 2)) < 5 * np.sqrt(2 * size)
    code = "import sparsejax as sj; print(sj.data.HashIds(1000).encode(1, ['abc'])[0])"
    assert int(run_python("-c", code)) == hash_of(b"abc", 1, 1000)


def test_words_of_any_length(monkeypatch):
    words = ["", "a", "long" * 250, "\u00e9", "b" * 9, None]
    want = [hash_of((w or "").encode(), 0, 1000) for w in words]
    for cells in (1, 4000, 1 << 20):
        monkeypatch.setattr(_hash_ids, "_MAX_CELLS", cells)
        assert sj.data.HashIds(1000).encode(0, words).tolist() == want
    assert sj.data.HashIds(9).encode(0, []).shape == (0,)


def test_a_column_is_a_name_or_a_position_as_in_a_vocabulary():
    data = {"item": ["tea", "jam", None], "user": [7, 8, 7], "other": [1, 2, 3]}
    sizes = [50, 1000]
    named = sj.data.HashIds(sizes, names=["item", "user"])
    bare = sj.data.HashIds(sizes)
    ids = named.ids({name: data[name] for name in reversed(data)})  # in any order
    assert ids.keys() == {"item", "user"}
    for place, name in enumerate(["item", "user"]):
        expected = bare.encode(place, data[name]).tolist()
        assert named.encode(name, data[name]).tolist() == expected
        assert named.encode(place, data[name]).tolist() == expected
        assert ids[name].tolist() == expected
    assert named.sizes() == bare.sizes() == sizes
    assert sj.data.HashIds(9, names=["a", "b"]).sizes() == [9, 9]
    assert named == sj.data.HashIds(sizes=tuple(sizes), names=("item", "user"))
    assert hash(named) != hash(bare)
    with pytest.raises(ValueError, match="the columns have no names"):
        bare.ids(data)


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        (dict(sizes=1), ValueError, "from 2 to 2147483647, got 1"),
        (dict(sizes=[9, 2**31]), ValueError, "from 2 to 2147483647"),
        (dict(sizes=9.5), TypeError, "integer"),
        (dict(sizes=9, names="ad"), TypeError, "a list of names, got 'ad'"),
        (dict(sizes=9, names=["ad", "ad"]), ValueError, "different names"),
        (dict(sizes=[9, 9], names=["ad"]), ValueError, "must be 2 different names"),
    ],
)
def test_refusals(arguments, error, message):
    with pytest.raises(error, match=message):
        sj.data.HashIds(**arguments)


def test_columns_that_are_not_there():
    with pytest.raises(ValueError, match="no column 'user'"):
        sj.data.HashIds(9, names=["ad"]).encode("user", [1])
    with pytest.raises(IndexError, match="column 2 is out of range"):
        sj.data.HashIds([9, 9]).encode(2, ["red"])
