"""What a Ladder costs where there is nothing to hide: one device, the step time against Standard's.

python -m experiments.one_device [--d-model 1024] [--layers 4] [--sequence 512] [--pairs 30] [--loop scan] [--out FILE]
"""

import argparse
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from experiments import measure
from ladder_jax import nn, parallel, train
from ladder_jax.config import Dtype, Loop, ModelConfig


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--d-model", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--loop", type=Loop, default=Loop.SCAN, help="scan or unrolled")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path(__file__).with_name("results.json"))
    args = parser.parse_args()

    dtype = "bfloat16" if jax.default_backend() != "cpu" else "float32"  # CPUs emulate bfloat16
    rows = []
    for phase in ("train", "forward"):
        compiled = {name: program(name, phase, dtype, args) for name in ("ladder", "standard")}
        timed = measure.pairs(compiled["ladder"][0], compiled["standard"][0], count=args.pairs)
        row = {"phase": phase, "dtype": dtype, **timed.ratio(), **timed.seconds()}
        for key in ("flops", "bytes accessed"):
            row |= {f"{name}_{key.replace(' ', '_')}": cost[key] for name, (_, cost) in compiled.items()}
        rows.append(row)
    shape = {"d_model": args.d_model, "layers": args.layers, "sequence": args.sequence, "batch": args.batch}
    measure.report(
        {**shape, "loop": args.loop.value, "pairs": args.pairs, "first": "ladder", "second": "standard", "rows": rows},
        file=args.out,
    )


def program(residual: str, phase: str, dtype: str, args):
    """A call of the compiled program on fixed arguments, and its cost_analysis."""
    config = ModelConfig(
        num_layers=args.layers,
        d_model=args.d_model,
        num_heads=args.d_model // 64,
        num_kv_heads=args.d_model // 64,
        d_ff=args.d_model * 8 // 3 // 128 * 128,
        vocab_size=4096,
        residual=residual,
        dtype=Dtype(dtype),
        residual_dtype=Dtype(dtype),
    )
    definition = nn.define(config, mesh=parallel.make_mesh())
    params = nn.initialize(definition, seed=0)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 4096, (args.batch, args.sequence + 1)), jnp.int32)
    if phase == "train":
        function = jax.jit(train.loss_and_gradients(definition, loop=args.loop))
    else:
        function = train.mean_loss(definition, loop=args.loop)
    compiled = function.lower(params, tokens).compile()
    return lambda: compiled(params, tokens), compiled.cost_analysis()


if __name__ == "__main__":
    main()
