"""Files of SelectedRows: PaddlePaddle's binary layout, and NumPy's .npz."""

from __future__ import annotations

import math
import os
import pathlib
import struct
from collections.abc import Mapping
from typing import BinaryIO

import jax
import jax.numpy as jnp
import numpy as np

from sparsejax import _arguments
from sparsejax._arguments import PathLike
from sparsejax._files import ArraySpec, read_npz, replacing
from sparsejax._rows import SelectedRows
from sparsejax.desc import _protobuf


_ZIP_START = b"PK"  # of .npz, which is a zip archive
_VERSION = 0
_MOST_AXES = 32

# Of an .npz file, by name.
_ARRAYS = {
    "rows": ArraySpec("iu", (1,)),
    "values": ArraySpec("biufc", range(1, _MOST_AXES + 1)),
    "height": ArraySpec("iu", (0,)),
    "data_type": ArraySpec("U", (0,), required=False),
}


def save_selected_rows(path: PathLike, selected_rows: SelectedRows) -> None:
    """Writes a SelectedRows to a file, in PaddlePaddle's binary layout or as .npz.

    The layout: u32 version 0, u64 n, n row ids of i64, i64 height, then the values as a
    tensor: u32 version 0, i32 length of a `TensorDesc` message, the message, the data.
    Empty slots are left out. The order of the rows and duplicates are kept.

    An old file is replaced when the new one is complete, so a crash does not damage it.

    Args:
      path: the file. A name that ends in `.npz` selects NumPy's format, with the arrays
        `rows`, `values` and `height`; any other name selects PaddlePaddle's.
      selected_rows: `SelectedRows`.

    Raises:
      ImportError: PaddlePaddle's layout without the protobuf library.
      TypeError: not a SelectedRows.
      ValueError: a data type that PaddlePaddle's format does not have, or a stack of
        tables.

    Example:
      >>> import os, tempfile
      >>> import jax.numpy as jnp, sparsejax as sj
      >>> g = sj.SelectedRows(jnp.array([4, 1]), jnp.ones((2, 2)), height=6)
      >>> path = os.path.join(tempfile.mkdtemp(), "gradient")
      >>> sj.desc.save_selected_rows(path, g)
      >>> os.path.getsize(path), sj.desc.load_selected_rows(path)
      (66, SelectedRows(rows=[4 1], values=float32[2,2], height=6, num_rows=2))

    References:
      PaddlePaddle, `paddle.save(..., use_binary_format=True)`.
    """
    if not isinstance(selected_rows, SelectedRows):
        raise TypeError(
            "sparsejax.desc.save_selected_rows: selected_rows must be a SelectedRows, "
            f"got {_arguments.kind_of(selected_rows)}. Save arrays with np.save, and "
            "trees with orbax."
        )
    if selected_rows.stack:
        raise ValueError(
            "sparsejax.desc.save_selected_rows: selected_rows must have one axis of "
            f"rows, got a stack of tables of shape {selected_rows.shape}. Save its "
            ".unstacked(), whose ids count the rows of all tables."
        )
    filled = np.asarray(selected_rows.filled())
    rows = np.asarray(selected_rows.rows)[filled].astype("<i8")
    values = np.ascontiguousarray(np.asarray(selected_rows.values)[filled])
    path = pathlib.Path(path)
    if path.suffix == ".npz":
        with replacing(path) as file:
            # NumPy cannot save bfloat16 and other types of ml_dtypes (kind "V"): these
            # are saved as bytes and a name.
            is_foreign = values.dtype.kind == "V"
            np.savez(
                file,
                rows=rows,
                values=values.view(np.uint8) if is_foreign else values,
                data_type=values.dtype.name,
                height=selected_rows.height,
            )
        return
    desc = _protobuf.message_types()["TensorDesc"]()
    name, call = values.dtype.name, "sparsejax.desc.save_selected_rows"
    _protobuf.fill_tensor(call, desc, "the values", name, values.shape)
    message = desc.SerializeToString(deterministic=True)
    with replacing(path) as file:
        file.write(struct.pack("<IQ", _VERSION, len(rows)))
        file.write(rows.tobytes())
        file.write(struct.pack("<qIi", selected_rows.height, _VERSION, len(message)))
        file.write(message)
        file.write(values.astype(values.dtype.newbyteorder("<"), copy=False).tobytes())


