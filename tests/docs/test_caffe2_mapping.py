"""caffe2.md: its code, checked against the answers of Caffe2's operators.

The page's code blocks are executed, and each cell of its tables is evaluated with the
inputs and arguments of an operator by name. `golden/caffe2.json` and `.npz` hold the
answers of Caffe2 (the header of the former names their source); operators without a
recorded answer have a line in `caffe2.txt`, worked by hand.
"""

import collections
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparsejax as sj
from recorded import Recorded, dense, page_ran, raises  # noqa: F401  (in caffe2.txt)
from sparsejax import _compat


pytestmark = pytest.mark.slow


PAGE = Recorded("caffe2")
CASES = {case["name"]: case for case in PAGE.cases}
get = PAGE.get
ANSWERED = [name for name, case in CASES.items() if "outputs" in case]
# A chain is several operators: it has a test of its own.
ANSWERED = [name for name in ANSWERED if "+" not in CASES[name]["op"]]


# ------------------------------------------------------------------ the page

Row = collections.namedtuple("Row", "operator wants code")


def _row(cells):
    name, _, wanted = cells[0].strip("`)").partition("(")
    wants = {}
    for want in filter(None, wanted.split(", ")):
        key, _, value = want.partition("=")
        wants[key] = value or None
    code = cells[1]
    return Row(name, wants, None if code == "—" else code.strip("`"))


ROWS = [_row(cells) for cells in PAGE.rows]


def row_of(operator, given):
    """The row of the operator that names most of the given names and no others."""
    fits = [
        row
        for row in ROWS
        if row.operator == operator
        and all(k in given and v in (None, given[k]) for k, v in row.wants.items())
    ]
    return max(fits, key=lambda row: len(row.wants))


def evaluate(row, names):
    return eval(row.code, {**PAGE.blocks, **names})


