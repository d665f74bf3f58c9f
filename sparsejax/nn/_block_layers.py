"""SparseEmbedding and SparseLinear: Embedding and Dense whose table is in a store.

`SparseBlock` comes first among the base classes: `init`, the call and `row_ids` have
the arguments of a block. The methods below call the layer's own methods by name.
"""

# The layers name the arguments of these methods differently.
# pyright: reportIncompatibleMethodOverride=false

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax

from sparsejax import _arguments
from sparsejax._arguments import Initializer, PyTree
from sparsejax.nn import _matrix
from sparsejax.nn._block import SparseBlock, TableSpec
from sparsejax.nn._dense import Dense
from sparsejax.nn._embedding import Embedding


@dataclasses.dataclass(frozen=True, repr=False)
class SparseEmbedding(SparseBlock, Embedding):
    """An Embedding whose table is in a store; it reads ids in the pulled rows.

    `out[i] = table[ids[i]]`. For an array of ids the result is
    `[*ids.shape, features]`; for a SegmentTensor of ids it is a SegmentTensor of rows.

    Args:
      num_embeddings: int V, the number of rows.
      features: int D, the length of a row.
      name: str, the table's name in the store. Blocks with the same name share the
        table.
      sparse_grad, dtype, param_dtype, padding_id, max_norm: as in `Embedding`. An id
        that equals `padding_id` is not pulled.
      mode: what an id reads if it is out of range or was not pulled, as in
        `sparsejax.lookup`.
      embedding_init: of one row, see `TableSpec`. The default draws rows of expected
        squared norm 1.

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

    _call: ClassVar[str] = "sparsejax.nn.SparseEmbedding"
    name: str = dataclasses.field(default="embedding", kw_only=True)

    def __post_init__(self) -> None:
        Embedding.__post_init__(self)
        _check_name(self)

    def tables(self) -> dict[str, TableSpec]:
        """Returns `{name: [num_embeddings, features]}`."""
        shape = (self.num_embeddings, self.features)
        return {self.name: TableSpec(shape, self.param_dtype, self.embedding_init)}

    def init(self, key: jax.Array) -> dict[str, jax.Array]:
        """Returns an empty dict: the table is in the store."""
        _arguments.as_key(key)
        return {}

    def row_ids(self, inputs: PyTree) -> dict[str, Any]:
        """Returns `{name: ids}`, the ids as in `Embedding.row_ids`."""
        return {self.name: Embedding.row_ids(self, inputs)["embedding"]}

    def sparse_forward(
        self, tables: Mapping[str, Any], params: PyTree, inputs: PyTree
    ) -> Any:
        """Returns the rows of `inputs`."""
        del params  # this block has none
        return Embedding.__call__(self, {"embedding": tables[self.name]}, inputs)

    def table_prefix(self) -> dict[str, bool | None]:
        """Returns an empty dict, like the parameters."""
        return {}


@dataclasses.dataclass(frozen=True, repr=False)
class SparseLinear(SparseBlock, Dense):
    """A Dense on CSR inputs whose kernel is in a store.

    `out = inputs @ kernel + bias`. Only the rows of the kernel for columns that occur
    in the batch are pulled. The bias is a dense parameter.

    Args:
      features: int, the number of output columns.
      in_features: int, the number of columns of the inputs, which is the number of rows
        of the table.
      name: str, the table's name in the store. Blocks with the same name share the
        table.
      use_bias, dtype, param_dtype, bias_init, sparse_grad: as in `Dense`.
      kernel_init: of one row, see `TableSpec`. Zeros by default, so a column first seen
        late in training does not disturb the output.
      mode: what a column reads if it is out of range or was not pulled, as in `Dense`.

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

    _call: ClassVar[str] = "sparsejax.nn.SparseLinear"
    kernel_init: Initializer = dataclasses.field(
        default=jax.nn.initializers.zeros, kw_only=True
    )
    mode: str = dataclasses.field(default="fill", kw_only=True)
    name: str = dataclasses.field(default="linear", kw_only=True)

    def __post_init__(self) -> None:
        Dense.__post_init__(self)
        _arguments.static_int("in_features", self.in_features, 1)
        _check_name(self)

    def tables(self) -> dict[str, TableSpec]:
        """Returns `{name: [in_features, features]}`."""
        return {self.name: TableSpec(self._shape, self.param_dtype, self.kernel_init)}

    def init(self, key: jax.Array) -> dict[str, jax.Array]:
        """Returns `{"bias": [features]}`; empty without a bias."""
        key = _arguments.as_key(key)
        return {"bias": self.init_bias(key)} if self.use_bias else {}

    def row_ids(self, inputs: PyTree) -> dict[str, Any]:
        """Returns `{name: ids}`, the columns of the elements as in `Dense.row_ids`."""
        return {self.name: Dense.row_ids(self, inputs)["kernel"]}

    def sparse_forward(
        self, tables: Mapping[str, Any], params: PyTree, inputs: PyTree
    ) -> jax.Array:
        """Returns `[num_segments, features]`."""
        inputs = _matrix.as_elements(inputs, self._shape[0])
        params = {"kernel": tables[self.name], **params}
        return Dense.__call__(self, params, inputs)

    def table_prefix(self) -> dict[str, bool | None]:
        """Returns False for the bias."""
        return {"bias": False} if self.use_bias else {}

    @property
    def _shape(self) -> tuple[int, int]:
        columns: Any = self.in_features  # not None: __post_init__ checks it
        return columns, self.features


def _check_name(block: Any) -> None:
    """Raises unless the table's name is a str."""
    if not isinstance(block.name, str):
        raise TypeError(
            f"{block._call}: name must be a str, the table's name in the store, got "
            f"{block.name!r}."
        )
