"""Proves that an update works row by row, or finds what prevents it.

`tx.update` is traced twice: with one row in every table, and with as many as it has.
The program of one row is walked as by `row_program`, but nothing is computed. Each
equation is compared with its twin in the program of all rows: they must be equal up to
the axes of rows, and must work row by row. A differing constant means a mean over rows,
and an array made of a shape means noise or numbers by position.

A reduction over rows is correct if rows that are not read add nothing to it. This is
tested by running the function of one row: with a zero gradient, and any weights and
state, its result must be the neutral element, as for the norm of a gradient. Otherwise
the dense run counts rows that a lifted run does not read. Then

- a reduction of *weights* is a fault (lamb, lars, fromage);
- a reduction of *state*, or of updates that an earlier part of a chain computed, counts
  only the rows that are read: `clip_by_global_norm` after adam, which is intended. It
  must not feed state, except through a boolean (`zero_nans`), and empty slots must add
  nothing to it.
"""

import contextlib
import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from sparsejax import _compat, _primitives
from sparsejax.optim import _trees as trees
from sparsejax.optim._lazy import parts, state_leaves
from sparsejax.optim._lazy.row_program import (
    LINEAR,
    REDUCTIONS,
    Node,
    NotByRows,
    Reduction,
    RowFunction,
    RowStep,
    Runner,
    Shared,
    row_params,
    tables_of,
)
from sparsejax.optim._lazy.two_programs import (
    BY_NUMBER,
    differing_number,
    pairs,
    row_axes,
    same_params,
)


# ------------------------------------------------------------------ one update


class Update:
    """`tx.update` on a tree of parameters, to be traced with other numbers of rows.

    Attributes:
      one_row: for each table, the axes of rows in the first trace.
      many_rows: the same, in the second trace: all rows of the table, or a few more.
    """

    def __init__(self, tx, treedef, specs, tables):
        self.tx, self.treedef, self.tables = tx, treedef, tuple(tables)
        self.one_row, self.many_rows = dict.fromkeys(tables, (1,)), {}
        self.specs = list(specs)
        for t in tables:
            shape, count = specs[t].shape, trees.row_axes(specs[t])
            # At least two, so that an axis of rows is seen.
            rows = shape[:count] if math.prod(shape[:count]) > 1 else (2, 3)[:count]
            self.many_rows[t] = rows
            self.specs[t] = trees.reshaped(specs[t], (*rows, *shape[count:]))
        self.leaves = state_leaves.find(tx.init, treedef, self.specs, self.tables)
        paths, self.state_treedef = jax.tree_util.tree_flatten_with_path(
            self.leaves.state
        )
        self.paths = [jax.tree_util.keystr(path) for path, _ in paths]
        self.state = [leaf for _, leaf in paths]
        row = {t: self._with_rows(self.specs[t], t, self.one_row) for t in tables}
        self.gradient = {t: Node(t, x) for t, x in row.items()}
        self.weights = {t: Node(t, x) for t, x in row.items()}
        self.followers = {
            k: Node(t, self._with_rows(self.state[k], t, self.one_row))
            for k, t in enumerate(self.leaves.owners)
            if t is not None
        }

    def _with_rows(self, spec, table, rows):
        row_shape = spec.shape[len(self.many_rows[table]) :]
        return jax.ShapeDtypeStruct((*rows[table], *row_shape), spec.dtype)

    def arguments(self) -> list[Any]:
        """Returns one row's arguments for a trace: nodes of tables, else types."""
        leaves = [
            (i, trees.plain(s))
            for i, s in enumerate(self.specs)
            if not trees.is_none_or_masked(s)
        ]
        return [
            *(self.gradient.get(i, s) for i, s in leaves),
            *(self.weights.get(i, s) for i, s in leaves),
            *(self.followers.get(k, s) for k, s in enumerate(self.state)),
        ]

    def nodes(self, table: int) -> list[Node]:
        """Returns the arguments that are rows of a table."""
        followers = (x for x in self.followers.values() if x.table == table)
        return [self.gradient[table], self.weights[table], *followers]

    def trace(self, rows: Mapping[int, tuple[int, ...]]) -> tuple[Any, list[Any]]:
        """Traces `tx.update`: updates of tables, state, updates of other leaves."""
        specs = [
            self._with_rows(s, i, rows) if i in self.tables else s
            for i, s in enumerate(self.specs)
        ]
        state = [
            s if owner is None else self._with_rows(s, owner, rows)
            for s, owner in zip(self.state, self.leaves.owners)
        ]
        arrays = trees.arrays(specs)
        update = optax.with_extra_args_support(self.tx).update
        extra_args: dict[str, Any] = {}

        def step(*args):
            n = len(arrays)
            grads, weights = (
                trees.fill(self.treedef, specs, x) for x in (args[:n], args[n : 2 * n])
            )
            state = self.state_treedef.unflatten(args[2 * n :])
            try:
                updates, new = update(grads, state, weights, **extra_args)
                updates = self.treedef.flatten_up_to(updates)
                tables = [updates[t] for t in self.tables]
                if not all(hasattr(u, "shape") for u in tables):
                    raise TypeError("the update of a table is not an array")
                new, new_treedef = jax.tree.flatten(new)
                if new_treedef != self.state_treedef:
                    raise TypeError("update returns state of another structure")
            except Exception as error:  # of the transformation
                raise state_leaves.cannot_run(error) from error
            others = [u for i, u in enumerate(updates) if i not in self.tables]
            return [*tables, *new, *jax.tree.leaves(others)]

        while True:
            try:
                return _compat.trace(step, *arrays, *arrays, *state)
            except NotByRows as fault:
                missing = required_arguments(fault.__cause__) - extra_args.keys()
                if not missing:
                    raise
                extra_args |= dict.fromkeys(missing, np.float32(1))


