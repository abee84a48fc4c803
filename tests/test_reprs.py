"""What a notebook shows of an object is a few lines that say what matters: 2,000 characters and 30
lines at most.
"""

import pathlib
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P

from ladder_jax import checkpoint, config, decode, nn, parallel, pretrained, residual, schedule
from ladder_jax.data.store import Store
from ladder_jax.data.tokenizer import load
from ladder_jax.train.step import TrainState
from tests import cases, tokenizers
from tests.hlo import text
from tests.lines import write
from tests.test_tokens import make

BIG = config.preset("tiny", biases="all", qk_norm=True, num_layers=8, residual="desync-2", ranks=2)


def model(mesh=None):
    definition = nn.define(BIG, mesh=mesh or parallel.make_mesh())
    return nn.Transformer(BIG, mesh=mesh, params=definition.abstract)


def with_a_list(tmp_path):
    made = model()
    made.seen = nnx.List([nnx.BatchStat(jnp.zeros(3))])
    return made


def source(tmp_path):
    arrays = {
        pretrained.Key("layers/attention/query", layer): pretrained.Stored(
            (512, 8, 64), np.dtype("float16"), None
        )
        for layer in range(500)
    }
    files = {"tokenizer.json": b"x" * 2_000_000}
    return pretrained.Source(
        "a/model.gguf", BIG, arrays, 2048, files, {"eos_token_id": list(range(1000))}
    )


def opened(tmp_path):
    return pretrained.OpenedModel(
        "a/model.gguf", tmp_path, config.RunConfig(model=BIG), source(tmp_path)
    )


def generator(tmp_path):
    definition = nn.define(cases.model("ladder", num_layers=2), mesh=parallel.make_mesh(tensor=2))
    return decode.Generator(definition, cases.parameters(definition))


def saved(tmp_path):
    run = config.load(
        "tiny", overrides=["data.path=book.txt", "train.start=runs/other", "lora.rank=4"]
    )
    data = {"step": 12, "skipped": {str(step): "a loss of NaN" for step in range(1000)}}
    return checkpoint.Checkpoint(
        pathlib.Path("/runs/a/checkpoints/12"), 12, run, data, 1.6e9, 2.5, True
    )


def state(tmp_path):
    params = {"a": {"b": jnp.zeros((40, 40))}, "c": jnp.ones((3, 30, 30))}
    return TrainState(params, (params, params), jnp.int32(60), jnp.float32(2.5), jnp.int32(59))


def store(tmp_path):
    texts = ({"text": "the cat " * n} for n in range(1, 200))
    make([write(tmp_path / "a.jsonl", texts)], tmp_path / "out")
    return Store(tmp_path / "out")


def stack(tmp_path):
    class Block(nnx.Module):
        def __init__(self, *, rngs):
            self.attention, self.mlp = nnx.Linear(8, 8, rngs=rngs), nnx.Linear(8, 8, rngs=rngs)

    return residual.Stack(
        Block, topology=residual.topology("ladder", num_layers=40), rngs=nnx.Rngs(0)
    )


def report(tmp_path):
    """Of many sizes, as a program of somebody's own may have."""
    one = schedule.audit(text("tpu7x-unrolled"))
    sized = lambda r, n: replace(r, collective=replace(r.collective, bytes=n))
    many = tuple(sized(r, n) for r in one.reductions for n in range(1_000_000_000, 1_000_000_060))
    return replace(one, reductions=many)


