"""The published tables, and how near the package comes to them."""

import dataclasses
import pathlib

import jax
import pytest

from experiments import study
from experiments.predict import __main__ as command, published
from experiments.predict.authors import CACHE_SPEED
from ladder_jax.predict import machine

EXPERIMENT = pathlib.Path(published.__file__).parent


@pytest.fixture(scope="module")
def kept():
    return study.load(EXPERIMENT / "results.json")


@pytest.fixture(scope="module")
def made():
    return command.predictions()


def test_the_tables_are_what_the_package_predicts(kept, made):
    assert set(kept) == {"fit", *made}
    for name, rows in made.items():
        assert all(jax.tree.leaves(jax.tree.map(close, kept[name], rows))), name


def close(kept, made):
    return made == (pytest.approx(kept, rel=1e-9) if isinstance(made, float) else kept)


def test_the_readme_holds_them(kept):
    text = (EXPERIMENT / "README.md").read_text()
    tables = command.tables(kept)
    assert study.fill(text, tables) == text
    assert text.count("\n| ") > 60
    with pytest.raises(ValueError, match="0 places for the table 'constants'"):
        study.fill("", tables)


def test_the_package_has_the_fitted_constants(kept):
    constants = kept["fit"]["constants"]
    machines = published.shipped()
    nvlink = machines["nvlink"]
    off = machines["off"]
    nodes = machines["two nodes"]
    shipped = {
        **{
            name: getattr(nvlink, name)
            for name in ("flops_share", "bandwidth_share", "launch", "contention")
        },
        "cache_speed": CACHE_SPEED,
        "latency": nvlink.link.latency,
        "nvlink bandwidth": nvlink.link.bandwidth,
        "off step": off.link.step,
        "off bandwidth": off.link.bandwidth,
        "network step": nodes.link.network.step,
    }
    assert shipped == {name: float(f"{value:.3g}") for name, value in constants.items()}
    assert len(constants) - 1 == 9  # the network's is not among those of the 56 figures
    assert off.link.latency == nvlink.link.latency
    assert machine.load("b200-nvlink").link.bandwidth == 2 * nvlink.link.bandwidth


def test_how_near_they_come(made):
    found = made["published_summary"]
    assert found["figures"] == 56
    assert found["median_error"] < 0.025
    assert found["worst_error"] < 0.15
    assert found["median_ratio_error"] < 0.05
    assert found["pairs_out_of_order"] == 0
    for one in made["elsewhere_summary"].values():  # what was not fitted to
        assert one["median_error"] < 0.06
        assert one["worst_error"] < 0.15


def test_errors_are_computed_rightly():
    setting = lambda name: published.Setting("m", "off", 2, 1, name)
    measured = {setting("standard"): 10.0, setting("ladder"): 12.0, setting("parallel"): 11.0}
    predicted = {setting("standard"): 11.0, setting("ladder"): 11.0, setting("parallel"): 12.0}
    found = published.errors(measured, predicted.__getitem__)
    ratios = {"ladder": 1.0 - 1.2, "parallel": 12 / 11 - 1.1}
    assert found == {
        "figures": 3,
        "median_error": pytest.approx(12 / 11 - 1),
        "worst_error": pytest.approx(0.1),
        "worst_at": dataclasses.asdict(setting("standard")),
        "median_ratio_error": pytest.approx(-sum(ratios.values()) / 2),
        "worst_ratio_error": pytest.approx(0.2),
        "pairs_out_of_order": 2,  # of ladder
    }
