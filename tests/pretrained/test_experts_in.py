"""Hugging Face models with experts in: values by a dense reference, every spelling, every refusal named.

Names and shapes are written out here once more, as transformers has them, and share nothing with the package.
"""

import json

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from ladder_jax import nn, parallel, pretrained
from ladder_jax.config import Biases, RouterSoftmax
from ladder_jax.errors import UserError
from tests import reference
from tests.pretrained import models
from tests.pretrained.test_convert import convert, restored

_SHAPE = {
    "vocab_size": 129,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "num_experts_per_tok": 2,
    "eos_token_id": 2,
}
_OLD = {"rope_theta": 10_000.0, "rope_scaling": None, "torch_dtype": "float32"}
_NEW = {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}, "dtype": "float32"}
CONFIGS = {
    "qwen3_moe": _OLD
    | dict(num_experts=6, moe_intermediate_size=16, norm_topk_prob=True, head_dim=16, decoder_sparse_step=1)
    | dict(mlp_only_layers=[], use_sliding_window=False, sliding_window=None),
    "qwen3_moe of transformers 5": _NEW | dict(num_local_experts=6, moe_intermediate_size=16, head_dim=16),
    "qwen2_moe": _OLD
    | dict(num_experts=6, moe_intermediate_size=16, shared_expert_intermediate_size=40, norm_topk_prob=False)
    | dict(use_sliding_window=False, sliding_window=32768, max_window_layers=21),
    "mixtral": _OLD | dict(num_local_experts=6, sliding_window=None, router_jitter_noise=0.0),
}


def config(name: str, **changes) -> dict:
    return {"model_type": name.split(" ")[0], **_SHAPE, **CONFIGS[name], **changes}


def arrays(told: dict) -> dict[str, np.ndarray]:
    """Tensors [out, in] by transformers' names, one an expert, as the checkpoints on the Hub have them."""
    rng, family = np.random.default_rng(0), told["model_type"]
    width, size = told["hidden_size"], told.get("head_dim") or 8
    matrix = lambda *shape: (1.3 * rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)
    gain = lambda n: (1 + 0.2 * rng.standard_normal(n)).astype(np.float32)
    bias = lambda n: (0.3 * rng.standard_normal(n)).astype(np.float32)
    found = {"model.embed_tokens.weight": matrix(129, width), "model.norm.weight": gain(width)}
    found["lm_head.weight"] = matrix(129, width)
    outputs = {"q_proj": 4 * size, "k_proj": 2 * size, "v_proj": 2 * size}
    block, names = "mlp", ("gate_proj", "up_proj", "down_proj")
    if family == "mixtral":
        block, names = "block_sparse_moe", ("w1", "w3", "w2")
    inner = told.get("moe_intermediate_size", told["intermediate_size"])
    for layer in range(2):
        own = {f"self_attn.{name}.weight": matrix(out, width) for name, out in outputs.items()}
        own["self_attn.o_proj.weight"] = matrix(width, 4 * size)
        own |= {"input_layernorm.weight": gain(width), "post_attention_layernorm.weight": gain(width)}
        if family == "qwen2_moe":
            own |= {f"self_attn.{name}.bias": bias(out) for name, out in outputs.items()}
            shared = told["shared_expert_intermediate_size"]
            own |= {f"mlp.shared_expert.{name}.weight": matrix(shared, width) for name in names[:2]}
            own["mlp.shared_expert.down_proj.weight"] = matrix(width, shared)
            own["mlp.shared_expert_gate.weight"] = matrix(1, width)
        if family == "qwen3_moe":
            own |= {"self_attn.q_norm.weight": gain(size), "self_attn.k_norm.weight": gain(size)}
        own[f"{block}.gate.weight"] = matrix(6, width)
        for e in range(6):
            own |= {f"{block}.experts.{e}.{name}.weight": matrix(inner, width) for name in names[:2]}
            own[f"{block}.experts.{e}.{names[2]}.weight"] = matrix(width, inner)
        found |= {f"model.layers.{layer}.{name}": values for name, values in own.items()}
    return found


