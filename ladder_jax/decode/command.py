"""The verb `generate`: one prompt, several, or a file of them."""

import dataclasses
import itertools
import json

from ladder_jax import checkpoint, config, decode, files, nn, parallel
from ladder_jax.checkpoint import Checkpoint
from ladder_jax.data import text
from ladder_jax.decode.engine import Engine, Request, jsonl
from ladder_jax.decode.engine.request import SAMPLING
from ladder_jax.errors import UserError, member
from ladder_jax.progress import progress

SLOTS = 8


def run(args: dict) -> None:
    """Print or write the texts. Raises UserError for what cannot be asked, before anything is computed."""
    _check(args)
    saved = checkpoint.open_checkpoint(args["checkpoint"])
    asked = {name: args[name] for name in SAMPLING if args[name] is not None}
    if args["quantize"]:
        asked["quantize"] = member(config.Quantize, "--quantize", args["quantize"])
    settings = dataclasses.replace(saved.config.decode, **asked)
    stop = tuple(args["stop"] or ())
    if args["prompts"]:
        _file(args, saved=saved, settings=settings, stop=stop)
        return
    requests = [Request.of(text.encode(prompt), config=settings, stop=stop) for prompt in args["prompt"]]
    engine = _engine(args, saved=saved, settings=settings, requests=requests)
    handles = [engine.submit(request) for request in requests]
    if args["stream"]:
        print(args["prompt"][0], end="", flush=True)
        for piece in handles[0]:
            print(piece.text, end="", flush=True)
        print()
        return
    for index, (prompt, handle) in enumerate(zip(args["prompt"], handles)):
        if index:
            print()
        print(prompt + handle.result().text, flush=True)


def _check(args: dict) -> None:
    if bool(args["prompt"]) == bool(args["prompts"]):
        raise UserError("generate needs --prompt TEXT (once or more often) or --prompts FILE, one of the two")
    if bool(args["prompts"]) != bool(args["out"]):
        raise UserError("--prompts FILE and --out FILE go together")
    if args["stream"] and len(args["prompt"] or ()) != 1:
        raise UserError("--stream is for one --prompt")
    if args["slots"] is not None and args["slots"] < 1:
        raise UserError(f"--slots must be at least 1, not {args['slots']}")
    files.check_writable("out", args["out"])


def _file(args: dict, *, saved: Checkpoint, settings: config.DecodeConfig, stop: tuple[str, ...]) -> None:
    model = json.dumps([saved.step, config.to_dict(saved.config.model), settings.quantize.value])
    encoding = dict(encode=text.encode, vocab_size=saved.config.model.vocab_size)
    jobs = jsonl.read(args["prompts"], defaults=settings, stop=stop, model=model, **encoding)
    left = jsonl.unanswered(args["out"], jobs)
    answered = itertools.count(len(jobs) - len(left) + 1)
    with progress(len(jobs), done=len(jobs) - len(left), label="{done}/{total} prompts") as update:
        advance = lambda: update(next(answered), "")
        if left:
            engine = _engine(args, saved=saved, settings=settings, requests=[job.request for job in left])
            jsonl.answer(engine, left, file=args["out"], advance=advance)


def _engine(args: dict, *, saved: Checkpoint, settings: config.DecodeConfig, requests: list[Request]) -> Engine:
    """As large as these requests need."""
    decode.check_prompts([request.prompt for request in requests], vocab_size=saved.config.model.vocab_size)
    mesh = parallel.make_mesh(tensor=args["tensor"] or decode.default_tensor(saved.config))
    definition = nn.define(saved.config.model, mesh=mesh)
    return Engine(
        definition,
        saved.params(definition),
        slots=min(args["slots"] or SLOTS, len(requests)),
        capacity=max(len(request.prompt) + request.max_new_tokens for request in requests),
        max_queue=max(len(args["prompt"] or ()), SLOTS),
        decoder=text.to_bytes,
        loop=settings.loop,
        launch=settings.launch,
        quantize=settings.quantize,
        prefill_chunk=settings.prefill_chunk,
    )
