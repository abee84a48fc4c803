"""A machine's constants, of this package or a user's YAML file, and the time of collectives over
its link.

An all-reduce of S bytes over n ranks, b the bandwidth, by algorithm:

    ring             latency + 2 (n - 1) step + 2 (n - 1) / n S / b; on a torus both directions at once, n steps
    tree             over m nodes: a ring inside each; then each device exchanges its 1/n of the array with its peers in
                     a tree, 2 log2(m) messages. Inside one node NCCL's tree is a chain, never faster than its ring
    one-shot         latency + (n - 1) S / b: each device reads all others' arrays
    two-shot         latency + 2 (n - 1) / n S / b: a reduce-scatter and an all-gather through the peers' memory. Over
                     m nodes, one direct exchange of 1/n of the array between the two (a composition; not measured)
    in-network       latency + (1 + 1 / n) S / b: the switches add; one kernel, by NVLink's multicast
    NCCL in-network  the same by NCCL, which has a larger latency

https://github.com/NVIDIA/nccl/blob/master/src/graph/tuning.cc has the first two; hardware/ has the
constants.

In an all-to-all each rank sends 1 / n of its S bytes to every rank. Its time is arithmetic with the
ring's constants; it was compared with no measurement:

    switch           latency + step + (n - 1) / n S / b: all messages at once, each over its sender's own link
    torus            latency + n / 2 steps + floor(n^2 / 4) / n S / b: a message takes the shorter way round a ring of
                     n, so the distances from a rank to all others add up to floor(n^2 / 4) hops. With S / n bytes a hop
                     n ranks load 2 n directed links, of b / 2 each
    over m nodes     latency, a step and a message of the network, and the longer of what stays
                     inside a node, as above, and of what leaves it, (n - n / m) / n S over the
                     network's bandwidth
"""

import dataclasses
import enum
import math
import pathlib
from collections.abc import Iterable
from typing import Annotated, Any

from ladder_jax.config.fields import Count, Positive, PositiveOrZero, Section, build, check
from ladder_jax.config.load import read_yaml
from ladder_jax.errors import UserError, unknown

TABLE = pathlib.Path(__file__).parent / "hardware"
# each is a file in TABLE; docs and messages use this order
NAMES = tuple(
    "h100-nvlink h100-no-nvlink h100-2-nodes h100-2-nodes-roce h200-nvlink b200-nvlink b300-nvlink"
    " l40s-no-peer a800-pcie v5e v5p v6e tpu7x".split()
)


class Algorithm(enum.Enum):
    RING = "ring"
    TREE = "tree"
    ONE_SHOT = "one-shot"
    TWO_SHOT = "two-shot"
    IN_NETWORK = "in-network"
    NCCL_IN_NETWORK = "NCCL in-network"


# of the programs to which the constants were fitted; XLA's on TPUs
FITTED = (Algorithm.RING, Algorithm.TREE)
NCCL = (*FITTED, Algorithm.NCCL_IN_NETWORK)
ANY = tuple(Algorithm)

type Reached = Annotated[
    float, (lambda value: 0 < value <= 1, "be a share of the published rate, above 0 and at most 1")
]


class Ring(enum.Enum):
    """The ring algorithm of collectives within a node or slice."""

    ONE_WAY = "one-way"  # 2 (n - 1) steps: NCCL's ring
    TWO_WAY = "two-way"  # both directions at once, n steps: links of a torus


class Kernels(enum.Enum):
    """Which programs have the link's one-kernel all-reduces: one-shot, two-shot, in-network."""

    # all, as XLA generates such kernels where every device reaches every other's memory
    XLA = "xla"
    OTHERS = "others"  # other frameworks only: no launch of ours overlaps them


class Halves(enum.Enum):
    """Whether programs can start and await an all-reduce apart: the launch `explicit`; or a
    reduce-scatter at all.
    """

    SUPPORTED = "supported"
    NONE = "none"  # v5e: all-gathers alone (`ladder-jax overlap --sequence-parallel`)


@dataclasses.dataclass(frozen=True)
class Kernel(Section):
    """An all-reduce of one kernel. latency: seconds. bandwidth: bytes a second that a device
    sends.
    """

    NAME = "link.KERNEL"

    latency: PositiveOrZero
    bandwidth: Positive

    def seconds(self, sent: float) -> float:
        return self.latency + sent / self.bandwidth


