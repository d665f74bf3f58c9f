"""The batches of an epoch, each made when it is asked for."""

from typing import Any

import numpy as np

from sparsejax.data import _columns
from sparsejax.data._buckets import Buckets
from sparsejax.data._dataset import ArrayDataset
from sparsejax.data._order import Order


class Batches:
    """An epoch as grain's RandomAccessDataSource of batches."""

    def __init__(
        self,
        dataset: ArrayDataset,
        order: Order,
        buckets: Buckets,
        mask: bool,
        batches: list[np.ndarray],
    ):
        self._dataset, self._order, self._buckets = dataset, order, buckets
        self._mask, self._batches = mask, batches

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: int) -> Any:
        rows, size = self._batches[index], self._order.batch_size
        capacities = self._buckets.pick(rows)
        columns = zip(self._dataset.columns, capacities)
        parts = [_columns.take(column, rows, size, room) for column, room in columns]
        batch = self._dataset.join(parts)
        if not self._mask:
            return batch
        mask = np.arange(size) < len(rows)
        if isinstance(batch, dict):
            return {**batch, "mask": mask}
        return (*(batch if isinstance(batch, tuple) else (batch,)), mask)
