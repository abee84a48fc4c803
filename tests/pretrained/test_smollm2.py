"""A real model, SmolLM2-135M-Instruct, from its GGUF file: its numbers, its text, and its
hybrids'.
"""

import dataclasses
import functools
import os
import resource
import subprocess
import sys
import tempfile

import jax
import numpy as np
import pytest

from ladder_jax import nn, parallel, pretrained
from ladder_jax.config import Dtype
from tests import reference
from tests.pretrained import models, smollm2
from tests.pretrained import smollm2_record as record


@functools.cache
def source() -> pretrained.Source:
    """In float32."""
    found = pretrained.open(smollm2.file())
    model = dataclasses.replace(found.model, dtype=Dtype.FLOAT32, residual_dtype=Dtype.FLOAT32)
    return dataclasses.replace(found, model=model)


def tokenizer():
    return source().tokenizer


@functools.cache
def params():
    return pretrained.load(source(), mesh=parallel.make_mesh())


def hybrid(name: str) -> nn.ModelDef:
    residual, ladder_layers, _ = record.HYBRIDS[name]
    model = dataclasses.replace(source().model, residual=residual, ladder_layers=ladder_layers)
    return nn.define(model, mesh=parallel.make_mesh())


@functools.cache
def recorded():
    return dict(np.load(record.FILE))


@pytest.fixture(scope="module", autouse=True)
def forget():
    """The gigabyte goes with the module."""
    yield
    params.cache_clear()


def test_what_it_is():
    model = source().model
    shape = dict(
        num_layers=30,
        d_model=576,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        d_ff=1536,
        vocab_size=49152,
    )
    assert shape.items() <= dataclasses.asdict(model).items()
    assert (model.rope_theta, model.norm_eps, model.tie_embeddings, source().context) == (
        1e5,
        1e-5,
        True,
        8192,
    )
    assert pretrained.open(smollm2.file()).model.dtype is Dtype.BFLOAT16


def test_its_tokenizer():
    """Tokens as the model's authors publish them, digits one by one; chats in its own format."""
    read = tokenizer()
    assert read.encode("The capital of France is") == recorded()["prompt_0"].tolist()
    assert read.encode("Hello world 1234") == [19556, 905, 216, 33, 34, 35, 36]
    text = "naïve café 東京 🙂  \n\tx == 10;"
    assert read.decode(read.encode(text)) == text
    asked = read.chat([{"role": "user", "content": "Hi"}])
    assert asked == read.encode(
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert read.stop_ids == (2,)


def test_logits_and_greedy_text_are_those_of_transformers():
    """One forward pass: each of transformers' 64 tokens is the most probable one after those before
    it.
    """
    prompts = [recorded()[f"prompt_{n}"] for n in range(len(record.PROMPTS))]
    texts = [
        np.concatenate([prompt, recorded()[f"greedy_{n}"]]) for n, prompt in enumerate(prompts)
    ]
    known = record.rows(tokenizer(), count=1, length=32)[0, :-1]
    length = max(map(len, texts))
    batch = np.stack([np.pad(text, (0, length - len(text))) for text in (*texts, known)])
    scores = np.asarray(nn.compiled_logits(hybrid("standard"))(params(), batch))
    assert models.error(scores[-1, 3:32:4, record.COLUMNS], recorded()["logits"]) <= 1e-4
    for prompt, text, row in zip(prompts, texts, scores):
        best = row.argmax(-1)
        assert best[len(prompt) - 1 : len(text) - 1].tolist() == text[len(prompt) :].tolist()


def loss(name: str, tokens: np.ndarray) -> float:
    return models.loss(nn.compiled_logits(hybrid(name))(params(), tokens[:, :-1]), tokens)


@pytest.mark.parametrize(
    "name, number, first",
    [("last-10-delay-2", 2, 20), pytest.param("last-15", 1, 15, marks=pytest.mark.full)],
)
def test_hybrids_equal_the_dense_reference(name, number, first):
    """The reference is tests/reference.py, in float64, on 48 tokens."""
    tokens = record.rows(tokenizer(), count=1, length=48)
    values = jax.tree.map(np.asarray, params())
    # all that follows is, too
    values["embedding"] = {"table": values["embedding"]["table"].astype(np.float64)}
    of = dict(layers=30, heads=9, kv_heads=3, vocab=49152, theta=1e5)
    shape = reference.Shape(kind="ladder", number=number, ladder=tuple(range(first, 30)), **of)
    assert loss(name, tokens) == pytest.approx(
        reference.loss_eagerly(values, tokens, shape), abs=1e-3
    )


@pytest.mark.hf
@pytest.mark.filterwarnings("ignore")
class TestLive:
    """Against transformers and PyTorch as they are installed."""

    def test_logits(self):
        tokens = record.rows(tokenizer(), count=2, length=128)[:, :-1]
        live = record.logits(tokens)
        assert (
            models.error(np.asarray(nn.compiled_logits(hybrid("standard"))(params(), tokens)), live)
            <= 1e-4
        )

    def test_greedy_text_is_the_same_token_for_token(self):
        from ladder_jax.config import DecodeConfig
        from ladder_jax.decode.generate import Generator

        prompts = [tokenizer().encode(prompt) for prompt in record.PROMPTS]
        generator = Generator(hybrid("standard"), params())
        ours = generator.tokens(prompts, config=DecodeConfig(max_new_tokens=record.NEW_TOKENS))
        for n, (prompt, tokens) in enumerate(zip(prompts, ours)):
            live = record.greedy(prompt)
            assert list(tokens) == live == recorded()[f"greedy_{n}"].tolist()

    @pytest.mark.parametrize("name", record.HYBRIDS)
    def test_hybrids_agree_on_2048_tokens(self, name):
        tokens = record.rows(tokenizer(), count=2, length=1024)
        live = record.hybrid_loss(tokens, record.HYBRIDS[name][2])
        assert loss(name, tokens) == pytest.approx(live, abs=1e-3)
        assert live == pytest.approx(float(recorded()[name]), abs=1e-3)


@pytest.mark.full
def test_the_first_token_comes_soon():
    """One command, without a compilation cache; on 2 cores the wall's seconds are at most the
    processors'.
    """
    plain = {
        name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_"))
    }
    words = [
        "generate",
        str(smollm2.file()),
        "--prompt",
        "Once upon a time",
        "--max-new-tokens",
        "1",
    ]
    with tempfile.TemporaryDirectory() as cache:
        environment = {**plain, "JAX_PLATFORMS": "cpu", "LADDER_JAX_CACHE": cache}
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [sys.executable, "-m", "ladder_jax", *words]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.stdout == "Once upon a time,\n", done.stderr
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 30
