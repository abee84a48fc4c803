"""Stores made in parts by several commands, then joined: the store that one command makes, bit for bit."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from ladder_jax.config import DataConfig, TrainConfig
from ladder_jax.data import dataset, tokenizer
from ladder_jax.data.store import resume, sources
from ladder_jax.data.store.build import build_portion
from ladder_jax.data.store.portion import Portion
from ladder_jax.errors import UserError
from tests import tokenizers
from tests.test_tokens import TEXTS, lines, make, texts_in


def make_part(text, given, out, *, field="text", tokens="bytes", shard_tokens=2000, workers=1):
    plan = sources.plan([str(one) for one in given], part_bytes=500)
    more = dict(source=str(tokens), field=field, shard_tokens=shard_tokens, workers=workers)
    return build_portion(Portion.parse(text), plan, out=out, tokenizer=tokenizer.load(tokens), **more)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.fixture(scope="module")
def book(tmp_path_factory):
    """Lines of JSON, and the store that one command makes of them."""
    folder = tmp_path_factory.mktemp("book")
    (folder / "book.jsonl").write_text(lines(TEXTS))
    make([folder / "book.jsonl"], folder / "store")
    return folder / "book.jsonl", folder / "store"


@pytest.fixture(scope="module")
def halves(book, tmp_path_factory):
    """Both parts of the book, not joined."""
    out = tmp_path_factory.mktemp("halves") / "out"
    for text in ("2/2", "1/2"):
        make_part(text, [book[0]], out)
    return out


@pytest.mark.parametrize("count", [1, 3])
def test_joined_parts_are_the_store_of_one_command(book, tmp_path, count):
    """In any order."""
    file, whole = book
    for index in reversed(range(1, count + 1)):
        assert make_part(f"{index}/{count}", [file], tmp_path / "out").documents
    assert make([file], tmp_path / "out").documents == len(TEXTS)
    assert contents(tmp_path / "out") == contents(whole) and texts_in(tmp_path / "out") == TEXTS
    assert not [path for path in (tmp_path / "out").iterdir() if path.is_dir()]


def test_more_parts_than_there_is_to_share(tmp_path):
    (tmp_path / "book.jsonl").write_text(lines(TEXTS[:3]))
    made = [make_part(f"{index}/4", [tmp_path / "book.jsonl"], tmp_path / "out").documents for index in range(1, 5)]
    assert made == [3, 0, 0, 0]
    make([tmp_path / "book.jsonl"], tmp_path / "out")
    assert texts_in(tmp_path / "out") == TEXTS[:3]


def test_the_commands(run_cli, tmp_path):
    (tmp_path / "book.jsonl").write_text(lines(TEXTS))
    ask = ["tokenize", "book.jsonl", "--out", "out", "--workers", "1"]
    run = lambda *more, status=0: run_cli(*ask, *more, cwd=tmp_path, check_status=status)
    for wrong in ("0/2", "3/2", "1", "a/b", "1/0"):
        assert "--part" in run("--part", wrong, status=2).stderr and not (tmp_path / "out").exists()
    assert "without --part" in run("--part", "1/2", "--verify", status=2).stderr
    assert "data sets of the Hub" in run("--split", "test", status=2).stderr
    assert run("--part", "1/2").stdout == f"out/part-1-of-2: 120 documents, {sum(map(size, TEXTS)):,} tokens of bytes\n"
    missing = run(status=2)
    assert missing.stderr == "ladder-jax: part 2/2 of 'out' is missing: run the command with --part 2/2\n"
    assert "0 documents, 0 tokens" in run("--part", "2/2").stdout
    done = run("--verify")
    assert done.stdout == f"out: 120 documents, {sum(map(size, TEXTS)):,} tokens of bytes\n"
    again = run("--part", "1/2", status=2)
    assert (
        "the store there is finished, or its parts are being joined" in again.stderr and again.stderr.count("\n") == 1
    )


def size(text):
    return len(text.encode())


def test_a_copy_from_elsewhere_is_joined(book, halves, tmp_path):
    """Each part on a machine of its own; one has them all in the end."""
    for name in ("part-1-of-2", "part-2-of-2"):
        shutil.copytree(halves / name, tmp_path / "out" / name)
    make([book[0]], tmp_path / "out")
    assert contents(tmp_path / "out") == contents(book[1])


MISTAKES = {
    "missing": (lambda out: shutil.rmtree(out / "part-1-of-2"), {}, "part 1/2 of .*out' is missing: run .* --part 1/2"),
    "not finished": (lambda out: (out / "part-2-of-2" / "part.json").unlink(), {}, "part 2/2 of .* is not finished"),
    "of another number": (
        lambda out: (out / "part-1-of-2").rename(out / "part-1-of-3"), {}, "holds parts of 2 and parts of 3"),
    "another field": (None, {"field": "n"}, "part-1-of-2' was begun with field 'text', not 'n'"),
    "another tokenizer": (None, {"tokens": ...}, "part-1-of-2' was begun with tokenizer 'bytes', not 'tokenizer-"),
    "damaged": (
        lambda out: (out / "part-2-of-2" / "part.json").write_text("{"), {}, "part.json' is damaged, or not a token"),
    "something of the user's": (
        lambda out: (out / "notes.txt").write_text("mine"), {}, "something else is there; name a new folder"),
    "at work": (None, {}, "another `ladder-jax tokenize` is at work in .*part-2-of-2"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_parts_that_cannot_be_joined(book, halves, tmp_path, name):
    """One line each; nothing is lost, and once it is mended the parts are joined."""
    mistake, more, message = MISTAKES[name]
    out = tmp_path / "out"
    shutil.copytree(halves, out)
    if mistake:
        mistake(out)
    more = {key: tokenizers.folder(tmp_path / "t") if value is ... else value for key, value in more.items()}
    before = {str(path): path.stat().st_mtime_ns for path in out.rglob("*") if path.name[-5:] not in (".lock", ".json")}
    with pytest.raises(UserError, match=message) as caught:
        if name == "at work":
            with resume.locked(out / "part-2-of-2"):
                make([book[0]], out)
        else:
            make([book[0]], out, **more)
    assert "\n" not in str(caught.value)
    assert {path: os.stat(path).st_mtime_ns for path in before if path != str(out)} == {
        path: time for path, time in before.items() if path != str(out)
    }
    if name in ("another field", "another tokenizer", "at work"):
        make([book[0]], out)
        assert contents(out) == contents(book[1])


def test_sources_that_have_changed(book, tmp_path):
    """A part of what the sources were before is named; made again it is joined."""
    file = tmp_path / "book.jsonl"
    file.write_text(lines(TEXTS[:60]))
    for text in ("1/2", "2/2"):
        make_part(text, [file], tmp_path / "out")
    file.write_text(lines(TEXTS))
    make_part("1/2", [file], tmp_path / "out")
    with pytest.raises(UserError, match="part 2/2 of .* is of other sources, or they have changed: run .* --part 2/2"):
        make([file], tmp_path / "out")
    make_part("2/2", [file], tmp_path / "out")
    make([file], tmp_path / "out")
    assert texts_in(tmp_path / "out") == TEXTS


def test_a_part_made_twice(book, tmp_path):
    """Nothing is done again; at the same time is refused, and so is a part of a store that is not made in parts."""
    make_part("1/2", [book[0]], tmp_path / "out")
    folder = tmp_path / "out" / "part-1-of-2"
    before = {path.name: path.stat().st_mtime_ns for path in folder.glob("*.tokens")}
    assert before
    make_part("1/2", [book[0]], tmp_path / "out")
    assert {path.name: path.stat().st_mtime_ns for path in folder.glob("*.tokens")} == before
    with resume.locked(folder), pytest.raises(UserError, match="is at work in .*part-1-of-2"):
        make_part("1/2", [book[0]], tmp_path / "out")
    shutil.copytree(book[1], tmp_path / "whole")
    with pytest.raises(UserError, match="leave --part out, or name another --out"):
        make_part("1/2", [book[0]], tmp_path / "whole")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "a.txt").write_text("mine")
    with pytest.raises(UserError, match="something else is there"):
        make_part("1/2", [book[0]], tmp_path / "mine")
    assert os.listdir(tmp_path / "mine") == ["a.txt"]


def test_training_refuses_what_is_not_joined(halves):
    recipe = TrainConfig(batch=1, sequence=8, steps=1)
    for path, message in (
        (halves, "is in parts: `ladder-jax tokenize` without --part"),
        (halves / "part-1-of-2", "not"),
    ):
        with pytest.raises(UserError, match=message):
            dataset.load(DataConfig(path=str(path)), train=recipe, vocab_size=256)


def test_a_damaged_part_is_made_again(book, halves, tmp_path):
    """A power failure after a part was finished."""
    shutil.copytree(halves, tmp_path / "out")
    os.truncate(next((tmp_path / "out" / "part-2-of-2").glob("*.tokens")), 0)
    make([book[0]], tmp_path / "out")
    assert contents(tmp_path / "out") == contents(book[1]) and texts_in(tmp_path / "out") == TEXTS


KILLED = """
import sys, pathlib
from ladder_jax.data import tokenizer
from ladder_jax.data.store import build, sources
from ladder_jax.data.store.portion import Portion
if __name__ == "__main__":
    source, out, part = sys.argv[1:]
    plan = sources.plan([source], part_bytes=2000)
    more = dict(tokenizer=tokenizer.load("bytes"), source="bytes", field="text", shard_tokens=3000, workers=1)
    more |= dict(out=pathlib.Path(out))
    build.build_portion(Portion.parse(part), plan, **more) if part else build.build(plan, **more)
