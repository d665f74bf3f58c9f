"""Bags of a quantized table against FBGEMM's and PyTorch's, and against float32.

Forward sums of bags, ids uniform and skewed. FBGEMM is its table for inference on a CPU
(`IntNBitTableBatchedEmbeddingBagsCodegen`, scales of float16), PyTorch the operator
`embedding_bag_byte_rowwise_offsets` (scales of float32, 8 bits only). Sides take turns,
with other ids in every run; a ratio is the median of those of the turns.

    python -m benchmarks quantized
    python -m benchmarks quantized --bits 8 4 --check

Sides that are not installed are left out. `--check` asserts what the library claims on
two cores of a CPU, and exits with 1 where it does not hold.
"""

import argparse
import functools
import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import sparsejax as sj
from benchmarks import bag, timing


try:
    import torch  # pyright: ignore[reportMissingImports]
except ImportError:  # not among what the benchmarks install
    torch: Any = None
try:
    import fbgemm_gpu  # pyright: ignore[reportMissingImports]
    from fbgemm_gpu import (  # pyright: ignore[reportMissingImports]
        split_embedding_configs as configs,
        split_table_batched_embeddings_ops_common as common,
        split_table_batched_embeddings_ops_inference as inference,
    )
except ImportError:
    fbgemm_gpu: Any = None
    configs: Any = None
    common: Any = None
    inference: Any = None


# How many times FBGEMM's time a bag of 8 bits may take.
MOST = 1.5


# ------------------------------------------------------------------ the sides


def jax_side(layout: str, bags: int, table: Any, ids: Any) -> Callable:
    """`sj.embedding_bag` of any kind of table, compiled."""
    run = jax.jit(lambda table, batch: bag.ours(layout, bags, "sum")(table, *batch))
    run = run.lower(table, [ids, ids]).compile()
    return lambda _, batch: (_, run(table, batch["jax"]))


def fbgemm_side(table: sj.QuantizedTable) -> Callable:
    """FBGEMM's table of the same codes, with its scales in float16."""
    kind = {8: "INT8", 4: "INT4", 2: "INT2"}[table.bits]
    op = inference.IntNBitTableBatchedEmbeddingBagsCodegen(
        [
            (
                "",
                *table.shape,
                getattr(configs.SparseType, kind),
                common.EmbeddingLocation.HOST,
            )
        ],
        device="cpu",
        output_dtype=configs.SparseType.FP32,
        pooling_mode=common.PoolingMode.SUM,
    )
    op.initialize_weights()
    ((codes, pairs),) = op.split_embedding_weights()
    codes.copy_(torch.from_numpy(np.array(table.codes)))
    half = np.array(table.scale_bias).astype(np.float16)
    pairs.copy_(torch.from_numpy(half.view(np.uint8).reshape(pairs.shape)))

    def run(_, batch):
        ids, offsets = batch["torch"]
        return _, op(ids, offsets)

    return run


def torch_side(table: sj.QuantizedTable) -> Callable:
    """PyTorch's operator on the same bytes."""
    packed = torch.from_numpy(np.array(table.to_fused()))
    call = torch.ops.quantized.embedding_bag_byte_rowwise_offsets

    def run(_, batch):
        ids, offsets = batch["torch"]
        return _, call(packed, ids, offsets, include_last_offset=True)

    return run


def torch_batch(bags: int, ids: np.ndarray, segments: np.ndarray) -> Any:
    """Ids, and offsets with the end of the last bag."""
    if torch is None:
        return ()
    offsets = np.searchsorted(segments, np.arange(bags + 1)).astype(np.int32)
    return torch.from_numpy(ids[: offsets[-1]].copy()), torch.from_numpy(offsets)


# ------------------------------------------------------------------ measuring


