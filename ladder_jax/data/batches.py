"""Shuffled batches of token windows, on grain. A batch is a function of the seed and the step alone."""

import dataclasses

import grain
import numpy as np

from ladder_jax.config import DataConfig, TrainConfig
from ladder_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Windows:
    """A grain data source: window i is tokens [i * T, i * T + T], T + 1 of them (the last is only a target)."""

    tokens: np.ndarray
    length: int

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.length

    def __getitem__(self, index) -> np.ndarray:
        start = int(index) * self.length
        return self.tokens[start : start + self.length + 1].astype(np.int32)

    def __repr__(self) -> str:
        return f"Windows({len(self)} of {self.length})"


def split(text: np.ndarray, *, config: DataConfig) -> tuple[np.ndarray, np.ndarray]:
    """Training text, and the held-out end of it."""
    cut = len(text) - int(len(text) * config.validation_fraction)
    return text[:cut], text[cut:]


def training(text: np.ndarray, *, config: TrainConfig) -> grain.MapDataset:
    """`training(...)[step]` is that step's tokens [batch, T + 1]; every epoch is shuffled anew."""
    windows = _windows(text, config.sequence, "training")
    return grain.MapDataset.source(windows).shuffle(config.seed).repeat().batch(config.batch)


def held_out(text: np.ndarray, *, config: TrainConfig) -> list[np.ndarray]:
    """The first few batches [batch, T + 1] of held-out text, repeated where it is short."""
    windows = _windows(text, config.sequence, "held-out")
    dataset = grain.MapDataset.source(windows).repeat().batch(config.batch)
    count = max(1, min(config.evaluation_batches, len(windows) // config.batch))
    return [dataset[index] for index in range(count)]


def _windows(text: np.ndarray, length: int, part: str) -> Windows:
    windows = Windows(text, length)
    if len(windows) == 0:
        raise UserError(f"the {part} text has {len(text)} tokens, fewer than train.sequence + 1 = {length + 1}")
    return windows
