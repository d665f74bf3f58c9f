"""The trace of a call: `fun(*args, **kwargs)` as a flat program of its array leaves."""

import dataclasses
import inspect
import json
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from sparsejax import _arguments, _compat
from sparsejax._rows import SelectedRows, is_quantized, is_selected_rows, with_leaves
from sparsejax.transform.interpreter import Site


# True while a program is traced that will be walked. Then a table that is not an array
# may stand for one. JAX keeps programs traced under different values apart.
makes_views: Any = jax.make_user_context(False)

# A function that is told each call of `value_and_grad`, while `explain` traces.
observer: Any = jax.make_user_context(None)

_MARK = "sparsejax.explain "


def mark(x: jax.Array, what: int | Sequence[str]) -> jax.Array:
    """`x`, marked for `explain` by an equation that the compiled program is without.

    Args:
      x: array.
      what: the number of a leaf, or the names of the tables that `x` is a stack of.
    """
    return checkpoint_name(x, _MARK + json.dumps(what))


def mark_of(eqn: Any) -> int | list[str] | None:
    """What an equation marks its input with, or None."""
    name = str(eqn.params.get("name", ""))
    return json.loads(name.removeprefix(_MARK)) if name.startswith(_MARK) else None


def mark_stack(stack: Any, tables: Sequence[str]) -> Any:
    """A stack of tables, marked with their names while `explain` traces."""
    if observer.value is None:
        return stack
    is_float = lambda x: (
        _arguments.is_array(x) and jnp.issubdtype(x.dtype, jnp.floating)
    )
    return jax.tree.map(lambda x: mark(x, tables) if is_float(x) else x, stack)


@dataclasses.dataclass
class Leaf:
    """One leaf of the arguments that are differentiated.

    The last four fields are filled in by `make_plan`.

    Args:
      name: the leaf as the user would write it, e.g. `params['table']`.
      value: the argument: an array, a float or a SelectedRows.
      required: its value in `tables=`: True, False, or None to decide here.
      position: its position among the inputs of the program (the position of its
        values, for a SelectedRows).
      sparse: True if its gradient is a SelectedRows.
      reason: why the gradient is not sparse.
      sites: the reads of the leaf that count.
      stacked: True if it is a stack of tables `[K, V, ...]` read at (k, v), with K * V
        rows.
    """

    name: str
    value: Any
    required: bool | None
    position: int
    sparse: bool = False
    reason: str = ""
    sites: Sequence[Site] = ()
    stacked: bool = False

    @property
    def stack(self) -> tuple[int, ...]:
        """The leading axes of a stack of tables."""
        return tuple(jnp.shape(self.value)[:1]) if self.stacked else ()

    @property
    def height(self) -> int:
        """Number of rows."""
        return math.prod(jnp.shape(self.value)[: 1 + self.stacked])

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of a row."""
        return tuple(jnp.shape(self.value)[1 + self.stacked :])

    @property
    def rows_read(self) -> int:
        """Number of rows read, duplicates counted: the capacity of the gradient."""
        return sum(site.num_rows for site in self.sites)


@dataclasses.dataclass(frozen=True)
class LeafExplanation:
    """One leaf as `explain` describes it, without arrays.

    Args:
      name: the leaf as the user would write it, e.g. `params['table']`.
      shape, dtype: of the leaf.
      sparse: True if its gradient is a SelectedRows.
      rows_read: number of rows read, duplicates counted; the gradient's capacity.
      reads: `(number of rows, "file:line")` of each read.
      reason: why it is not sparse; empty if it is.
      height: number of rows; of a stack of tables, of all of them.
      tables: the names of the tables that it is a stack of, if an `EmbeddingCollection`
        reads it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    sparse: bool
    rows_read: int
    reads: tuple[tuple[int, str], ...]
    reason: str
    height: int
    tables: tuple[str, ...]


@dataclasses.dataclass
class Call:
    """`fun` on its arguments as a flat program.

    Args:
      jaxpr, consts: the program; its first output is the loss, the others are aux.
      inputs: its inputs, as arrays.
      leaves: the differentiated ones.
      tree: structure of the differentiated arguments, SelectedRows being leaves.
      unflatten_aux: from the outputs after the loss to aux.
    """

    jaxpr: Any
    consts: list[Any]
    inputs: list[Any]
    leaves: list[Leaf]
    tree: Any
    unflatten_aux: Callable[[Sequence[Any]], Any]


