"""Memory of the process on a CPU: two settings that can make a step twice as fast.

- `keep_freed_pages`: glibc keeps freed memory for the next step.
- `huge_pages`: large arrays lie in pages of 2 MB.

Both act on the process, so a program calls them and the library never does. On other
systems than Linux they return False and 0, and change nothing.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import pathlib
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from sparsejax import _arguments, _compat


# ------------------------------------------------------------------ freed pages

# Parameters of glibc's mallopt(3), by the numbers of malloc.h, and their values.
_MALLOPT = (
    (-8, 1),  # M_ARENA_MAX: the heaps of other arenas end at 64 MiB
    (-4, 0),  # M_MMAP_MAX: M_MMAP_THRESHOLD cannot exceed 32 MiB, so map nothing
    (-1, 2**31 - 1),  # M_TRIM_THRESHOLD: the end of the heap is not given back
)
_MAX_KEPT = 32 << 20  # bytes; glibc keeps smaller buffers by itself


def keep_freed_pages() -> bool:
    """Asks glibc to keep freed memory of the process; call it before JAX computes.

    XLA allocates the temporaries of a compiled program as one buffer in each call. By
    default glibc maps a buffer above 32 MiB anew, and Linux clears each of its pages of
    4 KiB when it is first touched: about 1 ms for 4 MB. With this setting the buffer
    lies in memory that the last call freed. Steps whose temporaries, or whose dense
    updates, exceed 32 MiB become up to 3 times faster, and smaller ones do not change.

    There are two costs. The resident memory of the process does not shrink: freed
    memory is reused, but not returned to Linux. And all threads share one arena with
    one lock, which matters to programs with many threads that allocate small objects
    in C or C++.

    If JAX has computed already, its threads have arenas of their own and keep them.
    Then this function still sets all it can, and warns.

    Returns:
      True if glibc accepted the settings. False, with nothing changed, if the `malloc`
      of the process is not glibc's: on macOS and Windows, under musl, and with
      tcmalloc or jemalloc preloaded.

    Example:
      >>> import sparsejax as sj
      >>> sj.cpu.keep_freed_pages()  # doctest: +SKIP
      True

    References:
      glibc, `mallopt(3)`. The same from outside of the process:
      `GLIBC_TUNABLES=glibc.malloc.arena_max=1:glibc.malloc.mmap_max=0:`
      `glibc.malloc.trim_threshold=2147483647`.
    """
    if not _has_glibc_malloc():
        return False
    if _compat.has_backend():
        warnings.warn(
            "sparsejax.cpu.keep_freed_pages: JAX has started its threads already, and "
            "they keep arenas of their own, so large temporaries may still be mapped "
            "anew in each step. Call it before the first JAX computation.",
            stacklevel=2,
        )
    mallopt = ctypes.CDLL(None).mallopt
    return all([mallopt(name, value) == 1 for name, value in _MALLOPT])


def _maps_anew(num_bytes: int) -> bool:
    """Returns True if temporaries of `num_bytes` take new pages in each call."""
    is_large = num_bytes > _MAX_KEPT and jax.default_backend() == "cpu"
    if not is_large or not _has_glibc_malloc():
        return False
    process = ctypes.CDLL(None)
    process.malloc.restype, process.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    process.free.argtypes = [ctypes.c_void_p]
    address = process.malloc(num_bytes)
    if address is None:
        return False
    # glibc's malloc.c: IS_MMAPPED is a bit of the size, which is before the buffer.
    size = ctypes.c_size_t.from_address(address - ctypes.sizeof(ctypes.c_size_t)).value
    process.free(address)
    return bool(size & 2)


def _has_glibc_malloc() -> bool:
    """Returns True if the process allocates with glibc's `malloc`.

    A preloaded allocator defines `malloc` in a library of its own, and may define a
    `mallopt` that ignores its arguments. So the libraries of two symbols are compared.
    """
    if sys.platform != "linux":
        return False
    ours = _library_of("malloc")
    return ours is not None and ours == _library_of("gnu_get_libc_version")


class _DlInfo(ctypes.Structure):
    """The result of `dladdr(3)`."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def _library_of(symbol: str) -> str | None:
    """The file that defines a C symbol of the process, or None."""
    process = ctypes.CDLL(None)
    try:
        address = ctypes.cast(getattr(process, symbol), ctypes.c_void_p)
        found = _DlInfo()
        if not process.dladdr(address, ctypes.byref(found)) or not found.file:
            return None
    except AttributeError:  # musl has no gnu_get_libc_version
        return None
    return os.path.realpath(os.fsdecode(found.file))


