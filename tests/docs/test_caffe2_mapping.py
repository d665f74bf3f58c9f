"""caffe2.md: its code, checked against the answers of Caffe2's operators.

The page's code blocks are executed, and each cell of its tables is evaluated with the
inputs and arguments of an operator by name. `golden/caffe2.json` and `.npz` hold the
answers of Caffe2 (the header of the former names their source); operators without a
recorded answer have an example below, worked by hand.
"""

import collections
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparsejax as sj
from recorded import Recorded, dense
from sparsejax import _compat


pytestmark = pytest.mark.slow


_RECORDED = Recorded("caffe2")
CASES = {case["name"]: case for case in _RECORDED.cases}
DIFFERENCES, differs, get = _RECORDED.differences, _RECORDED.checks, _RECORDED.get
ANSWERED = [name for name, case in CASES.items() if "outputs" in case]
REFUSED = [name for name, case in CASES.items() if "raises" in case]
# A chain is several operators: it has a test of its own.
ANSWERED = [name for name in ANSWERED if "+" not in CASES[name]["op"]]


@pytest.fixture(autouse=True, scope="module")
def _page_ran():
    _RECORDED.blocks  # not first inside of a trace


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


ROWS = [_row(cells) for cells in _RECORDED.rows]


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
    return eval(row.code, {**_RECORDED.blocks, **names})


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
    inputs = [_RECORDED.arrays[key] for key in case["inputs"].values()]
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


# ------------------------------------------------------------------ differences


def test_every_difference_is_checked():
    assert DIFFERENCES == list(_RECORDED.checked)


@pytest.mark.parametrize("what", DIFFERENCES)
def test_differs(what):
    _RECORDED.checked[what]()


@differs("ties of a maximum")
def _():
    data = np.array([2.0, 1.0, 2.0, 2.0, 5.0], np.float32)
    for operator, by in (
        ("LengthsMax", {"lengths": np.array([4, 1])}),
        ("SortedSegmentRangeMax", {"segment_ids": np.array([0, 0, 0, 0, 1])}),
    ):
        f = lambda x, op=operator, by=by: run(op, {"data": x, **by}, {}, ["out"])[
            0
        ].sum()
        assert_answers(jax.jit(jax.grad(f))(data), [1 / 3, 0, 1 / 3, 1 / 3, 1])


@differs("a maximum over -inf alone")
def _():
    inputs = {"data": jnp.full(2, -jnp.inf), "segment_ids": jnp.array([0, 0])}
    assert run("SortedSegmentRangeMax", inputs, {}, ["out"])[0].tolist() == [-np.inf]


@differs("gradient of logsumexp over -inf alone")
def _():
    case = CASES["SortedSegmentRangeLogSumExp/neg_inf"]
    outputs, grads = answer(case)
    assert_answers(outputs[0], get(case, "outputs")["out"])
    want = get(case, "grads")["data"]
    assert np.isnan(want[:2]).all()
    assert_answers(grads[0], np.nan_to_num(want))


@differs("maximum of an empty segment")
def _():
    st = sj.SegmentTensor.from_lengths(jnp.array([-1.0]), [0, 1])
    assert sj.segment_max(st).tolist() == [-np.inf, -1]
    assert sj.segment_max(st, empty=0).tolist() == [0, -1]


@differs("`ScatterWeightedSum`, repeated ids")
def _():
    case = CASES["ScatterWeightedSum/int32_dup_w0"]
    ((got,), _), want = answer(case), get(case, "outputs")["x0"].copy()
    x0, w0, indices, *_ = get(case, "inputs").values()
    (twice,) = {i for i in indices.tolist() if (indices == i).sum() == 2}
    want[twice] += (w0 - w0**2) * x0[twice]
    assert_answers(got, want)


@differs("`ScatterAssign`, repeated ids")
def _():
    case = CASES["ScatterAssign/int32_dup"]
    inputs = get(case, "inputs")
    (got,), _ = answer(case)
    for i in set(inputs["indices"].tolist()):
        may_be = inputs["slices"][inputs["indices"] == i]
        assert any(np.array_equal(got[i], row) for row in may_be)


