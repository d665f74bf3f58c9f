"""DataLoader: batches of static capacity, which grain prepares ahead in threads.

grain receives whole batches, not rows. NumPy gathers a batch from the columns in a
fraction of a millisecond; a pipeline of rows takes about ten microseconds of Python per
row. Without workers grain is not needed.

Workers are threads. NumPy releases the GIL while it copies, so threads run in parallel;
grain's processes need `absl.app.run` around the program and a guarded `__main__`, and
each of them holds a copy of the data set. `to_grain` gives access to `mp_prefetch`.
"""

from __future__ import annotations

import dataclasses
import logging
import operator
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from sparsejax._arguments import PyTree
from sparsejax.data import _capacity, _columns
from sparsejax.data._datasets import ArrayDataset, as_array_dataset
from sparsejax.data._sampler import Sampler


_LOG = logging.getLogger("sparsejax.data")


class DataLoader:
    """Batches of static shape, so that a jitted step compiles once.

    Each `for batch in loader` is one epoch. A batch has the structure of the items in
    the data set: arrays are stacked, `[batch_size, ...]`; rows of CSR matrices,
    SegmentTensors and lists become a SegmentTensor of `batch_size` segments with a
    fixed capacity. Batches are NumPy arrays; a jitted function transfers them to the
    device.

    Args:
      dataset: ArrayDataset, SimpleDataset, or any sequence of items. All items of a
        sequence are read when the loader is made.
      batch_size: int, rows per batch.
      shuffle: True for a new random order of all rows in each epoch.
      seed: int, the seed of these orders, which are the same on every machine.
      drop_remainder: True to drop the rows at the end of an epoch that do not fill a
        batch. Otherwise the last batch is padded with zeros and empty rows. The default
        is False, with a logged warning if there is padding and no mask.
      mask: True to add a bool array `[batch_size]` to each batch, False for padding
        rows: after the columns, `x, y, mask`, or in a dict under "mask".
      capacity: the number of elements in a batch of ragged rows, padding included: an
        int, or "auto" to measure it. Without shuffling, "auto" is the size of the
        largest batch. With shuffling, it is the number that a batch exceeds with a
        probability below 1e-12, or the total of the longest rows if that is less.
        `repr(loader)` shows the choice. For several columns, pass a tuple or dict in
        the structure of the items, with "auto", an int or None for each; for nested
        rows, a tuple of ints, outermost first.
      overflow: "error" raises before the first batch of an epoch in which a
        batch does not fit. "spill" adds a second capacity that fits every batch: the
        step compiles at most twice, and "auto" lets about one batch in a thousand
        spill.
      num_workers: int, the number of threads that prepare batches ahead of time; more
        than 0 needs grain.
      shard: (index, count) for one of several loaders that split each epoch. The parts
        are disjoint and together contain all rows; they have the same number of batches
        and the same capacities. `batch_size` is per shard.
      device: a device or sharding for the batches; None leaves them in NumPy.

    Raises:
      TypeError, ValueError: an argument is wrong, or a capacity is too small.
      ImportError: `num_workers` is not 0, and grain is not installed.

    Example:
      >>> import numpy as np, sparsejax as sj
      >>> dataset = sj.data.ArrayDataset([[7, 9], [8], [], [5]], np.arange(4))
      >>> loader = sj.data.DataLoader(dataset, 2)
      >>> for basket, label in loader:
      ...     print(basket, label)
      SegmentTensor([[7 9] [8]], int32, num_segments=2, capacity=3) [0 1]
      SegmentTensor([[] [5]], int32, num_segments=2, capacity=3) [2 3]
      >>> loader.capacity
      3

    The state is the epoch and the batch, also in the middle of an epoch and with
    workers:

      >>> batches = iter(loader)
      >>> _, label = next(batches)
      >>> state = batches.get_state()  # for json.dump
      >>> loader.set_state(state)
      >>> [label for _, label in loader]
      [array([2, 3], dtype=int32)]

    References:
      MXNet Gluon, `gluon.data.DataLoader`; Grain, `MapDataset`, `IterDataset`.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        drop_remainder: bool | None = None,
        mask: bool = False,
        capacity: str | int | PyTree = "auto",
        overflow: str = "error",
        num_workers: int = 0,
        shard: tuple[int, int] = (0, 1),
        device: PyTree = None,
    ):
        self._dataset = as_array_dataset(dataset)
        if not len(self._dataset):
            raise ValueError("DataLoader: the data set has no rows.")
        if overflow not in ("error", "spill"):
            raise ValueError(
                f"DataLoader: overflow must be 'error' or 'spill', got {overflow!r}."
            )
        self._sampler = sampler = Sampler(
            num_rows=len(self._dataset),
            batch_size=operator.index(batch_size),
            shuffle=bool(shuffle),
            seed=operator.index(seed),
            drop_remainder=bool(drop_remainder),
            shard=_as_shard(shard),
        )
        if batch_size < 1 or seed < 0 or num_workers < 0:
            raise ValueError(
                "DataLoader: batch_size must be positive, and seed and num_workers not "
                f"negative, got {batch_size}, {seed} and {num_workers}."
            )
        if not len(sampler):
            raise ValueError(
                f"DataLoader: {sampler.num_rows} rows on {sampler.shard[1]} shard(s) "
                f"do not fill a batch of {batch_size}. Use a smaller batch_size, or "
                "drop_remainder=False."
            )
        self._mask = bool(mask)
        if self._mask and repr("mask") in self._dataset.names:
            raise ValueError(
                "DataLoader: mask=True stores the mask under the key 'mask', but the "
                "data set already has a column of that name. Rename the column."
            )
        if drop_remainder is None and not self._mask:
            _warn_of_padding(sampler)
        self._num_workers = operator.index(num_workers)
        if self._num_workers:
            _import_grain()
        self._device = device
        self._buckets = _capacity.measure(
            self._dataset, sampler, capacity, overflow == "spill"
        )
        self._buckets.check(sampler, 0, sampler.rows(0))
        self._next = (0, 0)
        self._last: LoaderIterator | None = None
        _LOG.info("%r", self)

    def __len__(self) -> int:
        """Returns the number of batches of an epoch."""
        return len(self._sampler)

    def __iter__(self) -> LoaderIterator:
        """Returns an iterator over the next epoch, or its rest after `set_state`."""
        epoch, batch = self._next
        self._last = LoaderIterator(self, epoch, batch)
        self._next = (epoch + 1, 0)
        return self._last

    def __repr__(self) -> str:
        sampler = self._sampler
        order = f", shuffle=True, seed={sampler.seed}" if sampler.shuffle else ""
        shard = f", shard={sampler.shard}" if sampler.shard[1] > 1 else ""
        shown = f"{sampler.num_rows} rows, {len(self)} batches of {sampler.batch_size}"
        return "\n  ".join(
            [f"DataLoader({shown}{order}{shard})", *self._buckets.lines()]
        )

    @property
    def capacity(self) -> Any:
        """The capacity of a batch: an int for one ragged column.

        For several columns, a tuple or dict in the structure of the items; for nested
        rows, a tuple of ints, outermost first. None if all columns are arrays. With
        `overflow="spill"` this is the first capacity.
        """
        sizes = [s[0] if len(s) == 1 else s or None for s in self._buckets.sizes()]
        given = [size for size in sizes if size is not None]
        if len(given) == 1:
            return given[0]
        return self._dataset.join(sizes) if given else None

    # -- the state ---------------------------------------------------------------

    def get_state(self) -> dict[str, Any]:
        """Returns the position of the last iterator, which json can write."""
        state = self._last.get_state() if self._last else self._state(*self._next)
        is_end = state["batch"] == len(self)  # so the next epoch begins
        return self._state(state["epoch"] + 1, 0) if is_end else state

    def set_state(self, state: dict[str, Any]) -> None:
        """Makes the next `iter(loader)` continue exactly from a saved position.

        Args:
          state: from `get_state` of this loader or of an equal one. Workers, capacity
            and shard index may differ.

        Raises:
          TypeError: `state` is not a dict.
          ValueError: the state is from a loader whose batches have other rows.
        """
        epoch, batch = self._check_state(state)
        self._next = (epoch, batch) if batch < len(self) else (epoch + 1, 0)
        self._last = None

    def _facts(self) -> dict[str, Any]:
        """Returns the settings that determine which rows are in which batch."""
        facts = dataclasses.asdict(self._sampler)
        _, facts["num_shards"] = facts.pop("shard")
        return facts

    def _state(self, epoch: int, batch: int) -> dict[str, Any]:
        return {"epoch": epoch, "batch": batch, **self._facts()}

    def _check_state(self, state: Any) -> tuple[int, int]:
        facts = self._facts()
        if state.keys() != {"epoch", "batch", *facts}:
            raise ValueError(
                "DataLoader.set_state: state must be a dict that get_state() returned, "
                f"with the keys {sorted({'epoch', 'batch', *facts})}, got {state}."
            )
        for name, ours in facts.items():
            if state[name] != ours:
                raise ValueError(
                    "DataLoader.set_state: the state was saved by a loader with "
                    f"{name}={state[name]!r}, but this one has {name}={ours!r}, so its "
                    "batches have other rows."
                )
        epoch, batch = operator.index(state["epoch"]), operator.index(state["batch"])
        if epoch < 0 or not 0 <= batch <= len(self):
            raise ValueError(
                f"DataLoader.set_state: the state is at batch {batch} of epoch "
                f"{epoch}, but an epoch has {len(self)} batches."
            )
        return epoch, batch

    # -- grain -------------------------------------------------------------------

    def to_grain(self, epoch: int = 0) -> Any:
        """Returns the batches of an epoch as a `grain.MapDataset`.

        Args:
          epoch: int, from 0.

        Raises:
          ValueError: a batch of that epoch does not fit, and `overflow` is not "spill".
          ImportError: grain is not installed.

        Example:
          >>> import numpy as np, sparsejax as sj
          >>> dataset = sj.data.ArrayDataset(np.arange(6.0))
          >>> batches = sj.data.DataLoader(dataset, 2).to_grain()
          >>> [float(x.sum()) for x in batches.map(lambda x: x * 10)]
          [10.0, 50.0, 90.0]
        """
        return _import_grain().MapDataset.source(self._batches(epoch))

    def _batches(self, epoch: int) -> _Batches:
        rows = self._sampler.rows(epoch)
        self._buckets.check(self._sampler, epoch, rows)
        batches, size = self._sampler.cut(rows), self._sampler.batch_size
        return _Batches(self._dataset, self._buckets, self._mask, batches, size)

    def _iterate(self, epoch: int, start: int) -> Iterator[Any]:
        threads = self._num_workers
        if not threads:
            batches = self._batches(epoch)
            return map(batches.__getitem__, range(start, len(batches)))
        grain = _import_grain()
        # Two batches per thread: one in preparation, one waiting.
        options = grain.ReadOptions(
            num_threads=threads, prefetch_buffer_size=2 * threads
        )
        prepared = iter(self.to_grain(epoch).to_iter_dataset(options))
        prepared.set_state({"next_index": start})
        return prepared


class LoaderIterator(Iterator[Any]):
    """Iterator over the batches of one epoch; `iter(loader)` makes it."""

    def __init__(self, loader: DataLoader, epoch: int, batch: int):
        self._loader = loader
        self._go_to(epoch, batch)

    def _go_to(self, epoch: int, batch: int) -> None:
        self._epoch, self._next = epoch, batch
        self._batches = self._loader._iterate(epoch, batch)

    def __next__(self) -> Any:
        batch, device = next(self._batches), self._loader._device
        self._next += 1
        return batch if device is None else jax.device_put(batch, device)

    def get_state(self) -> dict[str, Any]:
        """Returns the position of the next batch, which json can write."""
        return self._loader._state(self._epoch, self._next)

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues exactly from `state`."""
        self._go_to(*self._loader._check_state(state))


