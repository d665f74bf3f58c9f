"""What may still change: sparse gradients from JAX's own `grad`.

- `sparse_table`: an array as a table whose gradient under `jax.grad` is rows.
- `selected_rows`: such gradients as SelectedRows, inside `jit`.

Names and meanings here may change from one release to the next. They rest on a part of
JAX that is an experiment itself, `jax.experimental.hijax`, and need jax 0.12.
"""

from sparsejax.experimental._sparse_table import (
    selected_rows as selected_rows,
    sparse_table as sparse_table,
)
