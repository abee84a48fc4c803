"""`ladder-jax VERB ...`: parses the command line, runs the verb, and makes one line and an exit
status of an error.
"""

import argparse
import atexit
import errno
import gc
import os
import re
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from ladder_jax.cli.verbs import VERBS, count
from ladder_jax.errors import RunFailed, UserError, error_text, one_line, unknown
from ladder_jax.terminal import give_up, say

# errors of the disk, not of the program
DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)
# of a path that the user may not read or write, or that no file can have
PATH = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG)
# jax's errors of variables such as JAX_PLATFORMS and JAX_NUM_CPU_DEVICES
ENVIRONMENT = r"Unable to initialize backend|Invalid value .* for JAX flag|invalid truth value"
# Many simulated devices on few cores take long to reach a collective.
SIMULATION_TIMEOUT = "--xla_cpu_collective_call_terminate_timeout_seconds=600"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; returns the exit status: 0, 1 for a failure, 2 for the user's mistakes, 128 + n
    after signal n.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    # Imports and tracing make a million objects that live on. To look for cycles among them as often
    # as usual, and once more at the end, takes half a second of a short command.
    gc.set_threshold(100_000, 50, 100)
    atexit.register(gc.freeze)
    try:
        args = parse(argv)
        prepare_devices(args.cpu_devices)
        for name in ("stdout", "stderr"):
            if getattr(sys, name) is None:  # closed: a run's own file may not get its number
                setattr(sys, name, open(os.devnull, "w"))
        if hasattr(sys.stdout, "reconfigure"):
            # a character that the terminal cannot show becomes "?"
            sys.stdout.reconfigure(errors="replace")
        VERBS[args.verb].run(vars(args))
        sys.stdout.flush()  # here, so that its errors are handled below
    except UserError as error:
        return _ended(str(error), status=2)
    except RunFailed as error:
        return _ended(str(error), status=error.status)
    except KeyboardInterrupt:
        # Ctrl-C again ends the process at once, not in jax's own clean-up
        atexit.register(signal.signal, signal.SIGINT, signal.SIG_DFL)
        return _ended("interrupted", status=130)
    except (RuntimeError, ValueError) as error:
        if not re.match(ENVIRONMENT, str(error)):
            raise
        return _ended(f"the environment's JAX_ variables: {error_text(error)}", status=2)
    except BrokenPipeError:  # `ladder-jax generate ... | head`
        give_up(sys.stdout)
        return 0
    except OSError as error:
        line = ": ".join(filter(None, (error.filename, error.strerror)))
        if not error.filename and _is_folder_gone():
            return _ended("the current folder was removed: change to another", status=2)
        if error.errno in PATH:
            return _ended(line, status=2)
        if error.errno not in DISK:
            raise
        give_up(sys.stdout)
        return _ended(line, status=1)
    return 0


def _is_folder_gone() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    return False


def _ended(line: str, *, status: int) -> int:
    say(f"ladder-jax: {one_line(line)}")
    return status


def prepare_devices(cpu_devices: int | None) -> None:
    """Simulate `cpu_devices` devices, if that is not None; before jax starts."""
    if cpu_devices is not None:
        os.environ["JAX_PLATFORMS"] = "cpu"
        os.environ["JAX_NUM_CPU_DEVICES"] = str(cpu_devices)
    flags = os.environ.get("XLA_FLAGS", "")
    if os.environ.get("JAX_NUM_CPU_DEVICES") and SIMULATION_TIMEOUT.split("=")[0] not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {SIMULATION_TIMEOUT}".strip()


class Parser(argparse.ArgumentParser):
    """Raises UserError for a mistake, with the nearest option's name."""

    def parse_known_args(self, args=None, namespace=None):
        # Before argparse looks, which would report a misspelt option as a missing one.
        known = [option for action in self._actions for option in action.option_strings]
        for word in args:
            name = word.partition("=")[0]
            if name.startswith("--") and not any(option.startswith(name) for option in known):
                raise unknown(
                    "option", name, [option for option in known if option.startswith("--")]
                )
        return super().parse_known_args(args, namespace)

    def error(self, message: str):
        raise UserError(f"{message} (see {self.prog} --help)")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The arguments of the verb `argv[0]`, and `verb`, its name. Raises UserError, or SystemExit
    once it has shown a help.
    """
    if not argv or argv[0].startswith("-"):
        return _overview(argv)
    if argv[0] not in VERBS:
        raise unknown("verb", argv[0], VERBS)
    verb = VERBS[argv[0]]
    parser = Parser(
        prog=f"ladder-jax {argv[0]}",
        description=verb.summary,
        epilog=f"example:\n  {verb.example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--cpu-devices", metavar="N", **count("simulate N devices on the CPU"))
    verb.declare(parser)
    # words of a list may stand on both sides of an option
    return parser.parse_intermixed_args(argv[1:], argparse.Namespace(verb=argv[0]))


def _overview(argv: Sequence[str]) -> NoReturn:
    """What there is without a verb: --help and --version."""
    from ladder_jax import __version__

    verbs = "\n".join(f"  {name:<12} {verb.summary}" for name, verb in VERBS.items())
    parser = Parser(
        prog="ladder-jax",
        description="Ladder Residual: tensor parallelism that does not wait for the wire.",
        usage="ladder-jax VERB ...",
        epilog=f"verbs:\n{verbs}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"ladder_jax {__version__}")
    parser.parse_args(argv)
    parser.error("a verb is missing")
