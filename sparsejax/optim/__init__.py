"""Optimizers whose step costs what the batch touches.

`lazy` lifts any row-separable optax transformation to SelectedRows gradients;
`is_row_separable` says which are; `global_norm` is the norm over trees with
SelectedRows in them.
"""

from sparsejax.optim._lazy import lazy as lazy
from sparsejax.optim._norm import global_norm as global_norm
from sparsejax.optim._separable import is_row_separable as is_row_separable