LONG = dict(max_new_tokens=7, temperature=0.5, stop=["stop"] * 100, seed=1)
OBJECTS = {
    "Transformer of 1,552,": lambda _: model(),
    "Mesh('data': 2, 'fsdp': 1, 'tensor': 2, ": lambda _: model(
        parallel.make_mesh(data=2, tensor=2)
    ),
    "attention.query_bias: Parameter(LNH, float32[8, 8, 16])": lambda _: model().layers,
    "seen.0: BatchStat(": with_a_list,
    "Parameter(VD, float32[256, 128])": lambda _: model().head.table,
    "ModelDef(config=ModelConfig(num_layers=8, ": lambda _: model().definition,
    "compiled_logits.<locals>.stripped, no options": lambda _: nn.compiled_logits(
        model().definition
    ),
    "Stack of Block, 5,760 parameters\nTopology of 40 layers": stack,
    "Source(path='a/model.gguf', model=ModelConfig(": source,
    "OpenedModel('a/model.gguf', a Source)": opened,
    "\n  tokenizer: Bytes(": lambda _: pretrained.Transformer(
        BIG, params=model().definition.abstract
    ),
    "Generator(loop='unrolled', quantize='none', of ModelDef(": generator,
    "max_new_tokens=7, temperature=0.5, seed=1": lambda _: decode.Request(range(10_000), **LONG),
    "finish='stop', prompt_tokens=7)": lambda _: decode.Result(
        tuple(range(9999)), "text " * 9999, (0.5,) * 9999, decode.Finish.STOP, 7
    ),
    "step=12, config=RunConfig(": saved,
    "4,300 parameters": state,
    "199 documents, ": store,
    "HuggingFace(": lambda path: load(tokenizers.folder(path / "t")),
    "... and 110 more rows": report,
}


@pytest.mark.parametrize("said, make_it", OBJECTS.items())
def test_reprs_are_short(said, make_it, tmp_path):
    shown = repr(make_it(tmp_path))
    assert len(shown) <= 2000 and shown.count("\n") < 30, (len(shown), shown)
    assert said in shown and " object at 0x" not in shown, shown


@pytest.mark.parametrize("name", config.PRESETS)
def test_a_configuration_is_shown_as_one_types_it(name):
    dense = config.preset(name).moe is None
    other = (
        dict(residual="desync-3", ranks=4) if dense else dict(residual="farskip", moe=dict(top_k=1))
    )
    for changes in ({}, dict(dtype="float32", ladder_layers=2), other):
        made = config.preset(name, **changes)
        assert eval(repr(made), vars(config)) == made
    run = config.load(name)
    assert eval(repr(run), vars(config)) == run
    assert len(repr(run)) < 1000


def test_a_report_prints_the_commands_table():
    """With its verdict first."""
    lines = str(schedule.audit(text("tpu7x-unrolled"))).splitlines()
    assert lines[:2] == [
        "5 of 6 all-reduces hidden",
        "the last one comes after all compute, so it is always exposed",
    ]
    assert max(map(len, lines)) <= 80
    assert str(schedule.audit(jax.jit(lambda x: x + 1), jnp.ones(3))) == "no all-reduces"
    gather = jax.shard_map(
        lambda x: lax.all_to_all(lax.all_gather(x, "x", tiled=True), "x", 0, 0, tiled=True),
        mesh=jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,)),
        in_specs=P("x"),
        out_specs=P("x"),
    )
    assert schedule.audit(jax.jit(gather), jnp.ones(16)).verdict == (
        "no all-reduces; 0 of 2 other collectives hidden"
    )


def test_topologies_in_words():
    of = lambda name, which=None: residual.topology(name, num_layers=32, ladder_layers=which)
    assert repr(of("ladder", "16")) == (
        "Topology of 32 layers, 64 all-reduces, delays 16 x (0, 0), 16 x (1, 1)"
    )
    for name, count, field in (("parallel-ladder", 32, ")"), ("desync-2", 32, ", desync")):
        shown = repr(of(name))
        assert f" 32 layers, {count} all-reduces, delays 32 x " in shown
        assert shown.endswith(field)


@pytest.mark.parametrize("which", [None, "40", "0,", ",".join(map(str, range(0, 80, 2)))])
def test_topologies_of_any_size(which):
    for name in ("ladder-2", "ladder-fresh") if which else config.RESIDUALS:
        assert len(repr(residual.topology(name, num_layers=80, ladder_layers=which))) <= 600
