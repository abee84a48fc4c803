"""Every number of an evaluation against one that is computed from the reference's logits, in
float64.
"""

import math

import jax
import numpy as np
import pytest

from ladder_jax import evaluate, nn
from ladder_jax.decode import Finish, Request, Result
from ladder_jax.decode.request import ends
from ladder_jax.errors import RunFailed
from ladder_jax.evaluate import Model, Question, Scorer, Span, scorer as scorers
from ladder_jax.evaluate.model import prefix_of
from ladder_jax.evaluate.perplexity import windows
from tests import cases, compilations
from tests.covering import full
from tests.evaluate.conftest import WINDOW, Exact, rows_of
from tests.refusals import refused
from tests.tokenizers import BEGIN, END

TOLERANCE = 1e-4  # nats a token; float32, logits of about 10
TEXT = (
    "the cat sat on the mat, and the rat sat on the cat.\nnaïve café, 東京 🙂 and   three spaces\n"
    * 3
)


def spans():
    rng = np.random.default_rng(0)
    for _ in range(11):
        length = int(rng.integers(2, WINDOW + 2))
        cut = int(rng.integers(1, length))
        tokens = rng.integers(0, 303, length).tolist()
        yield Span(tokens[:cut], tokens[cut:])


@pytest.mark.parametrize(
    "name, how",
    [
        ("ladder", dict(data=2, tensor=4)),
        # test_checkpoint has such logits, too
        full("ladder-fresh", dict(ranks=4)),
    ],
)
def test_scores(name, how, monkeypatch):
    """In batches of several lengths and in chunks of positions; each span's score is the same
    alone.
    """
    monkeypatch.setattr(scorers, "CHUNK", 50)
    scorers.compiled_scores.cache_clear()
    definition = cases.define(name, num_layers=2, vocab_size=303, **how)
    params = cases.parameters(definition)
    exact = Exact(params, cases.shape(name, definition.config, ranks=4))
    scorer = Scorer(definition, cases.place(params, definition), batch_tokens=256)
    asked = list(spans())
    found = dict(scorer.scores(asked))
    assert sorted(found) == list(range(len(asked)))
    for index, span in enumerate(asked):
        loglikelihood, _ = exact.scores(span.context, span.scored)
        assert abs(found[index].loglikelihood - loglikelihood) < TOLERANCE * len(span.scored)
        assert len(found[index].logprobs) == len(span.scored)
    scorers.compiled_scores.cache_clear()


def test_greedy(model, exact):
    """A span is greedy where each of its tokens is the most probable one."""
    best = int(exact.logits(np.full((1, WINDOW), 5, np.int32))[0, 0].argmax())
    for scored, greedy in (([best], True), ([best, 7], False), ([7], False)):
        ((_, found),) = model.scorer.scores([Span([5], scored)])
        assert found.greedy == exact.scores([5], scored)[1] == greedy


@pytest.mark.parametrize("window, stride", [(1, 1), (7, 1), (7, 3), (7, 7), (40, 7), (41, 41)])
def test_each_token_is_scored_once(window, stride):
    tokens = list(range(40))
    scored = lambda spans: [token for span in spans for token in span.scored]
    first, *others = windows(tokens, prefix=99, window=window, stride=stride)
    assert scored([first, *others]) == tokens
    assert first.length <= window
    assert all(len(span.scored) <= stride for span in others)
    assert {span.length for span in others} <= {window}  # all the context that there is room for
    assert scored(windows(tokens, prefix=None, window=window, stride=stride)) == tokens[1:]


@pytest.mark.parametrize(
    "message, how",
    {
        "window must be at least 1, not 0": dict(window=0, stride=0),
        "stride must be at least 1, not 0": dict(window=8, stride=0),
        "window must be a whole number, not 8.0": dict(window=8.0),
        "stride must be a whole number, not True": dict(window=8, stride=True),
        "prefix must be a whole number, not 'a'": dict(prefix="a"),
    }.items(),
)
def test_wrong_windows(how, message):
    with refused(message):
        list(windows([1, 2], **{"prefix": 0, "window": 8, "stride": 8, **how}))


def test_sliding_windows(model, pieces, exact):
    """Of two documents; each token's own context is worked out here, token by token."""
    stride = 20
    total = count = 0
    for text in (TEXT, "a rat "):
        tokens = [pieces.bos_token_id, *pieces.encode(text)]
        for place in range(1, len(tokens)):
            strides = math.ceil(max(0, place - WINDOW) / stride)
            # of the window that scores it
            last = min(WINDOW + strides * stride, len(tokens) - 1) if strides else WINDOW
            loglikelihood, _ = exact.scores(
                tokens[max(0, last - WINDOW) : place], tokens[place : place + 1]
            )
            total -= loglikelihood
            count += 1
    found = evaluate.text_perplexity(model, [TEXT, "a rat ", ""], stride=stride)
    assert (found.tokens, found.documents, found.window, found.stride) == (count, 2, WINDOW, stride)
    assert abs(found.loss - total / count) < TOLERANCE
    assert found.perplexity == pytest.approx(math.exp(total / count), rel=TOLERANCE)
    assert found.loss_stderr > 0


