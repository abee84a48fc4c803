"""What the host needs beside the devices' own buffers while a Hugging Face model is loaded onto a mesh.

    python -m experiments.load_memory [--model llama-3.2-1b] [--tensor 1,4] [--out FILE]

A model of that shape is written in bfloat16, then loaded in a process of its own a mesh, on simulated CPU devices:
there the devices' buffers are the host's memory, too, so they are subtracted from the process's largest resident set,
which counts the mapped pages of the file as well. Exits with status 1 above the limit: 1.5 x largest tensor + 1 GiB.
"""

import argparse
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
from ladder_jax import pretrained
from ladder_jax.config import preset
from ladder_jax.pretrained import source

DTYPE = np.dtype(ml_dtypes.bfloat16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3.2-1b", help="a preset's name")
    parser.add_argument("--tensor", default="1,4", help="ranks, a number a process")
    parser.add_argument("--folder", type=pathlib.Path, help="where the model is written (default: a temporary folder)")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path(__file__).with_name("results.json"))
    parser.add_argument("--load", type=pathlib.Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.load:
        print(json.dumps(load(args.load, tensor=int(args.tensor))))
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
    measure.report({"model": args.model, "dtype": DTYPE.name, "rows": rows}, file=args.out)
    sys.exit(any(row["beside_bytes"] > row["limit_bytes"] for row in rows))


def made(name: str) -> pretrained.Source:
    """A model of constants, whose arrays exist while they are written only."""
    model = preset(name, residual="standard")
    constant = lambda shape: lambda: np.full(shape, 0.02, DTYPE)
    arrays = {k: source.Stored(shape, DTYPE, constant(shape)) for k, shape in source.wanted(model).items()}
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
        "peak_bytes": peak(),
        "beside_bytes": peak() - buffers,
        "limit_bytes": int(1.5 * largest) + 2**30,
    }


def peak() -> int:
    """The process's largest resident set so far. Not getrusage's, which begins with that of the parent."""
    line = next(line for line in open("/proc/self/status") if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    main()
