"""Tiny Hugging Face models with experts, their weights from NumPy: the same bytes wherever they are made.

Names and shapes are written out here once more, as transformers has them, and share nothing with the package.
"""

import collections
import json

import numpy as np
import safetensors.numpy

from tests.pretrained import models

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
    "olmoe": _OLD | dict(num_experts=6, norm_topk_prob=False, clip_qkv=None, attention_bias=False),
}
_FIRST = dict(mlp_only_layers=[0], num_hidden_layers=3, intermediate_size=40)  # the first layer without experts
CONFIGS["qwen3_moe with a dense layer"] = CONFIGS["qwen3_moe"] | _FIRST
CONFIGS["qwen2_moe with a dense layer"] = CONFIGS["qwen2_moe"] | _FIRST
FAMILIES = "qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "qwen3_moe with a dense layer"


def config(name: str, **changes) -> dict:
    return {"model_type": name.split(" ")[0], **_SHAPE, **CONFIGS[name], **changes}


def arrays(told: dict) -> dict[str, np.ndarray]:
    """Tensors [out, in] by transformers' names, one an expert, as the checkpoints on the Hub have them."""
    rng = np.random.default_rng(0)
    family, width = told["model_type"], told["hidden_size"]
    size = told.get("head_dim") or 8
    queries, keys = 4 * size, 2 * size
    inner = told.get("moe_intermediate_size", told["intermediate_size"])
    block, gate, up, down = "mlp", "gate_proj", "up_proj", "down_proj"
    if family == "mixtral":
        block, gate, up, down = "block_sparse_moe", "w1", "w3", "w2"
    found = {}

    def draw(name, *shape):
        found[name] = models.drawn(rng, name, shape).astype(np.float32)

    def draw_mlp(name, inner):
        draw(f"{name}.{gate}.weight", inner, width)
        draw(f"{name}.{up}.weight", inner, width)
        draw(f"{name}.{down}.weight", width, inner)

    draw("model.embed_tokens.weight", 129, width)
    draw("model.norm.weight", width)
    draw("lm_head.weight", 129, width)
    outputs = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
    for n in range(told["num_hidden_layers"]):
        layer = f"model.layers.{n}"
        attention = f"{layer}.self_attn"
        for name, out in outputs.items():
            draw(f"{attention}.{name}.weight", out, width)
        draw(f"{attention}.o_proj.weight", width, queries)
        draw(f"{layer}.input_layernorm.weight", width)
        draw(f"{layer}.post_attention_layernorm.weight", width)
        if family == "qwen2_moe":
            for name, out in outputs.items():
                draw(f"{attention}.{name}.bias", out)
        dense = n in told.get("mlp_only_layers", ())
        if dense:
            draw_mlp(f"{layer}.mlp", told["intermediate_size"])
        elif family == "qwen2_moe":
            draw_mlp(f"{layer}.mlp.shared_expert", told["shared_expert_intermediate_size"])
            draw(f"{layer}.mlp.shared_expert_gate.weight", 1, width)
        if family in ("qwen3_moe", "olmoe"):  # olmoe's are of all heads together
            draw(f"{attention}.q_norm.weight", queries if family == "olmoe" else size)
            draw(f"{attention}.k_norm.weight", keys if family == "olmoe" else size)
        if not dense:
            draw(f"{layer}.{block}.gate.weight", 6, width)
            for expert in range(6):
                draw_mlp(f"{layer}.{block}.experts.{expert}", inner)
    return found


def fused(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """As transformers 5 has them in memory: one tensor for all experts' gates and ups, and one for their downs."""
    found = {}
    experts = collections.defaultdict(list)
    for name, values in tensors.items():
        name = name.replace("block_sparse_moe", "mlp")
        block, _, below = name.partition(".experts.")
        if below:
            _, projection, _ = below.split(".")
            experts[block, projection].append(values)
        else:
            found[name] = values
    for block in {block for block, _ in experts}:
        names = ("w1", "w3", "w2") if (block, "w1") in experts else ("gate_proj", "up_proj", "down_proj")
        gate, up, down = (np.stack(experts[block, name]) for name in names)
        found[f"{block}.experts.gate_up_proj"] = np.concatenate([gate, up], axis=1)
        found[f"{block}.experts.down_proj"] = down
    return found


def write(folder, name, *, tensors=None, **changes):
    told = config(name, **changes)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({key: value for key, value in told.items() if value is not ...}))
    safetensors.numpy.save_file(arrays(told) if tensors is None else tensors, folder / "model.safetensors")
    return folder
