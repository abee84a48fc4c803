"""The checked arguments of `ladder-jax bench`, with defaults; imports no jax."""

import dataclasses
import itertools

from ladder_jax.config import (
    Execution,
    MeshConfig,
    ModelConfig,
    check_execution,
    check_fits_mesh,
)
from ladder_jax.config.fields import check, natural, not_none
from ladder_jax.config.run import check_tensor
from ladder_jax.schedule import models

# parameters of `make`
OPTIONS = (
    "model residual batch interleave prompt_length new_tokens tensor warmup repeats layers share"
).split()


@dataclasses.dataclass(frozen=True)
class Variant:
    """What is timed: a residual, and in how many parts in turn its prefill computes."""

    residual: str
    interleave: int

    @property
    def name(self) -> str:
        return self.residual if self.interleave == 1 else f"{self.residual} in two halves"


@dataclasses.dataclass(frozen=True)
class Request:
    """model: as the user typed it; shape: its configuration. batches: numbers of rows. warmup,
    repeats: generations per residual and batch; only `repeats` are timed. interleaves: of the
    prefill, each with all residuals.

    tensor: number of devices; None for all devices, until `on_devices` replaces it.
    share: if not None, one device runs one of so many ranks, without communication.
    """

    model: str
    shape: ModelConfig
    residuals: tuple[str, ...]
    batches: tuple[int, ...]
    interleaves: tuple[int, ...]
    prompt_length: int = 1024
    new_tokens: int = 512
    tensor: int | None = None
    warmup: int = 5
    repeats: int = 10
    layers: int | None = None
    share: int | None = None

    @property
    def variants(self) -> tuple[Variant, ...]:
        return tuple(Variant(*one) for one in itertools.product(self.residuals, self.interleaves))

    @property
    def baseline(self) -> Variant:
        """What the others are held to: Standard's whole batch, or else the first."""
        standard = Variant("standard", 1)
        return standard if standard in self.variants else self.variants[0]

    def config(self, residual: str) -> ModelConfig:
        """The model's configuration with one of the residuals; of a share, a rank's: the same
        matrices, cache and kernels, without communication. Its outputs mean nothing.
        """
        config = models.variant(self.shape, residual, ranks=self.tensor, layers=self.layers)
        if self.share is None:
            return config
        return dataclasses.replace(
            config,
            num_heads=config.num_heads // self.share,
            num_kv_heads=max(1, config.num_kv_heads // self.share),
            d_ff=config.d_ff // self.share,
            vocab_size=models.shard(config, ranks=self.share).vocabulary,
        )

    @property
    def depth(self) -> int:
        return self.layers or self.shape.num_layers

    @property
    def capacity(self) -> int:
        return self.prompt_length + self.new_tokens


def make(
    *,
    model: str,
    residual: str,
    batch: str = "1,4,16,64",
    interleave: str = "1",
    **numbers: int | None,
) -> Request:
    """A checked request. numbers: its other fields; None gives a default. A value that stands twice
    in a list counts once. Raises UserError for an invalid request.
    """
    shape = models.by_name(model)
    request = Request(
        model=model,
        shape=shape,
        residuals=tuple(dict.fromkeys(residual.split(","))),
        batches=_positive("batch", batch),
        interleaves=_positive("interleave", interleave),
        **not_none(numbers),
    )
    check(
        request.new_tokens > 1,
        "--new-tokens must be at least 2, not 1: the first one is the prefill's",
    )
    if request.share is not None:
        check(
            shape.moe is None,
            "--share is for dense models: a rank alone cannot route among all experts of the model",
        )
        check(
            request.tensor in (None, 1),
            f"--share runs one rank on one device: leave --tensor {request.tensor} out",
        )
        check_fits_mesh(shape, MeshConfig(tensor=request.share))
        request = dataclasses.replace(request, tensor=1)
    for one in request.variants:
        execution = Execution(interleave=one.interleave)
        check_execution(execution, model=request.config(one.residual), rows=2)
    return request


def on_devices(request: Request, *, count: int) -> Request:
    """The request for a machine of `count` devices. Raises UserError if they are too few or do not
    divide the model.
    """
    tensor = count if request.tensor is None else request.tensor
    check_tensor(request.shape, tensor=tensor, devices=count, where="this machine")
    return dataclasses.replace(request, tensor=tensor)


def _positive(option: str, words: str) -> tuple[int, ...]:
    """The integers above 0 in a list. Raises UserError for any other word."""
    for word in words.split(","):
        allowed = f"--{option} must be positive numbers, as in 1,4,16, not {word!r}"
        check(natural(word.strip()) > 0, allowed)
    return tuple(dict.fromkeys(map(int, words.split(","))))
