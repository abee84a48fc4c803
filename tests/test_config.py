"""Presets, files, overrides, and one line for every mistake."""

import json
import pathlib
import re
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from ladder_jax import config, parallel
from ladder_jax.schedule import models
from tests.refusals import refused


@pytest.mark.parametrize("name", config.PRESETS)
def test_presets_survive_being_written_down(name):
    loaded = config.load(name)
    assert loaded.run.name == name
    assert config.from_dict(json.loads(json.dumps(config.to_dict(loaded)))) == loaded


# Parameters as their authors count them, in millions (tied embeddings once).
@pytest.mark.parametrize(
    "name, millions",
    {"smollm2-135m": 134.515, "llama-3.2-1b": 1235.8, "llama-3.2-3b": 3212.7, "llama-3-8b": 8030.3,
     "llama-3-70b": 70553.7, "llama-3.1-405b": 405853.4, "codellama-34b": 33744.0,
     "mixtral-8x7b": 46702.8, "qwen3-30b-a3b": 30532.1, "qwen3-235b-a22b": 235093.6}.items(),
)  # fmt: skip
def test_presets_have_the_published_sizes(name, millions):
    held = models.parameters(config.preset(name))["parameters"]  # of matrices: gains are few
    assert held / 1e6 == pytest.approx(millions, rel=3e-4)


