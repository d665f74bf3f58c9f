"""dense_gradient: the identity, of which `sparsejax.grad` knows no rule.

A table that goes through it is used as a whole, so it gets the gradient of `jax.grad`
however few rows are read. XLA sees nothing of it.
"""

import jax
from jax import lax

from sparsejax import _arguments, _compat


dense_gradient_p = _compat.linear_primitive("dense_gradient", lambda x: x, {})


def dense_gradient(x: jax.Array) -> jax.Array:
    """`x`, whose gradient stays an array.

    Where `tables=` insists on a sparse one, the DensifyError names this primitive.
    """
    if _arguments.is_concrete(x):  # nobody differentiates: no need of a copy
        return x
    if _compat.is_laid_out(x):  # its type says more than the primitive's can
        return lax.pad(x, _arguments.scalar(0, x), [(0, 0, 0)] * x.ndim)
    return dense_gradient_p.bind(x)
