"""Retrains and measures an arm if that was not done yet, and gathers what all of them left."""

import dataclasses
import json
import pathlib

from experiments import measure
from experiments.convert_smollm2.plan import Arm, Way
from experiments.convert_smollm2.prepare import Study
from ladder_jax import config, evaluate, files, nn, train
from ladder_jax.checkpoint import open_checkpoint
from ladder_jax.errors import UserError
from ladder_jax.evaluate.model import MAX_NEW_TOKENS
from ladder_jax.train import folder, metrics

NAME = "measured.json"


def arm_once(arm: Arm, study: Study, *, seed: int, questions: str | None) -> None:
    """Nothing is computed where the arm's folder holds its scores. Raises UserError if those are of other settings."""
    if found(arm, study, seed=seed, questions=questions) is not None:
        return
    asked, file = _asked(arm, study, seed=seed, questions=questions), place(arm, study, seed=seed) / NAME
    file.parent.mkdir(parents=True, exist_ok=True)
    row = {"asked": asked, "arm": arm.name, "seed": seed, **_described(arm, study)}
    if arm.way is Way.NONE:
        model = _unretrained(arm, study)
    else:
        settings = _config(arm, study, seed=seed)
        train.run(settings, say=_say)
        model = evaluate.open_model(file.parent / "run", window=settings.train.sequence)
        row |= _history(settings)
    row |= scores(model, study, questions=questions)
    files.write_atomically(str(file), lambda path: pathlib.Path(path).write_text(json.dumps(row, indent=1) + "\n"))


def scores(model: evaluate.Model, study: Study, *, questions: str | None) -> dict:
    """Perplexity of the held-out rows, the continuation task, and (where asked) worked answers."""
    perplexity = evaluate.perplexity(model, [row.tolist() for row in study.held_out])
    chosen = evaluate.multiple_choice(model, evaluate.read_choices(str(study.choices)))
    row = {"perplexity": dataclasses.asdict(perplexity), "continuation": dataclasses.asdict(chosen)}
    if questions is not None:
        worked = evaluate.read_questions(questions)[-study.size.worked :]
        longest = min(MAX_NEW_TOKENS, model.window // 2)
        row["worked"] = dataclasses.asdict(evaluate.generation(model, worked, max_new_tokens=longest))
    return row


def found(arm: Arm, study: Study, *, seed: int, questions: str | None) -> dict | None:
    """The arm's scores, if it was measured. Raises UserError where that was with other settings."""
    file, asked = place(arm, study, seed=seed) / NAME, _asked(arm, study, seed=seed, questions=questions)
    if not file.is_file():
        return None
    row = json.loads(file.read_text())
    if changed := [name for name, value in row.pop("asked").items() if asked[name] != value]:
        raise UserError(f"{str(file)!r} was measured with another {changed[0]}: choose another --runs folder")
    return row


def place(arm: Arm, study: Study, *, seed: int) -> pathlib.Path:
    return study.base.parent / arm.name / f"seed-{seed}"


def report(arms: list[Arm], study: Study, *, questions: str | None, file: pathlib.Path) -> None:
    """`file` as JSON: the data, the settings, the sensitivity curve, and every arm that was measured."""
    rows = [found(arm, study, seed=seed, questions=questions) for arm in arms for seed in range(study.size.seeds)]
    settings, environment = study.config, measure.environment()
    del environment["command"]
    content = {
        **environment,
        "size": study.size.name,
        "text": pathlib.Path(settings.data.path).name,
        "held_out_tokens": sum(len(row) - 1 for row in study.held_out),
        "tokens_a_step": settings.train.batch * settings.train.sequence,
        "num_layers": settings.model.num_layers,
        "train": config.to_dict(settings.train) | {"start": None},
        "sensitivity": {name: value for name, value in study.curve.items() if name != "asked"},
        "runs": [row for row in rows if row is not None],
    }
    write = lambda path: pathlib.Path(path).write_text(json.dumps(content, indent=1) + "\n")
    files.write_atomically(str(file), write)


def _described(arm: Arm, study: Study) -> dict:
    """What tables and figures need to know of an arm."""
    choice = arm.choice
    return {
        "way": arm.way.name.lower(),
        "residual": arm.residual,
        "how": choice.how if choice else None,
        "converted": choice.count if choice else 0,
        "ladder_layers": arm.ladder_layers(study.order, num_layers=study.config.model.num_layers),
    }


def _asked(arm: Arm, study: Study, *, seed: int, questions: str | None) -> dict:
    settings = config.to_dict(study.config)
    asked = {"model": settings["model"], "data": settings["data"], "size": dataclasses.asdict(study.size), "seed": seed}
    asked["size"]["search"] = study.size.search.value
    asked |= {"train": settings["train"] | {"start": None}, "questions": questions, **_described(arm, study)}
    return json.loads(json.dumps(asked))


def _unretrained(arm: Arm, study: Study) -> evaluate.Model:
    """The original's weights with the arm's topology: read anew, as its ranks decide how tables are padded."""
    layers = arm.ladder_layers(study.order, num_layers=study.config.model.num_layers)
    changes = dict(residual=arm.residual, ladder_layers=layers, ranks=arm.ranks)
    model = dataclasses.replace(study.config.model, **changes)
    definition = nn.define(model, mesh=study.original.definition.layout.mesh)
    load = lambda: open_checkpoint(study.base).params(definition)
    return dataclasses.replace(study.original, definition=definition, load=load)


def _config(arm: Arm, study: Study, *, seed: int) -> config.RunConfig:
    steps, layers = study.config.train.steps, arm.ladder_layers(study.order, num_layers=study.config.model.num_layers)
    changed = [f"model.residual={arm.residual}", f"train.seed={seed}"]
    changed += [f"model.ladder_layers={layers}"] if layers else []
    changed += [f"model.ranks={arm.ranks}"] if arm.ranks else []
    if arm.way is Way.TEACHER:
        changed += ["distill.teacher=start", "distill.residual=standard"]
    if arm.way is Way.GRADUAL:
        changed += [f"conversion.steps={steps * 2 // 3}", f"conversion.groups={study.size.gradual_groups}"]
    changed.append(f"run.dir={place(arm, study, seed=seed) / 'run'}")
    return config.load(study.recipe, overrides=[*study.overrides, *changed])


def _history(settings: config.RunConfig) -> dict:
    """The held-out loss by the step, and what the run took."""
    run = folder.path_of(settings)
    rows = metrics.read(run)
    spent = json.loads((run / folder.GOODPUT).read_text())["seconds"]
    return {
        "steps": settings.train.steps,
        "seconds": sum(seconds for part, seconds in spent.items() if part != "lost"),  # killed, or not running at all
        "held_out": [[row["step"], row["validation_loss"]] for row in rows if "validation_loss" in row],
        "training": [[row["step"], row["loss"]] for row in rows],
    }


def _say(line: str) -> None:
    if line.startswith(("step ", "resuming ", "goodput ")):
        print(f"    {line}", flush=True)
