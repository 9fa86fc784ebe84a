"""What the download tests run against: a file server with faults, and child processes."""

import base64
import contextlib
import hashlib
import http.server
import io
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import processes
import pytest

import keras_vit

SOURCE = Path(keras_vit.__file__).parent.parent

# Imports the module without the packages above it, which shows that it needs no framework.
CHILD = """
import sys, types
for name in ("keras_vit", "keras_vit.weights"):
    module = types.ModuleType(name)
    module.__path__ = [sys.argv[1] + "/" + name.replace(".", "/")]
    sys.modules[name] = module
from keras_vit.weights import download
"""
FETCH = CHILD + "print(download.fetch(sys.argv[2], wait=lambda _: None))"
NAME = "/vit_models/imagenet21k/ViT-B_16.npz"
ELSEWHERE = "/elsewhere.npz"  # where faults may send a client; without faults itself


class Server(http.server.ThreadingHTTPServer):
    """Serves `files` as Google Cloud Storage does, minus what is switched off, plus `faults`."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.files: dict[str, bytes] = {}
        self.faults: list[Fault] = []  # one per request, then none
        self.requests: list[dict[str, str]] = []
        self.released = threading.Event()
        self.ranges = self.if_range = self.validators = self.length = True
        self.hashes: tuple[str, ...] | None = None  # None: the true ones
        self.pause = 0.0  # seconds between pieces of 16 KiB
        self.headers: dict[str, str] = {}

    @property
    def starts(self) -> list[int]:
        """The first byte that each request asked for."""
        ranges = [request.get("range", "bytes=0-") for request in self.requests]
        return [int(text.removeprefix("bytes=").partition("-")[0]) for text in ranges]

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that goes away is part of these tests."""

    def tag(self, body: bytes) -> str:
        return f'"{hashlib.md5(body).hexdigest()}"'


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self.server.requests.append({key.lower(): value for key, value in self.headers.items()})
        self.close_connection = True
        body = self.server.files.get(self.path)
        if body is None:
            self.send_error(404)
        elif self.server.faults and self.path != ELSEWHERE:
            self.server.faults.pop(0)(self, body)
        else:
            self.send_file(body, body)

    def send_file(self, body: bytes, sent: bytes, *, upto: int | None = None) -> None:
        """Sends `sent` under the headers of `body`, or only its bytes before `upto`."""
        start = self.begin(body)
        pieces = io.BytesIO(sent[start:upto])
        while piece := pieces.read(2**14):
            self.wfile.write(piece if self.server.length else b"%x\r\n%b\r\n" % (len(piece), piece))
            time.sleep(self.server.pause)
        if upto is None and not self.server.length:
            self.wfile.write(b"0\r\n\r\n")

    def begin(self, body: bytes) -> int:
        start = 0
        wanted = self.headers.get("Range", "")
        current = self.headers.get("If-Range") in (None, self.server.tag(body))
        if wanted and self.server.ranges and (current or not self.server.if_range):
            start = self.server.starts[-1]
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        else:
            self.send_response(200)
        length = ("Content-Length", str(len(body) - start))
        self.send_header(*(length if self.server.length else ("Transfer-Encoding", "chunked")))
        if self.server.validators:
            self.send_header("ETag", self.server.tag(body))
            self.send_header("x-goog-generation", str(len(body)))
        md5 = base64.b64encode(hashlib.md5(body).digest()).decode()
        for text in (f"md5={md5}",) if self.server.hashes is None else self.server.hashes:
            self.send_header("x-goog-hash", text)
        for name, text in self.server.headers.items():
            self.send_header(name, text)
        self.end_headers()
        return start


Fault = Callable[[Handler, bytes], object]


def raw(answer: bytes, *, each: bytes = b"", pause: float = 0.0) -> Fault:
    """Sends these bytes and no others; then `each` again and again, a pause after each."""

    def fault(handler: Handler, _: bytes) -> None:
        with contextlib.suppress(OSError):
            handler.wfile.write(answer)
            while each and not handler.server.released.wait(pause):
                handler.wfile.write(each)

    return fault


