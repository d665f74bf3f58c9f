"""Trainer: a block and a store train as whole tables on the device would."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.sparse as sp
from jax.experimental import checkify

import sparsejax as sj
from helpers import assert_no_dense, assert_same_bits, assert_trees_close
from sparsejax.nn import SparseBlock, SparseEmbedding, SparseLinear, Trainer
from sparsejax.store._tree_tables import ListedTable


pytestmark = pytest.mark.usefixtures("loose_promotion")  # optax's own arithmetic is

V, D = 211, 4
# One object for all stores, so that its programs are compiled once.
SGD, ADAM = optax.sgd(0.1), optax.adam(0.1)


@dataclasses.dataclass(frozen=True)
class Model(SparseBlock):
    """An item by id, its words as CSR, and a small table on the device."""

    item: SparseEmbedding = SparseEmbedding(V, D, name="item")
    words: SparseLinear = SparseLinear(1, 53, name="words")
    hour: sj.nn.Embedding = sj.nn.Embedding(24, D)

    def row_ids(self, inputs):
        ids, words, _ = inputs
        return self.item.row_ids(ids) | self.words.row_ids(words)

    def sparse_forward(self, tables, params, inputs):
        ids, words, hour = inputs
        item = self.item(tables, params["item"], ids)
        out = jnp.sum(item * self.hour(params["hour"], hour), axis=-1)
        return out + self.words(tables, params["words"], words)[:, 0]


@dataclasses.dataclass(frozen=True)
class Ranker(SparseBlock):
    """Dense parameters behind an embedding, which one NaN would spoil."""

    item: SparseEmbedding = SparseEmbedding(5, 2, name="item")

    def init(self, key):
        return {"item": {}, "top": sj.nn.Dense(1, self.item.features).init(key)}

    def row_ids(self, inputs):
        return self.item.row_ids(inputs)

    def sparse_forward(self, tables, params, inputs):
        rows = self.item(tables, params["item"], inputs)
        return sj.nn.Dense(1)(params["top"], rows)[:, 0]


def loss_of(out, batch):
    return jnp.mean((out - batch["y"]) ** 2)


def batches(count, size=6, seed=0, most=V):
    rng = np.random.default_rng(seed)
    for _ in range(count):
        words = (rng.random((size, 53)) < 0.04).astype(np.float32)
        x = rng.integers(0, most, size), sp.csr_matrix(words), rng.integers(0, 24, size)
        yield {"x": x, "y": rng.normal(size=size).astype(np.float32)}


def in_one_shape(batch):
    """The batch with its matrix as a SegmentTensor of 64 slots."""
    ids, matrix, hour = batch["x"]
    elements = {"index": matrix.indices, "value": matrix.data}
    padded = jax.tree.map(lambda v: np.pad(v, (0, 64 - matrix.nnz)), elements)
    words = sj.SegmentTensor.from_lengths(padded, np.diff(matrix.indptr))
    return {**batch, "x": (ids, words, hour)}


def trainer(tx=None, **options):
    options = {"inputs": lambda batch: batch["x"], "key": 7} | options
    block = options.pop("block", Model())
    store = options.pop("store", None) or sj.store.KVStore()
    return Trainer(block, store, loss_of, tx or SGD, **options)


def squared(block, store=None, **options):
    """A trainer whose batches are the inputs."""
    loss = lambda out, batch: jnp.mean(out**2)
    return Trainer(block, store or sj.store.KVStore(), loss, SGD, **options)


def fit(made, data, prefetch=0, **options):
    """The losses of all steps, the rows pulled in each step or ahead of it."""
    pairs = ((batch, None) for batch in data)
    if prefetch:
        options = {"depth": prefetch, "mode": "drop"} | options
        pairs = made.store.prefetch(data, made.row_ids, **options)
    return np.array([made.step(batch, rows) for batch, rows in pairs])


def state_of(made):
    """Copies of the tables, the dense parameters and their state, and the steps."""
    tables = {name: made.store.pull_all(name) for name in made.store.names()}
    state = tables, made.params, made.opt_state, made.steps
    return jax.tree.map(np.array, state)


# ------------------------------------------------------------------ training


@pytest.mark.slow
@pytest.mark.parametrize("sparse_hours", [False, True])
def test_trains_as_whole_tables_do(sparse_hours):
    """The oracle: dense gradients of dense tables, clipped together, with AdaGrad."""
    tx, options = optax.adagrad(0.1), {}
    if sparse_hours:  # a table among the dense parameters, with a lazy tx
        hour = {"embedding": True}
        options = {"tables": {"item": None, "words": None, "hour": hour}}
    made_tx = sj.optim.lazy(tx) if sparse_hours else tx
    made = trainer(made_tx, clip_norm=0.3, table_tx=tx, **options)
    tables, params, *_ = state_of(made)
    both = jax.tree.map(jnp.asarray, {"tables": tables, "params": params})
    oracle = optax.chain(optax.clip_by_global_norm(0.3), tx)
    state = oracle.init(both)

    @jax.jit
    def step(both, state, batch):
        out_of = lambda b: made.block(b["tables"], b["params"], batch["x"])
        value, grads = jax.value_and_grad(lambda b: loss_of(out_of(b), batch))(both)
        updates, state = oracle.update(grads, state)
        return optax.apply_updates(both, updates), state, value

    for batch in batches(4):
        both, state, want = step(both, state, in_one_shape(batch))
        # A prediction has no effect on the step after it.
        found = loss_of(np.asarray(made.predict(batch)), batch), made.step(batch)
        np.testing.assert_allclose(found, [want] * 2, rtol=1e-5)
    tables, params, *_ = state_of(made)
    assert_trees_close({"tables": tables, "params": params}, both)
    assert made.steps == 4


@pytest.mark.slow
def test_prefetch_has_the_same_bits_and_compilations_are_few():
    data = [*batches(3, most=9), *batches(3, seed=2)]
    one, two = trainer(ADAM), trainer(ADAM)
    want = fit(one, data)
    assert_same_bits(fit(two, iter(data), prefetch=2), want)
    jax.tree.map(assert_same_bits, state_of(two), state_of(one))
    stats = one.stats()
    assert stats["capacities"] == {"item": 8, "words": 16}
    # Elements and capacities come in powers of two, and never shrink.
    assert one.compilations == two.compilations == stats["compilations"] <= 2
    assert stats["steps"] == 6 and stats["store"]["item"].pushes == 6
    count = one.compilations
    fit(one, batches(3, most=3, seed=3))
    assert one.compilations == count


def test_whose_arrays_are_donated():
    """Neither the caller's, nor twice one that the state shares with the parameters."""

    class Scaled(SparseEmbedding):
        def sparse_forward(self, tables, params, inputs):
            return super().sparse_forward(tables, params, inputs) * params["w"]

    params = {"w": jnp.ones(1), "b": np.float32(0)}
    update: Any = lambda updates, state, params=None: (updates, state)
    tx: Any = optax.GradientTransformation(lambda params: params, update)
    block, loss = Scaled(V, D, name="item"), lambda out, batch: jnp.sum(out**2)
    for _ in range(2):
        store = sj.store.KVStore()
        made = Trainer(block, store, loss, tx, params=params, table_tx=SGD)
        made.step(jnp.array([1]))
    assert float(params["w"][0]) == 1


