"""The walk keeps what the traced program says beside its values."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P

import sparsejax as sj
from helpers import to_dense
from sparsejax import _compat


def _inputs():
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
    layers = [{"w": normal(6, 6), "b": normal(6)} for _ in range(5)]
    params = {"table": normal(60, 6), "layers": layers}
    return params, rng.integers(0, 60, 8)


def loss(params, ids, read=lambda table, ids: table[ids]):
    """Equal layers, made of functions without `jit`."""
    x = read(params["table"], ids)
    for number, layer in enumerate(params["layers"]):
        with jax.named_scope(f"layer{number}"):
            y = lax.dot_general(x, layer["w"], (((1,), (0,)), ((), ())))
            y = lax.add(y, lax.broadcast_in_dim(layer["b"], y.shape, (1,)))
            y = lax.mul(lax.tanh(y), lax.sin(y))
            x = lax.add(x, lax.mul(y, y))
    return jnp.mean(x)


def test_every_trace_gives_the_same_program():
    params, ids = _inputs()
    step = lambda *xs: sj.value_and_grad(loss)(*xs)
    texts = {jax.jit(lambda *xs: step(*xs)).lower(params, ids).as_text() for _ in "123"}
    assert len(texts) == 1


def test_scopes_and_source_lines_stay():
    jaxpr = jax.make_jaxpr(sj.value_and_grad(loss))(*_inputs()).jaxpr
    sines = [e for e in jaxpr.eqns if e.primitive.name == "sin"]
    scopes = [str(e.source_info.name_stack) for e in sines]
    assert [s[s.index("layer") :][:6] for s in scopes] == [
        f"layer{k}" for k in range(5)
    ]
    assert all("test_interpreter.py:" in _compat.user_line(e) for e in sines)


def _fixed(fun, x):
    """`fun(x)` by a rule that calls `fun`, as an implicit derivative does."""
    wrapped = jax.custom_vjp(lambda fun, x: fun(x), nondiff_argnums=(0,))
    bwd = lambda fun, x, ct: jax.vjp(fun, x)[1](3 * ct)
    wrapped.defvjp(lambda fun, x: (fun(x), x), bwd)
    return wrapped(fun, x)


def _vjp_over_arrays(table, ids, w, c):
    scaled = jax.custom_vjp(lambda x: x)
    scaled.defvjp(lambda x: (x * c, None), lambda _, ct: (ct * w + c,))
    return scaled(table[ids])


def _jvp_over_arrays(table, ids, w, c):
    scaled = jax.custom_jvp(lambda x: x)
    scaled.defjvp(lambda x, dx: (x[0], dx[0] * w + c * dx[0]))
    return scaled(table[ids])


_OVER_ARRAYS = {
    "rows": lambda table, ids, w, c: _fixed(lambda x: x * w + c, table[ids]),
    "table": lambda table, ids, w, c: _fixed(lambda x: x[ids] * c, table),
    "vjp": _vjp_over_arrays,
    "jvp": _jvp_over_arrays,
}


@pytest.mark.parametrize("jit", [jax.jit, lambda f: f], ids=["jit", "eager"])
@pytest.mark.parametrize("kind", _OVER_ARRAYS)
def test_derivative_rules_close_over_arguments(kind, jit):
    table, w = np.arange(80.0, dtype="f").reshape(40, 2), np.array([[3, 7]], "f")
    args = table, np.array([5, 2]), w
    given = lambda *args: jnp.sum(_OVER_ARRAYS[kind](*args) ** 2)
    computed = lambda table, ids, w: given(table, ids, w, w[0, 1])
    got = to_dense(jit(sj.grad(given))(*args, w[0, 1]))
    np.testing.assert_array_equal(got, jax.jit(jax.grad(computed))(*args))
    # Inside jit the error is JAX's own, when the whole program is compiled.
    words = "traced" if jit is jax.jit else "custom_vjp or custom_jvp"
    with pytest.raises(jax.errors.UnexpectedTracerError, match=words):
        jit(sj.grad(computed))(*args)


def test_no_tracer_leaks():
    loss = lambda table, w: jnp.sum(_vjp_over_arrays(table, jnp.array([5]), w, w))
    with jax.checking_leaks():
        jax.jit(lambda *args: sj.grad(loss)(*args).to_dense())(jnp.ones((9, 2)), 3.0)


def _read_split(table, ids):
    return table.at[ids].get(out_sharding=P("data"))


@pytest.mark.usefixtures("eight_devices")
@pytest.mark.parametrize(
    "kind, read",
    [(AxisType.Auto, lambda table, ids: table[ids]), (AxisType.Explicit, _read_split)],
    ids=["auto", "explicit"],
)
def test_in_a_mesh_and_in_another(kind, read):
    params, ids = _inputs()
    expected = jax.jit(jax.grad(loss))(params, ids)
    grad = sj.grad(lambda params, ids: loss(params, ids, read))
    run = jax.jit(lambda *xs: to_dense(grad(*xs)))
    for devices in (jax.devices()[:2], jax.devices()[1::-1]):
        mesh = jax.make_mesh((2,), ("data",), (kind,), devices=devices)
        with jax.set_mesh(mesh):
            got = run(*jax.device_put((params, ids), (P(), P("data"))))
        chex.assert_trees_all_close(got, expected, rtol=1e-3, atol=1e-4)
