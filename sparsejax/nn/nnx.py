"""`Layer(layer, rngs=...)`: a layer of `sparsejax.nn` as a module of flax.nnx.

The module holds the layer's parameters as `nnx.Param`.
"""

from typing import Any

import jax
from flax import nnx

from sparsejax.nn._layer import check_layer, init_for


_CALL = "sparsejax.nn.nnx.Layer"


class Layer(nnx.Module):
    """An nnx module that wraps a layer of `sparsejax.nn`, or an object like one.

    Args:
      layer: hashable, with `init(key) -> params` and `layer(params, *inputs)`.
      *inputs: an example input, for a layer that infers its sizes from it.
      rngs: `nnx.Rngs`, whose `params` stream is used.

    Example:
      >>> import jax.numpy as jnp, sparsejax as sj
      >>> from flax import nnx
      >>> model = sj.nn.nnx.Layer(sj.nn.Embedding(1000, 4), rngs=nnx.Rngs(0))
      >>> graph, state = nnx.split(model)
      >>> loss = lambda state, ids: jnp.sum(nnx.merge(graph, state)(ids))
      >>> g = sj.grad(loss)(state, jnp.array([3, 7]))
      >>> nnx.to_pure_dict(g)["params"]["embedding"].rows
      Array([3, 7], dtype=int32)

    References:
      flax, `nnx.Embed`.
    """

    def __init__(self, layer: Any, *inputs: Any, rngs: nnx.Rngs):
        self.layer: Any = check_layer(_CALL, layer)
        if not isinstance(rngs, nnx.Rngs):
            raise TypeError(
                f"{_CALL}: rngs must be a flax.nnx.Rngs, for example nnx.Rngs(0), got "
                f"{rngs!r}."
            )
        made = init_for(layer, rngs.params(), *inputs[:1])
        # flax 0.11 has no nnx.Dict: there a module may hold a dict.
        as_node: Any = getattr(nnx, "Dict", dict)
        self.params: Any = as_node({name: nnx.Param(x) for name, x in made.items()})

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        """Calls the layer with the module's parameters."""
        return self.layer(self._params(), *inputs, **options)

    def attend(self, query: jax.Array) -> jax.Array:
        """`Embedding.attend`, the scores of all rows."""
        return self.layer.attend(self._params(), query)

    def _params(self) -> dict[str, Any]:
        # And its Param has no get_value.
        value = lambda x: x.get_value() if hasattr(x, "get_value") else x.value
        return {name: value(param) for name, param in self.params.items()}
