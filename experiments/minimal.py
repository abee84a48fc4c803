"""A Ladder Transformer in one file: plain arrays, FSDP x tensor parallelism, optax, a sample, and
its audit.

    python -m experiments.minimal                       # learns this file by heart, on 8 simulated devices
    python -m experiments.minimal book.txt --residual standard --steps 500
    python -m experiments.minimal --audit v5p:2x2x2     # what the compiler for TPUs makes of a step

There 16 of 17 all-reduces are hidden, with `--residual standard` 0 of 16 (compiled with libtpu
0.0.50.1, never run).

Of `ladder_jax` it uses `residual`, which runs a user's own sublayers under a topology, and
`schedule`, which reads the compiled program. All else is jax: read it from `Config` down.

Letters: B rows, T positions, D model, N heads, H head size, F feed-forward, V vocabulary, L layers.
On a rank of `tensor` an array holds N / tensor heads, or F / tensor features; on a rank of `fsdp`
also D / fsdp of its width.
"""

import argparse
import dataclasses
import functools
import os
import pathlib

if __name__ == "__main__":  # before jax is imported
    os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from ladder_jax import residual, schedule

AXES = ("fsdp", "tensor")
# of matmuls, the stream and what crosses the wire; parameters and their updates are float32
COMPUTE = jnp.bfloat16


@dataclasses.dataclass(frozen=True)
class Config:
    layers: int = 4
    width: int = 128
    heads: int = 8
    hidden: int = 384
    vocabulary: int = 256  # bytes
    kind: str = "ladder"

    @property
    def topology(self) -> residual.Topology:
        """Which stream each sublayer reads, as a value."""
        return residual.topology(self.kind, num_layers=self.layers)


# Parameters, and how they lie over the mesh.

SPECS = {
    "table": P(None, "fsdp"),
    "layers": {
        "query_key_value": P(None, "fsdp", None, "tensor"),
        "out": P(None, "tensor", None, "fsdp"),
        "gate_up": P(None, "fsdp", None, "tensor"),
        "down": P(None, "tensor", "fsdp"),
    },
}


def shapes(config: Config) -> dict:
    """[L, D, 3, N, H], [L, N, H, D], [L, D, 2, F], [L, F, D], and the table [V, D] of inputs and
    outputs.
    """
    layers, width, heads = config.layers, config.width, config.heads
    head = width // heads
    return {
        "table": (config.vocabulary, width),
        "layers": {
            "query_key_value": (layers, width, 3, heads, head),
            "out": (layers, heads, head, width),
            "gate_up": (layers, width, 2, config.hidden),
            "down": (layers, config.hidden, width),
        },
    }


def is_shape(node) -> bool:
    return isinstance(node, tuple)


def initial(config: Config, mesh: Mesh, *, seed: int = 0) -> dict:
    """Normal values, made where they lie."""
    shardings = jax.tree.map(functools.partial(NamedSharding, mesh), SPECS)

    @functools.partial(jax.jit, out_shardings=shardings)
    def make(key):
        leaves, tree = jax.tree.flatten(shapes(config), is_leaf=is_shape)
        keys = jax.random.split(key, len(leaves))
        return tree.unflatten(
            [0.02 * jax.random.normal(k, shape) for k, shape in zip(keys, leaves)]
        )

    return make(jax.random.key(seed))


# One rank's forward pass.


def whole(array, *, axis: int):
    """This rank's tensor-parallel share, gathered over fsdp. Backward its gradient is
    reduce-scattered.
    """
    return lax.all_gather(array.astype(COMPUTE), "fsdp", axis=axis, tiled=True)


def norm(x):
    """RMSNorm without a gain."""
    wide = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + 1e-6)
    return (wide * scale).astype(x.dtype)


def rotate(x):
    """Rotary positions of x [B, T, N, H]."""
    length, half = x.shape[1], x.shape[-1] // 2
    frequencies = 10_000.0 ** (-jnp.arange(half) / half)
    angles = jnp.arange(length)[:, None] * frequencies[None, :]
    cos, sin = (turn(angles)[None, :, None, :].astype(x.dtype) for turn in (jnp.cos, jnp.sin))
    left, right = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)


def sublayers(layer: dict):
    """A layer's attention and MLP: [B, T, D] to this rank's partial sum [B, T, D].

    Neither has a psum: the topology says when an output is reduced, and what computes meanwhile.
    """
    query_key_value, out = whole(layer["query_key_value"], axis=0), whole(layer["out"], axis=2)
    gate_up, down = whole(layer["gate_up"], axis=0), whole(layer["down"], axis=1)

    def attention(x):
        projections = jnp.einsum("btd,dcnh->cbtnh", norm(x), query_key_value)
        query, key, value = projections
        attended = jax.nn.dot_product_attention(rotate(query), rotate(key), value, is_causal=True)
        return jnp.einsum("btnh,nhd->btd", attended, out)

    def mlp(x):
        gate, up = jnp.einsum("btd,dcf->cbtf", norm(x), gate_up)
        return jnp.einsum("btf,fd->btd", jax.nn.silu(gate) * up, down)

    return attention, mlp


def logits(params: dict, tokens, *, config: Config):
    """[B, T, V] for this rank's rows of tokens [B, T]."""
    table = whole(params["table"], axis=1)
    stream = residual.run(
        config.topology, sublayers, table[tokens], params=params["layers"], axes=("tensor",)
    )
    return jnp.einsum("btd,vd->btv", norm(stream), table, preferred_element_type=jnp.float32)


