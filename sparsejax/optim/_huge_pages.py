"""huge_pages: asks Linux for pages of 2 MB under large arrays on a CPU.

A batch reads rows all over a table. With pages of 4 KiB each row is in a page of its
own, and the processor looks up the address of each page: a table of 2.5 GB has 600,000
of them, a few thousand fit into the processor's cache of addresses. NumPy asks for
pages of 2 MB for its own arrays; XLA does not.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from sparsejax import _arguments
from sparsejax._arguments import PyTree


_SETTINGS = pathlib.Path("/sys/kernel/mm/transparent_hugepage")
_MADV_COLLAPSE = 25  # Linux 6.1; the module `mmap` does not have it
# glibc maps arrays of 32 MiB and more by themselves, so nothing else is in their pages.
_LEAST_BYTES = 32 << 20
# Linux is asked for so much at once, and for no more where it has no huge pages left:
# it would look for each further one in vain.
_PIECE_BYTES = 64 << 20


def huge_pages(tree: PyTree) -> int:
    """Puts large arrays on a CPU into pages of 2 MB, where they are.

    Values, addresses and the memory in use stay as they are. A step that updates
    donated arrays in place keeps their pages. `lazy(tx).init` and `exact(tx).init`,
    called outside of `jit`, do this for parameters and state. Call it for other arrays:
    those of a checkpoint or of a jitted `init`, and tables that are only read.

    It returns 0, and moves nothing, on other systems than Linux, where Linux is older
    than 6.1, where /sys/kernel/mm/transparent_hugepage/enabled says `never`, and with
    `SPARSEJAX_HUGE_PAGES=0` in the environment. It waits for the arrays to be computed,
    and then Linux copies them once, 0.2 to 0.3 s a GB.

    Args:
      tree: a pytree. Each `jax.Array` of 32 MiB or more on a CPU is treated, but no
        keys of `jax.random`; all other leaves are ignored.

    Returns:
      `int`: the bytes of these arrays that are in huge pages now, at least.

    Example:
      >>> import jax.numpy as jnp, sparsejax as sj
      >>> params = {"table": jnp.ones((100, 8)), "bias": jnp.zeros(8)}
      >>> sj.optim.huge_pages(params)  # too small to need it
      0

    References:
      Linux, "Transparent Hugepage Support" and `madvise(2)`; NumPy,
      `NUMPY_MADVISE_HUGEPAGE`.
    """
    size = _page_bytes()
    if size is None or os.environ.get("SPARSEJAX_HUGE_PAGES", "1") == "0":
        return 0
    buffers = {x for leaf in jax.tree.leaves(tree) for x in _large_buffers(leaf)}
    return sum(_collapse(*x, size) for x in sorted(buffers))


def _large_buffers(leaf: Any) -> Iterator[tuple[int, int]]:
    """Address and bytes of the large buffers on CPUs of a leaf."""
    if not _arguments.is_concrete(leaf) or not isinstance(leaf, jax.Array):
        return
    if leaf.is_deleted() or jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        return
    for shard in leaf.addressable_shards:
        data = shard.data
        if shard.device.platform == "cpu" and data.nbytes >= _LEAST_BYTES:
            data.block_until_ready()  # before it is written it has no pages
            yield data.unsafe_buffer_pointer(), data.nbytes


def _collapse(address: int, count: int, size: int) -> int:
    """Puts whole pages of `count` bytes into huge ones; how many bytes that are."""
    begin, end = -(-address // size) * size, (address + count) // size * size
    if begin >= end or _madvise(begin, end - begin, mmap.MADV_HUGEPAGE):
        return 0
    done = 0
    for at in range(begin, end, _PIECE_BYTES):
        piece = min(_PIECE_BYTES, end - at)
        error = _madvise(at, piece, _MADV_COLLAPSE)
        if not error:
            done += piece
        elif error != errno.EAGAIN:  # which is of one page, in use for a moment
            break
    return done


def _madvise(address: int, count: int, advice: int) -> int:
    """The system's `madvise`; 0, or what went wrong."""
    failed = _libc().madvise(
        ctypes.c_void_p(address), ctypes.c_size_t(count), ctypes.c_int(advice)
    )
    return ctypes.get_errno() if failed else 0


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


@functools.cache
def _page_bytes() -> int | None:
    """The size of a huge page; None where there are none."""
    if sys.platform != "linux":
        return None
    try:
        if "[never]" in (_SETTINGS / "enabled").read_text():
            return None
        return int((_SETTINGS / "hpage_pmd_size").read_text())
    except (OSError, ValueError):
        return None  # a Linux that was built without them, or hides its settings