@dataclasses.dataclass(frozen=True)
class Network(Section):
    """The network between nodes of `size` devices. step: seconds per message. bandwidth: bytes a
    second per device.

    one_shot: seconds of a direct exchange between peers of all nodes, for a two-shot all-reduce;
        None if unknown.
    """

    NAME = "link.network"

    size: Count
    step: PositiveOrZero
    bandwidth: Positive
    one_shot: PositiveOrZero | None = None


@dataclasses.dataclass(frozen=True)
class Link(Section):
    """The link between devices. All constants are what programs reach, not published peaks.

    latency: fixed seconds of a collective. step: seconds per step of the ring. bandwidth: bytes a
    second that a device sends. network: between nodes; None if the link joins all devices.
    one_shot, two_shot, in_network, nccl_in_network: None for an algorithm that the machine does not
        offer.
    """

    NAME = "link"

    latency: PositiveOrZero
    step: PositiveOrZero
    bandwidth: Positive
    ring: Ring = Ring.ONE_WAY
    network: Network | None = None
    one_shot: Kernel | None = None
    two_shot: Kernel | None = None
    in_network: Kernel | None = None
    nccl_in_network: Kernel | None = None
    kernels: Kernels = Kernels.XLA
    halves: Halves = Halves.SUPPORTED

    def nodes(self, ranks: int) -> int:
        return 1 if self.network is None else math.ceil(ranks / self.network.size)

    def times(self, size: float, *, ranks: int) -> dict[Algorithm, float]:
        """Seconds of an all-reduce of `size` bytes by each algorithm that the link offers; empty
        for one rank.
        """
        if ranks == 1:
            return {}
        nodes = self.nodes(ranks)
        inside = math.ceil(ranks / nodes)  # devices in the fullest node
        # bytes that a device sends in a reduce-scatter and an all-gather
        both = 2 * (inside - 1) / inside * size
        steps = 2 * (inside - 1) if self.ring is Ring.ONE_WAY else inside
        ring = self.latency + steps * self.step + both / self.bandwidth
        if nodes > 1:
            network = self.network
            share = 2 * (nodes - 1) / nodes * size / inside
            messages = 2 * math.ceil(math.log2(nodes))
            tree = ring + messages * network.step + share / network.bandwidth
            if self.two_shot is None or network.one_shot is None:
                return {Algorithm.TREE: tree}
            exchange = network.one_shot + (nodes - 1) * size / inside / network.bandwidth
            both_shots = self.two_shot.seconds(both) + exchange
            return {Algorithm.TREE: tree, Algorithm.TWO_SHOT: both_shots}
        added = (1 + 1 / ranks) * size
        kernels = {
            Algorithm.ONE_SHOT: (self.one_shot, (ranks - 1) * size),
            Algorithm.TWO_SHOT: (self.two_shot, both),
            Algorithm.IN_NETWORK: (self.in_network, added),
            Algorithm.NCCL_IN_NETWORK: (self.nccl_in_network, added),
        }
        offered = {name: kernel.seconds(sent) for name, (kernel, sent) in kernels.items() if kernel}
        return {Algorithm.RING: ring, **offered}

    def fastest(
        self, size: float, *, ranks: int, among: Iterable[Algorithm] = FITTED
    ) -> tuple[Algorithm | None, float]:
        """The fastest of these algorithms, and its seconds; (None, 0.0) for one rank."""
        offered = self.times(size, ranks=ranks)
        name = min((one for one in among if one in offered), key=offered.get, default=None)
        return name, offered.get(name, 0.0)

    def all_reduce(self, size: float, *, ranks: int, among: Iterable[Algorithm] = FITTED) -> float:
        return self.fastest(size, ranks=ranks, among=among)[1]

    def half(self, size: float, *, ranks: int) -> float:
        """Seconds of a reduce-scatter or an all-gather of `size` bytes: half of a ring's or tree's
        steps and bytes.
        """
        return (self.all_reduce(size, ranks=ranks) + self.latency) / 2 if ranks > 1 else 0.0

    def all_to_all(self, size: float, *, ranks: int) -> float:
        """Seconds of an all-to-all in which each rank has `size` bytes, of which it keeps 1 /
        ranks.
        """
        if ranks == 1:
            return 0.0
        inside = math.ceil(ranks / self.nodes(ranks))
        steps = 1 if self.ring is Ring.ONE_WAY else inside // 2
        seconds = self.latency + steps * self.step
        # how often a rank's bytes cross a link, over the ranks; both directions of a torus are one
        crossings = inside - 1 if self.ring is Ring.ONE_WAY else inside**2 // 4
        within = crossings / ranks * size / self.bandwidth
        if inside == ranks:
            return seconds + within
        leaving = (ranks - inside) / ranks * size / self.network.bandwidth
        return seconds + self.network.step + max(within, leaving)