@pytest.mark.slow
def test_fixed_capacity():
    made = trainer(capacity={"item": 6, "words": 40})
    fit(made, batches(1))
    assert made.stats()["capacities"] == {"item": 6, "words": 40}
    small = trainer(capacity=2)
    for options in ({}, {"prefetch": 1, "capacity": 2}):
        with pytest.raises(ValueError, match="capacity=2"):
            fit(small, batches(1), **options)
    assert small.steps == 0


def test_the_step_does_not_know_how_large_tables_are():
    big = 1_000_003
    made = trainer(block=Model(item=SparseEmbedding(big, D, name="item")))
    batch = in_one_shape(*batches(1))
    rows = made.store.pull(made.row_ids(batch), mode="drop")
    engine, spec = made.store.engine, made.store.spec
    listed = lambda n: ListedTable(engine, n, spec(n).shape, spec(n).dtype)
    tables = {name: listed(name) for name in rows}
    pairs = {name: (x.rows, x.values) for name, x in rows.items()}
    step = lambda pairs, params, state, batch: made._step._compute(
        pairs, ((tables, params), state), batch
    )
    args = pairs, made.params, made.opt_state, batch
    assert_no_dense(step, *args, heights=[big])


def test_a_block_in_the_step_of_the_store():
    """With `store[name]` as its tables, a block need not list its rows."""
    one, two = trainer(), trainer()
    store, block = two.store, two.block
    params = {"dense": two.params, "tables": {n: store[n] for n in store.names()}}
    step = store.train_step(
        lambda p, batch: loss_of(block(p["tables"], p["dense"], batch["x"]), batch), SGD
    )
    state = SGD.init(params)
    for batch in map(in_one_shape, batches(3)):
        params, state, loss = step(params, state, batch)
        np.testing.assert_allclose(loss, one.step(batch), rtol=1e-5)
    assert step.compilations <= 2
    assert_trees_close(params["dense"], one.params)
    for name in store.names():
        np.testing.assert_allclose(
            store.pull_all(name), one.store.pull_all(name), rtol=1e-5, atol=1e-7
        )


