"""Types of arguments, checks of them, and values as errors show them.

One rule for ids in all modules: an id outside `[0, height)` is out of range. It never
wraps, and is clamped only in mode "clip".
"""

import contextlib
import functools
import operator
import os
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from sparsejax import _compat


# ------------------------------------------------------------------ types

# Names for the types of public arguments, which `help()` and editors show. A type
# checker cannot check all of them: a `PyTree` is `Any`.


class SupportsJaxArray(Protocol):
    """A variable of a framework, such as `flax.nnx.Param`."""

    def __jax_array__(self) -> Any: ...


class Spec(Protocol):
    """A shape and a dtype instead of an array, as `jax.ShapeDtypeStruct`."""

    @property
    def shape(self) -> Any: ...

    @property
    def dtype(self) -> Any: ...


# Accepted by `jnp.asarray`: an array, a number, a variable, or nested lists of them.
ArrayLike: TypeAlias = jax.typing.ArrayLike | SupportsJaxArray | Sequence[Any]

# Arrays, SelectedRows and SegmentTensors in dicts, lists, tuples and other containers.
PyTree: TypeAlias = Any

# A number, not a tree of numbers.
Scalar: TypeAlias = float | jax.Array

# A typed or raw PRNG key, or an int for `jax.random.key`.
KeyLike: TypeAlias = jax.Array | int

# A SegmentTensor of {"index", "value"}, a CSR matrix of scipy, or BCSR.
CSRLike: TypeAlias = Any

# A list, an array, or a column of pandas, polars, pyarrow or Hugging Face datasets.
ColumnLike: TypeAlias = Any

# Rows to shard: an array, a `jax.ShapeDtypeStruct`, or a function of ids.
TableLike: TypeAlias = Any

PathLike: TypeAlias = str | os.PathLike[str]

# True for a bar, False for nothing, or a function of (done, total).
Progress: TypeAlias = bool | Callable[..., Any]

# `(key, shape, dtype) -> array`, as in `jax.nn.initializers`.
Initializer: TypeAlias = Callable[[Any, Any, Any], Any]


# ------------------------------------------------------------------ our own types


class NotAnArray:
    """A base for types that are not arrays: JAX and NumPy must not convert them.

    A subclass defines two texts for errors: `_as_array`, a sentence that says how to
    get arrays, and `_parts`, the parts that can be compared.
    """

    _as_array: str
    _parts: str

    # `array + x` must call our __radd__, not NumPy's loop over objects.
    __array_ufunc__ = None
    # Without these, Python would iterate by `self[0], self[1], ...`, without an end.
    __iter__ = None
    __contains__ = None

    def __array__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError(
            f"A {type(self).__name__} was used where an array is needed, by "
            f"jnp.asarray, np.asarray or a NumPy function. {self._as_array}"
        )

    def __eq__(self, other: Any) -> bool:
        """Raises a TypeError for arrays and such types; else compares the identity."""
        if isinstance(other, (NotAnArray, int, float, np.generic)) or is_array(other):
            raise TypeError(
                f"{type(self).__name__} has no == and !=. Compare {self._parts}."
            )
        return NotImplemented

    def __hash__(self) -> int:
        return object.__hash__(self)


# ------------------------------------------------------------------ ids


def x64_enabled() -> bool:
    """Returns True if JAX keeps 64-bit types."""
    return jax.config.jax_enable_x64  # pyright: ignore[reportAttributeAccessIssue]


def has_index_dtype(height: int) -> bool:
    """Returns True if JAX has an id for each of `height` rows and for an empty slot."""
    return height <= jnp.iinfo(jnp.int32).max or x64_enabled()


def index_dtype(height: int, dtype: Any = jnp.int32) -> Any:
    """Returns `dtype` if it can hold `height` (an empty slot), else int32 or int64."""
    if _compat.is_symbolic_dim(height):  # JAX holds symbolic sizes in 32 bits
        return jnp.dtype(jnp.int32)
    for candidate in (dtype, jnp.int32):
        if height <= jnp.iinfo(candidate).max:
            return jnp.dtype(candidate)
    if not has_index_dtype(height):
        raise ValueError(
            f"a table of {height} rows needs 64-bit ids. Set jax_enable_x64."
        )
    return jnp.dtype(jnp.int64)


