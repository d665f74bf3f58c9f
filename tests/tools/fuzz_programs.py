"""Random programs that use tables: `python -m tests.tools.fuzz programs`.

A program is data: a tuple of steps `(name, i, j, k)` or `(name, i, j, k, body)`. A step
takes its operands from the values so far, chosen by i, j and k among those that fit (0
is the latest), and appends its results. A step for which nothing fits does nothing. So
every tuple is a program, hypothesis can make any shorter, and a failure is a line that
can be kept as a named case: `tests/transform/test_fuzz.py` has them. Views, reads and
most wrappers are those of `fuzz_models`.

`check` runs a program by sparsejax and by JAX, in float64: what `jax.grad` accepts is
accepted, and the gradients are equal.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from jax import lax

import fuzz_models
from fuzz_models import VIEWS, WRAPPERS
from fuzz_modes import MODES, SECOND, Case, check as check_gradient, precisely


# The heights, and the parts of V as a stack of K tables, are lengths of nothing else.
K, L = 5, 11
V, W, D, N, B = K * L, 29, 4, 3, 2
LIMIT = 20_000  # elements of one value


class DoesNotFit(Exception):
    """A step has no operand."""


@dataclasses.dataclass
class Env:
    """The values that a program has computed.

    Args:
      values: floating-point arrays, the latest last.
      ids, far: integers [n]; some of `far` are out of range.
      old: how many of the values there were at the start.
    """

    values: list[Any]
    ids: Any
    far: Any
    old: int

    def pick(self, k, fits=lambda x: True):
        found = [x for x in self.values if fits(x)]
        if not found:
            raise DoesNotFit
        return found[-1 - k % len(found)]

    def child(self, *more, **ids):
        values = [*self.values, *more]
        return dataclasses.replace(self, values=values, old=len(values), **ids)

    def new(self):
        return self.values[self.old :]


is_big = lambda x: L in x.shape or max(x.shape, default=0) > 20
has_rank = lambda *ranks: lambda x: x.ndim in ranks
axis_of = lambda x, k: k % x.ndim


def ids_for(env, k):
    """Ids as users write them, some out of range."""
    forms = env.ids, env.far, env.ids[None], env.ids - 5, env.far.astype(jnp.uint8)
    return forms[k % 5]


# -- one step --------------------------------------------------------------------------

STEPS: dict[str, Any] = {}
BLOCKS: dict[str, Any] = {}
step = lambda fun: STEPS.setdefault(fun.__name__, fun)
block = lambda fun: BLOCKS.setdefault(fun.__name__, fun)


@step
def view(env, i, j, k):
    x = env.pick(i, has_rank(1, 2, 3))
    return [*VIEWS.values()][j % len(VIEWS)](x)


@step
def shape(env, i, j, k):
    x = env.pick(i, has_rank(1, 2, 3))
    a = axis_of(x, k)
    return (
        lambda: jnp.expand_dims(x, a + 1),
        lambda: jnp.swapaxes(x, 0, a),
        lambda: x.reshape(*x.shape[:a], *x.shape[a:][::-1]),
        lambda: x.reshape(*x.shape[:a], -1),
        lambda: jnp.broadcast_to(jnp.expand_dims(x, a), _with(x.shape, a, B)),
        lambda: jnp.flip(x, a),
        lambda: lax.slice_in_dim(x, 0, min(2, x.shape[a]), axis=a),
        lambda: jnp.concatenate([x, x], a),
    )[j % 8]()


@step
def stack(env, i, j, k):
    """The rows of a table as the rows of K tables, or back."""
    x = env.pick(i, lambda x: V in x.shape or (K in x.shape and L in x.shape))
    if V in x.shape:
        a = x.shape.index(V)
        return x.reshape(*x.shape[:a], K, L, *x.shape[a + 1 :])
    a = min(x.shape.index(K), x.shape.index(L))
    return x.reshape(*x.shape[:a], -1, *x.shape[a + 2 :])


@step
def read_stack(env, i, j, k):
    """Rows of a table in a stack."""
    x = env.pick(i, lambda x: x.shape[:2] == (K, L))
    ids = ids_for(env, k)
    return (
        lambda: x[2, ids],
        lambda: x[ids % K, ids],
        lambda: x[-1][ids],
        lambda: x[env.ids[0] % 7][ids],
        lambda: x[:, ids],
        lambda: x[1:3, ids],
        lambda: jnp.take(x[1], ids, axis=0, fill_value=0.5),
        lambda: lax.dynamic_slice_in_dim(x, env.ids[0] % 7, 2, 0)[:, 2:4],
    )[j % 8]()


def _with(shape, a, size):
    return (*shape[:a], size, *shape[a:])


BINARY = (
    jnp.add,
    jnp.subtract,
    jnp.multiply,
    lambda x, y: x / (2.5 + jnp.sin(y)),
    jnp.maximum,
    jnp.minimum,
    lambda x, y: jnp.arctan2(x, 3.0 + jnp.cos(y)),
    lambda x, y: jnp.where(y > 0, x, 0.5),
    lambda x, y: jnp.where(x > 0, x, y),
)


@step
def binary(env, i, j, k):
    x = env.pick(i)

    def fits(y):
        try:
            return math.prod(np.broadcast_shapes(x.shape, y.shape)) <= LIMIT
        except ValueError:
            return False

    y = env.pick(k, fits)
    x, y = (y, x) if (i + j + k) % 2 else (x, y)
    return BINARY[j % len(BINARY)](x, y)


@step
def outer(env, i, j, k):
    """Every row of one with every row of the other, as for the nearest codeword."""
    x = env.pick(i, has_rank(1, 2))
    y = env.pick(k, lambda y: y.ndim == x.ndim and y.shape[1:] == x.shape[1:])
    return BINARY[j % len(BINARY)](x[:, None], y[None])


@step
def matmul(env, i, j, k):
    x = env.pick(i, has_rank(1, 2))
    y = env.pick(k, lambda y: y.ndim in (1, 2) and x.shape[-1] == y.shape[0])
    return x @ y


# Along the axis a; then those of models, along the first.
READS = (
    lambda x, ids, a: x[(slice(None),) * a + (ids,)],
    lambda x, ids, a: jnp.take(x, ids, axis=a, mode="clip"),
    lambda x, ids, a: jnp.take(x, ids, axis=a, mode="wrap"),
    lambda x, ids, a: jnp.take(x, ids, axis=a, fill_value=0.5),
    lambda x, ids, a: jnp.nan_to_num(jnp.take(x, ids, axis=a)),
    lambda x, ids, a: x[(slice(None),) * a + (5,)] if x.shape[a] > 5 else x,
    lambda x, ids, a: lax.dynamic_slice_in_dim(
        x, ids.ravel()[0], min(2, x.shape[a]), a
    ),
    lambda x, ids, a: lax.dynamic_index_in_dim(x, ids.ravel()[0], a),
    lambda x, ids, a: lax.slice_in_dim(x, 0, min(5, x.shape[a]), 2, axis=a),
    lambda x, ids, a: jax.vmap(lambda i: jnp.take(x, i, axis=a, mode="clip"))(ids),
    *(lambda x, ids, a, f=f: f(x, ids) for f in fuzz_models.READS.values()),
)


@step
def read(env, i, j, k):
    """Rows of a value, along any of its axes."""
    x = env.pick(i, lambda x: x.ndim and is_big(x))
    ids = ids_for(env, k)
    return jnp.nan_to_num(READS[j % len(READS)](x, ids, axis_of(x, k // 5)))


@step
def lookup_rows(env, i, j, k):
    """Rows of a table, in the plainest way."""
    return env.pick(i, lambda x: x.ndim and x.shape[0] in (V, W, L))[ids_for(env, k)]


@step
def write(env, i, j, k):
    x = env.pick(i, has_rank(1, 2, 3))
    rows = env.pick(k, lambda y: y.shape == (env.ids.size, *x.shape[1:]))
    at = x.at[env.ids if j % 3 else env.far]
    return (at.add, at.set, at.multiply)[j % 3](rows)


@step
def reduce(env, i, j, k):
    x = env.pick(i, has_rank(1, 2, 3))
    how = jnp.sum, jnp.max, jnp.mean, jax.nn.logsumexp, jnp.cumsum, jnp.sort
    return how[j % 6](x, axis=axis_of(x, k))


@step
def not_differentiated(env, i, j, k):
    x = env.pick(i, has_rank(1, 2, 3))
    start, double = (0, lax.stop_gradient(x)), lambda c: (c[0] + 1, 2.0 * c[1])
    return (
        lambda: jnp.sum(lax.stop_gradient(x) ** 2),
        lambda: jnp.sum(x > 0.3) * 0.1,
        lambda: jnp.argmax(x) * 0.01,
        lambda: lax.while_loop(lambda c: c[0] < 2, double, start)[1],
    )[j % 4]()


@step
def nearest(env, i, j, k):
    """The row of a table nearest to a vector, as in vector quantization."""
    t = env.pick(i, lambda x: x.ndim == 2 and x.shape[0] in (V, W))
    x = env.pick(k, lambda x: x.ndim == 1 and x.shape[0] == t.shape[1])
    distance = jnp.sum((x[None] - t) ** 2, 1)
    return t[jnp.argmin(lax.stop_gradient(distance) if j % 2 else distance)]


# -- steps with a body -----------------------------------------------------------------


def _results(env, k, passed):
    """The results of a body: its latest value and an unchanged one."""
    new = env.new()[-1 - k % 2 :]
    return [*new, passed] if k % 3 == 1 else new


def _function(env, k, body):
    """The body as a function of two values."""
    return lambda x, y: _results(run(env.child(y, x), body), k, x)


@block
def jit(env, i, j, k, body):
    return jax.jit(_function(env, k, body))(env.pick(i), env.pick(j))


@block
def checkpoint(env, i, j, k, body):
    policy = (None, jax.checkpoint_policies.dots_saveable)[j % 2]
    run_body = jax.checkpoint(_function(env, k, body), policy=policy)
    return run_body(env.pick(i), env.pick(j))


@block
def cond(env, i, j, k, body):
    x = env.pick(i)
    which = (env.ids[0] > 5, env.ids[0] > 90, env.far[0] % 2 == 0)[j % 3]

    def branch(body):
        def run_body(x):
            total = summary(run(env.child(x), body))
            return (total, x) if k % 3 == 1 else (total,)

        return run_body

    return lax.cond(which, branch(body), branch(body[1:]), x)


@block
def scan(env, i, j, k, body):
    x = env.pick(i)

    def step_of_loop(carry, xs):
        h, y = carry
        i, far = xs
        inner = run(env.child(y, h, ids=i[None], far=far[None]), body)
        h = jnp.tanh(h + summary(inner))
        y = jnp.sin(y) if k % 7 == 3 else y
        return (h, y), (summary(inner) if k % 2 else None)

    init = jnp.zeros((), jnp.float64), x
    xs = env.ids.reshape(-1), env.far.reshape(-1)
    (h, y), ys = lax.scan(step_of_loop, init, xs, reverse=bool(j % 2), unroll=1 + j % 2)
    return [h, *([y] if k % 3 == 1 else []), *([ys] if k % 2 else [])]


@block
def scan_over(env, i, j, k, body):
    """A loop over the first axis of a value."""
    x = env.pick(i, lambda x: x.ndim and x.shape[0] <= W)

    def step_of_loop(h, y):
        inner = run(env.child(y), body)
        return h + summary(inner), (inner.new()[-1] if inner.new() else h)

    h, ys = lax.scan(step_of_loop, jnp.zeros((), jnp.float64), x)
    return [h, ys]


def _vmap_over(size, ids, passed):
    """A block that maps over an axis of that size, and in turn over ids too."""

    def vmap(env, i, j, k, body):
        x = env.pick(i, lambda x: size in x.shape)
        axis = x.shape.index(size)

        def one(x, ids):
            return _results(run(env.child(x, ids=ids), body), k, passed(x))

        if j % 2:
            return jax.vmap(lambda x: one(x, env.ids), axis)(x)
        return jax.vmap(one, (axis, 0))(x, jnp.stack(ids(env.ids)))

    return vmap


BLOCKS["vmap_values"] = _vmap_over(B, lambda ids: [ids, ids[::-1]], lambda x: x)
# A model for each table of a stack.
BLOCKS["vmap_stack"] = _vmap_over(
    K, lambda ids: [ids + n for n in range(K)], lambda x: x[..., :1]
)


@block
def wrapped(env, i, j, k, body):
    """The body as a function of one value, in a wrapper of models."""

    def f(x, ids):
        ids = ids.reshape(-1)
        return run(Env([x], ids, 20 * ids - 7, 0), body).values[-1]

    return [*WRAPPERS.values()][j % len(WRAPPERS)](f, env.pick(i), env.ids)


# -- programs --------------------------------------------------------------------------


def run(env, program):
    """Runs the steps of a program on an Env, and returns that."""
    for name, *args in program:
        try:
            out = (STEPS.get(name) or BLOCKS[name])(env, *args)
        except DoesNotFit:
            continue
        for x in out if isinstance(out, (list, tuple)) else [out]:
            if jnp.issubdtype(x.dtype, jnp.floating) and 0 < x.size <= LIMIT:
                env.values.append(x)
    return env


def summary(env):
    """A scalar of all small values that a program has computed."""
    small = [x for x in env.new() if not is_big(x)]
    parts = [(1 + 0.1 * n) * jnp.mean(jnp.sin(x)) for n, x in enumerate(small)]
    return sum((p.astype(jnp.float64) for p in parts), jnp.zeros((), jnp.float64))


def loss_of(program):
    """The function that a program is, of `arguments()`."""

    def loss(params, batch):
        t, u, w, s, x = (params[name] for name in "tuwsx")
        values, (ids, far) = [u, x, s, w, t], batch
        return summary(run(Env(values, ids, far, len(values)), program))

    return loss


def arguments():
    """Parameters and two batches `(ids, far)`."""
    keys = jax.random.split(jax.random.key(0), 5)
    shapes = (V, D), (W, 2, 3), (D,), (B,), (N, D)
    floats = [jax.random.normal(k, s, jnp.float64) for k, s in zip(keys, shapes)]
    ids, far = jnp.array([11, 3, 11], jnp.int32), jnp.array([-1, 60, 7], jnp.int32)
    return dict(zip("tuwsx", floats)), ((ids, far), (ids + 1, far - 3))


STACK = "stack_as_a_parameter"  # the first table is `[K, L, D]`


def check(program, how="eager"):
    """Raises if sparsejax and JAX differ on a program; see `fuzz_modes.check`."""
    with precisely():
        loss, (params, batches) = loss_of(program), arguments()
        tables = {"t": True, "u": True, "w": False, "s": False, "x": False}
        if how == STACK:
            flat = lambda params, batch, loss=loss: loss(
                params | {"t": params["t"].reshape(V, D)}, batch
            )
            loss, params["t"] = flat, params["t"].reshape(K, L, D)
        if how in SECOND:  # few rows are out of range: see `Case`
            batches = tuple((ids % K, ids % 3) for ids, _ in batches)
        case = Case(loss, params, batches, tables, forwards=True)
        return check_gradient(case, how)


# -- hypothesis ------------------------------------------------------------------------

_small = st.integers(0, 60)
# Most steps should work on the latest value.
_which = st.one_of(st.just(0), st.integers(0, 8))
_names = sorted(STEPS) + ["read", "read", "lookup_rows", "binary", "view"]


def _plain():
    return st.tuples(st.sampled_from(_names), _which, _small, _small)


def _with_body(body):
    bodies = st.lists(st.one_of(_plain(), body), min_size=1, max_size=3).map(tuple)
    return st.tuples(
        st.sampled_from([*sorted(BLOCKS), "wrapped"]), _which, _small, _small, bodies
    )


_steps = st.one_of(_plain(), _with_body(_with_body(_plain())), _with_body(_plain()))
programs = st.lists(_steps, min_size=1, max_size=6).map(tuple)
modes = st.sampled_from(["traced"] * 12 + ["required", STACK] + sorted(MODES))
cases = st.tuples(programs, modes)
