"""What is evaluated: a model on its mesh with its tokenizer, by its name or from memory.

From text to tokens it goes as lm-evaluation-harness does: lm_eval/models/huggingface.py
(tok_encode, prefix_token_id, _loglikelihood_tokens), version 0.4.13.
"""

import dataclasses
import functools
import json
import os
from collections.abc import Callable, Iterator

from ladder_jax import config, pretrained
from ladder_jax.config import Loop
from ladder_jax.data.tokenizer import BYTES, Tokenizer
from ladder_jax.decode import Engine, NoNumbers, Request, Result, memory, weights
from ladder_jax.decode.engine.jsonl import answers
from ladder_jax.errors import UserError
from ladder_jax.evaluate.scorer import BATCH_TOKENS, Scorer, Span
from ladder_jax.nn import ModelDef, Params
from ladder_jax.pretrained import OpenedModel

WINDOW = 2048  # lm-evaluation-harness's default, where a model names none
SLOTS = 8  # texts that are written at the same time
NEWLINE = 10  # a byte
STOP = ("Question:", "</s>", "<|im_end|>")  # of lm-evaluation-harness's gsm8k
MAX_NEW_TOKENS = 256  # its default (max_gen_toks)


@dataclasses.dataclass(frozen=True)
class Model:
    """`open_model("runs/book")` makes one.

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

    @functools.cached_property
    def params(self) -> Params:
        """In the compute dtype where they are read, as the model casts matrices anyway."""
        found = self.load()
        if not callable(found):
            return found
        memory.check_weights(self.definition, loop=Loop.SCAN)
        return weights.prepare(self.definition, found, loop=Loop.SCAN)

    @functools.cached_property
    def scorer(self) -> Scorer:
        return Scorer(self.definition, self.params, batch_tokens=self.batch_tokens)

    def answers[Key](
        self, requests: dict[Key, Request], *, slots: int = SLOTS
    ) -> Iterator[tuple[Key, Result]]:
        """Each request's result, as they finish; `slots` of them run at the same time.

        The engine's weights, in decoding's layout, are held beside a scorer's.
        """
        if not requests:
            return
        capacity = max(len(one.prompt) + one.max_new_tokens for one in requests.values())
        engine = self.engine(
            capacity=capacity, slots=min(slots, len(requests)), max_queue=len(requests)
        )
        for key, (result,) in answers(engine, {key: [one] for key, one in requests.items()}):
            if isinstance(result, NoNumbers):
                raise result
            yield key, result

    def engine(self, *, capacity: int, slots: int = SLOTS, max_queue: int = SLOTS) -> Engine:
        """For requests of at most `capacity` tokens."""
        sizes = dict(slots=slots, capacity=capacity, max_queue=max_queue)
        params = self.params if "params" in vars(self) else self.load()
        return Engine(self.definition, params, **sizes, decoder=self.tokenizer.to_bytes)

    def encode(self, text: str) -> list[int]:
        """Tokens of a text, with what the tokenizer puts around it; a beginning that is written out
        stands once.
        """
        tokens = self.tokenizer.encode(text)
        begin = self.tokenizer.bos_token_id
        if tokens[:2] == [begin, begin]:
            return tokens[1:]
        return tokens

    def cut(self, span: Span) -> Span:
        """`span` without the tokens on its left for which the window has no room.

        Raises UserError where what is scored alone is longer.
        """
        if len(span.scored) > self.window:
            raise UserError(
                f"a continuation of {len(span.scored)} tokens is longer than the window of {self.window}"
            )
        excess = max(0, span.length - self.window)
        return Span(span.context[excess:], span.scored)


def prefix_of(tokenizer: Tokenizer) -> int:
    """The token before a text's first: the one that begins a text, else the one that ends a
    document.

    Bytes have neither; there it is the newline, as after a line before. Raises UserError for other
    such tokenizers.
    """
    if tokenizer.bos_token_id is not None:
        return tokenizer.bos_token_id
    if tokenizer.stop_ids:
        return tokenizer.stop_ids[0]
    if tokenizer.name == BYTES:
        return NEWLINE
    raise UserError(
        "the tokenizer has no token that begins or ends a text, to stand before the first (--prefix-token ID names one)"
    )


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
    """The model called `name` on data x tensor devices (default tensor: as trained, if there are as
    many).

    name, ladder_layers, residual, ranks: as in `pretrained.open_model`. window: by default the
    length of the sequences it was trained on. prefix: see `prefix_of`. Its weights are read when
    they are needed. Raises UserError where there is no such model, it is damaged, or the mesh is
    not possible.
    """
    opened = pretrained.open_model(
        name, ladder_layers=ladder_layers, residual=residual, ranks=ranks
    )
    tokenizer = opened.tokenizer()
    if prefix is None:
        prefix = prefix_of(tokenizer)
    definition = opened.define(tensor=tensor, data=data)
    if window is None:
        window = opened.config.train.sequence
    return Model(
        definition,
        lambda: opened.reader(definition),
        tokenizer,
        window,
        prefix,
        _digest(opened, tokenizer),
        batch_tokens,
    )


def _digest(opened: OpenedModel, tokenizer: Tokenizer) -> str:
    return json.dumps([opened.identity, config.to_dict(opened.config.model), tokenizer.name])
