"""Makes tests/docs/which_table.md: what works with each kind of table.

    python tests/tables_table.py

Each cell is tried: a result is compared with plain JAX and optax on a dense array, and
a refusal is the error that the call raises. `tests/lookup/test_tables_table.py` makes
the page again and compares.
"""

import functools
import os
import pathlib
import re
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple


if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import export

import pairs
import sparsejax as sj


PAGE = pathlib.Path(__file__).parent / "docs" / "which_table.md"
V, D, STEPS = 40, 4, 4
RNG = np.random.default_rng(0)
WHOLE = RNG.normal(size=(V, D)).astype(np.float32)
IDS = np.array([[3, 7], [7, 39], [0, 3]], np.int32)
BATCHES = [RNG.choice(V, (3, 2)).astype(np.int32) for _ in range(STEPS)]
TARGET = RNG.normal(size=(3, 2, D)).astype(np.float32)
QUERIES = RNG.normal(size=(3, D)).astype(np.float32)


# ------------------------------------------------------------------ kinds of table


class Kind(NamedTuple):
    """A kind of table.

    Attributes:
      title: of the column.
      make: weights `[V, D]` -> the leaf of the parameters.
      view: the leaf -> the table that is read.
      dense: the leaf -> its weights `[V, D]`.
    """

    title: str
    make: Callable[[Any], Any]
    view: Callable[[Any], Any] = lambda leaf: leaf
    dense: Callable[[Any], Any] = jnp.asarray


def _mesh() -> Any:
    auto = jax.sharding.AxisType.Auto
    return jax.make_mesh((len(jax.devices()),), ("x",), axis_types=(auto,))


@jax.jit
def whole_array(table: Any) -> Any:
    """The array `[V, D]` or `[K, V, D]` of a gradient or of a sharded table."""
    return table if isinstance(table, jax.Array) else table.to_dense()


KINDS = {
    "array": Kind("array `[V, D]`", jnp.array),
    "stack": Kind(
        "stack `[K, V, D]`",
        lambda w: jnp.asarray(np.stack([np.zeros_like(w), w])),
        lambda leaf: leaf[1],
        lambda leaf: leaf[1],
    ),
    "rows": Kind(
        "`SelectedRows`",
        lambda w: sj.SelectedRows(np.arange(V, dtype=np.int32), jnp.array(w), V),
        dense=lambda leaf: leaf.to_dense(),
    ),
    "quantized": Kind(
        "`QuantizedTable`", sj.quantize, dense=lambda leaf: leaf.dequantize()
    ),
    "sharded": Kind(
        "`ShardedTable`",
        lambda w: sj.parallel.shard_rows(w, _mesh(), "x"),
        dense=whole_array,
    ),
    "store": Kind("`KVStore`", lambda w: _pulled(w), dense=lambda leaf: WHOLE),
    "cached": Kind("`CachedTable`", lambda w: _pulled(w), dense=lambda leaf: WHOLE),
}


def _pulled(weights: Any) -> Any:
    """The rows of `IDS` as a step gets them from a store."""
    with _store(weights) as store:
        return store.pull("t", IDS)


def _store(weights: Any, tx: Any = None) -> Any:
    store = sj.store.KVStore()
    store.init("t", weights, tx)
    return store


# ------------------------------------------------------------------ reads


def _bag(table, ids):
    return sj.embedding_bag(table, ids, combiner="mean")


def _dot(table, ids):
    ends = np.arange(0, ids.size + 1, ids.shape[1])
    value = np.linspace(0.5, 1.0, ids.size, dtype=np.float32)
    return sj.dot(sj.SegmentTensor.from_csr(ends, ids.ravel(), value), table)


def _loss(table, ids):
    return sj.losses.sampled_softmax_loss(table, QUERIES, ids[:, 0], ids.ravel())


def _top_k(table, ids):
    del ids
    search = sj.top_k
    if isinstance(table, sj.parallel.ShardedTable):
        search = sj.parallel.top_k
    return search(table, QUERIES, 5)[0]


