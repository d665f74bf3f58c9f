"""ten_tables_sgd.py in PyTorch."""

import torch

from benchmarks.models.ten_tables_torch import Model


__all__ = ["Model", "optimizers"]


def optimizers(model):
    return [torch.optim.SGD(model.parameters(), lr=0.01)]
