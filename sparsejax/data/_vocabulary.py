"""Vocabulary: ids of the frequent words of columns, from a list of these words.

Id 0 is for missing and out-of-vocabulary (OOV) words.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sparsejax import _arguments
from sparsejax._arguments import ArrayLike, ColumnLike, PyTree
from sparsejax._files import Reader, Writer, as_path, replacing
from sparsejax.data import _arrow


# Distinct words of batches that wait to be counted together. A batch has nearly as many
# distinct words as the whole column, so each merge walks over all words.
_MAX_WAITING = 1 << 22

_FORMAT = "sparsejax vocabulary 1"
_HEADER = {
    "columns": [int],
    "names": [str],
    "integers": [bool],
    "sizes": {"*": {"words": int, "width": int}},
}


@dataclasses.dataclass(frozen=True, eq=False)
class Column:
    """The words of a column, or of columns that share a vocabulary.

    Args:
      sorted_words: bytes `[size - 1]`, ascending.
      ids: int32 `[size - 1]`, the id of each of these words, from 1.
      counts: int64 `[size]`, the number of occurrences of each id; entry 0 counts
        missing words and words that were not kept.
      is_integer: True if all words are integers, which `decode` returns.
    """

    sorted_words: np.ndarray
    ids: np.ndarray
    counts: np.ndarray
    is_integer: bool

    def __len__(self) -> int:
        """Returns the number of ids, including id 0."""
        return len(self.counts)

    def encode(self, words: _arrow.Words) -> np.ndarray:
        """Returns the ids of words, int32 `[n]`."""
        vocab = self.sorted_words
        lengths, _ = _arrow.lengths_and_bytes(words.distinct)
        per_word = np.zeros(len(lengths), np.int32)
        # A longer word is unknown, and NumPy would pad all other words to its length.
        is_short = lengths <= vocab.dtype.itemsize
        if len(vocab):
            keys = np.array(words.distinct.filter(is_short).to_pylist(), vocab.dtype)
            at = np.minimum(np.searchsorted(vocab, keys), len(vocab) - 1)
            per_word[is_short] = np.where(vocab[at] == keys, self.ids[at], np.int32(0))
        return per_word[words.places]

    def decode(self, ids: np.ndarray, missing: str | int | None) -> np.ndarray:
        """Returns the words of ids, in the shape of `ids`."""
        kinds = (int, np.integer) if self.is_integer else (str,)
        if missing is not None and not isinstance(missing, kinds):
            raise TypeError(
                f"missing must be {_arguments.kind_of(kinds[0]())}, like the words of "
                f"the column, got {_arguments.show(missing)}."
            )
        outside = (ids < 0) | (ids >= len(self))
        if outside.any():
            raise IndexError(
                f"ids must be from 0 to {len(self) - 1}, got {ids[outside].flat[0]}."
            )
        if self.is_integer and missing is None and not ids.all():
            raise ValueError(
                "id 0 is for missing and out-of-vocabulary words, and the words of "
                "this column are integers. Pass missing=, for example missing=-1."
            )
        distinct, places = np.unique(ids, return_inverse=True)
        words = self._by_id[distinct]
        if self.is_integer:
            decoded = _as_numbers([int(w or missing or 0) for w in words.tolist()])
        else:
            decoded = np.char.decode(words, "utf-8", "surrogateescape")
            if missing:
                decoded = np.where(distinct == 0, missing, decoded)
        return decoded[places].reshape(ids.shape)

    @functools.cached_property
    def _by_id(self) -> np.ndarray:
        """The words in the order of ids, after the empty word."""
        words = np.zeros(len(self), self.sorted_words.dtype)
        words[self.ids] = self.sorted_words
        return words


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Vocabulary:
    """Ids of words from a list: one id for each word, 1 for the most frequent word.

    Id 0 is for out-of-vocabulary (OOV) and missing words. `build` makes a vocabulary of
    the columns of a table, and `ids` returns the ids of another table. Each column has
    its own ids, except columns that share a vocabulary.

    Args:
      columns: the words of each column, by its name; `build` and `load` make them.

    Two vocabularies are equal if they have the same names, words and ids.

    Example:
      >>> import numpy as np, sparsejax as sj
      >>> table = {"user": np.array([7, 8, 7]), "item": ["tea", "jam", "tea"]}
      >>> vocabulary = sj.data.Vocabulary.build(table)
      >>> vocabulary
      Vocabulary(user: 3 ids, item: 3 ids)
      >>> vocabulary.ids({"item": ["jam", "tea", "new", None]})
      {'item': array([2, 1, 0, 0], dtype=int32)}
      >>> vocabulary.decode("item", [2, 1, 0]), vocabulary.decode("user", [1, 2])
      (array(['jam', 'tea', ''], dtype='<U3'), array([7, 8]))
      >>> vocabulary.words("item")  # word k is the word of id k, and of row k
      array(['', 'tea', 'jam'], dtype='<U3')

    Save the vocabulary with the model, which needs it:

      >>> import os, tempfile
      >>> path = os.path.join(tempfile.mkdtemp(), "vocabulary.npz")
      >>> vocabulary.save(path)
      >>> sj.data.Vocabulary.load(path) == vocabulary
      True
    """

    columns: Mapping[str, Column]

    @classmethod
    def build(
        cls,
        table: PyTree,
        columns: Sequence[str] | None = None,
        *,
        shared: bool | Sequence[Sequence[str]] = (),
        min_count: int | Mapping[str, int] = 1,
        max_size: int | None | Mapping[str, int | None] = None,
    ) -> Vocabulary:
        """Counts the words of columns, and keeps the frequent ones.

        Words are strings, bytes or integers. An integer is the same word as its decimal
        text. None, NaN, nulls and empty strings are missing. pyarrow is needed.

        Args:
          table: a dict of columns, a data frame, an object with `__arrow_c_stream__`,
            or an iterable of these, of which one batch at a time is in memory. A column
            has a word, or a list of words, in each row.
          columns: the names of the columns to read; None for all columns.
          shared: groups of columns that share a vocabulary, such as the two ends of an
            edge, `[["head", "tail"]]`; or True for one group.
          min_count: int, the smallest number of occurrences of a word that is kept; or
            a dict of ints for some of the columns, `{"item": 5}`.
          max_size: int, the largest number of ids of a column, including id 0; or a
            dict.

        Raises:
          ImportError: pyarrow is not installed.
          TypeError: `table` or a column has another type.
          ValueError: a column is missing; `shared`, `min_count` or `max_size` has other
            columns; a word has more than 1024 bytes.

        Example:
          >>> import sparsejax as sj
          >>> edges = {"head": ["ann", "bob"], "tail": ["bob", "cid"]}
          >>> people = sj.data.Vocabulary.build(edges, shared=[["head", "tail"]])
          >>> people, people.counts("head")
          (Vocabulary(head, tail: 4 ids), array([0, 2, 1, 1]))
          >>> people.ids(edges)
          {'head': array([2, 1], dtype=int32), 'tail': array([1, 3], dtype=int32)}
        """
        names: list[str] = []
        groups: list[list[str]] = []
        limits: list[tuple[int, int | None]] = []
        counters: dict[str, _Counter] = {}
        for batch in _arrow.batches(table):
            if not names:
                names = list(batch if columns is None else columns)
                groups = _as_groups(shared, names)
                least = _limits("min_count", min_count, 1, groups)
                most = _limits("max_size", max_size, None, groups)
                limits = list(zip(least, most))
                for group in groups:
                    counters.update(dict.fromkeys(group, _Counter()))
            for name, column in zip(names, _arrow.select(batch, names)):
                counters[name].add(_arrow.as_words(column, name))
        if not names:
            raise ValueError("Vocabulary.build: the table has no columns.")
        made: dict[str, Column] = {}
        for group, limit in zip(groups, limits):
            made.update(dict.fromkeys(group, counters[group[0]].column(*limit)))
        return cls({name: made[name] for name in names})

    @property
    def names(self) -> list[str]:
        """The names of the columns, in order."""
        return list(self.columns)

    def __eq__(self, other: Any) -> bool:
        if not isinstance(other, Vocabulary):
            return NotImplemented
        return self.names == other.names and all(
            np.array_equal(a.sorted_words, b.sorted_words)
            and np.array_equal(a.ids, b.ids)
            for a, b in zip(self.columns.values(), other.columns.values())
        )

    def __repr__(self) -> str:
        groups = [
            (", ".join(names), len(self.columns[names[0]])) for names in self._groups()
        ]
        # A comma separates the columns of a group, so groups need another sign.
        sign = "; " if len(groups) < len(self.columns) else ", "
        return f"Vocabulary({sign.join(f'{names}: {n} ids' for names, n in groups)})"

    def _groups(self) -> list[list[str]]:
        """Returns the columns that share their words."""
        groups: dict[int, list[str]] = {}
        for name, column in self.columns.items():
            groups.setdefault(id(column), []).append(name)
        return list(groups.values())

    def _column(self, column: int | str) -> Column:
        place = _arrow.place_of(column, self.names, len(self.columns))
        return list(self.columns.values())[place]

    # -------------------------------------------------------------- sizes and counts

    def sizes(self) -> list[int]:
        """Returns the number of ids of each column, including id 0.

        This is the number of rows of the column's table.
        """
        return list(map(len, self.columns.values()))

    def size(self, column: int | str) -> int:
        """Returns the number of ids of one column, including id 0.

        Args:
          column: the name of the column, or its position from 0.
        """
        return len(self._column(column))

    def counts(self, column: int | str) -> np.ndarray:
        """Returns the number of occurrences of each id in `build`, int64 `[size]`.

        Entry 0 counts missing words and words that were not kept. Columns that share a
        vocabulary are counted together. `sj.losses.NegativeSampler.from_counts` draws
        negatives by these counts.

        Args:
          column: the name of the column, or its position from 0.
        """
        return self._column(column).counts

    # -------------------------------------------------------------- words and ids

    def ids(self, table: PyTree) -> dict[str, Any]:
        """Returns the ids of the columns of a table; 0 for unknown and missing words.

        Args:
          table: as in `build`. Columns that the vocabulary does not have are ignored,
            and it may have more columns. An iterable has one batch at a time in
            memory, and the ids of all batches are returned together; if these do not
            fit into memory, call `ids(batch)` in a loop.

        Returns:
          A dict, by the names of the columns, for `ArrayDataset`: int32 `[n]`, or a
          SegmentTensor for a column of lists.

        Raises:
          TypeError: `table` or a column has another type.
          ValueError: the table has no column of the vocabulary.

        Example:
          >>> import sparsejax as sj
          >>> table = {"user": [7, 8], "tags": [["hot", "new"], []], "rating": [5, 1]}
          >>> vocabulary = sj.data.Vocabulary.build(table, ["user", "tags"])
          >>> ids = vocabulary.ids(table)
          >>> ids["user"], ids["tags"].to_lists()
          (array([1, 2], dtype=int32), [[1, 2], []])
        """
        encode = lambda name, words: self.columns[name].encode(words)
        return _arrow.ids_of_table(table, self.names, encode)

    def encode(self, column: int | str, words: ColumnLike) -> np.ndarray:
        """Returns the ids of words, int32 `[n]`; 0 for unknown and missing words.

        Args:
          column: the column of the words: its name, or its position from 0.
          words: a list or array `[n]` of strings, bytes or integers, or a column of
            pandas, polars, pyarrow or Hugging Face datasets.

        Raises:
          TypeError: `words` is not a column of strings, bytes or integers.
          ValueError: the vocabulary has no column of that name.
          IndexError: `column` is out of range.
        """
        return self._column(column).encode(_arrow.as_flat_words(words))

    def words(
        self, column: int | str, *, missing: str | int | None = None
    ) -> np.ndarray:
        """Returns all words of a column in the order of their ids, `[size]`.

        Entry k is the word of id k, so it is the word of row k of the column's table.
        Entry 0 stands for missing and out-of-vocabulary words.

        Args:
          column: the name of the column, or its position from 0.
          missing: entry 0. The default is "" for strings; a column of integers has no
            default.

        Returns:
          An array `[size]` of strings or integers, as `decode` returns them.

        Raises:
          TypeError: `missing` is not of the column's type.
          ValueError: the words are integers, and `missing` is not given.

        Example:
          >>> import numpy as np, sparsejax as sj
          >>> data = {"item": ["jam", "tea", "tea"], "user": [7, 8, 7]}
          >>> vocabulary = sj.data.Vocabulary.build(data)
          >>> vocabulary.words("item"), vocabulary.words("user", missing=-1)
          (array(['', 'tea', 'jam'], dtype='<U3'), array([-1,  7,  8]))
          >>> table = np.array([[0.0], [0.5], [0.25]])  # the trained rows
          >>> dict(zip(vocabulary.words("item")[1:].tolist(), table[1:].tolist()))
          {'tea': [0.5], 'jam': [0.25]}
        """
        words = self._column(column)
        return words.decode(np.arange(len(words)), missing)

    def decode(
        self, column: int | str, ids: ArrayLike, *, missing: str | int | None = None
    ) -> np.ndarray:
        """Returns the words of ids: strings, or integers for a column of integers.

        Args:
          column: the name of the column, or its position from 0.
          ids: integers, of any shape.
          missing: the result for id 0. The default is "" for strings; for integers,
            id 0 is an error by default.

        Returns:
          An array of the shape of `ids`, of `str` or int64. For words that int64 cannot
          hold it is uint64, or Python ints (dtype object) if uint64 cannot either.

        Raises:
          IndexError: an id is out of range.
          TypeError: `ids` are not integers, or `missing` is not of the column's type.
          ValueError: an id of a column of integers is 0, and `missing` is not given.

        Example:
          >>> import sparsejax as sj
          >>> vocabulary = sj.data.Vocabulary.build({"item": ["tea", "jam", "tea"]})
          >>> vocabulary.decode("item", [[1, 2], [0, 1]], missing="?")
          array([['tea', 'jam'],
                 ['?', 'tea']], dtype='<U3')
        """
        given = np.asarray(ids)
        if given.size and given.dtype.kind not in "iu":
            raise TypeError(f"ids must be integers, got {_arguments.show(ids)}.")
        return self._column(column).decode(given.astype(np.int64), missing)

    def align(
        self,
        words: ColumnLike,
        vectors: ArrayLike,
        *,
        column: int | str | None = None,
        table: ArrayLike | None = None,
    ) -> np.ndarray:
        """Returns a table of pretrained vectors in the order of the ids.

        Row `encode(column, [w])[0]` is the vector of w. If a word occurs twice, its
        first vector is used. gensim's `KeyedVectors` reads the files of GloVe, word2vec
        and fastText.

        Args:
          words: `[n]`, as in `encode`.
          vectors: floats `[n, D]`; of a memory map, only the used rows are read.
          column: the name of the column, or its position from 0. May be omitted if all
            columns share one vocabulary.
          table: floats `[size, D]`, the rows of words without a vector, such as initial
            weights; zeros by default. The table is copied.

        Returns:
          NumPy array `[size, D]`, of the dtype of `vectors`.

        Raises:
          TypeError, ValueError: as `encode`; or shapes do not match; or the columns
            have different words, and `column` is omitted.

        Example:
          >>> import numpy as np, sparsejax as sj
          >>> vocabulary = sj.data.Vocabulary.build({"word": ["tea", "jam", "tea"]})
          >>> vocabulary.align(["jam", "rye", "tea"], np.array([[1.0], [2.0], [3.0]]))
          array([[0.],
                 [3.],
                 [1.]])
        """
        if column is None and len(self._groups()) > 1:
            raise ValueError(
                "Vocabulary.align: the columns have different words. Pass column=, one "
                f"of {self.names}."
            )
        column = 0 if column is None else column
        ids = self.encode(column, words)
        vectors = vectors if isinstance(vectors, np.ndarray) else np.asarray(vectors)
        if vectors.ndim != 2 or len(vectors) != len(ids):
            raise ValueError(
                f"Vocabulary.align: vectors must have shape [{len(ids)}, D], one row "
                f"for each word, got {list(vectors.shape)}."
            )
        shape = self.size(column), vectors.shape[1]
        given = np.zeros(shape) if table is None else table
        rows = np.array(given, vectors.dtype)
        if rows.shape != shape:
            raise ValueError(
                f"Vocabulary.align: table must have shape {list(shape)}, got "
                f"{list(rows.shape)}."
            )
        distinct, first = np.unique(ids, return_index=True)
        is_known = distinct > 0
        rows[distinct[is_known]] = vectors[first[is_known]]
        return rows

    # -------------------------------------------------------------- files

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the vocabulary to a file. Keep the file with the model.

        Args:
          path: the path of an `.npz` file, which NumPy reads. An old file is replaced
            when the new one is complete. `header.json` in it has the "names" of the
            columns. Entry k of "columns" is the first column that shares the vocabulary
            of column k; each of these first columns has arrays "words k", "ids k" and
            "counts k".

        Raises:
          TypeError: `path` is not a path.
          OSError: the file cannot be written.
        """
        path = as_path("sparsejax.data.Vocabulary.save", path)
        columns = list(self.columns.values())
        first = list(map(columns.index, columns))  # `Column` compares by identity
        header = {
            "columns": first,
            "names": self.names,
            "integers": [column.is_integer for column in columns],
            "sizes": {
                k: {"words": len(words), "width": words.dtype.itemsize}
                for k, words in ((k, columns[k].sorted_words) for k in set(first))
            },
        }
        with replacing(path) as file:
            with contextlib.closing(Writer(file, _FORMAT, header)) as writer:
                for k in set(first):
                    writer.array(f"words {k}", columns[k].sorted_words)
                    writer.array(f"ids {k}", columns[k].ids)
                    writer.array(f"counts {k}", columns[k].counts)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Vocabulary:
        """Reads a file that `save` wrote.

        Args:
          path: the path of the file.

        Raises:
          TypeError: `path` is not a path.
          ValueError: the file is not a vocabulary, or is damaged.
          OSError: the file cannot be read.
        """
        path = as_path("sparsejax.data.Vocabulary.load", path)
        with Reader(path, _FORMAT, _HEADER) as reader:
            specs = {}
            for k, size in reader.header["sizes"].items():
                specs[f"words {k}"] = (size["words"],), f"S{size['width']}"
                specs[f"ids {k}"] = (size["words"],), np.int32
                specs[f"counts {k}"] = (size["words"] + 1,), np.int64
            reader.expect(specs)
            arrays = {name: reader.array(name, spec) for name, spec in specs.items()}
            with reader.checked():
                return cls(_as_columns(reader.header, arrays))


