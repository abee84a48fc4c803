"""The verb `generate`: one prompt by a Generator; several, a file of them or a conversation by an Engine."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import itertools
import json
import sys
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ladder_jax import terminal
from ladder_jax.errors import RunFailed, UserError, member, printable
from ladder_jax.files import check_writable

if TYPE_CHECKING:
    from ladder_jax.config import DecodeConfig
    from ladder_jax.data.tokenizer import Tokenizer
    from ladder_jax.decode import Engine, Request
    from ladder_jax.decode.request import Piece
    from ladder_jax.pretrained import OpenedModel

SUMMARY = "Continue prompts with a model: a checkpoint, or one of Hugging Face or llama.cpp."
EXAMPLE = 'ladder-jax generate runs/tiny --prompt "def main(" --temperature 0.8 --seed 1'

SLOTS = 8
LINE_EVERY = 10.0  # seconds between lines about a long text
CONTEXT = 2048  # positions of a conversation
BATCHED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "stop")  # in each body of a batch


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "checkpoint", metavar="MODEL", help="a run's folder, a Hugging Face folder, a GGUF file, or org/name of the Hub"
    )
    parser.add_argument("--prompt", action="append", metavar="TEXT", help="text to continue; may be given again")
    parser.add_argument(
        "--prompts",
        metavar="FILE",
        help='JSON lines such as {"prompt": "Once", "temperature": 0.8}, or of OpenAI\'s batch format',
    )
    parser.add_argument(
        "--out", metavar="FILE", help="for --prompts: a JSON line as each finishes; a second run goes on with it"
    )
    parser.add_argument("--chat", action="store_true", help="a conversation, or one answer to standard input")
    parser.add_argument("--stream", action="store_true", help="print one prompt's text as it comes")
    for option, kind, letter, text in (
        ("max-new-tokens", int, "N", "how many tokens to add (default 128)"),
        ("temperature", float, "T", "0 is greedy (the default)"),
        ("top-k", int, "K", "only the K most probable tokens (default 0: all)"),
        ("top-p", float, "P", "only the most probable tokens that together reach P (default 1: all)"),
        ("min-p", float, "P", "only tokens at least P times as probable as the best (default 0: all)"),
        ("repetition-penalty", float, "R", "above 1, tokens in the prompt or text become less likely (default 1)"),
        ("seed", int, "S", "the same seed gives the same text (default 0)"),
        ("slots", int, "N", "prompts that are continued at the same time (default 8)"),
        ("context", int, "S", "for --chat: tokens of history and answer together (default 2048)"),
        ("ladder-layers", str, "WHICH", "make these ladder layers, in memory: N (the last N), i,j or all"),
        ("residual", str, "NAME", "the kind of those layers (default ladder)"),
        ("ranks", int, "N", "for ladder-fresh: the tensor-parallel ranks it is for"),
    ):
        parser.add_argument(f"--{option}", type=kind, metavar=letter, help=text)
    parser.add_argument("--stop", action="append", metavar="TEXT", help="end before this text; may be given again")
    parser.add_argument(
        "--tensor", type=int, metavar="N", help="tensor-parallel devices (default: as trained, if there are as many)"
    )
    parser.add_argument("--quantize", help="int8: the weights in 8 bits; none (the default)")
    parser.add_argument(
        "--interleave", metavar="N", help="2: read prompts in two halves in turn; auto: where predicted to be faster"
    )


def run(args: argparse.Namespace) -> None:
    """Print or write the texts. Raises UserError for wrong options, before anything is computed."""
    _check(args)
    from ladder_jax.decode import memory
    from ladder_jax.parallel import use_compilation_cache
    from ladder_jax.pretrained import open_model

    use_compilation_cache()
    with memory.explained("generating"):
        choice = dict(ladder_layers=args.ladder_layers, residual=args.residual, ranks=args.ranks)
        saved = open_model(args.checkpoint, **choice)
        tokenizer, settings = saved.tokenizer(), _settings(args, saved.config.decode)
        if args.prompts:
            _file(args, saved, tokenizer, settings)
        elif args.chat:
            _chat(args, saved, tokenizer, settings)
        elif len(args.prompt) > 1:
            _several(args, saved, tokenizer, settings)
        else:
            _one(args, saved, tokenizer, settings)


def _check(args: argparse.Namespace) -> None:
    if sum(map(bool, (args.prompt, args.prompts, args.chat))) != 1:
        raise UserError("generate needs --prompt TEXT (once or more often), --prompts FILE or --chat, one of these")
    if bool(args.prompts) != bool(args.out):
        raise UserError("--prompts FILE and --out FILE go together")
    if args.stream and len(args.prompt or ()) != 1:
        raise UserError("--stream is for one --prompt")
    for name in ("slots", "tensor"):
        if (value := getattr(args, name)) is not None and value < 1:
            raise UserError(f"--{name} must be at least 1, not {value}")
    if args.context is not None and not args.chat:
        raise UserError("--context is for --chat")
    if args.context is not None and args.context < 2:
        raise UserError(f"--context must be at least 2, not {args.context}")
    check_writable("out", args.out)


def _settings(args: argparse.Namespace, defaults: DecodeConfig) -> DecodeConfig:
    """The checkpoint's settings, changed by the options."""
    from ladder_jax.config import Interleave, Quantize
    from ladder_jax.decode.request import SAMPLING

    changes = {name: value for name in SAMPLING if (value := getattr(args, name)) is not None}
    if args.quantize:
        changes["quantize"] = member(Quantize, "--quantize", args.quantize)
    if args.interleave:
        changes["interleave"] = member(Interleave, "--interleave", args.interleave)
    return dataclasses.replace(defaults, **changes)


