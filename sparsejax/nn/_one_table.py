"""What layers with one table share: their fields, and that table among parameters."""

import operator
from typing import Any

import jax

from sparsejax import _arguments
from sparsejax._lookup import lookup
from sparsejax._rows import SelectedRows
from sparsejax.nn import _layer


# Rows of expected squared norm 1, as flax's.
TABLE_INIT: Any = jax.nn.initializers.variance_scaling(
    1.0, "fan_in", "normal", out_axis=0
)

_NAMES = ("embedding",)


class OneTable:
    """A layer whose only parameter is a table, `{"embedding": [V, D]}`."""

    num_embeddings: int
    features: int
    sparse_grad: bool
    param_dtype: Any
    initializer: _layer.Initializer

    def init(self, key: jax.Array) -> dict[str, jax.Array]:
        """The parameters: `{"embedding": [V, D]}`.

        Args:
          key: PRNG key.

        Raises:
          TypeError: `key` is no PRNG key.

        Example:
          >>> import jax, sparsejax as sj
          >>> sj.nn.Embedding(7, 2).init(jax.random.key(0))["embedding"].shape
          (7, 2)
        """
        key = _arguments.as_key(f"{self._call()}.init", key)
        shape = self.num_embeddings, self.features
        make = self.initializer
        table = _layer.draw(self._call(), "init", make, key, shape, self.param_dtype)
        return {"embedding": table}

    def table(self, params: Any) -> Any:
        """The table among `params`, which are checked.

        Args:
          params: as `init` makes them, or the table alone.

        Raises:
          TypeError, ValueError: they are not the parameters of this layer.

        Example:
          >>> import jax, sparsejax as sj
          >>> layer = sj.nn.EmbeddingBag(5, 2)
          >>> layer.table(layer.init(jax.random.key(0))).shape
          (5, 2)
        """
        params = _arguments.as_array(params)
        if isinstance(params, (jax.Array, SelectedRows)):  # the only parameter there is
            params = {"embedding": params}
        call, shape = self._call(), (self.num_embeddings, self.features)
        params = _layer.check_params(call, params, _NAMES)
        return _layer.table_of(call, params, "embedding", shape, self.sparse_grad)

    def table_prefix(self) -> dict[str, bool | None]:
        """What `sparsejax.value_and_grad(tables=)` is told of each parameter.

        Example:
          >>> import sparsejax as sj
          >>> sj.nn.EmbeddingBag(5, 2, sparse_grad=False).table_prefix()
          {'embedding': False}
        """
        return {"embedding": self.sparse_grad}

    def _call(self) -> str:
        return f"sparsejax.nn.{type(self).__name__}"


def table_fields(
    call: str, num_embeddings: Any, features: Any, **fields: Any
) -> dict[str, Any]:
    """The fields of a layer that has one table, checked."""
    dtype, padding_id = fields["dtype"], fields["padding_id"]
    param_dtype = _layer.check_dtype(call, "param_dtype", fields["param_dtype"])
    _layer.check_bool(call, "sparse_grad", fields["sparse_grad"])
    lookup.check_mode(call, fields["mode"])
    return dict(
        num_embeddings=_layer.check_size(call, "num_embeddings", num_embeddings),
        features=_layer.check_size(call, "features", features),
        sparse_grad=fields["sparse_grad"],
        dtype=dtype if dtype is None else _layer.check_dtype(call, "dtype", dtype),
        param_dtype=param_dtype,
        padding_id=check_padding_id(call, padding_id),
        max_norm=lookup.check_max_norm(call, fields["max_norm"], param_dtype),
        mode=fields["mode"],
        initializer=_layer.check_initializer(call, "init", fields["initializer"]),
    )


def check_padding_id(call: str, padding_id: Any) -> int | None:
    """`padding_id` as an int, or an error if it is none."""
    try:
        return None if padding_id is None else operator.index(padding_id)
    except TypeError:
        found = _arguments.show(padding_id)
        raise TypeError(
            f"{call}: padding_id must be a static int or None, got {found}."
        ) from None
