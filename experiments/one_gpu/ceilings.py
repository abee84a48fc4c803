"""Copies, reads and matmuls by several forms on one GPU, and the experts' kernels with other tilings: printed lines.

    python -m experiments.one_gpu.ceilings
"""

import time
from unittest import mock

import jax
import jax.numpy as jnp

from experiments.one_gpu import experts
from ladder_jax.nn import grouped_gpu

G = 2**30
TILINGS = [
    dict(columns=128, depth=32, num_warps=4, num_stages=4),
    dict(columns=128, depth=64, num_warps=8, num_stages=3),
    dict(columns=128, depth=64, num_warps=4, num_stages=3),
    dict(columns=128, depth=64, num_warps=8, num_stages=4),
    dict(columns=128, depth=32, num_warps=8, num_stages=4),
]


def rates(step, x, work, calls=10, samples=10):
    """The best and the worst."""
    x, found = jax.block_until_ready(step(x)), []
    for _ in range(samples):
        start = time.perf_counter()
        for _ in range(calls):
            x = step(x)
        jax.block_until_ready(x)
        found.append(calls * work / (time.perf_counter() - start))
    return max(found), min(found)


for gib in (1, 4, 8):
    n = gib * G // 2
    for name, f, donated in (
        ("neg", lambda x: -x, 0),
        ("copy", jnp.copy, ()),
        ("neg-u32", lambda x: ~x, 0),
        ("neg-nodonate", lambda x: -x, ()),
    ):
        x = jnp.ones(n // 2, jnp.uint32) if name == "neg-u32" else jnp.ones(n, jnp.bfloat16)
        found = rates(jax.jit(f, donate_argnums=donated), x, 2 * gib * G)
        print("copy", gib, name, *(f"{rate / 1e9:.0f}" for rate in found), flush=True)
        del x
    x = jnp.ones(n, jnp.bfloat16)
    add = jax.jit(lambda x: x.astype(jnp.float32).sum())
    add(x)
    found = []
    for _ in range(10):
        start = time.perf_counter()
        jax.block_until_ready([add(x) for _ in range(10)])
        found.append(10 * gib * G / (time.perf_counter() - start))
    print("read", gib, f"{max(found) / 1e9:.0f}", flush=True)
for size in (8192, 16384):
    a = jax.random.normal(jax.random.key(0), (size, size), jnp.bfloat16) * size**-0.5
    f = jax.jit(lambda x, a: a @ x)
    print("matmul", size, *(f"{v / 1e12:.0f}" for v in rates(lambda x: f(x, a), a + 0, 2 * size**3)), flush=True)
for tiling in TILINGS:
    with mock.patch.dict(grouped_gpu.WIDE, tiling):
        jax.clear_caches()
        for product in experts.PRODUCTS:
            row = experts.measured(
                "qwen3-30b-a3b", share=8, tokens=2048, form="kernel", product=product, repeats=5
            )
            print("tiling", *tiling.values(), product, f"{row['seconds'] * 1e6:.1f} us", flush=True)
