"""The sampler on split vocabularies against the definitions in NumPy float64: sorted, and in
probabilities.
"""

import functools
import itertools
import re

import jax
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from ladder_jax import decode, nn
from ladder_jax.config import DecodeConfig, Loop
from ladder_jax.decode import sampling, steps
from ladder_jax.parallel import on_mesh, over_ranks
from tests import cases, covering, engines

# ranks hold a multiple of SHARE: from tensor=8 on, some hold nothing but padding
VOCAB = 50
SHARE = 10
MESHES = {
    "1": dict(name="standard"),
    "2": dict(name="standard", tensor=2),
    "8": dict(name="standard", tensor=8),
    "2x4": dict(name="standard", data=2, tensor=4),
    "emulated": dict(name="ladder-fresh", ranks=4),
}
OFF = dict(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0)
ASKED = [
    {**OFF, "temperature": 0.7},
    {**OFF, "top_k": 5},
    {**OFF, "temperature": 1.5, "top_p": 0.8},
    {**OFF, "min_p": 0.1},
    {**OFF, "repetition_penalty": 1.7},
    {**OFF, "temperature": 0.8, "top_k": 20, "top_p": 0.7},
    {"temperature": 1.3, "top_k": 30, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.2},
    {**OFF, "temperature": 0.0, "repetition_penalty": 2.0},
]


def distribution(logits, seen, *, temperature, top_k, top_p, min_p, repetition_penalty):
    """The definitions, for one row: the probability of every token."""
    x = logits.astype(np.float64)
    x[seen] = np.where(x[seen] > 0, x[seen] / repetition_penalty, x[seen] * repetition_penalty)
    if temperature == 0:
        return np.eye(len(x))[x.argmax()]
    p = np.exp((x - x.max()) / temperature)
    if top_k:
        p[p < np.sort(p)[::-1][: min(top_k, len(p))][-1]] = 0
    p /= p.sum()
    if top_p < 1:
        falling = np.sort(p)[::-1]
        p[p < falling[np.argmax(np.cumsum(falling) >= top_p)]] = 0
    p[p < min_p * p.max()] = 0
    return p / p.sum()


def logits(rows, *, seed=0):
    return (2 * np.random.default_rng(seed).standard_normal((rows, VOCAB))).astype(np.float32)


@functools.cache
def compiled(mesh, kind="sample", count=sampling.COUNT):
    """(logits [B, VOCAB], settings, positions, seen) -> (tokens, log-probabilities), or scores cut:
    all on `mesh`.
    """
    layout = cases.define(**MESHES[mesh]).layout
    in_dims = ("BV", "B", "B", "BV")
    out_dims = {"sample": ("B", "B"), "greedy": "B"}.get(kind, "BV")

    def local(logits, settings, positions, seen):
        any_row = sampling.AnyRow.of(settings)
        if kind == "filtered":
            ask = dict(settings=settings, any_row=any_row, count=count)
            return sampling.filtered(logits, **ask, axes=layout.tensor)
        if kind == "greedy":
            return sampling.greedy(logits, settings=settings, seen_BV=seen, axes=layout.tensor)
        ask = dict(settings=settings, any_row=any_row, positions=positions, seen_BV=seen)
        return sampling.sample(logits, **ask, vocab_size=VOCAB, axes=layout.tensor)

    ranked = over_ranks(local, layout=layout, in_dims=in_dims, out_dims=out_dims)
    jitted = jax.jit(on_mesh(ranked, layout=layout, in_dims=in_dims, out_dims=out_dims))

    def call(logits, settings, positions=None, seen=None):
        positions = np.zeros(len(logits), np.int32) if positions is None else positions
        seen = np.zeros(logits.shape, bool) if seen is None else seen
        pad = ((0, 0), (0, -VOCAB % (SHARE * layout.ranks)))
        logits = np.pad(logits, pad, constant_values=-np.inf)
        return jax.tree.map(np.asarray, jitted(logits, settings, positions, np.pad(seen, pad)))

    call.jitted = jitted
    return call


def settings(asked, *, seed=0):
    keys = jax.random.split(jax.random.key(seed), len(asked))
    return sampling.Settings.of(keys, **{name: [one[name] for one in asked] for name in OFF})


