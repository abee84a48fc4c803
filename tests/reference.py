"""A dense Transformer written from the recurrences, in NumPy and float64, sharing no code with the
package; autograd has its gradients.

Ranks are an axis of the arrays: `partials` [R, B, T, D] are each rank's share of a sublayer, from
that rank's own input. Parameters are as they are stored: {"layers": {"attention": {"query":
[L, D, N, H]}}}.

`Shape.rounds` marks every value that passes between two operations of a low precision, in the
forward pass (the value itself), in the backward pass (its gradient), or in both: tests/rounding.py
rounds there; by default nobody does.
"""

import dataclasses
from collections.abc import Callable

import autograd
import autograd.numpy as np
import jax


def exactly(y, forward=True, backward=True):
    """No rounding."""
    return y


@dataclasses.dataclass(frozen=True)
class Shape:
    """What the reference needs to know of a model; `kind` and `ladder` say which layers are
    what.
    """

    layers: int
    heads: int
    kv_heads: int
    vocab: int
    kind: str  # standard, ladder, fresh, parallel, parallel-ladder, desync, none, farskip
    number: int = 1  # the delay, or the desync's period
    ladder: tuple[int, ...] | None = None  # None: all layers
    ranks: int = 1
    theta: float = 10_000.0
    eps: float = 1e-5
    llama3: tuple[float, float, float, float] | None = None  # factor, low, high, context
    lora: float | None = None  # the factors' scale; they are p["adapters"][name]
    # how many a token passes, and over which logits the softmax is
    experts: tuple[int, str] | None = None
    # how many rows an expert takes, and of how many parts of the positions so many each; None: all
    slots: tuple[int, int] | None = None
    rounds: Callable = exactly


def rms(x, scale, eps, over=-1):
    return x / np.sqrt((x * x).mean(over, keepdims=True) + eps) * scale


def rms_of_heads(x, scale, eps):
    """x [R, B, T, heads, H], with one rms for all ranks' heads; those that several ranks hold count
    alike.
    """
    return rms(x, scale.reshape(len(x), 1, 1, *x.shape[3:]), eps, over=(0, 3, 4))


def matmul(p, name, x, of_x, out, split, shape):
    """x with p[name], and what factors beside it add. `split`, from the stored matrix to one with
    an axis of ranks.
    """
    r = shape.rounds
    letters = {
        "query": "drnh",
        "key": "drnh",
        "value": "drnh",
        "out": "rnhd",
        "gate": "drf",
        "up": "drf",
        "down": "rfd",
    }
    of_w, at = letters[name], lambda: r(x, forward=False)  # each use of x has a gradient of its own
    y = r(np.einsum(f"{of_x},{of_w}->{out}", at(), split(r(p[name]))))
    if name not in p.get("adapters", {}):
        return y
    down = r(p["adapters"][name]["down"])
    up = r(p["adapters"][name]["up"])
    if name in ("out", "down"):  # its inputs are split, and with them `down`
        inner = r(np.einsum(f"{of_x},{of_w[:-1]}k->rbtk", at(), split(down)))
        outer = np.einsum(f"rbtk,kd->{out}", inner, up)
    else:
        inner = r(np.einsum(f"{of_x},dk->rbtk", at(), down))
        outer = np.einsum(f"rbtk,k{of_w[1:]}->{out}", inner, split(up))
    return r(y + shape.lora * r(outer))


def rope(x, shape):
    """x [..., T, heads, H], by complex rotation of the pairs (i, i + H/2)."""
    half = x.shape[-1] // 2
    freq = shape.theta ** (-2.0 * np.arange(half) / x.shape[-1])
    if shape.llama3:
        factor, low, high, context = shape.llama3
        wavelength = 2 * np.pi / freq
        # 0: long wavelengths, 1: short ones
        smooth = np.clip((context / wavelength - low) / (high - low), 0, 1)
        freq = (1 - smooth) * freq / factor + smooth * freq
    turn = np.exp(1j * np.arange(x.shape[-3])[:, None, None] * freq)
    z = (x[..., :half] + 1j * x[..., half:]) * turn
    return np.concatenate([np.real(z), np.imag(z)], -1)


