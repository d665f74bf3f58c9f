"""VarDesc in the protobuf wire format of PaddlePaddle's design.

`var_desc.proto` in this folder is the definition. `message_types` repeats it for the
protobuf library, because code that protoc generates works only with the version of the
library that it was generated for.
"""

import functools
from collections.abc import Sequence
from typing import Any

from sparsejax._arguments import kind_of
from sparsejax.desc._var_desc import LOD_TENSOR, SELECTED_ROWS, VarDesc


# The number of each data type, by its name in NumPy.
DATA_TYPES = {
    "bool": 0,
    "int16": 1,
    "int32": 2,
    "int64": 3,
    "float16": 4,
    "float32": 5,
    "float64": 6,
    "uint8": 20,
    "int8": 21,
    "bfloat16": 22,
    "complex64": 23,
    "complex128": 24,
    "float8_e4m3fn": 32,
    "float8_e5m2": 33,
}
_PADDLE_NAMES = {"float": "FP", "bfloat": "BF"}
_KINDS = {LOD_TENSOR: 0, SELECTED_ROWS: 1}


def to_bytes(desc: VarDesc) -> bytes:
    """A VarDesc in protobuf's wire format.

    Args:
      desc: `VarDesc`.

    Returns:
      bytes, a message `VarDesc` of `sparsejax/desc/var_desc.proto`: PaddlePaddle's
      TensorDesc{data_type=1, dims=2}, LodTensorDesc{tensor=1, lod_level=2} and
      VarDesc{name=1, type=2, lod_desc=3, selected_rows_desc=4, persistable=5}.

    Raises:
      ImportError: the protobuf library is not installed.
      TypeError: not a VarDesc.
      ValueError: a data type, kind or dimension that the format does not have.

    Example:
      >>> import sparsejax as sj
      >>> desc = sj.desc.VarDesc("g", "SELECTED_ROWS", "float32", (100, 8))
      >>> sj.desc.to_bytes(desc).hex(" ")
      '0a 01 67 10 01 22 06 08 05 10 64 10 08'

    References:
      PaddlePaddle, design of `VarDesc`; Protocol Buffers, encoding.
    """
    if not isinstance(desc, VarDesc):
        raise TypeError(
            f"sparsejax.desc.to_bytes: desc must be one VarDesc, got {kind_of(desc)}. "
            "For a list, use [to_bytes(desc) for desc in describe(tree)]."
        )
    if desc.type not in _KINDS:
        raise ValueError(
            f"sparsejax.desc.to_bytes: the type of {desc.name} must be "
            f"{' or '.join(_KINDS)}, got {desc.type!r}."
        )
    message = message_types()["VarDesc"]()
    message.name = desc.name
    message.type = _KINDS[desc.type]
    if desc.type == SELECTED_ROWS:
        tensor = message.selected_rows_desc
    else:
        tensor = message.lod_desc.tensor
        if desc.lod_level:
            message.lod_desc.lod_level = desc.lod_level
    known = isinstance(desc.dims, tuple | list)
    if not known or not all(hasattr(d, "__index__") and d >= -1 for d in desc.dims):
        raise ValueError(
            f"sparsejax.desc.to_bytes: dims of {desc.name} must be sizes, or -1 where "
            f"unknown, got {desc.dims}."
        )
    call = "sparsejax.desc.to_bytes"
    fill_tensor(call, tensor, desc.name, desc.data_type, desc.dims)
    if desc.persistable:
        message.persistable = True
    return message.SerializeToString(deterministic=True)


def from_bytes(data: bytes) -> VarDesc:
    """A VarDesc from protobuf's wire format.

    Args:
      data: bytes, a message `VarDesc` as `to_bytes` returns it.

    Returns:
      `VarDesc`.

    Raises:
      ImportError: the protobuf library is not installed.
      TypeError: not bytes.
      ValueError: the bytes are not such a message, or have an unknown data type.

    Example:
      >>> import sparsejax as sj
      >>> desc = sj.desc.VarDesc("x", "LOD_TENSOR", "int32", (-1,), lod_level=2)
      >>> sj.desc.from_bytes(sj.desc.to_bytes(desc)) == desc
      True

    References:
      PaddlePaddle, design of `VarDesc`; Protocol Buffers, encoding.
    """
    if not isinstance(data, bytes | bytearray | memoryview):
        raise TypeError(
            "sparsejax.desc.from_bytes: data must be bytes from to_bytes, got "
            f"{kind_of(data)}."
        )
    try:
        message = parse("VarDesc", data)
    except ValueError as error:
        raise ValueError(
            f"sparsejax.desc.from_bytes: these {len(data)} bytes are not a VarDesc "
            f"({error})."
        ) from None
    kind = {number: name for name, number in _KINDS.items()}[message.type]
    part = "selected_rows_desc" if kind == SELECTED_ROWS else "lod_desc"
    if not message.HasField(part):
        raise ValueError(
            f"sparsejax.desc.from_bytes: {message.name} of type {kind} lacks the field "
            f"{part}, which has its data type and dims."
        )
    value = getattr(message, part)
    tensor, level = (value, 0)
    if kind == LOD_TENSOR:
        tensor, level = value.tensor, value.lod_level
    return VarDesc(
        name=message.name,
        type=kind,
        data_type=data_type_of(tensor),
        dims=tuple(tensor.dims),
        lod_level=level,
        persistable=message.persistable,
    )


