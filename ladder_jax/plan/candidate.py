"""A way to train a model on a target, and all there are to choose from; imports no jax."""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

from ladder_jax.config import MeshConfig, ModelConfig, Remat, TrainConfig, check_fits_mesh, parse_residual
from ladder_jax.errors import UserError
from ladder_jax.plan.request import Request
from ladder_jax.schedule.targets import Target


@dataclasses.dataclass(frozen=True)
class Candidate:
    """rows: sequences that one of the data x fsdp shards computes at once, its microbatch.

    accumulate: how many of those make its share of a step's batch.
    """

    mesh: MeshConfig
    remat: Remat
    sequence_parallel: bool
    rows: int
    accumulate: int

    @property
    def shards(self) -> int:
        """Of the batch."""
        return self.mesh.data * self.mesh.fsdp

    def train(self, request: Request) -> TrainConfig:
        return TrainConfig(
            batch=request.sequences,
            sequence=request.sequence,
            remat=self.remat,
            accumulate=self.accumulate,
            sequence_parallel=self.sequence_parallel,
        )

    def overrides(self, request: Request) -> dict[str, str]:
        """What `ladder-jax train` is to be given: `path.to.field` and value."""
        mesh = {f"mesh.{name}": str(size) for name, size in dataclasses.asdict(self.mesh).items() if size > 1}
        split = {"train.sequence_parallel": "true"} if self.sequence_parallel else {}
        asked = {name: str(value) for name, value in request.changes}
        return (
            asked
            | mesh
            | {
                "train.batch": str(request.sequences),
                "train.sequence": str(request.sequence),
                "train.accumulate": str(self.accumulate),
                "train.remat": self.remat.value,
                **split,
            }
        )


def candidates(request: Request) -> list[Candidate]:
    """All that compute the asked number of tokens. Raises UserError where there are none."""
    meshes = list(meshes_of(request))
    if not meshes:
        raise UserError(f"no mesh of {request.target.name}'s {request.target.count} devices splits {request.name}")
    split = [mesh for mesh in meshes if request.sequences % (mesh.data * mesh.fsdp) == 0]
    if not split:
        fewest = min(mesh.data * mesh.fsdp for mesh in meshes)
        raise UserError(
            f"--tokens {request.tokens} are {request.sequences} sequences of {request.sequence}, which no mesh of"
            f" {request.target.name} shares out evenly: it takes a multiple of {fewest} sequences"
        )
    found = []
    for mesh in split:
        share = request.sequences // (mesh.data * mesh.fsdp)
        for remat, sequence_parallel, rows in itertools.product(Remat, (False, True), _divisors(share)):
            if not sequence_parallel or _can_be_split(request, mesh):
                found.append(Candidate(mesh, remat, sequence_parallel, rows, share // rows))
    return found


def meshes_of(request: Request) -> Iterator[MeshConfig]:
    """Over all devices of the target, as far as the model can be split, each axis along whole axes of the torus."""
    count = request.target.count
    for tensor in _divisors(count):
        for fsdp in _divisors(count // tensor):
            mesh = MeshConfig(data=count // tensor // fsdp, fsdp=fsdp, tensor=tensor)
            if _fits(request.config, mesh) and lies_along(request.target, mesh):
                yield mesh


def lies_along(target: Target, mesh: MeshConfig) -> bool:
    """Whether every axis of the mesh is made of whole axes of the target's torus: else its rings share links.

    (v5e's slices have two short axes, which jax splits by default; GPUs have none.)
    """
    if target.platform != "tpu" or target.kind == "v5e":
        return True
    torus = [int(size) for size in target.shape.split("x")]
    torus.append(target.count // math.prod(torus))  # devices a chip
    return _made_of([mesh.data, mesh.fsdp, mesh.tensor], tuple(size for size in torus if size > 1))


def _made_of(sizes: Sequence[int], torus: tuple[int, ...]) -> bool:
    if not sizes:
        return not torus
    first, *rest = sizes
    subsets = itertools.chain.from_iterable(itertools.combinations(range(len(torus)), n) for n in range(len(torus) + 1))
    return any(
        math.prod(torus[i] for i in chosen) == first
        and _made_of(rest, tuple(size for i, size in enumerate(torus) if i not in chosen))
        for chosen in subsets
    )


def _fits(config: ModelConfig, mesh: MeshConfig) -> bool:
    try:
        check_fits_mesh(config, mesh)
    except UserError:
        return False
    return True


def _can_be_split(request: Request, mesh: MeshConfig) -> bool:
    reduces_all = not parse_residual(request.config.residual).kind.startswith(("desync", "no-"))
    return mesh.tensor > 1 and request.sequence % mesh.tensor == 0 and reduces_all


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
