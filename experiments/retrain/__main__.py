"""What each way of retraining costs: what a device keeps, what a step needs beside it, and its time.

    python -m experiments.retrain [--preset smollm2-135m] [--layers 8] [--batch 4] [--sequence 128] [--tensor 1]
                                  [--fsdp 1] [--steps 10] [--loop scan] [--remat none] [--dtype float32] [--out FILE]

On the devices that JAX finds, for random weights: neither memory nor time depends on their values. Half of the layers
are ladder layers, and where weights are frozen it is the other half. Kept: weights, moments and the teacher, of one
device, in bytes; needed beside it: the compiler's count of temporaries. Times are medians, the ways taken in turns.
"""

import argparse
import dataclasses
import pathlib
import statistics
import time

import jax
import numpy as np

from experiments import measure
from ladder_jax import nn, parallel, train
from ladder_jax.config import (
    START,
    ConversionConfig,
    DistillConfig,
    Dtype,
    Loop,
    LoraConfig,
    Remat,
    TrainConfig,
    preset,
)
from ladder_jax.retrain import Retraining

RANK = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="smollm2-135m")
    for name, value in dict(layers=8, batch=4, sequence=128, tensor=1, fsdp=1, steps=10).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    for name, kind, value in (("loop", Loop, "scan"), ("remat", Remat, "none"), ("dtype", Dtype, "float32")):
        parser.add_argument(f"--{name}", type=kind, default=kind(value))
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path(__file__).with_name("results.json"))
    args = parser.parse_args()
    mesh = parallel.make_mesh(fsdp=args.fsdp, tensor=args.tensor)
    settings = dict(num_layers=args.layers, dtype=args.dtype, residual_dtype=args.dtype)
    config = preset(args.preset, residual="ladder", ladder_layers=str(args.layers // 2), **settings)
    recipe = TrainConfig(
        steps=1000, batch=args.batch, sequence=args.sequence, warmup_steps=10, loop=args.loop, remat=args.remat
    )
    rows, runs = [], []
    for name, plan in plans(nn.define(config, mesh=mesh)).items():
        row, run = prepared(plan, recipe)
        rows.append({"way": name, **row})
        runs.append(run)
    times = [[] for _ in runs]
    for turn in range(args.steps + 2):
        for index, run in enumerate(runs):
            began = time.perf_counter()
            run()
            if turn >= 2:
                times[index].append(time.perf_counter() - began)
    for row, taken in zip(rows, times):
        row |= {
            "step_seconds": statistics.median(taken),
            "step_seconds_min": min(taken),
            "step_seconds_max": max(taken),
        }
        print(as_line(row))
    asked = {name: getattr(value, "value", value) for name, value in vars(args).items() if name != "out"}
    measure.report(
        {**asked, "parameters": size_of(nn.define(config, mesh=mesh).abstract) // 4, "rows": rows}, file=args.out
    )


def plans(definition: nn.ModelDef) -> dict[str, Retraining]:
    """The ways, by name: what trains, and on what."""
    half = definition.config.num_layers // 2
    standard = dataclasses.replace(definition.config, residual="standard", ladder_layers=None)
    teacher = dataclasses.replace(definition, config=standard)
    taught = dict(distill=DistillConfig(START), teacher=teacher)
    hidden = dict(distill=DistillConfig(START, hidden_weight=0.1, hidden_every=2), teacher=teacher)
    lora = LoraConfig(rank=RANK)
    return {
        "all weights, tokens": Retraining(definition),
        "all weights, tokens, gradual": Retraining(definition, conversion=ConversionConfig(100, 2)),
        "all weights, teacher": Retraining(definition, **taught),
        "upper half, tokens": Retraining(definition, half),
        "upper half, teacher": Retraining(definition, half, **taught),
        "upper half, teacher and streams": Retraining(definition, half, **hidden),
        "low rank, tokens": Retraining(definition, 0, lora),
        "low rank, teacher": Retraining(definition, 0, lora, **taught),
        "low rank in the upper half, teacher": Retraining(definition, half, lora, **taught),
    }


def prepared(plan: Retraining, recipe: TrainConfig):
    """(what is kept and needed, in bytes of one device; a function that makes one step and waits for it)."""
    definition = plan.definition
    whole = nn.initialize(definition, seed=0)
    trained, fixed = plan.split(whole)
    if plan.lora.rank:
        trained = plan.initial_adapters(seed=0)
    del whole
    state = train.initial_state(definition, config=recipe, params=trained, task=plan)
    shape = (recipe.batch, recipe.sequence + 1)
    tokens = np.random.default_rng(0).integers(0, definition.config.vocab_size, shape).astype(np.int32)
    tokens = jax.device_put(tokens, definition.layout.sharding("BT"))
    step = train.train_step(definition, config=recipe, task=plan).compile(state, tokens, fixed)
    held = [state]

    def run() -> None:
        held[0], metrics = step(held[0], tokens, fixed)
        jax.block_until_ready(metrics)

    kept = dict(
        trained_bytes=size_of(state.params),
        moments_bytes=size_of(state.optimizer),
        frozen_bytes=size_of(fixed.get("model", {})),
        teacher_bytes=size_of(fixed.get("teacher", {})),
    )
    needed = step.memory_analysis().temp_size_in_bytes
    return {**kept, "kept_bytes": sum(kept.values()), "temporary_bytes": needed}, run


def size_of(tree) -> int:
    """Bytes on one device."""
    shard = lambda leaf: leaf.sharding.shard_shape(leaf.shape)
    return sum(int(np.prod(shard(leaf))) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def as_line(row: dict) -> str:
    parts = ("trained", "moments", "frozen", "teacher", "kept", "temporary")
    sizes = " | ".join(f"{row[f'{part}_bytes'] / 1e6:,.1f}" for part in parts)
    return f"| {row['way']} | {sizes} | {row['step_seconds']:.2f} | {row['step_seconds_min']:.2f} |"


if __name__ == "__main__":
    main()
