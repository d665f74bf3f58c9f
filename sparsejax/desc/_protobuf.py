"""VarDesc as a protobuf message of PaddlePaddle's design: to_bytes, from_bytes.

`var_desc.proto` in this folder is the definition. `message_types` declares the same
messages to the protobuf library at run time, because the code that protoc generates
works only with the version of the library that it was generated for.
"""

import functools
from typing import Any

from sparsejax._arguments import kind_of
from sparsejax.desc._var_desc import LOD_TENSOR, SELECTED_ROWS, VarDesc


# NumPy's name of each data type, PaddlePaddle's name, and the number in a message.
_DATA_TYPES = [
    ("bool", "BOOL", 0),
    ("int16", "INT16", 1),
    ("int32", "INT32", 2),
    ("int64", "INT64", 3),
    ("float16", "FP16", 4),
    ("float32", "FP32", 5),
    ("float64", "FP64", 6),
    ("uint8", "UINT8", 20),
    ("int8", "INT8", 21),
    ("bfloat16", "BF16", 22),
    ("complex64", "COMPLEX64", 23),
    ("complex128", "COMPLEX128", 24),
    ("float8_e4m3fn", "FP8_E4M3FN", 32),
    ("float8_e5m2", "FP8_E5M2", 33),
]
DATA_TYPES = {name: number for name, _, number in _DATA_TYPES}
_DATA_TYPE_NAMES = {number: name for name, number in DATA_TYPES.items()}
_KINDS = {LOD_TENSOR: 0, SELECTED_ROWS: 1}
_KIND_NAMES = {number: name for name, number in _KINDS.items()}

# Label, type and name of each field; fields are numbered from 1. A type with a capital
# letter is an enum or a message of this file.
_MESSAGES = {
    "TensorDesc": ["required DataType data_type", "repeated int64 dims"],
    "LodTensorDesc": ["required TensorDesc tensor", "optional int32 lod_level"],
    "VarDesc": [
        "required string name",
        "required VarDesc.VarType type",
        "optional LodTensorDesc lod_desc",
        "optional TensorDesc selected_rows_desc",
        "optional bool persistable",
    ],
}


def to_bytes(desc: VarDesc) -> bytes:
    """Returns a VarDesc as a protobuf message.

    Args:
      desc: `VarDesc`.

    Returns:
      bytes, a message `VarDesc` of `sparsejax/desc/var_desc.proto`: PaddlePaddle's
      TensorDesc{data_type=1, dims=2}, LodTensorDesc{tensor=1, lod_level=2} and
      VarDesc{name=1, type=2, lod_desc=3, selected_rows_desc=4, persistable=5}.

    Raises:
      ImportError: the protobuf library is not installed.
      TypeError: `desc` is not a VarDesc.
      ValueError: the format does not have the data type, the kind or a dimension.

    Example:
      >>> import sparsejax as sj
      >>> desc = sj.desc.VarDesc("g", "SELECTED_ROWS", "float32", (100, 8))
      >>> sj.desc.to_bytes(desc).hex(" ")
      '0a 01 67 10 01 22 06 08 05 10 64 10 08'

    References:
      PaddlePaddle, design of `VarDesc`; Protocol Buffers, encoding.
    """
    call = "sparsejax.desc.to_bytes"
    if not isinstance(desc, VarDesc):
        raise TypeError(
            f"{call}: desc must be one VarDesc, got {kind_of(desc)}. "
            "For a list, use [to_bytes(desc) for desc in describe(tree)]."
        )
    if desc.type not in _KINDS:
        raise ValueError(
            f"{call}: the type of {desc.name} must be {' or '.join(_KINDS)}, got "
            f"{desc.type!r}."
        )
    known = isinstance(desc.dims, tuple | list)
    if not known or not all(hasattr(d, "__index__") and d >= -1 for d in desc.dims):
        raise ValueError(
            f"{call}: dims of {desc.name} must be sizes, or -1 for an unknown size, "
            f"got {desc.dims}."
        )
    if desc.data_type not in DATA_TYPES:
        raise ValueError(
            f"{call}: the data type of {desc.name} must be one of PaddlePaddle's, got "
            f"{desc.data_type}. These are {', '.join(DATA_TYPES)}."
        )
    message = message_types()["VarDesc"](name=desc.name, type=_KINDS[desc.type])
    if desc.type == SELECTED_ROWS:
        tensor = message.selected_rows_desc
    else:
        tensor = message.lod_desc.tensor
        if desc.lod_level:
            message.lod_desc.lod_level = desc.lod_level
    tensor.data_type = DATA_TYPES[desc.data_type]
    tensor.dims.extend(desc.dims)
    if desc.persistable:
        message.persistable = True
    return message.SerializeToString(deterministic=True)