def fused(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """As transformers 5 has them in memory: one tensor for all experts' gates and ups, and one for their downs."""
    found = {name: values for name, values in tensors.items() if ".experts." not in name}
    found = {name.replace("block_sparse_moe", "mlp"): values for name, values in found.items()}
    for layer in range(2):
        pick = lambda *names: np.stack([
            np.concatenate([tensors[f"model.layers.{layer}.{block}.experts.{e}.{name}.weight"] for name in names])
            for e in range(6)
            for block in ("mlp", "block_sparse_moe")
            if f"model.layers.{layer}.{block}.experts.{e}.{names[0]}.weight" in tensors
        ])  # fmt: skip
        mixtral = f"model.layers.{layer}.block_sparse_moe.gate.weight" in tensors
        gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
        found[f"model.layers.{layer}.mlp.experts.gate_up_proj"] = pick(gate, up)
        found[f"model.layers.{layer}.mlp.experts.down_proj"] = pick(down)
    return found


def write(folder, name, *, tensors=None, **changes):
    told = config(name, **changes)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({key: value for key, value in told.items() if value is not ...}))
    safetensors.numpy.save_file(arrays(told) if tensors is None else tensors, folder / "model.safetensors")
    return folder


def ours(tensors: dict[str, np.ndarray], told: dict) -> dict:
    """The same values as the reference takes them."""
    size, mixtral = told.get("head_dim") or 8, told["model_type"] == "mixtral"
    block, names = (
        ("block_sparse_moe", ("w1", "w3", "w2")) if mixtral else ("mlp", ("gate_proj", "up_proj", "down_proj"))
    )
    get = lambda name: np.stack([tensors[f"model.layers.{layer}.{name}"] for layer in range(2)])
    heads = lambda name: get(f"self_attn.{name}.weight").swapaxes(1, 2).reshape(2, 32, -1, size)
    attention = {"query": heads("q_proj"), "key": heads("k_proj"), "value": heads("v_proj")}
    attention["out"] = get("self_attn.o_proj.weight").swapaxes(1, 2).reshape(2, -1, size, 32)
    if told["model_type"] == "qwen2_moe":
        for name, theirs in (("query", "q"), ("key", "k"), ("value", "v")):
            attention[f"{name}_bias"] = get(f"self_attn.{theirs}_proj.bias").reshape(2, -1, size)
    if told["model_type"] == "qwen3_moe":
        attention |= {f"{n}_norm": {"scale": get(f"self_attn.{n[0]}_norm.weight")} for n in ("query", "key")}
    each = lambda name: np.stack([get(f"{block}.experts.{e}.{name}.weight").swapaxes(1, 2) for e in range(6)], axis=1)
    mlp = {"router": get(f"{block}.gate.weight").swapaxes(1, 2)}
    mlp["experts"] = dict(zip(("gate", "up", "down"), map(each, names)))
    if told["model_type"] == "qwen2_moe":
        of = lambda name: get(f"mlp.shared_expert.{name}.weight").swapaxes(1, 2)
        mlp["shared"] = {"gate": of("gate_proj"), "up": of("up_proj"), "down": of("down_proj")}
        mlp["shared"]["share"] = get("mlp.shared_expert_gate.weight")[:, 0]
    norms = {"attention_norm": {"scale": get("input_layernorm.weight")}}
    norms["mlp_norm"] = {"scale": get("post_attention_layernorm.weight")}
    return {
        "embedding": {"table": tensors["model.embed_tokens.weight"]},
        "final_norm": {"scale": tensors["model.norm.weight"]},
        "head": {"table": tensors["lm_head.weight"]},
        "layers": {**norms, "attention": attention, "mlp": mlp},
    }


def expected(told: dict, *, over: str) -> np.ndarray:
    shape = reference.Shape(
        layers=2, heads=4, kv_heads=2, vocab=129, kind="standard", theta=told.get("rope_theta", 1e4), experts=(2, over)
    )
    return reference.evaluate(reference.logits, ours(arrays(told), told), models.tokens(), shape)


@pytest.mark.parametrize("form", [lambda tensors: tensors, fused], ids=["an expert", "fused"])
@pytest.mark.parametrize("name", ["qwen3_moe", "qwen2_moe", "mixtral"])
def test_logits(name, form, tmp_path):
    told = config(name)
    source = pretrained.open(write(tmp_path / "model", name, tensors=form(arrays(told))))
    assert source.model.moe.experts == 6 and source.model.moe.top_k == 2
    mesh = parallel.make_mesh(tensor=4)
    logits = nn.compiled_logits(nn.define(source.model, mesh=mesh))(pretrained.load(source, mesh=mesh), models.tokens())
    over = "all" if name == "qwen2_moe" else "chosen"
    assert source.model.moe.softmax is RouterSoftmax(over)
    assert models.error(np.asarray(logits), expected(told, over=over)) <= 1e-4


def test_spellings_of_the_configuration(tmp_path):
    model = lambda name, **changes: (
        pretrained.open(write(tmp_path / str(len(list(tmp_path.iterdir()))), name, **changes)).model
    )
    old, new = model("qwen3_moe"), model("qwen3_moe of transformers 5", norm_topk_prob=True)
    assert old == new and old.qk_norm and old.moe.expert_width == 16 and not old.moe.shared_width
    assert model("qwen3_moe", norm_topk_prob=False).moe.softmax is RouterSoftmax.ALL
    qwen2 = model("qwen2_moe")
    assert qwen2.biases is Biases.QKV and qwen2.moe.shared_width == 40 and qwen2.moe.shared_gate
    assert model("mixtral").moe.expert_width == 24


