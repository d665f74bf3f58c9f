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


_DENSE_USE = """\
sparsejax.value_and_grad: the table {path} (shape {shape}) was to get a sparse \
gradient (tables=), but `{primitive}` at {where} {why}, so its gradient has all \
{height} rows.
Two ways out:
  - leave {path} out of tables= (or set it to False there) and take the dense gradient;
  - if only rows are needed there, read them with sparsejax.lookup(table, ids) or \
table[ids], or teach sparsejax this primitive: \
sparsejax.extend.register_rule("{primitive}")."""

_NOT_A_TABLE = """\
sparsejax.value_and_grad: tables= names the leaf {path} ({found}), which cannot be a \
table: {why}. Leave it out of tables= (or set it to False there)."""


def dense_use(
    path: str, shape: Any, primitive: str, where: str, why: str
) -> DensifyError:
    """The error for a use without a rule."""
    return DensifyError(
        _DENSE_USE.format(
            path=path,
            shape=tuple(shape),
            height=shape[0],
            primitive=primitive,
            where=where,
            why=why,
        )
    )


def not_a_table(path: str, found: str, why: str) -> DensifyError:
    """The error for a leaf that has no rows to select."""
    return DensifyError(_NOT_A_TABLE.format(path=path, found=found, why=why))
