"""A Hugging Face Hub on this machine: a data set's or model's folder, as far as `datasets` and huggingface_hub ask."""

import base64
import contextlib
import hashlib
import http.server
import json
import pathlib
import re
import threading
import urllib.parse

COMMIT = "c0ffee" + "0" * 34


@contextlib.contextmanager
def served(folder: pathlib.Path, *, name: str = "someone/pages", kind: str = "datasets"):
    """Gives the address and the list of what was asked. `main` is COMMIT. kind: datasets or models.

    What is uploaded arrives in `folder`.
    """
    asked = []
    files = f"/datasets/{name}" if kind == "datasets" else f"/{name}"

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_):
            pass

        def do_GET(self):
            split = urllib.parse.urlsplit(self.path)
            path = urllib.parse.unquote(split.path)
            asked.append(f"{self.command} {path}")
            if re.fullmatch(rf"/api/{kind}/{name}(/revision/(main|{COMMIT}))?", path):
                listed = [{"rfilename": one["path"]} for one in entries(folder.rglob("*")) if one["type"] == "file"]
                return self.answer(json.dumps({"id": name, "sha": COMMIT, "siblings": listed}).encode())
            if path.startswith(f"/api/{kind}/{name}/revision/"):
                return self.answer(b'{"error": "no revision"}', status=404, error="RevisionNotFound")
            if found := re.fullmatch(rf"/api/{kind}/{name}/tree/(main|{COMMIT})/?(.*)", path):
                if (folder / found[2]).is_dir():
                    below = (folder / found[2]).rglob("*") if "recursive=true" in split.query.lower() else None
                    return self.answer(json.dumps(entries(below or (folder / found[2]).iterdir())).encode())
            found = re.fullmatch(rf"{files}/resolve/(main|{COMMIT})/(.+)", path)
            if found and (folder / found[2]).is_file():
                return self.answer((folder / found[2]).read_bytes(), tag=True)
            self.answer(b'{"error": "not here"}', status=404, error="EntryNotFound" if name in path else "RepoNotFound")

        do_HEAD = do_GET

        def do_POST(self):
            path = urllib.parse.urlsplit(self.path).path
            content = self.rfile.read(int(self.headers["Content-Length"]))
            asked.append(f"POST {path}")
            if path == "/api/repos/create":
                return self.answer(json.dumps({"url": f"http://{self.headers['Host']}/{name}"}).encode())
            if path.endswith("/preupload/main"):
                modes = [
                    {"path": one["path"], "uploadMode": "regular", "shouldIgnore": False}
                    for one in json.loads(content)["files"]
                ]
                return self.answer(json.dumps({"files": modes}).encode())
            if path.endswith("/commit/main"):
                for line in map(json.loads, content.splitlines()):
                    if line["key"] == "file":
                        (folder / line["value"]["path"]).write_bytes(base64.b64decode(line["value"]["content"]))
                url = f"http://{self.headers['Host']}/{name}/commit/{COMMIT}"
                return self.answer(json.dumps({"commitUrl": url, "commitOid": COMMIT}).encode())
            named = urllib.parse.parse_qs(content.decode()).get("paths", [])
            if self.headers.get("Content-Type", "").startswith("application/json"):
                named = json.loads(content)["paths"]
            self.answer(json.dumps(entries(folder / one for one in named if (folder / one).exists())).encode())

        def answer(self, content, *, status=200, tag=False, error=None):
            begin, end = 0, len(content)
            if tag and (asked_range := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))):
                begin, end = int(asked_range[1]), min(end, int(asked_range[2] or end) + 1)
                status = 206
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(end - begin))
            self.send_header("X-Repo-Commit", COMMIT)
            if status == 206:
                self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{len(content)}")
            if tag:
                self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
                self.send_header("Accept-Ranges", "bytes")
            if error:
                self.send_header("X-Error-Code", error)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content[begin:end])

    def entries(paths):
        return [
            {"type": "directory", "path": str(path.relative_to(folder)), "oid": "0" * 40}
            if path.is_dir()
            else {
                "type": "file",
                "path": str(path.relative_to(folder)),
                "size": path.stat().st_size,
                "oid": hashlib.sha1(path.read_bytes()).hexdigest(),
            }
            for path in sorted(paths)
        ]

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
