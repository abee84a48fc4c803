"""`ladder-jax plan`: what it proposes can be run, its estimates are near the compilers' figures."""

import json
import pathlib

import jax
import pytest

from ladder_jax import parallel
from ladder_jax.config import MeshConfig, Remat, load
from ladder_jax.errors import UserError
from ladder_jax.plan import candidate, memory, plans, request, speed, text
from ladder_jax.plan.candidate import Candidate
from ladder_jax.plan.confirm import Confirmed
from ladder_jax.train import out_of_memory
from ladder_jax.train.run import _memory_explained
from tests import cases

ROOT = pathlib.Path(__file__).parent.parent
LARGE = dict(model="llama-3-70b", target="v5p:4x4x4", tokens=4_194_304, sequence=8192)
COMPILED = json.loads((ROOT / "experiments" / "plan" / "results.json").read_text())["rows"]
TOLERANCE = 0.2


def compiled(size, refusal=None):
    return Confirmed(size, 0, 0, 0, 0, 1.0, 1.0, "0", "none", refusal)


@pytest.mark.parametrize("row", COMPILED, ids=lambda row: f"{row['layers']}-{row['remat']}-{row['accumulate']}")
def test_estimates_are_near_what_compilers_take(row):
    asked = request.make(**{name: row[name] for name in ("model", "target", "tokens", "sequence", "layers")})
    mesh = MeshConfig(*row["mesh"])
    rows = asked.sequences // (mesh.data * mesh.fsdp) // row["accumulate"]
    one = Candidate(mesh, Remat(row["remat"]), row["sequence_parallel"], rows, row["accumulate"])
    found = memory.estimate(one, request=asked)
    assert found.device == pytest.approx(row["bytes_per_device"], rel=TOLERANCE)
    assert found.host == pytest.approx(row["host_bytes"], rel=TOLERANCE)


@pytest.mark.parametrize("asked", [LARGE, dict(model="tiny", target="cpu:8", tokens=8192, sequence=512)])
def test_every_plan_can_be_run(asked):
    """Its overrides make a configuration, of that many tokens, on as many devices as there are."""
    wanted = request.make(**asked)
    for plan in plans.ranked(wanted)[::7]:
        words = [f"{name}={value}" for name, value in plan.candidate.overrides(wanted).items()]
        config = load(asked["model"], overrides=words)
        assert config.mesh == plan.candidate.mesh and config.mesh.size == wanted.target.count
        assert config.train.batch * config.train.sequence == asked["tokens"]
        assert config.train.batch == plan.candidate.rows * plan.candidate.accumulate * plan.candidate.shards
        assert config.train.remat is plan.candidate.remat


def test_meshes_lie_along_the_torus():
    wanted = request.make(**LARGE)
    sizes = {tuple(mesh.axes.values()) for mesh in candidate.meshes_of(wanted)}
    assert (1, 16, 4) in sizes and (4, 4, 4) in sizes and (1, 64, 1) in sizes
    assert (1, 8, 8) not in sizes and (2, 8, 4) not in sizes and (1, 1, 64) in sizes


def test_a_mesh_that_cuts_across_the_torus_is_made_with_a_warning(monkeypatch, caplog):
    """As jax answers for 8 x 8 over 4 x 4 x 4 chips, whose sides make 4 and 16."""

    def no_such_axes(*args, **settings):
        raise NotImplementedError("Failed to find assignment for logical_axis_index 2 of size 8")

    monkeypatch.setattr(jax, "make_mesh", no_such_axes)
    mesh = parallel.make_mesh(fsdp=2, tensor=4)
    assert dict(mesh.shape) == {"data": 1, "fsdp": 2, "tensor": 4}
    assert "mesh 1 x 2 x 4 cuts across the axes" in caplog.text


def test_the_recipe_is_the_recommended_plan():
    config, wanted = load(str(ROOT / "experiments/pretrain/recipes/llama-3-70b.yaml")), request.make(**LARGE)
    best = plans.answer(wanted, compiled=0).plans[0]
    assert (config.mesh, config.train.remat) == (best.candidate.mesh, best.candidate.remat)
    assert config.train.accumulate == best.candidate.accumulate and config.model == wanted.config
    assert (config.train.batch, config.train.sequence) == (wanted.sequences, wanted.sequence)
    assert config.train.sequence_parallel is best.candidate.sequence_parallel and best.fits


