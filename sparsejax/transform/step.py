"""What a jitted training step does with its arguments, for `explain`.

Three things are put together, and nothing is run:

- The leaves that `value_and_grad` differentiates while the step is traced. `observer`
  is told of each call. It is part of the keys of JAX's caches, so the step is traced
  anew. Each leaf is marked by an equation that the compiled program is without.
- The jaxpr: which argument each marked leaf is, and the line of each operation on an
  argument.
- The compiled program: which arguments are donated, updated in place, copied, walked.
"""

import collections
import contextlib
import dataclasses
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from sparsejax import _arguments, _compat, _hlo, _primitives
from sparsejax.transform.trace import Call, LeafExplanation, mark, mark_of, observer


_IDENTITIES = frozenset(
    "name optimization_barrier copy copy_p pvary pcast sharding_constraint".split()
)
_WRITES = ("scatter", "dynamic_update_slice", "update_rows")
_READS_BY_ID = frozenset("gather read_rows bag_sum bags_with".split())
_READS = _READS_BY_ID | {"dynamic_slice", "slice"}


@dataclasses.dataclass(frozen=True)
class Use:
    """An operation on an argument.

    Args:
      primitive: its name.
      line: `file:line` in the user's code.
      late: True if it takes the array as it was before rows were written.
    """

    primitive: str
    line: str
    late: bool


