"""One run on several processes, started as clusters do it, killed, preempted and resumed: the losses of one process."""

import contextlib
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time

import pytest
import yaml

from ladder_jax import config, train
from ladder_jax.checkpoint import steps, verify
from ladder_jax.train import metrics

STEPS = 120
TINY = ["model.num_layers=2", "model.d_model=32", "model.d_ff=32", "model.dtype=float32", f"train.steps={STEPS}",
        "train.batch=4", "train.sequence=32", "train.log_every=1", "train.checkpoint_every=5", "train.warmup_steps=5",
        "train.evaluate_every=60", "train.evaluation_batches=1", "run.tensorboard=false"]  # fmt: skip
HOST = socket.gethostname()
MANIFEST = pathlib.Path(__file__).parents[2] / "experiments" / "launch" / "jobset" / "gpu.yaml"


def slurm(process, processes, port):
    """As `srun` does; of the job's number jax makes the port."""
    job = port - (65535 - 2**12 + 1)
    names = {"JOB_ID": job, "STEP_NODELIST": "localhost", "NTASKS": processes, "PROCID": process, "LOCALID": process}
    return {f"SLURM_{name}": str(value) for name, value in names.items()}


def open_mpi(process, processes, port):
    """As `mpirun` of Open MPI 4 does."""
    job = (port - (65535 - 2**12 + 1)) * 2**12
    ranks = {"SIZE": processes, "RANK": process, "LOCAL_RANK": process}
    uri = {"OMPI_MCA_orte_hnp_uri": f"{job}.0;tcp://127.0.0.1:1"}
    return {**uri, **{f"OMPI_COMM_WORLD_{name}": str(value) for name, value in ranks.items()}}


def jobset(process, processes, port):
    """As a kubelet does with the manifest's `env`, on a pod of a JobSet whose coordinator is here."""
    spec = yaml.safe_load(MANIFEST.read_text())["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
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
            found[one["name"]] = annotations[re.fullmatch(r"metadata\.annotations\['(.+)'\]", path)[1]]
    # Two processes and a free port, where the manifest has four nodes of their own.
    found["LADDER_JAX_PROCESSES"] = str(processes)
    found["LADDER_JAX_COORDINATOR"] = found["LADDER_JAX_COORDINATOR"].replace(":8476", f":{port}")
    return {**found, "KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": str(process)}


def variables(process, processes, port):
    told = {"COORDINATOR": f"localhost:{port}", "PROCESSES": str(processes), "PROCESS": str(process)}
    return {f"LADDER_JAX_{name}": value for name, value in told.items()}


def high_port():
    """In the range that jax makes of jobs' numbers."""
    for port in range(61440 + os.getpid() % 2000, 65535):
        with contextlib.suppress(OSError), socket.socket() as free:
            free.bind(("", port))
            return port
    raise OSError("no port is free")


@pytest.fixture
def start():
    running = []

    def start(overrides, *, cluster, processes=2):
        port = high_port()
        command = [sys.executable, "-m", "ladder_jax", "train", "tiny", "--cpu-devices", "1", *overrides]
        command += [f"mesh.data={processes}", "--lost-timeout", "30"]
        for process in range(processes):
            environment = {**os.environ, **cluster(process, processes, port)}
            pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            running.append(subprocess.Popen(command, **pipes, env=environment))
        return running[-processes:]

    yield start
    for process in running:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def overrides(tmp_path_factory):
    book = tmp_path_factory.mktemp("data") / "book.txt"
    book.write_text("".join(f"line {i} of a little book about {i % 7} things\n" for i in range(500)))
    return [*TINY, f"data.path={book}"]


@pytest.fixture(scope="module")
def alone(overrides, tmp_path_factory):
    """The rows of one process with two devices."""
    run = tmp_path_factory.mktemp("alone") / "run"
    train.run(config.load("tiny", overrides=[*overrides, "mesh.data=2", f"run.dir={run}"]), say=lambda line: None)
    return metrics.read(run)


def until(run, rows, *, processes):
    """Waits until `rows` steps are logged."""
    deadline = time.monotonic() + 240
    while len(metrics.read(run)) < rows:
        assert time.monotonic() < deadline and all(process.poll() is None for process in processes), ended(processes)
        time.sleep(0.01)


def ended(processes):
    return [process.communicate(timeout=240) for process in processes]


def worker_of(process):
    children = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert len(children) == 1
    return int(children[0])


def same(rows, expected, *, rel):
    """Exactly, where `rel` is 0."""
    for key in ("loss", "validation_loss"):
        found, wanted = ([(row["step"], row[key]) for row in some if key in row] for some in (rows, expected))
        assert [step for step, _ in found] == [step for step, _ in wanted[: len(found)]]
        for (_, a), (_, b) in zip(found, wanted):
            assert a == b if rel == 0 else a == pytest.approx(b, rel=rel)


@pytest.mark.skipif(sys.platform != "linux", reason="finds workers in /proc")
def test_two_are_killed_and_resumed(start, overrides, alone, tmp_path):
    """Undisturbed under Open MPI; then again under SLURM, where the first is killed, and as a JobSet to the end.

    The first is the hardest to lose: it is jax's coordinator, without which the others abort on the spot.
    """
    whole, run = tmp_path / "whole", tmp_path / "run"
    both = start([*overrides, f"run.dir={whole}"], cluster=open_mpi)
    said = ended(both)
    assert [process.returncode for process in both] == [0, 0], said
    assert f"trained 28,832 parameters for {STEPS} steps" in said[0][0] and said[1] == (
        "",
        "",
    )  # the first alone speaks
    expected = metrics.read(whole)
    same(expected, alone, rel=1e-5)
    assert len(expected) == STEPS

    killed = start([*overrides, f"run.dir={run}"], cluster=slurm)
    until(run, 20, processes=killed)
    os.kill(worker_of(killed[0]), signal.SIGKILL)
    before = time.monotonic()
    said = ended(killed)
    assert time.monotonic() - before < 30  # the timeout; in truth at once
    assert [process.returncode for process in killed] == [1, 1], said
    line = (
        f"ladder-jax: process 0 of 2 (host {HOST}) was ended by SIGKILL (out of memory?): all processes stop; the same"
    )
    assert said[1][1].startswith(line) and said[1][1].count("\n") == 1
    assert "Traceback" not in said[0][1] and "Check failure" not in said[0][1]

    saved = steps(run / "checkpoints")[-1]
    resumed = start([*overrides, f"run.dir={run}"], cluster=jobset)
    said = ended(resumed)
    assert [process.returncode for process in resumed] == [0, 0], said
    assert f"resuming {run} from step {saved}" in said[0][1]
    same(metrics.read(run), expected, rel=0)
    assert len(metrics.read(run)) == STEPS


def test_one_of_four_is_preempted_and_all_save(start, overrides, alone, tmp_path):
    run = tmp_path / "run"
    four = start([*overrides, f"run.dir={run}"], cluster=variables, processes=4)
    until(run, 5, processes=four)
    four[2].send_signal(signal.SIGTERM)
    said = ended(four)
    assert [process.returncode for process in four] == [143] * 4, said
    rows = metrics.read(run)
    stopped = rows[-1]["step"]
    assert 5 <= stopped < STEPS and steps(run / "checkpoints")[-1] == stopped
    assert verify(run / "checkpoints" / str(stopped)) == []
    assert all(f"SIGTERM: step {stopped} is saved" in err.splitlines()[-1] for _, err in said)
    same(rows, alone, rel=1e-5)
