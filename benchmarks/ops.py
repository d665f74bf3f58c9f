"""Bags and segment reductions beside what one writes in JAX, and beside PyTorch.

`sj.embedding_bag` of fixed and ragged bags, with uniform and skewed ids, is compared
with a gather and `jax.ops.segment_sum`, and with `EmbeddingBag`; the gradient of the
table is sparse on all sides. Reductions of `[65536, 64]` floats in 4,096 segments are
compared with `jax.ops` and `segment_reduce`. Sides take turns, with other ids in every
run; their results are compared before they are timed.

    python -m benchmarks ops
    python -m benchmarks ops --only segment --check --json ops.jsonl

PyTorch is left out if it is not installed. "Fastest" is the ratio of the fastest runs,
which busy cores disturb less.
"""

import argparse
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import sparsejax as sj
from benchmarks import timing


try:
    import torch  # pyright: ignore[reportMissingImports]
except ImportError:  # not among what the benchmarks install
    torch: Any = None


FIXED_SIZE, LONGEST = 16, 64  # ids of a bag
REDUCTIONS = ("sum", "max", "mean", "logsumexp", "softmax")
# How many times faster than the natural expression a forward pass of bags has to be,
# and how much longer than it a reduction may take.
LEAST, MOST = {"fixed": 4.0, "ragged": 2.0}, 1.05


# ------------------------------------------------------------------ bags


