"""The attention kernels of accelerators, as far as a CPU can tell: types, values, gradients,
choice.
"""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec as P
from numpy.testing import assert_array_equal

from ladder_jax import parallel
from ladder_jax.config import Dtype, Loop
from ladder_jax.decode import steps
from ladder_jax.nn import attention, tpu_attention
from ladder_jax.parallel.collectives import differentiable, unchecked
from tests import cases, covering, reference


def exact(query, key, value):
    """Causal attention: query [B, T, N, H], key and value [B, T, K, H]."""
    return reference.attend(query, key, value, np.tri(query.shape[1], dtype=bool))


def inputs(length=100, head_dim=16, heads=8, kv_heads=4, batch=2):
    rng = np.random.default_rng(0)
    shapes = [(batch, length, n, head_dim) for n in (heads, kv_heads, kv_heads)]
    return [rng.standard_normal(s).astype(np.float32) for s in shapes]


def on_mesh(function, *more):
    """Of queries, keys and values, and what else is split as `more`."""
    mesh = parallel.make_mesh(data=2, tensor=4)
    spec = P("data", None, "tensor", None)
    specs = spec, spec, spec, *more
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=spec))


def gradients(attend):
    weigh = lambda q, k, v: jnp.sum(
        attend(q, k, v) * jnp.cos(jnp.arange(q.shape[-1]))[None, None, None]
    )
    return jax.grad(weigh, argnums=(0, 1, 2))


SPLASH = functools.partial(tpu_attention.causal, interpret=True)
XLA = functools.partial(attention.causal, kernel=attention.Kernel.XLA)
# cuDNN needs a GPU to be traced; what surrounds it is tested on the kernel that a CPU has.
LIKE_CUDNN = differentiable(XLA)


@pytest.mark.parametrize(
    "attend", [SPLASH, XLA, LIKE_CUDNN], ids=["splash", "xla", "as cudnn is called"]
)
def test_causal_attention(attend):
    args = inputs()
    limit = 16 * np.sqrt(100) * cases.UNIT_ROUNDOFF  # a softmax and two sums of at most 100 terms
    assert cases.error(on_mesh(attend)(*args), exact(*args)) < limit
    for ours, dense in zip(
        on_mesh(gradients(attend))(*args), on_mesh(gradients(XLA))(*args), strict=True
    ):
        assert cases.error(ours, dense) < 2 * limit
    with jax.enable_x64(True):
        jax.eval_shape(on_mesh(gradients(attend)), *args)


def check_rows(out, query, key, value, lengths):
    """Each row's one query attends to the first `length` positions of its keys and values."""
    seen = np.arange(key.shape[1]) < lengths[:, None, None, None]
    limit = 16 * np.sqrt(key.shape[1]) * cases.UNIT_ROUNDOFF
    for ours, exact in zip(out, reference.attend(query, key, value, seen), strict=True):
        assert cases.error(ours, exact) < limit


def test_decode_attends_to_each_rows_length_only():
    query, key, value = inputs()
    query, lengths = query[:, :1], np.array([7, 100], np.int32)
    attend = functools.partial(attention.decode, kernel=attention.Kernel.XLA)
    for call in (attend, unchecked(attend)):
        check_rows(on_mesh(call, P("data"))(query, key, value, lengths), query, key, value, lengths)


@pytest.mark.parametrize("heads, kv_heads", covering.marked([(2, 1), (8, 1)], chosen=[(8, 2)]))
def test_the_paged_kernel_attends_to_each_rows_length_only(heads, kv_heads):
    """In the interpreter; with rubbish beyond a row's length, where it ends in a page, and with
    one.
    """
    lengths = np.array([1, 127, 128, 640], np.int32)
    query, key, value = inputs(640, head_dim=128, heads=heads, kv_heads=kv_heads, batch=4)
    query, key, value = query[:, -1:], *(x.astype(jnp.bfloat16) for x in (key, value))
    unseen = np.arange(640)[:, None] >= lengths[:, None, None, None]
    cached = [np.where(unseen, 1e4, x.swapaxes(1, 2)).astype(x.dtype) for x in (key, value)]
    decode = functools.partial(tpu_attention.decode, page=attention.PAGE)
    local = jax.shard_map(decode, mesh=parallel.make_mesh(), in_specs=P(), out_specs=P())
    with pltpu.force_tpu_interpret_mode():
        out = jax.jit(local)(query, *cached, lengths)
    check_rows(out, query, key, value, lengths)


@pytest.mark.parametrize(
    "platform, kind, head_dim, dtype, kernel",
    [
        ("cpu", "cpu", 128, Dtype.BFLOAT16, "xla"),
        ("tpu", "TPU v5p", 64, Dtype.BFLOAT16, "splash"),
        ("tpu", "TPU v5p", 128, Dtype.BFLOAT16, "paged"),
        ("tpu", "TPU v5 lite", 128, Dtype.BFLOAT16, "splash"),
        ("tpu", "TPU v5p", 128, Dtype.FLOAT32, "splash"),  # the paged kernel computes in bfloat16
        ("cuda", "NVIDIA H100", 64, Dtype.BFLOAT16, "xla"),
    ],
)
def test_the_kernel_follows_the_meshs_devices(platform, kind, head_dim, dtype, kernel):
    """Not this machine's backend: a program may be compiled ahead of time. cuDNN needs its GPU
    here.
    """
    mesh = type(
        "Mesh", (), {"devices": np.array([SimpleNamespace(platform=platform, device_kind=kind)])}
    )
    assert attention.choose(
        cases.model(head_dim=head_dim, dtype=dtype), mesh=mesh
    ) is attention.Kernel(kernel)


@pytest.mark.parametrize(
    "capacity, kept",
    {
        1: 128,
        128: 128,
        129: 256,
    }.items(),
)
def test_the_paged_kernels_cache_has_whole_pages(capacity, kept):
    definition = cases.define("ladder")
    vars(definition)["kernel"] = attention.Kernel.PAGED  # a TPU's
    cache = steps.abstract_cache(definition, rows=2, capacity=capacity, loop=Loop.SCAN)
    model = definition.config
    assert cache.key.shape == (model.num_layers, 2, model.num_kv_heads, kept, model.head_dim)


@pytest.mark.parametrize("kernel", [attention.Kernel.XLA, attention.Kernel.PAGED])
def test_a_block_is_written_in_the_kernels_order(kernel):
    """Of rows 1 and 2 of four, at positions 3 to 7."""
    sizes = dict(B=4, S=9, N=2, H=3)
    cache = np.zeros([sizes[dim] for dim in kernel.cache_dims], np.float32)
    block = np.random.default_rng(0).standard_normal((2, 5, 2, 3)).astype(np.float32)
    of = attention.Cache(cache, cache)
    written = attention._write(of, block, -block, row=1, start=3, kernel=kernel)
    places = [kernel.cache_dims.index(dim) for dim in "BSNH"]
    expected = np.zeros((4, 9, 2, 3))
    expected[1:3, 3:8] = block
    assert_array_equal(np.transpose(written.key, places), expected)
    assert_array_equal(np.transpose(written.value, places), -expected)
