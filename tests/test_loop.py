"""What the training loop shows and keeps beside the steps: order, speed, profile, trackers,
goodput, progress.
"""

import concurrent.futures
import gc
import json
import os
import shutil
import signal
import struct
import sys
import types

import jax
import numpy as np
import pytest

from ladder_jax import config, nn, parallel, terminal, train
from ladder_jax.config import TrainConfig
from ladder_jax.errors import RunFailed
from ladder_jax.train import folder, metrics, step as steps, timing
from tests import cases, runs


def run(book, directory, *more, profile=None):
    said = []
    overrides = runs.words(book, directory, *runs.NINE_STEPS, *more)
    train.run(config.load("tiny", overrides=overrides), say=said.append, profile=profile)
    return said


class Watched:
    """A metric that notes when it is read."""

    def __init__(self, value, step, seen):
        self._value, self._step, self._seen = value, step, seen

    def __array__(self, dtype=None, copy=None):
        self._seen.append(("read", self._step))
        return np.asarray(self._value)


def test_a_step_is_dispatched_before_the_last_ones_metrics_are_read(book, tmp_path, monkeypatch):
    """But for the steps after which the state itself is needed: 4, 6, 8 and 9. The held-out loss
    holds as few logits as a step.
    """
    seen = []
    chunks = []

    def of_chunks(*args, chunk, real=nn.loss_sum, **settings):
        chunks.append(chunk)
        return real(*args, chunk=chunk, **settings)

    def watched(*args, real=steps.train_step, **settings):
        def compile(*shapes):
            step = real(*args, **settings).compile(*shapes)

            def dispatch(state, tokens, fixed):
                number = sum(what == "dispatch" for what, _ in seen) + 1
                seen.append(("dispatch", number))
                state, found = step(state, tokens, fixed)
                return state, {**found, "loss": Watched(found["loss"], number, seen)}

            return dispatch

        return types.SimpleNamespace(compile=compile)

    monkeypatch.setattr(nn, "loss_sum", of_chunks)
    monkeypatch.setattr(steps, "train_step", watched)
    run(book, tmp_path / "run")
    order = [("dispatch", 1)]
    for step in range(2, 10):
        late = [("dispatch", step), ("read", step - 1)]
        order += late if step - 1 not in (4, 6, 8) else late[::-1]
    assert seen == [*order, ("read", 9)]
    assert set(chunks) == {48}


def tensorboard(directory):
    return metrics.TensorBoard(directory / "tensorboard")


def events(directory):
    """(step, tag, value) of an event file: records of length, its checksum, an Event, its
    checksum.
    """
    from tensorboardX.proto.event_pb2 import Event

    (file,) = (directory / "tensorboard").glob("events.out.tfevents.*")
    content = file.read_bytes()
    found = []
    while content:
        (size,) = struct.unpack("<Q", content[:8])
        event = Event.FromString(content[12 : 12 + size])
        found += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
        content = content[16 + size :]
    return found


@pytest.fixture(scope="module")
def finished(book, tmp_path_factory):
    directory = tmp_path_factory.mktemp("finished") / "run"
    words = "train.peak_tflops=0.001", "lora.alpha=32"
    return directory, run(book, directory, *words, profile=range(3, 5))


def test_profile(finished):
    directory, said = finished
    assert any(line == f"profile in {directory / 'profile'}" for line in said)
    (trace,) = (directory / "profile").rglob("*.xplane.pb")
    assert trace.stat().st_size > 1000


@pytest.mark.parametrize("full", [False, True])
def test_a_profile_begins_and_ends_with_its_steps(monkeypatch, tmp_path, full):
    """Also where the disk is full, of which jax makes a lack of memory."""
    traced = []

    def stop():
        traced.append("stop")
        if full:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: run/profile;\n no space")

    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder: traced.append("start"))
    monkeypatch.setattr(jax.profiler, "stop_trace", stop)
    said = []
    profiler = timing.Profiler(range(3, 6), folder=tmp_path, say=said.append)
    for step in range(1, 8):
        profiler.before(step, pending=())
        traced.append(step)
        assert profiler.after(step, pending=()) == (step == 5 and not full)
    profiler.close()
    assert traced == [1, 2, "start", 3, 4, 5, "stop", 6, 7]
    failed = "the profile cannot be written: RESOURCE_EXHAUSTED: run/profile; no space"
    assert said == [failed] * full


