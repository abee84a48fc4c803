"""What a decode step moves between a chip's memory and its cores, over the least that it must.

    python -m experiments.decode_bytes

Compiles ahead of time (jax[tpu] and the CUDA plugin, no accelerator), two programs at once; what was compiled before is
read from the cache. The decoding program that generation, serving and benchmarks run, a token of it: 4 layers of
Llama-3-70B over 8 devices, 16 rows at context 2048. Exit status 1 if weights of bfloat16 are over the limit.
"""

import argparse
import concurrent.futures
import json
import pathlib
import sys

from experiments import readme
from ladder_jax.config import Loop, Phase, Quantize
from ladder_jax.overlap import compile as compiling
from ladder_jax.overlap import request as requests
from ladder_jax.overlap import result
from ladder_jax.overlap.request import Request

TARGETS = ("v5e:2x4", "v5p:2x2x2", "v6e:2x4", "tpu7x:2x2x1", "h100:8", "b200:8")
RESIDUALS = ("standard", "ladder", "ladder-fresh", "parallel-ladder")
LIMIT = 1.10  # times the least, in bfloat16
HERE = pathlib.Path(__file__).parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", nargs="+", default=TARGETS)
    parser.add_argument("--residuals", nargs="+", default=RESIDUALS)
    parser.add_argument("--weights", nargs="+", default=[kind.value for kind in Quantize])
    parser.add_argument("--out", type=pathlib.Path, default=HERE / "results.json")
    args = parser.parse_args()

    shape = dict(model="llama-3-70b", layers=4, phase=Phase.DECODE, loop=Loop.UNROLLED)
    asked = [
        requests.make(target=target, residual=residual, quantize=quantize, **shape)
        for target in args.targets
        for quantize in map(Quantize, args.weights)
        for residual in (args.residuals if quantize is Quantize.NONE else ("ladder",))
    ]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        rows = list(pool.map(measure, asked))
    args.out.write_text(json.dumps({"model": "llama-3-70b", "layers": 4, "tensor": 8, "rows": rows}, indent=1) + "\n")
    found = table(rows)
    print(found)
    if args.out == HERE / "results.json":
        readme.write(HERE, {"bytes": found})
    held = [row for row in rows if row["quantize"] == Quantize.NONE.value]
    return int(any(row["bytes_accessed"] > LIMIT * row["bytes_minimum"] for row in held))


def measure(request: Request) -> dict:
    answer = result.read(request, compiling.compiled(request))
    found = answer.as_dict()
    names = "target residual bytes_accessed bytes_accessed_by_compiler bytes_minimum compiler jax compiler_options"
    return {**{name: found[name] for name in names.split()}, "quantize": request.quantize.value,
            "cycles": answer.report.step_cycles}  # fmt: skip


def table(rows: list[dict]) -> str:
    """Markdown, a row a program."""
    lines = [
        "| target | residual | weights | bytes over the least | by cost_analysis() | cycles |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        share = lambda name: f"{row[name] / row['bytes_minimum']:.3f}" if row[name] else "-"
        weights = "8 bits" if row["quantize"] == "int8" else "bfloat16"
        cells = [row["target"], row["residual"], weights, share("bytes_accessed"), share("bytes_accessed_by_compiler")]
        lines.append(f"| {' | '.join([*cells, format(row['cycles'], ',') if row['cycles'] else '-'])} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
