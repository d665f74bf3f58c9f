"""Records the answers of PyTorch, TorchRec and FBGEMM for test_torch_mapping.py.

Not run by the tests. To run it again, in an environment of its own (CPU only)::

    pip install torch==2.13.0 fbgemm-gpu-cpu==1.8.0
    pip install torchrec==1.8.0 --no-deps
    pip install tensordict torchmetrics==1.0.3 pyre-extensions
    python tests/tools/golden_torch.py

It writes tests/golden/torch.json and torch.npz. The name of a case is the first cell of
a row of docs/torch.md; its record is that expression's value and, for a random
cotangent, its gradients.
"""

# The checked environments do not have its packages.
# pyright: reportMissingImports=false, reportMissingModuleSource=false
# pyright: reportArgumentType=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false

import json
import pathlib
import platform
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
from torchrec import EmbeddingBagConfig, EmbeddingConfig, JaggedTensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor


GOLDEN = pathlib.Path(__file__).parent.parent / "golden"
rng = np.random.default_rng(0)
cases, arrays = [], {}


def normal(*shape):
    return rng.standard_normal(shape).astype(np.float32)


def keep(case, field, values):
    """Puts arrays in the file, and their keys in the case."""
    case[field] = {}
    for name, x in values.items():
        x = x.detach().numpy() if isinstance(x, torch.Tensor) else np.asarray(x)
        arrays[f"{len(cases)}/{field}/{name}"] = x
        case[field][name] = f"{len(cases)}/{field}/{name}"


def as_tensors(inputs):
    return {name: torch.tensor(np.asarray(x)) for name, x in inputs.items()}


def record(name, f, inputs, grads=(), **args):
    """`f(**inputs, **args)`, a tensor or a tuple, and gradients of `grads`."""
    case = {"name": name, "args": args}
    keep(case, "inputs", inputs)
    given = as_tensors(inputs)
    for key in grads:
        given[key].requires_grad_()
    try:
        outputs = f(**given, **args)
    except Exception as error:
        case["raises"] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
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


# ------------------------------------------------------------------ 1 lookups

weight, input = normal(9, 3), np.array([[4, 1, 4], [0, 8, 4]])
lookup = lambda **more: (
    lambda weight, input, **args: F.embedding(input, weight, **args, **more)
)
table = {"weight": weight, "input": input}
zero_row = {"weight": np.where(np.arange(9)[:, None] == 4, 0, weight), "input": input}
record("nn.Embedding(sparse=True)", lookup(sparse=True), table, ["weight"])
record("nn.Embedding(sparse=False)", lookup(), table, ["weight"])
record(
    "nn.Embedding(padding_idx)",
    lookup(sparse=True),
    zero_row,
    ["weight"],
    padding_idx=4,
)
record(
    "F.embedding(padding_idx), of a row that is not zero",
    lookup(sparse=True),
    table,
    ["weight"],
    padding_idx=4,
)
record(
    "nn.Embedding(scale_grad_by_freq)",
    lookup(scale_grad_by_freq=True),
    table,
    ["weight"],
)


def renormalized(weight, input, max_norm):
    out = F.embedding(input, weight, max_norm=max_norm, sparse=True)
    return out, weight.detach().clone()


record("nn.Embedding(max_norm)", renormalized, table, ["weight"], max_norm=1.0)
record(
    "nn.Embedding.from_pretrained(freeze=True)",
    lambda weight, input: nn.Embedding.from_pretrained(weight)(input),
    table,
)
record("weight[input]", lambda weight, input: weight[input], table, ["weight"])
record(
    "torch.index_select(weight, 0, index)",
    lambda weight, index: weight.index_select(0, index),
    {"weight": weight, "index": input[1]},
    ["weight"],
)
record(
    "F.one_hot(input, V) @ weight",
    lambda weight, input: F.one_hot(input, 9).float() @ weight,
    table,
    ["weight"],
)
record("bad id", lookup(), {"weight": weight, "input": np.array([9])})
record("negative id", lookup(), {"weight": weight, "input": np.array([-1])})
record(
    "scale_grad_by_freq of a sparse gradient",
    lambda weight, input: (
        F.embedding(input, weight, sparse=True, scale_grad_by_freq=True)
        .sum()
        .backward()
    ),
    table,
    ["weight"],
)

