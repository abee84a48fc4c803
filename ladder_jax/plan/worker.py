"""Compile one training step in a subprocess, as `ladder_jax.overlap.programs` does, and report its memory.

python -m ladder_jax.plan.worker REQUEST.json RESULT
"""

import json
import os
import pathlib
import sys
import time

from ladder_jax import files
from ladder_jax.config import RunConfig, from_dict
from ladder_jax.errors import UserError
from ladder_jax.schedule import targets


def main(source: str, destination: str) -> int:
    request = json.loads(pathlib.Path(source).read_text())
    config = from_dict({name: request[name] for name in ("model", "mesh", "train")})
    try:
        confirmed = measure(targets.parse(request["target"]), config=config)
    except UserError as error:
        print(json.dumps({"error": str(error)}))
        return 2
    files.write_atomically(destination, lambda path: pathlib.Path(path).write_text(json.dumps(confirmed)))
    return 0


def measure(target: targets.Target, *, config: RunConfig) -> dict:
    """The fields of `confirm.Confirmed`."""
    import jax

    from ladder_jax import nn, schedule, train
    from ladder_jax.overlap import programs
    from ladder_jax.parallel import make_mesh

    mesh = make_mesh(**config.mesh.axes, devices=schedule.devices(target))
    definition = nn.define(config.model, mesh=mesh, experts=config.mesh.experts)
    settings = dict(config=config.train)
    arguments = train.abstract_state(definition, **settings), train.abstract_batch(definition, **settings)
    versions = {"jax": jax.__version__, "compiler": programs.compiler(target)}
    started, cpu_started = time.perf_counter(), time.process_time()
    elapsed = lambda: {"seconds": time.perf_counter() - started, "cpu_seconds": time.process_time() - cpu_started}
    try:
        memory = train.train_step(definition, **settings).compile(*arguments).memory_analysis()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        none = dict.fromkeys(("arguments", "temporaries", "outputs", "code", "host"), 0)
        refusal = str(error).splitlines()[0][:400]
        return {**none, **elapsed(), **versions, "refusal": refusal}
    return {
        "arguments": memory.argument_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
        "outputs": memory.output_size_in_bytes - memory.alias_size_in_bytes,
        "code": memory.generated_code_size_in_bytes,
        "host": memory.host_temp_size_in_bytes + memory.host_argument_size_in_bytes,
        **elapsed(),
        **versions,
    }


if __name__ == "__main__":
    status = main(*sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # no normal exit: a compiler's threads may hang at the interpreter's end
