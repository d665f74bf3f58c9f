"""Records the answers of PyTorch, TorchRec and FBGEMM for test_torch_mapping.py.

Not run by the tests. To run it again, in an environment of its own (CPU only)::

    pip install torch==2.13.0 fbgemm-gpu-cpu==1.8.0
    pip install torchrec==1.8.0 --no-deps
    pip install tensordict torchmetrics==1.0.3 pyre-extensions
    python tests/tools/golden_torch.py

It writes tests/golden/torch.json and torch.npz. The name of a case is the first cell of
a row of docs/torch.md or torch_rows.md; its record is the value of that expression, or
of the code beside it, and its gradients for a random cotangent.
"""

# The checked environments do not have its packages.
# pyright: reportMissingImports=false, reportMissingModuleSource=false
# pyright: reportArgumentType=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false

import re
import tempfile

import fbgemm_gpu
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchrec
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import nn
from torchrec import EmbeddingBagConfig, EmbeddingConfig
from torchrec.sparse import jagged_tensor

from golden_file import STEPS, cases, keep, normal, refusal, rng, write


V = 9


# ------------------------------------------------------------------ names of the code


def coo(indices, values):
    return torch.sparse_coo_tensor(indices, values, (V, 3))


def split(values, lengths):
    return list(torch.split(values, lengths.tolist()))


def jagged(values, lengths):
    return torch.nested.nested_tensor_from_jagged(
        values, F.pad(lengths.cumsum(0), (1, 0))
    )


KEYS = ["clicked", "bought"]
POOLING, KT = torchrec.PoolingType, jagged_tensor.KeyedTensor


def kjt(values, lengths, weights=None):
    return jagged_tensor.KeyedJaggedTensor.from_lengths_sync(
        KEYS, values, lengths, weights
    )


# Names that a code may use beside its inputs, made of these.
DERIVED = {
    "grad": lambda x: coo(x["indices"], x["values"]),
    "other": lambda x: coo(x["indices"], x["values"]).coalesce(),
    "nested": lambda x: jagged(x["values"], x["lengths"]),
    "keyed": lambda x: kjt(x["values"], x["lengths"]),
}


def renormalized(weight, input, max_norm):
    out = F.embedding(input, weight, max_norm=max_norm, sparse=True)
    return out, weight.detach().clone()


def clipped(weight, input, clip):
    weight.requires_grad_()
    F.embedding(input, weight, sparse=True).sum().backward()
    clip([weight], 1.0)


def there_and_back(padded, lengths):
    packed = nn.utils.rnn.pack_padded_sequence(
        padded, lengths, batch_first=True, enforce_sorted=False
    )
    return nn.utils.rnn.pad_packed_sequence(packed, batch_first=True)


def collection(module, key, weight, *batch):
    """The values of both features; the gradient is the parameter's."""
    return torch.func.functional_call(module, {key: weight}, (kjt(*batch),))


def config(kind, **more):
    sizes = {"num_embeddings": V, "embedding_dim": 3}
    return [kind(name="item", **sizes, feature_names=KEYS, **more)]


def bags(pooling, weight, *batch):
    module = torchrec.EmbeddingBagCollection(
        config(EmbeddingBagConfig, pooling=pooling), is_weighted=len(batch) > 2
    )
    found = collection(module, "embedding_bags.item.weight", weight, *batch).to_dict()
    return tuple(found[key] for key in KEYS)


def sequences(weight, *batch):
    module = torchrec.EmbeddingCollection(config(EmbeddingConfig))
    found = collection(module, "embeddings.item.weight", weight, *batch)
    return tuple(found[key].values() for key in KEYS)


# ------------------------------------------------------------------ recording


def record(inputs, grads, *rows, **args):
    """Records cases with these inputs, gradients and arguments.

    A row is a name that is code, `(name, code)`, or `(name, code, inputs or
    arguments)`: arrays are inputs.
    """
    for row in rows:
        name, code, more = (row, row, {}) if isinstance(row, str) else (*row, {})[:3]
        own = {k: x for k, x in more.items() if isinstance(x, np.ndarray)}
        others = {k: x for k, x in more.items() if k not in own}
        record_one(name, code, {**inputs, **own}, grads.split(), {**args, **others})


