"""What is evaluated: a model on its mesh with its tokenizer, by its name or from memory."""

import dataclasses
import functools
import json
import os
from collections.abc import Callable

from ladder_jax import config, pretrained
from ladder_jax.data.tokenizer import Tokenizer
from ladder_jax.decode import Engine, memory, weights
from ladder_jax.errors import UserError
from ladder_jax.evaluate import pairs
from ladder_jax.evaluate.scorer import BATCH_TOKENS, Scorer
from ladder_jax.nn import ModelDef, Params, Transformer
from ladder_jax.pretrained import OpenedModel

WINDOW = 2048  # lm-evaluation-harness's default, where a model names none
SLOTS = 8  # texts that are written at the same time


@dataclasses.dataclass(frozen=True)
class Model:
    """`open_model("runs/book")`, or `Model.of(transformer, tokenizer=Bytes())`.

    load: gives the parameters, or what reads them one by one, when they are first needed.
    window: the most tokens that the model is to read at once, the harness's `max_length`.
    prefix: the token before a text's first.
    digest: tells the model from others; results in a file are only taken up for the same.
    """

    definition: ModelDef
    load: Callable[[], Params | weights.Reader]
    tokenizer: Tokenizer
    window: int
    prefix: int
    digest: str = ""
    batch_tokens: int = BATCH_TOKENS

    def __post_init__(self):
        if self.window < 1:
            raise UserError(f"window must be at least 1, not {self.window}")
        if not 0 <= self.prefix < self.definition.config.vocab_size:
            raise UserError(
                f"the prefix token {self.prefix} is outside the model's vocabulary of"
                f" {self.definition.config.vocab_size}"
            )

    @classmethod
    def of(
        cls, model: Transformer, *, tokenizer: Tokenizer, window: int = WINDOW, prefix: int | None = None
    ) -> "Model":
        """prefix: by default the tokenizer's (see `pairs.prefix_of`)."""
        prefix = pairs.prefix_of(tokenizer) if prefix is None else prefix
        return cls(model.definition, lambda: model.params, tokenizer, window, prefix)

    @functools.cached_property
    def params(self) -> Params:
        """In the compute dtype where they are read, as the model casts matrices anyway."""
        found = self.load()
        if not callable(found):
            return found
        memory.check_stacked(self.definition)
        return weights.stacked(self.definition, found)

    @functools.cached_property
    def scorer(self) -> Scorer:
        return Scorer(self.definition, self.params, batch_tokens=self.batch_tokens)

    def engine(self, *, capacity: int, slots: int = SLOTS) -> Engine:
        """For requests of at most `capacity` tokens. Its weights, in decoding's layout, are held beside a scorer's."""
        sizes = dict(slots=slots, capacity=capacity, max_queue=slots)
        params = self.params if "params" in vars(self) else self.load()
        return Engine(self.definition, params, **sizes, decoder=self.tokenizer.to_bytes)


def open_model(
    name: str | os.PathLike,
    *,
    ladder_layers: str | None = None,
    residual: str | None = None,
    ranks: int | None = None,
    tensor: int | None = None,
    data: int = 1,
    window: int | None = None,
    prefix: int | None = None,
    batch_tokens: int = BATCH_TOKENS,
) -> Model:
    """The model called `name` on data x tensor devices (default tensor: as trained, if there are as many).

    name, ladder_layers, residual, ranks: as in `pretrained.open_model`. window: by default the length of the sequences
    it was trained on. prefix: see `pairs.prefix_of`. Its weights are read when they are needed. Raises UserError where
    there is no such model, it is damaged, or the mesh is not possible.
    """
    opened = pretrained.open_model(name, ladder_layers=ladder_layers, residual=residual, ranks=ranks)
    tokenizer = opened.tokenizer()
    prefix = pairs.prefix_of(tokenizer) if prefix is None else prefix
    definition = opened.define(tensor=tensor, data=data)
    return Model(
        definition,
        lambda: opened.reader(definition),
        tokenizer,
        opened.config.train.sequence if window is None else window,
        prefix,
        _digest(opened, tokenizer),
        batch_tokens,
    )


def _digest(opened: OpenedModel, tokenizer: Tokenizer) -> str:
    return json.dumps([opened.identity, config.to_dict(opened.config.model), tokenizer.name])
