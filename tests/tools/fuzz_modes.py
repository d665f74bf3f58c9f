"""Shared by the fuzzers: how a gradient is taken, and how results are compared.

A case of `fuzz_programs` or `fuzz_models` is a loss of parameters and a batch. `check`
takes its gradient by sparsejax and by JAX, in one of `MODES`.
"""

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import sparsejax as sj
from evaluate import evaluate
from helpers import to_dense
from sparsejax import _compat


class Case(NamedTuple):
    """A function to differentiate, and its arguments."""

    loss: Callable[..., Any]  # `(params, batch) -> scalar`
    params: Any
    batches: Any = ((), ())  # two of one shape
    tables: Any = True  # for the mode "required"
    refusals: bool = False  # sparsejax must refuse what JAX refuses
    # A second derivative is not compared where JAX contradicts itself: its gather drops
    # the cotangent of a row out of range, but its tangent, and the transpose of the
    # former, read the nearest row.
    forwards: bool = False


@contextlib.contextmanager
def precisely():
    """In float64, with the promotion that users have."""
    with _compat.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        yield


def total_of(x):
    """A real scalar of an array of any type."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return total_of(x.real) + 0.5 * total_of(x.imag)
    return jnp.sum(jnp.sin(jnp.nan_to_num(x.astype(jnp.float64))))


def interpret(fun, *args):
    """`fun` traced as under jit; its operations run one by one, see `evaluate.py`."""
    jaxpr, out = jax.make_jaxpr(fun, return_shape=True)(*args)
    found = evaluate(jaxpr, jax.tree.leaves(args))
    return jax.tree.unflatten(jax.tree.structure(out), found)


# ------------------------------------------------------------------ modes

# Each takes `first`, `(params, batch) -> (value, gradients as arrays)`.


def _both(batches):
    return jax.tree.map(lambda *xs: jnp.stack(xs), *batches)


def _traced(first, params, batches):
    return interpret(first, params, batches[0])


def _vmapped_with_params(first, params, batches):
    two = jax.tree.map(lambda x: jnp.stack([x, x + x]), params)
    return interpret(jax.vmap(first), two, _both(batches))


def _scanned(first, params, batches):
    step = lambda c, batch: (c, first(params, batch))
    return interpret(lambda both: lax.scan(step, 0, both)[1], _both(batches))


def _hvp(first, params, batches):
    """Forward over reverse."""
    run = lambda p: first(p, batches[0])
    return interpret(lambda p: jax.jvp(run, (p,), (jax.tree.map(jnp.cos, p),)), params)


def _second_order(first, params, batches, gradient=jax.grad):
    def norm(params):
        leaves = jax.tree.leaves(first(params, batches[0])[1])
        return sum(map(total_of, leaves), jnp.zeros((), jnp.float64))

    return interpret(gradient(norm), params)


def _jacobian(first, params, batches, gradient=jax.jacrev):
    return interpret(gradient(lambda p: first(p, batches[0])[1]), params)


MODES: dict[str, Any] = {
    "traced": _traced,
    "eager": lambda first, params, batches: first(params, batches[0]),
    "compiled": lambda first, params, batches: jax.jit(first)(params, batches[0]),
    "vmapped": lambda first, params, batches: interpret(
        jax.vmap(first, (None, 0)), params, _both(batches)
    ),
    "vmapped_with_params": _vmapped_with_params,
    "scanned": _scanned,
    "hvp": _hvp,
    "second_order": _second_order,
    "jacobian": _jacobian,
}
SECOND = "hvp", "second_order", "jacobian"
ROUNDING = {"bf16": 0.1, "bfloat16": 0.1, "f16": 0.02, "f32": 1e-4, "c64": 1e-4}
FINE = 1e-9


# ------------------------------------------------------------------ the check


def check(case: Case, how: str) -> str:
    """Raises if sparsejax and JAX differ. Call it `precisely`.

    Returns:
      "compared"; "dense", if `tables=` is refused with the reason; "refused", if JAX
      and sparsejax refuse the case; or "skipped", if JAX alone decides.
    """
    run, options = MODES.get(how, _traced), {}
    if how == "required":
        options["tables"] = case.tables

    def first(value_and_grad, **options):
        def run(params, batch):
            value, grads = value_and_grad(case.loss, **options)(params, batch)
            assert not options or _all_are_rows(case.tables, grads)
            return to_dense((value, grads))

        return run

    args, theirs = (case.params, case.batches), first(jax.value_and_grad)
    try:
        want = run(theirs, *args)
    except Exception as refusal:
        if not case.refusals:
            return "skipped"
        try:
            run(first(sj.value_and_grad), *args)
        except (type(refusal), TypeError, ValueError, IndexError):
            return "refused"
        raise AssertionError(f"JAX refused: {refusal}") from refusal
    try:
        found = run(first(sj.value_and_grad, **options), *args)
    except sj.DensifyError:
        if how != "required":
            raise
        return "dense"
    if not is_close(found, want, FINE):
        if how in ("second_order", "jacobian") and case.forwards:
            forwards = run(theirs, *args, jax.jacfwd)
            if not is_close(forwards, want, 1e-4):
                return "skipped"
        program = str(jax.make_jaxpr(theirs)(case.params, case.batches[0]))
        narrow = [x for name, x in ROUNDING.items() if f"{name}[" in program]
        assert_close(found, want, max([FINE, *narrow]))
    return "compared"


def _all_are_rows(tables: Any, grads: Any) -> bool:
    """Whether each table that is required has a sparse gradient."""
    is_rows = lambda x: isinstance(x, sj.SelectedRows)
    leaves = lambda part: jax.tree.leaves(part, is_leaf=is_rows)
    one = lambda required, part: not required or all(map(is_rows, leaves(part)))
    return all(jax.tree.leaves(jax.tree.map(one, tables, grads)))


def is_close(found: Any, want: Any, tolerance: float, **options: Any) -> bool:
    """Whether `assert_close` holds."""
    try:
        assert_close(found, want, tolerance, **options)
    except AssertionError:
        return False
    return True


def assert_close(
    found: Any, want: Any, tolerance: float, what: str = "", same_types: bool = True
) -> None:
    """Compares trees, each array of floats relative to its largest element.

    Without `same_types`, floats agree to the precision of the type that was found.
    """
    assert jax.tree.structure(found) == jax.tree.structure(want), what
    pairs = zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(want))
    for (path, a), b in pairs:
        where = f"{what} {jax.tree_util.keystr(path)}"
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        a, b = np.asarray(a), np.asarray(b)
        assert a.shape == b.shape and (a.dtype == b.dtype or not same_types), where
        if not jnp.issubdtype(a.dtype, jnp.inexact):
            np.testing.assert_array_equal(a, b, where)
            continue
        allowed = tolerance
        if not same_types:
            bits = jnp.finfo(a.dtype).bits
            allowed = max(tolerance, {16: 2e-2, 32: 1e-5}.get(bits, 0.0))
        wide = np.complex128 if np.iscomplexobj(a) else np.float64
        a, b = a.astype(wide), b.astype(wide)
        scale = np.max(np.abs(b), initial=1e-3, where=np.isfinite(b))
        np.testing.assert_allclose(a, b, rtol=0, atol=allowed * scale, err_msg=where)
