"""TableOverDevices: a table on many devices, read, added and scaled like an array.

It is what the kinds of table have in common. A table consists of parts, pytrees of
arrays. What reads it as an array (`jnp.take`, a layer of flax) gets a stand-in, in
programs that will be walked.
"""

from __future__ import annotations

import operator
from typing import Any, NoReturn, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

from sparsejax import _arguments
from sparsejax._rows import RowTable, SelectedRows, indexing, read_row_table
from sparsejax.parallel._forward import forward
from sparsejax.transform.trace import makes_views


_NUMBERS = (int, float, complex)
# The methods and properties of an array that a model may use of a table: of what stands
# for it, so that rows can be read of a view. Of another name the table has none, for
# trees and frameworks ask objects whether they have this or that.
_ARRAY_ONLY = frozenset(
    "T at astype copy flatten item max mean min mT ravel reshape sort std sum swapaxes "
    "take tolist transpose".split()
)


class TableOverDevices(RowTable):
    """What a ShardedTable and a HotColdTable share; see the docstrings there."""

    mesh: Any
    axes: Any
    capacity: Any
    layout: Any
    height: Any
    num_shards: Any
    rows_per_shard: Any
    row_layout: Any

    _differs_in = "shape, mesh or layout"

    # NumPy and JAX must leave `array + table` to us instead of looping over objects.
    __array_ufunc__ = None

    @property
    def _parts(self) -> tuple[Any, ...]:
        """The arrays, in gradients SelectedRows, in an order of the class's own."""
        raise NotImplementedError

    def _with_parts(self, *parts: Any) -> Self:
        """The same layout with other parts."""
        raise NotImplementedError

    def _stand_in(self) -> jax.Array:
        """Binds the primitive of an array that stands for the table."""
        raise NotImplementedError

    def from_owners(self, ids: np.ndarray) -> np.ndarray:
        """`ids`, with -1 for each whose row no device requests from its owner."""
        return ids

    # -- read as an array --------------------------------------------------------

    def __array__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError(
            f"sparsejax: a {type(self).__name__} of shape {self.shape} was used where "
            f"an array is needed. Its rows lie on {self.num_shards} devices: read them "
            "with table[ids], sparsejax.lookup or sparsejax.embedding_bag. jnp.take "
            "and layers of flax read them inside of sparsejax.value_and_grad and of "
            "sparsejax.parallel.forward(fun). Or call .to_dense() for the whole table."
        )

    def __jax_array__(self) -> jax.Array:
        """In the trace of a program that will be walked, what stands for the table."""
        if not makes_views.value or not all(hasattr(x, "dtype") for x in self._parts):
            self.__array__()
        return self._stand_in()

    def __getitem__(self, ids: Any) -> Any:
        """Rows, as of an array; `table[...]` is the table."""
        if ids is Ellipsis:
            return self
        if any(isinstance(x, SelectedRows) for x in self._parts):
            self.__array__()
        is_array = _arguments.is_array(ids)
        if is_array and AxisType.Explicit in self.mesh.axis_types:
            # Of ids that are sharded JAX's gather does not know the result's sharding.
            call = f"sparsejax.parallel.{type(self).__name__}[ids]"
            ids = _arguments.as_ids(call, ids, self.height)
            height = _arguments.scalar(self.height, ids)
            ids = jnp.where(ids < 0, ids + height, ids)
            return read_row_table(self, call, ids, None, "clip")
        read = lambda table, ids: jnp.asarray(table)[ids]
        return (read if makes_views.value else forward(read))(self, ids)

    def __matmul__(self, other: Any) -> Any:
        return jnp.asarray(self) @ other

    def __rmatmul__(self, other: Any) -> Any:
        return other @ jnp.asarray(self)

    def __float__(self) -> NoReturn:
        self.__array__()

    def __int__(self) -> NoReturn:
        self.__array__()

    def __index__(self) -> NoReturn:
        self.__array__()

    def __complex__(self) -> NoReturn:
        self.__array__()

    def __getattr__(self, name: str) -> Any:
        # Python calls this only for attributes that are missing.
        if name not in _ARRAY_ONLY:
            kind = type(self).__name__
            raise AttributeError(f"'{kind}' object has no attribute {name!r}")
        try:
            return getattr(jnp.asarray(self), name)
        except TypeError as error:
            raise AttributeError(str(error)) from None

    # -- sums and scalings -------------------------------------------------------

    def __add__(self, other: Any) -> Any:
        if isinstance(other, _NUMBERS) and other == 0:
            return self  # so that Python's sum() works
        return self._apply(operator.add, "+", other)

    def __radd__(self, other: Any) -> Any:
        return self.__add__(other)

    def __neg__(self) -> Any:
        return self._with_parts(*map(operator.neg, self._parts))

    def __sub__(self, other: Any) -> Any:
        return self._apply(operator.sub, "-", other)

    def __rsub__(self, other: Any) -> Any:
        return -self + other

    def __mul__(self, other: Any) -> Any:
        return self._apply(operator.mul, "*", other)

    def __rmul__(self, other: Any) -> Any:
        return self.__mul__(other)

    def __truediv__(self, other: Any) -> Any:
        if isinstance(other, TableOverDevices):
            other.__rtruediv__(self)
        return self._apply(operator.truediv, "/", other)

    def __rtruediv__(self, other: Any) -> NoReturn:
        kind = type(self).__name__
        raise TypeError(
            f"{type(other).__name__} / {kind}: cannot divide by a {kind}, because its "
            "padding rows are zero. Use table.map(lambda v: ...) on its values, "
            "padding included."
        )

    def _apply(self, op: Any, symbol: str, other: Any) -> Any:
        """Applies `op` to the parts of two tables, or to those of one and a number."""
        kind = type(self).__name__
        if isinstance(other, type(self)):
            pairs = list(zip(self._parts, other._parts))
            static = [
                jax.tree.structure(table._with_parts(*(0 for _ in pairs)))
                for table in (self, other)
            ]
            shapes = [[np.shape(x) for x in table._parts] for table in (self, other)]
            if static[0] != static[1] or shapes[0] != shapes[1]:
                raise ValueError(
                    f"{kind} {symbol} {kind}: {self} and {other} differ in "
                    f"{self._differs_in}. Both must be tables, or both gradients, with "
                    "the same shape, layout and mesh."
                )
            return self._with_parts(*(op(a, b) for a, b in pairs))
        if not isinstance(other, (*_NUMBERS, np.generic, np.ndarray, jax.Array)):
            return NotImplemented
        if np.ndim(other):
            raise TypeError(
                f"{kind} {symbol} array of shape {np.shape(other)}: the array must be "
                "a scalar. Use table.map(lambda v: ...) on the values in order of "
                "position, or .to_dense()."
            )
        if symbol in "+-":
            # Padding rows, and rows that a gradient does not store, must stay zero.
            self.__array__()

        def scale(values):
            """The data's dtype wins, as in SelectedRows."""
            if isinstance(values, SelectedRows) or isinstance(other, _NUMBERS):
                return op(values, other)
            wide = indexing.promote(values.dtype, other.dtype)
            narrow = values.dtype if jnp.issubdtype(values.dtype, jnp.inexact) else wide
            return op(values.astype(wide), jnp.asarray(other).astype(wide)).astype(
                narrow
            )

        return self._with_parts(*map(scale, self._parts))


def refuse_stand_in(kind: str, height: int) -> NoReturn:
    """Raises the error of a program with a stand-in that is run without a walk."""
    raise TypeError(
        f"sparsejax: a program uses a {kind} of {height} rows as an array where its "
        "reads of rows cannot be found: in a function with a derivative of its own, in "
        "a while loop, in a jax.grad inside of the loss, or for each of several tables "
        "under vmap. Read rows there with sparsejax.lookup(table, ids)."
    )
