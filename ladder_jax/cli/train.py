"""The verb `train`: one process, or one of several that train together."""

import argparse
import os
from collections.abc import Callable

from ladder_jax import terminal
from ladder_jax.config import Interleave, RunConfig, load, to_dict


def run(options: dict) -> None:
    from ladder_jax import processes

    args = argparse.Namespace(**options)
    settings = load(args.config, overrides=args.overrides)
    timeouts = processes.timeouts(options, os.environ)
    spec = processes.spec(options, os.environ)
    if spec is None:
        return _train(settings, args, timeout=timeouts.hang)
    with processes.joined(
        spec, settings=_equal(settings, args), timeouts=timeouts, say=terminal.say
    ) as member:
        _train(
            settings,
            args,
            timeout=timeouts.hang,
            heartbeat=member.heartbeat,
            shown=member.process == 0,
        )


def _train(
    settings: RunConfig,
    args: argparse.Namespace,
    *,
    timeout: float,
    heartbeat: Callable[[str], None] = lambda doing: None,
    shown: bool = True,
) -> None:
    """timeout, heartbeat: as in `train.run`; shown: whether this process prints the result."""
    from ladder_jax.train import parse_profile, run as train

    steps = parse_profile(args.profile) if args.profile else None
    if settings.train.interleave is Interleave.AUTO:
        import jax

        from ladder_jax.predict import halves

        settings = halves.of_training(
            settings,
            kind=jax.devices()[0].device_kind,
            say=terminal.say if shown else lambda line: None,
        )
    result = train(settings, say=terminal.say, profile=steps, heartbeat=heartbeat, timeout=timeout)
    entropy = result.bigram_entropy
    unit = "token" if entropy is None else f"byte (the text's bigram entropy: {entropy:.4f})"
    if shown:
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