@dataclasses.dataclass(eq=False)
class Argument:
    """An array among the arguments of a step.

    Args:
      name: `params['table']`, as the loss calls it, or else JAX.
      shape, dtype: of the whole array, over all devices.
      num_bytes: on one device; 0 if the program does not need the argument.
      donated: True if it is donated.
      returned: True if a result has its shape and dtype.
      update: what the compiled program does: "in place", "copied", "walked" (an
        operation on all of it), or "not updated".
      uses: the operations on it.
      swapped: True if its buffer gets the new value of another argument.
      gradient: the leaf that it is, for all calls of `value_and_grad`; or None.
      tables: the names of the tables that it is a stack of, if they are known.
      aliases: the other arguments with the same buffer.
      table: the table that its rows follow; for a table, itself.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    donated: bool
    returned: bool
    update: str
    uses: Sequence[Use] = dataclasses.field(repr=False)
    swapped: bool
    gradient: LeafExplanation | None = None
    tables: tuple[str, ...] = ()
    aliases: Sequence["Argument"] = dataclasses.field(default=(), repr=False)
    table: "Argument | None" = dataclasses.field(default=None, repr=False)

    @property
    def is_sparse(self) -> bool:
        """True if the gradient of its table is sparse."""
        leaf = self.table.gradient if self.table else None
        return leaf is not None and leaf.sparse

    @property
    def reasons(self) -> list[str]:
        """The operations that are the reason for a copy or a walk, each once."""
        walks = self.update == "walked"
        is_row_use = lambda x: x.primitive in _READS or x.primitive.startswith(_WRITES)
        found = [x for x in self.uses if (not is_row_use(x) if walks else x.late)]
        return list(dict.fromkeys(f"`{x.primitive}` at {x.line}" for x in found))


@dataclasses.dataclass(frozen=True)
class Step:
    """A step that is traced, not yet compiled.

    Args:
      jaxpr: its open jaxpr.
      lower: lowers it.
      leaves: those that are differentiated.
      arrays: the arrays and numbers that it is called with.
    """

    jaxpr: Any
    lower: Callable[[], Any]
    leaves: Sequence[LeafExplanation]
    arrays: Sequence[Any]

    def compile(self) -> tuple[list[Argument], list[LeafExplanation], Any]:
        """The arguments, the leaves that are none of them, the `memory_analysis()`."""
        with _unused_donations_ignored():
            compiled = self.lower().compile()
        known = _hlo.arguments(_hlo.parse(compiled.as_text()))
        names = _compat.arg_names(self.jaxpr)
        # The program may be without arguments that it does not need.
        by_name = {argument.name: argument for argument in known}
        if len(known) == len(names):
            by_name = dict(zip(names, known))
        follow = _Follow()
        inputs = [(k, 0) for k in range(len(names))]
        follow.end(follow.run(self.jaxpr, inputs))
        results = [v.aval for v in self.jaxpr.outvars]
        found = []
        for k, name in enumerate(names):
            aval, argument = self.jaxpr.invars[k].aval, by_name.get(name)
            found.append(
                Argument(
                    name,
                    aval.shape,
                    aval.dtype.name,
                    argument.num_bytes if argument else 0,
                    bool(argument and argument.donated),
                    any(_same(aval, x) for x in results),
                    _update(argument) if argument else "not updated",
                    follow.uses.get(k, ()),
                    bool(argument and argument.swapped),
                )
            )
        leaves = list(self.leaves)
        for number, k in follow.marks.items():
            found[k].gradient = _add(found[k], leaves[number])
            found[k].tables = leaves[number].tables
        for k, tables in follow.stacks.items():
            found[k].tables = tables
        for numbers in _aliases(self.arrays, self.jaxpr.invars):
            for k in numbers:
                found[k].aliases = [found[other] for other in numbers if other != k]
        _find_tables(found, follow.together)
        counts = collections.Counter(x.gradient.name for x in found if x.gradient)
        for x in found:
            if x.gradient and counts[x.gradient.name] == 1:
                x.name = x.gradient.name
        others = [x for k, x in enumerate(leaves) if k not in follow.marks]
        return found, others, compiled.memory_analysis()


def trace_step(
    fun: Any, args: Sequence[Any], kwargs: Any, leaves: list[LeafExplanation]
) -> Step:
    """Traces a function that has a method `lower`.

    Args:
      fun: a function of `jax.jit`, `nnx.jit` or `eqx.filter_jit`.
      args, kwargs: its arguments.
      leaves: gets those that are differentiated, also if the function raises.
    """

    def observe(call: Call) -> None:
        for leaf, found in zip(call.leaves, explain_leaves(call)):
            if _arguments.is_array(leaf.value):
                mark(leaf.value, len(leaves))
            leaves.append(found)

    with observer(observe), _unused_donations_ignored():
        if hasattr(fun, "trace"):
            traced = _of_jax(fun.trace(*args, **kwargs))
            jaxpr, lower = traced.jaxpr, traced.lower
        else:  # equinox: the jaxpr is in the equation of a call
            flat, tree = jax.tree_util.tree_flatten((args, kwargs))
            places = [k for k, x in enumerate(flat) if _arguments.is_array(x)]

            def call(*arrays):
                new = list(flat)
                for k, x in zip(places, arrays):
                    new[k] = x
                args, kwargs = jax.tree_util.tree_unflatten(tree, new)
                outs = jax.tree.leaves(fun(*args, **kwargs))
                return [x for x in outs if _arguments.is_array(x)]

            whole, _ = _compat.trace(call, *[flat[k] for k in places])
            called = [_primitives.called(e) for e in whole.eqns]
            jaxpr = max((c[0] for c in called if c), key=lambda x: len(x.eqns))
            seen = list(leaves)
            lowered = _of_jax(fun.lower(*args, **kwargs))
            lower, leaves = lambda: lowered, seen
    is_array = lambda x: _arguments.is_array(x) or isinstance(x, (int, float, complex))
    arrays = [x for x in jax.tree.leaves((args, kwargs)) if is_array(x)]
    return Step(_compat.open_jaxpr(jaxpr)[0], lower, leaves, arrays)


def explain_leaves(call: Call) -> list[LeafExplanation]:
    """The leaves of a call of `value_and_grad`, planned and traced under `observer`."""
    follow = _Follow()
    follow.run(call.jaxpr, [(k, 0) for k in range(len(call.inputs))])
    return [
        LeafExplanation(
            leaf.name,
            tuple(jnp.shape(leaf.value)),
            jnp.result_type(leaf.value).name,
            leaf.sparse,
            leaf.rows_read,
            tuple((site.num_rows, site.where) for site in leaf.sites),
            leaf.reason,
            leaf.height,
            follow.stacks.get(leaf.position, ()),
        )
        for leaf in call.leaves
    ]


@contextlib.contextmanager
def _unused_donations_ignored() -> Iterator[None]:
    """Without JAX's warning about donated arguments that no result can take over."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Some donated buffers were not usable")
        yield