def load_selected_rows(path: PathLike) -> SelectedRows:
    """Reads what `save_selected_rows` or PaddlePaddle wrote.

    Args:
      path: a file in PaddlePaddle's binary layout, or .npz, recognized by its first
        bytes.

    Returns:
      `SelectedRows`, the rows in the order of the file, without empty slots. Without
      x64, values of 64 bits stay a NumPy array: saved again they are unchanged, and
      arithmetic converts them to 32 bits as usual.

    Raises:
      FileNotFoundError: there is no such file.
      ImportError: PaddlePaddle's layout without the protobuf library.
      ValueError: another kind of file, or one that is truncated or damaged.

    Example:
      >>> import os, tempfile
      >>> import jax.numpy as jnp, sparsejax as sj
      >>> path = os.path.join(tempfile.mkdtemp(), "gradient.npz")
      >>> g = sj.SelectedRows(jnp.array([4, 1]), jnp.ones((2, 2)), height=6)
      >>> sj.desc.save_selected_rows(path, g)
      >>> sj.desc.load_selected_rows(path).to_dense()[4]
      Array([1., 1.], dtype=float32)

    References:
      PaddlePaddle, `paddle.load`.
    """
    call = "sparsejax.desc.load_selected_rows"
    what = "a SelectedRows as PaddlePaddle or save_selected_rows writes it"
    path = pathlib.Path(path)
    with open(path, "rb") as file:
        is_npz = file.read(len(_ZIP_START)) == _ZIP_START
    arrays = read_npz(call, path, what, _ARRAYS) if is_npz else None
    try:
        if arrays is None:
            with open(path, "rb") as file:
                rows, values, height = _read_paddle(file)
        else:
            rows, values, height = _parts_of(arrays)
        _check_parts(rows, values, height)
    except ValueError as error:
        raise ValueError(f"{call}: {path} is not {what}: {error}.") from None
    rows = jnp.asarray(rows.astype(_arguments.index_dtype(height)))
    if jax.dtypes.canonicalize_dtype(values.dtype) == values.dtype:
        return SelectedRows(rows, jnp.asarray(values), height)
    spec = SelectedRows(rows, jax.ShapeDtypeStruct(values.shape, values.dtype), height)
    return jax.tree.unflatten(jax.tree.structure(spec), [rows, values])


# ------------------------------------------------------------------ formats


def _read_paddle(file: BinaryIO) -> tuple[np.ndarray, np.ndarray, int]:
    size = left = os.fstat(file.fileno()).st_size

    def take(count: int, part: str) -> bytes:
        nonlocal left
        if not 0 <= count <= left:
            raise ValueError(f"it ends after {size} bytes, within {part}")
        left -= count
        return file.read(count)

    def number(form: str, part: str) -> int:
        return struct.unpack(form, take(struct.calcsize(form), part))[0]

    def version(part: str) -> None:
        found = number("<I", part)
        if found != _VERSION:
            raise ValueError(f"it has version {found}, but only version 0 is supported")

    version("its version")
    count = number("<Q", "the number of rows")
    rows = np.frombuffer(take(8 * count, "the rows"), "<i8")
    height = number("<q", "the height")
    version("the version of the values")
    message = take(number("<i", "the length of TensorDesc"), "TensorDesc")
    try:
        desc = _protobuf.parse("TensorDesc", message)
    except ValueError as error:
        raise ValueError(f"its TensorDesc does not parse ({error})") from None
    dtype = jnp.dtype(_protobuf.data_type_of(desc))
    shape = tuple(desc.dims)
    if not 1 <= len(shape) <= _MOST_AXES or min(shape) < 0:
        raise ValueError(f"its values have the shape {shape}")
    content = take(math.prod(shape) * dtype.itemsize, "the values")
    if left:
        raise ValueError(f"{left} bytes are left over after the values")
    return rows, np.frombuffer(content, dtype).reshape(shape), height


def _parts_of(
    arrays: Mapping[str, np.ndarray],
) -> tuple[np.ndarray, np.ndarray, int]:
    """Rows, values and height of the arrays in an `.npz` file."""
    values = arrays["values"]
    if "data_type" in arrays and arrays["data_type"] != values.dtype.name:
        name = str(arrays["data_type"])
        try:
            dtype = jnp.dtype(name)
        except TypeError:
            dtype = np.dtype(object)
        # Only types that NumPy does not have are saved as bytes.
        if dtype.kind != "V" or dtype.names or values.dtype != np.uint8:
            raise ValueError(f"its values of type {values.dtype} cannot be {name!r}")
        values = values.view(dtype)
    return arrays["rows"], values, int(arrays["height"])


def _check_parts(rows: np.ndarray, values: np.ndarray, height: int) -> None:
    """Raises a ValueError unless the parts form a SelectedRows."""
    if len(rows) != len(values):
        raise ValueError(f"it has {len(rows)} rows, but values of shape {values.shape}")
    if not 0 <= height < 1 << 63:
        raise ValueError(f"it has the height {height}")
    if len(rows) and not 0 <= rows.min() <= rows.max() < height:
        raise ValueError(
            f"its rows are from {rows.min()} to {rows.max()}, out of range for height "
            f"{height}"
        )
    # A shape without elements may have axes of any size.
    row = math.prod(max(n, 1) for n in values.shape[1:])
    if not values.size and row > np.iinfo(np.int32).max:
        raise ValueError(f"its values have the shape {values.shape}")
    if values.dtype == np.bool_ and (values.view(np.uint8) > 1).any():
        raise ValueError("its values are of type bool, but not 0 or 1")
