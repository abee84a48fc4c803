"""One start of inference from a checkpoint, in a process of its own: what it takes of memory and time.

    python experiments/load_memory/start.py CHECKPOINT --tensor 4 --quantize int8

Prints a line of JSON. It imports nothing but the library, so that PYTHONPATH can name another checkout of it.
"""

import argparse
import json
import time

import jax

from ladder_jax import checkpoint, evaluate, pretrained
from ladder_jax.config import DecodeConfig, Loop, Quantize
from ladder_jax.data import tokenizer
from ladder_jax.decode import memory, weights


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("--tensor", type=int, default=1)
    parser.add_argument("--quantize", default="none")
    parser.add_argument("--evaluate", action="store_true", help="the weights of `evaluate`, not of an engine")
    args = parser.parse_args()
    opened = pretrained.open_model(args.checkpoint)
    definition = opened.define(tensor=args.tensor)
    settings = DecodeConfig(quantize=Quantize(args.quantize))
    sizes = memory.shard_bytes(weights.abstract(definition, loop=Loop.UNROLLED, quantize=settings.quantize))
    largest = max(jax.tree.leaves(jax.tree.map(_one, definition.abstract, definition.dims)))
    jax.block_until_ready(jax.numpy.zeros(8) + 1)  # what jax takes by itself is before, not part of it
    before, began, busy = resident("VmRSS"), time.perf_counter(), time.process_time()
    if args.evaluate:
        checkpoint.Checkpoint.tokenizer = lambda _: tokenizer.Bytes()  # the noise has none, and it is not measured
        kept = evaluate.open_model(args.checkpoint, tensor=args.tensor).params
    else:
        slots = dict(slots=1, capacity=16, max_queue=1)
        kept = opened.engine(settings=settings, tensor=args.tensor, **slots, decoder=None)
    jax.block_until_ready(jax.live_arrays())
    row = {
        "start": "evaluate" if args.evaluate else "engine",
        "weights": "int8" if settings.quantize is Quantize.INT8 else definition.config.dtype.value,
        "tensor": args.tensor,
        "seconds": round(time.perf_counter() - began, 1),
        "cpu_seconds": round(time.process_time() - busy, 1),
        "programs": getattr(kept, "compilations", None),
        "weight_bytes": sizes * args.tensor,
        "largest_array_bytes": largest,
        "before_bytes": before,
        "peak_bytes": resident("VmHWM"),
        "beside_bytes": resident("VmHWM") - before - sizes * args.tensor,
    }
    print(json.dumps(row))


def _one(leaf: jax.ShapeDtypeStruct, dims: str) -> int:
    """Bytes of an array in float32, of one layer."""
    return 4 * leaf.size // (leaf.shape[0] if dims.startswith("L") else 1)


def resident(name: str) -> int:
    """The process's resident set now (VmRSS) or at its largest (VmHWM). Not getrusage's, which is also the parent's."""
    line = next(line for line in open("/proc/self/status") if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    main()
