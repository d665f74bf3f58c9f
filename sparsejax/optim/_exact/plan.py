"""Chooses the leaves that are tables, with their recurrences or reasons to refuse."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from sparsejax import _arguments
from sparsejax.optim import _trees as trees
from sparsejax.optim._exact import closed_form, identify
from sparsejax.optim._exact.closed_form import Recurrence
from sparsejax.optim._exact.shadow_model import ShadowModel
from sparsejax.optim._lazy import callables, judge, state_leaves


class Plan(NamedTuple):
    """The tables of a tree of parameters.

    Args:
      recurrences: by table, in the order of the leaves.
      refused: by leaf, why it is not a table, if `tx` is the reason.
      owners: for each leaf of the state of `tx`, the table that it follows, or None.
      shadow: runs `tx` on probes of all tables.
      tx: the transformation for these parameters, see `callables.resolve`.
    """

    recurrences: dict[int, Recurrence]
    refused: dict[int, str]
    owners: tuple[int | None, ...]
    shadow: ShadowModel
    tx: Any

    def displacement(self, state: Any, now: Sequence[Any] | None) -> list[jax.Array]:
        """F of every table after `state`; `now` is F of the step before, or None."""
        moving = {i: r for i, r in self.recurrences.items() if r.num_coefficients}
        previous = None if now is None else dict(zip(self.recurrences, now))
        found = {}
        if moving:
            found = closed_form.displacement_coefficients(
                self.shadow, moving, state, previous
            )
        return [
            found[i] if i in found else jnp.zeros(0, self.shadow.dtype(i))
            for i in self.recurrences
        ]

    def refusal(self, leaf: int, where: str) -> ValueError:
        """The error for a leaf at the path `where` that is not a table."""
        if leaf not in self.refused:
            return ValueError(
                f"sparsejax.optim.exact: {where} is a SelectedRows, but its leaf is "
                "not a table, because tables= does not include it. Include it there "
                "(by default all real float leaves of rank 2 or more are tables), or "
                "pass its gradient as an array."
            )
        return not_exact(where, self.refused[leaf])


def not_exact(name: str, reason: Any) -> ValueError:
    """The error for a transformation that cannot be kept exact."""
    return ValueError(
        f"sparsejax.optim.exact: {name} cannot be kept exact, because of "
        f"{reason}. Supported are sgd, momentum, nesterov, adam, "
        "nadam, adamw, rmsprop, adagrad and similar, with schedules, decoupled "
        "weight decay and gradient clipping. For other optimizers use "
        "sparsejax.optim.lazy(tx), which leaves rows without a gradient "
        "unchanged."
    )


class Planner:
    """Makes the plan of a tree of parameters, once for each kind of tree.

    Args:
      tx: the optimizer.
      tables: as for `exact`.
    """

    def __init__(self, tx: Any, tables: Any):
        self._tx = tx
        self._tables = tables
        self._verdicts = judge.Verdicts(tx)
        # It runs `tx`, which takes a second, and depends on shapes and dtypes only.
        self._cached_plan = trees.remember(self._make_plan)

    def __call__(self, params: Any) -> tuple[list[Any], Any, Plan]:
        """Leaves and structure of the parameters, and the plan."""
        leaves, treedef = trees.flatten(params)
        specs = tuple(map(trees.to_spec, leaves))
        if self._tables is None:
            tables = tuple(
                i for i, s in enumerate(specs) if _has_rows(s) and len(s.shape) > 1
            )
        else:
            tables = self._requested(params, specs)
        if not tables:
            raise ValueError(
                "sparsejax.optim.exact: the parameters have no table: no real float "
                "leaf of rank 2 or more. Mark one of rank 1 with tables=, or use the "
                "optimizer unwrapped."
            )
        plan = self._cached_plan(treedef, specs, tables)
        refused = [i for i in tables if i in plan.refused]
        if refused and (self._tables is not None or not plan.recurrences):
            where = trees.leaf_paths(params, "params")[refused[0]]
            raise plan.refusal(refused[0], where)
        return leaves, treedef, plan

    def _requested(self, params: Any, specs: Sequence[Any]) -> tuple[int, ...]:
        """The leaves that `tables=` names."""
        is_leaf = trees.is_none_or_masked
        if _arguments.is_predicate(self._tables, params):
            paths, _ = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_leaf)
            requested = [bool(self._tables(path, leaf)) for path, leaf in paths]
        else:
            try:
                tree = jax.tree.broadcast(self._tables, params, is_leaf=is_leaf)
                requested = jax.tree.leaves(tree, is_leaf=is_leaf)
                are_bools = all(r in (True, False) or is_leaf(r) for r in requested)
            except ValueError:
                requested, are_bools = [], False
            if not are_bools:
                raise _arguments.wrong(
                    "sparsejax.optim.exact",
                    "tables=",
                    "a prefix of the parameter tree, with True or False at its leaves",
                    _arguments.show(self._tables),
                    _arguments.show_mismatch(self._tables, params, is_leaf),
                )
        for i, request in enumerate(requested):
            if request and not _has_rows(specs[i]):
                raise ValueError(
                    "sparsejax.optim.exact: tables= marks "
                    f"{trees.leaf_paths(params, 'params')[i]} as a table, but it has "
                    f"no rows of real floats: it is {_arguments.show_spec(specs[i])}."
                )
        return tuple(i for i, request in enumerate(requested) if request)

    def _make_plan(self, treedef: Any, specs: Any, tables: tuple[int, ...]) -> Plan:
        found = self._verdicts(treedef, specs, tables).refused
        refused = {i: str(reason) for i, reason in found.items()}
        tx = callables.resolve(self._tx, treedef, specs)
        owners = state_leaves.find(tx.init, treedef, specs, tables).owners
        kept = [i for i in tables if i not in refused]
        programs = judge.programs(self._tx, treedef, specs, kept)
        recurrences: dict[int, Recurrence] = {}
        known: dict[Any, Recurrence | identify.NotExactError] = {}
        for i in kept:
            program = programs[i]
            if program.key not in known:
                try:
                    known[program.key] = identify.find_recurrence(tx, treedef, specs, i)
                except identify.NotExactError as error:
                    known[program.key] = error
            recurrence = known[program.key]
            if isinstance(recurrence, identify.NotExactError):
                refused[i] = f"{program.name_at(recurrence.leaf)}: {recurrence}"
            else:
                own = tuple(k for k, owner in enumerate(owners) if owner == i)
                recurrences[i] = recurrence._replace(leaves=own)
        moments = {i: r.leaves for i, r in recurrences.items()}
        shadow = ShadowModel(tx, treedef, specs, moments)
        return Plan(recurrences, refused, owners, shadow, tx)


def _has_rows(spec: Any) -> bool:
    if trees.is_none_or_masked(spec) or not spec.shape:
        return False
    return jnp.issubdtype(spec.dtype, jnp.floating)
