"""Damaged files for every reader: nothing but ValueError or OSError may come out.

    python -m tests.tools.damage --seconds 60         all readers, for a minute
    python -m tests.tools.damage --count 100000       in ten core-minutes
    python -m tests.tools.damage --seed 3 --case 512  one file again, its traceback

A case is one reader, one good file, and what is done to it: bytes are changed, cut,
moved or put in. Checksums would refuse nearly all of these, so half of the cases change
what the file says and make its checksums right again: the JSON of a header, the arrays
of a store, the headers within an `.npz` archive, the text under a compression.

A reader that accepts a file has to give something that can be used: ids that are read,
words that are looked up, a batch that is trained on. If its format has checksums, and
bytes were changed without making them right again, it has to give what the good file
gives.
"""

import argparse
import contextlib
import io
import json
import logging
import math
import os
import pathlib
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
import zipfile
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple


if __name__ == "__main__":  # before JAX is imported
    os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import optax

import sparsejax as sj


ALLOWED = (ValueError, OSError)
MAX_SECONDS = 20  # for one file

Files = dict[str, bytes]  # by path in a folder
Change = Callable[[random.Random, Files], Files]


class Reader(NamedTuple):
    """A reader and its files.

    Args:
      make: writes good files into a folder; returns the files, and a function that
        reads and uses one.
      changes: changes that keep checksums right; every reader also gets changes of
        bytes.
      share: the weight in the draw of readers.
      checked: the format has checksums of all that is read. Then `read` returns it: a
        tree of arrays and other values.
    """

    make: Callable[[pathlib.Path], tuple[list[Files], Callable[[pathlib.Path], Any]]]
    changes: tuple[Change, ...] = ()
    share: float = 1.0
    checked: bool = False


class Hangs(BaseException):
    """A file took too long to be refused."""


# ------------------------------------------------------------------ changes of bytes


_NUMBERS = [0, 1, 2, 7, 255, 256, 65535, 1 << 20, 1 << 31, 1 << 32, 1 << 40, 1 << 62]
_NUMBERS += [(1 << k) - 1 for k in (31, 32, 53, 63, 64)]


def _place(rng: random.Random, data: bytes) -> int:
    """A place in a file, often near one of its ends, which hold its structure."""
    size = len(data)
    near = rng.randrange(min(size, 200)) if size else 0
    return rng.choice([near, max(size - 1 - near, 0), rng.randrange(size or 1)])


def _flip(rng, data):
    at = _place(rng, data)
    return (
        data[:at]
        + bytes(b ^ 1 << rng.randrange(8) for b in data[at : at + 1])
        + (data[at + 1 :])
    )


def _put(rng, data):
    at, size = _place(rng, data), rng.choice([1, 2, 4, 8])
    number = (rng.choice(_NUMBERS) % (1 << 8 * size)).to_bytes(
        size, rng.choice(["little", "big"])
    )
    return data[:at] + number + data[at + rng.choice([0, size]) :]


def _cut(rng, data):
    return data[: _place(rng, data)]


def _drop(rng, data):
    at = _place(rng, data)
    return data[:at] + data[at + rng.choice([1, 2, 8, 64, 1000]) :]


def _repeat(rng, data):
    at, size = _place(rng, data), rng.choice([1, 8, 64, 1000])
    return (
        data[: at + size]
        + data[at : at + size] * rng.choice([1, 3])
        + (data[at + size :])
    )


def _noise(rng, data):
    at, size = _place(rng, data), rng.choice([1, 4, 30, 300])
    return data[:at] + rng.randbytes(size) + data[at + rng.choice([0, size]) :]


def _text(rng, data):
    """Words that mean something to a parser."""
    words = '"|""|,|\t|\r\n|\n\n|#|:|qid:|-1|nan|1e999|0x1|1_0|{|}|[|]|(|null|PK|None'
    word = rng.choice(words.split("|")).encode() * rng.choice([1, 1, 2, 50])
    at = _place(rng, data)
    return data[:at] + word + data[at + rng.choice([0, len(word)]) :]