def required_arguments(error: BaseException | None) -> set[str]:
    """Returns the arguments that an update lacks, which Python's message names.

    The signature of an update inside of the update cannot be reached.
    """
    if "required keyword-only argument" not in str(error):
        return set()
    return set(re.findall(r"'(\w+)'", str(error)))


# ------------------------------------------------------------------ the proof


class Judge(Runner):
    """The walk of the program of one row.

    Values of rows are nodes. Constants, values that are the same in all rows, and
    negated numbers are nodes of no table. Any other value is `Shared`: its number is
    unknown.

    Attributes:
      faults: what prevents lifting the tables.
      outputs: of `Update.trace`.

    Raises:
      NotByRows: there is no program, or another one for each number of rows.
    """

    def __init__(self, update: Update):
        super().__init__(lambda group: [])
        self.update = update
        many = update.trace(update.many_rows)
        try:
            one = update.trace(update.one_row)
        except NotByRows as fault:
            fault.why = f"{fault.why}; {BY_NUMBER}"
            raise
        self._twins = {_key(path): eqn for path, eqn in pairs(one, many)}
        self.faults: list[NotByRows] = []
        args = [x if isinstance(x, Node) else Shared(x) for x in update.arguments()]
        self.outputs = self.run(*one, args)
        self._neutral: set[Any] = set()  # functions that change no reduction
        rows = map(row_axes, one[0].outvars, many[0].outvars)
        self.faults = self.faults or [
            *self._faults_of_outputs(rows),
            *self._faults_of_reductions(),
        ]

    def value(self, x: Any) -> Any:
        return x

    def shared(self, eqn: Any, values: list[Any]) -> list[Any]:
        body = _primitives.called(eqn)
        if body is not None:
            return self.run(*body, values)
        if eqn.primitive.name == "cond":
            return self.cond(eqn, values)
        name, is_node = eqn.primitive.name, any(isinstance(x, Node) for x in values)
        if (
            any(v.aval.shape[:1] == (1,) for v in eqn.outvars)
            or not any(isinstance(x, (Shared, Reduction)) for x in values)
            # Drawn numbers are positive, so the function of a row must negate them.
            or name == "neg"
            or (is_node and name in LINEAR)
        ):
            return self.nodes(eqn, values, None)
        step = RowStep(self.path, values, next(self._number))
        return [Shared(v.aval, step) for v in eqn.outvars]

    def step(self, eqn: Any, ins: list[Any]) -> list[Any]:
        path = self.path
        try:
            self._compare(eqn, ins)
            return super().step(eqn, ins)
        except NotByRows as fault:
            self.path = path
            fault.path = fault.path or path
            fault.tables = tables = fault.tables or tables_of(ins)
            self.faults.append(fault)
        # Continue, to find other faults.
        nodes = self.nodes(eqn, [], min(tables, default=None))
        is_row = lambda x: tables and x.aval.shape[:1] == (1,)
        return [x if is_row(x) else Shared(x.aval, x.step) for x in nodes]

    def _compare(self, eqn: Any, ins: list[Any]) -> None:
        """Raises if an equation depends on the number of rows, or mixes rows."""
        twin, name = self._twins.get(_key(self.path)), eqn.primitive.name
        if twin is None:
            return  # a choice among branches, by `Runner.cond`
        if why := differing_number(eqn, twin):
            raise NotByRows(why)
        if name == "cond" or _primitives.called(eqn) is not None:
            return  # the equations inside are compared
        rows = list(map(row_axes, eqn.invars, twin.invars))
        outs = list(map(row_axes, eqn.outvars, twin.outvars))
        if None in (*rows, *outs):
            raise NotByRows(f"{name} of rows in another axis than the first")
        count = max((k for k in (*rows, *outs) if k), default=0)
        has_rows = list(map(bool, rows))
        one, many = eqn.params, twin.params
        if count and not any(outs) and name in REDUCTIONS:
            if not tables_of(ins) and not self._is_neutral_constant(name, ins[0]):
                raise NotByRows(f"{name} that counts the rows of a table")
            return
        if count and not any(rows) and name != "broadcast_in_dim":
            raise NotByRows(f"{name} of a number for each row")
        if count:
            one, many = row_params(eqn, has_rows), row_params(twin, has_rows, count)
        if one is None or many is None:
            raise NotByRows(f"{name} of rows", is_proved=False)
        if not same_params(one, many):
            raise NotByRows(f"{name} that depends on the number of rows")

    # -------------------------------------------------------------- outputs

    def _faults_of_outputs(self, rows: Iterator[int | None]) -> Iterator[NotByRows]:
        update = self.update
        states = [(owner, f"its state {path}") for owner, path in self._states()]
        expected = [*((t, "its update") for t in update.tables), *states]
        others = [(None, "the update of a dense leaf")] * len(self.outputs)
        for x, count, (owner, what) in zip(self.outputs, rows, (*expected, *others)):
            path, tables = _path_of(x), tables_of([x] if isinstance(x, Node) else [])
            if owner is None and tables:
                yield NotByRows(f"{what} has rows of the table", path, tables)
            if owner is not None and not (count and tables <= {owner}):
                why = f"{what} does not have one row per row of the table"
                yield NotByRows(why, path, [owner])

    def _states(self) -> Iterator[tuple[int | None, str]]:
        return zip(self.update.leaves.owners, self.update.paths)

    # -------------------------------------------------------------- reductions

    def _faults_of_reductions(self) -> Iterator[NotByRows]:
        partial = []
        for reduction in self._pending:
            try:
                if self._counts_rows_read(reduction):
                    partial.append(reduction)
            except NotByRows as fault:
                yield NotByRows(fault.why, reduction.path, [reduction.table])
        update, n = self.update, len(self.update.tables)
        passes_on = lambda x: x.aval.dtype != bool
        for path, is_of_leaf, x in zip(
            update.paths, update.leaves.by_leaf, self.outputs[n:]
        ):
            feeds = [] if is_of_leaf else _upstream(x, passes_on)
            for reduction in [x for x in feeds if x in partial][:1]:
                yield NotByRows(
                    f"its state {path} depends on all rows, even those that are not "
                    "read",
                    reduction.path,
                    [reduction.table],
                )

    def _counts_rows_read(self, reduction: Reduction) -> bool:
        """Returns True if rows that are not read would change a reduction.

        Raises:
          NotByRows: it must not be, as it is read from weights, for example.
        """
        kind, nodes = reduction.kind, self.update.nodes(reduction.table)
        function = RowFunction([reduction.node], nodes)
        key = kind, *function.key(nodes)
        if key in self._neutral:  # tables of equal rows that are treated alike
            return False
        (still,) = self._run(function, "zero", "any")
        if self._is_neutral(kind, still, function):
            self._neutral.add(key)
            return False
        if self._reads_weights(reduction):
            raise NotByRows(f"{kind} of weights over all rows, even those not read")
        if reduction.aval.dtype == bool:
            return False
        (empty,) = self._run(function, "zero", "fresh")
        if not self._is_neutral(kind, empty, function):
            raise NotByRows(
                f"{kind} of updates over all rows, after a part that moves rows that "
                "were never read"
            )
        return True

    def _is_neutral_constant(self, kind: str, x: Any) -> bool:
        """Returns True if a constant adds nothing, as the zeros of `set_to_zero`."""
        function = RowFunction([x], [])
        (still,) = self._run(function, "zero", "any")
        return self._is_neutral(kind, still, function)

    def _is_neutral(self, kind: str, still: np.ndarray, function: RowFunction) -> bool:
        """Returns True if results of rows without a gradient change no reduction."""
        if kind in ("reduce_max", "reduce_min"):
            (others,) = self._run(function, "any", "any")
            if kind == "reduce_min":
                others, still = -others, -still
            return bool(np.all(still == np.min(still)) and np.all(others >= still[:1]))
        neutral = {"reduce_prod": 1, "reduce_and": True}.get(kind, 0)
        return bool(np.all(still == neutral))

    def _reads_weights(self, reduction: Reduction) -> bool:
        """Returns True if weights reach a reduction within its part of a chain.

        The result of another part is an update, whatever it was computed from.
        """
        part, _ = parts.of_equation(reduction.path)

        def is_of_part(x):
            other, _ = parts.of_equation(_path_of(x))
            n = min(len(part), len(other))
            return part[:n] == other[:n]  # the same part, or one that holds the other

        weights = self.update.weights.values()
        return any(x in weights for x in _upstream(reduction.node, is_of_part))

    # -------------------------------------------------------------- numbers

    def moved(self, table: int) -> list[str]:
        """Returns what changes in a row without a gradient: "weights", or states."""
        n, update = len(self.update.tables), self.update
        mine = [k for k, x in update.followers.items() if x.table == table]
        outputs = [
            self.outputs[update.tables.index(table)],
            *(self.outputs[n + k] for k in mine),
            *(update.followers[k] for k in mine),
        ]
        function = RowFunction(outputs, update.nodes(table))
        change, *state = self._run(function, "zero", "any")
        # Invalid state, such as a negative variance, gives NaN.
        valid = ~np.isnan(change)
        changed = [WEIGHTS] if np.any(change[valid]) or not np.any(valid) else []
        for k, new, old in zip(mine, state, state[len(mine) :]):
            if new.astype(old.dtype).tobytes() != old.tobytes():
                changed.append(update.paths[k])
        return changed

    def _run(self, function: RowFunction, gradient: str, row: str) -> list[np.ndarray]:
        """Runs the function of a row for a few draws, the first axis of the results.

        Args:
          function: of rows of one table.
          gradient: "zero" or "any".
          row: weights and state: "any", or "fresh" as in an empty slot.
        """
        rng, inputs = np.random.default_rng(0), []
        for node in function.inputs:
            is_gradient = node in self.update.gradient.values()
            is_state = node in self.update.followers.values()
            if is_gradient and gradient == "zero":
                x = np.zeros((_DRAWS, *node.aval.shape), node.aval.dtype)
            elif not is_gradient and row == "fresh":
                x = np.broadcast_to(self._fresh[node], (_DRAWS, *node.aval.shape))
            else:
                x = _draw(rng, node.aval, signed=not is_state)
            inputs.append(x)
        cases = {
            id(step.inputs[0]): len(step.inputs) - 1
            for step in function.steps
            if step.eqn.primitive.name == "select_n"
        }
        is_drawn = [isinstance(x, (Shared, Reduction)) for x in function.operands]
        operands = [
            _draw(rng, x.aval, False, cases.get(id(x)), is_large=False) if drawn else x
            for x, drawn in zip(function.operands, is_drawn)
        ]
        axes = [0 if drawn else None for drawn in is_drawn]
        run = jax.jit(jax.vmap(lambda _, *x: function(*x), in_axes=(0, 0, axes)))
        # `vmap` needs an argument, also for a function without inputs.
        args = np.zeros(_DRAWS, np.float32), inputs, operands
        types = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
        # Compiled ahead of time, it runs on numbers even while JAX traces.
        return [np.asarray(x) for x in run.lower(*types).compile()(*args)]

    @functools.cached_property
    def _fresh(self) -> dict[Node, np.ndarray]:
        """Weights and state of an empty slot: a row that was never touched."""
        update, specs = self.update, list(self.update.specs)
        for t, node in update.weights.items():
            specs[t] = node.aval
        arrays = trees.arrays(specs)
        init = lambda *x: jax.tree.leaves(
            update.tx.init(trees.fill(update.treedef, specs, x))
        )
        zeros = [np.zeros(x.shape, x.dtype) for x in arrays]
        state = jax.jit(init).lower(*arrays).compile()(*zeros)
        fresh = {x: np.asarray(state[k]) for k, x in update.followers.items()}
        weights = update.weights.values()
        return fresh | {x: np.zeros(x.aval.shape, x.aval.dtype) for x in weights}


