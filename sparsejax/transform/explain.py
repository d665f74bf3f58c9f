"""`explain`: why a gradient is not sparse, and what a step does with its tables."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from sparsejax import _arguments, cpu
from sparsejax._arguments import PyTree
from sparsejax.transform.plan import make_plan
from sparsejax.transform.step import Argument, Step, explain_leaves, trace_step
from sparsejax.transform.trace import LeafExplanation, check_fun, observer, trace_call


_CALL = "sparsejax.explain"
_REFUSED = "JAX does not run the step"


@dataclasses.dataclass(frozen=True, repr=False)
class Explanation:
    """The result of `explain`; prints as a table, with `leaves` as data."""

    leaves: tuple[LeafExplanation, ...]

    def __getitem__(self, name: str) -> LeafExplanation:
        return _find(self.leaves, name)

    def __repr__(self) -> str:
        alone, groups = _group(self.leaves)
        table = [line for leaf in alone for line in _lines(leaf, leaf)]
        return "\n".join([_arguments.show_table([_HEAD, *table]), *groups])


@dataclasses.dataclass(frozen=True, repr=False)
class StepExplanation:
    """The result of `explain` for a jitted step; prints advice, and a table.

    Args:
      name: of the function.
      advice: what costs more than the rows read, or makes JAX refuse the step, and what
        to do about it.
      arrays: the tables, and the arrays of optimizer state that follow their rows.
        Each has `name`, `shape`, `dtype`, `num_bytes`, `donated`; `update`: "in place",
        "copied", "walked" (an operation on all rows) or "not updated"; `reasons`: the
        operations that are the reason for a copy or a walk; `tables`: the names of the
        tables in a stack; `table`: the table that it follows, or itself; `gradient`: a
        `LeafExplanation`, or None for state and if `value_and_grad` of sparsejax was
        not called.
      leaves: all leaves that `value_and_grad` of sparsejax differentiates.
      argument_bytes, donated_bytes: of all arguments, on one device.
      temporary_bytes: of buffers inside the program; None if it is not known.
      needed_bytes: to read and write the rows read, and all that is not a table; None
        if `value_and_grad` of sparsejax is not called.
      moved_bytes: the same with the copies and walks of this program, a lower bound.
    """

    name: str
    advice: tuple[str, ...]
    arrays: tuple[Argument, ...]
    leaves: tuple[LeafExplanation, ...]
    argument_bytes: int
    donated_bytes: int
    temporary_bytes: int | None
    needed_bytes: int | None
    moved_bytes: int

    def __getitem__(self, name: str) -> Argument:
        return _find(self.arrays, name)

    def __repr__(self) -> str:
        advice = [f"{k}. {text}" for k, text in enumerate(self.advice, 1)]
        told = "this costs more than the rows read:"
        if any(_REFUSED in text for text in advice):
            told = "this fails, or costs more than the rows read:"
        if not advice:
            told = "each table is updated in place, at the cost of the rows read."
        table = [(*_HEAD[:4], "update", _HEAD[4])]
        for x in self.arrays:
            if x.table is x:
                state = [y for y in self.arrays if y.table is x and y is not x]
                other = [y for y in state if y.update != x.update]
                same = len(state) - len(other)
                update = x.update + (f", {same} of state too" if same else "")
                table += _with_update(_lines(x, x.gradient), update)
                table += [
                    (f"  {y.name}", _spec(y), "", "", y.update, "") for y in other
                ]
        shown = {id(x.gradient) for x in self.arrays}
        alone, groups = _group([x for x in self.leaves if id(x) not in shown])
        for leaf in alone:
            table += _with_update(_lines(leaf, leaf), "")
        size = lambda count: "unknown" if count is None else _size(count)
        pages = ""
        if cpu._maps_anew(self.temporary_bytes or 0):
            pages = (
                ", in new pages in each call, 1 ms for 4 MB; call "
                "sparsejax.cpu.keep_freed_pages() first in the program"
            )
        return "\n".join(
            [
                f"{self.name}: {told}",
                *advice,
                _arguments.show_table(table),
                *groups,
                f"arguments: {_size(self.argument_bytes)}, of which "
                f"{_size(self.donated_bytes)} are donated",
                f"temporaries: {size(self.temporary_bytes)}{pages}",
                f"bytes moved: at least {_size(self.moved_bytes)}; needed for the rows "
                f"read, and all that is not a table: {size(self.needed_bytes)}",
            ]
        )


# -- how it prints ---------------------------------------------------------------------

_HEAD = ("leaf", "shape", "gradient", "rows read", "where, or why not")


def _find(entries: Sequence[Any], name: str) -> Any:
    for entry in entries:
        if entry.name == name:
            return entry
    known = ", ".join(entry.name for entry in entries)
    raise KeyError(f"sparsejax.explain: there is no leaf {name}, only {known}.")


def _spec(x: Any) -> str:
    return f"{x.dtype}[{','.join(map(str, x.shape))}]"


def _lines(x: Any, leaf: LeafExplanation | None) -> list[tuple[str, ...]]:
    """The lines of an array in the table, whose gradient `leaf` describes."""
    kind, share, notes = "dense", "-", ["not by sparsejax.value_and_grad"]
    if leaf is not None:
        notes = [f"{rows} at {where}" for rows, where in leaf.reads]
        notes = notes or ["not read"] * leaf.sparse
        if not leaf.sparse:
            notes = [f"not sparse: {leaf.reason}"] + [f"reads {note}" for note in notes]
        kind = "sparse" if leaf.sparse else kind
        share = f"{leaf.rows_read}" if leaf.reads or leaf.sparse else share
    if x.tables:
        first, more = x.tables[:4], len(x.tables) - 4
        count = f"{len(x.tables)} tables" if x.tables[1:] else "table"
        notes.append(f"{count}: {', '.join(first)}{f' and {more} more' * (more > 0)}")
    first = (x.name, _spec(x), kind, share, notes[0] if notes else "")
    return [first, *(("", "", "", "", note) for note in notes[1:])]


def _with_update(lines: list[tuple[str, ...]], update: str) -> list[tuple[str, ...]]:
    updates = [update] + [""] * (len(lines) - 1)
    return [(*line[:4], x, line[4]) for line, x in zip(lines, updates)]


def _group(
    leaves: Sequence[LeafExplanation],
) -> tuple[list[LeafExplanation], list[str]]:
    """The leaves that get a line each, and a line for each group of other leaves.

    A leaf that is not read by rows is not a table. Three or more with the same reason
    are a group.
    """
    groups: dict[str, list[LeafExplanation]] = {}
    for leaf in leaves:
        if not leaf.sparse and not leaf.reads:
            names = dict.fromkeys(re.findall(r"`(\w+)` at", leaf.reason))
            groups.setdefault(", ".join(names) or leaf.reason, []).append(leaf)
    lines = []
    grouped: set[int] = set()
    for reason, group in groups.items():
        if len(group) > 2:
            grouped |= set(map(id, group))
            large = max(group, key=lambda leaf: math.prod(leaf.shape))
            lines.append(
                f"{len(group)} parameters are not tables: {reason} "
                f"(the largest is {large.name}, {_spec(large)})"
            )
    return [leaf for leaf in leaves if id(leaf) not in grouped], lines


def _size(count: float) -> str:
    unit, *larger = "B", "kB", "MB", "GB"
    while count >= 1000 and larger:
        count, unit = count / 1000, larger.pop(0)
    return f"{count:.3g} {unit}" if count < 1000 else f"{count:,.0f} {unit}"


def _list(names: Sequence[str]) -> str:
    shown = names if len(names) < 4 else [*names[:2], f"{len(names) - 2} more"]
    return " and ".join([", ".join(shown[:-1])] * (len(shown) > 1) + [shown[-1]])


# -- explain ---------------------------------------------------------------------------


def explain(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    tables: PyTree = None,
) -> Callable[..., Any]:
    """Explains how `value_and_grad(fun)` treats each leaf, or what a jitted step does.

    Nothing is run. A loss is traced. If a table's gradient is dense but should not be,
    the last column shows the operation that needs all rows, and its line. Read rows
    there instead, register a rule for that primitive
    (`sparsejax.extend.register_rule`), or, if more than half of the rows are read,
    require a sparse gradient with `tables=`.

    A jitted training step is also compiled. The first lines say what makes it cost more
    than the rows that it reads, and what to do: arguments that are not donated, dense
    gradients, tables that the compiled program copies or goes through as a whole. They
    also name an array that is donated twice. A stack of an `EmbeddingCollection` is
    shown with the names of its tables.

    Args:
      fun: the loss, as for `sparsejax.value_and_grad`. Or a training step: a function
        of `jax.jit`, `nnx.jit` or `eqx.filter_jit` that calls
        `sparsejax.value_and_grad` and returns new parameters; without the arguments
        below.
      argnums: int or tuple of ints, the arguments to differentiate.
      has_aux: True if `fun` returns `(loss, aux)`.
      tables: which leaves are tables, as for `sparsejax.value_and_grad`. A
        required leaf that cannot be sparse is explained, and nothing is raised.

    Returns:
      A function of the same arguments, which may be `jax.ShapeDtypeStruct`. For a loss
      it returns an `Explanation`, which prints as a table: each leaf, the kind of its
      gradient (sparse or dense), the number of rows read at each file:line, and why the
      gradient is not sparse. Three or more leaves that are not tables, for the same
      reason, share a line. `found["params['table']"]` (and `found.leaves` for all
      leaves) hold the same as data: `name`, `shape`, `dtype`, `sparse`, `rows_read`,
      `reads`, `reason`.

      For a step it returns a `StepExplanation`: `advice`, a tuple of texts, is empty if
      each table is updated in place. `arrays` has the tables and the optimizer state
      that follows their rows, each with `update` ("in place", "copied", "walked" or
      "not updated"), `donated`, `reasons` and `gradient`. `argument_bytes`,
      `donated_bytes`, `temporary_bytes`, `moved_bytes` and `needed_bytes` are of one
      device.

    Raises:
      TypeError: a leaf cannot be differentiated; the output is not a scalar, and the
        function is not jitted; or the step raises after it got a SelectedRows.

    Example:
      >>> import functools, jax, jax.numpy as jnp, optax, sparsejax as sj
      >>> def loss(params, ids):
      ...     rows = params["table"][ids]
      ...     return jnp.sum(rows @ params["w"])
      >>> params = {"table": jnp.ones((100, 2)), "w": jnp.ones((2, 3))}
      >>> found = sj.explain(loss)(params, jnp.array([1, 2]))
      >>> found["params['table']"].sparse, found["params['table']"].rows_read
      (True, 2)
      >>> found["params['w']"].reason.split(" at ")[0]
      '`dot_general`'

      A step, donated and not donated:

      >>> tx = sj.optim.lazy(optax.sgd(0.1))
      >>> def step(params, state, ids):
      ...     value, grads = sj.value_and_grad(loss)(params, ids)
      ...     updates, state = tx.update(grads, state, params)
      ...     return optax.apply_updates(params, updates), state, value
      >>> args = params, tx.init(params), jnp.array([1, 2])
      >>> found = sj.explain(jax.jit(step, donate_argnums=(0, 1)))(*args)
      >>> found["params['table']"].update, found.advice
      ('in place', ())
      >>> found = sj.explain(jax.jit(step))(*args)
      >>> found["params['table']"].update, found.advice[0].split(",")[0]
      ('copied', "params['table'] is not donated")

    References:
      `torch._dynamo.explain`, which lists where and why a graph breaks.
    """
    numbers = check_fun(_CALL, fun, argnums, has_aux)

    @functools.wraps(fun)
    def explain_fun(*args: Any, **kwargs: Any) -> Any:
        may_be_step = numbers == 0 and not has_aux and tables is None
        if may_be_step and hasattr(fun, "lower"):
            step = _trace_step(fun, args, kwargs)
            if len(step.jaxpr.outvars) > 1:
                return _explain_step(_name_of(fun), step)
        try:
            with observer(lambda call: None):
                call = trace_call(fun, numbers, has_aux, tables, args, kwargs, _CALL)
        except TypeError as error:
            if not may_be_step or not str(error).startswith(_CALL):
                raise
            raise TypeError(
                f"{error} If {_name_of(fun)} is a training step, jit it first, for "
                "explain looks at the compiled program: "
                f"{_CALL}(jax.jit({_name_of(fun)}, donate_argnums=(0, 1)))(params, "
                "state, batch)."
            ) from error
        make_plan(call, strict=False)
        return Explanation(tuple(explain_leaves(call)))

    return explain_fun


# -- a step ----------------------------------------------------------------------------


def _name_of(fun: Any) -> str:
    name = getattr(fun, "__name__", "step")
    return name if name.isidentifier() else "step"


def _trace_step(fun: Any, args: Sequence[Any], kwargs: Any) -> Step:
    seen: list[LeafExplanation] = []
    try:
        return trace_step(fun, args, kwargs, seen)
    except (TypeError, ValueError) as error:
        rows = [leaf.name for leaf in seen if leaf.sparse]
        if not rows:
            raise
        raise TypeError(
            f"{_CALL}: {_name_of(fun)} raises {type(error).__name__} after "
            f"sparsejax.value_and_grad gave a SelectedRows for {_list(rows)}. If an "
            "optax transformation takes it, put sparsejax.optim.lazy around the "
            "transformation; add its updates with optax.apply_updates. The error: "
            f"{error}"
        ) from error


def _explain_step(name: str, step: Step) -> StepExplanation:
    found, others, memory = step.compile()
    leaves = [x.gradient for x in found if x.gradient] + others
    arrays = [x for x in found if x.table]
    needed = moved = 0
    for x in found:
        # Read, and written if it is returned.
        least = whole = x.num_bytes * (1 + x.returned)
        leaf = x.table.gradient if x.table else None
        if leaf is not None:
            least = min(whole, -(-whole * leaf.rows_read // max(1, leaf.height)))
        needed += least
        # A copy reads and writes all of it too.
        moved += least if x.update in ("in place", "not updated") else whole
        moved += least if x.update == "copied" else 0
    return StepExplanation(
        name,
        (*_shared(found), *_advice(arrays, others, bool(leaves))),
        tuple(arrays),
        tuple(leaves),
        sum(x.num_bytes for x in found),
        sum(x.num_bytes for x in found if x.donated),
        getattr(memory, "temp_size_in_bytes", None),
        needed if leaves else None,
        moved,
    )


def _shared(arguments: Sequence[Argument]) -> Iterator[str]:
    """What JAX refuses to run: a donated buffer that another argument has too."""
    seen: set[int] = set()
    for x in arguments:
        if id(x) in seen or not x.aliases:
            continue
        same = [x, *x.aliases]
        seen |= set(map(id, same))
        donated = [y for y in same if y.donated]
        if not donated:
            continue
        error = "Attempt to donate the same buffer twice"
        if not donated[1:]:
            error = "Attempt to use a buffer that was previously donated"
        names = [y.name for y in donated]
        which = f"{_list(names)} {'are' if names[1:] else 'is'}"
        if len(donated) == len(same):
            which, names = "each is", names[1:]
        copies = _list([f"jnp.copy({name})" for name in names])
        yield (
            f"{_list([y.name for y in same])} are one array, and {which} donated, so "
            f'{_REFUSED} ("{error}"). If they may become different, copy before the '
            f"first step: {copies}. If they are tied, keep one parameter, and read it "
            "in each place."
        )


def _advice(
    arrays: Sequence[Argument], others: Sequence[LeafExplanation], is_ours: bool
) -> Iterator[str]:
    """What costs more than the rows read; what costs most comes first.

    Args:
      arrays: the tables, and the state that follows them.
      others: leaves that are not arguments of the step.
      is_ours: True if the step calls `value_and_grad` of sparsejax.
    """
    are = lambda some: f"{_list([x.name for x in some])} {'are' if some[1:] else 'is'}"
    made = [leaf for leaf in others if leaf.sparse]
    if made:
        yield (
            f"{are(made)} not an argument of the step, but made or closed over in it, "
            "so what becomes of the table is not known. Pass it as an argument, and "
            "change its type or shape in the loss."
        )
    elif not arrays:
        yield (
            "No parameter is read by rows and updated, so the step has no table. Read "
            "tables with table[ids] or sparsejax.lookup, and return the new parameters."
        )
    if not arrays:
        return
    changed = [x for x in arrays if x.update in ("copied", "walked")]
    kept = [x for x in changed if x.returned and not x.donated]
    if kept:
        size = _size(sum(x.num_bytes for x in kept))
        cost = f"the step needs {size} more, for new arrays"
        if any(x.update == "copied" for x in kept):
            cost = f"each step copies {size}, and can be slower than a dense step"
        yield (
            f"{are(kept)} not donated, so {cost}. Donate the arguments that hold "
            f"{'them' if kept[1:] else 'it'} (donate_argnums= of jax.jit and nnx.jit, "
            "donate= of eqx.filter_jit), and go on with the arrays that the step "
            "returns."
        )
    tables = [x for x in arrays if x.table is x]
    if not is_ours:
        yield (
            f"{are(tables)} read by rows, and the gradient is dense, since the step "
            "does not call sparsejax.value_and_grad. Call it in place of "
            "jax.value_and_grad, and put sparsejax.optim.lazy around the optax "
            "transformation."
        )
        return
    for leaf in [x.gradient for x in tables if x.gradient and not x.is_sparse]:
        if "` at " in leaf.reason:  # else a batch reads so many rows that it is cheaper
            yield (
                f"The gradient of {leaf.name} is dense: {leaf.reason}. Read rows "
                "there, with table[ids] or sparsejax.lookup."
            )
    sparse = [x for x in changed if x.is_sparse]
    walked = [x for x in sparse if x.update == "walked"]
    if walked:
        yield (
            f"The step goes through all rows of {_list([x.name for x in walked])}, "
            f"though the gradient is sparse: {_reasons(walked)}. Update with "
            "sparsejax.optim.lazy(tx), without to_dense(), and compute what you log "
            "from gradients or rows, as sparsejax.optim.global_norm(grads) does."
        )
    copied = [x for x in sparse if x.update == "copied" and x.donated]
    swapped = [x for x in copied if x.swapped]
    if swapped:
        yield (
            f"{are(swapped)} donated, and copied all the same, because the new values "
            "come in another order than the arguments. JAX gives the buffer of an "
            "argument to the first result of its shape and dtype. Return the new "
            "values in the order of the arguments."
        )
    late = [x for x in copied if not x.swapped and x.reasons]
    if late:
        yield (
            f"{are(late)} donated, and copied all the same, because the step uses the "
            f"old array after the update: {_reasons(late)}. Take what you need in the "
            "loss, and return it as aux; or use the new array."
        )
    other = [x for x in copied if not x.swapped and not x.reasons]
    if other:
        yield (
            f"{are(other)} donated, and copied all the same. The code of the step does "
            "not show why: XLA found no order of its reads and writes that needs no "
            "copy. Please report it, with the optimizer."
        )
    read = [x for x in tables if x.is_sparse and x.update == "not updated"]
    if read:
        yield (
            f"{are(read)} not updated in this function. An update outside jit copies "
            "the table: make it in the same jitted function as the gradient."
        )


def _reasons(arrays: Sequence[Argument]) -> str:
    reasons = list(dict.fromkeys(reason for x in arrays for reason in x.reasons))
    return ", ".join(reasons[:3]) or "the line is not known"
