"""SparseEmbedding and SparseLinear: the blocks that most others are made of."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sparsejax import _arguments
from sparsejax._lookup import lookup
from sparsejax._rows import indexing
from sparsejax._segments import SegmentTensor
from sparsejax.nn import _layer, _matrix
from sparsejax.nn._block import SparseBlock, TableSpec
from sparsejax.nn._embedding import Embedding
from sparsejax.nn._one_table import TABLE_INIT, check_padding_id


_EMBEDDING = "sparsejax.nn.SparseEmbedding"
_LINEAR = "sparsejax.nn.SparseLinear"
_ZEROS: Any = jax.nn.initializers.zeros


@dataclasses.dataclass(frozen=True, repr=False)
class SparseEmbedding(SparseBlock):
    """An embedding whose table is in a store: `lookup` of the rows that were pulled.

    `out[i] = table[ids[i]]`. Inputs are ids of any shape, which gives
    `[*ids.shape, features]`, or a SegmentTensor of ids, which gives one of rows.

    Args:
      num_embeddings: int V, rows of the table.
      features: int D, width of a row.
      name: str, the table's name in the store. Blocks of one name share the table.
      param_dtype: of the table.
      initializer: of the table's rows, see `TableSpec`. The default draws rows of
        expected squared norm 1.
      padding_id: int, an id that reads zeros, is not pulled and gets no gradient.
      max_norm: see `sparsejax.lookup`.
      mode: what an id that is out of range or was not pulled reads, see
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
    param_dtype: Any = jnp.float32
    initializer: Any = TABLE_INIT
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
        return {self.name: TableSpec(shape, self.param_dtype, self.initializer)}

    def row_ids(self, inputs: Any) -> dict[str, Any]:
        """The ids; -1 for padding and for empty elements, which read no row.

        An id out of range stays one. Under mode `"clip"` it is the id it is clipped to,
        and under `"zero"` it reads no row either.
        """
        ids, skip = self._ids_of(inputs)
        return {self.name: _named(ids, skip, self.num_embeddings, self.mode)}

    def sparse_forward(
        self, tables: Mapping[str, Any], params: Any, inputs: Any
    ) -> Any:
        """The rows of `inputs`."""
        del params  # it has none
        layer = Embedding(
            self.num_embeddings,
            self.features,
            param_dtype=self.param_dtype,
            padding_id=self.padding_id,
            max_norm=self.max_norm,
            mode=self.mode,
        )
        return layer({"embedding": tables[self.name]}, inputs)

    def _ids_of(self, inputs: Any) -> tuple[Any, Any]:
        """Ids, and which of them read zeros: padding, and empty elements."""
        if isinstance(inputs, SegmentTensor):
            ids = _known(_arguments.as_integers(_EMBEDDING, inputs.values))
            skip = _empty(inputs, ids.ndim)
        else:
            ids = _known(_arguments.as_integers(_EMBEDDING, inputs))
            skip = np.zeros(ids.shape, bool)
        padding = lookup.padding_mask(_EMBEDDING, ids, self.padding_id)
        return ids, skip if padding is None else skip | _known(padding)


