"""`ladder-jax overlap` as a user meets it: answers, files, mistakes, what is kept. CPU is the
target; `make audit` has the others.
"""

import collections
import gzip
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from unittest import mock

import pytest

from ladder_jax import cli, files, python
from ladder_jax.config import Loop, Phase
from ladder_jax.errors import RunFailed
from ladder_jax.overlap import compile as compiling, picture, programs, request as requests, result
from ladder_jax.overlap.compile import Record, read, write
from ladder_jax.schedule import hlo, judge, targets, timeline
from tests import covering
from tests.hlo import text
from tests.refusals import refused

ASKED = (
    "--model tiny --target cpu:8 --phase decode --residual ladder --layers 2 --batch 2 --context 32"
)
SHAPE = "--model tiny --target cpu:8 --layers 2 --prompt-length 16"
KEYS = """target model residual phase loop layers tensor all_reduces asynchronous hidden merged exposed
window_flops_fraction hidden_time_fraction bytes_accessed bytes_minimum bytes_per_device jax compiler""".split()


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    return tmp_path_factory.mktemp("kept")


@pytest.fixture
def told(kept, monkeypatch, prints):
    """What the command prints, in this process; `json`: the object that it prints."""
    monkeypatch.setenv("LADDER_JAX_CACHE", str(kept))

    def run(words, *, as_json=False):
        said = prints("overlap", *words.split(), *(["--json"] if as_json else []))
        return json.loads(said) if as_json else said

    return run


def test_json(told):
    found = told(ASKED, as_json=True)
    assert set(KEYS) <= set(found)
    counts = dict(all_reduces=4, asynchronous=0, hidden=0, merged=0, exposed=4)
    assert counts.items() <= found.items()
    owners = [(one["layer"], one["sublayer"]) for one in found["reductions"][:3]]
    assert owners == [("0", "attention"), ("0", "mlp"), ("1", "attention")]
    # a CPU adds bfloat16 in float32
    alike = dict(direction="forward", status="synchronous", bytes=2 * 128 * 4)
    assert all(alike.items() <= one.items() for one in found["reductions"])
    d, layers, v = 128, 2, 128  # the head's 256 rows are padded to 128 a rank
    matrices = 4 * d * 16 + 3 * d * 352 // 8  # a rank holds one head of 16
    weights = 2 * (layers * matrices + v * d) + 4 * (2 * layers + 1) * d  # gains are float32
    cache = layers * 2 * 2 * 32 * 16 * 2
    assert found["bytes_minimum"] == weights + cache
    assert found["bytes_per_device"] > weights + cache


def test_a_scanned_decode_step_reads_the_experts_that_are_chosen():
    request = requests.make(
        model="tiny-moe",
        phase=Phase.DECODE,
        target="cpu:8",
        tensor=2,
        batch=2,
        context=32,
        residual="ladder",
        loop=Loop.SCAN,
    )
    d, layers, expert = 128, 4, 3 * 128 * 128
    chosen = 4 * (1 - (1 - 2 / 8) ** 2)  # of a rank's experts: each of two tokens takes 2 of 8
    matrices = d * 192 + 3 * d * 64 + chosen * expert + 2 * 8 * d  # the router's are float32
    gains = 4 * (2 * layers + 1) * d
    cache = layers * 2 * 2 * 32 * 32 * 2
    least = programs.bytes_minimum(request, programs.program(request)[1])
    assert least == 2 * (layers * matrices + 128 * d) + gains + cache


def test_text_begins_with_the_verdict(told, kept, monkeypatch):
    lines = told(ASKED).splitlines()
    assert lines[0] == "0 of 4 all-reduces hidden"
    assert any("output of attention" in line for line in lines)
    assert any(line.startswith("memory ") for line in lines)
    assert "other collectives: 2 (embedding, choice of the token), 0 hidden" in lines
    monkeypatch.setenv("COLUMNS", "80")
    narrow = told(ASKED).splitlines()
    assert max(map(len, narrow)) <= 80
    assert narrow[:2] == lines[:2]
    assert os.listdir(kept) == ["schedules"]
    assert len(os.listdir(kept / "schedules")) == 1  # one program, kept


