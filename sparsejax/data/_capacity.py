"""How many elements a batch may have: measured, or bounded for every order there is.

A batch is B of n rows, whose lengths are known. In the order of the rows its size is
known exactly. Where each epoch has another order, two bounds hold:

- no B rows have more elements than the B longest;
- Hoeffding (1963): a sum of B lengths drawn without replacement is at most as likely to
  be large as one drawn with it, so by Chernoff, for M(t) = mean(exp(t * length)),
  `P(size >= c) <= min_t exp(-t * c) * M(t)^B`. Solved for c, with P = `risk`, that is
  `c = min_t (B * log M(t) + log(1 / risk)) / t`.

The second is mostly far below the first, and a risk of 1e-12 costs little more room
than one of 1e-3, as it enters by its logarithm.
"""

import dataclasses

import numpy as np


RISK = 1e-12
SPILL_RISK = 1e-3


@dataclasses.dataclass(frozen=True)
class Capacity:
    """The capacity of one level of a column, and what speaks for it.

    Args:
      size: int, elements a batch has room for.
      reason: what was measured.
      mean: elements of a batch on average.
      is_sure: whether every batch of every epoch fits.
    """

    size: int
    reason: str
    mean: float
    is_sure: bool

    def __str__(self) -> str:
        filled = self.mean / self.size if self.size else 1.0
        return f"{self.size} ({self.reason}; on average {filled:.0%} filled)"


def largest(lengths: np.ndarray, batch_size: int) -> int:
    """The sum of the `batch_size` greatest lengths: no batch has more."""
    if batch_size >= len(lengths):
        return int(lengths.sum())
    return int(np.partition(lengths, -batch_size)[-batch_size:].sum())


def tail_bound(lengths: np.ndarray, batch_size: int, risk: float) -> int:
    """c such that a random batch has more than c elements with at most that risk."""
    values, counts = np.unique(lengths, return_counts=True)
    if values[-1] <= 0:
        return 0
    share = np.log(counts / len(lengths))
    spread = np.sqrt(batch_size * lengths.var()) + 1.0
    # Any t gives a bound that holds. The best is about sqrt(2 log(1 / risk)) / spread
    # where sums are nearly normal, and of the order of 1 / length where few rows are
    # long.
    best = np.inf
    for t in np.geomspace(1e-2 / spread, 1e2 / min(spread, values[-1]), 400):
        exponents = t * values + share
        top = exponents.max()
        log_mean = top + np.log(np.exp(exponents - top).sum())
        best = min(best, (batch_size * log_mean - np.log(risk)) / t)
    return int(np.ceil(best))


def choose(
    lengths: np.ndarray, batch_size: int, in_order: int | None, risk: float = RISK
) -> Capacity:
    """The capacity for `capacity="auto"`.

    Args:
      lengths: int64 `[n]`.
      batch_size: rows of a batch.
      in_order: the largest batch, where the order is always the same; else None.
      risk: for the size of a batch in a random order.
    """
    mean = batch_size * float(lengths.mean())
    if in_order is not None:
        reason = "the largest batch, in the order of the rows"
        return Capacity(in_order, reason, mean, True)
    sure, likely = largest(lengths, batch_size), tail_bound(lengths, batch_size, risk)
    if sure <= likely:
        reason = f"as many as the {batch_size} longest rows have: every batch fits"
        return Capacity(sure, reason, mean, True)
    reason = (
        f"a batch has more with a probability below {risk:g}; every batch would fit "
        f"into {sure}"
    )
    return Capacity(likely, reason, mean, False)
