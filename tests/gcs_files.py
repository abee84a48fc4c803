"""fsspec's gs:// without gcsfs, as far as the library needs it: plain requests to tests/gcs.py."""

import errno
import io
import json
import os
import sys
import urllib.error
import urllib.parse
import urllib.request

import fsspec


def register() -> None:
    """From now on gs:// is this class for fsspec, and so for etils.epath."""
    fsspec.register_implementation("gcs", Files, clobber=True)


class Files(fsspec.AbstractFileSystem):
    protocol = ("gs", "gcs")
    cachable = False

    def ls(self, path, detail=True, **_):
        path = self._strip_protocol(path).rstrip("/")
        bucket, _, prefix = path.partition("/")
        found = self._listed(bucket, f"{prefix}/" if prefix else "") or [self._object(path)]
        return found if detail else [one["name"] for one in found]

    def info(self, path, **_):
        path = self._strip_protocol(path).rstrip("/")
        try:
            return self._object(path)
        except FileNotFoundError:
            self.ls(path)
            return folder(path)

    def exists(self, path, **_):
        try:
            return bool(self.info(path))
        except FileNotFoundError:
            return False

    def _listed(self, bucket, prefix):
        query = urllib.parse.urlencode({"delimiter": "/", "prefix": prefix})
        answer = json.loads(_ask("GET", f"/storage/v1/b/{bucket}/o?{query}"))
        found = [_info(bucket, one) for one in answer["items"]]
        return found + [folder(f"{bucket}/{one.rstrip('/')}") for one in answer["prefixes"]]

    def _object(self, path):
        return _info(path.partition("/")[0], json.loads(_ask("GET", _of(path))))

    def cat_file(self, path, start=None, end=None, **_):
        return _ask("GET", _of(self._strip_protocol(path)) + "?alt=media")[start:end]

    def pipe_file(self, path, value, mode="overwrite", **_):
        bucket, _, name = self._strip_protocol(path).partition("/")
        query = urllib.parse.urlencode({"uploadType": "media", "name": name})
        _ask("POST", f"/upload/storage/v1/b/{bucket}/o?{query}", value)

    def rm_file(self, path):
        _ask("DELETE", _of(self._strip_protocol(path)))

    def rmdir(self, path):
        pass

    def rm(self, path, recursive=False, maxdepth=None):
        for file in self.find(path) or [self._strip_protocol(path)]:
            self.rm_file(file)

    def cp_file(self, path1, path2, **_):
        self.pipe_file(path2, self.cat_file(path1))

    def mkdir(self, path, create_parents=True, **_):
        pass

    def makedirs(self, path, exist_ok=False):
        pass

    def _open(self, path, mode="rb", **_):
        return io.BytesIO(self.cat_file(path)) if mode == "rb" else _Upload(self, path)


class _Upload(io.BytesIO):
    """One object, once it is closed."""

    def __init__(self, files, path):
        super().__init__()
        self._files, self._path = files, path

    def close(self):
        if self.closed:
            return
        content = self.getvalue()
        super().close()
        self._files.pipe_file(self._path, content)


def _of(path: str) -> str:
    bucket, _, name = path.partition("/")
    return f"/storage/v1/b/{bucket}/o/{urllib.parse.quote(name, safe='')}"


def _info(bucket: str, resource: dict) -> dict:
    name = f"{bucket}/{resource['name']}"
    return {**resource, "name": name, "size": int(resource["size"]), "type": "file"}


def folder(name: str) -> dict:
    return {"name": name, "size": 0, "type": "directory"}


def _ask(method: str, path: str, body: bytes | None = None) -> bytes:
    return ask(os.environ["STORAGE_EMULATOR_HOST"], method, path, body)[0]


def ask(address: str, method: str, path: str, body: bytes | None = None):
    """(content, headers)."""
    request = urllib.request.Request(address + path, body, method=method)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.read(), answer.headers
    except urllib.error.HTTPError as error:
        with error:
            if error.code == 404:
                raise FileNotFoundError(path) from None
            raise OSError(errno.EIO, f"HTTP {error.code} of {path}") from None


if __name__ == "__main__":  # `python -m tests.gcs_files VERB ...` is `ladder-jax VERB ...`
    from ladder_jax import cli

    register()
    sys.exit(cli.main(sys.argv[1:]))
