"""A predicate that is true for every value, and that XLA does not simplify."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from sparsejax import _compat
from sparsejax._rows.order_after import always_true


pytestmark = pytest.mark.window
FLOATS = ["float16", "bfloat16", "float32", "float64"]


@pytest.mark.parametrize("dtype", ["int8", "int32", "int64", *FLOATS])
def test_true_for_all_but_the_least_integer(dtype):
    with _compat.enable_x64(True):
        if dtype in FLOATS:
            x = np.array([0.0, -0.0, 1.5, -1e-40, np.inf, -np.inf, np.nan])
        else:
            info = np.iinfo(dtype)
            x = np.array([info.min + 1, -1, 0, 1, info.max])
            assert not always_true(jnp.array(info.min, dtype))
        predicate = np.asarray(jax.jit(always_true)(x.astype(jnp.dtype(dtype))))
        assert predicate.all() and predicate.shape == x.shape


@pytest.mark.usefixtures("cpu_backend")
def test_the_compiled_program_computes_it():
    x = jax.ShapeDtypeStruct((4,), jnp.float32)

    def choose(predicate):
        run = lambda x: lax.cond(predicate(x), jnp.sin, jnp.cos, x)
        return str(jax.jit(run).lower(x).compile().as_text())

    assert "conditional(" in choose(lambda x: always_true(x[0]))
    assert "conditional(" not in choose(lambda x: jnp.bool_(True))
