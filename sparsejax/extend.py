"""Semi-public: teach sparsejax a primitive of yours.

`value_and_grad` walks the traced program and calls, for every equation that
takes a table, the rule of that equation's primitive. A primitive without a
rule uses the whole table, so the table's gradient is dense (or, where
`tables=` requires a sparse one, a `DensifyError`). A rule can read rows
(`ctx.read`) or pass the table on (`ref.then`).

- `register_rule`: how a primitive reads rows of a table, or passes it on.
- `register_flow`: through which of its inputs the loss is differentiated.
- `RuleContext`: `ctx`, the first argument of a rule.
- `TableRef`: `ref`, a table that has not been read yet.

This module keeps its names from release to release where JAX's own
internals allow it; `sparsejax.transform.interpreter` explains the contract
of a rule.
"""

from collections.abc import Callable
from typing import Any

from sparsejax import _arguments
from sparsejax.transform.interpreter import (
    RuleContext as RuleContext,
    register_rule as _register_rule,
)
from sparsejax.transform.liveness import register_flow as register_flow
from sparsejax.transform.table import TableRef as TableRef


def register_rule(*primitives: Any) -> Callable[[Callable], Callable]:
    """Registers how a primitive reads rows of a table, or passes it on. A decorator.

    The rule is called as `rule(ctx, *inputs, **params)`, with the equation's parameters
    and its inputs, at least one of which is a `TableRef`. It returns what the primitive
    returns (a list if that has multiple results), or `NotImplemented`, which makes this
    a use of the whole table. It may branch on shapes and types, not on values.

    - `ctx.read(ref, ids)` gives the rows `[*ids.shape, *ref.content]`, and their
      cotangents become the sparse gradient. An id out of range gets no gradient.
    - `ctx.combine(ref, ids, out, transpose)` records a read of rows of which the
      program has only a linear combination `out`; they need not be an array.
    - `ref.then(fn)` is the table with `fn` applied to each row; pass `shape=`, `dtype=`
      or `row_axis=` where `fn` changes them.
    - `ctx.dense(x)` is the whole array, which makes the gradient dense.

    Args:
      *primitives: `jax.extend.core.Primitive` objects, or their names. A later rule for
        the same primitive replaces the earlier one.

    Returns:
      A decorator that returns the rule unchanged.

    Raises:
      TypeError: no primitive is passed, or a value that is neither a primitive nor a
        name.

    Example:
      >>> import jax.numpy as jnp, sparsejax as sj
      >>> @sj.extend.register_rule("rev")
      ... def reverse_content(ctx, ref, *, dimensions):
      ...     if ref.row_axis != 0 or 0 in dimensions:
      ...         return NotImplemented
      ...     return ref.then(lambda rows: jnp.flip(rows, dimensions))
      >>> loss = lambda t: jnp.sum(jnp.flip(t, 1)[jnp.array([3])] * jnp.arange(2.0))
      >>> sj.grad(loss)(jnp.ones((9, 2))).values
      Array([[1., 0.]], dtype=float32)

    References:
      Quax, `quax.register`; Oryx, `oryx.core.interpreters.harvest`.
    """
    for primitive in primitives:
        if not isinstance(primitive, str) and not hasattr(primitive, "bind"):
            raise TypeError(
                "sparsejax.extend.register_rule: takes primitives (jax.extend.core."
                f"Primitive) or their names, got {_arguments.kind_of(primitive)}. "
                "Write it with parentheses: @register_rule(my_p)."
            )
    if not primitives:
        raise TypeError(
            "sparsejax.extend.register_rule: needs at least one primitive, as in "
            "@register_rule(my_p)."
        )
    return _register_rule(*primitives)
