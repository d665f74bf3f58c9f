"""Tables over many devices: only the rows a batch needs are moved."""

from sparsejax.parallel._bag import embedding_bag as embedding_bag
from sparsejax.parallel._batched_pull import batched_pull as batched_pull
from sparsejax.parallel._checkpoint import Checkpointer as Checkpointer
from sparsejax.parallel._columns import shard_columns as shard_columns
from sparsejax.parallel._data_parallel import (
    DataParallelStep as DataParallelStep,
    data_parallel as data_parallel,
)
from sparsejax.parallel._lookup import (
    lookup as lookup,
    measure_capacity as measure_capacity,
)
from sparsejax.parallel._owners import Metrics as Metrics
from sparsejax.parallel._plan import plan as plan
from sparsejax.parallel._replicated import pmean as pmean, psum as psum
from sparsejax.parallel._rows import ShardedRows as ShardedRows
from sparsejax.parallel._spread_store import SpreadStore as SpreadStore
from sparsejax.parallel._table import (
    ShardedTable as ShardedTable,
    shard_rows as shard_rows,
)
from sparsejax.parallel._wire import wire_bytes as wire_bytes
