"""Which models may teach, and that a teacher computes what it computes by itself, whatever it
shares with a student.
"""

import json
import pathlib
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from ladder_jax import config
from ladder_jax.config import START, DistillConfig, RunConfig, TrainConfig
from ladder_jax.data import tokenizer
from ladder_jax.pretrained import OpenedModel
from ladder_jax.retrain import Retraining, Sources, loss, of_sources, sources
from ladder_jax.train.gradients import task_gradients
from tests import cases, experts, reference, tokenizers
from tests.pretrained import models
from tests.refusals import refused
from tests.test_objective import TOKENS, TWO, compute, define, shape

FROZEN = 1


def as_standard(definition, **changes):
    of_teacher = dict(residual="standard", ladder_layers=None, ranks=None) | changes
    return replace(definition, config=replace(definition.config, **of_teacher))


def divergence(student, teacher):
    """The mean of KL(teacher, student) over positions, of logits in float64."""
    logp = lambda scores: scores - jax.nn.logsumexp(scores, axis=-1, keepdims=True)
    return float((jnp.exp(logp(teacher)) * (logp(teacher) - logp(student))).sum(-1).mean())


def test_frozen_layers_of_a_teacher_that_communicates_less():
    """Its ranks' streams differ between two all-reduces, also in the layers that the student has
    frozen.
    """
    definition = define(tensor=2)
    teacher = as_standard(definition, residual="desync-2", ranks=2)
    params = cases.parameters(definition)
    plan = Retraining(definition, FROZEN, distill=DistillConfig(START), teacher=teacher)
    ((_, terms), _), _ = compute(plan, params)
    of_teacher = replace(shape(definition, "desync"), number=2, ranks=2)
    scores = [
        reference.evaluate(reference.logits, params, TOKENS[:, :-1], of)
        for of in (shape(definition, "ladder", (1,)), of_teacher)
    ]
    with jax.enable_x64(True):
        expected = divergence(*scores)
    assert cases.error(terms["divergence"], expected) < cases.bound(definition.config, passes=2)


def test_frozen_layers_whose_experts_drop_rows():
    """A student's experts drop rows in training, a teacher's none: the same as of a teacher with
    weights of its own.
    """
    moe = dict(experts.KINDS["shared"], capacity=0.5)
    definition = experts.define("hybrid-farskip", moe=moe, num_layers=2, tensor=2)
    params = cases.placed(definition)
    found = []
    for name in (START, "the same"):
        plan = Retraining(
            definition, FROZEN, distill=DistillConfig(name), teacher=as_standard(definition)
        )
        trained, frozen = plan.split(params, teacher=None if name == START else params)
        function = task_gradients(plan, config=TrainConfig(load_balance=0.0, router_z_loss=0.0))
        terms = jax.jit(lambda *args, f=function: f(*args)[0][1])(
            trained, frozen, experts.tokens(), {}
        )
        assert jnp.sum(terms["dropped"]) > 0
        found.append(float(terms["divergence"]))
    assert cases.error(*found) < cases.bound(definition.config, passes=2)


@pytest.mark.parametrize("changes, shared", [
    ({}, FROZEN),
    (dict(residual="desync-2"), 0),
    (dict(residual="no-communication"), 0),
    (dict(residual="parallel"), 0),
    (dict(residual="ladder"), 0),
], ids=str)  # fmt: skip
def test_what_a_teacher_inherits(changes, shared):
    """The stream after frozen layers that are standard in both."""
    definition = define()
    plan = Retraining(
        definition, FROZEN, distill=DistillConfig(START), teacher=as_standard(definition, **changes)
    )
    assert loss.shared_layers(plan) == shared
    assert loss.shared_layers(replace(plan, distill=DistillConfig("the same"))) == 0


@pytest.mark.parametrize(
    "capacity, shared",
    {
        None: FROZEN,
        2.5: 0,
        3.0: FROZEN,
    }.items(),
)
def test_what_a_teacher_with_experts_inherits(capacity, shared):
    """Of two of six experts, three times the mean rows are all."""
    moe = dict(experts.KINDS["shared"], capacity=capacity)
    definition = experts.define("hybrid-farskip", moe=moe)
    for of_teacher in (capacity, None):
        teacher = as_standard(definition, moe=replace(definition.config.moe, capacity=of_teacher))
        plan = Retraining(definition, FROZEN, distill=DistillConfig(START), teacher=teacher)
        assert loss.shared_layers(plan) == shared


