"""Runs and token stores in object stores: stand-ins for Google Cloud Storage and S3 on this machine
(gcs.py, s3.py).
"""

import json
import os
import pkgutil
import signal
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils.epath import backend
from jax.sharding import NamedSharding, PartitionSpec

import ladder_jax as lj
from ladder_jax import cli, nn, remote
from ladder_jax.checkpoint import Pieces, arrays, open_checkpoint, steps, verify
from ladder_jax.config import RunConfig, load
from ladder_jax.data.store import Store
from ladder_jax.errors import RunFailed, UserError
from ladder_jax.files import absolute
from ladder_jax.parallel import make_mesh
from ladder_jax.pretrained.formats import open_model, open_source
from ladder_jax.train import folder as runs, metrics, session
from tests.processes.conftest import free_port
from tests.refusals import refused
from tests.remote.conftest import IN_S3
from tests.test_checkpoint import save_small
from tests.test_resume import wait
from tests.test_tokens import TEXTS, lines, make, texts_in

TINY = """model.num_layers=2 model.d_model=32 model.d_ff=32 model.num_heads=4 model.num_kv_heads=4 model.dtype=float32
    train.batch=4 train.sequence=16 train.warmup_steps=2 train.log_every=2 train.steps=12 train.evaluate_every=6
    train.checkpoint_every=3 train.keep_checkpoints=2 data.max_bytes=100000 mesh.tensor=2""".split()
NAMES = ("loss", "validation_loss", "learning_rate", "gradient_norm")


def train(folder, *more):
    return cli.main(["train", "tiny", *TINY, f"run.dir={folder}", *more])


def numbers(folder):
    rows = metrics.read(absolute(folder))
    return {row["step"]: {name: row.get(name) for name in NAMES} for row in rows}


def result(folder):
    return json.loads((absolute(folder) / "result.json").read_text())


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    """A run on a disk."""
    folder = tmp_path_factory.mktemp("runs") / "one"
    assert train(folder) == 0
    return folder


@pytest.fixture(scope="module")
def run(away, tmp_path_factory):
    """The same run in the bucket, which was killed as soon as it had a checkpoint, and resumed."""
    where, objects = away.url("runs/one"), away.bucket.objects
    process = subprocess.Popen(
        [*away.command, "train", "tiny", *TINY, f"run.dir={where}"],
        # the killed run leaves its small files there
        env={**os.environ, "TMPDIR": str(tmp_path_factory.mktemp("killed"))},
    )
    assert wait(process, lambda: "runs/one/checkpoints/3/manifest.json" in objects, timeout=240)
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
    assert result(run) == result(local)
    assert json.loads((absolute(run) / "goodput.json").read_text())["restarts"] == 1
    assert numbers(run) == numbers(local)
    assert list(numbers(run)) == list(range(2, 13, 2))
    assert steps(absolute(run) / "checkpoints") == steps(local / "checkpoints") == [9, 12]
    objects = [name.removeprefix("runs/one/") for name, _ in away.bucket.sorted("runs/one/")]
    assert {name.partition("/")[0] for name in objects} == {
        "config.json", "goodput.json", "metrics.jsonl", "result.json", "checkpoints", "tensorboard"
    }  # fmt: skip
    assert sum(name.startswith("tensorboard/") for name in objects) == 1
    assert not any(name.startswith("checkpoints/8/") for name in objects)
    ours = open_checkpoint(local)
    theirs = open_checkpoint(run)
    assert theirs.config.model == ours.config.model
    assert theirs.data["fingerprint"] == ours.data["fingerprint"]


def interrupt(away, monkeypatch, function):
    """At the first call of that function the store is away for a second and a half."""
    whole = pkgutil.resolve_name(function)
    calls = []

    def call(*arguments, **named):
        if not calls:
            away.bucket.leave(1.5)
        calls.append(arguments)
        return whole(*arguments, **named)

    monkeypatch.setattr(function, call)


@IN_S3
def test_a_store_that_is_away_while_a_run_is_resumed(away, run, local, monkeypatch, capsys):
    """An outage is neither an empty folder nor damage: the run waits, and goes on from its newest
    checkpoint.
    """
    away.copy("runs/one/", "runs/waiting/")
    for name, _ in away.bucket.sorted("runs/waiting/checkpoints/12/"):
        away.bucket.delete(name)

    for function in (
        "train.folder._check",
        "train.folder.beginning",
        "train.checkpoints.steps",
        "train.checkpoints.open_checkpoint",
        "checkpoint.store.unfinished_steps",
    ):
        interrupt(away, monkeypatch, f"ladder_jax.{function}")
    assert train(away.url("runs/waiting")) == 0
    assert f"resuming {away.url('runs/waiting')} from step 9" in capsys.readouterr().err
    assert numbers(away.url("runs/waiting")) == numbers(local)