def _of_jax(stage: Any) -> Any:
    """JAX's own stage: nnx and equinox wrap it."""
    stage = getattr(stage, "traced", stage)
    return getattr(stage, "lowered", stage)


def _add(argument: Argument, leaf: LeafExplanation) -> LeafExplanation:
    """A leaf that an argument is, and those that it is in other calls, as one."""
    old = argument.gradient
    if old is None:
        return leaf
    return dataclasses.replace(
        leaf,
        sparse=old.sparse and leaf.sparse,
        rows_read=old.rows_read + leaf.rows_read,
        reads=old.reads + leaf.reads,
        reason=old.reason or leaf.reason,
    )


def _aliases(arrays: Sequence[Any], variables: Sequence[Any]) -> list[list[int]]:
    """The numbers of the arguments with the same buffer, for each buffer with several.

    Empty if the arrays are not one by one the variables of the program: nnx passes a
    variable that a module has twice once.
    """
    if [jnp.shape(x) for x in arrays] != [v.aval.shape for v in variables]:
        return []
    numbers: dict[Any, list[int]] = {}
    for k, x in enumerate(arrays):
        if isinstance(x, jax.Array) and _arguments.is_concrete(x) and x.size:
            numbers.setdefault(_buffer(x), []).append(k)
    return [group for group in numbers.values() if group[1:]]


def _buffer(x: jax.Array) -> Any:
    """The address of an array on its first device, or the id of the object."""
    if jnp.issubdtype(x.dtype, jax.dtypes.extended) or x.is_deleted():
        return "id", id(x)
    return x.addressable_shards[0].data.unsafe_buffer_pointer()


def _update(argument: _hlo.Argument) -> str:
    if "walk" in argument.uses:
        return "walked"
    if "copy" in argument.uses or ("write" in argument.uses and not argument.donated):
        return "copied"
    return "in place" if "write" in argument.uses else "not updated"


# -- tables ----------------------------------------------------------------------------


def _find_tables(found: Sequence[Argument], together: Sequence[Sequence[int]]) -> None:
    """Sets the `table` of tables, and of the optimizer state that follows them.

    A table is a leaf that the loss reads by rows. If no leaf is known, because the
    gradient comes from JAX, it is a float array that is read by ids and returned.

    Args:
      found: the arguments of the step.
      together: the numbers of arguments whose rows one operation writes.
    """
    leaves = [x for x in found if x.gradient is not None]
    for x in leaves or found:
        if x.gradient is not None:
            is_table = x.gradient.sparse or bool(x.gradient.reads)
        else:
            is_float = "float" in x.dtype and len(x.shape) > 1
            by_id = any(use.primitive in _READS_BY_ID for use in x.uses)
            is_table = x.returned and is_float and by_id
        x.table = x if is_table and x.num_bytes else None
    leaves = leaves or [x for x in found if x.table]
    states = [x for x in found if x not in leaves and x.returned]
    for x in states:
        same = [y for y in leaves if x.shape and y.shape[:1] == x.shape[:1]]
        if same:
            # mu['a'] follows params['a'], if 'b' has as many rows.
            x.table = max(same, key=lambda y: _common_end(x.name, y.name)).table
    for numbers in together:
        args = [found[k] for k in numbers]
        for x in [x for x in args if x in states and x.shape]:
            tables = [y for y in args if y.table is y and y.shape[0] == x.shape[0]]
            x.table = tables[0] if tables else x.table


