"""Tests of keras_vit.demo and of the command: a page on this machine to try a model."""

import concurrent.futures
import http.client
import json
import re
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import browser
import keras
import numpy as np
import processes
import pytest
from conftest import TINY
from exported import LABELS, photo, served_model

from keras_vit import data, demo, evaluation
from keras_vit.model import VisionTransformer
from keras_vit.pages import rendering
from keras_vit.training import OpenedModel

BYTES = {"Content-Type": "application/octet-stream"}


def opened(model: keras.Model, labels: tuple[str, ...] = LABELS) -> OpenedModel:
    return OpenedModel(
        source="pets", model=model, labels=labels, identifiers=labels, states_labels=True
    )


@pytest.fixture(scope="module")
def model() -> VisionTransformer:
    return served_model()


@pytest.fixture(scope="module")
def port(model: VisionTransformer) -> Iterator[int]:
    """The port of a page that is served until the tests are over."""
    server = demo.make_server(demo.make_app(opened(model)))
    with demo.listen(0) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        yield listener.getsockname()[1]
        server.should_exit = True
        thread.join(timeout=300)
    assert not thread.is_alive()


def ask(
    port: int, contents: Any = None, headers: dict[str, str] = BYTES
) -> tuple[int, dict[str, str], str]:
    """Sends an image, or asks for the page; returns the status, the headers and what is said."""
    connection = http.client.HTTPConnection(demo.HOST, port, timeout=300)
    try:
        method, path = ("GET", "/") if contents is None else ("POST", "/look")
        connection.request(method, path, body=contents, headers=headers)
        reply = connection.getresponse()
        return reply.status, dict(reply.getheaders()), reply.read().decode()
    finally:
        connection.close()


def test_the_page_asks_for_nothing_outside(port: int) -> None:
    """It names no other place, and its policy allows requests to this server alone."""
    status, headers, text = ask(port)
    assert status == 200
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy is not None
    sources = set(re.findall(r"[a-z]+:|\*|&#39;self&#39;|https?://[^ ]+", policy[1]))
    assert sources == {"data:", "&#39;self&#39;"}
    assert not re.search(r"(src|href)=\"(?!data:)", text)
    assert headers["content-security-policy"] == "frame-ancestors 'none'"
    assert not {name for name in headers if name.startswith("access-control")}


def test_an_image_is_named_as_predict_names_it(port: int, model: VisionTransformer) -> None:
    """The classes and probabilities are those of `predict`; the maps fit the model."""
    contents = photo(3, height=70, width=90, kind="JPEG")
    status, _, text = ask(port, contents)
    said = json.loads(text)
    (expected,) = evaluation.predict(model, [data.read_image(contents)], labels=LABELS)
    assert status == 200
    assert said["classes"] == [vars(each) for each in expected]
    assert said["note"] == ""
    assert said["sizes"].startswith("The image is 90 pixels wide and 70 high.")
    assert said["view"]["grid"] == list(TINY.grid)
    assert said["view"]["maps"][0]["name"] == f"Relevance for {expected[0].label}"