# ------------------------------------------------------------------ private


def _as_numbers(numbers: list[int]) -> np.ndarray:
    """Returns ints as int64, uint64 or objects: hashes may be above 2^63."""
    for dtype in (np.int64, np.uint64):
        try:
            return np.array(numbers, dtype)
        except OverflowError:
            continue
    return np.array(numbers, object)


def _as_columns(header: Any, arrays: Mapping[str, np.ndarray]) -> dict[str, Column]:
    """Returns the columns of a file, or raises a ValueError if it has none."""
    first, names, integers, sizes = (header[x] for x in _HEADER)
    has_all = sizes.keys() == set(map(str, first))
    if not has_all or not len(first) == len(set(names)) == len(integers):
        raise ValueError(f"it has columns with the names {names[:8]}")
    columns: dict[int, Column] = {}
    for k in set(first):
        words, ids, counts = (arrays[f"{x} {k}"] for x in ("words", "ids", "counts"))
        is_valid = (
            first[k : k + 1] == [k]
            and bool((words[1:] > words[:-1]).all())
            and np.array_equal(np.sort(ids), np.arange(1, len(words) + 1))
            and counts.min() >= 0
        )
        if not is_valid:
            raise ValueError(f"words, ids and counts of column {k} do not match")
        if integers[k]:
            list(map(int, words.tolist()))  # raises a ValueError for other words
        columns[k] = Column(words, ids, counts, integers[k])
    return {name: columns[k] for name, k in zip(names, first)}


