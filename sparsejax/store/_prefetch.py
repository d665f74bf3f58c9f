"""Prefetching: the next batch's rows are read while the step of this one runs.

What a batch gets must be what it would have got one thing after the other: pull 1,
push 1, pull 2, push 2, and so on, bit for bit. So of the next batch's rows

- those that no batch still out has pulled are read early;
- those that a push changes are forwarded from that push, whenever it comes;
- the rest is read when the next batch is asked for. Whatever was pushed for the batch
  before has been put in line by then, and comes first.

So nobody counts pushes: a step may push nothing (evaluation), once, or often.
"""

import collections
import functools
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Any, TypeVar

import numpy as np

from sparsejax import _arguments
from sparsejax._rows import SelectedRows
from sparsejax.store._line import Line
from sparsejax.store._part import Part


_END = object()

Batch = TypeVar("Batch")  # anything, with ids in it


class Flight:
    """A batch under way: prepared, or out with its step running."""

    def __init__(self, owner: object):
        self.owner = owner
        self.parts: dict[str, Part] = {}
        self.is_out = False


class Flights:
    """The batches under way, in their order; touched by whoever works in line."""

    def __init__(self):
        self._all: list[Flight] = []

    def prepare(self, flight: Flight) -> None:
        """Reads of a batch's rows what can be read now."""
        for name, part in flight.parts.items():
            for other in self._all:
                if name in other.parts:
                    part.expect(other.parts[name])
            part.read_early()
        self._all.append(flight)

    def finish(self, flight: Flight) -> dict[str, SelectedRows]:
        """A batch goes out, and the one its owner had out is back."""
        owner = flight.owner
        self._all = [f for f in self._all if f.owner is not owner or not f.is_out]
        flight.is_out = True
        return {name: part.finish() for name, part in flight.parts.items()}

    def forget(self, owner: object) -> None:
        """All batches of an owner are back, or will never go out."""
        self._all = [flight for flight in self._all if flight.owner is not owner]

    def pushed(self, name: str, rows: np.ndarray, weights: np.ndarray) -> None:
        """Rows of a table have new weights."""
        for flight in self._all:
            if name in flight.parts and not flight.is_out:
                flight.parts[name].forward(rows, weights)

    def reloaded(self) -> None:
        """All rows may have other weights."""
        for flight in self._all:
            for part in flight.parts.values():
                part.read_again()


def check_ids_of(call: str, ids_of: Any) -> None:
    """An error unless `ids_of` can be called."""
    if not callable(ids_of):
        raise TypeError(
            f"{call}: ids_of must be a function that takes a batch and gives its ids, "
            f"got {_arguments.kind_of(ids_of)}."
        )


def prefetch(
    line: Line,
    flights: Flights,
    batches: Iterable[Any],
    ids_of: Callable[[Any], Any],
    only: Callable[[Any], str],
    make_part: Callable[[str, Any], Part],
    depth: int,
    check_open: Callable[[], None],
) -> Generator[tuple[Any, Any]]:
    """The generator behind `KVStore.prefetch`.

    Args:
      line, flights: of the store.
      batches, ids_of: as given by the user.
      only: the name of the only table, for ids that come without a name.
      make_part: makes of a table's ids a part; on the worker.
      depth: how many batches are prepared ahead.
      check_open: an error if the store was closed between two batches.
    """

    owner = object()

    def prepare(batch):
        ids = ids_of(batch)
        alone = not isinstance(ids, Mapping)
        ids = {only(ids): ids} if alone else ids
        flight = Flight(owner)

        def work():
            flight.parts = {name: make_part(name, i) for name, i in ids.items()}
            flights.prepare(flight)

        return batch, alone, flight, line.submit(work)

    def finish(flight, prepared):
        prepared.result()  # it was first in line; here its error comes out
        return flights.finish(flight)

    def fill(count):
        """Prepares batches until so many are ahead; errors wait for their turn."""
        nonlocal ended
        while len(ahead) < count and not ended:
            try:
                batch = next(source, _END)
                ended = batch is _END
                if not ended:
                    ahead.append(prepare(batch))
            except Exception as error:
                ended = True
                ahead.append(error)

    source = iter(batches)
    ahead: collections.deque[Any] = collections.deque()
    ended = False
    line.enter()
    try:
        while True:
            check_open()
            fill(1)
            if not ahead:
                break
            head = ahead.popleft()
            if isinstance(head, Exception):
                raise head
            batch, alone, flight, prepared = head
            finished = line.submit(functools.partial(finish, flight, prepared))
            fill(depth)
            pulled = finished.result()
            line.raise_failed()
            yield batch, (next(iter(pulled.values())) if alone else pulled)
        line.submit(bool).result()  # the last batch's pushes are done
        line.raise_failed()
    finally:
        line.submit(functools.partial(flights.forget, owner))
        line.leave()