def test_a_push_that_fails_keeps_the_parameters(monkeypatch):
    """The step donates its arguments, so the results are kept before the push."""
    made = squared(Ranker())
    made.step(jnp.array([1, 2]))
    with monkeypatch.context() as patch:
        patch.setattr(made.store.engine, "push", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            made.step(jnp.array([1, 2]))
    assert np.isfinite(made.step(jnp.array([1, 2])))


@pytest.mark.usefixtures("eight_devices")
def test_a_store_for_several_devices():
    """Data-parallel training: examples are sharded over a mesh, rows pulled once."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.NamedSharding(mesh, jax.P("x"))
    rng = np.random.default_rng(0)
    y = rng.normal(size=8).astype(np.float32)
    data = [{"x": rng.integers(-1, 40, 8), "y": y} for _ in range(3)]
    block = Ranker(SparseEmbedding(V, D, name="item", padding_id=-1))
    trained = []
    for store, given in (
        (sj.store.KVStore(), data),
        (sj.store.KVStore(mesh=mesh), jax.device_put(data, sharding)),
    ):
        made = trainer(optax.adagrad(0.1), block=block, store=store, clip_norm=0.3)
        losses = fit(made, given, prefetch=1)
        trained.append((losses, store.pull_all("item"), made.params))
        outputs = made.predict(given[0])
    assert_trees_close(*trained)
    assert outputs.sharding.is_equivalent_to(sharding, 1)
    assert made.params["top"]["kernel"].sharding.is_fully_replicated
    bad = jax.device_put({"x": np.full(8, V), "y": y}, sharding)
    with pytest.raises(ValueError, match="8 of 8 ids"):
        made.step(bad)


def test_a_table_for_reading_is_not_trained():
    class Undeclared:
        """A block by its two methods, whose table the trainer meets in a batch."""

        def row_ids(self, inputs):
            return {"read": inputs}

        def sparse_forward(self, tables, params, inputs):
            return sj.lookup(tables["read"], inputs) * params["w"]

    store = sj.store.KVStore()
    store.init("read", np.ones((5, 2), np.float32), None)
    made = squared(Undeclared(), store, params={"w": jnp.ones(2)})
    assert made.predict(jnp.array([1])).tolist() == [[1, 1]]
    losses = [float(fit(made, [jnp.array([1])], prefetch=k)[0]) for k in (0, 1)]
    assert losses[1] < losses[0] and made.params["w"].tolist() != [1, 1]
    assert (store.pull_all("read") == 1).all()
    # Optimizers only for the tables that the store does not have.
    block = SparseEmbedding(5, 2, name="read")
    assert squared(block, store, table_tx={"half": SGD}).steps == 0


# ------------------------------------------------------------------ wrong batches


@pytest.mark.slow
def test_checked():
    """A row that was not pulled is an error before anything is updated."""

    class Forgetful(SparseEmbedding):
        def row_ids(self, inputs):
            return {"item": np.asarray(inputs[0])[:-1]}

        def sparse_forward(self, tables, params, inputs):
            return super().sparse_forward(tables, params, inputs[0])[:, 0]

    block = Forgetful(V, D, name="item", mode="error")
    made = trainer(block=block, checked=True, params={"unused": jnp.ones(2)})
    ok = {"x": (jnp.array([3, 5, 3]),), "y": jnp.zeros(3)}
    assert float(made.step(ok)) > 0
    before = state_of(made)
    bad = {"x": (jnp.array([3, 5, 7]),), "y": jnp.zeros(3)}
    for call in (made.step, made.predict):
        with pytest.raises(checkify.JaxRuntimeError, match="the first is 7"):
            call(bad)
    jax.tree.map(assert_same_bits, state_of(made), before)
    # Under mode "fill", a row that was not pulled reads NaN.
    loose = trainer(block=dataclasses.replace(block, mode="fill"))
    assert np.isnan(loose.predict(bad)).any()


@pytest.mark.slow
def test_bad_ids_do_not_spoil_the_parameters():
    made = squared(Ranker())
    made.step(jnp.array([1, 4, 4]))
    before = state_of(made)
    ahead = lambda x: fit(made, [x], 1, mode="error")
    for bad, first in ((5, "5"), (-7, "-7"), (-1, "-2")):
        for call in (made.step, made.predict, ahead):
            with pytest.raises(ValueError, match=f"1 of 3 ids .*the first is {first}"):
                call(jnp.array([1, bad, 4]))
    jax.tree.map(assert_same_bits, state_of(made), before)
    for item in (
        SparseEmbedding(5, 2, name="item", padding_id=-1),
        SparseEmbedding(5, 2, name="item", mode="zero"),
    ):
        assert np.isfinite(squared(Ranker(item)).step(jnp.array([1, -1])))
    loose = squared(Ranker(), mode="drop")
    assert np.isnan(fit(loose, [jnp.array([1, 5])], prefetch=1)).all()


@pytest.mark.parametrize("checked", [False, True])
def test_errors_of_batch_and_loss_train_nothing(checked):
    def broken(out, batch):
        raise ValueError("something else")

    mode, wide = "error" if checked else "zero", sp.csr_matrix(np.ones((2, 6)))
    made = squared(SparseLinear(1, 4, name="t", mode=mode), checked=checked)
    for prefetch in (0, 1):
        with pytest.raises(ValueError, match="x must have 4 columns"):
            fit(made, [wide], prefetch=prefetch)
    assert made.steps == 0 and not made.store.pull_all("t").any()
    block = SparseEmbedding(5, 2, name="item", mode=mode)
    made = Trainer(block, sj.store.KVStore(), broken, SGD, checked=checked)
    with pytest.raises(ValueError, match="^something else"):
        made.step(jnp.array([1]))


# ------------------------------------------------------------------ saving


def test_resumes_bit_for_bit(tmp_path):
    """The store saves the tables; the dense leaves are trees that any library saves."""
    one, data = trainer(ADAM), list(batches(6))
    fit(one, data[:3])
    one.store.save(tmp_path / "store")
    other = trainer(ADAM, key=8)
    first = trainer().store.pull_all("item")  # by its key, and those of `words` are 0
    assert not np.array_equal(other.store.pull_all("item"), first)
    assert not other.store.pull_all("words").any()
    other.store.load(tmp_path / "store")
    other.steps = one.steps
    # Copies, because the next step donates them.
    other.params, other.opt_state = jax.tree.map(jnp.copy, (one.params, one.opt_state))
    # Of all rows, pulled or not.
    jax.tree.map(assert_same_bits, state_of(other), state_of(one))
    assert_same_bits(fit(other, data[3:]), fit(one, data[3:]))
    jax.tree.map(assert_same_bits, state_of(other), state_of(one))
