"""Makes tests/docs/optax_table.md: optax transformations through `sj.optim.lazy`.

    python tests/optax_table.py

The program of each of them says whether it is exact, lazy or refused; the reason and
the alternative are written here. `tests/optim/test_separability.py` makes the page
again and compares, and checks that no transformation of optax is missing.
"""

import inspect
import pathlib
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from optax import contrib

import sparsejax as sj
from optimizers import LR, REFUSED, SCHEDULE, SEPARABLE
from sparsejax.optim._lazy import judge, separability


PAGE = pathlib.Path(__file__).parent / "docs" / "optax_table.md"
SHORT = pathlib.Path(__file__).parent.parent / "docs" / "optimizers.md"

HEAD = """\
# Optax transformations through `lazy`

This page is made by `python tests/optax_table.py` (optax {version}). A test makes it
again and compares.

**exact**: `lazy(tx)` gives the result of `tx` on dense gradients
(`sj.optim.is_lazy_exact`).

**lazy**: `tx` updates the rows of the gradient. The other rows keep what the last
column lists, which dense training would change. TensorFlow's LazyAdam and PyTorch's
SparseAdam are lazy in the same way.

**refused**: `lazy(tx).init(params)` raises an error that names the part
(`sj.optim.is_row_separable`). "Dense leaves only" means
`lazy(optax.partition({{"table": optax.adam(1e-3), "dense": tx}}, labels))`.

The table has default arguments, or the arguments in optax's documentation. Schedules
and counts advance at every step. Momentum or weight decay makes an exact optimizer
lazy.
"""

COLUMNS = """
## {title}

| | through `lazy` | |
|---|---|---|
"""


class Entry(NamedTuple):
    """A transformation, with the reason why it is refused, or a remark."""

    make: object
    note: str = ""


def _of(module, names, *args):
    """Entries for names that take the same arguments."""
    return {
        name: Entry(lambda name=name: getattr(module, name)(*args))
        for name in names.split()
    }


_DENSE_ONLY = "Dense leaves only."
_NOISE = "It adds noise to all rows. Dense leaves only."
_TRUST = (
    "Its step is scaled by norms of the whole table. `sj.optim.partial_rowwise_lamb`."
)
_FACTORED = (
    "Its second moments are sums over all rows. `sj.optim.rowwise_adam` or "
    "`sj.optim.rowwise_adagrad`, which have one number a row."
)
_BLOCK = (
    "It looks at norms of the whole table. `optax.clip_by_global_norm`, `optax.clip`."
)
_DISTANCE = f"Its step size is made of sums over all rows. {_DENSE_ONLY}"
_MOMENTUM = f"Its step is made of the momentum of all rows. {_DENSE_ONLY}"
_SEARCH = f"It evaluates the loss along a direction for all rows. {_DENSE_ONLY}"
_BACK = (
    "It holds gradients back for rows that are not read again. "
    "`sj.optim.accumulate(lazy(tx), k, capacity)`."
)
_HESSIAN = f"It differentiates the loss by all weights once more. {_DENSE_ONLY}"
_SLOW = f"It pulls all rows towards a second set of weights. {_DENSE_ONLY}"
_HISTORY = f"It keeps inner products over all rows. {_DENSE_ONLY}"
_MATRIX = f"It factors the whole table as a matrix. {_DENSE_ONLY}"


def _refused(module, notes):
    """Entries of refused transformations; `tests/optimizers.py` has most of them."""
    return {
        name: Entry(
            REFUSED[name][0] if name in REFUSED else getattr(module, name), note
        )
        for name, note in notes.items()
    }


ALIASES = {
    **{
        name: Entry(SEPARABLE[name])
        for name in (
            "sgd adam adamw amsgrad adamax adamaxw nadam nadamw radam adagrad rmsprop "
            "adadelta yogi adabelief lion novograd sign_sgd signum rprop adan"
        ).split()
    },
    **_of(optax, "optimistic_gradient_descent optimistic_adam optimistic_adam_v2", LR),
    "polyak_sgd": Entry(optax.polyak_sgd),
    **_refused(
        optax,
        {
            "lamb": _TRUST,
            "lars": _TRUST,
            "fromage": _TRUST,
            "adafactor": _FACTORED,
            "sm3": _FACTORED,
            "noisy_sgd": _NOISE,
            "lbfgs": _HISTORY,
            "lookahead": _SLOW,
        },
    ),
}

