"""Published figures of devices; a *device* is what jax calls one.

TPU: https://cloud.google.com/tpu/docs (one page a version; tpu7x's two devices share a chip's figures).
NVIDIA: the data sheets of H100 SXM and B200 (dense bfloat16; NVLink counted in one direction).
"""

import dataclasses

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Hardware:
    """memory: bytes; flops: bfloat16 a second; bandwidth: of the memory, bytes a second;
    link: bytes a second that a device sends; clock: cycles a second in which the compiler estimates, None
    where it does not; chip: devices a chip.
    """

    memory: int
    flops: float
    bandwidth: float
    link: float
    clock: float | None = None
    chip: int = 1


# Clocks of TPUs follow from the peak: 128 x 128 (v5) or 256 x 256 multiply-adds a cycle in each matrix unit.
HARDWARE = {
    "v5e": Hardware(16 * GIB, 197e12, 819e9, 100e9, clock=1.5e9),
    "v5p": Hardware(95 * GIB, 459e12, 2765e9, 300e9, clock=1.75e9),
    "v6e": Hardware(32 * GIB, 918e12, 1640e9, 224e9, clock=1.75e9),
    "tpu7x": Hardware(96 * GIB, 1153e12, 3690e9, 300e9, clock=2.2e9, chip=2),
    "h100": Hardware(84_900_000_000, 989e12, 3352e9, 450e9),
    "b200": Hardware(191_000_000_000, 2250e12, 8000e9, 900e9),
}

# bfloat16, dense, of what jax calls a device; by the beginning of `jax.Device.device_kind`, the longest match counts.
# Beyond HARDWARE: the data sheets of A100, H100 PCIe, H100 NVL and H200, and cloud.google.com/tpu.
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
