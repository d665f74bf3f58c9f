"""The demo's settings, its command line, and what is checked before the work."""

import argparse
import dataclasses
import importlib.util
import math
import os
import stat
from collections.abc import Callable, Sequence

import optax

from sparsejax.optim import adagrad


class UserError(Exception):
    """A mistake that the user can correct; the one-line message says how."""


# With the initial learning rate of each, for a loss summed over the batch. The rate
# decays to zero during training.
OPTIMIZERS: dict[str, tuple[Callable[..., optax.GradientTransformation], float]] = {
    "sgd": (optax.sgd, 0.025),
    "adagrad": (adagrad, 0.1),
    "rmsprop": (optax.rmsprop, 0.002),
    "adam": (optax.adam, 0.002),
    "adamw": (optax.adamw, 0.002),
    "nadam": (optax.nadam, 0.002),
}


_SECONDS = 60.0  # of training, if nothing is asked for
_EPOCHS = 100  # more do not make vectors of a short text better


@dataclasses.dataclass(frozen=True)
class Config:
    """The settings, as on the command line."""

    text: str | None = None
    dim: int = 64
    window: int = 5
    negatives: int = 5
    optimizer: str = "adam"
    learning_rate: float | None = None
    seconds: float | None = None
    epochs: int | None = None
    seed: int = 0
    min_count: int = 5
    max_vocab: int = 1_000_000
    batch_size: int = 1024
    save: str | None = None
    plot: str | None = None
    big: bool = False
    quiet: bool = False
    timing: bool = True

    @property
    def rate(self) -> float:
        """The initial learning rate; the default depends on the optimizer."""
        return self.learning_rate or OPTIMIZERS[self.optimizer][1]

    @property
    def limits(self) -> tuple[float, int]:
        """The most seconds and the most epochs that training takes."""
        default = _SECONDS if self.epochs is None else math.inf
        return self.seconds or default, self.epochs or _EPOCHS


class _Parser(argparse.ArgumentParser):
    """Reports a mistake as a `UserError`."""

    def error(self, message: str):
        raise UserError(f"{message}: see --help for the options")


def _whole(lowest: int) -> Callable[[str], int]:
    def convert(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = lowest - 1
        if not lowest <= value < 2**31:
            raise argparse.ArgumentTypeError(
                f"takes a whole number from {lowest} to {2**31 - 1}, not {text!r}"
            )
        return value

    return convert


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"takes a positive number, not {text!r}")
    return value


def parse(argv: Sequence[str] | None) -> Config:
    """The command line as a `Config`, or a `UserError`."""
    default = Config()
    parser = _Parser(
        prog="python -m sparsejax.demo",
        description="Trains word vectors (skip-gram with negative sampling) on a text.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    one, many, absent = _whole(1), _whole(2), argparse.SUPPRESS
    add(
        "--text",
        metavar="FILE",
        default=absent,
        help="UTF-8, plain or .gz (default: Python's own help texts)",
    )
    add("--dim", type=one, default=default.dim, help="length of a vector")
    add(
        "--window",
        type=one,
        default=default.window,
        help="largest distance of a neighbour",
    )
    add(
        "--negatives", type=one, default=default.negatives, help="random words per pair"
    )
    add("--optimizer", choices=OPTIMIZERS, default=default.optimizer, help="of optax")
    add(
        "--learning-rate",
        type=_positive,
        default=absent,
        help="to begin with (default: one for each optimizer)",
    )
    add(
        "--seconds",
        type=_positive,
        default=absent,
        help=f"of training (default: {_SECONDS:g}; no limit if --epochs is given)",
    )
    add(
        "--epochs",
        type=one,
        default=absent,
        help=f"passes over the text (default: what --seconds allows, up to {_EPOCHS})",
    )
    add(
        "--seed",
        type=_whole(0),
        default=default.seed,
        help="equal seeds and --epochs, equal vectors",
    )
    add(
        "--min-count", type=one, default=default.min_count, help="leave out rarer words"
    )
    add("--max-vocab", type=many, default=default.max_vocab, help="most words to keep")
    add("--batch-size", type=one, default=default.batch_size, help="pairs in a step")
    add("--save", metavar="FILE.npz", default=absent, help="write words and vectors")
    add("--plot", metavar="FILE.png", default=absent, help="draw loss and words")
    for name, action, help in (
        ("big", "store_true", "time tables of 10,000,000 rows too"),
        ("quiet", "store_true", "no progress bar"),
        ("no-timing", "store_false", "leave out the timing table"),
    ):
        field = name.removeprefix("no-")
        add(f"--{name}", dest=field, action=action, default=absent, help=help)
    return Config(**vars(parser.parse_args(argv)))


def check(config: Config) -> None:
    """Raises a `UserError` before training for anything that would fail after it."""
    if config.save:
        _check_target("--save", config.save, [config.text])
    if config.plot:
        if importlib.util.find_spec("matplotlib") is None:
            raise UserError(
                "--plot needs matplotlib, which is not installed: pip install "
                "'sparsejax[demo]', or leave --plot out"
            )
        formats = ".png", ".pdf", ".svg"
        if not config.plot.lower().endswith(formats):
            raise UserError(
                f"--plot {config.plot} must end in one of {', '.join(formats)}"
            )
        _check_target("--plot", config.plot, [config.text, config.save])


def _check_target(option: str, path: str, inputs: Sequence[str | None]) -> None:
    """Raises a `UserError` unless a file can be written at `path`; writes nothing.

    Args:
      option: of the command line, for messages.
      path: of the file.
      inputs: files that must not be replaced.
    """
    remedy = f"name another file with {option}"
    try:
        if os.path.exists(path):
            # Only a file may be replaced: not a folder, not /dev/null.
            if not stat.S_ISREG(os.stat(path).st_mode):
                raise UserError(f"{path} is there and not a regular file: {remedy}")
            if not os.access(path, os.W_OK):
                raise UserError(f"{path} may not be written to: {remedy}")
        target = os.path.realpath(path)
        if any(other and os.path.realpath(other) == target for other in inputs):
            raise UserError(f"{path} is named for two things: {remedy}")
        folder, name = os.path.split(target)  # where a link points to
        if not name or path.endswith(os.sep):
            raise OSError(0, "it is not the name of a file")
        temporary = os.path.join(folder, f".{name}.{os.getpid()}.tmp")
        with open(temporary, "xb"):
            pass
        os.unlink(temporary)
    except (OSError, ValueError) as e:
        reason = getattr(e, "strerror", None) or e
        raise UserError(f"cannot write {path} ({reason}): {remedy}") from None
