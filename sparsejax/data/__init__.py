"""Data sets and batches of static capacity, and ids of words.

Data sets and batches of NumPy arrays and SegmentTensors

- `ArrayDataset`: columns of equal length: arrays, CSR, lists of ids,
  SegmentTensors.
- `SimpleDataset`: a sequence of items.
- `DataLoader`: batches of one static shape, shuffled and sharded; it resumes
  exactly.

Ids of words, of data frames, Arrow tables and dicts of columns

- `Vocabulary`: ids by a list of words, which `Vocabulary.build` counts.
- `HashIds`: ids by a hash.

Read files with pyarrow, pandas, polars or DuckDB. Words and data frames need pyarrow:
`pip install 'sparsejax[data]'`.
"""

from sparsejax.data._datasets import (
    ArrayDataset as ArrayDataset,
    SimpleDataset as SimpleDataset,
)
from sparsejax.data._hash_ids import HashIds as HashIds
from sparsejax.data._loader import DataLoader as DataLoader
from sparsejax.data._vocabulary import Vocabulary as Vocabulary
