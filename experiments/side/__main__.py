"""Held-out loss at equal tokens: all weights, a frozen half, low-rank factors, side networks, and the control.

    nice python -m experiments.side --runs runs/distil/small [--steps 100] [--seeds 3]     # minutes; killed, it goes on

The model is the pretrained one of seed 0 of the study `experiments.distil` (its folder is --runs), its last half
converted to ladder layers, and tuned on that study's retraining text. The control is the unconverted model, all of its
weights tuned likewise. A seed is another order of the text and other initial values. Writes results.json and the
README's table.
"""

import argparse
import json
import pathlib
import statistics

from experiments import measure, readme
from ladder_jax import config, train
from ladder_jax.config import RunConfig
from ladder_jax.train import metrics

HERE = pathlib.Path(__file__).parent
LADDER = ("model.residual=ladder", "model.ladder_layers=6")
CONTROL = "control: standard, all weights"
UNTUNED = "nothing"
WAYS = {  # and learning rates: a third of pretraining's for its weights; for new ones the paper's, and higher ones
    CONTROL: (("model.residual=standard",), (1e-3,)),
    UNTUNED: (LADDER, (1e-12,)),  # one step of no effect, and the held-out loss after it
    "all weights": (LADDER, (1e-3,)),
    "upper half": ((*LADDER, "train.freeze=6"), (1e-3,)),
    "low rank 16": ((*LADDER, "lora.rank=16"), (3e-3,)),
    "side 1/8": ((*LADDER, "model.side.reduction=8"), (3e-3,)),
    "side 1/2": ((*LADDER, "model.side.reduction=2"), (1e-2, 3e-3, 3e-2)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=pathlib.Path, required=True, help="the folder of the distil study's runs")
    parser.add_argument("--steps", type=int, default=100, help="of 1,024 tokens")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--work", type=pathlib.Path, default=pathlib.Path("runs/side"))
    parser.add_argument("--out", type=pathlib.Path, default=HERE / "results.json")
    args = parser.parse_args()
    rows = []
    for seed in range(args.seeds):
        for way, (_, rates) in WAYS.items():
            for rate in rates if seed == 0 else rates[:1]:  # the others were no better
                rows.append(measured(way, rate, seed, args))
                print(rows[-1], flush=True)
                report(rows, args)


def measured(way: str, rate: float, seed: int, args: argparse.Namespace) -> dict:
    place = args.work / f"{way.replace('/', '-').replace(': ', '-').replace(' ', '-')}-{rate:g}-{seed}-{args.steps}"
    settings = retraining(way, rate, seed, args, place)
    if not (place / "result.json").exists():
        train.run(settings, say=print)
    losses = [row["validation_loss"] for row in metrics.read(place) if row.get("validation_loss") is not None]
    count = 0 if way == UNTUNED else trained(settings)
    return {"way": way, "rate": rate, "seed": seed, "loss": losses[-1], "trained": count}


def retraining(way: str, rate: float, seed: int, args: argparse.Namespace, place: pathlib.Path) -> RunConfig:
    texts, steps = args.runs / "texts", 1 if way == UNTUNED else args.steps
    held_out = json.loads((texts / "texts.json").read_text())["held_out"]["retrain.txt"]
    recipe = args.work / "recipe.yaml"
    recipe.parent.mkdir(parents=True, exist_ok=True)
    recipe.write_text("run: {name: side}\n")
    overrides = [
        f"train.start={args.runs / 'seed-0' / 'pretrained'}", f"train.steps={steps}", f"train.seed={seed}",
        f"train.learning_rate={rate}", f"train.warmup_steps={args.steps // 10}", "train.weight_decay=0",
        "train.batch=8", "train.sequence=128", "train.evaluate_every=0", "train.evaluation_batches=32",
        f"train.checkpoint_every={steps}", "train.log_every=25", "run.tensorboard=false", f"run.dir={place}",
        f"data.path={texts / 'retrain.txt'}", f"data.validation_fraction={held_out!r}",
    ]  # fmt: skip
    return config.load(str(recipe), overrides=[*overrides, *WAYS[way][0]])


def trained(settings: RunConfig) -> int:
    """How many parameters."""
    import jax

    from ladder_jax import nn, parallel
    from ladder_jax.retrain import Retraining

    definition = nn.define(settings.model, mesh=parallel.make_mesh())
    plan = Retraining(definition, settings.train.freeze, settings.lora)
    return sum(leaf.size for leaf in jax.tree.leaves(plan.abstract))


def report(rows: list[dict], args: argparse.Namespace) -> None:
    environment = measure.environment()
    del environment["command"]  # which has the folders of this machine
    about = {**environment, "steps": args.steps, "tokens": args.steps * 1024, "held_out_tokens": 32 * 1024}
    args.out.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
    if args.out.parent == HERE:
        readme.write(HERE, {"loss": table(rows)})


def table(rows: list[dict]) -> str:
    lines = ["| trains | parameters | rate | seeds | loss | spread | over the control |", "|" + "---|" * 7]
    control = {row["seed"]: row["loss"] for row in rows if row["way"] == CONTROL}
    for way, rate in dict.fromkeys((row["way"], row["rate"]) for row in rows):
        mine = [row for row in rows if (row["way"], row["rate"]) == (way, rate)]
        losses, over = [row["loss"] for row in mine], [row["loss"] - control[row["seed"]] for row in mine]
        lines.append(
            f"| {way} | {mine[0]['trained']:,} | {rate:g} | {len(mine)} | {statistics.fmean(losses):.4f}"
            f" | {min(losses):.4f} to {max(losses):.4f} | {statistics.fmean(over):+.4f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
