"""What is said when a table cannot have a sparse gradient."""

from typing import Any


class DensifyError(NotImplementedError):
    """A table that must get a sparse gradient is used in a way that needs all its rows.

    Raised by `sparsejax.value_and_grad`, `sparsejax.grad` when `tables=` insists on a
    leaf, and only then: where nothing insists, such a leaf gets the dense gradient of
    `jax.grad`, and `sparsejax.explain` says why.

    Args:
      message: which table, which primitive, where, and what to do.

    Example:
      >>> import jax.numpy as jnp, sparsejax as sj
      >>> try:
      ...     sj.grad(lambda t: jnp.sum(t), tables=True)(jnp.ones((3, 2)))
      ... except sj.DensifyError as e:
      ...     print("reduce_sum" in str(e))
      True
    """


def dense_use(
    path: str, shape: Any, primitive: str, where: str, why: str
) -> DensifyError:
    """The error for a use without a rule."""
    return DensifyError(
        f"sparsejax.value_and_grad: the table {path} (shape {tuple(shape)}) was to get "
        f"a sparse gradient (tables=), but `{primitive}` at {where} {why}, so its "
        f"gradient has all {shape[0]} rows.\n"
        "Two ways out:\n"
        f"  - leave {path} out of tables= (or set it to False there) and take the "
        "dense gradient;\n"
        "  - if only rows are needed there, read them with sparsejax.lookup(table, "
        "ids) or table[ids], or teach sparsejax this primitive: "
        f'sparsejax.extend.register_rule("{primitive}").'
    )


def not_a_table(path: str, found: str, why: str) -> DensifyError:
    """The error for a leaf that has no rows to select."""
    return DensifyError(
        f"sparsejax.value_and_grad: tables= names the leaf {path} ({found}), which "
        f"cannot be a table: {why}. Leave it out of tables= (or set it to False there)."
    )
