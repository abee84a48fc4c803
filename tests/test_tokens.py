"""Token stores: made in parallel, killed, gone on with; what is wrong is named, what is damaged is refused."""

import gzip
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from ladder_jax.data import tokenizer
from ladder_jax.data.examples import lines as lines_of_examples
from ladder_jax.data.store import Store, blocks, sources
from ladder_jax.data.store.build import build
from ladder_jax.errors import UserError
from ladder_jax.evaluate import questions as examples_of_tasks
from tests import tokenizers

TEXTS = [f"{'the cat sat on the mat ' * (index % 7)}number {index} é\n" for index in range(120)]


def lines(texts):
    return "".join(
        json.dumps({"text": text, "n": index}, ensure_ascii=False) + "\n" for index, text in enumerate(texts)
    )


def make(given, out, *, part_bytes=500, workers=2, tokens="bytes", field="text", shard_tokens=2000, **more):
    plan = sources.plan([str(one) for one in given], part_bytes=part_bytes)
    loaded = tokenizer.load(tokens)
    more |= dict(source=str(tokens), field=field, shard_tokens=shard_tokens, workers=workers)
    return build(plan, out=out, tokenizer=loaded, **more)


def contents(out):
    with Store(out) as store:
        store.verify()
        return [store.read(start, count) for start, count in zip(store.starts.tolist(), store.lengths.tolist())]


def texts_in(out):
    return [bytes(document).decode() for document in contents(out)]


@pytest.fixture(scope="module")
def book(tmp_path_factory):
    """Lines of JSON, and a store of them in several shards."""
    folder = tmp_path_factory.mktemp("book")
    (folder / "book.jsonl").write_text(lines(TEXTS))
    return folder / "book.jsonl", folder / "store", make([folder / "book.jsonl"], folder / "store")


def test_documents_come_in_order_whoever_made_them(book, tmp_path):
    file, out, made = book
    assert texts_in(out) == TEXTS
    assert len(made.shards) > 3 and all(shard.tokens <= 2000 for shard in made.shards) and made.dtype == "<u1"
    assert (made.documents, made.tokens) == (len(TEXTS), sum(len(text.encode()) for text in TEXTS))
    assert sorted(os.listdir(out))[:2] == [".lock", "00000.digests"] and "parts" not in os.listdir(out)
    again = make([file], tmp_path / "alone", workers=1)
    assert again == made and again.fingerprint == made.fingerprint
    (whole,) = make([file], tmp_path / "whole", part_bytes=10**9, shard_tokens=10**9, workers=1).shards
    assert whole.tokens == made.tokens and texts_in(tmp_path / "whole") == TEXTS


def test_every_kind_of_source(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    folder = tmp_path / "all"
    (folder / "d").mkdir(parents=True)
    (folder / "a.txt").write_text("one")
    (folder / "b.png").write_bytes(b"\x89PNG\xff")
    (folder / "c.jsonl").write_text('{"text": "two"}\n\n{"text": ""}\n{"text": "thr\\u00e9e"}')  # no newline at the end
    with gzip.open(folder / "d" / "e.jsonl.gz", "wt") as file:
        file.write(lines(["four", "five"]))
    rows = [f"row {index}" for index in range(50)]
    parquet.write_table(pyarrow.table({"text": rows, "n": range(50)}), folder / "f.parquet", row_group_size=7)
    (folder / "g.md").write_text("")
    (folder / "h.md").write_text("last")
    made = make([folder], tmp_path / "out")
    assert texts_in(tmp_path / "out") == ["one", "two", "thrée", "four", "five", *rows, "last"]
    assert sum(shard.empty for shard in made.shards) == 2 and sum(shard.skipped for shard in made.shards) == 1
    parts = sources.plan([str(folder / "f.parquet")], part_bytes=100)
    assert len(parts) > 2 and (parts[0].begin, parts[-1].end) == (0, 8)
    with pytest.raises(UserError, match="f.parquet: no column 'body' .*: there is 'text', 'n'"):
        make([folder / "f.parquet"], tmp_path / "p", field="body")
    with pytest.raises(UserError, match="f.parquet: the column 'n' holds int64, not text"):
        make([folder / "f.parquet"], tmp_path / "q", field="n")
    parquet.write_table(pyarrow.table({"text": ["a", None]}), folder / "f.parquet")
    with pytest.raises(UserError, match="f.parquet: row 2 has no text"):
        make([folder / "f.parquet"], tmp_path / "r")
    (folder / "f.parquet").write_bytes(b"PAR1 nothing")
    with pytest.raises(UserError, match="f.parquet: cannot be read, or is damaged: Parquet magic bytes not found"):
        make([folder / "f.parquet"], tmp_path / "s")


def test_tables_without_datasets(tmp_path, monkeypatch):
    """Text and JSON lines do not need it."""
    monkeypatch.setitem(sys.modules, "datasets", None)
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "b.jsonl").write_text(lines(["two"]))
    assert len(sources.plan([str(tmp_path)])) == 2
    for name in ("f.parquet", "f.csv", "f.tar"):
        (tmp_path / name).write_bytes(b"PAR1")
        with pytest.raises(UserError, match=r"needs datasets: pip install 'ladder-jax\[data\]'"):
            sources.plan([str(tmp_path / name)])


