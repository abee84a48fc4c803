"""Train a Ladder and a Standard Transformer side by side on eight simulated devices, and let the Ladder write.

    python -m experiments.demo [path.to.field=value ...]      # data.path=book.txt, train.steps=400, ...

A second call goes on where a killed one stopped; a finished one shows its results again. Both runs and
the picture go to runs/demo; another text or shape needs that folder out of the way.
"""

import os
import pathlib
import sys
import time

from rich.console import Console

HERE = pathlib.Path(__file__).parent
RUNS = pathlib.Path("runs/demo")
PROMPT = "def "


def main(overrides: list[str]) -> int:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
    from experiments.demo import curves
    from ladder_jax import cli, config, train
    from ladder_jax.errors import RunFailed, UserError

    cli.prepare_devices(None)
    console, began = Console(), time.perf_counter()
    folders, results = {}, {}
    try:
        for residual in ("ladder", "standard"):
            console.rule(f"{residual}: training on data 2 x tensor 4 simulated devices")
            folders[residual] = RUNS / residual
            settings = config.load(
                str(HERE / "tiny.yaml"),
                overrides=[*overrides, f"model.residual={residual}", f"run.dir={folders[residual]}"],
            )
            results[residual] = train.run(settings, say=console.print)
    except UserError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2
    except RunFailed as error:
        print(f"demo: {error}", file=sys.stderr)
        return error.status

    entropy = results["ladder"].bigram_entropy
    console.print(curves.table(folders, baseline=entropy))
    curves.plot(folders, RUNS / "loss.png", baseline=entropy)
    for residual, result in results.items():
        verdict = "below" if result.validation_loss < entropy else "NOT below"
        console.print(
            f"{residual:<9} held-out loss {result.validation_loss:.3f} nats a byte,"
            f" {verdict} the text's bigram entropy of {entropy:.3f}"
        )
    console.print(f"curves: {RUNS / 'loss.png'}   checkpoints: {RUNS}/*/checkpoints")
    console.rule("a sample from the Ladder")
    arguments = ["--prompt", PROMPT, "--max-new-tokens", "240", "--temperature", "0.7", "--seed", "1"]
    status = cli.main(["generate", str(folders["ladder"]), *arguments])
    console.rule(f"{time.perf_counter() - began:.0f} seconds")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
