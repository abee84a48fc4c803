"""Token stores: made in parallel, in parts, killed, resumed; what is wrong is named, what is
damaged is refused.
"""

import contextlib
import gzip
import hashlib
import itertools
import json
import math
import multiprocessing
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from concurrent import futures
from unittest import mock

import numpy as np
import pytest

from ladder_jax.data import tokenizer
from ladder_jax.data.store import Store, build as building, sources
from tests import cases, tokenizers
from tests.refusals import refused

TEXTS = [f"{'the cat sat on the mat ' * (index % 7)}number {index} é\n" for index in range(120)]


def lines(texts):
    rows = ({"text": text, "n": index} for index, text in enumerate(texts))
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def make(given, out, *, most=500, workers=0, tokens="bytes", field="text", **more):
    """In this process, unless workers are asked for: each costs half a second."""
    plan = sources.plan([str(one) for one in given], most=most)
    about = dict(tokenizer=tokenizer.load(tokens), source=str(tokens), field=field, workers=workers)
    here = mock.patch.object(futures, "ProcessPoolExecutor", one_thread)
    with contextlib.nullcontext() if workers else here:
        return building.build(plan, out=out, **about, **more)


def one_thread(*_, **__):
    return futures.ThreadPoolExecutor(1)


def documents(out):
    store = Store(out)
    store.verify()
    return [
        store.read(start, stop - start) for start, stop in itertools.pairwise(store.starts.tolist())
    ]


def contents(out):
    return {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}


def texts_in(out):
    return [bytes(document).decode() for document in documents(out)]


@pytest.fixture(scope="module")
def book(tmp_path_factory):
    """Lines of JSON, and a store of them in several shards."""
    folder = tmp_path_factory.mktemp("book")
    (folder / "book.jsonl").write_text(lines(TEXTS))
    made = make([folder / "book.jsonl"], folder / "store", workers=2)
    return folder / "book.jsonl", folder / "store", made


def test_documents_come_in_order_whoever_made_them(book, tmp_path):
    file, out, made = book
    assert texts_in(out) == TEXTS
    assert len(made.shards) > 3
    assert made.dtype == "<u1"
    assert (made.documents, made.tokens) == (len(TEXTS), sum(len(text.encode()) for text in TEXTS))
    assert make([file], tmp_path / "alone") == made
    assert contents(tmp_path / "alone") == contents(out)
    assert {name.split(".")[-1] for name in contents(out)} == {"lock", "tokens", "offsets", "json"}
    assert [name for name in contents(out) if name.endswith(".json")] == ["manifest.json"]
    (whole,) = make([file], tmp_path / "whole", most=10**9).shards
    assert whole.tokens == made.tokens
    assert texts_in(tmp_path / "whole") == TEXTS


def test_every_kind_of_source(tmp_path):
    import pyarrow
    from pyarrow import parquet

    folder = tmp_path / "all"
    (folder / "d").mkdir(parents=True)
    (folder / "a.txt").write_text("one")
    (folder / "b.png").write_bytes(b"\x89PNG\xff")
    # no newline at the end
    (folder / "c.jsonl").write_text('{"text": "two"}\n\n{"text": ""}\n{"text": "thr\\u00e9e"}')
    with gzip.open(folder / "d/e.jsonl.gz", "wt") as file:
        file.write(lines(["four", "five"]))
    rows = [f"row {index}" for index in range(50)]
    table = {"text": pyarrow.array(rows, pyarrow.string_view()), "n": range(50)}
    parquet.write_table(pyarrow.table(table), folder / "f.parquet", row_group_size=7)
    (folder / "g.md").write_text("")
    (folder / "h.md").write_text("last")
    (folder / "._c.jsonl").write_bytes(b"\0\5\x16\7")  # macOS's, beside c.jsonl
    (folder / ".cache").mkdir()
    (folder / ".cache/i.metadata").write_text("hidden")
    made = make([folder], tmp_path / "out")
    assert texts_in(tmp_path / "out") == ["one", "two", "thrée", "four", "five", *rows, "last"]
    assert sum(shard.empty for shard in made.shards) == 2
    assert sum(shard.skipped for shard in made.shards) == 1


def test_tables_without_datasets(tmp_path, monkeypatch):
    """Text and JSON lines do not need it."""
    monkeypatch.setitem(sys.modules, "datasets", None)
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "b.jsonl").write_text(lines(["two"]))
    assert len(sources.plan([str(tmp_path)])) == 2
    for name in ("f.parquet", "f.csv", "f.tar"):
        (tmp_path / name).write_bytes(b"PAR1")
        with refused(r"needs datasets: pip install 'ladder-jax\[data\]'"):
            sources.plan([str(tmp_path / name)])


