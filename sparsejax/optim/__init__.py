"""Optimizers whose step costs what the batch touches.

`lazy` lifts any row-separable optax transformation to SelectedRows gradients;
`is_row_separable` says which are, and `is_lazy_exact` where leaving the other rows
alone is no approximation. `exact` trains as dense gradients do where it is one.
`ftrl`, `rowwise_adagrad` and others are what optax has none of; `accumulate`,
`rounding` and `dynamic_loss_scale` go around them. `global_norm` is the norm over trees
with SelectedRows in them.
"""

from sparsejax.optim._accumulate import accumulate as accumulate
from sparsejax.optim._adagrad import (
    adagrad as adagrad,
    group_adagrad as group_adagrad,
    rowwise_adagrad as rowwise_adagrad,
)
from sparsejax.optim._exact import exact as exact
from sparsejax.optim._exact_ids import exact_value_and_grad as exact_value_and_grad
from sparsejax.optim._ftrl import ftrl as ftrl
from sparsejax.optim._lazy import lazy as lazy
from sparsejax.optim._lazy_exact import is_lazy_exact as is_lazy_exact
from sparsejax.optim._loss_scale import dynamic_loss_scale as dynamic_loss_scale
from sparsejax.optim._norm import global_norm as global_norm
from sparsejax.optim._rounding import rounding as rounding
from sparsejax.optim._rowwise import (
    partial_rowwise_lamb as partial_rowwise_lamb,
    row_count_adam as row_count_adam,
    rowwise_adam as rowwise_adam,
)
from sparsejax.optim._separable import is_row_separable as is_row_separable
from sparsejax.optim._weight_decay import (
    flush_weight_decay as flush_weight_decay,
    weight_decay as weight_decay,
)
