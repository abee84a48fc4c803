"""Runs in S3: a stand-in on this machine (tests/s3.py). Orbax does not write there; checkpoint/arrays.py does."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore
from jax.sharding import NamedSharding, PartitionSpec

from ladder_jax import cli
from ladder_jax.checkpoint import arrays, open_checkpoint, verify
from ladder_jax.checkpoint.arrays import named
from ladder_jax.errors import UserError
from ladder_jax.files import absolute, kvstore
from ladder_jax.train import lock
from tests import s3, s3_files, test_remote
from tests.test_remote import train

RUN = "s3://bucket/runs/one"


@pytest.fixture(scope="module")
def bucket():
    """One for all tests: the libraries read where it is only once."""
    with s3.served() as (bucket, environment), pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        s3_files.register()
        yield bucket


@pytest.fixture(scope="module")
def run(bucket, tmp_path_factory):
    """A local run, and the same one in the bucket, which was killed as soon as it had a checkpoint, and resumed."""
    local = tmp_path_factory.mktemp("runs") / "one"
    assert train(local) == 0
    test_remote.killed_and_resumed(bucket, RUN, "tests.s3_files")
    return local


def test_a_killed_run_is_resumed_and_the_same(bucket, run, capsys):
    test_remote.same_as_local(bucket, RUN, run)
    test_remote.same_pieces(run, RUN)
    assert cli.main(["checkpoints", RUN, "--verify", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["checkpoints"]
    assert [(row["step"], row["state"]) for row in rows] == [(9, "whole"), (12, "whole")]


def test_copies(bucket, run, tmp_path):
    """On a disk the bucket's checkpoint is one of Orbax's; in the bucket one that Orbax has written is read."""
    there = test_remote.copies(bucket, run, tmp_path, "s3://bucket/runs/copied")
    assert open_checkpoint(tmp_path / "copy").check().verified
    handler, as_numpy = ocp.PyTreeCheckpointHandler(), lambda _: ocp.RestoreArgs(restore_type=np.ndarray)
    for item in ("params", "optimizer"):
        folders = [folder / "checkpoints" / "12" / item for folder in (run, tmp_path / "copy")]
        kinds = [jax.tree.map(as_numpy, handler.metadata(folder).tree) for folder in folders]
        read = lambda folder, kind: handler.restore(folder, args=ocp.args.PyTreeRestore(restore_args=kind))
        ours, theirs = map(named, map(read, folders, kinds))
        assert ours.keys() == theirs.keys() and len(ours) > 5
        for name in ours:
            assert ours[name].dtype == theirs[name].dtype and np.array_equal(ours[name], theirs[name]), name
    test_remote.same_pieces(run, there)
    assert train(there) == 0


def test_what_has_changed_is_never_resumed_from(bucket, run, capsys):
    test_remote.copy(bucket, "runs/one/", "runs/two/")
    name = next(name for name in bucket.objects if name.startswith("runs/two/checkpoints/12/params/ocdbt.process_0/d/"))
    content = bytearray(bucket.objects[name][1])
    content[7] ^= 1
    bucket.put(name, content, match=None)
    there = "s3://bucket/runs/two"
    assert "other contents than were written" in verify(absolute(there) / "checkpoints" / "12")[0]
    assert train(there) == 2
    assert "damaged or incomplete" in (line := capsys.readouterr().err) and "before it is step 9" in line
    assert train(there, "run.on_damaged=previous") == 0
    assert f"resuming {there} from step 9" in capsys.readouterr().err
    assert json.loads(bucket.objects["runs/two/result.json"][1]) == json.loads((run / "result.json").read_text())


@pytest.mark.full
def test_two_processes(bucket):
    test_remote.two_processes(bucket, "s3://bucket/runs/three", "tests.s3_files")


def sharded(value, *dims, tensor=2):
    mesh = jax.make_mesh((2, tensor), ("data", "tensor"), devices=jax.devices()[: 2 * tensor])
    return jax.device_put(value, NamedSharding(mesh, PartitionSpec(*dims)))


def test_arrays(bucket, monkeypatch):
    """Any dtype, shape and sharding; read with another sharding and padded; chunks of a shard, and not too large."""
    folder = absolute("s3://bucket/arrays")
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
    spec = {"driver": "zarr", "kvstore": {"driver": "ocdbt", "base": kvstore(folder), "path": "layers.mlp.up/"}}
    assert tensorstore.open(spec, open=True).result().chunk_layout.read_chunk.shape == (1, 8, 3)  # 96 bytes
    shapes = {"layers": {"mlp": {"up": (3, 8, 6)}}, "embedding": {"table": (12, 4)}, "count": ()}

    def wanted(shape):
        dims = ("tensor",) if shape == (12, 4) else ()
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharded(np.zeros(shape), *dims, tensor=4).sharding)

    like = jax.tree.map(wanted, shapes, is_leaf=lambda node: isinstance(node, tuple))
    restored = named(arrays.read(folder, like))
    for name, value in values.items():
        assert restored[name].sharding == named(like)[name].sharding
        padded = np.zeros(named(like)[name].shape, np.float32)
        padded[tuple(map(slice, value.shape))] = value
        assert np.array_equal(restored[name], padded), name


def test_locks(bucket, monkeypatch):
    """Each change is one request with a condition, which the store checks."""
    monkeypatch.setattr(lock, "RENEWED", 0.1)
    monkeypatch.setattr(lock, "GIVES_UP", 2.0)
    monkeypatch.setattr(lock, "EXPIRES", 3.0)
    test_remote.one_of_several(bucket, "s3://bucket/leases/one")
    asked = len(bucket.requests)
    test_remote.taken_over(bucket, "s3://bucket/leases/two")
    assert sum(request.startswith("HEAD") for request in bucket.requests[asked:]) <= 1  # before the lock is removed


def test_a_store_that_is_away(bucket, monkeypatch):
    test_remote.away_while_a_save_finishes(bucket, "s3://bucket/away", monkeypatch)


def test_mistakes(bucket, capsys):
    assert train("s3://another/x") == 2
    assert capsys.readouterr().err == (
        "ladder-jax: 's3://another/x': there is no bucket 'another', or these credentials may not list it\n"
    )
    with pytest.raises(UserError, match="there is no checkpoint at 's3://bucket/none'"):
        open_checkpoint("s3://bucket/none")


def test_folders_of_something_else(bucket):
    test_remote.only_of_runs(bucket, "s3://bucket")
