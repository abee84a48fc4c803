"""`ladder-jax VERB ...`: parses the command line, runs the verb, and makes one line and an exit
status of an error.
"""

import argparse
import errno
import os
import sys
from collections.abc import Sequence

from ladder_jax.cli.verbs import VERBS, count
from ladder_jax.errors import RunFailed, UserError, one_line, unknown

# errors of the disk, not of the program
DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)
# Many simulated devices on few cores take long to reach a collective.
SIMULATION_TIMEOUT = "--xla_cpu_collective_call_terminate_timeout_seconds=600"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; returns the exit status: 0, 1 for a failure, 2 for the user's mistakes, 128 + n
    after signal n.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        if argv and not argv[0].startswith("-") and argv[0] not in VERBS:
            raise unknown("verb", argv[0], VERBS)
        args = _parser(argv[0] if argv else None).parse_args(argv)
        prepare_devices(args.cpu_devices)
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
        return _ended("interrupted", status=130)
    except BrokenPipeError:  # `ladder-jax generate ... | head`
        _give_up_output()
        return 0
    except OSError as error:
        if error.errno not in DISK:
            raise
        _give_up_output()
        return _ended(": ".join(filter(None, (error.filename, error.strerror))), status=1)
    return 0


def _ended(line: str, *, status: int) -> int:
    print(f"ladder-jax: {one_line(line)}", file=sys.stderr)
    return status


def _give_up_output() -> None:
    """Discards what is still to be written, also what Python flushes at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def prepare_devices(cpu_devices: int | None) -> None:
    """Simulate `cpu_devices` devices, if that is not None; before jax starts."""
    if cpu_devices is not None:
        os.environ["JAX_PLATFORMS"] = "cpu"
        os.environ["JAX_NUM_CPU_DEVICES"] = str(cpu_devices)
    flags = os.environ.get("XLA_FLAGS", "")
    if os.environ.get("JAX_NUM_CPU_DEVICES") and SIMULATION_TIMEOUT.split("=")[0] not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {SIMULATION_TIMEOUT}".strip()


class Parser(argparse.ArgumentParser):
    """Raises UserError for a mistake, with the nearest option's name; positionals may continue
    after an option.
    """

    def parse_known_args(self, args=None, namespace=None):
        # Before argparse looks, which would report a misspelt option as a missing one.
        known = [option for action in self._actions for option in action.option_strings]
        for word in args if self._subparsers is None else ():
            name = word.partition("=")[0]
            if name.startswith("--") and not any(option.startswith(name) for option in known):
                raise unknown(
                    "option", name, [option for option in known if option.startswith("--")]
                )
        namespace, rest = super().parse_known_args(args, namespace)
        # Argparse ends a list of positionals at the first option; here the words after it belong to
        # the list, too.
        for action in self._actions:
            if action.nargs == "*" and not action.option_strings:
                more = [word for word in rest if not word.startswith("-")]
                setattr(namespace, action.dest, [*getattr(namespace, action.dest), *more])
                rest = [word for word in rest if word not in more]
        return namespace, rest

    def error(self, message: str):
        raise UserError(f"{message} (see {self.prog} --help)")


def _parser(verb: str | None = None) -> Parser:
    """With the arguments of `verb` alone, if it is one, else of all."""
    from ladder_jax import __version__

    parser = Parser(
        prog="ladder-jax",
        description="Ladder Residual: tensor parallelism that does not wait for the wire.",
    )
    parser.add_argument("--version", action="version", version=f"ladder_jax {__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB", parser_class=Parser)
    for name, one in VERBS.items():
        sub = verbs.add_parser(
            name,
            help=one.summary,
            description=one.summary,
            epilog=f"example:\n  {one.example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        sub.add_argument("--cpu-devices", metavar="N", **count("simulate N devices on the CPU"))
        if verb not in VERBS or verb == name:
            one.declare(sub)
    return parser