def as_integers(ids: Any, name: str = "ids") -> jax.Array | np.ndarray:
    """Returns ids as a JAX or NumPy array of integers, or raises a TypeError."""
    array: Any = ids
    if not isinstance(ids, np.ndarray):
        try:
            array = np.asarray(ids) if isinstance(ids, np.generic) else jnp.asarray(ids)
        except OverflowError:  # a list with an int that 32 bits cannot hold
            array = np.asarray(ids)
        except (TypeError, ValueError):
            array = np.array(None)
    if array.size == 0 and not jnp.issubdtype(array.dtype, jnp.integer):
        return array.astype(jnp.int32)  # [] is float32
    if jnp.issubdtype(array.dtype, jnp.integer):
        return array
    if _has_words(ids):
        fix = (
            "sparsejax.data.HashIds and sparsejax.data.Vocabulary turn words into ids."
        )
    elif array.dtype == jnp.bool_ and name in ("ids", "rows"):
        fix = "For a mask use jnp.flatnonzero(mask)."
    elif hasattr(ids, "segment_ids"):
        fix = "Pass its .values."
    elif isinstance(ids, (list, tuple)) and not array.ndim:  # jnp.asarray refused them
        fix = "For lists of different lengths or sets pass SegmentTensor.from_lists."
    else:
        fix = "Cast with .astype(jnp.int32); ids have at most 64 bits."
        fix = convert_tensor(ids, name) or fix
    given = ids if array.dtype == object else array
    raise TypeError(f"{name} must be integers, got {kind_of(given)}. {fix}")


def _has_words(x: Any) -> bool:
    """Returns True for strings or bytes, or an array or nested list of them."""
    try:
        x = np.asarray(x)
    except (TypeError, ValueError):  # not an array, or lists of different lengths
        return False
    first = x.flat[0] if x.size and x.dtype == object else None
    return x.dtype.kind in "UST" or isinstance(first, (str, bytes))


def convert_tensor(x: Any, name: str) -> str:
    """Says how to convert `x`, a tensor of PyTorch or TensorFlow; empty for others."""
    module = type(x).__module__.partition(".")[0]
    ways = {
        # DLPack has bfloat16 and GPUs too.
        "torch": f"jnp.asarray({name}.detach().cpu().numpy()), or "
        f"jax.dlpack.from_dlpack({name}.detach())",
        "tensorflow": f"jnp.asarray({name}.numpy())",
    }
    return f"Convert the tensor: {ways[module]}." if module in ways else ""


def saturate(ids: Any) -> Any:
    """Clips 64-bit NumPy ids to 32 bits if x64 is off: JAX would wrap them."""
    wide = isinstance(ids, np.ndarray) and ids.dtype.kind in "iu"
    if not wide or ids.itemsize < 8 or x64_enabled():
        return ids
    lowest, highest = jnp.iinfo(jnp.int32).min, jnp.iinfo(jnp.int32).max
    return np.clip(ids, max(lowest, np.iinfo(ids.dtype).min), highest).astype(np.int32)


def as_ids(ids: Any, height: int, name: str = "ids") -> jax.Array:
    """Returns ids as a signed array that can hold `height`; out of range remains so."""
    ids = jnp.asarray(saturate(as_integers(ids, name)))
    wide = index_dtype(height)
    if jnp.issubdtype(ids.dtype, jnp.unsignedinteger):
        # A large unsigned id must not become a small or negative signed one.
        limit = np.array(min(height, jnp.iinfo(ids.dtype).max), ids.dtype)
        ids = jnp.minimum(ids, limit)
    elif jnp.iinfo(ids.dtype).bits > jnp.iinfo(wide).bits:
        ids = jnp.clip(ids, scalar(-1, ids), scalar(height, ids))
    return ids.astype(wide)


