"""Chat, with a tokenizer that has a template, by the official client."""

import pytest

from tests.serve.conftest import MODEL, ask, official
from tests.serve.templated import Templated

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
PROMPT = "s:Be brief.|u:Hello|a:"


@pytest.fixture(scope="module")
def url(make_engine, serving):
    with serving(make_engine(), tokenizer=Templated(), max_new_tokens=50) as (_, url):
        yield url


@pytest.fixture(scope="module")
def answer(url):
    """What is answered to MESSAGES, or to others."""
    with official(url) as client:
        yield lambda **more: client.chat.completions.create(
            **{"model": MODEL, "messages": MESSAGES, **more}
        )


@pytest.mark.parametrize("limit", ["max_tokens", "max_completion_tokens"])
def test_an_answer(answer, alone, limit):
    found = answer(temperature=1.2, seed=4, **{limit: 9})
    expected = alone(PROMPT, max_new_tokens=9, temperature=1.2, seed=4, stop_ids=(10,))
    (choice,) = found.choices
    assert (choice.message.role, choice.message.content) == ("assistant", expected.text)
    assert choice.finish_reason == "length"
    assert found.object == "chat.completion"
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (len(PROMPT), 9)


def test_a_text_ends_where_the_model_ends_it(answer, alone):
    """At the tokenizer's stop token, which is none of the text; without a limit it may go on to the
    server's.
    """
    reasons = set()
    for seed in range(12):
        (choice,) = answer(seed=seed, temperature=2).choices
        expected = alone(PROMPT, max_new_tokens=50, temperature=2.0, seed=seed, stop_ids=(10,))
        assert (choice.message.content, choice.finish_reason) == (expected.text, expected.finish)
        assert "\n" not in choice.message.content
        reasons.add(choice.finish_reason)
    assert reasons == {"stop", "length"}


def test_messages_in_other_words(answer):
    """Text in parts, and OpenAI's newer word for a system message."""
    asked = dict(temperature=0, max_tokens=9)
    plain = answer(**asked)
    parts = [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]
    other = [{"role": "developer", "content": parts}, {**MESSAGES[1], "name": "Ann"}]
    neutral = dict(
        tools=[],
        tool_choice="none",
        response_format={"type": "text"},
        n=1,
        store=False,
        logit_bias={},
    )
    same = answer(messages=other, **asked, **neutral)
    assert same.choices[0].message.content == plain.choices[0].message.content


def test_a_stream(answer, alone):
    *parts, last = answer(
        seed=3, max_tokens=40, n=2, stream=True, stream_options={"include_usage": True}
    )
    choices = [part.choices[0] for part in parts]
    assert [choice.delta.role for choice in choices[:2]] == ["assistant"] * 2
    for index in range(2):
        mine = [choice for choice in choices if choice.index == index]
        expected = alone(PROMPT, max_new_tokens=40, temperature=1.0, seed=3 + index, stop_ids=(10,))
        assert "".join(choice.delta.content or "" for choice in mine) == expected.text
        assert [choice.finish_reason for choice in mine if choice.finish_reason] == [
            expected.finish
        ]
    assert last.choices == []
    assert last.usage.prompt_tokens == len(PROMPT)


def test_log_probabilities(answer, alone):
    expected = alone(PROMPT, max_new_tokens=20, stop_ids=(10,), logprobs=True)
    asked = dict(temperature=0, max_tokens=20, logprobs=True)
    (choice,) = answer(**asked, top_logprobs=1).choices
    content = choice.logprobs.content
    assert tuple(byte for token in content for byte in token.bytes) == expected.tokens
    assert [token.logprob for token in content] == pytest.approx(expected.logprobs, abs=1e-4)
    assert all(token.top_logprobs[0].token == token.token for token in content)
    parts = [part.choices[0].logprobs for part in answer(**asked, stream=True)]
    assert [token.logprob for part in parts if part for token in part.content] == [
        token.logprob for token in content
    ]


TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
REFUSED = {
    r"tools is not supported here: leave it out, or \[\]": dict(tools=[TOOL]),
    "the chat template refuses these messages": dict(
        messages=[{"role": "assistant", "content": "a"}]
    ),
    r"messages\[0\].role: Input should be 'system'": dict(
        messages=[{"role": "tool", "content": "a"}]
    ),
    r"messages\[0\].content must be a string or a list of": dict(
        messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    ),
    "top_logprobs must be 0": dict(logprobs=True, top_logprobs=2),
    "top_logprobs needs logprobs": dict(top_logprobs=0),
    "this server generates at most 50 new tokens, not 51": dict(max_tokens=51),
}


@pytest.mark.parametrize("message, change", REFUSED.items())
def test_what_cannot_be_answered(answer, change, message, openai):
    with pytest.raises(openai.BadRequestError, match=message):
        answer(**change)


def test_the_paths_are_described(url):
    assert {"/v1/completions", "/v1/chat/completions", "/v1/models", "/health", "/metrics"} <= set(
        ask(url, "/openapi.json")[2]["paths"]
    )
