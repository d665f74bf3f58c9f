"""The step of a coordinate without a gradient, read from the program of `tx.update`.

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

import contextlib
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
from sparsejax.optim._lazy import separability
from sparsejax.optim._lazy.row_program import Node, NotByRows, row_params


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
      program: `(open jaxpr, consts)` of `(*shared, v)`, without v if nothing depends on
        it, to d, to c of each first moment, to b of each moment, and to the update and
        new moments of a coordinate of zeros.
      shared: the leaves of the optimizer's state that the program reads.
      later: for each of them, a function of it and of a number of steps: its value that
        many steps later.
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
    later: tuple[Callable[[Any, Any], Any], ...]
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
        moments = self.first_moments, self.second_moment
        return str(self.program[0]), self.shared, self.dtypes, moments

    @property
    def dtype(self) -> Any:
        """Returns the dtype that closed forms are computed in."""
        return indexing.accumulator_dtype(self.dtypes[0])

    def __call__(
        self, shared: Sequence[Any], ahead: Any, v: Any = 1.0
    ) -> tuple[jax.Array, jax.Array, list[jax.Array], list[jax.Array]]:
        """Returns d, c of first moments, b of all, and the results of zeros.

        Args:
          shared: the leaves `shared` of the state.
          ahead: the step to take is this many steps after that state.
          v: the second moment before that step.
        """
        inputs = [later(x, ahead) for later, x in zip(self.later, shared)]
        if self.second_moment is not None:
            dtype = self.dtypes[1 + self.second_moment]
            inputs.append(jnp.asarray(v).astype(dtype))
        decay, *others = _compat.eval_jaxpr(*self.program, *inputs)
        count, size = len(self.first_moments), len(self.names)
        first = [jnp.zeros(0, self.dtype)]
        first += [x.astype(self.dtype).reshape(1) for x in others[:count]]
        ratios, zeros = others[count : count + size], others[count + size :]
        return decay.astype(self.dtype), jnp.concatenate(first), ratios, zeros


class Program:
    """`tx.update` on one row of each table, and on one coordinate of that row.

    Args:
      tx: a transformation that can be lifted to rows of these tables.
      treedef: structure of the parameters, None and MaskedNode counting as leaves.
      specs: its leaves as ShapeDtypeStructs (or None, MaskedNode).
      tables: indices of the leaves.

    Raises:
      NotByRows: `tx` cannot be run without extra arguments.
    """

    def __init__(self, tx: Any, treedef: Any, specs: Any, tables: Sequence[int]):
        # Without extra arguments, whose values at future steps are not known.
        alone = lambda updates, state, params=None: tx.update(updates, state, params)
        alone = optax.GradientTransformation(tx.init, alone)
        self.of = of = separability.Update(alone, treedef, specs, tables)
        self.program = of.trace(of.one_row)
        self.arguments = of.arguments()
        self.refused = {
            owner: NotByRows(f"its state {path} does not have the table's shape")
            for path, leaf, owner in zip(of.paths, of.state, of.leaves.owners)
            if owner is not None and leaf.shape != of.specs[owner].shape
        }
        self.start = len(self.arguments) - len(of.state)  # of the state
        self.shared = [k for k, owner in enumerate(of.leaves.owners) if owner is None]
        types = [
            jax.ShapeDtypeStruct((), x.aval.dtype if isinstance(x, Node) else x.dtype)
            for x in self.arguments
        ]
        for k in self.shared:
            types[self.start + k] = of.state[k]
        self.types = types
        self.numbers = _compat.trace(self._numbers, *types)

        def fresh():
            arrays = [jnp.zeros(s.shape, s.dtype) for s in trees.arrays(of.specs)]
            state = jax.tree.leaves(tx.init(trees.fill(treedef, of.specs, arrays)))
            return {k: state[k] for k in self.shared}

        self.fresh = jax.jit(fresh)()
        self.later: dict[int, Callable[[Any, Any], Any]] = {}

    def _numbers(self, *values: Any) -> list[Any]:
        """Runs `program` on one coordinate: updates of tables, state (0 if shared).

        The arguments are as for `tx.update`, each a number, except shared state. A
        gradient, and a weight of a dense leaf, stand for anything unknown.
        """
        inputs, unknown, of = [], {}, self.of
        for k, (x, value) in enumerate(zip(self.arguments, values)):
            if x in of.gradient.values():
                unknown[x.table] = value
                inputs.append(Row(_zeros(x.aval), x.table))
            elif isinstance(x, Node):
                inputs.append(Row(value, x.table, True))
            elif k >= self.start:
                inputs.append(value)
            else:
                inputs.append(value.reshape((1,) * len(x.shape)))
        jaxpr, consts, used = _compat.only_needed(*self.program)
        inputs = [x for x, is_used in zip(inputs, used) if is_used]
        dtypes = {i: of.specs[i].dtype for i in of.tables}
        outs = _Run(unknown, dtypes, self.refused).program(jaxpr, consts, inputs)
        owners = *of.tables, *of.leaves.owners
        numbers = [0 if i is None else _number(x) for i, x in zip(owners, outs)]
        return [unknown[i] if x is None else x for i, x in zip(owners, numbers)]

    def step_of(self, table: int) -> ZeroGradientStep:
        """Returns the step of a table; raises NotByRows if it cannot be kept exact."""
        if table in self.refused:
            raise self.refused[table]
        moments = [k for k, owner in enumerate(self.of.leaves.owners) if owner == table]
        outputs = [self.of.tables.index(table)]
        outputs += [len(self.of.tables) + k for k in moments]
        table_inputs = [self.arguments.index(self.of.weights[table])]
        table_inputs += [self.start + k for k in moments]
        jaxpr, consts, inputs = _only(self.numbers, outputs)
        shared = [k for k in self.shared if self.start + k in inputs]
        row_inputs = [*(self.start + k for k in shared), *table_inputs]
        others = [v for v, j in zip(jaxpr.invars, inputs) if j not in row_inputs]
        if others:
            raise NotByRows(
                "a step without gradient depends on gradients, on other rows or "
                "coordinates, or on a function that is not smooth",
                [
                    x
                    for x in jaxpr.eqns
                    if any(v is w for v in x.invars for w in others)
                ][:1],
            )
        types = [self.types[j] for j in row_inputs]

        def results(*values):
            values = dict(zip(row_inputs, values))
            return _compat.eval_jaxpr(jaxpr, consts, *(values[j] for j in inputs))

        paths = tuple(self.of.paths[k] for k in moments)
        names = ["its weights", *(f"its state {path}" for path in paths)]
        try:
            program, first, second, decays = _factors(results, types, names)
        except NotByRows as fault:
            raise NotByRows(fault.why, jaxpr.eqns[:1]) from None
        return ZeroGradientStep(
            program=program,
            shared=tuple(shared),
            later=tuple(map(self._later, shared)),
            fresh=tuple(self.fresh[k] for k in shared),
            first_moments=tuple(place - 1 for place in first),
            second_moment=None if second is None else second - 1,
            decays=decays,
            dtypes=tuple(t.dtype for t in types[len(shared) :]),
            names=paths,
            path=jaxpr.eqns[:1],
        )

    def _later(self, k: int) -> Callable[[Any, Any], Any]:
        """Returns a function of a shared leaf and steps: its value after them."""
        if k in self.later:
            return self.later[k]
        leaf, path = self.of.state[k], self.of.paths[k]
        jaxpr, consts, inputs = _only(self.program, [len(self.of.tables) + k])
        if not inputs:
            (after,) = _compat.eval_jaxpr(jaxpr, consts)
            self.later[k] = lambda x, ahead: jnp.where(ahead > 0, after, x)
            return self.later[k]
        if inputs != [self.start + k] or leaf.dtype.kind not in "biuf":
            raise NotByRows(f"its state {path} depends on more than itself")
        values = _tried(leaf)
        next_of = lambda x: _compat.eval_jaxpr(jaxpr, consts, x)[0]
        new = np.asarray(jax.jit(jax.vmap(next_of))(values))
        if np.array_equal(new, values):
            self.later[k] = lambda x, ahead: x
        elif np.array_equal(new, values + np.ones((), leaf.dtype)):
            self.later[k] = lambda x, ahead: x + jnp.asarray(ahead).astype(x.dtype)
        else:
            raise NotByRows(f"its state {path} is not a constant, nor a count of steps")
        return self.later[k]


def _factors(
    results: Callable[..., list[Any]], types: Sequence[Any], names: Sequence[str]
) -> tuple[Any, list[int], int | None, bool]:
    """Returns the program of a step, first and second moments, and if it decays.

    Args:
      results: the update and the new moments, from shared state, weight and moments.
      types: of these arguments.
      names: of weight and moments. A place is an index into them, and into the results.
    """
    count = len(names)
    n = len(types) - count

    def slopes(*values):
        """Returns derivatives of all results, by the weight and by each moment."""

        def along(j):
            function = lambda x: results(*values[:j], x, *values[j + 1 :])
            return jax.jvp(function, [values[j]], [jnp.ones_like(values[j])])[1]

        return [along(j) for j in range(n, n + count)]

    all_results = _compat.trace(lambda *values: results(*values), *types)
    all_slopes = _compat.trace(lambda *values: sum(slopes(*values), []), *types)

    def needs(program, output):
        """Returns the places that an output depends on."""
        return {j - n for j in _only(program, [output])[2] if j >= n}

    for place in range(1, count):
        bends = needs(all_slopes, place * count + place)
        if needs(all_results, place) - {place} or bends:
            why = f"does not multiply {names[place]} by a constant factor"
            raise NotByRows(f"a step without gradient {why}")
    bends = {k: needs(all_slopes, k * count) for k in needs(all_results, 0)}
    curved = {place for place in bends if place in bends[place]}
    linear = sorted(bends.keys() - curved)
    if len(curved) > 1 or any(bends[k] - (curved if k else set()) for k in linear):
        among = " and ".join(names[place] for place in sorted(bends))
        raise NotByRows(f"a step without gradient is not linear in {among}")
    second = next(iter(curved), None)
    first = [place for place in linear if place]

    def program(*values):
        shared, v = values[:n], values[n:]
        ones, zeros, but_v = (
            [np.full((), x, t.dtype) for t in types[n:]] for x in (1, 0, 0)
        )
        if second is not None:
            (ones[second],) = (but_v[second],) = v
        by = slopes(*shared, *ones)
        return [
            -by[0][0],
            *(-by[place][0] for place in first),
            *(by[place][place] for place in range(1, count)),
            results(*shared, *but_v)[0],
            *results(*shared, *zeros)[1:],
        ]

    v = [] if second is None else [types[n + second]]
    return _compat.trace(program, *types[:n], *v), first, second, 0 in bends


def _only(program: Any, outputs: Sequence[int]) -> tuple[Any, list[Any], list[int]]:
    """Returns the program of some outputs, and the inputs that they need."""
    jaxpr, consts = program
    wanted = [k in outputs for k in range(len(jaxpr.outvars))]
    jaxpr, consts, used = _compat.only_needed(jaxpr, consts, wanted)
    return jaxpr, consts, [j for j, is_used in enumerate(used) if is_used]


def _tried(leaf: Any) -> np.ndarray:
    """Returns values of a shared leaf, along a new first axis."""
    values = NUMBERS
    if jnp.issubdtype(leaf.dtype, jnp.integer):
        values = COUNTS[COUNTS < jnp.iinfo(leaf.dtype).max]
    if leaf.dtype == bool:
        values = np.array([False, True])
    values = values.astype(leaf.dtype).reshape(-1, *[1] * len(leaf.shape))
    return np.broadcast_to(values, (len(values), *leaf.shape))


# ------------------------------------------------------------------ one coordinate


class Row(NamedTuple):
    """A value with one entry per row of a table.

    Attributes:
      value: a number of one coordinate, if `moves`; else an array `[1, ...]`, computed
        from a gradient of zero, whose axes of equal entries may be of length 1.
      table: which table.
      moves: True if it depends on weights or moments.
    """

    value: Any
    table: Any
    moves: bool = False


class _Run:
    """Runs a program on one coordinate of each row, with numbers wherever possible.

    Args:
      unknown: by table, an input that stands for what is not of one coordinate.
      dtypes: of the tables. A cast to a narrower one rounds, so it is not smooth.
      refused: by table, why it cannot be kept exact; filled during the run.
    """

    def __init__(self, unknown: dict, dtypes: dict, refused: dict):
        self._unknown, self.dtypes, self.refused = unknown, dtypes, refused

    def unknown(self, table: Any, spec: Any) -> Any:
        # Negative, so that there is an equation, which errors name.
        return (-self._unknown[table]).astype(spec.dtype)

    def program(self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> Any:
        env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args)))

        def read(v):
            if not isinstance(v, _compat.Literal):
                return env[v]
            aval: Any = v.aval
            return np.asarray(v.val, aval.dtype)

        for eqn in jaxpr.eqns:
            with _compat.equation_context(eqn):
                outs = self.equation(eqn, [*map(read, eqn.invars)])
            env.update(zip(eqn.outvars, outs))
        return [read(v) for v in jaxpr.outvars]

    def equation(self, eqn: Any, ins: Sequence[Any]) -> Sequence[Any]:
        name, out = eqn.primitive.name, eqn.outvars[0].aval
        body = _primitives.called(eqn)
        if name == "cond" and _is_concrete(ins[0]):
            body = _compat.open_jaxpr(eqn.params["branches"][int(ins[0])])
            ins = ins[1:]
        if body is not None:
            return self.program(*body, ins)
        rows = [x for x in ins if isinstance(x, Row)]
        tables = {x.table for x in rows}
        table = rows[0].table if rows else None
        wrap = lambda x: x if table is None or isinstance(x, Row) else Row(x, table)
        cases = {"mul": ins, "div": ins[:1]}.get(name, ())
        if any(map(_is_zero, cases)) or (
            name == "select_n" and all(map(_is_zero, ins[1:]))
        ):
            return [wrap(_zeros(out))]
        if name == "select_n" and _is_concrete(ins[0]) and _number(ins[0]) is not None:
            return [wrap(ins[1 + int(_number(ins[0]))])]
        has_rows = [isinstance(x, Row) for x in ins]
        if len(tables) > 1 or (tables and row_params(eqn, has_rows) is None):
            for x in rows:
                if x.moves:  # dense training counts all rows, which move, too
                    error = NotByRows("it combines rows that move", [eqn])
                    self.refused.setdefault(x.table, error)
            return [
                self.unknown(table, v.aval).reshape((1,) * len(v.aval.shape))
                for v in eqn.outvars
            ]
        if not any(x.moves for x in rows):
            values = [x.value if isinstance(x, Row) else x for x in ins]
            return [wrap(x) for x in _run(eqn, values)]
        if name in RESHAPES and out.size == eqn.invars[0].aval.size:
            return ins
        numbers = [*map(_number, ins)]
        if (
            name not in SMOOTH
            or any(x is None for x in numbers)
            or (name == "convert_element_type" and _rounds(eqn, self.dtypes[table]))
        ):
            return [Row(self.unknown(table, v.aval), table, True) for v in eqn.outvars]
        return [Row(_compat.bind(eqn, numbers)[0], table, True)]


def _run(eqn: Any, values: Sequence[Any]) -> Sequence[Any]:
    """Runs an equation; numbers are computed at once, even in a trace."""
    name, out = eqn.primitive.name, eqn.outvars[0].aval
    if name == "broadcast_in_dim" and np.size(values[0]) == 1:
        return [values[0].reshape((1,) * len(out.shape))]
    at_once = all(map(_is_concrete, values))
    with jax.ensure_compile_time_eval() if at_once else contextlib.nullcontext():
        if name in _primitives.ELEMENTWISE:
            return _compat.bind(eqn, jnp.broadcast_arrays(*values))
        shapes = [v.aval.shape for v in eqn.invars]
        fill = lambda x, s: x if x.shape == s else jnp.broadcast_to(x, s)
        return _compat.bind(eqn, [*map(fill, values, shapes)])


def _zeros(spec: Any) -> np.ndarray:
    return np.zeros((1,) * len(spec.shape), spec.dtype)


def _is_concrete(x: Any) -> bool:
    value = x.value if isinstance(x, Row) else x
    return not isinstance(value, Tracer)


def _is_zero(x: Any) -> bool:
    """Returns True if it is known that all entries are 0."""
    value = x.value if isinstance(x, Row) else x
    is_number = not jnp.issubdtype(value.dtype, jax.dtypes.extended)
    return _is_concrete(x) and is_number and not np.any(np.asarray(value))


def _number(x: Any) -> Any:
    """Returns the number that all entries are, or None if they may differ."""
    value = x.value if isinstance(x, Row) else x
    if value.size == 1:
        return value.reshape(())
    if isinstance(value, Tracer):
        return None
    entries = np.asarray(value).reshape(-1)
    return entries[0] if entries.size and np.all(entries == entries[0]) else None


def _rounds(eqn: Any, dtype: Any) -> bool:
    """Returns True for a cast, unless between floats at least as wide as `dtype`."""
    casts = eqn.invars[0].aval.dtype, eqn.params["new_dtype"]
    are_floats = all(jnp.issubdtype(each, jnp.floating) for each in casts)
    return not are_floats or jnp.finfo(casts[1]).bits < jnp.finfo(dtype).bits
