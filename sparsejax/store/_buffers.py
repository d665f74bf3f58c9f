"""Memory for rows on their way, used again once nobody has it.

Memory that comes fresh from the system is cleared page by page as it is first written,
which takes as long as gathering the rows into it. JAX takes such arrays on a CPU as
they are, without a copy, so their memory is free when the last array over it has gone,
JAX's included.
"""

import collections
import math
import weakref
from typing import Any

import numpy as np


_ALIGNMENT = 64  # what JAX asks for, to take an array as it is
_LEAST, _MOST = 1 << 16, 1 << 26  # smaller ones are cheap, larger ones too dear to keep
_KEPT = 8  # of each size

_free: dict[int, collections.deque] = {}


def empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """An array with anything in it."""
    dtype = np.dtype(dtype)
    count = math.prod(shape)
    size = count * dtype.itemsize
    if not _LEAST <= size <= _MOST:
        return np.empty(shape, dtype)
    room = 1 << (size + _ALIGNMENT - 1).bit_length()
    # Not under a lock: what gives memory back may run at any time, on any thread.
    free = _free.setdefault(room, collections.deque(maxlen=_KEPT))
    try:
        memory = free.pop()
    except IndexError:
        memory = np.empty(room, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    # Views of it keep this array alive; those of a slice would keep `memory` alone.
    array = np.frombuffer(memory.data, dtype, count, start)
    weakref.finalize(array, free.append, memory).atexit = False
    return array.reshape(shape)
