"""Served predictions: golden and hostile requests over gRPC and REST, batching, versions."""

import base64
import concurrent.futures
import contextlib
import json
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import image_files
import numpy as np
import pytest
import tensorflow as tf
from exported import (
    LABELS,
    bmp_of_declared_size,
    gif_of_declared_size,
    jpeg_of_declared_size,
    photo,
    png_of_declared_size,
    served_model,
    strings,
)

import keras_vit
from keras_vit import VisionTransformer, data
from keras_vit.exporting import export, savedmodel

pytestmark = pytest.mark.full

grpc = pytest.importorskip("grpc")
pytest.importorskip("tensorflow_serving.apis", reason="pip install tensorflow-serving-api")

from serving_harness.client import IMAGE, Served, serving  # noqa: E402

LIMIT = 1e-5  # float32 rounding in another order of the same sums; measured up to 1e-6
SIZE = (32, 48)

# What is sent as an image, and a word of the answer.
HOSTILE = {
    "empty": (b"", "empty"),
    "no image": (b"<html>404</html>", "no image of a known format"),
    "WebP": (photo(7, kind="WEBP"), "WebP is not decoded here"),
    "truncated JPEG": (photo(kind="JPEG")[:400], "damaged"),
    "truncated PNG": (photo()[:400], "damaged"),
    "one pixel": (photo(height=1, width=1), "single pixel"),
    "PNG bomb": (png_of_declared_size(30_000, 30_000), "more pixels than"),
    "JPEG bomb": (jpeg_of_declared_size(30_000, 30_000), "more pixels than"),
    "GIF bomb": (gif_of_declared_size(30_000, 30_000), "more pixels than"),
    "BMP bomb": (bmp_of_declared_size(30_000, 30_000), "more pixels than"),
}
# The kit's settings, which the tests of merging could not wait for, with smaller sizes.
BATCHING = """
    max_batch_size { value: 32 }
    enable_large_batch_splitting { value: true }
    max_execution_batch_size { value: 8 }
    allowed_batch_sizes: [1, 2, 4, 8, 32]
    batch_timeout_micros { value: 200000 }
    num_batch_threads { value: 2 }
"""
FILES = {
    "PNG": photo(0),
    "JPEG": photo(1, height=61, width=17, kind="JPEG"),
    "GIF": photo(2, height=20, width=90, kind="GIF"),
    "BMP": photo(3, kind="BMP"),
    "grey": photo(4, mode="L"),
    "RGBA": photo(5, mode="RGBA"),
    "palette": photo(6, mode="P"),
    "two pixels": photo(8, height=2, width=1),
}


@pytest.fixture(scope="module")
def model() -> VisionTransformer:
    return served_model()


