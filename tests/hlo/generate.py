"""Makes the fixtures beside it: small programs as the compilers for TPUs and GPUs schedule them.

    python -m tests.hlo.generate [NAME]...     (needs jax[tpu] and the CUDA plugin, and neither a TPU nor a GPU)

Only what the parser reads is kept of each line's attributes: they are long, and change with every compiler.
"""

import os
import pathlib
import re
import sys
import types

from ladder_jax.schedule import targets

os.environ.update(targets.ENVIRONMENT)
os.environ["XLA_FLAGS"] = "--xla_gpu_autotune_level=0"

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from jax.sharding import NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from ladder_jax import parallel, residual, schedule  # noqa: E402
from ladder_jax.config import UNROLLED, CollectiveMatmul, Launch, Loop, MoEConfig, Phase  # noqa: E402
from ladder_jax.nn.modules import normalise  # noqa: E402
from ladder_jax.parallel import Overlap, Split, Traits, exchange, fsdp  # noqa: E402
from ladder_jax.residual.loop import run_layers  # noqa: E402
from ladder_jax.residual.recurrence import LOCAL  # noqa: E402
from ladder_jax.residual.wires import sequence  # noqa: E402
from ladder_jax.residual.wires.exchange import Exchange  # noqa: E402

HERE = pathlib.Path(__file__).parent
TENSOR = ("tensor",)
LAYERS, T, D, F = 3, 512, 2048, 16384
MOE = MoEConfig(experts=16, top_k=2, capacity=1.0)
TPU_SPLIT_F = 4 * F  # a TPU's sublayer at F is shorter than the two messages of a split stream


def sublayer(w_in, w_out):
    """[1, T, D] to a rank's partial sum; a matmul pair whose hidden dimension is split."""

    def compute(x, projections=LOCAL):
        hidden = jax.nn.relu(projections.into(jnp.matmul)(x, w_in))
        return projections.out(jnp.matmul)(hidden, w_out)

    return compute


def layers(x, weights, *, name, launch=Launch.CHAINED):
    """Two sublayers a layer, wired by the topology, unrolled."""
    topology = residual.topology(name, num_layers=LAYERS)
    wire, state = topology.wire(TENSOR, launch=launch), residual.begin(x, topology=topology, axes=TENSOR)
    for layer, steps in enumerate(topology.layers):
        pair = [sublayer(w_in[layer], w_out[layer]) for w_in, w_out in weights]
        for step in steps:
            state = wire.advance(state, step, pair)
    return wire.flush(state)


def scanned(x, weights, *, launch=Launch.CHAINED):
    """The same Ladder in one `lax.scan`."""
    topology = residual.topology("ladder", num_layers=LAYERS)
    wire, state = topology.wire(TENSOR, launch=launch), residual.begin(x, topology=topology, axes=TENSOR)
    state = wire.fill(state, topology.layers[0][0], dtype=x.dtype)

    def turn(state, layer):
        for step in topology.layers[0]:
            state = wire.advance(state, step, [sublayer(*pair) for pair in layer])
        return state, None

    return residual.flush(jax.lax.scan(turn, state, weights)[0], axes=TENSOR)


def naive(x, weights):
    """Ladder as one would write it: nothing keeps the two independent reductions of a layer apart."""
    pending = None
    for layer in range(LAYERS):
        for w_in, w_out in weights:
            read = parallel.pvary(x, TENSOR)
            x = x if pending is None else x + pending
            pending = parallel.all_reduce(sublayer(w_in[layer], w_out[layer])(read), TENSOR)
    return x + pending


def split(x, weights, *, name, form=CollectiveMatmul.NONE, count=LAYERS):
    """A stream that is split along the sequence: both halves of every reduction."""
    topology = residual.topology(name, num_layers=count)
    normal = lambda x: normalise(x, eps=1e-5).astype(x.dtype)
    wire = sequence.SequenceParallel(TENSOR, normal, form)
    steps = wire.layers(topology.layers)
    state = wire.begin(sequence.scatter_sequence(parallel.pvary(x, TENSOR), TENSOR), steps[0][0])
    for layer in range(count):
        pairs = [(w_in[layer], w_out[layer]) for w_in, w_out in weights]
        state = scoped(steps[layer], layer, wire)(state, pairs)
    return parallel.all_reduce(jnp.sum(wire.flush(state).astype(jnp.float32)), TENSOR)


