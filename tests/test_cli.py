"""The command line as a user meets it: processes, exit statuses, one line for a mistake."""

import contextlib
import enum
import io
import json
import os
import shlex
import signal
import subprocess
import sys
import types

import jax
import pytest

from ladder_jax import cli, terminal
from ladder_jax.cli import chat, generate, verbs
from ladder_jax.cli.main import parse
from ladder_jax.config import load
from ladder_jax.errors import one_line
from ladder_jax.schedule import targets
from tests import runs


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """In this process; test_smoke trains in one of its own. Test_loop compiles the same programs."""
    folder = tmp_path_factory.mktemp("cli")
    out = io.StringIO()
    err = io.StringIO()
    (folder / "book.txt").write_text("the cat sat on the mat, and the rat sat on the cat.\n" * 400)
    words = [
        "train",
        "tiny",
        *runs.words("book.txt", "out", *runs.NINE_STEPS),
        "train.interleave=auto",
    ]
    with contextlib.chdir(folder), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        assert cli.main(words) == 0, err.getvalue()
    out, err = out.getvalue(), err.getvalue()
    assert "held-out loss" in out
    assert "bigram entropy" in out
    assert "train.interleave=auto: 1, as nothing is predicted for cpu" in err.splitlines()
    assert "step 9/9" in err
    assert "on 2 of 8 devices (cpu)" in err
    assert "data: 1 of 1 files of book.txt, 20,800 bytes of text\n" in err
    assert "notice" not in err
    return folder / "out"


def test_generate(prints, trained):
    ask = ["generate", trained, "--prompt", "the cat", "--max-new-tokens", "20"]
    greedy = prints(*ask)
    assert greedy.startswith("the cat")
    assert len(greedy) > len("the cat") + 5
    assert prints(*ask, "--tensor", "1") == greedy
    assert prints("generate", trained / "checkpoints/4", *ask[2:]).startswith("the cat")


def test_generate_in_a_process(run_cli, trained, tmp_path, monkeypatch):
    """Which keeps its programs, and whose terminal has no accents."""
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    environment = {"LADDER_JAX_CACHE": str(tmp_path), "PYTHONIOENCODING": "ascii"}
    ask = ["--prompt", "é", "--max-new-tokens", "2", "--tensor", "1"]
    assert run_cli("generate", trained, *ask, check_status=0, **environment).stdout.startswith("?")
    assert any((tmp_path / "programs").iterdir())


def test_generate_several_prompts(prints, trained):
    """Each text is that of its prompt alone, with the seed and its number."""
    ask = ["generate", trained, "--tensor", "1"]
    more = ["--max-new-tokens", "20", "--temperature", "1", "--top-k", "9", "--seed", "3"]
    one = prints(*ask, "--prompt", "the cat", *more)
    two = prints(*ask, "--prompt", "rat", *more[:-1], "4")
    assert prints(*ask, "--prompt", "the cat", "--prompt", "rat", *more) == f"{one}\n{two}"
    stop = one.strip("\n")[len("the cat") + 5 :][:3]
    ended = prints(*ask, "--prompt", "the cat", *more, "--stop", stop)
    assert ended == one[: one.index(stop, len("the cat"))] + "\n"


