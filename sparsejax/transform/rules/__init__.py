"""Rules: how the walk treats each primitive that takes a table.

Importing this package registers them.

- `gather.py`: gather, slice, dynamic_slice and our own read_rows, which read rows.
- `bag_sum.py`: our own bag_sum, sums of rows.
- `views.py`: casts, arithmetic, transpose, reshape, squeeze, broadcast.
- `control_flow.py`: jit, closed_call, custom_jvp, custom_vjp, scan, cond, checkpoint.
- `shard_map.py`: shard_map.
"""

from sparsejax.transform.rules import (
    bag_sum as bag_sum,
    control_flow as control_flow,
    gather as gather,
    shard_map as shard_map,
    views as views,
)
