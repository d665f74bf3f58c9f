"""Bags and segment reductions beside what one writes in JAX, and beside PyTorch.

`sj.embedding_bag` of fixed and ragged bags, with uniform and skewed ids, is compared
with a gather and `jax.ops.segment_sum`, and with `EmbeddingBag`; the gradient of the
table is sparse on all sides. Reductions of `[65536, 64]` floats in 4,096 segments are
compared with `jax.ops` and `segment_reduce`. Sides take turns, with other ids in every
run; their results are compared before they are timed.

    python -m benchmarks ops
    python -m benchmarks ops --only segment --check --json ops.jsonl

PyTorch is left out if it is not installed. A claim fails if the medians and the fastest
runs, which busy cores disturb less, both break it.
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
from benchmarks.step import for_both, torch


FIXED_SIZE, LONGEST = 16, 64  # ids of a bag
REDUCTIONS = ("sum", "max", "mean", "logsumexp", "softmax")
# How many times as long as ours the natural expression takes at least: a forward pass
# of bags by its layout, and any reduction.
BAGS, SEGMENTS = {"fixed": 4.0, "ragged": 2.0}, 0.95


def make_bags(
    layout: str, args: argparse.Namespace, zipf: bool, rng: np.random.Generator
) -> tuple[jax.Array, jax.Array]:
    """Ids and the bag of each; ragged bags leave a tail."""
    bags = args.segments
    lengths, size = rng.integers(1, LONGEST + 1, bags), (LONGEST + 1) // 2 + 2
    if layout == "fixed":
        lengths, size = np.full(bags, FIXED_SIZE), FIXED_SIZE
    capacity = bags * size
    segments = np.repeat(np.arange(bags), lengths)[:capacity]
    segments = np.pad(segments, (0, capacity - segments.size), constant_values=bags)
    ids = timing.make_ids(capacity, args.rows, zipf, rng)
    return jnp.asarray(ids), jnp.asarray(segments.astype(np.int32))


def make_segments(
    order: str, args: argparse.Namespace, rng: np.random.Generator
) -> tuple[jax.Array]:
    """Ids of segments. Each segment has an element, as a softmax needs."""
    ids = rng.integers(0, args.segments, args.elements)
    ids[: args.segments] = np.arange(args.segments)[: args.elements]
    ids = np.sort(ids) if order == "sorted" else rng.permutation(ids)
    return (jnp.asarray(ids.astype(np.int32)),)


def bag_sides(layout: str, combiner: str, bags: int) -> dict[str, Callable]:
    """`(table, ids, segments) -> [bags, D]` of each side."""

    def ours(table, ids, segments):
        if layout == "fixed":
            return sj.embedding_bag(table, ids.reshape(bags, -1), combiner=combiner)
        options: Any = {"combiner": combiner, "indices_are_sorted": True}
        return sj.embedding_bag(table, ids, segments, bags, **options)

    def natural(table, ids, segments):
        return reduce_naturally(combiner, bags, True)(table[ids], segments)

    def peer(table, ids, segments):
        if layout == "fixed":
            options = {"input": ids.reshape(bags, -1)}
        else:
            offsets = torch.searchsorted(segments, torch.arange(bags + 1))
            options = {"input": ids[: offsets[-1]], "offsets": offsets[:-1]}
        return torch.nn.functional.embedding_bag(
            weight=table, mode=combiner, sparse=True, **options
        )

    return {"ours": ours, "natural": natural, "torch": peer}


def segment_sides(reduction: str, order: str, segments: int) -> dict[str, Callable]:
    """`(data, ids) -> reduced` of each side."""
    is_sorted = order == "sorted"
    ours = getattr(sj, f"segment_{reduction}")
    sides = {
        "ours": lambda x, ids: ours(x, ids, segments, indices_are_sorted=is_sorted),
        "natural": reduce_naturally(reduction, segments, is_sorted),
    }
    names = {"sum": "sum", "max": "amax", "mean": "mean"}  # PyTorch composes the others

    def peer(x, ids):
        if is_sorted:
            lengths = torch.bincount(ids, minlength=segments)
            return torch.segment_reduce(
                x, reduction, lengths=lengths, axis=0, unsafe=True
            )
        out, wide = x.new_zeros(segments, x.shape[1]), ids[:, None].expand_as(x)
        return out.scatter_reduce(0, wide, x, names[reduction], include_self=False)

    return sides | ({"torch": peer} if reduction in names else {})


def reduce_naturally(reduction: str, segments: int, is_sorted: bool) -> Callable:
    """The expression that one writes with `jax.ops`, `(data, ids) -> reduced`."""
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

    named = {"mean": mean, "logsumexp": logsumexp, "softmax": softmax}
    return ({"sum": add_up, "max": largest} | named)[reduction]


def cases(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Two records a case, forward and with the gradient."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.standard_normal(shape, dtype=np.float32)
    if args.only in (None, "bag"):
        table, skews = draw(args.rows, args.dim), ("uniform", "zipf")
        combiners = [x for x in ("sum", "mean") if x in args.kinds]
        for layout, combiner, skew in itertools.product(BAGS, combiners, skews):
            inputs = functools.partial(make_bags, layout, args, skew == "zipf", rng)
            sides = bag_sides(layout, combiner, args.segments)
            case = {"op": "bag", "layout": layout, "kind": combiner, "ids": skew}
            yield from measure(args, case, sides, table, inputs)
    if args.only in (None, "segment"):
        data = draw(args.elements, args.dim)
        for reduction, order in itertools.product(args.kinds, ("sorted", "unsorted")):
            inputs = functools.partial(make_segments, order, args, rng)
            sides = segment_sides(reduction, order, args.segments)
            case = {"op": "segment", "kind": reduction, "ids": order}
            yield from measure(args, case, sides, data, inputs)


def measure(
    args: argparse.Namespace,
    case: dict[str, Any],
    sides: dict[str, Callable],
    data: np.ndarray,
    inputs: Callable[[], tuple],
) -> Iterator[dict[str, Any]]:
    """Compares and times the sides of a case, forward and with the gradient."""
    on_device, first = jnp.asarray(data), inputs()
    grad = functools.partial(sj.grad, tables=True) if case["op"] == "bag" else jax.grad
    for direction in ("forward", "gradient"):
        programs, compiled = {}, {}
        if torch is not None and "torch" in sides:
            programs["torch"] = torch_program(sides["torch"], direction, data)
        for name in ("ours", "natural"):
            call = sides[name]
            loss = lambda x, *ids, call=call: jnp.sum(call(x, *ids) ** 2)
            jitted = jax.jit(call if direction == "forward" else grad(loss))
            compiled[name] = timing.compile_apart(jitted, on_device, *first)
            run = functools.partial(compiled[name].run, on_device)
            programs[name] = lambda state, ids, run=run: (state, run(*ids["jax"]))
        if direction == "forward":
            results = {k: run((), for_both(first))[1] for k, run in programs.items()}
            natural = results["natural"]
            for x in results.values():
                np.testing.assert_allclose(x, natural, 1e-4, 1e-4, err_msg=str(case))
        draw = lambda: for_both(inputs())
        record = timing.compare(args, programs, (), draw, compiled=compiled)
        yield case | {"pass": direction} | record


def torch_program(call: Callable, direction: str, data: np.ndarray) -> Callable:
    """A PyTorch side as `(state, ids) -> (state, result)`."""
    x = torch.from_numpy(data.copy()).requires_grad_(direction != "forward")

    def run(state, ids):
        x.grad = None
        out = call(x, *ids["torch"])
        if direction != "forward":
            (out**2).sum().backward()
        return state, out

    return run


def failures(records: Sequence[dict[str, Any]]) -> list[str]:
    """The claims that do not hold."""
    wrong = []
    for r in records:
        ratio = max(r["ratio"]["natural"], r["best_ratio"]["natural"])
        least = SEGMENTS
        if r["op"] == "bag":
            is_claimed = r["kind"] == "sum" and r["pass"] == "forward"
            least = BAGS[r["layout"]] if is_claimed else 0
        if ratio < least:
            wrong.append(
                f"{r['op']} {r['kind']}, {r['ids']} ids, {r['pass']}: {ratio:.2f} "
                f"times the natural expression's speed, {least:.2f} claimed"
            )
    return wrong


def options(parser: argparse.ArgumentParser) -> None:
    """Adds the sizes."""
    parser.add_argument("--only", choices=("bag", "segment"))
    parser.add_argument("--kinds", nargs="+", choices=REDUCTIONS, default=REDUCTIONS)
    parser.add_argument("--rows", type=int, default=1_000_000, help="of the table")
    parser.add_argument("--elements", type=int, default=65_536, help="of the segments")
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--segments", type=int, default=4_096, help="or bags")
