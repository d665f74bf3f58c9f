"""A check for your tests: a model trained by sparsejax against plain JAX and optax."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from sparsejax import _arguments, _rows, optim, transform


# The default of `rtol`, by the narrowest type in the dense program.
_RTOL = {"bf16[": 5e-2, " f16[": 1e-2, ":f16[": 1e-2}


def assert_equals_dense(
    loss: Callable[..., Any],
    tx: optax.GradientTransformation,
    params: _arguments.PyTree,
    batches: Iterable[Any],
    exact: bool = False,
    *,
    has_aux: bool = False,
    tables: _arguments.PyTree = None,
    rtol: float | None = None,
    atol: float = 0.0,
) -> None:
    """Trains a model by sparsejax and by plain JAX, and asserts that both are equal.

    For each batch it compares the loss and the gradient of `sparsejax.value_and_grad`
    with `jax.value_and_grad`, and then the parameters and the state of `lazy(tx)` with
    `tx` on dense gradients. Rows that the batch read must be as after the dense step;
    all other rows, of tables and of the state that follows them, must keep their bits.
    Each step starts on both sides from what `lazy` returned. With `exact=True` all
    rows, flushed, must be as in dense training from the start.

    Two numbers are equal if they differ by at most `atol + rtol * m` and the
    rounding of their dtype. Here m is the largest magnitude in the gradient's leaf, and
    for parameters and state the largest change in the leaf.

    Args:
      loss: `loss(params, batch)`, a scalar float, or `(scalar, aux)`. A batch that is a
        tuple is several arguments, `loss(params, *batch)`; a NamedTuple is one.
      tx: the optax transformation, not wrapped. Its update gets the extra argument
        `value`, the loss.
      params: a tree with the tables; leaves that are not arrays of floats are
        constants. Pass a flax.nnx module as the state that `nnx.split` returns.
      batches: one batch for each step. Three or four steps see state that goes wrong.
      exact: True compares `exact` instead of `lazy`.
      has_aux: True if `loss` returns `(loss, aux)`. aux is not compared.
      tables: as in `sparsejax.value_and_grad`.
      rtol: by default 1e-5, or 0.01 if the dense program has float16, or 0.05 if it has
        bfloat16.
      atol: an absolute tolerance in addition.

    Raises:
      AssertionError: the two differ. The message has the step, counted from 0, the
        first leaf that differs, its row, and both values.
      ValueError: there is no batch, `params` has no array of floats, or no gradient is
        sparse, so that both sides would run the same program.

    Example:
      >>> import jax.numpy as jnp, optax, sparsejax as sj
      >>> params = {"table": jnp.ones((100, 2)), "w": jnp.ones(2)}
      >>> def loss_fn(params, ids, y):
      ...     return jnp.mean((params["table"][ids] @ params["w"] - y) ** 2)
      >>> batches = [(jnp.array([7, 4, 7]), jnp.ones(3)), (jnp.array([4]), jnp.ones(1))]
      >>> sj.testing.assert_equals_dense(loss_fn, optax.adam(0.1), params, batches)
    """
    fun, params = _trained(loss, params)
    wrapped: Any = optim.exact(tx, tables=tables) if exact else optim.lazy(tx)
    plain = optax.with_extra_args_support(tx)
    options: Any = dict(has_aux=has_aux, tables=tables)
    both: Any = (
        optim.exact_value_and_grad(fun, wrapped, **options)
        if exact
        else transform.value_and_grad(fun, **options)
    )

    @jax.jit
    def ours(params, state, batch):
        if exact:
            (value, grads), params, state = both(params, state, *batch)
        else:
            value, grads = both(params, *batch)
        value = value[0] if has_aux else value
        updates, state = wrapped.update(grads, state, params, value=value)
        new = optax.apply_updates(params, updates)
        flushed = wrapped.flush(new, state) if exact else (new, state)
        return value, grads, (new, state), flushed

    @jax.jit
    def dense_gradient(params, batch):
        value, grads = jax.value_and_grad(fun, has_aux=has_aux)(params, *batch)
        return value[0] if has_aux else value, grads

    @jax.jit
    def dense_update(params, state, grads, value):
        updates, state = plain.update(grads, state, params, value=value)
        return optax.apply_updates(params, updates), state

    start = dense = params, tx.init(params)
    carry = params, wrapped.init(params)
    was_sparse, step = False, -1
    for step, batch in enumerate(batches):
        batch = batch if type(batch) is tuple else (batch,)
        value, grads, carry, (new, state) = ours(*carry, batch)
        is_leaf = _rows.is_selected_rows
        as_dense = lambda g: g.to_dense() if _rows.is_selected_rows(g) else g
        given = jax.tree.map(as_dense, grads, is_leaf=is_leaf)
        if rtol is None:
            program = str(jax.make_jaxpr(dense_gradient)(dense[0], batch))
            program += str(jax.make_jaxpr(dense_update)(*dense, given, value))
            rtol = max([1e-5, *(r for text, r in _RTOL.items() if text in program)])
        rounded = step + 1 if exact else 1
        compare = functools.partial(_compare, step, rtol, atol, rounded)
        expected = dense_gradient(dense[0], batch)
        compare("the loss", value, expected[0])
        compare("the gradient of params", given, expected[1])
        before, after = start if exact else dense, dense_update(*dense, given, value)
        unread = None, None
        if not exact:
            unread = _unread(tx, params, jax.tree.leaves(grads, is_leaf=is_leaf))
        state = state.inner if exact else state
        compare("params", new, after[0], before[0], unread[0])
        compare("state", state, after[1], before[1], unread[1])
        dense = after if exact else (new, state)
        sparse = map(_rows.is_selected_rows, jax.tree.leaves(grads, is_leaf=is_leaf))
        was_sparse = was_sparse or any(sparse)
    if step < 0:
        raise ValueError("batches must have at least one batch, got none.")
    if not was_sparse:
        raise ValueError(
            "no gradient is sparse, so both sides run the same program. "
            "print(sparsejax.explain(loss)(params, batch)) says why; if a batch reads "
            "more than half of a small table, require its gradient by tables=."
        )


def _trained(loss: Callable, params: Any) -> tuple[Callable, Any]:
    """Makes the loss a function of the arrays of floats; these, None elsewhere."""
    leaves, tree = jax.tree.flatten(params)
    is_trained = [
        isinstance(x, (jax.Array, np.ndarray)) and _arguments.is_float_array(x)
        for x in leaves
    ]
    if not any(is_trained):
        raise ValueError(
            f"params has no array of floats, got {_arguments.show(params)}. A "
            "flax.nnx module is passed as its state: graph, params = nnx.split(model), "
            "with nnx.merge(graph, params) in the loss."
        )

    def fun(params, *batch):
        given = tree.flatten_up_to(params)
        new = [x if t else old for x, t, old in zip(given, is_trained, leaves)]
        return loss(tree.unflatten(new), *batch)

    trained = [jnp.asarray(x) if t else None for x, t in zip(leaves, is_trained)]
    return fun, tree.unflatten(trained)


def _unread(tx: Any, params: Any, grads: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Finds the rows not read of each leaf of parameters and of state; None for all.

    A leaf of state follows a table if it has one row more when the table has.
    """
    leaves, tree = jax.tree.flatten(params)
    shapes = lambda leaves: [
        x.shape
        for x in jax.tree.leaves(jax.eval_shape(tx.init, tree.unflatten(leaves)))
    ]
    of_params: list[Any] = [None] * len(leaves)
    of_state: list[Any] = [None] * len(shapes(leaves))
    for i, g in enumerate(grads):
        if _rows.is_selected_rows(g):
            rows = np.asarray(g.rows)
            mask = np.ones(g.height, bool)
            mask[rows[(rows >= 0) & (rows < g.height)]] = False
            of_params[i] = mask = mask.reshape(*g.stack, -1)
            first, *row_shape = leaves[i].shape
            more = jax.ShapeDtypeStruct((first + 1, *row_shape), leaves[i].dtype)
            taller = shapes([*leaves[:i], more, *leaves[i + 1 :]])
            pairs = enumerate(zip(shapes(leaves), taller))
            of_state = [mask if a != b else of_state[k] for k, (a, b) in pairs]
    return of_params, of_state


