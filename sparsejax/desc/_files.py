"""Files of SelectedRows: PaddlePaddle's binary layout, and NumPy's .npz."""

import pathlib
import struct
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sparsejax import _arguments
from sparsejax._files import read_npz, replacing
from sparsejax._rows import SelectedRows
from sparsejax.desc import _protobuf


_ZIP_START = b"PK"  # of .npz, which is a zip archive
_VERSION = 0


def save_selected_rows(path: Any, selected_rows: SelectedRows) -> None:
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
      ValueError: a data type that PaddlePaddle's format does not have.

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


def load_selected_rows(path: Any) -> SelectedRows:
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
    data = path.read_bytes()
    arrays = None
    if data[:2] == _ZIP_START:
        arrays = read_npz(call, path, what, ("rows", "values", "height"))
    try:
        if arrays is None:
            rows, values, height = _read_paddle(data)
        else:
            rows, values, height = arrays["rows"], arrays["values"], arrays["height"]
            height = int(height)
            if "data_type" in arrays:
                values = values.view(jnp.dtype(str(arrays["data_type"])))
        if len(rows) != len(values):
            raise ValueError(
                f"it has {len(rows)} rows, but values of shape {values.shape}"
            )
    except ValueError as error:
        raise ValueError(f"{call}: {path} is not {what}: {error}.") from None
    rows = jnp.asarray(rows.astype(_arguments.index_dtype(height)))
    if jax.dtypes.canonicalize_dtype(values.dtype) == values.dtype:
        return SelectedRows(rows, jnp.asarray(values), height)
    spec = SelectedRows(rows, jax.ShapeDtypeStruct(values.shape, values.dtype), height)
    return jax.tree.unflatten(jax.tree.structure(spec), [rows, values])


# ------------------------------------------------------------------ formats


def _read_paddle(data: bytes) -> tuple[np.ndarray, np.ndarray, int]:
    at = 0

    def take(count: int, part: str) -> bytes:
        nonlocal at
        if not 0 <= count <= len(data) - at:
            raise ValueError(f"it ends after {len(data)} bytes, within {part}")
        at += count
        return data[at - count : at]

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
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    values = np.frombuffer(take(size, "the values"), dtype).reshape(shape)
    if at != len(data):
        raise ValueError(f"{len(data) - at} bytes are left over after the values")
    return rows, values, height
