"""The libsvm text format (svmlight's): sparse rows with a label, in and out."""

import os
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from sparsejax import _arguments
from sparsejax._files import as_path
from sparsejax.data import _columns, _libsvm_lines, _numbers, _text_files


_READ = "sparsejax.data.read_libsvm"
_WRITE = "sparsejax.data.write_libsvm"
_BASE = "{call}: zero_based must be {want}, got {found!r}."
_NOT_ROWS = (
    "{call}: X must be a scipy CSR matrix, an array [n, C], or a SegmentTensor with "
    "values {{'index', 'value'}}, got {found}."
)


def read_libsvm(
    path: str | os.PathLike[str],
    *,
    zero_based: bool | str = "auto",
    num_features: int | None = None,
    dtype: Any = np.float32,
    multilabel: bool = False,
    query_id: bool = False,
    progress: bool = False,
) -> tuple[Any, ...]:
    """Reads lines of `label index:value index:value ...`.

    Text after `#` is a comment, and empty lines are skipped. Elements stay in the order
    of the file, explicit zeros and duplicates too.

    Args:
      path: of a text file; compressed by gzip or bzip2 is seen by itself.
      zero_based: whether the first feature has index 0 in the file, or 1. "auto": 0 if
        that index occurs, else 1. Say it for files that belong together, of which one
        may not have the first feature.
      num_features: int C, columns of the matrix. Left out, as many as the file shows,
        which for a test set may be fewer than for training.
      dtype: of values and labels, which it must hold: floats are rounded, but 1e39 is
        no float32.
      multilabel: whether a line has any number of labels, with commas between.
      query_id: whether `qid:q` behind the label is returned as well; -1 where there is
        none.
      progress: whether a bar says how far it is.

    Returns:
      `(X, y)`, and with `query_id` `(X, y, qid)`: X a `scipy.sparse.csr_matrix`
      `[n, C]` of 32-bit indices where they suffice; y `[n]`, with `multilabel` a list
      of n arrays; qid int64 `[n]`. `ArrayDataset(X, y)` takes them as they are.

    Raises:
      TypeError: `path` or `dtype` is none.
      ValueError: a malformed line, a number that `dtype` does not hold, an index that
        does not go with `zero_based` or `num_features`: the message begins with
        file:line.
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
        want = "True, False or 'auto'"
        raise ValueError(_BASE.format(call=_READ, want=want, found=zero_based))
    whole = isinstance(num_features, (int, np.integer)) and num_features > 0
    if num_features is not None and not whole:
        raise ValueError(
            f"{_READ}: num_features must be a positive int or None, got "
            f"{num_features!r}."
        )
    dtype, path = _as_dtype(dtype), as_path(_READ, path)
    parts = []
    for block in _text_files.blocks(_READ, path, progress):
        rows = _libsvm_lines.read(path, block, multilabel)
        labels = _cast_labels(path, rows, dtype)
        # Indices below 2^31 are kept in 32 bits, of which most files are made.
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
        expected = f"an index from {first}{last}, zero_based being {zero_based}"
        _text_files.refuse(path, line, f"index {index[at]}", expected)
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


def write_libsvm(
    path: str | os.PathLike[str],
    X: Any,
    y: Any,
    *,
    zero_based: bool = False,
    query_id: Any = None,
) -> None:
    """Writes rows as `label index:value index:value ...`.

    `read_libsvm` gives back the same elements, bit by bit for the dtype they have here;
    columns behind the last that is used are not in the file (`num_features` says them).
    The file is there whole or not at all: it is written beside `path` first, and an
    older file stays until then.

    Args:
      path: of the file; with `.gz` or `.bz2` at its end it is compressed.
      X: a scipy CSR matrix `[n, C]`, of which explicit zeros are written too; an array
        `[n, C]`, without its zeros; or a SegmentTensor of `{"index", "value"}`.
      y: numbers `[n]`, or a sequence of n sequences, for several labels a row.
      zero_based: whether the first feature gets index 0; else 1, as LIBSVM has it.
      query_id: integers `[n]`, written as `qid:q`.

    Raises:
      TypeError: X is no such matrix.
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
        want = "True or False"
        raise ValueError(_BASE.format(call=_WRITE, want=want, found=zero_based))
    offsets, index, value = _elements(X)
    n, first = len(offsets) - 1, 0 if zero_based else 1
    if len(index) and index.min() < 0:
        raise ValueError(
            f"{_WRITE}: X has the column {index.min()}; columns are numbered from 0."
        )
    for name, other in (("y", y), ("query_id", query_id)):
        if (other is not None or name == "y") and not hasattr(other, "__len__"):
            found = _arguments.kind_of(other)
            raise TypeError(
                f"{_WRITE}: {name} must have an entry for each row of X, got {found}."
            )
        if other is not None and len(other) != n:
            raise ValueError(f"{_WRITE}: X has {n} rows and {name} has {len(other)}.")
    with _text_files.write(path) as file:
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
                        f"{_WRITE}: row {at} has no labels and no elements. An empty "
                        "line is no row in this format: leave such rows out."
                    )
                lines.append(line)
            file.write("".join(lines).encode())


