"""Primitives of JAX, by name, in sets of those with a property in common.

The rules of `transform` and the walker of `optim` look primitives up here, so a new one
is added once. By name, since releases of JAX keep names longer than modules: a name
that a release lacks does no harm.
"""

from typing import Any

from sparsejax import _compat


# Elementwise functions of one array of numbers, with static parameters only.
UNARY = frozenset(
    "abs acos acosh asin asinh atan atanh cbrt ceil conj convert_element_type cos "
    "cosh erf erf_inv erfc exp exp2 expm1 floor imag integer_pow is_finite log log1p "
    "logistic name neg real reduce_precision round rsqrt sign sin sinh sqrt square "
    "tan tanh".split()
)

# Elementwise functions of two arrays with a derivative in each.
ARITHMETIC = frozenset("add atan2 complex div max min mul pow rem sub".split())

# All elementwise functions: an output element depends on one element of each input.
ELEMENTWISE = (
    UNARY
    | ARITHMETIC
    | frozenset(
        "add_any and clamp copy copy_p eq ge gt le lt ne nextafter not or select_n "
        "shift_left shift_right_arithmetic shift_right_logical stop_gradient "
        "xor".split()
    )
)

# Read or write rows of a table, or rename it.
OF_ROWS = frozenset(
    "bag_sum bags_with copy copy_p dynamic_slice dynamic_update_slice gather "
    "merge_rows name optimization_barrier order_after pcast pvary read_rows reshape "
    "reshard scatter scatter-add sharding_constraint slice squeeze stop_gradient "
    "update_rows".split()
)

# Calls of a program with the inputs of the equation, and the parameter that has it.
JITS = frozenset(["jit", "pjit"])  # pjit up to jax 0.7
CHECKPOINTS = frozenset(["checkpoint", "remat2"])
PLAIN_CALLS = frozenset("closed_call call eval_jaxpr".split())
CUSTOM_CALLS = frozenset("custom_jvp_call custom_vjp_call".split())
CALLS = {
    **dict.fromkeys(JITS | CHECKPOINTS, "jaxpr"),
    **dict.fromkeys(PLAIN_CALLS | CUSTOM_CALLS, "call_jaxpr"),
}


def called(eqn: Any) -> tuple[Any, list[Any]] | None:
    """Returns the program that an equation calls, `(open jaxpr, consts)`, or None."""
    key = CALLS.get(eqn.primitive.name)
    jaxpr = eqn.params.get(key) if key else None
    return None if jaxpr is None else _compat.open_jaxpr(jaxpr)


def bodies(eqn: Any) -> list[Any]:
    """Returns the programs inside an equation, open or closed."""
    keys = ("jaxpr", "call_jaxpr", "fun_jaxpr", "body_jaxpr", "cond_jaxpr", "branches")
    params = (eqn.params.get(key) for key in keys)
    return [x for p in params if p for x in (p if isinstance(p, tuple) else (p,))]