@IN_S3
def test_what_reads_a_run_reads_it_there(run, local, capsys, prints):
    here, there = open_checkpoint(local), open_checkpoint(run)
    definition = nn.define(there.config.model, mesh=make_mesh(tensor=2))
    keys = [("layers/attention/query", 1), ("layers/mlp/down", 0), ("embedding/table", None)]
    for ours, theirs in zip(
        Pieces(here, definition)(keys), Pieces(there, definition)(keys), strict=True
    ):
        assert np.array_equal(ours, theirs)
    opened = open_model(run)
    known = open_model(local)
    assert opened.config.model == known.config.model
    assert opened.tokenizer() == known.tokenizer()
    assert lj.load(run).config == lj.load(local).config
    assert load("tiny", overrides=["model=null", f"train.start={run}"]).model == known.config.model
    with refused("copy it to a disk first; generate, serve and evaluate read it from there"):
        open_source(run)
    rows = json.loads(prints("checkpoints", run, "--verify", "--json"))["checkpoints"]
    assert [row["step"] for row in rows] == [9, 12]
    assert all(row["state"] == "whole" and row["bytes"] for row in rows)
    assert train(run, "train.learning_rate=1") == 2
    assert f"{run!r} holds a run of another configuration" in capsys.readouterr().err


@IN_S3
def test_what_has_changed_is_never_resumed_from(away, run, local, capsys):
    away.copy("runs/one/", "runs/two/")
    away.flip("runs/two/checkpoints/12/params/ocdbt.process_0/d/")
    there = away.url("runs/two")
    assert "other contents than were written" in verify(absolute(there) / "checkpoints/12")[0]
    assert train(there) == 2
    assert "damaged or incomplete" in capsys.readouterr().err
    assert train(there, "run.on_damaged=previous") == 0
    assert f"resuming {there} from step 9" in capsys.readouterr().err
    assert result(there) == result(local)


def downloaded(away, prefix, folder):
    """All objects whose names begin so, as files below `folder`."""
    for name, (_, content) in away.bucket.sorted(prefix):
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
    assert verify(absolute(there) / "checkpoints/12") == []
    assert "other contents than were written" in verify(absolute(there) / "checkpoints/9")[0]
    assert train(there) == 0


@pytest.mark.full
def test_two_processes(away, tmp_path):
    """Each writes its own shards, and all are one checkpoint; each its own profile."""
    where = away.url("runs/three")
    coordinator = f"localhost:{free_port()}"
    mesh = ["mesh.tensor=1", "mesh.fsdp=2"]
    command = [*away.command, "train", "tiny", *TINY, *mesh, f"run.dir={where}"]
    options = f"--profile 7 --cpu-devices 1 --processes 2 --coordinator {coordinator} --process"
    command += options.split()
    said = tmp_path / "said"
    with said.open("w") as errors:
        first = subprocess.Popen([*command, "0"], stderr=errors)
    both = [first, subprocess.Popen([*command, "1"])]
    assert [process.wait(timeout=600) for process in both] == [0, 0], said.read_text()
    assert f"profile in {where}/profile\n" in said.read_text()
    for process in range(2):
        assert away.bucket.sorted(f"runs/three/profile/process_{process}/plugins/profile/")
        assert away.bucket.sorted(f"runs/three/checkpoints/12/params/ocdbt.process_{process}/d/")
    assert verify(absolute(where) / "checkpoints/12") == []
    assert train(where, *mesh) == 0


def sharded(value, *dims, tensor=2):
    mesh = jax.make_mesh((2, tensor), ("data", "tensor"), devices=jax.devices()[: 2 * tensor])
    return jax.device_put(value, NamedSharding(mesh, PartitionSpec(*dims)))


def test_arrays(stores, monkeypatch):
    """Any dtype, shape and sharding; read with another sharding; chunks of a shard, and not too
    large.
    """
    folder = absolute(stores["s3"].url("arrays"))
    monkeypatch.setattr(arrays, "LARGEST", 100)
    # a value, its partition, and that with which it is read
    up = np.arange(72.0, dtype=np.float32).reshape(3, 4, 6)
    embedding = np.arange(40).reshape(10, 4).astype(jnp.bfloat16)
    table = {
        "layers/mlp/up": (up, (None, None, "tensor"), (None, "tensor")),
        "embedding/table": (embedding, ("tensor",), (None, "tensor")),
        "count": (np.int32(7), (), ()),
    }
    tree = {name: sharded(value, *dims) for name, (value, dims, _) in table.items()}
    for write in arrays.begin(folder, tree):
        write.result()
    arrays.finish(folder, {name: value.shape for name, value in tree.items()})
    for name, one in arrays.stored(folder).items():
        assert (one.shape, one.dtype) == (tree[name].shape, tree[name].dtype)
    opened = arrays.opened(folder, "layers/mlp/up").result()
    assert opened.chunk_layout.read_chunk.shape == (1, 4, 3)  # a layer, although two have 96 bytes
    zeros = {
        name: sharded(np.zeros(value.shape, np.float32), *dims, tensor=4)
        for name, (value, _, dims) in table.items()
    }
    for name, restored in zip(table, arrays.read(folder, zeros), strict=True):
        assert restored.sharding == zeros[name].sharding
        assert np.array_equal(restored, table[name][0].astype(np.float32)), name


