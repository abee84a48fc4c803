"""fsspec's s3:// without s3fs, as far as the library needs it: plain requests to tests/s3.py."""

import email.utils
import os
import sys
import urllib.parse
import xml.etree.ElementTree as xml

import fsspec

from tests import gcs_files
from tests.gcs_files import ask, folder


def register() -> None:
    """From now on s3:// is this class for fsspec, and so for etils.epath."""
    fsspec.register_implementation("s3", Files, clobber=True)


class Files(gcs_files.Files):
    protocol = ("s3",)

    def _listed(self, bucket, prefix):
        query = urllib.parse.urlencode({"list-type": 2, "delimiter": "/", "prefix": prefix})
        tree, found = xml.fromstring(_ask("GET", f"/{bucket}?{query}")[0]), []
        for one in tree.iter("Contents"):
            about = {
                "ETag": one.findtext("ETag"),
                "size": int(one.findtext("Size")),
                "type": "file",
            }
            found.append({"name": f"{bucket}/{one.findtext('Key')}".rstrip("/"), **about})
        for one in tree.iter("CommonPrefixes"):
            found.append(folder(f"{bucket}/{one.findtext('Prefix').rstrip('/')}"))
        return found

    def _object(self, path):
        if "/" not in path:
            _ask("HEAD", f"/{path}")
            return folder(path)
        headers = _ask("HEAD", _of(path))[1]
        about = {"ETag": headers["ETag"], "size": int(headers["Content-Length"]), "type": "file"}
        return {
            "name": path,
            **about,
            "LastModified": email.utils.parsedate_to_datetime(headers["Last-Modified"]),
        }

    def cat_file(self, path, start=None, end=None, **_):
        return _ask("GET", _of(self._strip_protocol(path)))[0][start:end]

    def pipe_file(self, path, value, mode="overwrite", **_):
        _ask("PUT", _of(self._strip_protocol(path)), value)

    def rm_file(self, path):
        _ask("DELETE", _of(self._strip_protocol(path)))


def _of(path: str) -> str:
    return "/" + urllib.parse.quote(path)


def _ask(method: str, path: str, body: bytes | None = None):
    return ask(os.environ["AWS_ENDPOINT_URL"], method, path, body)


if __name__ == "__main__":  # `python -m tests.s3_files VERB ...` is `ladder-jax VERB ...`
    from ladder_jax import cli

    register()
    sys.exit(cli.main(sys.argv[1:]))
