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

That a program works row by row is proved before it is run, by the same walk, see
`judge`.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

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
      table: which table; None in a program that is only judged, see `judge.Judge`.
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

    __slots__ = ("node", "path", "table", "aval", "value")

    def __init__(self, node: Node, path: tuple[Any, ...]):
        self.node, self.path, self.aval = node, path, path[-1].outvars[0].aval
        self.table: Any = node.table
        self.value: Any = None

    @property
    def kind(self) -> str:
        """Returns the name of the primitive: `reduce_sum`, ..."""
        return self.path[-1].primitive.name

    @property
    def axes(self) -> tuple[int, ...]:
        return tuple(self.path[-1].params["axes"])


class Shared:
    """A value that is not known, of a program that is only judged."""

    __slots__ = ("aval", "step")

    def __init__(self, aval: Any, step: Any = None):
        self.aval, self.step = aval, step


class RowStep:
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
      outputs: nodes.
      inputs: nodes of the gradient, the weights and the state rows. The function keeps
        those that it needs.

    Attributes:
      operands: the global values that it needs.
      steps: the equations, in the order of the program.
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
            params: Any = tuple(sorted(step.eqn.params.items()))
            try:
                hash(params)
            except TypeError:
                params = object()  # the function equals no other one
            steps.append((step.eqn.primitive, params, *map(name, step.inputs)))
        types = *(x.aval for x in rows), *map(type_of, self.operands)
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


class Runner:
    """Runs a program whose arguments are values and nodes.

    Args:
      reduce: computes reductions of one table.
    """

    def __init__(self, reduce: Callable[[list[Reduction]], list[jax.Array]]):
        self._reduce = reduce
        self._pending: list[Reduction] = []
        self._number = itertools.count()
        self.path: tuple[Any, ...] = ()  # the equations whose programs are being run

    def run(self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        """Returns the outputs: values, nodes or reductions."""
        env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args)))
        path = self.path
        for eqn in jaxpr.eqns:
            self.path = (*path, eqn)
            env.update(zip(eqn.outvars, self.step(eqn, _read(env, eqn.invars))))
        self.path = path
        return _read(env, jaxpr.outvars)

    def step(self, eqn: Any, ins: list[Any]) -> list[Any]:
        """Runs an equation."""
        name, body = eqn.primitive.name, _primitives.called(eqn)
        tables = tables_of(x for x in ins if isinstance(x, Node))
        if not tables:
            return self.shared(eqn, list(map(self.value, ins)))
        if body is not None:
            return self.run(*body, ins)
        if name == "cond":
            return self.cond(eqn, ins)
        if len(tables) > 1:
            raise NotByRows(f"{name} of rows of two tables")
        if name in REDUCTIONS and 0 in eqn.params["axes"]:
            self._pending.append(Reduction(ins[0], self.path))
            return self._pending[-1:]
        return self.nodes(eqn, list(map(self.value, ins)), min(tables))

    def shared(self, eqn: Any, values: list[Any]) -> list[Any]:
        """Computes an equation that has nothing to do with rows."""
        with _compat.equation_context(eqn):
            return _compat.bind(eqn, values)

    def nodes(self, eqn: Any, ins: list[Any], table: int | None) -> list[Any]:
        """Returns the outputs of an equation as nodes."""
        step = RowStep(self.path, ins, next(self._number))
        return [Node(table, v.aval, step, k) for k, v in enumerate(eqn.outvars)]

    def value(self, x: Any) -> Any:
        """Returns a value or node as it is, and the value of a reduction."""
        if not isinstance(x, Reduction):
            return x
        if x.value is None:
            group = [r for r in self._pending if r.table == x.table]
            self._pending = [r for r in self._pending if r.table != x.table]
            for r, value in zip(group, self._reduce(group)):
                r.value = value
        return x.value

    def cond(self, eqn: Any, ins: Sequence[Any]) -> list[Any]:
        """Evaluates all branches, and chooses among their results.

        So their reductions share a pass over the rows with those outside of them.
        """
        index, *ins = ins
        if isinstance(index, Node) and index.table is not None:
            raise NotByRows("cond on rows")
        bodies = map(_compat.open_jaxpr, eqn.params["branches"])
        choose = lambda which, *cases: [jax.lax.select_n(which, *cases)]
        outs = []
        for cases in zip(*[self.run(*body, ins) for body in bodies]):
            if all(x is cases[0] for x in cases):
                outs.append(cases[0])
                continue
            with _compat.equation_context(eqn):
                program = _compat.trace(choose, *map(type_of, (index, *cases)))
            outs += self.run(*program, [index, *cases])
        return outs


def _read(env: dict[Any, Any], variables: Sequence[Any]) -> list[Any]:
    return [v.val if isinstance(v, _compat.Literal) else env[v] for v in variables]


def type_of(x: Any) -> Any:
    """Returns the type of a value, computed or not."""
    return x.aval if isinstance(x, (Node, Shared, Reduction)) else jax.typeof(x)


def tables_of(xs: Iterable[Any]) -> frozenset[int]:
    """Returns the tables whose rows values have, or are reduced from."""
    tables = (x.table for x in xs if isinstance(x, (Node, Reduction)))
    return frozenset(t for t in tables if t is not None)


# ------------------------------------------------------------------ primitives


def _is_literal(x: Any) -> bool:
    return not isinstance(x, (Node, Shared, Reduction, jax.Array)) and np.ndim(x) == 0


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
        # An axis of length 1 is broadcast: its value is the same in all rows.
        is_kept = lambda k, size: k >= count or (size != 1 and not has_rows)
        dims = tuple(k - count for k, size in zip(dims, *shapes) if is_kept(k, size))
        if any(k < 0 for k in dims):
            return None
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
