"""Segment reductions against what one writes with `jax.ops`, and against PyTorch.

Sum, max, mean, logsumexp and softmax of `[65536, 64]` floats in 4,096 segments, with
sorted ids and unsorted ones, forward and with the gradient of the data. Sides take
turns, with other ids in every run; what they give is compared before they are timed.

    python -m benchmarks segment
    python -m benchmarks segment --check --json segments.jsonl

PyTorch is left out where it is not installed. `--check` asserts that nothing takes more
than 1.05 times what the expression with `jax.ops` does, and exits with 1 where it does.
"Fastest" is that ratio for the fastest run of each, which busy cores disturb less.
"""

import argparse
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import sparsejax as sj
from benchmarks import timing


REDUCTIONS = ("sum", "max", "mean", "logsumexp", "softmax")
ORDERS = ("sorted", "unsorted")
PASSES = ("forward", "gradient")
MOST = 1.05


# ------------------------------------------------------------------ the sides


def ours(reduction: str, segments: int, is_sorted: bool) -> Callable[..., jax.Array]:
    """`(data, ids) -> reduced`."""
    reduce = getattr(sj, f"segment_{reduction}")
    return lambda x, ids: reduce(x, ids, segments, indices_are_sorted=is_sorted)


def natural(reduction: str, segments: int, is_sorted: bool) -> Callable[..., jax.Array]:
    """What one writes with `jax.ops`."""
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

    return {
        "sum": add_up,
        "max": largest,
        "mean": mean,
        "logsumexp": logsumexp,
        "softmax": softmax,
    }[reduction]


def torch_side(reduction: str, segments: int, is_sorted: bool) -> Any:
    """PyTorch's `(data, ids) -> reduced`, of tensors; None where there is none.

    Of sorted ids `segment_reduce` is taken, of unsorted ones `scatter_reduce`.
    """
    try:
        import torch  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None

    def reduce(x, ids, how):
        if is_sorted:
            lengths = torch.bincount(ids, minlength=segments)
            return torch.segment_reduce(x, how, lengths=lengths, axis=0, unsafe=True)
        if how == "sum":
            return x.new_zeros(segments, x.shape[1]).index_add_(0, ids, x)
        name = {"max": "amax", "mean": "mean"}[how]
        out = x.new_full((segments, x.shape[1]), -torch.inf if how == "max" else 0.0)
        wide = ids[:, None].expand_as(x)
        return out.scatter_reduce(0, wide, x, name, include_self=how == "max")

    def logsumexp(x, ids):
        top = reduce(x.detach(), ids, "max")
        top = torch.where(torch.isfinite(top), top, torch.zeros_like(top))
        return torch.log(reduce(torch.exp(x - top[ids]), ids, "sum")) + top

    def softmax(x, ids):
        e = torch.exp(x - reduce(x.detach(), ids, "max")[ids])
        return e / reduce(e, ids, "sum")[ids]

    composed = {"logsumexp": logsumexp, "softmax": softmax}
    return composed.get(reduction, functools.partial(reduce, how=reduction))


def torch_program(call: Callable, direction: str, data: Any) -> Callable[..., Any]:
    """A PyTorch side as `(state, inputs) -> (state, result)`."""
    import torch  # pyright: ignore[reportMissingImports]

    x = torch.from_numpy(np.array(data))

    def run(state, inputs):
        ids = torch.from_numpy(inputs["numpy"])
        if direction == "forward":
            return state, call(x, ids)
        leaf = x.detach().requires_grad_()
        out = call(leaf, ids)
        out.backward(torch.ones_like(out))
        return state, leaf.grad

    return run


def jax_program(
    call: Callable, direction: str, data: jax.Array
) -> tuple[Callable[..., Any], timing.Compiled]:
    """A JAX side as `(state, inputs) -> (state, result)`, and its compiled program."""
    run = call
    if direction == "gradient":

        def run(x, ids):
            out, pullback = jax.vjp(lambda x: call(x, ids), x)
            return pullback(jnp.ones_like(out))[0]

    ids = jax.ShapeDtypeStruct(data.shape[:1], jnp.int32)
    compiled = timing.compile_apart(jax.jit(run), data, ids)
    return lambda state, inputs: (state, compiled.run(data, inputs["jax"])), compiled


def make_ids(
    n: int, segments: int, is_sorted: bool, rng: np.random.Generator
) -> dict[str, Any]:
    """Ids for both kinds of sides. Each segment has an element, as a softmax wants."""
    ids = rng.integers(0, segments, n)
    ids[:segments] = np.arange(segments)[:n]
    ids = np.sort(ids) if is_sorted else rng.permutation(ids)
    return {"jax": jnp.asarray(ids.astype(np.int32)), "numpy": ids}


# ------------------------------------------------------------------ measuring