# ------------------------------------------------------------------ huge pages

_SETTINGS = pathlib.Path("/sys/kernel/mm/transparent_hugepage")
_MADV_COLLAPSE = 25  # Linux 6.1; the module `mmap` does not have it
# A smaller array has few pages of 2 MB, and few rows.
_MIN_BYTES = 32 << 20
# Linux is asked for one piece at a time. The first piece that it refuses ends the work:
# it would search for each further huge page in vain.
_PIECE_BYTES = 64 << 20


def huge_pages(tree: _arguments.PyTree) -> int:
    """Puts large arrays on a CPU into pages of 2 MB, at the addresses they have.

    A batch reads rows all over a table. With pages of 4 KiB each row is in a page of
    its own, and the processor looks up the address of each page: a table of 2.5 GB has
    600,000 of them, a few thousand fit into the processor's cache of addresses. NumPy
    asks for pages of 2 MB for its own arrays; XLA does not. Measured: an Adam step of
    8,192 ids is 1.1 times faster on 10^6 rows of 64, and 1.2 times on 10^7.

    Values, addresses and the memory in use stay the same. A step that updates donated
    arrays in place keeps their pages, so call it once, for parameters and optimizer
    state. It waits until the arrays are computed, and Linux then copies them once, at
    0.2 to 0.3 s a GB.

    Args:
      tree: a pytree. Each `jax.Array` of 32 MiB or more on a CPU is moved; smaller
        arrays, keys of `jax.random` and other leaves are ignored.

    Returns:
      `int`: at least how many bytes of these arrays are in huge pages now. 0, with
      nothing moved, on other systems than Linux, if Linux is older than 6.1, and if
      /sys/kernel/mm/transparent_hugepage/enabled says `never`.

    Example:
      >>> import jax.numpy as jnp, sparsejax as sj
      >>> params = {"table": jnp.ones((100, 8)), "bias": jnp.zeros(8)}
      >>> sj.cpu.huge_pages(params)  # too small to need it
      0

    References:
      Linux, "Transparent Hugepage Support" and `madvise(2)`; NumPy,
      `NUMPY_MADVISE_HUGEPAGE`.
    """
    size = _page_bytes()
    if size is None:
        return 0
    buffers = {x for leaf in jax.tree.leaves(tree) for x in _large_buffers(leaf)}
    return sum(_collapse(*x, size) for x in sorted(buffers))


def _large_buffers(leaf: Any) -> Iterator[tuple[int, int]]:
    """The address and the bytes of each large buffer of a leaf that is on a CPU."""
    if not _arguments.is_concrete(leaf) or not isinstance(leaf, jax.Array):
        return
    if leaf.is_deleted() or jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        return
    for shard in leaf.addressable_shards:
        data = shard.data
        if shard.device.platform == "cpu" and data.nbytes >= _MIN_BYTES:
            data.block_until_ready()  # memory has no pages before it is written
            yield data.unsafe_buffer_pointer(), data.nbytes


def _collapse(address: int, count: int, size: int) -> int:
    """Moves the whole huge pages in `count` bytes; returns how many bytes they are."""
    begin, end = -(-address // size) * size, (address + count) // size * size
    if begin >= end or _madvise(begin, end - begin, mmap.MADV_HUGEPAGE):
        return 0
    done = 0
    for at in range(begin, end, _PIECE_BYTES):
        piece = min(_PIECE_BYTES, end - at)
        error = _madvise(at, piece, _MADV_COLLAPSE)
        if not error:
            done += piece
        elif error != errno.EAGAIN:  # a page of this piece is in use for a moment
            break
    return done


def _madvise(address: int, count: int, advice: int) -> int:
    """Calls `madvise(2)`; returns 0, or the number of the error."""
    failed = _libc().madvise(
        ctypes.c_void_p(address), ctypes.c_size_t(count), ctypes.c_int(advice)
    )
    return ctypes.get_errno() if failed else 0


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


@functools.cache
def _page_bytes() -> int | None:
    """The size of a huge page, or None if this system has none."""
    if sys.platform != "linux":
        return None
    try:
        if "[never]" in (_SETTINGS / "enabled").read_text():
            return None
        return int((_SETTINGS / "hpage_pmd_size").read_text())
    except (OSError, ValueError):
        return None  # Linux was built without them, or hides its settings
