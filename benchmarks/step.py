"""A whole training step with an embedding table: ours, dense optax and PyTorch.

The step is lookup, loss, gradient and update of a small click model, jitted, with
parameters and optimizer state donated and other ids in every run. Ours and optax's
differ in two words (`sj.value_and_grad`, `sj.optim.lazy`). All sides take turns in one
process; PyTorch owns its table and state.

    python -m benchmarks step
    python -m benchmarks step --check --json steps.jsonl

PyTorch is left out where it is not installed. `--check` asserts how many times as long
as ours its steps take.
"""

import argparse
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import sparsejax as sj
from benchmarks import timing


try:
    import torch  # pyright: ignore[reportMissingImports]
except ImportError:  # not among what the benchmarks install
    torch: Any = None


RATE = 1e-3
OPTIMIZERS = {
    "sgd": optax.sgd(RATE),
    "adagrad": optax.adagrad(RATE),
    "adam": optax.adam(RATE),
    "adamw": optax.adamw(RATE),
}
# The optimizers of PyTorch for the table and for the dense weights.
TORCH = {
    "sgd": ("SGD", "SGD"),
    "adagrad": ("Adagrad", "Adagrad"),
    "adam": ("SparseAdam", "Adam"),
}
# How many times as long as ours PyTorch takes at least.
CLAIMS = {"sgd": 1.2, "adagrad": 2.0, "adam": 1.5}


class Case(NamedTuple):
    """One measurement: which optimizer, on how large a table, with how many ids."""

    optimizer: str
    rows: int
    ids: int
    dim: int
    skew: str = "uniform"


def loss_fn(params: Any, batch: Any) -> jax.Array:
    """Logistic loss of a linear model on one embedding an example."""
    ids, clicked = batch
    logits = sj.lookup(params["table"], ids, mode="clip") @ params["weights"]
    return jnp.mean(optax.sigmoid_binary_cross_entropy(logits, clicked))


def make_step(value_and_grad: Callable, tx: optax.GradientTransformation) -> Any:
    """`(state, batch) -> (state, loss)`, jitted, the state donated."""

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, batch):
        params, opt_state = state
        loss, grads = value_and_grad(loss_fn)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    return step


@functools.partial(jax.jit, static_argnums=(0, 1))
def make_state(case: Case, tx: optax.GradientTransformation) -> Any:
    """Parameters and optimizer state."""
    params = {
        "table": jnp.full((case.rows, case.dim), 0.01, jnp.float32),
        "weights": jnp.linspace(-1.0, 1.0, case.dim, dtype=jnp.float32),
    }
    return params, tx.init(params)


def make_batch(case: Case, rng: np.random.Generator) -> Any:
    """Ids, uniform or skewed as in real data, and labels."""
    ids = timing.make_ids(case.ids, case.rows, case.skew == "zipf", rng)
    clicked = rng.integers(0, 2, case.ids)
    return jnp.asarray(ids), jnp.asarray(clicked.astype(np.float32))


def for_both(batch: Sequence[jax.Array]) -> dict[str, Any]:
    """A batch for JAX and for PyTorch, whose ids have 64 bits."""
    if torch is None:
        return {"jax": batch}
    arrays = [np.array(x, np.int64 if x.dtype == np.int32 else None) for x in batch]
    return {"jax": batch, "torch": [torch.from_numpy(x) for x in arrays]}


def torch_step(case: Case, params: Any) -> Callable:
    """`(state, batches) -> (state, ())` by PyTorch with sparse gradients."""
    torch.set_num_threads(timing.machine()["cores"])
    table, weights = (
        torch.nn.Parameter(torch.from_numpy(np.array(params[name])))
        for name in ("table", "weights")
    )
    optimizers = [
        getattr(torch.optim, name)([x], lr=RATE)
        for name, x in zip(TORCH[case.optimizer], (table, weights))
    ]
    functional = torch.nn.functional

    def run(state, batches):
        ids, clicked = batches["torch"]
        table.grad = weights.grad = None
        rows = functional.embedding(ids, table, sparse=True)
        functional.binary_cross_entropy_with_logits(rows @ weights, clicked).backward()
        for optimizer in optimizers:
            optimizer.step()
        return state, ()

    return run


def measure(case: Case, args: argparse.Namespace, peer: bool) -> dict[str, Any]:
    """Times a case, the sides taking turns: one record.

    Args:
      case: the sizes.
      args: of the command line.
      peer: whether PyTorch takes part.
    """
    tx, rng = OPTIMIZERS[case.optimizer], np.random.default_rng(0)
    # `--sparse` shows where dense and sparse steps really cross.
    tables = {"table": True, "weights": None} if getattr(args, "sparse", 0) else None
    sparse = functools.partial(sj.value_and_grad, tables=tables)
    steps = {
        "ours": make_step(sparse, sj.optim.lazy(tx)),
        "dense": make_step(jax.value_and_grad, tx),
    }
    state, batch = make_state(case, tx), make_batch(case, rng)
    compiled = {
        name: timing.compile_apart(step, state, batch) for name, step in steps.items()
    }
    programs: dict[str, Callable] = {
        name: lambda state, batches, run=x.run: run(state, batches["jax"])
        for name, x in compiled.items()
    }
    if peer and torch is not None and case.optimizer in TORCH:
        programs["torch"] = torch_step(case, state[0])
    inputs = lambda: for_both(make_batch(case, rng))
    record = timing.compare(args, programs, state, inputs, compiled=compiled)
    return case._asdict() | record


def cases(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A record for each case."""
    skews = "uniform", "zipf"
    for ids, name, skew in itertools.product(args.ids, args.optimizers, skews):
        case = Case(name, args.rows, ids, args.dim, skew)
        yield measure(case, args, peer=True)


def failures(records: Sequence[dict[str, Any]]) -> list[str]:
    """The claims that do not hold, where they were measured."""
    return [
        f"{r['optimizer']}, {r['ids']:,} {r['skew']} ids: PyTorch takes "
        f"{r['ratio']['torch']:.2f} times as long, claimed {CLAIMS[r['optimizer']]}"
        for r in records
        if r["ratio"].get("torch", float("inf")) < CLAIMS.get(r["optimizer"], 0)
    ]


def options(parser: argparse.ArgumentParser) -> None:
    """Adds the sizes."""
    names = [*OPTIMIZERS]
    parser.add_argument("--optimizers", nargs="+", default=[*TORCH], choices=names)
    parser.add_argument("--rows", type=int, default=1_000_000, help="of the table")
    parser.add_argument("--dim", type=int, default=64, help="columns of the table")
    parser.add_argument("--ids", nargs="+", type=int, default=(65_536, 8_192))
    parser.add_argument("--sparse", action="store_true", help="above half of the rows")
