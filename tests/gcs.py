"""A stand-in for Google Cloud Storage: its JSON API over HTTP, as far as tensorstore uses it.

Its XML API, which tests/bucket_files.py asks, is S3's (tests/s3.py). Writes and deletions have
generations and preconditions, as GCS's are documented.
"""

import re
import urllib.parse

from tests import s3
from tests.s3 import ranged


def environment(address):
    """In which the libraries find the Bucket called "bucket"."""
    return {
        "TENSORSTORE_GCS_HTTP_URL": address,
        "GOOGLE_AUTH_TOKEN_FOR_TESTING": "anybody",
        "STORAGE_EMULATOR_HOST": address,
    }


def answer(bucket, method, path, query, headers, body):
    """(status, content, headers). No list is asked for here."""
    error = lambda status: (status, {"error": {"code": status, "message": "no"}}, {})
    match = query.get("ifGenerationMatch")
    match = match and int(match)
    if path == "/upload/storage/v1/b/bucket/o":
        made = bucket.put(query["name"], body, match=match)
        if made is None:
            return error(412)
        times = dict.fromkeys(("timeCreated", "updated"), "2026-01-01T00:00:00.000Z")
        about = {"name": query["name"], "bucket": "bucket", "generation": str(made)}
        return 200, about | times, {}
    found = re.fullmatch(r"(?:/download)?/storage/v1/b/bucket/o/(.*)", path)
    if not found:
        return s3.answer(bucket, method, path, query, headers, body)
    name = urllib.parse.unquote(found[1])
    generation, content = bucket.get(name)
    if match not in (None, generation):
        return error(412)
    if content is None:
        return error(404)
    if method == "DELETE":
        bucket.delete(name)
        return 204, b"", {}
    if query.get("ifGenerationNotMatch") == str(generation):
        return 304, b"", {}
    about = {"Content-Type": "application/octet-stream", "X-Goog-Generation": str(generation)}
    return ranged(content, headers.get("Range"), about)