READS = {
    "`sj.lookup`": sj.lookup,
    "`table[ids]`": lambda table, ids: table[ids],
    "`sj.embedding_bag`": _bag,
    "`sj.dot`": _dot,
    "`sj.losses.sampled_softmax_loss`": _loss,
    "`sj.top_k`": _top_k,
}


def try_read(name: str, read: Any) -> None:
    """Raises what the read raises, or an AssertionError if the values are wrong."""
    kind = KINDS[name]
    if read is _top_k and name in WHOLE_TABLES:
        _compare_read(KINDS["array"], WHOLE_TABLES[name](), read)
    elif name == "cached":
        _compare_cached(read)
    else:
        _compare_read(kind, kind.make(WHOLE), read)


# A search of all rows takes this in place of the table.
WHOLE_TABLES = {
    "quantized": lambda: sj.quantize(WHOLE).dequantize(),
    "store": lambda: jnp.asarray(_store(WHOLE).pull_all("t")),
    "cached": lambda: jnp.asarray(_store(WHOLE).pull_all("t")),
}


def _values_and_gradient(read: Any, grad: Any, view: Any, table: Any, ids: Any) -> Any:
    """The rows of the gradient that the ids name."""
    fun = lambda table: read(view(table), ids)
    if read is _top_k or isinstance(table, sj.QuantizedTable):
        return fun(table), None
    loss = lambda table: (jnp.sum(jnp.sin(out := fun(table))), out)
    grads, out = grad(loss, has_aux=True)(table)
    return out, view(whole_array(grads))[ids]


@functools.cache
def _program(read: Any, grad: Any, view: Any) -> Any:
    """The read of a table and its gradient, compiled once for tables of one type."""
    return jax.jit(functools.partial(_values_and_gradient, read, grad, view))


def _plain(read: Any, whole: Any) -> Any:
    """The values and the gradient of plain JAX."""
    return _program(read, jax.grad, KINDS["array"].view)(jnp.asarray(whole), IDS)


def _compare_read(kind: Kind, leaf: Any, read: Any) -> None:
    got, rows = _program(read, sj.grad, kind.view)(leaf, IDS)
    want, dense = _plain(read, kind.dense(leaf))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    if rows is not None:
        np.testing.assert_allclose(rows, dense, rtol=1e-5, atol=1e-5)


def _compare_cached(read: Any) -> None:
    """In a step of the store: its values, and the gradient as the step that it took."""
    want, dense = _plain(read, WHOLE)

    def loss(params, ids):
        out = read(params["t"], ids)
        return jnp.sum(jnp.sin(out)), out

    with _store(WHOLE, optax.sgd(1.0)) as store:
        (_, got) = _cached_steps(store, sj.optim.lazy(optax.sgd(1.0)), loss, [IDS])
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
        step = WHOLE[IDS] - store.pull_all("t")[IDS]
        np.testing.assert_allclose(step, dense, rtol=1e-5, atol=1e-5)


def _cached_steps(store: Any, tx: Any, loss: Any, batches: Any) -> Any:
    """Trains the table `t` in a cache; returns the value of the last step."""
    cache = sj.store.CachedTable(store, "t", slots=24)
    params: Any = {"t": cache.table}
    step, state, value = store.train_step(loss, tx, True), tx.init(params), None
    for ids in batches:
        params, state, value = step(params, state, jnp.asarray(ids))
    cache.flush(params, state)
    return value


# ------------------------------------------------------------------ training