@pytest.mark.usefixtures("compiled_here")
@pytest.mark.parametrize(
    "phase, loop, count",
    covering.marked(
        [("prefill", "scan", 5), ("train", "unrolled", 8)], chosen=[("train", "scan", 9)]
    ),
)
def test_phases(told, phase, loop, count):
    found = told(f"{SHAPE} --phase {phase} --residual ladder --loop {loop}", as_json=True)
    assert (found["all_reduces"], found["merged"]) == (count, 0)
    assert found["bytes_accessed"] > found["bytes_per_device"] / 4
    purposes = {part for one in found["other_collectives"] for part in one["for"].split(", ")}
    expected = {"embedding"}
    if phase == "train":
        expected |= {"loss", "gradient of the head's input", "gradient norm"}
        expected |= {"gradients of norm gains and other replicated weights"}
    assert purposes == expected
    assert found["other_hidden"] == 0


@pytest.mark.usefixtures("compiled_here")
def test_weights_and_a_stream_that_are_split(told):
    """2 layers of 7 matrices: gathered again in the backward pass, too; and both halves of 4
    sums.
    """
    words = f"{SHAPE} --phase train --residual ladder --loop unrolled --fsdp 2 --sequence-parallel"
    found = told(words, as_json=True)
    gathers = found["weights_gathers"]
    scatters = found["gradients_scatters"]
    nothing = dict(asynchronous=0, hidden=0)
    assert dict(nothing, count=7 * (2 + 2)).items() <= gathers.items()
    assert dict(nothing, count=7 * 2).items() <= scatters.items()
    assert collections.Counter(one["layer"] for one in scatters["each"]) == dict.fromkeys("10", 7)
    forward = [one["kind"] for one in found["reductions"] if one["direction"] == "forward"]
    assert sorted(forward) == ["all-gather"] * 4 + ["reduce-scatter"] * 4
    text = told(words)
    count = found["all_reduces"]
    assert text.startswith(f"0 of {count} collectives hidden\nexposed: {count} synchronous\n")
    assert "0 of 28 arrays of layers' weights gathered, hidden (0% of their bytes)\n" in text


