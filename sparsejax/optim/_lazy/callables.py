"""Functions of the parameters that a transformation holds, as `optax.masked` does.

optax calls a mask or a label function at `init` with the parameters, and at each update
with the gradients. Where a transformation runs on rows, the function would see arrays
of n rows, and a rule by shape would give another answer than in dense training.
`resolve` returns the transformation with such functions replaced: each is called with
arrays of the full shapes, and its answer is what the transformation gets.

A transformation is made of closures, so it is copied with other values in their cells;
the original is unchanged. In the functions of optax the cells are known by name. In
functions of a user, a function is replaced if it is called with a tree like the
parameters and returns no arrays. What cannot be found in this way, like a rule inside
an update function, runs on rows; `judge` refuses it if its answer depends on the number
of rows.
"""

from __future__ import annotations

import collections
import copy
import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from sparsejax.optim import _checks as checks, _trees as trees
from sparsejax.optim._lazy import parts
from sparsejax.optim._trees import is_none_or_masked


# Names of optax's variables with a function of the parameters, or of a transformation.
OF_PARAMS = frozenset(
    "mask param_labels weight_dimension_numbers muon_weight_dimension_numbers".split()
)
FACTORIES = frozenset(["inner_factory"])

_FUNCTIONS = types.FunctionType, types.MethodType, functools.partial
_CACHED = type(functools.lru_cache(len))
_NEEDS_NUMBERS = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)


class NeedsNumbersError(ValueError):
    """A mask or label function that computes with the numbers of the parameters."""


def resolve(tx: Any, treedef: Any, specs: Sequence[Any]) -> Any:
    """`tx` whose functions of the parameters answer as on the full shapes.

    Args:
      tx: a transformation.
      treedef: structure of the parameters, see `trees.flatten`.
      specs: its leaves, see `trees.to_spec`.

    Returns:
      A transformation for trees of this structure and any number of rows; `tx` itself
      if it holds no function.
    """
    return _copy(tx, _Parameters(treedef, specs))


def _copy(tx: Any, parameters: _Parameters) -> Any:
    copied = _Copier(parameters)
    if isinstance(tx, tuple):
        return copied(tx)
    init, update = copied(tx.init), copied(tx.update)
    if init is tx.init and update is tx.update:
        return tx
    tx = copy.copy(tx)
    object.__setattr__(tx, "init", init)
    object.__setattr__(tx, "update", update)
    return tx


class _Parameters:
    """The full shapes of the parameters, by path."""

    def __init__(self, treedef: Any, specs: Sequence[Any]):
        tree = treedef.unflatten(specs)
        found, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=trees.is_leaf)
        self._specs = {path: spec for path, spec in found}

    def full(self, tree: Any) -> tuple[Any, tuple[Any, ...]] | None:
        """Structure and full leaves of a tree like the parameters, else None.

        None and MaskedNode may take the place of any part of it.
        """
        leaves, treedef = jax.tree_util.tree_flatten_with_path(
            tree, is_leaf=is_none_or_masked
        )
        absent = {path for path, leaf in leaves if is_none_or_masked(leaf)}
        given = {path for path, _ in leaves} - absent
        for path in self._specs.keys() - given:
            if not any(path[:k] in absent for k in range(len(path) + 1)):
                return None
        full = []
        for path, leaf in leaves:
            if path in absent:
                full.append(leaf)
                continue
            spec, own = self._specs.get(path), trees.to_spec(leaf)
            if spec is None or own is None:
                return None
            ranks = len(spec.shape), len(spec.shape) - trees.row_axes(spec) + 1
            if len(own.shape) not in ranks:
                return None
            full.append(jax.ShapeDtypeStruct(spec.shape, own.dtype))
        return treedef, tuple(full)


