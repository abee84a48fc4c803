"""What the dense float64 reference says of a case: loss and gradients of a batch, document by
document.
"""

import dataclasses

import autograd.numpy as np
import jax

from ladder_jax.config import ModelConfig, Pace, RunConfig, layer_indices, parse_residual
from tests import experts, reference, rounding

KINDS = {"ladder-fresh": "fresh", "parallel-shared-norm": "parallel", "no-communication": "none"}


def shape_of(model: ModelConfig, *, tensor: int) -> reference.Shape:
    """tensor: the ranks of a function that depends on them, if the model does not say."""
    name, scaling, moe = parse_residual(model.residual), model.rope_scaling, model.moe
    kind = KINDS.get(name.kind, name.kind)
    if kind == "farskip" and not moe.shared_width:
        kind = "ladder"
    return reference.Shape(
        layers=model.num_layers,
        heads=model.num_heads,
        kv_heads=model.num_kv_heads,
        vocab=model.vocab_size,
        kind=kind,
        number=name.number,
        ladder=None
        if model.ladder_layers is None
        else layer_indices(model.ladder_layers, model.num_layers),
        ranks=(model.ranks or tensor) if kind in ("fresh", "desync", "none") else 1,
        theta=model.rope_theta,
        eps=model.norm_eps,
        llama3=scaling and dataclasses.astuple(scaling),
        experts=moe and (moe.top_k, moe.softmax.value),
    )


@dataclasses.dataclass(frozen=True)
class Documents:
    """A part of a batch's rows, a document (or a row's padding) a row, which ends in rubbish: a
    causal model does not see it.

    tokens, targets: [N, T]. weights: of the predicted positions, which sum to 1 over all parts.
    real: the batch's positions.
    """

    tokens: np.ndarray
    targets: np.ndarray
    weights: np.ndarray
    real: np.ndarray


def in_parts(arrays, *, parts: int = 1) -> list[Documents]:
    """The documents of each part of a batch. arrays: tokens, segments and the loss's mask, each
    [B, T + 1].
    """
    each = [documents(*part) for part in zip(*(np.split(a, parts) for a in arrays))]
    total = max(sum(part.weights.sum() for part in each), 1)
    return [dataclasses.replace(part, weights=part.weights / total) for part in each]


def documents(tokens: np.ndarray, segments: np.ndarray, loss_mask: np.ndarray) -> Documents:
    """Of a part's rows, with weights of 0 and 1."""
    length = tokens.shape[1] - 1
    found = []
    for row, segment, mask in zip(tokens, segments, loss_mask):
        starts = np.flatnonzero(np.diff(segment[:-1])) + 1
        for here in np.split(np.arange(length), starts):
            after = here + 1
            learnt = (segment[here] == segment[after]) & (segment[here] != 0)
            arrays = row[here], row[after], 1.0 * learnt * mask[after], np.ones(len(here))
            found.append([np.pad(a, (0, length - len(here))) for a in arrays])
    return Documents(*map(np.stack, zip(*found)))


@dataclasses.dataclass(frozen=True)
class Teacher:
    """hidden: after how many layers the streams are compared."""

    params: dict
    shape: reference.Shape
    hidden: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class Question:
    """A training step. student: the parameters before it."""

    config: RunConfig
    student: dict
    documents: list[Documents]
    shape: reference.Shape
    teacher: Teacher | None = None
    step: int = 0

    def loss(self, student, part: Documents, rounds):
        """Of a part of the batch, with these parameters."""
        train, distill, seen = self.config.train, self.config.distill, []
        shape = dataclasses.replace(self.shape, rounds=rounds)
        if self.teacher:
            taught = jax.tree.map(np.float64, self.teacher.params)
            teacher = dataclasses.replace(self.teacher.shape, rounds=rounds)
            theirs = log_softmax(
                reference.logits(taught, part.tokens, teacher) / distill.temperature
            )
        fraction = self.ladder_fraction() if self.config.conversion.steps else None
        scores = reference.logits(student, part.tokens, shape, seen, fraction)
        total = reference.logsumexp(scores)
        each = total - reference.picked(scores, part.targets) + train.z_loss * total**2
        if self.teacher:
            ours = log_softmax(scores / distill.temperature)
            divergence = distill.temperature**2 * (np.exp(theirs) * (theirs - ours)).sum(-1)
            each = (1 - distill.alpha) * each + distill.alpha * divergence
            for count in self.teacher.hidden:
                both = ((student, shape), (taught, teacher))
                x, y = (
                    reference.streams(p, part.tokens, dataclasses.replace(s, layers=count))[0]
                    for p, s in both
                )
                distance = ((x - y) ** 2).mean(-1) / ((y**2).mean(-1) + 1e-6)
                each = each + distill.hidden_weight / len(self.teacher.hidden) * distance
        return (part.weights * each).sum() + experts.penalties(
            student["layers"],
            seen if shape.experts else [],
            shape,
            real=part.real,
            load_balance=train.load_balance,
            z_loss=train.router_z_loss,
        )

    def ladder_fraction(self) -> list[float]:
        """How far each layer is from standard: the topmost group turns first, each in its share of
        the steps.
        """
        turns, shape = self.config.conversion, self.shape
        ladder = [
            l for l in reversed(range(shape.layers)) if shape.ladder is None or l in shape.ladder
        ]
        found = [1.0] * shape.layers
        for index, group in enumerate(np.array_split(ladder, turns.groups)):
            done = self.step * turns.groups / turns.steps - index
            for l in group:
                found[l] = float(np.clip(done, 0, 1) if turns.pace is Pace.RAMP else done >= 0)
        return found

    def value(self, rounds=lambda: reference.exactly):
        """(loss, gradients), the parts' summed. rounds: makes what rounds in one part."""
        found = []
        for part in self.documents:
            of_part = lambda student, *_, part=part: self.loss(student, part, rounds())
            found.append(reference.evaluate(of_part, self.student, (), self.shape, gradient=True))
        return jax.tree.map(lambda *parts: sum(parts), *found)


def log_softmax(scores):
    return scores - reference.logsumexp(scores)[..., None]


def samples(question: Question, *, rounded):
    """Samples of its `value` with what the dtype `rounded` rounds between operations: see
    tests/rounding.py.
    """
    return [question.value(rounds) for rounds in rounding.rounders(rounded)]
