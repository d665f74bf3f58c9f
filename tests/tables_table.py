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
    "store": Kind("`KVStore`", lambda w: w),
    "cached": Kind("`CachedTable`", lambda w: w),
}


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
    if name in ("store", "cached") and read is _top_k:  # needs all rows
        _, store = _from_store(name, None)
        with store:
            _compare_read(kind, jnp.asarray(store.pull_all("t")), read, IDS, WHOLE)
        return
    if name == "cached":
        _compare_cached(read)
        return
    if name == "store":
        leaf, store = _from_store(name, None)
        with store:
            _compare_read(kind, leaf, read, IDS, WHOLE)
        return
    ids = IDS
    leaf = kind.make(WHOLE)
    if read is _top_k and name == "quantized":
        leaf = leaf.dequantize()
        kind = KINDS["array"]
    _compare_read(kind, leaf, read, ids, np.asarray(kind.dense(leaf)))


def _values_and_gradient(read: Any, grad: Any, view: Any, table: Any, ids: Any) -> Any:
    """The rows of the gradient that the ids name."""
    fun = lambda table: read(view(table), ids)
    if read is _top_k or isinstance(table, sj.QuantizedTable):
        return fun(table), None
    grads = grad(lambda table: jnp.sum(jnp.sin(fun(table))))(table)
    return fun(table), view(whole_array(grads))[ids]


@functools.cache
def _program(read: Any, grad: Any, view: Any) -> Any:
    """The read of a table and its gradient, compiled once for tables of one type."""
    return jax.jit(functools.partial(_values_and_gradient, read, grad, view))


def _compare_read(kind: Kind, leaf: Any, read: Any, ids: Any, whole: Any) -> None:
    got, rows = _program(read, sj.grad, kind.view)(leaf, ids)
    plain = _program(read, jax.grad, KINDS["array"].view)
    want, dense = plain(jnp.asarray(whole), IDS)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    if rows is not None:
        np.testing.assert_allclose(rows, dense, rtol=1e-5, atol=1e-5)


def _compare_cached(read: Any) -> None:
    """In a step of the store: its values, and the gradient as the step that it took."""
    plain = _program(read, jax.grad, KINDS["array"].view)
    want, dense = plain(jnp.asarray(WHOLE), IDS)

    def loss(params, ids):
        out = read(params["t"], ids)
        return jnp.sum(jnp.sin(out)), out

    with sj.store.KVStore() as store:
        store.init("t", WHOLE, optax.sgd(1.0))
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


def _from_store(name: str, tx: Any) -> tuple[Any, Any]:
    """Returns the rows of `IDS` as a step gets them, and the store."""
    store = sj.store.KVStore()
    store.init("t", WHOLE, tx)
    if name == "cached" and tx is not None:
        loss = lambda p, ids: (jnp.sum(p["t"][ids]), None)
        _cached_steps(store, sj.optim.lazy(tx), loss, [IDS])
    return store.pull("t", IDS), store


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
            grads = sj.grad(loss_fn)(params, ids)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    whole = jnp.asarray(WHOLE.astype(dtype))
    if name == "store":
        with sj.store.KVStore() as store:
            store.init("t", whole, tx)
            grad = jax.jit(sj.grad(loss_fn))
            for ids in BATCHES:
                pulled = {"t": store.pull("t", ids)}
                store.push("t", grad(pulled, ids)["t"])
            return store.pull_all("t")
    if name == "cached":
        with sj.store.KVStore() as store:
            store.init("t", whole, tx)
            with_none = lambda params, ids: (loss_fn(params, ids), None)
            _cached_steps(store, tx, with_none, BATCHES)
            return store.pull_all("t")
    params = {"t": kind.make(whole)}
    state = jax.jit(tx.init)(params)
    if name == "quantized":  # the loss reads pulled rows, the update takes the table

        def step(params, state, ids):
            grads = sj.grad(loss_fn)({"t": params["t"].pull(ids)}, ids)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

    step = jax.jit(step)
    for ids in BATCHES:
        params, state = step(params, state, ids)
    if is_exact:
        params, state = jax.jit(tx.flush)(params, state)
    if _states(state):
        params = jax.jit(sj.optim.ema_params)(params, state)
    return kind.dense(params["t"])


def _states(state: Any) -> list[Any]:
    is_state = lambda x: hasattr(x, "_fields") and "ema" in type(x).__name__.lower()
    return [x for x in jax.tree.leaves(state, is_leaf=is_state) if is_state(x)]


def _train_dense(tx: Any) -> Any:
    def step(carry, ids):
        params, state = carry
        grads = jax.grad(lambda t: jnp.sum((t[ids] - TARGET) ** 2))(params)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        return (params, state), params

    @jax.jit
    def train(params):
        return jax.lax.scan(step, (params, tx.init(params)), np.stack(BATCHES))

    (params, _), history = train(WHOLE)
    return params, history


class Training(NamedTuple):
    """An optimizer, and plain optax's result."""

    tx: Any
    dense: Callable[[], Any]
    dtype: Any = jnp.float32
    tolerance: float = 1e-4


