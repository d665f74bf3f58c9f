"""forward: runs a function that reads ShardedTables as it would read arrays.

`sparsejax.value_and_grad` does the same for a loss. The function is traced with an
array instead of each table, and its program is walked: reads of rows become
exchanges of rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from sparsejax.transform.forward import run_forward
from sparsejax.transform.trace import check_fun


P = ParamSpec("P")
T = TypeVar("T")


def forward(fun: Callable[P, T]) -> Callable[P, T]:
    """Makes JAX's functions read rows of ShardedTables outside of `value_and_grad`.

    `jnp.take(table, ids, axis=0)`, and with it the embedding layers of flax, work on a
    ShardedTable inside of `sparsejax.value_and_grad`. `forward` is for calls outside of
    it: evaluation and serving. (`table[ids]`, `sparsejax.lookup`, `embedding_bag` and
    the layers of `sparsejax.nn` need neither.) Combine it with `jit` as
    `jax.jit(forward(fun))`.

    Args:
      fun: a function of trees of arrays and ShardedTables, or that closes over them. It
        is traced as under `jit`, except that arguments which are not arrays (ints,
        strings, functions) are passed through unchanged.

    Returns:
      A function of the same arguments that returns the same.

    Raises:
      TypeError: `fun` is not a function.
      DensifyError: it uses a whole table. The message shows the operation and its
        source line.

    Example:
      >>> import jax, jax.numpy as jnp, sparsejax as sj
      >>> mesh = jax.make_mesh((1,), ("x",), devices=jax.devices()[:1])
      >>> table = sj.parallel.shard_rows(jnp.arange(6.0).reshape(3, 2), mesh, "x")
      >>> take = lambda table, ids: jnp.take(table, ids, axis=0)
      >>> sj.parallel.forward(take)(table, jnp.array([2, 0]))
      Array([[4., 5.],
             [0., 1.]], dtype=float32)

    References:
      Quax, `quaxify`, which lets functions of JAX take types of array that are not its.
    """
    check_fun(fun)
    call: Callable[..., Any] = fun

    @functools.wraps(fun)
    def forward_fun(*args: P.args, **kwargs: P.kwargs) -> Any:
        return run_forward(call, *args, **kwargs)

    return forward_fun