def trace_call(
    fun: Callable[..., Any],
    argnums: int | tuple[int, ...],
    has_aux: bool,
    tables: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    caller: str,
) -> Call:
    """Traces `fun(*args, **kwargs)`; the differentiated leaves are its inputs.

    `argnums` are as `check_fun` returns them.
    """
    numbers = _check_argnums(caller, argnums, len(args))
    several = isinstance(argnums, tuple)
    chosen = tuple(args[i] for i in numbers)
    if not several:
        (chosen,) = chosen
    paths, tree = jax.tree_util.tree_flatten_with_path(chosen, is_leaf=is_selected_rows)
    names = _argument_names(fun, numbers)
    name_of = lambda path: (
        names[path[0].idx] + jax.tree_util.keystr(path[1:])
        if several
        else names[0] + jax.tree_util.keystr(path)
    )
    _check_not_quantized(caller, chosen, name_of)
    inputs: list[Any] = []
    leaves: list[Leaf] = []
    required = _required(caller, tables, chosen, paths)
    for (path, value), is_required in zip(paths, required):
        name = name_of(path)
        if isinstance(value, SelectedRows):
            inputs.append(value.rows)
            leaves.append(Leaf(name, value, is_required, len(inputs)))
            inputs.append(value.values)
        else:
            _check_differentiable(caller, name, value)
            leaves.append(Leaf(name, value, is_required, len(inputs)))
            inputs.append(value)
    others = [None if i in numbers else arg for i, arg in enumerate(args)]
    rest, rest_tree = jax.tree_util.tree_flatten((others, kwargs))
    # Arrays that are not differentiated are constants of the program, not inputs: a
    # derivative rule of the user's may close over them, and JAX calls the rule after
    # this trace has ended. `explain` accepts shapes in place of arrays.
    as_jax = lambda x: jnp.asarray(_arguments.saturate(x))
    rest = [as_jax(x) if isinstance(x, np.ndarray) else x for x in rest]
    is_input = [isinstance(x, jax.ShapeDtypeStruct) for x in rest]
    first = len(inputs)
    inputs += [x for x, is_shape in zip(rest, is_input) if is_shape]
    inputs = [jnp.asarray(x) if isinstance(x, np.ndarray) else x for x in inputs]
    aux_tree: Any = None
    aux_leaves: list[Any] = []  # None in place of each array

    def flat(*xs):
        nonlocal aux_tree
        values = [
            with_leaves(leaf.value, *xs[leaf.position - 1 :][:2])
            if isinstance(leaf.value, SelectedRows)
            else xs[leaf.position]
            for leaf in leaves
        ]
        arrays = iter(xs[first:])
        others, kw = jax.tree_util.tree_unflatten(
            rest_tree, [next(arrays) if d else x for x, d in zip(rest, is_input)]
        )
        new = jax.tree_util.tree_unflatten(tree, values)
        for i, arg in zip(numbers, new if several else (new,)):
            others[i] = arg
        loss, aux = _split_aux(caller, fun(*others, **kw), has_aux)
        found, aux_tree = jax.tree_util.tree_flatten(aux)
        aux_leaves[:] = [None if _arguments.is_array(x) else x for x in found]
        return [loss, *filter(_arguments.is_array, found)]

    with makes_views(True):
        jaxpr, consts = _compat.trace(flat, *inputs)

    def unflatten_aux(outputs):
        arrays = iter(outputs)
        return jax.tree_util.tree_unflatten(
            aux_tree, [next(arrays) if x is None else x for x in aux_leaves]
        )

    return Call(jaxpr, consts, inputs, leaves, tree, unflatten_aux)


# -- arguments -------------------------------------------------------------------------


def check_fun(
    caller: str, fun: Any, argnums: Any = 0, has_aux: Any = False
) -> int | tuple[int, ...]:
    """Returns `argnums` as an int or a tuple of ints, or raises.

    Raises if the arguments do not describe a function, before it is called.
    """
    right = f"Write {caller}(loss_fn)(params, batch)"
    if not callable(fun):
        raise _arguments.wrong_type(
            caller,
            "fun",
            "a function",
            _arguments.kind_of(fun),
            f"{right}, with the function itself first, and its arguments in a second "
            "call.",
        )
    several = isinstance(argnums, (tuple, list, range))
    try:
        numbers = tuple(map(_as_number, argnums if several else (argnums,)))
    except TypeError:
        raise _arguments.wrong_type(
            caller,
            "argnums",
            "an int or a tuple of ints",
            _arguments.show(argnums),
            f"{right} if these are arguments of the function: they come in a second "
            "call.",
        ) from None
    _arguments.check_bool(caller, "has_aux", has_aux)
    return numbers if several else numbers[0]


def _as_number(x: Any) -> int:
    if isinstance(x, (bool, np.bool_)):
        raise TypeError
    return operator.index(x)


