import argparse
import sys

SUMMARY = "Train a model, or go on where the run's last checkpoint stands."
EXAMPLE = "ladder-jax train tiny --cpu-devices 8 mesh.data=2 mesh.tensor=4 data.path=book.txt run.dir=runs/book"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", help="a YAML or JSON file, or a preset's name")
    parser.add_argument("overrides", nargs="*", metavar="path.to.field=value", help="settings that replace the file's")

    parser.add_argument("--profile", metavar="STEPS", help="trace these steps into run.dir/profile: 10:13, or 10")


def run(args: argparse.Namespace) -> None:
    from ladder_jax import config, train

    settings = config.load(args.config, overrides=args.overrides)
    steps = train.profile.parse(args.profile) if args.profile else None
    result = train.run(settings, say=lambda line: print(line, file=sys.stderr, flush=True), profile=steps)
    entropy = result.bigram_entropy
    unit = "token" if entropy is None else f"byte (the text's bigram entropy: {entropy:.4f})"
    print(
        f"trained {result.parameters:,} parameters for {result.steps} steps:"
        f" held-out loss {result.validation_loss:.4f} nats a {unit}"
    )
