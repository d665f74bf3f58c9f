"""EmbeddingCollection: many tables and features, read in a few gathers."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from sparsejax import _arguments
from sparsejax._arguments import ArrayLike, PyTree
from sparsejax._lookup import lookup
from sparsejax._lookup.embedding_bag import check_combiner
from sparsejax._rows import indexing
from sparsejax._rows.scatter import scatter_assign
from sparsejax.nn import _layer, _stacks
from sparsejax.nn._block import SparseBlock
from sparsejax.nn._embedding import Embedding, EmbeddingBag
from sparsejax.transform.trace import name_stack


_CALL = "sparsejax.nn.EmbeddingCollection"


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
        tables = _as_pairs("tables", self.tables, "layers or (rows, width)")
        tables = tuple((name, _as_layer(name, spec)) for name, spec in tables)
        features = self.features
        if features is None:
            features = {name: name for name, _ in tables}
        if isinstance(features, tuple) and all(map(_is_triple, features)):
            features = [(name, (table, combiner)) for name, table, combiner in features]
        features = _as_pairs("features", features, "tables")
        layers = dict(tables)
        features = tuple((name, *_as_read(name, x, layers)) for name, x in features)
        if unread := sorted(layers.keys() - {table for _, table, _ in features}):
            raise ValueError(
                f"{_CALL}: no feature reads the tables {unread}. Remove them, or add "
                "a feature for each."
            )
        _layer.check_bool(_CALL, "stacked", self.stacked)
        vars(self).update(tables=tables, features=features)

    def __repr__(self) -> str:
        tables = ", ".join(f"{name!r}: {layer!r}" for name, layer in self.tables)
        features = ", ".join(
            f"{name!r}: ({table!r}, {combiner!r})"
            for name, table, combiner in self.features
        )
        more = "" if self.stacked else ", stacked=False"
        return f"EmbeddingCollection({{{tables}}}, {{{features}}}{more})"

    @functools.cached_property
    def _layout(self) -> Any:
        return _stacks.arrange(self.tables, self.stacked)

    @functools.cached_property
    def _layers(self) -> dict[str, Any]:
        return dict(self.tables)

    def init(self, key: jax.Array) -> dict[str, jax.Array]:
        """The parameters: one stack `[sum of V, D]` for each width and dtype.

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
        made = {
            name: layer.init(k)["embedding"]
            for (name, layer), k in zip(self.tables, keys)
        }
        return self.stack(made)

    def __call__(
        self,
        params: PyTree,
        ids: Mapping[str, Any],
        weights: Mapping[str, ArrayLike] | None = None,
    ) -> dict[str, Any]:
        """The embeddings of all features of a batch.

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
            for name, stack in self._layout[0].items():
                name_stack(name, stack.tables)
        return _stacks.read_all(_CALL, arrays, self._prepare(ids, weights))

    def row_ids(self, ids: Mapping[str, Any]) -> dict[str, jax.Array]:
        """The rows of each stack that a batch reads, for pulling them from a store.

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
        found: dict[str, list[jax.Array]] = {}
        for feature in self._prepare(ids, None):
            rows = feature.rows.reshape(-1)
            if feature.key.mode == "zero":  # which reads no row out of range
                rows = jnp.maximum(rows, _arguments.scalar(_stacks.PADDING, rows))
            found.setdefault(feature.key.stack, []).append(rows)
        return {name: jnp.concatenate(rows) for name, rows in found.items()}

    def heights(self) -> dict[str, tuple[int, ...]]:
        """By stack, the number of rows of each of its tables, in order.

        For `sparsejax.parallel.plan(..., stacks=...)`, which can put each table of a
        stack on other devices.

        Example:
          >>> import sparsejax as sj
          >>> sj.nn.EmbeddingCollection({"a": (5, 2), "b": (7, 2)}).heights()
          {'stack_width2_float32': (5, 7)}
        """
        return {
            name: tuple(self._layers[table].num_embeddings for table in stack.tables)
            for name, stack in self._layout[0].items()
        }

    # -- one table ---------------------------------------------------------------

    def place(self, table: str) -> tuple[str, int, int]:
        """The stack that holds a table, and the table's rows `[start, stop)` in it.

        Example:
          >>> import sparsejax as sj
          >>> sj.nn.EmbeddingCollection({"a": (5, 2), "b": (7, 2)}).place("b")
          ('stack_width2_float32', 5, 12)
        """
        place = self._place(table)
        return place.stack, place.start, place.stop

    def get_table(self, params: PyTree, table: str) -> Any:
        """One table `[V, D]`; a SelectedRows if its stack is one, as in gradients.

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
        place = self._place(table)
        return _stacks.cut(self._arrays(params, dense=False)[place.stack], place)

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
        place = self._place(table)
        ids = jnp.arange(place.num_rows, dtype=_arguments.index_dtype(place.num_rows))
        return self.set_rows(params, table, ids, self._as_table(table, values))

    def get_rows(self, params: PyTree, table: str, ids: ArrayLike) -> jax.Array:
        """Rows of one table by id, read as its layer reads them.

        Example:
          >>> import jax, jax.numpy as jnp, sparsejax as sj
          >>> layer = sj.nn.EmbeddingCollection({"a": (5, 2), "b": (7, 2)})
          >>> layer.get_rows(layer.init(jax.random.key(0)), "b", [6, 0]).shape
          (2, 2)
        """
        place = self._place(table)
        layer = self._layers[table]
        stack = self._arrays(params)[place.stack]
        rows = _stacks.translate(_CALL, layer, place, stack.shape[0], ids)
        mode = "zero" if layer.mode == "zero" else "fill"
        return lookup.lookup(
            stack,
            rows,
            mode=mode,
            padding_id=_stacks.PADDING,
            max_norm=layer.max_norm,
        )

    def set_rows(
        self, params: PyTree, table: str, ids: ArrayLike, values: ArrayLike
    ) -> dict[str, Any]:
        """Returns `params` with rows of one table replaced; skips ids out of range.

        Args:
          params: as `init` makes them.
          table: its name.
          ids: integers `[n]`; for duplicates, any one of the values may win.
          values: `[n, D]`.

        Raises:
          ValueError: the table is unknown, or `values` has the wrong shape.

        Example:
          >>> import jax, jax.numpy as jnp, sparsejax as sj
          >>> layer = sj.nn.EmbeddingCollection({"a": (5, 2), "b": (7, 2)})
          >>> params = layer.init(jax.random.key(0))
          >>> params = layer.set_rows(params, "a", [4, 5], jnp.ones((2, 2)))
          >>> layer.get_rows(params, "a", [4])
          Array([[1., 1.]], dtype=float32)
        """
        place = self._place(table)
        stack = self._arrays(params, dense=False)[place.stack]
        ids = _arguments.as_ids(ids, place.num_rows)
        call, want = f"{_CALL}.set_rows", (*ids.shape, *stack.shape[1:])
        values = _arguments.to_array(values, "values").astype(stack.dtype)
        if values.shape != want:
            raise ValueError(
                f"{call}: values must have shape {want}, one row per id, got "
                f"{values.shape}."
            )
        wide = _arguments.index_dtype(stack.shape[0])
        rows = ids.astype(wide) + jnp.array(place.start, wide)
        own = indexing.in_range(ids, place.num_rows)
        rows = jnp.where(own, rows, jnp.array(stack.shape[0], wide))
        return {**params, place.stack: scatter_assign(stack, rows, values)}

    def stack(self, tables: Mapping[str, Any]) -> dict[str, jax.Array]:
        """The parameters, from a dict of all tables by name.

        Raises:
          TypeError: `tables` is not a mapping with exactly the names of the tables.

        Example:
          >>> import jax.numpy as jnp, sparsejax as sj
          >>> layer = sj.nn.EmbeddingCollection({"a": (5, 2), "b": (7, 2)})
          >>> tables = {"a": jnp.ones((5, 2)), "b": jnp.zeros((7, 2))}
          >>> layer.stack(tables)["stack_width2_float32"].shape
          (12, 2)
        """
        want = sorted(self._layers)
        if not isinstance(tables, Mapping) or set(tables) != set(want):
            found = _arguments.kind_of(tables)
            if isinstance(tables, Mapping):
                found = f"keys {sorted(map(str, tables))}"
            want = f"a dict with keys {want}"
            raise _arguments.wrong_type(f"{_CALL}.stack", "tables", want, found)
        arrays = {name: self._as_table(name, x) for name, x in tables.items()}
        return {
            name: jnp.concatenate([arrays[t] for t in stack.tables])
            for name, stack in self._layout[0].items()
        }

    def unstack(self, params: PyTree) -> dict[str, Any]:
        """All tables by name; from gradients of the parameters, the tables' gradients.

        Example:
          >>> import jax, sparsejax as sj
          >>> layer = sj.nn.EmbeddingCollection({"a": (5, 2), "b": (7, 2)})
          >>> tables = layer.unstack(layer.init(jax.random.key(0)))
          >>> {name: array.shape for name, array in tables.items()}
          {'a': (5, 2), 'b': (7, 2)}
        """
        return {name: self.get_table(params, name) for name, _ in self.tables}

    def table_prefix(self) -> dict[str, bool | None]:
        """The `tables=` argument of `sparsejax.value_and_grad` for the parameters.

        Example:
          >>> import sparsejax as sj
          >>> sj.nn.EmbeddingCollection({"a": (5, 2), "b": (7, 2)}).table_prefix()
          {'stack_width2_float32': True}
        """
        return {name: stack.sparse_grad for name, stack in self._layout[0].items()}

    # -- private -----------------------------------------------------------------

    def _arrays(self, params: Any, dense: bool = True) -> dict[str, Any]:
        """Checks and returns the stacks; with `dense`, applies `sparse_grad=False`."""
        stacks = self._layout[0]
        params = _layer.check_params(_CALL, params, tuple(stacks))
        return {
            name: _layer.table_of(
                _CALL, params, name, stack.shape, stack.sparse_grad if dense else None
            )
            for name, stack in stacks.items()
        }

    def _prepare(self, ids: Any, weights: Any) -> list[_stacks.Feature]:
        weights = {} if weights is None else weights
        for name, given in (("ids", ids), ("weights", weights)):
            if not isinstance(given, Mapping):
                found = _arguments.kind_of(given)
                want = f"a dict of feature names to {name}"
                raise _arguments.wrong_type(_CALL, name, want, found)
            known = [name for name, _, _ in self.features]
            for feature in given:
                _check_known("feature", feature, known)
        if stray := sorted(weights.keys() - ids.keys()):
            raise ValueError(
                f"{_CALL}: weights has features {stray} that are not in ids. Pass "
                "their ids too."
            )
        stacks, places = self._layout
        return [
            _stacks.prepare(
                f"{_CALL}, feature {name!r}",
                name,
                self._layers[table],
                combiner,
                places[table],
                stacks[places[table].stack],
                ids[name],
                weights.get(name),
            )
            for name, table, combiner in self.features
            if name in ids
        ]

    def _place(self, table: Any) -> _stacks.Place:
        _check_known("table", table, list(self._layers))
        return self._layout[1][table]

    def _as_table(self, name: str, values: Any) -> jax.Array:
        layer = self._layers[name]
        want = layer.num_embeddings, layer.features
        values = _arguments.as_array(values)
        name, wanted = f"table {name!r}", f"an array of shape {want}"
        if not isinstance(values, jax.Array):
            found = _arguments.kind_of(values)
            raise _arguments.wrong_type(_CALL, name, wanted, found)
        if values.shape != want:
            raise _arguments.wrong(_CALL, name, wanted, str(values.shape))
        return values.astype(layer.param_dtype)


# ------------------------------------------------------------------ fields


def _as_pairs(field: str, given: Any, what: str) -> tuple[tuple[str, Any], ...]:
    """A mapping or an iterable of pairs as a tuple of pairs with distinct names."""
    try:
        named = dict(given)
        pairs = tuple(named.items())
        names = list(named if isinstance(given, Mapping) else (n for n, _ in given))
    except (TypeError, ValueError):
        pairs, names = (), []
    if not pairs or not all(isinstance(name, str) for name, _ in pairs):
        want = f"a non-empty dict of names to {what}"
        raise _arguments.wrong_type(_CALL, field, want, _arguments.show(given))
    if twice := [name for name in dict(pairs) if names.count(name) > 1]:
        raise ValueError(
            f"{_CALL}: {field} contains the name {twice[0]!r} twice. Give each its "
            "own name; several features may read one table."
        )
    return pairs


def _as_layer(name: str, spec: Any) -> Embedding | EmbeddingBag:
    in_store = isinstance(spec, SparseBlock)  # its init makes no table
    if isinstance(spec, (Embedding, EmbeddingBag)) and not in_store:
        return spec
    if isinstance(spec, (tuple, list)) and len(spec) == 2:
        try:
            return EmbeddingBag(*spec)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{_CALL}, table {name!r}: {error}") from None
    want = "an Embedding, an EmbeddingBag, or (num_embeddings, features)"
    shown = _arguments.show(spec)
    raise _arguments.wrong_type(_CALL, f"table {name!r}", want, shown)


def _as_read(name: str, given: Any, layers: dict[str, Any]) -> tuple[str, str]:
    """The table and the combiner of a feature, from `table` or `(table, combiner)`."""
    table, *rest = given if isinstance(given, (tuple, list)) and given else (given,)
    if not isinstance(table, str) or len(rest) > 1:
        want, shown = "a table name or (table, combiner)", _arguments.show(given)
        raise _arguments.wrong_type(_CALL, f"feature {name!r}", want, shown)
    _check_known("table", table, list(layers))
    combiner = rest[0] if rest else getattr(layers[table], "combiner", "none")
    return table, check_combiner(combiner)


def _is_triple(x: Any) -> bool:
    return isinstance(x, tuple) and len(x) == 3


def _check_known(kind: str, name: Any, known: list[str]) -> None:
    if name not in known:
        shown = ", ".join(map(repr, known))
        raise ValueError(f"{_CALL}: there is no {kind} {name!r}, only {shown}.")
