"""The static capacities of a loader's batches, given or measured.

A ragged column needs a capacity for each level of segments, so that all batches have
one shape and a jitted step compiles once. A bucket has a tuple of capacities for each
column (empty for an array). There are one or two buckets. A batch uses the first bucket
in which it fits, so a step compiles at most once for each bucket.

`capacity="auto"` measures. A batch has B of n rows, whose lengths are known. Without
shuffling, the largest batch is known exactly. With shuffling, two bounds hold:

- B rows have at most as many elements as the B longest rows.
- Hoeffding (1963): a sum of B lengths drawn without replacement is at most as likely to
  be large as a sum drawn with replacement. So by Chernoff, for
  M(t) = mean(exp(t * length)), `P(size >= c) <= min_t exp(-t * c) * M(t)^B`. The
  solution of P = `risk` is `c = min_t (B * log M(t) + log(1 / risk)) / t`.

The second bound is usually far below the first. A risk of 1e-12 needs little more
capacity than a risk of 1e-3, because the bound depends on the logarithm.
"""

import dataclasses
from typing import Any

import numpy as np

from sparsejax.data import _columns
from sparsejax.data._datasets import ArrayDataset
from sparsejax.data._sampler import Sampler


_RISK = 1e-12
_SPILL_RISK = 1e-3


# ------------------------------------------------------------------ bounds


def largest(lengths: np.ndarray, batch_size: int) -> int:
    """Returns the sum of the `batch_size` longest rows, an upper bound of a batch."""
    if batch_size >= len(lengths):
        return int(lengths.sum())
    return int(np.partition(lengths, -batch_size)[-batch_size:].sum())


def tail_bound(lengths: np.ndarray, batch_size: int, risk: float) -> int:
    """Returns a size that a random batch exceeds with probability at most `risk`."""
    values, counts = np.unique(lengths, return_counts=True)
    if values[-1] <= 0:
        return 0
    share = np.log(counts / len(lengths))
    deviation = np.sqrt(batch_size * lengths.var()) + 1.0
    # The bound is valid for any t. The best t is about sqrt(2 log(1 / risk)) /
    # deviation if sums are nearly normal, and of the order of 1 / length if few rows
    # are long.
    best = np.inf
    for t in np.geomspace(1e-2 / deviation, 1e2 / min(deviation, values[-1]), 400):
        exponents = t * values + share
        top = exponents.max()
        log_mean = top + np.log(np.exp(exponents - top).sum())
        best = min(best, (batch_size * log_mean - np.log(risk)) / t)
    return int(np.ceil(best))


# ------------------------------------------------------------------ capacities


@dataclasses.dataclass(frozen=True)
class Level:
    """The capacity of one level of a ragged column.

    Args:
      name: the name of the column, with the level if there are several.
      lengths: int64 `[n]`, the number of elements of each row.
      size: the capacity.
      reason: why the capacity was chosen, for `repr(loader)`.
      sure: a capacity in which every batch of every epoch fits.
      mean: the average number of elements in a batch.
    """

    name: str
    lengths: np.ndarray
    size: int
    reason: str
    sure: int
    mean: float


@dataclasses.dataclass(frozen=True)
class Buckets:
    """The capacities of all columns, which `measure` makes.

    Args:
      columns: the levels of each column; empty for an array.
      spills: True if there is a second bucket, in which every batch fits.
    """

    columns: tuple[tuple[Level, ...], ...]
    spills: bool

    @property
    def levels(self) -> list[Level]:
        """The levels of all columns."""
        return [level for levels in self.columns for level in levels]

    def sizes(self, spilled: bool = False) -> list[tuple[int, ...]]:
        """Returns the capacities of each column in the first or the second bucket."""
        size = lambda level: max(level.size, level.sure) if spilled else level.size
        return [tuple(map(size, levels)) for levels in self.columns]

    def pick(self, rows: np.ndarray) -> list[tuple[int, ...]]:
        """Returns the capacities of the first bucket in which these rows fit."""
        fits = lambda level: level.lengths[rows].sum() <= level.size
        return self.sizes(self.spills and not all(map(fits, self.levels)))

    def check(self, sampler: Sampler, epoch: int, rows: np.ndarray) -> None:
        """Raises a ValueError if a batch of the epoch does not fit on any shard."""
        for level in self.levels:
            if self.spills or level.size >= level.sure:
                continue
            sizes = sampler.sizes(rows, level.lengths).max(axis=0)
            if sizes.max() <= level.size:
                continue
            batch = int(np.argmax(sizes > level.size))
            raise ValueError(
                f"DataLoader: capacity={level.size} of {level.name} is too small: "
                f"batch {batch} of epoch {epoch} has {sizes[batch]} elements, "
                f"and the largest batch of that epoch has {sizes.max()}. Pass "
                f"capacity={level.sure}, which fits every batch"
                f"{' of every epoch' if sampler.shuffle else ''}, or 'auto', or "
                "overflow='spill' for a second, larger capacity."
            )

    def lines(self) -> list[str]:
        """Returns a line for each level: its capacity, and why."""
        shown = []
        for level in self.levels:
            filled = level.mean / level.size if level.size else 1.0
            spill = f", else {max(level.sure, level.size)}" if self.spills else ""
            shown.append(
                f"capacity of {level.name}: {level.size} ({level.reason}; on average "
                f"{filled:.0%} filled){spill}"
            )
        return shown


