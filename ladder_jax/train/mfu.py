"""Model FLOPs utilisation: what the model needs to be trained on a token, over what the devices could do.

    MFU = tokens/s x FLOPs a token / (devices x peak FLOP/s of one)
    FLOPs a token = 3 x (2 x elements of all matrices + 2 L n H (T + 1))

Twice an element is its multiply-add, the embedding's lookup is none; attention is n heads of size H in L layers,
scores and values, over the (T + 1) / 2 positions that a token sees in the mean (causal, so half of what PaLM counts:
arXiv 2204.02311, appendix B); the backward pass is twice the forward. What is computed again (rematerialisation), the
vocabulary's padding and copies of key/value heads are not counted.
"""

import dataclasses

from jax.sharding import Mesh

from ladder_jax.config import TrainConfig
from ladder_jax.nn import ModelDef, flops
from ladder_jax.retrain import Plan
from ladder_jax.schedule.hardware import HARDWARE

# bfloat16, dense, of what jax calls a device; by the beginning of its kind, the longer first.
# Sources: schedule/hardware.py; else the data sheets of A100, H100 PCIe, H100 NVL and H200, and cloud.google.com/tpu.
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


@dataclasses.dataclass(frozen=True)
class Mfu:
    """flops: a token; peak: FLOP/s of one device, None where it is unknown."""

    flops: int
    devices: int
    peak: float | None
    said: str

    def of(self, tokens_per_second: float) -> float | None:
        """The utilisation, from 0 to 1."""
        return None if self.peak is None else tokens_per_second * self.flops / (self.devices * self.peak)


def mfu(plan: Plan, *, config: TrainConfig, mesh: Mesh) -> Mfu:
    """For training with `config` on `mesh`; `said` names formula and peak, or why there is none."""
    work = flops_a_token(plan.definition, length=config.sequence)
    if plan.frozen_layers or plan.lora.rank or plan.teacher:
        said = "no MFU: its formula is of training all weights on the data alone"
        return Mfu(work, mesh.size, None, said)
    kind = mesh.devices.flat[0].device_kind
    peak = config.peak_tflops * 1e12 if config.peak_tflops else peak_of(kind)
    if peak is None:
        said = f"no MFU: the peak of {kind!r} devices is not known (train.peak_tflops=... gives it)"
        return Mfu(work, mesh.size, None, said)
    source = "train.peak_tflops" if config.peak_tflops else f"{kind}, bfloat16"
    said = (
        f"MFU = tokens/s x {work:.4g} FLOPs a token / ({mesh.size} x {peak / 1e12:g} TFLOP/s, {source}),"
        " nothing recomputed counted"
    )
    return Mfu(work, mesh.size, peak, said)


def flops_a_token(definition: ModelDef, *, length: int) -> int:
    """Forward and backward, in sequences of `length` tokens."""
    config = definition.config
    attention = flops.attention(config, rows=1, length=length, heads=config.num_heads)
    return 3 * (2 * flops.matrix_elements(definition) + attention // length)


def peak_of(device_kind: str) -> float | None:
    """FLOP/s of a device of this kind (`jax.Device.device_kind`), None for one that the table does not have."""
    known = [kind for kind in sorted(PEAKS, key=len, reverse=True) if device_kind.startswith(kind)]
    return PEAKS[known[0]] if known else None
