"""Asks PyTorch, TorchRec and FBGEMM again for the answers in tests/golden/torch.

Not run by the tests. In an environment of its own (CPU only)::

    pip install torch==2.13.0 fbgemm-gpu-cpu==1.8.0
    pip install torchrec==1.8.0 --no-deps
    pip install tensordict torchmetrics==1.0.3 pyre-extensions
    python tests/tools/golden_torch.py

It evaluates the `code` of each case in torch.json, or its name where that is code, on
the inputs in torch.npz, and writes both files again. For a new case, add its line to
torch.json with `inputs` as lists of numbers; for gradients, add their names with null.
"""

import json
import pathlib
import platform
import re
import tempfile

import fbgemm_gpu
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchrec
from fbgemm_gpu.split_embedding_configs import EmbOptimType  # noqa: F401
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import nn, optim
from torchrec import EmbeddingBagConfig, EmbeddingConfig
from torchrec.sparse import jagged_tensor


FILE = pathlib.Path(__file__).parent.parent / "golden" / "torch.json"
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
FUSED = [(V, 4, EmbeddingLocation.HOST, ComputeDevice.CPU)]


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


def trained(w, ids, targets, make, sparse=True, halved=False, max_norm=None, **hyper):
    """The weights after each step."""
    optimizer, after = make([w.requires_grad_()], **hyper), []
    schedule = optim.lr_scheduler.ExponentialLR(optimizer, 0.5 if halved else 1.0)
    for step_ids, target in zip(ids, targets):
        optimizer.zero_grad()
        (F.embedding(step_ids, w, sparse=sparse) * target).sum().backward()
        if max_norm:
            nn.utils.clip_grad_norm_([w], max_norm)
        optimizer.step()
        schedule.step()
        after.append(w.detach().clone())
    return torch.stack(after)


def fused(start, ids, targets, optimizer, **hyper):
    """As `trained`, of four bags of one id: the backward pass is the step."""
    module = SplitTableBatchedEmbeddingBagsCodegen(FUSED, optimizer=optimizer, **hyper)
    w, after = module.split_embedding_weights()[0], []
    w.copy_(start)
    for step_ids, target in zip(ids, targets):
        (module(step_ids, torch.arange(5)) * target).sum().backward()
        after.append(w.detach().clone())
    return torch.stack(after)


def all_reduce(rank, file, indices, values, queue):
    dist.init_process_group("gloo", f"file://{file}", rank=rank, world_size=2)
    x = coo(indices[rank], values[rank])
    dist.all_reduce(x)
    if rank == 0:
        queue.put(x.to_dense().numpy())
    dist.destroy_process_group()


def all_reduced(indices, values):
    """The sum over two processes, one for each row of the inputs."""
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
    return torch.tensor(found)


# ------------------------------------------------------------------ recording


def answer(place, case, arrays):
    """Evaluates a case, and keeps what it gives in the case and the arrays."""

    def keep(field, values):
        case[field] = {name: f"{place}/{field}/{name}" for name in values}
        for name, x in values.items():
            arrays[case[field][name]] = np.asarray(x)

    for name, x in case["inputs"].items():
        if isinstance(x, list):
            x = np.asarray(x)
            x = x.astype(np.float32) if x.dtype.kind == "f" else x
            keep("inputs", {**case["inputs"], name: x})
    given = {name: torch.tensor(arrays[key]) for name, key in case["inputs"].items()}
    for name in case.get("grads", ()):
        given[name].requires_grad_()
    code = case.get("code", case["name"])
    try:
        words = re.findall(r"\w+", code)
        made = {k: f(given) for k, f in DERIVED.items() if k in words}
        outputs = eval(code, {**globals(), **made, **given, **case["args"]})
    except Exception as error:
        refusal = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
        case["raises"] = refusal
        return
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    dense = [
        x.to_dense().detach() if isinstance(x, torch.Tensor) else x for x in outputs
    ]
    is_training = "targets" in case["inputs"]
    names = ["weights"] if is_training else map(str, range(len(dense)))
    keep("outputs", dict(zip(names, dense)))
    if "grads" not in case:
        return
    cotangents = {  # differentiable outputs come first
        str(i): arrays.get(f"{place}/cotangents/{i}", draw(x.shape))
        for i, x in enumerate(outputs)
        if x.requires_grad
    }
    terms = [(outputs[int(i)] * torch.tensor(c)).sum() for i, c in cotangents.items()]
    sum(terms).backward()
    keep("cotangents", cotangents)
    grads = {name: given[name].grad for name in case["grads"]}
    case["sparse"] = [name for name, x in grads.items() if x.is_sparse]
    touched = {name: grads[name].coalesce().indices()[0] for name in case["sparse"]}
    keep("touched", touched)
    keep("grads", {name: x.to_dense() for name, x in grads.items()})


def draw(shape, rng=np.random.default_rng(0)):
    return rng.standard_normal(shape).astype(np.float32)


def main():
    cases = json.loads(FILE.read_text())["cases"]
    with np.load(FILE.with_suffix(".npz")) as file:
        arrays = dict(file)
    for place, case in enumerate(cases):
        answer(place, case, arrays)
    about = (
        f"What PyTorch {torch.__version__}, TorchRec {torchrec.__version__} and "
        f"fbgemm-gpu-cpu {fbgemm_gpu.__version__} answered, on a CPU, Python "
        f"{platform.python_version()}. golden_torch.py evaluated the `code`, or the "
        "name where that is code. Fields of a case name arrays in torch.npz; `raises` "
        "is the error; `sparse` names the gradients that were sparse tensors, "
        "`touched` the rows in them."
    )
    lines = ",\n".join(" " + json.dumps(case) for case in cases)
    FILE.write_text(f'{{\n"about": {json.dumps(about)},\n"cases": [\n{lines}\n]\n}}\n')
    np.savez_compressed(FILE.with_suffix(".npz"), **arrays)
    print(len(cases), "cases;", sum("raises" in case for case in cases), "refused")


if __name__ == "__main__":
    main()
