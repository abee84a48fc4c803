"""Makes the fixtures beside it: small programs as the compilers for TPUs and GPUs schedule them.

    python -m tests.hlo.generate          (needs jax[tpu] and the CUDA plugin, and neither a TPU nor a GPU)

Only what the parser reads is kept of each line's attributes: they are long, and change with every compiler.
"""

import os
import pathlib
import re

from ladder_jax.schedule import targets

os.environ.update(targets.ENVIRONMENT)
os.environ["XLA_FLAGS"] = "--xla_gpu_autotune_level=0"

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from jax.sharding import NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from ladder_jax import parallel, residual, schedule  # noqa: E402
from ladder_jax.config import Loop, Phase  # noqa: E402
from ladder_jax.parallel import Overlap, Traits  # noqa: E402

HERE = pathlib.Path(__file__).parent
TENSOR = ("tensor",)
LAYERS, T, D, F = 3, 512, 2048, 16384


def sublayer(w_in, w_out):
    """[1, T, D] to a rank's partial sum; a matmul pair whose hidden dimension is split."""
    return lambda x: jax.nn.relu(x @ w_in) @ w_out


def layers(x, weights, *, name):
    """Two sublayers a layer, wired by the topology, unrolled."""
    topology = residual.topology(name, num_layers=LAYERS)
    state = residual.begin(x, topology=topology, axes=TENSOR)
    for layer, steps in enumerate(topology.layers):
        pair = [sublayer(w_in[layer], w_out[layer]) for w_in, w_out in weights]
        for step in steps:
            state = step(state, pair, axes=TENSOR)
    return residual.flush(state, axes=TENSOR)


def scanned(x, weights):
    """The same Ladder in one `lax.scan`."""
    topology = residual.topology("ladder", num_layers=LAYERS)
    state = residual.begin(x, topology=topology, axes=TENSOR)
    state = topology.layers[0][0].fill(state, axes=TENSOR, dtype=x.dtype)

    def turn(state, layer):
        for step in topology.layers[0]:
            state = step(state, [sublayer(*pair) for pair in layer], axes=TENSOR)
        return state, None

    return residual.flush(jax.lax.scan(turn, state, weights)[0], axes=TENSOR)


def naive(x, weights):
    """Ladder as one would write it: nothing keeps the two independent reductions of a layer apart."""
    pending = None
    for layer in range(LAYERS):
        for w_in, w_out in weights:
            read = parallel.vary(x, TENSOR)
            x = x if pending is None else x + pending
            pending = parallel.all_reduce(sublayer(w_in[layer], w_out[layer])(read), TENSOR)
    return x + pending


def tiny(x, weights):
    """A reduction beside which only a very small matmul can run."""
    (w_in, w_out), _ = weights
    small = x[0, :8, :128] @ x[0, :128, :8]
    out = parallel.all_reduce(sublayer(w_in[0], w_out[0])(parallel.vary(x, TENSOR)), TENSOR)
    return out + jnp.sum(small).astype(x.dtype)


STANDARD = lambda x, weights: layers(x, weights, name="standard")
LADDER = lambda x, weights: layers(x, weights, name="ladder")
FIXTURES = {
    # name: (function, target, tokens, loop, with the library's options)
    "h100-unrolled": (LADDER, "h100:8", T, Loop.UNROLLED, True),
    "h100-scan": (scanned, "h100:8", T, Loop.SCAN, True),
    "h100-standard": (STANDARD, "h100:8", T, Loop.UNROLLED, True),
    "h100-small": (LADDER, "h100:8", 16, Loop.UNROLLED, False),
    "h100-naive": (naive, "h100:8", T, Loop.UNROLLED, True),
    "h100-tiny": (tiny, "h100:8", T, Loop.UNROLLED, True),
    "tpu7x-unrolled": (LADDER, "tpu7x:2x2x1", T, Loop.UNROLLED, True),
    "tpu7x-scan": (scanned, "tpu7x:2x2x1", T, Loop.SCAN, True),
    "tpu7x-standard": (STANDARD, "tpu7x:2x2x1", T, Loop.UNROLLED, True),
    "tpu7x-naive": (naive, "tpu7x:2x2x1", T, Loop.UNROLLED, True),
    "v5p-unrolled": (LADDER, "v5p:2x2x2", T, Loop.UNROLLED, True),
    "v5p-sync": (LADDER, "v5p:2x2x2", T, Loop.UNROLLED, False),
    "v5e-unrolled": (LADDER, "v5e:2x4", T, Loop.UNROLLED, True),
}


def compile_text(name):
    function, target, tokens, loop, optioned = FIXTURES[name]
    mesh = schedule.make_mesh(target)
    place = lambda shape, spec: jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
    specs = (P(None, None, "tensor"), P(None, "tensor", None))
    weights = ((place((LAYERS, D, F), specs[0]), place((LAYERS, F, D), specs[1])),) * 2
    local = jax.shard_map(function, mesh=mesh, in_specs=(P(), (specs, specs)), out_specs=P())
    options = None
    if optioned:
        overlap = Overlap.WAITS if function is STANDARD else Overlap.HIDES
        options = parallel.compile_options(mesh, traits=Traits(overlap, Phase.PREFILL, loop))
    jitted = jax.jit(local, compiler_options=options)
    return jitted.lower(place((1, tokens, D), P()), weights).compile().as_text()


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
    for fixture in FIXTURES:
        (HERE / f"{fixture}.hlo").write_text(trim(compile_text(fixture)))
        print(fixture, flush=True)
