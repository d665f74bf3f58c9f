"""graph.py in PyTorch."""

import torch
from torch import nn
from torch.nn import functional

from benchmarks.models.torch_side import ADAGRAD, embedding, linear


class Model(nn.Module):
    """Two layers of a mean aggregator on learned vectors."""

    def __init__(self, params):
        super().__init__()
        self.nodes = embedding(params["nodes"])
        self.inner, self.outer = linear(params["inner"]), linear(params["outer"])

    def forward(self, batch):
        node, first = self.nodes(batch["node"]), self.nodes(batch["neighbour"])
        second = self.nodes(batch["second"])
        inner = functional.relu(self.inner(aggregate(first, second)))
        own = functional.relu(self.inner(aggregate(node, first)))
        logits = self.outer(aggregate(own, inner))
        return functional.cross_entropy(logits, batch["label"])


def aggregate(own, neighbours):
    return torch.cat([own, neighbours.mean(dim=-2)], dim=-1)


def optimizers(model):
    return [torch.optim.Adagrad(model.parameters(), lr=0.05, **ADAGRAD)]
