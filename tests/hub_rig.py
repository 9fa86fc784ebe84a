"""A local server with the routes of the Hugging Face Hub that writing and reading a model take."""

import base64
import contextlib
import functools
import hashlib
import http.server
import json
import re
import threading
import types
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import yaml

from keras_vit.publishing import hub as publishing_hub
from keras_vit.weights import download

TOKEN = "hf_of_the_tests"


class Hub(http.server.ThreadingHTTPServer):
    """Repositories by name, each with its files; what was asked of it, in order."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.private: set[str] = set()
        self.objects: dict[str, bytes] = {}
        self.commits: list[str] = []
        self.asked: list[str] = []
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
        self.server.asked.append(f"POST {path}")
        if self.headers.get("Authorization") != f"Bearer {TOKEN}" or self.server.refuses_writing:
            self.answer({"error": "You may not write here"}, status=403)
            return
        routes = {
            r"/api/repos/create": self.create,
            r"/api/validate-yaml": self.validate,
            r"/api/models/(.+)/preupload/main": self.preupload,
            r"/(.+)\.git/info/lfs/objects/batch": self.batch,
            r"/api/models/(.+)/commit/main": self.commit,
            r"/lfs-verify": lambda content: self.answer({}),
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

    def validate(self, content: bytes) -> None:
        _, header, _ = json.loads(content)["content"].split("---\n", 2)
        try:
            fields = yaml.safe_load(header)
            card: Any = huggingface_hub.ModelCardData
            card(**fields)
        except (TypeError, ValueError, yaml.YAMLError) as error:
            self.answer({"errors": [{"message": str(error)}], "warnings": []}, status=400)
            return
        self.answer({"errors": [], "warnings": []})

    def preupload(self, name: str, content: bytes) -> None:
        paths = [each["path"] for each in json.loads(content)["files"]]
        rows = [
            {
                "path": path,
                "uploadMode": "lfs" if path.endswith((".keras", ".png")) else "regular",
                "shouldIgnore": False,
            }
            for path in paths
        ]
        self.answer({"files": rows})

    def batch(self, name: str, content: bytes) -> None:
        objects = [
            {
                **each,
                "actions": {
                    "upload": {"href": f"{self.server.url}/lfs/{each['oid']}"},
                    "verify": {"href": f"{self.server.url}/lfs-verify"},
                },
            }
            for each in json.loads(content)["objects"]
        ]
        self.answer({"transfer": "basic", "objects": objects})

    def commit(self, name: str, content: bytes) -> None:
        files = self.server.repositories[name]
        for line in content.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                files[value["path"]] = self.server.objects[value["oid"]]
        commit = hashlib.sha1(content, usedforsecurity=False).hexdigest()
        self.server.commits.append(commit)
        self.answer({"commitUrl": f"{self.server.url}/{name}/commit/{commit}", "commitOid": commit})

    def do_PUT(self) -> None:
        content = self.body()
        self.server.asked.append("PUT")
        digest = hashlib.sha256(content).hexdigest()
        if self.path != f"/lfs/{digest}":
            self.answer(status=400)
            return
        self.server.objects[digest] = content
        self.answer({})

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        if match := re.fullmatch(r"/api/models/(.+)/tree/main", path):
            files = self.server.repositories.get(match[1], {})
            rows = [
                {"type": "file", "path": name, "size": len(content), "oid": "0" * 40}
                for name, content in files.items()
            ]
            self.answer(rows or b"[]")
            return
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)", path):
            is_there = match[1] in self.server.repositories
            self.answer({"id": match[1]} if is_there else None, status=200 if is_there else 404)
            return
        match = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        found = None if match is None else self.server.repositories.get(match[1], {}).get(match[3])
        if found is None:
            self.answer(status=404, X_Error_Code="EntryNotFound")
            return
        etag = f'"{hashlib.sha256(found).hexdigest()}"'
        self.answer(found, ETag=etag, X_Repo_Commit=self.server.commits[-1])


@contextlib.contextmanager
def serving() -> Iterator[Hub]:
    with Hub() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def use(server: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Points the Hub's own library, as this process has it, to the server."""
    client: dict[str, Any] = {
        name: getattr(huggingface_hub, name)
        for name in ("CommitOperationAdd", "constants", "errors", "get_token")
    }
    library = types.SimpleNamespace(
        **client,
        HfApi=functools.partial(huggingface_hub.HfApi, endpoint=server.url),
        hf_hub_download=functools.partial(
            huggingface_hub.hf_hub_download, endpoint=server.url, cache_dir=folder / "hub"
        ),
    )
    monkeypatch.setattr(download, "_hub_library", lambda address: library)
    monkeypatch.setattr(publishing_hub, "_library", lambda address: library)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
    for name, value in (("HF_TOKEN", TOKEN), ("KERAS_HOME", str(folder / "keras"))):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
