"""A stand-in for Google Cloud Storage: its JSON API over HTTP, as far as tensorstore and
tests/gcs_files.py use it.

Objects are in memory. Writes and deletions of them are atomic, have generations and preconditions,
and lists see them at once, as GCS's are documented. There are no permissions, and no time that a
request takes. It may be away for a while.
"""

import base64
import contextlib
import hashlib
import http.server
import json
import re
import threading
import urllib.parse


class Bucket:
    """Objects by name: (generation, content)."""

    def __init__(self):
        self.objects: dict[str, tuple[int, bytes]] = {}
        self.lock = threading.Lock()
        self.generation = 0
        self.requests: list[str] = []
        self.away = False  # then every request is answered with 503

    def put(self, name: str, content: bytes, *, match: str | None) -> dict | None:
        """The object's resource; None where its generation is not `match` (0: there is none)."""
        with self.lock:
            if match is not None and self.objects.get(name, (0,))[0] != int(match):
                return None
            self.generation += 1
            self.objects[name] = self.generation, bytes(content)
        return self.resource(name)

    def delete(self, name: str, *, match: str | None) -> int:
        with self.lock:
            if name not in self.objects:
                return 404
            if match is not None and self.objects[name][0] != int(match):
                return 412
            del self.objects[name]
        return 204

    def resource(self, name: str) -> dict:
        generation, content = self.objects[name]
        md5 = base64.b64encode(hashlib.md5(content).digest()).decode()
        times = dict.fromkeys(("timeCreated", "updated"), "2026-01-01T00:00:00.000Z")
        return {
            "kind": "storage#object",
            "name": name,
            "bucket": "bucket",
            "size": str(len(content)),
            **times,
            "generation": str(generation),
            "metageneration": "1",
            "md5Hash": md5,
            "etag": f"e{generation}",
            "storageClass": "STANDARD",
        }

    def names(self, query: dict[str, str]) -> tuple[dict[str, tuple[int, bytes]], list[str]]:
        """The objects that a list shows, and the prefixes that it groups others under."""
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter")
        begin, end = query.get("startOffset", ""), query.get("endOffset")
        found, prefixes = {}, set()
        with self.lock:
            for name in sorted(self.objects):
                if not name.startswith(prefix) or name < begin or (end and name >= end):
                    continue
                rest = name[len(prefix) :]
                if delimiter and delimiter in rest:
                    prefixes.add(prefix + rest.partition(delimiter)[0] + delimiter)
                else:
                    found[name] = self.objects[name]
        return found, sorted(prefixes)


@contextlib.contextmanager
def listening(bucket: Bucket, answer):
    """Yields the address of an HTTP server that `answer(method, path, query, headers, body)`
    answers for.
    """

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_):
            pass

        def handle_one_request(self):
            with contextlib.suppress(ConnectionError):
                super().handle_one_request()

        def _handle(self):
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            bucket.requests.append(f"{self.command} {self.path}")
            split = urllib.parse.urlsplit(self.path)
            query = dict(urllib.parse.parse_qsl(split.query, keep_blank_values=True))
            asked = self.command, split.path, query, self.headers, body
            status, content, headers = (503, b"", {}) if bucket.away else answer(*asked)
            content = json.dumps(content).encode() if isinstance(content, dict) else content
            self.send_response(status)
            kind = headers.pop("Content-Type", "application/json")
            length = headers.pop("Content-Length", str(len(content)))
            for name, value in {"Content-Type": kind, "Content-Length": length, **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        do_GET = do_POST = do_PUT = do_DELETE = do_HEAD = do_PATCH = _handle

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    address = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield address
    finally:
        server.shutdown()
        server.server_close()


@contextlib.contextmanager
def served():
    """Yields the Bucket called "bucket" and the environment in which tensorstore and gcsfs find
    it.
    """
    bucket = Bucket()
    with listening(bucket, lambda *request: _answer(bucket, *request)) as address:
        yield (
            bucket,
            {
                "TENSORSTORE_GCS_HTTP_URL": address,
                "GOOGLE_AUTH_TOKEN_FOR_TESTING": "anybody",
                "STORAGE_EMULATOR_HOST": address,
            },
        )


def _answer(bucket: Bucket, method: str, path: str, query: dict, headers, body: bytes):
    """(status, content, headers)."""
    error = lambda status: (status, {"error": {"code": status, "message": "no"}}, {})
    if path == "/upload/storage/v1/b/bucket/o":
        made = bucket.put(query["name"], body, match=query.get("ifGenerationMatch"))
        return (200, made, {}) if made else error(412)
    found = re.fullmatch(r"(?:/download)?/storage/v1/b/bucket/o(?:/(.*))?", path)
    if not found:
        return (200, {"name": "bucket"}, {}) if path == "/storage/v1/b/bucket" else error(404)
    if found[1] is None:
        found, prefixes = bucket.names(query)
        items = [bucket.resource(name) for name in found]
        return 200, {"kind": "storage#objects", "items": items, "prefixes": prefixes}, {}
    name = urllib.parse.unquote(found[1])
    if method == "DELETE":
        status = bucket.delete(name, match=query.get("ifGenerationMatch"))
        return (204, b"", {}) if status == 204 else error(status)
    with bucket.lock:
        generation, content = bucket.objects.get(name, (0, None))
    if query.get("ifGenerationMatch") not in (None, str(generation)):
        return error(412)
    if content is None:
        return error(404)
    if query.get("ifGenerationNotMatch") == str(generation):
        return 304, b"", {}
    if query.get("alt") != "media":
        return 200, bucket.resource(name), {}
    about = {"Content-Type": "application/octet-stream", "X-Goog-Generation": str(generation)}
    return ranged(content, headers.get("Range"), about, beyond=error(416))


def ranged(content: bytes, asked: str | None, about: dict, *, beyond: tuple):
    """The answer with the bytes that a Range header asks for; `beyond` if there are none."""
    found = re.fullmatch(r"bytes=(\d*)-(\d*)", asked or "")
    if not found:
        return 200, content, about
    size = len(content)
    begin = int(found[1]) if found[1] else max(0, size - int(found[2]))
    end = min(size, int(found[2]) + 1) if found[1] and found[2] else size
    if begin >= size:
        return beyond
    return 206, content[begin:end], {**about, "Content-Range": f"bytes {begin}-{end - 1}/{size}"}
