"""HashIndex: the row of a table for each key, while keys come and go.

The keys are in a hash table of static shape: buckets of 8 slots, and at least twice as
many slots as rows. Two hashes of a key choose two buckets. The key goes into the bucket
with more empty slots.

Why buckets. `find` reads two buckets for every key, whatever happened before. So its
cost is bounded, it looks for all keys of a batch at once, and removing a key only
empties its slot. Open addressing along chains would need tombstones, or would have to
move the keys behind the removed one. With two choices and half of the slots empty, the
two buckets of a key are never both full by chance. Keys that were made to collide are
refused and counted.

Why the order inside a batch does not matter. Unknown keys are sorted, so that each
occurs once and has a rank. The rank decides which of two keys gets a contested slot,
which keys get the remaining rows, and the number of the row.

Why no cost is proportional to the capacity. Rows are given out in order until all are
used. After that, a row becomes free only when its key is evicted for a key that takes
the row at once, so there is no list of free rows. Victims come from a window of
consecutive rows that moves on at each eviction. The least recently (or frequently) used
rows of the window are found exactly, by bisection. They are exact for the whole index
if the window is as long as the index; otherwise each row is examined once per round.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparsejax import _arguments, _compat
from sparsejax._arguments import ArrayLike
from sparsejax._index.policy import KeyPolicy, eviction_orders, window_length
from sparsejax._rows import indexing
from sparsejax._rows.order_after import always_true


_LANES = 8  # slots per bucket: with 32-bit keys a bucket fills a cache line
_EMPTY = np.uint32(0xFFFFFFFF)  # the row stored in an empty slot
_CHUNK = 4096  # new keys inserted per turn of a loop
_DEPTH = 4  # cells per key in the sketch
_MAX_SIGHTINGS = 255  # the largest count of a cell, which is in its low 8 bits
_STATIC = {"static": True}  # the metadata of a field that is not an array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class HashIndex:
    """Rows of a table for keys that come and go, inside `jit`.

    `insert` gives each new key a row of an embedding table of `capacity` rows, and
    evicts keys when all rows are in use; `find` only looks up. It is a pytree of static
    shape, for `jit`, `scan`, donation and `shard_map`, and is saved like any tree.

    - A row belongs to one key until the key is evicted. A key without a row has the
      row number `capacity`, which `sparsejax.lookup` treats as out of range.
    - The result does not depend on the order of the keys in a batch. New keys, in
      ascending order as unsigned integers, get the rows that were never used, and then
      the rows of evicted keys.
    - Victims are the keys with the smallest last step ("lru"), or with the smallest
      count and then last step ("lfu"), among the next `window` rows; ties go to the
      first row. A key that was used at the current step is never evicted.

    Args:
      slots: uint32 `[S, words + 1]`, the hash table: the words of a key, then its row.
      slot_of_row: int32 `[capacity]`, the slot of each row's key.
      counts: int32 `[capacity]`, the number of calls of `insert` with the row's key.
      last_step: uint32 `[capacity]`, the step of the latest such call.
      sketch: uint32 `[4, W]`, sightings of keys that have no row; None if
        `admit_after` is 1.
      num_seen: uint32, the number of sightings that the sketch has counted.
      hand: int32, the first row of the next window.
      num_keys: int32, the number of rows in use, which are the first rows.
      num_evicted, num_refused, num_waiting: uint32, totals of keys: evicted, without a
        row left or with both buckets full, and not yet admitted.
      key_bits, policy, admit_after, max_evictions, window, seed: static, see `create`.

    Example:
      >>> import jax.numpy as jnp, sparsejax as sj
      >>> index = sj.HashIndex.create(3)
      >>> index, rows, evicted = index.insert(jnp.array([70, 50, 70]), step=0)
      >>> rows
      Array([1, 0, 1], dtype=int32)
      >>> index, rows, evicted = index.insert(jnp.array([70, 90, 10]), step=1)
      >>> rows, evicted  # 50 was evicted; 3 is out of range
      (Array([1, 0, 2], dtype=int32), Array([0, 3, 3], dtype=int32))
      >>> index.find(jnp.array([90, 50]))
      Array([0, 3], dtype=int32)

    References:
      Azar et al., 1999, "Balanced Allocations"; Einziger et al., 2017, "TinyLFU" (the
      sketch); TorchRec, managed collision (ZCH).
    """

    slots: jax.Array
    slot_of_row: jax.Array
    counts: jax.Array
    last_step: jax.Array
    sketch: jax.Array | None  # the generation << 8 | count, see _count_sightings
    num_seen: jax.Array
    hand: jax.Array
    num_keys: jax.Array
    num_evicted: jax.Array
    num_refused: jax.Array
    num_waiting: jax.Array
    key_bits: int = dataclasses.field(metadata=_STATIC)
    policy: str = dataclasses.field(metadata=_STATIC)
    admit_after: int = dataclasses.field(metadata=_STATIC)
    max_evictions: int | None = dataclasses.field(metadata=_STATIC)
    window: int | None = dataclasses.field(metadata=_STATIC)
    seed: int = dataclasses.field(metadata=_STATIC)

    # -------------------------------------------------------------- makers

    @classmethod
    def create(
        cls,
        capacity: int,
        *,
        key_bits: int = 32,
        policy: str = "lru",
        admit_after: int = 1,
        max_evictions: int | None = None,
        window: int | None = None,
        seed: int = 0,
    ) -> HashIndex:
        """Makes an empty index.

        Args:
          capacity: int, the number of rows of the table, at most 2^29.
          key_bits: 32, or 64 for keys of two words, see `split_keys`.
          policy: "lru" evicts the least recently used keys, "lfu" the least frequently
            used ones.
          admit_after: int from 1 to 255, the number of calls of `insert` that a key
            must occur in to get a row.
          max_evictions: int, the largest number of keys that one call of `insert`
            evicts; 0 for none. The default is the number of keys in the call.
          window: int, the number of rows that a call searches for victims. The default
            is 8 times `max_evictions`, and at least 4096. With `window=capacity`,
            victims are the least used keys of the index, and a call that evicts reads
            all of `last_step`.
          seed: int, of the hashes. Another seed puts keys into other buckets.

        Raises:
          TypeError, ValueError: an argument is not as described.

        Example:
          >>> import sparsejax as sj
          >>> sj.HashIndex.create(1_000_000, key_bits=64, admit_after=2)
          HashIndex(0 of 1000000 rows, 64-bit keys, lru, admit_after=2)
        """
        capacity = _arguments.static_int(
            "capacity", capacity, 1, " It is the number of rows of the table."
        )
        if capacity > 1 << 29:  # twice as many slots need 32 bits
            raise ValueError(f"capacity must be at most {1 << 29}, got {capacity}.")
        if key_bits not in (32, 64):
            raise ValueError(
                f"key_bits must be 32 or 64, got {_arguments.show(key_bits)}. Hash "
                "longer keys, such as strings, to 64 bits first."
            )
        rules = KeyPolicy(policy, admit_after, max_evictions, window)
        if rules.admit_after > _MAX_SIGHTINGS:
            raise ValueError(
                f"admit_after must be at most {_MAX_SIGHTINGS}, got {admit_after}."
            )
        seed = _arguments.static_int("seed", seed)

        num_buckets = _arguments.next_power_of_two(2 * capacity) // _LANES or 1
        empty = jnp.full((num_buckets * _LANES, 1), _EMPTY)
        keys = jnp.zeros((num_buckets * _LANES, key_bits // 32), jnp.uint32)
        totals = "seen", "evicted", "refused", "waiting"
        sketch = None
        if rules.admit_after > 1:
            width = _arguments.next_power_of_two(max(1024, capacity))
            sketch = jnp.zeros((_DEPTH, width), jnp.uint32)
        return cls(
            slots=jnp.concatenate([keys, empty], axis=1),
            slot_of_row=jnp.zeros((capacity,), jnp.int32),
            counts=jnp.zeros((capacity,), jnp.int32),
            last_step=jnp.zeros((capacity,), jnp.uint32),
            sketch=sketch,
            **{name: jnp.zeros((), jnp.int32) for name in ("hand", "num_keys")},
            **{f"num_{name}": jnp.zeros((), jnp.uint32) for name in totals},
            key_bits=int(key_bits),
            seed=seed,
            **dataclasses.asdict(rules),
        )

    @property
    def capacity(self) -> int:
        """The number of rows; also the row number of a key that has no row."""
        return self.slot_of_row.shape[0]

    def __repr__(self) -> str:
        is_one = _arguments.is_concrete(self.num_keys) and not np.ndim(self.num_keys)
        used = int(self.num_keys) if is_one else "?"
        rows = " x ".join(map(str, getattr(self.slot_of_row, "shape", "?")))
        more = [f"{self.key_bits}-bit keys", self.policy]
        for name, usual in (("admit_after", 1), ("max_evictions", None)):
            value = getattr(self, name)
            more += [f"{name}={value}"] * (value != usual)
        return f"HashIndex({used} of {rows} rows, {', '.join(more)})"

    # -------------------------------------------------------------- keys

    @staticmethod
    def split_keys(keys: ArrayLike) -> Any:
        """Splits 64-bit keys into two 32-bit words, for JAX without `jax_enable_x64`.

        Call it on the host, before a batch is passed to `jit`: JAX would truncate int64
        to int32.

        Args:
          keys: integers of any shape and dtype. Narrower keys are extended to 64 bits.

        Returns:
          uint32 `[*keys.shape, 2]`, the low word first; a NumPy array for NumPy keys.

        Raises:
          TypeError: `keys` are not integers.

        Example:
          >>> import numpy as np, sparsejax as sj
          >>> sj.HashIndex.split_keys(np.array([3, -1, 1 << 40]))
          array([[         3,          0],
                 [4294967295, 4294967295],
                 [         0,        256]], dtype=uint32)
        """
        ints = _as_integers(keys)
        if isinstance(ints, np.ndarray):
            wide = ints.astype(np.int64 if ints.dtype.kind == "i" else np.uint64)
            return np.stack(_words_of_wide(wide), axis=-1)
        if ints.dtype.itemsize == 8:
            return jnp.stack(_words_of_wide(ints), axis=-1)
        low = _word(ints)
        high = jnp.zeros_like(low)
        if jnp.issubdtype(ints.dtype, jnp.signedinteger):
            high = jnp.where(ints < 0, _EMPTY, high)
        return jnp.stack([low, high], axis=-1)

    @staticmethod
    def join_keys(words: ArrayLike) -> np.ndarray:
        """Joins the words made by `split_keys` into 64-bit keys, on the host.

        Args:
          words: uint32 `[..., 2]`.

        Returns:
          int64 `[...]`. A uint64 key of 2^63 or more comes back as a negative number.

        Raises:
          ValueError: `words` have another shape or dtype.

        Example:
          >>> import numpy as np, sparsejax as sj
          >>> sj.HashIndex.join_keys(sj.HashIndex.split_keys([-5, 1 << 40]))
          array([           -5, 1099511627776])
        """
        array = np.asarray(words)
        if array.dtype != np.uint32 or array.shape[-1:] != (2,):
            raise ValueError(
                f"words must be uint32 [..., 2], got {_arguments.kind_of(array)}."
            )
        high = array[..., 1].astype(np.uint64) << np.uint64(32)
        return (high | array[..., 0].astype(np.uint64)).view(np.int64)

    def owners(self, keys: ArrayLike, num_owners: int) -> jax.Array:
        """Assigns each key to one of several indexes, by a hash.

        For one index per device: device d inserts its own keys, with
        `where=index.owners(keys, num_devices) == d`.

        Args:
          keys: as for `find`.
          num_owners: int, at least 1.

        Returns:
          int32, of the shape of `keys`, in `[0, num_owners)`.

        Raises:
          TypeError, ValueError: as for `find`; or `num_owners` is not a positive int.

        Example:
          >>> import jax.numpy as jnp, sparsejax as sj
          >>> sj.HashIndex.create(8).owners(jnp.arange(6), 2)
          Array([1, 0, 0, 1, 1, 1], dtype=int32)
        """
        num_owners = _arguments.static_int("num_owners", num_owners, 1)
        words, shape = self._words(keys)
        mixed = _hash(words, self.seed, salt=4)
        owner = lax.rem(mixed, np.uint32(num_owners)).astype(jnp.int32)
        return owner.reshape(shape)

    # -------------------------------------------------------------- operations

    def find(self, keys: ArrayLike) -> jax.Array:
        """Returns the row of each key, `capacity` for a key without a row.

        Args:
          keys: integers of any shape. With `key_bits=64` they are int64 or uint64 (of
            NumPy, or under `jax_enable_x64`), or the words uint32 `[..., 2]` that
            `split_keys` makes. The 32-bit key -1 is the same key as 2^32 - 1.

        Returns:
          int32, of the shape of `keys`.

        Raises:
          TypeError, ValueError: `keys` are not integers, or do not fit in the bits of
            this index.

        Example:
          >>> import jax.numpy as jnp, sparsejax as sj
          >>> index, _, _ = sj.HashIndex.create(3).insert(jnp.array([7, 4, 7]), step=0)
          >>> index.find(jnp.array([4, 7, 5]))
          Array([0, 1, 3], dtype=int32)
        """
        words, shape = self._words(keys)
        return _find(self, words).reshape(shape)

    def insert(
        self, keys: ArrayLike, step: ArrayLike, *, where: ArrayLike | None = None
    ) -> tuple[HashIndex, jax.Array, jax.Array]:
        """Gives rows to new keys, and records a use of every key.

        Donate the index under `jax.jit`. It is then updated in place, at a cost that
        depends on the number of keys and not on the capacity.

        Args:
          keys: as for `find`.
          step: integer in `[0, 2^32)`, the number of the training step, or a time in
            seconds. Keys that were used at the same step, in this call or an earlier
            one, are not evicted.
          where: booleans of the shape of `keys`, False for padding. Padding is not
            inserted and gets the row `capacity`.

        Returns:
          `(index, rows, evicted)`: the new index; the row of each key, int32 of the
          shape of `keys`, `capacity` for a key without a row; and the rows whose keys
          were evicted, int32 `[m]`, ascending and padded with `capacity`. m is the
          number of keys or `max_evictions`, and at most `capacity`. These rows belong
          to other keys now: give them new weights with `sparsejax.optim.reset_rows`.

        Raises:
          TypeError, ValueError: as for `find`; or `step` is not a whole number, or
            `where` are not booleans of the shape of `keys`.

        Example:
          >>> import jax, jax.numpy as jnp, sparsejax as sj
          >>> insert = jax.jit(sj.HashIndex.insert, donate_argnums=0)
          >>> index = sj.HashIndex.create(3, admit_after=2)
          >>> index, rows, _ = insert(index, jnp.array([7, 4, 7]), 0)
          >>> rows, index.num_waiting
          (Array([3, 3, 3], dtype=int32), Array(2, dtype=uint32))
          >>> index, rows, _ = insert(index, jnp.array([5, 7, 7]), 1)
          >>> rows
          Array([3, 0, 0], dtype=int32)
        """
        words, shape = self._words(keys)
        step = _as_step(step)
        if where is None:
            mask = jnp.ones(words[0].shape, bool)
        else:
            mask = _arguments.to_array(where, "where", "an array of booleans")
            if mask.shape != shape or mask.dtype != jnp.bool_:
                raise ValueError(
                    f"where must be booleans {shape}, got {_arguments.kind_of(mask)}."
                )
            mask = mask.reshape(-1)
        if not words[0].size:
            return self, jnp.zeros(shape, jnp.int32), jnp.zeros((0,), jnp.int32)
        index, rows, evicted = _insert(self, words, mask, step)
        return index, rows.reshape(shape), evicted

    def keys_of(self, rows: ArrayLike) -> tuple[jax.Array, jax.Array]:
        """Returns the key of each row, and which rows have a key.

        Args:
          rows: integers of any shape.

        Returns:
          `(keys, used)`: uint32 of the shape of `rows`, or `[*rows.shape, 2]` for
          64-bit keys, zeros for a row without a key; and booleans of the shape of
          `rows`.

        Raises:
          TypeError: `rows` are not integers.

        Example:
          >>> import jax.numpy as jnp, sparsejax as sj
          >>> index, _, _ = sj.HashIndex.create(3).insert(jnp.array([7, 4, 7]), step=0)
          >>> index.keys_of(jnp.array([1, 0, 2]))
          (Array([7, 4, 0], dtype=uint32), Array([ True,  True, False], dtype=bool))
        """
        rows = _arguments.as_ids(rows, self.capacity, "rows")
        used = (rows >= 0) & (rows < self.num_keys)
        slot = self.slot_of_row[jnp.where(used, rows, 0)]
        keys = self.slots[slot, :-1]
        keys = jnp.where(used[..., None], keys, np.uint32(0))
        return (keys[..., 0] if self.key_bits == 32 else keys), used

    def items(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns all keys and their rows, in order of rows, as NumPy arrays.

        Returns:
          `(keys, rows)`: int32 or int64 `[num_keys]`, and int32 `[num_keys]`.

        Example:
          >>> import jax.numpy as jnp, sparsejax as sj
          >>> index, _, _ = sj.HashIndex.create(3).insert(jnp.array([7, 4, 7]), step=0)
          >>> index.items()
          (array([4, 7], dtype=int32), array([0, 1], dtype=int32))
        """
        rows = np.arange(int(self.num_keys), dtype=np.int32)
        slots = np.asarray(self.slot_of_row)[rows]
        words = np.asarray(self.slots)[slots, :-1]
        if self.key_bits == 32:
            return np.ascontiguousarray(words[:, 0]).view(np.int32), rows
        return self.join_keys(words), rows

    def _words(self, keys: Any) -> tuple[tuple[jax.Array, ...], tuple[int, ...]]:
        """Returns the words of the keys, uint32 `[n]`, low word first; and a shape."""
        keys = _as_integers(keys)
        wide = keys.dtype.itemsize == 8
        if self.key_bits == 64:
            if keys.dtype == jnp.uint32 and keys.shape[-1:] == (2,):
                words, shape = (keys[..., 0], keys[..., 1]), keys.shape[:-1]
            elif wide:
                words, shape = _words_of_wide(keys), keys.shape
            else:
                raise TypeError(
                    f"This index has 64-bit keys, got {keys.dtype} of shape "
                    f"{keys.shape}. Call HashIndex.split_keys(keys) before jit."
                )
        elif not wide:
            words, shape = (_word(keys),), keys.shape
        else:
            is_known = isinstance(keys, np.ndarray)
            least, most = -(2**31), 2**32 - 1
            if not is_known or np.any((keys < least) | (keys > most)):
                raise ValueError(
                    f"This index has 32-bit keys, got {keys.dtype}. Make it with "
                    "HashIndex.create(..., key_bits=64), or cast the keys to int32."
                )
            words, shape = (keys.astype(np.uint32),), keys.shape
        flat = tuple(jnp.asarray(word).reshape(-1) for word in words)
        return flat, tuple(shape)


