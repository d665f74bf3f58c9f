"""Damaged files for every reader: `python -m tests.tools.fuzz damage`.

Nothing but ValueError or OSError may come out.

A case is one reader, one good file, and a change: bytes are changed, cut, moved or put
in. Checksums would refuse nearly all of these, so half of the cases change what the
file says and make its checksums right again: the JSON of a header, the arrays of a
store, the headers within an `.npz` archive.

A reader that accepts a file has to give something that can be used: ids that are read,
words that are looked up, a batch that is trained on. If its format has checksums, and
bytes were changed without making them right again, it has to give the values of the
good file.
"""

import collections
import contextlib
import functools
import io
import json
import logging
import os
import pathlib
import random
import re
import resource
import signal
import tempfile
import traceback
import warnings
import zipfile
import zlib
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import sparsejax as sj


ALLOWED = (ValueError, OSError)
MAX_SECONDS = 20  # for one file
MAX_BYTES = 8 << 30  # of address space: more is a MemoryError, which is no ValueError

Files = dict[str, bytes]  # by path in a folder; a file alone is "."
Change = Callable[[random.Random, Files], Files]


class Hangs(BaseException):
    """A file took too long to be refused."""


# ------------------------------------------------------------------ changes of bytes


_NUMBERS = [0, 1, 2, 7, 255, 256, 65535, 1 << 20, 1 << 31, 1 << 32, 1 << 40, 1 << 62]
_NUMBERS += [(1 << k) - 1 for k in (31, 32, 53, 63, 64)]
_ORDERS: list[Literal["little", "big"]] = ["little", "big"]
# Words that mean something to a parser.
_WORDS = '"|""|,|\t|\r\n|\n\n|#|:|qid:|-1|nan|1e999|0x1|1_0|{|}|[|]|(|null|PK|None'


def _changed_once(rng: random.Random, data: bytes) -> bytes:
    """Other bytes at one place, often near an end, where files have their structure."""
    near = rng.randrange(min(len(data), 200) or 1)
    at = rng.choice([near, max(len(data) - 1 - near, 0), rng.randrange(len(data) or 1)])
    kind, size = rng.randrange(8), rng.choice([1, 2, 4, 8, 64, 300, 1000])
    old, number = data[at : at + size], rng.choice(_NUMBERS)
    if kind == 0:
        return data[:at]
    if kind == 1:
        old, new = data[at : at + 1], bytes(b ^ 1 << rng.randrange(8) for b in old[:1])
    elif kind == 2:
        size = rng.choice([1, 2, 4, 8])
        new = (number % (1 << 8 * size)).to_bytes(size, rng.choice(_ORDERS))
        old = new
    elif kind == 3:
        new = b""
    elif kind == 4:
        new = old * rng.choice([2, 4])
    elif kind == 5:
        new = rng.randbytes(size)
    elif kind == 6:
        new = rng.choice(_WORDS.split("|")).encode() * rng.choice([1, 1, 2, 50])
    else:  # another number in the place of one that is written out
        written = list(re.finditer(rb"\d+", data))[:200] or [re.match(b"", data)]
        one: Any = rng.choice(written)
        at, old = one.start(), one.group()
        new = str(rng.choice([-1, number, 1 << 70, rng.randrange(100)])).encode()
    inserts = kind in (2, 5, 6) and rng.random() < 0.5
    return data[:at] + new + data[at + (0 if inserts else len(old)) :]


def _changed(rng: random.Random, data: bytes) -> bytes:
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        data = _changed_once(rng, data)
    return data


def change_bytes(rng: random.Random, files: Files) -> Files:
    """Changes the bytes of one file; of several, one may be gone or be another."""
    name, new, kind = rng.choice(sorted(files)), dict(files), rng.random()
    if len(files) > 1 and kind < 0.1:
        del new[name]
    elif len(files) > 1 and kind < 0.2:
        new[name] = files[rng.choice(sorted(files))]
    else:
        new[name] = _changed(rng, files[name])
    return new


# ------------------------------------------------------------------ changes with sense


