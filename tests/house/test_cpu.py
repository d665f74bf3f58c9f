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


# Prints what the call returned, if `explain` tells of new pages, and how many pages ten
# runs of a program take whose output of 40 MiB is freed after each run.
PROGRAM = """
import resource, warnings
import sparsejax as sj
import jax, jax.numpy as jnp

def told():
    step = jax.jit(lambda x: (x[:2], jnp.sort(x)[0]))  # a temporary of 36 MiB
    x = jax.ShapeDtypeStruct((9 << 20,), jnp.float32)
    return "in new pages in each call" in repr(sj.explain(step)(x))

def faults():
    add, x = jax.jit(lambda x: x + 1), jnp.zeros(10 << 20)
    for number in range(30):
        if number == 20:  # as much is free as ever is in use at once
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        add(x).block_until_ready()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

usual = (told(), faults()) if {late} else None
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    kept = sj.cpu.keep_freed_pages()
print((kept, *(usual or (told(), faults())), [str(w.message) for w in caught]))
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
    kept, told, faults, (message,) = _run(late=True)
    assert kept and told  # by `explain`
    assert faults > 90_000  # 100,000 pages of 4 KiB
    assert "before the first JAX computation" in message


@pytest.mark.slow
@needs_glibc
def test_freed_pages_are_kept():
    kept, told, faults, caught = _run()
    assert (kept, told, caught) == (True, False, [])
    # A busy machine may free one buffer so late that the next run needs another, of
    # 10,240 pages.
    assert faults < 25_000


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