@pytest.mark.parametrize(
    "begins", ["checkpoint.writing.begin", "checkpoint.manifest.write"], ids=["arrays", "manifest"]
)
def test_a_store_that_is_away_while_a_checkpoint_is_written(away, monkeypatch, tmp_path, begins):
    """A short outage costs nothing: what is written then is written again. And a copy on a disk is
    compared.
    """
    interrupt(away, monkeypatch, f"ladder_jax.{begins}")
    where = begins.rpartition(".")[2]
    save_small(f"{away.url(where)}/checkpoints", RunConfig())
    assert verify(absolute(away.url(where)) / "checkpoints/1") == []
    downloaded(away, f"{where}/checkpoints/1/", tmp_path)
    assert verify(tmp_path) == []


def test_a_store_that_is_away_when_a_checkpoint_is_due(bucket, local, monkeypatch, capsys):
    """Training goes on, to the same end. After the last step the run says that it is not saved, and
    goes on later.
    """
    saves = session.Session._save
    where = "gs://bucket/runs/away"
    monkeypatch.setattr(remote, "RETRIED", 0.0)

    def save(self, step):
        bucket.away = step in away
        saves(self, step)
        bucket.away = False

    monkeypatch.setattr(session.Session, "_save", save)
    away = {3, 12}
    assert train(where) == 1
    said = capsys.readouterr().err
    assert "step 3: the checkpoint of step 3 could not be written: " in said
    assert "503" in said
    assert "training goes on" in said
    *_, last = said.splitlines()
    assert last.startswith("ladder-jax: the checkpoint of step 12 could not be written: ")
    assert "Traceback" not in said
    assert steps(absolute(where) / "checkpoints") == [6, 9]
    away = set()
    assert train(where) == 0
    assert result(where) == result(local)


def test_a_token_store(stores, bucket, tmp_path, monkeypatch):
    """Its shards are copied when they are first read, and compared with what was written."""
    monkeypatch.setenv("LADDER_JAX_CACHE", str(tmp_path / "cache"))
    (tmp_path / "book.jsonl").write_text(lines(TEXTS))
    made = make([tmp_path / "book.jsonl"], tmp_path / "store")
    for file in (tmp_path / "store").iterdir():
        bucket.put(f"stores/book/{file.name}", file.read_bytes())
    copied = lambda: [file.name for file in tmp_path.glob("cache/stores/*/*.tokens")]
    where = "gs://bucket/stores/book"
    store = Store(where)
    here = Store(tmp_path / "store")
    assert store.manifest == here.manifest == made
    assert (store.starts == here.starts).all()
    assert copied() == []
    assert (store.read(0, 5) == here.read(0, 5)).all()
    assert copied() == ["00000.tokens"]
    assert texts_in(where) == TEXTS
    assert len(copied()) == len(made.shards) > 1
    asked = len(bucket.requests)
    Store(where).read(0, 5)
    assert not any("tokens" in request for request in bucket.requests[asked:])
    stores["gs"].flip("stores/book/00001.tokens")
    monkeypatch.setenv("LADDER_JAX_CACHE", str(tmp_path / "another"))
    with refused("00001.tokens' is damaged: it is not what was written"):
        Store(where).read(made.shards[0].tokens, 5)
    assert not list(tmp_path.glob("another/stores/*/00001.tokens"))
    bucket.delete("stores/book/00001.tokens")
    with refused(f"token store's '{where}/00001.tokens': No such"):
        Store(where)


def test_a_name_that_is_no_url(away):
    """Of a%41 the arrays were in aA, which may be another run; of a#1 there were none."""
    name = "odd/a%41#1|é 100%"
    save_small(away.url(name), RunConfig())
    assert verify(absolute(away.url(name)) / "1") == []
    assert all(key.startswith(f"{name}/1/") for key, _ in away.bucket.sorted("odd/"))


@pytest.mark.parametrize(
    "what, read",
    {
        "checkpoint": open_checkpoint,
        "model": open_model,
        "token store": Store,
    }.items(),
)
def test_where_nothing_is(away, read, what):
    with refused(f"there is no {what} at '{away.url('none')}'"):
        read(away.url("none"))


@pytest.mark.parametrize(
    "more, line",
    [
        (["run.dir=http://b/x"], "unknown scheme in 'http://b/x': 'http' (allowed: gs, s3)"),
        # where it was removed by its name, fsspec would have removed run1
        (["run.dir=gs://bucket/run[1]"], "'gs://bucket/run[1]': a folder in an object store must"),
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
    with refused("'gs://bucket/gemma': only runs and checkpoints are read from there"):
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
    bucket.put("full/file", b"")
    with refused(f"run.dir='{away.url('full')}' is not empty and holds no config.json"):
        check(away.url("full"))