# ------------------------------------------------------------------ 2 bags

flat, offsets = np.array([4, 1, 0, 8, 2, 4, 5]), np.array([0, 3, 3, 5])
more_offsets = np.append(offsets, 7)
scores = normal(7)
for mode in ("sum", "mean", "max"):
    sparse = {"sparse": mode != "max"}
    bag = lambda weight, input, offsets=None, more=sparse, **args: F.embedding_bag(
        input, weight, offsets, **args, **more
    )
    unlike = {"weight": weight, "input": np.array([[4, 1, 3], [0, 8, 4]])}
    record("nn.EmbeddingBag, 2-D input", bag, unlike, ["weight"], mode=mode)
    given = {"weight": weight, "input": flat, "offsets": offsets}
    record("nn.EmbeddingBag(offsets)", bag, given, ["weight"], mode=mode)
    record(
        "nn.EmbeddingBag(offsets, padding_idx)",
        bag,
        given,
        ["weight"],
        mode=mode,
        padding_idx=4,
    )
    record(
        "nn.EmbeddingBag(include_last_offset)",
        lambda more=sparse, **a: F.embedding_bag(
            a.pop("input"), a.pop("weight"), include_last_offset=True, **a, **more
        ),
        {**given, "offsets": more_offsets},
        ["weight"],
        mode=mode,
    )
    record(
        "nn.EmbeddingBag(padding_idx), 2-D input",
        bag,
        unlike,
        ["weight"],
        mode=mode,
        padding_idx=4,
    )
weighted = lambda weight, input, per_sample_weights, offsets=None, **args: (
    F.embedding_bag(
        input,
        weight,
        offsets,
        per_sample_weights=per_sample_weights,
        mode="sum",
        **args,
    )
)
given = {"weight": weight, "input": flat, "offsets": offsets}
both = ["weight", "per_sample_weights"]
record(
    "nn.EmbeddingBag(offsets, per_sample_weights)",
    weighted,
    {**given, "per_sample_weights": scores},
    both,
)
record(
    "nn.EmbeddingBag(per_sample_weights), 2-D input",
    weighted,
    {**table, "per_sample_weights": scores[:6].reshape(2, 3)},
    both,
)
record(
    "per_sample_weights of a mean",
    lambda weight, input, scores: F.embedding_bag(
        input, weight, per_sample_weights=scores, mode="mean"
    ),
    {**table, "scores": scores[:6].reshape(2, 3)},
)
tied = {
    "weight": np.where(np.arange(9)[:, None] == 4, weight[1], weight),
    "input": np.array([[4, 1]]),
}
record(
    "ties of a maximum",
    lambda weight, input: F.embedding_bag(input, weight, mode="max"),
    tied,
    ["weight"],
)
record(
    "a sparse gradient of a maximum",
    lambda weight, input: F.embedding_bag(input, weight, mode="max", sparse=True),
    tied,
)

# ------------------------------------------------------------------ 3 gradients

indices, values = np.array([[7, 2, 7, 0]]), normal(4, 3)
made = {"indices": indices, "values": values}
coo = lambda indices, values: torch.sparse_coo_tensor(indices, values, (9, 3))
grad_of = lambda f: lambda indices, values, **more: f(coo(indices, values), **more)


def record_grad(name, f, **more):
    record(name, grad_of(f), {**made, **more})


