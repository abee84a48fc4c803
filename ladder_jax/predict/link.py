"""How long an all-reduce takes, by its bytes and its ranks."""

import dataclasses
import enum
import math


class Ring(enum.Enum):
    """How a collective's messages travel among the devices of one node or slice."""

    ONE_WAY = "one-way"  # 2 (n - 1) steps, one after another: NCCL's ring
    TWO_WAY = "two-way"  # both directions at once, n steps: a torus' links


@dataclasses.dataclass(frozen=True)
class Network:
    """What joins nodes of `size` devices. step: seconds a message; bandwidth: bytes a second for each device."""

    size: int
    step: float
    bandwidth: float


@dataclasses.dataclass(frozen=True)
class Link:
    """latency: seconds of any collective; step: seconds more for each step of the ring; bandwidth: bytes a second
    that a device sends. All reachable, not peak."""

    latency: float
    step: float
    bandwidth: float
    ring: Ring = Ring.ONE_WAY
    network: Network | None = None

    def all_reduce(self, size: float, *, ranks: int) -> float:
        """Seconds of an all-reduce of `size` bytes: a reduce-scatter and an all-gather.

            latency + steps x step + 2 (n - 1) / n x size / bandwidth

        Over m nodes each device then exchanges its n-th with its peers, in a tree: 2 log2(m) more steps.
        https://github.com/NVIDIA/nccl/blob/master/src/graph/tuning.cc has the same terms.
        """
        if ranks == 1:
            return 0.0
        network = self.network
        nodes = 1 if network is None else math.ceil(ranks / network.size)
        inside = math.ceil(ranks / nodes)  # of the fullest node
        steps = 2 * (inside - 1) if self.ring is Ring.ONE_WAY else inside
        seconds = self.latency + steps * self.step + 2 * (inside - 1) / inside * size / self.bandwidth
        if nodes > 1:
            share = 2 * (nodes - 1) / nodes * size / inside
            seconds += 2 * math.ceil(math.log2(nodes)) * network.step + share / network.bandwidth
        return seconds

    def faster(self, factor: float) -> "Link":
        """The same link `factor` times as fast: its bandwidths times, its times divided by it."""
        network = self.network and Network(
            self.network.size, self.network.step / factor, self.network.bandwidth * factor
        )
        return Link(self.latency / factor, self.step / factor, self.bandwidth * factor, self.ring, network)
