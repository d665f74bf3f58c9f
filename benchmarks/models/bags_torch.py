"""bags.py in PyTorch."""

import torch
from torch import nn
from torch.nn import functional

from benchmarks.models.torch_side import ADAGRAD, embedding_bag, linear


class Model(nn.Module):
    """fastText's classifier."""

    def __init__(self, params):
        super().__init__()
        self.words = embedding_bag(params["words"])
        self.linear = linear(params)

    def forward(self, batch):
        means = self.words(batch["ids"], per_sample_weights=batch["weights"])
        return functional.cross_entropy(self.linear(means), batch["labels"])


def optimizers(model):
    return [torch.optim.Adagrad(model.parameters(), lr=0.1, **ADAGRAD)]
