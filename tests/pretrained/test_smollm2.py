"""A real model, SmolLM2-135M-Instruct, from its GGUF file: its numbers and its text."""

import dataclasses
import functools

import numpy as np
import pytest

from ladder_jax import nn, parallel, pretrained
from ladder_jax.config import Dtype
from tests import cases
from tests.pretrained import smollm2, smollm2_record as record


@functools.cache
def source():
    """In float32."""
    found = pretrained.open(smollm2.file())
    model = dataclasses.replace(found.model, dtype=Dtype.FLOAT32, residual_dtype=Dtype.FLOAT32)
    return dataclasses.replace(found, model=model)


def tokenizer():
    return source().tokenizer


@functools.cache
def params():
    return pretrained.load(source(), mesh=parallel.make_mesh())


@functools.cache
def recorded():
    return dict(np.load(record.FILE))


@pytest.fixture(scope="module", autouse=True)
def forget():
    """The gigabyte goes with the module."""
    yield
    params.cache_clear()


def test_its_tokenizer():
    """Tokens as the model's authors publish them, digits one by one; chats in its own format."""
    read = tokenizer()
    assert read.encode("The capital of France is") == recorded()["prompt_0"].tolist()
    assert read.encode("Hello world 1234") == [19556, 905, 216, 33, 34, 35, 36]
    text = "naïve café 東京 🙂  \n\tx == 10;"
    assert read.decode(read.encode(text)) == text
    assert read.chat([{"role": "user", "content": "Hi"}]) == read.encode(
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
    (known,) = record.known(tokenizer())
    length = max(map(len, texts))
    batch = np.stack([np.pad(text, (0, length - len(text))) for text in (*texts, known)])
    definition = nn.define(source().model, mesh=parallel.make_mesh())
    scores = np.asarray(nn.compiled_logits(definition)(params(), batch))
    assert cases.error(scores[-1, 3:32:4, record.COLUMNS], recorded()["logits"]) <= 1e-4
    for prompt, text, row in zip(prompts, texts, scores):
        best = row.argmax(-1)
        assert best[len(prompt) - 1 : len(text) - 1].tolist() == text[len(prompt) :].tolist()


@pytest.mark.hf
@pytest.mark.filterwarnings("ignore")
def test_the_record_is_what_transformers_computes():
    """As it is installed, with PyTorch."""
    live = record.logits(record.known(tokenizer()))[0, 3::4, record.COLUMNS]
    assert cases.error(live, recorded()["logits"]) <= 1e-4
    for n in range(len(record.PROMPTS)):
        greedy = record.greedy(recorded()[f"prompt_{n}"].tolist())
        assert greedy == recorded()[f"greedy_{n}"].tolist()