def measure(
    dataset: ArrayDataset, sampler: Sampler, capacity: Any, spill: bool
) -> Buckets:
    """Returns the buckets for the batches of a data set."""
    risk = _SPILL_RISK if spill else _RISK
    columns, given = [], _by_column(dataset, capacity)
    for column, name, own in zip(dataset.columns, dataset.names, given):
        is_array = isinstance(column, _columns.Array)
        lengths = [] if is_array else _columns.lengths(column)
        numbered = [f"{name}, level {k}" for k in range(len(lengths))]
        names = numbered if len(numbered) > 1 else [name]
        parts = list(own) if isinstance(own, (tuple, list)) else [own]
        if len(parts) > max(len(lengths), 1) or is_array and own is not None:
            raise _not_a_capacity(capacity)
        parts += [None] * (len(lengths) - len(parts))
        columns.append(
            tuple(
                _as_level(name, counts, sampler, _as_size(part, capacity), risk)
                for name, counts, part in zip(names, lengths, parts)
            )
        )
    always_fit = all(lv.size >= lv.sure for levels in columns for lv in levels)
    return Buckets(tuple(columns), spill and not always_fit)


def _as_level(
    name: str, lengths: np.ndarray, sampler: Sampler, size: int | None, risk: float
) -> Level:
    """Returns a level with the capacity `size`, or a measured one for None."""
    batch_size = sampler.batch_size
    if not sampler.shuffle:
        rows = np.arange(sampler.num_rows)
        sure = auto = int(sampler.sizes(rows, lengths).max(initial=0))
        reason = "the largest batch, without shuffling"
    else:
        sure = largest(lengths, batch_size)
        auto = min(sure, tail_bound(lengths, batch_size, risk))
        reason = f"the total of the {batch_size} longest rows: every batch fits"
        if auto < sure:
            reason = (
                f"a batch is larger with a probability below {risk:g}; every batch "
                f"fits into {sure}"
            )
    reason = reason if size is None else "as given"
    mean = batch_size * float(lengths.mean())
    return Level(name, lengths, auto if size is None else size, reason, sure, mean)


def _by_column(dataset: ArrayDataset, capacity: Any) -> list[Any]:
    """Returns the capacity given for each column; None for arrays."""
    if isinstance(capacity, (str, int, np.integer)):
        ragged = [isinstance(c, _columns.Ragged) for c in dataset.columns]
        return [capacity if is_ragged else None for is_ragged in ragged]
    try:
        parts = dataset.split(capacity)
    except (KeyError, TypeError):
        parts = []
    if len(parts) != len(dataset.columns):
        raise _not_a_capacity(capacity)
    return parts


def _as_size(part: Any, capacity: Any) -> int | None:
    """Returns the capacity of one level; None to measure it."""
    if part is None or isinstance(part, str) and part == "auto":
        return None
    if not isinstance(part, (int, np.integer)) or part < 0:
        raise _not_a_capacity(capacity)
    return int(part)


def _not_a_capacity(given: Any) -> ValueError:
    return ValueError(
        "DataLoader: capacity must be 'auto' or a non-negative int; for several "
        "columns one of these for each, in the structure of the items, and None for "
        "arrays; for nested rows a tuple with an int for each level, got "
        f"{given!r}."
    )