def attention(p, x, shape):
    """x [R, B, T, D]: each rank's partial sum, of its query heads and the key/value heads that
    those share.
    """
    ranks, heads, r = shape.ranks, shape.heads, shape.rounds
    # each query head's key/value head
    mine = (np.arange(heads) // (heads // shape.kv_heads)).reshape(ranks, -1)
    # those that each rank holds, some of them several
    kv = np.stack([np.unique(row) for row in mine]).reshape(-1)
    shared = np.arange(mine.shape[1]) * (len(kv) // ranks) // mine.shape[1]

    def project(name, of):
        split = lambda w: w[:, of].reshape(w.shape[0], ranks, len(of) // ranks, -1)
        out = matmul(p, name, x, "rbtd", "rbtnh", split, shape)
        if f"{name}_bias" not in p:
            return out
        return r(out + p[f"{name}_bias"][of].reshape(ranks, 1, 1, len(of) // ranks, -1))

    q = project("query", np.arange(heads))
    k = project("key", kv)
    v = project("value", kv)
    if "query_norm" in p:
        q, k = (
            r(
                rms(y, scale, shape.eps)
                if scale.ndim == 1
                else rms_of_heads(y, scale[of], shape.eps)
            )
            for y, scale, of in (
                (q, p["query_norm"]["scale"], np.arange(heads)),
                (k, p["key_norm"]["scale"], kv),
            )
        )
    q, k, v = r(rope(q, shape)), r(rope(k, shape))[..., shared, :], v[..., shared, :]
    scores = r(np.einsum("rbtnh,rbsnh->rbnts", q, k), forward=False) / np.sqrt(q.shape[-1])
    scores = np.where(np.tri(x.shape[-2], dtype=bool), scores, -1e30)
    scores = np.exp(scores - scores.max(-1, keepdims=True))
    out = r(np.einsum("rbnts,rbsnh->rbtnh", r(scores / scores.sum(-1, keepdims=True)), v))
    split = lambda w: w.reshape(ranks, heads // ranks, *w.shape[1:])
    return on_first(matmul(p, "out", out, "rbtnh", "rbtd", split, shape), p.get("out_bias"), shape)


def attend(query, key, value, seen):
    """Attention in NumPy: query [B, T, N, H], key and value [B, S, K, H]; seen [..., T, S]: which
    keys each query attends to.
    """
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    group = query.shape[2] // key.shape[2]
    key, value = (np.repeat(x, group, axis=2) for x in (key, value))
    scores = np.einsum("btnh,bsnh->bnts", query, key) / np.sqrt(query.shape[-1])
    scores = np.where(seen, scores, -np.inf)
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("bnts,bsnh->btnh", shares / shares.sum(-1, keepdims=True), value)


def mlp(p, x, shape):
    ranks, r = shape.ranks, shape.rounds

    def project(name):
        split = lambda w: w.reshape(w.shape[0], ranks, -1)
        out = matmul(p, name, x, "rbtd", "rbtf", split, shape)
        return r(out + p[f"{name}_bias"].reshape(ranks, 1, 1, -1)) if f"{name}_bias" in p else out

    g = project("gate")
    u = project("up")
    hidden = r(r(g * r(1 / (1 + np.exp(-g)))) * u)
    split = lambda w: w.reshape(ranks, -1, w.shape[-1])
    return on_first(
        matmul(p, "down", hidden, "rbtf", "rbtd", split, shape), p.get("down_bias"), shape
    )


def best_experts(p, scores, top_k):
    """[..., top_k]: by the router's scores [..., C], or by their softmax and the bias."""
    if "router_bias" in p:
        powers = np.exp(scores - scores.max(-1, keepdims=True))
        scores = powers / powers.sum(-1, keepdims=True) + p["router_bias"]
    return np.argsort(-scores, axis=-1, kind="stable")[..., :top_k]


def routed(p, x, shape):
    """Every expert on every token, of which each token's chosen ones count: [R, B, T, D], all of it
    on the one rank.
    """
    (top_k, over), r = shape.experts, shape.rounds
    scores = np.einsum("rbtd,dc->rbtc", r(x, forward=False), p["router"])
    best = best_experts(p, scores, top_k)
    chosen = (best[..., None] == np.arange(scores.shape[-1])).any(-2)
    powers = np.exp(scores - scores.max(-1, keepdims=True))
    total = (powers if over == "all" else np.where(chosen, powers, 0)).sum(-1, keepdims=True)
    taken = chosen if shape.slots is None else first_rows(chosen, *shape.slots)
    out = 0
    factors = p.get("adapters", {}).get("experts", {})
    for e in range(scores.shape[-1]):
        expert = jax.tree.map(lambda a: a[e], {**p["experts"], "adapters": factors})
        out = out + mlp(expert, x, shape) * np.where(taken, powers / total, 0)[..., e, None]
    return r(out)


def first_rows(chosen, slots, parts):
    """Of [1, B, T, C], in each part of the positions, the first that an expert has slots for."""
    _, rows, length, experts = chosen.shape
    each = chosen.reshape(rows, parts, -1, experts).swapaxes(0, 1)
    before = each.reshape(parts, -1, experts).cumsum(1).reshape(each.shape)
    return (each & (before <= slots)).swapaxes(0, 1).reshape(1, rows, length, experts)


def shared(p, x, shape):
    """The shared expert's output, [R, B, T, D]."""
    r, p = shape.rounds, {**p["shared"], "adapters": p.get("adapters", {}).get("shared", {})}
    out = mlp(p, x, shape)
    return r(out / (1 + np.exp(-(x * p["share"]).sum(-1, keepdims=True)))) if "share" in p else out


def mixture(p, x, shape):
    """Routed and shared experts, if there is one: [R, B, T, D]."""
    out = routed(p, x, shape)
    return shape.rounds(out + shared(p, x, shape)) if "shared" in p else out


def on_first(partials, bias, shape):
    """A bias of the sum is added by one rank."""
    if bias is None:
        return partials
    return np.concatenate([shape.rounds(partials[:1] + bias), partials[1:]])


def sublayer(layers, l, inputs, *, attends, shape):
    """Layer l's attention or MLP, with its norm: [R, B, T, D], each rank's partial sum of its own
    input.
    """
    p = jax.tree.map(lambda a: a[l], layers)
    r = shape.rounds
    name = "attention_norm" if attends or "mlp_norm" not in p else "mlp_norm"
    # With sequence parallelism what is normalised crosses the wire before its gain.
    normed = r(r(rms(r(inputs, forward=False), 1.0, shape.eps)) * p[name]["scale"])
    if attends:
        return attention(p["attention"], normed, shape)
    if shape.experts is None:
        return mlp(p["mlp"], normed, shape)
    if shape.kind == "farskip":  # the two parts, one after the other
        return np.stack([routed(p["mlp"], normed, shape), shared(p["mlp"], normed, shape)])
    return mixture(p["mlp"], normed, shape)


def streams(params, tokens, shape, seen=None, fraction=None):
    """The final residual stream of every rank, [R, B, T, D] (all equal where ranks communicate).

    seen: a list, to which each layer's input of the MLP is appended.
    fraction: by layer, how much of a ladder's input a ladder layer has, the rest being a standard
        layer's; None: all.
    """
    r = shape.rounds
    kind = "farskip" if shape.kind == "farskip" else ""
    one_for_all = dataclasses.replace(shape, layers=0, vocab=0, kind=kind, number=1, ladder=None)
    without_experts = dataclasses.replace(one_for_all, kind="", experts=None)
    # the first layers
    dense = len(params["dense"]["attention_norm"]["scale"]) if "dense" in params else 0

    def partials(i, inputs):
        """h_i (1-based) on each rank's own input."""
        layer = (i - 1) // 2
        if layer < dense:
            return sublayer(
                params["dense"], layer, inputs, attends=bool(i % 2), shape=without_experts
            )
        if seen is not None and i % 2 == 0:
            seen.append(inputs)
        return sublayer(
            params["layers"], layer - dense, inputs, attends=bool(i % 2), shape=one_for_all
        )

    x0 = r(r(params["embedding"]["table"], forward=False)[tokens])
    last = 2 * shape.layers
    same = lambda x: np.stack([x] * shape.ranks)

    if shape.kind in ("none", "desync"):
        local = same(x0)
        for i in range(1, last + 1):
            p = partials(i, local)
            if shape.kind == "desync" and (i % shape.number == 0 or i == last):
                local = same(local.mean(0) + p.sum(0))
            else:
                local = local + p
        return local

    if shape.kind == "farskip":
        return same(farskip(partials, x0, shape, dense, fraction))

    xs, newest = [x0], None  # xs[i] is x_i; newest: the ranks' partials of h_{i-1}
    n = shape.number
    # by how many outputs attention's and the MLP's inputs are late
    late_by = {
        "ladder": (n, n),
        "fresh": (1, 1),
        "parallel": (0, 1),  # both read what attention reads
        "parallel-ladder": (2, 3),
    }.get(shape.kind, (0, 0))
    for l in range(shape.layers):
        chosen = shape.ladder is None or l in shape.ladder
        for i, delay in zip((2 * l + 1, 2 * l + 2), late_by if chosen else (0, 0)):
            late = xs[max(0, i - 1 - delay)]
            own = newest
            if fraction is not None:
                late = (1 - fraction[l]) * xs[i - 1] + fraction[l] * late
                own = None if newest is None else fraction[l] * newest
            inputs = same(r(late, forward=False))
            if chosen and shape.kind == "fresh" and i > 1:
                inputs = inputs + own
            newest = partials(i, inputs)
            xs.append(r(xs[i - 1] + r(newest.sum(0), backward=False)))
    return same(r(xs[-1], forward=False))


def farskip(partials, x, shape, dense, fraction):
    """a_k = Attn(x_{k-1} - r_{k-1}); s_k, r_k = Shared(x_{k-1}), Routed(x_{k-1}); x_k = x_{k-1} +
             a_k + s_k + r_k.

    In the `dense` first layers s_k is the MLP, and r_k is zero.
    """
    r = shape.rounds
    late = 0.0  # r_{k-1}
    for l in range(shape.layers):
        ladder = shape.ladder is None or l in shape.ladder
        if l < dense:
            a = partials(2 * l + 1, x[None])[0]
            before = x
            x = r(x + a)
            x = r(x + partials(2 * l + 2, (before if ladder else x)[None])[0])
            continue
        share = fraction[l] if ladder and fraction is not None else 1
        a = partials(2 * l + 1, (x - share * late if ladder else x)[None])[0]
        if ladder:
            before = x if fraction is None else x + (1 - share) * a
            routed, shared = partials(2 * l + 2, before[None])[:, 0]
            x = r(x + r(a + shared))
        else:
            x = r(x + a)
            routed, shared = partials(2 * l + 2, x[None])[:, 0]
            routed = routed + shared
        x, late = r(x + routed), routed
    return x


def logits(params, tokens, shape, seen=None, fraction=None):
    """[B, T, vocab]; each rank scores its share of the (padded) table with its own stream."""
    r = shape.rounds
    table = r(params["head"]["table"] if "head" in params else params["embedding"]["table"])
    x = r(streams(params, tokens, shape, seen, fraction), forward=False)
    # a mean's gradient: once more
    normed = r(r(rms(x, params["final_norm"]["scale"], shape.eps)), forward=False)
    table = r(table, forward=False).reshape(shape.ranks, -1, table.shape[-1])
    parts = r(np.einsum("rbtd,rvd->btrv", normed, table), forward=False)
    return parts.reshape(*parts.shape[:2], -1)[..., : shape.vocab]


# over which dimensions of a stored matrix its matmul sums
SUMMED = {
    **{"DNH": (0,), "DKH": (0,), "NHD": (0, 1), "DF": (0,), "FD": (0,), "VD": (1,)},
    **{"EDM": (1,), "EMD": (1,), "DW": (0,), "WD": (0,)},
}


def summed_axes(dims):
    return tuple(axis + dims.startswith("L") for axis in SUMMED[dims.removeprefix("L")])


def eight_bits(array, dims):
    """(whole numbers, scales with the summed dimensions as 1) of a matrix. By a product, in float32:
    halfway between two whole numbers anything else may choose the other one.
    """
    array = np.asarray(array, np.float32)
    scale = np.abs(array).max(summed_axes(dims), keepdims=True) * np.float32(1 / 127)
    scale[scale == 0] = 1
    return np.rint(array * (1 / scale)), scale


def in_eight_bits(params, dims):
    """The parameters with every matrix replaced by what its 8 bits, and one scale an output
    channel, stand for.
    """

    def value(array, dims):
        if dims.removeprefix("L") not in SUMMED:
            return array
        values, scale = eight_bits(array, dims)
        return values * np.float64(scale)

    return jax.tree.map(value, params, dims)


def loss(params, tokens, shape, seen=None, fraction=None):
    """Mean nats a token of tokens[:, 1:] given tokens[:, :-1]."""
    scores = logits(params, tokens[:, :-1], shape, seen, fraction)
    return (logsumexp(scores) - picked(scores, tokens[:, 1:])).mean()


def logsumexp(scores):
    """Over the last dimension."""
    largest = scores.max(-1, keepdims=True)
    return np.log(np.exp(scores - largest).sum(-1)) + largest[..., 0]


def picked(scores, tokens):
    """Of scores [B, T, V], those of tokens [B, T]."""
    rows, places = np.indices(tokens.shape)
    return scores[rows, places, tokens]


def evaluate(function, params, tokens, shape, *, gradient=False):
    """`function` in float64; with `gradient`, its value and its gradient."""
    leaves, tree = jax.tree.flatten(jax.tree.map(np.float64, params))
    tokens = np.asarray(tokens)

    def of_leaves(leaves):
        each = [leaves[place] for place in range(tree.num_leaves)]
        return function(jax.tree.unflatten(tree, each), tokens, shape)

    if not gradient:
        return of_leaves(leaves)
    value, slopes = autograd.value_and_grad(of_leaves)(leaves)
    return value, jax.tree.unflatten(tree, slopes)
