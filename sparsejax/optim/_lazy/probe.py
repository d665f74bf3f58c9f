"""Runs a transformation on a small table and on some of its rows, and compares.

Lifting `tx` to rows is correct if `tx` gives the same for the rows R of a gradient as
it gives there on the whole table, with a zero gradient in the other rows. With
U, S' = tx(G, S, W) and G zero outside R, it must hold for each table that

    tx(G[R], S[R], W[R]) = U[R], S'[R]

S[R] is the state with the leaves that follow the table restricted to R and the others
unchanged. This is tested on random numbers, in two runs from a fresh state:

- *same rows*: R is the same at each step, and U[R] and all of S'[R] are compared. Rows
  outside R have weights but no history. This finds means over rows, norms of weights,
  factored moments, and noise.
- *other rows*: R changes, and after each step the rows outside it are restored, as
  lifting keeps them. The state leaves that follow no table are compared. This finds
  accumulations over all rows: distances from the start, maxima.

A stack of tables `[K, V, ...]` is tested on two tables, whose rows are those of both:
what `tx` does to the stack must be what it does to rows of one table.

Both compare single steps from the same state, so differences do not add up. The second
run does not compare updates: after Adam, a clip by global norm sees the momentum of all
rows in a dense run, but only that of the rows read if lifted, as intended.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from sparsejax._rows import indexing
from sparsejax.optim._lazy import optax_internals, state_leaves, trees


ROWS = 160  # enough for optimizers that factor matrices of 128 rows and columns
TOUCHED = 12
# Of the gradients, one per step; the last for what acts on large ones alone.
SCALES = (1.0, 0.1, 10.0, 1.0, 1e6)
LARGEST = 2**17  # elements of a leaf that is not a table; larger leaves are shrunk
COMPILE_FAST = {"xla_backend_optimization_level": 0}  # since it runs only a dozen times


class Reason(NamedTuple):
    """Why a table cannot be lifted.

    Attributes:
      why: what was found.
      part: name of the part that is to blame, empty if not known yet.
      can_be_wrong: whether it may also refuse a row-separable transformation.
      ran: whether it was run; if not, all that is known is why it cannot be.
    """

    why: str
    part: str = ""
    can_be_wrong: bool = True
    ran: bool = True

    def __str__(self) -> str:
        known = optax_internals.KNOWN_AS.get(self.part)
        return f"{self.part}{f' ({known})' if known else ''}: {self.why}"


def probe(
    tx: Any, treedef: Any, specs: Sequence[Any], tables: Sequence[int]
) -> tuple[dict[int, Reason], Reason | None]:
    """Tests whether lifting `tables` gives the result of a dense run.

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
    return _where_it_runs(lambda: _probe(tx, treedef, specs, tables))


def _probe(tx, treedef, specs, tables):
    small = small_tree(specs, tables)
    with np.errstate(all="ignore"):
        found = state_leaves.find(tx.init, treedef, small, tables)
        known = optax_internals.not_lifted(found.state, found.owners)
        reasons = {t: Reason(why, "", False) for t, why in found.blocked.items()}
        reasons |= {t: Reason(why, part, False) for t, (part, why) in known.items()}
        tables = [t for t in tables if t not in reasons]
        if not tables:
            return reasons, None
        owners = [o if o in tables else None for o in found.owners]
        run = _Run(tx, treedef, small, tables, owners, found.state)
        some = np.arange(3, 3 + 7 * TOUCHED, 7)
        others = np.arange(5, 5 + 9 * TOUCHED, 9)  # shares a row or two with `some`
        same_rows = [some] * len(SCALES)
        # They change from each step to the one after the next too, for parts that act
        # at every other step.
        other_rows = [some, others, others, some, others]
        for rows_of_step, kind in ((same_rows, "same"), (other_rows, "other")):
            shared = run.steps(rows_of_step, kind, reasons)
            if shared:
                return reasons, Reason(shared)
    return reasons, None


def counts_empty_slots(
    tx: Any, treedef: Any, specs: Sequence[Any], tables: Sequence[int]
) -> bool:
    """Whether the rows of a gradient get other updates beside empty slots.

    Empty slots have a zero gradient and the state of a row that was never read. If
    they are moved nevertheless, and a later part takes a norm, it counts them: on a
    whole table all rows that were never read, lifted as many as there happen to be.

    Args:
      tx: the transformation, whose parts can be lifted.
      treedef, specs, tables: as for `probe`.
    """

    def compare():
        small = small_tree(specs, tables)
        found = state_leaves.find(tx.init, treedef, small, tables)
        run = _Run(tx, treedef, small, tables, found.owners, found.state)
        with np.errstate(all="ignore"):
            return run.counts_empty_slots()

    return _where_it_runs(compare)


def _where_it_runs(function: Callable[[], Any]) -> Any:
    """`function()` on a CPU; on the default device if that fails."""
    try:
        with jax_defaults():
            return function()
    except Exception:
        if jax.default_backend() == "cpu":
            raise
    # A part may refer to arrays on an accelerator, so it can only run there.
    with jax_defaults(anywhere=True):
        return function()