TRANSFORMS = {
    "add_decayed_weights": Entry(
        lambda: optax.add_decayed_weights(0.1),
        "`sj.optim.weight_decay` makes up for the steps that a row missed.",
    ),
    **_of(optax, "centralize identity set_to_zero zero_nans normalize_by_update_norm"),
    **_of(optax, "clip clip_by_global_norm scale scale_by_learning_rate", 0.5),
    **_of(optax, "ema trace", 0.9),
    **_of(optax, "keep_params_nonnegative"),
    **_of(
        optax,
        "scale_by_adadelta scale_by_adam scale_by_adamax scale_by_adan "
        "scale_by_amsgrad scale_by_belief scale_by_lion scale_by_novograd "
        "scale_by_optimistic_gradient scale_by_polyak scale_by_radam scale_by_rms "
        "scale_by_rss scale_by_sign scale_by_stddev scale_by_yogi",
    ),
    **_of(optax, "scale_by_rprop", LR),
    **_of(optax, "scale_by_schedule", SCHEDULE),
    **_refused(
        optax,
        {
            "adaptive_grad_clip": _BLOCK,
            "clip_by_block_rms": _BLOCK,
            "scale_by_param_block_norm": _BLOCK,
            "scale_by_param_block_rms": _BLOCK,
            "scale_by_trust_ratio": _TRUST,
            "scale_by_factored_rms": _FACTORED,
            "scale_by_sm3": _FACTORED,
            "scale_by_distance_over_gradients": _DISTANCE,
            "add_noise": _NOISE,
            "apply_every": _BACK,
            "scale_by_lbfgs": _HISTORY,
        },
    ),
    "scale_by_backtracking_linesearch": Entry(
        lambda: optax.scale_by_backtracking_linesearch(10), _SEARCH
    ),
    "scale_by_zoom_linesearch": Entry(
        lambda: optax.scale_by_zoom_linesearch(10), _SEARCH
    ),
}


def _always(step, **extra_args):
    del step, extra_args
    return True


# A wrapper is as the transformation that it holds: each is tried around momentum.
WRAPPERS = {
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 3),
    "chain": lambda tx: optax.chain(optax.clip(1.0), tx),
    "conditionally_mask": lambda tx: optax.conditionally_mask(tx, _always),
    "conditionally_transform": lambda tx: optax.conditionally_transform(tx, _always),
    "inject_hyperparams": lambda tx: optax.inject_hyperparams(
        lambda learning_rate: optax.chain(tx, optax.scale(learning_rate))
    )(SCHEDULE),
    "inject_stateful_hyperparams": lambda tx: optax.inject_stateful_hyperparams(
        lambda learning_rate: optax.chain(tx, optax.scale(learning_rate))
    )(LR),
    "masked": lambda tx: optax.masked(tx, True),
    "multi_transform": lambda tx: optax.multi_transform({"all": tx}, "all"),
    "named_chain": lambda tx: optax.named_chain(("tx", tx)),
    "partition": lambda tx: optax.partition({"all": tx}, "all"),
    "selective_transform": lambda tx: optax.selective_transform(tx, freeze_mask=False),
    "with_extra_args_support": optax.with_extra_args_support,
    "contrib.split_real_and_imaginary": contrib.split_real_and_imaginary,
}

OTHERS = {
    "MultiSteps": Entry(lambda: optax.MultiSteps(optax.sgd(LR), 4), _BACK),
    "flatten": Entry(
        REFUSED["flatten"][0], "It makes one vector of all leaves: leave it out."
    ),
    "freeze": Entry(lambda: optax.freeze(True)),
    "monitor": Entry(
        lambda: optax.monitor({"norm": optax.tree.norm}),
        "Its first update changes the structure of its state. `optax.snapshot`.",
    ),
    "snapshot": Entry(
        lambda: optax.snapshot("norm", optax.tree.norm), "It measures the rows read."
    ),
    "stateless": Entry(lambda: optax.stateless(lambda g, p: g), "If the function is."),
    "stateless_with_tree_map": Entry(
        lambda: optax.stateless_with_tree_map(lambda g, p: g), "If the function is."
    ),
}

CONTRIB = {
    **{name: Entry(SEPARABLE[name]) for name in ("ademamix", "adopt", "madgrad")},
    **_of(contrib, "acprop cocob simplified_ademamix", LR),
    "sam": Entry(
        lambda: contrib.sam(optax.sgd(LR), optax.sgd(LR)),
        "Both of its steps must read the same rows.",
    ),
    "schedule_free": Entry(lambda: contrib.schedule_free(optax.sgd(LR), LR, 0.9)),
    **_of(contrib, "schedule_free_adamw schedule_free_sgd", LR),
    **_of(contrib, "normalize reduce_on_plateau"),
    **_of(
        contrib,
        "scale_by_acprop scale_by_ademamix scale_by_adopt scale_by_cocob "
        "scale_by_simplified_ademamix",
    ),
    **_of(contrib, "scale_by_madgrad", LR),
    **_refused(
        contrib,
        {
            "dadapt_adamw": _DISTANCE,
            "dog": _DISTANCE,
            "dowg": _DISTANCE,
            "prodigy": _DISTANCE,
            "mechanize": _DISTANCE,
            "momo": _MOMENTUM,
            "momo_adam": _MOMENTUM,
            "muon": _MOMENTUM,
            "scale_by_muon": _MOMENTUM,
            "hutchinson_estimator_diag_hessian": _HESSIAN,
            "sophia": _HESSIAN,
            "galore": _MATRIX,
            "scale_by_galore": _MATRIX,
        },
    ),
    "dpsgd": Entry(lambda: contrib.dpsgd(LR, 1.0, 0.1, 0), _NOISE),
    "differentially_private_aggregate": Entry(
        lambda: contrib.differentially_private_aggregate(1.0, 0.1, 0), _NOISE
    ),
}