_VALUES: list[Any] = [None, True, False, -1, 0.5, 1e400, "", "float32", "x" * 300, []]
_VALUES += [{}, [1], [[1]], ["a"], {"a": 1}, [None], "object", "threefry2x32", "mod"]
_NOT_JSON = [b"[" * 100_000, b"1" * 5000, b"\xff", b"NaN", b'"x"']


def _changed_value(rng: random.Random, value: Any) -> Any:
    """Parsed JSON, with one part of it changed, gone or added."""
    if isinstance(value, (dict, list)) and value and rng.random() < 0.8:
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        key, new, kind = rng.choice(keys), value.copy(), rng.random()
        if kind < 0.75:
            new[key] = _changed_value(rng, value[key])
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


def _changed_json(rng: random.Random, text: bytes) -> bytes:
    """Other JSON than this, or now and then none."""
    new = json.dumps(_changed_value(rng, json.loads(text))).encode()
    return rng.choice(_NOT_JSON) if rng.random() < 0.05 else new


def change_header(rng: random.Random, files: Files) -> Files:
    """Another header of a mapped table, with the right length and checksum."""
    ((name, data),) = files.items()
    end = 30 + int.from_bytes(data[18:26], "little")
    text = _changed_json(rng, data[30:end])
    new = data[:18] + len(text).to_bytes(8, "little")
    new += zlib.crc32(text).to_bytes(4, "little") + text
    # The rows stay at their place.
    return {name: new.ljust(end, b"\0") + data[max(end, len(new)) :]}


_DTYPES = "|O <f4 >f4 <f8 <f16 |b1 |S0 |S3 <U2 |V8 <M8[s] <i8 <i2 |u1 <c8 <x4".split()
_SHAPES = ["()", "(0,)", "(3,)", "(1, 3)", "(2, 2, 2)", "(-1,)", "(99999999999,)"]
_SHAPES += ["(0, 4611686018427387904)", "(True,)", "(3", "((3,),)", "(" * 300, "None"]
_FIELDS = [  # of the header of an array, what stands there, and what else may
    (r"(?<='descr': ')[^']*", _DTYPES),
    (r"(?<='fortran_order': )\w+", ["True", "1", "x"]),
    (r"(?<='shape': )\(.*?\)", _SHAPES),
]
_ARRAYS: list[Any] = [np.arange(3), np.ones(2), np.float32(3), np.array([b"b", b"a"])]
_ARRAYS += ["x", ["a"], np.zeros((0, 3)), np.array([2**62, -5]), np.bool_(1)]


def _npy(x: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, x)
    return file.getvalue()


def _changed_npy(rng: random.Random, content: bytes) -> bytes:
    """Another header of an array, another number in it, or another order."""
    kind = rng.randrange(4)
    if kind < 2:
        old, others = rng.choice(_FIELDS)
        end = 10 + int.from_bytes(content[8:10], "little")
        text = re.sub(old.encode(), rng.choice(others).encode(), content[10:end])
        return content[:8] + len(text).to_bytes(2, "little") + text + content[end:]
    numbers = np.load(io.BytesIO(content)).copy()
    if kind == 3:
        return _npy(np.flip(numbers))
    if numbers.size:
        new = rng.choice([*numbers.ravel().tolist(), 0, 1, 2, 7, 100])
        numbers.flat[rng.randrange(numbers.size)] = new
    return _npy(numbers)


def change_archive(rng: random.Random, files: Files) -> Files:
    """Another `.npz` archive: members changed, gone, added, packed in other ways."""
    ((name, data),) = files.items()
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = {m: archive.read(m) for m in archive.namelist()}
    one = rng.choice(sorted(members))
    content, kind = members[one], rng.randrange(12)
    packed = [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA]
    method = rng.choice([zipfile.ZIP_STORED] * 15 + packed)
    if kind == 0:
        del members[one]
    elif kind == 1:
        members[one] = members[rng.choice(sorted(members))]
    elif kind == 2:
        new = rng.choice(["x", "names", "ids 1", "words 7", "rows", "0.rows"])
        members[f"{new}.npy"] = content
    elif kind == 3:
        members[one] = _changed(rng, content)
    elif kind == 4:
        members[one] = _npy(rng.choice(_ARRAYS))
    elif kind == 5 and rng.random() < 0.05:
        members[one], method = content + bytes(100 << 20), zipfile.ZIP_DEFLATED
    elif one.endswith(".json"):
        members[one] = _changed_json(rng, content)
    else:
        members[one] = _changed_npy(rng, content)
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        for member in members.items():
            archive.writestr(*member)
    new = file.getvalue()
    return {name: _changed(rng, new) if rng.random() < 0.1 else new}