def exchanged(x, weights):
    """Two layers of a Ladder whose experts' rows are exchanged. Tokens take two experts each in turn; all of a layer's
    experts are one pair of matrices."""

    def route(x):
        tokens = x.reshape(-1, D)
        choice = (jnp.arange(len(tokens))[:, None] + jnp.arange(MOE.top_k)[None]) % MOE.experts
        slots = exchange.slots(choice, experts=MOE.experts, size=MOE.slots(len(tokens)))
        return tokens, slots, jnp.full(choice.shape, 0.5)

    def experts(w_in, w_out):
        compute = lambda rows, tied: jnp.einsum("ERF,FD->RED", jax.nn.relu(tied(jnp.matmul(rows, w_in))), w_out)
        return types.SimpleNamespace(route=route, compute=compute)

    topology = residual.topology("ladder", num_layers=2)
    normal = lambda x: normalise(x, eps=1e-5).astype(x.dtype)
    wire = Exchange(TENSOR, normal, MOE)
    planned = wire.layers(topology.layers)
    state = wire.begin(sequence.scatter_sequence(parallel.pvary(x, TENSOR), TENSOR), planned[0][0])
    for layer, steps in enumerate(planned):
        attention, routed = [(w_in[layer], w_out[layer]) for w_in, w_out in weights]
        for step, name in zip(steps, ("attention", "mlp"), strict=True):
            with jax.named_scope(f"layer_{layer}/{name}"):
                state = wire.advance(state, step, [sublayer(*attention), experts(*routed)])
    return parallel.all_reduce(jnp.sum(wire.flush(state).astype(jnp.float32)), TENSOR)


def scoped(steps, layer, wire):
    """A layer of two sublayers, named as the library's are."""

    def compute(state, pairs):
        for step in steps:
            with jax.named_scope(f"layer_{layer}/{('attention', 'mlp')[step.sublayers[0]]}"):
                state = wire.advance(state, step, [sublayer(*pair) for pair in pairs])
        return state

    return compute


def sharded(x, weights):
    """Gradients of an unrolled Ladder whose weights are split over the fsdp axis, too."""
    topology, dims = residual.topology("ladder", num_layers=LAYERS), (("DF", "FD"),) * 2
    wire, bfloat16 = topology.wire(TENSOR), jnp.dtype(jnp.bfloat16)

    def body(state, extra, shares, cache, steps):
        pairs = fsdp.unshard_matrices(shares, dims, dtype=bfloat16)
        for step in steps:
            with jax.named_scope(("attention", "mlp")[step.sublayers[0]]):
                state = wire.advance(state, step, [sublayer(*pair) for pair in pairs])
        return state, extra, cache

    def loss(weights):
        layers = tuple(jax.tree.map(lambda w: w[n], weights) for n in range(LAYERS))
        settings = dict(steps=topology.layers, wire=wire, execution=UNROLLED, dtype=bfloat16)
        state = residual.begin(x, topology=topology, axes=TENSOR)
        state, *_ = run_layers(body, state, params=layers, keeps=fsdp.all_but_gathered, **settings)
        return jnp.sum(residual.flush(state, axes=TENSOR).astype(jnp.float32))

    own = jax.tree.map(lambda w: parallel.pvary(w, ("data", "fsdp", "tensor")), weights)
    return jax.tree.map(lambda g: parallel.all_reduce(g, ("data",)), jax.grad(loss)(own))


def tiny(x, weights):
    """A reduction beside which only a very small matmul can run."""
    (w_in, w_out), _ = weights
    small = x[0, :8, :128] @ x[0, :128, :8]
    out = parallel.all_reduce(sublayer(w_in[0], w_out[0])(parallel.pvary(x, TENSOR)), TENSOR)
    return out + jnp.sum(small).astype(x.dtype)