@differs("`Gather`, negative ids")
def _():
    inputs = {"data": jnp.arange(3.0), "indices": jnp.array([2, -1])}
    (got,) = run("Gather", inputs, {}, ["out"])
    assert got[0] == 2 and np.isnan(got[1])
    ids = inputs["indices"]
    assert sj.lookup(inputs["data"], ids, mode="zero").tolist() == [2, 0]


@differs("`Gather` from no rows")
def _():
    (got,), _ = answer(CASES["Gather/empty_data"])
    assert got.shape == (2, 3) and np.isnan(got).all()


@differs("bad ids")
def _():
    ids = lambda name: answer(CASES[name])[0][0]
    values = get(CASES["SparseToDense/negative_raises"], "inputs")["values"]
    got = ids("SparseToDense/negative_raises")
    assert_answers(got, np.stack([values[1], 0 * values[1], 0 * values[1], values[2]]))
    assert ids("SegmentIdsToRanges/too_few_segments_raises").tolist() == [
        [0, 1],
        [0, 0],
    ]
    with pytest.raises(Exception, match="out of range"):
        sj.lookup(jnp.arange(3.0), jnp.array([-1]), mode="error")


@differs("sorted segments")
def _():
    for name in ("SortedSegmentSum/not_from_zero", "SortedSegmentSum/unsorted"):
        case = CASES[f"{name}_raises"]
        data, segment_ids = get(case, "inputs").values()
        want = np.zeros((segment_ids.max() + 1, 2), np.float32)
        np.add.at(want, segment_ids, data)
        assert_answers(answer(case)[0][0], want)
    assert answer(CASES["SegmentIdsToLengths/unsorted_raises"])[0][0].tolist() == [1, 1]
    for name in ("SegmentIdsToRanges/unsorted", "SortedSegmentSum/length_mismatch"):
        with pytest.raises(ValueError):  # as Caffe2: these have no meaning
            answer(CASES[f"{name}_raises"])


@differs("types")
def _():
    with _compat.enable_x64(True):
        got = answer(CASES["LengthsToSegmentIds/int64_rejected"])[0][0]
        assert got.tolist() == [0, 1, 1]
        data = get(CASES["SortedSegmentSum/int64_ids_raises"], "inputs")["data"]
        got = answer(CASES["SortedSegmentSum/int64_ids_raises"])[0][0]
        assert_answers(got, data.reshape(2, 2, 2).sum(1))
    lengths, ids = answer(CASES["DenseVectorToIdList/int64_raises"])[0]
    assert lengths.tolist() == [2, 0] and ids.tolist() == [1, 2]


@differs("float16 tables of the fused operators")
def _():
    for operator in ("SparseLengthsMean", "SparseLengthsWeightedSum"):
        case = CASES[f"{operator}/float16_table"]
        (got,), _ = answer(case)
        assert got.dtype == jnp.float16
        assert_answers(got, get(case, "outputs")["out"], rtol=2e-3)


@differs("gradient of weights")
def _():
    without = CASES["SortedSegmentWeightedSum/2d"]
    assert list(without["grads"]) == ["data"]
    inputs = get(without, "inputs")

    def f(scalars):
        given = {**inputs, "scalars": scalars}
        return jnp.sum(run("SortedSegmentWeightedSum", given, {}, ["out"])[0])

    assert_answers(jax.jit(jax.grad(f))(inputs["scalars"]), inputs["data"].sum(1))


@differs("gradients of tables")
def _():
    table = jnp.arange(40.0).reshape(20, 2)
    inputs = {"indices": np.array([3, 7, 3]), "lengths": np.array([2, 1])}

    def f(data):
        return jnp.sum(
            run("SparseLengthsSum", {"data": data, **inputs}, {}, ["out"])[0]
        )

    grad, other = jax.jit(lambda table: (sj.grad(f)(table), jax.grad(f)(table)))(table)
    assert grad.rows.tolist() == [3, 7, 3]
    assert_answers(other, dense(grad))


