"""SparseBlock: a model whose tables stay in a store and arrive as pulled rows.

A table larger than device memory cannot be a parameter. Instead, a block first lists
the rows it will read, from the inputs alone (`row_ids`). A driver such as `Trainer`
pulls those rows and passes them to `sparse_forward` as `tables`, separate from the
dense `params`. The gradient of a table has the same rows, and the driver pushes it.

Invariant: `row_ids` runs on the host, outside of `jit`; `sparse_forward` is a pure
function that runs inside `jit`. They share only the inputs, so `sparse_forward` must
read only what `row_ids` returned. Using a table that was not pulled raises
`NotPulledError`; a row that was not pulled reads NaN, or raises under `mode="error"`.

A table may also be a whole array. The block is then an ordinary model; the tests
compare against it.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from sparsejax import _arguments
from sparsejax._arguments import Initializer, PyTree
from sparsejax._rows import indexing


class NotPulledError(KeyError):
    """`sparse_forward` uses a table that `row_ids` did not return.

    Raised when `sparse_forward` is traced, before anything is computed. It concerns
    whole tables: if a table was pulled but a row was not, that row reads NaN, or raises
    under `mode="error"`.

    Args:
      message: the table, the block, the tables that were pulled, and what to do.

    Example:
      >>> import jax.numpy as jnp, sparsejax as sj
      >>> block = sj.nn.SparseEmbedding(10, 2, name="item")
      >>> try:
      ...     block({}, {}, jnp.array([3]))
      ... except sj.NotPulledError as e:
      ...     print(str(e)[:70])
      SparseEmbedding: the table 'item' is used in sparse_forward, but it wa

    References:
      MXNet's proposal for SparseBlock: a forward pass without its pull is an error.
    """

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError.__str__ would quote the message


class RowSparseTableError(TypeError):
    """A SelectedRows of pulled rows was used as an array."""


@dataclasses.dataclass(frozen=True)
class TableSpec:
    """Shape, dtype and initial values of a block's table in the store.

    Args:
      shape: `(num_rows, ...)`.
      dtype: of the weights.
      initializer: `(key, shape, dtype) -> array`, as in `jax.nn.initializers`. The
        store calls it with shape `(1, ...)` for each row, when that row is first read.
        None for zeros.

    Example:
      >>> import sparsejax as sj
      >>> sj.nn.TableSpec((1000, 8)).shape
      (1000, 8)
    """

    shape: tuple[int, ...]
    dtype: DTypeLike = jnp.float32
    initializer: Initializer | None = None


@jax.tree_util.register_pytree_with_keys_class
class PulledTables(dict[str, Any]):
    """The tables that were pulled, by name; any other name raises NotPulledError.

    Args:
      tables: a mapping of names to SelectedRows, or to arrays.
      owner: str, the name of the block, used in error messages.

    Example:
      >>> import jax.numpy as jnp, sparsejax as sj
      >>> rows = sj.SelectedRows(jnp.array([3]), jnp.ones((1, 2)), height=10)
      >>> tables = sj.nn.PulledTables({"user": rows})
      >>> list(tables), "item" in tables
      (['user'], False)
    """

    def __init__(self, tables: Mapping[str, Any], owner: str = "SparseBlock"):
        super().__init__(tables)
        self._owner = owner

    def tree_flatten_with_keys(self) -> tuple[Any, Any]:
        """Returns the children with their keys."""
        keys = map(jax.tree_util.DictKey, self)
        return tuple(zip(keys, self.values())), (tuple(self), self._owner)

    @classmethod
    def tree_unflatten(cls, static: Any, children: Any) -> Self:
        """Rebuilds without checks, since JAX may pass any objects as children."""
        names, owner = static
        return cls(dict(zip(names, children)), owner)

    def __missing__(self, name: str) -> NoReturn:
        raise NotPulledError(
            f"{self._owner}: the table {name!r} is used in sparse_forward, but it "
            f"was not pulled; pulled tables: {sorted(self) or 'none'}. Only tables "
            f"returned by row_ids are pulled. Include {{{name!r}: ids}} in the dict "
            f"that {self._owner}.row_ids(inputs) returns, with every id that "
            "sparse_forward reads."
        )


class SparseBlock(abc.ABC):
    """A model, or part of one, whose tables live in a store and are read by rows.

    A subclass lists the rows it reads and computes outputs from them:

      row_ids(inputs) -> {table name: ids}
      sparse_forward(tables, params, inputs) -> outputs

    Call it as `block(tables, params, inputs)`. In `sparse_forward`, `tables` is a
    `PulledTables`, which raises for a table that was not pulled. A frozen dataclass
    whose fields are layers or blocks inherits `tables()` and `init(key)`, which collect
    from its fields; other subclasses override them.

    Raises:
      NotPulledError: the call uses a table that `row_ids` did not return.
      TypeError: the call uses pulled rows as an array.

    Example:
      >>> import dataclasses, jax, jax.numpy as jnp, optax, sparsejax as sj
      >>> @dataclasses.dataclass(frozen=True)
      ... class Likes(sj.nn.SparseBlock):
      ...     user: sj.nn.SparseEmbedding = sj.nn.SparseEmbedding(9, 4, name="user")
      ...     item: sj.nn.SparseEmbedding = sj.nn.SparseEmbedding(5, 4, name="item")
      ...
      ...     def row_ids(self, inputs):
      ...         user, item = inputs
      ...         return self.user.row_ids(user) | self.item.row_ids(item)
      ...
      ...     def sparse_forward(self, tables, params, inputs):
      ...         user, item = inputs
      ...         u = self.user(tables, params["user"], user)
      ...         return jnp.sum(u * self.item(tables, params["item"], item), axis=-1)
      >>> block, inputs = Likes(), (jnp.array([8]), jnp.array([2]))
      >>> params = block.init(jax.random.key(0))
      >>> store = sj.store.KVStore()
      >>> for name, spec in block.tables().items():
      ...     store.init(name, jnp.ones(spec.shape), optax.sgd(0.1))
      >>> ids = block.row_ids(inputs)
      >>> block({name: store.pull(name, ids[name]) for name in ids}, params, inputs)
      Array([4.], dtype=float32)

    References:
      MXNet's proposal "Gluon Sparse API", `SparseBlock`.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        # Tables are checked however sparse_forward is called. An inherited method is
        # already wrapped.
        super().__init_subclass__(**kwargs)
        if "sparse_forward" in vars(cls):
            cls.sparse_forward = _checked(vars(cls)["sparse_forward"])

    @abc.abstractmethod
    def row_ids(self, inputs: PyTree) -> dict[str, Any]:
        """Returns the ids that `sparse_forward` will read, by table, of any shape.

        Duplicates are allowed. -1 marks an element that reads no row, such as padding;
        `Trainer` rejects any other id out of range.
        """

    @abc.abstractmethod
    def sparse_forward(
        self, tables: Mapping[str, Any], params: PyTree, inputs: PyTree
    ) -> Any:
        """Computes the outputs from pulled `tables`, dense `params` and `inputs`."""

    def __call__(
        self, tables: Mapping[str, Any], params: PyTree, inputs: PyTree
    ) -> Any:
        return self.sparse_forward(tables, params, inputs)

    def tables(self) -> dict[str, TableSpec]:
        """Returns the tables that the store must have, from all fields that are blocks.

        Raises:
          ValueError: two blocks use the same name for different tables.
        """
        specs: dict[str, TableSpec] = {}
        owners: dict[str, SparseBlock] = {}
        for block in _blocks([*_layer_fields(self).values()]):
            for name, spec in block.tables().items():
                owner = owners.setdefault(name, block)
                if specs.setdefault(name, spec) != spec:
                    why = f", of shapes {specs[name].shape} and {spec.shape}"
                elif owner is not block and getattr(type(block), "name", "") == name:
                    why = ", the default"  # both have the class's default
                else:
                    continue
                raise ValueError(
                    f"{type(self).__name__}.tables: two blocks have a table named "
                    f"{name!r}{why}. Give each block its own name: "
                    "SparseEmbedding(..., name='user'). To share one table, use the "
                    "same block twice, or give both blocks the same name and sizes."
                )
        return specs

    def init(self, key: jax.Array) -> Any:
        """Makes the dense parameters of each field that is a layer, by field name."""
        fields = _layer_fields(self)
        key = _arguments.as_key(key)
        keys = jax.random.split(key, max(len(fields), 1))
        return {name: _init(x, k) for (name, x), k in zip(fields.items(), keys)}


