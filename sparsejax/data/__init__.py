"""Data sets and batches of static capacity, and ids of words.

Data sets and batches of NumPy arrays and SegmentTensors

- `ArrayDataset`: columns of equal length: arrays, CSR, lists of ids,
  SegmentTensors.
- `SimpleDataset`: a sequence of items.
- `DataLoader`: batches of one static shape, shuffled and sharded; it resumes
  exactly.

Ids of words, of files, data frames, Arrow tables and columns

- `Vocabulary`: ids by a list of words, which `Vocabulary.build` counts.
- `HashIds`: ids by a hash.
- `read_ids`: labels, numbers and ids, as click logs and ratings have them.
- `iter_ids`: the same, in chunks.

What reads files and data frames needs pyarrow: `pip install 'sparsejax[data]'`.
"""

from sparsejax.data._datasets import (
    ArrayDataset as ArrayDataset,
    SimpleDataset as SimpleDataset,
)
from sparsejax.data._hash_ids import HashIds as HashIds
from sparsejax.data._loader import DataLoader as DataLoader
from sparsejax.data._read_ids import iter_ids as iter_ids, read_ids as read_ids
from sparsejax.data._vocabulary import Vocabulary as Vocabulary