@pytest.fixture(scope="module")
def directory(model: VisionTransformer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("serving") / "pets"
    export(model, path, labels=LABELS, top_k=3)
    return path


@pytest.fixture(scope="module")
def served(directory: Path) -> Iterator[Served]:
    with serving(directory) as server:
        yield server


@pytest.fixture
def pixels() -> np.ndarray:
    return np.random.default_rng(3).integers(0, 256, (2, *SIZE, 3), np.uint8)


def evaluated(model: VisionTransformer, contents: Iterable[bytes]) -> np.ndarray:
    """What `evaluate` and `predict` would compute for these files."""
    resized = [data.resize_image(data.decode_image(content), size=SIZE) for content in contents]
    return np.asarray(model(np.stack(resized)))


def run_client(name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Runs a client of examples/serving as a user does."""
    script = Path(keras_vit.__file__).parents[1] / "examples" / "serving" / name
    command = [sys.executable, str(script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def b64(content: bytes) -> dict[str, str]:
    return {"b64": base64.b64encode(content).decode()}


def test_files_of_every_kind_in_one_batch_are_classified_as_evaluation_does(
    served: Served, model: VisionTransformer
) -> None:
    """JPEG, PNG, GIF, BMP, grey, RGBA, palette, each of its own size, in one request."""
    expected = evaluated(model, FILES.values())
    answer = served.predict("serving_default", image_bytes=strings(*FILES.values()))
    best = np.argsort(-expected, axis=1)[:, :3]
    np.testing.assert_array_equal(answer["class_ids"], best)
    np.testing.assert_allclose(answer["scores"], np.take_along_axis(expected, best, 1), atol=LIMIT)
    named = [[label.decode() for label in row] for row in answer["classes"]]
    assert named == [[LABELS[index] for index in row] for row in best]


def test_photos_are_served_upright_and_resized_as_the_model_says(
    served: Served, model: VisionTransformer
) -> None:
    """All eight orientations, and a photo that shrinks: what the model makes of Pillow's pixels."""
    photos = [image_files.photo(turn, "PNG") for turn in range(1, 9)]
    upright = [image_files.as_pillow(contents) for contents in photos]
    resized = np.stack([data.resize_image(pixels, size=SIZE) for pixels in upright])
    expected = np.asarray(model(resized))
    answer = served.predict("serving_default", image_bytes=strings(*photos))
    best = np.argsort(-expected, axis=1)[:, :3]

    np.testing.assert_allclose(answer["scores"], np.take_along_axis(expected, best, 1), atol=LIMIT)
    plain = np.stack([data.resize_image(one, size=SIZE, antialias=False) for one in upright])
    assert np.abs(np.asarray(model(plain)) - expected).max() > LIMIT


def test_every_tensor_signature_answers_as_the_model(
    served: Served, model: VisionTransformer, pixels: np.ndarray
) -> None:
    """gRPC: image_tensor, pixels and features equal the model, names and types as documented."""
    expected = np.asarray(model(pixels))
    values = np.float32(pixels / 127.5 - 1)
    for answer in (
        served.predict("image_tensor", images=pixels),
        served.predict("pixels", pixel_values=values),
    ):
        assert sorted(answer) == ["logits", "probabilities"]
        np.testing.assert_allclose(answer["probabilities"], expected, atol=LIMIT)
        softmax = tf.nn.softmax(answer["logits"])
        np.testing.assert_allclose(softmax, expected, atol=LIMIT)
    features = served.predict("features", images=pixels)["features"]
    pooled = model.features(pixels.astype("float32"), ["pooling"])["pooling"]
    np.testing.assert_allclose(features, pooled, atol=LIMIT)


def test_examples_are_classified(served: Served, model: VisionTransformer) -> None:
    """gRPC Classify takes tf.Examples and answers labels with scores."""
    from tensorflow_serving.apis import classification_pb2

    request = classification_pb2.ClassificationRequest()
    request.model_spec.name, request.model_spec.signature_name = served.name, "classify"
    for content in list(FILES.values())[:2]:
        example = tf.train.Example.FromString(savedmodel.example(content))
        request.input.example_list.examples.append(example)
    answer = served.stub().Classify(request, timeout=60)
    expected = evaluated(model, list(FILES.values())[:2])
    for row, classified in zip(expected, answer.result.classifications, strict=True):
        best = np.argsort(-row)[:3]
        assert [each.label for each in classified.classes] == [LABELS[index] for index in best]
        scores = [each.score for each in classified.classes]
        np.testing.assert_allclose(scores, row[best], atol=LIMIT)


def test_rest_in_rows_and_columns(
    served: Served, model: VisionTransformer, pixels: np.ndarray
) -> None:
    """REST: bare and named b64, integer pixels in rows and columns, floats."""
    content = FILES["JPEG"]
    best = LABELS[evaluated(model, [content])[0].argmax()]
    for body in ({"instances": [b64(content)]}, {"instances": [{"image_bytes": b64(content)}]}):
        code, answer = served.rest(body)
        assert code == 200
        assert answer["predictions"][0]["classes"][0] == best
    code, answer = served.rest({"inputs": b64(content) and [b64(content)]})
    assert (code, answer["outputs"]["classes"][0][0]) == (200, best)
    expected = np.asarray(model(pixels))
    rows = {"signature_name": "image_tensor", "instances": pixels.tolist()}
    answer = served.rest(rows)[1]["predictions"]
    probabilities = [row["probabilities"] for row in answer]
    np.testing.assert_allclose(probabilities, expected, atol=LIMIT)
    columns = {"signature_name": "features", "inputs": {"images": pixels.tolist()}}
    assert np.shape(served.rest(columns)[1]["outputs"]) == (2, 24)  # one output: its name goes
    values = (pixels / 127.5 - 1).tolist()
    answer = served.rest({"signature_name": "pixels", "inputs": values})[1]["outputs"]
    np.testing.assert_allclose(answer["probabilities"], expected, atol=LIMIT)


def test_a_hostile_image_fails_alone(served: Served, model: VisionTransformer) -> None:
    """gRPC and REST answer every image of a batch; each bad one has a reason and no answer."""
    contents = [content for content, _ in HOSTILE.values()]
    rows = strings(*contents, FILES["PNG"])
    answer = served.predict("serving_default", image_bytes=rows)
    for name, status in zip(HOSTILE, answer["status"], strict=False):
        assert HOSTILE[name][1] in status.decode(), name
    assert not answer["scores"][:-1].any()
    assert (answer["class_ids"][:-1] == -1).all()
    assert not any(answer["classes"][:-1].ravel())
    expected = evaluated(model, [FILES["PNG"]])[0]
    assert answer["status"][-1] == b"OK"
    np.testing.assert_allclose(answer["scores"][-1], np.sort(expected)[:-4:-1], atol=LIMIT)

    code, body = served.rest({"instances": [b64(contents[0]), b64(FILES["PNG"])]})
    bad, good = body["predictions"]
    assert code == 200
    assert "empty" in bad["status"]
    assert (bad["scores"], bad["classes"]) == ([0.0] * 3, [""] * 3)
    assert (good["status"], good["classes"][0]) == ("OK", LABELS[expected.argmax()])


def test_only_the_bad_example_has_no_class(served: Served, model: VisionTransformer) -> None:
    """What is no tf.Example, or has no image, gets empty labels beside one that is classified."""
    rows = strings(b"junk", savedmodel.example(FILES["JPEG"]), savedmodel.example(b"junk"))
    answer = served.predict("classify", inputs=rows)
    expected = evaluated(model, [FILES["JPEG"]])[0]
    np.testing.assert_allclose(answer["scores"][1], np.sort(expected)[:-4:-1], atol=LIMIT)
    assert not answer["scores"][[0, 2]].any()
    assert not any(answer["classes"][[0, 2]].ravel())


def test_wrong_keys_types_and_shapes_are_refused(
    served: Served, model: VisionTransformer, pixels: np.ndarray
) -> None:
    """A wrong input name, type, shape, signature, model or JSON is refused with a reason."""
    wrong: dict[str, tuple[dict[str, Any], str]] = {
        "key": ({"signature": "serving_default", "wrong": strings(b"")}, "Sent extra: {wrong}"),
        "type": (
            {"signature": "image_tensor", "images": pixels.astype("float32")},
            "uint8 but float is provided",
        ),
        "shape": (
            {"signature": "image_tensor", "images": pixels[:, :16]},
            "is not compatible with expected shape",
        ),
        "text": ({"signature": "serving_default", "image_bytes": np.zeros(1)}, "string but double"),
    }
    for inputs, word in wrong.values():
        arguments = dict(inputs)
        with pytest.raises(grpc.RpcError) as refused:
            served.predict(arguments.pop("signature"), **arguments)
        assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT, word
        assert word in refused.value.details()
    with pytest.raises(grpc.RpcError, match="not found"):
        served.predict("no-such-signature", images=pixels)
    with pytest.raises(grpc.RpcError, match="Servable not found"):
        served.predict("image_tensor", name="other", images=pixels)
    bodies: tuple[Any, ...] = (
        {"instances": [{"wrong": b64(b"")}]},
        {"instances": [{"b64": "not base64!"}]},
        {"signature_name": "image_tensor", "instances": (pixels / 2).tolist()},
        {"signature_name": "image_tensor", "instances": [[1, [2]]]},
        {"signature_name": "image_tensor", "instances": [[[[256, 0, 0]]]]},
        {"instances": []},
        {},
        b"{",
    )
    for body in bodies:
        code, answer = served.rest(body)
        assert code == 400, body
        assert answer["error"]
    assert np.isfinite(served.predict("image_tensor", images=pixels)["logits"]).all()


@pytest.mark.skipif(bool(IMAGE), reason="the real server does not tell how many it has run")
def test_the_server_warms_up_every_batch_size_and_every_signature(served: Served) -> None:
    """Every batch size of one signature and one of each other were recorded, and all ran."""
    assert served.status()["warmed"] == len(savedmodel.BATCH_SIZES) + 4


@pytest.fixture(scope="module")
def batching(
    directory: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Served, Path]]:
    """A server that batches, and the copy that it serves, which may get another version."""
    path = tmp_path_factory.mktemp("batching") / "pets"
    shutil.copytree(directory, path)
    with serving(path, BATCHING) as server:
        yield server, path


def test_merged_padded_and_split_requests_equal_single_ones(
    batching: tuple[Served, Path], model: VisionTransformer
) -> None:
    """Requests that the server batches answer what they answer alone."""
    server, _ = batching
    pixels = np.random.default_rng(4).integers(0, 256, (6, *SIZE, 3), np.uint8)
    expected = np.asarray(model(pixels))
    parts = [pixels[:1], pixels[1:3], pixels[3:6]]  # six rows: padded to eight
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(server.predict, "image_tensor", images=part) for part in parts]
        answers = [future.result()["probabilities"] for future in asked]
    np.testing.assert_allclose(np.concatenate(answers), expected, atol=LIMIT)


