"""The verb `serve`: a model behind HTTP, until a signal."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import ipaddress
import math
import os
import sys
from typing import TYPE_CHECKING

from ladder_jax.errors import UserError, member

if TYPE_CHECKING:
    from ladder_jax.data.tokenizer import Tokenizer
    from ladder_jax.decode import Engine
    from ladder_jax.pretrained import OpenedModel

SUMMARY = "Serve a model over HTTP, to OpenAI's clients."
EXAMPLE = "ladder-jax serve runs/tiny --port 8000"

CHUNK = 16  # as in decode.steps, which imports jax
NEEDS = ("fastapi", "uvicorn", "prometheus_client")
KEY = "LADDER_JAX_API_KEY"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "checkpoint", metavar="MODEL", help="a run's folder, a Hugging Face folder, a GGUF file, or org/name of the Hub"
    )
    for option, kind, letter, default, text in (
        ("host", str, "ADDRESS", "127.0.0.1", "where to listen (default 127.0.0.1: this machine only)"),
        ("port", int, "N", 8000, "default 8000; 0: any free one"),
        ("api-key", str, "KEY", None, "what clients must send; better set as LADDER_JAX_API_KEY (default: no key)"),
        ("model-name", str, "NAME", None, "the model's name for clients (default: the run's)"),
        ("slots", int, "N", 8, "prompts that are continued at the same time (default 8)"),
        ("capacity", int, "N", 2048, "the most tokens of a request, prompt and new ones together (default 2048)"),
        ("chunk", int, "N", CHUNK, "tokens a slot makes at once: fewer stream evenly, more serve faster (default 16)"),
        ("max-new-tokens", int, "N", None, "the most that a request may ask for (default: the capacity)"),
        ("max-queue", int, "N", 256, "prompts that may wait for a slot (default 256)"),
        ("drain-seconds", float, "S", 30.0, "how long SIGTERM waits for requests in progress (default 30)"),
        ("tensor", int, "N", None, "tensor-parallel devices (default: as trained, if there are as many)"),
        ("quantize", str, "NAME", None, "int8: the weights in 8 bits; none (the default)"),
        ("interleave", str, "N", None, "2: read prompts in two halves in turn; auto: where predicted to be faster"),
        ("ladder-layers", str, "WHICH", None, "make these ladder layers, in memory: N (the last N), i,j or all"),
        ("residual", str, "NAME", None, "the kind of those layers (default ladder)"),
        ("ranks", int, "N", None, "for ladder-fresh: the tensor-parallel ranks it is for"),
    ):
        parser.add_argument(f"--{option}", type=kind, metavar=letter, default=default, help=text)


def run(args: argparse.Namespace) -> None:
    """Serve until SIGTERM or SIGINT. Raises UserError for wrong options, RuntimeError for a failed engine."""
    if missing := [name for name in NEEDS if importlib.util.find_spec(name) is None]:
        raise UserError(f"serve needs {', '.join(missing)}: pip install 'ladder-jax[serve]'")
    from ladder_jax import parallel
    from ladder_jax.pretrained import open_model
    from ladder_jax.serve import app, limits, server
    from ladder_jax.serve.prepare import Terms

    _check(args)
    parallel.use_compilation_cache()
    key = os.environ.get(KEY) if args.api_key is None else args.api_key
    if key is not None:
        limits.check_key(key)
    choice = dict(ladder_layers=args.ladder_layers, residual=args.residual, ranks=args.ranks)
    saved = open_model(args.checkpoint, **choice)
    with server.bind(args.host, args.port) as sock:
        tokenizer = saved.tokenizer()
        engine = _engine(args, saved, tokenizer)
        url = server.url(sock)
        if key is None and not ipaddress.ip_address(sock.getsockname()[0]).is_loopback:
            _say(f"anybody who reaches {url} may use it: there is no --api-key")
        _say(f"compiling the programs for {engine.slots} slots of {engine.capacity} tokens")
        engine.warm_up()
        name = args.model_name or saved.config.run.name
        most = args.max_new_tokens or engine.capacity - 1
        sizes = dict(capacity=engine.capacity, max_queue=engine.max_queue, max_new_tokens=most)
        terms = Terms(name, tokenizer, saved.config.model.vocab_size, chat_tokens=most, **sizes)
        names = limits.own_names(args.host, sock, key=key)
        gate = app.create(app.Service(engine, terms), key=key, names=names)
        failed = lambda: engine.error is not None
        with server.listening(gate, sock) as thread, engine:
            signals = server.catch_signals()
            _say(f"serving {name!r} at {url} ({engine.slots} slots of {engine.capacity} tokens)")
            server.wait(signals, unless=lambda: failed() or not thread.is_alive())
            if not thread.is_alive():
                raise RuntimeError("the HTTP server has ended by itself")
            seconds = args.drain_seconds
            left = gate.drain()
            if left and not failed():
                _say(f"in progress: {left}, for {seconds:g} seconds at most; a second signal ends the server at once")
            gate.wait(seconds, unless=failed)
    if failed():
        raise RuntimeError("the engine failed") from engine.error


def _check(args: argparse.Namespace) -> None:
    for name in ("slots", "capacity", "chunk", "max_queue", "tensor", "max_new_tokens"):
        value, least = getattr(args, name), 2 if name == "capacity" else 1
        if value is not None and value < least:
            raise UserError(f"--{name.replace('_', '-')} must be at least {least}, not {value}")
    if not (math.isfinite(args.drain_seconds) and args.drain_seconds >= 0):
        raise UserError(f"--drain-seconds must not be negative, not {args.drain_seconds}")
    if args.model_name == "":
        raise UserError("--model-name must not be empty")


def _engine(args: argparse.Namespace, saved: OpenedModel, tokenizer: Tokenizer) -> Engine:
    from ladder_jax.config import Interleave, Quantize

    settings = saved.config.decode
    if args.quantize:
        settings = dataclasses.replace(settings, quantize=member(Quantize, "--quantize", args.quantize))
    if args.interleave:
        settings = dataclasses.replace(settings, interleave=member(Interleave, "--interleave", args.interleave))
    if settings.interleave is Interleave.AUTO:
        from ladder_jax.predict import halves

        definition = saved.define(tensor=args.tensor)
        settings = halves.of_reading(settings, definition=definition, tokens=args.capacity, say=_say)
    sizes = {name: getattr(args, name) for name in ("tensor", "slots", "capacity", "max_queue", "chunk")}
    return saved.engine(settings=settings, **sizes, decoder=tokenizer.to_bytes)


def _say(line: str) -> None:
    print(f"ladder-jax: {line}", file=sys.stderr, flush=True)
