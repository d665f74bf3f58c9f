"""The row of each key of a store's table, while keys come and go.

The policy is the policy of `sparsejax.HashIndex`, with a hash table that grows: any
number of keys of 64 bits may pass through. The key of a row, its last step and its
number of uses are arrays like the table's weights, and so are the sightings of keys
that wait for admission. The mapped file of the table and `KVStore.save` contain these
arrays; the hash tables are made from them when a table is opened.

A row whose count is 0 has no key. To reuse a row, its count is set to 0,
then its weights and state are cleared, then the new key and step are written, and the
count last. So no key has the weights of another key, whenever the process is killed.

`TableKeys` does not know its table: it calls a function that clears rows.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from sparsejax import _arguments
from sparsejax._hashing import hash_words, mix
from sparsejax._index.policy import KeyPolicy, eviction_orders, window_length
from sparsejax.store._requested import sorted_unique


_MIN_SIGHTINGS, _MAX_SIGHTINGS = 1 << 10, 1 << 22  # keys in each of two generations

_COLUMNS = 3  # arrays that have an entry for each row
_HAND, _YOUNG = 0, 1  # places in the cursor
_FREE, _REMOVED = 0, -1  # in a hash table, instead of a row number plus 1
_MIN_SLOTS = 1 << 10


class TableKeys:
    """The keys of a table.

    Args:
      policy: of the table.
      arrays: with the shapes and dtypes of `specs_of_keys`.
    """

    def __init__(self, policy: KeyPolicy, arrays: list[np.ndarray]):
        self.policy, self.columns = policy, arrays[:_COLUMNS]
        self.keys, self.last_step, self.counts = self.columns
        self._seen, self._seen_counts, self._cursor = arrays[_COLUMNS:]
        self.height = self.keys.shape[0]
        self.evicted = self.refused = self.waiting = 0
        self.latest_step: int | None = None
        # The hash tables are made from the arrays, which may come from a file.
        rows = np.flatnonzero(self.counts)
        self._map = KeyMap(self.keys)
        self._map.add(self.keys[rows], rows)
        # Rows below the first row that was never used may be free, after a kill.
        self._end = int(rows[-1]) + 1 if rows.size else 0
        self._holes = np.flatnonzero(self.counts[: self._end] == 0)
        self._sightings = _Sightings(self._seen, self._seen_counts, self._cursor)

    def __len__(self) -> int:
        return len(self._map)

    def rows(self) -> np.ndarray:
        """Returns the rows that have a key, ascending."""
        return np.flatnonzero(self.counts[: self._end])

    def sightings(self) -> tuple[dict[str, int], list[np.ndarray]]:
        """Returns sizes and hand; and keys and counts, the younger generation first."""
        young, old = self._sightings.contents()
        sizes = {"young": young[0].size, "old": old[0].size, "hand": self._hand()}
        return sizes, [np.concatenate(pair) for pair in zip(young, old)]

    def restore_sightings(
        self, sizes: Mapping[str, int], arrays: Sequence[np.ndarray]
    ) -> None:
        """Sets the result of `sightings`."""
        self._sightings.forget()
        self._cursor[:] = 0
        limit = self._seen.shape[1]
        for into, array in zip((self._seen, self._seen_counts), arrays):
            for k, part in enumerate(np.split(array, [sizes["young"]])):
                into[k, : part.size] = part[:limit]
        self._cursor[_HAND] = sizes["hand"] % max(self.height, 1)
        self._sightings = _Sightings(self._seen, self._seen_counts, self._cursor)

    def can_replace(self, rows: np.ndarray, columns: Sequence[np.ndarray]) -> bool:
        """Returns True if each key has one row after `replace`."""
        keys, _, counts = columns
        new = keys[counts > 0]
        has_row = self._map.find(new)
        is_once = np.unique(new).size == new.size and (counts >= 0).all()
        return bool(is_once and np.isin(has_row[has_row >= 0], rows).all())

    def replace(self, rows: np.ndarray, columns: Sequence[np.ndarray]) -> np.ndarray:
        """Sets the columns of distinct rows; returns the keys that lost their row."""
        old = self.keys[rows[self.counts[rows] > 0]]
        self._map.remove(old)
        for column, new in zip(self.columns, columns):
            column[rows] = new
        used = rows[self.counts[rows] > 0]
        self._map.add(self.keys[used], used)
        self._end = max(self._end, int(used.max(initial=-1)) + 1)
        self._holes = np.flatnonzero(self.counts[: self._end] == 0)
        return old[self._map.find(old) < 0]

    def find(self, keys: np.ndarray) -> np.ndarray:
        """Returns the row of each key, or the height of the table."""
        rows = self._map.find(keys.reshape(-1))
        rows = np.where(rows < 0, self.height, rows).reshape(keys.shape)
        return rows.astype(_arguments.index_dtype(self.height))

    def insert(
        self,
        keys: np.ndarray,
        step: int,
        where: np.ndarray | None,
        held_steps: int,
        check: Callable[[np.ndarray], None],
        clear: Callable[[np.ndarray], None],
    ) -> tuple[np.ndarray, np.ndarray]:
        """Gives rows to new keys, and marks all keys as used.

        Args:
          keys: int64, of any shape.
          step: int.
          where: a mask of the keys that count, or None for all of them.
          held_steps: keys that were used in this many steps before `step`, or since,
            are not evicted.
          check: is called with the rows whose keys are to be evicted, and may raise;
            only the sightings of keys that wait for admission are counted then.
          clear: makes rows fresh.

        Returns:
          The rows that have a key of `keys`, and the rows whose keys were evicted,
          ascending.
        """
        wanted = keys.reshape(-1) if where is None else keys[where]
        distinct = sorted_unique(wanted.view(np.uint64)).view(np.int64)
        rows = self._map.find(distinct)
        known, new = rows[rows >= 0], distinct[rows < 0]
        waiting = self._sightings.waiting(new, self.policy.admit_after)
        admitted = new[~waiting]
        free = self._free(admitted.size)
        limit = self.policy.max_evictions
        limit = wanted.size if limit is None else limit
        needed = min(admitted.size - free.size, limit)
        evicted = self._victims(needed, step - held_steps, known)
        check(evicted)
        clear(free)
        self._map.remove(self.keys[evicted])
        self.counts[evicted] = 0
        clear(evicted)
        self.last_step[known] = step
        self.counts[known] += 1
        given = np.concatenate([free, evicted])
        added = admitted[: given.size]
        self.keys[given] = added
        self.last_step[given] = step
        self.counts[given] = 1  # last: a row with a count is whole, even after a kill
        self._map.add(added, given)
        holes = min(free.size, self._holes.size)
        self._holes, self._end = self._holes[holes:], self._end + free.size - holes
        if evicted.size:
            window = self._window(needed)
            self._cursor[_HAND] = (self._hand() + window) % self.height
        self.evicted += int(evicted.size)
        self.refused += int(admitted.size - given.size)
        self.waiting += int(np.count_nonzero(waiting))
        return np.concatenate([known, given]), evicted

    def _free(self, count: int) -> np.ndarray:
        """Returns at most `count` rows that have no key, ascending."""
        holes = self._holes[:count]
        end = min(self._end + count - holes.size, self.height)
        return np.concatenate([holes, np.arange(self._end, end)])

    def _hand(self) -> int:
        """Returns the row at which the next window begins."""
        return int(self._cursor[_HAND]) % max(self.height, 1)

    def _window(self, count: int) -> int:
        return window_length(self.policy.window, count, self.height)

    def _victims(self, count: int, step: int, known: np.ndarray) -> np.ndarray:
        """Returns `count` rows or less of keys last used before `step`, ascending.

        The rows `known` belong to keys of this call.
        """
        if count <= 0:
            return np.zeros((0,), np.int64)
        rows = (self._hand() + np.arange(self._window(count))) % self.height
        rows = np.sort(rows)
        rows = rows[(self.counts[rows] > 0) & (self.last_step[rows] < step)]
        rows = np.setdiff1d(rows, known, assume_unique=True)
        uses = self.last_step[rows], self.counts[rows]
        order = np.lexsort(eviction_orders(self.policy.policy, *uses)[::-1])
        return np.sort(rows[order[:count]])


class _Sightings:
    """Counts of sightings of keys without a row, in two generations.

    If the younger generation is full, the older one is forgotten and becomes the
    younger one.

    Args:
      keys, counts: int64 `[2, limit]`, of each generation; a key that was counted comes
        before all slots whose count is 0.
      cursor: int64 `[2]`; at `_YOUNG` the number of the younger generation.
    """

    def __init__(self, keys: np.ndarray, counts: np.ndarray, cursor: np.ndarray):
        self._limit, self._cursor = keys.shape[1], cursor
        self._generations = [_Generation(*pair) for pair in zip(keys, counts)]

    def waiting(self, keys: np.ndarray, admit_after: int) -> np.ndarray:
        """Counts a sighting of distinct `keys`; returns a mask of the keys that wait.

        A key that was admitted stays counted, so that it is admitted at once if it is
        evicted and comes back soon.
        """
        if admit_after == 1:
            return np.zeros(keys.shape, bool)
        parts = np.split(keys, range(self._limit, keys.size, self._limit))
        return np.concatenate([self._count(part) for part in parts]) < admit_after

    def _count(self, keys: np.ndarray) -> np.ndarray:
        """Adds 1 to the counts of at most `limit` distinct keys; returns the counts."""
        young, old = self._by_age()
        if young.size + keys.size > self._limit:
            young, old = old, young
            young.forget()
            self._cursor[_YOUNG] ^= 1
        return young.count(keys) + old.counted(keys)

    def _by_age(self) -> list[_Generation]:
        """Returns the younger generation, and the older one."""
        is_second = self._cursor[_YOUNG] & 1
        return self._generations[::-1] if is_second else self._generations

    def forget(self) -> None:
        for generation in self._generations:
            generation.forget()

    def contents(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Returns each generation's keys and counts, the younger one first."""
        return [generation.contents() for generation in self._by_age()]