@pytest.fixture
def words(tmp_path):
    """Makes the store `out` of another tokenizer's tokens; gives the tokenizer."""
    folder = tokenizers.folder(tmp_path / "t")
    (tmp_path / "book.jsonl").write_text(lines(TEXTS[:9]))
    make([tmp_path / "book.jsonl"], tmp_path / "out", tokens=folder)
    return tokenizer.load(folder)


def test_another_tokenizer(words, tmp_path):
    """Its own copy goes along; each document ends with the token that ends documents, also where
    that has changed since a part was made.
    """
    made = Store(tmp_path / "out").manifest
    given = words
    (tmp_path / "t").rename(tmp_path / "away")
    assert Store(tmp_path / "out").tokenizer().name == given.name == made.tokenizer
    assert made.dtype == "<u2"
    expected = [[*given.encode(text), given.stop_ids[0]] for text in TEXTS[:9]]
    assert [document.tolist() for document in documents(tmp_path / "out")] == expected
    one = dict(given=[tmp_path / "book.jsonl"], tokens=tmp_path / "away")
    half = tmp_path / "half"
    make(out=half, share=slice(1), **one)
    config = {"eos_token": tokenizers.BEGIN}
    (tmp_path / "away/tokenizer_config.json").write_text(json.dumps(config))
    with refused("documents end with another token"):
        make(out=tmp_path / "out", **one)
    make(out=half, workers=1, **one)  # which reads the tokenizer anew
    assert {int(document[-1]) for document in documents(half)} == {
        given.special_ids[tokenizers.BEGIN]
    }


KILLED = """
import contextlib, os, pathlib, signal, sys
from ladder_jax.data import tokenizer
from ladder_jax.data.store import build, sources

@contextlib.contextmanager
def progress(total, *, label):
    last = 3 if first else 12
    yield lambda now, text: os.kill(os.getpid(), signal.SIGKILL) if kill == "kill" and now == last else None

if __name__ == "__main__":
    source, out, first, kill = sys.argv[1:]
    build.progress = progress
    given = dict(tokenizer=tokenizer.load("bytes"), source="bytes", field="text", workers=1)
    share = slice(int(first), None, 2) if first else None
    build.build(sources.plan([source], most=5000), out=pathlib.Path(out), share=share, **given)
"""


def alive(group):
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_killed_again_and_again(tmp_path):
    """SIGKILL in a part and in the command that ends the store: workers go with their parent, the
    store is the same.
    """
    (tmp_path / "book.jsonl").write_text(
        lines(f"{'la ' * (index % 50)}{index}" for index in range(1500))
    )
    (tmp_path / "build.py").write_text(KILLED)
    command = [sys.executable, tmp_path / "build.py", tmp_path / "book.jsonl", tmp_path / "out"]
    for first, then in itertools.product(("1", ""), ("kill", "end")):
        process = subprocess.Popen(
            [*command, first, then], stderr=subprocess.PIPE, start_new_session=True
        )
        _, error = process.communicate(timeout=60)
        ended = -signal.SIGKILL if then == "kill" else 0
        assert (process.returncode, error) == (ended, b"")
        limit = time.time() + 20
        while alive(process.pid) and time.time() < limit:
            time.sleep(0.05)
        assert not alive(process.pid)
    assert len(make([tmp_path / "book.jsonl"], tmp_path / "whole", most=5000).shards) > 16
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_worker_that_is_killed(book, tmp_path, monkeypatch):
    """As the system does where memory runs out."""

    @contextlib.contextmanager
    def kill(total, *, label):
        yield lambda now, text: [process.kill() for process in multiprocessing.active_children()]

    out = tmp_path / "out"
    with monkeypatch.context() as patched:
        patched.setattr(building, "progress", kill)
        with refused("a worker was killed, perhaps for its memory: run the same command again"):
            make([book[0]], out, workers=2)
    os.truncate(next(out.glob("*.tokens")), 0)  # and the power failed
    make([book[0]], out)
    assert texts_in(out) == TEXTS


def test_no_room_for_semaphores(book, tmp_path, monkeypatch):
    """In a container whose shared memory is full."""
    full = mock.Mock(side_effect=OSError(28, "No space left on device"))
    monkeypatch.setattr(futures, "ProcessPoolExecutor", full)
    with refused("cannot make semaphores in '/dev/shm': No space left on device"):
        make([book[0]], tmp_path / "out", workers=1)