def taught(definition, teacher, **distill):
    """The task of a run whose teacher's checkpoint has the model `teacher`; nothing of its weights
    is read.
    """
    opened = OpenedModel("theirs", pathlib.Path("theirs"), RunConfig(model=teacher), weights=None)
    settings = RunConfig(model=definition.config, distill=DistillConfig("theirs", **distill))
    found = Sources(teacher=opened)
    return of_sources(
        settings,
        definition=definition,
        teacher=sources.teacher_model(settings, found),
        sources=found,
    )


@pytest.mark.parametrize("residual", ["desync-2", "ladder-fresh"])
def test_a_teacher_is_computed_on_its_own_number_of_ranks(residual):
    """Or not at all: on another number it is another function."""
    student = as_standard(define(tensor=2))
    theirs = replace(student.config, residual=residual, ranks=4)
    wrong = rf"distill.teacher='theirs': .* {residual} .*ranks=4.* on 2 .*mesh.tensor=4.*distill.residual=standard"
    with refused(wrong):
        taught(student, theirs)
    assert taught(student, theirs, residual="standard").teacher.config.ranks is None
    assert taught(student, replace(theirs, ranks=2)).teacher.config.ranks == 2
    assert taught(cases.define("ladder-fresh", ranks=4, **TWO), theirs).teacher.layout.ranks == 4


def test_what_was_refitted_is_of_one_topology(tmp_path):
    """A Hugging Face export, too: no teacher in another one, and no start of a gradual
    conversion.
    """
    folder = models.write(tmp_path / "half", "llama-2")
    (tmp_path / "run.yaml").write_text("run: {name: run}")

    def of_run(*more):
        given = [f"train.start={folder}", "model.residual=ladder", *more]
        return sources.of_run(config.load(tmp_path / "run.yaml", overrides=given))

    named = f"distill.teacher={folder}"
    standard = "distill.residual=standard"
    for allowed in (
        ["distill.teacher=start", standard],
        ["conversion.steps=4"],
        [named, "distill.residual=ladder"],
    ):
        of_run(*allowed)
    (folder / "refit.json").write_text("{}")
    assert of_run(named, standard).teacher.refit
    assert of_run().start.refit
    other = "half' were refitted for standard, so they cannot teach as ladder; name the model"
    for more, said in (
        (["distill.teacher=start", "distill.residual=ladder"], other),
        ([named, "distill.residual=ladder"], other),
        (
            ["conversion.steps=4"],
            "conversion.steps=4: .*half' were refitted, .*train.start=PATH.*conversion.steps=0",
        ),
    ):
        with refused(said):
            of_run(*more)


def test_a_teacher_of_other_tokens(tmp_path):
    """Its vocabulary is as large, but its numbers stand for other texts. Unused tokens may differ,
    as they do between a folder and a GGUF file of one model.
    """
    (tmp_path / "run.yaml").write_text("run: {name: run}")
    folder = models.write(tmp_path / "model", "llama-2", vocab_size=320)
    given = [f"train.start={folder}", "model.residual=ladder", f"distill.teacher={folder}"]
    made = config.load(tmp_path / "run.yaml", overrides=given)
    of_data = tokenizer.load(tokenizers.folder(tmp_path / "data"))
    sources.of_run(made, tokenizer=of_data)  # it has none
    more = tokenizers.byte_level()
    more.add_tokens(["<unused>"])
    tokenizers.folder(folder, made=more)
    assert tokenizer.load(folder).name != of_data.name
    sources.of_run(made, tokenizer=of_data)
    told = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = told["model"]["vocab"]
    one, other = list(vocabulary)[-2:]
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    (folder / "tokenizer.json").write_text(json.dumps(told))
    for data in of_data, tokenizer.Bytes():
        with refused("distill.teacher=.* has another tokenizer than the da"):
            sources.of_run(made, tokenizer=data)
