"""The trace of a call: `fun(*args, **kwargs)` as a flat program of its array leaves."""

import contextlib
import dataclasses
import inspect
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sparsejax import _arguments, _compat
from sparsejax._rows import SelectedRows, is_quantized, is_selected_rows, with_slots
from sparsejax.transform.interpreter import DenseUse, Site


# True while we trace a program to walk. Only then may a ShardedTable act
# as an array. JAX keeps programs traced under different values apart.
makes_views: Any = jax.make_user_context(False)

# An `Observed` while `explain` traces, else None.
observer: Any = jax.make_user_context(None)


@dataclasses.dataclass(eq=False)  # JAX hashes it
class Observed:
    """The facts that `explain` learns while it traces.

    Args:
      leaves: the leaves of each call of `value_and_grad`.
      stacks: the names of the tables in a stack, by the name of its parameter.
    """

    leaves: list["Leaf"] = dataclasses.field(default_factory=list)
    stacks: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)


def name_stack(parameter: str, tables: Sequence[str]) -> None:
    """Tells `explain` the names of the tables that a parameter is a stack of."""
    if observer.value is not None:
        observer.value.stacks[parameter] = tuple(tables)


# -- a flat program --------------------------------------------------------------------


@dataclasses.dataclass
class Flat:
    """A function on its arguments as a program of arrays.

    Args:
      jaxpr, consts: the program.
      inputs: its inputs.
      unflatten: from its outputs to what the function returned.
    """

    jaxpr: Any
    consts: list[Any]
    inputs: list[Any]
    unflatten: Callable[[Sequence[Any]], Any]


def trace_flat(
    fun: Callable[..., Any],
    args: Any,
    kwargs: Any,
    is_input: Callable[[Any], bool] = _arguments.is_array,
) -> Flat:
    """Traces `fun(*args, **kwargs)` as a program of the leaves that are arrays.

    Other leaves, of arguments and results, are passed through unchanged. `is_input`
    chooses the leaves that are inputs of the program.
    """
    leaves, tree = jax.tree.flatten((args, kwargs))
    places = [k for k, x in enumerate(leaves) if is_input(x)]
    out_tree: Any = None
    out_leaves: list[Any] = []  # None instead of each array

    def flat(*arrays):
        nonlocal out_tree
        given = list(leaves)
        for k, x in zip(places, arrays):
            given[k] = x
        args, kwargs = tree.unflatten(given)
        outs, out_tree = jax.tree.flatten(fun(*args, **kwargs))
        out_leaves[:] = [None if _arguments.is_array(x) else x for x in outs]
        return [x for x in outs if _arguments.is_array(x)]

    inputs = [leaves[k] for k in places]
    with makes_views(True):
        jaxpr, consts = _compat.trace(flat, *inputs)

    def unflatten(outputs):
        arrays = iter(outputs)
        return out_tree.unflatten(
            [next(arrays) if x is None else x for x in out_leaves]
        )

    return Flat(jaxpr, consts, inputs, unflatten)


# -- a call of value_and_grad ----------------------------------------------------------