def test_another_tokenizer(tmp_path):
    """Its own copy goes along; each document ends with the token that ends documents."""
    folder = tokenizers.folder(tmp_path / "t")
    (tmp_path / "book.jsonl").write_text(lines(TEXTS[:9]))
    made = make([tmp_path / "book.jsonl"], tmp_path / "out", tokens=folder)
    given = tokenizer.load(folder)
    (tmp_path / "t").rename(tmp_path / "away")
    with Store(tmp_path / "out") as store:
        assert store.tokenizer().name == given.name == made.tokenizer and made.dtype == "<u2"
    expected = [[*given.encode(text), given.stop_ids[0]] for text in TEXTS[:9]]
    assert [document.tolist() for document in contents(tmp_path / "out")] == expected


KILLED = """
import sys, pathlib
from ladder_jax.data import tokenizer
from ladder_jax.data.store import sources
from ladder_jax.data.store.build import build
if __name__ == "__main__":
    source, out = sys.argv[1:]
    plan = sources.plan([source], part_bytes=2000)
    more = dict(tokenizer=tokenizer.load("bytes"), source="bytes", field="text", shard_tokens=30000, workers=2)
    build(plan, out=pathlib.Path(out), **more)
"""


def alive(group):
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_killed_again_and_again(tmp_path):
    """SIGKILL at any moment; the workers go with their parent, and the store in the end is the same."""
    texts = [f"{'la ' * (index % 50)}{index}" for index in range(40_000)]
    (tmp_path / "book.jsonl").write_text(lines(texts))
    (tmp_path / "build.py").write_text(KILLED)
    out, rng, kills = tmp_path / "out", random.Random(0), 0
    command = [sys.executable, str(tmp_path / "build.py"), str(tmp_path / "book.jsonl"), str(out)]
    status = None
    while status != 0:
        process = subprocess.Popen(command, stderr=subprocess.PIPE, start_new_session=True)
        deadline = time.time() + rng.uniform(0.2, 0.9) * (1 + kills / 2)
        while time.time() < deadline and process.poll() is None:
            time.sleep(0.01)
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            kills += 1
        _, error = process.communicate(timeout=60)
        status = process.returncode
        assert status in (0, -signal.SIGKILL), error
        limit = time.time() + 20
        while alive(process.pid) and time.time() < limit:
            time.sleep(0.05)
        assert not alive(process.pid)
    assert kills > 0 and texts_in(out) == texts
    assert {name.split(".")[-1] for name in os.listdir(out)} == {"lock", "tokens", "offsets", "digests", "json"}


def test_a_worker_that_is_killed(book, tmp_path):
    """As the system does where memory runs out."""

    def kill(size):
        for process in multiprocessing.active_children():
            process.kill()

    with pytest.raises(UserError, match="a worker was killed, perhaps for its memory: run the same command again"):
        make([book[0]], tmp_path / "out", part_bytes=50, advance=lambda size: size and kill(size))
    for file in list(tmp_path.glob("out/parts/*.tokens"))[:1]:
        os.truncate(file, 0)  # and the power failed
    make([book[0]], tmp_path / "out", part_bytes=50)
    assert texts_in(tmp_path / "out") == TEXTS


