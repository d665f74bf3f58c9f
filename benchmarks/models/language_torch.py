"""language.py in PyTorch."""

import torch
from torch import nn

from benchmarks.models.language import HEADS
from benchmarks.models.torch_side import adam, embedding
from benchmarks.models.transformer_torch import Block, sampled_loss


class Model(nn.Module):
    """A transformer, and the loss of a sampled softmax."""

    def __init__(self, params):
        super().__init__()
        self.words = embedding(params["words"])
        self.places = nn.Parameter(torch.from_numpy(params["places"]))
        self.blocks = nn.Sequential(*(Block(x, HEADS) for x in params["blocks"]))
        self.output = embedding(params["output"])

    def forward(self, batch):
        x = self.blocks(self.words(batch["word"]) + self.places)
        return sampled_loss(x, self.output, batch)


optimizers = adam
