"""Requests whose logits are no numbers, and the noise of requests: with a seed and without."""

import dataclasses
import functools
import json

import pytest

from ladder_jax import decode
from ladder_jax.config import DecodeConfig, Loop
from ladder_jax.data.tokenizer import Bytes
from ladder_jax.decode import Choice, Finish, NoNumbers, Request
from ladder_jax.decode.engine import jsonl
from ladder_jax.errors import RunFailed
from tests import engines
from tests.covering import full
from tests.lines import write

READ = dict(stop=(), tokenizer=Bytes(), vocab_size=251, model="m")
POISON = 13  # a token whose embedding is no number


engine = functools.partial(engines.engine, slots=2, loop=Loop.SCAN)
GOOD = Request([1, 2, 3], max_new_tokens=18, seed=0)
BAD = Request([4, POISON, 5], max_new_tokens=18, seed=0)


@functools.cache
def alone(request):
    """Its tokens in an engine of its own."""
    return engine().submit(request).result().tokens


@pytest.mark.parametrize("loop", [Loop.SCAN, full(Loop.UNROLLED)])
def test_a_request_without_numbers_fails_alone(loop):
    """Beside one that goes on; and whoever has its slot next reads nothing of what it left."""
    ours = engine(poison=POISON, loop=loop)
    drawn = Request([7, 8], max_new_tokens=30, temperature=1.0, seed=3)
    beside = ours.submit(drawn)
    ours.step()
    for bad in BAD, dataclasses.replace(BAD, temperature=0.8, top_k=5, top_p=0.9, logprobs=True):
        failing = ours.submit(bad)
        after = ours.submit(GOOD)
        with pytest.raises(
            NoNumbers,
            match="the model's logits are no numbers .NaN or infinite. after 0 new tokens",
        ):
            failing.result()
        with pytest.raises(NoNumbers):
            next(iter(failing))
        assert after.result().tokens == alone(GOOD)
    assert beside.result().tokens == alone(drawn)
    assert ours.stats().finished == dict(stop=0, length=3, cancelled=0, failed=2)
    assert not ours.busy
    assert ours.error is None


def test_a_request_may_end_with_what_has_no_numbers():
    """The third new token's embedding is no number, and in the slot that it used others find
    nothing of it.
    """
    whole = alone(GOOD)
    poison = whole[2]
    assert poison not in whole[:2] + GOOD.prompt
    ours = engine(poison=poison)
    ended = ours.submit(Request(GOOD.prompt, max_new_tokens=3, seed=0)).result()
    assert (ended.tokens, ended.finish) == (whole[:3], Finish.LENGTH)
    other = Request([9, 10], max_new_tokens=12, seed=0)
    assert poison not in alone(other)
    # in all slots
    assert [handle.result().tokens for handle in ours.submit_all([other, other])] == [
        alone(other)
    ] * 2


def test_a_generator_says_which_prompt():
    ours = decode.Generator(*engines.parts(poison=POISON, data=2), loop=Loop.SCAN)
    config = DecodeConfig(max_new_tokens=4, temperature=1.0)
    with pytest.raises(
        RunFailed, match="prompt 2 of 3: the model's logits are no numbers .NaN or infinite."
    ):
        ours.tokens([GOOD.prompt, BAD.prompt, GOOD.prompt], config=config)
    assert ours.tokens([GOOD.prompt] * 3, config=config).shape == (3, 4)


def test_a_file_of_prompts_has_a_line_for_it(tmp_path):
    source = tmp_path / "prompts.jsonl"
    out = tmp_path / "out.jsonl"
    write(source, [{"prompt": text} for text in ("b", chr(POISON), "b")])
    jobs = jsonl.read(str(source), defaults=DecodeConfig(max_new_tokens=3), **READ)
    message = "out.jsonl: 1 prompts have no answer; their lines say why"
    for _ in range(2):  # the same command again finds nothing left to do, and no answer either
        with pytest.raises(RunFailed, match=message):
            jsonl.answer(jobs, file=str(out), engine_for=lambda left: engine(poison=POISON))
    answers = sorted(map(json.loads, out.read_text().splitlines()), key=lambda line: line["index"])
    assert [answer["finish_reason"] for answer in answers] == ["length", "error", "length"]
    assert answers[1]["text"] is None
    assert "no numbers" in answers[1]["error"]
    assert len(jsonl.answered(str(out), {job.index: job.digest for job in jobs})) == 3


def test_greedy_requests_run_the_lean_program():
    """Nobody draws or asks for log-probabilities: no program that could is run."""
    ours = engine()
    ran = []
    decode_ = ours._device.decode
    ours._device.decode = lambda choice: (ran.append(choice), decode_(choice))[1]
    ours.submit(Request([1], max_new_tokens=12, repetition_penalty=1.5)).result()
    assert set(ran) == {Choice.GREEDY}
    for more in (dict(temperature=1.0, seed=0), dict(logprobs=True)):
        ran.clear()
        long = ours.submit(Request([1], max_new_tokens=12))
        short = ours.submit(Request([2], max_new_tokens=3, **more))
        ours.run()
        assert ran == [Choice.SAMPLED, Choice.GREEDY, Choice.GREEDY]
        assert len(long.result().tokens) == 12
        assert (short.result().logprobs is not None) == ("logprobs" in more)


def test_requests_without_a_seed_have_noise_of_their_own():
    ours = engine()
    ask = dict(prompt=[1, 2], max_new_tokens=12, temperature=1.5)
    handles = [ours.submit(Request(**ask)) for _ in range(4)]
    ours.run()
    drawn = [handle.result().tokens for handle in handles]
    assert len(set(drawn)) == 4
    # And the seed that each of them drew gives its text again.
    again = [ours.submit(Request(**ask, seed=handle.request.seed)) for handle in reversed(handles)]
    assert [handle.result().tokens for handle in again] == drawn[::-1]


def test_prompts_of_one_command_do_not_share_their_noise(tmp_path):
    source = tmp_path / "prompts.jsonl"
    source.write_text('{"prompt": "a"}\n' * 2 + '{"prompt": "a", "seed": 3}\n' * 2)
    defaults = DecodeConfig(max_new_tokens=12, temperature=1.5, seed=2**32 - 1)
    jobs = jsonl.read(str(source), defaults=defaults, **READ)
    assert [job.requests[0].seed for job in jobs] == [2**32 - 1, 0, 3, 3]
