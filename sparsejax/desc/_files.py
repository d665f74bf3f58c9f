"""SelectedRows in files: PaddlePaddle's binary layout, and NumPy's .npz."""

import pathlib
import struct
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sparsejax import _arguments
from sparsejax._files import read_npz, replacing
from sparsejax._rows import SelectedRows
from sparsejax.desc import _messages


_TENSOR = "its TensorDesc does not parse ({error})"

_NPZ_START = b"PK"
_VERSION_0 = 0


def save_selected_rows(path: Any, selected_rows: SelectedRows) -> None:
    """Writes a SelectedRows to a file, in PaddlePaddle's binary layout or as .npz.

    The layout: u32 version 0, u64 n, n row ids of i64, i64 height, then the values as a
    tensor: u32 version 0, i32 length of a `TensorDesc` message, the message, the data.
    Empty slots are left out; the order of the rows and duplicates are kept.

    The file is written beside its place and then moved there: a crash leaves the old
    file whole.

    Args:
      path: where to. A name that ends in `.npz` gives NumPy's format, with the arrays
        `rows`, `values` and `height`; any other PaddlePaddle's.
      selected_rows: `SelectedRows`.

    Raises:
      ImportError: PaddlePaddle's layout without the protobuf library.
      TypeError: no SelectedRows.
      ValueError: a data type that PaddlePaddle's format has no name for.

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
            "sparsejax.desc.save_selected_rows: takes a SelectedRows, got "
            f"{_arguments.kind_of(selected_rows)}. Arrays have np.save; trees have "
            "orbax."
        )
    filled = np.asarray(selected_rows.filled())
    rows = np.asarray(selected_rows.rows)[filled].astype("<i8")
    values = np.ascontiguousarray(np.asarray(selected_rows.values)[filled])
    path = pathlib.Path(path)
    if path.suffix == ".npz":
        with replacing(path) as file:
            # NumPy has no file format for bfloat16 and its like: bytes and a name.
            np.savez(
                file,
                rows=rows,
                values=values.view(np.uint8) if _is_foreign(values) else values,
                data_type=values.dtype.name,
                height=selected_rows.height,
            )
        return
    desc = _messages.message_types()["TensorDesc"]()
    _messages.fill_tensor(desc, "the values", values.dtype.name, values.shape)
    message = desc.SerializeToString(deterministic=True)
    with replacing(path) as file:
        file.write(struct.pack("<IQ", _VERSION_0, len(rows)))
        file.write(rows.tobytes())
        file.write(struct.pack("<qIi", selected_rows.height, _VERSION_0, len(message)))
        file.write(message)
        file.write(values.astype(values.dtype.newbyteorder("<"), copy=False).tobytes())


def load_selected_rows(path: Any) -> SelectedRows:
    """Reads what `save_selected_rows` or PaddlePaddle has written.

    Args:
      path: a file in PaddlePaddle's binary layout, or .npz; its first bytes tell which.

    Returns:
      `SelectedRows`, the rows in the order of the file, without empty slots. Values of
      64 bits stay a NumPy array while JAX is held to 32: nothing is lost on the way
      from file to file, and arithmetic makes 32 bits of them as ever.

    Raises:
      FileNotFoundError: no such file.
      ImportError: PaddlePaddle's layout without the protobuf library.
      ValueError: another kind of file, or one that is cut short.

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
    if data[:2] == _NPZ_START:
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
        if found != _VERSION_0:
            raise ValueError(f"it is of version {found}, and this reads version 0")

    version("its version")
    count = number("<Q", "the number of rows")
    rows = np.frombuffer(take(8 * count, "the rows"), "<i8")
    height = number("<q", "the height")
    version("the version of the values")
    message = take(number("<i", "the length of TensorDesc"), "TensorDesc")
    desc = _messages.parse("TensorDesc", message, _TENSOR)
    dtype = jnp.dtype(_messages.data_type_of(desc))
    shape = tuple(desc.dims)
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    values = np.frombuffer(take(size, "the values"), dtype).reshape(shape)
    if at != len(data):
        raise ValueError(f"{len(data) - at} bytes are left over behind the values")
    return rows, values, height


def _is_foreign(values: np.ndarray) -> bool:
    return values.dtype.kind == "V"
