"""A Hugging Face Hub on this machine: a data set's or model's folder, as far as `datasets` and
huggingface_hub ask.
"""

import contextlib
import hashlib
import json
import pathlib
import re
import urllib.parse

from tests.s3 import Bucket, listening, ranged

COMMIT = "c0ffee" + "0" * 34


@contextlib.contextmanager
def served(folder: pathlib.Path, *, name: str = "someone/pages", kind: str = "datasets"):
    """Gives the address and the list of what was asked. `main` is COMMIT. kind: datasets or
    models.
    """
    asked = []
    files = f"/datasets/{name}" if kind == "datasets" else f"/{name}"

    def answer(method, path, query, headers, body):
        path = urllib.parse.unquote(path)
        asked.append(f"{method} {path}")
        found = posted(headers, body) if method == "POST" else got(path, query, headers)
        status, content, about = (
            found if isinstance(found, tuple) else (200, json.dumps(found).encode(), {})
        )
        return status, content, {"X-Repo-Commit": COMMIT, **about}

    def got(path, query, headers):
        if re.fullmatch(rf"/api/{kind}/{name}(/revision/(main|{COMMIT}))?", path):
            listed = [
                {"rfilename": one["path"]}
                for one in entries(folder.rglob("*"))
                if one["type"] == "file"
            ]
            return {"id": name, "sha": COMMIT, "siblings": listed}
        if path.startswith(f"/api/{kind}/{name}/revision/"):
            return missing("RevisionNotFound")
        found = re.fullmatch(rf"/api/{kind}/{name}/tree/(main|{COMMIT})/?(.*)", path)
        if found and (below := folder / found[2]).is_dir():
            return entries(
                below.rglob("*")
                if query.get("recursive", "").lower() == "true"
                else below.iterdir()
            )
        found = re.fullmatch(rf"{files}/resolve/(main|{COMMIT})/(.+)", path)
        if found and (file := folder / found[2]).is_file():
            content = file.read_bytes()
            about = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "Accept-Ranges": "bytes"}
            return ranged(content, headers.get("Range"), about)
        return missing("EntryNotFound" if name in path else "RepoNotFound")

    def posted(headers, body):
        is_json = headers.get("Content-Type", "").startswith("application/json")
        named = (
            json.loads(body)["paths"]
            if is_json
            else urllib.parse.parse_qs(body.decode()).get("paths", [])
        )
        return entries(folder / one for one in named if (folder / one).exists())

    def missing(code):
        return 404, {"error": "not here"}, {"X-Error-Code": code}

    def entries(paths):
        return [entry(path) for path in sorted(paths)]

    def entry(path):
        about = {"path": str(path.relative_to(folder))}
        if path.is_dir():
            return {"type": "directory", "oid": "0" * 40, **about}
        content = path.read_bytes()
        return {
            "type": "file",
            "size": len(content),
            "oid": hashlib.sha1(content).hexdigest(),
            **about,
        }

    with listening(Bucket(), answer) as address:
        yield address, asked
