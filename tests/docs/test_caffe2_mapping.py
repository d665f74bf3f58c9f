"""caffe2.md: its code, checked against the answers of Caffe2's operators.

`golden/caffe2.json` and `.npz` hold the answers of Caffe2 (the header of the former
names their source). Operators without a recorded answer have a line in `caffe2.txt`,
worked by hand: operator, inputs, arguments, outputs.
"""

import collections
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import recorded
import sparsejax as sj
from recorded import Page, dense, page_ran, table_grad  # noqa: F401  (a fixture)
from sparsejax import _compat


pytestmark = pytest.mark.slow

PAGE = Page("caffe2")
CASES = {case["name"]: case for case in PAGE.cases}
inputs, outputs = PAGE.inputs, PAGE.outputs


# ------------------------------------------------------------------ the page

Row = collections.namedtuple("Row", "operator wants code")


def _row(cells):
    """A row of the page: `Op(name, name=value)` is for calls with these arguments."""
    name, _, wanted = cells[0].strip("`)").partition("(")
    pairs = [want.partition("=") for want in wanted.split(", ") if want]
    wants = {key: value or None for key, _, value in pairs}
    return Row(name, wants, None if cells[1] == "—" else cells[1].strip("`"))


TABLE_ROWS = [_row(cells) for cells in PAGE.rows]


def row_of(operator, given=()):
    """The row of the operator that names most of the given names and no others."""
    given = dict(given)
    fits = [
        row
        for row in TABLE_ROWS
        if row.operator == operator
        and all(k in given and v in (None, given[k]) for k, v in row.wants.items())
    ]
    return max(fits, key=lambda row: len(row.wants))


def run(operator, inputs, args, outputs):
    """The outputs of the page's code, as a tuple."""
    row = row_of(operator, {**inputs, **args, **dict.fromkeys(outputs)})
    num_parts = max(len(outputs) // max(len(inputs), 1), 1)
    names = {"inputs": list(inputs.values()), "num_parts": num_parts}
    result = eval(row.code, {**PAGE.blocks, **names, **inputs, **args})
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
EAGER = """
BatchBucketize BatchOneHot BooleanMask Find FindDuplicateElements GatherPadding
GatherRanges GatherRangesToDense KeySplit LengthsGather LengthsPartition
LengthsToWeights MergeIdLists MergeMultiMapFeatureTensors MergeSingleListFeatureTensors
Partition RemovePadding SparseLengthsSumSparseLookup Unique
""".split()


def answer(operator, given, args, names, cotangents, wrt) -> tuple[Any, Any]:
    """The page's outputs and its gradients, in Caffe2's order."""

    def loss(tables, floats):
        outputs = run(operator, {**given, **floats, **tables}, args, names)
        dots = [jnp.vdot(outputs[names.index(n)], c) for n, c in cotangents.items()]
        return sum(dots, jnp.zeros(())), outputs

    def outputs_and_grads(floats):
        tables = {name: floats[name] for name in wrt}
        if not tables:
            return run(operator, {**given, **floats}, args, names), tables
        grads, outputs = jax.grad(loss, has_aux=True)(tables, floats)
        return outputs, grads

    # One program for a case: ids and lengths are NumPy's, and known inside.
    floats = {n: jnp.asarray(x) for n, x in given.items() if x.dtype.kind == "f"}
    f = jax.jit(outputs_and_grads)
    if operator in EAGER:
        f, floats = outputs_and_grads, {n: jnp.asarray(x) for n, x in given.items()}
    outputs, grads = f(floats)
    return outputs, [grads[name] for name in wrt]


def recorded_answer(case) -> tuple[Any, Any]:
    parts = PAGE.get(case, "inputs"), case.get("args", {})
    names = list(case.get("outputs", ["out"]))
    cotangents, wrt = PAGE.get(case, "cotangents"), case.get("grads", ())
    return answer(case["op"], *parts, names, cotangents, wrt)


# The page lists their differences.
DIFFER = {
    "BooleanMask/basic",
    "Gather/empty_data",
    "PackSegments/max_length_truncates",
    "ScatterWeightedSum/int32_dup_w0",
    "SortedSegmentRangeLogSumExp/neg_inf",
    "SparseLengthsMean/float16_table",
    "SparseLengthsWeightedSum/float16_table",
}
ANSWERED = [name for name, case in CASES.items() if "outputs" in case]


@pytest.mark.parametrize("name", [n for n in ANSWERED if n not in DIFFER])
def test_recorded(name):
    case = CASES[name]
    with _compat.enable_x64(is_wide(case)):
        found, grads = recorded_answer(case)
        for got, want in zip(found, outputs(name).values(), strict=True):
            assert_answers(got, want)
        for got, want in zip(grads, PAGE.get(name, "grads").values(), strict=True):
            assert_answers(got, want)


SLICES = {case["op"]: name for name, case in CASES.items() if "slices" in case}


@pytest.mark.parametrize("name", SLICES.values())
def test_recorded_slices(name):
    """If Caffe2 returns (indices, rows), sparsejax.grad returns a SelectedRows."""
    case = CASES[name]
    (table,), given = case["slices"], inputs(case)
    (cotangent,) = PAGE.get(case, "cotangents").values()

    def product(x):
        given[table] = x
        return run(case["op"], given, case.get("args", {}), ["out"])[0] * cotangent

    grad = table_grad(product, given[table])
    assert isinstance(grad, sj.SelectedRows)
    assert_answers(dense(grad), PAGE.get(case, "grads")[table])


# ------------------------------------------------------------------ for caffe2.txt

L = [2, 0, 3]  # of five elements
F = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0], [9.0, 10.0]], np.float32)
TIES = [2.0, 1.0, 2.0, 2.0, 5.0]
INF = np.inf
PADDED = [[[1, 2], [3, 4], [0, 0]], [[0, 0]] * 3, [[5, 6], [7, 8], [9, 10]]]
MASK = [[True, True, False], [False] * 3, [True] * 3]
GRID = np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0, 8.0, 9.0]], np.float32)
WIDTHS = {"padding_width": 1, "end_padding_width": 0}
BAG = {"data": F, "indices": [4, 0, 1], "segment_ids": [2, 0, 2]}


