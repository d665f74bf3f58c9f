"""Kinds, types and shapes of variables before any data.

- `infer`: kinds, types and shapes of outputs and gradients of a loss;
  an `Inferred`.
- `describe`: the same for the variables of a tree.
- `VarDesc`: the description of one variable.
- `to_bytes`, `from_bytes`: a VarDesc in PaddlePaddle's protobuf format.
"""

from sparsejax.desc._infer import Inferred as Inferred, infer as infer
from sparsejax.desc._protobuf import from_bytes as from_bytes, to_bytes as to_bytes
from sparsejax.desc._var_desc import VarDesc as VarDesc, describe as describe
