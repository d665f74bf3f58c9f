"""Vocabulary: ids of the frequent words of columns, from a list of these words.

Id 0 is for missing and out-of-vocabulary (OOV) words.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from sparsejax import _arguments
from sparsejax._arguments import ArrayLike, ColumnLike, Progress, PyTree
from sparsejax._files import ArraySpec, as_path, read_npz, replacing
from sparsejax.data import _arrow, _sources
from sparsejax.data._selection import as_selection, place_of


# Distinct words of batches that wait to be counted together. A batch has nearly as many
# distinct words as the whole column, so each merge walks over all words.
_MAX_WAITING = 1 << 22

# The arrays of a file by name. Arrays "words k" and "ids k" must exist for each column
# k that "columns" refers to.
_ARRAYS = {
    "columns": ArraySpec("i", (1,)),
    "names": ArraySpec("U", (1,)),
    "integers": ArraySpec("b", (1,)),
    r"words \d{1,5}": ArraySpec("S", (1,), required=False),
    r"ids \d{1,5}": ArraySpec("i", (1,), required=False),
    r"counts \d{1,5}": ArraySpec("i", (1,), required=False),
}


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Vocabulary:
    """Ids of words from a list: one id for each word, 1 for the most frequent word.

    Id 0 is for out-of-vocabulary (OOV) and missing words. `build` makes a vocabulary of
    a file, a data frame or columns; the same words give the same ids in all of them.
    Each column has its own ids, except columns that share a vocabulary.

    Args:
      sorted_words: for each column, an array of its words, bytes in ascending order.
        `words` is the method that returns them in the order of their ids.
      ids: for each column, the ids of these sorted words, int32, starting from 1.
      names: the names of the columns, or empty. `read_ids` refuses columns with other
        names.
      frequencies: for each column, the number of occurrences of each id, int64
        `[size]`; entry 0 counts missing words and words that are not kept. Or empty.
      integers: for each column, True if its words are integers, which `decode` returns.

    Two vocabularies are equal if they have the same names, words and ids.

    Example:
      >>> import numpy as np, sparsejax as sj
      >>> users, items = np.array([7, 8, 7]), ["tea", "jam", "tea"]
      >>> vocabulary = sj.data.Vocabulary.build({"user": users, "item": items})
      >>> vocabulary
      Vocabulary(user: 3 ids, item: 3 ids)
      >>> vocabulary.encode("item", ["jam", "tea", "new", None])
      array([2, 1, 0, 0], dtype=int32)
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

    sorted_words: Sequence[np.ndarray]
    ids: Sequence[np.ndarray]
    names: Sequence[str] = ()
    frequencies: Sequence[np.ndarray] = ()
    integers: Sequence[bool] = ()

    @classmethod
    def build(
        cls,
        source: str | os.PathLike[str] | Iterable[Any] | PyTree,
        columns: Mapping[str, Any] | None = None,
        *,
        shared: bool | Sequence[Any] | Mapping[str, Any] = (),
        min_count: int | Mapping[Any, int] = 1,
        max_size: int | None | Mapping[Any, int | None] = None,
        separator: str = "auto",
        header: bool = False,
        quotes: bool = True,
        progress: Progress = False,
    ) -> Vocabulary:
        """Counts the words of columns, and keeps the frequent ones.

        Words are strings, bytes or integers. An integer is the same word as its decimal
        text. None, NaN, nulls and empty strings are missing. pyarrow is needed.

        Args:
          source: files, a data frame, an Arrow table or a dict of columns, as in
            `read_ids`. The columns of a dict may differ in length.
          columns: a dict with "ids", the columns of words by name or by position, as in
            `read_ids`. If omitted, all columns are words: `df[["user", "item"]]`.
          shared: groups of columns that share a vocabulary, such as the two ends of an
            edge: a list of lists of names, `[["head", "tail"]]`, or of positions in
            "ids" for columns without names, `[[0, 2]]`; or True for one group.
          min_count: int, the smallest number of occurrences of a word that is kept; or
            a dict of ints for some of the columns, `{"item": 5}`.
          max_size: int, the largest number of ids of a column, including id 0; or a
            dict.
          separator, header, quotes: of CSV files, as in `read_ids`.
          progress: True for a progress bar on stderr, or a function of (bytes read,
            bytes of all files).

        Raises:
          ImportError: pyarrow is not installed.
          TypeError: `source` or a column has another type.
          ValueError: there are no columns; `shared` names an unknown column, or one
            twice; a word has more than 1024 bytes; a file has a malformed row.
          OSError: a file cannot be read, or is damaged.

        Example:
          >>> import sparsejax as sj
          >>> edges = {"head": ["ann", "bob"], "tail": ["bob", "cid"]}
          >>> people = sj.data.Vocabulary.build(edges, shared=[["head", "tail"]])
          >>> people, people.counts("head")
          (Vocabulary(head, tail: 4 ids), array([0, 2, 1, 1]))
          >>> people.encode_columns(edges)
          {'head': array([2, 1], dtype=int32), 'tail': array([1, 3], dtype=int32)}
        """
        call = "sparsejax.data.Vocabulary.build"
        selection = as_selection(call, columns)
        header = _arguments.check_bool(call, "header", header) or selection.needs_names
        text = _sources.check_text(call, separator, header, quotes)
        sources = _sources.check_source(call, source)
        names: list[str] = []
        groups: list[list[int]] | None = None
        limits: list[tuple[int, int | None]] = []
        counts: list[_Counts] = []
        for table in _sources.open_tables(call, sources, text, progress):
            found = selection.find(table)["ids"]
            own = selection.names(table)
            if groups is None:
                names = own
                known = names or list(range(len(found)))
                groups = _as_groups(call, shared, known)
                limits = _as_limits(call, min_count, max_size, known, groups)
                counts = [_Counts() for _ in groups]
            elif own != names:
                raise ValueError(
                    f"{call}: all files must have the same columns, got {own} in "
                    f"{table.name} and {names} in the first."
                )
            for batch in table.read(found, ()):
                for group, part in zip(groups, counts):
                    for place in group:
                        name = found[place]
                        where = table.describe(name)
                        part.add(_arrow.as_column(call, batch[name], where))
        kept: dict[int, Any] = {}
        for group, limit, part in zip(groups or [], limits, counts, strict=True):
            words, totals, is_integer = part.total()
            ranked = _ranked(words, totals, *limit)
            kept.update((place, (*ranked, is_integer)) for place in group)
        ordered = [kept[place] for place in sorted(kept)]
        words, ids, frequencies, integers = ([x[k] for x in ordered] for k in range(4))
        return cls(words, ids, names, frequencies, integers)

    def __eq__(self, other: Any) -> bool:
        if not isinstance(other, Vocabulary):
            return NotImplemented
        same = lambda a, b: len(a) == len(b) and all(map(np.array_equal, a, b))
        return (
            list(self.names) == list(other.names)
            and same(self.sorted_words, other.sorted_words)
            and same(self.ids, other.ids)
        )

    def __repr__(self) -> str:
        names = self.names or range(len(self.sorted_words))
        columns: dict[int, list[str]] = {}
        for name, words in zip(names, self.sorted_words):
            columns.setdefault(id(words), []).append(str(name))
        size = {id(words): len(words) + 1 for words in self.sorted_words}
        shown = [
            f"{_shortened(own, ', ')}: {size[k]} ids" for k, own in columns.items()
        ]
        # A comma separates the columns of a group, so groups need another sign.
        several = any(len(own) > 1 for own in columns.values())
        return f"Vocabulary({_shortened(shown, '; ' if several else ', ')})"

    # -------------------------------------------------------------- sizes and counts

    def sizes(self, num_columns: int | None = None) -> list[int]:
        """Returns the number of ids of each column, including id 0.

        This is the number of rows of the column's table.

        Args:
          num_columns: int, the expected number of columns; None for any number.

        Raises:
          ValueError: the vocabulary has another number of columns.
        """
        own = len(self.sorted_words)
        if num_columns not in (None, own):
            named = f" {list(self.names)}" if self.names else ""
            raise ValueError(
                f"sparsejax.data.Vocabulary: the vocabulary has {own} columns{named}, "
                f"but there are {num_columns} columns of words. For a single column "
                "call vocabulary.encode(column, words)."
            )
        return [len(words) + 1 for words in self.sorted_words]

    def size(self, column: int | str) -> int:
        """Returns the number of ids of one column, including id 0.

        Args:
          column: the name of the column, or its position from 0.
        """
        return len(self.sorted_words[self._place("size", column)]) + 1

    def counts(self, column: int | str) -> np.ndarray:
        """Returns the number of occurrences of each id in `build`, int64 `[size]`.

        Entry 0 counts missing words and words that were not kept. Columns that share a
        vocabulary are counted together. `sj.losses.NegativeSampler.from_counts` draws
        negatives by these counts.

        Args:
          column: the name of the column, or its position from 0.

        Raises:
          ValueError: the vocabulary was made of words and ids, and has no counts.
        """
        place = self._place("counts", column)
        if not self.frequencies:
            raise ValueError(
                "sparsejax.data.Vocabulary.counts: this vocabulary was made without "
                "counts. Make it with build."
            )
        return self.frequencies[place]

    def prune(
        self,
        *,
        min_count: int | Mapping[Any, int] = 1,
        max_size: int | None | Mapping[Any, int | None] = None,
    ) -> Vocabulary:
        """Returns a vocabulary of fewer words, which keep their ids.

        So `counts` can decide the limits, without counting the data again.

        Args:
          min_count, max_size: as in `build`.

        Returns:
          The vocabulary that `build` makes with these limits.

        Raises:
          ValueError: the vocabulary was made of words and ids, and has no counts.

        Example:
          >>> import sparsejax as sj
          >>> items = ["tea", "jam", "tea", "rye", "jam", "tea"]
          >>> found = sj.data.Vocabulary.build({"item": items})
          >>> found.counts("item")
          array([0, 3, 2, 1])
          >>> common = found.prune(min_count=2)
          >>> common, common.counts("item")
          (Vocabulary(item: 3 ids), array([1, 3, 2]))
        """
        call = "sparsejax.data.Vocabulary.prune"
        if not self.frequencies:
            raise ValueError(
                f"{call}: this vocabulary was made without counts. Make it with build."
            )
        columns: dict[int, list[int]] = {}
        for place, words in enumerate(self.sorted_words):
            columns.setdefault(id(words), []).append(place)
        groups = list(columns.values())
        names = list(self.names) or list(range(len(self.sorted_words)))
        limits = _as_limits(call, min_count, max_size, names, groups)
        found: dict[int, Any] = {}
        for group, (least, largest) in zip(groups, limits):
            words, ids = self.sorted_words[group[0]], self.ids[group[0]]
            counts = self.frequencies[group[0]]
            size = int(np.sum(counts[1:] >= least)) + 1  # counts fall with the id
            size = size if largest is None else min(size, largest)
            kept = ids < size
            frequency = np.append(counts[0] + counts[size:].sum(), counts[1:size])
            pruned = _narrow(words[kept]), ids[kept], frequency
            found.update((place, pruned) for place in group)
        words, ids, counts = ([found[k][x] for k in sorted(found)] for x in range(3))
        return Vocabulary(words, ids, self.names, counts, self.integers)

    # -------------------------------------------------------------- words and ids

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
        place = self._place("encode", column)
        call = "sparsejax.data.Vocabulary.encode"
        return self._ids_of(place, _arrow.as_column(call, words))

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
          >>> found = sj.data.Vocabulary.build(data)
          >>> found.words("item"), found.words("user", missing=-1)
          (array(['', 'tea', 'jam'], dtype='<U3'), array([-1,  7,  8]))
          >>> table = np.array([[0.0], [0.5], [0.25]])  # the trained rows
          >>> dict(zip(found.words("item")[1:].tolist(), table[1:].tolist()))
          {'tea': [0.5], 'jam': [0.25]}
        """
        place = self._place("words", column)
        ids = np.arange(len(self.sorted_words[place]) + 1)
        return self._words_of("words", place, ids, missing)

    def encode_columns(self, columns: ColumnLike | PyTree) -> dict[str, np.ndarray]:
        """Returns the ids of several columns by name, for `ArrayDataset`.

        Args:
          columns: a dict of columns, a data frame or an Arrow table. The vocabulary
            must have all of these columns, and may have more.

        Returns:
          A dict of int32 `[n]`.

        Raises:
          TypeError: as `build`.
          ValueError: the vocabulary lacks one of the columns.

        Example:
          >>> import sparsejax as sj
          >>> data = {"user": [7, 8], "item": ["tea", "jam"]}
          >>> vocabulary = sj.data.Vocabulary.build(data)
          >>> vocabulary.encode_columns({"item": ["jam", "tea"]})
          {'item': array([1, 2], dtype=int32)}
        """
        call = "sparsejax.data.Vocabulary.encode_columns"
        if not isinstance(columns, Mapping) and not _arrow.is_table(columns):
            raise _arguments.wrong_type(
                call,
                "columns",
                "a dict of columns, a data frame or an Arrow table",
                _arguments.kind_of(columns),
            )
        found = _sources.columns_of(call, columns)
        places = {name: self._place("encode_columns", name) for name in found}
        return {
            name: self._ids_of(
                places[name], _arrow.as_column(call, x, f"column {name!r}")
            )
            for name, x in found.items()
        }

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
          >>> found = sj.data.Vocabulary.build({"item": ["tea", "jam", "tea"]})
          >>> found.decode("item", [[1, 2], [0, 1]], missing="?")
          array([['tea', 'jam'],
                 ['?', 'tea']], dtype='<U3')
        """
        place = self._place("decode", column)
        ids = np.asarray(
            _arguments.as_integers("sparsejax.data.Vocabulary.decode", ids)
        )
        return self._words_of("decode", place, ids, missing)

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
          >>> found = sj.data.Vocabulary.build({"word": ["tea", "jam", "tea"]})
          >>> found.align(["jam", "rye", "tea"], np.array([[1.0], [2.0], [3.0]]))
          array([[0.],
                 [3.],
                 [1.]])
        """
        call = "sparsejax.data.Vocabulary.align"
        if column is None:
            if any(own is not self.sorted_words[0] for own in self.sorted_words):
                raise ValueError(
                    f"{call}: the columns have different words. Pass column=, one of "
                    f"{list(self.names or range(len(self.sorted_words)))}."
                )
            column = 0
        place = self._place("align", column)
        ids = self._ids_of(place, _arrow.as_column(call, words))
        if not isinstance(vectors, np.ndarray):
            vectors = np.asarray(vectors)
        if vectors.ndim != 2 or len(vectors) != len(ids):
            raise ValueError(
                f"{call}: vectors must have shape [{len(ids)}, D], one row for each of "
                f"the words, got {list(vectors.shape)}."
            )
        shape = len(self.sorted_words[place]) + 1, vectors.shape[1]
        if table is None:
            out = np.zeros(shape, vectors.dtype)
        else:
            out = np.array(table, vectors.dtype)
            if out.shape != shape:
                raise ValueError(
                    f"{call}: table must have shape {list(shape)}, got "
                    f"{list(out.shape)}."
                )
        found, first = np.unique(ids, return_index=True)
        known = found > 0
        out[found[known]] = vectors[first[known]]
        return out

    # -------------------------------------------------------------- files

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the vocabulary to a file. Keep the file with the model.

        Args:
          path: the path of an `.npz` file. An old file is replaced when the new one is
            complete. Entry k of the array "columns" is the first column that shares the
            vocabulary of column k. Each of these first columns has arrays "words k",
            "ids k" and, if there are counts, "counts k". The arrays "names" and
            "integers" have an entry for each column.

        Raises:
          TypeError: `path` is not a path.
          OSError: the file cannot be written.
        """
        path = as_path("sparsejax.data.Vocabulary.save", path)
        first = [
            next(j for j, own in enumerate(self.sorted_words) if own is words)
            for words in self.sorted_words
        ]
        arrays: dict[str, np.ndarray] = {"columns": np.array(first, np.int64)}
        for k in sorted(set(first)):
            arrays[f"words {k}"] = self.sorted_words[k]
            arrays[f"ids {k}"] = self.ids[k]
            if self.frequencies:
                arrays[f"counts {k}"] = self.frequencies[k]
        arrays["names"] = np.array(self.names, np.str_)
        arrays["integers"] = np.array(self.integers, np.bool_)
        with replacing(path) as file:
            np.savez(file, **arrays)  # pyright: ignore[reportArgumentType]

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
        call = "sparsejax.data.Vocabulary.load"
        kind = "a file that Vocabulary.save wrote"
        path = as_path(call, path)
        found = read_npz(call, path, kind, _ARRAYS)
        try:
            _check_columns(found)
        except ValueError as e:
            raise ValueError(f"{call}: {path} is not {kind}: {e}.") from None
        columns = found["columns"].tolist()
        words, ids = ([found[f"{x} {k}"] for k in columns] for x in ("words", "ids"))
        is_counted = any(name.startswith("counts ") for name in found)
        counts = [found[f"counts {k}"] for k in columns] if is_counted else ()
        names, integers = found["names"].tolist(), found["integers"].tolist()
        return cls(words, ids, names, counts, integers)

    # -------------------------------------------------------------- private

    def _place(self, method: str, column: int | str) -> int:
        call = f"sparsejax.data.Vocabulary.{method}"
        return place_of(call, column, self.names, len(self.sorted_words))

    def _ids_of(self, place: int, words: _arrow.Column) -> np.ndarray:
        """Returns the ids of a column of words, int32 `[n]`."""
        known, ids = self.sorted_words[place], self.ids[place]
        lengths, _ = _arrow.lengths_and_bytes(words.words)
        per_word = np.zeros(len(lengths), np.int32)
        # A longer word is unknown, and NumPy would pad all other words to its length.
        is_short = lengths <= known.dtype.itemsize
        if len(known):
            short = words.words.filter(is_short).to_pylist()
            keys = np.array(short, known.dtype)
            at = np.minimum(np.searchsorted(known, keys), len(known) - 1)
            per_word[is_short] = np.where(known[at] == keys, ids[at], np.int32(0))
        return per_word[words.rows]

    def _words_of(
        self, method: str, place: int, ids: np.ndarray, missing: str | int | None
    ) -> np.ndarray:
        """Returns the words of ids, in the shape of `ids`."""
        call = f"sparsejax.data.Vocabulary.{method}"
        is_integer = bool(self.integers) and bool(self.integers[place])
        kinds = (int, np.integer) if is_integer else (str,)
        if missing is not None and not isinstance(missing, kinds):
            raise TypeError(
                f"{call}: missing must be {_arguments.kind_of(kinds[0]())}, like the "
                f"words of the column, got {_arguments.show(missing)}."
            )
        size = len(self.sorted_words[place]) + 1
        outside = (ids < 0) | (ids >= size)
        if outside.any():
            raise IndexError(
                f"{call}: ids must be from 0 to {size - 1}, got {ids[outside].flat[0]}."
            )
        if is_integer and missing is None and not ids.all():
            raise ValueError(
                f"{call}: id 0 stands for missing and out-of-vocabulary words, but the "
                "words of this column are integers. Pass missing=, for example "
                "missing=-1."
            )
        distinct, rows = np.unique(ids, return_inverse=True)
        words = self._words_by_id[place][distinct]
        if is_integer:
            other = int(missing or 0)
            numbers = [int(word) if word else other for word in words.tolist()]
            # Hashed ids may be above 2^63, next to negative ones.
            lowest, highest = min(numbers, default=0), max(numbers, default=0)
            limits = map(np.iinfo, (np.int64, np.uint64))
            fits = (x.dtype for x in limits if x.min <= lowest and highest <= x.max)
            found = np.array(numbers, next(fits, object))
        else:
            found = _arrow.decode(words)
            if missing:
                found = np.where(distinct == 0, missing, found)
        return found[rows].reshape(ids.shape)

    @functools.cached_property
    def _words_by_id(self) -> list[np.ndarray]:
        """The words of each column in the order of ids, after the empty word."""
        out = []
        for words, ids in zip(self.sorted_words, self.ids):
            out.append(np.zeros(len(words) + 1, words.dtype))
            out[-1][ids] = words
        return out

    def __getstate__(self) -> dict[str, Any]:
        return {k: x for k, x in self.__dict__.items() if k != "_words_by_id"}


