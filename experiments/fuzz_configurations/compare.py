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
import numpy as np

from experiments.fuzz_configurations import expected
from experiments.fuzz_configurations.draw import Case, Outcome, override
from experiments.fuzz_configurations.program import Program, batch_of, placed
from ladder_jax import config as configs
from ladder_jax import decode, nn
from ladder_jax.config import START, Dtype, ExpertParallelism, Loop, ModelConfig, Quantize, RunConfig
from ladder_jax.decode import weights
from ladder_jax.errors import UserError
from ladder_jax.parallel import make_mesh
from ladder_jax.train.gradients import held_out_loss
from tests import cases, one_step, reference, rounding

LENGTHS, NEW, READ = np.array([1, 4, 6, 3], np.int32), 2, 8


class Beyond(Exception):
    """Numbers beyond their bound."""


def outcome(case: Case) -> Outcome:
    began, done = time.perf_counter(), []
    try:
        with warnings.catch_warnings(), jax.numpy_rank_promotion("raise"):
            warnings.simplefilter("error")
            Run(case, done).check()
        what, said = "ran", ""
    except UserError as error:
        what, said = "refused", str(error)
    except Exception as error:  # whatever a program raises is what we look for
        what, said = "failed", f"{type(error).__name__}: {error}\n{where(error)}".rstrip()
    return Outcome(what, said, tuple(done), time.perf_counter() - began)


def where(error: Exception) -> str:
    """The last places of a traceback; numbers need none."""
    if isinstance(error, Beyond):
        return ""
    frames = traceback.extract_tb(error.__traceback__)
    return "\n".join(f"  {frame.filename}:{frame.lineno} {frame.name}" for frame in frames[-6:])


def load(preset: str, settings: dict[str, Any]) -> RunConfig:
    return configs.load(preset, overrides=[*map(override, settings.items())])