# ------------------------------------------------------------------ keys and hashes


def _as_integers(keys: Any) -> Any:
    if isinstance(keys, (int, list, tuple)):
        keys = np.asarray(keys)  # NumPy keeps 64 bits, which JAX would cut to 32
    return _arguments.as_integers(keys, "keys")


def _as_step(step: Any) -> jax.Array:
    """Returns a step as a uint32 scalar."""
    if not isinstance(step, jax.Array):
        step = np.asarray(step)  # JAX would cut 64 bits to 32
    if step.shape or not jnp.issubdtype(step.dtype, jnp.integer):
        raise TypeError(f"step must be one integer, got {_arguments.kind_of(step)}.")
    if _arguments.is_concrete(step) and not 0 <= int(step) < 2**32:
        raise ValueError(
            f"step must be in [0, 2^32), got {int(step)}. Number the training steps, "
            "or pass a time in seconds, not milliseconds."
        )
    return jnp.asarray(step.astype(np.uint32))


def _word(keys: Any) -> jax.Array:
    """Returns keys of at most 32 bits as uint32; a negative key keeps its bits."""
    keys = jnp.asarray(keys)
    if jnp.issubdtype(keys.dtype, jnp.unsignedinteger):
        return keys.astype(jnp.uint32)
    return lax.bitcast_convert_type(keys.astype(jnp.int32), jnp.uint32)


