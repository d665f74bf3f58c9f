"""The plan of a transformed call: what `fun` is, and which leaves are sparse.

`trace_call` turns `fun(*args, **kwargs)` into a flat program of its array leaves.
`make_plan` walks that program without computing anything, and decides leaf by leaf: a
leaf gets SelectedRows if every differentiated use of it is a read of rows and, unless
`tables=` insists, if it reads at most a quarter of them.
"""

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sparsejax import _arguments, _compat
from sparsejax._rows import SelectedRows
from sparsejax.transform import errors
from sparsejax.transform.interpreter import DenseUse, Reads, Run, Site, walk
from sparsejax.transform.rules import arrays, bags, control_flow, shard_map
from sparsejax.transform.table import TableRef


del bags, control_flow, arrays, shard_map  # imported for the rules they register

# Measured on CPU: a sorted, merged row update and a dense one cost about the same where
# a quarter of the rows is read. See benchmarks/NOTES.md.
MAX_FRACTION = 0.25


@dataclasses.dataclass
class Leaf:
    """One leaf of the arguments that are differentiated.

    Args:
      name: how the user would write it, e.g. `params['table']`.
      value: what was passed: an array, a float or a SelectedRows.
      insist: what `tables=` says of it: True, False, or None to decide here.
      position: which input of the program it is (its values, for a SelectedRows).
      sparse: the verdict.
      reason: why it is not sparse, for `explain`.
      sites: the reads of it that count.
    """

    name: str
    value: Any
    insist: bool | None
    position: int
    sparse: bool = False
    reason: str = ""
    sites: Sequence[Site] = ()

    @property
    def rows_read(self) -> int:
        """Number of rows that are read, duplicates counted: the capacity."""
        return sum(site.num_rows for site in self.sites)


@dataclasses.dataclass
class Call:
    """`fun` on its arguments as a flat program.

    Args:
      jaxpr, consts: the program; its first output is the loss, the rest is aux.
      inputs: its inputs, as arrays.
      leaves: the differentiated ones.
      tree: structure of the differentiated arguments, SelectedRows being leaves.
      unflatten_aux: from the program's outputs (without the loss) to aux.
    """

    jaxpr: Any
    consts: list[Any]
    inputs: list[Any]
    leaves: list[Leaf]
    tree: Any
    unflatten_aux: Callable[[Sequence[Any]], Any]


def trace_call(
    fun: Callable[..., Any],
    argnums: int | Sequence[int],
    has_aux: bool,
    tables: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    caller: str,
) -> Call:
    """Traces `fun(*args, **kwargs)`; arrays are inputs, the rest stays as it is."""
    numbers = _check_argnums(caller, argnums, len(args))
    chosen = tuple(args[i] for i in numbers)
    if isinstance(argnums, int):
        (chosen,) = chosen
    paths, tree = jax.tree_util.tree_flatten_with_path(chosen, is_leaf=_is_rows)
    wishes = _wishes(caller, tables, chosen, paths)
    names = _argument_names(fun, numbers)
    inputs: list[Any] = []
    leaves: list[Leaf] = []
    for (path, value), insist in zip(paths, wishes):
        name = _leaf_name(path, names, isinstance(argnums, int))
        if isinstance(value, SelectedRows):
            inputs.append(value.rows)
            leaf = Leaf(name, value, insist, len(inputs))
            inputs.append(value.values)
        else:
            leaf = Leaf(name, value, insist, len(inputs))
            inputs.append(_as_differentiable(caller, name, value))
        leaves.append(leaf)
    others = [None if i in numbers else arg for i, arg in enumerate(args)]
    rest, rest_tree = jax.tree_util.tree_flatten((others, kwargs))
    # `explain` and `eval_shape` may have shapes in the place of arrays.
    kinds = jax.Array, np.ndarray, jax.ShapeDtypeStruct
    dynamic = [isinstance(x, kinds) for x in rest]
    first = len(inputs)
    inputs += [x for x, d in zip(rest, dynamic) if d]
    inputs = [jnp.asarray(x) if isinstance(x, np.ndarray) else x for x in inputs]
    after: dict[str, Any] = {}

    def flat(*xs):
        values = [
            SelectedRows.tree_unflatten(v.value.height, xs[v.position - 1 :][:2])
            if isinstance(v.value, SelectedRows)
            else xs[v.position]
            for v in leaves
        ]
        moving = iter(xs[first:])
        others, kw = jax.tree_util.tree_unflatten(
            rest_tree, [next(moving) if d else x for x, d in zip(rest, dynamic)]
        )
        new = jax.tree_util.tree_unflatten(tree, values)
        for i, arg in zip(numbers, (new,) if isinstance(argnums, int) else new):
            others[i] = arg
        loss, aux = _split_aux(caller, fun(*others, **kw), has_aux)
        leaves_out, after["tree"] = jax.tree_util.tree_flatten(aux)
        after["kept"] = [isinstance(x, (jax.Array, np.ndarray)) for x in leaves_out]
        after["static"] = [None if k else x for x, k in zip(leaves_out, after["kept"])]
        return [loss, *(x for x, k in zip(leaves_out, after["kept"]) if k)]

    jaxpr, consts = _compat.trace(flat, *inputs)

    def unflatten_aux(outputs):
        moving = iter(outputs)
        pairs = zip(after["static"], after["kept"])
        return jax.tree_util.tree_unflatten(
            after["tree"], [next(moving) if k else x for x, k in pairs]
        )

    return Call(jaxpr, consts, inputs, leaves, tree, unflatten_aux)