def change_record(rng: random.Random, files: Files) -> Files:
    """Another JSON in one of the files of a checkpoint that have one."""
    name = rng.choice([n for n in sorted(files) if files[n][:1] in (b"{", b"[")])
    return files | {name: _changed_json(rng, files[name])}


# ------------------------------------------------------------------ readers


class Reader(NamedTuple):
    """A reader and its files.

    Args:
      make: writes good files into a folder; returns the files, and a function that
        reads and uses one.
      change: keeps checksums right; every reader also gets changes of bytes.
      share: the weight in the draw of readers.
      checked: the format has checksums of all that is read. Then `read` returns it: a
        tree of arrays and other values.
    """

    make: Callable[[pathlib.Path], tuple[list[Files], Callable[[pathlib.Path], Any]]]
    change: Change = change_bytes
    share: float = 1.0
    checked: bool = False


V, D = 40, 4
_TX = optax.adam(0.1)


def _files(path: pathlib.Path) -> Files:
    """The file, or all files of the folder."""
    paths = sorted(p for p in path.rglob("*") if p.is_file()) or [path]
    return {p.relative_to(path).as_posix(): p.read_bytes() for p in paths}


def _vocabulary(folder):
    path, good = folder / "words.npz", []
    users, items = ["ann", "bob", "ann", "", "c\u00e9d"], ["tea", "tea", "a b"]
    edges = {"head": [7, 8], "tail": np.array([8, 2**63], np.uint64)}
    shared = [["head", "tail"]]
    for columns, groups in (
        ({"user": users, "item": items}, ()),
        ({"user": users}, ()),
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
        return found.names, [
            (c.sorted_words, c.ids, c.counts, c.is_integer)
            for c in found.columns.values()
        ]

    return good, read


def _store(folder):
    good, path = [], folder / "store"
    store = sj.store.KVStore()
    store.init("t", (V, D), _TX, initializer=jax.nn.initializers.normal(0.1))
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
        return kept, store.stats()["t"].touched_rows, extra

    return good, read


def _changes(folder):
    """Files with and without state, of a trainer whose keys were evicted."""
    ones = jax.nn.initializers.ones

    def new_store():
        store, keys = sj.store.KVStore(), sj.store.KeyPolicy()
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


def _read_mapped(path):
    with sj.store.KVStore() as store:
        store.init("t", (V, D), _TX, path=path)
        store.pull("t", np.array([3, 7]))
        assert store.pull_all("t").shape == (V, D)


def _mapped(folder):
    _read_mapped(folder / "table")
    return [_files(folder / "table")], _read_mapped


def _journal(folder):
    """A mapped table that was killed in training, and its journal."""
    store = sj.store.KVStore()
    store.init("t", (V, D), _TX, path=folder / "table")
    cache = sj.store.CachedTable(store, "t", 2)
    tx = sj.optim.lazy(_TX)
    table: Any = cache.table
    state = tx.init(table)
    step = store.train_step(lambda table, ids: table[ids].sum(), tx)
    for ids in ([3, 7], [5, 1], [2, 4], [6, 6]):
        table, state, _ = step(table, state, np.array(ids))
    good = _files(folder)
    assert len(good) == 2
    store.close()
    return [good], lambda path: _read_mapped(path / "table")


def _var_desc(folder):
    descs = [
        sj.desc.VarDesc("g", "SELECTED_ROWS", "float32", (100, 8)),
        sj.desc.VarDesc("x", "LOD_TENSOR", "int64", (-1,), 2, True),
    ]

    def read(path):
        found = sj.desc.from_bytes(path.read_bytes())
        sj.desc.from_bytes(sj.desc.to_bytes(found))

    return [{".": sj.desc.to_bytes(desc)} for desc in descs], read


def _checkpoint(folder):
    tree = {"w": jnp.ones(3), "n": 3, "key": jax.random.key(1), "b": np.ones(2)}
    mesh = jax.make_mesh((1,), ("x",), devices=jax.devices()[:1])
    tree["t"] = sj.parallel.shard_rows(np.ones((5, 2), np.float32), mesh, "x")
    sj.parallel.save(folder / "run", tree)
    likes = tree, tree | {"t": np.ones((5, 2), np.float32)}
    read = lambda path: [sj.parallel.restore(path, like) for like in likes]
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


READERS = {
    "Vocabulary.load": Reader(_vocabulary, change_archive, checked=True),
    "KVStore.load": Reader(_store, change_archive, checked=True),
    "KVStore.apply_changes": Reader(_changes, change_archive, checked=True),
    "KVStore.init": Reader(_mapped, change_header),
    "KVStore.init, journal": Reader(_journal),
    "from_bytes": Reader(_var_desc, share=0.3),
    # These read folders of 20 files with orbax, which takes 20 times as long.
    "parallel.restore": Reader(_checkpoint, change_record, 0.2, checked=True),
    "CheckpointManager": Reader(_manager, change_record, 0.2, checked=True),
}


# ------------------------------------------------------------------ running


def compare(seed: int, names: Any = tuple(READERS), count: int = 100) -> Any:
    """Damages `count` files; how many were read and refused.

    Raises:
      AssertionError: a file raised something else, or was read wrongly.
    """
    good, outcomes = _good_files(tuple(names)), collections.Counter()
    shares = [READERS[name].share for name in good]
    with open(os.devnull, "w") as quiet, _bounded(), contextlib.redirect_stderr(quiet):
        logging.disable(logging.CRITICAL)  # orbax writes pages about each file
        try:
            for case in range(count):
                rng = random.Random(f"{seed} {case}")
                (name,) = rng.choices(list(good), shares)
                read, files = good[name]
                outcomes[_outcome(rng, READERS[name], read, *rng.choice(files))] += 1
        except (Exception, Hangs) as error:
            text = "".join(traceback.format_exception(error))
            raise AssertionError(f"case {case}, {name}:\n{text}") from None
        finally:
            logging.disable(logging.NOTSET)
    return outcomes


@functools.cache
def _good_files(names):
    """The function that reads, and good files with what is read, by reader."""
    good = {}
    with tempfile.TemporaryDirectory() as folder:
        for k, name in enumerate(names):
            own = pathlib.Path(folder, f"good {k}")
            own.mkdir()
            files, read = READERS[name].make(own)
            good[name] = read, [(each, _read(read, each)) for each in files]
    return good


def _read(read: Any, files: Files) -> Any:
    """Writes the files, and reads them."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "damaged")
        for file, data in files.items():
            (path / file).parent.mkdir(parents=True, exist_ok=True)
            (path / file).write_bytes(data)
        return read(path)


def _outcome(rng, reader, read, files, value):
    """Returns "read" or "refused" of changed files; raises if that is wrong."""
    change = rng.choice([change_bytes, reader.change])
    files = change(rng, files)
    previous = signal.signal(signal.SIGALRM, _raise_hangs)
    signal.alarm(MAX_SECONDS)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            # orbax and its threads print these, when a file of theirs is missing.
            warnings.simplefilter("ignore", ResourceWarning)
            found = _read(read, files)
            if change is change_bytes and reader.checked:
                _check_same(found, value)
    except ALLOWED:
        return "refused"
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)
    return "read"


@contextlib.contextmanager
def _bounded():
    """Allows `MAX_BYTES` more of address space than now, on Linux."""
    if not pathlib.Path("/proc/self/statm").exists():
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_AS)
    now = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
    most = now * resource.getpagesize() + MAX_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def _check_same(found: Any, value: Any) -> None:
    """Raises an AssertionError unless both trees have the same values."""
    assert jax.tree.structure(found) == jax.tree.structure(value)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(value), strict=True):
        if jnp.issubdtype(getattr(x, "dtype", np.object_), jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        x, y = np.asarray(x), np.asarray(y)
        assert (x.dtype, x.shape, x.tobytes()) == (y.dtype, y.shape, y.tobytes())


def _raise_hangs(*_: Any) -> None:
    raise Hangs(f"more than {MAX_SECONDS} seconds")
