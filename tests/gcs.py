"""A stand-in for Google Cloud Storage: its JSON API over HTTP, as far as tensorstore uses it.

Its XML API, which tests/bucket_files.py asks, is S3's (tests/s3.py). Writes and deletions have
generations and preconditions, as GCS's are documented.
"""

import contextlib
import re
import urllib.parse

from tests import s3
from tests.s3 import Bucket, listening, ranged


@contextlib.contextmanager
def served():
    """Yields the Bucket called "bucket" and the environment in which the libraries find it."""
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
    match = query.get("ifGenerationMatch")
    match = match and int(match)
    if path == "/upload/storage/v1/b/bucket/o":
        made = bucket.put(query["name"], body, match=match)
        return (200, _resource(query["name"], made), {}) if made else error(412)
    found = re.fullmatch(r"(?:/download)?/storage/v1/b/bucket/o(?:/(.*))?", path)
    if not found:
        return s3.answer(bucket, method, path, query, headers, body)
    if found[1] is None:
        begin, end = query.get("startOffset", ""), query.get("endOffset")
        items = [
            _resource(name, generation)
            for name, (generation, _) in bucket.sorted(query.get("prefix", ""))
            if begin <= name and not (end and name >= end)
        ]
        return 200, {"kind": "storage#objects", "items": items}, {}
    name = urllib.parse.unquote(found[1])
    generation, content = bucket.get(name)
    if match not in (None, generation):
        return error(412)
    if content is None:
        return error(404)
    if method == "DELETE":
        return (204, b"", {}) if bucket.delete(name, match=match) else error(412)
    if query.get("ifGenerationNotMatch") == str(generation):
        return 304, b"", {}
    about = {"Content-Type": "application/octet-stream", "X-Goog-Generation": str(generation)}
    return ranged(content, headers.get("Range"), about, beyond=error(416))


def _resource(name: str, generation: int) -> dict:
    times = dict.fromkeys(("timeCreated", "updated"), "2026-01-01T00:00:00.000Z")
    return {"name": name, "bucket": "bucket", "generation": str(generation), **times}
