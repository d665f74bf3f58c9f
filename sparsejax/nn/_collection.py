"""EmbeddingCollection: many tables and features, read in a few gathers."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from sparsejax import _arguments
from sparsejax._arguments import ArrayLike, PyTree
from sparsejax._lookup.embedding_bag import check_combiner
from sparsejax._rows import SelectedRows, indexing, is_quantized
from sparsejax._rows.scatter import scatter_assign
from sparsejax.nn import _layer
from sparsejax.nn._block import SparseBlock
from sparsejax.nn._embedding import EmbeddingBag, TableLayer
from sparsejax.nn._stacks import Feature, read_all
from sparsejax.transform.trace import name_stack


@dataclasses.dataclass(frozen=True, repr=False)
class EmbeddingCollection:
    """Named tables, and named features that read them, all in one call.

    Tables with the same width, dtype and kind of gradient are stacked in one array.
    The name of its parameter says what they share: `stack_width16_float32` has the
    tables of width 16 in float32, and `stack_width16_float32_dense` has such tables
    with `sparse_grad=False`.
    Features of one stack are read together if their shapes allow it: single ids (and
    rows that are not reduced) in one gather, bags of equal length in another, ragged
    bags in a third. A model that reads one id from each of 26 tables of equal width
    needs one gather, and its gradient is one SelectedRows.

    An id that is out of range for its own table never reads a row of the next table;
    the table's `mode` decides what it reads.

    Args:
      tables: a dict from names to an `Embedding` (its features are rows), an
        `EmbeddingBag` (its features are bags), or `(num_embeddings, features)`, short
        for `EmbeddingBag(num_embeddings, features)`. Stored as a tuple of pairs.
      features: a dict from feature names to the name of a table, or to
        `(table, combiner)`. Several features may share a table. None creates one
        feature per table, with the same name. Stored as a tuple of
        `(name, table, combiner)`.
      stacked: False keeps each table as a separate array, under its own name. A stack
        has one gradient, sparse or dense: the reads of all its tables are compared with
        half of all its rows.

    Raises:
      TypeError, ValueError: tables or features have the wrong type, or no feature reads
        a table.

    Example:
      >>> import jax, jax.numpy as jnp, sparsejax as sj
      >>> item = sj.nn.EmbeddingBag(9, 4, combiner="mean")
      >>> layer = sj.nn.EmbeddingCollection(
      ...     tables={"user": (100, 4), "item": item},
      ...     features={"user": "user", "clicked": "item", "bought": "item"},
      ... )
      >>> params = layer.init(jax.random.key(0))
      >>> {name: array.shape for name, array in params.items()}
      {'stack_width4_float32': (109, 4)}
      >>> ids = {
      ...     "user": jnp.array([3, 99]),
      ...     "clicked": sj.SegmentTensor.from_lists([[1, 2, 8], []]),
      ...     "bought": jnp.array([8, 9]),
      ... }
      >>> out = layer(params, ids)
      >>> out["clicked"][1], out["bought"][1]
      (Array([0., 0., 0., 0.], dtype=float32),
       Array([nan, nan, nan, nan], dtype=float32))

    References:
      TorchRec, `EmbeddingBagCollection`, `EmbeddingCollection`; FBGEMM, table-batched
      embedding; keras-rs, `DistributedEmbedding` (table stacking).
    """

    tables: Any
    features: Any = None
    _: dataclasses.KW_ONLY
    stacked: bool = True

    def __post_init__(self) -> None:
        layers = {name: _as_layer(name, x) for name, x in dict(self.tables).items()}
        features = self.features
        if features is None:
            features = {name: name for name in layers}
        if isinstance(features, tuple):
            features = {name: (table, combiner) for name, table, combiner in features}
        reads = []
        for name, read in dict(features).items():
            table, *combiner = (read,) if isinstance(read, str) else read
            if table not in layers:
                raise ValueError(
                    f"sparsejax.nn.EmbeddingCollection: the feature {name!r} reads the "
                    f"table {table!r}, but the tables are {sorted(layers)}."
                )
            default = getattr(layers[table], "combiner", "none")
            reads.append((name, table, check_combiner(*(combiner or [default]))))
        unread = sorted(layers.keys() - {table for _, table, _ in reads})
        if unread or not layers:
            raise ValueError(
                "sparsejax.nn.EmbeddingCollection: no feature reads the tables "
                f"{unread}."
            )
        vars(self).update(tables=tuple(layers.items()), features=tuple(reads))

    def __repr__(self) -> str:
        tables = ", ".join(f"{name!r}: {layer!r}" for name, layer in self.tables)
        features = ", ".join(
            f"{name!r}: ({table!r}, {combiner!r})"
            for name, table, combiner in self.features
        )
        more = "" if self.stacked else ", stacked=False"
        return f"EmbeddingCollection({{{tables}}}, {{{features}}}{more})"

    @functools.cached_property
    def _layers(self) -> dict[str, Any]:
        return dict(self.tables)

    @functools.cached_property
    def _stacks(self) -> dict[str, list[str]]:
        """The names of the tables in each stack, in order."""
        stacks: dict[str, list[str]] = {}
        for name, layer in self.tables:
            stack = name
            if self.stacked:
                stack = f"stack_width{layer.features}_{layer.param_dtype.name}"
                stack += "" if layer.sparse_grad else "_dense"
            stacks.setdefault(stack, []).append(name)
        return stacks

    @functools.cached_property
    def _places(self) -> dict[str, tuple[str, int, int]]:
        """By table its stack, and its rows `[start, stop)` in it."""
        places = {}
        for stack, heights in self.heights().items():
            stops = itertools.accumulate(heights)
            for table, height, stop in zip(self._stacks[stack], heights, stops):
                places[table] = stack, stop - height, stop
        return places

    def init(self, key: jax.Array) -> dict[str, jax.Array]:
        """Makes the parameters: one stack `[sum of V, D]` for each width and dtype.

        Each table is drawn by its layer's initializer, with its own key.

        Args:
          key: PRNG key.

        Example:
          >>> import jax, sparsejax as sj
          >>> layer = sj.nn.EmbeddingCollection({"a": (5, 2), "b": (7, 2), "c": (9, 3)})
          >>> params = layer.init(jax.random.key(0))
          >>> {name: array.shape for name, array in params.items()}
          {'stack_width2_float32': (12, 2), 'stack_width3_float32': (9, 3)}
        """
        keys = jax.random.split(_arguments.as_key(key), len(self.tables))
        pairs = zip(self.tables, keys)
        return self.stack({n: layer.init(k)["embedding"] for (n, layer), k in pairs})

    def __call__(
        self,
        params: PyTree,
        ids: Mapping[str, Any],
        weights: Mapping[str, ArrayLike] | None = None,
    ) -> dict[str, Any]:
        """Returns the embeddings of all features of a batch.

        Args:
          params: as returned by `init`. A stack may be a SelectedRows of pulled rows,
            those in `row_ids`.
          ids: a dict from features to integers, each in one of these forms: `[B]`, one
            id per example; `[B, L]`, bags padded with the table's `padding_id`; a
            SegmentTensor of ids, or of `{"index", "value"}`, where "value" holds the
            weights. A feature that is not reduced accepts any shape, or a
            SegmentTensor. Features may be left out.
          weights: a dict from features to numbers with the shape of their ids, for the
            combiners sum, mean and sqrtn.

        Returns:
          A dict from the features in `ids` to `[B, D]`; a feature that is not reduced
          gives `[*shape, D]`, or a SegmentTensor of rows.

        Raises:
          TypeError, ValueError: `params` do not match this layer, a feature is unknown,
            or ids or weights have the wrong type or shape.
          checkify.JaxRuntimeError: ids are out of range, under mode `"error"` outside
            of `jit`.
        """
        arrays = self._arrays(params)
        if self.stacked:
            for name, tables in self._stacks.items():
                name_stack(name, tuple(tables))
        return read_all(arrays, self._features(ids, {} if weights is None else weights))

    def row_ids(self, ids: Mapping[str, Any]) -> dict[str, jax.Array]:
        """Returns the rows of each stack that a batch reads, for pulling them.

        Args:
          ids: as in the call.

        Returns:
          A dict from stacks to integers `[n]`. -1 stands for an element that reads no
          row, as in `Embedding.row_ids`; an id out of range for its own table is -2.

        Example:
          >>> import jax.numpy as jnp, sparsejax as sj
          >>> layer = sj.nn.EmbeddingCollection({"a": (5, 2), "b": (7, 2)})
          >>> layer.row_ids({"a": jnp.array([4]), "b": jnp.array([0, 6, 7])})
          {'stack_width2_float32': Array([ 4,  5, 11, -2], dtype=int32)}
        """
        rows: dict[str, list[jax.Array]] = {}
        for feature in self._features(ids, {}):
            rows.setdefault(feature.table[0], []).append(feature.row_ids())
        return {name: jnp.concatenate(parts) for name, parts in rows.items()}

    def heights(self) -> dict[str, tuple[int, ...]]:
        """Returns, by stack, the number of rows of each of its tables, in order.

        For `sparsejax.parallel.plan(..., stacks=...)`, which can put each table of a
        stack on other devices.

        Example:
          >>> import sparsejax as sj
          >>> sj.nn.EmbeddingCollection({"a": (5, 2), "b": (7, 2)}).heights()
          {'stack_width2_float32': (5, 7)}
        """
        return {
            stack: tuple(self._layers[table].num_embeddings for table in tables)
            for stack, tables in self._stacks.items()
        }

    # -- one table ---------------------------------------------------------------

    def _place(self, table: str) -> tuple[str, int, int]:
        """Returns the stack of a table, and its rows `[start, stop)` in it."""
        if table not in self._places:
            names = list(self._places)
            raise KeyError(f"table must be one of {names}, got {table!r}.")
        return self._places[table]

    def get_table(self, params: PyTree, table: str) -> Any:
        """Returns one table `[V, D]`; in gradients a SelectedRows, as its stack is.

        Example:
          >>> import jax, jax.numpy as jnp, sparsejax as sj
          >>> layer = sj.nn.EmbeddingCollection({"a": (50, 2), "b": (70, 2)})
          >>> params = layer.init(jax.random.key(0))
          >>> layer.get_table(params, "b").shape
          (70, 2)
          >>> ids = {"a": jnp.array([4]), "b": jnp.array([1])}
          >>> loss = lambda p: sum(jnp.sum(x) for x in layer(p, ids).values())
          >>> layer.get_table(sj.grad(loss)(params), "b")
          SelectedRows(rows=[- 1], values=float32[2,2], height=70, num_rows=1)
        """
        name, start, stop = self._place(table)
        stack = self._arrays(params, dense=False)[name]
        if is_quantized(stack):
            return jax.tree.map(lambda x: x[start:stop], stack)
        if not isinstance(stack, SelectedRows):
            return stack[start:stop]
        rows = stack.rows
        first, last = (_arguments.scalar(x, rows) for x in (start, stop - 1))
        inside = (rows >= first) & (rows <= last)
        rows = jnp.where(inside, rows - first, stop - start)
        values = indexing.zero_unless(inside, stack.values)
        return SelectedRows(rows, values, stop - start)

    def set_table(
        self, params: PyTree, table: str, values: ArrayLike
    ) -> dict[str, Any]:
        """Returns `params` with one table replaced.

        Args:
          params: as `init` makes them.
          table: its name.
          values: `[V, D]`.

        Example:
          >>> import jax, jax.numpy as jnp, sparsejax as sj
          >>> layer = sj.nn.EmbeddingCollection({"a": (5, 2), "b": (7, 2)})
          >>> params = layer.init(jax.random.key(0))
          >>> params = layer.set_table(params, "b", jnp.ones((7, 2)))
          >>> layer(params, {"b": jnp.array([6])})["b"]
          Array([[1., 1.]], dtype=float32)
        """
        name, start, stop = self._place(table)
        stack = self._arrays(params, dense=False)[name]
        rows = jnp.arange(start, stop, dtype=_arguments.index_dtype(stack.shape[0]))
        values = self._as_table(table, values)
        return {**params, name: scatter_assign(stack, rows, values)}

    def stack(self, tables: Mapping[str, Any]) -> dict[str, jax.Array]:
        """Stacks a dict of all tables by name into the parameters.

        Raises:
          TypeError: `tables` is not a mapping with exactly the names of the tables.

        Example:
          >>> import jax.numpy as jnp, sparsejax as sj
          >>> layer = sj.nn.EmbeddingCollection({"a": (5, 2), "b": (7, 2)})
          >>> tables = {"a": jnp.ones((5, 2)), "b": jnp.zeros((7, 2))}
          >>> layer.stack(tables)["stack_width2_float32"].shape
          (12, 2)
        """
        _layer.check_params(tables, self._layers)
        return {
            stack: jnp.concatenate([self._as_table(t, tables[t]) for t in names])
            for stack, names in self._stacks.items()
        }

    def unstack(self, params: PyTree) -> dict[str, Any]:
        """Splits into all tables by name; from gradients, into the tables' gradients.

        Example:
          >>> import jax, sparsejax as sj
          >>> layer = sj.nn.EmbeddingCollection({"a": (5, 2), "b": (7, 2)})
          >>> tables = layer.unstack(layer.init(jax.random.key(0)))
          >>> {name: array.shape for name, array in tables.items()}
          {'a': (5, 2), 'b': (7, 2)}
        """
        return {name: self.get_table(params, name) for name, _ in self.tables}

    def table_prefix(self) -> dict[str, bool | None]:
        """Returns `tables=` of `sparsejax.value_and_grad` for the parameters.

        Example:
          >>> import sparsejax as sj
          >>> sj.nn.EmbeddingCollection({"a": (5, 2), "b": (7, 2)}).table_prefix()
          {'stack_width2_float32': True}
        """
        return {
            stack: self._layers[tables[0]].sparse_grad
            for stack, tables in self._stacks.items()
        }

    # -- private -----------------------------------------------------------------

    def _arrays(self, params: Any, dense: bool = True) -> dict[str, Any]:
        """Checks and returns the stacks; with `dense`, applies `sparse_grad=False`."""
        _layer.check_params(params, self._stacks)
        arrays = {}
        for name, heights in self.heights().items():
            layer = self._layers[self._stacks[name][0]]
            sparse_grad = layer.sparse_grad if dense else None
            shape = sum(heights), layer.features
            arrays[name] = _layer.table_of(params, name, shape, sparse_grad)
        return arrays

    def _features(self, ids: Mapping, weights: Mapping) -> list[Feature]:
        unknown = ids.keys() - {name for name, _, _ in self.features}
        if unknown or not weights.keys() <= ids.keys():
            raise ValueError(
                "sparsejax.nn.EmbeddingCollection: ids and weights must be of the "
                f"features {[name for name, _, _ in self.features]}, and weights "
                f"beside their ids, got ids of {list(ids)} and weights of "
                f"{list(weights)}."
            )
        return [
            Feature.of(
                name,
                self._layers[table],
                self._places[table],
                sum(self.heights()[self._places[table][0]]),
                combiner,
                ids[name],
                weights.get(name),
            )
            for name, table, combiner in self.features
            if name in ids
        ]

    def _as_table(self, name: str, values: Any) -> jax.Array:
        layer = self._layers[name]
        values = _arguments.to_array(values, f"the table {name!r}")
        if values.shape != (layer.num_embeddings, layer.features):
            raise ValueError(
                f"sparsejax.nn.EmbeddingCollection: the table {name!r} must have shape "
                f"{(layer.num_embeddings, layer.features)}, got {values.shape}."
            )
        return values.astype(layer.param_dtype)


def _as_layer(name: str, spec: Any) -> TableLayer:
    layer = spec if isinstance(spec, TableLayer) else EmbeddingBag(*spec)
    if isinstance(layer, SparseBlock):  # its init makes no table
        raise TypeError(
            f"sparsejax.nn.EmbeddingCollection: the table {name!r} must be an "
            f"Embedding or an EmbeddingBag, got {spec!r}, whose table is in a store."
        )
    return layer