@differs("`PackSegments` that cuts, gradient")
def _():
    case = CASES["PackSegments/max_length_truncates"]
    (got,), (grad,) = answer(case)
    assert_answers(got, get(case, "outputs")["out"])
    (cotangent,) = get(case, "cotangents").values()
    assert get(case, "inputs")["lengths"].tolist() == [3, 1]
    cut = np.zeros_like(cotangent[0, 0])
    assert_answers(grad, np.stack([*cotangent[0], cut, cotangent[1, 0]]))


@differs("`BooleanMask` of rows, gradient")
def _():
    case = CASES["BooleanMask/basic"]
    outputs, (grad,) = answer(case)
    for got, want in zip(outputs, get(case, "outputs").values(), strict=True):
        assert_answers(got, want)
    mask = get(case, "inputs")["mask"]
    (cotangent,) = get(case, "cotangents").values()
    assert_answers(grad[mask], cotangent)
    assert not np.asarray(grad[~mask]).any()


@differs("`LengthsPad`, a segment that is too long")
def _():
    case = CASES["LengthsPad/too_long_raises"]
    assert_answers(answer(case)[0][0], get(case, "inputs")["data"][:2])


@differs("order of keys out of a map")
def _():
    made = {7: 1.0, 2: 3.0}
    keys, values = evaluate(row_of("MapToKeyValue", {}), dict(map=made))
    assert keys.tolist() == [2, 7] and values.tolist() == [3, 1]


@differs("`Unique`")
def _():
    out, _, count = jax.jit(lambda ids: sj.unique(ids, 3))(jnp.array([9, 9, 4]))
    assert out.tolist() == [4, 9, 2**31 - 1] and int(count) == 2


def test_what_caffe2_refuses_is_answered():
    """The checks above use every refused case, except one that was not built in."""
    source = pathlib.Path(__file__).read_text()
    checks = source[source.index("- differences") : source.index("# worked by hand")]
    for name in REFUSED:
        name = name.removesuffix("_raises")
        assert name in checks or name == "SparseLengthsMax/no_cpu_impl"


# ------------------------------------------------------------------ worked by hand

L = [2, 0, 3]  # of five elements
F = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0], [9.0, 10.0]], np.float32)
TBD = F[:, None].repeat(2, 1) * np.array([[[1.0], [10.0]]], np.float32)  # [5, 2, 2]
INF = np.inf
PADDED = [[[1, 2], [3, 4], [0, 0]], [[0, 0]] * 3, [[5, 6], [7, 8], [9, 10]]]
MASK = [[True, True, False], [False] * 3, [True] * 3]
GRID = np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0, 8.0, 9.0]], np.float32)
WIDTHS = {"padding_width": 1, "end_padding_width": 0}
BAG = {"data": F, "indices": [4, 0, 1], "segment_ids": [2, 0, 2]}
KEYS = {"k1": [3, 4, 7], "x": [30, 40, 70]}

