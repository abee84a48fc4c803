"""What options and environment variables say about the processes of a run."""

import dataclasses
import glob
import importlib.util
from collections.abc import Mapping

from ladder_jax.config.fields import natural
from ladder_jax.errors import UserError

CHIPS = "a TPU"  # only its metadata server knows of how many hosts
LONGEST = 1e9  # seconds, 31 years: jax's time-outs are integers

type Options = Mapping[str, str | None]
type Environ = Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class Setting:
    """`--option VALUE`, or LADDER_JAX_OPTION in the environment."""

    name: str
    metavar: str
    help: str

    @property
    def option(self) -> str:
        return "--" + self.name.replace("_", "-")


SETTINGS = (
    Setting("coordinator", "HOST:PORT", "where process 0 listens"),
    Setting("processes", "N", "how many processes train together"),
    Setting("process", "I", "which of them this is: 0 to N - 1"),
    Setting("start_timeout", "SECONDS", "wait so long for all to start (300)"),
    Setting(
        "lost_timeout", "SECONDS", "a process is lost after so long without a sign of life (60)"
    ),
    Setting(
        "hang_timeout",
        "SECONDS",
        "the run hangs if no process gets on for so long (1800; inf: never)",
    ),
)


@dataclasses.dataclass(frozen=True)
class ProcessSpec:
    """How this process joins the others; what is None, jax's cluster detection fills in.

    coordinator: HOST:PORT of process 0; cluster: the scheduler that started this process, None
        where all is given.
    """

    coordinator: str | None
    processes: int | None
    process: int | None
    cluster: str | None = None


@dataclasses.dataclass(frozen=True)
class Timeouts:
    """Time-outs in seconds.

    start: until all processes have joined; lost: without a sign of life of one process; hang:
    without progress of any process, which must be longer than the longest compilation, restoring or
    saving.
    """

    start: float = 300.0
    lost: float = 60.0
    hang: float = 1800.0

    @property
    def interval(self) -> float:
        """Between two signs of life."""
        return min(5.0, self.lost / 5, self.hang / 5)


def spec(options: Options, environ: Environ) -> ProcessSpec | None:
    """How this process joins others; None where it trains alone.

    An option goes before its LADDER_JAX_ variable, and both before the cluster's. Raises UserError
    for impossible values, and for missing ones that no cluster can fill in.
    """
    given = _given(options, environ)
    coordinator = given.get("coordinator")
    _check_coordinator(coordinator)
    count = _whole(given, "processes", least=1)
    index = _whole(given, "process", least=0)
    if index is not None and count is not None and index >= count:
        raise UserError(f"--process {index}: {count} processes are 0 to {count - 1} (--processes)")
    if count == 1:
        return None
    known = ProcessSpec(coordinator, count, index)
    if None not in (coordinator, count, index):
        return known
    cluster = suspected(environ)
    if cluster is None:
        if coordinator is count is index is None:
            return None
        raise incomplete("no cluster is recognised here", known)
    return dataclasses.replace(known, cluster=cluster)


def timeouts(options: Options, environ: Environ) -> Timeouts:
    """Raises UserError for a time-out that is not a positive number; infinity ("inf") is for
    ever.
    """
    given = _given(options, environ)
    names = [name for name in ("start", "lost", "hang") if f"{name}_timeout" in given]
    return Timeouts(**{name: _seconds(name, given[f"{name}_timeout"]) for name in names})


def suspected(environ: Environ) -> str | None:
    """The cluster that may have started this as one of several processes, by its variables
    alone.
    """

    several = lambda name: natural(environ.get(name, "")) > 1
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


def incomplete(why: str, spec: ProcessSpec) -> UserError:
    names = ("coordinator", "processes", "process")
    missing = [f"--{name}" for name in names if getattr(spec, name) is None]
    return UserError(
        f"{why}: {' and '.join(missing)} must be given too"
        " (or --processes 1, to train alone; LADDER_JAX_* variables say the same)"
    )


def _given(options: Options, environ: Environ) -> dict[str, str]:
    given = {}
    for setting in SETTINGS:
        value = options.get(setting.name)
        if value is None:
            value = environ.get("LADDER_JAX_" + setting.name.upper())
        if value:
            given[setting.name] = value
    return given


def _whole(given: dict[str, str], name: str, *, least: int) -> int | None:
    text = given.get(name)
    if text is None:
        return None
    number = natural(text)
    if number < least:
        raise UserError(f"--{name} must be a whole number, at least {least}, not {text!r}")
    return number


def _seconds(name: str, text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = float("nan")
    if not seconds > 0:
        raise UserError(f"--{name}-timeout must be a positive number of seconds, not {text!r}")
    return min(seconds, LONGEST)


def _check_coordinator(address: str | None) -> None:
    if address is None:
        return
    host, _, port = address.rpartition(":")
    is_bare = ":" in host and not host.startswith("[")  # an IPv6 address, whose end may be the port
    if is_bare or not host or not 0 < natural(port) < 2**16:
        raise UserError(f"--coordinator {address!r} must be HOST:PORT, such as gpu-0:8476")