OURS = {
    **_of(
        sj.optim,
        "adagrad rowwise_adagrad group_adagrad rowwise_adam row_count_adam",
        LR,
    ),
    **_of(sj.optim, "partial_rowwise_lamb", LR),
    "ftrl": Entry(
        lambda: sj.optim.ftrl(LR),
        "Exact for rows that start at zero, as it means them to.",
    ),
    "ema": Entry(
        lambda: sj.optim.ema(0.9),
        "`ema_params` adds the steps that rows missed: it is exact.",
    ),
    "weight_decay": Entry(
        lambda: sj.optim.weight_decay(0.1),
        "A row that is read again gets the decay it missed.",
    ),
}

# (title, module, how the page writes it, entries)
SECTIONS = (
    ("Optimizers", optax, "optax", ALIASES),
    ("Transformations", optax, "optax", TRANSFORMS),
    ("Wrappers and measurements", optax, "optax", OTHERS),
    ("`optax.contrib`", contrib, "optax.contrib", CONTRIB),
    ("`sparsejax.optim`", sj.optim, "sj.optim", OURS),
)

# A measure for `optax.monitor`: it does not transform gradients by itself.
NOT_ONE = {"optax.measure_with_ema"}


WEIGHTS = judge.WEIGHTS
ONE_TABLE = jax.tree.structure(0), (jax.ShapeDtypeStruct((160, 130), jnp.float32),)


def verdict(tx):
    """`(exact, lazy or refused, what moves without a gradient)`."""
    found = separability.moved(tx, *ONE_TABLE)
    if not found:
        return "refused", []
    (moved,) = found.values()
    return ("lazy" if moved else "exact"), moved


def rows(sections=SECTIONS):
    """The table's rows by the names in them, for the installed optax."""
    table = {}
    for _, module, prefix, entries in sections:
        for name, entry in entries.items():
            if hasattr(module, name):
                found, moved = verdict(entry.make())
                fields = dict.fromkeys(re.sub(r".*\W", "", path) for path in moved)
                fields.pop(WEIGHTS, None)
                what = ["weights"] if WEIGHTS in moved else []
                what += [f"`{field}`" for field in fields]
                note = ", ".join(what) + ("." if what else "")
                text = " ".join(filter(None, [note, entry.note]))
                table[f"{prefix}.{name}"] = f"**{found}** | {text}"
    for name, wrap in WRAPPERS.items() if SECTIONS[2] in sections else ():
        if has(name):
            _, moved = verdict(wrap(optax.trace(0.9)))
            by_parts = [path.split(".")[-1] for path in moved] == ["weights", "trace"]
            table[f"optax.{name}"] = f"{'as what it holds' if by_parts else moved} |"
    return table


def has(name):
    """Return True if the installed optax has `name`, which may be `contrib.name`."""
    module, _, last = name.rpartition(".")
    return hasattr(contrib if module else optax, last)


def page(table):
    """The page as text."""
    text = HEAD.format(version=optax.__version__)
    for title, _, prefix, entries in SECTIONS:
        names = [f"{prefix}.{name}" for name in entries]
        if entries is OTHERS:
            names = [*(f"optax.{name}" for name in WRAPPERS), *names]
        text += COLUMNS.format(title=title)
        for name in names:
            if name in table:
                text += f"| `{name}` | {table[name]} |\n".replace("|  |", "| |")
    return text


def makers():
    """Names whose annotated result in optax is a transformation."""
    for module, prefix in ((optax, "optax"), (contrib, "optax.contrib")):
        for name, function in vars(module).items():
            if inspect.isfunction(function) and not name.startswith("_"):
                result = str(inspect.signature(function)).rpartition("->")[2]
                if "GradientTransformation" in result:
                    yield f"{prefix}.{name}"


if __name__ == "__main__":
    PAGE.write_text(page(rows()))
