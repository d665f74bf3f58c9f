"""Chooses the leaves that are tables, and finds the recurrence of each.

`zero_gradient` proves the form of a step without a gradient: which moments move the
weights, and which moment their factors depend on. The numbers in it (ratios, decay, and
factors as a function of the second moment) come from running that step.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sparsejax import _arguments
from sparsejax.optim import _trees as trees
from sparsejax.optim._exact import closed_form
from sparsejax.optim._exact.closed_form import LARGE, Recurrence
from sparsejax.optim._exact.zero_gradient import (
    COUNTS,
    Program,
    ZeroGradientStep,
)
from sparsejax.optim._lazy import separability
from sparsejax.optim._lazy.row_program import NotByRows


BOUND = 2e-7  # relative error of F: about the rounding of float32
LARGEST_BOUND = 2e-6  # where BOUND takes more nodes than float32 can sum
STEP_BOUND = 3e-6  # error of F relative to the next step, which may be far smaller
NODES = (2, 4, 6, 8, 10, 12, 16, 20)  # numbers of nodes that are tried
MAX_HORIZON = 4096
FACTORS_AT = np.array([1, 2, 4, 16, 256, 10**5], np.int32)  # step counts
ROOTS = np.array([0, LARGE, *10.0 ** np.arange(-12, 4.5, 0.5)])
SQUARES = np.array([1, 1e-6, 1e4])  # second moments
TOLERANCE = 5e-5  # rounding of one factor in float32
TOLERANCE_16_BITS = 0.3


class Plan(NamedTuple):
    """The tables of a tree of parameters.

    Attributes:
      recurrences: by table, in the order of the leaves.
      steps: by table, its step without a gradient.
      refused: by leaf, why it is not a table, if `tx` is the reason.
      owners: for each leaf of the state of `tx`, the table that it follows, or None.
      state: the state of `tx` as ShapeDtypeStructs.
    """

    recurrences: dict[int, Recurrence]
    steps: dict[int, ZeroGradientStep]
    refused: dict[int, str]
    owners: tuple[int | None, ...]
    state: Any

    def displacement(self, state: Any, now: Sequence[Any] | None) -> list[jax.Array]:
        """Returns F of every table after `state`, from F of the step before."""
        leaves, by_step = jax.tree.leaves(state), {}
        for k, (i, recurrence) in enumerate(self.recurrences.items()):
            step = self.steps[i]
            if step.key not in by_step:
                shared = [jnp.asarray(leaves[j]) for j in step.shared]
                previous = None if now is None else now[k]
                by_step[step.key] = closed_form.displacement_coefficients(
                    step, recurrence, shared, previous
                )
        return [by_step[self.steps[i].key] for i in self.recurrences]

    def refusal(self, leaf: int, where: str) -> ValueError:
        """Returns the error for a leaf at the path `where` that is not a table."""
        if leaf in self.refused:
            return not_exact(where, self.refused[leaf])
        return ValueError(
            f"sparsejax.optim.exact: {where} is a SelectedRows, but its leaf is not a "
            "table, because tables= does not include it. Include it there (by default "
            "all real float leaves of rank 2 or more are tables), or pass its gradient "
            "as an array."
        )


def not_exact(name: str, reason: Any) -> ValueError:
    """Returns the error for a transformation that cannot be kept exact."""
    return ValueError(
        f"sparsejax.optim.exact: {name} cannot be kept exact, because of {reason}. "
        "Supported are sgd, momentum, nesterov, adam, nadam, adamw, rmsprop, adagrad "
        "and similar, with schedules, decoupled weight decay and gradient clipping. "
        "For other optimizers use sparsejax.optim.lazy(tx), which leaves rows without "
        "a gradient unchanged."
    )


def planner(tx: Any, tables: Any) -> Callable[[Any], tuple[list[Any], Any, Plan]]:
    """Returns a function of parameters: their leaves and structure, and the plan.

    Args:
      tx: the optimizer.
      tables: as for `exact`.
    """
    # Depends on shapes and dtypes only.
    make = trees.remember(functools.partial(_make_plan, tx))

    def plan_of(params):
        leaves, treedef = trees.flatten(params)
        specs = tuple(map(trees.to_spec, leaves))
        requested = _requested(tables, params, specs)
        plan = make(treedef, specs, requested)
        refused = [i for i in requested if i in plan.refused]
        if refused and (tables is not None or not plan.recurrences):
            where = trees.leaf_paths(params, "params")[refused[0]]
            raise plan.refusal(refused[0], where)
        return leaves, treedef, plan

    return plan_of


def _requested(tables: Any, params: Any, specs: Sequence[Any]) -> tuple[int, ...]:
    """Returns the leaves that `tables=` names."""
    is_leaf = trees.is_none_or_masked
    is_table = functools.partial(_arguments.is_float_array, kind=jnp.floating)
    if tables is None:
        flags = [is_table(spec, 2) for spec in specs]
    else:
        flags = _arguments.flag_leaves("tables=", tables, params, is_leaf)
    for i, flag in enumerate(flags):
        if flag and not is_table(specs[i], 1):
            raise ValueError(
                "sparsejax.optim.exact: tables= marks "
                f"{trees.leaf_paths(params, 'params')[i]} as a table, but it has no "
                f"rows of real floats: it is {_arguments.show_spec(specs[i])}."
            )
    if not any(flags):
        raise ValueError(
            "sparsejax.optim.exact: the parameters have no table: no real float leaf "
            "of rank 2 or more. Mark one of rank 1 with tables=, or use the optimizer "
            "unwrapped."
        )
    return tuple(i for i, flag in enumerate(flags) if flag)


def _make_plan(tx: Any, treedef: Any, specs: Any, tables: tuple[int, ...]) -> Plan:
    verdict = separability.of_leaves(tx, treedef, specs, tables)
    refused = {i: str(reason) for i, reason in verdict.refused.items()}
    steps: dict[int, ZeroGradientStep] = {}
    recurrences: dict[int, Recurrence] = {}
    by_step: dict[Any, Recurrence] = {}
    # Numbers are computed at once, even in a trace.
    with (
        separability.jax_defaults(),
        jax.debug_nans(False),
        jax.debug_infs(False),
        jax.transfer_guard("allow"),
        jax.ensure_compile_time_eval(),
        np.errstate(all="ignore"),
    ):
        program = None
        for i in verdict.tables:
            leaves = tuple(k for k, owner in enumerate(verdict.owners) if owner == i)
            try:
                program = program or Program(tx, treedef, specs, verdict.tables)
                steps[i] = step = program.step_of(i)
                if step.key not in by_step:
                    by_step[step.key] = find_recurrence(step)
                recurrences[i] = by_step[step.key]._replace(leaves=leaves)
            except NotByRows as fault:
                fault.path = fault.path or tuple(steps[i].path if i in steps else ())
                refused[i] = str(separability.reason(tx, fault))
    return Plan(recurrences, steps, refused, verdict.owners, verdict.state)


# ------------------------------------------------------------------ recurrences


def find_recurrence(step: ZeroGradientStep) -> Recurrence:
    """Finds the numbers of a recurrence by running a step without a gradient.

    Raises:
      NotByRows: it has no closed form.
    """
    run = lambda ahead, v: step(step.fresh, ahead, v)
    run = jax.vmap(jax.vmap(run, (None, 0)), (0, None))
    decay, _, left, zeros = _evaluate(run, COUNTS, SQUARES)
    if any(np.any(x != 0) for x in zeros):
        raise NotByRows("a step without gradient moves weights and moments of 0")
    left = [x[:, 0] for x in left]
    ratios = tuple(float(x[0]) for x in left)
    for k, (x, ratio) in enumerate(zip(left, ratios)):
        if not 0 <= ratio <= 1 or np.any(x != x[0]):
            raise NotByRows(
                f"a step without gradient multiplies its state {step.names[k]} by "
                f"{min(x):.3g} to {max(x):.3g}, not by a constant factor up to 1"
            )
    if not np.all(decay < 1):
        raise NotByRows("a step without gradient decays its weights to nothing")
    recurrence = Recurrence(
        (), ratios, step.first_moments, step.second_moment, step.decays
    )
    if not step.first_moments:
        return recurrence
    # The ratio of the terms of F; while weights shrink, a later term counts for more.
    slowest = max(ratios[k] for k in step.first_moments) / (1 - np.max(decay))
    if step.second_moment is not None:
        slowest /= max(ratios[step.second_moment], 1e-30) ** 0.5
    steps = closed_form.horizon(slowest) if slowest < 1 else math.inf
    if steps > MAX_HORIZON:
        raise NotByRows(
            f"its momentum fades too slowly: a step multiplies it by {slowest:.6g} "
            "(relative to the weights, and to the root that divides it), so "
            f"{steps} steps would have to be replayed; the limit is {MAX_HORIZON}"
        )
    recurrence = recurrence._replace(horizon=steps)
    if step.second_moment is None:
        return recurrence
    factors = _factors(step, recurrence)
    # F is far larger than a step if weights decay about as fast as moments fade.
    steps_in_all = max((near.sum() / near[0] for near, _ in factors), default=1.0)
    for nodes in NODES:
        bound = max(closed_form.error_bound(*x, nodes=nodes) for x in factors)
        is_last = nodes == NODES[-1]
        largest, of_step = (
            (LARGEST_BOUND, TOLERANCE) if is_last else (BOUND, STEP_BOUND)
        )
        if bound <= largest and bound * steps_in_all <= of_step:
            return recurrence._replace(nodes=nodes, bound=bound)
    raise NotByRows(
        "its dependence on the second moment changes too much from step to step: "
        f"interpolation has an error of {bound:.1e} of the whole distance and "
        f"{bound * steps_in_all:.1e} of a step; the limits are {LARGEST_BOUND:g} and "
        f"{TOLERANCE:g}"
    )


def _factors(
    step: ZeroGradientStep, recurrence: Recurrence
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns h_j (relative) and 1 + delta_j, by first moment and step count."""

    def run(count):
        shared = [later(x, count) for later, x in zip(step.later, step.fresh)]
        return closed_form.next_steps(step, recurrence, shared, ROOTS)

    decay, each = _evaluate(jax.vmap(run), FACTORS_AT)
    growth = 1 / np.cumprod(1 - decay, axis=1)
    is_16_bits = any(jnp.finfo(dtype).bits < 32 for dtype in step.dtypes)
    tolerance = TOLERANCE_16_BITS if is_16_bits else TOLERANCE
    cases = []
    for n, k in enumerate(recurrence.first_moments):
        powers = recurrence.ratios[k] ** np.arange(recurrence.horizon)
        for factors, grown in zip(each[..., n], powers * growth):
            moves = factors[:, 0] != 0  # the learning rate schedule may be at zero
            factors, grown = np.abs(factors[moves]), grown[moves]
            if not factors.size:
                continue
            near, far = factors[:, 0], factors[:, 1] * LARGE
            if not np.all(np.isfinite(near)):
                raise NotByRows(
                    "it divides by the root of a moment with nothing added: eps must "
                    "not be 0"
                )
            # g / (a y + eps) at the roots y.
            fitted = 1 / (1 / near[:, None] + ROOTS / far[:, None])
            if not np.all(np.abs(factors - fitted) <= tolerance * fitted):
                raise NotByRows(
                    "it does not divide by the root of a moment plus a constant"
                )
            near, far = near * grown, far * grown
            cases.append((near, near / far * (far.sum() / near.sum())))
    return cases


def _evaluate(function: Callable, *args: Any) -> Any:
    out = jax.jit(function)(*args)
    return jax.tree.map(lambda x: np.asarray(x, np.float64), out)
