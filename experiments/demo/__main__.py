"""Train a Ladder and a Standard Transformer side by side on simulated devices, and let the Ladder
write.

    python -m experiments.demo [path.to.field=value ...]      # data.path=book.txt, train.steps=400, ...
    python -m experiments.demo --experts                      # mixtures of experts: FarSkip, Ladder and Standard

A second call goes on where a killed one stopped; a finished one shows its results again. Runs and
picture go to runs/demo (runs/moe-demo); another text or shape needs that folder out of the way.
"""

import os
import pathlib
import sys
import time

from rich.console import Console

from experiments import study

HERE = pathlib.Path(__file__).parent
DENSE = "tiny.yaml", pathlib.Path("runs/demo"), ("ladder", "standard")
EXPERTS = "experts.yaml", pathlib.Path("runs/moe-demo"), ("farskip", "ladder", "standard")


def main(arguments: list[str]) -> int:
    parser = study.parser(__doc__, name="demo")
    study.add_overrides(parser, of="its file's")
    parser.add_argument("--experts", action="store_true", help="mixtures of experts")
    args = parser.parse_intermixed_args(arguments)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
    from ladder_jax import cli, config, train
    from ladder_jax.train import metrics

    cli.prepare_devices(None)
    recipe, runs, residuals = EXPERTS if args.experts else DENSE
    console = Console()
    began = time.perf_counter()
    results = {}

    def train_all() -> None:
        for residual in residuals:
            own = [f"model.residual={residual}", f"run.dir={runs / residual}"]
            settings = config.load(str(HERE / recipe), overrides=[*args.overrides, *own])
            mesh = settings.mesh
            console.rule(
                f"{residual}: training on data {mesh.data} x tensor {mesh.tensor} simulated devices"
            )
            results[residual] = train.run(settings, say=console.print)

    if status := study.ended(train_all, name="demo"):
        return status
    rows = {residual: metrics.read(runs / residual) for residual in residuals}
    entropy = results[residuals[0]].bigram_entropy
    for residual, result in results.items():
        console.print(f"{residual:<9} {said(result.validation_loss, entropy)}")
        last = rows[residual][-1]
        if "expert_load" in last:
            console.print(
                f"{'':9} largest load {last['expert_load']:.1f} x mean, {last['dead_experts']:.0f} unused"
            )
    plot(rows, file=runs / "loss.png", entropy=entropy)
    console.print(f"curves: {runs / 'loss.png'}   checkpoints: {runs}/*/checkpoints")
    writer = residuals[0]  # the first one writes
    console.rule(f"a sample from the {writer} model")
    words = ["--prompt", "def ", "--max-new-tokens", "240", "--temperature", "0.7", "--seed", "1"]
    status = cli.main(["generate", str(runs / writer), *words])
    console.rule(f"{time.perf_counter() - began:.0f} seconds")
    return status


def said(loss: float, entropy: float | None) -> str:
    """entropy: of the text's bigrams; None where it is not of bytes."""
    if entropy is None:
        return f"held-out loss {loss:.3f} nats a token"
    return f"held-out loss {loss:.3f} nats a byte; the text's bigrams: {entropy:.3f}"


def plot(runs: dict[str, list[dict]], *, file: pathlib.Path, entropy: float | None) -> None:
    """Each run's training loss over its steps. entropy: as of `said`."""
    from ladder_jax import files

    plt = files.pyplot()
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for name, rows in runs.items():
        steps, losses = zip(
            *((row["step"], row["loss"]) for row in rows if row["loss"] is not None)
        )
        axes.plot(steps, losses, label=name)
    if entropy is not None:
        axes.axhline(entropy, color="grey", linestyle="--", linewidth=1, label="bigram entropy")
    unit = "token" if entropy is None else "byte"
    axes.set(xlabel="step", ylabel=f"training loss (nats a {unit})")
    axes.legend()
    axes.grid(alpha=0.3)
    files.write_picture(str(file), figure)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