def test_a_bad_client_fails_alone_in_merged_batches(
    batching: tuple[Served, Path], model: VisionTransformer
) -> None:
    """Good requests that share their batches with bad ones are answered as alone."""
    server, _ = batching
    expected = evaluated(model, [FILES["PNG"]])[0].max()
    bad = list(HOSTILE.values())
    rows = [FILES["PNG"] if place % 2 else bad[place % len(bad)][0] for place in range(24)]
    before = server.status().get("batches", {})
    with concurrent.futures.ThreadPoolExecutor(24) as pool:
        asked = [
            pool.submit(server.predict, "serving_default", image_bytes=strings(row)) for row in rows
        ]
        answers = [future.result() for future in asked]
    for row, answer in zip(rows, answers, strict=True):
        is_good = row == FILES["PNG"]
        assert (answer["status"][0] == b"OK") == is_good
        np.testing.assert_allclose(answer["scores"][0, 0], expected * is_good, atol=LIMIT)
    if not IMAGE:
        after = server.status()["batches"]
        assert sum(after.values()) - sum(before.values()) < len(rows)  # they were merged


def test_a_request_larger_than_a_batch_is_split_or_refused(
    batching: tuple[Served, Path], model: VisionTransformer
) -> None:
    """20 images run as batches of at most 8; 33 are more than the settings allow."""
    server, _ = batching
    pixels = np.random.default_rng(5).integers(0, 256, (33, *SIZE, 3), np.uint8)
    answer = server.predict("image_tensor", images=pixels[:20])
    np.testing.assert_allclose(answer["probabilities"], np.asarray(model(pixels[:20])), atol=LIMIT)
    with pytest.raises(grpc.RpcError, match="larger than maximum input batch size 32") as refused:
        server.predict("image_tensor", images=pixels)
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT


