"""Checkpoints: any mesh reads any other's; nothing damaged or foreign is ever loaded."""

import contextlib
import ctypes
import dataclasses
import gc
import json
import logging
import math
import os
import pathlib
import re
import resource
import shutil
import warnings
import zipfile
from types import SimpleNamespace

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import traverse_util
from numpy.testing import assert_array_equal

from ladder_jax import cli, nn, pretrained, train
from ladder_jax.checkpoint import (
    Damaged,
    Pieces,
    Store,
    arrays,
    manifest,
    open_checkpoint,
    steps,
    store,
    verify,
    writing,
)
from ladder_jax.checkpoint.arrays import named
from ladder_jax.checkpoint.saved import check_shapes
from ladder_jax.config import RunConfig, TrainConfig
from ladder_jax.parallel import make_mesh
from ladder_jax.train.step import optimizer_to_dict
from tests import cases, compilations
from tests.refusals import refused


def rewrite_meta(folder, *, without=None, **changes):
    """What another program, or a later version, would have written."""
    file = folder / "meta/metadata"
    meta = json.loads(file.read_text()) | changes
    meta.pop(without, None)
    file.write_text(json.dumps(meta))
    manifest.write(folder)


RECIPE = TrainConfig(steps=10, batch=4, sequence=8, warmup_steps=2)
SMALL = dict(params={"a": np.zeros(3, np.float32)}, optimizer={"b": np.zeros(3, np.float32)})


def save(folder, name="ladder", **mesh):
    """A run's first state on the given mesh, saved; returns its definition and its parameters as
    NumPy.
    """
    definition = cases.define(name, **mesh)
    state = train.initial_state(definition, config=RECIPE, params=cases.placed(definition))
    store = Store(folder, config=RunConfig(model=definition.config, train=RECIPE))
    store.save(1, params=state.params, optimizer=optimizer_to_dict(state.optimizer))
    store.close()
    return definition, jax.tree.map(np.asarray, state.params)


def save_small(folder, config, **more):
    """A checkpoint of SMALL in a run of that configuration."""
    store = Store(folder, config=config)
    store.save(1, **SMALL, **more)
    store.close()
    assert store.failure() is None


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "checkpoints"
    return folder, *save(folder, data=2, tensor=4)


def test_identity(saved, tmp_path):
    """Of the parameters: it goes with a copy, and tells another model of the same configuration and
    step.
    """
    folder, _, _ = saved
    shutil.copytree(folder, tmp_path / "copy")
    identity = open_checkpoint(folder).identity
    assert open_checkpoint(tmp_path / "copy").identity == identity
    save_small(tmp_path / "other", open_checkpoint(folder).config)
    assert open_checkpoint(tmp_path / "other").identity != identity
    old = dataclasses.replace(open_checkpoint(folder), has_manifest=False)  # as of an older version
    assert old.identity == str((folder / "1").resolve())


def test_restored_on_another_mesh(saved):
    """The vocabulary's padding grows with the ranks, by zeros."""
    folder, _, params = saved
    restored = named(open_checkpoint(folder).params(cases.define("ladder", tensor=8)))
    for name, value in named(params).items():
        rows = 251 if name.endswith("table") else len(value)
        found = np.asarray(restored[name])
        assert_array_equal(found[:rows], value[:rows])
        assert not found[rows:].any()


def test_a_function_of_four_ranks_stays_one(tmp_path):
    definition, params = save(tmp_path / "c", "ladder-fresh", data=2, tensor=4, num_layers=2)
    checkpoint = open_checkpoint(tmp_path / "c")
    assert checkpoint.config.model.ranks == 4
    assert checkpoint.config.train == RECIPE
    with refused("function of model.ranks=4 ranks; mesh.tensor=8"):
        nn.define(checkpoint.config.model, mesh=make_mesh(tensor=8))
    emulated = nn.define(checkpoint.config.model, mesh=make_mesh())
    a = nn.compiled_logits(definition)(cases.place(params, definition), cases.tokens())
    b = nn.compiled_logits(emulated)(checkpoint.params(emulated), cases.tokens())
    assert cases.error(b, a) < 2 * cases.bound(definition.config)


