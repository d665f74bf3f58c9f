"""The lowerings for CUDA: their results on any device, and their compiled programs."""

import importlib.util
import json
import subprocess
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pages
import sparsejax as sj
from sparsejax._lookup.bag_sum import add_merged_bags
from sparsejax._lookup.lowerings import xla
from sparsejax._rows import merge, merge_cuda


@pytest.mark.parametrize(
    ("n", "height"), [(1, 5), (8, 1), (300, 2), (4097, 800)], ids=str
)
def test_merges_as_a_loop_does(n, height):
    rng = np.random.default_rng(n)
    rows = rng.integers(0, height + 1, n).astype(np.int32)
    values = rng.standard_normal((n, 3)).astype(np.float32)
    merge = jax.jit(merge_cuda.merge_rows, static_argnames="height")
    distinct, at, sums, count = map(np.asarray, merge(rows, values, height=height))
    expected, filled = np.zeros((height, 3)), rows < height
    np.add.at(expected, rows[filled], values[filled])
    ids = distinct[:count]
    np.testing.assert_array_equal(ids, np.unique(rows[filled]))
    assert (distinct[count:] == height).all() and (at[count:] == n).all()
    np.testing.assert_allclose(sums[at[:count]], expected[ids], rtol=1e-4, atol=1e-4)


def test_merges_several_as_one_by_one():
    rng = np.random.default_rng(0)
    heights = 5, 40, 17, 9
    shapes = [(30, 3), (30, 3), (12, 3), (30, 3)]
    rows = [jnp.asarray(rng.integers(0, h + 1, s[0])) for h, s in zip(heights, shapes)]
    values = [jnp.asarray(rng.standard_normal(s), jnp.float32) for s in shapes]

    @jax.jit
    def run(rows, values):
        several = [*zip(rows, values, heights)]
        one_by_one = [merge_cuda.merge_rows(*one) for one in several]
        return merge_cuda.merge_each(several), one_by_one

    for found, want in zip(*run(rows, values), strict=True):
        chex.assert_trees_all_equal(found, want)


@pytest.mark.parametrize(("n", "capacity"), [(300, 20), (300, 3), (4, 9)], ids=str)
def test_coalesces_as_elsewhere(n, capacity):
    rng = np.random.default_rng(n)
    g = sj.SelectedRows(rng.integers(0, 13, n), rng.standard_normal((n, 2)), 12)
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


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("segmented", [False, True])
def test_adds_bags_as_elsewhere(segmented, weighted):
    rng = np.random.default_rng(0)
    size = (60,) if segmented else (12, 5)
    ids = jnp.asarray(rng.integers(-1, 21, size), jnp.int32)  # of 20 rows
    bags = [jnp.asarray(rng.integers(-1, 13, 60), jnp.int32)] if segmented else []
    weights = [jnp.asarray(rng.standard_normal(size), jnp.float32)] if weighted else []
    args = jnp.asarray(rng.standard_normal((12, 3)), jnp.float32), ids, *bags, *weights
    spec = xla.BagSpec(segmented, weighted, num_bags=12)
    forms = xla.add_bags, add_merged_bags
    both = lambda *args: [add(*args, height=20, spec=spec) for add in forms]
    want, found = jax.jit(both)(*args)
    np.testing.assert_allclose(found, want, rtol=1e-5)


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
    script = [
        sys.executable,
        str(pages.ROOT / "tests" / "tools" / "cuda_program.py"),
        name,
    ]
    run = subprocess.run(script, capture_output=True, text=True, cwd=pages.ROOT)
    assert run.returncode == 0, run.stderr
    facts = json.loads(run.stdout.splitlines()[-1])
    assert facts["kernels"] > 5  # the files were read
    assert facts["compare_and_swap"] == facts["float_atomics"] == 0
    assert facts["loops"] == 0 and facts["launches"] <= launches
    assert facts["tables_aliased"] and not facts["table_copies"]
