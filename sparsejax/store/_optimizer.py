"""The optimizer of a table, run on the host for the rows that a gradient names.

What runs is `sparsejax.optim.lazy(tx)` itself, on a table made of just those rows: so
any transformation that `lazy` lifts works here, and weights and state come out as they
would on a CPU that held the whole table, bit for bit.

Bits are also why state goes through a scatter that would not be needed. Which products
XLA fuses into sums depends on what follows them: without the scatters Adam and RMSProp
came out one bit off. The gathers are left out. They change no bits, and beside them
arithmetic is not vectorised: 65,536 rows of 32 took Adagrad 23 ms, and 3 without.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from sparsejax._rows import SelectedRows, indexing
from sparsejax.optim._lazy import follow, table_rows
from sparsejax.optim._lazy.lazy import lazy
from sparsejax.optim._lazy.separable import remember


@contextlib.contextmanager
def on_host(*, required: bool = True) -> Iterator[Any]:
    """Makes JAX compute on the CPU, whatever default device or mesh the caller has set.

    JAX has no CPU device where JAX_PLATFORMS names accelerators only. That is an error,
    or, unless the CPU is `required`, changes nothing.
    """
    try:
        device = jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        device = None
    if device is None and required:
        raise RuntimeError(
            "sparsejax.store: JAX has no CPU device here, and the store updates its "
            "rows on the CPU. If JAX_PLATFORMS is set, add the CPU to it: "
            "JAX_PLATFORMS=cuda,cpu."
        )
    if device is None:
        yield None
        return
    no_mesh = jax.sharding.Mesh(np.empty((), object), ())
    with jax.set_mesh(no_mesh), jax.default_device(device):
        yield device


class Optimizer:
    """A transformation for a table of one shape, and the layout of its state.

    Args:
      tx: an optax transformation, bare or lifted by `lazy`.
      shape: of the table.
      dtype: of the table.

    Raises:
      TypeError, ValueError: what `lazy` says of transformations it cannot lift.
    """

    def __init__(self, tx: Any, shape: tuple[int, ...], dtype: Any):
        spec = jax.ShapeDtypeStruct(shape, dtype)
        self._programs = _programs(tx)
        self._programs.check(spec)
        leaf = jax.tree.structure(0)
        following = follow.follow(tx.init, leaf, (spec,), (0,))
        paths, tree = jax.tree_util.tree_flatten_with_path(following.state)
        self.specs = [spec for _, spec in paths]
        self.names = [jax.tree_util.keystr(path) for path, _ in paths]
        # Which leaves of the state have a row for each row of the table.
        self.by_row = tuple(owner is not None for owner in following.owners)
        self._layout = _Layout(tree, self.by_row)

    def init_rows(self, weights: np.ndarray) -> list[np.ndarray]:
        """What `tx.init` makes of rows with these weights, leaves by row."""
        with on_host():
            by_row, _ = self._programs.init(self._layout, weights)
        return [np.asarray(x) for x in by_row]

    def init_rest(self, weights: np.ndarray) -> list[np.ndarray]:
        """What `tx.init` makes beside the rows: counts, hyperparameters."""
        with on_host():
            _, rest = self._programs.init(self._layout, weights)
        return [np.asarray(x) for x in rest]

    def update(
        self,
        weights: np.ndarray,
        by_row: Sequence[np.ndarray],
        rest: Sequence[np.ndarray],
        count: int,
        places: np.ndarray,
        values: Any,
    ) -> tuple[np.ndarray, list[np.ndarray], list[np.ndarray]]:
        """One step on a table made of the rows gathered.

        Args:
          weights: `[C, ...]`, rows gathered and then anything.
          by_row: leaves of the state of those rows.
          rest: the other leaves of the state.
          count: how many rows there are.
          places: int32 `[n]`, for each slot of the gradient its row among those, or C.
          values: `[n, ...]`, the gradient's values, on any device.

        Returns:
          New weights and state, on the host.
        """
        with on_host() as device:
            rows = np.arange(len(weights), dtype=np.int32)
            rows[count:] = len(weights)
            # On a CPU that may take NumPy's memory as it is, and `rest` is written to.
            rest = [np.array(x) for x in rest]
            # By NumPy: a mesh that the gradient was made on must not come along.
            given = weights, by_row, rest, rows, places, np.asarray(values)
            given = jax.device_put(given, device)
            new = self._programs.update(self._layout, *given)
        return jax.tree.map(np.asarray, new)


class _Layout(NamedTuple):
    """The state as a tree, and as leaves that have rows and leaves that have not."""

    tree: Any
    by_row: tuple[bool, ...]

    def split(self, state: Any) -> tuple[list[Any], list[Any]]:
        leaves = list(zip(jax.tree.leaves(state), self.by_row))
        return [x for x, mine in leaves if mine], [x for x, mine in leaves if not mine]

    def join(self, by_row: Sequence[Any], rest: Sequence[Any]) -> Any:
        rows, others = iter(by_row), iter(rest)
        leaves = [next(rows) if mine else next(others) for mine in self.by_row]
        return self.tree.unflatten(leaves)


class _Programs(NamedTuple):
    """What is compiled of a transformation, for all tables that have it."""

    check: Callable
    init: Callable
    update: Callable


@remember
def _programs(tx: Any) -> _Programs:
    lifted = lazy(tx)

    def check(spec):
        """Refuses what is not row-separable, by name."""
        jax.eval_shape(lifted.init, spec)

    def init(layout, weights):
        return layout.split(tx.init(weights))

    def update(layout, weights, by_row, rest, rows, places, values):
        grads: Any = _Gathered.of(rows, places, values)
        state = layout.join(by_row, rest)
        updates, state = lifted.update(grads, state, weights)
        return optax.apply_updates(weights, updates), *layout.split(state)

    static = functools.partial(jax.jit, static_argnums=0)
    return _Programs(check, static(init), static(update))


class _Gathered(SelectedRows):
    """A gradient for a table that is made of the rows it names, in their order."""

    places: jax.Array

    @classmethod
    def of(cls, rows: jax.Array, places: jax.Array, values: jax.Array) -> "_Gathered":
        """Of the rows 0, 1, ..., then empty slots; and of each value its row."""
        self = object.__new__(cls)
        height = rows.shape[0]
        self.__dict__.update(rows=rows, values=values, height=height, places=places)
        return self


@table_rows.merge_duplicates.register
def _(rows: _Gathered) -> _Gathered:
    """The sums of `SelectedRows.coalesce`; what sorting would give is known."""
    wide = indexing.accumulator_dtype(rows.dtype)
    zeros = jnp.zeros(rows.shape, wide)
    values = indexing.add_rows(zeros, rows.places, rows.values.astype(wide))
    return _Gathered.of(rows.rows, rows.rows, values.astype(rows.dtype))


@table_rows.read_into.register
def _(rows: _Gathered, table: Any, otherwise: jax.Array) -> jax.Array:
    """All rows, in their order."""
    filled = indexing.append_axes(rows.filled(), otherwise.ndim)
    return jnp.where(filled, table, otherwise.astype(table.dtype))
