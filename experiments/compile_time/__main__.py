"""What 80 layers cost to compile over 4: the whole training step, scanned, on a simulated mesh and for 64 TPU chips.

    python -m experiments.compile_time [--target cpu:8] [--repeats 3] [--out FILE]

Each compilation is a process of its own, with nothing cached. The seconds are those that all processors worked
for it, which other work on the machine does not change as it does the clock's.
"""

import argparse
import json
import os
import pathlib
import statistics
import tempfile

from ladder_jax.config import MeshConfig, Remat
from ladder_jax.plan import confirm, request
from ladder_jax.plan.candidate import Candidate

LAYERS = (4, 80)
# target: (model, its settings, the plan): the last is that of pretrain/recipes/llama-3-70b.yaml.
CASES = {
    "cpu:8": (dict(model="tiny", tokens=8 * 2 * 128, sequence=128), MeshConfig(fsdp=2, tensor=4), 4),
    "v5p:4x4x4": (dict(model="llama-3-70b", tokens=512 * 8192, sequence=8192), MeshConfig(fsdp=16, tensor=4), 32),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", choices=CASES, action="append")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path(__file__).with_name("results.json"))
    args = parser.parse_args()
    rows = json.loads(args.out.read_text())["rows"] if args.out.exists() else []
    for target in args.target or CASES:
        rows = [row for row in rows if row["target"] != target] + [measured(target, repeats=args.repeats)]
        args.out.write_text(json.dumps({"rows": rows}, indent=1) + "\n")
        print(json.dumps(rows[-1]))


def measured(target: str, *, repeats: int) -> dict:
    asked, mesh, accumulate = CASES[target]
    found = {layers: [_compiled(target, asked, mesh, accumulate, layers) for _ in range(repeats)] for layers in LAYERS}
    worked = {layers: statistics.median(one.cpu_seconds for one in these) for layers, these in found.items()}
    one = found[LAYERS[0]][0]
    return {
        "target": target,
        **asked,
        "mesh": [mesh.data, mesh.fsdp, mesh.tensor],
        "accumulate": accumulate,
        "remat": "save-matmuls",
        "cpu_seconds": {str(layers): [one.cpu_seconds for one in these] for layers, these in found.items()},
        "clock_seconds": {str(layers): [one.seconds for one in these] for layers, these in found.items()},
        "ratio": worked[LAYERS[1]] / worked[LAYERS[0]],
        "jax": one.jax,
        "compiler": one.compiler,
    }


def _compiled(target: str, asked: dict, mesh: MeshConfig, accumulate: int, layers: int) -> confirm.Confirmed:
    wanted = request.make(target=target, layers=layers, **asked)
    rows = wanted.sequences // (mesh.data * mesh.fsdp) // accumulate
    with tempfile.TemporaryDirectory() as empty:
        os.environ |= {"LADDER_JAX_CACHE": empty, "JAX_ENABLE_COMPILATION_CACHE": "false"}
        return confirm.confirm(Candidate(mesh, Remat.SAVE_MATMULS, False, rows, accumulate), request=wanted)


if __name__ == "__main__":
    main()
