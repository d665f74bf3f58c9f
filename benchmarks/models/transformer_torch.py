"""transformer.py in PyTorch."""

import torch
from torch import nn
from torch.nn import functional

from benchmarks.models.torch_side import linear


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, each with a residual."""

    def __init__(self, params, heads):
        super().__init__()
        self.heads = heads
        for name in ("qkv", "out", "up", "down"):
            setattr(self, name, linear(params[name]))

    def forward(self, x):
        cut = lambda x: x.reshape(*x.shape[:2], self.heads, -1).transpose(1, 2)
        q, k, v = map(cut, self.qkv(normalize(x)).chunk(3, dim=-1))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.down(functional.relu(self.up(normalize(x))))


def normalize(x):
    """Zero mean and unit variance of each vector."""
    return functional.layer_norm(x, x.shape[-1:], eps=1e-5)


def sampled_loss(x, table, batch):
    """Mean cross entropy of the one that follows among it and the drawn ones."""
    x = normalize(x).reshape(-1, x.shape[-1])
    following, negatives = table(batch["next"]), table(batch["negatives"])
    positive = (x * following).sum(1, keepdim=True)
    logits = torch.cat([positive, x @ negatives.T], dim=1)
    labels = torch.zeros(len(x), dtype=torch.int64, device=x.device)
    return functional.cross_entropy(logits, labels)
