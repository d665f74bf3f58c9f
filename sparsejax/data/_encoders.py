"""Words into ids: by a hash, or by a vocabulary. Id 0 is for what has no id of its own.

Words come as a matrix of bytes, a row a word, with their lengths: all words of a column
are worked on at once, a byte of each at a time.
"""

import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from sparsejax import _arguments
from sparsejax._files import as_path, read_npz, replacing
from sparsejax.data import _checks, _csv_layout, _csv_lines


_NO_WORDS = (
    "sparsejax.data: words must be a sequence of strings or bytes, a word each, got "
    "{found}."
)
_MASK = (1 << 64) - 1


class Words(NamedTuple):
    """Words of one column: uint8 `[n, L]`, zeros behind each, and lengths `[n]`."""

    text: np.ndarray
    lengths: np.ndarray


@dataclasses.dataclass(frozen=True)
class HashIds:
    """Ids of categories by a hash: no pass over the data, and words may share an id.

    The id of a word in column c is `1 + mix(fnv1a(word, salt(seed, c))) mod (B - 1)`,
    and 0 where it is missing. It is the same in every process and on every machine; two
    columns give the same word different ids.

    Args:
      num_buckets: int B, rows of a table, below 2^31, or one for each column.
      seed: int, another one gives other collisions.

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
                    f"2147483647, or one for each column, got {self.num_buckets!r}. Id "
                    "0 is for missing words, so one bucket holds none; and ids have 32 "
                    "bits."
                )
        _checks.as_int("seed", self.seed, 0, "sparsejax.data.HashIds")

    def sizes(self, num_columns: int) -> list[int]:
        """How many ids each column has: rows of its table.

        Args:
          num_columns: int, how many columns there are.

        Raises:
          ValueError: `num_buckets` is a list of another length.
        """
        if isinstance(self.num_buckets, (int, np.integer)):
            return [int(self.num_buckets)] * num_columns
        found = [int(size) for size in self.num_buckets]
        if len(found) != num_columns:
            call = "sparsejax.data.HashIds"
            raise ValueError(
                f"{call}: num_buckets has {len(found)} entries and the file "
                f"{num_columns} columns of categories."
            )
        return found

    def encode(self, column: int, words: Any) -> np.ndarray:
        """The ids of words, int32 `[n]`.

        Args:
          column: int, which column they are of.
          words: a sequence of bytes or strings.
        """
        sizes = self.num_buckets
        if not isinstance(sizes, (int, np.integer)):
            _check_column("sparsejax.data.HashIds", column, len(sizes))
        size = sizes if isinstance(sizes, (int, np.integer)) else sizes[column]
        words = as_words(words)
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
    """Ids of categories by a list: each word its own, the most frequent one first.

    Id 0 is for words that are not in the list, and for missing ones. `build` makes it.

    Args:
      words: for each column its words, an array of bytes in ascending order.
      ids: for each column the ids of these words, int32, from 1 on.
      names: of the columns, where the file they are from has names for them. A reader
        then refuses columns of other names.

    Example:
      >>> import os, tempfile, sparsejax as sj
      >>> path = os.path.join(tempfile.mkdtemp(), "clicks.csv")
      >>> with open(path, "w") as file:
      ...     _ = file.write("1,a\\n0,b\\n1,b\\n0,\\n")
      >>> found = sj.data.Vocabulary.build(path, num_numbers=0, num_ids=1)
      >>> found.sizes(1), found.encode(0, [b"b", b"a", b"new", b""])
      ([3], array([1, 2, 0, 0], dtype=int32))
      >>> found.save(path + ".npz")  # beside the model that it belongs to
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
        num_numbers: int = _csv_layout.NUM_NUMBERS,
        num_ids: int = _csv_layout.NUM_IDS,
        label: bool = True,
        columns: Mapping[str, Any] | None = None,
        separator: str = "auto",
        header: bool = False,
        min_count: int = 1,
        max_size: int | None = None,
        progress: bool = False,
    ) -> "Vocabulary":
        """The words of a file, or of several, by how often they occur.

        Args:
          path: a file, or a list of files that have the same columns.
          num_numbers, num_ids, label, columns, separator, header, progress: of
            `read_csv_ids`.
          min_count: int, words that occur less often are left out.
          max_size: int, the greatest number of ids of a column, 0 included.

        Raises:
          TypeError, ValueError, OSError: as `read_csv_ids`.
        """
        call = "sparsejax.data.Vocabulary.build"
        layout = _csv_layout.as_layout(
            call, num_numbers, num_ids, label, separator, header, columns
        )
        least = _checks.as_int("min_count", min_count, 1, call)
        if max_size is not None:
            max_size = _checks.as_int("max_size", max_size, 1, call)
        counts: list[dict[bytes, int]] = [{} for _ in range(layout.size("ids"))]
        for file in _as_paths(call, path):
            for table in _csv_lines.read(file, layout, progress):
                for column, own in enumerate(counts):
                    words = _as_bytes(Words(*table.words(column)))
                    for word, n in zip(*np.unique(words, return_counts=True)):
                        own[word] = own.get(word, 0) + int(n)
        made = [_ranked(own, least, max_size) for own in counts]
        words, ids = ([pair[k] for pair in made] for k in (0, 1))
        return cls(words, ids, layout.names())

    def sizes(self, num_columns: int | None = None) -> list[int]:
        """How many ids each column has, 0 included: rows of its table.

        Args:
          num_columns: int, how many columns there are, or None not to say it.

        Raises:
          ValueError: it is of another number of columns.
        """
        if num_columns not in (None, len(self.words)):
            call, found = "sparsejax.data.Vocabulary", len(self.words)
            raise ValueError(
                f"{call}: the vocabulary is of {found} columns and the file has "
                f"{num_columns} columns of categories."
            )
        return [len(words) + 1 for words in self.words]

    def encode(self, column: int, words: Any) -> np.ndarray:
        """The ids of words, int32 `[n]`; as of `HashIds.encode`."""
        found = _as_bytes(as_words(words))
        _check_column("sparsejax.data.Vocabulary", column, len(self.words))
        known, ids = self.words[column], self.ids[column]
        if not len(known):
            return np.zeros(len(found), np.int32)
        place = np.minimum(np.searchsorted(known, found), len(known) - 1)
        return np.where(known[place] == found, ids[place], np.int32(0))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes it to a file: a model without its vocabulary cannot be used.

        Args:
          path: of an `.npz` file, with arrays "words k" and "ids k" for each column k,
            and "names". One that is there stays until the new one is whole.

        Raises:
          TypeError: `path` is no path.
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
          TypeError: `path` is no path.
          ValueError: the file holds no vocabulary, or is damaged.
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


