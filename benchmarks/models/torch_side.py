"""The models in PyTorch, with sparse gradients of the tables.

`Model(params)` is a module whose `forward` takes a batch and returns the loss.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.nn.functional import logsigmoid, relu

from benchmarks.models import ten_tables, transformer, two_towers


# ------------------------------------------------------------------ parts


def embedding(table: np.ndarray) -> nn.Embedding:
    """A layer whose gradient is sparse."""
    weight = torch.from_numpy(table)
    return nn.Embedding.from_pretrained(weight, freeze=False, sparse=True)


def linear(layer: dict[str, np.ndarray]) -> nn.Linear:
    """A linear layer of a kernel [inputs, outputs] and a bias."""
    made = nn.Linear(*layer["kernel"].shape)
    with torch.no_grad():
        made.weight.copy_(torch.from_numpy(layer["kernel"].T))
        made.bias.copy_(torch.from_numpy(layer["bias"]))
    return made


def sampled_cross_entropy(queries, positive, negatives):
    score = (queries * positive).sum(1, keepdim=True)
    logits = torch.cat([score, queries @ negatives.T], dim=1)
    labels = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
    return functional.cross_entropy(logits, labels)


def sgd(rate: float) -> Callable:
    return lambda model: [torch.optim.SGD(model.parameters(), lr=rate)]


def adagrad(rate: float) -> Callable:
    """Adagrad with optax's defaults."""
    options = {"lr": rate, "initial_accumulator_value": 0.1, "eps": 1e-7}
    return lambda model: [torch.optim.Adagrad(model.parameters(), **options)]


def adam(model: nn.Module) -> list[torch.optim.Optimizer]:
    """SparseAdam for tables, Adam for all else."""
    tables = [m.weight for m in model.modules() if isinstance(m, nn.Embedding)]
    rest = [p for p in model.parameters() if all(p is not t for t in tables)]
    made: list[torch.optim.Optimizer] = []
    if tables:
        made.append(torch.optim.SparseAdam(tables, lr=1e-3))
    if rest:
        made.append(torch.optim.Adam(rest, lr=1e-3))
    return made


# ------------------------------------------------------------------ models


class SkipGram(nn.Module):
    def __init__(self, params):
        super().__init__()
        self.centers = embedding(params["centers"])
        self.contexts = embedding(params["contexts"])

    def forward(self, batch):
        center = self.centers(batch["center"])
        positive = (center * self.contexts(batch["context"])).sum(-1)
        negatives = self.contexts(batch["negatives"])
        negative = torch.einsum("bd,bkd->bk", center, negatives)
        return -(logsigmoid(positive) + logsigmoid(-negative).sum(-1)).mean()


class Factorization(nn.Module):
    def __init__(self, params):
        super().__init__()
        self.users = embedding(params["users"])
        self.items = embedding(params["items"])
        self.user_bias = embedding(params["user_bias"])
        self.item_bias = embedding(params["item_bias"])

    def forward(self, batch):
        user, bias = self.users(batch["user"]), self.user_bias(batch["user"])
        score = lambda x: (user * self.items(x)).sum(-1) + self.item_bias(x)[:, 0]
        difference = score(batch["chosen"]) - score(batch["other"])
        return -logsigmoid(difference).mean() + 1e-4 * bias.square().mean()


class DLRM(nn.Module):
    """As facebookresearch/dlrm writes it."""

    def __init__(self, params):
        super().__init__()
        self.tables = nn.ModuleList(embedding(x) for x in params["tables"])
        self.bottom = self.mlp(params["bottom"])
        self.top = self.mlp(params["top"])
        pairs = np.tril_indices(len(self.tables) + 1, -1)
        self.i, self.j = (nn.Buffer(torch.from_numpy(x)) for x in pairs)

    def mlp(self, layers):
        modules = [x for layer in layers for x in (linear(layer), nn.ReLU())]
        return nn.Sequential(*modules[:-1])

    def forward(self, batch):
        x = relu(self.bottom(batch["dense"]))
        rows = [table(ids) for table, ids in zip(self.tables, batch["ids"])]
        vectors = torch.stack([x, *rows], dim=1)
        dots = torch.bmm(vectors, vectors.transpose(1, 2))
        logits = self.top(torch.cat([x, dots[:, self.i, self.j]], dim=1))[:, 0]
        return functional.binary_cross_entropy_with_logits(logits, batch["clicked"])


class Bags(nn.Module):
    def __init__(self, params):
        super().__init__()
        self.words = nn.EmbeddingBag.from_pretrained(
            torch.from_numpy(params["words"]), freeze=False, mode="sum", sparse=True
        )
        self.linear = linear(params)

    def forward(self, batch):
        means = self.words(batch["ids"], per_sample_weights=batch["weights"])
        return functional.cross_entropy(self.linear(means), batch["labels"])


class KnowledgeGraph(nn.Module):
    def __init__(self, params):
        super().__init__()
        self.entities = embedding(params["entities"])
        self.relations = embedding(params["relations"])

    def forward(self, batch):
        head, tail = self.entities(batch["head"]), self.entities(batch["tail"])
        relation = self.relations(batch["relation"])
        score = lambda h, t: (h * relation * t).sum(-1)
        return -(
            logsigmoid(score(head, tail))
            + logsigmoid(-score(self.entities(batch["other_head"]), tail))
            + logsigmoid(-score(head, self.entities(batch["other_tail"])))
        ).mean()


