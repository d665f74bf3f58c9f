"""Sampler: the row indices of each batch of each epoch on each shard.

The order is a function of (seed, epoch). A position is therefore two numbers, and any
batch can be made without those before it. All shards split the same order and have the
same number of batches; otherwise a program that runs on all of them would hang.
"""

import dataclasses

import numpy as np


# Without it, seed 0 would give the stream of `np.random.default_rng(0)`, from which
# users make data: the order of the rows would then depend on the numbers in them.
_DOMAIN = (0x0BA7C4E5,)


@dataclasses.dataclass(frozen=True)
class Sampler:
    """The order of the rows, and how it is split into batches.

    Args:
      num_rows: int n.
      batch_size: rows of a batch on each shard.
      shuffle: whether each epoch has its own order.
      seed: of the orders.
      drop_remainder: whether to drop a batch that is not full.
      shard: (index, count).
    """

    num_rows: int
    batch_size: int
    shuffle: bool
    seed: int
    drop_remainder: bool
    shard: tuple[int, int]

    def __len__(self) -> int:
        """Number of batches of an epoch."""
        n, count = self.num_rows, self.shard[1]
        if self.drop_remainder:
            return n // count // self.batch_size
        return -(-n // (count * self.batch_size))

    def rows(self, epoch: int) -> np.ndarray:
        """The rows of an epoch, of all shards, int64 `[n]`."""
        if not self.shuffle:
            return np.arange(self.num_rows)
        # The ranks of raw random bits. NumPy keeps these the same in all versions, but
        # not `permutation`; and a saved state must still be right after an update.
        seed = np.random.SeedSequence([self.seed, epoch], spawn_key=_DOMAIN)
        bits = np.random.PCG64(seed)
        return np.argsort(bits.random_raw(self.num_rows), kind="stable")

    def cut(self, rows: np.ndarray) -> list[np.ndarray]:
        """The rows of an epoch, split into the batches of this shard."""
        index, count = self.shard
        rows, size = rows[index::count], self.batch_size
        return [rows[i * size : (i + 1) * size] for i in range(len(self))]

    def sizes(self, rows: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Elements of each batch of each shard, int64 `[shards, batches]`.

        Args:
          rows: of an epoch.
          lengths: elements of each row of the data set.
        """
        count = self.shard[1]
        out = np.zeros((count, len(self)), np.int64)
        for index in range(count):
            own = lengths[rows[index::count]]
            edges = np.arange(len(self) + 1) * self.batch_size
            sums = np.concatenate([[0], np.cumsum(own)])
            out[index] = np.diff(sums[np.minimum(edges, len(own))])
        return out
