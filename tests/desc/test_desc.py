"""VarDesc, its bytes, and shapes inferred before there is data."""

import sys

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import export

import sparsejax as sj
from sparsejax.desc import _protobuf


# The numbers of var_desc.proto, which are PaddlePaddle's.
DATA_TYPES = dict(bool=0, int16=1, int32=2, int64=3, float16=4, float32=5, float64=6)
DATA_TYPES |= dict(uint8=20, int8=21, bfloat16=22, complex64=23, complex128=24)
DATA_TYPES |= dict(float8_e4m3fn=32, float8_e5m2=33)


def spec(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


# ------------------------------------------------------------------ describe


def test_describe_names_kinds_and_dims():
    nested = sj.SegmentTensor.from_lists([[[10, 11], [101]], [[11], [50], [102]]])
    lists = sj.SegmentTensor.from_lists([[1], [2, 3], []])
    keyed = {"key": jnp.ones(3), "ids": lists}
    tree = {
        "a": jnp.ones((2, 3), jnp.bfloat16),
        "b": [spec(4, dtype=jnp.int8), 1.5],
        "grad": sj.SelectedRows(jnp.array([4, 6, 1]), jnp.ones((3, 2)), 6),
        "keyed": sj.SegmentTensor.from_lengths(keyed, jnp.array([1, 2])),
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
    names = ["image", "w"]
    one, two = sj.desc.describe(tree, names, persistable=lambda name: name == "w")
    assert (one.name, one.dims, one.persistable) == ("image", (-1, 640), False)
    assert (two.name, two.dims, two.persistable) == ("w", (3,), True)
    assert [d.name for d in sj.desc.describe(tree, "x.{}".format)] == ["x.0", "x.1"]
    assert sj.desc.describe(spec(3), ["w"], persistable=True)[0].persistable


# ------------------------------------------------------------------ the wire format


@pytest.mark.parametrize(("data_type", "number"), DATA_TYPES.items())
def test_bytes_and_back(data_type, number):
    """Every field by the rules of the wire format: tag, length, varint."""
    tensor = bytes([8, number]) + b"\x10" + b"\xff" * 9 + b"\x01" + b"\x10\x80\x05"
    lod = b"\x0a" + bytes([len(tensor)]) + tensor + b"\x10\x01"
    want = b"\x0a\x01x\x10\x00\x1a" + bytes([len(lod)]) + lod + b"\x28\x01"
    desc = sj.desc.VarDesc("x", "LOD_TENSOR", data_type, (-1, 640), 1, True)
    assert sj.desc.to_bytes(desc) == want
    rows = sj.desc.VarDesc("g.é", "SELECTED_ROWS", data_type, (2**40,))
    for each in (desc, rows):
        assert sj.desc.from_bytes(sj.desc.to_bytes(each)) == each


def test_bytes_refuse(monkeypatch):
    good = sj.desc.VarDesc("x", "LOD_TENSOR", "float32", (2,))
    with pytest.raises(ValueError, match="data_type"):  # of the unknown number 99
        sj.desc.from_bytes(b"\x0a\x01x\x10\x01\x22\x02\x08\x63")
    monkeypatch.setitem(sys.modules, "google.protobuf", None)
    _protobuf.message_types.cache_clear()
    with pytest.raises(ImportError, match="pip install"):
        sj.desc.to_bytes(good)


# ------------------------------------------------------------------ infer


def loss(params, ids, scale):
    read = sj.lookup(params["table"], ids)
    return jnp.sum(read @ params["w"]) * scale


def kinds(descs):
    return [(d.name, d.type) for d in descs]


def test_infer_says_which_gradients_are_sparse():
    params, ids = {"table": spec(10**9, 8), "w": spec(8)}, spec(32, dtype=jnp.int32)
    found = sj.desc.infer(loss, params, ids, 2)
    assert kinds(found.outputs) == [("out", "LOD_TENSOR")]
    assert found.gradients[0].dims == (10**9, 8)
    want = [("table@GRAD", "SELECTED_ROWS"), ("w@GRAD", "LOD_TENSOR")]
    assert kinds(found.gradients) == want
    few = sj.desc.infer(loss, params | {"table": spec(40, 8)}, jnp.arange(32), 2.0)
    assert few.gradients[0].type == "LOD_TENSOR"  # most rows are read
    params = {"table": jnp.ones((100, 2)), "w": jnp.ones(2)}
    grads = sj.grad(loss)(params, ids := jnp.array([7, 4, 7]), 1.0)
    want = sj.desc.describe(grads, lambda path: path + "@GRAD")
    assert sj.desc.infer(loss, params, ids, 1.0).gradients == want


def test_infer_several_arguments_aux_and_steps():
    def with_aux(table, other, ids):
        read = table[ids]
        return jnp.sum(read) + jnp.sum(other), {"read": read}

    args = spec(100, 2), spec(3), spec(4, dtype=jnp.int32)
    found = sj.desc.infer(with_aux, *args, argnums=(0, 1), has_aux=True)
    assert [d.name for d in found.outputs] == ["out.0", "out.1.read"]
    want = [("table@GRAD", "SELECTED_ROWS"), ("other@GRAD", "LOD_TENSOR")]
    assert kinds(found.gradients) == want

    tx = sj.optim.lazy(optax.sgd(0.1))

    def step(params, state, ids):
        updates, state = tx.update(sj.grad(loss)(params, ids, 1.0), state, params)
        return updates, state

    params = {"table": spec(100, 2), "w": spec(2)}
    found = sj.desc.infer(step, params, jax.eval_shape(tx.init, params), args[2])
    assert found.gradients == []
    want = [("out.0.table", "SELECTED_ROWS"), ("out.0.w", "LOD_TENSOR")]
    assert kinds(found.outputs) == want
    assert "100x2" in str(found) and str(found).startswith("name")