@contextlib.contextmanager
def jax_defaults(anywhere: bool = False) -> Iterator[None]:
    """JAX's defaults, whatever the caller has set, and the CPU if there is one."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(state_leaves.without_mesh())
        stack.enter_context(jax.disable_jit(False))
        stack.enter_context(jax.numpy_dtype_promotion("standard"))
        stack.enter_context(jax.numpy_rank_promotion("allow"))
        stack.enter_context(jax.debug_nans(False))
        stack.enter_context(jax.debug_infs(False))
        stack.enter_context(jax.transfer_guard("allow"))
        if not anywhere and jax.default_backend() != "cpu":
            with contextlib.suppress(RuntimeError):  # JAX may be set up without a CPU
                device = jax.local_devices(backend="cpu")[0]
                stack.enter_context(jax.default_device(device))
        yield


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
            spec = trees.reshaped(spec, shape, _plain_dtype(spec.dtype))
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

    def __init__(self, tx, treedef, specs, tables, owners, state):
        self.row_axes = {t: trees.row_axes(specs[t]) for t in tables}
        specs = [trees.plain(spec) for spec in specs]
        self.treedef, self.specs, self.tables = treedef, specs, tables
        self.owners, self.tx = owners, tx
        arrays = [i for i, s in enumerate(specs) if getattr(s, "shape", ())]
        own = state_leaves.depends_on_shapes(tx.init, treedef, specs, arrays)
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
            to_host(leaf) for leaf in compile_probe(init, specs)(self.weights)
        ]

    @functools.cached_property
    def whole(self):
        """A step of whole tables."""
        return compile_probe(
            jax.jit(self._update), self.specs, self.state_specs, self.specs
        )

    @functools.cached_property
    def part(self):
        """A step of some rows of them."""
        few = np.arange(TOUCHED)
        cut, state = self.cut(self.specs, few), self.cut_state(self.state_specs, few)
        return compile_probe(jax.jit(self._update), cut, state, cut)

    @functools.cached_property
    def _update(self):
        extra_args = dict.fromkeys(
            optax_internals.required_extra_args(self.tx), np.float32(1)
        )
        tx = optax.with_extra_args_support(self.tx)

        def update(grads, state, weights):
            state = self.state_treedef.unflatten(state)
            args = self.tree(grads), state, self.tree(weights)
            updates, state = tx.update(*args, **extra_args)
            updates = self.treedef.flatten_up_to(updates)
            state = jax.tree.leaves(state)
            return [updates[t] for t in self.tables], [state[k] for k in self.kept]

        return update

    def first_updates(self, grads, weights):
        """The updates of the tables in a step from a fresh state."""
        state = jax.tree.leaves(self.tx.init(self.tree(weights)))
        return self._update(grads, state, weights)[0]

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
        """A table with these rows replaced by those of `new`."""
        out, count = np.array(old), self.row_axes[table]
        rows = self.numbers(table, rows)
        flat = indexing.merge_axes(out, count)
        flat[rows] = indexing.merge_axes(new, count)[rows]
        return out

    def numbers(self, table, rows):
        """For a stack, other rows: some of each of its two tables."""
        return rows * 3 if self.row_axes[table] > 1 else rows

    def steps(self, rows_of_step, kind, reasons) -> str | None:
        """Compares step by step, adds to `reasons`, and returns what fails for all."""
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
                        reasons.setdefault(owner, Reason(why))
            for t, whole, part in zip(self.tables, updates, cut_updates):
                if kind == "same" and not is_close(self.rows(whole, t, rows), part):
                    why = (
                        "the updates of the rows read depend on the rows that are not "
                        "read"
                    )
                    reasons.setdefault(t, Reason(why))
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

    def counts_empty_slots(self) -> bool:
        """Compares the first step of some rows alone, and with empty slots."""
        rng = np.random.default_rng(1)
        rows, slots = np.arange(TOUCHED), np.arange(2 * TOUCHED)

        def fill(leaves):
            out = self.cut(leaves, slots)
            for t in self.tables:
                out[t] = np.concatenate(
                    [out[t][:TOUCHED], np.zeros_like(out[t][TOUCHED:])]
                )
            return out

        grads = [random_gradient(rng, random_array(rng, s), 1.0) for s in self.specs]
        some = [self.cut(x, rows) for x in (grads, self.weights)]
        all_slots = [fill(grads), fill(self.weights)]
        step = jax.jit(self.first_updates)
        alone, beside = (
            [to_host(u) for u in compile_probe(step, *args)(*args)]
            for args in (some, all_slots)
        )
        return not all(is_close(b[:TOUCHED], a) for a, b in zip(alone, beside))

    def _step(self, update, grads, state, weights):
        updates, kept = update(grads, state, weights)
        new = list(state)
        for k, leaf in zip(self.kept, kept):
            leaf, dtype = to_host(leaf), state[k].dtype
            new[k] = leaf if leaf.dtype == dtype else leaf.astype(dtype)  # keys cannot
        return [to_host(u) for u in updates], new


def compile_probe(function, *specs):
    lowered = function.lower(*specs)
    try:
        return lowered.compile(compiler_options=COMPILE_FAST)
    except jax.errors.JaxRuntimeError:  # a compiler without that option
        return lowered.compile()


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


def is_close(a, b) -> bool:
    """Whether `a` equals `b`: exactly for integers, up to rounding for floats."""
    if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
        with jax.ensure_compile_time_eval():  # also where a step is being traced
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
