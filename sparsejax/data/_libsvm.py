"""Reads and writes the libsvm (svmlight) text format: sparse rows with a label.

A line is `label [qid:q] index:value index:value ...  # comment`. There are two ways to
read a block of lines:

- The fast path works on bytes. It checks that each token has a colon exactly where
  expected, and reads all numbers at once. If anything is unusual, it gives up.
- The slow path reads line by line in Python. It defines the format, and its errors
  give the line.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.typing import DTypeLike

from sparsejax import _arguments
from sparsejax._arguments import ArrayLike, ColumnLike, CSRLike, Progress
from sparsejax._files import as_path
from sparsejax.data import _columns, _text


_READ = "sparsejax.data.read_libsvm"
_WRITE = "sparsejax.data.write_libsvm"

_COMMENT = re.compile(rb"#[^\n]*")
_COLON, _NEWLINE = (np.uint8(ord(c)) for c in ":\n")
_IS_SPACE = np.array([bytes([c]).isspace() for c in range(256)])


class _Rows(NamedTuple):
    """The rows of a block.

    Args:
      labels: float64 `[r]`; for several labels a row, a list of arrays.
      query: int64 `[r]`, -1 where the line has none.
      counts: int64 `[r]`, elements of each row.
      column: int64 `[n]`, the indices as in the file.
      value: float64 `[n]`.
      lines: int64 `[r]`, the line number of each row.
    """

    labels: Any
    query: np.ndarray
    counts: np.ndarray
    column: np.ndarray
    value: np.ndarray
    lines: np.ndarray


# ------------------------------------------------------------------ reading


def read_libsvm(
    path: str | os.PathLike[str],
    *,
    zero_based: bool | str = "auto",
    num_features: int | None = None,
    dtype: DTypeLike = np.float32,
    multilabel: bool = False,
    query_id: bool = False,
    progress: Progress = False,
) -> tuple[Any, ...]:
    """Reads lines of `label index:value index:value ...`.

    Text after `#` is a comment, and empty lines are skipped. Elements stay in the order
    of the file; explicit zeros and duplicates are kept.

    Args:
      path: of a text file; gzip and bzip2 are recognized by their first bytes.
      zero_based: whether the first feature has index 0 in the file, instead of 1.
        "auto" means True if the index 0 occurs. Set it for files that belong together,
        since one of them may lack the first feature.
      num_features: int C, columns of the matrix. The default is the largest index in
        the file, which may be smaller in a test set than in the training set.
      dtype: of values and labels. Floats are rounded, but 1e39 does not fit in float32.
      multilabel: whether a line has any number of labels, separated by commas.
      query_id: whether to also return the `qid:q` after each label, -1 if missing.
      progress: True for a progress bar on stderr, or a function of (bytes read, bytes
        of the file).

    Returns:
      `(X, y)`, and with `query_id` `(X, y, qid)`: X a `scipy.sparse.csr_matrix`
      `[n, C]` of 32-bit indices where they suffice; y `[n]`, with `multilabel` a list
      of n arrays; qid int64 `[n]`. `ArrayDataset(X, y)` accepts them directly.

    Raises:
      TypeError: `path` is not a path, or `dtype` is not a dtype of real numbers.
      ValueError: a line is malformed, a number does not fit in `dtype`, or an index
        contradicts `zero_based` or `num_features`, or a line has more than 32 MB. The
        message begins with file:line.
      OSError: the file cannot be read, or is damaged.

    Example:
      >>> import os, tempfile, sparsejax as sj
      >>> path = os.path.join(tempfile.mkdtemp(), "data.txt")
      >>> with open(path, "w") as file:
      ...     _ = file.write("1 1:0.5 3:2  # a comment\\n0 2:1\\n")
      >>> X, y = sj.data.read_libsvm(path)
      >>> X.toarray(), y
      (array([[0.5, 0. , 2. ],
             [0. , 1. , 0. ]], dtype=float32), array([1., 0.], dtype=float32))

    References:
      LIBSVM; scikit-learn, `load_svmlight_file`; MXNet, `LibSVMIter`.
    """
    import scipy.sparse

    if zero_based not in (True, False, "auto"):
        raise ValueError(
            f"{_READ}: zero_based must be True, False or 'auto', got {zero_based!r}."
        )
    whole = isinstance(num_features, (int, np.integer)) and num_features > 0
    if num_features is not None and not whole:
        raise ValueError(
            f"{_READ}: num_features must be a positive int or None, got "
            f"{num_features!r}."
        )
    dtype, path = _as_dtype(dtype), as_path(_READ, path)
    parts = []
    for block in _text.blocks(_READ, path, progress):
        rows = _read_block(path, block, multilabel)
        labels = _cast_labels(path, rows, dtype)
        # Most files have indices below 2^31 only: these are kept in 32 bits.
        narrow = rows.column.max(initial=0) < np.iinfo(np.int32).max
        parts.append(
            rows._replace(
                column=rows.column.astype(np.int32) if narrow else rows.column,
                value=_cast(path, "value", rows.value, rows, rows.counts, dtype),
                labels=labels,
            )
        )

    def join(name: str, default: Any) -> np.ndarray:
        return np.concatenate([default, *(getattr(part, name) for part in parts)])

    index = join("column", np.zeros(0, np.int32))
    if zero_based == "auto":
        zero_based = bool(len(index)) and int(index.min()) == 0
    first = 0 if zero_based else 1
    counts = join("counts", np.zeros(0, np.int64))
    indptr = np.concatenate([[0], np.cumsum(counts)])
    columns = max(int(index.max(initial=first - 1)) + 1 - first, 0)
    columns = columns if num_features is None else int(num_features)
    wrong = (index < first) | (index >= first + columns)
    if wrong.any():
        at = int(np.argmax(wrong))
        row = int(np.searchsorted(indptr, at, side="right")) - 1
        line = int(join("lines", np.zeros(0, np.int64))[row])
        last = "" if num_features is None else f" to {first + columns - 1}"
        why = f"zero_based={zero_based}"
        if num_features is not None:
            why = f"num_features={num_features} and {why}"
        expected = f"an index from {first}{last}, since {why}"
        _text.refuse(path, line, f"index {index[at]}", expected)
    if columns - 1 <= np.iinfo(np.int32).max >= len(index):
        index, indptr = index.astype(np.int32), indptr.astype(np.int32)
    value = join("value", np.zeros(0, dtype))
    shape = len(counts), columns
    matrix = scipy.sparse.csr_matrix((value, index - first, indptr), shape=shape)
    if multilabel:
        labels: Any = [own for part in parts for own in part.labels]
    else:
        labels = join("labels", np.zeros(0, dtype))
    if not query_id:
        return matrix, labels
    return matrix, labels, join("query", np.zeros(0, np.int64))


def _as_dtype(found: Any) -> np.dtype:
    try:
        dtype = np.dtype(found)
    except TypeError:
        dtype = np.dtype(object)
    real = dtype.kind in "iuf" or jax.numpy.issubdtype(dtype, np.floating)
    if found is None or not real:
        raise TypeError(
            f"{_READ}: dtype must be a dtype of real numbers, got {found!r}."
        )
    return dtype


def _cast_labels(path: Any, rows: _Rows, dtype: np.dtype) -> Any:
    """The labels in `dtype`; for several labels a row, a list of arrays."""
    if isinstance(rows.labels, np.ndarray):
        counts = np.ones(len(rows.lines), np.int64)
        return _cast(path, "label", rows.labels, rows, counts, dtype)
    counts = np.array([len(own) for own in rows.labels], np.int64)
    joined = np.concatenate([np.zeros(0), *rows.labels])
    made = _cast(path, "label", joined, rows, counts, dtype)
    return np.split(made, np.cumsum(counts)[:-1]) if len(counts) else []


def _cast(
    path: Any,
    kind: str,
    numbers: np.ndarray,
    rows: _Rows,
    counts: np.ndarray,
    dtype: np.dtype,
) -> np.ndarray:
    """`counts` numbers of each row in `dtype`, or an error that names the line."""
    out, fault = _text.cast(numbers, dtype)
    if fault is not None:
        row = int(np.searchsorted(np.cumsum(counts), fault, side="right"))
        expected = f"a {kind} that {dtype} holds"
        _text.refuse(path, rows.lines[row], f"{numbers[fault]:g}", expected)
    return out


def _read_block(path: Any, block: _text.Block, multilabel: bool) -> _Rows:
    """The rows of a block, or a ValueError that names the line."""
    text = block.text
    if b"#" in text:
        text = _COMMENT.sub(b"", text)
    rows = None
    if not multilabel and b"qid:" not in text:
        rows = _read_fast(text, block.line)
    return _read_slowly(path, text, block.line, multilabel) if rows is None else rows


def _read_fast(text: bytes, line: int) -> _Rows | None:
    """The rows of a block without comments, or None if something is unusual."""
    a = np.frombuffer(text, np.uint8)
    is_space = _IS_SPACE[a]
    after_space = np.empty_like(is_space)
    after_space[0], after_space[1:] = True, is_space[:-1]
    starts = np.flatnonzero(~is_space & after_space)  # of tokens
    ends = np.flatnonzero(is_space & ~after_space)  # the text ends in a newline
    colons = np.flatnonzero(a == _COLON)
    newlines = np.flatnonzero(a == _NEWLINE)
    # The first token of a line is its label, the others have a colon each.
    first = np.searchsorted(starts, newlines)
    tokens = np.diff(first, prepend=0)
    filled = tokens > 0
    counts = tokens[filled] - 1
    is_label = np.zeros(len(starts), bool)
    is_label[(first - tokens)[filled]] = True
    if len(colons) != len(starts) - len(counts):
        return None
    # If there are only digits between the start of a token and a colon, both belong to
    # one token. The rest of it must be a number, which a second colon would spoil.
    column = _text.read_digits(a, starts[~is_label], colons)
    if column is None:
        return None
    starts[~is_label] = colons + 1
    numbers, fault = _text.read_floats(a, starts, ends)
    if fault is not None:
        return None
    lines = line + np.flatnonzero(filled)
    query = np.full(len(counts), -1, np.int64)
    return _Rows(numbers[is_label], query, counts, column, numbers[~is_label], lines)


def _read_slowly(path: Any, text: bytes, line: int, multilabel: bool) -> _Rows:
    labels, query, counts, column, value, lines = [], [], [], [], [], []
    for at, content in enumerate(text.split(b"\n"), line):
        tokens = content.split()
        if not tokens:
            continue
        first = tokens[0]
        if b":" in first:
            if not multilabel:
                expected = "a label first, 'label index:value index:value ...'"
                _text.refuse(path, at, _text.show(first), expected)
            first = b""
        else:
            tokens = tokens[1:]
        expected = "labels, numbers with commas between" if multilabel else "a number"
        parts = first.split(b",") if multilabel else [first]
        own = [_number(path, at, p, f"{expected}, as label") for p in parts if first]
        labels.append(np.array(own) if multilabel else own[0])
        query.append(-1)
        if tokens and tokens[0].startswith(b"qid:"):
            expected, parse = "qid:q with an integer q", _text.parse_int
            query[-1] = _number(path, at, tokens[0][4:], expected, parse)
            tokens = tokens[1:]
        for token in tokens:
            left, colon, right = token.partition(b":")
            shown = _text.show(token)
            if not colon:
                _text.refuse(path, at, shown, "index:value")
            if not left.isdigit() or len(left) > _text.MOST_DIGITS:
                expected = "index:value with an index that is an integer, 0 or more"
                _text.refuse(path, at, shown, expected)
            column.append(int(left))
            expected = f"index:value with a number as value in {shown}"
            value.append(_number(path, at, right, expected))
        counts.append(len(tokens))
        lines.append(at)
    return _Rows(
        labels if multilabel else np.array(labels, np.float64),
        np.array(query, np.int64),
        np.array(counts, np.int64),
        np.array(column, np.int64),
        np.array(value, np.float64),
        np.array(lines, np.int64),
    )


def _number(
    path: Any,
    line: int,
    text: bytes,
    expected: str,
    parse: Callable = _text.parse_float,
) -> Any:
    try:
        return parse(text)
    except ValueError:
        _text.refuse(path, line, _text.show(text), expected)


# ------------------------------------------------------------------ writing


def write_libsvm(
    path: str | os.PathLike[str],
    X: ArrayLike | CSRLike,
    y: ColumnLike,
    *,
    zero_based: bool = False,
    query_id: ColumnLike | None = None,
) -> None:
    """Writes rows as `label index:value index:value ...`.

    `read_libsvm` returns the same elements, bit for bit if it reads their dtype. The
    file does not store the number of columns: pass `num_features` when reading it. An
    old file is replaced when the new one is complete.

    Args:
      path: of the file; the suffix `.gz` or `.bz2` compresses it.
      X: a scipy CSR matrix `[n, C]`, written with its explicit zeros; an array
        `[n, C]`, without its zeros; or a SegmentTensor of `{"index", "value"}`.
      y: numbers `[n]`, or a sequence of n sequences for several labels per row.
      zero_based: whether the first feature gets index 0 instead of 1, as in LIBSVM.
      query_id: integers `[n]`, written as `qid:q`.

    Raises:
      TypeError: X is not such a matrix, or y is not numeric.
      ValueError: the numbers of rows differ, or a row has neither label nor element.
      OSError: the file cannot be written.

    Example:
      >>> import os, tempfile, numpy as np, sparsejax as sj
      >>> path = os.path.join(tempfile.mkdtemp(), "data.txt")
      >>> X = np.array([[0.5, 0.0, 2.0], [0.0, 1.0, 0.0]])
      >>> sj.data.write_libsvm(path, X, [1, 0])
      >>> with open(path) as file:
      ...     print(file.read(), end="")
      1 1:0.5 3:2
      0 2:1
    """
    if not isinstance(zero_based, bool):
        raise ValueError(
            f"{_WRITE}: zero_based must be True or False, got {zero_based!r}."
        )
    offsets, index, value = _elements(X)
    n, first = len(offsets) - 1, 0 if zero_based else 1
    if len(index) and index.min() < 0:
        raise ValueError(
            f"{_WRITE}: the column indices of X must be non-negative, got "
            f"{index.min()}."
        )
    for name, other in (("y", y), ("query_id", query_id)):
        if (other is not None or name == "y") and not hasattr(other, "__len__"):
            raise TypeError(
                f"{_WRITE}: {name} must have one entry per row of X, got "
                f"{_arguments.kind_of(other)}."
            )
        if other is not None and len(other) != n:
            raise ValueError(
                f"{_WRITE}: {name} must have one entry per row of X, {n}, got "
                f"{len(other)}."
            )
    with _text.write(path) as file:
        step = 1 << 14
        for row in range(0, n, step):
            stop = min(row + step, n)
            low, high = int(offsets[row]), int(offsets[stop])
            tokens = [
                f" {i}:{v}"
                for i, v in zip(
                    (index[low:high] + first).tolist(), _texts(value[low:high])
                )
            ]
            lines = []
            for at in range(row, stop):
                own = tokens[int(offsets[at]) - low : int(offsets[at + 1]) - low]
                query = "" if query_id is None else f" qid:{int(query_id[at])}"
                line = f"{_label(y[at])}{query}{''.join(own)}\n"
                if line == "\n":
                    raise ValueError(
                        f"{_WRITE}: row {at} has no labels and no elements. Remove "
                        "such rows, since this format skips empty lines."
                    )
                lines.append(line)
            file.write("".join(lines).encode())


def _elements(X: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Offsets, columns and values of the rows of X."""
    if isinstance(X, (np.ndarray, jax.Array)) or hasattr(X, "__jax_array__"):
        X = np.asarray(X)
        if X.ndim != 2:
            raise _not_rows(X)
        row, column = np.nonzero(X)
        counts = np.bincount(row, minlength=len(X))
        return np.concatenate([[0], np.cumsum(counts)]), column, X[row, column]
    try:
        made = _columns.as_column(_WRITE, X, "X")
    except (TypeError, ValueError):
        made = None
    values = made.values if isinstance(made, _columns.Ragged) else None
    if not isinstance(values, dict) or values.keys() != {"index", "value"}:
        raise _not_rows(X)
    assert isinstance(made, _columns.Ragged)
    index, value = values["index"].values, values["value"].values
    last = int(made.offsets[-1])
    return made.offsets, index[:last].astype(np.int64), value[:last]


def _not_rows(found: Any) -> TypeError:
    return TypeError(
        f"{_WRITE}: X must be a scipy CSR matrix, an array [n, C], or a SegmentTensor "
        f"with values {{'index', 'value'}}, got {_arguments.kind_of(found)}."
    )


def _texts(values: np.ndarray) -> Sequence[str]:
    """Each number in the fewest digits that read back as it, `2` for 2.0."""
    if values.dtype.kind == "b":
        values = values.astype(np.int8)
    # str of NumPy's float32 has fewer digits than repr of the Python float.
    if values.dtype == np.float64:
        texts = list(map(repr, values.tolist()))
    else:
        texts = [str(x) for x in values]
    return [t[:-2] if t.endswith(".0") else t for t in texts]


def _label(label: Any) -> str:
    labels = np.atleast_1d(np.asarray(label))
    if labels.dtype.kind not in "biuf":
        raise TypeError(
            f"{_WRITE}: y must contain numbers or lists of numbers, got "
            f"{_arguments.show(label)}."
        )
    return ",".join(_texts(labels))
