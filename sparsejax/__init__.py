"""Sparse embedding training in JAX: a training step costs what its batch touches.

Two words change in a training step::

    loss, grads = sj.value_and_grad(loss_fn)(params, batch)   # for jax.value_and_grad
    updates, state = tx.update(grads, state, params)          # tx = sj.optim.lazy(tx)
    params = optax.apply_updates(params, updates)

The gradient of a table that the loss reads by rows is then a `SelectedRows`, and only
those rows of weights and optimizer state are touched.
"""

import importlib.metadata as _metadata

from sparsejax import extend as extend, optim as optim
from sparsejax._lookup import lookup as lookup
from sparsejax._row_arithmetic import concatenate as concatenate
from sparsejax._rows import SelectedRows as SelectedRows
from sparsejax._scatter import (
    scatter_assign as scatter_assign,
    scatter_weighted_sum as scatter_weighted_sum,
)
from sparsejax.transform import (
    DensifyError as DensifyError,
    explain as explain,
    grad as grad,
    value_and_grad as value_and_grad,
)


try:
    __version__ = _metadata.version("sparsejax")
except _metadata.PackageNotFoundError:  # run from a source tree that is not installed
    __version__ = "0+unknown"