@dataclasses.dataclass(frozen=True, repr=False)
class _Batches:
    """An epoch as grain's RandomAccessDataSource: a batch is made when it is read."""

    dataset: ArrayDataset
    buckets: _capacity.Buckets
    mask: bool
    rows: list[np.ndarray]  # of each batch
    size: int

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        rows, size = self.rows[index], self.size
        columns = zip(self.dataset.columns, self.buckets.pick(rows))
        parts = [_columns.take(column, rows, size, sizes) for column, sizes in columns]
        batch = self.dataset.join(parts)
        if not self.mask:
            return batch
        mask = np.arange(size) < len(rows)
        if isinstance(batch, dict):
            return {**batch, "mask": mask}
        return (*(batch if isinstance(batch, tuple) else (batch,)), mask)


# ------------------------------------------------------------------ arguments


def _import_grain() -> Any:
    try:
        import grain
    except ImportError:
        raise ImportError(
            "DataLoader: num_workers > 0 and to_grain need grain, which is not "
            "installed. Run pip install 'sparsejax[data]'."
        ) from None
    return grain


def _as_shard(shard: Any) -> tuple[int, int]:
    index, count = map(operator.index, shard)
    if not 0 <= index < count:
        raise ValueError(
            f"DataLoader: shard must be (index, count) with 0 <= index < count, got "
            f"{shard}. In a multi-process job, pass (jax.process_index(), "
            "jax.process_count())."
        )
    return index, count


def _warn_of_padding(sampler: Sampler) -> None:
    count = sampler.shard[1]
    padding = len(sampler) * sampler.batch_size * count - sampler.num_rows
    if padding:
        _LOG.warning(
            "DataLoader: %d rows do not divide into batches of %d%s, so each epoch "
            "ends with %d row(s) of padding, which looks like data. Pass mask=True to "
            "mark it (for x, y, mask in loader), drop_remainder=True to drop the rest "
            "of the rows, or drop_remainder=False to accept the padding.",
            sampler.num_rows,
            sampler.batch_size,
            f" on {count} shards" if count > 1 else "",
            padding,
        )
