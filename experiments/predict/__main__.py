"""Is the speed model right? Nine constants fitted to the paper's tables, and what they say of everything else.

    python -m experiments.predict --fit --install    # fits, leaves out each figure in turn: 7 minutes; installs
    python -m experiments.predict                    # with the package's constants: tables, README, JSON, figures

No accelerator is needed, and none is used: what is measured here was measured by the paper's authors.
"""

import argparse
import dataclasses
import json

from experiments.predict import install, markdown, picture, published, tables
from experiments.predict.published import HERE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--install", action="store_true")
    args = parser.parse_args()
    file = HERE / "results.json"
    if args.fit:
        fitted = fit_all()
        file.write_text(json.dumps({"fit": fitted}) + "\n")
    fitted = json.loads(file.read_text())["fit"]
    if args.install:
        install.install(fitted["constants"])
        raise SystemExit("installed: run again without options, so that the tables are the new constants'")
    results = {"fit": fitted, **tables.predictions(published.shipped())}
    file.write_text(json.dumps(results, indent=1) + "\n")
    readme = HERE / "README.md"
    readme.write_text(markdown.fill(readme.read_text(), results))
    print("\n\n".join(f"{name}\n\n{table}" for name, table in markdown.sections(results).items()))
    picture.plot(results, file=str(HERE / "published.png"))
    picture.plot_elsewhere(results, file=str(HERE / "elsewhere.png"))


def fit_all() -> dict:
    """The constants; and predictions of each figure, and of each row of the tables, by constants fitted without it."""
    from experiments.predict import fit

    constants = fit.fit()
    network = fit.fit_network(constants)
    measured = published.tables()
    rows: dict[tuple, list] = {}
    for setting in measured:
        rows.setdefault((setting.link, setting.tensor, setting.batch), []).append(setting)
    left_out = {"figure": {}, "row": {}}
    for kind, groups in (("figure", [[setting] for setting in measured]), ("row", list(rows.values()))):
        for group in groups:
            print(f"leaving out {len(left_out[kind])}/{len(measured)} by {kind}", flush=True)
            machines, implementation = fit.apply(fit.fit(without=group, start=constants))
            for setting in group:
                left_out[kind][setting] = published.speed(setting, machines, implementation).tokens_per_second
    listed = {
        kind: [{**dataclasses.asdict(setting), "tokens_per_second": value} for setting, value in found.items()]
        for kind, found in left_out.items()
    }
    return {"constants": {**constants, "network step": network}, "left_out": listed}


if __name__ == "__main__":
    main()
