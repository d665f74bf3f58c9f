"""ArrayDataset, SimpleDataset: in-memory data sets of one or several columns."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sparsejax import _arguments
from sparsejax._arguments import ColumnLike, PyTree
from sparsejax.data import _arrow, _columns


class SimpleDataset:
    """A sequence of items.

    Args:
      data: a sequence with `len()` and indexing by int, like a list of `(ids, label)`.

    In a `DataLoader`, each item is a row of one or several columns: numbers and arrays
    of equal shape are stacked; lists, arrays of different lengths, and scipy rows
    become SegmentTensors.

    Raises:
      TypeError: `data` is not a sequence.

    Example:
      >>> import sparsejax as sj
      >>> dataset = sj.data.SimpleDataset([([7, 9], 1), ([8], 0), ([], 1)])
      >>> len(dataset), dataset[0], dataset[1:]
      (3, ([7, 9], 1), [([8], 0), ([], 1)])

    References:
      MXNet Gluon, `gluon.data.SimpleDataset`.
    """

    def __init__(self, data: Sequence[Any]):
        if not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
            raise TypeError(
                "SimpleDataset: data must be a sequence with len() and indexing, got "
                f"{_arguments.kind_of(data)}. Call list(...) of an iterable."
            )
        refuse_columns(data)
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, key: int | slice) -> Any:
        return self._data[_as_key(key, len(self))]

    def __repr__(self) -> str:
        return f"SimpleDataset({len(self)} rows)"


class ArrayDataset:
    """Columns of equal length: row i of the data set is row i of each column.

    Args:
      *columns: columns with n rows, or one dict of columns, or one data frame. A column
        is one of these:
        a NumPy or JAX array `[n, ...]`, possibly memory-mapped;
        a scipy sparse matrix `[n, C]`, whose rows are CSR matrices `[1, C]`;
        a SegmentTensor of n segments, possibly nested, whose rows are the elements of a
        segment;
        a list with a list or array of numbers for each row, of any lengths;
        a column of numbers, or of lists of numbers, of pandas, polars, pyarrow or
        Hugging Face datasets, which needs pyarrow.

    `dataset[i]` is row i: a tuple for several columns, a dict for a dict of columns.
    `dataset[a:b]` has the same structure, with a slice of each column.

    Raises:
      TypeError: a column has another type.
      ValueError: the columns have different numbers of rows, or there are no columns.

    Example:
      >>> import numpy as np, sparsejax as sj
      >>> baskets, labels = [[7, 9], [8], []], np.array([1.0, 0.0, 1.0])
      >>> dataset = sj.data.ArrayDataset(baskets, labels)
      >>> len(dataset), dataset[0]
      (3, (array([7, 9]), np.float64(1.0)))
      >>> sj.data.ArrayDataset({"basket": baskets, "label": labels})[1:]["basket"]
      [[8], []]

    References:
      MXNet Gluon, `gluon.data.ArrayDataset`.
    """

    def __init__(self, *columns: ColumnLike | PyTree):
        self._keys: list[Any] | None = None
        tables = [column for column in columns if _arrow.is_table(column)]
        if tables:
            if len(columns) > 1:
                raise TypeError(
                    "ArrayDataset: a dict of columns or a table must be the only "
                    f"argument, got {len(columns)}. Put all columns in the dict."
                )
            table = tables[0]
            named = table if isinstance(table, Mapping) else _arrow.columns_of(table)
            self._keys, columns = list(named), tuple(named.values())
        if not columns:
            raise ValueError("ArrayDataset: there must be at least one column.")
        self._single = self._keys is None and len(columns) == 1
        numbers = (f"column {i}" for i in range(len(columns)))
        names = list(map(repr, self._keys) if self._keys else numbers)
        self._names, self._columns = (
            names,
            list(map(_columns.as_column, columns, names)),
        )
        for name, column in zip(names, self._columns):
            if len(column) != len(self):
                raise ValueError(
                    "ArrayDataset: all columns must have the same number of rows, got "
                    f"{len(column)} for {name} and {len(self)} for {names[0]}."
                )

    def __len__(self) -> int:
        return len(self._columns[0])

    def __getitem__(self, key: int | slice) -> Any:
        key = _as_key(key, len(self))
        return self.join([_columns.get(column, key) for column in self._columns])

    def __repr__(self) -> str:
        kinds = {_columns.Array: "array", _columns.Ragged: "ragged"}
        shown = (f"{n}: {kinds[type(c)]}" for n, c in zip(self.names, self._columns))
        return f"ArrayDataset({len(self)} rows, {', '.join(shown)})"

    # -- for the loader ----------------------------------------------------------

    @property
    def columns(self) -> list[Any]:
        """The columns, in order."""
        return self._columns

    @property
    def names(self) -> list[str]:
        """The name of each column for messages: its key in quotes, or its number."""
        return self._names

    def join(self, parts: Sequence[Any]) -> Any:
        """Joins one part for each column into the structure of an item."""
        if self._keys is not None:
            return dict(zip(self._keys, parts))
        return parts[0] if self._single else tuple(parts)

    def split(self, item: PyTree) -> list[Any]:
        """Splits an item into one part for each column; the inverse of `join`."""
        if self._keys is not None:
            return [item[key] for key in self._keys]
        return [item] if self._single else list(item)


def refuse_columns(dataset: Any) -> None:
    """Raises a TypeError for columns, which are not a sequence of items."""
    if isinstance(dataset, tuple) and any(getattr(x, "shape", ()) for x in dataset):
        raise TypeError(
            "a data set must be a sequence of items, got a tuple of arrays. If they "
            "are columns, use ArrayDataset(x, y); if they are rows, pass a list."
        )
    if isinstance(dataset, Mapping) or hasattr(dataset, "indptr"):  # a scipy matrix
        raise TypeError(
            f"a data set must be a sequence of items, got "
            f"{_arguments.kind_of(dataset)}. Pass ArrayDataset(columns)."
        )


def as_array_dataset(dataset: Any) -> ArrayDataset:
    """Returns a data set as columns; reads and transposes a sequence of items."""
    if isinstance(dataset, ArrayDataset):
        return dataset
    dataset = dataset if isinstance(dataset, SimpleDataset) else SimpleDataset(dataset)
    items = [dataset[i] for i in range(len(dataset))]
    if not items:
        return ArrayDataset(np.zeros(0, np.float32))
    first = items[0]
    if not isinstance(first, (tuple, dict)):
        return ArrayDataset(_stack(items))
    keys = first.keys() if isinstance(first, dict) else range(len(first))
    for at, item in enumerate(items):
        same = type(item) is type(first) and len(item) == len(first)
        if not same or isinstance(item, dict) and item.keys() != keys:
            raise ValueError(
                "all items of a data set must be tuples of the same length or dicts "
                f"with the same keys, got {_arguments.show(first)} as item 0 and "
                f"{_arguments.show(item)} as item {at}."
            )
    columns = {key: _stack([item[key] for item in items]) for key in keys}
    if isinstance(first, dict):
        return ArrayDataset(columns)
    # ArrayDataset(x) has items without a tuple, also if the items were tuples of one.
    made = ArrayDataset(*columns.values())
    made._single = False
    return made


# ------------------------------------------------------------------ private


def _stack(rows: list[Any]) -> Any:
    """Returns rows as one column: stacks arrays of one shape, and scipy rows."""
    if all(hasattr(row, "tocsr") for row in rows):
        import scipy.sparse

        return scipy.sparse.vstack(rows, format="csr")
    arrays = all(hasattr(row, "shape") and hasattr(row, "dtype") for row in rows)
    if arrays and len({np.shape(row) for row in rows}) == 1:
        return np.stack([np.asarray(row) for row in rows])
    return [np.asarray(row) for row in rows] if arrays else rows


def _as_key(key: Any, n: int) -> int | slice:
    if isinstance(key, slice):
        return key
    place = operator.index(key)
    if not -n <= place < n:
        raise IndexError(f"row {place} is out of range for {n} rows.")
    return place % n
