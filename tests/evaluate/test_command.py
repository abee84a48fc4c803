"""`ladder-jax evaluate` as a user meets it: files with mistakes, kills, one JSON object."""

import json
import subprocess
import sys

import pytest

from ladder_jax import cli
from tests.evaluate.conftest import WINDOW, rows_of
from tests.test_resume import wait

TEXT = "the cat sat on the mat, and the rat sat on the cat.\nnaïve café, 東京 🙂\n" * 6
CHOICES = [
    {"question": "Who sat?", "choices": ["the cat", "the mat"], "answer": "A", "id": 3},
    {"context": "the rat", "choices": [" sat", "東京", "ü"], "answer": 2},
    {"context": "", "choices": ["yes", "no"], "answer": "no"},
]
QUESTIONS = [
    {"question": "2 + 2 =", "answer": "It is 4.\n#### 4"},
    {"context": "the cat", "answer": "5"},
]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    (folder / "book.txt").write_text(TEXT, encoding="utf-8")
    pages = [{"page": text} for text in (TEXT, "the rat")]
    for name, lines in dict(pages=pages, choices=CHOICES, questions=QUESTIONS).items():
        (folder / f"{name}.jsonl").write_text("\n\n".join(map(json.dumps, lines)))
    return folder


def one_object(out):
    """The numbers of the one line on stdout."""
    assert out.count("\n") == 1
    found = json.loads(out)
    assert found.pop("checkpoint")
    assert found.pop("file")
    return found


@pytest.fixture
def evaluate(run, files, monkeypatch, prints):
    """In this process: `evaluate("--text", "book.txt")` gives the object that --json prints."""
    monkeypatch.chdir(files)

    return lambda *args: one_object(prints("evaluate", run, *args, "--json"))


def test_text(evaluate, run, capsys):
    assert cli.main(["evaluate", str(run), "--text", "book.txt", "--json"]) == 0
    out, err = capsys.readouterr()
    found = one_object(out)
    assert "windows" in err
    assert found["tokens"] == found["bytes"] == len(TEXT.encode())
    assert found["window"] == WINDOW
    assert found["perplexity"] == found["byte_perplexity"] < found["word_perplexity"]
    how = "--field page --stride 32 --tensor 1 --data 2".split()
    pages = evaluate("--text", "pages.jsonl", *how)
    assert pages["documents"] == 2
    assert pages["stride"] == 32
    assert pages["tokens"] == found["tokens"] + 7


def test_questions(evaluate, run, files, prints):
    found = evaluate(
        "--multiple-choice", "choices.jsonl", "--shots", "1", "--shots-file", "choices.jsonl"
    )
    assert found["examples"] == 3
    assert {found["accuracy"], found["accuracy_normalised"]} <= {0, 1 / 3, 2 / 3, 1}
    assert evaluate("--multiple-choice", "choices.jsonl", "--limit", "2")["examples"] == 2
    said = prints("evaluate", run, "--multiple-choice", "choices.jsonl")
    lines = dict(line.split(maxsplit=1) for line in said.splitlines())
    assert (lines["examples"], lines["shots"], lines["truncated"]) == ("3", "0", "0")


def test_generation(evaluate, files, tmp_path):
    out = tmp_path / "out.jsonl"
    ask = "--generation questions.jsonl --max-new-tokens 8 --stop Q --out".split()
    found = evaluate(*ask, str(out))
    lines = rows_of(out)
    assert found["examples"] == 2
    assert found["unfinished"] == sum(line["finish_reason"] == "length" for line in lines)
    assert {line["index"]: line["line"] for line in lines} == {0: 1, 1: 3}
    assert not any("Q" in line["text"] for line in lines)
    before = out.read_bytes()
    assert evaluate(*ask, str(out)) == found
    assert out.read_bytes() == before


def test_a_killed_evaluation_goes_on(run, evaluate, tmp_path, mistake):
    text = tmp_path / "long.txt"
    out = tmp_path / "out.jsonl"
    text.write_text(TEXT * 12, encoding="utf-8")
    ask = f"--text {text} --stride 4 --tensor 1".split()
    more = ["--batch-tokens", "64", "--out", str(out)]
    command = [sys.executable, "-m", "ladder_jax", "evaluate", str(run), *ask, *more]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    assert wait(process, lambda: out.exists() and out.stat().st_size > 2000)
    process.kill()
    process.wait()
    content = out.read_bytes()
    done = content.count(b"\n")
    # as if the disk had not got the last of it
    out.write_bytes(content[: content.rindex(b"\n") - 5])
    found = evaluate(*ask, "--out", str(out))
    assert 10 < done < found["windows"], "it was killed after its end"
    assert sorted(line["index"] for line in rows_of(out)) == list(range(found["windows"]))
    assert found == pytest.approx(evaluate(*ask), rel=1e-5)
    # What it is asked now is another question.
    other = f"--text {text} --stride 8 --out".split()
    assert "answers another prompt, model or setting" in mistake("evaluate", run, *other, out)


