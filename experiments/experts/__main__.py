"""What a mixture of experts costs to train where nothing communicates: one CPU device, tiny-moe's step time.

python -m experiments.experts [--pairs 40] [--dtype float32] [--out FILE]

XLA multiplies each (token, choice) row with every expert on a CPU, so a step is compared with that of a dense model
whose MLP has as many FLOPs as are executed, top_k x experts x expert_width + shared_width features: what is left of the
ratio is routing, sorting and adding up. The other comparison is Ladder with Standard, both with experts.
"""

import argparse
import dataclasses
import pathlib

import jax
import numpy as np

from experiments import measure
from ladder_jax import nn, parallel, train
from ladder_jax.config import Dtype, ModelConfig, TrainConfig, preset, recipe

MODEL = "tiny-moe"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--dtype", type=Dtype, default=Dtype.FLOAT32, help="float32, or bfloat16, which CPUs emulate")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path(__file__).with_name("results.json"))
    args = parser.parse_args()

    shape = dict(dtype=args.dtype, residual_dtype=args.dtype)
    moe = {residual: preset(MODEL, residual=residual, **shape) for residual in ("standard", "ladder")}
    models = {"experts": moe["ladder"], "dense": dense(moe["ladder"]), **moe}
    rows = []
    for first, second in (("experts", "dense"), ("ladder", "standard")):
        compiled = {name: step(models[name]) for name in (first, second)}
        timed = measure.pairs(compiled[first][0], compiled[second][0], count=args.pairs)
        row = {"first": first, "second": second, **timed.ratio(), **timed.seconds()}
        rows.append(row | {f"{name}_flops": flops for name, (_, flops) in compiled.items()})
    config = TrainConfig(**recipe(MODEL))
    shape = {"model": MODEL, "dtype": args.dtype.value, "batch": config.batch, "sequence": config.sequence}
    shape["dense_d_ff"] = models["dense"].d_ff
    measure.report({**shape, "pairs": args.pairs, "rows": rows}, file=args.out)


def dense(config: ModelConfig) -> ModelConfig:
    """The same model with one MLP that has as many FLOPs a token as a CPU executes of the experts."""
    moe = config.moe
    return dataclasses.replace(config, moe=None, d_ff=moe.top_k * moe.experts * moe.expert_width + moe.shared_width)


def step(config: ModelConfig):
    """A call of the compiled training step, each on the last one's state, and its FLOPs by cost_analysis.

    These count the body of the loop over layers once.
    """
    definition = nn.define(config, mesh=parallel.make_mesh())
    training = TrainConfig(**recipe(MODEL))
    state = train.initial_state(definition, config=training)
    random = np.random.default_rng(0).integers(config.vocab_size, size=(training.batch, training.sequence + 1))
    batch = jax.device_put(random.astype(np.int32), definition.layout.sharding("BT"))
    compiled = train.train_step(definition, config=training).compile(state, batch)

    def call():
        nonlocal state
        state, metrics = compiled(state, batch)
        return metrics

    return call, compiled.cost_analysis()["flops"]


if __name__ == "__main__":
    main()
