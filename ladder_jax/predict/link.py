"""The time of an all-reduce, by its bytes and its number of ranks."""

import dataclasses
import enum
import math


class Ring(enum.Enum):
    """The ring algorithm of collectives within a node or slice."""

    ONE_WAY = "one-way"  # 2 (n - 1) steps: NCCL's ring
    TWO_WAY = "two-way"  # both directions at once, n steps: links of a torus


@dataclasses.dataclass(frozen=True)
class Network:
    """The network between nodes of `size` devices. step: seconds per message. bandwidth: bytes a second per device."""

    size: int
    step: float
    bandwidth: float


@dataclasses.dataclass(frozen=True)
class Link:
    """The link between devices. All constants are what programs reach, not published peaks.

    latency: fixed seconds of a collective. step: seconds per step of the ring. bandwidth: bytes a second that a device
    sends. network: between nodes; None if the link joins all devices.
    """

    latency: float
    step: float
    bandwidth: float
    ring: Ring = Ring.ONE_WAY
    network: Network | None = None

    def all_reduce(self, size: float, *, ranks: int) -> float:
        """Seconds of an all-reduce of `size` bytes: a reduce-scatter and an all-gather.

            latency + steps x step + 2 (n - 1) / n x size / bandwidth

        Over m nodes, each device also exchanges its 1/n of the array with its peers, in a tree: 2 log2(m) more steps.
        https://github.com/NVIDIA/nccl/blob/master/src/graph/tuning.cc has the same terms.
        """
        if ranks == 1:
            return 0.0
        network = self.network
        nodes = 1 if network is None else math.ceil(ranks / network.size)
        inside = math.ceil(ranks / nodes)  # devices in the fullest node
        steps = 2 * (inside - 1) if self.ring is Ring.ONE_WAY else inside
        seconds = self.latency + steps * self.step + 2 * (inside - 1) / inside * size / self.bandwidth
        if nodes > 1:
            share = 2 * (nodes - 1) / nodes * size / inside
            seconds += 2 * math.ceil(math.log2(nodes)) * network.step + share / network.bandwidth
        return seconds

    def faster(self, factor: float) -> "Link":
        """The same link `factor` times as fast: bandwidths multiplied by it, latencies divided by it."""
        network = self.network and Network(
            self.network.size, self.network.step / factor, self.network.bandwidth * factor
        )
        return Link(self.latency / factor, self.step / factor, self.bandwidth * factor, self.ring, network)