"""


def test_parts_and_joins_that_are_killed(tmp_path):
    """SIGKILL in a part, and while parts are joined: the same commands go on, to the same store."""
    texts = [f"{'la ' * (index % 50)}{index}" for index in range(8000)]
    (tmp_path / "book.jsonl").write_text(lines(texts))
    (tmp_path / "build.py").write_text(KILLED)
    out, kills = tmp_path / "out", {}

    def until_done(part, *, steps):
        """Kill it after each step, and start it again."""
        while True:
            command = [sys.executable, tmp_path / "build.py", tmp_path / "book.jsonl", out, part]
            process = subprocess.Popen(command, stderr=subprocess.PIPE, start_new_session=True)
            seen = steps()
            while process.poll() is None and (kills.get(part, 0) >= 2 or steps() < seen + 3):
                time.sleep(0.001)
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            _, error = process.communicate(timeout=60)
            if process.returncode == 0:
                return
            assert process.returncode == -signal.SIGKILL, error
            kills[part] = kills.get(part, 0) + 1

    until_done("1/2", steps=lambda: len(list(out.glob("part-1-of-2/*.json"))))
    until_done("2/2", steps=lambda: len(list(out.glob("part-2-of-2/*.json"))))
    journal = out / "unfinished.json"
    until_done("", steps=lambda: len(json.loads(journal.read_text())["shards"]) if journal.exists() else 0)
    assert all(kills.values()) and len(kills) == 3
    make([tmp_path / "book.jsonl"], tmp_path / "whole", part_bytes=2000, shard_tokens=3000, workers=1)
    assert contents(out) == contents(tmp_path / "whole") and texts_in(out) == texts
    assert not [path for path in out.iterdir() if path.is_dir()]
