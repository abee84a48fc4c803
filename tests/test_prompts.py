"""A file of prompts to a file of texts: killed, the disk full, two at once, edited by hand."""

import json

import numpy as np
import pytest
import tokenizers

from ladder_jax import decode
from ladder_jax.config import DecodeConfig
from ladder_jax.data import tokenizer
from ladder_jax.data.tokenizer import Bytes
from ladder_jax.decode import Finish
from ladder_jax.decode.engine import jsonl
from ladder_jax.decode.request import ends
from tests import tokenizers as tiny
from tests.engines import engine
from tests.lines import write
from tests.refusals import refused

PROMPTS = [
    {"prompt": "a cat"},
    {"prompt": "é", "id": "ü\ud800", "temperature": 1.5, "seed": 7, "max_new_tokens": 9},
    {"prompt": "b", "id": 3, "top_k": 4, "temperature": 1, "stop": "e"},
    {
        "prompt": "c",
        "min_p": 0.1,
        "top_p": 0.9,
        "repetition_penalty": 1.5,
        "stop_ids": [1, 2],
        "stop": ["x", "yy"],
    },
]
READ = dict(
    defaults=DecodeConfig(max_new_tokens=6),
    stop=(),
    tokenizer=Bytes(),
    vocab_size=251,
    model="m",
)


def test_a_special_token_among_the_stop_strings_ends_a_text(tmp_path):
    """It gives no text in which its string could be found. A string alone is one, not its letters."""
    made = tokenizer.load(tiny.folder(tmp_path / "tokenizer"))
    source = tmp_path / "prompts.jsonl"
    write(source, [{"prompt": "a", "stop": ["the", tiny.BEGIN]}])
    about = dict(tokenizer=made, stop=tiny.BEGIN)
    (job,) = read(source, **about)
    write(source, [{"prompt": "a"}])
    (other,) = read(source, **about)
    begin = made.encode(tiny.BEGIN, special=False)
    expected = (("the", tiny.BEGIN), (*made.stop_ids, *begin))
    (ours,), (theirs,) = job.requests, other.requests
    assert (ours.stop, ours.stop_ids) == expected
    assert (theirs.stop, theirs.stop_ids) == ((tiny.BEGIN,), expected[1])
    write(source, [{"prompt": "a", "stop_ids": [5]}])
    (own,) = read(source, **about)
    assert own.requests[0].stop_ids == (5, *begin)
    # what is no token is encoded as the special one that stands for all of these
    some = tokenizers.Tokenizer(tokenizers.models.BPE({"<unk>": 0, "a": 1}, [], unk_token="<unk>"))
    some.add_special_tokens(["<unk>"])
    some.decoder = tokenizers.decoders.Fuse()
    some = tokenizer.load(tiny.folder(tmp_path / "some", made=some))
    assert some.encode("é", special=False) == [0]
    assert ends(["é", "\udcff"], tokenizer=some)["stop_ids"] == ()


def read(file, **more):
    return jsonl.read(str(file), **{**READ, **more})


def digests(jobs):
    return {job.index: job.digest for job in jobs}


def lines_of(file):
    return sorted(file.read_bytes().splitlines())


def test_a_file_of_prompts_goes_on_after_a_kill(tmp_path):
    """Cut at random bytes, the answers of a second run are those of one that was left in peace."""
    source = tmp_path / "prompts.jsonl"
    out = tmp_path / "out.jsonl"
    source.write_text("\n\n".join(map(json.dumps, PROMPTS * 2)))
    jobs = read(source)
    ours = engine()
    asked = []

    def run():
        asked.append(0)

        def engine_for(left):
            asked[-1] = len(left)
            return ours

        jsonl.answer(jobs, file=str(out), engine_for=engine_for)

    run()
    expected = lines_of(out)
    content = out.read_bytes()
    by_index = {answer["index"]: answer for answer in map(json.loads, expected)}
    assert [by_index[i].get("id") for i in range(8)] == [None, "ü\ud800", 3, None] * 2
    assert [by_index[i]["new_tokens"] for i in (0, 1)] == [6, 9]
    assert (by_index[0]["prompt_tokens"], by_index[0]["finish_reason"]) == (5, "length")
    size = len(content)
    for cut in [size, 1, size - 1, *np.random.default_rng(0).integers(0, size, 12)]:
        out.write_bytes(content[:cut])
        run()
        assert lines_of(out) == expected
        assert asked[-1] == 8 - content[:cut].count(b"\n")


def test_answers_to_something_else_are_refused(tmp_path):
    source = tmp_path / "prompts.jsonl"
    out = tmp_path / "out.jsonl"
    source.write_text('{"prompt": "a"}\n')
    jobs = read(source)
    write(out, [jobs[0].line([decode.Result((1,), "b", None, Finish.LENGTH, 1)])])
    assert jsonl.answered(str(out), digests(jobs)).keys() == {0}
    for change in (
        dict(model="n"),
        dict(defaults=DecodeConfig(max_new_tokens=7)),
        dict(stop=("x",)),
    ):
        with refused("line 1 answers another prompt, model or setting"):
            jsonl.answered(str(out), digests(read(source, **change)))
    for foreign in (
        "my diary\n",
        "my diary",
        '{"index": 0}\n',
        # a user's own file of one line, which no newline ends
        '{"index": 0, "question": "2 + 2 =", "choices": ["3", "4"], "answer": 1}',
        '{"id": "batch_req_1", "prompt": "Once"}',
        "[]\n",
        '{"index": -1, "request": ""}\n',
    ):
        out.write_text(foreign)
        with refused("out.jsonl (line 1|holds)"):
            jsonl.answered(str(out), digests(jobs))
        assert out.read_text() == foreign


@pytest.mark.parametrize(
    "line, message",
    {
        "{": ":2: not JSON",
        "[]": ":2: each line must be an object such as",
        '{"prompt": ""}': ":2: the prompt is empty",
        '{"prompt": "a", "temprature": 1}': ":2: unknown setting 'temprature'; did you mean 'temperature'",
        '{"prompt": "a", "top_p": 2}': ":2: decode.top_p must be above 0 and at most 1",
        '{"prompt": "a", "top_k": "x"}': ":2: decode.top_k must be of type int, not",
        '{"prompt": "a", "stop": 1}': ":2: stop must be a list, not 1",
        '{"prompt": "\\ud800"}': ":2: half of a surrogate pair, which is no character",
    }.items(),
)
def test_mistakes_in_a_file_of_prompts(tmp_path, line, message):
    source = tmp_path / "prompts.jsonl"
    source.write_text('{"prompt": "a"}\n' + line)
    with refused(message):
        read(source)


def test_a_byte_order_mark(tmp_path):
    source = tmp_path / "prompts.jsonl"
    source.write_bytes(b"\xef\xbb\xbf" + '{"prompt": "é"}\r\n'.encode())
    (job,) = read(source)
    assert bytes(job.requests[0].prompt) == "é".encode()
