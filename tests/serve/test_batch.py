"""OpenAI's batch files: answers as OpenAI's own types read them, those of the server's requests;
killed, resumed.
"""

import datetime
import json
import types

import pytest

from ladder_jax import cli
from ladder_jax.checkpoint import Checkpoint
from ladder_jax.config import DecodeConfig
from ladder_jax.data import chat_template, tokenizer as tokenizers
from ladder_jax.decode.engine import jsonl
from ladder_jax.errors import RunFailed
from ladder_jax.serve import batch
from tests import tokenizers as made
from tests.lines import write
from tests.refusals import refused
from tests.serve.conftest import MODEL
from tests.serve.templated import Templated


def request(custom_id, url, **body):
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"model": MODEL, **body}}


COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
LINES = [
    request("one", COMPLETIONS, prompt="the cat", max_tokens=9, temperature=0),
    request("é", COMPLETIONS, prompt=["a", "b"], n=2, max_tokens=5, seed=7, echo=True),
    request(
        "chat",
        CHAT,
        messages=[{"role": "user", "content": "hello"}],
        max_completion_tokens=6,
        temperature=0.5,
    ),
    request("tokens", COMPLETIONS, prompt=[1, 2, 3], temperature=0, logprobs=0, stop=["e"]),
]
READ = dict(
    name=MODEL, tokenizer=Templated(), defaults=DecodeConfig(seed=3), vocab_size=256, identity="m"
)


@pytest.fixture(scope="module")
def content(make_engine, tmp_path_factory):
    """The file of answers to LINES."""
    folder = tmp_path_factory.mktemp("batch")
    jobs = batch.read(write(folder / "in.jsonl", LINES), **READ)
    ours = make_engine()
    jsonl.answer(jobs, file=str(folder / "out.jsonl"), engine_for=lambda left: ours)
    return (folder / "out.jsonl").read_bytes()


def test_answers(content, alone, openai):
    """OpenAI's types read the bodies; the texts are those of the server's requests."""
    answers = {answer["custom_id"]: answer for answer in map(json.loads, content.splitlines())}
    assert answers.keys() == {line["custom_id"] for line in LINES}
    one = answers["one"]
    assert one.keys() == {"id", "custom_id", "response", "error"}
    assert one["error"] is None
    assert one["response"].keys() == {"status_code", "request_id", "body"}
    assert one["response"]["status_code"] == 200

    def read(name, kind):
        return kind.model_validate(answers[name]["response"]["body"], strict=True)

    one = read("one", openai.types.Completion)
    expected = alone("the cat", max_new_tokens=9, stop_ids=(10,))
    assert (one.choices[0].text, one.choices[0].finish_reason) == (expected.text, expected.finish)
    assert (one.usage.prompt_tokens, one.usage.completion_tokens) == (7, len(expected.tokens))
    chat = read("chat", openai.types.chat.ChatCompletion)
    # after the one answer of the first line, and two of the second
    expected = alone("u:hello|a:", max_new_tokens=6, temperature=0.5, seed=3 + 3, stop_ids=(10,))
    assert chat.choices[0].message.content == expected.text


def test_one_without_numbers(tmp_path):
    """Its line has the server's status and body, and the others are answered."""
    from ladder_jax.decode.request import NoNumbers

    (job,) = batch.read(write(tmp_path / "in.jsonl", LINES[:1]), **READ)
    answer = job.line([NoNumbers(3)])
    assert answer["response"]["status_code"] == 500
    assert answer["response"]["body"]["error"]["code"] == "no_numbers"
    write(tmp_path / "out.jsonl", [answer])
    assert jsonl.answered(str(tmp_path / "out.jsonl"), {"one": job.digest}) == {"one": answer}
    with pytest.raises(RunFailed, match="1 prompts have no answer"):
        jsonl.answer([job], file=str(tmp_path / "out.jsonl"), engine_for=None)


