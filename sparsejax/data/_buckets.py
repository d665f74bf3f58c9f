"""The capacities of a loader's batches: as given, or as measured, and whether they do.

A bucket is a tuple of capacities for each column: one number for each level of a ragged
column, none for an array. There are one or two buckets; a batch goes into the first one
that it fits into, so a jitted step compiles at most as often as there are buckets.
"""

import dataclasses
from typing import Any

import numpy as np

from sparsejax import _arguments
from sparsejax.data import _capacity, _checks, _columns
from sparsejax.data._dataset import ArrayDataset
from sparsejax.data._order import Order


_CALL = _checks.CALL
_OR_AUTO = "; capacity='auto', which takes {auto} here"
_NOT_A_CAPACITY = (
    "{call}: capacity must be 'auto', an int, or for several ragged columns a {kind} "
    "with one of these or None for each column, got {found!r}."
)
_HOLDS = {True: "every batch of every epoch fits", False: "every batch fits"}


@dataclasses.dataclass(frozen=True)
class Level:
    """One level of a ragged column: its name, its lengths, and its capacities."""

    name: str
    lengths: np.ndarray
    sure: int  # every batch of every epoch fits
    auto: int  # what is chosen where nothing is given
    chosen: _capacity.Capacity


@dataclasses.dataclass(frozen=True)
class Buckets:
    """What `measure` makes.

    Args:
      columns: for each column its levels, none for an array.
      spills: whether there is a second bucket, into which every batch fits.
    """

    columns: tuple[tuple[Level, ...], ...]
    spills: bool

    @property
    def sizes(self) -> list[list[tuple[int, ...]]]:
        """For each bucket and column, the capacities of the levels."""
        first = [tuple(lv.chosen.size for lv in levels) for levels in self.columns]
        if not self.spills:
            return [first]
        larger = lambda lv: max(lv.chosen.size, lv.sure)
        return [first, [tuple(map(larger, levels)) for levels in self.columns]]

    def pick(self, rows: np.ndarray) -> list[tuple[int, ...]]:
        """The bucket of the batch of `rows`."""
        if not self.spills:
            return self.sizes[0]
        fits = all(
            lv.lengths[rows].sum() <= lv.chosen.size
            for levels in self.columns
            for lv in levels
        )
        return self.sizes[0 if fits else 1]

    def check(self, order: Order, epoch: int, rows: np.ndarray) -> None:
        """An error if a batch of the epoch, on any shard, does not fit."""
        if self.spills:
            return
        for level in (lv for levels in self.columns for lv in levels):
            if level.chosen.is_sure:
                continue
            found = order.sizes(rows, level.lengths)
            if not found.size or found.max() <= level.chosen.size:
                continue
            batch = int(np.argmax(found.max(axis=0) > level.chosen.size))
            likely = level.chosen.size < level.auto < level.sure
            auto = _OR_AUTO.format(auto=level.auto) if likely else ""
            raise ValueError(
                f"{_CALL}: capacity={level.chosen.size} of {level.name} is too small: "
                f"batch {batch} of epoch {epoch} has {found[:, batch].max()} elements, "
                f"and the largest of that epoch {found.max()}. Pass "
                f"capacity={level.sure}, into which {_HOLDS[order.shuffle]}{auto}, "
                "or overflow='spill' for a second, larger size."
            )

    def lines(self) -> list[str]:
        """What was chosen, and why, a line a level."""
        shown = []
        for level in (lv for levels in self.columns for lv in levels):
            spill = (
                f", else {max(level.sure, level.chosen.size)}" if self.spills else ""
            )
            shown.append(f"capacity of {level.name}: {level.chosen}{spill}")
        return shown


def measure(
    dataset: ArrayDataset, order: Order, capacity: Any, overflow: str
) -> Buckets:
    """The buckets for a data set, read in an order."""
    rows = np.arange(order.num_rows)
    risk = _capacity.SPILL_RISK if overflow == "spill" else _capacity.RISK
    columns, names = dataset.columns, dataset.names()
    found = []
    for column, name, given in zip(columns, names, _spread(dataset, capacity)):
        if isinstance(column, _columns.Array):
            if given is not None:
                raise ValueError(
                    f"{_CALL}: capacity={given!r}, but {name} is an array, whose rows "
                    "need none. Leave it out or give None."
                )
            found.append(())
            continue
        lengths = _columns.lengths(column)
        levels = []
        for depth, (own, size) in enumerate(
            zip(lengths, _of_levels(given, len(lengths), name))
        ):
            exact = None
            if not order.shuffle:
                exact = int(order.sizes(rows, own).max(initial=0))
            chosen = _capacity.choose(own, order.batch_size, exact, risk)
            sure, auto = exact, chosen.size
            if sure is None:
                sure = _capacity.largest(own, order.batch_size)
            if size is not None:
                chosen = _capacity.Capacity(size, "as given", chosen.mean, size >= sure)
            level_name = f"{name}, level {depth}" if len(lengths) > 1 else name
            levels.append(Level(level_name, own, sure, auto, chosen))
        found.append(tuple(levels))
    all_sure = all(lv.chosen.is_sure for levels in found for lv in levels)
    return Buckets(tuple(found), overflow == "spill" and not all_sure)


# ------------------------------------------------------------------ private


def _spread(dataset: ArrayDataset, capacity: Any) -> list[Any]:
    """What was given for each column; None where it is to be measured, or an array."""
    ragged = [isinstance(c, _columns.Ragged) for c in dataset.columns]
    if isinstance(capacity, str) and capacity == "auto":
        return [None] * len(ragged)
    if isinstance(capacity, (int, np.integer)) and not isinstance(capacity, bool):
        return [capacity if is_ragged else None for is_ragged in ragged]
    try:
        parts = dataset.split(_CALL, capacity)
    except (KeyError, TypeError, ValueError):
        kind = type(dataset.join([None] * len(ragged))).__name__
        kind = kind if kind in ("dict", "tuple") else "tuple"
        raise ValueError(
            _NOT_A_CAPACITY.format(call=_CALL, kind=kind, found=capacity)
        ) from None
    return [
        None if isinstance(part, str) and part == "auto" else part for part in parts
    ]


def _of_levels(given: Any, levels: int, name: str) -> list[int | None]:
    """A capacity or None for each level."""
    parts = list(given) if isinstance(given, (tuple, list)) else [given]
    if len(parts) > levels:
        raise ValueError(
            f"{_CALL}: capacity={given!r} of {name} has {len(parts)} numbers and the "
            f"column {levels} level(s) of segments."
        )
    for p in parts:
        if p is not None and not isinstance(p, (int, np.integer)):
            raise ValueError(
                _NOT_A_CAPACITY.format(call=_CALL, kind="tuple or dict", found=given)
            )
    sizes = [None if p is None else _arguments.check_capacity(_CALL, p) for p in parts]
    return sizes + [None] * (levels - len(sizes))
