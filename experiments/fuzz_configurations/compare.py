"""Runs one case: its training step against the reference, and what else was drawn for it."""

import collections
import dataclasses
import functools
import pathlib
import tempfile
import time
import traceback
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.fuzz_configurations import expected
from experiments.fuzz_configurations.draw import Case, Outcome, override
from experiments.fuzz_configurations.expected import Question, Teacher
from experiments.fuzz_configurations.program import Program, batch_of, placed
from ladder_jax import config as configs, decode, nn, train
from ladder_jax.config import (
    Dtype,
    ExpertParallelism,
    Loop,
    ModelConfig,
    Quantize,
    RunConfig,
)
from ladder_jax.decode import weights
from ladder_jax.errors import UserError
from ladder_jax.parallel import make_mesh
from ladder_jax.train.gradients import held_out_loss
from tests import cases, one_step, reference, rounding

LENGTHS = np.array([1, 4, 6, 3], np.int32)
NEW = 2
READ = 8
BY_RANKS = ("fresh", "desync", "none")  # functions that depend on the ranks


class Beyond(Exception):
    """Numbers beyond their bound."""


def outcome(case: Case) -> Outcome:
    began = time.perf_counter()
    done = []
    try:
        with warnings.catch_warnings(), jax.numpy_rank_promotion("raise"):
            warnings.simplefilter("error")
            Run(case, done).check()
        what = "ran"
        said = ""
    except UserError as error:
        what = "refused"
        said = str(error)
    except Exception as error:  # whatever a program raises is what we look for
        frames = [] if isinstance(error, Beyond) else traceback.extract_tb(error.__traceback__)[-6:]
        places = [f"  {frame.filename}:{frame.lineno} {frame.name}" for frame in frames]
        what = "failed"
        said = "\n".join([f"{type(error).__name__}: {error}", *places])
    return Outcome(what, said, tuple(done), time.perf_counter() - began)


def load(preset: str, settings: dict[str, Any]) -> RunConfig:
    return configs.load(preset, overrides=[*map(override, settings.items())])


