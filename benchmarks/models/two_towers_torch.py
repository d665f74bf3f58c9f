"""two_towers.py in PyTorch."""

import torch
from torch import nn
from torch.nn import functional

from benchmarks.models.torch_side import adam, embedding, linear
from benchmarks.models.two_towers import BATCH


class Model(nn.Module):
    """Two towers, and the loss of a sampled softmax."""

    def __init__(self, params):
        super().__init__()
        self.users = embedding(params["users"])
        self.items = embedding(params["items"])
        self.categories = embedding(params["categories"])
        self.user_tower = linear(params["user_tower"])
        self.item_tower = linear(params["item_tower"])

    def forward(self, batch):
        user = functional.relu(self.user_tower(self.users(batch["user"])))
        rows, category = self.items(batch["item"]), self.categories(batch["category"])
        item = functional.relu(self.item_tower(torch.cat([rows, category], dim=1)))
        positive = (user * item[:BATCH]).sum(1, keepdim=True)
        logits = torch.cat([positive, user @ item[BATCH:].T], dim=1)
        labels = torch.zeros(BATCH, dtype=torch.int64, device=logits.device)
        return functional.cross_entropy(logits, labels)


optimizers = adam