def measure(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One record a case."""
    rng = np.random.default_rng(0)
    table = jnp.asarray(rng.standard_normal((args.rows, args.dim), dtype=np.float32))
    for bits, layout in itertools.product(args.bits, args.layouts):
        small = sj.quantize(table, bits)
        ids = jax.ShapeDtypeStruct((bag.capacity_of(layout, args.bags),), jnp.int32)
        sides = {"ours": jax_side(layout, args.bags, small, ids)}
        sides["float32"] = jax_side(layout, args.bags, table, ids)
        if fbgemm_gpu is not None:
            sides["fbgemm"] = fbgemm_side(small)
        if torch is not None and bits == 8:
            sides["torch"] = torch_side(small)
        for skew in ("uniform", "zipf"):
            inputs = functools.partial(_inputs, layout, args, skew == "zipf", rng)
            check_equal(sides, inputs())
            times, _ = timing.alternate(
                sides, (), inputs, repeats=args.repeats, seconds=args.seconds
            )
            ratios = {
                name: statistics.median(a / b for a, b in zip(times["ours"], of))
                for name, of in times.items()
            }
            yield {
                "bits": bits,
                "layout": layout,
                "ids": skew,
                "ms": {name: timing.median_ms(t) for name, t in times.items()},
                "ratio": ratios,
                "spread": timing.spread(times["ours"]),
                "bytes": {"ours": small.nbytes, "float32": table.nbytes},
            }


def _inputs(
    layout: str, args: argparse.Namespace, zipf: bool, rng: np.random.Generator
) -> dict[str, Any]:
    batch = bag.make_batch(layout, args.bags, args.rows, zipf, rng)
    return {
        "jax": [jnp.asarray(x) for x in batch],
        "torch": torch_batch(args.bags, *batch),
    }


def check_equal(sides: dict[str, Callable], inputs: dict[str, Any]) -> None:
    """Asserts that the other quantized tables give what ours does."""
    got = {name: np.asarray(run((), inputs)[1]) for name, run in sides.items()}
    for name in got.keys() - {"float32"}:
        # FBGEMM's scales are float16.
        np.testing.assert_allclose(got["ours"], got[name], rtol=0, atol=0.2)


def failures(records: Sequence[dict[str, Any]]) -> list[str]:
    """The claims that do not hold."""
    return [
        f"{r['layout']} bags of {r['ids']} ids in {r['bits']} bits: "
        f"{r['ratio']['fbgemm']:.2f} times FBGEMM's time, {MOST} claimed"
        for r in records
        if r["bits"] == 8 and r["ratio"].get("fbgemm", 0) > MOST
    ]


def print_record(record: dict[str, Any]) -> None:
    """One line of the table."""
    names = "ours", "float32", "fbgemm", "torch"
    shown = [record["ms"].get(name) for name in names]
    ms = "".join("       -" if x is None else f"{x:8.2f}" for x in shown)
    ratio = record["ratio"].get("fbgemm")
    print(
        f"{record['bits']:4} {record['layout']:7}{record['ids']:8}{ms}"
        + ("       -" if ratio is None else f"{ratio:8.2f}")
        + f"   {record['bytes']['ours'] / 1e6:8.1f}",
        flush=True,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints a table, and checks where asked."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks quantized",
        description=(__doc__ or "").split("\n")[0],
    )
    parser.add_argument("--rows", type=int, default=1_000_000, help="of the table")
    parser.add_argument("--dim", type=int, default=64, help="columns of the table")
    parser.add_argument("--bags", type=int, default=4_096)
    parser.add_argument(
        "--bits", nargs="+", type=int, default=(8, 4, 2), choices=(8, 4, 2)
    )
    parser.add_argument(
        "--layouts", nargs="+", default=bag.LAYOUTS, choices=bag.LAYOUTS
    )
    parser.add_argument("--repeats", type=int, default=51, help="timed runs, at most")
    parser.add_argument("--seconds", type=float, default=5.0, help="of a case, about")
    parser.add_argument("--json", help="appends a line for each case to this file")
    parser.add_argument("--check", action="store_true", help="asserts the claims")
    args = parser.parse_args(argv)
    machine = timing.machine()
    print(" ".join(f"{k}={v}" for k, v in machine.items()))
    print(f"table [{args.rows}, {args.dim}], {args.bags} bags; medians in ms")
    print("bits layout ids         ours float32  fbgemm   torch   ratio   MB")
    records = timing.collect(measure(args), print_record, args.json, machine)
    return timing.report(failures(records) if args.check else [])
