"""GGUF in: the values, the configuration and the tokenizer that were written, or one line that says
why not.
"""

import dataclasses
import json

import gguf
import numpy as np
import pytest
import tokenizers
from gguf import GGMLQuantizationType as Kind

from ladder_jax import pretrained
from ladder_jax.config import Dtype, RopeScaling
from ladder_jax.data import tokenizer as tokenizer_folders
from ladder_jax.errors import UserError
from ladder_jax.nn import attention
from ladder_jax.pretrained.gguf.tokenizer import RULES
from ladder_jax.pretrained.source import Key
from tests import tokenizers as tiny
from tests.pretrained import conftest, gguf_files, models

TEXT = "the cat's 1234 mats,  SAT on\n\n naïve café 東京 🙂\t(x==1);  "


def refused(path):
    message = conftest.refused(path)
    assert str(path) in message
    return message


@pytest.mark.parametrize("name", models.CONFIGS)
def test_every_family_holds_what_its_hugging_face_form_holds(name, tmp_path):
    """Heads in the other order for llama, biases, query/key norms, tied tables: bit for bit, layer
    for layer.
    """
    changes = {
        "llama-3.1": {"rope_scaling": None},
        "llama-3.2": {"rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}},
    }.get(name, {})
    theirs = pretrained.open(models.write(tmp_path / "hf", name, **changes))
    ours = pretrained.open(gguf_files.write(tmp_path / "file.gguf", name, **changes))
    assert ours.model == theirs.model
    assert ours.context == 256
    assert ours.generation == {"bos_token_id": 0, "eos_token_id": [1]}
    models.same_arrays(ours, theirs)


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1])
def test_types(kind, tmp_path, monkeypatch):
    """Halves stay what they are, all else becomes float32; in blocks of rows as whole."""
    monkeypatch.setattr("ladder_jax.pretrained.gguf.file.BLOCK", 256)
    source = pretrained.open(gguf_files.write(tmp_path / "file.gguf", "llama-2", kind=kind))
    stored = {Kind.F16: "float16", Kind.BF16: "bfloat16"}.get(kind, "float32")
    values = models.weights(models.config("llama-2"))
    up = source.arrays[Key("layers/mlp/up", 1)]
    assert up.read().dtype == up.dtype == stored
    assert source.model.dtype is Dtype.BFLOAT16
    packed = gguf.quants.quantize(values["model.layers.1.mlp.up_proj.weight"], kind)
    assert (up.read().T == gguf.quants.dequantize(packed, kind)).all()
    assert source.arrays[Key("final_norm/scale")].dtype == np.float32


def test_llama_3_scaling_is_known_by_its_factors(tmp_path):
    def write(name, **tensors):
        return gguf_files.write(tmp_path / name, "llama-3.1", tensors=tensors, rope_scaling=None)

    plain = pretrained.open(write("plain.gguf")).model
    scaled = dataclasses.replace(plain, rope_scaling=RopeScaling(factor=32.0))
    factors = attention.rotary_frequencies(plain) / attention.rotary_frequencies(scaled)
    factors = np.asarray(factors, np.float32)
    assert pretrained.open(write("scaled.gguf", **{"rope_freqs.weight": factors})).model == scaled
    other = write("other.gguf", **{"rope_freqs.weight": factors + np.float32(0.1)})
    assert "rope_freqs.weight are not those of Llama 3's scaling" in refused(other)


SMALL = np.zeros((64, 32), np.float32)


@pytest.mark.parametrize(
    "settings, named",
    [
        ({"expert_count": 8}, "llama.expert_count=8"),
        ({"attention.sliding_window": 4096}, "llama.attention.sliding_window=4096"),
        ({"rope.scaling.type": "yarn"}, "llama.rope.scaling.type='yarn'"),
        ({"rope.dimension_count": 4}, "llama.rope.dimension_count=4"),
        ({"logit_scale": 2.0}, "llama.logit_scale=2.0"),
        (
            {"attention.head_count_kv": [4, 2]},
            "llama.attention.head_count_kv must be of type int, not a list",
        ),
        ({"attention.head_count": 6}, "model.num_kv_heads=4 does not divide model.num_heads=6"),
        ({"block_count": None}, "has no llama.block_count"),
        ({"block_count": 3}, "holds no blk.2."),
        ({"block_count": 1}, "blk.1."),
        ({"feed_forward_length": 64}, "ffn_down.weight is (32, 48), but (32, 64)"),
        ({"tokenizer.ggml.model": "bert"}, "allowed: gpt2, llama"),
        ({"tokenizer.ggml.pre": "smolm"}, "did you mean 'smollm'?"),
        ({"tokenizer.ggml.tokens": None}, "its tokenizer is not a valid one"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "its tokenizer is not a valid one"),
        ({"tokenizer.ggml.eos_token_id": 1000}, "its tokenizer is not a valid one"),
        ({"tokenizer.ggml.merges": ["t h", "x"]}, "its tokenizer is not a valid one"),
        ({"tokenizer.ggml.merges": ["t q"]}, "its tokenizer is not a valid one"),
    ],
)
def test_what_cannot_be_represented_is_named(settings, named, tmp_path):
    assert named in refused(gguf_files.write(tmp_path / "file.gguf", "llama-2", settings=settings))


