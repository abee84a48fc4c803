"""The official client against a server in a process: every answer is that of the request alone."""

import itertools
import types
from concurrent import futures

import numpy as np
import pytest

from ladder_jax.data import tokenizer
from ladder_jax.decode.engine import Finish, Result
from ladder_jax.serve.answer import CompletionForm
from ladder_jax.serve.prepare import Terms, prepare
from ladder_jax.serve.schema import Completion
from tests import tokenizers
from tests.serve.conftest import CAPACITY, MODEL, ask, metric, official
from tests.serve.test_limits import until

ASKED = dict(model=MODEL, prompt="Once upon", max_tokens=40, temperature=0.8, seed=7)
ALONE = dict(max_new_tokens=40, temperature=0.8, seed=7)


@pytest.fixture(scope="module")
def running(start):
    """A server in a process of its own; it must end well, too, and have nothing to tell."""
    process = start()
    yield process
    process.ends_well()


@pytest.fixture(scope="module")
def client(running):
    with official(running.url) as client:
        yield client


@pytest.fixture(scope="module")
def complete(client):
    """What is answered to ASKED, some of it changed."""
    return lambda **more: client.completions.create(**{**ASKED, **more})


def test_defaults_are_openai_s(client, alone):
    """16 tokens, drawn with temperature 1 and another seed each time."""
    first, second = (client.completions.create(model=MODEL, prompt="a") for _ in range(2))
    assert first.usage.completion_tokens == 16
    assert first.choices[0].text != second.choices[0].text
    greedy = client.completions.create(model=MODEL, prompt="a", temperature=0)
    assert greedy.choices[0].text == alone("a", max_new_tokens=16).text
    same = client.completions.create(
        model=MODEL,
        prompt="a",
        temperature=0,
        max_tokens=None,
        stop=None,
        n=None,
        logit_bias=None,
        suffix=None,
        top_p=None,
        logprobs=None,
        presence_penalty=0,
        frequency_penalty=0.0,
        best_of=1,
        user="me",
        echo=False,
        stream=False,
    )
    assert same.choices[0].text == greedy.choices[0].text


@pytest.mark.parametrize("prompt", [["a", "bé"], [[97], [98, 195, 169]]], ids=["texts", "tokens"])
def test_several_prompts_and_answers(complete, alone, prompt):
    """The k-th answer to a prompt has the seed + k."""
    answer = complete(prompt=prompt, n=3)
    expected = [
        alone(one, **{**ALONE, "seed": 7 + k}).text for one in ("a", "bé") for k in range(3)
    ]
    assert answer.choices == complete(prompt=prompt, n=3, best_of=3).choices
    assert (answer.object, answer.model, answer.id[:5]) == ("text_completion", MODEL, "cmpl-")
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert [choice.text for choice in answer.choices] == expected
    assert {(choice.finish_reason, choice.logprobs) for choice in answer.choices} == {
        ("length", None)
    }
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (4, 240, 244)
    assert complete(prompt=[97]).choices[0].text == expected[0]


def test_the_engine_s_own_settings(complete, alone):
    own = dict(top_k=5, min_p=0.05, repetition_penalty=1.3)
    answer = complete(top_p=0.9, extra_body=own)
    assert answer.choices[0].text == alone("Once upon", **ALONE, top_p=0.9, **own).text


def test_stop_strings_and_echo(complete, alone):
    text = alone("Once upon", **ALONE).text
    stop = text[10:12]
    (choice,) = complete(stop=[stop, "never there"], echo=True).choices
    assert choice.text == "Once upon" + text[: text.index(stop)]
    assert choice.finish_reason == "stop"
    parts = complete(stop=stop, echo=True, stream=True)
    assert "".join(part.choices[0].text for part in parts) == choice.text


def test_an_echo_has_no_space_of_the_tokenizer_s(tmp_path):
    made = tokenizer.load(tokenizers.folder(tmp_path / "made", made=tokenizers.byte_fallback()))
    body = Completion(model=MODEL, prompt="the cat", echo=True)
    _, form = prepare(body, Terms(MODEL, made, made.vocab_size, chat_tokens=1))
    (event,) = form.opening()
    assert event["choices"][0]["text"] == "the cat"


def test_a_stream(complete, alone):
    """Two prompts at a time; several pieces each, which together are the texts."""
    *parts, last = complete(
        prompt=["Once upon", "x"], stream=True, stream_options={"include_usage": True}
    )
    assert {(part.id, part.usage) for part in parts} == {(last.id, None)}
    for index, prompt in enumerate(("Once upon", "x")):
        mine = [part.choices[0] for part in parts if part.choices[0].index == index]
        assert len(mine) >= 3
        assert "".join(choice.text for choice in mine) == alone(prompt, **ALONE).text
        assert [choice.finish_reason for choice in mine] == [None] * (len(mine) - 1) + ["length"]
    assert last.choices == []
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (10, 80)


def test_log_probabilities(complete, alone):
    expected = alone("Once upon", max_new_tokens=40, logprobs=True)
    greedy = dict(temperature=0, logprobs=1)
    (choice,) = complete(**greedy).choices
    found = choice.logprobs
    np.testing.assert_allclose(found.token_logprobs, expected.logprobs, atol=1e-4)
    assert [list(top) for top in found.top_logprobs] == [[token] for token in found.tokens]
    assert found.text_offset[0] == 0
    assert found.text_offset == sorted(found.text_offset)
    for token, offset in zip(found.tokens, found.text_offset):
        assert token.startswith("bytes:") or choice.text[offset:].startswith(token)
    assert any(token.startswith("bytes:") for token in found.tokens)
    parts = [part.choices[0].logprobs for part in complete(**greedy, stream=True)]
    assert sum((part.text_offset for part in parts if part), []) == found.text_offset
    assert sum((part.token_logprobs for part in parts if part), []) == found.token_logprobs


