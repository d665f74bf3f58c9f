"""The demo's settings and its command line."""

import argparse
import dataclasses
import math
from collections.abc import Callable, Sequence

import optax

from sparsejax.demo import _files, _plot
from sparsejax.demo._text import UserError


# Each with the learning rate that suits a loss summed over the batch. It falls to zero
# in the course of the training.
OPTIMIZERS: dict[str, tuple[Callable[..., optax.GradientTransformation], float]] = {
    "sgd": (optax.sgd, 0.025),
    "adagrad": (optax.adagrad, 0.1),
    "rmsprop": (optax.rmsprop, 0.002),
    "adam": (optax.adam, 0.002),
    "adamw": (optax.adamw, 0.002),
    "nadam": (optax.nadam, 0.002),
}


@dataclasses.dataclass(frozen=True)
class Config:
    """The settings, as on the command line."""

    text: str | None = None
    dim: int = 64
    window: int = 5
    negatives: int = 5
    optimizer: str = "adam"
    learning_rate: float | None = None
    epochs: int = 100
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
        """The learning rate to begin with: the one given, or the optimizer's own."""
        return self.learning_rate or OPTIMIZERS[self.optimizer][1]


class _Parser(argparse.ArgumentParser):
    """Reports what is wrong in one line, as everything else here."""

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
    """The command line as a `Config`; a `UserError` where it makes no sense."""
    new = Config()
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
    add("--dim", type=one, default=new.dim, help="length of a vector")
    add("--window", type=one, default=new.window, help="widest, to each side")
    add("--negatives", type=one, default=new.negatives, help="random words a pair")
    add("--optimizer", choices=OPTIMIZERS, default=new.optimizer, help="of optax")
    add(
        "--learning-rate",
        type=_positive,
        default=absent,
        help="at the beginning (default: what suits the optimizer)",
    )
    add("--epochs", type=one, default=new.epochs, help="passes over the text")
    add("--seed", type=_whole(0), default=new.seed, help="equal seeds, equal vectors")
    add("--min-count", type=one, default=new.min_count, help="leave out rarer words")
    add("--max-vocab", type=many, default=new.max_vocab, help="so many words at most")
    add("--batch-size", type=one, default=new.batch_size, help="pairs in a step")
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
    """Finds out before the work what could fail after it."""
    if config.save:
        _files.check_target("--save", config.save, [config.text])
    if config.plot:
        _plot.check(config.plot)
        _files.check_target("--plot", config.plot, [config.text, config.save])
