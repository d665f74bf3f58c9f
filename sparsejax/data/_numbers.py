"""Numbers in a text, many at once: the decimal ones by NumPy, the others by Python."""

import math

import numpy as np


# A mantissa of so many digits is exact in float64, and so is the power of ten that it
# is divided by; their quotient is rounded once, as float() rounds.
MOST_DIGITS = 15
_POWERS = 10.0 ** np.arange(MOST_DIGITS + 1)
_ZERO, _NINE = np.uint8(ord("0")), np.uint8(9)
_DOT, _MINUS, _PLUS = (np.uint8(ord(c)) for c in ".-+")


def parse_float(text: bytes) -> float:
    """`float(text)`, but 1_000 is none, nor 1e999; a ValueError where it is none."""
    if b"_" in text:
        raise ValueError
    number = float(text)
    if math.isinf(number) and any(c in b"0123456789" for c in text):
        raise ValueError
    return number


def parse_int(text: bytes) -> int:
    """`int(text)`, but 1_000 is none; a ValueError where it is no integer."""
    if b"_" in text:
        raise ValueError
    return int(text)


def read_digits(a: np.ndarray, begin: np.ndarray, end: np.ndarray) -> np.ndarray | None:
    """The integers, of digits alone, at `a[begin:end]`; None if one of them is not.

    Args:
      a: uint8, a text.
      begin, end: integers `[n]`, places in it.

    Returns:
      int64 `[n]`.
    """
    size = end - begin
    if len(size) and (size.min() < 1 or size.max() > MOST_DIGITS):
        return None
    out, at = np.zeros(len(size), np.int64), np.arange(len(size))
    for place in range(int(size.max(initial=0))):
        at = at if place == 0 else at[size[at] > place]
        digit = a[begin[at] + place] - _ZERO  # what is less than "0" wraps
        if digit.max(initial=0) > _NINE:
            return None
        out[at] = out[at] * 10 + digit
    return out


def read_floats(
    a: np.ndarray, begin: np.ndarray, end: np.ndarray
) -> tuple[np.ndarray, int | None]:
    """The numbers at `a[begin:end]`, and the first of them that is none.

    Args:
      a: uint8, a text.
      begin, end: integers `[n]`, places in it.

    Returns:
      `(float64 [n], None)`, each as `float` gives it; or the second is the place among
      them of the first that is no number, and the rest is not to be used.
    """
    n = len(begin)
    sign = a[np.minimum(begin, len(a) - 1)] if n else np.zeros(0, np.uint8)
    negative = sign == _MINUS
    start = begin + (negative | (sign == _PLUS))
    size = end - start
    mantissa, scale = np.zeros(n, np.int64), np.zeros(n, np.int64)
    digits, dotted = np.zeros(n, np.int64), np.zeros(n, bool)
    plain = size <= MOST_DIGITS + 1
    at = np.flatnonzero(plain & (size > 0))
    place = 0
    while len(at):
        byte = a[start[at] + place]
        digit = byte - _ZERO
        is_digit = digit <= _NINE
        is_dot = (byte == _DOT) & ~dotted[at]
        plain[at[~is_digit & ~is_dot]] = False
        mantissa[at] = np.where(is_digit, mantissa[at] * 10 + digit, mantissa[at])
        scale[at] += dotted[at] & is_digit
        digits[at] += is_digit
        dotted[at] |= is_dot
        place += 1
        at = at[(size[at] > place) & plain[at]]
    plain &= (digits > 0) & (digits <= MOST_DIGITS)
    out = mantissa / _POWERS[np.minimum(scale, MOST_DIGITS)]
    out = np.where(negative, -out, out)
    for i in np.flatnonzero(~plain).tolist():
        try:
            out[i] = parse_float(a[begin[i] : end[i]].tobytes())
        except ValueError:
            return out, i
    return out, None


def cast(numbers: np.ndarray, dtype: np.dtype) -> tuple[np.ndarray, int | None]:
    """The numbers in a dtype, and the place of the first that it does not hold.

    Floats are rounded, but not to infinity; what an integer dtype does not hold exactly
    it does not hold.

    Args:
      numbers: float64 `[n]`.
      dtype: of numbers.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        out = numbers.astype(dtype)
        if dtype.kind in "iu":
            lost = out.astype(np.float64) != numbers
        else:
            lost = np.isinf(out) & np.isfinite(numbers)
    return out, int(np.argmax(lost)) if lost.any() else None