def test_metadata_versions_and_labels(served: Served) -> None:
    """The REST addresses beside predictions answer as documented, and refuse what is not there."""
    code, answer = served.get("/metadata")
    signatures = answer["metadata"]["signature_def"]["signature_def"]
    assert (code, answer["model_spec"]["name"]) == (200, served.name)
    assert sorted(signatures["serving_default"]["outputs"]) == [
        *("class_ids", "classes", "scores", "status")
    ]
    assert signatures["image_tensor"]["inputs"]["images"]["dtype"] == "DT_UINT8"
    row = {"instances": [b64(FILES["PNG"])]}
    assert served.rest(row, f"{served.name}/versions/1:predict")[0] == 200
    assert served.rest(row, f"{served.name}/versions/7:predict")[0] == 404
    assert served.rest(row, f"{served.name}/labels/stable:predict")[0] == 400
    assert served.get("/nothing")[0] == 400


def test_a_new_version_replaces_the_old_one_while_it_is_served(
    batching: tuple[Served, Path],
) -> None:
    """Exporting again makes version 2, which the running server picks up."""
    server, path = batching
    other = served_model(num_layers=1)
    other.get_layer("head").bias.assign(np.arange(7.0) * 3)  # another favourite than `model`
    assert server.status()["model_version_status"][0]["version"] == "1"
    export(other, path, labels=LABELS, verify=False)
    for _ in range(2400):  # two minutes
        if server.status()["model_version_status"][0]["version"] == "2":
            break
        time.sleep(0.05)
    answer = server.predict("serving_default", image_bytes=strings(FILES["PNG"]))
    assert answer["class_ids"][0, 0] == evaluated(other, [FILES["PNG"]])[0].argmax()
    record = json.loads((path / "2/assets.extra/verification.json").read_text())
    assert record["verified"] is False


