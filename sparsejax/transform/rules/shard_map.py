"""The rule for `shard_map` with replicated tables.

Every device reads rows of its own copy. The deltas are sharded like the reads: over the
mesh axes along which the rows read vary. Over the other axes they are replicated: all
devices have the same rows and the same cotangent, which counts once. So the gradient
has `devices x n` slots, and nothing of the table's size is exchanged.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType, PartitionSpec

from sparsejax import _compat
from sparsejax.transform.interpreter import Body, RuleContext, Site, register_rule
from sparsejax.transform.liveness import Liveness, register_flow
from sparsejax.transform.table import TableRef


@register_rule(_compat.shard_map_p)
def _shard_map_rule(
    ctx: RuleContext,
    *inputs: Any,
    jaxpr: Any,
    mesh: Any,
    in_specs: Sequence[Any],
    out_specs: Sequence[Any],
    check_vma: bool,
    **others: Any,
) -> list[Any]:
    manual = _compat.manual_axes(others)
    inputs = tuple(
        ctx.dense(x, "splits it over devices") if any(spec) else x
        for x, spec in zip(inputs, in_specs)
    )
    places = [i for i, x in enumerate(inputs) if not isinstance(x, TableRef)]
    refs = [x for x in inputs if isinstance(x, TableRef)]
    body = Body(ctx, jaxpr)
    # Without vma types the axes along which reads vary are unknown: assume all.
    axes_of = lambda s: tuple(sorted(s.axes & manual if check_vma else manual))
    specs = [PartitionSpec(axes_of(site) or None) for site in body.sites]

    def run(arrays, packed, deltas):
        # The body must not close over arrays.
        tables = iter(
            dataclasses.replace(ref.with_operands(operands), array=array)
            for ref, (array, operands) in zip(refs, packed)
        )
        remaining = iter(arrays)
        args = [next(tables if isinstance(x, TableRef) else remaining) for x in inputs]
        pairs = zip(deltas, body.sites)
        deltas = [d.reshape(s.lead + d.shape[1:]) for d, s in pairs]
        outs, ids = body.walk(args, deltas)
        ids = [i.reshape(-1) for i in ids]
        if check_vma:
            pairs = zip(ids, body.sites)
            ids = [_compat.to_varying(i, site.axes) for i, site in pairs]
        outs = [ctx.dense(o, "returns it", live) for o, live in zip(outs, ctx.live)]
        return outs, ids

    deltas = ctx.reads.take(len(body.sites))  # their first axis is split over devices
    outs, ids = jax.shard_map(
        run,
        mesh=mesh,
        in_specs=([in_specs[i] for i in places], PartitionSpec(), specs),
        out_specs=(list(out_specs), specs),
        axis_names=manual,
        check_vma=check_vma,
    )([inputs[i] for i in places], [(r.array, r.operands) for r in refs], deltas)
    sites = [_from_outside(s, axes_of(s), mesh, manual) for s in body.sites]
    ctx.reads.add(sites, ids)
    return outs


@register_flow(_compat.shard_map_p)
def _shard_map_flow(
    liveness: Liveness, eqn: Any, out: tuple[bool, ...]
) -> Sequence[bool]:
    return liveness.inputs(_compat.open_jaxpr(eqn.params["jaxpr"])[0], out)


def _from_outside(
    site: Site, across: tuple[str, ...], mesh: Any, manual: frozenset
) -> Site:
    """Returns the site outside of the `shard_map`: the reads of all devices, flat.

    Args:
      site: inside.
      across: the manual axes along which its reads vary.
      mesh, manual: of the `shard_map`.
    """
    sizes = dict(zip(mesh.axis_names, mesh.axis_sizes))
    types = dict(zip(mesh.axis_names, mesh.axis_types))
    return Site(
        site.table,
        (math.prod(sizes[axis] for axis in across) * site.num_rows,),
        site.where,
        site.axes - manual,
        (across,) if any(types[a] == AxisType.Explicit for a in across) else (),
        mesh,
    )