MISTAKES = {
    "--target v5q:2x2": "unknown target 'v5q:2x2'; did you mean 'v5p:2x2x2'? (allowed: v5e:2x4,",
    "--target v5p:8": "target 'v5p:8' has no valid size for v5p: write it as in v5p:2x2x2",
    "--target h100:eight": "target 'h100:eight' has no valid size for h100: write it as in h100:8",
    "--model tiney": "unknown preset 'tiney'; did you mean 'tiny'?",
    "--phase dekode": "unknown --phase 'dekode'; did you mean 'decode'? (allowed: prefill, decode, train)",
    "--residual lader": "unknown residual 'lader'; did you mean 'ladder'?",
    "--loop scn": "unknown --loop 'scn'; did you mean 'scan'? (allowed: scan, unrolled)",
    "--launch by-name": "unknown --launch 'by-name' (allowed: auto, chained, explicit)",
    "--phase train --launch explicit": "--launch explicit is for prefill and decode, not for train: it has no gradient",
    "--phase train --quantize int8": "--quantize int8 is for prefill and decode, not for train",
    "--prompt-length 64": "--prompt-length is for train and prefill: of decode --context says how full",
    "--phase train": "--context is for prefill and decode: training has no cache",
    "--phase prefill": "--context 32 has no room for --prompt-length 1024",
    "--remat full": "--remat full is for train: decode has no backward pass",
    "--tensor 3": "model.num_heads=8 is not divisible by mesh.tensor=3",
    "--tensor 16": "--tensor 16 is more than the 8 devices of cpu:8",
    "--tensor 4 --fsdp 4 --phase train": "--tensor 4 x --fsdp 4 is more than the 8 devices of cpu:8",
    "--fsdp 0": "--fsdp must be positive, not 0",
    "--fsdp 2": "--fsdp is for train (serving keeps every layer's weights), not for decode",
    "--fsdp 3 --phase train": "model.d_model=128 is not divisible by mesh.fsdp=3",
    "--sequence-parallel": "--sequence-parallel is for train and prefill: a decode step has one position a row",
    "--sequence-parallel --phase train --prompt-length 12": "splits --prompt-length 12 over --tensor 8",
    "--phase prefill --residual desync-4 --sequence-parallel": "sublayer's output, which desync-4 does not",
    "--collective-matmul ring": "collective_matmul=ring needs sequence_parallel: without it no gather",
    "--collective-matmul rings": "unknown --collective-matmul 'rings'; did you mean 'ring'?",
    "--phase prefill --residual parallel --sequence-parallel --collective-matmul ring": "share one gather",
    "--layers 0": "--layers must be positive, not 0",
    "--batch -1": "--batch must be positive, not -1",
    "--ladder-layers 9": "ladder_layers='9' is no choice of layers",
    "--residual standard --ladder-layers 2": "model.ladder_layers needs a ladder kind",
    "--plot picture.gif": "--plot picture.gif: the file must end in .png or .svg or .pdf",
    "--plot nowhere/picture.png": "--plot nowhere/picture.png: there is no folder nowhere",
    "--trace trace.txt": "--trace trace.txt: the file must end in .json",
    "--plot a.png": "cpu hides nothing, so there is no timeline",
    "--phase prefill --interleave 3": "interleave must be 1 (the whole batch) or 2 (two halves",
    "--target h100:8 --layers 4 --ladder-layers 2 --plot a.png": "leave --ladder-layers 2 out",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_mistakes_are_one_line_and_compile_nothing(words, mistake, monkeypatch):
    monkeypatch.setattr(compiling, "compiled", None)
    assert MISTAKES[words] in mistake("overlap", *ASKED.split(), *words.split())


def test_a_mistake_found_by_the_compiler_process(told, capsys):
    assert cli.main(["overlap", *f"{ASKED} --launch explicit".split()]) == 2
    err = capsys.readouterr().err
    assert "launch 'explicit' is for NVIDIA GPUs and" in err.splitlines()[-1]
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "target, installs",
    [
        ("v5p:2x2x2", "libtpu is not installed: pip install 'jax[tpu]=="),
        ("h100:8", "pip install --no-deps jax-cuda13"),
    ],
)
def test_a_missing_compiler_says_what_to_install(target, installs, mistake, monkeypatch):
    monkeypatch.setattr(python, "versions", lambda *packages: {"jax": "1"})
    said = mistake("overlap", *f"{ASKED} --target {target} --tensor 8".split())
    assert f"target {target}: " in said
    assert installs in said


def killed(request):
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_compiler_is_one_line():
    with refused(r"the compiler for cpu:8 ended with status -9: out of memory\?"):
        compiling.apart("tests.test_overlap:killed", {}, target=targets.parse("cpu:8"))


def test_a_program_is_compiled_once(monkeypatch, tmp_path, capsys):
    """And again where it or the user's flags differ, or where what was kept is damaged. A full disk
    keeps nothing.
    """
    monkeypatch.setenv("LADDER_JAX_CACHE", str(tmp_path))
    ran = []

    def full(file, write):
        raise RunFailed(f"{file} was not written: No space left on device")

    def compile_it(function, request, **_):
        ran.append(request)
        return RECORD

    monkeypatch.setattr(compiling, "apart", compile_it)
    assert compiling.compiled(ask()) == compiling.compiled(ask()) == RECORD
    assert len(ran) == 1
    (path,) = tmp_path.rglob("*.gz")
    compiling.compiled(ask(batch=4))
    assert len(ran) == 2
    path.write_bytes(b"")  # damaged in any other way: below
    assert compiling.compiled(ask()) == RECORD
    assert len(ran) == 3
    for name in ("XLA_FLAGS", "JAX_DEFAULT_MATMUL_PRECISION", "LADDER_JAX_GROUPED_MATMUL"):
        monkeypatch.setenv(name, "other")
        compiling.compiled(ask())
    assert len(ran) == 6
    monkeypatch.setenv("LADDER_JAX_CACHE", str(path))  # a file: nothing is kept
    assert compiling.compiled(ask()) == compiling.compiled(ask()) == RECORD
    assert len(ran) == 8
    monkeypatch.setenv("LADDER_JAX_CACHE", str(tmp_path))
    monkeypatch.setattr(files, "write_atomically", full)
    monkeypatch.setattr(tempfile, "mkdtemp", mock.Mock(side_effect=OSError(2, "No usable folder")))
    assert compiling.compiled(ask(batch=8)) == RECORD
    assert capsys.readouterr().err.endswith("was not written: No space left on device\n")


