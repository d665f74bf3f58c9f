"""The ids of a SelectedRows as a leaf of a tree: an array without arithmetic.

`jax.tree.map(jnp.add, g1, g2)` must not add row ids. So a SelectedRows shows its ids to
trees as `RowIds`. Outside of programs that is an array that is read, moved and saved as
the integers it holds. Inside programs its type is `row_ids[int32]`, which JAX moves
(stacks, indexes, selects, shards, donates) and refuses to compute with. `seal` makes it
of plain ids and `unseal` gives them back; compiled programs contain neither.

Sharp edges: NumPy reads plain integers, so `np.asarray(leaf) * 2` is not refused.
Outside of programs `jnp.ones_like` and `jnp.full_like` make plain integers.
"""

import copy
import functools
from collections.abc import Iterator
from typing import Any, NoReturn

import jax
import numpy as np
from jax.core import Tracer

from sparsejax import _compat


INSTEAD = (
    "Write g1 + g2, g * s or g.map(f) for gradients g; over devices "
    "sparsejax.parallel.pmean and sparsejax.parallel.psum in place of jax.lax's; "
    "sparsejax.optim.global_norm for the norm; and put optax transformations inside "
    "sparsejax.optim.lazy(...), not outside."
)


def seal(ids: Any) -> Any:
    """Plain ids as a leaf; what are no integers (a placeholder) stays as it is."""
    if isinstance(ids, Tracer):
        return _compat.to_opaque(ids, _type(ids.dtype)) if _is_integer(ids) else ids
    if isinstance(ids, jax.Array | np.ndarray):
        return RowIds(ids) if _is_integer(ids) else ids
    if type(ids) is jax.ShapeDtypeStruct and _is_integer(ids):
        return RowIdsSpec(ids.shape, ids.dtype, sharding=ids.sharding)
    return ids


def unseal(leaf: Any) -> Any:
    """The plain ids of a leaf; what `seal` did not make stays as it is."""
    if isinstance(leaf, RowIds):
        return leaf.plain
    if isinstance(leaf, Tracer):
        return _compat.from_opaque(leaf)
    if isinstance(leaf, jax.ShapeDtypeStruct):
        # Of `jax.eval_shape` its dtype is that inside programs.
        dtype = getattr(leaf.dtype, "ints", leaf.dtype)
        return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=leaf.sharding)
    return leaf


def is_sealed_tracer(leaf: Any) -> bool:
    """Whether `leaf` is traced ids that `seal` made."""
    return isinstance(leaf, Tracer) and _compat.is_opaque(leaf)


class RowIdsSpec(jax.ShapeDtypeStruct):
    """The shape of `RowIds`. Like them it shows the dtype of the integers."""


class RowIds(jax.Array):
    """Row ids: read and moved as the array that they hold; arithmetic raises."""

    __slots__ = ("plain",)
    __hash__ = None
    __array_priority__ = 100

    def __init__(self, plain: Any):
        if isinstance(plain, np.ndarray):  # 64 bits become 32, as where JAX takes it
            dtype = jax.dtypes.canonicalize_dtype(plain.dtype)
            plain = plain.astype(dtype, copy=False)
        self.plain = plain

    @property
    def dtype(self) -> Any:
        """That of the integers; while a program is traced, that of its arrays."""
        plain = self.plain.dtype
        return _type(plain) if _compat.is_tracing() else plain

    def __array__(self, *args: Any, **kwargs: Any) -> np.ndarray:
        return np.asarray(self.plain).__array__(*args, **kwargs)

    def __array_ufunc__(self, ufunc: Any, method: str, *args: Any, **kwargs: Any):
        if ufunc not in (np.equal, np.not_equal):
            refuse(f"np.{ufunc.__name__}")
        return getattr(ufunc, method)(*map(unseal, args), **kwargs)

    def __repr__(self) -> str:
        return f"RowIds({np.asarray(self.plain)})"

    def __reduce__(self) -> Any:
        return RowIds, (self.plain,)

    def __deepcopy__(self, memo: Any) -> "RowIds":
        return RowIds(copy.deepcopy(self.plain, memo))

    def __iter__(self) -> Iterator["RowIds"]:
        return map(RowIds, self.plain)

    def __eq__(self, other: Any) -> Any:
        return self.plain == unseal(other)

    def __ne__(self, other: Any) -> Any:
        return self.plain != unseal(other)

    def block_until_ready(self) -> "RowIds":
        jax.block_until_ready(self.plain)
        return self

    def astype(self, dtype: Any = None, *args: Any, **kwargs: Any) -> "RowIds":
        del args, kwargs
        if dtype != self.dtype:
            refuse("astype")
        return self


# What else an array has: some attributes read it, some move it, and the rest compute.
_READ = """
    __bool__ __contains__ __ge__ __gt__ __index__ __int__ __le__ __len__ __lt__
    _committed addressable_data addressable_shards committed copy_to_host_async delete
    device devices format global_shards is_deleted is_fully_addressable
    is_fully_replicated item itemsize layout nbytes ndim on_device_size_in_bytes shape
    sharding size tobytes tolist unsafe_buffer_pointer weak_type
"""
_MOVE = """
    __getitem__ copy flatten ravel repeat reshape squeeze swapaxes take to_device
    transpose
"""


def refuse(what: str) -> NoReturn:
    raise TypeError(
        f"SelectedRows: {what} was called on its row ids, by jax.tree.map or another "
        f"function on trees, which would make other rows of them. {INSTEAD}"
    )


def _complete() -> None:
    """Gives RowIds what an array has besides."""
    defined = {*dir(object), *vars(RowIds), "__weakref__"}
    for name in (*_READ.split(), *_MOVE.split(), *dir(jax.Array)):
        if name not in defined:
            defined.add(name)
            setattr(RowIds, name, _attribute(name))


def _attribute(name: str) -> Any:
    def read(self, *args):
        found = getattr(self.plain, name)
        return found(*args) if name.startswith("__") else found

    def move(self, *args, **kwargs):
        return RowIds(getattr(self.plain, name)(*args, **kwargs))

    def compute(self, *args, **kwargs):
        del self, args, kwargs
        refuse(name)

    if name in _READ.split():
        return read if name.startswith("__") else property(read)
    if name in _MOVE.split():
        return move
    return compute if callable(getattr(jax.Array, name)) else property(compute)


_complete()


def _is_integer(x: Any) -> bool:
    return getattr(x.dtype, "kind", None) in ("i", "u")


@functools.cache
def _type(ints: np.dtype) -> _compat.OpaqueInts:
    """The dtype of ids inside programs."""
    short = f"row_ids[{ints}]"
    label = f"{short}, the row ids of a SelectedRows reached through a tree. {INSTEAD}"
    return _compat.OpaqueInts(np.dtype(ints), RowIds, short, label)


_compat.register_opaque(RowIds, RowIdsSpec, _type)