# ------------------------------------------------------------------ parts of messages


def fill_tensor(
    call: str, message: Any, name: str, data_type: str, dims: Sequence[int]
) -> None:
    """Writes type and dimensions into a `TensorDesc`."""
    if data_type not in DATA_TYPES:
        raise ValueError(
            f"{call}: the data type of {name} must be one of PaddlePaddle's, got "
            f"{data_type}. These are {', '.join(DATA_TYPES)}."
        )
    message.data_type = DATA_TYPES[data_type]
    message.dims.extend(dims)


def data_type_of(message: Any) -> str:
    """NumPy's name of the data type of a `TensorDesc`."""
    # A number outside the enum is an unknown field: `parse` says that it is missing.
    return {number: name for name, number in DATA_TYPES.items()}[message.data_type]


def parse(kind: str, data: bytes) -> Any:
    """A message from its bytes, or a ValueError that says what is wrong with them."""
    message = message_types()[kind]()
    from google.protobuf.message import DecodeError

    try:
        message.ParseFromString(bytes(data))
    except DecodeError:
        raise ValueError("not in protobuf's wire format") from None
    missing = message.FindInitializationErrors()
    if missing:
        raise ValueError(f"missing: {', '.join(missing)}")
    return message


# ------------------------------------------------------------------ the declaration


@functools.cache
def message_types() -> dict[str, Any]:
    """The message classes of `var_desc.proto`, by name."""
    try:
        from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
    except ImportError as error:
        raise ImportError(
            "sparsejax.desc: needs the protobuf library, which is not installed: pip "
            "install 'sparsejax[desc]'."
        ) from error

    file = descriptor_pb2.FileDescriptorProto(
        name="sparsejax/desc/var_desc.proto", package="sparsejax.desc", syntax="proto2"
    )
    field = descriptor_pb2.FieldDescriptorProto

    def add_message(name, *fields):
        message = file.message_type.add(name=name)
        for number, (label, kind, field_name) in enumerate(fields, 1):
            new = message.field.add(name=field_name, number=number)
            new.label = getattr(field, f"LABEL_{label.upper()}")
            if hasattr(field, f"TYPE_{kind.upper()}"):
                new.type = getattr(field, f"TYPE_{kind.upper()}")
            else:
                enum = kind.endswith("Type")
                new.type = field.TYPE_ENUM if enum else field.TYPE_MESSAGE
                new.type_name = f".sparsejax.desc.{kind}"
        return message

    types = file.enum_type.add(name="DataType")
    for name, number in DATA_TYPES.items():
        types.value.add(name=_paddle_name(name), number=number)
    add_message(
        "TensorDesc",
        ("required", "DataType", "data_type"),
        ("repeated", "int64", "dims"),
    )
    add_message(
        "LodTensorDesc",
        ("required", "TensorDesc", "tensor"),
        ("optional", "int32", "lod_level"),
    )
    var = add_message(
        "VarDesc",
        ("required", "string", "name"),
        ("required", "VarDesc.VarType", "type"),
        ("optional", "LodTensorDesc", "lod_desc"),
        ("optional", "TensorDesc", "selected_rows_desc"),
        ("optional", "bool", "persistable"),
    )
    var.field[-1].default_value = "false"
    kinds = var.enum_type.add(name="VarType")
    for name, number in _KINDS.items():
        kinds.value.add(name=name, number=number)

    # Not the default pool, which the whole process shares.
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        message.name: message_factory.GetMessageClass(
            pool.FindMessageTypeByName(f"sparsejax.desc.{message.name}")
        )
        for message in file.message_type
    }


def _paddle_name(data_type: str) -> str:
    for ours, theirs in _PADDLE_NAMES.items():
        if data_type.startswith(ours):
            return (theirs + data_type.removeprefix(ours)).upper()
    return data_type.upper()