def as_indices(ids: Any, height: int, way_out: str) -> jax.Array:
    """Returns ids as `array[ids]` reads them, in `[0, height)`.

    An id below 0 counts from the end. Any other id out of range reads the nearest row.
    Slices, masks and indices of several axes raise a TypeError that ends in `way_out`.
    """
    if ids is None or ids is ... or isinstance(ids, (slice, tuple, bool, np.bool_)):
        shown = "..." if ids is ... else show(ids)
        raise TypeError(
            f"An index must be an int or an array of integers, got {shown}. {way_out}"
        )
    ids = jnp.asarray(saturate(as_integers(ids)))
    ids = ids.astype(index_dtype(height, ids.dtype))
    return _in_range(ids, scalar(height, ids), scalar(max(height - 1, 0), ids))


# Jitted so that JAX traces it once for tables of all heights.
@functools.partial(jax.jit, inline=True)
def _in_range(ids: jax.Array, height: Any, last: Any) -> jax.Array:
    zero = jnp.zeros((), ids.dtype)
    return jnp.clip(ids + jnp.where(ids < 0, height, zero), zero, last)


def as_array(x: Any) -> Any:
    """Returns NumPy arrays and variables as JAX arrays, and other objects unchanged."""
    if isinstance(x, jax.Array):
        return x
    is_array_like = isinstance(x, np.ndarray) or hasattr(x, "__jax_array__")
    return jnp.asarray(x) if is_array_like else x


def to_array(x: Any, name: str, what: str = "an array of numbers") -> jax.Array:
    """Returns `x` as a JAX array, or raises a TypeError."""
    try:
        return jnp.asarray(x)
    except (OverflowError, TypeError, ValueError):
        raise TypeError(f"{name} must be {what}, got {kind_of(x)}.") from None


def as_scalar(x: Any, name: str, dtype: Any) -> jax.Array:
    """Returns `x`, a number or a scalar array, as a scalar of `dtype`."""
    array = to_array(x, name, "a scalar")
    if array.ndim:
        raise ValueError(f"{name} must be a scalar, got {kind_of(array)}.")
    return array.astype(dtype)


def as_floats(x: Any, name: str) -> jax.Array:
    """Returns `x` as a JAX array of floats, or raises a TypeError."""
    x = to_array(x, name, "an array of floats")
    check_floats(x, name)
    return x


def check_floats(x: Any, name: str) -> None:
    """Raises unless `x`, an array or a table, is floating point."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        shown = f"{x.dtype} of shape {tuple(x.shape)}"
        raise TypeError(f"{name} must be floats, got {shown}. Cast with .astype.")


def show_spec(x: Any) -> str:
    """Returns `float32[3,2]` for an array or a spec, else the repr."""
    # A class may have attributes of these names, as in jax.tree.map(type, grads).
    if isinstance(x, type) or not (hasattr(x, "dtype") and hasattr(x, "shape")):
        return repr(x)
    return f"{x.dtype.name}[{','.join(map(str, x.shape))}]"


def is_array(x: Any) -> bool:
    """Returns True if `x` is a JAX array, a tracer or a NumPy array."""
    return isinstance(x, (jax.Array, np.ndarray))


def kind_of(x: Any) -> str:
    """Describes `x` for an error: `a list`, `an int`, `a float32[3,2] array`."""
    if x is None:
        return "None"
    kind = f"{show_spec(x)} array" if is_array(x) else type(x).__name__
    return f"{'an' if kind[0] in 'AEIOaeio' else 'a'} {kind}"


def show(x: Any) -> str:
    """Returns the repr of `x` for an error, or its kind if it is large or traced."""
    if isinstance(x, Tracer):
        return f"a traced {show_spec(x)}"
    if is_array(x) and x.size > 8:
        return kind_of(x)
    if isinstance(x, (dict, list, tuple)) and any(map(is_array, jax.tree.leaves(x))):
        return show_tree(x)
    return _shortened(repr(x))


def show_tree(tree: Any, is_leaf: Any = None) -> str:
    """Returns the structure of a tree for an error: `{'table': *}`."""
    text = str(jax.tree.structure(tree, is_leaf=is_leaf))
    if "CustomNode" in text:
        return kind_of(tree)
    return _shortened(text.removeprefix("PyTreeDef(").removesuffix(")"))


def show_mismatch(
    prefix: Any, tree: Any, is_leaf: Callable[[Any], bool] | None = None, at: str = ""
) -> str:
    """Returns a sentence for an error: where `prefix` is not a prefix of `tree`.

    Empty if there is no such place, or if only static fields of a container differ.
    None is a leaf of `prefix`.
    """
    entries, expected = _children(prefix, is_leaf), _children(tree, is_leaf)
    if prefix is None or entries is None:
        return ""
    where = f"At {at or 'the top'}"
    if expected is None or type(prefix) is not type(tree):
        return f"{where} it has {kind_of(prefix)} for {kind_of(tree)}."
    extra = [key for key in entries if key not in expected]
    missing = [key for key in expected if key not in entries]
    names = lambda keys: f"{', '.join(keys[:3])}{' ...' * (len(keys) > 3)}"
    parts = [f"it lacks {names(missing)}"] * bool(missing)
    parts += [f"has {names(extra)}, which the tree lacks"] * bool(extra)
    if parts:
        it = "" if missing else "it "
        return f"{where} {it}{', and '.join(parts)}."
    differences = (
        show_mismatch(entries[key], expected[key], is_leaf, at + key) for key in entries
    )
    return next(filter(None, differences), "")


def _children(x: Any, is_leaf: Callable[[Any], bool] | None) -> dict[str, Any] | None:
    """Returns the children of a container by key, as `['table']`; None for a leaf."""
    stop = lambda y: y is not x or (is_leaf is not None and is_leaf(y))
    pairs, _ = jax.tree_util.tree_flatten_with_path(x, is_leaf=stop)
    if pairs and not pairs[0][0]:
        return None
    return {jax.tree_util.keystr(path): child for path, child in pairs}


def _shortened(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 80 else f"{text[:77]}..."


def show_table(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Aligns rows of cells in lines, with a rule below the first row.

    The columns in `right` are right-aligned.
    """
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = [
        "  ".join(
            cell.rjust(width) if k in right else cell.ljust(width)
            for k, (cell, width) in enumerate(zip(row, widths))
        ).rstrip()
        for row in rows
    ]
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])


