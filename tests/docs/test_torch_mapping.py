"""docs/torch.md: its code, checked against PyTorch, TorchRec and FBGEMM.

`golden/torch.json` and `.npz` hold the answers of the real systems; the other rows are
in `torch.txt`, with NumPy or by hand.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import pages
import sparsejax as sj
from recorded import (
    TABLE,
    Page,
    a_grad,
    dense,
    page_ran,  # noqa: F401  (a fixture)
    same,
    table_grad,
)


pytestmark = pytest.mark.slow

PAGE = Page("torch", hidden=("10 ",), tables=("weight",))


# ------------------------------------------------------------------ for torch.txt

IDS, LISTS = np.arange(20_480) // 4, [[7, 9], [8], [], [5]]
SRC, INDEX = np.array([1.0, 4.0, 2.0, 3.0], np.float32), np.array([0, 1, 0, 1])
E = np.exp(SRC)
TOTAL = np.array([E[0] + E[2], E[1] + E[3]])
LARGE = np.ones((100_000, 32), np.float32)
LAYER = sj.nn.EmbeddingCollection({"item": (30, 4), "user": (50, 4)})
HYPER = {"lr": 0.1, "b1": 0.9, "b2": 0.99, "eps": 1e-8, "weight_decay": 0.1}
MOMENTUM = sj.optim.lazy(optax.sgd(0.1, momentum=0.9))
# Rows, and the bytes that FBGEMM makes of them in 4 bits; their numbers are exact.
EXACT = np.array([[0, 15, 5, 2], [3, 3, 3, 3]], np.float32)
FUSED = np.array([[240, 37, 0, 60, 0, 0], [0, 0, 0, 60, 0, 66]], np.uint8)
OPTIMIZERS = optax.adam(0.1), optax.rmsprop(0.1), optax.adamw(0.1)


def by_row(g):
    return g / np.sqrt(np.mean(g**2))


def lamb(w, g):
    r = by_row(g) + 0.1 * w
    return w - 0.1 * np.linalg.norm(w) / np.linalg.norm(r) * r


def nothing(row):
    """A gradient of zeros for one row."""
    return sj.SelectedRows(jnp.array([row]), jnp.zeros((1, 2)), 9)


def grouped_step(tx):
    params = {"table": jnp.asarray(TABLE), "w": jnp.ones(2)}
    grads = {"table": a_grad(), "w": jnp.ones(2)}
    updates, _ = jax.jit(tx.update)(grads, tx.init(params), params)
    return optax.apply_updates(params, updates)


def read_rows(t):
    return jax.jit(sj.grad(lambda t: jnp.sum(sj.lookup(t, np.array([3, 4])))))(t)


def rows_of_file(store, path, rows):
    """The rows of a table in a file after a push."""
    store.push("items", sj.SelectedRows(rows, -jnp.ones((2, 2)), 9))
    assert store.stats()["items"].path == str(path)
    found = store.pull_all("items")[rows].tolist()
    store.close()
    return found


def weighted_mean(weight, ids, w):
    bag = jax.jit(functools.partial(sj.embedding_bag, combiner="mean"))
    return bag(weight, ids, weights=w), np.einsum("bl,bld->bd", w, weight[ids]) / w.sum(
        1, keepdims=True
    )


# ------------------------------------------------------------------ by hand


@pytest.mark.usefixtures("loose_promotion")
def test_max_norm():
    """Differences: `max_norm`, gradient under `max_norm`."""
    name = "nn.Embedding(max_norm)"
    weight, ids = PAGE.inputs(name).values()
    out, changed = PAGE.outputs(name).values()
    table = PAGE.run(name, weight=weight, input=ids, max_norm=1.0)
    assert same(table, changed) and (changed != weight).any()
    assert same(sj.lookup(table, ids), out)
    assert same(sj.lookup(weight, ids, max_norm=1.0), out)
    # Theirs is the gradient at the changed rows.
    cotangent = PAGE.first(name, "cotangents")
    grad = jax.jit(jax.grad(lambda w: jnp.sum(sj.lookup(w, ids) * cotangent)))
    assert same(grad(table), PAGE.first(name, "grads"))


def test_ties():
    """Differences: ties of a maximum in a bag, gradient of a maximum."""
    weight, ids = PAGE.inputs("ties of a maximum").values()
    cotangent = PAGE.first("ties of a maximum", "cotangents")
    theirs = PAGE.first("ties of a maximum", "grads")[[4, 1]]
    assert same(theirs, np.concatenate([cotangent, np.zeros((1, 3))]))
    assert PAGE.refuses("a sparse gradient of a maximum", "ValueError")
    bags = lambda w: sj.embedding_bag(w, ids, combiner="max") * cotangent
    grad = table_grad(bags, weight)
    assert same(dense(grad)[[4, 1]], np.tile(cotangent / 2, (2, 1)))


def test_nested_softmax():
    """Difference: gradient of `torch.softmax(nested, dim=1)`, summed over columns."""
    name = "torch.softmax(nested, dim=1).values()"
    p, g = PAGE.first(name), PAGE.first(name, "cotangents")
    theirs = p * (g - np.sum(p * g, axis=1, keepdims=True))
    assert same(PAGE.first(name, "grads"), theirs)
    values, lengths = PAGE.inputs(name).values()
    assert same(PAGE.compiled(name, values=values, lengths=lengths), p)


@pytest.mark.usefixtures("loose_promotion")
def test_a_brought_state_goes_on():
    """The next step of the page's state is PyTorch's, by its formula."""
    page = dict(PAGE.blocks)
    for block in pages.blocks(PAGE.page):
        if "bring(" in block.code:  # the page defines these names again below
            exec(block.code, page)
    read = {"user": 1, "item": 1}  # the rows of ann and rye in PyTorch
    ids = page["vocabulary"].ids({"user": ["ann"], "item": ["rye"]})
    grad = sj.grad(lambda params: jnp.sum(page["predict"](params, ids)))

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state):
        updates, state = page["tx"].update(grad(params), state, params)
        return optax.apply_updates(params, updates), state

    def theirs(name, g):
        w, s = page["old"][name], page["adam"][name]
        t = s["step"] + 1
        m = 0.9 * s["exp_avg"] + 0.1 * g
        v = 0.999 * s["exp_avg_sq"] + 0.001 * g**2
        root = np.sqrt(v / (1 - 0.999**t)) + 1e-8
        return w - 1e-3 * m / (1 - 0.9**t) / root

    old, top = page["old"], page["old"]["top.weight"]
    rows = [old[f"{k}.weight"][[row]] for k, row in read.items()]
    want = {"top.bias": theirs("top.bias", 1)}
    want["top.weight"] = theirs("top.weight", np.concatenate(rows, axis=1))
    for (column, row), g in zip(read.items(), (top[:, :4], top[:, 4:])):
        name = f"{column}.weight"
        is_read = np.arange(len(old[name]))[:, None] == row  # the others stay
        want[name] = np.where(is_read, theirs(name, g), old[name])
    params, state = step(page["params"], page["opt_state"])
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5)
    jax.tree.map(close, params, page["bring"](want))
    assert int(state[0].count) == 501


test_line, test_recorded, test_nothing_is_left_out = PAGE.tests(globals())