def test_orbax_reads_it(saved):
    """By plain names, without a framework's wrapper."""
    folder, _, params = saved
    handler = ocp.PyTreeCheckpointHandler()
    item = folder / "1/params"
    as_numpy = lambda _: ocp.RestoreArgs(restore_type=np.ndarray)
    kinds = jax.tree.map(as_numpy, handler.metadata(item).tree)
    found = handler.restore(item, args=ocp.args.PyTreeRestore(restore_args=kinds))
    jax.tree.map(assert_array_equal, found, params)
    assert found["layers"]["attention"]["query"].dtype == np.float32


@pytest.mark.parametrize("name", ["run[1]", "run?", "run*", "run\\1", "run {a,b} #1%41"])
def test_a_folder_of_any_name(tmp_path, name):
    """None is a pattern, which another run's folder matches."""
    for folder in (tmp_path / "run1", f"/{tmp_path}/{name}"):
        save_small(folder, RunConfig(train=RECIPE))
    assert verify(tmp_path / name / "1") == []


def test_replicas_share_the_writing_of_large_arrays_alone(tmp_path):
    """Each writes a part that a program cuts; of small ones there is none to compile."""
    everywhere = jax.NamedSharding(make_mesh(data=2), jax.P())
    large = np.arange(1 << 20, dtype=np.float32).reshape(1 << 10, -1)
    cut = {}
    for name, values in dict(large=large, small=large[:8]).items():
        array = jax.device_put(values, everywhere)
        with compilations.counted() as compiled:
            writing.await_all(writing.begin(tmp_path / name, {"a": array}), within=60)
        arrays.finish(tmp_path / name, {"a": array.shape})
        like = {"a": jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=everywhere)}
        (found,) = arrays.read(tmp_path / name, like)
        assert_array_equal(found, values)
        cut[name] = bool(compiled)
    assert cut == dict(large=True, small=False)


@pytest.mark.parametrize(
    "field, value, message",
    [("format", "other", "of another program"), ("version", 99, "version 99")],
)
def test_what_is_no_checkpoint_of_this_version_is_refused(copy, field, value, message):
    rewrite_meta(copy / "30", **{field: value})
    with refused(message):
        open_checkpoint(copy)


@pytest.mark.parametrize(
    "vocab_size, data, message",
    [
        (120, {}, r"model.vocab_size=120 is too small for bytes \(at least 256\)"),
        # without its run's folder a checkpoint of a token store is none of bytes
        (256, {"tokenizer": "tokenizer-0123"}, "there is no tokenizer at .*tokenizer'"),
    ],
)
def test_a_tokenizer_that_cannot_be_had(tmp_path, vocab_size, data, message):
    save_small(tmp_path, RunConfig(model=cases.model(vocab_size=vocab_size)), data=data)
    with refused(message):
        open_checkpoint(tmp_path).tokenizer()


def test_another_shape_is_refused(saved):
    definition = cases.define("ladder", d_ff=64)
    with refused(r"does not fit its configuration: layers/mlp/down is \(4, 48, 32\)"):
        open_checkpoint(saved[0]).params(definition)
    with refused("mu/embedding/table has no sharding to be read with"):  # and is not damaged
        open_checkpoint(saved[0]).optimizer({"mu": jax.tree.map(np.asarray, saved[2])})


@pytest.mark.parametrize(
    "name, shape, padded",
    [
        ("embedding/table", (256, 8), 0),  # the vocabulary
        ("layers/mlp/experts/up", (2, 6, 8, 4), 1),  # the experts
        ("layers/mlp/up", (2, 8, 4), None),
    ],
)
def test_only_padding_may_differ(name, shape, padded):
    tree = lambda shape: traverse_util.unflatten_dict({name: np.zeros(shape)}, sep="/")
    for axis in range(len(shape)):
        wanted = tuple(size + (at == axis) for at, size in enumerate(shape))
        refuses = refused(re.escape(f"{name} is {shape}, not {wanted}"))
        with contextlib.nullcontext() if axis == padded else refuses:
            check_shapes(tree(shape), tree(wanted), folder="run")


