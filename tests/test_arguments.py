"""What a model is made of and called with: one line for what is another model's, or outside the
vocabulary.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import ladder_jax as lj
from ladder_jax import (
    checkpoint,
    config,
    decode,
    evaluate,
    nn,
    parallel,
    pretrained,
    residual,
    schedule,
    train,
)
from ladder_jax.data import store
from tests import cases
from tests.refusals import refused

CONFIG = cases.model("ladder", num_layers=1, d_model=16, num_heads=2, num_kv_heads=2, d_ff=16)
DEFINITION = nn.define(CONFIG, mesh=parallel.make_mesh())
TOKENS = cases.tokens((2, 6))


def params_of(config=CONFIG):
    return cases.parameters(nn.define(config, mesh=parallel.make_mesh()))


def generator():
    return decode.Generator(DEFINITION, params_of())


def scorer():
    return evaluate.Scorer(DEFINITION, params_of())


def without_up():
    """A model's parameters, one array left out."""
    params = params_of()
    del params["layers"]["mlp"]["up"]
    return params


def other(**changes):
    return params_of(dataclasses.replace(CONFIG, **changes))


MISTAKES = {
    "two layers": (
        other(num_layers=2),
        "params.layers.attention.key has the shape (2, 16, 2, 8), and this model needs (1, ",
    ),
    "no head": (
        other(tie_embeddings=True),
        "params.head is missing: this model has embedding, layers, final_norm, head",
    ),
    "biases": (other(biases="all"), "unknown parameter 'params.layers.attention."),
    "no array": (without_up(), "params.layers.mlp.up is missing: this model has"),
    "misspelt": (
        {**params_of(), "final_nrm": 1},
        "unknown parameter 'params.final_nrm'; did you mean 'params.final_norm'?",
    ),
    "an array for a module": (
        {**params_of(), "head": np.zeros(3)},
        "params.head must be a dict with table, not a ndarray",
    ),
    "a module for an array": (
        {**params_of(), "head": {"table": {}}},
        "params.head.table has the shape None",
    ),
}


@pytest.mark.parametrize("params, message", MISTAKES.values(), ids=MISTAKES)
def test_another_models_parameters_are_refused(params, message):
    with refused(re.escape(message)):
        nn.Transformer(CONFIG, params=params)


def test_and_by_the_compiled_function():
    """Two layers' arrays ran as one layer's, truncated."""
    program = nn.compiled_logits(DEFINITION)
    with refused("params.layers.attention.key has the shape"):
        program(other(num_layers=2), TOKENS)
    assert np.isfinite(program(params_of(), TOKENS)).all()


def loss(params, tokens):
    return train.loss_and_gradients(DEFINITION)(params, tokens)[0]


def stepped(params, tokens):
    """The loss of a training step from `params`."""
    settings = dict(config=config.TrainConfig())
    state = train.initial_state(DEFINITION, params=params, **settings)
    return train.train_step(DEFINITION, **settings)(state, tokens)[1]["loss"]


@pytest.mark.parametrize(
    "program",
    [loss, jax.jit(loss), train.mean_loss(DEFINITION), stepped],
    ids=["loss_and_gradients", "compiled", "mean_loss", "train_step"],
)
def test_and_by_training(program):
    """Likewise of tokens that are no integers, or no rows for this mesh."""
    with refused("params.layers.attention.key has the shape"):
        program(other(num_layers=2), TOKENS)
    with refused("tokens must be integers, not float32"):
        program(params_of(), TOKENS.astype(np.float32))
    with refused(r"tokens must be \[B, T\] .*, not \(6,\)"):
        program(params_of(), TOKENS[0])
    stored = jax.tree.map(lambda a: a.astype(jnp.bfloat16), params_of())
    assert np.isfinite(program(stored, TOKENS.astype(np.uint8)))


