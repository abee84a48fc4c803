"""The verb `serve`: a model behind HTTP, until a signal."""

import argparse
import ipaddress
import math
import os

from ladder_jax import terminal
from ladder_jax.cli.generate import FORM, check_http, open_asked
from ladder_jax.errors import UserError

KEY = "LADDER_JAX_API_KEY"


def run(options: dict) -> None:
    """Serve until SIGTERM or SIGINT. Raises UserError for wrong options, RuntimeError for a failed
    engine.
    """
    check_http("serve")
    from ladder_jax import parallel
    from ladder_jax.serve import app, server
    from ladder_jax.serve.middleware import check_key, own_names
    from ladder_jax.serve.prepare import Terms

    args = argparse.Namespace(**options)
    if not 0 <= args.drain_seconds < math.inf:
        raise UserError(
            f"--drain-seconds must be finite and not negative, not {args.drain_seconds}"
        )
    parallel.use_compilation_cache()
    key = os.environ.get(KEY) if args.api_key is None else args.api_key
    if key is not None:
        check_key(key)
    asked = open_asked(args, settings=FORM)
    with server.bind(args.host, args.port) as sock:
        engine = asked.engine(
            **{name: options[name] for name in ("slots", "capacity", "max_queue", "chunk")}
        )
        url = server.url(sock)
        if key is None and not ipaddress.ip_address(sock.getsockname()[0]).is_loopback:
            _say(f"anybody who reaches {url} may use it: there is no --api-key")
        _say(f"compiling the programs for {engine.slots} slots of {engine.capacity} tokens")
        engine.warm_up()
        name = args.model_name or asked.saved.config.run.name
        most = args.max_new_tokens or engine.capacity - 1
        terms = Terms(
            name,
            asked.tokenizer,
            asked.saved.config.model.vocab_size,
            capacity=engine.capacity,
            max_queue=engine.max_queue,
            max_new_tokens=most,
            chat_tokens=most,
        )
        names = own_names(args.host, sock, key=key)
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
                _say(
                    f"in progress: {left}, for {seconds:g} seconds at most; a second signal ends the server at once"
                )
            gate.wait(seconds, unless=failed)
    if failed():
        raise RuntimeError("the engine failed") from engine.error


def _say(line: str) -> None:
    terminal.say(f"ladder-jax: {line}")
