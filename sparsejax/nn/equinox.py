"""`Layer(layer, key=...)`: a layer of `sparsejax.nn` as a module of equinox.

The leaves of the module are the layer's parameters. Inputs may have a batch axis, so
`jax.vmap` is not needed.
"""

from typing import Any

import equinox as eqx
import jax

from sparsejax._arguments import as_key
from sparsejax.nn._layer import check_layer, init_for


class Layer(eqx.Module):
    """An equinox module that wraps a layer of `sparsejax.nn`, or an object like one.

    Args:
      layer: hashable, with `init(key) -> params` and `layer(params, *inputs)`.
      *inputs: an example input, for a layer that infers its sizes from it.
      key: PRNG key.

    Example:
      >>> import jax, jax.numpy as jnp, sparsejax as sj
      >>> key = jax.random.key(0)
      >>> model = sj.nn.equinox.Layer(sj.nn.Embedding(1000, 4), key=key)
      >>> g = sj.grad(lambda model, ids: jnp.sum(model(ids)))(model, jnp.array([3, 7]))
      >>> g.params["embedding"].rows
      Array([3, 7], dtype=int32)

    References:
      equinox, `nn.Embedding`.
    """

    params: dict[str, Any]
    layer: Any = eqx.field(static=True)

    def __init__(self, layer: Any, *inputs: Any, key: jax.Array):
        self.layer = check_layer(layer)
        self.params = init_for(layer, as_key(key), *inputs[:1])

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        """Calls the layer with the module's parameters."""
        return self.layer(self.params, *inputs, **options)

    def attend(self, query: jax.Array) -> jax.Array:
        """Calls `Embedding.attend`, for the scores of all rows."""
        return self.layer.attend(self.params, query)