def record_one(name, code, inputs, grads, args):
    case = {"name": name, "args": args}
    keep(case, "inputs", inputs)
    given = {name: torch.tensor(np.asarray(x)) for name, x in inputs.items()}
    for key in grads:
        given[key].requires_grad_()
    try:
        words = re.findall(r"\w+", code)
        made = {k: f(given) for k, f in DERIVED.items() if k in words}
        outputs = eval(code, {**globals(), **made, **given, **args})
    except Exception as error:
        case["raises"] = refusal(error)
        cases.append(case)
        return
    if not isinstance(outputs, tuple):
        outputs = (outputs,)
    dense = [x.to_dense() if isinstance(x, torch.Tensor) else x for x in outputs]
    keep(case, "outputs", {str(i): x for i, x in enumerate(dense)})
    if grads:
        # Differentiable outputs come first.
        cotangents = {
            str(i): normal(*x.shape) for i, x in enumerate(dense) if x.requires_grad
        }
        sum(
            (dense[int(i)] * torch.tensor(c)).sum() for i, c in cotangents.items()
        ).backward()
        keep(case, "cotangents", cotangents)
        found = {key: given[key].grad for key in grads}
        case["sparse"] = [key for key, x in found.items() if x.is_sparse]
        touched = {k: found[k].coalesce().indices()[0] for k in case["sparse"]}
        keep(case, "touched", touched)
        keep(case, "grads", {key: x.to_dense() for key, x in found.items()})
    cases.append(case)


def problem(width):
    """A table, ids and targets; row 8 is read at the first step only."""
    start = normal(V, width)
    ids = rng.integers(0, 6, (STEPS, 4))
    ids[0] = [7, 2, 7, 8]
    return {"weight": start, "ids": ids, "targets": normal(STEPS, 4, width)}


def record_steps(name, args, given, step_of):
    """Weights after each of five steps; `step_of(start)` makes `(weight, step)`."""
    case, after = {"name": name, "args": args}, []
    try:
        w, step = step_of(torch.tensor(given["weight"]))
        for ids, target in zip(*(torch.tensor(given[k]) for k in ("ids", "targets"))):
            step(ids, target)
            after.append(w.detach().clone())
        keep(case, "outputs", {"weights": torch.stack(after)})
    except Exception as error:
        case["raises"] = refusal(error)
    keep(case, "inputs", given)
    cases.append(case)


def record_training(name, make, sparse=True, decay=None, **args):
    clip = args.get("max_norm")
    hyper = {k: x for k, x in args.items() if k != "max_norm"}

    def step_of(start):
        w = start.requires_grad_()
        optimizer = make([w], **hyper)
        schedule = decay and decay(optimizer)

        def step(ids, target):
            optimizer.zero_grad()
            (F.embedding(ids, w, sparse=sparse) * target).sum().backward()
            if clip:
                nn.utils.clip_grad_norm_([w], clip)
            optimizer.step()
            if schedule:
                schedule.step()

        return w, step

    record_steps(name, args, problem(3), step_of)


FUSED = [(V, 4, EmbeddingLocation.HOST, ComputeDevice.CPU)]


def record_fused(optimizer, **args):
    hyper = {"learning_rate" if k == "lr" else k: v for k, v in args.items()}

    def step_of(start):
        module = SplitTableBatchedEmbeddingBagsCodegen(
            FUSED, optimizer=optimizer, **hyper
        )
        w = module.split_embedding_weights()[0]
        w.copy_(start)
        # Four bags of one id: the backward pass is the step.
        step = lambda ids, target: (
            (module(ids, torch.arange(5)) * target).sum().backward()
        )
        return w, step

    record_steps(f"EmbOptimType.{optimizer.name}", args, problem(4), step_of)


# ------------------------------------------------------------------ 1 lookups

weight, input = normal(V, 3), np.array([[4, 1, 4], [0, 8, 4]])
table = {"weight": weight, "input": input}
without_4 = {"weight": np.where(np.arange(V)[:, None] == 4, 0, weight)}
padded_lookup = "F.embedding(input, weight, padding_idx=padding_idx, sparse=True)"
record(
    table,
    "weight",
    ("nn.Embedding(sparse=True)", "F.embedding(input, weight, sparse=True)"),
    ("nn.Embedding(sparse=False)", "F.embedding(input, weight)"),
    ("nn.Embedding(padding_idx)", padded_lookup, {**without_4, "padding_idx": 4}),
    (
        "F.embedding(padding_idx), of a row that is not zero",
        padded_lookup,
        {"padding_idx": 4},
    ),
    (
        "nn.Embedding(scale_grad_by_freq)",
        "F.embedding(input, weight, scale_grad_by_freq=True)",
    ),
    (
        "nn.Embedding(max_norm)",
        "renormalized(weight, input, max_norm)",
        {"max_norm": 1.0},
    ),
)
record(
    table,
    "",
    (
        "nn.Embedding.from_pretrained(freeze=True)",
        "nn.Embedding.from_pretrained(weight)(input)",
    ),
)
record(table, "weight", "weight[input]")
record(
    {"weight": weight, "index": input[1]},
    "weight",
    "torch.index_select(weight, 0, index)",
)
record(
    table,
    "weight",
    ("F.one_hot(input, V) @ weight", "F.one_hot(input, V).float() @ weight"),
)
record(
    {"weight": weight},
    "",
    ("bad id", "F.embedding(input, weight)", {"input": np.array([V])}),
    ("negative id", "F.embedding(input, weight)", {"input": np.array([-1])}),
)
record(
    table,
    "weight",
    (
        "scale_grad_by_freq of a sparse gradient",
        "F.embedding(input, weight, sparse=True, scale_grad_by_freq=True)"
        ".sum().backward()",
    ),
)

