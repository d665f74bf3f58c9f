"""Random expressions of rows of two tables: `python -m tests.tools.fuzz products`.

An expression is data: a tuple `(name, *operands)` or `(name, number)`. Its value is
`[N, D]` or a number, and the loss is the sum of it.

`check` takes the gradient by sparsejax and by JAX, in float64; at times a derivative of
the gradient, forwards or backwards.
"""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

import sparsejax as sj
from fuzz_modes import Case, check as check_gradient, precisely


V, D, N = 200, 4, 6
IDS = np.random.default_rng(0).integers(-3, V + 3, (5, N), np.int32)
DATA = np.random.default_rng(1).standard_normal((5, N, D))

_full = lambda x: jnp.broadcast_to(x, (N, D))
_norm = lambda x: jnp.linalg.norm(_full(x) + 0.1, axis=1, keepdims=True)
_READS = [
    lambda t, ids: t[np.clip(ids, 0, V - 1)],
    lambda t, ids: sj.lookup(t, ids, mode="zero"),
    lambda t, ids: sj.lookup(t, ids, mode="clip"),
    lambda t, ids: jnp.take(t, ids.reshape(2, 3) % V, axis=0).reshape(N, D),
]
_FUNCTIONS = {
    "square": lambda x: x**2,
    "absolute": lambda x: jnp.abs(x + 0.01),
    "tanh": jnp.tanh,
    "masked": lambda x: jnp.where(DATA[0] < 0, x, 0.0),
    "jitted": lambda x: jax.jit(lambda x: x * x - x)(x),
    "checkpointed": lambda x: jax.checkpoint(lambda x: jnp.square(x) + x)(x),
    "reshaped": lambda x: 3 * _full(x).reshape(N * D).reshape(N, D),
    "normalized": lambda x: _full(x) / (1 + _norm(x)),
    "sum": lambda x, y: x + y,
    "difference": lambda x, y: x - y,
    "product": lambda x, y: x * y,
    "squared_times": lambda x, y: x * x * y,
    "quotient": lambda x, y: x / (2 + y**2),
    "dots": lambda x, y: _full(jnp.einsum("bd,bd->b", _full(x), _full(y))[:, None]),
}
_BINARY = "sum difference product squared_times quotient dots".split()
_UNARY = sorted({*_FUNCTIONS} - {*_BINARY})


def _value(expression, params):
    name, *operands = expression
    if name == "rows":
        table, how, ids = operands
        return _READS[how](params["tu"[table]], IDS[ids])
    if name == "data":
        return jnp.asarray(DATA[operands[0]])
    if name == "number":
        return operands[0] / 3
    if name == "vector":
        return _full(params["w"])
    return _FUNCTIONS[name](*(_value(x, params) for x in operands))


def _params():
    rng = np.random.default_rng(2)
    shapes = {"t": (V, D), "u": (V, D), "w": (D,)}
    return {k: jnp.asarray(rng.standard_normal(s)) for k, s in shapes.items()}


def check(expression, how="compiled"):
    """Raises if sparsejax and JAX differ; see `fuzz_modes.check`."""
    loss = lambda params, batch: jnp.sum(_value(expression, params)) * 1.0
    with precisely():
        return check_gradient(Case(loss, _params()), how)


_index = st.integers(0, 4)
_leaves = st.one_of(
    *[st.tuples(st.just("rows"), st.integers(0, 1), st.integers(0, 3), _index)] * 5,
    *[st.tuples(st.just("rows"), st.just(0), st.just(0), _index)] * 5,
    st.tuples(st.just("data"), _index),
    st.tuples(st.just("number"), st.integers(-5, 5)),
    st.just(("vector",)),
)
_expressions = st.recursive(
    _leaves,
    lambda inner: st.one_of(
        st.tuples(st.sampled_from(_UNARY), inner),
        *[st.tuples(st.sampled_from(_BINARY), inner, inner)] * 2,
    ),
    max_leaves=6,
)
modes = st.sampled_from(["eager", "compiled", "hvp", "second_order"])
cases = st.tuples(_expressions, modes)
