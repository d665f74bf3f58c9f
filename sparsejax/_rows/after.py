"""after: makes gradients wait for other results, so that not all are in memory at once.

A loss reads rows `[n, D]`, and its own value and the gradients of dense weights need
them. Left to itself, XLA computes the cotangents of the rows, which are as large,
before those, and so has both in memory. Temporaries above 32 MiB are new pages in every
run of a program on a CPU, which takes longer than the rest of a step
(benchmarks/NOTES.md).
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparsejax import _arguments, _compat


def after(values: jax.Array, others: Sequence[jax.Array]) -> jax.Array:
    """`values`; on a CPU, computed after `others`. Outside of `jit` just `values`.

    Args:
      values: floating-point, of any shape.
      others: arrays of any types and shapes.
    """
    if _arguments.is_concrete(values):
        return values
    others = [x for x in others if x.size and _is_real(x.dtype)]
    if not others or any(map(_compat.is_laid_out, (values, *others))):
        return values
    return _after_p.bind(values, *others)[0]


def _is_real(dtype: Any) -> bool:
    kinds = jnp.floating, jnp.integer, jnp.bool_
    return any(jnp.issubdtype(dtype, kind) for kind in kinds)


def _identity(values, *others):
    return [values]


def _times_one(values, *others):
    """Times a factor that is one, which XLA cannot know without the others."""
    bits = np.int32(0)
    for x in others:
        first = lax.slice(x, (0,) * x.ndim, (1,) * x.ndim).reshape(())
        bits ^= lax.bitcast_convert_type(first.astype(jnp.float32), jnp.int32)
    one = jnp.where((bits | np.int32(1)) == 0, np.float32(2), np.float32(1))
    return [values * one.astype(values.dtype)]


_after_p = _compat.platform_primitive(
    "after", _identity, {"cpu": _times_one}, lambda x, *_: [(x.shape, x.dtype)]
)
