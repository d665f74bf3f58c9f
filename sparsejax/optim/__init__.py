"""Optimizers whose step costs what the batch touches.

Start with `lazy(tx)`: it runs any optax transformation that works row by row
on the rows of a gradient. It equals dense training for SGD and Adagrad; with
momentum and Adam, rows that are not read are not updated. `exact(tx)` trains
as these do on dense gradients, to rounding.

Around an optax transformation

- `lazy`: runs it on the rows of a gradient.
- `exact`: brings rows up to date before they are read.
- `exact_value_and_grad`: finds these rows, and differentiates.
- `accumulate`: one step for k gradients.
- `rounding`: tables of bfloat16 or float16, rounded stochastically or with
  float32 masters.
- `dynamic_loss_scale`: for gradients in float16.
- `track_changes`: which rows changed since `take_changes` took them.

Optimizers, to be put into `lazy(...)`

- `ftrl`: FTRL-proximal, which makes weights exactly zero.
- `adagrad`: with eps outside of the root, as in PyTorch.
- `rowwise_adagrad`, `group_adagrad`: one accumulator for each row.
- `rowwise_adam`, `partial_rowwise_lamb`: one second moment for each row.
- `row_count_adam`: bias correction by how often a row was touched.
- `ema`: the exponential moving average of the parameters, which `ema_params`
  reads.
- `weight_decay`: decoupled; a touched row also gets the steps that it missed.
  `flush_weight_decay` does this for all rows.

Rows with new keys

- `reset_rows`: fresh weights and fresh state for some rows of a table.

Predicates and norms

- `is_row_separable`: True if `lazy(tx)` is possible.
- `is_lazy_exact`: True if `lazy(tx)` trains as `tx` does on dense
  gradients.
- `global_norm`: of a tree with SelectedRows in it.
"""

from sparsejax.optim._exact.exact import exact as exact
from sparsejax.optim._exact.exact_value_and_grad import (
    exact_value_and_grad as exact_value_and_grad,
)
from sparsejax.optim._lazy.lazy import lazy as lazy
from sparsejax.optim._lazy.separability import (
    is_lazy_exact as is_lazy_exact,
    is_row_separable as is_row_separable,
)
from sparsejax.optim._optimizers.adagrad import (
    adagrad as adagrad,
    ftrl as ftrl,
    group_adagrad as group_adagrad,
    rowwise_adagrad as rowwise_adagrad,
)
from sparsejax.optim._optimizers.adam import (
    partial_rowwise_lamb as partial_rowwise_lamb,
    row_count_adam as row_count_adam,
    rowwise_adam as rowwise_adam,
)
from sparsejax.optim._optimizers.missed_steps import (
    ema as ema,
    ema_params as ema_params,
    flush_weight_decay as flush_weight_decay,
    weight_decay as weight_decay,
)
from sparsejax.optim._reset_rows import reset_rows as reset_rows
from sparsejax.optim._trees import global_norm as global_norm
from sparsejax.optim._wrappers.accumulate import accumulate as accumulate
from sparsejax.optim._wrappers.loss_scale import (
    dynamic_loss_scale as dynamic_loss_scale,
)
from sparsejax.optim._wrappers.rounding import rounding as rounding
from sparsejax.optim._wrappers.track_changes import (
    take_changes as take_changes,
    track_changes as track_changes,
)
