"""Embeds a knowledge graph: ComplEx, DistMult or TransE, and filtered MRR.

    python examples/knowledge_graph.py codex-m --model complex

The folder has `train.txt`, `valid.txt` and `test.txt`, each a triple a line: head,
relation and tail, separated by tabs. CoDEx (github.com/tsafavi/codex), WN18RR and
FB15k-237 have this form. The model learns to tell the tail of a triple from random
entities. The head is the tail of the reverse relation (Lacroix et al., 2018). TransE
trains with Adam, the others with Adagrad. The learning rate goes to 0.
"""

import argparse
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pyarrow.csv

import sparsejax as sj


MODELS = "complex", "distmult", "transe"
READ = pyarrow.csv.ReadOptions(column_names=["head", "relation", "tail"])
TABS = pyarrow.csv.ParseOptions(delimiter="\t", quote_char=False)
OF_PRODUCTS = {"dim": 256, "batch": 1024, "lr": 0.2, "n3": 3e-2}
OF_TRANSE = {"dim": 64, "batch": 256, "lr": 0.1, "n3": 0.0}


def read_graph(folder):
    """Triples as ids, both ways round: (head, r, tail) and (tail, R + r, head)."""
    files = [f"{folder}/{part}.txt" for part in ("train", "valid", "test")]
    tables = [pyarrow.csv.read_csv(file, READ, TABS) for file in files]
    vocabulary = sj.data.Vocabulary.build(tables[0], shared=[["head", "tail"]])
    parts = [np.stack([*vocabulary.ids(table).values()], 1) for table in tables]
    entities, relations, _ = vocabulary.sizes()
    reverse = np.array([[0, relations, 0]], np.int32)
    parts = [np.concatenate([x, x[:, ::-1] + reverse]) for x in parts]
    return entities, 2 * relations, parts


def query_of(model, head, relation):
    if model != "complex":
        return head + relation if model == "transe" else head * relation
    a, b = jnp.split(head, 2, axis=1)  # ComplEx: the real parts, then the imaginary
    c, d = jnp.split(relation, 2, axis=1)
    return jnp.concatenate([a * c - b * d, a * d + b * c], axis=1)


def score(model, query, tail, product):
    """A dot product, `product`, or minus the squared distance."""
    if model != "transe":
        return product
    return 2 * product - jnp.sum(query**2, axis=-1) - jnp.sum(tail**2, axis=-1)


def loss_fn(params, triples, negatives, model, n3):
    head, relation, tail = triples.T
    h, t = params["entity"][head], params["entity"][tail]
    r = params["relation"][relation]
    query, others = query_of(model, h, r), params["entity"][negatives]
    right = score(model, query, t, jnp.sum(query * t, axis=1))
    wrong = score(model, query[:, None], others[None], query @ others.T)
    wrong = jnp.where(negatives[None] == tail[:, None], -jnp.inf, wrong)
    losses = jnp.logaddexp(right, jax.nn.logsumexp(wrong, axis=1)) - right
    cubes = [jnp.sum(jnp.abs(x) ** 3, axis=1) for x in (h, r, t)]  # of the rows read
    return jnp.mean(losses + n3 * sum(cubes))


@partial(jax.jit, static_argnames="model")
def score_all(params, triples, model):
    entity, (head, relation, _) = params["entity"], triples.T
    query = query_of(model, entity[head], params["relation"][relation])
    return score(model, query[:, None], entity[None], query @ entity.T)


def filtered_mrr(scores_of, triples, known, block=512):
    """Mean of 1 / rank of the right tail among all but the other right ones."""
    answers, found = {}, []
    for head, relation, tail in known.tolist():
        answers.setdefault((head, relation), []).append(tail)
    for start in range(0, len(triples), block):
        part = triples[start : start + block]
        scores = np.array(scores_of(part))  # a copy
        scores[:, 0] = -np.inf  # id 0: unknown words
        for row, (head, relation, tail) in zip(scores, part.tolist()):
            right = row[tail]
            row[answers[head, relation]] = -np.inf
            found.append(1 / (1 + np.sum(row > right) + np.sum(row == right) / 2))
    return np.mean(found)


def main(argv=None):
    parser = argparse.ArgumentParser(description="Embeds a knowledge graph.")
    parser.add_argument("folder", help="with train.txt, valid.txt and test.txt")
    parser.add_argument("--model", choices=MODELS, default=MODELS[0])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--dim", type=int, help="numbers in a row")
    parser.add_argument("--batch", type=int, help="triples in a step")
    parser.add_argument("--negatives", type=int, default=1024, help="of a step")
    parser.add_argument("--lr", type=float, help="of Adagrad or Adam, at the start")
    parser.add_argument("--n3", type=float, help="weight of the cubes")
    parser.add_argument("--seed", type=int, default=0)
    transe = parser.parse_known_args(argv)[0].model == "transe"
    parser.set_defaults(**(OF_TRANSE if transe else OF_PRODUCTS))
    args = parser.parse_args(argv)
    if min(args.epochs, args.dim, args.batch, args.negatives, args.lr) <= 0:
        parser.error("all options but --n3 and --seed must be positive")
    sj.cpu.keep_freed_pages()
    entities, relations, (train, valid, test) = read_graph(args.folder)
    known = np.concatenate([train, valid, test])
    print(f"{len(train) // 2:,} triples of {entities - 1:,} entities")

    to_0 = optax.linear_schedule(args.lr, 0, args.epochs * len(train) // args.batch)
    tx = sj.optim.lazy(optax.adam(to_0) if transe else sj.optim.adagrad(to_0))

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params, opt_state, triples, key):
        negatives = jax.random.randint(key, (args.negatives,), 1, entities)
        loss = partial(loss_fn, model=args.model, n3=args.n3)
        value, grads = sj.value_and_grad(loss)(params, triples, negatives)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    keys = jax.random.split(jax.random.key(args.seed), 3)
    params = {
        "entity": 0.1 * jax.random.normal(keys[0], (entities, args.dim)),
        "relation": 0.1 * jax.random.normal(keys[1], (relations, args.dim)),
    }
    opt_state, number = tx.init(params), 0
    how = {"shuffle": True, "seed": args.seed, "drop_remainder": True}
    loader = sj.data.DataLoader(sj.data.ArrayDataset(train), args.batch, **how)
    for epoch in range(1, args.epochs + 1):
        began, losses = time.perf_counter(), []
        for triples in loader:
            own = jax.random.fold_in(keys[2], number)
            params, opt_state, loss = step(params, opt_state, triples, own)
            losses, number = [*losses, loss], number + 1
        loss = np.mean(losses)  # waits for the steps
        speed = len(train) / 2 / (time.perf_counter() - began)
        scores_of = partial(score_all, params, model=args.model)
        mrr = filtered_mrr(scores_of, valid[::10], known)
        print(f"epoch {epoch}: loss {loss:.3f}, MRR {mrr:.3f}, {speed:,.0f} triples/s")
    frequent = np.zeros((relations, entities), np.float32)  # of each relation's tails
    np.add.at(frequent, (train[:, 1], train[:, 2]), 1)
    by_count = filtered_mrr(lambda part: frequent[part[:, 1]], test, known)
    mrr = filtered_mrr(scores_of, test, known)
    print(f"Test: filtered MRR {mrr:.3f}, of frequent tails {by_count:.3f}")


if __name__ == "__main__":
    main()