def make_plan(call: Call, strict: bool = True) -> tuple[list[Leaf], Run]:
    """Decides which leaves are sparse.

    Args:
      call: the traced call.
      strict: whether a leaf that cannot be what `tables=` wants raises, or only gets a
        reason.

    Returns:
      `(tables, run)`: the sparse leaves in order, and what a planting walk with just
      these tables must know.

    Raises:
      DensifyError: a leaf that `tables=` insists on cannot be sparse.
    """
    tables = [leaf for leaf in call.leaves if _may_be_table(leaf, strict)]
    while True:
        run = _collect(call, tables)
        for number, leaf in enumerate(tables):
            leaf.sites = [s for s in run.sites if s.table == number and s.num_rows]
            uses = [use for use in run.dense if use.table == number]
            leaf.sparse = _decide(leaf, uses, strict)
        kept = [leaf for leaf in tables if leaf.sparse]
        if len(kept) == len(tables):
            return tables, run
        tables = kept  # walk again: the numbers of tables and reads have changed


def arguments(call: Call, tables: Sequence[Leaf], inputs: Sequence[Any]) -> list[Any]:
    """The inputs of a walk, with tables as TableRefs."""
    result = list(inputs)
    for number, leaf in enumerate(tables):
        result[leaf.position] = TableRef.of(number, result[leaf.position])
    return [*call.consts, *result]


def loss_only(call: Call) -> tuple[bool, ...]:
    """Liveness of the program's outputs: the loss, but not aux."""
    return (True,) + (False,) * (len(call.jaxpr.outvars) - 1)


def _collect(call: Call, tables: Sequence[Leaf]) -> Run:
    run = Run([jnp.shape(leaf.value)[0] for leaf in tables])
    reads = Reads()

    def collecting(inputs):
        args = arguments(call, tables, inputs)
        outs = walk(run, reads, call.jaxpr, args, loss_only(call))
        return [x.materialize() if isinstance(x, TableRef) else x for x in outs]

    if tables:
        jax.eval_shape(collecting, call.inputs)
    run.sites = tuple(reads.sites)
    return run


def _may_be_table(leaf: Leaf, strict: bool) -> bool:
    if isinstance(leaf.value, SelectedRows):
        leaf.reason = "is a SelectedRows: its gradient has the same rows"
        return False
    dtype, shape = jnp.result_type(leaf.value), jnp.shape(leaf.value)
    if not jnp.issubdtype(dtype, jnp.floating):
        leaf.reason = "not real floating point"
    elif not shape:
        leaf.reason = "a scalar has no rows"
    if leaf.insist and leaf.reason and strict:
        raise errors.not_a_table(
            leaf.name, f"{dtype.name} of shape {shape}", leaf.reason
        )
    if leaf.insist is False:
        leaf.reason = "tables= says so"
    elif leaf.insist is None and len(shape) < 2:
        leaf.reason = "rank below 2"
    return not leaf.reason


def _decide(leaf: Leaf, uses: Sequence[DenseUse], strict: bool) -> bool:
    shape = jnp.shape(leaf.value)
    if uses and leaf.insist and strict:
        raise errors.dense_use(leaf.name, shape, *uses[0][1:])
    if uses:
        leaf.reason = "; ".join(f"`{u.primitive}` at {u.where} {u.why}" for u in uses)
    elif leaf.insist:
        return True
    elif not leaf.sites:
        leaf.reason = "no differentiated read"
    elif all(site.kind for site in leaf.sites):
        return True
    elif leaf.rows_read > MAX_FRACTION * shape[0]:
        leaf.reason = (
            f"reads {leaf.rows_read} of {shape[0]} rows, more than a quarter, where "
            "dense is cheaper"
        )
    return not leaf.reason


