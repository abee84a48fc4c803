"""A stand-in for S3: its REST API over HTTP, as far as tensorstore and tests/s3_files.py use it, in
memory.

Writes of objects are atomic, have ETags and conditions (If-Match, If-None-Match), and lists see
them at once, as S3's are documented. Signatures are not checked, and there are no permissions. It
may be away for a while.
"""

import contextlib
import hashlib
import urllib.parse
from xml.sax.saxutils import escape

from tests.gcs import Bucket, listening, ranged


@contextlib.contextmanager
def served():
    """Yields the Bucket called "bucket" and the environment in which tensorstore and the library
    find it.
    """
    bucket = Bucket()
    with listening(bucket, lambda *request: _answer(bucket, *request)) as address:
        yield (
            bucket,
            {
                "AWS_ENDPOINT_URL": address,
                "AWS_REGION": "us-east-1",
                "AWS_ACCESS_KEY_ID": "anybody",
                "AWS_SECRET_ACCESS_KEY": "none",
                "AWS_EC2_METADATA_DISABLED": "true",
            },
        )


def etag(content: bytes) -> str:
    return f'"{hashlib.md5(content).hexdigest()}"'


def _answer(bucket: Bucket, method: str, path: str, query: dict, headers, body: bytes):
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
    with bucket.lock:
        content = bucket.objects.get(key, (0, None))[1]
    now = None if content is None else etag(content)
    wanted, unwanted = headers.get("If-Match"), headers.get("If-None-Match")
    if wanted is not None and now is None:  # documented so, even for PUT
        return _error(404, "NoSuchKey", "The specified key does not exist.")
    if wanted is not None and wanted != now:
        return _error(412, "PreconditionFailed", "At least one of the conditions does not hold")
    if unwanted is not None and now is not None and unwanted in ("*", now):
        return _error(412, "PreconditionFailed", "it exists") if method == "PUT" else (304, b"", {})
    if method == "PUT":
        return _put(bucket, key, body, now, conditional=wanted is not None or unwanted is not None)
    if method == "DELETE":
        bucket.delete(key, match=None)
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
    beyond = _error(416, "InvalidRange", "The requested range is not satisfiable")
    return ranged(content, headers.get("Range"), about, beyond=beyond)


def _put(bucket: Bucket, key: str, body: bytes, now: str | None, *, conditional: bool):
    """Only if the object still has the ETag `now`, where the request is conditional."""
    with bucket.lock:
        changed = bucket.objects.get(key)
        if conditional and (None if changed is None else etag(changed[1])) != now:
            return _error(412, "PreconditionFailed", "At least one of the conditions does not hold")
        bucket.generation += 1
        bucket.objects[key] = bucket.generation, bytes(body)
    return 200, b"", {"ETag": etag(body)}


def _list(bucket: Bucket, query: dict) -> str:
    """All at once: no page has an end here."""
    found, prefixes = bucket.names(query)
    said = [
        f"<Contents><Key>{escape(key)}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
        f"<ETag>{escape(etag(content))}</ETag><Size>{len(content)}</Size></Contents>"
        for key, (_, content) in found.items()
    ]
    said += [
        f"<CommonPrefixes><Prefix>{escape(prefix)}</Prefix></CommonPrefixes>" for prefix in prefixes
    ]
    about = f"<Name>bucket</Name><IsTruncated>false</IsTruncated><KeyCount>{len(said)}</KeyCount>"
    return f"<ListBucketResult>{about}{''.join(said)}</ListBucketResult>"


def _xml(text: str):
    return (
        200,
        f'<?xml version="1.0" encoding="UTF-8"?>{text}'.encode(),
        {"Content-Type": "application/xml"},
    )


def _error(status: int, code: str, message: str):
    return status, _xml(f"<Error><Code>{code}</Code><Message>{message}</Message></Error>")[1], {}
