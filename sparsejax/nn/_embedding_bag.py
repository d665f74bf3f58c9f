"""EmbeddingBag: rows of a table, reduced to one row a bag."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from sparsejax._lookup.embedding_bag import embedding_bag
from sparsejax._segments import SegmentTensor
from sparsejax.nn import _layer
from sparsejax.nn._one_table import TABLE_INIT, OneTable, table_fields


COMBINERS = ("sum", "mean", "sqrtn", "max", "min", "logsumexp", "none")

_CALL = "sparsejax.nn.EmbeddingBag"


@dataclasses.dataclass(frozen=True, repr=False, init=False)
class EmbeddingBag(OneTable):
    """A table, of which bags of rows are read and each is reduced to one row.

    `out[b]` is the sum, the mean, ... of `embedding[ids[i]]` over the i of bag b, as
    `sparsejax.embedding_bag` forms it. Under `sparsejax.grad` the table's gradient is a
    SelectedRows of a row for each id, where these are at most a quarter of the rows;
    `tables=sparsejax.nn.tables(layer)` insists on it.

    Args:
      num_embeddings: int V, the number of rows.
      features: int D, the length of a row.
      combiner: how a bag is reduced: `"sum"`, `"mean"`, `"sqrtn"`, `"max"`, `"min"`,
        `"logsumexp"`, or `"none"` for the rows themselves.
      sparse_grad, dtype, param_dtype, init, max_norm, mode, initializer: as in
        `sparsejax.nn.Embedding`.
      padding_id: int, an id that is in no bag.

    Raises:
      TypeError, ValueError: a field of a wrong kind, sizes that are not positive, or an
        unknown combiner.

    Example:
      >>> import jax, jax.numpy as jnp, sparsejax as sj
      >>> ones = jax.nn.initializers.ones
      >>> layer = sj.nn.EmbeddingBag(1000, 2, combiner="mean", padding_id=-1, init=ones)
      >>> params = layer.init(jax.random.key(0))
      >>> layer(params, jnp.array([[3, 7, -1], [-1, -1, -1]]))
      Array([[1., 1.],
             [0., 0.]], dtype=float32)
      >>> layer(params, sj.SegmentTensor.from_lists([[3, 7], [], [5]])).shape
      (3, 2)

    References:
      PyTorch, `nn.EmbeddingBag(sparse=True)`; TorchRec, `EmbeddingBagConfig`.
    """

    num_embeddings: int
    features: int
    _: dataclasses.KW_ONLY
    combiner: str = "sum"
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
        combiner: str = "sum",
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
            self,
            combiner=check_combiner(_CALL, combiner),
            **table_fields(_CALL, num_embeddings, features, **fields),
        )

    def __call__(
        self,
        params: Any,
        ids: Any,
        segment_ids: Any = None,
        num_segments: int | None = None,
        *,
        weights: Any = None,
        indices_are_sorted: bool = False,
    ) -> jax.Array:
        """One row for each bag.

        Args:
          params: as `init` makes them, or the table alone. It may be a SelectedRows, of
            which the rows in `ids` were pulled; others count as out of range.
          ids: integers. `[..., L]`, each row a bag, filled up with `padding_id`; `[n]`
            with `segment_ids`; or a SegmentTensor of ids, or of `{"index", "value"}`,
            whose values are the weights.
          segment_ids: integers `[n]`, the bag of each id.
          num_segments: int, the number of bags; static.
          weights: real numbers of the shape of `ids`, for sum, mean and sqrtn;
            differentiable.
          indices_are_sorted: whether `segment_ids` ascend, which is faster.

        Returns:
          `[..., D]`, or `[num_segments, D]`.

        Raises:
          TypeError, ValueError: `params` are not this layer's, or as
            `sparsejax.embedding_bag` raises them.
          checkify.JaxRuntimeError: mode `"error"`, outside of `jit`: ids out of range.
        """
        table = self.table(params)
        if isinstance(ids, SegmentTensor):
            ids, weights = split_weights(_CALL, ids, weights)
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


# ------------------------------------------------------------------ for collections


def check_combiner(call: str, combiner: Any) -> str:
    """`combiner`, or an error if it is none."""
    if combiner not in COMBINERS:
        known = ", ".join(map(repr, COMBINERS))
        raise ValueError(f"{call}: combiner must be one of {known}, got {combiner!r}.")
    return combiner


def split_weights(
    call: str, ids: SegmentTensor, weights: Any
) -> tuple[SegmentTensor, Any]:
    """Ids, and weights where the elements are `{"index", "value"}`."""
    values = ids.values
    if not isinstance(values, dict) or values.keys() != {"index", "value"}:
        return ids, weights
    if weights is not None:
        raise ValueError(
            f"{call}: ids is a SegmentTensor of {{'index', 'value'}}, which brings its "
            "own weights, and weights was passed as well. Leave it out, or pass the "
            "ids alone."
        )
    static = ids.num_segments, ids.is_sorted
    children = values["index"], ids.segment_ids
    return SegmentTensor.tree_unflatten(static, children), values["value"]
