"""What jax finds out about the cluster: SLURM, Open MPI, Cloud TPU, Kubernetes Jobs.

`jax.distributed.initialize()` detects and connects in one; the processes meet here before that, and so need the
detection alone. It has no public name, hence the one check for it. It runs in a process that ends with it, so that
the parent of a worker never imports jax.
"""

import dataclasses
import json
import subprocess
import sys
from typing import Any

from ladder_jax import python
from ladder_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Found:
    """None for what is still unknown; `problem`: that kept jax from finding it, if not merely nothing was there."""

    coordinator: str | None = None
    processes: int | None = None
    process: int | None = None
    local_devices: tuple[int, ...] | None = None
    problem: str = ""


def run(told: dict[str, Any], *, timeout: float) -> Found:
    """What `detect` finds, beside what was `told`. Raises UserError where the cluster does not answer in time."""
    command = python.command(f"{__name__}:main", json.dumps({**told, "timeout": min(timeout, 1e6)}))
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout + 30)
    except subprocess.TimeoutExpired:
        raise UserError(f"the cluster's environment has not been understood within {timeout:g} s") from None
    try:
        found = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        why = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        return Found(**told, problem=f"it could not be asked ({why})")
    local = found.pop("local_devices")
    return Found(**found, local_devices=None if local is None else tuple(local))


def detect(*, timeout: float, coordinator=None, processes=None, process=None) -> Found:
    """What is None from the cluster's variables or services, waiting for them for up to `timeout` seconds."""
    told = Found(coordinator, processes, process)
    try:
        from jax._src.clusters import ClusterEnv

        ask = ClusterEnv.auto_detect_unset_distributed_params
    except (ImportError, AttributeError):
        return dataclasses.replace(told, problem="this version of jax has another detection of clusters")
    try:
        coordinator, processes, process, local = ask(coordinator, processes, process, None, None, int(timeout))
    except Exception as error:  # of whatever the cluster's own service raises
        return dataclasses.replace(told, problem=" ".join(str(error).split()) or type(error).__name__)
    return dataclasses.replace(
        told, coordinator=coordinator, processes=processes, process=process, local_devices=local and tuple(local)
    )


def main() -> None:
    """What `run` starts: the arguments of `detect` as JSON in, its answer as JSON out."""
    print(json.dumps(dataclasses.asdict(detect(**json.loads(sys.argv[1])))))
