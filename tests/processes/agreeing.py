"""One process of several, which `test_agreement` starts: it trains, and something is wrong in one
of them.

    python -m tests.processes.agreeing COORDINATOR COUNT PROCESS

Each line of its input is a run to make, {"overrides": [...], "wrong": {name: arguments},
"timeout": seconds}. Of each a line is printed: the steps that it went on from, its losses by step,
the digest of the parameters that it ended with, its error, and the seconds that it took.
"""

import contextlib
import errno
import hashlib
import io
import json
import os
import sys
import time
from unittest import mock

import jax
import numpy as np

from ladder_jax import config, train
from ladder_jax.checkpoint import writing
from ladder_jax.errors import RunFailed, UserError
from ladder_jax.train import checkpoints, metrics, session


@contextlib.contextmanager
def hidden(path, *, of, until=lambda: False):
    """From process `of`, until that holds: neither listed nor there. As NFS does for a while with
    what is new.
    """
    if jax.process_index() != of:
        yield
        return
    folder, name = os.path.split(path)
    below = lambda place: (
        isinstance(place, str | os.PathLike) and f"{os.fspath(place)}/".startswith(f"{path}/")
    )
    stat, listdir, opened = os.stat, os.listdir, io.open

    def seen(whole):
        def see(place, *args, **kwargs):
            if below(place) and not until():
                raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(place))
            return whole(place, *args, **kwargs)

        return see

    def listed(place="."):
        found = listdir(place)
        return [one for one in found if one != name or os.fspath(place) != folder or until()]

    with (
        mock.patch.object(os, "stat", seen(stat)),
        mock.patch.object(os, "listdir", listed),
        mock.patch.object(io, "open", seen(opened)),
    ):
        yield


def late(path, *, of, seconds):
    shown = time.monotonic() + seconds
    return hidden(path, of=of, until=lambda: time.monotonic() > shown)


class Refused:
    """A write that a full disk ends."""

    def result(self, timeout=None):
        raise OSError(errno.ENOSPC, "No space left on device")


@contextlib.contextmanager
def full(*, of, saves):
    """The disk of process `of`, in the first so many saves."""
    whole = writing.begin
    seen = []

    def begin(folder, tree):
        writes = whole(folder, tree)
        seen.append(folder)
        # two items
        return (
            [*writes, Refused()] if jax.process_index() == of and len(seen) <= 2 * saves else writes
        )

    with mock.patch.object(writing, "begin", begin):
        yield


@contextlib.contextmanager
def bad(*, step, path, of):
    """The batch of `step`, once, in all processes; `path` is then late in process `of`."""
    whole = session.BadStepPolicy.good
    calls = []
    with contextlib.ExitStack() as stack:

        def good(self):
            calls.append(None)
            if len(calls) == step:
                stack.enter_context(late(path, of=of, seconds=3))
                raise session.RollBack("it is bad", step=step)
            whole(self)

        with mock.patch.object(session.BadStepPolicy, "good", good):
            yield


WRONG = {"late": late, "hidden": hidden, "full": full, "bad": bad}


def made(overrides, wrong, timeout):
    told = {"from": [], "losses": {}, "said": [], "error": None, "digest": None}
    restored, add, finish = checkpoints.restore, metrics.Metrics.add, session.Session.finish

    def restore(checkpoint, **known):
        told["from"] += [checkpoint.step] if checkpoint else []
        return restored(checkpoint, **known)

    def note(self, row):
        told["losses"][row["step"]] = row["loss"]
        return add(self, row)

    def end(self):
        digest = hashlib.blake2b(digest_size=16)
        for leaf in jax.tree.leaves(self.state.params):
            digest.update(np.asarray(leaf.addressable_data(0)).tobytes())
        told["digest"] = digest.hexdigest()
        return finish(self)

    before = time.monotonic()
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(checkpoints, "restore", restore))
        stack.enter_context(mock.patch.object(metrics.Metrics, "add", note))
        stack.enter_context(mock.patch.object(session.Session, "finish", end))
        for name, arguments in wrong.items():
            stack.enter_context(WRONG[name](**arguments))
        try:
            settings = config.load("tiny", overrides=overrides)
            train.run(settings, say=told["said"].append, timeout=timeout)
        except (UserError, RunFailed) as error:
            told["error"] = (
                f"{'UserError' if isinstance(error, UserError) else 'RunFailed'}: {error}"
            )
    return {**told, "seconds": time.monotonic() - before}


if __name__ == "__main__":
    coordinator, count, process = sys.argv[1:]
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(coordinator, int(count), int(process))
    for line in sys.stdin:
        print(json.dumps(made(**json.loads(line))), flush=True)