# As in the README, overrides may stand around an option; the mistake shows that the last of them
# was read.
MISTAKES = {
    "train tiny mesh.data=2 --cpu-devices 8 mesh.tensor=4 data.path=nowhere": "data.path='nowhere' does not exist",
    "trian tiny": "unknown verb 'trian'; did you mean 'train'?",
    "train tinny": "did you mean 'tiny'?",
    "train nowhere.yaml": "cannot read configuration 'nowhere.yaml'",
    "train tiny mesh.tensor=8 mesh.data=2": "needs 16 devices, but this machine has 8",
    "train tiny --cpu-devices 0": "--cpu-devices must be positive",
    "train tiny model.vocab_size=100": "too small for bytes",
    "train tiny train.keep_best=1 train.evaluate_every=0": "train.evaluate_every=0 must divide train.checkpoint_every",
    "train tiny train.on_bad_step=skp": "did you mean 'skip'?",
    "train tiny --profile 5:2": "--profile 5:2: not FIRST:LAST",
    f"train tiny --profile {'9' * 5000}": "--profile 9999",
    "train tiny --profile 999": "step 999 is past train.steps=300",
    "train tiny run.wandb=project": "pip install 'ladder-jax[wandb]'",
    "train tiny train.collective_matmul=compiler train.sequence_parallel=true": "'compiler' (allowed: none, ring)",
    "checkpoints nowhere": "there is no checkpoint below",
    "train": "required: CONFIG",
    "generate nowhere --prompt x": "there is no model at",
    "generate nowhere --promt x": "unknown option '--promt'; did you mean '--prompt'?",
    "generate nowhere --prompt x --max-new-tokens many": "invalid int value: 'many'",
    "generate nowhere": "--prompt TEXT (once or more often), --prompts FILE or --chat, one of these",
    "generate nowhere --prompts x.jsonl": "--prompts FILE and --out FILE go together",
    "generate nowhere --prompts /dev/null --out x.jsonl": "--prompts /dev/null: this is a device or a pipe; name a",
    "generate nowhere --prompt x --prompt y --stream": "--stream is for one --prompt",
    "generate nowhere --prompt x --context 9": "--context is for --chat",
    "train tiny data.tokenizer=nowhere": "there is no tokenizer at 'nowhere' (allowed: 'bytes', or a folder",
    "generate nowhere --prompt x --slots 0": "--slots must be positive, not 0",
    "plan --model tiny-moe --target cpu:8 --tokens 64 --capacity inf": "--capacity must be positive, not inf",
    "doctor --jsn": "did you mean '--json'?",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_mistakes(words, mistake, monkeypatch):
    """In this process, as a new one needs seconds to import jax; one of them runs in a process of
    its own below.
    """
    monkeypatch.setattr(os, "environ", os.environ.copy())
    assert MISTAKES[words] in mistake(*words.split())


LONG = "x" * 300


@pytest.mark.parametrize(
    "words",
    [
        ["generate", LONG, "--prompt", "x"],
        ["predict", "--model", f"{LONG}/y", "--hardware", "h100-nvlink"],
        ["tokenize", LONG, "--out", "store"],
        ["train", "tiny", f"train.start={LONG}"],
    ],
    ids=lambda words: words[0],
)
def test_a_name_that_no_file_can_have(words, mistake, monkeypatch):
    """Nor is a folder of somebody else's, to whom Python's pathlib raises likewise, a traceback."""
    monkeypatch.setattr(os, "environ", os.environ.copy())
    assert f"{LONG}: File name too long" in mistake(*words).replace("/y", "")


def test_a_current_folder_that_was_removed(mistake, tmp_path):
    tmp_path.rmdir()
    assert "the current folder was removed" in mistake("checkpoints", "run")


def test_a_mistake_of_a_process(run_cli, tmp_path):
    done = run_cli("trian", "tiny", cwd=tmp_path, check_status=2)
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"ladder-jax: {MISTAKES['trian tiny']}")
    assert done.stdout == ""
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "name, value",
    {
        "JAX_PLATFORMS": "gpux",
        "JAX_NUM_CPU_DEVICES": "four",
        "JAX_ENABLE_X64": "x",
    }.items(),
)
def test_a_variable_of_jax_that_is_wrong(run_cli, tmp_path, name, value):
    done = run_cli("train", "tiny", cwd=tmp_path, check_status=2, **{name: value})
    (line,) = done.stderr.splitlines()
    assert line.startswith("ladder-jax: the environment's JAX_ variables: ")
    assert value in line
    assert os.listdir(tmp_path) == []


def test_more_than_the_memory_holds(mistake, trained):
    line = mistake("generate", trained, "--prompt", "x", "--max-new-tokens", 2_000_000_000)
    assert "a cache of 1 x 2,000,000,001 tokens needs " in line


WORDS = "-m ladder_jax predict --model tiny --hardware h100-nvlink"
PREDICT = [sys.executable, *WORDS.split()]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux has it")
def test_standard_output_on_a_full_disk():
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            PREDICT,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=300,
        )
    assert (done.returncode, done.stderr) == (1, "ladder-jax: No space left on device\n")


def test_standard_output_that_is_closed():
    command = shlex.join(PREDICT)
    done = subprocess.run(f"{command} >&-", shell=True, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_reader_that_leaves(tmp_path):
    """As `| head` does; rich would end with status 1."""
    picture = tmp_path / "speed.png"
    command = [*PREDICT, "--plot", str(picture)]
    pipes = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
    line_by_line = {**os.environ, "PYTHONUNBUFFERED": "1"}  # as images for containers set it
    with subprocess.Popen(command, **pipes, env=line_by_line) as process:
        process.stdout.close()
        # but for matplotlib's own, such as that it makes its cache of fonts
        assert b"rror" not in process.stderr.read()
        assert process.wait(300) == 0
    assert picture.exists()  # whatever became of standard output


def test_interrupted_again_while_it_ends(run_python):
    """Until then Python's own handler stays, and a notebook that runs a verb goes on."""
    code = """if True:
        import atexit, importlib, signal
        cli = importlib.import_module("ladder_jax.cli.main")
        cli.parse = lambda argv: signal.raise_signal(signal.SIGINT)
        atexit.register(signal.raise_signal, signal.SIGINT)
        cli.main([])
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    """
    done = run_python("-c", code)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "ladder-jax: interrupted\n")