def test_an_interrupt_ends_the_compiler_too(tmp_path):
    """Ctrl-C, while it compiles: nothing of it goes on, and nothing is left."""
    words = "--model tiny --target cpu:8 --phase train --residual ladder --layers 24 --loop unrolled".split()
    process = subprocess.Popen(
        [sys.executable, "-m", "ladder_jax", "overlap", *words],
        env={**os.environ, "LADDER_JAX_CACHE": str(tmp_path), "TMPDIR": str(tmp_path)},
        start_new_session=True,
        stderr=subprocess.PIPE,
        text=True,
    )
    children = lambda: subprocess.run(
        ["pgrep", "-P", str(process.pid)], capture_output=True, text=True
    ).stdout.split()
    deadline = time.monotonic() + 60
    # the compiler, and multiprocessing's own
    while len(children()) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    workers = children()
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert said.splitlines()[-1] == "ladder-jax: interrupted"
    assert len(workers) == 2
    alive = lambda: [worker for worker in workers if os.path.exists(f"/proc/{worker}")]
    while alive() and time.monotonic() < deadline:
        time.sleep(0.1)  # multiprocessing's own ends just after the command
    assert not alive()
    assert os.listdir(tmp_path) == ["schedules"]
    assert os.listdir(tmp_path / "schedules") == []


def ask(**changes):
    settings = dict(
        target="cpu:8", model="tiny", residual="ladder", phase=Phase.DECODE, batch=2, context=32
    )
    return requests.make(**{**settings, **changes})


def large(target, phase, *, residual="ladder", **more):
    return requests.make(
        target=target, model="llama-3-70b", residual=residual, phase=Phase(phase), **more
    )


def test_defaults_of_a_phase():
    serving = large("v5p:2x2x2", "decode")
    training = large("tpu7x:2x2x1", "train")
    assert (serving.loop, serving.batch, serving.context) == (Loop.UNROLLED, 16, 2048)
    assert (training.loop, training.batch, training.prompt_length) == (Loop.SCAN, 1, 1024)


def test_sublayer_flops_are_the_presets():
    flops = requests.sublayer_flops(large("v5p:2x2x2", "prefill"))
    assert flops["mlp"] == 2 * 1024 * 8192 * 28672 * 3 / 8
    assert flops["attention"] == 2 * 1024 * 8192 * (8192 + 8192 + 1024 + 1024) / 8
    assert flops["joint"] == flops["attention"] + flops["mlp"]


