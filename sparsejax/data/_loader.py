"""DataLoader: batches of static capacity, on grain.

Grain is handed whole batches, not rows: a batch is cut out of the columns by NumPy in a
fraction of a millisecond, where a pipeline of rows takes about ten microseconds of
Python for each of them. What grain does is to read ahead in threads and to keep the
place.

Threads and not processes: grain's workers need `absl.app.run` around the program and a
guarded `__main__`, and each gets a copy of the data set; and NumPy lets threads run
side by side. `to_grain` is for whoever wants `mp_prefetch` all the same.
"""

from collections.abc import Iterator
from typing import Any

import jax

from sparsejax import _arguments
from sparsejax.data import _buckets, _checks
from sparsejax.data._batches import Batches
from sparsejax.data._dataset import as_array_dataset
from sparsejax.data._order import Order


_CALL = _checks.CALL


class DataLoader:
    """Batches of static shape, so that a jitted step compiles once.

    Each `for batch in loader` is one epoch. A batch has the structure of the data set's
    items: arrays are stacked, `[batch_size, ...]`; rows of CSR, of SegmentTensors and
    of lists become a SegmentTensor of `batch_size` segments, whose capacity is the same
    each time. It is made of NumPy arrays, which go to the device with the call of a
    jitted function.

    Args:
      dataset: ArrayDataset, SimpleDataset, or any sequence of items, which is read as a
        whole when the loader is made.
      batch_size: int, rows of a batch.
      shuffle: whether each epoch has an order of its own, of all rows.
      seed: int, of these orders. The same seed gives the same orders everywhere.
      drop_remainder: whether rows that make no full batch are left out of the epoch.
        Else the last batch is filled up with zeros and with empty rows. Left out, it is
        False, and the log has a warning where there is such padding and no mask.
      mask: whether each batch also has bool `[batch_size]`, False for a row of padding:
        behind the columns, `x, y, mask`, or in a dict under "mask".
      capacity: how many elements a batch of ragged rows has room for. An int; or "auto"
        to measure it. In the order of the rows that is the largest batch. In a random
        order it is the number that a batch exceeds with a probability below 1e-12, or
        the sum of the longest rows if that is less. `repr(loader)` says what was
        chosen. For several columns a tuple or dict as the items are, with "auto", an
        int or None for each; of nested rows a tuple of numbers, outermost first.
      overflow: for a batch that does not fit, "error" before the first batch of such an
        epoch; or "spill", a second capacity into which every batch fits: then the step
        compiles at most twice, and "auto" aims at one batch in a thousand.
      num_workers: int, threads that make batches ahead of time; 0 for none.
      shard: (index, count): this is one of several loaders, each with its part of every
        epoch. The parts are disjoint, together all rows, and of equally many batches
        of the same capacities. batch_size is that of each.
      device: a device or sharding to put the batches on; None leaves them in NumPy.

    Raises:
      TypeError, ValueError: an argument is not such, or a capacity is too small.

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

    The place is two numbers, also between the batches of an epoch, and with workers:

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
        capacity: Any = "auto",
        overflow: str = "error",
        num_workers: int = 0,
        shard: tuple[int, int] = (0, 1),
        device: Any = None,
    ):
        _checks.import_grain()
        if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
            found = _arguments.kind_of(dataset)
            raise TypeError(
                f"{_CALL}: dataset must be an ArrayDataset, a SimpleDataset or a "
                f"sequence of items, got {found}. ArrayDataset(X, y) makes one of "
                "columns."
            )
        self._dataset = as_array_dataset(_CALL, dataset)
        if not len(self._dataset):
            raise ValueError(f"{_CALL}: the data set has no rows.")
        if overflow not in ("error", "spill"):
            raise ValueError(
                f"{_CALL}: overflow must be 'error' or 'spill', got {overflow!r}."
            )
        drops = False if drop_remainder is None else drop_remainder
        self._order = Order(
            num_rows=len(self._dataset),
            batch_size=_checks.as_int("batch_size", batch_size, 1),
            shuffle=_checks.as_bool("shuffle", shuffle),
            seed=_checks.as_int("seed", seed, 0),
            drop_remainder=_checks.as_bool("drop_remainder", drops),
            shard=_checks.as_shard(shard),
        )
        _checks.check_batches(self._order)
        self._mask = _checks.as_mask(mask, self._dataset)
        if drop_remainder is None and not self._mask:
            _checks.warn_of_padding(self._order)
        self._num_workers = _checks.as_int("num_workers", num_workers, 0)
        self._device = _checks.as_device(device)
        self._buckets = _buckets.measure(self._dataset, self._order, capacity, overflow)
        self._buckets.check(self._order, 0, self._order.rows(0))
        self._next = (0, 0)
        self._last: LoaderIterator | None = None
        _checks.LOG.info("%r", self)

    def __len__(self) -> int:
        """Number of batches of an epoch."""
        return len(self._order)

    def __iter__(self) -> "LoaderIterator":
        """The next epoch, or the rest of one after `set_state`."""
        epoch, batch = self._next
        self._last = LoaderIterator(self, epoch, batch)
        self._next = (epoch + 1, 0)
        return self._last

    def __repr__(self) -> str:
        order = self._order
        shown = [f"{order.num_rows} rows", f"{len(self)} batches of {order.batch_size}"]
        if order.shuffle:
            shown.append(f"shuffle=True, seed={order.seed}")
        if order.shard[1] > 1:
            shown.append(f"shard={order.shard}")
        lines = [f"DataLoader({', '.join(shown)})", *self._buckets.lines()]
        return "\n  ".join(lines)

    @property
    def capacity(self) -> Any:
        """Elements that a batch has room for: an int for one ragged column.

        None where all columns are arrays, else a tuple or dict as the items are; a
        tuple of ints for nested rows, outermost first. With `overflow="spill"` that of
        the first size.
        """
        return self._shown(0)

    @property
    def spill_capacity(self) -> Any:
        """Of the second size, likewise; None where there is none."""
        return self._shown(1) if self._buckets.spills else None

    def _shown(self, bucket: int) -> Any:
        own = [s[0] if len(s) == 1 else s or None for s in self._buckets.sizes[bucket]]
        given = [size for size in own if size is not None]
        if len(given) == 1:
            return given[0]
        return self._dataset.join(own) if given else None

    # -- the place ---------------------------------------------------------------

    def get_state(self) -> dict[str, Any]:
        """Where the last iterator stands, for `set_state`; JSON can hold it."""
        if self._last is not None:
            state = self._last.get_state()
            if state["batch"] < len(self):
                return state
        return self._state(*self._next)

    def set_state(self, state: dict[str, Any]) -> None:
        """Makes the next `iter(loader)` go on from there, exactly.

        Args:
          state: of `get_state`, of this loader or one like it. Workers and capacity
            may differ, and so may the index of the shard.

        Raises:
          ValueError: it is of a loader whose batches have other rows.
        """
        epoch, batch = self._place(state)
        self._next = (epoch, batch) if batch < len(self) else (epoch + 1, 0)
        self._last = None

    def _facts(self) -> dict[str, Any]:
        """What decides which rows are in which batch."""
        order = self._order
        return {
            "num_rows": order.num_rows,
            "batch_size": order.batch_size,
            "shuffle": order.shuffle,
            "seed": order.seed,
            "drop_remainder": order.drop_remainder,
            "num_shards": order.shard[1],
        }

    def _state(self, epoch: int, batch: int) -> dict[str, Any]:
        return {"epoch": epoch, "batch": batch, **self._facts()}

    def _place(self, state: Any) -> tuple[int, int]:
        facts = self._facts()
        want = {"epoch", "batch", *facts}
        if not isinstance(state, dict) or state.keys() != want:
            raise ValueError(
                f"{_CALL}: state must be what get_state() gave, a dict with "
                f"{sorted(want)}, got {state!r}."
            )
        for name, ours in facts.items():
            if state[name] != ours:
                raise ValueError(
                    f"{_CALL}: the state was saved by a loader with "
                    f"{name}={state[name]!r}, and this one has {name}={ours!r}: its "
                    "place means other rows here."
                )
        epoch = _checks.as_int("state['epoch']", state["epoch"], 0)
        batch = _checks.as_int("state['batch']", state["batch"], 0)
        if batch > len(self):
            raise ValueError(
                f"{_CALL}: the state is at batch {batch} of an epoch of {len(self)}."
            )
        return epoch, batch

    # -- grain -------------------------------------------------------------------

    def to_grain(self, epoch: int = 0) -> Any:
        """The batches of an epoch as a `grain.MapDataset`, to build on.

        Args:
          epoch: int, from 0.

        Raises:
          TypeError, ValueError: `epoch` is no such int, or with overflow `"error"` a
            batch of it does not fit.

        Example:
          >>> import numpy as np, sparsejax as sj
          >>> dataset = sj.data.ArrayDataset(np.arange(6.0))
          >>> batches = sj.data.DataLoader(dataset, 2).to_grain()
          >>> [float(x.sum()) for x in batches.map(lambda x: x * 10)]
          [10.0, 50.0, 90.0]
        """
        epoch = _checks.as_int("epoch", epoch, 0)
        rows = self._order.rows(epoch)
        self._buckets.check(self._order, epoch, rows)
        batches = Batches(
            self._dataset, self._order, self._buckets, self._mask, self._order.cut(rows)
        )
        return _checks.import_grain().MapDataset.source(batches)

    def _start(self, epoch: int, batch: int) -> Any:
        grain, threads = _checks.import_grain(), self._num_workers
        # Two batches ahead for each thread: one being made, one waiting.
        options = grain.ReadOptions(
            num_threads=threads, prefetch_buffer_size=2 * threads
        )
        batches = iter(self.to_grain(epoch).to_iter_dataset(options))
        batches.set_state({"next_index": batch})
        return batches


class LoaderIterator(Iterator[Any]):
    """The batches of one epoch; `iter(loader)` makes it."""

    def __init__(self, loader: DataLoader, epoch: int, batch: int):
        self._loader, self._epoch = loader, epoch
        self._batches = loader._start(epoch, batch)

    def __next__(self) -> Any:
        batch, device = next(self._batches), self._loader._device
        if device is None:
            return batch
        try:
            return jax.device_put(batch, device)
        except ValueError as error:
            raise ValueError(
                f"{_CALL}: a batch cannot be laid out as device= says. Take a "
                "batch_size, and for ragged columns a capacity, that the devices "
                f"divide. JAX says: {error}"
            ) from error

    def get_state(self) -> dict[str, Any]:
        """The place of the next batch, for `set_state`; JSON can hold it."""
        return self._loader._state(self._epoch, self._batches.get_state()["next_index"])

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes on from there, exactly."""
        self._epoch, batch = self._loader._place(state)
        self._batches = self._loader._start(self._epoch, batch)
