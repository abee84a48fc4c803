"""Makes a run of the study if it is not there yet, and reads what it left."""



from experiments.pretrain import gradients, plan
from experiments.pretrain.plan import Run
from ladder_jax import config, train
from ladder_jax.train import folder, metrics


def train_once(run: Run) -> None:
    """Nothing is computed where the run's folder holds its result. Raises UserError where it is of other settings."""
    place = folder.path_of(run.config)
    resolved = train.loop.resolve(run.config)
    folder.check(resolved, place)
    if not (place / "result.json").is_file():
        train.run(run.config, say=_say)
    if run.watched and not (place / gradients.NAME).is_file():
        gradients.measure(place)


def _say(line: str) -> None:
    if line.startswith(("step ", "resuming ", "goodput ")):
        print(f"    {line}", flush=True)
def report(*a, **k): pass