def _train(name: str, tx: Any, dtype: Any = jnp.float32) -> Any:
    """Returns the weights `[V, D]` after a step on each batch, and what is averaged."""
    kind = KINDS[name]
    is_exact = hasattr(tx, "catch_up")

    def loss_fn(params, ids):
        rows = sj.lookup(kind.view(params["t"]), ids).astype(jnp.float32)
        return jnp.sum((rows - TARGET) ** 2)

    def step(params, state, ids):
        if is_exact:
            grad = sj.optim.exact_value_and_grad(loss_fn, tx)
            (_, grads), params, state = grad(params, state, ids)
        else:
            # The loss reads pulled rows of a quantized table.
            pulled = {"t": params["t"].pull(ids)} if name == "quantized" else params
            grads = sj.grad(loss_fn)(pulled, ids)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    whole = jnp.asarray(WHOLE.astype(dtype))
    if name in ("store", "cached"):
        with _store(whole, tx) as store:
            if name == "cached":
                with_none = lambda params, ids: (loss_fn(params, ids), None)
                _cached_steps(store, tx, with_none, BATCHES)
            else:
                grad = jax.jit(sj.grad(loss_fn))
                for ids in BATCHES:
                    store.push("t", grad({"t": store.pull("t", ids)}, ids)["t"])
            return store.pull_all("t")
    params = {"t": kind.make(whole)}
    state, step = tx.init(params), jax.jit(step)
    for ids in BATCHES:
        params, state = step(params, state, ids)
    if is_exact:
        params, state = jax.jit(tx.flush)(params, state)
    if tx is TRAININGS["`ema(decay)`"].tx:
        params = jax.jit(sj.optim.ema_params)(params, state)
    return kind.dense(params["t"])


def _train_dense(tx: Any) -> Any:
    """The weights after each step of plain optax."""

    def step(carry, ids):
        params, state = carry
        grads = jax.grad(lambda t: jnp.sum((t[ids] - TARGET) ** 2))(params)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        return (params, state), params

    train = lambda start: jax.lax.scan(step, (start, tx.init(start)), np.stack(BATCHES))
    return jax.jit(train)(WHOLE)[1]


def _averaged() -> Any:
    shares = 0.5 ** np.arange(STEPS, 0, -1)
    return np.tensordot(shares / shares.sum(), _train_dense(optax.sgd(0.1)), 1)


class Training(NamedTuple):
    """An optimizer, and plain optax's result."""

    tx: Any
    dense: Callable[[], Any]
    dtype: Any = jnp.float32
    tolerance: float = 1e-4


TRAININGS = {
    "`lazy(tx)`": Training(
        sj.optim.lazy(optax.adagrad(0.1)),
        lambda: _train_dense(optax.adagrad(0.1))[-1],
    ),
    "`exact(tx)`": Training(
        sj.optim.exact(optax.adam(0.1)),
        lambda: _train_dense(optax.adam(0.1))[-1],
        tolerance=1e-3,
    ),
    "`accumulate(tx, k)`": Training(
        sj.optim.accumulate(sj.optim.lazy(optax.adagrad(0.1)), 2, capacity=12),
        lambda: _train_dense(optax.MultiSteps(optax.adagrad(0.1), 2))[-1],
    ),
    "`ema(decay)`": Training(
        sj.optim.lazy(optax.chain(optax.sgd(0.1), sj.optim.ema(0.5))),
        _averaged,
    ),
    "`rounding(tx, master=True)`": Training(
        sj.optim.rounding(sj.optim.lazy(optax.sgd(0.1)), master=True),
        lambda: _train_dense(optax.sgd(0.1))[-1],
        jnp.bfloat16,
        tolerance=0.05,
    ),
}


@functools.cache
def _dense_result(row: str) -> np.ndarray:
    return np.asarray(TRAININGS[row].dense(), np.float32)


def try_training(name: str, row: str) -> None:
    training = TRAININGS[row]
    dtype = jnp.float32 if name == "quantized" else training.dtype
    tx = training.tx
    if name == "stack" and row == "`accumulate(tx, k)`":
        lazy = sj.optim.lazy(optax.adagrad(0.1))
        tx = sj.optim.accumulate(lazy, 2, capacity=12, stacked=True)
    got = np.asarray(_train(name, tx, dtype), np.float32)
    np.testing.assert_allclose(got, _dense_result(row), atol=training.tolerance)


# ------------------------------------------------------------------ files


