"""The memory of a training step, by the compiler: all weights, a frozen half, low-rank factors, a side network.

    nice python -m experiments.side.memory [--only N]      # a minute a program; rows that were measured are kept

One device of a v5p slice: of an 8B model over eight devices, and of a model of T5-base's size on one, which is near the
paper's setting. What it holds between steps, and what a step needs beside it. Nothing runs. Writes memory.json and the
README's tables.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import sys
import time

HERE = pathlib.Path(__file__).parent
TARGET = "v5p:2x2x2"
WAYS = ("all weights", "upper half", "low rank 16", "side 1/8")


@dataclasses.dataclass(frozen=True)
class Setup:
    """model: a preset's name, or the settings of `model`. batch: rows of `sequence` tokens."""

    model: str | dict
    tensor: int
    batch: int
    sequence: int


T5 = dict(num_layers=24, d_model=768, num_heads=12, num_kv_heads=12, d_ff=2048, vocab_size=32128, tie_embeddings=True)
SETUPS = {"llama-3-8b": Setup("llama-3-8b", 8, 4, 2048), "t5-base": Setup(T5, 1, 100, 128)}  # LST's batch
CASES = [  # setup, remat, how many of the last layers are ladder layers (all: one loop, quick to compile), what trains
    ("llama-3-8b", "none", 16, "all weights"),
    ("llama-3-8b", "none", 16, "side 1/8"),
    ("llama-3-8b", "full", 32, "side 1/8"),
    ("llama-3-8b", "full", 32, "all weights"),
    *(("llama-3-8b", "none", 16, way) for way in ("low rank 16", "upper half")),
    *(("llama-3-8b", "full", 32, way) for way in ("low rank 16", "upper half")),
    ("llama-3-8b", "full", 16, "side 1/8"),
    *(("t5-base", "none", 24, way) for way in WAYS),
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
    measured = {(row["setup"], row["remat"], row["ladder_layers"], row["way"]) for row in rows}
    for case in CASES[: args.only]:
        if case not in measured:
            rows.append(measure(*case))
            about = {"target": TARGET, "setups": {name: dataclasses.asdict(setup) for name, setup in SETUPS.items()}}
            args.out.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
            print(rows[-1], flush=True)
    from experiments import readme

    if args.out.parent == HERE:
        readme.write(HERE, {f"memory-{setup}": table(rows, setup) for setup in SETUPS})
    sys.stdout.flush()
    os._exit(0)  # no normal exit: a compiler's threads may hang at the interpreter's end


def measure(setup: str, remat: str, ladder_layers: int, way: str) -> dict:
    import jax

    from ladder_jax import schedule, side, train
    from ladder_jax.config import LoraConfig, ModelConfig, Remat, SideConfig, TrainConfig, preset
    from ladder_jax.parallel import make_mesh
    from ladder_jax.retrain import Retraining
    from ladder_jax.schedule import targets

    of = SETUPS[setup]
    mesh = make_mesh(tensor=of.tensor, devices=schedule.devices(targets.parse(TARGET))[: of.tensor])
    beside = SideConfig(int(way.partition("/")[2])) if way.startswith("side") else None
    changes = dict(residual="ladder", ladder_layers=ladder_layers, side=beside)
    config = preset(of.model, **changes) if isinstance(of.model, str) else ModelConfig(**of.model, **changes)
    definition = side.define(config, mesh=mesh)
    frozen = config.num_layers // 2 if way == "upper half" else 0
    plan = Retraining(definition, frozen, LoraConfig(rank=16) if way.startswith("low rank") else LoraConfig())
    settings = dict(config=TrainConfig(batch=of.batch, sequence=of.sequence, remat=Remat(remat)), task=plan)
    state = train.abstract_state(definition, **settings)
    batch = train.abstract_batch(definition, config=settings["config"])
    fixed = plan.frozen_abstract
    began = time.perf_counter()
    compiled = train.train_step(definition, **settings).compile(state, batch, fixed)
    sizes = compiled.memory_analysis()
    return {
        "setup": setup,
        "remat": remat,
        "ladder_layers": ladder_layers,
        "way": way,
        "trained_parameters": sum(leaf.size for leaf in jax.tree.leaves(plan.abstract)),
        "arguments_bytes": sizes.argument_size_in_bytes,
        "temporary_bytes": sizes.temp_size_in_bytes,
        "outputs_bytes": sizes.output_size_in_bytes - sizes.alias_size_in_bytes,
        "seconds": time.perf_counter() - began,
    }


def table(rows: list[dict], setup: str) -> str:
    lines = ["| remat | ladder layers | trains | parameters | held | beside | in all | |", "|" + "---|" * 8]
    total = lambda row: row["arguments_bytes"] + row["temporary_bytes"] + row["outputs_bytes"]
    shown = lambda row: (row["remat"] != "none", row["ladder_layers"], WAYS.index(row["way"]))
    rows = [row for row in rows if row["setup"] == setup]
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
