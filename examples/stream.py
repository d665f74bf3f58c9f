"""Trains on a stream of events; a second process follows, and answers at each version.

    python examples/stream.py purchases.csv --columns CustomerID,StockCode

The file is CSV with a line for each purchase, click or rating, in the order of time.
The trainer gives rows to users and items when they are first seen; in a full table,
those not seen for longest lose theirs. Every N steps it writes the rows that changed.
The follower applies them, and answers for the next events before the trainer sees them:
does the user take this item, or the item of another event?
"""

import argparse
import csv
import itertools
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import zlib

import jax
import jax.numpy as jnp

import sparsejax as sj


NAMES, DIM = ("user", "last", "item"), 32  # of tables; "last" is the item before


def new_store(rows, tx=None):
    """The tables of the trainer or, without tx, of the follower."""
    store, keys = sj.store.KVStore(), sj.store.KeyPolicy(policy="lru")
    start = jax.nn.initializers.normal(0.1)
    for key, name in enumerate(NAMES):
        store.init(name, (rows, DIM), tx, initializer=start, key=key, keys=keys)
    return store


def vectors(tables, rows):
    """Vectors of each event's query and item; zeros for keys without a row."""
    user, last, item = (sj.lookup(tables[x], rows[x], mode="zero") for x in NAMES)
    return user + last, item


@jax.jit
def step(tables, rows):
    def loss(tables):
        query, item = vectors(tables, rows)
        losses = sj.losses.in_batch_softmax_loss(
            query, item, candidate_ids=rows["item"]
        )
        return losses.mean()

    return sj.grad(loss)(tables)


@jax.jit
def answer(tables, rows):  # how much users like their item, and another event's
    query, item = vectors(tables, rows)
    items = item, jnp.roll(item, len(item) // 2, axis=0)  # the other is far away
    return [jnp.sum(query * x, axis=1) for x in items]


def pull(store, rows):
    return {x: store.pull(x, r, capacity=len(r), mode="drop") for x, r in rows.items()}


def digest(store):
    """A number that tells whether two stores have the same weights and keys."""
    arrays = [y for x in NAMES for y in (store.pull_all(x), *store.items(x))]
    return zlib.crc32(b"".join(array.tobytes() for array in arrays))


def read(stream, user, item):
    last = {}  # the last item of each user
    for line in csv.DictReader(stream):
        yield line[user], last.get(line[user], ""), line[item]
        last[line[user]] = line[item]


def follow(folder, rows):
    """The second process: applies each file of changes, and answers for its events."""
    store, parent, is_end = new_store(rows), os.getppid(), False
    for number in itertools.count(1):
        changes = folder / f"{number}.changes"  # which is there whole, or not at all
        while not changes.exists():
            if is_end:
                return
            is_end = (folder / "end").exists() or os.getppid() != parent
            time.sleep(0.02)
        gone = store.apply_changes(changes)["item"].evicted.size
        events = json.loads((folder / f"{number}.events").read_text())
        found = {name: store.find(name, keys) for name, keys in events.items()}
        right, wrong = answer(pull(store, found), found)
        share = float(jnp.mean((right > wrong) + 0.5 * (right == wrong)))
        answers = store.version, digest(store), gone, share
        (folder / f"{number}.answers").write_text(json.dumps(answers))


def train(events, folder, args):
    """Trains on a stream; `(version, digest, size)` of each file that it wrote."""
    store, version, written = new_store(args.rows, sj.optim.adagrad(0.4)), 0, []
    for number in itertools.count():
        batch = dict(zip(NAMES, zip(*itertools.islice(events, args.batch))))
        if len(batch.get("user", ())) < args.batch:
            break
        if number and number % args.every == 0:
            path = folder / f"{len(written) + 1}.changes"
            path.with_suffix(".events").write_text(json.dumps(batch))
            version = store.export_changes(path, since=version)
            written.append((version, digest(store), path.stat().st_size))
        rows = {name: store.insert(name, batch[name], number)[0] for name in NAMES}
        for name, grad in step(pull(store, rows), rows).items():
            store.push(name, grad)
    return written


def main(argv=None):
    parser = argparse.ArgumentParser(description="Trains on a stream of events.")
    parser.add_argument("file", help="CSV, lines in the order of time")
    parser.add_argument("--columns", default="user,item", help="of user and item")
    parser.add_argument("--every", type=int, default=20, help="steps between two files")
    parser.add_argument("--batch", type=int, default=128, help="events in a step")
    parser.add_argument("--rows", type=int, default=2000, help="rows of a table")
    parser.add_argument("--follow", metavar="FOLDER", help="be the second process")
    args = parser.parse_args(argv)
    if args.follow:
        return follow(pathlib.Path(args.follow), args.rows)
    command = [sys.executable, __file__, *(argv or sys.argv[1:]), "--follow"]
    with open(args.file, newline="") as stream, tempfile.TemporaryDirectory() as name:
        folder, shares = pathlib.Path(name), []
        follower = subprocess.Popen([*command, name])
        written = train(read(stream, *args.columns.split(",")), folder, args)
        (folder / "end").touch()
        assert follower.wait() == 0, "the follower failed"
        for number, (*expected, size) in enumerate(written, 1):
            *found, gone, share = json.loads((folder / f"{number}.answers").read_text())
            assert found == expected, f"the follower has {found}, not {expected}"
            size /= len(NAMES) * args.rows * DIM * 4
            print(f"version {found[0]}: {size:.0%} of the tables, {gone} items gone")
            shares.append(share)
    share = jnp.mean(jnp.array(shares[len(shares) // 2 :]))
    print(f"{len(shares)} versions, all equal; {share:.3f} of the later answers right")


if __name__ == "__main__":
    main()
