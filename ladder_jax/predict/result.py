"""The verb `predict`, and its result: a row per topology, the fastest Standard, and a
recommendation; as JSON, for a terminal, and as a picture.

Of a whole generation the opponent is the fastest Standard. Of one pass, `--phase prefill` and
`--phase train`, it is the fastest of these: Standard with the whole stream on every rank and with
sequence parallelism, as a whole batch or as two halves in turn; with ring collective matmul; over
the same devices without tensor parallelism; and, of experts with a capacity, with exchanged rows.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from ladder_jax import files, terminal
from ladder_jax.config import ExpertParallelism, Launch, Phase, parse_residual
from ladder_jax.errors import UserError
from ladder_jax.predict import model
from ladder_jax.predict.machine import ANY, NCCL
from ladder_jax.predict.model import Pass, Speed, fastest
from ladder_jax.predict.program import Choice, Form, Program
from ladder_jax.predict.request import BASELINE, GENERATE, Request, make
from ladder_jax.predict.work import Model, Task
from ladder_jax.terminal import Table, number

# parameters of `make`
OPTIONS = (
    "model hardware tensor batch prompt_length new_tokens residual ladder_layers layers phase"
    " sequence launch interleave experts capacity"
).split()

# a smaller gain over the fastest Standard is within the model's error, and no reason to change a
# model
WORTH = 1.03
# share of the fastest from which topologies count as equally fast: the model's error is larger
SAME = 0.95

NCCLS = Program(algorithms=NCCL)
"""The paper's opponent."""

COLUMNS = (
    "residual",
    "tokens/s",
    "speed-up",
    "over NCCL",
    "ms",
    "exposed ms",
    "hidden",
    "form",
    "launch",
)

PREFERENCE = (
    "standard",
    "ladder",
    "farskip",
    "ladder-fresh",
    "parallel-shared-norm",
    "parallel",
    "ladder-K",
    "parallel-ladder",
)
"""Order of recommendation among equally fast topologies: first those closest to trained and
measured models.
"""


def run(args: dict) -> None:
    """Print the result. An invalid argument raises UserError before anything is written."""
    files.check_picture("plot", args["plot"])
    request = make(**{name: args[name] for name in OPTIONS})
    if args["plot"] and request.phase:
        raise UserError(f"--plot belongs to --phase {GENERATE}, not {args['phase']}")
    answer = predict(request)
    terminal.answer(answer, as_json=args["json"])
    if args["plot"]:
        _plot(answer, file=args["plot"])


@dataclasses.dataclass(frozen=True)
class Row:
    """speed: of a generation, or of one pass. tokens_per_second: that are generated, or pass.

    speedup: tokens a second over those of the baseline. speedup_over_nccl: over those of Standard
    with NCCL and the whole stream on every rank.
    """

    residual: str
    speed: Speed | Pass
    tokens_per_second: float
    speedup: float
    speedup_over_nccl: float

    @property
    def cells(self) -> tuple[str, ...]:
        """Its row in the table of topologies."""
        prefill = []
        one = self.speed
        if isinstance(one, Speed):
            prefill = [f"{one.prefill.seconds * 1e3:.1f}"]
            one = one.step
        hides = one.wire and self.residual != "no-communication"
        return (
            self.residual,
            number(self.tokens_per_second),
            f"{self.speedup:.2f}",
            f"{self.speedup_over_nccl:.2f}",
            *prefill,
            f"{one.seconds * 1e3:.2f}",
            f"{one.exposed * 1e3:.2f}",
            f"{one.hidden:.0%}" if hides else "-",
            described(one) if hides else "-",
            one.executed["launch"] or "-",
        )

    def as_dict(self, *, memory: float) -> dict:
        """The JSON row: seconds of a whole generation and of its mean decode step, or of one pass
        over the batch.
        exposed: added by communication. memory: bytes of a device.
        """
        speed = self.speed
        row = {
            "residual": self.residual,
            "tokens_per_second": self.tokens_per_second,
            "speedup": self.speedup,
            "speedup_over_nccl": self.speedup_over_nccl,
            "exposed_seconds": speed.exposed,
            "communication_seconds": speed.wire,
            "interleave": speed.interleave,
            **speed.executed,
        }
        if isinstance(speed, Pass):
            return {
                **row,
                "form": speed.form,
                "seconds": speed.seconds,
                "hidden_fraction": speed.hidden,
            }
        return {
            **row,
            "prefill_seconds": speed.prefill.seconds,
            "decode_seconds": speed.decode_seconds,
            "step_seconds": speed.step.seconds,
            "step_exposed_seconds": speed.step.exposed,
            "prefill_exposed_seconds": speed.prefill.exposed,
            "hidden_fraction": {"prefill": speed.prefill.hidden, "step": speed.step.hidden},
            "memory_bytes": speed.memory,
            "fits": speed.memory <= memory,
        }