def merge_row_ids(*row_ids: Mapping[str, Any]) -> dict[str, Any]:
    """Merges several `row_ids`; concatenates the ids of a table that occurs in several.

    Args:
      *row_ids: mappings of table names to ids, integers of any shape.

    Returns:
      A dict of names to ids; `[n]` if concatenated, otherwise unchanged.

    Raises:
      TypeError: an argument is not a mapping, or ids are not integers.

    Example:
      >>> import numpy as np, sparsejax as sj
      >>> merged = sj.nn.merge_row_ids({"item": np.array([[3, 1]])}, {"item": [3]})
      >>> merged["item"].tolist()
      [3, 1, 3]
    """
    merged: dict[str, Any] = {}
    for ids_of in row_ids:
        if not isinstance(ids_of, Mapping):
            raise TypeError(
                "merge_row_ids: each argument must be a dict of table names to ids, as "
                f"returned by row_ids, got {_arguments.kind_of(ids_of)}."
            )
        for name, ids in ids_of.items():
            parts = [_arguments.as_integers(x) for x in (merged.get(name, ids), ids)]
            if name not in merged:
                merged[name] = ids
            elif all(map(_arguments.is_concrete, parts)):
                # In NumPy, so nothing is copied to a device.
                merged[name] = np.concatenate(
                    [np.ravel(x).astype(np.int64) for x in parts]
                )
            else:
                dtype = indexing.promote(*(x.dtype for x in parts))
                merged[name] = jnp.concatenate(
                    [x.reshape(-1).astype(dtype) for x in parts]
                )
    return merged


