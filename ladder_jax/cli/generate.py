"""The verb `generate`: one prompt by a Generator; several, a file of them or a conversation by an
Engine.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.util
import itertools
import json
import pathlib
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ladder_jax import terminal
from ladder_jax.config import Interleave
from ladder_jax.config.fields import not_none
from ladder_jax.errors import UserError
from ladder_jax.files import PIPE, check_writable, is_pipe

if TYPE_CHECKING:
    from ladder_jax.config import DecodeConfig
    from ladder_jax.data.tokenizer import Tokenizer
    from ladder_jax.decode import Engine, Request
    from ladder_jax.decode.engine.jsonl import Job
    from ladder_jax.pretrained import OpenedModel

SLOTS = 8
CONTEXT = 2048  # positions of a conversation
FORM = ("quantize", "interleave", "launch")  # how a model is decoded, whatever is asked of it
HTTP = ("fastapi", "uvicorn", "prometheus_client")


def run(options: dict) -> None:
    """Print or write the texts. Raises UserError for wrong options, before anything is computed."""
    args = argparse.Namespace(**options)
    _check(args)
    from ladder_jax.decode import memory
    from ladder_jax.decode.request import SAMPLING
    from ladder_jax.parallel import use_compilation_cache

    use_compilation_cache()
    with memory.explained("generating"):
        asked = open_asked(args, settings=(*SAMPLING, *FORM))
        if args.prompts:
            _file(asked)
        elif args.chat:
            _chat(asked)
        elif len(args.prompt) > 1:
            _several(asked)
        else:
            _one(asked)


def _check(args: argparse.Namespace) -> None:
    if sum(map(bool, (args.prompt, args.prompts, args.chat))) != 1:
        raise UserError(
            "generate needs --prompt TEXT (once or more often), --prompts FILE or --chat, one of these"
        )
    if bool(args.prompts) != bool(args.out):
        raise UserError("--prompts FILE and --out FILE go together")
    if args.prompts and is_pipe(pathlib.Path(args.prompts)):
        raise UserError(f"--prompts {args.prompts}: {PIPE}")
    if args.stream and len(args.prompt or ()) != 1:
        raise UserError("--stream is for one --prompt")
    if args.context is not None and not args.chat:
        raise UserError("--context is for --chat")
    check_writable("out", args.out)


def check_http(what: str) -> None:
    """Raises UserError where a package of the extra `serve` is missing."""
    if missing := [name for name in HTTP if importlib.util.find_spec(name) is None]:
        raise UserError(f"{what} needs {', '.join(missing)}: pip install 'ladder-jax[serve]'")


@dataclasses.dataclass(frozen=True)
class Asked:
    """A model, its tokenizer, and its settings as the command line changes them."""

    args: argparse.Namespace
    saved: OpenedModel
    tokenizer: Tokenizer
    settings: DecodeConfig

    @property
    def ends(self) -> dict[str, Sequence]:
        """What ends a text."""
        from ladder_jax.decode.request import ends

        return ends(self.args.stop or (), tokenizer=self.tokenizer)

    def requests(self) -> list[Request]:
        """One for each --prompt, the k-th with the seed + k."""
        from ladder_jax.decode import Request, check_prompts

        prompts = list(map(self.tokenizer.encode, self.args.prompt))
        check_prompts(prompts, vocab_size=self.saved.config.model.vocab_size)
        of = functools.partial(Request.of, config=self.settings, **self.ends)
        return [of(prompt, index=index) for index, prompt in enumerate(prompts)]

    def decided(self, *, tokens: int) -> DecodeConfig:
        """The settings with interleave=auto decided, for prompts of up to `tokens` tokens."""
        if self.settings.interleave is not Interleave.AUTO:
            return self.settings
        from ladder_jax.predict import halves

        definition = self.saved.define(tensor=self.args.tensor)
        return halves.of_reading(
            self.settings, definition=definition, tokens=tokens, say=terminal.say
        )

    def engine(self, *, capacity: int, **sizes: int) -> Engine:
        return self.saved.engine(
            settings=self.decided(tokens=capacity),
            tensor=self.args.tensor,
            capacity=capacity,
            decoder=self.tokenizer.to_bytes,
            **sizes,
        )

    def engine_for(self, requests: list[Request], *, max_queue: int) -> Engine:
        """Just large enough for them."""
        capacity = max(len(request.prompt) + request.max_new_tokens for request in requests)
        slots = min(self.args.slots or SLOTS, len(requests))
        return self.engine(slots=slots, capacity=capacity, max_queue=max_queue)


def open_asked(args: argparse.Namespace, *, settings: Iterable[str]) -> Asked:
    """settings: the names of those that the command line may change."""
    from ladder_jax.pretrained import open_model

    saved = open_model(
        args.checkpoint, ladder_layers=args.ladder_layers, residual=args.residual, ranks=args.ranks
    )
    changes = not_none({name: getattr(args, name) for name in settings})
    changed = dataclasses.replace(saved.config.decode, **changes)
    return Asked(args, saved, saved.tokenizer(), changed)


def _one(asked: Asked) -> None:
    from ladder_jax.decode import memory, steps

    args = asked.args
    saved = asked.saved
    (request,) = asked.requests()
    definition = saved.define(tensor=args.tensor)
    settings = asked.decided(tokens=len(request.prompt))
    memory.check_slots(
        definition,
        slots=1,
        capacity=len(request.prompt) + request.max_new_tokens,
        chunk=steps.CHUNK,
        loop=settings.loop,
        quantize=settings.quantize,
    )
    generator = saved.generator(settings=settings, tensor=args.tensor)
    pieces = generator.pieces(request, decoder=asked.tokenizer.to_bytes, config=settings)
    texts = itertools.chain(args.prompt, (piece.text for piece in pieces))
    for text in texts if args.stream else ["".join(texts)]:
        write(text)
    print()


def write(text: str) -> None:
    """Print a model's text as it is; on a terminal with its control characters escaped."""
    if sys.stdout.isatty():
        text = terminal.generated(text)
    print(text, end="", flush=True)