def from_bytes(data: bytes) -> VarDesc:
    """Returns the VarDesc in a protobuf message.

    Args:
      data: bytes, a message `VarDesc` as `to_bytes` returns it.

    Returns:
      `VarDesc`.

    Raises:
      ImportError: the protobuf library is not installed.
      TypeError: `data` is not bytes.
      ValueError: the bytes are not such a message, or have an unknown data type.

    Example:
      >>> import sparsejax as sj
      >>> desc = sj.desc.VarDesc("x", "LOD_TENSOR", "int32", (-1,), lod_level=2)
      >>> sj.desc.from_bytes(sj.desc.to_bytes(desc)) == desc
      True

    References:
      PaddlePaddle, design of `VarDesc`; Protocol Buffers, encoding.
    """
    call = "sparsejax.desc.from_bytes"
    if not isinstance(data, bytes | bytearray | memoryview):
        raise TypeError(
            f"{call}: data must be bytes from to_bytes, got {kind_of(data)}."
        )
    message = message_types()["VarDesc"]()
    from google.protobuf.message import DecodeError

    reason = ""
    try:
        message.ParseFromString(bytes(data))
    except DecodeError:
        reason = "not in protobuf's wire format"
    else:
        # An unknown data type or kind is missing too: protobuf keeps an enum number
        # that was not declared as an unknown field.
        missing = message.FindInitializationErrors()
        reason = f"missing: {', '.join(missing)}" if missing else ""
    if reason:
        raise ValueError(
            f"{call}: these {len(data)} bytes are not a VarDesc ({reason})."
        )
    kind = _KIND_NAMES[message.type]
    part = "selected_rows_desc" if kind == SELECTED_ROWS else "lod_desc"
    if not message.HasField(part):
        raise ValueError(
            f"{call}: {message.name} of type {kind} lacks the field {part}, which has "
            "its data type and dims."
        )
    is_rows = kind == SELECTED_ROWS
    tensor = message.selected_rows_desc if is_rows else message.lod_desc.tensor
    return VarDesc(
        name=message.name,
        type=kind,
        data_type=_DATA_TYPE_NAMES[tensor.data_type],
        dims=tuple(tensor.dims),
        lod_level=0 if is_rows else message.lod_desc.lod_level,
        persistable=message.persistable,
    )


@functools.cache
def message_types() -> dict[str, Any]:
    """Returns the message classes of `var_desc.proto`, by name."""
    try:
        from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
    except ImportError as error:
        raise ImportError(
            "sparsejax.desc: needs the protobuf library, which is not installed: pip "
            "install 'sparsejax[desc]'."
        ) from error

    package = "sparsejax.desc"
    file = descriptor_pb2.FileDescriptorProto(
        name="sparsejax/desc/var_desc.proto", package=package, syntax="proto2"
    )
    constants = descriptor_pb2.FieldDescriptorProto
    for message_name, fields in _MESSAGES.items():
        message = file.message_type.add(name=message_name)
        for number, field in enumerate(fields, 1):
            label, kind, name = field.split()
            new = message.field.add(name=name, number=number)
            new.label = getattr(constants, f"LABEL_{label.upper()}")
            if kind.islower():
                new.type = getattr(constants, f"TYPE_{kind.upper()}")
            else:
                is_enum = kind.endswith("Type")
                new.type = constants.TYPE_ENUM if is_enum else constants.TYPE_MESSAGE
                new.type_name = f".{package}.{kind}"
    kinds = file.message_type[-1].enum_type.add(name="VarType")
    for name, number in _KINDS.items():
        kinds.value.add(name=name, number=number)
    types = file.enum_type.add(name="DataType")
    for _, name, number in _DATA_TYPES:
        types.value.add(name=name, number=number)

    # The whole process shares the default pool, so the messages get their own.
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    find = lambda name: pool.FindMessageTypeByName(f"{package}.{name}")
    return {name: message_factory.GetMessageClass(find(name)) for name in _MESSAGES}
