"""Memory of the process on a CPU: `keep_freed_pages` can make a step twice as fast.

It acts on the process, so a program calls it and the library never does. On other
systems than Linux it returns False and changes nothing.
"""

from __future__ import annotations

import ctypes
import os
import sys
import warnings

import jax

from sparsejax import _compat


# Parameters of glibc's mallopt(3), by the numbers of malloc.h, and their values.
_MALLOPT = (
    (-8, 1),  # M_ARENA_MAX: the heaps of other arenas end at 64 MiB
    (-4, 0),  # M_MMAP_MAX: M_MMAP_THRESHOLD cannot exceed 32 MiB, so map nothing
    (-1, 2**31 - 1),  # M_TRIM_THRESHOLD: the end of the heap is not given back
)
_MAX_KEPT = 32 << 20  # bytes; glibc keeps smaller buffers by itself
_is_kept = False


def keep_freed_pages() -> bool:
    """Asks glibc to keep freed memory of the process; call it before JAX computes.

    XLA allocates the temporaries of a compiled program as one buffer in each call. By
    default glibc maps a buffer above 32 MiB anew, and Linux clears each of its pages of
    4 KiB when it is first touched: about 1 ms for 4 MB. With this setting the buffer
    is in memory that the last call freed. Steps whose temporaries, or whose dense
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
    global _is_kept
    mallopt = ctypes.CDLL(None).mallopt
    _is_kept = all([mallopt(name, value) == 1 for name, value in _MALLOPT])
    return _is_kept


def _maps_anew(num_bytes: int) -> bool:
    """Returns True if temporaries of `num_bytes` take new pages in each call."""
    is_large = num_bytes > _MAX_KEPT and jax.default_backend() == "cpu"
    return is_large and not _is_kept and _has_glibc_malloc()


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
    """Returns the file that defines a C symbol of the process, or None."""
    process = ctypes.CDLL(None)
    try:
        address = ctypes.cast(getattr(process, symbol), ctypes.c_void_p)
        info = _DlInfo()
        if not process.dladdr(address, ctypes.byref(info)) or not info.file:
            return None
    except AttributeError:  # musl has no gnu_get_libc_version
        return None
    return os.path.realpath(os.fsdecode(info.file))
