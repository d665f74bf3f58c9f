"""Every lowering of reads, sums and merges, on any device, against NumPy.

The lowering that a platform chooses is what all other tests run.
"""

import functools
import importlib.util
import json
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import sparsejax as sj
from helpers import assert_same_bits, dense, eqns_of, in_range, run_python
from sparsejax._lookup import lookup
from sparsejax._lookup.bag_sum import add_merged_bags
from sparsejax._lookup.lowerings import cpu, xla
from sparsejax._rows import merge, merge_cuda


V, D = 7, 3
RNG = np.random.default_rng(0)


def draw(*shape, dtype="float32"):
    return RNG.normal(size=shape).astype(dtype)


# ------------------------------------------------------------------ reads

read_rows: Any = lookup.read_rows
IDS = np.array([3, 0, 5, 5, 2, 6, 7, 100, -1, -100], np.int32)


@pytest.mark.window
@pytest.mark.parametrize("fill", [None, 5])
@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "float16", "float64", "int32"]
)
def test_reads(dtype, fill, x64):
    """Bit by bit, NaN too; an id out of range reads the nearest row, or the fill."""
    dtype = jnp.dtype(dtype)
    tables = [np.arange(np.prod(s)).reshape(s) for s in ((V,), (V, D), (V, 2, 3))]
    tables = [x.astype(dtype) for x in tables]
    if dtype.name != "int32":
        tables[1][2] = np.array([np.nan, np.inf, -0.0], dtype)
    options = {} if fill is None else {"fill": np.array(fill, dtype).tobytes()}
    lowerings = read_rows, cpu.read_rows, xla.read_rows
    reads = [functools.partial(f, **options) for f in lowerings]

    @jax.jit
    def run(tables):
        ids = IDS, IDS[:0], IDS[8:9]
        return [[[read(t, i) for read in reads] for i in ids] for t in tables]

    for table, found in zip(tables, run(tables), strict=True):
        want = table[IDS.clip(0, V - 1)]
        if fill is not None:
            want[~in_range(IDS, V)] = fill
        for expected, outs in zip((want, want[:0], want[8:9]), found, strict=True):
            for got in outs:
                assert_same_bits(got, expected)
    assert_same_bits(read_rows(tables[1], IDS[:5]), tables[1][IDS[:5]])  # outside jit


@pytest.mark.slow
def test_reads_under_vmap_and_derivatives(x64):
    table, ids = np.sin(np.arange(21.0)).reshape(V, D), np.array([[4, 4], [0, 6]])
    tables = np.stack([table, -table])
    for axes, args, want in (
        ((None, 0), (table, ids), table[ids]),
        ((0, None), (tables, ids[0]), tables[:, ids[0]]),
        ((0, 0), (tables, ids), np.stack([t[i] for t, i in zip(tables, ids)])),
    ):
        assert_same_bits(jax.jit(jax.vmap(read_rows, axes))(*args), want)
    fun = lambda t: jnp.sum(jnp.sin(read_rows(t, ids[0])))
    plain = lambda t: jnp.sum(jnp.sin(t[ids[0]]))
    gradients = jax.jit(lambda t: [jax.grad(f)(t) for f in (fun, plain)])(table)
    np.testing.assert_allclose(*gradients)
    check_grads(jax.jit(fun), (table,), 2)


@pytest.mark.window
def test_a_fill_is_a_key_of_a_compiled_program():
    """NaN equals itself there, and a zero no zero of another type."""
    ids, table = np.array([1, 9]), np.ones((V, 2), np.float32)

    def programs():
        loss = lambda t: jnp.nansum(jnp.take(t, ids, axis=0))
        eqns = eqns_of(sj.grad(loss), table)
        return [e.params["fill"] for e in eqns if e.primitive.name == "read_rows"]

    assert programs() == programs() and programs()[0]
    for dtype in (jnp.float16, jnp.bfloat16):
        read = lambda t: jnp.sum(sj.lookup(t, ids, mode="zero").astype(float))
        g = jax.jit(sj.grad(read))(table.astype(dtype))
        assert g.dtype == dtype and g.capacity == 2


@pytest.mark.window
def test_no_branch_and_no_table_shows_in_the_jaxpr():
    jaxpr = jax.make_jaxpr(lambda t, i: read_rows(t, i))(jnp.ones((50, 3)), IDS)
    assert "cond" not in str(jaxpr) and "read_rows" in str(jaxpr)


# ------------------------------------------------------------------ bags

BAGS = {  # the shape of the ids, the number of bags if segmented, whether they ascend
    "columns": ((5, 1), None, False),
    "blocks of columns": ((5, 17), None, False),
    "pieces of 8": ((40,), 3, True),
    "in no order": ((40,), 3, False),
    "pieces of 2": ((100,), 30, True),
    "pieces of a bag": ((30,), 1, True),
}


def weights_of_rows(ids, bags, weights, count):
    """`[count, V]`: how often each bag reads each row."""
    out = np.zeros((count, V))
    inside = in_range(ids, V) & in_range(bags, count)
    np.add.at(out, (bags[inside], ids[inside]), weights[inside])
    return out