class _Copier:
    """Copies functions and what they hold, with other functions of the parameters."""

    def __init__(self, parameters: _Parameters):
        self._parameters = parameters
        self._copies: dict[int, tuple[Any, Any]] = {}  # by id, with the original

    def __call__(self, x: Any) -> Any:
        """A copy, or `x` itself if nothing in it is replaced."""
        if id(x) in self._copies:
            return self._copies[id(x)][1]
        kind = type(x)
        new = x
        if kind is types.FunctionType:
            return self._function(x)
        if kind is functools.partial:
            new = self._items(x, (x.func, x.args, x.keywords), _partial)
        elif kind is types.MethodType:
            new = self._method(x)
        elif kind is _CACHED:
            make = functools.lru_cache(**x.cache_parameters())
            new = self._items(x, [x.__wrapped__], lambda items: make(*items))
        elif isinstance(x, tuple):
            make = getattr(kind, "_make", kind if kind is tuple else None)
            new = self._items(x, x, make) if make else x
        elif kind is list:
            new = self._items(x, x, list)
        elif kind in (dict, collections.OrderedDict):
            make = lambda values: kind(zip(x, values))
            new = self._items(x, x.values(), make)
        self._copies[id(x)] = x, new
        return new

    def _items(self, x: Any, items: Any, make: Callable) -> Any:
        items = list(items)
        new = [self(item) for item in items]
        return x if all(a is b for a, b in zip(items, new)) else make(new)

    def _method(self, x: Any) -> Any:
        """A method of a copy of its object, if the object holds what is replaced."""
        held = getattr(x.__self__, "__dict__", None)
        code = getattr(x.__func__, "__code__", None)
        if not isinstance(held, dict) or code is None:
            return x
        self._copies[id(x)] = x, x  # an object may hold its own method
        new = {k: self._held(code.co_filename, k, value) for k, value in held.items()}
        if all(new[name] is value for name, value in held.items()):
            return x
        owner = copy.copy(x.__self__)
        for name, value in new.items():
            object.__setattr__(owner, name, value)
        return types.MethodType(x.__func__, owner)

    def _function(self, f: Any) -> Any:
        """A copy of a function, if its cells or defaults hold what is replaced."""
        self._copies[id(f)] = f, f  # a function may hold itself
        if f.__code__.co_filename.startswith(parts.JAX):
            return f
        cells, defaults = f.__closure__ or (), self(f.__defaults__)
        new = tuple(map(self._cell, [f] * len(cells), f.__code__.co_freevars, cells))
        if defaults is f.__defaults__ and all(a is b for a, b in zip(cells, new)):
            return f
        copied = types.FunctionType(f.__code__, f.__globals__, None, defaults, new)
        copied.__kwdefaults__ = f.__kwdefaults__
        functools.update_wrapper(copied, f)
        self._copies[id(f)] = f, copied
        return copied

    def _cell(self, f: Any, name: str, cell: types.CellType) -> types.CellType:
        """A cell of `f` with a copy of what it holds, or the same cell."""
        try:
            held = cell.cell_contents
        except ValueError:  # not assigned yet
            return cell
        new = self._held(f.__code__.co_filename, name, held)
        return cell if new is held else types.CellType(new)

    def _held(self, file: str, name: str, held: Any) -> Any:
        """A copy of what a function or an object in a file holds under a name."""
        new, is_mask = self(held), False
        if file.startswith(parts.OPTAX):
            is_mask = name in OF_PARAMS and callable(held)
            # optax takes a tree that can be called for a tree, unless it has labels.
            is_mask &= name != "mask" or jax.tree.structure(held).num_nodes == 1
            may_be_asked = is_mask or name in FACTORIES
        else:
            may_be_asked = (
                isinstance(held, _FUNCTIONS)
                and not file.startswith(parts.LIBRARIES)
                and not parts.is_update(getattr(held, "__name__", ""))
            )
        return self._answering(held, new, is_mask) if may_be_asked else new

    def _answering(self, function: Any, copied: Any, is_mask: bool) -> Callable:
        """`function`, which answers on the full shapes if its answer is data."""
        ask = trees.remember(functools.partial(_ask, function, is_mask))

        @functools.wraps(function)
        def answer(*args, **kwargs):
            full = None
            if len(args) == 1 and not kwargs:
                full = self._parameters.full(args[0])
            found = ask(*full) if full else ()
            if found:
                return found[0]
            result = copied(*args, **kwargs)
            if checks.is_transformation(result):  # not copied by `self`, which keeps it
                return _copy(result, self._parameters)
            return result

        return answer


def _partial(items: list[Any]) -> functools.partial:
    function, args, kwargs = items
    return functools.partial(function, *args, **kwargs)


def _ask(function: Callable, is_mask: bool, treedef: Any, leaves: Any) -> list[Any]:
    """`[answer]` of a function on abstract arrays; nothing if it is not data.

    An answer of arrays depends on numbers, and one of functions is a transformation.

    Raises:
      NeedsNumbersError: `is_mask` is True, and the answer depends on numbers.
    """
    answers: list[Any] = []
    depends = False

    def ask(*arrays):
        arrays = iter(arrays)
        args = [x if is_none_or_masked(x) else next(arrays) for x in leaves]
        answers.append(function(treedef.unflatten(args)))
        return ()

    try:
        jax.eval_shape(ask, *(x for x in leaves if not is_none_or_masked(x)))
    except Exception as error:  # of a function that is no mask, its own call raises
        if is_mask and not isinstance(error, _NEEDS_NUMBERS):
            raise
        depends = True
    found = jax.tree.leaves(answers)
    if not depends and not any(isinstance(x, Tracer) or np.ndim(x) for x in found):
        is_data = found and not any(map(callable, found))
        return answers if is_mask or is_data else []
    if is_mask:
        code = getattr(function, "__code__", None)
        line = f" ({code.co_filename}:{code.co_firstlineno})" if code else ""
        name = getattr(function, "__name__", type(function).__name__)
        raise NeedsNumbersError(
            f"sparsejax.optim: the mask or label function {name}{line} returns arrays "
            "or computes with the numbers of parameters or gradients. Return bools or "
            "labels by path, shape or dtype, or pass the tree that it returns in place "
            "of the function."
        )
    return []