def _as_groups(
    shared: bool | Sequence[Sequence[str]], names: list[str]
) -> list[list[str]]:
    """Returns the names of the columns of each vocabulary."""
    if isinstance(shared, bool):
        return [names] if shared else [[name] for name in names]
    groups = [list(group) for group in shared if not isinstance(group, str)]
    given = [name for group in groups for name in group]
    if len(groups) < len(shared) or {*given} - {*names} or len({*given}) < len(given):
        raise ValueError(
            f"shared must be True or a list of lists with each of the columns {names} "
            f"at most once, for example [['head', 'tail']], got {shared}."
        )
    return groups + [[name] for name in names if name not in given]


def _limits(
    argument: str, given: Any, default: int | None, groups: list[list[str]]
) -> list[Any]:
    """Returns `min_count` or `max_size` of each group of columns."""
    names = [name for group in groups for name in group]
    is_dict = isinstance(given, Mapping)
    by_name: dict[str, Any] = dict(given) if is_dict else dict.fromkeys(names, given)
    for name, limit in by_name.items():
        by_name[name] = limit if limit is default else operator.index(limit)
    are_valid = all(limit is default or limit > 0 for limit in by_name.values())
    of_groups = [
        {by_name[name] for name in group if name in by_name} or {default}
        for group in groups
    ]
    if by_name.keys() - {*names} or not are_valid or any(len(x) > 1 for x in of_groups):
        raise ValueError(
            f"{argument} must be a positive int, or a dict of these for some of the "
            f"columns {names}, the same for columns that share a vocabulary, got "
            f"{given}."
        )
    return [limit for (limit,) in of_groups]


