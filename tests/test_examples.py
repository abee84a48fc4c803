"""JSON lines of examples: which tokens are learnt, how they are packed, and what is refused, by its
line.
"""

import datetime
import types

import numpy as np
import pytest
from tokenizers import processors

from ladder_jax.config import DataConfig, Format, TrainConfig
from ladder_jax.data import chat_template, dataset, examples, tokenizer as tokenizers
from ladder_jax.data.examples import render
from ladder_jax.data.packing import Batch
from tests import tokenizers as made
from tests.lines import write
from tests.refusals import refused

CHAT = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "naïve 東京 🙂"},
        {"role": "user", "content": "and"}, {"role": "assistant", "content": "on the mat"}]  # fmt: skip


@pytest.fixture(scope="module", params=["byte_level", "byte_fallback", "metaspace"])
def tokenizer(request, tmp_path_factory):
    return tokenizers.load(
        made.folder(tmp_path_factory.mktemp("t") / "t", made=getattr(made, request.param)())
    )


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory):
    return tokenizers.load(made.folder(tmp_path_factory.mktemp("t") / "t"))


def pieces(tokens, learnt, tokenizer):
    """The text of each stretch that is learnt."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], learnt.astype(int), [0]])))
    return [tokenizer.decode(tokens[a:b]).strip() for a, b in edges.reshape(-1, 2)]


def test_of_a_chat_the_assistants_turns_are_learnt(tokenizer):
    tokens, learnt = render({"messages": CHAT}, tokenizer=tokenizer, where="f:1")
    assert pieces(tokens, learnt, tokenizer) == ["naïve 東京 🙂", "on the mat"]
    # With the token that ends each turn, and as a prompt for the last answer begins.
    assert learnt[tokens == tokenizer.stop_ids[0]].tolist() == [False, True, False, True]
    prompt = tokenizer.chat(CHAT[:3])
    assert tokens[: len(prompt)].tolist() == prompt
    assert learnt[len(prompt) :].argmin() > 0
    assert learnt[len(prompt)]
    second = [*CHAT[:1], {**CHAT[1], "weight": 0}, *CHAT[2:]]
    weighed = render({"messages": second}, tokenizer=tokenizer, where="f:1")
    assert pieces(*weighed, tokenizer) == ["on the mat"]


def test_completions_and_texts(byte_level, tmp_path):
    tokens, learnt = render(
        {"prompt": "the cat ", "completion": "sat"}, tokenizer=byte_level, where="f:1"
    )
    assert tokens[0] == 0 and not learnt[0]  # the beginning of a text is given
    assert pieces(tokens, learnt, byte_level) == ["sat"]
    assert tokens[-1] == byte_level.stop_ids[0]
    assert learnt[-1]
    tokens, learnt = render({"text": "the cat", "id": 7}, tokenizer=byte_level, where="f:1")
    assert learnt[1:].all()
    assert tokens[-1] == byte_level.stop_ids[0]
    tokens, learnt = render(
        {"prompt": "é", "completion": "ü"}, tokenizer=tokenizers.load(None), where="f:1"
    )
    assert bytes(tokens.tolist()).decode() == "éü"
    assert learnt.tolist() == [False, False, True, True]
    trimming = made.byte_level()
    spaces = processors.ByteLevel(trim_offsets=True)
    trimming.post_processor = processors.Sequence([spaces, trimming.post_processor])
    trimmed = tokenizers.load(made.folder(tmp_path / "t", made=trimming))
    indented = {"prompt": "the  cat ", "completion": "on\n    the mat  "}
    assert trimmed.offsets("a  ", special=False)[1][-1] == (3, 3)
    ours, theirs = (render(indented, tokenizer=one, where="f:1") for one in (byte_level, trimmed))
    assert [part.tolist() for part in theirs] == [part.tolist() for part in ours]


@pytest.mark.parametrize(
    "example", [{"prompt": "the cat ", "completion": "sat"}, {"text": "the cat sat"}], ids=str
)
def test_a_text_ends_once(tmp_path, byte_level, example):
    """Also where the tokenizer itself puts an end around a text; and the end is learnt."""
    ending = made.byte_level()
    ends = [(made.BEGIN, byte_level.bos_token_id), (made.END, byte_level.stop_ids[0])]
    ending.post_processor = processors.TemplateProcessing(
        single=f"{made.BEGIN} $A {made.END}", special_tokens=ends
    )
    with_end = tokenizers.load(made.folder(tmp_path / "t", made=ending))
    ours, without = (render(example, tokenizer=one, where="f:1") for one in (with_end, byte_level))
    assert with_end.encode("a")[-1] == with_end.stop_ids[0] != byte_level.encode("a")[-1]
    assert [part.tolist() for part in ours] == [part.tolist() for part in without]
    assert ours[1][-1]


def load(path, *, tokenizer=None, length=12, began=None, **more):
    config = DataConfig(path=path, format=Format.EXAMPLES, **more)
    recipe = TrainConfig(batch=1, sequence=length, steps=1)
    return dataset.load(config, train=recipe, vocab_size=400, tokenizer=tokenizer, began=began)


def test_rows_hold_whole_examples_with_their_masks(tmp_path):
    given = [{"prompt": "p" * (1 + i % 3), "completion": "c" * (1 + i % 4)} for i in range(30)]
    found = load(write(tmp_path / "a.jsonl", given), validation_fraction=0.1)
    assert found.notes[0].startswith("30 examples")
    total = 0
    assert found.training_rows < 20
    for index in range(found.training_rows):
        row = found.training[index]
        batch = Batch(row.tokens[None], row.segments[None], row.loss_mask[None])
        predicted = batch.tokens[:, 1:][batch.predicted]
        assert set(predicted.tolist()) == {ord("c")}
        total += len(predicted)
    assert total == sum(len(one["completion"]) for one in given[:27])


def test_long_examples_are_cut_and_those_without_an_answer_left_out(tmp_path):
    given = {"text": "x" * 50}, {"prompt": "p" * 50, "completion": "c"}, {"text": "ab"}
    path = write(tmp_path / "a.jsonl", given)
    found = examples.load(path, tokenizer=tokenizers.load(None), length=12)
    assert len(found) == 2
    assert len(found.tokens) == 13 + 2
    assert "; 1 were cut at a row's end; 1 left out" in found.summary


def test_another_mask_is_other_data(tmp_path):
    one = [{"prompt": "a", "completion": "bc"}] * 4
    other = [{"prompt": "ab", "completion": "c"}] * 4
    a, b = (
        load(write(tmp_path / name, given))
        for name, given in (("a.jsonl", one), ("b.jsonl", other))
    )
    assert a.fingerprint != b.fingerprint


@pytest.mark.parametrize("content, said", {
    '{"text": "a"}\n[1]\n': "a.jsonl:2: not a JSON object but list",
    '{"text": "a"}\n\n{"txt": "b"}\n': r"a.jsonl:3: needs 'messages', .* this has 'txt'",
    '{"text": 5}\n': "a.jsonl:1: 'text' must be text, not int",
    "{\n": "a.jsonl:1: not JSON",
    '{"messages": [{"role": "user", "content": "a"}]}\n': "a.jsonl:1: no message has the role 'assistant'",
    '{"messages": [{"role": "bard", "content": "a"}]}\n': "a.jsonl:1: .*no role bard",
    '{"messages": []}\n': "a.jsonl:1: 'messages' must be a list of messages",
    '{"messages": ["a"], "tools": [{}]}\n': "a.jsonl:1: chat templates are not told of 'tools'",
    '{"messages": ["a"]}\n': "a.jsonl:1: a message must be such as",
    '{"messages": [{"role": "user", "content": [{}]}]}\n': "a.jsonl:1: a message must be such as",
    '{"text": "\\ud800"}\n': "a.jsonl:1: .*surrogates",
    '{"text": "abc"}\n': "has 1 examples",
    "": "has 0 examples",
}.items(), ids=str)  # fmt: skip
def test_what_is_no_example(tmp_path, byte_level, content, said):
    (tmp_path / "a.jsonl").write_text(content)
    with refused(said):
        load(str(tmp_path), tokenizer=byte_level)


def test_a_folder_without_examples_and_a_damaged_archive(tmp_path):
    (tmp_path / "._a.jsonl").write_text("hidden")
    with refused("holds no file"):
        load(str(tmp_path))
    (tmp_path / "stages.yaml").write_text("stages: [a.jsonl]")
    with refused("must be JSON lines, or a folder of them; to train on several in order"):
        load(str(tmp_path / "stages.yaml"))
    (tmp_path / "a.JSONL.gz").write_bytes(b"not gzip")
    with refused("cannot read .*: Not a gzipped file"):
        load(str(tmp_path))


def test_a_template_that_forgets_turns(tmp_path):
    """Of one that shows the last turn alone the earlier ones cannot be found in the whole; one whose
    answers do not begin as its prompts say is refused for one turn, too.
    """
    last = "{{ messages[-1].content if messages else '' }}"
    thinks = "{{ messages|length }}{% if add_generation_prompt %}<think>{% endif %}"
    for name, template, chat in (("last", last, CHAT), ("thinks", thinks, CHAT[:2])):
        folder = made.folder(tmp_path / name, template=template)
        with refused(
            "changes earlier turns when more follow, or begins an answer .* or edit the template"
        ):
            render({"messages": chat}, tokenizer=tokenizers.load(folder), where="f:1")


DATED = "{{ strftime_now('%d %b %Y %H:%M:%S') }}" + made.TEMPLATE
TURNS = {"messages": CHAT[:2]}


def test_examples_are_of_one_moment(tmp_path, monkeypatch):
    """A template that asks for the time is told when the run began, or else when the data was
    read.
    """
    tokenizer = tokenizers.load(made.folder(tmp_path / "t", template=DATED))
    seconds = iter(range(0, 10**6, 86_399))
    ticking = types.SimpleNamespace(now=lambda: datetime.datetime.fromtimestamp(next(seconds)))
    monkeypatch.setattr(chat_template, "datetime", types.SimpleNamespace(datetime=ticking))
    path = write(tmp_path / "a.jsonl", [TURNS] * 3)
    one, same, other, unsaid = (
        load(path, tokenizer=tokenizer, length=99, began=t) for t in (1e9, 1e9, 2e9, None)
    )
    assert one.fingerprint == same.fingerprint != other.fingerprint
    dates = [tokenizer.decode(data.training[0].tokens)[:20] for data in (one, other)]
    assert dates == ["09 Sep 2001 01:46:40", "18 May 2033 03:33:20"]  # in UTC, on every machine
    first, second = (unsaid.training[index].tokens.tolist() for index in range(2))
    assert first == second


def test_another_tokenizer_than_the_checkpoints(tmp_path, byte_level):
    folder = made.folder(tmp_path / "t", made=made.byte_fallback())
    path = write(tmp_path / "a.jsonl", [{"text": "a"}, {"text": "b"}])
    with refused("but the checkpoint that training starts from has"):
        dataset.load(
            DataConfig(path=path, format=Format.EXAMPLES, tokenizer=folder),
            train=TrainConfig(batch=1, sequence=8, steps=1),
            vocab_size=400,
            tokenizer=byte_level,
        )