def test_tensorboard_holds_what_the_log_holds(finished):
    directory, _ = finished
    rows = metrics.read(directory)
    shown = events(directory)
    assert [(step, value) for step, tag, value in shown if tag == "loss"] == [
        (row["step"], pytest.approx(row["loss"])) for row in rows
    ]
    assert [step for step, tag, _ in shown if tag == "validation_loss"] == [6, 9]
    assert {tag for _, tag, _ in shown} == set(rows[-1]) - {"step", "time", "tokens"}


def test_tensorboard_has_no_step_twice_after_a_return(tmp_path):
    board = tensorboard(tmp_path)
    small = metrics.SmallFiles(tmp_path, say=print)
    log = metrics.Metrics(small, step=0, trackers=[board])
    for step in (1, 2, 3):
        log.add({"step": step, "loss": step / 2})
    log.rewind(1)
    log.add({"step": 2, "loss": float("nan"), "event": "batch left out"})
    log.add({"step": 3, "loss": 7.0})
    log.close()
    board = tensorboard(tmp_path)
    again = metrics.Metrics(small, step=2, trackers=[board])
    again.add({"step": 3, "loss": 8.0})
    again.close()
    assert events(tmp_path) == [(1, "loss", 0.5), (3, "loss", 8.0)]


def test_tensorboard_of_a_long_run(tmp_path, monkeypatch):
    """At its resumption each row took a write to the disk: minutes for a hundred thousand."""
    synced = []
    monkeypatch.setattr(os, "fsync", synced.append)
    board = tensorboard(tmp_path)
    board.begin([{"step": step, "loss": 0.5} for step in range(100)])
    assert len(synced) == 1
    board.close()
    assert len(events(tmp_path)) == 100


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux has it")
def test_tensorboard_on_a_full_disk(tmp_path, monkeypatch):
    """What a row leaves in the file's buffer is given up, without a traceback when it is freed."""
    said = []
    monkeypatch.setattr(sys, "unraisablehook", said.append)
    monkeypatch.setattr(
        "tensorboardX.record_writer.open_file", lambda path: open("/dev/full", "wb")
    )
    tensorboard(tmp_path).begin([{"step": 1, "loss": 0.5}])
    gc.collect()
    assert not said


def test_weights_and_biases(book, tmp_path, monkeypatch, largest_file):
    """What is asked of the package, by a stand-in for it: one run for a folder, every row once, at
    its step; and never an id that a full disk cut short.
    """
    calls = []
    handle = types.SimpleNamespace(
        log=lambda row, step: calls.append((step, row["loss"])),
        finish=lambda: calls.append("finish"),
    )

    def init(**settings):
        calls.append((settings["project"], settings["id"], settings["resume"]))
        return handle

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init, Error=RuntimeError))
    board = metrics.WandB(config.RunConfig(), folder=tmp_path)
    largest_file(8)
    with pytest.raises(RunFailed):
        board.begin([])
    largest_file(None)
    assert not (tmp_path / metrics.WANDB_ID).exists()
    directory = tmp_path / "run"
    said = run(book, directory, "run.wandb=ladders", "run.tensorboard=false")
    assert "no MFU: the peak of 'cpu' devices is not known (train.peak_tflops=... gives it)" in said
    (project, identity, resume), *logged = calls
    assert (project, resume) == ("ladders", "allow")
    rows = metrics.read(directory)
    assert logged == [*((row["step"], row["loss"]) for row in rows), "finish"]
    assert not (directory / "tensorboard").exists()
    calls.clear()
    run(book, directory, "run.wandb=ladders", "run.tensorboard=false")
    assert calls == [("ladders", identity, "allow"), "finish"]


