"""Our functions, with the signatures and results of the peers'.

- `jax.grad`, `jax.value_and_grad`: sparsejax's, with every SelectedRows as the dense
  array that it stands for. Any share of the rows may be read, since the tables of tests
  are small.
- `jax.vjp`, where JAX's tests check gradients against finite differences: the gradient
  of the product of the outputs with their cotangents.
- a transformation of optax: `lazy(tx)`, with every gradient as a SelectedRows of all
  its rows. So its result is that of `tx`, if `tx` goes row by row; if not, `lazy` must
  refuse it, and `tx` runs.
"""

import collections
import functools
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import sparsejax as sj
from sparsejax.transform import plan


_COUNTS: collections.Counter[str] = collections.Counter()
_real = types.SimpleNamespace(
    grad=jax.grad, value_and_grad=jax.value_and_grad, vjp=jax.vjp
)


def counts() -> list[str]:
    """The calls and their outcomes."""
    return [f"{count:6d} {what}" for what, count in sorted(_COUNTS.items())]


class _Instead(types.ModuleType):
    """A module with some names replaced."""

    def __init__(self, module: Any, **names: Any):
        super().__init__(module.__name__)
        self.__dict__.update(names, _module=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _is_rows(x: Any) -> bool:
    return isinstance(x, sj.SelectedRows)


# ------------------------------------------------------------------ jax


def _dense(tree: Any) -> Any:
    leaves, treedef = jax.tree.flatten(tree, is_leaf=_is_rows)
    sparse = any(map(_is_rows, leaves))
    _COUNTS["gradients with rows" if sparse else "gradients without rows"] += 1
    return treedef.unflatten([x.to_dense() if _is_rows(x) else x for x in leaves])


def value_and_grad(
    fun: Callable, argnums: Any = 0, has_aux: bool = False, **others: Any
) -> Callable:
    """`jax.value_and_grad` by sparsejax."""
    if any(others.values()):  # holomorphic, allow_int, reduce_axes: only JAX has these
        return _real.value_and_grad(fun, argnums, has_aux, **others)
    ours = sj.value_and_grad(fun, argnums, has_aux)

    @functools.wraps(fun)
    def run(*args, **kwargs):
        value, grads = ours(*args, **kwargs)
        return value, _dense(grads)

    return run


def grad(
    fun: Callable, argnums: Any = 0, has_aux: bool = False, **others: Any
) -> Callable:
    """`jax.grad` by sparsejax."""
    if any(others.values()):
        return _real.grad(fun, argnums, has_aux, **others)
    ours = sj.grad(fun, argnums, has_aux)

    @functools.wraps(fun)
    def run(*args, **kwargs):
        found = ours(*args, **kwargs)
        return (_dense(found[0]), found[1]) if has_aux else _dense(found)

    return run


def vjp(fun: Callable, *primals: Any, **others: Any) -> Any:
    """`jax.vjp` by sparsejax, for real functions of real arrays."""
    is_real = lambda x: jnp.issubdtype(jnp.result_type(x), jnp.floating)
    spec = None
    if not others and all(map(is_real, jax.tree.leaves(primals))) and primals:
        spec = jax.tree.leaves(jax.eval_shape(fun, *primals))
    if not spec or not all(map(is_real, spec)):
        return _real.vjp(fun, *primals, **others)

    def pull(cotangents):
        def product(*primals):
            pairs = zip(*map(jax.tree.leaves, (fun(*primals), cotangents)))
            total = sum(jnp.sum((a * b).astype(jnp.float32)) for a, b in pairs)
            return total

        numbers = tuple(range(len(primals)))
        try:  # rows of arrays of rank 1, too
            return _dense(sj.grad(product, numbers, tables=True)(*primals))
        except sj.DensifyError:
            return grad(product, numbers)(*primals)

    return fun(*primals), pull


def _place_jax(module: Any) -> None:
    # The checks of gradients in JAX's tests find `vjp` there.
    from jax._src import public_test_util as checks  # noqa: TID251

    plan.max_reads = lambda height, width: 1 << 62
    names: dict[str, Any] = dict(grad=grad, value_and_grad=value_and_grad)
    if "lax" in module.__name__:  # elsewhere the tests are of vjp itself
        names["vjp"] = vjp
    module.jax = _Instead(jax, **names)
    for name, function in names.items():
        if getattr(module, name, None) is getattr(_real, name):
            setattr(module, name, function)
    if hasattr(module, "api"):
        module.api = _Instead(module.api, **names)
    api = getattr(checks, "api")  # noqa: B009
    if not isinstance(api, _Instead):
        setattr(checks, "api", _Instead(api, vjp=vjp))  # noqa: B010


# ------------------------------------------------------------------ optax


def _rows(x: Any) -> Any:
    if _is_rows(x) or not hasattr(x, "dtype") or not jnp.ndim(x):
        return x
    if not jnp.issubdtype(x.dtype, jnp.floating) or not x.shape[0]:
        return x
    return sj.SelectedRows(jnp.arange(x.shape[0]), x, x.shape[0])


def lifted(tx: Any) -> Any:
    """`lazy(tx)`, run on rows, with dense arrays going in and out."""
    ours = sj.optim.lazy(tx)
    theirs = optax.with_extra_args_support(tx)

    def init(params):
        try:
            return ours.init(params)
        except (TypeError, ValueError) as error:
            if "sparsejax" not in str(error):
                raise
            _COUNTS["transformations refused at init"] += 1
            return theirs.init(params)

    def update(updates, state, params=None, **extra_args):
        rows = jax.tree.map(_rows, updates)
        try:
            out, state = ours.update(rows, state, params, **extra_args)
        except (TypeError, ValueError) as error:
            if "sparsejax" not in str(error):
                raise
            _COUNTS["updates refused"] += 1
            return theirs.update(updates, state, params, **extra_args)
        _COUNTS["updates by rows"] += 1
        dense = lambda x: x.to_dense() if _is_rows(x) else x
        return jax.tree.map(dense, out, is_leaf=_is_rows), state

    update.replaces = tx
    return optax.GradientTransformationExtraArgs(init, update)


def _is_transformation(x: Any) -> bool:
    return isinstance(x, optax.GradientTransformation)


def _original(x: Any) -> Any:
    return getattr(x.update, "replaces", x) if _is_transformation(x) else x


class _Lifts(types.ModuleType):
    """A module of optax whose transformations are lifted."""

    def __init__(self, module: Any):
        super().__init__(module.__name__)
        self.__dict__.update(_module=module)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._module, name)
        if isinstance(found, types.ModuleType):
            return _Lifts(found)
        if not isinstance(found, types.FunctionType):
            return found

        @functools.wraps(found)
        def call(*args, **kwargs):
            originals = jax.tree.map(
                _original, (args, kwargs), is_leaf=_is_transformation
            )
            args, kwargs = originals
            out = found(*args, **kwargs)
            return lifted(out) if _is_transformation(out) else out

        return call


def _place_optax(module: Any) -> None:
    for name, value in list(vars(module).items()):
        if isinstance(value, types.ModuleType) and value.__name__.startswith("optax"):
            setattr(module, name, _Lifts(value))


# Tests without any of these words run none of our code.
WORDS = {"jax": ("grad", "vjp"), "optax": ("",)}
PLACE = {"jax": _place_jax, "optax": _place_optax}
