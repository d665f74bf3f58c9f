"""`explain`: why a gradient is not sparse, and why a step costs more than its rows.

A loss is traced. A jitted step is traced and compiled, but not run:

- `observer` collects the leaves that `value_and_grad` differentiates. It is part of the
  keys of JAX's caches, so the step is traced anew.
- `Lowered.args_info` has what is donated, `memory_analysis` the temporaries.
- The jaxpr has the equations that take or make arrays of a table's shape.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import re
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from sparsejax import _compat, _primitives, cpu
from sparsejax._arguments import PyTree, show_table
from sparsejax.transform.plan import make_plan
from sparsejax.transform.trace import (
    Leaf,
    Observed,
    check_fun,
    observer,
    trace_call,
    trace_flat,
)


@dataclasses.dataclass(frozen=True)
class LeafExplanation:
    """One leaf as `explain` describes it, without arrays.

    Args:
      name: the leaf as the user would write it, e.g. `params['table']`.
      shape, dtype: of the leaf.
      sparse: True if its gradient is a SelectedRows.
      rows_read: number of rows read, duplicates counted; the gradient's capacity.
      reads: `(number of rows, "file:line")` of each read.
      reason: why it is not sparse; empty if it is.
      height: number of rows; of a stack of tables, of all of them.
      tables: the names of the tables that it is a stack of, if an `EmbeddingCollection`
        reads it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    sparse: bool
    rows_read: int
    reads: tuple[tuple[int, str], ...]
    reason: str
    height: int
    tables: tuple[str, ...]

    @property
    def spec(self) -> str:
        """`float32[100,2]`."""
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole leaf."""
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize


@dataclasses.dataclass(frozen=True, repr=False)
class Explanation:
    """The result of `explain`; prints advice and a table.

    Args:
      leaves: the differentiated leaves.
      advice: what costs more than the rows read, and what to do about it.
      name: of a step; empty for a loss.
      argument_bytes, donated_bytes: of a step's arguments; None for a loss.
      temporary_bytes: of buffers inside the compiled step, on one device; None for a
        loss, or if it is not known.
    """

    leaves: tuple[LeafExplanation, ...]
    advice: tuple[str, ...]
    name: str = ""
    argument_bytes: int | None = None
    donated_bytes: int | None = None
    temporary_bytes: int | None = None

    def __getitem__(self, name: str) -> LeafExplanation:
        for leaf in self.leaves:
            if leaf.name == name:
                return leaf
        names = ", ".join(leaf.name for leaf in self.leaves)
        raise KeyError(f"there is no leaf {name}, only {names}.")

    def __repr__(self) -> str:
        advice = [f"{k}. {text}" for k, text in enumerate(self.advice, 1)]
        table = list(_table(self.leaves))
        if not self.name:
            return "\n".join([*table, *advice])
        head = "this costs more than the rows read:"
        if not advice:
            head = (
                "each table with a sparse gradient is updated in place, at the cost of "
                "the rows read."
            )
        memory = [
            f"arguments: {_size(self.argument_bytes)}, of which "
            f"{_size(self.donated_bytes)} are donated",
            f"temporaries: {_size(self.temporary_bytes)}",
        ]
        if tables := [leaf.num_bytes for leaf in self.leaves if leaf.sparse]:
            memory[-1] += f"; the largest table: {_size(max(tables))}"
        if cpu._maps_anew(self.temporary_bytes or 0):
            memory.append(
                "The temporaries are in new pages in each call, 1 ms for 4 MB: call "
                "sparsejax.cpu.keep_freed_pages() first in the program."
            )
        return "\n".join([f"{self.name}: {head}", *advice, *table, *memory])


# -- how it prints ---------------------------------------------------------------------


def _table(leaves: Sequence[LeafExplanation]) -> Iterator[str]:
    """Yields a table of leaves, and lines for groups of leaves that are no tables.

    A group has three leaves or more, not read by rows, with the same reason.
    """
    groups = collections.defaultdict(list)
    for leaf in leaves:
        if not leaf.sparse and not leaf.reads:
            primitives = dict.fromkeys(re.findall(r"`(\w+)` at", leaf.reason))
            groups[", ".join(primitives) or leaf.reason].append(leaf)
    groups = {reason: group for reason, group in groups.items() if len(group) > 2}
    grouped = {leaf for group in groups.values() for leaf in group}
    lines = [line for leaf in leaves if leaf not in grouped for line in _lines(leaf)]
    if lines:
        head = "leaf", "shape", "gradient", "rows read", "where, or why not"
        yield show_table([head, *lines])
    for reason, group in groups.items():
        largest = max(group, key=lambda leaf: math.prod(leaf.shape))
        yield (
            f"{len(group)} parameters are not tables: {reason} "
            f"(the largest is {largest.name}, {largest.spec})"
        )


def _lines(leaf: LeafExplanation) -> list[tuple[str, ...]]:
    """Returns the lines of a leaf in the table."""
    notes = []
    for (rows, where), count in collections.Counter(leaf.reads).items():
        notes.append(f"{f'{count} x ' if count > 1 else ''}{rows} at {where}")
    if not leaf.sparse:
        notes = [f"not sparse: {leaf.reason}", *(f"reads {note}" for note in notes)]
    elif not notes:
        notes = ["not read, so no row of it moves"]
    if leaf.tables:
        some, more = leaf.tables[:4], len(leaf.tables) - 4
        count = f"{len(leaf.tables)} tables" if leaf.tables[1:] else "table"
        notes.append(f"{count}: {', '.join(some)}{f' and {more} more' * (more > 0)}")
    kind = "sparse" if leaf.sparse else "dense"
    share = f"{leaf.rows_read}" if leaf.reads or leaf.sparse else "-"
    first = leaf.name, leaf.spec, kind, share, notes[0]
    return [first, *(("",) * 4 + (note,) for note in notes[1:])]


def _size(count: float | None) -> str:
    if count is None:
        return "unknown"
    unit, *larger = "B", "kB", "MB", "GB"
    while count >= 1000 and larger:
        count, unit = count / 1000, larger.pop(0)
    return f"{count:.3g} {unit}" if count < 1000 else f"{count:,.0f} {unit}"


def _names(leaves: Sequence[LeafExplanation]) -> str:
    names = list(dict.fromkeys(leaf.name for leaf in leaves))
    if len(names) > 3:
        names = [*names[:2], f"{len(names) - 2} more"]
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


# -- explain ---------------------------------------------------------------------------


def explain(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    tables: PyTree = None,
) -> Callable[..., Any]:
    """Explains why gradients of a loss are dense, or what a jitted step costs.

    A loss is traced, and a step is also compiled; nothing is run.

    Args:
      fun: the loss, as for `sparsejax.value_and_grad`. Or a training step: a function
        of `jax.jit`, `nnx.jit` or `eqx.filter_jit`, or a method of one, that returns
        new parameters; without the arguments below.
      argnums: int or tuple of ints, the arguments to differentiate.
      has_aux: True if `fun` returns `(loss, aux)`.
      tables: which leaves are tables, as for `sparsejax.value_and_grad`. A
        required leaf that cannot be sparse is explained, and nothing is raised.

    Returns:
      A function of the same arguments, which may be `jax.ShapeDtypeStruct`. It returns
      an `Explanation`, which prints `advice`, empty if there is nothing to do, and a
      table of `leaves`: the kind of each gradient, the rows read at each file:line, and
      why it is not sparse. `explanation["params['table']"]` has `sparse`, `rows_read`,
      `reads` and `reason`. For a step it also has `argument_bytes`, `donated_bytes` and
      `temporary_bytes`.

    Raises:
      TypeError: a leaf cannot be differentiated, or the function is a step that is not
        jitted.

    Example:
      >>> import functools, jax, jax.numpy as jnp, optax, sparsejax as sj
      >>> def loss(params, ids):
      ...     return jnp.sum(params["table"][ids] @ params["w"])
      >>> params = {"table": jnp.ones((100, 2)), "w": jnp.ones((2, 3))}
      >>> explanation = sj.explain(loss)(params, jnp.array([1, 2]))
      >>> explanation["params['table']"].rows_read
      2
      >>> tx = sj.optim.lazy(optax.sgd(0.1))
      >>> def step(params, state, ids):
      ...     grads = sj.grad(loss)(params, ids)
      ...     updates, state = tx.update(grads, state, params)
      ...     return optax.apply_updates(params, updates), state
      >>> args = params, tx.init(params), jnp.array([1, 2])
      >>> sj.explain(jax.jit(step, donate_argnums=(0, 1)))(*args).advice
      ()
      >>> sj.explain(jax.jit(step))(*args).advice[0].split(",")[0]
      "1 array with the rows of params['table'] is not donated"
    """
    numbers = check_fun(fun, argnums, has_aux)

    @functools.wraps(fun)
    def explain_fun(*args: Any, **kwargs: Any) -> Any:
        may_be_step = numbers == 0 and not has_aux and tables is None
        jitted, before = _jitted(fun)
        if may_be_step and jitted is not None:
            if explanation := _explain_step(jitted, (*before, *args), kwargs):
                return explanation
        seen = Observed()
        try:
            with observer(seen):
                call = trace_call(fun, numbers, has_aux, tables, args, kwargs)
                make_plan(call, strict=False)
        except TypeError as error:
            if may_be_step:
                error.add_note(
                    "If this is a training step, jit it first: sparsejax.explain("
                    "jax.jit(step, donate_argnums=(0, 1)))(params, state, batch)."
                )
            raise
        leaves = tuple(_of_leaf(leaf, seen) for leaf in call.leaves)
        return Explanation(leaves, tuple(_dense_tables(leaves)))

    return explain_fun


def _of_leaf(leaf: Leaf, seen: Observed) -> LeafExplanation:
    return LeafExplanation(
        leaf.name,
        tuple(jnp.shape(leaf.value)),
        jnp.result_type(leaf.value).name,
        leaf.sparse,
        leaf.rows_read,
        tuple((site.num_rows, site.where) for site in leaf.sites),
        leaf.reason,
        leaf.height,
        next((t for name, t in seen.stacks.items() if f"'{name}'" in leaf.name), ()),
    )


# -- dense gradients -------------------------------------------------------------------


def _is_product(leaf: LeafExplanation) -> bool:
    return bool(re.match("`(dot_general|conv_general_dilated)` at", leaf.reason))


# A predicate of a leaf, and what to do about its dense gradient; the first that fits.
_WAYS_OUT: tuple[tuple[Callable[[LeafExplanation], Any], str], ...] = (
    (lambda leaf: "one-hot" in leaf.reason, "table[ids] reads the same rows."),
    (
        lambda leaf: leaf.reason.startswith("rank below 2, but"),
        "Pass True for it in tables=, and it is a table of single numbers.",
    ),
    (
        lambda leaf: (
            _is_product(leaf)
            and (leaf.reads or leaf.height > 8 * math.prod(leaf.shape[1:]))
        ),
        "If these are scores of all rows, sample some rows (sparsejax.losses), or let "
        "the output layer have a table of its own. If rows are read afterwards, read "
        "first: table[ids] @ w.",
    ),
    (_is_product, ""),  # an ordinary layer
    (
        lambda leaf: re.match("`(concatenate|pad|scatter|dynamic_upd)", leaf.reason),
        "Read rows of the table as it is; padding_id= of sparsejax.lookup reads zeros.",
    ),
    (
        lambda leaf: "` at " in leaf.reason,
        "Read rows first, then compute: f(table[ids]) in place of f(table)[ids], if "
        "row i of f needs row i of the table alone.",
    ),
)


def _dense_tables(leaves: Sequence[LeafExplanation]) -> Iterator[str]:
    """Yields why gradients of tables are dense, and what to do about it."""
    for leaf in leaves:
        if not leaf.sparse and (leaf.reads or leaf.height >= 1000):
            ways = (way for fits, way in _WAYS_OUT if fits(leaf))
            if way := next(ways, ""):
                yield f"The gradient of {leaf.name} is dense: {leaf.reason}. {way}"


# -- a step ----------------------------------------------------------------------------


def _jitted(fun: Any) -> tuple[Any, tuple[Any, ...]]:
    """Returns the jitted function of a method or partial, or None; its first arguments.

    The method `lower` of a bound method is the function's `lower`, without `self`.
    """
    before: tuple[Any, ...] = ()
    while True:
        if isinstance(fun, types.MethodType):
            fun, before = fun.__func__, (fun.__self__, *before)
        elif isinstance(fun, functools.partial) and not fun.keywords:
            fun, before = fun.func, (*fun.args, *before)
        else:
            return (fun if hasattr(fun, "lower") else None), before


def _explain_step(fun: Any, args: Sequence[Any], kwargs: Any) -> Explanation | None:
    """Explains a jitted function, or returns None if it has one output, as a loss."""
    seen = Observed()
    inner = lambda stage, name: getattr(stage, name, stage)  # flax and equinox wrap it
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Some donated buffers were not usable")
        try:
            with observer(seen):
                if hasattr(fun, "trace"):
                    traced = inner(fun.trace(*args, **kwargs), "traced")
                    jaxpr, lowered = traced.jaxpr, traced.lower()
                else:
                    jaxpr, lowered = None, inner(fun.lower(*args, **kwargs), "lowered")
        except (TypeError, ValueError) as error:
            if rows := [leaf.name for leaf in seen.leaves if leaf.sparse]:
                error.add_note(
                    f"sparsejax.value_and_grad gave a SelectedRows for {rows[0]}. If "
                    "an optax transformation takes it, put sparsejax.optim.lazy around "
                    "the transformation; add its updates with optax.apply_updates."
                )
            raise
        if len(jax.tree.leaves(lowered.out_info)) == 1:
            return None
        compiled = lowered.compile()
    if jaxpr is None:  # equinox
        jaxpr = trace_flat(fun, args, kwargs).jaxpr
    leaves = tuple(_of_leaf(leaf, seen) for leaf in seen.leaves)
    arguments = jax.tree.leaves(lowered.args_info)
    jaxpr, text = _compat.open_jaxpr(jaxpr)[0], compiled.as_text()
    returned = jax.tree.leaves(lowered.out_info)
    advice = _advice(leaves, arguments, returned, jaxpr, text)
    name = getattr(fun, "__name__", "")
    return Explanation(
        leaves,
        tuple(advice),
        name if name.isidentifier() else "step",
        sum(map(_num_bytes, arguments)),
        sum(_num_bytes(x) for x in arguments if x.donated),
        getattr(compiled.memory_analysis(), "temp_size_in_bytes", None),
    )


def _num_bytes(x: Any) -> int:
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.extended)
    return 0 if is_key else math.prod(x.shape) * jnp.dtype(x.dtype).itemsize


def _advice(
    leaves: Sequence[LeafExplanation],
    arguments: Sequence[Any],
    returned: Sequence[Any],
    jaxpr: Any,
    text: str,
) -> Iterator[str]:
    """Yields what costs more than the rows read, and what to do; the dearest first.

    Args:
      leaves: the leaves that are differentiated.
      arguments: shape, dtype, `donated` of each.
      returned: shape and dtype of each result.
      jaxpr: of the step.
      text: of the compiled step.
    """
    if not leaves:
        yield (
            "The step does not call sparsejax.value_and_grad, so it has no sparse "
            "gradient. Call it in place of jax.value_and_grad, and put "
            "sparsejax.optim.lazy around the optax transformation."
        )
        return
    sparse = [leaf for leaf in leaves if leaf.sparse]
    spec = lambda x: (tuple(x.shape), str(x.dtype))
    specs = set(map(spec, returned))
    if kept := [x for x in sparse if spec(x) not in specs and x.rows_read]:
        yield (
            f"{_names(kept)} is not updated in this function. Update it in the same "
            "jitted function as the gradient: outside of jit an update copies a table."
        )
    heights = {x.shape[:1] for x in sparse}
    is_lost = lambda x: x.shape[:1] in heights and spec(x) in specs
    if lost := [x for x in arguments if not x.donated and is_lost(x)]:
        tables = [x for x in sparse if x.shape[:1] in {y.shape[:1] for y in lost}]
        yield (
            f"{len(lost)} {'arrays' if lost[1:] else 'array'} with the rows of "
            f"{_names(tables)} {'are' if lost[1:] else 'is'} not donated, so each step "
            f"copies {_size(sum(map(_num_bytes, lost)))}, and can be slower than a "
            "dense step. Donate parameters and state (donate_argnums= of jax.jit and "
            "nnx.jit, donate= of eqx.filter_jit)."
        )
    yield from _dense_tables(leaves)
    cost = lambda x: x.num_bytes * (x.rows_read / max(1, x.height) if x.sparse else 1)
    largest = max(leaves, key=cost)
    is_most = cost(largest) > max(1e6, sum(map(cost, leaves)) / 2)
    if sparse and not largest.sparse and is_most:
        yield (
            f"{largest.name} of {_size(largest.num_bytes)} has a dense gradient "
            f"({largest.reason}), and is most of what the step moves."
        )
    # A dense gradient of the same shape, or its transpose, goes through all rows.
    dense = {tuple(sorted(x.shape)) for x in leaves if not x.sparse}
    for shape in sorted({x.shape for x in sparse}):
        if tuple(sorted(shape)) in dense:
            continue
        names = _names([x for x in sparse if x.shape == shape])
        dims = ",".join(map(str, shape))
        if lines := list(dict.fromkeys(_whole_uses(jaxpr, shape))):
            way_out = (
                "Update with sparsejax.optim.lazy(tx), without to_dense(). Put a "
                "projection of rows into the chain inside lazy. Compute what you log "
                "from gradients or rows, as sparsejax.optim.global_norm(grads) does."
            )
            if any("`select_n`" in line for line in lines):
                way_out = "To skip a step, put its update under lax.cond."
            yield (
                f"The step goes through all rows of {names}, or of an array of its "
                f"shape, though the gradient is sparse: {', '.join(lines[:3])}. "
                f"{way_out}"
            )
        elif not lost and re.search(rf"= \w+\[{dims}\]\S* copy\(", text):
            yield (
                f"An array of the shape of {names} is donated, and copied all the "
                "same: the step uses the old array after the update, or returns "
                "results in another order than the arguments."
            )


def _whole_uses(
    jaxpr: Any, shape: tuple[int, ...], enclosing: str | None = None
) -> Iterator[str]:
    """Yields the equations that take or make a whole array of a table's shape."""
    for eqn in jaxpr.eqns:
        bodies, name = _primitives.bodies(eqn), eqn.primitive.name
        for body in bodies:
            inner, _ = _compat.open_jaxpr(body)
            yield from _whole_uses(inner, shape, _compat.user_line(eqn, enclosing))
        if not bodies and name not in _primitives.OF_ROWS:
            avals = [v.aval for v in (*eqn.invars, *eqn.outvars)]
            arrays = [x for x in avals if getattr(x, "shape", None) == shape]
            if any(jnp.issubdtype(x.dtype, jnp.inexact) for x in arrays):
                yield f"`{name}` at {_compat.user_line(eqn, enclosing)}"