def _digits(rng, data):
    """Another number in the place of one that is written out."""
    found = list(re.finditer(rb"\d+", data))
    if not found:
        return _put(rng, data)
    one = rng.choice(found[:200])
    number = rng.choice([-1, *_NUMBERS, 1 << 70, rng.randrange(100)])
    return data[: one.start()] + str(number).encode() + data[one.end() :]


_BYTES = [_flip, _put, _cut, _drop, _repeat, _noise, _text, _digits]


def _some(rng: random.Random, data: bytes) -> bytes:
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        data = rng.choice(_BYTES)(rng, data)
    return data


def change_bytes(rng: random.Random, files: Files) -> Files:
    """Changes the bytes of one file; of several, one may be gone or be another."""
    name = rng.choice(sorted(files))
    new = dict(files)
    if len(files) > 1 and rng.random() < 0.1:
        del new[name]
    elif len(files) > 1 and rng.random() < 0.1:
        new[name] = files[rng.choice(sorted(files))]
    else:
        new[name] = _some(rng, files[name])
    return new


# ------------------------------------------------------------------ changes with sense


_VALUES: list[Any] = [
    None,
    True,
    False,
    -1,
    0.5,
    1e400,
    "",
    "float32",
    "x" * 300,
    [],
    {},
]
_VALUES += [[1], [[1]], ["a"], {"a": 1}, [None], "object", "threefry2x32", "mod"]


def change_json(rng: random.Random, value: Any) -> Any:
    """Parsed JSON, with one part of it changed, gone or added."""
    if isinstance(value, (dict, list)) and value and rng.random() < 0.8:
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        key, new = rng.choice(keys), value.copy()
        kind = rng.random()
        if kind < 0.75:
            new[key] = change_json(rng, value[key])
        elif kind < 0.9:
            del new[key]
        elif isinstance(new, dict):
            new[rng.choice(["", "x", f"{key}x"])] = value[key]
        else:
            new.insert(key, value[key])
        return new
    if type(value) is int and rng.random() < 0.5:
        return rng.choice([value + 1, value - 1, *_NUMBERS, 1 << 70])
    return rng.choice(_VALUES)


_NOT_JSON = [b"[" * 100_000, b"1" * 5000, b"\xff", b"NaN", b'"x"']


def _changed_text(rng: random.Random, text: bytes) -> bytes:
    """Other JSON than this, or now and then none."""
    new = json.dumps(change_json(rng, json.loads(text))).encode()
    return rng.choice(_NOT_JSON) if rng.random() < 0.05 else new


def _unpack(files: Files) -> tuple[str, dict[str, bytes]]:
    """The path of the only file, an archive, and its members."""
    ((name, data),) = files.items()
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return name, {m: archive.read(m) for m in archive.namelist()}


