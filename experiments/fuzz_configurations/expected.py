"""What the dense float64 reference says of a case: loss and gradients of a batch, document by document; and logits."""

import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import scipy.special

from ladder_jax.config import ModelConfig, Pace, RunConfig, layer_indices, parse_residual
from tests import experts, reference, rounding

KINDS = {
    "ladder-fresh": "fresh",
    "parallel-shared-norm": "parallel",
    "no-communication": "none",
}


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
        ladder=None if model.ladder_layers is None else layer_indices(model.ladder_layers, model.num_layers),
        ranks=(model.ranks or tensor) if kind in ("fresh", "desync", "none") else 1,
        theta=model.rope_theta,
        eps=model.norm_eps,
        llama3=scaling
        and (scaling.factor, scaling.low_freq_factor, scaling.high_freq_factor, scaling.original_context),
        experts=moe and (moe.top_k, moe.softmax.value),
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Documents:
    """A batch, a document (or a row's padding) a row, which ends in rubbish: a causal model does not see it.

    tokens, targets: [N, T]. weights: of the predicted positions, which sum to 1. real: which positions are the batch's.
    """

    tokens: np.ndarray
    targets: np.ndarray
    weights: np.ndarray
    real: np.ndarray

    @classmethod
    def of(cls, tokens: np.ndarray, segments: np.ndarray, loss_mask: np.ndarray) -> "Documents":
        """All [B, T + 1]."""
        found = cls.weighed(tokens, segments, loss_mask)
        return dataclasses.replace(found, weights=found.weights / max(found.weights.sum(), 1))

    @classmethod
    def parts(cls, arrays, count: int) -> "Documents":
        """Those of each part of the rows, [count, N, T]: of fewer documents, with empty ones."""
        total = max(cls.weighed(*arrays).weights.sum(), 1)
        each = [cls.weighed(*part) for part in zip(*(np.split(a, count) for a in arrays))]
        most = max(len(one.tokens) for one in each)
        pad = lambda a: np.pad(a, ((0, most - len(a)), (0, 0)))
        join = lambda name: np.stack([pad(getattr(one, name)) for one in each])
        return cls(join("tokens"), join("targets"), join("weights") / total, join("real"))

    @classmethod
    def weighed(cls, tokens: np.ndarray, segments: np.ndarray, loss_mask: np.ndarray) -> "Documents":
        """With weights of 0 and 1."""
        starts = [(row, t) for row, t in np.ndindex(len(tokens), tokens.shape[1] - 1) if begins(segments[row], t)]
        shape = len(starts), tokens.shape[1] - 1
        found = cls(*np.zeros((2, *shape), np.int32), *np.zeros((2, *shape)))
        for n, (row, first) in enumerate(starts):
            stop = next((t for t in range(first + 1, shape[1]) if begins(segments[row], t)), shape[1])
            size, here, after = stop - first, slice(first, stop), slice(first + 1, stop + 1)
            found.tokens[n, :size], found.targets[n, :size] = tokens[row, here], tokens[row, after]
            same = (segments[row, here] == segments[row, after]) & (segments[row, here] != 0)
            found.weights[n, :size], found.real[n, :size] = same * loss_mask[row, after], 1
        return found


def begins(segments, t: int) -> bool:
    return t == 0 or bool(segments[t] != segments[t - 1])


@dataclasses.dataclass(frozen=True)
class Teacher:
    """hidden: after how many layers the streams are compared."""

    params: dict
    shape: reference.Shape
    hidden: tuple[int, ...] = ()


def ladder_fraction(config: RunConfig, shape: reference.Shape, *, step: int) -> list[float]:
    """How far each layer is from standard: the topmost group turns first, each in its share of the steps."""
    layers, turns = range(shape.layers), config.conversion
    ladder = [l for l in reversed(layers) if shape.ladder is None or l in shape.ladder]
    found = [1.0] * shape.layers
    for index, group in enumerate(np.array_split(ladder, turns.groups)):
        done = step * turns.groups / turns.steps - index
        for l in group:
            found[l] = float(np.clip(done, 0, 1) if turns.pace is Pace.RAMP else done >= 0)
    return found


