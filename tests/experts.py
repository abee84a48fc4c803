"""What the tests of experts share: small models, and the dense float64 reference's values of
them.
"""

import dataclasses
import functools

import autograd.numpy as np
import jax

from ladder_jax import nn, parallel
from ladder_jax.config import ExpertParallelism, Quantize
from tests import cases, reference

# name of the test: (model.residual, model.ladder_layers, the reference's kind, number and layers)
TOPOLOGIES = {
    **{name: cases.TOPOLOGIES[name] for name in ("standard", "ladder")},
    "farskip": ("farskip", None, "farskip", 1, None),
    **{name: case for name, case in cases.TOPOLOGIES.items() if name.startswith("parallel")},
    "ladder-2": cases.TOPOLOGIES["ladder-2"],
    "hybrid-ladder": ("ladder", "1,", "ladder", 1, (1,)),
    "hybrid-ladder-2": ("ladder-2", "1", "ladder", 2, (2,)),
    "hybrid-farskip": ("farskip", "1", "farskip", 1, (2,)),
    "farskip-first": ("farskip", "0,", "farskip", 1, (0,)),
}
# Six experts, which 4 and 8 ranks do not divide.
KINDS = {
    "shared": dict(
        experts=6, top_k=2, expert_width=16, shared_width=24, shared_gate=True, softmax="all"
    ),
    "ungated": dict(experts=6, top_k=3, expert_width=16, shared_width=16, router_bias=True),
    "routed": dict(experts=6, top_k=2, expert_width=24),
    "all": dict(experts=5, top_k=5, expert_width=16, softmax="all"),
    "one": dict(experts=1, top_k=1, expert_width=16),
}


# OLMoE's norms; of so few keys, several ranks hold the same
ALL_HEADS = dict(qk_norm="all-heads", num_kv_heads=2)
# with ALL_HEADS
FIRST_DENSE = {
    "dense": dict(experts=6, top_k=2, expert_width=16, shared_width=16, dense_layers=1),
    "dense-2": dict(experts=6, top_k=2, expert_width=24, dense_layers=2),
}


def model(name="ladder", kind="shared", *, dense_layers=0, **changes):
    """Three small layers in float32."""
    residual, ladder_layers, *_ = TOPOLOGIES[name]
    moe = dict(dense_layers=dense_layers) | (KINDS | FIRST_DENSE)[kind]
    settings = dict(residual=residual, ladder_layers=ladder_layers, num_layers=3, moe=moe)
    settings |= ALL_HEADS if kind in FIRST_DENSE else {}
    return cases.model("standard", **{**settings, **changes})


def define(
    name,
    kind="shared",
    *,
    data=1,
    fsdp=1,
    tensor=1,
    experts=ExpertParallelism.REDUCE,
    **changes,
):
    mesh = parallel.make_mesh(data=data, fsdp=fsdp, tensor=tensor)
    return nn.define(model(name, kind, **changes), mesh=mesh, experts=experts)


def exchanging(
    name,
    kind="shared",
    *,
    tensor=4,
    capacity=None,
    experts=ExpertParallelism.EXCHANGE,
    **changes,
):
    """Whose tensor ranks exchange rows: all of them, unless a capacity is given."""
    moe = KINDS[kind]
    moe = {**moe, "capacity": capacity or moe["experts"] / moe["top_k"]}
    return define(name, kind, tensor=tensor, moe=moe, experts=experts, **changes)


def shape(name, config):
    _, _, topology, number, ladder = TOPOLOGIES[name]
    if topology == "farskip" and not config.moe.shared_width:
        topology = "ladder"
    dense = cases.shape("standard", config, ranks=1)
    experts = config.moe.top_k, config.moe.softmax.value
    return dataclasses.replace(dense, kind=topology, number=number, ladder=ladder, experts=experts)


def tokens():
    """[4, 17]: 16 positions, which every number of ranks divides."""
    return cases.tokens((4, 17))


LOAD_BALANCE, Z_LOSS = 0.3, 0.02  # so large that they move every gradient


def loss(params, tokens, shape):
    """The reference's cross-entropy, and the routers' losses of all tokens."""
    seen = []
    return reference.loss(params, tokens, shape, seen) + penalties(params["layers"], seen, shape)


def penalties(layers, seen, shape, *, real=1.0, load_balance=LOAD_BALANCE, z_loss=Z_LOSS):
    """The routers' losses. seen: the input of each layer's experts, [1, B, T, D]. real: which
    positions count.
    """
    total = 0.0
    for l, inputs in enumerate(seen):  # of the layers that have experts
        norm = layers["mlp_norm" if "mlp_norm" in layers else "attention_norm"]["scale"][l]
        scores = reference.rms(inputs[0], norm, shape.eps) @ layers["mlp"]["router"][l]
        best = reference.best_experts(
            jax.tree.map(lambda a: a[l], layers["mlp"]), scores, shape.experts[0]
        )
        share = np.broadcast_to(real, scores.shape[:-1])
        mean = lambda a, share=share: (a * share).sum() / share.sum()
        sums = reference.logsumexp(scores)[..., None]
        probabilities = np.exp(scores - sums)
        count = scores.shape[-1]
        uneven = count * sum(
            mean((best == e).mean(-1)) * mean(probabilities[..., e]) for e in range(count)
        )
        total = total + (load_balance * uneven + z_loss * mean(sums[..., 0] ** 2)) / len(seen)
    return total


@functools.cache
def dense_gradients(name, kind, **changes):
    """(loss, gradients) of `cases.parameters` and `tokens` by the reference."""
    return _dense(loss, name, kind, gradient=True, **changes)


@functools.cache
def dense_logits(name, kind, **changes):
    return _dense(reference.logits, name, kind, **changes)


def _dense(function, name, kind, *, gradient=False, **changes):
    definition = define(name, kind, **changes)
    of = shape(name, definition.config)
    params = cases.parameters(definition)
    return reference.evaluate(function, params, tokens(), of, gradient=gradient)


def check_gradients(definition, expected, **settings):
    """`cases.check_gradients`, with the routers' losses."""
    losses = dict(load_balance=LOAD_BALANCE, router_z_loss=Z_LOSS)
    return cases.check_gradients(definition, expected, shape_BT=(4, 17), **losses, **settings)


def check_prefill(name, definition, lengths, *, quantize=Quantize.NONE, **form):
    """The logits of prompts of these lengths are the reference's: of 8 bits, of the matrices that
    these stand for.
    """
    params, lengths = cases.parameters(definition), np.array(lengths)
    if quantize is Quantize.INT8:
        params = reference.in_eight_bits(params, definition.dims)
    of = shape(name, definition.config)
    expected = reference.evaluate(reference.logits, params, tokens(), of)
    found, *_ = cases.prefilled(definition, tokens()[:, :16], lengths, quantize=quantize, **form)
    limit = cases.bound(definition.config)
    assert cases.error(found, expected[np.arange(4), lengths - 1]) < limit
