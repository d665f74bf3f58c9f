"""The public names, pinned."""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import checkify

import public_names
import sparsejax as sj


NAMES = """
HashIndex QuantizedTable SegmentTensor SelectedRows concatenate lengths_to_offsets
lengths_to_ranges lengths_to_segment_ids offsets_to_lengths dot embedding_bag lookup
pack_segments partition quantize scatter_assign scatter_weighted_sum top_k unique
unpack_segments DensifyError explain grad value_and_grad NotPulledError
segment_ids_to_lengths segment_ids_to_ranges segment_all segment_any segment_argmax
segment_argmin segment_count segment_cumsum segment_log_softmax segment_logmeanexp
segment_logsumexp segment_max segment_mean segment_min segment_normalize segment_prod
segment_softmax segment_sqrtn segment_std segment_sum segment_top_k segment_var
cpu data desc extend losses nn optim parallel store testing viz
"""


def _public(module):
    return {
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        # `import sparsejax` also binds its sub-packages; `transform` is one whose
        # names are all at the top.
        and not (inspect.ismodule(value) and name == "transform")
    }


NAMES_OF = {
    "data": """
        ArrayDataset DataLoader HashIds SimpleDataset Vocabulary
    """,
    "extend": """
        RuleContext TableRef register_flow register_rule
    """,
    "losses": """
        NegativeSampler NegativeSamples bpr_loss in_batch_softmax_loss
        margin_ranking_loss nce_loss sampled_softmax_loss self_adversarial_loss
    """,
    "optim": """
        accumulate adagrad dynamic_loss_scale ema ema_params exact
        exact_value_and_grad flush_weight_decay ftrl global_norm group_adagrad
        is_lazy_exact is_row_separable lazy partial_rowwise_lamb reset_rows
        row_count_adam rounding rowwise_adagrad rowwise_adam take_changes
        track_changes weight_decay
    """,
}


def test_names():
    assert _public(sj) == {*NAMES.split()}
    for package, names in NAMES_OF.items():
        module = getattr(sj, package)
        found = {n for n in _public(module) if not inspect.ismodule(vars(module)[n])}
        assert found - {"Any", "Callable"} == {*names.split()}, package


def test_version():
    assert sj.__version__


# ------------------------------------------------------------------ arguments


def _signatures():
    """The parameters of each public function, class, and method of a class."""
    for name, value in public_names.FUNCTIONS.items():
        yield name, public_names.parameters_of(value)


def test_names_are_those_of_optax_and_jax():
    """Each argument that has a namesake elsewhere is called as it is there."""

    def names(function):
        return list(inspect.signature(function).parameters)

    assert names(sj.optim.ftrl) == ["learning_rate", "beta", "l1", "l2"]
    assert names(sj.optim.weight_decay)[0] in names(optax.add_decayed_weights)
    assert names(sj.optim.accumulate)[1] == names(optax.MultiSteps)[1]
    assert names(sj.optim.adagrad) == names(optax.adagrad)
    shared = names(optax.adam)[:4]
    for own in (sj.optim.rowwise_adam, sj.optim.row_count_adam):
        assert names(own)[:4] == shared
    assert names(sj.unique)[1] == "size" and "size" in names(jnp.unique)
    for layer in (sj.nn.Embedding, sj.nn.EmbeddingBag, sj.nn.SparseEmbedding):
        assert {"num_embeddings", "features", "embedding_init"} <= {*names(layer)}
    for layer in (sj.nn.Dense, sj.nn.SparseLinear):
        assert {"features", "use_bias", "kernel_init"} <= {*names(layer)}
    for other in (sj.grad, sj.value_and_grad, jax.value_and_grad):
        assert names(other)[:3] == ["fun", "argnums", "has_aux"]


