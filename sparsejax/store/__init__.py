"""Row-sparse tables in host memory or a file, larger than the device.

- `KVStore`: named tables, whose rows are pulled and pushed; its `prefetch` reads the
  rows of the next batch while a step runs. With `mesh=` one pull serves all devices of
  a mesh, and the rows are sharded over the memory of its hosts.
- `StoredTable`: a table of a store in a tree of parameters, `store["name"]`. The
  store's `value_and_grad`, `train_step` (a `TrainStep`) and `forward` run functions of
  such trees on the rows that they read. `CachedRows` is the same for a `CachedTable`.
- `CachedTable`: the hot rows of a table on the device, with their optimizer state;
  a step trains them there.
- `KeyPolicy`: for a table whose rows belong to keys that come and go.
- `Changes`: the rows of a table that changed, from `KVStore.apply_changes`.
- `TableStats`, `CacheStats`: the size and usage of a table or cache, from `stats()`.

`sparsejax.nn.Trainer` pulls and pushes for a model.
"""

from sparsejax._index.policy import KeyPolicy as KeyPolicy
from sparsejax.store._cached import CachedTable as CachedTable, CacheStats as CacheStats
from sparsejax.store._snapshot import Changes as Changes
from sparsejax.store._store import KVStore as KVStore
from sparsejax.store._table import TableStats as TableStats
from sparsejax.store._train_step import TrainStep as TrainStep
from sparsejax.store._tree_tables import (
    CachedRows as CachedRows,
    StoredTable as StoredTable,
)
