"""Rows for keys that are not known in advance."""

from sparsejax._index.hash_index import HashIndex as HashIndex
