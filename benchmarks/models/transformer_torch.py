"""transformer.py in PyTorch."""

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