record_grad("torch.sparse_coo_tensor(indices, values, size)", lambda grad: grad)
record_grad("grad._indices()[0]", lambda grad: grad._indices()[0])
record_grad("grad._values()", lambda grad: grad._values())
record_grad("grad.coalesce()", lambda grad: grad.coalesce())
record_grad("grad.coalesce().indices()[0]", lambda grad: grad.coalesce().indices()[0])
record_grad("grad.to_dense()", lambda grad: grad.to_dense())
record_grad(
    "grad.index_select(0, index)",
    lambda grad, index: grad.index_select(0, index),
    index=np.array([2, 5, 7]),
)
record_grad("grad + other", lambda grad: grad + grad.coalesce())
record_grad(
    "weight.add(grad, alpha)",
    lambda grad, weight: weight.add(grad, alpha=-0.5),
    weight=weight,
)
record_grad("grad * scalar", lambda grad: grad * 3)
record_grad("grad * dense", lambda grad, dense: grad * dense, dense=weight)
record_grad("grad.norm()", lambda grad: grad.norm())
record_grad("torch.sparse.sum(grad, 0)", lambda grad: torch.sparse.sum(grad, 0))
record_grad("torch.sparse.sum(grad, 1)", lambda grad: torch.sparse.sum(grad, 1))
record_grad(
    "dense.sparse_mask(grad)",
    lambda grad, dense: dense.sparse_mask(grad.coalesce()),
    dense=weight,
)
record(
    "dense.to_sparse(1)",
    lambda dense: dense.to_sparse(1),
    {"dense": zero_row["weight"]},
)
csr = {
    "crow": np.array([0, 2, 2, 4]),
    "col": np.array([3, 8, 0, 3]),
    "values": normal(4),
    "dense": weight,
}


def sparse_mm(crow, col, values, dense):
    return torch.sparse_csr_tensor(crow, col, values, (3, 9)) @ dense


record("torch.sparse_csr_tensor(crow, col, values) @ dense", sparse_mm, csr, ["dense"])


def _clipped(weight, input, clip):
    weight.requires_grad_()
    F.embedding(input, weight, sparse=True).sum().backward()
    clip([weight], 1.0)


for clip in (nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_):
    record(
        f"{clip.__name__} of a sparse gradient",
        lambda weight, input, clip=clip: _clipped(weight, input, clip),
        table,
    )

# ------------------------------------------------------------------ 4 optimizers

STEPS = 5


def record_training(name, make, sparse=True, clip=None, decay=None, **args):
    """Weights after each of five steps; row 8 is read at the first one only."""
    start = normal(9, 3)
    ids = rng.integers(0, 6, (STEPS, 4))
    ids[0] = [7, 2, 7, 8]
    targets = normal(STEPS, 4, 3)
    case = {"name": name, "args": args}
    w = torch.tensor(start, requires_grad=True)
    after = []
    try:
        optimizer = make([w], **args)
        schedule = decay and decay(optimizer)
        for i, target in zip(torch.tensor(ids), torch.tensor(targets)):
            optimizer.zero_grad()
            (F.embedding(i, w, sparse=sparse) * target).sum().backward()
            if clip:
                nn.utils.clip_grad_norm_([w], clip)
            optimizer.step()
            if schedule:
                schedule.step()
            after.append(w.detach().clone())
        keep(case, "outputs", {"weights": torch.stack(after)})
    except Exception as error:
        case["raises"] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    if clip:
        case["args"]["max_norm"] = clip
    keep(case, "inputs", {"weight": start, "ids": ids, "targets": targets})
    cases.append(case)


sgd, adagrad = torch.optim.SGD, torch.optim.Adagrad
record_training("optim.SGD", sgd, lr=0.1)
record_training("optim.SGD(momentum)", sgd, lr=0.1, momentum=0.9)
record_training(
    "optim.SGD(momentum, nesterov)", sgd, lr=0.1, momentum=0.9, nesterov=True
)
record_training("optim.SGD(weight_decay), sparse", sgd, lr=0.1, weight_decay=0.1)
record_training("optim.Adagrad", adagrad, lr=0.1, lr_decay=0.0, eps=1e-10)
record_training("optim.Adagrad", adagrad, lr=0.1, lr_decay=0.5, eps=1e-10)
record_training(
    "optim.Adagrad(weight_decay), sparse", adagrad, lr=0.1, weight_decay=0.1
)
record_training(
    "optim.SparseAdam", torch.optim.SparseAdam, lr=0.1, betas=[0.9, 0.99], eps=1e-3
)
record_training("optim.Adam, sparse", torch.optim.Adam, lr=0.1)
record_training("optim.RMSprop, sparse", torch.optim.RMSprop, lr=0.1)
dense = {"sparse": False}
record_training("optim.Adam, dense", torch.optim.Adam, **dense, lr=0.1)
record_training(
    "optim.AdamW, dense", torch.optim.AdamW, **dense, lr=0.1, weight_decay=0.1
)
record_training(
    "optim.RMSprop, dense", torch.optim.RMSprop, **dense, lr=0.1, alpha=0.9, eps=1e-4
)
record_training("nn.utils.clip_grad_norm_", sgd, **dense, clip=0.5, lr=0.1)
record_training(
    "lr_scheduler.ExponentialLR",
    sgd,
    decay=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.5),
    lr=0.1,
)