# ------------------------------------------------------------------ private


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


def _cast_labels(path: Any, rows: _libsvm_lines.Rows, dtype: np.dtype) -> Any:
    """The labels in their dtype; for several a row, a list of arrays."""
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
    rows: _libsvm_lines.Rows,
    counts: np.ndarray,
    dtype: np.dtype,
) -> np.ndarray:
    """The numbers, `counts` of them in each row, in their dtype, or an error."""
    out, fault = _numbers.cast(numbers, dtype)
    if fault is not None:
        row = int(np.searchsorted(np.cumsum(counts), fault, side="right"))
        expected = f"a {kind} that {dtype} holds"
        _text_files.refuse(path, rows.lines[row], f"{numbers[fault]:g}", expected)
    return out


def _elements(X: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Offsets, columns and values of the rows of X."""
    if isinstance(X, (np.ndarray, jax.Array)) or hasattr(X, "__jax_array__"):
        X = np.asarray(X)
        if X.ndim != 2:
            found = f"an array of shape {X.shape}"
            raise TypeError(_NOT_ROWS.format(call=_WRITE, found=found))
        row, column = np.nonzero(X)
        counts = np.bincount(row, minlength=len(X))
        return np.concatenate([[0], np.cumsum(counts)]), column, X[row, column]
    try:
        made = _columns.as_column(_WRITE, X, "X")
    except (TypeError, ValueError):
        made = None
    values = made.values if isinstance(made, _columns.Ragged) else None
    if not isinstance(values, dict) or values.keys() != {"index", "value"}:
        found = _arguments.kind_of(X)
        raise TypeError(_NOT_ROWS.format(call=_WRITE, found=found))
    assert isinstance(made, _columns.Ragged)
    index, value = values["index"].values, values["value"].values
    last = int(made.offsets[-1])
    return made.offsets, index[:last].astype(np.int64), value[:last]


def _texts(values: np.ndarray) -> Sequence[str]:
    """Each number in the fewest digits that give it back, `2` for 2.0."""
    if values.dtype.kind == "b":
        values = values.astype(np.int8)
    # NumPy's float32, unlike Python's float, knows that it is one.
    texts = [str(x) for x in values] if values.dtype != np.float64 else None
    texts = list(map(repr, values.tolist())) if texts is None else texts
    return [t[:-2] if t.endswith(".0") else t for t in texts]


def _label(label: Any) -> str:
    labels = np.atleast_1d(np.asarray(label))
    if labels.dtype.kind not in "biuf":
        raise TypeError(
            f"{_WRITE}: y must hold numbers, or lists of numbers, got "
            f"{_arguments.show(label)}."
        )
    return ",".join(_texts(labels))