def check_names(call: str, known: Sequence[str], given: Sequence[str]) -> None:
    """An error where a vocabulary is of columns of other names, or in another order."""
    if known and given and list(known) != list(given):
        raise ValueError(
            f"{call}: the vocabulary is of the columns {known} and the ids of the file "
            f"are {given}, in this order. Name them in columns= as the vocabulary has "
            "them; if they are the same under other names, take "
            "dataclasses.replace(vocabulary, names=())."
        )


def as_words(words: Any) -> Words:
    """A sequence of bytes or strings as a matrix; what is one already stays."""
    if isinstance(words, Words):
        return words
    if isinstance(words, (str, bytes)) or not isinstance(words, Iterable):
        raise TypeError(_NO_WORDS.format(found=_arguments.show(words)))
    texts = [word.encode() if isinstance(word, str) else word for word in words]
    if not all(isinstance(text, bytes) for text in texts):
        wrong = next(text for text in texts if not isinstance(text, bytes))
        raise TypeError(_NO_WORDS.format(found=f"{_arguments.show(wrong)} among them"))
    lengths = np.array([len(text) for text in texts], np.int64)
    width = int(lengths.max(initial=0))
    joined = b"".join(text.ljust(width, b"\0") for text in texts)
    return Words(np.frombuffer(joined, np.uint8).reshape(len(texts), width), lengths)


# ------------------------------------------------------------------ private


def _check_column(call: str, column: int, count: int) -> None:
    if not 0 <= column < count:
        raise IndexError(
            f"{call}.encode: column {column} of {count}. Columns are numbered from 0, "
            "in the order of the file."
        )


def _as_paths(call: str, path: Any) -> list[Any]:
    if isinstance(path, (str, bytes, os.PathLike)):
        return [path]
    if not isinstance(path, Iterable) or hasattr(path, "read"):
        raise TypeError(
            f"{call}: path must be a str or an os.PathLike, or a list of them, got "
            f"{path!r}."
        )
    return [as_path(call, file) for file in path]


def _as_bytes(words: Words) -> np.ndarray:
    """Words as NumPy's strings of bytes, which sort and compare."""
    n, width = words.text.shape
    if not width:
        return np.zeros(n, "S1")
    return np.ascontiguousarray(words.text).view(f"S{width}").reshape(n)


def _ranked(
    counts: dict[bytes, int], least: int, most: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """Words ascending, and their ids: 1 for the most frequent, equals in order."""
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
