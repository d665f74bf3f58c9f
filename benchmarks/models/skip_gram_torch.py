"""skip_gram.py in PyTorch."""

import torch
from torch import nn
from torch.nn import functional

from benchmarks.models.torch_side import embedding


class Model(nn.Module):
    """Two tables, and the loss of word2vec."""

    def __init__(self, params):
        super().__init__()
        self.centers = embedding(params["centers"])
        self.contexts = embedding(params["contexts"])

    def forward(self, batch):
        center = self.centers(batch["center"])
        context = self.contexts(batch["context"])
        negatives = self.contexts(batch["negatives"])
        positive = (center * context).sum(-1)
        negative = torch.einsum("bd,bkd->bk", center, negatives)
        return -(
            functional.logsigmoid(positive) + functional.logsigmoid(-negative).sum(-1)
        ).mean()


def optimizers(model):
    return [torch.optim.SGD(model.parameters(), lr=0.025)]
