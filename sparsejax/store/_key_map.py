"""A hash table from 64-bit keys to row numbers, on the host, for whole batches at once.

Open addressing with linear probing: a slot holds a row number, and the key is read from
the array that has the key of each row. A batch is searched in a few passes, each of
which looks at one slot of each key that is not found yet. At most half of the slots are
in use; if more are needed, the table grows.

The hash is salted at random, so that keys cannot be chosen to collide. No result
depends on the salt.
"""

import secrets

import numpy as np

from sparsejax import _arguments
from sparsejax._hashing import mix


_FREE, _REMOVED = 0, -1  # instead of a row number plus 1
_MIN_SLOTS = 1 << 10


class KeyMap:
    """Row numbers of distinct keys.

    Args:
      keys: int64, the array with the key of each row. The caller writes a key before
        `add`, and after `remove`.
    """

    def __init__(self, keys: np.ndarray):
        self._keys = keys
        self._salt = np.uint64(secrets.randbits(64))
        self._used = self._removed = 0
        self._slots = np.zeros((_MIN_SLOTS,), np.int64)

    def __len__(self) -> int:
        return self._used

    def find(self, keys: np.ndarray) -> np.ndarray:
        """Returns the row of each key, int64 `[n]`, or -1."""
        return self._slots[self._locate(keys)] - 1

    def add(self, keys: np.ndarray, rows: np.ndarray) -> None:
        """Adds distinct keys that are not in the table."""
        if 2 * (self._used + self._removed + keys.size) > self._slots.size:
            self._rebuild(self._used + keys.size)
        self._used += keys.size
        place = self._first(keys)
        rows = rows.astype(np.int64) + 1
        while rows.size:
            entries = self._slots[place]
            free = entries <= _FREE
            # If several keys hash to one slot, the last write wins.
            self._slots[place[free]] = rows[free]
            settled = self._slots[place] == rows
            self._removed -= int(np.count_nonzero(settled & (entries == _REMOVED)))
            place = self._next(place[~settled])
            rows = rows[~settled]

    def remove(self, keys: np.ndarray) -> None:
        """Removes distinct keys that are in the table."""
        self._slots[self._locate(keys)] = _REMOVED
        self._used -= keys.size
        self._removed += keys.size

    def _locate(self, keys: np.ndarray) -> np.ndarray:
        """Returns the slot of each key; a free slot for a key not in the table."""
        out = np.zeros(keys.shape, np.int64)
        place, left = self._first(keys), np.arange(keys.size)
        while left.size:
            entries = self._slots[place]
            at = np.maximum(entries - 1, 0)
            is_key = (entries > _FREE) & (self._keys[at] == keys)
            settled = is_key | (entries == _FREE)
            out[left[settled]] = place[settled]
            place = self._next(place[~settled])
            left, keys = left[~settled], keys[~settled]
        return out

    def _first(self, keys: np.ndarray) -> np.ndarray:
        mixed = mix(keys.view(np.uint64) ^ self._salt)
        return (mixed & np.uint64(self._slots.size - 1)).astype(np.int64)

    def _next(self, place: np.ndarray) -> np.ndarray:
        return (place + 1) & (self._slots.size - 1)

    def _rebuild(self, count: int) -> None:
        """Makes a new table for `count` keys, which is at most half full."""
        rows = self._slots[self._slots > _FREE] - 1
        size = max(_MIN_SLOTS, _arguments.next_power_of_two(4 * count))
        self._slots = np.zeros((size,), np.int64)
        self._used = self._removed = 0
        self.add(self._keys[rows], rows)