def reductions(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One record a case."""
    rng = np.random.default_rng(0)
    shape = (args.elements, args.dim)
    data = jnp.asarray(rng.standard_normal(shape, dtype=np.float32))
    for reduction in args.reductions:
        for order in args.orders:
            for direction in args.passes:
                yield measure(args, data, reduction, order, direction, rng)


def measure(
    args: argparse.Namespace,
    data: jax.Array,
    reduction: str,
    order: str,
    direction: str,
    rng: np.random.Generator,
) -> dict[str, Any]:
    """Times a case, the sides taking turns."""
    case = (reduction, args.segments, order == "sorted")
    sides, compiled = {}, {}
    for name, make in (("ours", ours), ("natural", natural)):
        sides[name], compiled[name] = jax_program(make(*case), direction, data)
    call = torch_side(*case)
    if call is not None:
        sides["torch"] = torch_program(call, direction, data)

    inputs = functools.partial(
        make_ids, args.elements, args.segments, order == "sorted", rng
    )
    ids = inputs()
    results = {name: np.asarray(side((), ids)[1]) for name, side in sides.items()}
    for name, result in results.items():
        np.testing.assert_allclose(
            result, results["natural"], rtol=1e-4, atol=1e-4, err_msg=f"{name} {case}"
        )
    times, _ = timing.alternate(
        sides, (), inputs, repeats=args.repeats, seconds=args.seconds
    )
    medians = {name: timing.median_ms(t) for name, t in times.items()}
    fastest = {name: 1e3 * min(t) for name, t in times.items()}
    return {
        "benchmark": "segment",
        "reduction": reduction,
        "ids": order,
        "pass": direction,
        "ms": medians,
        "fastest_ms": fastest,
        "ratio": medians["ours"] / medians["natural"],
        "fastest_ratio": fastest["ours"] / fastest["natural"],
        "spread": {name: timing.spread(t) for name, t in times.items()},
        "compile_s": {name: c.seconds for name, c in compiled.items()},
        "temp_mb": {name: c.temp_bytes / 1e6 for name, c in compiled.items()},
    }


def failures(records: Sequence[dict[str, Any]]) -> list[str]:
    """The claims that do not hold.

    Programs of a millisecond meet much noise where others work too: a claim fails if
    the medians and the fastest runs both say so.
    """
    return [
        f"{r['reduction']}, {r['ids']} ids, {r['pass']}: {r['ratio']:.2f} times what "
        f"jax.ops takes ({r['fastest_ratio']:.2f} in the fastest runs), at most "
        f"{MOST:g} claimed"
        for r in records
        if min(r["ratio"], r["fastest_ratio"]) > MOST
    ]


# ------------------------------------------------------------------ command line


HEADER = (
    "reduction  ids      pass          ours  natural    torch  ours/natural  fastest"
    "   compile (s)   temporaries (MB)"
)


def line(record: dict[str, Any]) -> str:
    """One line of the table."""
    ms, compiled, temp = record["ms"], record["compile_s"], record["temp_mb"]
    torch_ms = f"{ms['torch']:8.2f}" if "torch" in ms else "       -"
    return (
        f"{record['reduction']:10} {record['ids']:8} {record['pass']:9}"
        f" {ms['ours']:8.2f} {ms['natural']:8.2f} {torch_ms} {record['ratio']:13.2f}"
        f" {record['fastest_ratio']:8.2f}"
        f"     {compiled['ours']:4.2f}  {compiled['natural']:4.2f}"
        f"      {temp['ours']:6.1f} {temp['natural']:6.1f}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; 1 if `--check` is given and a claim does not hold."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks segment",
        description=(__doc__ or "").split("\n")[0],
    )
    parser.add_argument("--elements", type=int, default=65_536)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--segments", type=int, default=4_096)
    for name, choices in (
        ("--reductions", REDUCTIONS),
        ("--orders", ORDERS),
        ("--passes", PASSES),
    ):
        parser.add_argument(name, nargs="+", default=choices, choices=choices)
    parser.add_argument("--repeats", type=int, default=30, help="timed runs, at most")
    parser.add_argument("--seconds", type=float, default=4.0, help="of a case, about")
    parser.add_argument("--json", metavar="FILE", help="append a JSON line a case")
    parser.add_argument("--check", action="store_true", help="exit 1 if a claim fails")
    args = parser.parse_args(argv)
    machine = timing.machine()
    print("  ".join(f"{key} {value}" for key, value in machine.items()))
    print(
        f"data [{args.elements}, {args.dim}], {args.segments} segments; medians in ms"
    )
    print(HEADER, flush=True)
    show = lambda record: print(line(record), flush=True)
    records = timing.collect(reductions(args), show, args.json, machine)
    return timing.report(failures(records) if args.check else [])