def try_checkpoint(name: str) -> None:
    """Saves the table, and restores it into one of zeros."""
    kind, zeros, sgd = KINDS[name], np.zeros_like(WHOLE), optax.sgd(0.1)
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "checkpoint"
        if name in ("store", "cached"):
            with _store(WHOLE, sgd) as store, _store(zeros, sgd) as other:
                if name == "store":
                    store.push("t", sj.SelectedRows([3], np.ones((1, D)), V))
                else:
                    loss = lambda p, ids: (jnp.sum(p["t"][ids]), None)
                    _cached_steps(store, sj.optim.lazy(sgd), loss, [IDS])
                store.save(path)
                other.load(path)
                found, saved = other.pull_all("t"), store.pull_all("t")
                assert np.any(saved != WHOLE)
        else:
            leaf = kind.make(WHOLE)
            sj.parallel.save(path, {"t": leaf})
            like = {"t": kind.make(zeros)}
            found, saved = map(kind.dense, (sj.parallel.restore(path, like)["t"], leaf))
        np.testing.assert_array_equal(found, saved)


def try_export(name: str) -> None:
    """Exports a function of the table, and calls what is read back."""
    kind = KINDS[name]
    leaf, read = kind.make(WHOLE), jax.jit(lambda t, ids: sj.lookup(kind.view(t), ids))
    data = export.export(read)(leaf, IDS).serialize()
    got = export.deserialize(data).call(leaf, IDS)
    np.testing.assert_array_equal(got, read(leaf, IDS))


# ------------------------------------------------------------------ the page

# How a cell works that is not simply the call of its row.
HOW = {
    ("`sj.top_k`", "stack"): "Search `table[k]`.",
    ("`sj.top_k`", "quantized"): "Search `table.dequantize()`.",
    ("`sj.top_k`", "sharded"): "Call `sj.parallel.top_k`.",
    ("`sj.top_k`", "store"): "Search `store.pull_all(name)`.",
    ("`sj.top_k`", "cached"): "Search `store.pull_all(name)`.",
    ("`accumulate(tx, k)`", "stack"): "Pass `stacked=True`.",
    ("checkpoint", "store"): "Call `store.save`.",
    ("checkpoint", "cached"): "Call `cache.flush`, then `store.save`.",
    ("checkpoint", "sharded"): "Call `sj.parallel.save`.",
    ("`rounding(tx, master=True)`", "quantized"): "The loss reads `table.pull(ids)`.",
}


def tried(row: str, call: Any, name: str) -> str:
    """Returns "yes", or the error of a cell."""
    try:
        if row in READS:
            try_read(name, call)
        elif row in TRAININGS:
            try_training(name, row)
        else:
            call(name)
    except (TypeError, ValueError) as e:
        return str(e)
    return "yes"


ROWS: dict[str, Any] = {
    **READS,
    **TRAININGS,
    "checkpoint": try_checkpoint,
    "`jax.export`": try_export,
}


def page(cells: dict[tuple[str, str], str]) -> str:
    """The page with new tables; `cells` are the results of `tried` by row and kind."""
    lines = ["| | " + " | ".join(k.title for k in KINDS.values()) + " |"]
    lines.append("|---|" + "---|" * len(KINDS))
    notes: list[str] = []
    for row in ROWS:
        shown = []
        for name in KINDS:
            found = re.sub(r"\s+", " ", cells[row, name])
            works = found == "yes"
            note = HOW.get((row, name), "") if works else found
            if note and note not in notes:
                notes.append(note)
            number = f" [{notes.index(note) + 1}]" if note else ""
            shown.append(("yes" if works else "no") + number)
        lines.append(f"| {row} | " + " | ".join(shown) + " |")
    lines += ["", *(f"{k}. {note}" for k, note in enumerate(notes, 1)), "", ""]
    # The first table ends where the text goes on, and the last one ends the page.
    tables = re.compile(r"^\| \| .*?(?=^`tx`|\Z)", re.MULTILINE | re.DOTALL)
    head, middle, _ = tables.split(PAGE.read_text())
    return head + "\n".join(lines) + middle + pairs.table()


if __name__ == "__main__":
    found = {(r, k): tried(r, call, k) for r, call in ROWS.items() for k in KINDS}
    PAGE.write_text(page(found))
    print(PAGE.read_text())
