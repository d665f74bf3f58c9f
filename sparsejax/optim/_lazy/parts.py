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


_OURS = _folder(__file__)
OPTAX = _folder(optax.__file__)
JAX = _folder(jax.__file__), _folder(jaxlib.__file__)
LIBRARIES = OPTAX, _folder(os.path.dirname(_OURS))  # optax, sparsejax.optim

# The names that users know, shown in parentheses.
KNOWN_AS = {
    "scale_by_trust_ratio": "part of lamb, lars and fromage",
    "scale_by_factored_rms": "part of adafactor",
    "clip_by_block_rms": "also part of adafactor",
    "scale_by_param_block_rms": "also part of adafactor",
    "scale_by_muon": "part of muon",
    "scale_by_sm3": "part of sm3",
    "scale_by_dog": "part of dog",
    "scale_by_dowg": "part of dowg",
    "scale_by_lbfgs": "part of lbfgs",
    "add_noise": "part of noisy_sgd",
}


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
        """True if it is one of optax's own."""
        return self.file.startswith(OPTAX)


class Reason(NamedTuple):
    """Why a table cannot be lifted.

    Attributes:
      why: the fault.
      part: name of the part that prevents it.
      can_be_wrong: True if it may also refuse a row-separable transformation.
    """

    why: str
    part: str
    can_be_wrong: bool = True

    def __str__(self) -> str:
        known = KNOWN_AS.get(self.part)
        return f"{self.part}{f' ({known})' if known else ''}: {self.why}"


def innermost(part: tuple[Part, ...], tx: Any = None) -> Part:
    """The last part; the transformation itself if none is known."""
    return part[-1] if part else Part(name_of(tx), "")


def name_of(tx: Any) -> str:
    """The name of a transformation: the function that made it, or its class."""
    update: Any = getattr(tx, "update", None)
    while hasattr(update, "func"):  # functools.partial
        update = update.func
    return _name(getattr(update, "__qualname__", None) or type(tx).__qualname__)


def _name(qualified: str) -> str:
    outer = qualified.split(".<locals>")[0].split(".")
    is_method = len(outer) > 1 and "<locals>" not in qualified
    return outer[-2 if is_method else -1].lstrip("_")


def of_equation(eqn: Any, part: tuple[Part, ...]) -> tuple[Part, ...]:
    """The parts that an equation is in, outermost first.

    Args:
      eqn: an equation, or None.
      part: of the enclosing equation. JAX keeps programs of functions that it traced
        before, whose equations have the frames of that call.
    """
    frames = _compat.frames(eqn) if eqn is not None else []
    found = _among(list(reversed(frames)))
    if not part or found[: len(part)] == part:
        return found
    if part[-1] in found:  # traced before, within other parts
        return part + found[found.index(part[-1]) + 1 :]
    return part


def _among(frames: Sequence[tuple[str, str, int]]) -> tuple[Part, ...]:
    """The parts among frames `(file, qualified name, line)`, outermost first."""
    parts: list[Part] = []
    was_library = True
    ours = [k for k, f in enumerate(frames) if f[0] in _TRACERS]
    for file, qualified, _ in frames[max(ours, default=-1) + 1 :]:
        if file.startswith(JAX) or file == _CALLS_FUNCTIONS:
            continue
        is_library = file.startswith(LIBRARIES)
        last = qualified.split(".")[-1]
        if is_library:
            if "." in qualified and is_update(last):
                parts.append(Part(_name(qualified), file))
        elif was_library:
            parts.append(Part(_name(qualified), file))
        was_library = is_library
    return tuple(parts)


# The functions of a transformation, as optax calls them.
_UPDATE = re.compile(r"(\w+_)?(update|init)(_fn)?(_kwargs|_with_arg|_without_arg)?")


def is_update(name: str) -> bool:
    """Returns True for the name of a function `init` or `update`."""
    return bool(_UPDATE.fullmatch(name))


# Calls functions of the transformation, which are in the part that calls it.
_CALLS_FUNCTIONS = _OURS + "callables.py"
# Frames of the user who called `lazy` come before the frames of these files.
_TRACERS = frozenset(_OURS + name for name in ("judge.py", "state_leaves.py"))


def line_of(eqn: Any, part: tuple[Part, ...], enclosing: str) -> str:
    """`file:line` in the part, of the innermost function that is in its file."""
    frames = [f for f in _compat.frames(eqn) if not f[0].startswith(JAX)]
    own = [f for f in frames if part and f[0] == part[-1].file]
    for file, _, line in own or frames:
        return f"{file.replace(os.sep, '/').split('/site-packages/')[-1]}:{line}"
    return enclosing


def reason(
    why: str, part: tuple[Part, ...], line: str, is_proved: bool = True
) -> Reason:
    """A reason with the line that shows it.

    A refusal can be wrong for a part that is not optax's, and if it is not proved.
    """
    own = innermost(part)
    shown = f" ({line})" if line else ""
    return Reason(why + shown, own.name, not own.is_optax or not is_proved)


def of_error(error: Exception) -> tuple[Part, ...]:
    """The parts that an exception was raised in."""
    frames, tb = [], error.__traceback__
    while tb is not None:
        code = tb.tb_frame.f_code
        frames.append((code.co_filename, code.co_qualname, tb.tb_lineno))
        tb = tb.tb_next
    return _among(frames)
