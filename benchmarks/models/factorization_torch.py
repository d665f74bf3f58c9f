"""factorization.py in PyTorch."""

import torch
from torch import nn
from torch.nn import functional

from benchmarks.models.torch_side import embedding


class Model(nn.Module):
    """Vectors and biases of users and items, and the loss of BPR."""

    def __init__(self, params):
        super().__init__()
        self.users = embedding(params["users"])
        self.items = embedding(params["items"])
        self.user_bias = embedding(params["user_bias"])
        self.item_bias = embedding(params["item_bias"])

    def forward(self, batch):
        user, bias = self.users(batch["user"]), self.user_bias(batch["user"])
        difference = self.score(user, batch["chosen"]) - self.score(
            user, batch["other"]
        )
        return -functional.logsigmoid(difference).mean() + 1e-4 * bias.square().mean()

    def score(self, user, item):
        return (user * self.items(item)).sum(-1) + self.item_bias(item)[:, 0]


def optimizers(model):
    return [torch.optim.SparseAdam(list(model.parameters()), lr=1e-3)]