# ------------------------------------------------------------------ 5 scatter, segments

x, index, source = normal(5, 3), np.array([3, 0, 3, 4]), normal(4, 3)
into = {"x": x, "index": index, "source": source}
record(
    "x.index_add(0, index, source)",
    lambda x, index, source: x.index_add(0, index, source),
    into,
    ["x", "source"],
)
record(
    "x.index_put((index,), source, accumulate=True)",
    lambda x, index, source: x.index_put((index,), source, accumulate=True),
    into,
    ["x", "source"],
)
record(
    "x.index_copy(0, index, source)",
    lambda x, index, source: x.index_copy(0, index, source),
    {**into, "index": np.array([3, 0, 1, 4])},
    ["x", "source"],
)
record(
    "x.index_fill(0, index, 2.0)",
    lambda x, index: x.index_fill(0, index, 2.0),
    {"x": x, "index": index},
    ["x"],
)
record(
    "x.scatter_add(0, index, source)",
    lambda x, index, source: x.scatter_add(0, index, source),
    {**into, "index": np.array([[3, 0, 4], [0, 0, 1], [3, 1, 1], [4, 2, 0]])},
    ["x", "source"],
)
rows = {"index": index, "source": source}
for reduce in ("sum", "mean", "prod", "amax", "amin"):
    record(
        f"zeros.scatter_reduce(0, rows, source, {reduce!r}, include_self=False)",
        lambda index, source, reduce=reduce: torch.zeros(5, 3).scatter_reduce(
            0, index[:, None].expand(-1, 3), source, reduce, include_self=False
        ),
        rows,
        ["source"],
    )
record(
    "zeros.scatter_reduce(0, rows, source, 'amax', include_self=False)",
    lambda index, source: torch.zeros(5, 3).scatter_reduce(
        0, index[:, None].expand(-1, 3), source, "amax", include_self=False
    ),
    {"index": index, "source": np.round(np.abs(source)).clip(1, 1)},
    ["source"],
)
data, lengths = normal(6, 2), np.array([2, 1, 3])
for reduce in ("sum", "mean", "max", "min", "prod"):
    record(
        f"torch.segment_reduce(data, {reduce!r}, lengths=lengths)",
        lambda data, lengths, reduce=reduce: torch.segment_reduce(
            data, reduce, lengths=lengths
        ),
        {"data": data, "lengths": lengths},
        ["data"],
    )
    record(
        f"an empty segment, {reduce}",
        lambda data, reduce=reduce: torch.segment_reduce(
            data, reduce, lengths=torch.tensor([0, 6])
        ),
        {"data": data},
    )
record(
    "torch.segment_reduce(data, 'sum', offsets=offsets)",
    lambda data, offsets: torch.segment_reduce(data, "sum", offsets=offsets),
    {"data": data, "offsets": np.array([0, 2, 3, 6])},
    ["data"],
)
record(
    "torch.bincount(input, minlength)",
    lambda input: torch.bincount(input, minlength=6),
    {"input": index},
)
record(
    "torch.unique(input, return_inverse=True)",
    lambda input: torch.unique(input, return_inverse=True),
    {"input": input},
)

# ------------------------------------------------------------------ 6 ragged data

padded, lengths = normal(3, 4, 2), np.array([2, 4, 1])