def run(operator, inputs, args, outputs):
    """The outputs of the page's code, as a tuple."""
    row = row_of(operator, {**inputs, **args, **dict.fromkeys(outputs)})
    num_parts = max(len(outputs) // max(len(inputs), 1), 1)
    names = {"inputs": list(inputs.values()), "num_parts": num_parts}
    result = evaluate(row, {**names, **inputs, **args})
    return result if type(result) is tuple else (result,)


def assert_answers(got, want, rtol=1e-5):
    got, want = np.asarray(got), np.asarray(want)
    assert got.shape == want.shape
    kinds = {"b": "b", "i": "iu", "u": "u", "f": "f"}
    assert got.dtype.kind in kinds[want.dtype.kind]
    wide = got.astype(np.float64) if want.dtype.kind == "f" else got
    np.testing.assert_allclose(wide, want, rtol=rtol, atol=1e-6)


# ------------------------------------------------------------------ recorded cases


def is_wide(case):
    """Return True if a case needs all 64 bits of its ids."""
    inputs = [PAGE.arrays[key] for key in case["inputs"].values()]
    found = [x for x in inputs if x.dtype == np.int64]
    hashed = case["op"] == "IndexHash" and bool(found)
    return hashed or any(x.size and np.abs(x).max() >= 2**31 for x in found)


# The shapes of their outputs follow from values, in ways that JAX must look at.
EAGER = {
    "BooleanMask",
    "GatherPadding",
    "GatherRangesToDense",
    "LengthsGather",
    "LengthsPartition",
    "MergeMultiMapFeatureTensors",
    "MergeSingleListFeatureTensors",
    "SparseLengthsSumSparseLookup",
}


def answer(case) -> tuple[Any, Any]:
    """The page's outputs and its gradients, in Caffe2's order."""
    inputs = get(case, "inputs")
    args, names = case.get("args", {}), list(case.get("outputs", ["out"]))

    def outputs_of(values):
        return run(case["op"], {**inputs, **values}, args, names)

    def outputs_and_grads(values, cotangents):
        def f(wanted):
            outputs = outputs_of({**values, **wanted})
            return {name: outputs[names.index(name)] for name in cotangents}, outputs

        if not cotangents:
            return outputs_of(values), {}
        _, vjp, outputs = jax.vjp(
            f, {n: values[n] for n in case["grads"]}, has_aux=True
        )
        return outputs, vjp(cotangents)[0]

    # One program for a case: ids and lengths are NumPy's, and known inside.
    known = {name for name, x in inputs.items() if x.dtype.kind != "f"}
    if case["op"] in EAGER or len(known) == len(inputs):
        known = set()
    else:
        outputs_and_grads = jax.jit(outputs_and_grads)
    values = {n: jnp.asarray(x) for n, x in inputs.items() if n not in known}
    cotangents = jax.tree.map(jnp.asarray, get(case, "cotangents"))
    outputs, grads = outputs_and_grads(values, cotangents)
    return outputs, [grads[name] for name in case.get("grads", ())]


# Differences that the page lists; the tests of its first table check them.
DIFFER = {
    "BooleanMask/basic",
    "Gather/empty_data",
    "PackSegments/max_length_truncates",
    "ScatterWeightedSum/int32_dup_w0",
    "SortedSegmentRangeLogSumExp/neg_inf",
    "SparseLengthsMean/float16_table",
    "SparseLengthsWeightedSum/float16_table",
}


@pytest.mark.parametrize("name", [n for n in ANSWERED if n not in DIFFER])
def test_recorded(name):
    case = CASES[name]
    with _compat.enable_x64(is_wide(case)):
        outputs, grads = answer(case)
        for got, want in zip(outputs, get(case, "outputs").values(), strict=True):
            assert_answers(got, want)
        for got, want in zip(grads, get(case, "grads").values(), strict=True):
            assert_answers(got, want)


SLICES = {case["op"]: name for name, case in CASES.items() if "slices" in case}


@pytest.mark.parametrize("operator", sorted(SLICES))
def test_recorded_slices(operator):
    """If Caffe2 returns (indices, rows), sparsejax.grad returns a SelectedRows."""
    case = CASES[SLICES[operator]]
    (name,) = case["slices"]
    inputs = get(case, "inputs")
    (cotangent,) = get(case, "cotangents").values()

    def loss(table):
        given = {**inputs, name: table}
        (out,) = run(operator, given, case.get("args", {}), ["out"])
        return jnp.sum(out * cotangent)

    grad = jax.jit(sj.grad(loss, tables=True))(inputs[name])
    assert isinstance(grad, sj.SelectedRows)
    assert_answers(dense(grad), get(case, "grads")[name])


def test_recorded_map():
    case = CASES["KeyValueToMap+MapToKeyValue"]
    inputs, want = get(case, "inputs"), get(case, "outputs")
    made = evaluate(row_of("KeyValueToMap", {}), inputs)
    keys, values = evaluate(row_of("MapToKeyValue", {}), dict(map=made))
    order = np.argsort(want["k2"])  # unspecified, as it is in any hash table
    assert_answers(keys, want["k2"][order])
    assert_answers(values, want["v2"][order])
    assert evaluate(row_of("CreateMap", {}), {}) == {}


def test_recorded_index():
    case = CASES["LongIndex/get_freeze_get"]
    inputs, want = get(case, "inputs"), get(case, "outputs")
    index = evaluate(row_of("LongIndexCreate", {}), {})
    got = evaluate(row_of("IndexGet", {}), dict(index=index, keys=inputs["q1"]))
    assert got == want["o1"].tolist()
    frozen = evaluate(row_of("IndexFreeze", {}), dict(index=index))
    assert not hasattr(frozen, "setdefault")
    assert [frozen.get(key, 0) for key in inputs["q2"].tolist()] == want["o2"].tolist()
    assert evaluate(row_of("IndexSize", {}), dict(index=index)) == want["size"]
    items = evaluate(row_of("IndexStore", {}), dict(index=index))
    assert items == want["items"].tolist()
    for create in ("IntIndexCreate", "StringIndexCreate"):
        other = evaluate(row_of(create, {}), {})
        evaluate(row_of("IndexLoad", {}), dict(index=other, items=np.array(items)))
        assert other == index


# ------------------------------------------------------------------ worked by hand

L = [2, 0, 3]  # of five elements
F = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0], [9.0, 10.0]], np.float32)
TIES = [2.0, 1.0, 2.0, 2.0, 5.0]
TBD = F[:, None].repeat(2, 1) * np.array([[[1.0], [10.0]]], np.float32)  # [5, 2, 2]
INF = np.inf
PADDED = [[[1, 2], [3, 4], [0, 0]], [[0, 0]] * 3, [[5, 6], [7, 8], [9, 10]]]
MASK = [[True, True, False], [False] * 3, [True] * 3]
GRID = np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0, 8.0, 9.0]], np.float32)
WIDTHS = {"padding_width": 1, "end_padding_width": 0}
BAG = {"data": F, "indices": [4, 0, 1], "segment_ids": [2, 0, 2]}
KEYS = {"k1": [3, 4, 7], "x": [30, 40, 70]}


def inputs(name):
    return get(CASES[name], "inputs")


def theirs(name, field):
    return tuple(get(CASES[name], field).values())


