"""A stand-in for S3: its REST API over HTTP, as far as tensorstore and tests/bucket_files.py use it.

Objects are in memory. Writes of them are atomic, have ETags and conditions (If-Match,
If-None-Match), and lists see them at once, as S3's are documented. Signatures are not checked, and
there are no permissions, and no time that a request takes. It may be away for a while.
"""

import contextlib
import hashlib
import http.server
import json
import re
import threading
import urllib.parse
from xml.sax.saxutils import escape


class Bucket:
    """Objects by name: (generation, content)."""

    def __init__(self):
        self.objects: dict[str, tuple[int, bytes]] = {}
        self.lock = threading.Lock()
        self.generation = 0
        self.requests: list[str] = []
        self.away = False  # then every request is answered with 503

    def get(self, name):
        with self.lock:
            return self.objects.get(name, (0, None))

    def put(self, name, content, *, match=None):
        """The object's generation; None where the one before is not `match` (0: there is none)."""
        with self.lock:
            if match not in (None, self.objects.get(name, (0,))[0]):
                return None
            self.generation += 1
            self.objects[name] = self.generation, bytes(content)
            return self.generation

    def delete(self, name):
        with self.lock:
            self.objects.pop(name, None)

    def leave(self, seconds):
        """Is away for so long."""
        self.away = True
        threading.Timer(seconds, setattr, (self, "away", False)).start()

    def sorted(self, prefix=""):
        with self.lock:
            return [item for item in sorted(self.objects.items()) if item[0].startswith(prefix)]


@contextlib.contextmanager
def listening(bucket, answer):
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
            usual = {"Content-Type": "application/json", "Content-Length": str(len(content))}
            for name, value in (usual | headers).items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        do_GET = do_POST = do_PUT = do_DELETE = do_HEAD = _handle

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    address = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield address
    finally:
        server.shutdown()
        server.server_close()


def environment(address):
    """In which the libraries find the Bucket called "bucket"."""
    return {
        "AWS_ENDPOINT_URL": address,
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "anybody",
        "AWS_SECRET_ACCESS_KEY": "none",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


def answer(bucket, method, path, query, headers, body):
    """(status, content, headers)."""
    name, _, key = urllib.parse.unquote(path.lstrip("/")).partition("/")
    if name != "bucket":
        return _error(404, "NoSuchBucket", "The specified bucket does not exist")
    if not key:
        return (
            (200, b"", {"x-amz-bucket-region": "us-east-1"})
            if method == "HEAD"
            else _xml(_list(bucket, query))
        )
    generation, content = bucket.get(key)
    now = None if content is None else etag(content)
    failed = _error(412, "PreconditionFailed", "At least one of the conditions does not hold")
    wanted = headers.get("If-Match")
    unwanted = headers.get("If-None-Match")
    if wanted is not None and wanted != now:
        return failed
    if unwanted is not None and now is not None and unwanted in ("*", now):
        return failed if method == "PUT" else (304, b"", {})
    if method == "PUT":
        match = None if wanted is unwanted is None else generation
        written = bucket.put(key, body, match=match)
        return failed if written is None else (200, b"", {"ETag": etag(body)})
    if method == "DELETE":
        bucket.delete(key)
        return 204, b"", {}
    if content is None:
        return _error(404, "NoSuchKey", "The specified key does not exist.")
    about = {
        "ETag": now,
        "Content-Type": "application/octet-stream",
        "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT",
    }
    if method == "HEAD":
        return 200, b"", {**about, "Content-Length": str(len(content))}
    return ranged(content, headers.get("Range"), about)


def ranged(content, asked, about):
    """The answer with the bytes that a Range header asks for, in the form that tensorstore has."""
    found = re.fullmatch(r"bytes=(\d+)-(\d+)", asked or "")
    if not found:
        return 200, content, about
    begin, last = map(int, found.groups())
    part = content[begin : last + 1]
    place = f"bytes {begin}-{begin + len(part) - 1}/{len(content)}"
    return 206, part, {**about, "Content-Range": place}


def etag(content):
    return f'"{hashlib.md5(content).hexdigest()}"'


def _list(bucket, query):
    """All at once: no page has an end here. What follows a delimiter is grouped."""
    prefix = query.get("prefix", "")
    delimiter = query.get("delimiter")
    said = {}
    for key, (_, content) in bucket.sorted(prefix):
        group, found, _ = key[len(prefix) :].partition(delimiter) if delimiter else ("", "", "")
        if found:
            group = f"<Prefix>{escape(prefix + group + found)}</Prefix>"
            said[group] = f"<CommonPrefixes>{group}</CommonPrefixes>"
        else:
            said[key] = (
                f"<Contents><Key>{escape(key)}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
                f"<ETag>{escape(etag(content))}</ETag><Size>{len(content)}</Size></Contents>"
            )
    about = f"<Name>bucket</Name><IsTruncated>false</IsTruncated><KeyCount>{len(said)}</KeyCount>"
    return f"<ListBucketResult>{about}{''.join(said.values())}</ListBucketResult>"


def _xml(text):
    return (
        200,
        f'<?xml version="1.0" encoding="UTF-8"?>{text}'.encode(),
        {"Content-Type": "application/xml"},
    )


def _error(status, code, message):
    return status, _xml(f"<Error><Code>{code}</Code><Message>{message}</Message></Error>")[1], {}