def test_doctor(prints):
    report = json.loads(prints("doctor", "--json"))
    assert report["jax"] == jax.__version__
    assert report["devices"] == ["cpu"] * 8
    assert set(report["targets"]) == {target.name for target in targets.TARGETS}
    assert report["targets"]["cpu:8"] == "ok"


def test_doctor_of_a_machine_without_the_platform_that_is_asked_for(prints, monkeypatch):
    def devices():
        raise RuntimeError("Unable to initialize backend 'cuda'")

    monkeypatch.setattr(jax, "devices", devices)
    assert "devices   0: none" in prints("doctor")


def test_control_characters_reach_no_terminal(capsys, monkeypatch, tmp_path):
    """Of names that others have given."""
    name = "a \x1b]0;owned\x07\x1b[2J\u202e\x9b é 東京"
    (tmp_path / f"{name}.jsonl").write_text("no")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["tokenize", f"{name}.jsonl", "--out", "out"]) == 2
    line = capsys.readouterr().err.removesuffix("\n")
    assert line.isprintable()
    assert all(word in line for word in ("é 東京", "x1b", "u202e"))


def test_a_help_names_every_word_of_an_option():
    for usage, given in [pair for verb in verbs.VERBS.values() for pair in verb.arguments.items()]:
        kind = given.get("type") if isinstance(given, dict) else None
        if isinstance(kind, enum.EnumMeta):
            assert all(str(one.value) in given["help"] for one in kind), usage


def test_the_examples_of_helps_can_be_typed_in_turn():
    """What the first one trains is what the others read."""
    _, *words = verbs.VERBS["train"].example.split()
    asked = parse(words)
    run = load(asked.config, overrides=asked.overrides).run
    for name in ("checkpoints", "generate", "evaluate", "serve"):
        assert f" {run.dir or f'runs/{run.name}'} " in verbs.VERBS[name].example


def test_a_message_is_one_line():
    """Also of a tensor whose name has two, or is as long as a book."""
    assert one_line("holds a\nladder-jax: all is well") == "holds a\\nladder-jax: all is well"
    assert len(one_line("a" * 10**6)) < 2100


def test_control_characters_of_a_model_reach_no_terminal(monkeypatch, capsys):
    """Other readers of standard output get the model's text as it is."""
    text = "a\tb\n\x1b]0;owned\x07\r\x9b2J\x7f \N{MAN}\u200d\N{WOMAN}"
    answer = types.SimpleNamespace(text=text, finish=None)
    handle = types.SimpleNamespace(result=lambda: answer)
    asked = types.SimpleNamespace(
        requests=lambda: [None],
        args=types.SimpleNamespace(prompt=[""]),
        engine_for=lambda *_, **__: types.SimpleNamespace(submit=lambda _: handle),
    )
    conversation = types.SimpleNamespace(ask=lambda _, *, stopped: generate.write(text) or answer)

    def show():
        generate._several(asked)
        chat.answer(conversation, "hello")

    show()
    assert capsys.readouterr().out == 2 * f"{text}\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    show()
    shown = "a\tb\n\\x1b]0;owned\\x07\\r\\x9b2J\\x7f \N{MAN}\u200d\N{WOMAN}"
    assert capsys.readouterr().out == 2 * f"{shown}\n"
    terminal.show(["\x1b[2J"])
    terminal.say("two\nlines \x1b[2J")
    assert capsys.readouterr() == ("\\x1b[2J\n", "two\nlines \\x1b[2J\n")


def test_generate_decides_about_halves(mistake, trained, capsys):
    words = ["generate", str(trained), "--prompt", "the", "--max-new-tokens", "2", "--interleave"]
    assert cli.main([*words, "auto"]) == 0
    decided = capsys.readouterr()
    assert "decode.interleave=auto: 1, as " in decided.err
    assert cli.main([*words, "2"]) == 0
    halves = capsys.readouterr()
    assert halves.out == decided.out
    assert "interleave" not in halves.err
    assert "unknown --interleave '3' (allowed: 1, 2, auto)" in mistake(*words, "3")