def _words_of_wide(keys: Any) -> tuple[Any, Any]:
    """Returns the words of int64 or uint64 keys, of NumPy or of JAX under x64."""
    bits = keys.astype(np.uint64)  # a negative key keeps its bits
    return bits.astype(np.uint32), (bits >> np.uint64(32)).astype(np.uint32)


def _mix(x: Any) -> Any:
    """Mixes as MurmurHash3 does: each bit of the result depends on each bit of x."""
    x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def _hash(words: tuple[jax.Array, ...], seed: int, salt: int) -> jax.Array:
    """Hashes keys. Keys of one word that differ have hashes that differ."""
    start = np.array([(seed * 0x9E3779B1 + salt * 0x85EBCA77) & 0xFFFFFFFF], np.uint32)
    x = _mix(start)[0]
    for word in words:
        x = _mix(word ^ x)
    return x


def _two_buckets(
    words: tuple[jax.Array, ...], num_buckets: int, seed: int
) -> tuple[jax.Array, jax.Array]:
    """Returns the two buckets of each key, int32. They differ if num_buckets > 1."""
    last = np.uint32(num_buckets - 1)
    one = _hash(words, seed, salt=0) & last
    two = _hash(words, seed, salt=1) & last
    two = jnp.where(one == two, (two ^ np.uint32(1)) & last, two)
    return one.astype(jnp.int32), two.astype(jnp.int32)


