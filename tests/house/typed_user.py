"""A user's program, which `make types` checks in pyright's strict mode; it is not run.

Two checks of strict mode are off: optax has no types of its own, and pyright does not
know all of `jax.jit`, `jnp.ones` and such; `tests/tools/known_types.py` says that it
knows every name of sparsejax. `jax.jit` forgets the types of a function, hence `jit`
below.
"""
# pyright: strict, reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnnecessaryTypeIgnoreComment=true, reportUnusedFunction=false

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ParamSpec, TypeVar, assert_type

import jax
import jax.numpy as jnp
import numpy as np
import optax

import sparsejax as sj


P = ParamSpec("P")
R = TypeVar("R")
Params = dict[str, jax.Array]
Batch = dict[str, jax.Array]


def jit(fun: Callable[P, R], donate: tuple[int, ...] = ()) -> Callable[P, R]:
    """`jax.jit` that keeps the types of `fun`."""
    return jax.jit(fun, donate_argnums=donate)


def apply(params: Params, updates: Any) -> Params:
    """`optax.apply_updates`, which has the type of any parameters."""
    new: Any = optax.apply_updates(params, updates)
    return new


# ------------------------------------------------------------------ training steps


def loss_fn(params: Params, batch: Batch) -> jax.Array:
    users = sj.lookup(params["users"], batch["user"])
    items = sj.lookup(params["items"], batch["item"], mode="clip", padding_id=0)
    scores = jnp.sum(users * items, axis=-1) + params["bias"]
    return jnp.mean((scores - batch["rating"]) ** 2)


def training(params: Params, batch: Batch) -> jax.Array:
    tx = sj.optim.lazy(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)))
    assert_type(tx, optax.GradientTransformationExtraArgs)

    def step(params: Params, state: optax.OptState, batch: Batch) -> Params:
        grads: Any = sj.grad(loss_fn)(params, batch)
        updates, state = tx.update(grads, state, params)
        return apply(params, updates)

    params = jit(step, donate=(0, 1))(params, tx.init(params), batch)

    exact = sj.optim.exact(optax.sgd(0.1, momentum=0.9))
    exact_grad = sj.optim.exact_value_and_grad(loss_fn, exact)
    (value, grads), params, state = exact_grad(params, exact.init(params), batch)
    assert_type(params, Params)
    updates, state = exact.update(grads, state, params)
    params, state = exact.flush(apply(params, updates), state)
    assert_type(state.stale, jax.Array)
    return value


# ------------------------------------------------------------------ transformations


@dataclasses.dataclass(frozen=True)
class Model:
    scale: float

    def loss(self, params: Params, batch: Batch) -> jax.Array:
        return self.scale * loss_fn(params, batch)

    def __call__(self, params: Params, batch: Batch, *, power: int = 1) -> jax.Array:
        return self.loss(params, batch) ** power


def loss_and_rows(params: Params, batch: Batch) -> tuple[jax.Array, Mapping[str, int]]:
    return loss_fn(params, batch), {"rows": batch["user"].shape[0]}


def transformations(params: Params, batch: Batch, has_aux: bool) -> None:
    # The function that comes back has the parameters of the one that went in.
    value, grads = sj.value_and_grad(loss_fn)(params, batch=batch)
    assert_type(value, jax.Array)
    rows: sj.SelectedRows = grads["users"]
    assert_type(rows.to_dense(), jax.Array)

    (value, aux), _ = sj.value_and_grad(loss_and_rows, has_aux=True)(params, batch)
    assert_type(value, jax.Array)
    assert_type(aux, Mapping[str, int])
    _, aux = sj.grad(loss_and_rows, has_aux=True)(params, batch)
    assert_type(aux, Mapping[str, int])
    # If has_aux is not a literal, the type of the result depends on it.
    either = sj.value_and_grad(loss_and_rows, has_aux=has_aux)(params, batch)
    assert_type(either, tuple[Any, Any])

    # Methods, objects, partial and jitted functions, several arguments, tables=.
    model = Model(0.5)
    assert_type(sj.value_and_grad(model.loss)(params, batch)[0], jax.Array)
    assert_type(sj.value_and_grad(model)(params, batch, power=2)[0], jax.Array)
    fixed = functools.partial(model, power=2)
    assert_type(sj.value_and_grad(fixed)(params, batch)[0], jax.Array)
    assert_type(sj.value_and_grad(jax.jit(loss_fn))(params, batch)[0], jax.Array)
    tables = {"users": True, "items": None, "bias": False}
    both = sj.grad(loss_fn, argnums=(0,), tables=(tables,))
    assert_type(both(params, batch), Any)
    assert_type(jit(sj.grad(loss_fn))(params, batch), Any)

    # `explain` also takes shapes for arrays, so its arguments are any. The type of its
    # result depends on whether the function is a jitted step.
    print(sj.explain(loss_fn)(params, batch)["params['users']"].sparse)