@pytest.mark.parametrize("kind", ["rest", "grpc"])
def test_the_clients_print_labels(
    kind: str, served: Served, model: VisionTransformer, tmp_path: Path
) -> None:
    """Each client sends files in batches and prints the labels; a bad file is told and exits 1."""
    files = []
    for name in ("PNG", "JPEG", "grey", "RGBA"):
        files.append(tmp_path / f"{name}.image")
        files[-1].write_bytes(FILES[name])
    where = {
        "rest": ("--url", f"http://127.0.0.1:{served.rest_port}"),
        "grpc": ("--address", f"127.0.0.1:{served.grpc_port}"),
    }[kind]
    bad = tmp_path / "bad.jpg"
    bad.write_bytes(b"no image")
    options = (*where, "--model", served.name, "--batch", 2)
    process = run_client(f"{kind}_client.py", *files, bad, *options)
    expected = evaluated(model, [file.read_bytes() for file in files])
    for line, file, row in zip(process.stdout.splitlines(), files, expected, strict=True):
        best = row.argmax()
        assert line.startswith(f"{file}: {LABELS[best]} {row[best]:.1%}, ")
    assert process.returncode == 1
    assert f"{bad}: The file is no image" in process.stderr


@pytest.mark.skipif(bool(IMAGE), reason="is about the clients alone")
@pytest.mark.parametrize("kind", ["rest", pytest.param("grpc", marks=pytest.mark.full)])
def test_the_clients_wait_for_a_server_that_is_not_up_yet(
    kind: str, served: Served, tmp_path: Path
) -> None:
    """The clients try again, also after a lost connection, and give up after the retries."""
    file = tmp_path / "image.png"
    file.write_bytes(FILES["PNG"])
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))  # nobody else gets it, and nothing listens
    port = listener.getsockname()[1]
    where = {
        "rest": ("--url", f"http://127.0.0.1:{port}"),
        "grpc": ("--address", f"127.0.0.1:{port}"),
    }[kind]
    options = (file, *where, "--model", served.name, "--timeout", 300)
    assert run_client(f"{kind}_client.py", *options, "--retries", 0).returncode == 1

    def pump(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while content := source.recv(65536):
                sink.sendall(content)
            sink.shutdown(socket.SHUT_WR)

    def forward() -> None:
        listener.accept()[0].close()
        target = served.rest_port if kind == "rest" else served.grpc_port
        with (
            listener.accept()[0] as client,
            socket.create_connection(("127.0.0.1", target)) as server,
        ):
            back = threading.Thread(target=pump, args=(server, client))
            back.start()
            pump(client, server)
            back.join()

    with listener:
        listener.listen()
        proxy = threading.Thread(target=forward)
        proxy.start()
        process = run_client(f"{kind}_client.py", *options, "--retries", 6)
        proxy.join()
    assert process.returncode == 0, process.stderr
    assert str(file) in process.stdout
