"""Does a recipe's training step fit its devices, and what of its communication is hidden? Compiled, not run.

    python -m experiments.pretrain.meshes RECIPE.yaml v5p:4x4x4 [path.to.field=value ...]

The whole step as the recipe has it (its layers, accumulation, remat and mesh), compiled ahead of time for devices that
need not be here: jax[tpu], some minutes and some GiB of this machine's memory. The answer is printed as JSON, and added
to meshes.json in place of an older one of the same recipe, target and overrides.
"""

import argparse
import importlib.metadata
import json
import os
import pathlib
import sys
import time
from collections.abc import Sequence

from ladder_jax import files
from ladder_jax.config import RunConfig, load
from ladder_jax.errors import UserError
from ladder_jax.schedule import shards, targets

HERE = pathlib.Path(__file__).parent


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.pretrain.meshes",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("recipe")
    parser.add_argument("target", help="v5p:4x4x4 or another slice of TPUs")
    parser.add_argument("overrides", nargs="*", metavar="path.to.field=value")
    parser.add_argument("--out", type=pathlib.Path, default=HERE / "meshes.json")
    args = parser.parse_intermixed_args(argv)
    os.environ.update(targets.ENVIRONMENT)
    try:
        row = measure(args.recipe, targets.parse(args.target), args.overrides)
    except UserError as error:
        print(f"meshes: {error}", file=sys.stderr)
        return 2
    key = lambda one: (one["recipe"], one["target"], *one["overrides"])
    rows = json.loads(args.out.read_text())["rows"] if args.out.is_file() else []
    rows = sorted([*(one for one in rows if key(one) != key(row)), row], key=key)
    text = json.dumps({"rows": rows}, indent=1) + "\n"
    files.write_atomically(str(args.out), lambda path: pathlib.Path(path).write_text(text))
    print(json.dumps(row))
    return 0


def measure(recipe: str, target: targets.Target, overrides: list[str]) -> dict:
    """Bytes of one device by the compiler's own account, and counts as `ladder-jax overlap` makes them.

    Raises UserError where the mesh is not of the target's size, or the compiler is not installed.
    """
    config = load(recipe, overrides=overrides)
    mesh, how = config.mesh, config.train
    if mesh.size != target.count:
        sizes = f"{mesh.data} x {mesh.fsdp} x {mesh.tensor}"
        raise UserError(f"the mesh {sizes} has {mesh.size} devices, {target.name} has {target.count}")
    import jax

    from ladder_jax import nn, schedule, train
    from ladder_jax.parallel import make_mesh

    over = make_mesh(**mesh.axes, devices=schedule.devices(target))
    definition = nn.define(train.resolve(config).model, mesh=over)
    began = time.perf_counter()
    step = train.train_step(definition, config=how)
    arguments = train.abstract_state(definition, config=how), train.abstract_batch(definition, config=how)
    compiled = step.compile(*arguments)
    seconds, memory = time.perf_counter() - began, compiled.memory_analysis()
    rows = how.batch // (mesh.data * mesh.fsdp) // how.accumulate
    outputs = memory.output_size_in_bytes - memory.alias_size_in_bytes
    peak = memory.argument_size_in_bytes + memory.temp_size_in_bytes + outputs + memory.generated_code_size_in_bytes
    return {
        "recipe": pathlib.Path(recipe).stem,
        "target": target.name,
        "overrides": overrides,
        **{f"mesh_{axis}": size for axis, size in mesh.axes.items()},
        "rows": rows,
        "accumulate": how.accumulate,
        "remat": how.remat.value,
        "sequence_parallel": how.sequence_parallel,
        "argument_bytes": memory.argument_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "bytes_per_device": peak,
        "device_memory": target.memory,
        **_overlap(compiled, config, rows=rows),
        "compile_seconds": seconds,
        "compiler_options": step.options,
        "jax": jax.__version__,
        "libtpu": importlib.metadata.version("libtpu"),
    }


def _overlap(compiled, config: RunConfig, *, rows: int) -> dict:
    """What is hidden. Of a model with experts None: on TPUs they are kernels, whose FLOPs a schedule does not show."""
    if config.model.moe is not None:
        return dict.fromkeys(("all_reduces", "hidden", "gathers", "scatters"))
    from ladder_jax.schedule import hlo, judge

    held, tokens = shards.shard(config.model, ranks=config.mesh.tensor), rows * config.train.sequence
    flops = {"attention": 2 * tokens * held.attention, "mlp": 2 * tokens * held.mlp}
    flops["joint"] = sum(flops.values())
    found = judge.read(hlo.parse(compiled.as_text()), sublayer_flops=flops)
    moved = {"gathers": _transfers(found.gathers), "scatters": _transfers(found.scatters)}
    return {"all_reduces": found.all_reduces, "hidden": found.hidden, **moved}


def _transfers(found: Sequence) -> dict:
    """Arrays of layers' weights, or of their gradients; and the share of their bytes that is hidden."""
    from ladder_jax.schedule.report import Status

    moved = lambda these: sum(one.collective.executions * one.collective.bytes for one in these)
    hidden = [one for one in found if one.status is Status.HIDDEN]
    return {
        "count": sum(one.count for one in found),
        "hidden": sum(one.count for one in hidden),
        "hidden_bytes_fraction": moved(hidden) / moved(found) if found else None,
    }


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(status)  # a compiler's threads may hang as the interpreter ends
