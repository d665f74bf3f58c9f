"""Data sets and batches of static capacity, and readers of sparse text formats.

Data sets and batches of NumPy arrays and SegmentTensors

- `ArrayDataset`: columns of equal length: arrays, CSR, lists of ids,
  SegmentTensors.
- `SimpleDataset`: a sequence of items.
- `DataLoader`: batches of one static shape, shuffled and sharded; it resumes
  exactly.

Files

- `read_csv_ids`: labels, numbers and categories, as in Criteo's logs or ratings.
- `iter_csv_ids`: the same, in chunks.
- `HashIds`, `Vocabulary`: ids of categories, by a hash or by a list.
- `read_libsvm`, `write_libsvm`: rows of `label index:value ...`.
"""

from sparsejax.data._csv_ids import (
    iter_csv_ids as iter_csv_ids,
    read_csv_ids as read_csv_ids,
)
from sparsejax.data._datasets import (
    ArrayDataset as ArrayDataset,
    SimpleDataset as SimpleDataset,
)
from sparsejax.data._libsvm import (
    read_libsvm as read_libsvm,
    write_libsvm as write_libsvm,
)
from sparsejax.data._loader import DataLoader as DataLoader
from sparsejax.data._vocabulary import HashIds as HashIds, Vocabulary as Vocabulary