# ------------------------------------------------------------------ private


def _check_columns(found: dict[str, np.ndarray]) -> None:
    """Raises a ValueError if the arrays of a file do not form a vocabulary."""
    columns = found["columns"].tolist()
    count = len(columns)
    kinds = ["words", "ids"]
    kinds += ["counts"] if any(name.startswith("counts ") for name in found) else []
    expected = {f"{kind} {k}" for kind in kinds for k in set(columns)}
    if found.keys() != expected | {"columns", "names", "integers"}:
        raise ValueError(
            f"its columns {columns[:8]} do not match its arrays "
            f"{', '.join(sorted(found)[:8])}"
        )
    for name in ("names", "integers"):
        if len(found[name]) not in (0, count):
            raise ValueError(f"it has {len(found[name])} {name} for {count} columns")
    for k in sorted(set(columns)):
        words, ids = found[f"words {k}"], found[f"ids {k}"]
        if not 0 <= k < count or columns[k] != k:
            raise ValueError(f"its columns {columns[:8]} share an unknown column")
        if len(words) != len(ids):
            raise ValueError(f"column {k} has {len(words)} words and {len(ids)} ids")
        if (words[1:] <= words[:-1]).any():
            raise ValueError(f"the words of column {k} are not in ascending order")
        if len(ids) and not 1 <= ids.min() <= ids.max() <= len(words):
            raise ValueError(f"the ids of column {k} are not from 1 to {len(words)}")
        counts = found.get(f"counts {k}", np.zeros(len(words) + 1))
        if len(counts) != len(words) + 1 or counts.min() < 0:
            raise ValueError(f"the counts of column {k} do not match its words")
        found[f"ids {k}"] = ids.astype(np.int32)
    for k, is_integer in zip(columns, found["integers"]):
        if is_integer and not _are_integers(found[f"words {k}"]):
            raise ValueError(f"the words of column {k} are not integers, but marked so")


