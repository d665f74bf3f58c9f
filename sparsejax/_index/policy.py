"""The policy of keys that come and go: which get a row of a table, and which lose it.

It is the policy of `sparsejax.HashIndex`, on the device, and of the tables of
`sparsejax.store` with keys, on the host. They differ in how they count sightings of
keys without a row: the index has a sketch of static size, the store exact counts.
"""

import dataclasses
from typing import Any

from sparsejax import _arguments


_MIN_WINDOW = 4096


@dataclasses.dataclass(frozen=True)
class KeyPolicy:
    """Decides which keys get a row of a store's table, and which are evicted for them.

    For `KVStore.init(..., keys=KeyPolicy())`. The arguments have the meaning that they
    have in `sparsejax.HashIndex.create`: with `last(k)` the last step of key k and
    `count(k)` its number of batches, "lru" evicts `argmin_k last(k)` and "lfu"
    `argmin_k (count(k), last(k))`, among the next `window` rows.

    Args:
      policy: "lru" evicts the least recently used keys, "lfu" the least frequently used
        ones, and of those the least recently used.
      admit_after: int, the number of calls of `KVStore.insert` in which a key must
        occur to get a row.
      max_evictions: int, the number of keys that one call may evict; 0 for none. By
        default the number of its keys.
      window: int, the number of rows among which a call searches the keys to evict. The
        next call searches the next rows. By default 8 times the number of keys to
        evict, and at least 4096. With the height of the table, a call that evicts
        searches all rows, and finds the least used keys of all.

    Raises:
      TypeError, ValueError: an argument is not as described.

    Example:
      >>> import sparsejax as sj
      >>> sj.store.KeyPolicy(admit_after=2)
      KeyPolicy(policy='lru', admit_after=2, max_evictions=None, window=None)

    References:
      TorchRec, managed collision (ZCH); TensorFlow Recommenders Addons, dynamic
      embedding and its restrict policies.
    """

    policy: str = "lru"
    admit_after: int = 1
    max_evictions: int | None = None
    window: int | None = None

    def __post_init__(self) -> None:
        if self.policy not in ("lru", "lfu"):
            raise ValueError(
                f"policy must be 'lru' or 'lfu', got {_arguments.show(self.policy)}. "
                "To evict nothing, pass max_evictions=0."
            )
        for name, least in {"admit_after": 1, "max_evictions": 0, "window": 1}.items():
            value = getattr(self, name)
            if value is not None or name == "admit_after":
                value = _arguments.static_int(name, value, least)
                object.__setattr__(self, name, value)


def window_length(window: int | None, max_evictions: int, height: int) -> int:
    """Returns the number of rows among which a call searches the keys to evict."""
    length = max(_MIN_WINDOW, 8 * max_evictions) if window is None else window
    return min(length, height)


def eviction_orders(policy: str, last_step: Any, counts: Any) -> list[Any]:
    """Returns the arrays whose smallest elements are evicted, the first counts most."""
    return [last_step] if policy == "lru" else [counts, last_step]
