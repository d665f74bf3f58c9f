"""Shared by the models in PyTorch: how a step runs, and layers made of given arrays.

A model's file in PyTorch, NAME_torch.py, has `Model(params)`, a module whose `forward`
takes a batch and returns the loss, and `optimizers(model)`.
"""

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn


# optax's defaults.
ADAGRAD = {"initial_accumulator_value": 0.1, "eps": 1e-7}


def embedding(table: np.ndarray) -> nn.Embedding:
    """A layer whose gradient is sparse."""
    weight = torch.from_numpy(table)
    return nn.Embedding.from_pretrained(weight, freeze=False, sparse=True)


def embedding_bag(table: np.ndarray) -> nn.EmbeddingBag:
    """A layer of weighted sums whose gradient is sparse."""
    weight = torch.from_numpy(table)
    return nn.EmbeddingBag.from_pretrained(
        weight, freeze=False, mode="sum", sparse=True
    )


def linear(layer: dict[str, np.ndarray]) -> nn.Linear:
    """A linear layer of a kernel [inputs, outputs] and a bias."""
    made = nn.Linear(*layer["kernel"].shape)
    with torch.no_grad():
        made.weight.copy_(torch.from_numpy(layer["kernel"].T))
        made.bias.copy_(torch.from_numpy(layer["bias"]))
    return made


def adam(model: nn.Module) -> list[torch.optim.Optimizer]:
    """SparseAdam for tables, Adam for all else."""
    tables = [m.weight for m in model.modules() if isinstance(m, nn.Embedding)]
    rest = [p for p in model.parameters() if all(p is not t for t in tables)]
    made: list[torch.optim.Optimizer] = []
    if tables:
        made.append(torch.optim.SparseAdam(tables, lr=1e-3))
    if rest:
        made.append(torch.optim.Adam(rest, lr=1e-3))
    return made


class Rows(nn.Module):
    """Takes the place of a table: returns rows that are constants, whatever the ids."""

    def __init__(self, table: nn.Module):
        super().__init__()
        self.dim, self.is_bag = (
            table.weight.shape[1],
            isinstance(table, nn.EmbeddingBag),
        )
        self.rows: dict[Any, torch.Tensor] = {}

    def forward(self, ids, **_):
        shape = (*(ids.shape[:1] if self.is_bag else ids.shape), self.dim)
        if shape not in self.rows:
            self.rows[shape] = 0.1 * torch.randn(shape, device=ids.device)
        return self.rows[shape]


def without_tables(model: nn.Module) -> None:
    """Puts `Rows` in place of each table."""
    for parent in list(model.modules()):
        for name, module in list(parent.named_children()):
            if isinstance(module, nn.Embedding | nn.EmbeddingBag):
                setattr(parent, name, Rows(module))


def make_step(name: str, params: Any, has_tables: bool) -> tuple[Callable, Callable]:
    """Returns the step, and what puts a batch where the step reads it.

    The step returns the loss, after the device is done.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    module = importlib.import_module(f"benchmarks.models.{name}_torch")
    model = module.Model(params)
    if not has_tables:
        without_tables(model)
    model.to(device)
    has_weights = any(True for _ in model.parameters())
    optimizers = module.optimizers(model) if has_weights else []

    def put(batch):
        whole = lambda x: x.astype(np.int64) if x.dtype == np.int32 else x
        made = {k: torch.from_numpy(whole(x)).to(device) for k, x in batch.items()}
        synchronize()
        return made

    def step(batch):
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        loss = model(batch)
        if has_weights:
            loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        synchronize()
        return loss.detach()

    def synchronize():
        if device.type == "cuda":
            torch.cuda.synchronize()

    return step, put
