"""Tables over many devices: only the rows that a batch needs are sent.

The training step is the same as on one device: `sparsejax.value_and_grad` and
`sparsejax.optim.lazy` work on these tables::

    mesh = jax.make_mesh((8,), ("x",))
    table = sj.parallel.shard_rows(table, mesh, "x")  # row i on device i mod 8
    rows = table[ids]                                 # ids and rows are sent

Rows sharded over devices

- `shard_rows`: makes a `ShardedTable`, which a model reads like an array.
- `forward`: makes `jnp.take` read it outside of `sparsejax.value_and_grad`.
- `TableWise`: a layout for stacks, with whole tables on different devices.
- `top_k`: the rows with the highest scores.
- `measure_capacity`: the capacity at which a batch needs one round.
- `exchange_metrics`: the `Metrics` of a lookup: its rounds, rows and bytes.
- `ShardedRows`: the values of its gradient.

Other layouts

- `shard_columns`: each device holds some columns of every row.
- `data_parallel`: replicated tables; makes a `DataParallelStep`.
- `psum`, `pmean`: sum or average trees that contain SelectedRows over devices.

Files

- `save`, `restore`: trees that hold sharded tables, by orbax, on any number of devices.

Costs

- `plan`: estimates the cost of each layout of each table, and recommends one.
"""

# `_table_wise` is imported because it registers how stacks of tables are read.
from sparsejax.parallel import _table_wise as _table_wise
from sparsejax.parallel._checkpoint import restore as restore, save as save
from sparsejax.parallel._columns import shard_columns as shard_columns
from sparsejax.parallel._exchange import Metrics as Metrics
from sparsejax.parallel._layout import TableWise as TableWise
from sparsejax.parallel._plan import plan as plan
from sparsejax.parallel._read import (
    exchange_metrics as exchange_metrics,
    forward as forward,
    measure_capacity as measure_capacity,
)
from sparsejax.parallel._replicated import (
    DataParallelStep as DataParallelStep,
    data_parallel as data_parallel,
    pmean as pmean,
    psum as psum,
)
from sparsejax.parallel._rows import ShardedRows as ShardedRows
from sparsejax.parallel._table import (
    ShardedTable as ShardedTable,
    shard_rows as shard_rows,
)
from sparsejax.parallel._top_k import top_k as top_k
