"""Retrieves what each user will buy: two towers with features, recall@20 of new items.

    python examples/two_towers.py purchases.csv --basket InvoiceNo \\
        --user CustomerID,Country --item StockCode --text Description

The file is CSV or Parquet, with a line for each purchase, click or rating, in the order
of time. The user tower sums vectors: of the user's columns, and the mean of the items
bought before. The item tower sums vectors of the item's columns and of the words of its
text. The negatives of a pair are the items of the other pairs of the batch (Yi et al.,
2019). The last basket of each user is held out. Without --basket each line is one.
"""

import argparse
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pyarrow.dataset

import sparsejax as sj


HISTORY, WORDS, K = 20, 8, 20  # items of a user, words of a text; recall@K


def read(path, user, item, text, basket):
    """Ids of the columns by name, and the number of ids of each."""
    table = pyarrow.dataset.dataset(path, format=path.split(".")[-1]).to_table()
    vocabulary = sj.data.Vocabulary.build(table, [*user, *item, *text, *basket])
    data, sizes = vocabulary.ids(table), dict(zip(vocabulary.names, vocabulary.sizes()))
    if text:  # its words, [lines, WORDS], padded with 0
        texts = vocabulary.decode(text[0], np.arange(sizes[text[0]]))
        split = [(str(x).lower().split() + [None] * WORDS)[:WORDS] for x in texts]
        words = [word for x in split for word in x]
        known = sj.data.Vocabulary.build({"word": words})
        rows = known.encode("word", words).reshape(-1, WORDS)
        data[text[0]], sizes[text[0]] = rows[data[text[0]]], known.size("word")
    return data, sizes


def histories(users, items, baskets):
    """The last items before the basket of each line; and which baskets are the last."""
    found, all_of, now = np.zeros((len(users), HISTORY), np.int32), {}, {}
    for n, (user, item, basket) in enumerate(zip(users, items, baskets)):
        own = all_of.setdefault(user, [])
        if now.get(user, (None, 0))[0] != basket:
            now[user] = basket, len(own)  # where the basket begins
        own.append(item)
        stop = now[user][1]
        found[n, : min(stop, HISTORY)] = own[max(stop - HISTORY, 0) : stop]
    return found, np.array([now[u][0] == b for u, b in zip(users, baskets)])


def tower(params, batch, names, dense):
    """The sum of the vectors of some columns, and a dense layer on it."""
    bag = partial(sj.embedding_bag, combiner="mean", padding_id=0)
    read = lambda table, ids: (bag if ids.ndim > 1 else sj.lookup)(table, ids)
    x = sum(read(params[name], batch[name]) for name in names)
    return x + jax.nn.relu(x @ params[dense][0]) @ params[dense][1]


def main(argv=None):
    parser = argparse.ArgumentParser(description="Retrieves what each user will buy.")
    parser.add_argument("file", help="CSV or Parquet, lines in the order of time")
    parser.add_argument("--user", default="user", help="its column, then its features")
    parser.add_argument("--item", default="item", help="its column, then its features")
    parser.add_argument("--text", nargs=1, default=[], help="column of item's words")
    parser.add_argument("--basket", nargs=1, default=[], help="column of the basket")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--dim", type=int, default=64, help="length of a vector")
    parser.add_argument("--lr", type=float, default=3e-3, help="of Adam")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if min(args.epochs, args.dim, args.lr) <= 0:
        parser.error("--epochs, --dim and --lr must be positive")
    sj.cpu.keep_freed_pages()
    user, item = args.user.split(","), args.item.split(",")
    data, sizes = read(args.file, user, item, args.text, args.basket)
    users, items, lines = data[user[0]], data[item[0]], np.arange(len(data[user[0]]))
    baskets = data[args.basket[0]] if args.basket else lines
    data["history"], is_last = histories(users, items, baskets)
    past, future = lines[~is_last], lines[is_last]
    of_user, of_item = [*user, "history"], [*item, *args.text]
    user_tower = partial(tower, names=of_user, dense="user tower")
    item_tower = partial(tower, names=of_item, dense="item tower")
    tx = sj.optim.lazy(optax.adam(args.lr))
    print(f"{sizes[user[0]]:,} users, {sizes[item[0]]:,} items, {len(lines):,} lines")

    def loss_fn(params, batch, popularity):
        vectors = user_tower(params, batch), item_tower(params, batch)
        ids = batch[item[0]]
        log_q = popularity.log_prob(ids)  # a frequent item is a negative too often
        how = {"candidate_ids": ids, "log_q": log_q}
        return jnp.mean(sj.losses.in_batch_softmax_loss(*vectors, **how))

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params, opt_state, batch, popularity):
        loss, grads = sj.value_and_grad(loss_fn)(params, batch, popularity)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    of_items, of_users = np.zeros(sizes[item[0]], int), np.zeros(sizes[user[0]], int)
    of_items[items], of_users[users[future]] = lines, future  # a line of each
    bought = {u: {0} for u in users.tolist()}  # 0: unknown items
    for u, i in zip(users[past].tolist(), items[past].tolist()):
        bought[u].add(i)
    asked = np.unique(users[past]).tolist()  # who has bought before
    pairs = zip(users[future].tolist(), items[future].tolist())
    wanted = {(u, i) for u, i in pairs if len(bought[u]) > 1 and i not in bought[u]}
    if not wanted:
        parser.error(f"no user of {args.file} has a new item in a later basket")
    seen = sj.SegmentTensor.from_lists([sorted(bought[u]) for u in asked])
    queries = {name: data[name][of_users[asked]] for name in of_user}
    candidates = {name: data[name][of_items] for name in of_item}

    @jax.jit
    def retrieve(params, queries, candidates, seen):
        vectors = item_tower(params, candidates), user_tower(params, queries)
        return sj.top_k(*vectors, K, exclude=seen)[1]

    def recall(best):  # the share of wanted pairs whose item is retrieved
        found = {(u, i) for u, row in zip(asked, best) for i in row}
        return len(wanted & found) / len(wanted)

    counts = np.bincount(items[past], None, sizes[item[0]])
    ranked = np.argsort(-counts)[:1000].tolist()
    popular = recall([[i for i in ranked if i not in bought[u]][:K] for u in asked])
    rng = np.random.default_rng(args.seed)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    tables = {x: sizes.get(x, sizes[item[0]]) for x in (*of_user, *of_item)}
    dense = lambda: (0.1 * normal(args.dim, 128), 0.01 * normal(128, args.dim))
    params = {name: 0.1 * normal(n, args.dim) for name, n in tables.items()}
    params |= {"user tower": dense(), "item tower": dense()}
    opt_state = tx.init(params)
    popularity = sj.losses.NegativeSampler.from_counts(counts, power=1.0)
    dataset = sj.data.ArrayDataset({name: data[name][past] for name in tables})
    how = {"shuffle": True, "seed": args.seed, "drop_remainder": True}
    loader = sj.data.DataLoader(dataset, 512, **how)
    for epoch in range(1, args.epochs + 1):
        began, losses = time.perf_counter(), []
        for batch in loader:
            params, opt_state, loss = step(params, opt_state, batch, popularity)
            losses.append(loss)
        loss, spent = np.mean(losses), time.perf_counter() - began
        found = recall(retrieve(params, queries, candidates, seen).tolist())
        print(f"epoch {epoch}: loss {loss:.3f}, recall@{K} {found:.3f}, {spent:.2f} s")
    print(f"Recall@{K} of new items {found:.3f}, of popularity {popular:.3f}")


if __name__ == "__main__":
    main()