@pytest.mark.parametrize(
    "named, tensors",
    {
        "holds no blk.1.ffn_up.weight": {"blk.1.ffn_up.weight": None},
        "blk.1.attn_q.weight is (64, 32), but (32, 32)": {"blk.1.attn_q.weight": SMALL},
        "holds blk.0.ffn_gate_exps.weight": {"blk.0.ffn_gate_exps.weight": SMALL},
        "has no table token_embd.weight": {"token_embd.weight": None, "output.weight": None},
        "output_norm.weight is of type I32": {"output_norm.weight": np.zeros(32, np.int32)},
    }.items(),
)
def test_tensors_that_do_not_fit_are_named(tensors, named, tmp_path):
    assert named in refused(gguf_files.write(tmp_path / "file.gguf", "llama-2", tensors=tensors))


def test_another_architecture(tmp_path):
    message = refused(gguf_files.write(tmp_path / "file.gguf", "llama-2", architecture="qwen3moe"))
    assert "'qwen3moe'; did you mean 'qwen3'? (allowed: llama, qwen2, qwen3)" in message


def test_damage(tmp_path):
    """Cut off anywhere. (With any bytes of the head changed: in test_fuzz.py.)"""
    whole = gguf_files.write(tmp_path / "whole.gguf", "llama-2").read_bytes()
    file = tmp_path / "file.gguf"
    for length in (0, 3, 4, 12, 30, 200, 2000, len(whole) // 2, len(whole) - 33):
        file.write_bytes(whole[:length])
        assert (
            "is damaged or incomplete" in (said := refused(file))
            or "is no pretrained model" in said
        )
    file.write_bytes(whole)
    value = pretrained.open(file).arrays[Key("layers/attention/value", 1)]
    file.write_bytes(whole[:-1000])
    with pytest.raises(UserError, match="file.gguf' was cut short"):
        value.read()


def test_a_byte_level_tokenizer_is_what_it_was(tmp_path):
    """The same tokens, the same bytes, the same chat prompts as from the folder that it was
    converted from.
    """
    made = tiny.byte_level()
    file = gguf_files.write(tmp_path / "file.gguf", "llama-2", tokenizer=made, vocab_size=320)
    ours = pretrained.open(file).tokenizer
    theirs = tokenizer_folders.load(tiny.folder(tmp_path / "theirs", made=made))
    for text in (*tiny.SENTENCES, TEXT, f"{tiny.BEGIN} a <tool>{tiny.END}", ""):
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text))
    talk = [{"role": "user", "content": "the cat?"}]
    assert ours.chat(talk) == theirs.chat(talk)
    assert ours.stop_ids == theirs.stop_ids


def test_a_sentencepiece_tokenizer_is_what_it_was(tmp_path):
    """Stored as pieces and scores, without merges."""
    made = tiny.byte_fallback()
    model = json.loads(made.to_str())["model"]
    pieces = sorted(model["vocab"], key=model["vocab"].get)
    rank = {
        "".join(pair): -float(index)
        for index, pair in reversed(list(enumerate(model["merges"], start=1)))
    }
    kinds = [
        6 if piece.startswith("<0x") else {"<unk>": 2, tiny.BEGIN: 3, tiny.END: 3}.get(piece, 1)
        for piece in pieces
    ]
    settings = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": None,
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.scores": [rank.get(piece, -1e4) for piece in pieces],
        "tokenizer.ggml.merges": None,
        "tokenizer.ggml.unknown_token_id": pieces.index("<unk>"),
        "tokenizer.ggml.bos_token_id": pieces.index(tiny.BEGIN),
        "tokenizer.ggml.eos_token_id": pieces.index(tiny.END),
        "tokenizer.ggml.add_bos_token": None,
    }
    file = gguf_files.write(tmp_path / "file.gguf", "llama-2", settings=settings, vocab_size=400)
    ours = pretrained.open(file).tokenizer
    for text in (*tiny.SENTENCES, TEXT):
        assert ours.encode(text) == [
            pieces.index(tiny.BEGIN),
            *made.encode(text, add_special_tokens=False).ids,
        ]
        assert ours.decode(ours.encode(text)) == text


@pytest.mark.parametrize(
    "name, words",
    {
        "gpt-2": ["it", "'", "S", " 12345", " Ab", "!!", "\n\n", " a"],
        "smollm": ["it", "'", "S", " ", "1", "2", "3", "4", "5", " Ab", "!!", "\n\n", " a"],
        "llama-bpe": ["it", "'S", " ", "123", "45", " Ab", "!!\n\n", " a"],
        "qwen2": ["it", "'S", " ", "1", "2", "3", "4", "5", " Ab", "!!\n\n", " a"],
        "default": ["it", "'", "S", " ", "123", "45", " Ab", "!!", "\n\n", " a"],
    }.items(),
)
def test_words(name, words):
    rule = RULES[name]
    split = lambda pattern: tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    made = tokenizers.pre_tokenizers.Sequence([split(pattern) for pattern in rule.patterns])
    assert [word for word, _ in made.pre_tokenize_str("it'S 12345 Ab!!\n\n a")] == words