def ours(name, wide=False):
    """Our outputs for a recorded case, and our gradients."""
    with _compat.enable_x64(wide):
        return answer(CASES[name])


def op(operator, **given):
    """The one output of an operator."""
    known = lambda x: np.asarray(x, None if np.asarray(x).dtype.kind == "i" else "f")
    given = {k: x if isinstance(x, jax.Array) else known(x) for k, x in given.items()}
    return run(operator, given, {}, ["out"])[0]


def grad(operator, wrt="data", **given):
    total = lambda x: jnp.sum(op(operator, **given | {wrt: x}))
    return jax.jit(jax.grad(total))(jnp.asarray(given[wrt]))


def sparse_grad(table):
    bags = {"indices": [3, 7, 3], "lengths": [2, 1]}
    return jax.jit(sj.grad(lambda t: jnp.sum(op("SparseLengthsSum", data=t, **bags))))(
        table
    )


def repeated_once_more(x0, w0, ids):
    """The difference if a weight of x0 is applied once, not twice."""
    twice = np.bincount(ids, minlength=len(x0))[:, None] == 2
    return np.where(twice, (w0 - w0**2) * x0, 0)


def one_of_each(got, data, ids, rows):
    return all(any((got[i] == x).all() for x in rows[ids == i]) for i in ids)


def added(data, segment_ids):
    total = np.zeros((segment_ids.max() + 1, 2), np.float32)
    np.add.at(total, segment_ids, data)
    return total


def cut(cotangent):
    """Segments of 3 and 1, cut to 2."""
    nothing = np.zeros_like(cotangent[0, 0])
    return np.stack([*cotangent[0], nothing, cotangent[1, 0]])


def masked(mask, cotangent):
    whole = np.zeros((len(mask), *cotangent.shape[1:]), np.float32)
    whole[mask] = cotangent
    return whole


# Rows whose scale is 1, and one of equal numbers, with their bytes in each layout. In
# float16 1 is 0, 60 and 3 is 0, 66.
ROWS_OF = {
    8: [[0.0, 255.0, 1.0, 2.0], [3.0] * 4],
    4: [[0.0, 15.0, 1.0, 2.0], [3.0] * 4],
    2: [[0.0, 3.0, 1.0, 2.0], [3.0] * 4],
}
ONE, THREE = [0, 0, 128, 63], [0, 0, 64, 64]
BYTES_OF = {
    8: [[0, 255, 1, 2, *ONE, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0, 0, *THREE]],
    4: [[15 << 4, 1 + (2 << 4), 0, 60, 0, 0], [0, 0, 0, 60, 0, 66]],
    2: [[(3 << 2) + (1 << 4) + (2 << 6), 0, 60, 0, 0], [0, 0, 60, 0, 66]],
}
HALF_BYTES = [[0, 255, 1, 2, 0, 60, 0, 0], [0, 0, 0, 0, 0, 60, 0, 66]]
PRUNED = {"mapping": [-1, 0, 1, -1], "indices": [1, 0, 2], "lengths": [2, 1]}
PLAIN = {"indices": [0, 0, 1], "lengths": [2, 1]}