def _pack(members: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        for member, content in members.items():
            archive.writestr(member, content)
    return file.getvalue()


def _npy(x: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, x)
    return file.getvalue()


def change_header(rng: random.Random, files: Files) -> Files:
    """Another header of a store's file, with the right length and checksum."""
    ((name, data),) = files.items()
    magic, rest = data[:18], data[18:]
    size = int.from_bytes(rest[:8], "little")
    text = _changed_text(rng, rest[12 : 12 + size])
    head = len(text).to_bytes(8, "little") + zlib.crc32(text).to_bytes(4, "little")
    body = rest[12 + size :]
    if magic == b"sparsejax table 3\n":  # the rows begin at a fixed place
        body = (
            body[len(text) - size :]
            if len(text) > size
            else (bytes(size - len(text)) + body)
        )
    return {name: magic + head + text + body}


def change_member(rng: random.Random, files: Files) -> Files:
    """Another header, or other ids, kinds or keys, in a record of a store."""
    name, members = _unpack(files)
    one = rng.choice([m for m in sorted(members) if "weights" not in m])
    if one == "header.json":
        members[one] = _changed_text(rng, members[one])
    else:
        numbers = np.load(io.BytesIO(members[one]))
        if numbers.size:
            numbers = numbers.copy()
            new = rng.choice([*numbers.ravel().tolist(), 0, 1, 2, 7, 100])
            numbers.flat[rng.randrange(numbers.size)] = new
        members[one] = _npy(np.flip(numbers) if rng.random() < 0.2 else numbers)
    return {name: _pack(members)}


_DTYPES = "|O,<f4,>f4,<f8,<f16,|b1,|S0,|S3,<U2,|V8,<M8[s],<i8,<i2,|u1,<c8,<x4".split(
    ","
)
_SHAPES = ["()", "(0,)", "(3,)", "(1, 3)", "(2, 2, 2)", "(-1,)", "(99999999999,)"]
_SHAPES += ["(0, 4611686018427387904)", "(True,)", "(3", "((3,),)", "(" * 300, "None"]


def change_archive(rng: random.Random, files: Files) -> Files:
    """Another `.npz` archive: members changed, gone, added, packed in other ways."""
    name, members = _unpack(files)
    one = rng.choice(sorted(members))
    content = members[one]
    kind = rng.randrange(8)
    if kind == 0:
        del members[one]
    elif kind == 1:
        members[one] = members[rng.choice(sorted(members))]
    elif kind == 2:
        members[rng.choice(["x", "names", "ids 1", "words 7", "rows"]) + ".npy"] = (
            content
        )
    elif kind == 3:
        members[one] = _some(rng, content)
    elif kind == 4:
        values = rng.choice(
            [np.arange(3), np.ones(2), np.float32(3), np.array([b"b", b"a"]), "x"]
            + [np.array(["a"]), np.zeros((0, 3)), np.array([2**62, -5]), np.bool_(1)]
        )
        members[one] = _npy(values)
    else:
        form = r"'descr': '([^']*)', 'fortran_order': (\w+), 'shape': (\(.*?\))"
        found = re.search(form.encode(), content)
        if found:
            text = {1: _DTYPES, 2: ["True", "1", "x"], 3: _SHAPES}
            place = rng.choice([1, 1, 2, 3, 3])
            begin, end = found.span(place)
            new = content[:begin] + rng.choice(text[place]).encode() + content[end:]
            size = int.from_bytes(content[8:10], "little") + len(new) - len(content)
            members[one] = new[:8] + (size % 65536).to_bytes(2, "little") + new[10:]
    method = rng.choice([zipfile.ZIP_STORED] * 3 + [zipfile.ZIP_DEFLATED])
    if rng.random() < 0.005:
        members[one] = content + bytes(100 << 20)
        method = zipfile.ZIP_DEFLATED
    if rng.random() < 0.05:
        method = rng.choice([zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
    packed = _pack(members, method)
    return {name: _some(rng, packed) if rng.random() < 0.2 else packed}


def change_record(rng: random.Random, files: Files) -> Files:
    """Another JSON in one of the files of a checkpoint that hold one."""
    held = [n for n, data in files.items() if data[:1] in (b"{", b"[")]
    name = rng.choice(sorted(held))
    new = change_json(rng, json.loads(files[name]))
    return files | {name: json.dumps(new).encode()}


# ------------------------------------------------------------------ readers


V, D = 40, 4
_TX = optax.adam(0.1)


def _files(folder: pathlib.Path) -> Files:
    """All files of a folder, by path; or one file, without a name."""
    if folder.is_file():
        return {"": folder.read_bytes()}
    paths = sorted(p for p in folder.rglob("*") if p.is_file())
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in paths}


def _vocabulary(folder):
    path, good = folder / "words.npz", []
    words = {
        "user": ["ann", "bob", "ann", "", "c\u00e9d"],
        "item": ["tea", "tea", "a b"],
    }
    edges = {"head": [7, 8], "tail": np.array([8, 2**63], np.uint64)}
    shared = [["head", "tail"]]
    for columns, groups in (
        (words, ()),
        ({"user": words["user"]}, ()),
        (edges, shared),
        (edges | {"rel": ["is", "has", "is"]}, shared),
    ):
        sj.data.Vocabulary.build(columns, shared=groups).save(path)
        good.append(_files(path))

    def read(path):
        found = sj.data.Vocabulary.load(path)
        for column, size in enumerate(found.sizes()):
            ids = found.encode(column, ["ann", b"tea", "", "new", "c\u00e9d"])
            assert ids.dtype == np.int32 and 0 <= ids.min() <= ids.max() < size
            found.decode(column, np.arange(1, size))
            assert found.counts(column).sum() >= 0
        kept = [
            (c.sorted_words, c.ids, c.counts, c.is_integer)
            for c in found.columns.values()
        ]
        return kept, found.names

    return good, read


def _store(folder):
    good, path = [], folder / "store"
    store = sj.store.KVStore()
    normal = jax.nn.initializers.normal(0.1)
    store.init("t", (V, D), _TX, initializer=normal)
    table = store.engine.tables["t"]
    for ids in ([], [3, 7, 21]):
        store.pull("t", np.array(ids, np.int32))
        store.save(path, {"w": np.arange(9.0), "step": len(ids)})
        good.append(_files(path))
    kept = np.array(table.weights)

    def read(path):
        nonlocal kept
        try:
            extra = store.load(path, {"w": np.zeros(9), "step": 0})
        except ALLOWED:
            assert np.array_equal(kept, table.weights), "a refused file was loaded"
            raise
        kept = np.array(table.weights)
        assert store.pull_all("t").shape == (V, D)
        return kept, store.stats()["t"].touched_rows, extra["w"], extra["step"]

    return good, read


def _changes(folder):
    """Files with and without state, of a trainer whose keys were evicted."""
    ones = jax.nn.initializers.ones

    def new_store():
        store = sj.store.KVStore()
        keys = sj.store.KeyPolicy()
        store.init("t", (V, D), _TX, initializer=ones, keys=keys)
        return store

    trainer, path, good = new_store(), folder / "changes", []
    keys = np.arange(V + 5)
    for step, some in enumerate([keys[:3], keys[2:V], keys[V:]]):
        rows, _ = trainer.insert("t", some, step)
        values = np.ones((rows.size, D), np.float32)
        trainer.push("t", sj.SelectedRows(rows[:4], values[:4], V))
        for state in (False, True):
            trainer.export_changes(path, since=0, state=state)
            good.append(_files(path))

    def read(path):
        store = new_store()
        try:
            changes = store.apply_changes(path)
        except ALLOWED:
            assert store.version == 0 and not len(store.items("t")[0])
            assert (store.pull_all("t") == 1).all(), "a refused file was applied"
            raise
        found = store.pull_all("t"), store.items("t"), store.engine.tables["t"].by_row
        version = store.version
        rows, _ = store.insert("t", np.array([1 << 40, 7]), 1 << 40)
        assert store.find("t", np.array([7]))[0] == rows[1]
        return *changes["t"], found, version

    return good, read


def _mapped(folder):
    path = folder / "table"
    with sj.store.KVStore() as store:
        store.init("t", (V, D), _TX, path=path)
        store.pull("t", np.array([3, 7]))
    good = [_files(path)]

    def read(path):
        with sj.store.KVStore() as store:
            store.init("t", (V, D), _TX, path=path)
            assert store.pull_all("t").shape == (V, D)

    return good, read


def _journal(folder):
    """A mapped table that was killed in training, and its journal."""
    path = folder / "table"
    store = sj.store.KVStore()
    store.init("t", (V, D), _TX, path=path)
    cache = sj.store.CachedTable(store, "t", 2)
    tx = sj.optim.lazy(_TX)
    table: Any = cache.table
    state = tx.init(table)
    step = store.train_step(lambda table, ids: table[ids].sum(), tx)
    for ids in ([3, 7], [5, 1], [2, 4], [6, 6]):
        table, state, _ = step(table, state, np.array(ids))
    good = [_files(folder)]
    assert len(good[0]) == 2
    store.close()

    def read(path):
        with sj.store.KVStore() as store:
            store.init("t", (V, D), _TX, path=path / "table")
            assert store.pull_all("t").shape == (V, D)

    return good, read


def _var_desc(folder):
    descs = [
        sj.desc.VarDesc("g", "SELECTED_ROWS", "float32", (100, 8)),
        sj.desc.VarDesc("x", "LOD_TENSOR", "int64", (-1,), 2, True),
    ]
    good = [{"": sj.desc.to_bytes(desc)} for desc in descs]

    def read(path):
        found = sj.desc.from_bytes(path.read_bytes())
        sj.desc.from_bytes(sj.desc.to_bytes(found))

    return good, read


def _checkpoint(folder):
    tree = {"w": jnp.ones(3), "n": 3, "key": jax.random.key(1), "b": np.ones(2)}
    mesh = jax.make_mesh((1,), ("x",), devices=jax.devices()[:1])
    tree["t"] = sj.parallel.shard_rows(np.ones((5, 2), np.float32), mesh, "x")
    sj.parallel.save(folder / "run", tree)
    like = tree | {"t": np.ones((5, 2), np.float32)}

    def read(path):
        found = sj.parallel.restore(path, tree)
        other = sj.parallel.restore(path, like)
        return found, other

    return [_files(folder / "run")], read


def _manager(folder):
    """A step of a CheckpointManager: a model, its state and a gradient."""
    import orbax.checkpoint as ocp

    rows = sj.SelectedRows(jnp.array([3, 7]), jnp.ones((2, D)), height=V)
    params = {"t": jnp.arange(V * D, dtype=jnp.float32).reshape(V, D)}
    tree = {"params": params, "state": sj.optim.lazy(_TX).init(params), "rows": rows}
    tree["half"] = jnp.arange(3, dtype=jnp.bfloat16)
    with ocp.CheckpointManager(folder / "run") as manager:
        sj.parallel.save(manager, tree, step=3, custom_metadata={"batch": 7})

    def read(path):
        with ocp.CheckpointManager(path) as manager:
            return sj.parallel.restore(manager, tree)

    return [_files(folder / "run")], read


def _trainer(folder):
    """Restores a Trainer as the page on checkpoints saves it, and takes a step."""
    block = sj.nn.SparseEmbedding(V, D, name="t")
    loss = lambda rows, _: jnp.sum((rows - 1) ** 2)
    params = {"w": jnp.arange(3.0)}
    trainer = sj.nn.Trainer(block, sj.store.KVStore(), loss, _TX, params=params)
    batch = jnp.array([3, 7])
    trainer.step(batch)
    dense = lambda: (trainer.params, trainer.opt_state, trainer.steps)
    (folder / "run").mkdir()
    trainer.store.save(folder / "run" / "tables")
    sj.parallel.save(folder / "run" / "dense", dense())
    copied = lambda x: np.asarray(x) if isinstance(x, jax.Array) else x
    like = jax.tree.map(copied, dense())

    def read(path):
        restored = sj.parallel.restore(path / "dense", like)
        trainer.store.load(path / "tables")
        trainer.params, trainer.opt_state, trainer.steps = restored
        loss = trainer.step(batch)
        return loss, dense(), trainer.store.pull_all("t")

    return [_files(folder / "run")], read


READERS = {
    "Vocabulary.load": Reader(_vocabulary, (change_archive,), checked=True),
    "KVStore.load": Reader(_store, (change_archive, change_member), checked=True),
    "KVStore.apply_changes": Reader(
        _changes, (change_archive, change_member), checked=True
    ),
    "KVStore.init": Reader(_mapped, (change_header,)),
    "KVStore.init, journal": Reader(_journal),
    "from_bytes": Reader(_var_desc, share=0.3),
    # These read folders of 20 files with orbax, which takes 20 times as long.
    "parallel.restore": Reader(_checkpoint, (change_record,), 0.2, checked=True),
    "CheckpointManager": Reader(_manager, (change_record,), 0.2, checked=True),
    "nn.Trainer": Reader(_trainer, (change_record,), 0.2, checked=True),
}


# ------------------------------------------------------------------ running


class Bench:
    """The readers with their good files, in a folder of its own."""

    def __init__(self, folder: pathlib.Path, names: Any = None):
        self.folder, self.names = folder, list(names or READERS)
        self.good, self.read, self.values = {}, {}, {}
        for k, name in enumerate(self.names):
            own = folder / f"good {k}"
            own.mkdir()
            self.good[name], self.read[name] = READERS[name].make(own)
            # A good file is read.
            self.values[name] = [self.run(name, files) for files in self.good[name]]

    def damaged(self, seed: int, case: int) -> tuple[str, Files, Any]:
        """The reader, the files of a case, and what must be read; None for anything."""
        rng = random.Random(f"{seed} {case}")
        shares = [READERS[name].share for name in self.names]
        (name,) = rng.choices(self.names, shares)
        good, changes = rng.randrange(len(self.good[name])), READERS[name].changes
        files = self.good[name][good]
        if changes and rng.random() < 0.5:
            return name, rng.choice(changes)(rng, files), None
        value = self.values[name][good] if READERS[name].checked else None
        return name, change_bytes(rng, files), value

    def run(self, name: str, files: Files) -> Any:
        """Writes the files, and reads them."""
        path = self.folder / "damaged"
        for file, data in files.items():
            where = path / file if file else path
            where.parent.mkdir(parents=True, exist_ok=True)
            where.write_bytes(data)
        try:
            return self.read[name](path)
        finally:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    def try_case(self, seed: int, case: int) -> tuple[str, str]:
        """The reader, and "read", "refused" or another outcome."""
        name, files, value = self.damaged(seed, case)
        previous = signal.signal(signal.SIGALRM, _raise_hangs)
        signal.alarm(MAX_SECONDS)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                # orbax and its threads print these, when a file of theirs is missing.
                warnings.simplefilter("ignore", ResourceWarning)
                found = self.run(name, files)
                if value is not None:
                    _check_same(found, value)
        except ALLOWED:
            return name, "refused"
        except (Exception, Hangs) as error:
            return name, "".join(traceback.format_exception(error))
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, previous)
        return name, "read"


def _check_same(found: Any, value: Any) -> None:
    """Raises an AssertionError unless both trees have the same values."""
    assert jax.tree.structure(found) == jax.tree.structure(value)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(value), strict=True):
        if jnp.issubdtype(getattr(x, "dtype", np.object_), jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        x, y = np.asarray(x), np.asarray(y)
        assert (x.dtype, x.shape, x.tobytes()) == (y.dtype, y.shape, y.tobytes()), (
            x,
            y,
        )


def _raise_hangs(*_: Any) -> None:
    raise Hangs(f"more than {MAX_SECONDS} seconds")


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--count", type=int, help="of files, however long they take")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, help="only this one")
    parser.add_argument("--gigabytes", type=float, default=8.0, help="of address space")
    given = parser.parse_args()
    tally = {name: {"read": 0, "refused": 0} for name in READERS}
    failures = 0
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        if given.case is None:  # orbax and its threads write pages about each file
            logging.disable(logging.CRITICAL)
            stack.callback(logging.disable, logging.NOTSET)
            quiet = stack.enter_context(open(os.devnull, "w"))
            stack.enter_context(contextlib.redirect_stderr(quiet))
        bench = Bench(pathlib.Path(folder))
        _limit_memory(given.gigabytes)
        first, count = given.case or 0, given.count if given.case is None else 1
        until = time.monotonic() + (given.seconds if count is None else math.inf)
        for case in range(first, first + (count or 10**9)):
            if time.monotonic() > until:
                break
            name, found = bench.try_case(given.seed, case)
            if found in tally[name]:
                tally[name][found] += 1
            else:
                failures += 1
                print(f"--seed {given.seed} --case {case}: {name}\n{found}")
    total = sum(sum(own.values()) for own in tally.values()) + failures
    for name, own in tally.items():
        print(f"{name:24} {own['refused']:7,} refused {own['read']:7,} read")
    print(f"{total:,} files of seed {given.seed}, {failures} raised something else")
    return 1 if failures else 0


def _limit_memory(gigabytes: float) -> None:
    """More than that is a MemoryError, which is not a ValueError."""
    import resource

    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    most = now + int(gigabytes * 2**30)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


if __name__ == "__main__":
    sys.exit(main())
