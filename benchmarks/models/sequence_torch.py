"""sequence.py in PyTorch."""

import torch
from torch import nn

from benchmarks.models.sequence import HEADS
from benchmarks.models.torch_side import adam, embedding
from benchmarks.models.transformer_torch import Block, sampled_loss


class Model(nn.Module):
    """One block of a transformer, and the loss of a sampled softmax."""

    def __init__(self, params):
        super().__init__()
        self.items = embedding(params["items"])
        self.places = nn.Parameter(torch.from_numpy(params["places"]))
        self.block = Block(params, HEADS)

    def forward(self, batch):
        x = self.block(self.items(batch["item"]) + self.places)
        return sampled_loss(x, self.items, batch)


optimizers = adam
