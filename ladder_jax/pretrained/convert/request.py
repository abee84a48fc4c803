"""The options of a conversion, checked before any weights are read."""

import dataclasses
import enum
import logging
import pathlib

from ladder_jax.config import Dtype, ModelConfig
from ladder_jax.errors import UserError, member
from ladder_jax.pretrained.formats import with_ladder_layers
from ladder_jax.pretrained.refit import FittedProjections, Refit
from ladder_jax.pretrained.sensitivity import Search, Text, parse_text

AUTO, ALL = "auto:", "all"
MEASURED_TOKENS = 2048
REFIT_TOKENS = 16_384
TOKENS_A_FEATURE = 8
"""Calibration tokens for each feature that an output projection reads, from which on its fit gains on other text. With
1.3 and 2.7 it lost (`python -m experiments.refit`)."""


class Format(enum.Enum):
    """The format to write."""

    CHECKPOINT = "checkpoint"  # of ladder_jax, in a folder like a run's
    HUGGING_FACE = "huggingface"


class What(enum.Enum):
    """What to fit again of the converted layers."""

    INPUTS = "inputs"  # the projections that read the sublayers' inputs
    BOTH = "both"  # and their output projections
    NONE = "none"


@dataclasses.dataclass(frozen=True)
class Request:
    """model: the model to write. With `choose`, all its layers are ladder layers until the choice is made.
    choose: the number of layers to choose by measurement, or None.
    refit: None to keep the weights as they are.
    measured_tokens, refit_tokens: of the calibration texts; the layers are chosen on the first, and refitted on those
    after them.
    """

    source: str
    destination: pathlib.Path
    format: Format
    model: ModelConfig
    choose: int | None = None
    calibration: tuple[Text, ...] = ()
    measured_tokens: int = MEASURED_TOKENS
    refit_tokens: int = REFIT_TOKENS
    refit: Refit | None = None
    search: Search = Search.GREEDY
    tensor: int = 1


def parse(args: dict, model: ModelConfig) -> Request:
    """The request of a command line. model: the source's. Raises UserError for options that exclude each other."""
    layers, choose = args["ladder_layers"], None
    if layers is not None and layers.startswith(AUTO):
        choose = _count(layers, model)
    elif args["search"]:
        raise UserError("--search is for --ladder-layers auto:N")
    if choose is not None and not args["calibration"]:
        raise UserError(f"--ladder-layers {layers} measures the layers on a text: name one by --calibration FILE")
    for name in ("calibration_tokens", "tensor", "ranks"):
        if args[name] is not None and args[name] < 1:
            raise UserError(f"--{name.replace('_', '-')} must be positive, not {args[name]}")
    tokens = args["calibration_tokens"]
    measured = min(tokens or MEASURED_TOKENS, MEASURED_TOKENS) if args["refit"] != What.NONE.value else tokens
    return Request(
        source=args["source"],
        destination=pathlib.Path(args["destination"]).expanduser().absolute(),
        format=member(Format, "format in --to", args["to"]),
        model=_with_layers(args, model, layers if choose is None else ALL),
        choose=choose,
        calibration=tuple(map(parse_text, args["calibration"] or ())),
        measured_tokens=measured or MEASURED_TOKENS,
        refit_tokens=tokens or REFIT_TOKENS,
        refit=_refit(args, model=model, choose=choose),
        search=member(Search, "value for --search:", args["search"] or Search.GREEDY.value),
        tensor=args["tensor"] or 1,
    )


def _refit(args: dict, *, model: ModelConfig, choose: int | None) -> Refit | None:
    """By default the inputs are refitted where there is a text for it; with enough of it, the outputs too."""
    what = None if args["refit"] is None else member(What, "value for --refit:", args["refit"])
    if not args["calibration"]:
        needing = [name for name in ("calibration_tokens", "tensor", "ridge") if args[name] is not None]
        if what not in (None, What.NONE):
            needing = ["refit"]
        if needing:
            raise UserError(f"--{needing[0].replace('_', '-')} needs a text: name one by --calibration FILE")
        return None
    if args["ladder_layers"] is None:
        raise UserError("--calibration needs --ladder-layers, the layers to convert")
    if what is not What.NONE:
        tokens = args["calibration_tokens"] or REFIT_TOKENS
        ridge = {} if args["ridge"] is None else {"ridge": args["ridge"]}
        return Refit(projections=_projections(model, tokens=tokens, given=what), **ridge)
    if args["ridge"] is not None:
        raise UserError("--ridge is for --refit inputs and both")
    if choose is None:
        raise UserError("--calibration is for --refit inputs and both, and for --ladder-layers auto:N")
    return None


def _projections(model: ModelConfig, *, tokens: int, given: What | None) -> FittedProjections:
    """What to fit on so many tokens; `given` if there is one, with a notice where that may lose."""
    has_mlp = model.moe is None or model.moe.dense_layers
    features = max(model.num_heads * model.head_dim, model.d_ff if has_mlp else 0)
    enough = TOKENS_A_FEATURE * features
    if given is What.BOTH and tokens < enough:
        logging.getLogger(__name__).warning(
            f"notice: --refit both fits {features} features on {tokens} tokens; with fewer than {TOKENS_A_FEATURE} for"
            f" each it may give back less than --refit inputs: --calibration-tokens {enough}"
        )
    return FittedProjections((given or (What.BOTH if tokens >= enough else What.INPUTS)).value)


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
