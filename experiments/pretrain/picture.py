"""The study's figures: held-out loss over tokens and over predicted time, and the gradients' norms by layer."""

from experiments.pretrain import figures, plan
from experiments.pretrain.tables import shared_steps
from ladder_jax import files
from ladder_jax.predict.picture import COLOURS

INK = {**COLOURS, "standard": "#4d4d4d", "ladder-2": "#b279a2", "ladder-fresh": "#e45756"}  # bands must be told apart


def curves(results: dict, *, file: str) -> None:
    """Lines: means over the seeds; bands: from the least seed to the greatest."""
    pyplot = load_pyplot()
    figure, (tokens, time, gap) = pyplot.subplots(1, 3, figsize=(14, 4.2), layout="constrained")
    standard = {run["seed"]: run for run in figures.runs(results, group="main", residual="standard")}
    for residual in plan.TOPOLOGIES:
        own = figures.runs(results, group="main", residual=residual)
        if not own:
            continue
        steps = [step for step, _ in own[0]["held_out"]]
        losses = [[loss for _, loss in run["held_out"]] for run in own]
        faster = figures.speedup(results, residual, shape=plan.SHAPE, machine=plan.MACHINE)
        thousands = [step * results["tokens_a_step"] / 1e3 for step in steps]
        _band(tokens, thousands, losses, residual)
        _band(time, [step / faster / results["of_standard"] for step in steps], losses, residual)
        paired = [run for run in own if run["seed"] in standard]
        shared = [step for step in steps if step <= results["of_standard"]]
        less = lambda run, step: figures.loss_at(run, step) - figures.loss_at(standard[run["seed"]], step)
        if paired:
            _band(gap, thousands[: len(shared)], [[less(run, step) for step in shared] for run in paired], residual)
    losses = [loss for run in figures.runs(results, group="main") for _, loss in run["held_out"]]
    for axis in (tokens, time):  # the first measurements are far above what is to be told apart
        axis.set_ylim(min(losses) - 0.03, min(losses) + 0.55)
    tokens.set(xlabel="thousand bytes trained on", ylabel="held-out loss, nats a byte")
    time.set(xlabel="predicted time, Standard's run = 1")
    time.axvline(1, color="#999999", lw=0.8, ls=":")
    gap.set(xlabel="thousand bytes trained on", ylabel="less Standard of the same seed")
    gap.axhline(0, color="#999999", lw=0.8)
    for axis, title in (
        (tokens, "equal tokens"),
        (time, f"equal predicted time: {plan.SHAPE}, TP {plan.RANKS}, {plan.MACHINE}"),
        (gap, "equal tokens, difference"),
    ):
        axis.set_title(title, fontsize=10, loc="left")
    tokens.legend(fontsize=8.5, frameon=False)
    seeds = len({run["seed"] for run in figures.runs(results, group="main")})
    finish(figure, f"{results['text']}: {results['model']['num_layers']} layers, d {results['model']['d_model']};"
            f" mean and range of {seeds} seed{'s'[: seeds != 1]}", file)  # fmt: skip


def gradients(results: dict, *, file: str) -> None:
    """A panel a step: the norm of each layer's gradient, by topology."""
    steps = shared_steps(results)
    if not steps:
        return
    pyplot = load_pyplot()
    figure, axes = pyplot.subplots(1, len(steps), figsize=(3.8 * len(steps), 3.4), layout="constrained", squeeze=False)
    for axis, step in zip(axes[0], steps):
        for residual in plan.WATCHED:
            own = figures.runs(results, group="main", residual=residual)
            norms = [run["gradients"][step]["layers"] for run in own if "gradients" in run]
            if norms:
                _band(axis, list(range(len(norms[0]))), norms, residual)
        axis.set(xlabel="layer")
        axis.set_ylim(bottom=0)
        axis.set_title(f"step {step}", fontsize=10, loc="left")
    axes[0][0].set_ylabel("norm of the layer's gradient")
    axes[0][0].legend(fontsize=8.5, frameon=False)
    finish(figure, "", file)


def _band(axis, places: list[float], values: list[list[float]], residual: str) -> None:
    by_place = list(zip(*values))
    mean = [sum(column) / len(column) for column in by_place]
    colour = INK[residual]
    axis.plot(places, mean, color=colour, lw=1.6, label=residual)
    axis.fill_between(places, list(map(min, by_place)), list(map(max, by_place)), color=colour, alpha=0.18, lw=0)


def load_pyplot():
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    return pyplot


def finish(figure, title: str, file: str) -> None:
    for axis in figure.axes:
        axis.grid(lw=0.4, color="#e6e6e6")
        axis.spines[["top", "right"]].set_visible(False)
    if title:
        figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    files.write_atomically(file, lambda path: figure.savefig(path, dpi=130))
    load_pyplot().close(figure)
