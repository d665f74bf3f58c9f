"""Sums and scalings of ShardedTables: what their operators do.

Gradients of several batches are summed by hand as `g1 + g2`, and scaled as `g / 2`.
`jax.tree.map(jnp.add, g1, g2)` would add row numbers to each other, as it would of any
SelectedRows. `ShardedTable` itself is not known here, so that imports keep pointing one
way.
"""

import operator
from typing import TYPE_CHECKING, Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from sparsejax._rows import SelectedRows, indexing


_NO_DIVISION = (
    "{found} / ShardedTable: a table can be divided by numbers only. Use "
    "table.map(lambda v: ...) for its values, padding rows included."
)
_NUMBERS = (int, float, complex)
_ARRAY_ONLY = frozenset(
    "T at astype copy flatten item max mean min mT ravel reshape sort std sum swapaxes "
    "take tolist transpose".split()
)


class Arithmetic:
    """`+`, `-`, `*`, `/` of what has `values`, in the order of positions."""

    values: Any

    if TYPE_CHECKING:  # ShardedTable, which extends this, has it

        def __array__(self) -> NoReturn: ...

    def __add__(self, other: Any) -> Any:
        if isinstance(other, _NUMBERS) and other == 0:
            return self  # so that Python's sum() works
        return self._with(operator.add, "+", other)

    def __radd__(self, other: Any) -> Any:
        return self.__add__(other)

    def __neg__(self) -> Any:
        return self.map(operator.neg)

    def __sub__(self, other: Any) -> Any:
        return self._with(operator.sub, "-", other)

    def __rsub__(self, other: Any) -> Any:
        return -self + other

    def __mul__(self, other: Any) -> Any:
        return self._with(operator.mul, "*", other)

    def __rmul__(self, other: Any) -> Any:
        return self.__mul__(other)

    def __truediv__(self, other: Any) -> Any:
        if isinstance(other, Arithmetic):
            raise TypeError(_NO_DIVISION.format(found=type(self).__name__))
        return self._with(operator.truediv, "/", other)

    def __rtruediv__(self, other: Any) -> NoReturn:
        raise TypeError(_NO_DIVISION.format(found=type(other).__name__))

    def __float__(self) -> NoReturn:
        self.__array__()

    def __int__(self) -> NoReturn:
        self.__array__()

    def __index__(self) -> NoReturn:
        self.__array__()

    def __complex__(self) -> NoReturn:
        self.__array__()

    def __getattr__(self, name: str) -> Any:
        # Only what is not there comes here.
        if name not in _ARRAY_ONLY:
            kind = type(self).__name__
            raise AttributeError(f"{kind!r} object has no attribute {name!r}")
        try:
            self.__array__()
        except TypeError as error:
            raise AttributeError(str(error)) from None

    def _with(self, op: Any, symbol: str, other: Any) -> Any:
        """`op` of the values of two tables, or of a table and a number."""
        if isinstance(other, Arithmetic):
            a, b = self.values, other.values
            static = [x.tree_flatten_with_keys()[1] for x in (self, other)]
            if static[0] != static[1] or np.shape(a) != np.shape(b):
                raise ValueError(
                    f"ShardedTable {symbol} ShardedTable: {self} and {other} are not "
                    "of one shape and layout on one mesh, and their rows do not lie "
                    "beside each other."
                )
            return self.map(lambda a: op(a, b))
        if not isinstance(other, (*_NUMBERS, np.generic, np.ndarray, jax.Array)):
            return NotImplemented
        if np.ndim(other):
            raise TypeError(
                f"ShardedTable {symbol} array of shape {np.shape(other)}: only scalars "
                "and other ShardedTables go together with a ShardedTable. Use "
                "table.map(lambda v: ...) for its values in the order of positions, or "
                ".to_dense()."
            )
        if symbol in "+-":
            self.__array__()  # padding rows must stay zero, and rows not stored too
        return self.map(lambda values: _scale(op, values, other))


def _scale(op: Any, values: Any, by: Any) -> Any:
    """`op(values, by)`; the data's type wins, as in SelectedRows."""
    if isinstance(values, SelectedRows) or isinstance(by, _NUMBERS):
        return op(values, by)
    wide = indexing.promote(values.dtype, by.dtype)
    narrow = values.dtype if jnp.issubdtype(values.dtype, jnp.inexact) else wide
    return op(values.astype(wide), jnp.asarray(by).astype(wide)).astype(narrow)