@pytest.mark.parametrize("weighted, dtype", [(False, "float32"), (True, "float64")])
def test_bags(weighted, dtype, x64):
    """Sums of rows, and their transposes: products with a matrix."""
    cases = []
    for shape, count, is_sorted in BAGS.values():
        ids = RNG.integers(-3, V + 3, shape).astype(np.int32)
        if count is None:
            bags = np.broadcast_to(np.arange(shape[0])[:, None], shape)
        else:
            bags = RNG.integers(-1, count + 2, shape)
            bags = np.sort(bags) if is_sorted else bags
        weights = draw(*shape, dtype=dtype) if weighted else np.ones(shape)
        number = shape[0] if count is None else count
        spec = xla.BagSpec(count is not None, weighted, number, is_sorted)
        args = [ids, *([bags] if count else []), *([weights] if weighted else [])]
        cases.append((spec, args, weights_of_rows(ids, bags, weights, number)))
    table = draw(V, D, dtype=dtype)
    sums = [draw(spec.num_bags, D, dtype=dtype) for spec, *_ in cases]

    @jax.jit
    def run(table, sums, args):
        found = []
        for (spec, *_), total, own in zip(cases, sums, args, strict=True):
            of_bags = [f.bag_sum(table, *own, spec=spec) for f in (cpu, xla)]
            transposes = xla.add_bags, add_merged_bags
            added = [f(total, *own, height=V, spec=spec) for f in transposes]
            found.append((of_bags, added))
        return found

    found = run(table, sums, [args for _, args, _ in cases])
    tolerance = 1e-5 if dtype == "float32" else 1e-13
    for (_, _, matrix), total, (of_bags, added) in zip(cases, sums, found, strict=True):
        for outs, want in (of_bags, matrix @ table), (added, matrix.T @ total):
            for got in outs:
                assert got.dtype == dtype
                np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)


# ------------------------------------------------------------------ merges for CUDA


@pytest.mark.parametrize(
    ("n", "height"), [(1, 5), (8, 1), (300, 2), (4097, 800)], ids=str
)
def test_merges_as_a_loop_does(n, height):
    rows = RNG.integers(0, height + 1, n).astype(np.int32)
    values = draw(n, 3)
    merge = jax.jit(merge_cuda.merge_rows, static_argnames="height")
    distinct, at, sums, count = map(np.asarray, merge(rows, values, height=height))
    ids = distinct[:count]
    np.testing.assert_array_equal(ids, np.unique(rows[rows < height]))
    assert (distinct[count:] == height).all() and (at[count:] == n).all()
    expected = dense(rows, values, height)[ids]
    np.testing.assert_allclose(sums[at[:count]], expected, rtol=1e-4, atol=1e-4)


def test_merges_several_as_one_by_one():
    heights = 5, 40, 17, 9
    shapes = [(30, 3), (30, 3), (12, 3), (30, 3)]
    rows = [jnp.asarray(RNG.integers(0, h + 1, s[0])) for h, s in zip(heights, shapes)]
    values = [jnp.asarray(draw(*s)) for s in shapes]

    @jax.jit
    def run(rows, values):
        several = [*zip(rows, values, heights)]
        one_by_one = [merge_cuda.merge_rows(*one) for one in several]
        return merge_cuda.merge_each(several), one_by_one

    for found, want in zip(*run(rows, values), strict=True):
        chex.assert_trees_all_equal(found, want)


@pytest.mark.parametrize(("n", "capacity"), [(300, 20), (300, 3), (4, 9)], ids=str)
def test_coalesces_as_elsewhere(n, capacity):
    g = sj.SelectedRows(RNG.integers(0, 13, n), draw(n, 2), 12)
    options = {"height": 12, "capacity": capacity}

    @jax.jit
    def run(g):
        rows = g.safe_rows()
        on_cuda = merge_cuda.merge(rows, g.values, **options)
        plan = merge.merge_plan(rows, **options)
        return g.coalesce(capacity, return_overflow=True), plan, on_cuda

    (expected, overflow), plan, (rows, slot, values, count) = run(g)
    chex.assert_trees_all_equal(plan, (rows, slot, count))
    np.testing.assert_array_equal(rows, expected.rows)
    np.testing.assert_allclose(values, expected.values, rtol=1e-5, atol=1e-6)
    assert count - min(capacity, int(count)) == overflow


def test_a_sum_that_is_not_finite_stays_in_its_run():
    values = jnp.asarray([[1.0], [jnp.nan], [2.0], [jnp.inf], [3.0]])
    rows = jnp.asarray([4, 2, 4, 3, 1], jnp.int32)
    merge_rows = jax.jit(merge_cuda.merge_rows, static_argnums=2)
    distinct, at, sums, _ = map(np.asarray, merge_rows(rows, values, 9))
    found = dict(zip(distinct.tolist(), sums[np.minimum(at, 4)][:, 0].tolist()))
    assert found[4] == 3 and found[1] == 3 and found[3] == np.inf
    assert np.isnan(found[2])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "launches"),
    [("adam", 30), ("adagrad", 30), ("tables", 40), ("coalesce", 30)]
    + [("unique", 30), ("bags", 30)],
)
def test_the_program_of_a_step(name, launches):
    """Compiled for a described GPU: no loops, few kernels, tables in place."""
    plugins = "jax_cuda12_plugin", "jax_cuda13_plugin"
    if not any(map(importlib.util.find_spec, plugins)):
        pytest.skip("needs jax[cuda12] or jax[cuda13]")
    facts = json.loads(run_python("tests/tools/cuda_program.py", name).splitlines()[-1])
    assert facts["kernels"] > 5  # the files were read
    assert facts["compare_and_swap"] == facts["float_atomics"] == 0
    assert facts["loops"] == 0 and facts["launches"] <= launches
    assert facts["tables_aliased"] and not facts["table_copies"]