# ------------------------------------------------------------------ 2 bags

flat = {"input": np.array([4, 1, 0, 8, 2, 4, 5]), "offsets": np.array([0, 3, 3, 5])}
flat = {"weight": weight, **flat}
unlike = {"weight": weight, "input": np.array([[4, 1, 3], [0, 8, 4]])}
scores = normal(7)
for mode in ("sum", "mean", "max"):
    how = f"mode=mode, sparse={mode != 'max'}"
    padded = f"{how}, padding_idx=padding_idx"
    bag = lambda more: f"F.embedding_bag(input, weight, {more})"
    skipped = {"padding_idx": 4}
    record(unlike, "weight", ("nn.EmbeddingBag, 2-D input", bag(how)), mode=mode)
    record(
        flat,
        "weight",
        ("nn.EmbeddingBag(offsets)", bag(f"offsets, {how}")),
        ("nn.EmbeddingBag(offsets, padding_idx)", bag(f"offsets, {padded}"), skipped),
        (
            "nn.EmbeddingBag(include_last_offset)",
            bag(f"offsets, {how}, include_last_offset=True"),
            {"offsets": np.append(flat["offsets"], 7)},
        ),
        mode=mode,
    )
    record(
        unlike,
        "weight",
        ("nn.EmbeddingBag(padding_idx), 2-D input", bag(padded), skipped),
        mode=mode,
    )
weighted = "per_sample_weights=per_sample_weights, mode='sum'"
record(
    flat,
    "weight per_sample_weights",
    (
        "nn.EmbeddingBag(offsets, per_sample_weights)",
        bag(f"offsets, {weighted}"),
        {"per_sample_weights": scores},
    ),
)
matrix = scores[:6].reshape(2, 3)
record(
    table,
    "weight per_sample_weights",
    (
        "nn.EmbeddingBag(per_sample_weights), 2-D input",
        bag(weighted),
        {"per_sample_weights": matrix},
    ),
)
record(
    table,
    "",
    (
        "per_sample_weights of a mean",
        bag("per_sample_weights=scores, mode='mean'"),
        {"scores": matrix},
    ),
)
tied = {"weight": np.where(np.arange(V)[:, None] == 4, weight[1], weight)}
tied |= {"input": np.array([[4, 1]])}
record(tied, "weight", ("ties of a maximum", bag("mode='max'")))
record(tied, "", ("a sparse gradient of a maximum", bag("mode='max', sparse=True")))

# ------------------------------------------------------------------ 3 gradients

record(
    {"indices": np.array([[7, 2, 7, 0]]), "values": normal(4, 3)},
    "",
    ("torch.sparse_coo_tensor(indices, values, size)", "grad"),
    "grad._indices()[0]",
    "grad._values()",
    "grad.coalesce()",
    "grad.coalesce().indices()[0]",
    "grad.to_dense()",
    (*["grad.index_select(0, index)"] * 2, {"index": np.array([2, 5, 7])}),
    "grad + other",
    ("weight.add(grad, alpha)", "weight.add(grad, alpha=-0.5)", {"weight": weight}),
    ("grad * scalar", "grad * 3"),
    (*["grad * dense"] * 2, {"dense": weight}),
    "grad.norm()",
    "torch.sparse.sum(grad, 0)",
    "torch.sparse.sum(grad, 1)",
    (
        "dense.sparse_mask(grad)",
        "dense.sparse_mask(grad.coalesce())",
        {"dense": weight},
    ),
)
record({"dense": without_4["weight"]}, "", "dense.to_sparse(1)")
csr = {"crow": np.array([0, 2, 2, 4]), "col": np.array([3, 8, 0, 3])}
record(
    {**csr, "values": normal(4), "dense": weight},
    "dense",
    (
        "torch.sparse_csr_tensor(crow, col, values) @ dense",
        "torch.sparse_csr_tensor(crow, col, values, (3, V)) @ dense",
    ),
)
for name in ("clip_grad_norm_", "clip_grad_value_"):
    code = f"clipped(weight, input, nn.utils.{name})"
    record(table, "", (f"{name} of a sparse gradient", code))

