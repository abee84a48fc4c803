"""Which process of how many: what is said, what the cluster says, and what cannot be."""

import pytest

from ladder_jax.errors import UserError
from ladder_jax.processes import Patience, Place, detect, find, patience, place

SAID = {"coordinator": "gpu-0:8476", "processes": "4", "process": "2"}
SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_NODELIST": "gpu[003-006],gpu9",
    "SLURM_NTASKS": "8",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
}


def variables(said):
    return {f"LADDER_JAX_{name.upper()}": value for name, value in said.items()}


def test_said():
    expected = Place("gpu-0:8476", 4, 2)
    assert find(SAID, {}, timeout=1) == find({}, variables(SAID), timeout=1) == expected
    # An option goes before its variable, and both before the cluster.
    assert find({"process": "3"}, {**variables(SAID), **SLURM}, timeout=1) == Place("gpu-0:8476", 4, 3)
    assert Place("[fd00::1]:80", 2, 0).address == ("fd00::1", 80)


@pytest.mark.parametrize(
    "options, environ",
    [
        ({}, {}),
        ({"processes": "1"}, SLURM),
        ({}, {**SLURM, "SLURM_NTASKS": "1"}),
        ({}, {"SLURM_JOB_ID": "4711", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"}),  # the batch shell: no step
        ({}, {"OMPI_COMM_WORLD_SIZE": "1"}),
        ({}, {"TPU_WORKER_HOSTNAMES": "localhost"}),
        ({}, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}),  # some pod
    ],
)
def test_alone(options, environ, monkeypatch):
    monkeypatch.setattr(detect, "run", None)
    assert find(options, environ, timeout=1) is None


@pytest.mark.parametrize(
    "change, message",
    [
        ({"process": "4"}, "--process 4: 4 processes are 0 to 3 (--processes)"),
        ({"process": "-1"}, "--process must not be negative, but is -1"),
        ({"processes": "0"}, "--processes must be positive, not 0"),
        ({"processes": "four"}, "--processes must be a whole number, not 'four'"),
        ({"coordinator": "gpu-0"}, "--coordinator 'gpu-0' must be HOST:PORT, such as gpu-0:8476"),
        ({"coordinator": "gpu-0:99999"}, "must be HOST:PORT"),
        ({"coordinator": ":8476"}, "must be HOST:PORT"),
        ({"coordinator": None}, "no cluster is recognised here: --coordinator must be given too"),
        ({"coordinator": None, "process": None}, "--coordinator and --process must be given too"),
    ],
)
def test_impossible(change, message):
    with pytest.raises(UserError) as caught:
        find({**SAID, **change}, {}, timeout=1)
    assert message in str(caught.value)


def test_impossible_variable_is_named():
    with pytest.raises(UserError, match="LADDER_JAX_PROCESS must be a whole number, not 'x'"):
        find({}, {**variables(SAID), "LADDER_JAX_PROCESS": "x"}, timeout=1)


def test_patience():
    assert patience.of({}, {}) == Patience()
    given = patience.of({"lost_timeout": "5"}, {"LADDER_JAX_HANG_TIMEOUT": "inf", "LADDER_JAX_LOST_TIMEOUT": "7"})
    assert given == Patience(lost=5.0, hang=float("inf"))
    for wrong in ("0", "-1", "nan", "soon"):
        with pytest.raises(UserError, match="--lost-timeout must be a positive number of seconds"):
            patience.of({"lost_timeout": wrong}, {})


def test_slurm(monkeypatch):
    """In a process of its own, as it is used; what is said goes before."""
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    port = 4711 % 2**12 + 61440
    assert find({}, SLURM, timeout=60) == Place(f"gpu003:{port}", 8, 5, (1,))
    assert detect.detect(timeout=1, coordinator="login:1") == detect.Found("login:1", 8, 5, (1,))


def test_tpu_slice(monkeypatch):
    """The second of two, as GKE describes it; jax believes it where there are chips."""
    cluster = pytest.importorskip("jax._src.clusters.cloud_tpu_cluster")
    jax_cluster = pytest.importorskip("jax._src.clusters.cluster")
    for module in (cluster, jax_cluster):
        monkeypatch.setattr(module, "running_in_cloud_tpu_vm", True)
    told = {"TPU_WORKER_HOSTNAMES": "host-3,host-4,host-5", "TPU_WORKER_ID": "1", "TPU_SKIP_MDS_QUERY": "true"}
    told |= {"MEGASCALE_COORDINATOR_ADDRESS": "localhost:1", "MEGASCALE_NUM_SLICES": "2", "MEGASCALE_SLICE_ID": "1"}
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    assert place.suspected(told) == "a TPU slice"
    found = detect.detect(timeout=1)
    assert (found.coordinator, found.processes, found.process, found.local_devices) == ("localhost:8482", 6, 4, None)


@pytest.mark.parametrize(
    "environ, message",
    [
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}, "Open MPI"),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "1"}, "an indexed Kubernetes Job"),
    ],
)
def test_recognised_but_not_understood(environ, message, monkeypatch):
    """Open MPI 5 without mpi4py, a Job without the API's client: what helps is said."""
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError) as caught:
        find({}, environ, timeout=60)
    assert str(caught.value).startswith(f"{message} was recognised, but ")
    assert "--coordinator and --processes and --process must be given too" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_one_host_with_chips(monkeypatch):
    """A TPU of one host trains alone; so does a machine that only looks like one."""
    monkeypatch.setattr(place, "suspected", lambda environ: place.CHIPS)
    for found in (detect.Found(), detect.Found("here:1", 1, 0)):
        monkeypatch.setattr(detect, "run", lambda told, timeout: found)
        assert find({}, {}, timeout=1) is None
    monkeypatch.setattr(detect, "run", lambda told, timeout: detect.Found(problem="no metadata server"))
    with pytest.raises(UserError, match="a TPU was recognised, but no metadata server"):
        find({}, {}, timeout=1)


def test_another_jax(monkeypatch):
    """Its detection has no public name; without it only what is said counts."""
    clusters = pytest.importorskip("jax._src.clusters")
    monkeypatch.delattr(clusters, "ClusterEnv")
    assert detect.detect(timeout=1, processes=2).problem == "this version of jax has another detection of clusters"
