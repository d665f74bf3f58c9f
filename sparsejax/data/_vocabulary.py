"""HashIds and Vocabulary: turn words into ids, by a hash or by a list.

Id 0 is for missing words and, in a Vocabulary, for out-of-vocabulary (OOV) words. Words
are a matrix of bytes, one row per word, with their lengths, so all words of a column
are hashed or compared at once.
"""

import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from sparsejax import _arguments
from sparsejax._files import as_path, read_npz, replacing
from sparsejax.data import _csv
from sparsejax.data._csv import Words


_MASK = (1 << 64) - 1


@dataclasses.dataclass(frozen=True)
class HashIds:
    """Ids of categories by a hash; needs no pass over the data, but ids may collide.

    The id of a word in column c is `1 + mix(fnv1a(word, salt(seed, c))) mod (B - 1)`,
    and 0 if it is missing. It is the same in every process and on every machine. The
    same word gets different ids in different columns.

    Args:
      num_buckets: int B, rows of a table, below 2^31; or one per column.
      seed: int; another seed gives other collisions.

    Raises:
      ValueError: fewer than two buckets, or too many.

    Example:
      >>> import sparsejax as sj
      >>> encoder = sj.data.HashIds(1000)
      >>> encoder.encode(0, [b"68fd1e64", b"", b"05db9164", b"68fd1e64"])
      array([184,   0, 633, 184], dtype=int32)
      >>> encoder.sizes(2)
      [1000, 1000]

    References:
      Weinberger et al., 2009, "Feature Hashing for Large Scale Multitask Learning";
      Fowler, Noll, Vo, FNV-1a; Appleby, MurmurHash3 (the finalizer).
    """

    num_buckets: int | Sequence[int]
    seed: int = 0

    def __post_init__(self) -> None:
        for size in np.atleast_1d(np.asarray(self.num_buckets, object)):
            whole = isinstance(size, (int, np.integer))
            if not whole or not 2 <= size <= np.iinfo(np.int32).max:
                raise ValueError(
                    "sparsejax.data.HashIds: num_buckets must be an int from 2 to "
                    f"2147483647, or one per column, got {self.num_buckets!r}. Id 0 is "
                    "for missing words, and ids are int32."
                )
        _arguments.static_int("sparsejax.data.HashIds", "seed", self.seed)

    def sizes(self, num_columns: int) -> list[int]:
        """The number of ids of each column: rows of its table.

        Args:
          num_columns: int, number of columns.

        Raises:
          ValueError: `num_buckets` is a list of another length.
        """
        if isinstance(self.num_buckets, (int, np.integer)):
            return [int(self.num_buckets)] * num_columns
        found = [int(size) for size in self.num_buckets]
        if len(found) != num_columns:
            raise ValueError(
                f"sparsejax.data.HashIds: num_buckets has {len(found)} entries, but "
                f"the file has {num_columns} columns of categories."
            )
        return found

    def encode(self, column: int, words: Any) -> np.ndarray:
        """The ids of words, int32 `[n]`.

        Args:
          column: int, the column they are from.
          words: a sequence of bytes or strings.
        """
        call, size = "sparsejax.data.HashIds.encode", self.num_buckets
        if not isinstance(size, (int, np.integer)):
            _check_column(call, column, len(size))
            size = size[column]
        words = _as_words(call, words)
        salt = _mix_int(_mix_int(self.seed + 1) + column)
        # FNV-1a: exclusive or with a byte, then times a prime, modulo 2^64.
        state = np.full(len(words.lengths), 0xCBF29CE484222325 ^ salt, np.uint64)
        for place in range(words.text.shape[1]):
            step = (state ^ words.text[:, place]) * np.uint64(0x100000001B3)
            state = np.where(place < words.lengths, step, state)
        ids = _mix(state) % np.uint64(int(size) - 1) + np.uint64(1)
        return np.where(words.lengths > 0, ids, np.uint64(0)).astype(np.int32)


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """Ids of categories by a list: one id per word, 1 for the most frequent.

    Id 0 is for out-of-vocabulary (OOV) and missing words. Use `build` to make one.

    Args:
      words: for each column, its words, an array of bytes in ascending order.
      ids: for each column, the ids of these words, int32, starting from 1.
      names: of the columns, if the file has names. A reader then refuses columns with
        other names.

    Example:
      >>> import os, tempfile, sparsejax as sj
      >>> path = os.path.join(tempfile.mkdtemp(), "clicks.csv")
      >>> with open(path, "w") as file:
      ...     _ = file.write("1,a\\n0,b\\n1,b\\n0,\\n")
      >>> found = sj.data.Vocabulary.build(path, num_numbers=0, num_ids=1)
      >>> found.sizes(1), found.encode(0, [b"b", b"a", b"new", b""])
      ([3], array([1, 2, 0, 0], dtype=int32))
      >>> found.save(path + ".npz")  # the model is useless without it
      >>> sj.data.Vocabulary.load(path + ".npz").sizes()
      [3]
    """

    words: Sequence[np.ndarray]
    ids: Sequence[np.ndarray]
    names: Sequence[str] = ()

    @classmethod
    def build(
        cls,
        path: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
        *,
        num_numbers: int = _csv.NUM_NUMBERS,
        num_ids: int = _csv.NUM_IDS,
        label: bool = True,
        columns: Mapping[str, Any] | None = None,
        separator: str = "auto",
        header: bool = False,
        min_count: int = 1,
        max_size: int | None = None,
        progress: Any = False,
    ) -> "Vocabulary":
        """Counts the words of one or several files, and keeps the frequent ones.

        Args:
          path: a file, or a list of files with the same columns.
          num_numbers, num_ids, label, columns, separator, header, progress: as in
            `read_csv_ids`.
          min_count: int, the least number of occurrences of a word to keep.
          max_size: int, the largest number of ids of a column, including id 0.

        Raises:
          TypeError, ValueError, OSError: as `read_csv_ids`.
        """
        call = "sparsejax.data.Vocabulary.build"
        layout = _csv.as_layout(
            call, num_numbers, num_ids, label, separator, header, columns
        )
        least = _arguments.static_int(call, "min_count", min_count, 1)
        if max_size is not None:
            max_size = _arguments.static_int(call, "max_size", max_size, 1)
        counts: list[dict[bytes, int]] = [{} for _ in range(layout.size("ids"))]
        if isinstance(path, (str, bytes, os.PathLike)):
            path = [path]
        elif not isinstance(path, Iterable) or hasattr(path, "read"):
            raise TypeError(
                f"{call}: path must be a str or os.PathLike, or a list of these, got "
                f"{path!r}."
            )
        for file in [as_path(call, file) for file in path]:
            for table in _csv.read(file, layout, progress):
                for column, own in enumerate(counts):
                    words = _as_bytes(table.words(column))
                    for word, n in zip(*np.unique(words, return_counts=True)):
                        own[word] = own.get(word, 0) + int(n)
        made = [_ranked(own, least, max_size) for own in counts]
        words, ids = ([pair[k] for pair in made] for k in (0, 1))
        return cls(words, ids, layout.names())

    def sizes(self, num_columns: int | None = None) -> list[int]:
        """The number of ids of each column, including id 0: the rows of its table.

        Args:
          num_columns: int, number of columns, to be checked; or None.

        Raises:
          ValueError: the vocabulary has another number of columns.
        """
        if num_columns not in (None, len(self.words)):
            raise ValueError(
                f"sparsejax.data.Vocabulary: the vocabulary has {len(self.words)} "
                f"columns, but the file has {num_columns} columns of categories."
            )
        return [len(words) + 1 for words in self.words]

    def encode(self, column: int, words: Any) -> np.ndarray:
        """The ids of words, int32 `[n]`; arguments as in `HashIds.encode`."""
        call = "sparsejax.data.Vocabulary.encode"
        found = _as_bytes(_as_words(call, words))
        _check_column(call, column, len(self.words))
        known, ids = self.words[column], self.ids[column]
        if not len(known):
            return np.zeros(len(found), np.int32)
        place = np.minimum(np.searchsorted(known, found), len(known) - 1)
        return np.where(known[place] == found, ids[place], np.int32(0))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes it to a file. Keep the file with the model, which needs it.

        Args:
          path: of an `.npz` file, with arrays "words k" and "ids k" for each column k,
            and "names". An old file is replaced when the new one is complete.

        Raises:
          TypeError: `path` is not a path.
          OSError: it cannot be written.
        """
        path = as_path("sparsejax.data.Vocabulary.save", path)
        arrays = {f"words {k}": x for k, x in enumerate(self.words)}
        arrays.update({f"ids {k}": x for k, x in enumerate(self.ids)})
        arrays["names"] = np.array(self.names, np.str_)
        with replacing(path) as file:
            np.savez(file, **arrays)  # pyright: ignore[reportArgumentType]

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Vocabulary":
        """Reads what `save` wrote.

        Args:
          path: of the file.

        Raises:
          TypeError: `path` is not a path.
          ValueError: the file is not a vocabulary, or is damaged.
          OSError: it cannot be read.
        """
        call = "sparsejax.data.Vocabulary.load"
        what = "a file that Vocabulary.save wrote"
        path = as_path(call, path)
        found = read_npz(call, path, what, ["names"])
        columns = range(len(found) // 2)
        try:
            words = [found[f"words {k}"] for k in columns]
            ids = [found[f"ids {k}"] for k in columns]
            return cls(words, ids, found["names"].tolist())
        except (KeyError, ValueError, TypeError, AttributeError) as e:
            raise ValueError(f"{call}: {path} is not {what}: {e}.") from e


# ------------------------------------------------------------------ private


def _as_words(call: str, words: Any) -> Words:
    """A sequence of bytes or strings as a matrix."""
    if isinstance(words, Words):
        return words
    if isinstance(words, (str, bytes)) or not isinstance(words, Iterable):
        raise TypeError(
            f"{call}: words must be a sequence of strings or bytes, got "
            f"{_arguments.show(words)}."
        )
    texts = [word.encode() if isinstance(word, str) else word for word in words]
    for text in texts:
        if not isinstance(text, bytes):
            raise TypeError(
                f"{call}: words must be strings or bytes, got {_arguments.show(text)}."
            )
    lengths = np.array([len(text) for text in texts], np.int64)
    width = int(lengths.max(initial=0))
    joined = b"".join(text.ljust(width, b"\0") for text in texts)
    return Words(np.frombuffer(joined, np.uint8).reshape(len(texts), width), lengths)


def _check_column(call: str, column: int, count: int) -> None:
    if not 0 <= column < count:
        raise IndexError(
            f"{call}: column {column} is out of range for {count} columns."
        )


def _as_bytes(words: Words) -> np.ndarray:
    """Words as NumPy's strings of bytes, which can be sorted and compared."""
    n, width = words.text.shape
    if not width:
        return np.zeros(n, "S1")
    return np.ascontiguousarray(words.text).view(f"S{width}").reshape(n)


def _ranked(
    counts: dict[bytes, int], least: int, most: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """Words ascending, and their ids: 1 for the most frequent; ties in word order."""
    kept = [(-n, word) for word, n in counts.items() if n >= least and word]
    ranked = [word for _, word in sorted(kept)]
    if most is not None:
        ranked = ranked[: most - 1]
    words = np.array(ranked, "S") if ranked else np.zeros(0, "S1")
    order = np.argsort(words)
    return words[order], (order + 1).astype(np.int32)


def _mix(x: np.ndarray) -> np.ndarray:
    """MurmurHash3's finalizer: each bit of the result depends on each of x."""
    x = (x ^ (x >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    x = (x ^ (x >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    return x ^ (x >> np.uint64(33))


def _mix_int(x: int) -> int:
    return int(_mix(np.array([x & _MASK], np.uint64))[0])
