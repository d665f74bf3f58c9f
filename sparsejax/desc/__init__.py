"""What is known of arrays before any data: kinds, types and dimensions, and files."""

from sparsejax.desc._export import register_all as _register_all
from sparsejax.desc._files import (
    load_selected_rows as load_selected_rows,
    save_selected_rows as save_selected_rows,
)
from sparsejax.desc._infer import Inferred as Inferred, infer as infer
from sparsejax.desc._messages import from_bytes as from_bytes, to_bytes as to_bytes
from sparsejax.desc._var_desc import VarDesc as VarDesc, describe as describe


_register_all()
