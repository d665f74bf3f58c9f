"""Predicts clicks with DCN-v2, and serves it with tables in 8 bits.

    python examples/clicks.py --rows 1000000
    python examples/clicks.py --file clicks.parquet --words site,device --numbers age

Without --file it makes clicks by a factorization machine on columns of words; no model
has a better AUC than its probabilities. The last tenth of the rows is held out. Cross
layers multiply the columns, dense ones follow (Wang et al., 2021).
"""

import argparse
import itertools
import pathlib
import pickle
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pyarrow.parquet
from jax import export

import sparsejax as sj


HEIGHTS = 5, 10, 50, 200, 1_000, 5_000, 50_000, 1_000_000  # of the columns made
WORDS, DIM = [f"word {n}" for n in range(len(HEIGHTS))], 16  # length of a vector


def make_clicks(path, rows, rng):
    """Writes labels, a number and words; returns the logits of the labels."""
    number, columns = rng.normal(size=rows), {}
    logits, total, squares = 0.5 * number - 1, 0.0, 0.0
    for name, height in zip(WORDS, HEIGHTS):
        ids = (height ** rng.random(rows)).astype(int)  # P(id) is about 1 / id
        columns[name] = pyarrow.array(ids).cast(pyarrow.string())
        known, place = np.unique(ids, return_inverse=True)
        logits += rng.normal(0, 0.5, len(known))[place]
        factors = rng.normal(0, 0.3, (len(known), 4))[place]
        total, squares = total + factors, squares + factors**2
    logits += 0.5 * np.sum(total**2 - squares, axis=1)  # of all pairs of columns
    columns["label"] = rng.random(rows) < 1 / (1 + np.exp(-logits))
    pyarrow.parquet.write_table(pyarrow.table(columns | {"number": number}), path)
    return logits


def auc(scores, labels):
    """The probability that a click has a higher score than a row without one."""
    hits, rest = scores[labels > 0], np.sort(scores[labels == 0])
    return np.mean([rest.searchsorted(hits, s) for s in ("left", "right")]) / len(rest)


def init(key, layer, width):
    tables, *keys = jax.random.split(key, 6)
    sizes = [(width, width), (width, width), (width, 64), (64, 64), (64, 1)]
    kernels = [jax.random.normal(k, s) / np.sqrt(s[0]) for k, s in zip(keys, sizes)]
    dense = [(kernel, jnp.zeros((1, kernel.shape[1]))) for kernel in kernels]
    return {"tables": layer.init(tables), "cross": dense[:2], "dense": dense[2:]}


def predict(params, ids, numbers, layer):
    """The logit of a click for each row."""
    numbers = jnp.sign(numbers) * jnp.log1p(jnp.abs(numbers))
    rows = layer(params["tables"], dict(zip(dict(layer.tables), ids.T))).values()
    x = first = jnp.concatenate([*rows, numbers], axis=1)
    for kernel, bias in params["cross"]:
        x = first * (x @ kernel + bias) + x
    for n, (kernel, bias) in enumerate(params["dense"]):
        x = (jax.nn.relu(x) if n else x) @ kernel + bias
    return x[:, 0]


def save(folder, params, layer, num_words, num_numbers):
    """Writes the program for any number of rows, and the weights, tables in 8 bits."""
    small = {**params, "tables": jax.tree.map(sj.quantize, params["tables"])}
    like, (rows,) = jax.ShapeDtypeStruct, export.symbolic_shape("rows")
    ids, numbers = (rows, num_words), (rows, num_numbers)
    program = export.export(jax.jit(partial(predict, layer=layer)))(
        jax.eval_shape(lambda: small), like(ids, "int32"), like(numbers, "float32")
    )
    (folder / "program.bin").write_bytes(program.serialize())
    (folder / "weights.pickle").write_bytes(pickle.dumps(jax.device_get(small)))


def load(folder):
    """The program with its weights; needs `import sparsejax`, and not this file."""
    program = export.deserialize(bytearray((folder / "program.bin").read_bytes()))
    weights = pickle.loads((folder / "weights.pickle").read_bytes())
    return partial(jax.jit(program.call), jax.device_put(weights))


def main(argv=None):
    parser = argparse.ArgumentParser(description="Predicts clicks.")
    parser.add_argument("--file", help="Parquet; without, clicks are made")
    parser.add_argument("--rows", type=int, default=500_000, help="of the clicks made")
    parser.add_argument("--label", default="label", help="a column of 0 and 1")
    parser.add_argument("--numbers", default="number", help="columns, comma separated")
    parser.add_argument("--words", default=",".join(WORDS), help="columns")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--lr", type=float, default=0.01, help="of Adam")
    parser.add_argument("--seed", type=int, default=0, help="of the first weights")
    parser.add_argument("--out", default="clicks-model", help="a folder to write")
    args = parser.parse_args(argv)
    sj.cpu.keep_freed_pages()
    (folder := pathlib.Path(args.out)).mkdir(parents=True, exist_ok=True)
    if not (file := args.file):
        file = folder / "clicks.parquet"
        logits = make_clicks(file, args.rows, np.random.default_rng(0))
    words, numbers = args.words.split(","), [*filter(None, args.numbers.split(","))]
    table = pyarrow.parquet.read_table(file)
    vocabulary = sj.data.Vocabulary.build(table, words, min_count=2)
    vocabulary.save(folder / "vocabulary.npz")
    values = [np.nan_to_num(np.asarray(table[x], "f")) for x in (args.label, *numbers)]
    data = {"ids": np.stack([*vocabulary.ids(table).values()], axis=1)}
    data |= {"label": values[0], "numbers": np.stack(values, axis=1)[:, 1:]}
    cut = 9 * len(table) // 10
    dataset = sj.data.ArrayDataset({name: x[:cut] for name, x in data.items()})
    print(f"{len(table):,} rows, {sum(vocabulary.sizes()):,} words")
    tables = {name: (vocabulary.size(name), DIM) for name in words}
    layer, tx = sj.nn.EmbeddingCollection(tables), sj.optim.lazy(optax.adam(args.lr))

    def loss_fn(params, batch):
        score = predict(params, batch["ids"], batch["numbers"], layer)
        return jnp.mean(optax.sigmoid_binary_cross_entropy(score, batch["label"]))

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params, opt_state, batch):
        loss, grads = sj.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    key, width = jax.random.key(args.seed), len(words) * DIM + len(numbers)
    params = jax.jit(partial(init, layer=layer, width=width))(key)  # one compilation
    opt_state, losses, began = tx.init(params), [], time.perf_counter()
    loader = sj.data.DataLoader(dataset, 1024, shuffle=True, drop_remainder=True)
    for batch in itertools.chain.from_iterable([loader] * args.epochs):
        params, opt_state, loss = step(params, opt_state, batch)
        losses.append(loss)
        if len(losses) % 50 == 0:
            loss = np.mean(losses[-50:])  # waits for the steps
            speed = 1024 * len(losses) / (time.perf_counter() - began)
            print(f"step {len(losses)}: loss {loss:.4f}, {speed:,.0f} rows/s")
    save(folder, params, layer, len(words), len(numbers))
    of_float32, served = jax.jit(partial(predict, params, layer=layer)), load(folder)
    for name, score in {"float32": of_float32, "8 bits, as served": served}.items():
        scores = np.asarray(score(data["ids"][cut:], data["numbers"][cut:]))
        print(f"AUC {auc(scores, data['label'][cut:]):.4f} in {name}")
    if not args.file:
        print(f"AUC {auc(logits[cut:], data['label'][cut:]):.4f} at best")


if __name__ == "__main__":
    main()
