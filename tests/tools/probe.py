"""The oracle of `separability`: runs a transformation on a table and on its rows.

Lifting `tx` to rows is correct if `tx` gives the same for the rows R of a gradient as
it gives there on the whole table, with a zero gradient in the other rows. With
U, S' = tx(G, S, W) and G zero outside R, it must hold that

    tx(G[R], S[R], W[R]) = U[R], S'[R]

In S[R], the leaves that follow the table are restricted to R; the others are
unchanged. This is tested on random numbers, in two runs from a fresh state:

- *same rows*: R is the same at each step, and U[R] and all of S'[R] are compared. Rows
  outside R have weights but no history. This finds means over rows, norms of weights,
  factored moments, and noise.
- *other rows*: R changes, and after each step the rows outside it are restored, as
  lifting keeps them. The state leaves that do not follow the table are compared. This
  finds accumulations over all rows: distances from the start, maxima.

Both compare single steps from the same state, so differences do not add up. The second
run does not compare updates: after Adam, a clip by global norm sees the momentum of all
rows in a dense run, but only the momentum of the read rows if lifted, as intended.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from sparsejax.optim import _trees as trees
from sparsejax.optim._lazy import judge, separability, state_leaves


ROWS = 160  # enough for optimizers that factor matrices of 128 rows and columns
# Scales of the gradients, one per step; the last for parts that act on large ones.
SCALES = (1.0, 0.1, 10.0, 1.0, 1e6)
_SOME = np.arange(3, 87, 7)
_OTHERS = np.arange(5, 113, 9)  # shares a row or two
# They change from each step to the one after the next too, for parts that act at every
# other step.
_RUNS = {"same": [_SOME] * 5, "other": [_SOME, _OTHERS, _OTHERS, _SOME, _OTHERS]}


def of_one_table(tx: Any) -> str | None:
    """Why a transformation of one table is not row-separable, or None."""
    try:
        spec = jax.ShapeDtypeStruct((ROWS, 130), jnp.float32)
        return failure(tx, jax.tree.structure(0), (spec,), 0)
    except Exception as error:
        return repr(error)


def failure(tx: Any, treedef: Any, specs: Sequence[Any], table: int) -> str | None:
    """Why lifting a table differs from a dense run, or None.

    Args:
      tx: the transformation.
      treedef: structure of the parameters, see `trees.flatten`.
      specs: its leaves, see `trees.to_spec`.
      table: which leaf is lifted.

    Raises:
      Whatever `tx` raises on such trees.
    """
    with judge.jax_defaults(), np.errstate(all="ignore"):
        try:
            return _failure(tx, treedef, specs, table)
        except TypeError as error:
            if "'value'" not in str(error):
                raise
        return _failure(tx, treedef, specs, table, value=np.float32(1))


def _failure(tx, treedef, specs, table, **extra_args):
    specs = [_small(spec, k == table) for k, spec in enumerate(specs)]
    found = state_leaves.find(tx.init, treedef, specs, [table])
    # A short run does not show the effect of some.
    refused = separability.refused_by_state(tx, found)
    if refused:
        return str(refused[table])
    tx = optax.with_extra_args_support(tx)
    paths, state_treedef = jax.tree_util.tree_flatten_with_path(found.state)
    is_table = [k == table for k in range(len(specs))]
    owned = [owner == table for owner in found.owners]
    jit = functools.partial(  # it runs only a dozen times
        jax.jit, compiler_options={"xla_backend_optimization_level": 0}
    )

    @jit
    def init(weights):
        return jax.tree.leaves(tx.init(treedef.unflatten(weights)))

    @jit
    def update(grads, state, weights):
        state = state_treedef.unflatten(state)
        grads, weights = treedef.unflatten(grads), treedef.unflatten(weights)
        updates, new = tx.update(grads, state, weights, **extra_args)
        pairs = zip(jax.tree.leaves(new), dtypes)
        new = [x if _is_key(x) else x.astype(dtype) for x, dtype in pairs]
        return treedef.flatten_up_to(updates)[table], new

    rng = np.random.default_rng(0)
    weights_0 = [_draw(rng, spec) for spec in specs]
    state_0 = _on_host(init(weights_0))
    dtypes = [x.dtype for x in state_0]
    for kind, rows_of_step in _RUNS.items():
        rng = np.random.default_rng(1)
        # Gradients keep a direction, or estimates of a distance would stay at zero.
        direction = [_draw(rng, spec) for spec in specs]
        weights, state = list(weights_0), state_0
        for scale, rows in zip(SCALES, rows_of_step, strict=True):
            grads = [_gradient(rng, d, scale) for d in direction]
            grads[table] = _put(np.zeros_like(grads[table]), rows, grads[table])
            whole, new = _on_host(update(grads, state, weights))
            parts = zip((grads, state, weights), (is_table, owned, is_table))
            part, part_new = _on_host(update(*(_cut(*x, rows) for x in parts)))
            for k, (a, b) in enumerate(zip(_cut(new, owned, rows), part_new)):
                # The other leaves belong to dense leaves.
                compared = kind == "same" if owned[k] else not found.by_leaf[k]
                if compared and not _is_close(a, b):
                    path = jax.tree_util.keystr(paths[k][0])
                    return f"its state {path} depends on rows that are not read"
            if kind == "same" and not _is_close(whole[rows], part):
                return "the updates of the rows read depend on rows that are not read"
            moved = (weights[table] + whole).astype(np.float32)
            if kind == "other":
                moved = _put(weights[table], rows, moved)
                new = [
                    _put(x, rows, y) if is_owned else y
                    for x, y, is_owned in zip(state, new, owned)
                ]
            weights[table], state = moved, new
    return None


def _small(spec, is_table):
    """Rounding errors must not look like a dependence on rows: float32."""
    if trees.is_none_or_masked(spec):
        return spec
    is_float = jnp.issubdtype(spec.dtype, jnp.floating)
    shape = (ROWS, *spec.shape[1:]) if is_table else spec.shape
    return jax.ShapeDtypeStruct(shape, jnp.float32 if is_float else spec.dtype)


def _cut(leaves, has_rows, rows):
    return [x[rows] if cut else x for x, cut in zip(leaves, has_rows)]


def _put(old, rows, new):
    out = np.array(old)
    out[rows] = new[rows]
    return out


def _draw(rng, spec):
    if trees.is_none_or_masked(spec):
        return spec
    if not jnp.issubdtype(spec.dtype, jnp.inexact):
        return np.zeros(spec.shape, spec.dtype)
    return rng.standard_normal(spec.shape).astype(spec.dtype)


def _gradient(rng, direction, scale):
    if trees.is_none_or_masked(direction):
        return direction
    new = 0.5 * rng.standard_normal(direction.shape) + direction
    return (scale * new).astype(direction.dtype)


def _is_key(x):
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _on_host(tree):
    return jax.tree.map(lambda x: x if _is_key(x) else np.asarray(x), tree)


def _is_close(a, b):
    """Returns True if arrays are equal; floats may differ by rounding."""
    if _is_key(a):
        a, b = jax.random.key_data(a), jax.random.key_data(b)
    a, b = np.asarray(a), np.asarray(b)
    if a.shape != b.shape:
        return False
    if not jnp.issubdtype(a.dtype, jnp.inexact):
        return bool(np.array_equal(a, b))
    rounding = 2e-2 if jnp.finfo(a.dtype).bits < 32 else 1e-4
    a, b = a.astype(np.float64), b.astype(np.float64)
    finite = np.isfinite(a) & np.isfinite(b)
    if not np.array_equal(a[~finite], b[~finite], equal_nan=True):
        return False
    a, b = a[finite], b[finite]
    return bool(np.linalg.norm(a - b) <= rounding * np.linalg.norm(b))
