"""Runs and token stores in object stores: stand-ins for Google Cloud Storage and S3 on this machine
(gcs.py, s3.py).
"""

import json
import signal
import socket
import subprocess
import threading
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore
from etils.epath import backend
from jax.sharding import NamedSharding, PartitionSpec

from ladder_jax import checkpoint, cli, nn, remote
from ladder_jax.checkpoint import Pieces, arrays, manifest, open_checkpoint, steps, verify
from ladder_jax.checkpoint.writing import Writing
from ladder_jax.config import RunConfig, TrainConfig, load
from ladder_jax.data.store import Store
from ladder_jax.errors import RunFailed, UserError
from ladder_jax.files import absolute, kvstore
from ladder_jax.parallel import make_mesh
from ladder_jax.pretrained.formats import open_model, open_source
from ladder_jax.train import checkpoints, metrics
from ladder_jax.train import folder as runs
from tests import cases
from tests.remote.conftest import IN_S3
from tests.test_tokens import TEXTS, lines, make

TINY = """model.num_layers=2 model.d_model=32 model.d_ff=32 model.num_heads=4 model.num_kv_heads=4 model.dtype=float32
    train.batch=4 train.sequence=16 train.warmup_steps=2 train.log_every=2 train.steps=12 train.evaluate_every=6
    train.checkpoint_every=3 train.keep_checkpoints=2 data.max_bytes=100000 mesh.tensor=2""".split()
NAMES = ("loss", "validation_loss", "learning_rate", "gradient_norm")


def train(folder, *more):
    return cli.main(["train", "tiny", *TINY, f"run.dir={folder}", *more])


def numbers(rows):
    return {row["step"]: {name: row.get(name) for name in NAMES} for row in rows}


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    """A run on a disk."""
    folder = tmp_path_factory.mktemp("runs") / "one"
    assert train(folder) == 0
    return folder


@pytest.fixture(scope="module")
def run(away):
    """The same run in the bucket, which was killed as soon as it had a checkpoint, and resumed."""
    where, objects = away.url("runs/one"), away.bucket.objects
    process = subprocess.Popen([*away.command, "train", "tiny", *TINY, f"run.dir={where}"])
    deadline = time.monotonic() + 240
    while "runs/one/checkpoints/3/manifest.json" not in objects:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert "runs/one/.lock" in objects
    assert "runs/one/result.json" not in objects
    # of a save that was killed
    away.bucket.put("runs/one/checkpoints/8/params/manifest.ocdbt", b"half")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "EXPIRES", 1.0)
        assert train(where) == 0
    return where


@IN_S3
def test_a_killed_run_is_resumed_and_the_same(away, run, local):
    """Its numbers are those of the local run, which was not killed; what was being written is
    nowhere.
    """
    stored = away.bucket.objects
    read = lambda name: json.loads(stored[f"runs/one/{name}"][1])
    assert read("result.json") == json.loads((local / "result.json").read_text())
    assert read("goodput.json")["restarts"] == 1
    rows = [json.loads(line) for line in stored["runs/one/metrics.jsonl"][1].splitlines()]
    assert numbers(rows) == numbers(metrics.read(local))
    assert [row["step"] for row in rows] == list(range(2, 13, 2))
    assert steps(absolute(run) / "checkpoints") == steps(local / "checkpoints") == [9, 12]
    objects = [name.removeprefix("runs/one/") for name in stored if name.startswith("runs/one/")]
    assert {name.partition("/")[0] for name in objects} == {
        "config.json", "goodput.json", "metrics.jsonl", "result.json", "checkpoints", "tensorboard"
    }  # fmt: skip
    assert sum(name.startswith("tensorboard/") for name in objects) == 1
    assert not any(name.startswith("checkpoints/8/") for name in objects)
    ours, theirs = open_checkpoint(local), open_checkpoint(run)
    assert theirs.config.model == ours.config.model
    assert theirs.data["fingerprint"] == ours.data["fingerprint"]


