"""Hashes of 64 bits of integers and words, in NumPy, the same in every process."""

import numpy as np


def mix(x: np.ndarray) -> np.ndarray:
    """Mixes the bits as MurmurHash3 does: each bit of the result depends on each of x.

    Args:
      x: uint64, of any shape.
    """
    x = (x ^ (x >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    x = (x ^ (x >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    return x ^ (x >> np.uint64(33))


def hash_words(text: np.ndarray, lengths: np.ndarray, salt: int) -> np.ndarray:
    """Hashes each word: FNV-1a of its bytes, mixed.

    Args:
      text: uint8 `[n, L]`, the bytes of each word, padded.
      lengths: integers `[n]`, the number of bytes of each word.
      salt: int; another salt gives other hashes.

    Returns:
      uint64 `[n]`.
    """
    # FNV-1a: exclusive or with a byte, then times a prime, modulo 2^64.
    state = np.full(len(lengths), 0xCBF29CE484222325 ^ salt, np.uint64)
    shortest = int(lengths.min(initial=0))
    for place in range(text.shape[1]):
        step = (state ^ text[:, place]) * np.uint64(0x100000001B3)
        is_in_all = place < shortest
        state = step if is_in_all else np.where(place < lengths, step, state)
    return mix(state)