# ------------------------------------------------------------------ private


def _checked(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `forward`: checks `tables`, and raises if rows are used as an array."""

    @functools.wraps(forward)
    def sparse_forward(self, tables, params, inputs):
        owner = type(self).__name__
        if not isinstance(tables, Mapping):
            raise TypeError(
                f"{owner}: tables must be a dict of names to pulled rows "
                f"(SelectedRows) or whole tables, got {_arguments.kind_of(tables)}. "
                "Use {name: store.pull(name, ids)}."
            )
        if not isinstance(tables, PulledTables):
            tables = PulledTables(tables, owner)
        try:
            return forward(self, tables, params, inputs)
        except RowSparseTableError:  # of a block inside this one
            raise
        except TypeError as error:
            if "SelectedRows" not in str(error):
                raise
            short = str(error).strip().splitlines()[0].rstrip(".")
            raise RowSparseTableError(
                f"{owner}: a SelectedRows from `tables` was used where an array is "
                f"needed ({short}). It holds the rows of this batch, not the whole "
                "table. Read it with sparsejax.lookup, embedding_bag, dot or a "
                "SparseBlock, and pass the result to ordinary layers. For the pulled "
                f"rows themselves use `.values` (tables: {sorted(tables)})."
            ) from error

    return sparse_forward


def _layer_fields(block: Any) -> dict[str, Any]:
    """Returns a dataclass's fields that are layers, or lists or dicts of layers."""
    fields: dict[str, Any] = {}
    if dataclasses.is_dataclass(block):
        fields = {f.name: getattr(block, f.name) for f in dataclasses.fields(block)}
    attrs = getattr(block, "__dict__", {})
    for kind in type(block).__mro__:
        attrs = {**vars(kind), **attrs}
    if stray := [n for n, x in attrs.items() if n not in fields and _is_layered(x)]:
        owner, names = type(block).__name__, " and ".join(map(repr, stray))
        raise TypeError(
            f"{owner}: the layers in {names} are not dataclass fields, so tables() "
            f"and init(key) cannot find them. Make {owner} a frozen dataclass with "
            "annotated fields: @dataclasses.dataclass(frozen=True), then item: "
            "SparseEmbedding = SparseEmbedding(...). Or override tables() and "
            "init(key)."
        )
    return {name: x for name, x in fields.items() if _is_layered(x)}


def _is_layered(x: Any) -> bool:
    if isinstance(x, Mapping):
        x = tuple(x.values())
    if isinstance(x, (list, tuple)):
        return bool(x) and all(map(_is_layered, x))
    if isinstance(x, type):  # a class, not an instance
        return False
    return callable(getattr(x, "init", None)) and dataclasses.is_dataclass(x)


def _init(x: Any, key: jax.Array) -> Any:
    if isinstance(x, Mapping):
        keys = jax.random.split(key, len(x))
        return {name: _init(layer, k) for (name, layer), k in zip(x.items(), keys)}
    if isinstance(x, (list, tuple)):
        return [_init(layer, k) for layer, k in zip(x, jax.random.split(key, len(x)))]
    return x.init(key)


def _blocks(x: Any) -> Iterator[SparseBlock]:
    """Yields the block `x`, or those in its lists and dicts; does not enter blocks."""
    if isinstance(x, SparseBlock):
        yield x
    elif isinstance(x, (Mapping, list, tuple)):
        for part in x.values() if isinstance(x, Mapping) else x:
            yield from _blocks(part)
