"""Which process of how many: what is given, what a cluster may fill in, and what cannot be."""

import re
from unittest import mock

import jax
import pytest

from ladder_jax.processes import ProcessSpec, Timeouts, join, options, spec, timeouts
from tests.refusals import refused

GIVEN = {"coordinator": "gpu-0:8476", "processes": "4", "process": "2"}
SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_NODELIST": "gpu[003-006],gpu9",
    "SLURM_NTASKS": "8",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
}


def variables(given):
    return {f"LADDER_JAX_{name.upper()}": value for name, value in given.items()}


def test_given():
    assert spec(GIVEN, {}) == spec({}, variables(GIVEN)) == ProcessSpec("gpu-0:8476", 4, 2)
    # An option goes before its variable, and both before the cluster.
    assert spec({"process": "3"}, {**variables(GIVEN), **SLURM}) == ProcessSpec("gpu-0:8476", 4, 3)
    assert spec({**GIVEN, "coordinator": "[fd00::1]:80"}, {}).coordinator == "[fd00::1]:80"


@pytest.mark.parametrize(
    "options, environ",
    [
        ({}, {}),
        ({"processes": "1"}, SLURM),
        ({}, {**SLURM, "SLURM_NTASKS": "1"}),
        # the batch shell: no step
        ({}, {"SLURM_JOB_ID": "4711", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"}),
        ({}, {"OMPI_COMM_WORLD_SIZE": "1"}),
        ({}, {"TPU_WORKER_HOSTNAMES": "localhost"}),
        ({}, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}),  # some pod
    ],
)
def test_alone(options, environ):
    assert spec(options, environ) is None


@pytest.mark.parametrize(
    "environ, cluster",
    [
        (SLURM, "SLURM"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "Open MPI"),
        ({"TPU_WORKER_HOSTNAMES": "host-3,host-4"}, "a TPU slice"),
        ({"MEGASCALE_NUM_SLICES": "2", "TPU_WORKER_HOSTNAMES": "host-3"}, "a TPU slice"),
        (
            {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "1"},
            "an indexed Kubernetes Job",
        ),
    ],
)
def test_cluster_fills_in(environ, cluster):
    assert spec({}, environ) == ProcessSpec(None, None, None, cluster)
    assert spec({"coordinator": "login:1"}, environ) == ProcessSpec("login:1", None, None, cluster)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"process": "4"}, "--process 4: 4 processes are 0 to 3 (--processes)"),
        ({"process": "-1"}, "--process must be a whole number, at least 0, not '-1'"),
        ({"processes": "0"}, "--processes must be a whole number, at least 1, not '0'"),
        ({"processes": "four"}, "--processes must be a whole number, at least 1, not 'four'"),
        ({"coordinator": "gpu-0"}, "--coordinator 'gpu-0' must be HOST:PORT, such as gpu-0:8476"),
        ({"coordinator": "gpu-0:²"}, "--coordinator 'gpu-0:²' must be HOST:PORT"),
        ({"processes": "9" * 5000}, "--processes must be a whole number, at least 1, not '999"),
        ({"coordinator": ":8476"}, "must be HOST:PORT"),
        ({"coordinator": "::1:8476"}, "must be HOST:PORT"),
        ({"coordinator": None}, "no cluster is recognised here: --coordinator must be given too"),
        ({"coordinator": None, "process": None}, "--coordinator and --process must be given too"),
    ],
)
def test_impossible(change, message):
    with refused(re.escape(message)):
        spec({**GIVEN, **change}, {})


def test_timeouts():
    assert timeouts({}, {}) == Timeouts()
    given = timeouts(
        {"lost_timeout": "5"}, {"LADDER_JAX_HANG_TIMEOUT": "inf", "LADDER_JAX_LOST_TIMEOUT": "7"}
    )
    assert given == Timeouts(lost=5.0, hang=options.LONGEST)
    for wrong in ("0", "-1", "nan", "soon"):
        with refused("--lost-timeout must be a positive number of seconds"):
            timeouts({"lost_timeout": wrong}, {})


def joined(spec):
    with join.joined(spec, settings={}, timeouts=Timeouts(start=60), say=print):
        return jax.process_index()


def test_jax_fills_in_and_has_the_longer_time_outs(monkeypatch):
    """What is given goes before what jax finds; its own time-outs abort, so ours come first."""
    initialize = mock.Mock()
    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    monkeypatch.setattr(jax.config, "update", lambda *args: None)
    for given in (ProcessSpec("login:1", None, None, "SLURM"), ProcessSpec("gpu-0:8476", 4, 2)):
        join.connect(given, timeouts=Timeouts(start=60, lost=30), say=print)
    (found, detected), (said, fixed) = initialize.call_args_list
    assert found == ("login:1", None, None)
    assert detected["cluster_detection_method"] is None
    assert said == ("gpu-0:8476", 4, 2)
    assert fixed["cluster_detection_method"] == "deactivate"
    assert fixed["initialization_timeout"] == 120
    assert fixed["heartbeat_timeout_seconds"] == 120


def test_a_coordinator_on_this_machine_listens_to_it_alone(port):
    for host in ("localhost", "127.0.0.1"):
        assert join._bind_address(f"{host}:{port}") == f"{host}:{port}"
    assert join._bind_address(f"gpu-0:{port}") is None


def test_one_host_with_chips(monkeypatch):
    """A machine that only looks like one of a TPU slice trains alone."""

    errors = (
        ValueError("coordinator_address should be defined."),
        RuntimeError("no metadata server"),
    )
    monkeypatch.setattr(jax.distributed, "initialize", mock.Mock(side_effect=errors))
    monkeypatch.setattr(jax.config, "update", lambda *args: None)
    assert joined(ProcessSpec(None, None, None, options.CHIPS)) == 0
    with refused("a TPU was recognised, but no metadata server: --coordinator and --processes"):
        joined(ProcessSpec(None, None, None, options.CHIPS))


@pytest.mark.parametrize(
    "environ, message",
    [
        (
            {
                "OMPI_COMM_WORLD_SIZE": "2",
                "OMPI_COMM_WORLD_RANK": "0",
                "OMPI_COMM_WORLD_LOCAL_RANK": "0",
            },
            "Open MPI",
        ),
        (
            {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "1"},
            "an indexed Kubernetes Job",
        ),
    ],
)
def test_recognised_but_not_understood(environ, message, run_cli):
    """Open MPI 5 without mpi4py, a Job without the API's client: what helps is said last."""
    done = run_cli("train", "tiny", check_status=2, timeout=120, **environ)
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"ladder-jax: {message} was recognised, but "), done.stderr
    assert "--coordinator and --processes and --process must be given too" in last
