"""How much of the host's memory does converting a model take, file to file?

    python -m experiments.convert_memory [--preset llama-3.2-1b] [--from gguf,huggingface] [--folder DIR] [--out FILE]

Writes a bfloat16 model of the preset's shape with random values, runs `ladder-jax convert` on it in a process of its
own, and reads that process's peak resident memory, mapped files included. Fails above 1.5 x the largest tensor + 1 GiB.
"""

import argparse
import json
import os
import pathlib
import platform
import subprocess
import sys
import tempfile
import time

import ml_dtypes
import numpy as np

from ladder_jax import config, pretrained
from ladder_jax.config import ModelConfig
from ladder_jax.pretrained import source as sources

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
GIB = 1 << 30


def random_source(model: ModelConfig) -> pretrained.Source:
    """Random bits below 2, made when they are read."""

    def values(shape: tuple[int, ...], seed: int) -> np.ndarray:
        bits = np.random.default_rng(seed).integers(0, 1 << 14, shape, np.uint16)
        return bits.view(BFLOAT16)

    stored = {
        key: pretrained.Stored(shape, BFLOAT16, lambda shape=shape, seed=seed: values(shape, seed))
        for seed, (key, shape) in enumerate(sources.expected_shapes(model).items())
    }
    return pretrained.Source("random", model, stored, context=2048)


def write_gguf(source: pretrained.Source, file: pathlib.Path) -> None:
    """Tensor by tensor, as llama.cpp's converter does. (In its order of rotary pairs: values are random anyway.)"""
    import gguf

    from ladder_jax.pretrained import linear
    from ladder_jax.pretrained.gguf import names

    model, dims = source.model, sources.dims(source.model)
    writer = gguf.GGUFWriter(str(file), "llama")
    for name, value in {
        "block_count": model.num_layers,
        "embedding_length": model.d_model,
        "feed_forward_length": model.d_ff,
        "attention.head_count": model.num_heads,
        "attention.head_count_kv": model.num_kv_heads,
        "attention.key_length": model.head_dim,
    }.items():
        writer.add_uint32(f"llama.{name}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", model.norm_eps)
    writer.add_string("tokenizer.ggml.model", "gpt2")
    writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
    shapes = {key: linear.shape(dims[key.name], stored.shape) for key, stored in source.arrays.items()}
    kind = gguf.GGMLQuantizationType.BF16
    for key, shape in shapes.items():
        packed = (*shape[:-1], 2 * shape[-1])
        writer.add_tensor_info(
            names.stored_name(key), packed, np.dtype(np.uint8), 2 * int(np.prod(shape)), raw_dtype=kind
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for stored in source.arrays.values():
        writer.write_tensor_data(stored.read().reshape(-1).view(np.uint8))
    writer.close()


def converted(file: pathlib.Path, destination: pathlib.Path) -> dict:
    """Seconds, and the process's peak resident memory in bytes."""
    command = [sys.executable, "-m", "ladder_jax", "convert", str(file), str(destination), "--ladder-layers", "all"]
    began = time.monotonic()
    process = subprocess.Popen(command, env={**os.environ, "JAX_PLATFORMS": "cpu"}, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"ladder-jax convert failed with status {status}")
    unit = 1 if platform.system() == "Darwin" else 1024
    return {"seconds": round(time.monotonic() - began, 1), "peak_bytes": usage.ru_maxrss * unit}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="llama-3.2-1b")
    parser.add_argument("--from", dest="forms", default="gguf,huggingface")
    parser.add_argument("--folder", help="where there is room for the model twice (default: a temporary folder)")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path(__file__).with_name("results.json"))
    args = parser.parse_args()
    overrides = [] if args.preset != "llama-3.2-1b" else ["model.rope_scaling=null"]  # GGUF has it as a tensor
    model = config.load(args.preset, overrides=[*overrides, "model.residual=standard"]).model
    source = random_source(model)
    sizes = [2 * int(np.prod(stored.shape)) for stored in source.arrays.values()]
    bound = 1.5 * max(sizes) + GIB
    told = {"preset": args.preset, "parameters": sum(sizes) // 2, "largest_tensor_bytes": max(sizes)}
    told |= {"bound_bytes": int(bound), "rows": []}
    for form in args.forms.split(","):
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            file = pathlib.Path(folder, "model.gguf" if form == "gguf" else "model")
            write_gguf(source, file) if form == "gguf" else pretrained.write_huggingface(source, file)
            told["rows"].append({"form": form, **converted(file, pathlib.Path(folder, "out"))})
        print(told["rows"][-1], flush=True)
        args.out.write_text(json.dumps(told, indent=1) + "\n")
    if worst := [row for row in told["rows"] if row["peak_bytes"] > bound]:
        raise SystemExit(f"above the bound of {bound / GIB:.2f} GiB: {worst}")


if __name__ == "__main__":
    main()