def test_speed_orders_what_is_known():
    wanted = request.make(**LARGE)
    of = lambda remat, residual="ladder": speed.speed(
        Candidate(MeshConfig(1, 16, 4), remat, False, 1, 32), request=request.make(**LARGE, residual=residual)
    )
    assert of(Remat.SAVE_MATMULS).seconds < of(Remat.FULL).seconds <= of(Remat.OFFLOAD).seconds
    assert of(Remat.FULL).exposed == 0 < of(Remat.FULL, "standard").exposed
    assert of(Remat.NONE).recomputed == 0
    assert 0 < of(Remat.NONE).mfu <= speed.rates(wanted).flops / speed.rates(wanted).peak


def test_what_the_compiler_refuses_gives_way_to_the_next(monkeypatch):
    wanted = request.make(**LARGE)
    answers = [compiled(0, "RESOURCE_EXHAUSTED: used 100 of 95"), compiled(96 * 2**30), compiled(90 * 2**30)]
    asked = []
    monkeypatch.setattr(plans, "confirm", lambda one, request: (asked.append(one), answers[len(asked) - 1])[1])
    found = plans.answer(wanted, compiled=1)
    assert [plan.candidate for plan in found.refused] == asked[:2] and found.plans[0].candidate == asked[2]
    lines = [line for line in text.lines(found) if isinstance(line, str)]
    assert "it fits (90.0 GiB, compiled)" in lines[1] and sum("too large" in line for line in lines) == 2


def test_nothing_fits():
    wanted = request.make(model="llama-3.1-405b", target="v5e:2x2", tokens=4096, sequence=2048)
    found = plans.answer(wanted, compiled=1)
    cure, reason, *_ = text.lines(found)
    assert (
        found.plans == () and cure.startswith("nothing fits: take more devices") and " candidates the small" in reason
    )


def test_a_confirmed_answer(run_cli, tmp_path):
    ask = ["plan", "--model", "tiny", "--target", "cpu:8", "--tokens", "256", "--sequence", "32", "--layers", "2"]
    done = run_cli(*ask, "--json", LADDER_JAX_CACHE=str(tmp_path), check_status=0)
    found = json.loads(done.stdout)
    assert len(done.stdout.splitlines()) == 1 and found["considered"] >= len(found["plans"]) > 10
    best, second = found["plans"][:2]
    assert best["fits"] and best["bytes_per_device"] == sum(
        best["compiled"][name] for name in ("arguments", "temporaries", "outputs", "code")
    )
    assert second["compiled"] is None and best["seconds"] <= second["seconds"]
    again = run_cli(*ask, LADDER_JAX_CACHE=str(tmp_path), check_status=0)  # kept: nothing is compiled
    assert again.stdout.startswith("take ") and "compiling" not in again.stderr
    assert again.stdout.splitlines()[-1].startswith("ladder-jax train tiny model.num_layers=2 ")


@pytest.mark.parametrize(
    "change, said",
    [
        (dict(model="llama-3-70"), "did you mean 'llama-3-70b'?"),
        (dict(target="v5q:4x4x4"), "unknown target"),
        (dict(tokens=1000, sequence=512), "512 or 1024 would be"),
        (dict(tokens=0), "--tokens must be positive"),
        (dict(residual="ladder-fresh"), "give model.ranks"),
    ],
)
def test_mistakes(change, said):
    with pytest.raises(UserError, match=said.replace("?", r"\?")):
        request.make(**LARGE | change)


def test_tokens_that_no_mesh_shares_out():
    with pytest.raises(UserError, match="takes a multiple of 7 sequences"):
        candidate.candidates(request.make(model="tiny", target="cpu:7", tokens=2048, sequence=512))


def test_running_out_of_memory_names_the_planner():
    definition = cases.define("ladder", data=2, tensor=4)
    config, mesh = load("tiny", overrides=["train.remat=none", "mesh.data=2", "mesh.tensor=4"]), definition.layout.mesh
    error = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.\nmore")
    said = str(out_of_memory.explanation(error, config=config, mesh=mesh))
    assert "\n" not in said and "Out of memory allocating 9 bytes)" in said
    asked = "ladder-jax plan --model tiny --residual ladder --target cpu:8 --tokens 2048 --sequence 128"
    assert asked in said
    other = jax.errors.JaxRuntimeError("INTERNAL: a bug")
    assert out_of_memory.explanation(other, config=config, mesh=mesh) is None
    with pytest.raises(UserError, match="not enough memory on cpu"), _memory_explained(config, mesh):
        raise error
    with pytest.raises(jax.errors.JaxRuntimeError, match=str(other)), _memory_explained(config, mesh):
        raise other


@pytest.mark.audit
def test_the_recipe_fits_its_target():
    """80 layers compiled for 64 TPU chips, the optimizer among them."""
    found = plans.answer(request.make(**LARGE), compiled=1)
    best = found.plans[0]
    assert not found.refused and best.candidate.mesh == MeshConfig(1, 16, 4)
    assert best.confirmed.device <= best.limit