def test_a_folder_by_way_of_its_parent(tmp_path, monkeypatch, prints):
    """As in `run.dir=../run`: tensorstore takes no such path, and every save failed, and a whole
    checkpoint was called damaged. Where a link comes before, the parent is the link's target's.
    """
    (tmp_path / "elsewhere/here").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere/here")
    monkeypatch.chdir(tmp_path / "elsewhere/here")
    definition, params = save("../run")
    assert steps(tmp_path / "elsewhere/run") == [1]
    jax.tree.map(assert_array_equal, open_checkpoint("../run").params(definition), params)
    assert pretrained.open("../run").model == definition.config
    prints("convert", "../run", tmp_path / "link/../copy")
    copied = open_checkpoint(tmp_path / "elsewhere/copy").params(definition)
    jax.tree.map(assert_array_equal, copied, params)


def test_paths_that_lead_nowhere(tmp_path):
    with refused("there is no checkpoint"):
        open_checkpoint(tmp_path / "nowhere")
    (tmp_path / "file").write_text("x")
    with refused("is a file"):
        open_checkpoint(tmp_path / "file")
    (tmp_path / "20").mkdir()  # is called as a step
    for folder in (tmp_path, tmp_path / "20"):
        with refused("holds no ladder_jax checkpoint, and no config.json"):
            open_checkpoint(folder)


def numbered(leaf, times):
    """Values by position."""
    return np.arange(math.prod(leaf.shape), dtype=np.float32).reshape(leaf.shape) % 97 * times


@pytest.mark.parametrize("mesh", [dict(), dict(data=2, tensor=4)], ids=str)
def test_a_checkpoint_of_before_is_read(tmp_path, mesh):
    """As a run wrote it on a mesh of 2 x 4, and as a conversion did, which left out what is zero.

    Recorded once, and not made anew: it holds later versions to the format. It was made by a
    Store's `save`, and by `Stream`, of `numbered` values.
    """
    with zipfile.ZipFile(pathlib.Path(__file__).with_name("checkpoint_1.zip")) as recorded:
        recorded.extractall(tmp_path)
    trained = open_checkpoint(tmp_path).check()
    converted = open_checkpoint(tmp_path / "converted").check()
    assert trained.verified
    assert trained.step == 7
    assert trained.validation_loss == 2.5
    assert trained.data["skipped"] == [3]
    config = trained.config.model
    wrote = nn.define(config, mesh=make_mesh(data=2, tensor=4)).abstract
    definition = nn.define(config, mesh=make_mesh(**mesh))
    count = jax.ShapeDtypeStruct((), np.int32, sharding=definition.layout.sharding(""))
    moments = trained.optimizer({"count": count, "mu": definition.abstract})
    assert moments["count"] == 7
    names = named(definition.abstract)
    layer = next(Pieces(trained, definition)([("layers/mlp/up", 1)]))
    assert_array_equal(layer, numbered(names["layers/mlp/up"], 1)[1])
    for name, leaf in named(wrote).items():
        rows = 200 if name.endswith("table") else len(numbered(leaf, 1))
        for tree, times in (
            (trained.params(definition), 1),
            (moments["mu"], 2),
            (converted.params(definition), name != "final_norm/scale"),
        ):
            found = named(tree)[name]
            assert found.sharding == names[name].sharding
            assert_array_equal(np.asarray(found)[:rows], numbered(leaf, times)[:rows], err_msg=name)


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """Three small checkpoints, of one array each beside the optimizer's."""
    folder = tmp_path_factory.mktemp("three") / "checkpoints"
    store = Store(folder, config=RunConfig(train=RECIPE))
    for step, loss in ((10, 2.0), (20, 1.0), (30, None)):
        store.save(
            step,
            params={"a": np.full((64, 8), step, np.float32)},
            optimizer={"b": np.ones(3, np.float32)},
            data={"fingerprint": "x", "skipped": [3]},
            validation_loss=loss,
        )
    store.close()
    assert store.failure() is None
    return folder