def there_and_back(padded, lengths):
    packed = nn.utils.rnn.pack_padded_sequence(
        padded, lengths, batch_first=True, enforce_sorted=False
    )
    return nn.utils.rnn.pad_packed_sequence(packed, batch_first=True)


record(
    "pad_packed_sequence(pack_padded_sequence(padded, lengths))",
    there_and_back,
    {"padded": padded, "lengths": lengths},
    ["padded"],
)
split = lambda values, lengths: list(torch.split(values, lengths.tolist()))
ragged = {"values": normal(7, 2), "lengths": lengths}
record(
    "nn.utils.rnn.pad_sequence(sequences, padding_value=-1.0)",
    lambda values, lengths: nn.utils.rnn.pad_sequence(
        split(values, lengths), batch_first=True, padding_value=-1.0
    ),
    ragged,
    ["values"],
)
jagged = lambda values, lengths: torch.nested.nested_tensor_from_jagged(
    values, F.pad(lengths.cumsum(0), (1, 0))
)
record(
    "nested.values()", lambda values, lengths: jagged(values, lengths).values(), ragged
)
record(
    "nested.offsets()",
    lambda values, lengths: jagged(values, lengths).offsets(),
    ragged,
)
record(
    "torch.nested.to_padded_tensor(nested, 0.0)",
    lambda values, lengths: torch.nested.to_padded_tensor(
        torch.nested.nested_tensor(split(values, lengths), layout=torch.jagged), 0.0
    ),
    ragged,
)
record(
    "nested.sum(dim=1)",
    lambda values, lengths: jagged(values, lengths).sum(dim=1),
    ragged,
)
record(
    "nested.mean(dim=1)",
    lambda values, lengths: jagged(values, lengths).mean(dim=1),
    ragged,
)
record(
    "gradient of nested.sum(dim=1)",
    lambda values, lengths: (
        jagged(values.requires_grad_(), lengths).sum(dim=1).sum().backward()
    ),
    ragged,
)
record(
    "torch.softmax(nested, dim=1).values()",
    lambda values, lengths: torch.softmax(jagged(values, lengths), dim=1).values(),
    ragged,
    ["values"],
)

# ------------------------------------------------------------------ 7 TorchRec

jt = lambda values, lengths: JaggedTensor(values, lengths=lengths)
record(
    "JaggedTensor(values, lengths).offsets()",
    lambda values, lengths: jt(values, lengths).offsets(),
    ragged,
)
record(
    "JaggedTensor.to_padded_dense(L, filler)",
    lambda values, lengths: jt(values, lengths).to_padded_dense(3, -1.0),
    ragged,
    ["values"],
)
KEYS = ["clicked", "bought"]
batch = {
    "values": np.array([4, 1, 0, 8, 2, 4]),
    "lengths": np.array([2, 0, 1, 1, 1, 1]),
}
kjt = lambda values, lengths, weights=None: KeyedJaggedTensor.from_lengths_sync(
    KEYS, values, lengths, weights
)
record(
    "KeyedJaggedTensor['bought'].values()",
    lambda **b: kjt(**b)["bought"].values(),
    batch,
)
record(
    "KeyedJaggedTensor['bought'].lengths()",
    lambda **b: kjt(**b)["bought"].lengths(),
    batch,
)
record("KeyedJaggedTensor.stride()", lambda **b: torch.tensor(kjt(**b).stride()), batch)


def collection_of(pooling, weighted=False):
    """A collection is a module; the gradient is its parameter's."""

    def f(weight, **batch):
        config = EmbeddingBagConfig(
            name="item",
            num_embeddings=9,
            embedding_dim=3,
            feature_names=KEYS,
            pooling=pooling,
        )
        module = torchrec.EmbeddingBagCollection([config], is_weighted=weighted)
        found = torch.func.functional_call(
            module, {"embedding_bags.item.weight": weight}, (kjt(**batch),)
        ).to_dict()
        return found["clicked"], found["bought"]

    return f