def make_bags(
    layout: str, args: argparse.Namespace, zipf: bool, rng: np.random.Generator
) -> dict[str, Any]:
    """Ids and the bag of each, as each side takes them; ragged bags leave a tail."""
    bags = args.segments
    lengths = rng.integers(1, LONGEST + 1, bags)
    lengths = np.full(bags, FIXED_SIZE) if layout == "fixed" else lengths
    capacity = bags * (FIXED_SIZE if layout == "fixed" else (LONGEST + 1) // 2 + 2)
    segments = np.repeat(np.arange(bags), lengths)[:capacity]
    segments = np.pad(segments, (0, capacity - segments.size), constant_values=bags)
    ids = timing.make_ids(capacity, args.rows, zipf, rng)
    inputs = {"jax": [jnp.asarray(ids), jnp.asarray(segments.astype(np.int32))]}
    if torch is not None:
        offsets = np.searchsorted(segments, np.arange(bags + 1))
        parts = ids[: offsets[-1]], offsets[:-1]
        inputs["torch"] = [torch.from_numpy(x.astype(np.int64)) for x in parts]
    return inputs


def bag_sides(layout: str, combiner: str, bags: int) -> dict[str, Callable]:
    """`(table, ids, segments) -> [bags, D]` of each side."""

    def ours(table, ids, segments):
        if layout == "fixed":
            return sj.embedding_bag(table, ids.reshape(bags, -1), combiner=combiner)
        options: Any = {"combiner": combiner, "indices_are_sorted": True}
        return sj.embedding_bag(table, ids, segments, bags, **options)

    def natural(table, ids, segments):
        return reduce_naturally(combiner, bags, True)(table[ids], segments)

    sides = {"ours": ours, "natural": natural}
    if torch is not None:
        functional: Any = torch.nn.functional.embedding_bag
        sides["torch"] = lambda table, ids, offsets: functional(
            ids, table, offsets, mode=combiner, sparse=True
        )
    return sides


# ------------------------------------------------------------------ segments


def make_segments(
    order: str, args: argparse.Namespace, rng: np.random.Generator
) -> dict[str, Any]:
    """Ids of segments. Each segment has an element, as a softmax needs."""
    ids = rng.integers(0, args.segments, args.elements)
    ids[: args.segments] = np.arange(args.segments)[: args.elements]
    ids = np.sort(ids) if order == "sorted" else rng.permutation(ids)
    inputs: dict[str, Any] = {"jax": [jnp.asarray(ids.astype(np.int32))]}
    if torch is not None:
        inputs["torch"] = [torch.from_numpy(ids)]
    return inputs


def reduce_naturally(reduction: str, segments: int, is_sorted: bool) -> Callable:
    """What one writes with `jax.ops`, `(data, ids) -> reduced`."""
    options = {"num_segments": segments, "indices_are_sorted": is_sorted}
    add_up = functools.partial(jax.ops.segment_sum, **options)
    largest = functools.partial(jax.ops.segment_max, **options)

    def mean(x, ids):
        count = add_up(jnp.ones(ids.shape, x.dtype), ids)
        return add_up(x, ids) / jnp.maximum(count, 1)[:, None]

    def logsumexp(x, ids):
        top = largest(x, ids)
        top = jax.lax.stop_gradient(jnp.where(jnp.isfinite(top), top, 0))
        return jnp.log(add_up(jnp.exp(x - top[ids]), ids)) + top

    def softmax(x, ids):
        e = jnp.exp(x - jax.lax.stop_gradient(largest(x, ids))[ids])
        return e / add_up(e, ids)[ids]

    all_of_them = {"sum": add_up, "max": largest, "mean": mean}
    return (all_of_them | {"logsumexp": logsumexp, "softmax": softmax})[reduction]


def segment_sides(reduction: str, order: str, segments: int) -> dict[str, Callable]:
    """`(data, ids) -> reduced` of each side."""
    is_sorted = order == "sorted"
    ours = getattr(sj, f"segment_{reduction}")
    sides = {
        "ours": lambda x, ids: ours(x, ids, segments, indices_are_sorted=is_sorted),
        "natural": reduce_naturally(reduction, segments, is_sorted),
    }
    # PyTorch composes the others of these.
    if torch is not None and reduction in ("sum", "max", "mean"):
        name = {"sum": "sum", "max": "amax", "mean": "mean"}[reduction]

        def peer(x, ids):
            if is_sorted:
                options = {"lengths": torch.bincount(ids, minlength=segments)}
                return torch.segment_reduce(
                    x, reduction, axis=0, unsafe=True, **options
                )
            out, wide = x.new_zeros(segments, x.shape[1]), ids[:, None].expand_as(x)
            return out.scatter_reduce(0, wide, x, name, include_self=False)

        sides["torch"] = peer
    return sides


# ------------------------------------------------------------------ measuring


def cases(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One record a case."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.standard_normal(shape, dtype=np.float32)
    if args.only in (None, "bag"):
        table = draw(args.rows, args.dim)
        for layout, combiner, skew in itertools.product(
            LEAST, ("sum", "mean"), ("uniform", "zipf")
        ):
            inputs = functools.partial(make_bags, layout, args, skew == "zipf", rng)
            sides = bag_sides(layout, combiner, args.segments)
            case = {"op": "bag", "kind": f"{layout} {combiner}", "ids": skew}
            yield from measure(args, case, sides, table, inputs)
    if args.only in (None, "segment"):
        data = draw(args.elements, args.dim)
        for reduction, order in itertools.product(REDUCTIONS, ("sorted", "unsorted")):
            inputs = functools.partial(make_segments, order, args, rng)
            sides = segment_sides(reduction, order, args.segments)
            case = {"op": "segment", "kind": reduction, "ids": order}
            yield from measure(args, case, sides, data, inputs)


def measure(
    args: argparse.Namespace,
    case: dict[str, Any],
    sides: dict[str, Callable],
    data: np.ndarray,
    inputs: Callable[[], dict[str, Any]],
) -> Iterator[dict[str, Any]]:
    """Times the sides of a case in turns, forward and with the gradient."""
    is_bag = case["op"] == "bag"
    for direction in ("forward", "gradient"):
        programs, compiled, first = {}, {}, inputs()
        for name, call in sides.items():
            if name == "torch":
                programs[name] = torch_program(call, direction, data)
                continue
            loss = lambda x, *ids, call=call: jnp.sum(call(x, *ids) ** 2)
            grad = sj.grad(loss, tables=True) if is_bag else jax.grad(loss)
            run = jax.jit(call if direction == "forward" else grad)
            held = jnp.asarray(data)
            compiled[name] = timing.compile_apart(run, held, *first["jax"])
            programs[name] = functools.partial(_run, compiled[name].run, held)
        results = {name: run((), first)[1] for name, run in programs.items()}
        for name, result in results.items() if direction == "forward" else ():
            np.testing.assert_allclose(
                result,
                results["natural"],
                rtol=1e-4,
                atol=1e-4,
                err_msg=f"{name} {case}",
            )
        times, _ = timing.alternate(
            programs, (), inputs, repeats=args.repeats, seconds=args.seconds
        )
        ms = {name: timing.median_ms(t) for name, t in times.items()}
        fastest = {name: min(t) for name, t in times.items()}
        yield case | {
            "pass": direction,
            "ms": ms,
            "ratio": ms["natural"] / ms["ours"],
            "fastest_ratio": fastest["natural"] / fastest["ours"],
            "spread": timing.spread(times["ours"]),
            "compile_s": {name: c.seconds for name, c in compiled.items()},
            "temp_mb": {name: c.temp_bytes / 1e6 for name, c in compiled.items()},
        }


def _run(run: Callable, data: jax.Array, state: Any, inputs: dict[str, Any]) -> Any:
    return state, run(data, *inputs["jax"])


def torch_program(call: Callable, direction: str, data: np.ndarray) -> Callable:
    """A PyTorch side as `(state, inputs) -> (state, result)`."""
    x = torch.from_numpy(data.copy()).requires_grad_(direction != "forward")

    def run(state, inputs):
        x.grad = None
        out = call(x, *inputs["torch"])
        if direction != "forward":
            (out**2).sum().backward()
        return state, out

    return run


def failures(records: Sequence[dict[str, Any]]) -> list[str]:
    """The claims that do not hold."""
    wrong = []
    for r in records:
        ratio = max(r["ratio"], r["fastest_ratio"])
        least = 1 / MOST
        if r["op"] == "bag":
            layout, combiner = r["kind"].split()
            is_claimed = combiner == "sum" and r["pass"] == "forward"
            least = LEAST[layout] if is_claimed else 0
        if ratio < least:
            wrong.append(
                f"{r['op']} {r['kind']}, {r['ids']} ids, {r['pass']}: {ratio:.2f} "
                f"times the natural expression's speed, {least:.2f} claimed"
            )
    return wrong


def line(r: dict[str, Any]) -> str:
    """One line of the table."""
    ms, temp = r["ms"], r["temp_mb"]
    torch_ms = f"{ms['torch']:8.2f}" if "torch" in ms else f"{'-':>8}"
    return (
        f"{r['op']:8}{r['kind']:12}{r['ids']:9}{r['pass']:9}{ms['ours']:8.2f}"
        f"{ms['natural']:9.2f} {torch_ms} {r['ratio']:7.2f} {r['fastest_ratio']:8.2f}"
        f"{temp['ours']:10.1f} {temp['natural']:7.1f}"
    )


HEADER = (
    f"{'op':8}{'kind':12}{'ids':9}{'pass':9}{'ours':>8}{'natural':>9}{'torch':>9}"
    f"{'ratio':>8}{'fastest':>9}   temporaries (MB)"
)


def options(parser: argparse.ArgumentParser) -> None:
    """Adds the sizes."""
    parser.add_argument("--only", choices=("bag", "segment"))
    parser.add_argument("--rows", type=int, default=1_000_000, help="of the table")
    parser.add_argument("--elements", type=int, default=65_536, help="of the segments")
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--segments", type=int, default=4_096, help="or bags")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; 1 if `--check` is given and a claim does not hold."""
    return timing.run("ops", __doc__, argv, options, cases, line, failures, HEADER)