@pytest.fixture
def copy(three, tmp_path):
    return shutil.copytree(three, tmp_path / "checkpoints")


def opened(folder, **settings):
    return Store(folder, config=RunConfig(train=dataclasses.replace(RECIPE, **settings)))


def truncate(file):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


@pytest.mark.parametrize("damage", [truncate, cases.flip, pathlib.Path.unlink])
def test_every_damaged_file_is_found(three, tmp_path, damage):
    """Each file of a checkpoint in turn: found and named."""
    files = sorted(p for p in (three / "30").rglob("*") if p.is_file() and p.stat().st_size)
    assert len(files) > 10
    assert three / "30/manifest.json" in files
    for index, file in enumerate(files):
        copy = shutil.copytree(three, tmp_path / str(index))
        damage(copy / file.relative_to(three))
        if not (copy / "30/manifest.json").exists():
            assert open_checkpoint(copy).step == 20  # as of a save that was killed
            continue
        with pytest.raises(Damaged, match="damaged or incomplete: ") as said:
            open_checkpoint(copy).check()
        name = str(file.relative_to(three / "30"))
        assert name in str(said.value)
        assert any(line.startswith(name) for line in verify(copy / "30"))
        assert verify(copy) == verify(copy / "30")  # the newest
        assert verify(copy / "20") == []
        shutil.rmtree(copy)


def test_an_item_is_compared_before_it_is_read(saved, tmp_path):
    """Reading the parameters does not read the optimizer, and does not trust its own files."""
    copy = shutil.copytree(saved[0], tmp_path / "checkpoints")
    definition = cases.define("ladder")
    cases.flip(copy / "1/optimizer")
    open_checkpoint(copy).params(definition)
    cases.flip(copy / "1/params")
    with pytest.raises(Damaged, match="params/.* has other contents than were written"):
        open_checkpoint(copy).params(definition)


def test_a_failed_write_is_told_when_the_others_have_ended():
    """One that went on would make its folder again, after the failed save has removed it."""
    ended = []

    def fail(timeout):
        raise OSError("full")

    later = SimpleNamespace(result=lambda timeout: ended.append(timeout))
    with pytest.raises(OSError, match="full"):
        writing.await_all([SimpleNamespace(result=fail), later], within=7.0)
    assert ended == [7.0]


def test_what_is_kept():
    nan = math.nan

    def removed(*losses, **keep):
        """Of steps 1, 2, ... with these losses."""
        return store.steps_to_remove(dict(enumerate(losses, 1)), keep=store.Keep(**keep))

    losses = 3.0, 1.0, None, 1.0, 4.0, 2.0, None
    assert removed(*losses) == [1, 2, 3, 4, 5, 6]
    assert removed(*losses, last=2, every=3) == [1, 2, 4, 5]
    assert removed(*losses, best=1) == [1, 2, 3, 5, 6]  # of two equals the later
    assert removed(*losses, best=3) == [1, 3, 5]
    assert removed(*losses, last=99) == []
    assert removed(nan, 2.0, 1.0, 3.0, nan, best=1) == [1, 2, 4]
    assert removed(nan, nan, best=1) == [1]
    assert store.parse_keep("every=1000, best=2") == store.Keep(last=1, every=1000, best=2)
    for words, message in (
        ("lats=3", "did you mean 'last'"),
        ("last=0", "at least 1"),
        ("best=x", "whole number"),
        ("best=" + "9" * 5000, "whole number"),
    ):
        with refused(message):
            store.parse_keep(words)


