"""`Layer(layer)`: a layer of `sparsejax.nn` as a module of flax.linen.

For flax.nnx see `sparsejax.nn.nnx`.
"""

from typing import Any

import jax
from flax import linen

from sparsejax.nn._layer import check_layer, init_for


_CALL = "sparsejax.nn.flax.Layer"


class Layer(linen.Module):
    """A linen module that wraps a layer of `sparsejax.nn`, or an object like one.

    Args:
      layer: hashable, with `init(key) -> params` and `layer(params, *inputs)`.
      name: the module's name, as in linen.

    Example:
      >>> import jax, jax.numpy as jnp, sparsejax as sj
      >>> module = sj.nn.flax.Layer(sj.nn.Embedding(1000, 4))
      >>> variables = module.init(jax.random.key(0), jnp.array([3]))
      >>> variables["params"]["embedding"].shape
      (1000, 4)
      >>> loss = lambda variables, ids: jnp.sum(module.apply(variables, ids))
      >>> g = sj.grad(loss)(variables, jnp.array([3, 7]))
      >>> g["params"]["embedding"].rows
      Array([3, 7], dtype=int32)

    References:
      flax, `linen.Embed`.
    """

    layer: Any

    def __post_init__(self) -> None:
        check_layer(_CALL, self.layer)
        super().__post_init__()

    @linen.compact
    def __call__(self, *inputs: Any, **options: Any) -> Any:
        """Calls the layer with the module's parameters."""
        if not self._names():
            made = init_for(self.layer, self.make_rng("params"), *inputs[:1])
            for name, value in made.items():
                self.param(name, lambda _, value=value: value)
        return self.layer(self._params(), *inputs, **options)

    def attend(self, query: jax.Array) -> jax.Array:
        """`Embedding.attend`, the scores of all rows; the table must be initialized."""
        return self.layer.attend(self._params(), query)

    def _names(self) -> list[str]:
        return list(self.variables.get("params", {}))

    def _params(self) -> dict[str, Any]:
        return {name: self.get_variable("params", name) for name in self._names()}