def _averaged() -> Any:
    average = optax.ema(0.5)

    @jax.jit
    def last(history):
        def step(state, weights) -> Any:
            out, state = average.update(weights, state)
            return state, out

        return jax.lax.scan(step, average.init(WHOLE), history)[1][-1]

    return last(_train_dense(optax.sgd(0.1))[1])


TRAININGS = {
    "`lazy(tx)`": Training(
        sj.optim.lazy(optax.adagrad(0.1)),
        lambda: _train_dense(optax.adagrad(0.1))[0],
    ),
    "`exact(tx)`": Training(
        sj.optim.exact(optax.adam(0.1)),
        lambda: _train_dense(optax.adam(0.1))[0],
        tolerance=1e-3,
    ),
    "`accumulate(tx, k)`": Training(
        sj.optim.accumulate(sj.optim.lazy(optax.adagrad(0.1)), 2, capacity=12),
        lambda: _train_dense(optax.MultiSteps(optax.adagrad(0.1), 2))[0],
    ),
    "`ema(decay)`": Training(
        sj.optim.lazy(optax.chain(optax.sgd(0.1), sj.optim.ema(0.5))),
        _averaged,
    ),
    "`rounding(tx, master=True)`": Training(
        sj.optim.rounding(sj.optim.lazy(optax.sgd(0.1)), master=True),
        lambda: _train_dense(optax.sgd(0.1))[0],
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


def _trees_equal(found: Any, kind: Kind, leaf: Any) -> None:
    np.testing.assert_array_equal(kind.dense(found), kind.dense(leaf))


def try_checkpoint(name: str) -> None:
    """Saves the table, and restores it into one of zeros."""
    kind = KINDS[name]
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "checkpoint"
        if name in ("store", "cached"):
            _, store = _from_store(name, optax.sgd(0.1))
            with store, sj.store.KVStore() as other:
                if name == "store":
                    store.push("t", sj.SelectedRows([3], np.ones((1, D)), V))
                store.save(path)
                other.init("t", np.zeros_like(WHOLE), optax.sgd(0.1))
                other.load(path)
                found, saved = other.pull_all("t"), store.pull_all("t")
                np.testing.assert_array_equal(found, saved)
                assert np.any(saved != WHOLE)
            return
        tree = {"t": kind.make(WHOLE)}
        like = {"t": kind.make(np.zeros_like(WHOLE))}
        sj.parallel.save(path, tree)
        _trees_equal(sj.parallel.restore(path, like)["t"], kind, tree["t"])


def try_export(name: str) -> None:
    """Exports a function of the table, and calls what is read back."""
    kind = KINDS[name]
    ids = IDS
    if name in ("store", "cached"):
        leaf, store = _from_store(name, None)
        store.close()
    else:
        leaf = kind.make(WHOLE)
    read = jax.jit(lambda leaf, ids: sj.lookup(kind.view(leaf), ids))
    data = export.export(read)(leaf, ids).serialize()
    got = export.deserialize(data).call(leaf, ids)
    np.testing.assert_array_equal(got, read(leaf, ids))


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

HEAD = """\
# Which table where

Tables are kept in seven ways. The table below says what works with each of them.

- **array `[V, D]`**: any table that fits on the device.
- **stack `[K, V, D]`**: K tables of one shape in one parameter. A read is of
  `table[k]`.
- **`SelectedRows`**: some rows of a table. It is a gradient, or the rows of a pull,
  which a loss reads in place of the table.
- **`QuantizedTable`**: a table in 8, 4 or 2 bits.
- **`ShardedTable`**: rows over several devices.
- **`KVStore`**: rows in host memory or a file. A step reads the rows of `pull`.
- **`CachedTable`**: the same, with the hot rows on the device, where
  `store.train_step` trains them.

**yes** means that values, gradients or trained weights equal the result of plain JAX
and optax on a dense array; a number says how. **no** means that the call raises the
error of that number. A test tries each cell.
"""
PAIRS = """
## Which optimizer where

A wrapped optimizer trains the same weights in each of these places as in a plain loop,
with one compilation and no temporary of the table's size. **no** means that it is
refused. A test tries each cell.

"""
FOOT = """
`tx` is an optax transformation. `lazy` and `accumulate` were tried with Adagrad,
`exact` with Adam, `ema` and `rounding` with SGD. In a `KVStore` the optimizer is an
argument of `init`, and runs on the host.
"""


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
    """The text of the page; `cells` are the results of `tried` by row and kind."""
    lines = ["", "| | " + " | ".join(k.title for k in KINDS.values()) + " |"]
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
    said = ["", *(f"{k}. {note}" for k, note in enumerate(notes, 1))]
    return HEAD + "\n".join(lines + said) + "\n" + FOOT + PAIRS + pairs.table()


if __name__ == "__main__":
    found = {(r, k): tried(r, call, k) for r, call in ROWS.items() for k in KINDS}
    PAGE.write_text(page(found))
    print(PAGE.read_text())
