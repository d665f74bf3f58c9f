"""Embedding and EmbeddingBag: the layers whose only parameter is a table.

`TableLayer` is their base class, with the checks of fields, `init`, `row_ids`, and the
check of the table in the parameters. Each layer defines its own call, which reads rows
and may reduce them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from sparsejax import _arguments
from sparsejax._arguments import ArrayLike, Initializer, PyTree
from sparsejax._lookup import lookup
from sparsejax._lookup.embedding_bag import check_combiner, embedding_bag
from sparsejax._lookup.lookup import as_padding_id
from sparsejax._rows import check_whole, indexing, table_or_none
from sparsejax._segments import SegmentTensor
from sparsejax.nn import _layer, _row_ids


# Rows of expected squared norm 1, as in flax.
TABLE_INIT: Any = jax.nn.initializers.variance_scaling(
    1.0, "fan_in", "normal", out_axis=0
)


@dataclasses.dataclass(frozen=True, repr=False)
class TableLayer:
    """A layer whose only parameter is a table, `{"embedding": [V, D]}`."""

    num_embeddings: int
    features: int
    _: dataclasses.KW_ONLY
    sparse_grad: bool = True
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.dtype("float32")
    padding_id: int | None = None
    max_norm: float | None = None
    mode: str = "fill"
    embedding_init: Initializer = TABLE_INIT

    def __repr__(self) -> str:
        return _layer.show(self)

    def __post_init__(self) -> None:
        dtype, positive = self.dtype, _arguments.static_int
        param_dtype = _layer.check_dtype("param_dtype", self.param_dtype)
        vars(self).update(
            num_embeddings=positive("num_embeddings", self.num_embeddings, 1),
            features=positive("features", self.features, 1),
            dtype=dtype if dtype is None else _layer.check_dtype("dtype", dtype),
            param_dtype=param_dtype,
            padding_id=as_padding_id(self.padding_id),
            max_norm=lookup.check_max_norm(self.max_norm, param_dtype),
            mode=lookup.check_mode(self.mode),
            sparse_grad=_arguments.check_bool("sparse_grad", self.sparse_grad),
        )

    def init(self, key: jax.Array) -> dict[str, jax.Array]:
        """Makes the parameters: `{"embedding": [V, D]}`.

        Args:
          key: PRNG key.

        Raises:
          TypeError: `key` is not a PRNG key.

        Example:
          >>> import jax, sparsejax as sj
          >>> sj.nn.Embedding(7, 2).init(jax.random.key(0))["embedding"].shape
          (7, 2)
        """
        key = _arguments.as_key(key)
        shape, dtype = (self.num_embeddings, self.features), self.param_dtype
        init = self.embedding_init
        return {"embedding": _layer.draw("embedding_init", init, key, shape, dtype)}

    def table(self, params: PyTree) -> Any:
        """Checks the table in `params`, and returns it.

        Args:
          params: as returned by `init`, or the table alone.

        Raises:
          TypeError, ValueError: `params` do not match this layer.

        Example:
          >>> import jax, sparsejax as sj
          >>> layer = sj.nn.EmbeddingBag(5, 2)
          >>> layer.table(layer.init(jax.random.key(0))).shape
          (5, 2)
        """
        if table_or_none(params) is not None:
            params = {"embedding": params}
        _layer.check_params(params, ("embedding",))
        shape = self.num_embeddings, self.features
        return _layer.table_of(params, "embedding", shape, self.sparse_grad)

    def row_ids(self, ids: ArrayLike | SegmentTensor) -> dict[str, Any]:
        """Returns the ids of the rows that the call reads, to pull them from a store.

        Args:
          ids: as in the call.

        Returns:
          `{"embedding": integers}` in the shape of `ids`, on the host unless traced. -1
          stands for padding and for an element of no segment, which read no row. An id
          out of range stays out of range (-1 becomes -2), except that mode `"clip"`
          gives the nearest row and mode `"zero"` gives -1.

        Example:
          >>> import numpy as np, sparsejax as sj
          >>> layer = sj.nn.Embedding(7, 2, padding_id=0)
          >>> layer.row_ids(np.array([3, 0, 9, -1]))["embedding"].tolist()
          [3, -1, 9, -2]
        """
        segments = None
        if isinstance(ids, SegmentTensor):
            segments, _ = split_weights(ids, None)
            ids = segments.values
        numbers: Any = _row_ids.on_host(_arguments.as_integers(ids))
        skip = lookup.padding_mask(numbers, self.padding_id)
        skip = np.zeros((), bool) if skip is None else _row_ids.on_host(skip)
        if segments is not None:
            skip = skip | _row_ids.without_segment(segments, numbers.ndim)
        rows = _row_ids.row_ids(numbers, skip, self.num_embeddings, self.mode)
        return {"embedding": rows}

    def table_prefix(self) -> dict[str, bool | None]:
        """Returns `tables=` of `sparsejax.value_and_grad` for the parameters.

        Example:
          >>> import sparsejax as sj
          >>> sj.nn.EmbeddingBag(5, 2, sparse_grad=False).table_prefix()
          {'embedding': False}
        """
        return {"embedding": self.sparse_grad}


@dataclasses.dataclass(frozen=True, repr=False)
class Embedding(TableLayer):
    """A table with one row per id.

    `out[i] = embedding[ids[i]]`, as in `sparsejax.lookup`. Under `sparsejax.grad` the
    table's gradient is a SelectedRows of the rows read if they are at most half of
    the table; `tables=sparsejax.nn.tables(layer)` requires a SelectedRows in any case.

    Args:
      num_embeddings: int V, the number of rows.
      features: int D, the length of a row.
      sparse_grad: False gives the table a dense gradient, even under `sparsejax.grad`.
      dtype: of the result; None for the table's dtype. The rows read are cast, not the
        table.
      param_dtype: of the table.
      padding_id: int, an id that reads zeros and gets no gradient.
      max_norm: positive number; rows of larger norm are scaled down to it when they are
        read.
      mode: what an id out of range reads: `"fill"` (NaN), `"clip"`, `"zero"`,
        `"error"`, as in `sparsejax.lookup`.
      embedding_init: initializer `(key, shape, dtype) -> array`. The default draws rows
        of expected squared norm 1.

    Raises:
      TypeError, ValueError: a field has the wrong type, or a size is not positive.

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
      PyTorch, `nn.Embedding(sparse=True)`; Gluon, `nn.Embedding(sparse_grad=True)`;
      PaddlePaddle, `embedding(is_sparse=True)`; flax, `Embed`.
    """

    def __call__(self, params: PyTree, ids: ArrayLike | SegmentTensor) -> Any:
        """Returns the rows of `ids`.

        Args:
          params: as returned by `init`, or the table alone. The table may be a
            SelectedRows of pulled rows; ids of rows it does not store count as out of
            range. Or a QuantizedTable.
          ids: integers of any shape, or a SegmentTensor of ids.

        Returns:
          `[*ids.shape, D]`; for a SegmentTensor of ids, a SegmentTensor of rows.

        Raises:
          TypeError, ValueError: `params` do not match this layer, or `ids` are not
            integers.
          checkify.JaxRuntimeError: ids are out of range, under mode `"error"` outside
            of `jit`.
        """
        table = self.table(params)
        if not isinstance(ids, SegmentTensor):
            return self._rows(table, _arguments.as_integers(ids), None)
        inside = indexing.in_range(ids.segment_ids, ids.num_segments)
        values = _arguments.as_integers(ids.values)
        inside = indexing.append_axes(inside, values.ndim)
        rows = self._rows(table, values, jnp.broadcast_to(inside, values.shape))
        return ids.map(lambda _: rows)

    def _rows(self, table: Any, ids: Any, inside: jax.Array | None) -> jax.Array:
        """Returns the rows of `ids`, with zeros where `inside` is False."""
        skip = lookup.padding_mask(ids, self.padding_id)
        if inside is not None:
            skip = ~inside if skip is None else skip | ~inside
        ids = _arguments.as_ids(ids, self.num_embeddings)
        rows = lookup.read(table, ids, skip, self.mode)
        if self.max_norm is not None:
            rows = lookup.clip_rows(rows, self.max_norm, 1)
        return rows if self.dtype is None else rows.astype(self.dtype)

    def attend(self, params: PyTree, query: ArrayLike) -> jax.Array:
        """Computes `query @ embedding.T`: uses the table as a tied output layer.

        It reads all rows, so the table's gradient is dense.

        Args:
          params: as `init` makes them.
          query: real floats `[..., D]`.

        Returns:
          `[..., V]`, a score for each id, in `dtype` or the promoted dtype of query and
          table.

        Raises:
          TypeError: the table is not an array, or `query` has another type or shape.

        Example:
          >>> import jax, jax.numpy as jnp, sparsejax as sj
          >>> layer = sj.nn.Embedding(5, 2, embedding_init=jax.nn.initializers.ones)
          >>> params = layer.init(jax.random.key(0))
          >>> layer.attend(params, jnp.array([1.0, 2.0]))
          Array([3., 3., 3., 3., 3.], dtype=float32)

        References:
          flax, `Embed.attend`; Press and Wolf, 2017, "Using the Output Embedding to
          Improve Language Models".
        """
        table = self.table(params)
        check_whole("params['embedding']", table, "attend")
        query = jnp.asarray(query)
        _arguments.check_floats(query, "query")
        if query.shape[-1:] != (self.features,):
            raise ValueError(
                f"query must have shape [..., {self.features}], got {query.shape}."
            )
        dtype = self.dtype or indexing.promote(query.dtype, table.dtype)
        wide = indexing.accumulator_dtype(dtype)
        factors = [jnp.asarray(x).astype(dtype) for x in (query, table)]
        return jnp.tensordot(
            *factors, axes=(-1, -1), preferred_element_type=wide
        ).astype(dtype)


@dataclasses.dataclass(frozen=True, repr=False)
class EmbeddingBag(TableLayer):
    """A table whose rows are read in bags, each reduced to one row.

    `out[b]` is the sum (or mean, ...) of `embedding[ids[i]]` over the i in bag b, as in
    `sparsejax.embedding_bag`. Under `sparsejax.grad` the table's gradient is a
    SelectedRows with a slot per id if there are at most half as many ids as rows;
    `tables=sparsejax.nn.tables(layer)` requires a SelectedRows in any case.

    Args:
      num_embeddings: int V, the number of rows.
      features: int D, the length of a row.
      combiner: how a bag is reduced: `"sum"`, `"mean"`, `"sqrtn"`, `"max"`, `"min"`,
        `"logsumexp"`, or `"none"` for the rows themselves.
      sparse_grad, dtype, param_dtype, max_norm, mode, embedding_init: as in
        `sparsejax.nn.Embedding`.
      padding_id: int, an id that does not count in any bag.

    Raises:
      TypeError, ValueError: a field has the wrong type, a size is not positive, or the
        combiner is unknown.

    Example:
      >>> import jax, jax.numpy as jnp, sparsejax as sj
      >>> ones = jax.nn.initializers.ones
      >>> layer = sj.nn.EmbeddingBag(
      ...     1000, 2, combiner="mean", padding_id=-1, embedding_init=ones
      ... )
      >>> params = layer.init(jax.random.key(0))
      >>> layer(params, jnp.array([[3, 7, -1], [-1, -1, -1]]))
      Array([[1., 1.],
             [0., 0.]], dtype=float32)
      >>> layer(params, sj.SegmentTensor.from_lists([[3, 7], [], [5]])).shape
      (3, 2)

    References:
      PyTorch, `nn.EmbeddingBag(sparse=True)`; TorchRec, `EmbeddingBagConfig`.
    """

    combiner: str = dataclasses.field(default="sum", kw_only=True)

    def __post_init__(self) -> None:
        check_combiner(self.combiner)
        super().__post_init__()

    def __call__(
        self,
        params: PyTree,
        ids: ArrayLike | SegmentTensor,
        segment_ids: ArrayLike | None = None,
        num_segments: int | None = None,
        *,
        weights: ArrayLike | None = None,
        indices_are_sorted: bool = False,
    ) -> jax.Array:
        """Returns one row for each bag.

        Args:
          params: as returned by `init`, or the table alone. The table may be a
            SelectedRows of pulled rows; ids of rows it does not store count as out of
            range. Or a QuantizedTable.
          ids: integers `[..., L]`, each row a bag padded with `padding_id`; integers
            `[n]` with `segment_ids`; a SegmentTensor of ids; or a SegmentTensor of
            `{"index", "value"}`, where "value" holds the weights.
          segment_ids: integers `[n]`, the bag of each id.
          num_segments: int, the number of bags; static.
          weights: real numbers with the shape of `ids`, for the combiners sum, mean and
            sqrtn; differentiable.
          indices_are_sorted: True if `segment_ids` are ascending, which is faster.

        Returns:
          `[..., D]`, or `[num_segments, D]`.

        Raises:
          TypeError, ValueError: `params` do not match this layer, or
            `sparsejax.embedding_bag` rejects the ids, segments or weights.
          checkify.JaxRuntimeError: ids are out of range, under mode `"error"` outside
            of `jit`.
        """
        table = self.table(params)
        if isinstance(ids, SegmentTensor):
            ids, weights = split_weights(ids, weights)
        out = embedding_bag(
            table,
            ids,
            segment_ids,
            num_segments,
            weights=weights,
            combiner=self.combiner,
            mode=self.mode,
            padding_id=self.padding_id,
            max_norm=self.max_norm,
            indices_are_sorted=indices_are_sorted,
        )
        return out if self.dtype is None else out.astype(self.dtype)


# ------------------------------------------------------------------ arguments


def split_weights(ids: SegmentTensor, weights: Any) -> tuple[SegmentTensor, Any]:
    """Splits a SegmentTensor of `{"index", "value"}` into ids and weights."""
    values = ids.values
    if not isinstance(values, dict) or values.keys() != {"index", "value"}:
        return ids, weights
    if weights is not None:
        raise ValueError(
            "weights are given twice: as the 'value' of the SegmentTensor ids, and as "
            "weights. Leave weights out, or pass ids without 'value'."
        )
    static = ids.num_segments, ids.is_sorted
    children = values["index"], ids.segment_ids
    return SegmentTensor.tree_unflatten(static, children), values["value"]
