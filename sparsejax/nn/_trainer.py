"""Trainer: pulls the rows a batch needs, runs a compiled step, pushes their gradients.

One step, for a block with tables T in the store and dense parameters p:

    ids        = block.row_ids(inputs)                       on the host
    rows       = store.pull(name, ids[name])                 for each table
    loss, g, h = value_and_grad(loss)(rows, p)               compiled; g, h of rows, p
    p          = p + tx.update(h)                            in the same program
    store.push(name, g[name])                                for each table

Invariant: what is compiled sees rows in static capacities, so its memory follows from
the batch, never from a table. A capacity only ever grows, and by powers of two, so a
table costs a few compilations at most; `compilations` counts them.

Sharp edge: parameters and optimizer state are donated to the next step, unless
`checked`. To keep what `trainer.params` is now, copy it, or `save`.
"""

import pathlib
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np
import optax
from jax.experimental import checkify

from sparsejax import _arguments
from sparsejax._rows import SelectedRows
from sparsejax.nn import _block_checkpoint, _trainer_args as _args
from sparsejax.nn._block import PulledTables
from sparsejax.nn._block_arrays import clip, copied, on_device, pad
from sparsejax.transform import value_and_grad


class Trainer:
    """Trains a block whose tables are in a store.

    Tables that `block.tables()` names and the store does not have are made there; their
    rows get their first values when they are first read.

    Args:
      block: a `SparseBlock`, or whatever has its two methods.
      store: a `sparsejax.store.KVStore`.
      loss: `(outputs, batch) -> scalar`, of what the block gave.
      tx: optax transformation of the dense parameters, and of tables that are made here
        unless `table_tx` says otherwise.
      params: the dense parameters, which are copied; `block.init(key)` if left out.
      key: PRNG key or int, of first values.
      table_tx: optax transformation for all tables made here, or a dict of one for each
        name. It is run by rows, as by `sparsejax.optim.lazy`.
      inputs: `batch -> inputs` of the block; the batch itself if left out.
      tables: which dense parameters are tables on the device, as of
        `sparsejax.value_and_grad`; `tx` must be `lazy` then. None of them by default.
      capacity: int, or a dict of one for each table: rows of a pull. Left out, what the
        batches need, rounded up to a power of two, and never less than before. So
        are the elements of scipy's matrices.
      clip_norm: positive number; all gradients, of tables and dense, are scaled
        together where their global norm is greater.
      checked: run under `checkify`, as blocks with `mode="error"` need it: an error is
        raised before anything is updated. Parameters are not donated then.
      mode: what to do with ids out of range, as in `KVStore.pull`. "error" refuses the
        batch before anything is updated; -1 in `row_ids` stands for no row, such as
        padding, and is no error. "drop" leaves them out: they read what the block's own
        mode says, which is NaN by default, and NaN in a loss spoils all parameters.

    Raises:
      TypeError, ValueError: an argument is none of these, a dense parameter is
        row-sparse, or the store's table has another shape or type or is read-only.

    Example:
      >>> import jax.numpy as jnp, optax, sparsejax as sj
      >>> block = sj.nn.SparseEmbedding(1000, 2, name="item")
      >>> loss = lambda rows, ids: jnp.sum(rows**2)
      >>> trainer = sj.nn.Trainer(block, sj.store.KVStore(), loss, optax.sgd(0.25))
      >>> losses = trainer.fit([jnp.array([3, 7])] * 3)
      >>> [round(float(x / losses[0]), 4) for x in losses]
      [1.0, 0.25, 0.0625]
      >>> trainer.compilations
      1

    References:
      MXNet, `gluon.Trainer` with row-sparse parameters and `update_on_kvstore`.
    """

    block: Any
    store: Any
    params: Any
    opt_state: Any
    steps: int
    compilations: int

    def __init__(
        self,
        block: Any,
        store: Any,
        loss: Callable[[Any, Any], Any],
        tx: Any,
        *,
        params: Any = None,
        key: Any = 0,
        table_tx: Any = None,
        inputs: Callable[[Any], Any] | None = None,
        tables: Any = False,
        capacity: int | Mapping[str, int] | None = None,
        clip_norm: float | None = None,
        checked: bool = False,
        mode: str = "error",
    ):
        _args.check_block(block)
        _args.check_store(store)
        _args.check_function("loss", "(outputs, batch) -> scalar", loss)
        _args.check_tx(tx)
        if inputs is not None:
            _args.check_function("inputs", "of a batch, or None", inputs)
        self._name, self._mode = type(block).__name__, _args.check_mode(mode)
        self.block, self.store, self._loss, self._tx = block, store, loss, tx
        self._inputs = (lambda batch: batch) if inputs is None else inputs
        self._clip_norm = _args.check_clip_norm(clip_norm)
        self._tables, self._checked = tables, checked
        self._capacities, self._heights = dict[str, int](), dict[str, int]()
        self._rooms: dict[int, int] = {}
        key = _arguments.as_key(_args.CALL, key, from_int=True)
        self._make_tables(key, tx if table_tx is None else table_tx)
        self._fixed = _args.check_capacity(capacity, store)
        if params is None:
            params = block.init(key) if hasattr(block, "init") else {}
        _args.check_params(params, store)
        # Copies: each step donates them, and these arrays may be somebody else's.
        self.params = jax.tree.map(copied, params)
        self.opt_state = jax.tree.map(copied, tx.init(self.params))
        self.steps = 0
        self.compilations = 0
        step = checkify.checkify(self._step) if checked else self._step
        self._run_step = jax.jit(step, donate_argnums=() if checked else (1, 2))
        forward = checkify.checkify(self._forward) if checked else self._forward
        self._run_forward = jax.jit(forward)
        score = lambda *args: loss(self._forward(*args), args[2])
        self._run_loss = jax.jit(checkify.checkify(score) if checked else score)

    # -- training -----------------------------------------------------------------

    def step(self, batch: Any) -> jax.Array:
        """One step on one batch: pull, run, push.

        Args:
          batch: a tree of arrays and SegmentTensors; a scipy CSR matrix in it becomes a
            SegmentTensor. The same shapes in each batch compile once.

        Returns:
          The loss before the step.

        Raises:
          NotPulledError: the block uses a table that `row_ids` did not name.
          ValueError: `row_ids` names a table that the store does not have, or more rows
            than `capacity`.
          checkify.JaxRuntimeError: with `checked`, what a block complained of.
        """
        batch = on_device(batch, self._rooms)
        return self._update(batch, self._pull(batch))

    def fit(self, batches: Iterable[Any], *, prefetch: int = 0) -> np.ndarray:
        """A step for each batch.

        Args:
          batches: an iterable of batches.
          prefetch: how many batches ahead rows are pulled while a step runs; the result
            is the same, bit for bit.

        Returns:
          float32 `[number of batches]`, the loss before each step.
        """
        self._know(self.store.names())  # the store's thread must not ask the store
        made = (on_device(batch, self._rooms) for batch in batches)
        if not prefetch:
            losses = [self._update(batch, self._pull(batch)) for batch in made]
        else:
            ahead = self.store.prefetch(
                made, self.row_ids, depth=prefetch, capacity=self._fixed, mode="drop"
            )
            losses = [self._update(batch, rows) for batch, rows in ahead]
        return np.asarray([float(x) for x in losses], np.float32)

    # -- without training ---------------------------------------------------------

    def evaluate(self, batches: Iterable[Any]) -> float:
        """The mean over the batches of their loss; nothing is updated."""
        losses = []
        for batch in batches:
            batch = on_device(batch, self._rooms)
            args = self._grown(self._pull(batch)), self.params, batch
            losses.append(self._run(self._run_loss, *args))
        return float(np.mean([float(x) for x in losses])) if losses else float("nan")

    def predict(self, batch: Any) -> Any:
        """The block's outputs for a batch; nothing is updated."""
        batch = on_device(batch, self._rooms)
        args = self._grown(self._pull(batch)), self.params, batch
        return self._run(self._run_forward, *args)

    def row_ids(self, batch: Any) -> dict[str, Any]:
        """What `block.row_ids` names for a batch, checked against the store.

        Raises:
          TypeError, ValueError: it is no mapping of tables of the store to ids, or with
            mode "error" an id is out of range.
        """
        ids = self.block.row_ids(self._inputs(batch))
        ids = _args.check_named(self._name, self.store, ids)
        self._know(ids)
        if self._mode == "error":
            for name, wanted in ids.items():
                _args.check_ids(self._name, name, wanted, self._heights[name])
        return ids

    # -- files --------------------------------------------------------------------

    def save(self, path: str | pathlib.Path) -> None:
        """Saves everything: all rows of all tables, parameters, optimizer states.

        Rows that were never read are saved as the key that makes them. Whatever happens
        in the middle, `path` holds the last complete save.

        Args:
          path: a folder, made if need be.
        """
        tree = {"params": self.params, "opt_state": self.opt_state}
        tree["steps"] = np.int64(self.steps)
        _block_checkpoint.save(path, tree, self.store)

    def load(self, path: str | pathlib.Path) -> None:
        """Takes up what `save` wrote; training goes on with the same bits.

        Args:
          path: the folder.

        Raises:
          FileNotFoundError: nothing was saved there.
          ValueError: it is of another model.
        """
        tree = {"params": self.params, "opt_state": self.opt_state}
        tree["steps"] = np.int64(0)
        tree = _block_checkpoint.load(path, tree, self.store)
        self.params, self.opt_state = tree["params"], tree["opt_state"]
        self.steps = int(tree["steps"])

    def stats(self) -> dict[str, Any]:
        """Steps, compilations of a step, rows of a pull by table, and the store's."""
        return {
            "steps": self.steps,
            "compilations": self.compilations,
            "capacities": dict(self._capacities),
            "store": self.store.stats(),
        }

    # -- private ------------------------------------------------------------------

    def _make_tables(self, key: jax.Array, table_tx: Any) -> None:
        wanted = self.block.tables() if hasattr(self.block, "tables") else {}
        tx_of = _args.transformations(table_tx, wanted, self.store)
        for name, spec in wanted.items():
            self._heights[name] = spec.shape[0]
            if name in self.store:
                _args.check_table(self._name, self.store, name, spec)
                _args.check_trained(self.store, name)
                continue
            self.store.init(
                name,
                tuple(spec.shape),
                tx_of(name),
                initializer=spec.initializer,
                dtype=spec.dtype,
                seed=jax.random.fold_in(key, zlib.crc32(name.encode())),
            )

    def _know(self, names: Iterable[str]) -> None:
        """Asks the store for the rows of tables that are new here."""
        for name in names:
            if name not in self._heights:
                rows = self.store.pull(name, np.zeros(0, np.int32))
                self._heights[name] = rows.height

    def _pull(self, batch: Any) -> dict[str, SelectedRows]:
        ids = self.row_ids(batch)
        fixed = self._fixed
        by_name = fixed if isinstance(fixed, Mapping) else dict.fromkeys(ids, fixed)
        return {
            name: self.store.pull(
                name, ids[name], capacity=by_name.get(name), mode="drop"
            )
            for name in ids
        }

    def _grown(self, pulled: Mapping[str, SelectedRows]) -> dict[str, SelectedRows]:
        """The same rows in the capacity of each table so far, or the new one."""
        for name, rows in pulled.items():
            least = self._capacities.get(name, 0)
            self._capacities[name] = max(least, rows.capacity)
        return {name: pad(x, self._capacities[name]) for name, x in pulled.items()}

    def _forward(self, pulled: Any, params: Any, batch: Any) -> Any:
        tables = PulledTables(pulled, self._name)
        return self.block.sparse_forward(tables, params, self._inputs(batch))

    def _step(self, pulled: Any, params: Any, opt_state: Any, batch: Any) -> Any:
        self.compilations += 1  # Python runs this once for each program that is made

        def objective(pulled, params):
            return self._loss(self._forward(pulled, params, batch), batch)

        differentiate = value_and_grad(
            objective, argnums=(0, 1), tables=(None, self._tables)
        )
        loss, grads = differentiate(pulled, params)
        if self._clip_norm is not None:
            grads = clip(grads, self._clip_norm)
        updates, opt_state = self._tx.update(grads[1], opt_state, params)
        return loss, grads[0], optax.apply_updates(params, updates), opt_state

    def _update(self, batch: Any, pulled: Mapping[str, SelectedRows]) -> jax.Array:
        for name in pulled:
            _args.check_trained(self.store, name)
        args = self._grown(pulled), self.params, self.opt_state, batch
        loss, grads, self.params, self.opt_state = self._run(self._run_step, *args)
        for name, rows in grads.items():
            self.store.push(name, rows)
        self.steps += 1
        return loss

    def _run(self, function: Any, *args: Any) -> Any:
        """What a compiled function gives; an error where it complained."""
        if not self._checked:
            return _args.explain_check(self._name, function, *args)
        error, out = function(*args)
        error.throw()
        return out
