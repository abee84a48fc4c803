"""The minimum traffic and compute of one device: the numerators of the shares of copy bandwidth and matmul rate.

All counts are of a device's shards. So a key/value head that several devices share counts on each of them, and the
vocabulary's padding counts too. Letters as in `nn`: B rows, T = P prompt tokens, G new tokens, L layers, H head size;
n query heads and k key/value heads on the device.
"""

from collections.abc import Iterable
from typing import Any

import jax

from ladder_jax.config import Loop
from ladder_jax.decode import weights
from ladder_jax.decode.memory import cache_bytes, shard_bytes, shard_size
from ladder_jax.nn import ModelDef, attention_flops


def decode_bytes(definition: ModelDef, *, rows: int, prompt_length: int, new_tokens: int) -> float:
    """Bytes that a device must read and write in a decode step, as a mean over a generation's G - 1 steps:

        weights  every parameter once, without the embedding table if the head is another table; of experts those that
                 the B rows choose, if all are evenly loaded (`MoEConfig.chosen`)
        lookup   B rows of the embedding table
        cache    2 L B k H elements per position (keys and values) x (P + G / 2) positions

    Step s = 0 .. G - 2 reads the P + s filled positions and writes one: in the mean P + (G - 2) / 2 + 1 = P + G / 2.
    Activations and logits do not count.
    """
    params = weights.abstract(definition, loop=Loop.UNROLLED)
    table = params["embedding"]["table"]
    read = {name: value for name, value in params.items() if name != "embedding" or "head" not in params}
    lookup = rows * table.shape[1] * table.dtype.itemsize
    page = definition.kernel.page
    position = cache_bytes(definition, rows=rows, capacity=page) / page
    unread = 0.0
    for leaf in _experts(read):
        chosen = _own(leaf, definition) * definition.config.moe.chosen(rows)
        unread += shard_bytes(leaf) * (1 - chosen)
    return shard_bytes(read) - unread + lookup + position * (prompt_length + new_tokens / 2)


def prefill_flops(definition: ModelDef, *, rows: int, prompt_length: int) -> int:
    """Floating-point operations of a device's matmuls in a prefill, two per multiply-add:

        layers     2 x matrix elements x B T; of experts, the share of them that a token passes
        attention  2 B n H T (T + 1) per layer: scores and values, 2 H each for the t + 1 positions that t attends to
        head       2 x matrix elements x B: logits only for each row's last position

    The masked half of attention does not count, even if a kernel computes it.
    """
    params = weights.abstract(definition, loop=Loop.UNROLLED)
    elements = lambda tree: sum(shard_size(leaf) for leaf in jax.tree.leaves(tree) if len(leaf.shape) > 1)
    config, heads = definition.config, definition.config.num_heads // definition.layout.ranks
    attention = attention_flops(config, rows=rows, length=prompt_length, heads=heads)
    head, moe = params.get("head", params["embedding"]), config.moe
    passed = lambda leaf: _own(leaf, definition) * moe.top_k / moe.experts
    active = elements(params["layers"]) - sum(shard_size(one) * (1 - passed(one)) for one in _experts(params))
    return round(2 * active * rows * prompt_length) + attention + 2 * elements(head) * rows


def weight_bytes(definitions: Iterable[ModelDef]) -> int:
    """Bytes of a device's shards of the weights; weights that the definitions share count once."""
    shared: dict[str, Any] = {}
    for definition in definitions:
        shared |= named(weights.abstract(definition, loop=Loop.UNROLLED))
    return shard_bytes(shared)


def _experts(params: Any) -> list[jax.ShapeDtypeStruct]:
    """The routed experts' matrices, [E, ...]."""
    return [leaf for name, leaf in named(params).items() if "['experts']" in name]


def _own(leaf: jax.ShapeDtypeStruct, definition: ModelDef) -> float:
    """The share of such an array that is no padding, which fills up the last ranks."""
    return definition.config.moe.experts / leaf.shape[0]


def named(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by path."""
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
