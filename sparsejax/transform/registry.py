"""Registry: functions for primitives, which are given as objects or by their names."""

from collections.abc import Sequence
from typing import Any


class Registry:
    """Entries for primitives; the latest comes first.

    An entry for a primitive and one for its name are in one order: a rule for "gather"
    must come before the rule that is registered for JAX's `gather_p`.
    """

    def __init__(self):
        self._entries: dict[str, list[tuple[Any, Any]]] = {}

    def add(self, primitive: Any, entry: Any) -> None:
        """Registers a function for a primitive, or for all primitives of that name.

        It replaces a function of the same module and name, so that a cell of a notebook
        can be run again.
        """
        entries = self._entries.setdefault(_name_of(primitive), [])
        same = lambda key, old: key == primitive and _id_of(old) == _id_of(entry)
        entries[:] = [(primitive, entry), *(e for e in entries if not same(*e))]

    def find(self, primitive: Any) -> Sequence[Any]:
        """The functions for a primitive, the latest first."""
        entries = self._entries.get(primitive.name, ())
        return [e for key, e in entries if key is primitive or isinstance(key, str)]

    def named(self, name: str) -> Sequence[Any]:
        """The functions for all primitives of that name."""
        return [entry for _, entry in self._entries.get(name, ())]


def _name_of(primitive: Any) -> str:
    return primitive if isinstance(primitive, str) else primitive.name


def _id_of(function: Any) -> tuple[Any, Any]:
    return getattr(function, "__module__", None), getattr(
        function, "__qualname__", function
    )