STANDARD = lambda x, weights: layers(x, weights, name="standard")
LADDER = lambda x, weights: layers(x, weights, name="ladder")
HALVES = lambda x, weights: layers(x, weights, name="ladder", launch=Launch.EXPLICIT)
HALVES_SCANNED = lambda x, weights: scanned(x, weights, launch=Launch.EXPLICIT)
SPLIT = lambda x, weights: split(x, weights, name="ladder")
SPLIT_STANDARD = lambda x, weights: split(x, weights, name="standard")
# Collective matmuls have many operations: two sublayers of them are enough.
RING = lambda x, weights: split(x, weights, name="standard", form=CollectiveMatmul.RING, count=1)
COMPILER = lambda x, weights: split(x, weights, name="standard", form=CollectiveMatmul.COMPILER, count=1)
FORMS = {
    SPLIT: CollectiveMatmul.NONE,
    SPLIT_STANDARD: CollectiveMatmul.NONE,
    RING: CollectiveMatmul.RING,
    COMPILER: CollectiveMatmul.COMPILER,
}
FIXTURES = {
    # name: (function, target, tokens, loop, with the library's options)
    "h100-unrolled": (LADDER, "h100:8", T, Loop.UNROLLED, True),
    "h100-scan": (scanned, "h100:8", T, Loop.SCAN, True),
    "h100-standard": (STANDARD, "h100:8", T, Loop.UNROLLED, True),
    "h100-small": (LADDER, "h100:8", 16, Loop.UNROLLED, False),
    "h100-naive": (naive, "h100:8", T, Loop.UNROLLED, True),
    "h100-tiny": (tiny, "h100:8", T, Loop.UNROLLED, True),
    "h100-halves": (HALVES, "h100:8", T, Loop.UNROLLED, True),
    "tpu7x-halves": (HALVES_SCANNED, "tpu7x:2x2x1", T, Loop.SCAN, True),
    "tpu7x-unrolled": (LADDER, "tpu7x:2x2x1", T, Loop.UNROLLED, True),
    "tpu7x-scan": (scanned, "tpu7x:2x2x1", T, Loop.SCAN, True),
    "tpu7x-standard": (STANDARD, "tpu7x:2x2x1", T, Loop.UNROLLED, True),
    "tpu7x-naive": (naive, "tpu7x:2x2x1", T, Loop.UNROLLED, True),
    "v5p-unrolled": (LADDER, "v5p:2x2x2", T, Loop.UNROLLED, True),
    "v5p-sync": (LADDER, "v5p:2x2x2", T, Loop.UNROLLED, False),
    "v5e-unrolled": (LADDER, "v5e:2x4", T, Loop.UNROLLED, True),
    "h100-split": (SPLIT, "h100:8", T, Loop.UNROLLED, True),
    "h100-split-standard": (SPLIT_STANDARD, "h100:8", T, Loop.UNROLLED, True),
    "tpu7x-split": (SPLIT, "tpu7x:2x2x1", T, Loop.UNROLLED, True),
    "v5p-split": (SPLIT, "v5p:2x2x2", T, Loop.UNROLLED, True),
    "h100-ring": (RING, "h100:8", T, Loop.UNROLLED, True),
    "tpu7x-ring": (RING, "tpu7x:2x2x1", T, Loop.UNROLLED, True),
    "v5p-compiler": (COMPILER, "v5p:2x2x2", T, Loop.UNROLLED, True),
    "h100-exchange": (exchanged, "h100:8", T, Loop.UNROLLED, True),
    "tpu7x-exchange": (exchanged, "tpu7x:2x2x1", T, Loop.UNROLLED, True),
    "h100-sharded": (sharded, "h100:8", T, Loop.UNROLLED, True),
    "tpu7x-sharded": (sharded, "tpu7x:2x2x1", T, Loop.UNROLLED, True),
    "v5p-sharded-sync": (sharded, "v5p:2x2x2", T, Loop.UNROLLED, False),
}


def compile_text(name):
    function, target, tokens, loop, optioned = FIXTURES[name]
    of_fsdp = function is sharded
    mesh = parallel.make_mesh(
        **(dict(fsdp=2, tensor=4) if of_fsdp else dict(tensor=8)), devices=schedule.devices(schedule.parse(target))
    )
    dtype, rows = (jnp.float32, P("fsdp")) if of_fsdp else (jnp.bfloat16, P())
    place = lambda shape, spec, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
    share = "fsdp" if of_fsdp else None
    specs = (P(None, share, "tensor"), P(None, "tensor", share))
    size = TPU_SPLIT_F if function in (SPLIT, RING, COMPILER, exchanged) and not target.startswith("h100") else F
    weights = ((place((LAYERS, D, size), specs[0], dtype), place((LAYERS, size, D), specs[1], dtype)),) * 2
    out = (specs, specs) if of_fsdp else P()
    local = jax.shard_map(function, mesh=mesh, in_specs=(rows, (specs, specs)), out_specs=out)
    options = None
    if optioned:
        waits = function in (STANDARD, SPLIT_STANDARD, RING, COMPILER)
        parts = {Split.WEIGHTS} if of_fsdp else {Split.SEQUENCE} if function in FORMS else set()
        parts |= {Split.SEQUENCE, Split.ROWS} if function is exchanged else set()
        form = FORMS.get(function, CollectiveMatmul.NONE)
        traits = Traits(Overlap.WAITS if waits else Overlap.HIDES, Phase.PREFILL, loop, frozenset(parts), form)
        options = parallel.compile_options(mesh, traits=traits)
    jitted = jax.jit(local, compiler_options=options)
    return jitted.lower(place((len(mesh.devices[0]), tokens, D), rows, jnp.bfloat16), weights).compile().as_text()


def trim(text):
    """Drop what the parser does not read: tables of source lines, most of backend_config, kernels' bodies."""
    text = text[: text.index("\n")].partition(", entry_computation_layout")[0] + text[text.index("\n") :]
    text = re.sub(r"\n(FileNames|FunctionNames|FileLocations|StackFrames)\n(.+\n)*", "\n", text)
    return "\n".join(map(_trim_line, text.splitlines())) + "\n"


def _trim_line(line):
    line = re.sub(r' (scheduling_name|deduplicated_name)="[^"]*"| stack_frame_id=\d+', "", line)
    head, found, config = line.partition(", backend_config=")
    if not found:
        return line
    kept = re.findall(r'"(?:estimated_cycles|known_trip_count)":(?:"\d+"|\{[^}]*\})', config)
    kept += re.findall(r'"lhs_contracting_dimensions":\[[^\]]*\]', config)
    return f"{head}, backend_config={{{','.join(kept)}}}" if kept else head


if __name__ == "__main__":
    for fixture in sys.argv[1:] or FIXTURES:
        (HERE / f"{fixture}.hlo").write_text(trim(compile_text(fixture)))
        print(fixture, flush=True)
