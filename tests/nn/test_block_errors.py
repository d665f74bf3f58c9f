"""Blocks and Trainer on bad ids, columns and arguments: nothing is trained on them."""

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
from helpers import assert_same_bits
from sparsejax.nn import SparseBlock, SparseEmbedding, SparseLinear, Trainer


pytestmark = pytest.mark.usefixtures("loose_promotion")  # optax's own arithmetic is

WIDE = sp.csr_matrix(np.ones((2, 6), np.float32))  # two columns more than the layer's
loss_of: Any = lambda out, batch: jnp.mean(out**2)


def linear(**fields):
    return SparseLinear(1, 4, name="t", **fields)


def make(block, tx=None, store=None, **options):
    store = sj.store.KVStore() if store is None else store
    tx = optax.sgd(0.1) if tx is None else tx
    return Trainer(block, store, loss_of, tx, **options)


def fit(made, data, prefetch=0):
    if not prefetch:
        return [made.step(batch) for batch in data]
    pulled = made.store.prefetch(data, made.row_ids, depth=prefetch, mode="drop")
    return np.array([made.step(batch, rows) for batch, rows in pulled])


# ------------------------------------------------------------------ columns


def csr(index, segments, num_segments=3):
    values = {"index": jnp.array(index), "value": jnp.arange(1.0, len(index) + 1)}
    return sj.SegmentTensor(values, jnp.array(segments), num_segments)


# Row 0 is fine, row 1 has columns 4 and -1 beside 0, and the last element is empty.
BAD = csr([3, 0, 4, -1, 77], [0, 1, 1, 1, 3])


@pytest.mark.slow
def test_columns_out_of_range_are_read_by_the_mode():
    weights = jnp.array([[10.0], [20.0], [30.0], [40.0]])
    rows = sj.SelectedRows(jnp.array([0, 3, 4]), weights[jnp.array([0, 3, 3])], 4)
    want = {
        "fill": [40, np.nan, 0],
        "zero": [40, 20, 0],
        "clip": [40, 2 * 10 + 3 * 40 + 4 * 10, 0],
    }
    for mode, expected in want.items():
        block = linear(mode=mode, use_bias=False)
        f = jax.jit(lambda tables, block=block: block(tables, {}, BAD)[:, 0])
        for table in (rows, weights):
            np.testing.assert_array_equal(f({"t": table}), expected)
    f = jax.jit(checkify.checkify(linear(mode="error", use_bias=False)))
    for table, bad in ((weights, "are out of range"), (rows, "does not store")):
        message = f({"t": table}, {}, BAD)[0].get()
        assert message is not None and "2 of 5 ids" in message
        assert bad in message and "the first is 4" in message
    good = csr([3, 0, 77], [0, 1, 3])
    assert f({"t": rows}, {}, good)[0].get() is None
    # No row that is read gets NaN in its gradient from one that is not.
    grad = sj.grad(lambda t: jnp.sum(linear(mode="zero", use_bias=False)(t, {}, BAD)))
    np.testing.assert_array_equal(grad({"t": rows})["t"].values, [[2], [1], [0]])


@pytest.mark.slow
def test_a_matrix_of_other_columns():
    for options in ({}, {"checked": True}, {"mode": "drop"}):
        for mode in ("fill", "error") if "checked" in options else ("fill", "zero"):
            made = make(linear(mode=mode), **options)
            for prefetch in (0, 1):
                with pytest.raises(ValueError, match=r"x must have 4 columns .* 6\)"):
                    fit(made, [WIDE], prefetch=prefetch)
            assert made.steps == 0 and not made.store.pull_all("t").any()

    class Plain(SparseEmbedding):
        """A block whose matrix is read by an ordinary layer, inside of the step."""

        def row_ids(self, inputs):
            return {self.name: [1]}

        def sparse_forward(self, tables, params, inputs):
            return sj.nn.Dense(1, 4, use_bias=False)(params, inputs)

    params = {"kernel": jnp.ones((4, 1))}
    made = make(Plain(4, 2), params=params)
    with pytest.raises(
        ValueError, match=r"x must have 4 columns .* got shape \(2, 6\)"
    ):
        made.step(WIDE)
    assert np.isfinite(float(made.step(WIDE[:, :4])))


# ------------------------------------------------------------------ ids


@dataclasses.dataclass(frozen=True)
class Scored(SparseBlock):
    """Dense parameters behind an embedding, which one NaN would spoil."""

    item: SparseEmbedding = SparseEmbedding(5, 2, name="item")
    top: sj.nn.Dense = sj.nn.Dense(1, 2)

    def row_ids(self, inputs):
        return self.item.row_ids(inputs)

    def sparse_forward(self, tables, params, inputs):
        return self.top(params["top"], self.item(tables, params["item"], inputs))


