"""The launch recipes, as far as one machine can try them: manifests against the types of the APIs,
scripts with stand-ins for the commands of the clouds.
"""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
import tomllib

import pytest
import yaml

from ladder_jax import config
from ladder_jax.processes import Timeouts
from tests.changed import ROOT

LAUNCH = ROOT / "experiments/launch"
MANIFESTS = ("gpu.yaml", "tpu.yaml")


def manifest(name):
    return yaml.safe_load((LAUNCH / "jobset" / name).read_text())


def validated(value):
    """What the API's own types keep of a JobSet: they raise for a wrong type, and drop what they do
    not know.
    """
    from kubeflow_trainer_api import models

    return models.JobsetV1alpha2JobSet.from_dict(value).to_dict()


@pytest.mark.parametrize("name", MANIFESTS)
def test_manifest_is_a_jobset(name):
    jobset = manifest(name)
    assert validated(jobset) == jobset
    assert jobset["apiVersion"] == "jobset.x-k8s.io/v1alpha2"
    assert jobset["kind"] == "JobSet"
    # The types know no enumerations; these are the CRD's.
    for rule in jobset["spec"]["failurePolicy"]["rules"]:
        assert rule["action"] in (
            "FailJobSet",
            "RestartJobSet",
            "RestartJobSetAndIgnoreMaxRestarts",
        )
        assert set(rule["onJobFailureReasons"]) <= {
            "BackoffLimitExceeded",
            "DeadlineExceeded",
            "PodFailurePolicy",
        }


