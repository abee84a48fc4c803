"""The result of `ladder-jax predict --phase prefill` and `--phase train`: one forward pass, or forward and backward.

The opponents are Standard with the whole stream on every rank and with sequence parallelism, either as a whole batch
or as two halves in turn; with ring collective matmul; and over the same devices without tensor parallelism. Of experts
with a capacity also with exchanged rows.
"""

import dataclasses
import itertools

from ladder_jax.config import ExpertParallelism, Phase
from ladder_jax.predict import advice, model, result, without_tensor
from ladder_jax.predict.advice import Advice, Opponent
from ladder_jax.predict.link import FITTED
from ladder_jax.predict.model import Pass, fastest
from ladder_jax.predict.program import Choice, Opponents
from ladder_jax.predict.request import BASELINE, Request
from ladder_jax.predict.result import Baseline
from ladder_jax.predict.work import TRAINING, Model


@dataclasses.dataclass(frozen=True)
class Row:
    """speedup: over the baseline. speedup_over_nccl: over Standard with NCCL and the whole stream on every rank."""

    residual: str
    speed: Pass
    tokens: int
    speedup: float
    speedup_over_nccl: float

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.speed.seconds

    def as_dict(self) -> dict:
        """The JSON row: seconds of one pass over the batch."""
        return {
            "residual": self.residual,
            "form": self.speed.program.form.value,
            "interleave": self.speed.program.interleave,
            **result.executed(self.speed),
            "seconds": self.speed.seconds,
            "tokens_per_second": self.tokens_per_second,
            "exposed_seconds": self.speed.exposed,
            "communication_seconds": self.speed.wire,
            "hidden_fraction": self.speed.hidden,
            "speedup": self.speedup,
            "speedup_over_nccl": self.speedup_over_nccl,
        }


@dataclasses.dataclass(frozen=True)
class Result:
    """opponents: Standard in every form that is possible here, the fastest first; it is the baseline."""

    request: Request
    rows: tuple[Row, ...]
    opponents: tuple[Baseline, ...]
    advice: Advice
    fidelity: str = "analytic"

    @property
    def baseline(self) -> Baseline:
        return self.opponents[0]

    def as_dict(self) -> dict:
        request = self.request
        return {
            "model": request.model,
            "hardware": request.machine.name,
            "phase": request.phase.value,
            "tensor": request.tensor,
            "batch": request.batch,
            "tokens": request.tokens,
            "experts": request.experts.value,
            "capacity": request.capacity,
            "implementation": request.implementation.name,
            "fidelity": self.fidelity,
            "rows": [row.as_dict() for row in self.rows],
            "baseline": self.baseline.as_dict(),
            "opponents": [one.as_dict() for one in self.opponents],
            "recommendation": dataclasses.asdict(self.advice),
            "device_memory": request.machine.memory,
            "constants": result.constants(request),
        }


def predict(request: Request) -> Result:
    tokens = request.batch * request.tokens
    (nccl,) = _passes(request, BASELINE, Opponents.NCCL)
    standards = {form: _passes(request, BASELINE, Opponents.STRONGEST, form) for form in request.forms}
    every = [*itertools.chain.from_iterable(standards.values()), *_without_tensor(request)]
    every.sort(key=lambda one: one.seconds)
    form_of = lambda one: (one.program.form, one.program.interleave)
    named = {form_of(one): one for one in reversed(every)}  # the fastest of each form
    opponents = tuple(
        Baseline(one.program.form.value, result.algorithm(one), tokens / one.seconds, one.program.interleave)
        for one in reversed(named.values())
    )
    rows = []
    for name in request.residuals:
        speed = fastest(_passes(request, name, Opponents.STRONGEST, request.experts, request.interleaves))
        rows.append(Row(name, speed, tokens, every[0].seconds / speed.seconds, nccl.seconds / speed.seconds))
    opponent = Opponent(opponents[0].name, every[0].exposed / every[0].seconds)
    recommendation = advice.read(rows=rows, opponent=opponent, tensor=request.tensor)
    return Result(request, tuple(rows), opponents, recommendation)


def _passes(
    request: Request,
    residual: str,
    opponents: Opponents,
    experts: ExpertParallelism = ExpertParallelism.REDUCE,
    interleaves: tuple[int, ...] = (1, 2),
) -> list[Pass]:
    choice = Choice(opponents, request.launches, interleaves, experts)
    implementation = TRAINING if request.phase is Phase.TRAIN else request.implementation
    shard = Model(request.config(residual), request.tensor, implementation)
    block = shard.prefill(rows=request.batch, prompt_length=request.tokens)
    return model.passes(shard, request.machine, block, phase=request.phase, choice=choice)


def _without_tensor(request: Request) -> list[Pass]:
    implementation = TRAINING if request.phase is Phase.TRAIN else request.implementation
    if implementation.algorithms == FITTED:
        return []  # the authors' programs have tensor parallelism
    whole = Model(request.config(BASELINE), 1, implementation)
    shape = dict(devices=request.tensor, rows=request.batch, tokens=request.tokens)
    return without_tensor.passes(whole, request.machine, **shape, phase=request.phase)
