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
    evaluate,
)
from sparsejax.optim._lazy import separability
from sparsejax.optim._lazy.row_program import NotByRows


# The error of F, relative to F (about the rounding of float32), and to the next step,
# which may be far smaller.
LIMITS = 2e-7, 3e-6
LAST_LIMITS = 2e-6, 5e-5  # of as many nodes as float32 can sum
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
      refused: by leaf, why it is not a table, if `tx` is the reason.
      owners: for each leaf of the state of `tx`, the table that it follows, or None.
      state: the state of `tx` as ShapeDtypeStructs.
    """

    recurrences: dict[int, Recurrence]
    refused: dict[int, str]
    owners: tuple[int | None, ...]
    state: Any

    def displacement(self, state: Any, now: Sequence[Any] | None) -> list[jax.Array]:
        """Returns the displacement coefficients of each table after `state`.

        Args:
          state: the state of `tx`.
          now: the coefficients of the step before; see `closed_form`.
        """
        leaves, by_step = jax.tree.leaves(state), {}
        for k, recurrence in enumerate(self.recurrences.values()):
            step = recurrence.step  # the same object for equal steps
            if id(step) not in by_step:
                shared = [jnp.asarray(leaves[j]) for j in step.shared]
                by_step[id(step)] = closed_form.displacement_coefficients(
                    recurrence, shared, now and now[k]
                )
        return [by_step[id(r.step)] for r in self.recurrences.values()]

    def refusal(self, leaf: int, where: str) -> ValueError:
        """Returns the error for a leaf at the path `where` that is not a table."""
        if leaf in self.refused:
            return not_exact(where, self.refused[leaf])
        return ValueError(
            f"{where} is a SelectedRows, but its leaf is not a table, because tables= "
            "does not include it. Include it there (by default all real float leaves "
            "of rank 2 or more are tables), or pass its gradient as an array."
        )


def not_exact(name: str, reason: Any) -> ValueError:
    """Returns the error for a transformation that cannot be kept exact."""
    return ValueError(
        f"{name} cannot be kept exact, because of {reason}. "
        "Supported are sgd, momentum, nesterov, adam, nadam, adamw, rmsprop, adagrad "
        "and similar, with schedules, decoupled weight decay and gradient clipping. "
        "For other optimizers use sparsejax.optim.lazy(tx), which leaves rows without "
        "a gradient unchanged."
    )


def planner(tx: Any, tables: Any) -> Callable[[Any], tuple[list[Any], Any, Plan]]:
    """Makes a function that returns the leaves, structure and plan of parameters.

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
    is_table = functools.partial(_arguments.is_float_array, kind=jnp.floating)
    if tables is None:
        flags = [is_table(spec, 2) for spec in specs]
    else:
        is_leaf = trees.is_none_or_masked
        flags = _arguments.flag_leaves("tables=", tables, params, is_leaf)
    leaves = tuple(i for i, flag in enumerate(flags) if flag)
    for i in leaves:
        if not is_table(specs[i], 1):
            where = trees.leaf_paths(params, "params")[i]
            raise ValueError(
                f"tables= marks {where} as a table, but it has no rows of real floats: "
                f"it is {_arguments.show_spec(specs[i])}."
            )
    if not leaves:
        raise ValueError(
            "the parameters have no table: no real float leaf of rank 2 or more. Mark "
            "one of rank 1 with tables=, or use the optimizer unwrapped."
        )
    return leaves


def _make_plan(tx: Any, treedef: Any, specs: Any, tables: tuple[int, ...]) -> Plan:
    verdict = separability.judge(tx, treedef, specs, tables)
    refused = {i: str(reason) for i, reason in verdict.refused.items()}
    recurrences: dict[int, Recurrence] = {}
    by_step: dict[Any, Recurrence] = {}
    with (
        separability.jax_defaults(),
        jax.debug_nans(False),
        jax.debug_infs(False),
        jax.transfer_guard("allow"),
        np.errstate(all="ignore"),
    ):
        program = None
        for i in verdict.tables:
            leaves = tuple(k for k, owner in enumerate(verdict.owners) if owner == i)
            try:
                program = program or Program(tx, treedef, specs, verdict.tables)
                step = program.step_of(i)
                key = step.key
                by_step[key] = by_step.get(key) or find_recurrence(step)
                recurrences[i] = by_step[key]._replace(leaves=leaves)
            except NotByRows as fault:
                refused[i] = str(separability.reason(tx, fault))
    return Plan(recurrences, refused, verdict.owners, verdict.state)


# ------------------------------------------------------------------ recurrences