def _decided(args: argparse.Namespace, saved: OpenedModel, settings: DecodeConfig, *, tokens: int) -> DecodeConfig:
    """`settings` with interleave=auto decided, for prompts of up to `tokens` tokens."""
    from ladder_jax.config import Interleave

    if settings.interleave is not Interleave.AUTO:
        return settings
    from ladder_jax.predict import halves

    return halves.of_reading(settings, definition=saved.define(tensor=args.tensor), tokens=tokens, say=_say)


def _one(args: argparse.Namespace, saved: OpenedModel, tokenizer: Tokenizer, settings: DecodeConfig) -> None:
    from ladder_jax.decode import Generator, NoNumbers, memory, steps

    (request,) = _requests(args, saved, tokenizer, settings)
    definition = saved.define(tensor=args.tensor)
    settings = _decided(args, saved, settings, tokens=len(request.prompt))
    form, capacity = dict(loop=settings.loop, quantize=settings.quantize), len(request.prompt) + request.max_new_tokens
    memory.check_slots(definition, slots=1, capacity=capacity, chunk=steps.CHUNK, **form)
    generator = Generator(definition, saved.reader(definition), **form)
    read = dict(prefill_chunk=settings.prefill_chunk, interleave=settings.interleave.parts)
    how = dict(launch=settings.launch, **read)
    pieces = generator.pieces(request, decoder=tokenizer.to_bytes, **how)
    if args.stream:
        _stream(args.prompt[0], pieces)
        return
    try:
        text = _whole(pieces, total=request.max_new_tokens)
    except NoNumbers as error:
        raise RunFailed(f"prompt 1 of 1: {error}") from error
    print(_shown(args.prompt[0] + text), flush=True)


def _whole(pieces: Iterable[Piece], *, total: int) -> str:
    """The pieces' text. Every few seconds a line on standard error says how far it is."""
    text, done, last = "", 0, time.monotonic()
    for piece in pieces:
        text, done = text + piece.text, done + len(piece.tokens)
        if done < total and time.monotonic() - last > LINE_EVERY:
            last = time.monotonic()
            print(f"{done:,} of {total:,} tokens", file=sys.stderr, flush=True)
    return text


def _stream(prompt: str, pieces: Iterable[Piece]) -> None:
    print(_shown(prompt), end="", flush=True)
    for piece in pieces:
        print(_shown(piece.text), end="", flush=True)
    print()


def _say(line: str) -> None:
    print(printable(line), file=sys.stderr, flush=True)


def _shown(text: str) -> str:
    return terminal.generated(text) if sys.stdout.isatty() else text


def _several(args: argparse.Namespace, saved: OpenedModel, tokenizer: Tokenizer, settings: DecodeConfig) -> None:
    """The texts in the prompts' order. A prompt without numbers is named at the end, after the others' texts."""
    from ladder_jax.decode import NoNumbers

    requests = _requests(args, saved, tokenizer, settings)
    engine = _engine_for(requests, args, saved, tokenizer, settings)
    handles, failed = [engine.submit(request) for request in requests], []
    for index, (prompt, handle) in enumerate(zip(args.prompt, handles)):
        if index:
            print()
        try:
            print(_shown(prompt + handle.result().text), flush=True)
        except NoNumbers as error:
            failed.append(f"prompt {index + 1} of {len(handles)}: {error}")
    if failed:
        raise RunFailed("; ".join(failed))