def _are_integers(words: np.ndarray) -> bool:
    for dtype in (np.int64, np.uint64):
        try:
            words.astype(dtype)
            return True
        except (OverflowError, ValueError):
            continue
    return False


def _as_limits(
    call: str, min_count: Any, max_size: Any, names: list[Any], groups: list[list[int]]
) -> list[tuple[int, int | None]]:
    """Returns `min_count` and `max_size` of each group of columns."""
    counts = _per_group(call, "min_count", min_count, 1, names, groups)
    sizes = _per_group(call, "max_size", max_size, None, names, groups)
    return list(zip(counts, sizes))


def _per_group(
    call: str,
    argument: str,
    given: Any,
    default: int | None,
    names: list[Any],
    groups: list[list[int]],
) -> list[Any]:
    """Returns for each group the value of an argument, an int or a dict by column."""
    own = dict(given if isinstance(given, Mapping) else dict.fromkeys(names, given))
    for name, limit in own.items():
        if name not in names:
            raise ValueError(
                f"{call}: {argument} must have only columns of {names}, got {name!r}."
            )
        if limit is not None or default is not None:
            own[name] = _arguments.static_int(call, argument, limit, 1)
    found = []
    for group in groups:
        limits = {own[names[k]] for k in group if names[k] in own}
        if len(limits) > 1:
            raise ValueError(
                f"{call}: {argument} must be the same for the columns "
                f"{[names[k] for k in group]}, which share a vocabulary, got {given!r}."
            )
        found.append(limits.pop() if limits else default)
    return found