# ------------------------------------------------------------------ 4 optimizers

optim = torch.optim
halves = lambda optimizer: optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
nesterov = {"momentum": 0.9, "nesterov": True}
for name, make, hyper in (
    ("optim.SGD", optim.SGD, {}),
    ("optim.SGD(momentum)", optim.SGD, {"momentum": 0.9}),
    ("optim.SGD(momentum, nesterov)", optim.SGD, nesterov),
    ("optim.SGD(weight_decay), sparse", optim.SGD, {"weight_decay": 0.1}),
    ("optim.Adagrad", optim.Adagrad, {"lr_decay": 0.0, "eps": 1e-10}),
    ("optim.Adagrad", optim.Adagrad, {"lr_decay": 0.5, "eps": 1e-10}),
    ("optim.Adagrad(weight_decay), sparse", optim.Adagrad, {"weight_decay": 0.1}),
    ("optim.SparseAdam", optim.SparseAdam, {"betas": [0.9, 0.99], "eps": 1e-3}),
    ("optim.Adam, sparse", optim.Adam, {}),
    ("optim.RMSprop, sparse", optim.RMSprop, {}),
    ("optim.Adam, dense", optim.Adam, {}),
    ("optim.AdamW, dense", optim.AdamW, {"weight_decay": 0.1}),
    ("optim.RMSprop, dense", optim.RMSprop, {"alpha": 0.9, "eps": 1e-4}),
):
    record_training(name, make, not name.endswith("dense"), lr=0.1, **hyper)
record_training("nn.utils.clip_grad_norm_", optim.SGD, False, lr=0.1, max_norm=0.5)
record_training("lr_scheduler.ExponentialLR", optim.SGD, decay=halves, lr=0.1)

# ------------------------------------------------------------------ 5 scatter, segments

x, index, source = normal(5, 3), np.array([3, 0, 3, 4]), normal(4, 3)
into = {"x": x, "index": index, "source": source}
squares = np.array([[3, 0, 4], [0, 0, 1], [3, 1, 1], [4, 2, 0]])
record(
    into,
    "x source",
    "x.index_add(0, index, source)",
    "x.index_put((index,), source, accumulate=True)",
    (*["x.index_copy(0, index, source)"] * 2, {"index": np.array([3, 0, 1, 4])}),
)
record({"x": x, "index": index}, "x", "x.index_fill(0, index, 2.0)")
record(into, "x source", (*["x.scatter_add(0, index, source)"] * 2, {"index": squares}))
spread = (
    "torch.zeros(5, 3).scatter_reduce(0, index[:, None].expand(-1, 3), source, {!r}, "
    "include_self=False)"
)
named = "zeros.scatter_reduce(0, rows, source, {!r}, include_self=False)"
record(
    {"index": index, "source": source},
    "source",
    *(
        (named.format(x), spread.format(x))
        for x in ("sum", "mean", "prod", "amax", "amin")
    ),
    (named.format("amax"), spread.format("amax"), {"source": np.ones_like(source)}),
)
data, lengths = normal(6, 2), np.array([2, 1, 3])
for reduce in ("sum", "mean", "max", "min", "prod"):
    name = f"torch.segment_reduce(data, {reduce!r}, lengths=lengths)"
    record({"data": data, "lengths": lengths}, "data", name)
    code = name.replace("=lengths", "=torch.tensor([0, 6])")
    record({"data": data}, "", (f"an empty segment, {reduce}", code))
record(
    {"data": data, "offsets": np.array([0, 2, 3, 6])},
    "data",
    "torch.segment_reduce(data, 'sum', offsets=offsets)",
)
record(
    {"input": index},
    "",
    ("torch.bincount(input, minlength)", "torch.bincount(input, minlength=6)"),
)
record({"input": input}, "", "torch.unique(input, return_inverse=True)")

# ------------------------------------------------------------------ 6 ragged data

