"""Tables by name, one of which is worked on at a time: what each call begins with."""

from collections.abc import Callable, Sequence
from typing import Any, Self

from sparsejax.store import _prefetch
from sparsejax.store._line import Line
from sparsejax.store._table import Table


def no_table(call: str, name: Any, names: Sequence[str]) -> KeyError:
    """The error for a name that is no table's."""
    known = f"only {', '.join(map(repr, names))}" if names else "nor any other"
    return KeyError(f"{call}: there is no table {name!r}, {known}. Call init first.")


class NamedTables:
    """The tables of a store, until it is closed."""

    def __init__(self):
        self._tables: dict[str, Table] = {}
        self._line = Line()
        self._flights = _prefetch.Flights()
        self._closed = False

    def names(self) -> tuple[str, ...]:
        """The names of the tables, in the order they were made."""
        return tuple(self._tables)

    def __contains__(self, name: object) -> bool:
        return name in self._tables

    def __repr__(self) -> str:
        tables = (
            f"{name}: {t.dtype.name}[{','.join(map(str, t.shape))}]"
            for name, t in self._tables.items()
        )
        return f"KVStore({'closed' if self._closed else ', '.join(tables)})"

    def close(self) -> None:
        """Flushes, gives memory and files back, and ends the store."""
        if self._closed:
            return

        def work():
            for table in self._tables.values():
                table.close()
            self._closed = True

        self._do("sparsejax.store.KVStore.close", work)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()

    def _do(self, call: str, work: Callable[[], Any]) -> Any:
        self._check_open(call)
        return self._line.call(work)

    def _check_open(self, call: str) -> None:
        if self._closed:
            raise ValueError(
                f"{call}: this store is closed. Make a new one, or close it later."
            )

    def _table(self, call: str, name: Any) -> Table:
        self._check_open(call)
        try:
            return self._tables[name]
        except (KeyError, TypeError):
            raise no_table(call, name, self.names()) from None
