"""The checked arguments of `ladder-jax plan`, and the candidates that answer them.

A candidate is a mesh, a form of expert parallelism, a remat policy, sequence parallelism and a
microbatch.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator

from ladder_jax.config import (
    CollectiveMatmul,
    Execution,
    ExpertParallelism,
    Interleave,
    MeshConfig,
    ModelConfig,
    Remat,
    RunConfig,
    check_execution,
    check_fits_mesh,
    is_file,
    load,
    parse_residual,
    to_dict,
)
from ladder_jax.config.fields import check, not_none, passes
from ladder_jax.predict.work import Block, Model
from ladder_jax.schedule import models, targets
from ladder_jax.schedule.targets import Target

ALWAYS = ("batch", "sequence", "accumulate", "remat")
SETTINGS = (
    *(("mesh", name) for name in ("data", "fsdp", "tensor", "experts")),
    *(
        ("train", name)
        for name in (*ALWAYS, "sequence_parallel", "collective_matmul", "interleave")
    ),
)
"""Section and name of what a plan decides. Its command has those of ALWAYS, whatever is given."""


@dataclasses.dataclass(frozen=True)
class Request:
    """name: of the model, as the user typed it. tokens: of one optimizer step over all devices.
    sequence: tokens each.

    changes: settings of the model that the options change, as (dotted name, value). interleave: of
    the microbatch; AUTO has candidates of both forms. given: what the model's file says of the rest,
    or the defaults.
    """

    name: str
    config: ModelConfig
    target: Target
    tokens: int
    sequence: int
    changes: tuple[tuple[str, str | int | float], ...] = ()
    interleave: Interleave = Interleave.AUTO
    given: RunConfig = RunConfig()

    @property
    def sequences(self) -> int:
        return self.tokens // self.sequence


def make(
    *,
    model: str,
    target: str,
    tokens: int,
    sequence: int = 2048,
    residual: str | None = None,
    layers: int | None = None,
    capacity: float | None = None,
    interleave: Interleave = Interleave.AUTO,
) -> Request:
    """A checked request. model: as in `schedule.models.by_name`. Raises UserError for an invalid
    request.
    """
    changes = not_none({"residual": residual, "num_layers": layers})
    config = dataclasses.replace(models.by_name(model), **changes)
    if capacity is not None:
        check(
            config.moe is not None,
            f"--capacity {capacity} is of experts, which {model} has not (model.moe)",
        )
        config = dataclasses.replace(config, moe=dataclasses.replace(config.moe, capacity=capacity))
        changes["moe.capacity"] = capacity
    check(tokens < 2**31, f"--tokens must be below 2**31, not {tokens}")
    check(tokens % sequence == 0, f"--tokens {tokens} are not a multiple of --sequence {sequence}")
    check(
        config.ranks is not None or not parse_residual(config.residual).depends_on_ranks,
        f"{config.residual} is a function of the number of ranks: give model.ranks in a file",
    )
    if interleave is Interleave.HALVES:
        check_execution(Execution(interleave=2), model=config, rows=2)
    settings = tuple((f"model.{name}", value) for name, value in changes.items())
    given = load(model) if is_file(model) else RunConfig()
    uncounted = {
        "train.freeze": given.train.freeze,
        "lora.rank": given.lora.rank,
        "distill.teacher": given.distill.teacher,
        "conversion.steps": given.conversion.steps,
    }
    for name, value in uncounted.items():
        check(
            not value,
            f"ladder-jax plan does not count {name}={value} of {model} (allowed: all weights, on the data alone)",
        )
    return Request(
        model, config, targets.parse(target), tokens, sequence, settings, interleave, given
    )


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One way to train a request's model on its target. mesh: with the form of expert parallelism.

    rows: the microbatch of one data x fsdp shard, in sequences. accumulate: number of microbatches
        per step.
    interleave: 2 for two halves of the microbatch in turn.
    """

    request: Request
    mesh: MeshConfig
    remat: Remat
    sequence_parallel: bool
    rows: int
    accumulate: int
    interleave: int = 1

    @property
    def cells(self) -> tuple[str, ...]:
        """Mesh, remat, the stream, rows and accumulate, as a table shows them."""
        mesh = self.mesh
        stream = "exchange" if self.exchanges else "yes" if self.sequence_parallel else "no"
        rows = f"{self.rows}, in turn" if self.interleave == 2 else f"{self.rows}"
        sizes = f"{mesh.data}x{mesh.fsdp}x{mesh.tensor}"
        return sizes, self.remat.value, stream, rows, f"{self.accumulate}"

    def __str__(self) -> str:
        sizes, remat, stream, rows, _ = self.cells
        return f"mesh {sizes}, remat {remat}, sequence-parallel {stream}, rows {rows}"

    @property
    def exchanges(self) -> bool:
        """Whether the ranks exchange the rows of experts."""
        return self.mesh.experts is ExpertParallelism.EXCHANGE

    @property
    def microbatch(self) -> tuple[Model, Block]:
        """One device's shard, and the tokens that it computes at once."""
        model = Model(self.request.config, self.mesh.tensor, trains=True)
        return model, model.prefill(rows=self.rows, prompt_length=self.request.sequence)

    def run(self) -> RunConfig:
        """As `ladder-jax train` takes it. Raises UserError where it trains no such thing."""
        request = self.request
        train = dataclasses.replace(
            request.given.train,
            start=None,
            freeze=0,
            batch=request.sequences,
            sequence=request.sequence,
            accumulate=self.accumulate,
            remat=self.remat,
            sequence_parallel=self.sequence_parallel,
            collective_matmul=CollectiveMatmul.NONE,
            interleave=Interleave(self.interleave),
        )
        return RunConfig(model=request.config, mesh=self.mesh, train=train)

    @property
    def overrides(self) -> dict[str, str]:
        """Settings for `ladder-jax train`, by dotted name: of the mesh, the stream and halves those
        that differ from the request's `given`.
        """
        found = dict(self.request.changes)
        planned = to_dict(self.run())
        given = to_dict(self.request.given)
        for section, name in SETTINGS:
            value = planned[section][name]
            if name in ALWAYS or value != given[section][name]:
                found[f"{section}.{name}"] = value
        return {name: str(value).lower() for name, value in found.items()}