@pytest.mark.parametrize(
    "name, changes, field",
    [
        ("qwen3_moe", dict(mlp_only_layers=[0]), "mlp_only_layers"),
        ("qwen2_moe", dict(decoder_sparse_step=2), "decoder_sparse_step=2"),
        ("qwen3_moe", dict(num_experts=4), "experts.4.down_proj.weight and 11 more, not in the model"),
        ("qwen3_moe", dict(num_experts=7), r"gate.weight is \(6, 32\), but \(7, 32\)"),
        ("qwen3_moe", dict(moe_intermediate_size=17), r"gate_proj.weight is \(16, 32\), but \(17, 32\)"),
        ("qwen3_moe", dict(num_experts_per_tok=9), "top_k=9 chooses more"),
        ("qwen3_moe", dict(model_type="olmoe"), "model_type='olmoe' is not supported: its query and key norms"),
        ("qwen3_moe", dict(model_type="qwen3"), "num_experts=6 cannot be represented: a qwen3 has no experts"),
        ("mixtral", dict(sliding_window=4096), "sliding_window"),
    ],
)
def test_refusals(name, changes, field, tmp_path):
    tensors = arrays(config(name))
    if changes.get("num_experts") == 4:
        for layer in range(2):
            router = f"model.layers.{layer}.mlp.gate.weight"
            tensors[router] = tensors[router][:4].copy()
    with pytest.raises(UserError, match=field):
        pretrained.open(write(tmp_path / "model", name, tensors=tensors, **changes))


def test_a_missing_expert_is_named(tmp_path):
    tensors = arrays(config("mixtral"))
    del tensors["model.layers.1.block_sparse_moe.experts.5.w2.weight"]
    with pytest.raises(UserError, match="holds no model.layers.1.block_sparse_moe.experts.5.w2.weight"):
        pretrained.open(write(tmp_path / "model", "mixtral", tensors=tensors))


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen2_moe", "mixtral"])
def test_round_trip(name, tmp_path):
    """Out again: the same tensors by the same names, and a configuration of the same model; done once an array."""
    tensors = arrays(config(name))
    source, done = pretrained.open(write(tmp_path / "in", name, tensors=tensors)), []
    pretrained.write_huggingface(source, tmp_path / "out", done=done.append)
    written = safetensors.numpy.load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == tensors.keys() and sorted(done) == sorted(source.arrays)
    assert all(np.array_equal(written[key], tensors[key]) for key in tensors)
    told = json.loads((tmp_path / "out" / "config.json").read_text())
    asked = {**config(name), "max_position_embeddings": 256}
    ignored = ("rope_scaling", "intermediate_size", "eos_token_id", "max_window_layers", "sliding_window")
    assert {key: told.get(key) for key in asked if key not in (*ignored, "router_jitter_noise")} == {
        key: value for key, value in asked.items() if key not in (*ignored, "router_jitter_noise")
    }
    assert pretrained.open(tmp_path / "out").model == source.model


def test_conversion_and_back_onto_ranks_that_do_not_divide(tmp_path, capsys):
    """Into a checkpoint, its last layer farskip; six experts on four ranks, padded, and on one."""
    tensors = {name: values.astype(ml_dtypes.bfloat16) for name, values in arrays(config("qwen2_moe")).items()}
    folder = write(tmp_path / "model", "qwen2_moe", tensors=tensors)
    saved = convert(folder, tmp_path / "out", ladder_layers="1", residual="farskip")
    assert (saved.config.model.residual, saved.config.model.ladder_layers) == ("farskip", "1")
    capsys.readouterr()
    one, four = (restored(saved, tensor=ranks)[1]["layers"]["mlp"]["experts"]["down"] for ranks in (1, 4))
    assert one.shape == (2, 6, 16, 32) and four.shape == (2, 8, 16, 32)
    stored = tensors["model.layers.1.mlp.experts.5.down_proj.weight"].T
    assert np.array_equal(one[1, 5], stored) and np.array_equal(four[1, 5], stored)
    assert not np.asarray(four)[:, 6:].any()
    again = pretrained.open(tmp_path / "out")
    assert again.model == saved.config.model
    with pytest.raises(UserError, match="cannot be written for transformers yet"):
        pretrained.write_huggingface(again, tmp_path / "exported")
    assert not (tmp_path / "exported").exists()