class _Counter:
    """Counts words batch by batch; needs memory for each distinct word."""

    def __init__(self) -> None:
        self._tables: list[Any] = []  # of words and their counts
        self._waiting = 0
        self._are_integers: set[bool] = set()

    def add(self, words: _arrow.Words) -> None:
        pa = _arrow.import_pyarrow()
        counts = np.bincount(words.places, minlength=len(words.distinct))
        # The last word stands for missing values, which have no type.
        if counts[:-1].any():
            self._are_integers.add(words.is_integer)
        self._tables.append(pa.table({"word": words.distinct, "count": counts}))
        self._waiting += len(counts)
        if self._waiting > _MAX_WAITING:
            self._merge()
            self._waiting = 0

    def _merge(self) -> Any:
        # An integer and the same integer as text are one word.
        groups = _arrow.import_pyarrow().concat_tables(self._tables).group_by("word")
        merged = groups.aggregate([("count", "sum")]).select(["word", "count_sum"])
        self._tables = [merged.rename_columns(["word", "count"])]
        return self._tables[0]

    def column(self, min_count: int, max_size: int | None) -> Column:
        """Returns the words that are in these limits.

        Ids are in the order of falling counts; equal counts in the order of bytes.
        """
        table = self._merge()
        counts = table["count"].to_numpy().astype(np.int64)
        is_word = _arrow.import_pyarrow().compute.not_equal(table["word"], b"")
        is_kept = is_word.to_numpy() & (counts >= min_count)
        words = np.array(table["word"].filter(is_kept).to_pylist(), "S")
        order = np.lexsort((words, -counts[is_kept]))
        order = order if max_size is None else order[: max_size - 1]
        by_id = np.array(words[order].tolist(), "S")  # the narrowest dtype
        kept = counts[is_kept][order]
        places = np.argsort(by_id)
        return Column(
            sorted_words=by_id[places],
            ids=(places + 1).astype(np.int32),
            counts=np.append(counts.sum() - kept.sum(), kept),
            is_integer=self._are_integers == {True},
        )
