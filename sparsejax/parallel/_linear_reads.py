"""linear_reads: a read of rows and its transpose, as a pair of primitives.

The read is linear in the table, its transpose in the cotangent, and each is the
transpose of the other. So derivatives of any order consist of these two.

Under `vmap` all arrays get a leading axis. For each such axis, outermost first, the
static `batched` says whether there is a separate table per batch element or one shared
table.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from sparsejax import _compat


def linear_reads(
    name: str, read: Callable[..., tuple[Any, ...]], add: Callable[..., jax.Array]
) -> tuple[Any, Any]:
    """The primitives `read_{name}` and `add_{name}`.

    Args:
      name: what is read.
      read: `(rows, ...) = read(values, positions, **static)`; only rows have a
        derivative.
      add: `add(cotangent, positions, **static)`, the transpose of rows in `values`.

    Returns:
      The two primitives; both also take the static `batched`, `()` outside of `vmap`.
    """

    def batched_read(values, positions, *, batched, **static):
        one = functools.partial(read, **static)
        for own_table in reversed(batched):
            one = jax.vmap(one, in_axes=(0 if own_table else None, 0))
        return one(values, positions)

    def batched_add(cotangent, positions, *, batched, **static):
        one = functools.partial(add, **static)
        for _ in batched:
            one = jax.vmap(one)
        shared = tuple(k for k, own_table in enumerate(batched) if not own_table)
        tables = one(cotangent, positions)
        return jnp.sum(tables, shared) if shared else tables

    def read_transpose(cotangent, like, _, positions, **static):
        del like
        return add_p.bind(cotangent, positions, **static)

    def add_transpose(table, like, _, positions, **static):
        del like
        return read_p.bind(table, positions, **static)[0]

    read_p = _compat.multilinear_primitive(
        f"read_{name}",
        batched_read,
        {},
        {0: read_transpose},
        _read_vmap,
        multiple_results=True,
    )
    add_p = _compat.multilinear_primitive(
        f"add_{name}", batched_add, {}, {0: add_transpose}, _add_vmap
    )
    return read_p, add_p


def _read_vmap(bind, args, axes, *, batched, **static):
    (values, positions), own_table = args, axes[0] is not None
    if own_table:
        values = jnp.moveaxis(values, axes[0], 0)
    size = _batch_size(args, axes)
    positions = _batch_in_front(positions, axes[1], size)
    return bind(values, positions, batched=(own_table, *batched), **static)


def _add_vmap(bind, args, axes, *, batched, **static):
    size = _batch_size(args, axes)
    args = [_batch_in_front(x, axis, size) for x, axis in zip(args, axes)]
    return bind(*args, batched=(True, *batched), **static)


def _batch_size(args, axes) -> int:
    return next(x.shape[axis] for x, axis in zip(args, axes) if axis is not None)


def _batch_in_front(x: jax.Array, axis: int | None, size: int) -> jax.Array:
    if axis is None:
        return jnp.broadcast_to(x, (size, *x.shape))
    return jnp.moveaxis(x, axis, 0)