def _quantized_examples():
    for bits in (8, 4, 2):
        rows, made = np.array(ROWS_OF[bits], np.float32), BYTES_OF[bits]
        made = np.array(made, np.uint8)
        half = rows.astype(np.float16)
        if bits == 8:
            name, to_half = "8Bit", "HalfFloat"
            less = np.array(HALF_BYTES, np.uint8)
            tail = "8BitRowwiseQuantizedHalfScaleBias"
            for start, x in (("Float", rows), ("HalfFloat", half)):
                yield f"{start}ToFused{tail}", {"input": x}, {}, {"out": less}
            for end in ("Float", "HalfFloat"):
                yield f"Fused{tail}To{end}", {"input": less}, {}, {"out": rows}
        else:
            name, to_half = f"{bits}Bit", "Half"
            fake = np.array([[*rows[0], *ONE, 0, 0, 0, 0], [0] * 4 + [*ONE, *THREE]])
            for start, x in (("Float", rows), ("Half", half)):
                operator = f"{start}ToFused{name}FakeRowwiseQuantized"
                yield operator, {"input": x}, {}, {"out": fake}
            operator = f"FloatToFused{name}RowwiseQuantized"
            yield operator, {"input": rows}, {"engine": "GREEDY"}, {"out": made}
        yield f"FloatToFused{name}RowwiseQuantized", {"input": rows}, {}, {"out": made}
        operator = f"{to_half}ToFused{name}RowwiseQuantized"
        yield operator, {"input": half}, {}, {"out": made}
        for end, x in (("Float", rows), (to_half, half)):
            operator = f"Fused{name}RowwiseQuantizedTo{end}"
            yield operator, {"input": made}, {}, {"out": x}
        zero = 0 * rows[0]
        for tail, given, first in (
            (f"Fused{bits}BitRowwise", PLAIN, 2 * rows[0]),
            (f"{bits}BitRowwiseSparse", PRUNED, rows[0]),
        ):
            given = {"data": made, **given}
            pair = [first, rows[1]]
            yield f"SparseLengthsSum{tail}", given, {}, {"out": pair}
            mean = [first / 2, rows[1]]
            yield f"SparseLengthsMean{tail}", given, {}, {"out": mean}
            weighted = {**given, "weights": [2.0, 0.0, -1.0]}
            pair = [2 * rows[0] + zero, -rows[1]]
            yield f"SparseLengthsWeightedSum{tail}", weighted, {}, {"out": pair}
    rows = np.array(ROWS_OF[8], np.float32)
    codes = rows.astype(np.uint8) * np.array([[1], [0]], np.uint8)
    pairs = np.array([[1.0, 0.0], [1.0, 3.0]], np.float32)
    apart = {"quantized": codes, "scale_bias": pairs}
    yield "FloatToRowwiseQuantized8Bits", {"input": rows}, {}, apart
    yield "Rowwise8BitQuantizedToFloat", apart, {}, {"out": rows}
    given = {"data": codes, "scale_bias": pairs, **PLAIN}
    yield "SparseLengthsSum8BitsRowwise", given, {}, {"out": [2 * rows[0], rows[1]]}
    yield "SparseLengthsMean8BitsRowwise", given, {}, {"out": rows}
    given["weights"] = [2.0, 0.0, -1.0]
    pair = [2 * rows[0], -rows[1]]
    yield "SparseLengthsWeightedSum8BitsRowwise", given, {}, {"out": pair}
    pair = [rows[0], -rows[1]]
    yield "SparseLengthsWeightedMean8BitsRowwise", given, {}, {"out": pair}


def _example(operator, *parts):
    return operator, *(eval(f"dict({part})", globals()) for part in parts)


DIFFERENT = [x for x in PAGE.examples if x[0].startswith("? ")]
EXAMPLES = [_example(*x) for x in PAGE.examples if x not in DIFFERENT]
EXAMPLES += _quantized_examples()


@pytest.mark.parametrize("line", DIFFERENT, ids=lambda line: line[0])
def test_differs(line):
    PAGE.check_example(line, globals())


def test_every_difference_is_checked():
    assert list(dict.fromkeys(x[0][2:] for x in DIFFERENT)) == PAGE.differences
    text = str(DIFFERENT)
    cases = [name for name, case in CASES.items() if "raises" in case]
    unused = [name for name in cases if f'"{name}"' not in text]
    assert unused == ["SparseLengthsMax/no_cpu_impl_raises"]  # it was not built in


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda x: x[0])
def test_by_hand(example):
    operator, inputs, args, wants = example
    inputs = {name: jnp.asarray(x) for name, x in inputs.items()}
    got = run(operator, inputs, args, list(wants))
    for x, want in zip(got, wants.values(), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(want))


def test_unique_uniform_fill():
    names = {"key": jax.random.key(0), "min": 3, "max": 9, "shape": (6,)}
    got = evaluate(row_of("UniqueUniformFill", {}), names).tolist()
    assert len(set(got)) == 6 and set(got) <= set(range(3, 10))


# ------------------------------------------------------------------ nothing forgotten


def test_every_operator_is_on_the_page():
    listed = PAGE.golden["operators"].values()
    assert {row.operator for row in ROWS} == set().union(*listed)


def test_every_row_is_run():
    def row(operator, *given):
        given = {k: v for names in given for k, v in dict(names).items()}
        return row_of(operator, given)[:1] + tuple(row_of(operator, given).wants)

    run_here = {row(e[0], *e[1:]) for e in EXAMPLES}
    for name in ANSWERED:
        case = CASES[name]
        given = case["inputs"], case.get("args", {}), case["outputs"]
        run_here.add(row(case["op"], *given))
    mine = {"KeyValueToMap", "MapToKeyValue", "CreateMap", "UniqueUniformFill"}
    for r in ROWS:
        if r.code is not None and r.operator not in mine:
            known = (r.operator, *r.wants) in run_here
            assert known or "Index" in r.operator, f"{r} is run by no test"