def test_goodput_of_a_run(finished):
    directory, said = finished
    summary = json.loads((directory / "goodput.json").read_text())
    seconds = summary["seconds"]
    assert sum(seconds.values()) == pytest.approx(summary["wall_seconds"])
    assert [part for part, taken in seconds.items() if not taken] == ["lost"]
    assert said[-1].startswith(f"goodput {summary['goodput']:.1%} of ")


def test_what_is_lost_to_restarts(monkeypatch):
    """A clock that moves only here. 10 s of steps with 2 s of saving in it; 5 s made in vain; 100 s
    down.
    """
    clock = types.SimpleNamespace(now=0.0)
    fake = types.SimpleNamespace(time=lambda: 1000 + clock.now, perf_counter=lambda: clock.now)
    monkeypatch.setattr(timing, "time", fake)

    def passes(seconds):
        clock.now += seconds

    account = timing.TimeAccount()
    passes(3)
    with account.time("steps"):
        passes(8)
        with account.time("saving"):
            passes(2)
        saved = json.loads(json.dumps(account.as_dict()))
        passes(5)
    seconds = account.summary()["seconds"]
    assert (seconds["start"], seconds["steps"], seconds["saving"]) == (3, 13, 2)
    passes(100)
    resumed = timing.TimeAccount()
    passes(1)
    resumed.restarts = 1
    resumed.go_back(saved)
    with resumed.time("steps"):
        passes(4)
    summary = resumed.summary()
    assert summary["seconds"] == {
        "steps": 12, "data": 0, "evaluation": 0, "saving": 2, "compile": 0, "start": 3, "lost": 106,
    }  # fmt: skip
    assert (summary["wall_seconds"], summary["restarts"]) == (123, 1)
    assert timing.goodput_text(summary) == (
        "goodput 9.8% of 123 s, restarts: 1: steps 9.8%, saving 1.6%, starting 2.4%, lost to restarts 86.2%"
    )


def test_throughput_between_two_rows():
    """Of the steps since the last row, and the whole run's tokens. Neither saving nor evaluation
    counts, nor a step that was left out.
    """
    seconds = dict(steps=3.0, data=1.0, saving=50.0)
    account = types.SimpleNamespace(now=lambda: dict(seconds))
    throughput = timing.Throughput(account, tokens_a_step=100, mfu=lambda rate: rate / 1000)
    throughput.restart(4)
    seconds |= dict(steps=3.0 + 6.0, data=1.0 + 2.0, saving=90.0)
    expected = dict(tokens=600, tokens_per_second=2 * 100 / 8, data_wait=2 / 8, mfu=0.025)
    assert throughput.since_last(6) == expected
    seconds["steps"] += 4.0
    throughput.left_out()
    assert throughput.since_last(11)["tokens_per_second"] == 4 * 100 / 4


def test_flops_a_token():
    """By hand: 4 layers, D 32, 8 heads of 4, 4 key/value heads, F 48, V 251, T 10."""
    layer = 32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 48
    expected = 3 * (2 * (4 * layer + 251 * 32) + 2 * 4 * 8 * 4 * 11)
    for changes in (
        dict(),
        dict(tensor=8),
        dict(biases=config.Biases.ALL, qk_norm=True),
        dict(tie_embeddings=True),
    ):
        assert timing.flops_a_token(cases.define("ladder", **changes), length=10) == expected


def test_flops_agree_with_the_compiler():
    """XLA's count of a training step, which sees the masked half of attention and all that is no
    matmul.
    """
    definition = nn.define(
        cases.model(d_model=128, d_ff=256, num_layers=2), mesh=parallel.make_mesh()
    )
    recipe = TrainConfig(batch=2, sequence=32, loop=config.Loop.UNROLLED)
    example = jax.ShapeDtypeStruct((2, 33), np.int32, sharding=definition.layout.sharding("BT"))
    gradients = jax.jit(train.loss_and_gradients(definition, loop=recipe.loop))
    counted = gradients.lower(definition.abstract, example).cost_analysis()["flops"]
    assert timing.flops_a_token(definition, length=32) * 64 == pytest.approx(counted, rel=0.15)


