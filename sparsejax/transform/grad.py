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
from sparsejax.transform.trace import Leaf, check_fun, observer, trace_call


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
    """`jax.value_and_grad`, with sparse gradients for tables that are read by rows.

    In a training step two lines change; the loss function does not::

      tx = sj.optim.lazy(tx)                                   # around optax's
      loss, grads = sj.value_and_grad(loss_fn)(params, batch)  # in place of jax's
      updates, state = tx.update(grads, state, params)
      params = optax.apply_updates(params, updates)

    For a loss `L` that reads a table `T` only through rows
    `T[i_1], ..., T[i_n]` the gradient is

      SelectedRows(rows=[i_1, ..., i_n], values=[dL/dT[i_1], ..., dL/dT[i_n]])

    one slot for each read, in the order of the reads. Duplicates are not merged;
    ids out of range are empty slots. Its `to_dense()` is what `jax.grad` gives.
    The number of slots is static (`jax.eval_shape` shows it), so new ids do not
    recompile.

    The gradient is sparse for a real float leaf of rank 2 or more that is read
    by rows and used in no other way, if a call reads at most half of its
    rows (beyond that a dense gradient is cheaper). How it is read does not
    matter: `sparsejax.lookup`, `embedding_bag`, `table[ids]`, `jnp.take`,
    `lax.dynamic_slice`, an embedding layer of flax or equinox, inside `jit`,
    `vmap`, `scan`, `cond`, `checkpoint` or `shard_map`. A stack of K tables,
    `[K, V, ...]` read at (k, v), has K * V rows: see `SelectedRows`.

    Every other leaf gets the dense gradient that `jax.grad` gives. A table
    also gets a dense gradient if it is multiplied as a whole (tied to an output
    layer), written to, changed inside a loop, or passed to a `custom_vjp`
    function. `sparsejax.explain(fun)(*args)` prints which leaves are sparse,
    where each is read, and why a leaf is not sparse.

    Args:
      fun: a function with a scalar float output, or `(scalar, aux)`. It is
        traced as under `jit`: differentiated arrays are tracers. All other arguments
        are passed through unchanged, but NumPy arrays as JAX arrays.
      argnums: int or tuple of ints, the arguments to differentiate; these are
        passed by position.
      has_aux: True if `fun` returns `(loss, aux)`; aux is any tree, and is not
        differentiated.
      tables: which leaves are tables. None decides as above. Or a tree prefix
        of the argument with True, False or None at its leaves (a dict needs all
        of its keys), or `callable(path, leaf) -> bool`: True requires
        SelectedRows, whatever fraction of the rows is read, and raises an error
        if that is impossible; False gives the dense gradient. With a tuple `argnums`
        it is a prefix of that tuple. `sparsejax.nn.tables` builds it for layers.

    Returns:
      A function of the same arguments that returns `(value, gradient)`, or
      `((value, aux), gradient)`. The gradient has the structure of the argument
      (a tuple of them for a tuple `argnums`), with a SelectedRows of the
      table's shape and dtype if it is sparse. A leaf that is itself a SelectedRows,
      as returned by `KVStore.pull`, gets one with the same rows.

    Raises:
      DensifyError: a leaf that `tables=` requires to be sparse is not only read by
        rows. The message shows the primitive and your source line. Leave the leaf out
        of `tables=`, read rows there, or register a rule for that primitive:
        `sparsejax.extend.register_rule`.
      TypeError: a leaf cannot be differentiated, the output is not a scalar, or the
        call has too few positional arguments for `argnums`.
      ValueError: `argnums` names an argument twice, or `tables=` is not a prefix of the
        argument's tree.

    Example:
      >>> import functools, jax, jax.numpy as jnp, optax, sparsejax as sj
      >>> def loss_fn(params, batch):
      ...     rows = params["table"][batch["ids"]]
      ...     return jnp.mean((rows @ params["w"] - batch["y"]) ** 2)
      >>> tx = sj.optim.lazy(optax.adam(0.1))
      >>> @functools.partial(jax.jit, donate_argnums=(0, 1))
      ... def train_step(params, state, batch):
      ...     loss, grads = sj.value_and_grad(loss_fn)(params, batch)
      ...     updates, state = tx.update(grads, state, params)
      ...     return optax.apply_updates(params, updates), state, loss
      >>> params = {"table": jnp.ones((100, 2)), "w": jnp.ones(2)}
      >>> batch = {"ids": jnp.array([7, 4, 7]), "y": jnp.zeros(3)}
      >>> state = tx.init(params)
      >>> params, state, loss = train_step(params, state, batch)
      >>> loss, params["table"][6:8, 0]  # row 6 was not read
      (Array(4., dtype=float32), Array([1. , 0.9], dtype=float32))

      The gradients:

      >>> loss, grads = sj.value_and_grad(loss_fn)(params, batch)
      >>> grads["table"]
      SelectedRows(rows=[7 4 7], values=float32[3,2], height=100, num_rows=3)
      >>> grads["w"].shape
      (2,)

      With an auxiliary output, and a sparse gradient required:

      >>> with_aux = lambda params, batch: (loss_fn(params, batch), batch["ids"].size)
      >>> tables = {"table": True, "w": None}
      >>> run = sj.value_and_grad(with_aux, has_aux=True, tables=tables)
      >>> (loss, count), grads = run(params, batch)
      >>> count, grads["table"].capacity
      (3, 3)

    References:
      PaddlePaddle, `embedding(is_sparse=True)`; TensorFlow, `IndexedSlices`.
      `jax.experimental.sparse.value_and_grad` is something else: it
      differentiates with respect to the stored elements of a sparse *input*.
    """
    numbers = check_fun(fun, argnums, has_aux)

    @functools.wraps(fun)
    def value_and_grad_fun(*args: Any, **kwargs: Any) -> Any:
        call = trace_call(fun, numbers, has_aux, tables, args, kwargs)
        plan = make_plan(call)
        if observer.value is not None:
            observer.value.leaves += call.leaves
        (loss, aux), grads = differentiate(plan)
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
    """`jax.grad`, with sparse gradients for tables that are read by rows.

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
    """`grad` of a function, from its `value_and_grad`."""

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
    """One SelectedRows from all reads of a table."""
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