def _as_groups(call: str, shared: Any, names: list[Any]) -> list[list[int]]:
    """Returns the positions of the columns of each vocabulary."""
    if isinstance(shared, (bool, np.bool_)):
        return [list(range(len(names)))] if shared else [[k] for k in range(len(names))]
    of_names = isinstance(shared, (list, tuple)) and all(
        isinstance(group, (list, tuple)) for group in shared
    )
    if not of_names:
        want = "True, or a list of lists of columns, for example [['head', 'tail']]"
        raise _arguments.wrong_type(call, "shared", want, _arguments.show(shared))
    given = [name for group in shared for name in group]
    for name in given:
        if name not in names or given.count(name) > 1:
            raise ValueError(
                f"{call}: shared must have each of the columns {names} at most once, "
                f"got {_arguments.show(shared)}."
            )
    groups = [[names.index(name) for name in group] for group in shared if group]
    taken = {column for group in groups for column in group}
    return groups + [[k] for k in range(len(names)) if k not in taken]


class _Counts:
    """Counts words batch by batch; needs memory for each distinct word."""

    def __init__(self) -> None:
        self._words: list[Any] = []  # BinaryArrays
        self._counts: list[np.ndarray] = []  # the counts of their words
        self._waiting = 0
        self._is_integer: set[bool] = set()

    def add(self, column: _arrow.Column) -> None:
        counts = column.counts()
        # The last word stands for missing values, which have no type.
        if counts[:-1].any():
            self._is_integer.add(column.is_integer)
        self._words.append(column.words)
        self._counts.append(counts)
        self._waiting += len(counts)
        if self._waiting > _MAX_WAITING:
            self._merge()
            self._waiting = 0

    def total(self) -> tuple[Any, np.ndarray, bool]:
        """Returns distinct words, their counts, and True if all are integers."""
        self._merge()
        return self._words[0], self._counts[0], self._is_integer == {True}

    def _merge(self) -> None:
        import pyarrow as pa

        words = pa.chunked_array(self._words, pa.binary())
        counts = np.concatenate([np.zeros(0, np.int64), *self._counts])
        # An integer and the same integer as text are one word.
        table = pa.table({"word": words, "count": counts})
        merged = table.group_by("word").aggregate([("count", "sum")])
        self._words = [_one_array(merged["word"])]
        self._counts = [merged["count_sum"].to_numpy().astype(np.int64)]


