"""Which of how many processes this one is: from options, LADDER_JAX_* variables, or what the cluster tells."""

import dataclasses
import glob
import importlib.util
from collections.abc import Mapping

from ladder_jax.errors import UserError
from ladder_jax.processes import detect
from ladder_jax.processes.settings import Given, given

CHIPS = "a TPU"  # of how many hosts, only its metadata server knows


@dataclasses.dataclass(frozen=True)
class Place:
    """coordinator: HOST:PORT of process 0; local_devices: the GPUs of this process alone (None: all of its host)."""

    coordinator: str
    processes: int
    process: int
    local_devices: tuple[int, ...] | None = None

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.coordinator.rpartition(":")
        return host.strip("[]"), int(port)

    def named(self, process: int, host: str) -> str:
        return f"process {process} of {self.processes} (host {host})"


def find(options: Mapping[str, str | None], environ: Mapping[str, str], *, timeout: float) -> Place | None:
    """This process's place; None where it trains alone.

    What options and LADDER_JAX_* leave open, jax's own detection of clusters fills in, for up to `timeout` seconds, in
    a process of its own. Raises UserError for impossible values, and where something is left open.
    """
    settings = given(options, environ)
    told = {name: settings[name] for name in ("coordinator", "processes", "process") if name in settings}
    _check(told)
    if "processes" in told and told["processes"].as_int() == 1:
        return None
    values = {name: one.value if name == "coordinator" else one.as_int() for name, one in told.items()}
    if len(values) == 3:
        return Place(**values)
    cluster = suspected(environ)
    if not told and cluster is None:
        return None
    found = detect.run(values, timeout=timeout) if cluster else detect.Found(**values)
    if cluster == CHIPS and not told and found == detect.Found():  # what looked like chips are none
        return None
    missing = [f"--{name}" for name in ("coordinator", "processes", "process") if getattr(found, name) is None]
    if missing:
        why = found.problem or "jax finds no cluster that it knows here"
        where = f"{cluster} was recognised, but {why}" if cluster else "no cluster is recognised here"
        raise UserError(
            f"{where}: {' and '.join(missing)} must be given too"
            " (or --processes 1, to train alone; LADDER_JAX_* variables say the same)"
        )
    if found.processes == 1:
        return None
    return Place(found.coordinator, found.processes, found.process, found.local_devices)


def suspected(environ: Mapping[str, str]) -> str | None:
    """The cluster that may have started this as one of several processes, by its variables alone."""
    several = lambda name: environ.get(name, "").isdigit() and int(environ[name]) > 1
    if "SLURM_PROCID" in environ and "SLURM_STEP_NODELIST" in environ and several("SLURM_NTASKS"):
        return "SLURM"
    if several("OMPI_COMM_WORLD_SIZE"):
        return "Open MPI"
    hosts = environ.get("TPU_PROCESS_ADDRESSES") or environ.get("TPU_WORKER_HOSTNAMES", "")
    if "," in hosts or several("MEGASCALE_NUM_SLICES"):
        return "a TPU slice"
    if "KUBERNETES_SERVICE_HOST" in environ and "JOB_COMPLETION_INDEX" in environ:
        return "an indexed Kubernetes Job"
    chips = glob.glob("/dev/accel[0-9]*") or glob.glob("/dev/vfio/[0-9]*")
    if chips and "TPU_SKIP_MDS_QUERY" not in environ and importlib.util.find_spec("libtpu"):
        return CHIPS
    return None


def _check(told: Mapping[str, Given]) -> None:
    if coordinator := told.get("coordinator"):
        host, _, port = coordinator.value.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 2**16:
            raise UserError(f"{coordinator.source} {coordinator.value!r} must be HOST:PORT, such as gpu-0:8476")
    if (processes := told.get("processes")) and processes.as_int() < 1:
        raise UserError(f"{processes.source} must be positive, not {processes.value}")
    if process := told.get("process"):
        if process.as_int() < 0:
            raise UserError(f"{process.source} must not be negative, but is {process.value}")
        if processes and process.as_int() >= processes.as_int():
            n = processes.as_int()
            raise UserError(f"{process.source} {process.value}: {n} processes are 0 to {n - 1} ({processes.source})")