@dataclasses.dataclass(frozen=True, eq=False)
class Run:
    case: Case
    done: list[str]

    def check(self) -> None:
        first = self.first
        state, frozen = first.begin(step=self.case.step)
        state, *found = first.advance(state, frozen, self.batch(0))
        finite(found)
        if self.low:
            self.check_low(found[1])
        elif self.referenced:
            self.compare("gradients", found, self.expected)
        else:
            self.done.append("run alone")
        if "evaluated" in self.case.checks:
            self.check_evaluated()
        if "another mesh" in self.case.checks:
            self.check_another(found)
        if "resumed" in self.case.checks:
            self.check_resumed(state, frozen)
        if "inference" in self.case.checks:
            self.check_inference()

    # What is computed.

    @functools.cached_property
    def seed(self) -> int:
        return 1000 * self.case.seed + 10 * self.case.index

    @functools.cached_property
    def config(self) -> RunConfig:
        return load(self.case.preset, self.case.settings)

    @property
    def low(self) -> bool:
        return self.config.model.dtype is Dtype.BFLOAT16

    @property
    def referenced(self) -> bool:
        """Whether the reference can follow: not where order decides which rows drop, nor ranks'
        experts apart.
        """
        apart = (
            self.config.model.residual == "no-communication" and self.config.model.moe is not None
        )
        return not self.case.drops and not (apart and self.config.mesh.tensor > 1)

    @functools.cached_property
    def teacher(self) -> ModelConfig | None:
        """As `retrain.sources.teacher_model` has it."""
        if self.config.distill.teacher is None:
            return None
        model = load(self.case.preset, self.case.settings | self.case.teacher).model
        if self.config.distill.residual is None:
            return model
        return dataclasses.replace(
            model, residual=self.config.distill.residual, ladder_layers=None, ranks=None
        )

    @functools.cached_property
    def first(self) -> Program:
        return self.program(self.case.settings)

    def program(self, settings: dict[str, Any]) -> Program:
        return Program(train.resolve(load(self.case.preset, settings)), self.teacher, self.seed)

    def tokens(self, number: int):
        of = self.config.train
        sizes = dict(rows=of.batch, length=of.sequence, vocab=self.config.model.vocab_size)
        return batch_of(self.case.batch, **sizes, seed=self.seed + 5 + number)

    def batch(self, number: int):
        return placed(self.case.batch, *self.tokens(number))

    # What the reference says of it: (loss, gradients of what trains), and samples of them with what
    # is rounded.

    @functools.cached_property
    def expected(self):
        return self.of_trained(self.question.value())

    @functools.cached_property
    def samples(self):
        rounded = jnp.bfloat16 if self.low else jnp.float32
        return [
            self.of_trained(sample) for sample in expected.samples(self.question, rounded=rounded)
        ]

    def of_trained(self, found):
        loss, gradients = found
        return loss, self.first.of_trained(gradients)

    @functools.cached_property
    def question(self) -> Question:
        """In bfloat16 by what a rank of each part computes for itself, and rounds."""
        config, shape, parts = self.first.config, self.shape, 1
        if self.low:
            parts = config.mesh.data * config.mesh.fsdp * config.train.accumulate
            if shape.kind not in BY_RANKS:
                shape = dataclasses.replace(shape, ranks=config.mesh.tensor)
        documents = expected.in_parts(self.tokens(0), parts=parts)
        return Question(
            config, self.first.student, documents, shape, self.reference_teacher(), self.case.step
        )

    @property
    def shape(self) -> reference.Shape:
        config = self.first.config
        shape = expected.shape_of(config.model, tensor=config.mesh.tensor)
        return dataclasses.replace(shape, lora=config.lora.scale if config.lora.rank else None)

    def reference_teacher(self) -> Teacher | None:
        if self.teacher is None:
            return None
        shape = expected.shape_of(self.teacher, tensor=self.first.definition.layout.ranks)
        return Teacher(self.first.of_teacher, shape, self.hidden())

    def hidden(self) -> tuple[int, ...]:
        """After how many layers streams are compared."""
        layers, distill = self.first.config.model.num_layers, self.first.config.distill
        if not distill.hidden_weight:
            return ()
        compared = {*range(distill.hidden_every, layers, distill.hidden_every), layers}
        return tuple(sorted(compared))

    # What is compared.

    def compare(self, name: str, found, wanted, *, passes: int = 2) -> None:
        """(loss, gradients), within what float32 rounds: by the tests' bound, or else by samples of
        this very case.
        """
        model = self.first.config.model
        limit = cases.bound(model, passes=passes)
        largest = top(wanted[1])
        errors = {path: deviation(a, b, largest) for path, (a, b) in pairs(found, wanted).items()}
        wrong = [path for path, error in errors.items() if not error < limit]
        if wrong and self.referenced:
            # A sum of n terms errs by sqrt(n) roundings, where samples have one.
            longest = max(model.d_model, model.d_ff, model.num_heads * model.head_dim)
            beyond = self.beyond(self.samples, found, wanted, roundings=longest**0.5)
            wrong = [path for path in wrong if path in beyond]
            self.done.extend([] if wrong else [f"{name}, ill-conditioned"])
        if wrong:
            worst = sorted(wrong, key=errors.get, reverse=True)[:6]
            listed = ", ".join(f"{path} {errors[path]:.1e}" for path in worst)
            raise Beyond(f"{name}: {len(wrong)} of {len(errors)} beyond {limit:.1e}: {listed}")
        self.done.append(name)

    def beyond(self, samples, found, wanted, *, roundings: float = 1.0) -> dict[str, float]:
        """The arrays whose error is beyond so many times what samples of rounding have, and how
        many times it is.
        """
        usual = spread(samples, wanted)
        errors = spread([found], wanted)
        limit = rounding.STUDENT * roundings
        return {
            path: e / max(usual[path], 1e-30)
            for path, e in errors.items()
            if not e <= limit * usual[path]
        }

    def check_low(self, gradients) -> None:
        """In bfloat16: within what sampled rounding does. Experts must only run, since near ties
        fall otherwise.
        """
        if (
            self.config.model.moe is not None
            or self.teacher is not None
            or self.config.conversion.steps
        ):
            self.done.append("bfloat16, run alone")
            return
        if wrong := self.beyond(
            [sample for _, sample in self.samples], gradients, self.expected[1]
        ):
            listed = ", ".join(f"{path} {error:.1f}" for path, error in wrong.items())
            raise Beyond(f"bfloat16 gradients beyond {rounding.STUDENT} roundings: {listed}")
        self.done.append("bfloat16 gradients")

    def check_another(self, first) -> None:
        """The same function on another mesh, or in another form. first: (loss, gradients) of the
        case's program.
        """
        second = self.program(self.case.other)
        _, *found = second.advance(*second.begin(step=self.case.step), self.batch(0))
        finite(found)
        if self.low:
            self.done.append("another mesh, run")
        elif self.referenced:
            self.compare("another mesh", found, self.expected)
        else:
            self.compare("another mesh", found, first, passes=4)

    def check_evaluated(self) -> None:
        """The held-out loss of the weights before the step."""
        first = self.first
        (before, frozen), program = (
            first.begin(),
            held_out_loss(first.task, loop=first.config.train.loop),
        )
        loss = float(program(before.params, frozen, first.put(self.batch(0))))
        finite(loss)
        if self.low or not self.referenced:
            self.done.append("evaluated, run")
            return
        (of,) = expected.in_parts(self.tokens(0))
        scores = reference.evaluate(reference.logits, first.student, of.tokens, self.shape)
        losses = reference.logsumexp(scores) - reference.picked(scores, of.targets)
        wanted = (of.weights * losses).sum()
        if (error := cases.error(loss, wanted)) >= (limit := cases.bound(first.config.model)):
            raise Beyond(f"evaluated: {loss} and not {wanted}, {error:.1e} beyond {limit:.1e}")
        self.done.append("evaluated")

    def check_resumed(self, state, frozen) -> None:
        """Saved, restored and stepped on: the same bits."""
        with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
            restore = self.first.resume(state, frozen, pathlib.Path(folder))
            unbroken, *_ = self.first.advance(state, frozen, self.batch(1))
            resumed, *_ = self.first.advance(*restore(), self.batch(1))
        if other := [
            path for path, both in pairs(resumed, unbroken).items() if not np.array_equal(*both)
        ]:
            raise Beyond(f"resumed: other bits in {', '.join(other[:6])}")
        self.done.append("resumed")

    def check_inference(self) -> None:
        """Prompts of different lengths with rubbish beyond their ends, then a few tokens."""
        drawn, config = self.case.inference, self.first.config
        form = dict(loop=Loop(drawn["loop"]), quantize=Quantize(drawn["quantize"]))
        mesh = make_mesh(data=drawn["data"], tensor=config.mesh.tensor)
        definition = nn.define(config.model, mesh=mesh, experts=config.mesh.experts)
        params = cases.parameters(definition, seed=self.seed)
        tokens = cases.tokens((4, READ + NEW), vocab=config.model.vocab_size, seed=self.seed)
        prompts = np.where(np.arange(READ)[None] < LENGTHS[:, None], tokens[:, :READ], 7)
        stored = weights.prepare(definition, cases.place(params, definition), **form)
        how = dict(interleave=drawn["interleave"], capacity=12, **form)
        if drawn["way"] == "chunks":
            logits, caches = decode.prefill_in_chunks(
                definition, stored, prompts, LENGTHS, chunk=4, **how
            )
        else:
            program = decode.prefill.__wrapped__(
                definition, sequence_parallel=drawn["way"] == "split", **how
            )
            logits, caches = program(stored, prompts, LENGTHS)
        found = [np.asarray(logits)]
        rows = np.arange(4)
        step = one_step.decode.__wrapped__(definition, **form)
        for new in range(NEW):
            lengths = LENGTHS + new
            logits, caches = step(stored, caches, tokens[rows, lengths], lengths)
            found.append(np.asarray(logits))
        if form["quantize"] is Quantize.INT8:
            params = reference.in_eight_bits(params, definition.dims)
        self.compare_logits(params, tokens, found)

    def compare_logits(self, params, tokens, found) -> None:
        config, vocab = self.first.config, self.first.config.model.vocab_size
        finite([logits[:, :vocab] for logits in found])
        exchanged = (
            config.mesh.experts is ExpertParallelism.EXCHANGE
            and self.case.inference["way"] == "split"
        )
        followed = self.referenced or (self.case.drops and not exchanged)
        if not followed or (self.low and config.model.moe is not None):
            self.done.append("inference, run")
            return
        full = reference.evaluate(
            reference.logits, params, tokens, dataclasses.replace(self.shape, lora=None)
        )
        limit = (
            4 * (2 * config.model.num_layers + 2) * 2.0**-9
            if self.low
            else 2 * cases.bound(config.model)
        )
        for new, logits in enumerate(found):
            error = cases.error(logits[:, :vocab], full[np.arange(4), LENGTHS + new - 1])
            if error >= limit:
                raise Beyond(
                    f"inference: logits after {new} new tokens {error:.1e} beyond {limit:.1e}"
                )
            if not np.isneginf(logits[:, vocab:]).all():
                raise Beyond("inference: the vocabulary's padding can be chosen")
        self.done.append("inference")


