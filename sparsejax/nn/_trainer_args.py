"""What a Trainer is given, checked: arguments, tables, and the ids of a batch."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from sparsejax import _arguments
from sparsejax._rows import is_selected_rows


CALL = "sparsejax.nn.Trainer"
MODES = ("error", "drop")

_OTHER_SHAPE = (
    "{call}: the store's table {name!r} has shape {found}, and {block} needs {want}."
)
_OTHER_DTYPE = (
    "{call}: the store's table {name!r} is of {found}, and {block} has param_dtype="
    "{want}. Make the table with dtype={want}, or the block with param_dtype={found}."
)
_MINUS_TWO = " (which stands for an id of -1 that is no padding)"


# ------------------------------------------------------------------ arguments


def check_block(block: Any) -> None:
    """An error unless `block` has a block's two methods."""
    if isinstance(block, type):
        raise TypeError(
            f"{CALL}: block is the class {block.__name__} itself. Make one of it: "
            f"{block.__name__}(...)."
        )
    for method in ("row_ids", "sparse_forward"):
        if not callable(getattr(block, method, None)):
            raise TypeError(
                f"{CALL}: block must have row_ids(inputs) and sparse_forward(tables, "
                "params, inputs), as a sparsejax.nn.SparseBlock has, got "
                f"{_kind(block)}. An ordinary layer does not say which rows it needs: "
                "use SparseEmbedding or SparseLinear in its place, or train it without "
                "a store, with sparsejax.value_and_grad and sparsejax.optim.lazy."
            )


def check_store(store: Any) -> None:
    """An error unless `store` has a store's methods."""
    for method in ("init", "names", "pull", "push", "prefetch"):
        if isinstance(store, type) or not callable(getattr(store, method, None)):
            raise TypeError(
                f"{CALL}: store must be a sparsejax.store.KVStore, got {_kind(store)}. "
                "Make one first."
            )


def check_tx(tx: Any, name: str = "tx") -> None:
    """An error unless `tx` has an optax transformation's functions."""
    for method in ("init", "update"):
        if not callable(getattr(tx, method, None)):
            raise TypeError(
                f"{CALL}: {name} must be an optax transformation, as optax.adam(1e-3) "
                f"is, got {_kind(tx)}."
            )


def check_function(name: str, what: str, f: Any) -> None:
    """An error unless `f` can be called."""
    if not callable(f):
        raise TypeError(f"{CALL}: {name} must be a function {what}, got {_kind(f)}.")


def check_mode(mode: Any) -> str:
    """`mode`, or an error if it is none."""
    if mode not in MODES:
        raise ValueError(
            f"{CALL}: mode must be 'error' or 'drop', got {mode!r}. It says what "
            "becomes of ids that are out of range."
        )
    return mode


def check_clip_norm(clip_norm: Any) -> Any:
    """`clip_norm`, a positive number or None, or an error."""
    try:
        fine = clip_norm is None or bool(clip_norm > 0)
    except (TypeError, ValueError):
        fine = False
    if not fine:
        raise ValueError(
            f"{CALL}: clip_norm must be a positive number or None, got {clip_norm!r}."
        )
    return clip_norm


def check_capacity(capacity: Any, store: Any) -> Any:
    """`capacity`, an int, or a dict of them for tables of the store, or an error."""
    if isinstance(capacity, Mapping):
        _check_names("capacity", capacity, store.names())
        return {n: _capacity(f"{CALL}, table {n!r}", x) for n, x in capacity.items()}
    return _capacity(CALL, capacity)


def _capacity(call: str, capacity: Any) -> int | None:
    return None if capacity is None else _arguments.check_capacity(call, capacity)


def _check_names(name: str, given: Any, known: Any) -> None:
    if stray := [x for x in given if x not in known]:
        found = ", ".join(map(repr, stray))
        raise ValueError(
            f"{CALL}: {name} is given for {found}, and there is no such table; there "
            f"are {sorted(known)}. Leave it out, or correct the name."
        )