@dataclasses.dataclass(frozen=True)
class Machine(Section):
    """Identical devices and the link between them.

    devices: largest number of devices that `link` joins.
    memory: bytes per device.
    flops, bandwidth: published bfloat16 operations, and bytes of memory traffic, a second and
        device.
    flops_share, bandwidth_share: the shares of these rates that programs reach.
    launch: seconds that starting a kernel costs.
    contention: relative slowdown of compute while a collective is in flight, because the collective
        uses the same memory and cores (0.5: half as long again).
    link: None for a single device.
    sources: the source of each constant, by dotted name.
    """

    name: str
    devices: Count
    memory: Positive
    flops: Positive
    bandwidth: Positive
    flops_share: Reached
    bandwidth_share: Reached
    launch: PositiveOrZero
    contention: PositiveOrZero
    link: Link | None = None
    sources: dict = dataclasses.field(default_factory=dict, repr=False, hash=False)

    def seconds(self, *, flops: float = 0.0, size: float = 0.0) -> float:
        """Time of a kernel that computes `flops` and moves `size` bytes: the longer of the two."""
        return max(
            flops / (self.flops * self.flops_share), size / (self.bandwidth * self.bandwidth_share)
        )

    def constants(self) -> dict[str, dict]:
        """The value and the source of each number, by dotted name."""
        unknown_source = "given without a source"
        return {
            name: {"value": value, "source": self.sources.get(name, unknown_source)}
            for name, value in _flat(dataclasses.asdict(self)).items()
            if isinstance(value, (int, float))
        }


def load(name: str) -> Machine:
    """The machine of that name, or of the YAML file at that path. Raises UserError for an invalid
    one.

    A file has a number for each constant, or `{value: 4.8e12, source: TEXT}`. With `based_on: NAME`
    it has only the constants that differ from those of machine NAME.
    """
    path = pathlib.Path(name)
    if path.suffix not in (".yaml", ".yml"):
        if name not in NAMES:
            raise unknown("hardware (not a .yaml file either)", name, NAMES)
        path = TABLE / f"{name}.yaml"
    where = f"hardware {str(path)!r}"
    return made(_sections(path, where=where), name=path.stem, where=where)


def made(sections: dict, *, name: str, where: str) -> Machine:
    """The machine of a file's sections. Raises UserError, which begins with `where`."""
    sources = {}
    values = {name: _values(one, sources, name) for name, one in sections.items()}
    try:
        machine = build(Machine, {**values, "name": name, "sources": sources}, "")
        check(
            machine.devices == 1 or machine.link is not None,
            f"has {machine.devices} devices but no link: give latency, step and bandwidth",
        )
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    return machine


def _sections(path: pathlib.Path, *, where: str) -> dict:
    """Those of the file, in those of the machine in `based_on`."""
    sections = read_yaml(path, what="hardware")
    if not isinstance(sections, dict):
        raise UserError(
            f"{where} must hold constants such as 'bandwidth: 3.35e12', not {type(sections).__name__}"
        )
    if "based_on" not in sections:
        return sections
    base = str(sections.pop("based_on"))
    if base not in NAMES:
        raise unknown(f"'based_on' of {where}:", base, NAMES)
    return _changed(_sections(TABLE / f"{base}.yaml", where=base), sections)


def _changed(base: Any, changes: Any) -> Any:
    """A section or a constant with changes, which may be of the source alone; null is no section."""
    if not isinstance(base, dict) or not isinstance(changes, dict) or "value" in changes:
        return changes
    return base | {name: _changed(base.get(name), one) for name, one in changes.items()}


def _values(tree: Any, sources: dict[str, str], path: str) -> Any:
    """Sections without the sources of their constants, which go into `sources`, by dotted name."""
    if not isinstance(tree, dict):
        return tree
    if "value" not in tree and "source" not in tree:
        return {name: _values(one, sources, f"{path}.{name}") for name, one in tree.items()}
    if tree.get("source"):
        sources[path] = str(tree["source"])
    return tree.get("value")


def _flat(sections: dict, path: str = "") -> dict[str, Any]:
    """The values of all sections, by dotted name."""
    found = {}
    for key, value in sections.items():
        name = f"{path}{key}"
        found |= _flat(value, f"{name}.") if isinstance(value, dict) else {name: value}
    return found
