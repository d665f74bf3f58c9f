"""Sampler: the row indices of each batch of each epoch on each shard.

The order is a function of (seed, epoch). So an epoch and a batch are a position, and
any batch can be made without the batches before it. All shards split the same order and
have the same number of batches; otherwise a program that runs on all shards would hang.
"""

import dataclasses

import numpy as np


# Without this key, seed 0 would have the stream of `np.random.default_rng(0)`, with
# which users make data: the order of the rows would then depend on their values.
_DOMAIN = (0x0BA7C4E5,)


@dataclasses.dataclass(frozen=True)
class Sampler:
    """The order of the rows, and its split into batches.

    Args:
      num_rows: int n, the rows of the data set.
      batch_size: int, the rows of a batch on each shard.
      shuffle: True for a new order in each epoch.
      seed: int, the seed of the orders.
      drop_remainder: True to drop a batch that is not full.
      shard: (index, count).
    """

    num_rows: int
    batch_size: int
    shuffle: bool
    seed: int
    drop_remainder: bool
    shard: tuple[int, int]

    def __len__(self) -> int:
        """Returns the number of batches of an epoch."""
        n, count = self.num_rows, self.shard[1]
        if self.drop_remainder:
            return n // count // self.batch_size
        return -(-n // (count * self.batch_size))

    def rows(self, epoch: int) -> np.ndarray:
        """Returns the rows of an epoch in order, for all shards, int64 `[n]`."""
        if not self.shuffle:
            return np.arange(self.num_rows)
        # The order is the ranks of raw random bits, which are the same in all versions
        # of NumPy, unlike `permutation`: a saved state must stay valid after an update.
        seed = np.random.SeedSequence([self.seed, epoch], spawn_key=_DOMAIN)
        bits = np.random.PCG64(seed)
        return np.argsort(bits.random_raw(self.num_rows), kind="stable")

    def cut(self, rows: np.ndarray) -> list[np.ndarray]:
        """Splits the rows of an epoch into the batches of this shard."""
        index, count = self.shard
        rows, size = rows[index::count], self.batch_size
        return [rows[i * size : (i + 1) * size] for i in range(len(self))]

    def sizes(self, rows: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Returns the elements of each batch on each shard, int64 `[shards, batches]`.

        Args:
          rows: the rows of an epoch.
          lengths: the number of elements of each row of the data set.
        """
        count = self.shard[1]
        out = np.zeros((count, len(self)), np.int64)
        for index in range(count):
            shard_lengths = lengths[rows[index::count]]
            edges = np.arange(len(self) + 1) * self.batch_size
            sums = np.concatenate([[0], np.cumsum(shard_lengths)])
            out[index] = np.diff(sums[np.minimum(edges, len(shard_lengths))])
        return out
