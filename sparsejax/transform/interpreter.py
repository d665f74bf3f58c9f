"""The walk: run a traced program again, with tables that are read by rows.

A function of tables and other arrays is traced to a jaxpr. The jaxpr is run, equation
by equation, in an environment in which a table is a `TableRef` instead of an array. An
equation without a `TableRef` among its inputs is bound unchanged. For the others there
is a rule per primitive, which may

- *read rows*: `ctx.read(ref, ids)` gives the rows and records the read;
- *pass the table on*: return `ref.then(...)`, another row-wise view of it;
- decline with `NotImplemented`, as does a primitive that has no rule. Then the equation
  uses the whole table, which is a dense use.

The same walk serves twice. When collecting (under `jax.eval_shape`, so nothing is
computed), it finds where rows are read, how many, and which uses are dense. When
planting, it gives every read a zero *delta* with the shape of the rows. The gradient
with respect to the deltas is the sparse gradient, and the ids read are its rows.
`plan.py` collects, `grad.py` plants and packages the result.

Sharp edges:

- Reads are numbered in program order, and both walks must number them alike. A rule may
  therefore branch on types, shapes and liveness, never on values.
- The planting walk may have fewer tables than the collecting walk, which has all leaves
  that may be tables. Without a table its reads are missing, and the order of the others
  does not change.
- The collecting walk binds only equations that a table reaches. The output of any other
  equation is a placeholder there: a tracer of the right type, made when a rule asks for
  it. A large model around a lookup is therefore traced twice, not three times.
- Control flow walks a `Body` with its own `Reads`. Their sites are stored by the `path`
  of the body, since the planting walk must know how many deltas to pass into the body
  before it walks it.
- At most one of the tables that meet in an equation stays a table: the one that is
  read or, in arithmetic, the one with the most rows (`ctx.one_table`). The others are
  dense uses.
- Only reads that the loss is differentiated through count (`ctx.live`). A dense use
  that is not differentiated gets the plain array; the table stays sparse.
- The interpreter itself contains no primitives: see `rules/`, and
  `sparsejax.extend.register_rule` for your own.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sparsejax import _arguments, _compat, _mesh, _primitives
from sparsejax._lookup.lookup import read_rows
from sparsejax._rows import indexing
from sparsejax.transform.liveness import Liveness, Registry
from sparsejax.transform.table import (
    TableRef,
    drop_cotangents,
    plant,
    plant_combined,
)


# ------------------------------------------------------------------ rules

Rule = Callable[..., Any]
_RULES = Registry()
_RULES_OF_ARRAYS: set[str] = set()  # names of primitives registered with of_arrays


def register_rule(*primitives: Any, of_arrays: bool = False) -> Callable[[Rule], Rule]:
    """Registers, as a decorator, how a primitive reads or passes on a table's rows.

    The rule is called as `rule(ctx, *inputs, **params)`, with the equation's parameters
    and its inputs, at least one of which is a `TableRef`. It returns the outputs of the
    primitive, or `NotImplemented`, which makes this a use of the whole table. It may
    branch on shapes and types, not on values.

    - `ctx.read(ref, ids)` gives the rows `[*ids.shape, *ref.content]`, and their
      cotangents become the sparse gradient. An id out of range gets no gradient.
    - `ref.then(fn)` is the table with `fn` applied to each row; pass `shape=`, `dtype=`
      or `row_axes=` if `fn` changes them.
    - `ctx.combine` records a read of which the program has a linear combination alone;
      `ctx.dense(x)` is the whole array, which makes the gradient dense.

    A rule gets every kind of view: a stack of tables (`ref.row_axis` is None), or one
    whose row r is not row r of `ref.array` (`ref.has_all_rows` is False).

    Args:
      *primitives: `jax.extend.core.Primitive` objects, or their names. If several
        rules have a name, those for JAX's primitives included, the latest is called
        first; if it returns `NotImplemented`, the one before it is called.
      of_arrays: also call the rule for equations without a `TableRef`, in nested
        programs too. For a primitive that makes a view of any array, which its rule
        returns as `TableRef.of_array(x)`.

    Returns:
      A decorator that returns the rule unchanged.

    Raises:
      TypeError: no primitive is passed, or an argument is neither a primitive nor a
        name.

    Example:
      >>> import jax.numpy as jnp, sparsejax as sj
      >>> @sj.extend.register_rule("rev")
      ... def reverse_content(ctx, ref, *, dimensions):
      ...     if ref.row_axis != 0 or 0 in dimensions:
      ...         return NotImplemented
      ...     return ref.then(lambda rows: jnp.flip(rows, dimensions))
      >>> loss = lambda t: jnp.sum(jnp.flip(t, 1)[jnp.array([3])] * jnp.arange(2.0))
      >>> sj.grad(loss)(jnp.ones((9, 2))).values
      Array([[1., 0.]], dtype=float32)
    """
    is_primitive = lambda x: isinstance(x, str) or hasattr(x, "bind")
    if not primitives or not all(map(is_primitive, primitives)):
        kinds = ", ".join(map(_arguments.kind_of, primitives)) or "none"
        raise TypeError(
            "register_rule takes primitives or their names, as in "
            f"@register_rule(my_p), got {kinds}."
        )

    def register(rule: Rule) -> Rule:
        for primitive in primitives:
            _RULES.add(primitive, rule)
            if of_arrays:
                _RULES_OF_ARRAYS.add(getattr(primitive, "name", primitive))
        return rule

    return register


def has_rule(primitive: str) -> bool:
    """Returns True if a rule is registered for the primitive of that name."""
    return bool(_RULES.find(primitive))


# ------------------------------------------------------------------ reads


class Site(NamedTuple):
    """One place of a program that reads rows of a table.

    Args:
      table: the number of the table.
      lead: static shape of the ids; a loop prepends its length.
      where: `file:line`.
      axes: manual mesh axes over which the rows read vary.
      spec: how the rows are sharded over explicit axes of `mesh`: the parts of a
        PartitionSpec, or ().
      kind: how the gradient of such reads is packaged, see `RuleContext.combine`.
      per_output: how many ids are combined into a row of the result.
    """

    table: int
    lead: tuple[int, ...]
    where: str
    axes: frozenset[str] = frozenset()
    spec: tuple[Any, ...] = ()
    mesh: Any = None
    kind: Any = None
    per_output: float = 1

    def in_loop(self, length: int) -> Site:
        """Returns the same reads, once for every step of a loop."""
        spec = (None, *self.spec) if self.spec else ()
        return self._replace(lead=(length, *self.lead), spec=spec)

    @property
    def num_rows(self) -> int:
        """Number of rows read here."""
        return math.prod(self.lead)


class DenseUse(NamedTuple):
    """One place of a program that uses a whole table and is differentiated."""

    table: int
    primitive: str
    where: str
    why: str


class Reads:
    """The reads of one program (or of one body in it), in order.

    Args:
      deltas: when planting, one zero array `[*lead, *row_shape]` per read; None when
        collecting.
    """

    def __init__(self, deltas: Sequence[jax.Array] | None = None):
        self.sites: list[Site] = []
        self.ids: list[jax.Array] = []
        self._deltas = None if deltas is None else list(deltas)

    @property
    def planting(self) -> bool:
        """Returns True if there are deltas to plant."""
        return self._deltas is not None

    def take(self, count: int) -> list[jax.Array]:
        """Returns the next `count` deltas; none when collecting."""
        if self._deltas is None:
            return []
        at = len(self.sites)
        return self._deltas[at : at + count]

    def add(self, sites: Sequence[Site], ids: Sequence[jax.Array]) -> None:
        """Records reads, with their ids when planting."""
        self.sites.extend(sites)
        self.ids.extend(ids)


@dataclasses.dataclass
class Run:
    """The state that the walks of one program share.

    Args:
      heights: by the number of a table, its number of rows.
      liveness: the variables that the loss is differentiated through.
      bodies: by the path of a body in an equation, the sites in it.
      dense: the dense uses found.
      sites: all reads, once they have been collected.
      with_rules_of_arrays: by the id of a program, the program, and True if it has an
        equation whose rule takes arrays.
    """

    heights: Mapping[int, int]
    liveness: Liveness = dataclasses.field(default_factory=Liveness)
    bodies: dict[Any, tuple[Site, ...]] = dataclasses.field(default_factory=dict)
    dense: list[DenseUse] = dataclasses.field(default_factory=list)
    sites: tuple[Site, ...] = ()
    with_rules_of_arrays: dict[int, tuple[Any, bool]] = dataclasses.field(
        default_factory=dict
    )

    def only(self, tables: Collection[int]) -> Run:
        """Keeps only what concerns these tables, as if the walk had met them alone.

        A rule sees one table at a time, so the reads of the others keep their order.
        """
        mine = lambda sites: tuple(s for s in sites if s.table in tables)
        return dataclasses.replace(
            self,
            heights={table: self.heights[table] for table in tables},
            bodies={path: mine(sites) for path, sites in self.bodies.items()},
            dense=[use for use in self.dense if use.table in tables],
            sites=mine(self.sites),
        )


# ------------------------------------------------------------------ RuleContext


@dataclasses.dataclass(frozen=True)
class RuleContext:
    """The first argument of a rule, followed by its equation's inputs and parameters.

    Args:
      run, reads: the state that the walks share, and the reads of this program.
      eqn: the equation.
      live: for each output of the equation, True if the loss is differentiated through
        it.
      where: the user's `file:line`.
      path: position of the equation in the program.
      producer: `producer(position)` is the equation that computed input number
        `position`, with its input values; None for inputs and constants of this
        program. For rules that must know how an operand was computed, for example as a
        broadcast scalar.

    Example:
      >>> import sparsejax as sj
      >>> @sj.extend.register_rule("my_lookup")
      ... def my_lookup_rule(ctx, table, ids, **params):
      ...     return ctx.read(table, ids) if table.row_axis == 0 else NotImplemented
    """

    run: Run
    reads: Reads
    eqn: Any
    live: tuple[bool, ...]
    where: str
    path: tuple[Any, ...]
    producer: Callable[[int], tuple[Any, list[Any]] | None]

    def read(
        self,
        ref: TableRef,
        ids: jax.Array,
        valid: jax.Array | None = None,
        drop: bool = True,
        fill: bytes | None = None,
    ) -> jax.Array:
        """Reads the view's rows at `ids`, and records the read.

        Args:
          ref: the view.
          ids: integers of any shape. An id outside `[0, V)` reads the nearest row. It
            gives no gradient to the table, nor to the operands of the view's steps.
          valid: optional bool of the same shape; where it is False the read gets no
            gradient.
          drop: False if all ids are in range and valid, or if the rule itself replaces
            the rows of the others.
          fill: what an id outside `[0, V)` reads instead of the nearest row; None
            unless `ref.has_all_rows` and has no steps.

        Returns:
          `[*ids.shape, *ref.content]`.
        """
        height = ref.array.shape[0] if ref.reader is None else ref.height
        ids = _arguments.as_ids(ids, height)
        shape, counts = ids.shape, indexing.in_range(ids, ref.height)
        if valid is not None:
            counts &= jnp.reshape(valid, shape)
        if ref.reader is not None:
            rows = ref.reader.read(self, ref, ids, counts, drop)
            if not ref.steps and not drop:
                return rows
            rows = indexing.merge_axes(rows, len(shape))
        else:
            ids, counts = (indexing.reshape(x, (x.size,)) for x in (ids, counts))
            if ref.first is not None:
                last = _arguments.scalar(ref.height - 1, ids)
                ids = jnp.clip(ids, _arguments.scalar(0, ids), last) + ref.first
            rows = read_rows(ref.array, ids, fill=fill)
            rows = self.plant(ref, rows, ids, counts)
        rows = ref.view(rows)
        has_cotangents = self.reads.planting and any(self.live)
        if drop and has_cotangents and jnp.issubdtype(rows.dtype, jnp.inexact):
            rows = drop_cotangents(rows, counts.reshape(-1))
        return indexing.reshape(rows, shape + rows.shape[1:])

    def combine(
        self,
        ref: TableRef,
        ids: jax.Array,
        combined: jax.Array,
        transpose: Callable[..., jax.Array],
        *operands: jax.Array,
        kind: Any = None,
    ) -> jax.Array:
        """Records a read of rows if the program only has a linear combination of them.

        The rows themselves need not be an array of the program.

        Args:
          ref: a view with all rows of its table; its steps are not applied.
          ids: integers of any shape. An id outside `[0, V)` gets no gradient.
          combined: a linear function of the table's rows at `ids`.
          transpose: `transpose(cotangent, *operands)`, the transpose of that function:
            the cotangent of the rows, `[*ids.shape, *row]`, from the one of `combined`.
          *operands: arrays that `transpose` needs.
          kind: static, for gradients that are more than a SelectedRows. If all reads of
            a table have a kind,
            `kind.package(row_shape, dtype, ids, cotangents, sites)` of the first one
            builds the gradient, whatever fraction of the rows is read. `kind.moved()`
            is the kind of reads that a conditional has put together.

        Returns:
          `combined`, recorded as a read.

        Raises:
          TypeError: `ref` does not have all rows of its table.
        """
        if not ref.has_all_rows:
            raise TypeError(
                f"the rule for {self.eqn.primitive.name} combined rows of a view that "
                "does not have all rows of its table. Return NotImplemented unless "
                "ref.has_all_rows."
            )
        ids = _arguments.as_ids(ids, ref.height).reshape(-1)
        shape = (*ids.shape, *ref.array.shape[1:])
        flat = lambda ct, *xs: transpose(ct, *xs).reshape(shape).astype(ref.dtype)
        counts = indexing.in_range(ids, ref.height)
        return self.plant(ref, combined, ids, counts, flat, operands, kind)

    def plant(
        self,
        ref: TableRef,
        out: jax.Array,
        ids: jax.Array,
        counts: jax.Array,
        transpose: Callable[..., jax.Array] | None = None,
        operands: Sequence[jax.Array] = (),
        kind: Any = None,
    ) -> jax.Array:
        """Plants a delta into `out`, computed from the table's rows at flat `ids`.

        `read` and `combine` call it, and also the readers of sharded tables.

        Args:
          ref: the view.
          out: the rows `[n, *row]`, or a linear combination of them.
          ids: `[n]`, rows of `ref.array`.
          counts: bool `[n]`, True for reads that get a gradient.
          transpose, operands, kind: as in `combine`; None if `out` is the rows.

        Returns:
          `out`, recorded as a read.
        """
        if not any(self.live) or ref.stopped or not ids.size:
            return out  # the loss is not differentiated through this read
        axes, spec = _compat.varying_axes(out), _mesh.explicit_spec(out)
        mesh = jax.typeof(out).sharding.mesh if spec else None
        row = math.prod(ref.array.shape[1:])
        per_output = ids.size * row / out.size if out.size else 1
        site = Site(
            ref.index, ids.shape, self.where, axes, spec, mesh, kind, per_output
        )
        if not self.reads.planting:
            self.reads.add([site], [])
            return out
        (delta,) = self.reads.take(1)
        ids = jnp.where(counts, ids, _arguments.scalar(ref.array.shape[0], ids))
        if ref.mesh is not None:
            ids, here = _mesh.on_mesh(ids, ref.mesh), jax.typeof(out).sharding.mesh
            delta = _mesh.on_mesh(delta, here)
        self.reads.add([site], [ids])
        if transpose is None:
            return plant(out, delta)
        return plant_combined(transpose, out, delta, *operands)

    def dense(
        self, x: Any, why: str = "is not a read of whole rows", live: bool = True
    ) -> Any:
        """Returns a table as the whole array, and any other input unchanged.

        If the loss is differentiated through this equation, and `live`, this is a dense
        use, and the table gets no sparse gradient.
        """
        if not isinstance(x, TableRef):
            return x
        if x.reader is not None:
            x.reader.refuse(x, f"`{self.eqn.primitive.name}` at {self.where} {why}")
        if live and any(self.live) and not x.stopped:
            if self.reads.planting:
                raise AssertionError(
                    f"the rule for {self.eqn.primitive.name} read rows in one walk and "
                    "not in the other: a rule must not branch on values."
                )
            use = DenseUse(x.index, self.eqn.primitive.name, self.where, why)
            if use not in self.run.dense:
                self.run.dense.append(use)
        return x.materialize()

    def one_table(self, *inputs: Any) -> list[Any]:
        """Returns the inputs with at most one table left.

        If several tables meet, the one with the most rows stays, the first of equals.
        The others are arrays: a parameter `[1, D]` that is broadcast against a table is
        an ordinary parameter.
        """
        refs = [x for x in inputs if isinstance(x, TableRef)]
        kept = max(refs, key=lambda ref: ref.height).index
        is_kept = lambda x: isinstance(x, TableRef) and x.index == kept
        why = "combines it with all rows of a table"
        return [x if is_kept(x) else self.dense(x, why) for x in inputs]

    def walk(self, jaxpr: Any, args: Sequence[Any]) -> list[Any]:
        """Walks the program that the equation calls, as part of this one."""
        inner, consts = _compat.open_jaxpr(jaxpr)
        inputs, path = [*consts, *args], (*self.path, 0)
        return walk(
            self.run, self.reads, inner, inputs, self.live, path=path, where=self.where
        )


class Body:
    """A program inside an equation, which is rebuilt around a walk of the program.

    Args:
      ctx: of the equation.
      jaxpr: the program, open or closed.
      number: its place among the programs of the equation.
    """

    def __init__(self, ctx: RuleContext, jaxpr: Any, number: int = 0):
        self._ctx, self._path = ctx, (*ctx.path, number)
        self._jaxpr, self._consts = _compat.open_jaxpr(jaxpr)

    @property
    def sites(self) -> tuple[Site, ...]:
        """The reads of the last walk."""
        return self._ctx.run.bodies.get(self._path, ())

    def walk(
        self,
        args: Sequence[Any],
        deltas: Sequence[jax.Array],
        live: Sequence[bool] | None = None,
    ) -> tuple[list[Any], list[jax.Array]]:
        """Walks the program with reads of its own.

        Args:
          args: arrays and TableRefs.
          deltas: for each of `sites`, what to plant there; none when collecting.
          live: for each output of the program, True if the loss is differentiated
            through it; None if these are the outputs of the equation.

        Returns:
          The outputs, and the ids of each read when planting.
        """
        ctx, inputs = self._ctx, [*self._consts, *args]
        reads = Reads(deltas if ctx.reads.planting else None)
        live = ctx.live if live is None else live
        outs = walk(
            ctx.run,
            reads,
            self._jaxpr,
            inputs,
            live,
            path=self._path,
            where=ctx.where,
        )
        ctx.run.bodies[self._path] = tuple(reads.sites)
        return outs, reads.ids


# ------------------------------------------------------------------ the walk


def walk(
    run: Run,
    reads: Reads,
    jaxpr: Any,
    args: Sequence[Any],
    live: Sequence[bool],
    *,
    path: tuple[Any, ...] = (),
    where: str | None = None,
) -> list[Any]:
    """Runs `jaxpr` on `[*consts, *args]`, some of which may be TableRefs."""
    env: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), args))
    producers: dict[Any, Any] = {}  # the equation that each variable comes from
    live_variables = run.liveness.variables(jaxpr, live)

    def value(atom: Any) -> Any:
        if isinstance(atom, _compat.Literal):
            return atom.val
        return env[atom] if atom in env else _compat.placeholder(atom.aval)

    def is_table(atom: Any) -> bool:
        is_literal = isinstance(atom, _compat.Literal)
        return not is_literal and isinstance(env.get(atom), TableRef)

    for number, eqn in enumerate(jaxpr.eqns):
        producers.update(dict.fromkeys(eqn.outvars, eqn))
        has_refs = any(_compat.is_ref_type(v.aval) for v in (*eqn.invars, *eqn.outvars))
        asks_a_rule = any(map(is_table, eqn.invars)) or _has_rule_of_arrays(run, eqn)
        if not (asks_a_rule or has_refs or reads.planting):
            continue  # `value` makes placeholders of the outputs that a rule asks for

        inputs = [value(v) for v in eqn.invars]
        with _compat.equation_context(eqn):
            if not asks_a_rule:
                env.update(zip(eqn.outvars, _compat.bind(eqn, inputs)))
                continue

            def producer(position: int, eqn=eqn):
                atom = eqn.invars[position]
                if isinstance(atom, _compat.Literal) or atom not in producers:
                    return None
                return producers[atom], [value(v) for v in producers[atom].invars]

            # Any later equation may read what this one writes to a reference.
            live_outputs = (
                (True,) * max(1, len(eqn.outvars))
                if has_refs
                else tuple(v in live_variables for v in eqn.outvars)
            )
            line = _compat.user_line(eqn, where)
            ctx = RuleContext(
                run, reads, eqn, live_outputs, line, (*path, number), producer
            )
            env.update(zip(eqn.outvars, _apply_rule(ctx, inputs)))
    return [value(v) for v in jaxpr.outvars]


def _has_rule_of_arrays(run: Run, eqn: Any) -> bool:
    """Returns True if an equation, or one inside it, has a rule that takes arrays."""
    if eqn.primitive.name in _RULES_OF_ARRAYS:
        return True
    for body in _primitives.bodies(eqn):
        inner, _ = _compat.open_jaxpr(body)
        if id(inner) not in run.with_rules_of_arrays:
            has = any(_has_rule_of_arrays(run, e) for e in inner.eqns)
            # The jaxpr is kept, so that no other one can reuse its id.
            run.with_rules_of_arrays[id(inner)] = inner, has
        if run.with_rules_of_arrays[id(inner)][1]:
            return True
    return False


def _whole(ctx: RuleContext, x: Any) -> Any:
    """Returns an input of an equation as an array; a table of one row is read."""
    if isinstance(x, TableRef) and x.height == 1 and x.array.ndim <= 2:
        row = jnp.zeros((1,), _arguments.index_dtype(1))
        return ctx.read(x, row, drop=False).reshape(x.shape)
    return ctx.dense(x)


def _apply_rule(ctx: RuleContext, inputs: list[Any]) -> list[Any]:
    """Runs an equation by the latest rule that does not decline."""
    eqn = ctx.eqn
    name = eqn.primitive.name
    before = len(ctx.reads.sites)
    for rule in _RULES.find(name):
        outputs = rule(ctx, *inputs, **eqn.params)
        if outputs is not NotImplemented:
            break
        if len(ctx.reads.sites) != before:
            raise TypeError(
                f"the rule for {name} read rows and then returned NotImplemented. "
                "Return NotImplemented before the first ctx.read."
            )
    else:
        return _compat.bind(eqn, [_whole(ctx, x) for x in inputs])
    if not eqn.primitive.multiple_results:
        outputs = [outputs]
    # A user's rule may be wrong. An error here names the rule; three equations later an
    # error would not.
    if len(outputs) != len(eqn.outvars):
        raise TypeError(
            f"the rule for {name} must return {len(eqn.outvars)} output(s), like the "
            f"primitive, got {len(outputs)}."
        )
    for x, v in zip(outputs, eqn.outvars):
        shape = tuple(x.shape) if isinstance(x, TableRef) else np.shape(x)
        if hasattr(v.aval, "shape") and shape != tuple(v.aval.shape):
            raise TypeError(
                f"the rule for {name} must return shape {tuple(v.aval.shape)}, like "
                f"the primitive, got {shape}."
            )
    return list(outputs)