def candidates(request: Request) -> list[Candidate]:
    """All candidates whose steps have the request's number of tokens. Raises UserError if there is
    none.
    """
    interleaves = (1, 2)
    if request.interleave is not Interleave.AUTO:
        interleaves = (request.interleave.parts,)
    result = []
    for mesh in meshes_of(request):
        share = request.sequences // (mesh.data * mesh.fsdp)
        exchange = dataclasses.replace(mesh, experts=ExpertParallelism.EXCHANGE)
        streams = [(mesh, False), (mesh, True), (exchange, True)]
        if mesh.tensor == 1:  # nothing to split, to send or to hide
            streams = streams[:1]
        for remat, (form, split), rows, interleave in itertools.product(
            Remat, streams, _divisors(share), interleaves
        ):
            one = Candidate(request, form, remat, split, rows, share // rows, interleave)
            # Halves of an odd number of rows are of their sequences: `train` has them, no plan.
            halved = mesh.tensor > 1 and rows % 2 == 0
            if (interleave == 1 or halved) and passes(one.run):
                result.append(one)
    devices = f"{request.target.name}'s {request.target.count} devices"
    count = f"{request.sequences} sequences of {request.sequence}"
    check(
        bool(result),
        f"no mesh of {devices} splits {request.name} and {count} (--interleave 2: over several tensor ranks, and"
        " into microbatches of an even number)",
    )
    return result


def meshes_of(request: Request) -> Iterator[MeshConfig]:
    """The meshes over all devices of the target that divide the model and consist of whole axes of
    the torus.
    """
    count = request.target.count
    for tensor in _divisors(count):
        for fsdp in _divisors(count // tensor):
            mesh = MeshConfig(data=count // tensor // fsdp, fsdp=fsdp, tensor=tensor)
            if passes(check_fits_mesh, request.config, mesh) and uses_whole_torus_axes(
                request.target, mesh
            ):
                yield mesh


def uses_whole_torus_axes(target: Target, mesh: MeshConfig) -> bool:
    """Whether each mesh axis is a product of whole axes of the target's torus; otherwise the axes'
    rings share links.

    True for GPUs, which have no torus, and for v5e, whose slices have two short axes that jax
    splits by default.
    """
    if target.platform != "tpu" or target.kind == "v5e":
        return True
    sides = [int(size) for size in target.shape.split("x")]
    reached = {(1, 1, 1)}  # sizes of data, fsdp and tensor: each side belongs to one of them
    for side in (*sides, target.count // math.prod(sides)):  # and the devices of a chip
        reached = {
            (*sizes[:axis], sizes[axis] * side, *sizes[axis + 1 :])
            for sizes in reached
            for axis in range(3)
        }
    return (mesh.data, mesh.fsdp, mesh.tensor) in reached


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