def _several(asked: Asked) -> None:
    """The texts in the prompts' order."""
    requests = asked.requests()
    engine = asked.engine_for(requests, max_queue=len(requests))
    handles = [engine.submit(request) for request in requests]
    for index, (prompt, handle) in enumerate(zip(asked.args.prompt, handles)):
        if index:
            print()
        write(f"{prompt}{handle.result().text}\n")


def _file(asked: Asked) -> None:
    from ladder_jax.decode.engine import jsonl

    def engine_for(left: list[Job]) -> Engine:
        requests = [request for job in left for request in job.requests]
        most = max(len(job.requests) for job in left)
        return asked.engine_for(requests, max_queue=max(most, SLOTS))

    jsonl.answer(_jobs(asked), file=asked.args.out, engine_for=engine_for)


def _jobs(asked: Asked) -> list[Job]:
    """The jobs in the file of prompts."""
    from ladder_jax.config import to_dict
    from ladder_jax.decode.engine import jsonl
    from ladder_jax.decode.request import CHOOSING

    args = asked.args
    saved = asked.saved
    tokenizer = asked.tokenizer
    quantized = asked.settings.quantize.value
    model = json.dumps([saved.identity, to_dict(saved.config.model), quantized, tokenizer.name])
    about = dict(
        tokenizer=tokenizer, defaults=asked.settings, vocab_size=saved.config.model.vocab_size
    )
    if not jsonl.is_batch(args.prompts):
        return jsonl.read(args.prompts, stop=args.stop or (), model=model, **about)
    check_http("OpenAI's batch format")
    from ladder_jax.serve import batch

    if given := [name for name in (*CHOOSING, "stop") if getattr(args, name) is not None]:
        option = given[0].replace("_", "-")
        raise UserError(
            f"--{option}: in OpenAI's batch format each line's body has its own settings"
        )
    if args.max_new_tokens:
        about["completion_tokens"] = args.max_new_tokens
    return batch.read(args.prompts, name=saved.config.run.name, identity=model, **about)


def _chat(asked: Asked) -> None:
    from ladder_jax.cli import chat

    tokenizer = asked.tokenizer
    if not tokenizer.has_chat:
        tokenizer.chat([])  # raises the UserError for it, before the weights are read
    message = chat.piped()
    # The engine's own thread decodes, so that Ctrl-C interrupts this thread, and never a round.
    with asked.engine(slots=1, capacity=asked.args.context or CONTEXT, max_queue=SLOTS) as engine:
        conversation = chat.Conversation(
            engine, tokenizer, asked.settings, asked.ends, say=terminal.say, show=write
        )
        chat.talk(conversation) if message is None else chat.answer(conversation, message)
