"""fsspec's s3:// for machines without s3fs, as far as the library needs it: plain requests to tests/s3.py."""

import email.utils
import importlib.util
import os
import sys
import urllib.error
import urllib.parse
import urllib.request
import xml.etree.ElementTree as xml

import fsspec

from tests import gcs_files


def register() -> None:
    """From now on s3:// is this class for fsspec, and so for etils.epath, unless s3fs is installed."""
    if importlib.util.find_spec("s3fs") is None:
        fsspec.register_implementation("s3", Files, clobber=True)


class Files(gcs_files.Files):
    protocol = ("s3",)

    def ls(self, path, detail=True, **_):
        path = self._strip_protocol(path).rstrip("/")
        bucket, _, prefix = path.partition("/")
        query = urllib.parse.urlencode({"list-type": 2, "delimiter": "/", "prefix": f"{prefix}/" if prefix else ""})
        tree, found = xml.fromstring(_ask("GET", f"/{bucket}?{query}")[0]), []
        for one in tree.iter("Contents"):
            about = {"ETag": one.findtext("ETag"), "size": int(one.findtext("Size")), "type": "file"}
            found.append({"name": f"{bucket}/{one.findtext('Key')}".rstrip("/"), **about})
        for one in tree.iter("CommonPrefixes"):
            found.append({"name": f"{bucket}/{one.findtext('Prefix').rstrip('/')}", "size": 0, "type": "directory"})
        found = found or [self._object(path)]
        return found if detail else [one["name"] for one in found]

    def info(self, path, **_):
        path = self._strip_protocol(path).rstrip("/")
        try:
            return self._object(path)
        except FileNotFoundError:
            self.ls(path)
            return {"name": path, "size": 0, "type": "directory"}

    def cat_file(self, path, start=None, end=None, **_):
        return _ask("GET", _of(self._strip_protocol(path)))[0][start:end]

    def pipe_file(self, path, value, mode="overwrite", **_):
        _ask("PUT", _of(self._strip_protocol(path)), value)

    def rm_file(self, path):
        _ask("DELETE", _of(self._strip_protocol(path)))

    def _object(self, path):
        if "/" not in path:
            _ask("HEAD", f"/{path}")
            return {"name": path, "size": 0, "type": "directory"}
        headers = _ask("HEAD", _of(path))[1]
        modified = email.utils.parsedate_to_datetime(headers["Last-Modified"])
        return {
            "name": path,
            "size": int(headers["Content-Length"]),
            "type": "file",
            "ETag": headers["ETag"],
            "LastModified": modified,
        }


def _of(path: str) -> str:
    return "/" + urllib.parse.quote(path)


def _ask(method: str, path: str, body: bytes | None = None):
    """(content, headers)."""
    request = urllib.request.Request(os.environ["AWS_ENDPOINT_URL"] + path, body, method=method)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.read(), answer.headers
    except urllib.error.HTTPError as error:
        with error:
            if error.code == 404:
                raise FileNotFoundError(path) from None
            raise RuntimeError(f"HTTP {error.code} of {path}") from None


if __name__ == "__main__":  # `python -m tests.s3_files VERB ...` is `ladder-jax VERB ...`
    from ladder_jax import cli

    register()
    sys.exit(cli.main(sys.argv[1:]))
