"""Pauses Python's garbage collector while a program is traced.

Tracing makes many objects, all of which are in use until it ends. The collector looks
through them again and again and finds nothing: for a step of a thousand tables that was
a third of the time.
"""

import functools
import gc
from collections.abc import Callable
from typing import TypeVar

import jax

from sparsejax import _compat


F = TypeVar("F", bound=Callable)


def paused_if_traced(fun: F) -> F:
    """`fun`, without collections while it is called with a tracer of a `jit`.

    Otherwise operations run, and arrays in cycles must be freed: no pause.
    """

    @functools.wraps(fun)
    def wrapped(*args, **kwargs):
        leaves = jax.tree.leaves((args, kwargs))
        if not gc.isenabled() or not any(map(_compat.is_staged, leaves)):
            return fun(*args, **kwargs)
        gc.disable()
        try:
            return fun(*args, **kwargs)
        finally:
            gc.enable()

    return wrapped  # pyright: ignore[reportReturnType]
