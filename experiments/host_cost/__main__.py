"""What the host pays for one compiled call on our pytrees, against the bare list of the same arrays.

    python -m experiments.host_cost [--layers 80] [--pairs 300] [--out FILE]

Tiny arrays, so that the device has nothing to do. `call` is the real step; `arguments` is a program
of the same arguments that computes nothing: the cost of handing them over, alone.
"""

import argparse
import pathlib

import jax
import jax.numpy as jnp

from experiments import measure
from ladder_jax import decode, nn, parallel, train
from ladder_jax.config import Dtype, Loop, ModelConfig, TrainConfig
from ladder_jax.decode import weights


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--pairs", type=int, default=300)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path(__file__).with_name("results.json"))
    args = parser.parse_args()

    config = ModelConfig(
        num_layers=args.layers, d_model=16, num_heads=2, num_kv_heads=2, d_ff=16, vocab_size=128,
        dtype=Dtype.FLOAT32, residual_dtype=Dtype.FLOAT32,
    )  # fmt: skip
    definition = nn.define(config, mesh=parallel.make_mesh())
    params = nn.initialize(definition, seed=0)
    recipe = TrainConfig(steps=10, batch=1, sequence=4)
    state = train.initial_state(definition, config=recipe, params=params)
    tokens, lengths = jnp.zeros((1, 4), jnp.int32), jnp.full((1,), 4, jnp.int32)
    unstacked = weights.prepare(definition, params, loop=Loop.UNROLLED)
    _, caches = decode.prefill(definition, capacity=8)(unstacked, tokens, lengths)
    seen = decode.seen_in(definition)(tokens, lengths)
    settings = decode.Settings.of(jax.random.split(jax.random.key(0), 1))
    decoding = decode.decode_many(definition, count=1, choice=decode.Choice.GREEDY)

    steps = {
        "train step": (train.train_step(definition, config=recipe), (state, jnp.zeros((1, 5), jnp.int32))),
        "decode step": (decoding, (unstacked, caches, seen, tokens[:, 0], lengths, settings)),
    }
    rows = []
    for name, (function, arguments) in steps.items():
        leaves, tree = jax.tree.flatten(arguments)
        nothing = lambda *_: jnp.int32(0)
        for what, plain in (("call", function.__wrapped__), ("arguments", nothing)):
            ours = jax.jit(plain, keep_unused=True)
            bare = jax.jit(lambda *flat: jax.tree.leaves(plain(*jax.tree.unflatten(tree, flat))), keep_unused=True)
            timed = measure.pairs(lambda: ours(*arguments), lambda: bare(*leaves), count=args.pairs, warmup=20)
            rows.append({"step": name, "what": what, "arrays": len(leaves), **timed.ratio(), **timed.seconds()})
    measure.report({"layers": args.layers, "first": "pytree", "second": "bare list", "rows": rows}, file=args.out)


if __name__ == "__main__":
    main()
