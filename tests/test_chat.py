"""A model of another tokenizer's tokens: trained, asked, and talked to in a terminal."""

import io
import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time

import pytest

from ladder_jax import config
from ladder_jax.checkpoint import open_checkpoint
from ladder_jax.cli import chat
from ladder_jax.cli.chat import Conversation
from ladder_jax.decode import Engine, Finish
from ladder_jax.nn import define
from ladder_jax.parallel import make_mesh
from tests import runs, tokenizers
from tests.refusals import refused

SETTINGS = "model.vocab_size=301 train.steps=2 train.sequence=16 train.warmup_steps=1".split()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run's folder, whose tokenizer was taken away after the training."""
    folder = tmp_path_factory.mktemp("chat")
    given = tokenizers.folder(folder / "given")
    (folder / "book.txt").write_text("".join(tokenizers.SENTENCES) * 100)
    result = runs.run(folder / "book.txt", folder / "run", *SETTINGS, f"data.tokenizer={given}")
    assert result.bigram_entropy is None
    assert result.validation_loss > 0
    os.rename(given, folder / "away")
    return folder / "run"


def test_a_run_keeps_its_tokenizer(run):
    saved = open_checkpoint(run)
    assert saved.config.data.tokenizer != "bytes"
    assert saved.tokenizer().vocab_size == 301
    assert sorted(p.name for p in (run / "tokenizer").iterdir()) == [
        "chat_template.jinja", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def engine(run):
    saved = open_checkpoint(run)
    definition = define(saved.config.model, mesh=make_mesh())
    decoder = saved.tokenizer().to_bytes
    with Engine(
        definition, saved.params(definition), slots=1, capacity=64, chunk=1, decoder=decoder
    ) as engine:
        yield engine


def talk(engine, run, *, new_tokens=8, temperature=0.0):
    said = []
    shown = []
    settings = config.DecodeConfig(max_new_tokens=new_tokens, temperature=temperature)
    tokenizer = open_checkpoint(run).tokenizer()
    return Conversation(
        engine, tokenizer, settings, dict(stop_ids=tokenizer.stop_ids), said.append, shown.append
    ), (said, shown)


def test_a_history_that_outgrows_its_context(engine, run):
    conversation, (said, shown) = talk(engine, run)
    for turn in range(8):
        shown.clear()
        conversation.ask(f"the cat {turn}")
        assert "".join(shown) == conversation.messages[-1]["content"]
        assert conversation.messages[-2] == {"role": "user", "content": f"the cat {turn}"}
    assert "(forgot the oldest 2 messages: --context 64 is full)" in said
    assert [m["role"] for m in conversation.messages] == ["user", "assistant"] * (
        len(conversation.messages) // 2
    )
    before = conversation.messages
    with refused("makes a prompt of .* does not fit into --context 64"):
        conversation.ask("the rat " * 60)
    assert conversation.messages == before


def test_an_answer_that_is_stopped_stays_said(engine, run):
    conversation, (said, shown) = talk(engine, run, new_tokens=40)
    result = conversation.ask("the cat", stopped=lambda: True)
    assert conversation.messages[-1]["content"] == "".join(shown)
    assert result.finish is Finish.CANCELLED
    assert len(result.tokens) < 40
    assert not said
    conversation.ask("the rat")  # the engine goes on
    assert conversation.messages[-2:][0] == {"role": "user", "content": "the rat"}


@pytest.fixture
def given(monkeypatch):
    """Puts that on standard input."""
    return lambda content: monkeypatch.setattr(
        sys, "stdin", content and io.TextIOWrapper(io.BytesIO(content))
    )


def test_one_answer_to_standard_input(run, given, prints):
    given(b"the cat\n")
    assert prints("generate", run, "--chat", "--max-new-tokens", 6).endswith("\n")


@pytest.mark.parametrize(
    "content, message",
    [
        (b" \n", "--chat needs a message on standard input, or a terminal"),
        (None, "--chat needs a message on standard input, or a terminal"),
        (b"\xff", "standard input is not UTF-8 text"),
    ],
)
def test_standard_input_that_is_no_message(given, content, message):
    given(content)
    with refused(message):
        chat.piped()


def test_without_a_template(run, tmp_path, mistake):
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "run/tokenizer/chat_template.jinja").unlink()
    assert "has no chat template" in mistake("generate", "run", "--chat")


class Terminal:
    """A process on a pseudo-terminal: `type` keys, and `wait` for what appears."""

    def __init__(self, command):
        self.ours, theirs = pty.openpty()
        self.seen = ""
        # Its own session, so that Ctrl-C is the terminal's signal to it, as a user's is.
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                "import os, sys; os.setsid(); import fcntl, termios;"
                " fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])",
                *command,
            ],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
        )
        os.close(theirs)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        os.close(self.ours)

    def type(self, keys):
        self.seen = ""
        os.write(self.ours, keys.encode())

    def wait(self, pattern, seconds=90):
        deadline = time.time() + seconds
        while not re.search(pattern, self.seen):
            assert time.time() < deadline, self.seen
            if select.select([self.ours], [], [], 0.2)[0]:
                try:
                    self.seen += os.read(self.ours, 4096).decode(errors="replace")
                except OSError:  # Linux's end of a terminal
                    assert re.search(pattern, self.seen), self.seen
                    return


def test_a_conversation_in_a_terminal(run):
    command = [sys.executable, "-m", "ladder_jax", "generate", str(run), "--chat"]
    with Terminal([*command, "--max-new-tokens", "6000", "--context", "6100"]) as terminal:
        terminal.wait("Ctrl-C stops an answer\r\n(.*)> ")
        for _ in range(3):
            terminal.type("the cat\r")
            terminal.wait("the cat\r\n.+")  # the answer has begun
            terminal.type("\x03")
            terminal.wait(r"\(stopped\)\r\n(.|\n)*> ")
        terminal.type("half a line")
        terminal.wait("half a line")
        # Python hears of a signal that comes just before it waits for a key at the next key only
        time.sleep(0.5)
        terminal.type("\x03")
        terminal.wait("> $")
        terminal.type("/exti\r")
        terminal.wait("unknown command /exti: /reset begins anew(.|\n)*> ")
        terminal.type("/reset\r")
        terminal.wait("/reset\r\n(.|\n)*> ")
        terminal.type("\x04")
        assert terminal.process.wait(timeout=60) == 0
        assert "Traceback" not in terminal.seen
