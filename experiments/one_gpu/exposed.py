"""How much of the emulated wire each topology exposes, in wall-clock: with it, and before and after without.

    python -m experiments.one_gpu.exposed --model llama-3-70b --share 8 --batch 1,16 --out exposed.json

Three wires: `payload` copies an all-reduce's bytes; `nccl` and `one-kernel` copy as many as take the time of NCCL's
all-reduce and of the one-kernel ones, which are the costs that `ladder-jax predict --hardware` has for those bytes.
XLA's flags are read once a process: XLA_FLAGS=--xla_gpu_enable_command_buffer= is without CUDA graphs.
"""

import argparse
import os
import pathlib
import statistics
from collections.abc import Sequence

from experiments import measure as measuring
from experiments.one_gpu import wire
from ladder_jax import parallel, residual
from ladder_jax.bench import measure
from ladder_jax.bench import request as requests
from ladder_jax.bench.measure import Samples
from ladder_jax.bench.request import Request
from ladder_jax.predict import link, machine
from ladder_jax.words import words

KERNELS = (link.Algorithm.ONE_SHOT, link.Algorithm.TWO_SHOT)
WIRES = ("payload", "nccl", "one-kernel")
NUMBERS = ("share", "prompt_length", "new_tokens", "warmup", "repeats", "layers")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3-70b")
    parser.add_argument("--residual", default="standard,ladder,parallel")
    parser.add_argument("--batch", default="1,16")
    parser.add_argument("--wires", default=",".join(WIRES))
    parser.add_argument("--hardware", default="h100-nvlink", help="of ladder-jax predict, for the costs of all-reduces")
    for name in NUMBERS:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=8 if name == "share" else None)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    args = vars(parser.parse_args())
    out, hardware, names = args.pop("out"), args.pop("hardware"), words("wires", args.pop("wires"))
    if wrong := [name for name in names if name not in WIRES]:
        parser.error(f"no such wire: {', '.join(wrong)}")
    request = requests.make(**args)
    found = {"xla_flags": os.environ.get("XLA_FLAGS", ""), "share": request.share, "hardware": hardware}
    measured = wire.copies()
    found["copies"] = [{"bytes": size, "seconds": seconds} for size, seconds in measured]
    every = wires(hardware, ranks=request.share, measured=measured)
    found["rows"] = rows(request, wires={name: every[name] for name in names})
    measuring.report({"model": request.model, **found}, file=out)


def wires(hardware: str, *, ranks: int, measured: Sequence[tuple[int, float]]) -> dict[str, wire.Copied]:
    """By name, how many bytes are copied in place of an all-reduce over `ranks`."""
    on = machine.load(hardware)
    cost = lambda among: lambda size: on.all_reduce(size, ranks=ranks, among=among)
    emulated = [wire.as_long_as(cost(among), measured=measured) for among in (link.NCCL, KERNELS)]
    return dict(zip(WIRES, (lambda size: size, *emulated), strict=True))


def rows(request: Request, *, wires: dict[str, wire.Copied]) -> list[dict]:
    """A row a wire, batch and residual. Without a wire is measured before and after, so that drift shows."""
    mesh = parallel.make_mesh()
    once = lambda: measure.samples(request, mesh=mesh)
    before, wired = once(), {}
    for name, copied in wires.items():
        with wire.host_wire(copied):
            wired[name] = once()
    after = once()
    found = []
    for name, samples in wired.items():
        of_wire = [row(request, *each) for each in zip(before, samples, after, strict=True)]
        found += [{"wire": name, **one} for one in against_standard(of_wire)]
    return found


def row(request: Request, before: Samples, wired: Samples, after: Samples) -> dict:
    """Seconds an all-reduce in prefill and in a decode step: what the wire adds to the step, over its all-reduces.

    drift: the same of the two measurements without the wire, apart from each other; what is smaller says nothing.
    """
    topology = residual.of_model(request.config(before.residual))
    count = sum(len(layer) for layer in topology.layers)
    steps = request.new_tokens - 1
    found = {"residual": before.residual, "batch": before.batch, "all_reduces": count}
    for phase, calls in (("prefill", count), ("decode", count * steps)):
        first, with_wire, last = (statistics.median(getattr(one, phase)) for one in (before, wired, after))
        without = (first + last) / 2
        found |= {
            f"{phase}_seconds": without,
            f"{phase}_seconds_wired": with_wire,
            f"{phase}_exposed_seconds": (with_wire - without) / calls,
            f"{phase}_drift_seconds": abs(last - first) / calls,
        }
    return found


def against_standard(rows: Sequence[dict]) -> list[dict]:
    """With the share of the wire that each hides: what it exposes of an all-reduce, against what Standard does."""
    exposed = {row["batch"]: row for row in rows if row["residual"] == "standard"}
    return [
        row | {
            f"{phase}_hidden": 1 - row[f"{phase}_exposed_seconds"] / exposed[row["batch"]][f"{phase}_exposed_seconds"]
            for phase in ("prefill", "decode")
        } if row["batch"] in exposed else row
        for row in rows
    ]  # fmt: skip


if __name__ == "__main__":
    main()
