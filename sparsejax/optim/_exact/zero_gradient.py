"""Reads the step of a coordinate without a gradient from the program of `tx.update`.

`tx.update` is traced with one row in each table, and its program is run on one
coordinate of each row, with a gradient of zero. Three things are proved from the
program of single numbers that this gives:

- It depends on nothing but shared state, such as counts, and the weight and moments of
  the coordinate: DCE drops all other inputs. Zero times a number that depends on
  gradients is zero, so the factor of a clip by global norm is dropped, too.
- It is linear in weight and moments: their derivatives do not depend on them. One
  moment, the second, may be an exception. All functions allowed are smooth.
- Shared state is known at all future steps: it is constant, or it counts steps. The
  first step may differ from all later ones, by a flag.

The derivatives are the numbers of the recurrence.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from sparsejax import _compat, _primitives
from sparsejax._rows import indexing
from sparsejax.optim import _trees as trees
from sparsejax.optim._lazy.judge import Update
from sparsejax.optim._lazy.row_program import Node, NotByRows, RowFunction, Runner


# Step counts, and other numbers, at which functions are compared.
COUNTS = np.array([*range(64), *(2 ** np.arange(6, 21))], np.int32)
NUMBERS = np.array([0, 1, -1, 0.3, 1e-3, 1e3])
# Elementwise; such a function equals its tangent only if it is linear.
SMOOTH = frozenset(
    "add add_any convert_element_type copy copy_p div exp integer_pow log logistic mul "
    "name neg pow rsqrt select_n sqrt square sub tanh".split()
)
RESHAPES = frozenset("reshape squeeze broadcast_in_dim".split())


class ZeroGradientStep(NamedTuple):
    """A step without a gradient: w <- (1 - d) w - sum_m c_m(v) m, and m <- b_m m.

    Attributes:
      program: `(open jaxpr, consts)` of `(*shared, ahead, v)`: of the shared state, the
        number of steps from there to this one, and the second moment before it. Its
        results are d, c of the first moments, b of all, and the update and new moments
        of a coordinate whose weight and moments are 0.
      shared: the leaves of the optimizer's state that the program reads.
      fresh: their values in a new state.
      first_moments: positions of the moments that move the weight.
      second_moment: position of the moment v that their factors depend on, or None.
      decays: True if d is not zero.
      dtypes: of the weight and the moments.
      names: of the moments.
      path: an equation of `tx.update` that it is read from.
    """

    program: tuple[Any, list[Any]]
    shared: tuple[int, ...]
    fresh: tuple[Any, ...]
    first_moments: tuple[int, ...]
    second_moment: int | None
    decays: bool
    dtypes: tuple[Any, ...]
    names: tuple[str, ...]
    path: Sequence[Any]

    @property
    def key(self) -> Any:
        """Returns a key that is equal for tables with the same step."""
        jaxpr, consts = self.program
        consts = tuple(np.asarray(x).tobytes() for x in consts)
        moments = self.first_moments, self.second_moment
        return str(jaxpr), consts, self.shared, self.dtypes, moments

    @property
    def dtype(self) -> Any:
        """Returns the dtype that closed forms are computed in."""
        return indexing.accumulator_dtype(self.dtypes[0])

    def __call__(self, shared: Sequence[Any], ahead: Any, v: Any) -> list[jax.Array]:
        return _compat.eval_jaxpr(*self.program, *shared, ahead, v)


class Program:
    """`tx.update` without gradients, on one coordinate of a row of each table.

    Args:
      tx: a transformation that can be lifted to rows of these tables.
      treedef: structure of the parameters, None and MaskedNode counting as leaves.
      specs: its leaves as ShapeDtypeStructs (or None, MaskedNode).
      tables: indices of the leaves.

    Attributes:
      program: the traced update of one row; it has the `arguments`, the last ones of
        which are the state, and for each output its table in `owners`, or None.
      numbers: the same program on one coordinate of each table, with arguments of these
        `types`.
      refused: by table, why it cannot be kept exact.
      fresh: by number, a leaf of new state that follows no table.

    Raises:
      NotByRows: `tx` cannot be run without extra arguments.
    """

    def __init__(self, tx: Any, treedef: Any, specs: Any, tables: Sequence[int]):
        # Without extra arguments, whose values at future steps are not known.
        alone = lambda updates, state, params=None: tx.update(updates, state, params)
        alone = optax.GradientTransformation(tx.init, alone)
        self.of = of = Update(alone, treedef, specs, tables)
        self.program = of.trace(of.one_row)
        self.arguments = of.arguments()
        self.start = len(self.arguments) - len(of.state)  # of the state
        self.owners = *of.tables, *of.leaves.owners  # of the outputs
        self.refused = {
            owner: NotByRows(f"its state {path} does not have the table's shape")
            for path, leaf, owner in zip(of.paths, of.state, of.leaves.owners)
            if owner is not None and leaf.shape != of.specs[owner].shape
        }
        self.types = [
            jax.ShapeDtypeStruct((), x.aval.dtype) if isinstance(x, Node) else x
            for x in self.arguments
        ]
        self.numbers = _compat.trace(self._numbers, *self.types)
        self.later = functools.cache(self._later)

        def fresh():
            arrays = [jnp.zeros(s.shape, s.dtype) for s in trees.arrays(of.specs)]
            state = jax.tree.leaves(tx.init(trees.fill(treedef, of.specs, arrays)))
            return {k: x for k, x in enumerate(state) if of.leaves.owners[k] is None}

        self.fresh = evaluate(fresh)

    def _numbers(self, *values: Any) -> list[Any]:
        """Returns the updates and new states of one coordinate; 0 for shared state.

        A `placeholder` stands for what depends on more than shared state and the
        coordinate itself.
        """
        numbers = {id(x): (v, True) for x, v in zip(self.arguments, values)}
        for x in self.of.gradient.values():
            numbers[id(x)] = np.zeros((), x.aval.dtype), False
        args = [x if isinstance(x, Node) else v for x, v in zip(self.arguments, values)]

        def run(table, nodes):
            function = RowFunction(nodes, self.of.nodes(table))
            return _on_coordinate(function, numbers, self.of.specs[table].dtype)

        def reduce(group):
            for x in group:
                if x.table is not None and run(x.table, [x.node])[0][1]:
                    # Dense training counts all rows, which move, too.
                    error = NotByRows("it combines rows that move", x.path)
                    self.refused.setdefault(x.table, error)
            return [_unknown(x.path[-1], x.path[-1].outvars[0].aval) for x in group]

        runner = _Numbers(reduce)
        outs: list[Any] = list(map(runner.value, runner.run(*self.program, args)))
        for table in self.of.tables:
            places = [k for k, owner in enumerate(self.owners) if owner == table]
            for k, (x, _) in zip(places, run(table, [outs[k] for k in places])):
                aval = self.program[0].outvars[k].aval
                outs[k] = _compat.placeholder(aval) if np.shape(x) else x
        return [0 if owner is None else x for x, owner in zip(outs, self.owners)]

    def step_of(self, table: int) -> ZeroGradientStep:
        """Returns the step of a table; raises NotByRows if it cannot be kept exact."""
        if table in self.refused:
            raise self.refused[table]
        outputs = [k for k, owner in enumerate(self.owners) if owner == table]
        jaxpr, consts, inputs = _only(self.numbers, outputs)
        is_shared = lambda j: self.of.leaves.owners[j - self.start] is None
        shared = [j for j in inputs if j >= self.start and is_shared(j)]
        _, *own = (self.arguments.index(x) for x in self.of.nodes(table))
        others = {v for v, j in zip(jaxpr.invars, inputs) if j not in (*shared, *own)}
        is_other = lambda v: not isinstance(v, _compat.Literal) and v in others
        unknown = [
            eqn
            for eqn in jaxpr.eqns
            if eqn.primitive.name == "placeholder" or any(map(is_other, eqn.invars))
        ]
        if unknown or others:
            raise NotByRows(
                "a step without gradient depends on gradients, on other rows or "
                "coordinates, or on a function that is not smooth",
                unknown[:1],
            )

        def results(*values):
            values = dict(zip((*shared, *own), values))
            return _compat.eval_jaxpr(jaxpr, consts, *(values[j] for j in inputs))

        types = [self.types[j] for j in (*shared, *own)]
        paths = tuple(self.of.paths[j - self.start] for j in own[1:])
        places = [j - self.start for j in shared]
        later = [self.later(k) for k in places]
        try:
            program, first, second, decays = _factors(results, types, later, paths)
        except NotByRows as fault:
            raise NotByRows(fault.why, jaxpr.eqns[:1]) from None
        return ZeroGradientStep(
            program=program,
            shared=tuple(places),
            fresh=tuple(self.fresh[k] for k in places),
            first_moments=first,
            second_moment=second,
            decays=decays,
            dtypes=tuple(self.types[j].dtype for j in own),
            names=paths,
            path=jaxpr.eqns[:1],
        )

    def _later(self, k: int) -> Callable[[Any, Any], Any]:
        """Returns a function of a shared leaf and steps: its value after them."""
        leaf = self.of.state[k]
        jaxpr, consts, inputs = _only(self.program, [len(self.of.tables) + k])
        if not inputs:
            (after,) = evaluate(lambda: _compat.eval_jaxpr(jaxpr, consts))
            return lambda x, ahead: jnp.where(ahead > 0, after, x)
        if inputs == [self.start + k] and leaf.dtype.kind in "biuf":
            values = (NUMBERS if leaf.dtype.kind == "f" else COUNTS).astype(leaf.dtype)
            values = values.reshape(-1, *[1] * leaf.ndim)
            values = np.broadcast_to(values, (len(values), *leaf.shape))
            next_of = lambda x: _compat.eval_jaxpr(jaxpr, consts, x)[0]
            new = evaluate(jax.vmap(next_of), values)
            if np.array_equal(new, values):
                return lambda x, ahead: x
            if np.array_equal(new, values + np.ones((), leaf.dtype)):
                return lambda x, ahead: x + jnp.asarray(ahead).astype(x.dtype)
        path = self.of.paths[k]
        raise NotByRows(f"its state {path} is not a constant, nor a count of steps")


def evaluate(function: Callable, *args: Any) -> Any:
    """Computes a function of arrays at once, even in a trace."""
    return jax.jit(function).lower(*args).compile()(*args)


def _factors(
    results: Callable[..., list[Any]],
    types: Sequence[Any],
    later: Sequence[Callable[[Any, Any], Any]],
    paths: Sequence[str],
) -> tuple[Any, tuple[int, ...], int | None, bool]:
    """Returns how a step without a gradient multiplies a weight and its moments.

    The result is the traced program of the factors, the indices of the first moments,
    the index of the second moment or None, and whether weights decay.

    Args:
      results: the update and the new moments, from shared state, weight and moments.
      types: of these arguments.
      later: for each leaf of shared state, its value after some steps.
      paths: of the moments. A place is 0 for the weight and its update, else it is one
        more than the number of a moment.
    """
    count = 1 + len(paths)
    n = len(types) - count
    names = ["its weights", *(f"its state {path}" for path in paths)]

    def slopes(*values):
        """Returns derivatives of all results, by the weight and by each moment."""

        def along(j):
            function = lambda x: results(*values[:j], x, *values[j + 1 :])
            return jax.jvp(function, [values[j]], [jnp.ones_like(values[j])])[1]

        return [along(j) for j in range(n, n + count)]

    both = lambda *values: sum(slopes(*values), results(*values))
    both = _compat.trace(both, *types)

    def needs(place, *by):
        """Returns the places that a result, or its derivative, depends on."""
        output = place + sum(count * (1 + k) for k in by)
        return {j - n for j in _only(both, [output])[2] if j >= n}

    for place in range(1, count):
        if needs(place) - {place} or needs(place, place):
            why = f"does not multiply {names[place]} by a constant factor"
            raise NotByRows(f"a step without gradient {why}")
    curved = {place for place in needs(0) if place in needs(0, place)}
    linear = sorted(needs(0) - curved)
    is_linear = lambda place: needs(0, place) <= (curved if place else set())
    if 0 in curved or len(curved) > 1 or not all(map(is_linear, linear)):
        among = " and ".join(names[place] for place in sorted(needs(0)))
        raise NotByRows(f"a step without gradient is not linear in {among}")
    second = next(iter(curved), None)
    first = [place for place in linear if place]
    dtype = indexing.accumulator_dtype(types[n].dtype)
    wide = indexing.promote(dtype, *(t.dtype for t in types[n:]))

    def program(*values):
        *shared, ahead, v = values
        shared = [at(x, ahead) for at, x in zip(later, shared)]
        ones, zeros, but_v = (
            [np.full((), x, t.dtype) for t in types[n:]] for x in (1, 0, 0)
        )
        if second is not None:
            ones[second] = but_v[second] = v.astype(types[n + second].dtype)
        by = slopes(*shared, *ones)
        together = lambda xs, dtype: jnp.array([x.astype(dtype) for x in xs], dtype)
        at_zero = [results(*shared, *but_v)[0], *results(*shared, *zeros)[1:]]
        return [
            -by[0][0].astype(dtype),
            together([-by[place][0] for place in first], dtype),
            together([by[place][place] for place in range(1, count)], wide),
            together(map(jnp.asarray, at_zero), wide),
        ]

    numbers = (jax.ShapeDtypeStruct((), x) for x in (jnp.int32, dtype))
    traced = _compat.trace(program, *types[:n], *numbers)
    first = tuple(place - 1 for place in first)
    return traced, first, None if second is None else second - 1, 0 in linear


def _only(program: Any, outputs: Sequence[int]) -> tuple[Any, list[Any], list[int]]:
    """Returns the program of some outputs, and the inputs that they need."""
    jaxpr, consts = program
    wanted = [k in outputs for k in range(len(jaxpr.outvars))]
    jaxpr, consts, used = _compat.only_needed(jaxpr, consts, wanted)
    return jaxpr, consts, [j for j, is_used in enumerate(used) if is_used]


# ------------------------------------------------------------------ one coordinate


class _Numbers(Runner):
    """Computes constants at once; what is the same in all rows is a node, too."""

    def shared(self, eqn: Any, values: list[Any]) -> list[Any]:
        body = _primitives.called(eqn)
        if body is not None:
            return self.run(*body, values)
        if any(v.aval.shape[:1] == (1,) for v in eqn.outvars):
            return self.nodes(eqn, values, None)
        for k, x in enumerate(values):
            if isinstance(x, Node):  # the same in all rows
                function = RowFunction([x], [])
                (values[k],) = function([], function.operands)
        if any(isinstance(x, Tracer) for x in values):
            return super().shared(eqn, values)
        with jax.ensure_compile_time_eval():
            return super().shared(eqn, values)


def _on_coordinate(
    function: RowFunction, numbers: dict[int, tuple[Any, bool]], dtype: Any
) -> list[tuple[Any, bool]]:
    """Runs a function of rows on one coordinate, and tells which results move.

    A value that depends on no weights or moments does not move. It is an array if it is
    known and its entries differ.

    Args:
      function: of rows of one table.
      numbers: its inputs by `id`, and if they move.
      dtype: of the table. A cast to a narrower one rounds, so it is not smooth.
    """
    env: dict[int, Any] = dict(numbers)

    def read(x, dtype=None):
        if not isinstance(x, Node):
            return _number(x if isinstance(x, Tracer) else np.asarray(x, dtype)), False
        return env[id(x)] if x.step is None else env[id(x.step)][x.index]

    for step in function.steps:
        eqn = step.eqn
        ins = [read(x, v.aval.dtype) for x, v in zip(step.inputs, eqn.invars)]
        moves = any(moves for _, moves in ins)
        with _compat.equation_context(eqn):
            outs = _equation(eqn, [x for x, _ in ins], moves, dtype)
        env[id(step)] = [(x, moves and isinstance(x, Tracer)) for x in outs]
    return [read(x) for x in function.outputs]


def _equation(eqn: Any, ins: Sequence[Any], moves: bool, dtype: Any) -> Sequence[Any]:
    """Runs an equation on one coordinate; `moves` if an input does."""
    name, out = eqn.primitive.name, eqn.outvars[0].aval
    is_known = [not isinstance(x, Tracer) for x in ins]
    is_zero = [known and not np.any(x) for x, known in zip(ins, is_known)]
    if (
        (name == "mul" and any(is_zero))
        or (name == "div" and is_zero[0])
        or (name == "select_n" and all(is_zero[1:]))
    ):
        return [np.zeros((), out.dtype)]
    if name == "select_n" and is_known[0] and not np.shape(ins[0]):
        return [ins[1 + int(ins[0])]]
    if all(is_known):
        with jax.ensure_compile_time_eval():
            full = [np.broadcast_to(x, v.aval.shape) for x, v in zip(ins, eqn.invars)]
            return [_number(np.asarray(x)) for x in _compat.bind(eqn, full)]
    if not any(map(np.shape, ins)):
        if name in RESHAPES and (not moves or out.size == eqn.invars[0].aval.size):
            return ins
        rounds = moves and name == "convert_element_type" and _rounds(eqn, dtype)
        if name in (SMOOTH if moves else _primitives.ELEMENTWISE) and not rounds:
            return _compat.bind(eqn, ins)
    return [_unknown(eqn, v.aval.update(shape=())) for v in eqn.outvars]


def _number(x: Any) -> Any:
    """Returns the number that all entries of an array are, or the array."""
    if x.size == 1:
        return x.reshape(())
    if isinstance(x, Tracer):
        return x
    first = np.ravel(x)[:1]
    return first[0] if x.size and np.all(x == first) else x


def _unknown(eqn: Any, aval: Any) -> Any:
    """Returns a value that cannot be computed; errors name the equation."""
    with _compat.equation_context(eqn):
        return _compat.placeholder(aval)


def _rounds(eqn: Any, dtype: Any) -> bool:
    """Returns True for a cast, unless between floats at least as wide as `dtype`."""
    casts = eqn.invars[0].aval.dtype, eqn.params["new_dtype"]
    are_floats = all(jnp.issubdtype(each, jnp.floating) for each in casts)
    return not are_floats or jnp.finfo(casts[1]).bits < jnp.finfo(dtype).bits
