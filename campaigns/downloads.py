"""Attacks `fetch` from a server: odd status, headers, bodies, redirects, breaks and stalls."""

import functools
import hashlib
import http.server
import json
import logging
import os
import shutil
import threading
import time
from pathlib import Path

import h5py
import numpy as np

from campaigns import oracle
from campaigns.mutations import mutate
from keras_vit.weights import download

_SECRET = "hunter2"
_TIMEOUT = 0.3  # seconds, in place of the 20 that users wait
_JUNK = (
    b"<!DOCTYPE html><html>Sign in</html>",
    b'{"error": "Repository not found"}',
    b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
    b"\x1f\x8b\x08\x00junk",
    b"",
    b"PK\x03\x04",
    b"\x89HDF\r\n\x1a\n",
    b"[1, 2]",
    b"\x80\x04K\x01.",
)
_STATUS = (100, 101, 200, 201, 203, 204, 206, 300, 304, 400, 401, 403, 404, 408, 410, 416, 429, 500)
_TARGETS = (
    "file:///etc/passwd",
    "ftp://127.0.0.1/x.npz",
    "data:,x",
    "http://[::1/x",
    "//",
    "http://me:pw@127.0.0.1/x.npz",
    "{self}",
    "{sound}",
    "http://127.0.0.1:1/x.npz",
    "\u00e9\u0007",
)
_HEADERS = {
    "Content-Length": ("abc", "-1", "9" * 5000, "7", "1e3", "0"),
    "Content-Encoding": ("gzip", "br", "identity", "\u00e9"),
    "Content-Type": ("text/html", "application/json", ";;;", "x" * 9000),
    "Content-Range": ("bytes 0-1/2", "bytes 5-9/" + "9" * 5000, "rows 1", "bytes */3"),
    "Transfer-Encoding": ("chunked", "gzip", "identity"),
    "ETag": ('"a\r\n b"', "W/", "\u00ff" * 300, '"' + "0" * 64 + '"'),
    "Last-Modified": ("never", ""),
    "Retry-After": ("\u00b2", "9" * 400, "-1", "Fri, 31 Dec 1999 23:59:59 GMT"),
    "x-goog-hash": ("md5=AAAA", "crc32c=====", "md5", "crc32c=AAAAAA==", "\u0085="),
    "X-Linked-ETag": ('"' + "0" * 64 + '"', "x"),
    "Connection": ("keep-alive", "close"),
}


class Campaign:
    """Undamaged files of four formats, and a server that each case gives its next answers."""

    def __init__(self, folder: Path) -> None:
        logging.getLogger("keras_vit.weights").setLevel(logging.CRITICAL)
        os.environ["KERAS_HOME"] = str(folder / "keras")
        os.environ["no_proxy"] = "127.0.0.1"
        os.environ.pop(download.MIRROR_SETTING, None)
        download.TIMEOUT = _TIMEOUT
        self._cache = folder / "keras" / "models"
        self._sound = _sound_files(folder)
        self._digests = {name: _digest(folder / name) for name in self._sound}
        self._server = _Server()
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def case(self, rng: np.random.Generator) -> oracle.Case:
        """Makes a server with one to three hostile answers, or eight times as many."""
        name = sorted(self._sound)[rng.integers(len(self._sound))]
        content = self._sound[name]
        answers, descriptions = [], []
        for _ in range(rng.integers(1, 4)):
            attack = _ATTACKS[rng.integers(len(_ATTACKS))]
            answer, what = attack(content, rng)
            answers.append(answer)
            descriptions.append(what)
        is_repeated = bool(rng.integers(2))
        if is_repeated:
            answers *= 8
        query = "" if rng.integers(2) else f"?token={_SECRET}"
        digest = hashlib.sha256(content).hexdigest()
        has_digest = bool(rng.integers(2))
        has_checksum = has_digest or name.endswith(".npz")
        return oracle.Case(
            what=f"{name}: {'; '.join(descriptions)}{', repeated' if is_repeated else ''}",
            act=functools.partial(self._act, name, query, answers, digest if has_digest else None),
            sound=self._digests[name],
            names=(name,),
            has_checksum=has_checksum,
        )

    def _act(self, name: str, query: str, answers: list["_Answer"], sha256: str | None) -> str:
        """Downloads; raises if a server reaches other files or the secret is in an error."""
        shutil.rmtree(self._cache, ignore_errors=True)
        self._server.answers = list(answers)
        self._server.content = self._sound[name]
        url = f"{self._server.url}/{name}{query}"
        try:
            path = download.fetch(url, sha256=sha256, wait=lambda _: None)
        except Exception as error:
            if _SECRET in repr(error) or _SECRET.encode() in self._cached_text():
                raise RuntimeError(f"the secret of the address is disclosed: {error}") from None
            if any(file.name == name for file in self._cache.rglob("*")):
                raise RuntimeError(f"{name} is in the cache after an error: {error}") from None
            raise
        if not path.is_relative_to(self._cache):
            raise RuntimeError(f"{path} is outside the cache")
        if sha256 is not None and hashlib.sha256(path.read_bytes()).hexdigest() != sha256:
            raise RuntimeError(f"{path} does not have the given SHA-256")
        return _digest(path)

    def _cached_text(self) -> bytes:
        return b"".join(
            file.read_bytes() + file.name.encode()
            for file in self._cache.rglob("*")
            if file.suffix in (".version", ".sha256")
        )


