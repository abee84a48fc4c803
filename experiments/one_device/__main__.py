"""What a Ladder costs where there is nothing to hide: one device, the step time against Standard's.

python -m experiments.one_device [--d-model 1024] [--layers 4] [--sequence 512] [--pairs 30] [--loop scan]
                                 [--phases decode] [--processes 1] [--out FILE]

A training step's gradients, a forward pass, and 16 decode steps (their layers always unrolled) after half the sequence.
--processes N measures in N processes, one after the other, each second one with the weights made in the other order:
where arrays happen to lie in memory counts for more than the topology, and a process keeps its places.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile

import jax
import jax.numpy as jnp
import numpy as np

from experiments import measure
from ladder_jax import nn, parallel, train
from ladder_jax.config import Dtype, Loop, ModelConfig
from ladder_jax.decode import cache, sampling, steps, weights

DECODED = 16  # tokens a call


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--d-model", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--standard-first", action="store_true", help="make Standard's weights before Ladder's")
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=PHASES)
    parser.add_argument("--loop", type=Loop, default=Loop.SCAN, help="scan or unrolled")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path(__file__).with_name("results.json"))
    args = parser.parse_args()
    if args.processes > 1:
        in_processes(args)
        return

    dtype = "bfloat16" if jax.default_backend() != "cpu" else "float32"  # CPUs emulate bfloat16
    rows = []
    for phase in args.phases:
        names = ("standard", "ladder") if args.standard_first else ("ladder", "standard")
        compiled = {name: PHASES[phase](definition(name, dtype, args), args) for name in names}
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


def in_processes(args: argparse.Namespace) -> None:
    """The median of the processes' ratios, and its bootstrap interval over the processes."""
    words = [*sys.argv[1:], "--processes", "1"]  # the last one counts
    found = []
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "one.json"
        for index in range(args.processes):
            order = ["--standard-first"] if index % 2 else []
            command = [sys.executable, "-m", "experiments.one_device", *words, *order, "--out", str(file)]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            found.append(json.loads(file.read_text()))
            print(f"{index + 1} of {args.processes}: {[row['ratio'] for row in found[-1]['rows']]}", file=sys.stderr)
    rows = []
    for each in zip(*(one["rows"] for one in found), strict=True):
        ratios = [row["ratio"] for row in each]
        rows.append({**each[0], **measure.interval(ratios), "ratios": ratios})
        for key in ("first_seconds", "second_seconds"):
            rows[-1][key] = statistics.median(row[key] for row in each)
    measure.report({**found[0], "processes": args.processes, "rows": rows, **measure.environment()}, file=args.out)


def definition(residual: str, dtype: str, args) -> nn.ModelDef:
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
    return nn.define(config, mesh=parallel.make_mesh())


def gradients(of: nn.ModelDef, args):
    """A call of the compiled program on fixed arguments, and its cost_analysis. So the others."""
    return _on_tokens(jax.jit(train.loss_and_gradients(of, loop=args.loop)), of, args)


def forward(of: nn.ModelDef, args):
    return _on_tokens(train.mean_loss(of, loop=args.loop), of, args)


def _on_tokens(function, of: nn.ModelDef, args):
    params = nn.initialize(of, seed=0)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 4096, (args.batch, args.sequence + 1)), jnp.int32)
    compiled = function.lower(params, tokens).compile()
    return lambda: compiled(params, tokens), compiled.cost_analysis()


def decode(of: nn.ModelDef, args):
    params = weights.prepare(of, nn.initialize(of, seed=0), loop=Loop.UNROLLED)
    caches = cache.make(of, rows=args.batch, capacity=args.sequence, loop=Loop.UNROLLED)()
    tokens = jnp.ones(args.batch, jnp.int32)
    lengths = jnp.full(args.batch, args.sequence // 2, jnp.int32)
    settings = sampling.Settings.of(jax.random.split(jax.random.key(0), args.batch))
    seen = steps.seen_in(of)(tokens[:, None], jnp.ones_like(lengths))
    compiled = steps.decode_many(of, count=DECODED).compile(params, caches, seen, tokens, lengths, settings)
    consumed = [caches, seen]  # by a call, which gives them back

    def call():
        new, logprobs, *consumed[:] = compiled(params, *consumed, tokens, lengths, settings)
        return new

    return call, compiled.cost_analysis()


PHASES = {"train": gradients, "forward": forward, "decode": decode}


if __name__ == "__main__":
    main()
