"""The arguments of a DataLoader, checked when it is made."""

import logging
import operator
from typing import Any

import jax
import numpy as np
from jax.experimental.layout import Format

from sparsejax import _arguments
from sparsejax.data._dataset import ArrayDataset
from sparsejax.data._order import Order


CALL = "sparsejax.data.DataLoader"
LOG = logging.getLogger("sparsejax.data")

_PADDED = (
    "%s: %d rows do not divide into batches of %d%s, so each epoch ends with %d row(s) "
    "of padding, zeros and empty rows that look like data. mask=True marks them (for "
    "x, y, mask in loader), drop_remainder=True leaves the rest out of the epoch, and "
    "drop_remainder=False says that this is meant."
)


def import_grain() -> Any:
    """The module, or an error that says how to get it."""
    try:
        import grain
    except ImportError:
        raise ImportError(
            "sparsejax.data.DataLoader needs grain, which is not installed. pip "
            "install 'sparsejax[data]' brings it."
        ) from None
    return grain


def as_int(name: str, found: Any, least: int, call: str = CALL) -> int:
    """An int of at least `least`, or an error."""
    try:
        value = operator.index(found)
    except TypeError:
        value = least - 1
    if value < least:
        raise ValueError(
            f"{call}: {name} must be an int of at least {least}, got "
            f"{_arguments.show(found)}."
        )
    return value


def as_bool(name: str, found: Any, call: str = CALL) -> bool:
    """True or False, or an error."""
    if not isinstance(found, (bool, np.bool_)):
        raise TypeError(
            f"{call}: {name} must be True or False, got {_arguments.show(found)}."
        )
    return bool(found)


def as_shard(found: Any) -> tuple[int, int]:
    """(index, count), or an error."""
    try:
        index, count = map(operator.index, found)
    except (TypeError, ValueError):
        index, count = 0, 0
    if not 0 <= index < count:
        raise ValueError(
            f"{CALL}: shard must be (index, count) with 0 <= index < count, got "
            f"{found!r}. In a job of several processes: (jax.process_index(), "
            "jax.process_count())."
        )
    return index, count


def as_device(found: Any) -> Any:
    """What `jax.device_put` takes, a tree of them too, or an error."""
    kinds = jax.Device, jax.sharding.Sharding, jax.sharding.PartitionSpec, Format
    leaves = jax.tree.leaves(found, is_leaf=lambda x: isinstance(x, kinds))
    if not all(isinstance(x, kinds) for x in leaves):
        raise TypeError(
            f"{CALL}: device must be a jax.Device or a sharding, or None to leave "
            f"batches in NumPy, got {found!r}. jax.devices('cpu')[0] is a device."
        )
    return found


def check_batches(order: Order) -> None:
    """An error if an epoch has no batch."""
    if not len(order):
        raise ValueError(
            f"{CALL}: {order.num_rows} rows on {order.shard[1]} shard(s) make no full "
            f"batch of {order.batch_size}. Take a smaller batch_size, or "
            "drop_remainder=False."
        )


def warn_of_padding(order: Order) -> None:
    """Says in the log that there is padding, where nobody has asked for it."""
    count = order.shard[1]
    padding = len(order) * order.batch_size * count - order.num_rows
    if padding:
        shards = f" on {count} shards" if count > 1 else ""
        LOG.warning(_PADDED, CALL, order.num_rows, order.batch_size, shards, padding)


def as_mask(mask: Any, dataset: ArrayDataset) -> bool:
    """Whether batches have a mask."""
    mask = as_bool("mask", mask)
    taken = dataset.join([None] * len(dataset.columns))
    if mask and isinstance(taken, dict) and "mask" in taken:
        raise ValueError(
            f"{CALL}: mask=True puts the mask under the key 'mask', and the data set "
            "has such a column. Rename it."
        )
    return mask
