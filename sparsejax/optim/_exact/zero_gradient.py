"""The step of a coordinate without a gradient, read from the program of `tx.update`.

`tx.update` is traced with one row in each table. Its program is walked for one of them,
with a gradient of zero in that row, and any gradients elsewhere. A value is

- `Known`, if it follows from constants and from shared state, such as counts;
- a `Coordinate`, one number for each coordinate of the row, if it follows from known
  numbers and from the weight and the moments of that coordinate;
- `Unknown`, if it depends on anything else: gradients, other rows, other coordinates.

Zero times an unknown number is zero. So the factor of a clip by global norm, which
depends on all gradients, does not matter. A coordinate has terms, which prove that it
is linear. If nothing unknown reaches the results, the program that remains is one of
single numbers:

    (shared state, weight, moments) -> (update of the weight, new moments)

Shared state must be known at all future steps: it is constant, or it counts steps. The
first step may differ from all later ones, by a flag.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from sparsejax import _compat, _primitives
from sparsejax.optim import _trees as trees
from sparsejax.optim._lazy.row_program import row_params


# Step counts at which numbers that may depend on the step are compared.
COUNTS = np.array([*range(64), *(2 ** np.arange(6, 21))], np.int32)
FLOATS = np.array([0, 1, -1, 0.3, 1e-3, 1e3])
WEIGHT = "weight"


class NotExactError(Exception):
    """The reason why a table cannot be kept exact, and the equation that shows it."""

    def __init__(self, why: str, eqn: Any = None):
        super().__init__(why)
        self.eqn = eqn


class ZeroGradientStep(NamedTuple):
    """A step without a gradient of one coordinate of a table.

    Attributes:
      program: `(open jaxpr, consts)` of `(*shared, weight, *moments)`, all single
        numbers except `shared`, that returns `(update, *new moments)`.
      dtypes: of the weight and the moments.
      needed: for each of these, True if the program reads it.
      shared: the leaves of the optimizer's state that the program reads.
      later: for each of them, a function of it and of a number of steps: its value that
        many steps later.
      fresh: their values in a new state.
      first_moments: positions of the moments that the update is linear in.
      second_moment: position of the one that their factors depend on, or None.
      decays: True if the update is linear in the weight, too.
      names: of the moments.
      bent: the first equation that is not linear in a moment.
      key: equal for tables with the same step.
    """

    program: tuple[Any, list[Any]]
    dtypes: tuple[Any, ...]
    needed: tuple[bool, ...]
    shared: tuple[int, ...]
    later: tuple[Callable[[Any, Any], Any], ...]
    fresh: tuple[Any, ...]
    first_moments: tuple[int, ...]
    second_moment: int | None
    decays: bool
    names: tuple[str, ...]
    bent: Any
    key: Any

    def __call__(
        self, shared: Sequence[Any], ahead: Any, weight: Any, moments: Sequence[Any]
    ) -> list[jax.Array]:
        """The update and the new moments, `ahead` steps after the state `shared`."""
        shared = [later(x, ahead) for later, x in zip(self.later, shared)]
        numbers = [
            jnp.asarray(x).astype(dtype)
            for x, dtype, needed in zip((weight, *moments), self.dtypes, self.needed)
            if needed
        ]
        return _compat.eval_jaxpr(*self.program, *shared, *numbers)


def read_steps(
    tx: Any,
    treedef: Any,
    specs: Sequence[Any],
    owners: Sequence[int | None],
    tables: Sequence[int],
) -> dict[int, ZeroGradientStep | NotExactError]:
    """Reads the steps of some tables, or why they cannot be kept exact.

    Args:
      tx: a transformation that can be lifted to rows of these tables.
      treedef: structure of the parameters, None and MaskedNode counting as leaves.
      specs: its leaves as ShapeDtypeStructs (or None, MaskedNode).
      owners: for each leaf of the state of `tx`, the table that it follows, or None.
      tables: indices of the leaves.
    """
    if not tables:
        return {}
    try:
        program = _Program(tx, treedef, specs, owners, tables)
    except TypeError as error:  # a missing argument
        why = f"it cannot run without a gradient ({str(error).strip()})"
        return dict.fromkeys(tables, NotExactError(why))
    return {table: program.step_of(table) for table in tables}


# ------------------------------------------------------------------ the program


class _Program:
    """`tx.init` and `tx.update` on one row of each table, as jaxprs.

    Attributes:
      shared: the leaves of the state that follow no table.
      places: of the numbers of all tables: the table, and the leaf of the state, which
        is None for the weight.
      numbers: the program on single numbers: `(*shared, *numbers)`, to the updates of
        weights and the new moments, in the same places.
      outs: for each place the output, as the walk left it.
      refused: by table, why it cannot be kept exact.
    """

    def __init__(self, tx, treedef, specs, owners, tables):
        self.tables = list(tables)
        self.specs = {
            i: jax.ShapeDtypeStruct(
                (1, *s.shape[1:]) if i in tables else s.shape, s.dtype
            )
            for i, s in enumerate(specs)
            if not trees.is_none_or_masked(s)
        }
        arrays = list(self.specs.values())
        n = len(arrays)

        def unflatten(values):
            values = dict(zip(self.specs, values))
            return treedef.unflatten(values.get(i, s) for i, s in enumerate(specs))

        def init(*weights):
            return jax.tree.leaves(tx.init(unflatten(weights)))

        def update(*args):
            state = structure.unflatten(args[2 * n :])
            updates, new = optax.with_extra_args_support(tx).update(
                unflatten(args[:n]), state, unflatten(args[n : 2 * n])
            )
            updates = treedef.flatten_up_to(updates)
            return [updates[i] for i in tables] + jax.tree.leaves(new)

        state = jax.eval_shape(lambda *weights: tx.init(unflatten(weights)), *arrays)
        paths, structure = jax.tree_util.tree_flatten_with_path(state)
        self.names = [jax.tree_util.keystr(path) for path, _ in paths]
        self.state = [leaf for _, leaf in paths]
        self.init = _compat.trace(init, *arrays)
        self.update = _compat.trace(update, *arrays, *arrays, *self.state)
        self.shared = [k for k, owner in enumerate(owners) if owner is None]
        self.places = [
            (i, k)
            for i in tables
            for k in (None, *(k for k, owner in enumerate(owners) if owner == i))
        ]
        self.refused: dict[int, NotExactError] = {}
        for i, k in self.places:
            if k is not None and self.state[k].shape != self.specs[i].shape:
                self.refused[i] = NotExactError(
                    f"its state {self.names[k]} does not have the table's shape"
                )
        numbers = [jax.ShapeDtypeStruct((), self._dtype(*p)) for p in self.places]
        shared = [self.state[k] for k in self.shared]
        self.numbers = _compat.trace(self._numbers, *shared, *numbers)
        self.later: dict[int, Callable[[Any, Any], Any]] = {}

    def _dtype(self, table: int, k: int | None) -> Any:
        return (self.specs[table] if k is None else self.state[k]).dtype

    def _numbers(self, *args: Any) -> list[Any]:
        """The program `numbers`."""
        dense = Unknown("gradients, weights or state of other leaves")
        grads = dict.fromkeys(self.specs, dense)
        weights, state = dict(grads), dict.fromkeys(range(len(self.state)), dense)
        state |= zip(self.shared, map(Known, args))
        for (table, k), x in zip(self.places, args[len(self.shared) :]):
            if table in self.refused:
                continue
            place = WEIGHT if k is None else k
            number = Coordinate(x, table, {place: frozenset()})
            if k is None:
                grads[table] = _zero(self.specs[table], table)
                weights[table] = number
            else:
                state[k] = number
        walk = _Walk({i: self.specs[i].dtype for i in self.tables}, self.refused)
        jaxpr, consts, used = _compat.only_needed(*self.update)
        inputs = [*grads.values(), *weights.values(), *state.values()]
        inputs = [x for x, is_used in zip(inputs, used) if is_used]
        outs = walk.program(jaxpr, consts, inputs)
        n = len(self.tables)
        self.outs = [
            outs[self.tables.index(i) if k is None else n + k] for i, k in self.places
        ]
        return [
            x.value if isinstance(x, Coordinate) else np.zeros(()) for x in self.outs
        ]

    def step_of(self, table: int) -> ZeroGradientStep | NotExactError:
        try:
            return self.refused.get(table) or self._step_of(table)
        except NotExactError as error:
            return error

    def _step_of(self, table):
        numbers = [n for n, (i, _) in enumerate(self.places) if i == table]
        moments = [self.places[n][1] for n in numbers[1:]]
        moved, *left = (self.outs[n] for n in numbers)
        first, second, decays = self._recurrence(moved, dict(zip(moments, left)))
        jaxpr, consts, used = _only(self.numbers, numbers)
        needed = tuple(used[len(self.shared) + n] for n in numbers)
        shared = tuple(k for k, is_used in zip(self.shared, used) if is_used)
        dtypes = tuple(self._dtype(*self.places[n]) for n in numbers)
        return ZeroGradientStep(
            program=(jaxpr, consts),
            dtypes=dtypes,
            needed=needed,
            shared=shared,
            later=tuple(map(self._later, shared)),
            fresh=tuple(map(self._fresh, shared)),
            first_moments=tuple(map(moments.index, first)),
            second_moment=None if second is None else moments.index(second),
            decays=decays,
            names=tuple(self.names[k] for k in moments),
            bent=getattr(moved, "bent", None),
            key=(str(jaxpr), dtypes, shared, tuple(map(id, consts)), needed),
        )

    def _recurrence(
        self, moved: Any, left: dict[int, Any]
    ) -> tuple[list[int], int | None, bool]:
        """First moments, second moment and decay, from the terms of the outputs.

        Args:
          moved: the update of the weight.
          left: the new moments, by leaf of the state.
        """
        names = {k: f"its state {self.names[k]}" for k in left}
        names[WEIGHT] = "its weights"
        for k, moment in left.items():
            if _terms(moment) not in ({}, {k: frozenset()}):
                raise NotExactError(
                    f"a step without gradient does not multiply {names[k]} by a "
                    "constant factor",
                    getattr(moment, "bent", None),
                )
        terms = _terms(moved)
        first = sorted(terms.keys() - {None, WEIGHT})
        factors = frozenset().union(*terms.values())
        among = " and ".join(name for k, name in names.items() if k in factors)
        if None in terms or len(factors) > 1 or factors & {WEIGHT, *first}:
            raise NotExactError(
                f"a step without gradient is not linear in {among}"
                if among
                else "a step without gradient adds a number to the weights",
                getattr(moved, "bent", None),
            )
        if terms.get(WEIGHT):
            raise NotExactError(f"its weight decay depends on {among}")
        return first, next(iter(factors), None), WEIGHT in terms

    def _later(self, k: int) -> Callable[[Any, Any], Any]:
        """A function of a shared leaf and a number of steps: its value after them."""
        if k not in self.later:
            self.later[k] = self._find_later(k)
        return self.later[k]

    def _find_later(self, k):
        jaxpr, consts, used = _only(self.update, [len(self.tables) + k])
        inputs = [j for j, is_used in enumerate(used) if is_used]
        leaf = self.state[k]
        if not inputs:
            (after,) = _compat.eval_jaxpr(jaxpr, consts)
            return lambda x, ahead: jnp.where(ahead > 0, after, x)
        own = inputs == [2 * len(self.specs) + k]
        if own and jaxpr.outvars == jaxpr.invars:
            return lambda x, ahead: x
        if own and not jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
            tried = _tried(leaf)
            new = jax.vmap(lambda x: _compat.eval_jaxpr(jaxpr, consts, x)[0])(tried)
            if np.array_equal(new, tried):
                return lambda x, ahead: x
            if jnp.issubdtype(leaf.dtype, jnp.integer) and np.array_equal(
                new, tried + np.ones((), leaf.dtype)
            ):
                return lambda x, ahead: x + jnp.asarray(ahead).astype(x.dtype)
        of_gradients = bool(inputs) and inputs[0] < len(self.specs)
        raise NotExactError(
            f"a step without gradient depends on its state {self.names[k]}, which "
            + (
                "depends on past gradients"
                if of_gradients
                else "is neither a constant nor a count of steps"
            )
        )

    def _fresh(self, k: int) -> Any:
        """A leaf of a new state."""
        jaxpr, consts, used = _only(self.init, [k])
        weights = [
            jnp.zeros(spec.shape, spec.dtype)
            for spec, is_used in zip(self.specs.values(), used)
            if is_used
        ]
        return _compat.eval_jaxpr(jaxpr, consts, *weights)[0]


def _only(program: Any, outputs: Sequence[int]) -> Any:
    """`_compat.only_needed` for some outputs, by their numbers."""
    jaxpr, consts = program
    wanted = [k in outputs for k in range(len(jaxpr.outvars))]
    return _compat.only_needed(jaxpr, consts, wanted)


def _tried(leaf: Any) -> jax.Array:
    """Values of a shared leaf, along a new first axis."""
    if leaf.dtype == bool:
        values = np.array([False, True])
    elif jnp.issubdtype(leaf.dtype, jnp.integer):
        values = COUNTS[COUNTS < jnp.iinfo(leaf.dtype).max]
    else:
        values = FLOATS
    values = values.reshape(-1, *[1] * len(leaf.shape)).astype(leaf.dtype)
    return jnp.broadcast_to(values, (len(values), *leaf.shape))


# ------------------------------------------------------------------ the walk


class Known(NamedTuple):
    """A value that follows from constants and shared state.

    Attributes:
      value: an array; an axis along which all entries are equal may be of length 1.
      table: if it has one entry per row, computed from a gradient of zero: the table.
    """

    value: Any
    table: int | None = None


class Coordinate(NamedTuple):
    """A number of each coordinate of a row.

    Attributes:
      value: the number, of one coordinate.
      table: which table.
      terms: it is a sum of terms. Each is linear in the weight or a moment (None if it
        is not), with a factor that depends on the weight and the moments in the set.
      bent: the first equation that was not linear.
    """

    value: jax.Array
    table: int
    terms: dict[Any, frozenset]
    bent: Any = None


class Unknown(NamedTuple):
    """Any other value.

    Attributes:
      why: what it depends on.
      eqn: the equation that shows it.
      table: if it has one entry per row, computed from a coordinate: the table.
    """

    why: str
    eqn: Any = None
    table: int | None = None


class _Walk:
    """Walks a program on Known, Coordinate and Unknown values.

    Args:
      dtypes: of the tables. A cast to a narrower one rounds, so it is not linear.
      refused: by table, why it cannot be kept exact; filled during the walk.
    """

    def __init__(self, dtypes: dict[int, Any], refused: dict[int, NotExactError]):
        self.dtypes, self.refused = dtypes, refused

    def program(self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> Any:
        env = dict(zip(jaxpr.constvars, map(Known, consts)))
        env.update(zip(jaxpr.invars, args))

        def read(v):
            if isinstance(v, _compat.Literal):
                return Known(np.asarray(v.val, v.aval.dtype))
            return env[v]

        for eqn in jaxpr.eqns:
            env.update(zip(eqn.outvars, self.equation(eqn, [*map(read, eqn.invars)])))
        return [read(v) for v in jaxpr.outvars]

    def equation(self, eqn: Any, ins: Sequence[Any]) -> Sequence[Any]:
        name = eqn.primitive.name
        body = _primitives.called(eqn)
        if body is not None:
            return self.program(*body, ins)
        if name == "cond":
            index, *ins = ins
            bodies = map(_compat.open_jaxpr, eqn.params["branches"])
            branches = [self.program(*body, ins) for body in bodies]
            return [self.select(eqn, index, cases) for cases in zip(*branches)]
        if name == "select_n":
            return [self.select(eqn, ins[0], ins[1:])]
        if any(map(_is_zero, {"mul": ins, "div": ins[:1]}.get(name, ()))):
            return [_zero(eqn.outvars[0].aval, _table_of(ins))]
        rows = [getattr(x, "table", None) is not None for x in ins]
        tables = {x.table for x, has_rows in zip(ins, rows) if has_rows}
        if len(tables) > 1 or (tables and row_params(eqn, rows) is None):
            for x in ins:
                if not isinstance(x, Known) and x.table is not None:
                    why = "it reduces rows that move without a gradient"
                    self.refused.setdefault(x.table, NotExactError(why, eqn))
            return [Unknown("other rows", eqn)] * len(eqn.outvars)
        unknown = _unknown(eqn, ins)
        if unknown:
            return [unknown] * len(eqn.outvars)
        if all(isinstance(x, Known) for x in ins):
            return self.known(eqn, ins)
        return self.coordinates(eqn, ins)

    def known(self, eqn: Any, ins: Sequence[Known]) -> Sequence[Any]:
        """The outputs of an equation on known values."""
        name, values = eqn.primitive.name, [x.value for x in ins]
        if name == "broadcast_in_dim" and values[0].size == 1:
            rank = len(eqn.outvars[0].aval.shape)
            outs = [values[0].reshape((1,) * rank)]
        elif name in _primitives.ELEMENTWISE:
            outs = _run(
                lambda *xs: _compat.bind(eqn, jnp.broadcast_arrays(*xs)), values
            )
        else:
            shapes = [v.aval.shape for v in eqn.invars]
            fill = lambda x, s: x if x.shape == s else jnp.broadcast_to(x, s)
            outs = _run(lambda *xs: _compat.bind(eqn, [*map(fill, xs, shapes)]), values)
        return [Known(x, _table_of(ins)) for x in outs]

    def select(self, eqn: Any, which: Any, cases: Sequence[Any]) -> Any:
        """One of several values; `which` has the number of the case."""
        ins, table = [which, *cases], _table_of([which, *cases])
        if all(map(_is_zero, cases)):
            return _zero(eqn.outvars[0].aval, table)
        if isinstance(which, Known) and not isinstance(which.value, Tracer):
            number = _number(which)
            if number is not None:
                chosen = cases[int(number)]
                is_known = isinstance(chosen, Known)
                return chosen._replace(table=table) if is_known else chosen
        unknown = _unknown(eqn, ins)
        if unknown:
            return unknown
        if all(isinstance(x, Known) for x in ins):
            choose = lambda *xs: [jax.lax.select_n(*jnp.broadcast_arrays(*xs))]
            return Known(_run(choose, [x.value for x in ins])[0], table)
        numbers = [*map(_number, ins)]
        if any(x is None for x in numbers):
            return Unknown("which coordinate of its row it is", eqn, table)
        terms, bent = _sum([*map(_terms, cases)]), _first_bent(ins)
        if isinstance(which, Coordinate):
            terms, bent = _scaled(terms, _inputs(which.terms)), bent or eqn
        return Coordinate(jax.lax.select_n(*numbers), table, terms, bent)

    def coordinates(self, eqn: Any, ins: Sequence[Any]) -> Sequence[Any]:
        """The outputs of an equation on at least one coordinate."""
        name, out = eqn.primitive.name, eqn.outvars[0].aval
        if name in _RESHAPES and out.size == eqn.invars[0].aval.size:
            return ins
        numbers = [*map(_number, ins)]
        if name not in _primitives.ELEMENTWISE or any(x is None for x in numbers):
            unknown = Unknown("other coordinates of its row", eqn, _table_of(ins))
            return [unknown] * len(eqn.outvars)
        (value,) = _compat.bind(eqn, numbers)
        terms = self.terms(eqn, [*map(_terms, ins)], self.dtypes[_table_of(ins)])
        bent = _first_bent(ins) or (eqn if None in terms else None)
        return [Coordinate(value, _table_of(ins), terms, bent)]

    def terms(self, eqn: Any, terms: Sequence[dict], dtype: Any) -> dict:
        """The terms of the output of an elementwise equation."""
        name = eqn.primitive.name
        is_linear = [not terms_of.keys() <= {None} for terms_of in terms]
        if name in _SUMS:
            return _sum(terms)
        if name in _LINEAR or _is_wide_cast(eqn, dtype):
            return terms[0]
        if name == "mul" and not all(is_linear):
            factor, of = terms if is_linear[1] else reversed(terms)
            return _scaled(of, _inputs(factor))
        if name == "div" and not is_linear[1]:
            return _scaled(terms[0], _inputs(terms[1]))
        return {None: frozenset().union(*map(_inputs, terms))}


_RESHAPES = frozenset("reshape squeeze broadcast_in_dim".split())
_SUMS = frozenset("add add_any sub".split())
_LINEAR = frozenset("neg copy copy_p stop_gradient name".split())


def _run(function: Callable, values: Sequence[Any]) -> list[Any]:
    """`function(*values)`, at once if all of them are numbers, even in a trace."""
    if any(isinstance(x, Tracer) for x in values):
        return function(*values)
    with jax.ensure_compile_time_eval():
        return function(*values)


def _is_wide_cast(eqn: Any, dtype: Any) -> bool:
    """Returns True for a cast between floats, to one at least as wide as `dtype`."""
    if eqn.primitive.name != "convert_element_type":
        return False
    old, new = eqn.invars[0].aval.dtype, eqn.params["new_dtype"]
    are_floats = all(jnp.issubdtype(each, jnp.floating) for each in (old, new))
    return are_floats and jnp.finfo(new).bits >= jnp.finfo(dtype).bits


def _table_of(ins: Sequence[Any]) -> Any:
    """The table whose rows are among the values, or None."""
    tables = (getattr(x, "table", None) for x in ins)
    return next((table for table in tables if table is not None), None)


def _unknown(eqn: Any, ins: Sequence[Any]) -> Unknown | None:
    """The output of an equation with an unknown input; None if it has none."""
    unknown = next((x for x in ins if isinstance(x, Unknown)), None)
    if unknown is None:
        return None
    moved = _table_of([x for x in ins if not isinstance(x, Known)])
    return unknown._replace(eqn=unknown.eqn or eqn, table=moved)


def _zero(spec: Any, table: int | None) -> Known:
    return Known(np.zeros((1,) * len(spec.shape), spec.dtype), table)


def _is_zero(x: Any) -> bool:
    """Returns True if it is known that all entries are 0."""
    if not isinstance(x, Known) or isinstance(x.value, Tracer):
        return False
    if jnp.issubdtype(x.value.dtype, jax.dtypes.extended):
        return False
    return not np.any(np.asarray(x.value))


def _number(x: Known | Coordinate) -> Any:
    """The number of one coordinate, or None if that may differ between coordinates."""
    if x.value.size == 1:
        return x.value.reshape(())
    if isinstance(x.value, Tracer):
        return None
    entries = np.asarray(x.value).reshape(-1)
    return entries[0] if entries.size and np.all(entries == entries[0]) else None


def _terms(x: Any) -> dict:
    """The terms of a value, see `Coordinate`; raises if it is unknown."""
    if isinstance(x, Unknown):
        raise NotExactError(f"a step without gradient depends on {x.why}", x.eqn)
    if isinstance(x, Coordinate):
        return x.terms
    return {} if _is_zero(x) else {None: frozenset()}


def _inputs(terms: dict) -> frozenset:
    """The weight and moments that a value depends on."""
    return frozenset(terms).union(*terms.values()) - {None}


def _scaled(terms: dict, factor: frozenset) -> dict:
    return {of: inputs | factor for of, inputs in terms.items()}


def _sum(terms: Sequence[dict]) -> dict:
    total: dict[Any, frozenset] = {}
    for each in terms:
        for of, inputs in each.items():
            total[of] = total.get(of, frozenset()) | inputs
    return total


def _first_bent(ins: Sequence[Any]) -> Any:
    return next((x.bent for x in ins if isinstance(x, Coordinate) and x.bent), None)