def _check_argnums(
    caller: str, argnums: int | tuple[int, ...], count: int
) -> tuple[int, ...]:
    numbers = argnums if isinstance(argnums, tuple) else (argnums,)
    for i in numbers:
        if not -count <= i < count:
            error = TypeError if i >= 0 else ValueError  # as JAX
            raise error(
                f"{caller}: argnums={argnums!r} needs at least "
                f"{i + 1 if i >= 0 else -i} positional argument(s), got {count}. "
                "Differentiated arguments must be passed by position."
            )
    numbers = tuple(i % count for i in numbers)
    if len(set(numbers)) < len(numbers):
        raise ValueError(
            f"{caller}: argnums={argnums!r} names an argument more than once, of "
            f"{count} positional argument(s). Name each once; its gradient can be used "
            "in several places."
        )
    return numbers


def _argument_names(fun: Callable, numbers: Sequence[int]) -> list[str]:
    try:
        parameters = list(inspect.signature(fun).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    names = [
        p.name
        for p in parameters
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    return [names[i] if i < len(names) else f"args[{i}]" for i in numbers]


def _required(
    caller: str, tables: Any, chosen: Any, paths: Sequence[Any]
) -> list[bool | None]:
    """The value of `tables=` for each leaf: True, False or None."""
    if _arguments.is_predicate(tables, chosen):
        return [bool(tables(path, leaf)) for path, leaf in paths]
    required: list[Any] = []

    def add(value, part):
        required.extend(
            [value] * len(jax.tree_util.tree_leaves(part, is_leaf=is_selected_rows))
        )

    is_none = lambda x: x is None
    try:
        jax.tree_util.tree_map(add, tables, chosen, is_leaf=is_none)
    except (ValueError, TypeError):
        raise _arguments.wrong(
            caller,
            "tables=",
            "a prefix of the differentiated argument's tree, with True, False or None "
            "at its leaves",
            _arguments.show_tree(tables, is_none),
            _arguments.show_mismatch(tables, chosen, is_selected_rows),
        ) from None
    for value in required:
        if value is not None and not isinstance(value, (bool, np.bool_)):
            raise _arguments.wrong_type(
                caller,
                "tables=",
                "True, False, None, a tree of these, or a callable(path, leaf) -> bool",
                _arguments.show(value),
            )
    return required


def _check_not_quantized(caller: str, chosen: Any, name_of: Callable) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(chosen, is_leaf=is_quantized):
        if is_quantized(leaf):
            name = name_of(path)
            raise TypeError(
                f"{caller}: {name} is a QuantizedTable, whose integers have no "
                "gradient. Pass it in an argument that is not in argnums. To train it, "
                f"pass the rows that are read in its place: {name}.pull(ids)."
            )


def _check_differentiable(caller: str, name: str, value: Any) -> None:
    try:
        dtype = jnp.result_type(value)
    except (TypeError, ValueError):
        dtype = None
    if dtype is None or not jnp.issubdtype(dtype, jnp.inexact):
        found = type(value).__name__ if dtype is None else dtype.name
        way_out = _arguments.convert_tensor(value, name) or (
            "Pass it as an argument that is not in argnums, or split it off the tree "
            "(equinox.partition). For a flax.nnx module call "
            "sparsejax.nn.nnx.value_and_grad."
        )
        raise TypeError(
            f"{caller}: cannot differentiate with respect to {name}: it must be real "
            f"or complex floating point, got {found}. {way_out}"
        )


# -- outputs ---------------------------------------------------------------------------


def _split_aux(caller: str, out: Any, has_aux: bool) -> tuple[Any, Any]:
    aux = ()
    if has_aux:
        if not isinstance(out, tuple) or len(out) != 2:
            length = f" of length {len(out)}" if isinstance(out, tuple) else ""
            raise TypeError(
                f"{caller}: with has_aux=True the function must return (loss, aux), "
                f"got {_arguments.kind_of(out)}{length}."
            )
        out, aux = out
    try:  # a list of numbers is not an array
        loss = None if isinstance(out, (list, tuple)) else jnp.asarray(out)
    except (TypeError, ValueError):
        loss = None
    if loss is None or jnp.shape(loss) != () or is_selected_rows(out):
        found = _arguments.kind_of(out if loss is None else loss)
        raise TypeError(
            f"{caller}: gradients are only defined for scalar-output functions; the "
            f"output was {found}. If it returns (loss, aux), pass has_aux=True."
        )
    if not jnp.issubdtype(loss.dtype, jnp.floating):
        raise _arguments.wrong_type(
            caller, "the loss", "real floating point", loss.dtype.name
        )
    return loss, aux
