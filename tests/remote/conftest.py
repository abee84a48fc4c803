"""A bucket of each store: stand-ins for Google Cloud Storage and S3 on this machine (tests/gcs.py,
tests/s3.py).
"""

import contextlib
import dataclasses
import sys

import pytest

from tests import gcs, gcs_files, s3, s3_files

STORES = {"gs": (gcs, gcs_files), "s3": (s3, s3_files)}
# What both do alike needs one of them in `make test`: the first, but this one for a run, and for
# whose lock it is.
IN_S3 = pytest.mark.parametrize(
    "away", ["s3", pytest.param("gs", marks=pytest.mark.full)], indirect=True
)


@dataclasses.dataclass(frozen=True)
class Away:
    """A bucket, and what the libraries call it."""

    scheme: str
    bucket: gcs.Bucket

    def url(self, name):
        return f"{self.scheme}://bucket/{name}"

    @property
    def command(self):
        """`ladder-jax` in a process that knows the stand-in."""
        return [sys.executable, "-W", "ignore", "-m", STORES[self.scheme][1].__name__]

    def copy(self, source, target):
        for name, (_, content) in list(self.bucket.objects.items()):
            if name.startswith(source):
                self.bucket.put(target + name.removeprefix(source), content, match=None)

    def flip(self, beginning):
        """One bit in the first object whose name begins so."""
        name = next(name for name in self.bucket.objects if name.startswith(beginning))
        self.bucket.put(name, flipped(self.bucket.objects[name][1]), match=None)


def flipped(content):
    return content[:7] + bytes([content[7] ^ 1]) + content[8:]


@pytest.fixture(scope="module")
def stores():
    """One bucket of each for all tests: the libraries read where they are only once."""
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        found = {}
        for scheme, (stand_in, files) in STORES.items():
            bucket, environment = stack.enter_context(stand_in.served())
            for name, value in environment.items():
                patch.setenv(name, value)
            files.register()
            found[scheme] = Away(scheme, bucket)
        yield found


@pytest.fixture(scope="module")
def bucket(stores):
    return stores["gs"].bucket


@pytest.fixture(scope="module", params=["gs", pytest.param("s3", marks=pytest.mark.full)])
def away(request, stores):
    return stores[request.param]
