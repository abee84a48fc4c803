"""What `ladder-jax overlap` and `predict` compile of inference is what `generate`, serving and
benchmarks run: equal StableHLO; and what a token costs in collectives.
"""

import collections
import pickle

import pytest

from ladder_jax import decode, nn, parallel
from ladder_jax.config import Loop, Phase, Quantize
from ladder_jax.decode import Choice, steps
from ladder_jax.decode.engine import Engine, Request
from ladder_jax.overlap import programs, request as requests
from ladder_jax.parallel import Compiled
from ladder_jax.predict import measure
from ladder_jax.schedule import cost, hlo
from ladder_jax.schedule.collectives import KINDS
from tests import cases, starts
from tests.compilations import digest, would_compile
from tests.covering import full

PROMPT, SLOTS, CAPACITY = 32, 4, 48  # and room for a chunk: caches of 64 positions
LAYERS = 2


@pytest.fixture
def lowered(monkeypatch):
    """The digests of all that is called or compiled, by their traits' phase, in order."""
    found = collections.defaultdict(list)

    def noting(method):
        def noted(self, *arguments):
            phase = Phase.DECODE if len(arguments) == 6 else Phase.PREFILL
            found[phase].append(digest(self, arguments))  # before it consumes them
            return method(self, *arguments)

        return noted

    for name in "__call__", "compile":
        monkeypatch.setattr(Compiled, name, noting(getattr(Compiled, name)))
    return found


def asked(phase, **settings):
    form = dict(target="cpu:8", model="tiny", residual="ladder", layers=LAYERS)
    prompt = {} if phase is Phase.DECODE else dict(prompt_length=PROMPT)
    return requests.make(**form, phase=phase, **prompt, **settings)


def audited(phase, **settings):
    return programs.program(asked(phase, **settings))


def definition_of(phase):
    return nn.define(asked(phase).config, mesh=parallel.make_mesh(tensor=8))


@pytest.mark.parametrize(
    "loop, quantize",
    [
        (Loop.UNROLLED, Quantize.NONE),
        full(Loop.SCAN, Quantize.INT8),
    ],
    ids=str,
)
def test_the_engine_runs_the_audited_programs(loop, quantize, lowered):
    """Prefill, and each call of the token loop: the first, those after it, and those after a
    request has come.
    """
    form = dict(loop=loop, quantize=quantize)
    definition = definition_of(Phase.DECODE)
    engine = Engine(definition, cases.placed(definition), slots=SLOTS, capacity=CAPACITY, **form)
    first = engine.submit(Request([7] * PROMPT, max_new_tokens=16))
    engine.step()
    engine.submit(Request([8] * PROMPT, max_new_tokens=2))
    engine.run()
    assert len(first.result().tokens) == 16
    assert [len(found) for found in lowered.values()] == [2, 2]
    assert set(lowered[Phase.PREFILL]) == {digest(*audited(Phase.PREFILL, batch=1, **form))}
    assert set(lowered[Phase.DECODE]) == {
        digest(*audited(Phase.DECODE, batch=SLOTS, context=64, **form))
    }


def worked(phase, **settings):
    """The digest of what `overlap`'s compiling process lowers for these settings, given as that
    process gets them.
    """
    return would_compile(
        programs.record, pickle.loads(pickle.dumps(asked(phase, batch=1, **settings)))
    )


@pytest.mark.parametrize(
    "more, quantize",
    [
        (["--quantize", "int8", "--stream"], "int8"),
        full([], "none"),
    ],
)
def test_generate_runs_the_audited_programs(more, quantize, lowered, tmp_path, prints):
    """The verb's own words, from a checkpoint to text: its prefill, and each call of its token
    loop.
    """
    starts.save(tmp_path / "checkpoints", definition_of(Phase.DECODE))
    prints("generate", tmp_path, "--prompt", "a" * (PROMPT - 3), "--max-new-tokens", 35, *more)
    assert [len(found) for found in lowered.values()] == [1, 3]
    # 29 tokens, 35 new ones, and room for a chunk
    form = dict(context=96, quantize=Quantize(quantize))
    assert lowered[Phase.PREFILL] == [worked(Phase.PREFILL, **form)]
    assert set(lowered[Phase.DECODE]) == {worked(Phase.DECODE, **form)}