def same_pieces(here, there):
    here, there = open_checkpoint(here), open_checkpoint(there)
    definition = nn.define(there.config.model, mesh=make_mesh(tensor=2))
    keys = [("layers/attention/query", 1), ("layers/mlp/down", 0), ("embedding/table", None)]
    for ours, theirs in zip(
        Pieces(here, definition)(keys), Pieces(there, definition)(keys), strict=True
    ):
        assert np.array_equal(ours, theirs)


@IN_S3
def test_a_store_that_is_away_while_a_run_is_resumed(away, run, local, monkeypatch, capsys):
    """An outage is neither an empty folder nor damage: the run waits, and goes on from its newest
    checkpoint.
    """
    away.copy("runs/one/", "runs/waiting/")
    for name in [
        name for name in away.bucket.objects if name.startswith("runs/waiting/checkpoints/12/")
    ]:
        del away.bucket.objects[name]

    def interrupted(module, name):
        """At its first call there, the store is away for a second and a half."""
        first, function = [True], getattr(module, name)

        def call(*arguments):
            if first and first.pop():
                away.bucket.away = True
                threading.Timer(1.5, setattr, (away.bucket, "away", False)).start()
            return function(*arguments)

        monkeypatch.setattr(module, name, call)

    interrupted(runs, "_check")
    interrupted(runs, "beginning")
    interrupted(checkpoints, "steps")
    interrupted(checkpoints, "open_checkpoint")
    assert train(away.url("runs/waiting")) == 0
    assert f"resuming {away.url('runs/waiting')} from step 9" in capsys.readouterr().err
    rows = [
        json.loads(line)
        for line in away.bucket.objects["runs/waiting/metrics.jsonl"][1].splitlines()
    ]
    assert numbers(rows) == numbers(metrics.read(local))