def test_overrides_and_files(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(
        "model:\n  preset: tiny\n  residual: standard\ntrain:\n  learning_rate: 3e-4\n  remat: none\n"
    )
    loaded = config.load(
        file, overrides=["model.num_layers=6", "model.rope_scaling.factor=4", "run.name=x"]
    )
    assert (loaded.model.num_layers, loaded.model.residual, loaded.model.d_model) == (
        6,
        "standard",
        128,
    )
    assert loaded.model.rope_scaling == config.RopeScaling(factor=4.0)
    kept = config.load("llama-3.2-1b", overrides=["model.rope_scaling.original_context=16"])
    assert kept.model.rope_scaling == config.RopeScaling(factor=32.0, original_context=16)
    assert loaded.train.learning_rate == 3e-4
    assert loaded.run.name == "x"
    as_json = tmp_path / "mine.json"
    for name, indent in (("x", None), ("x", 2), ("\N{ROCKET}", "\t")):
        named = replace(loaded, run=config.FolderConfig(name=name))
        as_json.write_text(json.dumps(config.to_dict(named), indent=indent))
        assert config.load(as_json) == named


@pytest.mark.parametrize(
    "given, which", {"2": "2", "0,2": "0,2", "[0, 2]": "0,2,", "all": "all", "'1,'": "1,"}.items()
)
def test_ladder_layers_as_a_user_writes_them(given, which):
    assert (
        config.load("tiny", overrides=[f"model.ladder_layers={given}"]).model.ladder_layers == which
    )


@pytest.mark.parametrize(
    "given, name",
    {
        "a #1": "a #1",
        "a": "a",
        "a ": "a",
        "'a #1'": "a #1",
        '"a" # b': "a",
        "#1": "#1",
        "''": "",
    }.items(),
)
def test_names_as_a_user_writes_them(given, name):
    """Two runs, `a #1` and `a #2`, are not both in the folder `a`."""
    assert config.load("tiny", overrides=[f"run.dir={given}"]).run.dir == name


MISTAKES = {
    "train.interleave=true": "unknown value for train.interleave: 'True' (allowed: 1, 2, auto)",
    "model.num_layer=4": "unknown setting 'model.num_layer'; did you mean 'model.num_layers'?",
    "model.num_layers=four": 'model.num_layers must be of type int, not "four"',
    "model.num_layers=true": "model.num_layers must be of type int, not true",
    "model.num_layers=0": "model.num_layers must be between 1 and 10,000, not 0",
    "model.num_layers=9999999999": "model.num_layers must be between 1 and 10,000, not 9999999999",
    "model.ladder_layers=9999999999": "ladder_layers='9999999999' is no choice of layers",
    "train.spike_window=9999999999": "train.spike_window must be between 1 and 10,000",
    "model.residual=ladder-1000": "unknown residual 'ladder-1000'",
    "model.num_heads=7": "model.num_heads=7 does not divide model.d_model=128",
    "model.head_dim=0": "model.head_dim must be positive, not 0",
    "model.num_kv_heads=3": "model.num_kv_heads=3 does not divide model.num_heads=8",
    "mesh.tensor=3": "num_heads=8 is not divisible by mesh.tensor=3 (allowed: 1, 2, 4, 8)",
    "train.batch=9999999999": "train.batch x train.sequence must be below 2**31 tokens, not ",
    "mesh.data=3": "train.batch=16 is not divisible by the mesh's data x fsdp = 3",
    "mesh.fsdp=3": "model.d_model=128 is not divisible by mesh.fsdp=3",
    "train.accumulate=3": "train.accumulate=3 does not divide a device's 16 rows",
    # by which Adam's correction of its moments would divide by 0: all weights were nan
    "train.beta1=1": "train.beta1 must be between 0 and 0.9999999, not 1",
    "train.beta2=0.99999999": "train.beta2 must be between 0 and 0.9999999, not 0.99999999",
    "train.z_loss=-1": "train.z_loss must be 0, or between",
    "train.load_balance=-0.1": "train.load_balance must be 0, or between",
    "train.router_z_loss=-0.1": "train.router_z_loss must be 0, or between",
    "train.router_bias_rate=-0.1": "train.router_bias_rate must be 0, or between",
    "distill.hidden_weight=.inf": "must be 0, or between 1e-37 and 1e37, not inf",
    "train.learning_rate=inf": "train.learning_rate must be between 1e-37 and 1e37, not inf",
    "model.residual=lader": "unknown residual 'lader'; did you mean 'ladder'?",
    "model.preset=tinny": "unknown preset 'tinny'; did you mean 'tiny'?",
    "model.ladder_layers=9": "ladder_layers='9' is no choice of layers",
    "model.ranks=4": "model.ranks belongs to ladder-fresh and desync-n",
    "train.remat=ful": "unknown value for train.remat: 'ful'; did you mean 'full'?",
    "train.learning_rate=-1": "train.learning_rate must be between",
    "train.learning_rate=.nan": "train.learning_rate must be a number",
    f"model.num_layers={10**30}": "model.num_layers must be between -(2**63) and 2**63",
    f"model.norm_eps={10**400}": "model.norm_eps must be of type float",
    "model=3": "model must be a section",
    "run.profiler_port=0": "run.profiler_port must be between 1 and 65535, not 0",
    "model.d_ff": "not of the form path.to.field=value",
    "train.seed=-1": "train.seed must be between",
    "train.collective_matmul=ring": "collective_matmul=ring needs sequence_parallel: without it no",
    "decode.prefill_chunk=0": "decode.prefill_chunk must be positive, not 0",
    "decode.top_k=-1": "decode.top_k must not be negative, not -1",
    "decode.top_k=4294967296": "decode.top_k must be at most 2147483647, not 4294967296",
    "decode.temperature=.inf": "decode.temperature must be at most 1e+30, not inf",
    "decode.top_p=0": "decode.top_p must be above 0 and at most 1, not 0",
    "decode.min_p=-0.1": "decode.min_p must be between 0 and 1, not -0.1",
    "decode.repetition_penalty=0": "decode.repetition_penalty must be between 1e-6 and 1e30, not 0",
    "decode.repetition_penalty=1e-40": "decode.repetition_penalty must be between 1e-6 and 1e30, not 1e-40",
}


@pytest.mark.parametrize("override, message", MISTAKES.items())
def test_mistakes_are_one_line(override, message):
    with refused(re.escape(message)):
        config.load("tiny", overrides=[override])


SAME = [
    (dict(biases="qkv"), dict(biases=config.Biases.QKV)),
    (dict(dtype="float32"), dict(dtype=config.Dtype.FLOAT32)),
    (dict(dtype=jnp.float32), dict(dtype=config.Dtype.FLOAT32)),
    (dict(ladder_layers=2), dict(ladder_layers="2")),
    (dict(ladder_layers=[0, 1]), dict(ladder_layers="0,1,")),
    (dict(num_layers=np.int64(6)), dict(num_layers=6)),
    (dict(rope_theta=20_000), dict(rope_theta=20_000.0)),
    (dict(rope_scaling={"factor": 4}), dict(rope_scaling=config.RopeScaling(factor=4.0))),
]


@pytest.mark.parametrize("given, meant", SAME, ids=str)
def test_fields_have_their_types_however_they_are_made(given, meant):
    """What Python hands over is what a file says: its dataclass can be written down and
    compared.
    """
    wanted = config.ModelConfig(**meant)
    replaced = replace(config.ModelConfig(), **given)
    for made in (config.preset("tiny", **given), config.ModelConfig(**given), replaced):
        assert made == wanted
        assert config.model_from_dict(json.loads(json.dumps(config.to_dict(made)))) == made
        values = {name: getattr(made, name) for name in meant}
        assert values == meant
        assert all(type(values[name]) is type(meant[name]) for name in meant)


def test_sections_in_python():
    assert config.RunConfig(model={"num_layers": 2}).model == config.ModelConfig(num_layers=2)
    assert config.DataConfig(path=pathlib.Path("text")).path == "text"
    assert config.TrainConfig(remat="full").remat is config.Remat.FULL
    assert config.LoraConfig(targets="query, all").names == config.LoraConfig().names
    assert replace(config.TrainConfig(), loop="unrolled").loop is config.Loop.UNROLLED


IN_PYTHON = {
    "unknown value for model.biases: 'nope'; did you mean 'none'?": lambda: config.preset(
        "tiny", biases="nope"
    ),
    'model.tie_embeddings must be of type bool, not "no"': lambda: config.preset(
        "tiny", tie_embeddings="no"
    ),
    "unknown value for model.dtype:": lambda: config.preset("tiny", dtype=float),
    "model.num_layers must be of type int, not a ndarray": lambda: config.preset(
        "tiny", num_layers=np.zeros(2)
    ),
    "model.ladder_layers must be of type str, not true": lambda: config.preset(
        "tiny", ladder_layers=True
    ),
    "ladder_layers='4,' is no choice of layers": lambda: config.preset("tiny", ladder_layers=[4]),
    "model.rope_scaling must be a section (a RopeScaling, or": lambda: config.preset(
        "tiny", rope_scaling=8.0
    ),
    "train.steps must be of type int, not 1.5": lambda: config.TrainConfig(steps=1.5),
    "model must be a section (a ModelConfig, or a mapping of its fields), no": lambda: (
        config.RunConfig(model="tiny")
    ),
    'mesh.tensor must be of type int, not "4"': lambda: parallel.make_mesh(tensor="4"),
}


@pytest.mark.parametrize("message, make", IN_PYTHON.items())
def test_mistakes_in_python_are_one_line_when_made(make, message):
    with refused(re.escape(message)):
        make()


def test_a_conversion_without_ladder_layers():
    ladder = ["model.residual=ladder", "conversion.steps=4"]
    assert config.load("tiny", overrides=[*ladder, "model.ladder_layers=1"]).conversion.steps == 4
    for none in ("0", "[]"):
        with refused("conversion.steps=4 has no ladder layer to turn: model.ladder_layers="):
            config.load("tiny", overrides=[*ladder, f"model.ladder_layers={none}"])


@pytest.mark.parametrize(
    "content, message",
    {
        "model: [": "is not YAML",
        "train: {steps: 3}\ntrain: {batch: 2}": "is not YAML: 'train' stands there twice, .* line 2",
        '{"train": {"steps": 3, "steps": 4}}': "'steps' stands there twice",
        "- 1": "must hold sections",
        "\x00": "is not YAML",
        None: "cannot read",
    }.items(),
)
def test_unreadable_files(tmp_path, content, message):
    file = tmp_path / "c.yaml"
    if content is not None:
        file.write_text(content)
    with refused(message):
        config.load(file)


LIGHT = """
import sys, ladder_jax
loaded = {name for name in sys.modules if name.startswith("ladder_jax.")}
assert not loaded and not {"jax", "numpy"} & set(sys.modules), loaded
import ladder_jax.config
assert "jax" not in sys.modules
"""


def test_the_import_is_light(run_python):
    """`import ladder_jax` loads nothing else, and the configuration no jax."""
    run_python("-c", LIGHT, check_status=0)


def test_a_sequence_that_does_not_split_over_the_ranks():
    settings = ["mesh.tensor=8", "train.sequence=100", "train.sequence_parallel=true"]
    with refused("train.sequence=100 positions over mesh.tensor=8 ranks"):
        config.load("tiny", overrides=settings)
    assert config.load("tiny", overrides=[*settings, "train.sequence=104"]).train.sequence_parallel
