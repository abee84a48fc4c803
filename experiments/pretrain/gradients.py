"""The gradient's norm, layer by layer, at a run's begin, middle and end: on the same batches of its training text."""

import json
import math
import pathlib

import jax
import numpy as np

from ladder_jax import checkpoint, files, nn, parallel
from ladder_jax.config import from_dict
from ladder_jax.data import dataset
from ladder_jax.data.batches import Batches
from ladder_jax.train import loss_and_gradients

NAME = "gradients.json"
BATCHES = 8


def measure(run: pathlib.Path) -> None:
    """Writes `gradients.json` into the run's folder: for each saved step and for step 0, a list with a norm a layer.

    The norm is that of all parameters of the layer, of the mean loss over BATCHES of the run's batches at once.
    """
    config = from_dict(json.loads((run / "config.json").read_text()))
    definition = nn.define(config.model, mesh=parallel.make_mesh())
    data = dataset.load(config.data, train=config.train, vocab_size=config.model.vocab_size)
    batches = Batches(data.training, config.train.batch)
    tokens = np.concatenate([batches[index] for index in range(BATCHES)])
    gradient = jax.jit(loss_and_gradients(definition, loop=config.train.loop))
    saved = run / "checkpoints"
    found = {0: nn.initialize(definition, seed=config.train.seed)}
    found |= {
        step: checkpoint.open_checkpoint(saved / str(step)).params(definition) for step in checkpoint.steps(saved)
    }
    norms = {}
    for step, params in found.items():
        loss, grads = gradient(params, jax.device_put(tokens, definition.layout.sharding("BT")))
        norms[step] = {"loss": float(loss), "layers": by_layer(grads["layers"])}
    text = json.dumps({"batches": BATCHES, "steps": norms}, indent=1) + "\n"
    files.write_atomically(str(run / NAME), lambda path: pathlib.Path(path).write_text(text))


def by_layer(stacked: nn.Params) -> list[float]:
    """The Euclidean norm over a layer's parameters, for each layer of arrays [L, ...]."""
    squares = sum(np.square(np.asarray(leaf, np.float64)).reshape(leaf.shape[0], -1).sum(1)
                  for leaf in jax.tree.leaves(stacked))  # fmt: skip
    return [math.sqrt(square) for square in squares]
