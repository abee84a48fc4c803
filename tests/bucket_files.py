"""fsspec's gs:// and s3:// without gcsfs and s3fs, as far as the library needs them: plain requests
to tests/gcs.py and tests/s3.py, in S3's REST API, which is Google's XML API, too.

`python -m tests.bucket_files VERB ...` is `ladder-jax VERB ...`.
"""

import base64
import errno
import io
import os
import sys
import urllib.error
import urllib.parse
import urllib.request
import xml.etree.ElementTree as xml

import fsspec


def register():
    """From now on these classes are gs:// and s3:// for fsspec, and so for etils.epath."""
    fsspec.register_implementation("gcs", Google, clobber=True)
    fsspec.register_implementation("s3", Files, clobber=True)


class Files(fsspec.AbstractFileSystem):
    protocol = ("s3",)
    cachable = False
    address = "AWS_ENDPOINT_URL"

    def ls(self, path, detail=True, **_):
        path = self._strip_protocol(path).rstrip("/")
        bucket, _, prefix = path.partition("/")
        query = {"list-type": 2, "delimiter": "/", "prefix": f"{prefix}/" if prefix else ""}
        tree = xml.fromstring(self._ask("GET", bucket, urllib.parse.urlencode(query))[0])
        found = [
            self._file(
                f"{bucket}/{one.findtext('Key')}", one.findtext("ETag"), one.findtext("Size")
            )
            for one in tree.iter("Contents")
        ]
        for one in tree.iter("CommonPrefixes"):
            found.append(_folder(f"{bucket}/{one.findtext('Prefix').rstrip('/')}"))
        found = found or [self._object(path)]
        return found if detail else [one["name"] for one in found]

    def info(self, path, **_):
        path = self._strip_protocol(path).rstrip("/")
        try:
            return self._object(path)
        except FileNotFoundError:
            self.ls(path)
            return _folder(path)

    def exists(self, path, **_):
        try:
            return bool(self.info(path))
        except FileNotFoundError:
            return False

    def _object(self, path):
        headers = self._ask("HEAD", path)[1]
        if "/" not in path:
            return _folder(path)
        return self._file(path, headers["ETag"], headers["Content-Length"])

    def _file(self, name, etag, size):
        about = self._checksum(etag)
        return {"name": name.rstrip("/"), "size": int(size), "type": "file", **about}

    def _checksum(self, etag):
        return {"ETag": etag}

    def cat_file(self, path, start=None, end=None, **_):
        return self._ask("GET", self._strip_protocol(path))[0][start:end]

    def pipe_file(self, path, value, mode="overwrite", **_):
        self._ask("PUT", self._strip_protocol(path), body=value)

    def rm_file(self, path):
        self._ask("DELETE", self._strip_protocol(path))

    def cp_file(self, path1, path2, **_):
        self.pipe_file(path2, self.cat_file(path1))

    def _open(self, path, mode="rb", **_):
        return io.BytesIO(self.cat_file(path)) if mode == "rb" else _Upload(self, path)

    def _ask(self, method, path, query="", body=None):
        """(content, headers)."""
        url = f"{os.environ[self.address]}/{urllib.parse.quote(path)}?{query}"
        request = urllib.request.Request(url, body, method=method)
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return answer.read(), answer.headers
        except urllib.error.HTTPError as error:
            with error:
                if error.code == 404:
                    raise FileNotFoundError(path) from None
                raise OSError(errno.EIO, f"HTTP {error.code} of {path}") from None


class Google(Files):
    protocol = ("gs", "gcs")
    address = "STORAGE_EMULATOR_HOST"

    def _checksum(self, etag):
        return {"md5Hash": base64.b64encode(bytes.fromhex(etag.strip('"'))).decode()}


class _Upload(io.BytesIO):
    """One object, once it is closed."""

    def __init__(self, files, path):
        super().__init__()
        self._files, self._path = files, path

    def close(self):
        content = self.getvalue()
        super().close()
        self._files.pipe_file(self._path, content)


def _folder(name):
    return {"name": name, "size": 0, "type": "directory"}


if __name__ == "__main__":
    from ladder_jax import cli

    register()
    sys.exit(cli.main(sys.argv[1:]))
