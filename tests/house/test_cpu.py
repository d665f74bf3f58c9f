"""Freed memory is kept, and large arrays on a CPU are put into pages of 2 MB."""

import ast
import ctypes
import errno
import functools
import mmap
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import sparsejax as sj
from helpers import run_python
from sparsejax import cpu
from sparsejax.cpu import huge_pages


pytestmark = pytest.mark.usefixtures("loose_promotion")  # of optax

SHAPE = (170_000, 64)  # 43.5 MB
BYTES = 170_000 * 64 * 4
EDGES = 4 << 20  # the ends of an array lie in smaller pages


# ------------------------------------------------------------------ keep_freed_pages

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


# ------------------------------------------------------------------ huge_pages


@functools.cache
def _has_huge_pages() -> bool:
    """Return True if this machine has them, found without the library."""
    if sys.platform != "linux":
        return False
    setting = pathlib.Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not setting.exists() or "[never]" in setting.read_text():
        return False
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, 16 << 20, flags=private)
    memory.write(b"1" * len(memory))
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
        memory.madvise(25)
    except OSError:
        return False
    return True


needs_huge_pages = pytest.mark.skipif(
    not _has_huge_pages(), reason="no huge pages on demand"
)


def _in_huge_pages(array: jax.Array) -> int:
    """How many bytes of the mappings that an array lies in are in huge pages."""
    found, inside = 0, False
    begin = array.unsafe_buffer_pointer()
    end = begin + array.nbytes
    for line in pathlib.Path("/proc/self/smaps").read_text().splitlines():
        header = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if header:
            low, high = (int(x, 16) for x in header.groups())
            inside = low < end and begin < high
        elif inside and line.startswith("AnonHugePages:"):
            found += int(line.split()[1]) << 10
    return found


def _values(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(SHAPE, np.float32)


def _table(seed: int = 0) -> jax.Array:
    return jnp.asarray(_values(seed)) + 0.0  # in memory that XLA allocated


@needs_huge_pages
def test_large_arrays_are_moved_and_keep_their_values():
    tree = {"a": _table(0), "b": [_table(1)], "small": jnp.ones(9)}
    before = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(tree)]
    done = huge_pages(tree)
    assert 2 * (BYTES - EDGES) < done <= 2 * BYTES
    for k, array in enumerate((tree["a"], tree["b"][0])):
        assert _in_huge_pages(array) >= BYTES - EDGES
        np.testing.assert_array_equal(array, _values(k))
    assert [x.unsafe_buffer_pointer() for x in jax.tree.leaves(tree)] == before
    assert huge_pages(tree) == done  # again: nothing is left to do
    assert huge_pages([tree, tree["a"]]) == done  # an array counts once


def _step(tx):
    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, ids):
        loss = lambda params: jnp.sum(params["table"][ids] @ params["w"])
        if hasattr(tx, "catch_up"):
            params, state = tx.catch_up(params, state, {"table": ids})
        grads = sj.grad(loss)(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


@needs_huge_pages
@pytest.mark.window
def test_steps_leave_parameters_and_state_there():
    params = {"table": _table(), "w": jnp.ones(64)}
    tx = sj.optim.lazy(optax.adam(0.1))
    state = tx.init(params)
    assert huge_pages((params, state)) > 3 * (BYTES - EDGES)
    step, ids = _step(tx), jnp.arange(8) * 1000
    for _ in range(2):
        params, state = step(params, state, ids)
    large = [x for x in jax.tree.leaves((params, state)) if x.nbytes >= BYTES]
    assert all(_in_huge_pages(x) >= BYTES - EDGES for x in large)


@needs_huge_pages
def test_shards_of_an_array():
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    whole = np.ones((340_000, 64), np.float32)
    array = jax.device_put(whole, NamedSharding(mesh, PartitionSpec("x")))
    array = array + 0.0
    assert 2 * (BYTES - EDGES) < huge_pages(array) <= 2 * BYTES
    for shard in array.addressable_shards:
        assert _in_huge_pages(shard.data) >= BYTES - EDGES


def test_all_else_is_left_alone():
    deleted = jnp.ones(SHAPE)
    deleted.delete()
    keys = jax.random.split(jax.random.key(0), 4)
    rows = sj.SelectedRows(jnp.arange(3), jnp.ones((3, 2)), height=10)
    others = [deleted, keys, rows, None, 1.0, "text", _values(0), jnp.zeros(0)]
    assert huge_pages(others) == 0
    assert huge_pages(jax.ShapeDtypeStruct(SHAPE, jnp.float32)) == 0


def test_nothing_happens_while_tracing():
    tx = sj.optim.lazy(optax.adam(0.1))
    shape = jax.ShapeDtypeStruct(SHAPE, jnp.float32)
    state = jax.eval_shape(tx.init, {"table": shape})
    assert state[0].mu["table"].shape == SHAPE
    assert jax.eval_shape(lambda x: x + huge_pages(x), shape).shape == SHAPE


@pytest.mark.parametrize("answers", [{}, {"enabled": "always madvise [never]"}])
def test_a_system_without_them(answers, monkeypatch, tmp_path):
    for name, text in answers.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "hpage_pmd_size").write_text("2097152")
    monkeypatch.setattr(cpu, "_SETTINGS", tmp_path)
    cpu._page_bytes.cache_clear()
    try:
        assert huge_pages(_table()) == 0
    finally:
        cpu._page_bytes.cache_clear()


@pytest.mark.parametrize(("error", "pieces"), [("EAGAIN", 3), ("ENOMEM", 1)])
def test_stops_where_linux_has_none_left(error, pieces, monkeypatch):
    asked = []

    def refuse(address, count, advice):
        if advice == mmap.MADV_HUGEPAGE:
            return 0
        asked.append(count)
        return getattr(errno, error)

    monkeypatch.setattr(cpu, "_madvise", refuse)
    assert cpu._collapse(1 << 21, 160 << 20, 1 << 21) == 0
    assert len(asked) == pieces
    assert max(asked) <= 64 << 20
