"""The memory of a training step, by the compiler: all weights, a frozen half, low-rank factors, a side network.

    nice python -m experiments.side.memory [--only N]      # a minute a program; rows that were measured are kept

One device of a v5p slice of eight, tensor 8: what it holds between steps, and what a step needs beside it. Nothing
runs. Writes memory.json and the README's table.
"""

import argparse
import json
import os
import pathlib
import sys
import time

HERE = pathlib.Path(__file__).parent
TARGET, TENSOR = "v5p:2x2x2", 8
STEP = dict(batch=4, sequence=2048)
MODEL = "llama-3-8b"
WAYS = ("all weights", "upper half", "low rank 16", "side 1/8")
CASES = [  # remat, how many of the last layers are ladder layers (all are one loop, quicker to compile), what trains
    ("none", 16, "all weights"),
    ("none", 16, "side 1/8"),
    ("full", 32, "side 1/8"),
    ("full", 32, "all weights"),
    *((remat, layers, way) for remat, layers in (("none", 16), ("full", 32)) for way in ("low rank 16", "upper half")),
    ("full", 16, "side 1/8"),
]
GIB = 2**30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=int, help="so many cases, the first ones")
    parser.add_argument("--out", type=pathlib.Path, default=HERE / "memory.json")
    args = parser.parse_args()
    from ladder_jax.schedule import targets

    os.environ.update(targets.ENVIRONMENT)
    rows = json.loads(args.out.read_text())["rows"] if args.out.exists() else []
    measured = {(row["remat"], row["ladder_layers"], row["way"]) for row in rows}
    for case in CASES[: args.only]:
        if case not in measured:
            rows.append(measure(*case))
            about = {"target": TARGET, "tensor": TENSOR, "model": MODEL, **STEP}
            args.out.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
            print(rows[-1], flush=True)
    from experiments import readme

    if args.out.parent == HERE:
        readme.write(HERE, {"memory": table(rows)})
    sys.stdout.flush()
    os._exit(0)  # no normal exit: a compiler's threads may hang at the interpreter's end


def measure(remat: str, ladder_layers: int, way: str) -> dict:
    import jax

    from ladder_jax import nn, schedule, train
    from ladder_jax.config import LoraConfig, Remat, SideConfig, TrainConfig, preset
    from ladder_jax.parallel import make_mesh
    from ladder_jax.retrain import Retraining
    from ladder_jax.schedule import targets

    mesh = make_mesh(tensor=TENSOR, devices=schedule.devices(targets.parse(TARGET)))
    side = SideConfig(int(way.partition("/")[2])) if way.startswith("side") else None
    config = preset(MODEL, residual="ladder", ladder_layers=ladder_layers, side=side)
    definition = nn.define(config, mesh=mesh)
    frozen = config.num_layers // 2 if way == "upper half" else 0
    plan = Retraining(definition, frozen, LoraConfig(rank=16) if way.startswith("low rank") else LoraConfig())
    settings = dict(config=TrainConfig(**STEP, remat=Remat(remat)), task=plan)
    state = train.abstract_state(definition, **settings)
    batch = train.abstract_batch(definition, config=settings["config"])
    fixed = plan.frozen_abstract
    began = time.perf_counter()
    compiled = train.train_step(definition, **settings).compile(state, batch, fixed)
    sizes = compiled.memory_analysis()
    return {
        "remat": remat,
        "ladder_layers": ladder_layers,
        "way": way,
        "trained_parameters": sum(leaf.size for leaf in jax.tree.leaves(plan.abstract)),
        "arguments_bytes": sizes.argument_size_in_bytes,
        "temporary_bytes": sizes.temp_size_in_bytes,
        "outputs_bytes": sizes.output_size_in_bytes - sizes.alias_size_in_bytes,
        "seconds": time.perf_counter() - began,
    }


def table(rows: list[dict]) -> str:
    lines = ["| remat | ladder layers | trains | parameters | held | beside | in all | |", "|" + "---|" * 8]
    total = lambda row: row["arguments_bytes"] + row["temporary_bytes"] + row["outputs_bytes"]
    shown = lambda row: (row["remat"] != "none", row["ladder_layers"], WAYS.index(row["way"]))
    for row in sorted(rows, key=shown):
        same = (one for one in rows if shown(one)[:2] == shown(row)[:2])
        whole = next((total(one) for one in same if one["way"] == WAYS[0]), None)
        lines.append(
            f"| {row['remat']} | {row['ladder_layers']} | {row['way']} | {row['trained_parameters'] / 1e6:,.0f} M"
            f" | {row['arguments_bytes'] / GIB:.2f} | {(row['temporary_bytes'] + row['outputs_bytes']) / GIB:.2f}"
            f" | {total(row) / GIB:.2f} | {f'{total(row) / whole - 1:+.0%}' if whole else ''} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
