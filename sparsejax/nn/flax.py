"""`Layer(layer)`: a layer of `sparsejax.nn` as a module of flax.linen.

For flax.nnx see `sparsejax.nn.nnx`. Importing this module registers our types with
`flax.serialization`, so that `to_bytes` and `from_bytes` accept them.
"""

from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, serialization

from sparsejax._index import HashIndex
from sparsejax._rows import QuantizedTable, SelectedRows
from sparsejax._segments import SegmentTensor
from sparsejax.losses import NegativeSampler
from sparsejax.nn._block import PulledTables
from sparsejax.nn._layer import check_layer, init_for
from sparsejax.nn._matrix import Elements
from sparsejax.parallel import ShardedTable


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
        check_layer(self.layer)
        super().__post_init__()

    @linen.compact
    def __call__(self, *inputs: Any, **options: Any) -> Any:
        """Calls the layer with the module's parameters."""
        if not self._params():
            made = init_for(self.layer, self.make_rng("params"), *inputs[:1])
            for name, value in made.items():
                self.param(name, lambda _, value=value: value)
        return self.layer(self._params(), *inputs, **options)

    def attend(self, query: jax.Array) -> jax.Array:
        """Calls `Embedding.attend`, the scores of all rows; the table must exist."""
        return self.layer.attend(self._params(), query)

    def _params(self) -> dict[str, Any]:
        return dict(self.variables.get("params", {}))


# ------------------------------------------------------------------ to_bytes


def _to_state(tree: Any) -> dict[str, Any]:
    """Returns leaves by path; row ids, which msgpack cannot hold, as words."""
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    words = lambda x: jax.random.key_data(x) if is_key(x) else x
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): words(x) for path, x in leaves}


def _from_state(target: Any, state: dict[str, Any]) -> Any:
    """Returns a tree like `target` with the leaves of `state`."""
    kinds = lambda t: {k: (np.shape(x), x.dtype) for k, x in t.items()}
    wanted = _to_state(target)
    if kinds(wanted) != kinds(state):
        raise ValueError(
            f"flax.serialization: the saved {type(target).__name__} has other leaves "
            f"than the target. Saved: {kinds(state)}; target: {kinds(wanted)}."
        )
    leaves, treedef = jax.tree.flatten(target)
    new = [
        x
        if like.dtype == x.dtype
        else jax.random.wrap_key_data(jnp.asarray(x), impl=jax.random.key_impl(like))
        for like, x in zip(leaves, [state[name] for name in wanted])
    ]
    return treedef.unflatten(new)


def _refuse(table: ShardedTable, *state: Any) -> NoReturn:
    del state
    raise TypeError(
        f"flax.serialization: a ShardedTable of shape {table.shape} cannot be "
        "serialized, because its rows are on several devices. Save it with "
        "sparsejax.parallel.save, or serialize table.to_dense()."
    )


_TYPES = SelectedRows, SegmentTensor, QuantizedTable, HashIndex, NegativeSampler
for _type in (*_TYPES, PulledTables, Elements):
    serialization.register_serialization_state(_type, _to_state, _from_state)
serialization.register_serialization_state(ShardedTable, _refuse, _refuse)
