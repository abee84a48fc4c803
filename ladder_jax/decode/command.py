"""The verb `generate`: one prompt, several, a file of them, or a conversation."""

import dataclasses
import itertools
import json
import sys

from ladder_jax import checkpoint, config, decode, files, parallel
from ladder_jax.checkpoint import Checkpoint
from ladder_jax.data.tokenizer import Tokenizer
from ladder_jax.decode import chat, memory
from ladder_jax.decode.engine import Engine, NoNumbers, Request, jsonl
from ladder_jax.decode.engine.of_checkpoint import of_checkpoint
from ladder_jax.decode.engine.request import SAMPLING, with_seed
from ladder_jax.errors import RunFailed, UserError, member
from ladder_jax.progress import progress

SLOTS = 8
CONTEXT = 2048  # positions of a conversation


def run(args: dict) -> None:
    """Print or write the texts. Raises UserError for what cannot be asked, before anything is computed."""
    _check(args)
    parallel.use_compilation_cache()
    with memory.explained("generating"):
        _run(args)


def _run(args: dict) -> None:
    saved = checkpoint.open_checkpoint(args["checkpoint"])
    tokenizer = saved.tokenizer()
    asked = {name: args[name] for name in SAMPLING if args[name] is not None}
    if args["quantize"]:
        asked["quantize"] = member(config.Quantize, "--quantize", args["quantize"])
    settings = dataclasses.replace(saved.config.decode, **asked)
    stop = tuple(args["stop"] or ())
    if args["prompts"]:
        _file(args, saved=saved, tokenizer=tokenizer, settings=settings, stop=stop)
        return
    if args["chat"]:
        _chat(args, saved=saved, tokenizer=tokenizer, settings=settings, stop=stop)
        return
    more = dict(stop=stop, stop_ids=tokenizer.stop_ids)
    requests = [
        Request.of(tokenizer.encode(prompt), config=with_seed(settings, index=index), **more)
        for index, prompt in enumerate(args["prompt"])
    ]
    engine = _engine_for(requests, args=args, saved=saved, tokenizer=tokenizer, settings=settings)
    handles = [engine.submit(request) for request in requests]
    if args["stream"]:
        print(args["prompt"][0], end="", flush=True)
        for piece in handles[0]:
            print(piece.text, end="", flush=True)
        print()
        return
    failed = []
    for index, (prompt, handle) in enumerate(zip(args["prompt"], handles)):
        if index:
            print()
        try:
            print(prompt + handle.result().text, flush=True)
        except NoNumbers as error:  # the others have their texts
            failed.append(f"prompt {index + 1} of {len(handles)}: {error}")
    if failed:
        raise RunFailed("; ".join(failed))


def _check(args: dict) -> None:
    if sum(bool(args[way]) for way in ("prompt", "prompts", "chat")) != 1:
        raise UserError("generate needs --prompt TEXT (once or more often), --prompts FILE or --chat, one of these")
    if bool(args["prompts"]) != bool(args["out"]):
        raise UserError("--prompts FILE and --out FILE go together")
    if args["stream"] and len(args["prompt"] or ()) != 1:
        raise UserError("--stream is for one --prompt")
    for name in ("slots", "tensor"):
        if args[name] is not None and args[name] < 1:
            raise UserError(f"--{name} must be at least 1, not {args[name]}")
    if args["context"] is not None and not args["chat"]:
        raise UserError("--context is for --chat")
    if args["context"] is not None and args["context"] < 2:
        raise UserError(f"--context must be at least 2, not {args['context']}")
    files.check_writable("out", args["out"])


def _file(
    args: dict, *, saved: Checkpoint, tokenizer: Tokenizer, settings: config.DecodeConfig, stop: tuple[str, ...]
) -> None:
    told = [saved.identity, config.to_dict(saved.config.model), settings.quantize.value, tokenizer.name]
    model = json.dumps(told)
    encoding = dict(encode=tokenizer.encode, vocab_size=saved.config.model.vocab_size)
    ends = dict(stop=stop, stop_ids=tokenizer.stop_ids)
    jobs = jsonl.read(args["prompts"], defaults=settings, **ends, model=model, **encoding)
    with jsonl.alone(args["out"]):
        left = jsonl.unanswered(args["out"], jobs)
        answered = itertools.count(len(jobs) - len(left) + 1)
        with progress(len(jobs), done=len(jobs) - len(left), label="{done}/{total} prompts") as update:
            advance = lambda: update(next(answered), "")
            if left:
                requests = [job.request for job in left]
                engine = _engine_for(requests, args=args, saved=saved, tokenizer=tokenizer, settings=settings)
                jsonl.answer(engine, left, file=args["out"], advance=advance)


def _chat(
    args: dict, *, saved: Checkpoint, tokenizer: Tokenizer, settings: config.DecodeConfig, stop: tuple[str, ...]
) -> None:
    if not tokenizer.has_chat:
        tokenizer.chat([])  # says so, before the weights are read
    message = chat.piped()
    say = lambda line: print(line, file=sys.stderr, flush=True)
    more = dict(tokenizer=tokenizer, settings=settings)
    # A thread of its own decodes, so that Ctrl-C reaches this one and not the middle of a round.
    with _engine(args, saved=saved, slots=1, capacity=args["context"] or CONTEXT, **more) as engine:
        conversation = chat.Conversation(engine, stop=stop, say=say, **more)
        chat.talk(conversation, say=say) if message is None else chat.answer(conversation, message, say=say)


def _engine_for(requests: list[Request], *, args: dict, saved: Checkpoint, **more) -> Engine:
    """As large as these requests need."""
    decode.check_prompts([request.prompt for request in requests], vocab_size=saved.config.model.vocab_size)
    capacity = max(len(request.prompt) + request.max_new_tokens for request in requests)
    return _engine(args, saved=saved, slots=min(args["slots"] or SLOTS, len(requests)), capacity=capacity, **more)


def _engine(
    args: dict, *, saved: Checkpoint, tokenizer: Tokenizer, settings: config.DecodeConfig, slots: int, capacity: int
) -> Engine:
    return of_checkpoint(
        saved,
        settings=settings,
        tensor=args["tensor"],
        slots=slots,
        capacity=capacity,
        max_queue=max(len(args["prompt"] or ()), SLOTS),
        decoder=tokenizer.to_bytes,
    )
