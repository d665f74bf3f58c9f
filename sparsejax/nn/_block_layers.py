"""SparseEmbedding and SparseLinear: single-table blocks to build models from."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from sparsejax import _arguments
from sparsejax._arguments import PyTree
from sparsejax._lookup import lookup
from sparsejax._rows import indexing
from sparsejax._segments import SegmentTensor
from sparsejax.nn import _layer, _matrix
from sparsejax.nn._block import SparseBlock, TableSpec
from sparsejax.nn._embedding import TABLE_INIT, Embedding, check_padding_id


_EMBEDDING = "sparsejax.nn.SparseEmbedding"
_LINEAR = "sparsejax.nn.SparseLinear"


@dataclasses.dataclass(frozen=True, repr=False)
class SparseEmbedding(SparseBlock):
    """An embedding whose table lives in a store; it looks up ids in the pulled rows.

    `out[i] = table[ids[i]]`. For an array of ids the result is
    `[*ids.shape, features]`; for a SegmentTensor of ids it is a SegmentTensor of rows.

    Args:
      num_embeddings: int V, the number of rows.
      features: int D, the length of a row.
      name: str, the table's name in the store. Blocks with the same name share the
        table.
      param_dtype: of the table.
      embedding_init: for the table's rows, see `TableSpec`. The default draws
        rows of expected squared norm 1.
      padding_id: int, an id that reads zeros, is not pulled and gets no gradient.
      max_norm: see `sparsejax.lookup`.
      mode: what an id reads if it is out of range or was not pulled, see
        `sparsejax.lookup`.

    Example:
      >>> import jax.numpy as jnp, sparsejax as sj
      >>> block = sj.nn.SparseEmbedding(1000, 2, name="item")
      >>> ids = jnp.array([7, 3, 7])
      >>> block.row_ids(ids)["item"].tolist()
      [7, 3, 7]
      >>> rows = sj.SelectedRows(jnp.array([3, 7]), jnp.array([[1.0, 2], [3, 4]]), 1000)
      >>> block({"item": rows}, {}, ids)
      Array([[3., 4.],
             [1., 2.],
             [3., 4.]], dtype=float32)

    References:
      MXNet's proposal "Gluon Sparse API"; `gluon.contrib.nn.SparseEmbedding`.
    """

    num_embeddings: int
    features: int
    _: dataclasses.KW_ONLY
    name: str = "embedding"
    param_dtype: DTypeLike = jnp.float32
    embedding_init: _layer.Initializer = TABLE_INIT
    padding_id: int | None = None
    max_norm: float | None = None
    mode: str = "fill"

    def __repr__(self) -> str:
        return _layer.show(self)

    def __post_init__(self) -> None:
        _check(_EMBEDDING, self, "num_embeddings")

    def tables(self) -> dict[str, TableSpec]:
        """`{name: [num_embeddings, features]}`."""
        shape = (self.num_embeddings, self.features)
        return {self.name: TableSpec(shape, self.param_dtype, self.embedding_init)}

    def row_ids(self, inputs: PyTree) -> dict[str, Any]:
        """The ids, with -1 for padding and for empty elements, which read no row.

        An id out of range stays out of range, except that mode `"clip"` returns the
        clipped id and mode `"zero"` returns -1.
        """
        if isinstance(inputs, SegmentTensor):
            ids = _on_host(_arguments.as_integers(_EMBEDDING, inputs.values))
            skip = _empty_elements(inputs, ids.ndim)
        else:
            ids = _on_host(_arguments.as_integers(_EMBEDDING, inputs))
            skip = np.zeros(ids.shape, bool)
        padding = lookup.padding_mask(_EMBEDDING, ids, self.padding_id)
        if padding is not None:
            skip = skip | _on_host(padding)
        return {self.name: _row_ids(ids, skip, self.num_embeddings, self.mode)}

    def sparse_forward(
        self, tables: Mapping[str, Any], params: PyTree, inputs: PyTree
    ) -> Any:
        """The rows of `inputs`."""
        del params  # this block has none
        layer = Embedding(
            self.num_embeddings,
            self.features,
            param_dtype=self.param_dtype,
            padding_id=self.padding_id,
            max_norm=self.max_norm,
            mode=self.mode,
        )
        return layer({"embedding": tables[self.name]}, inputs)


@dataclasses.dataclass(frozen=True, repr=False)
class SparseLinear(SparseBlock):
    """A linear layer on CSR inputs, whose weights live in a store.

    `out = inputs @ weight + bias`. Only the rows of `weight` for columns that occur in
    the batch are pulled. The bias is a dense parameter.

    Args:
      features: int, the number of output columns.
      in_features: int, the number of columns of the inputs, which is the number of rows
        of the table.
      use_bias: bool.
      name: str, the table's name in the store. Blocks with the same name share the
        table.
      param_dtype: of the table and the bias.
      kernel_init: for the table's rows, see `TableSpec`. Zeros by default, so a column
        first seen late in training does not disturb the output.
      mode: what a column reads if it is out of range or was not pulled, see
        `sparsejax.lookup`.

    Example:
      >>> import jax, jax.numpy as jnp, sparsejax as sj
      >>> block = sj.nn.SparseLinear(1, 5)
      >>> csr = sj.SegmentTensor.from_csr([0, 2, 3], [4, 1, 1], jnp.array([1.0, 2, 3]))
      >>> rows = sj.SelectedRows(jnp.array([1, 4]), jnp.array([[10.0], [100.0]]), 5)
      >>> block({"linear": rows}, block.init(jax.random.key(0)), csr)
      Array([[120.],
             [ 30.]], dtype=float32)

    References:
      MXNet's proposal "Gluon Sparse API", `SparseLinear`.
    """

    features: int
    in_features: int
    _: dataclasses.KW_ONLY
    use_bias: bool = True
    name: str = "linear"
    param_dtype: DTypeLike = jnp.float32
    kernel_init: _layer.Initializer = jax.nn.initializers.zeros
    mode: str = "fill"

    def __repr__(self) -> str:
        return _layer.show(self)

    def __post_init__(self) -> None:
        _check(_LINEAR, self, "in_features")

    def tables(self) -> dict[str, TableSpec]:
        """`{name: [in_features, features]}`."""
        shape = (self.in_features, self.features)
        return {self.name: TableSpec(shape, self.param_dtype, self.kernel_init)}

    def init(self, key: jax.Array) -> dict[str, jax.Array]:
        """`{"bias": [features]}` of zeros; empty without a bias."""
        del key
        shape = (self.features,)
        return {"bias": jnp.zeros(shape, self.param_dtype)} if self.use_bias else {}

    def row_ids(self, inputs: PyTree) -> dict[str, Any]:
        """The columns of the elements of `inputs`; -1 for empty elements.

        Columns out of range are treated as in `SparseEmbedding.row_ids`.

        Raises:
          TypeError, ValueError: `inputs` is not CSR, or has the wrong number of
            columns.
        """
        csr = inputs  # a SegmentTensor as it is: nothing is copied to a device
        if not isinstance(csr, SegmentTensor):
            csr = self._as_csr(csr).elements
        _matrix.check_columns(_LINEAR, csr, self.in_features)
        values = csr.values
        index = values["index"] if isinstance(values, dict) else values
        index = _on_host(_arguments.as_integers(_LINEAR, index, "the index"))
        skip = _empty_elements(csr, index.ndim)
        return {self.name: _row_ids(index, skip, self.in_features, self.mode)}

    def sparse_forward(
        self, tables: Mapping[str, Any], params: PyTree, inputs: PyTree
    ) -> jax.Array:
        """`[num_segments, features]`."""
        csr, shape = self._as_csr(inputs), (self.in_features, self.features)
        table = _layer.parameter(_LINEAR, tables, self.name, shape)
        dtype = _matrix.result_dtype(csr, table, None)
        # Not `dot`: it reads zeros for a row that is not stored and for a column out of
        # range. Here a missing row is one that should have been pulled, so `mode`
        # decides what it reads.
        elements = csr.elements
        skip = ~indexing.in_range(elements.segment_ids, elements.num_segments)
        call = f"{_LINEAR} of the table {self.name!r}"
        rows = lookup.read(call, table, csr.index, skip, self.mode)
        wide = indexing.accumulator_dtype(dtype)
        out = _matrix.sum_segments(csr, _matrix.scale(csr, rows, wide))
        if self.use_bias:
            out = _layer.add_bias(out, params["bias"])
        return out.astype(dtype)

    def _as_csr(self, inputs: Any) -> _matrix.Csr:
        csr = _matrix.as_matrix(_LINEAR, inputs, self.in_features, skip_bad=False)
        if not isinstance(csr, _matrix.Csr):
            raise TypeError(
                f"{_LINEAR}: inputs must be CSR, got an array of shape {csr.shape}. "
                "An array has every column, so every row of the table would be "
                "pulled. Convert it with SegmentTensor.from_csr, or use "
                "sparsejax.nn.Dense."
            )
        return csr


# ------------------------------------------------------------------ private


def _check(call: str, block: Any, rows: str) -> None:
    """Raises if a field of a block is invalid; `rows` is the name of its field V."""
    for name in (rows, "features"):
        _layer.check_size(call, name, getattr(block, name))
    _layer.check_dtype(call, "param_dtype", block.param_dtype)
    init = "embedding_init" if rows == "num_embeddings" else "kernel_init"
    _layer.check_initializer(call, init, getattr(block, init))
    if not isinstance(block.name, str):
        raise TypeError(
            f"{call}: name must be a str (the table's name in the store), got "
            f"{block.name!r}."
        )
    if hasattr(block, "padding_id"):
        check_padding_id(call, block.padding_id)
    _layer.set_fields(block, mode=lookup.check_mode(call, block.mode))


def _empty_elements(st: SegmentTensor, ndim: int) -> Any:
    """Which elements are in no segment, with axes added to match the values."""
    ids = _on_host(st.segment_ids)
    empty = ~((ids >= 0) & (ids < st.num_segments))
    return indexing.append_axes(empty, ndim)


def _on_host(x: Any) -> Any:
    """`x` as a NumPy array if its values are known; tracers stay."""
    return np.asarray(x) if _arguments.is_concrete(x) else x


def _row_ids(ids: Any, skip: Any, height: int, mode: str) -> Any:
    """`ids` as `row_ids` returns them: -1 where `skip` is set or `mode` reads no row.

    An id of -1 that is out of range becomes -2, so that Trainer can tell the two apart.
    """
    if isinstance(ids, np.ndarray) and isinstance(skip, np.ndarray):
        in_range = not ids.size or (ids.min() >= 0 and ids.max() < height)
        if in_range and not skip.any():
            return ids
        xp: Any = np
        limits = np.iinfo(np.int64)
    else:
        xp, ids = jnp, jnp.asarray(ids)
        limits = jnp.iinfo(indexing.promote(ids.dtype, jnp.int8))
    if ids.dtype.kind == "u":  # a large id must not become negative
        most = min(int(limits.max), int(jnp.iinfo(ids.dtype).max))
        ids = xp.minimum(ids, np.array(most, ids.dtype))
    ids = ids.astype(limits.dtype)
    if mode == "clip":
        last = min(height - 1, int(limits.max))
        ids = xp.clip(ids, np.array(0, ids.dtype), np.array(last, ids.dtype))
    elif mode == "zero":
        in_range = ids >= 0
        if height <= limits.max:
            in_range &= ids < np.array(height, ids.dtype)
        ids = xp.where(in_range, ids, np.array(-1, ids.dtype))
    else:
        minus_one = ids == np.array(-1, ids.dtype)
        ids = xp.where(minus_one, np.array(-2, ids.dtype), ids)
    return xp.where(skip, np.array(-1, ids.dtype), ids)
