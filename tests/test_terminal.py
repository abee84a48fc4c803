"""Answers fit the terminal: no table is wider, the first line fits 80 columns, and a command is
left to be copied.
"""

import os
import re
import sys

import pytest

from ladder_jax import terminal
from ladder_jax.checkpoint import command
from ladder_jax.terminal import Table

TABLE = Table(
    ("name", "tokens a second", "range"),
    [("parallel-shared-norm", "1,234", "1,000 - 2,000")],
    left=("name",),
)


@pytest.mark.parametrize("width", range(24, 60))
def test_a_table_is_no_wider(width):
    """And loses nothing: each column, read from top to bottom, is its cells' words in order."""
    lines = TABLE.lines(width)
    assert max(map(len, lines)) <= width
    rule = next(number for number, line in enumerate(lines) if line.startswith("─"))
    head = " ".join(lines[:rule]).split()
    body = " ".join(lines[rule + 1 :]).split()
    assert sorted(head) == sorted("name tokens a second range".split())
    assert sorted("".join(body)) == sorted("parallel-shared-norm1,2341,000-2,000")


def test_heads_are_wrapped_before_cells():
    assert TABLE.lines(46) == [
        "name                   tokens a          range",
        "                         second",
        "─" * 46,
        "parallel-shared-norm      1,234  1,000 - 2,000",
    ]
    assert TABLE.lines(120)[0] == "name                  tokens a second          range"
    assert TABLE.lines(24)[3:] == [
        "─" * 24,
        "parallel-  1,234 1,000 -",
        "shared-            2,000",
        "norm",
    ]


def test_lines_are_wrapped_on_a_terminal_alone(monkeypatch, capsys):
    command = "ladder-jax train tiny " + "train.steps=1 " * 9
    long = "note      " + "word " * 30
    monkeypatch.setenv("COLUMNS", "80")
    terminal.show([long, command])
    *wrapped, last = capsys.readouterr().out.splitlines()
    assert last == command
    assert len(wrapped) == 3
    assert all(len(line) <= 80 for line in wrapped)
    assert wrapped[1].startswith("          word")
    assert " ".join(wrapped).split() == long.split()
    monkeypatch.delenv("COLUMNS")
    terminal.show([long])
    assert capsys.readouterr().out == long + "\n"


@pytest.mark.parametrize("opened", [os.pipe, os.openpty])
def test_a_notice_that_nobody_reads_ends_nothing(opened, monkeypatch):
    """A run of days writes to a pipe, or to a terminal, which may be gone before it ends."""
    reader, writer = opened()
    with open(writer, "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        with terminal.progress(2) as update:
            os.close(reader)
            update(1, "")
            update(2, "")
        terminal.say("done")


PREDICT = "predict --model llama-3.1-405b --hardware h100-nvlink --batch 16"
ANSWERS = {
    "predict": PREDICT,
    "predict, standard": "predict --model llama-3-8b --hardware h100-nvlink --tensor 1",
    "predict, a pass": "predict --model llama-3-70b --hardware v5p --tensor 8 --phase train --batch 8",
    "predict, slow link": "predict --model llama-3-70b --hardware h100-no-nvlink --tensor 8 --batch 16",
    "plan": "plan --model llama-3-70b --target v5p:16x16x16 --tokens 4194304 --confirm 0",
    "plan, slow": "plan --model llama-3-8b --target v5p:2x2x1 --tokens 16777216 --sequence 131072 --confirm 0",
    "plan, nothing": "plan --model llama-3.1-405b --target v5e:2x2 --tokens 4096 --confirm 0",
}


def fits(out):
    lines = out.splitlines()
    too_long = [
        line for line in lines if len(line) > 80 and not line.startswith("ladder-jax train ")
    ]
    assert lines and not too_long, too_long
    assert not re.search(r"\de[+-]\d", out)  # such as 1.23e+03


@pytest.mark.parametrize("words", ANSWERS.values(), ids=ANSWERS)
def test_commands_at_80_columns(words, monkeypatch, prints):
    monkeypatch.setenv("COLUMNS", "80")
    fits(prints(*words.split()))
    monkeypatch.delenv("COLUMNS")
    first = prints(*words.split()).splitlines()[0]
    assert len(first) <= 80
    assert first.startswith(("take ", "no: take ", "nothing fits"))


def test_checkpoints(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    command._show(
        [
            command.Row(
                step=1_000_000,
                path="/runs/x",
                bytes=2**40,
                time=1.6e9,
                validation_loss=1234.5678,
                state="no manifest",
                problems=("params/manifest.json is missing " * 4,),
            )
        ],
        [1, 2],
    )
    fits(capsys.readouterr().out)
