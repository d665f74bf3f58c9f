"""VarDesc, its bytes, and shapes inferred before there is data."""

import dataclasses
import pathlib
import re
import sys

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import export

import sparsejax as sj
from sparsejax.desc import _protobuf


PROTO = pathlib.Path(sj.desc.__file__).parent / "var_desc.proto"


def spec(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def rows(dtype=jnp.float32, height=6):
    return sj.SelectedRows(jnp.array([4, height, 1]), jnp.ones((3, 2), dtype), height)


# ------------------------------------------------------------------ describe


def test_describe_names_kinds_and_dims():
    nested = sj.SegmentTensor.from_lists([[[10, 11], [101]], [[11], [50], [102]]])
    keyed = sj.SegmentTensor.from_lengths(
        {"key": jnp.ones(3), "ids": sj.SegmentTensor.from_lists([[1], [2, 3], []])},
        jnp.array([1, 2]),
    )
    tree = {
        "a": jnp.ones((2, 3), jnp.bfloat16),
        "b": [spec(4, dtype=jnp.int8), 1.5],
        "grad": rows(),
        "keyed": keyed,
        "nested": nested,
    }
    found = [
        (d.name, d.type, d.data_type, d.dims, d.lod_level)
        for d in sj.desc.describe(tree)
    ]
    assert found == [
        ("a", "LOD_TENSOR", "bfloat16", (2, 3), 0),
        ("b.0", "LOD_TENSOR", "int8", (4,), 0),
        ("b.1", "LOD_TENSOR", "float32", (), 0),
        ("grad", "SELECTED_ROWS", "float32", (6, 2), 0),
        ("keyed.ids", "LOD_TENSOR", "int32", (-1,), 2),
        ("keyed.key", "LOD_TENSOR", "float32", (-1,), 1),
        ("nested", "LOD_TENSOR", "int32", (-1,), 2),
    ]


def test_describe_unknown_dimensions_and_names():
    (batch,) = export.symbolic_shape("batch")
    tree = (jax.ShapeDtypeStruct((batch, 640), jnp.float32), spec(3))
    one, two = sj.desc.describe(
        tree, ["image", "w"], persistable=lambda name: name == "w"
    )
    assert (one.name, one.dims, one.persistable) == ("image", (-1, 640), False)
    assert (two.name, two.dims, two.persistable) == ("w", (3,), True)
    assert [d.name for d in sj.desc.describe(tree, "x.{}".format)] == ["x.0", "x.1"]
    assert sj.desc.describe(spec(3), ["w"], persistable=True)[0].persistable


def test_describe_refuses():
    with pytest.raises(ValueError, match="one name for each of the 2 variables.*a, b"):
        sj.desc.describe({"a": spec(1), "b": spec(1)}, ["x"])
    with pytest.raises(TypeError, match="a.0 must be an array.* got a str"):
        sj.desc.describe({"a": ["table"]})


# ------------------------------------------------------------------ the wire format


def test_proto_file_agrees_with_the_declaration():
    """The .proto file and the declaration made to the library are equal."""
    text = re.sub(r"//.*", "", PROTO.read_text())
    types = dict(re.findall(r"(\w+) = (\d+);", text.split("message")[0]))
    messages = {}
    for name, body in re.findall(r"^message (\w+) {(.*?)^}", text, re.M | re.S):
        field = r"(required|optional|repeated) (\w+) (\w+) = (\d+)"
        messages[name] = re.findall(field, body)
    declared = _protobuf.message_types()
    assert set(declared) == set(messages)
    for name, fields in messages.items():
        found = {f.name: f for f in declared[name].DESCRIPTOR.fields}
        assert len(found) == len(fields)
        for label, kind, field, number in fields:
            mine = found[field]
            assert mine.number == int(number)
            assert mine.is_required == (label == "required")
            assert mine.is_repeated == (label == "repeated")
            named = mine.message_type or mine.enum_type
            scalars = {mine.TYPE_STRING: "string", mine.TYPE_BOOL: "bool"}
            scalars |= {mine.TYPE_INT32: "int32", mine.TYPE_INT64: "int64"}
            assert (named.name if named else scalars[mine.type]) == kind
    enum = declared["TensorDesc"].DESCRIPTOR.fields_by_name["data_type"].enum_type
    assert {v.name: str(v.number) for v in enum.values} == types
    assert {"LOD_TENSOR": 0, "SELECTED_ROWS": 1} == dict(
        (n, int(k))
        for n, k in re.findall(r"([A-Z_]+) = (\d);", text.split("VarType")[1])
    )


@pytest.mark.parametrize("data_type", sorted(_protobuf.data_types()))
def test_bytes_and_back(data_type):
    for desc in (
        sj.desc.VarDesc("a.é", "LOD_TENSOR", data_type, (-1, 2**40), 2, True),
        sj.desc.VarDesc("g", "SELECTED_ROWS", data_type, (), 0, False),
    ):
        data = sj.desc.to_bytes(desc)
        assert sj.desc.from_bytes(data) == desc
        message = _protobuf.message_types()["VarDesc"].FromString(data)
        assert message.SerializeToString(deterministic=True) == data


def test_bytes_by_hand():
    """Every field by the rules of the wire format: tag, length, varint."""
    tensor = (
        b"\x08\x05" + b"\x10" + b"\xff" * 9 + b"\x01" + b"\x10\x80\x05"
    )  # [-1, 640]
    lod = b"\x0a" + bytes([len(tensor)]) + tensor + b"\x10\x01"
    want = b"\x0a\x01x\x10\x00\x1a" + bytes([len(lod)]) + lod + b"\x28\x01"
    desc = sj.desc.VarDesc("x", "LOD_TENSOR", "float32", (-1, 640), 1, True)
    assert sj.desc.to_bytes(desc) == want


def test_bytes_refuse():
    good = sj.desc.VarDesc("x", "LOD_TENSOR", "float32", (2,))
    with pytest.raises(ValueError, match="x is a LOD_TENSOR of int4. The format has"):
        sj.desc.to_bytes(dataclasses.replace(good, data_type="int4"))
    with pytest.raises(ValueError, match="3 bytes are not a VarDesc. They lack type"):
        sj.desc.from_bytes(b"\x0a\x01x")
    without = b"\x0a\x01x\x10\x01"
    with pytest.raises(ValueError, match="They lack selected_rows_desc.data_type"):
        sj.desc.from_bytes(without + b"\x22\x02\x08\x63")


def test_without_protobuf(monkeypatch):
    monkeypatch.setitem(sys.modules, "google.protobuf", None)
    _protobuf.message_types.cache_clear()
    with pytest.raises(ImportError, match=r"pip install 'sparsejax\[desc\]'"):
        sj.desc.to_bytes(sj.desc.VarDesc("x", "LOD_TENSOR", "float32", (2,)))


# ------------------------------------------------------------------ infer


def loss(params, ids, scale):
    read = sj.lookup(params["table"], ids)
    return jnp.sum(read @ params["w"]) * scale


def test_infer_says_which_gradients_are_sparse():
    params = {"table": spec(10**9, 8), "w": spec(8)}
    found = sj.desc.infer(loss, params, spec(32, dtype=jnp.int32), 2)
    assert [(d.name, d.type, d.dims) for d in (*found.outputs, *found.gradients)] == [
        ("out", "LOD_TENSOR", ()),
        ("table@GRAD", "SELECTED_ROWS", (10**9, 8)),
        ("w@GRAD", "LOD_TENSOR", (8,)),
    ]
    few = sj.desc.infer(loss, params | {"table": spec(40, 8)}, jnp.arange(32), 2.0)
    assert few.gradients[0].type == "LOD_TENSOR"  # most rows are read


def test_infer_agrees_with_the_gradients():
    params = {"table": jnp.ones((100, 2)), "w": jnp.ones(2)}
    ids = jnp.array([7, 4, 7])
    grads = sj.grad(loss)(params, ids, 1.0)
    names = lambda path: path + "@GRAD"
    assert sj.desc.infer(loss, params, ids, 1.0).gradients == sj.desc.describe(
        grads, names
    )


def test_infer_several_arguments_aux_and_steps():
    def with_aux(table, other, ids):
        read = table[ids]
        return jnp.sum(read) + jnp.sum(other), {"read": read}

    args = spec(100, 2), spec(3), spec(4, dtype=jnp.int32)
    found = sj.desc.infer(with_aux, *args, argnums=(0, 1), has_aux=True)
    assert [d.name for d in found.outputs] == ["out.0", "out.1.read"]
    assert [(d.name, d.type) for d in found.gradients] == [
        ("table@GRAD", "SELECTED_ROWS"),
        ("other@GRAD", "LOD_TENSOR"),
    ]
    one = sj.desc.infer(with_aux, *args, has_aux=True)
    assert [d.name for d in one.gradients] == ["table@GRAD"]

    tx = sj.optim.lazy(optax.sgd(0.1))

    def step(params, state, ids):
        updates, state = tx.update(sj.grad(loss)(params, ids, 1.0), state, params)
        return updates, state

    params = {"table": spec(100, 2), "w": spec(2)}
    state = jax.eval_shape(tx.init, params)
    found = sj.desc.infer(step, params, state, args[2])
    assert found.gradients == []
    assert [(d.name, d.type) for d in found.outputs] == [
        ("out.0.table", "SELECTED_ROWS"),
        ("out.0.w", "LOD_TENSOR"),
    ]
    assert "100x2" in str(found) and str(found).startswith("name")