def _common_end(a: str, b: str) -> int:
    """The number of words at the end of two names that are the same."""
    count = 0
    for x, y in zip(*(reversed(re.findall(r"\w+", name)) for name in (a, b))):
        if x != y:
            break
        count += 1
    return count


# -- the jaxpr -------------------------------------------------------------------------

# The number of an argument, and of a version of it: a write of rows makes a new one.
_Value = tuple[int, int]


class _Follow:
    """Follows arguments through a jaxpr to their marks, and the operations on them."""

    def __init__(self):
        self.marks: dict[int, int] = {}  # from leaves to arguments
        self.stacks: dict[int, tuple[str, ...]] = {}  # from arguments to their tables
        self.uses: dict[int, list[Use]] = {}
        self.together: list[list[int]] = []  # arguments that one equation writes
        self._written: set[_Value] = set()
        self._versions = 0

    def run(
        self, jaxpr: Any, inputs: Sequence[_Value | None], enclosing: str | None = None
    ) -> Sequence[_Value | None]:
        """The arguments among the outputs of an open jaxpr."""
        values = dict(zip(jaxpr.invars, inputs))
        of = lambda v: None if isinstance(v, _compat.Literal) else values.get(v)
        for eqn in jaxpr.eqns:
            ins = [of(v) for v in eqn.invars]
            if any(ins):
                line = _compat.user_line(eqn, enclosing)
                values.update(zip(eqn.outvars, self._outputs(eqn, ins, line)))
        return [of(v) for v in jaxpr.outvars]

    def end(self, outputs: Sequence[_Value | None]) -> None:
        """Adds the uses of what the step returns."""
        for x in outputs:
            if x in self._written:
                self.uses[x[0]].append(Use("return", "the end of the step", True))

    def _outputs(self, eqn: Any, ins: list, line: str) -> Sequence[_Value | None]:
        name = eqn.primitive.name
        if name == "scan":  # the body gets slices of the others
            kept = sum(_compat.scan_split(eqn.params))
            ins = ins[:kept] + [None] * (len(ins) - kept)
        if bodies := _bodies(eqn):
            # What the body does not get, like the index of a branch, comes first.
            return [self.run(b, ins[-len(b.invars) :], line) for b in bodies][0]
        if name in _IDENTITIES:
            found = mark_of(eqn)
            if isinstance(found, list):
                self.stacks[ins[0][0]] = tuple(found)
            elif found is not None:
                self.marks[found] = ins[0][0]
            return ins
        known = [(v.aval, x) for v, x in zip(eqn.invars, ins) if x]
        for _, x in known:
            use = Use(name, line, x in self._written)
            self.uses.setdefault(x[0], []).append(use)
        if name.startswith(_WRITES):
            self.together.append([k for _, (k, _) in known])
        self._versions += 1
        outs: list[_Value | None] = []
        is_cast = name == "convert_element_type"  # in another dtype, the same table
        for v in eqn.outvars:  # of the same type: the argument's next version
            is_same = lambda aval, v=v: is_cast or _same(aval, v.aval)
            same = [k for k, (aval, _) in enumerate(known) if is_same(aval)]
            if not same:
                outs.append(None)
                continue
            _, old = known.pop(same[0])
            if name.startswith(_WRITES):
                self._written.add(old)
            outs.append((old[0], self._versions))
        return outs


def _bodies(eqn: Any) -> list[Any]:
    """The open jaxprs that an equation runs on its last inputs."""
    name, params = eqn.primitive.name, eqn.params
    if name == "cond":
        return [_compat.open_jaxpr(branch)[0] for branch in params["branches"]]
    keys = {"scan": "jaxpr", "while": "body_jaxpr", "shard_map": "jaxpr"}
    if name in keys:
        return [_compat.open_jaxpr(params[keys[name]])[0]]
    called = _primitives.called(eqn)
    return [called[0]] if called else []


def _same(a: Any, b: Any) -> bool:
    shape_and_dtype = lambda x: (getattr(x, "shape", None), getattr(x, "dtype", None))
    return shape_and_dtype(a) == shape_and_dtype(b)
