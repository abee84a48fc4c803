"""The verb `serve`: a checkpoint behind HTTP, until a signal."""

import dataclasses
import importlib.util
import ipaddress
import math
import os
import sys

from ladder_jax import checkpoint, config, parallel
from ladder_jax.checkpoint import Checkpoint
from ladder_jax.data.tokenizer import Tokenizer
from ladder_jax.decode.engine import Engine
from ladder_jax.decode.engine.of_checkpoint import of_checkpoint
from ladder_jax.errors import UserError, member

NEEDS = ("fastapi", "uvicorn", "prometheus_client")
KEY = "LADDER_JAX_API_KEY"


def run(args: dict) -> None:
    """Serve until SIGTERM or SIGINT. Raises UserError for what cannot be served, RuntimeError for a failed engine."""
    if missing := [name for name in NEEDS if importlib.util.find_spec(name) is None]:
        raise UserError(f"serve needs {', '.join(missing)}: pip install 'ladder-jax[serve]'")
    from ladder_jax.serve import app, auth, hosts, server
    from ladder_jax.serve.limits import Limits
    from ladder_jax.serve.metrics import Metrics
    from ladder_jax.serve.service import Service

    _check(args)
    parallel.use_compilation_cache()
    key = os.environ.get(KEY) if args["api_key"] is None else args["api_key"]
    if key is not None:
        auth.check_key(key)
    saved = checkpoint.open_checkpoint(args["checkpoint"])
    with server.bind(args["host"], args["port"]) as sock:
        tokenizer = saved.tokenizer()
        engine = _engine(args, saved=saved, tokenizer=tokenizer)
        url = server.url(sock)
        if key is None and not ipaddress.ip_address(sock.getsockname()[0]).is_loopback:
            _say(f"anybody who reaches {url} may use it: there is no --api-key")
        engine.warm_up()
        name = args["model_name"] or saved.config.run.name
        limits = Limits(max_new_tokens=args["max_new_tokens"] or engine.capacity - 1)
        names = hosts.allowed(args["host"], sock, key=key)
        service = Service(engine, tokenizer, name, limits, Metrics(engine), key, names)
        service.prepare()
        failed = lambda: engine.error is not None
        with server.listening(app.create(service), sock) as thread, engine:
            told = server.catch_signals()
            _say(f"serving {name!r} at {url} ({engine.slots} slots of {engine.capacity} tokens)")
            server.wait(told, unless=lambda: failed() or not thread.is_alive())
            if not thread.is_alive():
                raise RuntimeError("the HTTP server has ended by itself")
            seconds, left = args["drain_seconds"], service.drain.begin()
            if left and not failed():
                _say(f"in progress: {left}, for {seconds:g} seconds at most; a second signal ends the server at once")
            service.drain.wait(seconds, unless=failed)
    if failed():
        raise RuntimeError("the engine failed") from engine.error


def _check(args: dict) -> None:
    for name in ("slots", "capacity", "max_queue", "tensor", "max_new_tokens"):
        least = 2 if name == "capacity" else 1
        if args[name] is not None and args[name] < least:
            raise UserError(f"--{name.replace('_', '-')} must be at least {least}, not {args[name]}")
    if not (math.isfinite(args["drain_seconds"]) and args["drain_seconds"] >= 0):
        raise UserError(f"--drain-seconds must not be negative, not {args['drain_seconds']}")
    if args["model_name"] == "":
        raise UserError("--model-name must not be empty")


def _engine(args: dict, *, saved: Checkpoint, tokenizer: Tokenizer) -> Engine:
    settings = saved.config.decode
    if args["quantize"]:
        settings = dataclasses.replace(settings, quantize=member(config.Quantize, "--quantize", args["quantize"]))
    sizes = {name: args[name] for name in ("tensor", "slots", "capacity", "max_queue")}
    return of_checkpoint(saved, settings=settings, **sizes, decoder=tokenizer.to_bytes)


def _say(line: str) -> None:
    print(f"ladder-jax: {line}", file=sys.stderr, flush=True)
