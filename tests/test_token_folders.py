"""Folders that `tokenize` is told to write into: what is not its own, it does not touch."""

import os

import pytest

from ladder_jax.errors import UserError
from tests.test_tokens import TEXTS, lines, make, texts_in


@pytest.fixture(scope="module")
def book(tmp_path_factory):
    """Lines of JSON."""
    folder = tmp_path_factory.mktemp("book")
    (folder / "book.jsonl").write_text(lines(TEXTS))
    return [folder / "book.jsonl"]


def everything(folder):
    """Every path below `folder`: what it leads to, what it holds and when that was written."""
    found = {}
    for path in sorted(folder.rglob("*")):
        held = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
        found[str(path.relative_to(folder))] = (held, path.lstat().st_mtime_ns if held is not None else None)
    return found


@pytest.mark.parametrize(
    "around", ["nothing", "lock", "full lock", "their manifest", "their journal", "link", "digest"]
)
def test_a_corpus_is_not_a_store(run_cli, tmp_path, around):
    """A folder whose names are those of a store's, or which lies around a source: not one of its files is touched."""
    corpus = tmp_path / "corpus"
    (corpus / "parts" / "more").mkdir(parents=True)
    for index in range(4):
        (corpus / "parts" / f"{index}.txt").write_text(f"text {index}")
    (corpus / "parts" / "more" / "00000.tokens").write_text("a text")
    (corpus / "00000.tokens").write_text("a text")
    given, out = "corpus/parts", "corpus"
    match around:
        case "lock":
            (corpus / ".lock").touch()
        case "full lock":
            (corpus / ".lock").write_text("mine")
        case "their manifest":
            (corpus / "manifest.json").write_text('{"files": 5}')
        case "their journal":
            (corpus / "unfinished.json").write_text("[" * 100_000)
        case "link":
            (tmp_path / "link").symlink_to(corpus)
            out = "link"
        case "digest":
            (corpus / "parts" / f"{'0' * 20}.json").write_text("{}")
    before = everything(tmp_path)
    done = run_cli("tokenize", given, "--out", out, "--workers", "1", cwd=tmp_path, check_status=2)
    assert f"--out {out}: something else is there" in done.stderr and done.stderr.count("\n") == 1 and not done.stdout
    assert everything(tmp_path) == before


@pytest.mark.parametrize("finished", [True, False])
def test_sources_in_a_store(book, tmp_path, finished):
    """Also where the folder is a store's: at it, below it, and by a link to it."""
    out = tmp_path / "out"
    make([book[0]], out)
    (out / "parts").mkdir()
    (out / "parts" / "mine.txt").write_text("mine")
    (tmp_path / "link").symlink_to(out / "parts")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a.txt").symlink_to(out / "parts" / "mine.txt")
    if not finished:
        (out / "manifest.json").rename(out / "unfinished.json")
    before = everything(tmp_path)
    for given in (out, out / "parts", out / "parts" / "mine.txt", tmp_path / "link", tmp_path / "folder"):
        with pytest.raises(UserError, match=r"lies in --out .*out: name a new folder"):
            make([given], out)
    assert everything(tmp_path) == before


def test_only_what_is_ours_is_removed(book, tmp_path):
    """A run that was killed goes on, with the user's files beside its own; and what a kill leaves at first is ours."""
    out = tmp_path / "out"
    bad = tmp_path / "bad.jsonl"
    bad.write_text(lines(TEXTS) + "no\n")
    with pytest.raises(UserError, match="not JSON"):
        make([bad], out, workers=1)
    theirs = {"parts/notes.txt": "n", "parts/deep/er.json": "d", "more.tokens": "m", "notes/00009.tokens": "9"}
    for name, text in theirs.items():
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_text(text)
    make([book[0]], out)
    assert texts_in(out) == TEXTS and {name: (out / name).read_text() for name in theirs} == theirs
    assert sorted(os.listdir(out / "parts")) == ["deep", "notes.txt"]
    begun = tmp_path / "begun"
    begun.mkdir()
    for name in (".lock", "unfinished.json.partial"):
        (begun / name).touch()
    make([book[0]], begun)
    assert texts_in(begun) == TEXTS and not (begun / "parts").exists()


def test_parts_that_lead_elsewhere(book, tmp_path):
    out = tmp_path / "out"
    (tmp_path / "bad.jsonl").write_text("no\n")
    with pytest.raises(UserError, match="not JSON"):
        make([tmp_path / "bad.jsonl"], out, workers=1)
    (out / "parts").rename(tmp_path / "elsewhere")
    (out / "parts").symlink_to(tmp_path / "elsewhere")
    before = everything(tmp_path)
    with pytest.raises(UserError, match="something else is there"):
        make([book[0]], out)
    assert everything(tmp_path) == before
