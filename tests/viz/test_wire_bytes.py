"""wire_bytes against programs whose traffic one can count by hand."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P

import sparsejax as sj


pytestmark = pytest.mark.usefixtures("eight_devices")
B = 8 * 3 * 4  # bytes of one device's part below


def compiled(body):
    """`body` on one device's f32[8, 3] of a mesh of 2 x 4, compiled."""
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    spec = P(("a", "b"))
    mapped = jax.shard_map(
        body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
    )
    return jax.jit(mapped).lower(jax.ShapeDtypeStruct((64, 3), jnp.float32)).compile()


def collectives(x):
    shift = [(0, 1), (1, 2), (2, 3), (3, 0)]
    return (
        lax.psum(x, "b"),
        lax.psum((x, x[0]), "a"),
        lax.all_gather(x, "b", tiled=True),
        lax.psum_scatter(x * 2, "b", tiled=True),
        lax.all_to_all(x, "b", 0, 0, tiled=True),
        lax.ppermute(x, "b", shift),
        lax.all_gather(x, ("a", "b"), tiled=True),
    )


def test_every_kind_of_collective():
    found = sj.viz.wire_bytes(compiled(collectives))
    assert found.by_kind == {
        "all-reduce": 2 * B * 3 // 4 + 2 * (B + 12) // 2,
        "all-gather": 4 * B * 3 // 4 + 8 * B * 7 // 8,
        "reduce-scatter": B * 3 // 4,
        "all-to-all": B * 3 // 4,
        "collective-permute": B,
    }
    totals = [c.total for c in found.collectives]
    assert totals == sorted(totals, reverse=True)
    assert found.total == sum(totals) == sum(found.by_kind.values())
    assert {(c.kind, c.group_size) for c in found.collectives} >= {
        ("all-reduce", 4),
        ("all-reduce", 2),
        ("all-gather", 4),
        ("all-gather", 8),
    }
    lines = repr(found).splitlines()
    assert lines[0].split()[:2] == ["collective", "moves"]
    assert lines[-1].split() == ["total", f"{found.total:,}"]
    assert any("psum" in line for line in lines)


def loops_and_branches(x):
    known = lax.fori_loop(0, 5, lambda _, c: lax.psum(c, "b") / 4, x)
    unknown = lax.while_loop(
        lambda c: lax.psum(jnp.sum(c), ("a", "b")) < 100,
        lambda c: c + lax.all_to_all(c, "b", 0, 0, tiled=True),
        x,
    )
    branch = lax.cond(
        jnp.sum(x) > 0,
        lambda: lax.ppermute(x, "b", [(0, 1), (1, 0)]),
        lambda: lax.all_gather(x, ("a", "b"), tiled=True)[:8],
    )
    return known + unknown + branch


def test_loops_and_branches():
    program = compiled(loops_and_branches)
    loop, test, turn = 5 * 2 * B * 3 // 4, 2 * 4 * 7 // 8, B * 3 // 4
    found = sj.viz.wire_bytes(program)
    assert found.total == loop + (test + turn) + test + 8 * B * 7 // 8
    assert max(c.times for c in found.collectives) == 5
    found = sj.viz.wire_bytes(program, loop_trips=3, branch=min)
    assert found.total == loop + 3 * (test + turn) + test + B
    found = sj.viz.wire_bytes(program, loop_trips=0, branch=min)
    assert found.total == loop + test + B
    assert "all-to-all" not in found.by_kind


# Other platforms start collectives and wait for them later; they write groups and
# layouts in other ways.
ASYNC = """
HloModule step, replica_count=1, num_partitions=4

%sum (a: f32[], b: f32[]) -> f32[] {
  ROOT %add = f32[] add(%a, %b)
}

%wrapped (p: f32[8,8]) -> f32[2,8] {
  %p = f32[8,8]{1,0} parameter(0)
  ROOT %r = f32[2,8]{1,0} reduce-scatter(%p), replica_groups=[1,4]<=[4], to_apply=%sum
}

ENTRY %main (x: f32[8,8]) -> f32[] {
  %x = f32[8,8]{1,0:T(8,128)} parameter(0)
  %s = ((f32[8,8]{1,0}), f32[2,8]{1,0}, u32[]) async-start(%x), calls=%wrapped
  %d = f32[2,8]{1,0} async-done(%s), calls=%wrapped
  %g = (f32[8,8]{1,0:T(8,128)}, f32[16,8]{1,0:T(8,128)}) all-gather-start(%x), \
replica_groups=[2,2]<=[2,2]T(1,0), dimensions={0}
  %h = f32[16,8]{1,0:T(8,128)} all-gather-done(%g)
  %a = bf16[8,8]{1,0:T(8,128)(2,1)} all-reduce-start(%x), \
replica_groups={}, to_apply=%sum
  %b = bf16[8,8]{1,0} all-reduce-done(%a)
  %c = (f32[8,8]{1,0}, f32[8,8]{1,0}, u32[], u32[]) collective-permute-start(%x), \
source_target_pairs={{0,1}}
  %e = f32[8,8]{1,0} collective-permute-done(%c)
  %t = ((pred[8,8]{1,0}), pred[8,8]{1,0}) all-to-all-start(%x), \
replica_groups={{0,1},{2,3}}
  %u = pred[8,8]{1,0} all-to-all-done(%t)
  %v = s4[8,8]{1,0} ragged-all-to-all(%x, %x, %x, %x, %x, %x), \
replica_groups={{0,1,2,3}}
  %k = f32[8,8]{1,0} call(%x), to_apply=%inner
  ROOT %z = f32[] constant(0)
}

%inner (p: f32[8,8]) -> f32[8,8] {
  ROOT %q = f32[8,8]{1,0} collective-broadcast(%p), replica_groups={{0,1}}
}
"""


def test_asynchronous_forms_and_other_spellings():
    assert sj.viz.wire_bytes(ASYNC).by_kind == {
        "reduce-scatter": 256 * 3 // 4,
        "all-gather": 512 // 2,
        "all-reduce": 2 * 128 * 3 // 4,
        "collective-permute": 256,
        "all-to-all": 64 // 2,
        "ragged-all-to-all": 32 * 3 // 4,
        "collective-broadcast": 256,
    }
