"""The time of an all-reduce over a link, by algorithm, and of an all-to-all: S bytes over n ranks, b the bandwidth.

    ring             latency + 2 (n - 1) step + 2 (n - 1) / n S / b; on a torus both directions at once, n steps
    tree             over m nodes: a ring inside each; then each device exchanges its 1/n of the array with its peers in
                     a tree, 2 log2(m) messages. Inside one node NCCL's tree is a chain, never faster than its ring
    one-shot         latency + (n - 1) S / b: each device reads all others' arrays
    two-shot         latency + 2 (n - 1) / n S / b: a reduce-scatter and an all-gather through the peers' memory. Over
                     m nodes, one direct exchange of 1/n of the array between the two (a composition; not measured)
    in-network       latency + (1 + 1 / n) S / b: the switches add; one kernel, by NVLink's multicast
    NCCL in-network  the same by NCCL, which has a larger latency

https://github.com/NVIDIA/nccl/blob/master/src/graph/tuning.cc has the first two; hardware/ has the constants.

In an all-to-all each rank sends 1 / n of its S bytes to every rank. Its time is arithmetic with the ring's constants;
it was compared with no measurement:

    switch           latency + step + (n - 1) / n S / b: all messages at once, each over its sender's own link
    torus            latency + n / 2 steps + floor(n^2 / 4) / n S / b: a message takes the shorter way round a ring of
                     n, so the distances from a rank to all others add up to floor(n^2 / 4) hops. With S / n bytes a hop
                     n ranks load 2 n directed links, of b / 2 each
    over m nodes     latency, a step and a message of the network, and the longer of what stays inside a node, as
                     above, and of what leaves it, (n - n / m) / n S over the network's bandwidth
"""

import dataclasses
import enum
import math
from collections.abc import Iterable


class Algorithm(enum.Enum):
    RING = "ring"
    TREE = "tree"
    ONE_SHOT = "one-shot"
    TWO_SHOT = "two-shot"
    IN_NETWORK = "in-network"
    NCCL_IN_NETWORK = "NCCL in-network"


FITTED = (Algorithm.RING, Algorithm.TREE)  # of the programs to which the constants were fitted; XLA's on TPUs
NCCL = (*FITTED, Algorithm.NCCL_IN_NETWORK)
ANY = tuple(Algorithm)


class Ring(enum.Enum):
    """The ring algorithm of collectives within a node or slice."""

    ONE_WAY = "one-way"  # 2 (n - 1) steps: NCCL's ring
    TWO_WAY = "two-way"  # both directions at once, n steps: links of a torus


class Kernels(enum.Enum):
    """Which programs have the link's one-kernel all-reduces: one-shot, two-shot, in-network."""

    XLA = "xla"  # all, as XLA generates such kernels where every device reaches every other's memory
    OTHERS = "others"  # other frameworks only: no launch of ours overlaps them


class Halves(enum.Enum):
    """Whether programs can start and await an all-reduce apart: the launch `explicit`."""

    SUPPORTED = "supported"
    NONE = "none"  # v5e


@dataclasses.dataclass(frozen=True)
class Kernel:
    """An all-reduce of one kernel. latency: seconds. bandwidth: bytes a second that a device sends."""

    latency: float
    bandwidth: float

    def seconds(self, sent: float) -> float:
        return self.latency + sent / self.bandwidth


@dataclasses.dataclass(frozen=True)
class Network:
    """The network between nodes of `size` devices. step: seconds per message. bandwidth: bytes a second per device.

    one_shot: seconds of a direct exchange between peers of all nodes, for a two-shot all-reduce; None if unknown.
    """

    size: int
    step: float
    bandwidth: float
    one_shot: float | None = None