def loss_of(config: RunConfig, documents: Documents, shape: reference.Shape, teacher: Teacher | None, *, step: int = 0):
    """A (params) -> the training loss of a step."""
    forward = reference.logits
    if config.conversion.steps:
        forward = functools.partial(reference.turning, fraction=ladder_fraction(config, shape, step=step))
    train, distill, share = config.train, config.distill, documents.weights
    taught = teacher and reference.logits(teacher.params, documents.tokens, teacher.shape)

    def loss(params):
        seen = []
        scores = forward(params, documents.tokens, shape, seen)
        total = jax.nn.logsumexp(scores, axis=-1)
        picked = jnp.take_along_axis(scores, documents.targets[..., None], -1)[..., 0]
        each = total - picked + train.z_loss * total**2
        if teacher:
            ours, theirs = (log_softmax(x / distill.temperature) for x in (scores, taught))
            divergence = distill.temperature**2 * (jnp.exp(theirs) * (theirs - ours)).sum(-1)
            each = (1 - distill.alpha) * each + distill.alpha * divergence
            each = each + distill.hidden_weight * hidden(params, documents.tokens, shape, teacher)
        return (share * each).sum() + experts.penalties(
            params["layers"],
            seen if shape.experts else [],
            shape,
            real=documents.real,
            load_balance=train.load_balance,
            z_loss=train.router_z_loss,
        )

    return loss


def log_softmax(scores):
    return scores - jax.nn.logsumexp(scores, axis=-1, keepdims=True)


def hidden(params, tokens, shape, teacher: Teacher):
    """The mean distance of both models' streams, relative to the teacher's."""
    distances = []
    for count in teacher.hidden:
        x, y = (
            reference.streams(p, tokens, dataclasses.replace(s, layers=count))[0]
            for p, s in ((params, shape), (teacher.params, teacher.shape))
        )
        distances.append(((x - y) ** 2).mean(-1) / ((y**2).mean(-1) + 1e-6))
    return sum(distances) / max(len(distances), 1)


@dataclasses.dataclass(frozen=True)
class Question:
    """A training step. student: the parameters before it."""

    config: RunConfig
    student: dict
    documents: Documents
    shape: reference.Shape
    teacher: Teacher | None = None
    step: int = 0

    def loss(self, student, taught, rounds=reference.exactly):
        """Of these parameters, and the teacher's."""
        shape, teacher = dataclasses.replace(self.shape, rounds=rounds), self.teacher
        if teacher:
            of_teacher = dataclasses.replace(teacher.shape, rounds=rounds)
            teacher = dataclasses.replace(teacher, params=taught, shape=of_teacher)
        return loss_of(self.config, self.documents, shape, teacher, step=self.step)(student)

    def given(self):
        return of_type((self.student, self.teacher and self.teacher.params), jnp.float64)


def of_type(tree, dtype):
    return jax.tree.map(lambda a: jnp.asarray(a, dtype), tree)


@contextlib.contextmanager
def float64():
    with jax.enable_x64(True), jax.numpy_rank_promotion("allow"):
        yield


def factors(dtype) -> list[np.ndarray]:
    """Of each sample's roundings: see tests/rounding.py."""
    rng = np.random.default_rng(0)
    return [2.0 ** rng.random((rounding.PLACES, 2), dtype) for _ in range(rounding.SAMPLES)]


def gradients(question: Question):
    """(loss, gradients) of a step in float64."""
    with float64():
        call = jax.jit(jax.value_and_grad(question.loss))
        return jax.tree.map(np.asarray, call(*question.given()))


def singles(question: Question):
    """Samples of `gradients` with what float32 rounds between operations: how ill-conditioned a case is."""

    @jax.jit
    def sample(student, taught, some):
        rounds = rounding.Places(some, dtype=jnp.float32)
        return jax.value_and_grad(question.loss)(student, taught, rounds)

    with float64():
        return [jax.tree.map(np.asarray, sample(*question.given(), some)) for some in factors(np.float64)]


def rounded(config: RunConfig, params, parts: Documents, shape):
    """(the gradients in float64, and samples of them with what bfloat16 rounds): see tests/rounding.py."""

    def summed(params, shape):
        """shape: called for each trace, as its places are counted."""
        of_part = lambda part: jax.grad(lambda p: loss_of(config, part, shape(), None)(p))(params)
        return jax.tree.map(lambda g: g.sum(0), jax.lax.map(of_part, jax.tree.map(jnp.asarray, parts)))

    @jax.jit
    def sample(params, some):
        return summed(params, lambda: dataclasses.replace(shape, rounds=rounding.Places(some)))

    with float64():
        exact = jax.jit(lambda p: summed(p, lambda: shape))(of_type(params, jnp.float64))
        single = of_type(params, jnp.float32)
        return jax.tree.map(np.asarray, (exact, [sample(single, some) for some in factors(np.float32)]))


def evaluation(params, documents: Documents, shape) -> float:
    """The mean cross-entropy in float64, of a model whose layers have all turned."""
    scores = reference.evaluate(reference.logits, params, documents.tokens, shape)
    picked = np.take_along_axis(scores, documents.targets[..., None], -1)[..., 0]
    return float((documents.weights * (scipy.special.logsumexp(scores, axis=-1) - picked)).sum())
