"""Row-sparse tables in host memory or a file, larger than the device."""

from sparsejax.store._stats import TableStats as TableStats
from sparsejax.store._store import KVStore as KVStore