def test_what_was_done_is_not_done_again(book, tmp_path):
    """A wrong line ends the work; mended, the same call needs no more than that file's parts."""
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    one.write_text(lines(TEXTS))
    two.write_text(lines(TEXTS[:50]) + '{"text": 3}\n' + lines(TEXTS[50:]))
    with pytest.raises(
        UserError, match=r"two.jsonl:51: no text in 'text' \(--field names it\): this is an object with"
    ):
        make([one, two], tmp_path / "out", workers=1)
    with pytest.raises(UserError, match="is not finished"):
        Store(tmp_path / "out")
    done = {p.name: p.stat().st_mtime_ns for p in tmp_path.glob("out/0000[0-3].*")}  # of the first file alone
    assert len(done) == 12
    two.write_text(lines(TEXTS))
    make([one, two], tmp_path / "out", workers=1)
    assert {name: (tmp_path / "out" / name).stat().st_mtime_ns for name in done} == done
    assert texts_in(tmp_path / "out") == TEXTS * 2
    # A finished store is only compared; other sources or settings are refused, and nothing is written.
    before = {p.name: p.stat().st_mtime_ns for p in tmp_path.glob("out/*") if p.name != ".lock"}
    assert make([one, two], tmp_path / "out").documents == 2 * len(TEXTS)
    for given, more, message in (
        ([one], {}, "holds a finished store of other sources, or they have changed"),
        ([one, two], dict(field="n"), "was begun with field 'text', not 'n'"),
        ([one, two], dict(shard_tokens=9), "was begun with shard tokens 2000, not 9"),
    ):
        with pytest.raises(UserError, match=message):
            make(given, tmp_path / "out", **more)
    assert {p.name: p.stat().st_mtime_ns for p in tmp_path.glob("out/*") if p.name != ".lock"} == before


def test_sources_that_change_meanwhile(tmp_path):
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    one.write_text(lines(TEXTS))
    two.write_text("no\n")
    with pytest.raises(UserError, match="two.jsonl:1: not JSON"):
        make([one, two], tmp_path / "out", workers=1)
    one.write_text(lines(TEXTS[:3]))
    two.write_text(lines(TEXTS[3:5]))
    make([one, two], tmp_path / "out", workers=1)
    assert texts_in(tmp_path / "out") == TEXTS[:5]
    assert len(list((tmp_path / "out").glob("0*"))) == 3  # the shards of what was there before are gone


def test_two_at_once(book, tmp_path):
    from ladder_jax.data.store import resume

    with resume.locked(tmp_path / "out"), pytest.raises(UserError, match="another `ladder-jax tokenize` is at work"):
        make([book[0]], tmp_path / "out")


@pytest.mark.parametrize(
    "content, message",
    [
        (b'{"text": "a"}\n{"text": "b"\n', "x.jsonl:2: not JSON"),
        (b'{"text": "a"}\n\n{"text": "\xff"}\n', "x.jsonl:3: not UTF-8 text"),
        (b'["text"]\n', "x.jsonl:1: no text in 'text' .*: this is list"),
        (b'{"body": "a"}\n', "x.jsonl:1: no text in 'text' .*: this is an object with 'body'"),
        (b'{"text": "\\ud800"}\n', "x.jsonl:1: half of a surrogate pair"),
        (b'{"text": ""}\n', "the sources hold no text"),
        (b"", "the sources hold no text"),
    ],
)
def test_lines_that_are_wrong(tmp_path, content, message):
    (tmp_path / "x.jsonl").write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        make([tmp_path / "x.jsonl"], tmp_path / "out", workers=1, part_bytes=5)
    assert "\n" not in str(caught.value)


