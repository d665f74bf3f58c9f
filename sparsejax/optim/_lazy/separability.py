"""Decides which leaves of a tree can be lifted to rows, and names what prevents it.

The proof is in `judge`. Some optimizers are wrong by rows although no program of one
step shows it (gradients held back for later steps): these are refused by the type of
their state, `NOT_LIFTED`. An update that cannot be proved to work row by row needs
`lazy(tx, check=False)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from sparsejax import _arguments
from sparsejax._arguments import PyTree
from sparsejax.optim import _checks as checks, _trees as trees
from sparsejax.optim._lazy import parts, state_leaves
from sparsejax.optim._lazy.judge import Judge, Update, jax_defaults
from sparsejax.optim._lazy.row_program import NotByRows
from sparsejax.optim._lazy.two_programs import BY_NUMBER, differing_number, pairs


# The table that a transformation is judged on without parameters: enough rows and
# columns for the state of optimizers that factor matrices of 128 rows and columns.
ROWS, COLUMNS = 160, 130

# The names that users know, shown in parentheses.
KNOWN_AS = {
    "scale_by_trust_ratio": "part of lamb, lars and fromage",
    "scale_by_factored_rms": "part of adafactor",
    "clip_by_block_rms": "also part of adafactor",
    "scale_by_param_block_rms": "also part of adafactor",
    "scale_by_muon": "part of muon",
    "scale_by_sm3": "part of sm3",
    "scale_by_dog": "part of dog",
    "scale_by_dowg": "part of dowg",
    "scale_by_lbfgs": "part of lbfgs",
    "add_noise": "part of noisy_sgd",
}

_HOLDS_BACK = (
    "it accumulates gradients and applies them at a later step, where it would have to "
    "update rows that are not read again (sparsejax.optim.accumulate does this by rows)"
)
_OF_MOMENTUM = "its step depends on the momentum of all rows, even those not read"
_OF_DISTANCE = "its step size depends on sums over all rows, even those not read"
# Transformations that are refused by the type of their state: (name, why). `exact` and
# `accumulate` add their own.
NOT_LIFTED: dict[type, tuple[str, str]] = {
    optax.MultiStepsState: ("MultiSteps", _HOLDS_BACK),
    optax.ApplyEvery: ("apply_every", _HOLDS_BACK),
    optax.contrib.MomoState: ("momo", _OF_MOMENTUM),
    optax.contrib.MomoAdamState: ("momo_adam", _OF_MOMENTUM),
    optax.contrib.MuonState: ("scale_by_muon", _OF_MOMENTUM),
    optax.contrib.ProdigyState: ("prodigy", _OF_DISTANCE),
    optax.contrib.DAdaptAdamWState: ("dadapt_adamw", _OF_DISTANCE),
    optax.contrib.MechanicState: ("mechanize", _OF_DISTANCE),
    optax.contrib.DoGState: ("scale_by_dog", _OF_DISTANCE),
    optax.contrib.DoWGState: ("scale_by_dowg", _OF_DISTANCE),
}


class Reason(NamedTuple):
    """Why a table cannot be lifted.

    Attributes:
      why: the fault.
      part: name of the part that prevents it.
      can_be_wrong: True if it may also refuse a row-separable transformation.
    """

    why: str
    part: str
    can_be_wrong: bool = True

    def __str__(self) -> str:
        name = KNOWN_AS.get(self.part)
        return f"{self.part}{f' ({name})' if name else ''}: {self.why}"


class Verdict(NamedTuple):
    """The answer for a tree of parameters.

    Attributes:
      tables: the leaves that can be lifted together.
      refused: by leaf, why it cannot.
      owners: for each leaf of the state, the parameter leaf that it follows, or None.
      state: the state as ShapeDtypeStructs.
    """

    tables: tuple[int, ...]
    refused: dict[int, Reason]
    owners: tuple[int | None, ...]
    state: Any


# ------------------------------------------------------------------ questions


def is_row_separable(tx: optax.GradientTransformation, params: PyTree = None) -> bool:
    """Returns True if a transformation treats each row independently of the others.

    For a gradient G that is zero outside the rows R, state S and weights W, with
    `U, S' = tx(G, S, W)`, lifting relies on `tx(G[R], S[R], W[R]) = U[R], S'[R]`: no
    row's step may depend on rows that were not read. This is read from the traced
    program of `tx.update`, so it holds for your own transformations too. A program
    that cannot be proved to work row by row (a loop over rows, say) gives False; if
    you know that it does, use `lazy(tx, check=False)`.

    True for sgd (with momentum), adam, adamw, adagrad, rmsprop, adadelta, yogi, lion,
    radam, novograd and similar optimizers, also with clipping, schedules, masks and
    `inject_hyperparams`. False for optimizers that need all rows of a table (lamb,
    lars, adafactor, muon, prodigy, sm3, lbfgs), for noise, for accumulation of
    gradients (MultiSteps, apply_every), and for `sparsejax.optim.exact`, which accepts
    SelectedRows itself.

    `optax.clip_by_global_norm` *after* adam counts as separable. Lifted, it clips by
    the norm over the rows that were read, without the momentum of the others. After a
    part that moves even rows that were never read, it counts as not separable.

    Args:
      tx: an optax transformation.
      params: parameters (or ShapeDtypeStructs) for transformations that need them, like
        `optax.partition` with labels for a particular tree. The answer is then True if
        `lazy(tx).init(params)` accepts them: if some leaf can be lifted. By
        default `tx` is judged on one table.

    Returns:
      bool. Never raises: a transformation that cannot be traced is not row-separable.

    Example:
      >>> import optax
      >>> from sparsejax.optim import is_row_separable
      >>> is_row_separable(optax.adam(1e-3)), is_row_separable(optax.lamb(1e-3))
      (True, False)

    References:
      TensorFlow Addons, `LazyAdam`; PyTorch, `SparseAdam`.
    """
    try:
        return refusal(tx, *_tree(params)) is None
    except (TypeError, state_leaves.InitError):  # not a transformation, or init raises
        return False


def is_lazy_exact(tx: optax.GradientTransformation, params: PyTree = None) -> bool:
    """Returns True if `lazy(tx)` trains exactly as `tx` does with dense gradients.

    For a gradient G that is zero outside the rows R, weights W and state S, with
    `U, S' = tx(G, S, W)`, that is so if

      `U[r] = 0` and `S'[r] = S[r]` for each row r outside R.

    Then skipping those rows is not an approximation. Otherwise, with momentum or
    weight decay for example, rows that are not read stay unchanged where a dense run
    would have moved them. Counts and schedules, which advance at every step, do not
    belong to rows and are not compared. The function of one row is run on random
    weights and state with a zero gradient.

    True for sgd, sign_sgd and adagrad, also after clipping by value or by global norm.
    False for momentum, adam and anything else whose state decays, for weight decay, and
    for anything that is not row-separable (see `is_row_separable`).

    Args:
      tx: an optax transformation.
      params: parameters (or ShapeDtypeStructs) for transformations that need them. The
        answer is then about all leaves that can be lifted. By default `tx` is judged on
        one table.

    Returns:
      bool. Never raises: a transformation that cannot be traced is not exact.

    Example:
      >>> import optax
      >>> from sparsejax.optim import is_lazy_exact
      >>> is_lazy_exact(optax.adagrad(0.1)), is_lazy_exact(optax.adam(1e-3))
      (True, False)

    References:
      TensorFlow Addons, `LazyAdam`, which explains how lazy updates differ from Adam.
    """
    try:
        changes = moved(tx, *_tree(params))
    except (TypeError, state_leaves.InitError):
        return False
    return bool(changes) and not any(changes.values())


def _tree(params: Any) -> tuple[Any, tuple[Any, ...]]:
    """Returns the tree and specs of parameters, by default of one table."""
    if params is None:
        params = jax.ShapeDtypeStruct((ROWS, COLUMNS), jnp.float32)
    leaves, treedef = trees.flatten(params)
    return treedef, tuple(map(trees.to_spec, leaves))


def moved(tx: Any, treedef: Any, specs: Sequence[Any]) -> dict[int, list[str]]:
    """Returns what changes in a row without a gradient: "weights", or state paths.

    Returns:
      A dict by the number of each table that can be lifted.
    """
    tables = judge(tx, treedef, specs, candidates(specs)).tables
    if not tables:
        return {}
    with jax_defaults():
        proof = Judge(Update(tx, treedef, specs, tables))
        return {t: proof.moved(t) for t in tables}


# ------------------------------------------------------------------ verdicts


def refusal(tx: Any, treedef: Any, specs: Sequence[Any]) -> Reason | None:
    """Explains why no leaf can be lifted, or returns None if one can."""
    tables = candidates(specs)
    verdict = judge(tx, treedef, specs, tables)
    return verdict.refused[tables[0]] if tables and not verdict.tables else None


def candidates(specs: Sequence[Any]) -> tuple[int, ...]:
    """Returns the leaves that may be tables, the one with the most rows first."""
    arrays = [i for i, spec in enumerate(specs) if _arguments.is_float_array(spec, 1)]
    tables = [i for i in arrays if len(specs[i].shape) > 1] or arrays
    return tuple(sorted(tables, key=lambda i: specs[i].shape[0], reverse=True))


@trees.remember
def judge(
    tx: Any, treedef: Any, specs: Sequence[Any], tables: tuple[int, ...]
) -> Verdict:
    """Judges leaves that are lifted at once; those that fail are dense leaves."""
    if not checks.is_transformation(tx):
        raise TypeError(f"not an optax transformation: {tx!r}")
    owners: tuple[int | None, ...] = ()
    state: Any = None
    with jax_defaults():
        try:
            update = Update(tx, treedef, specs, tables)
            owners, state = update.leaves.owners, update.leaves.state
            refused = refused_by_state(tx, update.leaves)
            faults = [] if refused else Judge(update).faults
        except NotByRows as fault:
            refused, faults = {}, [fault]
        for fault in faults:
            for t in fault.tables or (tables if len(tables) == 1 else ()):
                refused.setdefault(t, reason(tx, fault))
    if faults and not refused:  # of no table in particular
        for t in tables:
            refused |= judge(tx, treedef, specs, (t,)).refused
        refused = refused or dict.fromkeys(tables, reason(tx, faults[0]))
    accepted = tuple(t for t in tables if t not in refused)
    if not refused or not accepted:
        return Verdict(accepted, refused, owners, state)
    verdict = judge(tx, treedef, specs, accepted)
    return verdict._replace(refused=refused | verdict.refused)


def for_tables(
    tx: Any,
    treedef: Any,
    specs: Sequence[Any],
    tables: tuple[int, ...],
    check: bool = True,
) -> Verdict:
    """Judges tables at a step, by the verdict on all leaves if they are among these.

    With `check=False`, it is only refused what no one can lift: state without rows.
    """
    if not check:
        leaves = state_leaves.find(tx.init, treedef, specs, tables)
        refused = refused_by_state(tx, leaves)
        return Verdict((), refused, leaves.owners, leaves.state)
    if not any(isinstance(spec, trees.StackSpec) for spec in specs):
        verdict = judge(tx, treedef, specs, candidates(specs))
        if set(tables) <= set(verdict.tables):
            owners = tuple(o if o in tables else None for o in verdict.owners)
            return verdict._replace(tables=tables, refused={}, owners=owners)
    return judge(tx, treedef, specs, tables)


def refused(name: str, reason: Reason, is_stack: bool = False) -> ValueError:
    """Makes the error for a leaf, or an optimizer, that cannot be lifted."""
    if is_stack:
        name += ", a stack of tables whose gradient has rows of each,"
    elif name.startswith("grads"):
        name += ", which has a SelectedRows gradient,"
    advice = (
        "Use an optimizer that works row by row (adam, adagrad, rmsprop, sgd, lion, "
        "...), or keep this one for the dense leaves: "
        'lazy(optax.partition({"table": optax.adam(1e-3), "dense": tx}, labels)). '
        "sparsejax.optim.is_row_separable tells which optimizers work."
    )
    if is_stack:
        advice = (
            "Keep the parameter as one table [K * V, ...], and reshape it inside the "
            "loss: table.reshape(K, V, ...)."
        )
    if reason.can_be_wrong:
        advice += (
            " If you know that each row's step depends only on that row, skip this "
            "check with lazy(tx, check=False)."
        )
    return ValueError(
        f"sparsejax.optim.lazy: {name} cannot be lifted to rows, because of {reason}. "
        f"{advice}"
    )


def reason(tx: Any, fault: NotByRows) -> Reason:
    """Describes a fault, with the part and the line that it is in."""
    enclosing, line = parts.of_equation(fault.path)
    if fault.__cause__ is not None:
        enclosing = parts.of_error(fault.__cause__)
    part = enclosing[-1] if enclosing else parts.of_transformation(tx)
    for name, why in NOT_LIFTED.values() if fault.__cause__ is not None else ():
        if name.rpartition(".")[2] == part.name:  # its state has no rows, but buffers
            return Reason(why, name, False)
    why = fault.why + (f" ({line})" if line else "")
    return Reason(why, part.name, not part.is_optax or not fault.is_proved)


def refused_by_state(tx: Any, leaves: state_leaves.StateLeaves) -> dict[int, Reason]:
    """Returns tables whose state has no rows, or is of a type in `NOT_LIFTED`."""
    refused, first = {}, 0
    for t, (why, k) in leaves.blocked.items():
        part = (leaves.part_of(k) or (parts.of_transformation(tx),))[-1]
        refused[t] = Reason(why, part.name, False)
    is_known = lambda x: type(x) in NOT_LIFTED
    for node in jax.tree.leaves(leaves.state, is_leaf=is_known):
        last = first + len(jax.tree.leaves(node))
        if is_known(node):
            part, why = NOT_LIFTED[type(node)]
            owners = {o for o in leaves.owners[first:last] if o is not None}
            # Without owners, the structure of the state depends on the rows.
            refused |= dict.fromkeys(owners or leaves.blocked, Reason(why, part, False))
        first = last
    return refused


@trees.remember
def difference_of_rows(
    tx: Any,
    treedef: Any,
    specs: Sequence[Any],
    tables: Sequence[int],
    num_rows: Sequence[int],
) -> Reason | None:
    """Explains why `tx` differs on `num_rows` rows from all rows, or returns None.

    None also if it cannot be traced, which `lazy(tx, check=False)` allows.
    """
    with jax_defaults():
        try:
            update = Update(tx, treedef, specs, tables)
            many = update.trace(update.many_rows)
        except NotByRows:
            return None
        try:
            few = update.trace({t: (n,) for t, n in zip(tables, num_rows)})
            for path, eqn in pairs(few, many, is_exact=False):
                if why := differing_number(path[-1], eqn, is_exact=False):
                    raise NotByRows(why, path)
        except NotByRows as fault:
            if fault.__cause__ is not None:
                fault.why = f"{fault.why}; {BY_NUMBER}"
            return reason(tx, fault)._replace(can_be_wrong=False)
    return None
