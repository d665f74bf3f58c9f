"""Which leaves are tables, what `tx` does to each, and what is said of the others."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from sparsejax import _arguments
from sparsejax.optim._exact import drift, model as _exact_model
from sparsejax.optim._exact.drift import Model
from sparsejax.optim._exact.probe import Twin
from sparsejax.optim._lazy import follow, lazy, parts as _parts, separable


NOT_EXACT = (
    "{call}: {where} cannot be kept up to date by this optimizer, because of {reason}. "
    "Exact are sgd, momentum, nesterov, adam, nadam, adamw, rmsprop, adagrad and their "
    "like, with schedules, decoupled weight decay and clipping of gradients. For "
    "others take sparsejax.optim.lazy(tx), where a row without gradient stays as it is."
)
_NOT_CHOSEN = "tables=, which does not name it (left out: all of rank 2 and more)"
_COUPLED = "{names}, one after the other"


class Plan(NamedTuple):
    """What is known of a tree of parameters.

    Args:
      models: by table, in the order of the leaves.
      refused: by leaf, why it is no table, where `tx` is the reason.
      twin: runs `tx` on probes of all tables.
    """

    models: dict[int, Model]
    refused: dict[int, str]
    twin: Twin

    def why_not(self, leaf: int) -> str:
        """Why a leaf is no table."""
        return self.refused.get(leaf, _NOT_CHOSEN)

    def future(self, state: Any, now: Sequence[Any] | None) -> list[jax.Array]:
        """F of every table after `state`; `now` is that of the step before."""
        moving = {i: m for i, m in self.models.items() if m.columns}
        since = None if now is None else dict(zip(self.models, now))
        found = drift.future(self.twin, moving, state, since) if moving else {}
        return [
            found[i] if i in found else jnp.zeros(0, self.twin.dtype(i))
            for i in self.models
        ]


class Planner:
    """Makes plans, each once.

    Args:
      call: what to call it in errors.
      tx: the optimizer.
      tables: as for `exact`.
    """

    def __init__(self, call: str, tx: Any, tables: Any):
        self._call = call
        self._tx = tx
        self._tables = tables
        self._verdicts = separable.Verdicts(tx)
        self._alike = _parts.treats_leaves_alike(tx)
        # What is found out depends on shapes only, and is found out once.
        self._made = separable.remember(self._make)
        self._found = separable.remember(functools.partial(_exact_model.find, tx))

    def __call__(self, params: Any) -> tuple[list[Any], Any, Plan]:
        """Leaves and structure of the parameters, and the plan."""
        leaves, treedef = separable.flatten(params)
        specs = tuple(map(follow.spec, leaves))
        chosen, insists = self._chosen(params, specs)
        plan = self._made(treedef, specs, chosen)
        lost = [i for i in chosen if i in plan.refused]
        if not chosen:
            raise ValueError(
                f"{self._call}: the parameters have no table, that is no real float "
                "leaf of rank 2 or more. Name one of rank 1 with tables=, or use the "
                "optimizer as it is."
            )
        if lost and (insists or not plan.models):
            where, reason = (
                lazy.leaf_paths(params, "params")[lost[0]],
                plan.refused[lost[0]],
            )
            error = NOT_EXACT.format(call=self._call, where=where, reason=reason)
            raise ValueError(error)
        return leaves, treedef, plan

    def _chosen(
        self, params: Any, specs: Sequence[Any]
    ) -> tuple[tuple[int, ...], bool]:
        fit = [_has_rows(spec) for spec in specs]
        if self._tables is None:
            pairs = enumerate(zip(specs, fit))
            return tuple(i for i, (s, f) in pairs if f and len(s.shape) > 1), False
        if callable(self._tables):
            is_leaf = follow.is_leaf
            paths, _ = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_leaf)
            wishes = [bool(self._tables(path, leaf)) for path, leaf in paths]
        else:
            wishes = self._broadcast(params)
        for i, wish in enumerate(wishes):
            if wish and not fit[i]:
                where, found = lazy.leaf_paths(params, "params")[i], specs[i]
                found = _arguments.show_spec(found)
                error = (
                    f"{self._call}: tables= names {where}, which has no rows of "
                    f"real floats, but is {found}."
                )
                raise ValueError(error)
        return tuple(i for i, wish in enumerate(wishes) if wish), True

    def _broadcast(self, params: Any) -> list[Any]:
        is_leaf = follow.is_leaf
        try:
            tree = jax.tree.broadcast(self._tables, params, is_leaf=is_leaf)
            wishes = jax.tree.leaves(tree, is_leaf=is_leaf)
            known = all(w in (True, False) or is_leaf(w) for w in wishes)
        except ValueError:
            known = False
        if not known:
            found = _arguments.show(self._tables)
            want = _arguments.show_tree(params, is_leaf)
            error = (
                f"{self._call}: tables= must be a prefix of the tree of "
                f"parameters, {want}, with True or False at its leaves, got "
                f"{found}."
            )
            raise ValueError(error)
        return wishes

    def _make(self, treedef: Any, specs: Any, chosen: tuple[int, ...]) -> Plan:
        refused: dict[int, str] = {}
        for i, why in self._verdicts.failures(treedef, specs, chosen).items():
            refused[i] = str(self._verdicts.blame(treedef, specs, i, why))
        owners = follow.follow(self._tx.init, treedef, specs, chosen).owners
        models: dict[int, Model] = {}
        for i in chosen:
            if i in refused:
                continue
            where = treedef, specs, i
            if self._alike:  # then one table tells about all of its kind
                kind = jax.ShapeDtypeStruct((9,) * len(specs[i].shape), specs[i].dtype)
                where = jax.tree.structure(0), (kind,), 0
            try:
                model = self._found(*where)
            except _exact_model.NotExactError as error:
                refused[i] = f"{_blamed(self._tx, *where)}: {error}"
            else:
                own = tuple(k for k, owner in enumerate(owners) if owner == i)
                models[i] = model._replace(leaves=own)
        following = {i: m.leaves for i, m in models.items()}
        return Plan(models, refused, Twin(self._tx, treedef, specs, following))


def _has_rows(spec: Any) -> bool:
    if follow.is_leaf(spec) or spec is None or not spec.shape:
        return False
    return jnp.issubdtype(spec.dtype, jnp.floating)


def _blamed(tx: Any, treedef: Any, specs: Any, table: int) -> str:
    """The innermost part that is not exact; all names, if each part alone is."""
    parts = _parts.children_at(tx, treedef, specs, table)
    for part in parts:
        try:
            _exact_model.find(part, treedef, specs, table)
        except _exact_model.NotExactError:
            return _blamed(part, treedef, specs, table)
    if len(parts) < 2:
        return _parts.name(tx)
    names = [_parts.name(part) for part in _parts.descendants(tx)]
    return _COUPLED.format(
        names=", ".join(name for name in names if name not in _parts.TRANSPARENT)
    )
