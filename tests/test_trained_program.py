"""What `ladder-jax overlap --phase train` and `plan` compile is what `ladder-jax train` runs: equal
StableHLO.
"""

import json
import pickle

import jax
import pytest

from ladder_jax import cli, config
from ladder_jax.config import Loop, Phase, Remat
from ladder_jax.overlap import programs, request as requests
from ladder_jax.plan import confirm as planner
from ladder_jax.train.gradients import _after_backward
from tests import cases
from tests.compilations import would_compile

ROWS = 4
LENGTH = 32
ALWAYS = ["model.residual=ladder", "model.num_layers=2", f"train.sequence={LENGTH}"]


def audited(**settings):
    """A request of `overlap`, as its compiling process gets it."""
    shape = dict(target="cpu:8", model="tiny", residual="ladder", layers=2, prompt_length=LENGTH)
    return pickle.loads(pickle.dumps(requests.make(phase=Phase.TRAIN, **shape, **settings)))


@pytest.fixture
def trained(tmp_path):
    book = tmp_path / "book.txt"
    book.write_text("a line of a book\n" * 500)
    where = [f"data.path={book}", f"run.dir={tmp_path / 'run'}"]
    return lambda *overrides: cli.main(["train", "tiny", *ALWAYS, *where, *overrides])


@pytest.mark.parametrize(
    "asked, overrides",
    [
        (dict(tensor=8, batch=ROWS), ["mesh.tensor=8", f"train.batch={ROWS}"]),
        (
            dict(tensor=4, fsdp=2, batch=ROWS // 2, loop=Loop.UNROLLED, remat=Remat.FULL, sequence_parallel=True),
            ["mesh.tensor=4", "mesh.fsdp=2", f"train.batch={ROWS}", "train.loop=unrolled", "train.remat=full",
             "train.sequence_parallel=true"],
        ),
    ],
    ids=["default", "split"],
)  # fmt: skip
def test_the_audited_step_is_the_one_that_runs(asked, overrides, trained):
    assert would_compile(programs.record, audited(**asked)) == would_compile(trained, *overrides)


def test_the_planned_step_is_the_one_that_runs(trained):
    overrides = f"mesh.data=2 mesh.tensor=4 train.batch={ROWS} train.remat=full train.accumulate=2"
    overrides = overrides.split()
    asked = config.to_dict(config.load("tiny", overrides=[*ALWAYS, *overrides]))
    parts = {name: asked[name] for name in ("model", "mesh", "train")}
    step = json.loads(json.dumps({"target": "cpu:8", "run": parts}))
    assert would_compile(planner.measure, step) == would_compile(trained, *overrides)


@pytest.mark.parametrize("tensor, barriers", [(1, 0), (2, 1)])
def test_gradients_that_ranks_sum_wait_for_the_end_of_backward(tensor, barriers):
    """Else a compiler may merge their reductions with a sublayer's. The values are the same with
    and without.
    """
    definition = cases.define("standard", tensor=tensor)
    after = lambda gradients: _after_backward(gradients, definition.layout, definition.dims)
    assert str(jax.make_jaxpr(after)(definition.abstract)).count("optimization_barrier") == barriers
