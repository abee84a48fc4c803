"""A Llama-family decoder, dense or with experts, with the residual topology of its configuration
(arXiv 2501.06589).

ladder_jax copies this file into exported models. It needs only torch and transformers 5, and is run
by `AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)`. Sublayers h_1, h_2, ...
alternate attention and MLP; with x_0 the embedding and d_i the delay of sublayer i,

    x_i = x_{i-1} + h_i(x_{max(0, i-1-d_i)})

Delay 0 is the standard Transformer, 1 is ladder, k is ladder-k. With experts h_i may also be split
(farskip, arXiv 2511.11505). On one device this is not faster. It is for evaluation, fine-tuning and
generation in PyTorch, with the same results as ladder_jax.
"""

import copy

import torch
from torch import nn
from torch.nn import functional
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaForCausalLM,
    LlamaMLP,
    LlamaModel,
    LlamaPreTrainedModel,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)


class LadderConfig(LlamaConfig):
    """Llama's fields, with experts Qwen2-MoE's, and four more.

    residual: standard, ladder, ladder-K (delay K), parallel, parallel-shared-norm, parallel-ladder
        or farskip.
    ladder_layers: the layers of that kind, counted from 0; the others are standard. None for all.
    biases: none, qkv, attention or all. qk_norm: whether queries and keys are normalised, each head
    (true) or "all-heads" together.
    """

    model_type = "ladder_jax"
    base_model_tp_plan = None  # Llama's splits what a norm over all heads needs whole
    residual = "ladder"
    ladder_layers = None
    biases = "none"
    qk_norm = False
    num_experts = 0
    num_experts_per_tok = 2
    moe_intermediate_size = 128
    norm_topk_prob = True
    shared_expert_intermediate_size = 0
    shared_expert_gate = False
    mlp_only_layers = ()

    def validate_architecture(self):
        """The number of heads need not divide the width."""


def delays(config):
    """For each layer: the delays of attention and MLP, and whether their outputs are added
    together.
    """
    kinds = {
        "standard": (0, 0, False),
        "ladder": (1, 1, False),
        "farskip": (1, 1, False),
        "parallel": (0, 1, True),
        "parallel-shared-norm": (0, 1, True),
        "parallel-ladder": (2, 3, True),
    }
    residual = config.residual
    name, _, number = residual.partition("-")
    if name == "ladder" and number.isdigit():
        kinds[residual] = (int(number), int(number), False)
    if residual not in kinds:
        allowed = f"ladder-K, {', '.join(kinds)}"
        raise ValueError(f"unknown residual {residual!r} (allowed: {allowed})")
    layers = range(config.num_hidden_layers)
    chosen = layers if config.ladder_layers is None else config.ladder_layers
    found = [kinds[residual] if layer in chosen else kinds["standard"] for layer in layers]
    # The first layers may have no experts: no routed output is pending after them.
    dense = len(config.mlp_only_layers)
    if is_farskip(config) and dense:
        for layer in set(chosen).intersection(range(dense)):
            found[layer] = kinds["parallel"]
        found[dense] = (0, *found[dense][1:])
    return found


def is_farskip(config):
    """Without a shared expert, farskip is ladder."""
    return config.residual == "farskip" and config.shared_expert_intermediate_size > 0


def delayed(streams, delay):
    """The residual stream `delay` sublayers ago."""
    return streams[max(0, len(streams) - 1 - delay)]


def with_biases(config, **fields):
    """A copy of the configuration with Llama's fields of the biases, and other fields."""
    copied = copy.copy(config)
    copied.attention_bias = config.biases != "none"
    copied.mlp_bias = config.biases == "all"
    for name, value in fields.items():
        setattr(copied, name, value)
    return copied


class LadderAttention(LlamaAttention):
    def __init__(self, config, layer):
        super().__init__(with_biases(config), layer)
        if config.biases == "qkv":
            self.o_proj = nn.Linear(self.o_proj.in_features, config.hidden_size, bias=False)
        self.norms_all_heads = config.qk_norm == "all-heads"

        def norm(size):
            if not config.qk_norm:
                return nn.Identity()
            return nn.RMSNorm(size if self.norms_all_heads else self.head_dim, config.rms_norm_eps)

        self.q_norm = norm(self.q_proj.out_features)
        self.k_norm = norm(self.k_proj.out_features)

    def heads(self, projected):
        return projected.unflatten(-1, (-1, self.head_dim))

    def normed_heads(self, norm, projected):
        if self.norms_all_heads:
            return self.heads(norm(projected))
        return norm(self.heads(projected))

    def forward(self, x, position_embeddings, mask, cache):
        query = self.normed_heads(self.q_norm, self.q_proj(x)).transpose(1, 2)
        key = self.normed_heads(self.k_norm, self.k_proj(x)).transpose(1, 2)
        query, key = apply_rotary_pos_emb(query.float(), key.float(), *position_embeddings)
        query = query.to(x.dtype)
        key = key.to(x.dtype)
        value = self.heads(self.v_proj(x)).transpose(1, 2)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        out, _ = sdpa_attention_forward(self, query, key, value, mask)
        return self.o_proj(out.flatten(2))