def test_its_own_parameters_in_any_form():
    """On the host or a device, in another dtype, as Flax's State, or only shapes: to lower for
    absent hardware.
    """
    model = nn.Transformer(CONFIG, params=params_of())
    for params in (
        model.params,
        jax.tree.map(lambda a: a.astype(jnp.bfloat16), model.params),
        nnx.state(model),
    ):
        assert np.isfinite(nn.Transformer(CONFIG, params=params)(TOKENS)).all()
    abstract = nn.Transformer(CONFIG, params=model.definition.abstract)
    assert jax.tree.map(jnp.shape, nnx.to_pure_dict(nnx.state(abstract))) == jax.tree.map(
        jnp.shape, model.params
    )


def test_tokens_outside_the_vocabulary():
    """Refused where they are known. A trace knows none."""
    model = nn.Transformer(CONFIG, params=params_of())
    for wrong in (251, 300, -1):
        for kind in (np.asarray, jnp.asarray, np.int64, lambda tokens: tokens.tolist()):
            with refused(rf"token {wrong} is not in the vocabulary of 251 \(0 to 250\)"):
                model(kind(np.where(np.arange(12).reshape(2, 6) == 7, wrong, TOKENS)))
    with refused("token 251 is not in"):
        train.mean_loss(DEFINITION)(params_of(), np.full((2, 6), 251))
    with refused("token 4294967296 is not in"):
        model(np.full((2, 6), 2**32))
    for wrong in (TOKENS + 0.5, jnp.ones((2, 6)), TOKENS > 3):
        with refused("tokens must be integers, not (float64|float32|bool)"):
            model(wrong)
    with refused(r"must be \[B, T\]"):
        model(TOKENS[0])
    edge = np.where(TOKENS > 100, 250, 0)
    assert np.isfinite(jax.jit(model)(edge + 251)).all()
    assert np.array_equal(model(edge.astype(np.int64)), model(edge.tolist()))


