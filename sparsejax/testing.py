"""A check for your tests: a model trained by sparsejax against plain JAX and optax."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from sparsejax import _arguments, _rows, optim, transform
from sparsejax.optim import _checks as checks, _trees as trees
from sparsejax.optim._exact import exact as _exact
from sparsejax.optim._lazy import callables, stacks, state_leaves


_CALL = "sparsejax.testing.assert_equals_dense"

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

    For each batch it compares, in this order,

      loss, gradients    sparsejax.value_and_grad    with jax.value_and_grad
      params, state      sparsejax.optim.lazy(tx)    with tx on the dense gradients

    Both sides are jitted. With `lazy`, the rows that the batch read must be as after
    the dense step; all other rows must keep their bits, in the table and in the state
    that follows it. If `is_lazy_exact(tx)`, this is dense training itself. Each step
    starts on both sides from what `lazy` returned, and `tx` gets sparsejax's gradients
    as arrays, so rounding does not add up. A norm after moments, as in
    `chain(adam, clip_by_global_norm)`, is reported as a difference, because `lazy`
    takes it over the rows read only.

    With `exact=True` it compares `exact_value_and_grad` and `exact(tx)` instead: all
    rows, flushed, must be as in dense training from the start.

    Two numbers are equal if they differ by at most `atol + rtol * m` and the
    rounding of their dtype. Here m is the largest magnitude in the gradient's leaf, and
    for parameters and state the largest change in the leaf.

    Args:
      loss: `loss(params, batch)`, a scalar float, or `(scalar, aux)`. A batch that is a
        tuple is several arguments, `loss(params, *batch)`; a NamedTuple is one.
      tx: the optax transformation that you wrap by `lazy` or `exact`. Its update gets
        the extra argument `value`, the loss.
      params: a tree with the tables: a dict, the variables of a flax.linen module, an
        equinox module, the state that `flax.nnx.split` returns. Leaves that are not
        arrays of floats are constants.
      batches: one batch for each step. Three or four steps are enough to see state that
        goes wrong; ids should repeat within a batch and between batches.
      exact: True compares `exact` in place of `lazy`.
      has_aux: True if `loss` returns `(loss, aux)`. aux is not compared.
      tables: as in `sparsejax.value_and_grad`.
      rtol: by default 1e-5, or 0.01 if the dense program has float16, or 0.05 if it has
        bfloat16.
      atol: an absolute tolerance in addition.

    Raises:
      AssertionError: the two differ. The message has the step, counted from 0, the
        first leaf that differs, its row, and both values.
      TypeError: `tx` is already wrapped by `exact`, or an argument has a wrong type.
      ValueError: there is no batch, `params` has no array of floats, or no gradient is
        sparse, so that both sides would run the same program.

    Example:
      >>> import jax.numpy as jnp, optax, sparsejax as sj
      >>> params = {"table": jnp.ones((100, 2)), "w": jnp.ones(2)}
      >>> def loss_fn(params, ids, y):
      ...     return jnp.mean((params["table"][ids] @ params["w"] - y) ** 2)
      >>> batches = [(jnp.array([7, 4, 7]), jnp.ones(3)), (jnp.array([4]), jnp.ones(1))]
      >>> sj.testing.assert_equals_dense(loss_fn, optax.adam(0.1), params, batches)
      >>> sj.testing.assert_equals_dense(
      ...     loss_fn, optax.adam(0.1), params, batches, exact=True
      ... )

    References:
      chex, `assert_trees_all_close`; `jax.test_util.check_grads`.
    """
    if not callable(loss):
        raise _arguments.wrong_type(
            _CALL,
            "loss",
            "a function",
            _arguments.kind_of(loss),
            f"Write {_CALL}(loss_fn, tx, params, batches).",
        )
    if isinstance(tx, _exact.Exact):
        raise TypeError(
            f"{_CALL}: tx must be the optax transformation itself, got the result of "
            "sparsejax.optim.exact. Pass what you gave to exact, and exact=True."
        )
    checks.check_transformation(_CALL, tx, "optax.adam(1e-3)")
    _arguments.check_bool("exact", exact)
    _arguments.check_bool("has_aux", has_aux)
    fun, params = _trained(loss, params)
    wrapped: Any = optim.exact(tx, tables=tables) if exact else optim.lazy(tx)
    plain = optax.with_extra_args_support(tx)
    both: Any = (
        optim.exact_value_and_grad(fun, wrapped, has_aux=has_aux, tables=tables)
        if exact
        else transform.value_and_grad(fun, has_aux=has_aux, tables=tables)
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
        whole, at = wrapped.flush(new, state) if exact else (new, state)
        return value, grads, (new, state), (whole, at.inner if exact else at)

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
        value, grads, carry, found = ours(*carry, batch)
        given = jax.tree.map(
            lambda g: g.to_dense() if _rows.is_selected_rows(g) else g,
            grads,
            is_leaf=_rows.is_selected_rows,
        )
        if rtol is None:
            program = str(jax.make_jaxpr(dense_gradient)(dense[0], batch))
            program += str(jax.make_jaxpr(dense_update)(*dense, given, value))
            rtol = max([1e-5, *(r for text, r in _RTOL.items() if text in program)])
        compare = _Comparison(step, rtol, atol, step + 1 if exact else 1)
        want = dense_gradient(dense[0], batch)
        compare("the loss", value, want[0])
        compare("the gradient of params", given, want[1])
        after = dense_update(*dense, given, value)
        if exact:
            compare.step(found, after, start)
        else:
            _check_lazy_step(compare, tx, dense, after, grads, found)
        dense = after if exact else found
        was_sparse = was_sparse or bool(_rows_read(grads))
    if step < 0:
        raise _arguments.wrong(
            _CALL, "batches", "an iterable with at least one batch", "none"
        )
    if not was_sparse:
        raise ValueError(
            f"{_CALL}: no gradient is sparse, so both sides run the same program. "
            "print(sparsejax.explain(loss)(params, batch)) says why; if a batch reads "
            "more than half of a small table, require its gradient by tables=."
        )


# ------------------------------------------------------------------ parameters


def _trained(loss: Callable, params: Any) -> tuple[Callable, Any]:
    """The loss as a function of the arrays of floats, and these: None elsewhere."""
    leaves, tree = jax.tree_util.tree_flatten_with_path(
        params, is_leaf=_rows.is_selected_rows
    )
    for path, leaf in leaves:
        if _rows.is_selected_rows(leaf):
            raise checks.pulled_table(_CALL, f"params{jax.tree_util.keystr(path)}")
    leaves = [leaf for _, leaf in leaves]
    is_trained = [
        isinstance(x, (jax.Array, np.ndarray)) and jnp.issubdtype(x.dtype, jnp.inexact)
        for x in leaves
    ]
    if not any(is_trained):
        raise ValueError(
            f"{_CALL}: params has no array of floats, got {_arguments.show(params)}. "
            "A flax.nnx module is passed as its state: graph, params = "
            "nnx.split(model), with nnx.merge(graph, params) in the loss."
        )

    def fun(params, *batch):
        given = tree.flatten_up_to(params)
        new = [x if t else old for x, t, old in zip(given, is_trained, leaves)]
        return loss(tree.unflatten(new), *batch)

    trained = [jnp.asarray(x) if t else None for x, t in zip(leaves, is_trained)]
    return fun, tree.unflatten(trained)


# ------------------------------------------------------------------ rows


def _rows_read(grads: Any) -> dict[int, np.ndarray]:
    """For each leaf with a SelectedRows gradient, True at the rows that were read."""
    found = {}
    for i, g in enumerate(trees.flatten(grads)[0]):
        if _rows.is_selected_rows(g):
            rows = np.asarray(g.rows)
            found[i] = np.zeros(g.height, bool)
            found[i][rows[(rows >= 0) & (rows < g.height)]] = True
            found[i] = found[i].reshape(*g.stack, -1)
    return found


def _check_lazy_step(
    compare: _Comparison, tx: Any, before: Any, after: Any, grads: Any, found: Any
) -> None:
    """Raises unless `found` is `after`, with the rows that were not read as `before`.

    Args:
      compare: how to compare.
      tx: the transformation that `lazy` lifted.
      before, after, found: (params, state): before the step, after the dense step, and
        after the lazy step with `grads`.
    """
    unread = _unread(tx, before[0], grads, _rows_read(grads))
    compare.step(found, tuple(map(_put_back, before, after, unread)), before, unread)


def _unread(
    tx: Any, params: Any, grads: Any, rows: dict[int, np.ndarray]
) -> tuple[list[Any], list[Any]]:
    """For each leaf of parameters and of state, True at rows not read, or None."""
    leaves, treedef = trees.flatten(params)
    gradients = trees.flatten(grads)[0]
    stacked = {i: gradients[i] for i in rows if gradients[i].stack}
    specs = stacks.specs(stacked, tuple(map(trees.to_spec, leaves)))
    init = callables.resolve(tx, treedef, specs).init
    owners = state_leaves.find(init, treedef, specs, tuple(rows)).owners
    at = lambda i: ~rows[i] if i in rows else None
    arrays = [at(i) for i, leaf in enumerate(leaves) if leaf is not None]
    return arrays, [at(owner) for owner in owners]


def _put_back(before: Any, after: Any, unread: Sequence[Any]) -> Any:
    """`after` with the rows that were not read as in `before`."""
    leaves, treedef = jax.tree.flatten(after)
    for k, (old, mask) in enumerate(zip(jax.tree.leaves(before), unread)):
        if mask is not None:
            old, new = np.asarray(old), np.asarray(leaves[k])
            leaves[k] = np.where(_like(mask, old), old, new).astype(old.dtype)
    return treedef.unflatten(leaves)


def _like(mask: np.ndarray, x: np.ndarray) -> np.ndarray:
    return mask.reshape(*mask.shape, *[1] * (x.ndim - mask.ndim))


# ------------------------------------------------------------------ comparison


class _Comparison:
    """Compares trees, and raises an AssertionError at the first leaf that differs.

    Args:
      step: the number of the batch, for the message.
      rtol, atol: see `assert_equals_dense`.
      rounded: after how many steps the leaves are compared: each rounds them.
    """

    def __init__(self, step: int, rtol: float, atol: float, rounded: int):
        self._step, self._rtol, self._atol = step, rtol, atol
        self._rounded = rounded

    def step(
        self, found: Any, want: Any, before: Any, unread: Any = (None, None)
    ) -> None:
        """Compares parameters, then state."""
        for k, what in enumerate(("params", "state")):
            self(what, found[k], want[k], before[k], unread[k])

    def __call__(
        self,
        what: str,
        found: Any,
        want: Any,
        before: Any = None,
        unread: Sequence[Any] | None = None,
    ) -> None:
        paths, structure = jax.tree_util.tree_flatten_with_path(found)
        wanted, dense_structure = jax.tree.flatten(want)
        if structure != dense_structure:
            raise AssertionError(
                f"{_CALL}: step {self._step}: {what} has the structure {structure} by "
                f"sparsejax and {dense_structure} by plain JAX."
            )
        old = [0] * len(paths) if before is None else jax.tree.leaves(before)
        masks = unread or [None] * len(paths)
        for (path, a), b, c, mask in zip(paths, wanted, old, masks, strict=True):
            where = f"{_CALL}: step {self._step}: {what}{jax.tree_util.keystr(path)}"
            a, b, c = map(_as_numpy, (a, b, c))
            # The state keeps its dtype under lazy, although optax may promote it.
            self._leaf(where, a, b if what != "state" else b.astype(a.dtype), c, mask)

    def _leaf(self, where: str, a: Any, b: Any, before: Any, mask: Any) -> None:
        """Compares `a` of ours with `b`; rows in `mask` must have equal bits."""
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            raise AssertionError(
                f"{where} is {a.dtype}{list(a.shape)} by sparsejax and "
                f"{b.dtype}{list(b.shape)} by plain JAX."
            )
        if not jnp.issubdtype(a.dtype, jnp.inexact):
            differs, allowed = a != b, ""
        else:
            wide = (
                np.complex128 if jnp.issubdtype(a.dtype, jnp.complexfloating) else float
            )
            x, y, old = a.astype(wide), b.astype(wide), before.astype(wide)
            change = np.abs(y - old)
            most = np.max(change, initial=0.0, where=np.isfinite(change))
            tolerance = self._atol + self._rtol * most
            rounding = 4 * self._rounded * float(jnp.finfo(a.dtype).eps) * np.abs(y)
            with np.errstate(invalid="ignore"):  # inf - inf
                close = np.abs(x - y) <= tolerance + rounding
            close = close & np.isfinite(y) | (x == y) | (np.isnan(x) & np.isnan(y))
            differs, allowed = ~close, f" by more than {tolerance:.2g}"
        if mask is not None:
            bits = lambda x: np.ascontiguousarray(x).reshape(*x.shape, 1).view(np.uint8)
            changed = np.any(bits(a) != bits(b), -1)
            differs = np.where(_like(mask, a), changed, differs)
        if not differs.any():
            return
        first = tuple(map(int, np.argwhere(differs)[0]))
        at, is_unread = "", False
        if first:
            axes = 1 if mask is None else mask.ndim
            row, column = first[:axes], first[axes:]
            at = f" at row {row[0] if axes == 1 else row}"
            at += f", column {column[0] if len(column) == 1 else column}" * bool(column)
            is_unread = mask is not None and bool(mask[row])
        hint = " The batch did not read this row, so it must not change." * is_unread
        raise AssertionError(
            f"{where} differs{at}: {a[first]} by sparsejax, {b[first]} by plain JAX. "
            f"{np.count_nonzero(differs)} of {differs.size} numbers differ{allowed}."
            f"{hint}"
        )


def _as_numpy(x: Any) -> np.ndarray:
    if hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.asarray(x)