def test_an_interrupt_awaits_no_shard(monkeypatch):
    """One may take an hour."""

    def interrupted(begun):
        while not begun[0].running():
            time.sleep(0.01)
        raise KeyboardInterrupt

    monkeypatch.setattr(building, "_shard", select.select)  # which sleeps
    monkeypatch.setattr(futures, "as_completed", interrupted)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        building._shards([([],)], [], [], 60, workers=1)
    assert time.monotonic() - began < 30


def times(out):
    return {
        path.name: path.stat().st_mtime_ns
        for path in out.iterdir()
        if path.suffix in (".tokens", ".offsets")
    }


def test_what_was_done_is_not_done_again(tmp_path):
    """A wrong line ends the work; mended, the same call needs no more than that file's shards."""
    out = tmp_path / "out"
    one = tmp_path / "one.jsonl"
    two = tmp_path / "two.jsonl"
    both = [one, two]
    one.write_text(lines(TEXTS))
    two.write_text(lines(TEXTS[:50]) + '{"text": 3}\n' + lines(TEXTS[50:]))
    with refused(r"two.jsonl:51: no text in 'text' \(--field names it\): this is int"):
        make(both, out)
    with refused("is not finished"):
        Store(out)
    first = len(sources.plan([str(one)], most=500))
    done = {name: time for name, time in times(out).items() if int(name[:5]) < first}
    assert done
    two.write_text(lines(TEXTS))
    make(both, out)
    assert {name: time for name, time in times(out).items() if name in done} == done
    assert texts_in(out) == TEXTS * 2
    # A finished store is only compared; other sources or settings are refused, and nothing is
    # written.
    before = everything(out)
    words = tokenizers.folder(tmp_path / "t")
    assert make(both, out).documents == 2 * len(TEXTS)
    for other, message in (
        (dict(given=[one]), "finished store of other sources or another --shard-tokens, or they"),
        (dict(most=400), "finished store of other sources or another --shard-tokens, or they"),
        (dict(field="n"), "was begun with the tokenizer 'bytes' and the field 'text'"),
        (dict(tokens=words), "was begun with the tokenizer 'bytes' and the field 'text'"),
    ):
        with refused(message):
            make(**dict(given=both, out=out) | other)
    assert everything(out) == before


def test_a_mistake_begins_nothing(tmp_path):
    """Of which no shard is made, another call may have other settings; not beside one of a part."""
    out = tmp_path / "out"
    (tmp_path / "one.jsonl").write_text('{"body": "a"}')
    given = [tmp_path / "one.jsonl"]
    with refused("this is an object with 'body'"):
        make(given, out)
    with refused("was begun with .* the field 'text'"):
        make(given, out, field="body", share=slice(0, None, 2))
    assert make(given, out, field="body").documents == 1


def test_sources_that_change_meanwhile(tmp_path):
    """Shards of what was there before are made again or removed; the user's files in the folder
    stay.
    """
    out = tmp_path / "out"
    one = tmp_path / "one.jsonl"
    two = tmp_path / "two.jsonl"
    both = [one, two]
    one.write_text(lines(TEXTS))
    two.write_text("no\n")
    with refused("two.jsonl:1: not JSON"):
        make(both, out)
    theirs = {"notes.txt": "n", "more.tokens": "m", "notes/00009.tokens": "9"}
    (out / "notes").mkdir()
    for name, text in theirs.items():
        (out / name).write_text(text)
    one.write_text(lines(TEXTS[:3]))
    two.write_text(lines(TEXTS[3:5]))
    assert len(make(both, out).shards) == 2 == len(list(out.glob("0*.tokens")))
    assert texts_in(out) == TEXTS[:5]
    assert {name: (out / name).read_text() for name in theirs} == theirs


def test_two_at_once(book, tmp_path):
    """Parts may be made at once, but not while the store is ended."""
    out = tmp_path / "out"
    with building._locked(out, shared=True):
        make([book[0]], out, share=slice(0, None, 9))
        with refused("another `ladder-jax tokenize` is at work"):
            make([book[0]], out)


