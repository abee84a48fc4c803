"""How a study's command ends: well, or in one line and the status that `ladder-jax` has for it."""

import sys
from collections.abc import Callable


def ended(work: Callable[[], object], *, name: str) -> int:
    """The exit status of `work`, a study that the same command goes on with. Only a bug shows a traceback."""
    from ladder_jax.errors import RunFailed, UserError, one_line

    try:
        work()
    except (UserError, RunFailed) as error:
        print(f"{name}: {one_line(str(error))}", file=sys.stderr)
        return error.status if isinstance(error, RunFailed) else 2
    except KeyboardInterrupt:  # between two runs; within one it is a RunFailed, and saved
        print(f"{name}: stopped; the same command goes on from here", file=sys.stderr)
        return 130
    return 0
