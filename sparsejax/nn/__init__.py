"""Layers as frozen dataclasses: `init(key)` makes parameters, the call applies them.

A layer holds what is static, is hashable, and may be closed over or be a
static argument of `jit`; its parameters are a dict of arrays beside it::

    layer = sj.nn.Embedding(1_000_000, 64)
    params = layer.init(jax.random.key(0))
    rows = layer(params, ids)

Layers

- `Embedding`: a row for each id.
- `EmbeddingBag`: bags of rows, each reduced to one.
- `EmbeddingCollection`: many tables and features in one call.
- `Dense`: a linear layer on arrays or CSR.
- `FactorizationMachine`: a linear model, and one of all pairs of features.
- `tables`: what `sparsejax.value_and_grad(tables=)` is told of layers.

Models whose tables are in a `sparsejax.store.KVStore`

- `SparseBlock`: a model that says which rows it needs.
- `SparseEmbedding`, `SparseLinear`: blocks of one table.
- `TableSpec`: what a block asks of the store; `merge_row_ids`: for several
  blocks.
- `PulledTables`: what a block is given.
- `Trainer`: pulls, runs and pushes.

For frameworks, each imported when it is asked for

- `sparsejax.nn.flax`, `sparsejax.nn.nnx`, `sparsejax.nn.equinox`:
  `Layer(layer)` makes a module of theirs out of a layer.
"""

import importlib as _importlib
from typing import TYPE_CHECKING as _TYPE_CHECKING, Any as _Any

from sparsejax.nn._block import (
    PulledTables as PulledTables,
    SparseBlock as SparseBlock,
    TableSpec as TableSpec,
    merge_row_ids as merge_row_ids,
)
from sparsejax.nn._block_layers import (
    SparseEmbedding as SparseEmbedding,
    SparseLinear as SparseLinear,
)
from sparsejax.nn._collection import EmbeddingCollection as EmbeddingCollection
from sparsejax.nn._embedding import Embedding as Embedding
from sparsejax.nn._embedding_bag import EmbeddingBag as EmbeddingBag
from sparsejax.nn._fm import FactorizationMachine as FactorizationMachine
from sparsejax.nn._linear import Dense as Dense
from sparsejax.nn._tables import tables as tables
from sparsejax.nn._trainer import Trainer as Trainer


if _TYPE_CHECKING:  # else each is imported when it is asked for
    from sparsejax.nn import equinox as equinox, flax as flax, nnx as nnx

# By name in this package, the distribution that each needs.
_ADAPTERS = {"flax": "flax", "nnx": "flax", "equinox": "equinox"}


def __getattr__(name: str) -> _Any:
    if name not in _ADAPTERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return _importlib.import_module(f"{__name__}.{name}")
    except ModuleNotFoundError as e:
        package = _ADAPTERS[name]
        if (e.name or "").split(".")[0] != package:
            raise
        raise ModuleNotFoundError(
            (
                f"sparsejax.nn.{name} needs {package}, which is not installed: pip "
                f"install {package}, or pip install 'sparsejax[interop]'."
            ),
            name=e.name,
        ) from None
