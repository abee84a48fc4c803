"""The figure: what conversions cost, plain and refitted; and what each sublayer's input lacks."""

from experiments.refit.tables import loss, original, plain, title, usual
from ladder_jax import files, pyplot

PLAIN, REFITTED = "#bab0ac", "#4c78a8"


def plot(rows: list[dict], *, file: str) -> None:
    """Left: the usual rows. Right: of the conversion of all layers, or of the first that was measured."""
    plt = pyplot.load()
    first, shown = original(rows), [row for row in rows if usual(row) and plain(rows, row) is not None]
    figure, (costs, inputs) = plt.subplots(1, 2, figsize=(12, 4), layout="constrained")
    for place, row in enumerate(shown):
        bars = (("plain", PLAIN, plain(rows, row)), ("refitted", REFITTED, row))
        for shift, (name, colour, one) in zip((-0.2, 0.2), bars):
            cost = loss(one) - loss(first)
            bar = costs.barh(place + shift, cost, height=0.38, color=colour, label=name if place == 0 else None)
            costs.bar_label(bar, fmt="%.2f", fontsize=8, padding=2)
    costs.set_yticks(range(len(shown)), [title(row) for row in shown])
    costs.invert_yaxis()
    costs.set(xlabel="nats a token over the original, on text that was not calibrated on")
    costs.margins(x=0.1)
    costs.legend(frameon=False)
    longest = max(shown, key=lambda row: len(row["fits"]))
    fits = longest["fits"]
    places = [fit["layer"] + (0.5 if fit["sublayer"] == "mlp" else 0) for fit in fits]
    for name, colour in (("before", PLAIN), ("after", REFITTED)):
        inputs.plot(places, [fit[name] for fit in fits], "o-", ms=3, color=colour, label=f"{name} the fit")
    inputs.set(xlabel=f"layer ({title(longest)})", ylabel="missing share of a sublayer's input", yscale="log")
    inputs.legend(frameon=False)
    files.write_atomically(file, lambda path: figure.savefig(path, dpi=150))
    plt.close(figure)
