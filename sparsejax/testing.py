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
    fun, params = _trained(loss, params, has_aux)
    wrapped: Any = optim.exact(tx, tables=tables) if exact else optim.lazy(tx)
    plain = optax.with_extra_args_support(tx)
    both: Any = (
        optim.exact_value_and_grad(fun, wrapped, tables=tables)
        if exact
        else transform.value_and_grad(fun, tables=tables)
    )

    @jax.jit
    def ours(params, state, batch):
        if exact:
            (value, grads), params, state = both(params, state, *batch)
        else:
            value, grads = both(params, *batch)
        updates, state = wrapped.update(grads, state, params, value=value)
        new = optax.apply_updates(params, updates)
        flushed = wrapped.flush(new, state) if exact else (new, state)
        return value, grads, (new, state), flushed

    @jax.jit
    def dense_update(params, state, grads, value):
        updates, state = plain.update(grads, state, params, value=value)
        return optax.apply_updates(params, updates), state

    dense_gradient = jax.jit(jax.value_and_grad(fun))
    start = before = params, tx.init(params)
    carry = params, wrapped.init(params)
    is_sparse, step = False, -1
    for step, batch in enumerate(batches):
        batch = batch if type(batch) is tuple else (batch,)
        value, grads, carry, (new, state) = ours(*carry, batch)
        state = state.inner if exact else state
        leaves, tree = jax.tree.flatten(grads, is_leaf=_rows.is_selected_rows)
        is_sparse |= any(map(_rows.is_selected_rows, leaves))
        unread = (None, None) if exact else _unread(tx, params, leaves)
        grads = [g.to_dense() if _rows.is_selected_rows(g) else g for g in leaves]
        grads = tree.unflatten(grads)
        if rtol is None:
            program = str(jax.make_jaxpr(dense_gradient)(before[0], *batch))
            program += str(jax.make_jaxpr(dense_update)(*before, grads, value))
            rtol = max([1e-5, *(r for text, r in _RTOL.items() if text in program)])
        compare = functools.partial(_compare, step, rtol, atol, exact)
        expected = dense_gradient(before[0], *batch)
        compare("the loss", value, expected[0])
        compare("the gradient of params", grads, expected[1])
        after = dense_update(*before, grads, value)
        compare("params", new, after[0], start[0] if exact else before[0], unread[0])
        compare("state", state, after[1], start[1] if exact else before[1], unread[1])
        before = after if exact else (new, state)
    if step < 0:
        raise ValueError("batches must have at least one batch, got none.")
    if not is_sparse:
        raise ValueError(
            "no gradient is sparse, and sparsejax.explain(loss)(params, batch) says "
            "why. If a batch reads most rows, require a sparse gradient by tables=."
        )


def _trained(loss: Callable, params: Any, has_aux: bool) -> tuple[Callable, Any]:
    """Makes the loss a scalar function of the arrays of floats; None elsewhere."""
    leaves, tree = jax.tree.flatten(params)
    is_trained = [
        _arguments.is_array(x) and _arguments.is_float_array(x) for x in leaves
    ]
    if not any(is_trained):
        raise ValueError(
            f"params has no array of floats, got {_arguments.show(params)}. Pass a "
            "flax.nnx module as its state, with nnx.merge(graph, params) in the loss."
        )

    def fun(params, *batch):
        pairs = zip(is_trained, tree.flatten_up_to(params), leaves)
        out = loss(tree.unflatten(x if t else old for t, x, old in pairs), *batch)
        return out[0] if has_aux else out

    trained = [jnp.asarray(x) if t else None for x, t in zip(leaves, is_trained)]
    return fun, tree.unflatten(trained)


def _unread(tx: Any, params: Any, grads: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Finds the rows not read of each leaf of parameters and of state; None for all.

    A leaf of state follows a table if it has one row more when the table has.
    """
    leaves, tree = jax.tree.flatten(params)

    def shapes(leaves):
        state = jax.eval_shape(tx.init, tree.unflatten(leaves))
        return [x.shape for x in jax.tree.leaves(state)]

    of_params: list[Any] = [None] * len(leaves)
    of_state: list[Any] = [None] * len(shapes(leaves))
    for i, g in enumerate(grads):
        if not _rows.is_selected_rows(g):
            continue
        mask = np.ones(g.height + 1, bool)
        mask[np.asarray(g.safe_rows())] = False
        of_params[i] = mask = mask[:-1].reshape(*g.stack, -1)
        height, *row_shape = leaves[i].shape
        taller = jax.ShapeDtypeStruct((height + 1, *row_shape), leaves[i].dtype)
        pairs = zip(shapes(leaves), shapes([*leaves[:i], taller, *leaves[i + 1 :]]))
        of_state = [mask if x != y else old for (x, y), old in zip(pairs, of_state)]
    return of_params, of_state


def _compare(
    step: int,
    rtol: float,
    atol: float,
    exact: bool,
    what: str,
    ours: Any,
    dense: Any,
    before: Any = None,
    unread: Sequence[Any] | None = None,
) -> None:
    """Raises an AssertionError at the first leaf that differs.

    Args:
      step: the number of the batch, for the message.
      rtol, atol, exact: see `assert_equals_dense`.
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
        is_inexact = jnp.issubdtype(a.dtype, jnp.inexact)
        x, y, z = (v.astype(np.result_type(v.dtype, float)) for v in (a, b, c))
        change = np.abs(y - z)
        most = np.max(change, initial=0.0, where=np.isfinite(change))
        tolerance = (atol + rtol * most) * is_inexact
        # Each step of exact rounds; lazy starts from the same numbers as plain JAX.
        rounding = 4 * (step + 1 if exact else 1)
        rounding *= float(jnp.finfo(a.dtype).eps) if is_inexact else 0
        differs = ~np.isclose(x, y, rounding, tolerance, equal_nan=True)
        bits = lambda v: np.ascontiguousarray(v).reshape(*v.shape, 1).view(np.uint8)
        differs |= must_stay & np.any(bits(a) != bits(b), -1)
        if differs.any():
            first = tuple(map(int, np.argwhere(differs)[0]))
            row, *column = map(str, first or [""])
            at = f" at row {row}" * bool(first)
            at += f", column {', '.join(column)}" * bool(column)
            hint = " The batch did not read this row, so it must not change."
            raise AssertionError(
                f"{where} differs{at}: {a[first]} by sparsejax, {b[first]} by plain "
                f"JAX. {np.count_nonzero(differs)} of {differs.size} numbers differ "
                f"by more than {tolerance:.2g}.{hint * bool(must_stay[first])}"
            )


def _as_numpy(x: Any) -> np.ndarray:
    if hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.asarray(x)
