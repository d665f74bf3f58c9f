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


# Prints what the call returned, and how many pages some runs of a program take whose
# output of 40 MiB is freed after each run.
PROGRAM = """
import resource, warnings
import sparsejax as sj
import jax, jax.numpy as jnp

def faults(run):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range({runs}):
        run()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def run():
    add(x).block_until_ready()

if {first}:
    jnp.ones(3).block_until_ready()
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    kept = {call}
step = jax.jit(lambda x: (x[:2], jnp.sort(x)[0]))  # a temporary of 36 MiB
told = "in new pages in each call" in repr(sj.explain(step)(jnp.zeros(9 << 20)))
add, x = jax.jit(lambda x: x + 1), jnp.zeros(10 << 20)
for _ in range(4 * {runs}):  # until as much is free as ever is in use at once
    run()
print(kept, told, faults(run), [str(w.message) for w in caught])
"""
has_glibc = bool(platform.libc_ver()[0])
needs_glibc = pytest.mark.skipif(not has_glibc, reason="needs glibc")


def _run(first=False, call="sj.cpu.keep_freed_pages()", runs=0, **variables):
    program = PROGRAM.format(first=first, call=call, runs=runs)
    names = ("GLIBC_TUNABLES", "LD_PRELOAD")
    env = {k: v for k, v in os.environ.items() if k not in names}
    env |= {"JAX_PLATFORMS": "cpu", **variables}
    out = run_python("-c", program, env=env).split(maxsplit=3)
    return out[0], out[1] == "True", int(out[2]), ast.literal_eval(out[3])


@pytest.mark.slow
@needs_glibc
def test_freed_pages_are_kept():
    _, told, usual, _ = _run(call="None", runs=10)
    assert told  # by `explain`
    kept, told, faults, caught = _run(runs=10)
    assert (kept, told, caught) == ("True", False, [])
    # As installed, ten runs take 100,000 pages of 4 KiB. A busy machine may free one
    # buffer so late that the next run needs another, of 10,240 pages.
    assert faults < usual / 4


@pytest.mark.window
@needs_glibc
def test_a_warning_says_that_jax_has_started():
    kept, _, _, (message,) = _run(first=True)
    assert kept == "True"
    assert "before the first JAX computation" in message


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
    assert (kept, told, caught) == ("False", False, [])


@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_another_system_is_left_alone(system, monkeypatch):
    monkeypatch.setattr(sys, "platform", system)
    assert cpu.keep_freed_pages() is False


def test_another_libc_is_left_alone(monkeypatch):
    """musl has no `gnu_get_libc_version`."""
    process = types.SimpleNamespace(malloc=ctypes.CDLL(None).malloc)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: process)
    assert cpu.keep_freed_pages() is False