class TwoTowers(nn.Module):
    def __init__(self, params):
        super().__init__()
        self.users = embedding(params["users"])
        self.items = embedding(params["items"])
        self.categories = embedding(params["categories"])
        self.user_tower = linear(params["user_tower"])
        self.item_tower = linear(params["item_tower"])

    def forward(self, batch):
        user = relu(self.user_tower(self.users(batch["user"])))
        rows, category = self.items(batch["item"]), self.categories(batch["category"])
        item = relu(self.item_tower(torch.cat([rows, category], dim=1)))
        chosen, drawn = item[: two_towers.BATCH], item[two_towers.BATCH :]
        return sampled_cross_entropy(user, chosen, drawn)


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
        return x + self.down(relu(self.up(normalize(x))))


def normalize(x):
    """Zero mean and unit variance of each vector."""
    return functional.layer_norm(x, x.shape[-1:], eps=1e-5)


class Transformer(nn.Module):
    def __init__(self, params, sizes):
        super().__init__()
        self.items = embedding(params["items"])
        self.places = nn.Parameter(torch.from_numpy(params["places"]))
        self.blocks = nn.Sequential(*(Block(x, sizes.heads) for x in params["blocks"]))
        self.output = embedding(params["output"]) if sizes.has_output else None

    def forward(self, batch):
        x = normalize(self.blocks(self.items(batch["item"]) + self.places))
        output = self.output or self.items  # tied
        following, negatives = output(batch["next"]), output(batch["negatives"])
        return sampled_cross_entropy(
            x.reshape(len(following), -1), following, negatives
        )


class GraphSAGE(nn.Module):
    def __init__(self, params):
        super().__init__()
        self.nodes = embedding(params["nodes"])
        self.inner, self.outer = linear(params["inner"]), linear(params["outer"])

    def forward(self, batch):
        aggregate = lambda own, near: torch.cat([own, near.mean(dim=-2)], dim=-1)
        node, first = self.nodes(batch["node"]), self.nodes(batch["neighbour"])
        second = self.nodes(batch["second"])
        inner = relu(self.inner(aggregate(first, second)))
        own = relu(self.inner(aggregate(node, first)))
        logits = self.outer(aggregate(own, inner))
        return functional.cross_entropy(logits, batch["label"])


class TenTables(nn.Module):
    def __init__(self, params):
        super().__init__()
        self.tables = nn.ModuleDict({k: embedding(x) for k, x in params.items()})

    def forward(self, batch):
        rows = [table(batch[name]) for name, table in self.tables.items()]
        return sum(x.square().sum() for x in rows) / (2 * ten_tables.IDS)


# Modules and their optimizers, by the names of the models.
MODELS: dict[str, tuple[Callable, Callable]] = {
    "skip_gram": (SkipGram, sgd(0.025)),
    "factorization": (Factorization, adam),
    "dlrm": (DLRM, adagrad(0.02)),
    "bags": (Bags, adagrad(0.1)),
    "knowledge_graph": (KnowledgeGraph, adam),
    "two_towers": (TwoTowers, adam),
    "sequence": (lambda params: Transformer(params, transformer.SASREC), adam),
    "language": (lambda params: Transformer(params, transformer.LANGUAGE), adam),
    "graph": (GraphSAGE, adagrad(0.05)),
    "ten_tables": (TenTables, adam),
    "ten_tables_sgd": (TenTables, sgd(0.01)),
}

# ------------------------------------------------------------------ a step


class Rows(nn.Module):
    """Takes the place of a table: returns rows that are constants, whatever the ids."""

    def __init__(self, table: nn.Module):
        super().__init__()
        self.dim, self.is_bag = (
            table.weight.shape[1],
            isinstance(table, nn.EmbeddingBag),
        )
        self.rows: dict[Any, torch.Tensor] = {}

    def forward(self, ids, **_):
        shape = (*(ids.shape[:1] if self.is_bag else ids.shape), self.dim)
        if shape not in self.rows:
            self.rows[shape] = 0.1 * torch.randn(shape, device=ids.device)
        return self.rows[shape]


def without_tables(model: nn.Module) -> None:
    """Puts `Rows` in place of each table."""
    for parent in list(model.modules()):
        for name, module in list(parent.named_children()):
            if isinstance(module, nn.Embedding | nn.EmbeddingBag):
                setattr(parent, name, Rows(module))


def make_step(name: str, params: Any, has_tables: bool) -> tuple[Callable, Callable]:
    """Returns the step, and what puts a batch where the step reads it.

    The step returns the loss, after the device is done.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    make_model, make_optimizers = MODELS[name]
    model = make_model(params)
    if not has_tables:
        without_tables(model)
    model.to(device)
    has_weights = any(True for _ in model.parameters())
    optimizers = make_optimizers(model) if has_weights else []

    def put(batch):
        whole = lambda x: x.astype(np.int64) if x.dtype == np.int32 else x
        made = {k: torch.from_numpy(whole(x)).to(device) for k, x in batch.items()}
        synchronize()
        return made

    def step(batch):
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        loss = model(batch)
        if has_weights:
            loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        synchronize()
        return loss.detach()

    def synchronize():
        if device.type == "cuda":
            torch.cuda.synchronize()

    return step, put
