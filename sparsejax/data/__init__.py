"""Data sets and batches of static capacity, and readers of sparse text formats.

Data sets and batches of NumPy arrays and SegmentTensors

- `ArrayDataset`: columns of equal length: arrays, CSR, lists of ids,
  SegmentTensors.
- `SimpleDataset`: a sequence of items.
- `DataLoader`: batches of one static shape, shuffled and sharded; it resumes
  exactly.

Files

- `read_csv_ids`: labels, numbers and categories, as in Criteo's logs or ratings.
- `read_parquet_ids`: the same of a Parquet file.
- `iter_csv_ids`, `iter_parquet_ids`: the same, in chunks.
- `HashIds`, `Vocabulary`: ids of words, by a hash or by a list; from files and from
  columns of data frames.
- `read_vectors`: pretrained vectors of words, as GloVe, word2vec and fastText.
- `read_libsvm`, `write_libsvm`: rows of `label index:value ...`.
"""

from sparsejax.data._datasets import (
    ArrayDataset as ArrayDataset,
    SimpleDataset as SimpleDataset,
)
from sparsejax.data._hash_ids import HashIds as HashIds
from sparsejax.data._libsvm import (
    read_libsvm as read_libsvm,
    write_libsvm as write_libsvm,
)
from sparsejax.data._loader import DataLoader as DataLoader
from sparsejax.data._read_ids import (
    iter_csv_ids as iter_csv_ids,
    iter_parquet_ids as iter_parquet_ids,
    read_csv_ids as read_csv_ids,
    read_parquet_ids as read_parquet_ids,
)
from sparsejax.data._vectors import read_vectors as read_vectors
from sparsejax.data._vocabulary import Vocabulary as Vocabulary