@pytest.mark.slow
def test_bad_ids_do_not_spoil_the_parameters():
    made = make(Scored())
    made.step(jnp.array([1, 4, 4]))
    before = jax.tree.map(np.array, (made.params, made.store.pull_all("item")))
    said = r"1 of 3 ids for table 'item' .*"
    for bad, first in ((5, "5"), (-7, "-7"), (-1, "-2")):
        batch = jnp.array([1, bad, 4])
        for call in (made.step, made.predict):
            with pytest.raises(ValueError, match=f"{said}the first is {first}"):
                call(batch)
        with pytest.raises(ValueError, match="has 5 rows"):
            fit(made, [batch], prefetch=1)
    after = jax.tree.map(np.array, (made.params, made.store.pull_all("item")))
    jax.tree.map(assert_same_bits, after, before)
    assert made.steps == 1
    for item in (
        SparseEmbedding(5, 2, name="item", padding_id=-1),
        SparseEmbedding(5, 2, name="item", mode="zero"),
    ):
        assert np.isfinite(make(Scored(item)).step(jnp.array([1, -1])))
    loose = make(Scored(), mode="drop")
    assert np.isnan(fit(loose, [jnp.array([1, 5])], prefetch=1)).all()


# ------------------------------------------------------------------ arguments


def test_arguments_are_named():
    block, tx = SparseEmbedding(5, 2, name="item"), optax.sgd(0.1)
    store = sj.store.KVStore()
    store.init("half", (5, 2), tx, dtype=jnp.bfloat16)
    other: Any = lambda name: SparseEmbedding(5, 2, name=name)
    for call, said in (
        (lambda: make(SparseEmbedding), r"got SparseEmbedding"),
        (lambda: make(block, table_tx=3), "tx must be an optax"),
        (lambda: make(block, key="a"), "key must be one PRNG key or an int"),
        (lambda: make(block, clip_norm=-1), "clip_norm must be positive, got -1"),
        (lambda: make(block, mode="skip"), "mode must be one of 'error', 'drop'"),
        (lambda: make(other("half"), store=store), "dtype bfloat16, but .* float32"),
    ):
        with pytest.raises((TypeError, ValueError), match=said):
            call()
    # A dict need not name tables that the store already has.
    store.init("item", (5, 2), tx)
    assert make(block, store=store, table_tx={"half": tx}).steps == 0


def test_a_table_for_reading_is_not_trained():
    class Undeclared:
        """A block by its two methods, whose table the trainer meets in a batch."""

        def row_ids(self, inputs):
            return {"read": inputs}

        def sparse_forward(self, tables, params, inputs):
            return sj.lookup(tables["read"], inputs) * params["w"]

    store = sj.store.KVStore()
    store.init("read", np.ones((5, 2), np.float32), None)
    made = make(Undeclared(), store=store, params={"w": jnp.ones(2)})
    assert made.predict(jnp.array([1])).tolist() == [[1, 1]]
    losses = [float(fit(made, [jnp.array([1])], prefetch=k)[0]) for k in (0, 1)]
    assert losses[1] < losses[0] and made.params["w"].tolist() != [1, 1]
    assert (store.pull_all("read") == 1).all()


def test_a_check_needs_checked():
    made = make(SparseEmbedding(5, 2, name="item", mode="error"))
    for call in (made.step, made.predict):
        with pytest.raises(
            ValueError, match=r"SparseEmbedding contains a check.*checked=T"
        ):
            call(jnp.array([1]))
    assert made.steps == 0

    def broken(out, batch):
        raise ValueError("something else")

    made = Trainer(made.block, sj.store.KVStore(), broken, optax.sgd(0.1), checked=True)
    with pytest.raises(ValueError, match="^something else"):
        made.step(jnp.array([1]))
    plain = dataclasses.replace(made.block, mode="fill")
    made = Trainer(plain, sj.store.KVStore(), broken, optax.sgd(0.1))
    with pytest.raises(ValueError, match="^something else"):
        made.step(jnp.array([1]))


def test_layers_that_are_no_fields():
    class Bare(SparseBlock):
        def __init__(self):
            self.item = SparseEmbedding(5, 2, name="item")

        def row_ids(self, inputs):
            return self.item.row_ids(inputs)

        def sparse_forward(self, tables, params, inputs):
            return self.item(tables, params["item"], inputs)

    @dataclasses.dataclass(frozen=True)
    class Unannotated(Scored):
        more = [sj.nn.Dense(1, 2)]

    for block, name in ((Bare(), "item"), (Unannotated(), "more")):
        for call in (block.tables, lambda block=block: block.init(jax.random.key(0))):
            with pytest.raises(TypeError, match=f"'{name}' are not dataclass fields"):
                call()

    class Said(Bare):
        """A block that overrides `tables` and `init`."""

        def tables(self):
            return self.item.tables()

        def init(self, key):
            return {"item": {}}

    assert np.isfinite(make(Said()).step(jnp.array([1])))


def test_merge_row_ids_names_what_is_none():
    merge: Any = sj.nn.merge_row_ids
    with pytest.raises(TypeError, match="dict"):
        merge({"a": [1]}, None)
