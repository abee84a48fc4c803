"""One GPU by the paper's protocol: its roofline, a rank's share of a large model, PyTorch beside it, an emulated wire.

    python -m experiments.one_gpu [--torch-python .venv-hf/bin/python] [--parts dense experts ...]

Each part is a process of its own, so that the card's memory is free for it. What stands in the results is not measured
again (--again does). Everything can be overridden: --dense tiny --split tiny --share 4 --batch 1 --repeats 2
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile

from ladder_jax import files

HERE = pathlib.Path(__file__).parent
NUMBERS = ("prompt_length", "new_tokens", "warmup", "repeats", "layers")
FLAGS = {
    "wire-no-graphs": "--xla_gpu_enable_command_buffer=",  # no CUDA graphs, which can undo an overlap
    "experts-cudnn": "--xla_gpu_experimental_use_ragged_dot_fusion=true",  # where cuDNN is 9.22 or newer
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dense", default="llama-3-8b", metavar="PRESET", help="a model that fits whole")
    parser.add_argument("--split", default="llama-3-70b", metavar="PRESET", help="one of which a rank's share fits")
    parser.add_argument("--experts", default="qwen3-30b-a3b", metavar="PRESET", help="a mixture of experts")
    parser.add_argument("--tokens", metavar="N[,N]", help="that pass the experts at once (default: 1,32,2048)")
    parser.add_argument("--share", default="8", metavar="N", help="ranks that split it")
    parser.add_argument("--batch", default="1,64", metavar="B[,B]")
    for name in NUMBERS:
        parser.add_argument(f"--{name.replace('_', '-')}", metavar="N", help="as of ladder-jax bench")
    parser.add_argument("--wires", metavar="NAME[,NAME]", help="payload, nccl, one-kernel (default: all)")
    parser.add_argument("--torch-python", default=sys.executable, metavar="FILE", help="a Python with transformers")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--again", action="store_true", help="also what stands in the results")
    parser.add_argument("--out", type=pathlib.Path, default=HERE / "results.json")
    args = parser.parse_args()

    results, failed = json.loads(args.out.read_text()) if args.out.exists() else {}, []
    for part in args.parts:
        python, *words = command(part, args)
        flags = FLAGS.get(part, "")
        told = f"{flags and f'XLA_FLAGS={flags} '}python {' '.join(words)}"
        if results.get(part, {}).get("command") == told and not args.again:  # of other settings is another result
            print(f"{part}: stands in {args.out}", file=sys.stderr)
            continue
        print(f"{part}: {told}", file=sys.stderr)
        if (found := measured([python, *words], flags=flags)) is None:
            failed.append(part)
            continue
        results[part] = {**found, "command": told}
        files.write_atomically(
            args.out, lambda path: pathlib.Path(path).write_text(json.dumps(results, indent=1) + "\n")
        )
    if failed:
        print(f"not measured, for the reasons above: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


def command(part: str, args: argparse.Namespace) -> list[str]:
    given = {name: getattr(args, name) for name in ("batch", *NUMBERS) if getattr(args, name) is not None}
    words = [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", value)]
    bench, split = [sys.executable, "-m", "ladder_jax", "bench"], ["--model", args.split, "--share", args.share]
    match part:
        case "dense":
            return [*bench, "--model", args.dense, "--tensor", "1", "--residual", "standard,ladder", *words]
        case "halves":
            return [
                *bench,
                "--model",
                args.dense,
                "--tensor",
                "1",
                "--residual",
                "standard",
                "--interleave",
                "1,2",
                *words,
            ]
        case "share":
            return [*bench, *split, "--residual", "standard,ladder,parallel", *words]
        case "torch":
            return [args.torch_python, "-m", "experiments.one_gpu.torch_generation", "--model", args.dense, *words]
        case "experts" | "experts-cudnn":
            tokens = ["--tokens", args.tokens] if args.tokens else []
            repeats = ["--repeats", args.repeats] if args.repeats else []
            experts = ["--model", args.experts, "--share", args.share, *tokens, *repeats]
            return [sys.executable, "-m", "experiments.one_gpu.experts", *experts]
        case _:
            wires = ["--wires", args.wires] if args.wires else []
            return [sys.executable, "-m", "experiments.one_gpu.wire", *split, *wires, *words]


PARTS = ("dense", "halves", "share", "torch", "wire", "wire-no-graphs", "experts", "experts-cudnn")


def measured(command: list[str], *, flags: str) -> dict | None:
    """What the command wrote to its --out, or None where it failed; its own words go to the terminal."""
    environment = {**os.environ, "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()}
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder) / "out.json"
        done = subprocess.run([*command, "--out", str(out)], env=environment)
        return json.loads(out.read_text()) if done.returncode == 0 else None


if __name__ == "__main__":
    sys.exit(main())
