"""Does this device compute what a CPU does? Logits, gradients, packed rows, decoding, in bfloat16
and 8 bits.

    python -m experiments.one_gpu.values --out values.json

Each value is held to what this machine's CPU computes in float32 from the same weights. It may be
as far from it as twice what the CPU's own bfloat16 is: an attention kernel, a grouped matmul or a
fusion rounds in other places, and adds in another order. A row that is further off, or fails, ends
the program with status 1.
"""

import dataclasses
import functools
import itertools
import pathlib
import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from experiments import study
from ladder_jax import config, decode, nn, parallel, train
from ladder_jax.config import Dtype, Loop, ModelConfig, Quantize
from ladder_jax.data.packing import Batch
from ladder_jax.decode import weights
from tests import one_step

ROWS = 2
LENGTH = 129
NEW = 6
WIDE = dict(d_model=512, num_heads=8, num_kv_heads=2, head_dim=64, num_layers=3, residual="ladder")
MODELS = {
    "dense": config.preset("tiny", d_ff=1024, **WIDE),
    "experts": config.preset("tiny-moe", **WIDE),
}
DEVIATION = 0.04  # of weights: about 512 ** -0.5
FACTOR = 2  # of the CPU's own error in bfloat16


def main() -> int:
    parser = study.parser(__doc__, name="one_gpu.values")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--out", type=pathlib.Path, required=True)
    args = parser.parse_args()
    rows = []
    for model, kind in itertools.product(args.models, args.kinds):
        case = dict(model=model, kind=kind)
        try:
            rows.append(case | compared(MODELS[model], kind=kind))
        # of one row, whose compiler may fail: the others are compared all the same
        except Exception as error:
            rows.append(case | {"failed": f"{type(error).__name__}: {error}"[:1000]})
        print(*rows[-1].values(), file=sys.stderr)
    study.keep({**study.environment(), "rows": rows}, file=args.out)
    return int(
        not all(row.get("error", np.inf) <= FACTOR * row.get("error_of_cpu", 0) for row in rows)
    )


def compared(model: ModelConfig, *, kind: str) -> dict[str, float]:
    """How far this device's values, and the CPU's in its dtype, are from the CPU's in float32."""
    cpu = parallel.make_mesh(devices=jax.devices("cpu")[:1])
    exact = computed(
        dataclasses.replace(model, dtype=Dtype.FLOAT32, residual_dtype=Dtype.FLOAT32),
        kind,
        mesh=cpu,
    )
    found = {"error": parallel.make_mesh(devices=jax.devices()[:1]), "error_of_cpu": cpu}
    return {name: error(computed(model, kind, mesh=mesh), exact) for name, mesh in found.items()}


def error(found: list[np.ndarray], exact: list[np.ndarray]) -> float:
    """The largest norm of a difference, over the norm of what it should be."""
    return max(
        float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in zip(found, exact, strict=True)
    )


def computed(model: ModelConfig, kind: str, *, mesh: Mesh) -> list[np.ndarray]:
    definition = nn.define(model, mesh=mesh)
    place = functools.partial(jax.device_put, device=definition.layout.sharding("BT"))
    tokens = np.random.default_rng(1).integers(
        model.vocab_size, size=(ROWS, LENGTH), dtype=np.int32
    )
    values = KINDS[kind](definition, weights_of(definition), tokens, place)
    return [np.asarray(value, np.float64) for value in jax.tree.leaves(values)]


def weights_of(definition: nn.ModelDef) -> nn.Params:
    """Normal numbers in float32 that bfloat16 holds exactly, so that both dtypes compute with the
    same ones.
    """

    def value(path, leaf, dims):
        if len(dims.removeprefix("L")) == 1:
            return jnp.ones(leaf.shape, leaf.dtype, device=leaf.sharding)
        rng = np.random.default_rng(len(str(path)))
        values = DEVIATION * rng.standard_normal(leaf.shape, np.float32)
        return jax.device_put(values.astype(jnp.bfloat16).astype(np.float32), leaf.sharding)

    return jax.tree.map_with_path(value, definition.abstract, definition.dims)


# What is computed: (definition, params, tokens, place) -> arrays.


def logits(definition, params, tokens, place):
    return nn.compiled_logits(definition)(params, place(tokens))


def gradients(definition, params, tokens, place, **settings):
    compute = train.loss_and_gradients(definition, **settings)
    return jax.jit(compute)(params, place(tokens))


def packed(definition, params, tokens, place):
    """Rows of two documents."""
    segments = np.where(np.arange(LENGTH) < LENGTH // 3, 1, 2).astype(np.int32) + np.zeros_like(
        tokens
    )
    batch = Batch(tokens, segments)  # of LENGTH - 1 inputs: cuDNN's masks are for even lengths
    return jax.jit(train.loss_and_gradients(definition))(params, jax.tree.map(place, batch))


def decoded(definition, params, tokens, place, quantize=Quantize.NONE):
    """Logits after a prefill, and after each of the following steps with given tokens."""
    prepared = weights.prepare(definition, params, loop=Loop.UNROLLED, quantize=quantize)
    start = LENGTH - NEW
    at = functools.partial(jax.device_put, device=definition.layout.sharding("B"))
    prefill = decode.prefill(definition, capacity=LENGTH, quantize=quantize)
    found, caches = prefill(prepared, place(tokens[:, :start]), at(np.full(ROWS, start, np.int32)))
    step = one_step.decode(definition, quantize=quantize)
    every = [found]
    for position in range(start, LENGTH):
        found, caches = step(
            prepared, caches, at(tokens[:, position]), at(np.full(ROWS, position, np.int32))
        )
        every.append(found)
    return every


KINDS: dict[str, Callable] = {
    "logits": logits,
    "gradients": gradients,
    "halves": functools.partial(gradients, interleave=2),
    "packed": packed,
    "decoded": decoded,
    "decoded-int8": functools.partial(decoded, quantize=Quantize.INT8),
}


if __name__ == "__main__":
    sys.exit(main())
