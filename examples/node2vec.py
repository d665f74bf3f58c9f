"""Embeds the nodes of a graph: node2vec, and the AUC of link prediction.

    python examples/node2vec.py edges.txt.gz

The file has an edge a line, two words with a space or tab between, as the graphs of
snap.stanford.edu. Random walks go over the edges; with --p and --q they return or move
away more or less often (Grover and Leskovec, 2016). Skip-gram makes near places of a
walk alike. A tenth of the edges is held out: do they score higher than other pairs?
These pairs exchange the ends of the edges, so the degrees of their nodes are no help.
"""

import argparse
import gzip
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax

import sparsejax as sj


WINDOW, NEGATIVES = 5, 5  # places of a walk that are near; negatives of a pair


def read_edges(path):
    """The edges as pairs of ids, each once, and the names of the nodes."""
    with (gzip.open if path.endswith(".gz") else open)(path, "rt") as file:
        words = np.array([line.split()[:2] for line in file if line[0] != "#"])
    names, ids = np.unique(words, return_inverse=True)
    edges = ids.reshape(words.shape)
    _, first = np.unique(np.sort(edges, axis=1), axis=0, return_index=True)
    return edges[first], names


class Graph:
    """Neighbours of each node, and whether there is an edge, by sorted arrays."""

    def __init__(self, edges, num_nodes):
        both = np.concatenate([edges, edges[:, ::-1]])
        self.num_nodes, self.keys = num_nodes, np.sort(both @ [num_nodes, 1])
        self.ends = self.keys % num_nodes
        self.degrees = np.bincount(self.keys // num_nodes, None, num_nodes)
        self.starts = np.cumsum(self.degrees) - self.degrees

    def has(self, a, b):
        keys = a * self.num_nodes + b
        place = np.searchsorted(self.keys, keys)
        return self.keys[np.minimum(place, len(self.keys) - 1)] == keys

    def walks(self, nodes, length, p, q, rng):
        """A walk from each node, int32 [nodes, length]."""
        found = np.empty((len(nodes), length), np.int32)
        found[:, 0] = now = before = nodes
        for place in range(1, length):
            after, open_ = now.copy(), np.arange(len(now))
            while len(open_):  # a step is drawn until it is accepted
                a = now[open_]
                drawn = (rng.random(len(a)) * self.degrees[a]).astype(int)
                after[open_] = b = self.ends[self.starts[a] + drawn]
                weight = np.where(self.has(before[open_], b), 1.0, 1 / q)
                weight = np.where(b == before[open_], 1 / p, weight)
                least = rng.random(len(a)) * max(1, 1 / p, 1 / q)
                open_ = open_[weight < least] if place > 1 else open_[:0]
            found[:, place] = after
            before, now = now, after
        return found


def loss_fn(params, walks, negatives):
    """Logistic losses of near places of a walk, and of places and random nodes."""
    nodes, contexts = params["nodes"][walks], params["contexts"][walks]
    places = np.arange(walks.shape[1])
    far = np.abs(places[:, None] - places)
    near = jnp.asarray((far > 0) & (far <= WINDOW), jnp.float32)
    right = jax.nn.softplus(-jnp.einsum("wid,wjd->wij", nodes, contexts))
    wrong = jax.nn.softplus(nodes @ params["contexts"][negatives].T)
    share = (
        NEGATIVES / len(negatives) * jnp.sum(near, axis=1)
    )  # of all pairs of a place
    total = jnp.sum(right * near[None]) + jnp.sum(wrong * share[None, :, None])
    return total / (len(walks) * jnp.sum(near))  # of a pair


def auc(right, wrong):
    """The probability that a right score is higher than a wrong one."""
    wrong = np.sort(wrong)
    ranks = np.searchsorted(wrong, right) + np.searchsorted(wrong, right, "right")
    return np.mean(ranks) / (2 * len(wrong))


def main(argv=None):
    parser = argparse.ArgumentParser(description="Embeds the nodes of a graph.")
    parser.add_argument("file", help="two words a line, plain or gzip")
    parser.add_argument("--epochs", type=int, default=10, help="walks from each node")
    parser.add_argument("--length", type=int, default=40, help="of a walk")
    parser.add_argument("--p", type=float, default=1.0, help="high: returns are rare")
    parser.add_argument("--q", type=float, default=1.0, help="high: walks stay near")
    parser.add_argument("--dim", type=int, default=64, help="length of a vector")
    args = parser.parse_args(argv)
    if min(args.epochs, args.length, args.p, args.q, args.dim) <= 0:
        parser.error("all options must be positive")
    sj.cpu.keep_freed_pages()
    edges, names = read_edges(args.file)
    rng, key, number = np.random.default_rng(0), jax.random.key(0), 0
    held_out, kept = np.split(rng.permutation(edges), [len(edges) // 10])
    graph, whole = Graph(kept, len(names)), Graph(edges, len(names))
    right = held_out[graph.degrees[held_out].min(axis=1) > 0]  # others have no walks
    wrong = np.stack([right[:, 0], rng.permutation(right[:, 1])], axis=1)
    wrong = wrong[~whole.has(*wrong.T) & (wrong[:, 0] != wrong[:, 1])]
    print(f"{len(names):,} nodes, {len(kept):,} edges, {len(right):,} held out")
    tx = sj.optim.lazy(sj.optim.adagrad(0.1))

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params, opt_state, walks, sampler, number):
        negatives = sampler.sample(jax.random.fold_in(key, number), 256).ids
        loss, grads = sj.value_and_grad(loss_fn)(params, walks, negatives)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    @jax.jit
    def score(params, pairs):
        nodes, contexts = params["nodes"][pairs], params["contexts"][pairs]
        return jnp.sum(nodes * contexts[:, ::-1], axis=(1, 2))

    nodes = (rng.random((len(names), args.dim), np.float32) - 0.5) / args.dim
    params = {"nodes": jnp.asarray(nodes), "contexts": jnp.zeros(nodes.shape)}
    opt_state = tx.init(params)
    sampler = sj.losses.NegativeSampler.from_counts(graph.degrees)
    for epoch in range(1, args.epochs + 1):
        began, losses = time.perf_counter(), []
        nodes = rng.permutation(np.flatnonzero(graph.degrees))
        walks = graph.walks(nodes, args.length, args.p, args.q, rng)
        for batch in sj.data.DataLoader(walks, 64, drop_remainder=True):
            params, opt_state, loss = step(params, opt_state, batch, sampler, number)
            losses, number = [*losses, loss], number + 1
        loss = np.mean(losses)  # waits for the steps
        speed = walks.size / (time.perf_counter() - began)
        found = auc(*(np.asarray(score(params, x)) for x in (right, wrong)))
        print(f"epoch {epoch}: loss {loss:.3f}, AUC {found:.3f}, {speed:,.0f} nodes/s")
    near = [set() for _ in names]
    for a, b in np.concatenate([kept, kept[:, ::-1]]).tolist():
        near[a].add(b)
    common = lambda pairs: np.array([len(near[a] & near[b]) for a, b in pairs])
    by_common = auc(common(right), common(wrong))
    print(f"AUC {found:.3f}, of the number of common neighbours {by_common:.3f}")


if __name__ == "__main__":
    main()
