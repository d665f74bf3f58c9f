"""HashIds: the same ids in every process, written out once more in Python."""

import numpy as np

import sparsejax as sj


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


def test_ids_are_those_of_the_definition():
    encoder = sj.data.HashIds([50, 1000], seed=3)
    words = [f"{i:08x}" for i in range(2000)] + ["", "long" * 250, "\u00e9", None]
    for column, size in enumerate(encoder.sizes()):
        ids = encoder.encode(column, words)
        expected = [hash_of((w or "").encode(), column, size, 3) for w in words]
        assert ids.tolist() == expected
        counts = np.bincount(ids[:2000], minlength=size)
        assert counts[0] == 0 and len(counts) == size
        # As even as a random assignment would be: chi squared, mean size - 2.
        mean = 2000 / (size - 1)
        chi = ((counts[1:] - mean) ** 2 / mean).sum()
        assert abs(chi - (size - 2)) < 5 * np.sqrt(2 * size)
    assert sj.data.HashIds(9).encode(0, []).shape == (0,)


def test_a_column_is_a_name_or_a_position_as_in_a_vocabulary():
    data = {"item": ["tea", "jam", None], "user": [7, 8, 7], "other": [1, 2, 3]}
    sizes = [50, 1000]
    named = sj.data.HashIds(sizes, names=["item", "user"])
    bare = sj.data.HashIds(sizes)
    ids = named.ids({name: data[name] for name in reversed(data)})  # in any order
    assert ids.keys() == {"item", "user"}
    for place, name in enumerate(ids):
        expected = bare.encode(place, data[name]).tolist()
        assert named.encode(name, data[name]).tolist() == expected
        assert named.encode(place, data[name]).tolist() == expected
        assert ids[name].tolist() == expected
    assert named.sizes() == bare.sizes() == sizes
    assert sj.data.HashIds(9, names=["a", "b"]).sizes() == [9, 9]
    assert named == sj.data.HashIds(sizes=tuple(sizes), names=("item", "user"))
    assert hash(named) != hash(bare)
