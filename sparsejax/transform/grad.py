"""`value_and_grad` and `grad`: JAX's, SelectedRows where a table is read by rows."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from sparsejax import _ids
from sparsejax._rows import SelectedRows
from sparsejax.transform.interpreter import Reads, Site, walk
from sparsejax.transform.plan import (
    Call,
    Leaf,
    arguments,
    loss_only,
    make_plan,
    trace_call,
)
from sparsejax.transform.table import TableRef, everywhere, lay_out, vary


def value_and_grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    tables: Any = None,
) -> Callable[..., Any]:
    """`jax.value_and_grad`, with the gradient of a table that is read by rows sparse.

    For a loss `L` that reads a table `T` only through rows `T[i_1], ..., T[i_n]`, the
    gradient is `SelectedRows(rows=[i_1, ..., i_n], values=[dL/dT[i_1], ...])`, the
    cotangent of each read; `to_dense()` of it is what `jax.grad` gives. Every other
    leaf gets exactly what `jax.grad` gives it.

    How the table is read does not matter: `sparsejax.lookup`, `table[ids]`,
    `jnp.take`, `lax.dynamic_slice`, a flax or equinox embedding layer, inside `jit`,
    `vmap`, `scan`, `cond`, `checkpoint` or `shard_map`. `sparsejax.explain` shows what
    was found.

    Args:
      fun: a function with a scalar float output, or `(scalar, aux)`. It is traced as
        under `jit`: array arguments are tracers, everything else (ints, strings,
        functions) is passed through as it is.
      argnums: int or tuple of ints, the positional arguments to differentiate.
      has_aux: whether `fun` returns `(loss, aux)`.
      tables: which leaves are tables. None decides by itself: a real float leaf of
        rank 2 or more whose every differentiated use is a read of rows, and of which at
        most a quarter of the rows is read (beyond that a dense gradient is cheaper). A
        tree prefix of bools (or None), or `callable(path, leaf) -> bool`, insists: True
        gives SelectedRows or an error, False gives the dense gradient. With a tuple
        `argnums` it is a prefix of that tuple.

    Returns:
      A function of the same arguments that returns `(value, gradient)`, or
      `((value, aux), gradient)`; the gradient has the structure of the argument (a
      tuple of them for a tuple `argnums`). Its capacities are static, and
      `jax.eval_shape` tells them. Duplicate ids are kept apart, in the order of the
      reads; ids out of range are empty slots. A leaf that is itself a SelectedRows gets
      a SelectedRows with the same rows.

    Raises:
      DensifyError: `tables=` insists on a leaf that is not read by rows alone.
      TypeError: a leaf that cannot be differentiated, or an output that is no scalar.

    Example:
      >>> import jax.numpy as jnp, sparsejax as sj
      >>> def loss(params, ids):
      ...     return jnp.sum(params["w"] * params["table"][ids])
      >>> params = {"table": jnp.ones((100, 2)), "w": jnp.array(3.0)}
      >>> value, grads = sj.value_and_grad(loss)(params, jnp.array([7, 4, 7]))
      >>> grads["table"]
      SelectedRows(rows=[7 4 7], values=float32[3,2], height=100, num_rows=3)
      >>> grads["w"]
      Array(6., dtype=float32, weak_type=True)

    References:
      PaddlePaddle, `embedding(is_sparse=True)`; TensorFlow, `IndexedSlices`. Not to be
      confused with `jax.experimental.sparse.value_and_grad`, which differentiates with
      respect to the stored elements of a sparse *input*.
    """
    caller = "sparsejax.value_and_grad"

    @functools.wraps(fun)
    def value_and_grad_fun(*args, **kwargs):
        call = trace_call(fun, argnums, has_aux, tables, args, kwargs, caller)
        sparse, run = make_plan(call)
        loss, aux, grads = _differentiate(call, sparse, run)
        grads = jax.tree_util.tree_unflatten(call.tree, grads)
        return ((loss, aux) if has_aux else loss), grads

    return value_and_grad_fun


def grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    tables: Any = None,
) -> Callable[..., Any]:
    """`jax.grad`, with the gradient of a table that is read by rows sparse.

    `grad(fun)(x) = value_and_grad(fun)(x)[1]`; see `sparsejax.value_and_grad`.

    Args:
      fun: as in `sparsejax.value_and_grad`.
      argnums: int or tuple of ints, the positional arguments to differentiate.
      has_aux: whether `fun` returns `(loss, aux)`.
      tables: as in `sparsejax.value_and_grad`.

    Returns:
      A function of the same arguments that returns the gradient, or `(gradient, aux)`.

    Raises:
      DensifyError: `tables=` insists on a leaf that is not read by rows alone.
      TypeError: a leaf that cannot be differentiated, or an output that is no scalar.

    Example:
      >>> import jax.numpy as jnp, sparsejax as sj
      >>> loss = lambda table: jnp.sum(table[jnp.array([5, 5])])
      >>> g = sj.grad(loss)(jnp.ones((50, 2)))
      >>> g.rows, g.coalesce().get(5)
      (Array([5, 5], dtype=int32), Array([2., 2.], dtype=float32))

    References:
      PaddlePaddle, SelectedRows; TensorFlow, IndexedSlices.
    """
    both = value_and_grad(fun, argnums, has_aux, tables=tables)

    @functools.wraps(fun)
    def grad_fun(*args, **kwargs):
        value, grads = both(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return grad_fun


def _differentiate(
    call: Call, tables: Sequence[Leaf], run: Any
) -> tuple[Any, Any, list[Any]]:
    """Loss, aux, and the gradient of every leaf."""
    dense = [leaf for leaf in call.leaves if not leaf.sparse]
    sites = run.sites
    deltas = [_zero_delta(site, tables[site.table]) for site in sites]

    def planted(dense_values, deltas):
        inputs = list(call.inputs)
        for leaf, value in zip(dense, dense_values):
            inputs[leaf.position] = value
        reads = Reads(deltas)
        args = arguments(call, tables, inputs)
        outs = walk(run, reads, call.jaxpr, args, loss_only(call))
        outs = [x.materialize() if isinstance(x, TableRef) else x for x in outs]
        return outs[0], (outs[1:], reads.ids)

    values = [call.inputs[leaf.position] for leaf in dense]
    (loss, (aux, ids)), (dense_grads, cotangents) = jax.value_and_grad(
        planted, argnums=(0, 1), has_aux=True
    )(values, deltas)

    grads: dict[int, Any] = {}
    for leaf, g in zip(dense, dense_grads):
        if isinstance(leaf.value, SelectedRows):
            g = SelectedRows(leaf.value.rows, g, leaf.value.height)
        grads[leaf.position] = g
    for number, leaf in enumerate(tables):
        mine = [k for k, site in enumerate(sites) if site.table == number]
        grads[leaf.position] = _package(
            leaf,
            [ids[k] for k in mine],
            [cotangents[k] for k in mine],
            [sites[k] for k in mine],
        )
    return (
        loss,
        call.unflatten_aux(aux),
        [grads[leaf.position] for leaf in call.leaves],
    )


def _zero_delta(site: Site, leaf: Leaf) -> jax.Array:
    shape = site.lead + jnp.shape(leaf.value)[1:]
    delta = vary(jnp.zeros(shape, jnp.result_type(leaf.value)), site.axes)
    return lay_out(delta, site.spec, site.mesh)


def _package(
    leaf: Leaf,
    ids: Sequence[jax.Array],
    cotangents: Sequence[jax.Array],
    sites: Sequence[Site],
) -> SelectedRows:
    """One SelectedRows of all the reads of a table."""
    height, *row = jnp.shape(leaf.value)
    if ids and all(site.kind for site in sites):
        dtype = jnp.result_type(leaf.value)
        return sites[0].kind.package(row, dtype, ids, cotangents, sites)
    if not ids:
        rows = jnp.zeros((0,), _ids.index_dtype(height))
        return SelectedRows(
            rows, jnp.zeros((0, *row), jnp.result_type(leaf.value)), height
        )
    rows = [everywhere(i).reshape(-1) for i in ids]
    values = [everywhere(c).reshape((-1, *row)) for c in cotangents]
    if len(rows) > 1:
        rows, values = [jnp.concatenate(rows)], [jnp.concatenate(values)]
    filled = _ids.in_range(rows[0], height)
    return SelectedRows(rows[0], _ids.zero_unless(filled, values[0]), height)