# (operator, inputs, arguments, outputs by name)
EXAMPLES = [
    (
        "LengthsToWeights",
        {"lengths": [4, 0, 2]},
        {"power": 1.0},
        {"out": [0.25] * 4 + [0.5] * 2},
    ),
    ("LengthsToShape", {"lengths": [5, 5, 5]}, {}, {"out": [3, 5]}),
    (
        "OneHot",
        {"indices": [1, 0], "index_size": [3]},
        {},
        {"out": [[0, 1, 0], [1, 0, 0]]},
    ),
    (
        "BatchOneHot",
        {"data": [[1, 2], [3, 2]], "lengths": [2, 1], "values": [3, 1, 2]},
        {},
        {"out": [[False, True, True], [True, False, True]]},
    ),
    (
        "Bucketize",
        {"data": [0.0, 1.0, 1.5, 9.0]},
        {"boundaries": [1.0, 2.0]},
        {"out": [0, 0, 1, 2]},
    ),
    (
        "BatchBucketize",
        {
            "feature": [[0.5, 7.0, 1.0], [3.0, 7.0, 2.5]],
            "indices": [2, 0],
            "boundaries": [1.0, 2.0, 0.0, 1.0, 2.0],
            "lengths": [2, 3],
        },
        {},
        {"out": [[0, 1], [2, 3]]},
    ),
    (
        "BatchDenseToSparse",
        {"lengths": [1, 2], "indices": [2, 0, 1], "dense": GRID[:2]},
        {},
        {"out": [3.0, 4.0, 5.0]},
    ),
    (
        "DenseVectorToIdList",
        {"values": [[0.0, 2.0, -1.0], [0.0, 0.0, 0.0], [3.0, 0.0, 0.0]]},
        {},
        {"lengths": [2, 0, 1], "ids": [1, 2, 0]},
    ),
    ("EnsureDense", {"data": F}, {}, {"out": F}),
    ("BatchGather", {"data": GRID, "indices": [2, 0]}, {}, {"out": GRID[:, [2, 0]]}),
    (
        "GatherRanges",
        {"data": [1, 2, 3, 4, 5, 6], "ranges": [[[0, 1], [2, 2]], [[4, 1], [5, 1]]]},
        {},
        {"out": [1, 3, 4, 5, 6], "lengths_out": [3, 2]},
    ),
    (
        "GatherRangesToDense",
        {"data": [1, 2, 3, 4, 5], "ranges": [[[3, 2], [0, 1]], [[0, 0], [2, 1]]]},
        {"lengths": [2, 1]},
        {"out0": [[4, 5], [0, 0]], "out1": [[1], [3]]},
    ),
    (
        "CopyRowsToTensor",
        {"data": GRID, "indices": [2, 0], "row": [0.0, 1.0, 0.0]},
        {},
        {"out": [[0.0, 1.0, 0.0], [4.0, 5.0, 6.0], [0.0, 1.0, 0.0]]},
    ),
    (
        "BooleanMaskLengths",
        {"lengths": L, "mask": [True, False, True, True, False]},
        {},
        {"out": [1, 0, 2]},
    ),
    (
        "ConcatBatchMatMulBatchGatherOp",
        {"indices": [1, 3], "x0": [[1.0, 2.0]], "x1": [[3.0, 5.0]]},
        {},
        {"out": [[13.0, 34.0]]},
    ),
    ("ReduceFrontMean", {"data": F}, {}, {"out": [5.0, 6.0]}),
    ("ReduceFrontMax", {"data": F}, {}, {"out": [9.0, 10.0]}),
    (
        "ReduceFrontWeightedSum",
        {"data": F[:2], "scalars": [2.0, -1.0]},
        {},
        {"out": [-1.0, 0.0]},
    ),
    (
        "UnsortedSegmentMean",
        {"data": F[:3], "segment_ids": [2, 0, 2]},
        {"num_segments": 4},
        {"out": [[3.0, 4.0], [0.0, 0.0], [3.0, 4.0], [0.0, 0.0]]},
    ),
    (
        "UnsortedSegmentWeightedSum",
        {"data": F[:3], "scalars": [1.0, 2.0, -1.0], "segment_ids": [1, 0, 1]},
        {"num_segments": 3},
        {"out": [[6.0, 8.0], [-4.0, -4.0], [0.0, 0.0]]},
    ),
    (
        "UnsortedSegmentSum",
        {"data": F[:3], "segment_ids": [1, 0, 1]},
        {"num_segments": 3},
        {"out": [[3.0, 4.0], [6.0, 8.0], [0.0, 0.0]]},
    ),
    (
        "SparseUnsortedSegmentSum",
        BAG,
        {"num_segments": 4},
        {"out": [[1.0, 2.0], [0.0, 0.0], [12.0, 14.0], [0.0, 0.0]]},
    ),
    (
        "SparseUnsortedSegmentMean",
        BAG,
        {"num_segments": 4},
        {"out": [[1.0, 2.0], [0.0, 0.0], [6.0, 7.0], [0.0, 0.0]]},
    ),
    (
        "SparseUnsortedSegmentWeightedSum",
        {**BAG, "scalars": [2.0, 3.0, 1.0]},
        {"num_segments": 4},
        {"out": [[3.0, 6.0], [0.0, 0.0], [21.0, 24.0], [0.0, 0.0]]},
    ),
    (
        "SparseLengthsMax",
        {"data": GRID, "indices": [2, 0, 1], "lengths": [2, 1]},
        {},
        {"out": [[7.0, 8.0, 9.0], [4.0, 5.0, 6.0]]},
    ),
    (
        "PackSegments",
        {"lengths": L, "data": F},
        {"return_presence_mask": True},
        {"out": np.array(PADDED, np.float32), "presence_mask": MASK},
    ),
    (
        "PackSegments",
        {"lengths": L, "data": F},
        {"return_presence_mask": True, "max_length": 1},
        {
            "out": np.array(PADDED, np.float32)[:, :1],
            "presence_mask": np.array(MASK)[:, :1],
        },
    ),
    (
        "LengthsPad",
        {"data": [1, 2, 3, 4, 5], "lengths": L},
        {"target_length": 3, "padding_value": 9},
        {"out": [1, 2, 9, 9, 9, 9, 3, 4, 5]},
    ),
    (
        "RemovePadding",
        {"data": F, "lengths": [3, 2]},
        {"padding_width": 1},
        {"out": F[1:2], "lengths_out": [1, 0]},
    ),
    (
        "RemovePadding",
        {"data": F, "lengths": [3, 2]},
        WIDTHS,
        {"out": F[[1, 2, 4]], "lengths_out": [2, 1]},
    ),
    (
        "GatherPadding",
        {"data": F, "lengths": [3, 2]},
        WIDTHS,
        {"start": [8.0, 10.0], "end": [0.0, 0.0]},
    ),
    (
        "UnpackRNNSequence",
        {"values": np.array(PADDED, np.float32).swapaxes(0, 1), "lengths": L},
        {},
        {"out": F},
    ),
    (
        "ReversePackedSegs",
        {"data": TBD, "lengths": [5, 2]},
        {},
        {"out": np.stack([F[::-1], 10 * F[[1, 0, 2, 3, 4]]], 1)},
    ),
    (
        "SequenceMask",
        {"data": GRID, "lengths": [1, 3, 0]},
        {"mode": "sequence"},
        {"out": [[1, -INF, -INF], [4, 5, 6], [-INF] * 3]},
    ),
    (
        "SequenceMask",
        {"data": GRID},
        {"mode": "upper"},
        {"out": [[1, -INF, -INF], [4, 5, -INF], [7, 8, 9]]},
    ),
    (
        "SequenceMask",
        {"data": GRID},
        {"mode": "lower"},
        {"out": [[1, 2, 3], [-INF, 5, 6], [-INF, -INF, 9]]},
    ),
    (
        "SequenceMask",
        {"data": GRID},
        {"mode": "upperdiag"},
        {"out": [[-INF] * 3, [4, -INF, -INF], [7, 8, -INF]]},
    ),
    (
        "SequenceMask",
        {"data": GRID},
        {"mode": "lowerdiag"},
        {"out": [[-INF, 2, 3], [-INF, -INF, 6], [-INF] * 3]},
    ),
    (
        "SequenceMask",
        {"data": GRID, "centers": [0, 1, 2]},
        {"mode": "window", "radius": 1},
        {"out": [[1, 2, -INF], [4, 5, 6], [-INF, 8, 9]]},
    ),
    (
        "SplitByLengths",
        {"data": F, "lengths": [1, 1, 3, 0]},
        {"num_parts": 2},
        {"out0": F[:2], "out1": F[2:]},
    ),
    (
        "DotProductWithPadding",
        {"x": GRID[:2], "y": [[1.0], [2.0]]},
        {"pad_value": 10.0},
        {"out": [51.0, 118.0]},
    ),
    (
        "Unique",
        {"indices": [7, 3, 7, 7]},
        {},
        {"unique": [3, 7], "remapping": [1, 0, 1, 1]},
    ),
    (
        "IsMemberOf",
        {"data": [1, 5, 2]},
        {"value": [2, 1]},
        {"out": [True, False, True]},
    ),
    (
        "Partition",
        {"x": [4, 7, -1, 6], "v": [0.0, 1.0, 2.0, 3.0]},
        {},
        {"x0": [4, 6], "v0": [0.0, 3.0], "x1": [7, -1], "v1": [1.0, 2.0]},
    ),
    (
        "LengthsPartition",
        {"lengths": [3, 0, 1], "x": [4, 7, -1, 6]},
        {},
        {"l0": [1, 0, 1], "x0": [4, 6], "l1": [2, 0, 0], "x1": [7, -1]},
    ),
    (
        "GatherByKey",
        {"keys": [4, 7, -1, 6], "v0": [[0.0], [3.0]], "v1": [[1.0], [2.0]]},
        {},
        {"out": [[0.0], [1.0], [2.0], [3.0]]},
    ),
    (
        "MergeIdLists",
        {"lengths0": [2, 0], "ids0": [9, 4], "lengths1": [2, 1], "ids1": [4, 1, 3]},
        {},
        {"lengths": [3, 1], "ids": [1, 4, 9, 3]},
    ),
    (
        "StumpFunc",
        {"data": [1.0, 2.0, 3.0]},
        {"threshold": 2.0, "low_value": -1.0, "high_value": 5.0},
        {"out": [-1.0, -1.0, 5.0]},
    ),
    (
        "StumpFuncIndex",
        {"data": [1.0, 3.0, 2.0]},
        {"threshold": 2.0},
        {"low": [0, 2], "high": [1]},
    ),
    (
        "MergeDenseFeatureTensors",
        {"dense": GRID[:2], "presence": [[True, False, True], [False, True, False]]},
        {"feature_ids": [11, 12, 13]},
        {"lengths": [2, 1], "keys": [11, 13, 12], "values": [1.0, 3.0, 5.0]},
    ),
    (
        "MergeSingleScalarFeatureTensors",
        {"v1": [1.0, 2.0], "p1": [True, True], "v2": [3.0, 4.0], "p2": [False, True]},
        {"feature_ids": [11, 12]},
        {"lengths": [1, 2], "keys": [11, 11, 12], "values": [1.0, 2.0, 4.0]},
    ),
    (
        "MergeSingleMapFeatureTensors",
        {"l1": [1, 1], "k1": [5, 6], "v1": [1.0, 2.0], "p1": [True, True]}
        | {"l2": [2, 0], "k2": [7, 8], "v2": [3.0, 4.0], "p2": [True, False]},
        {"feature_ids": [11, 12]},
        {"lengths": [2, 1], "keys": [11, 12, 11], "values_lengths": [1, 2, 1]}
        | {"values_keys": [5, 7, 8, 6], "values": [1.0, 3.0, 4.0, 2.0]},
    ),
    (
        "MergeMultiScalarFeatureTensors",
        {"l1": [1, 2], "k1": [5, 6, 7], "v1": [1.0, 2.0, 3.0]}
        | {"l2": [1, 1], "k2": [8, 9], "v2": [4.0, 5.0]},
        {},
        {
            "lengths": [2, 3],
            "keys": [5, 8, 6, 7, 9],
            "values": [1.0, 4.0, 2.0, 3.0, 5.0],
        },
    ),
    (
        "MergeMultiListFeatureTensors",
        {"l1": [1, 1], "k1": [5, 6], "c1": [1, 2], "v1": [1.0, 2.0, 3.0]}
        | {"l2": [0, 1], "k2": [8], "c2": [1], "v2": [4.0]},
        {},
        {"lengths": [1, 2], "keys": [5, 6, 8], "values_lengths": [1, 2, 1]}
        | {"values": [1.0, 2.0, 3.0, 4.0]},
    ),
]

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


EXAMPLES += _quantized_examples()


def _id(example):
    operator, inputs, args, outputs = example
    wants = row_of(operator, {**inputs, **args, **outputs}).wants
    return "-".join([operator, *(v or k for k, v in wants.items())])


@pytest.mark.parametrize("example", EXAMPLES, ids=_id)
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
    listed = _RECORDED.golden["operators"].values()
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