def test_killed_before_the_manifest(copy, monkeypatch):
    """What was written until then is removed by the next start, and the others are whole."""

    class Killed(BaseException):
        pass

    def kill(folder):
        raise Killed

    saving = opened(copy)
    monkeypatch.setattr(manifest, "write", kill)
    saving.save(40, **SMALL)
    saving.close()
    monkeypatch.undo()
    assert steps(copy) == steps(str(copy)) == [10, 20, 30]
    opened(copy).close()
    assert sorted(os.listdir(copy)) == ["10", "20", "30"]
    assert verify(copy / "30") == verify(str(copy / "30")) == []


def test_a_step_is_a_whole_number(copy):
    """As NumPy has it, too, and the loss; a folder of another name would not count."""
    saving = opened(copy)
    for step in ("40", 40.0, -1, None):
        with refused("step must be "):
            saving.save(step, **SMALL)
    saving.save(np.int64(40), **SMALL, validation_loss=jax.numpy.float32(1.5))
    saving.close()
    assert saving.failure() is None
    assert open_checkpoint(copy).step == 40
    assert open_checkpoint(copy).validation_loss == 1.5


def test_an_older_one_goes_only_after_the_new_one_is_whole(copy, monkeypatch):
    saving = opened(copy, keep_checkpoints=1)
    seen = []
    prune = saving._prune
    monkeypatch.setattr(saving, "_prune", lambda: (seen.append(verify(copy / "40")), prune()))
    saving.save(40, **SMALL)
    saving.close()
    assert seen == [[]]
    assert os.listdir(copy) == ["40"]


def test_a_save_that_fails_leaves_the_others(copy):
    """A file where the checkpoint should be written; then the next save works again."""
    store = opened(copy)
    (copy / "40").write_text("in the way")
    store.save(40, **SMALL)
    store.wait()
    assert "step 40 could not be written" in str(store.failure())
    assert store.failure() is None
    (copy / "40").unlink(missing_ok=True)
    store.save(40, **SMALL)
    store.close()
    assert store.failure() is None
    assert [verify(copy / str(step)) for step in (20, 30, 40)] == [[], [], []]


def test_a_folder_that_was_removed_is_made_again(tmp_path):
    folder = tmp_path / "run/checkpoints"
    store = opened(folder)
    store.save(10, **SMALL)
    store.wait()
    shutil.rmtree(tmp_path / "run")
    store.save(20, **SMALL)
    store.close()
    assert store.failure() is None
    assert verify(folder / "20") == []


def test_names_and_metas_that_no_run_wrote(copy, prints):
    """Other digits than ASCII's, leading zeros; and a whole checkpoint whose meta lacks what every
    one has.
    """
    for name in ("4\N{SUPERSCRIPT TWO}", "\N{ARABIC-INDIC DIGIT FOUR}0", "040"):
        (copy / name).mkdir()
    assert steps(copy) == [10, 20, 30]
    assert open_checkpoint(copy).step == 30
    prints("checkpoints", copy)
    whole = json.loads((copy / "30/meta/metadata").read_text())
    for lacking in ("step", "config"):
        rewrite_meta(copy / "30", without=lacking, **whole)
        with pytest.raises(Damaged, match="its meta has no step, or no config"):
            open_checkpoint(copy)


