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
    "params.layers.attention.key has the shape (2, 16, 2, 8), and this model needs (1, ": other(
        num_layers=2
    ),
    "params.head is missing: this model has embedding, layers, final_norm, head": other(
        tie_embeddings=True
    ),
    "unknown parameter 'params.layers.attention.": other(biases="all"),
    "params.layers.mlp.up is missing: this model has": without_up(),
    "unknown parameter 'params.final_nrm'; did you mean 'params.final_norm'?": {
        **params_of(),
        "final_nrm": 1,
    },
    "params.head must be a dict with table, not a ndarray": {**params_of(), "head": np.zeros(3)},
    "params.head.table has the shape None": {**params_of(), "head": {"table": {}}},
}


@pytest.mark.parametrize("message, params", MISTAKES.items())
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
    "devices must be jax's devices, such as": lambda: parallel.make_mesh(devices="cpu"),
    "needs 1 devices, but this machine has 0": lambda: parallel.make_mesh(devices=[]),
    "a Transformer takes a ModelConfig, such as preset": lambda: nn.Transformer("tiny", rngs=RNGS),
    "rngs must be of type Rngs, not 0": lambda: nn.Transformer(CONFIG, rngs=0),
    "rngs has no stream `params`: nnx.Rngs(seed) has every one": lambda: nn.Transformer(
        CONFIG, rngs=nnx.Rngs(dropout=0)
    ),
    "the mesh has the axes ('x',), and a model's are ('data', 'fsdp', 'tensor'): name them by"
    " ladder_jax.mesh_of(mesh, axes={'tensor': 'x'})": lambda: nn.Transformer(
        CONFIG, rngs=RNGS, mesh=jax.make_mesh((2,), ("x",))
    ),
    "config must be of type ModelConfig, not 'tiny'": lambda: nn.define(
        "tiny", mesh=parallel.make_mesh()
    ),
    "residual must be of type str, not 5": lambda: residual.topology(5, num_layers=2),
    "a whole number of at least 1, not 0": lambda: residual.topology("ladder", num_layers=0),
    "ladder_layers needs a residual whose layers stand alone, not 'desync-2'": lambda: (
        residual.topology("desync-2", num_layers=2, ladder_layers="1")
    ),
    "ladder_layers must be of type str, not 1.5": lambda: residual.topology(
        "ladder", num_layers=2, ladder_layers=1.5
    ),
    "of one number of layers L": lambda: residual.Topology(
        delays=(1,), joint=(False,), fresh=(False,)
    ),
    "delays must be whole numbers of at least 0, not (-1, 0)": lambda: residual.Topology(
        delays=(-1, 0), joint=(False,), fresh=(False,)
    ),
    "delay 1 reads the middle of a layer whose sublayers are joint": lambda: (
        residual.Topology(delays=(1, 2), joint=(True,), fresh=(False,)).layers
    ),
    "config must be of type ModelConfig, not 'tiny": lambda: residual.of_model("tiny"),
    "must be of type Topology": lambda: residual.Stack(nnx.Linear, topology="ladder", rngs=RNGS),
    "topology must be of type Topology, not 'ladder'": lambda: residual.run(
        "ladder", None, None, params={}
    ),
    "target must be of type str, not 5": lambda: schedule.parse(5),
    "target 'v5p:5' has no valid size for v5p: write it as in v5p:2x2x2": lambda: schedule.Target(
        "v5p", 5
    ),
    "target must be of type Target, not 'v5p:2x2x2'": lambda: schedule.devices("v5p:2x2x2"),
    "audit takes a function, a compiled one, or its text, not 5": lambda: schedule.audit(5),
    "exposed must be a whole number, not '1'": lambda: schedule.assert_hidden(len, exposed="1"),
    "needs a Transformer, or a ModelDef and its params": lambda: decode.Engine("runs/a"),
    "params must be a dict with embedding, layers": lambda: decode.Engine(DEFINITION, 5),
    "slots must be a whole number, not '8'": lambda: decode.Engine(
        DEFINITION, params_of(), slots="8"
    ),
    "did you mean 'int8'?": lambda: decode.Engine(DEFINITION, params_of(), quantize="int4"),
    "unknown launch 'x' (allowed: auto": lambda: decode.Engine(DEFINITION, params_of(), launch="x"),
    "interleave=2 is for a residual that reduces every sublayer's output, not desync-2": lambda: (
        decode.Engine(
            nn.define(dataclasses.replace(CONFIG, residual="desync-2"), mesh=parallel.make_mesh()),
            params_of(),
            interleave=2,
        )
    ),
    "a function from tokens to byt": lambda: decode.Engine(
        DEFINITION, params_of(), decoder="bytes"
    ),
    "launch 'explicit' is for NVIDIA GPUs": lambda: decode.prefill(
        ON_TWO, capacity=8, launch="explicit"
    ),  # with which a CPU's compiler crashes
    "unknown choice 'gredy'; did you mean 'greedy'?": lambda: decode.decode_many(
        DEFINITION, choice="gredy"
    ),
    "inference needs a Transformer, or a ModelDef and its params, not 'tiny'": lambda: (
        decode.Generator("tiny", {})
    ),
    "a prompt must be a list of whole numbers, not 'h'": lambda: generator().tokens(
        "hello", config=GREEDY
    ),
    "prompts must be of type Sequence or ndarray or Array, not 5": lambda: generator().tokens(
        5, config=GREEDY
    ),
    "config must be of type DecodeConfig, not a dict": lambda: generator().tokens(
        [[1]], config={"max_new_tokens": 3}
    ),
    "config must be of type DecodeConfig, not a RunConfig": lambda: list(
        generator().pieces(decode.Request([1]), config=config.RunConfig())
    ),
    "decoder must be a function from tokens to bytes, not 'utf8'": lambda: list(
        generator().pieces(decode.Request([1]), decoder="utf8")
    ),
    "request must be of type Request, not a list": lambda: list(generator().pieces([1, 2])),
    "request must be of type Request, not a lis": lambda: decode.Engine(
        DEFINITION, params_of(), capacity=4
    ).submit([1, 2]),
    "requests must be of type Sequence, not a Request": lambda: decode.Engine(
        DEFINITION, params_of()
    ).submit_all(decode.Request([1])),
    "prompt must be a list of whole numbers, not 5": lambda: decode.Request(5),
    "logprobs must be of type bool, not 'yes'": lambda: decode.Request([1], logprobs="yes"),
    "params must be a dict with embedding, layer": lambda: evaluate.Scorer(DEFINITION, 5),
    "must be a whole numb": lambda: evaluate.Scorer(DEFINITION, params_of(), batch_tokens="5"),
    "model must be of type Transformer or Scorer or Model, not 'runs/book'": lambda: (
        evaluate.perplexity("runs/book", [1, 2])
    ),
    "tokens must be of type Sequence or ndarray or Array, not 5": lambda: evaluate.perplexity(
        scorer(), 5
    ),
    "a document must be a list of whole numbers, not 'hello'": lambda: evaluate.perplexity(
        scorer(), "hello"
    ),
    "model must be of type Model, not a Scorer": lambda: evaluate.text_perplexity(
        scorer(), ["hello"]
    ),
    "texts must be of type list or tuple, not 'hello'": lambda: evaluate.text_perplexity(
        scorer(), "hello"
    ),
    "unknown value for loop: 'scann'; did you mean 'scan'?": lambda: nn.compiled_logits(
        DEFINITION, loop="scann"
    ),
    "config must be of type RunConfig, not 'tiny'": lambda: checkpoint.Store("a", config="tiny"),
    "name must be of type str or PathLike, not 5": lambda: pretrained.from_pretrained(5),
    "name must be of type str or PathLike, not None": lambda: pretrained.open(None),
    "path must be of type str or PathLike, not a bytes": lambda: lj.load(b"run"),
    "source must be of type Source, not 'runs/book'": lambda: pretrained.load(
        "runs/book", mesh=parallel.make_mesh()
    ),
    "source must be of type Source, not 'runs/book": lambda: pretrained.write_huggingface(
        "runs/book", "export"
    ),
    "destination must be of type str or PathLike, not 5": lambda: lj.Transformer(
        CONFIG, params=params_of()
    ).save(5),
    "tokenizer must be a Tokenizer, not 'bytes'": lambda: lj.Transformer(
        CONFIG, params=params_of(), tokenizer="bytes"
    ),
    "decode must be of type DecodeConfig or NoneType, not a dict": lambda: lj.Transformer(
        CONFIG, params=params_of(), decode={"top_k": 3}
    ),
    "folder must be of type str or PathLike, not 5": lambda: store.Store(5),
    "definition must be of type ModelDef": lambda: train.train_step(
        "tiny", config=config.TrainConfig()
    ),
    "config must be of type TrainConfig, not a di": lambda: train.train_step(DEFINITION, config={}),
    "definition must be of type ModelDef, not 'tiny'": lambda: train.loss_and_gradients("tiny"),
    "rows of at least two tokens, each but the first predicted, not (4, 1)": lambda: (
        train.loss_and_gradients(DEFINITION)(params_of(), np.zeros((4, 1), np.int32))
    ),
    "rows of at least two tokens, each but the first predicted, not (0, 9)": lambda: (
        train.mean_loss(DEFINITION)(params_of(), np.zeros((0, 9), np.int32))
    ),
    "accumulate=3 does not divide a rank's 4 rows": lambda: train.loss_and_gradients(
        DEFINITION, accumulate=3
    )(params_of(), np.zeros((4, 9), np.int32)),
    "sequence_parallel splits 5 positions over 2 tensor ranks": lambda: train.loss_and_gradients(
        ON_TWO, sequence_parallel=True
    )(cases.parameters(ON_TWO), np.zeros((4, 6), np.int32)),
    "config must be of type RunConfig, not 'tiny": lambda: train.run("tiny"),
    "overrides must be of type list or tuple, not 'train.steps=3'": lambda: config.load(
        "tiny", overrides="train.steps=3"
    ),
    "a configuration must be of type str or PathLike, not 5": lambda: config.load(5),
    "a configuration must be of type dict, not 5": lambda: config.from_dict(5),
    "tokens must be [B, T]: these rows have different lengths": lambda: nn.Transformer(
        CONFIG, params=params_of()
    )([[1, 2], [3]]),
}


@pytest.mark.parametrize("message, make", WRONG.items())
def test_constructors_refuse_wrong_types(message, make):
    """In one line that names the argument."""
    with refused(re.escape(message)):
        make()


@pytest.mark.parametrize("kind", [nn.Attention, nn.MLP, nn.RMSNorm, nn.Embedding, nn.Layer])
def test_modules_refuse_a_name(kind):
    with refused("config must be of type ModelConfig or Sizes, not 'tiny'"):
        kind("tiny", rngs=RNGS)


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
