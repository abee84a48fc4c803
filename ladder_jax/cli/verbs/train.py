import argparse
import sys
from collections.abc import Callable

from ladder_jax.processes.settings import SETTINGS

SUMMARY = "Train a model, or resume the run from its last checkpoint."
EXAMPLE = "ladder-jax train tiny --cpu-devices 8 mesh.data=2 mesh.tensor=4 data.path=book.txt run.dir=runs/book"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", help="a YAML or JSON file, or a preset's name")
    parser.add_argument("overrides", nargs="*", metavar="path.to.field=value", help="settings that replace the file's")

    parser.add_argument("--profile", metavar="STEPS", help="trace these steps into run.dir/profile: 10:13, or 10")
    several = parser.add_argument_group(
        "several processes",
        "SLURM, Open MPI, Kubernetes and Cloud TPU are recognised; each option is also a variable (LADDER_JAX_PROCESS)",
    )
    for setting in SETTINGS:
        several.add_argument(setting.option, metavar=setting.metavar, help=setting.help)


def run(args: argparse.Namespace) -> None:
    import os

    from ladder_jax import config, processes, python

    with processes.attached() as worker:
        settings = config.load(args.config, overrides=args.overrides)
        if worker is not None:
            worker.initialize()
            first, patience = worker.place.process == 0, worker.patience.hang
            return _train(settings, args, beat=worker.beat, shown=first, patience=patience)
        patience = processes.patience.of(vars(args), os.environ)
        place = processes.find(vars(args), os.environ, timeout=patience.start)
        if place is None:
            return _train(settings, args, beat=lambda doing: None, shown=True)
        command = python.command("ladder_jax", *args.argv)
        processes.supervise(place, command=command, job=_job(settings, args), patience=patience, say=_say)


def _train(settings, args: argparse.Namespace, *, beat: Callable[[str], None], shown: bool, **more: float) -> None:
    from ladder_jax.train import parse_profile
    from ladder_jax.train import run as train

    steps = parse_profile(args.profile) if args.profile else None
    result = train(settings, say=_say, profile=steps, beat=beat, **more)
    entropy = result.bigram_entropy
    unit = "token" if entropy is None else f"byte (the text's bigram entropy: {entropy:.4f})"
    if shown:
        print(
            f"trained {result.parameters:,} parameters for {result.steps} steps:"
            f" held-out loss {result.validation_loss:.4f} nats a {unit}"
        )


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _job(settings, args: argparse.Namespace) -> str:
    """What must be the same on all processes."""
    import hashlib
    import json

    from ladder_jax import __version__
    from ladder_jax.config import to_dict

    job = json.dumps([__version__, to_dict(settings), args.profile, args.cpu_devices], sort_keys=True)
    return hashlib.sha256(job.encode()).hexdigest()
