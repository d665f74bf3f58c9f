"""`value_and_grad` and `grad` as in JAX, with SelectedRows for tables read by rows."""

from __future__ import annotations

import collections
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Literal, ParamSpec, TypeVar, overload

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

from sparsejax import _arguments, _compat, _mesh
from sparsejax._arguments import PyTree
from sparsejax._rows import SelectedRows, indexing, with_slots
from sparsejax._rows.order_after import order_after
from sparsejax.transform.interpreter import Reads, Site
from sparsejax.transform.plan import Plan, make_plan
from sparsejax.transform.trace import Leaf, check_fun, trace_call


P = ParamSpec("P")
Aux = TypeVar("Aux")


@overload
def value_and_grad(
    fun: Callable[P, Any],
    argnums: int | Sequence[int] = 0,
    has_aux: Literal[False] = False,
    *,
    tables: PyTree = None,
) -> Callable[P, tuple[jax.Array, Any]]: ...
@overload
def value_and_grad(
    fun: Callable[P, tuple[Any, Aux]],
    argnums: int | Sequence[int] = 0,
    *,
    has_aux: Literal[True],
    tables: PyTree = None,
) -> Callable[P, tuple[tuple[jax.Array, Aux], Any]]: ...
@overload
def value_and_grad(
    fun: Callable[P, Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    tables: PyTree = None,
) -> Callable[P, tuple[Any, Any]]: ...
def value_and_grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    tables: PyTree = None,
) -> Callable[..., Any]:
    """Makes `jax.value_and_grad(fun)`, with sparse gradients for tables read by rows.

    For a loss `L` that reads a table `T` only through rows `T[i_1], ..., T[i_n]`, in
    any way (`table[ids]`, `jnp.take`, layers of flax, inside `jit`, `vmap`, `scan`):

      SelectedRows(rows=[i_1, ..., i_n], values=[dL/dT[i_1], ..., dL/dT[i_n]])

    one slot for each read; its `to_dense()` is what `jax.grad` gives. The gradient is
    sparse for a real float leaf of rank 2 or more, if at most half of its rows are
    read, fewer if rows are narrow. Every other leaf gets the gradient of `jax.grad`;
    `sparsejax.explain(fun)(*args)` says why.

    Args:
      fun: a function with a scalar float output, or `(scalar, aux)`, traced as under
        `jit`. Arguments that are not arrays are passed through unchanged.
      argnums: int or tuple of ints, the arguments to differentiate, by position.
      has_aux: True if `fun` returns `(loss, aux)`; aux is any tree.
      tables: which leaves are tables. None decides as above. Or a tree prefix of the
        argument (of the tuple for a tuple `argnums`) with True, False or None at its
        leaves, or `callable(path, leaf) -> bool`: True requires SelectedRows, False the
        dense gradient.

    Returns:
      A function of the same arguments that returns `(value, gradient)`, or
      `((value, aux), gradient)`. A leaf that is itself a SelectedRows, as returned by
      `KVStore.pull`, gets one with the same rows.

    Raises:
      DensifyError: a leaf that `tables=` requires to be sparse is not only read by
        rows. The message shows the primitive and your source line.
      TypeError, ValueError: as `jax.value_and_grad`, or `tables=` does not fit.

    Example:
      >>> import jax.numpy as jnp, optax, sparsejax as sj
      >>> loss_fn = lambda params, ids: jnp.sum(params["table"][ids] @ params["w"])
      >>> params = {"table": jnp.ones((100, 2)), "w": jnp.ones(2)}
      >>> loss, grads = sj.value_and_grad(loss_fn)(params, jnp.array([7, 4, 7]))
      >>> grads["table"]
      SelectedRows(rows=[7 4 7], values=float32[3,2], height=100, num_rows=3)
      >>> tx = sj.optim.lazy(optax.adam(0.1))
      >>> updates, state = tx.update(grads, tx.init(params), params)
      >>> optax.apply_updates(params, updates)["table"][6:8, 0]  # row 6 was not read
      Array([1. , 0.9], dtype=float32)
    """
    numbers = check_fun(fun, argnums, has_aux)

    @functools.wraps(fun)
    def value_and_grad_fun(*args: Any, **kwargs: Any) -> Any:
        call = trace_call(fun, numbers, has_aux, tables, args, kwargs)
        (loss, aux), grads = differentiate(make_plan(call))
        return ((loss, aux) if has_aux else loss), grads

    return value_and_grad_fun