@dataclasses.dataclass(frozen=True)
class Advice:
    """ladder_helps: whether the plain Ladder's speed-up is at least WORTH; None if the request
    leaves it out.
    """

    residual: str
    reason: str
    ladder_helps: bool | None


@dataclasses.dataclass(frozen=True, repr=False)
class Result:
    """opponents: Standard in every form that is possible here, the fastest first; it is the
    baseline.
    """

    request: Request
    rows: tuple[Row, ...]
    opponents: Sequence[Speed | Pass]
    advice: Advice

    @property
    def baseline(self) -> Speed | Pass:
        return self.opponents[0]

    def as_dict(self) -> dict:
        """The JSON object: seconds and bytes are those of one device."""
        request = self.request
        opponents = [
            {
                "form": one.form,
                "all_reduce": one.executed["all_reduce"],
                "tokens_per_second": request.passed / one.seconds,
                "interleave": one.interleave,
                "residual": BASELINE,
            }
            for one in self.opponents
        ]
        asked = ("prompt_length", "new_tokens", "ladder_layers", "tokens", "capacity")
        return {
            "model": request.model,
            "hardware": request.machine.name,
            "tensor": request.tensor,
            "batch": request.batch,
            **{name: getattr(request, name) for name in asked},
            "phase": request.phase.value if request.phase else GENERATE,
            "experts": request.experts.value,
            "opponents": opponents,
            "implementation": "ours",
            "fidelity": "analytic",
            "rows": [row.as_dict(memory=request.machine.memory) for row in self.rows],
            "baseline": opponents[0],
            "recommendation": dataclasses.asdict(self.advice),
            "device_memory": request.machine.memory,
            "constants": request.machine.constants(),
        }

    def lines(self) -> list[str | Table]:
        """For `terminal.show`."""
        request = self.request
        machine = request.machine
        advice = self.advice
        generates = request.phase is None
        standard = f"Standard ({described(self.baseline)})"
        said = [f"take {advice.residual}", f"reason    {advice.reason}"]
        if advice.residual == BASELINE:
            said = ["no: take standard", f"reason    {advice.reason.removeprefix('no: ')}"]
        elif advice.ladder_helps is False:
            said.append("note      the plain Ladder: no, it does not help here")
        columns = list(COLUMNS)
        if generates:
            what = f"{request.new_tokens} new tokens after prompts of {request.prompt_length}"
            columns[4:5] = ["prefill ms", "step ms"]
        else:
            passed = "forward and backward" if request.phase is Phase.TRAIN else "prefill"
            what = f"{passed} of {request.tokens} tokens"
        said += [
            f"{request.model}, {what}, batch {request.batch}, tensor {request.tensor} on {machine.name}; analytic",
            Table(columns, [row.cells for row in self.rows], left=("residual", "form", "launch")),
        ]
        if generates:
            most = max(row.speed.memory for row in self.rows)
            said += [
                f"speed-up: over {standard}; over NCCL: over Standard with NCCL's all-reduces"
                " (XLA's on a TPU)",
                "exposed, form: of a decode step; hidden: the share of its all-reduces' time that adds nothing to it",
                f"memory    {most / 2**30:.1f} GiB of weights and cache a device",
            ]
            if most > machine.memory:
                said.append(
                    f"note      weights and cache need more than a device's {machine.memory / 2**30:.0f} GiB"
                )
            if any(row.speed.executed["launch"] == Launch.EXPLICIT.value for row in self.rows):
                said.append(
                    "note      explicit launches, the default here, have never run; --launch chained: without them"
                )
        else:
            pace = lambda one: number(request.passed / one.seconds)
            forms = [f"{described(one)} {pace(one)}" for one in self.opponents]
            said += [
                f"Standard's forms, tokens/s: {'; '.join(forms)}",
                f"speed-up: over {standard}; over NCCL: over Standard (all-reduce) with NCCL's all-reduces",
            ]
            if request.experts is ExpertParallelism.EXCHANGE:
                said.append(
                    f"exchange  with capacity {request.capacity:g}: whole buffers are sent and computed, full or not"
                )
        doubtful = [
            one for one in machine.sources.values() if "assumed" in one or "not verified" in one
        ]
        if doubtful:
            said.append(
                f"note      {len(doubtful)} of {machine.name}'s constants are assumed, or figures of threads, not"
                " verified: ladder-jax calibrate measures yours, but for contention"
            )
        return said