def test_parts_are_the_store_of_one_command(book, tmp_path):
    """In any order, made elsewhere, with one that is missing, and one of more than there is to
    share.
    """
    file, whole, made = book
    out = tmp_path / "out"
    for index in (2, 0):
        part = make([file], tmp_path / str(index), share=slice(index, None, 3))
        assert part.shards == made.shards[index::3]
        shutil.copytree(tmp_path / str(index), out, dirs_exist_ok=True)
    before = times(out)
    assert make([file], out, share=slice(900, None, 1000)).shards == ()
    assert make([file], out) == made
    assert contents(out) == contents(whole)
    assert before.items() <= times(out).items()


@pytest.mark.parametrize(
    "content, message",
    [
        (b'{"text": "a"}\n{"text": "b"\n', "x.jsonl:2: not JSON"),
        (b'{"text": "a"}\n\n{"text": "\xff"}\n', "x.jsonl:3: not JSON: 'utf-8' codec can't decode"),
        (b'["text"]\n', "x.jsonl:1: no text in 'text' .*: this is list"),
        (b'{"text": "\\ud800"}\n', "x.jsonl:1: half of a surrogate pair"),
        (b'{"text": ""}\n', "the sources hold no text"),
        (b"", "the sources hold no text"),
        (b"[" * 100_000, "x.jsonl:1: not JSON: maximum recursion depth"),
    ],
)
def test_lines_that_are_wrong(tmp_path, content, message):
    (tmp_path / "x.jsonl").write_bytes(content)
    with refused(message):
        make([tmp_path / "x.jsonl"], tmp_path / "out", most=5)


def test_a_damaged_gzip(tmp_path):
    (tmp_path / "x.jsonl.gz").write_bytes(gzip.compress(lines(TEXTS * 20).encode())[:-900])
    with refused("cannot read .*x.jsonl.gz'"):
        list(sources.read(sources.plan([str(tmp_path / "x.jsonl.gz")])[0], field="text"))


def test_a_disk_that_fails_while_a_store_is_verified(book):
    fails = mock.patch.object(hashlib, "file_digest", side_effect=OSError(5, "Input/output error"))
    with fails, refused("cannot read the token store's .*00000.tokens': Input/output error"):
        Store(book[1]).verify()


@pytest.fixture
def copy(book, tmp_path):
    """Of the store."""
    return shutil.copytree(book[1], tmp_path / "store")


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda f: (f / "00001.tokens").unlink(), "cannot read .*00001.tokens"),
        (
            lambda f: os.truncate(f / "00001.tokens", 5),
            r"00001.tokens' has 5 bytes, not \d+: it is damaged",
        ),
        (lambda f: cases.flip(f / "00002.tokens"), "shard 00002 of .* is damaged"),
        (
            lambda f: (f / "manifest.json").write_text("{"),
            "manifest.json' is damaged, or not a token store's",
        ),
        (lambda f: change(f, '"ladder_jax tokens"', '"x"'), "is damaged, or not a token store's"),
        (
            lambda f: change(f, '"version": 2', '"version": 9'),
            "version 9; this ladder_jax reads 1 to 2",
        ),
        (lambda f: (f / "manifest.json").unlink(), "there is no token store"),
        (
            lambda f: (f / "manifest.json").write_text("[" * 100_000),
            "is damaged, or not a token store's",
        ),
        (
            lambda f: offset(f, 1, 2**62),
            "00001.offsets' is damaged: its documents do not follow one another",
        ),
        # the differences of these do not fit into 64 bits
        (
            lambda f: (offset(f, 1, 2**63 - 1), offset(f, 2, 2**63 + 1)),
            "00001.offsets' is damaged: its documents do not follow one another",
        ),
        *((lambda f, i=i: offset(f, i, 1), "00001.offsets' is damaged") for i in (0, -1, 2)),
    ],
)
def test_damaged_stores(copy, damage, message):
    damage(copy)
    with refused(message):
        documents(copy)


def test_a_store_of_version_1(book, copy):
    """Its fields that are no longer needed are left out, and its fingerprint is what it was."""
    tree = json.loads((copy / "manifest.json").read_text()) | {
        "version": 1,
        "dtype": "<u1",
        "shard_tokens": 9,
    }
    tree["shards"] = [
        shard | {"parts": [shard.pop("source")], "digests": ""} for shard in tree["shards"]
    ]
    (copy / "manifest.json").write_text(json.dumps(tree))
    assert texts_in(copy) == TEXTS
    assert Store(copy).manifest.fingerprint == book[2].fingerprint
    content = json.dumps(["bytes", "<u1", [shard["sha256"] for shard in tree["shards"]]])
    assert book[2].fingerprint == hashlib.sha256(content.encode()).hexdigest()[:16]