padded, lengths = normal(3, 4, 2), np.array([2, 4, 1])
record(
    {"padded": padded, "lengths": lengths},
    "padded",
    (
        "pad_packed_sequence(pack_padded_sequence(padded, lengths))",
        "there_and_back(padded, lengths)",
    ),
)
ragged = {"values": normal(7, 2), "lengths": lengths}
record(
    ragged,
    "values",
    (
        "nn.utils.rnn.pad_sequence(sequences, padding_value=-1.0)",
        "nn.utils.rnn.pad_sequence(split(values, lengths), batch_first=True, "
        "padding_value=-1.0)",
    ),
)
record(
    ragged,
    "",
    "nested.values()",
    "nested.offsets()",
    (
        "torch.nested.to_padded_tensor(nested, 0.0)",
        "torch.nested.to_padded_tensor(torch.nested.nested_tensor("
        "split(values, lengths), layout=torch.jagged), 0.0)",
    ),
    "nested.sum(dim=1)",
    "nested.mean(dim=1)",
    (
        "gradient of nested.sum(dim=1)",
        "jagged(values.requires_grad_(), lengths).sum(dim=1).sum().backward()",
    ),
)
record(ragged, "values", "torch.softmax(nested, dim=1).values()")

# ------------------------------------------------------------------ 7 TorchRec

jt = "torchrec.JaggedTensor(values, lengths=lengths)"
record(ragged, "", ("JaggedTensor(values, lengths).offsets()", f"{jt}.offsets()"))
record(
    ragged,
    "values",
    ("JaggedTensor.to_padded_dense(L, filler)", f"{jt}.to_padded_dense(3, -1.0)"),
)
batch = {
    "values": np.array([4, 1, 0, 8, 2, 4]),
    "lengths": np.array([2, 0, 1, 1, 1, 1]),
}
record(
    batch,
    "",
    ("KeyedJaggedTensor['bought'].values()", "keyed['bought'].values()"),
    ("KeyedJaggedTensor['bought'].lengths()", "keyed['bought'].lengths()"),
    ("KeyedJaggedTensor.stride()", "torch.tensor(keyed.stride())"),
)
items = {"weight": weight, **batch}
for pooling in ("SUM", "MEAN"):
    name = f"EmbeddingBagCollection(pooling={pooling})"
    code = f"bags(POOLING.{pooling}, weight, values, lengths)"
    record(items, "weight", (name, code))
record(
    {**items, "weights": normal(6)},
    "weight",
    (
        "EmbeddingBagCollection(is_weighted=True)",
        "bags(POOLING.SUM, weight, values, lengths, weights)",
    ),
)
record(items, "weight", ("EmbeddingCollection", "sequences(weight, values, lengths)"))
record(
    {"clicked": normal(3, 2), "bought": normal(3, 4)},
    "clicked bought",
    (
        "KeyedTensor.regroup([kt], [['bought', 'clicked']])",
        "KT.regroup([KT.from_tensor_list(KEYS, [clicked, bought])], "
        "[['bought', 'clicked']])[0]",
    ),
)

# ------------------------------------------------------------------ 8 FBGEMM

record_fused(EmbOptimType.EXACT_SGD, lr=0.1)
record_fused(EmbOptimType.EXACT_ADAGRAD, lr=0.1, eps=1e-8)
record_fused(EmbOptimType.EXACT_ROWWISE_ADAGRAD, lr=0.1, eps=1e-8)
for name in ("ADAM", "PARTIAL_ROWWISE_ADAM", "PARTIAL_ROWWISE_LAMB", "LARS_SGD"):
    code = (
        "SplitTableBatchedEmbeddingBagsCodegen("
        f"FUSED, optimizer=EmbOptimType[{name!r}])"
    )
    record({}, "", (f"EmbOptimType.{name} on a CPU", code))

# ------------------------------------------------------------------ 9 many devices


def all_reduce(rank, file, indices, values, queue):
    dist.init_process_group("gloo", f"file://{file}", rank=rank, world_size=2)
    x = coo(torch.tensor(indices[rank]), torch.tensor(values[rank]))
    dist.all_reduce(x)
    if rank == 0:
        queue.put(x.to_dense().numpy())
    dist.destroy_process_group()


def record_all_reduce():
    indices = np.array([[[7, 2]], [[2, 0]]])
    values = normal(2, 2, 3)
    context = torch.multiprocessing.get_context("spawn")
    queue = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        args = f"{folder}/store", indices, values, queue
        ranks = [
            context.Process(target=all_reduce, args=(rank, *args)) for rank in range(2)
        ]
        for process in ranks:
            process.start()
        found = queue.get()
        for process in ranks:
            process.join()
    case = {"name": "dist.all_reduce(sparse)", "args": {}}
    keep(case, "inputs", {"indices": indices, "values": values})
    keep(case, "outputs", {"0": found})
    cases.append(case)


if __name__ == "__main__":
    record_all_reduce()
    versions = (
        f"PyTorch {torch.__version__}, TorchRec {torchrec.__version__} and "
        f"fbgemm-gpu-cpu {fbgemm_gpu.__version__}"
    )
    write("torch", versions, "sparse tensors")