def test_a_damaged_gzip(tmp_path):
    (tmp_path / "x.jsonl.gz").write_bytes(gzip.compress(lines(TEXTS * 20).encode())[:-900])
    with pytest.raises(UserError, match=r"x.jsonl.gz:\d+: the gzip file is damaged or incomplete"):
        make([tmp_path / "x.jsonl.gz"], tmp_path / "out", workers=1)


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda f: (f / "00001.tokens").unlink(), "cannot read .*00001.tokens"),
        (lambda f: os.truncate(f / "00001.tokens", 5), r"00001.tokens' has 5 bytes, not \d+: it is damaged"),
        (lambda f: os.truncate(f / "00000.offsets", 8), "00000.offsets' has 8 bytes"),
        (lambda f: flip(f / "00002.tokens"), "shard 00002 of .* is damaged"),
        (lambda f: (f / "manifest.json").write_text("{"), "manifest.json' is damaged, or not a token store's"),
        (lambda f: (f / "manifest.json").write_text('{"format": "x", "version": 1}'), "is not a token store's"),
        (lambda f: (f / "manifest.json").write_text('{"format": "ladder_jax tokens", "version": 9}'), "version 9"),
        (lambda f: (f / "manifest.json").unlink(), "there is no token store"),
        (lambda f: (f / "manifest.json").write_text("[" * 100_000), "is damaged, or not a token store's"),
        (lambda f: change(f, '"00001"', '"../00001"'), "is damaged, or not a token store's"),
        (lambda f: change(f, '"<u1"', '"<u2"'), "is damaged, or not a token store's"),
        (lambda f: change(f, '"documents": ', '"documents": -'), "is damaged, or not a token store's"),
        (lambda f: offset(f, 1, 2**62), "00001.offsets' is damaged: its documents do not follow one another"),
        (lambda f: offset(f, 0, 1), "00001.offsets' is damaged"),
        (lambda f: offset(f, -1, 1), "00001.offsets' is damaged"),
        (lambda f: offset(f, 2, 1), "00001.offsets' is damaged"),
        (lambda f: flip(f / "00001.digests"), "00001.digests' is damaged"),
        (lambda f: os.truncate(f / "00001.digests", 8), r"00001.digests' has 8 bytes, not \d+: it is damaged"),
    ],
)
def test_damaged_stores(book, tmp_path, damage, message):
    subprocess.run(["cp", "-r", book[1], tmp_path / "store"], check=True)
    damage(tmp_path / "store")
    with pytest.raises(UserError, match=message):
        contents(tmp_path / "store")


def test_changed_bytes_are_read_by_nobody(book, tmp_path, monkeypatch):
    """Without a reading of everything, where no other number would give them away."""
    monkeypatch.setattr(blocks, "BLOCK", 512)
    make([book[0]], tmp_path / "store")
    flip(tmp_path / "store" / "00000.tokens")
    with Store(tmp_path / "store") as store:
        assert len(store.read(600, 5)) == 5  # of the second block
        for start in (0, 500):
            with pytest.raises(UserError, match="00000.tokens' is damaged: bytes 0 to 511 are not what was written"):
                store.read(start, 20)
    offsets = np.fromfile(tmp_path / "store" / "00001.offsets", "<u8")
    offsets[3] += 1
    offsets.tofile(tmp_path / "store" / "00001.offsets")
    with pytest.raises(UserError, match="00001.offsets' is damaged: it is not what was written"):
        Store(tmp_path / "store")


def test_a_store_of_an_earlier_version(book, tmp_path):
    """It has no digests of blocks, and nobody missed them."""
    subprocess.run(["cp", "-r", book[1], tmp_path / "store"], check=True)
    without_digests(tmp_path / "store")
    assert b"".join(map(bytes, contents(tmp_path / "store"))).decode() == "".join(TEXTS)


def without_digests(folder):
    manifest = json.loads((folder / "manifest.json").read_text())
    for shard in manifest["shards"]:
        (folder / f"{shard['name']}.digests").unlink()
        del shard["digests"]
    (folder / "manifest.json").write_text(json.dumps(manifest))


def change(folder, old, new):
    text = (folder / "manifest.json").read_text()
    assert old in text
    (folder / "manifest.json").write_text(text.replace(old, new))


def offset(folder, index, value):
    found = np.fromfile(folder / "00001.offsets", "<u8")
    found[index] = value
    found.tofile(folder / "00001.offsets")