@pytest.mark.parametrize(
    "pieces, offsets",
    [
        ([b"0", b"\xa2", b"9"], [0, 1, 2]),
        ([b"\xff\xff", b"\xff", b"a"], [0, 2, 3]),
        ([b"\xc3", b"\xa9x", b"y"], [0, 0, 2]),
        ([b"\xc3", b"a", b"b"], [0, 1, 2]),
        ([b"a\xc3", b"", b"\xa9", b""], [0, 1, 1, 2]),
    ],
)
def test_a_token_begins_at_the_character_of_its_first_byte(pieces, offsets):
    of_pieces = types.SimpleNamespace(to_bytes=lambda tokens: pieces[tokens[0]])
    form = CompletionForm(Completion(model=MODEL, prompt="x", logprobs=0), [[120]], of_pieces)
    result = Result(tuple(range(len(pieces))), "", (-1.0,) * len(pieces), Finish.LENGTH, 1)
    (choice,) = form.answer([result])["choices"]
    assert choice["logprobs"]["text_offset"] == offsets


def test_models(client, openai):
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "ladder_jax"
    with pytest.raises(
        openai.NotFoundError, match="there is no model 'gpt-9' here; this is 'book'"
    ):
        client.models.retrieve("gpt-9")


REFUSED = {
    "there is no model 'gpt-9'": dict(model="gpt-9"),
    "a prompt of 9 tokens and 127 new ones are more": dict(max_tokens=CAPACITY - 1),
    "this server generates at most 127 new tokens": dict(max_tokens=CAPACITY),
    "the prompt is empty": dict(prompt=""),
    "0 prompts": dict(prompt=[]),
    "the token 256, outside the model's vocabulary of 256": dict(prompt=[256]),
    "best_of is not supported here: leave it out, or 1": dict(best_of=3),
    "logit_bias is not supported here": dict(logit_bias={"1": 3}),
    "logprobs must be 0": dict(logprobs=1),
    "echo and logprobs exclude each other": dict(echo=True, logprobs=0),
    "temperature: Input should be less than or equal": dict(temperature=2.5),
    "stop must be a string or a list of at most 16": dict(stop=["a"] * 17),
    "stop must be strings, none of them empty": dict(stop=""),
    "stream_options needs stream": dict(stream_options={}),
    "unknown parameter 'top-k'; did you mean 'top_k'": dict(extra_body={"top-k": 3}),
}


@pytest.mark.parametrize("message, change", REFUSED.items())
def test_what_cannot_be_answered(complete, change, message, openai):
    kind = openai.NotFoundError if "model" in change else openai.BadRequestError
    with pytest.raises(kind, match=message) as caught:
        complete(**change)
    body = caught.value.response.json()["error"]
    assert set(body) == {"message", "type", "param", "code"}
    assert body["type"] == "invalid_request_error"
    if "stream_options" not in change:  # refused before a stream begins
        with pytest.raises(kind, match=message):
            complete(stream=True, **change)


def test_without_a_chat_template(client, openai):
    with pytest.raises(
        openai.BadRequestError, match="book has no chat template; ask it at /v1/completions"
    ):
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "Hello"}])


def test_health_and_metrics(running, complete):
    url = running.url
    before = metric(url, "ladder_jax_new_tokens_total")
    complete()
    assert ask(url, "/health")[::2] == (200, {"status": "ok"})
    assert ask(url, "/health", method="HEAD")[0] == 200
    status, headers, text = ask(url, "/metrics")
    assert status == 200
    assert headers["Content-Type"].startswith("text/plain")
    assert metric(url, "ladder_jax_new_tokens_total") == before + 40
    assert 'ladder_jax_requests_total{path="/v1/completions",status="200"}' in text
    assert metric(url, "ladder_jax_time_to_first_token_seconds_count") >= 1
    ask(url, "/made/up")
    assert 'path="other",status="404"' in ask(url, "/metrics")[2]


def test_many_at_once(running, client, alone):
    """None is lost, none is wrong; of those who leave after the first part the others notice
    nothing.
    """
    asked = list(random_requests())
    leave = range(1, 30, 4)

    def streamed(index):
        prompt, new, drawn = asked[index]
        body = dict(model=MODEL, prompt=prompt, max_tokens=new, **drawn)
        with client.completions.create(**body, stream=True) as parts:
            kept = itertools.islice(parts, 1 if index in leave else None)
            return "".join(part.choices[0].text for part in kept)

    with futures.ThreadPoolExecutor(30) as threads:
        texts = list(threads.map(streamed, range(30)))
    for index, (text, (prompt, new, drawn)) in enumerate(zip(texts, asked)):
        expected = alone(prompt, max_new_tokens=new, **drawn).text
        assert text == expected or (index in leave and expected.startswith(text))
    busy = ("ladder_jax_running", "ladder_jax_queued")
    until(lambda: not any(metric(running.url, name) for name in busy))
    assert metric(running.url, 'ladder_jax_finished_total{reason="cancelled"}') > 0


def random_requests():
    """Greedy and drawn; prompts and answers of all lengths that fit."""
    rng = np.random.default_rng(0)
    for index in range(30):
        length = int(rng.integers(1, CAPACITY - 1))
        new = int(rng.integers(1, min(48, CAPACITY - length) + 1))
        drawn = dict(temperature=float(rng.uniform(0.3, 1.5)) * (index % 2), seed=index)
        yield rng.integers(0, 256, length).tolist(), new, drawn
