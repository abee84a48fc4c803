"""Does the order of the stages count? A refiner of made translations, tuned from easy to hard, shuffled, and back.

    nice python -m experiments.staged [--seeds 3] [--runs runs/staged]      # minutes; killed, it goes on

Each seed pretrains a small model on plain pairs of source and reference, and then tunes low-rank factors on refinement
records, split by score with `ladder-jax split`: in three stages, all records shuffled (the control), and the stages
backwards. All ways have the same records, the same number of tokens, and one schedule. Writes results.json and the
README's table.
"""

import argparse
import json
import pathlib
import statistics

import numpy as np

from experiments import measure, readme
from experiments.staged import records
from ladder_jax import cli, config, nn, pretrained, train
from ladder_jax.pretrained import OpenedModel

HERE = pathlib.Path(__file__).parent
RECORDS, HELD_OUT = 3000, 200
STAGES = ["easy", "medium", "hard"]
WAYS = ["easy to hard", "shuffled", "hard to easy"]
BASE = ["model.d_model=64", "model.num_heads=4", "model.num_kv_heads=4", "model.d_ff=160", "model.num_layers=4",
        "model.residual=ladder", "model.ladder_layers=2", "model.dtype=float32", "model.residual_dtype=float32",
        "train.batch=16", "train.sequence=128", "train.learning_rate=3e-3", "train.warmup_steps=30",
        "data.format=examples", "run.tensorboard=false"]  # fmt: skip
TUNED = ["lora.rank=16", "lora.alpha=16"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, nargs=2, default=(300, 150), help="of pretraining, and of tuning")
    parser.add_argument("--runs", type=pathlib.Path, default=pathlib.Path("runs/staged"))
    parser.add_argument("--out", type=pathlib.Path, default=HERE / "results.json")
    args = parser.parse_args()
    rows = [row for seed in range(args.seeds) for row in of_seed(seed, args.runs / f"seed-{seed}", *args.steps)]
    about = {"records": RECORDS, "held_out": HELD_OUT, "steps": list(args.steps), "settings": [*BASE, *TUNED]}
    measure.report({**about, "rows": rows}, file=args.out)
    if args.out.parent == HERE:
        readme.write(HERE, {"order": table(rows)})


def of_seed(seed: int, place: pathlib.Path, *steps: int) -> list[dict]:
    write(place, seed=seed)
    run(place / "base", f"data.path={place / 'pairs.jsonl'}", f"train.steps={steps[0]}", f"train.seed={seed}", *BASE)
    held_out = records.made(RECORDS + HELD_OUT, seed=seed)[RECORDS:]
    rows = [{"seed": seed, "way": "not tuned", **scored(place / "base", held_out)}]
    for way, path in zip(WAYS, ("stages/stages.yaml", "records.jsonl", "backwards.yaml")):
        name = path.partition(".")[0].replace("/", "-")
        overrides = [f"train.start={place / 'base'}", f"data.path={place / path}", f"train.steps={steps[1]}"]
        run(place / name, *overrides, f"train.seed={seed}", *BASE[5:], *TUNED)
        rows.append({"seed": seed, "way": way, **scored(place / name, held_out)})
        print(rows[-1], flush=True)
    return rows


def write(place: pathlib.Path, *, seed: int) -> None:
    """Once: plain pairs, the records, and their stages in both orders."""
    if (place / "backwards.yaml").exists():
        return
    place.mkdir(parents=True, exist_ok=True)
    made = records.made(RECORDS + HELD_OUT, seed=seed)[:RECORDS]
    pairs = [{"prompt": f"{one['source']}|", "completion": one["completion"]} for one in made]
    for name, lines in (("records", made), ("pairs", pairs)):
        (place / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ["split", str(place / "records.jsonl"), "--by", "score", "--stages", ",".join(STAGES)]
    if not (place / "stages").exists() and (status := cli.main([*words, "--out", str(place / "stages")])):
        raise SystemExit(status)
    listed = "".join(f"- stages/{name}.jsonl\n" for name in reversed(STAGES))
    (place / "backwards.yaml").write_text(f"stages:\n{listed}")


def run(folder: pathlib.Path, *overrides: str) -> None:
    if not (folder / "result.json").exists():
        often = [
            "train.checkpoint_every=50",
            "train.keep_checkpoints=1",
            "train.evaluate_every=0",
            "train.log_every=25",
        ]
        recipe = folder.parent / "recipe.yaml"
        recipe.write_text("run: {name: staged}\n")
        start = "tiny" if folder.name == "base" else str(recipe)
        train.run(config.load(start, overrides=[*overrides, *often, f"run.dir={folder}"]), say=print)


def scored(folder: pathlib.Path, held_out: list[dict]) -> dict:
    """Nats a token of the held-out references, and the share of them that greedy decoding would write exactly.

    Given the reference so far, the likeliest next token is the reference's at every place just where it would.
    """
    model = pretrained.open_model(folder)
    tokenizer = model.tokenizer()
    texts = [(tokenizer.encode(one["prompt"]), tokenizer.encode(one["completion"])) for one in held_out]
    loss, exact, by_stage = [], [], {name: [] for name in STAGES}
    bounds = sorted(one["score"] for one in held_out)
    for one, (prompt, answer), scores in zip(held_out, texts, logits(model, texts)):
        rows = scores[len(prompt) - 1 : len(prompt) + len(answer) - 1]
        logp = rows - np.logaddexp.reduce(rows, axis=-1, keepdims=True)
        loss += (-logp[np.arange(len(answer)), answer]).tolist()
        exact.append(bool((rows.argmax(-1) == answer).all()))
        third = min(3 * bounds.index(one["score"]) // len(bounds), 2)
        by_stage[STAGES[third]].append(exact[-1])
    share = {f"exact_{name}": statistics.fmean(found) for name, found in by_stage.items()}
    return {"loss": statistics.fmean(loss), "exact": statistics.fmean(exact), **share}


def logits(model: OpenedModel, texts: list[tuple[list[int], list[int]]]) -> np.ndarray:
    length = max(len(prompt) + len(answer) for prompt, answer in texts)
    tokens = np.zeros((len(texts), length), np.int32)
    for row, (prompt, answer) in zip(tokens, texts):
        row[: len(prompt) + len(answer)] = [*prompt, *answer]
    definition = model.define(tensor=1)
    compiled, params = nn.compiled_logits(definition), model.params(definition)
    return np.concatenate([np.asarray(compiled(params, part)) for part in np.split(tokens, 4)])


def table(rows: list[dict]) -> str:
    lines = ["| tuned | seeds | loss | exact | easy | medium | hard |", "|" + "---|" * 7]
    for way in ("not tuned", *WAYS):
        mine = [row for row in rows if row["way"] == way]
        cells = []
        for name in ("loss", "exact", *(f"exact_{stage}" for stage in STAGES)):
            values, form = [row[name] for row in mine], "{:.3f}" if name == "loss" else "{:.1%}"
            mean = form.format(statistics.fmean(values))
            spread = f" ({form.format(min(values))} to {form.format(max(values))})" if len(values) > 1 else ""
            cells.append(mean + (spread if name in ("loss", "exact") else ""))
        lines.append(f"| {way} | {len(mine)} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