def predict(request: Request) -> Result:
    speeds, opponents, nccl = (_of_one_pass if request.phase else _of_generation)(request)
    best = opponents[0]
    rows = []
    for name in request.residuals:
        one = speeds[name]
        pace = request.passed / one.seconds
        rows.append(Row(name, one, pace, best.seconds / one.seconds, nccl.seconds / one.seconds))
    advice = advise(rows, best, name=f"Standard ({described(best)})", tensor=request.tensor)
    return Result(request, tuple(rows), opponents, advice)


type Found = tuple[Mapping[str, Speed | Pass], Sequence[Speed | Pass], Speed | Pass]
"""The speeds of the residuals; Standard's in each form, the fastest first; and Standard's with
NCCL's all-reduces.
"""


def _of_generation(request: Request) -> Found:
    shape = dict(
        rows=request.batch, prompt_length=request.prompt_length, new_tokens=request.new_tokens
    )
    speed = lambda residual, by: model.speed(
        request.config(residual), machine=request.machine, tensor=request.tensor, **shape, by=by
    )
    choice = Choice(request.launch, request.interleave)
    speeds = {name: speed(name, choice) for name in {*request.residuals, BASELINE}}
    standard = speeds[BASELINE]
    # other frameworks have decode steps in two halves, this library none
    if request.batch > 1 and request.tensor > 1:
        shard = Model(request.config(BASELINE), request.tensor)
        halves = Program(algorithms=ANY, interleave=2)
        task = Task(shard, request.machine, shard.decode_step(**shape))
        halved = model.run_by(task, halves)
        standard = dataclasses.replace(standard, step=fastest([standard.step, halved]))
    return speeds, [standard], speed(BASELINE, NCCLS)


def _of_one_pass(request: Request) -> Found:
    phase = request.phase
    machine = request.machine
    trains = phase is Phase.TRAIN

    def passes(residual: str, by: Program | Choice) -> list[Pass]:
        shard = Model(request.config(residual), request.tensor, trains)
        block = shard.prefill(rows=request.batch, prompt_length=request.tokens)
        return model.passes(Task(shard, machine, block), phase=phase, by=by)

    (nccl,) = passes(BASELINE, NCCLS)
    whole = Model(request.config(BASELINE), 1, trains)
    every = model.passes_without_tensor(
        whole, machine, devices=request.tensor, rows=request.batch, tokens=request.tokens
    )
    for form in request.forms:
        every += passes(BASELINE, Choice(experts=form))
    every.sort(key=lambda one: one.seconds)
    opponents = {}
    for one in every:
        opponents.setdefault((one.form, one.interleave), one)  # the fastest of each form
    choice = Choice(request.launch, request.interleave, request.experts)
    speeds = {name: fastest(passes(name, choice)) for name in request.residuals}
    return speeds, list(opponents.values()), nccl


