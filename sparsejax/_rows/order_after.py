"""The order in which XLA computes: `order_after` and `always_true`.

`order_after` delays gradients until other results of a program are computed.

A step updates a table in place once the cotangents of the rows are known. If the loss,
the aux output or a dense gradient reads the table later than that, XLA copies the whole
table first. XLA orders operations by data dependences alone, so the cotangents get one
on those results. Measured in November 2026 (65,536 ids, a table of 10^6 x 64): for a
sum of rows times a vector, temporaries fell from 16.3 to 1.03 times the size of the
rows, and a step of SGD from 161 to 12 ms (benchmarks/NOTES.md).

The order also shares memory. The gradients of dense weights read the rows `[n, D]`; if
they come first, the cotangents can take the place of the rows.

`always_true` is a predicate that is True, but XLA cannot prove it. Where a
program needs a dependence that its mathematics does not have, it selects by it:

- `lax.cond(always_true(x), f, never)` keeps `f` apart from its neighbours: XLA neither
  fuses across a conditional nor moves operations into or out of it.
- `jnp.where(always_true(x), y, z)` computes `x` before `y` is used, for example so that
  an array is read before it is overwritten, and need not be copied.
- `y * jnp.where(always_true(x), 1, 2)` gives XLA arithmetic to fuse into a gather.

The predicate is `x > least`, with the least integer of the type. `(x | 1) != 0` fails
for the third use, since LLVM knows the lowest bit and removes the arithmetic: a read of
65,536 rows of 64 took 48 ms instead of 4.5 (two busy cores, November 2026).
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparsejax import _arguments, _compat


def order_after(values: jax.Array, others: Sequence[jax.Array]) -> jax.Array:
    """Computes `values` after `others` on a CPU. Outside of `jit` just `values`.

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
    """Multiplies `values` by a factor that is one, and is computed from `others`."""
    bits = jnp.zeros((), jnp.int32)
    for x in others:
        first = lax.slice(x, (0,) * x.ndim, (1,) * x.ndim).reshape(())
        bits ^= lax.bitcast_convert_type(first.astype(jnp.float32), jnp.int32)
    one = jnp.where(always_true(bits | np.int32(1)), np.float32(1), np.float32(2))
    return [values * one.astype(values.dtype)]


_order_after_p = _compat.primitive(
    "order_after",
    _identity,
    {"cpu": _times_one},
    types=lambda x, *_: [(x.shape, x.dtype)],
    multiple_results=True,
)


def always_true(x: jax.Array) -> jax.Array:
    """Returns True for each element of `x`; XLA cannot prove that it is.

    Args:
      x: signed integers, of which none is the least of its type; or floats of any
        values, NaN included.

    Returns:
      bool of the same shape.
    """
    if jnp.issubdtype(x.dtype, jnp.floating):
        integers = {2: np.int16, 4: np.int32, 8: np.int64}[x.dtype.itemsize]
        x = lax.bitcast_convert_type(x, integers) | integers(1)  # never the least
    return x > np.array(jnp.iinfo(x.dtype).min, x.dtype)
