"""Rows that a derivative needs are read again, so that nobody has to keep them.

The derivative of `rows ** 2` needs the rows. JAX keeps them, `[n, D]`, from the forward
to the backward pass, where the cotangents are as large, and a training step has twice
as much in memory. But a read is cheap where XLA fuses it with arithmetic: a cotangent
times rows is then one loop that reads the table and writes the result, and what it
needs until then are the ids.

So the walk knows for some arrays how to compute them again from the table and ids, in a
`Recipe`: for rows that were read, and for what follows from these by changes of shape
and sums. An equation that multiplies such arrays gets a derivative with the recipes in
place of the arrays.

Where not:

- Where the derivative sums over rows, as that of `rows @ weights` does: there the rows
  have to be an array.
- Where rows of a table are in the cotangents of anything else, as in products of rows
  of two tables. A table is updated in place once its own cotangents are computed, and
  XLA would copy it for others that read it later.
- In loops, whose derivatives keep a copy of what they need for each turn.
- Where few rows are read. Rows that are still in the cache cost less than another read,
  until temporaries are so large that they are new pages in each run.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from sparsejax import _compat
from sparsejax._compat import primitives as p


# Of all rows read. glibc gives temporaries of 32 MiB and more new pages in each run:
# benchmarks/NOTES.md.
_LEAST_BYTES = 15 << 20


class Recipe(NamedTuple):
    """How to compute an array again from rows of one table: `fn(*operands)`."""

    table: int
    fn: Callable[..., Any]
    operands: tuple[Any, ...]


class Recipes:
    """The recipes of one walk, by the identity of the arrays."""

    def __init__(self):
        self._found: dict[int, tuple[Any, Recipe]] = {}

    def add(
        self, x: Any, table: int, fn: Callable[..., Any], operands: Sequence[Any]
    ) -> None:
        """Notes that `x` is `fn(*operands)`, of rows of that table."""
        # The array is kept, so that no other one can reuse its id.
        self._found[id(x)] = x, Recipe(table, fn, tuple(operands))

    def get(self, x: Any) -> Recipe | None:
        """The recipe of `x`, if there is one."""
        return self._found[id(x)][1] if id(x) in self._found else None


def is_worth_it(reads: Sequence[jax.Array]) -> bool:
    """Whether rows of these shapes should rather be read again than kept."""
    try:
        return sum(x.size * x.dtype.itemsize for x in reads) >= _LEAST_BYTES
    except _compat.InconclusiveDimensionOperation:  # a symbolic shape, in an export
        return False


# Sums, masks and other shapes: XLA fuses a read with them.
_FOLLOWS = frozenset(
    "add sub neg select_n reshape squeeze expand_dims convert_element_type".split()
)
_MULTIPLIES = frozenset(("mul", "div", "integer_pow", "square", "abs", "dot_general"))
_MOST_EQUATIONS = 20  # of a nested `jit` that is walked: functions of jax.numpy


def is_call_of_rows(recipes: Recipes | None, eqn: Any, inputs: Sequence[Any]) -> bool:
    """Whether a nested `jit` gets such arrays, so that its program has to be walked."""
    if recipes is None or eqn.primitive is not p.jit_p:
        return False
    jaxpr, _ = _compat.open_jaxpr(eqn.params["jaxpr"])
    return len(jaxpr.eqns) <= _MOST_EQUATIONS and any(map(recipes.get, inputs))


def bind(recipes: Recipes, eqn: Any, inputs: Sequence[Any]) -> list[Any] | None:
    """What an equation computes, if recipes have to do with it; else None.

    Args:
      recipes: of the walk; what follows from them is added.
      eqn: the equation.
      inputs: its inputs.
    """
    found = [recipes.get(x) for x in inputs]
    tables = {recipe.table for recipe in found if recipe}
    if len(tables) != 1 or len(eqn.outvars) != 1:
        return None
    (table,) = tables
    rows = next(x for x, recipe in zip(inputs, found) if recipe)
    others = [x for x, recipe in zip(inputs, found) if not recipe]
    if any(_compat.is_differentiated_with(x, rows) for x in others):
        return None
    name = eqn.primitive.name
    run = lambda *inputs: _compat.bind(eqn, inputs)[0]
    again, operands = _inputs_again(found, inputs)
    is_scaled = others and (name == "mul" or (name == "div" and found[0]))
    if name in _FOLLOWS or is_scaled:
        out = run(*inputs)
        recipes.add(out, table, lambda *xs: run(*again(*xs)), operands)
        return [out]
    if name not in _MULTIPLIES:
        return None
    if name == "dot_general" and (others or not _is_of_rows(eqn)):
        return None
    return [_with_derivative(run, again, tuple(inputs), operands)]


def _inputs_again(
    found: Sequence[Recipe | None], inputs: Sequence[Any]
) -> tuple[Callable[..., list[Any]], tuple[Any, ...]]:
    """A function that computes the inputs again, those without a recipe being kept."""
    makers: list[tuple[Any, slice]] = []
    operands: list[Any] = []
    for recipe, x in zip(found, inputs):
        fn, needed = (recipe.fn, recipe.operands) if recipe else (lambda x: x, (x,))
        makers.append((fn, slice(len(operands), len(operands) + len(needed))))
        operands.extend(needed)
    again = lambda *operands: [fn(*operands[part]) for fn, part in makers]
    return again, tuple(operands)


def _is_of_rows(eqn: Any) -> bool:
    """Whether a dot_general is a dot product for each row, or for each of a batch."""
    (contracted, batch) = eqn.params["dimension_numbers"]
    return all(
        v.aval.ndim == len(c) + len(b) for v, c, b in zip(eqn.invars, contracted, batch)
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _with_derivative(
    fun: Callable[..., Any],
    again: Callable[..., Sequence[Any]],
    inputs: tuple[Any, ...],
    operands: tuple[Any, ...],
) -> Any:
    """`fun(*inputs)`, whose derivative computes the inputs by `again(*operands)`."""
    del again, operands
    return fun(*inputs)


def _forward(fun, again, inputs, operands):
    del again
    return fun(*inputs), operands


def _backward(fun, again, operands, cotangent):
    _, pull = jax.vjp(fun, *again(*operands))
    return tuple(pull(cotangent)), tuple(None for _ in operands)


_with_derivative.defvjp(_forward, _backward)