def status(code: int, **headers: str) -> Fault:
    """Answers so, without a file."""
    fields = {name.replace("_", "-"): text for name, text in headers.items()}
    lines = [f"{name}: {text}\r\n" for name, text in {**fields, "Content-Length": "0"}.items()]
    return raw(f"HTTP/1.1 {code} Status\r\n{''.join(lines)}\r\n".encode())


def cut(upto: int, *, then: Callable[[Handler], object] = lambda _: None) -> Fault:
    """Sends the file's first bytes, does something, and closes the connection."""

    def fault(handler: Handler, body: bytes) -> None:
        handler.send_file(body, body, upto=upto)
        handler.wfile.flush()
        then(handler)

    return fault


def reset(upto: int) -> Fault:
    def close(handler: Handler) -> None:
        handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        handler.connection.close()

    return cut(upto, then=close)


def stall(upto: int) -> Fault:
    return cut(upto, then=lambda handler: handler.server.released.wait())


def flip(place: int) -> Fault:
    return lambda handler, body: handler.send_file(body, flipped(body, place))


def flipped(body: bytes, place: int) -> bytes:
    return body[:place] + bytes([body[place] ^ 1]) + body[place + 1 :]


def safetensors(values: int = 1000) -> bytes:
    header = b'{"w":{"dtype":"F32","shape":[%d],"data_offsets":[0,%d]}}' % (values, 4 * values)
    return len(header).to_bytes(8, "little") + header + bytes(range(200)) * (values // 50)


def archive(seed: int, *, floats: int = 50_000) -> bytes:
    file = io.BytesIO()
    np.savez(file, w=np.random.default_rng(seed).standard_normal(floats, np.float32))
    return file.getvalue()


BODY = archive(0)
OTHER = archive(1)
MIDDLE = len(BODY) // 2


@contextlib.contextmanager
def serving() -> Iterator[Server]:
    """Runs a server that holds BODY under NAME, and elsewhere."""
    with processes.serving(Server()) as server:
        server.files = {NAME: BODY, ELSEWHERE: BODY}
        yield server
        server.released.set()


@contextlib.contextmanager
def serving_safely(folder: Path) -> Iterator[Server]:
    """Runs the same over https, with a certificate that it writes to `folder`/certificate.pem."""
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    command = f"openssl req -x509 -newkey rsa:2048 -nodes -keyout {key} -out {certificate} -days 2"
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    subprocess.run([*command.split(), *names], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with serving() as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        server.url = f"https://localhost:{server.server_port}"
        yield server


# Fixtures, for the test files that name them.


@pytest.fixture(name="server")
def server_fixture() -> Iterator[Server]:
    with serving() as server:
        yield server


@pytest.fixture(name="url")
def url_fixture(server: Server) -> str:
    return server.url + NAME


@pytest.fixture(name="home", autouse=True)
def home_fixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own, which is not there yet; neither proxy nor mirror."""
    monkeypatch.setenv("KERAS_HOME", str(tmp_path / "keras"))
    monkeypatch.setenv("no_proxy", "localhost,127.0.0.1")
    monkeypatch.delenv("KERAS_VIT_MIRROR", raising=False)
    return tmp_path / "keras"


def child_command(code: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", code, str(SOURCE), *arguments]


def run_child(code: str, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    done: subprocess.CompletedProcess[str] = subprocess.run(
        child_command(code, *arguments), capture_output=True, text=True, timeout=300, **options
    )
    return done


def start_child(code: str, *arguments: str) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen(child_command(code, *arguments), stdout=pipe, stderr=pipe, text=True)


def kept(home: Path) -> set[str]:
    """The names of all files in the cache, without the locks."""
    return {path.name for path in home.rglob("*") if path.is_file() and path.suffix != ".lock"}


def one_sentence(error: BaseException) -> bool:
    text = str(error)
    return "\n" not in text and not text.rstrip(".]'\"").count(". ")