def test_peaks():
    assert timing.peak_of("NVIDIA H100 80GB HBM3") > timing.peak_of("NVIDIA H100 PCIe") > 0
    assert timing.peak_of("TPU v5p") == timing.peak_of("TPU v5") == 459e12
    assert timing.peak_of("NVIDIA GeForce GTX 285") is None


def test_mfu_is_shown_with_its_formula(finished):
    directory, said = finished
    (formula,) = [line for line in said if line.startswith("MFU")]
    model = config.load("tiny", overrides=runs.TINY).model
    work = timing.flops_a_token(nn.define(model, mesh=parallel.make_mesh(tensor=2)), length=32)
    assert (
        f"tokens/s x {work:.4g} FLOPs a token / (2 x 0.001 TFLOP/s, train.peak_tflops)" in formula
    )
    for row in metrics.read(directory):
        assert row["mfu"] == pytest.approx(row["tokens_per_second"] * work / 2e9)
        assert 0 <= row["data_wait"] <= 1
    assert "LoraConfig(alpha=32.0) has no effect without lora.rank" in said
    last = said[-2]
    assert "MFU" in last
    assert "data wait" in last
    assert "step 9/9" in last


def test_lines_of_progress(monkeypatch):
    """Where there is no terminal: a line after 10 seconds, and the last."""
    clock = types.SimpleNamespace(now=0.0)
    said = []
    monkeypatch.setattr(terminal, "time", types.SimpleNamespace(monotonic=lambda: clock.now))
    with terminal.progress(8, done=2, label="step {done}/{total}", say=said.append) as update:
        for step in range(3, 9):
            clock.now += 6
            update(step, f"loss {step}")
    assert said == [
        "step 4/8  loss 4  24 s left",
        "step 6/8  loss 6  12 s left",
        "step 8/8  loss 8",
    ]


def test_the_compilation_cache_is_the_users(tmp_path, monkeypatch):
    """Where one is named; else it is on, as test_cli shows."""
    before = jax.config.jax_compilation_cache_dir
    assert before == os.environ["JAX_COMPILATION_CACHE_DIR"]
    monkeypatch.setenv("LADDER_JAX_CACHE", str(tmp_path))
    parallel.use_compilation_cache()
    assert jax.config.jax_compilation_cache_dir == before
    assert not any(tmp_path.iterdir())

    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    option = "jax_persistent_cache_min_compile_time_secs"
    assert getattr(jax.config, option) == 0
    try:
        for given, used in ((0.0, 0.0), (1.0, 0.1)):  # the user's; jax's default
            jax.config.update("jax_compilation_cache_dir", None)
            jax.config.update(option, given)
            parallel.use_compilation_cache()
            assert jax.config.jax_compilation_cache_dir == str(tmp_path / "programs")
            assert getattr(jax.config, option) == used
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
        jax.config.update(option, 0.0)


def test_no_handler_stays_and_none_is_set_in_a_thread():
    handler = lambda: signal.getsignal(signal.SIGTERM)
    before = handler()
    with folder.caught() as stop:
        assert handler() is not before
        assert not stop.asked()
    assert handler() is before

    def in_a_thread():
        with folder.caught() as stop:
            return handler(), stop.asked()

    with concurrent.futures.ThreadPoolExecutor(1) as other:
        assert other.submit(in_a_thread).result() == (before, False)


def test_small_files_are_uploaded_later_where_they_could_not_be(tmp_path, monkeypatch):
    place = tmp_path / "run"
    said = []
    place.write_text("where the folder should be")
    monkeypatch.setattr(metrics, "is_remote", lambda folder: True)
    small = metrics.SmallFiles(place, say=said.append)
    lines = small.local / "metrics.jsonl"
    lines.write_text("1\n")
    small.upload()
    assert len(said) == 1
    assert said[0].endswith("; it is tried again with the next lines")
    place.unlink()
    place.mkdir()
    small.upload()
    assert (place / "metrics.jsonl").read_text() == "1\n"
    assert len(said) == 1
    shutil.rmtree(place)
    lines.write_text("1\n2\n")
    small.close()  # another failure is another line
    assert len(said) == 2
    assert not small.local.exists()
