"""Data sets and batches of static capacity, and readers of sparse text formats."""

from sparsejax.data._csv_ids import (
    iter_csv_ids as iter_csv_ids,
    read_csv_ids as read_csv_ids,
)
from sparsejax.data._dataset import (
    ArrayDataset as ArrayDataset,
    SimpleDataset as SimpleDataset,
)
from sparsejax.data._encoders import HashIds as HashIds, Vocabulary as Vocabulary
from sparsejax.data._libsvm import (
    read_libsvm as read_libsvm,
    write_libsvm as write_libsvm,
)
from sparsejax.data._loader import DataLoader as DataLoader
