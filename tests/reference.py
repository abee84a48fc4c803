"""A dense Transformer written from the recurrences, in float64, sharing no code with the package.

Ranks are an axis of the arrays: `partials` [R, B, T, D] are each rank's share of a sublayer, from that rank's own
input. Parameters are as they are stored: {"layers": {"attention": {"query": [L, D, N, H]}}}.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Shape:
    """What the reference needs to know of a model; `kind` and `ladder` say which layers are what."""

    layers: int
    heads: int
    kv_heads: int
    vocab: int
    kind: str  # standard, ladder, fresh, parallel, parallel-ladder, desync, none
    number: int = 1  # the delay, or the desync's period
    ladder: tuple[int, ...] | None = None  # None: all layers
    ranks: int = 1
    theta: float = 10_000.0
    eps: float = 1e-5
    llama3: tuple[float, float, float, float] | None = None  # factor, low, high, context


def rms(x, scale, eps):
    return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + eps) * scale


def rope(x, shape):
    """x [..., T, heads, H], by complex rotation of the pairs (i, i + H/2)."""
    half = x.shape[-1] // 2
    freq = shape.theta ** (-2.0 * np.arange(half) / x.shape[-1])
    if shape.llama3:
        factor, low, high, context = shape.llama3
        out = []
        for f in freq:
            wavelength = 2 * np.pi / f
            if wavelength < context / high:
                out.append(f)
            elif wavelength > context / low:
                out.append(f / factor)
            else:
                smooth = (context / wavelength - low) / (high - low)
                out.append((1 - smooth) * f / factor + smooth * f)
        freq = np.array(out)
    turn = jnp.exp(1j * np.arange(x.shape[-3])[:, None, None] * freq)
    z = (x[..., :half] + 1j * x[..., half:]) * turn
    return jnp.concatenate([z.real, z.imag], -1)


def attention(p, x, shape):
    """x [R, B, T, D]: each rank's partial sum, of its query heads and the key/value heads that those share."""
    ranks, heads = shape.ranks, shape.heads
    shared = np.arange(heads) // (heads // shape.kv_heads)

    def project(name, of):
        w = p[name][:, of].reshape(x.shape[-1], ranks, heads // ranks, -1)
        out = jnp.einsum("rbtd,drnh->rbtnh", x, w)
        return out + (p[f"{name}_bias"][of].reshape(ranks, 1, 1, heads // ranks, -1) if f"{name}_bias" in p else 0.0)

    q, k, v = project("query", np.arange(heads)), project("key", shared), project("value", shared)
    if "query_norm" in p:
        q, k = rms(q, p["query_norm"]["scale"], shape.eps), rms(k, p["key_norm"]["scale"], shape.eps)
    scores = jnp.einsum("rbtnh,rbsnh->rbnts", rope(q, shape), rope(k, shape)) / np.sqrt(q.shape[-1])
    scores = jnp.where(np.tri(x.shape[-2], dtype=bool), scores, -1e30)
    scores = jnp.exp(scores - scores.max(-1, keepdims=True))
    out = jnp.einsum("rbnts,rbsnh->rbtnh", scores / scores.sum(-1, keepdims=True), v)
    return on_first(
        jnp.einsum("rbtnh,rnhd->rbtd", out, p["out"].reshape(ranks, heads // ranks, *p["out"].shape[1:])),
        p.get("out_bias"),
    )


def mlp(p, x, shape):
    def project(name):
        out = jnp.einsum("rbtd,drf->rbtf", x, p[name].reshape(x.shape[-1], shape.ranks, -1))
        return out + (p[f"{name}_bias"].reshape(shape.ranks, 1, 1, -1) if f"{name}_bias" in p else 0.0)

    g, u = project("gate"), project("up")
    down = p["down"].reshape(shape.ranks, -1, x.shape[-1])
    return on_first(jnp.einsum("rbtf,rfd->rbtd", g / (1 + jnp.exp(-g)) * u, down), p.get("down_bias"))


def on_first(partials, bias):
    """A bias of the sum is added by one rank."""
    return partials if bias is None else partials.at[0].add(bias)


def streams(params, tokens, shape):
    """The final residual stream of every rank, [R, B, T, D] (all equal where ranks communicate)."""
    layer = lambda l: jax.tree.map(lambda a: a[l], params["layers"])

    def partials(i, inputs):
        """h_i (1-based) on each rank's own input."""
        p = layer((i - 1) // 2)
        if i % 2:
            return attention(p["attention"], rms(inputs, p["attention_norm"]["scale"], shape.eps), shape)
        norm = p.get("mlp_norm", p["attention_norm"])
        return mlp(p["mlp"], rms(inputs, norm["scale"], shape.eps), shape)

    x0 = params["embedding"]["table"][tokens]
    last = 2 * shape.layers
    same = lambda x: jnp.stack([x] * shape.ranks)

    if shape.kind == "none":
        local = same(x0)
        for i in range(1, last + 1):
            local = local + partials(i, local)
        return local

    if shape.kind == "desync":
        local = same(x0)
        for i in range(1, last + 1):
            p = partials(i, local)
            if i % shape.number == 0 or i == last:
                local = same(local.mean(0) + p.sum(0))
            else:
                local = local + p
        return local

    xs, newest = [x0], None  # xs[i] is x_i; newest: the ranks' partials of h_{i-1}
    for l in range(shape.layers):
        chosen = shape.ladder is None or l in shape.ladder
        first = 2 * l + 1
        if chosen and shape.kind in ("parallel", "parallel-ladder"):
            y = xs[max(0, first - 1 - (0 if shape.kind == "parallel" else 2))]
            a, m = partials(first, same(y)), partials(first + 1, same(y))
            xs += [None, xs[first - 1] + a.sum(0) + m.sum(0)]
            continue
        for i in (first, first + 1):
            delay = 0 if not chosen else {"ladder": shape.number, "fresh": 1}.get(shape.kind, 0)
            inputs = same(xs[max(0, i - 1 - delay)])
            if chosen and shape.kind == "fresh" and i > 1:
                inputs = inputs + newest
            newest = partials(i, inputs)
            xs.append(xs[i - 1] + newest.sum(0))
    return same(xs[-1])


def logits(params, tokens, shape):
    """[B, T, vocab]; each rank scores its share of the (padded) table with its own stream."""
    table = params["head"]["table"] if "head" in params else params["embedding"]["table"]
    normed = rms(streams(params, tokens, shape), params["final_norm"]["scale"], shape.eps)
    parts = jnp.einsum("rbtd,rvd->btrv", normed, table.reshape(shape.ranks, -1, table.shape[-1]))
    return parts.reshape(*parts.shape[:2], -1)[..., : shape.vocab]


def loss(params, tokens, shape):
    """Mean nats a token of tokens[:, 1:] given tokens[:, :-1]."""
    scores = logits(params, tokens[:, :-1], shape)
    scores = scores - scores.max(-1, keepdims=True)
    picked = jnp.take_along_axis(scores, tokens[:, 1:, None], -1)[..., 0]
    return (jnp.log(jnp.exp(scores).sum(-1)) - picked).mean()


def loss_eagerly(params, tokens, shape):
    """`loss`, operation by operation: for a deep model, which takes long to compile."""
    with jax.enable_x64(True), jax.numpy_rank_promotion("allow"):
        return float(loss(params, np.asarray(tokens), shape))


def evaluate(function, params, tokens, shape, *, gradient=False):
    """`function` in float64 on NumPy arrays; with `gradient`, its value and its gradient."""
    with jax.enable_x64(True), jax.numpy_rank_promotion("allow"):  # plain NumPy broadcasting
        wide = jax.tree.map(lambda a: jnp.asarray(a, jnp.float64), params)
        call = jax.value_and_grad(function) if gradient else function
        out = jax.jit(lambda p: call(p, np.asarray(tokens), shape))(wide)
        return jax.tree.map(np.asarray, out)
