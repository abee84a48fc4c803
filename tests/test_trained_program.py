"""What `ladder-jax overlap --phase train` and `plan` compile is what `ladder-jax train` runs: their StableHLO, equal."""

import hashlib
import json

import pytest

from ladder_jax import cli
from ladder_jax.config import Loop, Phase, Remat
from ladder_jax.overlap import request as requests
from ladder_jax.overlap import worker
from ladder_jax.parallel import Compiled
from ladder_jax.plan import worker as planner
from ladder_jax.schedule import targets

ROWS, LENGTH = 4, 32


class Lowered(Exception):
    """Ends a command where it would compile."""


@pytest.fixture
def lowered(monkeypatch):
    """Runs a function until it compiles: the digest of what it lowers for the arguments that it compiles for."""

    def compile(self, *arguments):
        raise Lowered(hashlib.sha256(self.lower(*arguments).as_text().encode()).hexdigest())

    monkeypatch.setattr(Compiled, "compile", compile)

    def digest(run, *arguments):
        with pytest.raises(Lowered) as found:
            run(*arguments)
        return str(found.value)

    return digest


def audited(tmp_path, **settings):
    """The words of `overlap`, as its compiling process gets them."""
    shape = dict(target="cpu:8", model="tiny", residual="ladder", phase=Phase.TRAIN, prompt_length=LENGTH)
    file = tmp_path / "request.json"
    file.write_text(json.dumps(requests.make(**shape, **settings).as_dict()))
    return str(file), str(tmp_path / "record")


@pytest.fixture
def trained(tmp_path):
    book = tmp_path / "book.txt"
    book.write_text("a line of a book\n" * 500)
    always = ["model.residual=ladder", f"data.path={book}", f"train.sequence={LENGTH}", f"run.dir={tmp_path / 'run'}"]
    return lambda *overrides: cli.main(["train", "tiny", *always, *overrides])


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
def test_the_audited_step_is_the_one_that_runs(asked, overrides, lowered, trained, tmp_path):
    assert lowered(worker.main, *audited(tmp_path, **asked)) == lowered(trained, *overrides)
