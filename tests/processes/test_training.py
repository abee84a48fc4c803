"""One run on several processes, started as clusters do it, killed, preempted and resumed: the
losses of one process.
"""

import contextlib
import os
import re
import signal
import socket
import sys
import time

import pytest
import yaml

from ladder_jax.checkpoint import steps, verify
from ladder_jax.train import metrics
from tests import runs
from tests.changed import ROOT
from tests.covering import full

STEPS = 60
SETTINGS = f"""
    train.steps={STEPS} train.checkpoint_every=10 train.evaluate_every=30 train.evaluation_batches=1
    run.tensorboard=false
""".split()
HOST = socket.gethostname()
MANIFEST = ROOT / "experiments/launch/jobset/gpu.yaml"


def slurm(process, processes, port):
    """As `srun` does; of the job's number jax makes the port."""
    job = port - (65535 - 2**12 + 1)
    names = {
        "JOB_ID": job,
        "STEP_NODELIST": "localhost",
        "NTASKS": processes,
        "PROCID": process,
        "LOCALID": process,
    }
    return {f"SLURM_{name}": str(value) for name, value in names.items()}


def open_mpi(process, processes, port):
    """As `mpirun` of Open MPI 4 does."""
    job = (port - (65535 - 2**12 + 1)) * 2**12
    ranks = {"SIZE": processes, "RANK": process, "LOCAL_RANK": process}
    uri = {"OMPI_MCA_orte_hnp_uri": f"{job}.0;tcp://127.0.0.1:1"}
    return {**uri, **{f"OMPI_COMM_WORLD_{name}": str(value) for name, value in ranks.items()}}


def jobset(process, processes, port):
    """As a kubelet does with the manifest's `env`, on a pod of a JobSet whose coordinator is
    here.
    """
    spec = yaml.safe_load(MANIFEST.read_text())["spec"]["replicatedJobs"][0]["template"]["spec"][
        "template"
    ]["spec"]
    annotations = {
        "jobset.sigs.k8s.io/coordinator": "localhost",
        "batch.kubernetes.io/job-completion-index": str(process),
    }
    found = {}
    for one in spec["containers"][0]["env"]:
        if "value" in one:
            found[one["name"]] = re.sub(r"\$\((\w+)\)", lambda name: found[name[1]], one["value"])
        else:
            path = one["valueFrom"]["fieldRef"]["fieldPath"]
            found[one["name"]] = annotations[
                re.fullmatch(r"metadata\.annotations\['(.+)'\]", path)[1]
            ]
    # Two processes and a free port, where the manifest has four nodes of their own.
    found["LADDER_JAX_PROCESSES"] = str(processes)
    found["LADDER_JAX_COORDINATOR"] = found["LADDER_JAX_COORDINATOR"].replace(":8476", f":{port}")
    return {**found, "KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": str(process)}


def high_port():
    """In the range that jax makes of jobs' numbers."""
    for port in range(61440 + os.getpid() % 2000, 65535):
        with contextlib.suppress(OSError), socket.socket() as free:
            free.bind(("", port))
            return port
    raise OSError("no port is free")


@pytest.fixture
def start(book, tmp_path, spawn):
    """Starts the processes of a run in `tmp_path`/run."""

    def start(*more, cluster, processes=2, lost=60):
        port = high_port()
        words = runs.words(book, tmp_path / "run", *SETTINGS, f"mesh.data={processes}", *more)
        options = ["--cpu-devices", "1", "--lost-timeout", str(lost)]
        command = [sys.executable, "-m", "ladder_jax", "train", "tiny", *words, *options]
        return [spawn(command, **cluster(one, processes, port)) for one in range(processes)]

    return start


@pytest.fixture(scope="module")
def alone(book, tmp_path_factory):
    """The rows of one process with two devices."""
    run = tmp_path_factory.mktemp("alone") / "run"
    runs.run(book, run, *SETTINGS, "mesh.data=2")
    return metrics.read(run)


def until(run, rows, *, processes):
    """Waits until `rows` steps are logged."""
    deadline = time.monotonic() + 240
    while len(metrics.read(run)) < rows:
        assert time.monotonic() < deadline and all(
            process.poll() is None for process in processes
        ), ended(processes)
        time.sleep(0.01)


def ended(processes):
    return [process.communicate(timeout=240) for process in processes]


def stopped_at(run, *, least):
    """The last step that a run has logged, which is saved whole; before its end."""
    last = metrics.read(run)[-1]["step"]
    assert least <= last < STEPS
    assert steps(run / "checkpoints")[-1] == last
    assert verify(run / "checkpoints" / str(last)) == []
    return last


def same(rows, expected, *, rel):
    """Exactly, where `rel` is 0."""
    for key in ("loss", "validation_loss"):
        found, wanted = (
            [(row["step"], row[key]) for row in some if key in row] for some in (rows, expected)
        )
        assert [step for step, _ in found] == [step for step, _ in wanted[: len(found)]]
        for (_, a), (_, b) in zip(found, wanted):
            assert a == b if rel == 0 else a == pytest.approx(b, rel=rel)


@pytest.mark.parametrize("cluster", [slurm, full(open_mpi)])
def test_two_are_killed_and_resumed(start, alone, tmp_path, cluster):
    """The second is killed; then, as a JobSet, they make the steps since the last checkpoint again,
    and alike.

    The first fails in a collective at once, and waits to hear why.
    """
    run = tmp_path / "run"
    killed = start(cluster=cluster, lost=10)
    # the save after step 20 waits for that after step 10, so one is complete
    until(run, 25, processes=killed)
    killed[1].kill()
    said = ended(killed)
    assert [process.returncode for process in killed] == [1, -signal.SIGKILL], said
    line = f"ladder-jax: process 1 of 2 (host {HOST}) has not been heard of for 10 s: all processes stop; the same"
    assert said[0][1].splitlines()[-1].startswith(line)
    assert "Traceback" not in said[0][1]

    saved = steps(run / "checkpoints")[-1]
    before = metrics.read(run)
    resumed = start("--profile", str(STEPS), cluster=jobset)
    said = ended(resumed)
    assert [process.returncode for process in resumed] == [0, 0], said
    assert f"resuming {run} from step {saved}" in said[0][1]
    assert f"trained a model of 22,624 parameters for {STEPS} steps" in said[0][0]
    ours = [line for out in said[1] for line in out.splitlines() if not line.startswith("[Gloo]")]
    assert ours == []  # the first alone speaks
    assert len(list((run / "profile").glob("process_*/plugins/profile/*/*.xplane.pb"))) == 2
    assert len(metrics.read(run)) == STEPS
    same(before, metrics.read(run), rel=0)
    same(metrics.read(run), alone, rel=1e-5)


@pytest.mark.full
def test_one_of_four_is_preempted_and_all_save(start, alone, tmp_path):
    run = tmp_path / "run"
    # A save at every step: else a quick machine has trained all steps before the signal reaches all
    # processes.
    four = start("train.checkpoint_every=1", cluster=slurm, processes=4)
    until(run, 5, processes=four)
    four[2].send_signal(signal.SIGTERM)
    said = ended(four)
    assert [process.returncode for process in four] == [143] * 4, said
    stopped = stopped_at(run, least=5)
    assert all(f"SIGTERM: step {stopped} is saved" in err for _, err in said)
    same(metrics.read(run), alone, rel=1e-5)
