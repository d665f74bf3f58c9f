"""What the models in PyTorch share: how a step runs, and layers made of given arrays.

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


def make_step(name: str, params: Any) -> tuple[Callable, Callable]:
    """Returns the step, and what puts a batch where the step reads it.

    The step returns the loss, after the device is done.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    module = importlib.import_module(f"benchmarks.models.{name}_torch")
    model = module.Model(params).to(device)
    optimizers = module.optimizers(model)

    def put(batch):
        whole = lambda x: x.astype(np.int64) if x.dtype == np.int32 else x
        made = {k: torch.from_numpy(whole(x)).to(device) for k, x in batch.items()}
        synchronize()
        return made

    def step(batch):
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        loss = model(batch)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        synchronize()
        return loss.detach()

    def synchronize():
        if device.type == "cuda":
            torch.cuda.synchronize()

    return step, put