def finite(tree) -> None:
    if not all(np.isfinite(a).all() for a in jax.tree.leaves(tree)):
        raise Beyond("the loss or a gradient is not finite")


def pairs(found, wanted) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Arrays by their path, cut to the smaller one where vocabularies or experts are padded for
    other meshes.
    """
    named = {}
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(wanted), strict=True
    ):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        real = tuple(slice(min(sizes)) for sizes in zip(a.shape, b.shape))
        if any(np.count_nonzero(c) != np.count_nonzero(c[real]) for c in (a, b)):
            raise Beyond(f"{jax.tree_util.keystr(path)}: padding has a gradient")
        named[jax.tree_util.keystr(path)] = a[real], b[real]
    return named


def spread(samples, exact) -> dict[str, float]:
    """The root mean square of the samples' distances from what is exact, by array."""
    squares = collections.defaultdict(list)
    for sample in samples:
        for path, (a, b) in pairs(sample, exact).items():
            squares[path].append(np.sum(np.square(a - b)))
    return {path: float(np.sqrt(np.mean(each))) for path, each in squares.items()}


def top(tree) -> float:
    """The largest value."""
    return max((float(np.abs(a).max(initial=0.0)) for a in jax.tree.leaves(tree)), default=0.0)


def deviation(found, wanted, largest: float) -> float:
    """As `cases.error`; a gradient that is zero in exact arithmetic is compared with the largest of
    all.
    """
    size = np.abs(wanted).max(initial=0.0)
    size = size if size > 1e-12 * largest else largest
    return float(np.abs(found - wanted).max(initial=0.0) / max(size, 1e-30))