def test_what_is_no_image_is_a_sentence(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """So is one of too many bytes, said or sent, or too many pixels; the next image is read."""
    monkeypatch.setenv("KERAS_VIT_MAX_PIXELS", "3000")
    monkeypatch.setattr(demo, "MOST_BYTES", 20_000)
    cases: tuple[tuple[Any, dict[str, str], int, str], ...] = (
        (b"no image", BYTES, 400, "An image of 8 bytes is not an image that can be read"),
        (b"", BYTES, 400, "An image of 0 bytes is not an image that can be read"),
        (photo()[:60], BYTES, 400, "or is damaged; give a JPEG"),
        (photo(height=60, width=60), BYTES, 400, "has 3600 pixels"),
        (bytes(20_001), BYTES, 413, "MiB, the most that this page takes"),
        (iter([bytes(15_000)] * 2), BYTES, 413, "MiB, the most that this page takes"),
        (photo(), {"Content-Type": "text/plain"}, 400, "as application/octet-stream"),
    )
    for contents, headers, status, sentence in cases:
        answer = ask(port, contents, headers)
        assert answer[0] == status, sentence
        assert sentence in json.loads(answer[2])["error"]
        assert ask(port, photo())[0] == 200


def test_another_site_cannot_use_it(port: int) -> None:
    """A name that leads here is refused, and so is a question whether a site may send images."""
    assert ask(port, headers={"Host": "evil.example"})[0] == 400
    connection = http.client.HTTPConnection(demo.HOST, port, timeout=300)
    connection.request("OPTIONS", "/look", headers={"Origin": "http://evil.example"})
    assert connection.getresponse().status == 405
    connection.close()


def test_several_at_once_get_their_own_answers(port: int) -> None:
    """Answers to images that arrive together are those to the same images one by one."""
    photos = [photo(seed) for seed in range(3)]
    expected = [json.loads(ask(port, each)[2]) for each in photos]
    assert len({str(each["classes"]) for each in expected}) == len(photos)
    with concurrent.futures.ThreadPoolExecutor(len(photos)) as pool:
        actual = list(pool.map(lambda each: json.loads(ask(port, each)[2]), photos))
    assert [each["classes"] for each in actual] == [each["classes"] for each in expected]
    assert [each["view"]["image"] for each in actual] == [e["view"]["image"] for e in expected]


def test_a_model_that_is_half_of_one_is_shown_as_far_as_it_goes() -> None:
    """The page says why there are no maps, or why it names no class."""
    other = keras.Sequential(
        [keras.Input((8, 8, 3)), keras.layers.Flatten(), keras.layers.Dense(7)]
    )
    said = demo.look(opened(other), np.zeros((9, 9, 3), np.uint8))
    assert (len(said["classes"]), said["view"]) == (5, None)
    assert "contains 0 Vision Transformers" in said["note"]

    features = served_model(classes=None, classifier_activation=None)
    said = demo.look(opened(features, ()), np.zeros((32, 48, 3), np.uint8))
    assert said["classes"] == []
    assert "no classifier" in said["note"]
    assert said["view"]["maps"][0]["name"] == "Attention rollout"


def test_a_port_that_is_taken_is_said() -> None:
    """Asked for no port, another is taken; the page is served at this machine alone."""
    with socket.create_server((demo.HOST, 0)) as taken:
        number = taken.getsockname()[1]
        with pytest.raises(OSError, match=rf"Port {number} of 127.0.0.1 cannot be used .*--port"):
            demo.listen(number)
    with demo.listen() as first, demo.listen() as second:
        assert demo.address(first) != demo.address(second)
        assert {each.getsockname()[0] for each in (first, second)} == {"127.0.0.1"}


def test_what_is_missing_is_named(
    model: VisionTransformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pip command is in the error."""
    for missing in ("starlette.applications", "uvicorn", "jinja2"):
        rendering._templates.cache_clear()
        with monkeypatch.context() as patched:
            patched.setitem(sys.modules, missing, None)
            name = missing.partition(".")[0]
            with pytest.raises(ImportError, match=f"run: pip install .*{name}"):
                demo.make_server(demo.make_app(opened(model)))


@pytest.mark.full
def test_ctrl_c_ends_it(tmp_path: Path) -> None:
    """The address is printed, the page answers, and an interruption is no error.

    Nor is it one while a browser sends a part of an image, and no more.
    """
    served_model().save(tmp_path / "pets.keras")
    command = ["-m", "keras_vit", "demo", str(tmp_path / "pets.keras"), "--port", "0"]
    process = processes.Process([*command, "--no-browser"])
    line = process.stdout.readline()
    match = re.fullmatch(r"Open http://127.0.0.1:(\d+) in a browser; Ctrl-C ends it.\n", line)
    assert match is not None, line
    assert json.loads(ask(int(match[1]), photo())[2])["view"] is not None
    sending = http.client.HTTPConnection(demo.HOST, int(match[1]))
    sending.putrequest("POST", "/look")
    headers = {"Content-Length": "1000", "Expect": "100-continue"}
    for name, value in (*BYTES.items(), *headers.items()):
        sending.putheader(name, value)
    sending.endheaders()
    assert sending.sock.recv(1000).startswith(b"HTTP/1.1 100")  # it waits for the image
    sending.send(photo()[:60])
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=300)
    sending.close()
    following = f"Next: keras-vit export {tmp_path / 'pets.keras'} --out export"
    assert out.splitlines() == ["The page is closed.", following]
    assert "keras" not in errors  # TensorFlow's own lines depend on the log level of the tests
    assert "Traceback" not in errors
    assert process.returncode == 0


@pytest.mark.full
def test_the_page_shows_what_is_dropped(
    port: int, model: VisionTransformer, tmp_path: Path
) -> None:
    """In a browser, of photos and of what is none; its controls work, and nothing else is asked."""
    address = f"http://{demo.HOST}:{port}/"
    assert browser.check_page(address) == []
    (tmp_path / "photo.png").write_bytes(photo(4))
    (tmp_path / "text.png").write_bytes(b"no image")
    (expected,) = evaluation.predict(model, [data.read_image(photo(4))], labels=LABELS)
    with (
        browser.opened_browser() as chromium,
        browser.opened_page(chromium, address, width=390) as (opened, heard),
    ):
        opened.set_input_files("#file", tmp_path / "photo.png")
        opened.wait_for_selector("#viewer:not([hidden])")
        shown = [row.inner_text().split() for row in opened.locator("#classes tr").all()]
        assert shown == [[each.label, f"{each.probability:.2%}"[:-1], "%"] for each in expected]
        assert [*browser._press_all(opened), *heard] == []
        opened.set_input_files("#file", tmp_path / "text.png")
        opened.wait_for_selector("#error:not([hidden])")
        assert "is not an image that can be read" in opened.inner_text("#error")