ON_TWO = nn.define(CONFIG, mesh=parallel.make_mesh(tensor=2))
RNGS = nnx.Rngs(0)
GREEDY = config.DecodeConfig()
WRONG = {
    "make_mesh(devices=)": (
        lambda: parallel.make_mesh(devices="cpu"),
        "devices must be jax's devices, such as",
    ),
    "make_mesh(devices=) of none": (
        lambda: parallel.make_mesh(devices=[]),
        "needs 1 devices, but this machine has 0",
    ),
    "Transformer": (
        lambda: nn.Transformer("tiny", rngs=RNGS),
        "a Transformer takes a ModelConfig, such as preset",
    ),
    "Transformer(rngs=)": (
        lambda: nn.Transformer(CONFIG, rngs=0),
        "rngs must be of type Rngs, not 0",
    ),
    "Transformer(rngs=) of no stream": (
        lambda: nn.Transformer(CONFIG, rngs=nnx.Rngs(dropout=0)),
        "rngs has no stream `params`: nnx.Rngs(seed) has every one",
    ),
    "Transformer(mesh=) of other axes": (
        lambda: nn.Transformer(CONFIG, rngs=RNGS, mesh=jax.make_mesh((2,), ("x",))),
        "the mesh has the axes ('x',), and a model's are ('data', 'fsdp', 'tensor'): name them by"
        " ladder_jax.mesh_of(mesh, axes={'tensor': 'x'})",
    ),
    "define": (
        lambda: nn.define("tiny", mesh=parallel.make_mesh()),
        "config must be of type ModelConfig, not 'tiny'",
    ),
    **{
        kind.__name__: (
            lambda kind=kind: kind("tiny", rngs=RNGS),
            "config must be of type ModelConfig or Sizes, not 'tin",
        )
        for kind in (nn.Attention, nn.MLP, nn.RMSNorm, nn.Embedding, nn.Layer)
    },
    "topology": (lambda: residual.topology(5, num_layers=2), "residual must be of type str, not 5"),
    "topology(num_layers=0)": (
        lambda: residual.topology("ladder", num_layers=0),
        "a whole number of at least 1, not 0",
    ),
    "topology(ladder_layers=) of a desync": (
        lambda: residual.topology("desync-2", num_layers=2, ladder_layers="1"),
        "ladder_layers needs a residual whose layers stand alone, not 'desync-2'",
    ),
    "topology(ladder_layers=)": (
        lambda: residual.topology("ladder", num_layers=2, ladder_layers=1.5),
        "ladder_layers must be of type str, not 1.5",
    ),
    "Topology": (
        lambda: residual.Topology(delays=(1,), joint=(False,), fresh=(False,)),
        "of one number of layers L",
    ),
    "Topology of a later layer's output": (
        lambda: residual.Topology(delays=(-1, 0), joint=(False,), fresh=(False,)),
        "delays must be whole numbers of at least 0, not (-1, 0)",
    ),
    "Topology of half a joint layer": (
        lambda: residual.Topology(delays=(1, 2), joint=(True,), fresh=(False,)).layers,
        "delay 1 reads the middle of a layer whose sublayers are joint",
    ),
    "of_model": (
        lambda: residual.of_model("tiny"),
        "config must be of type ModelConfig, not 'tiny'",
    ),
    "Stack(topology=)": (
        lambda: residual.Stack(nnx.Linear, topology="ladder", rngs=RNGS),
        "must be of type Topology",
    ),
    "residual.run": (
        lambda: residual.run("ladder", None, None, params={}),
        "topology must be of type Topology, not 'ladder'",
    ),
    "parse": (lambda: schedule.parse(5), "target must be of type str, not 5"),
    "Target": (
        lambda: schedule.Target("v5p", 5),
        "target 'v5p:5' has no valid size for v5p: write it as in v5p:2x2x2",
    ),
    "devices": (
        lambda: schedule.devices("v5p:2x2x2"),
        "target must be of type Target, not 'v5p:2x2x2'",
    ),
    "audit": (
        lambda: schedule.audit(5),
        "audit takes a function, a compiled one, or its text, not 5",
    ),
    "assert_hidden": (
        lambda: schedule.assert_hidden(len, exposed="1"),
        "exposed must be a whole number, not '1'",
    ),
    "Engine": (
        lambda: decode.Engine("runs/a"),
        "needs a Transformer, or a ModelDef and its params",
    ),
    "Engine(params)": (
        lambda: decode.Engine(DEFINITION, 5),
        "params must be a dict with embedding, layers",
    ),
    "Engine(slots=)": (
        lambda: decode.Engine(DEFINITION, params_of(), slots="8"),
        "slots must be a whole number, not '8'",
    ),
    "Engine(quantize=)": (
        lambda: decode.Engine(DEFINITION, params_of(), quantize="int4"),
        "did you mean 'int8'?",
    ),
    "Engine(launch=)": (
        lambda: decode.Engine(DEFINITION, params_of(), launch="x"),
        "unknown launch 'x' (allowed: auto",
    ),
    "Engine(interleave=)": (
        lambda: decode.Engine(
            nn.define(dataclasses.replace(CONFIG, residual="desync-2"), mesh=parallel.make_mesh()),
            params_of(),
            interleave=2,
        ),
        "interleave=2 is for a residual that reduces every sublayer's output, not desync-2",
    ),
    "Engine(decoder=)": (
        lambda: decode.Engine(DEFINITION, params_of(), decoder="bytes"),
        "a function from tokens to byt",
    ),
    "prefill(launch=)": (  # with which a CPU's compiler crashes
        lambda: decode.prefill(ON_TWO, capacity=8, launch="explicit"),
        "launch 'explicit' is for NVIDIA GPUs",
    ),
    "decode_many(choice=)": (
        lambda: decode.decode_many(DEFINITION, choice="gredy"),
        "unknown choice 'gredy'; did you mean 'greedy'?",
    ),
    "Generator": (
        lambda: decode.Generator("tiny", {}),
        "inference needs a Transformer, or a ModelDef and its params, not 'tiny'",
    ),
    "Generator.tokens of a text": (
        lambda: generator().tokens("hello", config=GREEDY),
        "a prompt must be a list of whole numbers, not 'h'",
    ),
    "Generator.tokens of a number": (
        lambda: generator().tokens(5, config=GREEDY),
        "prompts must be of type Sequence or ndarray or Array, not 5",
    ),
    "Generator.tokens(config=)": (
        lambda: generator().tokens([[1]], config={"max_new_tokens": 3}),
        "config must be of type DecodeConfig, not a dict",
    ),
    "Generator.pieces(config=)": (
        lambda: list(generator().pieces(decode.Request([1]), config=config.RunConfig())),
        "config must be of type DecodeConfig, not a RunConfig",
    ),
    "Generator.pieces(decoder=)": (
        lambda: list(generator().pieces(decode.Request([1]), decoder="utf8")),
        "decoder must be a function from tokens to bytes, not 'utf8'",
    ),
    "Generator.pieces": (
        lambda: list(generator().pieces([1, 2])),
        "request must be of type Request, not a list",
    ),
    "Engine.submit": (
        lambda: decode.Engine(DEFINITION, params_of(), capacity=4).submit([1, 2]),
        "request must be of type Request, not a list",
    ),
    "Engine.submit_all": (
        lambda: decode.Engine(DEFINITION, params_of()).submit_all(decode.Request([1])),
        "requests must be of type Sequence, not a Request",
    ),
    "Request": (lambda: decode.Request(5), "prompt must be a list of whole numbers, not 5"),
    "Request(logprobs=)": (
        lambda: decode.Request([1], logprobs="yes"),
        "logprobs must be of type bool, not 'yes'",
    ),
    "Scorer(params)": (
        lambda: evaluate.Scorer(DEFINITION, 5),
        "params must be a dict with embedding, layers",
    ),
    "Scorer(batch_tokens=)": (
        lambda: evaluate.Scorer(DEFINITION, params_of(), batch_tokens="5"),
        "must be a whole numb",
    ),
    "perplexity(model)": (
        lambda: evaluate.perplexity("runs/book", [1, 2]),
        "model must be of type Transformer or Scorer or Model, not 'runs/book'",
    ),
    "perplexity of a number": (
        lambda: evaluate.perplexity(scorer(), 5),
        "tokens must be of type Sequence or ndarray or Array, not 5",
    ),
    "perplexity of a text": (
        lambda: evaluate.perplexity(scorer(), "hello"),
        "a document must be a list of whole numbers, not 'hello'",
    ),
    "text_perplexity": (
        lambda: evaluate.text_perplexity(scorer(), ["hello"]),
        "model must be of type Model, not a Scorer",
    ),
    "text_perplexity of one text": (
        lambda: evaluate.text_perplexity(scorer(), "hello"),
        "texts must be of type list or tuple, not 'hello'",
    ),
    "compiled_logits(loop=)": (
        lambda: nn.compiled_logits(DEFINITION, loop="scann"),
        "unknown value for loop: 'scann'; did you mean 'scan'?",
    ),
    "checkpoint.Store": (
        lambda: checkpoint.Store("a", config="tiny"),
        "config must be of type RunConfig, not 'tiny'",
    ),
    "from_pretrained": (
        lambda: pretrained.from_pretrained(5),
        "name must be of type str or PathLike, not 5",
    ),
    "pretrained.open": (
        lambda: pretrained.open(None),
        "name must be of type str or PathLike, not None",
    ),
    "lj.load": (lambda: lj.load(b"run"), "path must be of type str or PathLike, not a bytes"),
    "pretrained.load": (
        lambda: pretrained.load("runs/book", mesh=parallel.make_mesh()),
        "source must be of type Source, not 'runs/book'",
    ),
    "write_huggingface": (
        lambda: pretrained.write_huggingface("runs/book", "export"),
        "source must be of type Source, not 'runs/book'",
    ),
    "write_huggingface(destination=)": (
        lambda: lj.Transformer(CONFIG, params=params_of()).save(5),
        "destination must be of type str or PathLike, not 5",
    ),
    "Transformer(tokenizer=)": (
        lambda: lj.Transformer(CONFIG, params=params_of(), tokenizer="bytes"),
        "tokenizer must be a Tokenizer, not 'bytes'",
    ),
    "Transformer(decode=)": (
        lambda: lj.Transformer(CONFIG, params=params_of(), decode={"top_k": 3}),
        "decode must be of type DecodeConfig or NoneType, not a dict",
    ),
    "data.Store": (lambda: store.Store(5), "folder must be of type str or PathLike, not 5"),
    "train_step": (
        lambda: train.train_step("tiny", config=config.TrainConfig()),
        "definition must be of type ModelDef",
    ),
    "train_step(config=)": (
        lambda: train.train_step(DEFINITION, config={}),
        "config must be of type TrainConfig, not a di",
    ),
    "loss_and_gradients": (
        lambda: train.loss_and_gradients("tiny"),
        "definition must be of type ModelDef, not 'tiny'",
    ),
    "loss_and_gradients of one token": (
        lambda: train.loss_and_gradients(DEFINITION)(params_of(), np.zeros((4, 1), np.int32)),
        "rows of at least two tokens, each but the first predicted, not (4, 1)",
    ),
    "mean_loss of no row": (
        lambda: train.mean_loss(DEFINITION)(params_of(), np.zeros((0, 9), np.int32)),
        "rows of at least two tokens, each but the first predicted, not (0, 9)",
    ),
    "loss_and_gradients(accumulate=)": (
        lambda: train.loss_and_gradients(DEFINITION, accumulate=3)(
            params_of(), np.zeros((4, 9), np.int32)
        ),
        "accumulate=3 does not divide a rank's 4 rows",
    ),
    "loss_and_gradients(sequence_parallel=)": (
        lambda: train.loss_and_gradients(ON_TWO, sequence_parallel=True)(
            cases.parameters(ON_TWO), np.zeros((4, 6), np.int32)
        ),
        "sequence_parallel splits 5 positions over 2 tensor ranks",
    ),
    "run": (lambda: train.run("tiny"), "config must be of type RunConfig, not 'tiny'"),
    "load(overrides=)": (
        lambda: config.load("tiny", overrides="train.steps=3"),
        "overrides must be of type list or tuple, not 'train.steps=3'",
    ),
    "load": (lambda: config.load(5), "a configuration must be of type str or PathLike, not 5"),
    "from_dict": (lambda: config.from_dict(5), "a configuration must be of type dict, not 5"),
    "ragged tokens": (
        lambda: nn.Transformer(CONFIG, params=params_of())([[1, 2], [3]]),
        "tokens must be [B, T]: these rows have different lengths",
    ),
}


@pytest.mark.parametrize("make, message", WRONG.values(), ids=WRONG)
def test_constructors_refuse_wrong_types(make, message):
    """In one line that names the argument."""
    with refused(re.escape(message)):
        make()


def test_names_are_taken_for_enums(tmp_path):
    engine = decode.Engine(
        DEFINITION, params_of(), slots=1, capacity=8, loop="scan", quantize="int8"
    )
    assert len(engine.submit(decode.Request([1], max_new_tokens=2)).result().tokens) == 2
    assert config.Execution(loop="unrolled").loop is config.Loop.UNROLLED
    params = decode.Generator(DEFINITION, params_of(), loop="scan").params
    read = functools.partial(decode.prefill_in_chunks, DEFINITION, params, TOKENS, np.int32([5, 6]))
    _, caches = read(capacity=8, chunk=4, loop="scan")
    assert caches.key.shape[:3] == (1, 2, 8)
    of = lambda which: residual.topology("ladder", num_layers=4, ladder_layers=which)
    assert of(2) == of("2") == of([2, 3])
    assert of((0, 3)) == of("0,3")
    assert checkpoint.Store(str(tmp_path / "a"), config=config.RunConfig()).folder == tmp_path / "a"
