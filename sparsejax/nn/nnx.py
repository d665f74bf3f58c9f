"""flax.nnx: `value_and_grad` and `grad` of modules, and layers as modules.

- `value_and_grad`, `grad`: as in flax.nnx, with SelectedRows for tables.
- `Layer(layer, rngs=...)`: a layer of `sparsejax.nn` as a module.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx

from sparsejax import _arguments
from sparsejax._arguments import PyTree
from sparsejax.nn._layer import check_layer, init_for
from sparsejax.transform.grad import value_and_grad as _value_and_grad, without_value
from sparsejax.transform.trace import check_fun


class Layer(nnx.Module):
    """An nnx module that wraps a layer of `sparsejax.nn`, or an object like one.

    Args:
      layer: hashable, with `init(key) -> params` and `layer(params, *inputs)`.
      *inputs: an example input, for a layer that infers its sizes from it.
      rngs: `nnx.Rngs`, whose `params` stream is used.

    Example:
      >>> import jax.numpy as jnp, sparsejax as sj
      >>> from flax import nnx
      >>> model = sj.nn.nnx.Layer(sj.nn.Embedding(1000, 4), rngs=nnx.Rngs(0))
      >>> graph, state = nnx.split(model)
      >>> loss = lambda state, ids: jnp.sum(nnx.merge(graph, state)(ids))
      >>> g = sj.grad(loss)(state, jnp.array([3, 7]))
      >>> nnx.to_pure_dict(g)["params"]["embedding"].rows
      Array([3, 7], dtype=int32)

    References:
      flax, `nnx.Embed`.
    """

    def __init__(self, layer: Any, *inputs: Any, rngs: nnx.Rngs):
        self.layer: Any = check_layer(layer)
        made = init_for(layer, rngs.params(), *inputs[:1])
        # flax 0.11 has no nnx.Dict: there a module may hold a dict.
        as_node: Any = getattr(nnx, "Dict", dict)
        self.params: Any = as_node({name: nnx.Param(x) for name, x in made.items()})

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        """Calls the layer with the module's parameters."""
        return self.layer(self._params(), *inputs, **options)

    def attend(self, query: jax.Array) -> jax.Array:
        """Calls `Embedding.attend`, for the scores of all rows."""
        return self.layer.attend(self._params(), query)

    def _params(self) -> dict[str, Any]:
        # And its Param has no get_value.
        value = lambda x: x.get_value() if hasattr(x, "get_value") else x.value
        return {name: value(param) for name, param in self.params.items()}


# ------------------------------------------------------------------ gradients


Argnums = int | nnx.DiffState | Sequence[int | nnx.DiffState]
_CONTEXT = "sparsejax.nn.nnx.value_and_grad"  # of flax, for references


def value_and_grad(
    fun: Callable[..., Any],
    argnums: Argnums = 0,
    has_aux: bool = False,
    *,
    tables: PyTree = None,
) -> Callable[..., Any]:
    """Works as `flax.nnx.value_and_grad`, with sparse gradients of tables.

    A table has the gradient that `sparsejax.value_and_grad` gives it, and every other
    parameter the gradient that flax returns. Changes that `fun` makes in its modules
    (batch statistics, the counts of `nnx.Rngs`, new variables) stay, as in flax.

    Args:
      fun: a function of modules, variables, states or arrays, with a scalar float
        output, or `(scalar, aux)`.
      argnums: int, `nnx.DiffState`, or a tuple of these: the arguments to
        differentiate. For a module, an int selects each `nnx.Param`, and
        `nnx.DiffState(i, filter)` the variables that the filter selects.
      has_aux: True if `fun` returns `(loss, aux)`.
      tables: which leaves are tables, as in `sparsejax.value_and_grad`: None, True,
        `callable(path, leaf) -> bool`, or a prefix of the gradient's tree, with plain
        dicts for an `nnx.State`.

    Returns:
      A function of the same arguments that returns `(value, gradient)`, or
      `((value, aux), gradient)`. The gradient of a module is an `nnx.State` that
      `nnx.Optimizer.update(model, gradient)` accepts.

    Raises:
      TypeError: `fun` is a method of a module; or as `sparsejax.value_and_grad`.
      DensifyError, ValueError: as `sparsejax.value_and_grad`.

    Example:
      >>> import jax.numpy as jnp, optax, sparsejax as sj
      >>> from flax import nnx
      >>> class Model(nnx.Module):
      ...     def __init__(self, rngs):
      ...         self.items = nnx.Embed(1000, 4, rngs=rngs)
      ...         self.norm = nnx.BatchNorm(4, rngs=rngs)
      ...     def __call__(self, ids):
      ...         return self.norm(self.items(ids)).sum(axis=-1)
      >>> model = Model(nnx.Rngs(0))
      >>> tx = sj.optim.lazy(optax.adam(1e-3))
      >>> optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
      >>> @nnx.jit
      ... def step(model, optimizer, ids):
      ...     loss_fn = lambda model: jnp.mean((model(ids) - 1) ** 2)
      ...     loss, grads = sj.nn.nnx.value_and_grad(loss_fn)(model)
      ...     optimizer.update(model, grads)
      ...     return loss, grads
      >>> loss, grads = step(model, optimizer, jnp.array([3, 7]))
      >>> nnx.to_pure_dict(grads)["items"]["embedding"].rows
      Array([3, 7], dtype=int32)
      >>> bool(jnp.any(model.norm.mean[...] != 0))  # the statistics of the batch
      True

    References:
      flax, `nnx.value_and_grad`; PaddlePaddle, `embedding(is_sparse=True)`.
    """
    return _transform(fun, argnums, has_aux, tables)


