"""The public names: pinned, documented with examples, called in one vocabulary."""

import ast
import inspect
import re
import textwrap
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import pages
import sparsejax as sj
from helpers import run_python


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
NAMES_OF = {
    "data": "ArrayDataset DataLoader HashIds SimpleDataset Vocabulary",
    "extend": "RuleContext TableRef register_flow register_rule",
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


def _names(module):
    """The public functions, classes and types of a module that the package defines."""
    ours = lambda x: (getattr(x, "__module__", None) or "").startswith("sparsejax")
    items = vars(module).items()
    return {name: value for name, value in items if name[0] != "_" and ours(value)}


def _functions(public):
    """Functions and classes, and the methods of classes."""
    for name, value in public.items():
        if inspect.isfunction(value) or inspect.isclass(value):
            yield name, value
        for key in dir(value) if inspect.isclass(value) else ():
            method = inspect.getattr_static(value, key)
            method = getattr(method, "__func__", method)
            if inspect.isfunction(method) and not key.startswith("_"):
                if method.__module__.startswith("sparsejax"):
                    yield f"{name}.{key}", method


# `import sparsejax` also binds `transform`, whose names are all at the top.
PACKAGES = {
    name: value
    for name, value in vars(sj).items()
    if isinstance(value, types.ModuleType) and name[0] != "_" and name != "transform"
}
PUBLIC: dict[str, Any] = {
    f"{module.__name__}.{name}": value
    for module in (sj, *PACKAGES.values())
    for name, value in _names(module).items()
}
FUNCTIONS: dict[str, Any] = dict(_functions(PUBLIC))
ERRORS = {
    name
    for name, value in FUNCTIONS.items()
    if inspect.isclass(value) and issubclass(value, Exception)
}


def _parameters(name):
    """The parameters of a function or a class, but `self`, `cls` and private ones."""
    found = {} if name in ERRORS else inspect.signature(FUNCTIONS[name]).parameters
    hidden = ("self", "cls")
    return {k: p for k, p in found.items() if k not in hidden and k[0] != "_"}


PARAMETERS = {name: _parameters(name) for name in FUNCTIONS}


def _is_method(name):
    return name.split(".")[-2][:1].isupper()


# ------------------------------------------------------------------ the package


def test_names():
    assert sj.__version__
    assert _names(sj).keys() | PACKAGES.keys() == {*NAMES.split()}
    for package, names in NAMES_OF.items():
        assert _names(getattr(sj, package)).keys() == {*names.split()}, package


def test_import_is_light():
    """No optional package is loaded, and no device is touched, before it is needed."""
    code = """
        import sys
        import sparsejax
        from jax._src import xla_bridge

        optional = "flax equinox orbax scipy matplotlib tqdm grain chex".split()
        optional += "pandas polars pyarrow datasets sklearn".split()
        print([name for name in optional if name in sys.modules])
        print(xla_bridge.backends_are_initialized())
    """
    assert run_python("-c", textwrap.dedent(code)).split() == ["[]", "False"]


# ------------------------------------------------------------------ docstrings


SECTION = re.compile(r"^([A-Z]\w+):$", re.MULTILINE)


def _sections(name):
    """The sections of a docstring by name; "" is the text before them."""
    parts = SECTION.split(inspect.getdoc(FUNCTIONS[name]) or "")
    return {"": parts[0], **dict(zip(parts[1::2], parts[2::2]))}


def _named(section):
    """The names in front of the colons: `a, b: description`."""
    lines = re.split(r"^\S", section.strip("\n"), flags=re.MULTILINE)[0].splitlines()
    indent = min(len(line) - len(line.lstrip()) for line in lines if line.strip())
    heads = [line.split(":")[0] for line in lines if line[indent : indent + 1].strip()]
    return {name.strip(" *") for head in heads for name in head.split(",")}


def _raises(function):
    """Whether it has a `raise`; those of inner functions are left out."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    queue = list(getattr(body, "body", []))
    while queue:
        node = queue.pop()
        if isinstance(node, ast.Raise) and node.exc:
            if "AssertionError" not in ast.unparse(node.exc):
                return True
        if not isinstance(node, (ast.FunctionDef, ast.Lambda)):
            queue.extend(ast.iter_child_nodes(node))
    return False


def test_sections_of_docstrings():
    """Args name the parameters and no others; results and errors are told."""
    wrong, named, raising = [], 0, 0
    for name in FUNCTIONS.keys() - ERRORS:
        value, sections, own = FUNCTIONS[name], _sections(name), {*PARAMETERS[name]}
        is_class = inspect.isclass(value)
        unknown = sections.keys() - {"", *"Args Returns Raises Example".split()}
        if unknown - {"References"}:
            wrong.append(f"{name} has the sections {unknown}")
        if "Args" in sections:
            args = _named(sections["Args"])
            fields = {*getattr(value, "__annotations__", {})} if is_class else set()
            named += len(args)
            if args - own - fields or own - args:
                wrong.append(f"{name}: Args name {args}, the parameters are {own}")
        elif own and not _is_method(name):
            wrong.append(f"{name} has no Args")
        if not is_class and not _is_method(name) and "Returns" not in sections:
            if inspect.signature(value).return_annotation not in (None, "None"):
                wrong.append(f"{name} has no Returns")
        function = vars(value).get("__init__") if is_class else value
        # A dataclass makes its `__init__`, which no file has.
        if function and function.__code__.co_filename.endswith(".py"):
            raises = _raises(function)
            raising += raises
            if raises and "Raises" not in sections:
                wrong.append(f"{name} raises, and does not say so")
    assert not wrong, "\n".join(wrong)
    assert named > 300 and raising > 50


def test_public_names_have_an_example():
    docs = {k: inspect.getdoc(v) or "" for k, v in PUBLIC.items() if callable(v)}
    without = [
        k for k, doc in docs.items() if not re.search(r"Example.*>>>", doc, re.S)
    ]
    assert not without and len(docs) > 100


def test_a_package_names_what_is_in_it():
    for module in (sj, *PACKAGES.values()):
        names, doc = {*_names(module)}, module.__doc__ or ""
        if module is sj:
            names |= PACKAGES.keys()
        if module is sj.testing:  # a function, which its first line describes
            continue
        missing = {name for name in names if not re.search(rf"`{name}[`(]", doc)}
        assert not missing, f"the docstring of {module.__name__} misses {missing}"


def test_every_public_name_is_in_the_reference():
    listed = set()
    for page in (pages.DOCS / "reference").glob("*.md"):
        text, module = page.read_text(), None
        for what, name in re.findall(r"^\.\. (\w+):: (\S+)", text, re.MULTILINE):
            if what == "currentmodule":
                module = name
            elif what.startswith("auto"):
                listed.add(f"{module}.{name}")
    assert PUBLIC.keys() <= listed, PUBLIC.keys() - listed


# ------------------------------------------------------------------ arguments


def test_signatures_fit_a_screen():
    """`ArrayLike`, and not all that it stands for."""
    shown = {k: str(inspect.signature(FUNCTIONS[k])) for k in FUNCTIONS.keys() - ERRORS}
    assert not {k: v for k, v in shown.items() if "jaxlib" in v or "Union[" in v}


def test_names_are_those_of_optax_and_jax():
    """Each argument that has a namesake elsewhere is called as it is there."""

    def names(function):
        return list(inspect.signature(function).parameters)

    assert names(sj.optim.ftrl) == ["learning_rate", "beta", "l1", "l2"]
    assert names(sj.optim.weight_decay)[0] in names(optax.add_decayed_weights)
    assert names(sj.optim.accumulate)[1] == names(optax.MultiSteps)[1]
    assert names(sj.optim.adagrad) == names(optax.adagrad)
    for own in (sj.optim.rowwise_adam, sj.optim.row_count_adam):
        assert names(own)[:4] == names(optax.adam)[:4]
    assert names(sj.unique)[1] == "size" and "size" in names(jnp.unique)
    for layer in (sj.nn.Embedding, sj.nn.EmbeddingBag, sj.nn.SparseEmbedding):
        assert {"num_embeddings", "features", "embedding_init"} <= {*names(layer)}
    for layer in (sj.nn.Dense, sj.nn.SparseLinear):
        assert {"features", "use_bias", "kernel_init"} <= {*names(layer)}
    for other in (sj.grad, sj.value_and_grad, jax.value_and_grad):
        assert names(other)[:3] == ["fun", "argnums", "has_aux"]


def test_one_word_for_one_idea():
    """A PRNG key is `key`; `seed` is the int of an order or a hash on the host."""
    others = "alpha lr rate every_k init num_rows rng rngs rounding_key"
    seeded = {"HashIndex", "HashIndex.create", "data.DataLoader", "data.HashIds"}
    for name, parameters in PARAMETERS.items():
        assert not parameters.keys() & {*others.split()}, name
        assert "seed" not in parameters or name.removeprefix("sparsejax.") in seeded


def test_two_words_for_the_mode_that_raises():
    """`raise` and `error`; tests/lookup/test_lookup.py has both of a lookup."""
    for layer in (sj.nn.Embedding, sj.nn.EmbeddingBag, sj.nn.SparseEmbedding):
        assert layer(5, 2, mode="raise") == layer(5, 2, mode="error")
    store = sj.store.KVStore()
    store.init("t", (5, 2), None)
    for word in ("raise", "error"):
        with pytest.raises(ValueError, match="1 of 2 ids for table 't' are out of"):
            store.pull("t", jnp.array([1, 5]), mode=word)


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


@pytest.mark.slow
def test_progress(tmp_path, capsys):
    """`progress=` is True for a bar, False, or a function of (done, total)."""
    pytest.importorskip("tqdm")
    store = sj.store.KVStore()
    store.init("t", (50, 2), optax.sgd(0.1))
    store.push("t", sj.SelectedRows([3], jnp.ones((1, 2)), 50))
    path = tmp_path / "t.store"
    calls = {
        "KVStore.pull_all": lambda **p: store.pull_all("t", **p),
        "KVStore.save": lambda **p: store.save(path, **p),
        "KVStore.load": lambda **p: store.load(path, **p),
    }
    with_it = {name: x["progress"] for name, x in PARAMETERS.items() if "progress" in x}
    assert with_it.keys() == {f"sparsejax.store.{name}" for name in calls}
    for parameter in with_it.values():
        assert parameter.default is False and parameter.annotation == "Progress"
        assert parameter.kind == parameter.KEYWORD_ONLY
    for name, call in calls.items():
        seen = []
        call(progress=lambda done, total, seen=seen: seen.append((done, total)))
        done, totals = zip(*seen)
        assert list(done) == sorted(done) and {*totals} == {done[-1]}, (name, seen)
        call(progress=False)
        assert capsys.readouterr().err == "", name
        call(progress=True)
        assert f"{name}: 100%" in capsys.readouterr().err
        with pytest.raises(TypeError, match=f"{name}: progress must be True, False or"):
            call(progress="yes")