def test_generate_takes_a_launch(tmp_path, mistake):
    """Whatever the run's own is."""
    starts.save(tmp_path / "checkpoints", definition_of(Phase.DECODE))
    said = mistake("generate", tmp_path, *"--prompt a --launch explicit".split())
    assert "launch 'explicit' is for NVIDIA GPUs" in said


def test_bench_times_the_audited_programs(lowered, monkeypatch, prints):
    """Its caches hold the prompt and what is new, and its token loop makes all of that in one
    call.
    """
    for name in ("copy_bandwidth", "matmul_peak"):
        monkeypatch.setattr(measure, name, lambda *_, **__: measure.Ceiling((1.0,), "an array"))
    words = (
        f"bench --model tiny --layers {LAYERS} --residual ladder --tensor 8 --batch {SLOTS}"
        f" --prompt-length {PROMPT} --new-tokens 17 --warmup 1 --repeats 1"
    )
    prints(*words.split())
    positions = PROMPT + 17
    decoding = digest(*audited(Phase.DECODE, batch=SLOTS, context=positions))
    assert set(lowered[Phase.DECODE]) == {decoding}
    _, arguments = audited(Phase.PREFILL, batch=SLOTS)
    prefill = decode.prefill(definition_of(Phase.PREFILL), capacity=positions)
    assert set(lowered[Phase.PREFILL]) == {digest(prefill, arguments)}


def collectives(computation, *, branches):
    """How many run in one execution; of conditionals, by how deep they are nested, the branch with
    `max` or `min`.
    """
    total = 0
    for instruction in computation.instructions:
        total += instruction.opcode in KINDS
        below = instruction.calls
        if instruction.opcode == "conditional":
            total += branches[0](collectives(one, branches=branches[1:]) for one in below)
        elif instruction.opcode in ("while", "call"):
            total += cost.trip_count(instruction) * sum(
                collectives(one, branches=branches) for one in below
            )
    return total


def token_loop(choice, **mesh):
    """The compiled program of two layers, and a turn of its loop."""
    definition = cases.define("ladder", num_layers=LAYERS, **mesh)
    arguments = steps.abstract(definition, rows=4, positions=16, loop=Loop.UNROLLED)
    program = hlo.parse(decode.decode_many(definition, choice=choice).compile(*arguments).as_text())
    loops = [
        i
        for i in program.entry.instructions
        if i.opcode == "while" and "token_loop/while" in i.op_name
    ]
    return program, loops[0].calls[0]


MESHES = [
    dict(data=2, tensor=4),
    *(full(dict(tensor=n)) for n in (4, 8)),
]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_greedy_token_costs_one_collective_beside_the_embedding(mesh):
    program, turn = token_loop(Choice.GREEDY, **mesh)
    assert not any(one.opcode == "conditional" for one in program.instructions)
    assert collectives(turn, branches=()) == 2 * LAYERS + 2
    assert collectives(program.entry, branches=()) == 2 * LAYERS + 2  # and nothing outside the loop


@pytest.mark.parametrize("mesh, agree", [(dict(tensor=8), 0), (dict(data=2, tensor=4), 1)], ids=str)
def test_what_a_sampled_token_costs(mesh, agree):
    """Depths of the branches: whether anything is drawn, cut, cut deeper than the candidates reach,
    and by what.
    """
    program, turn = token_loop(Choice.SAMPLED, **mesh)
    greedy = 2 * LAYERS + 2
    for branches, more in (
        ((min, min, min, min), 0),  # greedy rows, with log-probabilities
        ((max, min, min, min), 0),  # a temperature alone
        ((max, max, min, min), 1 + agree),  # top-k, top-p, min-p: one gather
        ((max, max, max, max), 1 + agree + 8 + 10 + 1),
    ):
        assert collectives(turn, branches=branches) == greedy + more
    whole = collectives(program.entry, branches=(min,) * 4)
    assert whole - greedy == agree, "once a call: whether anyone draws"
