"""Rules: how the walk treats each primitive that takes a table.

Importing this package registers them.

- `gather.py`: gather, slice, dynamic_slice and our own read_rows, which read rows.
- `bag_sum.py`: our own bag_sum, sums of rows.
- `elementwise.py`: casts and arithmetic.
- `shapes.py`: transpose, reshape, squeeze, broadcast.
- `calls.py`: jit, closed_call, custom_jvp, custom_vjp.
- `control_flow.py`: scan, cond, checkpoint.
- `shard_map.py`: shard_map.
"""

from sparsejax.transform.rules import (
    bag_sum as bag_sum,
    calls as calls,
    control_flow as control_flow,
    elementwise as elementwise,
    gather as gather,
    shapes as shapes,
    shard_map as shard_map,
)
