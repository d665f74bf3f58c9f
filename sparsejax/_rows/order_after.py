"""order_after: delays gradients until other results of a program are computed.

A step updates a table in place once the cotangents of the rows are known. If the loss,
the aux output or a dense gradient reads the table later than that, XLA copies the whole
table first. XLA orders operations by data dependences alone, so the cotangents get one
on those results. Measured in November 2026 (65,536 ids, a table of 10^6 x 64): for a
sum of rows times a vector, temporaries fell from 16.3 to 1.03 times the size of the
rows, and a step of SGD from 161 to 12 ms (benchmarks/NOTES.md).

The order also shares memory. The gradients of dense weights read the rows `[n, D]`; if
they come first, the cotangents can take the place of the rows.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparsejax import _arguments, _compat
from sparsejax._rows.always_true import always_true


def order_after(values: jax.Array, others: Sequence[jax.Array]) -> jax.Array:
    """`values`; on a CPU, computed after `others`. Outside of `jit` just `values`.

    Args:
      values: floating-point, of any shape.
      others: arrays of any types and shapes.
    """
    if _arguments.is_concrete(values):
        return values
    others = [x for x in others if x.size and _is_real(x.dtype)]
    if not others or any(map(_compat.has_mesh, (values, *others))):
        return values
    return _order_after_p.bind(values, *others)[0]


def _is_real(dtype: Any) -> bool:
    kinds = jnp.floating, jnp.integer, jnp.bool_
    return any(jnp.issubdtype(dtype, kind) for kind in kinds)


def _identity(values, *others):
    return [values]


def _times_one(values, *others):
    """`values` times a factor that is one, and is computed from `others`."""
    bits = jnp.zeros((), jnp.int32)
    for x in others:
        first = lax.slice(x, (0,) * x.ndim, (1,) * x.ndim).reshape(())
        bits ^= lax.bitcast_convert_type(first.astype(jnp.float32), jnp.int32)
    one = jnp.where(always_true(bits | np.int32(1)), np.float32(1), np.float32(2))
    return [values * one.astype(values.dtype)]


_order_after_p = _compat.platform_primitive(
    "order_after", _identity, {"cpu": _times_one}, lambda x, *_: [(x.shape, x.dtype)]
)
