"""Segments as matrices: padded rows, multi-hot rows, CSR. Arrays in, arrays out.

Where an element goes, or where one comes from, is worked out here on the integers
alone; the values then move once, by a gather.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sparsejax import _arguments
from sparsejax._rows import indexing
from sparsejax._segments import numbers


_FILLER = (
    "{call}: filler={filler} is no {dtype}, the type of the values. Give one that the "
    "type can hold, and that no element is equal to."
)
_CSR_PARTS = (
    "{call}: {found}. Call from_csr(indptr, indices), from_csr(indptr, indices, data), "
    "or from_csr(matrix) with a CSR or BCSR matrix."
)


# ------------------------------------------------------------------ padded


def filler_value(call: str, filler: Any, dtype: Any) -> np.ndarray:
    """`filler` in the type of the values, or an error if that cannot hold it."""
    try:
        found, value = np.asarray(filler).item(), np.array(filler, dtype)
    except (OverflowError, TypeError, ValueError):
        shown = _arguments.show(filler)
        raise ValueError(_FILLER.format(call=call, filler=shown, dtype=dtype)) from None
    rounds = jnp.issubdtype(dtype, jnp.inexact)  # NaN, and 0.1 in float32
    if not rounds and value.item() != found:
        shown = _arguments.show(filler)
        raise ValueError(_FILLER.format(call=call, filler=shown, dtype=dtype))
    return value


def pad_places(lengths: Any, n: int, max_length: int) -> tuple[Any, Any]:
    """Which of n sorted elements comes to each place `[S, max_length]`, and if any."""
    known = numbers.is_known(lengths)
    xp, lengths = (np, np.asarray(lengths)) if known else (jnp, lengths)
    begins = xp.cumsum(lengths, dtype=xp.int32) - lengths
    place = xp.arange(max_length, dtype=xp.int32)[None, :]
    filled = place < xp.minimum(lengths, np.int32(max_length))[:, None]
    return xp.where(filled, begins[:, None] + place, np.int32(n)), filled


def present(call: str, padded: Any, filler: Any) -> Any:
    """Which of `[S, L, ...]` are elements: not all `filler`. Bool `[S * L]`."""
    if padded.ndim < 2:
        raise ValueError(
            f"{call}: padded must have shape [S, L] or [S, L, ...], a row for each "
            f"segment, got {padded.shape}."
        )
    filler = filler_value(call, filler, padded.dtype)
    differs = padded == padded if filler != filler else padded != filler
    return differs.any(axis=tuple(range(2, padded.ndim))).reshape(-1)


def places(call: str, counts: Any, capacity: int | None) -> tuple[Any, Any, int]:
    """The places of `counts` [n], each as often as it says, and then n.

    Returns:
      The places `[room]`; how many there are, an int where that is known; and room,
      which is `capacity` unless that is None.
    """
    size = counts.shape[0]
    if capacity is not None:
        capacity = _arguments.check_capacity(call, capacity)
    if numbers.is_known(counts):
        at = np.repeat(np.arange(size, dtype=np.int32), np.asarray(counts))
        room = at.size if capacity is None else capacity
        kept = at[:room]
        return np.pad(kept, (0, room - kept.size), constant_values=size), at.size, room
    room = size if capacity is None else capacity
    (at,) = jnp.nonzero(counts, size=room, fill_value=size)
    return at.astype(jnp.int32), jnp.sum(counts, dtype=jnp.int32), room


def row_of(at: Any, shape: tuple[int, int]) -> Any:
    """The row of each place in a matrix of `shape`, their number for the place n."""
    rows, columns = shape
    xp = np if isinstance(at, np.ndarray) else jnp
    row = at // np.int32(max(columns, 1))
    return xp.where(at < rows * columns, row, np.int32(rows))


def gather(flat: Any, at: Any) -> Any:
    """`flat[at]`, zeros for places that are none; with NumPy where both are its."""
    if not (isinstance(flat, np.ndarray) and isinstance(at, np.ndarray)):
        return indexing.take_rows(jnp.asarray(flat), jnp.asarray(at))
    out = np.zeros((at.size, *flat.shape[1:]), flat.dtype)
    out[at < flat.shape[0]] = flat[at[at < flat.shape[0]]]
    return out


# ------------------------------------------------------------------ multi-hot


def count_hot(
    ids: jax.Array, segment_ids: jax.Array, shape: tuple[int, int]
) -> jax.Array:
    """How often each segment has each id, int32 of shape `[S, V]`."""
    ones = jnp.ones(ids.shape, jnp.int32)
    at = jnp.zeros(shape, jnp.int32).at[segment_ids, ids]
    return at.add(ones, mode="drop", wrap_negative_indices=False)


def as_counts(call: str, x: Any) -> Any:
    """A multi-hot matrix `[S, V]` as one axis, or an error."""
    hot = x.dtype == bool
    if x.ndim != 2 or not (hot or jnp.issubdtype(x.dtype, jnp.integer)):
        raise ValueError(
            f"{call}: multi_hot must be integers or booleans [S, V], how often each id "
            f"occurs, got {x.dtype} of shape {x.shape}. Weights go with their ids to "
            "from_csr."
        )
    if not hot and not numbers.is_known(x):
        raise ValueError(
            f"{call}: inside jit the sum of {x.dtype} counts is not known, and the "
            "result needs a static size. Pass booleans, multi_hot > 0, where no id "
            "occurs twice."
        )
    if not hot and np.asarray(x).min(initial=0) < 0:
        raise ValueError(
            f"{call}: multi_hot must be counts, got {x.min()}, which is negative. Of a "
            "mask, use multi_hot > 0."
        )
    return x.reshape(-1)


# ------------------------------------------------------------------ CSR


def csr_parts(call: str, indptr: Any, indices: Any, data: Any) -> tuple[Any, Any, Any]:
    """`(indptr, indices, data)`, also of a matrix that has them as attributes."""
    if hasattr(indptr, "indptr"):
        if indices is not None or data is not None:
            raise TypeError(
                _CSR_PARTS.format(call=call, found="a matrix, and indices beside it")
            )
        matrix, name = indptr, getattr(indptr, "format", "csr")
        if name != "csr":  # scipy's CSC and BSR have attributes of the same names
            raise ValueError(
                f"{call}: got a matrix in {name.upper()} format, whose indices are not "
                "those of rows. Convert it with .tocsr()."
            )
        indptr, indices, data = matrix.indptr, matrix.indices, matrix.data
    elif indices is None:
        found = f"no indices, and {_arguments.kind_of(indptr)} is no CSR matrix"
        raise TypeError(_CSR_PARTS.format(call=call, found=found))
    if np.ndim(indptr) != 1:
        raise ValueError(
            f"{call}: indptr must have one axis, got shape {np.shape(indptr)}: a batch "
            "of matrices. Use jax.vmap."
        )
    return indptr, _arguments.as_integers(call, indices, "indices"), data