class LadderMLP(LlamaMLP):
    def __init__(self, config, width):
        super().__init__(with_biases(config, intermediate_size=width))


class LadderRouter(nn.Linear):
    """In float32. Called as a module, as accelerate loads offloaded weights for a module's call."""

    def forward(self, x):
        return functional.linear(x.float(), self.weight.float())


class LadderExperts(nn.Module):
    """A router chooses some of the experts for each token; a shared expert is every token's."""

    def __init__(self, config):
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.renormalised = config.norm_topk_prob
        self.gate = LadderRouter(config.hidden_size, config.num_experts, bias=False)
        experts = (
            LadderMLP(config, config.moe_intermediate_size) for _ in range(config.num_experts)
        )
        self.experts = nn.ModuleList(experts)
        shared = config.shared_expert_intermediate_size
        self.shared_expert = LadderMLP(config, shared) if shared else None
        self.shared_expert_gate = (
            nn.Linear(config.hidden_size, 1, bias=False) if config.shared_expert_gate else None
        )

    def forward(self, x):
        return self.routed(x) + self.shared(x)

    def routed(self, x):
        logits = self.gate(x)
        ranked, order = logits.sort(dim=-1, descending=True, stable=True)
        chosen = ranked[..., : self.top_k]
        total = (chosen if self.renormalised else logits).logsumexp(-1, keepdim=True)
        weights = torch.zeros_like(logits)
        weights = weights.scatter(-1, order[..., : self.top_k], (chosen - total).exp())
        out = torch.zeros_like(x, dtype=torch.float32)
        for index, expert in enumerate(self.experts):
            weight = weights[..., index]
            token = weight.nonzero(as_tuple=True)
            of_tokens = expert(x[token]).float() * weight[token][:, None]
            out = out.index_put(token, of_tokens, accumulate=True)
        return out.to(x.dtype)

    def shared(self, x):
        if self.shared_expert is None:
            return 0
        out = self.shared_expert(x)
        if self.shared_expert_gate is None:
            return out
        return out * self.shared_expert_gate(x).sigmoid()


class LadderLayer(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.attention_delay, self.mlp_delay, self.joint = delays(config)[layer]
        self.is_last = layer == config.num_hidden_layers - 1
        self.depth = 1 + max(max(attention, mlp) for attention, mlp, _ in delays(config))
        has_experts = config.num_experts > 0 and layer not in config.mlp_only_layers
        self.self_attn = LadderAttention(config, layer)
        if has_experts:
            self.mlp = LadderExperts(config)
        else:
            self.mlp = LadderMLP(config, config.intermediate_size)
        self.farskip = is_farskip(config) and has_experts and self.mlp_delay > 0
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.shared_norm = config.residual == "parallel-shared-norm"
        if not self.shared_norm:
            self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, streams, attention_mask, position_embeddings, **kwargs):
        """`streams`: the residual stream after each sublayer so far, oldest first; of the first
        layer the embedding. Returns them with this layer's two; of the last layer its last one.
        """
        if torch.is_tensor(streams):
            streams = [streams]
        cache = kwargs.get("cache", kwargs.get("past_key_values"))  # as transformers calls it
        newest = streams[-1]
        mlp_norm = self.input_layernorm if self.shared_norm else self.post_attention_layernorm
        normed = self.input_layernorm(delayed(streams, self.attention_delay))
        attended = self.self_attn(normed, position_embeddings, attention_mask, cache)
        if self.joint:
            # The MLP's delay counts from the MLP, one sublayer after attention, so one is
            # subtracted here.
            normed = mlp_norm(delayed(streams, self.mlp_delay - 1))
            middle = last = newest + (attended + self.mlp(normed))
        elif self.farskip:
            # the shared expert's output is added with attention's, before the routed ones'
            normed = mlp_norm(newest)
            middle = newest + (attended + self.mlp.shared(normed))
            last = middle + self.mlp.routed(normed)
        else:
            middle = newest + attended
            normed = mlp_norm(delayed([*streams, middle], self.mlp_delay))
            last = middle + self.mlp(normed)
        return last if self.is_last else [*streams, middle, last][-self.depth :]


class LadderRotaryEmbedding(LlamaRotaryEmbedding):
    def forward(self, x, position_ids):
        return super().forward(x.float(), position_ids)


class LadderPreTrainedModel(LlamaPreTrainedModel):
    config_class = LadderConfig
    supports_gradient_checkpointing = False
    _no_split_modules = ["LadderLayer"]
    _supports_flash_attn = False
    _supports_flex_attn = False
    _supports_attention_backend = False
    _can_record_outputs = {}


class LadderModel(LadderPreTrainedModel, LlamaModel):
    def __init__(self, config):
        super(LlamaModel, self).__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            LadderLayer(config, layer) for layer in range(config.num_hidden_layers)
        )
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = LadderRotaryEmbedding(config)
        self.post_init()


class LadderForCausalLM(LadderPreTrainedModel, LlamaForCausalLM):
    def __init__(self, config):
        super(LlamaForCausalLM, self).__init__(config)
        self.model = LadderModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()