CUTS = [
    OFF,
    *({**OFF, "top_k": top_k} for top_k in (1, 3, 4, 20, 49, 50, 51, 10**6)),
    *({**OFF, "top_p": top_p} for top_p in (0.9999, 0.5, 1e-9, 1e-38, 0.0)),
    *({**OFF, "min_p": min_p} for min_p in (1e-30, 0.1, 0.99, 1.0)),
    {**OFF, "top_k": 3, "top_p": 0.7},
    {**OFF, "top_k": 4, "top_p": 0.999},
    {**OFF, "top_k": 30, "top_p": 0.8, "min_p": 0.02},
    {**OFF, "top_p": 0.3, "min_p": 0.2},
]


DRAWS = 5000
COUNTS = [1, 4, sampling.COUNT]
DEEP = [("1", sampling.COUNT), ("2", 4), ("8", 1), ("2x4", 4), ("emulated", 1)]


@pytest.mark.parametrize(
    "mesh, count", covering.marked(itertools.product(MESHES, COUNTS), chosen=DEEP)
)
def test_candidates_cut_where_the_definitions_do(mesh, count):
    """All three at once. With few candidates a row, cuts lie deeper than these, and are found digit
    by digit.

    Of scores that are plain, steep (no float32 sum holds the tail), with many equals, with some at
    -inf, and all equal (both zeros).
    """
    plain = logits(len(CUTS))
    some = np.where(np.arange(VOCAB) % 3 == 1, plain, -np.float32(np.inf))
    zeros = np.where(plain > 0, np.float32(0), -np.float32(0))
    for scores in (plain, 30 * plain, np.round(plain), some, zeros):
        out = compiled(mesh, "filtered", count)(scores, settings(CUTS))
        none = np.zeros(VOCAB, bool)
        expected = (
            np.array(
                [distribution(row, none, **one) for row, one in zip(scores, CUTS, strict=True)]
            )
            > 0
        )
        assert_array_equal(out[:, :VOCAB] > -np.inf, expected)
        assert_array_equal(out[:, :VOCAB][expected], scores[expected])
        assert np.isneginf(out[:, VOCAB:]).all()


def test_nothing_sorts_or_gathers_the_vocabulary():
    """The compiled program has XLA's kernel for the largest scores, and sorts no more than was
    gathered of them: of each of 8 ranks the candidates and their mass, and 5 numbers a row.
    """
    scores = np.zeros((2, 8 * 4096), np.float32)
    count = sampling.COUNT
    rest = settings([{**OFF, "top_k": 50}] * 2), np.zeros(2, np.int32), np.zeros(scores.shape, bool)
    program = compiled("8").jitted.lower(scores, *rest).compile().as_text()
    assert 'custom_call_target="TopK"' in program
    assert "all-to-all" not in program
    assert re.findall(r"(\w+\[[\d,]*\])\S* sort\(", program) == [f"f32[2,{8 * count}]"]
    gathered = re.findall(r"= \w+\[([\d,]+)\]\S* all-gather", program)
    assert sorted(gathered) == [f"8,2,{count + 1}", "8,5,2"]


def test_draws_have_the_distribution_that_was_asked_for():
    """And log-probabilities are of the logits as given."""
    draws = DRAWS
    values = np.repeat(logits(1), len(ASKED), 0)
    seen = np.repeat(np.random.default_rng(2).random((1, VOCAB)) < 0.4, len(ASKED), 0)
    many = lambda rows: np.repeat(np.asarray(rows), draws, 0)
    tokens, logprobs = compiled("2")(many(values), settings(many(ASKED)), None, many(seen))
    given = values[0].astype(np.float64)
    of_given = given - np.log(np.exp(given).sum())
    assert_allclose(logprobs, of_given[tokens], rtol=1e-5)
    for asked, row, drawn in zip(ASKED, seen, tokens.reshape(-1, draws), strict=True):
        expected = draws * distribution(values[0], row, **asked)
        counts = np.bincount(drawn, minlength=VOCAB)
        assert not counts[expected == 0].any(), asked
        rare = (expected > 0) & (expected < 5)  # too few for the statistic: counted together
        bins = [
            *zip(counts[expected >= 5], expected[expected >= 5]),
            (counts[rare].sum(), expected[rare].sum()),
        ]
        chi_squared = sum((count - mean) ** 2 / mean for count, mean in bins if mean)
        freedom = sum(mean > 0 for _, mean in bins) - 1
        # five standard deviations
        assert abs(chi_squared - freedom) <= 5 * np.sqrt(2 * freedom), asked


