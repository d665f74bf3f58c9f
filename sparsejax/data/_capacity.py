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
      always_fits: True if every batch is known to fit into `size`.
      mean: the average number of elements in a batch.
    """

    name: str
    lengths: np.ndarray
    size: int
    reason: str
    sure: int
    always_fits: bool
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
    def sizes(self) -> list[list[tuple[int, ...]]]:
        """The capacities of the levels, for each bucket and column."""
        first = [tuple(lv.size for lv in levels) for levels in self.columns]
        if not self.spills:
            return [first]
        larger = lambda lv: max(lv.size, lv.sure)
        return [first, [tuple(map(larger, levels)) for levels in self.columns]]

    def pick(self, rows: np.ndarray) -> list[tuple[int, ...]]:
        """Returns the capacities of the first bucket in which these rows fit."""
        if not self.spills:
            return self.sizes[0]
        fits = all(
            lv.lengths[rows].sum() <= lv.size
            for levels in self.columns
            for lv in levels
        )
        return self.sizes[0 if fits else 1]

    def check(self, sampler: Sampler, epoch: int, rows: np.ndarray) -> None:
        """Raises a ValueError if a batch of the epoch does not fit on any shard."""
        if self.spills:
            return
        for level in (lv for levels in self.columns for lv in levels):
            if level.always_fits:
                continue
            sizes = sampler.sizes(rows, level.lengths)
            if not sizes.size or sizes.max() <= level.size:
                continue
            batch = int(np.argmax(sizes.max(axis=0) > level.size))
            raise ValueError(
                f"DataLoader: capacity={level.size} of {level.name} is too small: "
                f"batch {batch} of epoch {epoch} has {sizes[:, batch].max()} elements, "
                f"and the largest batch of that epoch has {sizes.max()}. Pass "
                f"capacity={level.sure}, which fits every batch"
                f"{' of every epoch' if sampler.shuffle else ''}, or 'auto', or "
                "overflow='spill' for a second, larger capacity."
            )

    def lines(self) -> list[str]:
        """Returns a line for each level: its capacity, and why."""
        shown = []
        for level in (lv for levels in self.columns for lv in levels):
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
    columns = []
    for column, name, given in zip(
        dataset.columns, dataset.names(), _by_column(dataset, capacity)
    ):
        if isinstance(column, _columns.Array):
            if given is not None:
                raise ValueError(
                    f"DataLoader: {name} is an array, which has no capacity, got "
                    f"capacity={given!r}. Pass None for this column."
                )
            columns.append(())
            continue
        lengths = _columns.lengths(column)
        levels = []
        for depth, (counts, size) in enumerate(
            zip(lengths, _by_level(given, len(lengths)))
        ):
            level_name = f"{name}, level {depth}" if len(lengths) > 1 else name
            levels.append(_as_level(level_name, counts, sampler, size, risk))
        columns.append(tuple(levels))
    always_fits = all(lv.always_fits for levels in columns for lv in levels)
    return Buckets(tuple(columns), spill and not always_fits)


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
    if size is None:
        size = auto
    else:
        reason = "as given"
    mean = batch_size * float(lengths.mean())
    return Level(name, lengths, size, reason, sure, size >= sure, mean)


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


def _by_level(given: Any, levels: int) -> list[int | None]:
    """Returns a capacity for each level, or None to measure it."""
    parts = list(given) if isinstance(given, (tuple, list)) else [given]
    sizes: list[int | None] = []
    for part in parts:
        if part is None or isinstance(part, str) and part == "auto":
            sizes.append(None)
        elif isinstance(part, (int, np.integer)) and part >= 0:
            sizes.append(int(part))
        else:
            raise _not_a_capacity(given)
    if len(sizes) > levels:
        raise _not_a_capacity(given)
    return sizes + [None] * (levels - len(sizes))


def _not_a_capacity(given: Any) -> ValueError:
    return ValueError(
        "DataLoader: capacity must be 'auto' or a non-negative int; for several "
        "columns one of these for each, in the structure of the items; for nested rows "
        f"a tuple with an int for each level, got {given!r}."
    )
