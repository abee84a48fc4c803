"""`tiny` trained in float32 and in bfloat16 from one seed: the curves side by side, and how far apart they end.

    python -m experiments.bf16                              # some minutes a run
    python -m experiments.bf16 --before CHECKOUT            # adds bfloat16 as an earlier commit's checkout trains it

Each is `ladder-jax train tiny.yaml` in a process of its own; a second call goes on where a killed one stopped. The
runs go to runs/bf16; results.json keeps what was measured, curves.png draws it.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys

from experiments import measure
from ladder_jax.train import metrics

HERE, RUNS = pathlib.Path(__file__).parent, pathlib.Path("runs/bf16").resolve()
RESULTS = HERE / "results.json"
ROOT = HERE.parent.parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=pathlib.Path, metavar="CHECKOUT", help="of the commit to compare with")
    args = parser.parse_args()
    if args.before:
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=args.before, capture_output=True, text=True, check=True
        ).stdout.strip()
        trained = {f"bfloat16, at commit {commit}": train("bfloat16", root=args.before, folder=RUNS / commit)}
    else:
        trained = {dtype: train(dtype, root=ROOT, folder=RUNS / dtype) for dtype in ("float32", "bfloat16")}
    kept = json.loads(RESULTS.read_text())["runs"] if RESULTS.exists() else {}
    runs = {**kept, **trained}
    ends = {name: run["held_out_loss"] for name, run in runs.items()}
    gaps = {name: end - ends["float32"] for name, end in ends.items()} if "float32" in ends else {}
    measure.report({"held_out_difference_to_float32": gaps, "runs": runs}, file=RESULTS)
    plot(runs)


def train(dtype: str, *, root: pathlib.Path, folder: pathlib.Path) -> dict:
    """Its training losses by step, and the held-out loss at the end, both in nats a byte."""
    overrides = [f"model.dtype={dtype}", f"model.residual_dtype={dtype}", f"run.dir={folder}"]
    subprocess.run(
        [sys.executable, "-m", "ladder_jax", "train", str(HERE / "tiny.yaml"), *overrides],
        cwd=root,  # whose package it is: the folder that python -m looks into first
        env={**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1", "PYTHONPATH": str(root)},
        check=True,
    )
    rows = metrics.read(folder)
    losses = {row["step"]: row["loss"] for row in rows if row.get("loss") is not None}
    held_out = [row["validation_loss"] for row in rows if row.get("validation_loss") is not None]
    return {"held_out_loss": held_out[-1], "losses": losses}


def plot(runs: dict) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, (curves, gaps) = pyplot.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    series = {name: {int(step): loss for step, loss in run["losses"].items()} for name, run in runs.items()}
    for name, losses in series.items():
        curves.plot(list(losses), list(losses.values()), label=name)
        if name != "float32" and "float32" in series:
            gaps.plot(list(losses), [losses[step] - series["float32"][step] for step in losses], label=name)
    curves.set(xlabel="step", ylabel="training loss (nats a byte)")
    gaps.set(xlabel="step", ylabel="training loss less float32's")
    for axes in (curves, gaps):
        axes.legend()
        axes.grid(alpha=0.3)
    figure.savefig(HERE / "curves.png", dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
