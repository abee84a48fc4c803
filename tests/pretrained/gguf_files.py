"""The tiny Hugging Face models as GGUF files, written as llama.cpp's own converter does, by the
`gguf` package.

The names and the order of rotary pairs are written out here once more, and share nothing with the
package.
"""

import json

import gguf
import numpy as np
import tokenizers
from gguf import GGMLQuantizationType as Kind

from tests import tokenizers as tiny
from tests.pretrained import models

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def name_of(theirs):
    """model.layers.3.self_attn.q_proj.weight -> blk.3.attn_q.weight"""
    stem, _, ending = theirs.rpartition(".")
    if not stem.startswith("model.layers."):
        return f"{_NAMES[stem]}.{ending}"
    _, _, layer, below = stem.split(".", 3)
    return f"blk.{layer}.{_NAMES[below]}.{ending}"


def interleaved(rows, *, heads):
    """Row i of the first half of a head to 2i, of the second half to 2i + 1."""
    halves = rows.reshape(heads, 2, -1, *rows.shape[1:])
    return np.stack([halves[:, 0], halves[:, 1]], axis=2).reshape(rows.shape)


def write(
    file,
    name,
    *,
    kind=Kind.F32,
    architecture=None,
    tokenizer=None,
    settings=None,
    tensors=None,
    seed=0,
    **changes,
):
    """The model called `name`; its matrices of type `kind`, where their rows can be, the rest
    float32.

    settings: below the architecture's name, or the tokenizer's, set or replaced, or left out if
        None; tensors: likewise.
    """
    told = models.config(name, **changes)
    family = {"mistral": "llama"}.get(told["model_type"], told["model_type"])
    heads = told["num_attention_heads"]
    kv = told.get("num_key_value_heads") or told["num_attention_heads"]
    size = told.get("head_dim") or told["hidden_size"] // heads
    rope = told.get("rope_parameters") or {}
    below = {
        "block_count": told["num_hidden_layers"],
        "context_length": told["max_position_embeddings"],
        "embedding_length": told["hidden_size"],
        "feed_forward_length": told["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": kv,
        "attention.key_length": size,
        "attention.value_length": size,
        "rope.dimension_count": size,
        "rope.freq_base": float(rope.get("rope_theta") or told.get("rope_theta")),
        "attention.layer_norm_rms_epsilon": told["rms_norm_eps"],
        "vocab_size": told["vocab_size"],
    }
    writer = gguf.GGUFWriter(str(file), architecture := architecture or family)
    for setting, value in {**below, **_vocabulary(tokenizer), **(settings or {})}.items():
        whole = setting if setting.startswith("tokenizer") else f"{architecture}.{setting}"
        if value is not None:
            writer.add_key_value(whole, value, gguf.GGUFValueType.get_type(value))
    interleaved_heads = {"q_proj": heads, "k_proj": kv} if family == "llama" else {}
    arrays = {}
    for theirs, values in models.weights(told, seed=seed).items():
        if of := interleaved_heads.get(theirs.split(".")[-2]):
            values = interleaved(values, heads=of)
        arrays[name_of(theirs)] = values
    for stored, values in {**arrays, **(tensors or {})}.items():
        if values is None:
            continue
        if kind is not Kind.F32 and values.ndim == 2 and values.shape[-1] % 32 == 0:
            values = gguf.quants.quantize(values, kind)
        writer.add_tensor(stored, values, raw_dtype=kind if values.dtype == np.uint8 else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _vocabulary(tokenizer):
    """As converters store a byte-level tokenizer; without one, a vocabulary of bytes and three
    special tokens.
    """
    made = json.loads((tokenizer or small()).to_str())
    vocabulary = dict(made["model"]["vocab"])
    kinds = dict.fromkeys(vocabulary, 1)
    for added in made["added_tokens"]:
        vocabulary[added["content"]] = added["id"]
        kinds[added["content"]] = 3 if added["special"] else 4
    pieces = sorted(vocabulary, key=vocabulary.get)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.token_type": [kinds[piece] for piece in pieces],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in made["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": vocabulary[tiny.BEGIN],
        "tokenizer.ggml.eos_token_id": vocabulary[tiny.END],
        "tokenizer.ggml.add_bos_token": tokenizer is not None,
        "tokenizer.chat_template": tiny.TEMPLATE,
    }


def small():
    """Of 100 tokens, which know only letters: for models of 129."""
    model = {tiny.BEGIN: 0, tiny.END: 1} | {
        chr(code): index for index, code in enumerate(range(0x21, 0x7F), start=2)
    }
    made = tokenizers.Tokenizer(
        tokenizers.models.BPE({**model, "Ġ": 96, "th": 97, "Ċ": 98}, [("t", "h")])
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens([tiny.BEGIN, tiny.END])
    return made
