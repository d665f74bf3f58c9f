"""language.py in PyTorch."""

import torch
from torch import nn
from torch.nn import functional

from benchmarks.models.language import BATCH, DIM, HEADS, LENGTH
from benchmarks.models.torch_side import adam, embedding, linear


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer."""

    def __init__(self, params):
        super().__init__()
        for name, layer in params.items():
            setattr(self, name, linear(layer))

    def forward(self, x):
        heads = lambda x: x.reshape(BATCH, LENGTH, HEADS, DIM // HEADS).transpose(1, 2)
        q, k, v = map(heads, self.qkv(normalize(x)).chunk(3, dim=-1))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(BATCH, LENGTH, DIM))
        return x + self.down(functional.relu(self.up(normalize(x))))


class Model(nn.Module):
    """A transformer, and the loss of a sampled softmax."""

    def __init__(self, params):
        super().__init__()
        self.words = embedding(params["words"])
        self.places = nn.Parameter(torch.from_numpy(params["places"]))
        self.blocks = nn.Sequential(*map(Block, params["blocks"]))
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


def normalize(x):
    return functional.layer_norm(x, (DIM,), eps=1e-5)


optimizers = adam
