"""tables: which parameters of a tree of layers are tables, for `tables=`."""

from typing import Any

import jax
import numpy as np

from sparsejax import _arguments
from sparsejax._rows import SelectedRows


def tables(layers: Any) -> Any:
    """What `sparsejax.value_and_grad(tables=)` is told of the parameters of layers.

    Without it `sparsejax.grad` decides by itself, and takes the dense gradient where a
    batch reads more than a quarter of a table or reads it otherwise than by rows. With
    it every table of a layer with `sparse_grad=True` gets SelectedRows or an error.

    Args:
      layers: a layer, or a tree of layers with the structure of the parameters: where
        these have a layer's own, it has the layer. What is no layer of `sparsejax.nn`
        (None, a function) is left to `sparsejax.grad`.

    Returns:
      The tree with a dict of True, False and None in the place of each layer: a prefix
      of the parameters' tree.

    Raises:
      TypeError: an array, or a SelectedRows, is there: a parameter, not a layer.

    Example:
      >>> import jax, jax.numpy as jnp, sparsejax as sj
      >>> layers = {"item": sj.nn.Embedding(10, 4), "out": sj.nn.Dense(1, 4)}
      >>> sj.nn.tables(layers)
      {'item': {'embedding': True}, 'out': {'kernel': None, 'bias': False}}
      >>> keys = jax.random.split(jax.random.key(0))
      >>> params = {name: layers[name].init(k) for name, k in zip(layers, keys)}
      >>> def loss(params, ids):
      ...     x = layers["item"](params["item"], ids)
      ...     return jnp.sum(layers["out"](params["out"], x))
      >>> grad = sj.grad(loss, tables=sj.nn.tables(layers))
      >>> grad(params, jnp.arange(9))["item"]["embedding"].capacity
      9
    """
    stop = lambda x: x is None or isinstance(x, SelectedRows)
    return jax.tree.map(_wish, layers, is_leaf=stop)


def _wish(x: Any) -> Any:
    if isinstance(x, (jax.Array, np.ndarray, SelectedRows)):
        raise TypeError(
            "sparsejax.nn.tables: layers must be a layer or a tree of layers, got one "
            f"with {_arguments.kind_of(x)}: parameters, it seems. Pass the layers that "
            "made them."
        )
    if isinstance(x, type) and hasattr(x, "table_prefix"):
        raise TypeError(
            "sparsejax.nn.tables: layers must be a layer or a tree of layers, got the "
            f"class {x.__name__} itself. Make one of it: {x.__name__}(...)."
        )
    return x.table_prefix() if hasattr(x, "table_prefix") else None
