"""Finds the leaves of an optimizer's state that follow the rows of a table.

A state leaf follows a table if row r of the leaf belongs to row r of the table. Adam's
`mu` and `nu` do, its `count` does not, and neither does a vector of shape `[D]`, even
if D equals the number of rows. So the shape alone is ambiguous, but how it changes is
not. `tx.init` is evaluated abstractly twice, the second time with p_i more rows in
parameter i, with a different p_i for each. A state leaf of shape `[V_i, ...]` that
becomes `[V_i + p_i, ...]` follows parameter i. A leaf that does not change follows
none. Any other change means that the state cannot be split into rows. A stack of
tables `[K, V, ...]` grows along both of its axes of rows.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from sparsejax import _arguments, _compat
from sparsejax.optim import _trees as trees
from sparsejax.optim._lazy import parts
from sparsejax.optim._lazy.row_program import NotByRows, row_params


class InitError(ValueError):
    """Raised if `tx.init` raises for the parameters themselves."""


class StateLeaves(NamedTuple):
    """The leaves of an optimizer's state, in the order of `jax.tree.leaves(state)`.

    Attributes:
      owners: for each leaf, the table (index of a parameter leaf) that it follows, or
        None.
      blocked: for each table, why the state cannot be split into its rows, and the
        leaf that shows it, or None if the state gets another structure.
      state: the state as ShapeDtypeStructs.
      by_leaf: for each leaf, True if its shape depends on a parameter's shape.
      program: `tx.init` as an open jaxpr of the parameters that are arrays.
    """

    owners: tuple[int | None, ...]
    blocked: dict[int, tuple[str, int | None]]
    state: Any
    by_leaf: tuple[bool, ...]
    program: Any

    def part_of(self, leaf: int | None) -> tuple[parts.Part, ...]:
        """Returns the parts that make a leaf, or that mix the rows before they do."""
        jaxpr = self.program
        for eqn in jaxpr.eqns:
            has_rows = [v in jaxpr.invars for v in eqn.invars if v.aval.shape]
            if any(has_rows) and row_params(eqn, has_rows) is None:
                return parts.of_equation([eqn])[0]
        made = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
        v = None if leaf is None else jaxpr.outvars[leaf]
        eqn = None if isinstance(v, _compat.Literal) else made.get(v)
        return () if eqn is None else parts.of_equation([eqn])[0]


def find(
    init: Callable, treedef: Any, specs: Sequence[Any], tables: Sequence[int]
) -> StateLeaves:
    """Finds the state leaves that follow each table.

    Args:
      init: `tx.init`.
      treedef: structure of the parameters, see `trees.flatten`.
      specs: its leaves, see `trees.to_spec`.
      tables: which leaves are tables, with rows along the first axis, or along the
        first two for a `trees.StackSpec`.

    Raises:
      InitError: `init` raises.
      NotByRows: `init` raises for other numbers of rows.
    """
    arrays = [i for i, s in enumerate(specs) if getattr(s, "shape", ())]
    # Odd numbers, so no two add up to a third.
    more = {leaf: 2 * k + 3 for k, leaf in enumerate(arrays)}
    try:
        program, state = trace(init, treedef, specs)
    except NotByRows as fault:
        error, params = fault.__cause__, treedef.unflatten(specs)
        raise InitError(
            f"tx.init(params) raises {type(error).__name__}: "
            f"{' '.join(str(error).split())} A tree of masks or labels must have the "
            f"structure of the parameters, {_arguments.show_tree(params)}. A function "
            "that returns it may decide by path, dtype and rank; in place of one that "
            "needs numbers, pass the tree: mask=mask_fn(params)."
        ) from error
    before, structure = jax.tree_util.tree_flatten_with_path(state)

    @functools.cache
    def grown(*leaves: int) -> list[Any] | None:
        """Returns the leaves of the state if some parameters have more rows."""
        try:
            some = {i: more[i] for i in leaves}
            _, state = trace(init, treedef, _grow(specs, some))
        except NotByRows:  # a dense leaf, like a square one, may refuse to grow
            if set(leaves) <= set(tables):
                raise
            return None
        after, treedef_after = jax.tree.flatten(state)
        return after if treedef_after == structure else None

    def changes(table: int, leaf: int) -> bool:
        after = grown(table)
        return after is None or after[leaf].shape != before[leaf][1].shape

    blocked: dict[int, tuple[str, int | None]] = {}
    after = grown(*arrays) or grown(*tables)
    if before and after is None:
        why = "the structure of its state depends on the number of rows"
        alone = [t for t in tables if grown(t) is None]
        blocked |= dict.fromkeys(alone or tables, (why, None))
        none = (None,) * len(before), (False,) * len(before)
        return StateLeaves(none[0], blocked, state, none[1], program)

    owners, leaf_of = [], {extra: leaf for leaf, extra in more.items()}
    for k, ((path, old), new) in enumerate(zip(before, after or ())):
        extra = new.shape[0] - old.shape[0] if old.shape and new.shape else 0
        owner = leaf_of.get(extra)
        if owner is not None and not _follows(old, new, specs[owner], extra):
            owner = None
        owners.append(owner if owner in tables else None)
        if owner is None and old.shape != new.shape:
            for t in (t for t in tables if changes(t, k)):
                blocked[t] = (
                    f"its state leaf {jax.tree_util.keystr(path) or '(all of it)'} of "
                    f"shape {list(old.shape)} becomes {list(new.shape)} when the "
                    f"table has {more[t]} more rows, so it does not have one row per "
                    "row of the table",
                    k,
                )
    by_leaf = tuple(
        old.shape != new.shape for (_, old), new in zip(before, after or ())
    )
    return StateLeaves(tuple(owners), blocked, state, by_leaf, program)


def without_mesh() -> Any:
    """Enters a context in which shapes are global, even inside `shard_map`."""
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ()))


def trace(init: Callable, treedef: Any, specs: Sequence[Any]) -> tuple[Any, Any]:
    """Traces `init` as an open jaxpr, and returns the types of its state, too."""
    structure: Any = None

    def run(*arrays):
        nonlocal structure
        try:
            state = init(trees.fill(treedef, specs, arrays))
        except Exception as error:  # of the transformation
            raise cannot_run(error) from error
        leaves, structure = jax.tree.flatten(state)
        return leaves

    with without_mesh():
        jaxpr, _ = _compat.trace(run, *trees.arrays(specs))
    types = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=getattr(x, "weak_type", False))
        for x in (v.aval for v in jaxpr.outvars)
    ]
    return jaxpr, structure.unflatten(types)


def cannot_run(error: Exception) -> NotByRows:
    """Makes the fault of a transformation that raises."""
    message = str(error).strip().split("\n")[0]
    return NotByRows(
        f"it cannot run on rows of a table ({type(error).__name__}: {message})"
    )


def _grow(specs: Sequence[Any], more: dict[int, int]) -> list[Any]:
    grown = list(specs)
    for i, extra in more.items():
        shape, count = specs[i].shape, trees.row_axes(specs[i])
        rows = (size + extra for size in shape[:count])
        grown[i] = trees.reshaped(specs[i], (*rows, *shape[count:]))
    return grown


def _follows(old: Any, new: Any, table: Any, extra: int) -> bool:
    count = trees.row_axes(table)
    rows = table.shape[:count]
    return (
        old.shape[:count] == rows
        and new.shape[:count] == tuple(size + extra for size in rows)
        and old.shape[count:] == new.shape[count:]
    )
