"""From the words of a command line to one verb, and from what becomes of it to an exit status."""

import argparse
import errno
import os
import sys
from collections.abc import Sequence

from ladder_jax.cli.devices import prepare_devices
from ladder_jax.cli.parser import Parser
from ladder_jax.cli.verbs import VERBS
from ladder_jax.errors import RunFailed, UserError, printable, unknown

DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)  # no fault of the program's


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; returns the exit status: 0, 1 for a failure, 2 for the user's mistakes, 128 + n after signal n."""
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        if argv and not argv[0].startswith("-") and argv[0] not in VERBS:
            raise unknown("verb", argv[0], VERBS)
        args = _parser().parse_args(argv)
        prepare_devices(args.cpu_devices)
        if hasattr(sys.stdout, "reconfigure"):
            sys.stdout.reconfigure(errors="replace")  # a terminal without some character still shows the others
        VERBS[args.verb].run(args)
        sys.stdout.flush()  # what fails at the very end would be nobody's
    except UserError as error:
        print(f"ladder-jax: {printable(str(error))}", file=sys.stderr)
        return 2
    except RunFailed as error:
        print(f"ladder-jax: {printable(str(error))}", file=sys.stderr)
        return error.status
    except KeyboardInterrupt:
        print("ladder-jax: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `ladder-jax generate ... | head`
        _give_up_output()
        return 0
    except OSError as error:
        if error.errno not in DISK:
            raise
        _give_up_output()
        told = ": ".join(filter(None, (error.filename, error.strerror)))
        print(f"ladder-jax: {printable(told)}", file=sys.stderr)
        return 1
    return 0


def _give_up_output() -> None:
    """What is still to be written goes nowhere, also when Python ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser() -> Parser:
    from ladder_jax import __version__

    parser = Parser(
        prog="ladder-jax", description="Ladder Residual: tensor parallelism that does not wait for the wire."
    )
    parser.add_argument("--version", action="version", version=f"ladder_jax {__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB", parser_class=Parser)
    for name, verb in VERBS.items():
        sub = verbs.add_parser(
            name,
            help=verb.SUMMARY,
            description=verb.SUMMARY,
            epilog=f"example:\n  {verb.EXAMPLE}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        sub.add_argument("--cpu-devices", type=int, metavar="N", help="simulate N devices on the CPU")
        verb.arguments(sub)
    return parser