def test_the_verb(three, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(three, run / "checkpoints")

    def listed(*more):
        """The exit status, the answer, and the state of each step in it."""
        status = cli.main(["checkpoints", str(run), "--json", *more])
        answer = json.loads(capsys.readouterr().out)
        return status, answer, {one["step"]: one["state"] for one in answer["checkpoints"]}

    status, answer, states = listed()
    assert (status, states) == (0, dict.fromkeys((10, 20, 30), "unchecked"))
    assert answer["checkpoints"][1]["validation_loss"] == 1.0
    assert answer["checkpoints"][0]["bytes"] > 2048
    verified = lambda: cli.main(["checkpoints", str(run), "--verify"])
    assert verified() == 0
    assert capsys.readouterr().out.count("whole") == 3
    cases.flip(run / "checkpoints/30" / "data/metadata")
    # What is damaged counts for nothing, and is left for its owner to see.
    status, answer, states = listed("--prune", "last=1,best=1")
    assert (status, states) == (1, {20: "whole", 30: "damaged"})
    assert answer["removed"] == [10]
    assert verified() == 1
    said = capsys.readouterr()
    assert "step 30: data/metadata has other contents than were written" in said.out
    assert (
        said.err
        == "ladder-jax: damaged: the checkpoint of step 30 (train with run.on_damaged=previous goes on without)\n"
    )


@pytest.mark.parametrize(
    "where, call, left", [(pathlib.Path, "unlink", [10, 20, 30]), (os, "rmdir", [30])]
)
def test_folders_that_refuse_to_be_pruned(copy, monkeypatch, capsys, where, call, left):
    """Its manifest, or what is below it."""

    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(where, call, refuse)
    assert cli.main(["checkpoints", str(copy), "--prune", "last=1"]) == 1
    each = (f"cannot remove '{copy}/{step}': Permission denied" for step in (10, 20))
    assert f"{'; '.join(each)}\n" in capsys.readouterr().err
    assert steps(copy) == left


@pytest.mark.parametrize("by", ["the verb", "a run"])
def test_the_best_stays_where_it_cannot_be_read_just_now(copy, monkeypatch, capsys, by):
    read = manifest._read
    refusals = [OSError(116, "Stale file handle")]

    def refuse_once(folder):
        if folder.name == "20" and refusals:
            raise refusals.pop()
        return read(folder)

    monkeypatch.setattr(manifest, "_read", refuse_once)
    if by == "the verb":
        assert cli.main(["checkpoints", str(copy), "--prune", "last=1,best=1"]) == 1
        assert "manifest.json cannot be read: Stale file handle" in capsys.readouterr().out
    else:
        saving = opened(copy, keep_checkpoints=1, keep_best=1)
        saving.save(40, **SMALL)
        saving.close()
    assert not refusals
    assert 20 in steps(copy)


def test_what_an_abandoned_write_never_began_is_not_told():
    """Python warns of that when it collects the rest, which may be when the process ends."""

    async def part():
        pass

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        writing.quieten()
        for name in ("async_serialize_from_host.<locals>.write_fragment", "another"):
            part.__qualname__ = name
            part()
            gc.collect()
    assert [str(one.message) for one in told] == ["coroutine 'another' was never awaited"]


def test_what_an_abandoned_write_raises_later_is_not_told(caplog):
    """asyncio's message does not say which file; its error does. absl's are told by their code."""
    writing.quieten()
    for path in ("site-packages/orbax/save.py", "absl/flags.py"):
        record = logging.LogRecord("absl", logging.ERROR, path, 1, path, (), None)
        logging.getLogger("absl").handle(record)
    assert [record.message for record in caplog.records] == ["absl/flags.py"]
    caplog.clear()
    for path in ("checkpoints/45/optimizer/array_metadatas/process_0", "run/elsewhere"):
        error = FileNotFoundError(2, "No such file or directory", path)
        logging.getLogger("asyncio").error("Task exception was never retrieved", exc_info=error)
    assert [str(record.exc_info[1]) for record in caplog.records] == [
        "[Errno 2] No such file or directory: 'run/elsewhere'"
    ]


@pytest.mark.full  # it writes 600 MB
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="this libc cannot")
def test_memory_of_a_save_is_given_back(tmp_path):
    def resident():
        pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
        return pages * resource.getpagesize()

    values = np.random.default_rng(0).standard_normal((100, 1 << 19), np.float32)
    writer = Store(tmp_path, config=RunConfig())
    before = resident()
    for step in (1, 2, 3):
        writer.save(step, params={"a": dict(enumerate(values))}, optimizer=SMALL["optimizer"])
        writer.wait()
    assert writer.failure() is None
    assert resident() - before < values.nbytes / 2
    writer.close()