# -- arguments -------------------------------------------------------------------------


def _is_rows(x: Any) -> bool:
    return isinstance(x, SelectedRows)


def _check_argnums(caller: str, argnums: Any, count: int) -> tuple[int, ...]:
    numbers = argnums if isinstance(argnums, (tuple, list)) else (argnums,)
    for i in numbers:
        if isinstance(i, bool) or not isinstance(i, (int, np.integer)):
            raise TypeError(
                f"{caller}: argnums must be an int or a tuple of ints, got "
                f"{_arguments.show(argnums)}."
            )
        if not -count <= i < count:
            raise ValueError(
                f"{caller}: argnums={argnums!r} needs at least "
                f"{i + 1 if i >= 0 else -i} positional argument(s), the call has "
                f"{count}. Differentiated arguments must be passed by position."
            )
    return tuple(int(i) % count for i in numbers)


def _wishes(caller: str, tables: Any, chosen: Any, paths: Sequence[Any]) -> list[Any]:
    """What `tables=` says of each leaf: True, False or None."""
    if callable(tables):
        return [bool(tables(path, leaf)) for path, leaf in paths]
    try:
        wishes = jax.tree_util.tree_map(
            lambda wish, part: jax.tree_util.tree_map(
                lambda _: _Wish(wish), part, is_leaf=_is_rows
            ),
            tables,
            chosen,
            is_leaf=lambda x: x is None,
        )
    except (ValueError, TypeError):
        found = _arguments.show_tree(tables, lambda x: x is None)
        want = _arguments.show_tree(chosen, _is_rows)
        raise ValueError(
            f"{caller}: tables= must be a prefix of the differentiated argument's "
            f"tree, {want}, with True, False or None at its leaves, got {found}."
        ) from None
    wishes = [w.value for w in jax.tree_util.tree_leaves(wishes)]
    for wish in wishes:
        if wish is not None and not isinstance(wish, (bool, np.bool_)):
            raise TypeError(
                f"{caller}: tables= takes True, False, None, a tree of them or a "
                f"callable(path, leaf) -> bool; found {_arguments.show(wish)} in it."
            )
    return wishes


@dataclasses.dataclass(frozen=True)
class _Wish:
    """A leaf even where it says None."""

    value: Any


def _as_differentiable(caller: str, name: str, value: Any) -> Any:
    try:
        dtype = jnp.result_type(value)
    except (TypeError, ValueError):
        dtype = None
    if dtype is None or not jnp.issubdtype(dtype, jnp.inexact):
        found = type(value).__name__ if dtype is None else dtype.name
        raise TypeError(
            f"{caller}: cannot differentiate with respect to {name}, which is {found}; "
            "it must be real or complex floating point. Pass it as an argument that "
            "argnums does not name, or split it off the tree (equinox.partition, "
            "flax.nnx.split)."
        )
    return value


def _argument_names(fun: Callable, numbers: Sequence[int]) -> list[str]:
    try:
        names = list(inspect.signature(fun).parameters.values())
    except (TypeError, ValueError):
        names = []
    positional = [
        p.name for p in names if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    return [positional[i] if i < len(positional) else f"args[{i}]" for i in numbers]


def _leaf_name(path: Any, names: Sequence[str], single: bool) -> str:
    if single:
        return names[0] + jax.tree_util.keystr(path)
    return str(names[path[0].idx]) + jax.tree_util.keystr(path[1:])


def _split_aux(caller: str, out: Any, has_aux: bool) -> tuple[Any, Any]:
    aux = ()
    if has_aux:
        if not isinstance(out, tuple) or len(out) != 2:
            raise TypeError(
                f"{caller}: with has_aux=True the function must return (loss, aux), it "
                f"returned {_arguments.kind_of(out)}"
                + (f" of length {len(out)}." if isinstance(out, tuple) else ".")
            )
        out, aux = out
    try:
        loss = jnp.asarray(out)
    except (TypeError, ValueError):
        loss = None
    if loss is None or jnp.shape(loss) != () or _is_rows(out):
        found = _arguments.kind_of(out if loss is None else loss)
        raise TypeError(
            f"{caller}: gradients are only defined for scalar-output functions; the "
            f"output was {found}. If it returns (loss, aux), pass has_aux=True."
        )
    if not jnp.issubdtype(loss.dtype, jnp.floating):
        raise TypeError(
            f"{caller}: the loss must be real floating point, got {loss.dtype.name}."
        )
    return loss, aux
