"""Grouped matmuls on NVIDIA GPUs: the kernels in Pallas' interpreter, what they visit, and when
they are chosen.
"""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import triton
from jax.sharding import PartitionSpec as P

from ladder_jax import parallel
from ladder_jax.nn import grouped, grouped_gpu
from tests import cases, covering, test_experts
from tests.refusals import refused

BFLOAT16 = 2.0**-8  # half a unit in the last place, relative
# rows, groups' sizes, widths: tiles of few rows and of many, none of which divides a size
SHAPES = [(40, (0, 19, 0, 2), 24, 72), (300, (131, 0), 40, 136)]


@pytest.mark.parametrize("rows, sizes, inner, outer", SHAPES)
def test_products(rows, sizes, inner, outer):
    """All three, in 8 bits too; with empty groups, rows of no group, and matrices of empty groups
    that hold NaNs.
    """
    rng = np.random.default_rng(0)
    count = len(sizes)
    x, dy = (jnp.asarray(rng.standard_normal((rows, n)), jnp.bfloat16) for n in (inner, outer))
    weight = jnp.asarray(rng.standard_normal((count, inner, outer)), jnp.bfloat16)
    bytes_ = rng.integers(-127, 128, weight.shape)
    scale = rng.uniform(0.01, 0.1, (count, outer))
    empty = np.array(sizes) == 0
    spoilt, scale = (
        jnp.where(empty[:, None, None], jnp.nan, weight),
        np.where(empty[:, None], np.nan, scale),
    )

    def local(x, dy, weight, bytes_, scale, sizes):
        product = functools.partial(grouped_gpu.product, interpret=True)
        eight_bits = product(x, bytes_, sizes, scale_EO=scale)
        of_rows = product(dy, weight, sizes, transposed=True)
        of_weight = grouped_gpu.over_rows(x, dy, sizes, interpret=True)
        return product(x, weight, sizes), eight_bits, of_rows, of_weight

    call = jax.jit(jax.shard_map(local, mesh=parallel.make_mesh(), in_specs=P(), out_specs=P()))
    scale = scale.astype(np.float32)
    args = x, dy, spoilt, bytes_.astype(np.int8), scale, jnp.array(sizes, jnp.int32)
    found = call(*args)
    with jax.enable_x64(True):
        jax.eval_shape(call, *args)
    x, dy, weight = (np.asarray(a, np.float64) for a in (x, dy, weight))
    start = 0
    for group, size in enumerate(sizes):
        part = slice(start, start := start + size)
        expected = (
            x[part] @ weight[group],
            x[part] @ (bytes_[group] * scale[group]),
            dy[part] @ weight[group].T,
            x[part].T @ dy[part],
        )
        for ours, exact in zip(
            (*(a[part] for a in found[:3]), found[3][group]), expected, strict=True
        ):
            if size:
                assert cases.error(ours, exact) < 2 * BFLOAT16
            else:
                assert not np.any(np.asarray(ours))


@pytest.mark.parametrize(
    "rows, height",
    {
        8: 16,
        160: 64,
        5_000: 128,
    }.items(),
)
def test_a_tiles_height_is_one_that_triton_has(rows, height, monkeypatch):
    """A power of two: the interpreter takes any."""
    chosen = []

    def product(rows, weight, tiles, scale, *, height, **form):
        chosen.append(height)
        return rows @ weight[0]

    monkeypatch.setattr(grouped_gpu, "_product", product)
    monkeypatch.setattr(grouped_gpu, "unchecked", lambda call: call)
    sizes = jnp.array([rows, 0, 0, 0], jnp.int32)
    grouped_gpu.product(jnp.ones((rows, 8)), jnp.ones((4, 8, 8)), sizes)
    assert chosen == [height]


def test_every_row_is_visited_once_and_no_empty_group():
    """So that a decode step reads the matrices of the experts that its rows chose, and no
    others.
    """
    rng = np.random.default_rng(0)
    tiles = jax.jit(grouped_gpu._tiles, static_argnames=("rows", "height"))
    for rows, count, height in ((8, 16, 16), (300, 5, 16), (1, 1, 16), (500, 3, 128)):
        for full in (0, rows // 2, rows):
            for even in (True, False):  # else all rows are in one group
                chosen = (
                    rng.integers(0, count, full) if even else np.full(full, rng.integers(count))
                )
                sizes = np.bincount(chosen, minlength=count).astype(np.int32)
                group, first, end = map(np.asarray, tiles(sizes, rows=rows, height=height))
                used = first < end
                assert set(group[used]) == set(np.flatnonzero(sizes))
                visited = [
                    (g, r)
                    for g, f, e in zip(group, first, end)
                    for r in range(f, min(f + height, e))
                ]
                assert visited == list(zip(np.repeat(np.arange(count), sizes), range(full)))


@pytest.mark.parametrize("router", [covering.full(test_experts.as_drawn), test_experts.all_to_one])
def test_a_sublayer_on_kernels(router, monkeypatch):
    """Values and gradients on four ranks are those of XLA's form; what the kernels leave undefined
    reaches nobody.
    """

    call, params, x = test_experts.sublayer(router, "shared")
    expected = test_experts.outcome(call, params, x)
    monkeypatch.setattr(grouped, "uses_triton", lambda dtype: True)
    for name in ("product", "over_rows"):
        kernel = functools.partial(getattr(grouped_gpu, name), interpret=True)
        monkeypatch.setattr(grouped_gpu, name, kernel)
    call, *_ = test_experts.sublayer(router, "shared")
    test_experts.assert_close(test_experts.outcome(call, params, x), expected)


@pytest.mark.parametrize(
    "kind, dtype, capability, variable, kernel",
    [
        ("cpu", jnp.bfloat16, None, None, "xla"),
        ("TPU v5", jnp.bfloat16, None, None, "xla"),
        ("NVIDIA H100 80GB HBM3", jnp.bfloat16, 90, None, "triton"),
        ("NVIDIA A100-SXM4-80GB", jnp.bfloat16, 80, "", "triton"),
        ("NVIDIA H100 80GB HBM3", jnp.float32, 90, None, "xla"),
        ("NVIDIA H100 80GB HBM3", jnp.bfloat16, 90, "xla", "xla"),
        ("NVIDIA TITAN RTX", jnp.bfloat16, 75, None, "xla"),
        ("NVIDIA of another age", jnp.bfloat16, None, None, "xla"),
    ],
)
def test_the_kernel_follows_the_meshs_devices(
    kind, dtype, capability, variable, kernel, monkeypatch
):
    def information():
        if capability is None:
            raise ValueError("Unsupported GPU device kind")
        return types.SimpleNamespace(compute_capability=capability)

    monkeypatch.setattr(triton, "get_gpu_info", information)
    monkeypatch.setattr(grouped, "_device_kind", lambda: kind)
    if variable is not None:
        monkeypatch.setenv(grouped.VARIABLE, variable)
    assert grouped.uses_triton(dtype) == (kernel == "triton")


def test_a_wrong_variable(monkeypatch):
    monkeypatch.setenv(grouped.VARIABLE, "xlaa")
    with refused("unknown LADDER_JAX_GROUPED_MATMUL 'xlaa'; did you mean 'xla'"):
        grouped.uses_triton(jnp.bfloat16)