def check_params(params: Any, store: Any) -> None:
    """An error if a dense parameter is a table or the name of one."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(
        params, is_leaf=is_selected_rows
    ):
        found = None
        if is_selected_rows(leaf):
            found = "a SelectedRows"
        elif isinstance(leaf, str) and leaf in store:
            found = f"the name of the store's table {leaf!r}"
        if found is not None:
            where = jax.tree_util.keystr(path)
            raise TypeError(
                f"{CALL}: the dense parameter {where} is {found}, which is row-sparse: "
                "its rows are owned by the store. Ordinary layers need arrays. Leave "
                "it out of params, name its ids in row_ids, and read it from `tables` "
                "in sparse_forward."
            )
        if isinstance(leaf, (str, bytes)):
            where = jax.tree_util.keystr(path)
            found = _kind(leaf)
            raise TypeError(
                f"{CALL}: params must be a tree of arrays, as block.init(key) makes "
                f"it; params{where} is {found}."
            )


# ------------------------------------------------------------------ tables


def transformations(table_tx: Any, wanted: Any, store: Any) -> Callable[[str], Any]:
    """From the name of a table to what updates it, checked."""
    if not isinstance(table_tx, Mapping):
        check_tx(table_tx, "table_tx")
        return lambda name: table_tx
    _check_names("table_tx", table_tx, {*wanted, *store.names()})
    for name in wanted:
        if name not in table_tx and name not in store:
            raise ValueError(
                f"{CALL}: table_tx is a dict without {name!r}, a table that has to be "
                f"made. Give a transformation for each of {sorted(wanted)}, or one for "
                "all."
            )
    return lambda name: table_tx[name]


def check_table(block: str, store: Any, name: str, spec: Any) -> None:
    """An error where the store's table is not the one that a block needs."""
    rows = store.pull(name, np.zeros(0, np.int32))
    say = {"call": CALL, "name": name, "block": block}
    if rows.shape != tuple(spec.shape):
        want = tuple(spec.shape)
        raise ValueError(_OTHER_SHAPE.format(found=rows.shape, want=want, **say))
    want = jax.numpy.dtype(spec.dtype)
    if rows.dtype != want:
        raise TypeError(_OTHER_DTYPE.format(found=rows.dtype, want=want, **say))


def check_trained(store: Any, name: str) -> None:
    """An error where the store's table is only for reading.

    The store says so at a push. That is after the step, with the dense parameters
    updated, so its own record is asked.
    """
    table = getattr(store, "_tables", {}).get(name)
    if table is not None and table.optimizer is None:
        raise ValueError(
            f"{CALL}: the store's table {name!r} was made with tx=None, for reading "
            "only, and a step could not push to it. Make it with an optimizer: "
            f"store.init({name!r}, shape, tx)."
        )


# ------------------------------------------------------------------ a batch


def check_named(block: str, store: Any, ids: Any) -> dict[str, Any]:
    """What a block's `row_ids` gave, or an error if it is no dict of the store's."""
    if not isinstance(ids, Mapping):
        raise TypeError(
            f"{CALL}: {block}.row_ids must return a dict of table names to ids, got "
            f"{_kind(ids)}."
        )
    for name in ids:
        if name not in store:
            names = sorted(store.names())
            raise ValueError(
                f"{CALL}: {block}.row_ids names the table {name!r}, which the store "
                f"does not have; it has {names}. Make it with store.init({name!r}, "
                f"shape, tx), or say it in {block}.tables()."
            )
    return dict(ids)


def check_ids(block: str, name: str, ids: Any, height: int) -> None:
    """An error unless each id is in range, or -1, which stands for no row."""
    ids = np.asarray(_arguments.as_integers(f"{CALL}: table {name!r}", ids)).reshape(-1)
    if not ids.size or (ids.min() >= -1 and ids.max() < height):
        return
    bad = (ids < -1) | (ids >= height)
    first = int(ids[np.argmax(bad)])
    raise ValueError(
        f"{CALL}: {int(np.sum(bad))} of {ids.size} ids that {block}.row_ids names of "
        f"the table {name!r} are out of range, the first is "
        f"{first}{_MINUS_TWO if first == -2 else ''} and the table has {height} rows. "
        "Nothing was updated: such an id reads NaN, and after one step all parameters "
        "would be. Correct the ids, name a padding_id, give the block mode='zero', or "
        "ask for Trainer(mode='drop')."
    )


def explain_check(block: str, run: Callable[..., Any], *args: Any) -> Any:
    """`run(*args)`; where a check was met that needs `checked=True`, an error says so.

    JAX's own names neither the block nor the option.
    """
    try:
        return run(*args)
    except ValueError as error:
        if "checkify.check" not in str(error):
            raise
        raise ValueError(
            f"{CALL}: {block} has a check in it, as blocks with mode='error' have, and "
            "a compiled step can only make it with checked=True. Say "
            "Trainer(checked=True), or use another mode."
        ) from error


def _kind(x: Any) -> str:
    return f"the class {x.__name__}" if isinstance(x, type) else _arguments.kind_of(x)