def theirs(name, field):
    return tuple(PAGE.get(name, field).values())


def ours(name, wide=False):
    """Our outputs for a recorded case, and our gradients."""
    with _compat.enable_x64(wide):
        return recorded_answer(CASES[name])


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
    return table_grad(lambda t: op("SparseLengthsSum", data=t, **bags), table)


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
R8 = np.array([[0.0, 255.0, 1.0, 2.0], [3.0] * 4], np.float32)
R4 = np.array([[0.0, 15.0, 1.0, 2.0], [3.0] * 4], np.float32)
R2 = np.array([[0.0, 3.0, 1.0, 2.0], [3.0] * 4], np.float32)
ONE, THREE, ZERO = [0, 0, 128, 63], [0, 0, 64, 64], [0] * 4
B8 = np.array([[0, 255, 1, 2, *ONE, *ZERO], [*ZERO, *ZERO, *THREE]], np.uint8)
B8_HALF = np.array([[0, 255, 1, 2, 0, 60, 0, 0], [*ZERO, 0, 60, 0, 66]], np.uint8)
B4 = np.array([[15 << 4, 1 + (2 << 4), 0, 60, 0, 0], [0, 0, 0, 60, 0, 66]], np.uint8)
B2 = np.array([[12 + (1 << 4) + (2 << 6), 0, 60, 0, 0], [0, 0, 60, 0, 66]], np.uint8)
FAKE4 = np.array([[0, 15, 1, 2, *ONE, *ZERO], [*ZERO, *ONE, *THREE]], np.uint8)
FAKE2 = np.array([[0, 3, 1, 2, *ONE, *ZERO], [*ZERO, *ONE, *THREE]], np.uint8)
CODES = {"quantized": np.array([[0, 255, 1, 2], ZERO], np.uint8)}
CODES |= {"scale_bias": np.array([[1.0, 0.0], [1.0, 3.0]], np.float32)}
PRUNED = {"mapping": [-1, 0, 1, -1], "indices": [1, 0, 2], "lengths": [2, 1]}
PLAIN = {"indices": [0, 0, 1], "lengths": [2, 1]}
WEIGHED = {"weights": [2.0, 0.0, -1.0]}
HALF = np.float16


def _example(operator, *parts):
    return operator, *(eval(f"dict({part})", globals()) for part in parts)


DIFFERENT = [x for x in PAGE.lines if x[0].startswith("? ")]
EXAMPLES = [_example(*x) for x in PAGE.lines if x not in DIFFERENT]


@pytest.mark.parametrize("line", DIFFERENT, ids=lambda line: line[0])
def test_differs(line):
    PAGE.check_line(line, vars(recorded) | PAGE.blocks | globals())


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda x: x[0])
def test_by_hand(example):
    operator, inputs, args, wants = example
    inputs = {name: recorded.narrow(np.asarray(x)) for name, x in inputs.items()}
    got, _ = answer(operator, inputs, args, [*wants], {}, ())
    for x, want in zip(got, wants.values(), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(want))


# ------------------------------------------------------------------ nothing forgotten


def test_nothing_is_left_out():
    """Each operator, difference, error and row with code is in a test."""
    listed = PAGE.golden["operators"].values()
    assert {row.operator for row in TABLE_ROWS} == set().union(*listed)
    assert list(dict.fromkeys(x[0][2:] for x in DIFFERENT)) == PAGE.differences
    text = str(DIFFERENT)
    errors = [name for name, case in CASES.items() if "raises" in case]
    unused = [name for name in errors if f'"{name}"' not in text]
    assert unused == ["SparseLengthsMax/no_cpu_impl_raises"]  # it was not built in
    name_of = lambda row: (row.operator, *row.wants)
    cases = [CASES[name] for name in ANSWERED]
    calls = [(c["op"], c["inputs"], c.get("args", {}), c["outputs"]) for c in cases]
    run_here = {
        name_of(row_of(operator, {k: v for part in parts for k, v in part.items()}))
        for operator, *parts in [*EXAMPLES, *calls]
    }
    with_code = {name_of(row) for row in TABLE_ROWS if row.code}
    assert with_code <= run_here, with_code - run_here
