"""compare: the program of a gradient before and after the transformation."""

from __future__ import annotations

import dataclasses
import difflib
import html
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from sparsejax._arguments import PyTree
from sparsejax._rows import is_selected_rows
from sparsejax.transform import grad


_WIDTH = 100
_HTML_LINES = 400
_MARK = "background:hsla(0,70%,50%,0.22)"


@dataclasses.dataclass(frozen=True)
class ProgramDiff:
    """Two programs, and the table-sized arrays that they make.

    Prints as a unified diff. A notebook shows the two side by side and marks the lines
    that make a table-sized array.

    Args:
      before: str, the program of `jax.grad`.
      after: str, the program of `sparsejax.grad`.
      tables: shapes of the tables, as in a jaxpr: `f32[1000,8]`.

    Example:
      >>> import jax.numpy as jnp, sparsejax as sj
      >>> diff = sj.viz.compare(lambda t: jnp.sum(t[jnp.arange(3)]), jnp.ones((99, 2)))
      >>> diff.tables, len(diff.large(diff.after))
      (('f32[99,2]',), 0)
    """

    before: str
    after: str
    tables: tuple[str, ...]

    def large(self, program: str) -> list[str]:
        """The lines of a program that make a table-sized array.

        Example:
          >>> import jax.numpy as jnp, sparsejax as sj
          >>> loss = lambda t: jnp.sum(t[jnp.arange(3)])
          >>> diff = sj.viz.compare(loss, jnp.ones((99, 2)))
          >>> [line.split(" = ")[1][:11] for line in diff.large(diff.before)][-1]
          'scatter-add'
        """
        return [line for line in program.splitlines() if self._is_large(line)]

    def summary(self) -> str:
        """How many table-sized arrays each program makes, in words.

        Example:
          >>> import jax.numpy as jnp, sparsejax as sj
          >>> loss = lambda t: jnp.sum(t[jnp.arange(3)])
          >>> print(sj.viz.compare(loss, jnp.ones((99, 2))).summary())
          arrays as large as a table (f32[99,2]): 2 before, 0 after
        """
        before, after = len(self.large(self.before)), len(self.large(self.after))
        tables = ", ".join(self.tables) or "there is none"
        return f"arrays as large as a table ({tables}): {before} before, {after} after"

    def _is_large(self, line: str) -> bool:
        made, equals, made_by = line.partition(" = ")
        # The equations of a nested program have their own lines.
        nested = made_by.lstrip().startswith(("jit[", "pjit["))
        return bool(equals) and not nested and any(t in made for t in self.tables)

    def __str__(self) -> str:
        lines = difflib.unified_diff(
            self.before.splitlines(),
            self.after.splitlines(),
            "jax.grad",
            "sparsejax.grad",
            n=1,
            lineterm="",
        )
        return "\n".join([self.summary(), *lines])

    def _repr_html_(self) -> str:
        cells = "".join(
            "<td style='vertical-align:top;text-align:left;padding:4px 12px'>"
            f"<b>{name}</b>"
            "<pre style='font-size:85%;line-height:1.35;white-space:pre-wrap'>"
            f"{''.join(self._marked(program))}</pre></td>"
            for name, program in (
                ("jax.grad", self.before),
                ("sparsejax.grad", self.after),
            )
        )
        return (
            f"<div>{html.escape(self.summary())}</div><table><tr>{cells}</tr></table>"
        )

    def _marked(self, program: str) -> Iterable[str]:
        lines = program.splitlines()
        for line in lines[:_HTML_LINES]:
            text = html.escape(line)
            mark = self._is_large(line)
            yield (f"<span style='{_MARK}'>{text}</span>" if mark else text) + "\n"
        if len(lines) > _HTML_LINES:
            yield f"… {len(lines) - _HTML_LINES:,} more lines\n"


def compare(
    fun: Callable[..., Any],
    *args: PyTree,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    tables: PyTree = None,
) -> ProgramDiff:
    """Compares the programs of `jax.grad(fun)` and `sparsejax.grad(fun)`.

    Nothing is computed: both are only traced.

    Args:
      fun: a loss, as in `sparsejax.grad`.
      *args: its arguments; arrays or `jax.ShapeDtypeStruct`.
      argnums: int or ints, the arguments to differentiate.
      has_aux: bool, whether `fun` returns `(loss, aux)`.
      tables: as in `sparsejax.grad`.

    Returns:
      `ProgramDiff`. Its tables are the leaves with a SelectedRows as gradient.

    Raises:
      DensifyError: `tables=` requires a leaf to be sparse that is not only read by
        rows.
      TypeError: an argument that `jax.grad` refuses.

    Example:
      >>> import jax, jax.numpy as jnp, sparsejax as sj
      >>> table = jax.ShapeDtypeStruct((1_000_000, 8), jnp.float32)
      >>> ids = jax.ShapeDtypeStruct((32,), jnp.int32)
      >>> loss = lambda table, ids: jnp.sum(sj.lookup(table, ids) ** 2)
      >>> print(sj.viz.compare(loss, table, ids).summary())
      arrays as large as a table (f32[1000000,8]): 2 before, 0 after

    References:
      JAX, "Understanding jaxprs".
    """
    sparse = grad(fun, argnums, has_aux, tables=tables)
    after, found = jax.make_jaxpr(sparse, return_shape=True)(*args)
    before = jax.make_jaxpr(jax.grad(fun, argnums, has_aux))(*args)
    shapes = [
        f"{_short(g.dtype)}[{','.join(map(str, g.shape))}]"
        for g in jax.tree.leaves(found, is_leaf=is_selected_rows)
        if is_selected_rows(g)
    ]
    text = lambda jaxpr: jaxpr.pretty_print(use_color=False, width=_WIDTH)
    return ProgramDiff(text(before), text(after), tuple(dict.fromkeys(shapes)))


def _short(dtype: Any) -> str:
    """A dtype as in a jaxpr: f32, bf16, i32."""
    name = jax.numpy.dtype(dtype).name
    name = re.sub("^bfloat", "bf", name)
    return re.sub("^(float|int|uint|complex)", lambda m: m[0][0], name)
