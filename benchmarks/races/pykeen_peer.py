"""PyKEEN's side of the race: a model, an optimizer and a training loop of its own."""

import json
import re
import sys
import time

import numpy as np
import torch
from pykeen.models import ComplEx, DistMult
from pykeen.training import SLCWATrainingLoop
from pykeen.training.callbacks import TrainingCallback
from pykeen.triples import CoreTriplesFactory


class Points(TrainingCallback):
    """After each epoch saves the vectors, off the clock."""

    paused = 0.0

    def post_epoch(self, epoch, epoch_loss, **kwargs):
        now, file = time.perf_counter(), f"{task['out']}/{epoch}.npz"
        entity, relation = (
            both[0](indices=None).detach().numpy()
            for both in (model.entity_representations, model.relation_representations)
        )
        np.savez(file, entity=entity, relation=relation)
        seconds, samples = now - began - self.paused, epoch * len(train)
        point = {"seconds": seconds, "samples": samples, "file": file}
        print(json.dumps({**point, "loss": epoch_loss}), flush=True)
        self.paused += time.perf_counter() - now


task = json.loads(sys.argv[1])
torch.set_num_threads(task["threads"])
torch.manual_seed(task["seed"])
read = lambda part: np.array(
    re.findall(r"\d+", open(f"{task['data']}/{part}.txt").read()), np.int64
).reshape(-1, 3)
train = read("train")
everything = np.concatenate([train, read("valid"), read("test")])
factory = CoreTriplesFactory(
    mapped_triples=torch.from_numpy(train),
    num_entities=int(everything[:, [0, 2]].max() + 1),
    num_relations=int(everything[:, 1].max() + 1),
)
settings = {"triples_factory": factory, "random_seed": task["seed"]}
if task["model"] == "complex":
    model = ComplEx(embedding_dim=task["dim"] // 2, **settings)
else:
    model = DistMult(embedding_dim=task["dim"], **settings)
optimizer = torch.optim.Adam(model.parameters(), lr=task["lr"])
loop = SLCWATrainingLoop(
    model=model,
    triples_factory=factory,
    optimizer=optimizer,
    negative_sampler="basic",
    negative_sampler_kwargs={"num_negs_per_pos": 64},
)
began = time.perf_counter()
loop.train(
    factory,
    num_epochs=task["epochs"],
    batch_size=task["batch"],
    use_tqdm=False,
    callbacks=Points,
)