def _compare(
    step: int,
    rtol: float,
    atol: float,
    rounded: int,
    what: str,
    ours: Any,
    dense: Any,
    before: Any = None,
    unread: Sequence[Any] | None = None,
) -> None:
    """Raises an AssertionError at the first leaf that differs.

    Args:
      step: the number of the batch, for the message.
      rtol, atol: see `assert_equals_dense`.
      rounded: after how many steps the leaves are compared: each rounds them.
      what: what the trees are, for the message.
      ours, dense: the trees.
      before: what they were before the step; None for zeros.
      unread: for each leaf, True at rows that must be as before, or None.
    """
    paths, structure = jax.tree_util.tree_flatten_with_path(ours)
    old = [0] * len(paths) if before is None else jax.tree.leaves(before)
    masks = unread or [None] * len(paths)
    leaves = zip(paths, structure.flatten_up_to(dense), old, masks, strict=True)
    for (path, a), b, c, mask in leaves:
        where = f"step {step}: {what}{jax.tree_util.keystr(path)}"
        a, b, c = map(_as_numpy, (a, b, c))
        # The state keeps its dtype under lazy, although optax may promote it.
        b = b.astype(a.dtype) if what == "state" else b
        assert (a.shape, a.dtype) == (b.shape, b.dtype), (
            f"{where} is {a.dtype}{list(a.shape)} by sparsejax and "
            f"{b.dtype}{list(b.shape)} by plain JAX."
        )
        must_stay = np.zeros(a.shape, bool)
        if mask is not None:
            must_stay |= mask.reshape(*mask.shape, *[1] * (a.ndim - mask.ndim))
            b = np.where(must_stay, c, b).astype(b.dtype)
        differs, allowed = a != b, ""
        if jnp.issubdtype(a.dtype, jnp.inexact):
            is_complex = jnp.issubdtype(a.dtype, jnp.complexfloating)
            wide = complex if is_complex else float
            x, y, z = a.astype(wide), b.astype(wide), c.astype(wide)
            change = np.abs(y - z)
            most = np.max(change, initial=0.0, where=np.isfinite(change))
            tolerance = atol + rtol * most
            rounding = 4 * rounded * float(jnp.finfo(a.dtype).eps) * np.abs(y)
            with np.errstate(invalid="ignore"):  # inf - inf
                close = np.abs(x - y) <= tolerance + rounding
            close = close & np.isfinite(y) | (x == y) | (np.isnan(x) & np.isnan(y))
            differs, allowed = ~close, f" by more than {tolerance:.2g}"
        bits = lambda x: np.ascontiguousarray(x).reshape(*x.shape, 1).view(np.uint8)
        differs |= must_stay & np.any(bits(a) != bits(b), -1)
        if differs.any():
            first = tuple(map(int, np.argwhere(differs)[0]))
            at = f" at row {first[0]}" if first else ""
            at += f", column {', '.join(map(str, first[1:]))}" if first[1:] else ""
            hint = " The batch did not read this row, so it must not change."
            raise AssertionError(
                f"{where} differs{at}: {a[first]} by sparsejax, {b[first]} by plain "
                f"JAX. {np.count_nonzero(differs)} of {differs.size} numbers differ"
                f"{allowed}.{hint * bool(must_stay[first])}"
            )


def _as_numpy(x: Any) -> np.ndarray:
    if hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.asarray(x)
