"""Runs a peer's own tests with our functions in place of theirs.

    python -m tests.tools.peers jax CHECKOUT [pytest arguments]
    python -m tests.tools.peers optax CHECKOUT [pytest arguments]
    python -m tests.tools.peers jax CHECKOUT --theirs    # as they are, to compare

CHECKOUT is a working copy of the peer's repository at the release that is installed.
Nothing is fetched. `DIFFERENCES` says which tests fail on purpose, each with its
reason. What takes the place of what:

- `jax.grad`, `jax.value_and_grad`: sparsejax's, with every SelectedRows as the dense
  array that it stands for. Any share of the rows may be read, since the tables of tests
  are small.
- `jax.vjp`, where JAX's tests check gradients against finite differences: the gradient
  of the product of the outputs with their cotangents.
- a transformation of optax: `lazy(tx)`, with every gradient as a SelectedRows of all
  its rows. So its result is that of `tx`, if `tx` goes row by row; if not, `lazy` must
  refuse it, and `tx` runs.
"""

import argparse
import collections
import fnmatch
import functools
import inspect
import os
import pathlib
import sys
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import sparsejax as sj
from sparsejax.transform import plan


_COUNTS: collections.Counter[str] = collections.Counter()
_real = types.SimpleNamespace(
    grad=jax.grad, value_and_grad=jax.value_and_grad, vjp=jax.vjp
)


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


# ------------------------------------------------------------------ the tests

_AS_UNDER_JIT = (
    "The function is traced as under jit: jax.grad(jax.jit(fun)) fails alike, or "
    "behaves alike."
)
_OUR_WORDS = "The error has our words, which name sparsejax; its type is JAX's."
_FRAMES = "A traceback shows frames of ours, which JAX does not take for its own."

DIFFERENCES: dict[str, dict[str, str]] = {
    "jax": {
        # Python's control flow on values, tracers that are closed over.
        "CustomJVPTest::test_hard_stuff2": _AS_UNDER_JIT,
        "CustomJVPTest::test_python_control_flow": _AS_UNDER_JIT,
        "CustomVJP*Test::test_closure_convert_mixed_consts": _AS_UNDER_JIT,
        "CustomVJPTest::test_closure_with_vmap2": _AS_UNDER_JIT,
        "CustomVJP*Test::test_python_control_flow": _AS_UNDER_JIT,
        "CustomVJPTest::test_python_control_flow_bwd": _AS_UNDER_JIT,
        "APITest::test_grad_item": _AS_UNDER_JIT,
        "APITest::test_namedtuple_subclass_transparency": _AS_UNDER_JIT,
        "APITest::test_switch_value_jit": _AS_UNDER_JIT,
        # A primitive without an abstract evaluation cannot be traced at all.
        "APITest::test_unimplemented_interpreter_rules": _AS_UNDER_JIT,
        "APITest::test_bad_input": _OUR_WORDS,
        "APITest::test_grad_and_aux_error": _OUR_WORDS,
        "APITest::test_grad_bad_input": _OUR_WORDS,
        "APITest::test_grad_complex_result_errors": _OUR_WORDS,
        "APITest::test_grad_nonscalar_output": _OUR_WORDS,
        "APITest::test_grad_object_array_error": _OUR_WORDS,
        "APITest::test_grad_of_int_errors": _OUR_WORDS,
        "APITest::test_grad_tuple_output": _OUR_WORDS,
        "APITest::test_grad_unit_output": _OUR_WORDS,
        "APITest::test_grad_without_enough_args_error_message": _OUR_WORDS,
        "TracebackTest::test_custom_vjp_traceback": _FRAMES,
        "TracebackTest::test_grad_traceback": _FRAMES,
    },
    "optax": {},
}


class Plugin:
    """Replaces functions in the modules that are collected, and marks differences.

    Args:
      peer: `"jax"` or `"optax"`.
      replace: whether to replace anything.
    """

    def __init__(self, peer: str, replace: bool):
        self._peer, self._replace = peer, replace
        self._done: set[Any] = set()

    def pytest_collection_modifyitems(self, config: Any, items: list[Any]) -> None:
        """Puts our functions in place, and expects the deliberate differences."""
        kept = [item for item in items if self._concerns_us(item)]
        config.hook.pytest_deselected(items=list(set(items) - set(kept)))
        items[:] = kept
        if not self._replace:
            return
        for item in items:
            module = item.module
            if module not in self._done:
                self._done.add(module)
                PLACE[self._peer](module)
            name = item.nodeid.split("::", 1)[1]
            for pattern, why in DIFFERENCES[self._peer].items():
                if fnmatch.fnmatch(name, pattern):
                    item.add_marker(pytest.mark.xfail(reason=why, strict=True))

    def _concerns_us(self, item: Any) -> bool:
        """Return True if the source of a test mentions a replaced name."""
        words = WORDS[self._peer]
        try:
            source = inspect.getsource(inspect.unwrap(item.function))
        except OSError:
            return True
        return any(word in source for word in words)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Says how much of it was ours."""
        for what, count in sorted(_COUNTS.items()):
            terminalreporter.write_line(f"{count:6d} {what}")


FILES = {
    "jax": (
        "tests/lax_numpy_indexing_test.py",
        "tests/lax_autodiff_test.py",
        "tests/api_test.py",
        "tests/custom_api_test.py",
    ),
    "optax": (
        "optax/_src/transform_test.py",
        "optax/_src/alias_test.py",
        "optax/_src/combine_test.py",
        "optax/transforms",
        "optax/schedules/_inject_test.py",
        "optax/contrib/_common_test.py",
    ),
}


def main() -> int:
    """Runs the tests; the exit code is pytest's."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.tools.peers", description="Runs a peer's own tests."
    )
    parser.add_argument("peer", choices=FILES)
    parser.add_argument("checkout", type=pathlib.Path)
    parser.add_argument("--theirs", action="store_true", help="replace nothing")
    options, rest = parser.parse_known_args()
    checkout = options.checkout.resolve()
    files = [checkout / name for name in FILES[options.peer]]
    if missing := [str(f) for f in files if not f.exists()]:
        parser.error(f"{checkout} is no checkout of {options.peer}: no {missing[0]}")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("JAX_NUM_GENERATED_CASES", "10")
    # Thousands of small programs: to optimize them takes longer than to run them.
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
    sys.argv = sys.argv[:1]  # absl reads it, too
    return pytest.main(
        [
            *(f"--rootdir={checkout}", "-c", os.devnull, "-p", "no:cacheprovider"),
            *("--import-mode=importlib", "-q", "--tb=short", "-o"),
            *("python_files=*_test.py", *map(str, files), *rest),
        ],
        plugins=[Plugin(options.peer, replace=not options.theirs)],
    )


if __name__ == "__main__":
    sys.exit(main())
