"""Kinds, types and shapes of variables before any data, and files of SelectedRows.

- `infer`: kinds, types and shapes of outputs and gradients of a loss;
  an `Inferred`.
- `describe`: the same for the variables of a tree.
- `VarDesc`: the description of one variable.
- `to_bytes`, `from_bytes`: a VarDesc in PaddlePaddle's protobuf format.
- `save_selected_rows`, `load_selected_rows`: files of SelectedRows,
  PaddlePaddle's or .npz.

Importing this also registers the types of sparsejax with `jax.export`.
"""

from sparsejax.desc._export import register_all as _register_all
from sparsejax.desc._files import (
    load_selected_rows as load_selected_rows,
    save_selected_rows as save_selected_rows,
)
from sparsejax.desc._infer import Inferred as Inferred, infer as infer
from sparsejax.desc._protobuf import from_bytes as from_bytes, to_bytes as to_bytes
from sparsejax.desc._var_desc import VarDesc as VarDesc, describe as describe


_register_all()
