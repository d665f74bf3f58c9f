"""Freed memory is kept on a CPU."""

import ast
import ctypes
import os
import platform
import shutil
import subprocess
import sys
import types

import pytest

from helpers import run_python
from sparsejax import cpu


# Prints what the call returned, if `explain` tells of new pages, and if ten runs in a
# row take none. The step copies 80 MiB for a loop, which XLA runs in another thread.
# The heap of that thread's arena ends at 64 MiB.
PROGRAM = """
import resource, warnings
import sparsejax as sj
import jax, jax.numpy as jnp

@jax.jit
def step(x):
    return x[:2], jax.lax.fori_loop(0, 2, lambda i, x: x.at[i].set(1.0), x).sum()

def told():
    x = jax.ShapeDtypeStruct((20 << 20,), jnp.float32)
    return "in new pages in each call" in repr(sj.explain(step)(x))

def is_reused():
    x, runs = jnp.zeros(20 << 20), 0
    for _ in range(12 if {late} else 60):  # a busy machine frees late, and needs more
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        jax.block_until_ready((step(x), x + 1))
        pages = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
        runs = runs + 1 if pages < 1000 else 0  # of 20,480
        if runs == 10:
            return True
    return False

usual = (told(), is_reused()) if {late} else None
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    kept = sj.cpu.keep_freed_pages()
print((kept, *(usual or (told(), is_reused())), [str(w.message) for w in caught]))
"""
has_glibc = bool(platform.libc_ver()[0])
needs_glibc = pytest.mark.skipif(not has_glibc, reason="needs glibc")


def _run(late=False, **variables):
    names = ("GLIBC_TUNABLES", "LD_PRELOAD")
    env = {k: v for k, v in os.environ.items() if k not in names}
    env |= {"JAX_PLATFORMS": "cpu", **variables}
    return ast.literal_eval(run_python("-c", PROGRAM.format(late=late), env=env))


@pytest.mark.window
@needs_glibc
def test_without_it_pages_are_new_and_a_late_call_warns():
    kept, told, is_reused, (message,) = _run(late=True)
    assert (kept, told, is_reused) == (True, True, False)
    assert "before the first JAX computation" in message


@pytest.mark.slow
@needs_glibc
def test_freed_pages_are_kept():
    assert _run() == (True, False, True, [])


@pytest.mark.slow
@needs_glibc
@pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler")
def test_another_allocator_is_left_alone(tmp_path):
    source, library = tmp_path / "other.c", tmp_path / "libother.so"
    source.write_text(
        "#include <stddef.h>\n"
        "void *__libc_malloc(size_t);\n"
        "void *malloc(size_t n) { return __libc_malloc(n); }\n"
        "int mallopt(int name, int value) { __builtin_trap(); }\n"
    )
    command = ["cc", "-shared", "-fPIC", "-o", library, source]
    subprocess.run(command, check=True)
    kept, told, _, caught = _run(LD_PRELOAD=str(library))
    assert (kept, told, caught) == (False, False, [])


def test_another_system_and_another_libc_are_left_alone(monkeypatch):
    """musl has no `gnu_get_libc_version`."""
    process = types.SimpleNamespace(malloc=ctypes.CDLL(None).malloc)
    with monkeypatch.context() as patch:
        patch.setattr(ctypes, "CDLL", lambda name: process)
        assert cpu.keep_freed_pages() is False
    for system in ("darwin", "win32"):
        monkeypatch.setattr(sys, "platform", system)
        assert cpu.keep_freed_pages() is False
