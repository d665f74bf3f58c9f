"""Embedding: a table whose rows are looked up by id."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from sparsejax import _arguments
from sparsejax._lookup import lookup
from sparsejax._rows import indexing
from sparsejax._segments import SegmentTensor
from sparsejax.nn import _layer
from sparsejax.nn._one_table import TABLE_INIT, OneTable, table_fields


_CALL = "sparsejax.nn.Embedding"


@dataclasses.dataclass(frozen=True, repr=False, init=False)
class Embedding(OneTable):
    """A table of one row for each id.

    `out[i] = embedding[ids[i]]`, as `sparsejax.lookup` reads it. Under
    `sparsejax.grad` the table's gradient is a SelectedRows of the rows read,
    where at most a quarter of them is; `tables=sparsejax.nn.tables(layer)`
    insists on it.

    Args:
      num_embeddings: int V, the number of rows.
      features: int D, the length of a row.
      sparse_grad: False gives the table the dense gradient, under
        `sparsejax.grad` too.
      dtype: type of the result; None for that of the table. The rows read are
        cast, not the table.
      param_dtype: type of the table.
      init: initializer `(key, shape, dtype) -> array`. The default draws rows
        of expected squared norm 1.
      padding_id: int, an id that reads zeros and gets no gradient.
      max_norm: positive number; rows of greater norm are scaled to it as they
        are read.
      mode: what an id out of range reads: `"fill"` (NaN), `"clip"`, `"zero"` or
        `"error"`, as in `sparsejax.lookup`.
      initializer: the field that `init` is kept in, for `dataclasses.replace`.

    Raises:
      TypeError, ValueError: a field of a wrong kind, or sizes that are not
        positive.

    Example:
      >>> import jax, jax.numpy as jnp, sparsejax as sj
      >>> layer = sj.nn.Embedding(1000, 4, padding_id=0)
      >>> layer
      Embedding(1000, 4, padding_id=0)
      >>> params = layer.init(jax.random.key(0))
      >>> layer(params, jnp.array([[3, 0], [7, 3]])).shape
      (2, 2, 4)
      >>> loss = lambda params, ids: jnp.sum(layer(params, ids) ** 2)
      >>> sj.grad(loss)(params, jnp.array([3, 7, 3]))["embedding"].rows
      Array([3, 7, 3], dtype=int32)

    References:
      PyTorch, `nn.Embedding(sparse=True)`; Gluon,
      `nn.Embedding(sparse_grad=True)`; PaddlePaddle,
      `embedding(is_sparse=True)`; flax, `Embed`.
    """

    num_embeddings: int
    features: int
    _: dataclasses.KW_ONLY
    sparse_grad: bool = True
    dtype: Any = None
    param_dtype: Any = jnp.dtype("float32")
    padding_id: int | None = None
    max_norm: float | None = None
    mode: str = "fill"
    initializer: _layer.Initializer = TABLE_INIT

    def __repr__(self) -> str:
        return _layer.show(self)

    def __init__(
        self,
        num_embeddings: int,
        features: int,
        *,
        sparse_grad: bool = True,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        init: _layer.Initializer | None = None,
        padding_id: int | None = None,
        max_norm: float | None = None,
        mode: str = "fill",
        initializer: _layer.Initializer = TABLE_INIT,
    ):
        fields: dict[str, Any] = dict(
            sparse_grad=sparse_grad, dtype=dtype, param_dtype=param_dtype
        )
        fields |= dict(padding_id=padding_id, max_norm=max_norm, mode=mode)
        fields["initializer"] = initializer if init is None else init
        _layer.set_fields(
            self, **table_fields(_CALL, num_embeddings, features, **fields)
        )

    def __call__(self, params: Any, ids: Any) -> Any:
        """The rows of `ids`.

        Args:
          params: as `init` makes them, or the table alone. It may be a SelectedRows, of
            which the rows in `ids` were pulled; others count as out of range.
          ids: integers of any shape; or a SegmentTensor of them.

        Returns:
          `[*ids.shape, D]`; of a SegmentTensor, one of the rows.

        Raises:
          TypeError, ValueError: `params` are not this layer's, or `ids` no integers.
          checkify.JaxRuntimeError: mode `"error"`, outside of `jit`: ids out of range.
        """
        table = self.table(params)
        if not isinstance(ids, SegmentTensor):
            return self._rows(table, _arguments.as_integers(_CALL, ids), None)
        if not hasattr(ids.values, "dtype"):
            found = _arguments.kind_of(ids.values)
            raise TypeError(
                f"{_CALL}: the values of a SegmentTensor must be one array of ids, got "
                f"{found}. Pass that part of them: st.values['ids'], with the same "
                "segment ids."
            )
        inside = indexing.in_range(ids.segment_ids, ids.num_segments)
        values = _arguments.as_integers(_CALL, ids.values)
        inside = indexing.append_axes(inside, values.ndim)
        rows = self._rows(table, values, jnp.broadcast_to(inside, values.shape))
        return ids.map(lambda _: rows)

    def _rows(self, table: Any, ids: Any, inside: jax.Array | None) -> jax.Array:
        """The rows of `ids`, zeros where they are not `inside`."""
        skip = lookup.padding_mask(_CALL, ids, self.padding_id)
        if inside is not None:
            skip = ~inside if skip is None else skip | ~inside
        ids = _arguments.as_ids(_CALL, ids, self.num_embeddings)
        rows = lookup.read_rows(_CALL, table, ids, skip, self.mode)
        if self.max_norm is not None:
            rows = lookup.clip_rows(rows, self.max_norm, 1)
        return rows if self.dtype is None else rows.astype(self.dtype)

    def attend(self, params: Any, query: Any) -> jax.Array:
        """`query @ embedding.T`: the table as the output layer, tied to the input.

        It uses all rows, so a loss that goes through it gives the table a dense
        gradient.

        Args:
          params: as `init` makes them.
          query: real floats `[..., D]`.

        Returns:
          `[..., V]`, a score for each id, of `dtype` or of the common type of both.

        Raises:
          TypeError, ValueError: the table is a SelectedRows, or `query` is no such
            array.

        Example:
          >>> import jax, jax.numpy as jnp, sparsejax as sj
          >>> layer = sj.nn.Embedding(5, 2, init=jax.nn.initializers.ones)
          >>> params = layer.init(jax.random.key(0))
          >>> layer.attend(params, jnp.array([1.0, 2.0]))
          Array([3., 3., 3., 3., 3.], dtype=float32)

        References:
          flax, `Embed.attend`; Press and Wolf, 2017, "Using the Output Embedding to
          Improve Language Models".
        """
        table = self.table(params)
        if not isinstance(table, jax.Array):
            raise TypeError(
                f"{_CALL}.attend: params['embedding'] is a SelectedRows, of which some "
                "rows are stored, and attend multiplies all of them. Pass the whole "
                "table."
            )
        query = _arguments.as_array(query)
        shape, kind = getattr(query, "shape", ()), getattr(query, "dtype", None)
        floats = kind is not None and jnp.issubdtype(kind, jnp.floating)
        if not floats or shape[-1:] != (self.features,):
            found = f"{kind} of shape {shape}" if kind else _arguments.kind_of(query)
            raise TypeError(
                f"{_CALL}.attend: query must be an array of real floats [..., "
                f"{self.features}], got {found}."
            )
        dtype = self.dtype or indexing.promote(query.dtype, table.dtype)
        wide = indexing.accumulator_dtype(dtype)
        query, table = query.astype(dtype), table.astype(dtype)
        return jnp.tensordot(
            query, table, axes=(-1, -1), preferred_element_type=wide
        ).astype(dtype)