def scalar(value: Any, like: Any) -> Any:
    """Returns a number or size in the dtype of `like`, for strict type promotion."""
    if _compat.is_symbolic_dim(value):
        return jnp.asarray(value).astype(like.dtype)
    return np.array(value, like.dtype)


def may_exceed(size: Any, limit: Any) -> bool:
    """Returns True if a size can be above `limit`; a symbolic one usually can."""
    try:
        return bool(size > limit)
    except _compat.InconclusiveDimensionOperation:
        return True


def is_concrete(x: Any) -> bool:
    """Returns True if `x` is an array with a known value, not a tracer."""
    return is_array(x) and not isinstance(x, Tracer)


def static_int(name: str, x: Any, least: int | None = 0, hint: str = "") -> int:
    """Returns `x` as an int of at least `least`; a symbolic size as it is.

    `least` is 0 or 1, or None for any int.
    """
    if _compat.is_symbolic_dim(x):
        return x
    kinds = {None: "a static int", 0: "a static, non-negative int"}
    kind = kinds.get(least, "a positive int")
    message = f"{name} must be {kind}, got {show(x)}.{hint and ' '}{hint.strip()}"
    try:
        number = operator.index(x)
    except TypeError:
        if isinstance(x, Tracer):
            message += " Under jit, make it a static argument (static_argnames)."
        raise TypeError(message) from None
    if least is not None and number < least:
        raise ValueError(message)
    return number


def next_power_of_two(least: int) -> int:
    """Returns the smallest power of two that is at least `least`, and at least 1."""
    return 1 << max(least - 1, 0).bit_length()


def is_predicate(x: Any, tree: Any) -> bool:
    """Returns True if `x` is a function of leaves, not a tree (prefix) of bools.

    The container of a tree may be callable, as a module of equinox is.
    """
    if not callable(x) or type(x) is type(tree):
        return False
    return not any(isinstance(leaf, (bool, np.bool_)) for leaf in jax.tree.leaves(x))