def _file(args: argparse.Namespace, saved: OpenedModel, tokenizer: Tokenizer, settings: DecodeConfig) -> None:
    from ladder_jax.decode.engine import jsonl
    from ladder_jax.progress import progress

    jobs, form = _jobs(args, saved, tokenizer, settings)
    with jsonl.alone(args.out):
        left = jsonl.unanswered(args.out, jobs, **form)
        answered = itertools.count(len(jobs) - len(left) + 1)
        with progress(len(jobs), done=len(jobs) - len(left), label="{done}/{total} prompts") as update:
            advance = lambda: update(next(answered), "")
            if left:
                requests = [request for job in left for request in job.requests]
                engine = _engine_for(requests, args, saved, tokenizer, settings)
                jsonl.answer(engine, left, file=args.out, advance=advance)


def _jobs(
    args: argparse.Namespace, saved: OpenedModel, tokenizer: Tokenizer, settings: DecodeConfig
) -> tuple[list, dict]:
    """The jobs in the file of prompts, and `jsonl.unanswered`'s arguments for their answers' format."""
    from ladder_jax.cli.verbs.serve import NEEDS
    from ladder_jax.config import to_dict
    from ladder_jax.decode.engine import jsonl

    model = json.dumps([saved.identity, to_dict(saved.config.model), settings.quantize.value, tokenizer.name])
    vocab_size = saved.config.model.vocab_size
    if jsonl.is_batch(args.prompts):
        if missing := [name for name in NEEDS if importlib.util.find_spec(name) is None]:
            raise UserError(f"OpenAI's batch format needs {', '.join(missing)}: pip install 'ladder-jax[serve]'")
        from ladder_jax.serve import batch

        if given := [name for name in BATCHED if getattr(args, name) is not None]:
            option = given[0].replace("_", "-")
            raise UserError(f"--{option}: in OpenAI's batch format each line's body has its own settings")
        about = dict(tokenizer=tokenizer, defaults=settings, vocab_size=vocab_size, identity=model)
        jobs = batch.read(args.prompts, name=saved.config.run.name, **about)
        return jobs, dict(by=batch.by_custom_id, beginning=batch.BEGINNING)
    ends = dict(stop=tuple(args.stop or ()), stop_ids=tokenizer.stop_ids)
    encoding = dict(encode=tokenizer.encode, vocab_size=vocab_size)
    return jsonl.read(args.prompts, defaults=settings, **ends, model=model, **encoding), {}


def _chat(args: argparse.Namespace, saved: OpenedModel, tokenizer: Tokenizer, settings: DecodeConfig) -> None:
    from ladder_jax.cli import chat

    if not tokenizer.has_chat:
        tokenizer.chat([])  # raises the UserError for it, before the weights are read
    message = chat.piped()
    # The engine's own thread decodes, so that Ctrl-C interrupts this thread, and never a round.
    with _engine(args, saved, tokenizer, settings, slots=1, capacity=args.context or CONTEXT) as engine:
        ends = dict(stop=tuple(args.stop or ()), say=_say)
        conversation = chat.Conversation(engine, tokenizer=tokenizer, settings=settings, **ends)
        chat.talk(conversation, say=_say) if message is None else chat.answer(conversation, message, say=_say)


def _requests(
    args: argparse.Namespace, saved: OpenedModel, tokenizer: Tokenizer, settings: DecodeConfig
) -> list[Request]:
    """One for each --prompt, the k-th with the seed + k."""
    from ladder_jax.decode.request import Request, check_prompts, with_seed

    ends = dict(stop=tuple(args.stop or ()), stop_ids=tokenizer.stop_ids)
    requests = [
        Request.of(tokenizer.encode(prompt), config=with_seed(settings, index=index), **ends)
        for index, prompt in enumerate(args.prompt)
    ]
    check_prompts([request.prompt for request in requests], vocab_size=saved.config.model.vocab_size)
    return requests


def _engine_for(
    requests: list[Request],
    args: argparse.Namespace,
    saved: OpenedModel,
    tokenizer: Tokenizer,
    settings: DecodeConfig,
) -> Engine:
    """An engine just large enough for these requests."""
    capacity = max(len(request.prompt) + request.max_new_tokens for request in requests)
    slots = min(args.slots or SLOTS, len(requests))
    return _engine(args, saved, tokenizer, settings, slots=slots, capacity=capacity)


def _engine(
    args: argparse.Namespace,
    saved: OpenedModel,
    tokenizer: Tokenizer,
    settings: DecodeConfig,
    *,
    slots: int,
    capacity: int,
) -> Engine:
    sizes = dict(slots=slots, capacity=capacity, max_queue=max(len(args.prompt or ()), SLOTS))
    settings = _decided(args, saved, settings, tokens=capacity)
    return saved.engine(settings=settings, tensor=args.tensor, **sizes, decoder=tokenizer.to_bytes)
