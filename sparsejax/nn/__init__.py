"""Layers as frozen dataclasses: `init(key)` creates parameters, the call applies them.

A layer holds only static configuration. It is hashable, so a jitted function may close
over it or take it as a static argument. Its parameters are a separate dict of arrays::

    layer = sj.nn.Embedding(1_000_000, 64)
    params = layer.init(jax.random.key(0))
    rows = layer(params, ids)

Layers

- `Embedding`: a row for each id.
- `EmbeddingBag`: bags of rows, each reduced to one row.
- `EmbeddingCollection`: many tables and features in one call.
- `Dense`: a linear layer on arrays or CSR.
- `tables`: which parameters are tables, for `sparsejax.value_and_grad(tables=)`.

Models whose tables live in a `sparsejax.store.KVStore`

- `SparseBlock`: a model that lists the rows it reads.
- `SparseEmbedding`, `SparseLinear`: Embedding and Dense as blocks with one table.
- `TableSpec`: shape, dtype and initializer of a block's table.
- `merge_row_ids`: joins the `row_ids` of several blocks.
- `PulledTables`: the pulled rows of all tables, the argument of a block.
- `Trainer`: pulls rows, runs a step and pushes gradients.

Framework adapters, each imported on first use

- `sparsejax.nn.flax`, `sparsejax.nn.nnx`, `sparsejax.nn.equinox`: `Layer(layer)` wraps
  a layer as a module of that framework. `sparsejax.nn.nnx.value_and_grad` takes the
  place of `flax.nnx.value_and_grad`.
- `sparsejax.nn.keras`: `SparseModel`, a `keras.Model` with sparse gradients.
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
from sparsejax.nn._dense import Dense as Dense
from sparsejax.nn._embedding import (
    Embedding as Embedding,
    EmbeddingBag as EmbeddingBag,
)
from sparsejax.nn._layer import tables as tables
from sparsejax.nn._trainer import Trainer as Trainer


if _TYPE_CHECKING:  # at run time `__getattr__` imports them
    from sparsejax.nn import (
        equinox as equinox,
        flax as flax,
        keras as keras,
        nnx as nnx,
    )

# The package that each adapter imports.
_ADAPTERS = {"flax": "flax", "nnx": "flax", "equinox": "equinox", "keras": "keras"}


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
            f"sparsejax.nn.{name} needs {package}, which is not installed. Run pip "
            f"install {package}, or 'sparsejax[keras]' for keras and "
            "'sparsejax[interop]' for flax and equinox.",
            name=e.name,
        ) from None