def find_recurrence(step: ZeroGradientStep) -> Recurrence:
    """Finds the numbers of a recurrence by running a step without a gradient.

    Raises:
      NotByRows: it has no closed form.
    """
    run = functools.partial(step, step.fresh)
    run = jax.vmap(jax.vmap(run, (None, 0)), (0, None))
    decay, _, left, zeros = _evaluate(run, COUNTS, SQUARES.astype(step.dtype))

    def refused(why):
        return NotByRows(why, step.path)

    if np.any(zeros != 0):
        raise refused("a step without gradient moves weights and moments of 0")
    left = left[:, 0].T
    ratios = tuple(map(float, left[:, 0]))
    for k, (x, ratio) in enumerate(zip(left, ratios)):
        if not 0 <= ratio <= 1 or np.any(x != ratio):
            raise refused(
                f"a step without gradient multiplies its state {step.names[k]} by "
                f"{min(x):.3g} to {max(x):.3g}, not by a constant factor up to 1"
            )
    if not np.all(decay < 1):
        raise refused("a step without gradient decays its weights to nothing")
    if not step.first_moments:
        return Recurrence(step, (), ratios)
    # The ratio of the terms of F; while weights shrink, a later term counts for more.
    slowest = max(ratios[k] for k in step.first_moments) / (1 - np.max(decay))
    if step.second_moment is not None:
        slowest /= max(ratios[step.second_moment], 1e-30) ** 0.5
    steps: Any = closed_form.horizon(slowest) if slowest < 1 else math.inf
    if steps > MAX_HORIZON:
        raise refused(
            f"its momentum fades too slowly: a step multiplies it by {slowest:.6g} "
            "(relative to the weights, and to the root that divides it), so "
            f"{steps} steps would have to be replayed; the limit is {MAX_HORIZON}"
        )
    recurrence = Recurrence(step, (), ratios, steps)
    if step.second_moment is None:
        return recurrence
    factors = _factors(recurrence)
    # F is far larger than a step if weights decay about as fast as moments fade.
    steps_in_all = max((near.sum() / near[0] for near, _ in factors), default=1.0)
    errors = 0.0, 0.0
    for nodes in NODES:
        bounds = (closed_form.error_bound(*x, nodes=nodes) for x in factors)
        bound = max(bounds, default=0.0)
        errors = bound, bound * steps_in_all
        if np.all(np.less_equal(errors, LIMITS)):
            return recurrence._replace(nodes=nodes)
    if np.all(np.less_equal(errors, LAST_LIMITS)):
        return recurrence._replace(nodes=NODES[-1])
    raise refused(
        "its dependence on the second moment changes too much from step to step: "
        f"interpolation has an error of {errors[0]:.1e} of the whole distance and "
        f"{errors[1]:.1e} of a step; the limits are {LAST_LIMITS[0]:g} and "
        f"{LAST_LIMITS[1]:g}"
    )


def _factors(recurrence: Recurrence) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns h_j (relative) and 1 + delta_j, by first moment and step count."""
    step = recurrence.step
    run = lambda start: closed_form.next_steps(recurrence, step.fresh, ROOTS, start)
    decay, each = _evaluate(jax.vmap(run), FACTORS_AT)
    growth = 1 / np.cumprod(1 - decay, axis=1)
    is_16_bits = any(jnp.finfo(dtype).bits < 32 for dtype in step.dtypes)
    tolerance = TOLERANCE_16_BITS if is_16_bits else TOLERANCE
    cases = []
    for n, powers in enumerate(closed_form.powers_of_ratios(recurrence)):
        for factors, grown in zip(each[..., n], powers * growth):
            moves = factors[:, 0] != 0  # the learning rate schedule may be at zero
            factors, grown = np.abs(factors[moves]), grown[moves]
            if not factors.size:
                continue
            near, far = factors[:, 0], factors[:, 1] * LARGE
            if not np.all(np.isfinite(near)):
                why = "it divides by the root of a moment with nothing added: eps must"
                raise NotByRows(f"{why} not be 0", step.path)
            # g / (a y + eps) at the roots y.
            fitted = 1 / (1 / near[:, None] + ROOTS / far[:, None])
            if not np.all(np.abs(factors - fitted) <= tolerance * fitted):
                why = "it does not divide by the root of a moment plus a constant"
                raise NotByRows(why, step.path)
            near, far = near * grown, far * grown
            cases.append((near, near / far * (far.sum() / near.sum())))
    return cases


def _evaluate(function: Callable, *args: Any) -> Any:
    out = evaluate(function, *args)
    return jax.tree.map(lambda x: np.asarray(x, np.float64), out)