WEIGHTS = "weights"
_DRAWS = 8


def _draw(
    rng: np.random.Generator,
    aval: Any,
    signed: bool,
    cases: int | None = None,
    is_large: bool = True,
) -> Any:
    """Draws numbers of a type, of several sizes, and both booleans.

    Integers are counts, which are positive, unless they choose among `cases`. A global
    number is not large, since the exponential of a decay may be taken.
    """
    shape, dtype = (_DRAWS, *aval.shape), aval.dtype
    if jnp.issubdtype(dtype, np.bool_):
        flags = rng.random(shape) < 0.5
        flags[0], flags[1] = False, True
        return flags
    if not jnp.issubdtype(dtype, jnp.inexact):
        low, high = (0, cases) if cases else (1, 9)
        return rng.integers(low, high, shape).astype(dtype)
    sizes = np.resize([1.0, 0.1, 10.0, 1.0, 1e3 if is_large else 1.0], _DRAWS)
    x = rng.uniform(0.05, 0.95, shape) * sizes.reshape(-1, *[1] * len(aval.shape))
    if signed:
        x = x * rng.choice([-1, 1], shape)
    return x.astype(dtype)


# ------------------------------------------------------------------ the graph


def _key(path: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple(map(id, path))


def _path_of(x: Any) -> tuple[Any, ...]:
    step = getattr(x, "step", None)
    return () if step is None else step.path


def _upstream(x: Any, passes_on: Callable[[Any], bool]) -> Iterator[Any]:
    """Yields the values that a value is computed from, and itself.

    Args:
      x: a value.
      passes_on: False for a value at which the search ends.
    """
    seen, stack = set(), [x]
    while stack:
        x = stack.pop()
        if id(x) in seen or not isinstance(x, (Node, Shared, Reduction)):
            continue
        seen.add(id(x))
        if isinstance(x, Reduction):
            yield x
            stack.append(x.node)
        elif x.step is None:
            yield x
        elif passes_on(x):
            stack += x.step.inputs


# ------------------------------------------------------------------ JAX's settings


@contextlib.contextmanager
def jax_defaults() -> Iterator[None]:
    """Restores JAX's defaults, for any settings of the caller."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(state_leaves.without_mesh())
        stack.enter_context(jax.disable_jit(False))
        stack.enter_context(jax.numpy_dtype_promotion("standard"))
        stack.enter_context(jax.numpy_rank_promotion("allow"))
        yield
