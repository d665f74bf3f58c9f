"""Row-sparse tables in host memory or a file, larger than the device.

- `KVStore`: named tables, whose rows are pulled and pushed; `prefetch`
  reads the next batch's rows while a step runs.
- `TableStats`: the numbers of one table, of `KVStore.stats()`.

`sparsejax.nn.Trainer` does the pulling and pushing for a model;
`sparsejax.parallel.SpreadStore` is a store over several hosts.
"""

from sparsejax.store._stats import TableStats as TableStats
from sparsejax.store._store import KVStore as KVStore