@dataclasses.dataclass(frozen=True, eq=False)
class Run:
    case: Case
    done: list[str]

    def check(self) -> None:
        first = self.program(self.case.settings)
        state, frozen = first.begin(step=self.case.step)
        state, loss, gradients = first.advance(state, self.batch(0), frozen)
        self.finite(loss, gradients)
        if self.low:
            self.check_low(first, loss, gradients)
        elif self.referenced:
            self.compare("gradients", first, (loss, gradients), self.expected)
        else:
            self.done.append("run alone")
        if "evaluated" in self.case.checks:
            self.check_evaluated(first)
        if "another mesh" in self.case.checks:
            self.check_another(first, loss, gradients)
        if "resumed" in self.case.checks:
            self.check_resumed(first, state, frozen)
        if "inference" in self.case.checks:
            self.check_inference(first)

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
        """Whether the reference can follow: not where order decides which rows drop, nor ranks' experts apart."""
        apart = self.config.model.residual == "no-communication" and self.config.model.moe is not None
        return not self.case.drops and not (apart and self.config.mesh.tensor > 1)

    @functools.cached_property
    def teacher(self) -> ModelConfig | None:
        """As `retrain.sources.teacher_model` has it."""
        if self.config.distill.teacher is None:
            return None
        model = load(self.case.preset, self.case.settings | self.case.teacher).model
        if self.config.distill.residual is None:
            return model
        return dataclasses.replace(model, residual=self.config.distill.residual, ladder_layers=None, ranks=None)

    def program(self, settings: dict[str, Any]) -> Program:
        return Program.of(load(self.case.preset, settings), teacher=self.teacher, seed=self.seed)

    def tokens(self, number: int):
        train = self.config.train
        sizes = dict(rows=train.batch, length=train.sequence, vocab=self.config.model.vocab_size)
        return batch_of(self.case.batch, **sizes, seed=self.seed + 5 + number)

    def batch(self, number: int):
        return placed(self.case.batch, *self.tokens(number))

    # What is compared.

    def finite(self, *trees) -> None:
        if not all(np.isfinite(a).all() for a in jax.tree.leaves(trees)):
            raise Beyond("the loss or a gradient is not finite")

    @functools.cached_property
    def expected(self):
        """The first program's (loss, gradients of what trains), by the reference."""
        first, question = self._question
        loss, gradients = expected.gradients(question)
        return loss, first.of_trained(gradients)

    @functools.cached_property
    def samples(self):
        """`expected`, with what float32 rounds."""
        first, question = self._question
        return [(loss, first.of_trained(gradients)) for loss, gradients in expected.singles(question)]

    @functools.cached_property
    def _question(self):
        first = self.program(self.case.settings)
        documents, teacher = expected.Documents.of(*self.tokens(0)), self.reference_teacher(first)
        shape = self.shape(first)
        return first, expected.Question(first.config, first.student, documents, shape, teacher, self.case.step)

    def shape(self, program: Program):
        lora = program.config.lora
        shape = expected.shape_of(program.config.model, tensor=program.config.mesh.tensor)
        return dataclasses.replace(shape, lora=lora.scale if lora.rank else None)

    def reference_teacher(self, program: Program):
        if self.teacher is None:
            return None
        shape = expected.shape_of(self.teacher, tensor=program.definition.layout.ranks)
        return expected.Teacher(program.of_teacher, shape, self.hidden(program))

    def hidden(self, program: Program) -> tuple[int, ...]:
        """After how many layers streams are compared: not where both models compute the same, frozen."""
        layers, distill = program.config.model.num_layers, program.config.distill
        if not distill.hidden_weight:
            return ()
        ladder = expected.shape_of(program.config.model, tensor=1).ladder
        plain = lambda l: program.config.model.residual == "standard" or (ladder is not None and l not in ladder)
        alike = distill.teacher == START and self.teacher.residual == "standard"
        same = next((l for l in range(layers) if not (alike and l < program.config.train.freeze and plain(l))), layers)
        return tuple(
            n for n in sorted({*range(distill.hidden_every, layers, distill.hidden_every), layers}) if n > same
        )

    def compare(self, name: str, program: Program, found, wanted, *, passes: int = 2) -> None:
        """(loss, gradients), within what float32 rounds: by the tests' bound, or else by samples of this very case."""
        limit, largest = cases.bound(program.config.model, passes=passes), top(wanted[1])
        both = pairs(found, wanted)
        errors = {path: deviation(a, b, largest) for path, (a, b) in both.items()}
        wrong = [path for path, error in errors.items() if not error < limit]
        if wrong and self.referenced:
            allowed = self.allowed(program)
            wrong = [path for path in wrong if not np.linalg.norm(np.subtract(*both[path])) <= allowed[path]]
            self.done.extend([] if wrong else [f"{name}, ill-conditioned"])
        if wrong:
            worst = sorted(wrong, key=errors.get, reverse=True)[:6]
            listed = ", ".join(f"{path} {errors[path]:.1e}" for path in worst)
            raise Beyond(f"{name}: {len(wrong)} of {len(both)} beyond {limit:.1e}: {listed}")
        self.done.append(name)

    def allowed(self, program: Program) -> dict[str, float]:
        """The norm of an error by array: a sum of n terms errs by sqrt(n) roundings, where samples have one."""
        model = program.config.model
        longest = max(model.d_model, model.d_ff, model.num_heads * model.head_dim)
        roundings = spread(self.samples, self.expected)
        return {path: rounding.STUDENT * longest**0.5 * size for path, size in roundings.items()}

    def check_low(self, first: Program, loss, gradients) -> None:
        """In bfloat16: within what sampled rounding does. Experts must only run, since near ties fall otherwise."""
        if self.config.model.moe is not None or self.teacher is not None or self.config.conversion.steps:
            self.done.append("bfloat16, run alone")
            return
        train, mesh = first.config.train, first.config.mesh
        parts = expected.Documents.parts(self.tokens(0), mesh.data * mesh.fsdp * train.accumulate)
        shape = self.shape(first)
        if shape.kind not in ("fresh", "desync", "none"):
            shape = dataclasses.replace(shape, ranks=mesh.tensor)
        exact, samples = expected.rounded(first.config, first.student, parts, shape)
        exact, *samples = map(first.of_trained, (exact, *samples))
        roundings, errors = spread(samples, exact), spread([gradients], exact)
        wrong = [path for path, error in errors.items() if not error <= rounding.STUDENT * roundings[path]]
        if wrong:
            listed = ", ".join(f"{path} {errors[path] / max(roundings[path], 1e-30):.1f}" for path in wrong)
            raise Beyond(f"bfloat16 gradients beyond {rounding.STUDENT} roundings: {listed}")
        self.done.append("bfloat16 gradients")

    def check_another(self, first: Program, loss, gradients) -> None:
        """The same function on another mesh, or in another form."""
        second = self.program(self.case.other)
        state, frozen = second.begin(step=self.case.step)
        _, *found = second.advance(state, self.batch(0), frozen)
        self.finite(*found)
        if self.low:
            self.done.append("another mesh, run")
            return
        wanted = self.expected if self.referenced else (loss, gradients)
        self.compare("another mesh", second, found, wanted, passes=2 if self.referenced else 4)

    def check_evaluated(self, first: Program) -> None:
        """The held-out loss of the weights before the step."""
        (before, frozen), program = first.begin(), held_out_loss(first.task, loop=first.config.train.loop)
        loss = float(program(before.params, frozen, first.put(self.batch(0))))
        self.finite(loss)
        if self.low or not self.referenced:
            self.done.append("evaluated, run")
            return
        documents = expected.Documents.of(*self.tokens(0))
        wanted = expected.evaluation(first.student, documents, self.shape(first))
        if (error := cases.error(loss, wanted)) >= (limit := cases.bound(first.config.model)):
            raise Beyond(f"evaluated: {loss} and not {wanted}, {error:.1e} beyond {limit:.1e}")
        self.done.append("evaluated")

    def check_resumed(self, first: Program, state, frozen) -> None:
        """Saved, restored and stepped on: the same bits."""
        with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
            restore = first.resume(state, frozen, pathlib.Path(folder))
            unbroken, *_ = first.advance(state, self.batch(1), frozen)
            state, frozen = restore()
            resumed, *_ = first.advance(state, self.batch(1), frozen)
        same = jax.tree.map(lambda a, b: bool(np.array_equal(a, b)), unbroken, resumed)
        if not all(jax.tree.leaves(same)):
            names = [jax.tree_util.keystr(path) for path, leaf in jax.tree_util.tree_leaves_with_path(same) if not leaf]
            raise Beyond(f"resumed: other bits in {', '.join(names[:6])}")
        self.done.append("resumed")

    def check_inference(self, first: Program) -> None:
        """Prompts of different lengths with rubbish beyond their ends, then a few tokens."""
        drawn, config = self.case.inference, first.config
        split, form = drawn["way"] == "split", dict(loop=Loop(drawn["loop"]), quantize=Quantize(drawn["quantize"]))
        mesh = make_mesh(data=drawn["data"], tensor=config.mesh.tensor)
        definition = nn.define(config.model, mesh=mesh, experts=config.mesh.experts)
        params = cases.parameters(definition, seed=self.seed)
        tokens = cases.tokens((4, READ + NEW), vocab=config.model.vocab_size, seed=self.seed)
        prompts = np.where(np.arange(READ)[None] < LENGTHS[:, None], tokens[:, :READ], 7)
        stored = weights.prepare(definition, cases.place(params, definition), **form)
        if drawn["way"] == "chunks":
            read = functools.partial(decode.prefill_in_chunks, chunk=4, interleave=drawn["interleave"])
            logits, caches = read(definition, stored, prompts, LENGTHS, capacity=12, **form)
        else:
            how = dict(sequence_parallel=split, interleave=drawn["interleave"])
            program = decode.prefill.__wrapped__(definition, capacity=12, **form, **how)
            logits, caches = program(stored, prompts, LENGTHS)
        found, rows, step = [np.asarray(logits)], np.arange(4), one_step.decode.__wrapped__(definition, **form)
        for new in range(NEW):
            lengths = LENGTHS + new
            logits, caches = step(stored, caches, tokens[rows, lengths], lengths)
            found.append(np.asarray(logits))
        if form["quantize"] is Quantize.INT8:
            params = reference.in_eight_bits(params, definition.dims)
        self.compare_logits(first, definition, params, tokens, found)

    def compare_logits(self, first: Program, definition, params, tokens, found) -> None:
        model, exchanged = first.config.model, first.config.mesh.experts is ExpertParallelism.EXCHANGE
        self.finite([logits[:, : model.vocab_size] for logits in found])
        followed = self.referenced or (self.case.drops and not (exchanged and self.case.inference["way"] == "split"))
        if not followed or (self.low and model.moe is not None):
            self.done.append("inference, run")
            return
        shape = expected.shape_of(model, tensor=first.config.mesh.tensor)
        full = reference.evaluate(reference.logits, params, tokens, shape)
        limit = 2 * cases.bound(model)
        if self.low:
            limit = 4 * (2 * model.num_layers + 2) * 2.0**-9
        for new, logits in enumerate(found):
            error = cases.error(logits[:, : model.vocab_size], full[np.arange(4), LENGTHS + new - 1])
            if error >= limit:
                raise Beyond(f"inference: logits after {new} new tokens {error:.1e} beyond {limit:.1e}")
            if not np.isneginf(logits[:, model.vocab_size :]).all():
                raise Beyond("inference: the vocabulary's padding can be chosen")
        self.done.append("inference")


def pairs(found, wanted) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Arrays by their path, cut to the smaller one where vocabularies or experts are padded for other meshes."""
    named = {}
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(wanted), strict=True):
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
    """As `cases.error`; a gradient that is zero in exact arithmetic is compared with the largest of all."""
    size = np.abs(wanted).max(initial=0.0)
    size = size if size > 1e-12 * largest else largest
    return float(np.abs(found - wanted).max(initial=0.0) / max(size, 1e-30))
