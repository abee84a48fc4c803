"""Published figures of accelerators, for one jax device each.

TPU: https://cloud.google.com/tpu/docs (one page a version; tpu7x's two devices share a chip's
    figures).
NVIDIA: the data sheets of H100 SXM and B200 (dense bfloat16; NVLink counted in one direction).
"""

import dataclasses

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Hardware:
    """One device. memory: bytes. flops: dense bfloat16 FLOP/s. bandwidth: of the memory, bytes/s.

    link: bytes/s that a device can send. clock: Hz, to convert the compiler's cycle estimates to
    seconds; None if the compiler gives none. chip: devices per chip. machine: what programs reach
    on it, for `ladder-jax predict` and `plan` (predict/hardware).
    """

    machine: str
    memory: int
    flops: float
    bandwidth: float
    link: float
    clock: float | None = None
    chip: int = 1


# Clocks of TPUs follow from the peak: 128 x 128 (v5) or 256 x 256 multiply-adds a cycle in each
# matrix unit.
HARDWARE = {
    "v5e": Hardware("v5e", 16 * GIB, 197e12, 819e9, 100e9, clock=1.5e9),
    "v5p": Hardware("v5p", 95 * GIB, 459e12, 2765e9, 300e9, clock=1.75e9),
    "v6e": Hardware("v6e", 32 * GIB, 918e12, 1640e9, 224e9, clock=1.75e9),
    "tpu7x": Hardware("tpu7x", 96 * GIB, 1153e12, 3690e9, 300e9, clock=2.2e9, chip=2),
    "h100": Hardware("h100-nvlink", 84_900_000_000, 989e12, 3352e9, 450e9),
    "b200": Hardware("b200-nvlink", 191_000_000_000, 2250e12, 8000e9, 900e9),
}

# Dense bfloat16 FLOP/s of one jax device, by a prefix of `jax.Device.device_kind`; the longest
# matching prefix counts. Sources beside those of HARDWARE: the data sheets of A100, H100 PCIe, H100
# NVL and H200, and cloud.google.com/tpu.
PEAKS = {
    "TPU v4": 275e12,
    "TPU v5 lite": HARDWARE["v5e"].flops,
    "TPU v5e": HARDWARE["v5e"].flops,
    "TPU v5": HARDWARE["v5p"].flops,
    "TPU v6": HARDWARE["v6e"].flops,
    "TPU7x": HARDWARE["tpu7x"].flops,
    "NVIDIA A100": 312e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H100": HARDWARE["h100"].flops,
    "NVIDIA H200": 989e12,
    "NVIDIA B200": HARDWARE["b200"].flops,
}

MACHINES = {  # names of predict/hardware, likewise
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v6": "v6e",
    "TPU7x": "tpu7x",
    "NVIDIA H100 PCIe": "h100-no-nvlink",
    "NVIDIA H100 NVL": "h100-no-nvlink",  # NVLink joins two cards, PCIe the others
    "NVIDIA H100": "h100-nvlink",
    "NVIDIA H200": "h200-nvlink",
    "NVIDIA B200": "b200-nvlink",
    "NVIDIA B300": "b300-nvlink",
    "NVIDIA L40S": "l40s-no-peer",
    "NVIDIA A800": "a800-pcie",
}


def machine_of(device_kind: str) -> str | None:
    """The machine of predict/hardware for devices of this kind, None for one that has none."""
    matching = [
        kind for kind in sorted(MACHINES, key=len, reverse=True) if device_kind.startswith(kind)
    ]
    return MACHINES[matching[0]] if matching else None
