"""A Hugging Face Hub on this machine: a data set's or model's folder, as far as `datasets` and
huggingface_hub ask.
"""

import contextlib
import hashlib
import json
import re
import urllib.parse

from tests.s3 import Bucket, listening, ranged

COMMIT = "c0ffee" + "0" * 34


@contextlib.contextmanager
def served(folder, *, name="someone/pages", kind="datasets"):
    """Gives the address and the list of what was asked. `main` is COMMIT. kind: datasets or
    models.
    """
    asked = []
    api = f"/api/{kind}/{name}"
    files = f"/datasets/{name}" if kind == "datasets" else f"/{name}"

    def answer(method, path, query, headers, body):
        path = urllib.parse.unquote(path)
        asked.append(f"{method} {path}")
        status, content, about = found(path, query, headers, body.decode())
        return status, content, {"X-Repo-Commit": COMMIT, **about}

    def found(path, query, headers, body):
        parts = re.fullmatch(
            rf"({api}|{files})(?:/(revision|tree|paths-info|resolve)/(?:main|{COMMIT})/?(.*))?",
            path,
        )
        if not parts:
            code = "RevisionNotFound" if path.startswith(f"{api}/revision/") else "RepoNotFound"
            return 404, b"{}", {"X-Error-Code": code}
        _, what, below = parts.groups()
        place = folder / (below or "")
        if what == "tree" and place.is_dir():
            recursive = query.get("recursive", "").lower() == "true"
            return told(map(entry, sorted(place.rglob("*") if recursive else place.iterdir())))
        if what == "resolve" and place.is_file():
            content = place.read_bytes()
            about = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "Accept-Ranges": "bytes"}
            return ranged(content, headers.get("Range"), about)
        if what == "paths-info":
            named = (folder / one for one in urllib.parse.parse_qs(body).get("paths", []))
            return told(entry(one) for one in named if one.exists())
        if what in ("tree", "resolve"):
            return 404, b"{}", {"X-Error-Code": "EntryNotFound"}
        names = [entry(one)["path"] for one in sorted(folder.rglob("*")) if one.is_file()]
        siblings = [{"rfilename": one} for one in names]
        return 200, json.dumps({"id": name, "sha": COMMIT, "siblings": siblings}).encode(), {}

    def told(entries):
        return 200, json.dumps(list(entries)).encode(), {}

    def entry(path):
        kind = "directory" if path.is_dir() else "file"
        about = {"oid": "0" * 40, "size": path.stat().st_size}
        return {"type": kind, "path": str(path.relative_to(folder)), **about}

    with listening(Bucket(), answer) as address:
        yield address, asked