class _Generation:
    """Counts of keys.

    Args:
      keys, counts: int64 `[limit]`, see `_Sightings`.
    """

    def __init__(self, keys: np.ndarray, counts: np.ndarray):
        self._keys, self._counts = keys, counts
        used = np.flatnonzero(counts)
        self.size = int(used[-1]) + 1 if used.size else 0
        self._map = KeyMap(keys)
        self._map.add(keys[: self.size], np.arange(self.size))

    def count(self, keys: np.ndarray) -> np.ndarray:
        """Adds 1 to the counts of distinct `keys`; returns the counts."""
        new = keys[self._map.find(keys) < 0]
        rows = self.size + np.arange(new.size)
        self._keys[rows] = new
        self._map.add(new, rows)
        self.size += new.size
        rows = self._map.find(keys)
        self._counts[rows] += 1
        return self._counts[rows]

    def counted(self, keys: np.ndarray) -> np.ndarray:
        rows = self._map.find(keys)
        return np.where(rows < 0, 0, self._counts[np.maximum(rows, 0)])

    def forget(self) -> None:
        self._counts[: self.size] = 0
        self.size, self._map = 0, KeyMap(self._keys)

    def contents(self) -> tuple[np.ndarray, np.ndarray]:
        return self._keys[: self.size], self._counts[: self.size]


