"""One prompt: a Generator gives what an Engine gives, and `ladder-jax generate --prompt` uses no
engine.
"""

import dataclasses
import functools
import json

import numpy as np
import pytest

from ladder_jax import cli, decode
from ladder_jax.config import DecodeConfig, Loop, Quantize
from ladder_jax.decode import Choice, Engine, Finish, Generator, NoNumbers, Request, steps
from tests import cases, starts
from tests.engines import DECODER, parts
from tests.lines import write

CAPACITY = 48  # with the last chunk, caches of 64 positions: as long as the generator's
FORMS = {
    "1": (dict(tensor=1), dict(loop=Loop.UNROLLED)),
    "2, scan, int8": (dict(tensor=2, num_layers=2), dict(loop=Loop.SCAN, quantize=Quantize.INT8)),
}
FILTERED = dict(
    temperature=0.9, top_k=9, top_p=0.9, min_p=0.01, repetition_penalty=1.2, seed=7, logprobs=True
)


@functools.cache
def both(form="1", poison=None):
    """A Generator and an Engine with the same parameters, as functions that start a request."""
    mesh, how = FORMS[form]
    definition, params = parts(poison=poison, **mesh)
    generator = Generator(definition, params, **how)
    engine = Engine(definition, params, slots=2, capacity=CAPACITY, decoder=DECODER, **how)
    return lambda request: generator.pieces(request, decoder=DECODER), engine.submit


def finished(started):
    """The pieces and the result of what `pieces` or `submit` returned."""
    if isinstance(started, decode.Handle):
        return list(started), started.result()
    found = []
    while True:
        try:
            found.append(next(started))
        except StopIteration as end:
            return found, end.value


def check_equal(ours, engines):
    """Tokens, text and pieces exactly; log-probabilities within the rounding of sums over caches of
    two lengths.

    Gives the result.
    """
    (pieces, result), (others, expected) = finished(ours), finished(engines)
    without = functools.partial(dataclasses.replace, logprobs=None)
    assert without(result) == without(expected)
    assert list(map(without, pieces)) == list(map(without, others))
    assert "".join(piece.text for piece in pieces) == result.text
    if expected.logprobs is not None:
        assert sum((piece.logprobs for piece in pieces), ()) == result.logprobs
        limit = 10 * cases.bound(cases.model(num_layers=2))  # logits of up to about 10
        np.testing.assert_allclose(result.logprobs, expected.logprobs, rtol=0, atol=limit)
    return result


# Four ranks, unrolled: in test_decode.py.
@pytest.mark.parametrize(
    "form, settings",
    [("1", dict(seed=0)), ("1", FILTERED), ("2, scan, int8", dict(temperature=1.2, seed=5))],
)
def test_a_generator_gives_what_an_engine_gives(form, settings):
    generate, serve = both(form)
    for length, new in ((1, 40), (40, 1), (30, 18)):
        request = Request(cases.tokens((1, 40))[0][:length], max_new_tokens=new, **settings)
        whole = check_equal(generate(request), serve(request))
        assert len(whole.tokens) == new
        assert whole.finish is Finish.LENGTH
    request = dataclasses.replace(request, stop=(whole.text[5:8],))
    assert check_equal(generate(request), serve(request)).finish is Finish.STOP


@pytest.mark.parametrize("temperature, choice", [(0.0, Choice.GREEDY), (0.7, Choice.SAMPLED)])
def test_the_programs_are_those_of_the_choice(temperature, choice, monkeypatch):
    """Of the greedy one they draw nothing and sort nothing."""
    asked = []
    for name in ("sample_first", "decode_many"):
        make = getattr(steps, name)

        def noted(definition, make=make, **form):
            asked.append(form["choice"])
            return make(definition, **form)

        monkeypatch.setattr(steps, name, noted)
    definition, params = parts(tensor=1)
    config = DecodeConfig(max_new_tokens=2, temperature=temperature)
    Generator(definition, params).tokens([[1, 2]], config=config)
    assert asked == [choice] * 2


def test_data_ranks_compute_the_same():
    """Of copies of one row; an engine has one replica only."""
    request = Request([1, 2, 3], max_new_tokens=20, temperature=1.0, seed=3)
    generator = Generator(*parts(data=2, tensor=2))
    check_equal(generator.pieces(request, decoder=DECODER), both()[0](request))


def test_logits_without_numbers_end_the_pieces():
    """The tokens before the error are given."""
    whole = both()[1](Request([1, 2, 3], max_new_tokens=18, seed=0)).result().tokens
    poison = whole[2]
    assert poison not in (1, 2, 3, *whole[:2])
    for start in both(poison=poison):
        for settings in (dict(), dict(logprobs=True)):
            found = []
            with pytest.raises(NoNumbers, match="no numbers .NaN or infinite. after 3 new tokens"):
                for piece in start(Request([1, 2, 3], max_new_tokens=18, seed=0, **settings)):
                    found.extend(piece.tokens)
            assert tuple(found) == whole[:3]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A checkpoint for bytes."""
    folder = tmp_path_factory.mktemp("run")
    starts.save(folder / "checkpoints", cases.define("ladder", num_layers=1, vocab_size=256))
    return folder


ASKED = "--temperature 1.3 --top-k 30 --seed 4 --stop e --repetition-penalty 1.2".split()


def test_one_prompt_uses_no_engine(run, tmp_path, prints, monkeypatch):
    """Printed at once or streamed, its text is that of a file's line, which the engine answers."""
    words = ["generate", str(run), "--max-new-tokens", "40", "--tensor", "1", *ASKED]
    prompts = tmp_path / "prompts.jsonl"
    out = tmp_path / "out.jsonl"
    write(prompts, [{"prompt": "the cat"}])
    prints(*words, "--prompts", prompts, "--out", out)
    expected = f"the cat{json.loads(out.read_text())['text']}\n"

    def used(*_, **__):
        raise AssertionError("an engine")

    monkeypatch.setattr(Engine, "__init__", used)
    for more in ([], ["--stream"]):
        assert prints(*words, "--prompt", "the cat", *more) == expected
    # the control: two prompts do
    with pytest.raises(AssertionError, match="an engine"):
        cli.main([*words, "--prompt", "the cat", "--prompt", "the cat"])


def test_a_prompt_without_numbers(tmp_path, capsys, monkeypatch):
    """A stream shows what came before."""
    definition = cases.define("ladder", num_layers=1, vocab_size=256)
    values = cases.parameters(definition)
    values["embedding"]["table"][ord("z")] = np.nan
    monkeypatch.setattr(cases, "parameters", lambda _: values)
    starts.save(tmp_path / "checkpoints", definition)
    error = "the model's logits are no numbers (NaN or infinite) after 0 new tokens: there is no next one\n"
    for more, shown in ([], ""), (["--stream"], "z"):
        assert cli.main(["generate", str(tmp_path), "--prompt", "z", *more]) == 1
        assert capsys.readouterr() == (shown, f"ladder-jax: {error}")