def loss(params: dict, tokens, *, config: Config):
    """Mean nats a token of tokens [B, T + 1], over all ranks' rows."""
    scores = logits(params, tokens[:, :-1], config=config)
    nats = optax.softmax_cross_entropy_with_integer_labels(scores, tokens[:, 1:])
    return lax.pmean(jnp.mean(nats), "fsdp")


# Training and sampling, on the mesh.


def over_mesh(function, mesh: Mesh, *, config: Config, out):
    local = functools.partial(function, config=config)
    return jax.shard_map(local, mesh=mesh, in_specs=(SPECS, P("fsdp")), out_specs=out)


def train_step(config: Config, mesh: Mesh, optimizer: optax.GradientTransformation):
    """A compiled (params, state, tokens [B, T + 1]) -> (params, state, loss)."""
    mean_loss = over_mesh(loss, mesh, config=config, out=P())

    def step(params, state, tokens):
        value, gradients = jax.value_and_grad(mean_loss)(params, tokens)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    options = config.topology.compile_options(mesh, phase="train")
    return jax.jit(step, donate_argnums=(0, 1), compiler_options=options)


def train(
    config: Config,
    mesh: Mesh,
    text: np.ndarray,
    *,
    steps: int,
    batch: int = 16,
    length: int = 64,
    say=print,
):
    """(params, the losses), from random windows of `text`, an array of bytes."""
    optimizer = optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 3e-3, steps // 10, steps))
    params, rng, losses = initial(config, mesh), np.random.default_rng(0), []
    with jax.set_mesh(mesh):  # else the second step is compiled anew
        state = optimizer.init(params)
    step = train_step(config, mesh, optimizer)
    for number in range(steps):
        starts = rng.integers(0, len(text) - length, batch)
        tokens = np.stack([text[start : start + length + 1] for start in starts])
        params, state, value = step(params, state, tokens)
        losses.append(float(value))
        if number % 50 == 0 or number + 1 == steps:
            say(f"step {number:4d}  loss {losses[-1]:.3f}")
    return params, losses


def sample(
    params: dict, config: Config, mesh: Mesh, prompt: bytes, *, count: int, seed: int = 0
) -> bytes:
    """The prompt and `count` more bytes, each from a forward pass over all before it."""
    forward = jax.jit(over_mesh(logits, mesh, config=config, out=P("fsdp")))
    rows = mesh.shape["fsdp"]  # the same text in each
    tokens = np.zeros((rows, len(prompt) + count), np.int32)
    tokens[:, : len(prompt)] = np.frombuffer(prompt, np.uint8)
    key = jax.random.key(seed)
    for end in range(len(prompt), len(prompt) + count):
        scores = np.asarray(forward(params, tokens))[0, end - 1]
        tokens[:, end] = jax.random.categorical(jax.random.fold_in(key, end), 2 * scores)
    return tokens[0].astype(np.uint8).tobytes()


# What the compiler makes of it.


def audit(
    config: Config, target: str, *, exposed: int = 1, batch: int = 8, length: int = 1024
) -> schedule.Report:
    """The training step, compiled for a machine that need not be here; AssertionError if it waits
    for its all-reduces.

    exposed: how many of them may be waited for.
    """
    devices = np.array(schedule.devices(schedule.parse(target)))
    mesh = Mesh(devices.reshape(2, -1), AXES)
    optimizer = optax.adamw(1e-3)

    def abstract(shape, spec, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    params = jax.tree.map(abstract, shapes(config), SPECS, is_leaf=is_shape)
    of_params = jax.tree.map(lambda a: a.sharding, params)
    state = jax.eval_shape(optimizer.init, params)
    state = optax.tree.map_params(
        optimizer,
        lambda a, sharding: a.update(sharding=sharding),
        state,
        of_params,
        transform_non_params=lambda a: a.update(sharding=NamedSharding(mesh, P())),
    )
    tokens = abstract((batch, length + 1), P("fsdp"), jnp.int32)
    return schedule.assert_hidden(
        train_step(config, mesh, optimizer), params, state, tokens, exposed=exposed
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.minimal",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "text", type=pathlib.Path, nargs="?", default=pathlib.Path(__file__), help="a file to learn"
    )
    parser.add_argument(
        "--residual",
        default="ladder",
        help="standard, ladder, ladder-2, ... (default: %(default)s)",
    )
    parser.add_argument("--steps", type=int, default=300, help="of training (default: %(default)s)")
    parser.add_argument(
        "--audit", metavar="TARGET", help="compile for v5p:2x2x2, h100:8, ... in place of training"
    )
    options = parser.parse_args()
    config = Config(kind=options.residual)
    if options.audit:
        large = dataclasses.replace(config, width=4096, heads=32, hidden=14336, vocabulary=32_000)
        print(audit(large, options.audit, exposed=2 * 2 * config.layers))
        return
    print(config.topology)
    mesh = jax.make_mesh((2, jax.device_count() // 2), AXES, (jax.sharding.AxisType.Auto,) * 2)
    text = np.frombuffer(options.text.read_bytes(), np.uint8)
    params, _ = train(config, mesh, text, steps=options.steps)
    prompt = text[:32].tobytes()
    print(sample(params, config, mesh, prompt, count=96).decode(errors="replace"))


if __name__ == "__main__":
    main()
