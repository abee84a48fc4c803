"""The verb `train`: one process, or one of several that train together."""

import argparse
import contextlib
import os

from ladder_jax import terminal
from ladder_jax.config import Interleave, RunConfig, load, to_dict


def run(options: dict) -> None:
    from ladder_jax import processes

    args = argparse.Namespace(**options)
    settings = load(args.config, overrides=args.overrides)
    timeouts = processes.timeouts(options, os.environ)
    spec = processes.spec(options, os.environ)
    joined = contextlib.nullcontext(lambda doing: None)
    if spec is not None:
        equal = _equal(settings, args)
        joined = processes.joined(spec, settings=equal, timeouts=timeouts, say=terminal.say)
    with joined as heartbeat:
        import jax  # here, as a wrong setting is told sooner without

        from ladder_jax.train import parse_profile, run as train

        steps = parse_profile(args.profile) if args.profile else None
        if settings.train.interleave is Interleave.AUTO:
            from ladder_jax.predict import halves

            settings = halves.of_training(
                settings,
                kind=jax.devices()[0].device_kind,
                say=terminal.say if jax.process_index() == 0 else lambda line: None,
            )
        result = train(
            settings,
            say=terminal.say,
            profile=steps,
            heartbeat=heartbeat,
            timeout=timeouts.hang,
        )
        entropy = result.bigram_entropy
        unit = "token" if entropy is None else f"byte (the text's bigram entropy: {entropy:.4f})"
        if jax.process_index() == 0:
            print(
                f"trained a model of {result.parameters:,} parameters for {result.steps} steps:"
                f" held-out loss {result.validation_loss:.4f} nats a {unit}"
            )


def _equal(settings: RunConfig, args: argparse.Namespace) -> dict:
    """The settings that must be equal on all processes."""
    import jax

    from ladder_jax import __version__

    return {
        "ladder_jax": __version__,
        "jax": jax.__version__,
        "--profile": args.profile,
        "--cpu-devices": args.cpu_devices,
        **to_dict(settings),
    }