def mistakes(params: Params, batch: Batch) -> None:
    """Each comment expects an error, and is an error itself without one."""
    sj.value_and_grad(loss_fn)(params)  # pyright: ignore[reportCallIssue]
    sj.value_and_grad(loss_fn)(params, 3)  # pyright: ignore[reportArgumentType]
    sj.value_and_grad(loss_fn, table=True)  # pyright: ignore[reportCallIssue]
    value, _ = sj.value_and_grad(loss_fn)(params, batch)
    value.rows  # pyright: ignore
    sj.SelectedRows([0], [1.0])  # pyright: ignore[reportCallIssue]
    sj.SelectedRows([0], [1.0], 3).dense()  # pyright: ignore
    sj.SegmentTensor.from_lists([[1]], size=3)  # pyright: ignore[reportCallIssue]
    sj.nn.Embedding(3, 4, "sum")  # pyright: ignore[reportCallIssue]
    sj.store.KVStore().pull("items")  # pyright: ignore


# ------------------------------------------------------------------ overloads, generics


def selected_rows() -> None:
    rows = sj.SelectedRows(jnp.array([2, 0, 2]), jnp.ones((3, 2)), height=4)
    assert_type(rows.shape, tuple[int, ...])
    assert_type(rows.coalesce(), sj.SelectedRows)
    merged = rows.coalesce(4, return_overflow=True)
    assert_type(merged, tuple[sj.SelectedRows, jax.Array])
    assert_type(2.0 * rows / 3 - rows + rows, sj.SelectedRows)
    assert_type(rows + jnp.ones((4, 2)), jax.Array)
    assert_type(jnp.ones((4, 2)) + rows, jax.Array)
    assert_type(rows.map(jnp.square).retain([2]), sj.SelectedRows)
    assert_type(sj.concatenate([rows, rows]), sj.SelectedRows)


def layers_and_data() -> None:
    layer = sj.nn.EmbeddingBag(1000, 4, combiner="sum", padding_id=-1)
    assert_type(layer.init(jax.random.key(0)), dict[str, jax.Array])

    def loss(params: Params, baskets: sj.SegmentTensor, label: jax.Array) -> jax.Array:
        scores: jax.Array = layer(params, baskets)
        return jnp.mean((scores[:, 0] - label) ** 2)

    dataset = sj.data.ArrayDataset([[7, 9], [8], [], [5]], np.arange(4.0))
    step = jit(sj.value_and_grad(loss, tables=sj.nn.tables(layer)))
    for baskets, label in sj.data.DataLoader(dataset, 2, shuffle=True, seed=1):
        value, grads = step(layer.init(jax.random.key(0)), baskets, label)
        assert_type(value, jax.Array)
        print(grads["embedding"])
    known = sj.data.Vocabulary.build({"user": [7, 8], "item": ["tea", "jam"]})
    assert_type(known.ids({"item": ["jam"]}), dict[str, Any])


def stores(batches: Iterator[jax.Array]) -> None:
    store = sj.store.KVStore()
    store.init("items", (20_000, 4), optax.adagrad(0.1))

    # A pulled part of a table stands where the table would.
    def loss(params: Mapping[str, Any], ids: jax.Array) -> jax.Array:
        return jnp.sum((sj.lookup(params["items"], ids) - 1.0) ** 2)

    for ids, items in store.prefetch(batches, lambda ids: ids, capacity=8):
        assert_type(ids, jax.Array)
        store.push("items", sj.grad(loss)({"items": items}, ids)["items"])
    assert_type(store.pull("items", [3], capacity=2), sj.SelectedRows)
    assert_type(store.stats()["items"], sj.store.TableStats)


def devices(ids: jax.Array) -> None:
    mesh = jax.make_mesh((1,), ("x",), devices=jax.devices()[:1])
    table = sj.parallel.shard_rows(jnp.ones((50, 2)), mesh, "x")

    def loss(table: sj.parallel.ShardedTable, ids: jax.Array) -> jax.Array:
        return jnp.sum(sj.lookup(table, ids))

    gradient: sj.parallel.ShardedTable = sj.grad(loss)(table, ids)
    assert_type(gradient.to_dense(), jax.Array)
