"""A local server with the routes of the Hugging Face Hub that writing and reading a model take."""

import base64
import hashlib
import http.server
import json
import re
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import processes
import pytest

TOKEN = "hf_of_the_tests"


class Hub(http.server.ThreadingHTTPServer):
    """Repositories by name, each with its files; what was asked of it, in order.

    A branch is at another commit for each file, as if it moved in between.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.private: set[str] = set()
        self.commits: list[str] = []
        self.revisions: list[str] = []  # of the files that were read
        self.refuses_writing = False


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None: ...

    def answer(self, content: object = None, *, status: int = 200, **headers: str) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content or {}).encode()
        self.send_response(status)
        for name, text in headers.items():
            self.send_header(name.replace("_", "-"), text)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        pieces = []
        while size := int(self.rfile.readline(), 16):
            pieces.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(pieces)

    def do_POST(self) -> None:
        path = urllib.parse.urlsplit(self.path).path
        content = self.body()
        if self.headers.get("Authorization") != f"Bearer {TOKEN}" or self.server.refuses_writing:
            self.answer({"error": "You may not write here"}, status=403)
            return
        routes = {
            r"/api/repos/create": self.create,
            r"/api/validate-yaml": lambda content: self.answer({"errors": [], "warnings": []}),
            r"/api/models/(.+)/preupload/main": self.preupload,
            r"/api/models/(.+)/commit/main": self.commit,
        }
        for pattern, route in routes.items():
            if match := re.fullmatch(pattern, path):
                answer: Any = route
                answer(*match.groups(), content)
                return
        self.answer(status=404)

    def create(self, content: bytes) -> None:
        asked = json.loads(content)
        name = f"{asked['organization']}/{asked['name']}"
        status = 409 if name in self.server.repositories else 200
        self.server.repositories.setdefault(name, {})
        if status == 200 and asked.get("visibility") == "private":
            self.server.private.add(name)
        self.answer({"url": f"{self.server.url}/{name}", "name": name}, status=status)

    def preupload(self, name: str, content: bytes) -> None:
        paths = [each["path"] for each in json.loads(content)["files"]]
        row = {"uploadMode": "regular", "shouldIgnore": False}
        self.answer({"files": [{"path": path, **row} for path in paths]})

    def commit(self, name: str, content: bytes) -> None:
        files = self.server.repositories[name]
        for line in content.splitlines():
            entry = json.loads(line)
            if entry["key"] == "file":
                files[entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
        commit = hashlib.sha1(content, usedforsecurity=False).hexdigest()
        self.server.commits.append(commit)
        self.answer({"commitUrl": f"{self.server.url}/{name}/commit/{commit}", "commitOid": commit})

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = urllib.parse.urlsplit(self.path).path
        if match := re.fullmatch(r"/api/models/(.+)/tree/main", path):
            rows = [
                {"type": "file", "path": name, "size": len(content), "oid": "0" * 40}
                for name, content in self.server.repositories[match[1]].items()
            ]
            self.answer(rows or b"[]")
            return
        match = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        repository, revision, name = match.groups() if match else ("", "", "")
        if match:  # else a client of another server asks, which had this port before
            self.server.revisions.append(revision)
        files = self.server.repositories.get(repository)
        content = (files or {}).get(urllib.parse.unquote(name))
        if content is None:
            error = "RepoNotFound" if files is None else "EntryNotFound"
            self.answer(status=404, X_Error_Code=error)
            return
        commit = revision if len(revision) == 40 else f"{sum(name.encode()):040x}"
        etag = f'"{hashlib.sha256(content).hexdigest()}"'
        self.answer(content, ETag=etag, X_Repo_Commit=commit)


@pytest.fixture(name="hub")
def hub_fixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A Hub that the Hub's own library, as this process has it, asks."""
    with processes.serving(Hub()) as server:
        settings = {
            "ENDPOINT": server.url,
            "HUGGINGFACE_CO_URL_TEMPLATE": server.url + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_CACHE": str(tmp_path / "hub"),
            "HF_HUB_DISABLE_XET": True,
            "HF_HUB_DISABLE_PROGRESS_BARS": True,
        }
        for name, value in settings.items():
            monkeypatch.setattr(huggingface_hub.constants, name, value)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setenv("KERAS_HOME", str(tmp_path / "keras"))
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        yield server
