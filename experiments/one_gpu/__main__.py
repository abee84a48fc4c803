"""One GPU: are its values right, its roofline, a rank's share of a large model, experts, an
emulated wire.

    python -m experiments.one_gpu [--parts dense experts ...]

Each part is a process of its own, so that the card's memory is free for it. What stands in the
results is not measured again; the README's tables are made of all parts. The paper's prompts of
1,024 tokens; fewer new tokens and repeats than its 512 and 10, so that all takes a card a quarter
of an hour. --small takes tiny models, which a CPU runs in minutes; a part's own command has other
settings.
"""

import os
import pathlib
import subprocess
import sys
import tempfile

from experiments import study

HERE = pathlib.Path(__file__).parent
WIRE = "experiments.one_gpu.wire --model {split} --share {share} {wired}"
PARTS = {
    "values": "experiments.one_gpu.values {values}",
    "dense": "ladder_jax bench --model {dense} --tensor 1 --residual standard,ladder {numbers}",
    "halves": "ladder_jax bench --model {dense} --tensor 1 --residual standard --interleave 1,2 {halves}",
    "share": "ladder_jax bench --model {split} --share {share} --residual standard,ladder,parallel {numbers}",
    "wire": WIRE,
    "wire-no-graphs": WIRE,
    "experts": "experiments.one_gpu.experts --model {experts} --share {share}",
}
# no CUDA graphs, which can undo an overlap
FLAGS = {"wire-no-graphs": "--xla_gpu_enable_command_buffer="}
LARGE = dict(
    values="",
    dense="llama-3-8b",
    split="llama-3-70b",
    experts="qwen3-30b-a3b",
    share=8,
    numbers="--batch 1,64 --new-tokens 128 --warmup 1 --repeats 5",
    halves="--batch 4,16 --new-tokens 2 --warmup 1 --repeats 5",
    wired="--batch 1,16 --new-tokens 64 --warmup 1 --repeats 5 --layers 8",
)
TINY = "--batch 2 --prompt-length 4 --new-tokens 3 --warmup 1 --repeats 1 --layers 1"
SMALL = dict(
    values="--models dense --kinds logits",
    dense="tiny",
    split="tiny",
    experts="tiny-moe --tokens 4 --repeats 1",
    share=4,
    numbers=TINY,
    halves=TINY,
    wired=TINY,
)


def main() -> int:
    parser = study.parser(__doc__, name="one_gpu")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument(
        "--small", action="store_true", help="tiny models, whose times mean nothing"
    )
    parser.add_argument("--out", type=pathlib.Path, default=HERE / "results.json")
    args = parser.parse_args()
    results = study.load(args.out) if args.out.exists() else {}
    failed = []
    for part in args.parts:
        words = PARTS[part].format(**SMALL if args.small else LARGE)
        flags = FLAGS.get(part, "")
        told = f"{flags and f'XLA_FLAGS={flags} '}python -m {words}"
        if results.get(part, {}).get("command") == told:  # of other settings is another result
            print(f"{part}: stands in {args.out}", file=sys.stderr)
            continue
        print(f"{part}: {told}", file=sys.stderr)
        if found := measured([sys.executable, "-m", *words.split()], flags=flags):
            results[part] = {**found, "command": told}
            study.keep(results, file=args.out)
        else:
            failed.append(part)
    if failed:
        print(f"not measured, for the reasons above: {', '.join(failed)}", file=sys.stderr)
    elif args.out.parent == HERE:
        study.show(tables(results), folder=HERE)
    return int(bool(failed))


def measured(command: list[str], *, flags: str) -> dict | None:
    """What the command wrote to its --out, or None where it failed; its own words go to the
    terminal.
    """
    environment = {**os.environ, "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()}
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder) / "out.json"
        done = subprocess.run([*command, "--out", str(out)], env=environment)
        return study.load(out) if done.returncode == 0 else None


def tables(results: dict) -> dict[str, str]:
    """Of the README: milliseconds and GB/s of `dense`, microseconds of `experts` and `wire`."""
    dense = []
    for row in results["dense"]["rows"]:
        share = f"{row['matmul_share'] * 100:.0f} %"
        dense.append(_speeds(row, row["residual"].capitalize(), share, row["step_seconds"]))
    for row in results["torch"]["rows"]:
        step = row["decode_seconds"] / (row["new_tokens"] - 1)
        read = results["dense"]["rows"][0]["bytes_per_step"] / step
        dense.append(_speeds(row | {"bytes_per_second": read}, "transformers", "", step))
    products = {}
    for row in results["experts"]["rows"]:
        if row["product"] == "forward" or row["tokens"] == 2048:
            name = f"{row['tokens']:,}", row["product"].replace("-", " ")
            products.setdefault(name, []).append(f"{row['seconds'] * 1e6:,.0f}")
    wire = []
    for phase, batch in (("prefill", 16), ("prefill", 1), ("decode", 1), ("decode", 16)):
        rows = [
            row
            for row in results["wire"]["rows"]
            if row["batch"] == batch and row.get("wire", "payload") == "payload"
        ]
        steps = rows[0]["all_reduces"] * (63 if phase == "decode" else 1)
        each = [row[f"{phase}_exposed_seconds"] * 1e6 for row in rows]
        computes = f"{rows[0][f'{phase}_seconds'] / steps * 1e6:,.0f}"
        wire.append([batch, phase, computes, *map(_shown, each)])
    names = "Standard exposes | Ladder exposes | Parallel exposes"
    return {
        "dense": study.table(
            "batch | model | prefill ms | of the matmul peak | step ms | GB/s",
            sorted(dense, key=lambda row: row[0]),
        ),
        "experts": study.table(
            "tokens | product | kernel | XLA | batched",
            ([*name, *shown] for name, shown in products.items()),
        ),
        "wire": study.table(f"batch | phase | a sublayer computes | {names}", wire),
    }


def _speeds(row: dict, name: str, share: str, step: float) -> list:
    prefill = _shown(row["prefill_seconds"] * 1e3)
    read = f"{row['bytes_per_second'] / 1e9:,.0f}"
    return [row["batch"], name, prefill, share, f"{step * 1e3:.2f}", read]


def _shown(value: float) -> str:
    return f"{value:,.{1 if value < 100 else 0}f}"


if __name__ == "__main__":
    sys.exit(main())