BROKEN = {
    "{'choices'": ":2: not JSON",
    "[1]": ":2: this must be a JSON object, not list",
    b'{"context": "\xe9"}': ":2: not JSON: 'utf-8' codec can't decode",
    '{"context": "x", "choises": ["a", "b"]}': "must be a list of two texts or more; there is 'choises'",
    '{"context": "x", "choices": ["a", 1], "answer": 0}': "must be a list of two texts or more",
    '{"context": "x", "choices": ["a", ""], "answer": 0}': "choice 1 is empty",
    '{"choices": ["a", "b"], "answer": 0}': 'either "context" or "question"',
    '{"context": "x", "question": "x", "choices": ["a", "b"], "answer": 0}': 'either "context" or "question"',
    '{"context": "x", "choices": ["a", "b"], "answer": 2}': "answer 2 is none of the 2 choices (allowed: 0 ",
    '{"context": "x", "choices": ["a", "b"], "answer": "C"}': 'answer "C" is none of the 2 choices',
    '{"context": "x", "choices": ["a", "b"], "answer": true}': "answer true is none of the 2 choices",
    '{"context": "x", "choices": ["a", "b"], "anwser": 1}': "there is no \"answer\"; there is 'anwser'",
    '{"context": "x", "choices": ["B", "A"], "answer": "A"}': "name it by its number",
    '{"context": "\\ud800", "choices": ["a", "b"], "answer": 0}': "half of a surrogate pair",
    json.dumps(
        {"context": "x", "choices": ["a", TEXT], "answer": 0}
    ): "a continuation of 469 tokens is longer than the window of 64",  # a space before its bytes
}


@pytest.mark.parametrize("line", BROKEN, ids=BROKEN.values())
def test_broken_lines(line, run, tmp_path, mistake):
    file = tmp_path / "choices.jsonl"
    content = line if isinstance(line, bytes) else line.encode()
    file.write_bytes(json.dumps(CHOICES[1]).encode() + b"\n" + content + b"\n")
    assert BROKEN[line] in mistake("evaluate", run, "--multiple-choice", file)


MISTAKES = {
    "--text book.txt --multiple-choice choices.jsonl": "--text FILE, --multiple-choice FILE or --generation FILE, one",
    "": "--text FILE, --multiple-choice FILE or --generation FILE, one of these",
    "--text nowhere.txt": "'nowhere.txt' does not exist",
    "--text empty.txt": "'empty.txt' holds no text",
    "--text latin.txt": "latin.txt: not UTF-8 text",
    "--text pages.jsonl": "pages.jsonl:1: no text in 'text' (--field names it)",
    "--multiple-choice empty.txt": "'empty.txt' holds no questions",
    "--text gs://b/a.txt": "'gs://b/a.txt' is in an object store, and this must be on a disk",
    "--generation s3://b/a.jsonl": "'s3://b/a.jsonl' is in an object store",
    "--multiple-choice nowhere.jsonl": "cannot read 'nowhere.jsonl': No such file",
    "--generation choices.jsonl": 'choices.jsonl:3: "answer" must be a text',
    "--text book.txt --shots 2": "--shots is for --multiple-choice and --generation",
    "--multiple-choice choices.jsonl --stride 2": "--stride is for --text",
    "--multiple-choice choices.jsonl --shots 2": "--shots N and --shots-file FILE go together",
    "--multiple-choice choices.jsonl --shots 3 --shots-file choices.jsonl": "line 1: --shots 3: --shots-file holds",
    "--text book.txt --window 0": "--window must be positive, not 0",
    "--text book.txt --stride 65": "stride must be between 1 and the window, 64, not 65",
    "--text book.txt --prefix-token 303": "the prompt holds the token 303, outside the model's vocabulary of 303",
    "--text book.txt --tensor 16": "but this machine has 8",
    "--generation questions.jsonl": "for a prompt in the window of 64 (allowed: 1 to 63; --max-new-tokens",
    "--generation questions.jsonl --data 2": "--data is for --text and --multiple-choice",
    "--text book.txt --out nowhere/out.jsonl": "there is no folder nowhere",
    "--text book.txt --out questions.jsonl": "questions.jsonl line 1 is not an answer that this command wrote",
    "--text book.txt --stirde 2": "unknown option '--stirde'; did you mean '--stride'?",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_mistakes(words, run, files, monkeypatch, mistake):
    (files / "empty.txt").write_text("\n" if "choice" in words else "")
    (files / "latin.txt").write_bytes(b"caf\xe9")
    monkeypatch.chdir(files)
    assert MISTAKES[words] in mistake("evaluate", run, *words.split())


@pytest.mark.parametrize(
    "way, file", [("multiple-choice", "choices.jsonl"), ("generation", "questions.jsonl")]
)
def test_without_the_harness(way, file, evaluate, files, mistake, monkeypatch):
    """One line that names the extra, after what is wrong in a file and before anything of the
    checkpoint is read; a text's perplexity does not need it.
    """
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    (files / "bad.jsonl").write_text("no\n")
    ask = ("evaluate", "nowhere", f"--{way}")
    assert "bad.jsonl:1: not JSON" in mistake(*ask, files / "bad.jsonl")
    assert "need lm-eval: pip install 'ladder-jax[lm-eval]'" in mistake(*ask, files / file)
    monkeypatch.chdir(files)
    assert evaluate("--text", "book.txt")["tokens"] == len(TEXT.encode())


def test_nothing_beside_the_result(run, run_cli, files, tmp_path):
    """In a process of its own: the harness's bars, warnings and caches stay out of the user's
    way.
    """
    home = tmp_path / "home"
    home.mkdir()
    here = dict(HOME=str(home), TMPDIR=str(home), HF_HOME=str(home / "hf"))
    here["LADDER_JAX_CACHE"] = str(tmp_path / "cache")
    ask = "--multiple-choice choices.jsonl --shots 1 --shots-file choices.jsonl --json".split()
    done = run_cli("evaluate", run, *ask, cwd=files, check_status=0, **here)
    assert one_object(done.stdout)["shots"] == 1
    said = done.stderr.splitlines()
    assert said[-1:] == ["3/3 questions"] and len(said) < 5, said
    assert not list(home.rglob("*"))