class _Answer:
    """The bytes that the server sends, with its own addresses in place of {self} and {sound}.

    Then it sends `drip` again and again, slowly.
    """

    def __init__(self, content: bytes, *, drip: bytes = b"") -> None:
        self.content, self.drip = content, drip


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.answers: list[_Answer] = []
        self.content = b""

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignores clients that close the connection, as they should."""


class _Handler(http.server.BaseHTTPRequestHandler):
    server: _Server

    def log_message(self, *arguments: object) -> None: ...

    def do_GET(self) -> None:
        self.close_connection = True
        answer = self.server.answers.pop(0) if self.server.answers else None
        if answer is None or self.path == "/sound":
            self._send_sound()
            return
        own = f"{self.server.url}{self.path}".encode()
        sound = f"{self.server.url}/sound".encode()
        self.wfile.write(answer.content.replace(b"{self}", own).replace(b"{sound}", sound))
        for _ in range(20 if answer.drip else 0):
            self.wfile.write(answer.drip)
            time.sleep(0.02)

    def _send_sound(self) -> None:
        """Sends the undamaged file, or the requested range of it."""
        content = self.server.content
        start = int(self.headers.get("Range", "bytes=0-")[6:-1])
        tag = hashlib.md5(content, usedforsecurity=False).hexdigest()
        if self.headers.get("If-Range") != f'"{tag}"' or start >= len(content):
            start = 0
        self.send_response(206 if start else 200)
        if start:
            span = f"bytes {start}-{len(content) - 1}/{len(content)}"
            self.send_header("Content-Range", span)
        self.send_header("Content-Length", str(len(content) - start))
        self.send_header("ETag", f'"{tag}"')
        self.end_headers()
        self.wfile.write(content[start:])


def _answer(status: str, headers: dict[str, str], body: bytes, *, drip: bytes = b"") -> _Answer:
    lines = "".join(f"{name}: {text}\r\n" for name, text in headers.items())
    return _Answer(f"HTTP/1.1 {status}\r\n{lines}\r\n".encode("latin-1") + body, drip=drip)


def _length(body: bytes) -> dict[str, str]:
    return {"Content-Length": str(len(body))}


def _damaged(content: bytes, rng: np.random.Generator) -> tuple[_Answer, str]:
    body, what = mutate(content, rng)
    return _answer("200 OK", _length(body) if rng.integers(2) else {}, body), what


def _junk(content: bytes, rng: np.random.Generator) -> tuple[_Answer, str]:
    body = _JUNK[rng.integers(len(_JUNK))]
    return _answer("200 OK", _length(body) if rng.integers(2) else {}, body), f"body {body[:20]!r}"


def _status(content: bytes, rng: np.random.Generator) -> tuple[_Answer, str]:
    status = int(rng.choice(_STATUS))
    return _answer(f"{status} \x1b[31m", _length(content), content), f"status {status}"


def _header(content: bytes, rng: np.random.Generator) -> tuple[_Answer, str]:
    name = sorted(_HEADERS)[rng.integers(len(_HEADERS))]
    text = _HEADERS[name][rng.integers(len(_HEADERS[name]))]
    status = "206 Partial" if name == "Content-Range" else "200 OK"
    headers = {**_length(content), name: text}
    return _answer(status, headers, content), f"{name}: {text[:20]!r}"


def _redirect(content: bytes, rng: np.random.Generator) -> tuple[_Answer, str]:
    target = _TARGETS[rng.integers(len(_TARGETS))]
    status = rng.choice([301, 302, 303, 307, 308])
    return _answer(f"{status} Go", {"Location": target}, b""), f"{status} to {target!r}"


def _cut(content: bytes, rng: np.random.Generator) -> tuple[_Answer, str]:
    length = int(rng.integers(len(content)))
    tag = hashlib.md5(content, usedforsecurity=False).hexdigest()
    headers = {**_length(content), "ETag": f'"{tag}"'}
    return _answer("200 OK", headers, content[:length]), f"cut at {length}"


def _excess(content: bytes, rng: np.random.Generator) -> tuple[_Answer, str]:
    more = rng.bytes(int(2 ** rng.uniform(0, 12)))
    headers = _length(content) if rng.integers(2) else {}
    return _answer("200 OK", headers, content + more), f"{len(more)} bytes more"


def _raw(content: bytes, rng: np.random.Generator) -> tuple[_Answer, str]:
    whole = _answer("200 OK", {**_length(content), "ETag": '"a"'}, b"").content
    damaged, what = mutate(whole, rng)
    return _Answer(damaged + content), f"headers: {what}"


def _chunks(content: bytes, rng: np.random.Generator) -> tuple[_Answer, str]:
    sizes = (f"{len(content):x}", "-5", "g", "f" * 40, "0", f"{len(content):x};{'x' * 70_000}")
    size = sizes[rng.integers(len(sizes))]
    body = f"{size}\r\n".encode() + content + b"\r\n0\r\n" + b"A: b\r\n" * int(rng.integers(200))
    headers = {"Transfer-Encoding": "chunked"}
    return _answer("200 OK", headers, body + b"\r\n"), f"chunk of size {size[:20]!r}"


def _drip(content: bytes, rng: np.random.Generator) -> tuple[_Answer, str]:
    starts = (b"", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 99999\r\n\r\n")
    drips = (b"x", b"A: b\r\n", b"HTTP/1.1 100 Continue\r\n\r\n")
    start, drip = starts[rng.integers(len(starts))], drips[rng.integers(len(drips))]
    return _Answer(start, drip=drip), f"{start!r}, then {drip!r} slowly"


# Slow answers take their time, so they are rarer.
_FAST = (_damaged, _junk, _status, _header, _redirect, _cut, _excess, _raw, _chunks)
_ATTACKS = (*4 * _FAST, _drip)


def _sound_files(folder: Path) -> dict[str, bytes]:
    """Writes a small file of each format, and returns the contents by name."""
    values = np.arange(3000, dtype=np.float32)
    np.savez(folder / "vit.npz", w=values)
    with h5py.File(folder / "vit.weights.h5", "w") as file:
        file["layers/w"] = values
    entry = {"dtype": "F32", "shape": [3000], "data_offsets": [0, 12000]}
    header = json.dumps({"w": entry}).encode()
    length = len(header).to_bytes(8, "little")
    files = {name: (folder / name).read_bytes() for name in ("vit.npz", "vit.weights.h5")}
    files["vit.safetensors"] = length + header + values.tobytes()
    files["config.json"] = json.dumps({"image_size": 224, "hidden_size": 192}).encode()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return files


def _digest(path: Path) -> str:
    """Returns a digest of a file; of an archive, whose dates may differ, one of its arrays."""
    if path.suffix != ".npz":
        return hashlib.sha256(path.read_bytes()).hexdigest()
    with np.load(path) as arrays:
        parts = [(name, arrays[name].dtype.str, arrays[name].tobytes()) for name in sorted(arrays)]
    return hashlib.sha256(repr(parts).encode()).hexdigest()