@dataclasses.dataclass
class Leaf:
    """One leaf of the arguments that are differentiated.

    The last five fields are filled in by `make_plan`.

    Args:
      name: the leaf as the user would write it, e.g. `params['table']`.
      value: the argument: an array, a float or a SelectedRows.
      required: its value in `tables=`: True, False, or None to decide here.
      position: its position among the inputs of the program (the position of its
        values, for a SelectedRows).
      sparse: True if its gradient is a SelectedRows.
      reason: why the gradient is not sparse.
      sites, dense: the reads of the leaf that count, and its other uses.
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
    dense: Sequence[DenseUse] = ()
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


@dataclasses.dataclass
class Call:
    """A call of `value_and_grad` as a flat program.

    Args:
      flat: the program; its first output is the loss, the others are aux.
      leaves: the differentiated leaves.
      tree: structure of the differentiated arguments, SelectedRows being leaves.
    """

    flat: Flat
    leaves: list[Leaf]
    tree: Any


def trace_call(
    fun: Callable[..., Any],
    argnums: int | tuple[int, ...],
    has_aux: bool,
    tables: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Call:
    """Traces `fun(*args, **kwargs)`; the differentiated leaves are its inputs.

    `argnums` are as `check_fun` returns them.
    """
    numbers = _check_argnums(argnums, len(args))
    several = isinstance(argnums, tuple)
    chosen = tuple(args[i] for i in numbers) if several else args[numbers[0]]
    is_leaf = lambda x: is_selected_rows(x) or is_quantized(x)
    paths, tree = jax.tree_util.tree_flatten_with_path(chosen, is_leaf=is_leaf)
    names = argument_names(fun, numbers)
    name_of = lambda path: (
        names[path[0].idx] + jax.tree_util.keystr(path[1:])
        if several
        else names[0] + jax.tree_util.keystr(path)
    )
    inputs: list[Any] = []
    leaves: list[Leaf] = []
    flags = _arguments.flag_leaves("tables=", tables, chosen, is_leaf)
    for (path, value), required in zip(paths, flags):
        if isinstance(value, SelectedRows):
            inputs.append(value.rows)
        else:
            _check_differentiable(name_of(path), value)
        leaves.append(Leaf(name_of(path), value, required, len(inputs)))
        inputs.append(value.values if isinstance(value, SelectedRows) else value)
    others = [None if i in numbers else arg for i, arg in enumerate(args)]
    # Arrays that are not differentiated are constants of the program, not inputs: a
    # derivative rule of the user's may close over them, and JAX calls the rule after
    # this trace has ended. `explain` accepts shapes instead of arrays.
    other_leaves, rest_tree = jax.tree.flatten((others, kwargs))
    as_jax = lambda x: jnp.asarray(_arguments.saturate(x))
    other_leaves = [as_jax(x) if isinstance(x, np.ndarray) else x for x in other_leaves]
    shapes = {
        k: x for k, x in enumerate(other_leaves) if isinstance(x, jax.ShapeDtypeStruct)
    }

    def loss_and_aux(inputs, shapes):
        values = [
            with_slots(leaf.value, *inputs[leaf.position - 1 :][:2])
            if isinstance(leaf.value, SelectedRows)
            else inputs[leaf.position]
            for leaf in leaves
        ]
        full = [shapes.get(k, x) for k, x in enumerate(other_leaves)]
        others, kw = rest_tree.unflatten(full)
        new = tree.unflatten(values)
        for i, arg in zip(numbers, new if several else (new,)):
            others[i] = arg
        return _split_aux(fun(*others, **kw), has_aux)

    inputs = [jnp.asarray(x) if isinstance(x, np.ndarray) else x for x in inputs]
    flat = trace_flat(loss_and_aux, (inputs, shapes), {}, lambda x: True)
    return Call(flat, leaves, tree)


# -- arguments -------------------------------------------------------------------------


def check_fun(
    fun: Any, argnums: Any = 0, has_aux: Any = False
) -> int | tuple[int, ...]:
    """Returns `argnums` as an int or a tuple of ints, or raises.

    Raises if the arguments do not describe a function, before it is called.
    """
    if not callable(fun):
        raise TypeError(
            f"fun must be a function, got {_arguments.kind_of(fun)}. Its arguments "
            "come in a second call, as in sparsejax.grad(loss_fn)(params, batch)."
        )
    several = isinstance(argnums, (tuple, list, range))
    numbers = tuple(argnums) if several else (argnums,)
    try:
        if any(isinstance(i, (bool, np.bool_)) for i in numbers):
            raise TypeError
        numbers = tuple(map(operator.index, numbers))
    except TypeError:
        raise TypeError(
            "argnums must be an int or a tuple of ints, got "
            f"{_arguments.show(argnums)}. The arguments of fun come in a second call, "
            "as in sparsejax.grad(loss_fn)(params, batch)."
        ) from None
    if not isinstance(has_aux, (bool, np.bool_)):
        raise TypeError(
            f"has_aux must be True or False, got {_arguments.show(has_aux)}."
        )
    return numbers if several else numbers[0]


def _check_argnums(argnums: int | tuple[int, ...], count: int) -> tuple[int, ...]:
    numbers = argnums if isinstance(argnums, tuple) else (argnums,)
    for i in numbers:
        if not -count <= i < count:
            error = TypeError if i >= 0 else ValueError  # as JAX
            raise error(
                f"argnums={argnums!r} needs at least {i + 1 if i >= 0 else -i} "
                f"positional argument(s), got {count}. Differentiated arguments must "
                "be passed by position."
            )
    numbers = tuple(i % count for i in numbers)
    if len(set(numbers)) < len(numbers):
        raise ValueError(
            f"argnums={argnums!r} names an argument more than once, of {count} "
            "positional argument(s)."
        )
    return numbers


def argument_names(fun: Callable, numbers: Sequence[int]) -> list[str]:
    """Returns the names of positional arguments, `args[k]` if unknown."""
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


def _check_differentiable(name: str, value: Any) -> None:
    try:
        dtype = None if is_quantized(value) else jnp.result_type(value)
    except (TypeError, ValueError):
        dtype = None
    if dtype is None or not jnp.issubdtype(dtype, jnp.inexact):
        kind = type(value).__name__ if dtype is None else dtype.name
        way_out = _arguments.convert_tensor(value, name) or (
            "Pass it in an argument that is not in argnums (there is no allow_int=): "
            "sparsejax.grad(lambda params, rest: fun({**rest, 'params': params})), or "
            "split the tree by equinox.partition. For a flax.nnx module call "
            "sparsejax.nn.nnx.value_and_grad."
        )
        if is_quantized(value):
            way_out = (
                "Pass it in an argument that is not in argnums, or, to train it, pass "
                f"the rows that are read in its place: {name}.pull(ids)."
            )
        raise TypeError(
            f"cannot differentiate with respect to {name}: it must be real or complex "
            f"floating point, got {kind}. {way_out}"
        )


# -- outputs ---------------------------------------------------------------------------


def _split_aux(out: Any, has_aux: bool) -> tuple[Any, Any]:
    aux = ()
    if has_aux:
        if not isinstance(out, tuple) or len(out) != 2:
            length = f" of length {len(out)}" if isinstance(out, tuple) else ""
            raise TypeError(
                "with has_aux=True the function must return (loss, aux), got "
                f"{_arguments.kind_of(out)}{length}."
            )
        out, aux = out
    if jax.tree.structure(out) == jax.tree.structure(0):  # not a list of one number
        with contextlib.suppress(TypeError, ValueError):
            loss = jnp.asarray(out)
            if not loss.shape and jnp.issubdtype(loss.dtype, jnp.floating):
                return loss, aux
    raise TypeError(
        "gradients are only defined for scalar-output functions; the output was "
        f"{_arguments.kind_of(out)}, not a real floating-point scalar. If the function "
        "returns (loss, aux), pass has_aux=True."
    )
