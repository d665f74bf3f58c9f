"""knowledge_graph.py in PyTorch."""

import torch
from torch import nn
from torch.nn import functional

from benchmarks.models.torch_side import embedding


class Model(nn.Module):
    """DistMult, and the logistic loss of true and corrupted triples."""

    def __init__(self, params):
        super().__init__()
        self.entities = embedding(params["entities"])
        self.relations = embedding(params["relations"])

    def forward(self, batch):
        head, tail = self.entities(batch["head"]), self.entities(batch["tail"])
        relation = self.relations(batch["relation"])
        score = lambda h, t: (h * relation * t).sum(-1)
        return -(
            functional.logsigmoid(score(head, tail))
            + functional.logsigmoid(-score(self.entities(batch["other_head"]), tail))
            + functional.logsigmoid(-score(head, self.entities(batch["other_tail"])))
        ).mean()


def optimizers(model):
    return [torch.optim.SparseAdam(list(model.parameters()), lr=1e-3)]