class KeyMap:
    """A hash table from keys of 64 bits to rows, for whole batches at once.

    Open addressing with linear probing: a slot holds a row number, and the key is read
    from the array that has the key of each row. A batch is searched in a few passes,
    each of which looks at one slot of each key that is not found yet. At most half of
    the slots are in use; if more are needed, the table grows. The hash is salted at
    random, so that keys cannot be chosen to collide. No result depends on the salt.

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


def specs_of_keys(height: int) -> list[jax.ShapeDtypeStruct]:
    """Returns shapes and dtypes of the arrays of the keys of a table.

    - The key of each row, its last step, and the number of calls of `insert` that had
      it, which is 0 for a row without a key.
    - The sightings, in two generations: keys and counts.
    - The cursor: the row at which victims are searched next, and the number of the
      younger generation.
    """
    limit = int(np.clip(height, _MIN_SIGHTINGS, _MAX_SIGHTINGS))
    shapes = [(height,)] * _COLUMNS + [(2, limit)] * 2 + [(2,)]
    return [jax.ShapeDtypeStruct(shape, np.int64) for shape in shapes]


# ------------------------------------------------------------------ arguments


def as_keys(keys: Any) -> np.ndarray:
    """Converts integers, or strings by their hashes, to int64 of the same shape."""
    if isinstance(keys, jax.Array) and keys.dtype.itemsize < 8:
        raise TypeError(
            f"keys must be NumPy integers or strings, got a JAX array of {keys.dtype}, "
            "to which JAX truncates keys of 64 bits. Pass the keys before they are put "
            "on the device, or np.asarray(keys) if they never had more bits."
        )
    given = keys if isinstance(keys, jax.Array) else _as_array(keys)
    if given.dtype.kind in "USOT":
        return _hash_strings(np.asarray(given))
    if not given.size:
        return np.zeros(given.shape, np.int64)
    given = np.asarray(_arguments.as_integers(given, "keys"))
    return given.astype(np.int64)  # uint64 by its bits


def _hash_strings(strings: np.ndarray) -> np.ndarray:
    """Hashes of strings and bytes, int64 of their shape; text is hashed as UTF-8."""
    values = strings.reshape(-1).tolist()
    words = {
        value: value
        if isinstance(value, bytes)
        else value.encode("utf-8", "surrogateescape")
        for value in values
    }
    lengths = np.array([len(word) for word in words.values()], np.int64)
    width = int(lengths.max(initial=1))
    text = np.array(list(words.values()), f"S{width}").view(np.uint8)
    text = text.reshape(len(words), width)
    place = {value: k for k, value in enumerate(words)}
    rows = np.fromiter(map(place.__getitem__, values), np.int64, len(values))
    hashes = hash_words(text, lengths, salt=0)[rows]
    return hashes.view(np.int64).reshape(strings.shape)


def _as_array(keys: Any) -> np.ndarray:
    """Converts keys to a NumPy array in which 3 and "3" stay different."""
    array = np.asarray(keys)
    if isinstance(keys, (list, tuple)) and array.dtype.kind in "US":
        array = np.array(keys, dtype=object)  # in which NumPy does not make "3" of 3
    if array.dtype != object:
        return array
    values = array.reshape(-1).tolist()
    are_strings = {isinstance(value, (str, bytes)) for value in values}
    if len(are_strings) > 1:
        other = next(x for x in values if not isinstance(x, (str, bytes)))
        raise TypeError(
            f"keys must be all integers or all strings, got {_arguments.show(other)} "
            "among strings. 3 and '3' are different keys: convert them to one kind. "
            "For a string that is missing, write ''."
        )
    return array if True in are_strings else np.array(values).reshape(array.shape)


def as_where(where: Any, shape: tuple[int, ...]) -> np.ndarray | None:
    """Checks the argument `where`: booleans of the shape of the keys."""
    if where is None:
        return None
    mask = np.asarray(where)
    if mask.dtype != np.bool_ or mask.shape != shape:
        raise TypeError(
            f"where must be booleans of the shape of keys, {shape}, False for padding, "
            f"got {_arguments.kind_of(where)}."
        )
    return mask