def advise(rows: Sequence[Row], opponent: Speed | Pass, *, name: str, tensor: int) -> Advice:
    """opponent: the fastest way without changing the model, `name` in words. `no-communication` is
    never taken.
    """
    usable = [row for row in rows if row.residual != "no-communication"]
    ladders = [row.speedup for row in rows if row.residual == "ladder"]
    helps = ladders[0] >= WORTH if ladders else None
    best = max((row.speedup for row in usable), default=1.0)
    share = opponent.exposed / opponent.seconds
    if tensor == 1:
        reason = "no: one device communicates nothing, so there is nothing to hide"
        return Advice("standard", reason, helps)
    if best < WORTH:
        gains = f"no topology is {WORTH - 1:.0%} faster than {name}"
        return Advice("standard", f"no: {gains}; communication is {share:.1%} of its time", helps)
    fast = [row for row in usable if row.speedup >= max(WORTH, SAME * best)]
    chosen = min(fast, key=lambda row: (_rank(row.residual), -row.speedup))
    start = f"communication is {share:.0%} of the time of {name}"
    gain = f"{chosen.residual} gives {chosen.speedup:.2f} x its speed"
    if ladders and chosen.residual != "ladder":
        gain += f", the plain Ladder {ladders[0]:.2f}"
    return Advice(chosen.residual, f"{start}: {gain}", helps)


def _rank(residual: str) -> int:
    name = parse_residual(residual)
    key = "ladder-K" if name.kind == "ladder" and name.number > 1 else name.kind
    return (*PREFERENCE, key).index(key)  # any other comes last


def described(one: Speed | Pass) -> str:
    """Its form in words, with the algorithm of its all-reduces, and halves."""
    form = one.form
    algorithm = one.executed["all_reduce"]
    if algorithm and form.startswith(Form.ALL_REDUCE.value):
        form = f"{algorithm} {form}"
    if one.interleave == 2:
        return f"{form}, two halves in turn"
    halved = []
    if isinstance(one, Speed):
        halved = [phase for phase, parts in one.interleave.items() if parts == 2]
    return f"{form}, {' and '.join(halved)} in two halves" if halved else form


def _plot(answer: Result, *, file: str) -> None:
    """One bar per topology, for a decode step and for the prefill: compute, and exposed
    communication, in ms.
    """
    request = answer.request
    names = [row.residual for row in answer.rows]
    size = (11, 1.7 + 0.38 * len(names))
    figure, axes = files.panels(1, 2, size=size, sharey=True)
    for axis, phase in zip(axes, ("step", "prefill")):
        passes = [getattr(row.speed, phase) for row in answer.rows]
        seconds = np.array([1e3 * one.seconds for one in passes])
        exposed = np.array([1e3 * one.exposed for one in passes])
        compute = seconds - exposed
        axis.barh(names, compute, color="#4c78a8", label="compute")
        bars = axis.barh(
            names, exposed, left=compute, color="#e45756", label="exposed communication"
        )
        axis.bar_label(bars, map(number, seconds), padding=3)
        axis.margins(x=0.15)
        axis.set_xlabel(f"ms of a {'decode step' if phase == 'step' else 'prefill'}")
    axes[0].invert_yaxis()
    asked = f"{request.model}, tensor {request.tensor}, batch {request.batch}"
    figure.suptitle(f"{asked} on {request.machine.name}: predicted (analytic)", x=0.01, ha="left")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper right", ncols=2)
    files.write_picture(file, figure)
