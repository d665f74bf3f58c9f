"""Trainer: pulls the rows that a block lists, and takes the step of the store on them.

One step, for a block with tables T in the store and dense parameters p:

    ids  = block.row_ids(inputs)                on the host
    rows = store.pull(ids)                      of all tables
    p    = RowsStep(loss)((T, p), rows)         the step of `store.train_step`

The block lists its rows itself, so that reading a row it did not list is an error. A
trace could not find that mistake.

Invariant: the compiled step receives rows in arrays of static capacity, so its memory
depends on the batch and not on the size of a table. Capacities are powers of two and
only grow, so each table causes at most a few compilations; `compilations` counts them.

Sharp edge: each step donates the parameters and the optimizer state, unless `checked`.
To keep the current `trainer.params`, copy them.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from sparsejax import _arguments
from sparsejax._arguments import KeyLike, PyTree
from sparsejax._rows import SelectedRows, is_selected_rows, with_slots
from sparsejax._segments import SegmentTensor
from sparsejax.nn._block import PulledTables
from sparsejax.nn._matrix import Elements
from sparsejax.store import KVStore
from sparsejax.store._functions import as_arrays, jitted
from sparsejax.store._mesh import own_ids
from sparsejax.store._requested import Capacities, bucket, check_ids
from sparsejax.store._train_step import RowsStep
from sparsejax.store._tree_tables import ListedTable


_CALL = "sparsejax.nn.Trainer"


class Trainer:
    """Trains a block whose tables are in a store.

    Tables in `block.tables()` that the store does not have yet are created there; each
    row is initialized when it is first read. A table that the store has with `tx=None`
    is read, but not trained.

    Args:
      block: a `SparseBlock`, or an object with its two methods.
      store: a `sparsejax.store.KVStore`, with or without a mesh.
      loss: `(outputs, batch) -> scalar`; `outputs` are the outputs of the block.
      tx: optax transformation for the dense parameters, and for tables created here
        unless `table_tx` is given.
      params: the dense parameters, which are copied; default `block.init(key)`.
      key: PRNG key or int, for initial values.
      table_tx: optax transformation for all tables created here, or a dict of one per
        table name. It is applied to rows, as by `sparsejax.optim.lazy`.
      inputs: function from a batch to the block's inputs; default the batch itself.
      tables: which dense parameters are tables on the device, as in
        `sparsejax.value_and_grad`; `tx` must then be `lazy`. By default none.
      capacity: int, or a dict of one int per table, the number of slots of a pull. By
        default the number of rows that a batch reads, rounded up to a power of two, and
        never less than before. The elements of scipy matrices are padded the same way.
      clip_norm: positive number; if the global norm of all gradients, of tables and
        dense parameters together, exceeds it, they are scaled down to it.
      checked: True runs the step under `checkify`, which blocks with `mode="error"`
        require. A failed check raises before anything is updated. Parameters are then
        not donated.
      mode: how ids out of range are treated, as in `KVStore.pull`. "error"
        rejects the batch before anything is updated; -1 in `row_ids` is accepted, since
        it stands for padding, which reads no row. "drop" pulls no row for an id out of
        range. The block's own mode then decides what the id reads, by default NaN, and
        a NaN loss makes all parameters NaN.

    Raises:
      TypeError, ValueError: `block` is not a block, a dense parameter is row-sparse, or
        a table in the store has the wrong shape or dtype.
      KeyError: `table_tx` has no transformation for a table created here.

    Example:
      >>> import jax.numpy as jnp, optax, sparsejax as sj
      >>> block = sj.nn.SparseEmbedding(1000, 2, name="item")
      >>> loss = lambda rows, ids: jnp.sum(rows**2)
      >>> trainer = sj.nn.Trainer(block, sj.store.KVStore(), loss, optax.sgd(0.25))
      >>> losses = [trainer.step(jnp.array([3, 7])) for _ in range(3)]
      >>> [round(float(x / losses[0]), 4) for x in losses]
      [1.0, 0.25, 0.0625]
      >>> trainer.stats()["compilations"]
      1

      While a step runs, the store can read the rows of the next batch:

      >>> batches = [jnp.array([3, 7]), jnp.array([5, 7])]
      >>> for batch, rows in trainer.store.prefetch(
      ...     batches, trainer.row_ids, mode="drop"
      ... ):
      ...     loss = trainer.step(batch, rows)
      >>> trainer.steps
      5

    References:
      MXNet, `gluon.Trainer` with row-sparse parameters and `update_on_kvstore`.
    """

    block: Any
    store: KVStore
    params: PyTree
    opt_state: PyTree
    steps: int

    def __init__(
        self,
        block: Any,
        store: KVStore,
        loss: Callable[[Any, Any], Any],
        tx: optax.GradientTransformation,
        *,
        params: PyTree = None,
        key: KeyLike = 0,
        table_tx: PyTree = None,
        inputs: Callable[[Any], Any] | None = None,
        tables: PyTree = False,
        capacity: int | Mapping[str, int] | None = None,
        clip_norm: float | None = None,
        checked: bool = False,
        mode: str = "error",
    ):
        if isinstance(block, type) or not hasattr(block, "sparse_forward"):
            given = getattr(block, "__name__", _arguments.kind_of(block))
            raise TypeError(
                f"{_CALL}: block must be an instance of a sparsejax.nn.SparseBlock, or "
                "have its methods row_ids(inputs) and sparse_forward(tables, params, "
                f"inputs), got {given}. An ordinary layer does not say which rows it "
                "needs: use SparseEmbedding or SparseLinear."
            )
        if clip_norm is not None and not clip_norm > 0:
            raise ValueError(f"{_CALL}: clip_norm must be positive, got {clip_norm}.")
        self._mode = _arguments.check_mode(mode, ("error", "drop"), "")
        self.block, self.store, self._loss = block, store, loss
        self._inputs = (lambda batch: batch) if inputs is None else inputs
        self._checked, self._name = checked, type(block).__name__
        # For pulled rows, by table, and for the elements of scipy matrices, by leaf.
        self._capacities = Capacities(room=lambda count: count)
        self._elements = Capacities(room=bucket)
        self._capacity = capacity
        key = _arguments.as_key(key, from_int=True)
        self._make_tables(key, tx if table_tx is None else table_tx)
        if params is None:
            params = block.init(key) if hasattr(block, "init") else {}
        for path, x in jax.tree_util.tree_leaves_with_path(
            params, is_leaf=is_selected_rows
        ):
            if is_selected_rows(x):
                raise TypeError(
                    f"{_CALL}: the dense parameter {jax.tree_util.keystr(path)} is a "
                    "SelectedRows, whose rows belong to the store. Leave it out of "
                    "params, and read it from `tables` in sparse_forward."
                )
        # Copy, because each step donates these arrays: the caller may still use them,
        # and the state may share some with the parameters.
        copy = lambda x: x.copy() if isinstance(x, jax.Array) else jnp.array(x)
        self.params = jax.tree.map(copy, params)
        self.opt_state = jax.tree.map(copy, tx.init(self.params))
        self.steps = 0
        self._step = RowsStep(
            store.engine,
            self._loss_of,
            _of_dense(tx),
            tables=(None, tables),
            donate=not checked,
            clip_norm=clip_norm,
            checked=checked,
        )
        self._run_forward = jitted(self._forward, checked=checked)

    def __reduce__(self) -> Any:
        return self.store.__reduce__()  # which raises

    # -- training -----------------------------------------------------------------

    def step(
        self, batch: PyTree, rows: Mapping[str, SelectedRows] | None = None
    ) -> jax.Array:
        """Takes one step on one batch: pull, run, push.

        Args:
          batch: a tree of arrays and SegmentTensors; a scipy CSR matrix in it becomes a
            SegmentTensor. The step is compiled once for batches of the same shapes.
          rows: the rows of `row_ids(batch)`, if they are already pulled.

        Returns:
          The loss before the step.

        Raises:
          NotPulledError: the block uses a table that `row_ids` did not return.
          KeyError: `row_ids` returns a table that the store does not have.
          ValueError: it returns more distinct rows than `capacity`, or an id out of
            range.
          checkify.JaxRuntimeError: a check in the block failed, with `checked`.
        """
        batch = self._on_device(batch)
        rows = self._pull(batch) if rows is None else rows
        padded: Any = self._padded(rows)
        specs = {name: self.store.spec(name) for name in padded}
        tables = {
            name: ListedTable(self.store.engine, name, spec.shape, spec.dtype)
            for name, spec in specs.items()
        }
        args = (tables, self.params), self.opt_state, as_arrays(batch), padded
        with self._explained():
            (_, self.params), self.opt_state, loss, grads = self._step(*args)
        self._step.push(grads)
        self.steps += 1
        return loss

    # -- without training ---------------------------------------------------------

    def predict(self, batch: PyTree) -> Any:
        """Returns the block's outputs for a batch, without an update."""
        batch = self._on_device(batch)
        rows = self._padded(self._pull(batch))
        with self._explained():
            return self._run_forward(rows, as_arrays(self.params), as_arrays(batch))

    def row_ids(self, batch: PyTree) -> dict[str, Any]:
        """Returns `block.row_ids` for a batch, checked against the store.

        Raises:
          TypeError: the result is not a mapping from names of tables to ids.
          KeyError: the store does not have a table.
          ValueError: an id is out of range under mode "error"; -1 stands for padding,
            and the layers return -2 for an id of -1 that is not padding.
        """
        ids = self.block.row_ids(self._inputs(batch))
        if not isinstance(ids, Mapping):
            raise TypeError(
                f"{_CALL}: {self._name}.row_ids must return a dict of table names to "
                f"ids, got {_arguments.kind_of(ids)}."
            )
        if self._mode == "error":
            for name, wanted in ids.items():
                own = own_ids(name, wanted)
                check_ids(name, own[own != -1], self.store.spec(name).shape[0])
        return dict(ids)

    def stats(self) -> dict[str, Any]:
        """Returns steps, compilations, capacities by table, and the store's stats."""
        return {
            "steps": self.steps,
            "compilations": self.compilations,
            "capacities": dict(self._capacities.measured),
            "store": self.store.stats(),
        }

    @property
    def compilations(self) -> int:
        """The number of times that the step was compiled."""
        return self._step.compilations

    # -- the compiled step --------------------------------------------------------

    def _forward(self, rows: Any, params: Any, batch: Any) -> Any:
        heights = {name: self.store.spec(name).shape[0] for name in rows}
        pulled = {n: SelectedRows(x[0], x[1], heights[n]) for n, x in rows.items()}
        return self._outputs(pulled, params, batch)

    def _outputs(self, pulled: Any, params: Any, batch: Any) -> Any:
        tables = PulledTables(pulled, self._name)
        return self.block.sparse_forward(tables, params, self._inputs(batch))

    def _loss_of(self, params: Any, batch: Any) -> Any:
        """Returns the loss of `(pulled, params)`."""
        pulled, dense = params
        return self._loss(self._outputs(pulled, dense, batch), batch)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Explains JAX's error of a check in a compiled step, which names no option."""
        try:
            yield
        except ValueError as error:
            if self._checked or "checkify" not in str(error):
                raise
            raise ValueError(
                f"{_CALL}: {self._name} contains a check, as blocks with mode='error' "
                "do, and a compiled step can run checks only with checked=True. Pass "
                "Trainer(checked=True), or use another mode."
            ) from error

    # -- on the host --------------------------------------------------------------

    def _make_tables(self, key: jax.Array, table_tx: Any) -> None:
        """Creates the block's tables that the store lacks, and checks the others."""
        specs = self.block.tables() if hasattr(self.block, "tables") else {}
        for name, spec in specs.items():
            if name in self.store:
                have = self.store.spec(name)
                need = tuple(spec.shape), jnp.dtype(spec.dtype)
                if (have.shape, have.dtype) != need:
                    raise ValueError(
                        f"{_CALL}: the store's table {name!r} has shape {have.shape} "
                        f"and dtype {have.dtype}, but {self._name} needs {need[0]} and "
                        f"{need[1]}."
                    )
                continue
            self.store.init(
                name,
                tuple(spec.shape),
                table_tx[name] if isinstance(table_tx, Mapping) else table_tx,
                initializer=spec.initializer,
                dtype=spec.dtype,
                key=jax.random.fold_in(key, zlib.crc32(name.encode())),
            )

    def _on_device(self, batch: Any) -> Any:
        """Replaces scipy matrices in the batch by SegmentTensors.

        The capacities for their elements grow in powers of two and never shrink.
        """
        is_csr = lambda x: hasattr(x, "indptr") and hasattr(x, "tocsr")
        is_leaf = lambda x: is_csr(x) or isinstance(x, SegmentTensor)
        leaves, tree = jax.tree.flatten(batch, is_leaf=is_leaf)
        for i, leaf in enumerate(leaves):
            if not is_csr(leaf):
                if isinstance(leaf, bool | int | float | complex):
                    leaves[i] = jnp.asarray(leaf)  # not a constant of the step
                continue
            csr = leaf.tocsr()
            capacity = self._elements.grow(i, csr.nnz)
            index = np.zeros(capacity, csr.indices.dtype)
            value = np.zeros(capacity, csr.data.dtype)
            index[: csr.nnz] = csr.indices[: csr.nnz]
            value[: csr.nnz] = csr.data[: csr.nnz]
            elements = SegmentTensor.from_csr(csr.indptr, index, value)
            leaves[i] = Elements.of(elements, int(csr.shape[1]))
        return tree.unflatten(leaves)

    def _pull(self, batch: Any) -> dict[str, SelectedRows]:
        ids = self.row_ids(batch)
        return self.store.pull(ids, capacity=self._capacity, mode="drop")

    def _padded(self, pulled: Mapping[str, SelectedRows]) -> dict[str, SelectedRows]:
        """Pads pulled rows to the largest capacity so far, by table."""
        grow = self._capacities.grow
        return {name: _pad(x, grow(name, x.capacity)) for name, x in pulled.items()}


# ------------------------------------------------------------------ private


def _pad(rows: SelectedRows, capacity: int) -> SelectedRows:
    """Adds empty slots, up to `capacity` slots in all."""
    more = capacity - rows.capacity
    if more == 0:
        return rows
    empty = _arguments.scalar(rows.height, rows.rows)
    ids = jnp.pad(rows.rows, (0, more), constant_values=empty)
    widths = [(0, more)] + [(0, 0)] * (rows.values.ndim - 1)
    return with_slots(rows, ids, jnp.pad(rows.values, widths))


def _of_dense(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """Makes `tx` for `(tables, params)`, of which the store updates the tables."""

    def update(grads, state, params):
        updates, state = tx.update(grads[1], state, params[1])
        return (grads[0], updates), state

    return optax.GradientTransformation(tx.init, update)  # type: ignore