def test_one_word_for_one_idea():
    """A PRNG key is `key`; `seed` is the int of an order or a hash on the host."""
    other_words = {
        "alpha": "learning_rate",
        "lr": "learning_rate",
        "rate": "learning_rate or weight_decay",
        "every_k": "every_k_schedule",
        "init": "embedding_init or kernel_init",
        "num_rows": "height",
        "rng": "key",
        "rngs": "key",
        "rounding_key": "key",
    }
    seeded = {
        "sparsejax.HashIndex",
        "sparsejax.HashIndex.create",
        "sparsejax.data.DataLoader",
        "sparsejax.data.HashIds",
    }
    found, count = [], 0
    for name, parameters in _signatures():
        count += len(parameters)
        found += [f"{name}({x}=)" for x in parameters if x in other_words]
        assert "seed" not in parameters or name in seeded, name
    assert not found and count > 300


@pytest.mark.parametrize("word", ["raise", "error"])
def test_both_words_for_the_mode_that_raises(word):
    table, ids = jnp.ones((5, 2)), jnp.array([1, 5])
    message = "1 of 2 ids are out of range; the first is 5"
    for call in (
        lambda: sj.lookup(table, ids, mode=word),
        lambda: sj.embedding_bag(table, ids[None], mode=word),
        lambda: sj.nn.Embedding(5, 2, mode=word)(table, ids),
    ):
        with pytest.raises(checkify.JaxRuntimeError, match=message):
            call()
    store = sj.store.KVStore()
    store.init("t", np.ones((5, 2), np.float32), None)
    with pytest.raises(ValueError, match="1 of 2 ids for table 't' are out of range"):
        store.pull("t", ids, mode=word)
    assert sj.nn.Embedding(5, 2, mode=word) == sj.nn.Embedding(5, 2, mode="error")
    assert sj.nn.SparseEmbedding(5, 2, mode=word).mode == "error"


_STATIC_INTS: dict[str, Any] = {
    "argnums": lambda n: sj.grad(lambda t, i: t[i[0]].sum(), n(0))(_TABLE, _IDS),
    "explain": lambda n: sj.explain(lambda t, i: t[i[0]].sum(), n(0))(_TABLE, _IDS),
    "infer": lambda n: sj.desc.infer(lambda t: t.sum(), _TABLE, argnums=n(0)),
    "height": lambda n: sj.SelectedRows(_IDS, _TABLE[:4], n(20), stack=(n(2),)),
    "num_segments": lambda n: sj.segment_max(_TABLE[:4], _IDS, n(5)),
    "padding_id": lambda n: sj.lookup(_TABLE, _IDS, padding_id=n(3)),
    "capacity": lambda n: sj.SegmentTensor.from_lists([[1], [2]], capacity=n(8)),
    "filler": lambda n: sj.SegmentTensor.from_padded([[1, -1]], filler=n(-1)),
    "total": lambda n: sj.lengths_to_segment_ids(_IDS, n(9)),
    "bits": lambda n: sj.quantize(_TABLE, bits=n(8)),
    "index": lambda n: sj.HashIndex.create(n(16), key_bits=n(64), admit_after=n(2)),
    "sampler": lambda n: sj.losses.NegativeSampler(n(10)),
    "HashIds": lambda n: sj.data.HashIds(n(100), seed=n(1)).encode(n(0), ["tea"]),
    "min_count": lambda n: sj.data.Vocabulary.build(_WORDS, min_count=n(1)).sizes(),
    "column": lambda n: sj.data.Vocabulary.build(_WORDS).decode(n(0), n(1)),
}
_TABLE, _IDS = jnp.ones((20, 4)), jnp.array([1, 2, 3, 3])
_WORDS = {"w": ["tea", "jam", "tea"]}


@pytest.mark.parametrize("name", _STATIC_INTS)
def test_static_integers_of_any_type(name):
    """An int of NumPy, or an array of rank 0, is as good as a Python int."""
    f = _STATIC_INTS[name]
    assert repr(f(np.int8)) == repr(f(np.array)) == repr(f(int))


def test_arguments_have_types():
    """Nearly all have types: `Any` is left if no type describes the argument."""
    untyped, count = [], 0
    for name, parameters in _signatures():
        for parameter in parameters.values():
            kinds = inspect.Parameter.empty, Any, "Any"
            count += 1
            if parameter.annotation in kinds:
                untyped.append(f"{name}({parameter.name})")
    assert count > 500 and len(untyped) <= 34, untyped