def match_prefix(
    name: str, prefix: PyTree, tree: PyTree, is_leaf: Callable | None = None
) -> list[tuple[Any, Any]]:
    """Returns each leaf of a prefix of `tree`, also None, with its subtree."""
    is_none = lambda x: x is None
    leaves, treedef = jax.tree.flatten(prefix, is_leaf=is_none)
    try:
        return list(zip(leaves, treedef.flatten_up_to(tree)))
    except (ValueError, TypeError):
        raise ValueError(
            f"{name} must be a prefix of the tree of parameters, got "
            f"{show_tree(prefix, is_none)}. {show_mismatch(prefix, tree, is_leaf)}"
        ) from None


def flag_leaves(
    name: str, flags: PyTree, tree: PyTree, is_leaf: Callable | None = None
) -> list[bool | None]:
    """Returns a flag for each leaf of `tree`.

    Args:
      name: of the argument, for errors.
      flags: a prefix of `tree` with True, False or None at its leaves, or a function
        `(path, leaf) -> bool`.
      tree: any tree.
      is_leaf: what counts as a leaf of `tree`.
    """
    if is_predicate(flags, tree):
        paths = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)
        return [bool(flags(path, leaf)) for path, leaf in paths]
    result = []
    for flag, part in match_prefix(name, flags, tree, is_leaf):
        if flag is not None and not isinstance(flag, (bool, np.bool_)):
            raise TypeError(
                f"{name} must be True, False, None, a prefix of the parameters with "
                f"these, or a function (path, leaf) -> bool, got {show(flag)}."
            )
        result += [flag] * len(jax.tree.leaves(part, is_leaf=is_leaf))
    return result


def is_float_array(x: Any, rank: int = 0, kind: Any = jnp.inexact) -> bool:
    """Returns True if `x` is an array or a spec of floats of at least this rank.

    With rank 2, it is a table unless the user says that it is not. `jnp.floating` as
    `kind` leaves out complex numbers.
    """
    dtype = getattr(x, "dtype", None)
    if dtype is None or len(x.shape) < rank:
        return False
    return jnp.issubdtype(dtype, kind)


def check_mode(mode: Any, modes: Sequence[str], hint: str) -> str:
    """Returns `mode` if it is one of `modes`, `"raise"` as `"error"`; else raises."""
    if isinstance(mode, str) and mode in (*modes, "raise"):
        return "error" if mode == "raise" else mode
    names = ", ".join(map(repr, modes))
    raise ValueError(f"mode must be one of {names}, got {show(mode)}. {hint}")


def check_bool(name: str, x: Any) -> bool:
    """Returns `x` as a bool, or raises a TypeError."""
    if not isinstance(x, (bool, np.bool_)):
        raise TypeError(f"{name} must be True or False, got {show(x)}.")
    return bool(x)


def as_key(key: Any, from_int: bool = False) -> jax.Array:
    """Returns `key` as one typed PRNG key, or raises a TypeError.

    Also accepts a raw key (`jax.random.PRNGKey`), and with `from_int` an int.
    """
    if from_int and isinstance(key, (int, np.integer)) and not isinstance(key, bool):
        return jax.random.key(int(key))
    array = as_array(key)
    if isinstance(array, jax.Array):
        if array.dtype == jnp.uint32:
            with contextlib.suppress(TypeError, ValueError):  # not the data of a key
                array = jax.random.wrap_key_data(array)
        if jnp.issubdtype(array.dtype, jax.dtypes.prng_key) and array.size == 1:
            return array.reshape(())
    raise TypeError(
        f"key must be one PRNG key{' or an int' if from_int else ''}, for example "
        f"jax.random.key(0), got {kind_of(key) if is_array(key) else show(key)}."
    )


def report_overflow(values: jax.Array, count: Any, capacity: Any) -> Any:
    """Raises if `count > capacity`; inside jit, `values` become NaN instead."""
    if is_concrete(count):
        if int(count) > capacity:
            raise ValueError(
                f"{count} rows do not fit in capacity={capacity}. Pass {count} or more."
            )
        return values
    if not jnp.issubdtype(values.dtype, jnp.inexact):
        raise ValueError(
            f"capacity={capacity} may be too small, and inside jit {values.dtype} "
            "values cannot become NaN to report it. Omit capacity."
        )
    return jnp.where(count > capacity, jnp.array(jnp.nan, values.dtype), values)
