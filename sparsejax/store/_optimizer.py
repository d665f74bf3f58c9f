"""The optimizer of a table, run on the CPU for the rows of a gradient.

A step gathers the rows of the gradient into a small table, and runs the transformation
on that table with a dense gradient. `sparsejax.optim.lazy` does the same on the device,
so the new weights and state are equal to rounding. `lazy` itself checks, when the table
is made, that the transformation treats rows independently.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from sparsejax import _compat
from sparsejax._rows import indexing
from sparsejax.optim import _trees as trees
from sparsejax.optim._lazy import separability, state_leaves
from sparsejax.optim._lazy.lazy import lazy
from sparsejax.optim._lazy.two_programs import are_equal
from sparsejax.optim._optimizers.missed_steps import EmaState


def is_ema_state(x: Any) -> bool:
    return isinstance(x, EmaState)


@contextlib.contextmanager
def on_host() -> Iterator[Any]:
    """Makes JAX compute on the CPU, for any default device or mesh of the caller."""
    try:
        device = jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        raise RuntimeError(
            "sparsejax.store: the store updates its rows on the CPU, but JAX has no "
            "CPU device here. If JAX_PLATFORMS is set, add the CPU to it: "
            "JAX_PLATFORMS=cuda,cpu."
        ) from None
    no_mesh = jax.sharding.Mesh(np.empty((), object), ())
    with jax.set_mesh(no_mesh), jax.default_device(device):
        yield device


class Leaf(NamedTuple):
    """A leaf of an optimizer state; `by_row` if each row of the table has a row."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    by_row: bool


class Optimizer:
    """A transformation for a table of one shape, and the layout of its state.

    Args:
      tx: an optax transformation, bare or lifted by `lazy`.
      shape: of the table.
      dtype: of the table.
      name: of the table.

    Raises:
      TypeError, ValueError: from `lazy`, for a transformation that it cannot lift; `tx`
        decides by the path of a parameter.
    """

    def __init__(self, tx: Any, shape: tuple[int, ...], dtype: Any, name: str):
        spec, leaf = jax.ShapeDtypeStruct(shape, dtype), jax.tree.structure(0)
        lifted = lazy(tx)
        try:
            jax.eval_shape(lifted.init, spec)  # names a part that is not row-separable
        except state_leaves.InitError as error:
            cause = error.__cause__
            raise ValueError(
                f"sparsejax.store: tx.init of table {name!r} raises "
                f"{type(cause).__name__} for the table alone, which is all that a "
                "store gives it. In place of a tree of labels, masks or capacities, or "
                "of a function that decides by path, pass the transformation, mask or "
                f"capacity of this table. The error: {' '.join(str(cause).split())}"
            ) from error
        _check_without_path(tx, spec, name)
        following = state_leaves.find(tx.init, leaf, (spec,), (0,))
        nodes = jax.tree.leaves(following.state, is_leaf=is_ema_state)
        if any(map(is_ema_state, nodes)):
            raise ValueError(
                "sparsejax.store: tx has sparsejax.optim.ema, but a store keeps the "
                "state of its optimizer, so ema_params could not read the averages. "
                "Take ema out of tx, or train the table as an array on the device."
            )
        paths, tree = jax.tree_util.tree_flatten_with_path(following.state)
        self.by_row = tuple(owner is not None for owner in following.owners)
        self.leaves = [
            Leaf(jax.tree_util.keystr(path), x.shape, np.dtype(x.dtype), by_row)
            for (path, x), by_row in zip(paths, self.by_row)
        ]
        self.structure = tree
        self._key = tx, leaf, (spec,), (0,)
        self._init, self._update = _programs(tx)

    def init(self, weights: np.ndarray) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Returns the leaves of `tx.init(weights)` with rows, and the other ones."""
        with on_host():
            return self._split(self._init(weights))

    def update(
        self,
        weights: np.ndarray,
        by_row: Sequence[np.ndarray],
        rest: Sequence[np.ndarray],
        count: int,
        positions: np.ndarray,
        values: Any,
    ) -> tuple[np.ndarray, list[np.ndarray], list[np.ndarray]]:
        """Takes one step on a table of the gathered rows.

        Args:
          weights: `[C, ...]`, the gathered rows, padded with zeros.
          by_row: the leaves of state of the same rows.
          rest: the other leaves of state.
          count: the number of gathered rows.
          positions: int32 `[n]`, for each slot of the gradient the position of its row
            among the gathered ones, or C.
          values: `[n, ...]`, of the gradient, on any device.

        Returns:
          New weights and state, on the host.
        """
        reason = separability.difference_of_rows(*self._key, (len(weights),))
        if reason is not None:
            raise separability.refused("the optimizer of a store", reason)
        with on_host() as device:
            # device_put may use NumPy's memory in place, and the caller changes `rest`.
            rows, others = iter(by_row), iter([np.array(x) for x in rest])
            leaves = [next(rows if x else others) for x in self.by_row]
            state = self.structure.unflatten(leaves)
            # As NumPy: the gradient's mesh must not reach the update.
            is_row = np.arange(len(weights)) < count
            arguments = weights, state, is_row, positions, np.asarray(values)
            arguments = jax.device_put(arguments, device)
            weights, state = self._update(self.by_row, *arguments)
            return np.asarray(weights), *self._split(state)

    def _split(self, state: Any) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Returns the leaves of a state with rows, and the other ones."""
        by_row, rest = [], []
        for x, has_rows in zip(jax.tree.leaves(state), self.by_row):
            (by_row if has_rows else rest).append(np.asarray(x))
        return by_row, rest


def _check_without_path(tx: Any, spec: Any, name: str) -> None:
    """Raises unless `tx` does the same for a table as for a tree with its name.

    The store gives `tx` the table alone, so a mask or label function sees no path.
    """

    def program(wrap):
        def step(weights, grads):
            params = wrap(weights)
            step = tx.update(wrap(grads), tx.init(params), params)
            return jax.tree.leaves(step)

        return _compat.trace(step, spec, spec)

    try:
        named = program(lambda x: {name: x})
    except Exception:  # its functions are for a table alone
        return
    if not are_equal(named, program(lambda x: x)):
        raise ValueError(
            f"sparsejax.store: tx of table {name!r} has a mask or label function that "
            f"decides by path: for {{{name!r}: table}} it does something else than for "
            "the table alone, which is all that a store gives it. Pass the "
            "transformation that the function chooses for this table."
        )


@trees.remember
def _programs(tx: Any) -> tuple[Callable, Callable]:
    """Returns compiled `tx.init` and a step, for all tables that use `tx`."""

    def update(has_rows, weights, state, is_row, positions, values):
        wide = indexing.accumulator_dtype(values.dtype)
        zeros = jnp.zeros((len(weights), *values.shape[1:]), wide)
        sums = indexing.add_rows(zeros, positions, values.astype(wide))
        # The padding gets the state of a row that was never touched, as in `lazy`: with
        # zeros, a square root or a quotient could be NaN and reach the global norm.
        fresh = jax.tree.leaves(tx.init(jnp.zeros_like(weights)))
        leaves, tree = jax.tree.flatten(state)
        mask = lambda x: indexing.append_axes(is_row, x.ndim)
        leaves = [
            jnp.where(mask(x), x, new) if by_row else x
            for x, new, by_row in zip(leaves, fresh, has_rows)
        ]
        state = tree.unflatten(leaves)
        updates, state = tx.update(sums.astype(values.dtype), state, weights)
        return optax.apply_updates(weights, updates), state

    return jax.jit(tx.init), jax.jit(update, static_argnums=0)