@dataclasses.dataclass(frozen=True, repr=False)
class SparseLinear(SparseBlock):
    """A linear layer on CSR inputs, whose weights are in a store.

    `out = inputs @ weight + bias`, and of `weight` only those rows are pulled whose
    columns the batch has. The bias is a dense parameter.

    Args:
      features: int, width of the output.
      in_features: int, columns of the inputs and rows of the table.
      use_bias: bool.
      name: str, the table's name in the store. Blocks of one name share the table.
      param_dtype: of the table and the bias.
      initializer: of the table's rows, see `TableSpec`; zeros by default, so that a
        column that is first seen late starts without an opinion.
      mode: what a column that is out of range or was not pulled reads, see
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
    param_dtype: Any = jnp.float32
    initializer: Any = _ZEROS
    mode: str = "fill"

    def __repr__(self) -> str:
        return _layer.show(self)

    def __post_init__(self) -> None:
        _check(_LINEAR, self, "in_features")

    def tables(self) -> dict[str, TableSpec]:
        """`{name: [in_features, features]}`."""
        shape = (self.in_features, self.features)
        return {self.name: TableSpec(shape, self.param_dtype, self.initializer)}

    def init(self, key: jax.Array) -> dict[str, jax.Array]:
        """`{"bias": [features]}`, zeros; empty without a bias."""
        del key
        shape = (self.features,)
        return {"bias": jnp.zeros(shape, self.param_dtype)} if self.use_bias else {}

    def row_ids(self, inputs: Any) -> dict[str, Any]:
        """The columns that `inputs` has an element in; -1 for empty elements.

        Columns out of range as by `SparseEmbedding.row_ids`.

        Raises:
          TypeError, ValueError: `inputs` is no CSR of this layer's columns.
        """
        csr = inputs  # not as `sparse_forward` takes it, which would use the device
        if not isinstance(csr, SegmentTensor):
            csr = self._as_csr(csr).elements
        _matrix.check_columns(_LINEAR, csr, self.in_features)
        values = csr.values
        index = values["index"] if isinstance(values, dict) else values
        index = _known(_arguments.as_integers(_LINEAR, index, "the index"))
        skip = _empty(csr, index.ndim)
        return {self.name: _named(index, skip, self.in_features, self.mode)}

    def sparse_forward(
        self, tables: Mapping[str, Any], params: Any, inputs: Any
    ) -> jax.Array:
        """`[num_segments, features]`."""
        csr, shape = self._as_csr(inputs), (self.in_features, self.features)
        table = _layer.parameter(_LINEAR, tables, self.name, shape)
        dtype = _matrix.result_dtype(csr, table, None)
        # `dot` means by a SelectedRows the array it stands for, zero where no row is
        # stored. Here a row that is not stored was forgotten, so it is read by `mode`.
        # So is a column out of range, for which `dot` has zeros too.
        elements = csr.elements
        nothing = ~indexing.in_range(elements.segment_ids, elements.num_segments)
        call = f"{_LINEAR} of the table {self.name!r}"
        rows = lookup.read_rows(call, table, csr.index, nothing, self.mode)
        wide = indexing.accumulator_dtype(dtype)
        out = _matrix.sum_segments(csr, _matrix.scale(csr, rows, wide))
        if self.use_bias:
            out = out + _layer.beside(params["bias"], out)
        return out.astype(dtype)

    def _as_csr(self, inputs: Any) -> _matrix.Csr:
        csr = _matrix.as_matrix(_LINEAR, inputs, self.in_features, skip_bad=False)
        if not isinstance(csr, _matrix.Csr):
            raise TypeError(
                f"{_LINEAR}: inputs are an array of shape {csr.shape}, which has all "
                "columns, so all rows of the table would be pulled. Pass CSR "
                "(SegmentTensor.from_csr makes it), or use an ordinary layer, "
                "sparsejax.nn.Dense."
            )
        return csr


# ------------------------------------------------------------------ private


def _check(call: str, block: Any, rows: str) -> None:
    """The fields of a block, or an error."""
    for name in (rows, "features"):
        _layer.check_size(call, name, getattr(block, name))
    _layer.check_dtype(call, "param_dtype", block.param_dtype)
    _layer.check_initializer(call, "initializer", block.initializer)
    if not isinstance(block.name, str):
        raise TypeError(
            f"{call}: name must be a string, the table's name in the store, got "
            f"{block.name!r}."
        )
    if hasattr(block, "padding_id"):
        check_padding_id(call, block.padding_id)
    lookup.check_mode(call, block.mode)


def _empty(st: SegmentTensor, ndim: int) -> Any:
    """Which elements belong to no segment, with as many axes as the values have."""
    ids = _known(st.segment_ids)
    empty = ~((ids >= 0) & (ids < st.num_segments))
    return indexing.append_axes(empty, ndim)


def _known(x: Any) -> Any:
    """NumPy's array, where the values are known: nothing need be on the device."""
    return np.asarray(x) if _arguments.is_concrete(x) else x


def _named(ids: Any, skip: Any, height: int, mode: str) -> Any:
    """What `row_ids` says of `ids`: -1 where no row is read, and no error.

    A bad id of -1 becomes -2, so that the two can be told apart.
    """
    xp: Any = np
    if isinstance(ids, np.ndarray) and isinstance(skip, np.ndarray):
        fine = not ids.size or (ids.min() >= 0 and ids.max() < height)
        if fine and not skip.any():
            return ids
        limits = np.iinfo(np.int64)
    else:
        ids, xp = jnp.asarray(ids), jnp
        limits = jnp.iinfo(indexing.promote(ids.dtype, jnp.int8))
    if ids.dtype.kind == "u":  # a large one must not turn into a negative one
        most = min(int(limits.max), int(jnp.iinfo(ids.dtype).max))
        ids = xp.minimum(ids, np.array(most, ids.dtype))
    ids = ids.astype(limits.dtype)
    if mode == "clip":
        last = min(height - 1, int(limits.max))
        ids = xp.clip(ids, np.array(0, ids.dtype), np.array(last, ids.dtype))
    else:
        own = ids >= 0
        if height <= limits.max:
            own &= ids < np.array(height, ids.dtype)
        minus_one = ids == np.array(-1, ids.dtype)
        other = np.array(-1 if mode == "zero" else -2, ids.dtype)
        change = ~own if mode == "zero" else minus_one
        ids = xp.where(change, other, ids)
    return xp.where(skip, np.array(-1, ids.dtype), ids)