def grad(
    fun: Callable[..., Any],
    argnums: Argnums = 0,
    has_aux: bool = False,
    *,
    tables: PyTree = None,
) -> Callable[..., Any]:
    """Works as `flax.nnx.grad`, with sparse gradients of tables.

    `grad(fun)(model)` is `value_and_grad(fun)(model)[1]`: see
    `sparsejax.nn.nnx.value_and_grad`.

    Args:
      fun: a function of modules, variables, states or arrays, with a scalar float
        output, or `(scalar, aux)`.
      argnums: int, `nnx.DiffState`, or a tuple of these: the arguments to
        differentiate.
      has_aux: True if `fun` returns `(loss, aux)`.
      tables: which leaves are tables: None, True, a tree prefix of bools, or
        `callable(path, leaf) -> bool`.

    Returns:
      A function of the same arguments that returns the gradient, or
      `(gradient, aux)`.

    Raises:
      DensifyError, TypeError, ValueError: as `value_and_grad`.

    Example:
      >>> import jax.numpy as jnp, sparsejax as sj
      >>> from flax import nnx
      >>> model = nnx.Embed(1000, 4, rngs=nnx.Rngs(0))
      >>> loss_fn = lambda model, ids: jnp.sum(model(ids))
      >>> g = sj.nn.nnx.grad(loss_fn)(model, jnp.array([3]))
      >>> nnx.to_pure_dict(g)["embedding"].rows
      Array([3], dtype=int32)

    References:
      flax, `nnx.grad`.
    """
    both = _transform(fun, argnums, has_aux, tables)
    return without_value(fun, both, has_aux)


