"""Registers our types and the states of optimizers with `jax.export`.

An exported function is saved with the tree structure of its arguments and results,
which names each node by a registered name. With the names registered here, a whole
training step can be exported, saved, and run in another process that does not have the
code of the model:

    exported = jax.export.export(jax.jit(step), platforms=("cpu", "cuda", "tpu"))
    data = exported(params, opt_state, batch).serialize()

    import sparsejax                                          # elsewhere
    step = jax.export.deserialize(data).call

`_rows.row_ids` registers the dtype of row ids.
"""

import contextlib
import json
import sys
import types

import jax.export
import optax

from sparsejax import optim
from sparsejax._index.hash_index import HashIndex
from sparsejax._rows import QuantizedTable, SelectedRows
from sparsejax._segments import SegmentTensor
from sparsejax.losses import NegativeSampler, _negatives
from sparsejax.nn import PulledTables
from sparsejax.nn._matrix import Elements
from sparsejax.parallel import ShardedRows, ShardedTable


def register_all() -> None:
    """Registers our types, and the states of optax and `sj.optim`."""
    for kind, to_bytes in {
        **dict.fromkeys((SelectedRows, QuantizedTable, SegmentTensor), _to_json),
        **dict.fromkeys((HashIndex, NegativeSampler, PulledTables, Elements), _to_json),
        **dict.fromkeys((ShardedTable, ShardedRows), _refuse),
    }.items():
        jax.export.register_pytree_node_serialization(
            kind,
            serialized_name=f"sparsejax.{kind.__name__}",
            serialize_auxdata=to_bytes,
            deserialize_auxdata=_from_json,
        )
    for name, module in (
        ("sparsejax.losses", _negatives),
        ("sparsejax.optim", optim),
        ("optax", optax),
        ("optax.contrib", optax.contrib),
    ):
        for kind in _named_tuples(module):
            # A ValueError says that it is registered already: by the user's program,
            # whose name stays; or by this loop, as optax has some in two modules.
            with contextlib.suppress(ValueError):
                jax.export.register_namedtuple_serialization(
                    kind, serialized_name=f"{name}.{kind.__name__}"
                )


def _named_tuples(package: types.ModuleType) -> list[type]:
    """Returns the named tuples of a package, which include states of optimizers."""
    name = package.__name__
    modules = [m for key, m in sys.modules.items() if f"{key}.".startswith(f"{name}.")]
    kinds = {
        x.__name__: x
        for module in modules
        for x in vars(module).values()
        if isinstance(x, type) and issubclass(x, tuple) and hasattr(x, "_fields")
        if f"{x.__module__}.".startswith(f"{name}.")
    }
    return [kinds[key] for key in sorted(kinds)]


def _to_json(static: object) -> bytes:
    return json.dumps(static).encode()


def _refuse(static: object) -> bytes:
    del static
    raise TypeError(
        "jax.export: a ShardedTable or its gradient is an argument or a result of the "
        "function, and its mesh names devices of this process. Export a function of "
        "table.values that calls dataclasses.replace(table, values=values), and return "
        "arrays; or a function of table.to_dense()."
    )


def _from_json(data: bytes) -> object:
    return _as_tuples(json.loads(data))


def _as_tuples(x: object) -> object:
    return tuple(map(_as_tuples, x)) if isinstance(x, list) else x
