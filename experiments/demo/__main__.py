"""Train a Ladder and a Standard Transformer side by side on simulated devices, and let the Ladder write.

    python -m experiments.demo [path.to.field=value ...]      # data.path=book.txt, train.steps=400, ...
    python -m experiments.demo --experts                      # mixtures of experts: FarSkip, Ladder and Standard

A second call goes on where a killed one stopped; a finished one shows its results again. Runs and picture go to
runs/demo (runs/moe-demo); another text or shape needs that folder out of the way.
"""

import dataclasses
import os
import pathlib
import sys
import time

from rich.console import Console

from experiments import study

HERE = pathlib.Path(__file__).parent
PROMPT = "def "


@dataclasses.dataclass(frozen=True)
class Demo:
    """residuals: the topologies to train; the first one writes."""

    recipe: str
    runs: pathlib.Path
    residuals: tuple[str, ...]


DENSE = Demo("tiny.yaml", pathlib.Path("runs/demo"), ("ladder", "standard"))
EXPERTS = Demo("experts.yaml", pathlib.Path("runs/moe-demo"), ("farskip", "ladder", "standard"))


def main(arguments: list[str]) -> int:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
    from experiments.demo import curves
    from ladder_jax import cli, config, train

    cli.prepare_devices(None)
    demo = EXPERTS if "--experts" in arguments else DENSE
    overrides = [argument for argument in arguments if argument != "--experts"]
    console, began = Console(), time.perf_counter()
    folders, results = {}, {}

    def train_all() -> None:
        for residual in demo.residuals:
            folders[residual] = demo.runs / residual
            settings = config.load(
                str(HERE / demo.recipe),
                overrides=[*overrides, f"model.residual={residual}", f"run.dir={folders[residual]}"],
            )
            mesh = settings.mesh
            console.rule(f"{residual}: training on data {mesh.data} x tensor {mesh.tensor} simulated devices")
            results[residual] = train.run(settings, say=console.print)

    if status := study.ended(train_all, name="demo"):
        return status
    writer = demo.residuals[0]
    entropy = results[writer].bigram_entropy
    console.print(curves.table(folders, baseline=entropy))
    if demo is EXPERTS:
        console.print(curves.experts(folders))
    curves.plot(folders, demo.runs / "loss.png", baseline=entropy)
    for residual, result in results.items():
        verdict = "below" if result.validation_loss < entropy else "NOT below"
        console.print(
            f"{residual:<9} held-out loss {result.validation_loss:.3f} nats a byte,"
            f" {verdict} the text's bigram entropy of {entropy:.3f}"
        )
    console.print(f"curves: {demo.runs / 'loss.png'}   checkpoints: {demo.runs}/*/checkpoints")
    console.rule(f"a sample from the {writer} model")
    arguments = ["--prompt", PROMPT, "--max-new-tokens", "240", "--temperature", "0.7", "--seed", "1"]
    status = cli.main(["generate", str(folders[writer]), *arguments])
    console.rule(f"{time.perf_counter() - began:.0f} seconds")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
