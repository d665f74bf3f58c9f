"""language.py in PyTorch."""

import torch
from torch import nn
from torch.nn import functional

from benchmarks.models.language import DIM, HEADS
from benchmarks.models.torch_side import adam, embedding
from benchmarks.models.transformer_torch import Block, normalize


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
        x = normalize(x).reshape(-1, DIM)
        following = self.output(batch["next"])
        negatives = self.output(batch["negatives"])
        positive = (x * following).sum(1, keepdim=True)
        logits = torch.cat([positive, x @ negatives.T], dim=1)
        labels = torch.zeros(len(x), dtype=torch.int64, device=x.device)
        return functional.cross_entropy(logits, labels)


optimizers = adam
