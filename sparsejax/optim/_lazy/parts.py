"""Names the part of a transformation that an equation or an error comes from.

optax builds transformations from closures, so the parts of a chain cannot be read out.
But the frames of an equation's traceback show them: each part is a function `update` or
`update_fn` that another one called, and its qualified name starts with the function
that made it, as in `scale_by_trust_ratio.<locals>.update_fn`.
"""

import os
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jaxlib
import optax

from sparsejax import _compat


def _folder(file: str | None) -> str:
    return os.path.join(os.path.dirname(file or ""), "")


_OPTAX, _OPTIM = _folder(optax.__file__), _folder(os.path.dirname(__file__))
_JAX = _folder(jax.__file__), _folder(jaxlib.__file__)
# Frames of the user who called `lazy` come before the frames of these files.
_TRACERS = tuple(_folder(__file__) + f"{n}.py" for n in ("judge", "state_leaves"))
# The functions of a transformation, as optax calls them.
_UPDATE = re.compile(r"(\w+_)?(update|init)(_fn)?(_kwargs|_with_arg|_without_arg)?")


class Part(NamedTuple):
    """A transformation inside another, or the outermost one.

    Attributes:
      name: of the function that made it.
      file: where its functions are.
    """

    name: str
    file: str

    @property
    def is_optax(self) -> bool:
        return self.file.startswith(_OPTAX)


def of_transformation(tx: Any) -> Part:
    """Returns `tx` itself as a part."""
    update: Any = getattr(tx, "update", None)
    while hasattr(update, "func"):  # functools.partial
        update = update.func
    name = getattr(update, "__qualname__", None) or type(tx).__qualname__
    return Part(_maker(name), "")


def of_equation(path: Sequence[Any]) -> tuple[tuple[Part, ...], str]:
    """Returns the parts that an equation is in, outermost first, and its `file:line`.

    Args:
      path: the equation, after the equations that call its program.
    """
    frames: list[tuple[str, str, int]] = []
    is_whole = False
    for k, eqn in enumerate(path):
        stack = [f for f in _compat.frames(eqn) if not f[0].startswith(_JAX)]
        ends = [n for n, frame in enumerate(stack) if frame[0] in _TRACERS]
        inner = stack[: ends[0]] if ends else stack
        if k == 0:
            # Up to jax 0.7 the stack of each equation is whole, with its callers.
            frames, is_whole = inner, bool(ends) and ends[0] + 1 < len(stack)
        elif not is_whole:
            frames = inner + frames
        # JAX reuses a program that it traced before, with the frames of that call.
        elif inner[len(inner) - len(frames) :] == frames:
            frames = inner
    parts = _among(frames)
    part_frames = [frame for frame in frames if parts and frame[0] == parts[-1].file]
    for file, _, line in part_frames or frames:
        shown = file.replace(os.sep, "/").split("/site-packages/")[-1]
        return parts, f"{shown}:{line}"
    return parts, ""


def of_error(error: BaseException) -> tuple[Part, ...]:
    """Returns the parts that an exception was raised in, outermost first."""
    frames, tb = [], error.__traceback__
    while tb is not None:
        code = tb.tb_frame.f_code
        frames.append((code.co_filename, code.co_qualname, tb.tb_lineno))
        tb = tb.tb_next
    outer = max((n for n, f in enumerate(frames) if f[0] in _TRACERS), default=-1)
    inner = [f for f in frames[outer + 1 :] if not f[0].startswith(_JAX)]
    return _among(inner[::-1])


def _among(frames: Sequence[tuple[str, str, int]]) -> tuple[Part, ...]:
    """Returns the parts among frames `(file, qualified name, line)`."""
    parts, in_library = [], True
    for file, name, _ in reversed(frames):
        was_library, in_library = in_library, file.startswith((_OPTAX, _OPTIM))
        is_update = "." in name and _UPDATE.fullmatch(name.split(".")[-1])
        if is_update if in_library else was_library:
            parts.append(Part(_maker(name), file))
    return tuple(parts)


def _maker(qualified: str) -> str:
    """Returns the function, or the class of the method, that a name starts with."""
    outer = qualified.split(".<locals>")[0].split(".")
    is_method = len(outer) > 1 and "<locals>" not in qualified
    return outer[-2 if is_method else -1].lstrip("_")