def test_a_temperature_beyond_all_measure_is_a_uniform_draw():
    """Over some, a logit is zero; the padding's must not become so."""
    draws, temperatures = 2 * DRAWS, (1e6, 1e15, 1e30, 1e38)  # as many rows as above: one program
    asked = np.repeat([{**OFF, "temperature": one} for one in temperatures], draws, 0)
    tokens, _ = compiled("2")(np.repeat(logits(1), len(asked), 0), settings(asked))
    for drawn in tokens.reshape(-1, draws):
        counts = np.bincount(drawn, minlength=VOCAB)
        assert len(counts) == VOCAB
        assert abs(counts - draws / VOCAB).max() <= 6 * np.sqrt(draws / VOCAB)


def test_the_noise_is_finer_than_2_to_minus_23():
    """In steps of 2**-23 a tenth was drawn of 128,000 tokens that together have 0.5 %."""
    keys, positions = jax.random.split(jax.random.key(0), 1), np.zeros(1, np.int32)
    noise = sampling._noise(keys, positions, size=2**17, vocab_size=2**17, axes=())
    rarest = np.exp(-np.sort(np.asarray(noise, np.float64))[0, -100:])
    steps = -np.expm1(-rarest) * 2**23
    assert abs(steps - np.round(steps)).max() > 0.1


def test_neither_the_mesh_nor_the_neighbours_change_a_row():
    values = logits(16)
    rows = np.arange(16)
    seen = np.random.default_rng(3).random((16, VOCAB)) < 0.3
    ask = lambda which: settings([ASKED[i] for i in which], seed=4)
    expected, logprobs = compiled("1")(values, ask(rows % 8), rows, seen)
    shifted = compiled("1")(values, ask(rows % 8), rows + 1, seen)[0]
    assert (expected[rows % 8 != 7] != shifted[rows % 8 != 7]).any()
    assert_array_equal(expected[rows % 8 == 7], shifted[rows % 8 == 7])
    for mesh in ("1", "8", "2x4", "emulated"):
        tokens, same = compiled(mesh)(values, ask(rows % 8), rows, seen)
        assert_array_equal(tokens, expected)
        assert_allclose(same, logprobs, rtol=1e-5)
        # 7: one data shard draws nothing
        for kept, others in ((rows % 2 == 0, (rows + 3) % 8), (rows >= 8, 7)):
            tokens, _ = compiled(mesh)(values, ask(np.where(kept, rows % 8, others)), rows, seen)
            assert_array_equal(tokens[kept], expected[kept])
            assert not np.array_equal(tokens, expected)


def test_a_neighbour_s_search_does_not_cut_elsewhere():
    """The search adds up in another order: of a nucleus that ends at p itself, it may keep less."""
    values = 3 * logits(64)
    falling = np.exp(np.sort(values)[:, ::-1] - values.max(1, keepdims=True))
    reached = falling[:, :3].sum(1) / falling.sum(1)
    asked = [{**OFF, "top_p": float(one)} for one in reached]
    cut = compiled("1", "filtered", 8)
    alone = cut(values, settings(asked))
    assert_array_equal(cut(values, settings([*asked[:-1], {**OFF, "top_k": 20}]))[:-1], alone[:-1])


@pytest.mark.parametrize("mesh", ["1", "2x4", "emulated"])
def test_logits_that_are_no_numbers_give_no_token(mesh):
    """Greedy or drawn, cut or not, in whichever rank's share; the rows beside them are as they
    were. Of equal logits, one rank's or several ranks', the first is taken.
    """
    values = logits(16)
    rows = np.arange(16)
    values[8, [3, 45]] = values[15, [41, 42]] = 10
    ask = settings([ASKED[row % 8] for row in rows])
    expected = compiled(mesh)(values, ask)[0]
    greedy = compiled(mesh, "greedy")(values, ask)
    assert (expected >= 0).all()
    assert (greedy == values.argmax(1)).all()
    assert (greedy[8], expected[15]) == (3, 41)
    worse = values.copy()
    worse[0:8, 49], worse[0:8, 3] = np.nan, np.inf
    worse[1], worse[2, 5], worse[3, 7], worse[3, 3] = -np.inf, np.nan, np.inf, 0
    tokens, logprobs = compiled(mesh)(worse, ask)
    for found, usual in ((tokens, expected), (compiled(mesh, "greedy")(worse, ask), greedy)):
        assert_array_equal(found, np.where(rows < 8, sampling.NO_NUMBER, usual))
    assert np.isfinite(logprobs[8:]).all()


