"""Makes a row, and what it starts from, if that was not done yet; and gathers what all of them left."""

import dataclasses
import json
import pathlib
import shutil

import numpy as np

from experiments import measure
from experiments.distil import plan
from experiments.distil.plan import Layers, Recipe, Row, Start
from experiments.distil.texts import Corpus
from ladder_jax import config, evaluate, files, nn, parallel, pretrained, train
from ladder_jax.config import RunConfig
from ladder_jax.data import batches, dataset
from ladder_jax.pretrained import staging
from ladder_jax.pretrained.convert import calibrated, command
from ladder_jax.pretrained.convert.calibrated import Texts
from ladder_jax.pretrained.convert.request import parse
from ladder_jax.train import checkpoints, folder, metrics

NAME = "measured.json"
OPTIONS = "ladder_layers residual ranks dtype calibration calibration_tokens refit ridge search tensor".split()


@dataclasses.dataclass(frozen=True)
class Study:
    """base: the configuration of pretraining; recipe, overrides: what it is loaded from. runs: folder of all runs."""

    recipe: str
    overrides: tuple[str, ...]
    base: RunConfig
    corpus: Corpus
    runs: pathlib.Path

    def row_once(self, row: Row) -> dict:
        """What was measured of the row. Nothing is computed where its folder holds that."""
        place = self._of(row.seed) / row.name
        if (place / NAME).is_file():
            return json.loads((place / NAME).read_text())
        self._pretrained(row.seed)
        found = dict(row.asked)
        if row.recipe is Recipe.NONE:
            found["loss"] = self._loss(row)
        else:
            settings = self._retraining(row, place / "run")
            found["loss"] = train.run(settings, say=_say).validation_loss
            found |= {"steps": settings.train.steps, "seconds": _seconds(settings)}
        found["ladder_layers"] = self._ladder_layers(row)
        place.mkdir(parents=True, exist_ok=True)
        _write(place / NAME, found)
        shutil.rmtree(place / "run" / checkpoints.FOLDER, ignore_errors=True)  # of hundreds of rows
        return found

    def report(self, rows: list[dict], *, file: pathlib.Path) -> None:
        """`file` as JSON: the settings, how pretraining went, and the rows."""
        environment = measure.environment()
        del environment["command"]
        seeds = sorted({row["seed"] for row in rows})
        train = self.base.train
        content = {
            **environment,
            **json.loads((self.corpus.pretrain.parent / "texts.json").read_text())["asked"],
            "parameters": _result(self._of(0) / "pretrained")["parameters"],
            "tokens": train.steps * train.batch * train.sequence,
            "tokens_a_step": train.batch * train.sequence,
            "held_out_tokens": train.evaluation_batches * train.batch * train.sequence,
            "calibration_tokens": plan.CALIBRATION,
            "model": config.to_dict(self.base.model),
            "train": config.to_dict(train),
            "pretrained": [{"seed": seed, **_history(self._of(seed) / "pretrained")} for seed in seeds],
            "rows": rows,
        }
        _write(file, content)

    def _of(self, seed: int) -> pathlib.Path:
        return self.runs / f"seed-{seed}"

    def _load(self, *changed: str) -> RunConfig:
        return config.load(self.recipe, overrides=[*self.overrides, *changed])

    def _pretrained(self, seed: int) -> None:
        place = self._of(seed) / "pretrained"
        data = self.corpus.settings(self.corpus.pretrain)
        settings = self._load(*data, f"train.seed={seed}", f"run.dir={place}")
        folder.check(train.resolve(settings), place)
        if not (place / folder.RESULT).is_file():
            print(f"  pretraining, seed {seed}", flush=True)
            train.run(settings, say=_say)

    def _retraining(self, row: Row, place: pathlib.Path) -> RunConfig:
        steps, original = max(1, round(self.base.train.steps * row.share / 100)), self._of(row.seed) / "pretrained"
        changed = [f"train.start={self._start(row)}", f"train.steps={steps}", f"train.warmup_steps={steps // 10}"]
        changed += [f"train.learning_rate={self.base.train.learning_rate * row.rate}", "train.weight_decay=0"]
        changed += [f"train.seed={row.seed}", "train.evaluate_every=0", f"train.log_every={max(1, steps // 10)}"]
        changed += self.corpus.settings(self.corpus.retrain)
        if row.layers is not Layers.NONE:
            changed += ["model.residual=ladder", f"model.ladder_layers={self._ladder_layers(row)}"]
        if row.recipe is not Recipe.TEXT:
            share = 1.0 if row.recipe is Recipe.TEACHER else 0.5
            changed += [f"distill.teacher={original}", f"distill.alpha={share}"]
        return self._load(*changed, f"run.dir={place}")

    def _start(self, row: Row) -> pathlib.Path:
        """The checkpoint that retraining starts from: the original's, or a refitted one, made if it is not there."""
        original = self._of(row.seed) / "pretrained"
        if row.start is Start.PLAIN:
            return original
        place = self._of(row.seed) / f"{row.layers.name.lower()}-refitted-start"
        if not place.is_dir():
            source = pretrained.open(original)
            request = self._request(place, layers=self._ladder_layers(row))
            texts = Texts(None, self._calibration(plan.CALIBRATION, skip=plan.MEASURED))
            mesh = parallel.make_mesh()
            with staging.resumable(place) as kept, staging.staged(place) as new:
                fitted = calibrated.fit(source, request, texts, settings=request.refit, mesh=mesh, folder=kept)
                definition = nn.define(request.model, mesh=mesh)
                command.write(fitted.source, new, definition=definition, request=request)
        return place

    def _ladder_layers(self, row: Row) -> str | None:
        """As the model's configuration names them. The least sensitive are chosen once a seed, refitted."""
        layers = self.base.model.num_layers
        if row.layers is not Layers.CHOSEN:
            return {Layers.NONE: None, Layers.LAST: str(layers // 2), Layers.ALL: str(layers)}[row.layers]
        file = self._of(row.seed) / "chosen.json"
        if not file.is_file():
            request = self._request(self._of(row.seed) / "chosen", layers=f"auto:{layers // 2}")
            texts = Texts(self._calibration(plan.MEASURED), self._calibration(plan.CALIBRATION, skip=plan.MEASURED))
            source = pretrained.open(self._of(row.seed) / "pretrained")
            result = calibrated.choose(source, request, texts, folder=None)
            _write(file, {"ladder_layers": result.ladder_layers, **result.as_dict()})
        return json.loads(file.read_text())["ladder_layers"]

    def _request(self, place: pathlib.Path, *, layers: str):
        """As `ladder-jax convert PRETRAINED PLACE --ladder-layers LAYERS --calibration RETRAIN --refit inputs`."""
        asked = {
            **dict.fromkeys(OPTIONS),
            "refit": "inputs",
            "ladder_layers": layers,
            "calibration": [str(self.corpus.retrain)],
        }
        asked |= {"source": "pretrained", "destination": str(place), "to": "checkpoint"}
        return parse(asked, self.base.model)

    def _calibration(self, tokens: int, *, skip: int = 0) -> np.ndarray:
        """Rows [n, T + 1] from the beginning of the text to retrain on, as long as those of pretraining."""
        content = np.frombuffer(self.corpus.retrain.read_bytes()[: skip + tokens + 1], np.uint8)[skip:]
        rows = batches.windows(content, self.base.train.sequence, "calibration")
        return np.stack([rows[index] for index in range(len(rows))])

    def _loss(self, row: Row) -> float:
        """Of a model that is not retrained, on the rows that training scores at its end."""
        how = {} if row.layers is Layers.NONE or row.start is Start.REFITTED else {"residual": "ladder"}
        layers = self._ladder_layers(row) if how else None
        model = evaluate.open_model(self._start(row), ladder_layers=layers, window=self.base.train.sequence, **how)
        settings = self._load(*self.corpus.settings(self.corpus.retrain))
        data = dataset.load(settings.data, train=settings.train, vocab_size=settings.model.vocab_size)
        held_out = batches.evaluated(data.held_out, data.held_out_rows, config=settings.train)
        return evaluate.perplexity(model, np.concatenate(held_out)).loss


def _seconds(settings: RunConfig) -> float:
    spent = json.loads((folder.path_of(settings) / folder.GOODPUT).read_text())["seconds"]
    return round(sum(seconds for part, seconds in spent.items() if part != "lost"), 1)


def _history(run: pathlib.Path) -> dict:
    held_out = [[row["step"], row["validation_loss"]] for row in metrics.read(run) if "validation_loss" in row]
    return {"held_out": held_out, "bigram_entropy": _result(run)["bigram_entropy"]}


def _result(run: pathlib.Path) -> dict:
    return json.loads((run / folder.RESULT).read_text())


def _write(file: pathlib.Path, content: dict) -> None:
    text = json.dumps(content, indent=1) + "\n"
    files.write_atomically(str(file), lambda path: pathlib.Path(path).write_text(text))


def _say(line: str) -> None:
    if line.startswith(("step ", "resuming ", "goodput ")):
        print(f"    {line}", flush=True)