def test_a_token_that_no_tokenizer_has(tmp_path):
    """Where the bytes have changed to what cannot be looked up."""
    folder = tokenizers.folder(tmp_path / "t")
    (tmp_path / "book.jsonl").write_text(lines(TEXTS[:9]))
    made = make([tmp_path / "book.jsonl"], tmp_path / "out", tokens=folder)
    content = np.fromfile(tmp_path / "out" / "00000.tokens", "<u2")
    content[7] = made.vocab_size
    content.tofile(tmp_path / "out" / "00000.tokens")
    without_digests(tmp_path / "out")
    with Store(tmp_path / "out") as store:
        assert len(store.read(0, 7)) == 7
        with pytest.raises(UserError, match=rf"00000.tokens' is damaged: it holds the token {made.vocab_size}"):
            store.read(0, 8)


def test_nested_lines(tmp_path):
    (tmp_path / "x.jsonl").write_text("[" * 100_000)
    with pytest.raises(UserError, match="x.jsonl:1: not JSON: maximum recursion depth"):
        make([tmp_path / "x.jsonl"], tmp_path / "out", workers=1, part_bytes=10**6)
    for read in (lines_of_examples.read, examples_of_tasks.read_choices):
        with pytest.raises(UserError, match="x.jsonl:1: not JSON: maximum recursion depth"):
            list(read(str(tmp_path / "x.jsonl")))


def flip(path):
    content = bytearray(path.read_bytes())
    content[7] ^= 1
    path.write_bytes(content)


def test_a_file_that_is_cut_while_it_is_read(book, tmp_path):
    """An error, where a memory map would end the process."""
    subprocess.run(["cp", "-r", book[1], tmp_path / "store"], check=True)
    with Store(tmp_path / "store") as store:
        assert len(store.read(0, 5)) == 5
        os.truncate(tmp_path / "store" / "00000.tokens", 10)
        with pytest.raises(UserError, match="00000.tokens' is damaged: it was complete .* cut short"):
            store.read(20, 5)
        (tmp_path / "store" / "00001.tokens").unlink()
        with pytest.raises(UserError, match="cannot read .*00001.tokens': No such file"):
            store.read(book[2].shards[0].tokens, 1)


def test_more_shards_than_open_files(book, monkeypatch):
    monkeypatch.setattr("ladder_jax.data.store.reader.OPEN_FILES", 2)
    order = np.random.default_rng(0).permutation(len(TEXTS))
    with Store(book[1]) as store:
        for index in order:
            assert bytes(store.read(int(store.starts[index]), int(store.lengths[index]))).decode() == TEXTS[index]
        assert len(store._files) == 2


def test_the_command(run_cli, tmp_path):
    (tmp_path / "book.jsonl").write_text(lines(TEXTS))
    ask = ["tokenize", "book.jsonl", "--out", "out", "--workers", "1"]
    for more in ([], ["--verify"]):
        done = run_cli(*ask, *more, cwd=tmp_path, check_status=0)
        assert done.stdout == f"out: 120 documents, {sum(len(t.encode()) for t in TEXTS):,} tokens of bytes\n"
    for arguments, message in (
        (["nowhere", "--out", "x"], "'nowhere' does not exist (a text file, a folder, .jsonl"),
        (["book.jsonl", "./book.jsonl", "--out", "x"], "is named twice"),
        (["book.jsonl", "--out", "book.jsonl"], "something else is there"),
        (["book.jsonl", "--out", "."], "something else is there; name a new folder"),
        ([".", "--out", "x"], "--out x lies in the source '.'"),
        (["book.jsonl", "--out", "x", "--workers", "0"], "--workers must be at least 1, not 0"),
        (["book.jsonl", "--out", "x", "--tokenizer", "nowhere"], "there is no tokenizer at 'nowhere'"),
    ):
        done = run_cli("tokenize", *arguments, cwd=tmp_path, check_status=2)
        assert message in done.stderr and done.stderr.count("\n") == 1 and done.stdout == ""
    assert sorted(os.listdir(tmp_path)) == ["book.jsonl", "out"]
