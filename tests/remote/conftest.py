"""A bucket of each store: stand-ins for Google Cloud Storage and S3 on this machine (tests/gcs.py,
tests/s3.py).
"""

import contextlib
import dataclasses
import functools
import sys

import pytest

from tests import bucket_files, gcs, s3
from tests.covering import full

STORES = {"gs": gcs, "s3": s3}
# What both do alike needs one of them in `make test`: the first, but this one for a run, and for
# whose lock it is.
IN_S3 = pytest.mark.parametrize("away", ["s3", full("gs")], indirect=True)


@dataclasses.dataclass(frozen=True)
class Away:
    """A bucket, and what the libraries call it."""

    scheme: str
    bucket: s3.Bucket

    def url(self, name):
        return f"{self.scheme}://bucket/{name}"

    @property
    def command(self):
        """`ladder-jax` in a process that knows the stand-in."""
        return [sys.executable, "-W", "ignore", "-m", "tests.bucket_files"]

    def copy(self, source, target):
        for name, (_, content) in self.bucket.sorted(source):
            self.bucket.put(target + name.removeprefix(source), content)

    def flip(self, beginning):
        """One bit in the first object whose name begins so."""
        name, (_, content) = self.bucket.sorted(beginning)[0]
        self.bucket.put(name, content[:7] + bytes([content[7] ^ 1]) + content[8:])


@pytest.fixture(scope="module")
def stores():
    """One bucket of each for all tests: the libraries read where they are only once."""
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        bucket_files.register()
        found = {}
        for scheme, stand_in in STORES.items():
            bucket = s3.Bucket()
            answer = functools.partial(stand_in.answer, bucket)
            address = stack.enter_context(s3.listening(bucket, answer))
            for name, value in stand_in.environment(address).items():
                patch.setenv(name, value)
            found[scheme] = Away(scheme, bucket)
        yield found


@pytest.fixture(scope="module")
def bucket(stores):
    return stores["gs"].bucket


@pytest.fixture(scope="module", params=["gs", full("s3")])
def away(request, stores):
    return stores[request.param]