def _transform(fun: Any, argnums: Any, has_aux: Any, tables: Any) -> Callable[..., Any]:
    """Implements `value_and_grad` and `grad`."""
    several = isinstance(argnums, (tuple, list))
    chosen = tuple(argnums) if several else (argnums,)
    plain = tuple(n.argnum if isinstance(n, nnx.DiffState) else n for n in chosen)
    numbers = check_fun(fun, plain if several else plain[0], has_aux)
    if isinstance(getattr(fun, "__self__", None), nnx.Module):
        shown = f"{type(fun.__self__).__name__}.{fun.__name__}"
        raise TypeError(
            "fun must be a function that takes the module as an argument, got the "
            f"method {shown} of a module. Pass {shown} and call it with the module "
            "first, or write a function of the module."
        )

    @functools.wraps(fun)
    @nnx.update_context(_CONTEXT)
    def run(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = _by_position(fun, args, kwargs)
        filters: list[Any] = [None] * len(args)
        for number, n in zip(plain, chosen):
            if -len(args) <= number < len(args):  # `_value_and_grad` refuses the others
                wanted = n.filter if isinstance(n, nnx.DiffState) else nnx.Param
                filters[number] = nnx.DiffState(-1, wanted)
        call = _Call(args, kwargs, filters)
        states = _as_states(tables, call.states, numbers)
        program = call.program(fun, has_aux)
        both = _value_and_grad(program, numbers, True, tables=states)
        (loss, changed), grads = both(*call.states)
        aux = call.update(changed)
        return ((loss, aux) if has_aux else loss), grads

    return run


class _Call:
    """A call with modules among its arguments, as a call with arrays alone.

    Args:
      args, kwargs: of the call.
      filters: for each of `args` which of its variables are differentiated, or None.
    """

    def __init__(self, args: Any, kwargs: Any, filters: Sequence[Any]):
        # By node, the variables that are not differentiated, in a tuple; () for all.
        self._others: list[Any] = []

        def split(context, path, prefix, node):
            if prefix is None or isinstance(node, nnx.Variable):
                self._others.append(())
                return nnx.NodeStates.from_split(*context.split(node))
            graph, state, others = context.split(node, prefix.filter, ...)
            self._others.append((others,))
            return nnx.NodeStates.from_split(graph, state)

        prefix = tuple(filters), None
        pure: Any = nnx.to_tree(
            (args, kwargs), prefix=prefix, split_fn=split, ctxtag=_CONTEXT
        )
        self._args, self._kwargs = pure
        self._is_differentiated = [f is not None for f in filters]
        self.states = tuple(
            jax.tree.map(_state, x, is_leaf=_is_node) if wanted else None
            for x, wanted in zip(self._args, self._is_differentiated)
        )
        # For each output of the program, the input that it returns unchanged; the tree.
        self._unchanged: list[int | None] = []
        self._outputs: Any = None

    def _inputs(self, states: Any) -> list[Any]:
        return jax.tree.leaves((states, self._args, self._kwargs, self._others))

    def program(self, fun: Any, has_aux: bool) -> Callable[..., Any]:
        """Makes a function of `states` that returns the loss and the arrays it changes.

        A table that `fun` has not changed stays out of the program's outputs, where it
        would be copied.
        """

        @functools.wraps(fun)
        def pure_fun(*states):
            inputs = {id(x): k for k, x in enumerate(self._inputs(states))}
            args, kwargs = self._merge(states)
            out = fun(*args, **kwargs)
            if has_aux and not (isinstance(out, tuple) and len(out) == 2):
                raise TypeError(
                    "with has_aux=True the function must return (loss, aux), got "
                    f"{_arguments.kind_of(out)}."
                )
            loss, aux = out if has_aux else (out, None)
            after, aux = nnx.to_tree(((args, kwargs), aux), ctxtag=_CONTEXT)
            # An argument that is not a module is not updated.
            after = [x for x in jax.tree.leaves(after, is_leaf=_is_node) if _is_node(x)]
            leaves, self._outputs = jax.tree.flatten((after, aux))
            self._unchanged = [inputs.get(id(x)) for x in leaves]
            return loss, [x for x, k in zip(leaves, self._unchanged) if k is None]

        return pure_fun

    def _merge(self, states: Any) -> Any:
        """Rebuilds the arguments with their modules, inside the program."""
        args = tuple(
            _with_state(x, state) if wanted else x
            for x, state, wanted in zip(self._args, states, self._is_differentiated)
        )
        others = iter(self._others)

        def merge(context, path, prefix, node):
            return context.merge(node.graphdef, node.state, *next(others))

        return nnx.from_tree(
            (args, self._kwargs), merge_fn=merge, ctxtag=_CONTEXT, is_inner=True
        )

    def update(self, changed: Sequence[Any]) -> Any:
        """Puts what the program has changed into the modules; returns `aux`."""
        new, before = iter(changed), self._inputs(self.states)
        leaves = [next(new) if k is None else before[k] for k in self._unchanged]
        out = self._outputs.unflatten(leaves)
        return nnx.from_tree(out, ctxtag=_CONTEXT, is_inner=False)[1]


def _by_position(fun: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Orders the arguments by position, if `fun` allows it, as flax does."""
    try:
        bound = inspect.signature(fun).bind(*args, **kwargs)
    except (TypeError, ValueError):  # the call itself raises
        return args, kwargs
    return bound.args, bound.kwargs


def _is_node(x: Any) -> bool:
    return isinstance(x, nnx.NodeStates)


def _state(x: Any) -> Any:
    """Returns the state of a module, as its gradient has it."""
    return x.state if _is_node(x) else x


def _with_state(x: Any, state: Any) -> Any:
    """Inverts `_state`: puts new states into the nodes of `x`."""
    nodes, shape = jax.tree.flatten(x, is_leaf=_is_node)
    new = [
        nnx.NodeStates.from_split(node.graphdef, part) if _is_node(node) else part
        for node, part in zip(nodes, shape.flatten_up_to(state))
    ]
    return shape.unflatten(new)


def _as_states(tables: Any, arguments: Any, numbers: Any) -> Any:
    """Returns `tables=` with each dict that stands for an `nnx.State` as a State."""
    if isinstance(numbers, tuple):
        if not isinstance(tables, (tuple, list)) or len(tables) != len(numbers):
            return tables
        return tuple(_as_states(t, arguments, n) for t, n in zip(tables, numbers))
    is_dict = isinstance(tables, dict) and numbers < len(arguments)
    is_dict = is_dict and isinstance(arguments[numbers], nnx.State)
    return nnx.State(tables) if is_dict else tables