def _one_array(column: Any) -> Any:
    return column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)


def _ranked(
    words: Any, counts: np.ndarray, min_count: int, max_size: int | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the words that are kept, ascending; their ids; and the counts by id.

    Ids are in the order of falling counts; equal counts in the order of bytes.

    Args:
      words: BinaryArray of distinct words.
      counts: int64, of each.
      min_count, max_size: the limits of the column.
    """
    lengths, _ = _arrow.lengths_and_bytes(words)
    is_kept = (lengths > 0) & (counts >= min_count)
    kept = np.array(words.filter(is_kept).to_pylist(), "S")
    total, counts = counts.sum(), counts[is_kept]
    by_word = np.argsort(kept)
    kept, counts = kept[by_word], counts[by_word]
    order = np.argsort(-counts, kind="stable")
    if max_size is not None:
        order = order[: max_size - 1]
    ids = np.zeros(len(kept), np.int32)
    ids[order] = np.arange(1, len(order) + 1)
    frequency = np.concatenate([[total - counts[order].sum()], counts[order]])
    return _narrow(kept[ids > 0]), ids[ids > 0], frequency


def _shortened(shown: list[str], separator: str) -> str:
    """Joins at most 8 entries of a list, and the number of the others."""
    limit = 8
    if len(shown) > limit + 1:
        shown = [*shown[:limit], f"{len(shown) - limit} more"]
    return separator.join(shown)


def _narrow(words: np.ndarray) -> np.ndarray:
    """Returns words in the narrowest dtype that holds them."""
    width = int(np.char.str_len(words).max(initial=1))
    return words.astype(f"S{width}")
