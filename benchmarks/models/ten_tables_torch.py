"""ten_tables.py in PyTorch."""

import torch
from torch import nn

from benchmarks.models.ten_tables import IDS
from benchmarks.models.torch_side import embedding


class Model(nn.Module):
    """Ten tables."""

    def __init__(self, params):
        super().__init__()
        self.tables = nn.ModuleDict({k: embedding(x) for k, x in params.items()})

    def forward(self, batch):
        rows = [table(batch[name]) for name, table in self.tables.items()]
        return sum(x.square().sum() for x in rows) / (2 * IDS)


def optimizers(model):
    return [torch.optim.SparseAdam(list(model.parameters()), lr=1e-3)]
