"""FuxiCTR's side of the race: DCN-v2 from its layers, its loader and training loop."""

import json
import logging
import sys
import time

import numpy as np
import torch
from fuxictr.features import FeatureMap
from fuxictr.pytorch.dataloaders.npz_dataloader import NpzDataLoader
from fuxictr.pytorch.layers import CrossNetV2, FeatureEmbedding, MLP_Block
from fuxictr.pytorch.models import BaseModel


class DCNv2(BaseModel):
    """The cross network and dense layers on it, as `model_zoo/DCNv2` stacks them."""

    def __init__(self, feature_map, dim, learning_rate, **kwargs):
        super().__init__(feature_map, model_id="DCNv2", **kwargs)
        self.embedding_layer = FeatureEmbedding(feature_map, dim)
        width = feature_map.sum_emb_out_dim()
        self.crossnet = CrossNetV2(width, 2)
        self.dnn = MLP_Block(width, hidden_units=[64, 64], output_dim=1)
        self.compile("adam", "binary_crossentropy", learning_rate)
        self.reset_parameters()
        self.model_to_device()
        self.paused = 0.0

    def forward(self, inputs):
        x = self.embedding_layer(self.get_inputs(inputs), flatten_emb=True)
        return {"y_pred": self.output_activation(self.dnn(self.crossnet(x)))}

    def eval_step(self):
        """Saves what it predicts, off the clock."""
        now, file = time.perf_counter(), f"{task['out']}/{self._total_steps}.npz"
        seconds = now - began - self.paused
        np.savez(file, scores=self.predict(self.valid_gen))
        self.save_weights(self.checkpoint)
        samples = task["batch"] * self._total_steps
        point = {"seconds": seconds, "samples": samples, "file": file}
        print(json.dumps(point), flush=True)
        self.train()
        self.paused += time.perf_counter() - now


logging.disable(logging.CRITICAL)
task = json.loads(sys.argv[1])
torch.set_num_threads(task["threads"])
torch.manual_seed(task["seed"])
stem = f"{task['data']}/{task['part']}"
sizes = np.loadtxt(f"{stem}-sizes.txt", int)
feature_map = FeatureMap(".", task["out"])
feature_map.features = {
    f"word {n}": {"type": "categorical", "source": "", "vocab_size": int(size)}
    for n, size in enumerate(sizes)
}
feature_map.features["number"] = {"type": "numeric", "source": ""}
feature_map.default_emb_dim = task["dim"]
feature_map.labels = ["label"]
feature_map.num_fields = len(feature_map.features)
feature_map.set_column_index()
load = lambda part, shuffle: NpzDataLoader(
    feature_map, f"{stem}-{part}.npz", task["batch"], shuffle, num_workers=0
)
model = DCNv2(
    feature_map,
    task["dim"],
    task["lr"],
    model_root=task["out"],
    metrics=["AUC"],
    verbose=0,
)
train, held = load("train", True), load("held", False)
began = time.perf_counter()
model.fit(train, epochs=task["epochs"], validation_data=held)