@overload
def grad(
    fun: Callable[P, tuple[Any, Aux]],
    argnums: int | Sequence[int] = 0,
    *,
    has_aux: Literal[True],
    tables: PyTree = None,
) -> Callable[P, tuple[Any, Aux]]: ...
@overload
def grad(
    fun: Callable[P, Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    tables: PyTree = None,
) -> Callable[P, Any]: ...
def grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    tables: PyTree = None,
) -> Callable[..., Any]:
    """Makes `jax.grad(fun)`, with sparse gradients for tables read by rows.

    `grad(fun)(x)` is `value_and_grad(fun)(x)[1]`. See
    `sparsejax.value_and_grad` for what is sparse and for a training step, and
    `sparsejax.explain` for why a gradient is not sparse.

    Args:
      fun: a function with a scalar float output, or `(scalar, aux)`.
      argnums: int or tuple of ints, the arguments to differentiate; these are
        passed by position.
      has_aux: True if `fun` returns `(loss, aux)`.
      tables: which leaves are tables, as in `sparsejax.value_and_grad`: None, a
        tree prefix of bools, or `callable(path, leaf) -> bool`.

    Returns:
      A function of the same arguments that returns the gradient, or
      `(gradient, aux)`. The gradient has the structure of the argument, with a
      SelectedRows for each sparse leaf.

    Raises:
      DensifyError, TypeError, ValueError: as `sparsejax.value_and_grad`.

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
    return without_value(fun, both, has_aux)


def without_value(fun: Any, both: Callable[..., Any], has_aux: bool) -> Any:
    """Makes `grad` of a function from its `value_and_grad`."""

    @functools.wraps(fun)
    def grad_fun(*args: Any, **kwargs: Any) -> Any:
        value, grads = both(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return grad_fun


def differentiate(plan: Plan) -> tuple[tuple[Any, Any], Any]:
    """Returns `(loss, aux)`, and the gradient."""
    call, sites = plan.call, plan.run.sites
    dense = [leaf for leaf in call.leaves if not leaf.sparse]

    def planted(dense_values, deltas):
        inputs = list(call.flat.inputs)
        for leaf, value in zip(dense, dense_values):
            inputs[leaf.position] = value
        reads = Reads(deltas)
        loss, *aux = plan.walk(inputs, reads)
        return loss, (aux, reads.ids)

    deltas = plan.zero_deltas()
    values = [call.flat.inputs[leaf.position] for leaf in dense]
    run = jax.value_and_grad(planted, argnums=(0, 1), has_aux=True)
    try:
        (loss, (aux, ids)), (dense_grads, cotangents) = run(values, deltas)
    except jax.errors.UnexpectedTracerError as error:
        raise jax.errors.UnexpectedTracerError(
            "a custom_vjp or custom_jvp function closes over a value that the loss "
            "computed, and JAX calls its derivative rule when the loss is no longer "
            "traced. Pass the value to the function as an argument, as "
            "jax.closure_convert does."
        ) from error
    # Order loss and aux before the cotangents: an update in place may follow these, and
    # XLA copies the table if anything else reads it later. Compute small cotangents
    # first: they still need rows whose buffer the large one can reuse (skip-gram: 32
    # MiB of temporaries, not 41).
    if cotangents:
        last, size_of = order_after(loss, aux), lambda k: cotangents[k].size
        by_size = sorted(range(len(cotangents)), key=size_of)
        for _, group in itertools.groupby(by_size, size_of):
            raw = {k: cotangents[k] for k in group}
            for k, x in raw.items():
                cotangents[k] = order_after(x, [last])
            last = order_after(last, list(raw.values()))

    grads: dict[int, Any] = {}
    for leaf, g in zip(dense, dense_grads):
        if isinstance(leaf.value, SelectedRows):
            g = with_slots(leaf.value, leaf.value.rows, g)
        grads[leaf.position] = g
    reads_of = collections.defaultdict(list)
    for k, site in enumerate(sites):
        reads_of[site.table].append(k)
    for leaf in plan.tables:
        mine = reads_of[leaf.position]
        grads[leaf.position] = _package(
            leaf,
            [ids[k] for k in mine],
            [cotangents[k] for k in mine],
            [sites[k] for k in mine],
        )
    in_order = [grads[leaf.position] for leaf in call.leaves]
    return call.flat.unflatten([loss, *aux]), call.tree.unflatten(in_order)


def _package(
    leaf: Leaf,
    ids: Sequence[jax.Array],
    cotangents: Sequence[jax.Array],
    sites: Sequence[Site],
) -> SelectedRows:
    """Makes one SelectedRows of all reads of a table."""
    height, row, stack = leaf.height, leaf.row_shape, leaf.stack
    dtype = jnp.result_type(leaf.value)
    if not ids:
        rows = jnp.zeros((0,), _arguments.index_dtype(height))
        return SelectedRows(rows, jnp.zeros((0, *row), dtype), height, stack)
    if all(site.kind for site in sites):
        return sites[0].kind.package(row, dtype, ids, cotangents, sites)
    all_rows = [_mesh.replicate(i).reshape(-1) for i in ids]
    all_values = [
        indexing.merge_axes(_mesh.replicate(c), c.ndim - len(row)) for c in cotangents
    ]
    rows, values = (
        jnp.concatenate(x) if len(x) > 1 else x[0] for x in (all_rows, all_values)
    )
    mesh = jax.typeof(leaf.value).sharding.mesh
    if AxisType.Explicit in mesh.axis_types and not _compat.has_mesh(rows):
        # A conditional's rows have no mesh; XLA would choose how they leave `jit`.
        rows, values = _mesh.on_mesh(rows, mesh), _mesh.on_mesh(values, mesh)
    values = indexing.zero_unless(indexing.in_range(rows, height), values)
    return SelectedRows(rows, values, height, stack)
