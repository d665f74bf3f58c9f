"""sequence.py in PyTorch."""

import torch
from torch import nn
from torch.nn import functional

from benchmarks.models.sequence import DIM, HEADS
from benchmarks.models.torch_side import adam, embedding
from benchmarks.models.transformer_torch import Block, normalize


class Model(nn.Module):
    """One block of a transformer, and the loss of a sampled softmax."""

    def __init__(self, params):
        super().__init__()
        self.items = embedding(params["items"])
        self.places = nn.Parameter(torch.from_numpy(params["places"]))
        self.block = Block(params, HEADS)

    def forward(self, batch):
        x = self.block(self.items(batch["item"]) + self.places)
        x = normalize(x).reshape(-1, DIM)
        following, negatives = self.items(batch["next"]), self.items(batch["negatives"])
        positive = (x * following).sum(1, keepdim=True)
        logits = torch.cat([positive, x @ negatives.T], dim=1)
        labels = torch.zeros(len(x), dtype=torch.int64, device=x.device)
        return functional.cross_entropy(logits, labels)


optimizers = adam