def change(folder, old, new):
    text = (folder / "manifest.json").read_text()
    assert old in text
    (folder / "manifest.json").write_text(text.replace(old, new))


def offset(folder, index, value):
    found = np.fromfile(folder / "00001.offsets", "<u8")
    found[index] = value
    found.tofile(folder / "00001.offsets")


def test_a_token_that_no_tokenizer_has(words, tmp_path):
    """Where the bytes have changed to what cannot be looked up."""
    file = tmp_path / "out/00000.tokens"
    content = np.fromfile(file, "<u2")
    content[7] = words.vocab_size
    content.tofile(file)
    store = Store(tmp_path / "out")
    assert len(store.read(0, 7)) == 7
    with refused(rf"00000.tokens' is damaged: it holds the token {words.vocab_size}"):
        store.read(0, 8)


def test_a_file_that_is_cut_while_it_is_read(book, copy):
    """An error, where a memory map would end the process."""
    store = Store(copy)
    assert len(store.read(0, 5)) == 5
    os.truncate(copy / "00000.tokens", 10)
    with refused("00000.tokens' is damaged: it was complete .* cut short"):
        store.read(20, 5)
    (copy / "00001.tokens").unlink()
    with refused("cannot read .*00001.tokens': No such file"):
        store.read(book[2].shards[0].tokens, 1)


def everything(folder):
    """Every path below `folder`: of a file, what it holds and when that was written."""
    return {
        path: path.is_file() and (path.read_bytes(), path.stat().st_mtime_ns)
        for path in folder.rglob("*")
    }


@pytest.mark.parametrize(
    "name, content, said",
    [
        ("", "", "something else is there; name a new folder"),
        (".lock", "mine", "something else is there; name a new folder"),
        ("manifest.json", '{"files": 5}', "manifest.json' is damaged, or not a token store's"),
    ],
)
def test_a_corpus_is_not_a_store(tmp_path, name, content, said):
    """A folder whose names are those of a store's, itself or by a link: not one of its files is
    touched.
    """
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    (corpus / "00000.tokens").write_text("a text")
    (corpus / "00000.json").write_text("{}")
    if name:
        (corpus / name).write_text(content)
    (tmp_path / "link").symlink_to(corpus)
    (tmp_path / "a.txt").write_text("a text")
    before = everything(tmp_path)
    for out in (corpus, tmp_path / "link"):
        with refused(said):
            make([tmp_path / "a.txt"], out)
    assert everything(tmp_path) == before


def test_the_command(prints, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "book.jsonl").write_text(lines(TEXTS))
    pool = mock.Mock(side_effect=one_thread)
    monkeypatch.setattr(futures, "ProcessPoolExecutor", pool)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(47), raising=False)
    ask = "tokenize book.jsonl --out out --shard-tokens 2000".split()
    run = lambda *more: prints(*ask, *more)
    assert re.fullmatch(
        r"out, part 1/2: [1-9]\d documents, [\d,]+ tokens of bytes\n", run("--part", "1/2")
    )
    assert (
        run("--verify")
        == f"out: 120 documents, {sum(len(text.encode()) for text in TEXTS):,} tokens of bytes\n"
    )
    assert pool.call_args.args == (47,)  # one a core
    shards = len(list((tmp_path / "out").glob("*.tokens")))
    assert shards == math.ceil((tmp_path / "book.jsonl").stat().st_size / 2000) > 3


@pytest.mark.parametrize(
    "arguments, message",
    {
        "nowhere --out x": "'nowhere' does not exist (a text file, a folder, .jsonl",
        "/dev/null --out x": "'/dev/null': this is a device or a pipe; name a file",
        "book.jsonl ./book.jsonl --out x": "is named twice",
        "book.jsonl --out .": "--out .: something else is there; name a new folder",
        ". --out x": "--out x lies in the source '.'",
        "book.jsonl --out x --workers 0": "--workers must be positive, not 0",
        "book.jsonl --out x --tokenizer nowhere": "there is no tokenizer at 'nowhere'",
        "book.jsonl --out x --part 3/2": "--part 3/2 must be I/N with I from 1 to N, such as 2/8",
        "book.jsonl --out x --part 1/2 --verify": "give it without --part",
        "book.jsonl --out x --split test": "--split is for data sets of the Hub",
    }.items(),
)
def test_a_wrong_command_is_one_line(arguments, message, mistake, tmp_path):
    (tmp_path / "book.jsonl").write_text(lines(TEXTS))
    assert message in mistake("tokenize", *arguments.split())
