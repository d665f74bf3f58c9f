"""dlrm.py in PyTorch, as facebookresearch/dlrm writes it."""

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from benchmarks.models.torch_side import ADAGRAD, embedding, linear


class Model(nn.Module):
    """26 tables, their dot products, two MLPs."""

    def __init__(self, params):
        super().__init__()
        self.tables = nn.ModuleList(embedding(x) for x in params["tables"])
        self.bottom = mlp(params["bottom"])
        self.top = mlp(params["top"])
        pairs = np.tril_indices(len(self.tables) + 1, -1)
        self.i, self.j = (nn.Buffer(torch.from_numpy(x)) for x in pairs)

    def forward(self, batch):
        x = functional.relu(self.bottom(batch["dense"]))
        rows = [table(ids) for table, ids in zip(self.tables, batch["ids"])]
        vectors = torch.stack([x, *rows], dim=1)
        dots = torch.bmm(vectors, vectors.transpose(1, 2))
        logits = self.top(torch.cat([x, dots[:, self.i, self.j]], dim=1))[:, 0]
        return functional.binary_cross_entropy_with_logits(logits, batch["clicked"])


def mlp(layers):
    modules = []
    for layer in layers:
        modules += [linear(layer), nn.ReLU()]
    return nn.Sequential(*modules[:-1])


def optimizers(model):
    return [torch.optim.Adagrad(model.parameters(), lr=0.02, **ADAGRAD)]
