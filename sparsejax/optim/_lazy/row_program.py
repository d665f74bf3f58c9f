"""Splits an update into functions of one row and reductions over all rows.

A transformation is traced once, with every table of V rows replaced by a single row.
Most of what it computes for a table it computes for each row by itself (Adam's
moments, say); some of it reduces over all rows (a global norm) or has nothing to do
with rows (counts, schedules, dense leaves). The traced program is run again, in order:

- A value with one entry per row becomes a `Node`, and is not computed.
- A reduction over rows becomes a `Reduction`. It is computed when something global
  needs it, by a pass over the rows.
- All else is computed at once.

In the end the nodes of the outputs determine the function of one row: a
`RowFunction` of the row's gradient, weights and state and of some global values. It can
then be run over blocks of rows that stay in the cache, see `block_pass`.

Any other use of rows raises `NotByRows`; `lazy` then runs the transformation on all
rows at once.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer

from sparsejax import _compat, _primitives


LINEAR = frozenset("neg convert_element_type copy copy_p".split())
REDUCTIONS = frozenset(
    "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or".split()
)
# Work row by row if no axis in this parameter runs over rows.
_ALONG = {
    **dict.fromkeys((*REDUCTIONS, "argmax", "argmin"), "axes"),
    **dict.fromkeys("cumsum cumprod cummax cummin cumlogsumexp split".split(), "axis"),
    **dict.fromkeys(("concatenate", "sort"), "dimension"),
    **dict.fromkeys(("rev", "squeeze"), "dimensions"),
}


class NotByRows(Exception):
    """Raised if an update cannot be lifted to rows.

    Args:
      why: the fault.
      path: the equation that shows it, after the equations that call its program.
      tables: the tables that it concerns; empty if these are not known.
      is_proved: False if the equation may be row by row, but is not known to be.
    """

    def __init__(
        self,
        why: str,
        path: Sequence[Any] = (),
        tables: Iterable[int] = (),
        is_proved: bool = True,
    ):
        super().__init__(why)
        self.why, self.path, self.is_proved = why, tuple(path), is_proved
        self.tables = frozenset(tables)


class Node:
    """A value with one entry per row of a table, not computed yet.

    Args:
      table: which table; None if the entries are the same in all rows.
      aval: its type, with a first axis of length 1 instead of the rows.
      step: the equation that computes it; None for an input.
      index: which output of that equation.
    """

    __slots__ = ("table", "aval", "step", "index")

    def __init__(self, table: int | None, aval: Any, step: Any = None, index: int = 0):
        self.table, self.aval, self.step, self.index = table, aval, step, index


class Reduction:
    """A reduction of a node over all rows of its table, not computed yet.

    Args:
      node: the operand.
      path: the equation that reduces it, after the equations that call its program.
      table: which table.
    """

    __slots__ = ("node", "path", "table", "value")

    def __init__(self, node: Node, path: tuple[Any, ...]):
        self.node, self.path, self.table, self.value = node, path, node.table, None

    @property
    def kind(self) -> str:
        """Returns the name of the primitive: `reduce_sum`, ..."""
        return self.path[-1].primitive.name

    @property
    def axes(self) -> tuple[int, ...]:
        return tuple(self.path[-1].params["axes"])


class _Step:
    """An equation on nodes; `number` is its place in the program."""

    __slots__ = ("path", "inputs", "number")

    def __init__(self, path: tuple[Any, ...], inputs: Sequence[Any], number: int):
        self.path, self.inputs, self.number = path, inputs, number

    @property
    def eqn(self) -> Any:
        return self.path[-1]


class RowFunction:
    """A function of one row: from inputs and global values to some nodes.

    Args:
      inputs: nodes of the gradient, the weights and the state rows, whichever are
        needed.
      outputs: nodes.
      operands: the global values that are needed.
    """

    def __init__(self, outputs: Sequence[Any], inputs: Sequence[Node]):
        self.outputs = list(outputs)
        steps, used, operands = {}, {}, {}
        stack = list(self.outputs)
        while stack:
            x = stack.pop()
            if not isinstance(x, Node):
                if not _is_literal(x):
                    operands.setdefault(id(x), x)
            elif x.step is None:
                used[id(x)] = x
            elif id(x.step) not in steps:
                steps[id(x.step)] = x.step
                stack.extend(x.step.inputs)
        self.steps = sorted(steps.values(), key=lambda step: step.number)
        self.inputs = [x for x in inputs if id(x) in used]
        self.operands = list(operands.values())
        self._names = list(operands)

    def __call__(self, rows: Sequence[jax.Array], operands: Sequence[Any]) -> list[Any]:
        """Computes the outputs from `inputs` of shape `[1, ...]` and the operands."""
        env: dict[int, Any] = {id(x): y for x, y in zip(self.inputs, rows)}
        env.update(zip(self._names, operands))

        def read(x):
            if isinstance(x, Node) and x.step is not None:
                return env[id(x.step)][x.index]
            return x if _is_literal(x) else env[id(x)]

        for step in self.steps:
            with _compat.equation_context(step.eqn):
                env[id(step)] = _compat.bind(step.eqn, [read(x) for x in step.inputs])
        return [read(x) for x in self.outputs]

    def key(self, rows: Sequence[Node]) -> Any:
        """Returns a key of the function, equal for tables of equal rows treated alike.

        Args:
          rows: nodes, among them all `inputs`.

        Returns:
          A tuple; comparing it needs parameters of equations that can be hashed.
        """
        names: dict[int, Any] = {id(x): k for k, x in enumerate(rows)}
        names.update((id(x), ("operand", k)) for k, x in enumerate(self.operands))

        def name(x):
            if isinstance(x, Node) and x.step is not None:
                return names[id(x.step)], x.index
            if _is_literal(x):
                return type(x), getattr(x, "dtype", None), str(x)
            return names[id(x)]

        steps = []
        for k, step in enumerate(self.steps):
            names[id(step)] = "step", k
            params = tuple(sorted(step.eqn.params.items()))
            steps.append((step.eqn.primitive, params, *map(name, step.inputs)))
        types = *(x.aval for x in rows), *map(jax.typeof, self.operands)
        return types, tuple(steps), tuple(map(name, self.outputs))

    def is_linear(self, gradient: Node) -> bool:
        """Returns True if all outputs are linear in the gradient and use nothing else.

        Casts between floats count as linear.
        """
        if self.inputs != [gradient]:
            return False
        linear = {id(gradient): True}

        def of(x):
            if not isinstance(x, Node) or x.step is None:
                return linear.get(id(x), False)
            return linear[id(x.step)]

        for step in self.steps:
            ins = [of(x) for x in step.inputs]
            name = step.eqn.primitive.name
            linear[id(step)] = any(ins) and (
                name in LINEAR
                or (name in ("add", "sub", "add_any") and all(ins))
                or (name == "mul" and not all(ins))
                or (name == "div" and ins == [True, False])
            )
            if any(ins) and not linear[id(step)]:
                return False
        return all(of(x) for x in self.outputs)


def run(
    jaxpr: Any,
    consts: Sequence[Any],
    args: Sequence[Any],
    reduce: Callable[[list[Reduction]], list[jax.Array]],
    report: Callable[[NotByRows], None] | None = None,
) -> list[Any]:
    """Runs a program whose arguments are values and nodes.

    Args:
      jaxpr: an open jaxpr.
      consts: its constants.
      args: its arguments.
      reduce: computes reductions of one table.
      report: is called with each fault, to look for more; then the results mean
        nothing. None raises the first fault.

    Returns:
      The outputs: values, or nodes.

    Raises:
      NotByRows: the program cannot be split.
    """
    runner = _Runner(reduce, report)
    outs = runner.run(jaxpr, consts, args)
    return [x if _has_rows(x) else runner.value(x) for x in outs]


class Split(NamedTuple):
    """A program in three pieces: functions of a row, reductions, and global values.

    Attributes:
      outputs: of the program: nodes, or values of a trace that is over.
      reductions: over rows, in the order of their placeholders in `shared`.
      shared: an open jaxpr of the arguments and outputs that are not nodes, with a
        `placeholder` equation for each reduction.
    """

    outputs: list[Any]
    reductions: list[Reduction | None]
    shared: Any


def split(
    jaxpr: Any,
    consts: Sequence[Any],
    args: Sequence[Any],
    report: Callable[[NotByRows], None] | None = None,
) -> Split:
    """Splits a program without running it.

    Args:
      jaxpr: an open jaxpr.
      consts: its constants.
      args: its arguments: nodes, and types of values.
      report: see `run`.
    """
    outputs: list[Any] = []
    reductions: list[Reduction | None] = []

    def reduce(group):
        reductions.extend(group)
        return [_compat.placeholder(r.path[-1].outvars[0].aval) for r in group]

    def shared(*values):
        values = iter(values)
        ins = [x if isinstance(x, Node) else next(values) for x in args]
        outputs[:] = run(jaxpr, consts, ins, reduce, report)
        return [x for x in outputs if not isinstance(x, Node)]

    types = (x for x in args if not isinstance(x, Node))
    return Split(outputs, reductions, _compat.trace(shared, *types)[0])


class _Runner:
    def __init__(self, reduce, report=None):
        self._reduce, self._report = reduce, report
        self._pending = []
        self._number = itertools.count()
        self._path = ()  # the equations whose programs are being run

    def value(self, x: Any) -> Any:
        """Returns a global value, computed now if it is not known yet."""
        if isinstance(x, Reduction):
            if x.value is None:
                group = [r for r in self._pending if r.table == x.table]
                self._pending = [r for r in self._pending if r.table != x.table]
                for r, value in zip(group, self._reduce(group)):
                    r.value = value
            return x.value
        return without_rows(x)

    def run(self, jaxpr, consts, args):
        env = dict(zip(jaxpr.constvars, consts))
        env.update(zip(jaxpr.invars, args))

        def read(v):
            return v.val if isinstance(v, _compat.Literal) else env[v]

        for eqn in jaxpr.eqns:
            outer, self._path = self._path, (*self._path, eqn)
            ins = [read(v) for v in eqn.invars]
            try:
                outs = self.step(eqn, ins)
            except NotByRows as fault:
                fault.path = fault.path or self._path
                fault.tables = fault.tables or _tables(ins)
                if self._report is None:
                    raise
                self._report(fault)
                outs = self._without_meaning(eqn, fault.tables)
            finally:
                self._path = outer
            env.update(zip(eqn.outvars, outs))
        return [read(v) for v in jaxpr.outvars]

    def _without_meaning(self, eqn, tables):
        """Returns outputs of the right types, after a fault."""
        step = _Step(self._path, [], next(self._number))
        return [
            Node(min(tables), v.aval, step, k)
            if v.aval.shape[:1] == (1,)
            else _compat.placeholder(v.aval)
            for k, v in enumerate(eqn.outvars)
        ]

    def _eval(self, values):
        """Enters the context of a global equation, in which constants are computed."""
        if self._report is None or any(isinstance(x, Tracer) for x in values):
            return contextlib.nullcontext()
        return jax.ensure_compile_time_eval()

    def step(self, eqn, ins):
        name = eqn.primitive.name
        nodes = [x for x in ins if isinstance(x, Node)]
        by_row = [x for x in nodes if x.table is not None]
        makes_rows = any(v.aval.shape[:1] == (1,) for v in eqn.outvars)
        body = _primitives.called(eqn)
        if body is not None and (nodes or (makes_rows and name in _primitives.JITS)):
            return self.run(*body, ins)
        reduces_rows = name in REDUCTIONS and 0 in eqn.params["axes"]
        if reduces_rows and (by_row or (nodes and self._report)):
            self._pending.append(Reduction(nodes[0], self._path))
            return [self._pending[-1]]
        if not by_row and not (makes_rows and _is_uniform(eqn, ins)):
            if self._report and (name == "neg" or (nodes and name in LINEAR)):
                # A function of rows that is run on random numbers knows the sign.
                ins = [self.value(x) if isinstance(x, Reduction) else x for x in ins]
                step = _Step(self._path, ins, next(self._number))
                return [Node(None, eqn.outvars[0].aval, step)]
            values = [self.value(x) for x in ins]
            with _compat.equation_context(eqn), self._eval(values):
                return _compat.bind(eqn, values)
        if name == "cond" and self._report:  # looks for faults in all branches
            return self._cond_at_once(eqn, ins)
        tables = {x.table for x in by_row}
        if len(tables) > 1:
            raise NotByRows(f"{name} of rows of two tables")
        table = tables.pop() if tables else None
        if name == "cond":
            return self._cond(eqn, ins, table)
        if not _keeps_rows(eqn, ins):
            raise NotByRows(f"{name} of rows", is_proved=False)
        # A reduction is computed before a row uses it.
        ins = [self.value(x) if isinstance(x, Reduction) else x for x in ins]
        step = _Step(self._path, ins, next(self._number))
        return [Node(table, v.aval, step, k) for k, v in enumerate(eqn.outvars)]

    def _cond(self, eqn, ins, table):
        """Evaluates a conditional on something global, with rows among its operands.

        Its outputs that have rows come from one equation on nodes. Its global outputs
        come from another conditional, without the rows.
        """
        index, *ins = [self.value(x) if isinstance(x, Reduction) else x for x in ins]
        if isinstance(index, Node):
            raise NotByRows("cond on rows")
        bodies = [_compat.open_jaxpr(body) for body in eqn.params["branches"]]
        if any(map(_reduces_rows, bodies)):
            return self._cond_at_once(eqn, [index, *ins])
        values = [x for x in ins if not isinstance(x, Node)]
        by_row = set()

        def branch(jaxpr, consts):
            def run(*values):
                values = iter(values)
                args = [x if isinstance(x, Node) else next(values) for x in ins]
                runner = _Runner(_refuse)
                runner._path = self._path
                return runner.run(jaxpr, consts, args)

            return run

        def is_of_rows(x):
            return isinstance(x, Node) and x.table is not None

        branches = [branch(*body) for body in bodies]
        for run in branches:  # traced only to see which outputs are of rows

            def look(*values, run=run):
                by_row.update(k for k, x in enumerate(run(*values)) if is_of_rows(x))

            jax.eval_shape(look, *values)

        def rest(run):
            def of(*values):
                outs = enumerate(run(*values))
                return [without_rows(x) for k, x in outs if k not in by_row]

            return of

        whole = iter(())
        if len(by_row) < len(eqn.outvars):
            whole = iter(
                jax.lax.switch(index, [rest(run) for run in branches], *values)
            )
        step = _Step(self._path, [index, *ins], next(self._number))
        return [
            Node(table, v.aval, step, k) if k in by_row else next(whole)
            for k, v in enumerate(eqn.outvars)
        ]

    def _cond_at_once(self, eqn, ins):
        """Evaluates all branches of a conditional that reduce rows, and chooses one.

        So their reductions share a pass over the rows with those outside of it.
        """
        index, *ins = ins
        index = self.value(index) if isinstance(index, Reduction) else index
        if isinstance(index, Node):
            raise NotByRows("cond on rows")
        bodies = [_compat.open_jaxpr(body) for body in eqn.params["branches"]]
        results = [self.run(jaxpr, consts, ins) for jaxpr, consts in bodies]
        outs = []
        for cases in zip(*results):
            if not any(isinstance(x, Node) for x in cases):
                cases = [self.value(x) for x in cases]
                with _compat.equation_context(eqn):
                    outs.append(jax.lax.select_n(index, *cases))
                continue
            types = [x.aval if isinstance(x, Node) else jax.typeof(x) for x in cases]
            choose = lambda which, *xs: [jax.lax.select_n(which, *xs)]
            jaxpr, consts = _compat.trace(choose, index, *types)
            outs += self.run(jaxpr, consts, [index, *cases])
        return outs


def _reduces_rows(body: tuple[Any, Any]) -> bool:
    """Returns True if a program reduces a first axis, which may run over rows."""
    jaxpr, _ = body
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in REDUCTIONS and 0 in eqn.params["axes"]:
            return True
        inner = _primitives.called(eqn)
        if inner is not None and _reduces_rows(inner):
            return True
    return False


def _refuse(group):
    raise NotByRows("a reduction of rows in a branch")


def without_rows(x: Any) -> Any:
    """Returns the value of a node that all rows share, such as a bias of shape [1]."""
    if not isinstance(x, Node):
        return x
    if x.table is not None:
        raise NotByRows("a dense leaf that depends on single rows")
    function = RowFunction([x], [])
    return function([], function.operands)[0]


# ------------------------------------------------------------------ primitives


def _has_rows(x: Any) -> bool:
    return isinstance(x, Node) and x.aval.shape[:1] == (1,)


def _tables(xs: Sequence[Any]) -> frozenset[int]:
    nodes = (x for x in xs if isinstance(x, (Node, Reduction)))
    return frozenset(x.table for x in nodes if x.table is not None)


def _is_literal(x: Any) -> bool:
    return not isinstance(x, (Node, jax.Array)) and np.ndim(x) == 0


def _is_uniform(eqn: Any, ins: Sequence[Any]) -> bool:
    """Returns True if an output `[1, ...]` would be the same in all rows."""
    if eqn.primitive.name == "broadcast_in_dim":
        dims = eqn.params["broadcast_dimensions"]
        return 0 not in dims or isinstance(ins[0], Node)
    return any(isinstance(x, Node) for x in ins) and _keeps_rows(eqn, ins)


def _keeps_rows(eqn: Any, ins: Sequence[Any]) -> bool:
    return row_params(eqn, list(map(_has_rows, ins))) is not None


def row_params(eqn: Any, rows: Sequence[bool], count: int = 1) -> Any:
    """Returns an equation's parameters for one row, None if it mixes rows.

    An output entry of a row is then computed from that row's entry of the inputs.

    Args:
      eqn: an equation with at least one input that has rows, or a broadcast.
      rows: for each input, True if it has one entry per row.
      count: number of leading axes that run over rows, 2 for a stack of tables.

    Returns:
      A dict in which axes and shapes leave out the leading ones, so that programs for
      different numbers of rows can be compared.
    """
    name, params = eqn.primitive.name, dict(eqn.params)
    params.pop("sharding", None)  # of the rows, which differs with their number
    shapes = [v.aval.shape for v in eqn.invars]
    out = eqn.outvars[0].aval.shape
    if name in _primitives.ELEMENTWISE:
        # A scalar broadcasts to all rows, and so does an array [1, D].
        alone = (shape for shape, has_rows in zip(shapes, rows) if not has_rows)
        if any(shape and shape[:1] != (1,) for shape in alone):
            return None
        return params

    if name == "dot_general":
        (left, right), batch = params["dimension_numbers"]
        if rows != [True, False] or any(batch) or any(k < count for k in left):
            return None
        left = tuple(k - count for k in left)
        return {**params, "dimension_numbers": (left, tuple(right))}
    if name in _ALONG:
        if not all(rows) or (len(rows) > 1 and name != "concatenate"):
            return None
        axes = params[_ALONG[name]]
        axes = axes if isinstance(axes, (tuple, list)) else (axes,)
        if any(axis < count for axis in axes):
            return None
        return {**params, _ALONG[name]: tuple(axis - count for axis in axes)}
    if name == "broadcast_in_dim":
        dims, shape = params["broadcast_dimensions"], params["shape"]
        has_rows = rows[0] if rows else False
        if has_rows and dims[:count] != tuple(range(count)):
            return None
        dims = dims[count:] if has_rows else dims
        if any(k < count for k in dims):
            return None
        dims = tuple(k - count for k in dims)
        return {**params, "broadcast_dimensions": dims, "shape": shape[count:]}
    if rows != [True]:
        return None
    first = shapes[0][:count]
    if name == "reshape":
        if out[:count] != first or params["dimensions"] is not None:
            return None
        return {**params, "new_sizes": out[count:]}
    if name == "transpose":
        order = params["permutation"]
        if order[:count] != tuple(range(count)):
            return None
        return {**params, "permutation": tuple(k - count for k in order[count:])}
    if name == "slice":
        if out[:count] != first:
            return None
        return {
            key: None if params[key] is None else tuple(params[key][count:])
            for key in ("start_indices", "limit_indices", "strides")
        }
    return None