@IN_S3
def test_what_reads_a_run_reads_it_there(run, local, capsys):
    same_pieces(local, run)
    opened, known = open_model(run), open_model(local)
    assert opened.config.model == known.config.model
    assert opened.tokenizer() == known.tokenizer()
    assert load("tiny", overrides=["model=null", f"train.start={run}"]).model == known.config.model
    with pytest.raises(
        UserError, match="copy it to a disk first; generate, serve and evaluate read it from there"
    ):
        open_source(run)
    assert cli.main(["checkpoints", run, "--verify", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["checkpoints"]
    assert [row["step"] for row in rows] == [9, 12]
    assert all(row["state"] == "whole" and row["bytes"] for row in rows)
    assert train(run, "train.learning_rate=1") == 2
    assert f"{run!r} holds a run of another configuration" in capsys.readouterr().err


@IN_S3
def test_what_has_changed_is_never_resumed_from(away, run, local, capsys):
    away.copy("runs/one/", "runs/two/")
    away.flip("runs/two/checkpoints/12/params/ocdbt.process_0/d/")
    there = away.url("runs/two")
    assert "other contents than were written" in verify(absolute(there) / "checkpoints" / "12")[0]
    assert train(there) == 2
    assert "damaged or incomplete" in (line := capsys.readouterr().err)
    assert "before it is step 9" in line
    assert train(there, "run.on_damaged=previous") == 0
    assert f"resuming {there} from step 9" in capsys.readouterr().err
    stored = away.bucket.objects["runs/two/result.json"][1]
    assert json.loads(stored) == json.loads((local / "result.json").read_text())


def downloaded(away, prefix, folder):
    """All objects whose names begin so, as files below `folder`."""
    for name, (_, content) in away.bucket.objects.items():
        if name.startswith(prefix):
            file = folder / name.removeprefix(prefix)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)


@IN_S3
def test_copies(away, run, local, tmp_path):
    """Of the bucket's run on a disk, and of the disk's in the bucket: each is compared with what
    was written.
    """
    downloaded(away, "runs/one/", tmp_path / "copy")
    for file in local.rglob("*"):
        if file.is_file():
            away.bucket.put(f"runs/copied/{file.relative_to(local)}", file.read_bytes())
    there = away.url("runs/copied")
    assert open_checkpoint(tmp_path / "copy").check().verified
    assert open_checkpoint(there).check().verified
    away.flip("runs/copied/checkpoints/9/params/d/")
    assert verify(absolute(there) / "checkpoints" / "12") == []
    assert "other contents than were written" in verify(absolute(there) / "checkpoints" / "9")[0]
    same_pieces(local, there)
    assert train(there) == 0


@pytest.mark.full
def test_two_processes(away):
    """Each writes its own shards, and all are one checkpoint."""
    where = away.url("runs/three")
    with socket.create_server(("localhost", 0)) as free:
        coordinator = f"localhost:{free.getsockname()[1]}"
    command = [
        *away.command,
        "train",
        "tiny",
        "--cpu-devices",
        "1",
        *TINY,
        "mesh.tensor=1",
        "mesh.fsdp=2",
    ]
    command += [f"run.dir={where}", "--processes", "2", "--coordinator", coordinator]
    both = [subprocess.Popen([*command, "--process", str(process)]) for process in range(2)]
    assert [process.wait(timeout=600) for process in both] == [0, 0]
    for process in range(2):
        shards = f"runs/three/checkpoints/12/params/ocdbt.process_{process}/d/"
        assert any(name.startswith(shards) for name in away.bucket.objects)
    assert verify(absolute(where) / "checkpoints" / "12") == []
    assert train(where, "mesh.tensor=1", "mesh.fsdp=2") == 0


def sharded(value, *dims, tensor=2):
    mesh = jax.make_mesh((2, tensor), ("data", "tensor"), devices=jax.devices()[: 2 * tensor])
    return jax.device_put(value, NamedSharding(mesh, PartitionSpec(*dims)))


def test_arrays(stores, monkeypatch):
    """Any dtype, shape and sharding; read with another sharding; chunks of a shard, and not too
    large.
    """
    folder = absolute(stores["s3"].url("arrays"))
    monkeypatch.setattr(arrays, "LARGEST", 100)
    values = {
        "layers/mlp/up": np.arange(3 * 8 * 6, dtype=np.float32).reshape(3, 8, 6),
        "embedding/table": np.arange(10 * 4).reshape(10, 4).astype(jnp.bfloat16),
        "count": np.int32(7),
    }
    specs = {"layers/mlp/up": (None, None, "tensor"), "embedding/table": ("tensor",), "count": ()}
    tree = {name: sharded(value, *specs[name]) for name, value in values.items()}
    for write in arrays.begin(folder, tree):
        write.result()
    arrays.finish(folder, {name: value.shape for name, value in values.items()})
    about = lambda some: {name: (one.shape, one.dtype) for name, one in some.items()}
    assert about(arrays.stored(folder)) == about(values)
    spec = {
        "driver": "zarr",
        "kvstore": {"driver": "ocdbt", "base": kvstore(folder), "path": "layers.mlp.up/"},
    }
    # 96 bytes
    assert tensorstore.open(spec, open=True).result().chunk_layout.read_chunk.shape == (1, 8, 3)
    there = {"layers/mlp/up": (None, "tensor"), "embedding/table": (None, "tensor"), "count": ()}
    zeros = {
        name: sharded(np.zeros(value.shape, np.float32), *there[name], tensor=4)
        for name, value in values.items()
    }
    for name, restored in zip(zeros, arrays.read(folder, zeros), strict=True):
        assert restored.sharding == zeros[name].sharding
        assert np.array_equal(restored, values[name].astype(np.float32)), name


def test_a_store_that_is_away_while_a_save_finishes(away, monkeypatch):
    """A short outage costs nothing; a long one is reported, whatever error the library raises; then
    it is as before.
    """
    bucket, where = away.bucket, away.url("away")
    whole, outage = manifest.write, SimpleNamespace(seconds=0.0)

    def write(folder):
        if outage.seconds:
            bucket.away = True
            threading.Timer(outage.seconds, setattr, (bucket, "away", False)).start()
            outage.seconds = 0.0
        whole(folder)

    monkeypatch.setattr(manifest, "write", write)
    tree = dict(params={"a": jnp.zeros(3)}, optimizer={"b": jnp.zeros(3)})
    saving = checkpoint.Store(
        f"{where}/checkpoints", config=RunConfig(train=TrainConfig(keep_checkpoints=9))
    )
    failures = []
    for step, outage.seconds, retried in ((1, 1.5, 60.0), (2, 3.0, 0.0), (3, 0.0, 60.0)):
        monkeypatch.setattr(remote, "RETRIED", retried)
        saving.save(step, **tree)
        saving.wait()
        failures.append(saving.failure())
        while bucket.away:
            time.sleep(0.01)
    saving.close()
    assert failures[0] is None
    assert failures[2] is None
    assert failures[1].startswith("the checkpoint of step 2 could not be written: ")
    assert "503" in failures[1]
    assert "the others cannot be listed now" in failures[1]
    folder = absolute(where) / "checkpoints"
    assert steps(folder) == [1, 3]
    assert verify(folder / "1") == verify(folder / "3") == []


def test_a_store_that_is_away_while_arrays_are_written(away, monkeypatch, tmp_path):
    """From before the first one on: all that is written then is written again. And a copy on a disk
    is compared.
    """

    def interrupted(*arguments):
        away.bucket.away = True
        threading.Timer(1.5, setattr, (away.bucket, "away", False)).start()
        return Writing(*arguments)

    monkeypatch.setattr("ladder_jax.checkpoint.store.Writing", interrupted)
    saving = checkpoint.Store(f"{away.url('written')}/checkpoints", config=RunConfig())
    saving.save(1, params={"a": jnp.zeros(3)}, optimizer={"b": jnp.zeros(3)})
    saving.close()
    assert saving.failure() is None
    assert verify(absolute(away.url("written")) / "checkpoints" / "1") == []
    downloaded(away, "written/checkpoints/1/", tmp_path)
    assert verify(tmp_path) == []
    if away.scheme == "gs":  # whose checksums are of the content, and go with a copy
        cases.flip(next((tmp_path / "params" / "ocdbt.process_0" / "d").iterdir()))
        assert "other contents than were written" in verify(tmp_path)[0]


def test_a_store_that_is_away_when_a_checkpoint_is_due(bucket, local, monkeypatch, capsys):
    """Training goes on, to the same end. After the last step the run says that it is not saved, and
    goes on later.
    """
    saves, where = checkpoints.CheckpointSaver.save, "gs://bucket/runs/away"
    monkeypatch.setattr(remote, "RETRIED", 0.0)

    def save(self, step, *of, **more):
        bucket.away = step in away
        saves(self, step, *of, **more)
        bucket.away = False

    monkeypatch.setattr(checkpoints.CheckpointSaver, "save", save)
    away = {3, 12}
    assert train(where) == 1
    said = capsys.readouterr().err
    assert "step 3: the checkpoint of step 3 could not be written: " in said
    assert "training goes on" in said
    *_, last = said.splitlines()
    assert last.startswith("ladder-jax: the checkpoint of step 12 could not be written: ")
    assert "Traceback" not in said
    assert steps(absolute(where) / "checkpoints") == [6, 9]
    away = set()
    assert train(where) == 0
    assert json.loads(bucket.objects["runs/away/result.json"][1]) == json.loads(
        (local / "result.json").read_text()
    )


def test_a_token_store(stores, bucket, tmp_path, monkeypatch):
    """Its shards are copied when they are first read, and compared with what was written."""
    monkeypatch.setenv("LADDER_JAX_CACHE", str(tmp_path / "cache"))
    (tmp_path / "book.jsonl").write_text(lines(TEXTS))
    made = make([tmp_path / "book.jsonl"], tmp_path / "store")
    for file in (tmp_path / "store").iterdir():
        bucket.put(f"stores/book/{file.name}", file.read_bytes())
    copied = lambda: sorted(
        file.name for file in (tmp_path / "cache" / "stores").glob("*/*.tokens")
    )
    store, here = Store("gs://bucket/stores/book"), Store(tmp_path / "store")
    assert store.manifest == here.manifest == made
    assert (store.starts == here.starts).all()
    assert copied() == []
    assert (store.read(0, 5) == here.read(0, 5)).all()
    assert copied() == ["00000.tokens"]
    texts = [
        store.read(*at).tobytes().decode()
        for at in zip(store.starts.tolist(), np.diff(store.starts).tolist())
    ]
    assert texts == TEXTS
    assert len(copied()) == len(made.shards) > 1
    store.verify()
    asked = len(bucket.requests)
    Store("gs://bucket/stores/book").read(0, 5)
    assert not any("tokens" in request for request in bucket.requests[asked:])
    stores["gs"].flip("stores/book/00001.tokens")
    monkeypatch.setenv("LADDER_JAX_CACHE", str(tmp_path / "another"))
    with pytest.raises(UserError, match="00001.tokens' is damaged: it is not what was written"):
        Store("gs://bucket/stores/book").read(made.shards[0].tokens, 5)
    assert not list(tmp_path.glob("another/stores/*/00001.tokens"))
    bucket.delete("stores/book/00001.tokens")
    with pytest.raises(
        UserError,
        match="cannot read the token store's 'gs://bucket/stores/book/00001.tokens': No such",
    ):
        Store("gs://bucket/stores/book")


@pytest.mark.parametrize(
    "read, what", [(open_checkpoint, "checkpoint"), (open_model, "model"), (Store, "token store")]
)
def test_where_nothing_is(away, read, what):
    with pytest.raises(UserError, match=f"there is no {what} at '{away.url('none')}'"):
        read(away.url("none"))


@pytest.mark.parametrize(
    "more, line",
    [
        (["run.dir=http://b/x"], "unknown scheme in 'http://b/x': 'http' (allowed: gs, s3)"),
        (
            ["run.dir=s3://another/x"],
            "'s3://another/x': there is no bucket 'another', or these credentials may not",
        ),
        (
            ["data.path=gs://bucket/none"],
            "there is no token store; text is read from local files only",
        ),
    ],
    ids=str,
)
def test_mistakes(stores, tmp_path, capsys, more, line):
    assert train(tmp_path / "run", *more) == 2
    assert line in capsys.readouterr().err


def test_a_model_of_another_format(bucket):
    bucket.put("gemma/config.json", b'{"model_type": "llama"}')
    with pytest.raises(
        UserError, match="'gs://bucket/gemma': runs and checkpoints are read from there; copy other"
    ):
        open_model("gs://bucket/gemma")


def test_a_library_that_is_missing(stores, monkeypatch, capsys):
    def missing(path):
        raise ImportError("Please install gcsfs to access Google Storage")

    monkeypatch.setattr(backend.fsspec_backend, "fs", missing)
    assert train("gs://bucket/x") == 2
    assert capsys.readouterr().err == "ladder-jax: gs:// needs gcsfs: pip install gcsfs\n"


@pytest.mark.parametrize(
    "error, asks_again",
    [
        (OSError("Forbidden: bucket/x\nyou may not read this"), False),  # what gcsfs makes of 403
        (PermissionError("you may not read this"), False),  # and s3fs
        (RuntimeError("Invalid Credentials, 401"), True),  # which a renewed token mends
    ],
)
def test_a_store_that_refuses(bucket, monkeypatch, error, asks_again):
    """Errors of the libraries' own are one line; of a refusal at once, as waiting does not mend
    it.
    """
    asked = []

    def refuse(*_, **__):
        asked.append(None)
        raise error

    config = load("tiny", overrides=["run.dir=gs://bucket/x"])
    monkeypatch.setattr(backend.fsspec_backend, "exists", refuse)
    monkeypatch.setattr(remote, "RETRIED", 0.5)
    with pytest.raises((RunFailed, UserError)) as told:
        runs.check(config, runs.path_of(config))
    assert str(told.value) == f"cannot read 'gs://bucket/x': {' '.join(str(error).split())}"
    assert len(asked) == 1 + asks_again


def test_folders_of_something_else(away):
    """An empty folder, as the stores' consoles make it, is free for a run."""
    bucket = away.bucket
    check = lambda folder: runs.check(
        config := load("tiny", overrides=[f"run.dir={folder}"]), runs.path_of(config)
    )
    bucket.put("empty/", b"")
    check(away.url("empty"))
    bucket.put("full/full", b"")
    with pytest.raises(
        UserError, match=f"run.dir='{away.url('full')}' is not empty and holds no config.json"
    ):
        check(away.url("full"))