@pytest.mark.parametrize("name", MANIFESTS)
def test_manifest_agrees_with_itself(name):
    spec = manifest(name)["spec"]
    (workers,) = spec["replicatedJobs"]
    job = workers["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    variables = {one["name"]: one for one in container["env"]}
    assert job["completionMode"] == "Indexed"  # or pods have no number
    assert (
        job["parallelism"] == job["completions"] == int(variables["LADDER_JAX_PROCESSES"]["value"])
    )
    assert spec["coordinator"]["replicatedJob"] == workers["name"]
    assert (
        str(container["ports"][0]["containerPort"]) in variables["LADDER_JAX_COORDINATOR"]["value"]
    )
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    assert mounts == {volume["name"] for volume in job["template"]["spec"]["volumes"]}
    # The mesh has as many devices as the pods.
    (devices,) = container["resources"]["limits"].values()
    assert container["command"] == ["ladder-jax", "train"]
    preset, *overrides = container["args"]
    assert config.load(preset, overrides=overrides).mesh.size == devices * job["parallelism"]


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """`stand_in(name, body)` puts a command on the PATH, which notes its arguments: `.calls(name)`."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def stand_in(name, body=""):
        log = f'printf "%q " "$@" >> {folder}/{name}.log; echo >> {folder}/{name}.log'
        (folder / name).write_text(f"#!/bin/bash\n{log}\n{body}\n")
        (folder / name).chmod(0o755)
        (folder / f"{name}.log").touch()

    def calls(name):
        text = (folder / f"{name}.log").read_text().replace("$'", "'")
        return [shlex.split(line) for line in text.splitlines()]

    stand_in.calls = calls
    return stand_in


def script(*words, check=True, cwd=None, **variables):
    done = subprocess.run(
        words, capture_output=True, text=True, cwd=cwd, env={**os.environ, **variables}, timeout=60
    )
    assert not check or done.returncode == 0, (done.stdout, done.stderr)
    return done


SLICE = dict(
    NAME="ladder",
    ZONE="us-east5-a",
    TYPE="v5p-128",
    SHARE="10.0.0.2:/runs",
    SOURCE="ladder-jax[tpu]",
)


@pytest.mark.parametrize("there", [False, True])
def test_gcloud(stand_in, there):
    """It creates the slice only if there is none, and quotes what goes through two shells."""
    stand_in("gcloud", f'case " $* " in *" describe "*) exit {0 if there else 1};; esac')
    words = "my run.yaml", "run.dir=/runs/a b"
    script("bash", LAUNCH / "tpu_pod/gcloud.sh", *words, **SLICE, SPOT="1")
    calls = stand_in.calls("gcloud")
    assert [call[3] for call in calls] == ["describe", *([] if there else ["create"]), "ssh", "ssh"]
    last = calls[-1]
    assert "--worker=all" in last
    assert "--zone=us-east5-a" in last
    command = last[-1].removeprefix("--command=")
    assert shlex.split(command)[1:] == ["train", "my run.yaml", "run.dir=/runs/a b"]
    if not there:
        assert "--spot" in calls[1]


def test_xpk(stand_in):
    stand_in("xpk")
    place = dict(SLICE, CLUSTER="pods", IMAGE="i:1")
    script("bash", LAUNCH / "tpu_pod/xpk.sh", "tiny", "run.dir=/runs/a", **place)
    (call,) = stand_in.calls("xpk")
    assert call[:2] == ["workload", "create"]
    options = dict(zip(call[2::2], call[3::2]))
    assert options["--command"] == "ladder-jax train tiny run.dir=/runs/a"
    assert options["--tpu-type"] == "v5p-128"
    assert options["--restart-on-exit-codes"] == "1"


@pytest.mark.parametrize(
    "status, restarts, requeued",
    [(0, 0, False), (1, 0, True), (143, 3, True), (137, 19, True), (1, 20, False), (2, 0, False)],
)
def test_slurm_requeues(stand_in, status, restarts, requeued):
    stand_in("srun", f"exit {status}")
    stand_in("scontrol")
    told = {"SLURM_JOB_ID": "4711", "SLURM_RESTART_COUNT": str(restarts)}
    done = script("bash", LAUNCH / "slurm/train.sbatch", "tiny", "a=b c", check=False, **told)
    assert stand_in.calls("scontrol") == ([["requeue", "4711"]] if requeued else [])
    assert done.returncode == (0 if requeued else status)
    (call,) = stand_in.calls("srun")
    assert call[-4:] == ["ladder-jax", "train", "tiny", "a=b c"]
    # A process that is stuck for good is SLURM's to kill, once the others have had the time to name
    # it.
    (wait,) = [int(word.partition("=")[2]) for word in call if word.startswith("--wait=")]
    assert wait > Timeouts().lost + 2 * Timeouts().interval


def test_slurm_outlives_the_signal(stand_in, tmp_path):
    """SIGTERM to the whole job: the processes save and end with 143, and only then is the job
    requeued.
    """
    stand_in(
        "srun",
        'trap "sleep 0.5; touch saved; exit 143" TERM\ntouch started\nwhile :; do sleep 0.05; done',
    )
    stand_in("scontrol", "[ -e saved ] || exit 9")
    environment = {**os.environ, "SLURM_JOB_ID": "4711"}
    with subprocess.Popen(
        ["bash", str(LAUNCH / "slurm/train.sbatch"), "tiny"],
        env=environment,
        cwd=tmp_path,
        start_new_session=True,
        stderr=subprocess.PIPE,
        text=True,
    ) as job:
        while not (tmp_path / "started").exists():
            time.sleep(0.02)
        os.killpg(job.pid, signal.SIGTERM)
        said = job.communicate(timeout=120)[1]
    assert job.returncode == 0
    assert "status 143: requeued (restart 1 of 20)" in said
    assert stand_in.calls("scontrol") == [["requeue", "4711"]]


DOCKERFILE = LAUNCH / "Dockerfile"


def instructions():
    """Of the Dockerfile, lines joined."""
    text = DOCKERFILE.read_text().replace("\\\n", " ")
    return [line.split(None, 1) for line in text.splitlines() if line and not line.startswith("#")]


@pytest.mark.parametrize(
    "accelerator, extras, installed",
    [
        ("cpu", "", "."),
        ("cpu", "data,hf", ".[data,hf]"),
        ("cuda", "data", ".[cuda,data]"),
        ("gpu", "data", None),
    ],
)
def test_dockerfile_installs(stand_in, tmp_path, accelerator, extras, installed):
    """Its shell command, with a stand-in for pip."""
    stand_in("pip")
    (command, _) = [rest for name, rest in instructions() if name == "RUN"]
    told = {"ACCELERATOR": accelerator, "EXTRAS": extras}
    done = script("sh", "-c", command, check=False, cwd=tmp_path, **told)
    if installed is None:
        assert done.returncode == 2
        assert "ACCELERATOR=gpu must be cpu, cuda or tpu" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    (call,) = stand_in.calls("pip")
    assert call[:2] == ["install", "--no-cache-dir"]
    assert call[2] == installed
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = set(installed.removeprefix(".").strip("[]").split(",")) - {""}
    assert named <= project["optional-dependencies"].keys()


def test_dockerfile_copies_a_project(tmp_path):
    """What it copies, and lets through to the builder, is all that the package is made of."""
    copied = {name for kind, rest in instructions() if kind == "COPY" for name in rest.split()[:-1]}
    ignored = (LAUNCH / "Dockerfile.dockerignore").read_text().split()
    assert ignored[0] == "*"
    assert copied == {line[1:] for line in ignored if line.startswith("!")}
    for name in copied:
        source = ROOT / name
        copy = shutil.copytree if source.is_dir() else shutil.copy
        copy(source, tmp_path / name)
    code = "from setuptools.build_meta import prepare_metadata_for_build_wheel as make; make('out')"
    (tmp_path / "out").mkdir()
    script(sys.executable, "-c", code, cwd=tmp_path)
    (metadata,) = (tmp_path / "out").glob("*.dist-info/METADATA")
    assert "Name: ladder-jax" in metadata.read_text()
    assert "Requires-Dist: jax>=" in metadata.read_text()
