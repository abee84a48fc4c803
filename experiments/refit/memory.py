"""How much time and memory does a refit of a larger model take? Of random values: both are the same for any.

    python -m experiments.refit.memory --text FILE [--preset llama-3.2-1b] [--layers 8] [--tokens 4096] [OVERRIDE ...]

Writes a bfloat16 model of the preset's shape, with SmolLM2's tokenizer, as a Hugging Face folder; converts it by
`ladder-jax convert`, plain and with each kind of refit, in processes of their own; and reads the processor seconds and
the peak resident memory of each from the kernel. To memory.json. OVERRIDE: of the model, such as model.num_layers=4.
"""

import argparse
import json
import os
import pathlib
import platform
import subprocess
import sys
import tempfile

import ml_dtypes
import numpy as np

from experiments import measure
from experiments.convert_smollm2 import prepare
from ladder_jax import config, files, pretrained
from ladder_jax.config import ModelConfig
from ladder_jax.pretrained import source as sources
from ladder_jax.pretrained.refit import FittedProjections

HERE = pathlib.Path(__file__).parent
NAME = "memory.json"
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def random_source(model: ModelConfig) -> pretrained.Source:
    """Gains of one, and the rest normal, made when they are read; activations stay finite."""

    def values(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
        if name.endswith("scale"):
            return np.ones(shape, BFLOAT16)
        return (0.02 * np.random.default_rng(seed).standard_normal(shape, np.float32)).astype(BFLOAT16)

    stored = {
        key: pretrained.Stored(shape, BFLOAT16, lambda key=key, shape=shape, seed=seed: values(key.name, shape, seed))
        for seed, (key, shape) in enumerate(sources.expected_shapes(model).items())
    }
    named = pretrained.open(prepare.source()).files
    return pretrained.Source("random", model, stored, context=2048, files=named)


def converted(command: list[str]) -> dict:
    """Processor seconds, and the process's peak resident memory in bytes."""
    process = subprocess.Popen([sys.executable, "-m", "ladder_jax", *command], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"ladder-jax convert failed with status {os.waitstatus_to_exitcode(status)}")
    unit = 1 if platform.system() == "Darwin" else 1024
    return {
        "processor_seconds": round(usage.ru_utime + usage.ru_stime, 1),
        "peak_bytes": usage.ru_maxrss * unit,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE")
    parser.add_argument("--preset", default="llama-3.2-1b")
    parser.add_argument("--layers", default="8", metavar="LAYERS", help="the layers to convert")
    parser.add_argument("--tokens", type=int, default=4096, metavar="N", help="of calibration text")
    parser.add_argument("--text", required=True, metavar="FILE", help="to calibrate on")
    parser.add_argument("--folder", help="where there is room for the model three times (default: a temporary folder)")
    parser.add_argument("--out", type=pathlib.Path, default=HERE, metavar="DIR", help="of memory.json")
    args = parser.parse_args()
    fixed = ["model.residual=standard", "model.dtype=bfloat16"]
    source = random_source(config.load(args.preset, overrides=[*args.overrides, *fixed]).model)
    content = {
        **measure.environment(),
        "command": "python -m experiments.refit.memory",
        "preset": args.preset,
        "overrides": args.overrides,
    }
    content |= {"parameters": sum(int(np.prod(stored.shape)) for stored in source.arrays.values()), "rows": []}
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        file = pathlib.Path(folder, "model")
        pretrained.write_huggingface(source, file)
        for projections in (None, *FittedProjections):
            kind = "plain" if projections is None else projections.value
            refit = ["--calibration", args.text, "--calibration-tokens", str(args.tokens), "--refit", kind]
            command = ["convert", str(file), str(pathlib.Path(folder, kind)), "--ladder-layers", args.layers]
            row = converted(command if projections is None else [*command, *refit])
            content["rows"].append({"refit": kind, "layers": args.layers, "tokens": args.tokens, **row})
            print(content["rows"][-1], flush=True)
    text = json.dumps(content, indent=1) + "\n"
    files.write_atomically(str(args.out / NAME), lambda path: pathlib.Path(path).write_text(text))


if __name__ == "__main__":
    main()
