"""Layers as frozen dataclasses: `init(key)` makes parameters, the call applies them.

A layer holds what is static, is hashable, and may be closed over or be a static
argument of `jit`. `tables` tells `sparsejax.value_and_grad` which parameters to insist
on. `sparsejax.nn.flax`, `.nnx` and `.equinox` make modules of those frameworks out of
these layers; each is imported when it is asked for.
"""

import importlib as _importlib
from typing import Any as _Any

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


# By name in this package, the distribution that each needs.
_ADAPTERS = {"flax": "flax", "nnx": "flax", "equinox": "equinox"}
_MISSING = (
    "sparsejax.nn.{name} needs {package}, which is not installed: pip install "
    "{package}, or pip install 'sparsejax[interop]'."
)


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
            _MISSING.format(name=name, package=package), name=e.name
        ) from None