@pytest.mark.parametrize("temperature", [2e-38, 1e-37, 1e-30])
def test_the_lowest_temperatures_take_the_largest_logit(temperature):
    """Over them a logit is infinite, several are alike, and the first of those was taken."""
    values = 20 + logits(16)
    for cuts_ in (OFF, {**OFF, "top_k": 5}, {**OFF, "top_p": 0.5, "min_p": 0.01}):
        tokens, logprobs = compiled("8")(
            values, settings([{**cuts_, "temperature": temperature}] * 16)
        )
        assert_array_equal(tokens, values.argmax(1))
        assert np.isfinite(logprobs).all()


@pytest.mark.parametrize("mesh", ["1", "2x4", "emulated"])
def test_seen_holds_the_prompt(mesh):
    definition = cases.define(**MESHES[mesh])
    tokens, lengths = cases.tokens((4, 12)), np.array([12, 1, 5, 11], np.int32)
    expected = np.zeros((4, nn.padded_vocabulary(251, ranks=definition.layout.ranks)), bool)
    for row, prompt, length in zip(expected, tokens, lengths, strict=True):
        row[prompt[:length]] = True
    assert_array_equal(steps.seen_in(definition)(tokens, lengths), expected)


def test_one_compilation_serves_all_settings():
    sample = compiled("8")
    values = logits(16)
    sample(values, settings(2 * ASKED))
    before = sample.jitted._cache_size()
    for asked in ASKED:
        sample(values, settings([asked] * 16))
    assert sample.jitted._cache_size() == before


PROMPT = [5, 6, 7]


@functools.cache
def generator():
    definition, params = engines.parts(tensor=4)
    return decode.Generator(definition, params, loop=Loop.SCAN), definition, params


def test_decoding_penalises_and_scores_each_token_by_all_before_it():
    """Greedy with a penalty and without, in several chunks, from logits of a pass over all that
    came before.
    """
    ours, definition, params = generator()
    different = []
    for penalty in (1.0, 1.5):
        asked = decode.Request(PROMPT, max_new_tokens=20, repetition_penalty=penalty, logprobs=True)
        pieces = list(ours.pieces(asked))
        assert len(pieces) > 2
        new = sum((piece.tokens for piece in pieces), ())
        text = np.array([*PROMPT, *new])
        full = np.asarray(nn.compiled_logits(definition)(params, text[None]), np.float64)[
            0, :, :251
        ]
        for at, logprob in enumerate(sum((piece.logprobs for piece in pieces), ()), len(PROMPT)):
            x = full[at - 1]
            assert logprob == pytest.approx(x[text[at]] - np.log(np.exp(x).sum()), rel=1e-3)
            chosen = {**OFF, "temperature": 0.0, "repetition_penalty": penalty}
            assert distribution(x, np.isin(np.arange(251), text[:at]), **chosen)[text[at]] == 1
        different.append(len(set(new)))
    assert different[1] > different[0]


def test_generation_reads_every_setting():
    ours, *_ = generator()
    ask = lambda **more: ours.tokens([PROMPT], config=DecodeConfig(max_new_tokens=20, **more))
    greedy = ask()
    warm = ask(temperature=5.0)
    assert not np.array_equal(greedy, warm)
    with jax.default_prng_impl("rbg"):  # whose draws depend on the rows beside
        assert_array_equal(ask(temperature=5.0), warm)
    for one in (dict(top_k=1), dict(top_p=1e-6), dict(min_p=1.0)):
        assert_array_equal(ask(temperature=5.0, **one), greedy)
    assert len({*PROMPT, *ask(repetition_penalty=1e6)[0]}) == len(PROMPT) + 20
