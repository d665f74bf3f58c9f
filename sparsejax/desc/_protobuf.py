"""VarDesc as a protobuf message of PaddlePaddle's design: to_bytes, from_bytes.

`var_desc.proto` in this folder is the definition. `message_types` declares its messages
to the protobuf library at run time, because the code that protoc generates works only
with the version of the library that it was generated for.
"""

import functools
import pathlib
import re
from typing import Any

from sparsejax.desc._var_desc import SELECTED_ROWS, VarDesc


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
    types, numbers = message_types(), data_types()
    kinds = types["VarDesc"].VarType.keys()
    if desc.type not in kinds or desc.data_type not in numbers:
        raise ValueError(
            f"to_bytes: {desc.name} is a {desc.type} of {desc.data_type}. The format "
            f"has {', '.join(kinds)} of {', '.join(numbers)}."
        )
    message = types["VarDesc"](name=desc.name, type=desc.type)
    if desc.type == SELECTED_ROWS:
        tensor = message.selected_rows_desc
    else:
        tensor = message.lod_desc.tensor
        if desc.lod_level:
            message.lod_desc.lod_level = desc.lod_level
    tensor.data_type = numbers[desc.data_type]
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
    message = message_types()["VarDesc"]()
    from google.protobuf.message import DecodeError

    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise ValueError(
            f"from_bytes: these {len(data)} bytes are not a protobuf message."
        ) from error
    # An unknown data type or kind is missing too: protobuf keeps an enum number that
    # was not declared as an unknown field.
    missing = message.FindInitializationErrors()
    kind = message.VarType.Name(message.type)
    is_rows = kind == SELECTED_ROWS
    part = "selected_rows_desc" if is_rows else "lod_desc"
    if missing or not message.HasField(part):
        raise ValueError(
            f"from_bytes: these {len(data)} bytes are not a VarDesc. They lack "
            f"{', '.join(missing or [part])}."
        )
    tensor = message.selected_rows_desc if is_rows else message.lod_desc.tensor
    names = {number: name for name, number in data_types().items()}
    return VarDesc(
        name=message.name,
        type=kind,
        data_type=names[tensor.data_type],
        dims=tuple(tensor.dims),
        lod_level=0 if is_rows else message.lod_desc.lod_level,
        persistable=message.persistable,
    )


def data_types() -> dict[str, int]:
    """Returns the numbers of the data types by NumPy's names: `FP32` is `float32`."""
    enum = message_types()["TensorDesc"].DESCRIPTOR.fields_by_name["data_type"]
    named = lambda x: re.sub("^fp", "float", re.sub("^bf", "bfloat", x.lower()))
    return {named(x.name): x.number for x in enum.enum_type.values}


@functools.cache
def message_types() -> dict[str, Any]:
    """Returns the message classes of `var_desc.proto`, by name."""
    try:
        from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
    except ImportError as error:
        raise ImportError(
            "sparsejax.desc needs the protobuf library, which is not installed: pip "
            "install 'sparsejax[desc]'."
        ) from error

    package, kinds = "sparsejax.desc", descriptor_pb2.FieldDescriptorProto
    file: Any = descriptor_pb2.FileDescriptorProto(
        name="sparsejax/desc/var_desc.proto", package=package, syntax="proto2"
    )
    path = pathlib.Path(__file__).parent / "var_desc.proto"
    inside = [file]  # the file, a message, an enum of it
    for line in path.read_text().splitlines():
        if match := re.match(r"message (\w+)", line):
            inside.append(file.message_type.add(name=match[1]))
        elif match := re.match(r" *enum (\w+)", line):
            inside.append(inside[-1].enum_type.add(name=match[1]))
        elif match := re.match(r" *(\w+) = (\d+);", line):
            inside[-1].value.add(name=match[1], number=int(match[2]))
        elif match := re.match(r" *(re\w+|optional) (\w+) (\w+) = (\d+)", line):
            label, kind, name, number = match.groups()
            field = inside[-1].field.add(name=name, number=int(number))
            field.label = getattr(kinds, f"LABEL_{label.upper()}")
            if kind.islower():
                field.type = getattr(kinds, f"TYPE_{kind.upper()}")
            else:  # an enum or a message, which the pool finds
                field.type_name = kind
        elif line.strip() == "}":
            inside.pop()
    # The whole process shares the default pool, so the messages get their own.
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    find = lambda name: pool.FindMessageTypeByName(f"{package}.{name}")
    return {
        message.name: message_factory.GetMessageClass(find(message.name))
        for message in file.message_type
    }
