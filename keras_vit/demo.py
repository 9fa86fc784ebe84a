"""A page on this machine to try a model: drop an image, see labels, attention and relevance.

It answers on 127.0.0.1 alone, and its page asks for nothing else: no share link, no telemetry.
"""

import asyncio
import dataclasses
import socket
import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from keras_vit import data, environment, evaluation, pages
from keras_vit.data.images import FORMATS
from keras_vit.explain import maps

if TYPE_CHECKING:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

    from keras_vit.training import OpenedModel

HOST = "127.0.0.1"
PORT = 7860  # where it is free; where most such pages are
MOST_BYTES = 2**26
TOO_LARGE = (
    f"The file has more than {MOST_BYTES // 2**20} MiB, the most that this page takes; give a "
    f"smaller {FORMATS} file."
)
_TOP = 5
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class _TooLargeError(ValueError):
    """More bytes than are taken."""


def look(opened: "OpenedModel", image: np.ndarray) -> dict[str, Any]:
    """Returns what the page shows of an image, as JSON takes it.

    Args:
        opened: the model.
        image: (height, width, 3) pixels 0..255.

    Returns:
        classes: the likeliest, `label` and `probability` of each; none without classifier.
        view: what `viewer.js` shows; None of a model that `keras_vit.explain` does not explain.
        note: why something is missing; "" where nothing is.
        sizes: how large the image is and what the model takes, in sentences.
    """
    answer: dict[str, Any] = {"classes": [], "view": None, "note": "", "sizes": ""}
    if opened.has_classifier:
        (classes,) = evaluation.predict(opened.model, [image], labels=opened.labels, top=_TOP)
        answer["classes"] = [dataclasses.asdict(each) for each in classes]
    else:
        answer["note"] = "The model has no classifier, so that it names no class."
    try:
        answer["view"], answer["sizes"] = maps.look(opened.model, image, labels=opened.labels)
    except ValueError as error:  # it holds no Vision Transformer, or pools by maximum
        answer["note"] = f"{answer['note']} {error}".strip()
    return answer


def make_app(opened: "OpenedModel") -> "Starlette":
    """Makes the application: the page at `/`, and `/look`, which takes the bytes of an image.

    Requests of other sites are refused: they name another host, or cannot send such a content
    without asking first. One image is computed at a time, the others wait.

    Raises:
        ImportError: Starlette or Jinja2 is not installed.
        ValueError: the model takes images of any size.
    """
    with environment.installed("The page is served by Starlette", "starlette", "uvicorn"):
        from starlette.applications import Starlette
        from starlette.concurrency import run_in_threadpool
        from starlette.middleware import Middleware
        from starlette.middleware.trustedhost import TrustedHostMiddleware
        from starlette.requests import ClientDisconnect
        from starlette.responses import HTMLResponse, JSONResponse
        from starlette.routing import Route
    page, turn = _page(opened), threading.Lock()
    look(opened, np.zeros((*data.image_size_of(opened.model), 3), np.uint8))  # errors come now

    def compute(contents: bytes) -> dict[str, Any]:
        with turn:
            return look(opened, data.read_image(contents))

    async def show(request: "Request") -> "Response":
        return HTMLResponse(page, headers=_HEADERS)

    async def answer(request: "Request") -> "Response":
        try:
            contents = await _read(request)
            return JSONResponse(await run_in_threadpool(compute, contents), headers=_HEADERS)
        except (ClientDisconnect, asyncio.CancelledError):  # the second at Ctrl-C
            return JSONResponse({"error": "The page was closed."}, 400)
        except (ValueError, OSError, MemoryError) as error:
            status = 413 if isinstance(error, _TooLargeError) else 400
            sentence = " ".join(str(error).split()) or "There is too little memory for this image."
            return JSONResponse({"error": sentence}, status, headers=_HEADERS)

    return Starlette(
        routes=[Route("/", show), Route("/look", answer, methods=["POST"])],
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=[HOST, "localhost"])],
    )


def listen(port: int | None = None) -> socket.socket:
    """Returns a socket that listens on 127.0.0.1.

    Args:
        port: the port, 0 for any that is free; None for 7860, or any other if that is taken.

    Raises:
        OSError: the port is taken, or not for this user.
    """
    for candidate in (PORT, 0) if port is None else (port,):
        try:
            return socket.create_server((HOST, candidate))
        except OSError as error:
            problem = error
    raise OSError(
        f"Port {port} of {HOST} cannot be used ({problem.strerror}); choose another with --port, "
        "or --port 0 for any that is free."
    )


def address(listener: socket.socket) -> str:
    """Returns the address of the page that a socket of `listen` serves."""
    return f"http://{HOST}:{listener.getsockname()[1]}"


def make_server(app: "Starlette") -> "uvicorn.Server":
    """Makes what serves an application, by `run(sockets=[listen()])`, until it is interrupted.

    Raises:
        ImportError: uvicorn is not installed.
    """
    with environment.installed("The page is served by uvicorn", "starlette", "uvicorn"):
        import uvicorn
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        timeout_graceful_shutdown=3,
    )
    return uvicorn.Server(config)


def _page(opened: "OpenedModel") -> str:
    height, width = data.image_size_of(opened.model)
    count = f", and knows {len(opened.labels)} classes" if opened.has_classifier else ""
    return pages.render(
        "demo.html",
        title=f"Try {opened.source}",
        styles=("viewer.css", "upload.css"),
        scripts=("viewer.js", "upload.js", "demo.js"),
        allowed={"connect-src": "'self'"},
        summary=f"The model takes images {width} pixels wide and {height} high{count}.",
        most_bytes=MOST_BYTES,
        too_large=TOO_LARGE,
    )


async def _read(request: "Request") -> bytes:
    """Reads the bytes of an image, and no more than are taken."""
    if request.headers.get("content-type") != "application/octet-stream":
        raise ValueError("Send the bytes of an image as application/octet-stream.")
    if int(request.headers.get("content-length", 0)) > MOST_BYTES:
        raise _TooLargeError(TOO_LARGE)
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > MOST_BYTES:
            raise _TooLargeError(TOO_LARGE)
        parts.append(part)
    return b"".join(parts)
