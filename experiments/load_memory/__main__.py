"""What the host needs beside the devices' own buffers while a model is loaded onto a mesh, or inference starts.

    python -m experiments.load_memory [--model llama-3.2-1b] [--tensor 1,4] [--out FILE]
    python -m experiments.load_memory --start none,int8 --layers 13 [--library CHECKOUT]

A model of that shape is written in bfloat16, then loaded in a process of its own a mesh, on simulated CPU devices:
there the devices' buffers are the host's memory, too, so they are subtracted from the process's largest resident set,
which counts the array that is being read as well. Exits with status 1 above the limit: 1.5 x largest tensor + 1 GiB.

With --start a checkpoint in float32 is written as `convert` does, and an engine made of it with such weights, or what
`evaluate` scores with. The limit there, beside the final weights: the largest array in float32, on the device and on
the host, + 1 GiB. --library measures another checkout of the library.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

import ml_dtypes
import numpy as np

from experiments import measure
from experiments.load_memory.start import resident
from ladder_jax import nn, parallel, pretrained
from ladder_jax.config import preset
from ladder_jax.pretrained import source
from ladder_jax.pretrained.convert import native

DTYPE = np.dtype(ml_dtypes.bfloat16)
HERE = pathlib.Path(__file__).resolve().parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3.2-1b", help="a preset's name")
    parser.add_argument("--tensor", default="1,4", help="ranks, a number a process")
    parser.add_argument("--folder", type=pathlib.Path, help="where the model is written (default: a temporary folder)")
    parser.add_argument("--start", metavar="none,int8", help="inference's weights, and evaluate's: a process each")
    parser.add_argument("--layers", type=int, help="fewer layers than the preset has")
    parser.add_argument("--checkpoint", type=pathlib.Path, help="of --start: read this; written where there is none")
    parser.add_argument("--library", type=pathlib.Path, default=HERE.parents[1], help="the checkout to measure")
    parser.add_argument("--out", type=pathlib.Path, help="default: results.json, of --start start.json, beside this")
    parser.add_argument("--load", type=pathlib.Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.load:
        print(json.dumps(load(args.load, tensor=int(args.tensor))))
        return
    if args.start:
        starts(args)
        return
    rows = []
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        model = pathlib.Path(folder) / "model"
        pretrained.write_huggingface(made(args.model), model)
        for tensor in args.tensor.split(","):
            command = [sys.executable, "-m", "experiments.load_memory", "--load", model, "--tensor", tensor]
            environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": tensor}
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True)
            rows.append(json.loads(done.stdout))
            print(rows[-1])
    measure.report({"model": args.model, "dtype": DTYPE.name, "rows": rows}, file=args.out or HERE / "results.json")
    sys.exit(any(row["beside_bytes"] > row["limit_bytes"] for row in rows))


def made(name: str) -> pretrained.Source:
    """A model of constants, whose arrays exist while they are written only."""
    model = preset(name, residual="standard")
    constant = lambda shape: lambda: np.full(shape, 0.02, DTYPE)
    arrays = {k: source.Stored(shape, DTYPE, constant(shape)) for k, shape in source.expected_shapes(model).items()}
    return pretrained.Source(name, model, arrays)


def load(folder: pathlib.Path, *, tensor: int) -> dict:
    import jax

    from ladder_jax import parallel

    found = pretrained.open(folder)
    mesh = parallel.make_mesh(tensor=tensor)
    start = time.perf_counter()
    params = jax.block_until_ready(pretrained.load(found, mesh=mesh))
    seconds = time.perf_counter() - start
    buffers = sum(shard.data.nbytes for array in jax.tree.leaves(params) for shard in array.addressable_shards)
    largest = max(int(np.prod(stored.shape)) * stored.dtype.itemsize for stored in found.arrays.values())
    return {
        "tensor": tensor,
        "seconds": round(seconds, 1),
        "largest_tensor_bytes": largest,
        "device_bytes": buffers,
        "peak_bytes": resident("VmHWM"),
        "beside_bytes": resident("VmHWM") - buffers,
        "limit_bytes": int(1.5 * largest) + 2**30,
    }


def starts(args: argparse.Namespace) -> None:
    model = preset(args.model, residual="ladder")
    model = dataclasses.replace(model, num_layers=args.layers or model.num_layers)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        run = args.checkpoint or pathlib.Path(folder) / "run"
        if not run.exists():
            native.write(random(model), run, definition=nn.define(model, mesh=parallel.make_mesh()), place=run)
        rows = [
            started(run, args, tensor=tensor, weights=weights)
            for tensor in args.tensor.split(",")
            for weights in (*args.start.split(","), "evaluate")
        ]
    parameters = sum(int(np.prod(shape)) for shape in source.expected_shapes(model).values())
    told = {"model": args.model, "layers": model.num_layers, "parameters": parameters, "stored": "float32"}
    measure.report({**told, "rows": rows}, file=args.out or HERE / "start.json")
    sys.exit(any(row["beside_bytes"] > row["limit_bytes"] for row in rows))


def started(run: pathlib.Path, args: argparse.Namespace, *, tensor: str, weights: str) -> dict:
    more = ["--evaluate"] if weights == "evaluate" else ["--quantize", weights]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": tensor}
    environment |= {"PYTHONPATH": str(args.library), "JAX_ENABLE_COMPILATION_CACHE": "false"}
    command = [sys.executable, HERE / "start.py", run, "--tensor", tensor, *more]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True)
    row = json.loads(done.stdout)
    row["limit_bytes"] = 2 * row["largest_array_bytes"] + 2**30
    print(row, flush=True)
    return row


def random(model) -> pretrained.Source:
    """A model in float32 of values that do not compress: each array is the same noise, over and over."""
    noise = np.random.default_rng(0).standard_normal(1 << 22, np.float32) / 50
    value = lambda shape: lambda: np.resize(noise, shape)
    arrays = {k: source.Stored(shape, noise.dtype, value(shape)) for k, shape in source.expected_shapes(model).items()}
    return pretrained.Source("noise", model, arrays)


if __name__ == "__main__":
    main()