@pytest.mark.parametrize("change", [dict(identity="another"), dict(defaults=DecodeConfig(seed=4))])
def test_answers_to_something_else(change, content, tmp_path):
    """(test_prompts.py goes on after a kill.)"""
    (tmp_path / "out.jsonl").write_bytes(content)
    jobs = batch.read(write(tmp_path / "in.jsonl", LINES), **READ | change)
    with refused("out.jsonl line [1-4] answers another prompt, model or"):
        jsonl.answered(str(tmp_path / "out.jsonl"), {job.index: job.digest for job in jobs})


MISTAKES = {
    "method: Input should be 'POST'": LINES[0] | {"method": "GET"},
    "url: Input should be '/v1/completions' or '/v1/chat/compl": LINES[0] | {"url": "/v1/chat"},
    "custom_id: Input should be a valid string": LINES[0] | {"custom_id": 3},
    "unknown parameter 'bodi'; did you mean 'body'?": LINES[0] | {"bodi": 3},
    "each line must be an object such as ": [],
    "body: Input should be an object": LINES[0] | {"body": 3},
    "custom_id 'one' is that of an earlier line": LINES[3] | {"custom_id": "one"},
    "stream: a batch has no streams; leave it out": request(
        "x", COMPLETIONS, prompt="a", stream=True
    ),
    "there is no model 'gpt' here; this is 'book'": request(
        "x", COMPLETIONS, prompt="a", model="gpt"
    ),
    "the chat template refuses these messages": request(
        "x", CHAT, messages=[{"role": "assistant", "content": "a"}]
    ),
}


@pytest.mark.parametrize("message, line", MISTAKES.items())
def test_mistakes(tmp_path, line, message):
    with refused(f"in.jsonl:2: .*{message}"):
        batch.read(write(tmp_path / "in.jsonl", [LINES[0], line]), **READ)


def test_the_command(folder, tmp_path, monkeypatch, capsys, mistake, prints):
    """It knows the format by the first line."""
    monkeypatch.setattr(Checkpoint, "tokenizer", lambda self: Templated())
    file = write(tmp_path / "in.jsonl", LINES)
    out = tmp_path / "out.jsonl"
    command = ["generate", str(folder), "--prompts", file, "--out", str(out), "--tensor", "1"]
    command += ["--max-new-tokens", "5"]  # of what does not say, a completion too
    said = mistake(*command, "--temperature", "1")
    assert "--temperature: in OpenAI's batch format each line's body has its own settings" in said
    assert cli.main(command) == 0
    content = out.read_bytes()
    assert content.count(b"\n") == 4
    answers = {answer["custom_id"]: answer for answer in map(json.loads, content.splitlines())}
    assert answers["tokens"]["response"]["body"]["usage"]["completion_tokens"] == 5
    assert "4/4 prompts" in capsys.readouterr().err
    prints(*command)
    assert out.read_bytes() == content


def test_a_dated_template_on_another_day(tmp_path, monkeypatch):
    """An answer of yesterday counts, and what is left is told today's date. Another template is
    another question.
    """
    lines = [request("chat", CHAT, messages=[{"role": "user", "content": "hello"}])]
    file = write(tmp_path / "in.jsonl", lines)
    day = datetime.timedelta(days=1)

    def job(name):
        about = READ | dict(tokenizer=tokenizers.load(tmp_path / name), vocab_size=301)
        return batch.read(file, **about)[0]

    for name, mark in (("dated", ""), ("other", "!")):
        template = "{{ strftime_now('%d') }}" + mark + made.TEMPLATE
        made.folder(tmp_path / name, template=template)
    today = job("dated")
    assert job("other").digest != today.digest
    tomorrow = types.SimpleNamespace(now=lambda: datetime.datetime.now() + day)
    monkeypatch.setattr(chat_template, "datetime", types.SimpleNamespace(datetime=tomorrow))
    assert job("dated").digest == today.digest
    assert job("dated").requests[0].prompt != today.requests[0].prompt
