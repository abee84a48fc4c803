"""The options of a conversion, checked before any weights are read."""

import dataclasses
import enum
import pathlib

from ladder_jax.config import Dtype, ModelConfig
from ladder_jax.errors import UserError, member
from ladder_jax.pretrained.formats import with_ladder_layers
from ladder_jax.pretrained.sensitivity import Search

AUTO, ALL = "auto:", "all"
CALIBRATION_TOKENS = 2048


class Format(enum.Enum):
    """The format to write."""

    CHECKPOINT = "checkpoint"  # of ladder_jax, in a folder like a run's
    HUGGING_FACE = "huggingface"


@dataclasses.dataclass(frozen=True)
class Request:
    """model: the model to write. With `choose`, all its layers are ladder layers until the choice is made.
    choose: the number of layers to choose by measurement, or None.
    """

    source: str
    destination: pathlib.Path
    format: Format
    model: ModelConfig
    choose: int | None = None
    calibration: str | None = None
    calibration_tokens: int = CALIBRATION_TOKENS
    search: Search = Search.GREEDY
    tensor: int = 1


def parse(args: dict, model: ModelConfig) -> Request:
    """The request of a command line. model: the source's. Raises UserError for options that exclude each other."""
    layers, choose = args["ladder_layers"], None
    if layers is not None and layers.startswith(AUTO):
        choose = _count(layers, model)
    elif extra := [name for name in ("calibration", "calibration_tokens", "search", "tensor") if args[name]]:
        raise UserError(f"--{extra[0].replace('_', '-')} is for --ladder-layers auto:N")
    if choose is not None and not args["calibration"]:
        raise UserError(f"--ladder-layers {layers} measures the layers on a text: name one by --calibration FILE")
    for name in ("calibration_tokens", "tensor", "ranks"):
        if args[name] is not None and args[name] < 1:
            raise UserError(f"--{name.replace('_', '-')} must be positive, not {args[name]}")
    return Request(
        source=args["source"],
        destination=pathlib.Path(args["destination"]).expanduser().absolute(),
        format=member(Format, "format in --to", args["to"]),
        model=_with_layers(args, model, layers if choose is None else ALL),
        choose=choose,
        calibration=args["calibration"],
        calibration_tokens=args["calibration_tokens"] or CALIBRATION_TOKENS,
        search=member(Search, "value for --search:", args["search"] or Search.GREEDY.value),
        tensor=args["tensor"] or 1,
    )


def _with_layers(args: dict, model: ModelConfig, layers: str | None) -> ModelConfig:
    if args["dtype"]:
        dtype = member(Dtype, "value for --dtype:", args["dtype"])
        model = dataclasses.replace(model, dtype=dtype, residual_dtype=dtype)
    choice = dict(ladder_layers=layers, residual=args["residual"], ranks=args["ranks"])
    model = with_ladder_layers(model, **choice, name=args["source"])
    return dataclasses.replace(model, ladder_layers=None) if layers == ALL else model


def _count(layers: str, model: ModelConfig) -> int:
    number = layers.removeprefix(AUTO)
    if not number.isdecimal() or not 1 <= int(number) <= model.num_layers:
        raise UserError(f"--ladder-layers {layers}: the number must be from 1 to the model's {model.num_layers} layers")
    return int(number)