def test_perplexity_of_tokens(model, exact):
    """From whatever a user has at hand; without a prefix the first token is not scored."""
    tokens = cases.tokens((1, 40), vocab=256)[0]
    loss = -exact.scores(tokens[:1].tolist(), tokens[1:].tolist())[0] / 39
    for one in (nn.Transformer(model.definition.config, params=model.params), model, model.scorer):
        found = evaluate.perplexity(one, tokens)
        assert found.tokens == 39
        assert abs(found.loss - loss) < TOLERANCE
        assert found.words is None
    twice = evaluate.perplexity(model, [tokens, tokens], prefix=7)
    alone = -exact.scores([7], tokens.tolist())[0] / 40
    assert (twice.documents, twice.tokens) == (2, 80)
    assert abs(twice.loss - alone) < TOLERANCE
    assert twice.loss_stderr == pytest.approx(0, abs=TOLERANCE)


def test_other_parameters_compile_nothing(model):
    tokens = cases.tokens((1, 150))[0]
    first = evaluate.perplexity(model.scorer, tokens, window=50)
    other = Scorer(model.definition, jax.tree.map(lambda a: a * 1.1, model.params))
    with compilations.counted() as compiled:
        second = evaluate.perplexity(other, tokens, window=50)
    assert not compiled
    assert second.loss != first.loss


@pytest.mark.parametrize(
    "tokens, message",
    [
        ([], "holds no token to score"),
        ([3], "holds no token to score"),
        ([1, 303], "the token 303, outside the model's vocabulary of 303"),
    ],
)
def test_tokens_that_cannot_be_scored(tokens, message, model):
    with refused(message):
        evaluate.perplexity(model, tokens)


def test_too_large_for_a_float():
    huge = evaluate.Perplexity(1000, 9.0, 8103.0, None, 1, 1, 8, 8).of_texts(["x" * 3000])
    assert huge.word_perplexity is None
    assert huge.bits_per_byte > 0


def test_the_beginning_stands_once(model, pieces):
    assert model.encode(BEGIN + "x") == [pieces.bos_token_id, *pieces.encode("x", special=False)]


def test_prefix(pieces, bytes_model):
    assert prefix_of(pieces) == pieces.encode("x")[0]
    assert prefix_of(bytes_model.tokenizer) == ord("\n")
    of = lambda **changes: type("Other", (type(bytes_model.tokenizer),), changes)()
    assert prefix_of(of(stop_ids=(9, 8))) == 9
    with refused("--prefix-token ID names one"):
        prefix_of(of(name="tokenizer-1"))


def test_what_is_taken_from_an_answer_and_right(bytes_model, monkeypatch, tmp_path):
    """But for commas, dollar signs, capitals and a last point."""
    # text, right answer, what is taken strictly and of any last number, whether the strict one is
    # right
    answers = [
        ("so #### 1,234. The end", "1,233 + 1\n#### 1234", "1,234.", "1,234.", True),
        ("#### 18 and #### -8", "#### $18", "18", "-8", True),
        ("it is $18.50", "#### 18.50", "[invalid]", "$18.50", False),
        ("#### 18.0", "#### 18", "18.0", "18.0", False),
        ("", "#### 18", "[invalid]", "[invalid]", False),
    ]
    results = [Result((), text, None, Finish.STOP, 1) for text, *_ in answers]
    monkeypatch.setattr(
        Model, "answers", lambda model, asked, slots: ((index, results[index]) for index in asked)
    )
    questions = [Question(line, "q", gold) for line, (_, gold, *_) in enumerate(answers)]
    out = tmp_path / "out.jsonl"
    found = evaluate.generation(bytes_model, questions, max_new_tokens=8, file=str(out))
    rows = rows_of(out)
    assert [[row["strict"], row["flexible"], row["right"]] for row in rows] == [
        taken for _, _, *taken in answers
    ]
    assert (found.accuracy, found.accuracy_normalised) == (
        2 / 5,
        np.mean([row["right_flexible"] for row in rows]),
    )


def test_generation(model, pieces, tmp_path):
    """What is judged is the engine's greedy text; a prompt is cut on its left, and special tokens
    end a text.
    """
    questions = [
        Question(1, "the cat sat on", "#### 5"),
        Question(2, TEXT, "5"),
        Question(3, "", "5"),
    ]
    alone = []
    engine = model.engine(capacity=WINDOW, slots=3)
    for question in questions:
        prompt = pieces.encode(question.prompt)[-(WINDOW - 12) :]
        request = Request(prompt, max_new_tokens=12, stop_ids=pieces.stop_ids, stop=["the"])
        alone.append(engine.submit(request).result().text)
    out = tmp_path / "out.jsonl"
    how = dict(max_new_tokens=12, stop=["the"], slots=3, file=str(out))
    found = evaluate.generation(model, questions, **how)
    assert (found.examples, found.truncated) == (3, 1)
    assert {row["index"]: row["text"] for row in rows_of(out)} == dict(enumerate(alone))
    stops = ends([END, "the", BEGIN], tokenizer=pieces)["stop_ids"]
    assert stops == (*pieces.stop_ids, pieces.stop_ids[0], pieces.bos_token_id)


def test_weights_that_are_no_numbers(model):
    params = jax.tree.map(lambda a: a * np.float32(np.nan), model.params)
    with pytest.raises(RunFailed, match="log-probabilities are no numbers"):
        evaluate.perplexity(Scorer(model.definition, params), [1, 2, 3])