def _slot(slots: jax.Array, bucket: jax.Array, lane: int) -> list[jax.Array]:
    """Reads one slot of each bucket: the words of its key, then its row."""
    at = bucket * np.int32(_LANES) + np.int32(lane)
    return [_take(slots, (at, column)) for column in range(slots.shape[1])]


def _take(x: jax.Array, index: Any) -> jax.Array:
    """Returns `x[index]` without a check; `index` must be in range."""
    return x.at[index].get(mode="promise_in_bounds", wrap_negative_indices=False)


def _set(x: jax.Array, index: Any, values: Any) -> jax.Array:
    """Returns `x` after `x[index] = values`; indices out of range are dropped."""
    return x.at[index].set(values, mode="drop", wrap_negative_indices=False)


# ------------------------------------------------------------------ find


@jax.jit
def _find(index: HashIndex, words: tuple[jax.Array, ...]) -> jax.Array:
    slots = index.slots
    buckets = _two_buckets(words, slots.shape[0] // _LANES, index.seed)
    row = _find_in_buckets(slots, *buckets, *words)
    return jnp.minimum(row, np.uint32(index.capacity)).astype(jnp.int32)


def _find_in_buckets(
    slots: jax.Array, one: jax.Array, two: jax.Array, *words: jax.Array
) -> jax.Array:
    """Returns the row stored with each key in its two buckets, or `_EMPTY`."""
    row = jnp.full(words[0].shape, _EMPTY)
    # Slot by slot, which is one loop over the keys on a CPU. Whole buckets would be an
    # array `[n, 8, words + 1]` between two loops, at a third more time.
    for bucket in (one, two):
        for lane in range(_LANES):
            *slot_words, slot_row = _slot(slots, bucket, lane)
            # A slot whose key was evicted still has the key, but no row.
            for slot_word, word in zip(slot_words, words, strict=True):
                slot_row = jnp.where(slot_word == word, slot_row, _EMPTY)
            row = jnp.minimum(row, slot_row)
    return row


# ------------------------------------------------------------------ insert


@jax.jit
def _insert(
    index: HashIndex, words: tuple[jax.Array, ...], mask: jax.Array, step: jax.Array
) -> tuple[HashIndex, jax.Array, jax.Array]:
    # Inside `shard_map`, loops and branches need results that vary alike.
    index, words, mask, step = _vary_alike((index, words, mask, step))
    n, capacity = mask.shape[0], index.capacity
    row = jnp.where(mask, _find(index, words), np.int32(capacity))

    # Keys that have rows. Duplicates write the same number, so they count once.
    old = _take(index.counts, jnp.minimum(row, np.int32(capacity - 1)))
    counts = _set(index.counts, row, _plus_one(old))
    last_step = _set(index.last_step, row, step)
    index = dataclasses.replace(index, counts=counts, last_step=last_step)

    # Keys without rows: each once, in ascending order. In a running index they are few,
    # so that sorting an eighth of the batch is usually enough. The case is 0 if there
    # are none, 1 if there are few, and 2 if there are more.
    unknown = mask & (row == capacity)
    few = n // 8 if n >= _CHUNK else 0
    total = jnp.sum(unknown, dtype=jnp.int32)
    case = (total > 0).astype(jnp.int32) + (total > few).astype(jnp.int32)
    if not few:
        case = jnp.minimum(case, 1) * 2
    zero = jnp.zeros_like(total)
    nowhere = _vary_like(jnp.full((few,), n, jnp.int32), total)

    def distinct_of_few():
        where, _ = indexing.positions(unknown, few)
        few_words = tuple(_take(word, jnp.minimum(where, n - 1)) for word in words)
        few_words, count = _distinct(few_words, where < n)
        return tuple(jnp.pad(word, (0, n - few)) for word in few_words), count, where

    new_words, num_new, where = lax.switch(
        case,
        [
            lambda: (tuple(map(jnp.zeros_like, words)), zero, nowhere),
            distinct_of_few if few else lambda: (words, zero, nowhere),
            lambda: (*_distinct(words, unknown), nowhere),
        ],
    )

    # New keys take the rows that were never used, then rows of evicted keys. The number
    # of evictable rows bounds the claims, so that a key with a slot always gets a row.
    most = min(n if index.max_evictions is None else index.max_evictions, n, capacity)
    free = capacity - index.num_keys
    evictable = lax.cond(
        num_new > free, lambda: _count_evictable(index, step, most), lambda: zero
    )
    index, claims = _claim_slots(index, new_words, num_new, free + evictable)
    num_evicted = jnp.maximum(claims.filled - free, 0)
    evicted, hand = lax.cond(
        num_evicted > 0,
        lambda: _choose_victims(index, step, num_evicted, most),
        lambda: (_vary_like(jnp.full((most,), capacity, jnp.int32), zero), index.hand),
    )
    index = _write(index, claims, evicted, free, step)
    index = dataclasses.replace(
        index,
        hand=hand,
        num_seen=index.num_seen + num_new.astype(jnp.uint32),
        num_keys=jnp.minimum(index.num_keys + claims.filled, capacity),
        num_evicted=_add(index.num_evicted, num_evicted),
        num_refused=_add(index.num_refused, claims.admitted - claims.filled),
        num_waiting=_add(index.num_waiting, num_new - claims.admitted),
    )

    # The rows of the new keys are read back from the index, each duplicate included.
    def find_few():
        few_words = tuple(_take(word, jnp.minimum(where, n - 1)) for word in words)
        return _set(row, where, _find(index, few_words))

    rows = lax.switch(
        case,
        [
            lambda: row,
            find_few if few else lambda: row,
            lambda: jnp.where(unknown, _find(index, words), row),
        ],
    )
    return index, rows, evicted


def _plus_one(counts: jax.Array) -> jax.Array:
    most = np.int32(np.iinfo(np.int32).max)
    return jnp.where(counts < most, counts + 1, most)


def _add(total: jax.Array, more: jax.Array) -> jax.Array:
    """Adds to a uint32 total, which saturates at its largest value."""
    more = more.astype(jnp.uint32)
    return jnp.minimum(total, _EMPTY - more) + more


def _distinct(
    words: tuple[jax.Array, ...], mask: jax.Array
) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """Returns the distinct keys with a true `mask`, ascending, first; and their number.

    The slots after them hold zeros.
    """
    total, n = jnp.sum(mask, dtype=jnp.int32), mask.shape[0]
    # Masked keys become the largest value, so they are sorted to the end. A real key of
    # this value is sorted there as well; since the two are equal, it does not matter
    # which of them are cut off after `total`.
    ordered = [jnp.where(mask, word, _EMPTY) for word in reversed(words)]
    ordered = lax.sort(tuple(ordered), num_keys=len(words), is_stable=False)
    differs = functools.reduce(jnp.logical_or, [x[1:] != x[:-1] for x in ordered])
    first = jnp.concatenate([_vary_like(jnp.ones((1,), bool), mask), differs])
    first &= lax.iota(jnp.int32, n) < total
    place = indexing.running_count(first)
    slot = jnp.where(first, place - 1, np.int32(n))
    unique = tuple(_set(jnp.zeros_like(x), slot, x) for x in reversed(ordered))
    return unique, place[-1]


class _Claims(NamedTuple):
    """New keys and the empty slots that they claimed, in ascending order of keys.

    `words` and `slots` are `[N]`, with N a multiple of the chunk's length. The first
    `filled` elements are used. `admitted` is the number of keys that were seen often
    enough, with a slot or without.
    """

    words: tuple[jax.Array, ...]
    slots: jax.Array
    filled: jax.Array
    admitted: jax.Array


def _claim_slots(
    index: HashIndex, words: tuple[jax.Array, ...], num_new: jax.Array, budget: Any
) -> tuple[HashIndex, _Claims]:
    """Claims empty slots for the first `budget` new keys that are admitted."""
    # In chunks, since `words` has room for a whole batch of new keys, and usually holds
    # few: the loop ends after the chunk with the last one.
    n = words[0].shape[0]
    chunk = min(n, _CHUNK)
    padded = -(-n // chunk) * chunk
    words = tuple(jnp.pad(word, (0, padded - n)) for word in words)
    lanes = lax.iota(jnp.int32, chunk)

    def turn(state):
        begin, slots, sketch, claims = state
        keys = tuple(lax.dynamic_slice(word, (begin,), (chunk,)) for word in words)
        tries = begin + lanes < num_new
        if sketch is not None:
            generation = _generation(sketch, index.num_seen)
            seen, sketch = _count_sightings(sketch, keys, tries, generation, index.seed)
            tries &= seen >= np.uint32(index.admit_after)
        rank = jnp.cumsum(tries, dtype=jnp.int32)
        admitted = claims.admitted + rank[-1]
        # The first keys get the rows that are left.
        tries &= rank <= budget - claims.filled
        slots, claimed = _claim(slots, keys, tries, index.seed)
        # Append the keys that got a slot to the claims.
        got = claimed >= 0
        place = claims.filled + jnp.cumsum(got, dtype=jnp.int32)
        target = jnp.where(got, place - 1, np.int32(padded))
        put = lambda held, x: _set(held, target, x)
        claims = _Claims(
            tuple(map(put, claims.words, keys)),
            put(claims.slots, claimed),
            place[-1],
            admitted,
        )
        return begin + chunk, slots, sketch, claims

    zero = jnp.zeros_like(num_new)
    claims = _Claims(
        tuple(map(jnp.zeros_like, words)),
        _vary_like(jnp.zeros((padded,), jnp.int32), num_new),
        zero,
        zero,
    )
    state = zero, index.slots, index.sketch, claims
    state = lax.while_loop(lambda state: state[0] < num_new, turn, state)
    _, slots, sketch, claims = state
    return dataclasses.replace(index, slots=slots, sketch=sketch), claims


def _claim(
    slots: jax.Array, keys: tuple[jax.Array, ...], tries: jax.Array, seed: int
) -> tuple[jax.Array, jax.Array]:
    """Claims an empty slot for each key that tries; -1 if its two buckets are full.

    In each turn, every key tries the first empty slot of its emptier bucket. The key
    with the smallest number wins the slot and writes its number instead of a row. A
    bucket takes one key per turn, so the other keys see how full it is now, and buckets
    fill evenly.
    """
    numbers = lax.iota(jnp.uint32, tries.shape[0])
    bits, no_bit = np.uint32(1) << np.arange(_LANES, dtype=np.uint32), np.uint32(0)
    num_slots, last = slots.shape[0], slots.shape[1] - 1
    one, two = _two_buckets(keys, num_slots // _LANES, seed)

    def turn(state):
        slots, claimed, waits = state
        # The empty slots of each bucket, as the bits of a number.
        one_is, two_is = (
            functools.reduce(
                jnp.bitwise_or,
                [
                    jnp.where(_slot(slots, bucket, lane)[-1] == _EMPTY, bit, no_bit)
                    for lane, bit in enumerate(bits)
                ],
            )
            for bucket in (one, two)
        )
        is_two = lax.population_count(two_is) > lax.population_count(one_is)
        empty = jnp.where(is_two, two_is, one_is)
        waits &= empty > 0
        # The position of the lowest bit that is set.
        first = lax.population_count((empty & (~empty + 1)) - 1).astype(jnp.int32)
        slot = jnp.where(is_two, two, one) * _LANES + jnp.minimum(first, _LANES - 1)
        target = jnp.where(waits, slot, np.int32(num_slots))
        slots = slots.at[target, last].min(
            numbers, mode="drop", wrap_negative_indices=False
        )
        won = waits & (_take(slots, (slot, last)) == numbers)
        return slots, jnp.where(won, slot, claimed), waits & ~won

    nothing = _vary_like(jnp.full(tries.shape, -1, jnp.int32), tries)
    state = lax.while_loop(lambda s: jnp.any(s[2]), turn, (slots, nothing, tries))
    return state[0], state[1]


def _write(
    index: HashIndex, claims: _Claims, evicted: jax.Array, free: Any, step: jax.Array
) -> HashIndex:
    """Gives rows to the claimed keys: unused rows first, then rows of evicted keys."""
    capacity, num_keys = index.capacity, index.num_keys
    num_slots, length = index.slots.shape[0], claims.slots.shape[0]
    chunk = min(length, _CHUNK)
    lanes = lax.iota(jnp.int32, chunk)
    most = evicted.shape[0]

    def turn(state):
        begin, slots, slot_of_row, counts, last_step = state
        part = lambda x: lax.dynamic_slice(x, (begin,), (chunk,))
        rank = begin + lanes
        here = rank < claims.filled
        # Unused rows are consecutive. After `free` of them, the victims' rows follow.
        row, is_taken = num_keys + rank, jnp.zeros_like(here)
        if most:
            is_taken = here & (rank >= free)
            victim = _take(evicted, jnp.clip(rank - free, 0, most - 1))
            row = jnp.where(is_taken, victim, row)
        row = jnp.where(here, row, np.int32(capacity))

        beyond = np.int32(num_slots)
        old = _take(slot_of_row, jnp.minimum(row, np.int32(capacity - 1)))
        # The write depends on the read. Else XLA copies the array in order to write
        # before it reads.
        row = jnp.where(always_true(old), row, np.int32(capacity))
        # The slot of an evicted key keeps the key but loses the row.
        old = jnp.where(is_taken, old, beyond)
        slots = _set(slots, (old, slots.shape[1] - 1), _EMPTY)
        slot = jnp.where(here, part(claims.slots), beyond)
        contents = (*map(part, claims.words), row.astype(jnp.uint32))
        return (
            begin + chunk,
            _set(slots, slot, jnp.stack(contents, axis=1)),
            _set(slot_of_row, row, slot),
            _set(counts, row, np.int32(1)),
            _set(last_step, row, step),
        )

    arrays = index.slots, index.slot_of_row, index.counts, index.last_step
    start = (jnp.zeros_like(claims.filled), *arrays)
    _, *arrays = lax.while_loop(lambda state: state[0] < claims.filled, turn, start)
    names = "slots", "slot_of_row", "counts", "last_step"
    return dataclasses.replace(index, **dict(zip(names, arrays)))


# ------------------------------------------------------------------ eviction


def _window(index: HashIndex, most: int) -> tuple[jax.Array, int]:
    """Returns the first row of the window of possible victims, and its length."""
    length = window_length(index.window, most, index.capacity)
    return jnp.minimum(index.hand, index.capacity - length), length


def _evictable(index: HashIndex, step: jax.Array, most: int) -> Any:
    """Returns the rows of the window, their last steps, and which may be evicted."""
    begin, length = _window(index, most)
    rows = begin + lax.iota(jnp.int32, length)
    last_step = lax.dynamic_slice_in_dim(index.last_step, begin, length)
    return rows, last_step, (last_step != step) & (rows < index.num_keys)


def _count_evictable(index: HashIndex, step: jax.Array, most: int) -> jax.Array:
    """Returns the number of rows that a call may evict."""
    *_, evictable = _evictable(index, step, most)
    return jnp.minimum(jnp.sum(evictable, dtype=jnp.int32), np.int32(most))


def _choose_victims(
    index: HashIndex, step: jax.Array, count: jax.Array, most: int
) -> tuple[jax.Array, jax.Array]:
    """Chooses `count` rows to evict, ascending, padded to `most`; moves the hand."""
    rows, last_step, left = _evictable(index, step, most)
    length = rows.shape[0]
    counts = lax.dynamic_slice(index.counts, (rows[0],), (length,)).astype(jnp.uint32)
    orders = eviction_orders(index.policy, last_step, counts)
    chosen, _ = indexing.positions(_smallest(left, orders, count), most)
    victims = jnp.where(chosen < length, rows[0] + chosen, np.int32(index.capacity))
    hand = rows[-1] + 1
    hand = jnp.where(hand < index.capacity, hand, np.int32(0))
    return victims, hand


def _smallest(among: jax.Array, orders: list[jax.Array], count: jax.Array) -> jax.Array:
    """Marks the `count` smallest elements by `orders`, ties by position.

    Each order's range is bisected, which is many times faster than sorting.

    Args:
      among: booleans `[n]`, the elements to choose from.
      orders: uint32 `[n]` each, the first one counts most.
      count: int32.
    """
    chosen = jnp.zeros_like(among)
    for order in orders:

        def halve(limits, order=order, among=among, count=count):
            low, high = limits
            middle = high - ((high - low) >> 1)
            fits = jnp.sum(among & (order < middle), dtype=jnp.int32) < count
            return jnp.where(fits, middle, low), jnp.where(fits, high, middle - 1)

        # Find the largest limit with fewer than `count` elements below it. Elements
        # below are chosen; elements at the limit are ties for the next order.
        limits = (
            jnp.min(order, where=among, initial=_EMPTY),
            jnp.max(order, where=among, initial=np.uint32(0)),
        )
        limit, _ = lax.while_loop(lambda x: x[0] < x[1], halve, limits)
        below = among & (order < limit)
        chosen |= below
        count = count - jnp.sum(below, dtype=jnp.int32)
        among &= order == limit
    return chosen | (among & (indexing.running_count(among) <= count))


# ------------------------------------------------------------------ the sketch


def _generation(sketch: jax.Array, num_seen: jax.Array) -> jax.Array:
    """Returns the generation. It increases each `columns / 2` sightings."""
    return (num_seen // np.uint32(sketch.shape[1] // 2)) & np.uint32(0xFFFFFF)


def _count_sightings(
    sketch: jax.Array,
    keys: tuple[jax.Array, ...],
    here: jax.Array,
    generation: jax.Array,
    seed: int,
) -> tuple[jax.Array, jax.Array]:
    """Counts a sighting of each key; returns the counts and the new sketch.

    A cell holds a count and the generation in which it was written. In the next
    generation the count is still whole; each later generation halves it. So old
    sightings fade without a pass over the sketch.
    """
    width = sketch.shape[1]
    one, two = _hash(keys, seed, salt=2), _hash(keys, seed, salt=3)
    depth = lax.iota(jnp.uint32, _DEPTH)[:, None]
    column = (one[None] + depth * (two[None] | np.uint32(1))) & np.uint32(width - 1)
    column = column.astype(jnp.int32)
    row = lax.iota(jnp.int32, _DEPTH)[:, None]
    cells = _take(sketch, (row, column))
    age = (generation - (cells >> 8)) & np.uint32(0xFFFFFF)
    halvings = jnp.clip(age, 1, 32) - 1
    decayed = (cells & np.uint32(_MAX_SIGHTINGS)) >> halvings
    seen = jnp.minimum(jnp.min(decayed, axis=0) + 1, np.uint32(_MAX_SIGHTINGS))
    # Only cells below `seen` rise: cells above it have counted other keys too. The
    # generation is in the high bits, so `max` keeps the later of two values.
    written = (generation << 8) | jnp.maximum(decayed, seen[None])
    column = jnp.where(here[None], column, np.int32(width))
    sketch = sketch.at[row, column].max(
        written, mode="drop", wrap_negative_indices=False
    )
    return seen, sketch


# ------------------------------------------------------------------ shard_map


def _vary_alike(tree: Any) -> Any:
    """Marks all leaves as varying over each mesh axis that a leaf varies over."""
    leaves, treedef = jax.tree.flatten(tree)
    axes = frozenset().union(*map(_compat.varying_axes, leaves))
    return treedef.unflatten([_compat.to_varying(x, axes) for x in leaves])


def _vary_like(x: jax.Array, like: jax.Array) -> jax.Array:
    return _compat.to_varying(x, _compat.varying_axes(like))