DAMAGE = {
    "empty": lambda content: b"",
    "garbage": lambda content: b"not gzip",
    "truncated": lambda content: content[:-20],
    "a bad block": lambda content: content[:30] + b"\xff" * 20 + content[50:],
    "nested": lambda content: gzip.compress(b"[" * 100_000),
    "a list": lambda content: gzip.compress(b"[]"),
    "of another version": lambda content: gzip.compress(b'{"jax": "1"}'),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_record_is_compiled_again(damage, tmp_path):
    path = tmp_path / "one.json.gz"
    write(str(path), RECORD)
    assert read(path, Record) == RECORD
    path.write_bytes(DAMAGE[damage](path.read_bytes()))
    assert read(path, Record) is None


RECORD = Record(
    hlo=text("tpu7x-unrolled"),
    jax="1",
    compiler="c",
    options={"a": True},
    notices=["n"],
    seconds=1.0,
    bytes_accessed=30.0,
    bytes_per_device=10 * 2**30,
    bytes_minimum=20,
    launch="explicit",
)


def test_what_a_user_reads():
    request = large("v5e:2x4", "decode")
    answer = result.Result(request, RECORD, judge.read(hlo.parse(RECORD.hlo)), bytes_accessed=30)
    text = "\n".join(part for part in answer.lines() if isinstance(part, str))
    assert (
        answer.verdict
        == "5 of 6 all-reduces hidden; the last one comes after all compute, so it is always exposed"
    )
    for said in (
        "of 16: it fits",
        "notice    n",
        "launch    explicit",
    ):
        assert said in text
    expected = dict(bytes_per_device=10 * 2**30, fits=True, launch="explicit")
    assert expected.items() <= answer.as_dict().items()


NAMES = [f"layer_{n}/attention/{op}" for n in range(4) for op in ("reduce_sum", "dot_general")]
"""Layers of 10 s, each begun by a norm; one all-reduce."""
BARS = [timeline.Bar("b", name, 5.0 * i, 5.0 * i + 5, wire=False) for i, name in enumerate(NAMES)]
BARS += [timeline.Bar("sum", "layer_1/launch", 10.0, 17.0, wire=True)]


@pytest.fixture
def played(monkeypatch):
    monkeypatch.setattr(picture, "timelines", lambda _: dict(standard=BARS, ladder=BARS))
    return large("tpu7x:2x2x1", "prefill")


def test_plot(played, tmp_path):
    picture.plot(played, file=str(tmp_path / "picture.png"))
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    assert "collective" in picture.LEGEND  # of a split stream gathers and scatters
    assert os.listdir(tmp_path) == ["picture.png"]


def test_trace(played, tmp_path):
    file = tmp_path / "trace.json"
    picture.trace(played, file=str(file))
    events = json.loads(file.read_text())["traceEvents"]
    rows = {(e["pid"], e["args"]["name"]) for e in events if e["name"] == "thread_name"}
    assert rows == {(pid, row) for pid in (0, 1) for row in ("compute", "communication")}
    assert sum(e["ph"] == "X" and e["tid"] == 1 for e in events) == 2
    assert all(e["dur"] >= 0 and e["ts"] >= 0 for e in events if e["ph"] == "X")


STANDARD = ["standard", "standard in two halves"]


@pytest.mark.parametrize(
    "residual, phase, more, names",
    [
        ("ladder", "prefill", {}, [*STANDARD, "ladder"]),
        ("ladder", "train", dict(batch=2, interleave=2), [*STANDARD, "ladder in two halves"]),
        ("standard", "prefill", dict(interleave=2), STANDARD),
        ("ladder", "decode", {}, ["standard", "ladder"]),
        # one row is not halved
        ("ladder", "prefill", dict(sequence_parallel=True), ["standard", "ladder"]),
    ],
)
def test_what_is_drawn(residual, phase, more, names):
    """Four layers each. Halves stand between Standard and the request's program, where there are
    halves.
    """
    drawn = picture.drawn(large("tpu7x:2x2x1", phase, residual=residual, **more))
    assert list(drawn) == names
    assert {(one.layers, one.loop) for one in drawn.values()} == {(4, Loop.UNROLLED)}


def test_two_layers_are_two():
    """One small operation of layer 2 runs at the end of layer 3."""
    late = timeline.Bar("late", "layer_2/mlp/add", 40.0, 41.0, wire=False)
    drawn = picture._two_layers([*BARS, late])
    assert max(bar.stop for bar in drawn) == 20
    assert len(drawn) == 5
    assert [(bar.start, bar.stop) for bar in drawn if bar.wire] == [(0, 2)]


def test_the_target_names_are_those_of_the_help(capsys):
    with pytest.raises(SystemExit):
        cli.main(["overlap", "--help"])
    said = capsys.readouterr().out
    assert all(target.name in said for target in targets.TARGETS if target.kind != "cpu")