pooling = torchrec.PoolingType
items = {"weight": weight, **batch}
record(
    "EmbeddingBagCollection(pooling=SUM)", collection_of(pooling.SUM), items, ["weight"]
)
record(
    "EmbeddingBagCollection(pooling=MEAN)",
    collection_of(pooling.MEAN),
    items,
    ["weight"],
)
record(
    "EmbeddingBagCollection(is_weighted=True)",
    collection_of(pooling.SUM, True),
    {**items, "weights": normal(6)},
    ["weight"],
)


def sequences(weight, **batch):
    config = EmbeddingConfig(
        name="item", num_embeddings=9, embedding_dim=3, feature_names=KEYS
    )
    module = torchrec.EmbeddingCollection([config])
    found = torch.func.functional_call(
        module, {"embeddings.item.weight": weight}, (kjt(**batch),)
    )
    return found["clicked"].values(), found["bought"].values()


record("EmbeddingCollection", sequences, items, ["weight"])
record(
    "KeyedTensor.regroup([kt], [['bought', 'clicked']])",
    lambda clicked, bought: KeyedTensor.regroup(
        [KeyedTensor.from_tensor_list(KEYS, [clicked, bought])], [["bought", "clicked"]]
    )[0],
    {"clicked": normal(3, 2), "bought": normal(3, 4)},
    ["clicked", "bought"],
)

# ------------------------------------------------------------------ 8 FBGEMM


def record_fused(name, optimizer, **args):
    start = normal(9, 4)
    ids = rng.integers(0, 6, (STEPS, 4))
    ids[0] = [7, 2, 7, 8]
    targets = normal(STEPS, 4, 4)
    case = {"name": name, "args": args}
    spec = [(9, 4, EmbeddingLocation.HOST, ComputeDevice.CPU)]
    hyper = {"learning_rate" if k == "lr" else k: v for k, v in args.items()}
    module = SplitTableBatchedEmbeddingBagsCodegen(spec, optimizer=optimizer, **hyper)
    w = module.split_embedding_weights()[0]
    w.copy_(torch.tensor(start))
    after = []
    for i, target in zip(torch.tensor(ids), torch.tensor(targets)):
        # Four bags of one id: the backward pass is the step.
        (module(i, torch.arange(5)) * target).sum().backward()
        after.append(w.detach().clone())
    keep(case, "outputs", {"weights": torch.stack(after)})
    keep(case, "inputs", {"weight": start, "ids": ids, "targets": targets})
    cases.append(case)


record_fused("EmbOptimType.EXACT_SGD", EmbOptimType.EXACT_SGD, lr=0.1)
record_fused("EmbOptimType.EXACT_ADAGRAD", EmbOptimType.EXACT_ADAGRAD, lr=0.1, eps=1e-8)
record_fused(
    "EmbOptimType.EXACT_ROWWISE_ADAGRAD",
    EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    lr=0.1,
    eps=1e-8,
)
spec = [(9, 4, EmbeddingLocation.HOST, ComputeDevice.CPU)]
for optimizer in ("ADAM", "PARTIAL_ROWWISE_ADAM", "PARTIAL_ROWWISE_LAMB", "LARS_SGD"):
    record(
        f"EmbOptimType.{optimizer} on a CPU",
        lambda optimizer=optimizer: SplitTableBatchedEmbeddingBagsCodegen(
            spec, optimizer=EmbOptimType[optimizer]
        ),
        {},
    )

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
    about = (
        f"What PyTorch {torch.__version__}, TorchRec {torchrec.__version__} and "
        f"fbgemm-gpu-cpu {fbgemm_gpu.__version__} answered, on a CPU, Python "
        f"{platform.python_version()}. golden_torch.py made it. Fields of a case name "
        "arrays in torch.npz; `raises` is the error; `sparse` names the "
        "gradients that were sparse tensors, `touched` the rows in them."
    )
    lines = ",\n".join(" " + json.dumps(case) for case in cases)
    text = f'{{\n"about": {json.dumps(about)},\n"cases": [\n{lines}\n]\n}}\n'
    (GOLDEN / "torch.json").write_text(text)
    np.savez_compressed(GOLDEN / "torch.npz", **arrays)
    print(len(cases), "cases;", sum("raises" in case for case in cases), "refused")