@dataclasses.dataclass(frozen=True)
class Link:
    """The link between devices. All constants are what programs reach, not published peaks.

    latency: fixed seconds of a collective. step: seconds per step of the ring. bandwidth: bytes a second that a device
    sends. network: between nodes; None if the link joins all devices.
    one_shot, two_shot, in_network, nccl_in_network: None for an algorithm that the machine does not offer.
    """

    latency: float
    step: float
    bandwidth: float
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
        """Seconds of an all-reduce of `size` bytes by each algorithm that the link offers; empty for one rank."""
        if ranks == 1:
            return {}
        nodes = self.nodes(ranks)
        inside = math.ceil(ranks / nodes)  # devices in the fullest node
        both = 2 * (inside - 1) / inside * size  # bytes that a device sends in a reduce-scatter and an all-gather
        steps = 2 * (inside - 1) if self.ring is Ring.ONE_WAY else inside
        ring = self.latency + steps * self.step + both / self.bandwidth
        if nodes > 1:
            return self._between_nodes(size, nodes=nodes, inside=inside, ring=ring, both=both)
        kernels = {
            Algorithm.ONE_SHOT: (self.one_shot, (ranks - 1) * size),
            Algorithm.TWO_SHOT: (self.two_shot, both),
            Algorithm.IN_NETWORK: (self.in_network, (1 + 1 / ranks) * size),
            Algorithm.NCCL_IN_NETWORK: (self.nccl_in_network, (1 + 1 / ranks) * size),
        }
        offered = {name: kernel.seconds(sent) for name, (kernel, sent) in kernels.items() if kernel is not None}
        return {Algorithm.RING: ring, **offered}

    def fastest(
        self, size: float, *, ranks: int, among: Iterable[Algorithm] = FITTED
    ) -> tuple[Algorithm | None, float]:
        """The fastest of these algorithms, and its seconds; (None, 0.0) for one rank."""
        offered = self.times(size, ranks=ranks)
        usable = [name for name in among if name in offered]
        return min(((name, offered[name]) for name in usable), key=lambda pair: pair[1], default=(None, 0.0))

    def all_reduce(self, size: float, *, ranks: int, among: Iterable[Algorithm] = FITTED) -> float:
        return self.fastest(size, ranks=ranks, among=among)[1]

    def half(self, size: float, *, ranks: int) -> float:
        """Seconds of a reduce-scatter or an all-gather of `size` bytes: half of a ring's or tree's steps and bytes."""
        return (self.all_reduce(size, ranks=ranks) + self.latency) / 2 if ranks > 1 else 0.0

    def all_to_all(self, size: float, *, ranks: int) -> float:
        """Seconds of an all-to-all in which each rank has `size` bytes, of which it keeps 1 / ranks."""
        if ranks == 1:
            return 0.0
        inside = math.ceil(ranks / self.nodes(ranks))
        steps = 1 if self.ring is Ring.ONE_WAY else inside // 2
        seconds = self.latency + steps * self.step
        within = crossings(inside, ring=self.ring) * inside / ranks * size / self.bandwidth
        if inside == ranks:
            return seconds + within
        leaving = (ranks - inside) / ranks * size / self.network.bandwidth
        return seconds + self.network.step + max(within, leaving)

    def faster(self, factor: float) -> "Link":
        """The same link `factor` times as fast: bandwidths multiplied by it, latencies divided by it."""
        return _faster(self, factor)

    def _between_nodes(
        self, size: float, *, nodes: int, inside: int, ring: float, both: float
    ) -> dict[Algorithm, float]:
        network = self.network
        share = 2 * (nodes - 1) / nodes * size / inside
        messages = 2 * math.ceil(math.log2(nodes))
        offered = {Algorithm.TREE: ring + messages * network.step + share / network.bandwidth}
        if self.two_shot is not None and network.one_shot is not None:
            exchange = network.one_shot + (nodes - 1) * size / inside / network.bandwidth
            offered[Algorithm.TWO_SHOT] = self.two_shot.seconds(both) + exchange
        return offered


def crossings(ranks: int, *, ring: Ring) -> float:
    """How often a rank's bytes cross a link, per rank, in an all-to-all; both directions of a torus are one link."""
    return ranks**2 // 4 / ranks if ring is Ring.TWO_WAY else (ranks - 1) / ranks


def _faster(section, factor: float):
    changes = {}
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if isinstance(value, (Network, Kernel)):
            changes[field.name] = _faster(value, factor)
        elif field.name == "bandwidth":
            changes[field.name] = value * factor
        elif field.name in ("latency", "step", "one_shot") and value is not None:
            changes[field.name] = value / factor
    return dataclasses.replace(section, **changes)
