"""The oracle of `separability`: runs a transformation on a table and on its rows.

Lifting `tx` to rows is correct if `tx` gives the same for the rows R of a gradient as
it gives there on the whole table, with a zero gradient in the other rows. With
U, S' = tx(G, S, W) and G zero outside R, it must hold for each table that

    tx(G[R], S[R], W[R]) = U[R], S'[R]

In S[R], the leaves that follow the table are restricted to R; the others are
unchanged. This is tested on random numbers, in two runs from a fresh state:

- *same rows*: R is the same at each step, and U[R] and all of S'[R] are compared. Rows
  outside R have weights but no history. This finds means over rows, norms of weights,
  factored moments, and noise.
- *other rows*: R changes, and after each step the rows outside it are restored, as
  lifting keeps them. The state leaves that do not follow a table are compared. This
  finds accumulations over all rows: distances from the start, maxima.

A stack of tables `[K, V, ...]` is tested on two tables with the same rows: `tx` must
do the same to the stack as to the rows of one table.

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

from sparsejax._rows import indexing
from sparsejax.optim import _trees as trees
from sparsejax.optim._lazy import judge, separability, state_leaves


ROWS = 160  # enough for optimizers that factor matrices of 128 rows and columns
TOUCHED = 12
# Scales of the gradients, one per step; the last for parts that act on large ones.
SCALES = (1.0, 0.1, 10.0, 1.0, 1e6)
LARGEST = 2**17  # elements of a leaf that is not a table; larger leaves are shrunk


def failures(
    tx: Any, treedef: Any, specs: Sequence[Any], tables: Sequence[int]
) -> tuple[dict[int, str], str | None]:
    """Compares lifting `tables` with a dense run.

    Args:
      tx: the transformation.
      treedef: structure of the parameters, see `trees.flatten`.
      specs: its leaves, see `trees.to_spec`.
      tables: which leaves are lifted, all at once.

    Returns:
      `(by table, shared)`: why it fails, for each table that fails, and why it fails in
      state that belongs to no table, or None.

    Raises:
      Whatever `tx` raises on such trees.
    """
    with judge.jax_defaults(), np.errstate(all="ignore"):
        with jax.debug_nans(False), jax.debug_infs(False):
            try:
                return _failures(tx, treedef, specs, tables, {})
            except TypeError as error:
                if "'value'" not in str(error):
                    raise
            extra_args = {"value": np.float32(1)}
            return _failures(tx, treedef, specs, tables, extra_args)


def _failures(tx, treedef, specs, tables, extra_args):
    small = small_tree(specs, tables)
    found = state_leaves.find(tx.init, treedef, small, tables)
    # A short run does not show the effect of some.
    refused = separability.refused_by_state(tx, found)
    reasons = {t: str(reason) for t, reason in refused.items()}
    tables = [t for t in tables if t not in reasons]
    if not tables:
        return reasons, None
    owners = [o if o in tables else None for o in found.owners]
    run = _Run(tx, treedef, small, tables, owners, found.state, extra_args)
    some = np.arange(3, 3 + 7 * TOUCHED, 7)
    others = np.arange(5, 5 + 9 * TOUCHED, 9)  # shares a row or two with `some`
    same_rows = [some] * len(SCALES)
    # They change from each step to the one after the next too, for parts that act
    # at every other step.
    other_rows = [some, others, others, some, others]
    for rows_of_step, kind in ((same_rows, "same"), (other_rows, "other")):
        shared = run.steps(rows_of_step, kind, reasons)
        if shared:
            return reasons, shared
    return reasons, None


def of_one_table(tx: Any) -> str | None:
    """Why a transformation of one table is not row-separable, or None."""
    spec = jax.ShapeDtypeStruct((ROWS, 130), jnp.float32)
    try:
        by_table, shared = failures(tx, jax.tree.structure(0), (spec,), (0,))
    except Exception as error:
        return repr(error)
    return shared or by_table.get(0)


def small_tree(specs: Sequence[Any], tables: Sequence[int]) -> list[Any]:
    """Specs for the test: tables of `ROWS` rows, and large leaves shrunk."""
    small = []
    for i, spec in enumerate(specs):
        if not trees.is_none_or_masked(spec):
            first = 0
            if i in tables:
                spec, first = with_few_rows(spec), trees.row_axes(spec)
            shape = list(spec.shape)
            limit = LARGEST * (4 if i in tables else 1)
            while np.prod(shape, dtype=float) > limit:  # a table keeps its rows
                shape[first + int(np.argmax(shape[first:]))] //= 2
            spec = type(spec)(tuple(shape), _plain_dtype(spec.dtype))
        small.append(spec)
    return small


def with_few_rows(spec: Any) -> Any:
    """The spec of a table, with `ROWS` rows; of a stack, with two such tables."""
    count = trees.row_axes(spec)
    return trees.reshaped(spec, (*(2, ROWS)[-count:], *spec.shape[count:]))


def _plain_dtype(dtype: Any) -> Any:
    # Rounding errors must not look like a dependence on rows.
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return jnp.complex64
    return jnp.float32 if jnp.issubdtype(dtype, jnp.floating) else dtype


class _Run:
    """A transformation, compiled for whole tables and for rows of them where needed.

    It is compiled ahead of time because `lazy(tx).init` may itself be under `jit`: even
    there, a compiled program runs on concrete numbers.
    """

    def __init__(self, tx, treedef, specs, tables, owners, state, extra_args):
        self.extra_args = extra_args
        self.row_axes = {t: trees.row_axes(specs[t]) for t in tables}
        specs = [trees.plain(spec) for spec in specs]
        self.treedef, self.specs, self.tables = treedef, specs, tables
        self.owners, self.tx = owners, tx
        own = state_leaves.find(tx.init, treedef, specs, tables).by_leaf
        # The state of dense leaves is not returned, so the compiler drops their
        # arithmetic: a tree of hundreds of leaves costs little more than one table.
        self.kept = [k for k, o in enumerate(owners) if o is not None or not own[k]]
        paths, self.state_treedef = jax.tree_util.tree_flatten_with_path(state)
        self.paths = [jax.tree_util.keystr(path) for path, _ in paths]
        self.state_specs = [leaf for _, leaf in paths]

        rng = np.random.default_rng(0)
        self.weights = [random_array(rng, s) for s in specs]
        init = jax.jit(lambda weights: jax.tree.leaves(tx.init(self.tree(weights))))
        self.state = [
            to_host(leaf) for leaf in compile_quickly(init, specs)(self.weights)
        ]

    @functools.cached_property
    def whole(self):
        """A step of whole tables."""
        return compile_quickly(
            jax.jit(self._update), self.specs, self.state_specs, self.specs
        )

    @functools.cached_property
    def part(self):
        """A step of some rows of them."""
        few = np.arange(TOUCHED)
        cut, state = self.cut(self.specs, few), self.cut_state(self.state_specs, few)
        return compile_quickly(jax.jit(self._update), cut, state, cut)

    @functools.cached_property
    def _update(self):
        tx, extra_args = optax.with_extra_args_support(self.tx), self.extra_args

        def update(grads, state, weights):
            state = self.state_treedef.unflatten(state)
            args = self.tree(grads), state, self.tree(weights)
            updates, state = tx.update(*args, **extra_args)
            updates = self.treedef.flatten_up_to(updates)
            state = jax.tree.leaves(state)
            return [updates[t] for t in self.tables], [state[k] for k in self.kept]

        return update

    def tree(self, leaves):
        return self.treedef.unflatten(leaves)

    def cut(self, leaves, rows):
        return [
            self.rows(x, i, rows) if i in self.tables else x
            for i, x in enumerate(leaves)
        ]

    def cut_state(self, leaves, rows):
        owned = zip(leaves, self.owners)
        return [x if owner is None else self.rows(x, owner, rows) for x, owner in owned]

    def rows(self, x, table, rows):
        """These rows of a table, or of the state that follows it."""
        count = self.row_axes[table]
        if isinstance(x, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct((len(rows), *x.shape[count:]), x.dtype)
        return indexing.merge_axes(x, count)[self.numbers(table, rows)]

    def put(self, old, table, rows, new):
        """The table with these rows replaced by the rows of `new`."""
        out, count = np.array(old), self.row_axes[table]
        rows = self.numbers(table, rows)
        flat = indexing.merge_axes(out, count)
        flat[rows] = indexing.merge_axes(new, count)[rows]
        return out

    def numbers(self, table, rows):
        """For a stack, other rows: some of each of its two tables."""
        return rows * 3 if self.row_axes[table] > 1 else rows

    def steps(self, rows_of_step, kind, reasons) -> str | None:
        """Compares step by step; adds to `reasons`, returns a failure of all tables."""
        rng = np.random.default_rng(1)
        # Gradients keep a direction, or estimates of a distance would stay at zero.
        direction = [random_array(rng, s) for s in self.specs]
        weights, state = list(self.weights), list(self.state)
        for scale, rows in zip(SCALES, rows_of_step, strict=True):
            dense = [random_gradient(rng, d, scale) for d in direction]
            for t in self.tables:
                dense[t] = self.put(np.zeros_like(dense[t]), t, rows, dense[t])
            updates, new = self._step(self.whole, dense, state, weights)
            cut, cut_weights = self.cut(dense, rows), self.cut(weights, rows)
            cut_state = self.cut_state(state, rows)
            cut_updates, cut_new = self._step(self.part, cut, cut_state, cut_weights)

            for k in self.kept:
                owner = self.owners[k]
                if owner is None and not is_close(new[k], cut_new[k]):
                    return (
                        f"its state {self.paths[k]} depends on all rows, even those "
                        "that are not read"
                    )
                if kind == "same" and owner is not None:
                    if not is_close(self.rows(new[k], owner, rows), cut_new[k]):
                        why = (
                            f"the state of the rows read ({self.paths[k]}) depends "
                            "on the rows that are not read"
                        )
                        reasons.setdefault(owner, why)
            for t, whole, part in zip(self.tables, updates, cut_updates):
                if kind == "same" and not is_close(self.rows(whole, t, rows), part):
                    why = (
                        "the updates of the rows read depend on the rows that are not "
                        "read"
                    )
                    reasons.setdefault(t, why)
                moved = (weights[t] + whole).astype(weights[t].dtype)
                weights[t] = (
                    moved if kind == "same" else self.put(weights[t], t, rows, moved)
                )
            for k in self.kept:
                owner = self.owners[k]
                put_back = kind == "other" and owner is not None
                state[k] = (
                    self.put(state[k], owner, rows, new[k]) if put_back else new[k]
                )
        return None

    def _step(self, update, grads, state, weights):
        updates, kept = update(grads, state, weights)
        new = list(state)
        for k, leaf in zip(self.kept, kept):
            leaf, dtype = to_host(leaf), state[k].dtype
            new[k] = leaf if leaf.dtype == dtype else leaf.astype(dtype)  # keys cannot
        return [to_host(u) for u in updates], new


def random_array(rng, spec):
    if trees.is_none_or_masked(spec):
        return spec
    if not jnp.issubdtype(spec.dtype, jnp.inexact):
        return np.zeros(spec.shape, spec.dtype)
    return rng.standard_normal(spec.shape).astype(spec.dtype)


def random_gradient(rng, direction, scale):
    if trees.is_none_or_masked(direction):
        return direction
    new = 0.5 * rng.standard_normal(direction.shape) + direction
    return (scale * new).astype(direction.dtype)


def to_host(x: Any) -> Any:
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return x if is_key else np.asarray(x)


def compile_quickly(function: Any, *specs: Any) -> Any:
    """A jitted function compiled without optimization: it runs only a dozen times."""
    options = {"xla_backend_optimization_level": 0}
    return function.lower(*specs).compile(compiler_options=options)


def is_close(a: Any, b: Any) -> bool:
    """Returns True if arrays are equal; floats may differ by rounding."""
    if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
        a, b = jax.random.key_data(a), jax.random.key_data(b)
    a, b = np.asarray(a), np.asarray(b)
    if a.shape != b.shape:
        return False
    if not jnp.issubdtype(a.dtype, jnp.inexact):
        return bool(np.array_equal(a, b))
    rounding = 2e-2 if jnp.finfo(a.dtype).bits < 32 else 1e-4
    wide = np.complex128 if np.iscomplexobj(a) else np.float64
    a, b = a.astype(wide), b.astype(wide)
    finite = np.isfinite(a) & np.isfinite(b)
    if not np.array_equal(a[~finite], b[~finite], equal_nan=True):
        return False
    a, b = a[finite], b[finite]
    return bool(np.linalg.norm(a - b) <= rounding * np.linalg.norm(b))
